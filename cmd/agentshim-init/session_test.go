package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// steps is the shim's side of a session's init.
type steps struct {
	*peer
	out  map[uint16]string
	exit map[uint16]wire.Exit
	// refused are the reasons by step; started says which ones run.
	refused map[uint16]string
	started map[uint16]bool
	// backs are what steps left for their callers.
	backs map[uint16]string
}

func startSession(t *testing.T) *steps {
	return stepsOf(start(t))
}

func stepsOf(p *peer) *steps {
	return &steps{peer: p, out: map[uint16]string{}, exit: map[uint16]wire.Exit{}, refused: map[uint16]string{}, started: map[uint16]bool{}, backs: map[uint16]string{}}
}

// script launches a shell as a step.
func (s *steps) script(id uint16, text string) {
	s.t.Helper()
	s.launch(id, launchOf("sh", "-c", text))
}

func (s *steps) launch(id uint16, l wire.Launch) {
	s.t.Helper()
	if err := s.conn.Of(id).SendJSON(wire.KindLaunch, l); err != nil {
		s.t.Fatal(err)
	}
}

func (s *steps) sendTo(id uint16, kind wire.Kind, payload string) {
	s.t.Helper()
	if err := s.conn.Of(id).Send(kind, 0, []byte(payload)); err != nil {
		s.t.Fatal(err)
	}
}

// until takes frames until ok. It grants no credit, so it is for less than a window.
func (s *steps) until(ok func() bool) {
	s.t.Helper()
	for !ok() {
		f, err := s.conn.Recv()
		if err != nil {
			s.t.Fatalf("%v; %s", err, s.stderr.String())
		}
		switch f.Kind {
		case wire.KindStarted:
			s.started[f.Step] = true
		case wire.KindData:
			s.out[f.Step] += string(f.Payload)
		case wire.KindExit:
			var e wire.Exit
			if err := f.JSON(&e); err != nil {
				s.t.Fatal(err)
			}
			s.exit[f.Step] = e
		case wire.KindBack:
			var b wire.Back
			if err := f.JSON(&b); err != nil {
				s.t.Fatal(err)
			}
			s.backs[f.Step] += b.Path + ": " + b.Problem
		case wire.KindBackData:
			s.backs[f.Step] += string(f.Payload)
		case wire.KindRefused:
			var r wire.Refused
			if err := f.JSON(&r); err != nil {
				s.t.Fatal(err)
			}
			s.refused[f.Step] = r.Reason
		}
	}
}

func (s *steps) says(id uint16, text string) {
	s.t.Helper()
	s.until(func() bool { return strings.Contains(s.out[id], text) })
}

func (s *steps) ends(id uint16) wire.Exit {
	s.t.Helper()
	s.until(func() bool { _, ok := s.exit[id]; return ok })
	return s.exit[id]
}

// processes are the init's descendants on the host, by name.
func (s *steps) processes() []string {
	byParent := map[int][]int{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		s.t.Fatal(err)
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			parent, _ := parentOf(e.Name())
			byParent[parent] = append(byParent[parent], pid)
		}
	}
	var names []string
	for list := byParent[s.cmd.Process.Pid]; len(list) > 0; list = list[1:] {
		list = append(list, byParent[list[0]]...)
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", list[0]))
		names = append(names, strings.TrimSpace(string(b)))
	}
	slices.Sort(names)
	return names
}

// watcherThreads counts those of init's own children.
func (s *steps) watcherThreads() (n int) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		s.t.Fatal(err)
	}
	for _, e := range entries {
		if parent, err := parentOf(e.Name()); err == nil && parent == s.cmd.Process.Pid {
			tasks, _ := os.ReadDir("/proc/" + e.Name() + "/task")
			n += len(tasks)
		}
	}
	return n
}

// TestParentOf: a process that can't be looked at for want of a descriptor is not taken for gone:
// as a step's stray it would live on.
func TestParentOf(t *testing.T) {
	own := strconv.Itoa(os.Getpid())
	if parent, err := parentOf(own); parent != os.Getppid() || err != nil {
		t.Errorf("control: %d %v", parent, err)
	}
	if parent, err := parentOf("4194305"); parent != 0 || err != nil { // above the most that pid_max may be
		t.Errorf("gone: %d %v", parent, err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	none := limit
	none.Cur = 3 // what is open stays open: setrlimit(2)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	parent, err := parentOf(own)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, unix.EMFILE) {
		t.Errorf("no descriptor left: %d %v", parent, err)
	}
}

// hiding leaves processes behind that left the harness's group, session and parents.
const hiding = "(setsid sh -c '(trap \"\" TERM HUP INT; echo hidden; exec env -i /bin/sleep 1000) &' &); (exec nohup sleep 1000 &) ; "

func TestSteps(t *testing.T) {
	s := startSession(t)
	s.script(1, "echo one; read x; echo got $x; exit 3")
	s.script(2, "echo two; "+hiding+"sleep 0.3; exit 4")
	s.script(3, "kill -9 $$")
	s.says(1, "one")
	s.says(2, "hidden")
	if e := s.ends(2); e.Code != 4 || e.Left < 2 || e.Lost {
		t.Errorf("%+v", e)
	}
	if e := s.ends(3); e.Signal != 9 || e.Lost {
		t.Errorf("%+v", e)
	}
	s.sendTo(1, wire.KindData, "it\n")
	if e := s.ends(1); e.Code != 3 || !strings.Contains(s.out[1], "got it") {
		t.Errorf("%+v %q", e, s.out[1])
	}
	if left := s.processes(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	// Frames that were on their way to a step that has ended.
	s.sendTo(1, wire.KindData, "late")
	_ = s.conn.Of(1).SendUint32(wire.KindCredit, wire.Stdout, 3)
	s.sendTo(1, wire.KindCut, "")
	s.send(wire.KindFinish, 0, "")
	if e := s.ends(0); e.Code != 0 {
		t.Errorf("%+v", e)
	}
	s.in.Close()
	s.peer.ends()
}

// TestCut: all processes of a step, wherever they went, and none of another one.
func TestCut(t *testing.T) {
	for _, row := range []struct{ name, script string }{
		{"hidden", hiding + "echo ready; exec sleep 1000"},
		{"stopped watcher", "sleep 0.2; kill -STOP $PPID; " + hiding + "echo ready; exec sleep 1000"},
		{"output that nobody takes", hiding + "sleep 0.3; echo ready; exec cat /dev/zero"},
		{"fork and exit, on and on", hiding + `echo ready; f() { ( f & ) ; exit; }; f & exec sleep 1000`},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := startSession(t)
			s.script(1, "echo one; read x; exit 3")
			s.says(1, "one")
			s.script(2, row.script)
			s.says(2, "ready")
			s.says(2, "hidden")
			s.sendTo(2, wire.KindCut, "")
			if e := s.ends(2); !e.Lost {
				t.Errorf("%+v", e)
			}
			if left := s.processes(); len(left) != 2 {
				t.Errorf("left: %q", left)
			}
			s.sendTo(1, wire.KindData, "\n")
			if e := s.ends(1); e.Code != 3 {
				t.Errorf("%+v", e)
			}
		})
	}
}

// TestLostWatcher: who kills its watcher ends its own step and no other one.
func TestLostWatcher(t *testing.T) {
	s := startSession(t)
	s.script(1, "read x; exit 3")
	s.script(2, hiding+"sleep 0.2; kill -TERM $PPID; kill -SEGV $PPID; echo still; kill -KILL $PPID; sleep 1000")
	if e := s.ends(2); !e.Lost || !strings.Contains(s.out[2], "still") {
		t.Errorf("%+v %q", e, s.out[2])
	}
	if left := s.processes(); len(left) != 2 {
		t.Errorf("left: %q", left)
	}
	s.sendTo(1, wire.KindEOF, "")
	if e := s.ends(1); e.Code != 3 {
		t.Errorf("%+v", e)
	}
}

func TestStepSignal(t *testing.T) {
	s := startSession(t)
	s.script(1, "trap 'exit 5' TERM; echo ready; sleep 60 & wait")
	s.script(2, "echo ready; exec sleep 60")
	s.says(1, "ready")
	s.says(2, "ready")
	for _, id := range []uint16{1, 2} {
		if err := s.conn.Of(id).SendUint32(wire.KindSignal, 0, uint32(unix.SIGTERM)); err != nil {
			t.Fatal(err)
		}
	}
	if a, b := s.ends(1), s.ends(2); a.Code != 5 || b.Signal != int(unix.SIGTERM) {
		t.Errorf("%+v %+v", a, b)
	}
}

// TestStepRefused: the reason is named, what was sent on has no effect, and the session
// goes on. A step's own files go with it.
func TestStepRefused(t *testing.T) {
	s := startSession(t)
	file := func(id uint16, path string) {
		if err := s.conn.Of(id).SendJSON(wire.KindFile, wire.File{Path: path, Size: 1}); err != nil {
			t.Fatal(err)
		}
		s.sendTo(id, wire.KindFileData, "x")
	}
	s.sendJSON(wire.KindFile, wire.File{Path: "/home/agent/kept"})
	file(1, "/home/agent/kept")
	s.script(1, "echo runs")
	file(2, "/home/agent/second")
	s.script(2, "cat /home/agent/second")
	s.launch(3, launchOf("no-such-program"))
	s.script(3, "echo runs")
	s.launch(4, launchOf("sh", "-c", strings.Repeat("x", 128<<10)))
	s.until(func() bool { return len(s.refused) == 3 })
	s.ends(2)
	s.script(5, "cd /home/agent; echo *")
	s.ends(5)
	want := map[uint16]string{1: "home-file", 3: "harness-missing", 4: "arguments"}
	if fmt.Sprint(s.refused) != fmt.Sprint(want) || s.out[2] != "x" || s.out[5] != "kept\n" || s.out[1]+s.out[3] != "" {
		t.Errorf("%v %v", s.refused, s.out)
	}
}

// TestCutFile: of a step whose client goes amid a file, nothing is left.
func TestCutFile(t *testing.T) {
	s := startSession(t)
	s.script(1, "true")
	s.ends(1)
	fds := func() int {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	before := fds()
	for id := range uint16(20) {
		if err := s.conn.Of(id+2).SendJSON(wire.KindFile, wire.File{Path: fmt.Sprintf("/home/agent/part-%d", id), Size: 2}); err != nil {
			t.Fatal(err)
		}
		s.sendTo(id+2, wire.KindFileData, "x")
		s.sendTo(id+2, wire.KindCut, "")
	}
	s.script(30, "ls /home/agent")
	if s.ends(30); s.out[30] != "" || fds() > before+1 {
		t.Errorf("%q; descriptors %d, then %d", s.out[30], before, fds())
	}
}

// TestStepOutput: what each step left at its own path comes before its end, and stays.
func TestStepOutput(t *testing.T) {
	s := startSession(t)
	for id, script := range map[uint16]string{1: "echo one >/home/agent/out-1", 2: "true", 3: "ln -s out-1 /home/agent/out-3"} {
		if err := s.conn.Of(id).SendJSON(wire.KindFile, wire.File{Path: fmt.Sprintf("/home/agent/out-%d", id), WriteBack: true, BackOnly: true}); err != nil {
			t.Fatal(err)
		}
		s.script(id, script)
		s.ends(id)
	}
	s.script(4, "cat /home/agent/out-1")
	s.ends(4)
	want := map[uint16]string{1: "/home/agent/out-1: one\n", 2: "/home/agent/out-2: it is gone", 3: "/home/agent/out-3: it is a link, or lies behind one"}
	if fmt.Sprint(s.backs) != fmt.Sprint(want) || s.out[4] != "one\n" {
		t.Errorf("%v %q", s.backs, s.out[4])
	}
}

func TestTooManySteps(t *testing.T) {
	s := startSession(t)
	for id := range uint16(wire.MaxSteps + 1) {
		s.script(id+1, "exec sleep 1000")
	}
	s.until(func() bool { return len(s.started) == wire.MaxSteps && len(s.refused) == 1 })
	if s.refused[wire.MaxSteps+1] != "steps" {
		t.Errorf("%v", s.refused)
	}
	// Each counts into the container's limit of processes.
	if threads, most := s.watcherThreads(), 6*wire.MaxSteps; threads > most {
		t.Errorf("%d watchers have %d threads", wire.MaxSteps, threads)
	} else {
		t.Logf("%d watchers have %d threads", wire.MaxSteps, threads)
	}
	begin := time.Now()
	s.send(wire.KindFinish, 0, "")
	s.ends(0)
	t.Logf("%d steps ended in %v", wire.MaxSteps, time.Since(begin))
	if len(s.exit) != wire.MaxSteps+1 {
		t.Errorf("%d ends", len(s.exit))
	}
}

// TestSessionOrder: a frame at the wrong time ends the container.
func TestSessionOrder(t *testing.T) {
	for _, row := range []struct {
		name string
		do   func(s *steps)
	}{
		{"step beside a run", func(s *steps) { s.peer.script("exec sleep 60"); s.script(1, "true") }},
		{"finish of a run", func(s *steps) { s.peer.script("exec sleep 60"); s.send(wire.KindFinish, 0, "") }},
		{"run beside a step", func(s *steps) { s.script(1, "true"); s.sendJSON(wire.KindLaunch, launchOf("true")) }},
		{"second launch", func(s *steps) { s.script(1, "exec sleep 60"); s.script(1, "true") }},
		{"data past the end", func(s *steps) {
			s.script(1, "exec sleep 60")
			s.sendTo(1, wire.KindEOF, "")
			s.sendTo(1, wire.KindData, "x")
		}},
		{"finish twice", func(s *steps) { s.send(wire.KindFinish, 0, ""); s.send(wire.KindFinish, 0, "") }},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := startSession(t)
			row.do(s)
			if code := s.peer.ends(); code != exitRefused || !strings.Contains(s.stderr.String(), wire.ErrProtocol.Error()) {
				t.Errorf("exit code %d: %s", code, s.stderr.String())
			}
		})
	}
}

// TestManySteps: what a step costs goes with it.
func TestManySteps(t *testing.T) {
	s := startSession(t)
	pid := s.cmd.Process.Pid
	count := func(what string) int {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, what))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	var fds, threads int
	for id := range uint16(60) {
		s.script(id+1, "exit 0")
		s.ends(id + 1)
		if id == 9 {
			fds, threads = count("fd"), count("task")
		}
	}
	// A step's last descriptors are closed beside its end.
	flat := func() bool { return count("fd") <= fds && count("task") <= threads+1 }
	for deadline := time.Now().Add(10 * time.Second); !flat() && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	if !flat() {
		t.Errorf("descriptors %d, then %d; threads %d, then %d", fds, count("fd"), threads, count("task"))
	}
}

// TestWatcherKilledAtOnce: a harness that kills its watcher before that has said anything
// did run: the step is lost, and not one that found no room.
func TestWatcherKilledAtOnce(t *testing.T) {
	s := startSession(t)
	for id := uint16(1); id <= 100; id++ {
		s.script(id, "kill -9 $PPID; exec sleep 1000")
		s.until(func() bool { _, ended := s.exit[id]; return ended || s.refused[id] != "" })
		if s.refused[id] != "" || !s.started[id] || !s.exit[id].Lost {
			t.Fatalf("step %d: refused %q, started %v, %+v", id, s.refused[id], s.started[id], s.exit[id])
		}
	}
}
