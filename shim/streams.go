package shim

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// stream carries the harness's streams until it has ended and all of its output
// is written.
func (c *container) stream() (wire.Exit, error) {
	if err := c.p.terminal.enter(); err != nil {
		c.lifeline()
		return wire.Exit{}, outputClosed(err)
	}
	defer c.p.terminal.close()
	s := c.newStreams()
	defer s.close()
	c.published.serve(s.tunnels, s.start)
	ctl := c.p.control
	ctl.started(s, c.p.terminal != nil, duration(c.p.job.Harness.Timeout))
	defer ctl.over()
	// The size may have changed since the launch.
	ctl.resize()
	var exit wire.Exit
	for {
		f, err := c.conn.Recv()
		if err == nil {
			err = s.handle(f, &exit)
		}
		if errors.Is(err, errHarnessEnded) {
			ctl.exited()
			return exit, s.finish(exit)
		}
		if err != nil {
			if closed := s.outputError(); closed != nil {
				return exit, closed
			}
			return exit, c.lost(err)
		}
	}
}

var errHarnessEnded = errors.New("harness ended")

// streams are the three of one harness.
type streams struct {
	c     *container
	stdin *wire.Source
	sinks [3]*wire.Sink // by stream; Stdin is unused
	// done gets each output's end.
	done   chan error
	closed chan error
	// giveUp closes dropped: output that nobody takes is given up.
	giveUp  func()
	dropped chan struct{}
	orders  chan order
	over    chan struct{}
	tunnels *wire.Tunnels
}

// order is a number on its way to init.
type order struct {
	kind wire.Kind
	n    uint32
}

// maxOrders is far more than waits where init reads at all.
const maxOrders = 64

func (c *container) newStreams() *streams {
	s := &streams{
		c: c, stdin: wire.NewSource(c.conn, wire.Stdin), done: make(chan error, 2), closed: make(chan error, 3),
		dropped: make(chan struct{}), orders: make(chan order, maxOrders), over: make(chan struct{}),
		tunnels: wire.NewTunnels(c.conn),
	}
	s.giveUp = sync.OnceFunc(func() { close(s.dropped) })
	// The end of standard error is no reason to end a run whose output is read.
	s.pump(wire.Stdout, s.output())
	s.pump(wire.Stderr, &lossy{w: steadyWriter(c.p.job.Stderr)})
	// A write error shows in the receiving loop too.
	s.start(func() { _ = s.stdin.Run(s.input()) })
	s.start(s.sendOrders)
	if f, ok := c.p.job.Stdout.(*os.File); ok && c.p.terminal == nil {
		s.start(func() { s.watch(f) })
	}
	return s
}

// start runs f beside the receiving loop.
func (s *streams) start(f func()) {
	go func() {
		defer s.c.p.terminal.guard()
		f()
	}()
}

// pump writes one output. When it can't, the run ends.
func (s *streams) pump(stream uint8, w io.Writer) {
	sink := wire.NewSink(s.c.conn, stream)
	s.sinks[stream] = sink
	s.start(func() {
		err := sink.Run(w)
		if err != nil && !s.c.finishedConn(err) {
			s.fail(err)
		}
		s.done <- err
	})
}

// fail ends the container because its output can't be written.
func (s *streams) fail(err error) {
	select {
	case s.closed <- err:
	default: // one is enough
	}
	s.cut()
}

// input is what the harness reads. A caller's terminal that ends is gone.
func (s *streams) input() io.Reader {
	r := steadyReader(s.c.p.stdin)
	if s.c.p.terminal != nil {
		return hangups{r: r, gone: func() { s.c.p.control.stop(unix.SIGHUP) }}
	}
	return r
}

// output is where the harness's output goes. A terminal that is gone leaves the
// harness a moment to end.
func (s *streams) output() io.Writer {
	w := steadyWriter(s.c.p.job.Stdout)
	if s.c.p.terminal == nil {
		return w
	}
	return &lossy{w: w, failed: func() { s.c.p.control.stop(unix.SIGHUP) }}
}

// order implements running. One that finds no room is dropped: init does not read,
// and the end of the grace takes care of that.
func (s *streams) order(kind wire.Kind, n uint32) {
	select {
	case s.orders <- order{kind, n}:
	default:
	}
}

func (s *streams) sendOrders() {
	for {
		select {
		case <-s.over:
			return
		case o := <-s.orders:
			// A write error shows in the receiving loop too.
			_ = s.c.conn.SendUint32(o.kind, 0, o.n)
		}
	}
}

// abandon implements running.
func (s *streams) abandon() {
	s.giveUp()
	for _, stream := range []uint8{wire.Stdout, wire.Stderr} {
		// A write error shows in the receiving loop too.
		_ = s.sinks[stream].Abandon()
	}
}

// cut implements running.
func (s *streams) cut() {
	s.c.lifeline()
	s.c.watchdog(endTimeout)
}

// close ends what runs beside the receiving loop and does not end with it.
func (s *streams) close() {
	close(s.over)
	s.unpublish()
}

// unpublish frees the host's ports and resets what came over them.
func (s *streams) unpublish() {
	s.c.published.close()
	s.tunnels.Close()
}

// watchInterval is how soon a watch ends after its run.
const watchInterval = time.Second

// watch ends the run when the reader of a pipe goes away, also while the harness
// writes nothing.
func (s *streams) watch(f *os.File) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	for gone := false; !gone; {
		select {
		case <-s.over:
			return
		default:
		}
		cerr := raw.Control(func(fd uintptr) {
			// Without events, only POLLERR (a pipe without readers), POLLHUP and POLLNVAL.
			p := []unix.PollFd{{Fd: int32(fd)}}
			n, err := unix.Poll(p, int(watchInterval.Milliseconds()))
			gone = err == nil && n > 0
		})
		if cerr != nil {
			return
		}
	}
	s.fail(unix.EPIPE)
}

// finishedConn tells an error of the connection from one of the caller's stream:
// the client's end breaks the pipe that credit is sent over.
func (c *container) finishedConn(err error) bool {
	select {
	case <-c.engine.done():
		return true
	default:
		return errors.Is(err, io.ErrClosedPipe)
	}
}

func (s *streams) handle(f wire.Frame, exit *wire.Exit) error {
	switch f.Kind {
	case wire.KindData:
		if f.Stream == wire.Stdin {
			return wire.ErrProtocol
		}
		return s.sinks[f.Stream].Put(f.Payload)
	case wire.KindEOF:
		if f.Stream == wire.Stdin {
			return wire.ErrProtocol
		}
		s.sinks[f.Stream].CloseWrite()
		return nil
	case wire.KindCredit:
		n, err := f.Uint32()
		if err != nil {
			return err
		}
		if f.Stream != wire.Stdin {
			return wire.ErrProtocol
		}
		return s.stdin.Grant(n)
	case wire.KindTunnelData, wire.KindTunnelEOF, wire.KindTunnelCredit, wire.KindTunnelEnd:
		return s.tunnels.Handle(f)
	case wire.KindBack:
		return s.c.backs.begin(f)
	case wire.KindBackData:
		return s.c.backs.add(f.Payload)
	case wire.KindExit:
		if !s.c.backs.finish() {
			return wire.ErrProtocol
		}
		if err := f.JSON(exit); err != nil {
			return err
		}
		if _, err := exit.Status(); err != nil {
			return err
		}
		return errHarnessEnded
	}
	return wire.ErrProtocol
}

// finish ends the streams of a harness that ended. Where nobody can have seen its
// output, that is no success.
func (s *streams) finish(exit wire.Exit) error {
	s.unpublish()
	err := s.drain()
	if status, _ := exit.Status(); err == nil && status == 0 && s.c.p.terminal.gone() {
		return outputClosed(syscall.EIO)
	}
	return err
}

// drain waits until all output is written or given up.
func (s *streams) drain() error {
	s.stdin.Close()
	// Init ended them before it said how the harness ended. One that did not must
	// not keep this waiting.
	s.sinks[wire.Stdout].CloseWrite()
	s.sinks[wire.Stderr].CloseWrite()
	for range 2 {
		select {
		case err := <-s.done:
			if err != nil {
				return s.outputError()
			}
		case <-s.dropped:
			return nil
		}
	}
	return nil
}

func (s *streams) outputError() error {
	select {
	case err := <-s.closed:
		return outputClosed(err)
	default:
		return nil
	}
}

func outputClosed(err error) error {
	return &Error{Reason: ReasonOutputClosed, Msg: "standard output can't be written", Err: err}
}

// lossy drops everything after the first write that failed.
type lossy struct {
	w io.Writer
	// failed is called once, and may be nil.
	failed func()
	gone   bool
}

func (l *lossy) Write(p []byte) (int, error) {
	if !l.gone {
		_, err := l.w.Write(p)
		if l.gone = err != nil; l.gone && l.failed != nil {
			l.failed()
		}
	}
	return len(p), nil
}

// hangups calls gone when the terminal's input ends: in raw mode, only a terminal
// that is gone does that.
type hangups struct {
	r    io.Reader
	gone func()
}

func (h hangups) Read(p []byte) (int, error) {
	n, err := h.r.Read(p)
	if err != nil {
		h.gone()
	}
	return n, err
}

// steady reads and writes a file whose description another process may set to
// O_NONBLOCK at any time: everyone who inherited it shares that.
type steady struct{ f *os.File }

// steadyReader is r, steady where it is a file.
func steadyReader(r io.Reader) io.Reader {
	if f, ok := r.(*os.File); ok {
		return steady{f}
	}
	return r
}

// steadyWriter is w, steady where it is a file.
func steadyWriter(w io.Writer) io.Writer {
	if f, ok := w.(*os.File); ok {
		return steady{f}
	}
	return w
}

// interruptible is a reader that ends with ctx, also while it waits for data.
type interruptible struct {
	ctx context.Context
	r   io.Reader
}

func (i interruptible) Read(p []byte) (int, error) {
	var n int
	var err error
	buf, done := make([]byte, len(p)), make(chan struct{})
	go func() {
		defer close(done)
		n, err = i.r.Read(buf)
	}()
	select {
	case <-done:
		return copy(p, buf[:n]), err
	case <-i.ctx.Done():
		return 0, context.Cause(i.ctx)
	}
}

func (s steady) Read(p []byte) (int, error) {
	for {
		n, err := s.f.Read(p)
		if n > 0 || !errors.Is(err, syscall.EAGAIN) {
			return n, err
		}
		if err := s.wait(unix.POLLIN); err != nil {
			return 0, err
		}
	}
}

func (s steady) Write(p []byte) (int, error) {
	written := 0
	for {
		n, err := s.f.Write(p[written:])
		written += n
		if !errors.Is(err, syscall.EAGAIN) {
			return written, err
		}
		if err := s.wait(unix.POLLOUT); err != nil {
			return written, err
		}
	}
}

func (s steady) wait(events int16) error {
	raw, err := s.f.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) {
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, -1)
	})
	if cerr != nil {
		return cerr
	}
	if errors.Is(err, syscall.EINTR) {
		return nil
	}
	return err
}
