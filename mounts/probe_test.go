package mounts

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/harness"
	"github.com/google/go-cmp/cmp"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// world is a folder on the real file system with a fake proc and passwd beside it.
type world struct {
	t     *testing.T
	root  string
	paths ProbePaths
}

func newWorld(t *testing.T) *world {
	t.Helper()
	// unix(7): a socket's path has at most 108 bytes, and t.TempDir may be longer.
	root, err := os.MkdirTemp("", "m")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if root, err = filepath.EvalSymlinks(root); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, root: root}
	w.dir("src/proj")
	w.dir("home/me")
	w.file("fake/proc/self/mountinfo", "1 0 8:1 / / rw - ext4 /dev/sda rw\n")
	w.file("fake/proc/net/unix", "Num       RefCount Protocol Flags    Type St Inode Path\n")
	w.file("fake/passwd", "")
	w.paths = ProbePaths{
		Home: w.at("home/me"), UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()),
		Proc: w.at("fake/proc"), Passwd: w.at("fake/passwd"), SELinux: w.at("fake/enforce"),
	}
	return w
}

func (w *world) at(rel string) string { return filepath.Join(w.root, rel) }

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) dir(rel string) {
	w.t.Helper()
	w.must(os.MkdirAll(w.at(rel), 0o755))
}

func (w *world) file(rel, text string) string {
	w.t.Helper()
	w.dir(filepath.Dir(rel))
	w.must(os.WriteFile(w.at(rel), []byte(text), 0o644))
	return w.at(rel)
}

func (w *world) link(to, rel string) string {
	w.t.Helper()
	w.must(os.Symlink(to, w.at(rel)))
	return w.at(rel)
}

// listen opens a really listening socket of that network at path.
func (w *world) listen(network, path string) {
	w.t.Helper()
	addr := &net.UnixAddr{Net: network, Name: path}
	if network == "unixgram" {
		c, err := net.ListenUnixgram(network, addr)
		w.must(err)
		w.t.Cleanup(func() { c.Close() })
		return
	}
	l, err := net.ListenUnix(network, addr)
	w.must(err)
	w.t.Cleanup(func() { l.Close() })
}

func (w *world) harness(sources ...string) harness.Harness {
	h := harness.Harness{Dir: w.at("src/proj")}
	for i, s := range sources {
		h.Mounts = append(h.Mounts, harness.Mount{Source: s, Target: "/m" + string(rune('a'+i))})
	}
	return h
}

// probe probes one source and gives its entry.
func (w *world) probe(source string) Source {
	w.t.Helper()
	f, err := Probe(w.harness(source), w.paths)
	w.must(err)
	for _, s := range f.Sources {
		return s
	}
	w.t.Fatalf("no entry for %q", source)
	return Source{}
}

func TestProbeResolves(t *testing.T) {
	w := newWorld(t)
	w.dir("real/deep")
	w.file("real/f", "x")
	w.file("home/me/h", "x")
	w.dir("src/proj/sub dir,x:y")
	w.dir("src/proj/n\nl")
	w.link("../real", "src/link")
	w.link("deep", "real/inner")
	w.link("f", "real/filelink")
	for _, tc := range []struct{ source, key, want string }{
		{".", w.at("src/proj") + "/.", w.at("src/proj")},
		{"./", w.at("src/proj") + "/./", w.at("src/proj")},
		{"~/h", w.at("home/me/h"), w.at("home/me/h")},
		{w.at("real/f"), w.at("real/f"), w.at("real/f")},
		{"../link", w.at("src/proj") + "/../link", w.at("real")},
		{"../link/inner", w.at("src/proj") + "/../link/inner", w.at("real/deep")},
		{"../link/filelink", w.at("src/proj") + "/../link/filelink", w.at("real/f")},
		// The kernel's "..", not the text's: link/.. is the parent of what link names.
		{"../link/../real", w.at("src/proj") + "/../link/../real", w.at("real")},
		{"sub dir,x:y", w.at("src/proj") + "/sub dir,x:y", w.at("src/proj/sub dir,x:y")},
		{"n\nl", w.at("src/proj") + "/n\nl", w.at("src/proj/n\nl")},
	} {
		t.Run(tc.source, func(t *testing.T) {
			f, err := Probe(w.harness(tc.source), w.paths)
			if err != nil {
				t.Fatal(err)
			}
			got, ok := f.Sources[tc.key]
			if !ok {
				t.Fatalf("no key %q in %v", tc.key, f.Sources)
			}
			var st unix.Stat_t
			if err := unix.Lstat(tc.want, &st); err != nil {
				t.Fatal(err)
			}
			want := Source{
				Path: tc.want, Dir: st.Mode&unix.S_IFMT == unix.S_IFDIR, Dev: st.Dev, Ino: st.Ino,
				UID: st.Uid, GID: st.Gid, Mode: st.Mode & 0o7777, NoExec: got.NoExec,
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// M04 and kinds of files; the tree is the same afterwards.
func TestProbeRefuses(t *testing.T) {
	w := newWorld(t)
	w.link("nowhere", "src/dangling")
	w.link("loop", "src/loop")
	w.file("src/f", "")
	w.listen("unix", w.at("src/sock"))
	w.link("sock", "src/socklink")
	w.must(unix.Mkfifo(w.at("src/fifo"), 0o600))
	for _, tc := range []struct {
		name, source, reason string
		err                  error
	}{
		{"missing", w.at("src/none"), "does not exist", fs.ErrNotExist},
		{"missing deep", w.at("src/none/a/b"), "does not exist", fs.ErrNotExist},
		{"missing relative", "none", "does not exist", fs.ErrNotExist},
		{"missing in home", "~/none", "does not exist", fs.ErrNotExist},
		{"dangling link", w.at("src/dangling"), `link to "nowhere"`, fs.ErrNotExist},
		{"loop", w.at("src/loop"), "circle", unix.ELOOP},
		{"file as folder", w.at("src/f/x"), "can't be opened", unix.ENOTDIR},
		{"socket", w.at("src/sock"), "is a socket", nil},
		{"link to a socket", w.at("src/socklink"), "is a socket", nil},
		{"FIFO", w.at("src/fifo"), "is a FIFO", nil},
		{"device", "/dev/null", "is a character device", nil},
		{"tilde", "~", "only \"~/\" is expanded", nil},
		{"other's home", "~eve", "only \"~/\" is expanded", nil},
		{"empty", "", "empty", nil},
		{"NUL", "a\x00b", "can't be opened", unix.EINVAL},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := tree(t, w.root)
			f, err := Probe(w.harness(tc.source), w.paths)
			p := problemAt(err, "$.mounts[0].source", ErrSource)
			if p == nil {
				t.Fatalf("got %v; want ErrSource", err)
			}
			if !strings.Contains(p.Reason, tc.reason) || tc.err != nil && !errors.Is(p, tc.err) {
				t.Errorf("problem = %v; want %q, %v", p, tc.reason, tc.err)
			}
			if len(f.Sources) != 0 {
				t.Errorf("facts beside an error: %v", f.Sources)
			}
			if diff := cmp.Diff(before, tree(t, w.root)); diff != "" {
				t.Errorf("the tree changed:\n%s", diff)
			}
		})
	}
}

// The path that Probe records is that of the file it looked at, or it is an error:
// here the kernel says "f (deleted)", and another file has that very name.
func TestProbePathBelongsToTheFile(t *testing.T) {
	w := newWorld(t)
	f, err := os.Open(w.file("src/f", "x"))
	w.must(err)
	defer f.Close()
	fd := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	if got := w.probe(fd).Path; got != w.at("src/f") {
		t.Fatalf("control: path = %q", got)
	}
	w.must(os.Remove(w.at("src/f")))
	w.file("src/f (deleted)", "y")
	_, err = Probe(w.harness(fd), w.paths)
	if problemAt(err, "$.mounts[0].source", ErrSource) == nil {
		t.Errorf("got %v; want ErrSource", err)
	}
}

// tree lists every path below root with its mode and change time.
func tree(t *testing.T, root string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		out = append(out, p+" "+fi.Mode().String()+" "+fi.ModTime().String())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestProbeChangesNothing(t *testing.T) {
	w := newWorld(t)
	w.dir("data")
	h := w.harness(w.at("data"), "~/../me", ".")
	h.Mounts[1].Target, h.Mounts[2].Target = "/ma/not/there", "/ma/x"
	w.paths.Protected = []string{w.at("state/never")}
	before := tree(t, w.root)
	if _, err := Probe(h, w.paths); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, tree(t, w.root)); diff != "" {
		t.Errorf("the tree changed:\n%s", diff)
	}
}

func TestProbeReportsEverySource(t *testing.T) {
	w := newWorld(t)
	h := w.harness("none", ".", "~x")
	h.Workspace = &harness.Workspace{Source: "gone"}
	_, err := Probe(h, w.paths)
	for _, at := range []string{"$.workspace.source", "$.mounts[0].source", "$.mounts[2].source"} {
		if problemAt(err, at, ErrSource) == nil {
			t.Errorf("%s is not in %v", at, err)
		}
	}
	if problemAt(err, "$.mounts[1].source", ErrSource) != nil {
		t.Errorf("the good source is reported: %v", err)
	}
}

func TestProbeSkipsWorkspaceNone(t *testing.T) {
	w := newWorld(t)
	w.must(os.RemoveAll(w.at("fake/proc")))
	f, err := Probe(harness.Harness{Dir: w.root, Workspace: &harness.Workspace{Source: "gone", Mode: "none"}}, w.paths)
	if err != nil || len(f.Sources) != 0 {
		t.Errorf("Probe = %v, %v", f, err)
	}
}

// A66: real sockets, seen by this kernel.
func TestProbeFindsRealSockets(t *testing.T) {
	w := newWorld(t)
	w.paths.Proc = ""
	for _, network := range []string{"unix", "unixpacket", "unixgram"} {
		w.dir("data/" + network + "/deep")
		w.link("../"+network+"/deep", "src/"+network)
		w.must(os.MkdirAll(w.at("data/"+network), 0o755))
		w.link(w.at("data/"+network+"/deep"), "data/"+network+"-link")
		t.Run(network, func(t *testing.T) {
			if s := w.probe(w.at("data/" + network)); len(s.Sockets) != 0 {
				t.Fatalf("control: sockets before any listens: %q", s.Sockets)
			}
			// Bound through a link: the kernel keeps that name.
			w.listen(network, w.at("data/"+network+"-link/s x"))
			want := []string{w.at("data/" + network + "/deep/s x")}
			for _, source := range []string{"data/" + network, "data/" + network + "/deep", "data/" + network + "-link"} {
				if s := w.probe(w.at(source)); !slices.Equal(s.Sockets, want) {
					t.Errorf("%s: sockets = %q, want %q", source, s.Sockets, want)
				}
			}
			if s := w.probe(w.at("src/proj")); len(s.Sockets) != 0 {
				t.Errorf("a folder beside it has sockets: %q", s.Sockets)
			}
		})
	}
}

func TestProbeFindsRelativeRealSocket(t *testing.T) {
	w := newWorld(t)
	w.paths.Proc = ""
	w.dir("data/deep")
	t.Chdir(w.at("data/deep"))
	w.listen("unix", "rel.s")
	want := []string{w.at("data/deep/rel.s")}
	if s := w.probe(w.at("data")); !slices.Equal(s.Sockets, want) {
		t.Errorf("found by a process's working folder: %q, want %q", s.Sockets, want)
	}
	t.Chdir("/")
	if s := w.probe(w.at("data/deep")); !slices.Equal(s.Sockets, want) {
		t.Errorf("found directly in the source: %q, want %q", s.Sockets, want)
	}
}

// deadSocket leaves a socket file that nothing listens on.
func (w *world) deadSocket(rel string) string {
	w.t.Helper()
	w.dir(filepath.Dir(rel))
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	w.must(err)
	defer unix.Close(fd)
	w.must(unix.Bind(fd, &unix.SockaddrUnix{Name: w.at(rel)}))
	return w.at(rel)
}

func TestProbeSocketTable(t *testing.T) {
	const (
		listening = "0000: 00000002 00000000 00010000 0001 01  5652 "
		datagram  = "0000: 00000002 00000000 00000000 0002 01  5652 "
		packet    = "0000: 00000002 00000000 00010000 0005 01  5652 "
		connected = "0000: 00000003 00000000 00000000 0001 03  5652 "
	)
	for _, tc := range []struct {
		name, line, at string
		want           bool
	}{
		{"listening stream", listening + "/ROOT/data/s", "data/s", true},
		{"listening packet", packet + "/ROOT/data/s", "data/s", true},
		{"bound datagram", datagram + "/ROOT/data/s", "data/s", true},
		{"connected stream", connected + "/ROOT/data/s", "data/s", false},
		{"deep", listening + "/ROOT/data/a/b/s", "data/a/b/s", true},
		{"gone", listening + "/ROOT/data/s", "", false},
		{"folder gone", listening + "/ROOT/data/x/s", "", false},
		{"beside", listening + "/ROOT/data2/s", "data2/s", false},
		{"dots", listening + "/ROOT/src/../data/s", "data/s", true},
		{"line feed in its name", listening + "/ROOT/data/a\nb", "data/a\nb", true},
		{"blank at the end", listening + "/ROOT/data/a ", "data/a ", true},
		{"relative", listening + "s", "data/s", true},
		{"relative with at sign", listening + "@s", "data/@s", true},
		{"relative out of the source", listening + "../data2/s", "data2/s", false},
		{"abstract", listening + "@/ROOT/data/s", "data/s", false},
		{"unnamed", listening, "", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			w.dir("data")
			if tc.at != "" {
				w.deadSocket(tc.at)
			}
			w.file("fake/proc/net/unix", "Num RefCount\n"+connected+"\n"+strings.ReplaceAll(tc.line, "/ROOT", w.root)+"\n"+connected+"\n")
			var want []string
			if tc.want {
				want = []string{w.at(tc.at)}
			}
			if got := w.probe(w.at("data")).Sockets; !slices.Equal(got, want) {
				t.Errorf("sockets = %q, want %q", got, want)
			}
		})
	}
}

// A bind mount shows the same tree elsewhere, so a socket bound there is here too.
func TestProbeSocketThroughAnotherMount(t *testing.T) {
	w := newWorld(t)
	w.dir("data/sub")
	w.deadSocket("alias/s")
	w.file("fake/proc/net/unix", "Num\n0000: 00000002 00000000 00010000 0001 01  5652 "+w.at("alias/s")+"\n")
	if got := w.probe(w.at("data")).Sockets; len(got) != 0 {
		t.Fatalf("control: sockets = %q", got)
	}
	w.file("fake/proc/self/mountinfo", "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 8:1 "+w.at("data/sub")+" "+w.at("alias")+" rw - ext4 /dev/sda rw\n")
	if got := w.probe(w.at("data")).Sockets; !slices.Equal(got, []string{w.at("alias/s")}) {
		t.Errorf("sockets = %q", got)
	}
}

// A66: by name, whether or not this network namespace knows a listener.
func TestProbeKnownSockets(t *testing.T) {
	for _, rel := range []string{
		"docker.sock", "podman/podman.sock", "containerd.sock", "S.gpg-agent.ssh", ".gnupg/S.gpg-agent", "bus",
		"system_bus_socket", ".X11-unix/X0", "wayland-0", "ssh-agent.socket", ".docker/run/docker.sock",
	} {
		t.Run(rel, func(t *testing.T) {
			w := newWorld(t)
			w.deadSocket("data/" + rel)
			if got := w.probe(w.at("data")).Sockets; !slices.Equal(got, []string{w.at("data/" + rel)}) {
				t.Errorf("sockets = %q", got)
			}
		})
	}
	t.Run("named by the environment", func(t *testing.T) {
		w := newWorld(t)
		s := w.deadSocket("data/deep/agent.1234")
		if got := w.probe(w.at("data")).Sockets; len(got) != 0 {
			t.Fatalf("control: sockets = %q", got)
		}
		w.paths.KnownSockets = []string{"", w.link(s, "src/agent"), w.at("gone")}
		if got := w.probe(w.at("data")).Sockets; !slices.Equal(got, []string{s}) {
			t.Errorf("sockets = %q", got)
		}
	})
	t.Run("a regular file of that name in a folder", func(t *testing.T) {
		w := newWorld(t)
		w.file("data/docker.sock", "")
		if got := w.probe(w.at("data")).Sockets; len(got) != 0 {
			t.Errorf("sockets = %q", got)
		}
	})
}

func TestProbeSubmounts(t *testing.T) {
	w := newWorld(t)
	w.dir("data")
	escaped := strings.NewReplacer(" ", `\040`, "\n", `\012`, `\`, `\134`).Replace(w.at("data/a b\nc\\d"))
	w.file("fake/proc/self/mountinfo", strings.Join([]string{
		"1 0 8:1 / / rw - ext4 /dev/sda rw",
		"2 1 8:2 / " + w.at("data") + " rw - ext4 /dev/sdb rw",
		"3 2 0:9 / " + w.at("data/z/deep") + " rw,nosuid shared:4 master:2 - tmpfs tmpfs rw",
		"4 2 0:10 / " + escaped + " rw - tmpfs tmpfs rw",
		"5 1 0:11 / " + w.at("data2") + " rw - tmpfs tmpfs rw", "",
	}, "\n"))
	want := []string{w.at("data/a b\nc\\d"), w.at("data/z/deep")}
	if got := w.probe(w.at("data")).Submounts; !slices.Equal(got, want) {
		t.Errorf("submounts = %q, want %q", got, want)
	}
	if got := w.probe(w.at("src")).Submounts; len(got) != 0 {
		t.Errorf("submounts of a folder beside = %q", got)
	}
}

// TestProbeNoExec compares with the mount table of the machine itself.
func TestProbeNoExec(t *testing.T) {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	h := &host{mounts: mounts}
	for _, dir := range []string{"/", "/proc", "/sys", "/dev", "/dev/shm", w.root} {
		t.Run(dir, func(t *testing.T) {
			var options string
			for _, m := range mounts {
				if atOrBelow(dir, m.Mountpoint) && len(m.Mountpoint) >= len(mountOf(h, dir)) {
					options = m.Options
				}
			}
			want := slices.Contains(strings.Split(options, ","), "noexec")
			if got := w.probe(dir).NoExec; got != want {
				t.Errorf("NoExec = %v with options %q", got, options)
			}
		})
	}
}

// mountOf is the longest mount point that holds dir.
func mountOf(h *host, dir string) string {
	longest := ""
	for _, m := range h.mounts {
		if atOrBelow(dir, m.Mountpoint) && len(m.Mountpoint) > len(longest) {
			longest = m.Mountpoint
		}
	}
	return longest
}

// U07.
func TestGroupOnly(t *testing.T) {
	const dir, file = unix.S_IFDIR, unix.S_IFREG
	for _, tc := range []struct {
		name     string
		mode     uint32
		uid, gid uint32
		want     bool
	}{
		{"folder by group", dir | 0o750, 1, 77, true},
		{"file by group", file | 0o640, 1, 77, true},
		{"owner", dir | 0o750, 1000, 77, false},
		{"primary group", dir | 0o750, 1, 1000, false},
		{"everyone", dir | 0o755, 1, 77, false},
		{"everyone may list but not enter", dir | 0o754, 1, 77, true},
		{"not even the group", dir | 0o700, 1, 77, false},
		{"another group", dir | 0o750, 1, 78, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			st := &unix.Stat_t{Mode: tc.mode, Uid: tc.uid, Gid: tc.gid}
			if got := groupOnly(st, 1000, 1000, []uint32{1000, 77}); got != tc.want {
				t.Errorf("groupOnly = %v", got)
			}
			if groupOnly(st, 0, 0, []uint32{77}) {
				t.Error("root needs no group")
			}
		})
	}
}

func TestProbeHomeRoots(t *testing.T) {
	w := newWorld(t)
	w.dir("accounts/eve")
	w.dir("accounts/bob")
	w.link("eve", "accounts/link")
	w.file("accounts/file", "")
	w.file("fake/passwd", strings.Join([]string{
		"root:x:0:0:root:/:/bin/sh",
		"daemon:x:1:1::/usr/sbin:/usr/sbin/nologin",
		"nobody:x:9:9::/nonexistent:/bin/false",
		"bob:x:1:1::" + w.at("accounts/bob") + ":/bin/sh",
		"link:x:2:2::" + w.at("accounts/link") + ":/bin/sh",
		"file:x:3:3::" + w.at("accounts/file") + ":/bin/sh",
		"rel:x:4:4::accounts/bob:/bin/sh",
		"# a comment", "",
	}, "\n"))
	f, err := Probe(w.harness("."), w.paths)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{w.at("accounts/bob"), w.at("accounts/eve"), w.at("home/me")}
	if diff := cmp.Diff(want, f.HomeRoots); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestProbeProtected(t *testing.T) {
	w := newWorld(t)
	w.dir("big/lib")
	w.link("big/lib", "lib")
	w.paths.Protected = []string{w.at("lib") + "/engine/never", w.at("big/lib/engine/never")}
	f, err := Probe(w.harness("."), w.paths)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{w.at("big/lib/engine/never"), w.at("lib/engine/never")}
	if diff := cmp.Diff(want, f.Protected); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	w.paths.Protected = []string{"relative"}
	if _, err := Probe(w.harness("."), w.paths); err == nil {
		t.Error("a relative protected folder is taken")
	}
}

func TestProbeNested(t *testing.T) {
	w := newWorld(t)
	w.dir("outer/dir/deep")
	w.file("outer/file", "")
	w.link("dir", "outer/link")
	for _, tc := range []struct{ target, want string }{
		{"/o/dir", NodeDir},
		{"/o/dir/deep", NodeDir},
		{"/o/file", NodeFile},
		{"/o/link", NodeOther},
		{"/o/link/deep", NodeOther},
		{"/o/file/x", NodeOther},
		{"/o/none", ""},
		{"/o/none/x", ""},
	} {
		t.Run(tc.target, func(t *testing.T) {
			h := harness.Harness{Dir: w.root, Mounts: []harness.Mount{
				{Source: "src", Target: tc.target}, {Source: "outer", Target: "/o"}, {Source: "src", Target: "/elsewhere"},
			}}
			f, err := Probe(h, w.paths)
			if err != nil {
				t.Fatal(err)
			}
			want := map[string]string{}
			if tc.want != "" {
				want[w.at("outer"+strings.TrimPrefix(tc.target, "/o"))] = tc.want
			}
			if diff := cmp.Diff(want, f.Nested); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestProbeSELinux(t *testing.T) {
	w := newWorld(t)
	for _, tc := range []struct {
		text string
		want bool
	}{{"1", true}, {"1\n", true}, {"0", false}, {"", false}} {
		w.file("fake/enforce", tc.text)
		if f, err := Probe(w.harness("."), w.paths); err != nil || f.SELinux != tc.want {
			t.Errorf("enforce %q: SELinux = %v, %v", tc.text, f.SELinux, err)
		}
	}
}

// What can't be read is an error, never an empty answer.
func TestProbeFailsClosed(t *testing.T) {
	for _, lost := range []string{"fake/proc/self/mountinfo", "fake/proc/net/unix", "fake/passwd"} {
		t.Run(lost, func(t *testing.T) {
			w := newWorld(t)
			if _, err := Probe(w.harness("."), w.paths); err != nil {
				t.Fatalf("control: %v", err)
			}
			w.must(os.Remove(w.at(lost)))
			f, err := Probe(w.harness("."), w.paths)
			if !errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrSource) || len(f.Sources) != 0 {
				t.Errorf("Probe = %v, %v", f, err)
			}
		})
	}
	t.Run("malformed mount table", func(t *testing.T) {
		w := newWorld(t)
		w.file("fake/proc/self/mountinfo", "nonsense\n")
		if _, err := Probe(w.harness("."), w.paths); err == nil {
			t.Error("it is taken")
		}
	})
}

// Probe and Compile together, on the real host's tables.
func TestProbeThenCompile(t *testing.T) {
	w := newWorld(t)
	w.paths.Proc, w.paths.Passwd = "", ""
	h := w.harness("../extra")
	w.dir("src/extra")
	h.Workspace = &harness.Workspace{Source: ".", Mode: "writable"}
	h.Mounts[0].Target = "sub"
	f, err := Probe(h, w.paths)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Compile(h, f, Target{})
	p := wantProblem(t, err, "$.mounts[0].target", ErrRefused)
	if !strings.Contains(p.Reason, w.at("src/proj/sub")) {
		t.Errorf("reason %q does not name the path", p.Reason)
	}
	w.dir("src/proj/sub")
	if f, err = Probe(h, w.paths); err != nil {
		t.Fatal(err)
	}
	if f.Guards, err = ProbeWorkspaceGuards(h, f); err != nil {
		t.Fatal(err)
	}
	if _, err := Compile(h, f, Target{}); err != nil {
		t.Errorf("with the folder in place: %v", err)
	}
	w.listen("unix", w.at("src/proj/s"))
	if f, err = Probe(h, w.paths); err != nil {
		t.Fatal(err)
	}
	_, err = Compile(h, f, Target{})
	wantProblem(t, err, "$.workspace.source", ErrRefused)
}
