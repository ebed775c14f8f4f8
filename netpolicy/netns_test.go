package netpolicy

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// needRoot skips t without the privilege to make a network namespace; with
// AGENTSHIM_REQUIRE_ALL set it fails instead.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("AGENTSHIM_REQUIRE_ALL") != "" {
		t.Fatal("AGENTSHIM_REQUIRE_ALL is set and this is not root")
	}
	t.Skip("needs root")
}

// inNetns runs f in a fresh network namespace with loopback up, on a thread that is
// thrown away.
func inNetns(t *testing.T, f func()) {
	t.Helper()
	needRoot(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Error(err)
			return
		}
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			t.Error(err)
			return
		}
		f()
	}()
	<-done
}

// sandbox is an open sandbox's namespace with both listeners.
type sandbox struct {
	relay *net.TCPListener
	dns   *net.UDPConn
}

// putter puts rules into the thread's network namespace; nil is none.
type putter func(Ruleset) error

// eachRenderer runs f with every renderer, and every back end of iptables.
func eachRenderer(t *testing.T, f func(t *testing.T, put putter)) {
	for _, name := range []string{"nftables", "iptables-nft", "iptables-legacy"} {
		t.Run(name, func(t *testing.T) {
			rendererName := Nftables
			if backend, ok := strings.CutPrefix(name, "iptables-"); ok {
				useBackend(t, backend)
				rendererName = Iptables
			}
			f(t, func(r Ruleset) error {
				renderer, err := newRenderer(rendererName, r)
				if err != nil {
					return err
				}
				_, err = renderer.apply(r)
				return err
			})
		})
	}
}

// useBackend has iptables be the programs of a back end, with a lock of their own.
func useBackend(t *testing.T, backend string) (dir string) {
	t.Helper()
	needRoot(t)
	dir = t.TempDir()
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-restore", "-save"} {
			if err := os.Symlink("/usr/sbin/xtables-"+backend+"-multi", filepath.Join(dir, family+suffix)); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink("/usr/sbin/xtables-legacy-multi", filepath.Join(dir, family+"-legacy")); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
	t.Setenv("LC_ALL", "C")
	t.Setenv("XTABLES_LOCKFILE", filepath.Join(dir, "lock"))
	return dir
}

func openSandbox(t *testing.T, put putter) *sandbox {
	t.Helper()
	s := &sandbox{}
	var err error
	if s.relay, err = net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
		t.Error(err)
		return nil
	}
	t.Cleanup(func() { s.relay.Close() }) // until then nothing may collect it
	if s.dns, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
		t.Error(err)
		return nil
	}
	t.Cleanup(func() { s.dns.Close() })
	if err := AddWay(everything); err != nil {
		t.Error(err)
		return nil
	}
	if put != nil {
		if err := put(OpenRules(uint16(s.dns.LocalAddr().(*net.UDPAddr).Port), uint16(s.relay.Addr().(*net.TCPAddr).Port))); err != nil {
			t.Error(err)
			return nil
		}
	}
	return s
}

// TestRedirect: every TCP connection reaches the relay, which learns its target.
func TestRedirect(t *testing.T) {
	eachRenderer(t, func(t *testing.T, put putter) {
		inNetns(t, func() {
			s := openSandbox(t, put)
			if s == nil {
				return
			}
			for _, target := range []string{"198.18.7.9:443", "203.0.113.5:22", "192.0.2.1:80", "10.1.2.3:6379"} {
				client, err := net.DialTimeout("tcp4", target, time.Second)
				if err != nil {
					t.Errorf("%s: %v", target, err)
					continue
				}
				server, err := s.relay.AcceptTCP()
				if err != nil {
					t.Error(err)
					return
				}
				if got, err := originalDestination(server); err != nil || got.String() != target {
					t.Errorf("%s: the relay sees %s, %v", target, got, err)
				}
				_, _ = client.Write([]byte("ping"))
				client.(*net.TCPConn).CloseWrite()
				if got, _ := io.ReadAll(server); string(got) != "ping" {
					t.Errorf("%s: %q", target, got)
				}
				_, _ = server.Write([]byte("pong"))
				server.Close()
				if got, _ := io.ReadAll(client); string(got) != "pong" {
					t.Errorf("%s: answer %q", target, got)
				}
				client.Close()
			}
		})
	})
}

// TestDNSIsRedirected: A01, whatever resolver is asked.
func TestDNSIsRedirected(t *testing.T) {
	eachRenderer(t, func(t *testing.T, put putter) {
		inNetns(t, func() {
			s := openSandbox(t, put)
			if s == nil {
				return
			}
			for _, resolver := range []string{"198.18.0.2:53", "192.0.2.53:53"} {
				c, err := net.Dial("udp4", resolver)
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = c.Write([]byte("question"))
				buf := make([]byte, 64)
				_ = s.dns.SetReadDeadline(time.Now().Add(time.Second))
				n, from, err := s.dns.ReadFromUDPAddrPort(buf)
				if err != nil || string(buf[:n]) != "question" {
					t.Errorf("%s: %q %v", resolver, buf[:n], err)
					continue
				}
				_, _ = s.dns.WriteToUDPAddrPort([]byte("answer"), from)
				_ = c.SetReadDeadline(time.Now().Add(time.Second))
				if n, err := c.Read(buf); err != nil || string(buf[:n]) != "answer" {
					t.Errorf("%s: %q %v", resolver, buf[:n], err)
				}
				c.Close()
			}
		})
	})
}

// TestRefusedAtOnce: A23, A24: everything but TCP and DNS gets an error at once.
// The control has the way and no rules.
func TestRefusedAtOnce(t *testing.T) {
	eachRenderer(t, func(t *testing.T, put putter) {
		attempts := map[string]func() error{
			"UDP":      func() error { return sendOne(unix.SOCK_DGRAM, 0, "192.0.2.1", 443) },
			"UDP 123":  func() error { return sendOne(unix.SOCK_DGRAM, 0, "198.18.0.2", 123) },
			"ICMP":     func() error { return sendOne(unix.SOCK_RAW, unix.IPPROTO_ICMP, "192.0.2.1", 0) },
			"GRE":      func() error { return sendOne(unix.SOCK_RAW, unix.IPPROTO_GRE, "192.0.2.1", 0) },
			"UDP-Lite": func() error { return sendOne(unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE, "192.0.2.1", 9) },
		}
		outcomes := func(put putter) map[string]error {
			out := map[string]error{}
			inNetns(t, func() {
				if openSandbox(t, put) == nil {
					return
				}
				for name, attempt := range attempts {
					out[name] = attempt()
				}
			})
			return out
		}
		refused, control := outcomes(put), outcomes(nil)
		for name := range attempts {
			if !errors.Is(refused[name], unix.EPERM) {
				t.Errorf("%s: %v, want EPERM", name, refused[name])
			}
			if control[name] != nil {
				t.Errorf("%s without the rules: %v", name, control[name])
			}
		}
	})
}

func sendOne(kind, proto int, to string, port int) error {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Sendto(fd, make([]byte, 8), 0, &unix.SockaddrInet4{Port: port, Addr: netip.MustParseAddr(to).As4()})
}

// TestOwnLoopback: the sandbox's own servers answer, TCP and UDP, and leave no
// connection in the kernel's table; a redirected one does.
func TestOwnLoopback(t *testing.T) {
	eachRenderer(t, func(t *testing.T, put putter) {
		inNetns(t, func() {
			s := openSandbox(t, put)
			if s == nil {
				return
			}
			for addr, network := range map[string]string{
				"127.0.0.1:0": "tcp4", "127.0.0.9:0": "tcp4", "198.18.0.1:0": "tcp4", "0.0.0.0:0": "tcp4", "[::1]:0": "tcp6",
			} {
				l, err := net.Listen(network, addr)
				if err != nil {
					t.Errorf("%s: %v", addr, err)
					continue
				}
				c, err := net.DialTimeout(network, l.Addr().String(), time.Second)
				if err != nil {
					t.Errorf("%s: %v", addr, err)
					continue
				}
				c.Close()
				l.Close()
			}
			if n := connections(t); n != 0 {
				t.Errorf("%d connections are tracked", n)
			}
			c, err := net.DialTimeout("tcp4", "192.0.2.1:443", time.Second)
			if err != nil {
				t.Error(err)
				return
			}
			c.Close()
			if n := connections(t); n == 0 {
				t.Error("a redirected connection is not tracked: this test can't fail")
			}
		})
	})
}

// connections counts this namespace's entries in the kernel's connection table.
func connections(t *testing.T) int {
	t.Helper()
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	if err != nil {
		t.Error(err)
	}
	return len(flows)
}

// TestIPv6IsClosed: A20, A21, with a global address and a route as the control.
func TestIPv6IsClosed(t *testing.T) {
	eachRenderer(t, func(t *testing.T, put putter) {
		attempt := func() error {
			fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Sendto(fd, []byte{0}, 0, &unix.SockaddrInet6{Port: 9, Addr: netip.MustParseAddr("2001:db8::1").As16()})
		}
		for _, put := range []putter{put, nil} {
			inNetns(t, func() {
				lo, err := netlink.LinkByName("lo")
				if err == nil {
					addr, _ := netlink.ParseAddr("2001:db8::1/128")
					err = netlink.AddrAdd(lo, addr)
				}
				if err != nil {
					t.Error(err)
					return
				}
				if openSandbox(t, put) == nil {
					return
				}
				if err := attempt(); (put != nil) != errors.Is(err, unix.EPERM) {
					t.Errorf("rules %v: %v", put != nil, err)
				}
			})
		}
	})
}

// TestApplyIsExact: applying again is refused and changes nothing, foreign tables stay,
// and a rule that somebody added is noticed.
func TestApplyIsExact(t *testing.T) {
	inNetns(t, func() {
		conn, err := nftables.New()
		if err != nil {
			t.Error(err)
			return
		}
		conn.AddTable(&nftables.Table{Name: "theirs", Family: nftables.TableFamilyIPv4})
		if err := conn.Flush(); err != nil {
			t.Error(err)
			return
		}
		rules := OpenRules(5353, 8080)
		if err := ApplyNftables(rules); err != nil {
			t.Error(err)
			return
		}
		if err := ApplyNftables(OpenRules(5354, 8081)); !errors.Is(err, unix.EEXIST) {
			t.Errorf("a second time: %v", err)
		}
		if got, err := ReadNftables(rules); err != nil || !reflect.DeepEqual(got, rules) {
			t.Errorf("after it %+v %v", got, err)
		}
		tables, err := conn.ListTables()
		if err != nil || len(tables) != 3 {
			t.Errorf("tables %v %v", tables, err)
		}
		table := &nftables.Table{Name: nftTable, Family: nftables.TableFamilyIPv4}
		conn.InsertRule(&nftables.Rule{
			Table: table, Chain: &nftables.Chain{Name: "filter", Table: table},
			Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}},
		})
		if err := conn.Flush(); err != nil {
			t.Error(err)
			return
		}
		got, err := ReadNftables(rules)
		if err != nil || strings.Count(got.Iptables(), "-j ACCEPT") != strings.Count(rules.Iptables(), "-j ACCEPT")+1 {
			t.Errorf("an added rule is not seen: %v\n%s", err, got.Iptables())
		}
	})
}

// TestAgentCannotChange: A41, without a capability the rules are out of reach.
func TestAgentCannotChange(t *testing.T) {
	inNetns(t, func() {
		if err := ApplyNftables(OpenRules(5353, 8080)); err != nil {
			t.Error(err)
			return
		}
		// This thread only; the rest of the program keeps its user.
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, 65534, 65534, 65534); errno != 0 {
			t.Error(errno)
			return
		}
		conn, err := nftables.New()
		if err != nil {
			return // refused even earlier
		}
		conn.FlushRuleset()
		if err := conn.Flush(); !errors.Is(err, unix.EPERM) {
			t.Errorf("%v, want EPERM", err)
		}
	})
}
