// Package netpolicy is the egress policy: what an agent may reach. Compile is
// pure; Check judges what was read back from inside the container.
package netpolicy

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/agentshim/agentshim/harness"
)

// DenyAll is the mode in which nothing but the sandbox's own loopback is reachable.
const DenyAll = "deny-all"

// ErrMode is Compile's error for a mode that is not built.
var ErrMode = errors.New("egress mode not built")

// Policy is a compiled egress policy. Every mode starts from a network namespace
// with no interface but loopback.
type Policy struct {
	Mode string `json:"mode"`
	// Interfaces are the only ones there may be.
	Interfaces []string `json:"interfaces"`
}

// Compile decides the policy. The zero Egress is deny-all.
func Compile(e harness.Egress) (Policy, error) {
	if e.Mode != "" && e.Mode != DenyAll {
		return Policy{}, fmt.Errorf("%w: %q", ErrMode, e.Mode)
	}
	return Policy{Mode: DenyAll, Interfaces: []string{"lo"}}, nil
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
