package shim

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim/wire"
)

// delivered is a file "old" of the home with writeBack in a folder of its own.
func delivered(t *testing.T) (homeFile, string) {
	t.Helper()
	path := mustWrite(t, filepath.Join(t.TempDir(), "auth.json"), "old")
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	p := &prepared{job: Job{Harness: harness.Harness{Dir: filepath.Dir(path)}}.withDefaults()}
	f, err := p.readBackFile("auth.json")
	if err != nil {
		t.Fatal(err)
	}
	f.target = wire.HomeDir + "/.auth.json"
	return f, path
}

func mustRemain(t *testing.T, path, want string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("the host has %q, %v; want %q", got, err, want)
	}
	names, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".agentshim-*"))
	if err != nil || len(names) > 0 {
		t.Errorf("left: %q %v", names, err)
	}
}

func TestWriteBack(t *testing.T) {
	f, path := delivered(t)
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if w := writeBackOne(f, back{content: []byte("old")}); w.Outcome != BackUnchanged {
		t.Errorf("%+v", w)
	}
	if same, err := os.Stat(path); err != nil || !os.SameFile(before, same) {
		t.Errorf("an unchanged file was written: %v", err)
	}
	w := writeBackOne(f, back{content: []byte("new content")})
	if want := (WriteBack{Target: ".auth.json", Source: "auth.json", Outcome: BackReplaced}); w != want {
		t.Errorf("%+v", w)
	}
	mustRemain(t, path, "new content")
	after, err := os.Stat(path)
	if err != nil || after.Mode() != before.Mode() || os.SameFile(before, after) {
		t.Errorf("%v %v", after, err)
	}
	// The second run with the same file as it was.
	if w := writeBackOne(f, back{content: []byte("later")}); w.Outcome != BackKept || !strings.Contains(w.Detail, "changed on the host") {
		t.Errorf("%+v", w)
	}
	mustRemain(t, path, "new content")
}

// TestWriteBackKeeps: what is not the very file that was delivered stays.
func TestWriteBackKeeps(t *testing.T) {
	for name, c := range map[string]struct {
		change func(path string) error
		left   string
	}{
		"changed":        {func(p string) error { return os.WriteFile(p, []byte("hot"), 0o640) }, "hot"},
		"changed unseen": {changeUnseen, "hot"},
		"replaced": {func(p string) error {
			return errors.Join(os.WriteFile(p+"x", []byte("old"), 0o640), os.Rename(p+"x", p))
		}, "old"},
		"permissions":      {func(p string) error { return os.Chmod(p, 0o600) }, "old"},
		"a link to itself": {func(p string) error { return errors.Join(os.Rename(p, p+"x"), os.Symlink(p+"x", p)) }, "old"},
		"folder by a link": {func(p string) error {
			dir := filepath.Dir(p)
			return errors.Join(os.Rename(dir, dir+"x"), os.Symlink(dir+"x", dir))
		}, "old"},
		"a FIFO": {func(p string) error { return errors.Join(os.Rename(p, p+"x"), unix.Mkfifo(p, 0o600)) }, ""},
		"gone":   {os.Remove, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f, path := delivered(t)
			if err := c.change(path); err != nil {
				t.Fatal(err)
			}
			if w := writeBackOne(f, back{content: []byte("new")}); w.Outcome != BackKept || !strings.Contains(w.Detail, "changed on the host") {
				t.Errorf("%+v", w)
			}
			if c.left != "" {
				mustRemain(t, path, c.left)
			}
		})
	}
	f, path := delivered(t)
	for _, b := range []back{{Back: wire.Back{Problem: "it is gone\x1b[2J"}}, {}} {
		if w := writeBackOne(f, b); w.Outcome != BackKept || w.Detail == "" || strings.Contains(w.Detail, "\x1b") {
			t.Errorf("%+v", w)
		}
	}
	mustRemain(t, path, "old")
	if err := os.Chmod(filepath.Dir(path), 0o500); err != nil {
		t.Fatal(err)
	}
	if w := writeBackOne(f, back{content: []byte("new")}); os.Geteuid() != 0 && (w.Outcome != BackKept || !strings.Contains(w.Detail, "denied")) {
		t.Errorf("%+v", w)
	}
	if err := os.Chmod(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
}

// changeUnseen changes the content and puts the times back, but for the change time.
func changeUnseen(p string) error {
	st, err := os.Stat(p)
	if err != nil {
		return err
	}
	time.Sleep(20 * time.Millisecond) // the clock of the file system's stamps
	return errors.Join(os.WriteFile(p, []byte("hot"), 0o640), os.Chtimes(p, st.ModTime(), st.ModTime()))
}

// TestWriteBackLate: a host's change in the very moment of the exchange is put back.
func TestWriteBackLate(t *testing.T) {
	f, path := delivered(t)
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := os.WriteFile(path, []byte("host's later one"), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := f.host.stage(int(dir.Fd()), ".agentshim-t", []byte("new")); !errors.Is(err, ErrApplyRace) {
		t.Error(err)
	}
	mustRemain(t, path, "host's later one")
}

func TestReadBackFileRefuses(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, filepath.Join(dir, "large"), strings.Repeat("x", wire.MaxBack+1))
	mustWrite(t, filepath.Join(dir, "most"), strings.Repeat("x", wire.MaxBack))
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &prepared{job: Job{Harness: harness.Harness{Dir: dir}}.withDefaults()}
	for _, name := range []string{"large", "fifo", ".", "missing"} {
		if _, err := p.readBackFile(name); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	if _, err := p.readBackFile("most"); err != nil {
		t.Errorf("control: %v", err)
	}
}

// TestBacks: init's frames are taken in order, once, within their bounds.
func TestBacks(t *testing.T) {
	const one, two = `{"path":"/home/agent/1","size":3}`, `{"path":"/home/agent/2","size":0,"problem":"it is gone"}`
	for name, c := range map[string]struct {
		frames []string // JSON is a Back, the rest is data
		ok     bool
	}{
		"all":                  {[]string{one, "a", "bc", two}, true},
		"none":                 {nil, false},
		"one missing":          {[]string{one, "abc"}, false},
		"short":                {[]string{one, "ab", two}, false},
		"long":                 {[]string{one, "abcd", two}, false},
		"data first":           {[]string{"a", one, "abc", two}, false},
		"data of none":         {[]string{one, "abc", two, "x"}, false},
		"order":                {[]string{two, one, "abc"}, false},
		"twice":                {[]string{one, "abc", one, "abc", two}, false},
		"too many":             {[]string{one, "abc", two, two}, false},
		"unasked":              {[]string{`{"path":"/home/agent/3","size":0}`}, false},
		"too large":            {[]string{`{"path":"/home/agent/1","size":1048577}`}, false},
		"negative":             {[]string{`{"path":"/home/agent/1","size":-1}`}, false},
		"problem with content": {[]string{`{"path":"/home/agent/1","size":1,"problem":"x"}`}, false},
		"no object":            {[]string{`{"path":1}`}, false},
	} {
		b := backs{want: []string{"/home/agent/1", "/home/agent/2"}}
		var err error
		for _, f := range c.frames {
			if err != nil {
				break
			}
			if strings.HasPrefix(f, "{") {
				err = b.begin(wire.Frame{Kind: wire.KindBack, Payload: []byte(f)})
			} else {
				err = b.add([]byte(f))
			}
		}
		if err != nil && !errors.Is(err, wire.ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
		if ok := err == nil && b.finish(); ok != c.ok || ok != b.complete() {
			t.Errorf("%s: %v, %v", name, ok, err)
		}
	}
	if b := (backs{}); !b.finish() {
		t.Error("a run without such a file can't end")
	}
}
