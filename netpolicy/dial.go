package netpolicy

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// maxDialled is how many of one name's addresses are dialled: an answer may hold
// thousands, and each costs a packet.
const maxDialled = 16

// attempts judges each address of one target right before it is dialled.
type attempts struct {
	table   decider
	routing func(netip.Addr) (bool, error)
	port    int

	mu      sync.Mutex
	allowed int
	// refused is the last refusal, and what it was for.
	refused     Verdict
	refusedAddr netip.Addr
}

var (
	errRefusedAddress   = errors.New("the policy refuses the address")
	errTooManyAddresses = errors.New("too many addresses, none of which answered")
)

// control is a net.Dialer's ControlContext: the socket it is called for connects to
// this address and to no other.
func (a *attempts) control(_ context.Context, _, address string, _ syscall.RawConn) error {
	dst, err := netip.ParseAddrPort(address)
	if err != nil || int(dst.Port()) != a.port {
		return errRefusedAddress
	}
	local, err := a.routing(dst.Addr().Unmap())
	if err != nil {
		return err
	}
	v := a.table.Dial(dst.Addr(), a.port, local)
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case !v.Allowed:
		a.refused, a.refusedAddr = v, dst.Addr()
		return errRefusedAddress
	case a.allowed == maxDialled:
		return errTooManyAddresses
	}
	a.allowed++
	return nil
}

// verdict says why nothing was reached, and which address was refused.
func (a *attempts) verdict(t destination, err error) (netip.Addr, Verdict) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.refusedAddr.IsValid() && a.allowed == 0 {
		return a.refusedAddr, a.refused
	}
	return t.addr, failure(t, err)
}

// failure is the verdict on a permitted target that could not be reached.
func failure(t destination, err error) Verdict {
	v := Verdict{Rule: t.verdict.Rule, Reason: RefusedDial, Why: err.Error()}
	var errno syscall.Errno
	var dns *net.DNSError
	var proxy proxyError
	switch {
	case errors.As(err, &proxy):
		v.Reason, v.Why = RefusedProxy, proxy.Error()
	case errors.As(err, &dns):
		v.Reason, v.Why = RefusedResolve, "no answer from the resolver"
		// An error of the connection to the resolver holds addresses of the host's own,
		// and the sandbox reads this in the answer to a request.
		if !strings.Contains(dns.Err, ":") {
			v.Why = dns.Err
		}
	case errors.As(err, &errno):
		v.Why = errno.Error()
	case errors.Is(err, context.DeadlineExceeded):
		v.Why = "no answer in time"
	case errors.Is(err, context.Canceled):
		v.Why = "it was given up"
	}
	return v
}

// dial connects to a permitted target: for a name, to one of the addresses that the
// host's resolver gives for it now. Without a connection, the verdict says why.
func (g *Gateway) dial(ctx context.Context, t destination) (outward, netip.Addr, Verdict) {
	if g.dials.Wait(ctx) != nil {
		return nil, t.addr, failure(t, context.Canceled)
	}
	if t.verdict.HostPort != 0 {
		return g.dialHost(ctx, t)
	}
	if g.upstream.carries(t) {
		return g.dialProxy(ctx, t)
	}
	host := t.name + "." // absolute: no search domain is tried
	if t.name == "" {
		host = t.addr.String()
	}
	a := &attempts{table: g.table, routing: g.routing, port: t.port}
	d := net.Dialer{Timeout: g.limits.dialWait, Resolver: g.resolver, ControlContext: a.control}
	c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(t.port)))
	if err != nil {
		addr, v := a.verdict(t, err)
		return nil, addr, v
	}
	return g.dialled(c, t)
}

// dialHost connects to the one port of the host's loopback that a host service has.
func (g *Gateway) dialHost(ctx context.Context, t destination) (outward, netip.Addr, Verdict) {
	d := net.Dialer{Timeout: g.limits.dialWait}
	var first error
	for _, loopback := range []string{"127.0.0.1", "::1"} {
		c, err := d.DialContext(ctx, "tcp", net.JoinHostPort(loopback, strconv.Itoa(t.verdict.HostPort)))
		if err == nil {
			return g.dialled(c, t)
		}
		if first == nil {
			first = err
		}
	}
	return nil, t.addr, failure(t, first)
}

func (g *Gateway) dialled(c net.Conn, t destination) (outward, netip.Addr, Verdict) {
	tcp := c.(*net.TCPConn) // what a net.Dialer gives for "tcp"
	g.lean(tcp)
	return tcp, tcp.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap(), t.verdict
}

// IsLocal reports whether the host's own routing calls the address local, or has no
// way to it.
func IsLocal(addr netip.Addr) bool {
	if !addr.IsValid() {
		return false
	}
	local, err := hostRouting(addr)
	return local || err != nil
}

// hostRouting asks the kernel where the host's packets to addr go. All but unicast
// is the host's own: its addresses (public ones too), broadcast, multicast.
func hostRouting(addr netip.Addr) (bool, error) {
	routes, err := netlink.RouteGet(addr.AsSlice())
	if err != nil {
		return true, err
	}
	for _, r := range routes {
		if r.Type != unix.RTN_UNICAST {
			return true, nil
		}
	}
	return len(routes) == 0, nil
}
