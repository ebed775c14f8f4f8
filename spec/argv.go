package spec

import (
	"fmt"
	"math"
	"path"
	"strconv"
	"strings"

	"github.com/agentshim/agentshim/mounts"
)

// PodmanArgv is the argument list of Podman's client for one run, without the client
// itself. Every flag is one --flag=value word, and -- stands before the image.
func (p Plan) PodmanArgv(run RunPaths) ([]string, error) {
	a := argv{plan: p, run: run}
	a.global()
	a.add("run", "--rm", "--interactive", "--sig-proxy=false", "--init=false", "--pull=never",
		"--log-driver=none", "--no-healthcheck", "--stop-signal=SIGKILL")
	a.flag("cidfile", path.Join(run.Dir, "cid"))
	a.flag("pidfile", run.PIDFile())
	a.flag("name", "agentshim-"+run.ID)
	a.labels()
	a.isolation()
	a.limits()
	a.environment()
	a.mounts()
	a.devices()
	a.flag("workdir", "/")
	a.flag("entrypoint", InitPath)
	a.add("--", p.Image.ID, InitArg)
	return a.args, a.err
}

type argv struct {
	plan Plan
	run  RunPaths
	args []string
	err  error
}

func (a *argv) add(words ...string) { a.args = append(a.args, words...) }

func (a *argv) flag(name, value string) { a.add("--" + name + "=" + value) }

func (a *argv) global() {
	if a.plan.Engine.RuntimePath != "" {
		a.flag("runtime", a.plan.Engine.RuntimePath)
	}
}

func (a *argv) labels() {
	for _, k := range sortedKeys(a.plan.Labels) {
		a.flag("label", k+"="+a.plan.Labels[k])
	}
	if a.plan.Name != "" {
		a.flag("label", LabelName+"="+a.plan.Name)
	}
	a.flag("label", LabelRun+"="+a.run.ID)
}

func (a *argv) isolation() {
	p := a.plan
	a.flag("network", p.NetworkMode())
	a.flag("hostname", Hostname)
	a.flag("ipc", "private")
	a.flag("cgroupns", "private")
	a.flag("user", fmt.Sprintf("%d:%d", p.Identity.UID, p.Identity.GID))
	for _, g := range p.Identity.Groups {
		a.flag("group-add", strconv.FormatUint(uint64(g), 10))
	}
	if p.Identity.Userns != "" {
		a.flag("userns", p.Identity.Userns)
	}
	a.flag("cap-drop", "ALL")
	for _, name := range p.Capabilities {
		a.flag("cap-add", name)
	}
	a.flag("security-opt", "no-new-privileges")
	a.flag("security-opt", "seccomp="+path.Join(a.run.Dir, "seccomp.json"))
	if p.ReadOnlyRootfs {
		a.add("--read-only")
	}
	for _, k := range sortedKeys(p.Sysctls) {
		a.flag("sysctl", k+"="+p.Sysctls[k])
	}
	a.ownDefaults()
	if p.procUnmasked() {
		a.flag("security-opt", "unmask=/proc/*")
		return
	}
	for _, path := range podmanUnmasked {
		a.flag("security-opt", "mask="+path)
	}
}

// ownDefaults switches off what Podman would add by itself.
func (a *argv) ownDefaults() {
	a.add("--unsetenv-all", "--http-proxy=false", "--image-volume=ignore", "--passwd=false", "--no-hosts",
		"--read-only-tmpfs=false", "--systemd=false", "--umask=0022")
}

func (a *argv) limits() {
	l := a.plan.Limits
	if l.MemoryBytes > 0 {
		a.flag("memory", strconv.FormatInt(l.MemoryBytes, 10))
		a.flag("memory-swap", strconv.FormatInt(l.MemoryBytes, 10))
	}
	if l.CPUs > 0 {
		a.flag("cpus", strconv.FormatFloat(l.CPUs, 'f', -1, 64))
	}
	if l.PIDs > 0 {
		a.flag("pids-limit", strconv.FormatInt(l.PIDs, 10))
	}
	a.ulimit("core", l.Core)
	a.ulimit("nofile", l.NoFile)
	a.ulimit("nproc", l.NProc)
	// getrlimit(2): above 0, a process may take the CPU from init.
	a.ulimit("nice", 0)
	a.ulimit("rtprio", 0)
	a.flag("shm-size", strconv.FormatInt(l.ShmBytes, 10))
}

func (a *argv) ulimit(name string, n uint64) {
	text := strconv.FormatUint(n, 10)
	if n == math.MaxUint64 {
		text = "-1" // unlimited
	}
	a.flag("ulimit", name+"="+text+":"+text)
}

func (a *argv) environment() { a.flag("env", "PATH="+DefaultPath) }

func (a *argv) mounts() {
	for _, m := range a.plan.Mounts {
		switch {
		case m.Why == "shm": // --shm-size
		case m.Type == "tmpfs":
			a.flag("tmpfs", m.Target+":"+a.tmpfs(m))
		case m.Type == mounts.TypeVolume:
			a.volume(m.Source, m.Target)
		default:
			a.bind(m)
		}
	}
	for _, f := range a.plan.Etc {
		a.bind(a.ownBind(path.Join(a.run.Dir, "etc", f.Name), "/etc/"+f.Name))
	}
	a.bind(a.ownBind(a.run.Init, InitPath))
}

func (a *argv) devices() {
	for _, d := range a.plan.Devices {
		a.flag("device", d.Path()+":"+d.Path()+":"+DeviceAccess)
	}
}

// ownBind is a read-only bind of one of agentshim's own files, which has no label
// that a confined container may use.
func (a *argv) ownBind(source, target string) mounts.Mount {
	m := mounts.Mount{Type: "bind", Source: source, Target: target}
	if a.plan.Engine.SELinux {
		m.Label = "z"
	}
	return m
}

func (a *argv) tmpfs(m mounts.Mount) string {
	opts := append(tmpfsOptions(m), "notmpcopyup")
	if m.UID == a.plan.Identity.UID && m.GID == a.plan.Identity.GID {
		opts = append(opts, "U") // owned by the container's user; uid= is refused
	}
	return strings.Join(opts, ",")
}

func tmpfsOptions(m mounts.Mount) []string {
	return []string{"rw", "nosuid", "nodev", execOption(m), fmt.Sprintf("size=%d", m.SizeBytes), fmt.Sprintf("mode=%04o", m.Mode)}
}

func execOption(m mounts.Mount) string {
	if m.NoExec {
		return "noexec"
	}
	return "exec"
}

// relabels are Podman's words for the labels.
var relabels = map[string]string{"z": "shared", "Z": "private"}

func (a *argv) bind(m mounts.Mount) {
	fields := []string{"type=bind", "source=" + a.run.Source(m), "target=" + m.Target, "bind-propagation=rprivate"}
	if !m.Writable {
		fields = append(fields, "readonly")
	}
	fields = append(fields, "nosuid", "nodev")
	if m.NoExec {
		fields = append(fields, "noexec")
	}
	if relabel := relabels[m.Label]; relabel != "" {
		fields = append(fields, "relabel="+relabel)
	}
	record, err := mounts.CSV(fields...)
	if err != nil {
		a.err = err
		return
	}
	a.flag("mount", record)
}
