package shim

import (
	"errors"
	"path"

	"golang.org/x/sys/unix"
)

// Bounds of the search for the git dirs of submodules.
const (
	maxModules       = 50
	maxModuleDepth   = 16
	maxModuleEntries = 4096
)

// findModules gives the git dirs below the folder modules of root, by their paths
// relative to root. A submodule's name may have slashes, and its git dir has those of
// its own submodules below modules. Links are not followed; too many are refused.
func findModules(root, modules string) ([]string, error) {
	top, err := openGitFolder(root)
	if err != nil {
		return nil, err
	}
	defer top.close()
	s := moduleSearch{top: top}
	err = s.folder(modules, 0)
	return s.found, err
}

type moduleSearch struct {
	top   gitFolder
	found []string
}

func (s *moduleSearch) folder(dir string, depth int) error {
	f, err := s.top.folder(dir)
	if isAbsent(err) || errors.Is(err, gitLink) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.close()
	names, err := f.names(maxModuleEntries)
	if err != nil {
		return err
	}
	for _, name := range names {
		var st unix.Stat_t
		if unix.Fstatat(f.fd(), name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		at := path.Join(dir, name)
		if unix.Fstatat(f.fd(), name+"/HEAD", &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
			s.found = append(s.found, at)
			at = path.Join(at, "modules")
		}
		if depth > maxModuleDepth || len(s.found) > maxModules {
			return gitRefuse(gitTooLarge, "modules", "too many submodules to guard")
		}
		if err := s.folder(at, depth+1); err != nil {
			return err
		}
	}
	return nil
}
