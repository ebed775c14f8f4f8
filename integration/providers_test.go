package integration

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/shim"
)

// standIn is a provider of the set-up's user that nobody else has: sh with scripts of the test's.
type standIn struct {
	name string
	// credential is the host's file of its account: members token and other.
	credential string
}

const credentialText = `{"other": "OTHER", "token": {"access": "TOKEN"}}`

// standIn makes one. headless and interactive are scripts; the first gets the prompt on its standard input.
func (s setup) standIn(t *testing.T, headless, interactive string) standIn {
	t.Helper()
	u, err := user.Lookup(s.account)
	if err != nil {
		t.Fatal(err)
	}
	p := standIn{name: "stand-in-" + hex.EncodeToString(random(t, 6))}
	home := filepath.Join(u.HomeDir, ".agentshim-test-"+p.name)
	p.credential = place(t, filepath.Join(home, "auth.json"), []byte(credentialText), 0o600)
	s.chown(t, home)
	t.Cleanup(func() { os.RemoveAll(home) })
	text, err := json.Marshal(map[string]any{
		"version": 1, "name": p.name, "title": "Stand-in", "binary": "sh",
		"headless":    map[string]any{"args": []string{"-c", headless, "agent"}, "promptMode": "stdin"},
		"interactive": map[string]any{"args": []string{"-c", interactive, "agent"}},
		"options":     map[string]any{"model": map[string]any{"flag": "--model"}, "max-turns": map[string]any{"flag": "--turns"}, "ask": map[string]any{"flag": "--ask", "switch": true}},
		"unattended":  map[string]any{"max-turns": 9},
		"env":         map[string]string{"NO_UPDATE": "1"},
		"seed":        []map[string]any{{"target": ".agent/settings.json", "json": map[string]any{"trusted": map[string]any{"{cwd}": true}}}},
		"auth": map[string]any{
			"account": map[string]any{"files": []map[string]any{{"source": "~/" + filepath.Base(home) + "/auth.json", "target": ".agent/auth.json", "members": []string{"token"}, "writeBack": true}}, "signIn": "sign in"},
			"api-key": map[string]any{"env": []string{"STAND_IN_KEY"}, "signIn": "export STAND_IN_KEY"},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(u.HomeDir, ".config/agentshim/providers")
	file := filepath.Join(dir, p.name+".json")
	place(t, file+".new", text, 0o644)
	s.chown(t, filepath.Dir(dir))
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(file) })
	return p
}

// TestProvider: the agent gets what its provider and auth name, and nothing else of them;
// what it refreshed comes back.
func TestProvider(t *testing.T) {
	const script = `echo "args: $*"; echo "prompt: $(cat)"; echo "env: $NO_UPDATE ${STAND_IN_KEY-none}"; tr -d ' \n' < ~/.agent/settings.json; echo
cat ~/.agent/auth.json 2>/dev/null && printf '{"token":{"access":"NEW"},"other":"PLANTED"}' > ~/.agent/auth.json; exit 3`
	each(t, func(t *testing.T, s setup) {
		p := s.standIn(t, script, "")
		file := s.write(t, spec{"harness": map[string]any{"provider": p.name, "auth": "account"}})
		r := s.call(t, call{Stdin: strings.NewReader("-do it\n\n")}, "exec", "--spec", file, "-max_turns", "3", "--ask", "--model=small")
		if r.Code != 3 {
			t.Fatalf("exit %d: %s", r.Code, r.Stderr)
		}
		wantText(t, r.Stdout, "args: --ask --turns 3 --model small\n", "prompt: -do it\n", "env: 1 none\n", `{"trusted":{"/home/agent":true}}`, `{"token":{"access":"TOKEN"}}`)
		if strings.Contains(r.Stdout, "OTHER") {
			t.Errorf("more of the credential went in than is needed: %s", r.Stdout)
		}
		b, err := os.ReadFile(p.credential)
		if err != nil || !strings.Contains(string(b), `"NEW"`) || !strings.Contains(string(b), `"OTHER"`) || strings.Contains(string(b), "PLANTED") {
			t.Errorf("the host has %s, %v", b, err)
		}

		t.Run("api-key", func(t *testing.T) {
			file := s.write(t, spec{"harness": map[string]any{"provider": p.name, "auth": "api-key"}})
			r := s.call(t, call{Env: []string{"STAND_IN_KEY=s3cret"}}, "exec", "--spec", file, "go", "--model", "x")
			wantText(t, r.Stdout, "args: --turns 9 --model x\n", "prompt: go\n", "env: 1 s3cret\n")
			if strings.Contains(r.Stdout, "access") || strings.Contains(r.Stderr, "s3cret") {
				t.Errorf("not asked for, or shown: %s%s", r.Stdout, r.Stderr)
			}
			state := s.private(t)
			r = s.call(t, call{State: state}, "exec", "--spec", file, "go").refused(t, shim.ReasonCredentials)
			wantText(t, r.Stderr, `variable "STAND_IN_KEY" is not set`, "hint: export STAND_IN_KEY, or")
			if rec := record(t, state); rec.Attestation != nil {
				t.Error("a container was started")
			}
		})
		t.Run("no sign-in", func(t *testing.T) {
			if err := os.Remove(p.credential); err != nil {
				t.Fatal(err)
			}
			r := s.exec(t, file, "go").refused(t, shim.ReasonCredentials)
			wantText(t, r.Stderr, "auth.json", "hint: sign in, or")
		})
		t.Run("own providers are out of an agent's reach", func(t *testing.T) {
			u, err := user.Lookup(s.account)
			if err != nil {
				t.Fatal(err)
			}
			for _, dir := range []string{".config", ".config/agentshim", ".config/agentshim/providers"} {
				file := s.write(t, spec{"workspace": map[string]any{"source": filepath.Join(u.HomeDir, dir), "mode": "writable"}})
				s.call(t, call{}, "plan", "--spec", file).refused(t, shim.ReasonMount)
			}
		})
	})
}

// TestProviderInteractive: on a terminal without a prompt the provider's form for a person
// starts; with one, the other.
func TestProviderInteractive(t *testing.T) {
	one(t, func(t *testing.T, s setup) {
		p := s.standIn(t, `echo "headless: $(cat)"`, `test -t 0 && test -t 1 && echo "interactive: $*"; stty size; read -r line; echo "read $line"; exit 5`)
		fields := spec{"harness": map[string]any{"provider": p.name}}
		args, _ := s.execArgs(t, fields, "--model", "x")
		x := s.onTerminal(t, call{}, agentshim, args...)
		x.until(t, "interactive: --model x\r\n31 97\r\n")
		x.types(t, "hello\r")
		x.until(t, "read hello\r\n")
		if code := x.ends(t); code != 5 {
			t.Errorf("exit %d: %q", code, x.all())
		}
		args, _ = s.execArgs(t, fields, "say", "it")
		x = s.onTerminal(t, call{}, agentshim, args...)
		x.until(t, "headless: say it\r\n")
		if code := x.ends(t); code != 0 {
			t.Errorf("exit %d: %q", code, x.all())
		}
	})
}
