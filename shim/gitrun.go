package shim

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/spec"
)

// probeGit reads what the workspace is to git. What is wrong with its repository is a
// fact, which the plan judges. It runs nothing.
func (p *prepared) probeGit(paths mounts.ProbePaths) error {
	ws, ok := mounts.Workspace(p.job.Harness, p.host.Mounts)
	if !ok || !ws.Dir {
		return nil
	}
	agentDirs := mounts.AgentFolders(p.job.Harness, p.host.Mounts)
	facts := &p.host.Mounts.Git
	var err error
	if facts.Node, err = gitEntry(ws.Path); err != nil {
		return asError(err)
	}
	prog, ok := p.gitProgram(agentDirs)
	facts.Program = ok
	h, err := findGit(ws.Path, agentDirs)
	p.git = h
	if err == nil && h.Kind != gitNone {
		facts.Dirs = slices.Compact([]string{h.Dir, h.Common})
		if p.job.Harness.Workspace.Git == mounts.GitShared {
			return p.probeShared(ws, prog, paths)
		}
		h, err = h.readGit()
		p.git.HooksPath = h.HooksPath
	}
	var refused *gitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refused):
		facts.Refused, facts.Remedy = refused.Error(), refused.Remedy()
		facts.Bare = facts.Node == "" && refused.Reason == gitBare
		if facts.Bare && p.job.Harness.Workspace.Git == mounts.GitShared {
			return p.probeGitGuards(ws, "", "modules")
		}
	default:
		facts.Refused = err.Error()
	}
	return nil
}

// probeShared reads the folder that a .git file leads to, and the author's name.
func (p *prepared) probeShared(ws mounts.Source, prog gitProgram, paths mounts.ProbePaths) error {
	facts := &p.host.Mounts.Git
	if prog.Path != "" {
		var err error
		h, _ := p.git.readGit() // one that can't be private may be shared
		p.git.HooksPath = h.HooksPath
		ctx, stop := withTimeout(context.Background(), answerTimeout)
		defer stop()
		if facts.Name, facts.Email, err = prog.author(ctx, h, p.job.getenv); err != nil {
			return gitFailed(err)
		}
	}
	if p.git.Kind == gitOwn {
		return p.probeGitGuards(ws, ".git", ".git/modules")
	}
	s, err := mounts.ProbeFolder(p.git.Common, paths)
	if err != nil {
		return asError(err)
	}
	facts.Common, facts.Linked = p.git.Common, p.git.Kind == gitWorktree
	p.host.Mounts.Sources[p.git.Common] = s
	return p.probeGitGuards(s, "", "modules")
}

// probeGitGuards looks at what names programs in a git dir and in those of its
// submodules, by their paths below root.
func (p *prepared) probeGitGuards(root mounts.Source, dir, modules string) error {
	m, err := findModules(root.Path, modules)
	if err != nil {
		return gitFailed(err)
	}
	facts := &p.host.Mounts.Git
	for _, dir := range append([]string{dir}, m...) {
		facts.GuardPaths = append(facts.GuardPaths, mounts.GitGuardPaths(dir)...)
	}
	facts.Guards, err = mounts.ProbeGuards(root, facts.GuardPaths)
	return asError(err)
}

// writeShared writes the files by which the repository that a .git file leads to works
// in the container.
func (p *prepared) writeShared(dir string) error {
	h, target := p.git, p.job.Harness.ContainerPath(p.job.Harness.Workspace.Target)
	gitDir := mounts.GitDir
	if h.Kind == gitWorktree {
		gitDir = filepath.Join(gitDir, "worktrees", filepath.Base(h.Dir))
	}
	files := map[string]string{mounts.GitSharedFile: "gitdir: " + gitDir + "\n"}
	if h.Kind == gitSubmodule {
		own, common, err := h.open()
		if err != nil {
			return gitFailed(err)
		}
		defer own.close()
		defer common.close()
		config, err := common.read("config", maxGitConfig)
		if err != nil {
			return gitFailed(err)
		}
		files[mounts.GitSharedConfig] = string(config) + "\n" + string(renderGitConfig([]gitSetting{{Key: "core.worktree", Value: target}}))
	}
	for name, content := range files {
		name = filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o700), os.WriteFile(name, []byte(content), 0o444)); err != nil {
			return &Error{Reason: ReasonState, Err: err}
		}
	}
	return nil
}

// gitEntry says what stands at .git in the folder dir.
func gitEntry(dir string) (string, error) {
	var st unix.Stat_t
	err := unix.Lstat(filepath.Join(dir, ".git"), &st)
	switch {
	case errors.Is(err, unix.ENOENT):
		return "", nil
	case errors.Is(err, unix.EACCES):
		return mounts.NodeUnknown, nil
	case err != nil:
		return "", fmt.Errorf("look for a repository: %w", err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return mounts.NodeDir, nil
	case unix.S_IFREG:
		return mounts.NodeFile, nil
	case unix.S_IFLNK:
		return mounts.NodeLink, nil
	}
	return mounts.NodeOther, nil
}

// gitProgram finds the host's git on the caller's PATH, outside of what an agent can write.
func (p *prepared) gitProgram(agentDirs []string) (gitProgram, bool) {
	return findGitProgram(p.job.getenv, Exec{}, agentDirs)
}

func findGitProgram(getenv func(string) string, r Runner, agentDirs []string) (gitProgram, bool) {
	o := ProbeOptions{Getenv: getenv}
	for _, dir := range filepath.SplitList(getenv("PATH")) {
		program, ok := findProgram(o, []string{dir}, "git")
		if !ok {
			continue
		}
		real, err := filepath.EvalSymlinks(program)
		if err == nil && !below(real, agentDirs...) && !below(filepath.Clean(program), agentDirs...) {
			return gitProgram{Runner: r, Path: program}, true
		}
	}
	return gitProgram{}, false
}

// hasPrivateGit says that the agent gets a repository of its own.
func (p *prepared) hasPrivateGit() bool {
	return p.plan.Git != nil && p.plan.Git.Mode == mounts.GitPrivate
}

// makeGit makes the agent's repository, where it gets one, and keeps what is needed to
// take its commits beside the record: another process can do it, too.
func (p *prepared) makeGit(ctx context.Context, rec *Record, paths spec.RunPaths) error {
	if p.plan.Git == nil {
		return nil
	}
	rec.Git = &GitRecord{Mode: p.plan.Git.Mode}
	switch {
	case p.plan.Git.Mode == mounts.GitShared && p.host.Mounts.Git.Common != "":
		return p.writeShared(paths.Dir)
	case !p.hasPrivateGit():
		return nil
	}
	defer p.phases.done("git")
	agentDirs := mounts.AgentFolders(p.job.Harness, p.host.Mounts)
	prog, ok := p.gitProgram(agentDirs)
	if !ok {
		return errNoGit
	}
	o := gitOptions{
		Dir: filepath.Join(paths.State, mounts.GitOwn), ObjectsTarget: mounts.GitObjects, PrivateTarget: mounts.GitDir,
		Hidden: p.job.Harness.Workspace.Hide,
	}
	if p.plan.Git.Owner.Chown {
		o.Owner = &gitOwner{UID: int(p.plan.Git.Owner.UID), GID: int(p.plan.Git.Owner.GID)}
	}
	h, err := p.git.readGit()
	if err != nil {
		return gitFailed(err)
	}
	if o.Name, o.Email, err = prog.author(ctx, h, p.job.getenv); err != nil {
		return gitFailed(err)
	}
	if o.Name == "" || o.Email == "" {
		p.job.Notice("git: user.name or user.email is set nowhere: the agent can't commit until it sets one")
	}
	private, err := prog.newPrivate(ctx, h, o)
	if err != nil {
		return gitFailed(err)
	}
	if len(private.Hidden) > 0 {
		p.job.Notice("git: hidden, but in the branch's history, where the agent can read it: %s", firstNames(private.Hidden))
	}
	rec.Git.Base = private.Host.Head.Commit
	return keepPrivate(private)
}

// firstNames are some of the names, for one line.
func firstNames(names []string) string {
	const most = 3
	var shown []string
	for _, name := range names[:min(len(names), most)] {
		shown = append(shown, briefName(name))
	}
	if more := len(names) - most; more > 0 {
		shown = append(shown, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(shown, ", ")
}

// gitFailed gives an error of the repository its reason and remedy.
func gitFailed(err error) error {
	e := &Error{Reason: ReasonGit, Err: err}
	var refused *gitError
	if errors.As(err, &refused) {
		e.Hint = refused.Remedy()
	}
	return e
}

// privateFile holds a gitPrivate. It is no JSON, which would change a path or a
// branch that is not UTF-8.
const privateFile = "private.gob"

func keepPrivate(p gitPrivate) error {
	var b bytes.Buffer
	err := gob.NewEncoder(&b).Encode(p)
	if err == nil {
		err = os.WriteFile(filepath.Join(p.Dir, privateFile), b.Bytes(), 0o600)
	}
	if err != nil {
		return errors.Join(&Error{Reason: ReasonState, Err: err}, os.RemoveAll(p.Dir))
	}
	return nil
}

// readPrivate reads what keepPrivate wrote; fs.ErrNotExist where a run has no
// repository of its own.
func readPrivate(dir string) (gitPrivate, error) {
	b, err := readRecord(filepath.Join(dir, privateFile))
	if err != nil {
		return gitPrivate{}, err
	}
	var p gitPrivate
	if err := gob.NewDecoder(bytes.NewReader(b)).Decode(&p); err != nil {
		return p, err
	}
	if p.Dir != dir {
		return p, fmt.Errorf("it was made for %q", p.Dir)
	}
	return p, nil
}

// GitRecord is what became of the workspace's repository.
type GitRecord struct {
	// Mode is private, shared or none.
	Mode string `json:"mode"`
	// Base is the commit that a private repository began with; empty for a branch without one.
	Base string `json:"base,omitempty"`
	// Taken are the agent's commits that the host's repository has got.
	Taken []GitTaken `json:"taken,omitempty"`
	// Left are the agent's other branches, at most ten, with commits that were not taken.
	Left []string `json:"left,omitempty"`
	// Kept is the folder of the agent's repository where not all of it came back. An
	// agent wrote it: a git that runs in it runs what the agent likes.
	Kept string `json:"kept,omitempty"`
	// Error says why commits could not be taken, and Hint what to do.
	Error string `json:"error,omitempty"`
	Hint  string `json:"hint,omitempty"`
}

// GitTaken is one branch of an agent's in the host's repository.
type GitTaken struct {
	// Ref is the reference that now holds Commit, the last of Commits new ones.
	Ref     string `json:"ref"`
	Commit  string `json:"commit"`
	Commits int    `json:"commits"`
	// Branch is the agent's name for it, made safe for a terminal; empty for none.
	Branch string `json:"branch,omitempty"`
	// Rewritten says that the commits don't go on from Base.
	Rewritten bool `json:"rewritten,omitempty"`
}

// takeGit takes the agent's commits once its container is gone, whatever ended it, and
// removes its repository unless something in it is not in the host's then. Its error
// says that commits may be there that were not taken.
func (p *prepared) takeGit(ctx context.Context, rec *Record, paths spec.RunPaths, gone bool) error {
	if !p.hasPrivateGit() || rec.Git == nil {
		return nil
	}
	defer p.phases.done("commits")
	dir := filepath.Join(paths.State, mounts.GitOwn)
	if !gone {
		rec.Git.Kept = dir
		return nil // prune takes them when it has removed the container
	}
	prog, ok := p.gitProgram(mounts.AgentFolders(p.job.Harness, p.host.Mounts))
	if !ok {
		return rec.Git.lost(dir, errNoGit)
	}
	// A signal that ended the run does not cost its commits; another one does not wait for
	// what an agent can make last.
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	defer p.control.during(cancel)()
	patience := time.AfterFunc(takePatience, func() {
		p.job.Notice("git: the agent's commits are being taken; ^C leaves them for: agentshim take %s", rec.ID)
	})
	defer patience.Stop()
	return rec.Git.take(ctx, prog, dir, rec.ID, "")
}

// takePatience is how long commits may take without a word.
const takePatience = 3 * time.Second

var errNoGit = &Error{Reason: ReasonGit, Msg: "there is no git on PATH", Hint: "install git"}

// take hands the commits of the repository in dir over as the run's reference, or those
// of another of its branches as one of its own. takeBack bounds it.
func (g *GitRecord) take(ctx context.Context, prog gitProgram, dir, run, branch string) error {
	private, err := readPrivate(dir)
	if errors.Is(err, fs.ErrNotExist) { // its making was cut short: no agent ever had it
		return removeTree(filepath.Split(dir))
	}
	if err != nil {
		return g.lost(dir, err)
	}
	o := gitTakeOptions{Run: run, Dir: dir + ".take", AllowRewrite: true}
	if branch != "" {
		o.Run, o.Branch = run+"-"+strings.ReplaceAll(branch, "/", "-"), branch
	}
	if err := removeTree(filepath.Split(o.Dir)); err != nil { // of a hand-over that broke off
		return g.lost(dir, err)
	}
	taken, err := prog.takeBack(ctx, private, o)
	if err != nil {
		return g.lost(dir, err)
	}
	left := leftText(taken.Left)
	if branch != "" { // what came back before is not in this one
		left = slices.DeleteFunc(slices.Clone(g.Left), func(name string) bool { return !slices.Contains(left, name) })
	}
	g.Error, g.Hint, g.Kept, g.Left = "", "", "", left
	if taken.Ref != "" {
		g.Taken = slices.DeleteFunc(g.Taken, func(t GitTaken) bool { return t.Ref == taken.Ref })
		g.Taken = append(g.Taken, GitTaken{taken.Ref, taken.Commit, taken.Commits, printable(taken.Branch), taken.Rewritten})
	}
	if len(g.Left) > 0 {
		g.Kept = dir
		return nil
	}
	return removeTree(filepath.Split(dir))
}

// maxLeft bounds the names in a record.
const maxLeft = 10

// leftText gives references an agent's names by which a user knows them.
func leftText(refs []string) []string {
	var out []string
	for _, ref := range refs[:min(len(refs), maxLeft)] {
		switch ref {
		case "":
			ref = "more than can be looked at"
		case gitStash:
			ref = "stash"
		}
		out = append(out, printable(strings.TrimPrefix(ref, gitHeads+"/")))
	}
	if n := len(refs) - len(out); n > 0 {
		out = append(out, fmt.Sprintf("%d more", n))
	}
	return out
}

// lost notes that commits were not taken, and why.
func (g *GitRecord) lost(dir string, err error) error {
	e := &Error{Reason: ReasonGit, Msg: fmt.Sprintf("the agent's commits were not taken; its repository is kept in %q", dir), Err: err, Hint: HintOf(err)}
	var refused *gitError
	if errors.As(err, &refused) {
		e.Hint = refused.Remedy()
	}
	run := filepath.Base(filepath.Dir(dir))
	e.Hint = strings.TrimPrefix(fmt.Sprintf("%s; then: agentshim take %s", e.Hint, run), "; then: ")
	g.Kept, g.Error, g.Hint = dir, printable(err.Error()), e.Hint
	return e
}

// ErrNothingKept says that a run left no repository behind.
var ErrNothingKept = errors.New("no repository of an agent's is kept")

// keptGit finds the repository that an ended run left behind.
func (s Store) keptGit(id string) (RunInfo, string, error) {
	r, err := s.Run(id)
	if err != nil {
		return r, "", err
	}
	dir := filepath.Join(s.folders.record(id), mounts.GitOwn)
	if _, err := os.Lstat(dir); r.Git == nil || errors.Is(err, fs.ErrNotExist) {
		return r, dir, &Error{Reason: ReasonGit, Msg: "run " + id, Err: ErrNothingKept}
	}
	if r.State != RunEnded {
		return r, dir, &Error{Reason: ReasonState, Msg: fmt.Sprintf("run %s is %s: its agent may still write", id, r.State), Hint: "agentshim prune ends lost runs and takes their commits"}
	}
	return r, dir, nil
}

// TakeGit takes commits of a repository that an ended run left behind: those that could
// not be taken then, or of another of its branches. The repository goes when nothing is
// left in it.
func (s Store) TakeGit(ctx context.Context, id, branch string) (Record, error) {
	r, dir, err := s.keptGit(id)
	if err != nil {
		return r.Record, err
	}
	err = s.takeGit(ctx, &r.Record, dir, branch)
	return r.Record, errors.Join(err, r.write(s.folders))
}

func (s Store) takeGit(ctx context.Context, r *Record, dir, branch string) error {
	prog, ok := findGitProgram(s.getenv, s.runner, nil)
	if !ok {
		return r.Git.lost(dir, errNoGit)
	}
	return r.Git.take(ctx, prog, dir, r.ID, branch)
}

// DiscardGit removes the repository that an ended run left behind, with all commits
// in it that were not taken.
func (s Store) DiscardGit(id string) error {
	r, dir, err := s.keptGit(id)
	if err != nil {
		return err
	}
	if err := errors.Join(removeTree(filepath.Split(dir)), removeTree(filepath.Split(dir+".take"))); err != nil {
		return err
	}
	r.Git.Kept, r.Git.Left = "", nil
	return r.write(s.folders)
}

// reclaimGit takes the commits of a lost run, whose container is gone.
func (s Store) reclaimGit(ctx context.Context, r *Record) ([]Leftover, error) {
	dir := filepath.Join(s.folders.record(r.ID), mounts.GitOwn)
	if _, err := os.Lstat(dir); err != nil {
		return nil, nil //nolint:nilerr // most runs have none
	}
	if r.Git == nil {
		r.Git = &GitRecord{Mode: mounts.GitPrivate}
	}
	had := len(r.Git.Taken)
	var out []Leftover
	if err := s.takeGit(ctx, r, dir, ""); err != nil {
		out = append(out, Leftover{Run: r.ID, Kept: err.Error()})
	}
	for _, t := range r.Git.Taken[had:] {
		out = append(out, Leftover{Run: r.ID, Ref: t.Ref})
	}
	return out, r.write(s.folders)
}
