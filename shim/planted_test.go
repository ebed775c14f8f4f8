package shim

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/mounts"
)

// plantedWorld is a workspace in a folder of the test's.
type plantedWorld struct {
	t      *testing.T
	dir    string
	guards []mounts.GuardPath
	limits plantedLimits
}

func newPlantedWorld(t *testing.T) *plantedWorld {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	w := &plantedWorld{t: t, dir: dir}
	w.mkdir("ws")
	for _, rel := range []string{".claude/hooks", ".claude/settings.json", ".envrc", ".idea", ".vscode/tasks.json"} {
		w.guards = append(w.guards, mounts.GuardPath{Rel: rel, Reason: "runs"})
	}
	return w
}

func (w *plantedWorld) at(rel string) string { return filepath.Join(w.dir, "ws", rel) }

func (w *plantedWorld) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *plantedWorld) mkdir(rel string) {
	w.t.Helper()
	w.must(os.MkdirAll(filepath.Join(w.dir, rel), 0o755))
}

func (w *plantedWorld) file(rel, text string) {
	w.t.Helper()
	w.must(os.MkdirAll(filepath.Dir(w.at(rel)), 0o755))
	w.must(os.WriteFile(w.at(rel), []byte(text), 0o644))
}

func (w *plantedWorld) root() mounts.Source {
	w.t.Helper()
	var st unix.Stat_t
	w.must(unix.Lstat(w.at(""), &st))
	return mounts.Source{Path: w.at(""), Dir: true, Dev: st.Dev, Ino: st.Ino}
}

func (w *plantedWorld) snapshot() plantedSnapshot {
	w.t.Helper()
	s, err := takePlantedSnapshot(context.Background(), w.root(), w.guards, w.limits)
	w.must(err)
	return s
}

// during gives the report of a run in which f happens.
func (w *plantedWorld) during(f func()) PlantedReport {
	w.t.Helper()
	before := w.snapshot()
	f()
	return comparePlanted(w.guards, before, w.snapshot())
}

func brief(r PlantedReport) (out []string) {
	for _, p := range r.Items {
		out = append(out, p.What+" "+p.Kind+" "+p.Path)
	}
	return out
}

// TestPlanted: M13, M15, A57, A63.
func TestPlanted(t *testing.T) {
	for name, c := range map[string]struct {
		before, run func(w *plantedWorld)
		want        []string
	}{
		"nothing":        {},
		"harmless":       {run: func(w *plantedWorld) { w.file("src/x.go", ""); w.file(".vscode/other.json", "") }},
		"file":           {run: func(w *plantedWorld) { w.file(".envrc", "") }, want: []string{"created file .envrc"}},
		"in a folder":    {run: func(w *plantedWorld) { w.file(".vscode/tasks.json", "") }, want: []string{"created file .vscode/tasks.json"}},
		"folder":         {run: func(w *plantedWorld) { w.mkdir("ws/.idea") }, want: []string{"created dir .idea"}},
		"link":           {run: func(w *plantedWorld) { w.must(os.Symlink("/etc/passwd", w.at(".envrc"))) }, want: []string{"created link .envrc"}},
		"folder as link": {run: func(w *plantedWorld) { w.must(os.Symlink("x", w.at(".claude"))) }, want: []string{"created link .claude"}},
		"FIFO":           {run: func(w *plantedWorld) { w.must(unix.Mkfifo(w.at(".envrc"), 0o600)) }, want: []string{"created other .envrc"}},
		"present before": {before: func(w *plantedWorld) { w.file(".envrc", ""); w.file("a/.git/HEAD", ""); w.mkdir("ws/.idea") }, run: func(w *plantedWorld) { w.file(".idea/x", "") }},
		"changed":        {before: func(w *plantedWorld) { w.file(".envrc", "") }, run: func(w *plantedWorld) { w.file(".envrc", "x") }, want: []string{"changed file .envrc"}},
		"replaced":       {before: func(w *plantedWorld) { w.file(".envrc", "") }, run: func(w *plantedWorld) { w.file("n", "x"); w.must(os.Rename(w.at("n"), w.at(".envrc"))) }, want: []string{"replaced file .envrc"}},
		"made anew, maybe with its number": {before: func(w *plantedWorld) { w.file(".envrc", "") }, run: func(w *plantedWorld) {
			w.must(os.Remove(w.at(".envrc")))
			w.file(".envrc", "")
		}, want: []string{"replaced file .envrc"}},
		"removed": {before: func(w *plantedWorld) { w.file(".vscode/tasks.json", "") }, run: func(w *plantedWorld) { w.must(os.RemoveAll(w.at(".vscode"))) }, want: []string{"removed file .vscode/tasks.json"}},
		"repositories": {run: func(w *plantedWorld) {
			w.file("a/b/c/.git/config", "")
			w.file("d/.git", "gitdir: /elsewhere")
			w.must(os.Symlink("/elsewhere", w.at("e.git")))
			w.mkdir("ws/f")
			w.must(os.Symlink("/elsewhere", w.at("f/.git")))
			w.file("g/.GIT/config", "")
			w.file("node_modules/x/.git/config", "")
		}, want: []string{"created dir a/b/c/.git", "created file d/.git", "created link f/.git", "created dir g/.GIT", "created dir node_modules/x/.git"}},
		"bare": {
			before: func(w *plantedWorld) { w.file("old/HEAD", ""); w.mkdir("ws/old/objects"); w.mkdir("ws/only/refs") },
			run: func(w *plantedWorld) {
				w.mkdir("ws/old/refs")
				w.file("work/HEAD", "")
				w.file("work/commondir", "")
				w.file("only/HEAD", "")
			}, want: []string{"created repository old", "created repository work"},
		},
		"the root as bare": {run: func(w *plantedWorld) { w.file("HEAD", ""); w.file("objects/x", ""); w.file("refs/x", "") }, want: []string{"created repository ."}},
		"moved":            {before: func(w *plantedWorld) { w.file("a/.git/HEAD", "") }, run: func(w *plantedWorld) { w.must(os.Rename(w.at("a"), w.at("b"))) }, want: []string{"created dir b/.git"}},
		"exchanged": {before: func(w *plantedWorld) { w.file("a/.git/HEAD", ""); w.file("b/.git/HEAD", "") }, run: func(w *plantedWorld) {
			w.must(unix.Renameat2(unix.AT_FDCWD, w.at("a"), unix.AT_FDCWD, w.at("b"), unix.RENAME_EXCHANGE))
		}, want: []string{"replaced dir a/.git", "replaced dir b/.git"}},
		"repository gone":  {before: func(w *plantedWorld) { w.file("a/.git/HEAD", "") }, run: func(w *plantedWorld) { w.must(os.RemoveAll(w.at("a"))) }},
		"own .git at work": {before: func(w *plantedWorld) { w.file(".git/HEAD", "") }, run: func(w *plantedWorld) { w.file(".git/index", ""); w.file(".git/objects/m/.git", "") }},
		"in a repository": {before: func(w *plantedWorld) {
			for _, f := range []string{"a/.git/config", "a/.git/hooks/pre-push", "a/.git/hooks/x.sample", "a/.git/info/exclude", "b/HEAD", "b/objects/x", "b/refs/x", "c/.git"} {
				w.file(f, "")
			}
		}, run: func(w *plantedWorld) {
			for _, f := range []string{
				"a/.git/config", "a/.git/hooks/pre-push", "a/.git/hooks/x.sample", "a/.git/hooks/post-commit", "a/.git/info/attributes", "a/.git/info/exclude",
				"a/.git/index", "b/config", "b/objects/y", "c/.git",
			} {
				w.file(f, "agent")
			}
		}, want: []string{
			"changed file a/.git/config", "created file a/.git/hooks/post-commit", "changed file a/.git/hooks/pre-push", "created file a/.git/info/attributes",
			"created file b/config", "changed file c/.git",
		}},
		"a flood beside a hook": {before: func(w *plantedWorld) { w.file("a/.git/hooks/x.sample", "") }, run: func(w *plantedWorld) {
			for i := range 3000 {
				w.file(fmt.Sprintf("a/.git/hooks/%d.sample", i), "")
			}
			w.file("a/.git/hooks/post-commit", "")
		}, want: []string{"created file a/.git/hooks/post-commit"}},
		"in a submodule's and a working tree's repository": {before: func(w *plantedWorld) {
			for _, f := range []string{"modules/m/HEAD", "modules/m/objects/x", "modules/m/refs/x", "modules/m/modules/n/HEAD", "modules/m/modules/n/objects/x", "modules/m/modules/n/refs/x", "worktrees/t/HEAD", "worktrees/t/commondir"} {
				w.file("a/.git/"+f, "")
			}
		}, run: func(w *plantedWorld) {
			for _, f := range []string{"modules/m/hooks/post-checkout", "modules/m/modules/n/config", "worktrees/t/config.worktree", "modules/m/index"} {
				w.file("a/.git/"+f, "")
			}
		}, want: []string{
			"created file a/.git/modules/m/hooks/post-checkout", "created file a/.git/modules/m/modules/n/config", "created file a/.git/worktrees/t/config.worktree",
		}},
		"hooks elsewhere": {before: func(w *plantedWorld) { w.file("a/.git/HEAD", "") }, run: func(w *plantedWorld) { w.must(os.Symlink("/etc", w.at("a/.git/hooks"))) }, want: []string{"created link a/.git/hooks"}},
		"names": {run: func(w *plantedWorld) {
			w.file("new\nline/.git", "")
			w.file("\xff\x1b[31m/.git", "")
			w.file(" blank/.git", "")
			w.file("\u202eright/.git", "")
			w.file(`"quoted"/.git`, "")
			w.file(`back\slash/.git`, "")
		}, want: []string{`created file " blank/.git"`, `created file "\"quoted\"/.git"`, `created file "back\\slash/.git"`, `created file "new\nline/.git"`, `created file "\u202eright/.git"`, `created file "\xff\x1b[31m/.git"`}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newPlantedWorld(t)
			if c.before != nil {
				c.before(w)
			}
			r := w.during(func() {
				time.Sleep(5 * time.Millisecond) // ctime moves with the kernel's tick
				if c.run != nil {
					c.run(w)
				}
			})
			if diff := cmp.Diff(c.want, brief(r)); diff != "" {
				t.Error(diff)
			}
			if lines := r.Lines(); (len(lines) > 0) != (len(c.want) > 0) || r.Limit != "" || r.Unread != 0 {
				t.Errorf("%+v: %q", r, lines)
			}
			checkPlantedText(t, r)
		})
	}
}

// checkPlantedText: nothing of an agent's reaches a terminal or the record raw.
func checkPlantedText(t *testing.T, r PlantedReport) {
	t.Helper()
	for _, l := range r.Lines() {
		if !utf8.ValidString(l) || strings.ContainsFunc(l, func(c rune) bool { return !unicode.IsPrint(c) }) {
			t.Errorf("raw: %q", l)
		}
	}
	b, err := json.Marshal(r)
	var back PlantedReport
	if err != nil || json.Unmarshal(b, &back) != nil || cmp.Diff(r, back) != "" {
		t.Errorf("the record does not hold it: %s", cmp.Diff(r, back))
	}
}

// TestPlantedOutside: links in the workspace lead the search nowhere.
func TestPlantedOutside(t *testing.T) {
	w := newPlantedWorld(t)
	r := w.during(func() {
		w.mkdir("outside/repo/.git")
		w.must(os.Symlink("../outside", w.at("out")))
		w.must(os.Symlink(".", w.at("loop")))
		w.must(os.Symlink("/proc/self/root", w.at("root")))
		w.must(unix.Mkfifo(w.at("fifo"), 0o600))
		w.must(os.MkdirAll(w.at(strings.Repeat("n", 255)), 0o755))
	})
	if len(r.Items) > 0 || r.Unread > 0 {
		t.Errorf("%+v", r)
	}
}

// TestPlantedRace: a folder that is exchanged for a link all the time never shows what
// the link points to.
func TestPlantedRace(t *testing.T) {
	w := newPlantedWorld(t)
	w.mkdir("outside/repo/.git")
	w.mkdir("ws/a/dir/sub")
	w.must(os.Symlink(filepath.Join(w.dir, "outside"), w.at("a/link")))
	stop := make(chan struct{})
	var swapping sync.WaitGroup
	swapping.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				unix.Renameat2(unix.AT_FDCWD, w.at("a/dir"), unix.AT_FDCWD, w.at("a/link"), unix.RENAME_EXCHANGE)
			}
		}
	})
	defer swapping.Wait()
	defer close(stop)
	followed := 0
	for i := 0; i < 2000 || i < 100000 && followed == 0; i++ {
		if s := w.snapshot(); len(s.git) > 0 {
			t.Fatalf("seen: %v", s.git)
		}
		if _, err := os.Stat(w.at("a/dir/repo/.git")); err == nil {
			followed++
		}
	}
	if followed == 0 {
		t.Error("the race was not run: the control never followed the link")
	}
}

// TestPlantedBounds: what was not searched is said.
func TestPlantedBounds(t *testing.T) {
	w := newPlantedWorld(t)
	for i := range 60 {
		w.file(fmt.Sprintf("d%d/.git", i), "")
		w.file(fmt.Sprintf("d%d/deep/deeper/.git", i), "")
	}
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	for name, c := range map[string]struct {
		ctx    context.Context
		limits plantedLimits
		want   string
	}{
		"none":    {context.Background(), plantedLimits{}, ""},
		"entries": {context.Background(), plantedLimits{entries: 50}, limitEntries},
		"finds":   {context.Background(), plantedLimits{finds: 10}, limitFinds},
		"time":    {context.Background(), plantedLimits{time: time.Nanosecond}, limitTime},
		"ended":   {cancelled, plantedLimits{}, limitTime},
	} {
		s, err := takePlantedSnapshot(c.ctx, w.root(), w.guards, c.limits)
		r := comparePlanted(w.guards, s, s)
		if err != nil || s.limit != c.want || r.Limit != c.want || (len(r.Lines()) == 1) != (c.want != "") {
			t.Errorf("%s: %q, %v, %q", name, s.limit, err, r.Lines())
		}
	}
	// A first search that was cut short makes nothing look new that is old.
	short, err := takePlantedSnapshot(context.Background(), w.root(), w.guards, plantedLimits{entries: 1})
	w.must(err)
	short.taken = short.taken.Add(time.Hour)
	if r := comparePlanted(w.guards, short, w.snapshot()); len(r.Items) > 0 {
		t.Errorf("%v", brief(r))
	}
	short.taken = short.taken.Add(-2 * time.Hour)
	r := comparePlanted(w.guards, short, w.snapshot())
	if len(r.Items) != 120 || len(r.Lines()) != maxPlantedLines+2 {
		t.Errorf("%d items, %q", len(r.Items), r.Lines())
	}
	for i := range 200 {
		w.file(fmt.Sprintf("e%d/.git", i), "")
	}
	r = comparePlanted(w.guards, short, w.snapshot())
	if len(r.Items) != maxPlantedItems || r.More != 120 || !slices.Contains(r.Lines(), "and 300 more paths, in the record") {
		t.Errorf("%d items, %d more, %q", len(r.Items), r.More, r.Lines())
	}
}

// TestPlantedDeep: paths longer than the kernel takes are unread, and said.
func TestPlantedDeep(t *testing.T) {
	w := newPlantedWorld(t)
	r := w.during(func() {
		at, err := unix.Open(w.at(""), unix.O_PATH|unix.O_DIRECTORY, 0)
		w.must(err)
		for range 20 {
			name := strings.Repeat("\x01", 255)
			w.must(unix.Mkdirat(at, name, 0o755))
			next, err := unix.Openat(at, name, unix.O_PATH|unix.O_DIRECTORY, 0)
			w.must(err)
			w.must(unix.Close(at))
			at = next
			w.must(unix.Mkdirat(at, ".git", 0o755))
		}
		w.must(unix.Close(at))
	})
	if len(r.Items) != 16 || r.Unread != 1 {
		t.Errorf("%d items, %d unread", len(r.Items), r.Unread)
	}
	checkPlantedText(t, r)
	for _, p := range r.Items {
		if len(p.Path) > 5*maxPlantedPath {
			t.Errorf("%d bytes", len(p.Path))
		}
	}
}

// TestPlantedUnreadHooks: git runs what lies in a folder that can be searched and not read.
func TestPlantedUnreadHooks(t *testing.T) {
	w := newPlantedWorld(t)
	w.file("a/.git/hooks/x.sample", "")
	w.must(os.Chmod(filepath.Dir(w.dir), 0o755))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer func() { w.must(unix.Setfsuid(os.Geteuid())) }()
	r := w.during(func() {
		w.file("a/.git/hooks/post-commit", "")
		w.must(os.Chmod(w.at("a/.git/hooks"), 0o311))
		if os.Geteuid() == 0 { // root reads every folder: credentials(7), setfsuid(2)
			w.must(unix.Setfsuid(65534))
		}
	})
	w.must(unix.Setfsuid(os.Geteuid()))
	w.must(os.Chmod(w.at("a/.git/hooks"), 0o755))
	if r.Unread != 1 || len(r.Lines()) != 1 {
		t.Errorf("%+v: %q", r, r.Lines())
	}
}

// TestPlantedLarge: large folders are read to their end. (100,000 files in a hundred
// folders took 50 ms, a hundredth of the bound.)
func TestPlantedLarge(t *testing.T) {
	w := newPlantedWorld(t)
	for d := range 5 {
		w.mkdir(fmt.Sprintf("ws/d%d", d))
		dir, err := unix.Open(w.at(fmt.Sprintf("d%d", d)), unix.O_PATH|unix.O_DIRECTORY, 0)
		w.must(err)
		for f := range 2000 {
			w.must(unix.Mknodat(dir, fmt.Sprint(f), unix.S_IFREG|0o644, 0))
		}
		w.must(unix.Close(dir))
	}
	w.file("d4/sub/.git", "")
	start := time.Now()
	s := w.snapshot()
	t.Logf("%d entries in %v", s.entries, time.Since(start))
	if s.limit != "" || len(s.git) != 1 {
		t.Errorf("limit %q, %v", s.limit, s.git)
	}
}

func FuzzPlantedPath(f *testing.F) {
	for _, s := range []string{"a", "\xff", "a\nb", "\u202e", `"`, strings.Repeat("é", 600)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, rel string) {
		got := plantedPath(rel)
		if !utf8.ValidString(got) || strings.ContainsFunc(got, func(c rune) bool { return !unicode.IsPrint(c) }) || len(got) > 4*maxPlantedPath+64 {
			t.Errorf("%q", got)
		}
	})
}
