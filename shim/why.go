package shim

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/netpolicy"
)

// Answer is what a harness file's egress policy says of one target.
type Answer struct {
	// Target is canonical, with its port.
	Target  string `json:"target"`
	Allowed bool   `json:"allowed"`
	// Mode is the policy's, Rule what allowed or denied the target.
	Mode string `json:"mode"`
	Rule string `json:"rule,omitempty"`
	// Reason and Why say why it is refused, Entry which allow entry would permit it.
	Reason netpolicy.Refusal `json:"reason,omitempty"`
	Why    string            `json:"why,omitempty"`
	Entry  string            `json:"entry,omitempty"`
	// Checks are what is judged of an allowed target when it is used.
	Checks []string `json:"checks,omitempty"`
	// Proxy is the upstream proxy that carries an allowed target, without its credentials.
	Proxy string `json:"proxy,omitempty"`
	// Unjudged says that the proxy looks the name up: nobody judges where it leads.
	Unjudged bool `json:"unjudged,omitempty"`
	// Unknown says why the engine does not tell what is in the network of mode network: a
	// container of it is allowed also where Allowed is false.
	Unknown string `json:"unknown,omitempty"`
}

// Why decides on one target, NAME[:PORT] or an address, as the gateway would, without
// looking anything up. Only for mode network the engine is asked, what is in its network.
func Why(ctx context.Context, j Job, target string) (Answer, error) {
	j = j.withDefaults()
	p := &prepared{job: j}
	var err error
	if p.host.Mounts, err = mounts.Probe(j.Harness, mounts.ProbePaths{Home: homeFolder(j.getenv)}); err != nil {
		return Answer{}, asError(err)
	}
	if err := errors.Join(p.probePresets(), p.probeProxy()); err != nil {
		return Answer{}, err
	}
	t, err := netpolicy.ParseTarget(target)
	container := false // the name can only be one's
	if err != nil && j.Harness.Egress.Mode == netpolicy.AttachNetwork {
		if sibling, serr := netpolicy.ParseSibling(target); serr == nil {
			t, container, err = sibling, true, nil
		}
	}
	if err != nil {
		return Answer{}, &Error{Reason: ReasonSpecInvalid, Err: err, Hint: "write NAME[:PORT], ADDRESS[:PORT] or [ADDRESS]:PORT"}
	}
	unknown := p.probeAttached(ctx)
	if errors.Is(unknown, ReasonPolicy) {
		return Answer{}, unknown
	}
	policy, err := netpolicy.Compile(j.Harness.Egress, p.host.Presets, p.host.Network)
	if err != nil {
		return Answer{}, &Error{Reason: ReasonPolicy, Err: err}
	}
	if !policy.HasGateway() {
		return Answer{
			Target: t.String(), Mode: policy.Mode, Reason: netpolicy.RefusedUnlisted,
			Why: "the mode is deny-all: there is no way out",
		}, nil
	}
	v := policy.Table().Target(t, netpolicy.IsLocal(t.Addr))
	if container && t.Port != netpolicy.QuestionPort {
		v = netpolicy.Verdict{Reason: netpolicy.RefusedUnlisted, Why: "no host has such a name, and no running container of the network"}
	}
	via := p.via(t, v)
	a := Answer{
		Target: t.String(), Allowed: v.Allowed, Mode: policy.Mode, Rule: v.Rule,
		Reason: v.Reason, Why: v.Why, Entry: v.Entry, Checks: v.Checks(t, via),
	}
	if via != nil {
		a.Proxy, a.Unjudged = via.String(), t.Name != "" && via.Resolves()
	}
	if v.Allowed || t.Port == netpolicy.QuestionPort || v.Reason != netpolicy.RefusedUnlisted && t.Name != "" || policy.Mode != netpolicy.AttachNetwork {
		return a, nil
	}
	if unknown == nil && t.Name != "" && p.host.Network.Siblings {
		var found bool
		if found, unknown = p.isSibling(ctx, t.Name); found {
			return Answer{Target: a.Target, Allowed: true, Mode: a.Mode, Rule: "network " + p.host.Network.Name}, nil
		}
	}
	if unknown != nil {
		a.Unknown = unknown.Error()
	}
	return a, nil
}

// via is the proxy that carries an allowed target, nil for none. What mode network reaches
// directly, and host services, go past it.
func (p *prepared) via(t netpolicy.Target, v netpolicy.Verdict) *netpolicy.Proxy {
	proxy := p.host.Proxy
	direct := t.Name == "" && p.host.Network != nil || v.HostPort != 0
	if proxy == nil || !v.Allowed || direct || !proxy.Carries(t) {
		return nil
	}
	return proxy
}

// probeAttached asks the engine for the network of mode network. ReasonPolicy says that
// there is no such one.
func (p *prepared) probeAttached(ctx context.Context) error {
	if p.job.Harness.Egress.Mode != netpolicy.AttachNetwork {
		return nil
	}
	var err error
	if p.folders, err = openFolders(p.job.getenv, homeFolder(p.job.getenv)); err != nil {
		return err
	}
	opts, err := p.probeOptions()
	if err != nil {
		return err
	}
	if p.adapter, err = ProbeEngine(ctx, opts); err != nil {
		return err
	}
	return p.probeNetworkFacts(ctx)
}

// isSibling reports whether a running container of the network has the name, as the
// gateway answers for it.
func (p *prepared) isSibling(ctx context.Context, name string) (bool, error) {
	s := siblingNames{adapter: p.adapter, network: *p.host.Network, ctx: ctx, log: p.job.Log}
	found, err := s.lookUp(name)
	return len(found) > 0, err
}

// Text is the answer for people.
func (a Answer) Text() string {
	var b strings.Builder
	if !a.Allowed {
		fmt.Fprintf(&b, "refused  %s: %s", a.Target, a.Reason)
		if a.Why != "" {
			b.WriteString(": " + a.Why)
		}
		b.WriteByte('\n')
		if a.Entry != "" {
			fmt.Fprintf(&b, "to allow it, add %s to egress.allow\n", netpolicy.QuoteEntry(a.Entry))
		}
		if a.Unknown != "" {
			fmt.Fprintf(&b, "allowed all the same if it is a container of the network; the engine does not tell: %s\n", a.Unknown)
		}
		return b.String()
	}
	fmt.Fprintf(&b, "allowed  %s, by %s\n", a.Target, a.Rule)
	if a.Proxy != "" {
		fmt.Fprintf(&b, "through  %s", a.Proxy)
		if a.Unjudged {
			b.WriteString(", which looks the name up: where it leads is not judged")
		}
		b.WriteByte('\n')
	}
	for _, c := range a.Checks {
		fmt.Fprintf(&b, "checked  %s\n", c)
	}
	return b.String()
}
