package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// goodbye bounds the wait for the shim to take the exit frame.
const goodbye = 10 * time.Second

// initProcess is init after its hello: PID 1, unless it is attached to a container that is
// not agentshim's.
type initProcess struct {
	conn     *wire.Conn
	attached bool
	oomScore int
	oomKills int
	tunnels  *wire.Tunnels
	// own is a run's only step. A session has none that runs: its home's files only.
	own     *step
	session *session
}

// serve takes the shim's frames until the connection ends, and with it the
// container, or its one step: the stream is the lifeline.
func (in *initProcess) serve() {
	in.own = newStep(in.conn, 0)
	in.session = newSession()
	for {
		f, err := in.conn.Recv()
		if err == nil {
			err = in.handle(f)
		}
		if err != nil && !errors.Is(err, io.EOF) {
			fmt.Fprintf(os.Stderr, "agentshim-init: connection: %v\n", err)
		}
		if err != nil {
			in.abandon()
		}
	}
}

func (in *initProcess) handle(f wire.Frame) error {
	switch {
	case in.attached && f.Step == 0:
		return unexpected(f)
	case f.Kind == wire.KindFinish:
		return in.finish(f)
	case f.Step != 0:
		return in.handleStep(f)
	}
	switch f.Kind {
	case wire.KindProbe, wire.KindFile, wire.KindFileData, wire.KindLaunch:
		if in.own.launched || in.session.begun {
			return unexpected(f)
		}
		return in.prepare(in.own, f)
	case wire.KindData, wire.KindEOF, wire.KindCredit, wire.KindSignal, wire.KindWindow:
		if !in.own.launched {
			return unexpected(f)
		}
		return in.own.stream(f)
	case wire.KindDial, wire.KindTunnelData, wire.KindTunnelEOF, wire.KindTunnelCredit, wire.KindTunnelEnd:
		if !in.own.launched && !in.session.begun {
			return unexpected(f)
		}
		return in.tunnel(f)
	default:
		return unexpected(f)
	}
}

// tunnel handles the frames of published ports. What fails in one is the tunnel's end, not
// the container's.
func (in *initProcess) tunnel(f wire.Frame) error {
	if f.Kind == wire.KindDial {
		return in.tunnels.Accept(f, dial)
	}
	return in.tunnels.Handle(f)
}

func unexpected(f wire.Frame) error {
	return fmt.Errorf("%w: frame kind %d of stream %d, step %d is unexpected", wire.ErrProtocol, f.Kind, f.Stream, f.Step)
}

// prepare handles what comes before a harness runs. After a refusal it does
// nothing more; the shim may have sent on before it read that.
func (in *initProcess) prepare(s *step, f wire.Frame) error {
	if s.refused {
		return nil
	}
	var refused *wire.Refused
	switch f.Kind {
	case wire.KindProbe:
		return in.conn.SendJSON(wire.KindProbed, probeNetwork())
	case wire.KindFile:
		var file wire.File
		if err := f.JSON(&file); err != nil {
			return err
		}
		refused = s.begin(file)
	case wire.KindFileData:
		if s.file == nil {
			return unexpected(f)
		}
		refused = s.file.write(f.Payload)
	case wire.KindLaunch:
		var l wire.Launch
		if err := f.JSON(&l); err != nil {
			return err
		}
		refused = in.launch(s, l)
	}
	if refused == nil {
		return nil
	}
	s.refused = true
	return s.conn.SendJSON(wire.KindRefused, refused)
}

// run pumps a run's streams, waits for the harness's end, kills what it left and
// says how it ended.
func (in *initProcess) run(p *streams) {
	pumped := in.own.pump(p)
	go func() {
		exit := reap(int(in.own.pid.Load()), func() { _ = syscall.Kill(-1, syscall.SIGKILL) }) // ESRCH: nobody is left
		in.own.drain(p, pumped)
		in.exit(exit)
	}()
}

// exit sends the home's files back and says how the harness, or the session, ended.
func (in *initProcess) exit(exit wire.Exit) {
	if err := sendBacks(in.conn, wire.HomeDir, in.own.backs); err != nil {
		fatal("write-back", err)
	}
	exit.OOMKills = oomKills(in.oomKills)
	if err := in.conn.SendJSON(wire.KindExit, exit); err != nil {
		fatal("exit", err)
	}
	// The shim closes the connection once it has read the frame; serve then
	// ends the container. An engine that dropped the frame must not keep it.
	time.Sleep(goodbye)
	os.Exit(exitRefused)
}

// reap waits for every child: its own and the orphans that it adopts. When the
// harness ends, kill is called each turn: a process may have been adopted or entered
// from outside since. reap returns when no child is left.
func reap(harness int, kill func()) wire.Exit {
	var exit wire.Exit
	for {
		var ws syscall.WaitStatus
		var ru syscall.Rusage
		pid, err := syscall.Wait4(-1, &ws, 0, &ru)
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil: // ECHILD: none left
			return exit
		case pid == harness:
			left := exit.Left
			exit = exitOf(ws, ru)
			exit.Left = left
			harness = -1
		case harness == -1:
			exit.Left++
		}
		if harness == -1 {
			kill()
		}
	}
}

func exitOf(ws syscall.WaitStatus, ru syscall.Rusage) wire.Exit {
	e := wire.Exit{
		UserMicros: ru.Utime.Nano() / 1000, SystemMicros: ru.Stime.Nano() / 1000, MaxRSSKiB: ru.Maxrss,
	}
	if ws.Signaled() {
		e.Code, e.Signal = -1, int(ws.Signal())
		return e
	}
	e.Code = ws.ExitStatus()
	return e
}

// probeTimeout bounds each attempt of the network probe.
const probeTimeout = time.Second

// The probe's targets are documentation addresses (RFC 5737, RFC 3849): no host
// has them.
var (
	probe4 = &unix.SockaddrInet4{Port: 9, Addr: [4]byte{192, 0, 2, 1}}
	probe6 = &unix.SockaddrInet6{Port: 9, Addr: [16]byte{0x20, 0x01, 0x0d, 0xb8, 15: 1}}
)

// probeNetwork tries each way out and reports what the kernel answers.
func probeNetwork() wire.Probed {
	start := time.Now()
	p := wire.Probed{
		UDP4:  attempt(unix.AF_INET, unix.SOCK_DGRAM, 0, probe4),
		UDP6:  attempt(unix.AF_INET6, unix.SOCK_DGRAM, 0, probe6),
		TCP4:  attempt(unix.AF_INET, unix.SOCK_STREAM, 0, probe4),
		TCP6:  attempt(unix.AF_INET6, unix.SOCK_STREAM, 0, probe6),
		VSock: attempt(unix.AF_VSOCK, unix.SOCK_STREAM, 0, nil),
		Ping:  attempt(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP, nil),
	}
	p.Micros = time.Since(start).Microseconds()
	return p
}

// attempt opens a socket, connects it and sends one byte as a datagram, or waits for
// what a connection's other end does: a gateway takes a connection to refuse it.
func attempt(family, kind, protocol int, to unix.Sockaddr) string {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return errnoName(err)
	}
	defer unix.Close(fd)
	if to == nil {
		return "open"
	}
	err = unix.Connect(fd, to)
	if errors.Is(err, unix.EINPROGRESS) {
		err = await(fd, unix.POLLOUT)
	}
	switch {
	case err != nil:
	case kind == unix.SOCK_DGRAM:
		_, err = unix.Write(fd, []byte{0})
	default:
		err = await(fd, unix.POLLIN)
	}
	if err == nil {
		return "open"
	}
	return errnoName(err)
}

// await waits for an event on a socket and returns the socket's error.
func await(fd int, events int16) error {
	p := []unix.PollFd{{Fd: int32(fd), Events: events}}
	for deadline := time.Now().Add(probeTimeout); ; {
		n, err := unix.Poll(p, int(time.Until(deadline).Milliseconds())+1)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return unix.ETIMEDOUT
		}
		code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil || code == 0 {
			return err
		}
		return syscall.Errno(code)
	}
}

func errnoName(err error) string {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return err.Error()
	}
	if errno == unix.ETIMEDOUT {
		return "timeout"
	}
	return unix.ErrnoName(errno)
}
