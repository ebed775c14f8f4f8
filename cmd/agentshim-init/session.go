package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// session is the container of several steps. Each has a watcher, a process of init's
// own program that adopts whatever the step's processes leave behind; so what init
// itself adopts belongs to no living step, and is killed.
type session struct {
	// begun is the receiving goroutine's.
	begun bool
	// born holds a token when there may be a child to wait for. gone is closed when a
	// session that finishes has no child left; running counts its steps.
	born, gone chan struct{}
	running    sync.WaitGroup

	mu sync.Mutex
	// Below, mu guards. It is held while a watcher is forked: until it is known as one,
	// nobody may look for strays.
	steps map[uint16]*step
	// watchers are the living ones' steps by pid; ended are those whose watcher is gone
	// while strays may be left.
	watchers  map[int]*step
	ended     []*step
	finishing bool
}

func newSession() *session {
	return &session{born: make(chan struct{}, 1), gone: make(chan struct{}), steps: map[uint16]*step{}, watchers: map[int]*step{}}
}

// watch is init's end of a step's watcher.
type watch struct {
	// pid is 0 until there is one; session.mu guards it.
	pid int
	// orders takes the watcher's one order and stays open, reports gives what it says.
	orders, reports *os.File
	// gone is closed when the watcher is gone and no stray is left.
	gone chan struct{}
	// killed says, once gone is closed, that a signal ended it.
	killed bool
}

// handleStep handles a frame of a session's step. One for a step that has ended was on
// its way.
func (in *initProcess) handleStep(f wire.Frame) error {
	if in.own.launched {
		return unexpected(f)
	}
	in.session.begin(in)
	s := in.session.step(f.Step)
	switch f.Kind {
	case wire.KindFile, wire.KindFileData, wire.KindLaunch:
		if s == nil {
			s = in.session.open(in, f.Step)
		}
		if s.launched {
			return unexpected(f)
		}
		return in.prepare(s, f)
	case wire.KindCut:
		in.session.cut(s)
		return nil
	case wire.KindData, wire.KindEOF, wire.KindCredit, wire.KindSignal, wire.KindWindow:
		if s == nil || s.refused {
			return nil
		}
		if !s.launched {
			return unexpected(f)
		}
		if err := s.stream(f); err != nil && !s.over.Load() {
			return err
		}
		return nil
	}
	return unexpected(f)
}

// begin starts what waits for the session's children.
func (se *session) begin(in *initProcess) {
	if !se.begun {
		se.begun = true
		go in.session.reap()
	}
}

func (se *session) step(id uint16) *step {
	se.mu.Lock()
	defer se.mu.Unlock()
	return se.steps[id]
}

// open begins a step. One too many is refused by its launch.
func (se *session) open(in *initProcess, id uint16) *step {
	se.mu.Lock()
	defer se.mu.Unlock()
	s := newStep(in.conn, id)
	if in.attached {
		s.home = wire.AttachDir
	}
	se.steps[id] = s
	return s
}

func (se *session) all() []*step {
	se.mu.Lock()
	defer se.mu.Unlock()
	return slices.Collect(maps.Values(se.steps))
}

// close forgets a step.
func (se *session) close(s *step) {
	se.mu.Lock()
	defer se.mu.Unlock()
	s.over.Store(true)
	delete(se.steps, s.id)
}

// cut kills a step whole: its watcher, and then, as strays, what that leaves behind.
// Nobody takes its output any more.
func (se *session) cut(s *step) {
	switch {
	case s == nil:
	case !s.launched:
		if s.file != nil {
			s.file.f.Close() // again, where it is whole
		}
		s.removeFiles()
		se.close(s)
	default:
		s.giveUp()
		se.mu.Lock()
		defer se.mu.Unlock()
		if se.watchers[s.watch.pid] == s { // else the number may be another's
			_ = syscall.Kill(s.watch.pid, syscall.SIGKILL)
		}
	}
}

// launchStep starts a step's watcher, which starts the harness.
func (in *initProcess) launchStep(s *step, p *streams, program string, l wire.Launch) *wire.Refused {
	if err := in.startWatcher(s, p); err != nil {
		p.close()
		return refuse("steps", "%v", err)
	}
	s.launched = true
	in.session.running.Add(1)
	go func() {
		defer in.session.running.Done()
		in.follow(s, p, in.order(program, l))
	}()
	return nil
}

func (in *initProcess) order(program string, l wire.Launch) order {
	o := order{Program: program, Launch: l}
	if in.attached {
		o.Init = os.Getpid()
	}
	return o
}

// startWatcher forks a watcher. It inherits its own two pipes and the harness's ends of
// the streams.
func (in *initProcess) startWatcher(s *step, p *streams) error {
	orders, ours, err := os.Pipe()
	if err != nil {
		return err
	}
	defer orders.Close()
	reports, theirs, err := os.Pipe()
	if err != nil {
		ours.Close()
		return err
	}
	defer theirs.Close()
	s.watch = watch{orders: ours, reports: reports, gone: make(chan struct{})}
	fds := append([]uintptr{orders.Fd(), theirs.Fd(), theirs.Fd()}, p.child()...)
	if in.attached {
		fds = append(fds, 0) // watchLifeline
	}
	err = raised(in.oomScore, func() error { return in.session.fork(s, fds) })
	if err != nil {
		ours.Close()
		reports.Close()
	}
	return err
}

// fork starts the program that this process runs, which can't be opened but executed.
func (se *session) fork(s *step, fds []uintptr) error {
	se.mu.Lock()
	defer se.mu.Unlock()
	if se.finishing {
		return errors.New("the session is ending")
	}
	if len(se.steps) > wire.MaxSteps {
		return fmt.Errorf("%d steps run already", wire.MaxSteps)
	}
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"agentshim-init", watchArg}, &syscall.ProcAttr{Env: watchEnv, Files: fds})
	if err != nil {
		return err
	}
	s.watch.pid = pid
	se.watchers[pid] = s
	se.wake()
	return nil
}

func (se *session) wake() {
	select {
	case se.born <- struct{}{}:
	default:
	}
}

// maxReports bounds what is read of a watcher.
const maxReports = 16 << 10

// follow takes a step from its watcher's start to its end.
func (in *initProcess) follow(s *step, p *streams, o order) {
	_ = json.NewEncoder(s.watch.orders).Encode(o) // EPIPE: it is gone, which its reports say
	said := json.NewDecoder(io.LimitReader(s.watch.reports, maxReports))
	var begun started
	if err := said.Decode(&begun); err != nil || begun.Refused == nil && begun.PID <= 0 {
		<-s.watch.gone
		if !s.watch.killed { // else the harness may have run, and done that
			begun.Refused = refuse("steps", "what watches the step ended at its start")
		}
	}
	if begun.Refused != nil {
		<-s.watch.gone
		in.forget(s, p)
		in.tell(s, wire.KindRefused, begun.Refused)
		return
	}
	kills := oomKills(in.oomKills)
	s.pid.Store(int64(begun.PID))
	if err := s.conn.Send(wire.KindStarted, 0, nil); err != nil {
		fatal("started", err)
	}
	w := s.pump(p)
	var exit wire.Exit
	if err := said.Decode(&exit); err != nil {
		exit = wire.Exit{Code: -1, Signal: int(unix.SIGKILL), Lost: true}
	}
	<-s.watch.gone
	s.pid.Store(0)
	s.drain(p, w)
	in.forget(s, p)
	if err := sendBacks(s.conn, s.home, s.backs); err != nil {
		fatal("step's output", err)
	}
	if exit.OOMKills = oomKills(in.oomKills); exit.OOMKills >= 0 {
		exit.OOMKills -= max(kills, 0) // those while it ran
	}
	in.tell(s, wire.KindExit, exit)
}

// forget lets go of all that a step had here.
func (in *initProcess) forget(s *step, p *streams) {
	in.session.close(s)
	s.watch.orders.Close()
	s.watch.reports.Close()
	s.stdin.CloseWrite()
	p.close()
	s.removeFiles()
}

func (in *initProcess) tell(s *step, kind wire.Kind, v any) {
	if err := s.conn.SendJSON(kind, v); err != nil {
		fatal("step", err)
	}
}

// finish kills what runs in a session and says when nothing is left.
func (in *initProcess) finish(f wire.Frame) error {
	if in.own.launched || in.session.finish() {
		return unexpected(f)
	}
	in.session.begin(in)
	in.session.wake()
	go func() {
		<-in.session.gone
		in.session.running.Wait()
		in.exit(wire.Exit{})
	}()
	return nil
}

// finish is true where it was called before.
func (se *session) finish() bool {
	se.mu.Lock()
	defer se.mu.Unlock()
	before := se.finishing
	se.finishing = true
	for _, s := range se.steps {
		s.giveUp()
	}
	_ = syscall.Kill(-1, syscall.SIGKILL)
	return before
}

// reap waits for init's children: watchers and strays.
func (se *session) reap() {
	for {
		switch err := awaitChild(); {
		case err == nil:
			se.takeEnded()
			se.sweep()
		case se.over():
			close(se.gone)
			return
		default: // ECHILD
			<-se.born
		}
	}
}

// awaitChild returns when a child has ended. It stays a zombie, so that its number is no
// other process's yet.
func awaitChild() error {
	for {
		err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (se *session) over() bool {
	se.mu.Lock()
	defer se.mu.Unlock()
	return se.finishing
}

// takeEnded frees the numbers of the children that have ended, while nobody kills by number.
func (se *session) takeEnded() {
	se.mu.Lock()
	defer se.mu.Unlock()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if err != nil || pid == 0 {
			return
		}
		if s := se.watchers[pid]; s != nil {
			delete(se.watchers, pid)
			s.watch.killed = status.Signaled()
			se.ended = append(se.ended, s)
		}
	}
}

// sweep kills the strays after the end of a watcher. There is a child to wait for, and
// so another turn, until none is left.
func (se *session) sweep() {
	se.mu.Lock()
	defer se.mu.Unlock()
	if se.finishing {
		_ = syscall.Kill(-1, syscall.SIGKILL) // one that entered since
	}
	if len(se.ended) == 0 {
		return
	}
	left := false
	for _, pid := range children(os.Getpid()) {
		if se.watchers[pid] == nil {
			left = true
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	if left {
		return
	}
	for _, s := range se.ended {
		close(s.watch.gone)
	}
	se.ended = nil
}

// children are the processes whose parent has that pid. A zombie is one, too: while
// its first thread has ended, others may run.
func children(parent int) []int {
	dir, err := os.Open("/proc")
	if err != nil {
		fatal("processes", err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		fatal("processes", err)
	}
	var out []int
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		of, err := parentOf(name)
		if err != nil {
			fatal("processes", err) // else one of them would live on
		}
		if of == parent {
			out = append(out, pid)
		}
	}
	return out
}

// parentOf is field 4 of /proc/PID/stat; the second field, in parentheses, may hold
// anything (proc_pid_stat(5)). It is 0 for a process that is gone, or another user's where
// /proc hides those (hidepid, in a container that is not agentshim's).
func parentOf(pid string) (int, error) {
	b, err := os.ReadFile("/proc/" + pid + "/stat")
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, fs.ErrPermission) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) < 2 {
		return 0, fmt.Errorf("/proc/%s/stat: %d fields", pid, len(fields))
	}
	return strconv.Atoi(string(fields[1]))
}
