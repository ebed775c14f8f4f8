package spec

import (
	"fmt"

	"github.com/agentshim/agentshim/netpolicy"
)

// SlirpNetwork is the name of the network that rootless Podman makes for one container.
const SlirpNetwork = "slirp4netns"

// What slirp4netns gives a container.
const (
	SlirpInterface = "tap0"
	SlirpSubnet    = "10.0.2.0/24"
	SlirpSubnet6   = "fd00::/64"
)

// NetworkMode is the engine's word for the run's network. The host's loopback is closed in
// it by name, whatever the engine's configuration says: by the packet rules it is, too.
func (p Plan) NetworkMode() string {
	n := p.Egress.Network
	switch {
	case n == nil:
		return "none"
	case p.Engine.Kind == Podman && n.Name == SlirpNetwork:
		return fmt.Sprintf("%s:cidr=%s,allow_host_loopback=false,enable_ipv6=%v", SlirpNetwork, SlirpSubnet, n.IPv6())
	}
	return n.Name
}

// networkNotes shows what an attached network opens.
func (c *compiler) networkNotes(n netpolicy.Network) {
	if n.Siblings {
		c.widen("egress:network", false, "the agent and the other containers of network %s reach each other, on every port", n.Name)
	}
}

// networkText is the attached network for people.
func networkText(n netpolicy.Network) string {
	siblings := "no other containers"
	if n.Siblings {
		siblings = "its containers and the allowed ranges directly"
	}
	return fmt.Sprintf("network %s (%s, %v): %s; names go to agentshim, all else is refused", n.Name, n.Interface, n.Subnets, siblings)
}
