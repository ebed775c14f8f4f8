package netpolicy

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/net/publicsuffix"

	"github.com/agentshim/agentshim/harness"
)

// ErrRule is the kind of every error of ParseRule.
var ErrRule = errors.New("not an egress rule")

// DefaultPort is the port of a name without one. An address range without one has
// all ports.
const DefaultPort = 443

// Rule is one allowed or denied target: a name or an address range, and a port.
type Rule struct {
	// Name is in lower-case A-labels without a final dot. With Wildcard the rule is
	// for every name below it, and not for Name itself. Empty for an address range.
	Name     string
	Wildcard bool
	// Prefix is canonical: no bit is set behind its length.
	Prefix netip.Prefix
	// Port is 0 for all ports; only an address range may have that.
	Port int
	// Raw lets something other than TLS pass on port 443 and something other than HTTP
	// on port 80; ECH lets encrypted hellos pass.
	Raw, ECH bool
	// UDP makes it one for UDP instead of TCP; only an address range may have that.
	UDP bool
	// Preset is the preset that the rule comes from, empty for the file's own.
	Preset string
}

// ruleJSON is a rule in the plan.
type ruleJSON struct {
	Target string `json:"target"`
	Raw    bool   `json:"raw,omitempty"`
	ECH    bool   `json:"ech,omitempty"`
	Preset string `json:"preset,omitempty"`
}

// MarshalJSON implements json.Marshaler.
func (r Rule) MarshalJSON() ([]byte, error) {
	return json.Marshal(ruleJSON{Target: r.String(), Raw: r.Raw, ECH: r.ECH, Preset: r.Preset})
}

// String writes the rule as an allow entry would.
func (r Rule) String() string {
	host := r.Name
	if r.Wildcard {
		host = "*." + r.Name
	}
	if r.Name == "" {
		host = r.Prefix.String()
		if r.Port != 0 && r.Prefix.Addr().Is6() {
			host = "[" + host + "]"
		}
	}
	if r.Port != 0 {
		host += ":" + strconv.Itoa(r.Port)
	}
	if r.UDP {
		host += udpSuffix
	}
	return host
}

// udpSuffix stands behind an entry for UDP.
const udpSuffix = "/udp"

// ParseRule reads one allow entry: NAME[:PORT], *.NAME[:PORT], ADDRESS[:PORT],
// CIDR[:PORT], or [ADDRESS or CIDR]:PORT for IPv6, the last three also with /udp. It refuses schemes, paths, user
// information, spellings of addresses other than the canonical one, names that could
// be taken for an address, wildcards at a public suffix or right above all of a kind
// (*.kobe.jp, *.compute.amazonaws.com), and what belongs to the sandbox itself. It takes
// a wildcard that is further above one: *.amazonaws.com, below which s3 is anybody's.
func ParseRule(a harness.Allow) (Rule, error) {
	r, err := parseTarget(a)
	if err != nil {
		return Rule{}, err
	}
	if r.Name == "" {
		return r, nil
	}
	if r.Wildcard && sharedBelow(r.Name) {
		return Rule{}, ruleError(a.Host, "names below "+r.Name+" belong to anybody")
	}
	if r.Name == HostDomain || strings.HasSuffix(r.Name, "."+HostDomain) {
		return Rule{}, ruleError(a.Host, "names below "+HostDomain+" are host services; use egress.hostServices")
	}
	if r.Port == 0 {
		r.Port = DefaultPort
	}
	return r, nil
}

// sharedBelow reports whether names below a name belong to different owners, by the
// public suffix list: the name is on it, or all names right below are.
func sharedBelow(name string) bool {
	for _, n := range []string{name, "any." + name} {
		if suffix, _ := publicsuffix.PublicSuffix(n); suffix == n {
			return true
		}
	}
	return false
}

// ParseDeny reads one deny entry: as an allow entry, but without a port it is for all
// of them, and a wildcard may stand above any name.
func ParseDeny(entry string) (Rule, error) {
	r, err := parseTarget(harness.Allow{Host: entry})
	if err == nil && r.UDP {
		err = ruleError(entry, "deny closes TCP and UDP; leave "+udpSuffix+" out")
	}
	return r, err
}

// parseTarget reads an entry without a default port.
func parseTarget(a harness.Allow) (Rule, error) {
	if strings.Contains(a.Host, "://") {
		return Rule{}, ruleError(a.Host, "write a name, without scheme and path")
	}
	text, udp := strings.CutSuffix(a.Host, udpSuffix)
	host, port, err := splitPort(text)
	if err != nil {
		return Rule{}, err
	}
	if a.Port != 0 {
		if port != 0 {
			return Rule{}, ruleError(a.Host, "it has a port, and the entry another")
		}
		port = a.Port
	}
	if port < 0 || port > 65535 {
		return Rule{}, ruleError(a.Host, "a port is 1 to 65535")
	}
	r := Rule{Port: port, UDP: udp, Raw: a.Raw, ECH: a.ECH}
	if _, err := netip.ParseAddr(host); err == nil || strings.ContainsAny(host, "/:") {
		return r.withPrefix(host)
	}
	if udp {
		return Rule{}, ruleError(a.Host, "UDP is for address ranges")
	}
	return r.withName(host)
}

func ruleError(entry, why string) error {
	return fmt.Errorf("%w: %q: %s", ErrRule, entry, why)
}

// splitPort takes a port off an entry, 0 where there is none.
func splitPort(entry string) (host string, port int, err error) {
	if rest, ok := strings.CutPrefix(entry, "["); ok {
		inner, after, ok := strings.Cut(rest, "]")
		if !ok || after != "" && !strings.HasPrefix(after, ":") {
			return "", 0, ruleError(entry, "write [ADDRESS/LENGTH]:PORT")
		}
		if !strings.Contains(inner, ":") {
			return "", 0, ruleError(entry, "brackets are for IPv6")
		}
		if after == "" {
			return inner, 0, nil
		}
		port, err = parsePort(entry, after[1:])
		return inner, port, err
	}
	if strings.Count(entry, ":") != 1 {
		return entry, 0, nil // no port, or an IPv6 range
	}
	host, text, _ := strings.Cut(entry, ":")
	port, err = parsePort(entry, text)
	return host, port, err
}

// parsePort takes plain decimal digits only.
func parsePort(entry, text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > 65535 || strconv.Itoa(n) != text {
		return 0, ruleError(entry, "a port is a plain number from 1 to 65535")
	}
	return n, nil
}

// parsePrefix reads an address or a range in canonical form.
func parsePrefix(text string) (p netip.Prefix, canonical string, err error) {
	if !strings.Contains(text, "/") {
		a, err := netip.ParseAddr(text)
		if err != nil || a.Zone() != "" {
			return p, "", errors.Join(err, ErrRule)
		}
		return host(a), a.String(), nil
	}
	p, err = netip.ParsePrefix(text)
	return p, p.String(), err
}

func (r Rule) withPrefix(text string) (Rule, error) {
	p, canonical, err := parsePrefix(text)
	switch {
	case err != nil:
		return Rule{}, ruleError(text, "write a name without a path, or ADDRESS/LENGTH")
	case p.Addr().Is4In6():
		return Rule{}, ruleError(text, "write the IPv4 range itself")
	case p != p.Masked():
		return Rule{}, ruleError(text, "bits are set behind the length; write "+p.Masked().String())
	case canonical != text:
		return Rule{}, ruleError(text, "write "+canonical)
	case p.Overlaps(namePool) && p.Bits() >= namePool.Bits():
		return Rule{}, ruleError(text, "these addresses are the sandbox's own")
	case r.Raw || r.ECH:
		return Rule{}, ruleError(text, "raw and ech have no meaning for an address range: no check of the content applies to it")
	}
	r.Prefix = p
	return r, nil
}

func (r Rule) withName(host string) (Rule, error) {
	name, wildcard := strings.CutPrefix(host, "*.")
	if host == "*" || wildcard && !strings.Contains(strings.TrimSuffix(name, "."), ".") {
		return Rule{}, ruleError(host, "write *. and a name of two labels or more; egress.mode open is for all names")
	}
	name, err := CanonicalName(name)
	if err != nil {
		return Rule{}, fmt.Errorf("%w: %q: %w", ErrRule, host, err)
	}
	r.Name, r.Wildcard = name, wildcard
	return r, nil
}

// ErrName is the kind of every error of CanonicalName.
var ErrName = errors.New("not a host name")

// CanonicalName is the one form in which names are matched, resolved and logged:
// lower case, no final dot. It takes letters, digits, hyphens and underscores in
// labels of 1 to 63 bytes, at least two labels, 253 bytes in all. A name whose last
// label could be a number is refused: it may be an address in another spelling
// (127.1, 0x7f.1, 2130706433). International names must come as A-labels.
func CanonicalName(name string) (string, error) {
	name = strings.TrimSuffix(name, ".")
	if name == "" || len(name) > 253 {
		return "", fmt.Errorf("%w: its length is %d", ErrName, len(name))
	}
	lower := make([]byte, len(name))
	for i := range len(name) {
		c := name[i]
		switch {
		case 'A' <= c && c <= 'Z':
			c += 'a' - 'A'
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_', c == '.':
		case c >= 0x80:
			return "", fmt.Errorf("%w: write international names as A-labels (xn--…)", ErrName)
		default:
			return "", fmt.Errorf("%w: it holds %q", ErrName, c)
		}
		lower[i] = c
	}
	labels := strings.Split(string(lower), ".")
	for _, l := range labels {
		if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' {
			return "", fmt.Errorf("%w: label %q", ErrName, l)
		}
	}
	if last := labels[len(labels)-1]; last[0] >= '0' && last[0] <= '9' {
		return "", fmt.Errorf("%w: it ends in a number and may be an address; write an address as ADDRESS/LENGTH", ErrName)
	}
	if len(labels) < 2 {
		return "", fmt.Errorf("%w: it has one label only", ErrName)
	}
	return string(lower), nil
}

// MatchesName reports whether the rule is for the canonical name and the port.
func (r Rule) MatchesName(name string, port int) bool {
	if r.Name == "" || r.Port != port {
		return false
	}
	if r.Wildcard {
		return strings.HasSuffix(name, "."+r.Name)
	}
	return name == r.Name
}

// MatchesAddr reports whether the rule is an address range that holds addr, for the port.
func (r Rule) MatchesAddr(addr netip.Addr, port int) bool {
	return r.Name == "" && r.Prefix.Contains(addr.Unmap()) && (r.Port == 0 || r.Port == port)
}
