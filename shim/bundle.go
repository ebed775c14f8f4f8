package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/spec"
)

// bundleCompared is Attestation.Bundle where the engine's own OCI config was read.
const bundleCompared = "compared"

// readContainerID is the engine's id of the container, empty when it wrote none.
func readContainerID(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// compareAccount compares what Docker's daemon says of the container over its socket
// with the plan, and learns init's pid.
func (c *container) compareAccount(id string) []Difference {
	if !isContainerID(id) {
		return []Difference{{Field: "container id", Want: "written by the engine", Got: strconv.Quote(id)}}
	}
	if d, ok := c.p.adapter.(*docker); ok {
		return c.compareInspected(d, id)
	}
	return nil
}

// compareBundle compares the OCI config in the engine's state folder with the plan,
// where this user may read it, and Podman's choice of the image. Each Difference is one
// that the container itself may not be able to see, such as the device cgroup. The text
// is "compared" or why the config was not. What an OCI runtime changes by itself shows
// in neither this nor compareAccount.
func (c *container) compareBundle(id string) (string, []Difference) {
	var diffs []Difference
	if c.p.plan.Engine.Kind == spec.Podman {
		diffs = comparePodmanImage(c.p.plan, id)
	}
	got, err := readBundle(bundleFiles(c.p.plan.Engine, id))
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fmt.Sprintf("not readable by uid %d", os.Getuid()), diffs
	case errors.Is(err, fs.ErrNotExist):
		return "not found", diffs
	case err != nil:
		return err.Error(), append(diffs, Difference{Field: "config", Want: "readable", Got: err.Error()})
	}
	return bundleCompared, append(diffs, compareConfig(c.p.plan, c.p.host, c.paths, got)...)
}

// isContainerID guards the paths that an id becomes part of.
func isContainerID(id string) bool {
	return len(id) == 64 && strings.Trim(id, "0123456789abcdef") == ""
}

// containerdStates are containerd's state folders: as a service of its own, and as
// a child of dockerd.
var containerdStates = []string{"/run/containerd", "/run/docker/containerd/daemon"}

// bundleFiles are the places where the engine may keep the container's OCI config.
func bundleFiles(e spec.Engine, id string) []string {
	var files []string
	if e.Kind == spec.Docker {
		for _, dir := range slices.Concat(containerdStates, e.Dirs) {
			files = append(files, filepath.Join(dir, "io.containerd.runtime.v2.task/moby", id, "config.json"))
		}
		return files
	}
	for _, dir := range podmanContainers(e) {
		files = append(files, filepath.Join(dir, id, "userdata/config.json"))
	}
	return files
}

// podmanContainers are the folders that hold a folder per container, named after
// the storage driver.
func podmanContainers(e spec.Engine) []string {
	var dirs []string
	for _, root := range e.Dirs {
		entries, err := os.ReadDir(root)
		if err != nil {
			continue
		}
		for _, entry := range entries {
			if strings.HasSuffix(entry.Name(), "-containers") {
				dirs = append(dirs, filepath.Join(root, entry.Name()))
			}
		}
	}
	return dirs
}

const maxBundle = 4 << 20

// readBundle parses the first file that exists. A file that may exist and may not
// be read is fs.ErrPermission.
func readBundle(files []string) (*oci.Spec, error) {
	missing := fmt.Errorf("config: %w", fs.ErrNotExist)
	for _, file := range files {
		b, err := readBounded(file, maxBundle)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case errors.Is(err, fs.ErrPermission):
			missing = err
			continue
		case err != nil:
			return nil, err
		}
		var s oci.Spec
		if err := json.Unmarshal(b, &s); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		return &s, nil
	}
	return nil, missing
}

// comparePodmanImage looks up which image the storage made the container of. It
// says nothing where no list names the container.
func comparePodmanImage(plan spec.Plan, id string) []Difference {
	for _, dir := range podmanContainers(plan.Engine) {
		for _, name := range []string{"containers.json", "volatile-containers.json"} {
			b, err := readBounded(filepath.Join(dir, name), maxBundle)
			if err != nil {
				continue
			}
			var list []struct{ ID, Image string }
			if json.Unmarshal(b, &list) != nil {
				continue
			}
			for _, c := range list {
				if want := strings.TrimPrefix(plan.Image.ID, "sha256:"); c.ID == id && c.Image != want {
					return []Difference{{Field: "image", Want: want, Got: strconv.Quote(c.Image)}}
				}
			}
		}
	}
	return nil
}

// configuration compares an engine's OCI config with a plan, in one direction.
type configuration struct {
	attestation
	got *oci.Spec
	run spec.RunPaths
}

// compareConfig returns where the config is weaker than the plan or has more, in a
// fixed order. It ignores annotations, labels, cgroupsPath, the working folder, and
// limits of what the plan does not bound.
func compareConfig(plan spec.Plan, host spec.Host, run spec.RunPaths, got *oci.Spec) []Difference {
	c := configuration{attestation: attestation{plan: plan, host: host}, got: got, run: run}
	if got.Process == nil || got.Root == nil || got.Linux == nil {
		c.attestation.differ("config", "process, root and linux", "incomplete")
		return c.diffs
	}
	for _, check := range []func(){
		c.process, c.identity, c.capabilities, c.limits, c.confinement, c.root, c.mounts, c.hooks,
		c.namespaces, c.idMap, c.kernel, c.resources, c.deviceRules, c.devices, c.seccomp,
	} {
		check()
	}
	return c.diffs
}

func (c *configuration) differ(field, want string, got any) {
	c.attestation.differ("config "+field, want, got)
}

func (c *configuration) process() {
	p := c.got.Process
	if !slices.Equal(p.Args, initArgs) {
		c.differ("args", fmt.Sprintf("%q", initArgs), fmt.Sprintf("%q", p.Args))
	}
	if p.Terminal {
		c.differ("terminal", "none", "one")
	}
	if !p.NoNewPrivileges {
		c.differ("no_new_privs", "true", false)
	}
	if p.OOMScoreAdj != nil && *p.OOMScoreAdj < 0 {
		c.differ("oom_score_adj", "at least 0", *p.OOMScoreAdj)
	}
	if p.Scheduler != nil {
		c.differ("scheduler", "none", p.Scheduler.Policy)
	}
	for _, name := range unplannedVariables(p.Env) {
		c.differ("variable "+strconv.Quote(name), "not in init's environment", "set")
	}
}

var initArgs = []string{spec.InitPath, spec.InitArg}

func (c *configuration) identity() {
	id, u := c.plan.Identity, c.got.Process.User
	if u.UID != id.UID || u.GID != id.GID {
		c.differ("user", fmt.Sprintf("%d:%d", id.UID, id.GID), fmt.Sprintf("%d:%d", u.UID, u.GID))
	}
	for _, g := range u.AdditionalGids {
		if g != id.GID && !slices.Contains(id.Groups, g) {
			c.differ("groups", fmt.Sprint(append([]uint32{id.GID}, id.Groups...)), u.AdditionalGids)
			return
		}
	}
}

func (c *configuration) capabilities() {
	got := c.got.Process.Capabilities
	if got == nil {
		return
	}
	for _, set := range []struct {
		name          string
		allowed, have []string
	}{
		{"bounding", c.plan.Capabilities, got.Bounding},
		{"effective", c.plan.Capabilities, got.Effective},
		{"permitted", c.plan.Capabilities, got.Permitted},
		{"inheritable", nil, got.Inheritable},
		{"ambient", nil, got.Ambient},
	} {
		for _, name := range set.have {
			if !slices.Contains(set.allowed, strings.TrimPrefix(name, "CAP_")) {
				c.differ("capabilities "+set.name, fmt.Sprint(set.allowed), fmt.Sprint(set.have))
				break
			}
		}
	}
}

// tighteningLimits have no bound in a plan and none by default: any value is stricter.
var tighteningLimits = []string{"as", "cpu", "data", "fsize", "locks", "rss", "rttime", "stack"}

// plannedLimits are the most that a container may have. getrlimit(2): nice and
// rtprio above 0 let a process take the CPU from init.
func (a *attestation) plannedLimits() map[string]uint64 {
	l := a.plan.Limits
	return map[string]uint64{"core": l.Core, "nofile": l.NoFile, "nproc": l.NProc, "nice": 0, "rtprio": 0}
}

func (c *configuration) limits() {
	planned := c.plannedLimits()
	for _, l := range c.got.Process.Rlimits {
		name := strings.ToLower(strings.TrimPrefix(l.Type, "RLIMIT_"))
		if slices.Contains(tighteningLimits, name) {
			continue
		}
		limit, ok := planned[name]
		switch {
		case !ok:
			c.differ("rlimit "+name, "none", l.Hard)
		case l.Hard > limit || l.Soft > limit:
			c.differ("rlimit "+name, fmt.Sprint("at most ", limit), fmt.Sprint(l.Soft, ":", l.Hard))
		}
	}
}

func (c *configuration) confinement() {
	p := c.got.Process
	if c.host.Engine.AppArmor && (p.ApparmorProfile == "" || p.ApparmorProfile == "unconfined") {
		c.differ("apparmor profile", "a confined one", strconv.Quote(p.ApparmorProfile))
	}
	if c.host.Engine.SELinux && !confinedSELinux(p.SelinuxLabel) {
		c.differ("selinux label", "a container's", strconv.Quote(p.SelinuxLabel))
	}
}

// root: a file system outside of the engine's store is not an image's.
func (c *configuration) root() {
	if c.plan.ReadOnlyRootfs && !c.got.Root.Readonly {
		c.differ("root", "read-only", "writable")
	}
	if dirs := c.plan.Engine.Dirs; len(dirs) > 0 && !below(c.got.Root.Path, dirs...) {
		c.differ("root", "in the engine's store", strconv.Quote(c.got.Root.Path))
	}
	if c.got.Hostname != spec.Hostname {
		c.differ("host name", spec.Hostname, strconv.Quote(c.got.Hostname))
	}
}

// kernelTypes are the file systems that every engine mounts, by target.
var kernelTypes = map[string][]string{
	"/proc": {"proc"}, "/dev": {"tmpfs"}, "/dev/pts": {"devpts"}, "/sys": {"sysfs"},
	"/sys/fs/cgroup": {"cgroup", "cgroup2"}, "/dev/mqueue": {"mqueue"},
}

// plannedSources maps each planned bind's target to its source, agentshim's own
// among them.
func plannedSources(plan spec.Plan, run spec.RunPaths) map[string]string {
	sources := map[string]string{spec.InitPath: run.Init}
	for _, f := range plan.Etc {
		sources["/etc/"+f.Name] = filepath.Join(run.Dir, "etc", f.Name)
	}
	for _, m := range plan.Mounts {
		if m.Type == "bind" {
			sources[m.Target] = run.Source(m)
		}
	}
	return sources
}

// plannedVolumes maps each planned volume's target to its name.
func plannedVolumes(plan spec.Plan) map[string]string {
	volumes := map[string]string{}
	for _, m := range plan.Mounts {
		if m.Type == mounts.TypeVolume {
			volumes[m.Target] = m.Source
		}
	}
	return volumes
}

// plannedKinds maps each planned tmpfs's target to what it is for, and every
// mount's target to whether the agent may write there.
func plannedKinds(plan spec.Plan) (tmpfs map[string]string, writable map[string]bool) {
	tmpfs, writable = map[string]string{}, map[string]bool{}
	for _, m := range plan.Mounts {
		if m.Type == "tmpfs" {
			tmpfs[m.Target] = m.Why
		}
		writable[m.Target] = m.Writable
	}
	return tmpfs, writable
}

func (c *configuration) mounts() {
	sources := plannedSources(c.plan, c.run)
	volumes := plannedVolumes(c.plan)
	tmpfs, writable := plannedKinds(c.plan)
	missing := map[string]bool{}
	for target := range sources {
		missing[target] = true
	}
	for target := range tmpfs {
		missing[target] = true
	}
	for target := range volumes {
		missing[target] = true
	}
	for _, m := range c.got.Mounts {
		target := path.Clean(m.Destination)
		delete(missing, target)
		source, bind := sources[target]
		volume, isVolume := volumes[target]
		why, isTmpfs := tmpfs[target]
		types, kernel := kernelTypes[target]
		switch {
		case bind:
			c.bind(m, source, writable[target])
		case isVolume:
			c.volume(m, volume)
		case isTmpfs:
			c.tmpfs(m, why)
		case c.isDeviceMount(m):
		case !kernel || !slices.Contains(types, m.Type):
			c.mountDiffer(target, "not mounted", m)
		case (target == "/sys" || target == "/sys/fs/cgroup") && !has(m.Options, "ro"):
			c.mountDiffer(target, "read-only", m)
		}
	}
	for _, target := range slices.Sorted(maps.Keys(missing)) {
		c.differ("mount "+strconv.Quote(target), "mounted", "not mounted")
	}
}

// isDeviceMount is a planned device's node, bound onto its own place.
func (c *configuration) isDeviceMount(m oci.Mount) bool {
	return m.Source == m.Destination && (has(m.Options, "bind") || has(m.Options, "rbind")) &&
		slices.ContainsFunc(c.plan.Devices, func(d spec.HostDevice) bool { return d.Path() == m.Destination })
}

func (c *configuration) mountDiffer(target, want string, m oci.Mount) {
	c.differ("mount "+strconv.Quote(target), want, fmt.Sprintf("%s of %q, %s", m.Type, m.Source, strings.Join(m.Options, ",")))
}

var sharingOptions = []string{"shared", "rshared", "slave", "rslave", "unbindable", "runbindable"}

func (c *configuration) bind(m oci.Mount, source string, writable bool) {
	switch {
	case m.Type != "bind" && !has(m.Options, "bind") && !has(m.Options, "rbind"):
		c.mountDiffer(m.Destination, "a bind", m)
	case path.Clean(m.Source) != source:
		c.mountDiffer(m.Destination, fmt.Sprintf("%q", source), m)
	case !writable && !has(m.Options, "ro"):
		c.mountDiffer(m.Destination, "read-only", m)
	case slices.ContainsFunc(m.Options, func(o string) bool { return slices.Contains(sharingOptions, o) }):
		c.mountDiffer(m.Destination, "private", m)
	case len(m.UIDMappings) > 0 || len(m.GIDMappings) > 0:
		c.mountDiffer(m.Destination, "no id mapping", m)
	}
}

// volume is a bind of the volume's folder in the engine's store.
func (c *configuration) volume(m oci.Mount, name string) {
	if !strings.HasSuffix(m.Source, "/"+spec.VolumeRoot(name)) || !below(m.Source, c.plan.Engine.Dirs...) {
		c.mountDiffer(m.Destination, "volume "+name, m)
		return
	}
	c.bind(m, path.Clean(m.Source), true)
}

// tmpfs: Podman makes /dev/shm itself, in its store, and binds it.
func (c *configuration) tmpfs(m oci.Mount, why string) {
	shm := c.plan.Engine.Kind == spec.Podman && why == "shm" && m.Type == "bind" &&
		path.Base(m.Source) == "shm" && below(m.Source, c.plan.Engine.Dirs...)
	if m.Type != "tmpfs" && !shm {
		c.mountDiffer(m.Destination, "tmpfs", m)
	}
}

// hooks: Docker moves the network namespace into place by one; nothing else may run
// on the host beside the container.
func (c *configuration) hooks() {
	h := c.got.Hooks
	if h == nil {
		return
	}
	for _, hook := range slices.Concat(h.Prestart, h.CreateRuntime, h.CreateContainer, h.StartContainer, h.Poststart, h.Poststop) { //nolint:staticcheck // Docker's is a prestart hook
		if c.plan.Engine.Kind != spec.Docker || !isSetKey(hook) {
			c.differ("hook", "none", strconv.Quote(hook.Path))
		}
	}
}

// isSetKey reports dockerd's own re-execution (libnetwork).
func isSetKey(h oci.Hook) bool {
	pid, ok := strings.CutPrefix(h.Path, "/proc/")
	pid, exe := strings.CutSuffix(pid, "/exe")
	_, err := strconv.ParseUint(pid, 10, 32)
	return ok && exe && err == nil && len(h.Args) > 0 && h.Args[0] == "libnetwork-setkey"
}

func (c *configuration) namespaces() {
	private := map[string]bool{}
	for _, ns := range c.got.Linux.Namespaces {
		if ns.Path != "" && !c.madeByPodman(ns) {
			c.differ(string(ns.Type)+" namespace", "a new one", strconv.Quote(ns.Path))
		}
		private[string(ns.Type)] = true
	}
	for _, ns := range c.plan.Namespaces {
		// Without --userns, rootless Podman's own user namespace is the container's.
		if ns == "user" && c.plan.Identity.Userns == "" {
			continue
		}
		if !private[ns] {
			c.differ(ns+" namespace", "a new one", "the engine's")
		}
	}
}

// madeByPodman reports a network namespace that Podman has made and set up before the
// runtime is called. What is in it, init and the helper look at.
func (c *configuration) madeByPodman(ns oci.LinuxNamespace) bool {
	return c.plan.Engine.Kind == spec.Podman && c.plan.Egress.Network != nil && ns.Type == oci.NetworkNamespace &&
		path.Dir(ns.Path) == "/run/netns" && strings.HasPrefix(path.Base(ns.Path), "netns-")
}

func (c *configuration) idMap() {
	if !strings.HasPrefix(c.plan.Identity.Userns, "keep-id") {
		return
	}
	check := func(field string, m []oci.LinuxIDMapping, id uint32) {
		if !slices.ContainsFunc(m, func(e oci.LinuxIDMapping) bool {
			return id >= e.ContainerID && id-e.ContainerID < e.Size && e.HostID+(id-e.ContainerID) == 0
		}) {
			c.differ(field, fmt.Sprintf("%d mapped to the caller", id), m)
		}
	}
	check("uid map", c.got.Linux.UIDMappings, c.plan.Identity.UID)
	check("gid map", c.got.Linux.GIDMappings, c.plan.Identity.GID)
}

func (c *configuration) kernel() {
	l := c.got.Linux
	for _, p := range c.plan.MaskedPaths {
		if !slices.Contains(l.MaskedPaths, p) {
			c.differ("masked path "+p, "masked", "open")
		}
	}
	for _, p := range c.plan.ReadonlyPaths {
		if !slices.Contains(l.ReadonlyPaths, p) && !slices.Contains(l.MaskedPaths, p) {
			c.differ("read-only path "+p, "read-only", "writable")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(l.Sysctl)) {
		if want, ok := c.plan.Sysctls[name]; !ok || want != l.Sysctl[name] {
			c.differ("sysctl "+name, strconv.Quote(want), strconv.Quote(l.Sysctl[name]))
		}
	}
	if strings.HasSuffix(l.RootfsPropagation, "shared") {
		c.differ("root propagation", "private", l.RootfsPropagation)
	}
	if l.Personality != nil {
		c.differ("personality", "none", l.Personality.Domain)
	}
}

func (c *configuration) resources() {
	l, r := c.plan.Limits, c.got.Linux.Resources
	if r == nil {
		r = &oci.LinuxResources{}
	}
	memory, cpu, pids := r.Memory, r.CPU, r.Pids
	if memory == nil {
		memory = &oci.LinuxMemory{}
	}
	if cpu == nil {
		cpu = &oci.LinuxCPU{}
	}
	if pids == nil {
		pids = &oci.LinuxPids{}
	}
	c.bounded("memory limit", l.MemoryBytes, memory.Limit)
	c.bounded("memory and swap limit", l.MemoryBytes, memory.Swap)
	c.bounded("pids limit", l.PIDs, pids.Limit)
	if l.CPUs > 0 && (cpu.Quota == nil || cpu.Period == nil || *cpu.Quota <= 0 || float64(*cpu.Quota) > l.CPUs*float64(*cpu.Period)+1) {
		c.differ("cpu quota", fmt.Sprint("at most ", l.CPUs, " cpus"), quota(cpu))
	}
	if memory.DisableOOMKiller != nil && *memory.DisableOOMKiller {
		c.differ("oom killer", "enabled", "disabled")
	}
	if cpu.RealtimeRuntime != nil && *cpu.RealtimeRuntime > 0 {
		c.differ("realtime cpu", "none", *cpu.RealtimeRuntime)
	}
}

func quota(cpu *oci.LinuxCPU) string {
	if cpu.Quota == nil || cpu.Period == nil {
		return "none"
	}
	return fmt.Sprintf("%d/%d", *cpu.Quota, *cpu.Period)
}

func (c *configuration) bounded(field string, want int64, got *int64) {
	switch {
	case want <= 0:
	case got == nil:
		c.differ(field, fmt.Sprint("at most ", want), "none")
	case *got <= 0 || *got > want:
		c.differ(field, fmt.Sprint("at most ", want), *got)
	}
}

// deviceRules: the last matching rule decides, so what stands before a denial of
// everything is void. A rootless engine has no device cgroup, and can make no node.
func (c *configuration) deviceRules() {
	if c.plan.Engine.Rootless {
		return
	}
	denied := false
	var allowed []oci.LinuxDeviceCgroup
	if c.got.Linux.Resources != nil {
		for _, d := range c.got.Linux.Resources.Devices {
			switch {
			case d.Allow:
				allowed = append(allowed, d)
			case everyDevice(d):
				denied, allowed = true, nil
			}
		}
	}
	if !denied {
		c.differ("device cgroup", "everything denied first", "not")
	}
	for _, d := range allowed {
		if !plannedRule(d) && !c.deviceRule(d) {
			c.differ("device cgroup", c.deviceText(), fmt.Sprintf("%s %s:%s %s", d.Type, number(d.Major), number(d.Minor), d.Access))
		}
	}
}

func everyDevice(d oci.LinuxDeviceCgroup) bool {
	return (d.Type == "" || d.Type == "a") && wildcard(d.Major) && wildcard(d.Minor) && (d.Access == "" || d.Access == "rwm")
}

func wildcard(n *int64) bool { return n == nil || *n < 0 }

func number(n *int64) string {
	if wildcard(n) {
		return "*"
	}
	return strconv.FormatInt(*n, 10)
}

// plannedRule reports the default nodes, terminals (5:2, 136:*) and Docker's 5:1,
// the console, of which no node is made without a terminal.
func plannedRule(d oci.LinuxDeviceCgroup) bool {
	if d.Type != "c" || wildcard(d.Major) {
		return false
	}
	if wildcard(d.Minor) {
		return *d.Major == 136
	}
	return *d.Major == 5 && (*d.Minor == 1 || *d.Minor == 2) ||
		slices.ContainsFunc(spec.Devices, func(s spec.Device) bool { return s.Major == *d.Major && s.Minor == *d.Minor })
}

// deviceRule is what the plan's own devices need.
func (c *configuration) deviceRule(r oci.LinuxDeviceCgroup) bool {
	return r.Type == "c" && !wildcard(r.Major) && !wildcard(r.Minor) && strings.Trim(r.Access, spec.DeviceAccess) == "" &&
		slices.ContainsFunc(c.plan.Devices, func(d spec.HostDevice) bool { return d.Major == *r.Major && d.Minor == *r.Minor })
}

func (c *configuration) devices() {
	for _, d := range c.got.Linux.Devices {
		if !slices.ContainsFunc(plannedDevices(c.plan), func(s spec.Device) bool {
			return d.Type == "c" && d.Path == s.Path() && d.Major == s.Major && d.Minor == s.Minor
		}) {
			c.differ("device", c.deviceText(), fmt.Sprintf("%s %d:%d %q", d.Type, d.Major, d.Minor, d.Path))
		}
	}
}

func (c *configuration) seccomp() {
	if d := seccompDifference(c.plan.Seccomp.OCI(), c.got.Linux.Seccomp); d != "" {
		c.differ("seccomp", "the plan's policy", d)
	}
}

// seccompDifference is empty when both say the same, in whatever order and
// grouping.
func seccompDifference(want, got *oci.LinuxSeccomp) string {
	if got == nil {
		return "none"
	}
	for _, c := range []struct{ what, want, got string }{
		{"default action", string(want.DefaultAction), string(got.DefaultAction)},
		{"default errno", errnoText(want.DefaultErrnoRet), errnoText(got.DefaultErrnoRet)},
		{"flags", fmt.Sprint(want.Flags), fmt.Sprint(got.Flags)},
		{"listener", want.ListenerPath, got.ListenerPath},
		{"architectures", sortedText(want.Architectures), sortedText(got.Architectures)},
	} {
		if c.want != c.got {
			return fmt.Sprintf("%s %q, not %q", c.what, c.got, c.want)
		}
	}
	wanted, have := verdicts(want.Syscalls), verdicts(got.Syscalls)
	for _, v := range slices.Sorted(maps.Keys(have)) {
		if !wanted[v] {
			return "the rule " + v
		}
	}
	for _, v := range slices.Sorted(maps.Keys(wanted)) {
		if !have[v] {
			return "no rule " + v
		}
	}
	return ""
}

// errnoText: EPERM is every runtime's default.
func errnoText(n *uint) string {
	if n == nil {
		return "1"
	}
	return strconv.FormatUint(uint64(*n), 10)
}

func sortedText[T ~string](list []T) string {
	return fmt.Sprint(slices.Sorted(slices.Values(list)))
}

// verdicts takes rules apart: one entry for each call and condition.
func verdicts(rules []oci.LinuxSyscall) map[string]bool {
	set := map[string]bool{}
	for _, r := range rules {
		tail := " " + string(r.Action)
		if r.Action == oci.ActErrno {
			tail += " " + errnoText(r.ErrnoRet)
		}
		for _, a := range r.Args {
			tail += fmt.Sprintf(" [%d %s %d %d]", a.Index, a.Op, a.Value, a.ValueTwo)
		}
		for _, name := range r.Names {
			set[name+tail] = true
		}
	}
	return set
}
