package mounts

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
)

// needRoot skips t when it isn't root's; with AGENTSHIM_REQUIRE_ALL set it fails
// instead, so that a lost privilege never reads as a pass.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("AGENTSHIM_REQUIRE_ALL") != "" {
		t.Fatal("AGENTSHIM_REQUIRE_ALL is set and this is not root")
	}
	t.Skip("needs root")
}

// onThread runs f on a thread that ends with it, whatever f made of it. The main thread
// is never that one: it can't end, and /proc/self shows its ids and mounts.
func onThread(t *testing.T, f func() error) {
	t.Helper()
	done := make(chan error, 1)
	var start func()
	start = func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			other := make(chan struct{})
			go func() { defer close(other); start() }()
			<-other
			runtime.UnlockOSThread()
			return
		}
		done <- f() // never unlocked: the runtime ends the thread
	}
	go start()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

const nobody = 65534

// becomeNobody gives up this thread's ids and with them its capabilities:
// capabilities(7). The calls are raw, since the syscall package's are for all threads.
func becomeNobody() error {
	for _, call := range [][]uintptr{
		{unix.SYS_SETGROUPS, 0, 0, 0},
		{unix.SYS_SETRESGID, nobody, nobody, nobody},
		{unix.SYS_SETRESUID, nobody, nobody, nobody},
		{unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0},
		{unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 1, 0}, // the whole process's, taken by the new ids: prctl(2)
	} {
		if _, _, errno := unix.RawSyscall(call[0], call[1], call[2], call[3]); errno != 0 {
			return fmt.Errorf("syscall %d: %w", call[0], errno)
		}
	}
	return nil
}

// guarded is a workspace on the host and its mounts in a private mount namespace.
type guarded struct {
	t *testing.T
	// ws is the host's folder, in where the container has it.
	ws, in string
	host   Source
	mount  []Mount
}

// guardedWorld has files of nobody's, as an agent of the caller's uid sees its own.
func guardedWorld(t *testing.T, w harness.Workspace, writable bool) *guarded {
	t.Helper()
	needRoot(t)
	root, err := os.MkdirTemp("", "guard")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	g := &guarded{t: t, ws: filepath.Join(root, "ws"), in: filepath.Join(root, "in")}
	for _, f := range []string{
		".vscode/tasks.json", ".vscode/other.json", ".envrc", ".idea/workspace.xml", "a/b/c/guarded", "a/b/free", "a/x", ".env", "s/keys/id", "s/free", "free/f",
	} {
		g.must(os.MkdirAll(filepath.Dir(filepath.Join(g.ws, f)), 0o755))
		g.must(os.WriteFile(filepath.Join(g.ws, f), []byte("host"), 0o644))
	}
	g.must(os.MkdirAll(g.in, 0o755))
	g.must(filepath.WalkDir(root, func(p string, _ os.DirEntry, err error) error {
		if err != nil || p == root {
			return err
		}
		return os.Lchown(p, nobody, nobody)
	}))
	g.must(os.MkdirAll(filepath.Join(root, EmptyDir), 0o755))
	g.must(os.WriteFile(filepath.Join(root, EmptyFile), nil, 0o444))
	g.must(os.Chmod(root, 0o755))
	g.host = g.source(g.ws)
	paths, err := GuardPaths(w, g.ws, nil)
	g.must(err)
	facts, err := ProbeGuards(g.host, paths)
	g.must(err)
	ws := Mount{Target: "/workspace", Type: TypeBind, Source: g.ws, Writable: writable, NoSUIDBy: ByFlag, NoDevBy: ByFlag, Dev: g.host.Dev, Ino: g.host.Ino, Why: WhyWorkspace}
	set, err := Guards(ws, g.ws, paths, facts, nil)
	g.must(err)
	for i := range set.Mounts {
		if m := &set.Mounts[i]; m.Own != "" {
			s := g.source(filepath.Join(root, m.Own))
			m.Source, m.Dev, m.Ino = s.Path, s.Dev, s.Ino
		}
	}
	g.mount = append([]Mount{ws}, set.Mounts...)
	return g
}

func (g *guarded) source(p string) Source {
	g.t.Helper()
	var st unix.Stat_t
	g.must(unix.Lstat(p, &st))
	return Source{Path: p, Dir: st.Mode&unix.S_IFMT == unix.S_IFDIR, Dev: st.Dev, Ino: st.Ino}
}

func (g *guarded) must(err error) {
	g.t.Helper()
	if err != nil {
		g.t.Fatal(err)
	}
}

// at is a path of the container's workspace.
func (g *guarded) at(rel string) string { return filepath.Join(g.in, rel) }

// enter makes the mounts of the list, and nothing else, in a mount namespace of this
// thread's own, as runc does: bind, then a remount with the flags. It compares each
// mount's identity as the attestation does.
func (g *guarded) enter() error {
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private: %w", err)
	}
	for _, m := range g.mount {
		target := g.in + strings.TrimPrefix(m.Target, "/workspace")
		flags := uintptr(unix.MS_BIND | unix.MS_REMOUNT | unix.MS_NOSUID | unix.MS_NODEV)
		if !m.Writable {
			flags |= unix.MS_RDONLY
		}
		if err := unix.Mount(m.Source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind %q on %q: %w", m.Source, target, err)
		}
		if err := unix.Mount("", target, "", flags, ""); err != nil {
			return fmt.Errorf("remount %q: %w", target, err)
		}
		var st unix.Stat_t
		if err := unix.Lstat(target, &st); err != nil || st.Dev != m.Dev || st.Ino != m.Ino {
			return fmt.Errorf("%q is device %d, inode %d and not %d, %d: %w", target, st.Dev, st.Ino, m.Dev, m.Ino, err)
		}
	}
	return nil
}

// asAgent runs f as nobody among the mounts.
func (g *guarded) asAgent(f func()) {
	g.t.Helper()
	onThread(g.t, func() error {
		if err := g.enter(); err != nil {
			return err
		}
		if err := becomeNobody(); err != nil {
			return err
		}
		f()
		return nil
	})
}

// without leaves out mounts, for control runs.
func (g *guarded) without(why ...string) *guarded {
	g.mount = slices.DeleteFunc(g.mount, func(m Mount) bool { return slices.Contains(why, m.Why) })
	return g
}

// attempt is one thing an agent tries, and the error it gets.
type attempt struct {
	name string
	do   func(at func(string) string) error
	want unix.Errno
}

func opened(path string, flags int) error {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o644)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

func exchange(a, b string) error {
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}

// fileAttempts are those on a protected or hidden file; dir is the folder it lies in.
func fileAttempts(rel string) []attempt {
	return []attempt{
		{"write", func(at func(string) string) error { return opened(at(rel), unix.O_WRONLY) }, unix.EROFS},
		{"append", func(at func(string) string) error { return opened(at(rel), unix.O_RDWR|unix.O_APPEND) }, unix.EROFS},
		{"open truncated", func(at func(string) string) error { return opened(at(rel), unix.O_WRONLY|unix.O_TRUNC) }, unix.EROFS},
		{"truncate", func(at func(string) string) error { return unix.Truncate(at(rel), 0) }, unix.EROFS},
		{"chmod", func(at func(string) string) error { return unix.Chmod(at(rel), 0o777) }, unix.EROFS},
		{"times", func(at func(string) string) error {
			return unix.UtimesNanoAt(unix.AT_FDCWD, at(rel), nil, 0)
		}, unix.EROFS},
		{"set an attribute", func(at func(string) string) error { return unix.Setxattr(at(rel), "user.x", []byte("x"), 0) }, unix.EROFS},
		{"rename", func(at func(string) string) error { return unix.Rename(at(rel), at(rel+".old")) }, unix.EBUSY},
		{"rename away", func(at func(string) string) error { return unix.Rename(at(rel), at("away")) }, errnoAway(rel)},
		{"unlink", func(at func(string) string) error { return unix.Unlink(at(rel)) }, unix.EBUSY},
		{"rename over", func(at func(string) string) error {
			return errors.Join(os.WriteFile(at(rel+".new"), []byte("agent"), 0o644), unix.Rename(at(rel+".new"), at(rel)))
		}, unix.EBUSY},
		{"exchange", func(at func(string) string) error {
			return errors.Join(os.WriteFile(at(rel+".new"), []byte("agent"), 0o644), exchange(at(rel+".new"), at(rel)))
		}, unix.EBUSY},
		{"link over", func(at func(string) string) error {
			return errors.Join(os.WriteFile(at(rel+".new"), []byte("agent"), 0o644), unix.Link(at(rel+".new"), at(rel)))
		}, unix.EEXIST},
		{"symbolic link over", func(at func(string) string) error { return unix.Symlink("x", at(rel)) }, unix.EEXIST},
		{"second name", func(at func(string) string) error { return unix.Link(at(rel), at(rel+".link")) }, unix.EXDEV},
		{"make over", func(at func(string) string) error { return unix.Mknod(at(rel), unix.S_IFIFO|0o600, 0) }, unix.EEXIST},
	}
}

// coverAttempts are fileAttempts where the cover's mode, 0444, answers before its mount.
func coverAttempts(rel string) []attempt {
	list := fileAttempts(rel)
	for i := range list {
		if slices.Contains([]string{"write", "append", "truncate"}, list[i].name) {
			list[i].want = unix.EACCES
		}
	}
	return list
}

// errnoAway: from one mount to another is EXDEV before the kernel looks at the mount
// point itself: rename(2).
func errnoAway(rel string) unix.Errno {
	if strings.Contains(rel, "/") {
		return unix.EXDEV
	}
	return unix.EBUSY
}

// dirAttempts are those on a folder that is a mount point.
func dirAttempts(rel string) []attempt {
	return []attempt{
		{"rename", func(at func(string) string) error { return unix.Rename(at(rel), at(rel+".old")) }, unix.EBUSY},
		{"remove", func(at func(string) string) error { return unix.Rmdir(at(rel)) }, unix.EBUSY},
		{"rename over", func(at func(string) string) error {
			return errors.Join(os.MkdirAll(at(rel+".new"), 0o755), unix.Rename(at(rel+".new"), at(rel)))
		}, unix.EBUSY},
		{"exchange", func(at func(string) string) error {
			return errors.Join(os.MkdirAll(at(rel+".new"), 0o755), exchange(at(rel+".new"), at(rel)))
		}, unix.EBUSY},
		{"exchange for a link", func(at func(string) string) error {
			return errors.Join(unix.Symlink("/", at(rel+".link")), exchange(at(rel+".link"), at(rel)))
		}, unix.EBUSY},
		{"make over", func(at func(string) string) error { return unix.Mkdir(at(rel), 0o755) }, unix.EEXIST},
	}
}

// mountAttempts need a capability that the agent has not: mount(2), user_namespaces(7).
func mountAttempts(rel string) []attempt {
	return []attempt{
		{"unmount", func(at func(string) string) error { return unix.Unmount(at(rel), unix.MNT_DETACH) }, unix.EPERM},
		{"remount", func(at func(string) string) error {
			return unix.Mount("", at(rel), "", unix.MS_BIND|unix.MS_REMOUNT, "")
		}, unix.EPERM},
		{"bind over", func(at func(string) string) error { return unix.Mount(at("free/f"), at(rel), "", unix.MS_BIND, "") }, unix.EPERM},
		{"move", func(at func(string) string) error { return unix.Mount(at(rel), at("free"), "", unix.MS_MOVE, "") }, unix.EPERM},
		{"set flags", func(at func(string) string) error {
			return unix.MountSetattr(unix.AT_FDCWD, at(rel), 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY})
		}, unix.EPERM},
		{"clone", func(at func(string) string) error {
			_, err := unix.OpenTree(unix.AT_FDCWD, at(rel), unix.OPEN_TREE_CLONE)
			return err
		}, unix.EPERM},
		{"new namespace", func(func(string) string) error { return unix.Unshare(unix.CLONE_NEWNS) }, unix.EPERM},
	}
}

func (g *guarded) try(list []attempt) {
	g.t.Helper()
	for _, a := range list {
		if err := a.do(g.at); !errors.Is(err, a.want) {
			g.t.Errorf("%s: got %v, want %v", a.name, err, a.want)
		}
	}
}

func (g *guarded) holds(rel, want string) {
	g.t.Helper()
	if b, err := os.ReadFile(filepath.Join(g.ws, rel)); err != nil || string(b) != want {
		g.t.Errorf("%s on the host: %q, %v", rel, b, err)
	}
}

// TestKernelGuards: M15, A62, A63, A65. The mounts that Guards lists, made without an
// engine, hold against everything tried as the owner of the files.
func TestKernelGuards(t *testing.T) {
	w := harness.Workspace{Protect: []string{"a/b/c/guarded"}}
	for _, rel := range []string{".envrc", ".vscode/tasks.json", "a/b/c/guarded"} {
		t.Run(rel, func(t *testing.T) {
			g := guardedWorld(t, w, true)
			g.asAgent(func() { g.try(fileAttempts(rel)); g.try(mountAttempts(rel)) })
			g.holds(rel, "host")
		})
	}
	for _, rel := range []string{".vscode", "a", "a/b", "a/b/c", ".idea"} {
		t.Run(rel, func(t *testing.T) {
			g := guardedWorld(t, w, true)
			g.asAgent(func() { g.try(dirAttempts(rel)); g.try(mountAttempts(rel)) })
			g.holds("a/b/c/guarded", "host")
			g.holds(".vscode/tasks.json", "host")
		})
	}
	t.Run("in a protected folder", func(t *testing.T) {
		g := guardedWorld(t, w, true)
		g.asAgent(func() {
			g.try([]attempt{
				{"write", func(at func(string) string) error { return opened(at(".idea/workspace.xml"), unix.O_WRONLY) }, unix.EROFS},
				{"create", func(at func(string) string) error { return opened(at(".idea/x"), unix.O_CREAT|unix.O_WRONLY) }, unix.EROFS},
				{"unlink", func(at func(string) string) error { return unix.Unlink(at(".idea/workspace.xml")) }, unix.EROFS},
				{"rename", func(at func(string) string) error { return unix.Rename(at(".idea/workspace.xml"), at(".idea/y")) }, unix.EROFS},
				{"rename out", func(at func(string) string) error { return unix.Rename(at(".idea/workspace.xml"), at("y")) }, unix.EXDEV},
				{"link out", func(at func(string) string) error { return unix.Link(at(".idea/workspace.xml"), at("y")) }, unix.EXDEV},
			})
		})
	})
	t.Run("the rest stays writable", func(t *testing.T) {
		g := guardedWorld(t, w, true)
		g.asAgent(func() {
			for _, rel := range []string{".vscode/other.json", "a/b/free", "a/x", "free/f", "s/free", "new"} {
				if err := os.WriteFile(g.at(rel), []byte("agent"), 0o644); err != nil {
					t.Error(err)
				}
			}
			for _, m := range [][2]string{{"free", "moved"}, {"a/x", "a/y"}, {"a/b/free", "a/b/freed"}} {
				if err := unix.Rename(g.at(m[0]), g.at(m[1])); err != nil {
					t.Error(err)
				}
			}
			// What a guard costs: the kernel takes the two sides for different file systems.
			if err := unix.Rename(g.at("a/y"), g.at("y")); err != unix.EXDEV {
				t.Errorf("rename across guards: %v", err)
			}
		})
		g.holds("moved/f", "agent")
	})
}

// TestKernelGuardsControl: without the mounts each attempt succeeds, and with the bind
// on the file alone the folder's mv leads around it.
func TestKernelGuardsControl(t *testing.T) {
	for _, a := range fileAttempts(".vscode/tasks.json") {
		if a.want == unix.EEXIST {
			continue // refused by the file itself, guarded or not
		}
		t.Run(a.name, func(t *testing.T) {
			g := guardedWorld(t, harness.Workspace{}, true).without(WhyProtect, WhyGuard)
			g.asAgent(func() {
				err := a.do(g.at)
				if a.name == "set an attribute" && errors.Is(err, unix.EOPNOTSUPP) {
					return // tmpfs had no user attributes before Linux 6.6
				}
				if err != nil {
					t.Error(err)
				}
			})
		})
	}
	for _, a := range dirAttempts("a/b") {
		if a.want == unix.EEXIST || a.name == "remove" || a.name == "rename over" {
			continue // refused by what is in the folder, guarded or not
		}
		t.Run("folder: "+a.name, func(t *testing.T) {
			g := guardedWorld(t, harness.Workspace{Protect: []string{"a/b/c/guarded"}}, true).without(WhyGuard)
			g.asAgent(func() {
				if err := a.do(g.at); err != nil {
					t.Error(err)
				}
			})
		})
	}
	t.Run("mv of the folder and a new file", func(t *testing.T) {
		plant := func(g *guarded) (err error) {
			g.asAgent(func() {
				err = errors.Join(unix.Rename(g.at(".vscode"), g.at(".gone")), os.MkdirAll(g.at(".vscode"), 0o755),
					os.WriteFile(g.at(".vscode/tasks.json"), []byte("agent"), 0o644))
			})
			return err
		}
		g := guardedWorld(t, harness.Workspace{}, true).without(WhyGuard)
		g.must(plant(g))
		g.holds(".vscode/tasks.json", "agent")
		g = guardedWorld(t, harness.Workspace{}, true)
		if err := plant(g); !errors.Is(err, unix.EBUSY) || !errors.Is(err, unix.EROFS) {
			t.Error(err)
		}
		g.holds(".vscode/tasks.json", "host")
	})
}

// TestKernelHide: T10, A63. What is hidden can't be read or changed, in a writable and
// a read-only workspace; without the mounts it is read.
func TestKernelHide(t *testing.T) {
	w := harness.Workspace{Hide: []string{".env", "s/keys"}}
	for _, writable := range []bool{true, false} {
		t.Run(fmt.Sprintf("writable %v", writable), func(t *testing.T) {
			g := guardedWorld(t, w, writable)
			g.asAgent(func() {
				if b, err := os.ReadFile(g.at(".env")); err != nil || len(b) != 0 {
					t.Errorf(".env: %q, %v", b, err)
				}
				if list, err := os.ReadDir(g.at("s/keys")); err != nil || len(list) != 0 {
					t.Errorf("s/keys: %v, %v", list, err)
				}
				g.try([]attempt{
					{"read in it", func(at func(string) string) error { return opened(at("s/keys/id"), unix.O_RDONLY) }, unix.ENOENT},
					{"create in it", func(at func(string) string) error { return opened(at("s/keys/x"), unix.O_CREAT|unix.O_WRONLY) }, unix.EROFS},
					{"above it", func(at func(string) string) error { return opened(at("s/keys/../keys/id"), unix.O_RDONLY) }, unix.ENOENT},
					{"handle", func(at func(string) string) error {
						// open_by_handle_at(2) needs CAP_DAC_READ_SEARCH.
						h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, at("s"), 0)
						if err != nil {
							return err
						}
						dir, err := unix.Open(at("s"), unix.O_RDONLY|unix.O_DIRECTORY, 0)
						if err != nil {
							return err
						}
						defer unix.Close(dir)
						_, err = unix.OpenByHandleAt(dir, h, unix.O_RDONLY)
						return err
					}, unix.EPERM},
				})
				g.try(mountAttempts(".env"))
				if writable {
					g.try(coverAttempts(".env"))
					g.try(dirAttempts("s/keys"))
					g.try(dirAttempts("s"))
				}
			})
			g.holds(".env", "host")
			g.holds("s/keys/id", "host")
		})
	}
	g := guardedWorld(t, w, true).without(WhyHide)
	g.asAgent(func() {
		for _, rel := range []string{".env", "s/keys/id"} {
			if b, err := os.ReadFile(g.at(rel)); err != nil || string(b) != "host" {
				t.Errorf("control: %s: %q, %v", rel, b, err)
			}
		}
	})
}

// TestKernelUserNamespace: where the nested profile lets the agent make a user
// namespace, all capabilities in it don't help: what a mount namespace got from a more
// privileged one is locked together (mount_namespaces(7)), and stays a mount point.
func TestKernelUserNamespace(t *testing.T) {
	g := guardedWorld(t, harness.Workspace{Hide: []string{".env"}}, true)
	var out []byte
	g.asAgent(func() {
		// fork(2) takes over this thread's ids and namespaces.
		child := exec.Command("/proc/self/exe", "-test.run=^TestKernelUserNamespaceChild$", "-test.v")
		child.Env = []string{"GUARD_CHILD=" + g.in}
		child.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: nobody, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: nobody, Size: 1}},
		}
		child.Dir = "/"
		var err error
		if out, err = child.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	if !strings.Contains(string(out), "--- PASS: TestKernelUserNamespaceChild") {
		t.Errorf("%s", out)
	}
	g.holds(".vscode/tasks.json", "host")
	g.holds(".env", "host")
}

// TestKernelUserNamespaceChild is the agent of TestKernelUserNamespace.
func TestKernelUserNamespaceChild(t *testing.T) {
	in := os.Getenv("GUARD_CHILD")
	if in == "" {
		return // not the child
	}
	g := &guarded{t: t, in: in}
	at := func(rel string) string { return filepath.Join(in, rel) }
	if err := unix.Mount("tmpfs", at("free"), "tmpfs", 0, ""); err != nil {
		t.Fatalf("it has no capabilities: %v", err)
	}
	for _, rel := range []string{".vscode/tasks.json", ".env"} {
		g.try([]attempt{
			{rel + ": unmount", func(func(string) string) error { return unix.Unmount(at(rel), unix.MNT_DETACH) }, unix.EINVAL},
			{rel + ": remount", func(func(string) string) error {
				return unix.Mount("", at(rel), "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_NOSUID|unix.MS_NODEV, "")
			}, unix.EPERM},
			{rel + ": move", func(func(string) string) error { return unix.Mount(at(rel), at("s/free"), "", unix.MS_MOVE, "") }, unix.EINVAL},
			{rel + ": bind of the folder without it", func(func(string) string) error {
				return unix.Mount(filepath.Dir(at(rel)), at("s"), "", unix.MS_BIND, "")
			}, unix.EINVAL},
			{rel + ": write", func(func(string) string) error { return opened(at(rel), unix.O_WRONLY) }, errnoWrite(rel)},
			{rel + ": unlink", func(func(string) string) error { return unix.Unlink(at(rel)) }, unix.EBUSY},
		})
	}
	g.try(dirAttempts(".vscode"))
	g.try([]attempt{{"unmount the workspace", func(func(string) string) error { return unix.Unmount(in, unix.MNT_DETACH) }, unix.EINVAL}})
}

func errnoWrite(rel string) unix.Errno {
	if rel == ".env" {
		return unix.EACCES // the cover is root's, 0444
	}
	return unix.EROFS
}

// TestKernelMountsControl: with capabilities the mounts come off, and all is open.
func TestKernelMountsControl(t *testing.T) {
	g := guardedWorld(t, harness.Workspace{Hide: []string{".env"}}, true)
	onThread(t, func() error {
		if err := g.enter(); err != nil {
			return err
		}
		for _, rel := range []string{".vscode/tasks.json", ".vscode", ".env"} {
			if err := unix.Unmount(g.at(rel), unix.MNT_DETACH); err != nil {
				return err
			}
		}
		if b, err := os.ReadFile(g.at(".env")); err != nil || string(b) != "host" {
			t.Errorf("%q, %v", b, err)
		}
		return unix.Rename(g.at(".vscode"), g.at(".gone"))
	})
}

// TestKernelReadOnlyWorkspace: nothing but the workspace's own mount is needed.
func TestKernelReadOnlyWorkspace(t *testing.T) {
	g := guardedWorld(t, harness.Workspace{Protect: []string{"a/b/c/guarded"}}, false)
	if len(g.mount) != 1 {
		t.Errorf("%d mounts", len(g.mount))
	}
	g.asAgent(func() {
		g.try([]attempt{
			{"write", func(at func(string) string) error { return opened(at("a/b/c/guarded"), unix.O_WRONLY) }, unix.EROFS},
			{"mv", func(at func(string) string) error { return unix.Rename(at("a"), at("z")) }, unix.EROFS},
			{"exchange", func(at func(string) string) error { return exchange(at("a"), at("s")) }, unix.EROFS},
			{"unlink", func(at func(string) string) error { return unix.Unlink(at(".envrc")) }, unix.EROFS},
		})
	})
}

// TestKernelHostReplaces shows the limit that Guards' comment names: what the host
// replaces during the run is no longer guarded, though its folder still is.
func TestKernelHostReplaces(t *testing.T) {
	g := guardedWorld(t, harness.Workspace{}, true)
	before, err := ProbeGuards(g.host, byDefault(".vscode/tasks.json"))
	g.must(err)
	g.asAgent(func() {
		replaced := make(chan error)
		go func() { // on another thread: this one is locked
			replaced <- errors.Join(os.WriteFile(filepath.Join(g.ws, "new"), []byte("host2"), 0o666),
				os.Chown(filepath.Join(g.ws, "new"), nobody, nobody), os.Rename(filepath.Join(g.ws, "new"), filepath.Join(g.ws, ".vscode/tasks.json")))
		}()
		if err := <-replaced; err != nil {
			t.Error(err)
		}
		if err := os.WriteFile(g.at(".vscode/tasks.json"), []byte("agent"), 0o644); err != nil {
			t.Errorf("the mount outlived the file: %v; the comment of Guards is out of date", err)
		}
		if err := unix.Rename(g.at(".vscode"), g.at(".gone")); err != unix.EBUSY {
			t.Errorf("mv of the folder: %v", err)
		}
	})
	after, err := ProbeGuards(g.host, byDefault(".vscode/tasks.json"))
	g.must(err)
	if a, b := before[".vscode/tasks.json"], after[".vscode/tasks.json"]; a.Ino == b.Ino && a.Born == b.Born && a.Changed == b.Changed {
		t.Error("the exchange can't be seen afterwards")
	}
}
