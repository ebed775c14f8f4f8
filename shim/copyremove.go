package shim

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// removeTree removes the folder name in the folder dir and all below it, if it is there.
// Files of a subordinate uid, which an agent with CAP_CHOWN can make, may be out of
// the caller's reach.
func removeTree(dir, name string) error {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = removeFolder(fd, name)
		unix.Close(fd)
	}
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	p := filepath.Join(dir, name)
	return &Error{
		Reason: ReasonState, Msg: fmt.Sprintf("remove %q", p), Err: err,
		Hint: "remove it by hand; with rootless Podman: podman unshare rm -rf " + p,
	}
}

// maxRemoveDepth bounds the descriptors that are open at a time.
const maxRemoveDepth = 64

// removeFolder removes a folder and all below it, whatever its depth and permissions. It
// follows no link and enters no other file system.
func removeFolder(dir int, name string) error {
	top, err := openOwnFolder(dir, name)
	if err != nil {
		return err
	}
	defer unix.Close(top)
	r := treeRemoval{top: top, prefix: ".agentshim-" + newRunID() + "-"}
	for again := true; again; again = r.moved {
		if err := r.round(); err != nil {
			return err
		}
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
}

// openOwnFolder opens a folder for listing and gives its owner all permissions first. A
// folder that can't be read can be opened as a path.
func openOwnFolder(dir int, name string) (int, error) {
	at, err := openFolder(dir, name, unix.O_PATH)
	if err != nil {
		return -1, err
	}
	defer unix.Close(at)
	// Not the caller's own folder: it may be readable all the same.
	_ = chmodOpen(at, 0o700)
	return openFolder(at, "", unix.O_RDONLY)
}

// chmodOpen is fchmod(2), which refuses O_PATH with EBADF: the link in /proc leads to the
// file itself.
func chmodOpen(fd int, mode uint32) error {
	return unix.Chmod("/proc/self/fd/"+strconv.Itoa(fd), mode)
}

// treeRemoval is one removeFolder. What lies too deep is moved up and removed in
// another round.
type treeRemoval struct {
	top    int
	prefix string
	count  int
	moved  bool
}

// round lists the folder from its start.
func (r *treeRemoval) round() error {
	r.moved = false
	fd, err := openFolder(r.top, "", unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return r.empty(fd, 0)
}

func (r *treeRemoval) empty(fd, depth int) error {
	names, err := readNames(fd, 1<<30)
	if err != nil {
		return err
	}
	for _, d := range names {
		err := unix.Unlinkat(fd, d.name, 0)
		if errors.Is(err, unix.EISDIR) {
			err = r.folder(fd, d.name, depth)
		}
		if err != nil {
			return fmt.Errorf("remove %s: %w", briefName(d.name), err)
		}
	}
	return nil
}

func (r *treeRemoval) folder(dir int, name string, depth int) error {
	fd, err := openOwnFolder(dir, name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if depth == maxRemoveDepth {
		r.count, r.moved = r.count+1, true
		return unix.Renameat2(dir, name, r.top, r.prefix+strconv.Itoa(r.count), unix.RENAME_NOREPLACE)
	}
	if err := r.empty(fd, depth+1); err != nil {
		return err
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
}

// treeBytes is the disk space of what is below an open folder, as far as it can be read
// and lies no deeper than maxRemoveDepth.
func treeBytes(fd, depth int) int64 {
	names, err := readNames(fd, 1<<30)
	if err != nil {
		return 0
	}
	var sum int64
	for _, d := range names {
		var st unix.Stat_t
		if unix.Fstatat(fd, d.name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
			continue
		}
		sum += st.Blocks * 512
		if st.Mode&unix.S_IFMT != unix.S_IFDIR || depth == maxRemoveDepth {
			continue
		}
		if sub, err := openFolder(fd, d.name, unix.O_RDONLY); err == nil {
			sum += treeBytes(sub, depth+1)
			unix.Close(sub)
		}
	}
	return sum
}
