package shim

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim/wire"
)

// steered records what control does to a harness and when, since start.
type steered struct {
	start  time.Time
	orders []wire.Kind
	sent   []syscall.Signal
	mu     sync.Mutex // abandon and cut don't wait for each other
	at     map[string]time.Duration
}

func (s *steered) note(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at[what] = time.Since(s.start)
}

func (s *steered) order(kind wire.Kind, n uint32) {
	s.orders = append(s.orders, kind)
	if kind == wire.KindSignal {
		s.sent = append(s.sent, syscall.Signal(n))
		if syscall.Signal(n) == unix.SIGKILL {
			s.note("kill")
		}
	}
}

func (s *steered) abandon() { s.note("abandon") }
func (s *steered) cut()     { s.note("cut") }

// TestControl: the signals, when each was sent, and what control made of them. Times
// are in a bubble of their own and exact.
func TestControl(t *testing.T) {
	type event struct {
		after time.Duration
		sig   syscall.Signal
	}
	const second = time.Second
	for _, tt := range []struct {
		name     string
		grace    string
		timeout  time.Duration
		attached bool
		events   []event
		sent     []syscall.Signal
		kill     time.Duration // 0 for none
		first    syscall.Signal
		timedOut bool
	}{
		{"nothing", "10s", 0, false, nil, nil, 0, 0, false},
		{"one", "10s", 0, false, []event{{second, unix.SIGTERM}}, []syscall.Signal{unix.SIGTERM, unix.SIGKILL}, 11 * second, unix.SIGTERM, false},
		{"a long grace", "90s", 0, false, []event{{0, unix.SIGINT}}, []syscall.Signal{unix.SIGINT, unix.SIGKILL}, 90 * second, unix.SIGINT, false},
		{
			"a second one shortens", "10s", 0, false,
			[]event{{0, unix.SIGINT}, {2500 * time.Millisecond, unix.SIGINT}},
			[]syscall.Signal{unix.SIGINT, unix.SIGINT, unix.SIGKILL},
			3500 * time.Millisecond, unix.SIGINT, false,
		},
		{
			"a second one never lengthens", "500ms", 0, false,
			[]event{{0, unix.SIGINT}, {400 * time.Millisecond, unix.SIGTERM}},
			[]syscall.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGKILL},
			500 * time.Millisecond, unix.SIGINT, false,
		},
		{
			"many", "10s", 0, false,
			[]event{{0, unix.SIGINT}, {100 * time.Millisecond, unix.SIGINT}, {100 * time.Millisecond, unix.SIGINT}},
			[]syscall.Signal{unix.SIGINT, unix.SIGINT, unix.SIGINT, unix.SIGKILL},
			1100 * time.Millisecond, unix.SIGINT, false,
		},
		{"hang-up of pipes", "10s", 0, false, []event{{0, unix.SIGHUP}}, []syscall.Signal{unix.SIGHUP, unix.SIGKILL}, 10 * second, unix.SIGHUP, false},
		{"hang-up of the terminal, seen thrice", "10s", 0, true, []event{{0, unix.SIGHUP}, {0, unix.SIGHUP}, {0, unix.SIGHUP}}, []syscall.Signal{unix.SIGHUP, unix.SIGKILL}, second, unix.SIGHUP, false},
		{
			"the harness's own business", "10s", 0, false,
			[]event{{0, unix.SIGUSR1}, {0, unix.SIGUSR2}, {0, unix.SIGQUIT}, {0, unix.SIGCONT}, {0, unix.SIGPIPE}},
			[]syscall.Signal{unix.SIGUSR1, unix.SIGUSR2, unix.SIGQUIT, unix.SIGCONT},
			0, 0, false,
		},
		{"timeout", "2s", 5 * second, false, nil, []syscall.Signal{unix.SIGTERM, unix.SIGKILL}, 7 * second, unix.SIGTERM, true},
		{
			"timeout in a grace", "10s", 5 * second, false,
			[]event{{second, unix.SIGINT}},
			[]syscall.Signal{unix.SIGINT, unix.SIGKILL},
			11 * second, unix.SIGINT, false,
		},
		{
			"signal after the timeout", "10s", second, false,
			[]event{{2 * second, unix.SIGINT}},
			[]syscall.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGKILL},
			3 * second, unix.SIGTERM, true,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cancelled := func(error) { t.Error("the run was cancelled while the harness ran") }
				c := newControl(Job{Harness: harness.Harness{StopGrace: tt.grace}}, cancelled)
				h := &steered{start: time.Now(), at: map[string]time.Duration{}}
				c.started(h, tt.attached, tt.timeout)
				for _, e := range tt.events {
					time.Sleep(e.after)
					c.take(e.sig)
				}
				time.Sleep(5 * time.Minute)
				synctest.Wait()
				if !slices.Equal(h.sent, tt.sent) || h.at["kill"] != tt.kill {
					t.Errorf("sent %v, killed after %v; want %v after %v", h.sent, h.at["kill"], tt.sent, tt.kill)
				}
				if tt.kill > 0 && (h.at["abandon"] != tt.kill+killTimeout || h.at["cut"] != tt.kill+2*killTimeout) {
					t.Errorf("after the kill: %v", h.at)
				}
				if first, timedOut, killed := c.outcome(); first != tt.first || timedOut != tt.timedOut || killed != (tt.kill > 0) {
					t.Errorf("outcome: %v %v %v", first, timedOut, killed)
				}
			})
		})
	}
}

// stuck is a harness behind an engine that takes nothing: to give its output up waits until
// it is cut.
type stuck struct {
	steered
	over chan struct{}
}

func (s *stuck) abandon() { <-s.over }

func (s *stuck) cut() {
	s.steered.cut()
	close(s.over)
}

// TestControlCutsWhatIsStuck: a timeout and a signal end such a run, too.
func TestControlCutsWhatIsStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newControl(Job{Harness: harness.Harness{StopGrace: "2s"}}, func(error) { t.Error("cancelled") })
		h := &stuck{steered: steered{start: time.Now(), at: map[string]time.Duration{}}, over: make(chan struct{})}
		c.started(h, false, time.Second)
		time.Sleep(time.Minute)
		synctest.Wait()
		if want := 3*time.Second + 2*killTimeout; h.at["cut"] != want {
			t.Errorf("cut after %v, want %v", h.at["cut"], want)
		}
	})
}

// TestControlEnds: what comes once the harness has ended changes nothing.
func TestControlEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newControl(Job{Harness: harness.Harness{StopGrace: "2s"}}, func(error) { t.Error("cancelled") })
		h := &steered{at: map[string]time.Duration{}}
		c.started(h, true, 10*time.Second)
		time.Sleep(9 * time.Second)
		c.exited()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if len(h.sent) > 0 {
			t.Errorf("the timeout counts after the exit: %v", h.sent)
		}
		c.take(unix.SIGTERM) // output still waits for its reader
		c.over()
		c.take(unix.SIGTERM)
		c.resize()
		time.Sleep(time.Minute)
		synctest.Wait()
		if !slices.Equal(h.sent, []syscall.Signal{unix.SIGTERM}) || len(h.at) > 0 {
			t.Errorf("sent %v, %v", h.sent, h.at)
		}
	})
}

// TestControlBefore: signals before the harness runs.
func TestControlBefore(t *testing.T) {
	for sig, want := range map[syscall.Signal]bool{
		unix.SIGINT: true, unix.SIGTERM: true, unix.SIGHUP: true, unix.SIGQUIT: true,
		unix.SIGUSR1: false, unix.SIGUSR2: false, unix.SIGCONT: false, unix.SIGPIPE: false, unix.SIGWINCH: false,
	} {
		ctx, cancel := context.WithCancelCause(context.Background())
		newControl(Job{}, cancel).take(sig)
		var got SignalError
		if is := errors.As(context.Cause(ctx), &got); is != want || want && got.Signal != sig {
			t.Errorf("%v: %v", sig, context.Cause(ctx))
		}
	}
}

// TestControlLaunch: a signal that comes when the harness may run already does not say that it
// never did: it waits for it. One that came before keeps it from being started.
func TestControlLaunch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newControl(Job{Harness: harness.Harness{StopGrace: "2s"}}, func(error) { t.Error("cancelled") })
		if !c.launch() {
			t.Error("not to be launched")
		}
		for _, sig := range []syscall.Signal{unix.SIGQUIT, unix.SIGUSR1, unix.SIGTERM} {
			c.take(sig)
		}
		time.Sleep(time.Minute)
		h := &steered{start: time.Now(), at: map[string]time.Duration{}}
		c.started(h, false, 0)
		time.Sleep(time.Minute)
		synctest.Wait()
		if !slices.Equal(h.sent, []syscall.Signal{unix.SIGQUIT, unix.SIGTERM, unix.SIGKILL}) || h.at["kill"] != 2*time.Second {
			t.Errorf("sent %v, killed after %v", h.sent, h.at["kill"])
		}
	})
	c := newControl(Job{}, func(error) {})
	c.take(unix.SIGINT)
	if c.launch() {
		t.Error("launched behind a signal")
	}
	c = newControl(Job{}, func(error) { t.Error("cancelled") })
	c.launch()
	c.take(unix.SIGINT)
	c.over() // it was refused
	again := 0
	restore := c.during(func(error) { again++ })
	c.take(unix.SIGINT)
	restore()
	if again != 1 {
		t.Errorf("what follows was cancelled %d times", again)
	}
}

// TestControlSuspends: a stop gives the terminal back first. That it is raw again
// after it is tested on a terminal, in integration.
func TestControlSuspends(t *testing.T) {
	c := newControl(Job{Terminal: os.Stdin}, nil)
	stopped := 0
	c.suspend = func() { stopped++ }
	c.take(unix.SIGTSTP)
	if stopped != 1 || !slices.Contains(Signals(true), os.Signal(unix.SIGTSTP)) || slices.Contains(Signals(false), os.Signal(unix.SIGTSTP)) {
		t.Errorf("stopped %d times", stopped)
	}
}

func TestCauseOf(t *testing.T) {
	kill := func(oom int64) wire.Exit { return wire.Exit{Code: -1, Signal: 9, OOMKills: oom} }
	for _, tt := range []struct {
		name          string
		exit          wire.Exit
		asked, killed bool
		want          Cause
	}{
		{"exit code", wire.Exit{Code: 3}, false, false, CauseItself},
		{"137 is an exit code too", wire.Exit{Code: 137, OOMKills: 1}, false, false, CauseItself},
		{"signal of its own", wire.Exit{Code: -1, Signal: 11}, false, false, CauseItself},
		{"asked, and it exited", wire.Exit{Code: 0}, true, false, CauseSignal},
		{"asked, and it died", wire.Exit{Code: -1, Signal: 15}, true, false, CauseSignal},
		{"killed by us", kill(0), true, true, CauseKilled},
		{"killed by us, nothing counts OOM", kill(-1), true, true, CauseKilled},
		{"it exited just before our kill", wire.Exit{Code: 4}, true, true, CauseSignal},
		{"OOM", kill(1), false, false, CauseOOM},
		{"OOM in the grace", kill(1), true, false, CauseOOM},
		{"OOM or us", kill(1), true, true, CauseUnknown},
		{"someone", kill(0), false, false, CauseUnknown},
		{"someone, nothing counts OOM", kill(-1), false, false, CauseUnknown},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := causeOf(tt.exit, tt.asked, tt.killed); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}

// TestCountdown: it is exact while the process runs; a late tick, as after a stop,
// counts as one.
func TestCountdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var fired time.Duration
		c := startCountdown(3500*time.Millisecond, func() { fired = time.Since(start) })
		time.Sleep(time.Minute)
		synctest.Wait()
		if fired != 3500*time.Millisecond || c.stop() {
			t.Errorf("fired after %v", fired)
		}
		c = startCountdown(time.Hour, func() { t.Error("a stopped countdown fired") })
		time.Sleep(time.Minute)
		if !c.stop() || (*countdown)(nil).stop() != true {
			t.Error("not stopped in time")
		}
		time.Sleep(2 * time.Hour)
		// As if an hour had passed between two ticks.
		c = &countdown{f: func() {}, left: 3 * time.Second, armed: 1}
		c.ticked(1, tick)
		c.ticked(1, tick) // of a timer that was replaced
		if c.left != 2*time.Second || !c.stop() {
			t.Errorf("left %v after one late tick", c.left)
		}
	})
}
