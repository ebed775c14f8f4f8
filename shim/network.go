package shim

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/spec"
)

// networkName is what engines take for a network's name. Words that mean something else to
// an engine's client can't be one.
var networkName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$`)

var notNetworks = []string{"none", "host", "default", "private", "container", "ns", spec.PastaNetwork, spec.SlirpNetwork}

func checkNetworkName(name string) error {
	if name != "" && (!networkName.MatchString(name) || slices.Contains(notNetworks, name)) {
		return &Error{
			Reason: ReasonPolicy, Msg: fmt.Sprintf("egress.network %q is no network's name", name),
			Hint: "name one that `docker network ls` or `podman network ls` lists, or leave it out for the engine's default",
		}
	}
	return nil
}

// probeNetworkFacts asks the engine for the network that the file wants.
func (p *prepared) probeNetworkFacts(ctx context.Context) error {
	e := p.job.Harness.Egress
	if e.Mode != netpolicy.AttachNetwork {
		return nil
	}
	if err := checkNetworkName(e.Network); err != nil {
		return err
	}
	ipv6 := false
	for _, a := range e.Allow {
		r, err := netpolicy.ParseRule(a)
		ipv6 = ipv6 || err == nil && r.Name == "" && r.Prefix.Addr().Is6()
	}
	n, err := p.adapter.network(ctx, e.Network, ipv6)
	if err != nil {
		return err
	}
	if len(n.Subnets) == 0 {
		return unusable(n.Name, "the engine says of no subnet that it has")
	}
	own, err := hostAddrs()
	if err != nil {
		return err
	}
	n.Closed = append(n.Closed, own...)
	slices.SortFunc(n.Closed, netip.Addr.Compare)
	n.Closed = slices.Compact(n.Closed)
	if len(n.Closed) > maxClosed {
		return &Error{Reason: ReasonEgressSetup, Msg: fmt.Sprintf("the host has %d addresses; each is a packet rule, and mode network holds %d", len(n.Closed), maxClosed), Hint: "use allow-list"}
	}
	p.host.Network = &n
	return nil
}

// maxClosed bounds the rules for addresses of the host's.
const maxClosed = 512

// hostAddrs are this host's own addresses but those that are special everywhere.
func hostAddrs() ([]netip.Addr, error) {
	found, err := net.InterfaceAddrs()
	if err != nil {
		return nil, &Error{Reason: ReasonInternal, Msg: "the host's addresses", Err: err}
	}
	var out []netip.Addr
	for _, f := range found {
		n, ok := f.(*net.IPNet)
		if !ok {
			continue
		}
		if a, ok := netip.AddrFromSlice(n.IP); ok && !a.Unmap().IsLoopback() && !a.IsLinkLocalUnicast() {
			out = append(out, a.Unmap())
		}
	}
	return out, nil
}

func unusable(name, why string) error {
	return &Error{
		Reason: ReasonPolicy, Msg: fmt.Sprintf("egress.network %q can't be used: %s", name, why),
		Hint: "use a network of driver bridge, of which agentshim knows what is in it",
	}
}

// bridge makes the facts of a bridge's subnets and gateways, as the engine writes them.
// Where it names no gateway, the first address of the subnet is one.
func bridge(name, driver string, subnets [][2]string) (netpolicy.Network, error) {
	n := netpolicy.Network{Name: name, Interface: "eth0", Siblings: true}
	if driver != "bridge" {
		return n, unusable(name, fmt.Sprintf("its driver is %q", driver))
	}
	for _, s := range subnets {
		p, err := netip.ParsePrefix(s[0])
		if err != nil {
			return n, unusable(name, fmt.Sprintf("subnet %q", s[0]))
		}
		text, _, _ := strings.Cut(s[1], "/")
		gateway, err := netip.ParseAddr(text)
		if text == "" {
			gateway, err = p.Masked().Addr().Next(), nil
		}
		if err != nil {
			return n, unusable(name, fmt.Sprintf("gateway %q", s[1]))
		}
		n.Subnets, n.Closed = append(n.Subnets, p.Masked()), append(append(n.Closed, gateway), broadcasts(p)...)
	}
	return n, nil
}

// broadcasts are a subnet's first and last address, by which datagrams come to the bridge, too,
// and so to what listens on all addresses of the host: fib_add_ifaddr.
func broadcasts(p netip.Prefix) []netip.Addr {
	if !p.Addr().Is4() || p.Bits() > 30 { // RFC 3021
		return nil
	}
	first := p.Masked().Addr()
	b := first.As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])|math.MaxUint32>>p.Bits())
	return []netip.Addr{first, netip.AddrFrom4(b)}
}

// noNetwork is the refusal for a network that the engine does not know.
func noNetwork(engine, name string) error {
	return &Error{
		Reason: ReasonPolicy, Msg: fmt.Sprintf("there is no network %q", name),
		Hint: fmt.Sprintf("`%s network create %s` makes it; `%s network ls` lists those there are", engine, name, engine),
	}
}

// dockerResolver is where Docker answers containers of a network of the user's: on their
// own loopback, and for names outside as the host.
var dockerResolver = netip.MustParseAddr("127.0.0.11")

func (d *docker) network(ctx context.Context, name string, _ bool) (netpolicy.Network, error) {
	if name == "" {
		name = "bridge"
	}
	var got struct {
		Name, Driver string
		EnableIPv6   bool
		IPAM         struct {
			Config []struct{ Subnet, Gateway string }
		}
	}
	if err := d.api.get(ctx, "/networks/"+name, &got); err != nil {
		if errors.Is(err, errNotFound) {
			err = noNetwork(spec.Docker, name)
		}
		return netpolicy.Network{}, err
	}
	if got.Name != name { // it also takes the beginning of an ID
		return netpolicy.Network{}, noNetwork(spec.Docker, name)
	}
	var subnets [][2]string
	for _, c := range got.IPAM.Config {
		if got.EnableIPv6 || !strings.Contains(c.Subnet, ":") {
			subnets = append(subnets, [2]string{c.Subnet, c.Gateway})
		}
	}
	n, err := bridge(name, got.Driver, subnets)
	n.Resolver = dockerResolver
	return n, err
}

// maxSiblings bounds what one look at a network asks.
const maxSiblings = 256

// endpoint is a container's part of a network, as both engines tell it.
type endpoint struct {
	IPAddress, GlobalIPv6Address string
	Aliases, DNSNames            []string
}

// add enters the addresses under each name, and under it with the network's behind.
func (e endpoint) add(found map[string][]netip.Addr, network string, names ...string) {
	for _, name := range slices.Concat(names, e.Aliases, e.DNSNames) {
		name = strings.ToLower(strings.TrimPrefix(name, "/"))
		for _, text := range []string{e.IPAddress, e.GlobalIPv6Address} {
			a, err := netip.ParseAddr(text)
			if err != nil || name == "" {
				continue
			}
			for _, full := range []string{name, name + "." + strings.ToLower(network)} {
				if !slices.Contains(found[full], a) {
					found[full] = append(found[full], a)
				}
			}
		}
	}
}

// siblingContainer is one container as both engines tell it.
type siblingContainer struct {
	Name            string
	NetworkSettings struct{ Networks map[string]endpoint }
}

func (d *docker) siblings(ctx context.Context, network string) (map[string][]netip.Addr, error) {
	filters, err := json.Marshal(map[string][]string{"network": {network}, "status": {"running"}})
	if err != nil {
		return nil, err
	}
	body, err := d.api.call(ctx, "GET", "/containers/json", url.Values{"filters": {string(filters)}}, nil)
	if err != nil {
		return nil, err
	}
	var list []struct{ ID string }
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, err
	}
	found := map[string][]netip.Addr{}
	for _, c := range list[:min(len(list), maxSiblings)] {
		var one siblingContainer
		if err := d.api.get(ctx, "/containers/"+c.ID+"/json", &one); err != nil {
			if errors.Is(err, errNotFound) {
				continue // it is gone again
			}
			return nil, err
		}
		one.NetworkSettings.Networks[network].add(found, network, one.Name)
	}
	return found, nil
}

func (p *podman) network(ctx context.Context, name string, ipv6 bool) (netpolicy.Network, error) {
	if name == "" && p.engine.Rootless {
		return p.userNetwork(ipv6)
	}
	if name == "" {
		name = "podman"
	}
	out, err := runQuestion(ctx, p.runner, p.Command("network", "inspect", name))
	var failed *EngineError
	if errors.As(err, &failed) && strings.Contains(failed.Stderr, "not found") {
		return netpolicy.Network{}, noNetwork(spec.Podman, name)
	}
	if err != nil {
		return netpolicy.Network{}, err
	}
	var got []struct {
		Name, Driver string
		Subnets      []struct{ Subnet, Gateway string }
	}
	if err := json.Unmarshal(out.Stdout, &got); err != nil || len(got) != 1 || got[0].Name != name {
		return netpolicy.Network{}, &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("podman network inspect %s: %d networks", name, len(got)), Err: err}
	}
	var subnets [][2]string
	for _, s := range got[0].Subnets {
		subnets = append(subnets, [2]string{s.Subnet, s.Gateway})
	}
	n, err := bridge(name, got[0].Driver, subnets)
	if p.engine.Rootless {
		// All rootless bridges share a slirp4netns, whose host loopback the configuration may open.
		n.Closed = append(n.Closed, spec.UserNetwork(spec.SlirpNetwork, true).Closed...)
	}
	return n, err
}

// userNetwork is what Podman would take by itself; before Podman 5 it does not say.
func (p *podman) userNetwork(ipv6 bool) (netpolicy.Network, error) {
	switch p.rootlessNetwork {
	case "", spec.SlirpNetwork:
		return spec.UserNetwork(spec.SlirpNetwork, ipv6), nil
	case spec.PastaNetwork:
		return spec.UserNetwork(spec.PastaNetwork, ipv6), nil
	}
	return netpolicy.Network{}, &Error{
		Reason: ReasonPolicy, Msg: fmt.Sprintf("rootless containers get their network from %q, of which agentshim does not know how to close the host's loopback", printable(p.rootlessNetwork)),
		Hint: "in containers.conf set default_rootless_network_cmd to pasta or slirp4netns, or name a network that `podman network ls` lists",
	}
}

func (p *podman) siblings(ctx context.Context, network string) (map[string][]netip.Addr, error) {
	out, err := p.runner.Run(ctx, p.Command("ps", "--quiet", "--no-trunc", "--filter", "network="+network))
	ids := strings.Fields(string(out.Stdout))
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	// One that is gone again makes the status bad, and leaves the others in the answer.
	out, err = p.runner.Run(ctx, p.Command(append([]string{"inspect", "--type=container"}, ids[:min(len(ids), maxSiblings)]...)...))
	var list []siblingContainer
	var failed *EngineError
	if err != nil && !(errors.As(err, &failed) && strings.Contains(failed.Stderr, "no such")) {
		return nil, err
	}
	if err := json.Unmarshal(out.Stdout, &list); err != nil {
		return nil, fmt.Errorf("podman inspect: %w", err)
	}
	found := map[string][]netip.Addr{}
	for _, one := range list {
		one.NetworkSettings.Networks[network].add(found, network, one.Name)
	}
	return found, nil
}

// siblingNames answers the sandbox's questions for other containers by asking the engine
// itself: the engines' resolvers ask on, and would carry what an agent puts into names.
type siblingNames struct {
	adapter Adapter
	network netpolicy.Network
	ctx     context.Context
	log     func(format string, args ...any)

	mu     sync.Mutex
	found  map[string][]netip.Addr
	failed error
	asked  time.Time
}

// Bounds of asking the engine, which an agent makes happen by asking for names.
const (
	siblingsAge     = 2 * time.Second
	siblingsTimeout = 5 * time.Second
)

// lookUp gives a sibling's addresses: those that are the network's own and not closed. An
// error says that the engine did not tell.
func (s *siblingNames) lookUp(name string) ([]netip.Addr, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.asked) > siblingsAge {
		ctx, cancel := context.WithTimeout(s.ctx, siblingsTimeout)
		defer cancel()
		if s.found, s.failed = s.adapter.siblings(ctx, s.network.Name); s.failed != nil {
			s.log("network %s: %v", s.network.Name, s.failed)
		}
		s.asked = time.Now()
	}
	var out []netip.Addr
	for _, a := range s.found[name] {
		if s.network.Own(a) {
			out = append(out, a)
		}
	}
	return out, s.failed
}

// siblingNames is nil where there are no siblings.
func (c *container) siblingNames(ctx context.Context) func(string) ([]netip.Addr, error) {
	n := c.p.plan.Egress.Network
	if n == nil || !n.Siblings {
		return nil
	}
	return (&siblingNames{adapter: c.p.adapter, network: *n, ctx: ctx, log: c.p.job.Log}).lookUp
}

// watch ends the run when somebody changes the sandbox's network.
func (e *egress) watch(w *netpolicy.Watch) {
	defer close(e.watched)
	if w == nil {
		return
	}
	err := w.Changed()
	if err == nil || errors.Is(err, netpolicy.ErrGone) && e.over.Load() {
		return
	}
	e.changed = err
	e.lost()
}
