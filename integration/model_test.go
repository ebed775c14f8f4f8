package integration

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
)

// talk is what a request says, in any of the APIs.
type talk struct {
	// prompts are the user's that hold steps, the oldest first.
	prompts []string
	// results are what the tools gave since the last prompt.
	results []string
	offered []offer
	stream  bool
}

// offer is a tool of the agent's, with its parameters as a JSON Schema.
type offer struct {
	Name   string
	Schema json.RawMessage
}

// said adds a message of the user's, who may be the agent itself.
func (t *talk) said(text string) {
	if len(steps(text)) > 0 || recalls(text) {
		t.prompts, t.results = append(t.prompts, text), nil
	}
}

func (t *talk) gave(result string) { t.results = append(t.results, result) }

// use is a call of a tool, or for an empty name the answer's text.
type use struct {
	name string
	args map[string]any
	text string
}

// id is the call's, and the same for every run: agents only compare it.
func (t talk) id() string { return fmt.Sprintf("call_%d_%d", len(t.prompts), len(t.results)) }

// toolbox are the tools that agents offer, by the kind of step. A step's operands are
// its words; the last one has the line's rest.
var toolbox = []struct {
	kind, name string
	params     []string
}{
	{"run", "Bash", []string{"command"}},
	{"run", "bash", []string{"command"}},
	{"run", "run_shell_command", []string{"command"}},
	{"run", "exec_command", []string{"cmd"}},
	{"read", "Read", []string{"file_path"}},
	{"read", "read", []string{"filePath"}},
	{"read", "read_file", []string{"file_path"}},
	{"edit", "Edit", []string{"file_path", "old_string", "new_string"}},
	{"edit", "edit", []string{"filePath", "oldString", "newString"}},
	{"edit", "edit", []string{"file_path", "old_string", "new_string"}},
	{"edit", "replace", []string{"file_path", "old_string", "new_string"}},
}

// required are what some tools want besides; the model has nothing to say there.
var required = map[string]any{"description": "a step", "instruction": "a step", "is_background": false}

// prefixed are the text's with the prefix, without it.
func prefixed(text, prefix string) (out []string) {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), prefix); ok {
			out = append(out, rest)
		}
	}
	return out
}

// steps are the lines of a prompt that call tools.
func steps(text string) (out [][]string) {
	for _, line := range prefixed(text, "#") {
		kind, rest, _ := strings.Cut(line, " ")
		if kind == "run" || kind == "read" || kind == "edit" {
			out = append(out, []string{kind, rest})
		}
	}
	return out
}

func recalls(text string) bool { return slices.Contains(prefixed(text, "#"), "recall") }

// next is the model's whole mind.
func (t talk) next() use {
	if len(t.prompts) == 0 || len(t.offered) == 0 {
		return use{text: "ok"} // the agent asks for a title, or the like
	}
	last := t.prompts[len(t.prompts)-1]
	if todo := steps(last); len(t.results) < len(todo) {
		step := todo[len(t.results)]
		return t.call(step[0], step[1])
	}
	out := []string{"The model is done."}
	for _, r := range t.results {
		out = append(out, "tool: "+r[:min(len(r), 2<<10)])
	}
	if recalls(last) {
		for _, p := range t.prompts[:len(t.prompts)-1] {
			out = append(out, "recalled: #"+strings.Join(prefixed(p, "#"), "; #"))
		}
	}
	return use{text: strings.Join(out, "\n")}
}

func (t talk) call(kind, operands string) use {
	for _, tool := range toolbox {
		i := slices.IndexFunc(t.offered, func(o offer) bool { return o.Name == tool.name })
		if i < 0 || tool.kind != kind || !t.offered[i].takes(tool.params) {
			continue
		}
		args := map[string]any{}
		for name, value := range required {
			if t.offered[i].takes([]string{name}) {
				args[name] = value
			}
		}
		words := strings.SplitN(operands, " ", len(tool.params))
		for i, name := range tool.params[:len(words)] {
			args[name] = words[i]
		}
		return use{name: tool.name, args: args}
	}
	if kind == "edit" {
		return t.call("run", patch(strings.SplitN(operands, " ", 3)))
	}
	if kind == "read" {
		return t.call("run", "cat "+operands)
	}
	return use{text: "no tool to " + kind}
}

// patch is how Codex edits: its shell tool takes this for a call of its own.
func patch(w []string) string {
	return fmt.Sprintf("apply_patch <<'END'\n*** Begin Patch\n*** Update File: %s\n@@\n-%s\n+%s\n*** End Patch\nEND", w[0], w[1], w[2])
}

func (o offer) takes(params []string) bool {
	var s struct {
		Properties map[string]json.RawMessage
	}
	_ = json.Unmarshal(o.Schema, &s)
	return !slices.ContainsFunc(params, func(p string) bool { return s.Properties[p] == nil })
}

// event is one of a stream's. Data that is a string is sent as it is.
type event struct {
	name string
	data any
}

// api is one provider's: how a request reads, and how an answer is written, whole and
// as a stream's events.
type api struct {
	read  func(body []byte) (talk, error)
	whole func(t talk, u use) any
	parts func(t talk, u use) []event
}

// maxRequest bounds a request; an agent's with all its tools has 100 KiB.
const maxRequest = 8 << 20

// serveModel answers as the model providers' APIs do. What it wants done stands in the
// user's prompt: a line "#KIND OPERANDS" is one call of a tool that the agent offers
// (see toolbox), made in this order, one an answer. Then it says what the tools gave,
// and with a line "#recall" what the conversation's earlier prompts were.
func serveModel(w http.ResponseWriter, r *http.Request) {
	if !hasKey(r.Header) {
		http.Error(w, "the key is missing", http.StatusUnauthorized)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	for suffix, a := range apis {
		if r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, suffix) {
			sendAnswer(w, a, body, strings.HasPrefix(suffix, ":stream"))
			return
		}
	}
	switch {
	case strings.HasSuffix(r.URL.Path, "/count_tokens"), strings.HasSuffix(r.URL.Path, ":countTokens"):
		sendJSON(w, map[string]any{"input_tokens": 100, "totalTokens": 100})
	case strings.HasSuffix(r.URL.Path, "/models"):
		sendJSON(w, map[string]any{"object": "list", "data": []any{}, "models": []any{}})
	default:
		http.NotFound(w, r)
	}
}

// hasKey says that the request carries the key, in one of the APIs' headers.
func hasKey(h http.Header) bool {
	return h.Get("X-Api-Key") == modelKey || h.Get("X-Goog-Api-Key") == modelKey || h.Get("Authorization") == "Bearer "+modelKey
}

func sendAnswer(w http.ResponseWriter, a api, body []byte, stream bool) {
	t, err := a.read(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	u := t.next()
	if !t.stream && !stream {
		sendJSON(w, a.whole(t, u))
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for _, e := range a.parts(t, u) {
		if e.name != "" {
			fmt.Fprintf(w, "event: %s\n", e.name)
		}
		data, _ := e.data.(string)
		if data == "" {
			b, err := json.Marshal(e.data)
			if err != nil {
				return
			}
			data = string(b)
		}
		fmt.Fprintf(w, "data: %s\n\n", data)
	}
}

func sendJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}
