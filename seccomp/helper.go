package seccomp

import (
	"fmt"
	"slices"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// helperCalls are what agentshim-netns needs in a container of its own: a static Go
// program that opens sockets, speaks netlink and reads files of /proc, from the execve
// that a runtime ends with. Names of other architectures do no harm.
var helperCalls = []string{
	// The runtime's last steps: close what is open, become the program (runc, crun).
	"close_range", "execve", "execveat", "getdents64", "fstatfs",
	// Go's runtime.
	"arch_prctl", "brk", "clock_gettime", "clock_nanosleep", "clone", "epoll_create1", "epoll_ctl", "epoll_pwait",
	"eventfd2", "exit", "exit_group", "futex", "getpid", "getrandom", "getrlimit", "gettid", "madvise", "membarrier",
	"mincore", "mmap", "mprotect", "mremap", "munmap", "nanosleep", "pipe2", "prctl", "prlimit64", "restart_syscall",
	"rseq", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sched_getaffinity", "sched_yield", "set_robust_list",
	"set_tid_address", "setrlimit", "sigaltstack", "tgkill", "uname",
	// Files.
	"close", "dup3", "fcntl", "fstat", "lseek", "newfstatat", "openat", "pread64", "read", "readlinkat", "statx", "write",
	// Sockets and netlink.
	"bind", "connect", "getpeername", "getsockname", "getsockopt", "listen", "poll", "ppoll", "recvfrom", "recvmsg",
	"sendmsg", "sendto", "setsockopt", "socket",
}

// Helper returns the policy of agentshim-netns in a container of its own: an allow-list
// without arguments, everything else EPERM. It knows the architecture's own ABI only: a
// call of another one is killed, and a runtime compiles one ABI in an eighth of the time
// that it takes for three. The error is ErrArch.
func Helper(t Target) (*Policy, error) {
	arch, ok := native[t.Arch]
	if !ok {
		return nil, fmt.Errorf("arch %q: %w", t.Arch, ErrArch)
	}
	return &Policy{
		target: t, arches: []oci.Arch{arch}, defaultErrno: ePERM,
		rules: []rule{{names: slices.Sorted(slices.Values(helperCalls)), clause: clause{action: oci.ActAllow}, reason: "agentshim-netns needs it"}},
	}, nil
}
