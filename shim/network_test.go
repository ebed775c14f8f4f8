package shim

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/spec"
)

var byAddr = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, text := range list {
		out = append(out, netip.MustParseAddr(text))
	}
	return out
}

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range list {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

func TestNetworkNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"": true, "bridge": true, "my-net_1.x": true, "none": false, "host": false, "container": false, "container:x": false, "-x": false,
		"a b": false, "a/b": false, "slirp4netns": false, "pasta": false, "ns": false, "net:ip=1.2.3.4": false, strings.Repeat("x", 129): false,
	} {
		if err := checkNetworkName(name); (err == nil) != ok || err != nil && (!errors.Is(err, ReasonPolicy) || HintOf(err) == "") {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// TestDockerNetwork: what the daemon says of a network; what agentshim does not know the
// inside of is refused.
func TestDockerNetwork(t *testing.T) {
	bodies := map[string]string{
		"bridge": `{"Name":"bridge","Driver":"bridge","IPAM":{"Config":[{"Subnet":"172.17.0.0/16","Gateway":"172.17.0.1"}]}}`,
		"dual":   `{"Name":"dual","Driver":"bridge","EnableIPv6":true,"IPAM":{"Config":[{"Subnet":"172.18.0.0/16"},{"Subnet":"fd77::/64","Gateway":"fd77::1/64"}]}}`,
		"off6":   `{"Name":"off6","Driver":"bridge","IPAM":{"Config":[{"Subnet":"172.18.0.0/16"},{"Subnet":"fd77::/64"}]}}`,
		"vlan":   `{"Name":"vlan","Driver":"macvlan","IPAM":{"Config":[{"Subnet":"172.18.0.0/16"}]}}`,
		"broken": `{"Name":"broken","Driver":"bridge","IPAM":{"Config":[{"Subnet":"x"}]}}`,
		"abc":    `{"Name":"other","Driver":"bridge"}`,
	}
	handlers := map[string]http.HandlerFunc{}
	for name, body := range bodies {
		handlers["/v1.41/networks/"+name], handlers["/networks/"+name] = answer(body), answer(body)
	}
	d := &docker{api: newDockerAPI(startDaemon(t, handlers).socket)}
	for name, want := range map[string]*netpolicy.Network{
		"":     {Name: "bridge", Interface: "eth0", Siblings: true, Subnets: prefixes("172.17.0.0/16"), Closed: addrs("172.17.0.1", "172.17.0.0", "172.17.255.255"), Resolver: dockerResolver},
		"dual": {Name: "dual", Interface: "eth0", Siblings: true, Subnets: prefixes("172.18.0.0/16", "fd77::/64"), Closed: addrs("172.18.0.1", "172.18.0.0", "172.18.255.255", "fd77::1"), Resolver: dockerResolver},
		"off6": {Name: "off6", Interface: "eth0", Siblings: true, Subnets: prefixes("172.18.0.0/16"), Closed: addrs("172.18.0.1", "172.18.0.0", "172.18.255.255"), Resolver: dockerResolver},
		"vlan": nil, "broken": nil, "abc": nil, "missing": nil,
	} {
		got, err := d.network(t.Context(), name, false)
		if want == nil {
			if !errors.Is(err, ReasonPolicy) || HintOf(err) == "" {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if diff := cmp.Diff(*want, got, byAddr); err != nil || diff != "" {
			t.Errorf("%s: %v %s", name, err, diff)
		}
	}
}

func TestDockerSiblings(t *testing.T) {
	list := `[{"Id":"a"},{"Id":"gone"},{"Id":"b"}]`
	handlers := map[string]http.HandlerFunc{}
	for path, body := range map[string]string{
		"/containers/json":   list,
		"/containers/a/json": `{"Name":"/DB-1","NetworkSettings":{"Networks":{"net":{"IPAddress":"172.18.0.2","Aliases":["db","a"]},"other":{"IPAddress":"10.1.1.1"}}}}`,
		"/containers/b/json": `{"Name":"/db-2","NetworkSettings":{"Networks":{"net":{"IPAddress":"172.18.0.3","GlobalIPv6Address":"fd77::3","Aliases":["db"]}}}}`,
	} {
		handlers["/v1.41"+path], handlers[path] = answer(body), answer(body)
	}
	d := &docker{api: newDockerAPI(startDaemon(t, handlers).socket)}
	got, err := d.siblings(t.Context(), "net")
	want := map[string][]netip.Addr{
		"db-1": addrs("172.18.0.2"), "db-1.net": addrs("172.18.0.2"), "a": addrs("172.18.0.2"), "a.net": addrs("172.18.0.2"),
		"db": addrs("172.18.0.2", "172.18.0.3", "fd77::3"), "db.net": addrs("172.18.0.2", "172.18.0.3", "fd77::3"),
		"db-2": addrs("172.18.0.3", "fd77::3"), "db-2.net": addrs("172.18.0.3", "fd77::3"),
	}
	if diff := cmp.Diff(want, got, byAddr); err != nil || diff != "" {
		t.Errorf("%v %s", err, diff)
	}
}

func TestPodmanNetwork(t *testing.T) {
	inspect := func(name string) []string { return []string{"/podman", "network", "inspect", name} }
	p := &podman{engine: spec.Engine{Kind: spec.Podman, Client: "/podman"}}
	p.runner = script(
		t, scriptedCall{argv: inspect("podman"), out: `[{"name":"podman","driver":"bridge","subnets":[{"subnet":"10.88.0.0/16","gateway":"10.88.0.1"}]}]`},
		scriptedCall{argv: inspect("missing"), err: failedCall(125, "Error: network missing: unable to find network: network not found")},
		scriptedCall{argv: inspect("vlan"), out: `[{"name":"vlan","driver":"macvlan"}]`},
		scriptedCall{argv: inspect("net"), out: `[{"name":"net","driver":"bridge","subnets":[{"subnet":"10.89.0.0/24","gateway":"10.89.0.1"}]}]`},
	)
	want := netpolicy.Network{Name: "podman", Interface: "eth0", Siblings: true, Subnets: prefixes("10.88.0.0/16"), Closed: addrs("10.88.0.1", "10.88.0.0", "10.88.255.255")}
	if got, err := p.network(t.Context(), "", false); err != nil || cmp.Diff(want, got, byAddr) != "" {
		t.Errorf("%v %s", err, cmp.Diff(want, got, byAddr))
	}
	for _, name := range []string{"missing", "vlan"} {
		if _, err := p.network(t.Context(), name, false); !errors.Is(err, ReasonPolicy) || HintOf(err) == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
	p.engine.Rootless = true
	closed := addrs("10.89.0.1", "10.89.0.0", "10.89.0.255", "10.0.2.2", "10.0.2.3", "fd00::2", "fd00::3")
	if got, err := p.network(t.Context(), "net", false); err != nil || cmp.Diff(closed, got.Closed, byAddr) != "" {
		t.Errorf("rootless bridge: %v %s", err, cmp.Diff(closed, got.Closed, byAddr))
	}
	for _, ipv6 := range []bool{false, true} {
		for said, want := range map[string]string{"": spec.SlirpNetwork, "slirp4netns": spec.SlirpNetwork, "pasta": spec.PastaNetwork} {
			p.rootlessNetwork = said
			n, err := p.network(t.Context(), "", ipv6)
			if err != nil || n.Name != want || n.Siblings || n.IPv6() != ipv6 {
				t.Errorf("rootless, %q: %+v %v", said, n, err)
			}
		}
	}
	p.rootlessNetwork = "passt-ng"
	if n, err := p.network(t.Context(), "", false); !errors.Is(err, ReasonPolicy) || HintOf(err) == "" {
		t.Errorf("of an unknown program: %+v %v", n, err)
	}
}

func TestPodmanSiblings(t *testing.T) {
	p := &podman{engine: spec.Engine{Kind: spec.Podman, Client: "/podman"}}
	ps := []string{"/podman", "ps", "--quiet", "--no-trunc", "--filter", "network=net"}
	p.runner = script(
		t, scriptedCall{argv: ps, out: "aa\nbb\n"},
		scriptedCall{
			argv: []string{"/podman", "inspect", "--type=container", "aa", "bb"}, err: failedCall(125, "no such container bb"),
			out: `[{"Name":"one","NetworkSettings":{"Networks":{"net":{"IPAddress":"10.89.0.2","Aliases":["db"]}}}}]`,
		},
		scriptedCall{argv: ps},
		scriptedCall{argv: ps, out: "aa\n"},
		scriptedCall{argv: []string{"/podman", "inspect", "--type=container", "aa"}, out: "[]", err: failedCall(125, "permission denied")},
	)
	got, err := p.siblings(t.Context(), "net")
	want := map[string][]netip.Addr{"one": addrs("10.89.0.2"), "one.net": addrs("10.89.0.2"), "db": addrs("10.89.0.2"), "db.net": addrs("10.89.0.2")}
	if diff := cmp.Diff(want, got, byAddr); err != nil || diff != "" {
		t.Errorf("%v %s", err, diff)
	}
	if got, err := p.siblings(t.Context(), "net"); err != nil || len(got) != 0 {
		t.Errorf("nobody there: %v %v", got, err)
	}
	if got, err := p.siblings(t.Context(), "net"); err == nil {
		t.Errorf("what may not be asked is told: %v", got)
	}
}

// countingSiblings is an engine that counts how often it is asked.
type countingSiblings struct {
	Adapter
	asked  int
	found  map[string][]netip.Addr
	failed error
}

func (c *countingSiblings) siblings(context.Context, string) (map[string][]netip.Addr, error) {
	c.asked++
	return c.found, c.failed
}

// TestSiblingNames: only the network's own addresses are told, and the engine is not asked
// for each question.
func TestSiblingNames(t *testing.T) {
	engine := &countingSiblings{found: map[string][]netip.Addr{"db": addrs("172.18.0.2", "172.18.0.1", "10.9.0.5")}}
	n := netpolicy.Network{Siblings: true, Subnets: prefixes("172.18.0.0/16"), Closed: addrs("172.18.0.1")}
	s := &siblingNames{adapter: engine, network: n, ctx: t.Context(), log: t.Logf}
	for range 100 {
		got, err := s.lookUp("db")
		nobody, nerr := s.lookUp("nobody")
		if cmp.Diff(addrs("172.18.0.2"), got, byAddr) != "" || nobody != nil || err != nil || nerr != nil {
			t.Fatalf("%v %v", got, err)
		}
	}
	if engine.asked != 1 {
		t.Errorf("asked %d times", engine.asked)
	}
	s.asked = time.Now().Add(-siblingsAge - time.Second)
	engine.found, engine.failed = nil, fs.ErrPermission
	for range 100 {
		if got, err := s.lookUp("db"); got != nil || !errors.Is(err, fs.ErrPermission) {
			t.Fatalf("who may not ask is told: %v %v", got, err)
		}
	}
	if engine.asked != 2 {
		t.Errorf("asked %d times after its age", engine.asked)
	}
}

// slowSiblings is an engine that answers when nobody wants to know any more.
type slowSiblings struct {
	Adapter
	asked chan struct{}
}

func (s slowSiblings) siblings(ctx context.Context, _ string) (map[string][]netip.Addr, error) {
	close(s.asked)
	<-ctx.Done()
	time.Sleep(time.Second) // Runner.Run gives a client up to stopGrace
	return nil, ctx.Err()
}

// TestSiblingsAtTheEnd: a question that the engine still thinks about when the run ends is no
// fault of the run's.
func TestSiblingsAtTheEnd(t *testing.T) {
	local := net.IPv4(127, 0, 0, 1)
	dnsUDP, err1 := net.ListenUDP("udp4", &net.UDPAddr{IP: local})
	dnsTCP, err2 := net.ListenTCP("tcp4", &net.TCPAddr{IP: local})
	relay, err3 := net.ListenTCP("tcp4", &net.TCPAddr{IP: local})
	log, err4 := netpolicy.CreateLog(filepath.Join(t.TempDir(), "log"), "run", time.Now)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		t.Fatal(err)
	}
	engine := slowSiblings{asked: make(chan struct{})}
	c := &container{p: &prepared{adapter: engine, job: Job{Log: t.Logf}}}
	c.p.plan.Egress.Network = &netpolicy.Network{Siblings: true}
	e := &egress{log: log, watched: make(chan struct{}), lost: func() {}}
	e.use(t.Context(), c, netpolicy.Listeners{DNS: dnsUDP, DNSTCP: dnsTCP, Relay: relay})
	e.let()
	asker, err := net.DialUDP("udp4", nil, dnsUDP.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer asker.Close()
	// One question for the address of "db" (RFC 1035 4.1).
	if _, err := asker.Write([]byte("\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x02db\x00\x00\x01\x00\x01")); err != nil {
		t.Fatal(err)
	}
	<-engine.asked
	if err := e.close(&Record{Egress: &EgressRecord{}}); err != nil {
		t.Error(err)
	}
}

// TestAddressesAreCompared: with a network its own addresses alone are expected, and one of
// them at least; without one only loopback's.
func TestAddressesAreCompared(t *testing.T) {
	b := mustBase(t, bases[0])
	n := netpolicy.Network{Name: "net", Interface: "eth0", Subnets: prefixes("172.18.0.0/16")}
	for name, c := range map[string]struct {
		network *netpolicy.Network
		found   []string
		ok      bool
	}{
		"none":                {nil, []string{"lo 127.0.0.1", "lo ::1"}, true},
		"one without":         {nil, []string{"eth0 172.18.0.2"}, false},
		"loopback's, another": {nil, []string{"lo 192.175.48.1"}, false},
		"the network's":       {&n, []string{"eth0 172.18.0.2", "eth0 fe80::1", "lo 127.0.0.1"}, true},
		"another's":           {&n, []string{"eth0 172.18.0.2", "eth0 10.1.1.1"}, false},
		"another interface":   {&n, []string{"eth0 172.18.0.2", "eth1 172.18.0.3"}, false},
		"not there":           {&n, []string{"lo 127.0.0.1"}, false},
		"nothing":             {&n, nil, false},
		"garbage":             {&n, []string{"eth0 172.18.0.2", "eth0"}, false},
	} {
		b.plan.Egress.Network = c.network
		b.Hello.Addresses = c.found
		if diffs := b.compare(); (len(diffs) == 0) != c.ok {
			t.Errorf("%s: %v", name, diffs)
		}
	}
}

// TestNetworkIsProbed: mode network asks; the host's own addresses are closed.
func TestNetworkIsProbed(t *testing.T) {
	p := &prepared{adapter: &podman{engine: spec.Engine{Kind: spec.Podman, Rootless: true}}}
	p.job.Harness.Egress = harness.Egress{Mode: "open", Network: "none"}
	if err := p.probeNetworkFacts(t.Context()); err != nil || p.host.Network != nil {
		t.Errorf("another mode: %+v %v", p.host.Network, err)
	}
	p.job.Harness.Egress = harness.Egress{Mode: "network", Allow: []harness.Allow{{Host: "::/0"}}}
	if err := p.probeNetworkFacts(t.Context()); err != nil || p.host.Network == nil || !p.host.Network.IPv6() {
		t.Fatalf("%+v %v", p.host.Network, err)
	}
	own, err := hostAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own {
		if p.host.Network.Own(a) || !strings.Contains(cmp.Diff(nil, p.host.Network.Closed, byAddr), a.String()) {
			t.Errorf("%s is not closed", a)
		}
	}
	p.job.Harness.Egress.Network = "host"
	if err := p.probeNetworkFacts(t.Context()); !errors.Is(err, ReasonPolicy) {
		t.Errorf("%v", err)
	}
}

func TestBroadcasts(t *testing.T) {
	for text, want := range map[string][]netip.Addr{
		"10.1.2.0/24": addrs("10.1.2.0", "10.1.2.255"), "10.1.2.64/26": addrs("10.1.2.64", "10.1.2.127"), "10.1.2.4/30": addrs("10.1.2.4", "10.1.2.7"),
		"10.1.2.4/31": nil, "10.1.2.4/32": nil, "fd77::/64": nil, "10.0.0.0/8": addrs("10.0.0.0", "10.255.255.255"),
	} {
		if diff := cmp.Diff(want, broadcasts(netip.MustParsePrefix(text)), byAddr); diff != "" {
			t.Errorf("%s: %s", text, diff)
		}
	}
}
