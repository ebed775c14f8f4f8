package integration

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/agentshim/agentshim/shim"
)

// sessions are those that a test's steps run in: one for each harness file.
type sessions struct {
	t *testing.T

	mu sync.Mutex
	// ids are those of the sessions by what their files hold, states their state folders by id.
	ids, states map[string]string
}

// bothWays is each for runs, and then for steps of sessions: what holds for a run's
// streams, signals, terminal and end holds for a step's.
func bothWays(t *testing.T, f func(t *testing.T, s setup)) {
	each(t, f)
	t.Run("steps", func(t *testing.T) { inSessions(t, setups, f) })
}

// someBothWays is that for the set-ups of some.
func someBothWays(t *testing.T, f func(t *testing.T, s setup)) {
	someAtOnce(t, f)
	t.Run("steps", func(t *testing.T) { inSessions(t, chosen(), f) })
}

// inSessions runs f for the set-ups with steps in the place of runs.
func inSessions(t *testing.T, list []setup, f func(t *testing.T, s setup)) {
	atOnce(t, list, func(t *testing.T, s setup) { f(t, s.stepping(t)) })
}

// stepping is the set-up with steps in the place of runs. Its sessions end with t.
func (s setup) stepping(t *testing.T) setup {
	s.steps = &sessions{t: t, ids: map[string]string{}, states: map[string]string{}}
	return s
}

// target names a file to exec, or a session of it.
func (s setup) target(t *testing.T, c call, file string) []string {
	t.Helper()
	if s.steps == nil {
		return []string{"--spec", file}
	}
	return []string{"--session", s.steps.of(t, s, c, file)}
}

// targetText is target of a plain file as words of a shell's.
func (s setup) targetText(t *testing.T) string {
	t.Helper()
	return strings.Join(s.target(t, call{}, s.write(t, nil)), " ")
}

// step makes of an exec of a file a step of a session.
func (x *sessions) step(t *testing.T, s setup, c call, args []string) []string {
	t.Helper()
	i := slices.Index(args, "--spec")
	if args[0] != "exec" || i < 0 {
		return args
	}
	return slices.Concat(args[:i], s.target(t, c, args[i+1]), args[i+2:])
}

// of is the session of a file. The first call of a file makes it, with its environment and
// where it runs.
func (x *sessions) of(t *testing.T, s setup, c call, file string) string {
	t.Helper()
	x.mu.Lock()
	defer x.mu.Unlock()
	key := string(mustRead(t, file))
	if strings.Contains(key, "promptFile") || strings.Contains(key, "envF") {
		key = file // what it names is beside it, or in the environment
	}
	if x.ids[key] == "" {
		up := call{Env: c.Env, Net: c.Net, State: s.private(x.t)} // its record outlives the subtest
		id := s.plain().upOnly(t, up, file)
		x.t.Cleanup(func() { s.plain().call(x.t, call{}, "down", id) })
		x.ids[key], x.states[id] = id, up.State
	}
	return x.ids[key]
}

// whole is the record of the container that a run or a step had, and its state folder.
func (s setup) whole(t *testing.T, rec shim.Record, state string) (shim.Record, string) {
	t.Helper()
	if s.steps == nil {
		return rec, state
	}
	if rec.Session == nil || s.steps.states[rec.Session.ID] == "" {
		t.Fatalf("no step of a session of this test: %+v", rec.Session)
	}
	state = s.steps.states[rec.Session.ID]
	return sessionRecord(t, state, rec.Session.ID), state
}

// plain is the set-up for runs.
func (s setup) plain() setup {
	s.steps = nil
	return s
}

// up starts a session that ends with the test.
func (s setup) up(t *testing.T, c call, file string, more ...string) string {
	t.Helper()
	id := s.upOnly(t, c, file, more...)
	t.Cleanup(func() { s.call(t, call{}, "down", id) })
	return id
}

func (s setup) upOnly(t *testing.T, c call, file string, more ...string) string {
	t.Helper()
	r := s.call(t, c, append([]string{"up", "--quiet", "--spec", file}, more...)...).ok(t)
	id, rest, _ := strings.Cut(r.Stdout, "\n")
	if len(id) != 16 || rest != "" || r.Stderr != "" {
		t.Fatalf("up printed %q, and %q", r.Stdout, r.Stderr)
	}
	return id
}

// sessionList is what ps says.
func (s setup) sessionList(t *testing.T) (list []shim.SessionInfo) {
	t.Helper()
	var doc struct{ Sessions []shim.SessionInfo }
	if err := json.Unmarshal([]byte(s.call(t, call{}, "ps", "--json").ok(t).Stdout), &doc); err != nil {
		t.Fatal(err)
	}
	return doc.Sessions
}

// find is the session of that id, false where there is none.
func (s setup) find(t *testing.T, id string) (shim.SessionInfo, bool) {
	t.Helper()
	list := s.sessionList(t)
	i := slices.IndexFunc(list, func(x shim.SessionInfo) bool { return x.ID == id })
	if i < 0 {
		return shim.SessionInfo{}, false
	}
	return list[i], true
}

// sessionRecord is a session's record in its state folder.
func sessionRecord(t *testing.T, state, id string) shim.Record {
	t.Helper()
	return readRecord(t, filepath.Join(state, "agentshim/runs", id, "record.json"))
}
