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
	"unsafe"

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
	if len(os.Args) > 2 && os.Args[1] == withoutNftables {
		panic(execWithoutNftables(os.Args[2:]))
	}
	os.Exit(testMain(m))
}

// withoutNftables has this program run a command as on a kernel without nf_tables.
const withoutNftables = "without-nf_tables"

// execWithoutNftables has socket(2) answer for netfilter's netlink as a kernel without it
// (__netlink_create). The legacy tables are asked by getsockopt(2).
func execWithoutNftables(argv []string) error {
	jump := func(k uint32, otherwise uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: otherwise, K: k}
	}
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	const number, family, protocol = 0, 16, 32 // struct seccomp_data, little endian
	filter := []unix.SockFilter{
		load(number), jump(unix.SYS_SOCKET, 5),
		load(family), jump(unix.AF_NETLINK, 3),
		load(protocol), jump(unix.NETLINK_NETFILTER, 1),
		{Code: unix.BPF_RET, K: 0x00050000 | uint32(unix.EPROTONOSUPPORT)}, // SECCOMP_RET_ERRNO
		{Code: unix.BPF_RET, K: 0x7fff0000},                                // SECCOMP_RET_ALLOW
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	// For this thread, which exec leaves alone in the process.
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0); err != nil {
		return err
	}
	return unix.Exec(argv[0], argv, os.Environ())
}

// helper is a copy of this program that every user can run.
var helper string

func testMain(m *testing.M) int {
	folder, err := os.MkdirTemp("", "agentshim-netns-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(folder)
	helper = filepath.Join(folder, "helper")
	self, err := os.ReadFile("/proc/self/exe")
	if err := errors.Join(err, os.WriteFile(helper, self, 0o755), os.Chmod(folder, 0o755)); err != nil {
		panic(err)
	}
	return m.Run()
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
	pid    int
	netns  string
	cookie uint64
}

func newSandbox(t *testing.T) sandbox {
	t.Helper()
	return newSandboxAs(t, &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET})
}

func newSandboxAs(t *testing.T, as *syscall.SysProcAttr, prefix ...string) sandbox {
	t.Helper()
	needRoot(t)
	argv := append(prefix, "sleep", "100")
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.SysProcAttr = as
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	s := sandbox{pid: cmd.Process.Pid}
	own, err := os.Readlink("/proc/self/ns/net")
	for made := own; made == own && err == nil; time.Sleep(time.Millisecond) {
		made, err = os.Readlink(fmt.Sprintf("/proc/%d/ns/net", s.pid))
	}
	if err != nil {
		t.Fatal(err)
	}
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
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", s.pid))
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

// helped is what one run of the helper came to.
type helped struct {
	said      string
	listeners netpolicy.Listeners
	report    netpolicy.Report
	// exit is the helper's, err the hand-over's.
	exit, err error
}

// help runs the helper, below a program that prefix names, gives it the order and
// takes what it hands over.
func help(t *testing.T, cookie uint64, order netpolicy.Order, prefix ...string) (h helped) {
	t.Helper()
	socket, l := listen(t)
	argv := append(prefix, helper, arg, socket)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = []string{"GODEBUG=netdns=1", "GOMAXPROCS=1", "PATH=" + os.Getenv("PATH")}
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Error(err)
		return helped{err: err}
	}
	defer func() {
		h.exit = cmd.Wait()
		h.said = said.String()
	}()
	p, err := netpolicy.AcceptPeer(l, time.Second)
	if err != nil {
		return helped{err: err}
	}
	defer p.Close()
	if err := p.Order(order, time.Second); err != nil {
		return helped{err: err}
	}
	h.listeners, h.report, h.err = p.Receive(cookie, order.Network, time.Second)
	t.Cleanup(h.listeners.Close)
	h.err = errors.Join(h.err, p.AwaitEnd(time.Second))
	return h
}

func (s sandbox) order() netpolicy.Order {
	return netpolicy.Order{Netns: s.netns, PID: s.pid, Setup: netpolicy.Setup{Rules: netpolicy.SandboxRules(true)}}
}

// publicFolder is one that users other than the test's own may use, too.
func publicFolder(t *testing.T) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "agentshim-netns-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	if err := os.Chmod(folder, 0o777); err != nil {
		t.Fatal(err)
	}
	return folder
}

func listen(t *testing.T) (string, *net.UnixListener) {
	t.Helper()
	socket := filepath.Join(publicFolder(t), "s")
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
		all.Go(func() {
			h := help(t, s.cookie, s.order())
			if err := errors.Join(h.exit, h.err); err != nil || h.said != "" {
				t.Errorf("%d: %v %s", i, err, h.said)
				return
			}
			if h.report.Rules != netpolicy.SandboxRules(true).Iptables() || h.report.Netns != s.netns {
				t.Errorf("%d: %+v", i, h.report)
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
	self := os.Getpid()
	here, err := packetRules()
	if err != nil {
		t.Fatal(err)
	}
	for name, order := range map[string]netpolicy.Order{
		"its own namespace":         {Netns: own, PID: self},
		"a process here":            {Netns: s.netns, PID: self},
		"another namespace":         {Netns: s.netns, PID: other.pid},
		"a process that ended":      {Netns: s.netns, PID: gone.Process.Pid},
		"not in it without process": {Netns: s.netns},
	} {
		t.Run(name, func(t *testing.T) {
			h := help(t, s.cookie, order)
			if h.exit == nil || !strings.HasPrefix(h.said, "agentshim-netns: ") {
				t.Errorf("%v %q", h.exit, h.said)
			}
			if h.err != nil || h.report.Error == "" || !strings.Contains(h.said, h.report.Error) || h.listeners != (netpolicy.Listeners{}) {
				t.Errorf("%+v", h)
			}
			for _, b := range []sandbox{s, other} {
				if text := b.packetRules(t); text != "" {
					t.Errorf("rules of %s: %s", b.netns, text)
				}
			}
		})
	}
	for name, order := range map[string]netpolicy.Order{"no namespace": {PID: s.pid}, "no such process": {Netns: s.netns, PID: -1}} {
		if h := help(t, s.cookie, order); h.exit == nil || h.err == nil || !strings.Contains(h.said, "order") {
			t.Errorf("%s: %+v", name, h)
		}
	}
	if after, err := packetRules(); err != nil || after != here {
		t.Errorf("the host's rules changed: %v\n%s\n%s", err, here, after)
	}
	if h := help(t, s.cookie, s.order()); errors.Join(h.exit, h.err) != nil {
		t.Errorf("control: %+v", h)
	}
}

// TestWithoutOrder: a shim that is gone leaves no helper behind, and no rule.
func TestWithoutOrder(t *testing.T) {
	socket, l := listen(t)
	cmd := exec.Command("/proc/self/exe", arg, socket)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := netpolicy.AcceptPeer(l, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.AwaitEnd(20 * time.Millisecond); err == nil {
		t.Error("it doesn't wait for its order")
	}
	p.Close()
	if err := cmd.Wait(); err == nil {
		t.Error("it ended well without an order")
	}
}

// TestTwice: who has a way out already gets no second one.
func TestTwice(t *testing.T) {
	s := newSandbox(t)
	if h := help(t, s.cookie, s.order()); errors.Join(h.exit, h.err) != nil {
		t.Fatalf("%+v", h)
	}
	if h := help(t, s.cookie, s.order()); h.exit == nil || !strings.Contains(h.report.Error, netpolicy.ErrNotFresh.Error()) {
		t.Errorf("%+v", h)
	}
}

// TestInside: without a process the helper is in the network namespace already, as in
// a container that shares it, and needs CAP_NET_ADMIN only.
func TestInside(t *testing.T) {
	s := newSandbox(t)
	order := s.order()
	order.PID = 0
	h := help(t, s.cookie, order,
		"nsenter", fmt.Sprintf("--net=/proc/%d/ns/net", s.pid), "setpriv", "--bounding-set", "-all,+net_admin",
		"--inh-caps", "-all,+net_admin", "--ambient-caps", "-all,+net_admin", "--no-new-privs", "--securebits", "+noroot")
	if errors.Join(h.exit, h.err) != nil {
		t.Fatalf("%+v", h)
	}
}

// TestIptables: N11, every back end, as root and in a user namespace whose root is nobody
// here; legacy has its lock in the socket's folder.
func TestIptables(t *testing.T) {
	needRoot(t)
	for _, backend := range []string{"nft", "legacy"} {
		// The helper's PATH is fixed, so one program stands in the other's place.
		prefix := []string{
			"unshare", "--mount", "sh", "-c", `mount --bind "$1" /usr/sbin/xtables-nft-multi && shift && exec "$@"`, "sh",
			"/usr/sbin/xtables-" + backend + "-multi",
		}
		t.Run(backend, func(t *testing.T) {
			s := newSandbox(t)
			order := s.order()
			order.Renderer = netpolicy.Iptables
			checkIptables(t, backend, help(t, s.cookie, order, prefix...))
			if text := s.packetRules(t); strings.Contains(text, "agentshim ") {
				t.Errorf("nftables was used: %s", text)
			}
		})
		t.Run(backend+" rootless", func(t *testing.T) {
			s := newSandboxAs(t, &syscall.SysProcAttr{
				Cloneflags: unix.CLONE_NEWUSER, Credential: &syscall.Credential{NoSetGroups: true},
				UidMappings: []syscall.SysProcIDMap{{HostID: 65534, Size: 1}}, GidMappings: []syscall.SysProcIDMap{{HostID: 65534, Size: 1}},
			}, "unshare", "--net") // a namespace's files are the root's that is mapped when it is made
			inside := append(prefix[:len(prefix):len(prefix)],
				"nsenter", "--target", strconv.Itoa(s.pid), "--user", "--net", "--setuid=0", "--setgid=0")
			order := s.order()
			order.PID, order.Renderer = 0, netpolicy.Iptables
			checkIptables(t, backend, help(t, s.cookie, order, inside...))
		})
		t.Run("auto, "+backend, func(t *testing.T) {
			checkAuto(t, backend, prefix)
		})
	}
	s := newSandbox(t)
	order := s.order()
	order.Renderer = "pf"
	if h := help(t, s.cookie, order); h.exit == nil || !strings.Contains(h.report.Error, "pf") {
		t.Errorf("another renderer: %+v", h)
	}
}

// checkAuto: A47: a user namespace's root asks the kernel, and iptables does it where there is
// no nf_tables; its own nft back end can't. The controls are the same without the filter, and
// nftables by name.
func checkAuto(t *testing.T, backend string, prefix []string) {
	helped := func(renderer string, filter ...string) helped {
		s := newSandboxAs(t, &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWUSER, Credential: &syscall.Credential{NoSetGroups: true},
			UidMappings: []syscall.SysProcIDMap{{HostID: 65534, Size: 1}}, GidMappings: []syscall.SysProcIDMap{{HostID: 65534, Size: 1}},
		}, "unshare", "--net")
		order := s.order()
		order.PID, order.Renderer = 0, renderer
		argv := append(prefix[:len(prefix):len(prefix)],
			"nsenter", "--target", strconv.Itoa(s.pid), "--user", "--net", "--setuid=0", "--setgid=0")
		return help(t, s.cookie, order, append(argv, filter...)...)
	}
	none := []string{helper, withoutNftables}
	if backend == "legacy" {
		checkIptables(t, backend, helped(netpolicy.Auto, none...))
	} else if h := helped(netpolicy.Auto, none...); h.exit == nil || h.report.Rules != "" {
		t.Errorf("no back end: %+v", h)
	}
	if h := helped(netpolicy.Nftables, none...); h.exit == nil || h.report.Rules != "" || !strings.Contains(h.report.Error, "nftables") {
		t.Errorf("nftables by name: %+v", h)
	}
	if h := helped(netpolicy.Auto); errors.Join(h.exit, h.err) != nil || h.report.Renderer != netpolicy.Nftables {
		t.Errorf("control: %+v", h)
	}
}

func checkIptables(t *testing.T, backend string, h helped) {
	t.Helper()
	if err := errors.Join(h.exit, h.err); err != nil || h.report.Error != "" {
		t.Fatalf("%v: %+v", err, h)
	}
	want := map[string]string{"nft": " nf_tables", "legacy": " legacy"}[backend]
	if h.report.Rules != netpolicy.SandboxRules(true).Iptables() || !strings.HasSuffix(h.report.Renderer, want) || h.report.Others != "" {
		t.Errorf("%+v", h.report)
	}
}

// TestNoSocket: there is nobody to tell but the caller.
func TestNoSocket(t *testing.T) {
	for want, args := range map[string][]string{
		"no such file": {arg, filepath.Join(t.TempDir(), "none")}, arg: {arg}, "agentshim starts this": {arg, "a", "b"},
	} {
		if said, err := exec.Command("/proc/self/exe", args...).CombinedOutput(); err == nil || !strings.Contains(string(said), want) {
			t.Errorf("%q: %v %q", args, err, said)
		}
	}
}
