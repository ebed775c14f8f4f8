package seccomp

// neededCalls are what no run gets by without: agentshim-init, the runtime's last steps
// from loading the filter to execve, glibc's loader and Go's runtime end, or do
// something else than planned, when one of them is refused. A name that the
// architecture does not have does no harm. Programs need more than these.
var neededCalls = []string{
	// The runtime closes what is open and becomes init; init becomes a program.
	"chdir", "close", "clone", "dup3", "execve", "exit_group", "faccessat", "fcntl", "fstatfs", "getdents64", "openat", "pipe2",
	"prctl", "setsid",
	// Go's runtime.
	"arch_prctl", "epoll_create1", "epoll_ctl", "epoll_pwait", "eventfd2", "futex", "mmap", "munmap", "rt_sigaction", "rt_sigprocmask",
	"rt_sigreturn", "sigaltstack", "tgkill",
	// glibc's loader.
	"mprotect", "pread64", "read", "write",
	// Init looks at the container and tries the ways out of it.
	"getpid", "getrlimit", "getsockopt", "mkdirat", "newfstatat", "prlimit64", "pwrite64", "readlinkat", "socket", "uname",
	// Init reaps, and ends what is left.
	"kill", "wait4",
}
