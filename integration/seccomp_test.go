package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	moby "github.com/moby/profiles/seccomp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim"
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

// nestedMounts are made in namespaces of the agent's own. The first is the
// control of the others: a mount of its own comes and goes. What the container masks, makes read-only or
// mounts stays as it is, and no other /proc or /sys comes; where /proc is unmasked, another one comes
// and no /sys, and the kernel's settings are as closed there as they were.
var nestedMounts = []struct {
	op             []string
	want, unmasked string
}{
	{[]string{"mount", "/tmp"}, "ok", "ok"},
	{[]string{"mountfs", "tmpfs", "/tmp"}, "ok", "ok"},
	{[]string{"unmount", "/proc/keys"}, "EINVAL", "EINVAL"},
	{[]string{"unmount", "/proc/sys"}, "EINVAL", "EINVAL"},
	{[]string{"unmount", "/sys/firmware"}, "EINVAL", "EINVAL"},
	{[]string{"unmount", "/.agentshim-init"}, "EINVAL", "EINVAL"},
	{[]string{"unmount", "/etc/hosts"}, "EINVAL", "EINVAL"},
	{[]string{"remount", "/"}, "EPERM", "EPERM"},
	{[]string{"remount", "/proc/sys"}, "EPERM", "EINVAL"},
	{[]string{"remount", "/try"}, "EPERM", "EPERM"},
	{[]string{"remount", "/sys/firmware"}, "EPERM", "EPERM"},
	{[]string{"mountfs", "proc", "/tmp"}, "EPERM", "ok"},
	{[]string{"mountfs", "sysfs", "/tmp"}, "EPERM", "EPERM"},
	{[]string{"freshproc", "/tmp", "sys/kernel/core_pattern"}, "EPERM", "EACCES"},
	{[]string{"freshproc", "/tmp", "sys/fs/suid_dumpable"}, "EPERM", "EACCES"},
	{[]string{"freshproc", "/tmp", "self/oom_score_adj"}, "EPERM", "ok"},
}

// unmaskedReads are what unmasked-proc opens, and what it leaves. The run with nested alone is
// the control of the first, the container without masks that of the rest.
var unmaskedReads = []struct {
	op                     []string
	nested, unmasked, bare string
}{
	{[]string{"read", "/proc/keys"}, "ok: empty", "ok: data", "ok: data"},
	{[]string{"read", "/sys/firmware"}, "ok: empty", "ok: empty", "ok: data"},
	// chmod(2) asks for a read-only mount before it asks who calls.
	{[]string{"chmod", "/proc/sys/kernel/core_pattern"}, "EROFS", "EPERM", "EPERM"},
	{[]string{"openwrite", "/proc/sys/kernel/core_pattern"}, "EACCES", "EACCES", "EACCES"},
	{[]string{"openwrite", "/proc/sys/net/ipv4/ip_forward"}, "EACCES", "EACCES", "EACCES"},
}

// TestSystemCallsOpened: what a harness file opens and closes is so for the agent, and nothing
// else: by name, with profile nested, and with Docker's own profile as a file. No network mode
// changes it (A83).
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
			ops = append(ops, append([]string{"contained"}, m.op...))
		}
		for _, r := range unmaskedReads {
			ops = append(ops, r.op)
		}
		run := func(fields spec, accept ...string) tried {
			fields["accept"] = append(accept, "rootless-cgroup-limits")
			got, _ := s.try(t, fields, ops)
			return got
		}
		standard := run(spec{})
		lists := run(spec{"seccomp": map[string]any{"allow": []string{"ptrace", "get_mempolicy"}, "deny": []string{"fchmodat"}}}, "syscall:ptrace")
		nested := run(spec{"seccomp": map[string]any{"profile": "nested"}}, "nested-seccomp")
		unmasked := run(spec{"seccomp": map[string]any{"profile": "nested"}}, "nested-seccomp", "unmasked-proc")
		gateway := run(spec{"egress": map[string]any{"mode": "allow-list", "allow": []string{"api.example.com"}}})
		open := run(spec{"egress": map[string]any{"mode": "open"}})
		custom := run(spec{"seccomp": map[string]any{"profile": file, "deny": []string{"process_vm_readv", "process_vm_writev"}}}, "custom-seccomp", "syscall:ptrace")
		for i, c := range openedCalls {
			t.Run(fmt.Sprintf("%s/%d", c.name, i), func(t *testing.T) {
				got := []string{standard.of(c.op()...), lists.of(c.op()...), nested.of(c.op()...), custom.of(c.op()...)}
				if want := []string{c.standard, c.lists, c.nested, c.file}; fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("default, lists, nested, file: %q, want %q", got, want)
				}
				if other := []string{gateway.of(c.op()...), open.of(c.op()...)}; other[0] != got[0] || other[1] != got[0] {
					t.Errorf("with allow-list and open: %q, want %q", other, got[0])
				}
			})
		}
		for _, m := range nestedMounts {
			t.Run(fmt.Sprint(m.op), func(t *testing.T) {
				op := append([]string{"contained"}, m.op...)
				if got := nested.of(op...); got != "ok: "+m.want {
					t.Errorf("%s, want %s", got, m.want)
				}
				if got := unmasked.of(op...); got != "ok: "+m.unmasked {
					t.Errorf("unmasked: %s, want %s", got, m.unmasked)
				}
				if got := standard.of(op...); got != "EPERM" {
					t.Errorf("default: %s", got)
				}
			})
		}
		bare := s.control(t, s.unmasked(t), ops[len(ops)-len(unmaskedReads):])
		for _, r := range unmaskedReads {
			t.Run(fmt.Sprint(r.op), func(t *testing.T) {
				got := []string{nested.of(r.op...), unmasked.of(r.op...), bare.of(r.op...)}
				if want := []string{r.nested, r.unmasked, r.bare}; fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("nested, unmasked, bare: %q, want %q", got, want)
				}
			})
		}
	})
}

// unmasked are the flags of a container of the engine's without masks, as the agent's uid.
func (s setup) unmasked(t *testing.T) []string {
	t.Helper()
	flags := []string{"--security-opt=" + map[string]string{"docker": "systempaths=unconfined", "podman": "unmask=ALL"}[s.engine], fmt.Sprintf("--user=%d", s.agentUID(t))}
	if s.rootless() {
		flags = append(flags, "--userns=keep-id")
	}
	return flags
}

// longProfile is Docker's own with more rules on arguments than fit into a filter.
func longProfile(t *testing.T) []byte {
	t.Helper()
	p := moby.DefaultProfile()
	p.Architectures = []oci.Arch{oci.ArchX86_64, oci.ArchX86, oci.ArchX32}
	if runtime.GOARCH == "arm64" {
		p.Architectures = []oci.Arch{oci.ArchAARCH64, oci.ArchARM}
	}
	p.ArchMap = nil
	calls := []string{"lseek", "madvise", "memfd_create"}
	for _, r := range p.Syscalls {
		r.Names = slices.DeleteFunc(r.Names, func(name string) bool { return slices.Contains(calls, name) })
	}
	rule := func(call string, i uint64, arguments ...uint) {
		s := &moby.Syscall{Name: call} //nolint:staticcheck // it counts for less than a list of names
		s.Action = oci.ActAllow
		for _, index := range arguments {
			s.Args = append(s.Args, oci.LinuxSeccompArg{Index: index, Value: 1<<16 | i, ValueTwo: i, Op: oci.OpMaskedEqual})
		}
		p.Syscalls = append(p.Syscalls, s)
	}
	for i := range uint64(900) {
		rule("madvise", i, 1)
	}
	for i := range uint64(13) {
		rule("lseek", i, 0, 1, 2)
	}
	for i := range uint64(12) {
		rule("memfd_create", 100+i, 0, 1, 2)
	}
	b, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestPolicyTooLong: a profile file that compiles to more than the kernel takes is refused by
// name before anything starts. This process has no libseccomp: there the engine's runtime
// fails, and no agent starts either.
func TestPolicyTooLong(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.private(t)
		fields := spec{"accept": []string{"custom-seccomp", "rootless-cgroup-limits"}, "seccomp": map[string]any{
			"profile": place(t, filepath.Join(dir, "long.json"), longProfile(t), 0o644),
			"deny":    []string{"ptrace", "process_vm_readv", "process_vm_writev"},
		}}
		s.own(t, dir)
		r := s.sh(t, fields, "true").refused(t, shim.ReasonPolicy)
		wantText(t, r.Stderr, "long.json", "instructions, 4032 are left to a policy: more than the kernel takes", "hint: take rules with conditions")
		if !s.root() {
			return // this process is root's
		}
		h, err := harness.Load(s.write(t, fields), harness.Overrides{})
		if err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		_, err = shim.Run(t.Context(), shim.Job{
			Harness: h, Words: []string{"echo started"}, Stdout: &out, Stderr: &out,
			LookupEnv: func(name string) (string, bool) {
				v, ok := map[string]string{"XDG_STATE_HOME": dir, "HOME": "/root", "PATH": os.Getenv("PATH")}[name]
				return v, ok
			},
		})
		t.Logf("%v: %v %q", shim.ReasonOf(err), err, shim.HintOf(err))
		if shim.ReasonOf(err) != shim.ReasonEngineFailed || out.String() != "" {
			t.Errorf("%v %q", err, out.String())
		}
	})
}

// TestKilledBySystemCall: where a profile file leaves the machine's 32-bit ABI out, its programs
// die of SIGSYS, and the end says what that is. The control is the same file with the ABI. C05.
func TestKilledBySystemCall(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		return // the program is i386's
	}
	each(t, func(t *testing.T, s setup) {
		dir := s.private(t)
		run := func(arches ...oci.Arch) result {
			p := moby.DefaultProfile()
			p.ArchMap, p.Architectures = nil, arches
			b, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			fields := withHelper(t, spec{"accept": []string{"custom-seccomp", "rootless-cgroup-limits"}, "seccomp": map[string]any{
				"profile": place(t, filepath.Join(dir, fmt.Sprint(len(arches))), b, 0o644), "deny": []string{"ptrace", "process_vm_readv", "process_vm_writev"},
			}})
			s.own(t, dir)
			return s.call(t, call{}, "exec", "--spec", s.write(t, fields), "--command", "--", "/try/calls386")
		}
		r := run(oci.ArchX86_64)
		if r.Code != 159 || r.Stdout != "" {
			t.Errorf("%+v", r)
		}
		wantText(t, r.Stderr, "agentshim: a system call filter killed the program (SIGSYS)")
		if r := run(oci.ArchX86_64, oci.ArchX86).ok(t); !strings.HasPrefix(r.Stdout, "13\n") || strings.Contains(r.Stderr, "SIGSYS") {
			t.Errorf("%+v", r)
		}
	})
}
