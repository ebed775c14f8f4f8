package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/agentshim/agentshim/shim"
)

// Docker's networks are in the namespace of its daemon and not in that of the caller. A
// link of its own joins that to the world, for the addresses of these tests alone.
const dockerOutside, worldForDocker = "192.168.78.10", "192.168.78.1"

var outsideDocker = []string{"192.175.48.0/24", "169.254.169.254/32", "10.9.0.0/16", neighbour + "/32"}

// closedAddrs are what no policy of these tests opens.
var closedAddrs = []string{"192.175.48.45", "10.9.0.5", neighbour, "169.254.169.254"}

// joinDocker gives Docker's containers with a network a way to the world, and gives what
// counts the packets on it.
func (w *world) joinDocker(t *testing.T) *capture {
	t.Helper()
	host, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	seen := newCapture()
	t.Cleanup(func() {
		if l, err := netlink.LinkByName("shimtest0"); err == nil {
			_ = netlink.LinkDel(l)
		}
	})
	err = within(w.beyond, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "docker-beyond"
		pair := &netlink.Veth{LinkAttrs: attrs, PeerName: "shimtest0", PeerNamespace: netlink.NsFd(int(host.Fd()))}
		if err := netlink.LinkAdd(pair); err != nil {
			return err
		}
		return errors.Join(ready("docker-beyond", worldForDocker+"/24"), seen.start("docker-beyond"))
	})
	if err == nil {
		err = ready("shimtest0", dockerOutside+"/24")
	}
	for _, dst := range outsideDocker {
		if err == nil {
			err = addRoute("shimtest0", &netlink.Route{Dst: mustCIDR(dst), Gw: net.ParseIP(worldForDocker)})
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return seen
}

// attached is a network of the set-up's engine with one other container in it.
type attached struct {
	s                  setup
	w                  *world
	network, subnet    string
	sibling, gateway   string
	sibling6, gateway6 string
}

// attach makes one.
func (s setup) attach(t *testing.T, w *world, six bool) attached {
	t.Helper()
	i := slices.Index(setups, s)
	a := attached{s: s, w: w, network: "shimtest-" + s.name, subnet: fmt.Sprintf("10.123.%d", i)}
	a.gateway = a.subnet + ".1"
	flags := []string{"network", "create", "--subnet=" + a.subnet + ".0/24"}
	if six {
		a.gateway6 = fmt.Sprintf("fd77:%d::1", i)
		flags = append(flags, "--ipv6", fmt.Sprintf("--subnet=fd77:%d::/64", i))
	}
	a.engine(t, append(flags, a.network)...).ok(t)
	t.Cleanup(func() { a.engine(t, "network", "rm", a.network).ok(t) })
	id := strings.TrimSpace(a.engine(
		t, "run", "--detach", "--rm", "--name="+a.network+"-db", "--network="+a.network, "--network-alias=db", "--entrypoint=/reach/reach",
		"--volume="+mustReach(t)+":/reach:ro", "agentshim/hello:test", attempts{{"sibling", "9007"}}.json(t),
	).ok(t).Stdout)
	t.Cleanup(func() { a.engine(t, "rm", "--force", id).ok(t) })
	var got []struct {
		NetworkSettings struct {
			Networks map[string]struct{ IPAddress, GlobalIPv6Address string }
		}
	}
	if err := json.Unmarshal([]byte(a.engine(t, "inspect", id).ok(t).Stdout), &got); err != nil || len(got) != 1 {
		t.Fatalf("inspect: %v", err)
	}
	n := got[0].NetworkSettings.Networks[a.network]
	a.sibling, a.sibling6 = n.IPAddress, n.GlobalIPv6Address
	return a
}

// engine runs the engine's client where its networks are: Podman's are the caller's.
func (a attached) engine(t *testing.T, args ...string) result {
	t.Helper()
	if a.s.engine == "docker" {
		return a.s.bare(t, args...)
	}
	return a.s.bareIn(t, a.w, args...)
}

// reachBare makes the attempts in a container of the bare engine's on the network.
func (a attached) reachBare(t *testing.T, ops attempts) tried {
	t.Helper()
	return endings(t, a.engine(
		t, "run", "--rm", "--network="+a.network, "--entrypoint=/reach/reach", "--volume="+mustReach(t)+":/reach:ro",
		"agentshim/hello:test", ops.json(t),
	), ops)
}

// egress is a section of mode network.
func (a attached) egress(allow ...any) map[string]any {
	return map[string]any{
		"mode": "network", "network": a.network, "allow": append([]any{}, allow...), "deny": []any{"192.175.48.45/32"},
		"hostServices": []any{map[string]any{"name": "mcp", "port": servicePort}},
	}
}

// closedFlows are the packets that came to what no policy of these tests opens.
func (w *world) closedFlows(t *testing.T, seen *capture) []string {
	t.Helper()
	var out []string
	for i, c := range []*capture{w.seen, seen} {
		for flow, n := range c.flows(t) {
			_, target, _ := strings.Cut(flow, " ")
			addr, err := netip.ParseAddrPort(target)
			if err == nil && slices.Contains(closedAddrs, addr.Addr().String()) {
				out = append(out, fmt.Sprint(i, " ", flow, " ", n))
			}
		}
	}
	slices.Sort(out)
	return out
}

// rows: how an attempt ends in a container of the bare engine's, in a sandbox that is
// attached to the same network with a list, and in one where everything public is allowed.
func (a attached) rows() []row {
	const api, none = "api.allowed.example", "ENETUNREACH|EADDRNOTAVAIL|EHOSTUNREACH|EPERM|EACCES"
	rows := []row{
		{"a sibling", []string{"tcp", at(a.sibling, echoPort), "x"}, "ok: x", "ok: x", "ok: x"},
		{"a sibling by UDP", []string{"udp", at(a.sibling, echoPort), "x"}, "ok: x", "ok: x", "ok: x"},
		{"a sibling by its alias", []string{"tcp", "db:9007", "x"}, "", "ok: x", "ok: x"},
		{"a sibling by its name", []string{"udp", a.network + "-db:9007", "x"}, "", "ok: x", "ok: x"},
		{"a sibling by its name in the network", []string{"tcp", "db." + a.network + ":9007", "x"}, "", "ok: x", "ok: x"},
		{"no sibling", []string{"name", "nobody"}, "", "NXDOMAIN", "NXDOMAIN"},
		{"a sibling's port where nobody listens", []string{"tcp", at(a.sibling, 9008), "x"}, "ECONNREFUSED", "ECONNREFUSED", "ECONNREFUSED"},
		{"A37 N19 the gateway", []string{"tcp", at(a.gateway, 9009), "x"}, "ECONNREFUSED", "reset", "reset"},
		{"N19 the gateway by UDP", []string{"datagram", "17", at(a.gateway, 9009)}, "ok", "EPERM", "EPERM"},
		{"A37 the host by the subnet's broadcast address", []string{"datagram", "17", at(a.subnet+".255", 9009)}, "ok", "EPERM", "EPERM"},
		{"A37 by the network's address", []string{"datagram", "17", at(a.subnet+".0", 9009)}, "ok", "EPERM", "EPERM"},
		{"a source that is not the sandbox's outside", []string{"datagram", "17", at(a.sibling, 9009), "198.18.7.7"}, "EADDRNOTAVAIL", "EPERM", "EPERM"},
		{"its own inside", []string{"datagram", "17", at(a.sibling, 9009), "198.18.0.1"}, "EADDRNOTAVAIL", "EPERM", "EPERM"},
		{"N33 the gateway's resolver", []string{"dns", "udp", at(a.gateway, 53), "secret.evil.example", "A"}, "", "ok: NXDOMAIN 0", "ok: NXDOMAIN 0"},
		{"A01 any resolver", []string{"dns", "udp", at("192.175.48.53", 53), "secret.evil.example", "A"}, "ok: NOERROR 1", "ok: NXDOMAIN 0", "ok: NXDOMAIN 0"},
		{"A01 any resolver by TCP", []string{"dns", "tcp", at("192.175.48.53", 53), "secret.evil.example", "A"}, "ok: NOERROR 1", "ok: NXDOMAIN 0", "ok: NXDOMAIN 0"},
		{"a public address", []string{"tcp", at("192.175.48.46", echoPort), "x"}, "ok: x", "reset", "ok: x"},
		{"A23 QUIC", []string{"udp", at("192.175.48.46", 443), "x"}, "ok: x", "EPERM", "ok: x"},
		{"A24 ICMP", []string{"datagram", "1", at("192.175.48.46", 0)}, "", "EACCES|EPERM", "EACCES|EPERM"},
		{"an allowed range", []string{"tcp", "192.175.48.40:9007", "x"}, "ok: x", "ok: x", "ok: x"},
		{"an allowed range by UDP", []string{"udp", "192.175.48.40:9007", "x"}, "ok: x", "ok: x", "ok: x"},
		{"an allowed port", []string{"tcp", "192.175.48.41:9007", "x"}, "ok: x", "ok: x", "ok: x"},
		{"an allowed port by UDP", []string{"udp", "192.175.48.41:9007", "x"}, "ok: x", "EPERM", "ok: x"},
		{"another port of it", []string{"tcp", "192.175.48.41:5432", "x"}, "ok: x", "reset", "ok: x"},
		{"an allowed port for UDP", []string{"udp", "192.175.48.42:9007", "x"}, "ok: x", "ok: x", "ok: x"},
		{"an allowed port for UDP by TCP", []string{"tcp", "192.175.48.42:9007", "x"}, "ok: x", "reset", "ok: x"},
		{"denied within the allowed", []string{"tcp", "192.175.48.45:9007", "x"}, "ok: x", "reset", "reset"},
		{"denied within the allowed by UDP", []string{"udp", "192.175.48.45:9007", "x"}, "ok: x", "EPERM", "EPERM"},
		{"A09 a private address", []string{"tcp", "10.9.0.5:9007", "x"}, "ok: x", "reset", "reset"},
		{"A09 a private address by UDP", []string{"udp", "10.9.0.5:9007", "x"}, "ok: x", "EPERM", "EPERM"},
		{"A37 the host's neighbour", []string{"udp", at(neighbour, echoPort), "x"}, "ok: x", "EPERM", "EPERM"},
		{"A36 metadata", []string{"tcp", "169.254.169.254:9007", "x"}, "ok: x", "reset", "reset"},
		{"A36 metadata by UDP", []string{"udp", "169.254.169.254:9007", "x"}, "ok: x", "EPERM", "EPERM"},
		{"A20 IPv6", []string{"tcp", at(publicAddr6, echoPort), "x"}, none, none, none},
		{"a name", []string{"tls", api + ":443", api, api}, "", "ok: world sni=" + api + "*", "ok: world sni=" + api + "*"},
		{"A02 another server name", []string{"tls", api + ":443", "secret.evil.example", api}, "", "reset", "reset"},
		{"A19 another port of a name", []string{"tcp", api + ":9007", "x"}, "", "reset", "reset"},
		{"A01 an unlisted name", []string{"name", "secret.evil.example"}, "", "NXDOMAIN", "NXDOMAIN"},
		{"a host service", []string{"tcp", at("mcp.host.internal", servicePort)}, "", "ok: host 127.0.0.1:3000", "ok: host 127.0.0.1:3000"},
	}
	if a.s.engine == "docker" {
		rows = append(
			rows, row{"A04 N02 N03 Docker's resolver", []string{"datagram", "17", "127.0.0.11:53"}, "ok", "EPERM", "EPERM"},
			row{"A04 by TCP", []string{"tcp", "127.0.0.11:53", "x"}, "ok: *|closed|reset", "ECONNREFUSED", "ECONNREFUSED"},
		)
	}
	for _, proto := range []int{1, 17, 132, 255} {
		rows = append(rows, row{fmt.Sprintf("A24 raw %d", proto), []string{"raw", fmt.Sprint(proto), at("192.175.48.46", 0)}, "", "EPERM", "EPERM"})
	}
	for name, op := range map[string][]string{"SCTP": {"socket", "2", "5", "132"}, "AF_PACKET": {"socket", "17", "3", "0"}, "vsock": {"socket", "40", "1", "0"}} {
		rows = append(rows, row{"A24 " + name, op, "", "E*", "E*"})
	}
	return rows
}

// TestNetworkMode: siblings and what is allowed are reached directly, names through the
// gateway, and nothing else, also where everything public is allowed. The control is the
// bare engine on the same network.
func TestNetworkMode(t *testing.T) {
	w := outside(t)
	w.settle()
	seen := w.joinDocker(t)
	inTurn(t, func(t *testing.T, s setup) {
		a := s.attach(t, w, false)
		rows := a.rows()
		listed := a.egress("192.175.48.40/32", "192.175.48.41/32:9007", "192.175.48.42/32:9007/udp", "192.175.48.45/32", "api.allowed.example")
		a.try(t, seen, "listed", listed, rows, func(r row) string { return r.open })
		a.try(t, seen, "open bridge", a.egress("0.0.0.0/0", "::/0", "api.allowed.example"), rows, func(r row) string { return r.list })
		if s.name != "docker-group" {
			a.try(t, seen, "listed by iptables", byIptables(listed), rows, func(r row) string { return r.open })
		}
		a.control(t, rows)
	})
}

// control makes the attempts that have one in a container of the bare engine's.
func (a attached) control(t *testing.T, rows []row) {
	t.Helper()
	rows = slices.DeleteFunc(slices.Clone(rows), func(r row) bool { return r.control == "" })
	got := a.reachBare(t, opsOf(rows))
	for _, r := range rows {
		if out := strings.TrimSuffix(got.of(r.op...), " late"); !isOutcome(r.control, out) {
			t.Errorf("control: %s: %s, want %s", r.name, out, r.control)
		}
	}
}

// try makes the attempts under one policy, and looks at what came to the closed addresses.
func (a attached) try(t *testing.T, seen *capture, name string, egress map[string]any, rows []row, want func(row) string) {
	t.Run(name, func(t *testing.T) {
		before := a.w.closedFlows(t, seen)
		got, r := a.s.reach(t, a.w, egress, append(opsOf(rows), ownRows()...))
		for _, r := range rows {
			if out := got.of(r.op...); !isOutcome(want(r), out) {
				t.Errorf("%s: %s, want %s", r.name, out, want(r))
			}
		}
		own(t, got)
		if after := a.w.closedFlows(t, seen); !slices.Equal(after, before) {
			t.Errorf("what must be closed got packets: %q, before %q", after, before)
		}
		if strings.Contains(r.Stderr, "warning") {
			t.Error(r.Stderr)
		}
	})
}

// TestNetworkGate: N15, A44: a program that connects at once reaches nothing that is not
// allowed, and always what is.
func TestNetworkGate(t *testing.T) {
	w := outside(t)
	seen := w.joinDocker(t)
	runs := 13
	if soaking() {
		runs = 200
	}
	bad, worse := []string{"tcp", "192.175.48.45:9007", "x"}, []string{"udp", "192.175.48.45:9007", "x"}
	good := []string{"tcp", "192.175.48.40:9007", "x"}
	inTurn(t, func(t *testing.T, s setup) {
		a := s.attach(t, w, false)
		state, file := s.private(t), s.write(t, reachFields(t, a.egress("192.175.48.40/32"), nil))
		before, accepted := w.closedFlows(t, seen), w.accepted.get("192.175.48.45:9007")
		var wg sync.WaitGroup
		turns := make(chan struct{}, 3)
		for range runs {
			turns <- struct{}{}
			wg.Go(func() {
				defer func() { <-turns }()
				ops := attempts{worse, bad, good}
				got := endings(t, s.call(t, call{Net: w, State: state}, "exec", "--spec", file, "--", ops.json(t)), ops)
				if got.of(bad...) != "reset" || got.of(worse...) != "EPERM" || got.of(good...) != "ok: x" {
					t.Errorf("%v", got)
				}
			})
		}
		wg.Wait()
		if after := w.closedFlows(t, seen); !slices.Equal(after, before) || w.accepted.get("192.175.48.45:9007") != accepted {
			t.Errorf("packets: %q, before %q", after, before)
		}
		if got := a.reachBare(t, attempts{bad}); got.of(bad...) != "ok: x" || slices.Equal(w.closedFlows(t, seen), before) {
			t.Errorf("control: %v; or packets are not counted", got)
		}
	})
}

// TestNetworkChanged: A51, N25: somebody attaches the running sandbox to another network,
// takes it off its own, or restarts it: the run ends and says why, no second agent ever
// runs, and nothing is left. The controls are left alone and killed.
func TestNetworkChanged(t *testing.T) {
	w := outside(t)
	each(t, func(t *testing.T, s setup) {
		a := s.attach(t, w, false)
		other := a.network + "-other"
		a.engine(t, "network", "create", other).ok(t)
		t.Cleanup(func() { a.engine(t, "network", "rm", other).ok(t) })
		for _, c := range []struct {
			change []string
			mode   string
			reason shim.Reason
			says   string
		}{
			{nil, "network", "", ""},
			{[]string{"kill"}, "network", shim.ReasonInitLost, "SIGKILL"},
			{[]string{"network", "connect", other}, "network", shim.ReasonPosture, "network was changed"},
			{[]string{"network", "disconnect", "--force", a.network}, "network", shim.ReasonPosture, "network was changed"},
			{[]string{"restart"}, "network", shim.ReasonPosture, "restarted the container"},
			{[]string{"restart"}, "deny-all", shim.ReasonPosture, "restarted the container"},
		} {
			egress := a.egress()
			if c.mode != "network" {
				if !s.full() {
					continue
				}
				egress = map[string]any{"mode": c.mode}
			}
			t.Run(strings.Join(append([]string{c.mode}, c.change...), " "), func(t *testing.T) {
				// Podman's own restart fails where the container is removed in the midst of it.
				for range 6 {
					if a.changed(t, egress, c.change, c.reason, c.says) {
						break
					}
				}
			})
		}
	})
}

// changed runs a sandbox, has the engine change it, and reports whether the engine says
// that it did.
func (a attached) changed(t *testing.T, egress map[string]any, change []string, reason shim.Reason, says string) bool {
	t.Helper()
	folder := a.s.folder(t)
	fields := spec{"egress": egress, "workspace": map[string]any{"source": folder, "mode": "writable"}}
	b := a.s.launch(t, call{Net: a.w}, fields, `echo x >>/workspace/agents; trap 'echo done; exit 3' USR1; echo ready; while :; do sleep 0.1; done`)
	if line, err := b.out.ReadString('\n'); line != "ready\n" {
		t.Fatalf("first line %q, %v; %s", line, err, b.stderr.String())
	}
	if change == nil {
		b.signal(t, 10)
		if rest, _ := b.ended(t, 3); rest != "done\n" {
			t.Errorf("control: %q %s", rest, b.stderr.String())
		}
		return true
	}
	// By name: the helper's container may not be removed yet. Podman notes that a
	// container runs only after it has started it.
	const ours = "name=agentshim-[0-9a-f]+$"
	var id string
	eventually(t, "a container that runs", func() bool {
		id = strings.TrimSpace(a.engine(t, "ps", "--quiet", "--filter", ours).ok(t).Stdout)
		return id != ""
	})
	r := a.engine(t, append(change, id)...)
	if change[0] != "restart" {
		r.ok(t)
	}
	if _, rec := b.ended(t, shim.ExitRefused); rec.Reason != reason || !strings.Contains(b.stderr.String(), says) {
		t.Errorf("the engine: %d %s; %s %s", r.Code, r.Stderr, rec.Reason, b.stderr.String())
	}
	if left := a.engine(t, "ps", "--all", "--quiet", "--filter", ours).ok(t).Stdout; left != "" {
		t.Errorf("left %s", left)
	}
	if got, err := os.ReadFile(filepath.Join(folder, "agents")); string(got) != "x\n" || err != nil {
		t.Errorf("agents %q %v", got, err)
	}
	return r.Code == 0
}

// TestNetworkRefused: what is no network, or not one that agentshim knows the inside of.
func TestNetworkRefused(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		for name, hint := range map[string]string{
			"none": "network ls", "host": "network ls", "container:x": "network ls", "slirp4netns": "network ls", "-x": "network ls",
			"shimtest-nobody": "network create",
		} {
			file := s.write(t, spec{"egress": map[string]any{"mode": "network", "network": name}})
			if r := s.exec(t, file, "echo ran").refused(t, shim.ReasonPolicy); !strings.Contains(r.Stderr, hint) {
				t.Errorf("%s: %s", name, r.Stderr)
			}
		}
	})
}

// TestDefaultNetwork: without a name it is the engine's own; N20: the host's loopback
// stays closed where the network could lead to it. With an upstream proxy names go through
// it, and what is reached directly does not.
func TestDefaultNetwork(t *testing.T) {
	w := outside(t)
	w.settle()
	w.joinDocker(t)
	u, err := sharedUpstream()
	if err != nil {
		t.Fatal(err)
	}
	good, name := []string{"tcp", "192.175.48.40:9007", "x"}, []string{"tls", "only.proxied.example:443", "only.proxied.example", "x"}
	closed := attempts{
		{"tcp", at("10.0.2.2", otherServicePort), "x"},
		{"tcp", at("10.0.2.3", 9007), "x"},
		{"tcp", at("192.175.48.45", echoPort), "x"},
		{"tcp", at(callerAddr, hostPort), "x"},
		{"tcp", at(callerLAN, hostPort), "x"},
	}
	each(t, func(t *testing.T, s setup) {
		egress := attached{}.egress("0.0.0.0/0", "only.proxied.example")
		delete(egress, "network")
		egress["proxy"] = fmt.Sprintf("socks5h://user:%s@%s", proxySecret, at(neighbour, socksPort))
		ops := append(attempts{good, name}, closed...)
		file := s.write(t, reachFields(t, egress, spec{"accept": []any{"rootless-cgroup-limits", "proxy-resolves"}}))
		got := endings(t, s.call(t, call{Net: w}, "exec", "--spec", file, "--", ops.json(t)), ops)
		if got.of(good...) != "ok: x" || !strings.HasPrefix(got.of(name...), "ok: world") {
			t.Errorf("%v", got)
		}
		for _, op := range closed {
			if out := got.of(op...); out != "reset" {
				t.Errorf("%v: %s", op, out)
			}
		}
	})
	if !u.was("SOCKS only.proxied.example:443") || u.was("SOCKS 192.175.48.40:9007") {
		t.Error("the proxy was not asked for the name, or for what is reached directly")
	}
}

// TestDualStackNetwork: A20, A21: siblings by IPv6, and nothing else by it unless it is
// allowed. The control is the bare engine on the same network.
func TestDualStackNetwork(t *testing.T) {
	w := outside(t)
	each(t, func(t *testing.T, s setup) {
		a := s.attach(t, w, true)
		rows := []row{
			{"a sibling", []string{"tcp", at(a.sibling6, echoPort), "x"}, "ok: x", "ok: x", ""},
			{"a sibling by UDP", []string{"udp", at(a.sibling6, echoPort), "x"}, "ok: x", "ok: x", ""},
			{"a sibling by its name", []string{"name", "db"}, "", "ok: " + a.sibling + " " + a.sibling6, ""},
			{"the gateway", []string{"tcp", at(a.gateway6, 9009), "x"}, "ECONNREFUSED", "ECONNREFUSED", ""},
			{"the gateway by UDP", []string{"datagram", "17", at(a.gateway6, 9009)}, "ok", "EPERM", ""},
			{"link-local", []string{"datagram", "17", "[ff02::1]:9009"}, "", "E*", ""},
			{"a public address", []string{"udp", at(publicAddr6, 443), "x"}, "", "EPERM|ENETUNREACH", ""},
			{"a resolver", []string{"dns", "udp", at(publicAddr6, 53), "secret.evil.example", "A"}, "", "*EPERM*|*not permitted*|ENETUNREACH", ""},
		}
		got, _ := s.reach(t, w, a.egress(), opsOf(rows))
		for _, r := range rows {
			if out := got.of(r.op...); !isOutcome(r.open, out) {
				t.Errorf("%s: %s, want %s", r.name, out, r.open)
			}
		}
		a.control(t, rows)
		a.why(t)
	})
}

// why: A93: the answer knows the network's containers, and says so where it can't.
func (a attached) why(t *testing.T) {
	t.Helper()
	egress := a.egress("10.0.0.0/8")
	file := a.s.write(t, spec{"egress": egress})
	remote := []string{"CONTAINER_HOST=tcp://127.0.0.1:1", "DOCKER_HOST=tcp://127.0.0.1:1"}
	for _, c := range []struct {
		target  string
		env     []string
		allowed bool
		says    string
	}{
		{"db:5432", nil, true, "by network " + a.network},
		{a.network + "-db", nil, true, "by network " + a.network},
		{at(a.sibling, 5432), nil, true, "by network " + a.network},
		{at(a.sibling6, 5432), nil, true, "by network " + a.network},
		{"nobody:5432", nil, false, "unlisted"},
		{at(a.gateway, 53), nil, false, "gateway"},
		{at(a.gateway6, 53), nil, false, ""},
		{"db:5432", remote, false, "allowed all the same if it is a container of the network"},
		{"api.allowed.example", remote, false, "allowed all the same"},
	} {
		r := a.s.call(t, call{Net: a.w, Env: c.env}, "why", "--spec", file, c.target)
		if want := map[bool]int{true: 0, false: 1}[c.allowed]; r.Code != want || !strings.Contains(r.Stdout, c.says) {
			t.Errorf("why %s: %+v, want %d with %q", c.target, r, want, c.says)
		}
		if c.env == nil && strings.Contains(r.Stdout, "does not tell") {
			t.Errorf("why %s: %s", c.target, r.Stdout)
		}
	}
	egress["network"] = "shimtest-nobody"
	if r := a.s.call(t, call{Net: a.w}, "why", "--spec", a.s.write(t, spec{"egress": egress}), "db").refused(t, shim.ReasonPolicy); !strings.Contains(r.Stderr, "no network") {
		t.Errorf("%+v", r)
	}
}
