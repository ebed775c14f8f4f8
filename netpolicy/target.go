package netpolicy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Target is what somebody may want to reach: a canonical name or an address, and a port.
type Target struct {
	Name string
	Addr netip.Addr
	Port int
}

// ParseTarget reads NAME[:PORT], ADDRESS[:PORT] or [ADDRESS]:PORT; the port is 443
// unless given. Names and addresses are as strict as in an allow entry.
func ParseTarget(text string) (Target, error) {
	host, port, err := splitPort(text)
	if err != nil {
		return Target{}, err
	}
	if port == 0 {
		port = DefaultPort
	}
	if addr, err := netip.ParseAddr(host); err == nil && addr.Zone() == "" {
		return Target{Addr: addr.Unmap(), Port: port}, nil
	}
	name, err := CanonicalName(host)
	if err != nil {
		return Target{}, fmt.Errorf("%q: %w", text, err)
	}
	return Target{Name: name, Port: port}, nil
}

// ParseSibling reads NAME[:PORT] of what no host can be called, but a container: db, my_db.
func ParseSibling(text string) (Target, error) {
	name, port, err := splitPort(text)
	if name = strings.ToLower(name); err == nil && !isSiblingName(name) {
		err = fmt.Errorf("%w: %q", ErrName, text)
	}
	if port == 0 {
		port = DefaultPort
	}
	return Target{Name: name, Port: port}, err
}

func (x Target) String() string {
	if x.Name == "" {
		return netip.AddrPortFrom(x.Addr, uint16(x.Port)).String()
	}
	return x.Name + ":" + strconv.Itoa(x.Port)
}

// Target decides on a target as far as that can be without looking a name up: local
// says whether the host's own routing calls the address local. Nothing is reached by port 53.
func (t *Table) Target(x Target, local bool) Verdict {
	v := t.target(x, local)
	if x.Port == QuestionPort && (v.Allowed || v.Reason == RefusedUnlisted || v.Entry != "") {
		return Verdict{Reason: RefusedUnlisted, Why: whyQuestions}
	}
	return v
}

func (t *Table) target(x Target, local bool) Verdict {
	if x.Name != "" {
		return t.Name(x.Name, x.Port)
	}
	if own := x.Addr; loopback4.Contains(own) || loopback6.Contains(own) || own == SandboxAddr || own.IsUnspecified() {
		return Verdict{Reason: RefusedAddress, Why: "inside, this is the sandbox itself; see egress.hostServices for the host's loopback"}
	}
	if t.network != nil && t.network.Own(x.Addr) {
		return Verdict{Allowed: true, Rule: "network " + t.network.Name, Raw: true, ECH: true}
	}
	if x.Addr.Is6() && (t.network == nil || !t.network.IPv6()) {
		return Verdict{Reason: RefusedUnlisted, Why: "the sandbox has no IPv6; a name may lead there"}
	}
	v := t.Addr(x.Addr, x.Port)
	if d := t.Dial(x.Addr, x.Port, local); v.Allowed && !d.Allowed {
		return d
	}
	return v
}

// Checks says what is judged of an allowed target when it is used. via is the proxy that
// carries it, nil for none: where a name leads is not judged where that looks names up.
func (v Verdict) Checks(x Target, via *Proxy) []string {
	switch {
	case !v.Allowed, x.Name == "", v.HostPort != 0:
		return nil
	}
	var checks []string
	if via == nil || !via.Resolves() {
		checks = append(checks, "the address that the name leads to must be globally reachable, or in an allowed range")
	}
	switch {
	case v.Raw:
	case x.Port == 443 && v.ECH:
		checks = append(checks, "TLS with this server name, or an encrypted one")
	case x.Port == 443:
		checks = append(checks, "TLS with this server name, in the clear")
	case x.Port == 80:
		checks = append(checks, "HTTP/1, every request for this host")
	}
	return checks
}
