package seccomp

import (
	"math/rand/v2"
	"syscall"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

const upper = 1 << 32 // a bit the kernel does not read in an int

// allowed and the errnos stand for verdicts in tables.
const allowed = syscall.Errno(0)

// forPolicies runs f for every flavour and every ABI of it.
func forPolicies(t *testing.T, f func(t *testing.T, p *Policy, abi string)) {
	t.Helper()
	for name, target := range targets {
		forABIs(t, name, mustCompile(t, target), f)
	}
}

func forABIs(t *testing.T, name string, p *Policy, f func(t *testing.T, p *Policy, abi string)) {
	t.Helper()
	for abi, a := range abis {
		for _, arch := range p.arches {
			if a.arch == arch {
				t.Run(name+"/"+abi, func(t *testing.T) { f(t, p, abi) })
			}
		}
	}
}

func wantVerdict(t *testing.T, p *Policy, abi, call string, args [6]uint64, want syscall.Errno) {
	t.Helper()
	v := p.Decide(abi, call, args)
	if v.Allowed() != (want == allowed) || v.Errno != want {
		t.Errorf("%s%#x: %+v, want errno %d", call, args, v, want)
	}
	if v.Reason == "" {
		t.Errorf("%s%#x: no reason", call, args)
	}
}

// family is the verdict on socket for families with protocol 0.
func family(f uint64) syscall.Errno {
	switch f {
	case syscall.AF_UNIX, syscall.AF_INET, syscall.AF_INET6, syscall.AF_NETLINK:
		return allowed
	}
	return syscall.EAFNOSUPPORT
}

// A75, A77
func TestSocketFamilies(t *testing.T) {
	forPolicies(t, func(t *testing.T, p *Policy, abi string) {
		families := []uint64{255, 256, 1 << 16, 1 << 31, 1<<32 - 1}
		for f := uint64(0); f <= 64; f++ {
			families = append(families, f)
		}
		for _, f := range families {
			for _, kind := range []uint64{syscall.SOCK_STREAM, syscall.SOCK_DGRAM | syscall.SOCK_CLOEXEC, syscall.SOCK_RAW} {
				wantVerdict(t, p, abi, "socket", [6]uint64{f, kind}, family(f))
			}
			pair := syscall.EAFNOSUPPORT
			if f == syscall.AF_UNIX {
				pair = allowed
			}
			wantVerdict(t, p, abi, "socketpair", [6]uint64{f, 1}, pair)
		}
		for _, f := range []uint64{syscall.AF_UNIX, syscall.AF_INET, syscall.AF_INET6, syscall.AF_NETLINK} {
			want := syscall.EAFNOSUPPORT
			if abis[abi].narrow {
				want = allowed // there is no upper half in the ABI
			}
			wantVerdict(t, p, abi, "socket", [6]uint64{f | upper, 1}, want)
		}
		for proto := uint64(0); proto <= 64; proto++ {
			want := syscall.EPROTONOSUPPORT
			if proto == syscall.NETLINK_ROUTE {
				want = allowed
			}
			wantVerdict(t, p, abi, "socket", [6]uint64{syscall.AF_NETLINK, 3, proto}, want)
			wantVerdict(t, p, abi, "socket", [6]uint64{syscall.AF_INET, 3, proto}, allowed)
		}
		if !abis[abi].narrow {
			wantVerdict(t, p, abi, "socket", [6]uint64{syscall.AF_NETLINK, 3, upper}, syscall.EPROTONOSUPPORT)
		}
		for sub := uint64(0); sub <= 21; sub++ {
			wantVerdict(t, p, abi, "socketcall", [6]uint64{sub, 0x1000}, syscall.EACCES)
		}
	})
}

// A81: upper bits neither grant nor hide a namespace flag.
func TestClone(t *testing.T) {
	forPolicies(t, func(t *testing.T, p *Policy, abi string) {
		const thread, fork = 0x3d0f00, 0x1200011
		for _, flags := range []uint64{0, thread, fork, uint64(syscall.SIGCHLD), syscall.CLONE_VM | syscall.CLONE_VFORK, fork | upper} {
			wantVerdict(t, p, abi, "clone", [6]uint64{flags}, allowed)
		}
		for _, flag := range []uint64{0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x7e020000} {
			for _, with := range []uint64{0, fork, thread, upper, upper | thread} {
				wantVerdict(t, p, abi, "clone", [6]uint64{flag | with}, syscall.EPERM)
			}
		}
		wantVerdict(t, p, abi, "clone3", [6]uint64{0x1000, 88}, syscall.ENOSYS)
	})
}

func TestOnlyTheCallerItself(t *testing.T) {
	forPolicies(t, func(t *testing.T, p *Policy, abi string) {
		for _, call := range []string{"prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler"} {
			wantVerdict(t, p, abi, call, [6]uint64{0, 7, 0x1000}, allowed)
			for _, pid := range []uint64{1, 2, 4711, 1<<32 - 1, upper | 1} {
				wantVerdict(t, p, abi, call, [6]uint64{pid, 7, 0x1000}, syscall.EPERM)
			}
		}
		for call, self := range map[string]uint64{"setpriority": 0, "ioprio_set": 1} {
			for which := uint64(0); which < 5; which++ {
				for _, who := range []uint64{0, 1, 1000, 1<<32 - 1, upper | 1} {
					want := syscall.EPERM
					if which == self && who == 0 {
						want = allowed
					}
					wantVerdict(t, p, abi, call, [6]uint64{which, who, 19}, want)
				}
			}
		}
		wantVerdict(t, p, abi, "pidfd_send_signal", [6]uint64{3, 9, 0, 0}, allowed)
		wantVerdict(t, p, abi, "pidfd_send_signal", [6]uint64{3, 9, 0x1000, 0}, syscall.EPERM)
		if !abis[abi].narrow {
			wantVerdict(t, p, abi, "prlimit64", [6]uint64{upper}, syscall.EPERM)
			wantVerdict(t, p, abi, "setpriority", [6]uint64{0, upper}, syscall.EPERM)
			wantVerdict(t, p, abi, "setpriority", [6]uint64{upper, 0}, syscall.EPERM)
		}
	})
}

func TestIoctl(t *testing.T) {
	forPolicies(t, func(t *testing.T, p *Policy, abi string) {
		refused := []uint64{0x5412, 0x541c}
		for _, r := range refused {
			for _, v := range []uint64{r, r | upper, r | 1<<63, r | 0xffffffff<<32} {
				wantVerdict(t, p, abi, "ioctl", [6]uint64{0, v, 0x1000}, syscall.EPERM)
			}
			for bit := range 32 {
				v := r ^ 1<<bit
				wantVerdict(t, p, abi, "ioctl", [6]uint64{0, v}, allowed)
				wantVerdict(t, p, abi, "ioctl", [6]uint64{0, v | upper}, allowed)
			}
		}
		random := rand.New(rand.NewPCG(1, 2))
		for n := range uint64(4096) {
			for _, v := range []uint64{0x5000 + n, random.Uint64()} {
				want := allowed
				if low := v & 0xffffffff; low == refused[0] || low == refused[1] {
					want = syscall.EPERM
				}
				wantVerdict(t, p, abi, "ioctl", [6]uint64{0, v}, want)
			}
		}
	})
}

func TestPersonality(t *testing.T) {
	forPolicies(t, func(t *testing.T, p *Policy, abi string) {
		for _, v := range []uint64{0, 8, 0x20000, 0x20008, 0xffffffff} {
			wantVerdict(t, p, abi, "personality", [6]uint64{v}, allowed)
		}
		for _, v := range []uint64{1, 0x40000, 0x20009, 0x0400000, 0xfffffffe} {
			wantVerdict(t, p, abi, "personality", [6]uint64{v}, syscall.Errno(p.defaultErrno))
		}
	})
}

// A79, A80, A81, C04, C05: the same answer in both flavours, whatever the arguments.
func TestUnconditionalVerdicts(t *testing.T) {
	calls := map[syscall.Errno][]string{
		syscall.EPERM: {
			"add_key", "keyctl", "request_key", "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp",
			"process_madvise", "move_pages", "migrate_pages", "rt_sigqueueinfo", "rt_tgsigqueueinfo",
			"io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "bpf", "perf_event_open", "open_by_handle_at",
			"mount", "umount", "umount2", "pivot_root", "chroot", "open_tree", "open_tree_attr", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick",
			"mount_setattr", "unshare", "setns", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module",
			"create_module", "query_module", "get_kernel_syms", "reboot", "swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "syslog",
			"sethostname", "setdomainname", "settimeofday", "clock_settime", "clock_settime64", "stime", "iopl", "ioperm", "vm86",
			"vm86old", "vhangup", "fanotify_init", "nfsservctl", "pciconfig_iobase", "pciconfig_read", "pciconfig_write",
		},
		syscall.ENOSYS: {
			"clone3", "get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node", "lsm_get_self_attr", "file_getattr",
			"file_setattr", "listns", "lookup_dcookie", "sysfs", "ustat", "nice", "_sysctl", "uselib",
		},
		syscall.EACCES: {"socketcall"},
		// What a runtime calls between loading the filter and the program (C09), and what programs live on.
		allowed: {
			"execve", "execveat", "openat", "openat2", "close", "close_range", "prctl", "seccomp", "setgid", "setuid", "setgroups", "setresuid", "setresgid", "capset",
			"futex", "read", "write", "mmap", "munmap", "mprotect", "brk", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "exit", "exit_group",
			"getppid", "fstat", "newfstatat", "statx", "getdents64", "fcntl", "dup3", "pipe2", "epoll_pwait", "eventfd2", "memfd_create", "kill", "tgkill",
			"wait4", "waitid", "rseq", "set_robust_list", "set_tid_address", "sched_yield", "sched_getaffinity", "getrandom",
			"bind", "connect", "listen", "accept4", "sendmsg", "recvmsg", "sendmmsg", "getpriority", "ioprio_get", "pidfd_open", "landlock_create_ruleset", "mseal",
		},
	}
	forPolicies(t, func(t *testing.T, p *Policy, abi string) {
		for errno, names := range calls {
			for _, name := range names {
				for _, args := range [][6]uint64{{}, {1, 1, 1, 1, 1, 1}, {^uint64(0), ^uint64(0), ^uint64(0)}} {
					wantVerdict(t, p, abi, name, args, errno)
				}
			}
		}
	})
}

func TestDefaults(t *testing.T) {
	for name, target := range targets {
		t.Run(name, func(t *testing.T) {
			p := mustCompile(t, target)
			want := Verdict{Action: oci.ActErrno, Errno: syscall.ENOSYS, Default: true, Reason: "no rule names it"}
			if target.Docker {
				want.Errno = syscall.EPERM
			}
			if got := p.Decide("", "no_such_call", [6]uint64{}); got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
			foreign := map[string]string{"amd64": "arm", "arm64": "x32"}[target.Arch]
			for _, arch := range []string{foreign, "riscv64"} {
				if v := p.Decide(arch, "read", [6]uint64{}); v.Action != oci.ActKillThread || v.Allowed() {
					t.Errorf("%s: %+v", arch, v)
				}
			}
		})
	}
}

// The flavours differ in what they say of names no table knows, and nowhere else.
func TestFlavoursAgree(t *testing.T) {
	for _, arch := range []string{"amd64", "arm64"} {
		docker, podman := mustCompile(t, Target{Arch: arch, Docker: true}), mustCompile(t, Target{Arch: arch})
		for _, p := range []*Policy{docker, podman} {
			for _, r := range p.rules {
				vectors := samples()
				if len(r.clause.args) == 0 {
					vectors = vectors[:1]
				}
				for _, name := range r.names {
					for _, args := range vectors {
						a, b := docker.Decide("", name, args), podman.Decide("", name, args)
						if name != "personality" && (a.Errno != b.Errno || a.Action != b.Action) {
							t.Fatalf("%s%#x: docker %+v, podman %+v", name, args, a, b)
						}
					}
				}
			}
		}
	}
}

// samples holds argument vectors on both sides of every comparison in the policy.
func samples() [][6]uint64 {
	first := []uint64{
		0, 1, 2, 3, 4, 8, 9, 10, 11, 15, 16, 17, 40, 45, 0x20000, 0x20008, 0x3d0f00, 0x1200011, 0x10000000, 0x40000000, 0x7e020000,
		0xffffffff, upper, upper | 1, upper | 2, upper | 0x10000000, ^uint64(0),
	}
	second := []uint64{0, 1, 2, 0x5401, 0x5411, 0x5412, 0x5413, 0x541b, 0x541c, 0x541d, 0x80045430, upper, upper | 0x5412, upper | 0x541c, 0xffffffff80045430, ^uint64(0)}
	third := []uint64{0, 1, 15, upper, 0x7fff12345678}
	var all [][6]uint64
	for family := range uint64(64) {
		all = append(all, [6]uint64{family, 1, 0}, [6]uint64{family, 3, 15})
	}
	for _, a := range first {
		for _, b := range second {
			for _, c := range third {
				all = append(all, [6]uint64{a, b, c, 1, 2, 3})
			}
		}
	}
	return all
}
