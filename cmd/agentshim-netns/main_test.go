package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
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

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/netpolicy"
)

// The test's own binary is the helper when it is called as one.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == arg {
		main()
		return
	}
	os.Exit(m.Run())
}

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

// sandbox is a process in a network namespace of its own.
type sandbox struct {
	pid    string
	netns  string
	cookie uint64
}

func newSandbox(t *testing.T) sandbox {
	t.Helper()
	needRoot(t)
	cmd := exec.Command("sleep", "100")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	s := sandbox{pid: strconv.Itoa(cmd.Process.Pid)}
	s.in(t, func() (err error) {
		if s.netns, err = netpolicy.ThreadNetns(); err != nil {
			return err
		}
		s.cookie, err = netpolicy.NetCookie()
		return err
	})
	return s
}

// in runs f on a thread in the sandbox's network namespace.
func (s sandbox) in(t *testing.T, f func() error) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		ns, err := os.Open("/proc/" + s.pid + "/ns/net")
		if err == nil {
			defer ns.Close()
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// packetRules is every table of the calling thread's network namespace.
func packetRules() (string, error) {
	conn, err := nftables.New()
	if err != nil {
		return "", err
	}
	var b strings.Builder
	tables, err := conn.ListTables()
	for _, t := range tables {
		fmt.Fprintf(&b, "%d %s\n", t.Family, t.Name)
	}
	chains, cerr := conn.ListChains()
	for _, c := range chains {
		rules, rerr := conn.GetRules(c.Table, c)
		fmt.Fprintf(&b, "%s %s %d rules\n", c.Table.Name, c.Name, len(rules))
		cerr = errors.Join(cerr, rerr)
	}
	return b.String(), errors.Join(err, cerr)
}

func (s sandbox) packetRules(t *testing.T) (text string) {
	t.Helper()
	s.in(t, func() (err error) {
		text, err = packetRules()
		return err
	})
	return text
}

// helper runs the helper and returns what it said.
func helper(args ...string) (string, error) {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = []string{"GODEBUG=netdns=1", "GOMAXPROCS=1"}
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	err := cmd.Run()
	return said.String(), err
}

func listen(t *testing.T) (string, *net.UnixListener) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := netpolicy.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return socket, l
}

// TestManyAtOnce: N14, every network namespace has its own rules and nothing lands on
// the host.
func TestManyAtOnce(t *testing.T) {
	needRoot(t)
	before, err := packetRules()
	if err != nil {
		t.Fatal(err)
	}
	const many = 32
	var all sync.WaitGroup
	for i := range many {
		s := newSandbox(t)
		socket, l := listen(t)
		all.Go(func() {
			if said, err := helper(arg, socket, s.netns, s.pid); err != nil || said != "" {
				t.Errorf("%d: %v %s", i, err, said)
			}
			listeners, report, err := netpolicy.Receive(l, s.cookie, time.Second)
			if err != nil {
				t.Errorf("%d: %v", i, err)
				return
			}
			defer listeners.Close()
			if report.Rules != netpolicy.SandboxRules(true).Iptables() || report.Netns != s.netns {
				t.Errorf("%d: %+v", i, report)
			}
			if text := s.packetRules(t); strings.Count(text, "agentshim filter") != 2 {
				t.Errorf("%d: %s", i, text)
			}
		})
	}
	all.Wait()
	after, err := packetRules()
	if err != nil || after != before {
		t.Errorf("the host's rules changed: %v\n%s\n%s", err, before, after)
	}
}

// TestRefused: N21, A45. The helper says so on stderr, by its exit code and over the
// socket, and changes nothing, neither there nor here.
func TestRefused(t *testing.T) {
	s, other := newSandbox(t), newSandbox(t)
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	self := strconv.Itoa(os.Getpid())
	here, err := packetRules()
	if err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"its own namespace":         {own, self},
		"a process here":            {s.netns, self},
		"another namespace":         {s.netns, other.pid},
		"no namespace":              {"", s.pid},
		"process 0":                 {s.netns, "0"},
		"no process":                {s.netns, ""},
		"a path":                    {s.netns, "../" + s.pid},
		"self":                      {s.netns, "self"},
		"a process that ended":      {s.netns, strconv.Itoa(gone.Process.Pid)},
		"not in it without process": {s.netns},
	} {
		t.Run(name, func(t *testing.T) {
			socket, l := listen(t)
			said, err := helper(append([]string{arg, socket}, args...)...)
			if err == nil || !strings.HasPrefix(said, "agentshim-netns: ") {
				t.Errorf("%v %q", err, said)
			}
			listeners, report, err := netpolicy.Receive(l, s.cookie, time.Second)
			if err != nil || report.Error == "" || !strings.Contains(said, report.Error) || listeners != (netpolicy.Listeners{}) {
				t.Errorf("%+v %v, said %q", report, err, said)
			}
			for _, b := range []sandbox{s, other} {
				if text := b.packetRules(t); text != "" {
					t.Errorf("rules of %s: %s", b.netns, text)
				}
			}
		})
	}
	if after, err := packetRules(); err != nil || after != here {
		t.Errorf("the host's rules changed: %v\n%s\n%s", err, here, after)
	}
	socket, _ := listen(t)
	if said, err := helper(arg, socket, s.netns, s.pid); err != nil {
		t.Errorf("control: %v %s", err, said)
	}
}

// TestTwice: who has a way out already gets no second one.
func TestTwice(t *testing.T) {
	s := newSandbox(t)
	socket, _ := listen(t)
	if said, err := helper(arg, socket, s.netns, s.pid); err != nil {
		t.Fatal(err, said)
	}
	if said, err := helper(arg, socket, s.netns, s.pid); err == nil || !strings.Contains(said, netpolicy.ErrNotFresh.Error()) {
		t.Errorf("%v %q", err, said)
	}
}

// TestInside: without a process the helper is in the network namespace already, as in
// a container that shares it, and needs CAP_NET_ADMIN only.
func TestInside(t *testing.T) {
	s := newSandbox(t)
	socket, l := listen(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("nsenter", "--net=/proc/"+s.pid+"/ns/net", "setpriv", "--bounding-set", "-all,+net_admin",
		"--inh-caps", "-all,+net_admin", "--ambient-caps", "-all,+net_admin", "--no-new-privs", "--securebits", "+noroot",
		self, arg, socket, s.netns)
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, said)
	}
	listeners, _, err := netpolicy.Receive(l, s.cookie, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	listeners.Close()
}

// TestNoSocket: there is nobody to tell but the caller.
func TestNoSocket(t *testing.T) {
	s := newSandbox(t)
	if said, err := helper(arg, filepath.Join(t.TempDir(), "none"), s.netns, s.pid); err == nil || !strings.Contains(said, "no such file") {
		t.Errorf("%v %q", err, said)
	}
	if text := s.packetRules(t); text != "" {
		t.Errorf("rules: %s", text)
	}
	for _, args := range [][]string{{arg}, {arg, "a", "b", "c", "d"}} {
		if said, err := helper(args...); err == nil || !strings.Contains(said, arg) {
			t.Errorf("%q: %v %q", args, err, said)
		}
	}
}
