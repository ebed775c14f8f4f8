package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/spec"
)

// Bounds of the waits on the helper.
const (
	helperTimeout          = 10 * time.Second
	helperContainerTimeout = 30 * time.Second
	// handoverTimeout is for a message that has been sent.
	handoverTimeout = 2 * time.Second
)

// openWay makes the one way out of the sandbox's network namespace, given by its
// cookie and link as init reported them: the listeners are open there, the plan's
// packet rules are in force and were read back. The helper, and the container it ran
// in, are gone. With an error, which is always egress-setup, nothing of the sandbox's
// is open here.
func (c *container) openWay(ctx context.Context, cookie uint64, netns string) (netpolicy.Listeners, error) {
	if cookie == 0 {
		return netpolicy.Listeners{}, &Error{
			Reason: ReasonEgressSetup, Msg: "this kernel can't tell which network namespace a socket is in (SO_NETNS_COOKIE)",
			Hint: "egress allow-list and open need Linux 5.14; deny-all works here",
		}
	}
	listeners, report, err := c.handOver(ctx, cookie, netns)
	want := c.p.plan.RulesText()
	switch {
	case err == nil && report.Error != "":
		err = errors.New(printable(report.Error))
	case err == nil && report.Rules != want:
		err = fmt.Errorf("%w: %s", netpolicy.ErrReadBack, firstDifference(want, report.Rules))
	}
	if err != nil {
		listeners.Close()
		return netpolicy.Listeners{}, wayFailed(c.p.plan.EgressWay, err)
	}
	return listeners, nil
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

// handOver runs the helper to its end and takes what it sent: a message waits in the
// socket after its sender is gone. The helper's own words come before its exit code.
func (c *container) handOver(ctx context.Context, cookie uint64, netns string) (netpolicy.Listeners, netpolicy.Report, error) {
	socket := c.paths.Socket()
	l, err := netpolicy.Listen(socket)
	if err != nil {
		return netpolicy.Listeners{}, netpolicy.Report{}, err
	}
	defer os.Remove(socket)
	failed := c.runHelper(ctx, netns)
	wait := handoverTimeout
	if failed != nil {
		wait = 100 * time.Millisecond
	}
	listeners, report, err := netpolicy.Receive(l, cookie, wait)
	if failed != nil && report.Error == "" {
		listeners.Close()
		return netpolicy.Listeners{}, netpolicy.Report{}, failed
	}
	return listeners, report, err
}

// runHelper runs the helper by the plan's way and waits for its end.
func (c *container) runHelper(ctx context.Context, netns string) error {
	if c.p.plan.EgressWay == spec.WayContainer {
		return c.runHelperContainer(ctx, netns)
	}
	pid, err := c.hostPID(ctx)
	if err != nil {
		return err
	}
	args := []string{spec.HelperArg, c.paths.Socket(), netns, pid}
	cmd := Command{Path: c.paths.Helper(), Args: args}
	if c.p.plan.EgressWay == spec.WayUserns {
		cmd = c.p.adapter.Command(append([]string{"unshare", "--", cmd.Path}, args...)...)
	}
	return runBounded(ctx, c.p.adapter.Runner(), helperTimeout, cmd)
}

// runHelperContainer: ctx ends the sandbox, and so the helper.
func (c *container) runHelperContainer(ctx context.Context, netns string) error {
	argv, err := c.p.plan.HelperArgv(c.paths, c.id(), netns)
	if err != nil {
		return err
	}
	return runOneShot(ctx, c.p.adapter, c.paths.HelperName(), argv)
}

// runOneShot runs a container of agentshim's own, of that name, to its end. It ends with
// ctx only after that: a client killed while the engine creates a container leaves it behind.
func runOneShot(ctx context.Context, a Adapter, name string, argv []string) error {
	err := runBounded(context.WithoutCancel(ctx), a.Runner(), helperContainerTimeout, a.Command(argv...))
	if err == nil {
		return context.Cause(ctx)
	}
	return errors.Join(err, removeContainer(context.WithoutCancel(ctx), a, name))
}

// runBounded ends the command when it runs longer than timeout.
func runBounded(ctx context.Context, r Runner, timeout time.Duration, cmd Command) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer startCountdown(timeout, func() { cancel(fmt.Errorf("no end in %v", timeout)) }).stop()
	_, err := r.Run(ctx, cmd)
	return err
}

func (c *container) id() string { return readContainerID(filepath.Join(c.paths.Dir, "cid")) }

// hostPID is a process of the sandbox as the host numbers it. Podman writes it before
// the container starts. The helper checks that the number still means that process's
// network namespace.
func (c *container) hostPID(ctx context.Context) (string, error) {
	if d, ok := c.p.adapter.(*docker); ok {
		var got dockerContainer
		err := d.api.get(ctx, "/containers/"+c.id()+"/json", &got)
		return strconv.Itoa(got.State.Pid), err
	}
	b, err := os.ReadFile(c.paths.PIDFile())
	return strings.TrimSpace(string(b)), err
}

// wayHints are remedies for what a helper says, first match wins.
var wayHints = []struct{ text, hint string }{
	{"nftables", "as root: `modprobe -a nf_tables nft_chain_nat nft_redir nft_ct nft_limit`, or a kernel with CONFIG_NF_TABLES, CONFIG_NFT_NAT, CONFIG_NFT_REDIR, CONFIG_NFT_CT and CONFIG_NFT_LIMIT"},
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
