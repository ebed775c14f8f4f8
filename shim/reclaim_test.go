package shim

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

func testStore(t *testing.T) Store {
	t.Helper()
	f := folders{state: t.TempDir(), runtime: t.TempDir()}
	return Store{folders: f, getenv: func(string) string { return "" }, runner: script(t)}
}

func mustSelf(t *testing.T) Owner {
	t.Helper()
	o, err := self()
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// TestOwnerAlive: a pid that is used again is not the owner.
func TestOwnerAlive(t *testing.T) {
	own := mustSelf(t)
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(*Owner)
		want   bool
	}{
		"this process":         {func(*Owner) {}, true},
		"the number, later":    {func(o *Owner) { o.StartTicks++ }, false},
		"another boot":         {func(o *Owner) { o.BootID = "0" }, false},
		"a process that ended": {func(o *Owner) { o.PID = dead.Process.Pid }, false},
	} {
		t.Run(name, func(t *testing.T) {
			o := own
			c.change(&o)
			if o.alive() != c.want {
				t.Errorf("%+v", o)
			}
		})
	}
}

func TestRuns(t *testing.T) {
	s := testStore(t)
	gone := mustSelf(t)
	gone.StartTicks++
	now := time.Now().UTC()
	for _, r := range []Record{
		{ID: "00000000000000aa", Owner: mustSelf(t), Start: now.Add(2 * time.Second)},
		{ID: "00000000000000bb", Owner: gone, Start: now.Add(time.Second)},
		{ID: "00000000000000cc", Owner: gone, Start: now, End: now},
	} {
		r.Version = RecordVersion
		if err := r.write(s.folders); err != nil {
			t.Fatal(err)
		}
	}
	runs, err := s.Runs()
	if err != nil || len(runs) != 3 {
		t.Fatalf("%v %v", runs, err)
	}
	for i, want := range []RunState{RunEnded, RunLost, RunRunning} {
		if runs[i].State != want {
			t.Errorf("%s: %s, want %s", runs[i].ID, runs[i].State, want)
		}
	}
}

// TestBrokenRecords are named; the others are listed all the same.
func TestBrokenRecords(t *testing.T) {
	s := testStore(t)
	ok := Record{Version: RecordVersion, ID: "00000000000000aa", Owner: mustSelf(t)}
	if err := ok.write(s.folders); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(s.folders.record("00000000000000ee"), 0o700); err != nil {
		t.Fatal(err)
	}
	if runs, err := s.Runs(); len(runs) != 1 || err != nil {
		t.Errorf("with a folder that has no record: %v %v", runs, err)
	}
	for id, text := range map[string]string{
		"00000000000000bb": "{", "00000000000000cc": `{"version":99,"id":"00000000000000cc"}`, "00000000000000dd": `{"version":1,"id":"x"}`,
	} {
		dir := s.folders.record(id)
		if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "record.json"), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Run(id); !errors.Is(err, ReasonState) || HintOf(err) == "" {
			t.Errorf("%s: %v", id, err)
		}
	}
	runs, err := s.Runs()
	if len(runs) != 1 || err == nil {
		t.Errorf("%v %v", runs, err)
	}
	for _, id := range []string{"", "..", "../../etc", "00000000000000AA", "00000000000000ab"} {
		if _, err := s.Run(id); !errors.Is(err, ErrNoRun) {
			t.Errorf("%q: %v", id, err)
		}
	}
}

// TestRunFolders: a folder always has its claim; only those of a process that is
// gone are removed.
func TestRunFolders(t *testing.T) {
	s := testStore(t)
	gone := mustSelf(t)
	gone.StartTicks++
	mine, err := s.folders.makeRunFolder("00000000000000aa", claim{Owner: mustSelf(t)})
	if err != nil {
		t.Fatal(err)
	}
	lost, err := s.folders.makeRunFolder("00000000000000bb", claim{Owner: gone})
	if err != nil {
		t.Fatal(err)
	}
	foreign, old := filepath.Join(s.folders.runtime, "something"), filepath.Join(s.folders.runtime, ".new-1")
	past := time.Now().Add(-2 * time.Hour)
	if err := errors.Join(os.Mkdir(foreign, 0o700), os.Mkdir(old, 0o700), os.Chtimes(old, past, past)); err != nil {
		t.Fatal(err)
	}
	left, err := s.Prune(t.Context(), true)
	if err != nil || len(left) != 1 || left[0].Run != filepath.Base(lost) {
		t.Fatalf("%+v %v", left, err)
	}
	if err := s.pruneQuickly(t.Context()); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]bool{mine: true, foreign: true, lost: false, old: false} {
		if _, err := os.Stat(dir); (err == nil) != want {
			t.Errorf("%s: %v", dir, err)
		}
	}
	if _, err := s.folders.makeRunFolder("00000000000000aa", claim{Owner: gone}); err == nil {
		t.Error("a run's folder is taken over")
	}
}
