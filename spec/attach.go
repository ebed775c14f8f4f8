package spec

import (
	"errors"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/seccomp"
)

// Entered is what init saw of itself in a container that is not agentshim's.
type Entered struct {
	UID, GID uint32
	// Home is the home that the engine gave it.
	Home string
}

func (e *Entered) env() map[string]string {
	if e.Home == "" {
		return nil
	}
	return map[string]string{"HOME": e.Home}
}

// CheckAttach refuses, before anything of a container is touched, a file that does not accept that it
// is not agentshim's. What it asks of the container is not looked at: see harness.Attachable.
func CheckAttach(h harness.Harness) error {
	c := compiler{h: h}
	c.attached()
	return c.accepted()
}

// Attach decides the process that runs in another's container. Of the host it takes the engine,
// the machine, and as the image what the container's own configuration says. Of what a
// container of agentshim's would have, the plan holds the system call policy and the
// kernel paths, to compare with: nothing of it is enforced there.
func Attach(h harness.Harness, host Host, e Entered, o Options) (Plan, error) {
	c := compiler{h: h, host: host, o: o, entered: &e}
	c.plan = Plan{
		Version: PlanVersion, Name: h.Name, Engine: host.Engine, Image: host.Image,
		Identity: Identity{UID: e.UID, GID: e.GID, From: "container"},
	}
	for _, step := range []func() error{c.kernel, c.seccomp, c.process} {
		c.errs = append(c.errs, step())
	}
	c.plan.Process.RuntimeDir = ""
	c.attached()
	c.fileNotes()
	c.errs = append(c.errs, c.accepted())
	if err := errors.Join(c.errs...); err != nil {
		return Plan{}, err
	}
	return c.plan, nil
}

func (c *compiler) attached() {
	c.widen("attached-container", true, "the container is not agentshim's: nothing that agentshim guarantees of its own holds there")
}

// HoldArg is a holder's one argument: its version.
const HoldArg = "hold/1"

// HolderName is the name of a holder's container.
func (r RunPaths) HolderName() string { return "agentshim-" + r.ID + "-hold" }

// Holder is the body of Docker's POST /containers/create for what shows init's program to a
// container that is not agentshim's: Docker's exec starts only what can be seen there. It
// shares that container's processes and nothing else, runs from its image, of which it
// uses nothing, has no network, and is the exec's user, whose eyes alone see it.
func Holder(host Host, run RunPaths, container, user string) (DockerContainer, error) {
	p := Plan{Engine: host.Engine, Image: host.Image}
	d := p.dockerBase("", user, InitPath, HoldArg)
	d.AttachStdin, d.AttachStdout, d.AttachStderr = true, true, true
	d.OpenStdin, d.StdinOnce = true, true
	d.Labels[LabelHelper], d.Labels[LabelRun] = HoldArg, run.ID
	policy, err := seccomp.Helper(seccomp.Target{Arch: host.Machine.Arch, Docker: true})
	if err != nil {
		return DockerContainer{}, err
	}
	h := &d.HostConfig
	h.NetworkMode, h.PidMode = "none", "container:"+container
	h.helperLimits(Limits{})
	h.bind(run.Init, InitPath, false)
	return d, errors.Join(h.confine(policy), h.portable())
}
