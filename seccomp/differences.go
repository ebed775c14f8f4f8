package seccomp

import oci "github.com/opencontainers/runtime-spec/specs-go"

// Linux error numbers, equal on every architecture of this package.
const (
	ePERM           = 1
	eACCES          = 13
	eNOSYS          = 38
	ePROTONOSUPPORT = 93
	eAFNOSUPPORT    = 97
)

// Values of the kernel's UAPI headers, equal on every architecture of this package.
const (
	afUnix, afInet, afInet6, afNetlink = 1, 2, 10, 16
	netlinkRoute                       = 0

	prioProcess      = 0 // setpriority(2)
	ioprioWhoProcess = 1 // ioprio_set(2)

	tiocSTI   = 0x5412
	tiocLinux = 0x541c

	// CLONE_NEWTIME (0x80) is no flag of clone: there it is part of the exit signal.
	cloneNewNS, cloneNewCgroup, cloneNewUTS, cloneNewIPC   = 0x00020000, 0x02000000, 0x04000000, 0x08000000
	cloneNewUser, cloneNewPID, cloneNewNet, cloneNewAnyone = 0x10000000, 0x20000000, 0x40000000, 0x7e020000
)

// opening says whether a harness file may allow a call that the policy refuses.
type opening int

const (
	// fixed: never. A guarantee stands on the rule that no accept gives up.
	fixed opening = iota
	// dangerous: with the accept syscall:NAME.
	dangerous
	// harmless: by naming it, which the plan shows.
	harmless
)

// difference replaces everything the base says of its calls. One of its clauses holds
// whatever the arguments are.
type difference struct {
	names   []string
	clauses []clause
	reason  string
	open    opening
	// gives says what whoever allows the calls gives up beyond what reason says.
	gives string
}

// differences is the reviewed table. Compile drops a clause that says no more than
// the default; check refuses a table in which two clauses contradict.
var differences = []difference{
	{
		names:   []string{"socket"},
		clauses: socketClauses(),
		reason:  "only UNIX, INET, INET6 and NETLINK_ROUTE: AF_VSOCK reaches the hypervisor from an empty network namespace, AF_ALG is kernel attack surface (CVE-2026-31431)",
	},
	{
		names:   []string{"socketpair"},
		clauses: []clause{allow(eq(0, afUnix)), refuse(eAFNOSUPPORT, ne(0, afUnix))},
		reason:  "the other family with socket pairs, TIPC, is not one of socket's",
	},
	{
		// libseccomp turns a conditional i386 rule for socket into "socketcall with
		// SYS_SOCKET", without the family. An unconditional rule for socketcall wins over
		// those, but a runtime skips a rule that equals the default: hence an errno that is
		// no engine's default.
		names:   []string{"socketcall"},
		clauses: []clause{refuse(eACCES)},
		reason:  "its arguments are behind a pointer, so no family could be refused",
	},
	{
		names:   []string{"add_key", "keyctl", "request_key"},
		clauses: []clause{refuse(ePERM)},
		reason:  "keyrings are per uid, shared with the host without a user namespace",
		open:    dangerous,
	},
	{
		names:   []string{"kcmp", "pidfd_getfd", "process_madvise", "process_vm_readv", "process_vm_writev", "ptrace"},
		clauses: []clause{refuse(ePERM)},
		reason:  "reads or changes another process",
		open:    dangerous,
	},
	{
		names:   []string{"migrate_pages", "move_pages"},
		clauses: []clause{refuse(ePERM)},
		reason:  "moves another process's memory",
		open:    dangerous,
	},
	{
		names:   []string{"prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler"},
		clauses: []clause{allow(eq(0, 0)), refuse(ePERM, ne(0, 0))},
		reason:  "only the caller itself (pid 0): a same-uid agent would starve init",
	},
	{
		names:   []string{"setpriority"},
		clauses: onlySelf(prioProcess),
		reason:  "only the caller itself: a same-uid agent would starve init",
	},
	{
		names:   []string{"ioprio_set"},
		clauses: onlySelf(ioprioWhoProcess),
		reason:  "only the caller itself: a same-uid agent would starve init",
	},
	{
		names:   []string{"rt_sigqueueinfo", "rt_tgsigqueueinfo"},
		clauses: []clause{refuse(ePERM)},
		reason:  "sends a signal with forged details; kill, tgkill and pidfd_send_signal remain",
	},
	{
		names:   []string{"pidfd_send_signal"},
		clauses: []clause{allow(eq(2, 0)), refuse(ePERM, ne(2, 0))},
		reason:  "without siginfo: with it, it is rt_sigqueueinfo",
	},
	{
		names:   []string{"io_uring_enter", "io_uring_register", "io_uring_setup"},
		clauses: []clause{refuse(ePERM)},
		reason:  "does what other calls do, past this filter, and is kernel attack surface; runtimes fall back",
		open:    dangerous,
		gives:   "it opens sockets of every family, so that AF_VSOCK gets around the egress policy",
	},
	{
		names:   []string{"bpf", "perf_event_open", "userfaultfd"},
		clauses: []clause{refuse(ePERM)},
		reason:  "kernel attack surface without use for an agent",
		open:    dangerous,
	},
	{
		names:   []string{"open_by_handle_at"},
		clauses: []clause{refuse(ePERM)},
		reason:  "opens files outside the container's mounts (the shocker escape)",
		open:    dangerous,
	},
	{
		names: []string{
			"chroot", "fsconfig", "fsmount", "fsopen", "fspick", "mount", "mount_setattr", "move_mount",
			"open_tree", "open_tree_attr", "pivot_root", "umount", "umount2",
		},
		clauses: []clause{refuse(ePERM)},
		reason:  "changes what the container sees of the file system",
		open:    dangerous,
	},
	{
		names:   []string{"setns", "unshare"},
		clauses: []clause{refuse(ePERM)},
		reason:  "a user namespace gives capabilities over kernel code that expects root",
		open:    dangerous,
	},
	{
		names:   []string{"clone"},
		clauses: cloneClauses(),
		reason:  "threads and processes, no namespaces",
		open:    dangerous,
	},
	{
		names:   []string{"clone3"},
		clauses: []clause{refuse(eNOSYS)},
		reason:  "its flags are behind a pointer; a libc falls back to clone on ENOSYS, not on EPERM",
		open:    dangerous,
	},
	{
		names:   []string{"ioctl"},
		clauses: ioctlClauses(tiocSTI, tiocLinux),
		reason:  "no TIOCSTI, no TIOCLINUX: both type into the caller's terminal (CVE-2023-1523)",
		open:    dangerous,
	},
	{
		names: []string{
			"create_module", "delete_module", "finit_module", "get_kernel_syms", "init_module",
			"kexec_file_load", "kexec_load", "query_module",
		},
		clauses: []clause{refuse(ePERM)},
		reason:  "loads code into the kernel",
		open:    dangerous,
	},
	{
		names: []string{
			"acct", "clock_settime", "clock_settime64", "fanotify_init", "ioperm", "iopl", "nfsservctl",
			"pciconfig_iobase", "pciconfig_read", "pciconfig_write", "quotactl", "quotactl_fd", "reboot", "setdomainname", "sethostname", "settimeofday",
			"stime", "swapoff", "swapon", "syslog", "vhangup", "vm86", "vm86old",
		},
		clauses: []clause{refuse(ePERM)},
		reason:  "administers the host",
		open:    dangerous,
	},
	{
		names: []string{
			"_sysctl", "afs_syscall", "bdflush", "break", "ftime", "get_tls", "getpmsg", "gtty", "idle", "lock", "lookup_dcookie", "mpx", "nice",
			"oldfstat", "oldlstat", "oldolduname", "oldstat", "olduname", "prof", "profil", "putpmsg",
			"readdir", "security", "sgetmask", "sigaction", "signal", "sigpending", "sigsuspend",
			"ssetmask", "stty", "sysfs", "tuxcall", "ulimit", "uselib", "usr26", "usr32", "ustat", "vserver",
		},
		clauses: []clause{refuse(eNOSYS)},
		reason:  "obsolete: absent from the kernel or replaced by a newer call",
		open:    harmless,
	},
	{
		names:   []string{"get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node"},
		clauses: []clause{refuse(eNOSYS)},
		reason:  "NUMA placement, as on a kernel without it; runtimes probe it",
		open:    harmless,
	},
	{
		names: []string{
			"file_getattr", "file_setattr", "listns", "lsm_get_self_attr", "lsm_list_modules", "lsm_set_self_attr",
		},
		clauses: []clause{refuse(eNOSYS)},
		reason:  "newer than the base: callers fall back",
		open:    harmless,
	},
}

// newer names the calls that a libseccomp older than the version does not
// know, {major, minor, micro}; unreleased stands for none known to have it.
// Runtimes skip an unknown name, so the call then answers the default, or ENOSYS
// where runc's own check for new numbers applies.
var newer = map[string][3]uint{
	"cachestat": {2, 5, 5}, "fchmodat2": {2, 5, 5}, "map_shadow_stack": {2, 5, 5},
	"futex_requeue": {2, 5, 5}, "futex_wait": {2, 5, 5}, "futex_wake": {2, 5, 5},
	"getxattrat": {2, 6, 0}, "listxattrat": {2, 6, 0}, "removexattrat": {2, 6, 0}, "setxattrat": {2, 6, 0},
	"listmount": {2, 6, 0}, "statmount": {2, 6, 0}, "mseal": {2, 6, 0},
	"lsm_get_self_attr": {2, 6, 0}, "lsm_list_modules": {2, 6, 0}, "lsm_set_self_attr": {2, 6, 0},
	"riscv_hwprobe": {2, 6, 0}, "uretprobe": {2, 6, 0},
	"file_getattr": unreleased, "file_setattr": unreleased, "listns": unreleased,
	"open_tree_attr": unreleased,
}

var unreleased = [3]uint{^uint(0)}

func allow(args ...oci.LinuxSeccompArg) clause {
	return clause{args: args, action: oci.ActAllow}
}

func refuse(errno uint, args ...oci.LinuxSeccompArg) clause {
	return clause{args: args, action: oci.ActErrno, errno: errno}
}

func eq(index uint, value uint64) oci.LinuxSeccompArg {
	return oci.LinuxSeccompArg{Index: index, Value: value, Op: oci.OpEqualTo}
}

func ne(index uint, value uint64) oci.LinuxSeccompArg {
	return oci.LinuxSeccompArg{Index: index, Value: value, Op: oci.OpNotEqual}
}

// gt compares the first argument.
func gt(value uint64) oci.LinuxSeccompArg {
	return oci.LinuxSeccompArg{Value: value, Op: oci.OpGreaterThan}
}

// masked holds when the bits of mask in the argument equal those of value.
func masked(index uint, mask, value uint64) oci.LinuxSeccompArg {
	return oci.LinuxSeccompArg{Index: index, Value: mask, ValueTwo: value, Op: oci.OpMaskedEqual}
}

// socketClauses allows four families and refuses all others as the kernel does
// where they are not built in. One rule may hold one comparison per argument
// (runc takes several as alternatives), so the gaps between the families are
// aligned blocks of what the kernel reads, and only the open end is a range. Each rule costs every start of a
// container: libseccomp derives a socketcall from it.
func socketClauses() []clause {
	clauses := []clause{
		allow(eq(0, afUnix)),
		allow(eq(0, afInet)),
		allow(eq(0, afInet6)),
		allow(eq(0, afNetlink), eq(2, netlinkRoute)),
		refuse(ePROTONOSUPPORT, eq(0, afNetlink), ne(2, netlinkRoute)),
		refuse(eAFNOSUPPORT, gt(afNetlink)),
	}
	for _, block := range []struct{ first, size uint64 }{{0, 1}, {3, 1}, {4, 4}, {8, 2}, {11, 1}, {12, 4}} {
		clauses = append(clauses, refuse(eAFNOSUPPORT, masked(0, 0xffffffff&^(block.size-1), block.first)))
	}
	return clauses
}

// onlySelf allows (which, 0, …) where which means one process.
func onlySelf(which uint64) []clause {
	return []clause{
		allow(eq(0, which), eq(1, 0)),
		refuse(ePERM, ne(0, which)),
		refuse(ePERM, eq(0, which), ne(1, 0)),
	}
}

func cloneClauses() []clause {
	clauses := []clause{allow(masked(0, cloneNewAnyone, 0))}
	for _, flag := range []uint64{cloneNewNS, cloneNewCgroup, cloneNewUTS, cloneNewIPC, cloneNewUser, cloneNewPID, cloneNewNet} {
		clauses = append(clauses, refuse(ePERM, masked(0, flag, flag)))
	}
	return clauses
}

// ioctlClauses allows every request but those given, judged by the low 32 bits:
// the kernel reads no more. Allowing the exact complement instead of
// everything keeps the two kinds of rule disjoint, so that no runtime's rule order matters.
func ioctlClauses(requests ...uint32) []clause {
	const request = 1
	same, differ := uint32(0xffffffff), uint32(0)
	for _, r := range requests {
		differ |= r ^ requests[0]
	}
	same &^= differ
	var clauses []clause
	for bit := uint32(1); bit != 0; bit <<= 1 {
		if same&bit != 0 {
			clauses = append(clauses, allow(masked(request, uint64(bit), uint64(bit&^requests[0]))))
		}
	}
	for pattern := differ; ; pattern = (pattern - 1) & differ {
		if !taken(requests, differ, pattern) {
			clauses = append(clauses, allow(masked(request, uint64(differ), uint64(pattern))))
		}
		if pattern == 0 {
			break
		}
	}
	for _, r := range requests {
		clauses = append(clauses, refuse(ePERM, masked(request, 0xffffffff, uint64(r))))
	}
	return clauses
}

func taken(requests []uint32, mask, pattern uint32) bool {
	for _, r := range requests {
		if r&mask == pattern {
			return true
		}
	}
	return false
}
