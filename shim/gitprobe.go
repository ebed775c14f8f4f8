package shim

import (
	"errors"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/mounts"
)

// gitKind is what a workspace is to git.
type gitKind string

// The kinds. A workspace below a repository's top folder is gitNone too: the agent's
// git finds nothing there.
const (
	gitNone      gitKind = "none"
	gitOwn       gitKind = "folder"    // .git is the git dir
	gitWorktree  gitKind = "worktree"  // .git is a file that leads to COMMON/worktrees/NAME
	gitSubmodule gitKind = "submodule" // .git is a file that leads to a git dir with core.worktree
)

// gitHost is the repository of a workspace, read as data. It holds no open file, so
// that it can be kept in a record; the inodes tell whether a folder is still the
// one that was read.
type gitHost struct {
	Kind gitKind `json:"kind"`
	// Work is the workspace, Dir the git dir, Common the folder with its objects and
	// references, which is Dir but for linked working trees. Real paths.
	Work   string   `json:"work"`
	Dir    string   `json:"dir,omitempty"`
	Common string   `json:"common,omitempty"`
	DirID  gitInode `json:"dirID"`
	// CommonID is the identity of Common, its owner the one of the repository.
	CommonID gitInode `json:"commonID"`

	Head gitHead `json:"head"`
	// Shallow are the commits at which a shallow clone's history ends.
	Shallow []string `json:"shallow,omitempty"`
	// Gitlinks are the paths of the branch's submodules, whether checked out or not;
	// newPrivate fills them in.
	Gitlinks []string `json:"gitlinks,omitempty"`
	// Kept are the settings that say how the working tree was written.
	Kept []gitSetting `json:"kept,omitempty"`
	// Name and Email are user.name and user.email of the repository itself. An agent
	// may have written them in a run that shared the repository.
	Name  string `json:"name,omitempty"`
	Email string `json:"email,omitempty"`
	// HooksPath is core.hooksPath of the repository itself, absolute; empty for none.
	HooksPath string `json:"hooksPath,omitempty"`
	// Exclude is info/exclude.
	Exclude []byte `json:"exclude,omitempty"`
}

// findGit says what the workspace work, a real path, is to git, without reading the
// repository: Kind, the paths and the inodes. It runs nothing and writes nothing.
// agentDirs are the folders in which an agent may have made links; see
// mounts.AgentFolders.
//
// A .git file is believed only where the git dir it leads to names this workspace
// in turn, so that an agent cannot have another repository opened for it. What is
// refused is a *gitError.
func findGit(work string, agentDirs []string) (gitHost, error) {
	h := gitHost{Kind: gitNone, Work: work}
	top, err := openGitFolder(work)
	if err != nil {
		return h, err
	}
	defer top.close()
	var st unix.Stat_t
	err = unix.Fstatat(top.fd(), ".git", &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return h, refuseBare(top)
	case err != nil:
		return h, &os.PathError{Op: "stat", Path: ".git", Err: err}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		h.Kind, h.Dir = gitOwn, path.Join(work, ".git")
		h.Common = h.Dir
	case unix.S_IFREG:
		if err := h.followFile(top, agentDirs); err != nil {
			return h, err
		}
	case unix.S_IFLNK:
		return h, gitRefuse(gitLink, ".git", "it is a link")
	default:
		return h, gitRefuse(gitMalformed, ".git", "it is neither a folder nor a file")
	}
	return h, h.identify()
}

// refuseBare follows git's own test for a repository without a working tree.
func refuseBare(top gitFolder) error {
	for _, name := range []string{"HEAD", "objects", "refs"} {
		var st unix.Stat_t
		if unix.Fstatat(top.fd(), name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
			return nil
		}
	}
	return gitRefuse(gitBare, "", "the workspace is a repository's own folder")
}

// followFile finds the git dir that a .git file leads to.
func (h *gitHost) followFile(top gitFolder, agentDirs []string) error {
	b, err := top.read(".git", maxGitFile)
	if err != nil {
		return err
	}
	target, err := parseGitFile(b)
	if err != nil {
		return err
	}
	h.Dir, err = mounts.Resolve(joinPath(h.Work, target), agentDirs)
	if err != nil {
		return &gitError{Reason: gitForeign, What: ".git", Err: err}
	}
	dir, err := openGitFolder(h.Dir)
	if err != nil {
		return &gitError{Reason: gitForeign, What: ".git", Err: err}
	}
	defer dir.close()
	commondir, err := dir.readAny("commondir", maxGitFile)
	if err != nil {
		return err
	}
	if commondir == nil {
		return h.asSubmodule(dir)
	}
	return h.asWorktree(dir, commondir)
}

// asWorktree takes COMMON/worktrees/NAME, whose file gitdir names the .git file.
func (h *gitHost) asWorktree(dir gitFolder, commondir []byte) error {
	h.Kind, h.Common = gitWorktree, path.Dir(path.Dir(h.Dir))
	common, err := parsePathLine(commondir, "commondir")
	if err != nil {
		return err
	}
	if path.Base(path.Dir(h.Dir)) != "worktrees" || joinPath(h.Dir, common) != h.Common {
		return gitRefuse(gitForeign, ".git", "it leads to a folder that is no linked working tree")
	}
	b, err := dir.read("gitdir", maxGitFile)
	if err != nil {
		return &gitError{Reason: gitForeign, What: ".git", Err: err}
	}
	back, err := parsePathLine(b, "gitdir")
	if err != nil {
		return err
	}
	back = joinPath(h.Dir, back)
	if path.Base(back) != ".git" || !h.isWork(path.Dir(back)) {
		return gitRefuse(gitForeign, ".git", "the working tree that it leads to is registered for another folder")
	}
	return nil
}

// asSubmodule takes a git dir whose core.worktree names the workspace.
func (h *gitHost) asSubmodule(dir gitFolder) error {
	h.Kind, h.Common = gitSubmodule, h.Dir
	settings, err := readGitConfig(dir, dir)
	if err != nil {
		return asForeign(err)
	}
	back, ok := settings.get("core.worktree")
	if !ok || !h.isWork(joinPath(h.Dir, back)) {
		return gitRefuse(gitForeign, ".git", "the repository that it leads to does not name this workspace")
	}
	return nil
}

// asForeign turns a file that is not there into the refusal of the whole.
func asForeign(err error) error {
	if isAbsent(err) {
		return &gitError{Reason: gitForeign, What: ".git", Err: err}
	}
	return err
}

func (h *gitHost) isWork(p string) bool {
	p, err := mounts.Resolve(p, nil)
	return err == nil && p == h.Work
}

func (h *gitHost) identify() error {
	for _, g := range []struct {
		path string
		id   *gitInode
	}{{h.Dir, &h.DirID}, {h.Common, &h.CommonID}} {
		f, err := openGitFolder(g.path)
		if err != nil {
			return err
		}
		*g.id, err = f.id()
		f.close()
		if err != nil {
			return err
		}
	}
	return nil
}

// open opens both folders again; gitSwapped when one of them is not what it was.
func (h gitHost) open() (dir, common gitFolder, err error) {
	dir, err = openKnown(h.Dir, h.DirID)
	if err != nil {
		return dir, common, err
	}
	common, err = openKnown(h.Common, h.CommonID)
	if err != nil {
		dir.close()
	}
	return dir, common, err
}

func openKnown(p string, want gitInode) (gitFolder, error) {
	f, err := openGitFolder(p)
	if err != nil {
		return f, &gitError{Reason: gitSwapped, What: p, Err: err}
	}
	id, err := f.id()
	if err == nil && (id.Dev != want.Dev || id.Ino != want.Ino) {
		err = gitRefuse(gitSwapped, p, "it is another folder than before")
	}
	if err != nil {
		f.close()
	}
	return f, err
}

// readGit fills in what findGit left open, and refuses a repository whose history
// can't be given to an agent as it is.
func (h gitHost) readGit() (gitHost, error) {
	dir, common, err := h.open()
	if err != nil {
		return h, err
	}
	defer dir.close()
	defer common.close()
	if err := h.readSettings(dir, common); err != nil {
		return h, err
	}
	if err := checkLayout(h.Kind, dir, common); err != nil {
		return h, err
	}
	if h.Head, err = readGitHead(dir, common); err != nil {
		return h, err
	}
	shallow, err := common.readAny("shallow", maxPackedRefs)
	if err != nil {
		return h, err
	}
	if h.Shallow, err = parseShallow(shallow); err != nil {
		return h, err
	}
	h.Exclude, err = common.readAny("info/exclude", maxGitConfig)
	return h, err
}

func (h *gitHost) readSettings(dir, common gitFolder) error {
	settings, err := readGitConfig(dir, common)
	if err != nil {
		return asMalformed("config", err)
	}
	if p, ok := settings.get("core.hookspath"); ok && p != "" {
		h.HooksPath = joinPath(h.Work, p)
	}
	if err := checkGitConfig(settings, h.Kind == gitWorktree); err != nil {
		return err
	}
	if p, ok := settings.get("core.worktree"); ok && h.Kind == gitOwn && !h.isWork(joinPath(h.Dir, p)) {
		return gitRefuse(gitWorkElsewhere, "config", "core.worktree names another folder")
	}
	h.Kept = settings.kept()
	h.Name, _ = settings.get("user.name")
	h.Email, _ = settings.get("user.email")
	return nil
}

// readGitConfig reads config and, where the repository uses it, config.worktree.
func readGitConfig(dir, common gitFolder) (gitSettings, error) {
	b, err := common.read("config", maxGitConfig)
	if err != nil {
		return nil, err
	}
	settings, err := parseGitConfig(b)
	if err != nil || !gitSettings(settings).isTrue("extensions.worktreeconfig") {
		return settings, err
	}
	b, err = dir.readAny("config.worktree", maxGitConfig)
	if err != nil {
		return nil, err
	}
	own, err := parseGitConfig(b)
	return slices.Concat(settings, own), err
}

// checkLayout refuses links in the places of folders, and what would make git see
// another history than the objects hold.
func checkLayout(kind gitKind, dir, common gitFolder) error {
	for _, name := range []string{"objects", "refs"} {
		f, err := common.folder(name)
		if err != nil {
			return asMalformed(name, err)
		}
		defer f.close()
		if name == "objects" {
			if err := checkObjectsInfo(f); err != nil {
				return err
			}
		}
	}
	if kind != gitWorktree {
		b, err := dir.readAny("commondir", maxGitFile)
		if err != nil {
			return err
		}
		if b != nil {
			return gitRefuse(gitForeign, "commondir", "objects and references are in another folder")
		}
	}
	grafts, err := common.readAny("info/grafts", maxGitConfig)
	if err == nil && len(grafts) > 0 {
		err = gitRefuse(gitGrafts, "info/grafts", "history is changed by grafts")
	}
	return err
}
