package shim

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/spec"
)

// keptRun is an ended run's record in a store, with a repository of the agent's.
func keptRun(t *testing.T, f *gitFixture) (s Store, rec Record, p gitPrivate) {
	t.Helper()
	s = testStore(t)
	s.getenv, s.runner = func(name string) string { return map[string]string{"PATH": filepath.Dir(f.prog.Path)}[name] }, Exec{}
	rec = Record{Version: RecordVersion, ID: "0123456789abcdef", Git: &GitRecord{Mode: mounts.GitPrivate}}
	rec.End = rec.End.AddDate(2000, 0, 0)
	must(t, rec.write(s.folders))
	h, err := findGit(f.work, nil)
	must(t, err)
	dir := filepath.Join(s.folders.record(rec.ID), mounts.GitOwn)
	p, err = f.prog.newPrivate(context.Background(), h, gitOptions{Dir: dir, ObjectsTarget: dir + "/base/objects"})
	must(t, err)
	must(t, keepPrivate(p))
	return s, rec, p
}

func TestGitRecordTake(t *testing.T) {
	f := newGitFixture(t)
	s, rec, p := keptRun(t, f)
	f.agent(p, "checkout", "-q", "-b", "a/b")
	idea := f.agentCommits(p)
	f.agent(p, "checkout", "-q", "main")
	f.agent(p, "commit", "-q", "--allow-empty", "-m", "main")
	main := f.agent(p, "rev-parse", "HEAD")
	must(t, os.Chmod(filepath.Join(p.Private(), "info"), 0)) // as an agent may leave it

	got, err := s.TakeGit(t.Context(), rec.ID, "")
	must(t, err)
	want := GitRecord{
		Mode: mounts.GitPrivate, Left: []string{"a/b"}, Kept: p.Dir,
		Taken: []GitTaken{{Ref: "refs/agentshim/" + rec.ID, Commit: main, Commits: 1, Branch: "main"}},
	}
	if diff := cmp.Diff(want, *got.Git); diff != "" {
		t.Error(diff)
	}
	if _, err := s.TakeGit(t.Context(), rec.ID, "none"); ReasonOf(err) != ReasonGit {
		t.Errorf("no such branch: %v", err)
	}
	for _, bad := range []string{"../x", "-x", "x..y"} {
		if _, err := s.TakeGit(t.Context(), rec.ID, bad); !errors.Is(err, gitMalformed) {
			t.Errorf("branch %q: %v", bad, err)
		}
	}
	got, err = s.TakeGit(t.Context(), rec.ID, "a/b")
	must(t, err)
	want.Left, want.Kept = nil, ""
	want.Taken = append(want.Taken, GitTaken{Ref: "refs/agentshim/" + rec.ID + "-a-b", Commit: idea, Commits: 1, Branch: "a/b"})
	if diff := cmp.Diff(want.Taken, got.Git.Taken); diff != "" || len(got.Git.Left) > 0 || got.Git.Kept != "" || got.Git.Error != "" {
		t.Errorf("%+v %s", got.Git, diff)
	}
	if _, err := os.Lstat(p.Dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v", p.Dir, err)
	}
	if _, err := s.TakeGit(t.Context(), rec.ID, ""); !errors.Is(err, ErrNothingKept) {
		t.Errorf("nothing kept: %v", err)
	}
}

// What can't be taken stays, and a repository that no agent ever had does not.
func TestGitRecordKeeps(t *testing.T) {
	f := newGitFixture(t)
	s, rec, p := keptRun(t, f)
	f.agentCommits(p)
	objects := filepath.Join(p.Private(), "objects")
	must(t, os.Rename(objects, objects+".away"))
	got, err := s.TakeGit(t.Context(), rec.ID, "")
	if ReasonOf(err) != ReasonGit || got.Git.Kept != p.Dir || got.Git.Error == "" || HintOf(err) == "" {
		t.Errorf("%v %+v", err, got.Git)
	}
	must(t, os.Rename(objects+".away", objects))
	running := rec
	running.Owner, running.End = mustSelf(t), running.Start
	must(t, running.write(s.folders))
	if _, err := s.TakeGit(t.Context(), rec.ID, ""); ReasonOf(err) != ReasonState {
		t.Errorf("a running run: %v", err)
	}
	left, err := s.reclaimGit(t.Context(), &rec)
	if err != nil || len(left) != 1 || left[0].Ref != "refs/agentshim/"+rec.ID {
		t.Errorf("%v %v", left, err)
	}
	must(t, os.MkdirAll(filepath.Join(p.Dir, "base"), 0o700))
	if left, err := s.reclaimGit(t.Context(), &rec); err != nil || left != nil {
		t.Errorf("%v %v", left, err)
	}
	if _, err := os.Lstat(p.Dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v", p.Dir, err)
	}
}

// A git that an agent could have put on PATH is not run.
func TestGitProgramOfAnAgent(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	ws, own := filepath.Join(dir, "ws"), filepath.Join(dir, "own")
	for _, d := range []string{ws, own} {
		must(t, os.Mkdir(d, 0o755))
		must(t, os.WriteFile(filepath.Join(d, "git"), []byte("#!/bin/sh\n"), 0o755))
	}
	linked := filepath.Join(dir, "linked")
	must(t, os.Mkdir(linked, 0o755))
	must(t, os.Symlink(filepath.Join(ws, "git"), filepath.Join(linked, "git")))
	path := func(string) string { return ws + ":" + linked + ":" + own }
	if prog, ok := findGitProgram(path, Exec{}, []string{ws}); !ok || prog.Path != filepath.Join(own, "git") {
		t.Errorf("%v %v", prog.Path, ok)
	}
	if prog, _ := findGitProgram(path, Exec{}, nil); prog.Path != filepath.Join(ws, "git") {
		t.Errorf("control: %v", prog.Path)
	}
}

func TestFindModules(t *testing.T) {
	f := newGitFixture(t)
	git := filepath.Join(f.work, ".git")
	for _, name := range []string{"modules/a", "modules/b/c", "modules/a/modules/d"} {
		f.put(filepath.Join(git, name, "HEAD"), "")
	}
	must(t, os.Symlink(git, filepath.Join(git, "modules/link")))
	got, err := findModules(git, "modules")
	slices.Sort(got)
	if diff := cmp.Diff([]string{"modules/a", "modules/a/modules/d", "modules/b/c"}, got); err != nil || diff != "" {
		t.Errorf("%v %s", err, diff)
	}
	if got, err := findModules(f.work, "modules"); err != nil || got != nil {
		t.Errorf("none: %v %v", got, err)
	}
	for i := range maxModules + 1 {
		f.put(filepath.Join(git, "modules", "m"+string(rune('a'+i/26))+string(rune('a'+i%26)), "HEAD"), "")
	}
	if _, err := findModules(git, "modules"); !errors.Is(err, gitTooLarge) {
		t.Errorf("too many: %v", err)
	}
	must(t, os.RemoveAll(filepath.Join(git, "modules")))
}

// core.hooksPath below the workspace is guarded, there or not.
func TestHooksPathIsGuarded(t *testing.T) {
	f := newGitFixture(t)
	f.host("config", "core.hooksPath", "tools/hooks")
	p := guardedJob(t)
	p.job.Harness.Dir, p.job.SpecPath = f.work, ""
	p.job.Harness.Workspace = &harness.Workspace{Source: f.work, Mode: "writable"}
	p.job.LookupEnv = os.LookupEnv
	p.host.Mounts = mounts.Facts{Sources: map[string]mounts.Source{f.work: {Path: f.work, Dir: true}}}
	must(t, p.probeGit(mounts.ProbePaths{}))
	own, err := p.ownPaths()
	must(t, err)
	if len(own) != 1 || own[0].Path != filepath.Join(f.work, "tools/hooks") {
		t.Errorf("%+v", own)
	}
	f.host("config", "--unset", "core.hooksPath")
}

// TestGitTakeInterrupted: a signal ends the taking of commits that takes long, and they
// are kept; that the terminal is gone, or a signal from before, does not.
func TestGitTakeInterrupted(t *testing.T) {
	f := newGitFixture(t)
	s, rec, private := keptRun(t, f)
	f.agentCommits(private)
	slow := t.TempDir()
	must(t, os.WriteFile(slow+"/git", []byte("#!/bin/sh\necho >>"+slow+"/called; exec sleep 60\n"), 0o755))
	job := Job{LookupEnv: func(string) (string, bool) { return slow, true }}.withDefaults()
	cancelled := false
	p := &prepared{job: job, phases: newPhases(), control: newControl(job, func(error) { cancelled = true })}
	p.plan.Git = &spec.Git{Mode: mounts.GitPrivate}
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	go func() { ended <- p.takeGit(ctx, &rec, spec.RunPaths{State: s.folders.record(rec.ID)}, true) }()
	for _, err := os.Lstat(slow + "/called"); err != nil; _, err = os.Lstat(slow + "/called") {
		time.Sleep(time.Millisecond)
	}
	p.control.take(unix.SIGHUP)
	select {
	case err := <-ended:
		t.Fatal(err)
	case <-time.After(200 * time.Millisecond):
	}
	p.control.take(unix.SIGTERM)
	err := <-ended
	if !errors.Is(err, SignalError{unix.SIGTERM}) || ReasonOf(err) != ReasonGit || rec.Git.Kept != private.Dir || !strings.Contains(HintOf(err), "agentshim take "+rec.ID) {
		t.Errorf("%v; %+v", err, rec.Git)
	}
	if p.control.take(unix.SIGTERM); !cancelled {
		t.Error("a signal has no effect afterwards")
	}
	must(t, rec.write(s.folders))
	got, err := s.TakeGit(t.Context(), rec.ID, "")
	if err != nil || len(got.Git.Taken) != 1 {
		t.Errorf("%v; %+v", err, got.Git)
	}
}
