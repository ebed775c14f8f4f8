package netpolicy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrChanged says that somebody changed a sandbox's interfaces or addresses.
var ErrChanged = errors.New("the sandbox's network was changed")

// ErrGone is the ErrChanged that the end of the container brings about, too.
var ErrGone = fmt.Errorf("%w: something is gone", ErrChanged)

// watchGroups are what a watch is told: rtnetlink(7).
const watchGroups = unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR

// openWatch opens a socket that is told of changes in the thread's network namespace.
func openWatch() (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: watchGroups}); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// checkWatch is checkSocket for what openWatch made.
func checkWatch(i, fd int, cookie uint64) error {
	if err := checkOptions(i, fd, []socketOption{
		{"family", unix.SO_DOMAIN, unix.AF_NETLINK},
		{"type", unix.SO_TYPE, unix.SOCK_RAW},
		{"protocol", unix.SO_PROTOCOL, unix.NETLINK_ROUTE},
	}); err != nil {
		return err
	}
	name, err := unix.Getsockname(fd)
	if at, ok := name.(*unix.SockaddrNetlink); err != nil || !ok || at.Groups != watchGroups {
		return fmt.Errorf("%w: socket %d is told of other changes, %w", ErrHandover, i, err)
	}
	return checkCookie(i, fd, cookie)
}

// Watch tells of changes to the interfaces and addresses of a sandbox that has a network.
type Watch struct {
	file    *os.File
	network Network
}

// newWatch takes a duplicate of the socket.
func newWatch(f *os.File, n Network) (*Watch, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil { // so that Close ends a read
		unix.Close(fd)
		return nil, err
	}
	return &Watch{os.NewFile(uintptr(fd), "watch"), n}, nil
}

// Close ends Changed, which then gives nil.
func (w *Watch) Close() error { return w.file.Close() }

// Changed waits until something is there that the network does not have, or is gone that
// it had: ErrChanged. What it can't read counts as a change.
func (w *Watch) Changed() error {
	buf := make([]byte, 64<<10)
	for {
		n, err := w.file.Read(buf)
		if errors.Is(err, fs.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: %w", ErrChanged, err)
		}
		messages, err := syscall.ParseNetlinkMessage(buf[:n])
		if err != nil {
			return fmt.Errorf("%w: %w", ErrChanged, err)
		}
		for _, m := range messages {
			if err := w.network.change(m); err != nil {
				return err
			}
		}
	}
}

// change says what a message tells that matters, nil for nothing. IPv6 addresses come by
// themselves, from routers.
func (n Network) change(m syscall.NetlinkMessage) error {
	attrs, err := syscall.ParseNetlinkRouteAttr(&m)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrChanged, err)
	}
	switch m.Header.Type {
	case unix.RTM_NEWLINK:
		name := strings.TrimRight(string(attribute(attrs, unix.IFLA_IFNAME)), "\x00")
		if !slices.Contains(append([]string{"lo", n.Interface}, fallbackTunnels...), name) {
			return fmt.Errorf("%w: interface %q is new", ErrChanged, name)
		}
		// Before it is renamed and moved out, and before its addresses go, it is down.
		if name == n.Interface && !up(m) {
			return fmt.Errorf("%w: interface %q is down", ErrGone, name)
		}
	case unix.RTM_DELLINK:
		return fmt.Errorf("%w: interface %q", ErrGone, strings.TrimRight(string(attribute(attrs, unix.IFLA_IFNAME)), "\x00"))
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		addr, _ := netip.AddrFromSlice(attribute(attrs, unix.IFA_ADDRESS))
		known := n.MayHave(addr) || addr == SandboxAddr || addr.IsLoopback() || addr.Is6()
		switch {
		case m.Header.Type == unix.RTM_NEWADDR && !known:
			return fmt.Errorf("%w: address %s is new", ErrChanged, addr)
		case m.Header.Type == unix.RTM_DELADDR && addr.Is4():
			return fmt.Errorf("%w: address %s", ErrGone, addr)
		}
	}
	return nil
}

// up reports whether the link that a message is about is: rtnetlink(7), struct ifinfomsg.
func up(m syscall.NetlinkMessage) bool {
	const flags = 8
	return len(m.Data) >= unix.SizeofIfInfomsg && binary.NativeEndian.Uint32(m.Data[flags:])&unix.IFF_UP != 0
}

func attribute(attrs []syscall.NetlinkRouteAttr, kind uint16) []byte {
	for _, a := range attrs {
		if a.Attr.Type == kind {
			return a.Value
		}
	}
	return nil
}
