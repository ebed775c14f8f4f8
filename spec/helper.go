package spec

import (
	"path"
	"strconv"
)

// Fixed names of the helper that makes a sandbox's way out (cmd/agentshim-netns).
const (
	// HelperPath is where a container of its own has it, HelperSocket its socket there.
	HelperPath   = "/.agentshim-netns"
	HelperSocket = HelperPath + ".sock"
	// HelperArg is its first argument: the hand-over's version.
	HelperArg = "netns/1"
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

// HelperArgv is the argument list of Docker's client for the helper's container, as
// Argv's is for the run's own. It shares the network namespace of the container with
// that id, may administer it and nothing else, and sees two files of the host: itself
// and the socket. It runs from the run's own image, of which it uses nothing.
func (p Plan) HelperArgv(run RunPaths, container, netns string) ([]string, error) {
	a := argv{plan: p, run: run}
	a.add("run", "--rm", "--sig-proxy=false", "--init=false", "--pull=never",
		"--log-driver=none", "--no-healthcheck", "--stop-signal=SIGKILL")
	a.flag("name", run.HelperName())
	a.flag("label", LabelHelper+"="+HelperArg)
	a.flag("label", LabelRun+"="+run.ID)
	a.flag("network", "container:"+container)
	a.flag("ipc", "private")
	a.flag("cgroupns", "private")
	a.flag("user", "0:0")
	a.flag("cap-drop", "ALL")
	a.flag("cap-add", "NET_ADMIN")
	a.flag("security-opt", "no-new-privileges")
	if p.Engine.SELinux {
		a.flag("security-opt", "label=disable") // a confined type may not connect to the caller's socket
	}
	a.add("--read-only")
	a.helperLimits()
	a.environment()
	a.bind(a.ownBind(run.Helper(), HelperPath))
	a.bind(a.ownBind(run.Socket(), HelperSocket))
	a.flag("workdir", "/")
	a.flag("entrypoint", HelperPath)
	a.add("--", p.Image.ID, HelperArg, HelperSocket, netns)
	return a.args, a.err
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
