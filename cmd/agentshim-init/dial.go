package main

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// dialTimeout bounds a connection to a server whose queue is full.
const dialTimeout = 10 * time.Second

// tunnelCalls is held for the system calls on the sockets of tunnels, of which none
// blocks: however many there are, they need one thread of spareThreads. (close(2) is left
// out: os.File may wait in it for a call that waits for this.)
var tunnelCalls sync.Mutex

// dial connects to a port of the sandbox's loopback, of IPv6 where IPv4 has nothing there.
func dial(port uint16) (wire.Socket, error) {
	s, err := connect(unix.AF_INET, &unix.SockaddrInet4{Port: int(port), Addr: [4]byte{127, 0, 0, 1}})
	if errors.Is(err, unix.ECONNREFUSED) {
		s, err = connect(unix.AF_INET6, &unix.SockaddrInet6{Port: int(port), Addr: [16]byte{15: 1}})
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// socket is a connected TCP socket. The net package has more of them than init needs.
type socket struct {
	*os.File
	raw syscall.RawConn
}

func connect(family int, to unix.Sockaddr) (*socket, error) {
	fd, err := openSocket(family, to)
	if err != nil {
		return nil, err
	}
	// The runtime polls it, since it doesn't block; only now, because the poller takes a
	// socket that isn't connecting for one that is ready.
	s := &socket{File: os.NewFile(uintptr(fd), "tunnel")}
	if s.raw, err = s.SyscallConn(); err == nil {
		err = s.connected()
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func openSocket(family int, to unix.Sockaddr) (int, error) {
	tunnelCalls.Lock()
	defer tunnelCalls.Unlock()
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, wire.TunnelBuffer),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, wire.TunnelBuffer),
		unix.Connect(fd, to),
	)
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// connected waits for the end of the handshake.
func (s *socket) connected() error {
	if err := s.SetWriteDeadline(time.Now().Add(dialTimeout)); err != nil {
		return err
	}
	err := s.try(s.raw.Write, func(fd int) error {
		switch code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); {
		case err != nil:
			return err
		case code != 0:
			return syscall.Errno(code)
		}
		if _, err := unix.Getpeername(fd); err != nil {
			return unix.EAGAIN // ENOTCONN: woken too early
		}
		return nil
	})
	return errors.Join(err, s.SetWriteDeadline(time.Time{}))
}

// try makes a call when the socket is ready for it, again for EAGAIN.
func (s *socket) try(when func(func(uintptr) bool) error, call func(fd int) error) error {
	var err error
	werr := when(func(fd uintptr) bool {
		tunnelCalls.Lock()
		defer tunnelCalls.Unlock()
		for err = call(int(fd)); errors.Is(err, unix.EINTR); err = call(int(fd)) {
		}
		return !errors.Is(err, unix.EAGAIN)
	})
	if werr != nil {
		return werr
	}
	return err
}

// Read implements io.Reader.
func (s *socket) Read(p []byte) (int, error) {
	n := 0
	err := s.try(s.raw.Read, func(fd int) (err error) {
		n, err = unix.Read(fd, p)
		return err
	})
	if err == nil && n == 0 && len(p) > 0 {
		err = io.EOF
	}
	return max(n, 0), err
}

// Write implements io.Writer. Its end gone is EPIPE; the kernel drops the signal of a
// first process.
func (s *socket) Write(p []byte) (int, error) {
	written := 0
	for written < len(p) {
		n := 0
		err := s.try(s.raw.Write, func(fd int) (err error) {
			n, err = unix.Write(fd, p[written:])
			return err
		})
		if err != nil {
			return written, err
		}
		written += n
	}
	return written, nil
}

// CloseWrite implements wire.Socket.
func (s *socket) CloseWrite() error {
	return s.control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
}

// Reset implements wire.Socket: socket(7), SO_LINGER of 0.
func (s *socket) Reset() {
	_ = s.control(func(fd int) error {
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	})
	s.Close()
}

func (s *socket) control(call func(fd int) error) error {
	var err error
	cerr := s.raw.Control(func(fd uintptr) {
		tunnelCalls.Lock()
		defer tunnelCalls.Unlock()
		err = call(int(fd))
	})
	if cerr != nil {
		return cerr
	}
	return err
}
