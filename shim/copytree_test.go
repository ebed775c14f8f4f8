package shim

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// missing skips t for what the host lacks; with AGENTSHIM_REQUIRE_ALL it fails.
func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("AGENTSHIM_REQUIRE_ALL") != "" {
		t.Fatal(what)
	}
	t.Skip(what)
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		missing(t, "needs root")
	}
}

// reopen makes folders removable for a caller without privilege.
func reopen(t testing.TB, dirs ...string) {
	t.Cleanup(func() {
		for _, dir := range dirs {
			_ = os.Chmod(dir, 0o700)
		}
	})
}

func mustOpen(t testing.TB, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// makeTree makes files by their paths; a text that starts with "-> " is a link's, a
// path that ends with "/" a folder.
func makeTree(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	for p, text := range files {
		at := filepath.Join(dir, p)
		err := os.MkdirAll(filepath.Dir(at), 0o755)
		target, link := strings.CutPrefix(text, "-> ")
		switch {
		case strings.HasSuffix(p, "/"):
			err = errors.Join(err, os.MkdirAll(at, 0o755))
		case link:
			err = errors.Join(err, os.Symlink(target, at))
		default:
			err = errors.Join(err, os.WriteFile(at, []byte(text), 0o644))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// readTree is makeTree's inverse.
func readTree(t testing.TB, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		switch {
		case d.IsDir():
			files[rel+"/"] = ""
		case d.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(p)
			files[rel] = "-> " + target
			return err
		case d.Type().IsRegular():
			b, err := os.ReadFile(p)
			files[rel] = string(b)
			return err
		default:
			files[rel] = "special"
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func mustCopy(t testing.TB, src, dst string, opt CopyOptions) (Base, CopyReport) {
	t.Helper()
	b, r, err := CopyTree(context.Background(), mustOpen(t, src), mustOpen(t, dst), opt)
	if err != nil {
		t.Fatal(err)
	}
	return b, r
}

var hostileNames = []string{
	"line\nbreak", "esc\x1b[2J", "bytes\xff\xfe", "bidi\u202efdp", "-rf", " ", "a,b:c$d", `back\slash`, "tab\t", strings.Repeat("n", 255),
}

// TestCopyTree: names of all kinds, links as links, modes and times (A57, A61).
func TestCopyTree(t *testing.T) {
	src, dst, secret := t.TempDir(), t.TempDir(), t.TempDir()
	makeTree(t, secret, map[string]string{"key": "secret"})
	files := map[string]string{
		"a": "alpha", "d/": "", "d/e/f": "deep", "empty": "", "dangling": "-> nowhere", "up": "-> ../../..",
		"out": "-> " + secret, "file-out": "-> " + secret + "/key", "self": "-> self",
	}
	for _, name := range hostileNames {
		files["names/"+name] = name
	}
	makeTree(t, src, files)
	old := time.Unix(1_000_000_000, 123456789)
	if err := errors.Join(
		os.Chmod(src+"/a", 0o751|fs.ModeSetuid|fs.ModeSetgid), os.Chtimes(src+"/a", old, old),
		os.Chmod(src+"/d/e", 0o555), os.Chtimes(src+"/d", old, old),
	); err != nil {
		t.Fatal(err)
	}
	reopen(t, src+"/d/e", dst+"/d/e")
	base, report := mustCopy(t, src, dst, CopyOptions{})
	if d := cmp.Diff(readTree(t, src), readTree(t, dst)); d != "" {
		t.Error(d)
	}
	if report.LeftOutCount != 0 || report.Links != 5 || report.Files != 3+len(hostileNames) || report.Folders != 3 {
		t.Errorf("%+v", report)
	}
	a, err := os.Stat(dst + "/a")
	if err != nil || a.Mode() != 0o751 || !a.ModTime().Equal(old) {
		t.Errorf("%v %v %v", a.Mode(), a.ModTime(), err)
	}
	d, _ := os.Stat(dst + "/d")
	e, _ := os.Stat(dst + "/d/e")
	if !d.ModTime().Equal(old) || e.Mode().Perm() != 0o555 {
		t.Errorf("%v %v", d.ModTime(), e.Mode())
	}
	again, err := ParseBase(base.Encode())
	if err != nil || cmp.Diff(base, again) != "" {
		t.Errorf("%v\n%s", err, cmp.Diff(base, again))
	}
	for _, e := range base.Entries {
		if e.Type == TypeFile && e.Digest != Digest(sha256.Sum256([]byte(files[e.Path]))) {
			t.Errorf("digest of %q", e.Path)
		}
	}
}

// TestCopyTreeSpecial: what is no file is not opened, and named.
func TestCopyTreeSpecial(t *testing.T) {
	src, dst := t.TempDir(), t.TempDir()
	makeTree(t, src, map[string]string{"file": "x"})
	sock, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(sock)
	if err := errors.Join(
		unix.Mkfifo(src+"/fifo", 0o666), unix.Bind(sock, &unix.SockaddrUnix{Name: src + "/socket"}),
	); err != nil {
		t.Fatal(err)
	}
	want := []LeftOut{{"fifo", leftSpecial}, {"socket", leftSpecial}}
	if unix.Mknod(src+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))) == nil {
		want = slices.Insert(want, 1, LeftOut{"null", leftSpecial})
	}
	_, report := mustCopy(t, src, dst, CopyOptions{})
	if d := cmp.Diff(want, report.LeftOut); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(map[string]string{"file": "x"}, readTree(t, dst)); d != "" {
		t.Error(d)
	}
	t.Run("control", func(t *testing.T) {
		blocked := make(chan struct{})
		go func() {
			if f, err := os.OpenFile(src+"/fifo", os.O_RDONLY|syscall.O_CLOEXEC, 0); err == nil {
				f.Close()
			}
			close(blocked)
		}()
		select {
		case <-blocked:
			t.Error("an open of a FIFO does not block here: the test shows nothing")
		case <-time.After(100 * time.Millisecond):
		}
		w, err := os.OpenFile(src+"/fifo", os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		<-blocked
		w.Close()
	})
}

func TestCopyTreeFifoAsFile(t *testing.T) {
	// A FIFO where the listing said file: as if it was swapped in.
	src, dst := t.TempDir(), t.TempDir()
	if err := unix.Mkfifo(src+"/f", 0o666); err != nil {
		t.Fatal(err)
	}
	w := &copyWorker{treeCopy: &treeCopy{ctx: context.Background(), budget: treeBudget{limits: TreeLimits{}.withDefaults()}}, buf: make([]byte, copyBuffer)}
	err := w.entry(int(mustOpen(t, src).Fd()), int(mustOpen(t, dst).Fd()), folderTask{}, dirent{"f", unix.DT_REG})
	if d := cmp.Diff([]LeftOut{{"f", leftSpecial}}, w.left); err != nil || d != "" {
		t.Errorf("%v %s", err, d)
	}
}

func TestCopyTreeSparse(t *testing.T) {
	src, dst := t.TempDir(), t.TempDir()
	for name, size := range map[string]int64{"small": 900 << 10, "large": 100 << 20} {
		f, err := os.Create(filepath.Join(src, name))
		if err != nil {
			t.Fatal(err)
		}
		_, err1 := f.WriteAt([]byte("start"), 0)
		_, err2 := f.WriteAt([]byte("middle"), size/2)
		if err := errors.Join(err1, err2, f.Truncate(size), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	_, report := mustCopy(t, src, dst, CopyOptions{Limits: TreeLimits{Bytes: 1 << 20}})
	if report.Bytes > 64<<10 {
		t.Errorf("%d bytes", report.Bytes)
	}
	for _, name := range []string{"small", "large"} {
		var a, b unix.Stat_t
		if err := errors.Join(unix.Stat(filepath.Join(src, name), &a), unix.Stat(filepath.Join(dst, name), &b)); err != nil {
			t.Fatal(err)
		}
		if a.Size != b.Size || b.Blocks > a.Blocks+16 {
			t.Errorf("%s: %d bytes in %d blocks, was %d in %d", name, b.Size, b.Blocks, a.Size, a.Blocks)
		}
		x, _ := os.ReadFile(filepath.Join(src, name))
		y, _ := os.ReadFile(filepath.Join(dst, name))
		if !bytes.Equal(x, y) {
			t.Errorf("%s differs", name)
		}
	}
}

// TestCopyLarge: files that the kernel copies, and each way without it.
func TestCopyLarge(t *testing.T) {
	src := t.TempDir()
	data := make([]byte, 3*copyBuffer+digestMax+17)
	for i := 0; i+8 <= len(data); i += 8 {
		binary.NativeEndian.PutUint64(data[i:], rand.Uint64())
	}
	if err := os.WriteFile(src+"/f", data, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, noRange := range []bool{false, true} {
		var m copyModes
		m.noClone.Store(noRange)
		m.noRange.Store(noRange)
		in := mustOpen(t, src+"/f")
		out, err := os.Create(filepath.Join(t.TempDir(), "f"))
		if err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		var digest Digest
		if err := errors.Join(
			unix.Fstat(int(in.Fd()), &st), m.copy(int(in.Fd()), int(out.Fd()), &st, make([]byte, copyBuffer), &digest), out.Close(),
		); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(out.Name()); err != nil || !bytes.Equal(got, data) || digest != (Digest{}) {
			t.Errorf("without the kernel %v: %v", noRange, err)
		}
	}
}

func TestCopyTreeLimits(t *testing.T) {
	src := t.TempDir()
	makeTree(t, src, map[string]string{"a/b/c/d": "12345", "e": "12345"})
	for name, c := range map[string]struct {
		limits TreeLimits
		want   error
	}{
		"bytes":           {TreeLimits{Bytes: 9}, ErrTreeBytes},
		"bytes, enough":   {TreeLimits{Bytes: 10}, nil},
		"entries":         {TreeLimits{Entries: 4}, ErrTreeEntries},
		"entries, enough": {TreeLimits{Entries: 5}, nil},
		"depth":           {TreeLimits{Depth: 2}, ErrTreeDepth},
		"depth, enough":   {TreeLimits{Depth: 3}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := CopyTree(context.Background(), mustOpen(t, src), mustOpen(t, t.TempDir()), CopyOptions{Limits: c.limits})
			if !errors.Is(err, c.want) || (err != nil && (HintOf(err) == "" || ReasonOf(err) != ReasonMount)) {
				t.Errorf("%v", err)
			}
		})
	}
	t.Run("into a folder with files", func(t *testing.T) {
		if _, _, err := CopyTree(context.Background(), mustOpen(t, src), mustOpen(t, src), CopyOptions{}); err == nil {
			t.Error("no error")
		}
	})
	t.Run("into itself", func(t *testing.T) {
		src := t.TempDir()
		makeTree(t, src, map[string]string{"a/state/": "", "f": "x"})
		_, _, err := CopyTree(context.Background(), mustOpen(t, src), mustOpen(t, src+"/a/state"), CopyOptions{})
		if !errors.Is(err, ErrTreeItself) || HintOf(err) == "" {
			t.Error(err)
		}
	})
	t.Run("canceled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if _, _, err := CopyTree(ctx, mustOpen(t, src), mustOpen(t, t.TempDir()), CopyOptions{}); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestCopyTreeOwner: a privileged caller opens nothing that the agent could not read.
func TestCopyTreeOwner(t *testing.T) {
	needRoot(t)
	src, dst := t.TempDir(), t.TempDir()
	makeTree(t, src, map[string]string{"open": "x", "private": "secret", "closed/f": "secret", "mine": "x", "l": "-> open"})
	if err := errors.Join(
		os.Chmod(src+"/private", 0o600), os.Chmod(src+"/closed", 0o750), os.Chmod(src+"/mine", 0o400), os.Chown(src+"/mine", 4321, 1),
	); err != nil {
		t.Fatal(err)
	}
	_, report := mustCopy(t, src, dst, CopyOptions{Owner: &FileOwner{4321, 4321}})
	if d := cmp.Diff([]LeftOut{{"closed", leftUnreadable}, {"private", leftUnreadable}}, report.LeftOut); d != "" {
		t.Error(d)
	}
	for _, name := range []string{"", "/open", "/mine", "/l"} {
		var st unix.Stat_t
		if err := unix.Lstat(dst+name, &st); err != nil || st.Uid != 4321 || st.Gid != 4321 {
			t.Errorf("%q: %d:%d %v", name, st.Uid, st.Gid, err)
		}
	}
	t.Run("control", func(t *testing.T) {
		if _, report := mustCopy(t, src, t.TempDir(), CopyOptions{}); report.LeftOutCount != 0 {
			t.Errorf("%+v", report)
		}
	})
}

func TestCopyTreeExclude(t *testing.T) {
	src, dst := t.TempDir(), t.TempDir()
	makeTree(t, src, map[string]string{".git/config": "x", "sub/.git/config": "y", "f": "z"})
	_, report := mustCopy(t, src, dst, CopyOptions{Exclude: []string{".git"}})
	if d := cmp.Diff(map[string]string{"sub/": "", "sub/.git/": "", "sub/.git/config": "y", "f": "z"}, readTree(t, dst)); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]LeftOut{{".git", leftExcluded}}, report.LeftOut); d != "" {
		t.Error(d)
	}
}

// TestCopyTreeMount: a mount that appeared after the plan is never entered.
func TestCopyTreeMount(t *testing.T) {
	src := t.TempDir()
	makeTree(t, src, map[string]string{"d/f": "x", "g": "y"})
	secret := t.TempDir()
	if err := unix.Mount(secret, src+"/d", "", unix.MS_BIND, ""); err != nil {
		missing(t, "bind mount: "+err.Error())
	}
	defer func() { _ = unix.Unmount(src+"/d", unix.MNT_DETACH) }()
	_, _, err := CopyTree(context.Background(), mustOpen(t, src), mustOpen(t, t.TempDir()), CopyOptions{})
	if !errors.Is(err, ErrTreeMount) {
		t.Error(err)
	}
}

// TestCopyTreeHardLinks: each name is a file of its own.
func TestCopyTreeHardLinks(t *testing.T) {
	src, dst := t.TempDir(), t.TempDir()
	makeTree(t, src, map[string]string{"a": "x"})
	if err := os.Link(src+"/a", src+"/b"); err != nil {
		t.Fatal(err)
	}
	_, report := mustCopy(t, src, dst, CopyOptions{})
	a, _ := os.Stat(dst + "/a")
	b, _ := os.Stat(dst + "/b")
	if os.SameFile(a, b) || report.Split != 2 {
		t.Errorf("%+v", report)
	}
}

// TestCopyTreeGrowing: a file that is written all the time is an error, never a mix.
func TestCopyTreeGrowing(t *testing.T) {
	src := t.TempDir()
	f, err := os.Create(src + "/log")
	if err != nil {
		t.Fatal(err)
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		defer f.Close()
		for block := byte(0); ; block++ {
			select {
			case <-stop:
				return
			default:
				// The whole file is one value; a mix of two is a wrong copy.
				_, _ = f.WriteAt(bytes.Repeat([]byte{block}, 600<<10), 0)
			}
		}
	}()
	for range 5 {
		dst := t.TempDir()
		_, _, err := CopyTree(context.Background(), mustOpen(t, src), mustOpen(t, dst), CopyOptions{})
		if errors.Is(err, ErrTreeChanged) && HintOf(err) != "" {
			continue
		}
		got, rerr := os.ReadFile(dst + "/log")
		if err != nil || rerr != nil || len(bytes.Trim(got, string(got[:1]))) != 0 {
			t.Errorf("a mix, or %v", err)
		}
	}
	close(stop)
	<-stopped
}

// swapper swaps a name between a real node and a link to outside, as fast as it can.
func swapper(t *testing.T, real, link string) (stop func()) {
	t.Helper()
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, real, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE)
			}
		}
	}()
	return func() { close(done); <-ended }
}

// TestCopyTreeSwap: a folder and a file are exchanged with links to a secret in a
// tight loop; no copy ever holds it (A57, M13).
func TestCopyTreeSwap(t *testing.T) {
	src, secret := t.TempDir(), t.TempDir()
	makeTree(t, secret, map[string]string{"f": "SECRET"})
	makeTree(t, src, map[string]string{"d/f": "mine", "x/link": "-> " + secret, "g": "mine", "x/glink": "-> " + secret + "/f"})
	stopDir := swapper(t, src+"/d", src+"/x/link")
	stopFile := swapper(t, src+"/g", src+"/x/glink")
	copied := 0
	for range 30 {
		dst := t.TempDir()
		_, _, err := CopyTree(context.Background(), mustOpen(t, src), mustOpen(t, dst), CopyOptions{})
		if err == nil {
			copied++
		} else if !errors.Is(err, ErrTreeChanged) {
			t.Fatal(err)
		}
		for p, text := range readTree(t, dst) {
			if text == "SECRET" {
				t.Fatalf("%q was read through a link", p)
			}
		}
	}
	t.Logf("%d of 30 copies went through", copied)
	seen := false
	for end := time.Now().Add(10 * time.Second); !seen && time.Now().Before(end); { // the control: paths
		b, _ := os.ReadFile(src + "/d/f")
		seen = string(b) == "SECRET"
	}
	stopDir()
	stopFile()
	if !seen {
		t.Error("a reader by path saw no secret: the test shows nothing")
	}
}

// TestCopyTreeVanish: files that are made and removed meanwhile.
func TestCopyTreeVanish(t *testing.T) {
	src := t.TempDir()
	makeTree(t, src, map[string]string{"stay": "x"})
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				dir := fmt.Sprintf("%s/d%d", src, i%50)
				_ = os.Mkdir(dir, 0o755)
				_ = os.WriteFile(dir+"/f", []byte("y"), 0o644)
				_ = os.RemoveAll(fmt.Sprintf("%s/d%d", src, (i+25)%50))
			}
		}
	}()
	for range 50 {
		dst := t.TempDir()
		base, _, err := CopyTree(context.Background(), mustOpen(t, src), mustOpen(t, dst), CopyOptions{})
		if err != nil {
			if !errors.Is(err, ErrTreeChanged) {
				t.Error(err)
			}
			continue
		}
		if files := checkBase(t, base, dst); files["stay"] != "x" {
			t.Errorf("%q", files["stay"])
		}
	}
	close(stop)
	<-ended
}

// checkBase fails unless base is what the copy holds, no more and no less.
func checkBase(t *testing.T, base Base, dst string) map[string]string {
	t.Helper()
	files := readTree(t, dst)
	for _, e := range base.Entries {
		p := e.Path
		if e.Type == TypeFolder {
			p += "/"
		}
		text, ok := files[p]
		if !ok || e.Type == TypeFile && Digest(sha256.Sum256([]byte(text))) != e.Digest {
			t.Errorf("%q is in the base as a %s of %d bytes, in the copy %q", e.Path, e.Type, e.Size, text)
		}
	}
	if len(base.Entries) != len(files) {
		t.Errorf("%d entries, %d files", len(base.Entries), len(files))
	}
	return files
}

// TestCopyTreeTypes: files become folders and the other way, in a tight loop.
func TestCopyTreeTypes(t *testing.T) {
	src := t.TempDir()
	makeTree(t, src, map[string]string{"a": "file", "d/b/in/deep": "folder", "l": "-> a", "d/c/x": "y"})
	stop1 := swapper(t, src+"/a", src+"/d/b")
	stop2 := swapper(t, src+"/l", src+"/d/c")
	copied := 0
	for range 30 {
		dst := t.TempDir()
		base, _, err := CopyTree(context.Background(), mustOpen(t, src), mustOpen(t, dst), CopyOptions{})
		switch {
		case err == nil:
			checkBase(t, base, dst)
			copied++
		case !errors.Is(err, ErrTreeChanged):
			t.Error(err)
		}
	}
	stop1()
	stop2()
	if copied == 0 {
		t.Error("no copy went through")
	}
}

func TestBaseFile(t *testing.T) {
	src := t.TempDir()
	makeTree(t, src, map[string]string{"d/f": "x", "d-e": "y", "l": "-> d"})
	b, _ := mustCopy(t, src, t.TempDir(), CopyOptions{})
	p := filepath.Join(t.TempDir(), "base")
	if err := WriteBase(p, b); err != nil {
		t.Fatal(err)
	}
	got, err := ReadBase(p)
	if err != nil || cmp.Diff(b, got) != "" {
		t.Errorf("%v %s", err, cmp.Diff(b, got))
	}
	if fi, err := os.Stat(p); err != nil || fi.Mode() != 0o600 {
		t.Errorf("%v %v", fi.Mode(), err)
	}
	if left, _ := filepath.Glob(filepath.Dir(p) + "/.base-*"); len(left) != 0 {
		t.Errorf("%q", left)
	}
}

// sealBase gives altered bytes a right checksum.
func sealBase(body []byte) []byte {
	sum := sha256.Sum256(body)
	return append(slices.Clone(body), sum[:]...)
}

func TestParseBaseRefuses(t *testing.T) {
	entry := func(change func(*BaseEntry)) Base {
		e := BaseEntry{Path: "f", Type: TypeFile, Mode: 0o644, Size: 3, Digest: Digest{1}}
		change(&e)
		return Base{Entries: []BaseEntry{e}}
	}
	good := entry(func(*BaseEntry) {}).Encode()
	if _, err := ParseBase(good); err != nil {
		t.Fatal(err)
	}
	body := good[:len(good)-sha256.Size]
	for name, data := range map[string][]byte{
		"empty":            {},
		"magic alone":      []byte(baseMagic),
		"cut":              good[:len(good)-1],
		"longer":           append(slices.Clone(good), 0),
		"another version":  sealBase(bytes.Replace(body, []byte("base 1"), []byte("base 2"), 1)),
		"a bit":            append(slices.Clone(good[:40]), append([]byte{good[40] ^ 1}, good[41:]...)...),
		"trailing":         sealBase(append(slices.Clone(body), 0)),
		"cut inside":       sealBase(body[:len(body)-1]),
		"count too large":  sealBase(append(append([]byte(baseMagic), 255, 255, 255, 255, 255, 255, 255, 255), body[len(baseMagic)+8:]...)),
		"dot dot":          entry(func(e *BaseEntry) { e.Path = "../f" }).Encode(),
		"absolute":         entry(func(e *BaseEntry) { e.Path = "/f" }).Encode(),
		"no path":          entry(func(e *BaseEntry) { e.Path = "" }).Encode(),
		"NUL":              entry(func(e *BaseEntry) { e.Path = "a\x00b" }).Encode(),
		"no folder":        entry(func(e *BaseEntry) { e.Path = "d/f" }).Encode(),
		"long name":        entry(func(e *BaseEntry) { e.Path = strings.Repeat("n", 256) }).Encode(),
		"setuid":           entry(func(e *BaseEntry) { e.Mode = 0o4755 }).Encode(),
		"negative size":    entry(func(e *BaseEntry) { e.Size = -1 }).Encode(),
		"nanoseconds":      entry(func(e *BaseEntry) { e.Copy.CTime.Nsec = 1_000_000_000 }).Encode(),
		"type":             entry(func(e *BaseEntry) { e.Type = TypeSpecial }).Encode(),
		"file with text":   entry(func(e *BaseEntry) { e.Link = "x" }).Encode(),
		"link's digest":    entry(func(e *BaseEntry) { e.Type, e.Link, e.Size = TypeLink, "x", 1 }).Encode(),
		"link's size":      entry(func(e *BaseEntry) { e.Type, e.Link, e.Digest = TypeLink, "x", Digest{} }).Encode(),
		"twice":            Base{Entries: slices.Repeat(entry(func(*BaseEntry) {}).Entries, 2)}.Encode(),
		"below a file":     Base{Entries: []BaseEntry{{Path: "f", Type: TypeFile}, {Path: "f/g", Type: TypeFile}}}.Encode(),
		"out of order":     Base{Entries: []BaseEntry{{Path: "g", Type: TypeFile}, {Path: "f", Type: TypeFile}}}.Encode(),
		"folder with size": entry(func(e *BaseEntry) { e.Type, e.Digest = TypeFolder, Digest{} }).Encode(),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := ParseBase(data); !errors.Is(err, ErrBase) {
				t.Errorf("%v", err)
			}
		})
	}
}

// FuzzParseBase: what parses encodes to the same bytes; the checksum is not the obstacle.
func FuzzParseBase(f *testing.F) {
	b := Base{Entries: []BaseEntry{
		{Path: "d", Type: TypeFolder, Mode: 0o755},
		{Path: "d/f\n\xff", Type: TypeFile, Mode: 0o644, Size: 3, Digest: Digest{1}},
		{Path: "l", Type: TypeLink, Mode: 0o777, Size: 2, Link: ".."},
	}}
	enc := b.Encode()
	f.Add(enc[:len(enc)-sha256.Size])
	f.Add([]byte(baseMagic))
	f.Fuzz(func(t *testing.T, body []byte) {
		data := sealBase(body)
		got, err := ParseBase(data)
		if err != nil {
			if !errors.Is(err, ErrBase) {
				t.Fatal(err)
			}
			return
		}
		if !bytes.Equal(got.Encode(), data) {
			t.Fatal("not the same bytes")
		}
		for _, e := range got.Entries {
			if !filepath.IsLocal(e.Path) {
				t.Fatalf("%q", e.Path)
			}
		}
	})
}

// manyFiles makes n files of 1 to 8 KiB in folders of 25, as in a repository.
func manyFiles(t testing.TB, dir string, n int) {
	t.Helper()
	text := bytes.Repeat([]byte("a line of a program's text\n"), 400)
	for i := range n {
		folder := fmt.Sprintf("%s/p%d/q%d", dir, i/1000, i/25)
		if i%25 == 0 {
			if err := os.MkdirAll(folder, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(fmt.Sprintf("%s/f%d.go", folder, i), text[:1024+i*37%7168], 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func ownCPU(t testing.TB) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestCopyTreeMeasure prints what 50,000 files cost beside cp -r.
func TestCopyTreeMeasure(t *testing.T) {
	if os.Getenv("AGENTSHIM_MEASURE") == "" {
		t.Skip("set AGENTSHIM_MEASURE to measure")
	}
	src := t.TempDir()
	manyFiles(t, src, 50_000)
	for range 3 {
		dst := filepath.Join(t.TempDir(), "copy")
		start := time.Now()
		cmd := exec.Command("cp", "-r", src, dst)
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		cp, cpCPU := time.Since(start), cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()
		dst = t.TempDir()
		start = time.Now()
		before := ownCPU(t)
		base, _ := mustCopy(t, src, dst, CopyOptions{})
		ours, oursCPU := time.Since(start), ownCPU(t)-before
		start = time.Now()
		data := base.Encode()
		encode := time.Since(start)
		start = time.Now()
		if _, err := ParseBase(data); err != nil {
			t.Fatal(err)
		}
		t.Logf("cp -r %v (%v of CPU), CopyTree %v (%v of CPU): %.2f; base %d bytes, encode %v, parse %v", cp, cpCPU, ours, oursCPU, float64(ours)/float64(cp), len(data), encode, time.Since(start))
	}
}
