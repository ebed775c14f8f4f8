package netpolicy

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// destination is what one connection of the sandbox is for, and what the policy says.
type destination struct {
	conn uint64
	// name is empty for an address that stands for no name.
	name    string
	addr    netip.Addr
	port    int
	verdict Verdict
	since   time.Time
}

// judged reports whether the content of a connection to that port is judged.
func (t destination) judged(port int) bool {
	return t.port == port && t.name != "" && !t.verdict.Raw && t.verdict.HostPort == 0
}

// event has the decision; addr is the one that was dialled.
func (t destination) event(v Verdict, addr netip.Addr) Event {
	return Event{Kind: EventConnect, Conn: t.conn, Name: t.name, Addr: addr, Port: t.port, Verdict: v}
}

func (t destination) end(sent, received int64) Event {
	e := t.event(t.verdict, t.addr)
	e.Kind, e.Sent, e.Received, e.Micros = EventEnd, sent, received, time.Since(t.since).Microseconds()
	return e
}

// relay takes the sandbox's connections until the gateway's end.
func (g *Gateway) relay() {
	for {
		c := g.accept(g.listeners.Relay, g.conns)
		if c == nil {
			return
		}
		if !g.open.Load() {
			g.accepted.Add(1)
			reset(c)
			continue
		}
		if !g.spawn(func() { g.serve(c) }) {
			reset(c)
		}
	}
}

// serve decides on one connection. A refused one is reset, on the HTTP port answered.
func (g *Gateway) serve(in *net.TCPConn) {
	defer in.Close()
	defer g.resetAtEnd(in)()
	t, err := g.decide(in)
	if err != nil {
		reset(in)
		return
	}
	select {
	case g.slots <- struct{}{}:
		defer func() { <-g.slots }()
		g.lean(in)
	default:
		g.refuse(in, t, Verdict{Reason: RefusedLimit, Why: fmt.Sprintf("%d connections are open", cap(g.slots))}, "")
		return
	}
	switch {
	case !t.verdict.Allowed && t.port != g.httpPort:
		g.refuse(in, t, t.verdict, "")
	case !t.verdict.Allowed:
		g.tell(t.event(t.verdict, t.addr))
		g.web.serve(in, t)
	case t.judged(g.httpPort):
		g.web.serve(in, t)
	default:
		g.carry(in, t)
	}
}

var errOwnAddress = errors.New("the sandbox's own address")

// decide finds out where the sandbox wanted to go and asks the policy.
func (g *Gateway) decide(in *net.TCPConn) (destination, error) {
	dst, err := g.original(in)
	if err != nil {
		return destination{}, err
	}
	// Inside the sandbox these lead to itself. Outside they would be the host.
	if loopback4.Contains(dst.Addr()) || dst.Addr() == SandboxAddr {
		return destination{}, errOwnAddress
	}
	t := destination{conn: g.number.Add(1), addr: dst.Addr(), port: int(dst.Port()), since: time.Now()}
	if name, ok := g.names.Name(t.addr); ok {
		t.name, t.addr = name, netip.Addr{}
		t.verdict = g.table.Name(name, t.port)
	} else {
		t.verdict = g.table.Addr(t.addr, t.port)
	}
	return t, nil
}

func (g *Gateway) refuse(in *net.TCPConn, t destination, v Verdict, detail string) {
	e := t.event(v, t.addr)
	e.Detail = clip(detail)
	g.tell(e)
	reset(in)
}

// clip bounds what the sandbox sent before it is kept.
func clip(s string) string { return s[:min(len(s), 256)] }

// carry dials the target and moves bytes both ways.
func (g *Gateway) carry(in *net.TCPConn, t destination) {
	var head []byte
	if t.judged(g.tlsPort) {
		_ = in.SetReadDeadline(time.Now().Add(g.limits.headWait))
		var h hello
		apart(func() { h = readHello(in, g.limits.helloBytes) })
		if h.gone {
			return // it was closed without a word: nothing was decided, nothing leaves
		}
		if v := h.judge(t); !v.Allowed {
			g.refuse(in, t, v, h.serverName)
			return
		}
		_ = in.SetReadDeadline(time.Time{})
		head = h.raw
	}
	out, addr, v := g.reach(t)
	if out == nil {
		t.addr = addr
		g.refuse(in, t, v, "")
		return
	}
	defer g.resetAtEnd(out)()
	t.addr = addr
	if !g.tell(t.event(v, addr)) {
		reset(in)
		reset(out)
		return
	}
	_ = out.SetWriteDeadline(time.Now().Add(g.limits.headWait))
	if _, err := out.Write(head); err != nil {
		reset(in)
		reset(out)
	}
	_ = out.SetWriteDeadline(time.Time{})
	sent, received := g.pair(in, out)
	g.tell(t.end(sent+int64(len(head)), received))
}

// reach dials the target.
func (g *Gateway) reach(t destination) (out outward, addr netip.Addr, v Verdict) {
	apart(func() { out, addr, v = g.dial(g.ctx, t) })
	return out, addr, v
}

// apart runs f on a stack of its own. One that has grown stays large until the next
// garbage collections, and a connection's own lasts as long as the connection.
func apart(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	<-done
}

// resetAtEnd resets c when the gateway ends. The function it gives takes that back.
func (g *Gateway) resetAtEnd(c net.Conn) func() bool {
	return context.AfterFunc(g.ctx, func() { reset(c) })
}

// originalDestination is where a redirected connection was meant to go. A connection
// that was made to the listener itself has none, or one of its own namespace.
func originalDestination(c *net.TCPConn) (netip.AddrPort, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	var m *unix.IPv6Mreq
	var errno error
	if err := raw.Control(func(fd uintptr) {
		// struct sockaddr_in has the sixteen bytes of an ipv6_mreq's address.
		m, errno = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST)
	}); err != nil {
		return netip.AddrPort{}, err
	}
	if errno != nil {
		return netip.AddrPort{}, fmt.Errorf("SO_ORIGINAL_DST: %w", errno)
	}
	if family := binary.NativeEndian.Uint16(m.Multiaddr[:2]); family != unix.AF_INET {
		return netip.AddrPort{}, fmt.Errorf("SO_ORIGINAL_DST: family %d", family)
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(m.Multiaddr[4:8])), binary.BigEndian.Uint16(m.Multiaddr[2:4])), nil
}
