package spec

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/agentshim/agentshim/netpolicy"
)

// The networks that rootless Podman makes for one container, each by the program of that
// name.
const (
	SlirpNetwork = "slirp4netns"
	PastaNetwork = "pasta"
)

// What both give a container; pasta does where it is told to.
const (
	userInterface = "tap0"
	userSubnet    = "10.0.2.0/24"
	userSubnet6   = "fd00::/64"
	userAddr      = "10.0.2.100"
	userAddr6     = "fd00::100"
	userGateway   = "10.0.2.2"
	userGateway6  = "fd00::2"
)

// UserNetwork is the network that one of these programs makes: its host and its resolver
// are closed, and nobody else is in it (slirp4netns(1)). It has IPv6 where the file allows a
// range of it. That Podman takes this program and no other, the caller has to know.
func UserNetwork(program string, ipv6 bool) netpolicy.Network {
	n := netpolicy.Network{
		Name: program, Interface: userInterface, Subnets: []netip.Prefix{netip.MustParsePrefix(userSubnet)},
		Closed: []netip.Addr{netip.MustParseAddr(userGateway), netip.MustParseAddr("10.0.2.3")},
	}
	if ipv6 {
		n.Subnets = append(n.Subnets, netip.MustParsePrefix(userSubnet6))
		n.Closed = append(n.Closed, netip.MustParseAddr(userGateway6), netip.MustParseAddr("fd00::3"))
	}
	return n
}

// NetworkMode is the engine's word for the run's network: "none" in every mode but network.
// For slirp4netns and pasta the host's loopback is closed in it by name, whatever the engine's
// configuration says, and by the packet rules, too. For a bridge only they close the host.
func (p Plan) NetworkMode() string {
	n := p.Egress.Network
	switch {
	case n == nil:
		return "none"
	case p.Engine.Kind == Podman && n.Name == SlirpNetwork:
		return fmt.Sprintf("%s:cidr=%s,allow_host_loopback=false,enable_ipv6=%v", SlirpNetwork, userSubnet, n.IPv6())
	case p.Engine.Kind == Podman && n.Name == PastaNetwork:
		return PastaNetwork + ":" + strings.Join(pastaOptions(n.IPv6()), ",")
	}
	return n.Name
}

// pastaOptions are those of every version that Podman takes. The ports of -T and -U would
// lead from the sandbox's loopback, which no rule closes, to the host's: pasta(1). Its own
// addresses and no announcements, since those would be the host's.
func pastaOptions(ipv6 bool) []string {
	out := []string{
		"--ns-ifname", userInterface, "--no-map-gw", "-T", "none", "-U", "none", "-t", "none", "-u", "none",
		"--no-dhcp", "--no-dhcpv6", "--no-ra", "-a", userAddr, "-n", "24", "-g", userGateway,
	}
	if ipv6 {
		return append(out, "-a", userAddr6, "-g", userGateway6)
	}
	return append(out, "-4")
}

// networkNotes shows what an attached network opens.
func (c *compiler) networkNotes(n netpolicy.Network) {
	if n.Siblings {
		c.widen("egress:network", false, "the agent and the other containers of network %s reach each other, on every port", n.Name)
	}
}

// networkText is the attached network for people.
func networkText(n netpolicy.Network) string {
	directly := "the allowed ranges"
	if n.Siblings {
		directly = "its containers and " + directly
	}
	return fmt.Sprintf("network %s (%s, %v): %s directly; names go to agentshim, all else is refused", n.Name, n.Interface, n.Subnets, directly)
}
