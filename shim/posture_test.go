package shim

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// posed is the posture of a container like one of agentshim's own, as init saw a real one, changed.
func posed(t *testing.T, change func(p *posture)) map[string]Finding {
	t.Helper()
	b := mustBase(t, "podman-rootless")
	b.Hello.Cgroup = wire.Cgroup{Version: 1, Memory: 1, CPUQuota: 1, CPUPeriod: 1, PIDs: 1}
	b.Hello.LSM = "docker-default (enforce)"
	p := posture{attestation: attestation{plan: b.plan, host: b.host, hello: b.Hello}, image: spec.Image{Ref: "agent:dev", ID: "sha256:1"}}
	p.container.Image = "sha256:1"
	for i := range p.hello.Mounts {
		// The folder that the run's agent had.
		if m := &p.hello.Mounts[i]; m.Target == "/workspace" {
			m.Options = []string{"ro"}
		}
	}
	if change != nil {
		change(&p)
	}
	found := map[string]Finding{}
	for _, f := range p.findings() {
		if found[f.Name].Name != "" {
			t.Errorf("twice: %s", f)
		}
		found[f.Name] = f
	}
	return found
}

// Each finding turns on what it is about, and on nothing else.
func TestPosture(t *testing.T) {
	tight := posed(t, nil)
	for name, f := range tight {
		if f.Open {
			t.Errorf("agentshim's own: %s: %s", name, f)
		}
	}
	mount := func(m wire.Mount) func(*posture) {
		return func(p *posture) { p.hello.Mounts = append(p.hello.Mounts, m) }
	}
	for name, tc := range map[string]struct {
		change func(p *posture)
		open   string
		detail string
	}{
		"another image":       {func(p *posture) { p.container.Image = "sha256:2" }, "image", `not the file's "agent:dev"`},
		"an unknown image":    {func(p *posture) { p.imageErr = errors.New("no such") }, "image", "no such"},
		"root":                {func(p *posture) { p.hello.UIDs[0] = 0 }, "user", "uid 0"},
		"one capability":      {func(p *posture) { p.hello.Capabilities["CapBnd"] = "0000000000200000" }, "capabilities", "bounding: SYS_ADMIN"},
		"the same in two":     {func(p *posture) { p.hello.Capabilities["CapBnd"], p.hello.Capabilities["CapInh"] = "1", "1" }, "capabilities", "inheritable, bounding: CHOWN"},
		"all":                 {func(p *posture) { p.hello.Capabilities["CapBnd"] = "1ffffffffff" }, "capabilities", "bounding: all"},
		"nearly all":          {func(p *posture) { p.hello.Capabilities["CapBnd"] = "1fffeffffff" }, "capabilities", "all but SYS_RESOURCE"},
		"a later one":         {func(p *posture) { p.hello.Capabilities["CapBnd"] = "20000000000" }, "capabilities", "bounding: 41"},
		"no capability line":  {func(p *posture) { delete(p.hello.Capabilities, "CapEff") }, "capabilities", "unknown"},
		"new privileges":      {func(p *posture) { p.hello.NoNewPrivs = false }, "no-new-privileges", "not set"},
		"no filter":           {func(p *posture) { p.hello.SeccompMode, p.hello.SeccompFilters = 0, 0 }, "seccomp", "mode 0"},
		"a call":              {func(p *posture) { p.hello.Syscalls[callOf("bpf")] = "EINVAL" }, "system-calls", "bpf"},
		"a call that works":   {func(p *posture) { p.hello.Syscalls[callOf("unshare")] = "ok" }, "system-calls", "unshare"},
		"a writable root":     {func(p *posture) { setRoot(p, "rw") }, "root", "writable"},
		"the host's network":  {func(p *posture) { p.host.Machine.Namespaces = map[string]string{"net": p.hello.Namespaces["net"]} }, "shared-namespaces", "net"},
		"privileged":          {func(p *posture) { p.container.HostConfig.Privileged = true }, "engine", "privileged"},
		"another's namespace": {func(p *posture) { p.container.HostConfig.PidMode = "container:x" }, "engine", `pid "container:x"`},
		"unconfined":          {func(p *posture) { p.container.HostConfig.SecurityOpt = []string{"seccomp=unconfined"} }, "engine", "seccomp=unconfined"},
		"an open kernel path": {func(p *posture) {
			p.hello.Mounts = slices.DeleteFunc(p.hello.Mounts, func(m wire.Mount) bool { return m.Target == "/proc/keys" })
		}, "kernel-paths", "masked path /proc/keys is open"},
		"an interface":        {func(p *posture) { p.hello.Interfaces = append(p.hello.Interfaces, "eth0\n") }, "network", `"eth0\n"`},
		"an address":          {func(p *posture) { p.hello.Addresses = append(p.hello.Addresses, "eth0 10.0.0.2") }, "network", "10.0.0.2"},
		"a route":             {func(p *posture) { p.hello.Routes = 1 }, "network", "1 routes"},
		"a disk's folder":     {mount(wire.Mount{Target: "/data", Type: "ext4", Options: []string{"rw"}}), "writable-mounts", `"/data"`},
		"a socket":            {mount(wire.Mount{Target: "/s", Type: "tmpfs", Options: []string{"rw"}, Mode: 0o140777}), "sockets", `"/s"`},
		"a device":            {func(p *posture) { p.hello.DevNodes = append(p.hello.DevNodes, "b 8:0 sda") }, "devices", "sda"},
		"no memory limit":     {func(p *posture) { p.hello.Cgroup.Memory = -1 }, "limits", "no memory limit"},
		"unknown limit":       {func(p *posture) { p.hello.Cgroup.PIDs = -2 }, "limits", "pids unknown"},
		"no label":            {func(p *posture) { p.hello.LSM = "" }, "security-module", "no label"},
		"an unconfined label": {func(p *posture) { p.hello.LSM = "unconfined" }, "security-module", "unconfined"},
		"what init can't see": {func(p *posture) { p.hello.Errors = map[string]string{"status": "EACCES"} }, "unknown", "status: EACCES"},
	} {
		t.Run(name, func(t *testing.T) {
			got := posed(t, tc.change)
			for name, f := range got {
				if f.Open != (name == tc.open) {
					t.Errorf("%s", f)
				}
			}
			if f := got[tc.open]; !strings.Contains(f.Detail, tc.detail) {
				t.Errorf("%q is not in %s", tc.detail, f)
			}
		})
	}
	t.Run("a tmpfs of the host's", func(t *testing.T) {
		got := posed(t, func(p *posture) {
			p.hello.Mounts = append(p.hello.Mounts, wire.Mount{Target: "/x", Type: "tmpfs", Options: []string{"rw"}})
			p.container.Mounts = []foreignMount{{Type: "bind", Source: "/run/x", Destination: "/x", RW: true}}
		})["writable-mounts"]
		if !got.Open || !strings.Contains(got.Detail, `"/x" (bind "/run/x")`) {
			t.Errorf("%s", got)
		}
	})
}

func callOf(name string) int {
	for i, c := range wire.Syscalls {
		if c.Name == name {
			return i
		}
	}
	panic(name)
}

func setRoot(p *posture, option string) {
	for i := range p.hello.Mounts {
		if m := &p.hello.Mounts[i]; m.Target == "/" {
			m.Options, m.Super = []string{option}, nil
		}
	}
}
