package shim

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// gitPrivate is a repository made for one run, below one folder of agentshim's own:
//
//	base/     a git dir with one pack, the branch's history; base/objects is mounted
//	          read-only, so that an agent can neither change it nor copy it away
//	private/  the agent's git dir, mounted writable in place of .git; its objects are
//	          its own and those that it borrows from base/objects
//	dotgit    the content of the agent's .git file, where the workspace has a file
//
// It is plain data, so that another process can take the commits back. Paths and
// branch names are bytes, which JSON keeps only where they are UTF-8.
type gitPrivate struct {
	Host gitHost `json:"host"`
	Dir  string  `json:"dir"`
	// Hidden are the hidden paths that the branch holds: the agent can read them there.
	Hidden []string `json:"hidden,omitempty"`
}

// Private, Objects and DotGit are the host's paths of what is mounted.
func (p gitPrivate) Private() string { return path.Join(p.Dir, "private") }
func (p gitPrivate) Objects() string { return path.Join(p.base(), "objects") }
func (p gitPrivate) DotGit() string  { return path.Join(p.Dir, "dotgit") }
func (p gitPrivate) base() string    { return path.Join(p.Dir, "base") }

// gitOptions say how a private repository is made.
type gitOptions struct {
	// Dir is where, an absolute path that does not exist yet, in a folder that only
	// agentshim's user writes. On the file system of the host's repository objects
	// are linked while it is made, elsewhere they are copied.
	Dir string
	// ObjectsTarget is where the container has base/objects.
	ObjectsTarget string
	// PrivateTarget is where it has the private git dir when .git is a file.
	PrivateTarget string
	// Name and Email are the author's, from the host's configuration; empty for none.
	Name, Email string
	// Hidden are paths of the working tree that the agent does not see.
	Hidden []string
	// Owner gives the private git dir to the agent's user, which only root can; nil
	// leaves it to the caller.
	Owner *gitOwner
}

type gitOwner struct{ UID, GID int }

// Bounds of a host's repository.
const (
	maxHostObjects = 4_000_000
	maxHostCopy    = 1 << 40
)

// newPrivate makes the private repository of a workspace that findGit gave a
// repository for. The branch's history is all that it holds, its index is the
// branch's tree: what the host's index has staged shows as changes of the working
// tree. It reads the host's repository as data and writes nothing into it (objects
// get a second link for a while); with an error nothing is left behind.
//
// Only ctx bounds the time that a large history takes. Replace references are not followed and not given on, nor are tags, remotes, other
// branches, hooks, filters, info/attributes and a merge or rebase under way.
func (g gitProgram) newPrivate(ctx context.Context, h gitHost, o gitOptions) (p gitPrivate, err error) {
	if h, err = h.readGit(); err != nil {
		return p, err
	}
	p = gitPrivate{Host: h, Dir: o.Dir}
	if err := os.Mkdir(o.Dir, 0o700); err != nil {
		return p, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(o.Dir))
		}
	}()
	if err := makeShadow(p.base(), h.Shallow); err != nil {
		return p, err
	}
	if err := g.fillBase(ctx, p); err != nil {
		return p, err
	}
	if err := p.writePrivate(o); err != nil {
		return p, err
	}
	if err := g.writeIndex(ctx, &p, o.Hidden); err != nil {
		return p, err
	}
	return p, p.handOver(o.Owner)
}

// fillBase packs the branch's history from a snapshot of the host's objects, which
// is gone when it returns.
func (g gitProgram) fillBase(ctx context.Context, p gitPrivate) error {
	if p.Host.Head.Commit == "" {
		return nil
	}
	shadow := path.Join(p.Dir, "host")
	defer os.RemoveAll(shadow)
	if err := p.Host.shadow(shadow); err != nil {
		return err
	}
	tip := p.Host.Head.Commit
	if err := g.isCommit(ctx, shadow, tip); err != nil {
		return err
	}
	_, err := g.packHistory(ctx, shadow, tip, "", path.Join(p.Objects(), "pack"))
	return incomplete(err)
}

// shadow makes a git dir at dir that holds the host's objects as they are now.
func (h gitHost) shadow(dir string) error {
	if err := makeShadow(dir, h.Shallow); err != nil {
		return err
	}
	hostDir, common, err := h.open()
	if err != nil {
		return err
	}
	defer hostDir.close()
	defer common.close()
	objects, err := common.folder("objects")
	if err != nil {
		return err
	}
	defer objects.close()
	s := gitSnapshot{Link: true, MaxFiles: maxHostObjects, MaxBytes: maxHostCopy}
	return s.take(objects, path.Join(dir, "objects"))
}

// incomplete names git's own failure to walk a history.
func incomplete(err error) error {
	var status ExitStatus
	if !errors.As(err, &status) {
		return err
	}
	return &gitError{Reason: gitIncomplete, Msg: "the branch's history can't be read whole: " + gitSays(err), Err: err}
}

// writePrivate writes the agent's git dir, all but its index.
func (p gitPrivate) writePrivate(o gitOptions) error {
	dir := p.Private()
	dirs := []string{dir}
	for _, sub := range []string{"objects", "objects/info", "objects/pack", "refs", "refs/heads", "refs/tags", "info", "hooks"} {
		dirs = append(dirs, path.Join(dir, sub))
	}
	if err := gitMkdir(dirs...); err != nil {
		return err
	}
	head := p.Host.Head
	files := map[string]string{
		"HEAD":                    head.Commit + "\n",
		"config":                  string(renderGitConfig(p.settings(o))),
		"info/exclude":            string(p.Host.Exclude),
		"objects/info/alternates": quoteAlternate(o.ObjectsTarget) + "\n",
	}
	if head.Branch != "" {
		files["HEAD"] = "ref: refs/heads/" + head.Branch + "\n"
	}
	if head.Branch != "" && head.Commit != "" {
		files["packed-refs"] = "# pack-refs with: peeled fully-peeled sorted \n" + head.Commit + " refs/heads/" + head.Branch + "\n"
	}
	if len(p.Host.Shallow) > 0 {
		files["shallow"] = strings.Join(p.Host.Shallow, "\n") + "\n"
	}
	if err := writeGitFiles(dir, files); err != nil {
		return err
	}
	if p.Host.Kind == gitOwn {
		return nil
	}
	return os.WriteFile(p.DotGit(), []byte("gitdir: "+o.PrivateTarget+"\n"), 0o644)
}

func (p gitPrivate) settings(o gitOptions) []gitSetting {
	s := []gitSetting{
		{Key: "core.repositoryformatversion", Value: "0"},
		{Key: "core.bare", Value: "false"},
		{Key: "core.logallrefupdates", Value: "true"},
	}
	s = append(s, p.Host.Kept...)
	if o.Name != "" {
		s = append(s, gitSetting{Key: "user.name", Value: o.Name})
	}
	if o.Email != "" {
		s = append(s, gitSetting{Key: "user.email", Value: o.Email})
	}
	return s
}

// writeIndex makes the private index from the branch's tree, without looking at the
// working tree.
func (g gitProgram) writeIndex(ctx context.Context, p *gitPrivate, hidden []string) error {
	if p.Host.Head.Commit == "" {
		return nil
	}
	index := path.Join(p.base(), "index")
	if _, err := g.run(ctx, p.base(), "", "read-tree", p.Host.Head.Commit); err != nil {
		return incomplete(err)
	}
	b, err := os.ReadFile(index)
	if err != nil {
		return err
	}
	b, found, err := keepUnseen(b, hidden)
	if err != nil {
		return err
	}
	p.Host.Gitlinks, p.Hidden = found.gitlinks, found.hidden
	return errors.Join(os.WriteFile(path.Join(p.Private(), "index"), b, 0o644), os.Remove(index))
}

// handOver makes everything readable for the agent and gives it its git dir.
func (p gitPrivate) handOver(owner *gitOwner) error {
	for _, root := range []string{p.Objects(), p.Private()} {
		err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if err := os.Chmod(name, openMode(d, root == p.Private())); err != nil {
				return err
			}
			if owner == nil || root != p.Private() {
				return nil
			}
			return os.Lchown(name, owner.UID, owner.GID)
		})
		if err != nil {
			return err
		}
	}
	if p.Host.Kind == gitOwn {
		return nil
	}
	return os.Chmod(p.DotGit(), 0o444)
}

// openMode does not depend on the caller's umask.
func openMode(d fs.DirEntry, writable bool) fs.FileMode {
	switch {
	case d.IsDir():
		return 0o755
	case writable:
		return 0o644
	}
	return 0o444
}
