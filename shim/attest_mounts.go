package shim

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

func has(options []string, name string) bool { return slices.Contains(options, name) }

// isMask reports a mount that hides what is below it: an empty read-only tmpfs,
// or the null device. A tmpfs that holds something is another folder, bound there.
func isMask(m wire.Mount) bool {
	return m.Type == "tmpfs" && m.Empty && (has(m.Options, "ro") || has(m.Super, "ro")) || m.Root == "/null" && isNull(m)
}

func isNull(m wire.Mount) bool {
	return m.Mode&unix.S_IFMT == unix.S_IFCHR && (m.Type == "devtmpfs" || m.Type == "tmpfs")
}

// topMounts is what a path lookup meets: the last mount on each target.
func (a *attestation) topMounts() map[string]wire.Mount {
	top := map[string]wire.Mount{}
	for _, m := range a.hello.Mounts {
		top[m.Target] = m
	}
	return top
}

// mounts compares every mount of the container with the plan, and every mount of
// the plan with the container.
func (a *attestation) mounts() {
	planned := map[string]mounts.Mount{}
	for _, m := range a.plan.Mounts {
		planned[m.Target] = m
	}
	for _, m := range a.hello.Mounts {
		if slices.ContainsFunc(m.Propagation, func(p string) bool { return strings.HasPrefix(p, "shared:") }) {
			a.mountDiffer(m.Target, "private", strings.Join(m.Propagation, " "))
		}
		if p, ok := planned[m.Target]; ok {
			a.plannedMount(m, p)
		} else if id, ok := a.own[m.Target]; ok {
			a.ownMount(m, id)
		} else {
			a.kernelMount(m)
		}
	}
	top := a.topMounts()
	for _, target := range slices.Compact(slices.Sorted(mapsKeys(planned, a.own))) {
		if _, ok := top[target]; !ok {
			a.mountDiffer(target, "mounted", "not mounted")
		}
	}
}

func mapsKeys[V, W any](m map[string]V, n map[string]W) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
		for k := range n {
			if !yield(k) {
				return
			}
		}
	}
}

func (a *attestation) mountDiffer(target, want string, got any) {
	a.differ("mount "+strconv.Quote(target), want, got)
}

func (a *attestation) needOption(m wire.Mount, option string) {
	if !has(m.Options, option) {
		a.mountDiffer(m.Target, option, strings.Join(m.Options, ","))
	}
}

func (a *attestation) plannedMount(m wire.Mount, p mounts.Mount) {
	if p.Type != mounts.TypeVolume || a.plan.Engine.Kind != spec.Docker {
		// Docker has no propagation option for volumes: what its daemon's own folder of
		// volumes gets mounted is root's doing.
		a.unpropagated(m)
	}
	if m.Stat != "" {
		a.mountDiffer(m.Target, "readable by the agent", m.Stat)
		return
	}
	id := fileID{p.Dev, p.Ino}
	if p.Own != "" {
		id = a.own[p.Target]
	}
	if p.Type == mounts.TypeTmpfs {
		a.plannedTmpfs(m, p)
	} else if p.Type == mounts.TypeVolume {
		a.plannedVolume(m, p)
	} else if m.Dev != id.dev || m.Ino != id.ino {
		a.mountDiffer(m.Target, fmt.Sprintf("the file the plan saw (device %d, inode %d)", id.dev, id.ino), fmt.Sprintf("device %d, inode %d", m.Dev, m.Ino))
		a.diffs[len(a.diffs)-1].swapped = true
	}
	if !p.Writable {
		a.needOption(m, "ro")
	}
	for _, c := range []struct{ by, option string }{{p.NoSUIDBy, "nosuid"}, {p.NoDevBy, "nodev"}, {p.NoExecBy, "noexec"}} {
		if c.by == "flag" {
			a.needOption(m, c.option)
		}
	}
}

// plannedVolume: the engine alone knows where it keeps a volume, and its mode is the
// agent's, who owns it.
func (a *attestation) plannedVolume(m wire.Mount, p mounts.Mount) {
	if root := "/" + spec.VolumeRoot(p.Source); !strings.HasSuffix(m.Root, root) {
		a.mountDiffer(m.Target, "…"+root, strconv.Quote(m.Root))
	}
	if m.UID != p.UID || m.Mode&unix.S_IFMT != unix.S_IFDIR {
		a.mountDiffer(m.Target, fmt.Sprintf("a folder of uid %d", p.UID), fmt.Sprintf("mode %#o of uid %d", m.Mode, m.UID))
	}
}

func (a *attestation) plannedTmpfs(m wire.Mount, p mounts.Mount) {
	if m.Type != "tmpfs" {
		a.mountDiffer(m.Target, "tmpfs", m.Type)
		return
	}
	if size := tmpfsSize(m.Super); size <= 0 || size > p.SizeBytes {
		a.mountDiffer(m.Target, fmt.Sprintf("at most %d bytes", p.SizeBytes), size)
	}
	if a.plan.Engine.Kind == spec.Docker && p.Why != "shm" {
		if n := tmpfsInodes(m.Super); n <= 0 || n > p.SizeBytes/spec.InodeBytes {
			a.mountDiffer(m.Target, fmt.Sprintf("at most %d files", p.SizeBytes/spec.InodeBytes), n)
		}
	}
	if p.Why == mounts.WhyImageVolume {
		return // runc gives it the mode of the image's folder: one uid uses it
	}
	// Without the sticky bit, everyone may remove everyone's files: inode(7).
	mode, sticky := m.Mode&0o7777, uint32(unix.S_ISVTX)
	if mode&^p.Mode != 0 || p.Mode&sticky != mode&sticky || (m.Target == spec.Home || p.Why == mounts.WhyParent) && (m.UID != p.UID || m.GID != p.GID || mode != p.Mode) {
		a.mountDiffer(m.Target, fmt.Sprintf("owner %d:%d, mode %04o", p.UID, p.GID, p.Mode), fmt.Sprintf("owner %d:%d, mode %04o", m.UID, m.GID, mode))
	}
}

// tmpfsInodes reads nr_inodes=… of the file system's options, 0 without one: tmpfs(5).
func tmpfsInodes(super []string) int64 {
	for _, o := range super {
		if v, ok := strings.CutPrefix(o, "nr_inodes="); ok {
			n, _ := strconv.ParseInt(v, 10, 64)
			return n
		}
	}
	return 0
}

// unpropagated: a slave gets what the host mounts below the source later.
func (a *attestation) unpropagated(m wire.Mount) {
	if slices.ContainsFunc(m.Propagation, func(p string) bool { return strings.HasPrefix(p, "master:") }) {
		a.mountDiffer(m.Target, "private", strings.Join(m.Propagation, " "))
	}
}

// tmpfsSize reads size=…k of the file system's options, 0 without one: tmpfs(5).
func tmpfsSize(super []string) int64 {
	for _, o := range super {
		if v, ok := strings.CutPrefix(o, "size="); ok {
			n, err := strconv.ParseInt(strings.TrimSuffix(v, "k"), 10, 64)
			if err == nil && strings.HasSuffix(v, "k") {
				return n * 1024
			}
			return n
		}
	}
	return 0
}

// ownMount is one of agentshim's own files, always read-only.
func (a *attestation) ownMount(m wire.Mount, id fileID) {
	a.unpropagated(m)
	if m.Stat != "" || m.Dev != id.dev || m.Ino != id.ino {
		a.mountDiffer(m.Target, "agentshim's own file", "another")
	}
	a.needOption(m, "ro")
}

// kernelMount is a mount every engine makes; anything else is extra.
func (a *attestation) kernelMount(m wire.Mount) {
	switch {
	case m.Target == "/":
		if a.plan.ReadOnlyRootfs {
			a.needOption(m, "ro")
		}
	case below(m.Target, "/proc") && m.Type == "proc" && m.Dev == a.topMounts()["/proc"].Dev && m.Root == strings.TrimPrefix(m.Target, "/proc"):
		a.needOptions(m, "ro")
	case m.Root != "/" && !a.isDeviceBind(m) && !isMask(m):
		a.mountDiffer(m.Target, "not mounted", fmt.Sprintf("%s of %s", m.Type, strconv.Quote(m.Root)))
	case m.Target == "/proc" && m.Type == "proc", m.Target == "/dev/mqueue" && m.Type == "mqueue":
		a.needOptions(m, "nosuid", "nodev", "noexec")
	case m.Target == "/sys" && m.Type == "sysfs":
		a.needOptions(m, "ro", "nosuid", "nodev", "noexec")
	case m.Target == "/dev" && m.Type == "tmpfs":
		a.needOptions(m, "nosuid")
	case m.Target == "/dev/pts" && m.Type == "devpts":
		a.needOptions(m, "nosuid", "noexec")
	case isCgroup(m):
		a.needOptions(m, "nosuid", "nodev", "noexec")
		if m.Type != "tmpfs" {
			a.needOptions(m, "ro")
		}
	case a.isDeviceBind(m), below(m.Target, "/proc", "/sys") && isMask(m):
	default:
		a.mountDiffer(m.Target, "not mounted", fmt.Sprintf("%s of %s", m.Type, strconv.Quote(m.Root)))
	}
}

func (a *attestation) needOptions(m wire.Mount, options ...string) {
	for _, o := range options {
		a.needOption(m, o)
	}
}

func isCgroup(m wire.Mount) bool {
	const root = "/sys/fs/cgroup"
	return m.Target == root && (m.Type == "tmpfs" || m.Type == "cgroup2") ||
		below(m.Target, root) && (m.Type == "cgroup" || m.Type == "cgroup2")
}

// isDeviceBind is a default or planned device node that an engine binds from the
// host, as a rootless one does, which can make none. Its number stands among the
// device nodes of the hello.
func (a *attestation) isDeviceBind(m wire.Mount) bool {
	name, ok := strings.CutPrefix(m.Target, "/dev/")
	return ok && m.Type == "devtmpfs" && m.Root == "/"+name && m.Mode&unix.S_IFMT == unix.S_IFCHR &&
		slices.ContainsFunc(plannedDevices(a.plan), func(d spec.Device) bool { return d.Name == name })
}

// plannedDevices are all device nodes that a container of the plan has.
func plannedDevices(plan spec.Plan) []spec.Device {
	all := slices.Clone(spec.Devices)
	for _, d := range plan.Devices {
		all = append(all, d.Device)
	}
	return all
}

func below(target string, roots ...string) bool {
	return path.Clean(target) == target && slices.ContainsFunc(roots, func(r string) bool {
		return strings.HasPrefix(target, r+"/")
	})
}
