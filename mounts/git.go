package mounts

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"

	"github.com/agentshim/agentshim/harness"
)

// ErrGit says that the workspace's repository can't be used as the file asks.
var ErrGit = errors.New("git refused")

// WhyGit is Mount.Why of what stands in the place of the workspace's .git, or is
// needed by it.
const WhyGit = "git"

// Modes of Set.Git.
const (
	GitPrivate = "private"
	GitShared  = "shared"
	GitNone    = "none"
)

// Where the container has what git needs beside .git itself.
const (
	// GitObjects is the branch's history, read-only.
	GitObjects = harness.GitPath + "/objects"
	// GitDir is the git dir that a .git file of agentshim's leads to.
	GitDir = harness.GitPath + "/dir"
)

// The private repository's parts in the run's folder beside its record.
const (
	GitOwn         = "git"
	gitOwnDir      = GitOwn + "/private"
	gitOwnObjects  = GitOwn + "/base/objects"
	gitOwnFile     = GitOwn + "/dotgit"
	gitJSON        = "$.workspace.git"
	gitUseNone     = `write "git": "none"`
	gitEntry       = ".git"
	gitUnreachable = "it is out of your reach"
)

// GitFacts is what the workspace is to git, read as data. The zero value is a folder
// that is no repository, or lies below the top of one: git finds nothing there.
type GitFacts struct {
	// Node is what stands at .git: NodeDir, NodeFile, NodeLink, NodeOther, NodeUnknown,
	// or empty for nothing.
	Node string
	// Bare says that the workspace is itself what git takes for a git dir.
	Bare bool
	// Refused says why an agent can't have a repository of its own, and Remedy what to
	// do; empty where it can.
	Refused, Remedy string
	// Program says that the host has git.
	Program bool
	// Dirs are the real paths of the git dir and the folder with its objects.
	Dirs []string
	// Common is the folder with objects and references that a .git file leads to, by its
	// key in Facts.Sources; empty where it leads to none. Linked says that the workspace
	// is a linked working tree of it, and not a submodule.
	Common string
	Linked bool
	// Name and Email are the author's, where the repository is shared; empty for none.
	Name, Email string
	// GuardPaths are what is to be guarded in a shared repository, below the workspace or
	// Common, and Guards what stands there.
	GuardPaths []GuardPath
	Guards     GuardFacts
}

// gitDecision is what becomes of a workspace's .git.
type gitDecision struct {
	// mode is GitPrivate, GitShared, GitNone, or empty where there is nothing to decide.
	mode string
	// copied says that the workspace is a copy, which has no .git.
	copied   bool
	warnings []string
}

// decideGit follows what the file says. What it leaves open is private where the
// repository allows that, and none otherwise: an agent never gets more than it was
// to have. What can't be kept is refused.
func decideGit(h harness.Harness, f Facts) (gitDecision, problems) {
	if !h.HasWorkspace() {
		return gitDecision{}, nil
	}
	var ps problems
	d, p := gitMode(*h.Workspace, f.Git)
	d.copied = h.Workspace.Mode == "copy"
	ps.add(p)
	if d.mode == GitShared && f.Git.Common != "" {
		ps.add(sourceProblem(bind{json: "$.workspace", key: f.Git.Common, why: WhyGit}, f))
	}
	return d, ps
}

func gitMode(w harness.Workspace, g GitFacts) (gitDecision, *Problem) {
	if w.Mode == "copy" && w.Git == GitShared {
		return gitDecision{}, refuseGit(w.Git, "the agent works on a copy, and would change the host's repository", `write "git": "private"`)
	}
	switch node := g.Node; {
	case node == "":
		return decideBare(w, g)
	case w.Mode == "copy":
		// .git is not copied: there is nothing to cover.
	case node == NodeLink:
		return gitDecision{}, refuseGit(gitEntry, "it is a link, which can't be covered", "put the folder itself in its place")
	case node == NodeOther:
		return gitDecision{}, refuseGit(gitEntry, "it is neither a folder nor a file", "remove it")
	case node == NodeUnknown:
		return gitDecision{}, refuseGit(gitEntry, gitUnreachable, "give yourself permission to read the workspace")
	}
	d := gitDecision{mode: w.Git}
	switch {
	case w.Git == GitShared && g.Node == NodeFile && g.Common == "":
		return d, refuseGit(gitEntry, g.Refused, orNone(g.Remedy))
	case w.Git == GitNone, w.Git == GitShared:
		return d, nil
	case g.Refused != "" && w.Git == "":
		d.mode = GitNone
		d.warnings = []string{fmt.Sprintf("the agent has no repository (git: none), because it can't have one of its own: %s; %s", g.Refused, orNone(g.Remedy))}
		return d, nil
	case g.Refused != "":
		return d, refuseGit(gitEntry, g.Refused, orNone(g.Remedy))
	case !g.Program:
		return d, refuseGit(gitEntry, "a repository of the agent's own is made by the host's git, and there is none on PATH", "install git, or "+gitUseNone)
	}
	d.mode = GitPrivate
	return d, nil
}

func orNone(remedy string) string {
	if remedy == "" {
		return gitUseNone
	}
	return remedy
}

// decideBare: nothing can be mounted over a workspace's own files.
func decideBare(w harness.Workspace, g GitFacts) (gitDecision, *Problem) {
	switch {
	case !g.Bare:
		return gitDecision{}, nil
	case w.Git == GitShared:
		return gitDecision{mode: GitShared}, nil
	case w.Mode == "writable":
		return gitDecision{}, refuseGit(".", "the workspace is a repository's own folder: the agent could write hooks that the host runs", `give a folder with a working tree (git worktree add ../work), or write "git": "shared" if you mean it`)
	}
	return gitDecision{warnings: []string{"the workspace is a repository's own folder: the agent can read all of it, and git has no other effect"}}, nil
}

func refuseGit(value, reason, remedy string) *Problem {
	return &Problem{Path: gitJSON, Value: value, Reason: reason, Remedy: remedy, Kind: ErrGit}
}

// git adds what stands in the place of the workspace's .git. It does not depend on
// where the workspace is taken from: that needs a folder or file named .git, as the
// host's has, to be mounted on.
func (s *Set) git(d gitDecision, f Facts, t Target) error {
	s.Git = d.mode
	s.Warnings = slices.Concat(s.Warnings, d.warnings, gitExposed(d.mode, f.Git, s.Mounts))
	i := slices.IndexFunc(s.Mounts, func(m Mount) bool { return m.Why == WhyWorkspace })
	if d.mode == "" || i < 0 {
		return nil
	}
	ws := s.Mounts[i]
	at := path.Join(ws.Target, gitEntry)
	var err error
	switch folder := f.Git.Node == NodeDir; {
	case d.mode == GitShared:
		err = s.gitShared(ws, at, f, t)
	case d.mode == GitPrivate && folder:
		s.gitOwn(at, gitOwnDir, true, true, t)
		s.gitOwn(GitObjects, gitOwnObjects, true, false, t)
	case d.mode == GitPrivate:
		s.gitOwn(GitDir, gitOwnDir, true, true, t)
		s.gitOwn(GitObjects, gitOwnObjects, true, false, t)
		s.gitOwn(at, gitOwnFile, true, false, t)
	case d.copied:
		// .git is not copied.
	case folder:
		s.gitOwn(at, EmptyDir, false, false, t)
	default:
		s.gitOwn(at, EmptyFile, false, false, t)
	}
	return err
}

func (s *Set) gitOwn(target, own string, kept, writable bool, t Target) {
	m := bindMount(bind{target: target, writable: writable, why: WhyGit}, Source{}, t)
	m.takeOwn(own, kept, t)
	s.Mounts = append(s.Mounts, m)
}

// Files of the run's own folder by which a .git file's repository works at another
// place than the host's.
const (
	// GitSharedFile leads to GitDir.
	GitSharedFile = "git/dotgit"
	// GitSharedConfig is a submodule's configuration with its working tree's place.
	GitSharedConfig = "git/config"
)

// gitShared mounts what a .git file leads to, and guards what names programs that the
// host's git runs, as far as it is there.
func (s *Set) gitShared(ws Mount, at string, f Facts, t Target) error {
	g, root := f.Git, ws
	if g.Common != "" {
		root = bindMount(bind{target: GitDir, writable: ws.Writable, why: WhyGit}, f.Sources[g.Common], t)
		s.Mounts = append(s.Mounts, root)
		s.gitOwn(at, GitSharedFile, false, false, t)
		if !g.Linked {
			s.gitOwn(path.Join(GitDir, "config"), GitSharedConfig, false, false, t)
		}
	}
	own := slices.DeleteFunc(slices.Clone(s.Mounts), func(m Mount) bool { return m.Why != WhyGit || m.Own == "" })
	guards, err := Guards(root, root.Source, g.GuardPaths, g.Guards, own)
	s.Mounts = append(s.Mounts, guards.Mounts...)
	return err
}

// GitGuardPaths are what names programs in a git dir of the given path, "" for the
// root of what is looked at.
func GitGuardPaths(dir string) []GuardPath {
	const reason = "the host's git runs the programs it names"
	var out []GuardPath
	for _, name := range []string{"config", "config.worktree", "hooks"} {
		out = append(out, GuardPath{Rel: path.Join(dir, name), Reason: reason})
	}
	return out
}

// apart leaves out the guards within what .git's own mount covers.
func (d gitDecision) apart(guards []GuardPath) []GuardPath {
	if d.mode != GitPrivate && d.mode != GitNone {
		return guards
	}
	return slices.DeleteFunc(guards, func(g GuardPath) bool { return atOrBelow("/"+g.Rel, "/"+gitEntry) })
}

// gitCollision refuses a mount of the file's on what stands in the place of .git.
func gitCollision(b bind, mode string, asked []bind) *Problem {
	if mode != GitPrivate && mode != GitNone || b.why == WhyWorkspace || b.targetErr != nil {
		return nil
	}
	if at := path.Join(asked[0].target, gitEntry); atOrBelow(b.target, at) {
		return refuse(b.json+".target", b.target, "it collides with "+at+", which workspace.git says", `choose another target, or write "git": "shared"`)
	}
	return nil
}

// gitExposed warns of mounts that show what .git's cover hides.
func gitExposed(mode string, g GitFacts, all []Mount) []string {
	if mode != GitPrivate && mode != GitNone {
		return nil
	}
	var out []string
	for _, m := range all {
		if m.Why != WhyMount {
			continue
		}
		for _, dir := range g.Dirs {
			if !atOrBelow(dir, m.Source) && !below(m.Source, dir) {
				continue
			}
			verb := "see"
			if m.Writable {
				verb = "change"
			}
			out = append(out, fmt.Sprintf("the agent can %s the host's repository %q through the mount on %q", verb, dir, m.Target))
			break
		}
	}
	return out
}

// GitEnv are the variables of the agent's git: it takes the workspace, whose target is
// given, for its own, whoever owns the files; it has the user's name for its commits; and
// it does not forget other linked working trees because they are not in the container.
// None where it has no repository.
func GitEnv(mode, target string, g GitFacts) map[string]string {
	if mode != GitPrivate && mode != GitShared {
		return nil
	}
	settings := [][2]string{{"safe.directory", target}}
	if mode == GitShared {
		settings = append(settings, [2]string{"gc.worktreePruneExpire", "never"})
	}
	for _, s := range [][2]string{{"user.name", g.Name}, {"user.email", g.Email}} {
		if s[1] != "" {
			settings = append(settings, s)
		}
	}
	env := map[string]string{"GIT_CONFIG_COUNT": strconv.Itoa(len(settings))}
	for i, s := range settings {
		env["GIT_CONFIG_KEY_"+strconv.Itoa(i)], env["GIT_CONFIG_VALUE_"+strconv.Itoa(i)] = s[0], s[1]
	}
	return env
}
