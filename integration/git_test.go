package integration

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/agentshim/agentshim/shim"
)

// repo is a user's repository with a branch that is checked out, main, and another, in
// a folder that the agent's user owns.
type repo struct {
	t        *testing.T
	s        setup
	top, dir string
	mark     string
}

func newRepo(t *testing.T, s setup) repo {
	t.Helper()
	top := s.folder(t)
	r := repo{t: t, s: s, top: top, dir: filepath.Join(top, "repo"), mark: filepath.Join(top, "tripped")}
	place(t, filepath.Join(r.dir, "file"), []byte("one\n"), 0o644)
	place(t, filepath.Join(top, "trip"), []byte("#!/bin/sh\n: >"+r.mark+"\n"), 0o755)
	// Child processes of a git take this from no command line.
	place(t, filepath.Join(top, ".gitconfig"), []byte("[safe]\n\tdirectory = *\n[protocol \"file\"]\n\tallow = always\n"), 0o644)
	for _, args := range [][]string{
		{"init", "-q", "-b", "main"},
		{"config", "remote.origin.url", "https://user:secret@git.example/x"},
		{"config", "user.name", "The User"},
		{"config", "user.email", "user@example.com"},
		{"add", "."},
		{"commit", "-q", "-m", "one"},
		{"checkout", "-q", "-b", "secret"},
		{"commit", "-q", "--allow-empty", "-m", "secret"},
		{"checkout", "-q", "main"},
	} {
		r.git(r.dir, args...)
	}
	s.own(t, top)
	return r
}

// git runs the host's git in dir, as its user would.
func (r repo) git(dir string, args ...string) string {
	r.t.Helper()
	out, err := r.try(dir, args...)
	if err != nil {
		r.t.Fatalf("git %q: %v\n%s", args, err, out)
	}
	return out
}

func (r repo) try(dir string, args ...string) (string, error) {
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + r.top, "GIT_CONFIG_NOSYSTEM=1", "GIT_OPTIONAL_LOCKS=0",
		"GIT_AUTHOR_NAME=u", "GIT_AUTHOR_EMAIL=u@example.com", "GIT_COMMITTER_NAME=u", "GIT_COMMITTER_EMAIL=u@example.com",
	}
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// sound fails t unless the host's repository is whole, its own references and
// configuration as they were, and no tripwire has fired.
func (r repo) sound() func() {
	r.t.Helper()
	state := func() string {
		config, err := os.ReadFile(filepath.Join(r.dir, ".git/config"))
		if err != nil {
			r.t.Fatal(err)
		}
		index, err := os.ReadFile(filepath.Join(r.dir, ".git/index"))
		if err != nil {
			r.t.Fatal(err)
		}
		return fmt.Sprintf("%s\n%q\n%s\n%s\n%s", config, index, r.git(r.dir, "for-each-ref", "refs/heads"), r.git(r.dir, "log", "--oneline"), r.git(r.dir, "status", "--porcelain"))
	}
	before := state()
	return func() {
		r.t.Helper()
		r.git(r.dir, "fsck", "--strict", "--full")
		if after := state(); after != before {
			r.t.Errorf("the host's repository was\n%s\nand is\n%s", before, after)
		}
		if r.fired() {
			r.t.Error("a tripwire fired")
		}
		uid, gid := r.s.hostOwner(r.t)
		if wrong, _ := notOwnedBy(r.t, filepath.Join(r.dir, ".git"), uid, gid); len(wrong) > 0 {
			r.t.Errorf("not the repository's owner's: %q", wrong)
		}
	}
}

func (r repo) fired() bool { _, err := os.Stat(r.mark); return err == nil }

// fields are a harness file of a shell with git in it.
func (r repo) fields(dir string, workspace map[string]any) spec {
	w := map[string]any{"source": dir, "mode": "writable"}
	for k, v := range workspace {
		w[k] = v
	}
	return spec{"image": "agentshim/clients:test", "workspace": w}
}

// gitTries is what an agent sees and does in a repository of its own, as NAME=value
// lines, and what it leaves for a git of the host's that runs there: TRIP is a program
// of the host's.
const gitTries = `
errno() { sed -n 's/.*: //p' | tail -1; }
echo "refs=$(git for-each-ref --format='%(refname)' | tr '\n' ' ')"
echo "status=$(git status --porcelain | wc -l)"
echo "secret=$(git cat-file -e SECRET && echo there)"
echo "config=$(git config -l | grep -c -e secret -e remote)"
echo "author=$(git var GIT_AUTHOR_IDENT | sed 's/>.*/>/')"
echo "move=$(mv .git other 2>&1 | errno)"
echo "objects=$(touch /.agentshim-git/objects/x 2>&1 | errno)"
echo two >>file
git commit -q -a -m two && git checkout -q -b idea && git commit -q --allow-empty -m idea && git checkout -q main
echo one >file
echo "commit=$(git rev-parse HEAD)"
echo "idea=$(git rev-parse idea)"
git config core.fsmonitor TRIP
git config core.editor TRIP
git config filter.x.clean TRIP
git config uploadpack.packObjectsHook TRIP
echo '* filter=x' >.git/info/attributes
for h in post-index-change reference-transaction pre-receive update post-commit; do printf '#!/bin/sh\nTRIP\n' >.git/hooks/$h; chmod +x .git/hooks/$h; done
`

// TestGitPrivate: M15, M16, A63. The agent has the branch and nothing else, its commits
// come back as a reference and nothing else, and nothing that it left runs on the host.
// The control is a host's git in the agent's repository.
func TestGitPrivate(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		r := newRepo(t, s)
		check, state := r.sound(), s.private(t)
		script := strings.NewReplacer("SECRET", r.git(r.dir, "rev-parse", "secret"), "TRIP", filepath.Join(r.top, "trip")).Replace(gitTries)
		file := s.write(t, r.fields(r.dir, nil))
		out := s.call(t, call{State: state}, "exec", "--spec", file, "--", script).ok(t)
		wantPairs(t, out.Stdout, map[string]string{
			"refs": "refs/heads/main ", "status": "0", "secret": "", "config": "0", "author": "The User <user@example.com>",
			"move": "Device or resource busy", "objects": "Read-only file system",
		})
		check()
		got, rec := pairs(t, out.Stdout), record(t, state)
		ref := "refs/agentshim/" + rec.ID
		if commit := r.git(r.dir, "rev-parse", ref); commit != got["commit"] || !strings.Contains(out.Stderr, `1 new commit of "main": git log `+ref) {
			t.Errorf("%s is %s, want %s\n%s", ref, commit, got["commit"], out.Stderr)
		}
		if !slices.Equal(rec.Git.Left, []string{"idea"}) || !strings.Contains(out.Stderr, "agentshim take "+rec.ID) {
			t.Errorf("left %q\n%s", rec.Git.Left, out.Stderr)
		}
		s.call(t, call{State: state}, "take", rec.ID, "--branch", "idea").ok(t)
		check()
		if commit := r.git(r.dir, "rev-parse", ref+"-idea"); commit != got["idea"] {
			t.Errorf("idea is %s, want %s", commit, got["idea"])
		}
		if _, err := os.Lstat(rec.Git.Kept); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", rec.Git.Kept, err)
		}

		// Control: an agent's repository that is still there.
		state = s.private(t)
		s.call(t, call{State: state}, "exec", "--spec", file, "--", script).ok(t)
		rec = record(t, state)
		if r.fired() {
			t.Fatal("a tripwire fired")
		}
		_, _ = r.try(r.dir, "--git-dir="+filepath.Join(rec.Git.Kept, "private"), "--work-tree="+r.dir, "status")
		if !r.fired() {
			t.Error("control: no tripwire fires where a git runs in the agent's repository")
		}
		s.call(t, call{State: state}, "take", rec.ID, "--discard").ok(t)
		if _, err := os.Lstat(rec.Git.Kept); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", rec.Git.Kept, err)
		}
	})
}

const gitCommit = `git commit -q --allow-empty -m new; git rev-parse HEAD >&2; `

// TestGitComesBack: however a run ends its commits come back, also of two at a time; a
// run without one writes nothing.
func TestGitComesBack(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		r := newRepo(t, s)
		check := r.sound()
		refs := func() int {
			return len(strings.Fields(r.git(r.dir, "for-each-ref", "--format=%(refname)", "refs/agentshim")))
		}
		ends := func(code int, r2 result) {
			t.Helper()
			if r2.Code != code {
				t.Errorf("exit %d, want %d\n%s", r2.Code, code, r2.Stderr)
			}
		}
		quiet := untouched(t, filepath.Join(r.dir, ".git"))
		s.sh(t, r.fields(r.dir, map[string]any{"mode": "read-only"}), "git status; git log").ok(t)
		quiet()

		limited := r.fields(r.dir, nil)
		limited["timeout"] = "3s"
		file := s.write(t, r.fields(r.dir, nil))
		var both sync.WaitGroup
		both.Go(func() { ends(124, s.exec(t, s.write(t, limited), gitCommit+"sleep 60")) })
		both.Go(func() {
			ends(137, s.call(t, call{}, "exec", "--spec", file, "--command", "--", "sh", "-c", gitCommit+"kill -9 $$"))
		})
		both.Wait()
		check()
		if n := refs(); n != 2 {
			t.Errorf("%d references, want 2", n)
		}

		// Lost: its agentshim dies without a word, and prune takes what is there.
		state := s.private(t)
		cmd, cancel := s.command(t, call{State: state}, agentshim, "exec", "--quiet", "--spec", file, "--", gitCommit+"echo ready; sleep 60")
		defer cancel()
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		_, _ = out.Read(make([]byte, 1))
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		var pruned string
		eventually(t, "prune takes the lost run's commits", func() bool {
			pruned += s.call(t, call{State: state}, "prune").Stdout
			return refs() == 3
		})
		if rec := record(t, state); !strings.Contains(pruned, "git log refs/agentshim/"+rec.ID) || rec.Git == nil || rec.Git.Kept != "" {
			t.Errorf("%s\n%s", pruned, mustJSON(t, rec.Git))
		}
		check()
	})
}

// TestGitLost: commits that can't be taken fail a run that went well and no other, and
// are not lost.
func TestGitLost(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		r := newRepo(t, s)
		// A reference in the way of all of refs/agentshim.
		place(t, filepath.Join(r.dir, ".git/refs/agentshim"), []byte(r.git(r.dir, "rev-parse", "HEAD")+"\n"), 0o644)
		s.own(t, r.dir)
		for code, want := range map[int]int{0: shim.ExitRefused, 7: 7} {
			state := s.private(t)
			file := s.write(t, r.fields(r.dir, nil))
			got := s.call(t, call{State: state}, "exec", "--quiet", "--spec", file, "--", fmt.Sprintf("%s exit %d", gitCommit, code))
			rec := record(t, state)
			if got.Code != want || !strings.Contains(got.Stderr, "its repository is kept in") || !strings.Contains(got.Stderr, "agentshim take "+rec.ID) {
				t.Errorf("exit %d, want %d\n%s", got.Code, want, got.Stderr)
			}
			if code != 0 {
				continue
			}
			if rec.Reason != shim.ReasonGit {
				t.Errorf("reason %s", rec.Reason)
			}
			s.call(t, call{State: state}, "take", rec.ID).refused(t, shim.ReasonGit)
			noError(t, os.Rename(filepath.Join(r.dir, ".git/refs/agentshim"), filepath.Join(r.top, "away")))
			s.call(t, call{State: state}, "take", rec.ID).ok(t)
			r.git(r.dir, "log", "refs/agentshim/"+rec.ID)
			s.call(t, call{State: state}, "take", rec.ID).refused(t, shim.ReasonGit)
			noError(t, os.RemoveAll(filepath.Join(r.dir, ".git/refs/agentshim")))
			noError(t, os.Rename(filepath.Join(r.top, "away"), filepath.Join(r.dir, ".git/refs/agentshim")))
		}
	})
}

// TestGitForms: linked working trees and submodules, private and shared; no repository
// for the agent; and what a shared one guards.
func TestGitForms(t *testing.T) {
	const works = `set -e
echo "log=$(git log --format=%s | head -1)"
echo "status=$(git status --porcelain | wc -l)"
git commit -q --allow-empty -m new
echo "commit=$(git rev-parse HEAD)"
`
	const guards = `
errno() { sed -n 's/.*: //p' | tail -1; }
d=$(git rev-parse --git-common-dir)
echo "config=$( (echo x >>$d/config) 2>&1 | errno)"
echo "replace=$(touch /tmp/c && cp /tmp/c $d/c && mv $d/c $d/config 2>&1 | errno)"
echo "hook=$(touch $d/hooks/post-commit 2>&1 | errno)"
echo "hooks=$(mv $d/hooks $d/other 2>&1 | errno)"
echo "dir=$(test $d = .git && mv $d other 2>&1 | errno)"
`
	guarded := map[string]string{"replace": "Device or resource busy", "hook": "Read-only file system", "hooks": "Device or resource busy"}
	each(t, func(t *testing.T, s setup) {
		r := newRepo(t, s)
		linked, super := filepath.Join(r.top, "linked"), filepath.Join(r.top, "super")
		r.git(r.dir, "worktree", "add", "-q", linked, "-b", "topic")
		r.git(r.top, "init", "-q", "-b", "main", super)
		r.git(super, "submodule", "--quiet", "add", r.dir, "sub")
		r.git(super, "commit", "-q", "-m", "one")
		r.git(filepath.Join(super, "sub"), "config", "user.name", "u")
		r.git(filepath.Join(super, "sub"), "config", "user.email", "u@example.com")
		s.own(t, r.top)
		for name, dir := range map[string]string{"linked": linked, "submodule": filepath.Join(super, "sub")} {
			t.Run(name, func(t *testing.T) {
				out := s.sh(t, r.fields(dir, nil), works).ok(t)
				wantPairs(t, out.Stdout, map[string]string{"log": "one", "status": "0"})
				if list := r.git(dir, "for-each-ref", "--format=%(objectname)", "refs/agentshim"); list != pairs(t, out.Stdout)["commit"] {
					t.Errorf("references %q\n%s", list, out.Stdout)
				}
				out = s.sh(t, r.fields(dir, map[string]any{"git": "shared"}), works+guards).ok(t)
				wantPairs(t, out.Stdout, guarded)
				if pairs(t, out.Stdout)["config"] == "" {
					t.Error("the agent can write the configuration")
				}
				if head := r.git(dir, "rev-parse", "HEAD"); head != pairs(t, out.Stdout)["commit"] {
					t.Errorf("HEAD is %s\n%s", head, out.Stdout)
				}
				r.git(dir, "fsck", "--strict")
				r.git(dir, "status")
			})
		}
		t.Run("shared", func(t *testing.T) {
			out := s.sh(t, r.fields(r.dir, map[string]any{"git": "shared"}), works+guards).ok(t)
			wantPairs(t, out.Stdout, guarded)
			wantPairs(t, out.Stdout, map[string]string{"config": "Read-only file system", "dir": "Device or resource busy"})
			r.git(r.dir, "fsck", "--strict")
			// Control: without the guards a hook can be written.
			control := spec{"image": "agentshim/clients:test"}
			control["mounts"] = []any{map[string]any{"source": r.dir, "target": "/w", "writable": true}}
			s.sh(t, control, "touch /w/.git/hooks/post-commit && echo >>/w/.git/config").ok(t)
		})
		t.Run("none", func(t *testing.T) {
			for dir, kind := range map[string]string{r.dir: "d", linked: "f"} {
				out := s.sh(t, r.fields(dir, map[string]any{"git": "none"}), `
errno() { sed -n 's/.*: //p' | tail -1; }
echo "kind=$(test -d .git && echo d || echo f)"
echo "inside=$(ls -A .git | grep -v '^.git$'; test -s .git && test -f .git && echo full)"
echo "write=$( (if test -d .git; then touch .git/x; else echo x >.git; fi) 2>&1 | errno)"
echo "move=$(mv .git x 2>&1 | errno)"
echo "git=$(git status >/dev/null 2>&1; echo $?)"`).ok(t)
				wantPairs(t, out.Stdout, map[string]string{"kind": kind, "inside": "", "write": "Read-only file system", "move": "Device or resource busy", "git": "128"})
			}
		})
	})
}

// TestGitRefuses: M16, M19, A57. A repository that is not what it seems is not opened for
// an agent: by default it has none, and says so; where the file asks for one, or where
// nothing can cover it, the run is refused.
func TestGitRefuses(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		r := newRepo(t, s)
		victim := filepath.Join(r.top, "victim")
		r.git(r.top, "init", "-q", "-b", "main", victim)
		folder := func(name string, f func(dir string)) string {
			dir := filepath.Join(r.top, name)
			noError(t, os.MkdirAll(dir, 0o755))
			f(dir)
			return dir
		}
		foreign := folder("foreign", func(dir string) {
			place(t, filepath.Join(dir, ".git"), []byte("gitdir: "+victim+"/.git\n"), 0o644)
		})
		borrowed := folder("borrowed", func(dir string) {
			r.git(r.top, "clone", "-q", "--shared", r.dir, dir)
		})
		linked := folder("link", func(dir string) { noError(t, os.Symlink(victim+"/.git", filepath.Join(dir, ".git"))) })
		bare := folder("bare", func(dir string) { r.git(r.top, "init", "-q", "--bare", dir) })
		s.own(t, r.top)
		for _, dir := range []string{foreign, borrowed} {
			out := s.sh(t, r.fields(dir, nil), "git log >/dev/null 2>&1; echo $?; cat .git 2>/dev/null; true").ok(t)
			if out.Stdout != "128\n" || !strings.Contains(out.Stderr, "warning: the agent has no repository") {
				t.Errorf("%s: %s\n%s", dir, out.Stdout, out.Stderr)
			}
			s.sh(t, r.fields(dir, map[string]any{"git": "private"}), "true").refused(t, shim.ReasonGit)
		}
		s.sh(t, r.fields(foreign, map[string]any{"git": "shared"}), "true").refused(t, shim.ReasonGit)
		for _, git := range []any{nil, "none", "private", "shared"} {
			w := map[string]any{}
			if git != nil {
				w["git"] = git
			}
			s.sh(t, r.fields(linked, w), "true").refused(t, shim.ReasonGit)
			if git != "shared" {
				s.sh(t, r.fields(bare, w), "true").refused(t, shim.ReasonGit)
			}
		}
		// No git on the host.
		path := s.private(t)
		client, err := exec.LookPath(s.engine)
		noError(t, err)
		noError(t, os.Symlink(client, filepath.Join(path, s.engine)))
		file := s.write(t, r.fields(r.dir, nil))
		s.call(t, call{Env: []string{"PATH=" + path}}, "plan", "--spec", file).refused(t, shim.ReasonGit)
		s.call(t, call{Env: []string{"PATH=" + path}}, "plan", "--spec", s.write(t, r.fields(r.dir, map[string]any{"git": "none"}))).ok(t)
		if out := s.call(t, call{}, "plan", "--spec", file).ok(t); !strings.Contains(out.Stdout, "refs/agentshim/RUN_ID") {
			t.Error(out.Stdout)
		}
	})
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
