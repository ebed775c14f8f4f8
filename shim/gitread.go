package shim

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// gitFolder is an open folder of a repository. Everything in it is reached from the
// descriptor, without following a link at any step, and without leaving it.
type gitFolder struct{ f *os.File }

// gitResolve are the resolve flags of every open: openat2(2).
const gitResolve = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// openGitFolder opens a folder by its real path: links on the way to it are
// followed, a link in its place is not.
func openGitFolder(path string) (gitFolder, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return gitFolder{}, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return gitFolder{os.NewFile(uintptr(fd), path)}, nil
}

func (g gitFolder) close() { g.f.Close() }

func (g gitFolder) fd() int { return int(g.f.Fd()) }

// open opens name, a relative path, without waiting for a FIFO's other end. A link
// on the way or in its place is gitLink. There is no O_NOFOLLOW: with O_DIRECTORY it
// would make ENOTDIR of a link.
func (g gitFolder) open(name string, flags int) (*os.File, error) {
	how := unix.OpenHow{Flags: uint64(flags | unix.O_NONBLOCK | unix.O_CLOEXEC), Resolve: gitResolve}
	for {
		fd, err := unix.Openat2(g.fd(), name, &how)
		switch {
		case err == nil:
			return os.NewFile(uintptr(fd), name), nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			// EAGAIN: a rename somewhere in the system raced with the walk.
		case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
			return nil, &gitError{Reason: gitLink, What: name, Err: err}
		default:
			return nil, &os.PathError{Op: "open", Path: name, Err: err}
		}
	}
}

// folder opens a folder below g.
func (g gitFolder) folder(name string) (gitFolder, error) {
	f, err := g.open(name, unix.O_RDONLY|unix.O_DIRECTORY)
	return gitFolder{f}, err
}

// file opens a regular file below g; anything else is gitMalformed.
func (g gitFolder) file(name string) (*os.File, unix.Stat_t, error) {
	var st unix.Stat_t
	f, err := g.open(name, unix.O_RDONLY)
	if err != nil {
		return nil, st, err
	}
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, st, &os.PathError{Op: "stat", Path: name, Err: err}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return f, st, nil
	case unix.S_IFDIR:
		f.Close()
		return nil, st, &os.PathError{Op: "read", Path: name, Err: unix.EISDIR}
	}
	f.Close()
	return nil, st, gitRefuse(gitMalformed, name, "it is not a regular file")
}

// read gives a regular file's content, at most limit bytes.
func (g gitFolder) read(name string, limit int) ([]byte, error) {
	f, _, err := g.file(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, int64(limit)+1))
	if err != nil {
		return nil, err
	}
	if len(b) > limit {
		return nil, gitRefuse(gitTooLarge, name, fmt.Sprintf("it is larger than %d bytes", limit))
	}
	return b, nil
}

// readAny is read, with nil for a file that is not there.
func (g gitFolder) readAny(name string, limit int) ([]byte, error) {
	b, err := g.read(name, limit)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

// names are a folder's entries, at most limit. The descriptor is reopened, so that
// it can be listed again.
func (g gitFolder) names(limit int) ([]string, error) {
	again, err := g.folder(".")
	if err != nil {
		return nil, err
	}
	defer again.close()
	names, err := again.f.Readdirnames(limit + 1)
	if len(names) > limit {
		return nil, gitRefuse(gitTooLarge, g.f.Name(), "it has too many entries")
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}

// id is the folder's identity.
func (g gitFolder) id() (gitInode, error) {
	var st unix.Stat_t
	if err := unix.Fstat(g.fd(), &st); err != nil {
		return gitInode{}, &os.PathError{Op: "stat", Path: g.f.Name(), Err: err}
	}
	return gitInode{Dev: st.Dev, Ino: st.Ino, UID: int(st.Uid), GID: int(st.Gid)}, nil
}

// gitInode identifies a folder while it exists, with its owner.
type gitInode struct {
	Dev uint64 `json:"dev"`
	Ino uint64 `json:"ino"`
	UID int    `json:"uid"`
	GID int    `json:"gid"`
}

// readGitHead resolves HEAD of a git dir, with its references in common. The reference is
// looked up loose first, then packed, as git does.
func readGitHead(dir, common gitFolder) (gitHead, error) {
	b, err := dir.read("HEAD", maxGitFile)
	if err != nil {
		return gitHead{}, asMalformed("HEAD", err)
	}
	h, err := parseHead(b)
	if err != nil || h.Branch == "" {
		return h, err
	}
	h.Commit, err = readGitRef(common, "refs/heads/"+h.Branch)
	return h, err
}

// readGitRef gives the ID that a valid full reference name stands for, "" where
// there is none. A reference to a reference is refused.
func readGitRef(common gitFolder, ref string) (string, error) {
	b, err := common.read(ref, maxGitFile)
	if err == nil {
		id, ok := parseID(b)
		if !ok {
			return "", gitRefuse(gitMalformed, ref, "it holds no object ID")
		}
		return id, nil
	}
	if !isAbsent(err) {
		return "", err
	}
	packed, err := common.readAny("packed-refs", maxPackedRefs)
	if err != nil {
		return "", err
	}
	return findPackedRef(packed, ref)
}

// isAbsent says that no file of that name can be there: it is missing, a folder
// stands there, or a file stands where a folder would have to.
func isAbsent(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ENOTDIR)
}

func asMalformed(what string, err error) error {
	if isAbsent(err) {
		return &gitError{Reason: gitMalformed, What: what, Err: err}
	}
	return err
}

// gitSnapshot says how objects are taken, and how many.
type gitSnapshot struct {
	// Link makes hard links where the file system allows: for a repository that only
	// the host's user writes. An agent could write to a linked file later.
	Link bool
	// NoIndex leaves the packs' indexes behind: they say which object is where, and
	// nothing proves it but making them anew.
	NoIndex bool
	// Borrowed leaves alternates unread instead of refusing them: an agent's
	// repository has one to the branch's history.
	Borrowed bool
	// MaxFiles and MaxBytes bound what is taken; MaxBytes counts what is copied.
	MaxFiles int
	MaxBytes int64

	files int
	bytes int64
}

// take brings the objects of a repository into to/objects, which it creates: loose
// objects and packs under git's own names, as regular files, and nothing else of
// what git would read there: no alternates, bitmaps, commit graphs, multi-pack
// indexes. Objects that change while it reads are seen as they were or as they
// become; content is not verified.
func (s *gitSnapshot) take(objects gitFolder, to string) error {
	if !s.Borrowed {
		if err := checkObjectsInfo(objects); err != nil {
			return err
		}
	}
	names, err := objects.names(4096)
	if err != nil {
		return err
	}
	if err := gitMkdir(to, to+"/pack", to+"/info"); err != nil {
		return err
	}
	// Loose objects first: git puts an object into a pack before it takes the loose
	// one away.
	for _, name := range names {
		if isLowerHex(name, 2) {
			if err := s.loose(objects, name, to); err != nil {
				return err
			}
		}
	}
	return s.packs(objects, to)
}

// checkObjectsInfo refuses objects that are borrowed from elsewhere: what an agent
// wrote there in an earlier run would give it another repository's history.
func checkObjectsInfo(objects gitFolder) error {
	b, err := objects.readAny("info/alternates", maxGitFile)
	if err != nil {
		return err
	}
	if strings.Trim(string(b), " \t\r\n") != "" {
		return gitRefuse(gitAlternates, "objects/info/alternates", "objects are borrowed from another repository")
	}
	return nil
}

func (s *gitSnapshot) loose(objects gitFolder, dir, to string) error {
	from, err := objects.folder(dir)
	if isAbsent(err) {
		return nil // the last object was packed
	}
	if err != nil {
		return err
	}
	defer from.close()
	names, err := from.names(s.MaxFiles)
	if err != nil {
		return err
	}
	if err := gitMkdir(to + "/" + dir); err != nil {
		return err
	}
	dest, err := openGitFolder(to + "/" + dir)
	if err != nil {
		return err
	}
	defer dest.close()
	for _, name := range names {
		if !isLowerHex(name, 38) {
			continue
		}
		if err := s.one(from, dest, name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// maxPackListings is how often a pack folder is listed again because git replaced
// packs meanwhile.
const maxPackListings = 5

func (s *gitSnapshot) packs(objects gitFolder, to string) error {
	from, err := objects.folder("pack")
	if isAbsent(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer from.close()
	dest, err := openGitFolder(to + "/pack")
	if err != nil {
		return err
	}
	defer dest.close()
	for range maxPackListings {
		err = s.packsOnce(from, dest)
		if !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return err
}

func (s *gitSnapshot) packsOnce(from, dest gitFolder) error {
	names, err := from.names(s.MaxFiles)
	if err != nil {
		return err
	}
	have := map[string]bool{}
	for _, name := range names {
		have[name] = true
	}
	for _, name := range names {
		base, ok := strings.CutSuffix(name, ".pack")
		id, named := strings.CutPrefix(base, "pack-")
		switch {
		case strings.HasSuffix(name, ".promisor"):
			return gitRefuse(gitPartial, "objects/pack/"+name, "objects are missing on purpose")
		case !ok || !named || !isLowerHex(id, 40), !s.NoIndex && !have[base+".idx"]:
			continue // git reads a pack only beside its index
		}
		if err := s.one(from, dest, name); err != nil {
			return err
		}
		if s.NoIndex {
			continue
		}
		if err := s.one(from, dest, base+".idx"); err != nil {
			return err
		}
	}
	return nil
}

// one takes one file, which may be there from an earlier listing.
func (s *gitSnapshot) one(from, dest gitFolder, name string) error {
	if s.files++; s.files > s.MaxFiles {
		return gitRefuse(gitTooLarge, "objects", fmt.Sprintf("more than %d files", s.MaxFiles))
	}
	if s.Link {
		done, err := linkGitFile(from, dest, name)
		if done || err != nil {
			return err
		}
	}
	n, err := copyGitFile(from, dest, name, s.MaxBytes-s.bytes)
	s.bytes += n
	return err
}

// linkGitFile is false where the kernel allows no link: another file system, a file
// of someone else's (fs.protected_hardlinks), or one with too many links. linkat(2)
// does not follow a link in name's place, but links it: what came is looked at.
func linkGitFile(from, dest gitFolder, name string) (bool, error) {
	err := unix.Linkat(from.fd(), name, dest.fd(), name, 0)
	switch {
	case errors.Is(err, unix.EXDEV), errors.Is(err, unix.EPERM), errors.Is(err, unix.EMLINK), errors.Is(err, unix.EACCES), errors.Is(err, unix.EOPNOTSUPP):
		return false, nil
	case err != nil && !errors.Is(err, unix.EEXIST):
		return false, &os.PathError{Op: "link", Path: name, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstatat(dest.fd(), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return false, &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		return true, nil
	}
	_ = unix.Unlinkat(dest.fd(), name, 0)
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return false, gitRefuse(gitLink, name, "an object is a link")
	}
	return false, gitRefuse(gitMalformed, name, "an object is not a regular file")
}

func copyGitFile(from, dest gitFolder, name string, limit int64) (int64, error) {
	src, st, err := from.file(name)
	if err != nil {
		return 0, err
	}
	defer src.Close()
	if st.Size > limit {
		return 0, gitRefuse(gitTooLarge, "objects", "more bytes than are taken")
	}
	fd, err := unix.Openat(dest.fd(), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o444)
	if errors.Is(err, unix.EEXIST) {
		return 0, nil
	}
	if err != nil {
		return 0, &os.PathError{Op: "create", Path: name, Err: err}
	}
	dst := os.NewFile(uintptr(fd), name)
	n, err := io.Copy(dst, io.LimitReader(src, st.Size)) // a file that grows is cut
	return n, errors.Join(err, dst.Close())
}

// gitMkdir makes folders that are not there yet, in a folder of agentshim's own.
func gitMkdir(dirs ...string) error {
	for _, dir := range dirs {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}
