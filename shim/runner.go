package shim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Command is one external command. There is no shell: every element of Args is one
// argument as it stands.
type Command struct {
	// Path is absolute.
	Path string
	// Args are the arguments without the program's name.
	Args []string
	// Env is the whole environment, NAME=value; nil is an empty one, never the caller's.
	Env []string
	// Stdin is Run's only, nil is /dev/null.
	Stdin io.Reader
	// Files are the descriptors 3 and up of what Start starts.
	Files []*os.File
	// Progress gets what Run reads from both outputs, as it comes; nil for none.
	Progress io.Writer
}

// Argv is the program and its arguments.
func (c Command) Argv() []string { return append([]string{c.Path}, c.Args...) }

// Output is what Run collected. Stdout is complete or Run fails; Stderr is its end.
type Output struct {
	Stdout []byte
	Stderr []byte
}

// Bounds of what Run keeps.
const (
	maxStdout = 8 << 20
	maxStderr = 64 << 10
)

// ErrOutputTooLarge is Run's error for more than 8 MiB on standard output.
var ErrOutputTooLarge = errors.New("output too large")

// ExitStatus is how a process ended. As an error it stands for an end other than exit code 0.
type ExitStatus struct {
	Code int
	// Signal is the signal that ended it, 0 for none; Code is then -1.
	Signal syscall.Signal
}

func (s ExitStatus) Error() string {
	if s.Signal != 0 {
		return "ended by signal " + unix.SignalName(s.Signal)
	}
	return fmt.Sprintf("exit status %d", s.Code)
}

// Runner is the one way to start a program outside the containers. Exec is the real one.
type Runner interface {
	// Run waits for the command. Anything but exit code 0 is an *EngineError, with
	// Output holding what came until then. The command is in a process group of its
	// own, so that a terminal's Ctrl-C reaches agentshim only; when ctx ends the
	// group gets SIGTERM, and the command SIGKILL after three seconds.
	Run(ctx context.Context, c Command) (Output, error)
	// Start returns once the command runs, in a process group of its own, with pipes
	// for its three streams. When ctx ends the group gets SIGKILL. The caller must
	// call Wait once and close the pipes.
	Start(ctx context.Context, c Command) (Process, error)
}

// Process is a command started by Runner.Start.
type Process interface {
	PID() int
	Stdin() io.WriteCloser
	Stdout() io.ReadCloser
	Stderr() io.ReadCloser
	// Signal goes to the process group; os.ErrProcessDone after the process ended.
	Signal(sig syscall.Signal) error
	// Wait returns when the process ended. It neither closes nor drains the pipes:
	// what a child of the process still holds open stays readable.
	Wait() (ExitStatus, error)
}

// Exec runs commands on this machine.
type Exec struct{}

var _ Runner = Exec{}

// stopGrace is what Run gives a command after SIGTERM: an engine client killed in
// the middle of a pull leaves half a layer behind.
const stopGrace = 3 * time.Second

func (Exec) Run(ctx context.Context, c Command) (Output, error) {
	cmd, err := c.prepare(ctx)
	if err != nil {
		return Output{}, err
	}
	stdout, stderr := &cappedBuffer{limit: maxStdout}, &tailBuffer{limit: maxStderr}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = c.Stdin, stdout, stderr
	if c.Progress != nil {
		progress := &lockedWriter{w: c.Progress}
		cmd.Stdout, cmd.Stderr = io.MultiWriter(stdout, progress), io.MultiWriter(stderr, progress)
	}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGTERM) }
	// WaitDelay also ends the wait for a descendant that keeps the pipes after the
	// command is gone, such as rootless Podman's pause process.
	cmd.WaitDelay = stopGrace
	err = cmd.Run()
	out := Output{Stdout: stdout.buf.Bytes(), Stderr: stderr.bytes()}
	if errors.Is(err, exec.ErrWaitDelay) && cmd.ProcessState.Success() {
		err = nil
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err == nil && stdout.over {
		err = ErrOutputTooLarge
	}
	if err != nil {
		return out, &EngineError{Argv: c.Argv(), Stderr: string(out.Stderr), Err: statusOf(err)}
	}
	return out, nil
}

func (Exec) Start(ctx context.Context, c Command) (Process, error) {
	cmd, err := c.prepare(ctx)
	if err != nil {
		return nil, err
	}
	cmd.ExtraFiles = c.Files
	p := &process{cmd: cmd}
	ends, err := p.pipes()
	if err != nil {
		return nil, fmt.Errorf("pipes for %q: %w", c.Path, err)
	}
	cmd.Cancel = func() error { return p.Signal(unix.SIGKILL) }
	err = cmd.Start()
	closeAll(ends)
	if err != nil {
		closeAll([]*os.File{p.stdin, p.stdout, p.stderr})
		return nil, &EngineError{Argv: c.Argv(), Err: err}
	}
	return p, nil
}

// prepare sets no parent-death signal: it would fire when the Go thread that forked
// ends, not when the program does (prctl(2), PR_SET_PDEATHSIG). What ends a run when
// agentshim dies is the end of its standard input.
func (c Command) prepare(ctx context.Context) (*exec.Cmd, error) {
	if !filepath.IsAbs(c.Path) {
		return nil, fmt.Errorf("command %q: not an absolute path", c.Path)
	}
	cmd := exec.CommandContext(ctx, c.Path, c.Args...)
	// os/exec takes a nil Env for the caller's whole environment.
	cmd.Env = append([]string{}, c.Env...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd, nil
}

type process struct {
	cmd                   *exec.Cmd
	stdin, stdout, stderr *os.File

	mu   sync.Mutex
	done bool
}

// pipes opens the three streams and returns the child's ends.
func (p *process) pipes() (ends []*os.File, err error) {
	var opened []*os.File
	for _, s := range []struct {
		ours   **os.File
		writes bool
	}{{&p.stdin, true}, {&p.stdout, false}, {&p.stderr, false}} {
		r, w, err := os.Pipe()
		if err != nil {
			closeAll(opened)
			return nil, err
		}
		opened = append(opened, r, w)
		if s.writes {
			*s.ours, ends = w, append(ends, r)
		} else {
			*s.ours, ends = r, append(ends, w)
		}
	}
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = ends[0], ends[1], ends[2]
	return ends, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

func (p *process) PID() int              { return p.cmd.Process.Pid }
func (p *process) Stdin() io.WriteCloser { return p.stdin }
func (p *process) Stdout() io.ReadCloser { return p.stdout }
func (p *process) Stderr() io.ReadCloser { return p.stderr }

func (p *process) Signal(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done {
		return os.ErrProcessDone
	}
	return unix.Kill(-p.cmd.Process.Pid, sig)
}

func (p *process) Wait() (ExitStatus, error) {
	// WNOWAIT keeps the zombie, and so the group's number, until Signal is shut off:
	// a signal can't reach a stranger that got the number again (waitid(2)).
	for {
		err := unix.Waitid(unix.P_PID, p.PID(), nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	p.mu.Lock()
	p.done = true
	p.mu.Unlock()
	err := p.cmd.Wait()
	if p.cmd.ProcessState == nil {
		return ExitStatus{}, err
	}
	return exitStatus(p.cmd.ProcessState), nil
}

// statusOf turns os/exec's error for an ended process into an ExitStatus.
func statusOf(err error) error {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return err
	}
	return exitStatus(exit.ProcessState)
}

func exitStatus(state *os.ProcessState) ExitStatus {
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return ExitStatus{Code: -1, Signal: ws.Signal()}
	}
	return ExitStatus{Code: state.ExitCode()}
}

// cappedBuffer keeps the first limit bytes and takes the rest without an error, so
// that the writer is not stopped by a broken pipe.
type cappedBuffer struct {
	buf   bytes.Buffer
	limit int
	over  bool
}

func (b *cappedBuffer) Write(p []byte) (int, error) {
	room := b.limit - b.buf.Len()
	if len(p) > room {
		b.over = true
		b.buf.Write(p[:room])
		return len(p), nil
	}
	return b.buf.Write(p)
}

// tailBuffer keeps at least the last limit bytes, and at most twice that.
type tailBuffer struct {
	buf   []byte
	limit int
}

func (b *tailBuffer) Write(p []byte) (int, error) {
	b.buf = append(b.buf, p[max(0, len(p)-b.limit):]...)
	if over := len(b.buf) - b.limit; over > b.limit {
		b.buf = append(b.buf[:0], b.buf[over:]...)
	}
	return len(p), nil
}

func (b *tailBuffer) bytes() []byte { return b.buf[max(0, len(b.buf)-b.limit):] }

// lockedWriter lets both outputs share one sink; its errors must not stop the command.
type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = l.w.Write(p) // progress is for the eye only
	return len(p), nil
}
