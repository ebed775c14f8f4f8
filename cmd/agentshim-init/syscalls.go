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
	"socket": unix.SYS_SOCKET, "keyctl": unix.SYS_KEYCTL, "ptrace": unix.SYS_PTRACE, "kcmp": unix.SYS_KCMP,
	"process_vm_readv": unix.SYS_PROCESS_VM_READV, "prlimit64": unix.SYS_PRLIMIT64,
	"sched_setparam": unix.SYS_SCHED_SETPARAM, "unshare": unix.SYS_UNSHARE, "clone3": unix.SYS_CLONE3,
	"io_uring_setup": unix.SYS_IO_URING_SETUP, "userfaultfd": unix.SYS_USERFAULTFD,
}
