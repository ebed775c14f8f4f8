package netpolicy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// fakePolicy decides by what a test says: targets are "name:port" or "addr:port".
type fakePolicy struct {
	mu      sync.Mutex
	targets map[string]Verdict
	// dial decides on addresses; nil permits all of them.
	dial func(addr netip.Addr, port int, local bool) Verdict
}

func (p *fakePolicy) allow(target string, v Verdict) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.targets[target] = v
}

func (p *fakePolicy) judgeDials(f func(addr netip.Addr, port int, local bool) Verdict) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dial = f
}

var _ decider = (*Table)(nil)

func (p *fakePolicy) Knows(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for target := range p.targets {
		if strings.HasPrefix(target, name+":") {
			return true
		}
	}
	return false
}

func (p *fakePolicy) decide(target string) Verdict {
	p.mu.Lock()
	defer p.mu.Unlock()
	v, ok := p.targets[target]
	if !ok {
		return Verdict{Reason: RefusedUnlisted, Entry: target}
	}
	v.Allowed = true
	return v
}

func (p *fakePolicy) Name(name string, port int) Verdict {
	return p.decide(fmt.Sprintf("%s:%d", name, port))
}

func (p *fakePolicy) Addr(addr netip.Addr, port int) Verdict {
	return p.decide(netip.AddrPortFrom(addr, uint16(port)).String())
}

func (p *fakePolicy) Dial(addr netip.Addr, port int, local bool) Verdict {
	p.mu.Lock()
	f := p.dial
	p.mu.Unlock()
	if f == nil {
		return Verdict{Allowed: true}
	}
	return f(addr, port, local)
}

// onlyReachable is the rule without address ranges.
func onlyReachable(addr netip.Addr, _ int, local bool) Verdict {
	if ok, why := GloballyReachable(addr); !ok || local {
		return Verdict{Reason: RefusedAddress, Why: why}
	}
	return Verdict{Allowed: true}
}

// world is a gateway with both sides of it on loopback: connections come from where
// a test says they were meant to go, and names lead where it says.
type world struct {
	t      testing.TB
	g      *Gateway
	policy *fakePolicy
	zone   *zone

	mu     sync.Mutex
	meant  map[netip.AddrPort]netip.AddrPort
	events []Event
	// logErr is what the log gives.
	logErr error
}

// newWorld gives an open gateway. tune may change it before it starts.
func newWorld(t testing.TB, tune func(w *world)) *world {
	t.Helper()
	w := &world{t: t, policy: &fakePolicy{targets: map[string]Verdict{}}, zone: newZone(t), meant: map[netip.AddrPort]netip.AddrPort{}}
	w.g = newGateway(w.policy, testListeners(t), w.log)
	w.g.resolver = w.zone.resolver()
	w.g.original = w.original
	w.g.routing = func(netip.Addr) (bool, error) { return false, nil }
	w.g.limits.burst = 10000
	w.g.limits.headWait = 2 * time.Second
	w.g.limits.stallWait = 100 * time.Millisecond
	if tune != nil {
		tune(w)
	}
	w.g.start()
	w.g.Open()
	t.Cleanup(func() {
		if err := w.g.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

func testListeners(t testing.TB) Listeners {
	t.Helper()
	loopback := net.IPv4(127, 0, 0, 1)
	relay, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: loopback})
	if err != nil {
		t.Fatal(err)
	}
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{IP: loopback})
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: loopback})
	if err != nil {
		t.Fatal(err)
	}
	return Listeners{DNS: udp, DNSTCP: tcp, Relay: relay}
}

func (w *world) log(e Event) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
	return w.logErr
}

// original waits until the test has said where the connection is meant to go.
func (w *world) original(c *net.TCPConn) (netip.AddrPort, error) {
	from := c.RemoteAddr().(*net.TCPAddr).AddrPort()
	for range 2000 {
		w.mu.Lock()
		to, ok := w.meant[from]
		w.mu.Unlock()
		if ok {
			return to, nil
		}
		time.Sleep(time.Millisecond)
	}
	return netip.AddrPort{}, errors.New("nobody said where to")
}

// connect makes the sandbox's connection to a target, "name:port" or "addr:port". A
// name gets its address first, as a question would give it.
func (w *world) connect(target string) *net.TCPConn {
	w.t.Helper()
	c, err := w.tryConnect(target)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	return c
}

func (w *world) tryConnect(target string) (*net.TCPConn, error) {
	dst, err := netip.ParseAddrPort(target)
	if err != nil {
		name, port, _ := net.SplitHostPort(target)
		addr, _ := w.g.names.Addr(name)
		dst = netip.MustParseAddrPort(addr.String() + ":" + port)
	}
	c, err := net.Dial("tcp4", w.g.listeners.Relay.Addr().String())
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	w.meant[c.LocalAddr().(*net.TCPAddr).AddrPort()] = dst
	w.mu.Unlock()
	return c.(*net.TCPConn), c.SetDeadline(time.Now().Add(10 * time.Second))
}

// allow permits the target, which is a server's port under a name.
func (w *world) allow(name string, port int, v Verdict) string {
	target := fmt.Sprintf("%s:%d", name, port)
	w.policy.allow(target, v)
	return target
}

// seen waits for an event that fits.
func (w *world) seen(what string, fits func(Event) bool) Event {
	w.t.Helper()
	for range 1000 {
		w.mu.Lock()
		for _, e := range w.events {
			if fits(e) {
				w.mu.Unlock()
				return e
			}
		}
		w.mu.Unlock()
		time.Sleep(5 * time.Millisecond)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.t.Fatalf("no event %s among %+v", what, w.events)
	return Event{}
}

func (w *world) refused(kind EventKind, reason Refusal) Event {
	w.t.Helper()
	return w.seen(string(reason), func(e Event) bool { return e.Kind == kind && e.Verdict.Reason == reason && !e.Verdict.Allowed })
}

func (w *world) all() []Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]Event{}, w.events...)
}

// wantReset checks that nothing but a reset comes.
func wantReset(t testing.TB, c net.Conn) {
	t.Helper()
	got, err := io.ReadAll(c)
	if !errors.Is(err, syscall.ECONNRESET) || len(got) != 0 {
		t.Errorf("%q, %v; want a reset without a byte", got, err)
	}
}

// wantResetAt is wantReset for a new connection. The reset may be faster than connect.
func wantResetAt(t testing.TB, addr net.Addr) {
	t.Helper()
	c, err := net.Dial("tcp4", addr.String())
	if err != nil {
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Error(err)
		}
		return
	}
	defer c.Close()
	wantReset(t, c)
}

// zone is a DNS server on loopback.
type zone struct {
	server    *dns.Server
	addr      string
	mu        sync.Mutex
	names     map[string]func() []string
	questions atomic.Int64
}

func newZone(t testing.TB) *zone {
	t.Helper()
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	z := &zone{addr: pc.LocalAddr().String(), names: map[string]func() []string{}}
	z.server = &dns.Server{PacketConn: pc, Handler: z}
	go func() { _ = z.server.ActivateAndServe() }()
	t.Cleanup(func() { _ = pc.Close() })
	return z
}

func (z *zone) set(name string, addrs ...string) {
	z.setFunc(name, func() []string { return addrs })
}

func (z *zone) setFunc(name string, f func() []string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.names[name] = f
}

func (z *zone) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	z.questions.Add(1)
	reply := new(dns.Msg).SetReply(q)
	kind := q.Question[0].Qtype
	z.mu.Lock()
	f := z.names[strings.TrimSuffix(strings.ToLower(q.Question[0].Name), ".")]
	z.mu.Unlock()
	if f == nil {
		reply.Rcode = dns.RcodeNameError
	} else {
		for _, a := range f() {
			addr := netip.MustParseAddr(a)
			header := dns.RR_Header{Name: q.Question[0].Name, Rrtype: kind, Class: dns.ClassINET}
			if addr.Is4() && kind == dns.TypeA {
				reply.Answer = append(reply.Answer, &dns.A{Hdr: header, A: addr.AsSlice()})
			}
			if addr.Is6() && kind == dns.TypeAAAA {
				reply.Answer = append(reply.Answer, &dns.AAAA{Hdr: header, AAAA: addr.AsSlice()})
			}
		}
	}
	_ = w.WriteMsg(reply)
}

func (z *zone) resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "udp4", z.addr)
	}}
}

// server takes connections on loopback and counts them.
type server struct {
	net.Listener
	port  int
	taken atomic.Int64
}

func newServer(t testing.TB, addr string, handle func(c *net.TCPConn)) *server {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{Listener: l, port: l.Addr().(*net.TCPAddr).Port}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue
			}
			s.taken.Add(1)
			go func() {
				defer c.Close()
				handle(c.(*net.TCPConn))
			}()
		}
	}()
	return s
}

// echo gives back what it gets, then ends.
func echo(c *net.TCPConn) { _, _ = io.Copy(c, c) }

// TestNotOpen: A44: before Open, nothing is answered, looked up, dialled or told.
func TestNotOpen(t *testing.T) {
	s := newServer(t, "127.0.0.1:0", echo)
	w := newWorld(t, func(w *world) { w.zone.set("api.example.com", "127.0.0.1") })
	w.g.open.Store(false)
	target := w.allow("api.example.com", s.port, Verdict{})
	wantResetAt(t, w.g.listeners.Relay.Addr())
	if n := w.g.Accepted(); n != 1 {
		t.Errorf("%d connections taken", n)
	}
	wantResetAt(t, w.g.listeners.DNSTCP.Addr())
	if reply := w.askUDP(question("api.example.com.", dns.TypeA), 200*time.Millisecond); reply != nil {
		t.Errorf("answered %v", reply)
	}
	if len(w.all()) != 0 || w.zone.questions.Load() != 0 || s.taken.Load() != 0 {
		t.Errorf("%v, %d questions, %d connections", w.all(), w.zone.questions.Load(), s.taken.Load())
	}
	w.g.Open()
	if got := w.exchange(target, "control"); got != "control" {
		t.Errorf("after Open: %q", got)
	}
}

// exchange sends text and gives what comes back.
func (w *world) exchange(target, text string) string {
	w.t.Helper()
	c := w.connect(target)
	_, _ = c.Write([]byte(text))
	_ = c.CloseWrite()
	got, _ := io.ReadAll(c)
	return string(got)
}

func (w *world) askUDP(q *dns.Msg, wait time.Duration) *dns.Msg {
	w.t.Helper()
	c := dns.Client{Timeout: wait, UDPSize: dns.MaxMsgSize}
	reply, _, err := c.Exchange(q, w.g.listeners.DNS.LocalAddr().String())
	if err != nil {
		return nil
	}
	return reply
}

// TestQuestions: A01–A08 over both transports, and nobody outside is asked.
func TestQuestions(t *testing.T) {
	w := newWorld(t, nil)
	w.allow("api.example.com", 443, Verdict{})
	conn, err := dns.Dial("tcp", w.g.listeners.DNSTCP.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	transports := map[string]func(q *dns.Msg) *dns.Msg{
		"udp": func(q *dns.Msg) *dns.Msg { return w.askUDP(q, 5*time.Second) },
		// One connection for all of them.
		"tcp": func(q *dns.Msg) *dns.Msg {
			if err := conn.WriteMsg(q); err != nil {
				t.Error(err)
			}
			reply, err := conn.ReadMsg()
			if err != nil {
				t.Error(err)
			}
			return reply
		},
	}
	for name, ask := range transports {
		t.Run(name, func(t *testing.T) {
			for _, c := range []struct {
				name    string
				kind    uint16
				rcode   int
				answers int
			}{
				{"api.example.com.", dns.TypeA, dns.RcodeSuccess, 1},
				{"API.example.com.", dns.TypeA, dns.RcodeSuccess, 1},
				{"api.example.com.", dns.TypeAAAA, dns.RcodeSuccess, 0},
				{"api.example.com.", dns.TypeHTTPS, dns.RcodeSuccess, 0}, // A07
				{"secret.evil.com.", dns.TypeA, dns.RcodeNameError, 0},
			} {
				if r := ask(question(c.name, c.kind)); r == nil || r.Rcode != c.rcode || len(r.Answer) != c.answers {
					t.Errorf("%s %d: %v", c.name, c.kind, r)
				}
			}
		})
	}
	if e := w.refused(EventName, RefusedUnlisted); e.Name != "secret.evil.com" || e.Conn != 0 {
		t.Errorf("%+v", e)
	}
	if n := w.zone.questions.Load(); n != 0 {
		t.Errorf("%d questions went outside", n)
	}
}

// TestLongAnswers fit into what the asker takes.
func TestLongAnswers(t *testing.T) {
	long := strings.Repeat(strings.Repeat("a", 60)+".", 4) + "example.com"
	w := newWorld(t, nil)
	w.allow(long, 443, Verdict{})
	q := question(long+".", dns.TypeA)
	packed, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	whole := w.g.answers.Answer(packed)
	if len(whole) <= dns.MinMsgSize {
		t.Skipf("%d bytes: nothing to cut", len(whole))
	}
	out := fit(packed, whole)
	r := new(dns.Msg)
	if err := r.Unpack(out); err != nil || len(out) > dns.MinMsgSize || len(r.Answer) != 1 && !r.Truncated {
		t.Errorf("%d bytes, %v, %v", len(out), r, err)
	}
	// What can't be made to fit says so.
	big := new(dns.Msg).SetReply(q)
	for range 100 {
		big.Answer = append(big.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(198, 18, 1, 1)})
	}
	if whole, err = big.Pack(); err != nil {
		t.Fatal(err)
	}
	for size, most := range map[uint16]int{0: dns.MinMsgSize, 100: dns.MinMsgSize, 1000: 1000, 65535: udpSize} {
		q := question(long+".", dns.TypeA)
		if size != 0 {
			q.SetEdns0(size, false)
		}
		packed, err := q.Pack()
		if err != nil {
			t.Fatal(err)
		}
		out := fit(packed, whole)
		if err := r.Unpack(out); err != nil || len(out) > most || !r.Truncated {
			t.Errorf("%d: %d bytes, truncated %v, %v", size, len(out), r.Truncated, err)
		}
	}
}

// TestQuestionFlood: A56: connections to the resolver are bounded, and end when idle.
func TestQuestionFlood(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.g.limits.dnsConns = 3
		w.g.limits.questionWait = 500 * time.Millisecond
	})
	var conns []net.Conn
	for range 5 {
		c, err := net.Dial("tcp4", w.g.listeners.DNSTCP.Addr().String())
		if errors.Is(err, syscall.ECONNRESET) && len(conns) >= 3 {
			continue // the reset was faster than the dialler
		}
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	for _, c := range conns[3:] {
		wantReset(t, c)
	}
	for _, c := range conns[:3] {
		_, _ = c.Write([]byte{0}) // slowloris
		if got, err := io.ReadAll(c); len(got) != 0 || err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%q %v", got, err)
		}
	}
	if _, _, err := (&dns.Client{Net: "tcp"}).Exchange(question("x.example.com.", dns.TypeA), w.g.listeners.DNSTCP.Addr().String()); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// TestRefusedTargets: A19, A27, N29: another port of a permitted name, an address
// without a rule, an address that stands for nothing: reset, and nothing looked up.
func TestRefusedTargets(t *testing.T) {
	s := newServer(t, "127.0.0.1:0", echo)
	w := newWorld(t, func(w *world) { w.zone.set("api.example.com", "127.0.0.1") })
	target := w.allow("api.example.com", s.port, Verdict{})
	for _, other := range []string{
		"api.example.com:22", "api.example.com:8443", "other.example.com:443", "203.0.113.7:443", "198.18.9.9:443", "198.18.0.2:853",
	} {
		wantReset(t, w.connect(other))
		e := w.refused(EventConnect, RefusedUnlisted)
		if e.Conn == 0 || e.Port == 0 || (e.Name == "") != e.Addr.IsValid() || e.Verdict.Entry != other {
			t.Errorf("%s: %+v", other, e)
		}
		w.mu.Lock()
		w.events = nil
		w.mu.Unlock()
	}
	// The sandbox's own addresses are the host's outside.
	w.policy.allow(s.Addr().String(), Verdict{})
	for _, own := range []string{s.Addr().String(), SandboxAddr.String() + ":443"} {
		wantReset(t, w.connect(own))
	}
	if len(w.all()) != 0 || w.zone.questions.Load() != 0 || s.taken.Load() != 0 {
		t.Errorf("%v, %d questions, %d connections", w.all(), w.zone.questions.Load(), s.taken.Load())
	}
	if got := w.exchange(target, "control"); got != "control" {
		t.Errorf("control: %q", got)
	}
	e := w.seen("end", func(e Event) bool { return e.Kind == EventEnd })
	if e.Sent != 7 || e.Received != 7 || e.Name != "api.example.com" || e.Micros == 0 {
		t.Errorf("%+v", e)
	}
	if e := w.seen("connect", func(e Event) bool { return e.Kind == EventConnect }); e.Addr.String() != "127.0.0.1" || !e.Verdict.Allowed {
		t.Errorf("%+v", e)
	}
}

// TestAddressesBehindNames: A09, A36, N29: what a permitted name may not lead to. The
// control permits the address.
func TestAddressesBehindNames(t *testing.T) {
	s := newServer(t, "127.0.0.1:0", echo)
	w := newWorld(t, func(w *world) { w.policy.dial = onlyReachable })
	target := w.allow("api.example.com", s.port, Verdict{})
	for _, addr := range []string{
		"127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254", "0.0.0.0", "255.255.255.255", "224.0.0.1",
		"::1", "fc00::1", "fd00:ec2::254", "fe80::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::1", "ff02::1",
	} {
		w.zone.set("api.example.com", addr)
		wantReset(t, w.connect(target))
		e := w.refused(EventConnect, RefusedAddress)
		if want := netip.MustParseAddr(addr).Unmap(); e.Addr != want || e.Name != "api.example.com" {
			t.Errorf("%s: %+v", addr, e)
		}
		w.mu.Lock()
		w.events = nil
		w.mu.Unlock()
	}
	if n := s.taken.Load(); n != 0 {
		t.Errorf("%d connections reached the host", n)
	}
	w.policy.judgeDials(nil)
	w.zone.set("api.example.com", "127.0.0.1")
	if got := w.exchange(target, "control"); got != "control" {
		t.Errorf("control: %q", got)
	}
}

// TestHostsOwnAddress: A37: an address that looks public and is the host's.
func TestHostsOwnAddress(t *testing.T) {
	s := newServer(t, "127.0.0.1:0", echo)
	var local atomic.Bool
	w := newWorld(t, func(w *world) {
		w.g.routing = func(netip.Addr) (bool, error) { return local.Load(), nil }
		w.policy.dial = func(_ netip.Addr, _ int, local bool) Verdict {
			return Verdict{Allowed: !local, Reason: map[bool]Refusal{true: RefusedAddress}[local]}
		}
		w.zone.set("api.example.com", "127.0.0.1")
	})
	target := w.allow("api.example.com", s.port, Verdict{})
	local.Store(true)
	wantReset(t, w.connect(target))
	w.refused(EventConnect, RefusedAddress)
	if n := s.taken.Load(); n != 0 {
		t.Errorf("%d connections", n)
	}
	local.Store(false)
	if got := w.exchange(target, "control"); got != "control" {
		t.Errorf("control: %q", got)
	}
}

func TestHostRouting(t *testing.T) {
	for addr, want := range map[string]bool{"127.0.0.1": true, "127.9.9.9": true, "::1": true} {
		if local, err := hostRouting(netip.MustParseAddr(addr)); err != nil || local != want {
			t.Errorf("%s: %v %v", addr, local, err)
		}
	}
	for _, addr := range []string{"224.0.0.1", "255.255.255.255", "ff02::1"} {
		if local, err := hostRouting(netip.MustParseAddr(addr)); err == nil && !local {
			t.Errorf("%s is somebody else's", addr)
		}
	}
}

// TestRebinding: A10, N28: an answer that changes changes where the next connection
// goes, and the address that was judged is the one that is dialled.
func TestRebinding(t *testing.T) {
	private := newServer(t, "127.0.0.1:0", func(c *net.TCPConn) { _, _ = c.Write([]byte("private")) })
	public := newServer(t, fmt.Sprintf("127.0.0.2:%d", private.port), func(c *net.TCPConn) { _, _ = c.Write([]byte("public")) })
	w := newWorld(t, func(w *world) {
		w.policy.dial = func(addr netip.Addr, _ int, _ bool) Verdict {
			if addr.String() == "127.0.0.1" {
				return Verdict{Reason: RefusedAddress}
			}
			return Verdict{Allowed: true}
		}
		var n atomic.Int64
		w.zone.setFunc("api.example.com", func() []string {
			if n.Add(1)%2 == 1 {
				return []string{"127.0.0.2"}
			}
			return []string{"127.0.0.1"}
		})
	})
	target := w.allow("api.example.com", public.port, Verdict{})
	outcomes := map[string]int{}
	for range 40 {
		got, err := io.ReadAll(w.connect(target))
		if err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Error(err)
		}
		outcomes[string(got)]++
	}
	if outcomes["private"] != 0 || private.taken.Load() != 0 || outcomes["public"] == 0 || outcomes[""] == 0 {
		t.Errorf("%v, %d reached the private one", outcomes, private.taken.Load())
	}
	// Among several, the permitted one is taken.
	w.zone.set("api.example.com", "127.0.0.1", "127.0.0.2")
	if got, err := io.ReadAll(w.connect(target)); string(got) != "public" || private.taken.Load() != 0 {
		t.Errorf("%q %v", got, err)
	}
	w.policy.judgeDials(nil)
	w.zone.set("api.example.com", "127.0.0.1")
	if got, _ := io.ReadAll(w.connect(target)); string(got) != "private" {
		t.Errorf("control: %q", got)
	}
}

// TestUnreachable: A53: one name that does not resolve, or does not answer, is its
// own trouble.
func TestUnreachable(t *testing.T) {
	s := newServer(t, "127.0.0.1:0", echo)
	gone := newServer(t, "127.0.0.1:0", echo)
	gone.Close()
	w := newWorld(t, func(w *world) { w.zone.set("api.example.com", "127.0.0.1") })
	wantReset(t, w.connect(w.allow("nowhere.example.com", s.port, Verdict{})))
	if e := w.refused(EventConnect, RefusedResolve); e.Name != "nowhere.example.com" {
		t.Errorf("%+v", e)
	}
	wantReset(t, w.connect(w.allow("api.example.com", gone.port, Verdict{})))
	if e := w.refused(EventConnect, RefusedDial); e.Verdict.Why != syscall.ECONNREFUSED.Error() {
		t.Errorf("%+v", e)
	}
	if got := w.exchange(w.allow("api.example.com", s.port, Verdict{}), "control"); got != "control" {
		t.Errorf("control: %q", got)
	}
}

// TestManyAddresses: an answer with many addresses is no order to knock at all of them.
func TestManyAddresses(t *testing.T) {
	var addrs []string
	for i := range 28 {
		addrs = append(addrs, fmt.Sprintf("127.1.0.%d", i+1))
	}
	var judged atomic.Int64
	w := newWorld(t, func(w *world) {
		w.zone.set("many.example.com", addrs...)
		w.g.routing = func(netip.Addr) (bool, error) { judged.Add(1); return false, nil }
	})
	s := newServer(t, addrs[len(addrs)-1]+":0", echo)
	wantReset(t, w.connect(w.allow("many.example.com", s.port, Verdict{})))
	if e := w.refused(EventConnect, RefusedDial); e.Verdict.Why != syscall.ECONNREFUSED.Error() {
		t.Errorf("%+v", e)
	}
	if judged.Load() != int64(len(addrs)) || s.taken.Load() != 0 {
		t.Errorf("%d addresses judged, %d connections", judged.Load(), s.taken.Load())
	}
}

// TestResolverUnreachable: what is said of a resolver that is not there holds no
// address of the host's, which the sandbox would read.
func TestResolverUnreachable(t *testing.T) {
	s := newWebServer(t)
	w, target := newHTTPWorld(t, s.port)
	gone, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	w.zone.addr = gone.LocalAddr().String()
	_, _, body := send(t, w.connect(target), "GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n")
	if !strings.Contains(body, "no answer from the resolver") || strings.Contains(body, "127.0.0.1") {
		t.Errorf("%q", body)
	}
}

// TestDialWait: a resolver that says nothing is given up.
func TestDialWait(t *testing.T) {
	silent, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	w := newWorld(t, func(w *world) {
		w.zone.addr = silent.LocalAddr().String()
		w.g.limits.dialWait = 300 * time.Millisecond
	})
	start := time.Now()
	wantReset(t, w.connect(w.allow("api.example.com", 22, Verdict{})))
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("it took %s", took)
	}
	w.refused(EventConnect, RefusedResolve)
}

// TestHostService: only the one port, on whichever loopback it listens.
func TestHostService(t *testing.T) {
	for _, loopback := range []string{"127.0.0.1:0", "[::1]:0"} {
		s := newServer(t, loopback, echo)
		w := newWorld(t, func(w *world) { w.policy.dial = onlyReachable })
		target := w.allow("mcp.host.internal", 443, Verdict{HostPort: s.port})
		if got := w.exchange(target, "no hello at all"); got != "no hello at all" {
			t.Errorf("%s: %q", loopback, got)
		}
		if n := w.zone.questions.Load(); n != 0 {
			t.Errorf("%d questions", n)
		}
		wantReset(t, w.connect(fmt.Sprintf("mcp.host.internal:%d", s.port)))
	}
}

// TestRawAddress: an address with a rule is dialled as it is, and judged all the same.
func TestRawAddress(t *testing.T) {
	s := newServer(t, "127.0.0.2:0", echo)
	w := newWorld(t, func(w *world) { w.policy.dial = onlyReachable })
	w.policy.allow("203.0.113.9:9", Verdict{})
	wantReset(t, w.connect("203.0.113.9:9"))
	if e := w.refused(EventConnect, RefusedAddress); e.Addr.String() != "203.0.113.9" || e.Name != "" {
		t.Errorf("%+v", e)
	}
	// Loopback is never taken from a sandbox, so the dialling is tried by itself.
	here := destination{addr: netip.MustParseAddr("127.0.0.2"), port: s.port, verdict: Verdict{Allowed: true}}
	if c, addr, v := w.g.dial(t.Context(), here); c != nil || addr != here.addr || v.Reason != RefusedAddress {
		t.Errorf("%v %v %+v", c, addr, v)
	}
	w.policy.judgeDials(nil)
	c, addr, v := w.g.dial(t.Context(), here)
	if c == nil || addr != here.addr || !v.Allowed {
		t.Fatalf("control: %v %+v", addr, v)
	}
	c.Close()
}

// TestConnectionLimit: A56: past the limit a connection is reset, and the ones before
// it go on.
func TestConnectionLimit(t *testing.T) {
	s := newServer(t, "127.0.0.1:0", echo)
	w := newWorld(t, func(w *world) {
		w.g.limits.conns = 3
		w.zone.set("api.example.com", "127.0.0.1")
	})
	target := w.allow("api.example.com", s.port, Verdict{})
	var open []*net.TCPConn
	for range 3 {
		c := w.connect(target)
		roundTrip(t, c, "ping")
		open = append(open, c)
	}
	wantReset(t, w.connect(target))
	w.refused(EventConnect, RefusedLimit)
	for _, c := range open {
		roundTrip(t, c, "pong")
	}
	open[0].Close()
	w.seen("end", func(e Event) bool { return e.Kind == EventEnd })
	time.Sleep(50 * time.Millisecond)
	roundTrip(t, w.connect(target), "again")
}

func roundTrip(t testing.TB, c net.Conn, text string) {
	t.Helper()
	if _, err := c.Write([]byte(text)); err != nil {
		t.Error(err)
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, []byte(text)) {
		t.Errorf("%q, %v; want %q", got, err, text)
	}
}

// TestRate: A56: connections that come too fast wait, and are served.
func TestRate(t *testing.T) {
	s := newServer(t, "127.0.0.1:0", echo)
	w := newWorld(t, func(w *world) {
		w.g.limits.burst, w.g.limits.connRate = 1, 50
		w.zone.set("api.example.com", "127.0.0.1")
	})
	target := w.allow("api.example.com", s.port, Verdict{})
	start := time.Now()
	for range 20 {
		if got := w.exchange(target, "x"); got != "x" {
			t.Errorf("%q", got)
		}
	}
	if took := time.Since(start); took < 300*time.Millisecond {
		t.Errorf("twenty connections at fifty a second took %s", took)
	}
}

// TestClose: A49: nothing moves after it, and nothing is left running.
func TestClose(t *testing.T) {
	var got atomic.Int64
	s := newServer(t, "127.0.0.1:0", func(c *net.TCPConn) {
		n, _ := io.Copy(io.Discard, c)
		got.Add(n)
	})
	w := newWorld(t, func(w *world) { w.zone.set("api.example.com", "127.0.0.1") })
	target := w.allow("api.example.com", s.port, Verdict{})
	var open []*net.TCPConn
	for range 10 {
		c := w.connect(target)
		_, _ = c.Write([]byte("ping"))
		open = append(open, c)
	}
	writing := w.connect(target)
	go func() {
		for {
			if _, err := writing.Write(make([]byte, 1<<16)); err != nil {
				return
			}
		}
	}()
	for range 11 {
		w.seen("connect", func(e Event) bool { return e.Kind == EventConnect && e.Conn == 11 })
	}
	start := time.Now()
	if err := w.g.Close(); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > time.Second {
		t.Errorf("Close took %s", took)
	}
	for _, c := range open {
		wantReset(t, c)
	}
	if _, err := net.DialTimeout("tcp4", w.g.listeners.Relay.Addr().String(), time.Second); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the listener: %v", err)
	}
	if err := w.g.Close(); err != nil {
		t.Errorf("again: %v", err)
	}
}

// wantEnded is for a connection that ends soon, in whatever way, without a byte of the
// server's.
func wantEnded(t *testing.T, c *net.TCPConn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
	got, err := io.ReadAll(c)
	if own := strings.Contains(string(got), "agentshim: egress: "); len(got) > 0 && !own || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%q, %v; want an end", got, err)
	}
}

// TestUnlogged: from the first decision that can't be logged on, no byte is carried:
// not by that connection, not by one that was open, not by a later one.
func TestUnlogged(t *testing.T) {
	for name, port := range map[string]func(w *world, s *server){
		"any port": func(*world, *server) {}, "HTTP": func(w *world, s *server) { w.g.httpPort = s.port },
	} {
		t.Run(name, func(t *testing.T) {
			var got atomic.Int64 // connections with a byte
			s := newServer(t, "127.0.0.1:0", func(c *net.TCPConn) {
				if n, _ := c.Read(make([]byte, 1)); n > 0 {
					got.Add(1)
				}
				_, _ = io.Copy(io.Discard, c)
			})
			w := newWorld(t, func(w *world) {
				w.zone.set("api.example.com", "127.0.0.1")
				port(w, s)
			})
			target := w.allow("api.example.com", s.port, Verdict{})
			const request = "GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
			open := w.connect(target)
			_, _ = open.Write([]byte(request))
			w.seen("connect", func(e Event) bool { return e.Kind == EventConnect })
			for end := time.Now().Add(2 * time.Second); got.Load() == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
			}
			if got.Load() != 1 {
				t.Fatal("the control's bytes don't arrive")
			}
			w.mu.Lock()
			w.logErr = errors.New("no space left on device")
			w.mu.Unlock()
			c := w.connect(target)
			_, _ = c.Write([]byte(request))
			wantEnded(t, c)
			wantEnded(t, open)
			if c, err := w.tryConnect(target); err == nil {
				wantEnded(t, c)
			}
			if n := got.Load(); n != 1 {
				t.Errorf("%d connections were carried and not logged", n-1)
			}
		})
	}
}
