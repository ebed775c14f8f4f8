//go:build cgo && libseccomp && linux && amd64

package seccomp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
)

// A call is made for real by a re-executed child: without a filter (the control,
// which tells that the filter and nothing else refuses) and with each flavour's.
// Every call is harmless when it does reach the kernel.
type call struct {
	Name    string
	Nr      uintptr
	Args    [6]uint64
	answer  syscall.Errno // with the filter
	refused bool          // by the filter: the control run must answer something else
}

// job is what the child reads from its standard input.
type job struct {
	Target *Target // nil: no filter
	Calls  []call
	Exec   string // run instead of Calls
}

const childEnv = "AGENTSHIM_SECCOMP_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) == "" {
		os.Exit(m.Run())
	}
	if err := child(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func child() error {
	var j job
	if err := json.NewDecoder(os.Stdin).Decode(&j); err != nil {
		return err
	}
	runtime.LockOSThread() // the filter holds for this thread alone
	if j.Target != nil {
		if err := load(*j.Target); err != nil {
			return err
		}
	}
	if j.Exec != "" {
		return syscall.Exec(j.Exec, []string{j.Exec}, nil)
	}
	for _, c := range j.Calls {
		a := c.Args
		_, _, errno := syscall.RawSyscall6(c.Nr, uintptr(a[0]), uintptr(a[1]), uintptr(a[2]), uintptr(a[3]), uintptr(a[4]), uintptr(a[5]))
		fmt.Println(int(errno))
	}
	return nil
}

func load(target Target) error {
	p, err := Compile(harness.Seccomp{}, target)
	if err != nil {
		return err
	}
	filter, err := build(p)
	if err != nil {
		return err
	}
	return filter.Load()
}

// inChild returns the errnos the child prints.
func inChild(t *testing.T, j job) []syscall.Errno {
	t.Helper()
	input, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = []string{childEnv + "=1"}
	cmd.Stdin = bytes.NewReader(input)
	out, err := cmd.Output()
	if err != nil {
		var stderr []byte
		var e *exec.ExitError
		if errors.As(err, &e) {
			stderr = e.Stderr
		}
		t.Fatalf("child: %v\n%s%s", err, out, stderr)
	}
	var errnos []syscall.Errno
	for _, line := range strings.Fields(string(out)) {
		var n int
		if _, err := fmt.Sscan(line, &n); err != nil {
			t.Fatalf("child printed %q", line)
		}
		errnos = append(errnos, syscall.Errno(n))
	}
	return errnos
}

// A85: every refusal has a control run in which the kernel answered otherwise.
func TestKernelAnswers(t *testing.T) {
	if os.Geteuid() != 0 {
		need(t, "root: the kernel refuses others by itself")
	}
	calls := kernelCalls()
	control := inChild(t, job{Calls: calls})
	for name, target := range targets {
		if target.Arch != "amd64" {
			continue
		}
		got := inChild(t, job{Target: &target, Calls: calls})
		if len(control) != len(calls) || len(got) != len(calls) {
			t.Fatalf("%d calls, %d control and %d filtered answers", len(calls), len(control), len(got))
		}
		p := mustCompile(t, target)
		for i, c := range calls {
			t.Run(fmt.Sprintf("%s/%s/%d", name, c.Name, i), func(t *testing.T) {
				if v := p.Decide("", c.Name, c.Args); v.Allowed() == c.refused || c.refused && v.Errno != c.answer {
					t.Errorf("%#x: policy %+v, want %v", c.Args, v, c.answer)
				}
				if got[i] != c.answer {
					t.Errorf("%#x: %v, want %v", c.Args, got[i], c.answer)
				}
				if (control[i] != c.answer) != c.refused {
					t.Errorf("%#x: %v without a filter, %v with it", c.Args, control[i], c.answer)
				}
			})
		}
	}
}

func arguments(args []uint64) (six [6]uint64) {
	copy(six[:], args)
	return six
}

// x32 is __X32_SYSCALL_BIT.
const x32 = 0x40000000

func kernelCalls() []call {
	const bad = ^uint64(0) >> 1 // an address no process has
	same := func(name string, nr uintptr, answer syscall.Errno, args ...uint64) call {
		return call{name, nr, arguments(args), answer, false}
	}
	refused := func(name string, nr uintptr, answer syscall.Errno, args ...uint64) call {
		return call{name, nr, arguments(args), answer, true}
	}
	return []call{
		same("getppid", unix.SYS_GETPPID, 0),
		same("socket", unix.SYS_SOCKET, 0, unix.AF_UNIX, unix.SOCK_STREAM),
		same("socket", unix.SYS_SOCKET, 0, unix.AF_INET, unix.SOCK_DGRAM),
		same("socket", unix.SYS_SOCKET, 0, unix.AF_INET6, unix.SOCK_STREAM),
		same("socket", unix.SYS_SOCKET, 0, unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE),
		refused("socket", unix.SYS_SOCKET, unix.EPROTONOSUPPORT, unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_KOBJECT_UEVENT),
		refused("socket", unix.SYS_SOCKET, unix.EPROTONOSUPPORT, unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_GENERIC),
		refused("socket", unix.SYS_SOCKET, unix.EAFNOSUPPORT, unix.AF_VSOCK, unix.SOCK_STREAM),
		refused("socket", unix.SYS_SOCKET, unix.EAFNOSUPPORT, unix.AF_UNIX|upper, unix.SOCK_STREAM),
		same("socketpair", unix.SYS_SOCKETPAIR, unix.EFAULT, unix.AF_UNIX, unix.SOCK_STREAM, 0, bad),
		refused("socketpair", unix.SYS_SOCKETPAIR, unix.EAFNOSUPPORT, unix.AF_INET, unix.SOCK_STREAM, 0, bad),
		refused("keyctl", unix.SYS_KEYCTL, unix.EPERM, 9999),
		refused("add_key", unix.SYS_ADD_KEY, unix.EPERM, bad),
		refused("ptrace", unix.SYS_PTRACE, unix.EPERM, 16, 1<<30),
		refused("process_vm_readv", unix.SYS_PROCESS_VM_READV, unix.EPERM, 0, 0, 0, 0, 0, 1),
		refused("pidfd_getfd", unix.SYS_PIDFD_GETFD, unix.EPERM, 1<<30),
		refused("kcmp", unix.SYS_KCMP, unix.EPERM, 1<<30, 1<<30),
		same("prlimit64", unix.SYS_PRLIMIT64, unix.EINVAL, 0, 99),
		refused("prlimit64", unix.SYS_PRLIMIT64, unix.EPERM, 1, unix.RLIMIT_NOFILE),
		refused("prlimit64", unix.SYS_PRLIMIT64, unix.EPERM, upper|1, unix.RLIMIT_NOFILE),
		refused("sched_setaffinity", unix.SYS_SCHED_SETAFFINITY, unix.EPERM, 1, 8, bad),
		same("sched_setaffinity", unix.SYS_SCHED_SETAFFINITY, unix.EFAULT, 0, 8, bad),
		refused("sched_setscheduler", unix.SYS_SCHED_SETSCHEDULER, unix.EPERM, 1, 0, 0),
		refused("sched_setparam", unix.SYS_SCHED_SETPARAM, unix.EPERM, 1, 0),
		refused("sched_setattr", unix.SYS_SCHED_SETATTR, unix.EPERM, 1, 0),
		same("setpriority", unix.SYS_SETPRIORITY, 0, unix.PRIO_PROCESS, 0, 0),
		refused("setpriority", unix.SYS_SETPRIORITY, unix.EPERM, unix.PRIO_PROCESS, 1<<30, 0),
		refused("setpriority", unix.SYS_SETPRIORITY, unix.EPERM, unix.PRIO_PGRP, 1<<30, 0),
		refused("setpriority", unix.SYS_SETPRIORITY, unix.EPERM, unix.PRIO_USER, 1<<30, 0),
		refused("ioprio_set", unix.SYS_IOPRIO_SET, unix.EPERM, 1, 1<<30, 2<<13),
		refused("ioprio_set", unix.SYS_IOPRIO_SET, unix.EPERM, 3, 1<<30, 2<<13),
		refused("rt_sigqueueinfo", unix.SYS_RT_SIGQUEUEINFO, unix.EPERM, 1<<30, 0, bad),
		refused("pidfd_send_signal", unix.SYS_PIDFD_SEND_SIGNAL, unix.EPERM, 1<<30, 0, bad),
		same("pidfd_send_signal", unix.SYS_PIDFD_SEND_SIGNAL, unix.EBADF, 1<<30),
		refused("io_uring_setup", unix.SYS_IO_URING_SETUP, unix.EPERM, 1, bad),
		refused("io_uring_enter", unix.SYS_IO_URING_ENTER, unix.EPERM, 1<<30),
		refused("io_uring_register", unix.SYS_IO_URING_REGISTER, unix.EPERM, 1<<30),
		refused("userfaultfd", unix.SYS_USERFAULTFD, unix.EPERM, bad),
		refused("bpf", unix.SYS_BPF, unix.EPERM, 9999),
		refused("perf_event_open", unix.SYS_PERF_EVENT_OPEN, unix.EPERM, bad),
		refused("open_by_handle_at", unix.SYS_OPEN_BY_HANDLE_AT, unix.EPERM, 1<<30, bad),
		refused("mount", unix.SYS_MOUNT, unix.EPERM, bad, bad, bad),
		refused("umount2", unix.SYS_UMOUNT2, unix.EPERM, bad, bad),
		refused("open_tree", unix.SYS_OPEN_TREE, unix.EPERM, 0, bad, bad),
		refused("move_mount", unix.SYS_MOVE_MOUNT, unix.EPERM, 0, 0, 0, 0, bad),
		refused("fsopen", unix.SYS_FSOPEN, unix.EPERM, bad, bad),
		refused("fsconfig", unix.SYS_FSCONFIG, unix.EPERM, bad),
		refused("fsmount", unix.SYS_FSMOUNT, unix.EPERM, bad, bad),
		refused("fspick", unix.SYS_FSPICK, unix.EPERM, bad, bad, bad),
		refused("mount_setattr", unix.SYS_MOUNT_SETATTR, unix.EPERM, bad, bad, bad),
		refused("pivot_root", unix.SYS_PIVOT_ROOT, unix.EPERM, bad, bad),
		refused("chroot", unix.SYS_CHROOT, unix.EPERM, bad),
		refused("unshare", unix.SYS_UNSHARE, unix.EPERM),
		refused("setns", unix.SYS_SETNS, unix.EPERM, 1<<30),
		// CLONE_THREAD without CLONE_SIGHAND: EINVAL before anything is created.
		same("clone", unix.SYS_CLONE, unix.EINVAL, unix.CLONE_THREAD),
		refused("clone", unix.SYS_CLONE, unix.EPERM, unix.CLONE_THREAD|unix.CLONE_NEWUSER),
		refused("clone", unix.SYS_CLONE, unix.EPERM, unix.CLONE_THREAD|unix.CLONE_NEWNET|upper),
		refused("clone3", unix.SYS_CLONE3, unix.ENOSYS, 0, 0),
		same("ioctl", unix.SYS_IOCTL, unix.EBADF, 1<<30, unix.TIOCGWINSZ),
		refused("ioctl", unix.SYS_IOCTL, unix.EPERM, 1<<30, unix.TIOCSTI),
		refused("ioctl", unix.SYS_IOCTL, unix.EPERM, 1<<30, unix.TIOCSTI|upper),
		refused("ioctl", unix.SYS_IOCTL, unix.EPERM, 1<<30, tiocLinux),
		// By the numbers of x32, which this kernel may not have, and past the end of all numbers.
		refused("socket", x32|unix.SYS_SOCKET, unix.EAFNOSUPPORT, unix.AF_VSOCK, unix.SOCK_STREAM),
		refused("unshare", x32|unix.SYS_UNSHARE, unix.EPERM),
		refused("ioctl", x32|514, unix.EPERM, 1<<30, unix.TIOCSTI),
		refused("unshare", 1<<32|unix.SYS_UNSHARE, unix.EPERM),
		refused("kexec_load", unix.SYS_KEXEC_LOAD, unix.EPERM, 0, bad, bad, bad),
		refused("finit_module", unix.SYS_FINIT_MODULE, unix.EPERM, 1<<30, 0, bad),
		refused("get_mempolicy", unix.SYS_GET_MEMPOLICY, unix.ENOSYS, 0, 0, 0, 0, bad),
		same("personality", unix.SYS_PERSONALITY, 0, 0xffffffff),
	}
}

// The filter judges a 32-bit program by the same rules; socketcall hides nothing.
func TestKernelAnswers386(t *testing.T) {
	helper := filepath.Join(t.TempDir(), "calls386")
	build := exec.Command("go", "build", "-o", helper, "./testdata/calls386")
	build.Env = append(os.Environ(), "GOARCH=386", "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	if err := exec.Command(helper).Run(); err != nil {
		need(t, "a kernel with the i386 ABI: %v", err)
	}
	control := []syscall.Errno{0, 0, 0, 0, 0, 0, unix.EOPNOTSUPP, unix.EINVAL, unix.EINVAL}
	if got := inChild(t, job{Exec: helper}); fmt.Sprint(got) != fmt.Sprint(control) {
		t.Errorf("control run %v, want %v", got, control)
	}
	want := []syscall.Errno{
		unix.EACCES, unix.EACCES, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT, 0, 0, unix.EPERM, unix.EPERM, unix.EINVAL,
	}
	for _, target := range []Target{targets["amd64-docker"], targets["amd64-podman"]} {
		if got := inChild(t, job{Target: &target, Exec: helper}); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%+v: %v, want %v", target, got, want)
		}
	}
}

// need skips t when the host lacks what; with AGENTSHIM_REQUIRE_ALL set (CI does)
// it fails instead, so that a lost privilege never reads as a pass.
func need(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("AGENTSHIM_REQUIRE_ALL") != "" {
		t.Fatalf("needs "+format, args...)
	}
	t.Skipf("needs "+format, args...)
}
