package mounts

import (
	"fmt"
	"slices"
	"strings"

	"github.com/agentshim/agentshim/harness"
)

// Mechanisms of Mount.NoSUIDBy, NoDevBy and NoExecBy.
const (
	ByFlag          = "flag"
	ByNoNewPrivs    = "no-new-privileges"
	ByDevicesCgroup = "devices-cgroup"
	// ByNothing: noexec was asked for and this engine can't set it.
	ByNothing = "gap"
)

// Values of Mount.Type.
const (
	TypeBind   = "bind"
	TypeTmpfs  = "tmpfs"
	TypeVolume = "volume"
)

// Values of Mount.Why.
const (
	WhyWorkspace   = "workspace"
	WhyMount       = "mount"
	WhyHome        = "home"
	WhyTmp         = "tmp"
	WhyRun         = "run"
	WhyShm         = "shm"
	WhyImageVolume = "image-volume"
	WhyParent      = "parent"
	WhyCache       = "cache"
)

// Compile decides the container's mounts. It reads nothing but its arguments, and
// equal arguments give an equal Set. Every refusal is reported at once, each a
// *Problem that is ErrRefused, or ErrSource where Probe has no entry for a source.
//
// It guarantees that no mount it returns makes an engine create anything in a
// host folder. It does not guarantee that a source is still what Probe saw: the
// attestation compares Dev and Ino with what init sees. What the guards hold is said
// at Guards. Files of home.files and the engine's own mounts are not its business.
func Compile(h harness.Harness, f Facts, t Target) (Set, error) {
	var ps problems
	asked := targets(h, f.Home)
	ps.add(modeProblem(h))
	git, gitProblems := decideGit(h, f)
	ps = append(ps, gitProblems...)
	fixed, sizeProblems := tmpfs(h, t)
	ps = append(ps, sizeProblems...)
	volumes, volumeProblems := imageVolumes(t, asked, fixed)
	all := slices.Concat(fixed, volumes)
	for _, b := range asked {
		if b.why != WhyCache {
			ps.add(sourceProblem(b, f))
		}
		ps.add(targetProblem(b, asked, fixed, t))
		ps.add(nestingProblem(b, asked, f))
		ps.add(gitCollision(b, git.mode, asked))
	}
	ps = append(ps, volumeProblems...)
	between, parentProblems := parents(asked, all, t)
	ps = append(ps, parentProblems...)
	all = append(all, between...)
	ps = append(ps, labelProblems(h, asked, f, t)...)
	ps.add(sumProblem(all, t))
	caches, cacheProblems := caches(h, f, t)
	ps = append(ps, cacheProblems...)
	guards, err := guardPaths(h, f)
	guards = git.apart(guards)
	if err != nil {
		ps = append(ps, err)
	}
	if err := ps.join(); err != nil {
		return Set{}, err
	}
	set := Set{Mounts: all, Caches: caches, Guards: guards}
	hostBinds := binds(h, f.Home)
	for _, b := range hostBinds {
		set.Mounts = append(set.Mounts, bindMount(b, f.Sources[b.key], t))
	}
	for _, c := range caches {
		set.Mounts = append(set.Mounts, c.mount(t))
	}
	set.Warnings = warnings(h, f, t, hostBinds)
	if err := set.guard(h, f); err != nil {
		return Set{}, err
	}
	if err := set.git(git, f, t); err != nil {
		return Set{}, err
	}
	// A parent's path is a prefix of its children's, so it sorts before them.
	slices.SortFunc(set.Mounts, func(a, b Mount) int { return strings.Compare(a.Target, b.Target) })
	for _, m := range set.Mounts {
		if m.NoExecBy == ByNothing {
			set.BindNoExec = append(set.BindNoExec, m.Target)
		}
	}
	return set, nil
}

// guardPaths are those of h's workspace that need anything done: where it is read-only, or
// a copy of which nothing reaches the host by itself, what the file names.
func guardPaths(h harness.Harness, f Facts) ([]GuardPath, error) {
	root, ok := Workspace(h, f)
	if !ok {
		return nil, nil
	}
	paths, err := GuardPaths(*h.Workspace, root.Path, f.Own)
	switch h.Workspace.Mode {
	case "writable":
		return paths, err
	}
	return slices.DeleteFunc(paths, func(g GuardPath) bool { return !g.Hide && !g.named() }), err
}

// guard adds the workspace's guards to its mounts.
func (s *Set) guard(h harness.Harness, f Facts) error {
	s.Warnings = append(s.Warnings, OwnWarnings(f.Own, s.Mounts)...)
	i := slices.IndexFunc(s.Mounts, func(m Mount) bool { return m.Why == WhyWorkspace })
	if i < 0 || len(s.Guards) == 0 {
		return nil
	}
	root, _ := Workspace(h, f)
	if f.Guards == nil {
		return &Problem{Path: "$.workspace", Value: root.Path, Reason: "nothing is known about its guarded paths", Remedy: "they have to be probed first", Kind: ErrSource}
	}
	guards, err := Guards(s.Mounts[i], root.Path, s.Guards, f.Guards, slices.Delete(slices.Clone(s.Mounts), i, i+1))
	s.Mounts, s.Warnings = append(s.Mounts, guards.Mounts...), append(s.Warnings, guards.Warnings...)
	return err
}

func modeProblem(h harness.Harness) *Problem {
	if h.Workspace == nil {
		return nil
	}
	switch h.Workspace.Mode {
	case "", "read-only", "writable", "copy", "none":
		return nil
	}
	return refuse("$.workspace.mode", h.Workspace.Mode, "there is no such mode", "use read-only, writable, copy or none")
}

func bindMount(b bind, s Source, t Target) Mount {
	m := Mount{
		Target: b.target, Type: TypeBind, Source: s.Path, Writable: b.writable, NoExec: b.noExec,
		NoSUIDBy: ByFlag, NoDevBy: ByFlag, Dev: s.Dev, Ino: s.Ino, Why: b.why,
	}
	if t.SELinux {
		m.Label = b.label
	}
	if b.noExec {
		m.NoExecBy = ByFlag
	}
	if b.copy {
		m.Writable = true
		m.takeOwn(CopyTree, true, t)
	}
	if t.Podman {
		return m
	}
	// Docker's --mount has no nosuid, nodev or noexec for binds.
	m.NoSUIDBy, m.NoDevBy = ByNoNewPrivs, ByDevicesCgroup
	if b.noExec {
		m.NoExecBy = ByNothing
	}
	return m
}

// takeOwn makes m a bind of agentshim's own, which has no label that a confined
// container may use.
func (m *Mount) takeOwn(own string, kept bool, t Target) {
	m.Source, m.Own, m.Kept, m.Dev, m.Ino = "", own, kept, 0, 0
	if t.SELinux && t.Podman {
		m.Label = "z"
	}
}

// targetProblem says why b can't be mounted where it asks to be.
func targetProblem(b bind, all []bind, fixed []Mount, t Target) *Problem {
	at := b.json + ".target"
	if b.targetErr != nil {
		return refuse(at, b.rawTarget, b.targetErr.Error(), `write an absolute path, "~/…" for the agent's home, or a path under the workspace`)
	}
	if reason := unportable(b.target); reason != "" {
		return refuse(at, b.target, reason, "choose another target")
	}
	if hasControl(b.target) {
		return refuse(at, b.target, "it holds a control character", "choose another target")
	}
	for _, dir := range kernelTargets {
		if atOrBelow(b.target, dir) {
			return refuse(at, b.target, "it lies in "+dir+", which belongs to the container", "choose another target")
		}
	}
	if b.target == "/" {
		return refuse(at, b.target, "it would replace the whole root file system", "choose a folder below it")
	}
	for _, r := range slices.Concat(reservedTargets, t.Reserved) {
		if atOrBelow(b.target, r) || below(r, b.target) {
			return refuse(at, b.target, "it collides with "+r+", which agentshim or the engine provides", "choose another target")
		}
	}
	if p := tmpfsCollision(b, fixed); p != nil {
		return p
	}
	for _, other := range all {
		if other.json == b.json {
			break
		}
		if other.targetErr == nil && other.target == b.target {
			return refuse(at, b.target, "it is also the target of "+other.json, "give each mount its own target")
		}
	}
	return nil
}

func hasControl(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f })
}

func tmpfsCollision(b bind, fixed []Mount) *Problem {
	for _, m := range fixed {
		switch {
		case b.target == m.Target:
			return refuse(b.json+".target", b.target, "the container's own tmpfs is mounted there", "choose a folder below it, or another target")
		case below(m.Target, b.target):
			return refuse(b.json+".target", b.target, "it lies above "+m.Target+", where the container's own tmpfs is mounted", "choose another target")
		}
	}
	return nil
}

// nestingProblem refuses targets that an engine would have to create in a host folder
// or in a cache.
func nestingProblem(b bind, all []bind, f Facts) *Problem {
	at := b.json + ".target"
	if b.targetErr != nil {
		return nil // targetProblem reports it
	}
	parent := enclosing(b, all)
	switch {
	case parent == nil:
		return nil
	case parent.why == WhyCache:
		return refuse(at, b.target, "it lies in the cache of "+parent.json+", where the engine would leave a folder of root's", "choose targets beside each other")
	}
	outer, ok := f.Sources[parent.key]
	s, known := f.Sources[b.key]
	if !ok || !known && b.why != WhyCache {
		return nil // sourceProblem reports it
	}
	p := nestedPath(outer.Path, parent, b)
	want := NodeFile
	if s.Dir || b.why == WhyCache {
		want = NodeDir
	}
	got := f.Nested[p]
	switch {
	case got == want:
		return nil
	case got == "":
		return refuse(at, b.target,
			fmt.Sprintf("%q does not exist, and the engine would create it in the source of %s", p, parent.json),
			fmt.Sprintf("create it as a %s, or choose a target outside %s", kindWord(want), parent.target))
	case got == NodeOther:
		return refuse(at, b.target, fmt.Sprintf("%q is a link or a special file, or lies behind one", p), "name a real "+kindWord(want))
	}
	return refuse(at, b.target, fmt.Sprintf("%q is a %s and the source a %s", p, kindWord(got), kindWord(want)), "mount a folder on a folder, a file on a file")
}

func kindWord(node string) string {
	if node == NodeDir {
		return "folder"
	}
	return "file"
}

// warnings are in the file's order.
func warnings(h harness.Harness, f Facts, t Target, all []bind) []string {
	var out []string
	warn := func(b bind, format string, args ...any) {
		out = append(out, fmt.Sprintf("%s: %q: ", b.json, b.source)+fmt.Sprintf(format, args...))
	}
	for _, b := range all {
		s := f.Sources[b.key]
		if !s.Dir && b.writable {
			warn(b, "a single file mounted writable: programs that save by renaming get EBUSY, and when the host replaces the file the agent keeps the old one; mount its folder instead")
		}
		if s.NoExec && !b.copy {
			warn(b, "it lies on a file system mounted noexec: programs in it will not run")
		}
		if s.GroupOnly && !b.copy && (t.Podman && t.Rootless || !slices.Contains(h.Groups, int(s.GID))) {
			warn(b, "you can read it only through the supplementary group %d, which the agent does not have", s.GID)
		}
		if text := labelWarning(b, s, f, t); text != "" {
			warn(b, "%s", text)
		}
		if w := writableAbove(b, all, f); w != nil {
			warn(b, "mounted read-only, but the agent can change it through %s, which is writable", w.json)
		}
	}
	return out
}

// writableAbove is the writable bind whose source holds the read-only b's, or nil.
func writableAbove(b bind, all []bind, f Facts) *bind {
	if b.writable || b.copy {
		return nil
	}
	for i := range all {
		w := &all[i]
		source, outer := f.Sources[b.key].Path, f.Sources[w.key].Path
		covered := w.target + strings.TrimPrefix(source, outer)
		if w.writable && atOrBelow(source, outer) && covered != b.target {
			return w
		}
	}
	return nil
}
