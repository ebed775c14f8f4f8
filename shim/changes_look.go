package shim

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Changes are what an agent did in its copy, sorted by path, each with what becomes of it.
type Changes struct {
	List  []Change
	rules ChangeRules
}

// Count says how many changes have the verdict.
func (c Changes) Count(v Verdict) int {
	n := 0
	for i := range c.List {
		if c.List[i].Verdict == v {
			n++
		}
	}
	return n
}

// FindChanges compares the copy below the folder copied with its base and with
// the host's tree now. It writes nothing, follows no link and leaves neither
// folder. The copy may hold anything: what can't be read or is refused becomes a
// change with that verdict; too much of it is an *Error with one of ErrTreeBytes and
// ErrTreeEntries.
//
// A file counts as untouched when its inode, size, mode and change time are the
// ones it had when it was copied. Empty folders count. Extended attributes and the
// root's own mode do not.
func FindChanges(ctx context.Context, base Base, copied, host *os.File, rules ChangeRules) (Changes, error) {
	rules = rules.withDefaults()
	rules.ProtectedPaths = followProtected(base, rules.Root, rules.ProtectedPaths)
	s := &copyScan{ctx: ctx, base: make(map[string]*BaseEntry, len(base.Entries)), rules: rules, buf: make([]byte, copyBuffer)}
	s.budget.limits = rules.Limits
	for i := range base.Entries {
		s.base[base.Entries[i].Path] = &base.Entries[i]
	}
	root, err := openFolder(int(copied.Fd()), "", unix.O_RDONLY)
	if err != nil {
		return Changes{}, fmt.Errorf("open copy: %w", err)
	}
	defer unix.Close(root)
	if err := s.folder(root, "", 0); err != nil {
		return Changes{}, err
	}
	slices.SortFunc(s.nodes, func(a, b treeNode) int { return strings.Compare(a.Path, b.Path) })
	rules.repositories = findRepositories(base, s.nodes)
	changes := Changes{List: findDeltas(base, s.nodes, rules), rules: rules}
	known := map[string]treeNode{}
	for i := range changes.List {
		n, err := s.lookHost(int(host.Fd()), &changes.List[i])
		if err != nil {
			return Changes{}, err
		}
		if n.Type != TypeNone || n.Bad != "" {
			known[n.Path] = n
		}
	}
	judge(changes.List, known, rules)
	changes.List = foldProtected(changes.List)
	return changes, nil
}

// copyScan reads an agent's copy.
type copyScan struct {
	ctx    context.Context
	base   map[string]*BaseEntry
	rules  ChangeRules
	budget treeBudget
	buf    []byte
	nodes  []treeNode
}

func (s *copyScan) folder(fd int, p string, depth int) error {
	names, err := readNames(fd, s.budget.entriesLeft())
	if err == nil {
		err = s.budget.take(len(names), 0)
	}
	if err != nil {
		return treeError(p, err)
	}
	for _, d := range names {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		at := path.Join(p, d.name)
		if inAnyPath(at, s.rules.Ignore) {
			continue
		}
		if err := s.name(fd, d.name, at, depth+1); err != nil {
			return treeError(at, err)
		}
	}
	return nil
}

func (s *copyScan) name(dir int, name, p string, depth int) error {
	fd, err := openBeneath(dir, name, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return s.bad(treeNode{Path: p, Type: TypeSpecial}, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	n := nodeOf(p, &st)
	e := s.base[p]
	n.Same = e != nil && e.Type == n.Type && e.Copy == n.Stamp && e.Size == n.Size && e.Mode == n.Mode
	switch {
	case len(p) >= unix.PathMax:
		n.Bad = "its path is too long"
	case n.Type == TypeLink:
		if n.Link, err = readLink(fd); err != nil {
			return s.bad(n, err)
		}
	case n.Type == TypeFolder:
		return s.subfolder(dir, name, n, depth)
	case n.Type == TypeFile && !n.Same && n.Size <= s.rules.FileBytes:
		if n.Digest, err = s.digest(dir, name, &n); err != nil {
			return s.bad(n, err)
		}
	}
	s.nodes = append(s.nodes, n)
	return nil
}

func (s *copyScan) subfolder(dir int, name string, n treeNode, depth int) error {
	if depth > s.rules.Limits.Depth {
		n.Bad = "it is nested too deep"
		s.nodes = append(s.nodes, n)
		return nil
	}
	fd, err := openFolder(dir, name, unix.O_RDONLY)
	if err != nil {
		return s.bad(n, err)
	}
	defer unix.Close(fd)
	s.nodes = append(s.nodes, n)
	return s.folder(fd, n.Path, depth)
}

// bad notes what can't be read of the copy; a bound that is passed ends the scan.
func (s *copyScan) bad(n treeNode, err error) error {
	switch {
	case errors.Is(err, ErrTreeBytes), errors.Is(err, ErrTreeEntries), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, unix.EXDEV):
		n.Bad = "something is mounted on it"
	case isTreeChange(err), errors.Is(err, unix.ENOENT):
		n.Bad = "it changes while it is read"
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		n.Bad = "it can't be read"
	default:
		return err
	}
	s.nodes = append(s.nodes, n)
	return nil
}

// digest reads the file that n was taken of.
func (s *copyScan) digest(dir int, name string, n *treeNode) (Digest, error) {
	if err := s.budget.take(0, n.Size); err != nil {
		return Digest{}, err
	}
	settle(n.Stamp.CTime)
	fd, err := openNode(dir, name, n)
	if err != nil {
		return Digest{}, err
	}
	defer unix.Close(fd)
	hash := sha256.New()
	for at := int64(0); at < n.Size; {
		if err := s.ctx.Err(); err != nil {
			return Digest{}, err
		}
		got, err := preadSome(fd, s.buf[:min(int64(len(s.buf)), n.Size-at)], at)
		if err != nil {
			return Digest{}, err
		}
		hash.Write(s.buf[:got])
		at += int64(got)
	}
	if err := sameNode(fd, n); err != nil {
		return Digest{}, err
	}
	return Digest(hash.Sum(nil)), nil
}

// openNode opens the file that n was taken of for reading; ErrTreeChanged when
// another file or another state of it is there now.
func openNode(dir int, p string, n *treeNode) (int, error) {
	fd, err := openBeneath(dir, p, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY)
	if err != nil {
		return -1, err
	}
	if err := sameNode(fd, n); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func sameNode(fd int, n *treeNode) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if typeOf(st.Mode) != n.Type || stampOf(&st) != n.Stamp || n.Type == TypeFile && st.Size != n.Size {
		return ErrTreeChanged
	}
	return nil
}

// lookHost looks at the host's side of a change.
func (s *copyScan) lookHost(root int, c *Change) (treeNode, error) {
	n := treeNode{Path: c.Path}
	if c.copy.Bad != "" { // refused whatever the host has
		return n, nil
	}
	fd, err := openBeneath(root, c.Path, unix.O_PATH|unix.O_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return n, nil
	// A file or link stands where the path has a folder: p itself is not there.
	case (errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)) && (c.Kind == ChangeDeleted || s.comes(parentOf(c.Path))):
		return n, nil
	case errors.Is(err, unix.ENOTDIR):
		n.Bad = "on the host a folder on the way to it is none"
		return n, nil
	case errors.Is(err, unix.ELOOP):
		n.Bad = "on the host a folder on the way to it is a link"
		return n, nil
	case errors.Is(err, unix.EACCES):
		n.Bad = "on the host it can't be reached"
		return n, nil
	case errors.Is(err, unix.EXDEV):
		n.Bad = "on the host something is mounted on it"
		return n, nil
	case err != nil:
		return n, treeError(c.Path, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return n, treeError(c.Path, err)
	}
	return s.hostNode(root, fd, c, nodeOf(c.Path, &st))
}

// comes says whether the copy turned what was a file or link at p, or above, into a
// folder: the host still has the old one there, and p's own change is judged first.
func (s *copyScan) comes(p string) bool {
	for ; p != ""; p = parentOf(p) {
		if e := s.base[p]; e != nil && e.Type != TypeFolder {
			return true
		}
	}
	return false
}

func (s *copyScan) hostNode(root, fd int, c *Change, n treeNode) (treeNode, error) {
	var err error
	switch {
	case n.Type == TypeLink:
		n.Link, err = readLink(fd)
	case n.Type == TypeFolder && c.From == TypeFolder && c.Kind != ChangeMode:
		n.Names, err = s.hostNames(root, c.Path)
	case n.Type == TypeFile && wantsDigest(c, &n):
		n.Digest, err = s.digest(root, c.Path, &n)
	}
	switch {
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		n.Bad = "on the host it can't be read"
	case isTreeChange(err), errors.Is(err, unix.ENOENT):
		n.Bad = "on the host it changes while it is read"
	case err != nil:
		return n, treeError(c.Path, err)
	}
	return n, nil
}

// wantsDigest: the host's bytes matter where they may be the base's under a new
// stamp, or the copy's already.
func wantsDigest(c *Change, n *treeNode) bool {
	maybeBase := c.From == TypeFile && n.Size == c.base.Size && n.Stamp != c.base.Host && c.base.Digest != (Digest{})
	maybeCopy := c.To == TypeFile && n.Size == c.copy.Size && c.copy.Digest != (Digest{})
	return c.Kind != ChangeMode && (maybeBase || maybeCopy)
}

func (s *copyScan) hostNames(root int, p string) ([]string, error) {
	fd, err := openFolder(root, p, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	names, err := readNames(fd, s.rules.Limits.Entries)
	if err != nil {
		return nil, err
	}
	out := make([]string, len(names))
	for i, d := range names {
		out[i] = d.name
	}
	return out, nil
}
