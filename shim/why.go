package shim

import (
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
}

// Why decides on one target, NAME[:PORT] or an address, as the gateway would, without
// looking anything up and without an engine.
func Why(j Job, target string) (Answer, error) {
	j = j.withDefaults()
	p := &prepared{job: j}
	var err error
	if p.host.Mounts, err = mounts.Probe(j.Harness, mounts.ProbePaths{Home: homeFolder(j.getenv)}); err != nil {
		return Answer{}, asError(err)
	}
	if err := p.probePresets(); err != nil {
		return Answer{}, err
	}
	policy, err := netpolicy.Compile(j.Harness.Egress, p.host.Presets, nil)
	if err != nil {
		return Answer{}, &Error{Reason: ReasonPolicy, Err: err}
	}
	t, err := netpolicy.ParseTarget(target)
	if err != nil {
		return Answer{}, &Error{Reason: ReasonSpecInvalid, Err: err, Hint: "write NAME[:PORT], ADDRESS[:PORT] or [ADDRESS]:PORT"}
	}
	if !policy.HasGateway() {
		return Answer{
			Target: t.String(), Mode: policy.Mode, Reason: netpolicy.RefusedUnlisted,
			Why: "the mode is deny-all: there is no way out",
		}, nil
	}
	v := policy.Table().Target(t, netpolicy.IsLocal(t.Addr))
	return Answer{
		Target: t.String(), Allowed: v.Allowed, Mode: policy.Mode, Rule: v.Rule,
		Reason: v.Reason, Why: v.Why, Entry: v.Entry, Checks: v.Checks(t),
	}, nil
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
		return b.String()
	}
	fmt.Fprintf(&b, "allowed  %s, by %s\n", a.Target, a.Rule)
	for _, c := range a.Checks {
		fmt.Fprintf(&b, "checked  %s\n", c)
	}
	return b.String()
}
