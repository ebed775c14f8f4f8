package spec

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path"
	"strconv"
	"unicode/utf8"

	"github.com/agentshim/agentshim/seccomp"
)

// Fixed names of the helper that makes a sandbox's way out (cmd/agentshim-netns).
const (
	// HelperPath is where a container of its own has it, HelperSocket its socket there.
	HelperPath   = "/.agentshim-netns"
	HelperSocket = HelperPath + ".sock"
	// HelperArg is its first argument: the hand-over's version.
	HelperArg = "netns/2"
	// LabelHelper marks its container, which carries LabelRun too.
	LabelHelper = "agentshim.helper"
)

// Bounds of the helper's container.
const (
	helperMemory = 64 << 20
	helperPIDs   = 64
)

// Helper is the helper's file on the host, Socket what it connects to, PIDFile where
// Podman writes the host's pid of init.
func (r RunPaths) Helper() string  { return path.Join(r.Dir, "agentshim-netns") }
func (r RunPaths) Socket() string  { return path.Join(r.Dir, "netns.sock") }
func (r RunPaths) PIDFile() string { return path.Join(r.Dir, "pid") }

// HelperName is the name of the helper's container.
func (r RunPaths) HelperName() string { return "agentshim-" + r.ID + "-netns" }

// HelperContainer is the body of Docker's POST /containers/create for the helper's
// container. It shares the network namespace of the container with that id, may
// administer it and nothing else, and sees two files of the host: itself and the
// socket. It runs from the run's own image, of which it uses nothing, under a system
// call policy of its own. The rest is the daemon's defaults.
func (p Plan) HelperContainer(run RunPaths, container string) (HelperContainer, error) {
	h := HelperContainer{
		Image: p.Image.ID, Entrypoint: []string{HelperPath}, Cmd: []string{HelperArg, HelperSocket},
		User: "0:0", WorkingDir: "/", Env: p.initEnv(), StopSignal: "SIGKILL",
		Labels: map[string]string{LabelHelper: HelperArg, LabelRun: run.ID},
	}
	h.Healthcheck.Test = []string{"NONE"}
	c := &h.HostConfig
	c.NetworkMode, c.IpcMode, c.CgroupnsMode = "container:"+container, "private", "private"
	c.CapDrop, c.CapAdd = []string{"ALL"}, []string{"NET_ADMIN"}
	policy, err := seccomp.Helper(p.Seccomp.Target())
	if err != nil {
		return HelperContainer{}, err
	}
	var profile bytes.Buffer
	if err := json.Compact(&profile, policy.Profile()); err != nil {
		return HelperContainer{}, err
	}
	c.SecurityOpt = []string{"no-new-privileges", "seccomp=" + profile.String()}
	if p.Engine.SELinux {
		c.SecurityOpt = append(c.SecurityOpt, "label=disable") // a confined type may not connect to the caller's socket
	}
	c.ReadonlyRootfs, c.AutoRemove, c.LogConfig.Type = true, true, "none"
	if p.Limits.MemoryBytes > 0 {
		c.Memory, c.MemorySwap = helperMemory, helperMemory
	}
	if p.Limits.PIDs > 0 {
		c.PidsLimit = helperPIDs
	}
	c.Ulimits = []helperUlimit{{Name: "core"}}
	for _, m := range [][2]string{{run.Helper(), HelperPath}, {run.Socket(), HelperSocket}} {
		if !utf8.ValidString(m[0]) {
			return HelperContainer{}, fmt.Errorf("bind %q: not valid UTF-8", m[0]) // JSON can't hold it
		}
		c.Mounts = append(c.Mounts, helperMount{Type: "bind", Source: m[0], Target: m[1], ReadOnly: true, BindOptions: helperBind{"rprivate"}})
	}
	return h, nil
}

// HelperContainer holds the fields of Docker's API that the helper's container needs.
type HelperContainer struct {
	Image           string
	Entrypoint, Cmd []string
	User            string
	WorkingDir      string
	Env             []string
	Labels          map[string]string
	StopSignal      string
	Healthcheck     struct{ Test []string }
	HostConfig      helperHostConfig
}

type helperHostConfig struct {
	NetworkMode, IpcMode, CgroupnsMode string
	CapDrop, CapAdd, SecurityOpt       []string
	ReadonlyRootfs, AutoRemove, Init   bool
	LogConfig                          struct{ Type string }
	Memory, MemorySwap, PidsLimit      int64 `json:",omitempty"`
	Ulimits                            []helperUlimit
	Mounts                             []helperMount
}

type helperUlimit struct {
	Name       string
	Hard, Soft int64
}

type helperMount struct {
	Type, Source, Target string
	ReadOnly             bool
	BindOptions          helperBind
}

type helperBind struct{ Propagation string }

// helperLimits bounds a container of agentshim's own.
func (a *argv) helperLimits() {
	if a.plan.Limits.MemoryBytes > 0 {
		a.flag("memory", strconv.Itoa(helperMemory))
		a.flag("memory-swap", strconv.Itoa(helperMemory))
	}
	if a.plan.Limits.PIDs > 0 {
		a.flag("pids-limit", strconv.Itoa(helperPIDs))
	}
	a.ulimit("core", 0)
}
