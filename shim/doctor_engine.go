package shim

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/spec"
)

// engine looks at one engine and proves it.
func (d *doctor) engine(ctx context.Context, r *report) {
	opts := d.probe
	opts.Engine = r.kind
	if d.ready {
		// Without CacheDir: the doctor asks anew.
		opts.DockerConfig = filepath.Join(d.folders.state, "docker-config")
	}
	rootless := r.kind == spec.Podman && opts.callerUID() != 0
	known := error(nil)
	if rootless {
		known = r.prerequisites(opts)
	}
	if !d.ready {
		r.add("engine", skipped("mend agentshim's folders first", "not asked: agentshim has no folders to work with"))
		return
	}
	a, err := ProbeEngine(ctx, opts)
	if rootless {
		r.add("user namespaces", usernsVerdict(opts, err == nil))
		r.add("network helpers", helpersVerdict(opts))
	}
	if err != nil {
		r.passedOver = passesOver(err)
		r.unusable(unwrapTime(ctx, err), known)
		return
	}
	r.usable = true
	r.describe(ctx, opts, a)
	d.prove(ctx, r, a)
}

// unusable tells why an engine can't be asked, once.
func (r *report) unusable(err, known error) {
	const proof = "no container was started"
	if known != nil && err.Error() == known.Error() {
		r.add("engine", skipped("mend what is above first", "not asked: %s is not set up for this user", r.kind))
	} else {
		r.add("engine", failed(err))
	}
	r.add("proof", skipped("mend what is above first", proof))
}

// prerequisites are what rootless Podman needs before it can be asked. The error is
// the first that a probe would give.
func (r *report) prerequisites(o ProbeOptions) error {
	var first error
	for _, p := range []struct {
		name  string
		check func(ProbeOptions) error
		text  func() string
	}{
		{"runtime folder", checkRuntimeDir, func() string {
			if dir := o.Getenv("XDG_RUNTIME_DIR"); dir != "" {
				return "XDG_RUNTIME_DIR " + dir + " is this user's"
			}
			return "XDG_RUNTIME_DIR is not set: podman makes a folder of its own"
		}},
		{"id helpers", checkUidmap, func() string { return "newuidmap and newgidmap are installed and privileged" }},
		{"subordinate ids", checkSubordinate, func() string {
			uids, gids := subordinate(o)
			if subidElsewhere(o) {
				return "kept by the name service (nsswitch.conf, subid)"
			}
			return fmt.Sprintf("%d uids, %d gids", uids, gids)
		}},
	} {
		err := p.check(o)
		if err != nil {
			r.add(p.name, failed(err))
			if first == nil {
				first = err
			}
			continue
		}
		r.add(p.name, pass("%s", p.text()))
	}
	return first
}

// usernsVerdict names what keeps an ordinary user from making a user namespace. The
// AppArmor restriction lets a program through that has a profile for it, which shows
// only in whether Podman works.
func usernsVerdict(o ProbeOptions, works bool) verdict {
	restricted := fileIs(o.path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"), "1")
	switch {
	case fileIs(o.path("/proc/sys/kernel/unprivileged_userns_clone"), "0"):
		return verdict{Failed, "kernel.unprivileged_userns_clone is 0", "`sysctl kernel.unprivileged_userns_clone=1` as root, and the same line in /etc/sysctl.d"}
	case fileIs(o.path("/proc/sys/user/max_user_namespaces"), "0"):
		return verdict{Failed, "user.max_user_namespaces is 0", "`sysctl user.max_user_namespaces=15000` as root, and the same line in /etc/sysctl.d"}
	case restricted && !works:
		return verdict{
			Failed, "AppArmor keeps programs without a profile from user namespaces (kernel.apparmor_restrict_unprivileged_userns is 1)",
			"install podman from the distribution, whose AppArmor profile allows userns, or `sysctl kernel.apparmor_restrict_unprivileged_userns=0` as root",
		}
	case restricted:
		return pass("podman gets them, through its AppArmor profile")
	case works:
		return pass("podman gets them")
	}
	return pass("no setting forbids them")
}

// helpersVerdict: only an engine's own network needs them; deny-all has none.
func helpersVerdict(o ProbeOptions) verdict {
	const use = "; only a network of podman's own needs it"
	program := ""
	for _, name := range []string{"slirp4netns", "pasta"} {
		_, ok := findProgram(o, filepath.SplitList(systemPath), name)
		if !ok {
			_, ok = lookPath(o, name)
		}
		if ok {
			program = name
			break
		}
	}
	if program == "" {
		return warned("install slirp4netns (`apt install slirp4netns`)", "neither slirp4netns nor pasta is installed%s", use)
	}
	f, err := os.OpenFile(o.path("/dev/net/tun"), os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return warned("`modprobe tun` and `chmod 666 /dev/net/tun` as root", "%s is installed, but %v%s", program, err, use)
	}
	f.Close()
	return pass("%s, /dev/net/tun can be opened", program)
}

// describe adds what the engine said of itself.
func (r *report) describe(ctx context.Context, o ProbeOptions, a Adapter) {
	e := a.Engine()
	r.add("engine", engineVerdict(r.kind, e))
	r.add("versions", versionsVerdict(e))
	r.add("limits", limitsVerdict(e, a.lacks()))
	r.add("selinux", selinuxVerdict(fileIs(o.path("/sys/fs/selinux/enforce"), "1"), pathExists(o.path("/sys/fs/selinux/enforce")), e))
	r.add("netns", netnsVerdict(ctx, o, a))
	if len(e.Dirs) > 0 {
		r.add("disk", diskVerdict(e.Dirs[0], 64*mib, 1024*mib, fmt.Sprintf("`%s system prune`, or give its data folder more room", e.Kind)))
	}
}

func engineVerdict(asked string, e spec.Engine) verdict {
	how := "as root"
	if e.Rootless {
		how = "rootless"
	}
	where := e.Client
	if e.Socket != "" {
		where += ", local daemon on " + e.Socket
	}
	name := e.Kind
	if asked != e.Kind {
		name = fmt.Sprintf("%s by the name of %s,", e.Kind, asked)
	}
	with := e.Runtime + " " + e.RuntimeVersion
	if e.RuntimePath != "" {
		with += " in place of the configured runtime, which refuses these cgroups"
	}
	return pass("%s %s, %s, %s, with %s", name, e.Version, how, where, with)
}

func versionsVerdict(e spec.Engine) verdict {
	var old []string
	for _, p := range [][2]string{{e.Kind, e.Version}, {e.Runtime, e.RuntimeVersion}} {
		if open := openFaults(p[0], p[1]); open != nil {
			old = append(old, fmt.Sprintf("%s %s (%s)", p[0], p[1], strings.Join(open, ", ")))
		}
	}
	if old == nil {
		return pass("no known escape, by number (table of %s)", faultsAsOf)
	}
	return warned("upgrade, or check that the distribution's package has the fix under this number (table of "+faultsAsOf+")",
		"older than a fix, by number: %s", strings.Join(old, "; "))
}

func limitsVerdict(e spec.Engine, lacks []string) verdict {
	mode := fmt.Sprintf("cgroup v%d", e.CgroupVersion)
	if e.CgroupHybrid {
		mode += " beside v2"
	}
	if e.CgroupDriver != "" {
		mode += ", " + e.CgroupDriver
	}
	if len(lacks) == 0 {
		return pass("%s: memory, cpu and pids limits hold", mode)
	}
	remedy := "look for warnings in `docker info`; memory may need the kernel option `cgroup_enable=memory swapaccount=1`"
	switch {
	case e.Rootless && e.CgroupVersion == 1:
		remedy = "boot with cgroups v2 only (`systemd.unified_cgroup_hierarchy=1`), or accept \"rootless-cgroup-limits\" in the harness file"
	case e.Rootless && e.CgroupDriver != "systemd":
		remedy = "log in through systemd (`loginctl enable-linger USER`) so that podman uses it for cgroups, or accept \"rootless-cgroup-limits\""
	case e.Rootless:
		remedy = "delegate them: `Delegate=cpu memory pids` in /etc/systemd/system/user@.service.d/delegate.conf, then log in again"
	case e.Kind == spec.Podman:
		remedy = "boot with the controllers on (`cat /proc/cgroups`; memory may need `cgroup_enable=memory`)"
	}
	return warned(remedy, "%s: limits that do not hold: %s", mode, strings.Join(lacks, ", "))
}

func selinuxVerdict(enforcing, present bool, e spec.Engine) verdict {
	switch {
	case !present:
		return pass("the kernel runs without it")
	case !enforcing:
		return pass("permissive")
	case e.SELinux:
		return pass("enforcing; mounts need \"label\": \"z\" or \"Z\" in the harness file")
	}
	remedy := "install container-selinux"
	if e.Kind == spec.Docker {
		remedy += ", and set \"selinux-enabled\": true in /etc/docker/daemon.json"
	}
	return warned(remedy, "enforcing, but %s does not label its containers", e.Kind)
}

// netnsVerdict tells which way leads into a container's network namespace from
// outside, which an allow-list needs.
func netnsVerdict(ctx context.Context, o ProbeOptions, a Adapter) verdict {
	const none = "; egress deny-all needs no way in"
	needs := []int{unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN}
	switch e := a.Engine(); {
	case o.callerUID() == 0:
		if !hasCapabilities(o, "self", "CapEff", needs...) {
			return warned("run agentshim with CAP_SYS_ADMIN and CAP_NET_ADMIN", "root without the capabilities for setns%s", none)
		}
		return pass("entered by a child, as root")
	case e.Kind == spec.Podman:
		if _, err := runQuestion(ctx, a.Runner(), a.Command("unshare", "true")); err != nil {
			return warned("`podman system migrate`, then try `podman unshare true`", "podman unshare: %v%s", err, none)
		}
		return pass("podman unshare works")
	default:
		pid := dockerPID(ctx, o, a)
		if pid > 0 && !hasCapabilities(o, strconv.Itoa(pid), "CapBnd", unix.CAP_NET_ADMIN) {
			return warned("start dockerd with CAP_NET_ADMIN", "docker's daemon can't give a helper container CAP_NET_ADMIN%s", none)
		}
		return pass("a helper container of the daemon's")
	}
}

func dockerPID(ctx context.Context, o ProbeOptions, a Adapter) int {
	d, ok := a.(*docker)
	if !ok {
		return 0
	}
	peer, err := d.api.peer(ctx)
	if err != nil {
		return 0
	}
	return daemonPID(o, int(peer.Pid))
}

// hasCapabilities reads one set of proc_pid_status(5).
func hasCapabilities(o ProbeOptions, pid, set string, caps ...int) bool {
	data, err := os.ReadFile(o.path(filepath.Join("/proc", pid, "status")))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(data)) {
		value, ok := strings.CutPrefix(line, set+":")
		if !ok {
			continue
		}
		bits, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		return err == nil && !slices.ContainsFunc(caps, func(c int) bool { return bits&(1<<c) == 0 })
	}
	return false
}
