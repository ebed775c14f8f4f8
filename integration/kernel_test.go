package integration

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/seccomp"
)

const sysSocket = unix.SYS_SOCKET

// TestKernelPaths: what the plan masks gives nothing, what it makes read-only can't
// be opened for writing, not even by uid 0. A74.
func TestKernelPaths(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		p := s.plan(t, rootUser(nil))
		var masked, readonly, ops attempts
		for _, path := range p.MaskedPaths {
			masked = append(masked, []string{"read", path})
		}
		for _, path := range p.ReadonlyPaths {
			readonly = append(readonly, []string{"chmod", path})
		}
		settings := s.settings()
		ops = slices.Concat(masked, readonly, of(settings))
		sandbox, _ := s.try(t, rootUser(nil), ops)
		unmask := map[string]string{"docker": "systempaths=unconfined", "podman": "unmask=ALL"}[s.engine]
		control := s.control(t, []string{"--security-opt=" + unmask, "--cap-add=NET_ADMIN"}, ops)
		open := 0
		for _, op := range masked {
			t.Run("masked "+op[1], func(t *testing.T) {
				if got := sandbox.of(op...); got != "ok: empty" && got != "ENOENT" {
					t.Errorf("%s", got)
				}
			})
			if control.of(op...) == "ok: data" {
				open++
			}
		}
		if open < 2 {
			t.Errorf("in the control run only %d of them give data: %v", open, control)
		}
		for _, op := range readonly {
			t.Run("read-only "+op[1], func(t *testing.T) {
				got, other := sandbox.of(op...), control.of(op...)
				if got != "EROFS" && got != "ENOENT" || other == "EROFS" {
					t.Errorf("%s, in the control run %s", got, other)
				}
			})
		}
		judge(t, settings, sandbox, control)
	})
}

// settings are files of the host's and of the container's own kernel settings. In a
// user namespace uid 0 does not own the host's, and owns its own by capability only:
// that is asked before the read-only mount is.
func (s setup) settings() []trial {
	refused, open := "EROFS", "ok"
	if s.rootless() {
		refused, open = "EACCES", "EACCES"
	}
	trials := []trial{
		{"core_pattern", []string{"openwrite", "/proc/sys/kernel/core_pattern"}, refused, open},
		{"core_pattern's mode", []string{"chmod", "/proc/sys/kernel/core_pattern"}, "EROFS", "EPERM"},
		{"its own ip_forward", []string{"openwrite", "/proc/sys/net/ipv4/ip_forward"}, refused, "ok"},
	}
	const sysrq = "/proc/sysrq-trigger" // not on kernels without CONFIG_MAGIC_SYSRQ
	if _, err := os.Stat(sysrq); err == nil {
		trials = append(trials, trial{"sysrq-trigger", []string{"openwrite", sysrq}, refused, open})
	}
	return trials
}

// syscallTrial is one call and its raw arguments.
type syscallTrial struct {
	name string
	nr   uintptr
	args []uint64
	// kernel says that some kernels give the same answer by themselves.
	kernel bool
}

func (c syscallTrial) op() []string {
	op := []string{"syscall", strconv.FormatUint(uint64(c.nr), 10)}
	for _, a := range c.args {
		op = append(op, strconv.FormatUint(a, 10))
	}
	return op
}

// badPointer is an address that no process has.
const badPointer = ^uint64(0) >> 1

// refusedCalls would get another answer from the kernel; each is harmless there.
var refusedCalls = []syscallTrial{
	{name: "socket", nr: unix.SYS_SOCKET, args: []uint64{unix.AF_VSOCK, unix.SOCK_STREAM}},
	{name: "socket", nr: unix.SYS_SOCKET, args: []uint64{unix.AF_ALG, unix.SOCK_SEQPACKET}, kernel: true},
	{name: "socket", nr: unix.SYS_SOCKET, args: []uint64{unix.AF_PACKET, unix.SOCK_RAW}},
	{name: "socket", nr: unix.SYS_SOCKET, args: []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_KOBJECT_UEVENT}},
	{name: "socket", nr: unix.SYS_SOCKET, args: []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_GENERIC}},
	{name: "socket", nr: unix.SYS_SOCKET, args: []uint64{1<<32 | unix.AF_UNIX, unix.SOCK_STREAM}},
	{name: "socketpair", nr: unix.SYS_SOCKETPAIR, args: []uint64{unix.AF_INET, unix.SOCK_STREAM, 0, badPointer}},
	{name: "keyctl", nr: unix.SYS_KEYCTL, args: []uint64{9999}},
	{name: "add_key", nr: unix.SYS_ADD_KEY, args: []uint64{badPointer}},
	{name: "request_key", nr: unix.SYS_REQUEST_KEY, args: []uint64{badPointer}},
	{name: "ptrace", nr: unix.SYS_PTRACE, args: []uint64{16, 1 << 30}},
	{name: "process_vm_readv", nr: unix.SYS_PROCESS_VM_READV, args: []uint64{0, 0, 0, 0, 0, 1}},
	{name: "process_vm_writev", nr: unix.SYS_PROCESS_VM_WRITEV, args: []uint64{0, 0, 0, 0, 0, 1}},
	{name: "pidfd_getfd", nr: unix.SYS_PIDFD_GETFD, args: []uint64{1 << 30}},
	{name: "kcmp", nr: unix.SYS_KCMP, args: []uint64{1 << 30, 1 << 30}},
	{name: "prlimit64", nr: unix.SYS_PRLIMIT64, args: []uint64{1, unix.RLIMIT_NOFILE}},
	{name: "sched_setaffinity", nr: unix.SYS_SCHED_SETAFFINITY, args: []uint64{1, 8, badPointer}},
	{name: "sched_setscheduler", nr: unix.SYS_SCHED_SETSCHEDULER, args: []uint64{1, 0, 0}},
	{name: "sched_setparam", nr: unix.SYS_SCHED_SETPARAM, args: []uint64{1, 0}},
	{name: "sched_setattr", nr: unix.SYS_SCHED_SETATTR, args: []uint64{1, 0}},
	{name: "setpriority", nr: unix.SYS_SETPRIORITY, args: []uint64{unix.PRIO_PROCESS, 1 << 30, 0}},
	{name: "setpriority", nr: unix.SYS_SETPRIORITY, args: []uint64{unix.PRIO_USER, 1 << 30, 0}},
	{name: "ioprio_set", nr: unix.SYS_IOPRIO_SET, args: []uint64{1, 1 << 30, 2 << 13}},
	{name: "rt_sigqueueinfo", nr: unix.SYS_RT_SIGQUEUEINFO, args: []uint64{1 << 30, 0, badPointer}},
	{name: "rt_tgsigqueueinfo", nr: unix.SYS_RT_TGSIGQUEUEINFO, args: []uint64{1 << 30, 1 << 30, 0, badPointer}},
	{name: "io_uring_setup", nr: unix.SYS_IO_URING_SETUP, args: []uint64{1, badPointer}},
	{name: "io_uring_enter", nr: unix.SYS_IO_URING_ENTER, args: []uint64{1 << 30}},
	{name: "io_uring_register", nr: unix.SYS_IO_URING_REGISTER, args: []uint64{1 << 30}},
	{name: "userfaultfd", nr: unix.SYS_USERFAULTFD, args: []uint64{badPointer}},
	{name: "bpf", nr: unix.SYS_BPF, args: []uint64{9999}},
	{name: "perf_event_open", nr: unix.SYS_PERF_EVENT_OPEN, args: []uint64{badPointer}},
	{name: "open_by_handle_at", nr: unix.SYS_OPEN_BY_HANDLE_AT, args: []uint64{1 << 30, badPointer}},
	{name: "unshare", nr: unix.SYS_UNSHARE, args: []uint64{0}},
	{name: "setns", nr: unix.SYS_SETNS, args: []uint64{1 << 30}},
	{name: "clone", nr: unix.SYS_CLONE, args: []uint64{unix.CLONE_THREAD | unix.CLONE_NEWUSER}},
	{name: "clone3", nr: unix.SYS_CLONE3, args: []uint64{0, 0}},
	{name: "mount", nr: unix.SYS_MOUNT, args: []uint64{badPointer, badPointer, badPointer}},
	{name: "umount2", nr: unix.SYS_UMOUNT2, args: []uint64{badPointer, badPointer}},
	{name: "pivot_root", nr: unix.SYS_PIVOT_ROOT, args: []uint64{badPointer, badPointer}},
	{name: "chroot", nr: unix.SYS_CHROOT, args: []uint64{badPointer}},
	{name: "open_tree", nr: unix.SYS_OPEN_TREE, args: []uint64{0, badPointer, badPointer}},
	{name: "move_mount", nr: unix.SYS_MOVE_MOUNT, args: []uint64{0, 0, 0, 0, badPointer}},
	{name: "fsopen", nr: unix.SYS_FSOPEN, args: []uint64{badPointer, badPointer}},
	{name: "fsconfig", nr: unix.SYS_FSCONFIG, args: []uint64{badPointer}},
	{name: "fsmount", nr: unix.SYS_FSMOUNT, args: []uint64{badPointer, badPointer}},
	{name: "fspick", nr: unix.SYS_FSPICK, args: []uint64{badPointer, badPointer, badPointer}},
	{name: "mount_setattr", nr: unix.SYS_MOUNT_SETATTR, args: []uint64{badPointer, badPointer, badPointer}},
	{name: "ioctl", nr: unix.SYS_IOCTL, args: []uint64{1 << 30, unix.TIOCSTI}},
	{name: "move_pages", nr: unix.SYS_MOVE_PAGES, args: []uint64{1 << 30}},
	{name: "migrate_pages", nr: unix.SYS_MIGRATE_PAGES, args: []uint64{1 << 30}},
	{name: "process_madvise", nr: unix.SYS_PROCESS_MADVISE, args: []uint64{1 << 30}},
	{name: "pidfd_send_signal", nr: unix.SYS_PIDFD_SEND_SIGNAL, args: []uint64{1 << 30, 0, badPointer}},
	// Of the kernel these want capabilities that no container here has.
	{name: "finit_module", nr: unix.SYS_FINIT_MODULE, args: []uint64{1 << 30, 0, badPointer}, kernel: true},
	{name: "delete_module", nr: unix.SYS_DELETE_MODULE, args: []uint64{badPointer}, kernel: true},
	{name: "kexec_load", nr: unix.SYS_KEXEC_LOAD, args: []uint64{0, badPointer, badPointer, badPointer}, kernel: true},
	{name: "acct", nr: unix.SYS_ACCT, args: []uint64{badPointer}, kernel: true},
	{name: "swapon", nr: unix.SYS_SWAPON, args: []uint64{badPointer}, kernel: true},
	// The kernel reads the low half of these.
	{name: "ioctl", nr: unix.SYS_IOCTL, args: []uint64{1 << 30, 0xffffffff<<32 | unix.TIOCSTI}},
	{name: "socket", nr: unix.SYS_SOCKET, args: []uint64{1<<32 | unix.AF_VSOCK, unix.SOCK_STREAM}},
	{name: "socket", nr: unix.SYS_SOCKET, args: []uint64{unix.AF_NETLINK, unix.SOCK_RAW, 1<<32 | unix.NETLINK_KOBJECT_UEVENT}},
	{name: "clone", nr: unix.SYS_CLONE, args: []uint64{1<<32 | unix.CLONE_THREAD | unix.CLONE_NEWUSER}},
	{name: "prlimit64", nr: unix.SYS_PRLIMIT64, args: []uint64{1<<32 | 1, unix.RLIMIT_NOFILE}},
	{name: "unshare", nr: 1<<32 | unix.SYS_UNSHARE},
	{name: "get_mempolicy", nr: unix.SYS_GET_MEMPOLICY, args: []uint64{0, 0, 0, 0, badPointer}},
}

// families are sockets of every family that the policy refuses, up to the kernel's last. Most of
// them it doesn't have; those that matter stand among refusedCalls, too.
func families() []syscallTrial {
	var all []syscallTrial
	for family := range uint64(46) {
		switch family {
		case unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK:
		default:
			all = append(all, syscallTrial{name: "socket", nr: unix.SYS_SOCKET, args: []uint64{family, unix.SOCK_DGRAM}, kernel: true})
		}
	}
	return all
}

// foreign are calls of the machine's other ABIs: x32's, which only some kernels have, and i386's. The
// second is the program of the seccomp package's own test, which lists what it tries.
func foreign() []trial {
	if runtime.GOARCH != "amd64" {
		return nil
	}
	const x32 = 0x40000000
	number := func(nr int) string { return strconv.Itoa(x32 | nr) }
	return []trial{
		{"x32 AF_VSOCK", []string{"syscall", number(unix.SYS_SOCKET), strconv.Itoa(unix.AF_VSOCK), "1"}, "EAFNOSUPPORT", ""},
		{"x32 unshare", []string{"syscall", number(unix.SYS_UNSHARE)}, "EPERM", ""},
		{"i386", []string{"run", "/try/calls386"}, "ok: 13\n13\n97\n93\n0\n0\n1\n1\n22", "ok: 0\n0\n0\n0\n0\n0\n95\n22\n22"},
	}
}

// TestSystemCalls: each refused call answers what the policy says, and something
// else without the policy. C04, C05, C10, C11, A75, A77,
// A79, A80, A81, A85.
func TestSystemCalls(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		policy, err := seccomp.Compile(harness.Seccomp{}, seccomp.Target{Arch: runtime.GOARCH, Docker: s.engine == "docker"})
		if err != nil {
			t.Fatal(err)
		}
		general := []trial{
			{"C10 the filter is on", []string{"status", "Seccomp"}, "ok: 2", "ok: 0"},
			{"C04 threads start", []string{"thread"}, "ok", "ok"},
			{"C11 openat2 works", []string{"openat2"}, "ok", "ok"},
			{"C11 an unknown call", []string{"syscall", "4000"}, "ENOSYS", "ENOSYS"},
			{"AF_UNIX", []string{"syscall", strconv.Itoa(sysSocket), "1", "1"}, "ok", "ok"},
			{"NETLINK_ROUTE", []string{"syscall", strconv.Itoa(sysSocket), "16", "3"}, "ok", "ok"},
			{"its own limits", []string{"syscall", strconv.Itoa(unix.SYS_PRLIMIT64), "0", "7"}, "ok", "ok"},
		}
		general = append(general, foreign()...)
		ops := of(general)
		refused := slices.Concat(refusedCalls, families())
		for _, c := range refused {
			ops = append(ops, c.op())
		}
		// C05: with a kill instead of an errno, the list would end here.
		sandbox, _ := s.try(t, rootUser(nil), ops)
		control := s.control(t, append(capable(), "--security-opt=seccomp=unconfined"), ops)
		judge(t, general, sandbox, control)
		for i, c := range refused {
			t.Run(fmt.Sprintf("%s/%d", c.name, i), func(t *testing.T) {
				var args [6]uint64
				copy(args[:], c.args)
				v := policy.Decide("", c.name, args)
				want, got, free := unix.ErrnoName(v.Errno), sandbox.of(c.op()...), control.of(c.op()...)
				if v.Allowed() || got != want {
					t.Errorf("%#x: %s, want %s", c.args, got, want)
				}
				if free == want && !c.kernel {
					t.Errorf("%#x: %s without the policy too", c.args, free)
				}
			})
		}
	})
}

// capable are the capabilities that the calls ask for. A daemon in a container of its
// own has not all there are to give.
func capable() []string {
	var flags []string
	for _, name := range []string{"DAC_READ_SEARCH", "NET_ADMIN", "NET_RAW", "SYS_ADMIN", "SYS_CHROOT", "SYS_NICE", "SYS_PTRACE"} {
		flags = append(flags, "--cap-add="+name)
	}
	return flags
}

// TestProfileFlavour: the engines take the profile that the plan gives them (every
// other test is the proof) and refuse one that mixes the two formats, that is
// missing, or that lacks the runtime's own calls. Here they say so themselves. C07,
// C09, C10. C08, a rule equal to the default, is the seccomp package's own test.
func TestProfileFlavour(t *testing.T) {
	rows := map[string]string{
		"C07 both formats":       `{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86_64"],"archMap":[{"architecture":"SCMP_ARCH_X86_64"}],"syscalls":[]}`,
		"C09 no calls":           `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["read","write","execve","exit_group"],"action":"SCMP_ACT_ALLOW"}]}`,
		"C10 no file":            "",
		"C10 not JSON":           "{",
		"control: a usable file": `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[]}`,
	}
	each(t, func(t *testing.T, s setup) {
		dir := s.private(t)
		uid, gid := s.ids(t)
		for name, text := range rows {
			t.Run(name, func(t *testing.T) {
				profile := filepath.Join(dir, strings.Fields(name)[0]+strconv.Itoa(len(text)))
				if text != "" {
					if err := os.WriteFile(profile, []byte(text), 0o600); err != nil {
						t.Fatal(err)
					}
					if err := os.Chown(profile, uid, gid); err != nil {
						t.Fatal(err)
					}
				}
				r := s.bare(t, "run", "--rm", "--network=none", "--security-opt=seccomp="+profile, "--", "agentshim/hello:test", "true")
				if usable := strings.HasPrefix(name, "control"); (r.Code == 0) != usable {
					t.Errorf("exit %d\n%s", r.Code, r.Stderr)
				}
			})
		}
	})
}

// TestNetworkIsClosed: the sandbox has its own loopback and nothing else; every
// other address, name and abstract socket is refused at once.
func TestNetworkIsClosed(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		v4, v6 := listenOn(t, false), listenOn(t, true)
		host := listen(t, "tcp", "127.0.0.1:0")
		udp := answerUDP(t, v4)
		socket := abstractSocket(t)
		closed := []trial{
			{"TCP to the host", []string{"dial", "tcp", v4}, "ENETUNREACH", "ok"},
			{"UDP to the host", []string{"dial", "udp", udp}, "ENETUNREACH", "ok"},
			{"TCP to the host over IPv6", []string{"dial", "tcp", v6}, "ENETUNREACH", "ok"},
			{"TCP to the host's loopback", []string{"dial", "tcp", host}, "ECONNREFUSED", "ok"},
			{"abstract socket of the host", []string{"abstract", socket}, "ECONNREFUSED", "ok"},
		}
		names := []trial{
			{"no name", []string{"lookup", "agentshim-test.invalid"}, "error: not resolved", ""},
			{"localhost", []string{"lookup", "localhost"}, "ok: 127.0.0.1 ::1", ""},
			{"its own name", []string{"lookup", "agentshim"}, "ok: 127.0.0.1", ""},
		}
		own := []trial{
			{"TCP 127.0.0.1", []string{"echo", "tcp", "127.0.0.1:0"}, "ok", "ok"},
			{"TCP 127.0.0.2", []string{"echo", "tcp", "127.0.0.2:0"}, "ok", "ok"},
			{"TCP ::1", []string{"echo", "tcp", "[::1]:0"}, "ok", "ok"},
			{"UDP 127.0.0.1", []string{"echo", "udp", "127.0.0.1:0"}, "ok", "ok"},
			{"UDP 127.0.0.2", []string{"echo", "udp", "127.0.0.2:0"}, "ok", "ok"},
			{"UDP ::1", []string{"echo", "udp", "[::1]:0"}, "ok", "ok"},
			{"interfaces", []string{"interfaces"}, "ok: lo", ""},
			{"ICMP", []string{"syscall", strconv.Itoa(sysSocket), "2", "2", "1"}, "EACCES", ""},
			{"ICMP over IPv6", []string{"syscall", strconv.Itoa(sysSocket), "10", "2", "58"}, "EACCES", ""},
			{"ports below 1024", []string{"echo", "tcp", "127.0.0.1:80"}, "ok", ""},
		}
		all := slices.Concat(closed, names, own)
		sandbox, _ := s.try(t, nil, of(all))
		judge(t, all, sandbox, s.control(t, []string{"--network=host"}, of(slices.Concat(closed, own[:6]))))

		t.Run("default network", func(t *testing.T) {
			tcp := closed[:1] // the packet's way is this machine's own: an address of one of its interfaces
			for op, got := range s.control(t, []string{"--network=" + s.defaultNetwork()}, of(tcp)) {
				if got != "ok" {
					t.Errorf("the control run: %s: %s", op, got)
				}
			}
		})
		t.Run("ICMP control", func(t *testing.T) {
			op := []string{"syscall", strconv.Itoa(sysSocket), "2", "2", "1"}
			if got := s.control(t, []string{"--sysctl=net.ipv4.ping_group_range=0 0"}, attempts{op}).of(op...); got != "ok" {
				t.Errorf("a group in the range can't open one: %s", got)
			}
		})
	})
}

// defaultNetwork is what the engine gives when nothing is asked for.
func (s setup) defaultNetwork() string {
	if s.rootless() {
		return "slirp4netns"
	}
	return "bridge"
}

// answering is what a listener of listen says to each connection.
var answering = []byte("!")

// listen answers every connection with a byte until the test ends.
func listen(t *testing.T, network, addr string) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(5 * time.Second))
			_, _ = c.Read(make([]byte, 1))
			_, _ = c.Write(answering)
			c.Close()
		}
	}()
	return l.Addr().String()
}

// listenOn listens on an address of this machine that is not loopback. Packets to it
// never leave the machine.
func listenOn(t *testing.T, ipv6 bool) string {
	t.Helper()
	return listen(t, "tcp", net.JoinHostPort(ownAddress(t, ipv6), "0"))
}

func ownAddress(t *testing.T, ipv6 bool) string {
	t.Helper()
	if bridge, err := net.InterfaceByName("docker0"); err == nil && !ipv6 {
		if addrs, err := bridge.Addrs(); err == nil && len(addrs) > 0 {
			return addrs[0].(*net.IPNet).IP.String()
		}
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() && (n.IP.To4() == nil) == ipv6 {
			return n.IP.String()
		}
	}
	t.Fatalf("this machine has no address of its own but loopback (IPv6: %v)", ipv6)
	return ""
}

// answerUDP answers each datagram on the host part of addr.
func answerUDP(t *testing.T, addr string) string {
	t.Helper()
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenPacket("udp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		b := make([]byte, 1)
		for {
			_, from, err := l.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = l.WriteTo(answering, from)
		}
	}()
	return l.LocalAddr().String()
}

func abstractSocket(t *testing.T) string {
	t.Helper()
	name := fmt.Sprintf("agentshim-test-%d-%d", syscall.Getpid(), time.Now().UnixNano())
	listen(t, "unix", "@"+name)
	return name
}

// eventually fails t unless ok holds within ten seconds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Errorf("not within ten seconds: %s", what)
}
