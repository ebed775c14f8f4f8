package shim

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// Signals are those that a caller hands on through Job.Signals: the ones that end a
// run, the ones that are the harness's own business and, with a terminal, its own.
// SIGPIPE is among them because the Go runtime ends a program for a broken standard
// output unless it is asked for; Run does nothing for it but reports the output.
func Signals(terminal bool) []os.Signal {
	list := []os.Signal{
		unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGCONT, unix.SIGPIPE,
	}
	if terminal {
		list = append(list, unix.SIGTSTP, unix.SIGWINCH)
	}
	return list
}

// SignalError is the cause of a run that a signal ended before its harness started.
type SignalError struct{ Signal syscall.Signal }

func (e SignalError) Error() string { return "signal: " + unix.SignalName(e.Signal) }

// Bounds of an end on request.
const (
	// impatience is the grace after a second signal, or when the terminal is gone.
	impatience = time.Second
	// killTimeout is for init to say how the harness ended after it was killed, and
	// then for the output that nobody took to be given up.
	killTimeout = 2 * time.Second
)

// Cause says what ended a harness, as far as there is evidence.
type Cause string

// The causes.
const (
	// CauseItself: it exited, or died of a signal that agentshim has no part in.
	CauseItself Cause = "itself"
	// CauseSignal: it ended after agentshim had passed on a signal or its timeout.
	CauseSignal Cause = "signal"
	// CauseKilled: agentshim killed it when stopGrace was over.
	CauseKilled Cause = "killed"
	// CauseOOM: SIGKILL, not agentshim's, in a container where the kernel has killed
	// for lack of memory.
	CauseOOM Cause = "oom"
	// CauseUnknown: SIGKILL, and nothing says whose.
	CauseUnknown Cause = "unknown"
)

// causeOf judges an end. asked says that a signal to end was passed on, killed that
// agentshim's own SIGKILL followed.
func causeOf(e wire.Exit, asked, killed bool) Cause {
	switch {
	case e.Signal == int(unix.SIGKILL) && e.OOMKills > 0 && killed:
		return CauseUnknown
	case e.Signal == int(unix.SIGKILL) && e.OOMKills > 0:
		return CauseOOM
	case e.Signal == int(unix.SIGKILL) && killed:
		return CauseKilled
	case e.Signal == int(unix.SIGKILL):
		return CauseUnknown
	case asked:
		return CauseSignal
	}
	return CauseItself
}

// running is the harness as control steers it.
type running interface {
	// order sends one number to init. It does not block.
	order(kind wire.Kind, n uint32)
	// abandon gives up output that nobody takes. It may wait for an engine that takes nothing.
	abandon()
	// cut ends the container, and its client if that does not end.
	cut()
}

// control steers one run from outside: the caller's signals and the timeout. Until
// the harness is started, a signal to end cancels the run; from then on it is passed on,
// and stopGrace runs.
type control struct {
	cancel context.CancelCauseFunc
	// terminal is the caller's, nil without one.
	terminal *terminal
	grace    time.Duration
	// suspend stops this process until someone continues it.
	suspend func()

	mu sync.Mutex
	// cancelled says that a signal has ended the run, launching that the harness may run by
	// now: waiting are the signals that came since.
	cancelled, launching bool
	waiting              []syscall.Signal
	harness              running
	// attached says that the harness has the terminal.
	attached bool
	// hungUp says that the terminal is gone.
	hungUp bool
	// first is the first signal to end that was passed on.
	first    syscall.Signal
	timedOut bool
	killed   bool
	timeout  *countdown
	// end is the part of the end that runs: grace, or one of the killTimeouts.
	end *countdown
}

func newControl(j Job, cancel context.CancelCauseFunc) *control {
	c := &control{cancel: cancel, grace: duration(j.Harness.StopGrace), suspend: func() { _ = unix.Kill(unix.Getpid(), unix.SIGSTOP) }}
	if j.Terminal != nil {
		c.terminal = &terminal{f: j.Terminal}
	}
	return c
}

// setGrace sets what a harness has between a signal to end and the kill.
func (c *control) setGrace(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.grace = d
}

// listen takes signals until done is closed.
func (c *control) listen(signals <-chan os.Signal, done <-chan struct{}) {
	defer c.terminal.guard()
	for {
		select {
		case <-done:
			return
		case s := <-signals:
			if sig, ok := s.(syscall.Signal); ok {
				c.take(sig)
			}
		}
	}
}

func (c *control) take(sig syscall.Signal) {
	switch sig {
	case unix.SIGPIPE: // the write's own error says more
	case unix.SIGINT, unix.SIGTERM, unix.SIGHUP:
		c.stop(sig)
	case unix.SIGTSTP:
		c.terminal.leave()
		c.suspend()
	case unix.SIGWINCH:
		c.resize()
	case unix.SIGCONT:
		c.terminal.enterAgain()
		c.resize()
		c.pass(sig)
	default:
		c.pass(sig)
	}
}

// pass hands a signal to the harness; SIGQUIT before it runs ends the run.
func (c *control) pass(sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.harness != nil:
		c.harness.order(wire.KindSignal, uint32(sig))
	case sig == unix.SIGQUIT:
		c.early(sig)
	}
}

// early takes a signal to end before the harness runs.
func (c *control) early(sig syscall.Signal) {
	if c.launching {
		c.waiting = append(c.waiting, sig)
		return
	}
	c.cancelled = true
	c.cancel(SignalError{sig})
}

// resize tells the harness's terminal the size of the caller's.
func (c *control) resize() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.attached && c.harness != nil {
		c.harness.order(wire.KindWindow, c.terminal.size().Packed())
	}
}

// stop passes on a signal to end. The first one starts the grace; a further one
// shortens what is left of it.
func (c *control) stop(sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.harness == nil {
		c.early(sig)
		return
	}
	c.stopLocked(sig)
}

// launch says that the harness is about to be started, which is for the caller not to do
// where it is false: a signal has ended the run. started or over follows.
func (c *control) launch() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.launching = !c.cancelled
	return c.launching
}

func (c *control) stopLocked(sig syscall.Signal) {
	hasty := sig == unix.SIGHUP && c.attached
	// A terminal that is gone shows in its signal, its input and its output.
	if c.killed || hasty && c.hungUp {
		return
	}
	c.hungUp = c.hungUp || hasty
	c.harness.order(wire.KindSignal, uint32(sig))
	if c.end == nil {
		c.first = sig
		c.end = startCountdown(c.grace, c.kill)
	} else {
		hasty = true
	}
	if hasty {
		c.end.shorten(impatience)
	}
}

// started hands over the running harness; attached says that it has the terminal. A
// timeout of 0 is none.
func (c *control) started(h running, attached bool, timeout time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.harness, c.attached, c.launching = h, attached, false
	if timeout > 0 {
		c.timeout = startCountdown(timeout, c.expire)
	}
	for _, sig := range c.waiting {
		if sig == unix.SIGQUIT {
			h.order(wire.KindSignal, uint32(sig))
		} else {
			c.stopLocked(sig)
		}
	}
	c.waiting = nil
}

// expire ends a harness that ran too long. One that is being ended already stays
// with its first cause.
func (c *control) expire() {
	defer c.terminal.guard()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.harness == nil || c.end != nil {
		return
	}
	c.timedOut = true
	c.stopLocked(unix.SIGTERM)
}

// kill ends what is left when the grace is over.
func (c *control) kill() {
	defer c.terminal.guard()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.harness == nil {
		return
	}
	c.killed = true
	h := c.harness
	h.order(wire.KindSignal, uint32(unix.SIGKILL))
	c.end = startCountdown(killTimeout, func() {
		defer c.terminal.guard()
		c.mu.Lock()
		if c.harness != nil {
			c.end = startCountdown(killTimeout, h.cut)
		}
		c.mu.Unlock()
		h.abandon() // last: the cut ends its wait
	})
}

// exited says that init told how the harness ended: no timeout counts any more, but
// output may still wait for its reader.
func (c *control) exited() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.timeout.stop()
}

// over takes the harness back. Later signals have no effect.
func (c *control) over() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.harness, c.launching, c.cancel = nil, false, func(error) {}
	c.timeout.stop()
	c.end.stop()
}

// during lets signals to end call cancel instead of what they did before, until the
// function that it returns is called. That the terminal is gone is none of them: it may
// come behind the end of a harness that it ended.
func (c *control) during(cancel context.CancelCauseFunc) (restore func()) {
	if c == nil {
		return func() {}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.cancel
	c.cancel = func(err error) {
		if !errors.Is(err, SignalError{unix.SIGHUP}) {
			cancel(err)
		}
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.cancel = before
	}
}

// outcome is what control had to do with the end.
func (c *control) outcome() (first syscall.Signal, timedOut, killed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.first, c.timedOut, c.killed
}

// duration is a validated field of the harness file; 0 for none.
func duration(text string) time.Duration {
	d, _ := time.ParseDuration(text)
	return d
}

// countdown calls a function once, after a time in which this process ran: while it
// is stopped (SIGSTOP), at most one tick passes. The time may be up to a tick's
// lateness per tick longer than asked for.
type countdown struct {
	f func()

	mu    sync.Mutex
	left  time.Duration
	timer *time.Timer
	// armed numbers the timers: one that was replaced may fire still.
	armed int
	over  bool
}

// tick is the most that passes while the process is stopped.
const tick = time.Second

func startCountdown(d time.Duration, f func()) *countdown {
	c := &countdown{f: f, left: d}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.arm()
	return c
}

func (c *countdown) arm() {
	c.armed++
	number, step := c.armed, min(c.left, tick)
	c.timer = time.AfterFunc(step, func() { c.ticked(number, step) })
}

func (c *countdown) ticked(number int, step time.Duration) {
	c.mu.Lock()
	if c.over || c.armed != number {
		c.mu.Unlock()
		return
	}
	if c.left -= step; c.left > 0 {
		c.arm()
		c.mu.Unlock()
		return
	}
	c.over = true
	c.mu.Unlock()
	c.f()
}

// within waits for done as long as a countdown takes; false when that was too short.
func within(d time.Duration, done <-chan struct{}) bool {
	late := make(chan struct{})
	defer startCountdown(d, func() { close(late) }).stop()
	select {
	case <-done:
		return true
	case <-late:
		return false
	}
}

// shorten makes at most d of the time left.
func (c *countdown) shorten(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over || c.left <= d {
		return
	}
	c.timer.Stop()
	c.left = d
	c.arm()
}

// stop says that f will not be called; false when it was, or is just being. A nil
// countdown is stopped.
func (c *countdown) stop() bool {
	if c == nil {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return false
	}
	c.over = true
	c.timer.Stop()
	return true
}
