package shim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"

	"golang.org/x/sys/unix"
)

// Why changes are not applied.
var (
	// ErrBlocked says that there are conflicts or refusals, so nothing was applied.
	ErrBlocked = errors.New("not every change can be applied")
	// ErrApplyRace says that the host's tree or the copy changed after it was looked
	// at: what was applied before that stays.
	ErrApplyRace = errors.New("it changed meanwhile")
)

// ApplyOptions say how changes are applied. The zero value applies all or nothing.
type ApplyOptions struct {
	// Partly applies what can be when there are conflicts or refusals.
	Partly bool
}

// Applied says what was done on the host, by path.
type Applied struct {
	Written, Deleted []string
	// Modes are paths of which only the permissions changed.
	Modes []string
}

// ApplyText gives a line for each change that Apply would make, safe for a terminal.
func ApplyText(c Changes) []string {
	var out []string
	for i := range c.List {
		if c.List[i].Verdict == VerdictApply {
			out = append(out, fmt.Sprintf("%s: %s", c.List[i].Kind, quoteName(c.List[i].Path)))
		}
	}
	return out
}

// Apply does on the host what c says. No link is followed, and nothing outside the
// folder host is read or written, whatever is renamed meanwhile.
//
// All new files are written under temporary names beside their places
// (".agentshim-…") and synced before the first one takes its place; an error until
// then leaves the host as it was. Each file is put in place by one rename, so that
// after a crash each is old or new, though some temporary names may be left; the
// deletions come last. A file that changed after FindChanges looked at it is put
// back and ends it with ErrApplyRace; what was applied before stays, is reported,
// and is VerdictDone the next time. What a program holds open and writes in that very
// moment goes to the replaced file.
//
// A replaced file's owner stays; what is new belongs to the caller, or, when the
// caller is root, to the owner of its folder. Times are those of applying.
func Apply(ctx context.Context, c Changes, copied, host *os.File, opt ApplyOptions) (Applied, error) {
	if n := c.Count(VerdictConflict) + c.Count(VerdictRefused); n > 0 && !opt.Partly {
		return Applied{}, fmt.Errorf("%w: %d of %d", ErrBlocked, n, len(c.List))
	}
	a := &applier{
		ctx: ctx, copied: int(copied.Fd()), host: int(host.Fd()), temp: ".agentshim-" + newRunID() + "-",
		folders: map[string]stagedNode{}, buf: make([]byte, copyBuffer), root: os.Geteuid() == 0,
	}
	defer a.cleanUp()
	if err := a.stage(c.List); err != nil {
		return Applied{}, err
	}
	err := a.commit(c.List)
	for _, s := range a.staged {
		if a.tops[s.top].placed {
			a.done.Written = append(a.done.Written, s.path)
		}
	}
	return a.done, err
}

// applier is one Apply.
type applier struct {
	ctx          context.Context
	copied, host int
	root         bool
	temp         string
	bytes        copyModes
	buf          []byte
	// folders are where new folders are until they take their places.
	folders map[string]stagedNode
	made    []stagedFolder
	staged  []stagedNode
	tops    []stagedTop
	done    Applied
}

// stagedNode is a path and the place in tops of what it comes with.
type stagedNode struct {
	path string
	top  int
}

// stagedTop is a file, link or whole new folder under its temporary name.
type stagedTop struct {
	change *Change
	name   string
	// ino is what was made under name, 0 for nothing.
	ino    uint64
	placed bool
}

type stagedFolder struct {
	path string
	mode uint32
}

// stage writes all that is new. Changes are sorted: a folder comes before what is in it.
func (a *applier) stage(list []Change) error {
	for i := range list {
		c := &list[i]
		if c.Verdict != VerdictApply || c.Kind == ChangeDeleted || c.Kind == ChangeMode {
			continue
		}
		if err := a.ctx.Err(); err != nil {
			return err
		}
		if err := a.stageOne(c); err != nil {
			return fmt.Errorf("write %s: %w", briefName(c.Path), err)
		}
	}
	for i := len(a.made) - 1; i >= 0; i-- {
		if err := a.folderMode(a.made[i]); err != nil {
			return fmt.Errorf("write %s: %w", briefName(a.made[i].path), err)
		}
	}
	if len(a.tops) == 0 {
		return nil
	}
	return a.sync()
}

// sync keeps the names from reaching the disk before the bytes do.
func (a *applier) sync() error {
	fd, err := openFolder(a.host, "", unix.O_RDONLY)
	if err != nil {
		return raced(err)
	}
	defer unix.Close(fd)
	if err := unix.Syncfs(fd); err != nil {
		return fmt.Errorf("sync the workspace: %w", err)
	}
	return nil
}

func (a *applier) stageOne(c *Change) error {
	in, inNew := a.folders[parentOf(c.Path)]
	parent, name := in.path, path.Base(c.Path)
	if !inNew {
		in.top = len(a.tops)
		parent, name = parentOf(c.Path), a.temp+strconv.Itoa(in.top)
	}
	dir, err := openFolder(a.host, parent, unix.O_PATH)
	if err != nil {
		return raced(err)
	}
	defer unix.Close(dir)
	if !inNew {
		a.tops = append(a.tops, stagedTop{change: c, name: name})
	}
	a.staged = append(a.staged, stagedNode{c.Path, in.top})
	if c.To == TypeFolder {
		a.folders[c.Path] = stagedNode{path.Join(parent, name), in.top}
		a.made = append(a.made, stagedFolder{path.Join(parent, name), c.Mode})
	}
	err = a.makeNode(dir, name, c)
	if !inNew { // of a node that is made in part, too
		a.tops[in.top].ino = inodeAt(dir, name)
	}
	return err
}

// makeNode makes a new folder, link or file.
func (a *applier) makeNode(dir int, name string, c *Change) error {
	owner, err := a.owner(dir, c)
	if err != nil {
		return err
	}
	switch c.To {
	case TypeFolder:
		if err := unix.Mkdirat(dir, name, 0o700); err != nil {
			return err
		}
		return chownAt(dir, name, owner)
	case TypeLink:
		if err := unix.Symlinkat(c.copy.Link, dir, name); err != nil {
			return err
		}
		return chownAt(dir, name, owner)
	}
	return a.stageFile(dir, name, c, owner)
}

// inodeAt is 0 where nothing can be seen.
func inodeAt(dir int, name string) uint64 {
	var st unix.Stat_t
	if unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return 0
	}
	return st.Ino
}

// owner is whom a written file goes to; nil leaves it with the caller.
func (a *applier) owner(dir int, c *Change) (*FileOwner, error) {
	if !a.root {
		return nil, nil
	}
	if c.host.Type != TypeNone {
		return &FileOwner{c.host.UID, c.host.GID}, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return nil, err
	}
	return &FileOwner{st.Uid, st.Gid}, nil
}

func (a *applier) stageFile(dir int, name string, c *Change, owner *FileOwner) error {
	in, err := openNode(a.copied, c.Path, &c.copy)
	if err != nil {
		return raced(err)
	}
	defer unix.Close(in)
	out, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(out)
	var st unix.Stat_t
	if err := unix.Fstat(in, &st); err != nil {
		return err
	}
	var digest Digest
	if err := a.bytes.copy(in, out, &st, a.buf, &digest); err != nil {
		return raced(err)
	}
	if err := sameNode(in, &c.copy); err != nil {
		return raced(err)
	}
	if digest != (Digest{}) && digest != c.copy.Digest && c.copy.Digest != (Digest{}) {
		return ErrApplyRace
	}
	if err := giveOwner(out, owner); err != nil {
		return err
	}
	return unix.Fchmod(out, c.Mode)
}

func (a *applier) folderMode(f stagedFolder) error {
	fd, err := openFolder(a.host, f.path, unix.O_RDONLY)
	if err != nil {
		return raced(err)
	}
	defer unix.Close(fd)
	return unix.Fchmod(fd, f.mode)
}

// commit puts everything in its place: what is new or replaced, permissions of
// files, the deletions from the deepest up, what takes the place of a folder, and
// permissions of folders, which may close them.
func (a *applier) commit(list []Change) error {
	if err := a.placeTops(false); err != nil {
		return err
	}
	if err := a.chmods(list, TypeFile); err != nil {
		return err
	}
	for i := len(list) - 1; i >= 0; i-- {
		c := &list[i]
		if c.Verdict == VerdictApply && c.Kind == ChangeDeleted {
			if err := a.delete(c); err != nil {
				return fmt.Errorf("delete %s: %w", briefName(c.Path), err)
			}
			a.done.Deleted = append(a.done.Deleted, c.Path)
		}
	}
	if err := a.placeTops(true); err != nil {
		return err
	}
	return a.chmods(list, TypeFolder)
}

func (a *applier) chmods(list []Change, of NodeType) error {
	for i := len(list) - 1; i >= 0; i-- {
		c := &list[i]
		if c.Verdict != VerdictApply || c.Kind != ChangeMode || c.To != of {
			continue
		}
		if err := a.chmod(c); err != nil {
			return fmt.Errorf("permissions of %s: %w", briefName(c.Path), err)
		}
		a.done.Modes = append(a.done.Modes, c.Path)
	}
	return nil
}

func (a *applier) placeTops(replaceFolders bool) error {
	for i := range a.tops {
		top := &a.tops[i]
		if (top.change.host.Type == TypeFolder) != replaceFolders {
			continue
		}
		if err := a.ctx.Err(); err != nil {
			return err
		}
		if err := a.place(top); err != nil {
			return fmt.Errorf("write %s: %w", briefName(top.change.Path), err)
		}
	}
	return nil
}

// place renames a staged node to its name.
func (a *applier) place(top *stagedTop) error {
	c := top.change
	dir, err := openFolder(a.host, parentOf(c.Path), unix.O_PATH)
	if err != nil {
		return raced(err)
	}
	defer unix.Close(dir)
	name := path.Base(c.Path)
	if c.host.Type == TypeNone {
		if err := placeNew(dir, top.name, name); err != nil {
			return raced(err)
		}
		top.placed = true
		return nil
	}
	if err := stillThere(dir, name, &c.host, true); err != nil {
		return err
	}
	return a.exchange(dir, top, name)
}

// exchange swaps a staged node with what it replaces, so that what is replaced can
// be looked at once more when nobody can change it by its name any more.
func (a *applier) exchange(dir int, top *stagedTop, name string) error {
	err := replaceNode(dir, top.name, name, top.change.To, &top.change.host)
	top.placed = err == nil
	return err
}

// replaceNode puts the node temp, of type to, in the place of name, which must be old,
// and removes that. With an error, what stands at name is what stood there.
func replaceNode(dir int, temp, name string, to NodeType, old *treeNode) error {
	err := unix.Renameat2(dir, temp, dir, name, unix.RENAME_EXCHANGE)
	if unsupported(err) && to != TypeFolder && old.Type != TypeFolder {
		// No exchange on this file system: a plain rename, right behind the look.
		if err = unix.Renameat(dir, temp, dir, name); err == nil {
			return nil
		}
	}
	if err != nil {
		return raced(err)
	}
	if err := stillThere(dir, temp, old, false); err != nil {
		return cmp.Or(unix.Renameat2(dir, temp, dir, name, unix.RENAME_EXCHANGE), err)
	}
	flags := 0
	if old.Type == TypeFolder {
		flags = unix.AT_REMOVEDIR
	}
	if err := unix.Unlinkat(dir, temp, flags); err != nil {
		// Not empty any more: somebody's file came into the folder.
		return cmp.Or(unix.Renameat2(dir, temp, dir, name, unix.RENAME_EXCHANGE), raced(err))
	}
	return nil
}

// delete takes a file or link away by a temporary name, to look at it once more
// when nobody can change it by its name any more; a folder only when it is empty.
func (a *applier) delete(c *Change) error {
	dir, err := openFolder(a.host, parentOf(c.Path), unix.O_PATH)
	if err != nil {
		return raced(err)
	}
	defer unix.Close(dir)
	name, temp := path.Base(c.Path), a.temp+"gone"
	if err := stillThere(dir, name, &c.host, true); err != nil {
		return err
	}
	if c.host.Type == TypeFolder {
		return raced(unix.Unlinkat(dir, name, unix.AT_REMOVEDIR))
	}
	switch err := unix.Renameat2(dir, name, dir, temp, unix.RENAME_NOREPLACE); {
	case unsupported(err):
		return raced(unix.Unlinkat(dir, name, 0))
	case err != nil:
		return raced(err)
	}
	if err := stillThere(dir, temp, &c.host, false); err != nil {
		return cmp.Or(unix.Renameat2(dir, temp, dir, name, unix.RENAME_NOREPLACE), err)
	}
	return unix.Unlinkat(dir, temp, 0)
}

// chmod goes through an O_PATH descriptor: the caller may change the permissions of
// a file of its own that it can't open.
func (a *applier) chmod(c *Change) error {
	fd, err := openBeneath(a.host, c.Path, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return raced(err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if !sameThing(&st, &c.host, false) {
		return ErrApplyRace
	}
	return chmodOpen(fd, c.Mode)
}

// stillThere is ErrApplyRace when name is not what was looked at. A rename sets the
// change time, so it is compared before only.
func stillThere(dir int, name string, n *treeNode, before bool) error {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return raced(err)
	}
	if !sameThing(&st, n, before) {
		return ErrApplyRace
	}
	return nil
}

func sameThing(st *unix.Stat_t, n *treeNode, before bool) bool {
	now := nodeOf(n.Path, st)
	switch {
	case now.Type != n.Type || now.Stamp.Ino != n.Stamp.Ino:
		return false
	case n.Type == TypeFolder:
		return true // its times change with what is applied in it
	// Another name of the file may have been replaced or deleted: that sets its change time.
	case before && n.Links == 1:
		return now.Stamp == n.Stamp && now.Size == n.Size
	}
	return now.Stamp.MTime == n.Stamp.MTime && now.Size == n.Size && now.Mode == n.Mode
}

// placeNew renames to a name that must be free.
func placeNew(dir int, from, to string) error {
	err := unix.Renameat2(dir, from, dir, to, unix.RENAME_NOREPLACE)
	if !unsupported(err) {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstatat(dir, to, &st, unix.AT_SYMLINK_NOFOLLOW); !errors.Is(err, unix.ENOENT) {
		return cmp.Or(err, error(unix.EEXIST))
	}
	return unix.Renameat(dir, from, dir, to)
}

// unsupported: what file systems without renameat2's flags answer.
func unsupported(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP)
}

// raced adds ErrApplyRace to what a call answers when the tree is not as it was.
func raced(err error) error {
	switch {
	case err == nil:
		return nil
	case isTreeChange(err), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EEXIST), errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EXDEV):
		return fmt.Errorf("%w: %w", ErrApplyRace, err)
	}
	return err
}

// cleanUp removes what was staged and did not take its place.
func (a *applier) cleanUp() {
	for i := range a.tops {
		if top := &a.tops[i]; !top.placed {
			if dir, err := openFolder(a.host, parentOf(top.change.Path), unix.O_PATH); err == nil {
				a.removeStaged(dir, top)
				unix.Close(dir)
			}
		}
	}
}

// removeStaged removes only what this Apply wrote: after a failed exchange back the
// temporary name may hold the host's own file, which stays. The host's number is not
// asked: a file that was removed meanwhile may have left it to the staged one.
func (a *applier) removeStaged(dir int, top *stagedTop) {
	if ino := inodeAt(dir, top.name); ino == 0 || ino != top.ino {
		return
	}
	if top.change.To != TypeFolder {
		_ = unix.Unlinkat(dir, top.name, 0)
		return
	}
	_ = removeFolder(dir, top.name)
}
