package integration

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// attackProgram is testdata/attack as a static program.
var attackProgram = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "agentshim-attack-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "attack")
	cmd := exec.Command("go", "build", "-o", program, "./testdata/attack")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	return os.ReadFile(program)
})

// attackFolder is a folder with the attack program, for a mount on /attack.
func (s setup) attackFolder(t *testing.T) string {
	t.Helper()
	b, err := attackProgram()
	if err != nil {
		t.Fatal(err)
	}
	dir := s.folder(t)
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "attack"), b, 0o755), os.Chmod(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// attacking are the fields of a harness file with the attack program in it.
func (s setup) attacking(t *testing.T, fields spec) spec {
	t.Helper()
	all := spec{"mounts": []any{map[string]any{"source": s.attackFolder(t), "target": "/attack"}}}
	maps.Copy(all, fields)
	return all
}

// bareAttack runs argv as the first process of a container with the engine's own
// settings and the agent's uid.
func (s setup) bareAttack(t *testing.T, argv ...string) result {
	t.Helper()
	args := []string{"run", "--rm", "--network=none", fmt.Sprintf("--user=%d", s.agentUID(t))}
	if s.rootless() {
		args = append(args, "--userns=keep-id")
	}
	args = append(args, "--mount=type=bind,source="+s.attackFolder(t)+",target=/attack,readonly", "--entrypoint="+argv[0], "agentshim/hello:test")
	return s.bare(t, append(args, argv[1:]...)...)
}

// outcomes are the attack program's lines: a name and an outcome.
func outcomes(out string) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(out) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		all[name] = value
	}
	return all
}

// expectOutcomes compares the outcomes that want names.
func expectOutcomes(t *testing.T, want, got map[string]string) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if !slices.Contains(strings.Split(want[name], "|"), got[name]) {
			t.Errorf("%s: %q, want %q", name, got[name], want[name])
		}
	}
}

func same(names []string, value string) map[string]string {
	all := map[string]string{}
	for _, n := range names {
		all[n] = value
	}
	return all
}

// TestInitFiles: the agent has init's uid and can use none of its /proc files.
func TestInitFiles(t *testing.T) {
	names := []string{
		"fd/0", "fd/1", "fd/2", "fd", "mem", "environ", "maps", "auxv", "exe", "cwd", "root", "ns/pid",
		"oom_score_adj", "coredump_filter", "timerslack_ns", "clear_refs", "sched",
		"comm", "task/1/comm", "task/1/mem", "fdinfo", "map_files", "pagemap", "smaps", "uid_map",
	}
	each(t, func(t *testing.T, s setup) {
		r := s.sh(t, s.attacking(t, nil), "/attack/attack open").ok(t)
		got := outcomes(r.Stdout)
		expectOutcomes(t, same(names, "EACCES|EPERM"), got)
		if got["autogroup"] == "ok" {
			t.Error("autogroup: ok")
		}
		// Control: a dumpable first process of the same uid is open.
		control := s.bareAttack(t, "/bin/sh", "-c", "/attack/attack open; exit 0").ok(t)
		expectOutcomes(t, same([]string{
			"fd/1", "fd/2", "fd", "mem", "environ", "maps", "exe", "oom_score_adj", "coredump_filter", "clear_refs",
			"comm", "task/1/comm", "task/1/mem", "fdinfo", "map_files", "pagemap", "smaps", "uid_map",
		}, "ok"), outcomes(control.Stdout))
	})
}

// lastSignal is the kernel's _NSIG.
const lastSignal = 64

// starving are the system calls that take a process its processor.
var starving = []string{
	"sched_setscheduler", "sched_setattr", "sched_setaffinity", "setpriority-process",
	"setpriority-user", "ioprio_set-process", "ioprio_set-user", "prlimit64",
}

// initRefusals is what the agent gets for its calls on process 1.
func initRefusals() map[string]string {
	all := same(starving, "EPERM")
	maps.Copy(all, same([]string{
		"sched_setparam", "setpriority-group", "setpriority-own-user",
		"process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "rt_sigqueueinfo", "ptrace",
		"move_pages", "migrate_pages", "get_robust_list",
	}, "EPERM"))
	all["core_sched"] = "EPERM|EINVAL|ENODEV" // the kernel's own answer, or it has none
	all["pidfd-namespace"] = "EPERM|EACCES|ENOTTY"
	return all
}

// TestInitCalls: the agent can neither slow init down nor look into it.
func TestInitCalls(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		r := s.sh(t, s.attacking(t, nil), "/attack/attack calls; /attack/attack signals")
		if r.Code != 42 {
			t.Fatalf("exit %d, want 42\nstdout: %s\nstderr: %s", r.Code, r.Stdout, r.Stderr)
		}
		got := outcomes(r.Stdout)
		expectOutcomes(t, initRefusals(), got)
		// The signals were taken by the kernel, none by init.
		for _, way := range []string{"kill", "tgkill", "pidfd", "owner"} {
			if n, err := strconv.Atoi(got[way]); err != nil || n < lastSignal {
				t.Errorf("%s: %q signals sent", way, got[way])
			}
		}
		control := s.bareAttack(t, "/bin/sh", "-c", "/attack/attack calls; exit 0").ok(t)
		expectOutcomes(t, same(starving, "ok"), outcomes(control.Stdout))
		expectOutcomes(t, map[string]string{
			"ptrace": "ok", "rt_sigqueueinfo": "ok", "get_robust_list": "ok", "pidfd-namespace": "ok|ENOTTY",
		}, outcomes(control.Stdout))
		// Controls: Go programs as first process, without handlers and with one for
		// every signal, are ended by the same signals before their child ends.
		for _, first := range []string{"plain", "notify"} {
			if r := s.bareAttack(t, "/attack/attack", first, "signals"); r.Code == 43 {
				t.Errorf("a first process of kind %s survives", first)
			}
		}
	})
}

// TestExitCodes: the harness's exit code is agentshim's, and 128 and the signal
// when one ended it.
func TestExitCodes(t *testing.T) {
	codes := map[bool][]int{
		true:  {0, 1, 2, 7, 42, 124, 125, 126, 127, 128, 130, 137, 143, 255},
		false: {0, 125, 255},
	}
	each(t, func(t *testing.T, s setup) {
		file := s.write(t, nil)
		for _, code := range codes[s.name == "docker-root"] {
			r := s.call(t, call{}, "exec", "--quiet", "--spec", file, "--", fmt.Sprintf("exit %d", code))
			// No word of agentshim's: a 125 is the harness's own.
			if r.Code != code || r.Stdout != "" || strings.Contains(r.Stderr, "agentshim: ") {
				t.Errorf("exit %d: %+v", code, r)
			}
		}
		for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM, syscall.SIGSEGV} {
			if r := s.exec(t, file, fmt.Sprintf("kill -%d $$; sleep 10", int(sig))); r.Code != 128+int(sig) {
				t.Errorf("%v: %+v", sig, r)
			}
		}
	})
}

// TestHarnessProcess: what the harness starts with.
func TestHarnessProcess(t *testing.T) {
	const script = `
for fd in /proc/self/fd/*; do echo "fd ${fd##*/}"; done
exec 9</proc/self/stat; read -r pid comm state ppid pgrp session rest <&9; exec 9<&-
echo "parent $ppid"; [ $pgrp = $$ ] && [ $session = $$ ] && echo leader yes
grep -E '^(SigBlk|SigIgn|NoNewPrivs)' /proc/self/status
for fd in 0 1 2; do flags=$(awk '/^flags/ {print $2}' /proc/$$/fdinfo/$fd); echo "nonblock$fd $((flags & 04000))"; done
echo "umask $(umask)"; echo "score $(cat /proc/self/oom_score_adj) $(cat /proc/1/oom_score_adj)"
`
	each(t, func(t *testing.T, s setup) {
		out := s.sh(t, nil, script).ok(t).Stdout
		var fds []string
		for line := range strings.Lines(out) {
			if fd, ok := strings.CutPrefix(strings.TrimSpace(line), "fd "); ok {
				fds = append(fds, fd)
			}
		}
		// The shell's own reading of the folder is the one more.
		if len(fds) > 4 || !slices.Equal(fds[:min(3, len(fds))], []string{"0", "1", "2"}) {
			t.Errorf("descriptors %v", fds)
		}
		got := outcomes(strings.ReplaceAll(out, ":\t", " "))
		expectOutcomes(t, map[string]string{
			"parent": "1", "leader": "yes", "umask": "0022", "NoNewPrivs": "1",
			"SigBlk": "0000000000000000", "SigIgn": "0000000000000000",
			"nonblock0": "0", "nonblock1": "0", "nonblock2": "0",
		}, got)
		var harness, first int
		if _, err := fmt.Sscan(got["score"], &harness, &first); err != nil || harness != min(first+500, 1000) || first >= 1000 {
			t.Errorf("oom_score_adj of the harness and of init: %q", got["score"])
		}
	})
}

// TestReaping is row P04: orphans of more than the pids limit are reaped.
func TestReaping(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		r := s.sh(t, spec{"resources": map[string]any{"pids": 100}}, `
i=0; while [ $i -lt 500 ]; do (sleep 0.02 &) || exit 1; i=$((i+1)); [ $((i % 50)) = 0 ] && sleep 0.1; done
sleep 0.3; grep -l '^State:.*zombie' /proc/[0-9]*/status; set -- /proc/[0-9]*; echo $#; exit 4`)
		// init and the shell.
		if r.Code != 4 || strings.TrimSpace(r.Stdout) != "2" || strings.Contains(r.Stderr, "fork") {
			t.Errorf("%+v", r)
		}
	})
	// Control: a first process that doesn't reap keeps its orphans as zombies.
	t.Run("control", func(t *testing.T) {
		Need(t)
		r := setups[0].bareAttack(t, "/attack/attack", "plain", "orphans")
		if got := outcomes(r.Stdout)["zombies"]; got != "20" {
			t.Errorf("%q zombies of 20 orphans: %+v", got, r)
		}
	})
}

// TestKillOfTheRest: daemons, orphans and a fork bomb end with the harness, and the
// harness's exit code stays. Row P02.
func TestKillOfTheRest(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		for _, row := range []struct {
			name, script string
			code         int
		}{
			{"background job", "sleep 300 & exit 3", 3},
			{"daemons", `trap '' TERM HUP INT
setsid sh -c 'trap "" TERM HUP INT; sleep 300' & (setsid sh -c '(sleep 300 &) & sleep 300' &) ; nohup sleep 300 >/dev/null 2>&1 & exit 5`, 5},
			{"fork bomb", "exec /attack/attack bomb", 9},
		} {
			t.Run(row.name, func(t *testing.T) {
				state := s.private(t)
				file := s.write(t, s.attacking(t, spec{"resources": map[string]any{"pids": 200}}))
				begin := time.Now()
				r := s.call(t, call{State: state}, "exec", "--spec", file, "--", row.script)
				took := time.Since(begin)
				if r.Code != row.code || took > 20*time.Second {
					t.Fatalf("after %v: %+v", took, r)
				}
				if rec := record(t, state); rec.Harness == nil || rec.Harness.Left < 1 {
					t.Errorf("nothing was left to kill: %+v", rec.Harness)
				}
			})
		}
	})
}

// TestFullContainer: init needs no further thread when the agent has taken all
// that the pids limit gives.
func TestFullContainer(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		if s.rootless() {
			return // no pids limit there on cgroup v1: the gap rootless-cgroup-limits
		}
		in := make([]byte, 4<<20)
		_, _ = rand.Read(in)
		file := s.write(t, s.attacking(t, spec{"resources": map[string]any{"pids": 64}}))
		r := s.call(t, call{Stdin: bytes.NewReader(in)}, "exec", "--spec", file, "--prompt-file", s.prompt(t, "exec /attack/attack fill 1000"))
		if r.Code != 11 || r.Stdout != string(in) || !strings.HasSuffix(r.Stderr, string(in)) {
			t.Errorf("exit %d, %d bytes of stdout and %d of stderr, want 11 and %d", r.Code, len(r.Stdout), len(r.Stderr), len(in))
		}
	})
}

// prompt is a file with text, readable by the caller.
func (s setup) prompt(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(s.private(t), "prompt")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestPassedOutput: a run ends although someone outside holds the harness's
// standard output.
func TestPassedOutput(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		folder := s.folder(t)
		if err := os.Chmod(folder, 0o777); err != nil {
			t.Fatal(err)
		}
		file := s.write(t, s.attacking(t, spec{"workspace": map[string]any{"source": folder, "mode": "writable"}}))
		held := make(chan *os.File, 1)
		r := s.whileRunning(t, file, "echo ready; while ! [ -e /workspace/go ]; do sleep 0.05; done; exec /attack/attack pass /workspace/socket", func() {
			// Only now: a socket that is there at the start is refused.
			listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(folder, "socket"), Net: "unix"})
			if err != nil {
				t.Error(err)
				return
			}
			defer listener.Close()
			if err := errors.Join(os.Chmod(filepath.Join(folder, "socket"), 0o777), os.WriteFile(filepath.Join(folder, "go"), nil, 0o644)); err != nil {
				t.Error(err)
				return
			}
			held <- receiveFile(t, listener)
		})
		f := <-held
		defer f.Close()
		if r.Code != 6 || r.Stdout != "ready\npassed\n" {
			t.Errorf("%+v", r)
		}
		// Control: the writing end was open until here; the reader is gone.
		if _, err := f.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("the passed descriptor is no open end of the pipe: %v", err)
		}
	})
}

// receiveFile takes one connection and the descriptor that comes with it.
func receiveFile(t *testing.T, listener *net.UnixListener) *os.File {
	t.Helper()
	_ = listener.SetDeadline(time.Now().Add(20 * time.Second))
	conn, err := listener.AcceptUnix()
	if err != nil {
		t.Error(err)
		return nil
	}
	defer conn.Close()
	oob := make([]byte, unix.CmsgSpace(4))
	if _, _, _, _, err := conn.ReadMsgUnix(make([]byte, 1), oob); err != nil {
		t.Error(err)
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(messages) != 1 {
		t.Errorf("%d control messages: %v", len(messages), err)
		return nil
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		t.Errorf("descriptors %v: %v", fds, err)
		return nil
	}
	_, _ = conn.Write([]byte{0})
	return os.NewFile(uintptr(fds[0]), "passed")
}

// whileRunning runs a script whose first line of output is "ready", and calls then
// when it is there.
func (s setup) whileRunning(t *testing.T, file, script string, then func()) result {
	t.Helper()
	cmd, cancel := s.command(t, call{Timeout: time.Minute}, agentshim, "exec", "--spec", file, "--", script)
	defer cancel()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	first, err := lines.ReadString('\n')
	if first != "ready\n" {
		cancel()
		_ = cmd.Wait()
		t.Fatalf("first line %q, %v\nstderr: %s", first, err, stderr.String())
	}
	then()
	rest, err := io.ReadAll(lines)
	if err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
	return result{Stdout: first + string(rest), Stderr: stderr.String(), Code: cmd.ProcessState.ExitCode()}
}

// TestStarvedInit: under full load, after every attempt to take init its
// processor, the container ends within two seconds of the shim's SIGKILL. The
// control run of the attempts is TestInitCalls.
func TestStarvedInit(t *testing.T) {
	const bound = 2 * time.Second
	inTurn(t, func(t *testing.T, s setup) {
		mark := hex.EncodeToString(must(t, randomBytes))
		file := s.write(t, s.attacking(t, spec{"labels": map[string]any{"test.mark": mark}}))
		cmd, cancel := s.command(t, call{Timeout: time.Minute}, agentshim, "exec", "--spec", file, "--", "exec /attack/attack starve 500")
		defer cancel()
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		got, err := untilSpinning(out)
		pid, found := s.initPID(t, mark)
		if err != nil || !found {
			cancel()
			_ = cmd.Wait()
			t.Fatalf("%v, init found: %v\n%v\nstderr: %s", err, found, got, stderr.String())
		}
		expectOutcomes(t, initRefusals(), got)
		t.Logf("%s spinners, init resident %d KiB", got["spinners"], statusKiB(t, pid, "VmRSS"))
		time.Sleep(time.Second) // of full load

		begin := time.Now()
		_ = cmd.Process.Kill()
		for alive(pid) && time.Since(begin) < 30*time.Second {
			time.Sleep(10 * time.Millisecond)
		}
		took := time.Since(begin)
		_ = cmd.Wait()
		t.Logf("ended after %v", took)
		if took > bound {
			t.Errorf("the container lived for %v after its shim", took)
		}
		for len(s.marked(t, mark)) > 0 {
			if time.Since(begin) > 30*time.Second {
				t.Fatal("the engine still lists the container")
			}
			time.Sleep(100 * time.Millisecond)
		}
	})
}

func randomBytes() ([]byte, error) {
	b := make([]byte, 8)
	_, err := rand.Read(b)
	return b, err
}

func must[T any](t *testing.T, f func() (T, error)) T {
	t.Helper()
	v, err := f()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// untilSpinning reads the attack program's lines up to its last.
func untilSpinning(r io.Reader) (map[string]string, error) {
	var all strings.Builder
	for lines := bufio.NewReader(r); ; {
		line, err := lines.ReadString('\n')
		all.WriteString(line)
		if err != nil {
			return outcomes(all.String()), err
		}
		if strings.HasPrefix(line, "spinners ") {
			return outcomes(all.String()), nil
		}
	}
}

// marked lists the containers with a test's mark.
func (s setup) marked(t *testing.T, mark string) []string {
	t.Helper()
	return strings.Fields(s.bare(t, "ps", "-aq", "--filter", "label=test.mark="+mark).ok(t).Stdout)
}

// initPID is the host's pid of a marked container's first process.
func (s setup) initPID(t *testing.T, mark string) (int, bool) {
	t.Helper()
	ids := s.marked(t, mark)
	if len(ids) != 1 {
		return 0, false
	}
	pid, err := strconv.Atoi(strings.TrimSpace(s.bare(t, "inspect", "--format", "{{.State.Pid}}", ids[0]).ok(t).Stdout))
	return pid, err == nil && pid > 1
}

// alive is false for a zombie too: the namespace's processes are gone by then.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(after, "Z")
}

func statusKiB(t *testing.T, pid int, field string) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			return mustInt(t, strings.Fields(rest)[0])
		}
	}
	t.Fatalf("no %s in the status of %d", field, pid)
	return 0
}

// TestInitMemory: at most 6 MiB resident, after much data in both directions.
func TestInitMemory(t *testing.T) {
	const most = 6 << 10
	each(t, func(t *testing.T, s setup) {
		mark := hex.EncodeToString(must(t, randomBytes))
		file := s.write(t, spec{"labels": map[string]any{"test.mark": mark}})
		r := s.whileRunning(t, file, "head -c 64M /dev/zero >&2; echo ready; sleep 3; exit 8", func() {
			pid, found := s.initPID(t, mark)
			if !found {
				t.Error("no container")
				return
			}
			rss := statusKiB(t, pid, "VmRSS")
			t.Logf("resident %d KiB, %d threads", rss, statusKiB(t, pid, "Threads"))
			if rss > most {
				t.Errorf("resident %d KiB", rss)
			}
		})
		if r.Code != 8 {
			t.Errorf("exit %d", r.Code)
		}
	})
}

// TestNotLaunched: what can't be started is refused with its reason before anything
// runs.
func TestNotLaunched(t *testing.T) {
	binary := func(name string) any { return map[string]any{"binary": name} }
	for _, row := range []struct {
		name   string
		fields spec
		reason shim.Reason
		says   string
	}{
		{"not in PATH", spec{"harness": binary("no-such-agent")}, shim.ReasonHarnessMissing, `"no-such-agent"`},
		{"no such file", spec{"harness": binary("/no/such/agent")}, shim.ReasonHarnessMissing, "/no/such/agent"},
		{"not executable", spec{"harness": binary("/etc/passwd")}, shim.ReasonHarnessMissing, "/etc/passwd"},
		{"no working folder", spec{"workingDir": "/no/such/folder"}, shim.ReasonMount, "/no/such/folder"},
	} {
		t.Run(row.name, func(t *testing.T) {
			each(t, func(t *testing.T, s setup) {
				r := s.sh(t, row.fields, "echo runs").refused(t, row.reason)
				if !strings.Contains(r.Stderr, row.says) {
					t.Errorf("%s", r.Stderr)
				}
			})
		})
	}
}

// TestInitByHand: init started by anything but the shim says what it is.
func TestInitByHand(t *testing.T) {
	const says = "agentshim starts it"
	each(t, func(t *testing.T, s setup) {
		r := s.sh(t, nil, `init=$(readlink -f "$(tr '\0' '\n' </proc/1/cmdline | head -1)"); "$init" wire/1; echo $?; "$init"; echo $?`).ok(t)
		if r.Stdout != "125\n125\n" || strings.Count(r.Stderr, says) != 2 {
			t.Errorf("started by the agent: %+v", r)
		}
		program := filepath.Join(s.folder(t), "init")
		b, err := os.ReadFile("../shim/embedded/agentshim-init")
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.WriteFile(program, b, 0o755), os.Chmod(filepath.Dir(program), 0o755)); err != nil {
			t.Fatal(err)
		}
		for _, args := range [][]string{nil, {"wire/0"}, {"wire/1", "x"}} {
			r := s.bare(t, append([]string{
				"run", "--rm", "--network=none", "--mount=type=bind,source=" + program + ",target=/init,readonly", "--entrypoint=/init", "agentshim/hello:test",
			}, args...)...)
			if r.Code != 125 || r.Stdout != "" || !strings.Contains(r.Stderr, says) {
				t.Errorf("first process with %q: %+v", args, r)
			}
		}
	})
}

// TestHomeFileModes: files of the home are the agent's alone.
func TestHomeFileModes(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		source := s.prompt(t, "secret")
		r := s.sh(t, spec{"home": map[string]any{"files": []any{map[string]any{"source": source, "target": ".codex/auth.json"}}}},
			`cd; stat -c '%a %u' .codex .codex/auth.json; cat .codex/auth.json`).ok(t)
		uid := s.agentUID(t)
		if want := fmt.Sprintf("700 %d\n600 %d\nsecret", uid, uid); r.Stdout != want {
			t.Errorf("%q, want %q", r.Stdout, want)
		}
	})
}
