// Package netpolicy is the egress policy: what an agent may reach. Compile is
// pure, Policy.Table decides; Apply puts the packet rules into a sandbox's network
// namespace and reads them back; Gateway answers its names and carries its
// connections.
package netpolicy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/agentshim/agentshim/harness"
)

// The modes that are built.
const (
	// DenyAll: nothing but the sandbox's own loopback is reachable.
	DenyAll = "deny-all"
	// AllowList: what Policy.Allow and Policy.HostServices name.
	AllowList = "allow-list"
	// Open: every name that leads to a globally reachable address, on every port.
	Open = "open"
)

// ErrMode is Compile's error for a mode that is not built.
var ErrMode = errors.New("egress mode not built")

// Policy is a compiled egress policy. Every mode starts from a network namespace
// with no interface but loopback.
type Policy struct {
	Mode string `json:"mode"`
	// Interfaces are the only ones there may be.
	Interfaces []string `json:"interfaces"`
	// Allow and Deny are sorted and without doubles. Deny wins.
	Allow []Rule `json:"allow,omitempty"`
	Deny  []Rule `json:"deny,omitempty"`
	// HostServices are ports of the host's loopback, by name.
	HostServices []HostService `json:"hostServices,omitempty"`
}

// HostService is one port of the host's loopback, reachable under Name at the same port.
type HostService struct {
	Name string `json:"name"`
	Port int    `json:"port"`
}

// HostDomain is where host services live.
const HostDomain = "host.internal"

// HasGateway reports whether the mode has a way out at all: packet rules, DNS and relay.
func (p Policy) HasGateway() bool { return p.Mode == AllowList || p.Mode == Open }

// Compile decides the policy. The zero Egress is deny-all. presets gives the targets
// of each preset, as allow entries.
func Compile(e harness.Egress, presets map[string][]string) (Policy, error) {
	p := Policy{Mode: e.Mode, Interfaces: []string{"lo"}}
	switch e.Mode {
	case "":
		p.Mode = DenyAll
	case DenyAll, AllowList, Open:
	default:
		return Policy{}, fmt.Errorf("%w: %q", ErrMode, e.Mode)
	}
	return p, nil
}

// Table decides on targets. Its size does not show in the time a decision takes.
type Table struct{ p Policy }

// Table makes the policy's table.
func (p Policy) Table() *Table { return &Table{p: p} }

// Knows reports whether a canonical name is the target of some rule, on any port:
// whether it gets an address.
func (t *Table) Knows(name string) bool { return false }

// Name decides on a canonical name and a port.
func (t *Table) Name(name string, port int) Verdict { return Verdict{Reason: RefusedUnlisted} }

// Addr decides on an address that the sandbox dialled without a name.
func (t *Table) Addr(addr netip.Addr, port int) Verdict { return Verdict{Reason: RefusedUnlisted} }

// Dial decides on an address that a permitted target led to, right before the host
// dials it. local says that the host's own routing calls the address local. It is not
// asked for host services.
func (t *Table) Dial(addr netip.Addr, port int, local bool) Verdict {
	return Verdict{Reason: RefusedAddress}
}

// fallbackTunnels are devices the kernel puts, down, into every new network
// namespace once their module is loaded. They need CAP_NET_ADMIN to be set up.
var fallbackTunnels = []string{
	"erspan0", "gre0", "gretap0", "ip6_vti0", "ip6gre0", "ip6tnl0", "ip_vti0", "sit0", "tunl0",
}

// ExtraInterfaces returns those of found that the policy does not have.
func (p Policy) ExtraInterfaces(found []string) []string {
	return slices.DeleteFunc(slices.Clone(found), func(name string) bool {
		return slices.Contains(p.Interfaces, name) || slices.Contains(fallbackTunnels, name)
	})
}

// Refused reports whether the outcome of an attempt to leave is a refusal that
// came at once: an errno's name, not "open" and not "timeout".
func (p Policy) Refused(outcome string) bool {
	return strings.HasPrefix(outcome, "E")
}
