package integration

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// TestModel: in each API the model wants the tool that is offered, then says what it
// gave, whole or as a stream. Requests that no API can read are refused.
func TestModel(t *testing.T) {
	const prompt = `"Do.\n#run date\n#recall"`
	rows := []struct{ path, ask, told string }{
		{
			"/v1/messages", `{"tools":[{"name":"Bash","input_schema":{"properties":{"command":{}}}}],"messages":[{"role":"user","content":` + prompt + `}]}`,
			`{"tools":[{"name":"Bash"}],"messages":[{"role":"user","content":` + prompt + `},{"role":"user","content":[{"type":"tool_result","content":[{"type":"text","text":"noon"}]}]}]}`,
		},
		{
			"/v1/responses", `{"tools":[{"name":"exec_command","parameters":{"properties":{"cmd":{}}}}],"input":[{"role":"user","content":[{"text":` + prompt + `}]}]}`,
			`{"tools":[{"name":"exec_command"}],"input":[{"role":"user","content":[{"text":` + prompt + `}]},{"type":"function_call_output","output":"noon"}]}`,
		},
		{
			"/v1/chat/completions", `{"tools":[{"function":{"name":"bash","parameters":{"properties":{"command":{}}}}}],"messages":[{"role":"user","content":` + prompt + `}]}`,
			`{"tools":[{"function":{"name":"bash"}}],"messages":[{"role":"user","content":` + prompt + `},{"role":"tool","content":"noon"}]}`,
		},
		{
			"/v1beta/models/m:generateContent", `{"tools":[{"functionDeclarations":[{"name":"run_shell_command","parametersJsonSchema":{"properties":{"command":{}}}}]}],"contents":[{"role":"user","parts":[{"text":` + prompt + `}]}]}`,
			`{"tools":[{"functionDeclarations":[{"name":"run_shell_command"}]}],"contents":[{"role":"user","parts":[{"text":` + prompt + `}]},{"role":"user","parts":[{"functionResponse":{"response":{"output":"noon"}}}]}]}`,
		},
	}
	for _, r := range rows {
		for _, stream := range []bool{false, true} {
			name := r.path
			if stream {
				name = strings.Replace(name, ":generate", ":streamGenerate", 1)
			}
			t.Run(name, func(t *testing.T) {
				if got := askModel(t, name, r.ask, stream); !slices.ContainsFunc(got, isDate) {
					t.Errorf("the first answer calls nothing: %q", got)
				}
				got := strings.Join(askModel(t, name, r.told, stream), "\n")
				wantText(t, got, "The model is done.", "noon")
				if code := modelAnswer(t, name, "[]", modelKey).Code; code != http.StatusBadRequest {
					t.Errorf("nonsense is answered with %d", code)
				}
				if code := modelAnswer(t, name, r.ask, "other").Code; code != http.StatusUnauthorized {
					t.Errorf("a wrong key is answered with %d", code)
				}
			})
		}
	}
}

// isDate says that the text is the step's command, or a JSON object with it.
func isDate(text string) bool {
	var args map[string]string
	_ = json.Unmarshal([]byte(text), &args)
	return text == "date" || args["command"] == "date" || args["cmd"] == "date"
}

func modelAnswer(t *testing.T, path, body, key string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodPost, "https://"+modelHost+path, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer "+key)
	serveModel(w, r)
	return w
}

// askModel gives all texts of the answer, in any depth.
func askModel(t *testing.T, path, body string, stream bool) (texts []string) {
	t.Helper()
	if stream {
		body = `{"stream":true,` + body[1:]
	}
	w := modelAnswer(t, path, body, modelKey)
	answers := []string{w.Body.String()}
	if stream {
		answers = prefixed(w.Body.String(), "data: ")
	}
	for _, a := range answers {
		var v any
		if err := json.Unmarshal([]byte(a), &v); err != nil && a != "[DONE]" {
			t.Fatalf("%q: %v", a, err)
		}
		texts = append(texts, textsIn(v)...)
	}
	return texts
}

func textsIn(v any) (out []string) {
	switch v := v.(type) {
	case string:
		return []string{v}
	case []any:
		for _, e := range v {
			out = append(out, textsIn(e)...)
		}
	case map[string]any:
		for _, e := range v {
			out = append(out, textsIn(e)...)
		}
	}
	return out
}
