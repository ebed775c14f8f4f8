package shim

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// gitFixture is a user's repository with two branches, main and secret, and a
// working tree on main. At its end the host's git must find nothing wrong with it.
type gitFixture struct {
	t         testing.TB
	dir, work string
	prog      gitProgram
	made      int
}

func newGitFixture(t testing.TB) *gitFixture {
	t.Helper()
	f := bareFixture(t)
	f.host("init", "-q", "-b", "main", ".")
	f.write("README", "one\n")
	f.write("src/a.txt", "a\n")
	f.host("add", ".")
	f.host("commit", "-q", "-m", "one")
	f.host("checkout", "-q", "-b", "secret")
	f.write("token", "the secret branch's own\n")
	f.host("add", ".")
	f.host("commit", "-q", "-m", "secret")
	f.host("checkout", "-q", "main")
	f.write("README", "two\n")
	f.host("commit", "-q", "-a", "-m", "two")
	t.Cleanup(func() {
		for _, args := range [][]string{{"status"}, {"log", "--all", "--oneline"}, {"fsck", "--strict", "--full"}} {
			if out, err := f.plain(f.work, args...); err != nil {
				t.Errorf("host's git %s: %v\n%s", args[0], err, out)
			}
		}
	})
	return f
}

// bareFixture is an empty folder and the host's git.
func bareFixture(t testing.TB) *gitFixture {
	t.Helper()
	git, err := exec.LookPath("git")
	if err != nil {
		if os.Getenv("AGENTSHIM_REQUIRE_ALL") != "" {
			t.Fatal("AGENTSHIM_REQUIRE_ALL is set and there is no git")
		}
		t.Skip("no git")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f := &gitFixture{t: t, dir: dir, work: filepath.Join(dir, "work"), prog: gitProgram{Runner: Exec{}, Path: git}}
	for _, d := range []string{f.work, filepath.Join(dir, "home"), filepath.Join(dir, "own")} {
		must(t, os.Mkdir(d, 0o755))
	}
	return f
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// plain runs git as its user would, in dir.
func (f *gitFixture) plain(dir string, args ...string) (string, error) {
	return f.withInput("protocol=https\nhost=example.com\n\n", dir, args...) // for git credential
}

func (f *gitFixture) withInput(input, dir string, args ...string) (string, error) {
	cmd := exec.Command(f.prog.Path, args...)
	cmd.Dir = dir
	cmd.Stdin = strings.NewReader(input)
	cmd.Env = []string{
		"HOME=" + filepath.Join(f.dir, "home"), "PATH=/usr/bin:/bin", "LC_ALL=C", "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0",
		"GIT_AUTHOR_NAME=U", "GIT_AUTHOR_EMAIL=u@example.com", "GIT_COMMITTER_NAME=U", "GIT_COMMITTER_EMAIL=u@example.com",
		"GIT_AUTHOR_DATE=2024-01-01T00:00:00Z", "GIT_COMMITTER_DATE=2024-01-01T00:00:00Z",
		"GIT_CONFIG_COUNT=2", "GIT_CONFIG_KEY_0=protocol.file.allow", "GIT_CONFIG_VALUE_0=always", "GIT_CONFIG_KEY_1=safe.directory", "GIT_CONFIG_VALUE_1=*",
	}
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (f *gitFixture) git(dir string, args ...string) string {
	f.t.Helper()
	out, err := f.plain(dir, args...)
	if err != nil {
		f.t.Fatalf("git %q: %v\n%s", args, err, out)
	}
	return out
}

func (f *gitFixture) host(args ...string) string { f.t.Helper(); return f.git(f.work, args...) }

func (f *gitFixture) write(name, content string) {
	f.t.Helper()
	f.put(filepath.Join(f.work, name), content)
}

func (f *gitFixture) put(path, content string) {
	f.t.Helper()
	must(f.t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(f.t, os.WriteFile(path, []byte(content), 0o644))
}

func (f *gitFixture) append(path, content string) {
	f.t.Helper()
	b, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		f.t.Fatal(err)
	}
	f.put(path, string(b)+content)
}

// private makes a private repository of the fixture's.
func (f *gitFixture) private() (gitPrivate, error) {
	return f.privateOf(f.work)
}

func (f *gitFixture) privateOf(work string) (gitPrivate, error) {
	h, err := findGit(work, []string{work})
	if err != nil {
		return gitPrivate{}, err
	}
	f.made++
	dir := filepath.Join(f.dir, "own", fmt.Sprint("run", f.made))
	return f.prog.newPrivate(context.Background(), h, gitOptions{
		Dir: dir, ObjectsTarget: filepath.Join(dir, "base/objects"), PrivateTarget: filepath.Join(dir, "private"),
		Name: "Agent \"A\"", Email: "a@example.com",
	})
}

func (f *gitFixture) mustPrivate() gitPrivate {
	f.t.Helper()
	p, err := f.private()
	must(f.t, err)
	return p
}

// agent runs git as the agent in its sandbox would.
func (f *gitFixture) agent(p gitPrivate, args ...string) string {
	f.t.Helper()
	return f.git(p.Host.Work, append([]string{"--git-dir=" + p.Private(), "--work-tree=" + p.Host.Work}, args...)...)
}

func (f *gitFixture) agentCommits(p gitPrivate) string {
	f.t.Helper()
	f.put(filepath.Join(p.Host.Work, "agent.txt"), "by the agent\n")
	f.agent(p, "add", "agent.txt")
	f.agent(p, "-c", "commit.gpgsign=false", "commit", "-q", "-m", "by the agent")
	must(f.t, os.Remove(filepath.Join(p.Host.Work, "agent.txt")))
	return f.agent(p, "rev-parse", "HEAD")
}

func (f *gitFixture) take(p gitPrivate, change ...func(*gitTakeOptions)) (gitTaken, error) {
	o := gitTakeOptions{Run: "0123456789abcdef", Dir: filepath.Join(f.dir, "own", "take")}
	for _, c := range change {
		c(&o)
	}
	t, err := f.prog.takeBack(context.Background(), p, o)
	if _, statErr := os.Stat(o.Dir); statErr == nil {
		f.t.Errorf("%s is still there", o.Dir)
	}
	return t, err
}

// treeOf describes every file below dir: type, mode, owner, content, time.
func treeOf(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	must(t, filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(name, &st); err != nil {
			return err
		}
		content := ""
		if d.Type().IsRegular() && st.Size < 1<<30 {
			b, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			content = fmt.Sprintf("%x %d.%09d", sha256.Sum256(b), st.Mtim.Sec, st.Mtim.Nsec)
		}
		out[strings.TrimPrefix(name, dir)] = fmt.Sprintf("%o %d:%d %s", st.Mode, st.Uid, st.Gid, content)
		return nil
	}))
	return out
}

// onlyAdds fails for everything that differs but what is new, and gives the new files.
func onlyAdds(t *testing.T, before, after map[string]string) []string {
	t.Helper()
	var added []string
	for name, now := range after {
		was, ok := before[name]
		if !ok {
			added = append(added, name)
		} else if was != now {
			t.Errorf("%s was %s, is %s", name, was, now)
		}
	}
	for name := range before {
		if _, ok := after[name]; !ok {
			t.Errorf("%s is gone", name)
		}
	}
	return added
}

func wantReason(t *testing.T, err error, want gitReason) {
	t.Helper()
	var e *gitError
	if !errors.Is(err, want) || !errors.As(err, &e) {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestGitPrivateHoldsTheBranchAlone(t *testing.T) {
	f := newGitFixture(t)
	f.host("tag", "v1", "secret")
	before := treeOf(t, filepath.Join(f.work, ".git"))
	p := f.mustPrivate()
	if diff := cmp.Diff(before, treeOf(t, filepath.Join(f.work, ".git"))); diff != "" {
		t.Errorf("the host's repository changed:\n%s", diff)
	}
	if got := f.agent(p, "status", "--porcelain=v2", "--branch"); !strings.Contains(got, "branch.head main") || len(strings.Split(got, "\n")) != 2 {
		t.Errorf("status: %s", got)
	}
	if got, want := f.agent(p, "log", "--format=%H"), f.host("log", "--format=%H", "main"); got != want {
		t.Errorf("log %s, want %s", got, want)
	}
	if got := f.agent(p, "for-each-ref", "--format=%(refname)"); got != "refs/heads/main" {
		t.Errorf("references: %s", got)
	}
	f.agent(p, "fsck", "--strict", "--full")
	got := strings.Fields(f.agent(p, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)"))
	want := strings.Fields(f.host("rev-list", "--objects", "--no-object-names", "main"))
	if len(got) != len(want) {
		t.Errorf("%d objects, the branch has %d", len(got), len(want))
	}
	secret := f.host("rev-parse", "secret")
	if out, err := f.plain(f.work, "--git-dir="+p.Private(), "cat-file", "-t", secret); err == nil {
		t.Errorf("the other branch's commit is there: %s", out)
	}
	// Control: the host's own has it.
	f.host("cat-file", "-t", secret)
	if got := f.agent(p, "config", "user.name"); got != `Agent "A"` {
		t.Errorf("user.name = %q", got)
	}
	if _, err := os.Stat(filepath.Join(p.Dir, "host")); err == nil {
		t.Error("the snapshot of the host's objects is still there")
	}
}

func TestGitTakeBack(t *testing.T) {
	f := newGitFixture(t)
	p := f.mustPrivate()
	commit := f.agentCommits(p)
	before := treeOf(t, filepath.Join(f.work, ".git"))
	b, err := json.Marshal(p)
	must(t, err)
	p = gitPrivate{}
	must(t, json.Unmarshal(b, &p))
	got, err := f.take(p)
	must(t, err)
	want := gitTaken{Ref: "refs/agentshim/0123456789abcdef", Commit: commit, Commits: 1, Branch: "main"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	added := onlyAdds(t, before, treeOf(t, filepath.Join(f.work, ".git")))
	if len(added) != 4 { // pack, index, the reference and its folder
		t.Errorf("added %q", added)
	}
	if got := f.host("rev-parse", want.Ref); got != commit {
		t.Errorf("%s is %s, want %s", want.Ref, got, commit)
	}
	if got := f.host("show", commit+":agent.txt"); got != "by the agent" {
		t.Errorf("content %q", got)
	}
	f.host("gc", "-q", "--prune=now")
	f.host("cat-file", "-e", commit)
	if again, err := f.take(p); err != nil || !reflect.DeepEqual(again, want) {
		t.Errorf("a second time: %v, %v", again, err)
	}
}

func TestGitTakeBackOfNothingWritesNothing(t *testing.T) {
	for name, change := range map[string]func(*gitFixture, gitPrivate){
		"nothing done":         func(*gitFixture, gitPrivate) {},
		"only the index":       func(f *gitFixture, p gitPrivate) { f.agent(p, "rm", "-q", "--cached", "README") },
		"another branch":       func(f *gitFixture, p gitPrivate) { f.agent(p, "branch", "idea") },
		"an earlier commit":    func(f *gitFixture, p gitPrivate) { f.agent(p, "reset", "-q", "--soft", "HEAD~1") },
		"loose, unreachable":   func(f *gitFixture, p gitPrivate) { f.agent(p, "hash-object", "-w", "src/a.txt") },
		"its branch is gone":   func(f *gitFixture, p gitPrivate) { f.agent(p, "update-ref", "-d", "refs/heads/main") },
		"collected, repacked":  func(f *gitFixture, p gitPrivate) { f.agent(p, "gc", "-q") },
		"on an unborn branch":  func(f *gitFixture, p gitPrivate) { f.agent(p, "symbolic-ref", "HEAD", "refs/heads/new") },
		"detached at the same": func(f *gitFixture, p gitPrivate) { f.agent(p, "checkout", "-q", "--detach") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newGitFixture(t)
			p := f.mustPrivate()
			before := treeOf(t, filepath.Join(f.work, ".git"))
			change(f, p)
			got, err := f.take(p)
			if err != nil || !reflect.DeepEqual(got, gitTaken{}) {
				t.Errorf("got %v, %v", got, err)
			}
			if diff := cmp.Diff(before, treeOf(t, filepath.Join(f.work, ".git"))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestGitTakeBackChoosesTheNewCommits(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(*gitFixture, gitPrivate)
		want gitTaken
	}{
		"several": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			f.agent(p, "commit", "-q", "--allow-empty", "-m", "more")
		}, gitTaken{Commits: 2, Branch: "main"}},
		"repacked": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			f.agent(p, "gc", "-q")
		}, gitTaken{Commits: 1, Branch: "main"}},
		"on another branch": {func(f *gitFixture, p gitPrivate) {
			f.agent(p, "checkout", "-q", "-b", "fix")
			f.agentCommits(p)
		}, gitTaken{Commits: 1, Branch: "fix"}},
		"detached": {func(f *gitFixture, p gitPrivate) {
			f.agent(p, "checkout", "-q", "--detach")
			f.agentCommits(p)
		}, gitTaken{Commits: 1}},
		"HEAD has nothing": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			f.agent(p, "checkout", "-q", "--detach", "HEAD~1")
		}, gitTaken{Commits: 1, Branch: "main"}},
		"both": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			f.agent(p, "checkout", "-q", "-b", "fix", "HEAD~1")
			f.agent(p, "commit", "-q", "--allow-empty", "-m", "fix")
		}, gitTaken{Commits: 1, Branch: "fix", Left: []string{"refs/heads/main"}}},
		"a branch left behind": {func(f *gitFixture, p gitPrivate) {
			f.agent(p, "checkout", "-q", "-b", "topic/idea")
			f.agentCommits(p)
			f.agent(p, "pack-refs", "--all")
			f.agent(p, "checkout", "-q", "main")
			f.agent(p, "branch", "earlier", "HEAD~1")
			f.agent(p, "commit", "-q", "--allow-empty", "-m", "main")
		}, gitTaken{Commits: 1, Branch: "main", Left: []string{"refs/heads/topic/idea"}}},
		"a stash": {func(f *gitFixture, p gitPrivate) {
			f.agent(p, "commit", "-q", "--allow-empty", "-m", "main")
			f.write("README", "stashed\n")
			f.agent(p, "stash", "-q")
		}, gitTaken{Commits: 1, Branch: "main", Left: []string{"refs/stash"}}},
		"one within the other": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			f.agent(p, "checkout", "-q", "-b", "fix")
			f.agent(p, "commit", "-q", "--allow-empty", "-m", "fix")
		}, gitTaken{Commits: 2, Branch: "fix"}},
		"a merge of an unrelated root": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			root := f.agent(p, "commit-tree", "-m", "root", "HEAD^{tree}")
			f.agent(p, "merge", "-q", "--allow-unrelated-histories", "-s", "ours", "-m", "merge", root)
		}, gitTaken{Commits: 3, Branch: "main"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newGitFixture(t)
			p := f.mustPrivate()
			c.do(f, p)
			got, err := f.take(p)
			must(t, err)
			c.want.Ref, c.want.Commit = "refs/agentshim/0123456789abcdef", got.Commit
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
			f.host("log", "--oneline", got.Ref)
		})
	}
}

func TestGitTakeBackOfARewrittenHistory(t *testing.T) {
	f := newGitFixture(t)
	p := f.mustPrivate()
	f.agent(p, "commit", "-q", "--amend", "-m", "other words")
	_, err := f.take(p)
	wantReason(t, err, gitRewritten)
	if out, err := f.plain(f.work, "for-each-ref", "refs/agentshim"); err != nil || out != "" {
		t.Errorf("references %q, %v", out, err)
	}
	got, err := f.take(p, func(o *gitTakeOptions) { o.AllowRewrite = true })
	must(t, err)
	if !got.Rewritten || got.Commits != 1 {
		t.Errorf("got %+v", got)
	}
}

func TestGitUnbornBranch(t *testing.T) {
	f := bareFixture(t)
	f.host("init", "-q", "-b", "trunk", ".")
	f.write("a", "a")
	p := f.mustPrivate()
	if got := f.agent(p, "status", "--porcelain=v2", "--branch"); !strings.Contains(got, "branch.head trunk") || !strings.Contains(got, "? a") {
		t.Errorf("status: %s", got)
	}
	if got, err := f.take(p); err != nil || !reflect.DeepEqual(got, gitTaken{}) {
		t.Errorf("nothing done: %v, %v", got, err)
	}
	commit := f.agentCommits(p)
	got, err := f.take(p)
	must(t, err)
	if got.Commit != commit || got.Commits != 1 {
		t.Errorf("got %+v", got)
	}
	f.host("fsck", "--strict")
	f.host("log", got.Ref)
}

func TestGitDetachedHead(t *testing.T) {
	f := newGitFixture(t)
	f.host("checkout", "-q", "--detach", "HEAD~1")
	p := f.mustPrivate()
	if got := f.agent(p, "status", "--porcelain=v2", "--branch"); !strings.Contains(got, "branch.head (detached)") || len(strings.Split(got, "\n")) != 2 {
		t.Errorf("status: %s", got)
	}
	if n := f.agent(p, "rev-list", "--count", "--all", "HEAD"); n != "1" {
		t.Errorf("%s commits", n)
	}
	f.agentCommits(p)
	got, err := f.take(p)
	if err != nil || got.Commits != 1 || got.Branch != "" {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestGitShallow(t *testing.T) {
	f := newGitFixture(t)
	clone := filepath.Join(f.dir, "clone")
	f.git(f.dir, "clone", "-q", "--depth=1", "file://"+f.work, clone)
	p, err := f.privateOf(clone)
	must(t, err)
	f.agent(p, "fsck", "--strict")
	if n := f.agent(p, "rev-list", "--count", "HEAD"); n != "1" {
		t.Errorf("%s commits", n)
	}
	f.agentCommits(p)
	got, err := f.take(p)
	if err != nil || got.Commits != 1 {
		t.Errorf("got %+v, %v", got, err)
	}
	f.git(clone, "fsck", "--strict")
	f.git(clone, "log", got.Ref)
}

// M16: a linked working tree's .git is a file.
func TestGitLinkedWorktree(t *testing.T) {
	f := newGitFixture(t)
	wt := filepath.Join(f.dir, "linked")
	f.host("worktree", "add", "-q", wt, "-b", "topic")
	p, err := f.privateOf(wt)
	must(t, err)
	if p.Host.Kind != gitWorktree || p.Host.Common != filepath.Join(f.work, ".git") || p.Host.Head.Branch != "topic" {
		t.Errorf("host %+v", p.Host)
	}
	b, err := os.ReadFile(p.DotGit())
	if err != nil || string(b) != "gitdir: "+p.Private()+"\n" {
		t.Errorf("dotgit %q, %v", b, err)
	}
	f.agentCommits(p)
	got, err := f.take(p)
	must(t, err)
	f.git(wt, "log", got.Ref)
	f.host("log", got.Ref)
	f.git(wt, "fsck", "--strict")
}

func TestGitWorktreeOfABareRepository(t *testing.T) {
	f := newGitFixture(t)
	bare, wt := filepath.Join(f.dir, "bare.git"), filepath.Join(f.dir, "linked")
	f.git(f.dir, "clone", "-q", "--bare", f.work, bare)
	f.git(bare, "worktree", "add", "-q", wt, "main")
	p, err := f.privateOf(wt)
	must(t, err)
	f.agentCommits(p)
	got, err := f.take(p)
	must(t, err)
	f.git(wt, "log", got.Ref)
	_, err = findGit(bare, nil)
	wantReason(t, err, gitBare)
}

func TestGitSubmodule(t *testing.T) {
	f := newGitFixture(t)
	super := filepath.Join(f.dir, "super")
	f.git(f.dir, "init", "-q", "-b", "main", super)
	f.git(super, "submodule", "--quiet", "add", f.work, "lib")
	f.git(super, "commit", "-q", "-m", "lib")
	sub := filepath.Join(super, "lib")
	p, err := f.privateOf(sub)
	must(t, err)
	if p.Host.Kind != gitSubmodule {
		t.Errorf("kind %s", p.Host.Kind)
	}
	f.agentCommits(p)
	got, err := f.take(p)
	must(t, err)
	f.git(sub, "log", got.Ref)
	f.git(sub, "fsck", "--strict")

	// The repository above it, with a gitlink whose own repository the agent can't see.
	must(t, os.Rename(filepath.Join(super, ".git/modules"), filepath.Join(f.dir, "modules")))
	defer os.Rename(filepath.Join(f.dir, "modules"), filepath.Join(super, ".git/modules"))
	p, err = f.privateOf(super)
	must(t, err)
	if diff := cmp.Diff([]string{"lib"}, p.Host.Gitlinks); diff != "" {
		t.Error(diff)
	}
	if out := f.agent(p, "status", "--porcelain"); out != "" {
		t.Errorf("status: %s", out)
	}
	if out := f.agent(p, "ls-files", "-v"); out != "H .gitmodules\nh lib" {
		t.Errorf("index: %s", out)
	}
	// Control: without the flag git add ends with an error.
	f.agent(p, "update-index", "--no-assume-unchanged", "lib")
	if out, err := f.plain(super, "--git-dir="+p.Private(), "--work-tree="+super, "add", "-A"); err == nil {
		t.Errorf("control: %s", out)
	}
	f.agent(p, "update-index", "--assume-unchanged", "lib")
	f.put(filepath.Join(super, "new.txt"), "new\n")
	f.agent(p, "add", "-A")
	f.agent(p, "commit", "-q", "-a", "-m", "new")
	f.agent(p, "diff", "HEAD~1")
	if out := f.agent(p, "ls-tree", "HEAD", "lib"); !strings.HasPrefix(out, "160000 ") {
		t.Errorf("the gitlink is %q", out)
	}
	if got, err := f.take(p); err != nil || got.Commits != 1 {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestGitNoRepository(t *testing.T) {
	f := newGitFixture(t)
	h, err := findGit(filepath.Join(f.work, "src"), nil)
	if err != nil || h.Kind != gitNone {
		t.Errorf("a folder below: %+v, %v", h, err)
	}
}

// Replacements change what the host's log shows, and nothing that an agent gets.
func TestGitReplacements(t *testing.T) {
	f := newGitFixture(t)
	f.host("replace", f.host("rev-parse", "main~1"), f.host("rev-parse", "secret"))
	p := f.mustPrivate()
	if out := f.agent(p, "log", "--format=%s"); out != "two\none" {
		t.Errorf("log: %s", out)
	}
	if out := f.host("log", "--format=%s"); !strings.Contains(out, "secret") {
		t.Errorf("control: the host's log does not follow the replacement: %s", out)
	}
	f.agentCommits(p)
	_, err := f.take(p)
	must(t, err)
}

func TestGitKeepsHowTheTreeWasWritten(t *testing.T) {
	f := newGitFixture(t)
	f.host("config", "core.autocrlf", "input")
	f.host("config", "core.fileMode", "false")
	f.host("config", "core.sshCommand", "evil")
	f.put(filepath.Join(f.work, ".git/info/exclude"), "*.log\n")
	f.write("x.log", "")
	must(t, os.Chmod(filepath.Join(f.work, "README"), 0o755))
	p := f.mustPrivate()
	if out := f.agent(p, "status", "--porcelain"); out != "" {
		t.Errorf("status: %s", out)
	}
	if out := f.agent(p, "config", "--local", "--list"); strings.Contains(out, "evil") || !strings.Contains(out, "core.autocrlf=input") {
		t.Errorf("config: %s", out)
	}
}

func TestGitFilesBelongToTheHostsUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root gives files away")
	}
	f := newGitFixture(t)
	must(t, filepath.WalkDir(f.work, func(name string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(name, 4321, 4322))
	}))
	p := f.mustPrivate()
	f.agentCommits(p)
	_, err := f.take(p)
	must(t, err)
	for name, what := range treeOf(t, filepath.Join(f.work, ".git")) {
		if !strings.Contains(what, " 4321:4322 ") {
			t.Errorf("%s: %s", name, what)
		}
	}
}

func TestGitOwnerOfThePrivateRepository(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root gives files away")
	}
	f := newGitFixture(t)
	h, err := findGit(f.work, nil)
	must(t, err)
	dir := filepath.Join(f.dir, "own/given")
	old := unix.Umask(0o077)
	p, err := f.prog.newPrivate(context.Background(), h, gitOptions{Dir: dir, ObjectsTarget: dir, Owner: &gitOwner{4321, 4322}})
	unix.Umask(old)
	must(t, err)
	for name, what := range treeOf(t, p.Private()) {
		if !strings.Contains(what, " 4321:4322 ") {
			t.Errorf("%s: %s", name, what)
		}
	}
	for name, what := range treeOf(t, p.Objects()) {
		if !strings.HasPrefix(what, "40755 0:0") && !strings.HasPrefix(what, "100444 0:0") {
			t.Errorf("%s: %s", name, what)
		}
	}
}

// Without hard links objects are copied.
func TestGitOnAnotherFileSystem(t *testing.T) {
	shm, err := os.MkdirTemp("/dev/shm", "agentshim-git")
	if err != nil {
		t.Skip(err)
	}
	defer os.RemoveAll(shm)
	f := newGitFixture(t)
	h, err := findGit(f.work, nil)
	must(t, err)
	dir := filepath.Join(shm, "run")
	p, err := f.prog.newPrivate(context.Background(), h, gitOptions{Dir: dir, ObjectsTarget: dir + "/base/objects"})
	must(t, err)
	f.agent(p, "-c", "user.name=a", "-c", "user.email=b", "fsck", "--strict")
	f.agentCommits(p)
	got, err := f.take(p, func(o *gitTakeOptions) { o.Dir = filepath.Join(shm, "take") })
	must(t, err)
	f.host("log", got.Ref)
}

// A61: any byte that a path may hold.
func TestGitStrangePaths(t *testing.T) {
	f := newGitFixture(t)
	strange := filepath.Join(f.dir, "new\nline \"q\" '\\ \xff :;[*?")
	must(t, os.Mkdir(strange, 0o755))
	work := filepath.Join(strange, "work")
	f.git(f.dir, "clone", "-q", f.work, work)
	h, err := findGit(work, []string{work})
	must(t, err)
	dir := filepath.Join(strange, "run")
	p, err := f.prog.newPrivate(context.Background(), h, gitOptions{Dir: dir, ObjectsTarget: dir + "/base/objects"})
	must(t, err)
	f.agent(p, "fsck", "--strict")
	f.agentCommits(p)
	f.agent(p, "repack", "-q", "-a", "-d", "-l")
	f.agent(p, "commit", "-q", "--allow-empty", "-m", "loose")
	got, err := f.take(p, func(o *gitTakeOptions) { o.Dir = filepath.Join(strange, "take") })
	if err != nil || got.Commits != 2 {
		t.Errorf("got %+v, %v", got, err)
	}
	f.git(work, "log", got.Ref)
}

// Branch names that git allows.
func TestGitStrangeBranches(t *testing.T) {
	f := newGitFixture(t)
	for _, name := range []string{"a/b/c", "ü", "f\xff", "it's\"", "$(x)", ";x", "@x", strings.Repeat("x", 200)} {
		f.host("checkout", "-q", "-b", name)
		p := f.mustPrivate()
		f.agentCommits(p)
		got, err := f.take(p, func(o *gitTakeOptions) { o.Run = fmt.Sprintf("%x", name)[:2] })
		if err != nil || got.Branch != name {
			t.Errorf("%q: %+v, %v", name, got, err)
		}
	}
}

func TestGitAuthor(t *testing.T) {
	f := newGitFixture(t)
	h, err := findGit(f.work, nil)
	must(t, err)
	home := filepath.Join(f.dir, "home")
	getenv := func(k string) string { return map[string]string{"HOME": home}[k] }
	check := func(wantName, wantEmail string) {
		t.Helper()
		h, err := h.readGit()
		must(t, err)
		name, email, err := f.prog.author(context.Background(), h, getenv)
		if err != nil || name != wantName || email != wantEmail {
			t.Errorf("%q, %q, %v", name, email, err)
		}
	}
	check("", "")
	f.put(filepath.Join(home, "more"), "[user]\nname = Ann\n")
	f.put(filepath.Join(home, ".gitconfig"), "[include]\npath = ~/more\n[user]\nemail = ann@example.com\n")
	check("Ann", "ann@example.com")
	f.host("config", "user.email", "work@example.com")
	check("Ann", "work@example.com")
}

// TestGitHidden: what the harness file hides is empty for the agent, and no commit of
// everything takes that for a change; what the branch holds of it is said.
func TestGitHidden(t *testing.T) {
	for _, hidden := range [][]string{nil, {".env", "./secret/", "not/there"}} {
		f := newGitFixture(t)
		f.write(".env", "KEY=1\n")
		f.write("secret/a", "a\n")
		f.write("secretary", "b\n")
		f.host("add", "-A")
		f.host("commit", "-q", "-m", "with secrets")
		h, err := findGit(f.work, []string{f.work})
		must(t, err)
		dir := filepath.Join(f.dir, "own/hidden")
		p, err := f.prog.newPrivate(context.Background(), h, gitOptions{Dir: dir, ObjectsTarget: dir + "/base/objects", Hidden: hidden})
		must(t, err)
		f.write(".env", "") // as the covers show it
		must(t, os.Remove(filepath.Join(f.work, "secret/a")))
		f.write("secretary", "changed\n")
		f.agent(p, "add", "-A")
		f.agent(p, "commit", "-q", "-a", "-m", "everything")
		want, tracked := "secretary", []string{".env", "secret/a"}
		if hidden == nil { // the control
			want, tracked = ".env\nsecret/a\nsecretary", nil
		}
		if got := f.agent(p, "diff", "--name-only", "HEAD~", "HEAD"); got != want || !slices.Equal(p.Hidden, tracked) {
			t.Errorf("hidden %q: the commit changes %q, want %q; tracked %q, want %q", hidden, got, want, p.Hidden, tracked)
		}
	}
}
