package netpolicy

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// unlimited is r without its limits.
func unlimited(r Ruleset) Ruleset {
	return without(r, func(p PacketRule) bool { return p.Limit != Limit{} || p.Action == Drop && !p.New })
}

func without(r Ruleset, drop func(PacketRule) bool) Ruleset {
	r.Chains = slices.Clone(r.Chains)
	for i, c := range r.Chains {
		r.Chains[i].Rules = slices.DeleteFunc(slices.Clone(c.Rules), drop)
	}
	return r
}

// inSandbox runs f in an open sandbox whose rules went through change.
func inSandbox(t *testing.T, change func(*sandbox, Ruleset) Ruleset, f func(s *sandbox)) {
	t.Helper()
	inNetns(t, func() {
		s := openSandbox(t, nil)
		if s == nil {
			return
		}
		defer s.relay.Close()
		defer s.dns.Close()
		rules := OpenRules(s.dnsPort(), uint16(s.relay.Addr().(*net.TCPAddr).Port))
		if change != nil {
			rules = change(s, rules)
		}
		if err := ApplyNftables(rules); err != nil {
			t.Error(err)
			return
		}
		f(s)
	})
}

func (s *sandbox) dnsPort() uint16 { return uint16(s.dns.LocalAddr().(*net.UDPAddr).Port) }

// target4 is the n-th of many addresses.
func target4(n int) [4]byte { return [4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)} }

// floodUDP asks n resolvers from one socket and counts the refusals.
func floodUDP(t *testing.T, n int) (refused int) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Port: 4444, Addr: [4]byte{127, 9, 9, 9}})
	}
	if err != nil {
		t.Error(err)
		return 0
	}
	defer unix.Close(fd)
	for i := range n {
		switch err := unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 53, Addr: target4(i)}); {
		case errors.Is(err, unix.EPERM):
			refused++
		case err != nil:
			t.Error(err)
		}
	}
	return refused
}

// floodTCP begins n connections and drops them.
func floodTCP(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 9, byte(i >> 8), byte(i)}})
		}
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrInet4{Port: 443, Addr: target4(i)})
		}
		if err != nil && !errors.Is(err, unix.EINPROGRESS) {
			t.Error(err)
		}
		unix.Close(fd)
	}
}

// TestFlood: A56, a sandbox can't fill the kernel's connection table through the
// redirect. The control has the same rules without the limits.
func TestFlood(t *testing.T) {
	const attempts = 12000
	for _, c := range []struct {
		name  string
		limit Limit
		flood func()
	}{
		{"UDP", questionLimit, func() { floodUDP(t, attempts) }},
		{"TCP", connectionLimit, func() { floodTCP(t, attempts) }},
	} {
		for _, limited := range []bool{true, false} {
			var entries, most int
			change := func(_ *sandbox, r Ruleset) Ruleset {
				if limited {
					return r
				}
				return unlimited(r)
			}
			inSandbox(t, change, func(*sandbox) {
				start := time.Now()
				c.flood()
				most = int(c.limit.Burst) + int(float64(c.limit.PerSecond)*time.Since(start).Seconds()) + 1
				entries = connections(t)
			})
			t.Logf("%s, limited %v: %d attempts leave %d entries, at most %d with the limit", c.name, limited, attempts, entries, most)
			if limited != (entries <= most) || entries == 0 {
				t.Errorf("%s, limited %v: %d entries, limit %d", c.name, limited, entries, most)
			}
		}
	}
}

// TestFloodRenewsNothing: A56, an entry is not kept for nothing by packets past the
// limit, so that the limit of a second is one of the whole as well. The control has the
// same limit in the filter chain, where a packet comes that is already tracked.
func TestFloodRenewsNothing(t *testing.T) {
	tooLate := func(s *sandbox, r Ruleset) Ruleset {
		r = unlimited(r)
		for i, c := range r.Chains {
			if c.Table == "filter" && !c.IPv6 {
				r.Chains[i].Rules = append([]PacketRule{
					{Dst: loopback4, Proto: "udp", DPort: s.dnsPort(), Limit: questionLimit, Action: Accept},
					{Dst: loopback4, Proto: "udp", DPort: s.dnsPort(), Action: Drop},
				}, c.Rules...)
			}
		}
		return r
	}
	live := func(change func(*sandbox, Ruleset) Ruleset) (n int) {
		inSandbox(t, change, func(*sandbox) {
			// One second instead of thirty, in this namespace.
			if err := os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_udp_timeout", []byte("1"), 0); err != nil {
				t.Error(err)
				return
			}
			for start := time.Now(); time.Since(start) < 3*time.Second; {
				floodUDP(t, 4000)
			}
			n = connections(t)
		})
		return n
	}
	// What a second lets in, and what the kernel's clock adds.
	most := int(questionLimit.PerSecond) * 3 / 2
	if n := live(nil); n == 0 || n > most {
		t.Errorf("%d entries live, want at most %d", n, most)
	}
	if n := live(tooLate); n <= int(questionLimit.Burst) {
		t.Errorf("%d entries live with a limit in the filter chain: this test can't fail", n)
	}
}

// retransmits is how often c's SYN or data had to be sent again.
func retransmits(t *testing.T, c net.Conn) (n uint32) {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			if err != nil {
				t.Error(err)
				return
			}
			n = uint32(info.Total_retrans)
		})
	}
	if err != nil {
		t.Error(err)
	}
	return n
}

// dial connects, and says how often it took another SYN.
func dial(t *testing.T, addr string) (net.Conn, uint32) {
	t.Helper()
	c, err := net.DialTimeout("tcp4", addr, 10*time.Second)
	if err != nil {
		t.Errorf("%s: %v", addr, err)
		return nil, 0
	}
	t.Cleanup(func() { c.Close() })
	return c, retransmits(t, c)
}

// TestWorkBesideAFlood: with both limits exhausted an open connection still carries
// data, the sandbox's own loopback notices nothing, and a new connection is made when
// the flood ends. A flood of questions delays no connection.
func TestWorkBesideAFlood(t *testing.T) {
	inSandbox(t, nil, func(s *sandbox) {
		client, _ := dial(t, "192.0.2.1:443")
		server, err := s.relay.Accept()
		if err != nil || client == nil {
			t.Error(err)
			return
		}
		if refused := floodUDP(t, 6000); refused == 0 {
			t.Error("no question is refused: this test can't fail")
		}
		if c, again := dial(t, "192.0.2.2:443"); c != nil && again != 0 {
			t.Errorf("a flood of questions delays a connection: %d more SYNs", again)
		}
		floodTCP(t, 6000)
		ownLoopback(t)
		buf := make([]byte, 4)
		for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
			_, werr := way[0].Write([]byte("data"))
			_ = way[1].SetReadDeadline(time.Now().Add(time.Second))
			if n, err := way[1].Read(buf); string(buf[:n]) != "data" {
				t.Errorf("an open connection: %q %v %v", buf[:n], werr, err)
			}
		}
		// The flood filled the listener's queue too.
		go func() {
			for {
				c, err := s.relay.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		}()
		dial(t, "192.0.2.3:443")
	})
}

// ownLoopback makes more connections and sends more datagrams to port 53 of loopback
// than a limit lets out.
func ownLoopback(t *testing.T) {
	t.Helper()
	before := connections(t)
	for _, own := range []string{"127.0.0.53", "198.18.0.1"} {
		l, err := net.Listen("tcp4", own+":0")
		if err != nil {
			t.Error(err)
			return
		}
		defer l.Close()
		for range 500 {
			c, again := dial(t, l.Addr().String())
			if c == nil || again != 0 {
				t.Errorf("%s: %d more SYNs", own, again)
				return
			}
			c.Close()
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
			return
		}
		defer unix.Close(fd)
		for range 2 * questionLimit.Burst {
			if err := unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 53, Addr: netip.MustParseAddr(own).As4()}); errors.Is(err, unix.EPERM) {
				t.Errorf("%s: a datagram is refused", own)
				return
			}
		}
	}
	if after := connections(t); after > before {
		t.Errorf("own loopback adds %d entries", after-before)
	}
}

// TestOrdinaryUseIsUnlimited: a thousand idle connections, and two thousand more as an
// installer makes them, need no second SYN; three hundred questions a second go on when
// the first burst is used up. The control is a limit of one connection.
func TestOrdinaryUseIsUnlimited(t *testing.T) {
	inSandbox(t, nil, func(s *sandbox) {
		for n := range 3000 {
			c, again := dial(t, "192.0.2.1:443")
			if c == nil || again != 0 {
				t.Errorf("connection %d: %d more SYNs", n, again)
				return
			}
			if n >= 1000 {
				c.Close()
			}
		}
		if refused := floodUDP(t, 1500); refused != 0 {
			t.Errorf("%d of 1500 questions at once are refused", refused)
		}
		floodUDP(t, 6000)
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
			return
		}
		defer unix.Close(fd)
		start := time.Now().Add(100 * time.Millisecond)
		for i := range 600 {
			time.Sleep(time.Until(start.Add(time.Duration(i) * time.Second / 300)))
			if err := unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 53, Addr: ResolverAddr.As4()}); err != nil {
				t.Errorf("question %d at 300 a second: %v", i, err)
				return
			}
		}
	})
	strict := func(_ *sandbox, r Ruleset) Ruleset {
		for _, c := range r.Chains {
			for i := range c.Rules {
				if c.Rules[i].Limit == connectionLimit {
					c.Rules[i].Limit = Limit{PerSecond: 1, Burst: 1}
				}
			}
		}
		return r
	}
	inSandbox(t, strict, func(*sandbox) {
		_, first := dial(t, "192.0.2.1:443")
		if _, second := dial(t, "192.0.2.1:443"); first != 0 || second == 0 {
			t.Errorf("%d and %d more SYNs with a limit of one: this test can't fail", first, second)
		}
	})
}

// TestListenersBeginNothing: A56, what is sent to a listener's own address is untracked,
// so its answers must not be what the table gets an entry for. The control lacks the
// rules that see to it.
func TestListenersBeginNothing(t *testing.T) {
	const attempts = 200
	entries := func(change func(*sandbox, Ruleset) Ruleset) (udp, tcp int) {
		inSandbox(t, change, func(s *sandbox) {
			buf := make([]byte, 64)
			for range attempts {
				c, err := net.Dial("udp4", s.dns.LocalAddr().String())
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = c.Write([]byte("question"))
				if _, from, err := s.dns.ReadFromUDPAddrPort(buf); err == nil {
					_, _ = s.dns.WriteToUDPAddrPort([]byte("answer"), from)
				}
				c.Close()
			}
			udp = connections(t)
			for range attempts {
				c, _ := dial(t, s.relay.Addr().String())
				if c == nil {
					return
				}
				_, _ = c.Write([]byte("x")) // acknowledged before anybody accepts
				_ = c.(*net.TCPConn).SetLinger(0)
				c.Close() // untracked too
			}
			tcp = connections(t) - udp
		})
		return udp, tcp
	}
	if udp, tcp := entries(nil); udp != 0 || tcp != 0 {
		t.Errorf("%d entries by UDP, %d by TCP", udp, tcp)
	}
	careless := func(_ *sandbox, r Ruleset) Ruleset { return without(r, func(p PacketRule) bool { return p.New }) }
	if udp, tcp := entries(careless); udp < attempts/2 || tcp < attempts/2 {
		t.Errorf("%d entries by UDP, %d by TCP without the rules: this test can't fail", udp, tcp)
	}
}
