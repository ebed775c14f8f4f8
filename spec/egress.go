package spec

import (
	"fmt"
	"strings"

	"github.com/agentshim/agentshim/netpolicy"
)

// egress decides what the agent may reach.
func (c *compiler) egress() error {
	file := c.h.Egress
	if c.o.LearnEgress {
		if file.Mode == netpolicy.AttachNetwork {
			return refuse("policy", "learn with another egress.mode in the file", "what is used of a network can't be learned: learning runs in mode open, which has none")
		}
		file.Mode = netpolicy.Open
	}
	policy, err := netpolicy.Compile(file, c.host.Presets, c.host.Network)
	policy.Learning = c.o.LearnEgress
	if policy.HasGateway() {
		policy.Proxy = c.host.Proxy
	}
	c.plan.Egress = policy
	if err == nil {
		if policy.HasGateway() {
			c.plan.EgressWay = way(c.host)
			rules := policy.Rules(c.host.Machine.IPv6).Iptables()
			c.plan.EgressRules = strings.Split(strings.TrimSuffix(rules, "\n"), "\n")
			return c.renderer()
		}
		return nil
	}
	return refuse("policy", "write egress.allow entries as \"name.example.com\", \"*.example.com:8443\" or \"203.0.113.0/24:5432\"", "%v", err)
}

// RulesText is EgressRules as one text, a comment where there are none.
func (p Plan) RulesText() string {
	if !p.Egress.HasGateway() {
		return "# " + p.Egress.Mode + ": no interface but loopback and no route: nothing to filter\n"
	}
	return strings.Join(p.EgressRules, "\n") + "\n"
}

// hostsFile gives the sandbox its own names.
func hostsFile(p netpolicy.Policy) string {
	own := "127.0.0.1"
	if p.HasGateway() {
		own = netpolicy.SandboxAddr.String()
	}
	return "127.0.0.1 localhost\n::1 localhost\n" + own + " " + Hostname + "\n"
}

// resolvConf names the gateway's resolver. Without a nameserver line, resolvers ask
// 127.0.0.1, where nothing listens unless the agent itself does.
func resolvConf(p netpolicy.Policy) string {
	if !p.HasGateway() {
		return "options timeout:1 attempts:1\n"
	}
	return "nameserver " + netpolicy.ResolverAddr.String() + "\noptions timeout:2 attempts:2\n"
}

// egressNotes shows what the policy opens.
func (c *compiler) egressNotes() {
	p := c.plan.Egress
	if !p.HasGateway() {
		return
	}
	if p.Network != nil {
		c.networkNotes(*p.Network)
	}
	if p.Mode == netpolicy.Open {
		c.widen("egress:open", false, "the agent can reach every name that leads to a globally reachable address")
	} else if len(p.Allow)+len(p.HostServices) > 0 {
		c.widen("egress:allow-list", false, "the agent can reach what the plan lists: %d in all", len(p.Allow)+len(p.HostServices))
	}
	for _, r := range p.Allow {
		switch {
		case r.Name == "" && p.Network != nil:
			c.widen("egress:"+r.String(), false, "addresses are reached directly, past agentshim: nothing of it is looked at or logged")
		case r.Name == "" && r.Prefix.Addr().Is6():
			c.widen("egress:"+r.String(), false, "names may lead to these addresses; the sandbox itself has no IPv6")
		case r.Name == "":
			c.widen("egress:"+r.String(), false, "addresses without names: no server name, TLS or Host check applies")
		case r.Raw:
			c.widen("egress:"+r.String()+" raw", false, "the content is not looked at: what answers behind this name can carry anything")
		case r.ECH:
			c.widen("egress:"+r.String()+" ech", false, "the server name may be encrypted: another site of the same provider may be reached")
		}
	}
	if p.Proxy != nil && p.Proxy.Resolves() {
		c.widen("proxy-resolves", true, "the upstream proxy at %s looks names up: where they lead, to private addresses too, is not judged", p.Proxy.Address)
	}
	for _, s := range p.HostServices {
		c.widen(fmt.Sprintf("egress:%s:%d", s.Name, s.Port), false, "the agent can reach port %d of the host's loopback", s.Port)
	}
}

// egressText is the policy for people, one fact a line.
func (p Plan) egressText(line func(name, format string, args ...any)) {
	e := p.Egress
	if !e.HasGateway() {
		line("network", "%s: no interface but loopback", e.Mode)
		return
	}
	if e.Network != nil {
		line("network", "%s; way in: %s, %s", networkText(*e.Network), p.EgressWay, p.rendererText())
	} else {
		line("network", "%s: no interface but loopback; names and TCP go to agentshim, all else is refused; way in: %s, %s", e.Mode, p.EgressWay, p.rendererText())
	}
	if e.Proxy != nil {
		line("proxy", "%s", e.Proxy.Text())
		if e.Network != nil {
			line("proxy", "not for address ranges and the network's other containers: they are reached directly")
		}
	}
	for _, r := range e.Allow {
		line("allow", "%s", ruleText(r, e.Network != nil))
	}
	for _, r := range e.Deny {
		line("deny", "%s", r)
	}
	for _, s := range e.HostServices {
		line("allow", "%s:%d, the host's loopback", s.Name, s.Port)
	}
}

func (p Plan) rendererText() string {
	if p.EgressRenderer == netpolicy.Auto {
		return "nftables, or iptables where the kernel has no nf_tables"
	}
	return p.EgressRenderer
}

func ruleText(r netpolicy.Rule, network bool) string {
	text := r.String()
	switch {
	case r.Name == "" && network:
		text += ", directly"
	case r.Name == "" && r.Prefix.Addr().Is6():
		text += ", for names that lead there"
	case r.Name == "":
		text += ", whatever is said there"
	case r.Port == 443 && !r.Raw:
		text += ", TLS with this server name"
	case r.Port == 80 && !r.Raw:
		text += ", HTTP with this host"
	}
	if r.ECH {
		text += " or an encrypted one"
	}
	if r.Preset != "" {
		text += " (preset " + r.Preset + ")"
	}
	return text
}
