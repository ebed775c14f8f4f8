package shim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// trees are a host's folder and an agent's copy of it.
type trees struct {
	host, copied string
	base         Base
}

func makeTrees(t testing.TB, files map[string]string) trees {
	t.Helper()
	w := trees{host: t.TempDir(), copied: t.TempDir()}
	makeTree(t, w.host, files)
	w.base, _ = mustCopy(t, w.host, w.copied, CopyOptions{})
	return w
}

func (w trees) changes(t testing.TB, rules ChangeRules) Changes {
	t.Helper()
	c, err := FindChanges(context.Background(), w.base, mustOpen(t, w.copied), mustOpen(t, w.host), rules)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (w trees) apply(t testing.TB, c Changes, opt ApplyOptions) (Applied, error) {
	t.Helper()
	a, err := Apply(context.Background(), c, mustOpen(t, w.copied), mustOpen(t, w.host), opt)
	for p := range readTree(t, w.host) {
		if strings.Contains(p, ".agentshim-") {
			t.Errorf("%q is left", p)
		}
	}
	return a, err
}

func (w trees) mustApply(t testing.TB, c Changes, opt ApplyOptions) Applied {
	t.Helper()
	a, err := w.apply(t, c, opt)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// verdictsOf gives "kind verdict" or "kind verdict: why" by path.
func verdictsOf(c Changes) map[string]string {
	out := map[string]string{}
	for i := range c.List {
		x := &c.List[i]
		out[x.Path] = string(x.Kind) + " " + string(x.Verdict)
		if x.Why != "" {
			out[x.Path] += ": " + x.Why
		}
	}
	return out
}

func mustAll(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// TestChangesApply: every kind of change, then the same once more.
func TestChangesApply(t *testing.T) {
	files := map[string]string{
		"keep": "k", "edit": "old", "gone": "g", "dir/a": "1", "dir/b/c": "2", "mode": "m", "link": "-> keep",
		"becomes-dir": "f", "becomes-file/x/y": "z", "becomes-link": "q", "closed/f": "1", "emptied/f": "x",
	}
	w := makeTrees(t, files)
	c := w.copied
	reopen(t, w.host+"/closed", w.copied+"/closed")
	for _, name := range hostileNames {
		makeTree(t, c, map[string]string{"new/" + name: name})
	}
	mustAll(t,
		os.WriteFile(c+"/edit", []byte("new"), 0o644), os.Remove(c+"/gone"), os.RemoveAll(c+"/dir"), os.Chmod(c+"/mode", 0o755),
		os.Remove(c+"/link"), os.Symlink("edit", c+"/link"), os.Remove(c+"/becomes-dir"), os.RemoveAll(c+"/becomes-file"),
		os.WriteFile(c+"/becomes-file", []byte("now"), 0o644), os.Remove(c+"/becomes-link"), os.Symlink("new/x", c+"/becomes-link"),
		os.Chmod(c+"/closed", 0o500), os.Remove(c+"/emptied/f"),
	)
	makeTree(t, c, map[string]string{"becomes-dir/n/m": "deep", "becomes-dir-too": "between", "added/one": "1", "added-x": "2", "empty/": ""})
	changes := w.changes(t, ChangeRules{})
	if n := changes.Count(VerdictApply); n != len(changes.List) {
		t.Fatal(verdictsOf(changes))
	}
	a := w.mustApply(t, changes, ApplyOptions{})
	if got := len(a.Written) + len(a.Deleted) + len(a.Modes); got != len(changes.List) {
		t.Errorf("%d of %d: %+v", got, len(changes.List), a)
	}
	if d := cmp.Diff(readTree(t, w.copied), readTree(t, w.host)); d != "" {
		t.Error(d)
	}
	for _, name := range []string{"mode", "closed"} {
		x, _ := os.Stat(filepath.Join(w.copied, name))
		y, _ := os.Stat(filepath.Join(w.host, name))
		if x.Mode() != y.Mode() {
			t.Errorf("%s: %v, want %v", name, y.Mode(), x.Mode())
		}
	}
	again := w.changes(t, ChangeRules{})
	if n := again.Count(VerdictDone); n != len(again.List) || n != len(changes.List) {
		t.Errorf("%v", verdictsOf(again))
	}
	if a := w.mustApply(t, again, ApplyOptions{}); len(a.Written)+len(a.Deleted)+len(a.Modes) != 0 {
		t.Errorf("%+v", a)
	}
}

func TestChangesNone(t *testing.T) {
	w := makeTrees(t, map[string]string{"a": "x", "b/c": "y", "l": "-> a"})
	// The same bytes under new stamps are no change.
	mustAll(t, os.WriteFile(w.copied+"/a", []byte("x"), 0o644), os.Chmod(w.copied+"/b/c", 0o600), os.Chmod(w.copied+"/b/c", 0o644))
	if c := w.changes(t, ChangeRules{}); len(c.List) != 0 {
		t.Errorf("%v", verdictsOf(c))
	}
	// A change that puts size and time back is one.
	st, err := os.Stat(w.copied + "/b/c")
	mustAll(t, err, os.WriteFile(w.copied+"/b/c", []byte("z"), 0o644), os.Chtimes(w.copied+"/b/c", st.ModTime(), st.ModTime()))
	if d := cmp.Diff(map[string]string{"b/c": "modified apply"}, verdictsOf(w.changes(t, ChangeRules{}))); d != "" {
		t.Error(d)
	}
}

// TestChangesConflicts: what the host changed, too, is never overwritten.
func TestChangesConflicts(t *testing.T) {
	rm := func(p string) func(string) error {
		return func(dir string) error { return os.RemoveAll(filepath.Join(dir, p)) }
	}
	write := func(p, text string) func(string) error {
		return func(dir string) error {
			at := filepath.Join(dir, p)
			return errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, []byte(text), 0o644))
		}
	}
	both := func(fs ...func(string) error) func(string) error {
		return func(dir string) error {
			for _, f := range fs {
				if err := f(dir); err != nil {
					return err
				}
			}
			return nil
		}
	}
	link := func(p, text string) func(string) error {
		return func(dir string) error { return os.Symlink(text, filepath.Join(dir, p)) }
	}
	chmod := func(p string, mode fs.FileMode) func(string) error {
		return func(dir string) error { return os.Chmod(filepath.Join(dir, p), mode) }
	}
	for name, c := range map[string]struct {
		agent, host func(string) error
		want        map[string]string
	}{
		"both edit":              {write("f", "agent"), write("f", "host"), map[string]string{"f": "modified conflict: the host's was changed meanwhile"}},
		"both edit, one length":  {write("f", "new"), write("f", "won"), map[string]string{"f": "modified conflict: the host's was changed meanwhile"}},
		"both the same":          {write("f", "agent"), write("f", "agent"), map[string]string{"f": "modified done"}},
		"host wrote the same":    {write("f", "agent"), write("f", "old"), map[string]string{"f": "modified apply"}},
		"host edits another":     {write("f", "agent"), write("d/g", "host"), map[string]string{"f": "modified apply"}},
		"deleted, edited":        {rm("f"), write("f", "host"), map[string]string{"f": "deleted conflict: the host's was changed meanwhile"}},
		"edited, deleted":        {write("f", "agent"), rm("f"), map[string]string{"f": "modified conflict: the host's was removed meanwhile"}},
		"both delete":            {rm("f"), rm("f"), map[string]string{"f": "deleted done"}},
		"both add":               {write("n", "agent"), write("n", "host"), map[string]string{"n": "added conflict: the host has another file there"}},
		"both add the same":      {write("n", "x"), write("n", "x"), map[string]string{"n": "added done"}},
		"host has a folder":      {write("n", "x"), write("n/m", "x"), map[string]string{"n": "added conflict: the host has another folder there"}},
		"host has a link":        {write("n", "x"), link("n", "/etc/passwd"), map[string]string{"n": "added conflict: the host has another link there"}},
		"folder deleted, grown":  {rm("d"), write("d/host", "x"), map[string]string{"d": "deleted conflict: the host has something in this folder that stays", "d/g": "deleted apply"}},
		"folder now a file":      {both(rm("d"), write("d", "x")), write("d/host", "x"), map[string]string{"d": "type conflict: the host has something in this folder that stays", "d/g": "deleted apply"}},
		"file now a folder":      {both(rm("f"), write("f/x", "x")), write("f", "host"), map[string]string{"f": "type conflict: the host's was changed meanwhile", "f/x": "added conflict: the folder it is in can't be applied"}},
		"host's folder a link":   {write("d/n", "x"), both(rm("d"), link("d", "/tmp")), map[string]string{"d/n": "added conflict: on the host a folder on the way to it is a link"}},
		"host's folder a file":   {write("d/n", "x"), both(rm("d"), write("d", "x")), map[string]string{"d/n": "added conflict: on the host a folder on the way to it is none"}},
		"added under a file":     {write("n/m", "x"), write("n", "x"), map[string]string{"n": "added conflict: the host has another file there", "n/m": "added conflict: the folder it is in can't be applied"}},
		"both modes":             {chmod("f", 0o755), chmod("f", 0o600), map[string]string{"f": "mode conflict: the host's permissions were changed meanwhile"}},
		"mode, and host's edit":  {chmod("f", 0o755), write("f", "host"), map[string]string{"f": "mode apply"}},
		"edit, and host's mode":  {write("f", "agent"), chmod("f", 0o600), map[string]string{"f": "modified apply"}},
		"link, both":             {both(rm("l"), link("l", "d")), both(rm("l"), link("l", "x")), map[string]string{"l": "modified conflict: the host's was changed meanwhile"}},
		"host replaces a folder": {rm("f"), both(rm("f"), write("f/x", "x")), map[string]string{"f": "deleted conflict: the host's is a folder by now"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := makeTrees(t, map[string]string{"f": "old", "d/g": "g", "l": "-> f"})
			mustAll(t, c.agent(w.copied), c.host(w.host))
			before := readTree(t, w.host)
			changes := w.changes(t, ChangeRules{})
			if d := cmp.Diff(c.want, verdictsOf(changes)); d != "" {
				t.Fatal(d)
			}
			if changes.Count(VerdictConflict) == 0 {
				return
			}
			if a, err := w.apply(t, changes, ApplyOptions{}); !errors.Is(err, ErrBlocked) || len(a.Written)+len(a.Deleted) != 0 {
				t.Errorf("%+v %v", a, err)
			}
			if d := cmp.Diff(before, readTree(t, w.host)); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestChangesPartly(t *testing.T) {
	w := makeTrees(t, map[string]string{"f": "old", "g": "old", "d/x": "1", "d/y": "1"})
	for _, p := range []string{"f", "g"} {
		mustAll(t, os.WriteFile(filepath.Join(w.copied, p), []byte("agent"), 0o644))
	}
	mustAll(t, os.RemoveAll(w.copied+"/d"), os.WriteFile(w.host+"/f", []byte("host"), 0o644), os.WriteFile(w.host+"/d/y", []byte("host"), 0o644))
	makeTree(t, w.copied, map[string]string{".git/hooks/post-commit": "evil", "new/sub/.git/config": "evil", "new/ok": "1"})
	c := w.changes(t, ChangeRules{ProtectedNames: []string{".git"}})
	w.mustApply(t, c, ApplyOptions{Partly: true})
	want := map[string]string{"f": "host", "g": "agent", "d/": "", "d/y": "host", "new/": "", "new/sub/": "", "new/ok": "1"}
	if d := cmp.Diff(want, readTree(t, w.host)); d != "" {
		t.Errorf("%s\n%v", d, verdictsOf(c))
	}
}

// TestChangesRefused: what is never applied, each beside what is (A57, A63, A69).
func TestChangesRefused(t *testing.T) {
	secret := t.TempDir()
	makeTree(t, secret, map[string]string{"key": "secret"})
	uid := uint32(os.Getuid())
	sym := func(text string) func(string) error {
		return func(p string) error { return os.Symlink(text, p) }
	}
	file := func(p string) error { return os.WriteFile(p, []byte("0123456789"), 0o644) }
	for name, c := range map[string]struct {
		path string
		make func(string) error
		want string
	}{
		"a file":               {"d/n", file, ""},
		"absolute link":        {"d/n", sym(secret + "/key"), "it is a link out of the workspace"},
		"link up":              {"d/n", sym("../../x"), "it is a link out of the workspace"},
		"link at the root, up": {"n", sym("../x"), "it is a link out of the workspace"},
		"link up, inside":      {"d/n", sym("../f"), ""},
		"link to the root":     {"d/n", sym(".."), ""},
		"link through a name":  {"d/n", sym("e/../../x"), "it is a link that leads into a folder and back"},
		"link by dots":         {"d/n", sym("./.././../x"), "it is a link out of the workspace"},
		"link to .git":         {"d/n", sym("../.git/hooks"), "it is a link to a protected path"},
		"dangling":             {"d/n", sym("nothing"), ""},
		"FIFO":                 {"d/n", func(p string) error { return unix.Mkfifo(p, 0o644) }, "it is a FIFO, a socket or a device"},
		"setuid":               {"d/n", func(p string) error { return errors.Join(file(p), os.Chmod(p, 0o755|fs.ModeSetuid)) }, "it has a setuid or setgid bit"},
		"setgid folder":        {"d/n", func(p string) error { return errors.Join(os.Mkdir(p, 0o755), os.Chmod(p, 0o755|fs.ModeSetgid)) }, "it has a setuid or setgid bit"},
		"sticky folder":        {"d/n", func(p string) error { return errors.Join(os.Mkdir(p, 0o755), os.Chmod(p, 0o755|fs.ModeSticky)) }, ""},
		"too large":            {"d/n", func(p string) error { return errors.Join(file(p), os.Truncate(p, 1<<41)) }, "it is too large"},
		".git":                 {".git", file, "its path is protected"},
		".git deep":            {"d/.git", file, "its path is protected"},
		".GIT":                 {"d/.GIT", file, "its path is protected"},
		".git with a joiner":   {"d/.g\u200cit", file, "its path is protected"},
		"git~1":                {"d/GIT~1", file, "its path is protected"},
		".git.":                {"d/.git. .", file, "its path is protected"},
		".gitignore":           {"d/.gitignore", file, ""},
		"protected path":       {"p/q", file, "its path is protected"},
		"protected, folded":    {"P/Q", file, "its path is protected"},
		"beside a protected":   {"p/qq", file, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := makeTrees(t, map[string]string{"d/e/x": "1", "f": "2"})
			at := filepath.Join(w.copied, c.path)
			mustAll(t, os.MkdirAll(filepath.Dir(at), 0o755), c.make(at))
			rules := ChangeRules{ProtectedNames: []string{".git"}, ProtectedPaths: []string{"p/q"}, AgentUID: &uid}
			changes := w.changes(t, rules)
			want := "added apply"
			if c.want != "" {
				want = "added refused: " + c.want
			}
			if got := verdictsOf(changes)[c.path]; got != want {
				t.Fatalf("%q, want %q", got, want)
			}
			_, err := w.apply(t, changes, ApplyOptions{})
			_, lerr := os.Lstat(filepath.Join(w.host, c.path))
			if there := lerr == nil; there != (c.want == "") || errors.Is(err, ErrBlocked) == there {
				t.Errorf("there %v, %v", there, err)
			}
			if !strings.HasPrefix(name, "protected") && !strings.Contains(name, "git") {
				return
			}
			t.Run("control", func(t *testing.T) { // without the rule it is applied
				w.mustApply(t, w.changes(t, ChangeRules{}), ApplyOptions{})
				if _, err := os.Lstat(filepath.Join(w.host, c.path)); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestChangesForeignFile: a hard link to a file that is not the agent's. An agent can't
// make one, since link(2) does not cross mounts; should one be there, it is not read out.
func TestChangesForeignFile(t *testing.T) {
	needRoot(t)
	uid := uint32(4321)
	w := makeTrees(t, map[string]string{"f": "x"})
	foreign := filepath.Join(filepath.Dir(w.copied), "passwd")
	mustAll(t, os.WriteFile(foreign, []byte("root"), 0o600), os.Link(foreign, w.copied+"/n"))
	want := map[string]string{"n": "added refused: it does not belong to the agent"}
	if d := cmp.Diff(want, verdictsOf(w.changes(t, ChangeRules{AgentUID: &uid}))); d != "" {
		t.Error(d)
	}
	t.Run("control", func(t *testing.T) {
		w.mustApply(t, w.changes(t, ChangeRules{}), ApplyOptions{})
		if readTree(t, w.host)["n"] != "root" {
			t.Error("not applied")
		}
	})
}

func TestChangesIgnored(t *testing.T) {
	w := makeTrees(t, map[string]string{"f": "x", ".git/HEAD": "x"})
	mustAll(t, os.WriteFile(w.copied+"/.git/HEAD", []byte("y"), 0o644), os.WriteFile(w.copied+"/.git/new", nil, 0o644), os.WriteFile(w.copied+"/.github", nil, 0o644))
	if d := cmp.Diff(map[string]string{".github": "added apply"}, verdictsOf(w.changes(t, ChangeRules{Ignore: []string{".git"}}))); d != "" {
		t.Error(d)
	}
}

// TestChangesUnreadable: a closed folder is not an emptied one.
func TestChangesUnreadable(t *testing.T) {
	e := func(p string, typ NodeType) BaseEntry { return BaseEntry{Path: p, Type: typ, Mode: 0o755} }
	base := Base{Entries: []BaseEntry{e("a", TypeFolder), e("a-b", TypeFolder), e("a-b/f", TypeFile), e("a/b", TypeFolder), e("a/b/c", TypeFile)}}
	nodes := []treeNode{{Path: "a", Type: TypeFolder, Mode: 0o755, Bad: "it can't be read"}, {Path: "a-b", Type: TypeFolder, Mode: 0o755, Bad: "it can't be read"}}
	got := findDeltas(base, nodes, ChangeRules{})
	if len(got) != 2 || got[0].Path != "a" || got[1].Path != "a-b" {
		t.Errorf("%+v", got)
	}
}

func TestWantMode(t *testing.T) {
	for name, c := range map[string]struct {
		base, copied, host, umask, want uint32
	}{
		"left alone":           {0o644, 0o644, 0o644, 0o022, 0o644},
		"left alone, host's":   {0o644, 0o644, 0o600, 0o022, 0o600},
		"program":              {0o644, 0o755, 0o644, 0o022, 0o755},
		"open to all":          {0o644, 0o666, 0o644, 0o022, 0o644},
		"open before":          {0o664, 0o666, 0o664, 0o022, 0o664},
		"a user's own group":   {0o644, 0o664, 0o644, 0o002, 0o664},
		"closed":               {0o644, 0o600, 0o644, 0o022, 0o600},
		"setuid on the host's": {0o755, 0o755, 0o4755, 0o022, 0o755},
	} {
		t.Run(name, func(t *testing.T) {
			got := wantMode(&Change{
				Kind: ChangeModified, To: TypeFile, base: &BaseEntry{Mode: c.base},
				copy: treeNode{Type: TypeFile, Mode: c.copied}, host: treeNode{Type: TypeFile, Mode: c.host},
			}, c.umask)
			if got != c.want {
				t.Errorf("%03o, want %03o", got, c.want)
			}
		})
	}
}

// TestApplyOwner: a root caller leaves no files of root's in a user's workspace.
func TestApplyOwner(t *testing.T) {
	needRoot(t)
	w := makeTrees(t, map[string]string{"f": "x"})
	mustAll(t, os.Chown(w.host, 1234, 1235), os.Chown(w.host+"/f", 1236, 1237), os.WriteFile(w.copied+"/f", []byte("y"), 0o644))
	makeTree(t, w.copied, map[string]string{"n/m": "x", "l": "-> f"})
	w.mustApply(t, w.changes(t, ChangeRules{}), ApplyOptions{})
	for p, want := range map[string][2]uint32{"f": {1236, 1237}, "n": {1234, 1235}, "n/m": {1234, 1235}, "l": {1234, 1235}} {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(w.host, p), &st); err != nil || st.Uid != want[0] || st.Gid != want[1] {
			t.Errorf("%s: %d:%d %v", p, st.Uid, st.Gid, err)
		}
	}
}

// TestApplyRaces: what the host changes between the look and the deed stays.
func TestApplyRaces(t *testing.T) {
	for name, host := range map[string]func(dir string) error{
		"edited": func(dir string) error { return os.WriteFile(dir+"/f", []byte("host"), 0o644) },
		"replaced": func(dir string) error {
			return errors.Join(os.WriteFile(dir+"/t", []byte("host"), 0o644), os.Rename(dir+"/t", dir+"/f"))
		},
		"removed":  func(dir string) error { return os.Remove(dir + "/f") },
		"a link":   func(dir string) error { return errors.Join(os.Remove(dir+"/f"), os.Symlink("d", dir+"/f")) },
		"appeared": func(dir string) error { return os.WriteFile(dir+"/n", []byte("host"), 0o644) },
		"folder":   func(dir string) error { return os.Mkdir(dir+"/n", 0o755) },
		"its place": func(dir string) error {
			return errors.Join(os.Rename(dir+"/d", dir+"/d2"), os.Symlink("/tmp", dir+"/d"))
		},
	} {
		for _, gone := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, deleted %v", name, gone), func(t *testing.T) {
				w := makeTrees(t, map[string]string{"f": "old", "d/x": "1"})
				if gone {
					mustAll(t, os.Remove(w.copied+"/f"))
				} else {
					mustAll(t, os.WriteFile(w.copied+"/f", []byte("agent"), 0o644))
				}
				makeTree(t, w.copied, map[string]string{"n": "agent", "d/y": "agent"})
				c := w.changes(t, ChangeRules{})
				mustAll(t, host(w.host))
				before := readTree(t, w.host)
				a, err := w.apply(t, c, ApplyOptions{})
				if !errors.Is(err, ErrApplyRace) {
					t.Fatalf("%v %+v", err, a)
				}
				after := readTree(t, w.host)
				for _, p := range slices.Concat(a.Written, a.Deleted) {
					delete(after, p)
					delete(before, p)
				}
				if d := cmp.Diff(before, after); d != "" {
					t.Error(d)
				}
			})
		}
	}
}

// TestApplyInode: a staged file to which a file of the host's, removed meanwhile, left its
// number is cleaned up all the same.
func TestApplyInode(t *testing.T) {
	reused := 0
	for range 10 {
		w := makeTrees(t, map[string]string{"f": "old"})
		mustAll(t, os.WriteFile(w.copied+"/f", []byte("agent"), 0o644))
		c := w.changes(t, ChangeRules{})
		mustAll(t, os.Remove(w.host+"/f"), os.WriteFile(w.host+"/x", nil, 0o644))
		st, err := os.Stat(w.host + "/x")
		mustAll(t, err, os.Remove(w.host+"/x"))
		if st.Sys().(*syscall.Stat_t).Ino == c.List[0].host.Stamp.Ino {
			reused++
		}
		if _, err := w.apply(t, c, ApplyOptions{}); !errors.Is(err, ErrApplyRace) {
			t.Fatal(err)
		}
	}
	if reused == 0 {
		t.Log("this file system gives no number again: the test shows nothing")
	}
}

// TestChangesProtectedByLink: no link leads a protected path to what the agent wrote.
func TestChangesProtectedByLink(t *testing.T) {
	rules := ChangeRules{ProtectedPaths: []string{".vscode/tasks.json", ".mcp.json", ".envrc", "deploy/prod/key", "up", "..x/y"}}
	w := makeTrees(t, map[string]string{
		".mcp.json": "-> one", "one": "-> conf/../conf/mcp.json", "conf/mcp.json": "{}", "conf/other": "x", "deploy": "-> elsewhere/.", "elsewhere/prod/key": "k",
		".envrc": "-> HOST/env/rc", "env/rc": "x", "up": "-> /nowhere/x", "..x": "-> ..z", "..z/y": "1", "plain": "p",
	})
	rules.Root = w.host
	mustAll(t, os.Remove(w.host+"/.envrc"), os.Symlink(w.host+"/env/rc", w.host+"/.envrc"))
	w.copied = t.TempDir()
	w.base, _ = mustCopy(t, w.host, w.copied, CopyOptions{})
	c := w.copied
	mustAll(t,
		os.Symlink("evil", c+"/.vscode"), os.Symlink("evil", c+"/.VSCode"), os.Remove(c+"/one"), os.Symlink("evil", c+"/one"),
		os.WriteFile(c+"/conf/mcp.json", []byte("evil"), 0o644), os.WriteFile(c+"/conf/other", []byte("mine"), 0o644),
		os.RemoveAll(c+"/elsewhere/prod"), os.Symlink("../evil", c+"/elsewhere/prod"), os.WriteFile(c+"/env/rc", []byte("evil"), 0o644),
		os.WriteFile(c+"/..z/y", []byte("evil"), 0o644), os.WriteFile(c+"/plain", []byte("mine"), 0o644),
	)
	makeTree(t, c, map[string]string{"evil/tasks.json": "boom", "evil/key": "k", ".vscode2": "-> evil"})
	const above = "refused: it is a link in the place of a folder with a protected path"
	want := map[string]string{
		".vscode": "added " + above, ".VSCode": "added " + above, "one": "modified refused: " + whyProtected, "conf/mcp.json": "modified refused: " + whyProtected,
		"conf/other": "modified apply", "elsewhere/prod": "type " + above, "elsewhere/prod/key": "deleted refused: " + whyProtected,
		"env/rc": "modified refused: " + whyProtected, "..z/y": "modified refused: " + whyProtected, "plain": "modified apply",
		"evil": "added apply", "evil/tasks.json": "added apply", "evil/key": "added apply", ".vscode2": "added apply",
	}
	if d := cmp.Diff(want, verdictsOf(w.changes(t, rules))); d != "" {
		t.Error(d)
	}
	// The control: what is not protected goes the same ways.
	free := w.changes(t, ChangeRules{})
	if n := free.Count(VerdictRefused); n != 0 {
		t.Errorf("%v", verdictsOf(free))
	}
}

// TestChangesBareRepository: a folder that git takes for a repository by what is in it gets
// nothing that git obeys.
func TestChangesBareRepository(t *testing.T) {
	w := makeTrees(t, map[string]string{"old/HEAD": "ref: refs/heads/x", "old/objects/": "", "old/refs/": "", "old/config": "", "a/HEAD": "no repository", "half/objects/x": ""})
	makeTree(t, w.copied, map[string]string{
		"old/config": "[core]", "old/hooks/pre-commit": "x", "old/refs/heads/x": "x", "old/info/attributes": "x", "old/description": "x",
		"new/HEAD": "x", "new/objects/": "", "new/refs/": "", "new/config": "x", "fold/Head": "x", "fold/COMMONDIR": "..", "fold/CONFIG.": "x",
		"half/refs/": "", "half/HEAD": "x", "a/config": "x", "a/refs/hooks": "x", "HEAD": "x", "objects/": "", "refs/": "", "hooks/x": "x", "config": "-> a",
	})
	c := w.changes(t, ChangeRules{})
	refused := map[string]bool{}
	for i := range c.List {
		if c.List[i].Why == whyObeyed {
			refused[c.List[i].Path] = true
		} else if c.List[i].Verdict != VerdictApply {
			t.Errorf("%+v", c.List[i])
		}
	}
	want := []string{
		"HEAD", "config", "fold/COMMONDIR", "fold/CONFIG.", "fold/Head", "half/HEAD", "hooks", "new/HEAD", "new/config", "old/config", "old/hooks",
		"old/info/attributes",
	}
	if d := cmp.Diff(want, slices.Sorted(maps.Keys(refused))); d != "" {
		t.Error(d)
	}
	w.mustApply(t, c, ApplyOptions{Partly: true})
	for _, dir := range []string{"", "new", "half", "fold"} { // the control is the copy
		if gitTakes(t, filepath.Join(w.host, dir)) || dir != "fold" && !gitTakes(t, filepath.Join(w.copied, dir)) {
			t.Errorf("%q", dir)
		}
	}
}

// gitTakes says whether dir has the names by which git takes it for a repository.
func gitTakes(t *testing.T, dir string) bool {
	t.Helper()
	list, err := os.ReadDir(dir)
	mustAll(t, err)
	var names gitNames
	for _, e := range list {
		names.add(e.Name())
	}
	return names.repository()
}

// TestApplyRaceCopy: bytes that were not looked at are not applied.
func TestApplyRaceCopy(t *testing.T) {
	for _, size := range []int{10, digestMax + 1} { // read by this process, by the kernel
		w := makeTrees(t, map[string]string{"f": "old"})
		mustAll(t, os.WriteFile(w.copied+"/f", bytes.Repeat([]byte("s"), size), 0o644))
		c := w.changes(t, ChangeRules{})
		mustAll(t, os.WriteFile(w.copied+"/f", bytes.Repeat([]byte("e"), size), 0o644))
		if a, err := w.apply(t, c, ApplyOptions{}); !errors.Is(err, ErrApplyRace) || len(a.Written) != 0 || readTree(t, w.host)["f"] != "old" {
			t.Errorf("%v %+v", err, a)
		}
	}
}

// TestApplySwap: a folder of the host's is exchanged with a link to the outside in a
// tight loop; nothing outside changes (A57).
func TestApplySwap(t *testing.T) {
	outside := t.TempDir()
	makeTree(t, outside, map[string]string{"f": "outside", "g": "outside"})
	applied, raced, hit := 0, 0, 0
	for range 20 {
		w := makeTrees(t, map[string]string{"d/f": "old", "d/g": "old", "x/y": "1"})
		mustAll(t, os.Symlink(outside, w.host+"/x/link"))
		mustAll(t, os.WriteFile(w.copied+"/d/f", []byte("new"), 0o644), os.Remove(w.copied+"/d/g"))
		makeTree(t, w.copied, map[string]string{"d/n": "new", "d/m/k": "new"})
		stop := swapper(t, w.host+"/d", w.host+"/x/link")
		for range 200 { // the control: writing by path
			if os.WriteFile(w.host+"/d/control", nil, 0o644) == nil && os.Remove(outside+"/control") == nil {
				hit++
			}
		}
		for range 30 {
			c, err := FindChanges(context.Background(), w.base, mustOpen(t, w.copied), mustOpen(t, w.host), ChangeRules{})
			if err != nil {
				t.Fatal(err)
			}
			a, err := Apply(context.Background(), c, mustOpen(t, w.copied), mustOpen(t, w.host), ApplyOptions{})
			switch {
			case errors.Is(err, ErrApplyRace):
				raced++
			case err != nil && !errors.Is(err, ErrBlocked):
				t.Fatal(err)
			case len(a.Written) > 0:
				applied++
			}
		}
		stop()
	}
	if d := cmp.Diff(map[string]string{"f": "outside", "g": "outside"}, readTree(t, outside)); d != "" {
		t.Error(d)
	}
	if hit == 0 || raced == 0 {
		t.Error("no write by path came outside, or no apply met the swap: the test shows nothing")
	}
	t.Logf("%d applied, %d ended by the swap; %d writes by path came outside", applied, raced, hit)
}

// TestApplyCrash: killed at any moment, each file is old or new, and a second apply
// ends it.
func TestApplyCrash(t *testing.T) {
	if dir := os.Getenv("AGENTSHIM_TEST_APPLY"); dir != "" {
		base, err := ReadBase(dir + "/base")
		mustAll(t, err)
		w := trees{host: dir + "/host", copied: dir + "/copy", base: base}
		w.mustApply(t, w.changes(t, ChangeRules{}), ApplyOptions{})
		return
	}
	was := map[string]string{}
	for i := range 200 {
		was[fmt.Sprintf("d%d/f%d", i%7, i)] = fmt.Sprint("old ", i)
	}
	killed, mixed := 0, 0
	for round := range 12 {
		dir := t.TempDir()
		w := trees{host: dir + "/host", copied: dir + "/copy"}
		mustAll(t, os.Mkdir(w.host, 0o755), os.Mkdir(w.copied, 0o755))
		makeTree(t, w.host, was)
		w.base, _ = mustCopy(t, w.host, w.copied, CopyOptions{})
		mustAll(t, WriteBase(dir+"/base", w.base))
		for i := range 200 {
			p := filepath.Join(w.copied, fmt.Sprintf("d%d/f%d", i%7, i))
			if i%3 == 0 {
				mustAll(t, os.Remove(p))
			} else {
				mustAll(t, os.WriteFile(p, []byte(fmt.Sprint("new ", i)), 0o644))
			}
		}
		cmd := exec.Command(os.Args[0], "-test.run=^TestApplyCrash$")
		cmd.Env = append(os.Environ(), "AGENTSHIM_TEST_APPLY="+dir)
		mustAll(t, cmd.Start())
		done := make(chan error, 1)
		go func() { done <- cmd.Wait() }()
		killWhen(w.host, round, cmd.Process, done)
		if err := <-done; err != nil {
			killed++
		}
		wanted := readTree(t, w.copied)
		before, after := 0, 0
		for p, text := range readTree(t, w.host) {
			switch {
			case strings.HasPrefix(text, "old"):
				before++
			case strings.HasPrefix(text, "new"):
				after++
			}
			switch {
			case strings.Contains(p, ".agentshim-"):
				mustAll(t, os.Remove(filepath.Join(w.host, p)))
			case text != was[p] && text != wanted[p]:
				t.Errorf("%q is %q", p, text)
			}
		}
		if before > 0 && after > 0 {
			mixed++
		}
		w.mustApply(t, w.changes(t, ChangeRules{}), ApplyOptions{})
		if d := cmp.Diff(wanted, readTree(t, w.host)); d != "" {
			t.Error(d)
		}
	}
	if killed == 0 || mixed == 0 {
		t.Error("no apply was killed while it put files in place: the test shows nothing")
	}
	t.Logf("%d of 12 were killed, %d between two files", killed, mixed)
}

// killWhen kills p a moment after it has begun to write, in odd rounds when it has
// put the first file in its place.
func killWhen(host string, round int, p *os.Process, done chan error) {
	for {
		select {
		case err := <-done:
			done <- err
			return
		default:
		}
		begun := false
		if round%2 == 0 {
			left, _ := filepath.Glob(host + "/*/.agentshim-*")
			begun = len(left) > 0
			time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
		} else {
			text, _ := os.ReadFile(host + "/d0/f112")
			begun = strings.HasPrefix(string(text), "new")
		}
		if begun {
			_ = p.Kill()
			return
		}
	}
}

func TestWriteDiff(t *testing.T) {
	w := makeTrees(t, map[string]string{
		"text": "one\ntwo\nthree\n", "bin": "a\x00b", "big": strings.Repeat("x", 1<<20), "gone": "bye", "same": "s", "l": "-> text",
		"conflict": "c", "mode": "m",
	})
	c := w.copied
	mustAll(t,
		os.WriteFile(c+"/text", []byte("one\n2\x1b]0;evil\a\nthree\n\u202etxt\xff\r\n"), 0o644), os.WriteFile(c+"/bin", []byte("a\x00c"), 0o644),
		os.WriteFile(c+"/big", []byte("small\n"), 0o644), os.Remove(c+"/gone"), os.Remove(c+"/l"), os.Symlink("bin", c+"/l"),
		os.WriteFile(c+"/conflict", []byte("agent"), 0o644), os.WriteFile(w.host+"/conflict", []byte("host"), 0o644), os.Chmod(c+"/mode", 0o755),
		os.WriteFile(c+"/new\n\x1b[31m\u202e\xff", []byte("n\n"), 0o644), os.Symlink("/etc/passwd", c+"/out"), os.Mkdir(c+"/folder", 0o755),
	)
	var out bytes.Buffer
	mustAll(t, WriteDiff(&out, w.changes(t, ChangeRules{}), mustOpen(t, w.copied), mustOpen(t, w.host), DiffLimits{}))
	want := `modified: big (file)
  too large to show: 1048576 bytes
modified: bin (file)
  binary, 3 bytes
conflict: conflict: the host's was changed meanwhile
added: folder (folder)
deleted: gone (file)
@@ -1,1 +0,0 @@
-bye
\ No newline at end of file
modified: l (link)
@@ -1,1 +1,1 @@
-text
+bin
mode: mode (file, permissions 644 to 755)
added: "new\n\x1b[31m\u202e\xff" (file)
@@ -0,0 +1,1 @@
+n
refused: out: it is a link out of the workspace
modified: text (file)
@@ -1,3 +1,4 @@
 one
-two
+2\x1b]0;evil\a
 three
+\u202etxt\xff\r

 big | too large to show: 1048576 bytes
 bin | binary, 3 bytes
 conflict | conflict
 folder | added
 gone | 1 -
 l | 2 +-
 mode | mode
 "new\n\x1b[31m\u202e\xff" | 1 +
 out | refused
 text | 3 ++-
 10 changed, 4 lines added, 3 removed, 1 in conflict, 1 refused
`
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Error(d)
	}
}

// FuzzDiffText: no bytes of a file's or a name's reach a terminal that could steer it.
func FuzzDiffText(f *testing.F) {
	f.Add([]byte("a\x1b[0m\r\u202e\xff\u0085"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, s := range []string{escapeLine(b), quoteName(string(b))} {
			if !utf8.ValidString(s) {
				t.Fatalf("%q is no UTF-8", s)
			}
			for _, r := range s {
				if r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r)) {
					t.Fatalf("%q", s)
				}
			}
		}
	})
}

// TestChangesFarm: what an agent can do to a scan: link farms, deep folders, many
// names (A57).
func TestChangesFarm(t *testing.T) {
	w := makeTrees(t, map[string]string{"f": "x"})
	for i := range 2000 {
		mustAll(t, os.Symlink(fmt.Sprintf("l%d", (i+1)%2000), fmt.Sprintf("%s/l%d", w.copied, i)))
	}
	c := w.changes(t, ChangeRules{})
	if n := c.Count(VerdictApply); n != 2000 {
		t.Errorf("%d", n)
	}
	deep := w.copied + strings.Repeat("/d", 140)
	mustAll(t, os.MkdirAll(deep, 0o755))
	c = w.changes(t, ChangeRules{})
	if n := c.Count(VerdictRefused); n != 1 {
		t.Errorf("%d refused", n)
	}
	_, err := FindChanges(context.Background(), w.base, mustOpen(t, w.copied), mustOpen(t, w.host), ChangeRules{Limits: TreeLimits{Entries: 1000}})
	if !errors.Is(err, ErrTreeEntries) || HintOf(err) == "" {
		t.Error(err)
	}
}

// longNames makes folders in one another until their path is longer than PATH_MAX.
func longNames(t *testing.T, dir string) {
	t.Helper()
	at, err := unix.Open(dir, unix.O_PATH, 0)
	mustAll(t, err)
	for range 17 {
		name := strings.Repeat("n", 255)
		mustAll(t, unix.Mkdirat(at, name, 0o755))
		next, err := unix.Openat(at, name, unix.O_PATH, 0)
		mustAll(t, err, unix.Close(at))
		at = next
	}
	mustAll(t, unix.Close(at))
}

// TestLongPaths: what no path reaches is left out of a copy and refused of one.
func TestLongPaths(t *testing.T) {
	src := t.TempDir()
	longNames(t, src)
	base, report := mustCopy(t, src, t.TempDir(), CopyOptions{})
	if len(base.Entries) != 16 || report.LeftOutCount != 1 || report.LeftOut[0].Why != leftName {
		t.Errorf("%d entries, %d left out", len(base.Entries), report.LeftOutCount)
	}
	w := makeTrees(t, map[string]string{"f": "x"})
	longNames(t, w.copied)
	c := w.changes(t, ChangeRules{})
	if len(c.List) != 17 || c.Count(VerdictRefused) != 1 {
		t.Errorf("%d changes, %d refused", len(c.List), c.Count(VerdictRefused))
	}
}

// TestChangesCase: two names that differ in case are two files; where the host takes
// them for one, the second finds the first.
func TestChangesCase(t *testing.T) {
	w := makeTrees(t, map[string]string{"README": "x"})
	makeTree(t, w.copied, map[string]string{"readme": "y"})
	c := w.changes(t, ChangeRules{})
	if d := cmp.Diff(map[string]string{"readme": "added apply"}, verdictsOf(c)); d != "" {
		t.Error(d)
	}
	// On a folding file system the host's README answers to readme.
	list := slices.Clone(c.List)
	judge(list, map[string]treeNode{"readme": {Path: "readme", Type: TypeFile, Size: 1, Mode: 0o644}}, ChangeRules{}.withDefaults())
	if list[0].Verdict != VerdictConflict {
		t.Errorf("%+v", list[0])
	}
	// There a file that got another case is there already, and the old name must not go.
	makeTree(t, w.copied, map[string]string{"readme": "x"})
	mustAll(t, os.Remove(w.copied+"/README"))
	list = w.changes(t, ChangeRules{}).List
	was := list[0].host
	judge(list, map[string]treeNode{"README": was, "readme": was}, ChangeRules{}.withDefaults())
	for i := range list {
		if list[i].Verdict != VerdictConflict {
			t.Errorf("%s: %s", list[i].Path, list[i].Verdict)
		}
	}
}

// TestChangesHardLinked: names of one file on the host are applied one by one.
func TestChangesHardLinked(t *testing.T) {
	w := trees{host: t.TempDir(), copied: t.TempDir()}
	mustAll(t, os.WriteFile(w.host+"/a", []byte("old"), 0o644), os.Link(w.host+"/a", w.host+"/b"), os.Link(w.host+"/a", w.host+"/c"))
	w.base, _ = mustCopy(t, w.host, w.copied, CopyOptions{})
	mustAll(t, os.WriteFile(w.copied+"/a", []byte("new a"), 0o644), os.WriteFile(w.copied+"/b", []byte("new b"), 0o644), os.Remove(w.copied+"/c"))
	w.mustApply(t, w.changes(t, ChangeRules{}), ApplyOptions{})
	if d := cmp.Diff(map[string]string{"a": "new a", "b": "new b"}, readTree(t, w.host)); d != "" {
		t.Error(d)
	}
}

// TestChangesLarge: files without a digest in the base.
func TestChangesLarge(t *testing.T) {
	old := strings.Repeat("x", digestMax+1)
	w := makeTrees(t, map[string]string{"touched": old, "edited": old, "both": old})
	edit := strings.Repeat("y", digestMax+1)
	mustAll(t,
		os.WriteFile(w.copied+"/touched", []byte(old), 0o644), os.WriteFile(w.copied+"/edited", []byte(edit), 0o644),
		os.WriteFile(w.copied+"/both", []byte(edit), 0o644), os.WriteFile(w.host+"/both", []byte(old), 0o644),
	)
	c := w.changes(t, ChangeRules{})
	want := map[string]string{"touched": "modified done", "edited": "modified apply", "both": "modified conflict: the host's was changed meanwhile"}
	if d := cmp.Diff(want, verdictsOf(c)); d != "" {
		t.Error(d)
	}
}

// TestChangesFIFO: a FIFO in a file's place blocks nothing, on either side, whenever it comes.
func TestChangesFIFO(t *testing.T) {
	swap := func(p string) error { return errors.Join(os.Remove(p), unix.Mkfifo(p, 0o666)) }
	w := makeTrees(t, map[string]string{"f": "old", "g": "old"})
	mustAll(t, os.WriteFile(w.copied+"/f", []byte("new"), 0o644), os.WriteFile(w.copied+"/g", []byte("new"), 0o644))
	c := w.changes(t, ChangeRules{})
	mustAll(t, swap(w.copied+"/f"))
	if _, err := w.apply(t, c, ApplyOptions{}); !errors.Is(err, ErrApplyRace) {
		t.Error(err)
	}
	mustAll(t, WriteDiff(io.Discard, c, mustOpen(t, w.copied), mustOpen(t, w.host), DiffLimits{}), swap(w.host+"/g"))
	want := map[string]string{"f": "type refused: it is a FIFO, a socket or a device", "g": "modified conflict: the host's is a special file by now"}
	if d := cmp.Diff(want, verdictsOf(w.changes(t, ChangeRules{}))); d != "" {
		t.Error(d)
	}
	if _, err := w.apply(t, c, ApplyOptions{}); !errors.Is(err, ErrApplyRace) {
		t.Error(err)
	}
}

// TestApplyRollback: an error while writing leaves the host as it was.
func TestApplyRollback(t *testing.T) {
	w := makeTrees(t, map[string]string{"a": "old", "z": "old"})
	makeTree(t, w.copied, map[string]string{"n/m/k": "1", "b": "2"})
	mustAll(t, os.WriteFile(w.copied+"/a", []byte("new"), 0o644), os.WriteFile(w.copied+"/z", []byte("new"), 0o644), os.Chmod(w.copied+"/n/m", 0o555))
	reopen(t, w.copied+"/n/m")
	c := w.changes(t, ChangeRules{})
	mustAll(t, os.Remove(w.copied+"/z"))
	before := readTree(t, w.host)
	if a, err := w.apply(t, c, ApplyOptions{}); !errors.Is(err, ErrApplyRace) || len(a.Written) != 0 {
		t.Errorf("%v %+v", err, a)
	}
	if d := cmp.Diff(before, readTree(t, w.host)); d != "" {
		t.Error(d)
	}
}

// TestChangesMany: a folder of 100,000 files, found and applied.
func TestChangesMany(t *testing.T) {
	if os.Getenv("AGENTSHIM_MEASURE") == "" {
		t.Skip("set AGENTSHIM_MEASURE to measure")
	}
	w := makeTrees(t, map[string]string{"f": "x"})
	mustAll(t, os.Mkdir(w.copied+"/flat", 0o755))
	for i := range 100_000 {
		mustAll(t, os.WriteFile(fmt.Sprintf("%s/flat/%d", w.copied, i), []byte("x"), 0o644))
	}
	start := time.Now()
	c := w.changes(t, ChangeRules{})
	found := time.Since(start)
	start = time.Now()
	a := w.mustApply(t, c, ApplyOptions{})
	t.Logf("%d found in %v, applied in %v", len(c.List), found, time.Since(start))
	if len(a.Written) != 100_001 {
		t.Errorf("%d", len(a.Written))
	}
	start = time.Now()
	dst := t.TempDir()
	mustCopy(t, w.copied, dst, CopyOptions{})
	t.Logf("copied in %v", time.Since(start))
}

// TestChangesRandom: after random edits, applying gives the copy, and a second time nothing.
func TestChangesRandom(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := makeTrees(t, randomFiles(r))
		for range 12 {
			p := filepath.Join(w.copied, randomPath(r))
			switch r.IntN(5) {
			case 0:
				_ = os.RemoveAll(p)
			case 1:
				_ = os.RemoveAll(p)
				_ = os.MkdirAll(filepath.Dir(p), 0o755)
				_ = os.Symlink("a", p)
			default:
				_ = os.MkdirAll(filepath.Dir(p), 0o755)
				_ = os.WriteFile(p, []byte(fmt.Sprint(r.IntN(3))), 0o644)
			}
		}
		c := w.changes(t, ChangeRules{})
		if n := c.Count(VerdictApply); n != len(c.List) {
			t.Fatalf("seed %d: %v", seed, verdictsOf(c))
		}
		w.mustApply(t, c, ApplyOptions{})
		if d := cmp.Diff(readTree(t, w.copied), readTree(t, w.host)); d != "" {
			t.Fatalf("seed %d: %s", seed, d)
		}
		if c := w.changes(t, ChangeRules{}); c.Count(VerdictDone) != len(c.List) {
			t.Fatalf("seed %d, again: %v", seed, verdictsOf(c))
		}
	}
}

func randomPath(r *rand.Rand) string {
	names := []string{"a", "b", "a-b", "c"}
	p := names[r.IntN(len(names))]
	for range r.IntN(3) {
		p += "/" + names[r.IntN(len(names))]
	}
	return p
}

func randomFiles(r *rand.Rand) map[string]string {
	files := map[string]string{}
	for range 8 {
		p := randomPath(r)
		clash := slices.ContainsFunc(slices.Collect(maps.Keys(files)), func(q string) bool {
			return strings.HasPrefix(q, p+"/") || strings.HasPrefix(p, q+"/")
		})
		if !clash {
			files[p] = fmt.Sprint(r.IntN(3))
		}
	}
	return files
}
