package integration

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// sessionPhase is a moment of a session: where its start is held (see phase), or what
// brings a started one there.
type sessionPhase struct {
	name    string
	at      string
	session any
	// client is the command that waits meanwhile: up, down, or none.
	client string
}

var never = map[string]any{"ready": map[string]any{"port": 9}}

var sessionPhases = []sessionPhase{
	{name: "starting", at: "held", client: "up"},
	{name: "waiting to be ready", session: never, client: "up"},
	{name: "idle"},
	{name: "ending", client: "down"},
}

// sessionVictims are a session's processes; the client is the one that waits, the engine
// what the keeper reaches it by.
var sessionVictims = []string{"client", "keeper", "init", "engine"}

// sessionReasons are the reasons of a session whose victim was killed. Without its client
// one that is not ready ends, and one that ends goes on to do so.
var sessionReasons = map[string]shim.Reason{"client": shim.ReasonInterrupted, "keeper": shim.ReasonInitLost, "init": shim.ReasonInitLost, "engine": shim.ReasonEngineLost}

// TestSessionFaults: in each phase each process of a session is killed: nothing is left,
// and who waits is told. While a step runs: TestSessionEnds.
func TestSessionFaults(t *testing.T) {
	someAtOnce(t, func(t *testing.T, s setup) {
		b := newFaultBench(t, s)
		for _, p := range sessionPhases {
			for _, victim := range sessionVictims {
				if victim == "client" && p.client == "" {
					continue
				}
				t.Run(p.name+"/"+victim, func(t *testing.T) { b.killsOfSession(t, p, victim) })
			}
		}
	})
}

func (b *faultBench) killsOfSession(t *testing.T, p sessionPhase, victim string) {
	r, step := b.beginSession(t, p)
	switch victim {
	case "client":
		noError(t, r.cmd.Process.Kill())
	case "engine":
		r.killer(t, "client")()
	default:
		r.killer(t, victim)()
	}
	begin := time.Now()
	r.release(t)
	if victim != "client" || p.client == "up" { // else a step has its grace
		r.emptied(t, begin)
	}
	reason := sessionReasons[victim]
	if victim == "client" && p.client == "down" {
		reason = ""
	}
	if p.client != "" {
		r.awaitEnd(t, 30*time.Second)
		if code := r.cmd.ProcessState.ExitCode(); victim != "client" && code != shim.ExitRefused {
			t.Errorf("%s: exit %d: %s", p.client, code, r.said())
		}
	}
	if p.name == "idle" && victim == "keeper" {
		if x, _ := b.find(t, r.id); x.State != shim.SessionLost {
			t.Errorf("ps: %+v", x)
		}
		stale := b.step(t, call{Env: b.env()}, r.id, "true").refused(t, shim.ReasonSession)
		wantText(t, stale.Stderr, "the keeper of session "+r.id+" is gone")
	}
	if step != nil {
		if _, rec := step.ended(t, shim.ExitRefused); rec.Reason != shim.ReasonSessionLost {
			t.Errorf("the step's reason is %q", rec.Reason)
		}
	}
	var rec shim.Record
	eventually(t, "the end of the record", func() bool {
		b.call(t, call{State: r.state, Env: b.env()}, "prune").ok(t)
		rec = r.record(t)
		return !rec.End.IsZero()
	})
	if rec.Reason != reason || reason == "" && rec.Session.Ended != "down" {
		t.Errorf("record: %q, want %q; %+v", rec.Reason, reason, rec.Session)
	}
	r.forgotten(t)
	r.noFolder(t)
	if x, there := b.find(t, r.id); there {
		t.Errorf("ps has %+v", x)
	}
}

// beginSession starts a session and returns it in its phase, with the client that waits
// and, where it ends, a step that does not.
func (b *faultBench) beginSession(t *testing.T, p sessionPhase) (r *faulty, step *begun) {
	t.Helper()
	own := *b
	own.state = b.private(t)
	r = &faulty{faultBench: &own, phase: phase{at: p.at}}
	own.hold(t, p.at)
	r.client(t, "up", "--quiet", "--spec", b.write(t, spec{"session": p.session, "stopGrace": "1s"}))
	r.eventually(t, "a session", func() bool {
		for id := range ids(t, own.state) {
			r.id = id
		}
		x, ok := b.find(t, r.id)
		r.keeper = x.PID
		return ok
	})
	switch {
	case p.at != "":
		r.afterHello(t)
	case p.client == "up":
		r.eventually(t, "init", func() bool { return b.proven(t, r.id) })
	default:
		r.awaitEnd(t, time.Minute)
	}
	if p.client == "down" {
		step = b.inBackground(t, r.id, deaf)
		r.client(t, "down", r.id)
		r.eventually(t, "the end", func() bool { x, _ := b.find(t, r.id); return x.State == shim.SessionEnding })
	}
	return r, step
}

// client starts a command about the session, in the place of the one before.
func (r *faulty) client(t *testing.T, args ...string) {
	t.Helper()
	cmd, cancel := r.command(t, call{State: r.state, Env: r.env()}, agentshim, args...)
	waited := make(chan struct{})
	r.stderr.Reset()
	r.cmd, r.cancel, r.waited, cmd.Stderr = cmd, cancel, waited, &r.stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(waited)
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		cancel()
		r.release(t)
		<-waited
	})
}

// TestSessionRuntimeFull: without room in the runtime folder a session does not start, and
// says why; one that is there goes on, and ends whole.
func TestSessionRuntimeFull(t *testing.T) {
	Need(t)
	for _, s := range setups[1:3] { // rootless Podman keeps its own files there, too
		t.Run(s.name, func(t *testing.T) {
			dir, state, file := smallState(t, s, "16m"), s.private(t), s.write(t, nil)
			c := call{State: state, Env: []string{"XDG_RUNTIME_DIR=" + dir}}
			left := func() []os.DirEntry {
				entries, err := os.ReadDir(filepath.Join(dir, "agentshim"))
				noError(t, err)
				return entries
			}
			s.call(t, c, "ps").ok(t)               // makes the folder
			for _, room := range []int64{0, mib} { // for nothing, and not for init
				fill(t, dir, room)
				r := s.call(t, c, "up", "--spec", file).refused(t, shim.ReasonState)
				wantText(t, r.Stderr, "no space left on device", "agentshim: hint: ")
				if entries := left(); len(entries) > 0 {
					t.Errorf("left in the runtime folder: %v", entries)
				}
			}
			for id := range ids(t, state) {
				if rec := sessionRecord(t, state, id); s.here(t, id) || rec.Reason != shim.ReasonState || rec.End.IsZero() {
					t.Errorf("%s: %q", id, rec.Reason)
				}
			}
			noError(t, os.Remove(filepath.Join(dir, "filler")))
			id := strings.TrimSpace(s.call(t, c, "up", "--quiet", "--spec", file, "--name", "full").ok(t).Stdout)
			fill(t, dir, 0)
			if r := s.step(t, c, "full", "echo x; exit 3"); r.Code != 3 || r.Stdout != "x\n" {
				t.Errorf("a step: %+v", r)
			}
			s.call(t, c, "down", "full").ok(t)
			if rec := sessionRecord(t, state, id); rec.Reason != "" || rec.Session.Ended != "down" || s.here(t, id) {
				t.Errorf("%q %+v", rec.Reason, rec.Session)
			}
			if entries := left(); len(entries) > 0 {
				t.Errorf("left in the runtime folder: %v", entries)
			}
		})
	}
}

// TestSessionStateFull: without room for its record a step does not run. A session ends
// all the same, but for its record: down says so, and prune writes it once there is room.
func TestSessionStateFull(t *testing.T) {
	Need(t)
	for _, s := range setups[1:3] {
		t.Run(s.name, func(t *testing.T) {
			c := call{State: smallState(t, s, "16m")}
			id := s.up(t, c, s.write(t, nil))
			fill(t, c.State, 0)
			r := s.step(t, c, id, "touch ~/ran").refused(t, shim.ReasonState)
			wantText(t, r.Stderr, "no space left on device", "agentshim: hint: ")
			if r := s.step(t, call{}, id, "ls -A"); r.Code != 0 || r.Stdout != "" {
				t.Errorf("in the home afterwards: %+v", r)
			}
			down := s.call(t, c, "down", id).refused(t, shim.ReasonSession)
			wantText(t, down.Stderr, "agentshim prune tries again")
			if s.here(t, id) {
				t.Error("the container is left")
			}
			noError(t, os.Remove(filepath.Join(c.State, "filler")))
			s.call(t, c, "prune").ok(t)
			if rec := sessionRecord(t, c.State, id); rec.End.IsZero() {
				t.Errorf("the session's record: %+v", rec)
			}
		})
	}
}

// fill leaves that much room in a folder's file system.
func fill(t *testing.T, dir string, room int64) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "filler"))
	noError(t, err)
	defer f.Close()
	for block := make([]byte, 4096); err == nil; {
		_, err = f.Write(block)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	info, err := f.Stat()
	noError(t, err)
	noError(t, f.Truncate(info.Size()-room))
}

// TestKeeperKilled: A49: with the keeper the way out is gone at once, also while the
// container can't end; then it does.
func TestKeeperKilled(t *testing.T) {
	w := outside(t)
	w.settle()
	inTurn(t, func(t *testing.T, s setup) {
		before := network(t)
		s = s.stepping(t)
		file := s.write(t, reachFields(t, map[string]any{"mode": "allow-list", "allow": []any{"db.allowed.example:9"}}, nil))
		c := call{Net: w}
		id := s.steps.of(t, s, c, file)
		cmd, cancel := s.command(t, c, agentshim, "exec", "--session", id, "--", attempts{{"upload", "db.allowed.example:9"}}.json(t))
		defer cancel()
		start := w.accepted.get("discarded")
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		noError(t, cmd.Start())
		moved := within10s(func() bool { return w.accepted.get("discarded") > start+mib })
		x, _ := s.find(t, id)
		// Init can't end the container, nor the step's client have the engine remove it.
		stopped := []int{cmd.Process.Pid}
		for _, pid := range sandboxed(t, id) {
			if firstInNamespace(pid) {
				stopped = append(stopped, pid)
			}
		}
		all := func(sig unix.Signal) {
			for _, pid := range stopped {
				_ = unix.Kill(pid, sig) // ESRCH: it has ended
			}
		}
		all(unix.SIGSTOP)
		defer all(unix.SIGCONT)
		eventually(t, "client and init standing still", func() bool { return len(stopped) == 2 && !slices.ContainsFunc(stopped, moves) })
		noError(t, unix.Kill(x.PID, unix.SIGKILL))
		time.Sleep(200 * time.Millisecond) // what the kernel held for the socket
		after := w.accepted.get("discarded")
		if flows := w.left(t, func() { time.Sleep(time.Second) }); len(flows) > 0 || w.accepted.get("discarded") != after {
			t.Errorf("after the keeper's end: %q, %d bytes", flows, w.accepted.get("discarded")-after)
		}
		if len(sandboxed(t, id)) == 0 {
			t.Error("control: the container ended before its network was looked at")
		}
		all(unix.SIGCONT)
		_ = cmd.Wait()
		if !moved || cmd.ProcessState.ExitCode() != shim.ExitRefused || !strings.Contains(stderr.String(), "agentshim: session-lost: ") {
			t.Errorf("uploaded: %v; exit %d: %s", moved, cmd.ProcessState.ExitCode(), &stderr)
		}
		if !within10s(func() bool { return len(sandboxed(t, id)) == 0 && !s.here(t, id) && network(t) == before }) {
			t.Errorf("left: %v", sandboxed(t, id))
		}
		s.call(t, call{}, "prune").ok(t)
	})
}

// moves says whether a process has a thread that a SIGSTOP has not reached yet.
func moves(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid)) // the pattern is valid
	return slices.ContainsFunc(threads, func(stat string) bool {
		state := stateIn(stat)
		return state != "" && state != "T"
	})
}

// TestSessionEgress: what was decided for all steps is in the session's one log; each
// step's end tells what was refused while it ran.
func TestSessionEgress(t *testing.T) {
	w := outside(t)
	w.settle()
	inTurn(t, func(t *testing.T, s setup) {
		state := s.private(t)
		c := call{Net: w, State: state}
		id := s.up(t, c, s.write(t, reachFields(t, allowed(), nil)))
		first := attempts{{"tls", "api.allowed.example:443", "api.allowed.example", "x"}, {"tcp", at("mcp.host.internal", servicePort)}, {"name", "evil.example"}}
		second := attempts{{"tcp", at(publicAddr, echoPort), "x"}}
		step := func(ops attempts, has, lacks string) tried {
			r := s.call(t, call{Net: w}, "exec", "--session", id, "--", ops.json(t))
			if !strings.Contains(r.Stderr, "agentshim: egress: while the step ran, refused ") || !strings.Contains(r.Stderr, has) || strings.Contains(r.Stderr, lacks) {
				t.Errorf("the step's end: %s", r.Stderr)
			}
			return endings(t, r, ops)
		}
		got := step(first, "name evil.example", publicAddr)
		if a, b := got.of(first[0]...), got.of(first[1]...); !strings.HasPrefix(a, "ok: world") || !strings.HasPrefix(b, "ok: host") {
			t.Errorf("allowed: %s, %s", a, b)
		}
		step(second, at(publicAddr, echoPort), "evil.example")
		down := s.call(t, call{State: state}, "down", id).ok(t)
		wantText(t, down.Stderr, "name evil.example", at(publicAddr, echoPort))
		log := sessionRecord(t, state, id).Egress.Log
		if log == nil || log.Allowed != 2 || log.Refused != 3 {
			t.Errorf("log: %+v", log)
		}
		s.call(t, call{State: state}, "egress", "verify", id).ok(t)
		tail := s.call(t, call{State: state}, "egress", "tail", "--no-follow", id).ok(t).Stdout
		wantText(t, tail, "allowed  api.allowed.example:443 (", "allowed  mcp.host.internal:3000", "refused  name evil.example: unlisted", "refused  "+at(publicAddr, echoPort))
	})
}

// sessionLost fails t unless a step and its session, whose engine is gone, have ended and
// left nothing.
func (b *begun) sessionLost(t *testing.T, state, id string) {
	t.Helper()
	if _, rec := b.ended(t, shim.ExitRefused); rec.Reason != shim.ReasonSessionLost {
		t.Errorf("the step's reason is %q", rec.Reason)
	}
	var rec shim.Record
	eventually(t, "the end of the session and its keeper", func() bool {
		rec = sessionRecord(t, state, id)
		_, there := b.find(t, id)
		return !there && len(sandboxed(t, id)) == 0 && !rec.End.IsZero() && errors.Is(unix.Kill(rec.Owner.PID, 0), unix.ESRCH)
	})
	if rec.Reason != shim.ReasonEngineLost {
		t.Errorf("the session's reason is %q", rec.Reason)
	}
}
