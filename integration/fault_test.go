package integration

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// Bounds of the fault table.
const (
	// goneBound is from a SIGKILL to the last process of the container.
	goneBound = 2 * time.Second
	// endBound is from the SIGKILL of another process to the shim's own end.
	endBound = 10 * time.Second
	// tidyBound is for the engine to forget a container whose processes are gone.
	tidyBound = 20 * time.Second
	// stopped is how long a process stands still between SIGSTOP and SIGCONT.
	stopped = 150 * time.Millisecond
)

// harnessCode is how every harness of the table ends when nothing ends it.
const harnessCode = 7

// phase is a moment of a run that the table can hold.
type phase struct {
	name string
	// at is where Podman's client is held by its wrapper; on Docker the proxy holds what
	// heldPoints says.
	at string
	// script is the harness.
	script string
	// launched says that the harness has been started.
	launched bool
	// reach waits for the moment.
	reach func(r *faulty, t *testing.T)
	// decided says that the harness's end is known: no later fault changes it.
	decided bool
}

const quietScript = "touch marker; echo ready; cat; exit 7"

var quiet = phase{name: "quiet", script: quietScript, launched: true, reach: (*faulty).ready}

var phases = []phase{
	{name: "client started", at: "starting", script: quietScript, reach: (*faulty).atGate},
	{name: "hello said", at: "held", script: quietScript, reach: (*faulty).afterHello},
	quiet,
	{name: "full pipe", script: "touch marker; echo ready; cat big; cat; exit 7", launched: true, reach: (*faulty).blocked},
	{name: "ended, unread", script: "touch marker; echo ready; head -c 200000 big; exit 7", launched: true, decided: true, reach: (*faulty).ended},
}

var victims = []string{"shim", "client", "init"}

// heldPoints are the proxy's for the wrapper's places.
var heldPoints = map[string]string{"starting": "create", "made": "start", "held": "input"}

// faultBench is what the runs of one set-up share.
type faultBench struct {
	setup
	// proxy stands before Docker's daemon: there, the connections to it are the client.
	proxy *dockerProxy
	// dir holds the wrapper of Podman's client, and work is the agents' workspace.
	dir, work, state, file string
	big                    []byte
	// host is a variable that names Docker's daemon.
	host string
	// folders are the runtime folders of the runs so far.
	folders []string
}

func newFaultBench(t *testing.T, s setup) *faultBench {
	t.Helper()
	b := &faultBench{setup: s, dir: s.folder(t), work: s.folder(t), state: s.private(t), big: random(t, mib)}
	place(t, filepath.Join(b.work, "big"), b.big, 0o644)
	if s.engine == "docker" {
		b.proxy = newDockerProxy(t, s)
		b.host = b.proxy.env()
	} else {
		b.wrap(t)
	}
	b.file = s.write(t, spec{"workspace": map[string]any{"source": b.work, "mode": "writable", "git": "none"}, "stopGrace": "1s"})
	return b
}

// wrap puts the wrapper of Podman's client into dir, with its gate.
func (b *faultBench) wrap(t *testing.T) {
	t.Helper()
	client, err := exec.LookPath(b.engine)
	if err != nil {
		t.Fatal(err)
	}
	script := strings.NewReplacer("DIR", b.dir, "CLIENT", client).Replace(string(mustRead(t, "testdata/fault/client")))
	place(t, filepath.Join(b.dir, b.engine), []byte(script), 0o755)
	gate := filepath.Join(b.dir, "gate")
	if err := errors.Join(unix.Mkfifo(gate, 0o666), os.Chmod(gate, 0o666), os.Chmod(b.dir, 0o755)); err != nil {
		t.Fatal(err)
	}
}

// hold has the next run stop at a phase's place.
func (b *faultBench) hold(t *testing.T, at string) {
	t.Helper()
	if b.proxy == nil {
		place(t, filepath.Join(b.dir, "phase"), []byte(at), 0o644)
	} else if at != "" {
		b.proxy.hold(heldPoints[at])
	}
}

// faulty is one run of the table.
type faulty struct {
	*faultBench
	phase  phase
	cmd    *exec.Cmd
	cancel func()
	id     string
	// keeper is a session's, in the place of cmd's process.
	keeper int
	stdin  *os.File
	stdout *os.File
	stderr bytes.Buffer
	// gate is the open end that holds the wrapper of Podman's client.
	gate *os.File
	// read is what was taken from standard output to reach the phase.
	read []byte
	// waited is closed at the shim's end.
	waited chan struct{}
}

// begin starts a run and returns it in its phase.
func (b *faultBench) begin(t *testing.T, p phase) *faulty {
	t.Helper()
	b.hold(t, p.at)
	if err := os.RemoveAll(filepath.Join(b.work, "marker")); err != nil {
		t.Fatal(err)
	}
	before := ids(t, b.state)
	r := &faulty{faultBench: b, phase: p, waited: make(chan struct{})}
	r.cmd, r.cancel = b.command(t, call{
		State: b.state, Env: b.env(), Timeout: time.Minute,
	}, agentshim, "exec", "--quiet", "--spec", b.file, "--", p.script)
	childIn, childOut := r.pipes(t)
	r.cmd.Stdin, r.cmd.Stdout, r.cmd.Stderr = childIn, childOut, &r.stderr
	// The harness's own end closes what it shares with the client's children.
	r.cmd.WaitDelay = time.Second
	err := r.cmd.Start()
	childIn.Close()
	childOut.Close()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(r.waited)
		_ = r.cmd.Wait()
	}()
	t.Cleanup(func() {
		r.cancel()
		r.release(t)
		<-r.waited
		r.stdin.Close()
		r.stdout.Close()
	})
	r.eventually(t, "a record", func() bool {
		for id := range ids(t, b.state) {
			if !before[id] {
				r.id = id
			}
		}
		return r.id != ""
	})
	b.folders = append(b.folders, filepath.Join(b.runtimeDir(t), r.id))
	p.reach(r, t)
	return r
}

// env has agentshim meet the bench's engine.
func (b *faultBench) env() []string {
	return []string{"PATH=" + b.dir + ":" + os.Getenv("PATH"), b.host}
}

// pipes makes the run's standard streams and returns the shim's ends.
func (r *faulty) pipes(t *testing.T) (in, out *os.File) {
	t.Helper()
	in, stdin, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.stdin, r.stdout = stdin, stdout
	return in, out
}

// eventually polls until ok, and fails t when the shim ends before that.
func (r *faulty) eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for begin := time.Now(); !ok(); time.Sleep(5 * time.Millisecond) {
		if r.over() || time.Since(begin) > 30*time.Second {
			t.Fatalf("no %s after %v\nstderr: %s", what, time.Since(begin), r.said())
		}
	}
}

func (r *faulty) over() bool {
	select {
	case <-r.waited:
		return true
	default:
		return false
	}
}

// said is the run's standard error once it is over.
func (r *faulty) said() string {
	if !r.over() {
		return "(still running)"
	}
	return r.stderr.String()
}

// atGate waits until something is held. A wrapper is when its gate has a reader
// (fifo(7)).
func (r *faulty) atGate(t *testing.T) {
	t.Helper()
	if r.proxy != nil {
		r.eventually(t, "call at the proxy", func() bool { return r.proxy.waits(heldPoints[r.phase.at]) })
		return
	}
	r.eventually(t, "client at the gate", func() bool {
		f, err := os.OpenFile(filepath.Join(r.dir, "gate"), os.O_WRONLY|syscall.O_NONBLOCK, 0)
		r.gate = f
		return err == nil
	})
}

// afterHello waits until what the shim sends after the hello waits, on Podman in the
// pipe behind the wrapper.
func (r *faulty) afterHello(t *testing.T) {
	t.Helper()
	r.atGate(t)
	if r.proxy != nil {
		return
	}
	r.eventually(t, "answer to the hello", func() bool {
		for _, pid := range children(t, r.pid(t, "client")) {
			if waiting(fmt.Sprintf("/proc/%d/fd/0", pid)) > 0 {
				return true
			}
		}
		return false
	})
}

// waiting is how many bytes are in the pipe at path.
func waiting(path string) int {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return 0
	}
	defer f.Close()
	return buffered(f)
}

func buffered(f *os.File) int {
	n := 0
	conn, err := f.SyscallConn()
	if err == nil {
		_ = conn.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	}
	return n
}

// ready reads the harness's first line.
func (r *faulty) ready(t *testing.T) {
	t.Helper()
	const line = "ready\n"
	b := make([]byte, len(line))
	_ = r.stdout.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := io.ReadFull(r.stdout, b); err != nil || string(b) != line {
		t.Fatalf("first line %q, %v\nstderr: %s", b, err, r.said())
	}
	_ = r.stdout.SetReadDeadline(time.Time{})
	r.read = b
}

// blocked waits until nothing more fits into the pipes.
func (r *faulty) blocked(t *testing.T) {
	t.Helper()
	r.ready(t)
	r.settled(t, func() bool { return buffered(r.stdout) > 32<<10 })
}

// ended waits until init alone is left in the container, and for its last words to
// arrive.
func (r *faulty) ended(t *testing.T) {
	t.Helper()
	r.ready(t)
	r.settled(t, func() bool { return buffered(r.stdout) > 32<<10 && len(sandboxed(t, r.id)) == 1 })
}

// settled waits until ok holds for a while.
func (r *faulty) settled(t *testing.T, ok func() bool) {
	t.Helper()
	const still = 200 * time.Millisecond
	since := time.Now()
	r.eventually(t, "standstill", func() bool {
		if !ok() {
			since = time.Now()
		}
		return time.Since(since) > still
	})
}

// release lets go on what is held.
func (r *faulty) release(t *testing.T) {
	t.Helper()
	if r.proxy != nil {
		r.proxy.open()
		return
	}
	if r.gate == nil {
		return
	}
	if _, err := r.gate.WriteString("go\n"); err != nil && !errors.Is(err, syscall.EPIPE) {
		t.Error(err)
	}
	r.gate.Close()
	r.gate = nil
}

// pid is a victim's process on the host.
func (r *faulty) pid(t *testing.T, victim string) int {
	t.Helper()
	switch victim {
	case "shim":
		return r.cmd.Process.Pid
	case "keeper":
		return r.keeper
	case "client":
		for _, pid := range children(t, cmp.Or(r.keeper, r.cmd.Process.Pid)) {
			if mentions(pid, r.id) {
				return pid
			}
		}
	case "init":
		for _, pid := range sandboxed(t, r.id) {
			if firstInNamespace(pid) {
				return pid
			}
		}
	}
	t.Fatalf("no %s\nstderr: %s", victim, r.said())
	return 0
}

// sandboxed lists the processes of a run's container: those that have a file of the
// run's folder among their mounts. A zombie has no mounts.
func sandboxed(t *testing.T, id string) []int {
	t.Helper()
	return processes(t, "mountinfo", id)
}

// processes lists those whose file in /proc holds text.
func processes(t *testing.T, file, text string) []int {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/" + file)
	if err != nil {
		t.Fatal(err)
	}
	var list []int
	for _, name := range names {
		if b, err := os.ReadFile(name); err == nil && bytes.Contains(b, []byte(text)) {
			list = append(list, mustInt(t, strings.Split(name, "/")[2]))
		}
	}
	return list
}

func mentions(pid int, text string) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && bytes.Contains(b, []byte(text))
}

// firstInNamespace says whether pid is 1 in a pid namespace below the test's.
func firstInNamespace(pid int) bool {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "NSpid:"); ok {
			levels := strings.Fields(rest)
			return len(levels) > 1 && levels[len(levels)-1] == "1"
		}
	}
	return false
}

// TestFaults is the fault table: in each phase of a run each of its processes is
// killed, and each is stopped and goes on. P06, A44, A50.
func TestFaults(t *testing.T) {
	some(t, func(t *testing.T, s setup) {
		b := newFaultBench(t, s)
		for _, p := range phases {
			t.Run(p.name, func(t *testing.T) {
				t.Run("stopped", func(t *testing.T) { b.stops(t, p, victims) })
				for _, victim := range victims {
					if p.has(victim) {
						t.Run(victim+" killed", func(t *testing.T) { b.kills(t, p, victim) })
					}
				}
			})
		}
		b.tidy(t)
	})
}

// some is inTurn for one set-up of either engine, or all of them in soak.
func some(t *testing.T, f func(t *testing.T, s setup)) {
	Need(t)
	for _, s := range chosen() {
		t.Run(s.name, func(t *testing.T) { f(t, s) })
	}
}

// someAtOnce is some at the same time.
func someAtOnce(t *testing.T, f func(t *testing.T, s setup)) { atOnce(t, chosen(), f) }

func chosen() []setup {
	return slices.DeleteFunc(slices.Clone(setups), func(s setup) bool { return !s.full() && !soaking() })
}

func soaking() bool { return os.Getenv("AGENTSHIM_SOAK") != "" }

// has says whether the victim exists in the phase.
func (p phase) has(victim string) bool { return victim != "init" || p.at != "starting" }

// stops stands each victim still for a while: the run ends as if nothing had been.
func (b *faultBench) stops(t *testing.T, p phase, victims []string) {
	r := b.begin(t, p)
	for _, victim := range victims {
		if p.has(victim) {
			r.pause(t, victim)
		}
	}
	if r.over() {
		t.Fatalf("the run ended: %s", r.said())
	}
	r.unlaunched(t)
	r.goesOn(t)
}

// goesOn has the run go on to its own end, which is exact.
func (r *faulty) goesOn(t *testing.T) {
	t.Helper()
	r.release(t)
	input := random(t, 64<<10+1)
	go func() {
		_, _ = r.stdin.Write(input) // EPIPE: this harness does not read
		r.stdin.Close()
	}()
	out := r.drain(t)
	r.awaitEnd(t, 30*time.Second)
	if code := r.cmd.ProcessState.ExitCode(); code != harnessCode {
		t.Errorf("exit %d, want %d\nstderr: %s", code, harnessCode, r.stderr.String())
	}
	wantBytes(t, "stdout", string(out), r.wants(input))
	r.emptied(t, time.Now())
	r.recorded(t, "")
	r.noFolder(t)
}

// wants is the whole of what the harness prints.
func (r *faulty) wants(input []byte) []byte {
	switch {
	case r.phase.decided:
		return slices.Concat([]byte("ready\n"), r.big[:200000])
	case r.phase.script == quietScript:
		return slices.Concat([]byte("ready\n"), input)
	}
	return slices.Concat([]byte("ready\n"), r.big, input)
}

// drain reads standard output to its end.
func (r *faulty) drain(t *testing.T) []byte {
	t.Helper()
	_ = r.stdout.SetReadDeadline(time.Now().Add(30 * time.Second))
	rest, err := io.ReadAll(r.stdout)
	if err != nil {
		t.Errorf("standard output: %v", err)
	}
	return append(r.read, rest...)
}

// pause stops a victim, the client with its process group, and has it go on. On
// Docker, nothing passes the connections for a while.
func (r *faulty) pause(t *testing.T, victim string) {
	t.Helper()
	if victim == "client" && r.proxy != nil {
		release := r.proxy.hold("input", "output")
		time.Sleep(stopped)
		release()
		return
	}
	pid := r.pid(t, victim)
	target := pid
	if victim == "client" {
		target = -pid // rootless Podman is two processes
	}
	if err := unix.Kill(target, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(stopped)
	if state := processState(pid); state != "T" {
		t.Errorf("%s is in state %q, not stopped", victim, state)
	}
	if err := unix.Kill(target, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
}

func processState(pid int) string { return stateIn(fmt.Sprintf("/proc/%d/stat", pid)) }

// stateIn is the state in the stat file of a process or thread, empty where that is gone.
func stateIn(stat string) string {
	b, err := os.ReadFile(stat)
	if err != nil {
		return ""
	}
	_, after, _ := strings.Cut(string(b), ") ")
	return after[:1]
}

// kills ends a victim: the container is gone soon, and the run is no success.
func (b *faultBench) kills(t *testing.T, p phase, victim string) {
	r := b.begin(t, p)
	kill := r.killer(t, victim)
	r.unlaunched(t)
	begin := time.Now()
	kill()
	r.release(t)
	if p.at == "starting" && victim == "shim" {
		// The client goes on from the gate, and finds its input at an end.
		r.clientGone(t)
		begin = time.Now()
	}
	r.emptied(t, begin)
	var out []byte
	if p.decided {
		out = r.drain(t) // what is known is still delivered
	}
	r.awaitEnd(t, endBound)
	t.Logf("agentshim ended %v after the fault: %v", time.Since(begin).Round(time.Millisecond), r.cmd.ProcessState)
	// Rootless Podman is two processes: the second may carry the launch of a proven
	// container across before it sees the end of the first.
	if victim != "client" || !b.rootless() {
		r.unlaunched(t)
	}
	r.judge(t, victim, out)
	r.forgotten(t)
}

// killer finds a victim and returns its end.
func (r *faulty) killer(t *testing.T, victim string) func() {
	t.Helper()
	if victim == "client" && r.proxy != nil {
		return r.proxy.cut
	}
	pid := r.pid(t, victim)
	return func() {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if victim == "shim" && r.proxy != nil {
			<-r.waited // its connections are closed before what is held goes on
		}
	}
}

// judge looks at how agentshim and its record say that the run ended.
func (r *faulty) judge(t *testing.T, victim string, out []byte) {
	t.Helper()
	switch {
	case victim == "shim":
		if rec := r.record(t); !rec.End.IsZero() {
			t.Errorf("the record has an end: %s", mustJSON(t, rec))
		}
		return // its folder is for the next run to remove
	case r.phase.decided:
		if code := r.cmd.ProcessState.ExitCode(); code != harnessCode {
			t.Errorf("exit %d, want the harness's own %d\nstderr: %s", code, harnessCode, r.stderr.String())
		}
		wantBytes(t, "stdout", string(out), r.wants(nil))
		r.recorded(t, "")
	default:
		reason := r.reason(victim)
		if code := r.cmd.ProcessState.ExitCode(); code != shim.ExitRefused || !strings.Contains(r.stderr.String(), "agentshim: "+string(reason)+": ") {
			t.Errorf("exit %d, want 125 %s\nstderr: %s", code, reason, r.stderr.String())
		}
		r.recorded(t, reason)
	}
	r.noFolder(t)
}

// reason is that of a run whose victim was killed.
func (r *faulty) reason(victim string) shim.Reason {
	if victim == "init" {
		return shim.ReasonInitLost
	}
	if r.proxy != nil && (r.phase.at == "starting" || r.phase.at == "made") {
		return shim.ReasonEngineFailed // the run had not begun
	}
	return shim.ReasonEngineLost
}

// unlaunched: before the gate there is nothing in the container but init, and
// nothing of the harness has run. A44.
func (r *faulty) unlaunched(t *testing.T) {
	t.Helper()
	_, err := os.Lstat(filepath.Join(r.work, "marker"))
	if got := err == nil; got != r.phase.launched {
		t.Errorf("the harness has run: %v, want %v", got, r.phase.launched)
	}
	if n := len(sandboxed(t, r.id)); !r.phase.launched && n > 1 {
		t.Errorf("%d processes in the container before the launch", n)
	}
}

// emptied waits until no process is left in the container.
func (r *faulty) emptied(t *testing.T, begin time.Time) {
	t.Helper()
	for left := sandboxed(t, r.id); len(left) > 0; left = sandboxed(t, r.id) {
		if time.Since(begin) > 30*time.Second {
			t.Fatalf("processes %v live on in the container", left)
		}
		time.Sleep(5 * time.Millisecond)
	}
	if took := time.Since(begin); took > goneBound {
		t.Errorf("the container lived for %v after the fault", took)
	}
}

// clientGone waits until no process names the run in its command line.
func (r *faulty) clientGone(t *testing.T) {
	t.Helper()
	for begin := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		if len(processes(t, "cmdline", "agentshim-"+r.id)) == 0 {
			return
		}
		if time.Since(begin) > 30*time.Second {
			t.Fatalf("processes of run %s live on: %v", r.id, processes(t, "cmdline", "agentshim-"+r.id))
		}
	}
}

// awaitEnd waits for the shim.
func (r *faulty) awaitEnd(t *testing.T, bound time.Duration) {
	t.Helper()
	select {
	case <-r.waited:
	case <-time.After(bound):
		t.Errorf("agentshim still runs after %v", bound)
		r.cancel()
		<-r.waited
	}
}

func (r *faulty) record(t *testing.T) shim.Record {
	t.Helper()
	return readRecord(t, filepath.Join(r.state, "agentshim/runs", r.id, "record.json"))
}

// recorded compares the record's end; without a reason it is the harness's own.
func (r *faulty) recorded(t *testing.T, reason shim.Reason) {
	t.Helper()
	rec, exit := r.record(t), harnessCode
	if reason != "" {
		exit = shim.ExitRefused
	}
	if rec.Exit != exit || rec.Reason != reason || rec.Retry != reason.Retryable() || rec.End.IsZero() {
		t.Errorf("record: exit %d, reason %q, retry %v, end %v; want %d %q", rec.Exit, rec.Reason, rec.Retry, rec.End, exit, reason)
	}
}

func (r *faulty) noFolder(t *testing.T) {
	t.Helper()
	if _, err := os.Lstat(filepath.Join(r.runtimeDir(t), r.id)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the run's folder: %v", err)
	}
}

// forgotten waits until the engine has no container of the run, and no process on
// the host serves it.
func (r *faulty) forgotten(t *testing.T) {
	t.Helper()
	begin := time.Now()
	for {
		left := r.listed(t)
		if len(left) == 0 && len(processes(t, "cmdline", r.id)) == 0 {
			return
		}
		if time.Since(begin) > tidyBound {
			t.Errorf("left after %v: containers %v, processes %v", tidyBound, left, processes(t, "cmdline", r.id))
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// listed are the engine's containers of the run.
func (r *faulty) listed(t *testing.T) []string {
	t.Helper()
	return strings.Fields(r.bare(t, "ps", "-aq", "--filter", "label=agentshim.run="+r.id).ok(t).Stdout)
}

// tidy: the next run removes what killed shims left. A50.
func (b *faultBench) tidy(t *testing.T) {
	t.Helper()
	b.call(t, call{State: b.state, Env: []string{b.host}}, "exec", "--quiet", "--spec", b.file, "--", "true").ok(t)
	for _, dir := range b.folders {
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", dir, err)
		}
	}
}

// TestOutsiders: somebody else's command ends, freezes or removes the container.
// Podman's rootless set-up can't pause on cgroup v1.
func TestOutsiders(t *testing.T) {
	inTurn(t, func(t *testing.T, s setup) {
		if !s.root() {
			return
		}
		b := newFaultBench(t, s)
		for _, argv := range [][]string{{"rm", "--force"}, {"stop", "--time=0"}} {
			t.Run(argv[0], func(t *testing.T) {
				r := b.begin(t, quiet)
				begin := time.Now()
				r.engine(t, argv...)
				r.awaitEnd(t, endBound)
				t.Logf("agentshim ended %v after the command began", time.Since(begin).Round(time.Millisecond))
				r.judge(t, "init", nil)
				r.forgotten(t)
			})
		}
		t.Run("pause and unpause", func(t *testing.T) {
			r := b.begin(t, quiet)
			r.engine(t, "pause")
			r.engine(t, "unpause")
			r.goesOn(t)
		})
		t.Run("pause, and the shim killed", func(t *testing.T) {
			r := b.begin(t, quiet)
			r.engine(t, "pause")
			if err := r.cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			<-r.waited
			if len(sandboxed(t, r.id)) == 0 {
				t.Fatal("control: the frozen container ended by itself")
			}
			b.tidy(t)
			r.emptied(t, time.Now())
			r.forgotten(t)
		})
		t.Run("pause, and an end on request", func(t *testing.T) {
			if s.engine == "podman" && !soaking() {
				return // as on Docker: init does not answer
			}
			r := b.begin(t, quiet)
			r.engine(t, "pause")
			begin := time.Now()
			if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			r.awaitEnd(t, 30*time.Second)
			r.emptied(t, time.Now())
			t.Logf("agentshim ended %v after SIGTERM: %v, %s", time.Since(begin).Round(time.Millisecond), r.cmd.ProcessState, r.stderr.String())
			r.judge(t, "client", nil)
			r.forgotten(t)
		})
	})
}

// engine has the bare engine do something with the run's container.
func (r *faulty) engine(t *testing.T, argv ...string) {
	t.Helper()
	r.bare(t, append(argv, "agentshim-"+r.id)...).ok(t)
}

// daemon is a dockerd of the test's own, with its containerd, in a mount and a
// network namespace of its own: what it changes ends with its processes.
type daemon struct {
	dir string
	cmd *exec.Cmd
}

// startDaemon starts one whose data is on a small tmpfs, and loads the image hello.
func startDaemon(t *testing.T) *daemon {
	t.Helper()
	d := &daemon{dir: setups[0].private(t)}
	if err := os.Chmod(d.dir, 0o711); err != nil { // the socket has the group docker
		t.Fatal(err)
	}
	script := fmt.Sprintf(`echo {} >daemon.json && mkdir data && mount -t tmpfs -o size=48m,mode=711 none data && exec dockerd --data-root=%[1]s/data --exec-root=%[1]s/exec \
		--pidfile=%[1]s/pid --host=%[2]s --bridge=none --iptables=false --ip6tables=false --shutdown-timeout=1 --config-file=%[1]s/daemon.json --log-level=warn`, d.dir, d.host())
	d.cmd = exec.Command("sh", "-c", script)
	d.cmd.Dir = d.dir
	var log bytes.Buffer
	d.cmd.Stdout, d.cmd.Stderr = &log, &log
	d.cmd.WaitDelay = time.Second // containerd's shims keep the log
	// A network of its own: without a bridge, dockerd deletes docker0 where it runs.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET, Setpgid: true}
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = d.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = d.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Errorf("the test's dockerd does not end")
		}
		for _, pid := range processes(t, "cmdline", d.dir) { // what a killed daemon leaves
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		<-ended
		if t.Failed() {
			t.Logf("dockerd: %s", log.String())
		}
	})
	eventually(t, "dockerd answers", func() bool { return d.docker(t, nil, "version").Code == 0 })
	save := setups[0].bare(t, "save", "agentshim/hello:test").ok(t)
	d.docker(t, strings.NewReader(save.Stdout), "load").ok(t)
	return d
}

func (d *daemon) host() string { return "unix://" + filepath.Join(d.dir, "sock") }

// docker is a bare client of the daemon's.
func (d *daemon) docker(t *testing.T, stdin io.Reader, args ...string) result {
	t.Helper()
	cmd, cancel := setups[0].command(t, call{Stdin: stdin, Timeout: 30 * time.Second}, "docker", append([]string{"--host", d.host()}, args...)...)
	defer cancel()
	return finish(t, cmd)
}

// TestDaemonFaults: a full disk, a daemon that stops, and one that is killed: that
// leaves its containers to whoever may signal their processes. L05, L06.
func TestDaemonFaults(t *testing.T) {
	Need(t)
	for i, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(unix.SignalName(sig), func(t *testing.T) {
			d := startDaemon(t)
			b := newFaultBench(t, setups[i]) // root, and the docker group
			b.host = "DOCKER_HOST=" + d.host()
			if sig == syscall.SIGKILL {
				t.Run("L06", func(t *testing.T) { b.fullDisk(t, d) })
			}
			r := b.begin(t, quiet) // the control of L06 too
			state := b.private(t)
			id := b.up(t, call{State: state, Env: []string{b.host}}, b.file)
			step := b.inBackground(t, id, "echo ready; exec sleep 300")
			begin := time.Now()
			if err := d.cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			r.awaitEnd(t, 30*time.Second)
			t.Logf("agentshim ended %v after the daemon's %v: %s", time.Since(begin).Round(time.Millisecond), sig, r.stderr.String())
			r.emptied(t, begin)
			r.judge(t, "client", nil) // engine-lost
			step.sessionLost(t, state, id)
		})
	}
}

// fullDisk: nothing is left of a run that the engine has no room for.
func (b *faultBench) fullDisk(t *testing.T, d *daemon) {
	t.Helper()
	// The daemon's view: the tmpfs is in its mount namespace only.
	filler := fmt.Sprintf("/proc/%d/root%s/data/filler", d.cmd.Process.Pid, d.dir)
	f, err := os.Create(filler)
	if err != nil {
		t.Fatal(err)
	}
	for block := make([]byte, 4096); err == nil; {
		_, err = f.Write(block)
	}
	f.Close()
	defer os.Remove(filler)
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	r := b.call(t, call{Env: []string{b.host}}, "exec", "--quiet", "--spec", b.file, "--", "touch marker").refused(t, shim.ReasonEngineFailed)
	wantText(t, r.Stderr, "no space left on device", "agentshim: hint: free space")
	if _, err := os.Lstat(filepath.Join(b.work, "marker")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the harness has run: %v", err)
	}
	if left := d.docker(t, nil, "ps", "-aq").ok(t).Stdout; left != "" {
		t.Errorf("containers left: %s", left)
	}
}
