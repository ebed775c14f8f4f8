package integration

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentshim/agentshim/shim"
)

// step is agentshim as an orchestrator runs it: the leader of a process group, its output
// spooled to a file, its standard error read to the end, whoever holds it open.
type step struct {
	cmd    *exec.Cmd
	spool  *os.File
	stderr bytes.Buffer
	// read is closed when nobody has the standard error any more.
	read   chan struct{}
	output string
	state  string
}

// orchestrate starts one. The program may be a shell that closes descriptors first.
func (s setup) orchestrate(t *testing.T, stdin io.Reader, path string, args ...string) *step {
	t.Helper()
	dir := s.private(t)
	x := &step{read: make(chan struct{}), output: filepath.Join(dir, "output"), state: s.private(t)}
	place(t, x.output, []byte("first=1\n"), 0o600)
	s.chown(t, dir)
	cmd, cancel := s.command(t, call{Stdin: stdin, State: x.state, Env: []string{
		"DAGU_CONTAINER_RUNTIME=" + s.engine, "DAGU_API_TOKEN=s3cret", "DAGU_OUTPUT_FILE=" + x.output,
		"DAG_NAME=nightly", "DAG_RUN_ID=" + filepath.Base(dir), "DAG_RUN_STEP_NAME=fix",
	}}, path, args...)
	x.cmd = cmd
	var err error
	if x.spool, err = os.Create(filepath.Join(t.TempDir(), "stdout")); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = x.spool, w
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	go func() {
		_, _ = io.Copy(&x.stderr, r)
		close(x.read)
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		cancel()
		r.Close()
		x.spool.Close()
	})
	return x
}

// ends waits for the step, and fails t unless its standard error ends with it.
func (x *step) ends(t *testing.T) (stdout string, code int) {
	t.Helper()
	_ = x.cmd.Wait()
	select {
	case <-x.read:
	case <-time.After(20 * time.Second):
		t.Fatal("something keeps standard error open")
	}
	return x.stdout(t), x.cmd.ProcessState.ExitCode()
}

func (x *step) stdout(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(x.spool.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// stepScript says what the harness was given, and leaves an output.
const stepScript = `echo "args: $*"; printf 'prompt: %s|\n' "$(cat; echo .)"; env | grep ^DAG | sort; echo progress >&2
[ -z "$DAGU_OUTPUT_FILE" ] || echo answer=42 >> "$DAGU_OUTPUT_FILE"`

// An orchestrator's argv in each of its orders, as prefix_args and the step's keys make it.
func TestOrchestratorArgv(t *testing.T) {
	one(t, func(t *testing.T, s setup) {
		p := s.standIn(t, stepScript, "")
		file := s.write(t, spec{"engine": "auto", "harness": map[string]any{"provider": p.name}})
		const prompt = "- first\n- it's ${PARAM} \"second\"\n"
		for _, tt := range []struct {
			name  string
			args  []string
			stdin string
		}{
			{"arg, before_flags", []string{prompt, "--ask", "--max_turns", "3", "--model", "m 1"}, ""},
			{"arg, after_flags", []string{"--ask", "--max_turns", "3", "--model", "m 1", prompt}, ""},
			{"arg, single_dash", []string{prompt, "-ask", "-max_turns", "3", "-model", "m 1"}, ""},
			{"flag", []string{"--prompt", prompt, "--ask", "--max-turns", "3", "--model", "m 1"}, ""},
			{"stdin", []string{"--ask", "--max-turns", "3", "--model", "m 1"}, prompt},
		} {
			t.Run(tt.name, func(t *testing.T) {
				var stdin io.Reader
				if tt.stdin != "" {
					stdin = strings.NewReader(tt.stdin)
				}
				x := s.orchestrate(t, stdin, agentshim, append([]string{"exec", "--spec", file}, tt.args...)...)
				out, code := x.ends(t)
				if code != 0 || !strings.HasPrefix(out, "args: --ask --turns 3 --model m 1\nprompt: "+prompt+".|\n") {
					t.Errorf("exit %d: %s\n%s", code, out, x.stderr.String())
				}
			})
		}
		t.Run("a key that the provider has not", func(t *testing.T) {
			x := s.orchestrate(t, nil, agentshim, "exec", "--spec", file, prompt, "--temperature", "1")
			out, code := x.ends(t)
			if code != shim.ExitRefused || out != "" || !strings.Contains(x.stderr.String(), "it has --ask, --max-turns, --model") {
				t.Errorf("exit %d: %s\n%s", code, out, x.stderr.String())
			}
		})
	})
}

// TestOrchestrator: the contract on every set-up, with standard input closed.
func TestOrchestrator(t *testing.T) {
	bothWays(t, func(t *testing.T, s setup) {
		p := s.standIn(t, stepScript, "")
		file := s.write(t, spec{"engine": "auto", "harness": map[string]any{"provider": p.name}})
		args := slices.Concat([]string{"-c", `exec "$0" "$@" <&- `, agentshim, "exec"}, s.target(t, call{Env: []string{"DAGU_CONTAINER_RUNTIME=" + s.engine}}, file), []string{"--output-file", "out.env", "fix it", "--model", "m"})
		x := s.orchestrate(t, nil, "/bin/sh", args...)
		out, code := x.ends(t)
		want := "args: --turns 9 --model m\nprompt: fix it.|\nDAGU_OUTPUT_FILE=/home/agent/out.env\n"
		if code != 0 || out != want {
			t.Errorf("exit %d: %q, want %q\n%s", code, out, want, x.stderr.String())
		}
		wantText(t, x.stderr.String(), "progress\n")
		if b, err := os.ReadFile(x.output); err != nil || string(b) != "first=1\nanswer=42\n" {
			t.Errorf("the output file has %q, %v", b, err)
		}
		rec := record(t, x.state)
		if whole, _ := s.whole(t, rec, x.state); whole.Engine.Kind != s.engine || rec.Output == nil || rec.Output.Bytes != len("answer=42\n") {
			t.Errorf("engine %q, output %+v", whole.Engine.Kind, rec.Output)
		}
		t.Run("no output left", func(t *testing.T) {
			x := s.orchestrate(t, nil, agentshim, "exec", "--quiet", "--spec", file, "--output-file", "/tmp/other", "--command", "--", "rm", "-f", "/tmp/other")
			if _, code := x.ends(t); code != shim.ExitRefused || !strings.Contains(x.stderr.String(), "agentshim: output-file: /tmp/other: it is gone") {
				t.Errorf("exit %d: %s", code, x.stderr.String())
			}
			if b, err := os.ReadFile(x.output); err != nil || string(b) != "first=1\n" {
				t.Errorf("the output file has %q, %v", b, err)
			}
		})
		if s.steps != nil {
			return // the container is not the step's
		}
		wantText(t, x.stderr.String(), "agentshim: proven: ")
		t.Run("SIGKILL to the group", func(t *testing.T) {
			x := s.orchestrate(t, nil, agentshim, "exec", "--quiet", "--spec", file, "--command", "--", "sh", "-c", "setsid sleep 1000 & echo up; exec sleep 1000")
			for end := time.Now().Add(time.Minute); !strings.Contains(x.stdout(t), "up\n"); time.Sleep(20 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("never up: %s", x.stdout(t))
				}
			}
			label := "label=agentshim.dag-run-id=" + filepath.Base(filepath.Dir(x.output))
			if list := s.bare(t, "ps", "-aq", "--filter", label, "--filter", "label=agentshim.dag-name=nightly", "--filter", "label=agentshim.dag-run-step-name=fix").ok(t).Stdout; strings.Count(list, "\n") != 1 {
				t.Errorf("%s has %q", label, list)
			}
			if err := syscall.Kill(-x.cmd.Process.Pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			x.ends(t)
			if list := s.containers(t); len(list) > 0 {
				t.Errorf("left: %q", list)
			}
		})
	})
}
