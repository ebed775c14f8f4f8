package harness

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// Places in the container that are agentshim's.
const (
	// HomeDir is the agent's private home.
	HomeDir = "/home/agent"
	// InitPath is where agentshim-init is mounted.
	InitPath = "/.agentshim-init"
	// GitPath holds what git needs beside the workspace's .git.
	GitPath = "/.agentshim-git"
)

// closedTargets take no mount, nor does anything below or above them: kernel
// file systems, and files agentshim puts there itself.
var closedTargets = []string{
	"/proc", "/sys", "/dev", "/run", "/var/run", InitPath, GitPath,
	"/etc/passwd", "/etc/group", "/etc/hosts", "/etc/resolv.conf", "/etc/hostname",
}

// tmpfsTargets take no mount themselves, nor does anything above them; below
// them is fine.
var tmpfsTargets = []string{HomeDir, "/tmp"}

// HasWorkspace says whether the agent gets a workspace.
func (h Harness) HasWorkspace() bool { return h.Workspace != nil && h.Workspace.Mode != "none" }

// ContainerPath is the absolute, clean path of a target as the file writes it:
// absolute, ~/… in the agent's home, or relative to the workspace. It is "" for
// a relative one without a workspace. It does not say that the target is allowed.
func (h Harness) ContainerPath(target string) string {
	if rest, home := strings.CutPrefix(target, "~/"); home {
		return path.Join(HomeDir, rest)
	}
	if path.IsAbs(target) {
		return path.Clean(target)
	}
	if target == "" || !h.HasWorkspace() || !anchored(h.Workspace.Target) {
		return ""
	}
	return path.Join(h.ContainerPath(h.Workspace.Target), target)
}

// anchored says that a target needs no workspace to be a path.
func anchored(target string) bool { return path.IsAbs(target) || strings.HasPrefix(target, "~/") }

// within says whether name is dir or lies below it; both are absolute and clean.
func within(name, dir string) bool {
	return name == dir || dir == "/" || strings.HasPrefix(name, dir+"/")
}

// blocked names the place that forbids a mount on target; "" if none does.
func blocked(target string) string {
	for _, closed := range closedTargets {
		if within(target, closed) || within(closed, target) {
			return closed
		}
	}
	for _, own := range tmpfsTargets {
		if within(own, target) {
			return own
		}
	}
	return ""
}

const (
	// maxTarget leaves room for what an engine puts before a container's path, of the
	// 4,096 bytes that the kernel takes: path_resolution(7).
	maxTarget = 3072
	// maxName is NAME_MAX.
	maxName = 255
)

// pathFault is what is wrong with a container path by its text alone; "" if nothing.
func pathFault(p string) string {
	switch {
	case strings.ContainsFunc(p, isControl):
		return "must not hold control characters"
	case strings.Contains(p, "${"):
		return `must not hold "${": variables are not expanded`
	case slices.Contains(strings.Split(p, "/"), ".."):
		return `must not hold ".."`
	case strings.HasPrefix(p, "~") && !strings.HasPrefix(p, "~/"):
		return `"~" is understood only as "~/"`
	case len(p) > maxTarget:
		return fmt.Sprintf("must be at most %d bytes", maxTarget)
	case slices.ContainsFunc(strings.Split(p, "/"), func(name string) bool { return len(name) > maxName }):
		return fmt.Sprintf("must not hold a name of more than %d bytes", maxName)
	default:
		return ""
	}
}

// isControl matches C0 controls and DEL: they end arguments (NUL), lines of
// /etc files and records of mountinfo.
func isControl(r rune) bool { return r < 0x20 || r == 0x7f }

// cleanTarget keeps a target's form (absolute, ~/, relative) and cleans the rest.
func cleanTarget(target string) string {
	if rest, home := strings.CutPrefix(target, "~/"); home {
		return "~/" + path.Clean("/" + rest)[1:]
	}
	return path.Clean(target)
}
