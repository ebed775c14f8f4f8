package spec

import (
	"fmt"
	"net/netip"
)

// Published is a port of the sandbox's loopback that agentshim listens for on the host.
type Published struct {
	Address netip.Addr `json:"address"`
	// HostPort is 0 where the kernel chooses it.
	HostPort uint16 `json:"hostPort"`
	Port     uint16 `json:"port"`
}

func (c *compiler) publish() error {
	for _, p := range c.h.Egress.Published() {
		c.plan.Publish = append(c.plan.Publish, Published(p))
	}
	return nil
}

// publishNotes shows what others than this machine's users may reach.
func (c *compiler) publishNotes() {
	for _, p := range c.plan.Publish {
		if !p.Address.IsLoopback() {
			address := p.Address.String()
			if p.Address.IsUnspecified() {
				address = "any address"
			}
			c.widen("publish:"+p.where(), false, "who reaches %s of this host reaches port %d of the sandbox", address, p.Port)
		}
	}
}

func (p Published) where() string { return netip.AddrPortFrom(p.Address, p.HostPort).String() }

func (p Published) text() string {
	at := p.where()
	if p.HostPort == 0 {
		at = fmt.Sprintf("a free port of %s", p.Address)
	}
	return fmt.Sprintf("%s leads to port %d of the sandbox's loopback", at, p.Port)
}
