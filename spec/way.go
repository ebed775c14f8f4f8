package spec

import "github.com/agentshim/agentshim/netpolicy"

// The ways into a sandbox's network namespace.
const (
	// WayDirect: agentshim runs as root and enters it.
	WayDirect = "direct"
	// WayUserns: through the user namespace of rootless Podman.
	WayUserns = "userns"
	// WayContainer: a second, short-lived container that shares the namespace.
	WayContainer = "container"
)

// renderer decides what puts the packet rules in: nf_tables itself, unless the file wants
// iptables or the kernel has no nf_tables. A rootless caller may not ask the kernel: its
// helper does, in the sandbox's network namespace.
func (c *compiler) renderer() error {
	c.plan.EgressRenderer = netpolicy.Nftables
	if c.plan.EgressWay == WayUserns && c.h.Egress.Renderer != netpolicy.Nftables {
		c.plan.EgressRenderer = netpolicy.Auto
	}
	if r := c.h.Egress.Renderer; r == netpolicy.Iptables || r != netpolicy.Nftables && c.host.Machine.NoNftables {
		c.plan.EgressRenderer = netpolicy.Iptables
	}
	if c.plan.EgressRenderer == netpolicy.Iptables && c.plan.EgressWay == WayContainer {
		return refuse("egress-setup", `leave egress.renderer out, run agentshim as root, or use rootless Podman`,
			"egress.renderer iptables: a caller in the docker group reaches the sandbox's network through a container of the agent's image only, where no iptables is")
	}
	return nil
}

// way decides how the packet rules get into a sandbox of this host.
func way(h Host) string {
	switch {
	case h.Engine.Kind == Podman && h.Engine.Rootless:
		return WayUserns
	case h.Caller.UID == 0:
		return WayDirect
	}
	return WayContainer
}
