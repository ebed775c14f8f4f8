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

// AddWay gives the thread's network namespace its own address on loopback and a local
// route for all of IPv4: every packet stays in the namespace, where the packet rules
// decide. Without them, everything is answered by nobody.
func AddWay() error {
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
		Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, Src: own,
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

// checkFresh refuses a network namespace with anything but loopback and the kernel's
// own devices, which must be down.
func checkFresh() error {
	for _, check := range []func() error{checkLinks, checkAddrs, checkRoutes} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func checkLinks() error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("netlink: links: %w", err)
	}
	for _, l := range links {
		a := l.Attrs()
		switch {
		case a.Name == "lo" && a.Flags&net.FlagLoopback != 0:
		case slices.Contains(fallbackTunnels, a.Name) && a.Flags&net.FlagUp == 0:
		default:
			return fmt.Errorf("%w: interface %q", ErrNotFresh, a.Name)
		}
	}
	return nil
}

func checkAddrs() error {
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("netlink: addresses: %w", err)
	}
	for _, a := range addrs {
		if !ofLoopback(a.IPNet) {
			return fmt.Errorf("%w: address %s", ErrNotFresh, a.IPNet)
		}
	}
	return nil
}

// checkRoutes looks at every table.
func checkRoutes() error {
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
