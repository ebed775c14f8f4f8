package shim

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// resolveInside keeps a lookup below its starting folder: openat2(2), Linux 5.6. A
// mount point on the way is EXDEV, a link ELOOP.
const resolveInside = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// openBeneath opens p below dir. A rename beside it can make the kernel answer EAGAIN
// or EXDEV, too, so these are asked again; an EXDEV that stays is a mount.
func openBeneath(dir int, p string, flags uint64) (fd int, err error) {
	for range 16 {
		fd, err = unix.Openat2(dir, p, &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: resolveInside})
		if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EXDEV) {
			return fd, err
		}
	}
	return fd, err
}

// openFolder opens the folder p below root; "" is root itself, opened anew so that
// it has an offset of its own.
func openFolder(root int, p string, access uint64) (int, error) {
	if p == "" {
		p = "."
	}
	return openBeneath(root, p, access|unix.O_DIRECTORY|unix.O_NOFOLLOW)
}

// parentOf is the folder of a path relative to a root, "" for the root.
func parentOf(p string) string {
	if i := strings.LastIndexByte(p, '/'); i >= 0 {
		return p[:i]
	}
	return ""
}

// dirent is one name of a folder; kind is one of DT_…, which is no promise.
type dirent struct {
	name string
	kind uint8
}

// readNames lists an open folder; ErrTreeEntries when there are more than limit.
// os.File.ReadDir is not used: where the file system gives no type it looks at the
// name by its path, and drops it when that fails.
func readNames(dir, limit int) ([]dirent, error) {
	names := []dirent{}
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.Getdents(dir, buf)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, err
		case n == 0:
			// A folder that changes meanwhile may list a name twice: readdir(3p).
			slices.SortFunc(names, func(a, b dirent) int { return strings.Compare(a.name, b.name) })
			return slices.CompactFunc(names, func(a, b dirent) bool { return a.name == b.name }), nil
		}
		for b := buf[:n]; len(b) > 19; {
			// struct linux_dirent64: ino 8, off 8, reclen 2, type 1, name.
			size := int(binary.NativeEndian.Uint16(b[16:]))
			name := b[19:size]
			if end := bytes.IndexByte(name, 0); end >= 0 {
				name = name[:end]
			}
			if s := string(name); s != "." && s != ".." {
				names = append(names, dirent{s, b[18]})
			}
			b = b[size:]
		}
		if len(names) > limit {
			return nil, ErrTreeEntries
		}
	}
}

func emptyFolder(fd int) (bool, error) {
	dir, err := openFolder(fd, "", unix.O_RDONLY)
	if err != nil {
		return false, os.NewSyscallError("openat2", err)
	}
	defer unix.Close(dir)
	names, err := readNames(dir, 1<<16)
	return len(names) == 0, os.NewSyscallError("getdents", err)
}

// readLink gives the text of the link that fd (O_PATH) stands for.
func readLink(fd int) (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", buf)
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// futimens is utimensat(2) with a null path: the descriptor itself.
func futimens(fd int, ts []unix.Timespec) error {
	return unix.UtimesNanoAt(fd, "", ts, unix.AT_EMPTY_PATH)
}

func giveOwner(fd int, o *FileOwner) error {
	if o == nil {
		return nil
	}
	return chownAt(fd, "", o)
}

func chownAt(dir int, name string, o *FileOwner) error {
	if o == nil {
		return nil
	}
	return os.NewSyscallError("fchownat", unix.Fchownat(dir, name, int(o.UID), int(o.GID), unix.AT_SYMLINK_NOFOLLOW|unix.AT_EMPTY_PATH))
}

// mayRead says whether o may read a file, or list and enter a folder, by the
// permission bits alone; nil leaves it to the kernel at open. Access lists and
// supplementary groups are not looked at.
func mayRead(st *unix.Stat_t, o *FileOwner) bool {
	if o == nil || o.UID == 0 {
		return true
	}
	need := uint32(4)
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		need = 5
	}
	switch {
	case st.Uid == o.UID:
		return st.Mode>>6&need == need
	case st.Gid == o.GID:
		return st.Mode>>3&need == need
	}
	return st.Mode&need == need
}

// dataSize is how much of a file is not holes.
func dataSize(st *unix.Stat_t) int64 { return min(st.Size, st.Blocks*512) + inlineSize(st) }

// inlineSize: small files may be kept beside the inode, without blocks.
func inlineSize(st *unix.Stat_t) int64 {
	if st.Blocks == 0 && st.Size < 4096 {
		return st.Size
	}
	return 0
}

// stampGrain is coarser than the tick that file times are taken from (10 ms at
// HZ=100).
const stampGrain = 20 * time.Millisecond

// settle waits until whatever changes the file afterwards gives it another change
// time than the one that was just read.
func settle(changed FileTime) {
	if age := time.Since(time.Unix(changed.Sec, int64(changed.Nsec))); age >= 0 && age < stampGrain {
		time.Sleep(stampGrain - age)
	}
}

// unchanged is ErrTreeChanged when the open file is not as it was at st.
func unchanged(fd int, st *unix.Stat_t) error {
	var now unix.Stat_t
	if err := unix.Fstat(fd, &now); err != nil {
		return err
	}
	if stampOf(&now) != stampOf(st) || now.Size != st.Size || now.Mode != st.Mode {
		return ErrTreeChanged
	}
	return nil
}

// treeBudget counts against TreeLimits for several goroutines.
type treeBudget struct {
	limits  TreeLimits
	entries atomic.Int64
	bytes   atomic.Int64
}

func (b *treeBudget) take(entries int, bytes int64) error {
	if b.entries.Add(int64(entries)) > int64(b.limits.Entries) {
		return ErrTreeEntries
	}
	if b.bytes.Add(bytes) > b.limits.Bytes {
		return ErrTreeBytes
	}
	return nil
}

func (b *treeBudget) give(bytes int64) { b.bytes.Add(-bytes) }

func (b *treeBudget) entriesLeft() int { return b.limits.Entries - int(b.entries.Load()) }
