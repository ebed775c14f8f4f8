package netpolicy

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Table decides on targets. The time a decision takes does not depend on the number
// of rules. It is read-only and safe for concurrent use.
type Table struct {
	open bool
	// unchecked says that what passes on ports 80 and 443 need not be looked at: every
	// name is allowed, and none denied.
	unchecked   bool
	allow, deny rules
	services    map[string][]int
	network     *Network
}

// rules are one list, by what a target is looked up with.
type rules struct {
	exact, below map[string][]Rule
	// ranges are by length, and then by address; lengths are those there are, longest first.
	ranges  map[netip.Prefix][]Rule
	lengths [2][]int
}

// Table makes the policy's table.
func (p Policy) Table() *Table {
	t := &Table{open: p.Mode == Open, network: p.Network, allow: indexRules(p.Allow), deny: indexRules(p.Deny), services: map[string][]int{}}
	t.unchecked = t.open && !p.Learning && len(t.deny.exact)+len(t.deny.below) == 0
	for _, s := range p.HostServices {
		t.services[s.Name] = append(t.services[s.Name], s.Port)
	}
	return t
}

func indexRules(list []Rule) rules {
	out := rules{exact: map[string][]Rule{}, below: map[string][]Rule{}, ranges: map[netip.Prefix][]Rule{}}
	for _, r := range list {
		switch {
		case r.UDP: // the gateway carries TCP
		case r.Name == "":
			out.ranges[r.Prefix] = append(out.ranges[r.Prefix], r)
			if f, bits := family(r.Prefix.Addr()), r.Prefix.Bits(); !slices.Contains(out.lengths[f], bits) {
				out.lengths[f] = append(out.lengths[f], bits)
			}
		case r.Wildcard:
			out.below[r.Name] = append(out.below[r.Name], r)
		default:
			out.exact[r.Name] = append(out.exact[r.Name], r)
		}
	}
	for i := range out.lengths {
		slices.Sort(out.lengths[i])
		slices.Reverse(out.lengths[i])
	}
	return out
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// named gives the rules for a name, those that name most of it first.
func (l rules) named(name string) []Rule {
	out := l.exact[name]
	for rest := name; ; {
		_, parent, ok := strings.Cut(rest, ".")
		if !ok {
			return out
		}
		out, rest = append(slices.Clip(out), l.below[parent]...), parent
	}
}

// holding gives the ranges that hold an address, the smallest first.
func (l rules) holding(addr netip.Addr) []Rule {
	var out []Rule
	for _, bits := range l.lengths[family(addr)] {
		p, _ := addr.Prefix(bits) // bits is a length of this family
		out = append(out, l.ranges[p]...)
	}
	return out
}

// onPort gives the first rule for the port.
func onPort(list []Rule, port int) (Rule, bool) {
	i := slices.IndexFunc(list, func(r Rule) bool { return r.Port == 0 || r.Port == port })
	if i < 0 {
		return Rule{}, false
	}
	return list[i], true
}

// Knows reports whether a canonical name is the target of some rule, on any port:
// whether it gets an address.
func (t *Table) Knows(name string) bool {
	if _, denied := onPort(t.deny.named(name), 0); denied {
		return false
	}
	return t.open && !below(name, HostDomain) || len(t.services[name]) > 0 || len(t.allow.named(name)) > 0
}

func below(name, domain string) bool { return name == domain || strings.HasSuffix(name, "."+domain) }

// Name decides on a canonical name and a port.
func (t *Table) Name(name string, port int) Verdict {
	if r, denied := onPort(t.deny.named(name), port); denied {
		return deniedBy(r)
	}
	if ports := t.services[name]; below(name, HostDomain) {
		if slices.Contains(ports, port) {
			return Verdict{Allowed: true, Rule: nameEntry(name, port), HostPort: port}
		}
		return Verdict{Reason: RefusedUnlisted, Why: "no host service has this name and port; see egress.hostServices"}
	}
	found := t.allow.named(name)
	if r, ok := onPort(found, port); ok {
		return Verdict{Allowed: true, Rule: r.String(), Raw: r.Raw || t.unchecked, ECH: r.ECH || t.unchecked}
	}
	if t.open {
		return Verdict{Allowed: true, Rule: Open, Raw: t.unchecked, ECH: t.unchecked}
	}
	v := Verdict{Reason: RefusedUnlisted, Entry: nameEntry(name, port)}
	if len(found) > 0 {
		v.Why = "allowed on port " + ports(found) + " only"
	}
	return v
}

func ports(list []Rule) string {
	var out []string
	for _, r := range list {
		if text := strconv.Itoa(r.Port); !slices.Contains(out, text) {
			out = append(out, text)
		}
	}
	return strings.Join(out, ", ")
}

func deniedBy(r Rule) Verdict {
	return Verdict{Reason: RefusedDenied, Rule: r.String(), Why: "egress.deny holds " + r.String()}
}

// nameEntry is the allow entry for a name.
func nameEntry(name string, port int) string {
	if port == DefaultPort {
		return name
	}
	return name + ":" + strconv.Itoa(port)
}

// addrEntry is the allow entry for one address.
func addrEntry(addr netip.Addr, port int) string {
	return Rule{Prefix: host(addr), Port: port}.String()
}

// QuoteEntry is an allow entry as it stands in a file's list.
func QuoteEntry(entry string) string {
	if strings.HasPrefix(entry, "{") {
		return entry
	}
	return strconv.Quote(entry)
}

// OptionEntry is the allow entry for a name with raw or ech, in JSON.
func OptionEntry(name string, port int, option string) string {
	text, _ := json.Marshal(name) // a string marshals
	if port == DefaultPort {
		return fmt.Sprintf(`{"host": %s, %q: true}`, text, option)
	}
	return fmt.Sprintf(`{"host": %s, "port": %d, %q: true}`, text, port, option)
}

// Addr decides on an address that the sandbox dialled without a name.
func (t *Table) Addr(addr netip.Addr, port int) Verdict {
	addr = addr.Unmap()
	if r, denied := onPort(t.deny.holding(addr), port); denied {
		return deniedBy(r)
	}
	if r, ok := onPort(t.allow.holding(addr), port); ok {
		return Verdict{Allowed: true, Rule: r.String(), Raw: true, ECH: true}
	}
	if namePool.Contains(addr) {
		return Verdict{Reason: RefusedUnlisted, Why: "the sandbox's own range; this address stands for no name"}
	}
	v := Verdict{Reason: RefusedUnlisted, Why: "an address without a name needs an entry of its own"}
	if s, special := notGlobal(addr); !special || !s.exact {
		v.Entry = addrEntry(addr, port)
	}
	return v
}

// Dial decides on an address that a permitted target led to, right before the host
// dials it. local says that the host's own routing does not lead to another machine.
// It is not asked for host services. Like Addr, it proposes no entry for an address that
// only its own entry opens: whoever has a name lead there could have it pasted into a file.
func (t *Table) Dial(addr netip.Addr, port int, local bool) Verdict {
	if !addr.IsValid() || addr.Zone() != "" {
		return Verdict{Reason: RefusedAddress, Why: "no plain address"}
	}
	addr = addr.Unmap()
	if r, denied := onPort(t.deny.holding(addr), port); denied {
		return deniedBy(r)
	}
	s, special := notGlobal(addr)
	if local || t.network != nil && slices.Contains(t.network.Closed, addr) {
		s, special = ownAddress(addr), true
	}
	if !special {
		return Verdict{Allowed: true}
	}
	for _, r := range t.allow.holding(addr) {
		if (r.Port == 0 || r.Port == port) && s.openedBy(r) {
			return Verdict{Allowed: true, Rule: r.String()}
		}
	}
	v := Verdict{Reason: RefusedAddress, Why: fmt.Sprintf("%s is not globally reachable (%s)", addr, s.why)}
	if !s.exact {
		v.Entry = addrEntry(addr, port)
	}
	return v
}

func ownAddress(addr netip.Addr) special {
	return special{prefix: host(addr), why: "the host's own, or a network's gateway", exact: true}
}

// openedBy reports whether a rule that holds the address means this block.
func (s special) openedBy(r Rule) bool {
	if s.exact {
		return r.Prefix.IsSingleIP()
	}
	return r.Prefix.Bits() >= s.prefix.Bits()
}
