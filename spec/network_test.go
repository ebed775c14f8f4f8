package spec

import (
	"net/netip"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/netpolicy"
)

// networkFacts are what the engine would say of the network that the file wants: one of
// IPv4 and IPv6 where it has a name, else the default one.
func networkFacts(h harness.Harness, host Host) *netpolicy.Network {
	switch {
	case h.Egress.Mode != netpolicy.AttachNetwork:
		return nil
	case h.Egress.Network == "" && host.Engine.Rootless:
		return &netpolicy.Network{
			Name: SlirpNetwork, Interface: SlirpInterface, Closed: []netip.Addr{netip.MustParseAddr("10.0.2.2"), netip.MustParseAddr("10.0.2.3"), netip.MustParseAddr("fd00::2")},
			Subnets: []netip.Prefix{netip.MustParsePrefix(SlirpSubnet), netip.MustParsePrefix(SlirpSubnet6)},
		}
	case h.Egress.Network == "":
		return &netpolicy.Network{
			Name: "bridge", Interface: "eth0", Siblings: true, Closed: []netip.Addr{netip.MustParseAddr("172.17.0.1"), netip.MustParseAddr("192.0.2.2")},
			Subnets: []netip.Prefix{netip.MustParsePrefix("172.17.0.0/16")}, Resolver: netip.MustParseAddr("127.0.0.11"),
		}
	}
	return &netpolicy.Network{
		Name: h.Egress.Network, Interface: "eth0", Siblings: true, Closed: []netip.Addr{netip.MustParseAddr("172.18.0.1"), netip.MustParseAddr("fd77::1")},
		Subnets: []netip.Prefix{netip.MustParsePrefix("172.18.0.0/16"), netip.MustParsePrefix("fd77::/64")},
	}
}
