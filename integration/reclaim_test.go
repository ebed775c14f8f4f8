package integration

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentshim/agentshim/shim"
)

// ran runs once and returns the run's id.
func (s setup) ran(t *testing.T, state string) string {
	t.Helper()
	before := ids(t, state)
	s.call(t, call{State: state}, "exec", "--spec", s.write(t, nil), "--", "true").ok(t)
	for run := range ids(t, state) {
		if !before[run] {
			return run
		}
	}
	t.Fatal("no record")
	return ""
}

// lose makes of a run what a power cut would leave: a container that was not
// removed, a record without an end, and the run's folder.
func (s setup) lose(t *testing.T, state, id, entrypoint string) {
	t.Helper()
	path := filepath.Join(state, "agentshim/runs", id, "record.json")
	rec := readRecord(t, path)
	rec.End, rec.Harness = time.Time{}, nil
	rec.Owner.StartTicks++ // a process of this number, but another one
	writeJSON(t, path, rec)
	uid, gid := s.ids(t)
	dir := filepath.Join("/tmp/agentshim-"+strconv.Itoa(uid), id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	writeJSON(t, filepath.Join(dir, "owner.json"), map[string]any{"owner": rec.Owner, "state": filepath.Join(state, "agentshim")})
	if err := errors.Join(os.Chown(dir, uid, gid), os.Chown(filepath.Join(dir, "owner.json"), uid, gid), os.Chown(path, uid, gid)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	name := "agentshim-" + id
	s.bare(t, "create", "--name="+name, "--label=agentshim.run="+id, "--network=none", "--entrypoint="+entrypoint, "agentshim/hello:test", "wire/1").ok(t)
	t.Cleanup(func() { s.bare(t, "rm", "--force", name) })
}

func ids(t *testing.T, state string) map[string]bool {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(state, "agentshim/runs/*"))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]bool{}
	for _, d := range dirs {
		out[filepath.Base(d)] = true
	}
	return out
}

func writeJSON(t *testing.T, path string, v any) {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// exists reports whether the run's container is there.
func (s setup) exists(t *testing.T, id string) bool {
	t.Helper()
	return s.bare(t, "inspect", "--type=container", "agentshim-"+id).Code == 0
}

// TestPrune: A50, P06. What lost runs of this user left goes, and nothing else.
func TestPrune(t *testing.T) {
	inTurn(t, func(t *testing.T, s setup) {
		state := s.private(t)
		id, stranger := s.ran(t, state), s.ran(t, state)
		s.lose(t, state, id, "/.agentshim-init")
		s.lose(t, state, stranger, "/bin/true")
		setUp := id + "-cache-1"
		s.bare(t, "create", "--name=agentshim-"+setUp, "--label=agentshim.run="+id, "--network=none", "--entrypoint=/.agentshim-init", "agentshim/hello:test",
			"cache/1", "/.agentshim-cache", "1000", "1000").ok(t)
		t.Cleanup(func() { s.bare(t, "rm", "--force", "agentshim-"+setUp) })
		runtime := filepath.Join("/tmp/agentshim-"+strconv.Itoa(callerUID(t, s)), id)

		runs := s.call(t, call{State: state}, "runs").ok(t).Stdout
		if strings.Count(runs, " lost ") != 2 {
			t.Errorf("runs:\n%s", runs)
		}
		dry := s.call(t, call{State: state}, "prune", "--dry-run").ok(t).Stdout
		if !strings.Contains(dry, "run "+id+": would remove "+s.engine+" container") || !s.exists(t, id) {
			t.Errorf("dry run:\n%s", dry)
		}
		out := s.call(t, call{State: state}, "prune").ok(t).Stdout
		if !strings.Contains(out, "run "+id+": removed "+s.engine+" container") || s.exists(t, id) || s.exists(t, setUp) {
			t.Errorf("prune:\n%s", out)
		}
		if !strings.Contains(out, "run "+stranger+": kept ") || !s.exists(t, stranger) {
			t.Errorf("a label alone proves something:\n%s", out)
		}
		if _, err := os.Stat(runtime); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", runtime, err)
		}
		rec := readRecord(t, filepath.Join(state, "agentshim/runs", id, "record.json"))
		if rec.Reason != shim.ReasonInitLost || rec.End.IsZero() || rec.Exit != shim.ExitRefused {
			t.Errorf("%s", mustJSON(t, rec))
		}
	})
}

// TestRunReclaims: a run does the same at its end, for runs with another state
// folder of this user's too, and leaves running ones alone.
func TestRunReclaims(t *testing.T) {
	inTurn(t, func(t *testing.T, s setup) {
		state, dir := s.private(t), s.folder(t)
		lost := s.private(t)
		id := s.ran(t, lost)
		s.lose(t, lost, id, "/.agentshim-init")
		file := s.write(t, spec{"workspace": map[string]any{"source": dir, "mode": "writable"}})
		cmd, cancel := s.command(t, call{State: state}, agentshim, "exec", "--spec", file, "--", "touch started; while ! test -e stop; do sleep 0.05; done; exit 3")
		defer cancel()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the first run starts", func() bool {
			_, err := os.Stat(filepath.Join(dir, "started"))
			return err == nil
		})
		s.sh(t, nil, "true").ok(t)
		if s.exists(t, id) {
			t.Error("the lost run's container is still there")
		}
		if err := os.WriteFile(filepath.Join(dir, "stop"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != 3 {
			t.Errorf("the running run ended with %v", cmd.ProcessState)
		}
	})
}
