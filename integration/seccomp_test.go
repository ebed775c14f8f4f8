package integration

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"testing"

	moby "github.com/moby/profiles/seccomp"
	"golang.org/x/sys/unix"
)

// openedCalls are answered by the policy or, where it lets them through, by the kernel,
// harmlessly and with something else. The default policy's run is the control of the others.
var openedCalls = []struct {
	syscallTrial
	standard, lists, nested, file string
}{
	{syscallTrial{name: "ptrace", nr: unix.SYS_PTRACE, args: []uint64{16, 1 << 30}}, "EPERM", "ESRCH", "EPERM", "ESRCH"},
	{syscallTrial{name: "get_mempolicy", nr: unix.SYS_GET_MEMPOLICY, args: []uint64{0, 0, 0, 0, badPointer}}, "ENOSYS", "EINVAL", "ENOSYS", "ENOSYS"},
	{syscallTrial{name: "fchmodat", nr: unix.SYS_FCHMODAT, args: []uint64{0, badPointer}}, "EFAULT", "EPERM", "EFAULT", "EFAULT"},
	{syscallTrial{name: "unshare", nr: unix.SYS_UNSHARE}, "EPERM", "EPERM", "ok", "EPERM"},
	{syscallTrial{name: "setns", nr: unix.SYS_SETNS, args: []uint64{1 << 30}}, "EPERM", "EPERM", "EBADF", "EPERM"},
	// CLONE_THREAD without CLONE_SIGHAND: EINVAL before anything is created.
	{syscallTrial{name: "clone", nr: unix.SYS_CLONE, args: []uint64{unix.CLONE_THREAD | unix.CLONE_NEWUSER}}, "EPERM", "EPERM", "EINVAL", "EPERM"},
	{syscallTrial{name: "mount", nr: unix.SYS_MOUNT, args: []uint64{badPointer, badPointer, badPointer}}, "EPERM", "EPERM", "EFAULT", "EPERM"},
	{syscallTrial{name: "umount2", nr: unix.SYS_UMOUNT2, args: []uint64{badPointer, badPointer}}, "EPERM", "EPERM", "EINVAL", "EPERM"},
	{syscallTrial{name: "chroot", nr: unix.SYS_CHROOT, args: []uint64{badPointer}}, "EPERM", "EPERM", "EFAULT", "EPERM"},
	{syscallTrial{name: "fsopen", nr: unix.SYS_FSOPEN, args: []uint64{badPointer, badPointer}}, "EPERM", "EPERM", "ENOSYS", "EPERM"},
	{syscallTrial{name: "process_vm_readv", nr: unix.SYS_PROCESS_VM_READV, args: []uint64{0, 0, 0, 0, 0, 1}}, "EPERM", "EPERM", "EPERM", "EPERM"},
	// What init and the egress policy stand on is the same in all.
	{syscallTrial{name: "socket", nr: unix.SYS_SOCKET, args: []uint64{unix.AF_VSOCK, unix.SOCK_STREAM}}, "EAFNOSUPPORT", "EAFNOSUPPORT", "EAFNOSUPPORT", "EAFNOSUPPORT"},
	{syscallTrial{name: "prlimit64", nr: unix.SYS_PRLIMIT64, args: []uint64{1, 7}}, "EPERM", "EPERM", "EPERM", "EPERM"},
	{syscallTrial{name: "clone3", nr: unix.SYS_CLONE3}, "ENOSYS", "ENOSYS", "ENOSYS", "ENOSYS"},
}

// nestedMounts are made in user and mount namespaces of the agent's own. The first is the
// control of the others: a mount of its own comes and goes. What the container masks, makes read-only or
// mounts stays as it is, and no other /proc or /sys comes.
var nestedMounts = []struct {
	op   []string
	want string
}{
	{[]string{"mount", "/tmp"}, "ok"},
	{[]string{"mountfs", "tmpfs", "/tmp"}, "ok"},
	{[]string{"unmount", "/proc/keys"}, "EINVAL"},
	{[]string{"unmount", "/proc/sys"}, "EINVAL"},
	{[]string{"unmount", "/sys/firmware"}, "EINVAL"},
	{[]string{"unmount", "/.agentshim-init"}, "EINVAL"},
	{[]string{"unmount", "/etc/hosts"}, "EINVAL"},
	{[]string{"remount", "/"}, "EPERM"},
	{[]string{"remount", "/proc/sys"}, "EPERM"},
	{[]string{"remount", "/try"}, "EPERM"},
	{[]string{"mountfs", "proc", "/tmp"}, "EPERM"},
	{[]string{"mountfs", "sysfs", "/tmp"}, "EPERM"},
}

// TestSystemCallsOpened: what a harness file opens and closes is so for the agent, and nothing
// else: by name, with profile nested, and with Docker's own profile as a file.
func TestSystemCallsOpened(t *testing.T) {
	profile, err := json.Marshal(moby.DefaultProfile())
	if err != nil {
		t.Fatal(err)
	}
	each(t, func(t *testing.T, s setup) {
		file := place(t, filepath.Join(s.private(t), "docker.json"), profile, 0o644)
		s.own(t, file)
		var ops attempts
		for _, c := range openedCalls {
			ops = append(ops, c.op())
		}
		for _, m := range nestedMounts {
			ops = append(ops, append([]string{"nested"}, m.op...))
		}
		run := func(fields spec, accept ...string) tried {
			fields["accept"] = append(accept, "rootless-cgroup-limits")
			got, _ := s.try(t, fields, ops)
			return got
		}
		standard := run(spec{})
		lists := run(spec{"seccomp": map[string]any{"allow": []string{"ptrace", "get_mempolicy"}, "deny": []string{"fchmodat"}}}, "syscall:ptrace")
		nested := run(spec{"seccomp": map[string]any{"profile": "nested"}}, "nested-seccomp")
		custom := run(spec{"seccomp": map[string]any{"profile": file, "deny": []string{"process_vm_readv", "process_vm_writev"}}}, "custom-seccomp", "syscall:ptrace")
		for i, c := range openedCalls {
			t.Run(fmt.Sprintf("%s/%d", c.name, i), func(t *testing.T) {
				got := []string{standard.of(c.op()...), lists.of(c.op()...), nested.of(c.op()...), custom.of(c.op()...)}
				if want := []string{c.standard, c.lists, c.nested, c.file}; fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("default, lists, nested, file: %q, want %q", got, want)
				}
			})
		}
		for _, m := range nestedMounts {
			t.Run(fmt.Sprint(m.op), func(t *testing.T) {
				op := append([]string{"nested"}, m.op...)
				if got := nested.of(op...); got != "ok: "+m.want {
					t.Errorf("%s, want %s", got, m.want)
				}
				if got := standard.of(op...); got != "EPERM" {
					t.Errorf("default: %s", got)
				}
			})
		}
	})
}
