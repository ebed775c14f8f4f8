package netpolicy

import (
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// AddWay gives the network namespace behind the descriptor its own address on
// loopback and a local route for all of IPv4: every packet stays in the namespace,
// where the packet rules decide. Without them, everything is answered by nobody.
func AddWay(ns int) error {
	h, err := netlink.NewHandleAt(netns.NsHandle(ns), unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("netlink: lo: %w", err)
	}
	own := SandboxAddr.AsSlice()
	if err := h.AddrReplace(lo, &netlink.Addr{IPNet: &net.IPNet{IP: own, Mask: net.CIDRMask(32, 32)}}); err != nil {
		return fmt.Errorf("netlink: address %s: %w", SandboxAddr, err)
	}
	route := &netlink.Route{
		LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
		Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, Src: own,
	}
	if err := h.RouteReplace(route); err != nil {
		return fmt.Errorf("netlink: local route: %w", err)
	}
	return nil
}
