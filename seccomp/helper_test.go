package seccomp

import (
	"errors"
	"syscall"
	"testing"
)

// TestHelper: what leads out of a container is refused to the helper, what it lives by
// is not.
func TestHelper(t *testing.T) {
	for name, target := range targets {
		t.Run(name, func(t *testing.T) {
			p, err := Helper(target)
			if err != nil {
				t.Fatal(err)
			}
			for _, call := range []string{
				"mount", "move_mount", "setns", "unshare", "clone3", "ptrace", "bpf", "open_by_handle_at", "kill", "unlinkat",
				"renameat2", "chmod", "init_module", "io_uring_setup", "keyctl", "perf_event_open", "process_vm_writev", "reboot",
			} {
				wantVerdict(t, p, target.Arch, call, [6]uint64{}, syscall.EPERM)
			}
			for _, call := range []string{"execve", "socket", "sendmsg", "openat", "futex", "exit_group"} {
				wantVerdict(t, p, target.Arch, call, [6]uint64{}, allowed)
			}
		})
	}
	if _, err := Helper(Target{Arch: "mips"}); !errors.Is(err, ErrArch) {
		t.Error(err)
	}
}
