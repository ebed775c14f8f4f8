package netpolicy

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// handedOver receives what helper, in a fresh network namespace, sends. With a nil
// helper nobody connects.
func handedOver(t *testing.T, helper func(conn *net.UnixConn)) (Listeners, Report, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	var cookie uint64
	inNetns(t, func() {
		if cookie, err = NetCookie(); err != nil || helper == nil {
			return
		}
		var conn *net.UnixConn
		if conn, err = Dial(path); err == nil {
			defer conn.Close()
			helper(conn)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return receiveFrom(l, cookie, 200*time.Millisecond)
}

// receiveFrom takes the message of the one helper, which needs no order.
func receiveFrom(l *net.UnixListener, cookie uint64, timeout time.Duration) (Listeners, Report, error) {
	p, err := AcceptPeer(l, timeout)
	if err != nil {
		return Listeners{}, Report{}, err
	}
	defer p.Close()
	return p.Receive(cookie, nil, timeout)
}

// honest hands over what Apply makes.
func honest(t *testing.T, conn *net.UnixConn) {
	sockets, report, err := Apply(Setup{Rules: SandboxRules(true)})
	if err := errors.Join(err, Send(conn, sockets, report, err)); err != nil {
		t.Error(err)
	}
}

// openSockets are this program's sockets by their links, which are never used again.
func openSockets(t *testing.T) map[string]bool {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]bool{}
	for _, fd := range fds {
		if link, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(link, "socket:") {
			out[link] = true
		}
	}
	return out
}

// checkLeft refuses sockets that were not there before.
func checkLeft(t *testing.T, before map[string]bool) {
	t.Helper()
	for link := range openSockets(t) {
		if !before[link] {
			t.Errorf("%s is left open", link)
		}
	}
}

// TestHandover: what is opened inside is served outside, and the report is the plan's.
func TestHandover(t *testing.T) {
	needRoot(t)
	path := filepath.Join(t.TempDir(), strings.Repeat("long", 40)) // more than a socket's address holds
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(path, "s")
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	cookies, received := make(chan uint64, 1), make(chan struct{})
	go inNetns(t, func() {
		defer close(cookies)
		cookie, err := NetCookie()
		conn, derr := Dial(path)
		if err := errors.Join(err, derr); err != nil {
			t.Error(err)
			return
		}
		honest(t, conn)
		conn.Close()
		cookies <- cookie
		<-received
		out, err := net.DialTimeout("tcp4", "192.0.2.1:443", time.Second)
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = out.Write([]byte("ping"))
		out.Close()
		cookies <- 0
	})
	listeners, report, err := receiveFrom(l, <-cookies, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer listeners.Close()
	if want := SandboxRules(true).Iptables(); report.Rules != want || !strings.HasPrefix(report.Netns, "net:[") {
		t.Errorf("report %+v, want %s", report, want)
	}
	close(received)
	<-cookies
	conn, err := listeners.Relay.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, err := io.ReadAll(conn); string(got) != "ping" {
		t.Errorf("%q %v", got, err)
	}
	if proto := option(t, listeners.Relay, unix.SO_PROTOCOL); proto != unix.IPPROTO_TCP {
		t.Errorf("the relay's protocol is %d", proto)
	}
}

func option(t *testing.T, l *net.TCPListener, opt int) int {
	t.Helper()
	raw, err := l.SyscallConn()
	var n int
	if err == nil {
		err = raw.Control(func(fd uintptr) { n, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, opt) })
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// open makes one socket for a message; kind 0 is none.
type open struct {
	family, kind, proto int
	addr                string
	deaf                bool
}

func (o open) fd(t *testing.T) int {
	fd, err := unix.Socket(o.family, o.kind|unix.SOCK_CLOEXEC, o.proto)
	if err != nil {
		t.Error(err)
		return -1
	}
	if o.addr != "" {
		a := netip.MustParseAddrPort(o.addr)
		var sa unix.Sockaddr = &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().Unmap().As4()}
		if o.family == unix.AF_INET6 {
			sa = &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
		}
		if err := unix.Bind(fd, sa); err != nil {
			t.Error(err)
		}
	}
	if o.kind == unix.SOCK_STREAM && !o.deaf {
		if err := unix.Listen(fd, 1); err != nil {
			t.Error(err)
		}
	}
	return fd
}

var (
	dnsUDP   = open{family: unix.AF_INET, kind: unix.SOCK_DGRAM, addr: "127.0.0.1:61053"}
	dnsTCP   = open{family: unix.AF_INET, kind: unix.SOCK_STREAM, addr: "127.0.0.1:61053"}
	relayTCP = open{family: unix.AF_INET, kind: unix.SOCK_STREAM, addr: "127.0.0.1:61080"}
)

// with is the three planned sockets with one of them changed.
func with(i int, change func(*open)) []open {
	all := []open{dnsUDP, dnsTCP, relayTCP}
	change(&all[i])
	return all
}

const good = `{"version":3,"rules":"r","netns":"net:[1]"}`

// TestHandoverRefused: whatever else comes over the socket is refused, and no
// descriptor stays open. The row "as planned" is the control.
func TestHandoverRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		sockets []open
		message string
		ok      bool
	}{
		"as planned":       {sockets: []open{dnsUDP, dnsTCP, relayTCP}, ok: true},
		"none":             {},
		"two":              {sockets: []open{dnsUDP, dnsTCP}},
		"four":             {sockets: []open{dnsUDP, dnsTCP, relayTCP, {family: unix.AF_UNIX, kind: unix.SOCK_STREAM, deaf: true}}},
		"in another order": {sockets: []open{dnsUDP, relayTCP, dnsTCP}},
		"not listening":    {sockets: with(2, func(o *open) { o.deaf = true })},
		"UDP for TCP":      {sockets: with(2, func(o *open) { o.kind = unix.SOCK_DGRAM })},
		"unix":             {sockets: with(0, func(o *open) { *o = open{family: unix.AF_UNIX, kind: unix.SOCK_DGRAM} })},
		"raw":              {sockets: with(0, func(o *open) { *o = open{family: unix.AF_INET, kind: unix.SOCK_RAW, proto: unix.IPPROTO_UDP} })},
		"IPv6":             {sockets: with(2, func(o *open) { o.family, o.addr = unix.AF_INET6, "[::ffff:127.0.0.1]:61080" })},
		"MPTCP":            {sockets: with(2, func(o *open) { o.proto = unix.IPPROTO_MPTCP })},
		"other port":       {sockets: with(2, func(o *open) { o.addr = "127.0.0.1:61081" })},
		"other address":    {sockets: with(2, func(o *open) { o.addr = "127.0.0.2:61080" })},
		"any address":      {sockets: with(0, func(o *open) { o.addr = "0.0.0.0:61053" })},
		"unbound":          {sockets: with(0, func(o *open) { o.addr = "" })},
		"error and fds":    {sockets: []open{dnsUDP, dnsTCP, relayTCP}, message: `{"version":3,"error":"e"}`},
		"empty":            {sockets: []open{dnsUDP, dnsTCP, relayTCP}, message: " "},
		"other version":    {sockets: []open{dnsUDP, dnsTCP, relayTCP}, message: strings.Replace(good, "3", "2", 1)},
		"too long":         {sockets: []open{dnsUDP, dnsTCP, relayTCP}, message: good + strings.Repeat(" ", maxHandover)},
		"more than a value": {
			sockets: []open{dnsUDP, dnsTCP, relayTCP}, message: good + good,
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := openSockets(t)
			l, _, err := handedOver(t, func(conn *net.UnixConn) {
				var fds Sockets
				for _, o := range tc.sockets {
					fds = append(fds, o.fd(t))
				}
				defer fds.Close()
				sendRaw(t, conn, orGood(tc.message), fds)
			})
			checkOutcome(t, l, err, tc.ok, before)
		})
	}
}

func orGood(message string) string {
	if message == "" {
		return good
	}
	return message
}

func sendRaw(t *testing.T, conn *net.UnixConn, message string, fds []int) {
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if _, _, err := conn.WriteMsgUnix([]byte(message), rights, nil); err != nil {
		t.Error(err)
	}
}

func checkOutcome(t *testing.T, l Listeners, err error, ok bool, before map[string]bool) {
	t.Helper()
	if ok {
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
	} else if !errors.Is(err, ErrHandover) {
		t.Errorf("%v, want %v", err, ErrHandover)
	}
	checkLeft(t, before)
}

// TestHandoverManyDescriptors: more than fit beside the message.
func TestHandoverManyDescriptors(t *testing.T) {
	before := openSockets(t)
	l, _, err := handedOver(t, func(conn *net.UnixConn) {
		fd := dnsUDP.fd(t)
		defer unix.Close(fd)
		sendRaw(t, conn, good, slices.Repeat([]int{fd}, 10))
	})
	checkOutcome(t, l, err, false, before)
}

// TestHandoverOnce: a second message is not looked at, and its descriptors are gone.
func TestHandoverOnce(t *testing.T) {
	before := openSockets(t)
	l, report, err := handedOver(t, func(conn *net.UnixConn) {
		honest(t, conn)
		fd := open{family: unix.AF_UNIX, kind: unix.SOCK_DGRAM}.fd(t)
		defer unix.Close(fd)
		sendRaw(t, conn, `{"version":3,"error":"second"}`, []int{fd, fd, fd})
	})
	if report.Error != "" {
		t.Errorf("report %+v", report)
	}
	checkOutcome(t, l, err, true, before)
}

// TestHandoverSilence: nobody connects, and who connects says nothing.
func TestHandoverSilence(t *testing.T) {
	needRoot(t)
	before := openSockets(t)
	l, _, err := handedOver(t, nil)
	checkOutcome(t, l, err, false, before)
	l, _, err = handedOver(t, func(*net.UnixConn) {})
	checkOutcome(t, l, err, false, before)

	path := filepath.Join(t.TempDir(), "s")
	listener, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := Dial(path)
	if err != nil {
		t.Fatal(err)
	}
	l, _, err = receiveFrom(listener, 1, 50*time.Millisecond)
	conn.Close()
	checkOutcome(t, l, err, false, before)
}

// TestHandoverNamespace: sockets of another network namespace, this program's own
// among them (N21), are refused, and so is the kernel that has no cookies.
func TestHandoverNamespace(t *testing.T) {
	needRoot(t)
	own, err := NetCookie()
	if err != nil {
		t.Fatal(err)
	}
	for name, cookie := range map[string]uint64{"another": own + 1<<40, "own": own, "none": 0} {
		t.Run(name, func(t *testing.T) {
			before := openSockets(t)
			path := filepath.Join(t.TempDir(), "s")
			listener, err := Listen(path)
			if err != nil {
				t.Fatal(err)
			}
			conn, err := Dial(path)
			if err != nil {
				t.Fatal(err)
			}
			if name == "own" {
				var fds Sockets
				for _, o := range []open{dnsUDP, dnsTCP, relayTCP} {
					fds = append(fds, o.fd(t))
				}
				sendRaw(t, conn, good, fds)
				fds.Close()
			} else {
				inNetns(t, func() { honest(t, conn) })
			}
			conn.Close()
			l, _, err := receiveFrom(listener, cookie, time.Second)
			checkOutcome(t, l, err, false, before)
		})
	}
}

// TestHandoverOfAnError: the helper's words come through, with nothing else.
func TestHandoverOfAnError(t *testing.T) {
	before := openSockets(t)
	l, report, err := handedOver(t, func(conn *net.UnixConn) {
		if err := Send(conn, nil, Report{}, errors.New("why")); err != nil {
			t.Error(err)
		}
	})
	if err != nil || report != (Report{Version: handoverVersion, Error: "why"}) || l != (Listeners{}) {
		t.Errorf("%+v %+v %v", l, report, err)
	}
	checkLeft(t, before)
}

// TestApplyRefuses what is no fresh network namespace. The control changes nothing.
func TestApplyRefuses(t *testing.T) {
	for name, spoil := range map[string]func() error{
		"control":   func() error { return nil },
		"interface": func() error { return addVeth("veth0") },
		"tunnel":    func() error { return addVeth("gre0") },
		"address":   func() error { return addAddr("198.51.100.7/32") },
		"IPv6":      func() error { return addAddr("2001:db8::7/128") },
		"own way":   func() error { return AddWay(everything) },
		"route":     func() error { return addRoute("203.0.113.0/24", unix.RT_TABLE_MAIN) },
		"table":     func() error { return addRoute("203.0.113.0/24", 100) },
		"default":   func() error { return addRoute("0.0.0.0/0", unix.RT_TABLE_MAIN) },
	} {
		t.Run(name, func(t *testing.T) {
			before := openSockets(t)
			inNetns(t, func() {
				if err := spoil(); err != nil {
					t.Error(err)
					return
				}
				sockets, _, err := Apply(Setup{Rules: SandboxRules(true)})
				sockets.Close()
				if name == "control" && err != nil || name != "control" && !errors.Is(err, ErrNotFresh) {
					t.Errorf("%v, want %v", err, ErrNotFresh)
				}
				if conn, _ := nftables.New(); name != "control" {
					if tables, err := conn.ListTables(); err != nil || len(tables) != 0 {
						t.Errorf("tables %v %v", tables, err)
					}
				}
			})
			checkLeft(t, before)
		})
	}
}

// TestApplyRefusedLeavesAlone: loopback stays down in a namespace that is refused.
func TestApplyRefusedLeavesAlone(t *testing.T) {
	inNetns(t, func() {
		lo, err := loopback()
		if err == nil {
			err = errors.Join(netlink.LinkSetDown(lo), addVeth("veth0"))
		}
		if err != nil {
			t.Error(err)
			return
		}
		if _, _, err := Apply(Setup{Rules: SandboxRules(true)}); !errors.Is(err, ErrNotFresh) {
			t.Errorf("%v, want %v", err, ErrNotFresh)
		}
		if lo, err := loopback(); err != nil || lo.Attrs().Flags&net.FlagUp != 0 {
			t.Errorf("loopback: %v %v", lo, err)
		}
	})
}

// addVeth adds a pair of interfaces that are up.
func addVeth(name string) error {
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-peer"}
	peer := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name + "-peer"}}
	return errors.Join(netlink.LinkAdd(link), netlink.LinkSetUp(link), netlink.LinkSetUp(peer))
}

func addAddr(cidr string) error {
	lo, err := loopback()
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(cidr)
	if err != nil {
		return err
	}
	return netlink.AddrAdd(lo, addr)
}

func addRoute(cidr string, table int) error {
	lo, err := loopback()
	if err != nil {
		return err
	}
	_, dst, err := net.ParseCIDR(cidr)
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: dst, Table: table, Scope: netlink.SCOPE_LINK})
}

// TestApplyFromDown: with loopback down, as the kernel makes it. Foreign tables stay
// (A47, A48), and the listeners' ports are taken.
func TestApplyFromDown(t *testing.T) {
	inNetns(t, func() {
		conn, err := nftables.New()
		lo, lerr := loopback()
		if err := errors.Join(err, lerr); err != nil {
			t.Error(err)
			return
		}
		conn.AddTable(&nftables.Table{Name: "theirs", Family: nftables.TableFamilyIPv4})
		if err := errors.Join(netlink.LinkSetDown(lo), conn.Flush()); err != nil {
			t.Error(err)
			return
		}
		sockets, _, err := Apply(Setup{Rules: SandboxRules(true)})
		if err != nil {
			t.Error(err)
			return
		}
		defer sockets.Close()
		tables, err := conn.ListTables()
		if err != nil || len(tables) != 3 {
			t.Errorf("tables %v %v", tables, err)
		}
		if _, err := net.Listen("tcp4", RelayListener.String()); !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("the relay's port: %v", err)
		}
	})
}

// TestSandboxRules: without IPv6 in the kernel its chains are left out, and the rest
// stays in force.
func TestSandboxRules(t *testing.T) {
	inNetns(t, func() {
		rules := SandboxRules(false)
		if err := ApplyNftables(rules); err != nil {
			t.Error(err)
		}
		if len(rules.Chains) != 3 || len(SandboxRules(true).Chains) != 5 {
			t.Errorf("chains %+v", rules)
		}
	})
}

func FuzzHandover(f *testing.F) {
	failed, _ := json.Marshal(Report{Version: handoverVersion, Error: "listen on 127.0.0.1:61053: address already in use"})
	done, _ := json.Marshal(Report{Version: handoverVersion, Rules: SandboxRules(true).Iptables(), Netns: "net:[4026532281]"})
	for _, seed := range []string{
		string(failed), string(done), good, good + good, "", "{}", "null", `{"version":3}`, `{"version":3,"error":""}`,
		`{"version":3,"rules":"r","netns":"n","error":"e"}`, `{"version":3,"rules":"r"}`, `{"version":3e0,"error":"e"}`,
		`{"version":3,"error":"e","more":1}`, `{"version":3,"error":"e"}x`, `[1]`, `{"version":"3","error":"e"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := parseReport(b)
		if err != nil {
			if !errors.Is(err, ErrHandover) {
				t.Errorf("%v is not %v", err, ErrHandover)
			}
			return
		}
		again, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if same, err := parseReport(again); err != nil || same != r {
			t.Errorf("%+v, again %+v %v", r, same, err)
		}
	})
}

// orderOf is what ReadOrder makes of one message.
func orderOf(t *testing.T, message string) (Order, error) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns[i] = c.(*net.UnixConn)
	}
	if message != "" {
		if _, err := conns[0].Write([]byte(message)); err != nil {
			t.Fatal(err)
		}
	}
	conns[0].Close()
	return ReadOrder(conns[1])
}

// TestOrder: the helper takes the one order there is, and none when the shim is gone.
func TestOrder(t *testing.T) {
	for message, want := range map[string]Order{
		`{"version":3,"netns":"net:[1]"}`:          {Version: 3, Netns: "net:[1]"},
		`{"version":3,"netns":"net:[1]","pid":77}`: {Version: 3, Netns: "net:[1]", PID: 77},
		``:                                {},
		`{}`:                              {},
		`{"version":3}`:                   {},
		`{"version":1,"netns":"net:[1]"}`: {},
		`{"version":3,"netns":"net:[1]","pid":-1}`:   {},
		`{"version":3,"netns":"net:[1]","pid":"1"}`:  {},
		`{"version":3,"netns":"net:[1]","pid":1.5}`:  {},
		`{"version":3,"netns":"net:[1]","more":1}`:   {},
		`{"version":3,"netns":"net:[1]"}{}`:          {},
		`{"version":3,"netns":"net:[1]","pid":1e20}`: {},
	} {
		got, err := orderOf(t, message)
		if !reflect.DeepEqual(got, want) || (err == nil) != (want.Netns != "") {
			t.Errorf("%s: %+v %v", message, got, err)
		}
	}
}

// TestPeerThatStays: this program is the one that connected, and is still there.
func TestPeerThatStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := Dial(path)
	if err != nil {
		t.Fatal(err)
	}
	p, err := AcceptPeer(l, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	conn.Close()
	if err := p.AwaitEnd(20 * time.Millisecond); !errors.Is(err, ErrHandover) {
		t.Error(err)
	}
}
