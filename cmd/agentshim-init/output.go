package main

import (
	"errors"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// output reads one stream of the harness. After end it gives what is in the pipe
// and then io.EOF, whoever still holds the writing end: the agent can have passed
// it out of the container, over a socket in a folder that is mounted elsewhere too.
type output struct {
	f *os.File
	// left counts the bytes still to read, -1 before the end.
	left int
	// terminal says that f is a terminal's master.
	terminal bool
}

// maxTerminal is more than a terminal holds on its way to the master (64 KiB in the
// driver, 4 KiB in the line discipline).
const maxTerminal = 256 << 10

// end is called when no process of the container is left.
func (o *output) end() {
	// Wakes a read that waits; data that is there is read in drain.
	_ = o.f.SetReadDeadline(time.Unix(1, 0))
}

// Read implements io.Reader.
func (o *output) Read(p []byte) (int, error) {
	if o.left < 0 {
		n, err := o.f.Read(p)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
	}
	raw, err := o.f.SyscallConn()
	if err != nil {
		return 0, err
	}
	n := 0
	if cerr := raw.Control(func(fd uintptr) { n, err = o.drain(int(fd), p) }); cerr != nil {
		return 0, cerr
	}
	return n, err
}

// drain reads what was in the pipe at its first call. The descriptor doesn't block.
func (o *output) drain(fd int, p []byte) (int, error) {
	if o.left < 0 {
		left, err := o.pending(fd)
		if err != nil {
			return 0, err
		}
		o.left = left
	}
	if o.left == 0 {
		return 0, io.EOF
	}
	n, err := unix.Read(fd, p[:min(len(p), o.left)])
	// EAGAIN: the other holder of the pipe has read it. A terminal: EAGAIN where
	// another one still holds it, else EIO, and both only once all is read.
	if err != nil || n == 0 {
		return 0, io.EOF
	}
	o.left -= n
	return n, nil
}

// pending is at least what is there to read. TIOCINQ of a terminal leaves out what
// the driver has not handed on yet.
func (o *output) pending(fd int) (int, error) {
	if o.terminal {
		return maxTerminal, nil
	}
	// FIONREAD has the same number as TIOCINQ: ioctl_tty(2).
	return unix.IoctlGetInt(fd, unix.TIOCINQ)
}
