package integration

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// readRecord reads what --result wrote; only the caller may read it.
func readRecord(t *testing.T, path string) shim.Record {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o600 {
		t.Errorf("%s has mode %v", path, info.Mode())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var rec shim.Record
	if err := json.Unmarshal(b, &rec); err != nil {
		t.Fatalf("%s: %v\n%s", path, err, b)
	}
	return rec
}

var (
	digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	idForm     = regexp.MustCompile(`^[0-9a-f]{16}$`)
)

// Part 9: what a run was and how it ended, in the state folder and in --result.
func TestRecord(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		state := s.private(t)
		result := filepath.Join(s.private(t), "result.json")
		dir := s.folder(t)
		file := s.write(t, spec{"name": "a-name", "workspace": map[string]any{"source": dir, "mode": "writable"}})
		before := time.Now()
		r := s.call(t, call{State: state}, "exec", "--spec", file, "--result", result, "--", "sleep 0.2; exit 9")
		wall := time.Since(before)
		if r.Code != 9 {
			t.Fatalf("%+v", r)
		}
		rec := record(t, state)
		files, _ := filepath.Glob(filepath.Join(state, "agentshim/runs/*/record.json"))
		stored := readRecord(t, files[0])
		if a, b := mustJSON(t, stored), mustJSON(t, readRecord(t, result)); a != b {
			t.Errorf("--result differs from the record:\n%s\n%s", a, b)
		}
		for name, ok := range map[string]bool{
			"version": rec.Version == shim.RecordVersion, "id": idForm.MatchString(rec.ID) && filepath.Base(filepath.Dir(files[0])) == rec.ID,
			"name": rec.Name == "a-name", "agentshim": rec.Agentshim != "",
			"start and end": !rec.Start.Before(before.Add(-time.Second)) && rec.End.After(rec.Start) && rec.End.Sub(rec.Start) <= wall,
			"owner":         rec.Owner.PID > 1 && rec.Owner.StartTicks > 0 && len(rec.Owner.BootID) == 36,
			"specDigest":    rec.SpecDigest == "sha256:"+sum(mustRead(t, file)), "planDigest": digestForm.MatchString(rec.PlanDigest),
			"container": len(rec.Container) == 64,
			"exit":      rec.Exit == 9 && rec.Reason == "" && rec.Message == "" && !rec.Retry,
			"harness":   rec.Harness != nil && rec.Harness.Code == 9 && rec.Harness.Signal == 0 && rec.Harness.MaxRSSKiB > 0,
			"caller":    rec.Caller != nil && int(rec.Caller.UID) == callerUID(t, s) && rec.Caller.CPUs > 0,
			"machine":   rec.Machine != nil && rec.Machine.Kernel == kernel(t) && rec.Machine.Arch == runtime.GOARCH && rec.Machine.MemoryBytes > 0,
			"engine":    rec.Engine != nil && rec.Engine.Kind == s.engine && rec.Engine.Rootless == s.rootless() && rec.Engine.Runtime == "runc" && rec.Engine.RuntimeVersion != "",
		} {
			if !ok {
				t.Errorf("%s is wrong in %s", name, mustJSON(t, rec))
			}
		}
		version, format := "{{.Server.Version}}", "{{.ID}}"
		if s.engine == "podman" {
			version = "{{.Client.Version}}"
		}
		if got := strings.TrimSpace(s.bare(t, "version", "--format", version).ok(t).Stdout); rec.Engine.Version != got {
			t.Errorf("engine version %q, it says %q", rec.Engine.Version, got)
		}
		id := strings.TrimSpace(s.bare(t, "image", "inspect", "--format", format, "agentshim/hello:test").ok(t).Stdout)
		if rec.Image == nil || rec.Image.Ref != "agentshim/hello:test" || strings.TrimPrefix(rec.Image.ID, "sha256:") != strings.TrimPrefix(id, "sha256:") {
			t.Errorf("image %+v, want ID %s", rec.Image, id)
		}
		if a := rec.Attestation; a == nil || int(a.Hello.UIDs[0]) != 24199 && s.root() || !a.Hello.NoNewPrivs || len(a.Differences) != 0 || a.Probe == nil || a.Bundle == "" {
			t.Errorf("attestation: %s", mustJSON(t, rec.Attestation))
		}
		checkNotes(t, s, rec)
		checkPhases(t, rec, wall)
		for _, dir := range []string{"agentshim", "agentshim/runs", "agentshim/runs/" + rec.ID} {
			if info, err := os.Stat(filepath.Join(state, dir)); err != nil || info.Mode().Perm() != 0o700 {
				t.Errorf("%s: %v, %v", dir, info, err)
			}
		}
	})
}

func mustJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func mustRead(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func callerUID(t *testing.T, s setup) int {
	uid, _ := s.ids(t)
	return uid
}

func kernel(t *testing.T) string {
	t.Helper()
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		t.Fatal(err)
	}
	return unix.ByteSliceToString(uts.Release[:])
}

// checkNotes wants the widenings of the file and the gaps of the host, by name.
func checkNotes(t *testing.T, s setup, rec shim.Record) {
	t.Helper()
	var names []string
	for _, n := range rec.Widenings {
		names = append(names, n.Name)
	}
	for _, want := range []string{"writable:/workspace", "prompt-in-argv"} {
		if !slices.Contains(names, want) {
			t.Errorf("widenings %q without %s", names, want)
		}
	}
	gaps := map[string]bool{}
	for _, n := range rec.Gaps {
		gaps[n.Name] = n.Accepted
	}
	accepted, found := gaps["rootless-cgroup-limits"]
	if limits := rec.Engine.LimitsHold; found == limits || found && !accepted {
		t.Errorf("limits hold: %v, gaps: %v", limits, gaps)
	}
	if _, found := gaps["tmpfs-inodes"]; found != (s.engine == "podman") {
		t.Errorf("gaps: %v", gaps)
	}
}

// checkPhases wants every phase, in order, together no longer than the run took.
func checkPhases(t *testing.T, rec shim.Record, wall time.Duration) {
	t.Helper()
	var names []string
	var sum time.Duration
	for _, p := range rec.Phases {
		names = append(names, p.Name)
		sum += time.Duration(p.Micros) * time.Microsecond
		if p.Micros < 0 {
			t.Errorf("phase %s took %d µs", p.Name, p.Micros)
		}
		if p.Name == "harness" && p.Micros < 150_000 {
			t.Errorf("the harness slept for 200 ms, its phase took %d µs", p.Micros)
		}
	}
	if want := []string{"probe", "inputs", "plan", "prepare", "start", "prove", "launch", "harness", "end", "planted"}; !slices.Equal(names, want) {
		t.Errorf("phases %q, want %q", names, want)
	}
	if sum > wall || sum < wall/2 {
		t.Errorf("the phases took %v of %v", sum, wall)
	}
}

// Two runs are two records; equal files give equal digests, another file another.
func TestRecordPerRun(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		state := s.private(t)
		file := s.write(t, nil)
		other := s.write(t, spec{"tmpSizeMb": 100})
		for _, f := range []string{file, file, other} {
			s.call(t, call{State: state}, "exec", "--spec", f, "--", "true").ok(t)
		}
		files, err := filepath.Glob(filepath.Join(state, "agentshim/runs/*/record.json"))
		if err != nil || len(files) != 3 {
			t.Fatalf("%q, %v", files, err)
		}
		specs, plans, ids := map[string]int{}, map[string]int{}, map[string]bool{}
		for _, f := range files {
			rec := readRecord(t, f)
			specs[rec.SpecDigest]++
			plans[rec.PlanDigest]++
			ids[rec.ID], ids[rec.Container] = true, true
		}
		if len(specs) != 2 || len(plans) != 2 || len(ids) != 6 {
			t.Errorf("specs %v, plans %v, ids %v", specs, plans, ids)
		}
	})
}

// The record is there while the run is, for whoever has to clean up after it.
func TestRecordDuringRun(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		state, gate := s.private(t), s.folder(t)
		file := s.write(t, spec{"workspace": map[string]any{"source": gate, "mode": "writable"}})
		cmd, cancel := s.command(t, call{State: state}, agentshim, "exec", "--spec", file, "--", "touch started; while [ ! -e go ]; do sleep 0.1; done")
		defer cancel()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
			if _, err := os.Lstat(filepath.Join(gate, "started")); err == nil {
				break
			} else if time.Now().After(end) {
				t.Fatal(err)
			}
		}
		rec := record(t, state)
		if !rec.End.IsZero() || rec.Owner.PID != cmd.Process.Pid || rec.Engine == nil || rec.Image == nil {
			t.Errorf("%s", mustJSON(t, rec))
		}
		place(t, filepath.Join(gate, "go"), nil, 0o644)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
		if rec := record(t, state); rec.End.IsZero() || rec.Exit != 0 {
			t.Errorf("%s", mustJSON(t, rec))
		}
	})
}
