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

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/spec"
)

// copyRun is a run of mode copy without its container.
type copyRun struct {
	store    Store
	p        *prepared
	rec      Record
	ws, tree string
	notices  []string
}

// newCopyRun copies a workspace with these files.
func newCopyRun(t *testing.T, files map[string]string) *copyRun {
	t.Helper()
	r := &copyRun{store: testStore(t), ws: filepath.Join(t.TempDir(), "ws")}
	makeTree(t, r.ws, files)
	r.prepare(t)
	if err := r.p.makeCopy(context.Background(), &r.rec); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *copyRun) prepare(t *testing.T) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(r.ws, &st); err != nil {
		t.Fatal(err)
	}
	job := Job{Notice: func(format string, _ ...any) { r.notices = append(r.notices, format) }}.withDefaults()
	r.p = &prepared{job: job, folders: r.store.folders, phases: newPhases()}
	r.p.plan.Copy = &spec.Copy{
		Source: r.ws, Target: "/workspace", UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), Dev: st.Dev, Ino: st.Ino,
		Exclude: []string{".git", ".env"}, ProtectedNames: []string{".git"}, ProtectedPaths: []string{".env", ".envrc"},
	}
	r.rec = Record{Version: RecordVersion, ID: newRunID(), Owner: mustSelf(t), Start: time.Now().UTC()}
	if err := r.rec.write(r.store.folders); err != nil {
		t.Fatal(err)
	}
	r.tree = filepath.Join(r.dir(), copyFolder, copyTree)
}

func (r *copyRun) dir() string { return r.store.folders.record(r.rec.ID) }

// end ends the run, the agent having had its copy.
func (r *copyRun) end(t *testing.T) {
	t.Helper()
	r.p.launched = true
	r.rec.End = time.Now().UTC()
	if err := errors.Join(r.p.keepCopy(&r.rec), r.rec.write(r.store.folders)); err != nil {
		t.Fatal(err)
	}
}

// edit changes the record as it stands in the store.
func (r *copyRun) edit(t *testing.T, change func(*Record)) {
	t.Helper()
	change(&r.rec)
	if err := r.rec.write(r.store.folders); err != nil {
		t.Fatal(err)
	}
}

func (r *copyRun) open(t *testing.T) (*RunCopy, Changes) {
	t.Helper()
	c, err := r.store.OpenCopy(r.rec.ID, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	changes, err := c.Changes(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return c, changes
}

// left are the names in the run's folder beside its record.
func (r *copyRun) left(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(r.dir())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if e.Name() != "record.json" {
			names = append(names, e.Name())
		}
	}
	return names
}

func TestCopyOfARun(t *testing.T) {
	r := newCopyRun(t, map[string]string{"a": "1\n", "b": "2\n", ".git/config": "x", ".env": "secret"})
	if got := readTree(t, r.tree); len(got) != 2 {
		t.Fatalf("copied %v", got)
	}
	before := readTree(t, r.ws)
	makeTree(t, r.tree, map[string]string{"a": "one\n", "c/d": "new\n", ".git/config": "evil", ".git/x": "evil", ".envrc": "evil", ".env": "mine", "up": "-> /etc/passwd"})
	mustAll(t, os.Remove(filepath.Join(r.tree, "b")))
	r.end(t)
	if diff := readTree(t, r.ws); len(diff) != len(before) || diff["a"] != before["a"] {
		t.Fatalf("the workspace changed: %v", diff)
	}
	c, changes := r.open(t)
	want := map[string]string{
		".env": "added refused", ".envrc": "added refused", ".git": "added refused", "a": "modified apply",
		"b": "deleted apply", "c": "added apply", "c/d": "added apply", "up": "added refused",
	}
	got := map[string]string{}
	for _, ch := range changes.List {
		got[ch.Path] = string(ch.Kind) + " " + string(ch.Verdict)
	}
	for p, w := range want {
		if got[p] != w {
			t.Errorf("%s: %q, want %q", p, got[p], w)
		}
	}
	if len(got) != len(want) {
		t.Errorf("changes %v", got)
	}
	done, err := c.Apply(context.Background(), changes, false)
	if err != nil || len(done.Written) != 3 || len(done.Deleted) != 1 {
		t.Fatalf("%+v %v", done, err)
	}
	after := readTree(t, r.ws)
	if !strings.Contains(after["a"], "one") || after[".env"] != before[".env"] || after[".git/config"] != before[".git/config"] || after["up"] != "" || after[".envrc"] != "" {
		t.Errorf("applied: %v", after)
	}
	run, err := r.store.Run(r.rec.ID)
	if err != nil || len(run.Copy.Applied) != 1 || run.Copy.Applied[0].Written != 3 || run.Copy.Applied[0].Skipped != 4 || !run.Copy.Synced {
		t.Errorf("record %+v %v", run.Copy, err)
	}
}

// With a conflict nothing is applied, unless the others are asked for.
func TestCopyConflict(t *testing.T) {
	r := newCopyRun(t, map[string]string{"a": "1", "b": "2"})
	makeTree(t, r.tree, map[string]string{"a": "agent's", "b": "agent's"})
	makeTree(t, r.ws, map[string]string{"a": "host's"})
	r.end(t)
	c, changes := r.open(t)
	if done, err := c.Apply(context.Background(), changes, false); !errors.Is(err, ErrBlocked) || len(done.Written) > 0 {
		t.Errorf("%+v %v", done, err)
	}
	if got := fileText(t, filepath.Join(r.ws, "b")); got != "2" {
		t.Errorf("b is %q", got)
	}
	if done, err := c.Apply(context.Background(), changes, true); err != nil || !slices.Equal(done.Written, []string{"b"}) {
		t.Errorf("partly: %+v %v", done, err)
	}
	if got := fileText(t, filepath.Join(r.ws, "a")); got != "host's" {
		t.Errorf("a is %q", got)
	}
}

func fileText(t *testing.T, p string) string {
	t.Helper()
	b, err := os.ReadFile(p)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestOpenCopyRefuses(t *testing.T) {
	gone := mustSelf(t)
	gone.BootID = "another"
	for _, tt := range []struct {
		name   string
		change func(t *testing.T, r *copyRun)
		want   error
		// reading says that a reader is refused, too.
		reading bool
	}{
		{"nothing", func(*testing.T, *copyRun) {}, nil, false},
		{"no copy", func(t *testing.T, r *copyRun) { r.edit(t, func(rec *Record) { rec.Copy = nil }) }, ErrNoCopy, true},
		{"running", func(t *testing.T, r *copyRun) { r.edit(t, func(rec *Record) { rec.End = time.Time{} }) }, ErrRunning, false},
		{"lost", func(t *testing.T, r *copyRun) {
			r.edit(t, func(rec *Record) { rec.End, rec.Owner.StartTicks, rec.Copy.Synced = time.Time{}, 1, false })
		}, nil, false},
		{"lost with the machine", func(t *testing.T, r *copyRun) {
			r.edit(t, func(rec *Record) { rec.End, rec.Owner, rec.Copy.Synced = time.Time{}, gone, false })
		}, ErrCopyCut, false},
		{"ended before the machine did", func(t *testing.T, r *copyRun) {
			r.edit(t, func(rec *Record) { rec.Owner, rec.Copy.Dev = gone, 1 })
		}, nil, false},
		{"another folder", func(t *testing.T, r *copyRun) {
			mustAll(t, os.Rename(r.ws, r.ws+".old"), os.Mkdir(r.ws, 0o755))
		}, mounts.ErrExchanged, true},
		{"no folder", func(t *testing.T, r *copyRun) { mustAll(t, os.Rename(r.ws, r.ws+".old")) }, mounts.ErrExchanged, true},
		{"a link to the folder", func(t *testing.T, r *copyRun) {
			mustAll(t, os.Rename(r.ws, r.ws+".old"), os.Symlink(r.ws+".old", r.ws))
		}, mounts.ErrExchanged, true},
		{"a base that was changed", func(t *testing.T, r *copyRun) {
			mustAll(t, os.WriteFile(filepath.Join(r.dir(), copyFolder, copyBase), []byte("agentshim base 1\n"), 0o600))
		}, ErrBase, true},
		{"a tree that is a link", func(t *testing.T, r *copyRun) {
			mustAll(t, os.Rename(r.tree, r.tree+".old"), os.Symlink("/", r.tree))
		}, unix.ENOTDIR, true},
		{"discarded", func(t *testing.T, r *copyRun) {
			if _, err := r.store.Discard(r.rec.ID); err != nil {
				t.Fatal(err)
			}
		}, ErrNoCopy, true},
		{"in use", func(t *testing.T, r *copyRun) { r.open(t) }, ReasonState, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newCopyRun(t, map[string]string{"a": "1"})
			r.end(t)
			tt.change(t, r)
			for _, change := range []bool{true, false} {
				c, err := r.store.OpenCopy(r.rec.ID, change)
				want := tt.want
				if !change && !tt.reading {
					want = nil
				}
				if !errors.Is(err, want) || want == nil && err != nil {
					t.Errorf("to change %v: %v, want %v", change, err, want)
				}
				if err == nil {
					c.Close()
				}
			}
		})
	}
}

// A copy that fails or is given up leaves nothing, and no container starts.
func TestMakeCopyFails(t *testing.T) {
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	for _, tt := range []struct {
		name   string
		ctx    context.Context
		change func(t *testing.T, r *copyRun)
		want   error
	}{
		{"nothing", context.Background(), func(*testing.T, *copyRun) {}, nil},
		{"given up", cancelled, func(*testing.T, *copyRun) {}, context.Canceled},
		{"another folder", context.Background(), func(t *testing.T, r *copyRun) {
			mustAll(t, os.Rename(r.ws, r.ws+".old"), os.Mkdir(r.ws, 0o755))
		}, mounts.ErrExchanged},
		{"a mount point that is not copied", context.Background(), func(_ *testing.T, r *copyRun) {
			r.p.plan.Mounts = []mounts.Mount{{Target: "/workspace/.env"}}
		}, ReasonMount},
		{"a mount point that is", context.Background(), func(_ *testing.T, r *copyRun) {
			r.p.plan.Mounts = []mounts.Mount{{Target: "/workspace"}, {Target: "/workspace/sub"}, {Target: "/workspaces"}}
		}, nil},
		{"a folder that the agent may not read", context.Background(), func(t *testing.T, r *copyRun) {
			mustAll(t, os.Chmod(r.ws, 0o700))
			r.p.plan.Copy.UID, r.p.plan.Copy.GID, r.p.plan.Copy.Chown = 24199, 24199, true
		}, unix.EACCES},
		{"into itself", context.Background(), func(_ *testing.T, r *copyRun) {
			var st unix.Stat_t
			mustAll(t, unix.Lstat(r.store.folders.state, &st))
			r.p.plan.Copy.Source, r.p.plan.Copy.Dev, r.p.plan.Copy.Ino = r.store.folders.state, st.Dev, st.Ino
		}, ErrTreeItself},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := &copyRun{store: testStore(t), ws: filepath.Join(t.TempDir(), "ws")}
			makeTree(t, r.ws, map[string]string{"a": "1", "sub/b": "2", ".env": "3"})
			r.prepare(t)
			tt.change(t, r)
			err := r.p.makeCopy(tt.ctx, &r.rec)
			if !errors.Is(err, tt.want) || tt.want == nil && err != nil {
				t.Fatalf("%v, want %v", err, tt.want)
			}
			if err != nil && (r.rec.Copy != nil || len(r.left(t)) > 0) {
				t.Errorf("left %q, record %+v", r.left(t), r.rec.Copy)
			}
		})
	}
}

// A copy that no agent had is of no use.
func TestKeepCopy(t *testing.T) {
	r := newCopyRun(t, map[string]string{"a": "1"})
	if err := r.p.keepCopy(&r.rec); err != nil || r.rec.Copy != nil || len(r.left(t)) > 0 {
		t.Errorf("%v, left %q", err, r.left(t))
	}
}

// What a killed run left of a copy goes; a whole copy stays.
func TestReclaimCopy(t *testing.T) {
	r := newCopyRun(t, map[string]string{"a": "1"})
	makeTree(t, filepath.Join(r.dir(), newCopyFolder), map[string]string{"tree/x": "1"})
	gone := mustSelf(t)
	gone.StartTicks++
	r.edit(t, func(rec *Record) { rec.Owner = gone })
	if _, err := r.store.Prune(context.Background(), true); err != nil || len(r.left(t)) != 2 {
		t.Fatalf("dry run: %v, left %q", err, r.left(t))
	}
	if _, err := r.store.Prune(context.Background(), false); err != nil || !slices.Equal(r.left(t), []string{copyFolder}) {
		t.Fatalf("%v, left %q", err, r.left(t))
	}
	if run, err := r.store.Run(r.rec.ID); err != nil || run.State != RunEnded || run.Copy == nil {
		t.Errorf("%+v %v", run, err)
	}
}

func TestPruneCopies(t *testing.T) {
	r := newCopyRun(t, map[string]string{"a": strings.Repeat("x", 10_000)})
	if got, err := r.store.PruneCopies(0, false); err != nil || len(got) != 0 {
		t.Errorf("of a running run: %v %v", got, err)
	}
	r.end(t)
	for _, tt := range []struct {
		age    time.Duration
		dryRun bool
		want   int
		left   int
	}{{time.Hour, false, 0, 1}, {0, true, 1, 1}, {0, false, 1, 0}, {0, false, 0, 0}} {
		got, err := r.store.PruneCopies(tt.age, tt.dryRun)
		if err != nil || len(got) != tt.want || len(r.left(t)) != tt.left {
			t.Errorf("%+v: %v %v, left %q", tt, got, err, r.left(t))
		}
		if len(got) > 0 && (got[0].Bytes < 10_000 || got[0].Kept != "") {
			t.Errorf("%+v", got[0])
		}
	}
}

// A full disk has its own reason, whichever call says so.
func TestCopyDiskFull(t *testing.T) {
	for _, err := range []error{treeError("a", unix.ENOSPC), treeError("a", copySide("copy", "a", unix.EDQUOT)), copyFailed("/ws", &fs.PathError{Op: "mkdir", Path: "x", Err: unix.ENOSPC})} {
		if ReasonOf(err) != ReasonState || !strings.Contains(HintOf(err), "XDG_STATE_HOME") {
			t.Errorf("%v: %s %q", err, ReasonOf(err), HintOf(err))
		}
	}
	if err := copySide("copy", "a", unix.EACCES); errors.Is(err, unix.EACCES) {
		t.Error("an errno of the copy's side reads as the original's")
	}
}

// Any depth, any permissions, and nothing behind a link.
func TestRemoveTree(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	makeTree(t, outside, map[string]string{"kept": "1"})
	makeTree(t, dir, map[string]string{"x/closed/a": "1", "x/link": "-> " + outside, "x/.agentshim-1": "1"})
	at := filepath.Join(dir, "x")
	fd, err := unix.Open(at, unix.O_PATH, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 * maxRemoveDepth {
		next := -1
		mustAll(t, unix.Mkdirat(fd, "deep", 0o700))
		if next, err = unix.Openat(fd, "deep", unix.O_RDONLY, 0); err != nil {
			t.Fatal(err)
		}
		mustAll(t, unix.Symlinkat("..", next, "up"), unix.Fchmod(next, 0o500))
		unix.Close(fd)
		fd = next
		mustAll(t, unix.Fchmod(fd, 0o700))
	}
	unix.Close(fd)
	mustAll(t, os.Chmod(filepath.Join(at, "closed"), 0))
	if err := removeTree(dir, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(at); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if fileText(t, filepath.Join(outside, "kept")) != "1" {
		t.Error("a link was followed")
	}
	if err := removeTree(dir, "x"); err != nil {
		t.Errorf("one that is gone: %v", err)
	}
}
