// Command try makes attempts inside a container and prints how each ended. Its
// one argument is a JSON list of attempts, [["kind", "operand", ...], ...]; its output
// is the JSON list of outcomes in the same order: "ok", "ok: detail", or the name of
// the error number. It undoes what it could do, where it can.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// attempts are the kinds. Each returns a detail and an error.
var attempts map[string]func(arg []string) (string, error)

func init() {
	attempts = map[string]func([]string) (string, error){
		"syscall": call, "chown": chown, "mknod": mknod, "mount": mount, "setuid": setuid, "chroot": chroot,
		"create": create, "mkdir": mkdir, "openwrite": openWrite, "openread": openRead, "read": read, "cat": cat, "list": list,
		"rename": rename, "exchange": exchange, "link": link, "unlink": unlink, "put": put,
		"writable": writable, "fill": fill, "stat": stat, "run": run,
		"execin": execIn, "locked": locked, "chmod": chmod,
		"status": status, "environ": environ, "namespaces": namespaces,
		"dial": dial, "lookup": lookup, "echo": echo, "abstract": abstract, "interfaces": interfaces,
		"eat": eat, "fork": fork, "open": openMany, "thread": thread, "burn": burn, "openat2": openat2, "loose": loose,
		"nested": nested, "contained": contained, "unmount": unmount, "remount": remount, "mountfs": mountFS, "freshproc": freshProc,
	}
}

func main() {
	if len(os.Args) == 3 && os.Args[1] == "eat" { // the child of eat
		touch(os.Args[2])
		return
	}
	if len(os.Args) == 5 && os.Args[1] == "loose" { // the child of loose
		looseChild(os.Args[2:])
		return
	}
	var all [][]string
	if len(os.Args) != 2 || json.Unmarshal([]byte(os.Args[1]), &all) != nil {
		fmt.Fprintln(os.Stderr, "try: one JSON list of attempts is wanted")
		os.Exit(2)
	}
	outcomes := make([]string, 0, len(all))
	for _, a := range all {
		outcomes = append(outcomes, outcome(a))
	}
	if err := json.NewEncoder(os.Stdout).Encode(outcomes); err != nil {
		os.Exit(2)
	}
}

func outcome(a []string) string {
	f, ok := attempts[a[0]]
	if !ok {
		return "no such attempt"
	}
	detail, err := f(a[1:])
	var errno syscall.Errno
	switch {
	case err == nil && detail == "":
		return "ok"
	case err == nil:
		return "ok: " + detail
	case errors.As(err, &errno):
		return unix.ErrnoName(errno)
	}
	return "error: " + err.Error()
}

func number(s string) uint64 {
	n, err := strconv.ParseUint(s, 0, 64)
	if err != nil {
		panic(err)
	}
	return n
}

// call makes a raw system call: its number, then up to six arguments.
func call(arg []string) (string, error) {
	var a [7]uintptr
	for i, s := range arg {
		a[i] = uintptr(number(s))
	}
	runtime.LockOSThread() // for good: the call may have changed the thread
	_, _, errno := syscall.RawSyscall6(a[0], a[1], a[2], a[3], a[4], a[5], a[6])
	if errno != 0 {
		return "", errno
	}
	return "", nil
}

func chown(arg []string) (string, error) {
	f, err := os.CreateTemp(arg[0], "try-")
	if err != nil {
		return "", err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	return "", unix.Fchown(int(f.Fd()), int(number(arg[1])), int(number(arg[1])))
}

func mknod(arg []string) (string, error) {
	p := filepath.Join(arg[0], "try-node")
	defer os.Remove(p)
	return "", unix.Mknod(p, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3)))
}

func mount(arg []string) (string, error) {
	if err := unix.Mount("try", arg[0], "tmpfs", 0, ""); err != nil {
		return "", err
	}
	return "", unix.Unmount(arg[0], 0)
}

// nested makes the attempt that arg is as uid 0 of user and mount namespaces of its own.
func nested(arg []string) (string, error) { return inside(arg, 0) }

// contained is nested, with what else a fresh /proc and /sys belong to.
func contained(arg []string) (string, error) {
	return inside(arg, syscall.CLONE_NEWPID|syscall.CLONE_NEWNET)
}

func inside(arg []string, more uintptr) (string, error) {
	list, err := json.Marshal([][]string{arg})
	if err != nil {
		return "", err
	}
	cmd := exec.Command("/proc/self/exe", string(list))
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | more,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
	}
	out, err := cmd.Output()
	var outcomes []string
	if err == nil {
		err = json.Unmarshal(out, &outcomes)
	}
	if err != nil {
		return "", err
	}
	return outcomes[0], nil
}

func unmount(arg []string) (string, error) { return "", unix.Unmount(arg[0], unix.MNT_DETACH) }

// remount takes every flag from a mount.
func remount(arg []string) (string, error) {
	return "", unix.Mount("", arg[0], "", unix.MS_REMOUNT|unix.MS_BIND, "")
}

// mountFS mounts a file system of a kind on a folder, and leaves it there.
func mountFS(arg []string) (string, error) {
	return "", unix.Mount("try", arg[1], arg[0], 0, "")
}

// freshProc mounts a /proc on a folder, and opens a file there for writing.
func freshProc(arg []string) (string, error) {
	if err := unix.Mount("try", arg[0], "proc", 0, ""); err != nil {
		return "", err
	}
	return openWrite([]string{filepath.Join(arg[0], arg[1])})
}

func setuid(arg []string) (string, error) {
	runtime.LockOSThread()
	_, _, errno := syscall.RawSyscall(unix.SYS_SETUID, uintptr(number(arg[0])), 0, 0)
	if errno != 0 {
		return "", errno
	}
	return "", nil
}

// chroot goes to /, which changes nothing.
func chroot([]string) (string, error) { return "", unix.Chroot("/") }

func create(arg []string) (string, error) {
	p := filepath.Join(arg[0], ".try-file")
	f, err := os.OpenFile(p, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return "", err
	}
	return "", errors.Join(f.Close(), os.Remove(p))
}

func mkdir(arg []string) (string, error) {
	p := filepath.Join(arg[0], ".try-dir")
	if err := os.Mkdir(p, 0o700); err != nil {
		return "", err
	}
	return "", os.Remove(p)
}

func rename(arg []string) (string, error) { return "", unix.Rename(arg[0], arg[1]) }

func exchange(arg []string) (string, error) {
	return "", unix.Renameat2(unix.AT_FDCWD, arg[0], unix.AT_FDCWD, arg[1], unix.RENAME_EXCHANGE)
}

func link(arg []string) (string, error) { return "", unix.Link(arg[0], arg[1]) }

func unlink(arg []string) (string, error) { return "", unix.Unlink(arg[0]) }

// put makes a file, and the folders that it needs.
func put(arg []string) (string, error) {
	return "", errors.Join(os.MkdirAll(filepath.Dir(arg[0]), 0o755), os.WriteFile(arg[0], []byte("agent"), 0o600))
}

// openWrite opens an existing file for writing and writes nothing.
func openWrite(arg []string) (string, error) {
	f, err := os.OpenFile(arg[0], os.O_WRONLY, 0)
	if err != nil {
		return "", err
	}
	return "", f.Close()
}

// openRead opens an existing file for reading and reads nothing.
func openRead(arg []string) (string, error) {
	f, err := os.Open(arg[0])
	if err != nil {
		return "", err
	}
	return "", f.Close()
}

// read says whether anything can be got from a file or folder: data or empty.
func read(arg []string) (string, error) {
	f, err := os.Open(arg[0])
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	if info.IsDir() {
		names, err := f.Readdirnames(1)
		if len(names) > 0 {
			return "data", nil
		}
		if err != nil && err.Error() != "EOF" {
			return "", err
		}
		return "empty", nil
	}
	n, err := f.Read(make([]byte, 1))
	if n > 0 {
		return "data", nil
	}
	if err != nil && err.Error() != "EOF" {
		return "", err
	}
	return "empty", nil
}

func cat(arg []string) (string, error) {
	b, err := os.ReadFile(arg[0])
	return string(b), err
}

func list(arg []string) (string, error) {
	entries, err := os.ReadDir(arg[0])
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, " "), err
}

// writable walks every folder but those of /proc/PID and lists where a file can be
// created.
func writable([]string) (string, error) {
	var found []string
	err := filepath.WalkDir("/", func(p string, d fs.DirEntry, err error) error {
		if d == nil || !d.IsDir() {
			return nil
		}
		if dir, name := filepath.Split(p); dir == "/proc/" && strings.Trim(name, "0123456789") == "" {
			return fs.SkipDir
		}
		if err != nil && !os.IsPermission(err) {
			return nil
		}
		if _, err := create([]string{p}); err == nil {
			found = append(found, p)
		}
		return nil
	})
	return strings.Join(found, " "), err
}

// fill writes a file until the file system is full and says how many MiB it took.
func fill(arg []string) (string, error) {
	p := filepath.Join(arg[0], ".try-fill")
	f, err := os.Create(p)
	if err != nil {
		return "", err
	}
	defer os.Remove(p)
	defer f.Close()
	block := bytes.Repeat([]byte("x"), 1<<20)
	for n := range int(number(arg[1])) {
		if _, err := f.Write(block); err != nil {
			var errno syscall.Errno
			errors.As(err, &errno)
			return fmt.Sprintf("%d MiB %s", n, unix.ErrnoName(errno)), nil
		}
	}
	return arg[1] + " MiB", nil
}

func stat(arg []string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(arg[0], &st); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d:%d %04o", st.Uid, st.Gid, st.Mode&0o7777), nil
}

// chmod gives a file the mode that it has: the kernel looks for a read-only mount
// before it looks at who asks.
func chmod(arg []string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(arg[0], &st); err != nil {
		return "", err
	}
	return "", unix.Chmod(arg[0], st.Mode&0o7777)
}

// execIn copies this program into a folder and starts it there.
func execIn(arg []string) (string, error) {
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return "", err
	}
	p := filepath.Join(arg[0], ".try-program")
	if err := os.WriteFile(p, b, 0o700); err != nil {
		return "", err
	}
	defer os.Remove(p)
	_, err = exec.Command(p, "[]").Output()
	return "", err
}

// locked makes a folder, gives it to another uid with mode 0700 and lists it.
func locked(arg []string) (string, error) {
	p := filepath.Join(arg[0], ".try-locked")
	if err := errors.Join(os.Mkdir(p, 0o700), os.Chown(p, 1234, 1234)); err != nil {
		return "", fmt.Errorf("no folder of another's: %s", err.Error())
	}
	return list([]string{p})
}

func run(arg []string) (string, error) {
	out, err := exec.Command(arg[0], arg[1:]...).CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return fmt.Sprintf("%s\n%s", exit, strings.TrimSpace(string(out))), nil
	}
	return strings.TrimSpace(string(out)), err
}

// status gives one line of /proc/self/status.
func status(arg []string) (string, error) {
	b, err := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(b)) {
		if name, value, _ := strings.Cut(line, ":"); name == arg[0] {
			return strings.Join(strings.Fields(value), " "), err
		}
	}
	return "", fmt.Errorf("no line %s", arg[0])
}

func environ([]string) (string, error) {
	b, err := json.Marshal(os.Environ())
	return string(b), err
}

func namespaces([]string) (string, error) {
	links := map[string]string{}
	entries, err := os.ReadDir("/proc/self/ns")
	for _, e := range entries {
		links[e.Name()], _ = os.Readlink("/proc/self/ns/" + e.Name())
	}
	b, _ := json.Marshal(links)
	return string(b), err
}

// slow marks an attempt that was not refused at once.
const slow = time.Second

func inTime(start time.Time, detail string, err error) (string, error) {
	if d := time.Since(start); d > slow {
		return "", fmt.Errorf("after %v: %w", d.Round(time.Millisecond), errors.Join(err, errors.New(detail)))
	}
	return detail, err
}

// dial connects and waits for a byte; over UDP it sends one first.
func dial(arg []string) (string, error) {
	start := time.Now()
	conn, err := net.DialTimeout(arg[0], arg[1], 3*time.Second)
	if err == nil {
		defer conn.Close()
		_ = conn.SetDeadline(start.Add(3 * time.Second))
		if _, err = conn.Write([]byte("?")); err == nil {
			_, err = conn.Read(make([]byte, 1))
		}
	}
	return inTime(start, "", err)
}

// lookup resolves a name with the resolver's own files.
func lookup(arg []string) (string, error) {
	start := time.Now()
	addrs, err := net.LookupHost(arg[0])
	var dns *net.DNSError
	if errors.As(err, &dns) {
		err = errors.New("not resolved")
	}
	return inTime(start, strings.Join(addrs, " "), err)
}

// echo listens, connects to itself and carries a byte there and back.
func echo(arg []string) (string, error) {
	if strings.HasPrefix(arg[0], "udp") {
		return "", echoUDP(arg[0], arg[1])
	}
	l, err := net.Listen(arg[0], arg[1])
	if err != nil {
		return "", err
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			b := make([]byte, 1)
			_, _ = c.Read(b)
			_, _ = c.Write(b)
			c.Close()
		}
	}()
	return dial([]string{arg[0], l.Addr().String()})
}

func echoUDP(network, addr string) error {
	l, err := net.ListenPacket(network, addr)
	if err != nil {
		return err
	}
	defer l.Close()
	go func() {
		b := make([]byte, 1)
		if _, from, err := l.ReadFrom(b); err == nil {
			_, _ = l.WriteTo(b, from)
		}
	}()
	_, err = dial([]string{network, l.LocalAddr().String()})
	return err
}

// abstract connects to an abstract UNIX socket.
func abstract(arg []string) (string, error) {
	c, err := net.DialTimeout("unix", "@"+arg[0], time.Second)
	if err != nil {
		return "", err
	}
	return "", c.Close()
}

func interfaces([]string) (string, error) {
	all, err := net.Interfaces()
	var names []string
	for _, i := range all {
		names = append(names, i.Name)
	}
	return strings.Join(names, " "), err
}

// eat has a child use memory, in MiB, and says how the child ended.
func eat(arg []string) (string, error) {
	out, err := exec.Command("/proc/self/exe", "eat", arg[0]).CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.String(), nil
	}
	return string(out), err
}

func touch(mib string) {
	var held [][]byte
	for range number(mib) {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		held = append(held, b)
	}
	runtime.KeepAlive(held)
}

// fork starts processes that wait until it ends, and says how many it got and
// what stopped it.
func fork(arg []string) (string, error) {
	var started []int
	defer func() {
		for _, pid := range started {
			_ = unix.Kill(pid, unix.SIGKILL)
			_, _ = unix.Wait4(pid, nil, 0, nil)
		}
	}()
	for range number(arg[0]) {
		pid, err := syscall.ForkExec("/bin/sleep", []string{"sleep", "60"}, nil)
		if err != nil {
			var errno syscall.Errno
			errors.As(err, &errno)
			return fmt.Sprintf("%d %s", len(started), unix.ErrnoName(errno)), nil
		}
		started = append(started, pid)
	}
	return strconv.Itoa(len(started)), nil
}

// openMany opens descriptors and says how many are open at the end, all in all.
func openMany(arg []string) (string, error) {
	var fds []int
	var failed error
	for range number(arg[0]) {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			failed = err
			break
		}
		fds = append(fds, fd)
	}
	highest := -1
	if len(fds) > 0 {
		highest = slices.Max(fds)
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	if failed == nil {
		return strconv.Itoa(len(fds)), nil
	}
	var errno syscall.Errno
	errors.As(failed, &errno)
	return fmt.Sprintf("highest %d %s", highest, unix.ErrnoName(errno)), nil
}

// thread starts system threads.
func thread([]string) (string, error) {
	done := make(chan struct{})
	for range 8 {
		go func() {
			runtime.LockOSThread()
			done <- struct{}{}
		}()
	}
	for range 8 {
		<-done
	}
	return "", nil
}

// burn keeps two threads busy and gives the CPU time over the wall time.
func burn(arg []string) (string, error) {
	d := time.Duration(number(arg[0])) * time.Millisecond
	start := time.Now()
	var before, after unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &before)
	done := make(chan struct{})
	for range 2 {
		go func() {
			for time.Since(start) < d {
			}
			done <- struct{}{}
		}()
	}
	<-done
	<-done
	_ = unix.Getrusage(unix.RUSAGE_SELF, &after)
	cpu := time.Duration(after.Utime.Nano() - before.Utime.Nano() + after.Stime.Nano() - before.Stime.Nano())
	return strconv.FormatFloat(cpu.Seconds()/time.Since(start).Seconds(), 'f', 2, 64), nil
}

// openat2 asks for / with a newer call that programs probe.
func openat2([]string) (string, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, "/", &unix.OpenHow{Flags: unix.O_PATH, Resolve: unix.RESOLVE_NO_SYMLINKS})
	if err != nil {
		return "", err
	}
	return "", unix.Close(fd)
}
