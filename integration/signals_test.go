package integration

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// begun is a run that a test steers.
type begun struct {
	setup
	cmd    *exec.Cmd
	out    *bufio.Reader
	stderr bytes.Buffer
	state  string
	file   string // the result's
	waited chan struct{}
}

// begin starts a script as a harness and returns once it has printed ready.
func (s setup) begin(t *testing.T, fields spec, script string) *begun {
	t.Helper()
	b := s.launch(t, call{}, fields, script)
	if line, err := b.out.ReadString('\n'); line != "ready\n" {
		t.Fatalf("first line %q, %v; %s", line, err, b.stderr.String())
	}
	return b
}

// launch starts a script as a harness.
func (s setup) launch(t *testing.T, c call, fields spec, script string) *begun {
	t.Helper()
	return s.started(t, c, []string{"--spec", s.write(t, fields)}, script)
}

// started starts a script as the harness of a file, or of a session.
func (s setup) started(t *testing.T, c call, of []string, script string) *begun {
	t.Helper()
	c.State, c.Timeout = s.private(t), time.Minute
	b := &begun{setup: s, state: c.State, file: filepath.Join(c.State, "result.json"), waited: make(chan struct{})}
	args := append([]string{"exec", "--quiet", "--result", b.file}, of...)
	cmd, cancel := s.command(t, c, agentshim, append(args, "--", script)...)
	cmd.Stderr = &b.stderr
	out, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, b.cmd, b.out = w, cmd, bufio.NewReader(out)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	go func() {
		_ = cmd.Wait()
		close(b.waited)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-b.waited
		out.Close()
		cancel()
	})
	return b
}

func (b *begun) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := b.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// ended reads the rest of the output and waits for agentshim's end; afterwards there
// is no container.
func (b *begun) ended(t *testing.T, code int) (rest string, rec shim.Record) {
	t.Helper()
	text, err := io.ReadAll(b.out)
	if err != nil {
		t.Error(err)
	}
	return string(text), b.over(t, code)
}

// over waits for agentshim's end without reading its output.
func (b *begun) over(t *testing.T, code int) shim.Record {
	t.Helper()
	select {
	case <-b.waited:
	case <-time.After(30 * time.Second):
		t.Fatalf("agentshim does not end; %s", b.stderr.String())
	}
	if status := b.cmd.ProcessState.Sys().(syscall.WaitStatus); status.Signaled() {
		t.Fatalf("agentshim was ended by %v, after a minute perhaps; %s", status.Signal(), b.stderr.String())
	}
	rec := readRecord(t, b.file)
	if got := b.cmd.ProcessState.ExitCode(); got != code || rec.Exit != code {
		t.Errorf("exit %d, want %d; record: exit %d %q; %s", got, code, rec.Exit, rec.Reason, b.stderr.String())
	}
	b.gone(t, rec)
	return rec
}

// gone fails t if there is a container. When the client was killed, Docker may still
// be removing it.
func (b *begun) gone(t *testing.T, rec shim.Record) {
	t.Helper()
	left := func() string {
		return b.bare(t, "ps", "-aq", "--filter", "name=agentshim-"+rec.ID).ok(t).Stdout
	}
	ids := left()
	if ids != "" && rec.Reason == shim.ReasonEngineLost {
		time.Sleep(2 * time.Second)
		ids = left()
	}
	if ids != "" {
		t.Errorf("container is left: %s", ids)
	}
}

// wantEnd compares what a record says about the harness's end.
func wantEnd(t *testing.T, rec shim.Record, reason shim.Reason, cause shim.Cause, signal string) {
	t.Helper()
	if rec.Reason != reason || rec.Cause != cause || rec.Signal != signal {
		t.Errorf("record: reason %q, cause %q, signal %q; want %q, %q, %q", rec.Reason, rec.Cause, rec.Signal, reason, cause, signal)
	}
}

// one is each for what depends on no engine.
func one(t *testing.T, f func(t *testing.T, s setup)) {
	Need(t)
	t.Run(setups[0].name, func(t *testing.T) { f(t, setups[0]) })
}

const deaf = "trap '' INT TERM HUP; sleep 300 & echo ready; while :; do sleep 0.2; done"

// P01, P03, P07, P08: a signal to agentshim is one to the harness, whose exit code
// is agentshim's.
func TestSignals(t *testing.T) {
	bothWays(t, func(t *testing.T, s setup) {
		for _, tc := range []struct {
			name   string
			all    bool // on all four set-ups
			script string
			sig    syscall.Signal
			code   int
			cause  shim.Cause
		}{
			{"TERM", true, "echo ready; exec sleep 300", unix.SIGTERM, 143, shim.CauseSignal},
			{"INT", false, "echo ready; exec sleep 300", unix.SIGINT, 130, shim.CauseSignal},
			{"HUP", false, "echo ready; exec sleep 300", unix.SIGHUP, 129, shim.CauseSignal},
			{"the whole process group", false, "(trap 'echo child; exit' TERM; : >/tmp/up; while :; do sleep 0.1; done) & trap 'wait; exit 6' TERM; until [ -e /tmp/up ]; do sleep 0.05; done; echo ready; wait", unix.SIGTERM, 6, shim.CauseSignal},
			{"caught, a clean end", true, "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.1; done", unix.SIGTERM, 0, shim.CauseSignal},
		} {
			if !tc.all && !s.full() {
				continue
			}
			t.Run(tc.name, func(t *testing.T) {
				b := s.begin(t, nil, tc.script)
				b.signal(t, tc.sig)
				start := time.Now()
				rest, rec := b.ended(t, tc.code)
				wantEnd(t, rec, "", tc.cause, unix.SignalName(tc.sig))
				if d := time.Since(start); d > 8*time.Second {
					t.Errorf("took %v: the grace ran out", d)
				}
				if want := map[string]string{"the whole process group": "child\n", "caught, a clean end": "bye\n"}[tc.name]; rest != want {
					t.Errorf("printed %q, want %q", rest, want)
				}
			})
		}
	})
}

// Those that end nothing by themselves: the harness gets each, and ends as it likes.
func TestOtherSignals(t *testing.T) {
	someBothWays(t, func(t *testing.T, s setup) {
		b := s.begin(t, nil, `for s in USR1 USR2 QUIT CONT; do trap "echo got $s" $s; done; trap 'exit 3' TERM; echo ready; while :; do sleep 0.1; done`)
		for _, sig := range []syscall.Signal{unix.SIGUSR1, unix.SIGUSR2, unix.SIGQUIT, unix.SIGCONT} {
			b.signal(t, sig)
			want := "got " + strings.TrimPrefix(unix.SignalName(sig), "SIG") + "\n"
			if line, err := b.out.ReadString('\n'); line != want {
				t.Fatalf("%q %v, want %q", line, err, want)
			}
		}
		b.signal(t, unix.SIGPIPE) // of no meaning
		b.signal(t, unix.SIGTERM)
		_, rec := b.ended(t, 3)
		wantEnd(t, rec, "", shim.CauseSignal, "SIGTERM")
		t.Run("P03: not caught", func(t *testing.T) {
			b := s.begin(t, nil, "echo ready; exec sleep 300")
			b.signal(t, unix.SIGUSR1)
			_, rec := b.ended(t, 138)
			wantEnd(t, rec, "", shim.CauseItself, "")
		})
	})
}

// P01, P07, P15: what does not end in its grace is killed, with all that it left, and
// the record says who did it.
func TestStopGrace(t *testing.T) {
	someBothWays(t, func(t *testing.T, s setup) {
		for _, tc := range []struct {
			name        string
			grace       string
			signals     int
			least, most time.Duration
		}{
			{"one signal", "1s", 1, 900 * time.Millisecond, 9 * time.Second},
			{"a second signal shortens", "40s", 2, 900 * time.Millisecond, 20 * time.Second},
			// The control run: the harness outlives one signal by as much as it may.
			{"one signal, a longer grace", "4s", 1, 3900 * time.Millisecond, 12 * time.Second},
		} {
			t.Run(tc.name, func(t *testing.T) {
				b := s.begin(t, spec{"stopGrace": tc.grace}, deaf)
				start := time.Now()
				for range tc.signals {
					b.signal(t, unix.SIGINT)
					time.Sleep(100 * time.Millisecond)
				}
				_, rec := b.ended(t, 137)
				if d := time.Since(start); d < tc.least || d > tc.most {
					t.Errorf("killed after %v, want %v to %v", d, tc.least, tc.most)
				}
				wantEnd(t, rec, "", shim.CauseKilled, "SIGINT")
			})
		}
	})
}

// slowStart has the engine wait before it makes a container. started says that it has
// been asked to; two seconds later it goes on.
func slowStart(t *testing.T, s setup) (env string, started func() bool) {
	t.Helper()
	if s.engine == "docker" {
		p := newDockerProxy(t, s)
		release := p.hold("create")
		return p.env(), func() bool {
			waits := p.waits("create")
			if waits {
				time.AfterFunc(2*time.Second, release)
			}
			return waits
		}
	}
	real, err := exec.LookPath(s.engine)
	if err != nil {
		t.Fatal(err)
	}
	dir := s.folder(t)
	place(t, filepath.Join(dir, s.engine), fmt.Appendf(nil, "#!/bin/sh\ncase \" $* \" in *' run '*) touch %s/running; sleep 2;; esac\nexec %s \"$@\"\n", dir, real), 0o755)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	return "PATH=" + dir + ":" + os.Getenv("PATH"), func() bool {
		_, err := os.Stat(filepath.Join(dir, "running"))
		return err == nil
	}
}

// A signal before the harness runs: nothing runs, and the exit code is the signal's.
func TestSignalBeforeHarness(t *testing.T) {
	someAtOnce(t, func(t *testing.T, s setup) {
		sig := unix.SIGTERM
		env, started := slowStart(t, s)
		b := s.launch(t, call{Env: []string{env}}, nil, "echo ran")
		eventually(t, "the engine's start", started)
		b.signal(t, sig)
		out, rec := b.ended(t, 128+int(sig))
		if out != "" || rec.Harness != nil {
			t.Errorf("the harness ran: %q %+v", out, rec.Harness)
		}
		wantEnd(t, rec, shim.ReasonInterrupted, "", "")
		wantText(t, b.stderr.String(), "agentshim: interrupted: ")
		t.Run("while the prompt is read", func(t *testing.T) {
			state := s.private(t)
			cmd, cancel := s.command(t, call{State: state, Timeout: time.Minute}, agentshim, "exec", "--spec", s.write(t, nil))
			defer cancel()
			r, w, err := os.Pipe() // its writing end stays open
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			defer r.Close()
			cmd.Stdin = r
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(500 * time.Millisecond)
			_ = cmd.Process.Signal(unix.SIGINT)
			start := time.Now()
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != 130 || time.Since(start) > 5*time.Second {
				t.Errorf("exit %d after %v", code, time.Since(start))
			}
		})
	})
}

// A signal that the caller made agentshim ignore stays ignored: nohup(1).
func TestIgnoredSignal(t *testing.T) {
	one(t, func(t *testing.T, s setup) {
		for _, ignored := range []bool{true, false} {
			state := s.private(t)
			trap := map[bool]string{true: "trap '' HUP; ", false: ""}[ignored]
			cmd, cancel := s.command(t, call{State: state, Timeout: time.Minute}, "/bin/sh", "-c",
				trap+`exec "$0" exec --quiet --spec "$1" -- 'echo ready; sleep 1; exit 4'`, agentshim, s.write(t, nil))
			defer cancel()
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewReader(out)
			if line, err := lines.ReadString('\n'); line != "ready\n" {
				t.Fatalf("%q %v", line, err)
			}
			_ = cmd.Process.Signal(unix.SIGHUP)
			_, _ = io.ReadAll(lines)
			_ = cmd.Wait()
			want := map[bool]int{true: 4, false: 129}[ignored]
			if code := cmd.ProcessState.ExitCode(); code != want {
				t.Errorf("ignored %v: exit %d, want %d", ignored, code, want)
			}
		}
	})
}

// A stopped agentshim pauses the streams and kills nothing, however long.
func TestStoppedShim(t *testing.T) {
	someBothWays(t, func(t *testing.T, s setup) {
		b := s.begin(t, spec{"timeout": "3s"}, "echo ready; i=0; while [ $i -lt 4000 ]; do echo 0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789; i=$((i+1)); done; echo done >&2; exit 4")
		b.signal(t, unix.SIGSTOP)
		time.Sleep(4 * time.Second) // longer than the timeout, which does not run meanwhile
		if strings.Contains(b.stderr.String(), "done") {
			t.Error("the harness wrote its output to a stopped agentshim")
		}
		b.signal(t, unix.SIGCONT)
		rest, rec := b.ended(t, 4)
		if len(rest) != 4000*101 {
			t.Errorf("%d bytes of output", len(rest))
		}
		wantEnd(t, rec, "", shim.CauseItself, "")
	})
}
