package mounts

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
)

// ErrAgentLink says that a path of the harness file leads through a link that an
// agent may have made.
var ErrAgentLink = errors.New("the way to it is a link that an agent may have made")

// maxLinks is the kernel's own bound: path_resolution(7).
const maxLinks = 40

// AgentFolders are the real paths of the host folders in which an agent may have
// made links: h's workspace, whatever its mode is now, and its writable mounts.
func AgentFolders(h harness.Harness, f Facts) []string {
	var dirs []string
	for _, b := range binds(h, f.Home) {
		if s, ok := f.Sources[b.key]; ok && (b.writable || b.why == WhyWorkspace) {
			dirs = append(dirs, s.Path)
		}
	}
	return dirs
}

// Resolve gives the real path of a host path, refusing with ErrAgentLink a link
// that lies below one of dirs, which are real paths. Links elsewhere are the
// user's own and are followed. What is swapped afterwards is not seen: open the
// result without following links.
func Resolve(p string, dirs []string) (string, error) {
	at, links := "/", 0
	for rest := strings.Split(p, "/"); len(rest) > 0; {
		name := rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		next := filepath.Join(at, name)
		var st unix.Stat_t
		if err := unix.Lstat(next, &st); err != nil {
			return "", &os.PathError{Op: "lstat", Path: next, Err: err}
		}
		if st.Mode&unix.S_IFMT != unix.S_IFLNK {
			at = next
			continue
		}
		if inAny(at, dirs) {
			return "", fmt.Errorf("%w: %q", ErrAgentLink, next)
		}
		target, err := os.Readlink(next)
		if err != nil {
			return "", err
		}
		if links++; links > maxLinks {
			return "", &os.PathError{Op: "open", Path: p, Err: unix.ELOOP}
		}
		rest = append(strings.Split(target, "/"), rest...)
		if filepath.IsAbs(target) {
			at = "/"
		}
	}
	return at, nil
}

func inAny(p string, dirs []string) bool {
	for _, dir := range dirs {
		if atOrBelow(p, dir) {
			return true
		}
	}
	return false
}

// probeLinks refuses sources whose way leads through a link an agent may have made.
// The way must also lead to what was looked at: a name that is a folder now may have
// been a link then.
func probeLinks(f Facts, h harness.Harness, all []bind) error {
	var ps problems
	dirs := AgentFolders(h, f)
	for _, b := range all {
		switch real, err := Resolve(b.key, dirs); {
		case errors.Is(err, ErrAgentLink):
			ps.add(&Problem{
				Path: b.json + ".source", Value: b.source, Kind: ErrRefused, Err: err, Reason: "it is not what it seems",
				Remedy: "name the folder or file itself, outside of what an agent can write",
			})
		case err != nil, real != f.Sources[b.key].Path:
			ps.add(&Problem{
				Path: b.json + ".source", Value: b.source, Kind: ErrSource, Err: err, Reason: "it was replaced while it was looked at",
				Remedy: "look for what replaces it, an agent in another run perhaps, and try again",
			})
		}
	}
	return ps.join()
}
