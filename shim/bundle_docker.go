package shim

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentshim/agentshim/spec"
)

// dockerContainer is the part of GET /containers/ID/json that is compared.
type dockerContainer struct {
	Image      string
	Path       string
	Args       []string
	State      struct{ Pid int }
	Mounts     []dockerMount
	HostConfig dockerHostConfig
}

type dockerMount struct {
	Type, Name, Driver, Source, Destination string
	RW                                      bool
	Propagation                             string
}

type dockerHostConfig struct {
	Privileged, ReadonlyRootfs             bool
	NetworkMode, PidMode, IpcMode, UTSMode string
	CgroupnsMode, Runtime                  string
	CapAdd, SecurityOpt, VolumesFrom       []string
	Devices                                []spec.DockerDevice
	DeviceRequests                         []json.RawMessage
	DeviceCgroupRules                      []string
	MaskedPaths, ReadonlyPaths             []string
	Sysctls, Tmpfs                         map[string]string
	OomScoreAdj                            int
	OomKillDisable                         *bool
	CPURealtimeRuntime                     int64 `json:"CpuRealtimeRuntime"`
	Init                                   *bool
}

// compareInspected asks the daemon what it made of the command. An answer that
// does not come is a Difference.
func (c *container) compareInspected(d *docker, id string) []Difference {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	var got dockerContainer
	if err := d.api.get(ctx, "/containers/"+id+"/json", &got); err != nil {
		return []Difference{{Field: "container", Want: "known to the daemon", Got: err.Error()}}
	}
	c.pid = got.State.Pid
	return compareDocker(c.p.plan, c.paths, got)
}

// compareDocker returns where Docker's own account of the container has more than
// the plan, in a fixed order.
func compareDocker(plan spec.Plan, run spec.RunPaths, got dockerContainer) []Difference {
	i := inspection{attestation: attestation{plan: plan}, run: run, got: got, host: got.HostConfig}
	for _, check := range []func(){i.program, i.modes, i.devices, i.security, i.paths, i.mounts} {
		check()
	}
	return i.diffs
}

type inspection struct {
	attestation
	run  spec.RunPaths
	got  dockerContainer
	host dockerHostConfig
}

func (i *inspection) differ(field, want string, got any) {
	i.attestation.differ("inspect "+field, want, got)
}

func (i *inspection) same(field, want, got string) {
	if want != got {
		i.differ(field, strconv.Quote(want), strconv.Quote(got))
	}
}

func (i *inspection) program() {
	i.same("image", i.plan.Image.ID, i.got.Image)
	if argv := append([]string{i.got.Path}, i.got.Args...); !slices.Equal(argv, initArgs) {
		i.differ("args", fmt.Sprintf("%q", initArgs), fmt.Sprintf("%q", argv))
	}
	i.same("runtime", i.plan.Engine.Runtime, i.host.Runtime)
	if i.host.Init != nil && *i.host.Init {
		i.differ("init", "agentshim's", "docker's")
	}
}

func (i *inspection) modes() {
	h := i.host
	i.same("network", i.plan.NetworkMode(), h.NetworkMode)
	i.same("pid namespace", "", h.PidMode)
	i.same("ipc namespace", "private", h.IpcMode)
	i.same("uts namespace", "", h.UTSMode)
	i.same("cgroup namespace", "private", h.CgroupnsMode)
	if h.Privileged {
		i.differ("privileged", "false", true)
	}
	if i.plan.ReadOnlyRootfs && !h.ReadonlyRootfs {
		i.differ("root", "read-only", "writable")
	}
	if h.OomScoreAdj < 0 {
		i.differ("oom_score_adj", "at least 0", h.OomScoreAdj)
	}
	if h.OomKillDisable != nil && *h.OomKillDisable {
		i.differ("oom killer", "enabled", "disabled")
	}
	if h.CPURealtimeRuntime > 0 {
		i.differ("realtime cpu", "none", h.CPURealtimeRuntime)
	}
}

func (i *inspection) devices() {
	planned := map[spec.DockerDevice]bool{}
	for _, d := range i.plan.Devices {
		planned[d.Docker()] = true
	}
	for _, d := range i.host.Devices {
		if !planned[d] {
			i.differ("device", i.deviceText(), fmt.Sprintf("%q as %q, %s", d.PathOnHost, d.PathInContainer, d.CgroupPermissions))
		}
	}
	for _, d := range i.host.DeviceRequests {
		i.differ("device", i.deviceText(), string(d))
	}
	for _, r := range i.host.DeviceCgroupRules {
		i.differ("device cgroup", "the default devices", strconv.Quote(r))
	}
}

func (i *inspection) security() {
	for _, name := range i.host.CapAdd {
		if !slices.Contains(i.plan.Capabilities, strings.TrimPrefix(name, "CAP_")) {
			i.differ("capabilities", fmt.Sprint(i.plan.Capabilities), name)
		}
	}
	missing := map[string]bool{"no-new-privileges": true, "seccomp": true}
	for _, opt := range i.host.SecurityOpt {
		name, value, _ := strings.Cut(strings.Replace(opt, ":", "=", 1), "=")
		if strings.HasPrefix(opt, "seccomp=") {
			_, value, _ = strings.Cut(opt, "=")
		}
		delete(missing, name)
		switch {
		case name == "no-new-privileges" && (value == "" || value == "true"):
		case name == "seccomp":
			i.seccomp(value)
		default:
			i.differ("security option", "none but no-new-privileges and seccomp", strconv.Quote(opt))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		i.differ("security option "+name, "set", "not set")
	}
}

// seccomp: Docker keeps the profile that the client sent, whole.
func (i *inspection) seccomp(profile string) {
	var got oci.LinuxSeccomp
	if err := json.Unmarshal([]byte(profile), &got); err != nil {
		i.differ("seccomp", "the plan's policy", strconv.Quote(firstWords(profile)))
		return
	}
	if d := seccompDifference(i.plan.Seccomp.OCI(), &got); d != "" {
		i.differ("seccomp", "the plan's policy", d)
	}
}

func firstWords(s string) string { return s[:min(len(s), 80)] }

func (i *inspection) paths() {
	for _, p := range i.plan.MaskedPaths {
		if !slices.Contains(i.host.MaskedPaths, p) {
			i.differ("masked path "+p, "masked", "open")
		}
	}
	for _, p := range i.plan.ReadonlyPaths {
		if !slices.Contains(i.host.ReadonlyPaths, p) && !slices.Contains(i.host.MaskedPaths, p) {
			i.differ("read-only path "+p, "read-only", "writable")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(i.host.Sysctls)) {
		if want, ok := i.plan.Sysctls[name]; !ok || want != i.host.Sysctls[name] {
			i.differ("sysctl "+name, strconv.Quote(want), strconv.Quote(i.host.Sysctls[name]))
		}
	}
}

func (i *inspection) mounts() {
	sources := plannedSources(i.plan, i.run)
	volumes := plannedVolumes(i.plan)
	tmpfs, writable := plannedKinds(i.plan)
	for _, from := range i.host.VolumesFrom {
		i.differ("volumes from", "none", strconv.Quote(from))
	}
	for _, m := range i.got.Mounts {
		field := "mount " + strconv.Quote(m.Destination)
		source, ok := sources[m.Destination]
		volume, isVolume := volumes[m.Destination]
		switch {
		case isVolume && m.Type == "volume":
			if m.Name != volume || m.Driver != localDriver {
				i.differ(field, "volume "+volume, fmt.Sprintf("volume %q of driver %q", m.Name, m.Driver))
			}
		case !ok || m.Type != "bind":
			i.differ(field, "not mounted", m.Type+" of "+strconv.Quote(m.Source))
		case m.Source != source:
			i.differ(field, strconv.Quote(source), strconv.Quote(m.Source))
		case m.RW && !writable[m.Destination]:
			i.differ(field, "read-only", "writable")
		case m.Propagation != "rprivate" && m.Propagation != "private":
			i.differ(field, "rprivate", strconv.Quote(m.Propagation))
		}
	}
	for _, target := range slices.Sorted(maps.Keys(i.host.Tmpfs)) {
		if _, ok := tmpfs[target]; !ok {
			i.differ("mount "+strconv.Quote(target), "not mounted", "tmpfs")
		}
	}
}
