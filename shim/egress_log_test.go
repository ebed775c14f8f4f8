package shim

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/netpolicy"
)

func mustWriteRecord(t *testing.T, s Store, r Record) {
	t.Helper()
	r.Version = RecordVersion
	if err := r.write(s.folders); err != nil {
		t.Fatal(err)
	}
}

// TestEgressLog: a run's log stands beside its record, which has its head.
func TestEgressLog(t *testing.T) {
	s := testStore(t)
	const id = "00000000000000aa"
	rec := Record{ID: id, Owner: mustSelf(t), Egress: &EgressRecord{Mode: netpolicy.AllowList}}
	mustWriteRecord(t, s, rec)
	_, run, err := s.EgressLog(id)
	if !errors.Is(err, ErrNoEgressLog) || run.State != RunRunning || HintOf(err) == "" {
		t.Errorf("%+v, %v", run, err)
	}
	l, err := netpolicy.CreateLog(s.folders.egressLog(id), id, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	head, err := l.Close()
	if err != nil {
		t.Fatal(err)
	}
	rec.End, rec.Egress.Log = time.Now().UTC(), &head
	mustWriteRecord(t, s, rec)
	path, run, err := s.EgressLog(id)
	if err != nil || path != s.folders.egressLog(id) {
		t.Fatalf("%q, %v", path, err)
	}
	if diff := cmp.Diff(rec.Egress, run.Egress); diff != "" {
		t.Error(diff)
	}
	beside, err := RecordBeside(path)
	if diff := cmp.Diff(rec.Egress, beside.Egress); diff != "" || err != nil {
		t.Error(diff, err)
	}
	for _, id := range []string{"00000000000000bb", "../00000000000000aa", ""} {
		if _, _, err := s.EgressLog(id); !errors.Is(err, ErrNoRun) {
			t.Errorf("%q: %v", id, err)
		}
	}
}

func TestRecordBeside(t *testing.T) {
	dir := t.TempDir()
	log := filepath.Join(dir, "egress.jsonl")
	if _, err := RecordBeside(log); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	for _, text := range []string{"{", `{"version":99}`} {
		if err := os.WriteFile(filepath.Join(dir, "record.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := RecordBeside(log); err == nil || errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// TestPruneKeepsLog: A50: what a killed agentshim's run reached can be read after its
// leftovers are gone; its record still has no head, since none was ever known.
func TestPruneKeepsLog(t *testing.T) {
	s := testStore(t)
	gone := mustSelf(t)
	gone.StartTicks++
	const id = "00000000000000aa"
	mustWriteRecord(t, s, Record{ID: id, Owner: gone, Egress: &EgressRecord{Mode: netpolicy.AllowList}})
	if _, err := netpolicy.CreateLog(s.folders.egressLog(id), id, time.Now); err != nil {
		t.Fatal(err)
	}
	if _, err := s.folders.makeRunFolder(id, claim{Owner: gone}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prune(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	path, run, err := s.EgressLog(id)
	if err != nil || run.State != RunEnded || run.Egress.Log != nil {
		t.Fatalf("%+v, %v", run, err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := netpolicy.VerifyLog(f, id); !errors.Is(err, netpolicy.ErrLogOpen) {
		t.Error(err)
	}
}
