package shim

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/spec"
)

// builtHelper is the helper's bytes as make build makes them.
var builtHelper = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "agentshim-test-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "agentshim-netns")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", program, "../cmd/agentshim-netns")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	return os.ReadFile(program)
})

// box is a process in a network namespace of its own.
type box struct {
	pid    string
	netns  string
	cookie uint64
}

func newBox(t *testing.T) box {
	t.Helper()
	if os.Geteuid() != 0 {
		if os.Getenv("AGENTSHIM_REQUIRE_ALL") != "" {
			t.Fatal("AGENTSHIM_REQUIRE_ALL is set and this is not root")
		}
		t.Skip("needs root")
	}
	cmd := exec.Command("sleep", "100")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	b := box{pid: strconv.Itoa(cmd.Process.Pid)}
	err := b.in(func() (err error) {
		if b.netns, err = netpolicy.ThreadNetns(); err != nil {
			return err
		}
		b.cookie, err = netpolicy.NetCookie()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// in runs f on a thread in the box's network namespace.
func (b box) in(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		ns, err := os.Open("/proc/" + b.pid + "/ns/net")
		if err == nil {
			defer ns.Close()
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// handOver is what the helper does, without the helper: change may alter the report.
func (b box) handOver(socket string, change func(*netpolicy.Report)) error {
	return b.in(func() error {
		conn, err := netpolicy.Dial(socket)
		if err != nil {
			return err
		}
		defer conn.Close()
		sockets, report, err := netpolicy.Apply()
		change(&report)
		return errors.Join(err, netpolicy.Send(conn, sockets, report, err))
	})
}

// wayContainer is a run's container whose init has said hello.
func wayContainer(t *testing.T, way string, a Adapter) *container {
	t.Helper()
	return &container{
		p: &prepared{
			plan: spec.Plan{
				Egress: netpolicy.Policy{Mode: netpolicy.Open}, EgressWay: way,
				EgressRules: strings.Split(strings.TrimSuffix(netpolicy.SandboxRules(true).Iptables(), "\n"), "\n"),
				Image:       spec.Image{ID: "sha256:1234", Env: []string{"GODEBUG=x"}}, Limits: spec.Limits{PIDs: 1},
			},
			adapter: a,
		},
		paths: spec.RunPaths{ID: "0123456789abcdef", Dir: t.TempDir()},
	}
}

func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

func putHelper(t *testing.T, c *container) {
	t.Helper()
	b, err := builtHelper()
	if err != nil {
		t.Fatal(err)
	}
	write(t, c.paths.Helper(), string(b), 0o555)
}

// open calls openWay and checks that a refusal leaves nothing.
func (b box) open(t *testing.T, c *container) (netpolicy.Listeners, error) {
	t.Helper()
	before := openSockets(t)
	l, err := c.openWay(t.Context(), b.cookie, b.netns)
	if _, serr := os.Lstat(c.paths.Socket()); !errors.Is(serr, os.ErrNotExist) {
		t.Errorf("the socket's file is left: %v", serr)
	}
	if err == nil {
		t.Cleanup(l.Close)
		return l, nil
	}
	if !errors.Is(err, ReasonEgressSetup) || HintOf(err) == "" || l != (netpolicy.Listeners{}) {
		t.Errorf("%+v %v, hint %q", l, err, HintOf(err))
	}
	for link := range openSockets(t) {
		if !before[link] {
			t.Errorf("%s is left open", link)
		}
	}
	return l, err
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

func TestWayDirect(t *testing.T) {
	b := newBox(t)
	c := wayContainer(t, spec.WayDirect, &podman{runner: Exec{}})
	putHelper(t, c)
	write(t, c.paths.PIDFile(), b.pid+"\n", 0o600)
	l, err := b.open(t, c)
	if err != nil {
		t.Fatal(err)
	}
	if got := l.Relay.Addr().String(); got != netpolicy.RelayListener.String() {
		t.Error(got)
	}
}

// TestWayDirectDocker asks the daemon for the pid.
func TestWayDirectDocker(t *testing.T) {
	b := newBox(t)
	id := strings.Repeat("ab", 32)
	daemon := startDaemon(t, map[string]http.HandlerFunc{"/containers/" + id + "/json": answer(`{"State":{"Pid":` + b.pid + `}}`)})
	c := wayContainer(t, spec.WayDirect, &docker{runner: Exec{}, api: newDockerAPI(daemon.socket)})
	putHelper(t, c)
	write(t, filepath.Join(c.paths.Dir, "cid"), id, 0o600)
	if _, err := b.open(t, c); err != nil {
		t.Fatal(err)
	}
}

// TestWayDirectFails: A45, what does nothing is an error, and says what.
func TestWayDirectFails(t *testing.T) {
	b, other := newBox(t), newBox(t)
	for name, tc := range map[string]struct {
		spoil func(c *container)
		want  string
	}{
		"no helper":       {func(c *container) { os.Remove(c.paths.Helper()) }, "no such file"},
		"no pid":          {func(c *container) { os.Remove(c.paths.PIDFile()) }, "no such file"},
		"pid 0":           {func(c *container) { write(t, c.paths.PIDFile(), "0", 0o600) }, `process "0"`},
		"another process": {func(c *container) { write(t, c.paths.PIDFile(), other.pid, 0o600) }, "is in net:["},
		"silent helper":   {func(c *container) { fakeHelper(t, c, "exit 0") }, "hand-over refused"},
		"failing helper":  {func(c *container) { fakeHelper(t, c, "echo why >&2; exit 3") }, "why"},
		"no run folder":   {func(c *container) { os.RemoveAll(c.paths.Dir) }, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			c := wayContainer(t, spec.WayDirect, &podman{runner: Exec{}})
			putHelper(t, c)
			write(t, c.paths.PIDFile(), b.pid, 0o600)
			tc.spoil(c)
			if _, err := b.open(t, c); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
}

// fakeHelper replaces the helper by a shell script.
func fakeHelper(t *testing.T, c *container, text string) {
	t.Helper()
	os.Remove(c.paths.Helper())
	write(t, c.paths.Helper(), "#!/bin/sh\n"+text+"\n", 0o755)
}

// TestWayUserns: the helper runs below podman unshare.
func TestWayUserns(t *testing.T) {
	b := newBox(t)
	r := script(t)
	c := wayContainer(t, spec.WayUserns, &podman{runner: r, engine: spec.Engine{Client: "/podman"}})
	write(t, c.paths.PIDFile(), "77\n", 0o600)
	socket := c.paths.Socket()
	r.calls = []scriptedCall{{
		argv: []string{"/podman", "unshare", "--", c.paths.Helper(), "netns/1", socket, b.netns, "77"},
		check: func(t *testing.T, _ Command) {
			if err := b.handOver(socket, func(*netpolicy.Report) {}); err != nil {
				t.Error(err)
			}
		},
	}}
	if _, err := b.open(t, c); err != nil {
		t.Fatal(err)
	}
}

// containerCalls is a scripted run of the helper's container.
func containerCalls(t *testing.T, b box, err error, change func(*netpolicy.Report), more ...scriptedCall) *container {
	t.Helper()
	r := script(t)
	c := wayContainer(t, spec.WayContainer, &docker{runner: r, engine: spec.Engine{Client: "/docker", Socket: "/s"}, config: "/c"})
	id := strings.Repeat("ab", 32)
	write(t, filepath.Join(c.paths.Dir, "cid"), id, 0o600)
	argv, aerr := c.p.plan.HelperArgv(c.paths, id, b.netns)
	if aerr != nil {
		t.Fatal(aerr)
	}
	run := scriptedCall{argv: c.p.adapter.Command(argv...).Argv(), err: err}
	if change != nil {
		run.check = func(t *testing.T, _ Command) {
			if err := b.handOver(c.paths.Socket(), change); err != nil {
				t.Error(err)
			}
		}
	}
	r.calls = append([]scriptedCall{run}, more...)
	return c
}

// removal is the call that removes the helper's container.
var removal = scriptedCall{argv: []string{
	"/docker", "--host", "unix:///s", "--config", "/c", "rm", "--force", "--volumes", "agentshim-0123456789abcdef-netns",
}}

func TestWayContainer(t *testing.T) {
	b := newBox(t)
	if _, err := b.open(t, containerCalls(t, b, nil, func(*netpolicy.Report) {})); err != nil {
		t.Fatal(err)
	}
}

// TestWayContainerFails: the container is removed by name, whatever the client says.
func TestWayContainerFails(t *testing.T) {
	b := newBox(t)
	failed := failedCall(125, "docker: Error response from daemon: No such container: x\x1b[31m", "docker", "run")
	if _, err := b.open(t, containerCalls(t, b, failed, nil, removal)); err == nil || !strings.Contains(err.Error(), "No such container") || strings.Contains(err.Error(), "\x1b") {
		t.Errorf("%q", err)
	}
	stuck := removal
	stuck.err = failedCall(1, "no answer", "docker", "rm")
	if _, err := b.open(t, containerCalls(t, b, failed, nil, stuck)); !errors.Is(err, ReasonEngineLost) {
		t.Error(err)
	}
}

// TestWayReportDiffers: what the kernel holds is not what the plan says.
func TestWayReportDiffers(t *testing.T) {
	b := newBox(t)
	c := containerCalls(t, b, nil, func(r *netpolicy.Report) {
		r.Rules = strings.Replace(r.Rules, ":OUTPUT DROP", ":OUTPUT ACCEPT", 1)
	})
	if _, err := b.open(t, c); !errors.Is(err, netpolicy.ErrReadBack) {
		t.Error(err)
	}
}

// TestWayHelperSaysWhy: its own words, also when the client's are others.
func TestWayHelperSaysWhy(t *testing.T) {
	b := newBox(t)
	err := b.in(netpolicy.AddWay)
	if err != nil {
		t.Fatal(err)
	}
	c := containerCalls(t, b, failedCall(1, "Error: exit status 1", "docker", "run"), nil, removal)
	c.p.adapter.(*docker).runner.(*scriptedRunner).calls[0].check = func(t *testing.T, _ Command) {
		_ = b.handOver(c.paths.Socket(), func(*netpolicy.Report) {})
	}
	if _, err := b.open(t, c); err == nil || !strings.Contains(err.Error(), netpolicy.ErrNotFresh.Error()) {
		t.Error(err)
	}
}

func TestWayNeedsCookies(t *testing.T) {
	c := wayContainer(t, spec.WayDirect, &podman{runner: script(t)})
	if _, err := c.openWay(t.Context(), 0, "net:[1]"); !errors.Is(err, ReasonEgressSetup) || !strings.Contains(HintOf(err), "5.14") {
		t.Errorf("%v, hint %q", err, HintOf(err))
	}
}

// TestWayIsBounded: a helper that hangs is ended, and so is one whose run ends.
func TestWayIsBounded(t *testing.T) {
	hang := Command{Path: "/bin/sleep", Args: []string{"100"}}
	if err := runBounded(t.Context(), Exec{}, 20*time.Millisecond, hang); err == nil || !strings.Contains(err.Error(), "no end in 20ms") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	if err := runBounded(ctx, Exec{}, time.Minute, hang); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestReclaimKnowsItsContainers: a leftover container with the run's label goes only with
// a program of agentshim's.
func TestReclaimKnowsItsContainers(t *testing.T) {
	for inspected, removed := range map[string]bool{
		`/.agentshim-init ["wire/1"]`:                                      true,
		`/.agentshim-init ["cache/1","/.agentshim-cache","1000","1000"]`:   true,
		`/.agentshim-init ["cache/2","/.agentshim-cache","1000","1000"]`:   false,
		`/.agentshim-netns ["netns/1","/.agentshim-netns.sock","net:[1]"]`: true,
		`/.agentshim-netns ["netns/2","/.agentshim-netns.sock","net:[1]"]`: false,
		`/bin/sh ["/.agentshim-netns [\"netns/1\","]`:                      false,
	} {
		prefix := []string{"/docker", "--host", "unix:///s", "--config", "/c"}
		calls := []scriptedCall{
			{argv: append(prefix[:5:5], "ps", "--all", "--quiet", "--no-trunc", "--filter", "label=agentshim.run=r"), out: "id\n"},
			{argv: append(prefix[:5:5], "inspect", "--type", "container", "--format", "{{.Path}} {{json .Args}}", "id"), out: inspected + "\n"},
		}
		if removed {
			calls = append(calls, scriptedCall{argv: append(prefix[:5:5], "rm", "--force", "--volumes", "id")})
		}
		d := &docker{runner: script(t, calls...), engine: spec.Engine{Kind: spec.Docker, Client: "/docker", Socket: "/s"}, config: "/c"}
		left, err := removeByLabel(t.Context(), d, "r", false)
		if err != nil || len(left) != 1 || (left[0].Kept == "") != removed {
			t.Errorf("%s: %+v %v", inspected, left, err)
		}
	}
}
