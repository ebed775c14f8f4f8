// Command attack is what a hostile agent would run against the first process of
// its container. It prints one line "NAME OUTCOME" for each attempt, where the
// outcome is "ok" or an errno's name.
package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	verbs := map[string]func(args []string){
		"open": open, "calls": calls, "signals": signals, "starve": starve, "bomb": bomb,
		"fill": fill, "pass": pass, "orphans": orphans, "plain": plain, "notify": notify,
	}
	verbs[os.Args[1]](os.Args[2:])
}

func outcome(name string, err error) {
	text := "ok"
	if err != nil {
		var errno syscall.Errno
		if text = err.Error(); asErrno(err, &errno) {
			text = unix.ErrnoName(errno)
		}
	}
	fmt.Println(name, text)
}

func asErrno(err error, to *syscall.Errno) bool {
	e, ok := err.(syscall.Errno) //nolint:errorlint // raw system calls return it bare
	*to = e
	return ok
}

// open tries the files of /proc/1 that only a process's owner may use.
func open([]string) {
	for _, f := range []struct {
		name string
		mode int
	}{
		{"fd/0", unix.O_RDONLY}, {"fd/1", unix.O_WRONLY}, {"fd/2", unix.O_WRONLY}, {"fd", unix.O_RDONLY},
		{"mem", unix.O_RDWR}, {"environ", unix.O_RDONLY}, {"maps", unix.O_RDONLY}, {"auxv", unix.O_RDONLY},
		{"exe", unix.O_RDONLY}, {"cwd", unix.O_RDONLY}, {"root", unix.O_RDONLY}, {"ns/pid", unix.O_RDONLY},
		{"oom_score_adj", unix.O_WRONLY}, {"coredump_filter", unix.O_WRONLY}, {"timerslack_ns", unix.O_WRONLY},
		{"clear_refs", unix.O_WRONLY}, {"autogroup", unix.O_WRONLY}, {"sched", unix.O_WRONLY},
		{"comm", unix.O_WRONLY}, {"task/1/comm", unix.O_WRONLY}, {"task/1/mem", unix.O_RDWR}, {"fdinfo", unix.O_RDONLY}, {"map_files", unix.O_RDONLY},
		{"pagemap", unix.O_RDONLY}, {"smaps", unix.O_RDONLY}, {"uid_map", unix.O_WRONLY},
	} {
		fd, err := unix.Open("/proc/1/"+f.name, f.mode|unix.O_NONBLOCK, 0)
		if f.name == "timerslack_ns" && err == nil { // judged at the write
			_, err = unix.Write(fd, []byte("1"))
		}
		outcome(f.name, err)
	}
}

func raw(nr uintptr, args ...uintptr) error {
	var a [6]uintptr
	copy(a[:], args)
	if _, _, errno := unix.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5]); errno != 0 {
		return errno
	}
	return nil
}

const (
	schedIdle     = 5
	ioprioProcess = 1
	ioprioUser    = 3
	ioprioIdle    = 3 << 13
	ptraceSeize   = 0x4206
	ptraceDetach  = 17
)

// calls tries to change, slow down or look into process 1.
func calls([]string) {
	uid := uintptr(os.Getuid())
	zero := uintptr(unsafe.Pointer(&[128]byte{}))
	mask := [128]byte{1}
	attr := [12]uint32{48, schedIdle}
	limit := [2]uint64{1 << 30, 1 << 30}
	iov := struct{ base, size uintptr }{zero, 1}
	vector := uintptr(unsafe.Pointer(&iov))
	outcome("sched_setscheduler", raw(unix.SYS_SCHED_SETSCHEDULER, 1, schedIdle, zero))
	outcome("sched_setparam", raw(unix.SYS_SCHED_SETPARAM, 1, zero))
	outcome("sched_setattr", raw(unix.SYS_SCHED_SETATTR, 1, uintptr(unsafe.Pointer(&attr)), 0))
	outcome("sched_setaffinity", raw(unix.SYS_SCHED_SETAFFINITY, 1, 128, uintptr(unsafe.Pointer(&mask))))
	outcome("setpriority-process", unix.Setpriority(unix.PRIO_PROCESS, 1, 19))
	outcome("setpriority-group", unix.Setpriority(unix.PRIO_PGRP, 1, 19))
	outcome("setpriority-user", unix.Setpriority(unix.PRIO_USER, int(uid), 19))
	outcome("setpriority-own-user", unix.Setpriority(unix.PRIO_USER, 0, 19))
	outcome("ioprio_set-process", raw(unix.SYS_IOPRIO_SET, ioprioProcess, 1, ioprioIdle))
	outcome("ioprio_set-user", raw(unix.SYS_IOPRIO_SET, ioprioUser, uid, ioprioIdle))
	outcome("prlimit64", raw(unix.SYS_PRLIMIT64, 1, unix.RLIMIT_CPU, uintptr(unsafe.Pointer(&limit)), 0))
	outcome("process_vm_readv", raw(unix.SYS_PROCESS_VM_READV, 1, vector, 1, vector, 1, 0))
	outcome("process_vm_writev", raw(unix.SYS_PROCESS_VM_WRITEV, 1, vector, 0, vector, 0, 0))
	outcome("kcmp", raw(unix.SYS_KCMP, 1, uintptr(os.Getpid()), 0, 0, 0))
	outcome("pidfd_getfd", pidfdGetfd())
	outcome("rt_sigqueueinfo", queueSignal())
	outcome("move_pages", raw(unix.SYS_MOVE_PAGES, 1, 0, 0, 0, 0, 0))
	outcome("migrate_pages", raw(unix.SYS_MIGRATE_PAGES, 1, 64, zero, zero))
	outcome("get_robust_list", raw(unix.SYS_GET_ROBUST_LIST, 1, vector, vector))
	outcome("core_sched", raw(unix.SYS_PRCTL, unix.PR_SCHED_CORE, unix.PR_SCHED_CORE_SHARE_TO, 1, 0, 0))
	outcome("pidfd-namespace", pidfdNamespace())
	err := raw(unix.SYS_PTRACE, ptraceSeize, 1, 0, 0)
	outcome("ptrace", err)
	if err == nil {
		_ = raw(unix.SYS_PTRACE, ptraceDetach, 1, 0, 0)
	}
}

func pidfdGetfd() error {
	fd, err := unix.PidfdOpen(1, 0)
	if err != nil {
		return err
	}
	_, err = unix.PidfdGetfd(fd, 1, 0)
	return err
}

// pidfdNamespace asks for the mount namespace: ioctl_pidfd(2), Linux 6.11.
func pidfdNamespace() error {
	const getMountNamespace = 0xff03
	fd, err := unix.PidfdOpen(1, 0)
	if err != nil {
		return err
	}
	return raw(unix.SYS_IOCTL, uintptr(fd), getMountNamespace, 0)
}

// queueSignal sends a signal that looks like no kill(2)'s.
func queueSignal() error {
	const siQueue = -1
	info := [32]int32{0: int32(unix.SIGCONT), 2: siQueue}
	return raw(unix.SYS_RT_SIGQUEUEINFO, 1, uintptr(unix.SIGCONT), uintptr(unsafe.Pointer(&info)))
}

const (
	fSetOwn    = 8
	fSetSig    = 10
	lastSignal = 64
)

// signals sends every signal to process 1 and to each of its threads in every way
// there is. It ends with exit code 42 and says how many sends the kernel took.
func signals([]string) {
	sent := map[string]int{}
	count := func(way string, err error) {
		if err == nil {
			sent[way]++
		}
	}
	pidfd, pidfdErr := unix.PidfdOpen(1, 0)
	tasks, _ := os.ReadDir("/proc/1/task")
	for sig := 1; sig <= lastSignal; sig++ {
		count("kill", unix.Kill(1, syscall.Signal(sig)))
		if pidfdErr == nil {
			count("pidfd", unix.PidfdSendSignal(pidfd, syscall.Signal(sig), nil, 0))
		}
		for _, task := range tasks {
			tid, _ := strconv.Atoi(task.Name())
			count("tgkill", unix.Tgkill(1, tid, syscall.Signal(sig)))
		}
	}
	// A signal that is still pending swallows its like.
	for range 3 {
		time.Sleep(100 * time.Millisecond)
		for sig := 1; sig <= lastSignal; sig++ {
			count("owner", ownerSignal(sig))
		}
	}
	time.Sleep(100 * time.Millisecond)
	for _, way := range []string{"kill", "pidfd", "tgkill", "owner"} {
		fmt.Println(way, sent[way])
	}
	os.Exit(42)
}

// ownerSignal has the kernel send sig to process 1 because a pipe of ours can be
// read: fcntl(2), F_SETSIG.
func ownerSignal(sig int) error {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(p[0])
	defer unix.Close(p[1])
	for _, step := range [][2]int{{fSetOwn, 1}, {fSetSig, sig}, {unix.F_SETFL, unix.O_ASYNC | unix.O_NONBLOCK}} {
		if _, err := unix.FcntlInt(uintptr(p[0]), step[0], step[1]); err != nil {
			return err
		}
	}
	_, err = unix.Write(p[1], []byte{0})
	return err
}

// starve tries to take the processor from process 1 and then uses all of it: with
// as many endless loops as the container takes, or as its argument says. They start
// together, for else each would have to win against those before it.
func starve(args []string) {
	calls(nil)
	most, _ := strconv.Atoi(args[0])
	var gate [2]int
	if err := unix.Pipe2(gate[:], unix.O_CLOEXEC); err != nil {
		os.Exit(1)
	}
	n := 0
	for ; n < most; n++ {
		_, err := syscall.ForkExec("/bin/sh", []string{"sh", "-c", "read x; while :; do :; done"}, &syscall.ProcAttr{Files: []uintptr{uintptr(gate[0]), 1, 2}})
		if err != nil {
			break
		}
	}
	fmt.Println("spinners", n)
	unix.Close(gate[1])
	for {
	}
}

// pause waits without the Go runtime: it would want another thread, and the
// container may be full.
func pause(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	_, _, _ = unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&t)), 0, 0)
}

// bomb starts shells that fork without end, and ends with exit code 9 a second later.
func bomb([]string) {
	const shells = 40
	runtime.GOMAXPROCS(1)
	for range shells {
		_, _ = syscall.ForkExec("/bin/sh", []string{
			"sh", "-c",
			"trap '' TERM HUP INT; while :; do (sleep 100 & sleep 0.01 & setsid sleep 100 &) 2>/dev/null; done",
		}, &syscall.ProcAttr{})
	}
	pause(time.Second)
	fmt.Println("processes", processes())
	os.Exit(9)
}

// fill takes every process that the container may have, then uses all three
// streams at once and ends with exit code 11.
func fill(args []string) {
	most, _ := strconv.Atoi(args[0])
	n := 0
	for ; n < most; n++ {
		if _, err := syscall.ForkExec("/bin/sleep", []string{"sleep", "1000"}, &syscall.ProcAttr{}); err != nil {
			break
		}
	}
	buf := make([]byte, 64<<10)
	for {
		got, err := unix.Read(0, buf)
		if got <= 0 || err != nil {
			break
		}
		for _, fd := range []int{1, 2} {
			for b := buf[:got]; len(b) > 0; {
				wrote, err := unix.Write(fd, b)
				if err != nil {
					os.Exit(12)
				}
				b = b[wrote:]
			}
		}
	}
	if n == most {
		os.Exit(13) // nothing stopped it
	}
	os.Exit(11)
}

func processes() int {
	d, err := os.Open("/proc")
	if err != nil {
		return 0
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	n := 0
	for _, name := range names {
		if name[0] >= '0' && name[0] <= '9' {
			n++
		}
	}
	return n
}

// orphans leaves 20 ended processes to process 1 and counts those it doesn't reap.
func orphans([]string) {
	for range 20 {
		_ = exec.Command("/bin/sh", "-c", "true & exit 0").Run()
	}
	time.Sleep(500 * time.Millisecond)
	zombies := 0
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, stat := range stats {
		if b, err := os.ReadFile(stat); err == nil && strings.Contains(string(b), ") Z 1 ") {
			zombies++
		}
	}
	fmt.Println("zombies", zombies)
}

// pass gives its standard output to whoever listens on a socket and ends with exit
// code 6.
func pass(args []string) {
	conn, err := net.Dial("unix", args[0])
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	if _, _, err := conn.(*net.UnixConn).WriteMsgUnix([]byte{0}, unix.UnixRights(1), nil); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	_, _ = conn.Read(make([]byte, 1))
	fmt.Println("passed")
	os.Exit(6)
}

// plain is a first process that runs the rest of its arguments and, like any Go
// program, handles no signal.
func plain(args []string) {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Stdout = os.Stdout
	_ = cmd.Run()
	os.Exit(43)
}

// notify is a first process that catches every signal.
func notify(args []string) {
	signal.Notify(make(chan os.Signal, 1))
	plain(args)
}
