package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// TestCreateHomeFileRefuses: nothing outside the home is created or changed.
func TestCreateHomeFileRefuses(t *testing.T) {
	base := t.TempDir()
	home, outside := filepath.Join(base, "home"), filepath.Join(base, "outside")
	for _, dir := range []string{home, outside} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{"absolute": outside, "relative": "../outside", "file": filepath.Join(outside, "new")} {
		if err := os.Symlink(to, filepath.Join(home, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(home, "taken"), []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name string
		file wire.File
	}{
		{"empty", wire.File{}},
		{"the home itself", wire.File{Path: home}},
		{"the home with a slash", wire.File{Path: home + "/"}},
		{"up", wire.File{Path: home + "/../outside/x"}},
		{"sibling with the home's prefix", wire.File{Path: home + "2/x"}},
		{"relative", wire.File{Path: "x"}},
		{"elsewhere", wire.File{Path: outside + "/x"}},
		{"not clean", wire.File{Path: home + "/a//b"}},
		{"dot", wire.File{Path: home + "/./a"}},
		{"NUL", wire.File{Path: home + "/a\x00b"}},
		{"through an absolute link", wire.File{Path: home + "/absolute/x"}},
		{"through a relative link", wire.File{Path: home + "/relative/x"}},
		{"on a link", wire.File{Path: home + "/file"}},
		{"on a file", wire.File{Path: home + "/taken"}},
		{"below a file", wire.File{Path: home + "/taken/x"}},
		{"negative size", wire.File{Path: home + "/n", Size: -1}},
		{"size past the bound", wire.File{Path: home + "/n", Size: wire.MaxFile + 1}},
	} {
		t.Run(row.name, func(t *testing.T) {
			h, r := createHomeFile(home, row.file)
			if r == nil || r.Reason != "home-file" {
				t.Errorf("%v %+v", h, r)
			}
		})
	}
	if got, _ := os.ReadDir(outside); len(got) > 0 {
		t.Errorf("outside the home: %v", got)
	}
	if b, _ := os.ReadFile(filepath.Join(home, "taken")); string(b) != "old" {
		t.Errorf("a file of the home was changed: %q", b)
	}
}

// TestCopyFirst: the first of the image's files that is one stands in front.
func TestCopyFirst(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	err := errors.Join(os.Mkdir(at("folder"), 0o700), unix.Mkfifo(at("fifo"), 0o600), os.WriteFile(at("bundle"), []byte("image's"), 0o600),
		os.Symlink("bundle", at("link")), os.WriteFile(at("large"), nil, 0o600), os.Truncate(at("large"), wire.MaxAfter+1))
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		paths []string
		want  string
	}{
		{nil, ""},
		{[]string{at("none"), at("folder"), at("fifo"), at("large")}, ""},
		{[]string{at("none"), at("link"), at("large")}, "image's\n"},
	} {
		to, err := os.CreateTemp(dir, "to")
		if err != nil {
			t.Fatal(err)
		}
		err = copyFirst(to, row.paths)
		to.Close()
		if b, _ := os.ReadFile(to.Name()); err != nil || string(b) != row.want {
			t.Errorf("%q: %q, %v", row.paths, b, err)
		}
	}
}

func TestParseMount(t *testing.T) {
	for _, row := range []struct {
		line string
		want wire.Mount
	}{
		{
			`36 35 98:0 /mnt1 /a\040b\134c rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue`,
			wire.Mount{Root: "/mnt1", Target: `/a b\c`, Type: "ext3", Options: []string{"rw", "noatime"}, Propagation: []string{"master:1", "shared:2"}, Super: []string{"rw", "errors=continue"}},
		},
		{
			`1 2 0:1 / / ro - tmpfs  rw`,
			wire.Mount{Root: "/", Target: "/", Type: "tmpfs", Options: []string{"ro"}, Propagation: []string{}, Super: []string{"rw"}},
		},
	} {
		got, err := parseMount(row.line)
		if diff := cmp.Diff(row.want, got); diff != "" || err != nil {
			t.Errorf("%q: %v %s", row.line, err, diff)
		}
	}
	for _, line := range []string{"", "1 2 3", "1 2 0:1 / / ro tmpfs tmpfs rw", "1 2 0:1 / / ro - tmpfs"} {
		if got, err := parseMount(line); err == nil {
			t.Errorf("%q: %+v", line, got)
		}
	}
}

func TestUnescape(t *testing.T) {
	for in, want := range map[string]string{
		"": "", `a`: "a", `a\040b`: "a b", `\134`: `\`, `\012\011`: "\n\t", `\04`: `\04`, `\`: `\`, `\999`: `\999`, `\134040`: `\040`,
	} {
		if got := unescape(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestNumbers(t *testing.T) {
	if diff := cmp.Diff([]uint32{0, 7, 4294967295}, numbers(" 0\t7 4294967295 x -1 ")); diff != "" {
		t.Error(diff)
	}
}
