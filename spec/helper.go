package spec

import (
	"path"
	"strconv"

	"github.com/agentshim/agentshim/seccomp"
)

// Fixed names of the helper that makes a sandbox's way out (cmd/agentshim-netns).
const (
	// HelperPath is where a container of its own has it, HelperSocket its socket there.
	HelperPath   = "/.agentshim-netns"
	HelperSocket = HelperPath + ".sock"
	// HelperArg is its first argument: the hand-over's version.
	HelperArg = "netns/3"
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
func (p Plan) HelperContainer(run RunPaths, container string) (DockerContainer, error) {
	d := p.dockerBase("", "0:0", HelperPath, HelperArg, HelperSocket)
	d.Labels[LabelHelper], d.Labels[LabelRun] = HelperArg, run.ID
	h := &d.HostConfig
	h.NetworkMode, h.CapAdd = "container:"+container, []string{"NET_ADMIN"}
	policy, err := seccomp.Helper(p.Seccomp.Target())
	if err != nil {
		return DockerContainer{}, err
	}
	if err := h.confine(policy); err != nil {
		return DockerContainer{}, err
	}
	if p.Engine.SELinux {
		h.SecurityOpt = append(h.SecurityOpt, "label=disable") // a confined type may not connect to the caller's socket
	}
	h.helperLimits(p.Limits)
	h.bind(run.Helper(), HelperPath, false)
	h.bind(run.Socket(), HelperSocket, false)
	return d, h.portable()
}

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
