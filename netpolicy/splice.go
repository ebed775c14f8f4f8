package netpolicy

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Pipes are as large as pipeSize as long as there are no more than keptPipes: what
// lies in one is memory that nobody is charged for. Others have the kernel's default
// size, a quarter of it.
const (
	pipeSize  = 256 << 10
	keptPipes = 64
)

// pipes moves bytes between sockets inside the kernel, through pipes that are taken
// only while there is something to move: an idle connection has none.
type pipes struct {
	free chan *pipe
	kept atomic.Int64
	// stall is how long a write waits before the other end is looked at.
	stall time.Duration
}

type pipe struct {
	r, w int
	kept bool
}

func newPipes(stall time.Duration) *pipes {
	return &pipes{free: make(chan *pipe, keptPipes), stall: stall}
}

// get gives an empty pipe.
func (p *pipes) get() (*pipe, error) {
	select {
	case one := <-p.free:
		return one, nil
	default:
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("pipe2", err)
	}
	one := &pipe{r: fds[0], w: fds[1], kept: p.kept.Add(1) <= keptPipes}
	if !one.kept {
		p.kept.Add(-1)
		return one, nil
	}
	// Past pipe-user-pages-soft (pipe(7)) it stays as small as it is.
	_, _ = unix.FcntlInt(uintptr(one.w), unix.F_SETPIPE_SZ, pipeSize)
	return one, nil
}

// put takes an empty pipe back.
func (p *pipes) put(one *pipe) {
	if one.kept {
		p.free <- one // there is room for all that are kept
		return
	}
	p.drop(one)
}

// drop closes a pipe with what is in it.
func (p *pipes) drop(one *pipe) {
	if one.kept {
		p.kept.Add(-1)
	}
	unix.Close(one.r)
	unix.Close(one.w)
}

// close closes the free ones.
func (p *pipes) close() {
	for {
		select {
		case one := <-p.free:
			p.drop(one)
		default:
			return
		}
	}
}

// pair carries bytes between a and b until both directions have ended, and closes
// both. A direction that ends leaves the other one open; an
// error of any kind resets both. It gives the bytes of each direction.
func (p *pipes) pair(a, b *net.TCPConn) (ab, ba int64) {
	var ended atomic.Int32
	one := func(dst, src *net.TCPConn, n *int64) {
		err := p.copy(dst, src, n)
		if err == nil {
			err = dst.CloseWrite()
		}
		if err == nil && ended.Add(1) == 2 {
			a.Close()
			b.Close()
			return
		}
		// A reset of src must end the other direction too, which may not touch it.
		if err == nil {
			err = waitBroken(src)
		}
		if ended.Load() != 2 && err != nil {
			reset(a)
			reset(b)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		one(a, b, &ba)
	}()
	one(b, a, &ab)
	<-done
	return ab, ba
}

// copy moves bytes from src to dst until src ends.
func (p *pipes) copy(dst, src *net.TCPConn, moved *int64) error {
	from, err := src.SyscallConn()
	if err != nil {
		return err
	}
	to, err := dst.SyscallConn()
	if err != nil {
		return err
	}
	for {
		one, n, err := p.fill(from)
		if err != nil || n == 0 {
			return err
		}
		if err := p.drain(dst, to, from, one, n); err != nil {
			p.drop(one)
			return err
		}
		p.put(one)
		*moved += int64(n)
	}
}

// fill waits for bytes and gives them in a pipe; none at the end.
func (p *pipes) fill(from syscall.RawConn) (one *pipe, n int, err error) {
	waited := from.Read(func(fd uintptr) bool {
		if one, err = p.get(); err != nil {
			return true
		}
		if n, err = splice(int(fd), one.w, pipeSize); n == 0 && atMark(int(fd)) {
			n, err = passMark(int(fd), one.w)
		}
		if n > 0 {
			return true
		}
		p.put(one)
		return !errors.Is(err, unix.EAGAIN)
	})
	return one, n, errors.Join(waited, err)
}

// drain empties the pipe. While dst takes nothing, it sees whether src is broken.
func (p *pipes) drain(dst *net.TCPConn, to, from syscall.RawConn, one *pipe, left int) error {
	stalled := false
	for {
		var err error
		waited := to.Write(func(fd uintptr) bool {
			for left > 0 && err == nil {
				var n int
				if n, err = splice(one.r, int(fd), left); n == 0 && err == nil {
					err = io.ErrNoProgress
				}
				left -= n
			}
			if !errors.Is(err, unix.EAGAIN) {
				return true
			}
			stalled, err = true, nil
			_ = dst.SetWriteDeadline(time.Now().Add(p.stall))
			return false
		})
		if errors.Is(waited, os.ErrDeadlineExceeded) && !broken(from) {
			_ = dst.SetWriteDeadline(time.Time{})
			continue
		}
		if stalled {
			_ = dst.SetWriteDeadline(time.Time{})
		}
		return errors.Join(waited, err)
	}
}

// splice moves what there is without waiting. Both ends are non-blocking.
func splice(from, to, most int) (int, error) {
	for {
		n, err := unix.Splice(from, nil, to, nil, most, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		if !errors.Is(err, unix.EINTR) {
			return int(max(n, 0)), err
		}
	}
}

// atMark reports whether an urgent byte is next (tcp(7)). splice never gets past it:
// the rest would wait forever, and be lost at the end.
func atMark(fd int) bool {
	at, err := unix.IoctlGetInt(fd, unix.SIOCATMARK)
	return err == nil && at != 0
}

// passMark drops the urgent byte, as a read does, and moves what follows.
func passMark(from, to int) (int, error) {
	buf := make([]byte, 4096) // an empty pipe has room for it
	n, err := unix.Read(from, buf)
	if n > 0 {
		n, err = unix.Write(to, buf[:n])
	}
	return max(n, 0), err
}

var errBroken = errors.New("connection reset")

// waitBroken waits until the connection, whose peer sends nothing more, is reset or
// closed.
func waitBroken(c *net.TCPConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	err = raw.Read(func(fd uintptr) bool { return socketError(fd) })
	if err == nil {
		err = errBroken
	}
	return err
}

func broken(raw syscall.RawConn) bool {
	bad := false
	err := raw.Control(func(fd uintptr) { bad = socketError(fd) })
	return err != nil || bad
}

func socketError(fd uintptr) bool {
	n, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
	return err != nil || n != 0
}
