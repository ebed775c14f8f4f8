package shim

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/shim/wire"
)

// egress is a run's one way out: the gateway that serves the sandbox's sockets, and
// its log. Nil is a run without a way out.
type egress struct {
	gateway *netpolicy.Gateway
	log     *netpolicy.Log
	summary netpolicy.Summary

	mu sync.Mutex
	// during are those of a session's running steps; mu guards them.
	during map[*netpolicy.Summary]bool

	// learn reads the log at the end, and may be nil.
	learn func(netpolicy.Head) (*EgressLearned, error)
	// lost ends the run: a decision that can't be logged must be the last one.
	lost func()
	// unask ends a question to the engine, which an engine that is slow would hold the
	// gateway's end up with.
	unask func()
	// watched is closed with the end of watching the sandbox's network; changed is what
	// ended it before the run did.
	watched chan struct{}
	changed error
	// over is set when init's end of the stream has ended: what goes then is the container's.
	over atomic.Bool
}

// openEgress makes the way out of a proven sandbox. Until let is called, everything
// that comes through it is refused.
func (c *container) openEgress(ctx context.Context, hello wire.Hello, rec *Record) error {
	plan := c.p.plan
	if !plan.Egress.HasGateway() {
		return nil
	}
	listeners, report, err := c.way.open(ctx, hello.NetCookie, hello.Namespaces["net"])
	if err != nil {
		return err
	}
	rec.Egress.Way, rec.Egress.Renderer = plan.EgressWay, printable(report.Renderer)
	if report.Others != "" {
		c.p.job.Notice("warning: the sandbox's network has packet rules that are not agentshim's, and in force too: %s", printable(report.Others))
	}
	e := &egress{lost: sync.OnceFunc(c.lifeline), watched: make(chan struct{}), during: map[*netpolicy.Summary]bool{}}
	if e.log, err = netpolicy.CreateLog(c.p.folders.egressLog(rec.ID), rec.ID, time.Now); err != nil {
		listeners.Close()
		return &Error{Reason: ReasonState, Err: err}
	}
	if plan.Egress.Learning {
		e.learn = func(head netpolicy.Head) (*EgressLearned, error) {
			return learnEgress(c.p.folders.egressLog(rec.ID), rec.ID, head, plan.Egress, c.p.job.LearnWildcards)
		}
	}
	e.use(ctx, c, listeners)
	c.egress = e
	return nil
}

// use has the gateway serve the sandbox's sockets.
func (e *egress) use(ctx context.Context, c *container, l netpolicy.Listeners) {
	ctx, e.unask = context.WithCancel(ctx)
	e.gateway = netpolicy.NewGateway(c.p.plan.Egress.Table(), l, c.siblingNames(ctx), e.event)
	e.gateway.Via(c.p.upstream())
	go e.watch(l.Watch)
}

// event is told every decision.
func (e *egress) event(ev netpolicy.Event) error {
	e.summary.Add(ev)
	e.mu.Lock()
	for s := range e.during {
		s.Add(ev)
	}
	e.mu.Unlock()
	err := e.log.Write(ev)
	if err != nil {
		e.lost()
	}
	return err
}

// refusals begins a summary of its own. The function that it returns ends it and gives what
// was refused meanwhile.
func (e *egress) refusals() func() []string {
	if e == nil {
		return func() []string { return nil }
	}
	s := &netpolicy.Summary{}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.during[s] = true
	return func() []string {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.during, s)
		return s.Lines(maxRefusals)
	}
}

// end says that the container ends, or has ended.
func (e *egress) end() {
	if e != nil {
		e.over.Store(true)
	}
}

// redirected reports whether the live probe's connection came to the gateway.
func (e *egress) redirected() bool { return e == nil || e.gateway.Accepted() > 0 }

// let begins to carry what the policy allows.
func (e *egress) let() {
	if e != nil {
		e.gateway.Open()
	}
}

// maxRefusals is how many lines about refusals a record holds.
const maxRefusals = 20

// close ends all traffic and says in the record what there was. An error says that
// the log does not tell of everything.
func (e *egress) close(rec *Record) error {
	if e == nil {
		return nil
	}
	e.unask()
	ended := e.gateway.Close()
	<-e.watched // the gateway has closed what is watched
	head, err := e.log.Close()
	rec.Egress.Log, rec.Egress.Refusals = &head, e.summary.Lines(maxRefusals)
	if err != nil {
		return &Error{
			Reason: ReasonEgressLost, Msg: "the egress log can't be written, so the run was ended", Err: err,
			Hint: "free space where agentshim keeps its state",
		}
	}
	if e.learn != nil {
		if rec.Egress.Learned, err = e.learn(head); err != nil {
			return &Error{Reason: ReasonState, Msg: "the egress log", Err: err}
		}
	}
	if ended != nil {
		return &Error{Reason: ReasonInternal, Err: ended}
	}
	if e.changed != nil && !(errors.Is(e.changed, netpolicy.ErrGone) && rec.Harness != nil) {
		return &Error{
			Reason: ReasonPosture, Msg: "the run was ended", Err: e.changed,
			Hint: "look for who attaches running containers to networks, or takes them off",
		}
	}
	return nil
}

// probePresets reads what the file's presets stand for on this host.
func (p *prepared) probePresets() error {
	h := p.job.Harness
	probed, err := ProbePresets(h.Egress.Presets, ProbeOptions{Getenv: p.job.getenv}, mounts.AgentFolders(h, p.host.Mounts))
	p.host.Presets = PresetAllow(probed)
	return err
}
