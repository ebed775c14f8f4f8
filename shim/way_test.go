package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/seccomp"
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

// help runs the helper in the box's network namespace, as a container that shares it
// would.
func (b box) help(c *container) error {
	return b.in(func() error { return exec.Command(c.paths.Helper(), spec.HelperArg, c.paths.Socket()).Run() })
}

// wayContainer is a run's container whose init has said hello.
func wayContainer(t *testing.T, way string, a Adapter) *container {
	t.Helper()
	policy, err := seccomp.Compile(harness.Seccomp{}, seccomp.Target{Arch: runtime.GOARCH, Docker: true})
	if err != nil {
		t.Fatal(err)
	}
	return &container{
		p: &prepared{
			plan: spec.Plan{
				Engine: a.Engine(), Seccomp: policy,
				Egress: netpolicy.Policy{Mode: netpolicy.Open}, EgressWay: way,
				EgressRules: strings.Split(strings.TrimSuffix(netpolicy.SandboxRules(true).Iptables(), "\n"), "\n"),
				Image:       spec.Image{ID: "sha256:1234", Env: []string{"GODEBUG=x"}}, Limits: spec.Limits{PIDs: 1},
			},
			adapter: a, host: spec.Host{Machine: spec.Machine{IPv6: true}},
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

// inPlace is for a helper that the test has put there.
func inPlace(string) error { return nil }

func putHelper(t *testing.T, c *container) {
	t.Helper()
	b, err := builtHelper()
	if err != nil {
		t.Fatal(err)
	}
	write(t, c.paths.Helper(), string(b), 0o555)
}

// open makes the way and checks that a refusal leaves nothing.
func (b box) open(t *testing.T, c *container) (netpolicy.Listeners, error) {
	t.Helper()
	before := openSockets(t)
	w, err := c.startWay(t.Context(), inPlace)
	l := netpolicy.Listeners{}
	if err == nil {
		l, _, err = w.open(t.Context(), b.cookie, b.netns)
	}
	if _, serr := os.Lstat(c.paths.Socket()); !errors.Is(serr, os.ErrNotExist) {
		t.Errorf("the socket's file is left: %v", serr)
	}
	err = errors.Join(err, w.close())
	if err == nil {
		t.Cleanup(l.Close)
		return l, nil
	}
	if !errors.Is(err, ReasonEgressSetup) || HintOf(err) == "" || l != (netpolicy.Listeners{}) {
		t.Errorf("%+v %v, hint %q", l, err, HintOf(err))
	}
	if d, ok := c.p.adapter.(*docker); ok && d.api != nil {
		d.api.client.CloseIdleConnections()
	}
	isOld := func(link string, _ bool) bool { return before[link] }
	left := openSockets(t)
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		left = openSockets(t)
		if maps.DeleteFunc(left, isOld); len(left) == 0 {
			break // the daemon's ends close by themselves
		}
	}
	if len(left) > 0 {
		t.Errorf("left open: %v", left)
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
	c := wayContainer(t, spec.WayDirect, &podman{runner: Exec{}, engine: spec.Engine{Kind: spec.Podman}})
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

// TestWayDirectDocker takes the pid from the daemon's account of the container.
func TestWayDirectDocker(t *testing.T) {
	b := newBox(t)
	id := strings.Repeat("ab", 32)
	daemon := startDaemon(t, map[string]http.HandlerFunc{"/containers/" + id + "/json": answer(`{"State":{"Pid":` + b.pid + `}}`)})
	d := &docker{runner: Exec{}, engine: spec.Engine{Kind: spec.Docker}, api: newDockerAPI(daemon.socket)}
	c := wayContainer(t, spec.WayDirect, d)
	putHelper(t, c)
	c.compareInspected(d, id)
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
		"pid 0":           {func(c *container) { write(t, c.paths.PIDFile(), "0", 0o600) }, "process 0"},
		"not a pid":       {func(c *container) { write(t, c.paths.PIDFile(), "self", 0o600) }, "invalid syntax"},
		"no process":      {func(c *container) { write(t, c.paths.PIDFile(), gonePID(t), 0o600) }, "no such file"},
		"another process": {func(c *container) { write(t, c.paths.PIDFile(), other.pid, 0o600) }, "is in net:["},
		"silent helper":   {func(c *container) { fakeHelper(t, c, "exit 0") }, "hand-over refused"},
		"failing helper":  {func(c *container) { fakeHelper(t, c, "echo why >&2; exit 3") }, "why"},
		"no run folder":   {func(c *container) { os.RemoveAll(c.paths.Dir) }, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			c := wayContainer(t, spec.WayDirect, &podman{runner: Exec{}, engine: spec.Engine{Kind: spec.Podman}})
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

// gonePID is the number of a process that has ended.
func gonePID(t *testing.T) string {
	t.Helper()
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	return strconv.Itoa(gone.Process.Pid)
}

// TestWayUserns: the helper runs below podman unshare, and begins before it is ordered.
func TestWayUserns(t *testing.T) {
	b := newBox(t)
	r := script(t)
	c := wayContainer(t, spec.WayUserns, &podman{runner: r, engine: spec.Engine{Kind: spec.Podman, Client: "/podman"}})
	putHelper(t, c)
	write(t, c.paths.PIDFile(), b.pid+"\n", 0o600)
	args := []string{c.paths.Helper(), "netns/3", c.paths.Socket()}
	r.calls = []scriptedCall{{
		argv: append([]string{"/podman", "unshare", "--"}, args...),
		check: func(t *testing.T, _ Command) {
			if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
				t.Errorf("%v %s", err, out)
			}
		},
	}}
	if _, err := b.open(t, c); err != nil {
		t.Fatal(err)
	}
}

const helperName = "agentshim-0123456789abcdef-netns"

// helperDaemon is a daemon that runs the helper's container: each call is answered by
// its status, 0 for what a daemon does.
func helperDaemon(t *testing.T, b box, create, start, wait int, more ...scriptedCall) *container {
	t.Helper()
	var c *container
	ended := make(chan struct{})
	status := func(code int, good func(w http.ResponseWriter, r *http.Request)) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if code != 0 {
				w.WriteHeader(code)
				fmt.Fprint(w, `{"message":"no \u001b[31m luck"}`)
				return
			}
			good(w, r)
		}
	}
	daemon := startDaemon(t, map[string]http.HandlerFunc{
		"/containers/create": status(create, func(w http.ResponseWriter, r *http.Request) {
			var got spec.DockerContainer
			want, err := c.p.plan.HelperContainer(c.paths, c.id())
			if err := errors.Join(err, json.NewDecoder(r.Body).Decode(&got)); err != nil || r.Method != http.MethodPost || r.URL.Query().Get("name") != helperName || !reflect.DeepEqual(got, want) {
				t.Errorf("%s %s: %+v, want %+v (%v)", r.Method, r.URL, got, want, err)
			}
			w.WriteHeader(http.StatusCreated)
			fmt.Fprintf(w, `{"Id":"%s"}`, strings.Repeat("cd", 32))
		}),
		"/containers/" + helperName + "/start": status(start, func(w http.ResponseWriter, _ *http.Request) {
			go func() {
				defer close(ended)
				_ = b.help(c)
			}()
			w.WriteHeader(http.StatusNoContent)
		}),
		"/containers/" + helperName + "/wait": status(wait, func(_ http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Get("condition") != "removed" {
				t.Error(r.URL)
			}
			<-ended
		}),
	})
	c = wayContainer(t, spec.WayContainer, &docker{
		runner: script(t, more...), api: newDockerAPI(daemon.socket),
		engine: spec.Engine{Kind: spec.Docker, Client: "/docker", Socket: "/s"}, config: "/c",
	})
	putHelper(t, c)
	write(t, filepath.Join(c.paths.Dir, "cid"), strings.Repeat("ab", 32), 0o600)
	return c
}

// removal is the call that removes the helper's container.
var removal = scriptedCall{argv: []string{
	"/docker", "--host", "unix:///s", "--config", "/c", "rm", "--force", "--volumes", helperName,
}}

func TestWayContainer(t *testing.T) {
	b := newBox(t)
	if _, err := b.open(t, helperDaemon(t, b, 0, 0, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := newBox(t).open(t, helperDaemon(t, newBox(t), 0, 0, http.StatusNotFound)); !errors.Is(err, netpolicy.ErrHandover) && !strings.Contains(err.Error(), "not net:[") {
		t.Errorf("another namespace, and a container that is removed already: %v", err)
	}
}

// TestWayContainerFails: the container is removed by name, whatever the daemon says.
func TestWayContainerFails(t *testing.T) {
	b := newBox(t)
	stuck := removal
	stuck.err = failedCall(1, "no answer", "docker", "rm")
	for name, tc := range map[string]struct {
		create, start int
		calls         []scriptedCall
		want          string
		reason        Reason
	}{
		"not created":     {http.StatusInternalServerError, 0, []scriptedCall{removal}, "[31m luck", ReasonEgressSetup},
		"no image":        {http.StatusNotFound, 0, nil, "not found", ReasonEgressSetup},
		"not started":     {0, http.StatusInternalServerError, []scriptedCall{removal}, "[31m luck", ReasonEgressSetup},
		"and not removed": {0, http.StatusInternalServerError, []scriptedCall{stuck}, "no answer", ReasonEngineLost},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := b.open(t, helperDaemon(t, b, tc.create, tc.start, 0, tc.calls...))
			if !errors.Is(err, tc.reason) || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\x1b") {
				t.Errorf("%q, want %s %q", err, tc.reason, tc.want)
			}
		})
	}
}

// TestWayUnused: a run that ends before its sandbox is proven needs no helper, and
// leaves none.
func TestWayUnused(t *testing.T) {
	for _, way := range []string{spec.WayDirect, spec.WayContainer} {
		c := wayContainer(t, way, &podman{runner: Exec{}, engine: spec.Engine{Kind: spec.Podman}})
		putHelper(t, c)
		w, err := c.startWay(t.Context(), inPlace)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.close(); err != nil {
			t.Error(err)
		}
		if l, _, err := w.open(t.Context(), 1, "net:[1]"); !errors.Is(err, ReasonEgressSetup) || l != (netpolicy.Listeners{}) {
			t.Error(err)
		}
	}
}

// TestWayReportDiffers: what the kernel holds is not what the plan says.
func TestWayReportDiffers(t *testing.T) {
	b := newBox(t)
	c := helperDaemon(t, b, 0, 0, 0)
	for i, line := range c.p.plan.EgressRules {
		c.p.plan.EgressRules[i] = strings.Replace(line, ":OUTPUT DROP", ":OUTPUT ACCEPT", 1)
	}
	if _, err := b.open(t, c); !errors.Is(err, netpolicy.ErrReadBack) {
		t.Error(err)
	}
}

// TestWayHelperSaysWhy: its own words, not its exit code's.
func TestWayHelperSaysWhy(t *testing.T) {
	b := newBox(t)
	if err := b.in(func() error { return netpolicy.AddWay(netip.MustParsePrefix("198.18.0.0/15")) }); err != nil {
		t.Fatal(err)
	}
	if _, err := b.open(t, helperDaemon(t, b, 0, 0, 0)); err == nil || !strings.Contains(err.Error(), netpolicy.ErrNotFresh.Error()) {
		t.Error(err)
	}
}

func TestWayNeedsCookies(t *testing.T) {
	c := wayContainer(t, spec.WayDirect, &podman{runner: Exec{}, engine: spec.Engine{Kind: spec.Podman}})
	putHelper(t, c)
	w, err := c.startWay(t.Context(), inPlace)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.open(t.Context(), 0, "net:[1]"); !errors.Is(err, ReasonEgressSetup) || !strings.Contains(HintOf(err), "5.14") {
		t.Errorf("%v, hint %q", err, HintOf(err))
	}
	if err := w.close(); err != nil {
		t.Error(err)
	}
}

// TestWayEndsWithItsRun: a helper that hangs is ended with the run.
func TestWayEndsWithItsRun(t *testing.T) {
	b := newBox(t)
	c := wayContainer(t, spec.WayDirect, &podman{runner: Exec{}, engine: spec.Engine{Kind: spec.Podman}})
	fakeHelper(t, c, "exec sleep 100")
	write(t, c.paths.PIDFile(), b.pid, 0o600)
	ctx, cancel := context.WithCancel(t.Context())
	w, err := c.startWay(ctx, inPlace)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, _, err := w.open(ctx, b.cookie, b.netns); !errors.Is(err, ReasonEgressSetup) {
		t.Error(err)
	}
	if err := w.close(); err != nil {
		t.Error(err)
	}
}

// TestReclaimKnowsItsContainers: a leftover container with the run's label goes only with
// a program of agentshim's.
func TestReclaimKnowsItsContainers(t *testing.T) {
	for inspected, removed := range map[string]bool{
		`/.agentshim-init ["wire/1"]`:                                    true,
		`/.agentshim-init ["hold/1"]`:                                    true,
		`/.agentshim-init ["hold/1","x"]`:                                false,
		`/.agentshim-init ["cache/1","/.agentshim-cache","1000","1000"]`: true,
		`/.agentshim-init ["cache/2","/.agentshim-cache","1000","1000"]`: false,
		`/.agentshim-netns ["netns/3","/.agentshim-netns.sock"]`:         true,
		`/.agentshim-netns ["netns/2","/.agentshim-netns.sock"]`:         false,
		`/bin/sh ["/.agentshim-netns [\"netns/3\","]`:                    false,
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

// TestReclaimGone: a container that ended since it was listed is none that is left.
func TestReclaimGone(t *testing.T) {
	prefix := []string{"/docker", "--host", "unix:///s", "--config", "/c"}
	inspect := append(prefix[:5:5], "inspect", "--type", "container", "--format", "{{.Path}} {{json .Args}}", "id")
	for said, gone := range map[string]bool{
		"Error response from daemon: No such container: id":     true,
		"Error: inspecting object: no such container id":        true,
		"Error response from daemon: dial unix: no such socket": false,
	} {
		d := &docker{engine: spec.Engine{Kind: spec.Docker, Client: "/docker", Socket: "/s"}, config: "/c", runner: script(t,
			scriptedCall{argv: append(prefix[:5:5], "ps", "--all", "--quiet", "--no-trunc", "--filter", "label=agentshim.run=r"), out: "id\n"},
			scriptedCall{argv: inspect, err: failedCall(1, said, inspect...)},
		)}
		left, err := removeByLabel(t.Context(), d, "r", false)
		if len(left) != 0 || (err == nil) != gone {
			t.Errorf("%s: %+v %v", said, left, err)
		}
	}
}
