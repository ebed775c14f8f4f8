package netpolicy

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
)

// bridge is a dual-stack network with siblings.
func bridge() *Network {
	return &Network{
		Name: "net", Interface: "eth0", Siblings: true, Resolver: netip.MustParseAddr("127.0.0.11"),
		Subnets: []netip.Prefix{netip.MustParsePrefix("172.18.0.0/16"), netip.MustParsePrefix("fd77::/64")},
		Closed:  []netip.Addr{netip.MustParseAddr("172.18.0.1"), netip.MustParseAddr("192.31.196.10"), netip.MustParseAddr("fd77::1")},
	}
}

func withNetwork(t *testing.T, n *Network, entries []string, deny ...string) Policy {
	t.Helper()
	p, err := Compile(harness.Egress{Mode: AttachNetwork, Allow: allow(entries...), Deny: deny}, nil, n)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestNetworkRulesText: the golden's diff is the security review.
func TestNetworkRulesText(t *testing.T) {
	p := withNetwork(t, bridge(), []string{
		"0.0.0.0/0", "::/0", "10.9.0.0/16:5432", "192.0.9.0/24:123/udp", "169.254.169.254/32:80", "api.example.com",
	}, "192.175.48.45", "192.175.49.0/24:22")
	goldenText(t, "testdata/network.rules", p.Rules(true).Iptables())
	for _, c := range p.Rules(false).Chains {
		if c.IPv6 {
			t.Errorf("without IPv6 in the kernel: %+v", c)
		}
	}
	for _, c := range p.Rules(true).Chains {
		for _, r := range c.Rules {
			if back, err := packetRule(r.exprs(c.IPv6), c.IPv6); err != nil || back != r {
				t.Errorf("%+v gives %+v, %v", r, back, err)
			}
		}
	}
}

// TestLargeNetwork: the largest policy there may be fits into an order.
func TestLargeNetwork(t *testing.T) {
	n := bridge()
	var entries []string
	for i := range 512 {
		n.Closed = append(n.Closed, netip.AddrFrom4([4]byte{192, 175, byte(i >> 8), byte(i)}))
	}
	for i := range maxRanges {
		entries = append(entries, fmt.Sprintf("192.31.%d.0/24:%d/udp", i, 10000+i))
	}
	p := withNetwork(t, n, entries)
	order := Order{Version: handoverVersion, Netns: "net:[1]", Setup: Setup{Rules: p.Rules(true), Network: n}}
	b, err := json.Marshal(order)
	if err != nil {
		t.Fatal(err)
	}
	got, err := orderOf(t, string(b))
	if err != nil || !reflect.DeepEqual(got.Rules, order.Rules) {
		t.Errorf("%d bytes: %v", len(b), err)
	}
	if text := p.Rules(true).Iptables(); len(text) > maxHandover*3/4 {
		t.Errorf("the report would have %d bytes", len(text))
	}
}

// TestNetworkFaults: what mode network can't hold is refused with its path.
func TestNetworkFaults(t *testing.T) {
	many := make([]string, maxRanges+1)
	for i := range many {
		many[i] = fmt.Sprintf("192.175.48.0/24:%d", i+1)
	}
	subnet := func(text string) *Network {
		n := bridge()
		n.Subnets = []netip.Prefix{netip.MustParsePrefix(text)}
		return n
	}
	for name, c := range map[string]struct {
		e    harness.Egress
		n    *Network
		path string
	}{
		"a name without the mode":     {harness.Egress{Mode: AllowList, Network: "x", Allow: allow("a.example")}, nil, "$.egress.network"},
		"UDP without the mode":        {harness.Egress{Mode: AllowList, Allow: allow("192.175.48.0/24/udp")}, nil, "$.egress.allow"},
		"too many ranges":             {harness.Egress{Mode: AttachNetwork, Allow: allow(many...)}, bridge(), "$.egress.allow"},
		"the sandbox's own addresses": {harness.Egress{Mode: AttachNetwork}, subnet("198.18.0.0/24"), "$.egress.network"},
		"the probe's address":         {harness.Egress{Mode: AttachNetwork, Allow: allow("192.0.2.0/24")}, bridge(), "$.egress.allow"},
		"the probe's IPv6 address":    {harness.Egress{Mode: AttachNetwork, Allow: allow("2001:db8::/32")}, bridge(), "$.egress.allow"},
		"the probe's subnet":          {harness.Egress{Mode: AttachNetwork}, subnet("192.0.2.0/24"), "$.egress.network"},
		"denied UDP":                  {harness.Egress{Mode: AttachNetwork, Deny: []string{"192.175.48.0/24/udp"}}, bridge(), "$.egress.deny[0]"},
		"a resolver":                  {harness.Egress{Mode: AttachNetwork, Allow: allow("192.175.48.0/24:53/udp")}, bridge(), "$.egress.allow[0]"},
		"UDP of a name":               {harness.Egress{Mode: AttachNetwork, Allow: allow("a.example/udp")}, bridge(), "$.egress.allow[0]"},
	} {
		if _, err := Compile(c.e, nil, c.n); err == nil || !strings.Contains(err.Error(), c.path) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Compile(harness.Egress{Mode: AttachNetwork, Allow: allow("0.0.0.0/0", "192.175.48.0/24:123/udp")}, nil, bridge()); err != nil {
		t.Errorf("control: %v", err)
	}
}

// attachedNetns runs f in a network namespace with eth0, on whose other end is one that
// has every other address and counts.
func attachedNetns(t *testing.T, p Policy, put putter, f func()) {
	t.Helper()
	inNetns(t, func() {
		link, err := addEth0(t)
		if err != nil {
			t.Error(err)
			return
		}
		for _, text := range []string{"172.18.0.5/16", "fd77::5/64"} {
			addr, err := netlink.ParseAddr(text)
			if err == nil {
				addr.Flags = unix.IFA_F_NODAD
				err = netlink.AddrAdd(link, addr)
			}
			if err != nil {
				t.Error(err)
			}
		}
		for _, gateway := range []string{"172.18.0.1", "fd77::1"} {
			if err := errors.Join(netlink.LinkSetUp(link), netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: net.ParseIP(gateway)})); err != nil {
				t.Error(err)
			}
		}
		if put != nil {
			if err := errors.Join(put(p.Rules(true)), AddWay(namePool)); err != nil {
				t.Error(err)
				return
			}
		}
		f()
	})
}

// addEth0 makes a link whose other end, up as well, is in a namespace of its own.
func addEth0(t *testing.T) (netlink.Link, error) {
	made, ended := make(chan error), make(chan error)
	var other *os.File
	up := make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			other, err = os.Open("/proc/thread-self/ns/net")
		}
		made <- err
		<-up
		peer, err := netlink.LinkByName("peer")
		if err == nil {
			err = netlink.LinkSetUp(peer)
		}
		ended <- err
	}()
	if err := <-made; err != nil {
		return nil, err
	}
	t.Cleanup(func() { other.Close() }) // the namespace lasts as long
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "eth0"
	err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "peer", PeerNamespace: netlink.NsFd(int(other.Fd()))})
	close(up)
	link, lerr := netlink.LinkByName("eth0")
	if err := errors.Join(err, lerr, <-ended); err != nil {
		return nil, err
	}
	return link, nil
}

// TestNetworkRules: which datagrams leave, in the order of the decisions, by each
// renderer; without rules all of them do.
func TestNetworkRules(t *testing.T) {
	p := withNetwork(t, bridge(), []string{
		"0.0.0.0/0", "::/0", "10.9.0.0/16", "10.10.0.0/16:9", "10.11.0.0/16:9/udp", "10.12.0.0/16/udp", "172.18.0.7/32", "169.254.0.0/16", "100.100.100.200/32",
	}, "192.175.48.45", "192.175.49.0/24:9")
	const refused = unix.EPERM
	rows := map[string]error{
		"172.18.0.9": nil, "fd77::9": nil, // siblings
		"172.18.0.1": refused, "fd77::1": refused, "192.31.196.10": refused, // closed
		"192.175.48.20": nil, "2620:4f:8000:48::20": nil, // everywhere
		"192.175.48.45": refused, "192.175.49.1": refused, // denied
		"10.9.0.5": nil, "10.10.0.5": refused, "10.11.0.5": nil, "10.12.0.5": nil, "10.13.0.5": refused,
		"169.254.169.254": refused, "169.254.7.7": refused, "100.100.100.200": nil,
		"192.168.1.1": refused, "198.18.7.7": refused, "224.0.0.251": refused, "127.0.0.11": refused, "127.0.0.12": nil,
		"fc00::5": refused, "2001:db8::1": refused, "64:ff9b::1": refused,
	}
	send := func(to string) error {
		addr := netip.MustParseAddr(to)
		family, sa := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: 9, Addr: addr.As16()})
		if addr.Is4() {
			family, sa = unix.AF_INET, &unix.SockaddrInet4{Port: 9, Addr: addr.As4()}
		}
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, []byte{0}, 0, sa)
	}
	eachRenderer(t, func(t *testing.T, put putter) {
		attachedNetns(t, p, put, func() {
			for to, want := range rows {
				if err := send(to); !errors.Is(err, want) {
					t.Errorf("%s: %v, want %v", to, err, want)
				}
			}
			if n := connections(t); n != 0 {
				t.Errorf("%d connections are tracked", n)
			}
			c, err := net.DialTimeout("tcp6", "[fc00::5]:9", 2*time.Second)
			if !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("refused IPv6 TCP: %v %v", c, err)
			}
		})
	})
	attachedNetns(t, p, nil, func() {
		for to := range rows {
			if err := send(to); err != nil && to != "224.0.0.251" {
				t.Errorf("control: %s: %v", to, err)
			}
		}
	})
}

// TestWatch: what is attached, or taken away, is told; what the kernel does by itself is not.
func TestWatch(t *testing.T) {
	for name, c := range map[string]struct {
		change func() error
		want   error
	}{
		"another interface": {func() error { return addBridge("eth1") }, ErrChanged},
		"no interface":      {func() error { return deleteLink("eth0") }, ErrGone},
		"another address":   {func() error { return addAddrOn("eth0", "10.1.2.3/24") }, ErrChanged},
		"no address":        {func() error { return delAddrOn("eth0", "172.18.0.5/16") }, ErrGone},
		"it goes down":      {func() error { return downLink("eth0") }, ErrGone},
		"it is renamed":     {func() error { return renameLink("eth0", "veth1") }, ErrGone},
		"one of the subnet": {func() error { return addAddrOn("eth0", "172.18.0.6/16") }, nil},
		"one by IPv6":       {func() error { return addAddrOn("eth0", "fd99::6/64") }, nil},
		"the sandbox's own": {func() error { return AddWay(namePool) }, nil},
		"a fallback tunnel": {func() error { return addBridge("gre0") }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			attachedNetns(t, Policy{}, nil, func() {
				fd, err := openWatch()
				if err != nil {
					t.Error(err)
					return
				}
				file := os.NewFile(uintptr(fd), "watch")
				w, err := newWatch(file, *bridge())
				file.Close()
				if err != nil {
					t.Error(err)
					return
				}
				changed := make(chan error, 1)
				go func() { changed <- w.Changed() }()
				if err := c.change(); err != nil {
					t.Error(err)
				}
				if c.want == nil {
					// A change that matters comes after what does not.
					if err := addBridge("eth9"); err != nil {
						t.Error(err)
					}
					if err := <-changed; !errors.Is(err, ErrChanged) || !strings.Contains(err.Error(), `"eth9"`) {
						t.Errorf("%v", err)
					}
				} else if err := <-changed; !errors.Is(err, c.want) {
					t.Errorf("%v, want %v", err, c.want)
				}
				w.Close()
				if err := w.Changed(); err != nil {
					t.Errorf("closed: %v", err)
				}
			})
		})
	}
}

func addBridge(name string) error {
	return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}})
}

func deleteLink(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.LinkDel(l)
}

func downLink(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.LinkSetDown(l)
}

// renameLink does as an engine does that takes a link out of a namespace.
func renameLink(from, to string) error {
	l, err := netlink.LinkByName(from)
	if err != nil {
		return err
	}
	return errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, to))
}

func addAddrOn(name, text string) error { return changeAddr(name, text, netlink.AddrAdd) }
func delAddrOn(name, text string) error { return changeAddr(name, text, netlink.AddrDel) }

func changeAddr(name, text string, change func(netlink.Link, *netlink.Addr) error) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(text)
	if err != nil {
		return err
	}
	return change(l, addr)
}

// TestSiblingNames: siblings answer where no rule does, by their family, and never for
// what is permitted or denied.
func TestSiblingNames(t *testing.T) {
	var asked []string
	r := Resolver{
		Names: NewNames(), Permitted: func(name string) bool { return name == "api.example.com" },
		Siblings: func(name string) ([]netip.Addr, error) {
			asked = append(asked, name)
			if name == "down" {
				return nil, errors.New("the engine does not answer")
			}
			if name != "db" && name != "api.example.com" && name != "my_db.net" {
				return nil, nil
			}
			return []netip.Addr{netip.MustParseAddr("172.18.0.9"), netip.MustParseAddr("fd77::9")}, nil
		},
	}
	for text, want := range map[string]string{
		"db. A": "NOERROR 172.18.0.9", "DB. AAAA": "NOERROR fd77::9", "db. TXT": "NOERROR", "my_db.net. A": "NOERROR 172.18.0.9",
		"nobody. A": "NXDOMAIN", "down. A": "SERVFAIL", "api.example.com. A": "NOERROR 198.18.1.0", "api.example.com. AAAA": "NOERROR",
		`d\098. A`: "NOERROR 172.18.0.9", `db\000. A`: "NXDOMAIN", "d*b. A": "NXDOMAIN", ". A": "NXDOMAIN",
	} {
		name, kind, _ := strings.Cut(text, " ")
		reply := ask(t, r, question(name, dns.StringToType[kind]))
		got := dns.RcodeToString[reply.Rcode]
		for _, rr := range reply.Answer {
			f := strings.Fields(rr.String())
			got += " " + f[len(f)-1]
		}
		if got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
	for _, name := range asked {
		if name == "api.example.com" || strings.ContainsAny(name, "\x00*") {
			t.Errorf("%q was asked for", name)
		}
	}
}

// TestClosedByTable: the gateway closes what the packet rules close: a range does not open the
// network's gateway or an address of the host's, their own entry does.
func TestClosedByTable(t *testing.T) {
	for entry, want := range map[string]bool{"172.16.0.0/12": false, "172.18.0.1/32": true} {
		table := withNetwork(t, bridge(), []string{entry}).Table()
		if v := table.Dial(netip.MustParseAddr("172.18.0.1"), 53, false); v.Allowed != want {
			t.Errorf("%s: the gateway: %+v", entry, v)
		}
		if v := table.Target(Target{Addr: netip.MustParseAddr("172.18.0.1"), Port: 5432}, false); v.Allowed != want {
			t.Errorf("%s: the gateway as a target: %+v", entry, v)
		}
	}
	for port, want := range map[int]bool{5432: true, QuestionPort: false} {
		if v := withNetwork(t, bridge(), nil).Table().Target(Target{Addr: netip.MustParseAddr("172.18.0.9"), Port: port}, false); v.Allowed != want {
			t.Errorf("another container's port %d: %+v", port, v)
		}
	}
	if v := withNetwork(t, bridge(), []string{"172.16.0.0/12"}).Table().Dial(netip.MustParseAddr("172.19.0.1"), 53, false); !v.Allowed {
		t.Errorf("control: %+v", v)
	}
}
