package shim

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

func TestSessionName(t *testing.T) {
	for _, name := range []string{"", "work", "a.b_c-D9", strings.Repeat("x", 63)} {
		if err := checkSessionName(name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"-x", ".x", "a/b", "..", "a b", "a\n", "ä", strings.Repeat("x", 64), "0123456789abcdef"} {
		if err := checkSessionName(name); !errors.Is(err, ReasonSpecInvalid) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// TestFindSession: by id or name, and no name is none.
func TestFindSession(t *testing.T) {
	f := folders{runtime: t.TempDir(), state: t.TempDir()}
	owner, err := self()
	if err != nil {
		t.Fatal(err)
	}
	const unnamed, named = "0123456789abcdef", "0123456789abcde0"
	for id, name := range map[string]string{unnamed: "", named: "work"} {
		if _, err := f.makeRunFolder(id, claim{Owner: owner, Session: &SessionRecord{ID: id, Name: name}}); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{unnamed: unnamed, named: named, "work": named, "": "", "wor": "", "0123": ""} {
		if id, _, err := f.findSession(name); id != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q %v", name, id, err)
		}
	}
}

// TestDownNotRemoved: a session whose keeper is gone is not down while its container may be
// there; where it had none yet, that is its end.
func TestDownNotRemoved(t *testing.T) {
	const id = "0123456789abcdef"
	for name, c := range map[string]struct {
		engine *spec.Engine
		want   Reason
		state  RunState
	}{
		"an engine that can't be asked": {&spec.Engine{Kind: spec.Podman}, ReasonSession, RunLost},
		"no engine yet":                 {nil, ReasonInitLost, RunEnded},
	} {
		t.Run(name, func(t *testing.T) {
			s := testStore(t)
			gone := mustSelf(t)
			gone.StartTicks++
			session := &SessionRecord{ID: id}
			rec := Record{Version: RecordVersion, ID: id, Owner: gone, Engine: c.engine, Session: session}
			_, err := s.folders.makeRunFolder(id, claim{Owner: gone, Session: session})
			if err := errors.Join(err, rec.write(s.folders)); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Down(t.Context(), id); !errors.Is(err, c.want) {
				t.Errorf("%v", err)
			}
			if r, err := s.Run(id); err != nil || r.State != c.state {
				t.Errorf("%s %v", r.State, err)
			}
		})
	}
}

// TestTakeSession: the keeper goes on with a session that was taken, and ends one that was not.
func TestTakeSession(t *testing.T) {
	full := errors.New("no space")
	for name, take := range map[string]error{"taken": nil, "not taken": full} {
		t.Run(name, func(t *testing.T) {
			up, file, err := socketPair()
			if err != nil {
				t.Fatal(err)
			}
			defer up.Close()
			keeper, err := net.FileConn(file)
			if err := errors.Join(err, file.Close()); err != nil {
				t.Fatal(err)
			}
			link := &upLink{log: io.Discard, conn: newKeeperConn(keeper), heard: make(chan struct{})}
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			go link.watch(keeper, cancel)
			ready := make(chan error, 1)
			go func() { ready <- link.ready("x") }()
			if err := hearKeeper(t.Context(), wire.NewConn(up, up), "", io.Discard); err != nil {
				t.Fatal(err)
			}
			id := ""
			if err := takeSession(up, "x", func(got string) error { id = got; return take }); id != "x" || !errors.Is(err, take) {
				t.Fatalf("%q %v", id, err)
			}
			up.Close()
			if err := <-ready; errors.Is(err, ReasonInterrupted) != (take != nil) || (ctx.Err() != nil) != (take != nil) {
				t.Errorf("the keeper: %v, %v", err, context.Cause(ctx))
			}
		})
	}
}

// TestTakeName: a name is one session's while its file is open, whatever file is left
// from before.
func TestTakeName(t *testing.T) {
	f := folders{runtime: t.TempDir()}
	if err := os.WriteFile(filepath.Join(f.runtime, namePrefix+"x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	first, err := f.takeName("x")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.takeName("x"); !errors.Is(err, ReasonSession) {
		t.Errorf("taken twice: %v", err)
	}
	f.pruneName(namePrefix + "x")
	if _, err := os.Stat(first.Name()); err != nil {
		t.Errorf("a name in use was pruned: %v", err)
	}
	f.giveName(first)
	second, err := f.takeName("x")
	if err != nil {
		t.Fatal(err)
	}
	second.Close() // as a process that was killed
	f.pruneName(namePrefix + "x")
	if _, err := os.Stat(second.Name()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file of a name that nobody has is left: %v", err)
	}
}

// TestStepFile: a step's harness is the session's with what the step has of its own.
func TestStepFile(t *testing.T) {
	f := sessionFile{
		Dir: "/dir", Overrides: harness.Overrides{Image: "b", PromptFile: "/session"},
		Spec: []byte(`{"version":1,"image":"a","harness":{"binary":"x","optionFlags":{"n":"-n"}},"envFrom":["A"],"timeout":"1m","session":{"idle":"1m"}}`),
	}
	text := "mine"
	for _, tc := range []struct {
		name string
		own  harness.Overrides
		want func(h *harness.Harness)
	}{
		{"nothing", harness.Overrides{}, func(*harness.Harness) {}},
		{"all", harness.Overrides{EnvFrom: []string{"B", "A"}, Timeout: "5s", WorkingDir: "/tmp", OutputFile: "out"}, func(h *harness.Harness) {
			h.EnvFrom, h.Timeout, h.WorkingDir, h.OutputFile = []string{"A", "B"}, "5s", "/tmp", "/home/agent/out"
		}},
		{"a prompt", harness.Overrides{Prompt: &text}, func(h *harness.Harness) { h.Prompt, h.PromptFile = &text, "" }},
		{"words and an option", harness.Overrides{Args: []string{"-n", "1", "mine"}}, func(h *harness.Harness) {
			h.Prompt, h.PromptFile, h.Harness.Options = &text, "", map[string]any{"n": "1"}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			want, err := f.parse()
			if err != nil || want.Image != "b" || want.PromptFile != "/session" {
				t.Fatalf("%+v %v", want, err)
			}
			tc.want(&want)
			got, err := f.of(tc.own).parse()
			if diff := cmp.Diff(want, got); err != nil || diff != "" {
				t.Errorf("%v %s", err, diff)
			}
		})
	}
	for _, o := range []harness.Overrides{{EnvFrom: []string{"HOME"}}, {EnvFrom: []string{"a=b"}}, {Timeout: "x"}, {Timeout: "-1s"}, {WorkingDir: "tmp"}} {
		if _, err := f.of(o).parse(); !errors.Is(err, ReasonSpecInvalid) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// TestStepFrames: what a client may send, and when.
func TestStepFrames(t *testing.T) {
	before := map[wire.Kind]bool{wire.KindFile: true, wire.KindFileData: true, wire.KindLaunch: true}
	after := map[wire.Kind]bool{wire.KindData: true, wire.KindEOF: true, wire.KindSignal: true, wire.KindWindow: true}
	for kind := wire.Kind(0); kind < 64; kind++ {
		if got := (&carried{}).may(wire.Frame{Kind: kind}); got != before[kind] {
			t.Errorf("kind %d before the launch: %v", kind, got)
		}
		if got := (&carried{launched: true}).may(wire.Frame{Kind: kind}); got != after[kind] {
			t.Errorf("kind %d after the launch: %v", kind, got)
		}
		if (&carried{launched: true}).may(wire.Frame{Kind: kind, Step: 7}) || (&carried{}).may(wire.Frame{Kind: kind, Step: 7}) {
			t.Errorf("kind %d of another step passes", kind)
		}
	}
	s := &carried{launched: true}
	if !s.may(wire.Frame{Kind: wire.KindCredit, Stream: wire.Stdout}) || s.may(wire.Frame{Kind: wire.KindData, Stream: wire.Stdout}) {
		t.Error("streams")
	}
}

// relay is a keeper between a test's init and a test's clients.
type relay struct {
	*keeper
	t    *testing.T
	init *wire.Conn
	got  chan wire.Frame // what init got
}

func newRelay(t *testing.T) *relay {
	t.Helper()
	near, far := net.Pipe()
	t.Cleanup(func() { near.Close(); far.Close() })
	k := newKeeper("0123456789abcdef", "", nil)
	k.c = &container{p: &prepared{job: Job{Harness: harness.Harness{}}}, conn: wire.NewConn(near, near)}
	k.setState(SessionReady)
	r := &relay{keeper: k, t: t, init: wire.NewConn(far, far), got: make(chan wire.Frame, 1000)}
	go func() {
		var exit wire.Exit
		for {
			f, err := k.c.conn.Recv()
			if err != nil || k.take(f, &exit) != nil {
				return
			}
		}
	}()
	go func() {
		for {
			f, err := r.init.Recv()
			if err != nil {
				return
			}
			f.Payload = append([]byte(nil), f.Payload...)
			r.got <- f
		}
	}()
	return r
}

// client begins a step; its connection has room for nothing.
func (r *relay) client() *keeperConn {
	r.t.Helper()
	near, far := net.Pipe()
	r.t.Cleanup(func() { near.Close() })
	go r.carry(newKeeperConn(far), reply{}, false)
	c := newKeeperConn(near)
	if _, err := receiveReply(c.wire); err != nil {
		r.t.Fatal(err)
	}
	return c
}

func (r *relay) want(kind wire.Kind, step uint16) {
	r.t.Helper()
	select {
	case f := <-r.got:
		if f.Kind != kind || f.Step != step {
			r.t.Fatalf("init got kind %d of step %d, want %d of %d", f.Kind, f.Step, kind, step)
		}
	case <-time.After(10 * time.Second):
		r.t.Fatalf("init never got kind %d", kind)
	}
}

func (r *relay) say(step uint16, kind wire.Kind, payload string) {
	r.t.Helper()
	if err := r.init.Of(step).Send(kind, 0, []byte(payload)); err != nil {
		r.t.Fatal(err)
	}
}

func TestCarry(t *testing.T) {
	r := newRelay(t)
	a, b := r.client(), r.client()
	for i, c := range []*keeperConn{a, b} {
		if err := c.wire.SendJSON(wire.KindLaunch, wire.Launch{}); err != nil {
			t.Fatal(err)
		}
		r.want(wire.KindLaunch, uint16(i+1))
	}
	// a reads nothing: all of its output's credit, and b is not held up.
	for range 2 * wire.Window / wire.MaxData {
		r.say(1, wire.KindData, string(make([]byte, wire.MaxData)))
	}
	r.say(2, wire.KindExit, `{"code":3}`)
	var exit wire.Exit
	if err := receiveJSON(b.wire, wire.KindExit, &exit); err != nil || exit.Code != 3 {
		t.Errorf("%+v %v", exit, err)
	}
	// What comes late goes nowhere, and a client that goes is no cut of a step that ended.
	if err := b.wire.Send(wire.KindEOF, wire.Stdin, nil); err != nil {
		t.Error(err)
	}
	a.Close()
	r.want(wire.KindCut, 1)
	r.say(1, wire.KindExit, `{"code":-1,"signal":9,"lost":true}`)
	b.Close()
	r.want(wire.KindCut, 2)
	deadline := time.Now().Add(10 * time.Second)
	for running := 1; running > 0 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		a, err := r.answer(request{Op: opLook}, false)
		if running = a.Running; err != nil {
			t.Fatal(err)
		}
	}
	if a, _ := r.answer(request{Op: opLook}, false); a.Running != 0 || a.Steps != 2 {
		t.Errorf("%+v", a)
	}
}

// TestLastWord: behind a step's end its client learns what was refused since it began.
func TestLastWord(t *testing.T) {
	r := newRelay(t)
	log, err := netpolicy.CreateLog(filepath.Join(t.TempDir(), "log"), r.id, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	r.c.egress = &egress{log: log, during: map[*netpolicy.Summary]bool{}}
	refuse := func(name string) {
		if err := r.c.egress.event(netpolicy.Event{Kind: netpolicy.EventName, Name: name, Verdict: netpolicy.Verdict{Reason: netpolicy.RefusedUnlisted}}); err != nil {
			t.Error(err)
		}
	}
	refuse("before.example")
	first := r.client()
	refuse("one.example")
	second := r.client()
	refuse("two.example")
	for i, c := range []*keeperConn{first, second} {
		r.say(uint16(i+1), wire.KindExit, `{"code":0}`)
		var exit wire.Exit
		if err := receiveJSON(c.wire, wire.KindExit, &exit); err != nil {
			t.Fatal(err)
		}
		last, err := receiveReply(c.wire)
		text := strings.Join(last.Refusals, "\n")
		if err != nil || last.Ended != "" || strings.Contains(text, "before") || strings.Contains(text, "one.example") != (i == 0) || !strings.Contains(text, "two.example") {
			t.Errorf("step %d: %v %q %q", i+1, err, last.Ended, text)
		}
	}
	if n := len(r.c.egress.during); n != 0 {
		t.Errorf("%d summaries are left", n)
	}
}

// TestCarryBound: more than credit allows is not kept for a client.
func TestCarryBound(t *testing.T) {
	r := newRelay(t)
	c := r.client()
	if err := c.wire.SendJSON(wire.KindLaunch, wire.Launch{}); err != nil {
		t.Fatal(err)
	}
	r.want(wire.KindLaunch, 1)
	for range maxQueue/wire.MaxData + 1 {
		r.say(1, wire.KindData, string(make([]byte, wire.MaxData)))
	}
	r.want(wire.KindCut, 1)
}

// TestCarryRefused: what a client sends on after a refusal reaches init before the cut, so
// that init never takes it for another step.
func TestCarryRefused(t *testing.T) {
	r := newRelay(t)
	c := r.client()
	if err := c.wire.SendJSON(wire.KindFile, wire.File{Path: "/home/agent/x"}); err != nil {
		t.Fatal(err)
	}
	r.want(wire.KindFile, 1)
	r.say(1, wire.KindRefused, `{"reason":"home-file","detail":"x"}`)
	var refused wire.Refused
	if err := receiveJSON(c.wire, wire.KindRefused, &refused); err != nil || refused.Reason != "home-file" {
		t.Errorf("%+v %v", refused, err)
	}
	_ = c.wire.SendJSON(wire.KindLaunch, wire.Launch{})
	c.Close()
	r.want(wire.KindCut, 1)
}

// TestCarryBusy: one step too many is refused, and so is one of a session that ends.
func TestCarryBusy(t *testing.T) {
	r := newRelay(t)
	for range wire.MaxSteps {
		if _, err := r.begin(nil, false); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.begin(nil, false); !errors.Is(err, ReasonSessionBusy) {
		t.Errorf("%v", err)
	}
	r.setState(SessionEnding)
	if _, err := r.begin(nil, false); !errors.Is(err, ReasonSession) {
		t.Errorf("%v", err)
	}
}

// FuzzRequest: whatever a client asks is answered or refused.
func FuzzRequest(f *testing.F) {
	for _, q := range []request{{Op: opLook}, {Op: opStep}, {Op: opOpen}, {Op: opStep, File: &sessionFile{Spec: []byte(`{"version":1}`), Dir: "/x"}, Options: &spec.Options{}}} {
		b, err := json.Marshal(q)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"op":"step","file":{"spec":"e30="},"options":{"Command":["\ud800"]}}`))
	k := newKeeper("0123456789abcdef", "", nil)
	k.c = &container{p: &prepared{}}
	k.setState(SessionReady)
	f.Fuzz(func(t *testing.T, in []byte) {
		var q request
		if json.Unmarshal(in, &q) != nil {
			return
		}
		if r, err := k.answer(q, false); err == nil && r.Reason != "" {
			t.Errorf("%+v", r)
		}
	})
}

// halfPipe is a pipe's end that has a half to close.
type halfPipe struct{ net.Conn }

func (halfPipe) CloseWrite() error { return nil }

// TestGiveUp: up waits for a keeper that stands still, but not for ever, whether it still
// tells it something or hears it.
func TestGiveUp(t *testing.T) {
	for name, talk := range map[string]func(context.Context, *wire.Conn) error{
		"hearing": func(ctx context.Context, c *wire.Conn) error { return hearKeeper(ctx, c, "log", io.Discard) },
		"telling": func(_ context.Context, c *wire.Conn) error { return tellKeeper(c, Job{}, keeperStart{}) },
	} {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			defer far.Close()
			conn := newKeeperConn(halfPipe{near})
			defer conn.Close()
			ctx, cancel := context.WithCancel(t.Context())
			defer context.AfterFunc(ctx, func() { giveUp(conn) })()
			time.AfterFunc(time.Hour, cancel)
			start := time.Now()
			if err := talk(ctx, conn.wire); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(start) != time.Hour+upPatience {
				t.Errorf("%s: %v after %v", name, err, time.Since(start))
			}
		})
	}
}

// TestSilentKeeper: what a step's session does not answer is no engine's.
func TestSilentKeeper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		defer far.Close()
		end := &farEnd{Conn: near, closed: make(chan struct{})}
		c := &container{p: &prepared{session: &sessionStep{id: "id"}}, engine: end, conn: wire.NewConn(end, end), lifeline: end.drop}
		start := time.Now()
		err := c.expect(answerTimeout, wire.KindStarted, nil)
		if ReasonOf(err) != ReasonSessionLost || !strings.Contains(err.Error(), "no answer in") || time.Since(start) != answerTimeout {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}

// TestUnready: a readiness step that was lost with init is no reason of its own.
func TestUnready(t *testing.T) {
	late := &Error{Reason: ReasonSession, Msg: "not ready"}
	gone := &Error{Reason: ReasonEngineLost}
	program := &Error{Reason: ReasonSession, Err: sessionLost("id", io.EOF)}
	for _, tt := range []struct {
		refused, ended error
		want           Reason
	}{
		{nil, gone, ReasonEngineLost},
		{late, nil, ReasonSession},
		{late, gone, ReasonSession},
		{sessionLost("id", io.EOF), gone, ReasonEngineLost},
		{program, gone, ReasonEngineLost},
		{sessionLost("id", io.EOF), nil, ReasonSessionLost},
	} {
		if got := ReasonOf(unready(tt.refused, tt.ended)); got != tt.want {
			t.Errorf("%v, %v: %q, want %q", tt.refused, tt.ended, got, tt.want)
		}
	}
}
