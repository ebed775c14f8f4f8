package netpolicy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// The addresses of an open sandbox: its own, and the resolver's. Both lie in the
// range that the synthetic addresses come from.
var (
	SandboxAddr  = netip.MustParseAddr("198.18.0.1")
	ResolverAddr = netip.MustParseAddr("198.18.0.2")
	loopback4    = netip.MustParsePrefix("127.0.0.0/8")
	loopback6    = netip.MustParsePrefix("::1/128")
)

// redirectAddr is where the kernel's redirect target sends a socket's own packets.
var redirectAddr = netip.MustParseAddr("127.0.0.1")

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// Action is what a packet rule does.
type Action string

// The actions. A dropped packet of the sandbox's own gives its sender EPERM at once.
const (
	Accept  Action = "accept"
	Drop    Action = "drop"
	Return  Action = "return"
	NoTrack Action = "notrack"
	// Reject answers TCP with a reset: a connection whose packets are dropped hangs.
	Reject   Action = "reject"
	Redirect Action = "redirect"
)

// PacketRule matches packets that leave a socket of the sandbox. Zero fields match
// everything.
type PacketRule struct {
	Src netip.Prefix `json:",omitzero"`
	Dst netip.Prefix `json:",omitzero"`
	// Proto is tcp, udp, ipv6-icmp or empty.
	Proto string `json:",omitempty"`
	// ICMP is the type of an ICMP message, at least 1; it needs Proto ipv6-icmp.
	ICMP uint8 `json:",omitempty"`
	// Outside matches what came in by another interface than loopback.
	Outside bool `json:",omitempty"`
	// Untracked matches what NoTrack was said of.
	Untracked bool `json:",omitempty"`
	// Related matches what the kernel sends because of another packet.
	Related bool `json:",omitempty"`
	// SPort and DPort are the ports; they need Proto.
	SPort uint16 `json:",omitempty"`
	DPort uint16 `json:",omitempty"`
	// Syn matches what asks for a TCP connection; it needs Proto tcp.
	Syn bool `json:",omitempty"`
	// New matches what would begin an entry in the kernel's connection table.
	New bool `json:",omitempty"`
	// Limit matches no more packets than it says, of those that match the rest.
	Limit  Limit `json:",omitzero"`
	Action Action
	// To is Redirect's port.
	To uint16 `json:",omitempty"`
}

// Limit is a bucket that holds Burst packets and gets PerSecond new ones. Each rule has
// its own. PerSecond divides 10,000, which is what iptables counts in.
type Limit struct{ PerSecond, Burst uint32 }

// What one sandbox may add to the kernel's connection table, which no cgroup accounts.
// An entry lasts two minutes after its last packet (nf_conntrack's timeouts), and up to
// one more until the kernel collects it, so there are at most some 125,000; a connection
// that is open longer costs a socket, which is accounted. The gateway itself dials no
// more than 200 a second. A question past the limit fails with EPERM at once, a
// connection's SYN is sent again after a second.
var (
	questionLimit   = Limit{PerSecond: 400, Burst: 2000}
	connectionLimit = Limit{PerSecond: 250, Burst: 4000}
)

// Chain is one hook for what the sandbox's sockets send.
type Chain struct {
	// Table is raw, nat or filter, as iptables names them.
	Table string
	IPv6  bool
	// Prerouting is the hook for what comes in instead.
	Prerouting bool `json:",omitempty"`
	// Part tells chains of the same table and hook apart: Targets comes before Limits,
	// which gets what Targets returned.
	Part string `json:",omitempty"`
	// Policy is what happens to a packet that no rule decides: Accept or Drop.
	Policy Action
	Rules  []PacketRule
}

// The parts of a hook.
const (
	Targets = "TARGETS"
	Limits  = "LIMITS"
)

// Hook is the name of iptables' chain there.
func (c Chain) Hook() string {
	if c.Prerouting {
		return "PREROUTING"
	}
	return "OUTPUT"
}

// place is where in its hook the chain stands, from 0.
func (c Chain) place() int {
	if c.Part == Limits {
		return 1
	}
	return 0
}

// Ruleset is everything that is put into a sandbox's network namespace. Its size
// does not depend on the policy's.
type Ruleset struct{ Chains []Chain }

// OpenRules are the rules of allow-list and open: DNS goes to dnsPort and all other
// TCP to relayPort, both on loopback; the sandbox's own loopback is left alone; the
// rest is refused at once, IPv6 as a whole.
func OpenRules(dnsPort, relayPort uint16) Ruleset {
	own, listeners := host(SandboxAddr), answers{dnsPort, relayPort}
	return Ruleset{[]Chain{
		// The listeners' answers are translated back, so they are tracked. Other
		// loopback traffic is not: it could fill the kernel's connection table.
		{Table: "raw", Policy: Accept, Rules: slices.Concat(
			listeners.rules(PacketRule{Action: Return}),
			[]PacketRule{
				{Dst: loopback4, Action: NoTrack},
				{Dst: own, Action: NoTrack},
				{Dst: loopback4, Action: Return},
				{Dst: own, Action: Return},
			},
			// What is redirected is tracked, so it is limited, and before it is tracked: a
			// packet that is dropped later would still renew its entry. A limit of the
			// number (connlimit) looks at every connection for each new one, and overlooks
			// closed ones that are still in the table.
			trackedLimits,
		)},
		redirects(dnsPort, relayPort),
		// An answer to what was not redirected, which nobody limits, is no answer to
		// the kernel but the beginning of a connection, and would be kept for days.
		{Table: "filter", Policy: Drop, Rules: append(
			listeners.rules(PacketRule{New: true, Action: Drop}),
			PacketRule{Dst: loopback4, Action: Accept},
			PacketRule{Dst: own, Action: Accept},
		)},
		{Table: "raw", IPv6: true, Policy: Accept, Rules: []PacketRule{{Dst: loopback6, Action: NoTrack}}},
		{Table: "filter", IPv6: true, Policy: Drop, Rules: []PacketRule{{Dst: loopback6, Action: Accept}}},
	}}
}

// trackedLimits are the rules that limit what is tracked.
var trackedLimits = []PacketRule{
	{Proto: "udp", DPort: QuestionPort, Limit: questionLimit, Action: Return},
	{Proto: "udp", DPort: QuestionPort, Action: Drop},
	{Proto: "tcp", Syn: true, Limit: connectionLimit, Action: Return},
	{Proto: "tcp", Syn: true, Action: Drop},
}

// answers are what the gateway's listeners on these ports send.
type answers struct{ dns, relay uint16 }

// rules are r for each of them.
func (a answers) rules(r PacketRule) []PacketRule {
	r.Src = host(redirectAddr)
	udp, tcp, relay := r, r, r
	udp.Proto, udp.SPort = "udp", a.dns
	tcp.Proto, tcp.SPort = "tcp", a.dns
	relay.Proto, relay.SPort = "tcp", a.relay
	return []PacketRule{udp, tcp, relay}
}

// redirects leads questions and all TCP but the sandbox's own to the gateway.
func redirects(dnsPort, relayPort uint16) Chain {
	return Chain{Table: "nat", Policy: Accept, Rules: []PacketRule{
		{Dst: loopback4, Action: Return},
		{Dst: host(SandboxAddr), Action: Return},
		{Proto: "udp", DPort: QuestionPort, Action: Redirect, To: dnsPort},
		{Proto: "tcp", DPort: QuestionPort, Action: Redirect, To: dnsPort},
		{Proto: "tcp", Action: Redirect, To: relayPort},
	}}
}

// SandboxRules are the rules of every sandbox with a gateway. Without IPv6 in the
// kernel nothing can be said, and need be said, about it.
func SandboxRules(ipv6 bool) Ruleset {
	r := OpenRules(DNSListener.Port(), RelayListener.Port())
	if !ipv6 {
		r.Chains = slices.DeleteFunc(r.Chains, func(c Chain) bool { return c.IPv6 })
	}
	return r
}

// Iptables renders the rules as iptables-save writes them, IPv4 before IPv6.
func (r Ruleset) Iptables() string {
	var b strings.Builder
	for _, six := range []bool{false, true} {
		fmt.Fprintf(&b, "# %s\n", map[bool]string{false: "iptables", true: "ip6tables"}[six])
		for _, c := range r.Chains {
			if c.IPv6 == six {
				c.iptables(&b)
			}
		}
	}
	return b.String()
}

func (c Chain) iptables(b *strings.Builder) {
	name := c.Hook()
	if c.Part == "" {
		fmt.Fprintf(b, "*%s\n:%s %s [0:0]\n", c.Table, name, target(c.Policy))
	} else {
		name = c.own()
		fmt.Fprintf(b, "*%s\n:%s - [0:0]\n-A %s -j %s\n", c.Table, name, c.Hook(), name)
	}
	for _, line := range c.lines(name) {
		b.WriteString(line + "\n")
	}
	b.WriteString("COMMIT\n")
}

// lines are the rules as `iptables -S` prints them in a chain of that name.
func (c Chain) lines(name string) []string {
	var out []string
	for _, r := range c.Rules {
		out = append(out, "-A "+name+r.iptables())
	}
	return out
}

// iptables is the rule's matches and target, each behind a space.
func (r PacketRule) iptables() string {
	var b strings.Builder
	if r.Src.IsValid() {
		fmt.Fprintf(&b, " -s %s", r.Src)
	}
	if r.Dst.IsValid() {
		fmt.Fprintf(&b, " -d %s", r.Dst)
	}
	if r.Outside {
		b.WriteString(" ! -i lo")
	}
	if r.Proto != "" {
		fmt.Fprintf(&b, " -p %s", r.Proto)
	}
	if r.ICMP != 0 {
		fmt.Fprintf(&b, " -m icmp6 --icmpv6-type %d", r.ICMP)
	}
	if r.SPort != 0 {
		fmt.Fprintf(&b, " -m %s --sport %d", r.Proto, r.SPort)
	}
	if r.DPort != 0 {
		fmt.Fprintf(&b, " -m %s --dport %d", r.Proto, r.DPort)
	}
	if r.Syn {
		fmt.Fprintf(&b, " -m %s --tcp-flags FIN,SYN,RST,ACK SYN", r.Proto)
	}
	if r.New {
		b.WriteString(" -m conntrack --ctstate NEW")
	}
	if r.Untracked {
		b.WriteString(" -m conntrack --ctstate UNTRACKED")
	}
	if r.Related {
		b.WriteString(" -m conntrack --ctstate RELATED")
	}
	if r.Limit != (Limit{}) {
		fmt.Fprintf(&b, " -m limit --limit %d/sec --limit-burst %d", r.Limit.PerSecond, r.Limit.Burst)
	}
	fmt.Fprintf(&b, " -j %s", target(r.Action))
	switch r.Action {
	case Redirect:
		fmt.Fprintf(&b, " --to-ports %d", r.To)
	case Reject:
		b.WriteString(" --reject-with tcp-reset")
	}
	return b.String()
}

// target is iptables' word for an action.
func target(a Action) string {
	if a == NoTrack {
		return "NOTRACK"
	}
	return strings.ToUpper(string(a))
}
