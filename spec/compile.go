package spec

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/seccomp"
)

// Options are what the command line adds to the harness file.
type Options struct {
	// Command is an argv that runs instead of the harness.
	Command []string
	// Interactive starts the provider's form for a person at a terminal.
	Interactive bool
	// Labels are the caller's own, beside the file's.
	Labels map[string]string
	// EnvFiles holds the variable names of each of the file's envFiles, in order.
	EnvFiles [][]string
	// Terminal holds those of TerminalEnv that the caller has set, where its standard
	// input and output are a terminal; nil where they are not.
	Terminal map[string]string
	// PromptPath holds the prompt with promptMode file; empty is PromptPath.
	PromptPath string
	// LearnEgress has the run in egress mode open, whatever the file says but network, which
	// is refused, with the checks of an allow-list.
	LearnEgress bool
}

const mib = 1 << 20

// Compile decides a run. It reads nothing but its arguments. The error is a
// *Refusal, one of the mounts package's, or several of them joined.
func Compile(h harness.Harness, host Host, o Options) (Plan, error) {
	c := compiler{h: h, host: host, o: o}
	c.plan = Plan{
		Version: PlanVersion, Name: h.Name, Engine: host.Engine, Image: host.Image,
		ReadOnlyRootfs: !h.RootfsWritable, Labels: labels(h.Labels, o.Labels),
		Capabilities: slices.Clone(h.Capabilities), CACertificates: h.CACertificates,
	}
	if c.plan.Capabilities == nil {
		c.plan.Capabilities = []string{}
	}
	for _, step := range []func() error{
		c.engine, c.identity, c.image, c.limits, c.mounts, c.copy, c.devices, c.kernel, c.seccomp, c.egress, c.publish, c.process, c.seeds, c.etc, c.notes,
	} {
		c.errs = append(c.errs, step())
	}
	if err := errors.Join(c.errs...); err != nil {
		return Plan{}, err
	}
	return c.plan, nil
}

// labels are both, nil where there is none. The second list is agentshim's own names.
func labels(files, callers map[string]string) map[string]string {
	if len(callers) == 0 {
		return files
	}
	all := maps.Clone(callers)
	maps.Copy(all, files)
	return all
}

// compiler holds a plan in the making. Steps go on after a refusal, so that all
// are reported at once.
type compiler struct {
	h    harness.Harness
	host Host
	o    Options
	plan Plan
	errs []error
	// entered is set for another's container.
	entered *Entered
}

func (c *compiler) podman() bool   { return c.host.Engine.Kind == Podman }
func (c *compiler) rootless() bool { return c.host.Engine.Rootless }

// engine refuses engines whose containers could not keep the plan's promises.
func (c *compiler) engine() error {
	if !c.podman() && c.rootless() {
		return refuse("engine-unsupported", "use rootless Podman, or Docker as root or in the docker group",
			"rootless Docker maps the agent's files to a subordinate uid, not to you")
	}
	if !c.podman() && c.host.Engine.UserNamespace {
		return refuse("engine-unsupported", "use a Docker daemon without userns-remap, or Podman",
			"Docker's userns-remap gives the agent's files to a subordinate uid, not to you")
	}
	return nil
}

// identity decides uid, gid and the user namespace.
func (c *compiler) identity() error {
	id, err := c.who()
	if err != nil {
		return err
	}
	id.Name = "agent"
	if id.UID == 0 {
		id.Name = "root"
	}
	if id.Userns, err = c.userns(id); err != nil {
		return err
	}
	id.Groups, err = c.groups(id)
	c.plan.Identity = id
	if err != nil {
		return err
	}
	if len(c.h.Capabilities) > 0 && id.UID != 0 {
		return refuse("policy", "write \"user\": \"0:0\" and accept \"root-user\", or leave capabilities out",
			"capabilities: CHOWN has no effect for uid %d", id.UID)
	}
	return nil
}

func (c *compiler) who() (Identity, error) {
	caller := c.host.Caller
	switch {
	case c.h.User != "":
		uid, gid, err := parseUser(c.h.User)
		return Identity{UID: uid, GID: gid, From: "user"}, err
	case c.podman() && c.rootless() && c.userNS() != "keep-id":
		return Identity{}, refuse("identity", "add \"user\": \"UID:GID\" to the harness file",
			"userns %q does not say which uid the agent gets", c.h.Userns)
	case caller.UID != 0:
		return Identity{UID: caller.UID, GID: caller.GID, From: "caller"}, nil
	}
	return c.workspaceOwner()
}

// workspaceOwner is who the agent is when root calls: whoever owns the files it works on.
func (c *compiler) workspaceOwner() (Identity, error) {
	const hint = "add \"user\": \"1000:1000\" to the harness file (any uid that may use the files), or call agentshim as that user"
	src, ok := mounts.Workspace(c.h, c.host.Mounts)
	if !ok {
		return Identity{}, refuse("identity", hint, "root calls and there is no workspace whose owner the agent could be")
	}
	if src.UID == 0 {
		return Identity{}, refuse("identity", hint, "root calls and the workspace %q belongs to root", c.h.Workspace.Source)
	}
	gid := src.GID
	if gid == 0 {
		gid = src.UID // group root would open the image's group-readable files
	}
	return Identity{UID: src.UID, GID: gid, From: "workspace"}, nil
}

func parseUser(s string) (uid, gid uint32, err error) {
	u, g, _ := strings.Cut(s, ":")
	a, err1 := strconv.ParseUint(u, 10, 32)
	b, err2 := strconv.ParseUint(g, 10, 32)
	if err1 != nil || err2 != nil {
		return 0, 0, refuse("spec-invalid", "write UID:GID as two decimal numbers", "user %q", s)
	}
	return uint32(a), uint32(b), nil
}

// userNS is the intent: keep-id when rootless, unless the file says otherwise.
func (c *compiler) userNS() string {
	if c.h.Userns == "" && c.podman() && c.rootless() {
		return "keep-id"
	}
	return c.h.Userns
}

// userns renders the intent for the engine that answered, whatever its name.
func (c *compiler) userns(id Identity) (string, error) {
	intent := c.userNS()
	if !c.podman() {
		if intent == "auto" {
			return "", refuse("policy", "leave userns out", "userns \"auto\" exists with Podman only")
		}
		return "", nil // keep-id: the uid is given by --user and is the host's own
	}
	if !c.rootless() && intent == "keep-id" {
		return "", refuse("policy", "leave userns out, or run Podman as an ordinary user", "rootful Podman has no userns \"keep-id\"")
	}
	if intent == "auto" && len(c.h.Caches) > 0 {
		return "", refuse("policy", "leave userns out, or the caches",
			"userns \"auto\" gives the agent another id on the host in every run, so that a cache of an earlier run is not its own")
	}
	if intent == "engine" || intent == "" {
		return "", c.mapped(id)
	}
	if intent != "keep-id" {
		return intent, nil
	}
	if err := c.mapped(id); err != nil {
		return "", err
	}
	switch {
	case c.h.User == "":
		return "keep-id", nil
	case id.UID == 0 && id.GID == 0:
		// Podman's own mapping makes the caller 0:0. With keep-id and an id of 0 it
		// makes an empty range, which no runtime can write (Podman 4.3).
		return "", nil
	case id.UID == 0 || id.GID == 0:
		return "", refuse("identity", "choose uid and gid both 0, or neither",
			"rootless Podman can't keep your id as user %d:%d", id.UID, id.GID)
	}
	return fmt.Sprintf("keep-id:uid=%d,gid=%d", id.UID, id.GID), nil
}

// mapped refuses ids outside the caller's subordinate ranges: the engine would
// end with "invalid argument".
func (c *compiler) mapped(id Identity) error {
	if !c.rootless() {
		return nil
	}
	own := id.From == "caller"
	if !own && (id.UID > c.host.Caller.SubUIDs || id.GID > c.host.Caller.SubGIDs) {
		return refuse("identity", "choose a smaller uid:gid, or give yourself a longer range in /etc/subuid and /etc/subgid",
			"user %d:%d lies outside your subordinate ranges of %d uids and %d gids", id.UID, id.GID, c.host.Caller.SubUIDs, c.host.Caller.SubGIDs)
	}
	return nil
}

// image compares the image with the identity and platform.
func (c *compiler) image() error {
	user, _, _ := strings.Cut(c.host.Image.User, ":")
	uid, err := strconv.ParseUint(user, 10, 32)
	if err != nil || c.h.User != "" || uint32(uid) == c.plan.Identity.UID {
		return nil // a name says nothing about the uid; "" is the default
	}
	return refuse("image-user", fmt.Sprintf("add \"user\": \"%d:%d\" to run as you do now, or the image's own uid", c.plan.Identity.UID, c.plan.Identity.GID),
		"image %q is made for uid %d, the agent would be uid %d", c.host.Image.Ref, uid, c.plan.Identity.UID)
}

// Default limits.
const (
	defaultMemoryMB = 8192
	tmpfsReserve    = 64 * mib
)

func (c *compiler) limits() error {
	r, caller, m := c.h.Resources, c.host.Caller, c.host.Machine
	l := Limits{
		NoFile: min(uint64(r.NoFile), caller.HardNoFile), NProc: caller.HardNProc,
		ShmBytes: int64(r.ShmMB) * mib,
	}
	if c.host.Engine.LimitsHold {
		l.PIDs = int64(r.PIDs)
		l.MemoryBytes = min(int64(r.MemoryMB)*mib, m.MemoryBytes)
		if r.MemoryMB == 0 {
			l.MemoryBytes = min(m.MemoryBytes/2, defaultMemoryMB*mib) / mib * mib
		}
		l.CPUs = math.Min(r.CPUs, float64(caller.CPUs))
		if r.CPUs == 0 {
			l.CPUs = float64(caller.CPUs)
		}
	}
	c.plan.Limits = l
	return nil
}

func (c *compiler) mounts() error {
	set, err := mounts.Compile(c.h, c.host.Mounts, mounts.Target{
		Podman: c.podman(), Rootless: c.rootless(), UID: c.plan.Identity.UID, GID: c.plan.Identity.GID,
		MemoryBytes: c.plan.Limits.MemoryBytes, ImageID: c.host.Image.ID, ImageVolumes: c.host.Image.Volumes, SELinux: c.host.Engine.SELinux,
	})
	if err != nil {
		return err
	}
	c.plan.Mounts, c.plan.Caches, c.plan.Guards, c.plan.Warnings = set.Mounts, set.Caches, set.Guards, set.Warnings
	if err := c.git(set.Git); err != nil {
		return err
	}
	for _, t := range set.BindNoExec {
		c.gap("bind-noexec", true, "Docker can't mount %s noexec: programs in it can run", t)
	}
	for _, f := range c.h.Home.Files {
		c.plan.HomeFiles = append(c.plan.HomeFiles, HomeFile{Source: f.Source, Target: f.Target, WriteBack: f.WriteBack, Auth: f.Auth, Members: f.Members})
	}
	return nil
}

// The engines' own lists (Docker 20.10, Podman 4.3). An engine may cover more.
var (
	maskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug",
		"/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/firmware",
	}
	podmanMasked = []string{"/sys/dev/block", "/sys/fs/selinux"}
	// podmanUnmasked are only read-only by default with Podman.
	podmanUnmasked = []string{"/proc/asound"}
	readonlyPaths  = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// kernel decides namespaces, kernel paths and sysctls.
func (c *compiler) kernel() error {
	p := &c.plan
	p.Namespaces = []string{"cgroup", "ipc", "mount", "network", "pid", "uts"}
	if p.Identity.Userns != "" || c.rootless() {
		p.Namespaces = append(p.Namespaces, "user")
	}
	p.MaskedPaths = slices.Clone(maskedPaths)
	if c.podman() {
		p.MaskedPaths = append(p.MaskedPaths, podmanMasked...)
		slices.Sort(p.MaskedPaths)
	}
	p.ReadonlyPaths = slices.Clone(readonlyPaths)
	err := c.unmask()
	p.Sysctls = map[string]string{
		// No group may open ICMP sockets; ports below 1024 are the sandbox's own.
		"net.ipv4.ping_group_range":           "1 0",
		"net.ipv4.ip_unprivileged_port_start": "0",
	}
	if c.host.Machine.IPv6 {
		// Docker turns IPv6 off in a container without a network, and with it ::1.
		p.Sysctls["net.ipv6.conf.all.disable_ipv6"] = "0"
	}
	return err
}

// unmask opens all of /proc for a sandbox of the agent's own: the kernel gives a user namespace
// a fresh one only where nothing of the one that is there is covered or read-only (mount_too_revealing,
// Linux 4.2). It is the one thing that a file asks for by accepting it, and no more than a
// policy that lets such a sandbox be made has use for.
func (c *compiler) unmask() error {
	const name = "unmasked-proc"
	if c.h.Seccomp.Profile != "nested" || !slices.Contains(c.h.Accept, name) {
		return nil
	}
	p := &c.plan
	inProc := func(path string) bool { return strings.HasPrefix(path, "/proc/") }
	p.MaskedPaths = slices.DeleteFunc(p.MaskedPaths, inProc)
	p.ReadonlyPaths = slices.DeleteFunc(p.ReadonlyPaths, inProc)
	c.widen(name, true, "nothing of /proc is masked or read-only: the agent can read the names of keys, devices, file systems and what else the host's kernel shows to everyone there, "+
		"and can mount a fresh /proc in a namespace of its own; the kernel's settings stay as they are, since they belong to uid 0")
	if p.Identity.UID == 0 {
		// uid 0 of the host needs no capability for /proc/sys/kernel/core_pattern, uid 0 of the
		// sandbox none for the settings of its network: proc_sys_permission, net_ctl_permissions.
		return refuse("policy", `write another "user", or take "unmasked-proc" out of accept`,
			"unmasked-proc: uid 0 could write the kernel's settings in /proc/sys, without any capability")
	}
	return nil
}

func (c *compiler) seccomp() error {
	policy, err := Seccomp(c.h, c.host)
	if err != nil {
		return err
	}
	c.plan.Seccomp, c.plan.SeccompDigest, c.plan.SeccompChanges = policy, "sha256:"+policy.Digest(), policy.Summary()
	for _, o := range policy.Openings() {
		c.widen(o.Name, o.NeedsAccept, "%s", o.Detail)
	}
	c.plan.Warnings = append(c.plan.Warnings, policy.Remarks()...)
	return c.loose()
}

// loose says what a policy that lets the agent leave its mounts behind does to the guards:
// the files behind them stay as they are, but not at their places.
func (c *compiler) loose() error {
	w := c.h.Workspace
	if !c.plan.Seccomp.LooseMounts() || w == nil || w.Mode != "writable" {
		return nil
	}
	if len(w.Protect) > 0 {
		return refuse("policy", `leave protect out, or use workspace.mode "copy" or another seccomp.profile`,
			"workspace.protect can't be held: with this seccomp policy the agent can move a protected path away, in a mount namespace of its own, and put another in its place")
	}
	c.widen("loose-guards", false, "in a mount namespace of its own the agent can move guarded paths, .git too, and put others in their places; the end reports it")
	return nil
}

// Seccomp is the system call policy of a run alone: of the host it takes the engine's kind, the
// machine's architecture and SeccompFile. What it opens is not compared with accept.
func Seccomp(h harness.Harness, host Host) (*seccomp.Policy, error) {
	policy, err := seccomp.Compile(h.Seccomp, seccomp.Target{Arch: host.Machine.Arch, Docker: host.Engine.Kind != Podman, File: host.SeccompFile})
	if err != nil {
		return nil, seccompRefusal(err)
	}
	return policy, nil
}

// seccompRefusal gives each problem of the file's policy its remedy.
func seccompRefusal(err error) error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return refuse("policy", "use an amd64 or arm64 machine", "seccomp: %v", err)
	}
	var errs []error
	for _, e := range joined.Unwrap() {
		var p *seccomp.Problem
		if errors.As(e, &p) {
			e = refuse("policy", p.Remedy, "%s", p)
		}
		errs = append(errs, e)
	}
	return errors.Join(errs...)
}

// notes adds what holds for the whole plan and refuses what is not accepted.
func (c *compiler) notes() error {
	c.hostNotes()
	c.fileNotes()
	c.egressNotes()
	c.publishNotes()
	return c.accepted()
}

// accepted refuses what is not accepted.
func (c *compiler) accepted() error {
	var errs []error
	for i, notes := range [][]Note{c.plan.Widenings, c.plan.Gaps} {
		reason := []string{"widening", "gap"}[i]
		for j, n := range notes {
			notes[j].Accepted = n.NeedsAccept && slices.Contains(c.h.Accept, n.Name)
			if n.NeedsAccept && !notes[j].Accepted {
				errs = append(errs, refuse(reason, fmt.Sprintf("add %q to \"accept\" in the harness file if you mean it", n.Name), "%s: %s", n.Name, n.Detail))
			}
		}
	}
	return errors.Join(errs...)
}

func (c *compiler) hostNotes() {
	if !c.host.Engine.LimitsHold {
		c.gap("rootless-cgroup-limits", true, "memory, cpus and pids limits have no effect on this host; the tmpfs sizes are the only bound")
	}
	if c.podman() {
		c.gap("tmpfs-inodes", false, "Podman can't bound the number of files in a tmpfs; the memory limit is the bound")
	}
	if !slices.Contains(c.plan.Namespaces, "user") {
		c.gap("shared-uid-quotas", false, "without a user namespace, the kernel's per-uid quotas are shared with uid %d on the host", c.plan.Identity.UID)
	}
}

func (c *compiler) fileNotes() {
	if g := c.plan.Git; g != nil && g.Mode == mounts.GitShared {
		c.widen("git-shared", false, "%s", g.shared(c.h.Workspace.Mode == "writable"))
	}
	if c.plan.Identity.UID == 0 {
		c.widen("root-user", true, "the agent is uid 0 inside the container")
	}
	for _, name := range c.plan.Capabilities {
		c.widen("capability:"+name, false, "the agent holds CAP_%s", name)
	}
	c.groupNotes()
	for _, d := range c.plan.Devices {
		c.widen("device:"+d.Path(), true, "the agent can read and write %s, the host's character device %d:%d", d.Path(), d.Major, d.Minor)
	}
	if c.h.RootfsWritable {
		c.widen("rootfs-writable", false, "the root file system is writable; what is written is gone at the end")
	}
	for _, m := range c.plan.Mounts {
		if m.Type == "bind" && m.Writable && m.Own == "" && m.Why != mounts.WhyGuard { // a guard is part of the workspace
			c.widen("writable:"+m.Target, false, "the agent can change %s on the host", shownPath(m.Source))
		}
		if m.Label != "" && m.Own == "" {
			c.widen("relabel:"+m.Target, false, "the engine changes the SELinux label of %s on the host, which stays after the run", shownPath(m.Source))
		}
	}
	for _, cache := range c.plan.Caches {
		c.widen("cache:"+cache.Target, false, "what the agent leaves in cache %q outlasts the run, and later runs of this project and image start with it", cacheLabel(cache.ID))
	}
	for _, name := range c.callerEnv() {
		c.widen("env:"+name, false, "the agent sees the caller's variable %s", name)
	}
	for _, f := range c.plan.HomeFiles {
		c.widen("home-file:"+f.Target, false, "the agent gets a copy of %s", f.what())
		if f.WriteBack {
			c.widen("write-back:"+f.Target, false, "the agent decides what %s on the host holds after the run", f.what())
		}
	}
	if f := c.h.OutputFile; f != "" {
		c.widen("output-file:"+f, false, "what the agent leaves at %s is appended to the file that the caller's %s names", f, OutputVariable)
	}
	if m := c.plan.Process.PromptMode; m == "arg" || m == "flag" {
		c.widen("prompt-in-argv", false, "the prompt stands in the agent's own argv, which ps on the host shows; promptMode stdin and file do not")
	}
}

// callerEnv names the caller's variables that the agent sees, sorted.
func (c *compiler) callerEnv() []string {
	names := slices.Concat(c.h.EnvFrom, c.h.Harness.AuthEnv)
	slices.Sort(names)
	return slices.Compact(names)
}

// what is the host's file, or the part of it that is taken.
func (f HomeFile) what() string {
	if len(f.Members) == 0 {
		return f.Source
	}
	return fmt.Sprintf("%s (%s)", f.Source, strings.Join(f.Members, ", "))
}

// shownPath is a host's path as it is where all of it prints, else as a Go string in quotes:
// a line of the plan is never another's.
func shownPath(p string) string {
	if q := strconv.Quote(p); q[1:len(q)-1] != p {
		return q
	}
	return p
}

func (c *compiler) widen(name string, needsAccept bool, format string, args ...any) {
	c.plan.Widenings = append(c.plan.Widenings, Note{Name: name, NeedsAccept: needsAccept, Detail: fmt.Sprintf(format, args...)})
}

func (c *compiler) gap(name string, needsAccept bool, format string, args ...any) {
	c.plan.Gaps = append(c.plan.Gaps, Note{Name: name, NeedsAccept: needsAccept, Detail: fmt.Sprintf(format, args...)})
}

// sortedKeys is the one way a map reaches argv or JSON here.
func sortedKeys[V any](m map[string]V) []string {
	return slices.Sorted(maps.Keys(m))
}
