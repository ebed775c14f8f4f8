package mounts

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/agentshim/agentshim/harness"
)

const (
	miB = int64(1) << 20
	// maxTmpfsMB keeps sums far from overflow.
	maxTmpfsMB = 1 << 30
	// defaultDiskMB and defaultShmMB hold where the harness has zero: the kernel
	// reads size=0 as no limit.
	defaultDiskMB = 512
	defaultShmMB  = 64
	runBytes      = 16 * miB
	volumeBytes   = 16 * miB
	// devBytes is the engines' tmpfs on /dev, which uid 0 can fill.
	devBytes = 64 * miB
	// spareBytes of the memory limit stay free of tmpfs: its pages are charged to
	// the container, and a full limit kills PID 1.
	spareBytes = 64 * miB
)

// tmpfs is the fixed list, the same on both engines.
func tmpfs(h harness.Harness, t Target) ([]Mount, problems) {
	var ps problems
	size := func(at string, mb, otherwise int) int64 {
		if mb == 0 {
			mb = otherwise
		}
		if mb < 0 || mb > maxTmpfsMB {
			ps.add(refuse(at, fmt.Sprint(mb), "it is no usable size", "give a number of MiB within the memory limit"))
			return 0
		}
		return int64(mb) * miB
	}
	home := ownTmpfs(AgentHome, WhyHome, size("$.home.sizeMb", h.Home.SizeMB, defaultDiskMB), 0o700, t)
	if h.Home.NoExec {
		home.NoExec, home.NoExecBy = true, ByFlag
	}
	tmp := ownTmpfs("/tmp", WhyTmp, size("$.tmpSizeMb", h.TmpSizeMB, defaultDiskMB), 0o1777, t)
	shm := ownTmpfs("/dev/shm", WhyShm, size("$.resources.shmMb", h.Resources.ShmMB, defaultShmMB), 0o1777, Target{})
	shm.NoExec, shm.NoExecBy = true, ByFlag
	return []Mount{home, tmp, ownTmpfs("/run", WhyRun, runBytes, 0o755, t), shm}, ps
}

func ownTmpfs(target, why string, size int64, mode uint32, owner Target) Mount {
	return Mount{
		Target: target, Type: TypeTmpfs, Writable: true, NoSUIDBy: ByFlag, NoDevBy: ByFlag,
		SizeBytes: size, Mode: mode, UID: owner.UID, GID: owner.GID, Why: why,
	}
}

// imageVolumes puts a small tmpfs on each VOLUME of the image that nothing else
// is mounted on. Podman is told to ignore them all.
func imageVolumes(t Target, asked []bind, fixed []Mount) ([]Mount, problems) {
	if t.Podman {
		return nil, nil
	}
	var (
		ps  problems
		out []Mount
	)
	volumes := slices.Sorted(slices.Values(t.ImageVolumes))
	for i, v := range slices.Compact(volumes) {
		at := fmt.Sprintf("$image.volumes[%d]", i)
		if taken(v, asked, fixed) {
			continue
		}
		if p := volumeProblem(at, v, asked, t); p != nil {
			ps.add(p)
			continue
		}
		out = append(out, ownTmpfs(v, WhyImageVolume, volumeBytes, 0o755, t))
	}
	return out, ps
}

func taken(volume string, asked []bind, fixed []Mount) bool {
	return slices.ContainsFunc(asked, func(b bind) bool { return b.targetErr == nil && b.target == volume }) ||
		slices.ContainsFunc(fixed, func(m Mount) bool { return m.Target == volume })
}

const withoutVolume = "build the image without this VOLUME, or use Podman, which ignores it"

func volumeProblem(at, v string, asked []bind, t Target) *Problem {
	switch {
	case !path.IsAbs(v) || path.Clean(v) != v:
		return refuse(at, v, "the image's VOLUME is not an absolute clean path", withoutVolume)
	case unportable(v) != "":
		return refuse(at, v, "the image's VOLUME can't be passed on: "+unportable(v), withoutVolume)
	case !plain(v):
		return refuse(at, v, "the image's VOLUME holds a colon, a comma or a control character, which --tmpfs can't carry", withoutVolume)
	case slices.Contains(volumeExact, v):
		return refuse(at, v, "the image's VOLUME covers a system folder", withoutVolume)
	}
	for _, dir := range volumeBelow {
		if atOrBelow(v, dir) {
			return refuse(at, v, "the image's VOLUME lies in the system folder "+dir, withoutVolume)
		}
	}
	for _, r := range slices.Concat(reservedTargets, t.Reserved) {
		if atOrBelow(v, r) || below(r, v) {
			return refuse(at, v, "the image's VOLUME collides with "+r+", which agentshim or the engine provides", withoutVolume)
		}
	}
	for _, b := range asked {
		if b.targetErr == nil && below(v, b.target) {
			return refuse(at, v, "the image's VOLUME lies inside "+b.target+", the target of "+b.json+", and the engine would create it in the source",
				"choose another target, or "+withoutVolume)
		}
	}
	return nil
}

// plain says that --tmpfs PATH:OPTIONS can carry p.
func plain(p string) bool {
	return !strings.ContainsFunc(p, func(r rune) bool { return r == ':' || r == ',' || r < ' ' || r == 0x7f })
}

// parents puts a tmpfs of the agent's on each folder between a target and the tmpfs it
// lies in, which an engine would make as root's. Its size and noexec are those of the
// tmpfs it lies in; nobody but the agent may enter it.
func parents(asked []bind, tmpfs []Mount, t Target) ([]Mount, problems) {
	var ps problems
	made := map[string]Mount{}
	for _, b := range asked {
		if b.targetErr != nil || enclosing(b, asked) != nil {
			continue // targetProblem's, nestingProblem's
		}
		if !addParents(made, b.target, tmpfs, t) {
			ps.add(refuse(b.json+".target", b.target, "a folder on its way holds a colon, a comma or a control character, which --tmpfs can't carry", "choose another target"))
		}
	}
	for _, m := range tmpfs {
		addParents(made, m.Target, tmpfs, t) // an image's VOLUME, which is plain
	}
	return slices.SortedFunc(maps.Values(made), func(a, b Mount) int { return strings.Compare(a.Target, b.Target) }), ps
}

// addParents is false where --tmpfs can't carry a folder's path.
func addParents(made map[string]Mount, target string, tmpfs []Mount, t Target) bool {
	outer := Mount{}
	for _, m := range tmpfs {
		if below(target, m.Target) && len(m.Target) > len(outer.Target) {
			outer = m
		}
	}
	if outer.Target == "" {
		return true // the image's root, where the engine makes folders as the image's own are
	}
	for dir := path.Dir(target); dir != outer.Target; dir = path.Dir(dir) {
		if !plain(dir) {
			return false
		}
		m := ownTmpfs(dir, WhyParent, outer.SizeBytes, 0o700, t)
		m.NoExec, m.NoExecBy = outer.NoExec, outer.NoExecBy
		made[dir] = m
	}
	return true
}

// sumProblem refuses tmpfs that could together fill the memory limit.
func sumProblem(all []Mount, t Target) *Problem {
	if t.MemoryBytes <= 0 {
		return nil
	}
	var sum int64
	for _, m := range all {
		sum += m.SizeBytes
	}
	also := ""
	if t.UID == 0 {
		sum += devBytes
		also = " with 64 MiB of /dev, which uid 0 can fill"
	}
	if n := len(slices.DeleteFunc(slices.Clone(all), func(m Mount) bool { return m.Why != WhyParent })); n > 0 {
		also += fmt.Sprintf(" with %d on the way to deeper targets", n)
	}
	limit := t.MemoryBytes - spareBytes
	if sum <= limit {
		return nil
	}
	return refuse("$.resources.memoryMb", fmt.Sprint(t.MemoryBytes/miB),
		fmt.Sprintf("all tmpfs%s may hold %d MiB, but memory less 64 MiB is %d MiB", also, ceilMiB(sum), limit/miB),
		fmt.Sprintf("raise resources.memoryMb to %d, or lower home.sizeMb, tmpSizeMb or resources.shmMb", ceilMiB(sum+spareBytes)))
}

func ceilMiB(n int64) int64 { return (n + miB - 1) / miB }
