package spec

import (
	"fmt"
	"path"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentshim/agentshim/mounts"
)

// OCI is the run as a complete OCI runtime config whose process is the harness.
// An engine runs agentshim-init in its place, which starts the harness with the
// same identity, limits and environment. Secret values stand as in Plan.
func (p Plan) OCI(run RunPaths) *oci.Spec {
	return &oci.Spec{
		Version:  "1.0.2",
		Process:  p.ociProcess(),
		Root:     &oci.Root{Path: "rootfs", Readonly: p.ReadOnlyRootfs},
		Hostname: Hostname,
		Mounts:   p.ociMounts(run),
		Linux:    p.ociLinux(),
	}
}

func (p Plan) ociProcess() *oci.Process {
	caps := make([]string, 0, len(p.Capabilities))
	for _, name := range p.Capabilities {
		caps = append(caps, "CAP_"+name)
	}
	umask := uint32(0o022)
	proc := &oci.Process{
		User: oci.User{UID: p.Identity.UID, GID: p.Identity.GID, AdditionalGids: p.Identity.Groups, Umask: &umask},
		Args: p.Process.Args,
		Cwd:  p.Process.Cwd,
		Capabilities: &oci.LinuxCapabilities{
			Bounding: caps, Effective: caps, Inheritable: []string{}, Permitted: caps, Ambient: []string{},
		},
		Rlimits: []oci.POSIXRlimit{
			{Type: "RLIMIT_CORE", Hard: p.Limits.Core, Soft: p.Limits.Core},
			{Type: "RLIMIT_NOFILE", Hard: p.Limits.NoFile, Soft: p.Limits.NoFile},
			{Type: "RLIMIT_NPROC", Hard: p.Limits.NProc, Soft: p.Limits.NProc},
			{Type: "RLIMIT_NICE"},
			{Type: "RLIMIT_RTPRIO"},
		},
		NoNewPrivileges: true,
	}
	for _, e := range p.Process.Env {
		value := e.Value
		if e.Secret() {
			value = "<" + e.From + ">"
		}
		proc.Env = append(proc.Env, e.Name+"="+value)
	}
	return proc
}

// kernelMounts are those every engine makes.
func (p Plan) kernelMounts() []oci.Mount {
	return []oci.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"ro", "nosuid", "noexec", "nodev"}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
	}
}

func (p Plan) ociMounts(run RunPaths) []oci.Mount {
	out := append(p.kernelMounts(), p.deviceBinds()...)
	for _, m := range p.Mounts {
		m.Source = run.Source(m)
		out = append(out, ociMount(m))
	}
	for _, f := range p.Etc {
		out = append(out, ociMount(mounts.Mount{Type: "bind", Source: path.Join(run.Dir, "etc", f.Name), Target: "/etc/" + f.Name}))
	}
	return append(out, ociMount(mounts.Mount{Type: "bind", Source: run.Init, Target: InitPath}))
}

func ociMount(m mounts.Mount) oci.Mount {
	out := oci.Mount{Destination: m.Target, Type: m.Type, Source: m.Source, Options: []string{"nosuid", "nodev"}}
	if m.NoExec {
		out.Options = append(out.Options, "noexec")
	}
	if m.Type == "tmpfs" {
		out.Source = "tmpfs"
		out.Options = append(out.Options, fmt.Sprintf("mode=%04o", m.Mode), fmt.Sprintf("size=%d", m.SizeBytes))
		if m.UID != 0 || m.GID != 0 {
			out.Options = append(out.Options, fmt.Sprintf("uid=%d", m.UID), fmt.Sprintf("gid=%d", m.GID))
		}
		return out
	}
	if m.Type == mounts.TypeVolume {
		out.Type, out.Source = mounts.TypeBind, path.Join(VolumesDir, VolumeRoot(m.Source))
	}
	out.Options = append([]string{"rbind", "rprivate"}, out.Options...)
	if !m.Writable {
		out.Options = append(out.Options, "ro")
	}
	return out
}

func (p Plan) ociLinux() *oci.Linux {
	l := &oci.Linux{
		Sysctl:        p.Sysctls,
		Devices:       p.deviceNodes(),
		Resources:     p.ociResources(),
		MaskedPaths:   p.MaskedPaths,
		ReadonlyPaths: p.ReadonlyPaths,
		Seccomp:       p.Seccomp.OCI(),
	}
	for _, ns := range p.Namespaces {
		l.Namespaces = append(l.Namespaces, oci.LinuxNamespace{Type: oci.LinuxNamespaceType(ns)})
	}
	if slices.Contains(p.Namespaces, "user") {
		l.UIDMappings = keepID(p.Identity.UID)
		l.GIDMappings = keepID(p.Identity.GID)
	}
	return l
}

// keepID maps id to 0 of the parent, which is the engine's own user namespace,
// where 0 is the caller; the ids below and above keep their order.
func keepID(id uint32) []oci.LinuxIDMapping {
	const size = 65536
	m := []oci.LinuxIDMapping{{ContainerID: id, HostID: 0, Size: 1}}
	if id > 0 {
		m = append([]oci.LinuxIDMapping{{ContainerID: 0, HostID: 1, Size: id}}, m...)
	}
	if id+1 < size {
		m = append(m, oci.LinuxIDMapping{ContainerID: id + 1, HostID: id + 1, Size: size - id - 1})
	}
	return m
}

// cpuPeriod is the engines' CFS period, in microseconds.
const cpuPeriod = 100000

func (p Plan) ociResources() *oci.LinuxResources {
	r := &oci.LinuxResources{Devices: p.deviceRules()}
	l := p.Limits
	if l.MemoryBytes > 0 {
		r.Memory = &oci.LinuxMemory{Limit: &l.MemoryBytes, Swap: &l.MemoryBytes}
	}
	if l.CPUs > 0 {
		quota, period := int64(l.CPUs*cpuPeriod), uint64(cpuPeriod)
		r.CPU = &oci.LinuxCPU{Quota: &quota, Period: &period}
	}
	if l.PIDs > 0 {
		r.Pids = &oci.LinuxPids{Limit: &l.PIDs}
	}
	return r
}

// Device is one device node of every container.
type Device struct {
	// Name is relative to /dev.
	Name  string `json:"name"`
	Major int64  `json:"major"`
	Minor int64  `json:"minor"`
}

// Devices are the nodes in /dev; nothing else may be there.
var Devices = []Device{
	{"full", 1, 7}, {"null", 1, 3}, {"random", 1, 8}, {"tty", 5, 0}, {"urandom", 1, 9}, {"zero", 1, 5},
}

// DeviceAccess is what the device cgroup allows of a host's device: no mknod.
const DeviceAccess = "rw"

// deviceRules is the device cgroup: deny all, then the default nodes, terminals and
// the plan's own devices.
func (p Plan) deviceRules() []oci.LinuxDeviceCgroup {
	out := []oci.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}
	allow := func(major int64, minor *int64, access string) {
		out = append(out, oci.LinuxDeviceCgroup{Allow: true, Type: "c", Major: &major, Minor: minor, Access: access})
	}
	for _, d := range Devices {
		allow(d.Major, &d.Minor, "rwm")
	}
	ptmx := int64(2)
	allow(5, &ptmx, "rwm")
	allow(136, nil, "rwm") // Unix98 terminals
	for _, d := range p.Devices {
		allow(d.Major, &d.Minor, DeviceAccess)
	}
	return out
}

// OCIJSON renders OCI, indented, with a trailing newline.
func (p Plan) OCIJSON(run RunPaths) ([]byte, error) {
	return indent(p.OCI(run))
}

// Text is the plan for people: one fact a line.
func (p Plan) Text() string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-12s %s\n", name, fmt.Sprintf(format, args...))
	}
	line("engine", "%s", p.engineText())
	line("image", "%s (%s)", p.Image.Ref, p.Image.ID)
	line("agent", "uid %d, gid %d%s, from %s; capabilities: %s; no new privileges", p.Identity.UID, p.Identity.GID, p.groupText(), p.Identity.From, p.capText())
	line("program", "%s", quoted(p.Process.Args))
	if p.Process.Provider != "" {
		line("provider", "%s", p.providerText())
	}
	line("folder", "%s", p.Process.Cwd)
	line("variables", "%s", p.envText())
	p.egressText(line)
	for _, published := range p.Publish {
		line("publish", "%s", published.text())
	}
	line("seccomp", "%s", strings.TrimSuffix(p.SeccompDigest+"; "+p.SeccompChanges, "; "))
	line("limits", "%s", p.limitText())
	line("root", "%s", map[bool]string{true: "read-only", false: "writable"}[p.ReadOnlyRootfs])
	for _, m := range p.Mounts {
		line("mount", "%s", mountText(m))
	}
	if p.Copy != nil {
		line("copy", "%s", p.Copy.text())
	}
	for _, d := range p.Devices {
		line("device", "%s: character device %d:%d, read and write, owner %d:%d, mode %04o", d.Path(), d.Major, d.Minor, d.UID, d.GID, d.Mode)
	}
	if len(p.Guards) > 0 {
		line("guards", "%s", p.guardText())
	}
	if p.Git != nil {
		line("git", "%s", p.Git.text())
	}
	if len(p.Caches) > 0 {
		line("caches", "%d; a volume that is missing is made, and given to uid %d by a container that sees it alone, without network, with CHOWN only", len(p.Caches), p.Identity.UID)
	}
	if len(p.CACertificates) > 0 {
		line("trust", "the image's certificates and those in %s, as far as programs obey the variables", quoted(p.CACertificates))
	}
	for _, n := range p.Widenings {
		line("widening", "%s", n.text())
	}
	for _, n := range p.Gaps {
		line("gap", "%s", n.text())
	}
	for _, n := range p.Engine.Notes {
		line("note", "%s", n)
	}
	for _, w := range p.Warnings {
		line("warning", "%s", w)
	}
	return b.String()
}

func (p Plan) engineText() string {
	mode := "rootful"
	if p.Engine.Rootless {
		mode = "rootless"
	}
	return fmt.Sprintf("%s %s, %s, %s %s, cgroup v%d", p.Engine.Kind, p.Engine.Version, mode, p.Engine.Runtime, p.Engine.RuntimeVersion, p.Engine.CgroupVersion)
}

func (p Plan) groupText() string {
	if len(p.Identity.Groups) == 0 {
		return ""
	}
	return ", groups " + strings.Trim(fmt.Sprint(p.Identity.Groups), "[]")
}

func (p Plan) capText() string {
	if len(p.Capabilities) == 0 {
		return "none"
	}
	return strings.Join(p.Capabilities, ", ")
}

// providerText names everything that the provider puts into the sandbox but variables.
func (p Plan) providerText() string {
	text := p.Process.Provider + "; auth " + p.Process.Auth
	for _, e := range p.Process.Env {
		if e.From == fromAuth {
			text += ", variable " + e.Name
		}
	}
	for _, f := range p.HomeFiles {
		if f.Auth != "" {
			text += fmt.Sprintf(", %s as ~/%s", f.what(), f.Target)
		}
	}
	if len(p.Seeds) > 0 {
		names := make([]string, len(p.Seeds))
		for i, s := range p.Seeds {
			names[i] = "~/" + s.Target
		}
		text += "; writes " + strings.Join(names, ", ")
	}
	return text
}

func (p Plan) envText() string {
	out := make([]string, len(p.Process.Env))
	for i, e := range p.Process.Env {
		out[i] = e.Name + " (" + e.From + ")"
	}
	return strings.Join(out, ", ")
}

func (p Plan) limitText() string {
	l := p.Limits
	text := fmt.Sprintf("%d open files, no core dumps", l.NoFile)
	if l.MemoryBytes > 0 {
		text = fmt.Sprintf("%d MiB memory and swap, %g cpus, %d pids, ", l.MemoryBytes/mib, l.CPUs, l.PIDs) + text
	}
	return text
}

func mountText(m mounts.Mount) string {
	access := map[bool]string{true: "writable", false: "read-only"}[m.Writable]
	if m.Type == "tmpfs" {
		return fmt.Sprintf("%s: %s, tmpfs of %d MiB", m.Target, m.Why, m.SizeBytes/mib)
	}
	if m.Type == mounts.TypeVolume {
		return fmt.Sprintf("%s: %s, writable, volume %s, nosuid by %s, nodev by %s", m.Target, m.Why, m.Source, m.NoSUIDBy, m.NoDevBy)
	}
	text := fmt.Sprintf("%s: %s, %s from %q, nosuid by %s, nodev by %s", m.Target, m.Why, access, SymbolicPaths.Source(m), m.NoSUIDBy, m.NoDevBy)
	if m.NoExec {
		text += ", noexec by " + m.NoExecBy
	}
	if m.Label != "" {
		text += ", SELinux label " + m.Label
	}
	return text
}

// guardText counts the guarded paths. Those without a mount of their own are absent, or
// lie below one that has.
func (p Plan) guardText() string {
	mounted := map[string]bool{}
	var workspace mounts.Mount
	for _, m := range p.Mounts {
		if mounted[m.Target] = true; m.Why == mounts.WhyWorkspace {
			workspace = m
		}
	}
	without := 0
	for _, g := range p.Guards {
		if !mounted[path.Join(workspace.Target, g.Rel)] {
			without++
		}
	}
	text := fmt.Sprintf("%d paths of the workspace (format json names them), read-only or hidden where they exist; %d have no mount of their own", len(p.Guards), without)
	if workspace.Writable && workspace.Own == "" {
		text += "; what appears there is said at the end"
	}
	return text
}

func (n Note) text() string {
	switch {
	case n.Accepted:
		return n.Name + " (accepted): " + n.Detail
	default:
		return n.Name + ": " + n.Detail
	}
}

func quoted(words []string) string {
	out := make([]string, len(words))
	for i, w := range words {
		out[i] = fmt.Sprintf("%q", w)
	}
	return strings.Join(out, " ")
}
