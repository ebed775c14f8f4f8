package mounts

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
)

// ErrExchanged says that a folder is no longer the one that was looked at before.
var ErrExchanged = errors.New("it was exchanged meanwhile")

// ProbeWorkspaceGuards looks at the guarded paths of h's workspace, for Facts.Guards;
// f.Own must stand. They are nil where there is no folder to look into, or where a
// path is one that Compile refuses.
func ProbeWorkspaceGuards(h harness.Harness, f Facts) (GuardFacts, error) {
	root, ok := Workspace(h, f)
	if !ok || !root.Dir {
		return nil, nil
	}
	paths, err := GuardPaths(*h.Workspace, root.Path, f.Own)
	if err != nil {
		return nil, nil //nolint:nilerr // Compile says it, with everything else
	}
	return ProbeGuards(root, paths)
}

// ProbeGuards looks at each path below the workspace root and at the folders above it.
// It follows no link below root, opens nothing for reading, and does at most one look
// per part of a path. That root is still the folder Probe saw is checked: a *Problem
// that is ErrSource otherwise. What changes afterwards is not seen.
func ProbeGuards(root Source, paths []GuardPath) (GuardFacts, error) {
	fd, err := OpenRoot(root)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	facts := GuardFacts{}
	for _, g := range paths {
		if err := probeGuard(fd, g.Rel, facts); err != nil {
			return nil, &Problem{Path: g.at(), Value: g.Rel, Reason: "it can't be looked at", Kind: ErrSource, Err: err}
		}
	}
	return facts, nil
}

// OpenRoot opens the workspace's folder as a place to look from (O_PATH), following no
// link at all. The caller closes it. A folder that isn't the one Probe saw is a
// *Problem that is ErrSource and ErrExchanged.
func OpenRoot(root Source) (int, error) {
	problem := func(err error) error {
		return &Problem{Path: "$.workspace.source", Value: root.Path, Reason: "it can't be looked into", Kind: ErrSource, Err: err}
	}
	fd, err := unix.Openat2(unix.AT_FDCWD, root.Path, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return -1, problem(fmt.Errorf("%w: %w", ErrExchanged, err))
	}
	if err != nil {
		return -1, problem(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return -1, problem(err)
	}
	if st.Dev != root.Dev || st.Ino != root.Ino {
		unix.Close(fd)
		return -1, problem(ErrExchanged)
	}
	return fd, nil
}

// probeGuard goes down part by part, from descriptor to descriptor, so that a folder
// exchanged for a link on the way leads nowhere.
func probeGuard(root int, rel string, facts GuardFacts) error {
	at := root
	defer func() {
		if at != root {
			unix.Close(at)
		}
	}()
	end := 0
	for part := range strings.SplitSeq(rel, "/") {
		end += len(part)
		prefix := rel[:end]
		end++
		fd, err := unix.Openat(at, part, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		switch {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENAMETOOLONG):
			return remember(facts, prefix, GuardNode{})
		case errors.Is(err, unix.EACCES):
			// The parent's: the agent may own it and have taken its own permission away.
			return remember(facts, prefix, GuardNode{Kind: NodeUnknown})
		case err != nil:
			return err
		}
		if at != root {
			unix.Close(at)
		}
		at = fd
		n, err := lookAt(fd)
		if err != nil {
			return err
		}
		if err := remember(facts, prefix, n); err != nil || n.Kind != NodeDir {
			return err
		}
	}
	return nil
}

// remember keeps the first look at a path, and refuses a second one that saw another file.
func remember(facts GuardFacts, rel string, n GuardNode) error {
	if old, seen := facts[rel]; seen && (old.Kind != n.Kind || old.Dev != n.Dev || old.Ino != n.Ino) {
		return fmt.Errorf("%q: %w", rel, ErrExchanged)
	} else if !seen && n.Kind != "" {
		facts[rel] = n
	}
	return nil
}

// lookAt describes the file behind an O_PATH descriptor.
func lookAt(fd int) (GuardNode, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return GuardNode{}, err
	}
	n := GuardNode{Kind: NodeOther, Dev: st.Dev, Ino: st.Ino, Links: uint64(st.Nlink), Changed: st.Ctim.Nano()}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		n.Kind, n.Links = NodeDir, 0 // a folder's count is of its subfolders
	case unix.S_IFREG:
		n.Kind = NodeFile
	case unix.S_IFLNK:
		n.Kind = NodeLink
	}
	var stx unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BTIME, &stx); err == nil && stx.Mask&unix.STATX_BTIME != 0 {
		n.Born = stx.Btime.Sec*1e9 + int64(stx.Btime.Nsec)
	}
	return n, nil
}
