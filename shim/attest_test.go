package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// base is one real run with its plan compiled again: testdata/hello-NAME.json holds
// what init saw on that set-up, and the host's facts of then.
type base struct {
	Run     string
	Engine  spec.Engine
	Image   spec.Image
	Caller  spec.Caller
	Machine spec.Machine
	Hello   wire.Hello

	host spec.Host
	plan spec.Plan
	own  map[string]fileID
	run  spec.RunPaths
}

var bases = []string{"docker-root", "docker-group", "podman-root", "podman-rootless"}

// engineDirs are left out of records.
var engineDirs = map[string][]string{
	"docker-root": {"/var/lib/docker"}, "docker-group": {"/var/lib/docker"},
	"podman-root":     {"/var/lib/containers/storage", "/run/containers/storage"},
	"podman-rootless": {"/home/agentshim-rootless/.local/share/containers/storage"},
}

func mustRead(t testing.TB, file string, v any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", file))
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func mustBase(t testing.TB, name string) base {
	t.Helper()
	var b base
	mustRead(t, "hello-"+name+".json", &b)
	seen := map[string]wire.Mount{}
	for _, m := range b.Hello.Mounts {
		seen[m.Target] = m
	}
	dir := "/var/tmp/attest/" + name
	source := func(path, target string) mounts.Source {
		return mounts.Source{Path: path, Dir: true, Dev: seen[target].Dev, Ino: seen[target].Ino, UID: 24199, GID: 24199, Mode: 0o755}
	}
	b.Engine.Dirs = engineDirs[name]
	b.Machine.Namespaces = map[string]string{}
	for ns := range b.Hello.Namespaces {
		b.Machine.Namespaces[ns] = ns + ":[1]"
	}
	b.host = spec.Host{Engine: b.Engine, Image: b.Image, Caller: b.Caller, Machine: b.Machine, Mounts: mounts.Facts{Guards: mounts.GuardFacts{}, Sources: map[string]mounts.Source{
		dir + "/work": source(dir+"/work", "/workspace"), dir + "/data": source(dir+"/data", "/data"),
	}}}
	b.plan = mustPlan(t, b.host, dir)
	b.run = spec.RunPaths{ID: b.Run, Dir: fmt.Sprintf("/tmp/agentshim-%d/%s", b.Caller.UID, b.Run)}
	b.run.Init = b.run.Dir + "/agentshim-init"
	b.own = map[string]fileID{}
	for target := range plannedSources(spec.Plan{Etc: b.plan.Etc}, b.run) {
		b.own[target] = fileID{seen[target].Dev, seen[target].Ino}
	}
	return b
}

func mustPlan(t testing.TB, host spec.Host, dir string) spec.Plan {
	t.Helper()
	user := ""
	if host.Caller.UID == 0 {
		user = `"user": "24199:24199",`
	}
	h, err := harness.Parse([]byte(`{"version": 1, "image": "agentshim/hello:test", `+user+`
		"harness": {"binary": "sh", "prefixArgs": ["-c"]}, "accept": ["rootless-cgroup-limits"],
		"resources": {"memoryMb": 2048, "cpus": 2},
		"workspace": {"source": "work", "mode": "writable"}, "mounts": [{"source": "data", "target": "/data"}]}`), dir, harness.Overrides{})
	if err != nil {
		t.Fatal(err)
	}
	plan, err := spec.Compile(h, host, spec.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

func (b base) compare() []Difference { return compare(b.plan, b.host, b.own, b.Hello) }

func fields(diffs []Difference) []string {
	var out []string
	for _, d := range diffs {
		out = append(out, d.Field)
	}
	return out
}

func TestCompareRealHellos(t *testing.T) {
	for _, name := range bases {
		t.Run(name, func(t *testing.T) {
			if diffs := mustBase(t, name).compare(); diffs != nil {
				t.Error(diffs)
			}
		})
	}
}

// mount returns the hello's mount on target, to be changed.
func (b *base) mount(target string) *wire.Mount {
	for i := range b.Hello.Mounts {
		if b.Hello.Mounts[i].Target == target {
			return &b.Hello.Mounts[i]
		}
	}
	panic("no mount on " + target)
}

func (b *base) without(target, option string) {
	m := b.mount(target)
	m.Options = slices.DeleteFunc(slices.Clone(m.Options), func(o string) bool { return o == option })
}

func (b *base) extra(m wire.Mount) { b.Hello.Mounts = append(b.Hello.Mounts, m) }

func (b *base) super(target, prefix, option string) {
	m := b.mount(target)
	m.Super = slices.DeleteFunc(slices.Clone(m.Super), func(o string) bool { return strings.HasPrefix(o, prefix) })
	if option != "" {
		m.Super = append(m.Super, option)
	}
}

// ownSource makes a planned bind one of the run's own folder.
func (b *base) ownSource(target string) {
	for i := range b.plan.Mounts {
		if m := &b.plan.Mounts[i]; m.Target == target {
			m.Source, m.Own, m.Dev, m.Ino = "", "x", 0, 0
		}
	}
	m := b.mount(target)
	b.own[target] = fileID{m.Dev, m.Ino}
}

func TestCompareOwnSource(t *testing.T) {
	b := mustBase(t, rootless)
	b.ownSource("/data")
	if diffs := b.compare(); diffs != nil {
		t.Error(diffs)
	}
	if got := plannedSources(b.plan, b.run)["/data"]; got != b.run.Dir+"/x" {
		t.Errorf("source %q", got)
	}
	b.run.State = "/state"
	for i := range b.plan.Mounts {
		b.plan.Mounts[i].Kept = b.plan.Mounts[i].Own != ""
	}
	if got := plannedSources(b.plan, b.run)["/data"]; got != "/state/x" {
		t.Errorf("source %q", got)
	}
}

const (
	dockerRoot = "docker-root"
	rootless   = "podman-rootless"
)

// weaker has a row for everything an engine could do; want is the one Difference.
var weaker = []struct {
	name, base, want string
	change           func(*base)
}{
	{"another protocol", dockerRoot, "wire version", func(b *base) { b.Hello.Version = 2 }},
	{"unreadable fact", dockerRoot, "mountinfo", func(b *base) { b.Hello.Errors = map[string]string{"mountinfo": "EIO"} }},
	{"not PID 1", dockerRoot, "pid", func(b *base) { b.Hello.PID = 7 }},
	{"dumpable init", dockerRoot, "dumpable", func(b *base) { b.Hello.Dumpable = 1 }},
	{"another process", dockerRoot, "processes", func(b *base) { b.Hello.Processes = []int{1, 9} }},
	{"real uid", dockerRoot, "uids", func(b *base) { b.Hello.UIDs[0] = 0 }},
	{"file system uid", dockerRoot, "uids", func(b *base) { b.Hello.UIDs[3] = 0 }},
	{"saved gid", dockerRoot, "gids", func(b *base) { b.Hello.GIDs[2] = 0 }},
	{"group root", rootless, "groups", func(b *base) { b.Hello.Groups = append(b.Hello.Groups, 0) }},
	{"bounding set", dockerRoot, "capabilities CapBnd", func(b *base) { b.Hello.Capabilities["CapBnd"] = "0000000000000001" }},
	{"permitted set", dockerRoot, "capabilities CapPrm", func(b *base) { b.Hello.Capabilities["CapPrm"] = "0000000000002000" }},
	{"effective set", dockerRoot, "capabilities CapEff", func(b *base) { b.Hello.Capabilities["CapEff"] = "000001ffffffffff" }},
	{"inheritable set", rootless, "capabilities CapInh", func(b *base) { b.Hello.Capabilities["CapInh"] = "0000000000000001" }},
	{"ambient set", rootless, "capabilities CapAmb", func(b *base) { b.Hello.Capabilities["CapAmb"] = "8000000000000000" }},
	{"no bounding set", dockerRoot, "capabilities CapBnd", func(b *base) { delete(b.Hello.Capabilities, "CapBnd") }},
	{"new privileges", dockerRoot, "no_new_privs", func(b *base) { b.Hello.NoNewPrivs = false }},
	{"keep_caps", dockerRoot, "securebits", func(b *base) { b.Hello.SecureBits = 1 << 4 }},
	{"no seccomp", dockerRoot, "seccomp mode", func(b *base) { b.Hello.SeccompMode = 0 }},
	{"no filter", dockerRoot, "seccomp filters", func(b *base) { b.Hello.SeccompFilters = 0 }},
	{"vsock", dockerRoot, "system call socket(40, …)", func(b *base) { b.Hello.Syscalls[0] = "ok" }},
	{"ptrace", rootless, "system call ptrace(99999, …)", func(b *base) { b.Hello.Syscalls[7] = "ESRCH" }},
	{"fewer system calls tried", dockerRoot, "system calls", func(b *base) { b.Hello.Syscalls = b.Hello.Syscalls[:1] }},
	{"uid of another", rootless, "uid map", func(b *base) { b.Hello.UIDMap = [][3]uint32{{0, 0, 1}, {1, 1, 65535}} }},
	{"gid of another", rootless, "gid map", func(b *base) { b.Hello.GIDMap = [][3]uint32{{0, 1, 24101}} }},
	{"memory", dockerRoot, "memory limit", func(b *base) { b.Hello.Cgroup.Memory++ }},
	{"no memory limit", dockerRoot, "memory limit", func(b *base) { b.Hello.Cgroup.Memory = -1 }},
	{"unreadable memory limit", dockerRoot, "memory limit", func(b *base) { b.Hello.Cgroup.Memory = -2 }},
	{"swap", dockerRoot, "memory and swap limit", func(b *base) { b.Hello.Cgroup.MemorySwap = -1 }},
	{"pids", dockerRoot, "pids limit", func(b *base) { b.Hello.Cgroup.PIDs = -1 }},
	{"cpus", dockerRoot, "cpu quota", func(b *base) { b.Hello.Cgroup.CPUQuota *= 2 }},
	{"cpu period", dockerRoot, "cpu quota", func(b *base) { b.Hello.Cgroup.CPUPeriod /= 2 }},
	{"no cpu quota", dockerRoot, "cpu quota", func(b *base) { b.Hello.Cgroup.CPUQuota = -1 }},
	{"descriptor", dockerRoot, "descriptor 9", func(b *base) { b.Hello.FDs[9] = "/etc/shadow" }},
	{"inherited socket", dockerRoot, "descriptor 9", func(b *base) { b.Hello.FDs[9] = "socket:[77]" }},
	{"stream to a file", rootless, "descriptor 2", func(b *base) { b.Hello.FDs[2] = "/var/log/x" }},
	{"cgroup file elsewhere", rootless, "descriptor 9", func(b *base) { b.Hello.FDs[9] = "/mnt/cpu.max" }},
	{"variable", dockerRoot, `variable "GODEBUG"`, func(b *base) { b.Hello.Environ = append(b.Hello.Environ, "GODEBUG=x") }},
	{"another PATH", dockerRoot, `variable "PATH"`, func(b *base) { b.Hello.Environ = append(b.Hello.Environ, "PATH=/x") }},
	{"device", dockerRoot, "device", func(b *base) { b.Hello.DevNodes = append(b.Hello.DevNodes, "c 10:229 fuse") }},
	{"device in a folder", dockerRoot, "device", func(b *base) { b.Hello.DevNodes = append(b.Hello.DevNodes, "d net", "c 10:200 net/tun") }},
	{"many devices", dockerRoot, "device", func(b *base) {
		for i := range 300 {
			b.Hello.DevNodes = append(b.Hello.DevNodes, fmt.Sprintf("b 8:%d sd%d", i, i))
		}
	}},
	{"default name, other device", dockerRoot, "device", func(b *base) { b.Hello.DevNodes[0] = "c 1:1 null" }},
	{"someone's terminal", dockerRoot, "device", func(b *base) { b.Hello.DevNodes = append(b.Hello.DevNodes, "c 136:0 pts/0") }},
	{"someone's shared memory", rootless, "device", func(b *base) { b.Hello.DevNodes = append(b.Hello.DevNodes, "f shm/x") }},
	{"interface", dockerRoot, "interface", func(b *base) { b.Hello.Interfaces = append(b.Hello.Interfaces, "eth0") }},
	{"route", rootless, "routes beyond loopback", func(b *base) { b.Hello.Routes = 1 }},
	{"address", rootless, "address", func(b *base) { b.Hello.Addresses = []string{"lo 127.0.0.1", "eth0 172.18.0.2"} }},
	{"no AppArmor", dockerRoot, "security module label", func(b *base) { b.host.Engine.AppArmor, b.Hello.LSM = true, "unconfined" }},
	{"AppArmor complains only", dockerRoot, "security module label", func(b *base) { b.host.Engine.AppArmor, b.Hello.LSM = true, "docker-default (complain)" }},
	{"no SELinux label", rootless, "security module label", func(b *base) { b.host.Engine.SELinux, b.Hello.LSM = true, "" }},
	{"super privileged", rootless, "security module label", func(b *base) { b.host.Engine.SELinux, b.Hello.LSM = true, "system_u:system_r:spc_t:s0" }},
	{"the runtime's label", rootless, "security module label", func(b *base) {
		b.host.Engine.SELinux, b.Hello.LSM = true, "system_u:system_r:container_runtime_t:s0:c1,c2"
	}},
	{"sysctl", dockerRoot, "sysctl net.ipv4.ping_group_range", func(b *base) { b.Hello.Sysctls["net.ipv4.ping_group_range"] = "0 2147483647" }},
	{"unmapped ping range without a user namespace", dockerRoot, "sysctl net.ipv4.ping_group_range", func(b *base) { b.Hello.Sysctls["net.ipv4.ping_group_range"] = unmappedRange }},
	{"sysctl not set", rootless, "sysctl net.ipv4.ip_unprivileged_port_start", func(b *base) { delete(b.Hello.Sysctls, "net.ipv4.ip_unprivileged_port_start") }},
	{"host name", dockerRoot, "host name", func(b *base) { b.Hello.Hostname = "box" }},
	{"umask", dockerRoot, "umask", func(b *base) { b.Hello.Umask = 0o002 }},
	{"core", dockerRoot, "rlimit core", func(b *base) { b.Hello.Rlimits["core"] = [2]uint64{0, 1} }},
	{"open files", rootless, "rlimit nofile", func(b *base) { b.Hello.Rlimits["nofile"] = [2]uint64{8193, 8193} }},
	{"processes per user", dockerRoot, "rlimit nproc", func(b *base) { b.Hello.Rlimits["nproc"] = [2]uint64{1, 1 << 40} }},
	{"realtime priority", dockerRoot, "rlimit rtprio", func(b *base) { b.Hello.Rlimits["rtprio"] = [2]uint64{0, 99} }},
	{"niceness", rootless, "rlimit nice", func(b *base) { b.Hello.Rlimits["nice"] = [2]uint64{40, 40} }},
	{"limit not told", dockerRoot, "rlimit core", func(b *base) { delete(b.Hello.Rlimits, "core") }},
	{"unmasked path", dockerRoot, "masked path /proc/asound", func(b *base) { b.Hello.KernelPaths["/proc/asound"] = true }},
	{"path not looked for", dockerRoot, "masked path /proc/asound", func(b *base) { delete(b.Hello.KernelPaths, "/proc/asound") }},
	{"writable kernel path", dockerRoot, "read-only path /proc/sysrq-trigger", func(b *base) { b.Hello.KernelPaths["/proc/sysrq-trigger"] = true }},

	{"bind", dockerRoot, `mount "/x"`, func(b *base) { b.extra(wire.Mount{Target: "/x", Root: "/srv", Type: "ext4", Options: []string{"ro"}}) }},
	{"tmpfs", dockerRoot, `mount "/x"`, func(b *base) { b.extra(wire.Mount{Target: "/x", Root: "/", Type: "tmpfs"}) }},
	{"a full tmpfs in a mask's place", dockerRoot, `mount "/sys/firmware"`, func(b *base) {
		b.mount("/sys/firmware").Empty = false
		b.Hello.KernelPaths["/sys/firmware"] = false
	}},
	{"no mask", rootless, "masked path /sys/firmware", func(b *base) {
		b.Hello.Mounts = slices.DeleteFunc(b.Hello.Mounts, func(m wire.Mount) bool { return m.Target == "/sys/firmware" })
	}},
	{"another proc", dockerRoot, `mount "/proc/bus"`, func(b *base) { b.mount("/proc/bus").Dev++ }},
	{"a process's folder in a kernel path's place", dockerRoot, `mount "/proc/bus"`, func(b *base) { b.mount("/proc/bus").Root = "/1/root" }},
	{"host's cgroup", dockerRoot, `mount "/sys/fs/cgroup/memory"`, func(b *base) { b.mount("/sys/fs/cgroup/memory").Root = "/.." }},
	{"writable cgroup", dockerRoot, `mount "/sys/fs/cgroup/memory"`, func(b *base) { b.without("/sys/fs/cgroup/memory", "ro") }},
	{"writable sys", rootless, `mount "/sys"`, func(b *base) { b.without("/sys", "ro") }},
	{"proc with devices", rootless, `mount "/proc"`, func(b *base) { b.without("/proc", "nodev") }},
	{"terminals with programs", rootless, `mount "/dev/pts"`, func(b *base) { b.without("/dev/pts", "noexec") }},
	{"dev with setuid", rootless, `mount "/dev"`, func(b *base) { b.without("/dev", "nosuid") }},
	{"another file as a device", rootless, `mount "/dev/zero"`, func(b *base) { b.mount("/dev/zero").Root = "/sda" }},
	{"a folder as a device", rootless, `mount "/dev/zero"`, func(b *base) { b.mount("/dev/zero").Mode = unix.S_IFDIR }},
	{"writable root", dockerRoot, `mount "/"`, func(b *base) { b.without("/", "ro") }},
	{"shared root", dockerRoot, `mount "/"`, func(b *base) { b.mount("/").Propagation = []string{"shared:1"} }},
	{"slave workspace", dockerRoot, `mount "/workspace"`, func(b *base) { b.mount("/workspace").Propagation = []string{"master:1"} }},
	{"slave init", rootless, `mount "/.agentshim-init"`, func(b *base) { b.mount("/.agentshim-init").Propagation = []string{"master:1"} }},
	{"writable mount", dockerRoot, `mount "/data"`, func(b *base) { b.without("/data", "ro") }},
	{"mount with setuid", rootless, `mount "/data"`, func(b *base) { b.without("/data", "nosuid") }},
	{"mount with devices", rootless, `mount "/workspace"`, func(b *base) { b.without("/workspace", "nodev") }},
	{"another source, same device", dockerRoot, `mount "/data"`, func(b *base) { b.mount("/data").Ino++ }},
	{"another source, same inode", dockerRoot, `mount "/workspace"`, func(b *base) { b.mount("/workspace").Dev++ }},
	{"another source of the run's own", dockerRoot, `mount "/data"`, func(b *base) {
		b.ownSource("/data")
		b.mount("/data").Ino++
	}},
	{"a source of the run's own that is not known", dockerRoot, `mount "/data"`, func(b *base) {
		b.ownSource("/data")
		delete(b.own, "/data")
	}},
	{"unreadable mount", dockerRoot, `mount "/workspace"`, func(b *base) { b.mount("/workspace").Stat = "permission denied" }},
	{"second mount on a target", dockerRoot, `mount "/data"`, func(b *base) {
		m := *b.mount("/data")
		m.Ino++
		b.extra(m)
	}},
	{"no mount", dockerRoot, `mount "/tmp"`, func(b *base) {
		b.Hello.Mounts = slices.DeleteFunc(b.Hello.Mounts, func(m wire.Mount) bool { return m.Target == "/tmp" })
	}},
	{"no hosts file", rootless, `mount "/etc/hosts"`, func(b *base) {
		b.Hello.Mounts = slices.DeleteFunc(b.Hello.Mounts, func(m wire.Mount) bool { return m.Target == "/etc/hosts" })
	}},
	{"another init", dockerRoot, `mount "/.agentshim-init"`, func(b *base) { b.mount("/.agentshim-init").Ino++ }},
	{"writable passwd", dockerRoot, `mount "/etc/passwd"`, func(b *base) { b.without("/etc/passwd", "ro") }},
	{"larger tmpfs", dockerRoot, `mount "/tmp"`, func(b *base) { b.super("/tmp", "size=", "size=524289k") }},
	{"unbounded tmpfs", rootless, `mount "/run"`, func(b *base) { b.super("/run", "size=", "") }},
	{"more files in a tmpfs", dockerRoot, `mount "/run"`, func(b *base) { b.super("/run", "nr_inodes=", "nr_inodes=8193") }},
	{"unbounded files in a tmpfs", dockerRoot, `mount "/tmp"`, func(b *base) { b.super("/tmp", "nr_inodes=", "") }},
	{"disk in a tmpfs's place", dockerRoot, `mount "/tmp"`, func(b *base) { b.mount("/tmp").Type = "ext4" }},
	{"tmp without the sticky bit", rootless, `mount "/tmp"`, func(b *base) { b.mount("/tmp").Mode &^= unix.S_ISVTX }},
	{"run open to all", dockerRoot, `mount "/run"`, func(b *base) { b.mount("/run").Mode |= 0o022 }},
	{"another's home", dockerRoot, `mount "/home/agent"`, func(b *base) { b.mount("/home/agent").UID = 0 }},
	{"home of another group", dockerRoot, `mount "/home/agent"`, func(b *base) { b.mount("/home/agent").GID = 0 }},
	{"tmpfs with setuid", dockerRoot, `mount "/tmp"`, func(b *base) { b.without("/tmp", "nosuid") }},
	{"shm with programs", rootless, `mount "/dev/shm"`, func(b *base) { b.without("/dev/shm", "noexec") }},
}

func TestCompareRefusesWeaker(t *testing.T) {
	for _, c := range weaker {
		t.Run(c.name, func(t *testing.T) {
			b := mustBase(t, c.base)
			c.change(&b)
			diffs := b.compare()
			if diff := cmp.Diff([]string{c.want}, slices.Compact(fields(diffs))); diff != "" {
				t.Errorf("%s\n%v", diff, diffs)
			}
		})
	}
}

// Every kind of namespace, on every set-up that plans it.
func TestCompareRefusesHostNamespaces(t *testing.T) {
	for _, name := range bases {
		b := mustBase(t, name)
		for _, ns := range b.plan.Namespaces {
			link := ns
			if l, ok := procNames[ns]; ok {
				link = l
			}
			for _, got := range []string{"", b.Machine.Namespaces[link]} {
				c := mustBase(t, name)
				c.Hello.Namespaces[link] = got
				if diff := cmp.Diff([]string{ns + " namespace"}, fields(c.compare())); diff != "" {
					t.Errorf("%s, %s %q: %s", name, ns, got, diff)
				}
			}
		}
	}
}

// unweighed are facts that no value of can make a container weaker.
var unweighed = []string{"Cgroup.Version", "NetCookie"}

// A field of the hello that no row changes is one that nothing looks at.
func TestEveryFactIsWeighed(t *testing.T) {
	rows := map[string]bool{}
	for _, c := range weaker {
		before, after := mustBase(t, c.base), mustBase(t, c.base)
		c.change(&after)
		changed(rows, "", reflect.ValueOf(before.Hello), reflect.ValueOf(after.Hello))
	}
	rows["Namespaces"] = true // TestCompareRefusesHostNamespaces
	for _, name := range unweighed {
		rows[name] = true
	}
	var want []string
	for prefix, v := range map[string]any{"": wire.Hello{}, "Cgroup.": wire.Cgroup{}, "Mounts.": wire.Mount{}} {
		for i := range reflect.TypeOf(v).NumField() {
			want = append(want, prefix+reflect.TypeOf(v).Field(i).Name)
		}
	}
	rows["Mounts.Target"] = true // the rows with an extra or a missing mount
	slices.Sort(want)
	for _, name := range want {
		if !rows[name] {
			t.Errorf("no row of the table of weaker containers changes %s", name)
		}
	}
}

// changed notes the fields in which two hellos differ, with those of the mounts and
// the cgroup.
func changed(rows map[string]bool, prefix string, before, after reflect.Value) {
	for i := range before.NumField() {
		name := prefix + before.Type().Field(i).Name
		x, y := before.Field(i), after.Field(i)
		if reflect.DeepEqual(x.Interface(), y.Interface()) {
			continue
		}
		rows[name] = true
		switch {
		case name == "Cgroup":
			changed(rows, "Cgroup.", x, y)
		case name == "Mounts" && x.Len() == y.Len():
			for j := range x.Len() {
				changed(rows, "Mounts.", x.Index(j), y.Index(j))
			}
		}
	}
}

// stricter containers pass.
var stricter = []struct {
	name, base string
	change     func(*base)
}{
	{"another masked folder", dockerRoot, func(b *base) {
		b.extra(wire.Mount{Target: "/sys/devices/virtual/powercap", Root: "/", Type: "tmpfs", Options: []string{"ro"}, Super: []string{"ro"}, Empty: true})
	}},
	{"another masked file", rootless, func(b *base) {
		m := *b.mount("/proc/keys")
		m.Target = "/proc/interrupts"
		b.extra(m)
	}},
	{"masked in place of read-only", dockerRoot, func(b *base) {
		m := b.mount("/proc/bus")
		*m = wire.Mount{Target: m.Target, Root: "/", Type: "tmpfs", Options: []string{"ro"}, Empty: true}
	}},
	{"another read-only path", dockerRoot, func(b *base) {
		m := *b.mount("/proc/bus")
		m.Target, m.Root = "/proc/driver", "/driver"
		b.extra(m)
	}},
	{"read-only workspace", dockerRoot, func(b *base) { b.mount("/workspace").Options = []string{"ro"} }},
	{"flags on Docker's binds", dockerRoot, func(b *base) { b.mount("/data").Options = []string{"ro", "nosuid", "nodev", "noexec"} }},
	{"read-only dev", rootless, func(b *base) { b.mount("/dev").Options = []string{"ro", "nosuid", "noexec"} }},
	{"smaller tmpfs", dockerRoot, func(b *base) { b.super("/tmp", "size=", "size=4k"); b.super("/tmp", "nr_inodes=", "nr_inodes=2") }},
	{"less memory", dockerRoot, func(b *base) { b.Hello.Cgroup.Memory, b.Hello.Cgroup.MemorySwap = 1<<20, 1<<20 }},
	{"less cpu", dockerRoot, func(b *base) { b.Hello.Cgroup.CPUQuota = 1000 }},
	{"fewer pids", dockerRoot, func(b *base) { b.Hello.Cgroup.PIDs = 10 }},
	{"limits where none can hold", rootless, func(b *base) {
		b.Hello.Cgroup = wire.Cgroup{Version: 2, Memory: 1, MemorySwap: 1, CPUQuota: 1, CPUPeriod: 1, PIDs: 1}
	}},
	{"lower limits", dockerRoot, func(b *base) { b.Hello.Rlimits["nofile"] = [2]uint64{64, 64} }},
	{"no groups", dockerRoot, func(b *base) { b.Hello.Groups = nil }},
	{"a second filter", dockerRoot, func(b *base) { b.Hello.SeccompFilters = 2 }},
	{"locked securebits", dockerRoot, func(b *base) { b.Hello.SecureBits = 0x2f }},
	{"a user namespace", dockerRoot, func(b *base) { b.Hello.Namespaces["user"] = "user:[9]" }},
	{"fewer devices", dockerRoot, func(b *base) { b.Hello.DevNodes = b.Hello.DevNodes[:2] }},
	{"no environment", dockerRoot, func(b *base) { b.Hello.Environ = nil }},
	{"stricter umask", dockerRoot, func(b *base) { b.Hello.Umask = 0o077 }},
	{"no interface", rootless, func(b *base) { b.Hello.Interfaces = nil }},
	{"tunnels of loaded modules", dockerRoot, func(b *base) { b.Hello.Interfaces = []string{"lo", "tunl0"} }},
	{"AppArmor", dockerRoot, func(b *base) { b.host.Engine.AppArmor, b.Hello.LSM = true, "docker-default (enforce)" }},
	{"SELinux", rootless, func(b *base) { b.host.Engine.SELinux, b.Hello.LSM = true, "system_u:system_r:container_t:s0:c1,c2" }},
	{"a label where the engine tells none", rootless, func(b *base) { b.Hello.LSM = "containers-default-0.50 (enforce)" }},
	{"suid-dumpable", dockerRoot, func(b *base) { b.Hello.Dumpable = 2 }},
	{"one file for output and errors", dockerRoot, func(b *base) { b.Hello.FDs[2] = b.Hello.FDs[1] }},
	{"engine's variable", rootless, func(b *base) { b.Hello.Environ = append(b.Hello.Environ, "container=podman", "TERM=xterm") }},
	{"slave root", rootless, func(b *base) { b.mount("/").Propagation = []string{"master:1"} }},
}

func TestComparePassesStricter(t *testing.T) {
	for _, c := range stricter {
		t.Run(c.name, func(t *testing.T) {
			b := mustBase(t, c.base)
			before := mustBase(t, c.base)
			c.change(&b)
			if reflect.DeepEqual(before.Hello, b.Hello) {
				t.Fatal("the row changes nothing")
			}
			if diffs := b.compare(); diffs != nil {
				t.Error(diffs)
			}
		})
	}
}

// Init must look for every path that some plan wants masked or read-only.
func TestKernelPathsAreLookedFor(t *testing.T) {
	for _, name := range bases {
		b := mustBase(t, name)
		for _, p := range slices.Concat(b.plan.MaskedPaths, b.plan.ReadonlyPaths) {
			if !slices.Contains(wire.KernelPaths, p) {
				t.Errorf("%s: %s is not among wire.KernelPaths", name, p)
			}
		}
	}
}

func TestCompareHoldsChown(t *testing.T) {
	b := mustBase(t, dockerRoot)
	b.plan.Capabilities = []string{"CHOWN"}
	for _, set := range []string{"CapPrm", "CapEff", "CapBnd"} {
		b.Hello.Capabilities[set] = "0000000000000001"
	}
	if diffs := b.compare(); diffs != nil {
		t.Error(diffs)
	}
	b.Hello.Capabilities["CapAmb"] = "0000000000000001"
	b.Hello.Capabilities["CapBnd"] = "0000000000000003"
	if diff := cmp.Diff([]string{"capabilities CapAmb", "capabilities CapBnd"}, fields(b.compare())); diff != "" {
		t.Error(diff)
	}
}

func TestCompareProbe(t *testing.T) {
	policy := mustBase(t, dockerRoot).plan.Egress
	closed := wire.Probed{UDP4: "ENETUNREACH", UDP6: "ENETUNREACH", TCP4: "ENETUNREACH", TCP6: "EADDRNOTAVAIL", VSock: "EAFNOSUPPORT", Ping: "EACCES"}
	if diffs := compareProbe(policy, closed); diffs != nil {
		t.Error(diffs)
	}
	for i := range reflect.TypeFor[wire.Probed]().NumField() {
		name := reflect.TypeFor[wire.Probed]().Field(i).Name
		if name == "Micros" {
			continue
		}
		for _, got := range []string{"open", "timeout", ""} {
			p := closed
			reflect.ValueOf(&p).Elem().Field(i).SetString(got)
			if diffs := compareProbe(policy, p); len(diffs) != 1 {
				t.Errorf("%s %q: %v", name, got, diffs)
			}
		}
	}
}

// A source that was swapped is the fault of whoever did it; anything beside it is the engine's.
func TestSwappedSource(t *testing.T) {
	b := mustBase(t, dockerRoot)
	b.mount("/data").Ino++
	b.mount("/workspace").Dev++
	if err := notProven(b.compare()); !errors.Is(err, ReasonMount) || !strings.Contains(err.Error(), "/workspace") {
		t.Error(err)
	}
	b.without("/data", "ro")
	if err := notProven(b.compare()); !errors.Is(err, ReasonPosture) {
		t.Error(err)
	}
}

// The values of unplanned variables are secrets.
func TestDifferencesHideValues(t *testing.T) {
	b := mustBase(t, dockerRoot)
	b.Hello.Environ = append(b.Hello.Environ, "TOKEN=hunter2")
	err := notProven(b.compare())
	if err == nil || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), "TOKEN") {
		t.Error(err)
	}
}
