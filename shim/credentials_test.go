package shim

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/harness"
)

// accountOf reads the credentials of provider claude's account from a home with that file.
func accountOf(t *testing.T, credentials string) (*prepared, string) {
	t.Helper()
	home := t.TempDir()
	path := filepath.Join(home, ".claude", ".credentials.json")
	if credentials != "" {
		if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		mustWrite(t, path, credentials)
	}
	return readCredentials(t, "account", map[string]string{"HOME": home}), path
}

func readCredentials(t *testing.T, auth string, env map[string]string) *prepared {
	t.Helper()
	h, err := harness.Parse([]byte(`{"version":1,"image":"a","harness":{"provider":"claude","auth":"`+auth+`"}}`), t.TempDir(), harness.Overrides{})
	if err != nil {
		t.Fatal(err)
	}
	return &prepared{job: Job{Harness: h, LookupEnv: func(name string) (string, bool) {
		v, ok := env[name]
		return v, ok
	}}.withDefaults()}
}

// Of an account's file only the needed member goes in, and only that comes back.
func TestCredentialMembers(t *testing.T) {
	const host = `{"mcpOAuth": {"other": "s3cret"}, "claudeAiOauth": {"accessToken": "old"}}`
	p, path := accountOf(t, host)
	if err := p.readHomeFiles(); err != nil {
		t.Fatal(err)
	}
	f := p.files[0]
	if got := string(f.content); got != `{"claudeAiOauth":{"accessToken":"old"}}` {
		t.Fatalf("the agent gets %s", got)
	}
	for _, same := range []string{`{"claudeAiOauth":{"accessToken":"old"}}`, `{ "claudeAiOauth": {"accessToken": "old"}, "mcpOAuth": {"planted": 1}}`} {
		if w := writeBackOne(f, back{content: []byte(same)}); w.Outcome != BackUnchanged {
			t.Errorf("%s: %+v", same, w)
		}
	}
	for _, broken := range []string{`{}`, `[]`, `{"claudeAiOauth":null}`, "nonsense", `{"mcpOAuth":{}}`} {
		if w := writeBackOne(f, back{content: []byte(broken)}); w.Outcome != BackKept || strings.Contains(w.Detail, "s3cret") {
			t.Errorf("%s: %+v", broken, w)
		}
	}
	mustRemain(t, path, host)
	if w := writeBackOne(f, back{content: []byte(`{"claudeAiOauth":{"accessToken":"new"},"mcpOAuth":{"other":"planted"},"more":1}`)}); w.Outcome != BackReplaced {
		t.Fatalf("%+v", w)
	}
	mustRemain(t, path, "{\n  \"claudeAiOauth\": {\n    \"accessToken\": \"new\"\n  },\n  \"mcpOAuth\": {\n    \"other\": \"s3cret\"\n  }\n}\n")
}

// What auth stands for and is not there is refused by name, with what to do.
func TestCredentialsMissing(t *testing.T) {
	for name, tt := range map[string]struct{ auth, credentials, want string }{
		"no file":           {"account", "", "~/.claude/.credentials.json"},
		"no such member":    {"account", `{"mcpOAuth":{"token":"s3cret"}}`, "lacks the members"},
		"no object":         {"account", `"s3cret"`, "lacks the members"},
		"an empty variable": {"api-key", "", "ANTHROPIC_API_KEY"},
	} {
		t.Run(name, func(t *testing.T) {
			var p *prepared
			if tt.auth == "account" {
				p, _ = accountOf(t, tt.credentials)
			} else {
				p = readCredentials(t, tt.auth, map[string]string{"ANTHROPIC_API_KEY": ""})
			}
			err := p.readValues()
			if !errors.Is(err, ReasonCredentials) || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "s3cret") {
				t.Errorf("got %v", err)
			}
			if hint := HintOf(err); !strings.Contains(hint, `"auth": "none"`) {
				t.Errorf("hint %q", hint)
			}
		})
	}
	p := readCredentials(t, "api-key", map[string]string{"ANTHROPIC_API_KEY": "k"})
	if err := p.readCallerEnv(); err != nil || p.values.Caller["ANTHROPIC_API_KEY"] != "k" {
		t.Errorf("the control: %v", err)
	}
}

// A provider's own form starts for a person alone.
func TestInteractive(t *testing.T) {
	text := func(s string) *string { return &s }
	base := func() Job { return readCredentials(t, "none", nil).job }
	for name, tt := range map[string]struct {
		change func(*Job)
		want   bool
	}{
		"on a terminal":       {func(*Job) {}, true},
		"no terminal":         {func(j *Job) { j.Terminal = nil }, false},
		"the file says never": {func(j *Job) { j.Harness.Terminal = "never" }, false},
		"words":               {func(j *Job) { j.Words = []string{"x"} }, false},
		"an empty prompt":     {func(j *Job) { j.Harness.Prompt = text("") }, false},
		"a prompt file":       {func(j *Job) { j.Harness.PromptFile = "x" }, false},
		"a command":           {func(j *Job) { j.Command = []string{"sh"} }, false},
		"no provider":         {func(j *Job) { j.Harness.Harness.Provided = nil }, false},
		"without such a form": {func(j *Job) { p := *j.Harness.Harness.Provided; p.Interactive = nil; j.Harness.Harness.Provided = &p }, false},
	} {
		t.Run(name, func(t *testing.T) {
			j := base()
			j.Terminal = os.Stdin
			tt.change(&j)
			if got := j.interactive(); got != tt.want {
				t.Errorf("got %v", got)
			}
		})
	}
}

// A provider has nothing to do without a prompt.
func TestEmptyPrompt(t *testing.T) {
	p := readCredentials(t, "none", nil)
	if err := p.readPrompt(); !errors.Is(err, ReasonPrompt) {
		t.Errorf("got %v", err)
	}
	p = readCredentials(t, "none", nil)
	p.job.Stdin = strings.NewReader(" ")
	if err := p.readPrompt(); err != nil {
		t.Errorf("the control: %v", err)
	}
}
