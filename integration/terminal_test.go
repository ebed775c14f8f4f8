package integration

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// session is a program on a terminal of its own, whose other end the test holds.
type session struct {
	cmd    *exec.Cmd
	master *os.File
	// before is the terminal's mode before anything ran on it.
	before unix.Termios
	waited chan struct{}

	mu   sync.Mutex
	text []byte
	// seen is how much of text until has passed.
	seen int
}

// onTerminal starts a program as the leader of a session on a new terminal.
func (s setup) onTerminal(t *testing.T, c call, path string, args ...string) *session {
	t.Helper()
	c.Timeout = time.Minute
	cmd, cancel := s.command(t, c, path, args...)
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	x := &session{cmd: cmd, master: master, waited: make(chan struct{})}
	x.resize(t, 31, 97)
	var n int
	x.control(t, func(fd int) (err error) {
		if n, err = unix.IoctlGetInt(fd, unix.TIOCGPTN); err == nil {
			err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
		}
		return err
	})
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	x.before = x.mode(t)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setsid, cmd.SysProcAttr.Setctty = true, true
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = cmd.Wait()
		close(x.waited)
	}()
	go x.read()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-x.waited
		master.Close()
		cancel()
	})
	return x
}

func (x *session) read() {
	buf := make([]byte, 32<<10)
	for {
		n, err := x.master.Read(buf)
		x.mu.Lock()
		x.text = append(x.text, buf[:n]...)
		x.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (x *session) control(t *testing.T, f func(fd int) error) {
	t.Helper()
	raw, err := x.master.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) })
	if err := errors.Join(cerr, err); err != nil {
		t.Fatal(err)
	}
}

// mode is the terminal's: an ioctl on the master is one on its other end.
func (x *session) mode(t *testing.T) (m unix.Termios) {
	t.Helper()
	x.control(t, func(fd int) error {
		got, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err == nil {
			m = *got
		}
		return err
	})
	return m
}

func (x *session) raw(t *testing.T) bool {
	t.Helper()
	return x.mode(t).Lflag&(unix.ICANON|unix.ISIG|unix.ECHO) == 0
}

func (x *session) resize(t *testing.T, rows, cols uint16) {
	t.Helper()
	x.control(t, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
	})
}

func (x *session) types(t *testing.T, text string) {
	t.Helper()
	if _, err := x.master.WriteString(text); err != nil {
		t.Fatal(err)
	}
}

// until waits for text and returns what came up to its end since the last call.
func (x *session) until(t *testing.T, text string) string {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		x.mu.Lock()
		rest := x.text[x.seen:]
		if i := bytes.Index(rest, []byte(text)); i >= 0 {
			x.seen += i + len(text)
			x.mu.Unlock()
			return string(rest[:i+len(text)])
		}
		x.mu.Unlock()
		if time.Now().After(end) {
			t.Fatalf("%q never came, after %q", text, rest)
		}
	}
}

func (x *session) all() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return string(x.text)
}

// ends waits for the program's end, and fails t unless the terminal is as it was.
func (x *session) ends(t *testing.T) int {
	t.Helper()
	x.await(t)
	if m := x.mode(t); m != x.before {
		t.Errorf("the terminal is left in mode %+v, it was %+v", m, x.before)
	}
	return x.cmd.ProcessState.ExitCode()
}

func (x *session) await(t *testing.T) {
	t.Helper()
	select {
	case <-x.waited:
	case <-time.After(30 * time.Second):
		t.Fatalf("no end after %q", x.all())
	}
}

const prompt = "agent$ "

// execArgs is an exec of a file with a result.
func (s setup) execArgs(t *testing.T, fields spec, more ...string) (args []string, result string) {
	t.Helper()
	result = filepath.Join(s.private(t), "result.json")
	return slices.Concat([]string{"exec", "--quiet"}, s.target(t, call{}, s.write(t, fields)), []string{"--result", result}, more), result
}

// P21 to P24: a shell on a terminal is a comfortable one. The size is right from its
// first command, keys are the shell's, jobs can be controlled, no key detaches, and
// the caller's terminal is as before at the end.
func TestShell(t *testing.T) {
	bothWays(t, func(t *testing.T, s setup) {
		args, file := s.execArgs(t, nil, "--command", "--", "sh", "-l")
		env := []string{"TERM=xterm-direct", "COLORTERM=truecolor", "LANG=C.UTF-8", "TZ=Mars/Olympus", "LC_ALL=C"}
		x := s.onTerminal(t, call{Env: env}, agentshim, args...)
		x.until(t, "$ ")
		if !x.raw(t) {
			t.Error("the terminal is not raw")
		}
		x.types(t, "PS1='agent''$ '; stty size; tty; test -t 2 && echo err-$?; echo [$TERM,$COLORTERM,$LANG,$TZ,$LC_ALL]\r")
		wantText(t, x.until(t, prompt), "\r\n31 97\r\n/dev/pts/0\r\nerr-0\r\n[xterm-direct,truecolor,C.UTF-8,Mars/Olympus,]\r\n")

		// The job itself prints up: it is the foreground one by then.
		x.types(t, "sh -c 'echo up; exec sleep 100'\r")
		x.until(t, "\r\nup\r\n")
		x.types(t, "\x03")
		x.until(t, prompt)
		x.types(t, "echo rc=$?; sh -c 'echo up; exec cat'\r")
		x.until(t, "\r\nrc=130\r\nup\r\n")
		x.types(t, "\x1a")
		wantText(t, x.until(t, prompt), "Stopped")
		x.types(t, "fg; echo rc=$?\r")
		x.until(t, "exec cat")
		x.types(t, "echoed\r") // by cat, once it goes on
		x.until(t, "\r\nechoed\r\n")
		x.types(t, "\x03")
		x.until(t, prompt)

		x.resize(t, 41, 107)
		x.types(t, "sleep 0.3; stty size\r")
		x.until(t, "\r\n41 107\r\n"+prompt)

		// P24: with docker run -t, these keys detach and the container stays.
		x.types(t, "stty -icanon -ixon -echo; echo up; dd bs=1 count=3 2>/dev/null | od -An -tx1; stty sane\r")
		x.until(t, "\r\nup\r\n")
		x.types(t, "\x10\x11\x10")
		x.until(t, " 10 11 10\r\n")
		x.until(t, prompt)

		x.types(t, "exit 7\r")
		if code := x.ends(t); code != 7 {
			t.Errorf("exit %d: %q", code, x.all())
		}
		if strings.Contains(x.all(), "can't access tty") {
			t.Errorf("no job control: %q", x.all())
		}
		rec := readRecord(t, file)
		wantEnd(t, rec, "", shim.CauseItself, "")
		(&begun{setup: s}).gone(t, rec)
	})
}

// terminal never, one end that is none, and a prompt on standard input: no terminal
// for the harness, and the caller's mode is never changed. P22.
func TestNoTerminal(t *testing.T) {
	const script = "test -t 0 || test -t 1 || test -t 2 || echo none"
	f := func(t *testing.T, s setup) {
		for _, tc := range []struct {
			name   string
			fields spec
			redirect,
			want string
		}{
			{"never", spec{"terminal": "never"}, "", "none"},
			{"input is none", nil, "</dev/null", "none"},
			{"output is none", nil, "| cat", "none"},
			{"prompt on stdin", spec{"harness": map[string]any{"binary": "sh", "promptMode": "stdin"}}, "", "none"},
			{"a prompt and a terminal: the control run", nil, "", ""},
		} {
			t.Run(tc.name, func(t *testing.T) {
				args, _ := s.execArgs(t, tc.fields, "--", script+"; echo mark; sleep 0.4")
				x := s.onTerminal(t, call{}, "/bin/sh", append([]string{"-c", `"$0" "$@" ` + tc.redirect, agentshim}, args...)...)
				got := x.until(t, "mark\r\n")
				if raw := x.raw(t); raw != (tc.want == "") {
					t.Errorf("raw: %v", raw)
				}
				if want := strings.TrimPrefix(tc.want+"\r\nmark\r\n", "\r\n"); got != want {
					t.Errorf("%q, want %q", got, want)
				}
				if code := x.ends(t); code != 0 {
					t.Errorf("exit %d: %q", code, x.all())
				}
			})
		}
		t.Run("no prompt", func(t *testing.T) {
			args, file := s.execArgs(t, nil)
			if code := s.onTerminal(t, call{}, agentshim, args...).ends(t); code != 125 || readRecord(t, file).Reason != shim.ReasonPrompt {
				t.Errorf("exit %d", code)
			}
		})
	}
	one(t, f)
	t.Run("steps", func(t *testing.T) { inSessions(t, setups[:1], f) })
}

// The terminal is given back however the run ends.
func TestTerminalRestored(t *testing.T) {
	const script = "echo ready; exec sleep 300"
	someBothWays(t, func(t *testing.T, s setup) {
		var c call
		loseEngine := func(t *testing.T, x *session, _ string) { killChild(t, x.cmd.Process.Pid) }
		lost := shim.ReasonEngineLost
		switch {
		case s.steps != nil:
			lost = shim.ReasonSessionLost
			loseEngine = func(t *testing.T, x *session, _ string) { s.killKeeper(t, x.cmd.Args) }
		case s.engine == "docker":
			p := newDockerProxy(t, s)
			c.Env = []string{p.env()}
			loseEngine = func(*testing.T, *session, string) { p.cut() }
		}
		for _, tc := range []struct {
			name   string
			do     func(t *testing.T, x *session, file string)
			code   int
			reason shim.Reason
		}{
			{"TERM", func(t *testing.T, x *session, _ string) { _ = x.cmd.Process.Signal(unix.SIGTERM) }, 143, ""},
			{"Ctrl-C reaches the harness alone", func(t *testing.T, x *session, _ string) { x.types(t, "\x03") }, 130, ""},
			{"engine lost", loseEngine, 125, lost},
			{"timeout", func(*testing.T, *session, string) {}, 124, shim.ReasonTimeout},
		} {
			t.Run(tc.name, func(t *testing.T) {
				fields := spec{"stopGrace": "2s"}
				if tc.reason == shim.ReasonTimeout {
					fields["timeout"] = "1s"
				}
				args, file := s.execArgs(t, fields, "--", script)
				x := s.onTerminal(t, c, agentshim, args...)
				x.until(t, "ready\r\n")
				if !x.raw(t) {
					t.Error("the terminal is not raw")
				}
				tc.do(t, x, file)
				if code := x.ends(t); code != tc.code {
					t.Errorf("exit %d, want %d: %q", code, tc.code, x.all())
				}
				rec := readRecord(t, file)
				if rec.Reason != tc.reason || strings.HasPrefix(tc.name, "Ctrl-C") && (rec.Signal != "" || rec.Cause != shim.CauseItself) {
					t.Errorf("record: %q %q %q", rec.Reason, rec.Cause, rec.Signal)
				}
				(&begun{setup: s}).gone(t, rec)
			})
		}
		// What can't be caught shows that the mode is looked at: the limit of the promise.
		t.Run("control: KILL", func(t *testing.T) {
			args, _ := s.execArgs(t, nil, "--", script)
			x := s.onTerminal(t, call{}, agentshim, args...)
			x.until(t, "ready\r\n")
			_ = x.cmd.Process.Kill()
			x.await(t)
			if !x.raw(t) {
				t.Error("the terminal was restored after SIGKILL: say so in the help")
			}
		})
	})
}

// killChild kills the one child of a process.
func killChild(t *testing.T, parent int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", parent, parent))
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", parent))
	for _, path := range threads { // a child belongs to the thread that forked it
		more, _ := os.ReadFile(path)
		b = append(b, more...)
	}
	fields := strings.Fields(string(b))
	if err != nil || len(fields) == 0 {
		t.Fatalf("children of %d: %q %v", parent, b, err)
	}
	pid, err := strconv.Atoi(fields[len(fields)-1])
	if err == nil {
		err = syscall.Kill(pid, unix.SIGKILL)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// killKeeper kills the keeper of the session that a step's command line names.
func (s setup) killKeeper(t *testing.T, args []string) {
	t.Helper()
	x, ok := s.find(t, args[slices.Index(args, "--session")+1])
	if !ok {
		t.Fatalf("no session of %q", args)
	}
	if err := unix.Kill(x.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// Ctrl-C before the harness runs is the terminal's usual one.
func TestCtrlCBeforeHarness(t *testing.T) {
	someAtOnce(t, func(t *testing.T, s setup) {
		env, started := slowStart(t, s)
		args, file := s.execArgs(t, nil, "--", "sleep 300")
		x := s.onTerminal(t, call{Env: []string{env}}, agentshim, args...)
		eventually(t, "the engine's start", started)
		if x.raw(t) {
			t.Error("the terminal is raw before the harness runs")
		}
		x.types(t, "\x03")
		if code := x.ends(t); code != 130 {
			t.Errorf("exit %d: %q", code, x.all())
		}
		if rec := readRecord(t, file); rec.Reason != shim.ReasonInterrupted || rec.Harness != nil {
			t.Errorf("record: %q %+v", rec.Reason, rec.Harness)
		}
	})
}

// A stopped agentshim gives the terminal back to the caller's shell, and takes it
// again, with its size, when it goes on. The harness lives on meanwhile.
func TestStopOnTerminal(t *testing.T) {
	someBothWays(t, func(t *testing.T, s setup) {
		for _, sig := range []syscall.Signal{unix.SIGTSTP, unix.SIGSTOP} {
			t.Run(unix.SignalName(sig), func(t *testing.T) {
				state := s.private(t)
				args, _ := s.execArgs(t, nil, "--", `trap 'echo size $(stty size)' WINCH; echo ready; while ! read -t 1 x; do :; done; echo got $x; exit 6`)
				x := s.onTerminal(t, call{State: state, Env: []string{"PS1=caller$ ", "ENV="}}, "/bin/dash", "-i")
				x.until(t, "caller$ ")
				x.types(t, agentshim+" "+strings.Join(args[:len(args)-1], " ")+" '"+strings.ReplaceAll(args[len(args)-1], "'", `'\''`)+"'\r")
				x.until(t, "\r\nready\r\n")
				if !x.raw(t) {
					t.Error("the terminal is not raw")
				}
				pid := record(t, state).Owner.PID
				if err := syscall.Kill(pid, sig); err != nil {
					t.Fatal(err)
				}
				x.until(t, "caller$ ")
				if sig == unix.SIGTSTP && x.raw(t) {
					t.Error("the caller's shell has a raw terminal")
				}
				x.resize(t, 45, 120)
				x.types(t, "stty sane; fg\n") // a raw terminal makes no newline of Return
				x.until(t, "size 45 120\r\n")
				eventually(t, "the raw mode", func() bool { return x.raw(t) })
				x.types(t, "hello\r")
				x.until(t, "got hello\r\n")
				x.until(t, "caller$ ")
				x.types(t, "echo rc=$?\r")
				x.until(t, "\r\nrc=6\r\n")
			})
		}
	})
}

// A terminal that hangs up leaves the harness a second to end, and is never a success.
func TestHangUp(t *testing.T) {
	someBothWays(t, func(t *testing.T, s setup) {
		for _, row := range []struct {
			name, script string
			code         int
			reason       shim.Reason
		}{
			{"it dies", "echo ready; exec sleep 300", 129, ""},
			{"it ends well", "trap 'sleep 0.3; exit 0' HUP; echo ready; while :; do sleep 0.1; done", 141, shim.ReasonOutputClosed},
			{"it ends as it likes, writing", "trap 'echo bye; echo bye; exit 5' HUP; echo ready; while :; do sleep 0.1; done", 5, ""},
			{"it does not end", deaf, 137, ""},
		} {
			t.Run(row.name, func(t *testing.T) {
				args, file := s.execArgs(t, spec{"stopGrace": "40s"}, "--", row.script)
				x := s.onTerminal(t, call{}, agentshim, args...)
				x.until(t, "ready\r\n")
				start := time.Now()
				x.master.Close()
				x.await(t)
				if d := time.Since(start); d > 4*time.Second {
					t.Errorf("took %v", d)
				}
				rec := readRecord(t, file)
				if code := x.cmd.ProcessState.ExitCode(); code != row.code || rec.Exit != code || rec.Reason != row.reason || rec.Signal != "SIGHUP" {
					t.Errorf("exit %d, want %d; record: %d %q %q %q", code, row.code, rec.Exit, rec.Reason, rec.Cause, rec.Signal)
				}
				(&begun{setup: s}).gone(t, rec)
			})
		}
	})
}
