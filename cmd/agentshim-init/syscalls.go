package main

import (
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

func (l *look) kernelPaths() {
	l.KernelPaths = map[string]bool{}
	for _, p := range wire.KernelPaths {
		var st unix.Stat_t
		l.KernelPaths[p] = unix.Lstat(p, &st) == nil
	}
}

// trySyscalls makes each of wire.Syscalls and names its outcome.
func trySyscalls() []string {
	out := make([]string, len(wire.Syscalls))
	for i, call := range wire.Syscalls {
		out[i] = trySyscall(call)
	}
	return out
}

func trySyscall(call wire.Syscall) string {
	nr, ok := numbersByName[call.Name]
	if !ok {
		return "unknown"
	}
	a := call.Args
	r, _, errno := unix.RawSyscall6(nr, uintptr(a[0]), uintptr(a[1]), uintptr(a[2]), uintptr(a[3]), uintptr(a[4]), uintptr(a[5]))
	if errno != 0 {
		return unix.ErrnoName(errno)
	}
	if call.Name == "socket" || call.Name == "userfaultfd" || call.Name == "io_uring_setup" {
		unix.Close(int(r))
	}
	return "ok"
}

var numbersByName = map[string]uintptr{
	"add_key": unix.SYS_ADD_KEY, "bpf": unix.SYS_BPF, "chroot": unix.SYS_CHROOT, "clone": unix.SYS_CLONE, "clone3": unix.SYS_CLONE3,
	"finit_module": unix.SYS_FINIT_MODULE, "fsopen": unix.SYS_FSOPEN, "io_uring_enter": unix.SYS_IO_URING_ENTER,
	"io_uring_setup": unix.SYS_IO_URING_SETUP, "ioctl": unix.SYS_IOCTL, "ioprio_set": unix.SYS_IOPRIO_SET,
	"kcmp": unix.SYS_KCMP, "keyctl": unix.SYS_KEYCTL, "mount": unix.SYS_MOUNT, "open_by_handle_at": unix.SYS_OPEN_BY_HANDLE_AT,
	"open_tree": unix.SYS_OPEN_TREE, "perf_event_open": unix.SYS_PERF_EVENT_OPEN, "pidfd_getfd": unix.SYS_PIDFD_GETFD,
	"pivot_root": unix.SYS_PIVOT_ROOT, "prlimit64": unix.SYS_PRLIMIT64, "process_vm_readv": unix.SYS_PROCESS_VM_READV,
	"process_vm_writev": unix.SYS_PROCESS_VM_WRITEV, "ptrace": unix.SYS_PTRACE, "rt_sigqueueinfo": unix.SYS_RT_SIGQUEUEINFO,
	"sched_setaffinity": unix.SYS_SCHED_SETAFFINITY, "sched_setattr": unix.SYS_SCHED_SETATTR,
	"sched_setparam": unix.SYS_SCHED_SETPARAM, "setns": unix.SYS_SETNS, "setpriority": unix.SYS_SETPRIORITY,
	"socket": unix.SYS_SOCKET, "socketpair": unix.SYS_SOCKETPAIR, "umount2": unix.SYS_UMOUNT2, "unshare": unix.SYS_UNSHARE,
	"userfaultfd": unix.SYS_USERFAULTFD,
}
