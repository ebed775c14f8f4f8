package integration

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// screen is a program on a terminal that tmux draws: a full-screen program asks its
// terminal what it can do, and paints it bit by bit.
type screen struct {
	setup
	socket string
}

func (s setup) onScreen(t *testing.T, c call, path string, args ...string) screen {
	t.Helper()
	x := screen{s, filepath.Join(s.private(t), "tmux")}
	x.tmux(t, c, append([]string{"-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "40", path}, args...)...).ok(t)
	t.Cleanup(func() { x.tmux(t, call{}, "kill-server") })
	return x
}

func (x screen) tmux(t *testing.T, c call, words ...string) result {
	t.Helper()
	path, err := exec.LookPath("tmux")
	if err != nil {
		t.Fatal(err)
	}
	cmd, cancel := x.command(t, c, path, append([]string{"-S", x.socket}, words...)...)
	defer cancel()
	return finish(t, cmd)
}

// patience is how long an agent may take to draw something on a busy machine.
const patience = 90 * time.Second

// until waits for a text to stand on the screen.
func (x screen) until(t *testing.T, text string) {
	t.Helper()
	var drawn string
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if drawn = x.tmux(t, call{}, "capture-pane", "-p").Stdout; strings.Contains(drawn, text) {
			return
		}
	}
	t.Fatalf("%q never stood on the screen, but at last:\n%s", text, drawn)
}

// types writes a text and, when it stands there, presses Enter: agents take keys that
// come with a text for a part of it.
func (x screen) types(t *testing.T, text string) {
	t.Helper()
	x.tmux(t, call{}, "send-keys", "-l", text).ok(t)
	x.until(t, text)
	x.tmux(t, call{}, "send-keys", "Enter").ok(t)
}

// press presses a key until the screen has changed: a question can be drawn before keys
// are taken.
func (x screen) press(t *testing.T, key, seen string) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(2 * time.Second) {
		if drawn := x.tmux(t, call{}, "capture-pane", "-p").Stdout; !strings.Contains(drawn, seen) {
			return
		}
		x.tmux(t, call{}, "send-keys", key).ok(t)
	}
	t.Fatalf("%q stands on the screen, whatever is pressed", seen)
}

// ends waits for the program's end.
func (x screen) ends(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if x.tmux(t, call{}, "has-session").Code != 0 {
			return
		}
	}
	t.Fatalf("no end; on the screen:\n%s", x.tmux(t, call{}, "capture-pane", "-p").Stdout)
}

// reply is what a person does when a text stands on the screen: type one, or press a key.
type reply struct{ seen, text, key string }

// TestAgentsOnTerminal: without a prompt a person has the agent's own screen, and no
// questions of a first start but the one that no file answers without a secret in it. The
// agent works, and ends when it is told to.
func TestAgentsOnTerminal(t *testing.T) {
	w := outside(t)
	w.settle()
	if err := modelWorld(); err != nil {
		t.Fatal(err)
	}
	const prompt = "#run echo made >made"
	begin := map[string][]reply{
		// It asks whether a key in the environment may be used.
		"claude": {
			{"❯ No", "", "Up"},
			{"❯ Yes", "", "Enter"},
			{"manual mode", prompt, ""},
			{"Do you want to proceed?", "", "Enter"},
			{"The model is done.", "/exit", ""},
		},
		"codex":    {{"Ask Codex", prompt, ""}, {"The model is done.", "/quit", ""}},
		"opencode": {{"Ask anything", prompt, ""}, {"The model is done.", "/exit", ""}},
		"gemini":   {{"Type your message", prompt, ""}, {"Allow execution", "", "Enter"}, {"The model is done.", "/quit", ""}},
	}
	options := map[string]map[string]any{
		"claude": {"permission-mode": "default"},
		// Its own sandbox needs what the system call policy closes.
		"codex": {"dangerously-bypass-approvals-and-sandbox": true},
	}
	atOnce(t, []setup{setups[0], setups[3]}, func(t *testing.T, s setup) {
		for _, a := range agentCLIs() {
			if begin[a.provider] == nil {
				continue
			}
			t.Run(a.provider, func(t *testing.T) {
				t.Parallel()
				a.options = joined(a.options, options[a.provider])
				a.converse(t, s, w, begin[a.provider])
			})
		}
	})
}

func (a agentCLI) converse(t *testing.T, s setup, w *world, replies []reply) {
	dir := s.folder(t)
	file := s.write(t, a.fields(w, dir, false, modelHost))
	s.dropCaches(t, file)
	state := s.private(t)
	c := call{Net: w, State: state, Env: []string{a.key + "=" + modelKey, "TERM=xterm-256color", "LANG=C.UTF-8"}}
	x := s.onScreen(t, c, agentshim, "exec", "--spec", file)
	for _, r := range replies {
		x.until(t, r.seen)
		if r.text != "" {
			x.types(t, r.text)
		} else {
			x.press(t, r.key, r.seen)
		}
	}
	x.ends(t)
	if rec := record(t, state); rec.Exit != 0 || rec.Reason != "" {
		t.Errorf("exit %d %s", rec.Exit, rec.Reason)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "made")); string(b) != "made\n" {
		t.Errorf("the agent's file has %q: %v", b, err)
	}
}
