package shim

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/spec"
)

// ProbeMachine reads the host: kernel, memory, architecture, and the caller's own
// namespaces. SELinux and AppArmor say what the kernel enforces, not what an engine uses.
func ProbeMachine() (spec.Machine, error) {
	kernel, err := kernelRelease()
	if err != nil {
		return spec.Machine{}, err
	}
	var mem unix.Sysinfo_t
	if err := unix.Sysinfo(&mem); err != nil {
		return spec.Machine{}, fmt.Errorf("sysinfo: %w", err)
	}
	namespaces, err := ownNamespaces()
	if err != nil {
		return spec.Machine{}, err
	}
	_, ipv6 := os.Stat("/proc/sys/net/ipv6")
	return spec.Machine{
		OS: runtime.GOOS, Arch: runtime.GOARCH, Kernel: kernel,
		MemoryBytes: int64(mem.Totalram) * int64(mem.Unit),
		IPv6:        !isAbsent(ipv6), // what may not be looked at is not absent
		NoNftables:  netpolicy.NoNftables(askNFTables()),
		Namespaces:  namespaces,
		SELinux:     fileIs("/sys/fs/selinux/enforce", "1"),
		AppArmor:    fileIs("/sys/module/apparmor/parameters/enabled", "Y"),
	}, nil
}

func kernelRelease() (string, error) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return "", fmt.Errorf("uname: %w", err)
	}
	return unix.ByteSliceToString(uts.Release[:]), nil
}

func pathExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func fileIs(path, want string) bool {
	data, err := os.ReadFile(path)
	return err == nil && string(bytes.TrimSpace(data)) == want
}

// ownNamespaces reads /proc/self/ns by the names of namespaces(7).
func ownNamespaces() (map[string]string, error) {
	const dir = "/proc/self/ns"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("own namespaces: %w", err)
	}
	links := make(map[string]string, len(entries))
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), "_for_children") {
			continue
		}
		link, err := os.Readlink(filepath.Join(dir, entry.Name()))
		if err != nil {
			return nil, fmt.Errorf("own namespaces: %w", err)
		}
		links[entry.Name()] = link
	}
	return links, nil
}

// ProbeCaller reads who runs agentshim and what limits hold for it. The hard limits
// are the caller's own; Probe replaces them by what bounds a container.
func ProbeCaller(getenv func(string) string) (spec.Caller, error) {
	return probeCaller(ProbeOptions{Getenv: getenv}.withDefaults())
}

func probeCaller(o ProbeOptions) (spec.Caller, error) {
	groups, err := os.Getgroups()
	if err != nil {
		return spec.Caller{}, fmt.Errorf("own groups: %w", err)
	}
	caller := spec.Caller{UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), Home: o.home()}
	for _, gid := range groups {
		caller.Groups = append(caller.Groups, uint32(gid))
	}
	slices.Sort(caller.Groups)
	caller.SubUIDs, caller.SubGIDs = subordinate(o)
	var cpus unix.CPUSet
	if err := unix.SchedGetaffinity(0, &cpus); err != nil {
		return spec.Caller{}, fmt.Errorf("own cpus: %w", err)
	}
	caller.CPUs = cpus.Count()
	caller.HardNoFile, caller.HardNProc, err = ownHardLimits()
	return caller, err
}

func ownHardLimits() (nofile, nproc uint64, err error) {
	var files, procs unix.Rlimit
	// Prlimit and not Getrlimit: Go raises the soft limit of open files at start, the
	// hard one is as inherited either way.
	if err := unix.Prlimit(0, unix.RLIMIT_NOFILE, nil, &files); err != nil {
		return 0, 0, fmt.Errorf("own limit of open files: %w", err)
	}
	if err := unix.Prlimit(0, unix.RLIMIT_NPROC, nil, &procs); err != nil {
		return 0, 0, fmt.Errorf("own limit of processes: %w", err)
	}
	return files.Max, procs.Max, nil
}

// hardLimit reads one row of /proc/PID/limits; unlimited is the largest number, as in
// RLIM_INFINITY.
func hardLimit(text, row string) (uint64, bool) {
	for line := range strings.Lines(text) {
		rest, ok := strings.CutPrefix(line, row+" ")
		if !ok {
			continue
		}
		fields := strings.Fields(rest)
		if len(fields) < 2 {
			return 0, false
		}
		if fields[1] == "unlimited" {
			return math.MaxUint64, true
		}
		n, err := strconv.ParseUint(fields[1], 10, 64)
		return n, err == nil
	}
	return 0, false
}

// subordinate sums the caller's ranges in /etc/subuid and /etc/subgid, both of which
// name the user (subuid(5), subgid(5)). A range that the name service keeps is not seen.
func subordinate(o ProbeOptions) (uids, gids uint32) {
	name, id := o.userName(), strconv.Itoa(o.callerUID())
	sum := func(file string) uint32 {
		var total uint64
		for _, r := range readRanges(o, file) {
			if r.owner == name || r.owner == id {
				total += r.count
			}
		}
		return clamp32(total)
	}
	return sum("/etc/subuid"), sum("/etc/subgid")
}

type idRange struct {
	owner        string
	first, count uint64
}

// readRanges skips what is not "owner:first:count", as newuidmap does.
func readRanges(o ProbeOptions, file string) []idRange {
	data, err := os.ReadFile(o.path(file))
	if err != nil {
		return nil
	}
	var ranges []idRange
	for line := range strings.Lines(string(data)) {
		parts := strings.Split(strings.TrimSpace(line), ":")
		if len(parts) != 3 {
			continue
		}
		first, err1 := strconv.ParseUint(parts[1], 10, 32)
		count, err2 := strconv.ParseUint(parts[2], 10, 32)
		if err1 == nil && err2 == nil {
			ranges = append(ranges, idRange{parts[0], first, count})
		}
	}
	return ranges
}

// freeRange proposes 65536 ids behind every range of the file, FIRST-LAST as usermod takes it.
func freeRange(o ProbeOptions, file string) string {
	first := uint64(100000)
	for _, r := range readRanges(o, file) {
		first = max(first, r.first+r.count)
	}
	return fmt.Sprintf("%d-%d", first, first+65535)
}

func clamp32(n uint64) uint32 { return uint32(min(n, math.MaxUint32)) }

// cgroupMounts is what /proc/self/mountinfo says of the cgroup hierarchies.
type cgroupMounts struct {
	v1      bool   // a hierarchy with controllers
	unified string // where the v2 hierarchy is mounted, if it is
}

func readCgroups(o ProbeOptions) (cgroupMounts, error) {
	data, err := os.ReadFile(o.path("/proc/self/mountinfo"))
	if err != nil {
		return cgroupMounts{}, fmt.Errorf("own mounts: %w", err)
	}
	return parseCgroups(string(data)), nil
}

// parseCgroups reads proc_pid_mountinfo(5): fields, a lone hyphen, then type, source
// and super options, which name a v1 hierarchy's controllers.
func parseCgroups(mountinfo string) cgroupMounts {
	var found cgroupMounts
	for line := range strings.Lines(mountinfo) {
		before, after, ok := strings.Cut(line, " - ")
		fields, super := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 5 || len(super) < 3 {
			continue
		}
		switch super[0] {
		case "cgroup":
			found.v1 = found.v1 || !strings.Contains(super[2], "name=")
		case "cgroup2":
			if found.unified == "" {
				found.unified = fields[4]
			}
		}
	}
	return found
}

func (c cgroupMounts) hybrid() bool { return c.v1 && c.unified != "" }

// version is what the engine said, or what is mounted where it said nothing usable
// (Docker before 20.10.3 leaves it out on v1).
func (c cgroupMounts) version(said string) int {
	switch {
	case said == "2":
		return 2
	case said == "1":
		return 1
	case c.v1 || c.unified == "":
		return 1
	}
	return 2
}

// unifiedOwnsControllers says that the v2 side of a hybrid set-up has a controller. A
// file that can't be read counts as one: the caution is to take another runtime.
func (c cgroupMounts) unifiedOwnsControllers(o ProbeOptions) bool {
	if !c.hybrid() {
		return false
	}
	data, err := os.ReadFile(filepath.Join(o.path(c.unified), "cgroup.controllers"))
	return err != nil || len(bytes.TrimSpace(data)) > 0
}

// runtimeNotes warns of a runtime whose own number is older than a fix.
func runtimeNotes(name, version string) []string {
	if open := openFaults(name, version); open != nil {
		return []string{faultText(name, version, open)}
	}
	return nil
}

// hasFix compares with the fix of the same branch, and takes every later branch as fixed.
func hasFix(have [3]int, fixed [][3]int) bool {
	for _, f := range fixed {
		if have[0] == f[0] && have[1] == f[1] {
			return have[2] >= f[2]
		}
	}
	return slices.Compare(have[:], fixed[len(fixed)-1][:]) > 0
}

func threeNumbers(version string) (numbers [3]int, ok bool) {
	core := version
	if i := strings.IndexAny(core, "+-~ "); i >= 0 {
		core = core[:i]
	}
	parts := strings.Split(core, ".")
	if len(parts) != 3 {
		return numbers, false
	}
	for i, part := range parts {
		n, err := strconv.Atoi(part)
		if err != nil {
			return numbers, false
		}
		numbers[i] = n
	}
	return numbers, true
}
