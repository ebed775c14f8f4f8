package integration

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// toolSource is a program that tries what no busybox applet does.
const toolSource = `package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
)

func main() {
	var err error
	switch os.Args[1] {
	case "euid":
		fmt.Println(os.Geteuid())
	case "open":
		_, err = syscall.Open(os.Args[2], syscall.O_RDWR|syscall.O_NONBLOCK, 0)
	case "dial":
		_, err = net.Dial("unix", os.Args[2])
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		fmt.Println(int(errno))
	} else if err == nil && os.Args[1] != "euid" {
		fmt.Println("open")
	}
}
`

// tool builds toolSource once, static.
var tool = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "agentshim-test-tool-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	source, program := filepath.Join(dir, "main.go"), filepath.Join(dir, "tool")
	if err := os.WriteFile(source, []byte(toolSource), 0o600); err != nil {
		return nil, err
	}
	build := exec.Command("go", "build", "-o", program, source)
	build.Dir, build.Env = dir, append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	return os.ReadFile(program)
})

func placeTool(t *testing.T, path string, mode os.FileMode) string {
	t.Helper()
	program, err := tool()
	if err != nil {
		t.Fatal(err)
	}
	return place(t, path, program, mode)
}

// tree lists everything below dir with its kind, mode, owner, size and time of change.
func tree(t *testing.T, dir string) []string {
	t.Helper()
	var list []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		list = append(list, fmt.Sprintf("%s %v %d:%d %d %v", path, info.Mode(), st.Uid, st.Gid, st.Size, info.ModTime()))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// untouched notes what is below the folders; the function it returns fails t if
// anything there is not as it was.
func untouched(t *testing.T, dirs ...string) func() {
	t.Helper()
	list := func() (all []string) {
		for _, dir := range dirs {
			all = append(all, tree(t, dir)...)
		}
		return all
	}
	before := list()
	return func() {
		t.Helper()
		if after := list(); !slices.Equal(before, after) {
			t.Errorf("host files changed:\nbefore\n%s\nafter\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
		}
	}
}

// T10 (nothing is masked, so no name appears), M15's plain part: a read-only
// workspace can't be changed, a writable one can.
func TestWorkspace(t *testing.T) {
	const script = `
echo "names=$(ls -A | tr '\n' ' ')"
echo "new=$( (touch new) 2>&1)"
echo "old=$( (echo y >> old) 2>&1)"
echo "deep=$( (rm sub/file) 2>&1)"
echo "mode=$( (chmod 0600 old) 2>&1)"
echo "remount=$( (mount -o remount,rw /workspace) 2>&1 | tail -1)"
echo "cwd=$PWD"
`
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		place(t, filepath.Join(dir, "old"), []byte("x"), 0o644)
		place(t, filepath.Join(dir, "sub/file"), nil, 0o644)
		place(t, filepath.Join(dir, ".git/config"), nil, 0o644)
		s.own(t, dir)
		t.Run("read-only", func(t *testing.T) {
			check := untouched(t, dir)
			r := s.sh(t, spec{"workspace": map[string]any{"source": dir}}, script).ok(t)
			const erofs = "Read-only file system"
			got := pairs(t, r.Stdout)
			for _, name := range []string{"new", "old", "deep", "mode"} {
				if !strings.Contains(got[name], erofs) {
					t.Errorf("%s: %q, want %s", name, got[name], erofs)
				}
			}
			if !strings.Contains(got["remount"], "denied") && !strings.Contains(got["remount"], "not permitted") {
				t.Errorf("remount: %q", got["remount"])
			}
			wantPairs(t, r.Stdout, map[string]string{"names": ".git old sub ", "cwd": "/workspace"})
			check()
		})
		t.Run("writable", func(t *testing.T) {
			r := s.sh(t, spec{"workspace": map[string]any{"source": dir, "target": "/src", "mode": "writable"}}, script).ok(t)
			wantPairs(t, r.Stdout, map[string]string{"names": ".git old sub ", "new": "", "old": "", "deep": "", "mode": "", "cwd": "/src"})
			if b, err := os.ReadFile(filepath.Join(dir, "old")); err != nil || string(b) != "xy\n" {
				t.Errorf("old holds %q, %v", b, err)
			}
		})
		t.Run("none", func(t *testing.T) {
			r := s.sh(t, spec{"workspace": map[string]any{"source": dir, "mode": "none"}}, `pwd; ls -d /workspace 2>/dev/null`)
			if r.Stdout != "/home/agent\n" {
				t.Errorf("printed %q", r.Stdout)
			}
		})
	})
}

// oddNames are names that end options, fields or words somewhere.
var oddNames = []string{
	"d,c", "d:c", `q"q`, "it's", "two words", " lead", "trail ", "-dash", "--flag=x", "a=b", "ro,readonly", "x,target=etc", "$HOME", "`id`", `b\s`, "é→", "%s", "*", "#", "~",
}

// M01, M02, A61: names reach the engine as they are, as source and as target.
func TestMountNames(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		var list []map[string]any
		want := map[string]string{}
		for i, name := range oddNames {
			place(t, filepath.Join(dir, name, "f"), fmt.Appendf(nil, "source %d", i), 0o644)
			target := filepath.Join("/targets", name)
			list = append(list,
				map[string]any{"source": filepath.Join(dir, name), "target": fmt.Sprintf("/sources/%d", i)},
				map[string]any{"source": filepath.Join(dir, name), "target": target})
			want[fmt.Sprintf("/sources/%d/f", i)] = fmt.Sprintf("source %d", i)
			want[target+"/f"] = fmt.Sprintf("source %d", i)
		}
		s.own(t, dir)
		r := s.sh(t, spec{"mounts": list}, `for f in /sources/*/f /targets/*/f; do printf '%s=' "$f"; cat "$f"; echo; done
printf '/targets/ lead/f='; cat '/targets/ lead/f'; echo`).ok(t)
		got := map[string]string{}
		for line := range strings.Lines(r.Stdout) { // names hold "=": the value follows the last
			line = strings.TrimSuffix(line, "\n")
			i := strings.LastIndexByte(line, '=')
			got[line[:i]] = line[i+1:]
		}
		for path, content := range want {
			if got[path] != content {
				t.Errorf("%q holds %q, want %q", path, got[path], content)
			}
		}
		for name, args := range map[string][]string{
			"M01": {"--mount", "type=bind,source=" + filepath.Join(dir, "d,c") + ",target=/m"},
			"M02": {"-v", filepath.Join(dir, "d:c") + ":/m"},
		} {
			c := s.bare(t, append(append([]string{"run", "--rm", "--network=none"}, args...), "agentshim/hello:test", "cat", "/m/f")...)
			if c.Code == 0 && strings.HasPrefix(c.Stdout, "source") {
				t.Errorf("control %s: the bare engine takes %q", name, args)
			}
		}
	})
}

// A61: what can't be passed on unchanged is refused.
func TestMountNamesRefused(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		for _, tc := range []struct{ name, source, target string }{
			{"line feed in source", dir + "/a\nb", "/m"},
			{"carriage return in source", dir + "/a\r\nb", "/m"},
			{"line feed in target", dir, "/a\nb"},
			{"escape in target", dir, "/a\x1b[2J"},
			{"variable", "$HOME/x", "/m"},
			{"variable in braces", dir + "/${USER}", "/m"},
			{"another user's home", "~root/x", "/m"},
			{"home alone", "~", "/m"},
		} {
			t.Run(tc.name, func(t *testing.T) {
				r := s.sh(t, spec{"mounts": []any{map[string]any{"source": tc.source, "target": tc.target}}}, "true").refused(t, shim.ReasonSpecInvalid)
				wantText(t, r.Stderr, "$.mounts[0].")
				if strings.ContainsAny(r.Stderr, "\x1b\r") {
					t.Errorf("control characters on stderr: %q", r.Stderr)
				}
			})
		}
		t.Run("not UTF-8", func(t *testing.T) {
			file := s.write(t, spec{"mounts": []any{map[string]any{"source": dir + "/PLACE", "target": "/m"}}})
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, bytes.Replace(b, []byte("PLACE"), []byte("\xff"), 1), 0o644); err != nil {
				t.Fatal(err)
			}
			s.exec(t, file, "true").refused(t, shim.ReasonSpecInvalid)
		})
	})
}

// M06, M07, M08: relative and ~/ sources, single files, read-only by default.
func TestPlainMounts(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		u, err := user.Lookup(s.account)
		if err != nil {
			t.Fatal(err)
		}
		home, err := os.MkdirTemp(u.HomeDir, "agentshim-test-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(home) })
		place(t, filepath.Join(home, "f"), []byte("home"), 0o644)
		dir := s.folder(t)
		one := place(t, filepath.Join(dir, "one"), []byte("one"), 0o644)
		file := s.write(t, spec{"mounts": []map[string]any{
			{"source": "./rel/dir", "target": "/rel"},
			{"source": "rel/dir/../file", "target": "/file"},
			{"source": "~/" + filepath.Base(home), "target": "~/data"},
			{"source": one, "target": "~/one", "writable": true},
			{"source": dir, "target": "/dir", "writable": true},
		}})
		beside := filepath.Dir(file)
		place(t, filepath.Join(beside, "rel/dir/f"), []byte("relative"), 0o644)
		place(t, filepath.Join(beside, "rel/file"), []byte("file"), 0o644)
		for _, d := range []string{dir, filepath.Join(beside, "rel"), home} {
			s.own(t, d)
		}
		if err := os.Chmod(home, 0o755); err != nil {
			t.Fatal(err)
		}
		r := s.exec(t, file, `
echo "rel=$(cat /rel/f)"; echo "file=$(cat /file)"; echo "home=$(cat ~/data/f)"
echo "dir=$( (touch /rel/x) 2>&1)"; echo "onefile=$( (echo x >> /file) 2>&1)"
echo "rw=$( (echo new > ~/one) 2>&1)$(cat ~/one)"
touch /dir/t; echo "rename=$( (mv /dir/t ~/one) 2>&1)"
`).ok(t)
		wantPairs(t, r.Stdout, map[string]string{"rel": "relative", "file": "file", "home": "home", "rw": "new"})
		got := pairs(t, r.Stdout)
		wantText(t, got["dir"], "Read-only file system")
		wantText(t, got["onefile"], "Read-only file system")
		wantText(t, got["rename"], "busy") // M07
		wantText(t, r.Stderr, "agentshim: warning: $.mounts[3]", "EBUSY")
		if b, err := os.ReadFile(one); err != nil || string(b) != "new\n" {
			t.Errorf("on the host: %q, %v", b, err)
		}
	})
}

// M04, T08, T09, A60: nothing is created on the host for a mount that can't be.
func TestMissingMounts(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		place(t, filepath.Join(dir, "ws/here/f"), []byte("outer"), 0o644)
		place(t, filepath.Join(dir, "ws/afile"), nil, 0o644)
		place(t, filepath.Join(dir, "child/f"), []byte("inner"), 0o644)
		s.own(t, dir)
		ws, child := filepath.Join(dir, "ws"), filepath.Join(dir, "child")
		if err := os.Symlink("here", filepath.Join(ws, "link")); err != nil {
			t.Fatal(err)
		}
		check := untouched(t, dir)
		for _, tc := range []struct{ name, mode, source, target, path string }{
			{"M04 source", "writable", filepath.Join(dir, "typo"), "/m", "$.mounts[0].source"},
			{"M04 parent of the source", "writable", filepath.Join(dir, "no/such"), "/m", "$.mounts[0].source"},
			{"T08 nested target", "writable", child, "/workspace/absent", "$.mounts[0].target"},
			{"T08 nested deeper", "writable", child, "here/absent/er", "$.mounts[0].target"},
			{"T08 folder on a file", "writable", child, "/workspace/afile", "$.mounts[0].target"},
			{"T08 through a link", "writable", child, "/workspace/link", "$.mounts[0].target"},
			{"T09 nested in read-only", "read-only", child, "/workspace/absent", "$.mounts[0].target"},
		} {
			t.Run(tc.name, func(t *testing.T) {
				r := s.sh(t, spec{
					"workspace": map[string]any{"source": ws, "mode": tc.mode},
					"mounts":    []any{map[string]any{"source": tc.source, "target": tc.target}},
				}, "true").refused(t, shim.ReasonMount)
				wantText(t, r.Stderr, tc.path)
				check()
			})
		}
		t.Run("existing nested target", func(t *testing.T) {
			r := s.sh(t, spec{
				"workspace": map[string]any{"source": ws, "mode": "writable"},
				"mounts":    []any{map[string]any{"source": child, "target": "here"}},
			}, "cat here/f").ok(t)
			if r.Stdout != "inner" {
				t.Errorf("here/f holds %q", r.Stdout)
			}
			check()
		})
		// Last, as it does create them.
		s.bare(t, "run", "--rm", "--network=none", "-v", ws+":/w", "-v", child+":/w/absent", "agentshim/hello:test", "true")
		if _, err := os.Lstat(filepath.Join(ws, "absent")); err != nil {
			t.Errorf("control T08: the bare engine did not create the target: %v", err)
		}
	})
}

// M12, M18, M20, A59, A73: targets and working folders that are refused.
func TestTargetsRefused(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		mount := func(targets ...string) []map[string]any {
			var list []map[string]any
			for _, target := range targets {
				list = append(list, map[string]any{"source": dir, "target": target})
			}
			return list
		}
		list := []string{
			"/", "//", "/.", "/a/../proc", "/a/..", "../x", "/proc", "/proc/self", "/sys", "/sys/fs/cgroup", "/dev", "/dev/shm", "/dev/shm/x",
			"/run", "/run/x", "/var/run", "/var/run/docker.sock", "/home", "/home/agent", "~/", "/tmp", "/tmp/", "/.agentshim-init", "/.agentshim-init/x",
			"/etc", "/etc/passwd", "/etc/hosts", "/etc/resolv.conf", "relative",
		}
		t.Run("M12 A59", func(t *testing.T) {
			r := s.sh(t, spec{"mounts": mount(append(list, "/fine")...)}, "true").refused(t, shim.ReasonSpecInvalid)
			for i, target := range list {
				if !strings.Contains(r.Stderr, fmt.Sprintf("$.mounts[%d].target: ", i)) {
					t.Errorf("target %q is not refused:\n%s", target, r.Stderr)
				}
			}
			if strings.Contains(r.Stderr, fmt.Sprintf("$.mounts[%d]", len(list))) {
				t.Errorf("/fine is refused:\n%s", r.Stderr)
			}
		})
		t.Run("M18", func(t *testing.T) {
			for name, fields := range map[string]spec{
				"same":       {"mounts": mount("/m", "/m")},
				"cleaned":    {"mounts": mount("/m", "/m/./")},
				"workspace":  {"mounts": mount("/x", "/workspace"), "workspace": map[string]any{"source": dir}},
				"home, both": {"mounts": mount("~/x", "/home/agent/x")},
			} {
				r := s.sh(t, fields, "true").refused(t, shim.ReasonSpecInvalid)
				if !strings.Contains(r.Stderr, "$.mounts[1].target") {
					t.Errorf("%s: %s", name, r.Stderr)
				}
			}
		})
		t.Run("M20 A73", func(t *testing.T) {
			for _, wd := range []string{"/proc/self/fd/7", "/proc", "/sys/fs", "/dev/fd/7", "/a/../proc/1/cwd", "relative", "/tmp/../sys"} {
				r := s.sh(t, spec{"workingDir": wd}, "true").refused(t, shim.ReasonSpecInvalid)
				wantText(t, r.Stderr, "$.workingDir", wd)
			}
		})
		t.Run("control", func(t *testing.T) {
			r := s.sh(t, spec{"mounts": mount("/fine", "/tmp/x", "~/x", "/opt/a/b"), "workingDir": "/opt/a/b"}, "pwd").ok(t)
			if r.Stdout != "/opt/a/b\n" {
				t.Errorf("pwd printed %q", r.Stdout)
			}
		})
	})
}

// M19: a working folder that is not there is refused alike by both engines' runs.
func TestWorkingDir(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		for _, tc := range []struct {
			name, dir string
			refused   bool
		}{
			{"missing", "/no/such", true},
			{"not to be entered", "/root", true},
			{"in the image", "/usr/bin", false},
		} {
			t.Run(tc.name, func(t *testing.T) {
				r := s.sh(t, spec{"workingDir": tc.dir}, "pwd")
				if tc.refused {
					r.refused(t, shim.ReasonMount)
					wantText(t, r.Stderr, tc.dir, "agentshim: hint: workingDir")
				} else if r.ok(t); r.Stdout != tc.dir+"\n" {
					t.Errorf("pwd printed %q", r.Stdout)
				}
			})
		}
		c := s.bare(t, "run", "--rm", "--network=none", "--workdir=/no/such", "agentshim/hello:test", "pwd")
		if created := c.Code == 0; created != (s.engine == "docker") {
			t.Errorf("control: the bare engine ended with %d: %s", c.Code, c.Stderr)
		}
	})
}

// refusedSources gives sources that no file may mount, besides those that depend
// on the run.
func refusedSources(t *testing.T, s setup) []string {
	t.Helper()
	u, err := user.Lookup(s.account)
	if err != nil {
		t.Fatal(err)
	}
	other, err := user.Lookup("agentshim-docker")
	if err != nil {
		t.Fatal(err)
	}
	return []string{
		"/", "/boot", "/etc", "/home", "/root", "/usr", "/var", "/tmp", "/etc/../usr", "/proc", "/proc/sys", "/proc/self/root", "/sys", "/sys/kernel",
		"/dev", "/dev/shm", "/run", "/run/lock", "/var/run", u.HomeDir, other.HomeDir,
		"/var/lib", "/var/lib/docker", "/var/lib/containers", u.HomeDir + "/.local/share/containers", u.HomeDir + "/.local/share",
	}
}

// DESIGN's list of refused sources, M13, M17's roots, A57, A66.
func TestSourcesRefused(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		good, state := s.folder(t), s.private(t)
		links := s.folder(t)
		uid, gid := s.ids(t)
		own := filepath.Join(state, "agentshim/runs")
		for _, dir := range []string{filepath.Dir(own), own} {
			if err := errors.Join(os.Mkdir(dir, 0o700), os.Chown(dir, uid, gid)); err != nil {
				t.Fatal(err)
			}
		}
		for name, to := range map[string]string{"etc": "/etc", "root": "/", "state": own} {
			if err := os.Symlink(to, filepath.Join(links, name)); err != nil {
				t.Fatal(err)
			}
		}
		sources := append(refusedSources(t, s), state, filepath.Dir(own), own,
			fmt.Sprintf("/tmp/agentshim-%d", uid), // the runtime folder
			filepath.Join(links, "etc"), filepath.Join(links, "root"), filepath.Join(links, "root/usr"), filepath.Join(links, "state"))
		sources = slices.DeleteFunc(sources, func(p string) bool {
			_, err := os.Stat(p)
			return err != nil // not on this machine
		})
		var list []map[string]any
		for i, source := range append(sources, good) {
			list = append(list, map[string]any{"source": source, "target": fmt.Sprintf("/m/%d", i)})
		}
		r := s.call(t, call{State: state}, "exec", "--spec", s.write(t, spec{"mounts": list}), "--", "true").refused(t, shim.ReasonMount)
		for i, source := range sources {
			if !strings.Contains(r.Stderr, fmt.Sprintf("$.mounts[%d].source: ", i)) {
				t.Errorf("source %q is not refused", source)
			}
		}
		if strings.Contains(r.Stderr, fmt.Sprintf("$.mounts[%d]", len(sources))) {
			t.Errorf("the good folder is refused:\n%s", r.Stderr)
		}
		t.Run("as workspace", func(t *testing.T) {
			s.sh(t, spec{"workspace": map[string]any{"source": "/etc"}}, "true").refused(t, shim.ReasonMount)
		})
		t.Run("device and FIFO", func(t *testing.T) {
			fifo := filepath.Join(links, "fifo")
			if err := unix.Mkfifo(fifo, 0o666); err != nil {
				t.Fatal(err)
			}
			for _, source := range []string{"/dev/null", fifo} {
				s.sh(t, spec{"mounts": []any{map[string]any{"source": source, "target": "/m"}}}, "true").refused(t, shim.ReasonMount)
			}
		})
	})
}

// A66: a folder below which a process of the host listens is refused, and the
// host's abstract sockets are not the agent's.
func TestLiveSockets(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		placeTool(t, filepath.Join(dir, "tool"), 0o755)
		place(t, filepath.Join(dir, "sub/x"), nil, 0o644)
		s.own(t, dir)
		fields := spec{"workspace": map[string]any{"source": dir}}
		listen := func(name string) *net.UnixListener {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			return l
		}
		path := filepath.Join(dir, "sub/s")
		l := listen(path)
		if err := os.Chmod(path, 0o777); err != nil {
			t.Fatal(err)
		}
		r := s.sh(t, fields, "true").refused(t, shim.ReasonMount)
		wantText(t, r.Stderr, "$.workspace.source", path)
		// What the refusal is for: read-only does not keep the agent from a socket.
		c := s.bare(t, "run", "--rm", "--network=none", "--mount", "type=bind,source="+dir+",target=/w,readonly", "agentshim/hello:test", "/w/tool", "dial", "/w/sub/s")
		if c.Stdout != "open\n" {
			t.Errorf("control: the bare engine's container got %q from the socket: %s", c.Stdout, c.Stderr)
		}
		t.Run("one named by SSH_AUTH_SOCK", func(t *testing.T) {
			other := s.folder(t)
			agent := filepath.Join(other, "agent")
			// Not listening here: as if by a process in another network namespace.
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			if err := unix.Bind(fd, &unix.SockaddrUnix{Name: agent}); err != nil {
				t.Fatal(err)
			}
			file := s.write(t, spec{"mounts": []any{map[string]any{"source": other, "target": "/m"}}})
			s.call(t, call{Env: []string{"SSH_AUTH_SOCK=" + agent}}, "exec", "--spec", file, "--", "true").refused(t, shim.ReasonMount)
			s.exec(t, file, "true").ok(t)
		})
		l.SetUnlinkOnClose(false)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		abstract := "@agentshim-test-" + filepath.Base(dir)
		listen(abstract)
		// Control: the socket that nobody listens on any more is no reason to refuse.
		r = s.sh(t, fields, "/workspace/tool dial "+abstract+"; /workspace/tool dial /workspace/sub/s; grep -c agentshim-test /proc/net/unix").ok2(t)
		want := fmt.Sprintf("%d\n%d\n0\n", syscall.ECONNREFUSED, syscall.ECONNREFUSED)
		if r.Stdout != want {
			t.Errorf("dialling the abstract and the dead socket, and counting: %q, want %q", r.Stdout, want)
		}
		if conn, err := net.Dial("unix", abstract); err != nil {
			t.Errorf("control: the abstract socket on the host: %v", err)
		} else {
			conn.Close()
		}
	})
}

// ok2 is ok for a script whose last command, grep -c, ends with 1 when it counts 0.
func (r result) ok2(t *testing.T) result {
	t.Helper()
	if r.Code > 1 {
		r.ok(t)
	}
	return r
}

// mountTmpfs mounts a tmpfs on dir for the test's time.
func mountTmpfs(t *testing.T, dir string, flags uintptr, data string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("agentshim-test", dir, "tmpfs", flags, data); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// A62: a mount below a bind would keep its own flags, so it is refused.
func TestSubmount(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		sub := filepath.Join(dir, "sub")
		mountTmpfs(t, sub, 0, "size=1m,mode=0777")
		for _, mode := range []string{"read-only", "writable"} {
			r := s.sh(t, spec{"workspace": map[string]any{"source": dir, "mode": mode}}, "true").refused(t, shim.ReasonMount)
			wantText(t, r.Stderr, "$.workspace.source", sub)
		}
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if s.rootless() {
			return // Podman's own mount namespace may not have got the mount
		}
		c := s.bare(t, "run", "--rm", "--network=none", "-v", dir+":/w:ro", "agentshim/hello:test", "touch", "/w/sub/x")
		if _, err := os.Lstat(filepath.Join(sub, "x")); err != nil {
			t.Errorf("control: below a read-only bind the bare engine kept the agent from writing: %+v", c)
		}
		t.Run("control, the mount itself", func(t *testing.T) {
			s.sh(t, spec{"mounts": []any{map[string]any{"source": sub, "target": "/m"}}}, "test -e /m/x").ok(t)
		})
	})
}

// A62: nested binds, each with its own mode, in whatever order the file lists them;
// files on files.
func TestNestedModes(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		for _, d := range []string{"rw/ro/rw", "ro/rw/ro", "a/b", "c"} {
			place(t, filepath.Join(dir, d, "f"), nil, 0o644)
		}
		s.own(t, dir)
		at := func(p string) string { return filepath.Join(dir, p) }
		r := s.sh(t, spec{
			"workspace": map[string]any{"source": at("rw"), "mode": "writable"},
			"mounts": []map[string]any{
				{"source": at("c"), "target": "ro/b", "writable": true}, // before its parent
				{"source": at("a"), "target": "ro"},
				{"source": at("ro/rw/ro"), "target": "/ro/rw/ro"},
				{"source": at("ro"), "target": "/ro"},
				{"source": at("ro/rw"), "target": "/ro/rw", "writable": true},
				{"source": at("a/b/f"), "target": "/ro/rw/ro/f", "writable": true}, // a writable file in a read-only folder
				{"source": at("a/b/f"), "target": "ro/b/f"},                        // and the other way round
			},
		}, `for f in /ro/rw/ro/f ro/b/f; do if (echo x >> $f) 2>/tmp/e; then echo "$f=rw"; else grep -q 'Read-only file system' /tmp/e && echo "$f=ro"; fi; done
		for d in /workspace /workspace/ro /workspace/ro/b /ro /ro/rw /ro/rw/ro; do
			if (touch $d/t) 2>/tmp/e; then echo "$d=rw"; else grep -q 'Read-only file system' /tmp/e && echo "$d=ro"; fi; done`).ok(t)
		wantPairs(t, r.Stdout, map[string]string{
			"/workspace": "rw", "/workspace/ro": "ro", "/workspace/ro/b": "rw", "/ro": "ro", "/ro/rw": "rw", "/ro/rw/ro": "ro",
			"/ro/rw/ro/f": "rw", "ro/b/f": "ro",
		})
	})
}

// A69: setuid programs and device nodes in a mounted tree have no effect, whoever
// made them.
func TestHostileTree(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		suid := placeTool(t, filepath.Join(dir, "suid"), 0o755)
		placeTool(t, filepath.Join(dir, "tool"), 0o755)
		node := filepath.Join(dir, "node")
		// 10:229, fuse: no engine's default devices hold it, and anyone may open it.
		if err := errors.Join(
			os.Chown(suid, 0, 0), os.Chmod(suid, 0o755|os.ModeSetuid), os.Chmod(dir, 0o755),
			unix.Mknod(node, unix.S_IFCHR|0o666, int(unix.Mkdev(10, 229))), os.Chmod(node, 0o666),
		); err != nil {
			t.Fatal(err)
		}
		r := s.sh(t, spec{"workspace": map[string]any{"source": dir}}, `./suid euid; ./tool open node`).ok(t)
		euid, opened, _ := strings.Cut(strings.TrimSpace(r.Stdout), "\n")
		if euid != fmt.Sprint(s.agentUID(t)) {
			t.Errorf("the setuid program ran as %s", euid)
		}
		if opened != fmt.Sprint(int(syscall.EPERM)) && opened != fmt.Sprint(int(syscall.EACCES)) {
			t.Errorf("opening the device node: %s, want EPERM or EACCES", opened)
		}
		args := []string{"run", "--rm", "--network=none", "-v", dir + ":/w:ro"}
		if !s.rootless() {
			args = append(args, "--device-cgroup-rule=c 10:229 rwm", "--user=4321:4321")
		}
		c := s.bare(t, append(args, "agentshim/hello:test", "sh", "-c", "/w/suid euid; /w/tool open /w/node")...)
		euid, opened, _ = strings.Cut(strings.TrimSpace(c.Stdout), "\n")
		if euid != "0" {
			t.Errorf("control: the setuid program ran as %s: %s", euid, c.Stderr)
		}
		if opened == fmt.Sprint(int(syscall.EPERM)) || opened == fmt.Sprint(int(syscall.EACCES)) {
			t.Errorf("control: the bare engine refuses the device node too: %s", opened)
		}
	})
}

// DESIGN's gap bind-noexec.
func TestBindNoExec(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		place(t, filepath.Join(dir, "p"), []byte("#!/bin/sh\necho ran\n"), 0o755)
		s.own(t, dir)
		fields := func(noexec bool, accept ...string) spec {
			return spec{
				"mounts": []any{map[string]any{"source": dir, "target": "/m", "noexec": noexec}},
				"accept": append(accept, "rootless-cgroup-limits"),
			}
		}
		if r := s.sh(t, fields(false), "/m/p").ok(t); r.Stdout != "ran\n" {
			t.Errorf("control, without noexec: %q", r.Stdout)
		}
		r := s.sh(t, fields(true), "/m/p")
		if s.engine == "podman" {
			if r.Code != 126 || !strings.Contains(r.Stderr, "Permission denied") || r.Stdout != "" {
				t.Errorf("noexec: %+v", r)
			}
			s.sh(t, fields(true, "bind-noexec"), "true").ok(t) // accepted and not needed
			return
		}
		r.refused(t, shim.ReasonGap)
		wantText(t, r.Stderr, "bind-noexec", "/m", "agentshim: hint: add")
		if r := s.sh(t, fields(true, "bind-noexec"), "/m/p").ok(t); r.Stdout != "ran\n" {
			t.Errorf("accepted: %q", r.Stdout)
		} else {
			wantText(t, r.Stderr, "agentshim: gap accepted: bind-noexec")
		}
	})
}

// M23: init is not put where nothing can be executed.
func TestNoExecRuntimeDir(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.private(t)
		uid, gid := s.ids(t)
		mountTmpfs(t, dir, unix.MS_NOEXEC, fmt.Sprintf("size=8m,mode=0700,uid=%d,gid=%d", uid, gid))
		probe := place(t, filepath.Join(dir, "p"), []byte("#!/bin/sh\n"), 0o755)
		if err := exec.Command(probe).Run(); !errors.Is(err, syscall.EACCES) {
			t.Errorf("control: a program there: %v, want EACCES", err)
		}
		file := s.write(t, nil)
		r := s.call(t, call{Env: []string{"XDG_RUNTIME_DIR=" + dir}}, "exec", "--spec", file, "--", "echo ran").ok(t)
		if r.Stdout != "ran\n" {
			t.Errorf("printed %q", r.Stdout)
		}
		if _, err := os.Lstat(filepath.Join(dir, "agentshim")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the noexec folder was used: %v", err)
		}
	})
}

// T03, T04, T05, T06: the same writable places on both engines, capped, empty at
// the start; everything else read-only.
func TestTmpfs(t *testing.T) {
	const script = `
for d in "$HOME" /tmp /run /dev/shm; do
	printf '#!/bin/sh\n' > $d/p 2>/dev/null && chmod +x $d/p && if $d/p 2>/dev/null; then echo "exec $d=yes"; else echo "exec $d=no"; fi
	rm -f $d/p
	echo "names $d=$(ls -A $d | tr '\n' ' ')"
	case "$(dd if=/dev/zero of=$d/fill bs=1M count=40 2>&1)" in *'No space left'*) echo "full $d=$(($(stat -c %s $d/fill) >> 20))";; esac
	rm -f $d/fill
done
for d in / /etc /var /var/tmp /usr /root /bin /sys /proc /proc/sys/kernel /dev; do
	mkdir -p $d/t 2>/dev/null && echo "write $d=yes"
done
awk '$2 == "/home/agent" || $2 == "/tmp" || $2 == "/run" || $2 == "/dev/shm" { print "opts " $2 "=" $3 " " $4 }' /proc/mounts | sed 's/,/ /g'
`
	each(t, func(t *testing.T, s setup) {
		r := s.sh(t, spec{"home": map[string]any{"sizeMb": 5}, "tmpSizeMb": 6, "resources": map[string]any{"shmMb": 7}}, script).ok(t)
		wantPairs(t, r.Stdout, map[string]string{
			"exec /home/agent": "yes", "exec /tmp": "yes", "exec /run": "yes", "exec /dev/shm": "no",
			"names /home/agent": "", "names /dev/shm": "", "names /run": "user ",
			"full /home/agent": "5", "full /tmp": "6", "full /run": "16", "full /dev/shm": "7",
		})
		got := pairs(t, r.Stdout)
		for name, value := range got {
			if place, ok := strings.CutPrefix(name, "write "); ok {
				t.Errorf("%s can be written to", place)
			}
			if place, ok := strings.CutPrefix(name, "opts "); ok {
				for _, want := range []string{"tmpfs", "nosuid", "nodev"} {
					if !slices.Contains(strings.Fields(value), want) {
						t.Errorf("%s is mounted %s", place, value)
					}
				}
			}
		}
		t.Run("home noexec", func(t *testing.T) {
			r := s.sh(t, spec{"home": map[string]any{"sizeMb": 5, "noexec": true}}, script).ok(t)
			wantPairs(t, r.Stdout, map[string]string{"exec /home/agent": "no", "exec /tmp": "yes"})
		})
		t.Run("T06 control, a writable root", func(t *testing.T) {
			if r := s.bare(t, "run", "--rm", "--network=none", "agentshim/hello:test", "touch", "/etc/t", "/var/t"); r.Code != 0 {
				t.Errorf("the bare engine: %s", r.Stderr)
			}
		})
	})
}

// M13, A57: a link in the workspace leads nowhere but inside the container, and the
// next run mounts nothing more for it.
func TestWorkspaceLinks(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		outside := place(t, filepath.Join(s.private(t), "secret"), []byte("outside"), 0o644)
		dir := s.folder(t)
		fields := spec{"workspace": map[string]any{"source": dir, "mode": "writable"}}
		s.sh(t, fields, "ln -s "+filepath.Dir(outside)+" made; ln -s "+outside+" file; ln -s / root").ok(t)
		r := s.sh(t, fields, "cat made/secret; cat file; cat root"+outside+"; ls -A /var/tmp; grep -c ' /workspace' /proc/mounts")
		if r.Stdout != "1\n" {
			t.Errorf("printed %q", r.Stdout)
		}
	})
}

// Part 7: files for the home, byte for byte, private.
func TestHomeFiles(t *testing.T) {
	big := make([]byte, 5<<20)
	if _, err := rand.Read(big); err != nil {
		t.Fatal(err)
	}
	binary := make([]byte, 512)
	for i := range binary {
		binary[i] = byte(i)
	}
	contents := map[string][]byte{".token": []byte("text\n"), ".config/a/b/binary": binary, ".config/empty": {}, "big file": big}
	each(t, func(t *testing.T, s setup) {
		dir := s.private(t)
		var list []map[string]any
		for target, content := range contents {
			name := filepath.Base(target)
			place(t, filepath.Join(dir, name), content, 0o644)
			list = append(list, map[string]any{"source": filepath.Join(dir, name), "target": target})
		}
		s.chown(t, dir)
		check := untouched(t, dir)
		r := s.sh(t, spec{"home": map[string]any{"sizeMb": 16, "files": list}}, `cd; find . -mindepth 1 | while read -r f; do
			if [ -d "$f" ]; then echo "$f=$(stat -c %a:%u "$f")"; else echo "$f=$(stat -c %a:%u "$f"):$(sha256sum < "$f" | cut -d' ' -f1)"; fi; done`).ok(t)
		uid := 24199
		if !s.root() {
			uid, _ = s.ids(t)
		}
		want := map[string]string{}
		for target, content := range contents {
			sum := sha256.Sum256(content)
			want["./"+target] = fmt.Sprintf("600:%d:%s", uid, hex.EncodeToString(sum[:]))
		}
		for _, parent := range []string{".config", ".config/a", ".config/a/b"} {
			want["./"+parent] = fmt.Sprintf("700:%d", uid)
		}
		wantPairs(t, r.Stdout, want)
		if got := pairs(t, r.Stdout); len(got) != len(want) {
			t.Errorf("the home holds %d names, want %d: %v", len(got), len(want), got)
		}
		fifo := filepath.Join(dir, "fifo")
		check()
		if err := unix.Mkfifo(fifo, 0o666); err != nil {
			t.Fatal(err)
		}
		for _, tc := range []struct {
			name, source string
			sizeMB       int
		}{
			{"missing", filepath.Join(dir, "missing"), 16},
			{"a folder", dir, 16},
			{"a FIFO", fifo, 16},
			{"too large for the home", filepath.Join(dir, "big file"), 4},
		} {
			t.Run(tc.name, func(t *testing.T) {
				r := s.sh(t, spec{"home": map[string]any{"sizeMb": tc.sizeMB, "files": []any{map[string]any{"source": tc.source, "target": "x"}}}}, "echo started").refused(t, shim.ReasonMount)
				wantText(t, r.Stderr, "agentshim: hint: home.files")
			})
		}
	})
}

// chown gives everything below dir to the caller.
func (s setup) chown(t *testing.T, dir string) {
	t.Helper()
	uid, gid := s.ids(t)
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, uid, gid))
	})
	if err != nil {
		t.Fatal(err)
	}
}
