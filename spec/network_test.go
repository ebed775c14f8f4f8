package spec

import (
	"net/netip"
	"testing"

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
		n := UserNetwork(SlirpNetwork, true)
		return &n
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

// TestNetworkMode: the engine's word for each network, with the host's loopback closed by
// name.
func TestNetworkMode(t *testing.T) {
	podman, docker := Engine{Kind: Podman, Rootless: true}, Engine{Kind: Docker}
	slirp, slirp6, pasta, pasta6 := UserNetwork(SlirpNetwork, false), UserNetwork(SlirpNetwork, true), UserNetwork(PastaNetwork, false), UserNetwork(PastaNetwork, true)
	const closed = "pasta:--ns-ifname,tap0,--no-map-gw,-T,none,-U,none,-t,none,-u,none,--no-dhcp,--no-dhcpv6,--no-ra,-a,10.0.2.100,-n,24,-g,10.0.2.2"
	for _, c := range []struct {
		engine  Engine
		network *netpolicy.Network
		want    string
	}{
		{podman, nil, "none"},
		{podman, &slirp, "slirp4netns:cidr=10.0.2.0/24,allow_host_loopback=false,enable_ipv6=false"},
		{podman, &slirp6, "slirp4netns:cidr=10.0.2.0/24,allow_host_loopback=false,enable_ipv6=true"},
		{podman, &pasta, closed + ",-4"},
		{podman, &pasta6, closed + ",-a,fd00::100,-g,fd00::2"},
		{podman, &netpolicy.Network{Name: "net"}, "net"},
		{docker, &netpolicy.Network{Name: "net"}, "net"},
	} {
		p := Plan{Engine: c.engine}
		p.Egress.Network = c.network
		if got := p.NetworkMode(); got != c.want {
			t.Errorf("%+v: %s, want %s", c.network, got, c.want)
		}
	}
}
