package integration

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentshim/agentshim/harness"
)

// Where the agents' model is, and the key that it wants.
const modelHost, modelKey = "model.example", "sk-model-key"

// agentCLI is a real agent of the catalogue: how it finds its model, and how it goes on
// with the last conversation.
type agentCLI struct {
	provider string
	// key is the variable that auth api-key takes.
	key string
	env map[string]string
	// options are for every run, again and words (in front of them) for the next one.
	options, again map[string]any
	words          []string
	// lost is what it says when it can't reach its model. Most try again for longer than
	// the run's timeout.
	lost string
}

func agentCLIs() []agentCLI {
	const base = "https://" + modelHost
	list := []agentCLI{
		{
			provider: "claude", key: "ANTHROPIC_API_KEY", again: map[string]any{"continue": true}, lost: "API Error: ",
			env: map[string]string{"ANTHROPIC_BASE_URL": base, "CLAUDE_CODE_MAX_RETRIES": "1"},
		},
		{
			provider: "codex", key: "CODEX_API_KEY", words: []string{"resume", "--last"}, lost: "waiting for network",
			options: map[string]any{"model": "stub", "config": []string{
				`model_provider="stub"`,
				`model_providers.stub={name="stub", base_url="` + base + `/v1", wire_api="responses", env_key="CODEX_API_KEY"}`,
			}},
		},
		{
			provider: "opencode", key: "OPENCODE_API_KEY", again: map[string]any{"continue": true},
			options: map[string]any{"model": "stub/stub"},
			env: map[string]string{"OPENCODE_CONFIG_CONTENT": `{"provider": {"stub": {
"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "` + base + `/v1", "apiKey": "{env:OPENCODE_API_KEY}"}, "models": {"stub": {}}}}}`},
		},
		{
			provider: "gemini", key: "GEMINI_API_KEY", again: map[string]any{"resume": "latest"}, lost: "fetch failed",
			options: map[string]any{"model": "gemini-2.5-pro"}, env: map[string]string{"GOOGLE_GEMINI_BASE_URL": base},
		},
	}
	if soaking() { // it takes as long as the others together
		list = append(list, agentCLI{
			provider: "qwen", key: "OPENAI_API_KEY", again: map[string]any{"continue": true}, lost: "Connection error",
			options: map[string]any{"model": "stub"}, env: map[string]string{"OPENAI_BASE_URL": base + "/v1"},
		})
	}
	return list
}

// modelWorld adds the model's API to the world.
var modelWorld = sync.OnceValue(func() error {
	w, err := sharedWorld()
	if err != nil {
		return err
	}
	w.web.HandleFunc(modelHost+"/", serveModel)
	w.zone.set(modelHost, publicAddr)
	return nil
})

// fields are a harness file's for the agent, on a workspace and under an allow-list.
func (a agentCLI) fields(w *world, workspace string, again bool, allow ...any) spec {
	env := map[string]string{}
	maps.Copy(env, a.env)
	options, words := joined(a.options, nil), []string{}
	if again {
		options, words = joined(options, a.again), append(words, a.words...)
	}
	return spec{
		"image": "agentshim/agent:test",
		"harness": map[string]any{
			"provider": a.provider, "auth": "api-key", "env": env, "options": options, "prefixArgs": words,
		},
		"workspace":      map[string]any{"source": workspace, "mode": "writable"},
		"caCertificates": []string{w.caFile()},
		"caches":         []any{map[string]any{"name": "history", "target": a.history()}},
		"egress":         map[string]any{"mode": "allow-list", "allow": allow},
	}
}

// joined is a map with another one's entries in it, too.
func joined(m, more map[string]any) map[string]any {
	all := map[string]any{}
	maps.Copy(all, m)
	maps.Copy(all, more)
	return all
}

// history is the folder that a conversation outlasts a run in.
func (a agentCLI) history() string {
	p, _ := harness.FindProvider(a.provider, nil)
	return p.History[0]
}

const (
	fetch = "#run curl -sS -m 20 https://evil.example/; echo exit $?\n"
	// A65, A97: what the host's agents obey, and the agent's own program.
	spoil = "#run echo >>/workspace/.claude/settings.json; echo >>/usr/local/bin/%s\n"
	// The last line is none of the model's: an agent may put its words around a prompt.
	task = "Please do this.\n#read /workspace/note.txt\n#edit /workspace/note.txt old new\n" + fetch + spoil + "Thank you."
	next = "And then?\n" + fetch + "#recall\nThank you."
)

// TestAgents: real agents work on a workspace as they do without a sandbox, reach
// their model and nothing else, and go on with the conversation in the next run.
func TestAgents(t *testing.T) {
	w := outside(t)
	w.settle()
	if err := modelWorld(); err != nil {
		t.Fatal(err)
	}
	before := w.zone.questions()
	flows := w.left(t, func() {
		atOnce(t, []setup{setups[0], setups[3]}, func(t *testing.T, s setup) {
			for _, a := range agentCLIs() {
				t.Run(a.provider, func(t *testing.T) {
					t.Parallel()
					a.try(t, s, w)
				})
			}
		})
	})
	// Whatever else an agent asks for, and some ask for a lot, is not even looked up.
	for _, flow := range flows {
		if flow != "tcp "+at(publicAddr, 443) && flow != "tcp "+at(otherAddr, 443) && flow != "udp "+at(worldDNS, 53) {
			t.Errorf("left: %s", flow)
		}
	}
	for name, n := range w.zone.questions() {
		if n > before[name] && !strings.HasPrefix(name, modelHost) && !strings.HasPrefix(name, "evil.example") {
			t.Errorf("looked up: %s", name)
		}
	}
}

// try is three runs: one that works, the next one of the conversation, and one that
// may not reach its model.
func (a agentCLI) try(t *testing.T, s setup, w *world) {
	dir, state := s.folder(t), s.private(t)
	note := filepath.Join(dir, "note.txt")
	place(t, note, []byte("old\n"), 0o666)
	place(t, filepath.Join(dir, ".claude", "settings.json"), []byte("{}"), 0o666)
	s.own(t, dir)
	run := func(prompt string, fields spec) result {
		t.Helper()
		c := call{Net: w, State: state, Stdin: strings.NewReader(prompt), Timeout: 4 * time.Minute, Env: []string{a.key + "=" + modelKey}}
		return s.call(t, c, "exec", "--spec", s.write(t, fields))
	}
	first := a.fields(w, dir, false, modelHost)
	s.dropCaches(t, s.write(t, first))

	r := run(fmt.Sprintf(task, a.provider), first).ok(t)
	wantText(t, r.Stdout, "The model is done.", "exit 6") // curl's: the name does not exist
	wantText(t, r.Stderr, refusal("evil.example"))
	wantText(t, r.Stdout, "settings.json: Read-only file system", "/usr/local/bin/"+a.provider+": Permission denied")
	if b, err := os.ReadFile(note); string(b) != "new\n" {
		t.Errorf("the workspace's file has %q: %v", b, err)
	}

	// Control: what was refused works with its entry.
	r = run(next, a.fields(w, dir, true, modelHost, "evil.example")).ok(t)
	wantText(t, r.Stdout, "recalled: #read /workspace/note.txt", "world sni=evil.example")
	if strings.Contains(r.Stderr, refusal("evil.example")) {
		t.Errorf("refused: %s", r.Stderr)
	}

	lost := a.fields(w, dir, false, "other.example")
	lost["timeout"] = "40s"
	r = run(fmt.Sprintf(task, a.provider), lost)
	wantText(t, r.Stderr, refusal(modelHost))
	wantText(t, r.Stdout+r.Stderr, a.lost)
	if r.Code == 0 || strings.Contains(r.Stdout, "The model is done.") {
		t.Errorf("exit %d without the model: %s", r.Code, r.Stdout)
	}
}

func refusal(name string) string {
	return "name " + name + ": unlisted; to allow it, add \"" + name + "\" to egress.allow"
}
