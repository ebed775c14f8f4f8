package shim

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestNewFile: the file comes whole, replaces a link that was made meanwhile, and leaves nothing else.
func TestNewFile(t *testing.T) {
	dir := t.TempDir()
	path, other := filepath.Join(dir, "list.json"), filepath.Join(t.TempDir(), "other")
	o, err := OpenNewFile(path)
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	if list, err := os.ReadDir(dir); err != nil || len(list) > 0 {
		t.Errorf("before: %v %v", list, err)
	}
	if err := os.Symlink(other, path); err != nil {
		t.Fatal(err)
	}
	if err := o.Write([]byte("text")); err != nil {
		t.Fatal(err)
	}
	list, err := os.ReadDir(dir)
	info, err2 := os.Lstat(path)
	b, err3 := os.ReadFile(path)
	if err := errors.Join(err, err2, err3); err != nil || len(list) != 1 || info.Mode() != 0o600 || string(b) != "text" {
		t.Errorf("%v %v %v", list, info, err)
	}
	if _, err := os.Lstat(other); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the link was followed: %v", err)
	}
}

// TestResultFile: what is there stays until the end, and is replaced by nothing but the record.
func TestResultFile(t *testing.T) {
	for name, swap := range map[string]bool{"stays": false, "swapped": true} {
		dir, elsewhere := filepath.Join(t.TempDir(), "out"), t.TempDir()
		path := filepath.Join(dir, "result.json")
		if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(path, []byte("old"), 0o644)); err != nil {
			t.Fatal(err)
		}
		o, err := OpenResultFile(path)
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		if b, err := os.ReadFile(path); err != nil || string(b) != "old" {
			t.Errorf("%s: before: %q %v", name, b, err)
		}
		if swap {
			if err := errors.Join(os.Rename(dir, dir+"2"), os.Symlink(elsewhere, dir)); err != nil {
				t.Fatal(err)
			}
		}
		err = Record{ID: "new"}.WriteResult(o)
		b, rerr := os.ReadFile(path)
		if !swap && (err != nil || rerr != nil || !strings.Contains(string(b), `"id": "new"`)) {
			t.Errorf("%s: %v %v %q", name, err, rerr, b)
		}
		if swap && (ReasonOf(err) != ReasonState || !errors.Is(rerr, fs.ErrNotExist)) {
			t.Errorf("%s: %v, and elsewhere is %q", name, err, b)
		}
	}
	for _, path := range []string{t.TempDir(), filepath.Join(t.TempDir(), "no", "file")} {
		if _, err := OpenResultFile(path); ReasonOf(err) != ReasonState {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// TestNewFileRefused: what is there stays, and what could not be written is known at the start.
func TestNewFileRefused(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"file", "link", "folder"} {
		path := filepath.Join(dir, name)
		err := os.WriteFile(path, []byte("mine"), 0o600)
		switch name {
		case "link":
			err = errors.Join(os.Remove(path), os.Symlink("nowhere", path))
		case "folder":
			err = errors.Join(os.Remove(path), os.Mkdir(path, 0o700))
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := OpenNewFile(path); !errors.Is(err, fs.ErrExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if b, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(b) != "mine" {
		t.Errorf("%q %v", b, err)
	}
	if _, err := OpenNewFile(filepath.Join(dir, "none", "x")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if _, err := OpenNewFile("/proc/x"); err == nil {
		t.Error("a folder that takes no file was taken")
	}
}

// TestNewFileMoved: a folder that was put in the place of the one at the start gets nothing.
func TestNewFileMoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	o, err := OpenNewFile(filepath.Join(dir, "list.json"))
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	elsewhere := t.TempDir()
	if err := errors.Join(os.Rename(dir, dir+"-moved"), os.Symlink(elsewhere, dir)); err != nil {
		t.Fatal(err)
	}
	if err := o.Write([]byte("text")); err == nil || !strings.Contains(err.Error(), "replaced") {
		t.Error(err)
	}
	for _, d := range []string{elsewhere, dir + "-moved"} {
		if list, err := os.ReadDir(d); err != nil || len(list) > 0 {
			t.Errorf("%s: %v %v", d, list, err)
		}
	}
}
