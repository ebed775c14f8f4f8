package integration

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/shim"
)

// egressOf is the egress section that learning and suggesting write.
func egressOf(t *testing.T, b []byte) map[string]any {
	t.Helper()
	var file struct{ Egress map[string]any }
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	return file.Egress
}

// TestLearnEgress: the list that a run in mode open leaves permits what that run used and
// nothing else; what a run was refused is suggested, and then permitted.
func TestLearnEgress(t *testing.T) {
	w := outside(t)
	w.settle()
	used := attempts{
		{"tls", "api.allowed.example:443", "api.allowed.example", "x"},
		{"tcp", "db.allowed.example:5432", "x"},
		{"http", "api.allowed.example:80", get("api.allowed.example")},
		{"tls", "one.wild.example:443", "one.wild.example", "x"},
		{"tls", "dot.wild.example:443", "dot.wild.example", "x"},
	}
	other := attempts{
		{"tls", "ssh.allowed.example:443", "ssh.allowed.example", "x"},
		{"tcp", at(publicAddr, echoPort), "x"},
		{"tcp", "api.allowed.example:5432", "x"},
		{"tcp", "permitted.private.example:9007", "x"}, // allowed below, but not where it leads
	}
	hidden := []string{"tls", "ech.allowed.example:443", "hidden.example", "x", "ech.allowed.example"}
	each(t, func(t *testing.T, s setup) {
		file, list := s.write(t, reachFields(t, nil, nil)), filepath.Join(s.private(t), "learned.json")
		ops := append(append(attempts{}, used...), hidden)
		r := s.call(t, call{Net: w}, "exec", "--learn-egress", list, "--learn-wildcards", "--spec", file, "--", ops.json(t))
		got := endings(t, r, ops)
		for _, op := range used {
			if out := got.of(op...); !strings.HasPrefix(out, "ok: ") {
				t.Errorf("learning: %q: %s", op, out)
			}
		}
		if out := got.of(hidden...); out != "reset" {
			t.Errorf("learning: a hidden server name: %s", out)
		}
		if !strings.Contains(r.Stderr, "5 allow entries for what was used are in ") {
			t.Errorf("stderr: %s", r.Stderr)
		}
		b, err := os.ReadFile(list)
		if err != nil {
			t.Fatal(err)
		}
		learned := egressOf(t, b)
		want := map[string]any{"mode": "allow-list", "allow": []any{
			"*.wild.example", "api.allowed.example", "api.allowed.example:80", "db.allowed.example:5432",
			map[string]any{"host": "ech.allowed.example", "ech": true},
		}}
		sortEntries(want)
		sortEntries(learned)
		if diff := cmp.Diff(want, learned); diff != "" {
			t.Error(diff)
		}
		learned["allow"] = append(learned["allow"].([]any), "permitted.private.example:9007")
		ops = append(ops, other...)
		state := s.private(t)
		r = s.call(t, call{Net: w, State: state}, "exec", "--spec", s.write(t, reachFields(t, learned, nil)), "--", ops.json(t))
		got = endings(t, r, ops)
		for _, op := range append(append(attempts{}, used...), hidden) {
			if out := got.of(op...); !strings.HasPrefix(out, "ok: ") {
				t.Errorf("with what was learned: %q: %s", op, out)
			}
		}
		for _, op := range other {
			if out := got.of(op...); strings.HasPrefix(out, "ok: ") {
				t.Errorf("with what was learned: %q, which was not used: %s", op, out)
			}
		}
		s.suggests(t, w, state, learned, other)
	})
}

// suggests takes what a run was refused, and runs with it.
func (s setup) suggests(t *testing.T, w *world, state string, egress map[string]any, ops attempts) {
	t.Helper()
	id := record(t, state).ID
	suggest := func() result { return s.call(t, call{State: state}, "egress", "suggest", id) }
	more := egressOf(t, []byte(suggest().ok(t).Stdout))
	if n := len(more["allow"].([]any)); n != len(ops) {
		t.Errorf("%d entries for %d refusals: %v", n, len(ops), more)
	}
	egress["allow"] = append(egress["allow"].([]any), more["allow"].([]any)...)
	got, _ := s.reach(t, w, egress, ops)
	for _, op := range ops {
		if out := got.of(op...); !strings.HasPrefix(out, "ok: ") {
			t.Errorf("with what was suggested: %q: %s", op, out)
		}
	}
	log := filepath.Join(state, "agentshim/runs", id, "egress.jsonl")
	b, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(log, bytes.Replace(b, []byte("ssh.allowed.example"), []byte("ssh.evil123.example"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	suggest().refused(t, shim.ReasonState)
}

// sortEntries puts a section's allow entries into one order.
func sortEntries(egress map[string]any) {
	list := egress["allow"].([]any)
	text := func(e any) string {
		b, _ := json.Marshal(e) // what was parsed marshals
		return string(b)
	}
	slices.SortFunc(list, func(a, b any) int { return strings.Compare(text(a), text(b)) })
}
