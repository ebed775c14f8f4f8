package spec

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/seccomp"
)

// DockerContainer is the body of Docker's POST /containers/create, as far as it is used.
// What stands without omitempty is said also where it is the daemon's default today.
type DockerContainer struct {
	Image           string
	Entrypoint, Cmd []string
	User            string
	WorkingDir      string
	Hostname        string `json:",omitempty"`
	Env             []string
	Labels          map[string]string
	StopSignal      string
	Healthcheck     struct{ Test []string }
	// OpenStdin with StdinOnce closes standard input when who is attached to it is gone.
	AttachStdin, AttachStdout, AttachStderr bool
	OpenStdin, StdinOnce                    bool
	HostConfig                              DockerHostConfig
}

// DockerHostConfig is its part of what the host does for the container.
type DockerHostConfig struct {
	NetworkMode, IpcMode, CgroupnsMode string
	PidMode                            string `json:",omitempty"`
	CapDrop, CapAdd, SecurityOpt       []string
	GroupAdd                           []string `json:",omitempty"`
	ReadonlyRootfs, AutoRemove, Init   bool
	LogConfig                          struct{ Type string }
	Memory, MemorySwap                 int64             `json:",omitempty"`
	NanoCpus, PidsLimit, ShmSize       int64             `json:",omitempty"`
	Sysctls                            map[string]string `json:",omitempty"`
	Ulimits                            []DockerUlimit
	Tmpfs                              map[string]string `json:",omitempty"`
	Mounts                             []DockerMount
	Devices                            []DockerDevice `json:",omitempty"`
	// MaskedPaths and ReadonlyPaths stand in the place of the daemon's own lists; nil leaves those.
	MaskedPaths, ReadonlyPaths *[]string `json:",omitempty"`
}

// DockerUlimit is one resource limit; -1 is none.
type DockerUlimit struct {
	Name       string
	Hard, Soft int64
}

// DockerMount is a bind or a volume.
type DockerMount struct {
	Type, Source, Target string
	ReadOnly             bool
	BindOptions          *DockerBind         `json:",omitempty"`
	VolumeOptions        *DockerVolumeOption `json:",omitempty"`
}

// DockerBind has a bind's propagation.
type DockerBind struct{ Propagation string }

// DockerVolumeOption has NoCopy: Docker would fill an empty volume with the image's
// files, and give it their owner.
type DockerVolumeOption struct{ NoCopy bool }

// DockerDevice gives a device of the host. The daemon's account of a container has the same.
type DockerDevice struct {
	PathOnHost, PathInContainer, CgroupPermissions string
}

// Docker is the device as Docker's daemon is asked for it.
func (d HostDevice) Docker() DockerDevice {
	return DockerDevice{PathOnHost: d.Path(), PathInContainer: d.Path(), CgroupPermissions: DeviceAccess}
}

// DockerContainer is what the daemon is asked for one run: a container whose init reads
// and writes what is attached to it, and which the daemon removes when it ends.
func (p Plan) DockerContainer(run RunPaths) (DockerContainer, error) {
	c := p.dockerBase(Hostname, fmt.Sprintf("%d:%d", p.Identity.UID, p.Identity.GID), InitPath, InitArg)
	c.AttachStdin, c.AttachStdout, c.AttachStderr = true, true, true
	c.OpenStdin, c.StdinOnce = true, true
	maps.Copy(c.Labels, p.Labels)
	if p.Name != "" {
		c.Labels[LabelName] = p.Name
	}
	c.Labels[LabelRun] = run.ID
	h := &c.HostConfig
	h.NetworkMode = p.NetworkMode()
	h.CapAdd = p.Capabilities
	for _, g := range p.Identity.Groups {
		h.GroupAdd = append(h.GroupAdd, strconv.FormatUint(uint64(g), 10))
	}
	h.ReadonlyRootfs, h.Sysctls = p.ReadOnlyRootfs, p.Sysctls
	h.limits(p.Limits)
	for _, d := range p.Devices {
		h.Devices = append(h.Devices, d.Docker())
	}
	if p.procUnmasked() {
		masked := slices.Concat(p.MaskedPaths, dockerMaskedLater)
		h.MaskedPaths, h.ReadonlyPaths = &masked, &p.ReadonlyPaths
	}
	h.mounts(p, run)
	return c, errors.Join(h.confine(p.Seccomp), h.portable())
}

// dockerMaskedLater is outside of /proc and in the lists of later daemons.
var dockerMaskedLater = []string{"/sys/devices/virtual/powercap"}

// JSON is the body as it is shown, indented, with a trailing newline.
func (c DockerContainer) JSON() ([]byte, error) { return indent(c) }

// dockerBase is what every container of agentshim's has: init or a helper as its only
// program, no capability, no log, nothing of the image's configuration.
func (p Plan) dockerBase(hostname, user string, program ...string) DockerContainer {
	c := DockerContainer{
		Image: p.Image.ID, Entrypoint: program[:1], Cmd: program[1:], Hostname: hostname,
		User: user, WorkingDir: "/", Env: p.initEnv(), StopSignal: "SIGKILL", Labels: map[string]string{},
	}
	c.Healthcheck.Test = []string{"NONE"}
	h := &c.HostConfig
	h.IpcMode, h.CgroupnsMode = "private", "private"
	h.CapDrop, h.CapAdd = []string{"ALL"}, []string{}
	h.ReadonlyRootfs, h.AutoRemove, h.LogConfig.Type = true, true, "none"
	return c
}

// initEnv keeps the image's variables from agentshim's own programs: a Go program obeys
// some of them. The daemon drops a variable that is named without a value.
func (p Plan) initEnv() []string {
	env := []string{"PATH=" + DefaultPath}
	for _, kv := range p.Image.Env {
		if name, _, _ := strings.Cut(kv, "="); name != "PATH" {
			env = append(env, name)
		}
	}
	return env
}

// confine gives the container the policy as its system call profile.
func (h *DockerHostConfig) confine(policy *seccomp.Policy) error {
	var profile bytes.Buffer
	if err := json.Compact(&profile, policy.Profile()); err != nil {
		return err
	}
	h.SecurityOpt = []string{"no-new-privileges", "seccomp=" + profile.String()}
	return nil
}

func (h *DockerHostConfig) limits(l Limits) {
	if l.MemoryBytes > 0 {
		h.Memory, h.MemorySwap = l.MemoryBytes, l.MemoryBytes
	}
	// As Docker's client reads --cpus: exact, not by a float's rounding.
	h.NanoCpus, h.PidsLimit, h.ShmSize = int64(math.Round(l.CPUs*1e9)), l.PIDs, l.ShmBytes
	h.Ulimits = append(h.Ulimits, ulimit("core", l.Core), ulimit("nofile", l.NoFile), ulimit("nproc", l.NProc),
		// getrlimit(2): above 0, a process may take the CPU from init.
		ulimit("nice", 0), ulimit("rtprio", 0))
}

func ulimit(name string, n uint64) DockerUlimit {
	limit := int64(-1)
	if n <= math.MaxInt64 {
		limit = int64(n)
	}
	return DockerUlimit{Name: name, Hard: limit, Soft: limit}
}

// helperLimits bounds a container of agentshim's own.
func (h *DockerHostConfig) helperLimits(l Limits) {
	if l.MemoryBytes > 0 {
		h.Memory, h.MemorySwap = helperMemory, helperMemory
	}
	if l.PIDs > 0 {
		h.PidsLimit = helperPIDs
	}
	h.Ulimits = append(h.Ulimits, ulimit("core", 0))
}

func (h *DockerHostConfig) mounts(p Plan, run RunPaths) {
	for _, m := range p.Mounts {
		switch {
		case m.Why == "shm": // ShmSize
		case m.Type == "tmpfs":
			if h.Tmpfs == nil {
				h.Tmpfs = map[string]string{}
			}
			h.Tmpfs[m.Target] = dockerTmpfs(m)
		case m.Type == mounts.TypeVolume:
			h.volume(m.Source, m.Target)
		default:
			h.bind(run.Source(m), m.Target, m.Writable)
		}
	}
	for _, f := range p.Etc {
		h.bind(path.Join(run.Dir, "etc", f.Name), "/etc/"+f.Name, false)
	}
	h.bind(run.Init, InitPath, false)
}

// bind: the daemon orders mounts by their targets, parents first.
func (h *DockerHostConfig) bind(source, target string, writable bool) {
	h.Mounts = append(h.Mounts, DockerMount{
		Type: "bind", Source: source, Target: target, ReadOnly: !writable, BindOptions: &DockerBind{"rprivate"},
	})
}

func (h *DockerHostConfig) volume(name, target string) {
	h.Mounts = append(h.Mounts, DockerMount{
		Type: mounts.TypeVolume, Source: name, Target: target, VolumeOptions: &DockerVolumeOption{NoCopy: true},
	})
}

// portable refuses what JSON can't hold: an encoder would change it.
func (h *DockerHostConfig) portable() error {
	for _, m := range h.Mounts {
		for _, text := range []string{m.Source, m.Target} {
			if !utf8.ValidString(text) {
				return fmt.Errorf("%w: %q: not valid UTF-8", mounts.ErrCSV, text)
			}
		}
	}
	return nil
}

// InodeBytes is the tmpfs space per file that Docker's nr_inodes allows.
const InodeBytes = 2048

func dockerTmpfs(m mounts.Mount) string {
	return strings.Join(append(tmpfsOptions(m),
		fmt.Sprintf("uid=%d", m.UID), fmt.Sprintf("gid=%d", m.GID), fmt.Sprintf("nr_inodes=%d", m.SizeBytes/InodeBytes)), ",")
}
