package shim

import (
	"os"
	"sync"

	"golang.org/x/term"

	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// terminal is the caller's, in raw mode while the harness has it. A nil terminal is
// none: its methods do nothing.
//
// It is given back however this process ends, but for SIGKILL and a fatal fault of
// the Go runtime.
type terminal struct {
	f *os.File

	mu sync.Mutex
	// saved is the mode to give back, nil before enter.
	saved *term.State
	raw   bool
	over  bool
}

// size is the terminal's; 0 where it is not known.
func (t *terminal) size() wire.Size {
	cols, rows, err := term.GetSize(t.fd())
	if err != nil {
		return wire.Size{}
	}
	return wire.Size{Rows: uint16(rows), Cols: uint16(cols)}
}

// fd leaves the file's mode as it is, which os.File.Fd may not.
func (t *terminal) fd() (n int) {
	raw, err := t.f.SyscallConn()
	if err != nil {
		return -1
	}
	if err := raw.Control(func(fd uintptr) { n = int(fd) }); err != nil {
		return -1
	}
	return n
}

// enter puts the terminal into raw mode: every key is a byte for the harness. In the
// background that stops the process until it is in the foreground: termios(3).
func (t *terminal) enter() error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over || t.raw {
		return nil
	}
	saved, err := term.MakeRaw(t.fd())
	if err != nil {
		return err
	}
	if t.saved == nil {
		t.saved = saved
	}
	t.raw = true
	return nil
}

// enterAgain makes the terminal raw once more if it was before: a shell changes it
// while its job is stopped, also by a signal that can't be caught.
func (t *terminal) enterAgain() {
	if t == nil {
		return
	}
	t.mu.Lock()
	entered := t.saved != nil
	t.raw = false
	t.mu.Unlock()
	if entered {
		_ = t.enter() // EIO: it is hung up, and the next read says so
	}
}

// leave gives the terminal back for a while.
func (t *terminal) leave() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leaveLocked()
}

func (t *terminal) leaveLocked() {
	if t.raw {
		_ = term.Restore(t.fd(), t.saved) // EIO: it is hung up
		t.raw = false
	}
}

// close gives the terminal back for good.
func (t *terminal) close() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leaveLocked()
	t.over = true
}

// gone says that the terminal is hung up.
func (t *terminal) gone() bool {
	if t == nil {
		return false
	}
	_, err := term.GetState(t.fd())
	return err != nil
}

// guard is deferred in each goroutine that runs while the terminal is raw: a panic
// gives it back before it ends the process.
func (t *terminal) guard() {
	if r := recover(); r != nil {
		t.close()
		panic(r)
	}
}

// terminalEnv are the variables that describe the caller's terminal, nil where
// there is none.
func (j Job) terminalEnv() map[string]string {
	if j.Terminal == nil {
		return nil
	}
	vars := map[string]string{}
	for _, name := range spec.TerminalEnv {
		if v := j.getenv(name); v != "" {
			vars[name] = v
		}
	}
	return vars
}
