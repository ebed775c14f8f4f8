package mounts

import (
	"slices"
	"strings"

	"github.com/agentshim/agentshim/harness"
)

// unlabelled trees, and what starts with a dot in a home, may not be given an
// SELinux label: it would stay after the run and lock the host's own services and
// logins out.
var unlabelled = []string{"/bin", "/sbin", "/lib", "/lib64", "/usr", "/etc", "/boot", "/var/lib", "/var/log", "/var/spool"}

// labelProblems refuses labels where nothing may be relabelled. It judges them also
// where the engine would not act on them, so that a file is refused on every host or
// on none.
func labelProblems(h harness.Harness, asked []bind, f Facts, t Target) problems {
	var ps problems
	writable := AgentFolders(h, f)
	for _, b := range asked {
		s, known := f.Sources[b.key]
		if b.label == "" || !known {
			continue
		}
		at := b.json + ".label"
		if b.label != "z" && b.label != "Z" {
			ps.add(refuse(at, b.label, "it is no label", "use none, z or Z"))
		} else if reason := unlabellable(s, asked, writable, f, t); reason != "" {
			ps.add(refuse(at, b.label, reason, "use none, or mount a copy of what the agent needs"))
		} else if t.SELinux && !t.Podman {
			ps.add(refuse(at, b.label, "Docker's --mount can't relabel", "use none, and "+relabelByHand))
		}
	}
	return ps
}

// unlabellable says why the engine may not relabel everything in s, or "".
func unlabellable(s Source, asked []bind, writable []string, f Facts, t Target) string {
	inside := func(dirs []string) bool {
		return slices.ContainsFunc(dirs, func(dir string) bool { return atOrBelow(s.Path, dir) || atOrBelow(s.Path, resolved(dir, f)) })
	}
	switch {
	case inside(unlabelled), slices.ContainsFunc(f.HomeRoots, func(home string) bool { return strings.HasPrefix(s.Path, home+"/.") }):
		return "relabelling " + quote(s.Path) + " would outlast the run and break the host"
	case s.UID != f.UID && (f.UID != 0 || s.UID != t.UID):
		return quote(s.Path) + " is not yours to relabel"
	case slices.ContainsFunc(asked, func(b bind) bool { return b.why == WhyWorkspace && below(f.Sources[b.key].Path, s.Path) }):
		return quote(s.Path) + " holds the workspace and more, which would all be relabelled"
	case slices.ContainsFunc(writable, func(dir string) bool { return below(s.Path, dir) }):
		// The engine looks the path up once more, before anything can be compared.
		return "an agent may put a link in the place of " + quote(s.Path) + ", and what that leads to would be relabelled"
	}
	return ""
}

// resolved is a system folder's real path.
func resolved(dir string, f Facts) string {
	if real, linked := f.SystemLinks[dir]; linked {
		return real
	}
	return dir
}

// labelled says that containers may use s as it is: its type is one of
// container-selinux's for them, and it belongs to no single one.
func labelled(s Source) bool {
	part := strings.SplitN(s.Label, ":", 4)
	return len(part) == 4 && part[3] == "s0" && slices.Contains([]string{"container_file_t", "container_ro_file_t", "svirt_sandbox_file_t"}, part[2])
}

// relabelByHand names no path: it would have to be quoted for a shell.
const relabelByHand = "if it is for containers only, label it once yourself: chcon -R -t container_file_t -l s0 FOLDER"

// labelWarning is what SELinux has to do with b's source here, or "".
func labelWarning(b bind, s Source, f Facts, t Target) string {
	switch {
	case b.label != "" && !t.SELinux:
		return "label " + b.label + " has no effect here: the engine does not use SELinux"
	case b.label != "" || b.copy || !f.SELinux || !t.SELinux || labelled(s):
		return ""
	case t.Podman && b.why == WhyMount:
		return `SELinux is enforced here and will keep the agent from it: add "label": "z" to it, or ` + relabelByHand
	}
	return "SELinux is enforced here and will keep the agent from it: " + relabelByHand
}
