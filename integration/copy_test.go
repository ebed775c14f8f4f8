package integration

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/agentshim/agentshim/shim"
)

// copyScript is what an agent does in its workspace; each name says what becomes of it.
const copyScript = `
[ -e .git ]; echo "git=$?"
[ -e .env ]; echo "hidden=$?"; echo mine > .env
echo "guarded=$( (echo x >> guarded/file) 2>&1; (mv guarded elsewhere) 2>&1)"
echo agent >> edited; rm deleted; echo new > added; chmod 700 program; mkdir -p folder/deep; echo x > folder/deep/file
echo agent > replaced.new; mv replaced.new replaced; rm -r emptied; ln -s edited link; mv moved moved-away
ln -s /etc/passwd out; ln -s ../../etc up; ln -s folder/../../x around; rm file-to-link; ln -s /etc/passwd file-to-link
mkfifo fifo; mkdir .git; echo evil > .git/config; echo evil > .envrc; chmod 4755 suid; mkdir -p sub/.git/hooks; echo evil > sub/.git/hooks/pre-commit
echo x > "$(printf 'hostile\n\033[31m\377')"
echo "owner=$(stat -c %u edited)"
echo "target=$(readlink old-link)"
ls -A
`

// copyWorkspace makes a workspace with what that script works on.
func copyWorkspace(t *testing.T, s setup) string {
	t.Helper()
	dir := s.folder(t)
	var paths []string
	for _, name := range []string{"edited", "deleted", "program", "replaced", "emptied/file", "moved", "file-to-link", "suid", "kept", ".git/HEAD", ".env", "guarded/file"} {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, place(t, p, []byte(name+"\n"), 0o644))
	}
	if err := errors.Join(os.Symlink("/etc/passwd", filepath.Join(dir, "old-link")), syscall.Mkfifo(filepath.Join(dir, "old-fifo"), 0o644)); err != nil {
		t.Fatal(err)
	}
	uid := s.agentUID(t)
	for _, p := range append(paths, filepath.Join(dir, "emptied"), filepath.Join(dir, "guarded"), filepath.Join(dir, ".git")) {
		if err := os.Chown(p, uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// copyFields is a harness file for a workspace without a repository.
func copyFields(dir, mode string) spec {
	return spec{"workspace": map[string]any{"source": dir, "mode": mode, "git": "none", "hide": []string{".env"}, "protect": []string{"guarded/file"}}}
}

// TestCopy: an agent works on a private copy: the host's workspace is as it was until
// agentshim apply, which changes what is safe and names all else. The control has no copy.
func TestCopy(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir, state := copyWorkspace(t, s), s.private(t)
		check := untouched(t, dir)
		r := s.call(t, call{State: state}, "exec", "--spec", s.write(t, copyFields(dir, "copy")), "--", copyScript).ok(t)
		check()
		for _, want := range []string{"git=1\n", "hidden=1\n", "Read-only file system", "Device or resource busy", "owner=" + strconv.Itoa(s.agentUID(t)) + "\n", "target=/etc/passwd\n", "kept\n"} {
			if !strings.Contains(r.Stdout, want) {
				t.Errorf("no %q in the agent's output:\n%s", want, r.Stdout)
			}
		}
		if strings.Contains(r.Stdout, "old-fifo") {
			t.Errorf("a FIFO was copied:\n%s", r.Stdout)
		}
		rec := record(t, state)
		for _, want := range []string{"left out: .git: excluded", "left out: old-fifo: not a file", "agentshim apply " + rec.ID} {
			if !strings.Contains(r.Stderr, want) {
				t.Errorf("standard error lacks %q:\n%s", want, r.Stderr)
			}
		}
		if rec.Copy == nil || rec.Copy.Source != dir || rec.Copy.UID != uint32(s.agentUID(t)) || !rec.Copy.Synced {
			t.Errorf("record %+v", rec.Copy)
		}
		cli := func(args ...string) result { return s.call(t, call{State: state}, append(args, rec.ID)...) }
		checkCopyDiff(t, cli("diff"))
		if dry := cli("apply", "--dry-run"); dry.Code != 1 {
			t.Errorf("dry run: exit %d: %s", dry.Code, dry.Stderr)
		}
		check()
		applyCopy(t, s, dir, cli)
		cli("discard").ok(t)
		if left, _ := filepath.Glob(filepath.Join(state, "agentshim/runs/*/*copy*")); len(left) > 0 {
			t.Errorf("left after discard: %q", left)
		}
		s.writableControl(t)
	})
}

// refusedChanges are the names of the script that are never applied.
var refusedChanges = []string{".env", ".envrc", ".git", "around", "fifo", "file-to-link", "out", "sub/.git", "suid", "up"}

func checkCopyDiff(t *testing.T, r result) {
	t.Helper()
	if r.Code != 1 || strings.Contains(r.Stdout+r.Stderr, "\x1b") {
		t.Errorf("exit %d:\n%q\n%s", r.Code, r.Stdout, r.Stderr)
	}
	for _, want := range []string{
		"+agent\n", "deleted: deleted (file)\n", `added: "hostile\n\x1b[31m\xff" (file)` + "\n", "added: link (link)\n", "permissions 644 to 700",
		"added: folder/deep/file (file)\n", "deleted: emptied (folder)\n",
	} {
		if !strings.Contains(r.Stdout, want) {
			t.Errorf("the diff lacks %q:\n%s", want, r.Stdout)
		}
	}
	for _, name := range refusedChanges {
		if !strings.Contains(r.Stdout, "refused: "+name+": ") {
			t.Errorf("the diff does not refuse %s:\n%s", name, r.Stdout)
		}
	}
}

// applyCopy applies the script's changes: not with a conflict, then without.
func applyCopy(t *testing.T, s setup, dir string, cli func(...string) result) {
	t.Helper()
	edited := filepath.Join(dir, "edited")
	was, err := os.Stat(edited)
	if err != nil {
		t.Fatal(err)
	}
	place(t, edited, []byte("host\n"), 0o644)
	check := untouched(t, dir)
	if r := cli("apply"); r.Code != 1 || !strings.Contains(r.Stderr, "conflict: edited: ") || r.Stdout != "" {
		t.Errorf("with a conflict: exit %d\n%s%s", r.Code, r.Stdout, r.Stderr)
	}
	check()
	place(t, edited, []byte("edited\n"), 0o644)
	if err := os.Chtimes(edited, was.ModTime(), was.ModTime()); err != nil {
		t.Fatal(err)
	}
	r := cli("apply")
	if r.Code != 1 {
		t.Errorf("exit %d\n%s%s", r.Code, r.Stdout, r.Stderr)
	}
	uid := uint32(s.agentUID(t))
	for name, want := range map[string]string{
		"edited": "edited\nagent\n", "added": "new\n", "folder/deep/file": "x\n", "replaced": "agent\n", "moved-away": "moved\n", "hostile\n\x1b[31m\xff": "x\n",
		"kept": "kept\n", ".git/HEAD": ".git/HEAD\n", ".env": ".env\n", "guarded/file": "guarded/file\n", "file-to-link": "file-to-link\n", "suid": "suid\n",
	} {
		p := filepath.Join(dir, name)
		b, err := os.ReadFile(p)
		if err != nil || string(b) != want {
			t.Errorf("%q holds %q, want %q: %v", name, b, want, err)
			continue
		}
		if st, err := os.Lstat(p); err != nil || st.Sys().(*syscall.Stat_t).Uid != uid || st.Mode()&os.ModeSetuid != 0 {
			t.Errorf("%q: %v %v, want owner %d", name, st, err, uid)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if gone := []string{"deleted", "emptied", "moved", "out", "up", "around", "fifo", ".envrc"}; slices.Contains(gone, e.Name()) || strings.HasPrefix(e.Name(), ".agentshim-") {
			t.Errorf("%q is there", e.Name())
		}
	}
	if st, err := os.Stat(filepath.Join(dir, "program")); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("program: %v %v", st, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, ".git/config")); err == nil {
		t.Error("the repository was changed")
	}
}

// writableControl shows that the script changes the host's workspace where there is no copy.
func (s setup) writableControl(t *testing.T) {
	t.Helper()
	if !s.full() {
		return
	}
	dir := copyWorkspace(t, s)
	s.sh(t, spec{"workspace": map[string]any{"source": dir, "mode": "writable", "git": "none"}}, copyScript).ok(t)
	if b, err := os.ReadFile(filepath.Join(dir, "edited")); err != nil || string(b) != "edited\nagent\n" {
		t.Errorf("control: edited is %q: %v", b, err)
	}
	for name, want := range map[string]string{".env": "mine\n", "elsewhere/file": "guarded/file\nx\n"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != want {
			t.Errorf("control: %s is %q: %v", name, b, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, "out")); err != nil {
		t.Errorf("control: %v", err)
	}
}

// TestCopyKilled: what the agent did stays in its copy when agentshim is killed, and can be applied.
func TestCopyKilled(t *testing.T) {
	some(t, func(t *testing.T, s setup) {
		dir, state := copyWorkspace(t, s), s.private(t)
		check := untouched(t, dir)
		cmd, cancel := s.command(t, call{State: state}, agentshim, "exec", "--quiet", "--spec", s.write(t, copyFields(dir, "copy")), "--", "echo agent > edited; echo there; sleep 60")
		defer cancel()
		out := &signalWriter{want: "there", seen: make(chan struct{})}
		cmd.Stdout = out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		<-out.seen
		id := record(t, state).ID
		cli := func(args ...string) result { return s.call(t, call{State: state}, append(args, id)...) }
		cli("apply").refused(t, shim.ReasonState)
		cli("discard").refused(t, shim.ReasonState)
		if r := cli("diff"); r.Code != 1 || !strings.Contains(r.Stderr, "still goes on") {
			t.Errorf("diff of a running run: exit %d: %s", r.Code, r.Stderr)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		check()
		s.call(t, call{State: state}, "prune").ok(t)
		cli("apply").ok(t)
		if b, err := os.ReadFile(filepath.Join(dir, "edited")); err != nil || string(b) != "agent\n" {
			t.Errorf("edited is %q: %v", b, err)
		}
	})
}

// signalWriter closes seen when what was written holds want.
type signalWriter struct {
	want string
	buf  bytes.Buffer
	seen chan struct{}
	done bool
}

func (w *signalWriter) Write(b []byte) (int, error) {
	w.buf.Write(b)
	if !w.done && strings.Contains(w.buf.String(), w.want) {
		w.done = true
		close(w.seen)
	}
	return len(b), nil
}

// TestCopyDiskFull: a copy for which there is no room is a refusal with a remedy, and
// leaves nothing. The control has the room.
func TestCopyDiskFull(t *testing.T) {
	some(t, func(t *testing.T, s setup) {
		dir := copyWorkspace(t, s)
		place(t, filepath.Join(dir, "large"), bytes.Repeat([]byte("x"), 600<<10), 0o644)
		file := s.write(t, copyFields(dir, "copy"))
		for _, tt := range []struct {
			size string
			full bool
		}{{"400k", true}, {"4m", false}} {
			state := smallState(t, s, tt.size)
			r := s.call(t, call{State: state}, "exec", "--spec", file, "--", "true")
			if !tt.full {
				// Rootless Podman's mount namespace is older than this file system.
				if r.Code != 0 && !s.rootless() || strings.Contains(r.Stderr, "no space") {
					t.Errorf("control: exit %d: %s", r.Code, r.Stderr)
				}
				continue
			}
			r.refused(t, shim.ReasonState)
			if !strings.Contains(r.Stderr, "no space left on device") || !strings.Contains(r.Stderr, "agentshim: hint: free space") {
				t.Errorf("standard error: %s", r.Stderr)
			}
			if left, _ := filepath.Glob(filepath.Join(state, "agentshim/runs/*/*copy*")); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
		}
	})
}
