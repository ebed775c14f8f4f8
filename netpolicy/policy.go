// Package netpolicy is the egress policy: what an agent may reach. Compile is
// pure, Policy.Table decides; Apply puts the packet rules into a sandbox's network
// namespace and reads them back; Gateway answers its names and carries its
// connections.
package netpolicy

import (
	"cmp"
	"errors"
	"fmt"
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
	// Open: every name that leads to a globally reachable address, on every port. An
	// address without a name needs an allow entry here too.
	Open = "open"
	// AttachNetwork: an engine network's siblings, what Policy.Allow names, directly where it
	// names addresses, and Policy.HostServices.
	AttachNetwork = "network"
)

var (
	// ErrMode is Compile's error for a mode that is not built.
	ErrMode = errors.New("egress mode not built")
	// ErrNoEffect is its error for an entry that changes nothing.
	ErrNoEffect = errors.New("it has no effect")
)

// Policy is a compiled egress policy. Every mode but AttachNetwork starts from a network
// namespace with no interface but loopback.
type Policy struct {
	Mode string `json:"mode"`
	// Learning has open judge content as an allow-list does, so that a list that is made of
	// what was permitted permits the same.
	Learning bool `json:"learning,omitempty"`
	// Interfaces are the only ones there may be.
	Interfaces []string `json:"interfaces"`
	// Allow and Deny are sorted and without doubles. Deny wins.
	Allow []Rule `json:"allow,omitempty"`
	Deny  []Rule `json:"deny,omitempty"`
	// HostServices are ports of the host's loopback, by name.
	HostServices []HostService `json:"hostServices,omitempty"`
	// Network is what AttachNetwork attaches, nil in other modes.
	Network *Network `json:"network,omitempty"`
	// Proxy is what connections to the outside go through, nil where they are dialled.
	Proxy *Proxy `json:"proxy,omitempty"`
}

// HostService is one port of the host's loopback, reachable under Name at the same port.
type HostService struct {
	// Name is canonical, below HostDomain.
	Name string `json:"name"`
	Port int    `json:"port"`
}

// HostDomain is where host services live.
const HostDomain = "host.internal"

// HasGateway reports whether the mode has a way out at all: packet rules, DNS and relay.
func (p Policy) HasGateway() bool { return p.Mode != DenyAll && p.Mode != "" }

// Compile decides the policy and reports every fault of the entries, each with its
// JSON path. The zero Egress is deny-all, and so is an allow-list that names nothing.
// presets gives the targets of each preset, as allow entries; network is what the host's
// engine says of the network that the file wants, nil where it was not asked.
func Compile(e harness.Egress, presets map[string][]harness.Allow, network *Network) (Policy, error) {
	c := compiler{p: Policy{Mode: e.Mode, Interfaces: []string{"lo"}}}
	switch e.Mode {
	case "":
		c.p.Mode = DenyAll
	case DenyAll, AllowList, Open, AttachNetwork:
	default:
		return Policy{}, fmt.Errorf("%w: %q", ErrMode, e.Mode)
	}
	c.entries(e, presets)
	c.hostServices(e.HostServices)
	c.network(e, network)
	if c.p.Mode == DenyAll && len(c.p.Allow)+len(c.p.Deny)+len(c.p.HostServices) > 0 {
		c.fault("$.egress.mode", fmt.Errorf("%w: deny-all goes before the other entries; write allow-list", ErrNoEffect))
	}
	if c.p.Mode == AllowList && len(c.p.Allow)+len(c.p.HostServices) == 0 {
		c.p.Mode = DenyAll
	}
	return c.p, errors.Join(c.errs...)
}

// Problem is a fault of one entry of the file.
type Problem struct {
	// Path is its JSON path.
	Path string
	Err  error
}

func (p *Problem) Error() string { return p.Path + ": " + p.Err.Error() }
func (p *Problem) Unwrap() error { return p.Err }

type compiler struct {
	p    Policy
	errs []error
}

func (c *compiler) fault(path string, err error) {
	if err != nil {
		c.errs = append(c.errs, &Problem{Path: path, Err: err})
	}
}

func (c *compiler) entries(e harness.Egress, presets map[string][]harness.Allow) {
	for i, a := range e.Allow {
		r, err := ParseRule(a)
		c.fault(fmt.Sprintf("$.egress.allow[%d]", i), errors.Join(err, questions(r.Port)))
		c.p.Allow = append(c.p.Allow, r)
	}
	for i, name := range e.Presets {
		for _, a := range presets[name] {
			r, err := ParseRule(a)
			c.fault(fmt.Sprintf("$.egress.presets[%d]", i), err)
			r.Preset = name
			c.p.Allow = append(c.p.Allow, r)
		}
	}
	for i, entry := range e.Deny {
		r, err := ParseDeny(entry)
		c.fault(fmt.Sprintf("$.egress.deny[%d]", i), err)
		c.p.Deny = append(c.p.Deny, r)
	}
	c.p.Allow, c.p.Deny = sorted(c.p.Allow), sorted(c.p.Deny)
}

// QuestionPort leads to agentshim's resolver, whatever address it is of.
const QuestionPort = 53

const whyQuestions = "whatever is sent to port 53 is a question to agentshim's own resolver"

// questions refuses the entry for a port that nothing else is reached by.
func questions(port int) error {
	if port == QuestionPort {
		return fmt.Errorf("%w: %s", ErrNoEffect, whyQuestions)
	}
	return nil
}

// sorted orders rules by their target and joins those for the same one: what one of
// them lets pass, passes. The file's own come before a preset's.
func sorted(rules []Rule) []Rule {
	slices.SortFunc(rules, func(a, b Rule) int {
		return cmp.Or(strings.Compare(a.String(), b.String()), strings.Compare(a.Preset, b.Preset))
	})
	var out []Rule
	for _, r := range rules {
		if n := len(out); n > 0 && out[n-1].String() == r.String() {
			out[n-1].Raw, out[n-1].ECH = out[n-1].Raw || r.Raw, out[n-1].ECH || r.ECH
			continue
		}
		out = append(out, r)
	}
	return out
}

func (c *compiler) hostServices(services []harness.HostService) {
	for i, s := range services {
		path := fmt.Sprintf("$.egress.hostServices[%d]", i)
		name, err := CanonicalName(s.Name + "." + HostDomain)
		if err == nil && strings.Contains(s.Name, ".") {
			err = fmt.Errorf("%w: %q: one label without dots", ErrName, s.Name)
		}
		c.fault(path+".name", err)
		c.fault(path+".port", questions(s.Port))
		service := HostService{Name: name, Port: s.Port}
		if slices.Contains(c.p.HostServices, service) {
			c.fault(path, fmt.Errorf("%w: %s:%d is there already", ErrNoEffect, name, s.Port))
			continue
		}
		c.p.HostServices = append(c.p.HostServices, service)
	}
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
