package shim

import (
	"fmt"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// Difference is one point where a container is weaker than its plan.
type Difference struct {
	Field string `json:"field"`
	Want  string `json:"want"`
	Got   string `json:"got"`

	// swapped says that a mount shows another file than the one its source was.
	swapped bool
}

func (d Difference) String() string {
	return fmt.Sprintf("%s: want %s, got %s", d.Field, d.Want, d.Got)
}

// attestation compares a hello with a plan, in one direction: what is stricter
// than planned passes, anything weaker or extra is a Difference.
type attestation struct {
	plan  spec.Plan
	host  spec.Host
	own   map[string]fileID
	hello wire.Hello
	diffs []Difference
}

// fileID identifies a file of this host.
type fileID struct{ dev, ino uint64 }

// compare returns every difference, in a fixed order. own identifies agentshim's
// own binds by their target.
func compare(plan spec.Plan, host spec.Host, own map[string]fileID, hello wire.Hello) []Difference {
	a := attestation{plan: plan, host: host, own: own, hello: hello}
	for _, check := range []func(){
		a.readable, a.process, a.identity, a.capabilities, a.privileges, a.syscalls, a.namespaces, a.idMap,
		a.mounts, a.kernelPaths, a.rlimits, a.cgroup, a.descriptors, a.environ, a.devices, a.network, a.lsm, a.system,
	} {
		check()
	}
	return a.diffs
}

func (a *attestation) differ(field, want string, got any) {
	a.diffs = append(a.diffs, Difference{Field: field, Want: want, Got: fmt.Sprint(got)})
}

// equal records a difference unless both values are the same.
func equal[T comparable](a *attestation, field string, want, got T) {
	if want != got {
		a.differ(field, fmt.Sprint(want), got)
	}
}

func (a *attestation) readable() {
	equal(a, "wire version", wire.Version, a.hello.Version)
	for _, name := range slices.Sorted(maps.Keys(a.hello.Errors)) {
		a.differ(name, "readable", a.hello.Errors[name])
	}
}

func (a *attestation) process() {
	equal(a, "pid", 1, a.hello.PID)
	if a.hello.Dumpable == 1 {
		a.differ("dumpable", "0", 1)
	}
	if !slices.Equal(a.hello.Processes, []int{1}) {
		a.differ("processes", "[1]", a.hello.Processes)
	}
}

func (a *attestation) identity() {
	id := a.plan.Identity
	equal(a, "uids", [4]uint32{id.UID, id.UID, id.UID, id.UID}, a.hello.UIDs)
	equal(a, "gids", [4]uint32{id.GID, id.GID, id.GID, id.GID}, a.hello.GIDs)
	for _, g := range a.hello.Groups {
		if g != id.GID && !slices.Contains(id.Groups, g) {
			a.differ("groups", fmt.Sprint(append([]uint32{id.GID}, id.Groups...)), a.hello.Groups)
			return
		}
	}
}

// capabilityBits are the capabilities a plan may name: capabilities(7).
var capabilityBits = map[string]uint64{"CHOWN": 1 << unix.CAP_CHOWN}

func (a *attestation) capabilities() {
	var planned uint64
	for _, name := range a.plan.Capabilities {
		planned |= capabilityBits[name]
	}
	allowed := map[string]uint64{"CapInh": 0, "CapPrm": planned, "CapEff": planned, "CapBnd": planned, "CapAmb": 0}
	for _, set := range slices.Sorted(maps.Keys(allowed)) {
		got, err := strconv.ParseUint(a.hello.Capabilities[set], 16, 64)
		if err != nil || got&^allowed[set] != 0 {
			a.differ("capabilities "+set, fmt.Sprintf("%016x", allowed[set]), a.hello.Capabilities[set])
		}
	}
}

// secbitKeepCaps is SECBIT_KEEP_CAPS: capabilities(7).
const secbitKeepCaps = 1 << 4

func (a *attestation) privileges() {
	equal(a, "no_new_privs", true, a.hello.NoNewPrivs)
	if a.hello.SecureBits&secbitKeepCaps != 0 {
		a.differ("securebits", "no keep_caps", fmt.Sprintf("%#x", a.hello.SecureBits))
	}
	equal(a, "seccomp mode", 2, a.hello.SeccompMode)
	if a.hello.SeccompFilters < 1 {
		a.differ("seccomp filters", "at least 1", a.hello.SeccompFilters)
	}
}

// syscalls compares what the kernel answered with what the policy decides.
func (a *attestation) syscalls() {
	if len(a.hello.Syscalls) != len(wire.Syscalls) {
		a.differ("system calls", fmt.Sprint(len(wire.Syscalls), " tried"), len(a.hello.Syscalls))
		return
	}
	for i, call := range wire.Syscalls {
		v := a.plan.Seccomp.Decide(a.host.Machine.Arch, call.Name, call.Args)
		if v.Action == oci.ActAllow {
			continue
		}
		if want := unix.ErrnoName(v.Errno); a.hello.Syscalls[i] != want {
			a.differ(fmt.Sprintf("system call %s(%d, …)", call.Name, call.Args[0]), want, a.hello.Syscalls[i])
		}
	}
}

// procNames are the OCI namespace types' names in /proc/PID/ns.
var procNames = map[string]string{"mount": "mnt", "network": "net"}

func (a *attestation) namespaces() {
	for _, ns := range a.plan.Namespaces {
		name := ns
		if n, ok := procNames[ns]; ok {
			name = n
		}
		got := a.hello.Namespaces[name]
		if got == "" || got == a.host.Machine.Namespaces[name] {
			a.differ(ns+" namespace", "a private one", "the host's")
		}
	}
}

// idMap checks that on a rootless engine the agent's files are the caller's. With
// keep-id the parent is the engine's user namespace, where 0 is the caller; uid 0
// runs in that namespace itself, whose parent is the host's.
func (a *attestation) idMap() {
	var uid, gid uint32
	switch {
	case strings.HasPrefix(a.plan.Identity.Userns, "keep-id"):
	case a.plan.Engine.Rootless && a.plan.Identity.UID == 0 && a.plan.Identity.Userns == "":
		uid, gid = a.host.Caller.UID, a.host.Caller.GID
	default:
		return
	}
	check := func(field string, m [][3]uint32, id, caller uint32) {
		for _, e := range m {
			if id >= e[0] && id-e[0] < e[2] && e[1]+(id-e[0]) == caller {
				return
			}
		}
		a.differ(field, fmt.Sprintf("%d mapped to the caller", id), m)
	}
	check("uid map", a.hello.UIDMap, a.plan.Identity.UID, uid)
	check("gid map", a.hello.GIDMap, a.plan.Identity.GID, gid)
}

func (a *attestation) kernelPaths() {
	top := a.topMounts()
	for _, p := range a.plan.MaskedPaths {
		m, mounted := top[p]
		if a.exists(p) && (!mounted || !isMask(m)) {
			a.differ("masked path "+p, "masked", "open")
		}
	}
	for _, p := range a.plan.ReadonlyPaths {
		m, mounted := top[p]
		if a.exists(p) && (!mounted || !has(m.Options, "ro") && !isMask(m)) {
			a.differ("read-only path "+p, "read-only", "writable")
		}
	}
}

// exists reports a path below /proc or /sys; one that init did not look for counts
// as existing.
func (a *attestation) exists(p string) bool {
	exists, looked := a.hello.KernelPaths[p]
	return exists || !looked
}

func (a *attestation) rlimits() {
	planned := a.plannedLimits()
	for _, name := range slices.Sorted(maps.Keys(planned)) {
		got, ok := a.hello.Rlimits[name]
		if !ok || got[0] > planned[name] || got[1] > planned[name] {
			a.differ("rlimit "+name, fmt.Sprint("at most ", planned[name]), got)
		}
	}
}

func (a *attestation) cgroup() {
	l, got := a.plan.Limits, a.hello.Cgroup
	bounded := func(field string, want, got int64) {
		if want > 0 && (got < 0 || got > want) {
			a.differ(field, fmt.Sprint("at most ", want), got)
		}
	}
	bounded("memory limit", l.MemoryBytes, got.Memory)
	bounded("memory and swap limit", l.MemoryBytes, got.MemorySwap)
	bounded("pids limit", l.PIDs, got.PIDs)
	if l.CPUs > 0 && (got.CPUQuota < 0 || got.CPUPeriod <= 0 || float64(got.CPUQuota) > l.CPUs*float64(got.CPUPeriod)+1) {
		a.differ("cpu quota", fmt.Sprint("at most ", l.CPUs, " cpus"), fmt.Sprintf("%d/%d", got.CPUQuota, got.CPUPeriod))
	}
}

// descriptors: the three streams and what the Go runtime opened for itself.
func (a *attestation) descriptors() {
	for _, fd := range slices.Sorted(maps.Keys(a.hello.FDs)) {
		link := a.hello.FDs[fd]
		own := fd > 2 && (link == "anon_inode:[eventpoll]" || link == "anon_inode:[eventfd]")
		stream := fd <= 2 && (strings.HasPrefix(link, "pipe:") || strings.HasPrefix(link, "socket:") || link == "/dev/null")
		if !own && !stream {
			a.differ(fmt.Sprintf("descriptor %d", fd), "none", link)
		}
	}
}

// environ: what the engines set by themselves, with harmless values.
func (a *attestation) environ() {
	for _, name := range unplannedVariables(a.hello.Environ) {
		// The value could be a secret of the engine's configuration.
		a.differ("variable "+strconv.Quote(name), "not in init's environment", "set")
	}
}

// unplannedVariables names what neither the plan nor an engine by itself sets.
func unplannedVariables(environ []string) []string {
	allowed := map[string]string{"PATH": spec.DefaultPath, "HOSTNAME": spec.Hostname, "container": "", "HOME": "", "TERM": ""}
	var names []string
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		want, ok := allowed[name]
		if !ok || want != "" && value != want {
			names = append(names, name)
		}
	}
	return names
}

// devLinks are the links the OCI runtime spec asks for; core is optional.
var devLinks = map[string]string{
	"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	"ptmx": "pts/ptmx", "core": "/proc/kcore",
}

func (a *attestation) devices() {
	allowed := map[string]bool{"c 5:2 ptmx": true, "c 5:2 pts/ptmx": true}
	for _, d := range plannedDevices(a.plan) {
		allowed[fmt.Sprintf("c %d:%d %s", d.Major, d.Minor, d.Name)] = true
		for dir := path.Dir(d.Name); dir != "."; dir = path.Dir(dir) {
			allowed["d "+dir] = true
		}
	}
	for name, link := range devLinks {
		allowed["l "+name+" "+link] = true
	}
	var extra []string
	for _, node := range a.hello.DevNodes {
		if !allowed[node] {
			extra = append(extra, strconv.Quote(node))
		}
	}
	if n := len(extra); n > maxNamed {
		extra = append(extra[:maxNamed], fmt.Sprintf("and %d more", n-maxNamed))
	}
	if extra != nil {
		a.differ("device", a.deviceText(), strings.Join(extra, ", "))
	}
}

// deviceText names the planned devices.
func (a *attestation) deviceText() string {
	text := "none but the default ones"
	for _, d := range a.plan.Devices {
		text += fmt.Sprintf(" and %s (%d:%d)", d.Path(), d.Major, d.Minor)
	}
	return text
}

// maxNamed bounds a message: a privileged container has every device of the host.
const maxNamed = 5

func (a *attestation) network() {
	for _, name := range a.plan.Egress.ExtraInterfaces(a.hello.Interfaces) {
		a.differ("interface", fmt.Sprint(a.plan.Egress.Interfaces), strconv.Quote(name))
	}
	network := a.plan.Egress.Network
	if network == nil {
		equal(a, "routes beyond loopback", 0, a.hello.Routes)
	}
	found := network == nil
	for _, text := range a.hello.Addresses {
		name, addr, _ := strings.Cut(text, " ")
		ip, err := netip.ParseAddr(addr)
		own := name == "lo" && ip.IsLoopback()
		given := network != nil && name == network.Interface && network.MayHave(ip)
		if err != nil || !own && !given {
			a.differ("address", "none but loopback's and the network's", strconv.Quote(text))
		}
		found = found || given
	}
	if !found {
		a.differ("address", "one of the network's", a.hello.Addresses)
	}
}

func (a *attestation) lsm() {
	label, confined := a.hello.LSM, true
	switch {
	case a.host.Engine.SELinux:
		confined = confinedSELinux(label)
	case a.host.Engine.AppArmor:
		confined = label != "unconfined" && strings.HasSuffix(label, " (enforce)")
	}
	if !confined {
		a.differ("security module label", "a confined one", strconv.Quote(label))
	}
}

// confinedSELinux reports a label user:role:type:level of a type that engines give
// to containers; spc_t and container_runtime_t are not confined (container-selinux).
func confinedSELinux(label string) bool {
	f := strings.Split(label, ":")
	return len(f) >= 4 && slices.Contains([]string{"container_t", "container_init_t", "container_kvm_t", "svirt_lxc_net_t"}, f[2])
}

func (a *attestation) system() {
	equal(a, "host name", spec.Hostname, a.hello.Hostname)
	if a.hello.Umask&0o022 != 0o022 {
		a.differ("umask", "at least 0022", fmt.Sprintf("%04o", a.hello.Umask))
	}
	for _, name := range slices.Sorted(maps.Keys(a.plan.Sysctls)) {
		got := a.hello.Sysctls[name]
		if name == pingRange && got == unmappedRange && slices.Contains(a.plan.Namespaces, "user") {
			continue // the network probe tries what it means
		}
		equal(a, "sysctl "+name, a.plan.Sysctls[name], got)
	}
}

// The kernel stores an empty ping_group_range as 1 0 of the initial user
// namespace, which another one without these ids shows as the overflow id.
const (
	pingRange     = "net.ipv4.ping_group_range"
	unmappedRange = "65534 65534"
)

// compareProbe returns every way out that the live probe found, or that did not
// answer at once.
func compareProbe(policy netpolicy.Policy, p wire.Probed) []Difference {
	var diffs []Difference
	for _, c := range []struct{ field, got string }{
		{"network probe UDP IPv4", p.UDP4},
		{"network probe UDP IPv6", p.UDP6},
		{"network probe TCP IPv4", p.TCP4},
		{"network probe TCP IPv6", p.TCP6},
		{"network probe AF_VSOCK", p.VSock},
		{"network probe ICMP", p.Ping},
	} {
		if !policy.Refused(c.got) {
			diffs = append(diffs, Difference{Field: c.field, Want: "refused at once", Got: strconv.Quote(c.got)})
		}
	}
	return diffs
}
