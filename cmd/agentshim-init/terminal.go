package main

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// terminal is a pseudo-terminal of the container's own devpts. Init keeps the
// harness's end open too: without any holder, a read of the master fails, and a
// harness may close all of its streams and open /dev/tty later.
type terminal struct {
	master, harness *os.File
}

// openTerminal makes one of that size.
func openTerminal(size wire.Size) (*terminal, error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("open /dev/ptmx", err)
	}
	t := &terminal{master: os.NewFile(uintptr(fd), "terminal")}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.close()
		return nil, os.NewSyscallError("unlock terminal", err)
	}
	// ioctl_tty(2): no path leads to another file than the master's own peer.
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		t.close()
		return nil, os.NewSyscallError("open terminal", errno)
	}
	t.harness = os.NewFile(peer, "harness-terminal")
	if err := t.resize(size); err != nil {
		t.close()
		return nil, os.NewSyscallError("resize terminal", err)
	}
	return t, nil
}

// resize sends SIGWINCH to the terminal's foreground processes when the size changes.
func (t *terminal) resize(size wire.Size) error {
	var err error
	raw, cerr := t.master.SyscallConn()
	if cerr != nil {
		return cerr
	}
	cerr = raw.Control(func(fd uintptr) {
		err = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols})
	})
	if cerr != nil {
		return cerr
	}
	return err
}

func (t *terminal) close() {
	t.master.Close()
	if t.harness != nil {
		t.harness.Close()
	}
}
