package shim

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// openPTY makes a terminal: the tester's end and the caller's.
func openPTY(t *testing.T) (master, caller *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	fd := int(master.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = errors.Join(unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0), unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 31, Col: 97}))
	}
	if err != nil {
		t.Fatal(err)
	}
	caller, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { caller.Close() })
	return master, caller
}

func mode(t *testing.T, f *os.File) unix.Termios {
	t.Helper()
	m, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return *m
}

func TestTerminalModes(t *testing.T) {
	_, f := openPTY(t)
	before := mode(t, f)
	isRaw := func(want bool, when string) {
		t.Helper()
		m := mode(t, f)
		if raw := m.Lflag&(unix.ICANON|unix.ISIG|unix.ECHO) == 0 && m.Oflag&unix.OPOST == 0; raw != want || !want && m != before {
			t.Errorf("%s: raw %v, mode %+v", when, raw, m)
		}
	}
	c := &terminal{f: f}
	if c.gone() {
		t.Error("the terminal is gone")
	}
	if got := c.size(); got != (wire.Size{Rows: 31, Cols: 97}) {
		t.Errorf("size %+v", got)
	}
	c.enterAgain()
	isRaw(false, "continued before it was raw")
	for range 2 {
		if err := c.enter(); err != nil {
			t.Fatal(err)
		}
		isRaw(true, "entered")
	}
	c.leave()
	isRaw(false, "left")
	c.enterAgain()
	isRaw(true, "continued")
	// A shell gives its own mode to the terminal while its job is stopped by SIGSTOP.
	if err := unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, &before); err != nil {
		t.Fatal(err)
	}
	c.enterAgain()
	isRaw(true, "continued after SIGSTOP")
	c.close()
	isRaw(false, "closed")
	c.enterAgain()
	if err := c.enter(); err != nil {
		t.Fatal(err)
	}
	isRaw(false, "after its close")
	var none *terminal
	none.leave()
	none.enterAgain()
	none.close()
	if err := none.enter(); err != nil {
		t.Error(err)
	}
}

// TestTerminalHungUp: a terminal without its other end is an error, never a panic.
func TestTerminalHungUp(t *testing.T) {
	master, f := openPTY(t)
	c := &terminal{f: f}
	master.Close()
	if err := c.enter(); !errors.Is(err, syscall.EIO) {
		t.Errorf("%v", err)
	}
	c.enterAgain()
	c.close()
	if !c.gone() || (*terminal)(nil).gone() {
		t.Error("the terminal is not gone")
	}
	if got := c.size(); got != (wire.Size{}) {
		t.Errorf("size %+v", got)
	}
}

const panicVar = "AGENTSHIM_TEST_PANIC"

// TestTerminalPanic: a panic, in whatever goroutine, gives the terminal back.
func TestTerminalPanic(t *testing.T) {
	if where := os.Getenv(panicVar); where != "" {
		panicOn(where)
	}
	for where, restored := range map[string]bool{"guarded goroutine": true, "goroutine without guard": false} {
		t.Run(where, func(t *testing.T) {
			_, f := openPTY(t)
			before := mode(t, f)
			cmd := exec.Command(os.Args[0], "-test.run=^TestTerminalPanic$")
			cmd.Env = append(os.Environ(), panicVar+"="+where)
			var stderr bytes.Buffer
			cmd.Stdin, cmd.Stderr = f, &stderr
			if err := cmd.Run(); err == nil || !strings.Contains(stderr.String(), "panic: of the test") {
				t.Fatalf("%v: %s", err, stderr.String())
			}
			if got := mode(t, f) == before; got != restored {
				t.Errorf("restored: %v", got)
			}
		})
	}
}

// panicOn panics while standard input is a raw terminal.
func panicOn(where string) {
	c := &terminal{f: os.Stdin}
	if err := c.enter(); err != nil {
		panic(err)
	}
	if where == "guarded goroutine" {
		s := &streams{c: &container{p: &prepared{terminal: c}}}
		s.start(func() { panic("of the test") })
	} else {
		go func() { panic("of the test") }()
	}
	select {}
}
