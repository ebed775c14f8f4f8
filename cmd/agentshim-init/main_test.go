package main

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// childVar makes the test's own binary set up a container's folders and become the
// program that it names.
const childVar = "AGENTSHIM_INIT_TEST_CHILD"

func TestMain(m *testing.M) {
	if program := os.Getenv(childVar); program != "" {
		fmt.Fprintln(os.Stderr, become(program))
		os.Exit(99)
	}
	code := m.Run()
	if builtDir != "" {
		os.RemoveAll(builtDir)
	}
	os.Exit(code)
}

func become(program string) error {
	for _, m := range []struct{ kind, target string }{{"", "/"}, {"proc", "/proc"}, {"tmpfs", "/home"}, {"tmpfs", "/run"}} {
		flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV)
		if m.kind == "" {
			flags = unix.MS_REC | unix.MS_PRIVATE
		}
		if err := unix.Mount(m.kind, m.target, m.kind, flags, ""); err != nil {
			return fmt.Errorf("mount %q on %q: %w", m.kind, m.target, err)
		}
	}
	if err := os.Mkdir(wire.HomeDir, 0o700); err != nil {
		return err
	}
	if err := unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return err
	}
	return syscall.Exec(program, append([]string{program}, os.Args[1:]...), []string{"PATH=/usr/bin:/bin"})
}

var builtDir string

// built is init as make build makes it.
var built = sync.OnceValues(func() (program string, err error) {
	if builtDir, err = os.MkdirTemp("", "agentshim-init-test-"); err != nil {
		return "", err
	}
	program = filepath.Join(builtDir, "agentshim-init")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return program, os.Chmod(program, 0o111)
})

func binary(t *testing.T) string {
	t.Helper()
	program, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// peer is the shim's side of an init in namespaces of its own.
type peer struct {
	t      *testing.T
	cmd    *exec.Cmd
	conn   *wire.Conn
	in     io.WriteCloser
	stderr bytes.Buffer
	hello  wire.Hello
	// greeted is the time from start to hello, with that of the test's child.
	greeted time.Duration
}

// needNamespaces skips t where no namespaces can be made; with
// AGENTSHIM_REQUIRE_ALL set it fails instead.
func needNamespaces(t *testing.T) {
	t.Helper()
	err := namespaced("/bin/true").Run()
	if err == nil {
		return
	}
	if os.Getenv("AGENTSHIM_REQUIRE_ALL") != "" {
		t.Fatalf("namespaces: %v", err)
	}
	t.Skipf("needs namespaces: %v", err)
}

// namespaced is a command that runs program as the first process of a pid
// namespace.
func namespaced(program string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = []string{childVar + "=" + program}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	return cmd
}

// start runs init up to its hello.
func start(t *testing.T) *peer {
	t.Helper()
	needNamespaces(t)
	return greet(t, namespaced(binary(t), arg))
}

// greet starts a process of init's program and takes its hello.
func greet(t *testing.T, cmd *exec.Cmd) *peer {
	t.Helper()
	p := &peer{t: t, cmd: cmd}
	p.cmd.Stderr = &p.stderr
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.conn = wire.NewConn(out, p.in)
	begin := time.Now()
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop := time.AfterFunc(time.Minute, func() { _ = p.cmd.Process.Kill() })
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		stop.Stop()
	})
	p.recv(wire.KindHello, &p.hello)
	p.greeted = time.Since(begin)
	return p
}

// recv takes the next frame, which must be of that kind.
func (p *peer) recv(kind wire.Kind, v any) {
	p.t.Helper()
	f, err := p.conn.Recv()
	if err != nil {
		p.t.Fatalf("waiting for frame kind %d: %v; %s", kind, err, p.stderr.String())
	}
	if f.Kind != kind {
		p.t.Fatalf("frame kind %d, want %d: %s", f.Kind, kind, f.Payload)
	}
	if v == nil {
		return
	}
	if err := f.JSON(v); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) send(kind wire.Kind, stream uint8, payload string) {
	p.t.Helper()
	if err := p.conn.Send(kind, stream, []byte(payload)); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) sendJSON(kind wire.Kind, v any) {
	p.t.Helper()
	if err := p.conn.SendJSON(kind, v); err != nil {
		p.t.Fatal(err)
	}
}

// script launches a shell.
func (p *peer) script(text string) {
	p.t.Helper()
	p.sendJSON(wire.KindLaunch, launchOf("sh", "-c", text))
	p.recv(wire.KindStarted, nil)
}

func launchOf(args ...string) wire.Launch {
	return wire.Launch{Args: args, Env: []string{"PATH=/usr/bin:/bin", "A=b"}, Dir: "/tmp", RuntimeDir: "/run/user/0"}
}

// finish takes everything until the exit frame. It grants no credit, so it is for
// less than a window.
func (p *peer) finish() (exit wire.Exit, stdout, stderr string) {
	p.t.Helper()
	var out [3]strings.Builder
	for {
		f, err := p.conn.Recv()
		if err != nil {
			p.t.Fatalf("before the exit frame: %v; %s", err, p.stderr.String())
		}
		switch f.Kind {
		case wire.KindData:
			out[f.Stream].Write(f.Payload)
		case wire.KindExit:
			if err := f.JSON(&exit); err != nil {
				p.t.Fatal(err)
			}
			return exit, out[wire.Stdout].String(), out[wire.Stderr].String()
		}
	}
}

// ends waits for init's end and returns its exit code.
func (p *peer) ends() int {
	p.t.Helper()
	for {
		if _, err := p.conn.Recv(); err != nil {
			break
		}
	}
	_ = p.cmd.Wait()
	return p.cmd.ProcessState.ExitCode()
}

func TestHello(t *testing.T) {
	p := start(t)
	h := p.hello
	t.Logf("hello after %v", p.greeted)
	if h.Version != wire.Version || h.PID != 1 || len(h.Processes) != 1 || len(h.Errors) > 0 {
		t.Errorf("version %d, pid %d, processes %v, errors %v", h.Version, h.PID, h.Processes, h.Errors)
	}
	if len(h.Environ) != 1 || len(h.Syscalls) != len(wire.Syscalls) || len(h.Mounts) == 0 {
		t.Errorf("environ %q, %d system calls, %d mounts", h.Environ, len(h.Syscalls), len(h.Mounts))
	}
	for fd, link := range h.FDs {
		if fd > 2 && !strings.HasPrefix(link, "anon_inode:") {
			t.Errorf("descriptor %d is open: %s", fd, link)
		}
	}
}

// TestLifeline: whatever ends or breaks the connection ends the container, before
// the launch and while the harness runs.
func TestLifeline(t *testing.T) {
	for _, row := range []struct {
		name string
		in   string
	}{
		{"end", ""},
		{"half a frame", "\x09\x00"},
		{"garbage", "GET / HTTP/1.1\r\n\r\n"},
		{"frame of init's own", "\x0d\x00\x00\x00\x00\x00\x00\x02{}"},
	} {
		for _, launched := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, launched %v", row.name, launched), func(t *testing.T) {
				p := start(t)
				if launched {
					p.script("trap '' TERM HUP; echo running; exec sleep 60")
				}
				if _, err := io.WriteString(p.in, row.in); err != nil {
					t.Fatal(err)
				}
				if row.in == "" || row.in == "\x09\x00" {
					p.in.Close()
				}
				begin := time.Now()
				if code := p.ends(); code != exitRefused || time.Since(begin) > 5*time.Second {
					t.Errorf("exit code %d after %v: %s", code, time.Since(begin), p.stderr.String())
				}
			})
		}
	}
}

// TestOrder: a frame at the wrong time ends the container.
func TestOrder(t *testing.T) {
	launch := func(p *peer) { p.script("exec sleep 60") }
	for _, row := range []struct {
		name string
		do   func(p *peer)
	}{
		{"data before launch", func(p *peer) { p.send(wire.KindData, wire.Stdin, "x") }},
		{"signal before launch", func(p *peer) { _ = p.conn.SendUint32(wire.KindSignal, 0, 15) }},
		{"file data before its file", func(p *peer) { p.send(wire.KindFileData, 0, "x") }},
		{"second launch", func(p *peer) { launch(p); p.sendJSON(wire.KindLaunch, launchOf("true")) }},
		{"file after launch", func(p *peer) { launch(p); p.sendJSON(wire.KindFile, wire.File{Path: "/home/agent/x"}) }},
		{"probe after launch", func(p *peer) { launch(p); p.send(wire.KindProbe, 0, "") }},
		{"data for stdout", func(p *peer) { launch(p); p.send(wire.KindData, wire.Stdout, "x") }},
		{"end of stdout", func(p *peer) { launch(p); p.send(wire.KindEOF, wire.Stdout, "") }},
		{"credit for stdin", func(p *peer) { launch(p); _ = p.conn.SendUint32(wire.KindCredit, wire.Stdin, 1) }},
		{"credit past the window", func(p *peer) { launch(p); _ = p.conn.SendUint32(wire.KindCredit, wire.Stdout, 1) }},
		{"data past the end", func(p *peer) { launch(p); p.send(wire.KindEOF, wire.Stdin, ""); p.send(wire.KindData, wire.Stdin, "x") }},
		{"window without a terminal", func(p *peer) { launch(p); _ = p.conn.SendUint32(wire.KindWindow, 0, 1) }},
		{"credit for a terminal's stderr", func(p *peer) {
			p.terminal(wire.Size{}, "exec sleep 60")
			_ = p.conn.SendUint32(wire.KindCredit, wire.Stderr, 1)
		}},
		{"launch that is no object", func(p *peer) { p.send(wire.KindLaunch, 0, "[]") }},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := start(t)
			row.do(p)
			if code := p.ends(); code != exitRefused || !strings.Contains(p.stderr.String(), wire.ErrProtocol.Error()) {
				t.Errorf("exit code %d: %s", code, p.stderr.String())
			}
		})
	}
}

func TestRun(t *testing.T) {
	p := start(t)
	p.script(`cat; echo "$A" >&2; kill -9 $$`)
	in := "a\x00\xff\n"
	p.send(wire.KindData, wire.Stdin, in)
	p.send(wire.KindEOF, wire.Stdin, "")
	exit, stdout, stderr := p.finish()
	if exit.Code != -1 || exit.Signal != 9 || stdout != in || stderr != "b\n" {
		t.Errorf("%+v %q %q", exit, stdout, stderr)
	}
	p.in.Close()
	p.ends()
}

// TestSignalFrame: the signal reaches the harness's process group.
func TestSignalFrame(t *testing.T) {
	p := start(t)
	p.script("trap 'exit 5' USR1; echo ready; sleep 60 & wait")
	f, err := p.conn.Recv()
	if err != nil || string(f.Payload) != "ready\n" {
		t.Fatalf("%q %v", f.Payload, err)
	}
	if err := p.conn.SendUint32(wire.KindSignal, 0, uint32(unix.SIGUSR1)); err != nil {
		t.Fatal(err)
	}
	if exit, _, _ := p.finish(); exit.Code != 5 {
		t.Errorf("%+v", exit)
	}
}

// TestRefusals: nothing runs, the reason is named, and nothing sent later has an
// effect.
func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	script := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	plain := script("plain", "", 0o644)
	orphan := script("orphan", "#!/nonexistent/interpreter\n", 0o755)
	text := script("text", "no program\n", 0o755)
	at := func(dir string) wire.Launch {
		l := launchOf("true")
		l.Dir = dir
		return l
	}
	in := func(path string, args ...string) wire.Launch {
		l := launchOf(args...)
		l.Env = []string{"PATH=" + path}
		return l
	}
	for _, row := range []struct {
		name   string
		launch wire.Launch
		reason string
	}{
		{"no program", wire.Launch{Dir: "/", RuntimeDir: "/run/x"}, "harness-missing"},
		{"not in PATH", launchOf("agentshim-no-such-program"), "harness-missing"},
		{"no PATH", wire.Launch{Args: []string{"sh"}, Dir: "/", RuntimeDir: "/run/x"}, "harness-missing"},
		{"only in the working folder", in("::", "sh"), "harness-missing"},
		{"no such file", launchOf("/no/such"), "harness-missing"},
		{"no such relative file", launchOf("./no-such"), "harness-missing"},
		{"not executable", launchOf(plain), "harness-exec"},
		{"not executable in PATH", in(dir, "plain"), "harness-exec"},
		{"folder", launchOf("/usr"), "harness-exec"},
		{"no interpreter", launchOf(orphan), "harness-exec"},
		{"no format", launchOf(text), "harness-exec"},
		{"no folder", at("/no/such"), "workdir"},
		{"file as folder", at(plain), "workdir"},
		{"large argument", launchOf("true", strings.Repeat("x", 128<<10)), "arguments"},
		{"no runtime folder", wire.Launch{Args: []string{"sh"}, Dir: "/"}, "runtime-dir"},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := start(t)
			p.sendJSON(wire.KindLaunch, row.launch)
			var r wire.Refused
			p.recv(wire.KindRefused, &r)
			if r.Reason != row.reason || r.Detail == "" || len(r.Detail) > maxDetail {
				t.Errorf("%+v, want %s", r, row.reason)
			}
			p.sendJSON(wire.KindLaunch, launchOf("sh", "-c", "echo runs"))
			p.in.Close()
			if f, err := p.conn.Recv(); !errors.Is(err, io.EOF) {
				t.Errorf("after the refusal: frame kind %d, %v", f.Kind, err)
			}
		})
	}
}

func TestHomeFiles(t *testing.T) {
	p := start(t)
	big := strings.Repeat("x", wire.MaxData)
	for path, parts := range map[string][]string{
		"/home/agent/.codex/deep/auth.json": {"sec", "ret"}, "/home/agent/empty": nil, "/home/agent/big": {big, big, "y"},
	} {
		p.sendJSON(wire.KindFile, wire.File{Path: path, Size: int64(len(strings.Join(parts, "")))})
		for _, part := range parts {
			p.send(wire.KindFileData, 0, part)
		}
	}
	p.script("cd /home/agent && stat -c '%a %s %n' .codex .codex/deep .codex/deep/auth.json empty big; cat .codex/deep/auth.json; stat -c '%a' /run/user/0")
	exit, stdout, stderr := p.finish()
	want := "700 60 .codex\n700 60 .codex/deep\n600 6 .codex/deep/auth.json\n600 0 empty\n600 65537 big\nsecret700\n"
	if exit.Code != 0 || stdout != want {
		t.Errorf("%+v\n%s%s", exit, stdout, stderr)
	}
}

// TestWriteBack: only what was asked for comes back, in order, and only regular files
// of a sane size that no link leads to.
func TestWriteBack(t *testing.T) {
	p := start(t)
	names := []string{"changed", "same", "gone", "folder", "link", "fifo", "socket", "large", "most", "closed", "d/behind", "d/f"}
	for _, name := range append([]string{"unasked"}, names...) {
		p.sendJSON(wire.KindFile, wire.File{Path: "/home/agent/" + name, Size: 3, WriteBack: name != "unasked"})
		p.send(wire.KindFileData, 0, "old")
	}
	// What the agent itself may leave, anywhere.
	for _, path := range []string{"/tmp/left", "/tmp/link", "/home/agent/own"} {
		p.sendJSON(wire.KindFile, wire.File{Path: path, WriteBack: true, BackOnly: true})
		names = append(names, strings.TrimPrefix(path, "/home/agent/"))
	}
	p.script(`test ! -e /home/agent/own && echo mine > /home/agent/own; echo left > /tmp/left; ln -s left /tmp/link; cd /home/agent; echo new > changed; echo new > unasked; rm gone folder link fifo socket d/behind; mkdir folder; ln -s changed link; mkfifo fifo
		head -c 1048577 /dev/zero > large; head -c 1048576 /dev/zero > most; mv d e; ln -s e d; echo x > e/behind; chmod 0 closed; echo out`)
	got := map[string]string{}
	var order []string
	for {
		f, err := p.conn.Recv()
		if err != nil {
			t.Fatalf("%v; %s", err, p.stderr.String())
		}
		switch f.Kind {
		case wire.KindBack:
			var b wire.Back
			if err := f.JSON(&b); err != nil {
				t.Fatal(err)
			}
			order = append(order, strings.TrimPrefix(b.Path, "/home/agent/"))
			if b.Problem != "" {
				got[order[len(order)-1]] = "problem: " + b.Problem
			}
		case wire.KindBackData:
			got[order[len(order)-1]] += string(f.Payload)
			continue
		case wire.KindExit:
			if !slices.Equal(order, names) {
				t.Errorf("order %q", order)
			}
			for name, want := range map[string]string{
				"changed": "new\n", "same": "old", "gone": "problem: it is gone", "socket": "problem: it is gone", "folder": "problem: it is no regular file",
				"link": "problem: it is a link, or lies behind one", "fifo": "problem: it is no regular file", "large": "problem: it is larger than 1048576 bytes",
				"most": string(make([]byte, 1<<20)), "d/behind": "problem: it is a link, or lies behind one", "d/f": "problem: it is a link, or lies behind one",
				"/tmp/left": "left\n", "/tmp/link": "problem: it is a link, or lies behind one", "own": "mine\n",
			} {
				if got[name] != want {
					t.Errorf("%s: %.100q, want %.100q", name, got[name], want)
				}
			}
			return
		}
	}
}

func TestIncompleteHomeFile(t *testing.T) {
	for _, next := range []func(p *peer){
		func(p *peer) { p.sendJSON(wire.KindLaunch, launchOf("true")) },
		func(p *peer) { p.sendJSON(wire.KindFile, wire.File{Path: "/home/agent/y", Size: 1}) },
		func(p *peer) { p.send(wire.KindFileData, 0, "more than announced") },
	} {
		p := start(t)
		p.sendJSON(wire.KindFile, wire.File{Path: "/home/agent/x", Size: 6})
		p.send(wire.KindFileData, 0, "sec")
		next(p)
		var r wire.Refused
		if p.recv(wire.KindRefused, &r); r.Reason != "home-file" {
			t.Errorf("%+v", r)
		}
	}
}

// TestStartedByOthers: init says what it is and does nothing.
func TestStartedByOthers(t *testing.T) {
	needNamespaces(t)
	for _, row := range []struct {
		name string
		cmd  *exec.Cmd
	}{
		{"not the first process", exec.Command(binary(t), arg)},
		{"no argument", namespaced(binary(t))},
		{"other argument", namespaced(binary(t), "wire/0")},
		{"one argument more", namespaced(binary(t), arg, "x")},
	} {
		t.Run(row.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			row.cmd.Stdout, row.cmd.Stderr = &stdout, &stderr
			err := row.cmd.Run()
			if row.cmd.ProcessState.ExitCode() != exitRefused || stdout.Len() > 0 || !strings.Contains(stderr.String(), "agentshim starts it") {
				t.Errorf("%v %q %q", err, stdout.String(), stderr.String())
			}
		})
	}
}

// TestSize: one static program of at most 3 MiB.
func TestSize(t *testing.T) {
	program := binary(t)
	st, err := os.Stat(program)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", st.Size())
	if st.Size() > 3<<20 {
		t.Errorf("%d bytes", st.Size())
	}
	// The program under test is 0111 and can't be read by every user.
	readable := filepath.Join(t.TempDir(), "init")
	cmd := exec.Command("go", "build", "-o", readable, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	f, err := elf.Open(readable)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("program header %v: not static", p.Type)
		}
	}
}

// TestSyscallNumbers: init knows each call that it is to try, and none that it isn't.
func TestSyscallNumbers(t *testing.T) {
	tried := map[string]bool{}
	for _, call := range wire.Syscalls {
		tried[call.Name] = true
		if _, ok := numbersByName[call.Name]; !ok {
			t.Errorf("%s has no number", call.Name)
		}
	}
	if len(tried) != len(numbersByName) {
		t.Errorf("%d calls are tried, %d have a number", len(tried), len(numbersByName))
	}
}
