package main

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSetUpCache: what has its owner already is left alone; the rest is made private
// before it is given away. Giving it needs CHOWN, so to another it is the engines' tests'.
func TestSetUpCache(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "volume")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	mode := func() uint32 {
		var st unix.Stat_t
		if err := unix.Lstat(dir, &st); err != nil {
			t.Fatal(err)
		}
		return st.Mode & 0o7777
	}
	me, group := uint32(os.Geteuid()), uint32(os.Getegid())
	if err := giveFolder(dir, me, group); err != nil || mode() != 0o700 {
		t.Errorf("%v, mode %o", err, mode())
	}
	link, file := dir+"-link", dir+"-file"
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{link, file, dir + "-none"} {
		if giveFolder(p, me, group) == nil {
			t.Errorf("%s was taken for a folder", p)
		}
	}
	for _, ids := range [][2]string{{"", "0"}, {"-1", "0"}, {"0", "4294967296"}, {"root", "0"}} {
		if setUpCache(dir, ids[0], ids[1]) == 0 {
			t.Errorf("%q are no ids", ids)
		}
	}
	if os.Geteuid() != 0 {
		return // the engines' tests give it to another
	}
	if err := giveFolder(dir, 4321, 4322); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := giveFolder(dir, 4321, 4322); err != nil || mode() != 0o750 {
		t.Errorf("again: %v, mode %o", err, mode())
	}
}
