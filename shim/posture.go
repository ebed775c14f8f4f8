package shim

import (
	"fmt"
	"maps"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// Finding is one point of a container that is not agentshim's, as it was found.
type Finding struct {
	Name string `json:"name"`
	// Open says that the container gives the agent more there than agentshim's own would.
	Open bool `json:"open"`
	// Detail may hold what the container's owner chose.
	Detail string `json:"detail"`
}

func (f Finding) String() string {
	return map[bool]string{true: "open: ", false: "closed: "}[f.Open] + f.Name + ": " + f.Detail
}

// posture is what init saw of a container and what the engine says of it, compared with
// what agentshim's own would be.
type posture struct {
	attestation
	container foreign
	// image is the file's as the engine knows it; its error where it does not.
	image    spec.Image
	imageErr error
	list     []Finding
}

// findings are in a fixed order. Nothing in them is a promise: who owns the container can change
// it at any time, and what init sees with it.
func (p *posture) findings() []Finding {
	for _, look := range []func(){
		p.fileImage, p.user, p.capabilitySets, p.privilegesGained, p.filter, p.openCalls, p.root, p.shared, p.engineWord,
		p.openKernelPaths, p.interfaces, p.writableMounts, p.sockets, p.extraDevices, p.absentLimits, p.label, p.unknown,
	} {
		look()
	}
	return p.list
}

func (p *posture) find(name string, open bool, format string, args ...any) {
	p.list = append(p.list, Finding{Name: name, Open: open, Detail: fmt.Sprintf(format, args...)})
}

// found is a finding that is open where there is something to list.
func (p *posture) found(name string, list []string, none string) {
	if len(list) == 0 {
		p.find(name, false, "%s", none)
		return
	}
	p.find(name, true, "%s", some(list))
}

// maxListed bounds a list in a line.
const maxListed = 12

func some(list []string) string {
	if n := len(list); n > maxListed {
		list = append(list[:maxListed:maxListed], fmt.Sprintf("and %d more", n-maxListed))
	}
	return strings.Join(list, ", ")
}

func (p *posture) fileImage() {
	switch ref := strconv.Quote(p.image.Ref); {
	case p.imageErr != nil:
		p.find("image", true, "the file's image can't be compared: %v", p.imageErr)
	case p.image.ID != p.container.Image:
		p.find("image", true, "not the file's %s", ref)
	default:
		p.find("image", false, "the file's %s", ref)
	}
}

func (p *posture) user() {
	h := p.hello
	p.find("user", h.UIDs[0] == 0, "uid %d, gid %d, groups %v", h.UIDs[0], h.GIDs[0], h.Groups)
}

// capabilitySets names the capabilities of each set that has some; sets that are the same
// stand together.
func (p *posture) capabilitySets() {
	names := map[string]string{}
	var order []string
	for _, set := range []struct{ file, word string }{
		{"CapEff", "effective"}, {"CapPrm", "permitted"}, {"CapInh", "inheritable"}, {"CapAmb", "ambient"}, {"CapBnd", "bounding"},
	} {
		mask, err := strconv.ParseUint(p.hello.Capabilities[set.file], 16, 64)
		if err != nil {
			p.find("capabilities", true, "%s: unknown", set.word)
			return
		}
		if mask == 0 {
			continue
		}
		text := capabilityNames(mask)
		if names[text] == "" {
			order = append(order, text)
			names[text] = set.word
			continue
		}
		names[text] += ", " + set.word
	}
	var list []string
	for _, text := range order {
		list = append(list, names[text]+": "+text)
	}
	p.find("capabilities", len(list) > 0, "%s", orNone(strings.Join(list, "; ")))
}

func orNone(text string) string {
	if text == "" {
		return "none"
	}
	return text
}

// capabilityNameList are the names by number: capabilities(7).
var capabilityNameList = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP
	LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT
	SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE
	AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE`)

// fewMissing is when it is shorter to name the capabilities that are not there.
const fewMissing = 5

func capabilityNames(mask uint64) string {
	missing := (1<<len(capabilityNameList) - 1) &^ mask
	switch n := bits.OnesCount64(missing); {
	case n == 0:
		return "all"
	case n <= fewMissing:
		return "all but " + capabilityNames(missing)
	}
	var names []string
	for bit := range 64 {
		switch {
		case mask&(1<<bit) == 0:
		case bit < len(capabilityNameList):
			names = append(names, capabilityNameList[bit])
		default:
			names = append(names, strconv.Itoa(bit))
		}
	}
	return strings.Join(names, " ")
}

func (p *posture) privilegesGained() {
	p.find("no-new-privileges", !p.hello.NoNewPrivs, "%s", map[bool]string{true: "set", false: "not set"}[p.hello.NoNewPrivs])
}

func (p *posture) filter() {
	filtered := p.hello.SeccompMode == 2
	p.find("seccomp", !filtered, "mode %d, %d filters", p.hello.SeccompMode, p.hello.SeccompFilters)
}

// openCalls are those of the tried system calls that agentshim's policy refuses and this
// container does not: the kernel got as far as judging their arguments.
func (p *posture) openCalls() {
	var list []string
	for i, call := range wire.Syscalls[:min(len(wire.Syscalls), len(p.hello.Syscalls))] {
		ours := p.plan.Seccomp.Decide(p.host.Machine.Arch, call.Name, call.Args)
		refused := []string{"EPERM", "EACCES", "ENOSYS", unix.ErrnoName(ours.Errno)}
		if ours.Action != oci.ActAllow && !slices.Contains(refused, p.hello.Syscalls[i]) {
			list = append(list, call.Name)
		}
	}
	p.found("system-calls", slices.Compact(list), fmt.Sprintf("none of the %d tried ones that agentshim's policy refuses", len(wire.Syscalls)))
}

func (p *posture) root() {
	m, ok := p.topMounts()["/"]
	writable := !ok || !has(m.Options, "ro") && !has(m.Super, "ro")
	p.find("root", writable, "the root file system is %s", map[bool]string{true: "writable", false: "read-only"}[writable])
}

// shared are the namespaces that are the host's, as far as the caller's own are.
func (p *posture) shared() {
	var list []string
	for _, name := range []string{"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"} {
		got := p.hello.Namespaces[name]
		if got == "" || got == p.host.Machine.Namespaces[name] {
			list = append(list, name)
		}
	}
	p.found("shared-namespaces", list, "none are the host's")
}

// engineWord is what only the engine tells.
func (p *posture) engineWord() {
	var list []string
	h := p.container.HostConfig
	if h.Privileged {
		list = append(list, "privileged")
	}
	for _, mode := range []struct{ name, value string }{{"pid", h.PidMode}, {"network", h.NetworkMode}, {"ipc", h.IpcMode}, {"uts", h.UTSMode}} {
		if mode.value == "host" || strings.HasPrefix(mode.value, "container:") {
			list = append(list, mode.name+" "+strconv.Quote(mode.value))
		}
	}
	for _, opt := range h.SecurityOpt {
		if strings.Contains(opt, "unconfined") || strings.Contains(opt, "disable") || strings.Contains(opt, "unmask") {
			list = append(list, strconv.Quote(opt))
		}
	}
	p.found("engine", list, "it says neither privileged, nor a namespace of another's, nor a control that is off")
}

func (p *posture) openKernelPaths() {
	a := attestation{plan: p.plan, hello: p.hello}
	a.kernelPaths()
	var list []string
	for _, d := range a.diffs {
		list = append(list, d.Field+" is "+d.Got)
	}
	p.found("kernel-paths", list, "what engines mask and make read-only is so")
}

func (p *posture) interfaces() {
	var list []string
	if p.hello.Routes > 0 {
		list = append(list, fmt.Sprintf("%d routes", p.hello.Routes))
	}
	for _, name := range p.hello.Interfaces {
		if name != "lo" {
			list = append(list, strconv.Quote(name))
		}
	}
	for _, text := range p.hello.Addresses {
		name, addr, _ := strings.Cut(text, " ")
		if ip, err := netip.ParseAddr(addr); err != nil || !ip.IsLoopback() {
			list = append(list, strconv.Quote(name+" "+addr))
		}
	}
	p.found("network", list, "loopback only")
}

// pseudoTypes are file systems that hold nothing of a disk's.
var pseudoTypes = []string{"cgroup", "cgroup2", "devpts", "mqueue", "proc", "sysfs", "tmpfs", "devtmpfs"}

// engineFiles are an engine's own in every container.
var engineFiles = []string{"/", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/run/.containerenv"}

// source is where the engine says that a mount comes from.
func (p *posture) source(target string) string {
	for _, m := range p.container.Mounts {
		if m.Destination == target {
			return fmt.Sprintf("%s (%s %s)", strconv.Quote(target), m.Type, strconv.Quote(m.Source))
		}
	}
	return strconv.Quote(target)
}

func (p *posture) writableMounts() {
	var list []string
	for _, m := range p.hello.Mounts {
		given := slices.ContainsFunc(p.container.Mounts, func(g foreignMount) bool { return g.Destination == m.Target && g.Type != "tmpfs" })
		disk := given || !slices.Contains(pseudoTypes, m.Type) && !slices.Contains(engineFiles, m.Target)
		if disk && has(m.Options, "rw") && !has(m.Super, "ro") && !isSocket(m) {
			list = append(list, p.source(m.Target))
		}
	}
	p.found("writable-mounts", list, "no folder or file of elsewhere is writable")
}

func isSocket(m wire.Mount) bool { return m.Mode&unix.S_IFMT == unix.S_IFSOCK }

// sockets are mounted ones. Those in a mounted folder are not looked for.
func (p *posture) sockets() {
	var list []string
	for _, m := range p.hello.Mounts {
		if isSocket(m) {
			list = append(list, p.source(m.Target))
		}
	}
	p.found("sockets", list, "none is mounted by itself")
}

func (p *posture) extraDevices() {
	a := attestation{hello: p.hello}
	a.devices()
	var list []string
	for _, d := range a.diffs {
		list = append(list, d.Got)
	}
	p.found("devices", list, "none but the default ones")
}

func (p *posture) absentLimits() {
	var list []string
	for _, limit := range []struct {
		name string
		got  int64
	}{{"memory", p.hello.Cgroup.Memory}, {"cpu", p.hello.Cgroup.CPUQuota}, {"pids", p.hello.Cgroup.PIDs}} {
		switch {
		case limit.got == -1:
			list = append(list, "no "+limit.name+" limit")
		case limit.got < 0:
			list = append(list, limit.name+" unknown")
		}
	}
	p.found("limits", list, "memory, cpu and pids are limited")
}

func (p *posture) label() {
	label := p.hello.LSM
	confined := confinedSELinux(label) || label != "unconfined" && strings.HasSuffix(label, " (enforce)")
	if label == "" {
		p.find("security-module", true, "no label")
		return
	}
	p.find("security-module", !confined, "%s", strconv.Quote(label))
}

func (p *posture) unknown() {
	for _, name := range slices.Sorted(maps.Keys(p.hello.Errors)) {
		p.find("unknown", true, "%s: %s", name, p.hello.Errors[name])
	}
}
