package shim

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentshim/agentshim/spec"
)

// configured is a base with the OCI config that its engine wrote. The policy is
// put in again: its rules change more often than what engines do with them, which
// the tests with engines compare.
type configured struct {
	base
	config oci.Spec
}

func mustConfig(t testing.TB, name string) configured {
	t.Helper()
	c := configured{base: mustBase(t, name)}
	mustRead(t, "config-"+name+".json", &c.config)
	c.config.Linux.Seccomp = c.plan.Seccomp.OCI()
	return c
}

func (c configured) compareConfig() []Difference {
	return compareConfig(c.plan, c.host, c.run, &c.config)
}

func TestCompareRealConfigs(t *testing.T) {
	for _, name := range []string{dockerRoot, "podman-root", rootless} {
		t.Run(name, func(t *testing.T) {
			if diffs := mustConfig(t, name).compareConfig(); diffs != nil {
				t.Error(diffs)
			}
		})
	}
}

// The plan's own config is no weaker than the plan, but for its process.
func TestComparePlannedConfig(t *testing.T) {
	b := mustBase(t, "podman-root")
	got := b.plan.OCI(b.run)
	got.Process.Args, got.Process.Env = initArgs, nil
	got.Root.Path = b.Engine.Dirs[0] + "/overlay/x/merged"
	if diffs := compareConfig(b.plan, b.host, b.run, got); diffs != nil {
		t.Error(diffs)
	}
}

func (c *configured) mount(target string) *oci.Mount {
	i := slices.IndexFunc(c.config.Mounts, func(m oci.Mount) bool { return m.Destination == target })
	return &c.config.Mounts[i]
}

func (c *configured) namespace(name string) *oci.LinuxNamespace {
	i := slices.IndexFunc(c.config.Linux.Namespaces, func(n oci.LinuxNamespace) bool { return string(n.Type) == name })
	return &c.config.Linux.Namespaces[i]
}

func (c *configured) allow(kind string, major, minor int64) {
	r := c.config.Linux.Resources
	r.Devices = append(r.Devices, oci.LinuxDeviceCgroup{Allow: true, Type: kind, Major: &major, Minor: &minor, Access: "rwm"})
}

func ptr[T any](v T) *T { return &v }

var weakerConfigs = []struct {
	name, base, want string
	change           func(*configured)
}{
	{"no process", dockerRoot, "", func(c *configured) { c.config.Process = nil }},
	{"another program", dockerRoot, "args", func(c *configured) { c.config.Process.Args = []string{"/bin/sh"} }},
	{"engine's init", rootless, "args", func(c *configured) {
		c.config.Process.Args = append([]string{"/dev/init", "--"}, c.config.Process.Args...)
	}},
	{"terminal", dockerRoot, "terminal", func(c *configured) { c.config.Process.Terminal = true }},
	{"new privileges", rootless, "no_new_privs", func(c *configured) { c.config.Process.NoNewPrivileges = false }},
	{"spared by the kernel", dockerRoot, "oom_score_adj", func(c *configured) { c.config.Process.OOMScoreAdj = ptr(-1) }},
	{"realtime", rootless, "scheduler", func(c *configured) { c.config.Process.Scheduler = &oci.Scheduler{Policy: oci.SchedFIFO} }},
	{"variable", dockerRoot, `variable "GOGC"`, func(c *configured) { c.config.Process.Env = append(c.config.Process.Env, "GOGC=1") }},
	{"uid", dockerRoot, "user", func(c *configured) { c.config.Process.User.UID = 0 }},
	{"gid", rootless, "user", func(c *configured) { c.config.Process.User.GID = 0 }},
	{"group", dockerRoot, "groups", func(c *configured) { c.config.Process.User.AdditionalGids = []uint32{0} }},
	{"bounding", dockerRoot, "capabilities bounding", func(c *configured) { c.config.Process.Capabilities.Bounding = []string{"CAP_CHOWN"} }},
	{"effective", dockerRoot, "capabilities effective", func(c *configured) { c.config.Process.Capabilities.Effective = []string{"CAP_CHOWN"} }},
	{"permitted", dockerRoot, "capabilities permitted", func(c *configured) { c.config.Process.Capabilities.Permitted = []string{"CAP_CHOWN"} }},
	{"inheritable", dockerRoot, "capabilities inheritable", func(c *configured) { c.config.Process.Capabilities.Inheritable = []string{"CAP_CHOWN"} }},
	{"ambient", dockerRoot, "capabilities ambient", func(c *configured) { c.config.Process.Capabilities.Ambient = []string{"CAP_CHOWN"} }},
	{"limit", dockerRoot, "rlimit nofile", func(c *configured) {
		for i := range c.config.Process.Rlimits {
			if l := &c.config.Process.Rlimits[i]; l.Type == "RLIMIT_NOFILE" {
				l.Hard = 1 << 20
			}
		}
	}},
	{"another limit", rootless, "rlimit memlock", func(c *configured) {
		c.config.Process.Rlimits = append(c.config.Process.Rlimits, oci.POSIXRlimit{Type: "RLIMIT_MEMLOCK", Hard: 1 << 40})
	}},
	{"no AppArmor", dockerRoot, "apparmor profile", func(c *configured) { c.host.Engine.AppArmor = true }},
	{"no SELinux", dockerRoot, "selinux label", func(c *configured) { c.host.Engine.SELinux = true }},
	{"writable root", dockerRoot, "root", func(c *configured) { c.config.Root.Readonly = false }},
	{"a folder of the host as root", "podman-root", "root", func(c *configured) { c.config.Root.Path = "/" }},
	{"host name", rootless, "host name", func(c *configured) { c.config.Hostname = "x" }},
	{"bind", dockerRoot, `mount "/x"`, func(c *configured) {
		c.config.Mounts = append(c.config.Mounts, oci.Mount{Destination: "/x/", Type: "bind", Source: "/etc", Options: []string{"rbind", "ro"}})
	}},
	{"host's terminals", dockerRoot, `mount "/dev/pts"`, func(c *configured) { c.mount("/dev/pts").Type = "bind" }},
	{"host's sys", rootless, `mount "/sys"`, func(c *configured) { c.mount("/sys").Type = "bind" }},
	{"writable sys", dockerRoot, `mount "/sys"`, func(c *configured) { c.mount("/sys").Options = nil }},
	{"writable cgroup", rootless, `mount "/sys/fs/cgroup"`, func(c *configured) { c.mount("/sys/fs/cgroup").Options = []string{"rw"} }},
	{"another source", dockerRoot, `mount "/data"`, func(c *configured) { c.mount("/data").Source = "/etc" }},
	{"writable", dockerRoot, `mount "/data"`, func(c *configured) { c.mount("/data").Options = []string{"rbind", "rprivate"} }},
	{"shared", dockerRoot, `mount "/workspace"`, func(c *configured) { c.mount("/workspace").Options = []string{"rbind", "rshared"} }},
	{"mapped ids", dockerRoot, `mount "/workspace"`, func(c *configured) { c.mount("/workspace").UIDMappings = []oci.LinuxIDMapping{{}} }},
	{"a volume for a tmpfs", dockerRoot, `mount "/tmp"`, func(c *configured) { c.mount("/tmp").Type = "bind" }},
	{"someone's shared memory", rootless, `mount "/dev/shm"`, func(c *configured) { c.mount("/dev/shm").Source = "/dev/shm" }},
	{"no mount", dockerRoot, `mount "/run"`, func(c *configured) {
		c.config.Mounts = slices.DeleteFunc(c.config.Mounts, func(m oci.Mount) bool { return m.Destination == "/run" })
	}},
	{"hook", "podman-root", "hook", func(c *configured) {
		c.config.Hooks = &oci.Hooks{CreateRuntime: []oci.Hook{{Path: "/usr/libexec/oci/hooks.d/x"}}}
	}},
	{"another hook with Docker", dockerRoot, "hook", func(c *configured) { c.config.Hooks.Poststop = []oci.Hook{{Path: "/x"}} }},
	{"a program that names itself as Docker's", dockerRoot, "hook", func(c *configured) { c.config.Hooks.Prestart[0].Path = "/proc/../x/exe" }}, //nolint:staticcheck // Docker's is a prestart hook
	{"shared ipc", dockerRoot, "ipc namespace", func(c *configured) { c.namespace("ipc").Path = "/proc/77/ns/ipc" }},
	{"shared network", rootless, "network namespace", func(c *configured) { c.namespace("network").Path = "/run/netns/x" }},
	{"host's pids", "podman-root", "pid namespace", func(c *configured) {
		c.config.Linux.Namespaces = slices.DeleteFunc(c.config.Linux.Namespaces, func(n oci.LinuxNamespace) bool { return n.Type == oci.PIDNamespace })
	}},
	{"uid map", rootless, "uid map", func(c *configured) { c.config.Linux.UIDMappings = nil }},
	{"gid map", rootless, "gid map", func(c *configured) {
		c.config.Linux.GIDMappings = []oci.LinuxIDMapping{{ContainerID: 0, HostID: 0, Size: 10}}
	}},
	{"unmasked", dockerRoot, "masked path /proc/kcore", func(c *configured) {
		c.config.Linux.MaskedPaths = slices.DeleteFunc(c.config.Linux.MaskedPaths, func(p string) bool { return p == "/proc/kcore" })
	}},
	{"writable kernel path", dockerRoot, "read-only path /proc/sys", func(c *configured) {
		c.config.Linux.ReadonlyPaths = slices.DeleteFunc(c.config.Linux.ReadonlyPaths, func(p string) bool { return p == "/proc/sys" })
	}},
	{"sysctl", dockerRoot, "sysctl net.ipv4.ip_forward", func(c *configured) { c.config.Linux.Sysctl["net.ipv4.ip_forward"] = "1" }},
	{"another value", rootless, "sysctl net.ipv4.ping_group_range", func(c *configured) { c.config.Linux.Sysctl["net.ipv4.ping_group_range"] = "0 9" }},
	{"shared root", dockerRoot, "root propagation", func(c *configured) { c.config.Linux.RootfsPropagation = "rshared" }},
	{"personality", dockerRoot, "personality", func(c *configured) { c.config.Linux.Personality = &oci.LinuxPersonality{Domain: "LINUX32"} }},
	{"memory", dockerRoot, "memory limit", func(c *configured) { c.config.Linux.Resources.Memory.Limit = nil }},
	{"swap", dockerRoot, "memory and swap limit", func(c *configured) { c.config.Linux.Resources.Memory.Swap = ptr(int64(-1)) }},
	{"pids", "podman-root", "pids limit", func(c *configured) { c.config.Linux.Resources.Pids = nil }},
	{"cpus", dockerRoot, "cpu quota", func(c *configured) { *c.config.Linux.Resources.CPU.Quota++; *c.config.Linux.Resources.CPU.Period /= 2 }},
	{"no cpus", dockerRoot, "cpu quota", func(c *configured) { c.config.Linux.Resources.CPU = nil }},
	{"oom killer", dockerRoot, "oom killer", func(c *configured) { c.config.Linux.Resources.Memory.DisableOOMKiller = ptr(true) }},
	{"realtime runtime", dockerRoot, "realtime cpu", func(c *configured) { c.config.Linux.Resources.CPU.RealtimeRuntime = ptr(int64(1)) }},
	{"no denial", "podman-root", "device cgroup", func(c *configured) { c.config.Linux.Resources.Devices = nil }},
	{"denial of one kind", "podman-root", "device cgroup", func(c *configured) { c.config.Linux.Resources.Devices[0].Type = "b" }},
	{"denial of one access", "podman-root", "device cgroup", func(c *configured) { c.config.Linux.Resources.Devices[0].Access = "m" }},
	{"device rule", dockerRoot, "device cgroup", func(c *configured) { c.allow("c", 10, 229) }},
	{"block device with a default's number", dockerRoot, "device cgroup", func(c *configured) { c.allow("b", 1, 3) }},
	{"a whole class", dockerRoot, "device cgroup", func(c *configured) { c.allow("c", 10, -1) }},
	{"everything", dockerRoot, "device cgroup", func(c *configured) { c.allow("a", -1, -1) }},
	{"device", dockerRoot, "device", func(c *configured) {
		c.config.Linux.Devices = []oci.LinuxDevice{{Type: "c", Path: "/opt/kvm", Major: 10, Minor: 232}}
	}},
	{"device at a default's place", rootless, "device", func(c *configured) {
		c.config.Linux.Devices = []oci.LinuxDevice{{Type: "c", Path: "/dev/null", Major: 1, Minor: 1}}
	}},
	{"no policy", dockerRoot, "seccomp", func(c *configured) { c.config.Linux.Seccomp = nil }},
	{"another default", rootless, "seccomp", func(c *configured) { c.config.Linux.Seccomp.DefaultAction = oci.ActAllow }},
	{"another default errno", rootless, "seccomp", func(c *configured) { c.config.Linux.Seccomp.DefaultErrnoRet = nil }},
	{"flag", dockerRoot, "seccomp", func(c *configured) {
		c.config.Linux.Seccomp.Flags = []oci.LinuxSeccompFlag{oci.LinuxSeccompFlagSpecAllow}
	}},
	{"listener", dockerRoot, "seccomp", func(c *configured) { c.config.Linux.Seccomp.ListenerPath = "/x" }},
	{"architecture", dockerRoot, "seccomp", func(c *configured) {
		c.config.Linux.Seccomp.Architectures = append(c.config.Linux.Seccomp.Architectures, oci.ArchMIPS)
	}},
	{"allowed call", dockerRoot, "seccomp", func(c *configured) {
		c.config.Linux.Seccomp.Syscalls = append(c.config.Linux.Seccomp.Syscalls, oci.LinuxSyscall{Names: []string{"bpf"}, Action: oci.ActAllow})
	}},
	{"dropped rule", dockerRoot, "seccomp", func(c *configured) { c.config.Linux.Seccomp.Syscalls = c.config.Linux.Seccomp.Syscalls[1:] }},
}

func TestCompareConfigRefusesWeaker(t *testing.T) {
	for _, c := range weakerConfigs {
		t.Run(c.name, func(t *testing.T) {
			conf := mustConfig(t, c.base)
			c.change(&conf)
			diffs := conf.compareConfig()
			want := strings.TrimSpace("config " + c.want)
			if diff := cmp.Diff([]string{want}, fields(diffs)); diff != "" {
				t.Errorf("%s\n%v", diff, diffs)
			}
		})
	}
}

func TestCompareConfigPassesStricter(t *testing.T) {
	for _, c := range []struct {
		name, base string
		change     func(*configured)
	}{
		{"no capability list", dockerRoot, func(c *configured) { c.config.Process.Capabilities = nil }},
		{"default devices by name", dockerRoot, func(c *configured) {
			c.config.Linux.Devices = []oci.LinuxDevice{{Type: "c", Path: "/dev/null", Major: 1, Minor: 3}}
		}},
		{"rules before the denial", "podman-root", func(c *configured) {
			d := c.config.Linux.Resources.Devices
			c.allow("c", 10, 229)
			c.config.Linux.Resources.Devices = append(c.config.Linux.Resources.Devices[1:], d[0])
		}},
		{"more masks", dockerRoot, func(c *configured) {
			c.config.Linux.MaskedPaths = append(c.config.Linux.MaskedPaths, "/proc/sys", "/proc/interrupts")
			c.config.Linux.ReadonlyPaths = c.config.Linux.ReadonlyPaths[:3]
			c.config.Linux.ReadonlyPaths = append(c.config.Linux.ReadonlyPaths, "/proc/sysrq-trigger")
		}},
		{"a time namespace", rootless, func(c *configured) {
			c.config.Linux.Namespaces = append(c.config.Linux.Namespaces, oci.LinuxNamespace{Type: oci.TimeNamespace})
		}},
		{"smaller limits", dockerRoot, func(c *configured) {
			c.config.Process.Rlimits = append(c.config.Process.Rlimits, oci.POSIXRlimit{Type: "RLIMIT_FSIZE", Hard: 1})
			c.config.Linux.Resources.Pids.Limit = ptr(int64(1))
		}},
		{"one rule for each call", dockerRoot, func(c *configured) {
			var rules []oci.LinuxSyscall
			for _, r := range slices.Backward(c.config.Linux.Seccomp.Syscalls) {
				for _, name := range r.Names {
					one := r
					one.Names = []string{name}
					rules = append(rules, one)
				}
			}
			c.config.Linux.Seccomp.Syscalls = rules
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			conf := mustConfig(t, c.base)
			before := mustConfig(t, c.base)
			c.change(&conf)
			if reflect.DeepEqual(before.config, conf.config) {
				t.Fatal("the row changes nothing")
			}
			if diffs := conf.compareConfig(); diffs != nil {
				t.Error(diffs)
			}
		})
	}
}

func mustInspected(t *testing.T) (base, dockerContainer) {
	t.Helper()
	b := mustBase(t, "docker-group")
	var got dockerContainer
	mustRead(t, "inspect-docker-group.json", &got)
	got.HostConfig.SecurityOpt = []string{"no-new-privileges", "seccomp=" + string(b.plan.Seccomp.Profile())}
	return b, got
}

func TestCompareInspected(t *testing.T) {
	b, got := mustInspected(t)
	if diffs := compareDocker(b.plan, b.run, got); diffs != nil {
		t.Fatal(diffs)
	}
	for _, c := range []struct {
		name, want string
		change     func(*dockerContainer)
	}{
		{"image", "image", func(g *dockerContainer) { g.Image = "sha256:0" }},
		{"entrypoint", "args", func(g *dockerContainer) { g.Path = "/bin/sh" }},
		{"arguments", "args", func(g *dockerContainer) { g.Args = nil }},
		{"runtime", "runtime", func(g *dockerContainer) { g.HostConfig.Runtime = "nvidia" }},
		{"init", "init", func(g *dockerContainer) { g.HostConfig.Init = ptr(true) }},
		{"network", "network", func(g *dockerContainer) { g.HostConfig.NetworkMode = "container:x" }},
		{"pid", "pid namespace", func(g *dockerContainer) { g.HostConfig.PidMode = "host" }},
		{"ipc", "ipc namespace", func(g *dockerContainer) { g.HostConfig.IpcMode = "shareable" }},
		{"uts", "uts namespace", func(g *dockerContainer) { g.HostConfig.UTSMode = "host" }},
		{"cgroup", "cgroup namespace", func(g *dockerContainer) { g.HostConfig.CgroupnsMode = "host" }},
		{"privileged", "privileged", func(g *dockerContainer) { g.HostConfig.Privileged = true }},
		{"root", "root", func(g *dockerContainer) { g.HostConfig.ReadonlyRootfs = false }},
		{"oom score", "oom_score_adj", func(g *dockerContainer) { g.HostConfig.OomScoreAdj = -500 }},
		{"oom killer", "oom killer", func(g *dockerContainer) { g.HostConfig.OomKillDisable = ptr(true) }},
		{"realtime", "realtime cpu", func(g *dockerContainer) { g.HostConfig.CPURealtimeRuntime = 1 }},
		{"device", "device", func(g *dockerContainer) {
			g.HostConfig.Devices = []spec.DockerDevice{{PathOnHost: "/dev/kvm", PathInContainer: "/dev/kvm", CgroupPermissions: "rw"}}
		}},
		{"device request", "device", func(g *dockerContainer) { g.HostConfig.DeviceRequests = []json.RawMessage{[]byte(`{}`)} }},
		{"device rule", "device cgroup", func(g *dockerContainer) { g.HostConfig.DeviceCgroupRules = []string{"a *:* rwm"} }},
		{"capability", "capabilities", func(g *dockerContainer) { g.HostConfig.CapAdd = []string{"CAP_NET_RAW"} }},
		{"new privileges", "security option no-new-privileges", func(g *dockerContainer) { g.HostConfig.SecurityOpt = g.HostConfig.SecurityOpt[1:] }},
		{"no policy", "security option seccomp", func(g *dockerContainer) { g.HostConfig.SecurityOpt = g.HostConfig.SecurityOpt[:1] }},
		{"unconfined", "seccomp", func(g *dockerContainer) {
			g.HostConfig.SecurityOpt = []string{"no-new-privileges", "seccomp=unconfined"}
		}},
		{"another policy", "seccomp", func(g *dockerContainer) {
			g.HostConfig.SecurityOpt = []string{"no-new-privileges:true", `seccomp={"defaultAction":"SCMP_ACT_ALLOW"}`}
		}},
		{"label", "security option", func(g *dockerContainer) {
			g.HostConfig.SecurityOpt = append(slices.Clone(g.HostConfig.SecurityOpt), "label=disable")
		}},
		{"mask", "masked path /proc/asound", func(g *dockerContainer) { g.HostConfig.MaskedPaths = g.HostConfig.MaskedPaths[1:] }},
		{"read-only path", "read-only path /proc/bus", func(g *dockerContainer) { g.HostConfig.ReadonlyPaths = g.HostConfig.ReadonlyPaths[1:] }},
		{"sysctl", "sysctl kernel.msgmax", func(g *dockerContainer) { g.HostConfig.Sysctls["kernel.msgmax"] = "1" }},
		{"volumes", "volumes from", func(g *dockerContainer) { g.HostConfig.VolumesFrom = []string{"x"} }},
		{"volume", `mount "/x"`, func(g *dockerContainer) { g.Mounts = append(g.Mounts, dockerMount{Type: "volume", Destination: "/x"}) }},
		{"source", `mount "/data"`, func(g *dockerContainer) { g.find("/data").Source = "/etc" }},
		{"writable", `mount "/data"`, func(g *dockerContainer) { g.find("/data").RW = true }},
		{"shared", `mount "/workspace"`, func(g *dockerContainer) { g.find("/workspace").Propagation = "rshared" }},
		{"tmpfs", `mount "/x"`, func(g *dockerContainer) { g.HostConfig.Tmpfs["/x"] = "" }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, got := mustInspected(t)
			c.change(&got)
			diffs := compareDocker(b.plan, b.run, got)
			if diff := cmp.Diff([]string{"inspect " + c.want}, fields(diffs)); diff != "" {
				t.Errorf("%s\n%v", diff, diffs)
			}
		})
	}
}

func (c *dockerContainer) find(target string) *dockerMount {
	return &c.Mounts[slices.IndexFunc(c.Mounts, func(m dockerMount) bool { return m.Destination == target })]
}

const bundleID = "263243c31e95139ead51118b4710c570b7c317015f0319bd75e9b1a3d390a662"

func TestIsContainerID(t *testing.T) {
	for id, want := range map[string]bool{
		bundleID: true, "": false, bundleID[1:]: false, "../" + bundleID[3:]: false, strings.ToUpper(bundleID): false,
	} {
		if got := isContainerID(id); got != want {
			t.Errorf("%q: %v", id, got)
		}
	}
}

func mustWrite(t *testing.T, file, content string) string {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestReadBundle(t *testing.T) {
	dir := t.TempDir()
	engine := spec.Engine{Kind: spec.Podman, Dirs: []string{filepath.Join(dir, "none"), dir}}
	mustWrite(t, filepath.Join(dir, "overlay-containers", bundleID, "userdata/config.json"), `{"hostname": "x"}`)
	got, err := readBundle(bundleFiles(engine, bundleID))
	if err != nil || got.Hostname != "x" {
		t.Errorf("%v %v", got, err)
	}
	if _, err := readBundle(bundleFiles(engine, strings.Repeat("a", 64))); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if _, err := readBundle([]string{mustWrite(t, filepath.Join(dir, "bad"), "{")}); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	large := mustWrite(t, filepath.Join(dir, "large"), "{}"+strings.Repeat(" ", maxBundle))
	if _, err := readBundle([]string{large}); err == nil {
		t.Error("a config larger than the bound was read")
	}
}

func TestComparePodmanImage(t *testing.T) {
	dir := t.TempDir()
	plan := spec.Plan{Engine: spec.Engine{Kind: spec.Podman, Dirs: []string{dir}}, Image: spec.Image{ID: "sha256:abc"}}
	list := filepath.Join(dir, "vfs-containers/containers.json")
	if diffs := comparePodmanImage(plan, bundleID); diffs != nil {
		t.Error(diffs)
	}
	mustWrite(t, list, `[{"id": "other", "image": "def"}, {"id": "`+bundleID+`", "image": "abc", "metadata": "x"}]`)
	if diffs := comparePodmanImage(plan, bundleID); diffs != nil {
		t.Error(diffs)
	}
	mustWrite(t, list, `[{"id": "`+bundleID+`", "image": "def"}]`)
	if diff := cmp.Diff([]string{"image"}, fields(comparePodmanImage(plan, bundleID))); diff != "" {
		t.Error(diff)
	}
}

func BenchmarkCompareConfig(b *testing.B) {
	c := mustConfig(b, dockerRoot)
	for b.Loop() {
		compareConfig(c.plan, c.host, c.run, &c.config)
	}
}
