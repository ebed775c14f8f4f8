package netpolicy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ErrNotFresh says that a network namespace is not as an engine makes one without a
// network: what is in it may be a way out.
var ErrNotFresh = errors.New("network namespace is not a fresh one")

// everything is all of IPv4.
var everything = netip.MustParsePrefix("0.0.0.0/0")

// AddWay gives the thread's network namespace its own address on loopback and a local
// route for those of IPv4: every packet to them stays in the namespace, where the packet
// rules decide. Without them, everything is answered by nobody.
func AddWay(dst netip.Prefix) error {
	lo, err := loopback()
	if err != nil {
		return err
	}
	own := SandboxAddr.AsSlice()
	if err := netlink.AddrReplace(lo, &netlink.Addr{IPNet: &net.IPNet{IP: own, Mask: net.CIDRMask(32, 32)}}); err != nil {
		return fmt.Errorf("netlink: address %s: %w", SandboxAddr, err)
	}
	route := &netlink.Route{
		LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
		Dst: &net.IPNet{IP: dst.Addr().AsSlice(), Mask: net.CIDRMask(dst.Bits(), 32)}, Src: own,
	}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("netlink: local route: %w", err)
	}
	return nil
}

func loopback() (netlink.Link, error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("netlink: lo: %w", err)
	}
	return lo, nil
}

// loopbackUp: an engine leaves it down where its runtime does not raise it.
func loopbackUp() error {
	lo, err := loopback()
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("netlink: lo up: %w", err)
	}
	return nil
}

// checkNamespace refuses a network namespace with anything but loopback, the network's
// interface and the kernel's own devices, which must be down.
func checkNamespace(n *Network) error {
	for _, check := range []func(*Network) error{checkLinks, checkAddrs, checkRoutes} {
		if err := check(n); err != nil {
			return err
		}
	}
	return nil
}

func checkLinks(n *Network) error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("netlink: links: %w", err)
	}
	for _, l := range links {
		a := l.Attrs()
		switch {
		case a.Name == "lo" && a.Flags&net.FlagLoopback != 0:
		case n != nil && a.Name == n.Interface && a.Flags&net.FlagUp != 0:
		case slices.Contains(fallbackTunnels, a.Name) && a.Flags&net.FlagUp == 0:
		default:
			return fmt.Errorf("%w: interface %q", ErrNotFresh, a.Name)
		}
	}
	return nil
}

func checkAddrs(n *Network) error {
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("netlink: addresses: %w", err)
	}
	for _, a := range addrs {
		if !ofLoopback(a.IPNet) && !n.mayHave(a.IP) {
			return fmt.Errorf("%w: address %s", ErrNotFresh, a.IPNet)
		}
	}
	return nil
}

// mayHave reports whether the network gives a container the address.
func (n *Network) mayHave(ip net.IP) bool {
	addr, ok := netip.AddrFromSlice(ip)
	return ok && n != nil && n.MayHave(addr.Unmap())
}

// MayHave reports whether a container may have the address by the network: one of its
// subnets, or the one that the kernel gives every link for IPv6.
func (n Network) MayHave(addr netip.Addr) bool {
	return addr.IsLinkLocalUnicast() && addr.Is6() ||
		slices.ContainsFunc(n.Subnets, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// checkRoutes looks at every table. Where there is a network its routes are the engine's:
// the packet rules decide by addresses.
func checkRoutes(n *Network) error {
	if n != nil {
		return nil
	}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return fmt.Errorf("netlink: routes: %w", err)
	}
	for _, r := range routes {
		if !ofLoopback(r.Dst) {
			return fmt.Errorf("%w: route %s", ErrNotFresh, r)
		}
	}
	return nil
}

// ofLoopback reports whether everything in n is loopback's.
func ofLoopback(n *net.IPNet) bool {
	if n == nil {
		return false
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	within := func(p netip.Prefix) bool { return p.Contains(addr.Unmap()) && bits >= p.Bits() }
	return ok && (within(loopback4) || within(loopback6))
}
