package integration

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/agentshim/agentshim/shim"
	plan "github.com/agentshim/agentshim/spec"
)

// homeFiles puts a file "old" for each name into a folder of the caller's, and names them
// as home.files, with writeBack where the name does not start with "in".
func (s setup) homeFiles(t *testing.T, names ...string) (dir string, home map[string]any) {
	t.Helper()
	dir = s.private(t)
	var list []map[string]any
	for _, name := range names {
		place(t, filepath.Join(dir, name), []byte("old"), 0o640)
		list = append(list, map[string]any{"source": filepath.Join(dir, name), "target": ".agent/" + name, "writeBack": !strings.HasPrefix(name, "in")})
	}
	s.chown(t, dir)
	return dir, map[string]any{"sizeMb": 16, "files": list}
}

func (s setup) wantHost(t *testing.T, path, content string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(b, []byte(content)) {
		t.Errorf("%s holds %q, %v; want %q", filepath.Base(path), b, err, content)
	}
	st, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	uid, gid := s.ids(t)
	own := st.Sys().(*syscall.Stat_t)
	if st.Mode() != 0o640 || int(own.Uid) != uid || int(own.Gid) != gid {
		t.Errorf("%s is %v of %d:%d", filepath.Base(path), st.Mode(), own.Uid, own.Gid)
	}
}

// TestWriteBack: what the agent leaves comes back to the host only where the file says
// so, and only a regular file of a sane size; the exit code is the agent's.
func TestWriteBack(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir, home := s.homeFiles(t, "changed", "same", "gone", "link", "large", "empty", "folder", "in-only")
		file, state := s.write(t, spec{"home": home}), s.private(t)
		place(t, filepath.Join(dir, "in-secret"), []byte("secret"), 0o600)
		same, err := os.Stat(filepath.Join(dir, "same"))
		if err != nil {
			t.Fatal(err)
		}
		r := s.call(t, call{State: state}, "exec", "--spec", file, "--", `cd ~/.agent; printf new > changed; printf new > in-only; rm gone link folder
ln -s `+filepath.Join(dir, "in-secret")+` link; head -c 2000000 /dev/zero > large; : > empty; mkdir folder; exit 7`)
		if r.Code != 7 {
			t.Errorf("exit %d: %s", r.Code, r.Stderr)
		}
		s.wantHost(t, filepath.Join(dir, "changed"), "new")
		for _, name := range []string{"same", "gone", "link", "large", "empty", "folder", "in-only"} {
			s.wantHost(t, filepath.Join(dir, name), "old")
		}
		if now, err := os.Stat(filepath.Join(dir, "same")); err != nil || !os.SameFile(same, now) {
			t.Errorf("an unchanged file was replaced: %v", err)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 9 {
			t.Errorf("the folder holds %v, %v", entries, err)
		}
		rec := record(t, state)
		outcomes := map[string]string{}
		for _, w := range rec.WriteBack {
			outcomes[w.Target] = w.Outcome
		}
		for name, want := range map[string]string{"changed": shim.BackReplaced, "same": shim.BackUnchanged, "gone": shim.BackKept, "link": shim.BackKept, "large": shim.BackKept, "empty": shim.BackKept, "folder": shim.BackKept, "in-only": ""} {
			if got := outcomes[".agent/"+name]; got != want {
				t.Errorf("%s: %q, want %q", name, got, want)
			}
		}
		wantText(t, r.Stderr, "now holds what the agent left in ~/.agent/changed", `gone" stays as it is: the agent's: it is gone`, "it is a link", "larger than 1048576 bytes", "is empty")
		if !slices.ContainsFunc(rec.Widenings, func(n plan.Note) bool { return n.Name == "write-back:.agent/changed" }) {
			t.Errorf("no widening: %v", rec.Widenings)
		}
	})
}

// TestWriteBackStopped: a harness that is told to end is no exception, and the host's own
// change meanwhile stays.
func TestWriteBackStopped(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir, home := s.homeFiles(t, "agents", "both")
		b := s.begin(t, spec{"home": home}, `for f in agents both; do printf new > ~/.agent/$f; done; echo ready; exec sleep 100`)
		if err := os.WriteFile(filepath.Join(dir, "both"), []byte("host's"), 0o640); err != nil {
			t.Fatal(err)
		}
		b.signal(t, syscall.SIGTERM)
		rec := b.over(t, 128+int(syscall.SIGTERM))
		s.wantHost(t, filepath.Join(dir, "agents"), "new")
		s.wantHost(t, filepath.Join(dir, "both"), "host's")
		if w := rec.WriteBack; len(w) != 2 || w[0].Outcome != shim.BackReplaced || w[1].Outcome != shim.BackKept || !strings.Contains(w[1].Detail, "changed on the host") {
			t.Errorf("%+v", w)
		}
		t.Run("timeout", func(t *testing.T) {
			dir, home := s.homeFiles(t, "agents")
			r := s.sh(t, spec{"home": home, "timeout": "1s", "stopGrace": "1s"}, `trap "" TERM; printf late > ~/.agent/agents; while :; do sleep 1; done`)
			if r.Code != shim.ExitTimeout {
				t.Errorf("exit %d: %s", r.Code, r.Stderr)
			}
			s.wantHost(t, filepath.Join(dir, "agents"), "late")
		})
	})
}
