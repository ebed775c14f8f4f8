package netpolicy

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// TestGatewayInNetns: the kernel's redirect, the resolver and the relay together, as a
// program in a sandbox meets them: A01, A19, A27, A53, N29.
func TestGatewayInNetns(t *testing.T) {
	needRoot(t)
	s := newServer(t, "127.0.0.1:0", echo)
	z := newZone(t)
	z.set("api.example.com", "127.0.0.1")
	port := fmt.Sprint(s.port)
	policy := &fakePolicy{targets: map[string]Verdict{
		"api.example.com:" + port: {}, "gone.example.com:" + port: {}, "203.0.113.7:9": {},
	}}
	events := make(chan Event, 100)
	inNetns(t, func() {
		box := openSandbox(t, ApplyNftables)
		if box == nil {
			return
		}
		tcp, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: box.dns.LocalAddr().(*net.UDPAddr).Port})
		if err != nil {
			t.Error(err)
			return
		}
		g := newGateway(policy, Listeners{DNS: box.dns, DNSTCP: tcp, Relay: box.relay}, func(e Event) error { events <- e; return nil })
		g.resolver = z.resolver()
		g.routing = func(netip.Addr) (bool, error) { return false, nil }
		g.start()
		defer func() {
			if err := g.Close(); err != nil {
				t.Error(err)
			}
		}()
		if got, err := talk("192.0.2.1:443", "early"); got != "" || !errors.Is(err, syscall.ECONNRESET) || g.Accepted() != 1 {
			t.Errorf("before Open: %q, %v, %d", got, err, g.Accepted())
		}
		g.Open()

		addr := lookup(t, "udp4", "api.example.com.")
		if other := lookup(t, "tcp4", "api.example.com."); other != addr || !addr.IsValid() {
			t.Errorf("%v by UDP, %v by TCP", addr, other)
		}
		if a := lookup(t, "udp4", "evil.example.net."); a.IsValid() {
			t.Errorf("an unlisted name has the address %s", a)
		}
		gone := lookup(t, "udp4", "gone.example.com.")
		if n := z.questions.Load(); n != 0 {
			t.Errorf("%d questions before a connection", n)
		}
		if got, err := talk(addr.String()+":"+port, "hello"); got != "hello" || err != nil {
			t.Errorf("%q %v", got, err)
		}
		for _, refused := range []string{
			addr.String() + ":22", "203.0.113.7:443", "198.18.9.9:443", gone.String() + ":" + port, box.relay.Addr().String(),
			"169.254.169.254:" + port, "10.0.0.1:22",
		} {
			if got, err := talk(refused, "x"); got != "" || !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s: %q %v", refused, got, err)
			}
		}
	})
	close(events)
	seen := map[Refusal]int{}
	for e := range events {
		seen[e.Verdict.Reason]++
	}
	if seen[RefusedResolve] != 1 || seen[RefusedUnlisted] != 6 || seen[""] != 2 || len(seen) != 3 {
		t.Errorf("%v", seen)
	}
}

// talk sends text to addr and gives what comes back.
func talk(addr, text string) (string, error) {
	c, err := net.DialTimeout("tcp4", addr, time.Second)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	// A reset may come before the write, which is then told of it.
	_, written := c.Write([]byte(text))
	_ = c.(*net.TCPConn).CloseWrite()
	got, err := io.ReadAll(c)
	return string(got), errors.Join(written, err)
}

// lookup asks the sandbox's resolver, from this thread's namespace.
func lookup(t *testing.T, network, name string) netip.Addr {
	t.Helper()
	c, err := net.DialTimeout(network, ResolverAddr.String()+":53", time.Second)
	if err != nil {
		t.Error(err)
		return netip.Addr{}
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	conn := &dns.Conn{Conn: c}
	if err := conn.WriteMsg(question(name, dns.TypeA)); err != nil {
		t.Error(err)
		return netip.Addr{}
	}
	reply, err := conn.ReadMsg()
	if err != nil || len(reply.Answer) != 1 {
		return netip.Addr{}
	}
	a, _ := netip.AddrFromSlice(reply.Answer[0].(*dns.A).A.To4())
	return a
}
