package mounts

import (
	"fmt"
	"path"
	"strings"

	"github.com/agentshim/agentshim/harness"
)

var (
	// refusedExact may not be mounted themselves; what lies below them may.
	refusedExact = []string{"/", "/boot", "/etc", "/home", "/root", "/usr", "/var", "/tmp"}
	// refusedBelow may not be mounted, nor anything below them.
	refusedBelow = []string{"/proc", "/sys", "/dev", "/run"}
	// systemTrees hold homes of service accounts that need no protection of their own.
	systemTrees = []string{"/bin", "/sbin", "/lib", "/lib64", "/usr", "/proc", "/sys", "/dev", "/run"}
	// kernelTargets may not be targets, nor anything below them.
	kernelTargets = []string{"/proc", "/sys", "/dev"}
	// reservedTargets are files and folders that agentshim or the engines mount or
	// make themselves.
	reservedTargets = []string{
		"/etc/hosts", "/etc/resolv.conf", "/etc/hostname", "/etc/passwd", "/etc/group",
		harness.InitPath, harness.GitPath, "/.dockerenv", "/run/.containerenv", "/run/secrets",
	}
	// volumeExact and volumeBelow are folders of the image that no VOLUME may hide.
	volumeExact = []string{"/", "/home", "/root", "/var"}
	volumeBelow = []string{
		"/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sbin", "/sys", "/usr",
	}
)

// maxListed bounds the paths named in one message.
const maxListed = 3

// sourceProblem says why b's source may not be mounted.
func sourceProblem(b bind, f Facts) *Problem {
	at := b.json + ".source"
	if b.sourceErr != nil {
		return &Problem{Path: at, Value: b.source, Reason: b.sourceErr.Error(), Remedy: `write an absolute path, "~/…" or "./…"`, Kind: ErrSource}
	}
	s, ok := f.Sources[b.key]
	if !ok {
		return &Problem{Path: at, Value: b.key, Reason: "nothing is known about it", Remedy: "it has to be probed first", Kind: ErrSource}
	}
	if reason := unportable(s.Path); reason != "" {
		return refuse(at, s.Path, "the engines can't take this path: "+reason, "rename it")
	}
	checks := []func(Source, Facts) (reason, remedy string){systemSource, protectedSource, homeSource, socketSource, submountSource}
	if b.copy { // sockets are not copied
		checks = []func(Source, Facts) (reason, remedy string){systemSource, protectedSource, homeSource, submountCopied}
	}
	for _, check := range checks {
		if reason, remedy := check(s, f); reason != "" {
			return refuse(at, s.Path, reason, remedy)
		}
	}
	if b.why == WhyWorkspace && !s.Dir {
		return refuse(at, s.Path, "a workspace is a folder, and this is a file", "give its folder, or use mounts")
	}
	return nil
}

func systemSource(s Source, f Facts) (reason, remedy string) {
	for _, dir := range refusedExact {
		if s.Path == dir || s.Path == f.SystemLinks[dir] {
			return "the system folder " + dir + " may not be mounted whole", "mount a folder below it"
		}
	}
	for _, dir := range refusedBelow {
		real, linked := f.SystemLinks[dir]
		if atOrBelow(s.Path, dir) || linked && atOrBelow(s.Path, real) {
			return "nothing in " + dir + " may be mounted", "copy what the agent needs into a folder of your own"
		}
	}
	return "", ""
}

func protectedSource(s Source, f Facts) (reason, remedy string) {
	for _, dir := range f.Protected {
		switch {
		case atOrBelow(s.Path, dir):
			return "it lies in " + quote(dir) + ", which belongs to the engine or to agentshim", "mount a folder of your own"
		case below(dir, s.Path):
			return "it holds " + quote(dir) + ", which belongs to the engine or to agentshim", "mount a narrower folder"
		}
	}
	return "", ""
}

func homeSource(s Source, f Facts) (reason, remedy string) {
	for _, home := range f.HomeRoots {
		switch {
		case s.Path == home:
			return "it is a user's home folder, with keys and logins in it", "mount a folder below it"
		case below(home, s.Path):
			return "it holds " + quote(home) + ", a user's home folder", "mount a narrower folder"
		}
	}
	return "", ""
}

func socketSource(s Source, _ Facts) (reason, remedy string) {
	if len(s.Sockets) > 0 {
		return "what listens on these sockets would answer the agent, even through a read-only mount: " + list(s.Sockets),
			"stop what listens there, or mount a narrower folder"
	}
	if !s.Dir && isWellKnown(path.Base(s.Path)) {
		return "it has the name of an engine's, agent's or desktop's socket", "sockets of the host are never shared"
	}
	return "", ""
}

// submountSource refuses for read-only and writable binds alike: read-only, nosuid,
// nodev and noexec are set on the top mount only, so what is mounted below would
// keep its own flags.
func submountSource(s Source, _ Facts) (reason, remedy string) {
	if len(s.Submounts) == 0 {
		return "", ""
	}
	return "read-only, nosuid and nodev would not hold on what is mounted below it: " + list(s.Submounts),
		"unmount that, or mount a folder without it"
}

func submountCopied(s Source, _ Facts) (reason, remedy string) {
	if len(s.Submounts) == 0 {
		return "", ""
	}
	return "a copy does not enter what is mounted below it: " + list(s.Submounts), "unmount that, or take a folder without it"
}

func quote(s string) string { return fmt.Sprintf("%q", s) }

// list quotes the first few paths and counts the rest.
func list(paths []string) string {
	shown := paths[:min(len(paths), maxListed)]
	var quoted []string
	for _, p := range shown {
		quoted = append(quoted, quote(p))
	}
	text := strings.Join(quoted, ", ")
	if rest := len(paths) - len(shown); rest > 0 {
		text += fmt.Sprintf(" and %d more", rest)
	}
	return text
}
