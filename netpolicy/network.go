package netpolicy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/agentshim/agentshim/harness"
)

// Network is an engine network that a sandbox is attached to, as it is on this host.
type Network struct {
	// Name is the engine's name for it.
	Name string `json:"name"`
	// Interface is what a container has of it.
	Interface string `json:"interface"`
	// Subnets are where the container's addresses come from.
	Subnets []netip.Prefix `json:"subnets"`
	// Siblings says that other containers have addresses there, too.
	Siblings bool `json:"siblings"`
	// Closed are the gateways, the host's own addresses and what the host gets, too, sorted:
	// only an entry for the one address opens one.
	Closed []netip.Addr `json:"closed,omitempty"`
	// Resolver is the engine's own, on the container's loopback; invalid where it has none.
	Resolver netip.Addr `json:"resolver,omitzero"`
}

// maxRanges bounds the address ranges of a policy with a network: each is a packet rule.
const maxRanges = 256

// IPv6 reports whether containers have IPv6 addresses of the network's.
func (n Network) IPv6() bool {
	return slices.ContainsFunc(n.Subnets, func(p netip.Prefix) bool { return p.Addr().Is6() })
}

// Own reports whether the address is a sibling's: of the network and not closed.
func (n Network) Own(a netip.Addr) bool {
	within := func(p netip.Prefix) bool { return p.Contains(a) }
	return n.Siblings && slices.ContainsFunc(n.Subnets, within) && !slices.Contains(n.Closed, a)
}

// probed are the documentation addresses to which init's network probe tries to get.
var probed = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}

// network adds the engine's network to the policy. Without the facts of one, as where only
// a question about names is asked, it has no subnets.
func (c *compiler) network(e harness.Egress, facts *Network) {
	if e.Mode != AttachNetwork {
		if e.Network != "" {
			c.fault("$.egress.network", fmt.Errorf("%w: only mode network attaches one", ErrNoEffect))
		}
		for i, r := range c.p.Allow {
			if r.UDP {
				c.fault(fmt.Sprintf("$.egress.allow: %s", r), fmt.Errorf("%w: UDP needs mode network", ErrNoEffect))
				c.p.Allow[i].UDP = false
			}
		}
		return
	}
	if facts == nil {
		facts = &Network{Name: e.Network}
	}
	c.p.Network = facts
	if facts.Interface != "" {
		c.p.Interfaces = append(c.p.Interfaces, facts.Interface)
	}
	for _, s := range facts.Subnets {
		if s.Overlaps(namePool) || s.Overlaps(loopback4) {
			c.fault("$.egress.network", fmt.Errorf("%w: subnet %s of network %s: these addresses are the sandbox's own", ErrRule, s, facts.Name))
		}
	}
	ranges := 0
	for _, r := range slices.Concat(c.p.Allow, c.p.Deny) {
		if r.Name == "" {
			ranges++
		}
	}
	if ranges > maxRanges {
		c.fault("$.egress.allow", fmt.Errorf("%w: %d address ranges; mode network holds %d", ErrRule, ranges, maxRanges))
	}
	for _, s := range facts.Subnets {
		if slices.ContainsFunc(probed, s.Contains) {
			c.fault("$.egress.network", fmt.Errorf("%w: subnet %s of network %s: agentshim proves by an address of it that others are closed", ErrRule, s, facts.Name))
		}
	}
	for _, r := range c.p.Allow {
		if r.Name == "" && slices.ContainsFunc(probed, func(a netip.Addr) bool { return direct(r, a) }) {
			c.fault("$.egress.allow: "+r.String(), errors.New("no host has these addresses, and agentshim proves by one of them that others are closed"))
		}
	}
}

// direct reports whether the packet rules let what the range allows out to the address.
func direct(r Rule, a netip.Addr) bool {
	s, special := notGlobal(a)
	return r.Prefix.Contains(a) && (!special || s.openedBy(r))
}

// Rules are the packet rules of the policy, on a kernel with or without IPv6. A policy
// without a gateway has none.
func (p Policy) Rules(ipv6 bool) Ruleset {
	switch {
	case !p.HasGateway():
		return Ruleset{}
	case p.Network == nil:
		return SandboxRules(ipv6)
	}
	out := Ruleset{p.networkChains()}
	if ipv6 {
		out.Chains = append(out.Chains, p.networkChains6()...)
	}
	return out
}

// Nothing that comes from outside is tracked: it could fill the kernel's connection
// table, and nothing translates it.
func untrackedInput(six bool) Chain {
	return Chain{Table: "raw", IPv6: six, Prerouting: true, Policy: Accept, Rules: []PacketRule{{Outside: true, Action: NoTrack}}}
}

// networkChains: what Targets permits leaves untracked and as it is; everything else is
// the gateway's, by the redirects that every sandbox with a gateway has, or refused.
func (p Policy) networkChains() []Chain {
	own, listeners := host(SandboxAddr), answers{DNSListener.Port(), RelayListener.Port()}
	targets := append(listeners.rules(PacketRule{Action: Return}), free(loopback4, own)...)
	targets = append(
		// A socket can be bound to what the way made local; outside it is nobody's.
		targets, PacketRule{Src: namePool, Action: Return},
		PacketRule{Proto: "udp", DPort: QuestionPort, Action: Return}, PacketRule{Proto: "tcp", DPort: QuestionPort, Action: Return},
	)
	filter := append(listeners.rules(PacketRule{New: true, Action: Drop}), listeners.rules(PacketRule{Action: Accept})...)
	if r := p.Network.Resolver; r.IsValid() {
		filter = append(filter, PacketRule{Dst: host(r), Proto: "tcp", Action: Reject}, PacketRule{Dst: host(r), Action: Drop})
	}
	filter = append(
		filter, PacketRule{Dst: loopback4, Action: Accept}, PacketRule{Dst: own, Action: Accept},
		PacketRule{Untracked: true, Action: Accept},
	)
	return []Chain{
		untrackedInput(false),
		{Table: "raw", Part: Targets, Policy: Accept, Rules: append(targets, p.targets(false)...)},
		{Table: "raw", Part: Limits, Policy: Accept, Rules: append([]PacketRule{{Untracked: true, Action: Return}}, trackedLimits...)},
		redirects(listeners.dns, listeners.relay),
		{Table: "filter", Policy: Drop, Rules: filter},
	}
}

// The messages by which IPv6 neighbours find each other (RFC 4861). Only the kernel sends
// them: who would needs a raw socket.
const (
	neighbourSolicitation  = 135
	neighbourAdvertisement = 136
)

// networkChains6: there is no gateway for IPv6. Of a network without IPv6, only loopback
// is left.
func (p Policy) networkChains6() []Chain {
	targets := free(loopback6)
	filter := []PacketRule{{Dst: loopback6, Action: Accept}}
	if p.Network.IPv6() {
		for _, kind := range []uint8{neighbourSolicitation, neighbourAdvertisement} {
			targets = append(targets, PacketRule{Proto: protoICMPv6, ICMP: kind, Action: NoTrack})
		}
		targets = append(
			targets, PacketRule{Proto: "udp", DPort: QuestionPort, Action: Return}, PacketRule{Proto: "tcp", DPort: QuestionPort, Action: Return},
		)
		targets = append(targets, p.targets(true)...)
		filter = append(
			filter, PacketRule{Untracked: true, Action: Accept},
			// The reset itself, which comes from here. Nothing else of TCP is related to a
			// connection: there are no helpers, and none of these is ever confirmed.
			PacketRule{Proto: "tcp", Related: true, Action: Accept}, PacketRule{Proto: "tcp", Action: Reject},
		)
	}
	return []Chain{
		untrackedInput(true),
		{Table: "raw", IPv6: true, Policy: Accept, Rules: targets},
		{Table: "filter", IPv6: true, Policy: Drop, Rules: filter},
	}
}

// free lets everything to these addresses out, untracked.
func free(list ...netip.Prefix) []PacketRule {
	var out []PacketRule
	for _, p := range list {
		out = append(out, PacketRule{Dst: p, Action: NoTrack}, PacketRule{Dst: p, Action: Return})
	}
	return out
}

// targets are the rules by which packets leave as they are, in the order of Table.Dial's
// decision: what is denied; what an entry for one address opens; what only such an entry
// does; the network's own; what a range inside a special block opens; the special blocks;
// all other ranges.
func (p Policy) targets(six bool) []PacketRule {
	var single, inside, wide, out []PacketRule
	for _, r := range p.Allow {
		if r.Name != "" || r.Prefix.Addr().Is6() != six {
			continue
		}
		block, special := blockAround(r.Prefix)
		switch {
		case r.Prefix.IsSingleIP():
			single = append(single, r.free(r.Prefix)...)
		case special && !block.exact:
			inside = append(inside, r.free(r.Prefix)...)
		case !special:
			wide = append(wide, r.free(global(r.Prefix))...)
		}
	}
	for _, r := range p.Deny {
		if r.Name == "" && r.Prefix.Addr().Is6() == six {
			out = append(out, r.closed()...)
		}
	}
	out = append(out, single...)
	exact, blocks := closedBlocks(six)
	for _, a := range p.Network.Closed {
		if a.Is6() == six {
			out = append(out, PacketRule{Dst: host(a), Action: Return})
		}
	}
	out = append(out, exact...)
	for _, s := range p.Network.Subnets {
		if p.Network.Siblings && s.Addr().Is6() == six {
			out = append(out, free(s)...)
		}
	}
	return slices.Concat(out, inside, blocks, wide)
}

// blockAround is the special block that holds the whole range.
func blockAround(p netip.Prefix) (special, bool) {
	s, found := notGlobal(p.Addr())
	return s, found && (p.Bits() >= s.prefix.Bits() || p.Addr().Is6() && !p.Overlaps(global6))
}

// global is what of a range may be globally reachable.
func global(p netip.Prefix) netip.Prefix {
	if p.Addr().Is6() && p.Bits() < global6.Bits() {
		return global6
	}
	return p
}

// closedBlocks are the special blocks of a family: those that only an entry for one
// address opens, and the others.
func closedBlocks(six bool) (exact, others []PacketRule) {
	for _, s := range specials {
		rule := PacketRule{Dst: s.prefix, Action: Return}
		switch {
		case s.prefix.Addr().Is6() != six:
		case s.exact:
			exact = append(exact, rule)
		default:
			others = append(others, rule)
		}
	}
	return exact, others
}

// free lets what the entry names out. Without a port and protocol that is everything.
func (r Rule) free(dst netip.Prefix) []PacketRule {
	if dst.Bits() == 0 {
		dst = netip.Prefix{} // as iptables has it
	}
	rule := PacketRule{Dst: dst, DPort: uint16(r.Port), Action: NoTrack}
	switch {
	case r.UDP:
		rule.Proto = "udp"
	case r.Port != 0:
		rule.Proto = "tcp"
	}
	end := rule
	end.Action = Return
	return []PacketRule{rule, end}
}

// closed keeps what a deny entry names from the rules behind.
func (r Rule) closed() []PacketRule {
	rule := PacketRule{Dst: r.Prefix, Action: Return}
	if r.Port == 0 {
		return []PacketRule{rule}
	}
	tcp, udp := rule, rule
	tcp.Proto, tcp.DPort = "tcp", uint16(r.Port)
	udp.Proto, udp.DPort = "udp", uint16(r.Port)
	return []PacketRule{tcp, udp}
}
