package integration

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agentshim/agentshim/shim"
)

// pairs reads the NAME=value lines that a script printed.
func pairs(t *testing.T, out string) map[string]string {
	t.Helper()
	m := map[string]string{}
	for line := range strings.Lines(out) {
		name, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		if !ok {
			t.Fatalf("line %q in\n%s", line, out)
		}
		m[name] = value
	}
	return m
}

// wantPairs compares a script's NAME=value lines with those wanted; others are ignored.
func wantPairs(t *testing.T, out string, want map[string]string) {
	t.Helper()
	got := pairs(t, out)
	for name, value := range want {
		if got[name] != value {
			t.Errorf("%s = %q, want %q", name, got[name], value)
		}
	}
}

// place puts a file with exactly that mode where the test wants it, its
// folders included.
func place(t *testing.T, path string, content []byte, mode os.FileMode) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
	return path
}

// hostOwner is who owns what the agent writes when the file names no user.
func (s setup) hostOwner(t *testing.T) (uid, gid int) {
	t.Helper()
	if uid, gid = s.ids(t); uid == 0 {
		return folderOwner, folderOwner
	}
	return uid, gid
}

// own gives everything below dir to the one who would own the agent's files.
func (s setup) own(t *testing.T, dir string) {
	t.Helper()
	uid, gid := s.hostOwner(t)
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, uid, gid)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// notOwnedBy lists what lies below dir and belongs to somebody else.
func notOwnedBy(t *testing.T, dir string, uid, gid int) (wrong []string, all int) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		all++
		st := info.Sys().(*syscall.Stat_t)
		if int(st.Uid) != uid || int(st.Gid) != gid {
			wrong = append(wrong, fmt.Sprintf("%s belongs to %d:%d", path, st.Uid, st.Gid))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return wrong, all
}

// who prints everything a program could ask about its user.
const who = `
echo "ids=$(id -u):$(id -g)"
echo "groups=$(id -G)"
echo "names=$(whoami):$(id -gn)"
echo "env=$HOME:$USER:$LOGNAME:$XDG_CONFIG_HOME:$XDG_CACHE_HOME:$XDG_DATA_HOME:$XDG_STATE_HOME"
echo "passwd=$(grep -c "^agent:x:$(id -u):$(id -g):" /etc/passwd)"
echo "home=$(stat -c %u:%g:%a "$HOME")"
echo "runtime=$XDG_RUNTIME_DIR:$(stat -c %u:%a "$XDG_RUNTIME_DIR")"
`

// agentEnv is the middle of who's answer for a user that is not root.
const agentEnv = "/home/agent:agent:agent:/home/agent/.config:/home/agent/.cache:/home/agent/.local/share:/home/agent/.local/state"

// U05, U08, U10, part 7: nobody names a user. The agent is the caller, or for root
// the workspace's owner; what it writes belongs to that one on the host.
func TestIdentityDefault(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		place(t, filepath.Join(dir, "secret"), []byte("mine"), 0o600)
		s.own(t, dir)
		uid, gid := s.hostOwner(t)
		fields := spec{"user": nil, "workspace": map[string]any{"source": dir, "mode": "writable"}}
		r := s.sh(t, fields, who+`
echo "owner=$(stat -c %u:%g .):$(stat -c %u:%g secret):$(cat secret)"
umask 022; mkdir -p a/b; echo x > a/b/file; ln -s file a/b/link; cp /bin/busybox a/program; mv secret a/moved
`).ok(t)
		id := fmt.Sprintf("%d:%d", uid, gid)
		wantPairs(t, r.Stdout, map[string]string{
			"ids": id, "groups": fmt.Sprint(gid), "names": "agent:agent", "env": agentEnv, "passwd": "1",
			"home":    id + ":700",
			"runtime": fmt.Sprintf("/run/user/%d:%d:700", uid, uid),
			"owner":   id + ":" + id + ":mine", // U10: git takes a repository whose owner it runs as
		})
		wrong, all := notOwnedBy(t, dir, uid, gid)
		if len(wrong) > 0 || all != 7 {
			t.Errorf("%d files below the workspace, want 7; not of %s: %q", all, id, wrong)
		}
	})
	// What the engine alone makes of a uid that the image does not know.
	t.Run("control U05 U08", func(t *testing.T) {
		each(t, func(t *testing.T, s setup) {
			r := s.bare(t, "run", "--rm", "--network=none", "--user=4321:4321", "agentshim/hello:test", "sh", "-c", "echo home=$HOME; whoami")
			if strings.Contains(r.Stdout, "home=/home/agent\n") {
				t.Errorf("the engine gives the home by itself: %q", r.Stdout)
			}
			if s.engine == "docker" && r.Code == 0 {
				t.Errorf("docker knows uid 4321: %q", r.Stdout)
			}
		})
	})
}

// U06, U09's good form, the widening root-user.
func TestIdentityGiven(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		t.Run("1234:2345", func(t *testing.T) {
			dir := s.folder(t)
			uid, gid := s.hostOwner(t)
			if s.root() || s.engine == "docker" { // the uid is the host's own
				uid, gid = 1234, 2345
			}
			// A caller who can't look into the workspace can't have it.
			if err := errors.Join(os.Chown(dir, uid, gid), os.Chmod(dir, 0o755)); err != nil {
				t.Fatal(err)
			}
			fields := spec{"user": "1234:2345", "workspace": map[string]any{"source": dir, "mode": "writable"}}
			r := s.sh(t, fields, who+`echo "owner=$(stat -c %u:%g .)"; mkdir d; echo x > d/f`).ok(t)
			wantPairs(t, r.Stdout, map[string]string{
				"ids": "1234:2345", "groups": "2345", "names": "agent:agent", "env": agentEnv, "passwd": "1",
				"home": "1234:2345:700", "owner": "1234:2345",
			})
			if wrong, all := notOwnedBy(t, dir, uid, gid); len(wrong) > 0 || all != 3 {
				t.Errorf("%d files, want 3: %q", all, wrong)
			}
		})
		t.Run("0:0 without accept", func(t *testing.T) {
			r := s.sh(t, spec{"user": "0:0"}, "id -u").refused(t, shim.ReasonWidening)
			wantText(t, r.Stderr, "root-user", "agentshim: hint: ", `"accept"`)
		})
		t.Run("0:0 accepted", func(t *testing.T) {
			fields := spec{"user": "0:0", "accept": []string{"root-user", "rootless-cgroup-limits"}}
			r := s.sh(t, fields, who+`echo "caps=$(grep -h ^Cap /proc/self/status | tr -d 'CapInhPrmEffBndAb:\t\n0')"; touch /etc/x 2>/dev/null; echo "etc=$?"`).ok(t)
			wantPairs(t, r.Stdout, map[string]string{"ids": "0:0", "names": "root:root", "caps": "", "etc": "1", "home": "0:0:700"})
		})
		t.Run("0:5", func(t *testing.T) {
			if !s.rootless() {
				return // nothing to map
			}
			r := s.sh(t, spec{"user": "0:5", "accept": []string{"root-user", "rootless-cgroup-limits"}}, "id").refused(t, shim.ReasonIdentity)
			wantText(t, r.Stderr, "0:5", "agentshim: hint: ")
		})
		t.Run("U06 beyond the subordinate range", func(t *testing.T) {
			r := s.sh(t, spec{"user": "70000:70000"}, "id -u")
			if !s.rootless() {
				if r.ok(t); r.Stdout != "70000\n" {
					t.Errorf("id -u printed %q", r.Stdout)
				}
				return
			}
			r.refused(t, shim.ReasonIdentity)
			wantText(t, r.Stderr, "70000:70000", "65536", "agentshim: hint: ", "/etc/subuid", "/etc/subgid")
			if c := s.bare(t, "run", "--rm", "--network=none", "--user=70000:70000", "agentshim/hello:test", "true"); c.Code == 0 {
				t.Error("control: podman alone runs uid 70000")
			}
		})
	})
}

// wantText fails t unless text holds every part.
func wantText(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%q is missing in\n%s", part, text)
		}
	}
}

// A root caller that no workspace says another user for.
func TestIdentityRootCaller(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		rootOwned := s.folder(t)
		if err := errors.Join(os.Chown(rootOwned, 0, 0), os.Chmod(rootOwned, 0o755)); err != nil {
			t.Fatal(err)
		}
		for _, tc := range []struct {
			name      string
			workspace any
		}{
			{"no workspace", nil},
			{"workspace of root", map[string]any{"source": rootOwned}},
			{"workspace mode none", map[string]any{"mode": "none"}},
		} {
			t.Run(tc.name, func(t *testing.T) {
				fields := spec{"user": nil}
				if tc.workspace != nil {
					fields["workspace"] = tc.workspace
				}
				r := s.sh(t, fields, "id -u")
				if !s.root() { // the control: the same file is fine for another caller
					if uid, _ := s.ids(t); r.ok(t).Stdout != fmt.Sprintln(uid) {
						t.Errorf("id -u printed %q", r.Stdout)
					}
					return
				}
				r.refused(t, shim.ReasonIdentity)
				wantText(t, r.Stderr, "agentshim: hint: ", `"user": "1000:1000"`)
			})
		}
	})
}

// U03, U04.
func TestUserns(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		t.Run("keep-id", func(t *testing.T) {
			r := s.sh(t, spec{"userns": "keep-id", "user": nil, "workspace": map[string]any{"source": s.folder(t)}}, "id -u")
			if s.name == "podman-root" { // U04
				r.refused(t, shim.ReasonPolicy)
				wantText(t, r.Stderr, "keep-id", "agentshim: hint: leave userns out")
			} else if r.ok(t); r.Stdout != fmt.Sprintln(s.agentUID(t)) {
				t.Errorf("id -u printed %q", r.Stdout)
			}
			bare := s.bare(t, "run", "--rm", "--network=none", "--userns=keep-id", "agentshim/hello:test", "true")
			if works := bare.Code == 0; works != s.rootless() {
				t.Errorf("control: the bare engine ended with %d: %s", bare.Code, bare.Stderr)
			}
		})
		t.Run("auto", func(t *testing.T) {
			if s.engine != "docker" {
				return // podman's own set-up decides whether it has ranges for it
			}
			s.sh(t, spec{"userns": "auto"}, "id -u").refused(t, shim.ReasonPolicy)
		})
	})
}

// U09: what engines take for uid 0, or for a name in the image, is refused.
func TestUserForm(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		for _, user := range []string{":1234", "1234", "1234:", "root", "root:root", "-1:0", "+1:1", "01:1", "1:1:1", "4294967295:1", " 1:1", "1:1\n", "0x1:1"} {
			r := s.sh(t, spec{"user": user}, "id -u").refused(t, shim.ReasonSpecInvalid)
			wantText(t, r.Stderr, "$.user", "UID:GID")
		}
		if r := s.bare(t, "run", "--rm", "--network=none", "--user=:1234", "agentshim/hello:test", "id", "-u"); r.Stdout != "0\n" {
			t.Errorf("control: the bare engine ran %q", r.Stdout)
		}
	})
}

// The image's own numeric USER differs from who the agent would be.
func TestImageUser(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		fields := spec{"image": "agentshim/user:test", "user": nil, "workspace": map[string]any{"source": s.folder(t)}}
		r := s.sh(t, fields, "id -u").refused(t, shim.ReasonImageUser)
		uid, gid := s.hostOwner(t)
		wantText(t, r.Stderr, "1234", fmt.Sprintf("agentshim: hint: add \"user\": \"%d:%d\"", uid, gid))
		fields["user"] = fmt.Sprintf("%d:%d", uid, gid)
		if r := s.sh(t, fields, "id -u").ok(t); r.Stdout != fmt.Sprintln(uid) {
			t.Errorf("with user given: id -u printed %q", r.Stdout)
		}
	})
}

// U07: what the caller reads only through a supplementary group, the agent can't;
// agentshim says so.
func TestSupplementaryGroup(t *testing.T) {
	const group = 24777
	each(t, func(t *testing.T, s setup) {
		if s.root() {
			return // root needs no group
		}
		dir := s.folder(t)
		place(t, filepath.Join(dir, "file"), []byte("shared"), 0o644)
		if err := os.Chown(dir, 0, group); err != nil {
			t.Fatal(err)
		}
		file := s.write(t, spec{"mounts": []map[string]any{{"source": dir, "target": "/data"}}})
		run := func(mode os.FileMode) result {
			if err := os.Chmod(dir, mode); err != nil {
				t.Fatal(err)
			}
			cmd, cancel := s.command(t, call{}, agentshim, "exec", "--spec", file, "--", "cat /data/file")
			defer cancel()
			cmd.SysProcAttr.Credential.Groups = append(cmd.SysProcAttr.Credential.Groups, group)
			return finish(t, cmd)
		}
		r := run(0o750)
		wantText(t, r.Stderr, "agentshim: warning: $.mounts[0]", "supplementary group 24777", "Permission denied")
		if r.Code == 0 || r.Stdout != "" {
			t.Errorf("the agent read it: %+v", r)
		}
		if r := run(0o755).ok(t); r.Stdout != "shared" || strings.Contains(r.Stderr, "supplementary") {
			t.Errorf("control, readable for all: %+v", r)
		}
	})
}
