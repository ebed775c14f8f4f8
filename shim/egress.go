package shim

import (
	"context"
	"errors"
	"sync"
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
	// lost ends the run: a decision that can't be logged must be the last one.
	lost func()
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
	e := &egress{lost: sync.OnceFunc(c.lifeline)}
	if e.log, err = netpolicy.CreateLog(c.p.folders.egressLog(rec.ID), rec.ID, time.Now); err != nil {
		listeners.Close()
		return &Error{Reason: ReasonState, Err: err}
	}
	e.gateway = netpolicy.NewGateway(plan.Egress.Table(), listeners, e.event)
	c.egress = e
	return nil
}

// event is told every decision.
func (e *egress) event(ev netpolicy.Event) error {
	e.summary.Add(ev)
	err := e.log.Write(ev)
	if err != nil {
		e.lost()
	}
	return err
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
	ended := e.gateway.Close()
	head, err := e.log.Close()
	rec.Egress.Log, rec.Egress.Refusals = &head, e.summary.Lines(maxRefusals)
	if err != nil {
		return &Error{
			Reason: ReasonEgressLost, Msg: "the egress log can't be written, so the run was ended", Err: err,
			Hint: "free space where agentshim keeps its state",
		}
	}
	if ended != nil {
		return &Error{Reason: ReasonInternal, Err: ended}
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

// egressFailed puts the log's error before what it led to.
func egressFailed(run, egress error) error {
	var e *Error
	if errors.As(egress, &e) && e.Reason == ReasonEgressLost {
		return egress
	}
	return errors.Join(run, egress)
}
