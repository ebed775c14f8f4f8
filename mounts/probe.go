package mounts

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentshim/agentshim/harness"
	"golang.org/x/sys/unix"
)

// ProbePaths says what Probe looks at. Empty paths mean the host's own.
type ProbePaths struct {
	// Home is the caller's home folder: "~/" in sources, and never mounted itself.
	Home string
	// Protected folders are passed on in Facts, links resolved.
	Protected []string
	// KnownSockets are sockets that the caller's environment names
	// (SSH_AUTH_SOCK, DOCKER_HOST, the session bus, …).
	KnownSockets []string
	// UID, GID and Groups are the caller's, for Source.GroupOnly.
	UID, GID uint32
	Groups   []uint32
	// Proc is /proc, Passwd /etc/passwd, SELinux /sys/fs/selinux/enforce.
	Proc, Passwd, SELinux string
}

func (p ProbePaths) withDefaults() ProbePaths {
	p.Proc = cmpOr(p.Proc, "/proc")
	p.Passwd = cmpOr(p.Passwd, "/etc/passwd")
	p.SELinux = cmpOr(p.SELinux, "/sys/fs/selinux/enforce")
	return p
}

func cmpOr(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// Probe reads the host's side of h's workspace and mounts. It writes and creates
// nothing, opens no source for reading and walks no tree. Unusable sources are
// reported all at once, each a *Problem that is ErrSource; any other error says
// that the host itself could not be read. With an error the Facts are empty.
//
// Sockets are those of the caller's network namespace, found under the path they
// were bound to; one that was renamed since, or that a process in another network
// namespace listens on, is found only by a well-known name. What appears after
// Probe is not seen.
func Probe(h harness.Harness, p ProbePaths) (Facts, error) {
	p = p.withDefaults()
	f := Facts{Home: p.Home, UID: p.UID, Sources: map[string]Source{}, Nested: map[string]string{}, SystemLinks: map[string]string{}}
	var err error
	if f.SELinux, err = enforcing(p.SELinux); err != nil {
		return Facts{}, err
	}
	if f.Protected, err = resolveAll(p.Protected); err != nil {
		return Facts{}, err
	}
	all := binds(h, p.Home)
	if len(all) == 0 {
		return f, nil
	}
	if f.HomeRoots, err = homeRoots(p.Passwd, p.Home); err != nil {
		return Facts{}, err
	}
	for _, dir := range slices.Concat(refusedExact, refusedBelow) {
		if real, err := filepath.EvalSymlinks(dir); err == nil && real != dir {
			f.SystemLinks[dir] = real
		}
	}
	live, err := readHost(p)
	if err != nil {
		return Facts{}, err
	}
	if err := probeSources(&f, all, live, p); err != nil {
		return Facts{}, err
	}
	if err := probeLinks(f, h, all); err != nil {
		return Facts{}, err
	}
	if err := probeNested(&f, targets(h, p.Home)); err != nil {
		return Facts{}, err
	}
	return f, nil
}

func probeSources(f *Facts, all []bind, live *host, p ProbePaths) error {
	var ps problems
	for _, b := range all {
		if b.sourceErr != nil {
			ps.add(&Problem{
				Path: b.json + ".source", Value: b.source, Kind: ErrSource,
				Reason: b.sourceErr.Error(), Remedy: `write an absolute path, "~/…" or "./…"`,
			})
			continue
		}
		s, problem := inspect(b, p)
		if problem != nil {
			ps.add(problem)
			continue
		}
		if s.Dir {
			s.Submounts = live.submounts(s.Path)
			s.Sockets = live.socketsBelow(s.Path)
		}
		f.Sources[b.key] = s
	}
	return ps.join()
}

// ProbeFolder reads one more folder, a real path, as Probe reads the file's sources.
func ProbeFolder(dir string, p ProbePaths) (Source, error) {
	p = p.withDefaults()
	s, problem := inspect(bind{json: "$.workspace", source: dir, key: dir}, p)
	if problem != nil {
		return Source{}, problem
	}
	live, err := readHost(p)
	if err != nil {
		return Source{}, err
	}
	s.Submounts, s.Sockets = live.submounts(s.Path), live.socketsBelow(s.Path)
	return s, nil
}

// inspect opens the source without reading it (O_PATH follows links, triggers no
// FIFO, needs no permission on the file itself), so that path, inode and flags
// are of one and the same file.
func inspect(b bind, p ProbePaths) (Source, *Problem) {
	fd, err := unix.Open(b.key, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return Source{}, openProblem(b, err)
	}
	defer unix.Close(fd)
	unusable := func(reason, remedy string, err error) *Problem {
		return &Problem{Path: b.json + ".source", Value: b.key, Reason: reason, Remedy: remedy, Kind: ErrSource, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return Source{}, unusable("fstat", "", err)
	}
	if kind := unmountable(st.Mode); kind != "" {
		return Source{}, unusable("it is a "+kind, "only folders and regular files can be mounted", nil)
	}
	// proc(5): the link's text is the file's path now, in this mount namespace.
	real, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return Source{}, unusable("its real path can't be read", "", err)
	}
	var again unix.Stat_t
	if err := unix.Lstat(real, &again); err != nil || again.Dev != st.Dev || again.Ino != st.Ino {
		return Source{}, unusable(fmt.Sprintf("its real path %q is not this file", real), "it was moved or removed meanwhile: try again", err)
	}
	var sf unix.Statfs_t
	if err := unix.Fstatfs(fd, &sf); err != nil {
		return Source{}, unusable("fstatfs", "", err)
	}
	return Source{
		Path: real, Dir: st.Mode&unix.S_IFMT == unix.S_IFDIR,
		Dev: st.Dev, Ino: st.Ino, UID: st.Uid, GID: st.Gid, Mode: st.Mode &^ unix.S_IFMT,
		NoExec:    sf.Flags&unix.ST_NOEXEC != 0,
		Label:     selinuxLabel(fd),
		GroupOnly: groupOnly(&st, p.UID, p.GID, p.Groups),
	}, nil
}

// selinuxLabel reads the label of an open file; empty where it has none or it can't
// be read. The magic link is for a descriptor opened with O_PATH: fgetxattr(2) takes none.
func selinuxLabel(fd int) string {
	buf := make([]byte, 256)
	n, err := unix.Getxattr("/proc/self/fd/"+strconv.Itoa(fd), "security.selinux", buf)
	if err != nil {
		return ""
	}
	return strings.TrimRight(string(buf[:n]), "\x00")
}

func openProblem(b bind, err error) *Problem {
	p := &Problem{Path: b.json + ".source", Value: b.key, Kind: ErrSource, Err: err}
	switch {
	case errors.Is(err, unix.ENOENT):
		p.Reason, p.Remedy = "it does not exist", "create it or correct the path; nothing was created"
		if link, lerr := os.Readlink(b.key); lerr == nil {
			p.Reason = fmt.Sprintf("it is a link to %q, which does not exist", link)
		}
	case errors.Is(err, unix.EACCES):
		p.Reason, p.Remedy = "it can't be reached", "a folder on the way to it denies you search permission"
	case errors.Is(err, unix.ELOOP):
		p.Reason, p.Remedy = "its links go round in a circle", "name the folder itself"
	default:
		p.Reason = "it can't be opened"
	}
	return p
}

// unmountable names a kind of file that is never mounted, or "".
func unmountable(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR, unix.S_IFREG:
		return ""
	case unix.S_IFSOCK:
		return "socket"
	case unix.S_IFIFO:
		return "FIFO"
	case unix.S_IFCHR:
		return "character device"
	case unix.S_IFBLK:
		return "block device"
	}
	return "special file"
}

// groupOnly says that only a supplementary group lets the caller read the file
// (and enter it, if a folder). Access lists are not looked at.
func groupOnly(st *unix.Stat_t, uid, gid uint32, groups []uint32) bool {
	need := uint32(4)
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		need = 5
	}
	switch {
	case uid == 0, st.Uid == uid, st.Gid == gid:
		return false
	case st.Mode&need == need:
		return false
	}
	return slices.Contains(groups, st.Gid) && st.Mode>>3&need == need
}

func probeNested(f *Facts, all []bind) error {
	for _, b := range all {
		if b.targetErr != nil {
			continue
		}
		parent := enclosing(b, all)
		if parent == nil || parent.why == WhyCache {
			continue
		}
		src := f.Sources[parent.key]
		kind, err := node(src.Path, strings.TrimPrefix(b.target, parent.target))
		if err != nil {
			return err
		}
		if kind != "" {
			f.Nested[nestedPath(src.Path, parent, b)] = kind
		}
	}
	return nil
}

// node says what stands at rel below dir without following a link on the way;
// "" when nothing does.
func node(dir, rel string) (string, error) {
	p, kind := dir, NodeDir
	for part := range strings.SplitSeq(strings.Trim(rel, "/"), "/") {
		if kind != NodeDir {
			return NodeOther, nil
		}
		p = filepath.Join(p, part)
		fi, err := os.Lstat(p)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
			return "", nil
		case err != nil:
			return "", fmt.Errorf("look at nested target: %w", err)
		case fi.IsDir():
			kind = NodeDir
		case fi.Mode().IsRegular():
			kind = NodeFile
		default:
			kind = NodeOther
		}
	}
	return kind, nil
}

func enforcing(file string) (bool, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read SELinux state: %w", err)
	}
	return strings.TrimSpace(string(b)) == "1", nil
}

// resolveAll gives each folder cleaned and with its links resolved, as far as it
// exists; sorted, each once.
func resolveAll(dirs []string) ([]string, error) {
	var out []string
	for _, d := range dirs {
		if !filepath.IsAbs(d) {
			return nil, fmt.Errorf("protected folder %q is not absolute", d)
		}
		out = append(out, filepath.Clean(d), resolveExisting(filepath.Clean(d)))
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// resolveExisting resolves the links of the part of p that exists.
func resolveExisting(p string) string {
	real, err := filepath.EvalSymlinks(p)
	switch {
	case err == nil:
		return real
	case p == "/":
		return p
	}
	return filepath.Join(resolveExisting(filepath.Dir(p)), filepath.Base(p))
}

// homeRoots lists the home folders named by the passwd file, and the caller's,
// links resolved, sorted. Left out is what is no folder, "/", and what lies in the
// system's own trees, where service accounts have theirs.
func homeRoots(passwd, caller string) ([]string, error) {
	b, err := os.ReadFile(passwd)
	if err != nil {
		return nil, fmt.Errorf("read home folders: %w", err)
	}
	homes := []string{caller}
	for line := range bytes.Lines(b) {
		if fields := strings.Split(strings.TrimSuffix(string(line), "\n"), ":"); len(fields) == 7 {
			homes = append(homes, fields[5])
		}
	}
	var out []string
	for _, home := range homes {
		if !filepath.IsAbs(home) {
			continue
		}
		real, err := filepath.EvalSymlinks(home)
		if errors.Is(err, fs.ErrPermission) {
			real, err = filepath.Clean(home), nil
		}
		if err != nil || real == "/" || isSystemTree(real) {
			continue
		}
		if fi, err := os.Lstat(real); err == nil && !fi.IsDir() {
			continue
		}
		out = append(out, real)
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

func isSystemTree(p string) bool {
	return slices.ContainsFunc(systemTrees, func(dir string) bool { return atOrBelow(p, dir) })
}
