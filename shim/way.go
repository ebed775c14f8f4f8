package shim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/spec"
)

// Bounds of the waits on the helper.
const (
	// helperTimeout is from the sandbox's hello to the helper's report.
	helperTimeout          = 10 * time.Second
	helperContainerTimeout = 30 * time.Second
	// handoverTimeout is for what needs no work any more.
	handoverTimeout = 2 * time.Second
)

// way is the making of the one way out of a sandbox's network namespace. Its helper
// starts beside the engine where it needs nothing of the sandbox for that, and waits
// for its order.
type way struct {
	c        *container
	listener *net.UnixListener
	// stop ends the helper; made has its container made, wanted has it started.
	stop, made, wanted func()
	// ended is closed with the helper's end: failed is why it failed, left that its
	// container may still be there.
	ended        chan struct{}
	failed, left error
}

// startWay begins to make the plan's way out; nil is none. unpack puts the helper's file
// in place. The caller closes the way.
func (c *container) startWay(ctx context.Context, unpack func(path string) error) (*way, error) {
	if !c.p.plan.Egress.HasGateway() {
		return nil, nil
	}
	l, err := netpolicy.Listen(c.paths.Socket())
	if err != nil {
		return nil, wayFailed(c.p.plan.EgressWay, err)
	}
	w := &way{c: c, listener: l, ended: make(chan struct{})}
	ctx, w.stop = context.WithCancel(context.WithoutCancel(ctx))
	made, wanted := make(chan struct{}), make(chan struct{})
	w.made, w.wanted = sync.OnceFunc(func() { close(made) }), sync.OnceFunc(func() { close(wanted) })
	go func() {
		defer close(w.ended)
		defer l.Close() // nobody connects any more
		if w.failed = unpack(c.paths.Helper()); w.failed == nil {
			w.helper(ctx, made, wanted)
		}
	}()
	return w, nil
}

// helper runs the helper by the plan's way and waits for its end.
func (w *way) helper(ctx context.Context, made, wanted <-chan struct{}) {
	a, args := w.c.p.adapter, []string{spec.HelperArg, w.c.paths.Socket()}
	switch w.c.p.plan.EgressWay {
	case spec.WayContainer:
		select {
		case <-made:
			w.helperContainer(ctx, wanted)
		case <-ctx.Done():
		}
	case spec.WayUserns:
		_, w.failed = a.Runner().Run(ctx, a.Command(append([]string{"unshare", "--", w.c.paths.Helper()}, args...)...))
	default:
		_, w.failed = a.Runner().Run(ctx, Command{Path: w.c.paths.Helper(), Args: args})
	}
}

// containerMade is for the moment when the run's container has its ID, and was not started.
func (w *way) containerMade() {
	if w != nil {
		w.made()
	}
}

// helperContainer runs the helper in a container, which the daemon removes at its end. It
// is made while the run's own starts, and started when that one is there to be joined.
// ctx cuts no call short: the daemon would go on.
func (w *way) helperContainer(ctx context.Context, wanted <-chan struct{}) {
	d, ok := w.c.p.adapter.(*docker)
	if !ok {
		w.failed = errors.New("only Docker has it")
		return
	}
	name := w.c.paths.HelperName()
	if w.failed = w.createHelper(ctx, d, name); w.failed == nil {
		select {
		case <-wanted:
			w.failed = bounded(ctx, func(ctx context.Context) error {
				return d.api.post(ctx, "/containers/"+name+"/start", nil, nil)
			})
		case <-ctx.Done():
			w.failed = context.Cause(ctx)
		}
	}
	err := w.failed
	if err == nil {
		err = bounded(ctx, func(ctx context.Context) error {
			return d.api.post(ctx, "/containers/"+name+"/wait", url.Values{"condition": {"removed"}}, nil)
		})
	}
	if err != nil && !errors.Is(err, errNotFound) {
		w.left = removeContainer(context.WithoutCancel(ctx), d, name)
	}
}

func (w *way) createHelper(ctx context.Context, d *docker, name string) error {
	create, err := w.c.p.plan.HelperContainer(w.c.paths, w.c.id())
	if err != nil {
		return err
	}
	return bounded(ctx, func(ctx context.Context) error {
		_, err := d.api.create(ctx, name, create)
		return err
	})
}

// bounded calls f with helperContainerTimeout, whether ctx ends or not.
func bounded(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), helperContainerTimeout)
	defer cancel()
	return f(ctx)
}

// close ends the helper. An error says that its container may still be there.
func (w *way) close() error {
	if w == nil {
		return nil
	}
	w.stop()
	<-w.ended
	return w.left
}

// open opens the way out of the sandbox's network namespace, given by its cookie and
// link as init reported them: the listeners are open there, the plan's packet rules
// are in force and were read back, and the helper's process is gone. With an error,
// which is always egress-setup, nothing of the sandbox's is open here.
func (w *way) open(ctx context.Context, cookie uint64, netns string) (netpolicy.Listeners, netpolicy.Report, error) {
	if cookie == 0 {
		return netpolicy.Listeners{}, netpolicy.Report{}, &Error{
			Reason: ReasonEgressSetup, Msg: "this kernel can't tell which network namespace a socket is in (SO_NETNS_COOKIE)",
			Hint: "every egress.mode but deny-all needs Linux 5.14",
		}
	}
	listeners, report, err := w.handOver(ctx, cookie, netns)
	want := w.c.p.plan.RulesText()
	switch {
	case err == nil && report.Error != "":
		err = errors.New(printable(report.Error))
	case err == nil && report.Rules != want:
		err = fmt.Errorf("%w: %s", netpolicy.ErrReadBack, firstDifference(want, report.Rules))
	}
	if err != nil {
		listeners.Close()
		return netpolicy.Listeners{}, netpolicy.Report{}, wayFailed(w.c.p.plan.EgressWay, err)
	}
	return listeners, report, nil
}

// handOver gives the helper its order and takes what it sends. A helper that failed
// without a report says more than the connection that it left.
func (w *way) handOver(ctx context.Context, cookie uint64, netns string) (netpolicy.Listeners, netpolicy.Report, error) {
	defer os.Remove(w.c.paths.Socket())
	defer context.AfterFunc(ctx, w.stop)()
	plan := w.c.p.plan
	order := netpolicy.Order{Netns: netns, Setup: netpolicy.Setup{
		Renderer: plan.EgressRenderer, Rules: plan.Egress.Rules(w.c.p.host.Machine.IPv6), Network: plan.Egress.Network,
	}}
	timeout := helperTimeout
	if w.c.p.plan.EgressWay == spec.WayContainer {
		timeout = helperContainerTimeout
		w.made()
		w.wanted()
	} else {
		var err error
		if order.PID, err = w.c.hostPID(); err != nil {
			return netpolicy.Listeners{}, netpolicy.Report{}, err
		}
	}
	listeners, report, err := w.exchange(order, cookie, timeout)
	if err != nil && within(handoverTimeout, w.ended) && w.failed != nil {
		err = w.failed
	}
	return listeners, report, err
}

func (w *way) exchange(order netpolicy.Order, cookie uint64, timeout time.Duration) (netpolicy.Listeners, netpolicy.Report, error) {
	helper, err := netpolicy.AcceptPeer(w.listener, timeout)
	if err != nil {
		return netpolicy.Listeners{}, netpolicy.Report{}, err
	}
	defer helper.Close()
	if err := helper.Order(order, handoverTimeout); err != nil {
		return netpolicy.Listeners{}, netpolicy.Report{}, err
	}
	listeners, report, err := helper.Receive(cookie, order.Network, timeout)
	if err == nil {
		err = helper.AwaitEnd(handoverTimeout)
	}
	if err != nil {
		listeners.Close()
		return netpolicy.Listeners{}, netpolicy.Report{}, err
	}
	return listeners, report, nil
}

// firstDifference names the first line that two texts don't have both.
func firstDifference(want, got string) string {
	a, b := strings.Split(want, "\n"), strings.Split(got, "\n")
	i := 0
	for i < min(len(a), len(b)) && a[i] == b[i] {
		i++
	}
	line := func(lines []string) string {
		if i < len(lines) {
			return strconv.Quote(lines[i])
		}
		return "nothing"
	}
	return fmt.Sprintf("line %d: want %s, got %s", i+1, line(a), line(b))
}

func (c *container) id() string { return readContainerID(cidFile(c.paths)) }

// hostPID is a process of the sandbox as the host numbers it. Podman writes it before
// the container starts, Docker's daemon told it with its account of the container. The
// helper checks that the number still means that process's network namespace.
func (c *container) hostPID() (int, error) {
	pid := c.pid
	if c.p.plan.Engine.Kind == spec.Podman {
		b, err := os.ReadFile(c.paths.PIDFile())
		if err != nil {
			return 0, err
		}
		if pid, err = strconv.Atoi(strings.TrimSpace(string(b))); err != nil {
			return 0, err
		}
	}
	if pid <= 0 {
		return 0, fmt.Errorf("the engine says that the sandbox is process %d: %w", pid, unix.ESRCH)
	}
	return pid, nil
}

// wayHints are remedies for what a helper says, first match wins.
var wayHints = []struct{ text, hint string }{
	{"xtables lock", "look for the program that holds /run/xtables.lock; iptables before 1.8.6 knows no other lock"},
	{"iptables", "install iptables, with ip6tables and both's -restore, or leave egress.renderer out; as root: `modprobe -a iptable_raw iptable_nat iptable_filter ip6table_raw ip6table_filter xt_conntrack xt_limit xt_CT xt_REDIRECT`"},
	{"nftables", "egress.renderer iptables needs no nf_tables; else as root: `modprobe -a nf_tables nft_chain_nat nft_redir nft_ct nft_limit`, or a kernel with CONFIG_NF_TABLES, CONFIG_NFT_NAT, CONFIG_NFT_REDIR, CONFIG_NFT_CT and CONFIG_NFT_LIMIT"},
	{"not a fresh one", "look for what adds it to containers without a network: an OCI hook, a CNI plugin, a wrapper around the runtime"},
	{"operation not permitted", ""},
	{"permission denied", ""},
}

// permissionHints are what each way needs.
var permissionHints = map[string]string{
	spec.WayDirect:    "root needs CAP_SYS_ADMIN, CAP_SYS_PTRACE and CAP_NET_ADMIN to enter a container's network: run agentshim on the host, not in a container",
	spec.WayUserns:    "`podman unshare true` must work: check /etc/subuid and /etc/subgid, then run `podman system migrate`",
	spec.WayContainer: "the daemon must let a container have CAP_NET_ADMIN: look for an authorization plugin or a security module",
}

func wayFailed(way string, err error) error {
	text := strings.ToLower(err.Error())
	hint := "`agentshim doctor` looks at what it needs; egress deny-all needs none of it"
	for _, known := range wayHints {
		if strings.Contains(text, known.text) {
			hint = known.hint
			break
		}
	}
	if hint == "" {
		hint = permissionHints[way]
	}
	return &Error{Reason: ReasonEgressSetup, Msg: "the sandbox's way out (" + way + ")", Hint: hint, Err: err}
}
