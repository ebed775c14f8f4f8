package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// AttachedRecord says in a record that the harness ran in a container that agentshim did not
// start, and what that was. Nothing of it is agentshim's promise.
type AttachedRecord struct {
	// ID, Name, Image and ImageID are the container's by the engine's word.
	ID      string `json:"id"`
	Name    string `json:"name"`
	Image   string `json:"image"`
	ImageID string `json:"imageId"`
	// UID and GID are the harness's in the container, once known.
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
	// Posture is what was found, before the harness started.
	Posture []Finding `json:"posture,omitempty"`
}

// foreign is what an engine says of a container, in Docker's words, which are Podman's too.
type foreign struct {
	ID        string `json:"Id"`
	Name      string
	Image     string
	ImageName string // Podman's; Docker has it in Config
	Path      string
	State     struct{ Running, Paused bool }
	Config    struct {
		User, WorkingDir, Image string
		Env                     []string
	}
	HostConfig struct {
		Privileged                             bool
		NetworkMode, PidMode, IpcMode, UTSMode string
		SecurityOpt                            []string
	}
	Mounts []foreignMount
}

type foreignMount struct {
	Type, Source, Destination string
	RW                        bool
}

func (f foreign) imageName() string {
	if f.ImageName != "" {
		return f.ImageName
	}
	return f.Config.Image
}

// writable are the host's folders in which whoever is in the container may have made links.
func (f foreign) writable() []string {
	var dirs []string
	for _, m := range f.Mounts {
		if m.RW && m.Source != "" {
			dirs = append(dirs, m.Source)
		}
	}
	return dirs
}

// entry is one start of init in another's container.
type entry struct {
	// user is the file's; empty is the container's own.
	container, user string
	host            spec.Host
	paths           spec.RunPaths
}

// steadyEnv takes the container's own variables out of the Go runtime's reach: an exec can't be
// without a variable of the container's, but have it empty, which is the default for each.
var steadyEnv = []string{"GODEBUG=", "GOGC=", "GOMAXPROCS=", "GOMEMLIMIT=", "GOTRACEBACK="}

var containerForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,254}$`)

func noContainer(a Adapter, name string) error {
	return &Error{
		Reason: ReasonContainer, Msg: fmt.Sprintf("%s has no container %q", a.Engine().Kind, name),
		Hint: fmt.Sprintf("%s ps --all lists them; another engine's need --engine", a.Engine().Kind),
	}
}

// prepareAttached finds the container and reads what the caller gives.
func prepareAttached(ctx context.Context, j Job, ph *phases, rec *Record) (*prepared, error) {
	p := &prepared{job: j, phases: ph, stdin: j.Stdin, promptPath: wire.AttachDir + "/.agentshim-prompt-" + rec.ID}
	p.job.Stdin = interruptible{ctx, steadyReader(j.Stdin)}
	var err error
	if p.folders, err = openFolders(j.getenv, homeFolder(j.getenv)); err != nil {
		return nil, err
	}
	if err := asError(errors.Join(spec.CheckAttach(j.Harness), harness.Attachable(j.Spec, j.Harness))); err != nil {
		return p, err
	}
	if err := p.probeForeign(ctx); err != nil {
		return p, err
	}
	ph.done("probe")
	if p.envFiles, err = p.readEnvFiles(); err == nil {
		err = errors.Join(p.readCallerEnv(), p.readPrompt())
	}
	ph.done("inputs")
	return p, err
}

// probeForeign asks the engine for the container.
func (p *prepared) probeForeign(ctx context.Context) error {
	name := p.job.Container
	if !containerForm.MatchString(name) {
		return &Error{Reason: ReasonContainer, Msg: fmt.Sprintf("%q is no container's name or id", name)}
	}
	opts, err := p.probeOptions()
	if err != nil {
		return err
	}
	if p.host.Machine, err = ProbeMachine(); err != nil {
		return err
	}
	if p.host.Caller, err = probeCaller(opts.withDefaults()); err != nil {
		return err
	}
	if p.adapter, err = ProbeEngine(ctx, opts); err != nil {
		return err
	}
	p.host.Engine = p.adapter.Engine()
	f, err := p.adapter.foreign(ctx, name)
	if err != nil {
		return err
	}
	p.foreign = &f
	p.host.Image = spec.Image{Ref: f.imageName(), ID: f.Image, User: f.Config.User, Env: f.Config.Env, WorkingDir: f.Config.WorkingDir}
	return f.usable(p.host.Engine.Kind)
}

// usable refuses a container in which nothing can be started, or nothing should.
func (f foreign) usable(engine string) error {
	refused := func(hint, why string) error {
		return &Error{Reason: ReasonContainer, Msg: fmt.Sprintf("container %q %s", f.Name, why), Hint: hint}
	}
	switch {
	case !isContainerID(f.ID):
		return &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("container id %q", firstWords(f.ID))}
	case f.Path == spec.InitPath || f.Path == spec.HelperPath:
		return refused("agentshim ps lists sessions; agentshim exec --session runs in one", "is agentshim's own")
	case f.State.Paused:
		return refused(engine+" unpause "+f.Name, "is paused")
	case !f.State.Running:
		return refused(engine+" start "+f.Name, "does not run")
	}
	return nil
}

// runAttached runs the harness in the container to its end.
func (p *prepared) runAttached(ctx context.Context, rec *Record) (err error) {
	f := p.foreign
	rec.Engine, rec.Image, rec.Caller, rec.Machine, rec.Container = &p.host.Engine, &p.host.Image, &p.host.Caller, &p.host.Machine, f.ID
	rec.Attached = &AttachedRecord{ID: f.ID, Name: f.Name, Image: f.imageName(), ImageID: f.Image}
	// The record stands before anything is started, so that prune can remove it.
	if err := rec.write(p.folders); err != nil {
		return err
	}
	paths := spec.RunPaths{ID: rec.ID}
	if paths.Dir, err = p.folders.makeRunFolder(rec.ID, claim{Owner: rec.Owner}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, asError(os.RemoveAll(paths.Dir))) }()
	if paths.Init, err = unpackInit(paths.Dir); err != nil {
		return asError(err)
	}
	p.phases.done("prepare")
	c := &container{p: p, paths: paths}
	err = c.enter(ctx, entry{container: f.ID, user: p.job.Harness.User, host: p.host, paths: paths}, rec)
	if err == nil {
		err = c.runHarness(rec)
	}
	if err == nil && rec.Harness.Lost {
		err = &Error{Reason: ReasonInitLost, Msg: "what watched the harness was killed, and its processes with it"}
	}
	left := c.leave()
	if errors.As(left, &leftBehind{}) {
		return errors.Join(left, err)
	}
	return errors.Join(err, left)
}

// enter starts init and says what the container is.
func (c *container) enter(ctx context.Context, e entry, rec *Record) error {
	hello, err := c.greet(ctx, e)
	if err != nil {
		return err
	}
	rec.Attached.UID, rec.Attached.GID = hello.UIDs[0], hello.GIDs[0]
	if err := c.p.decideAttached(ctx, hello, rec); err != nil {
		return err
	}
	c.conn = c.conn.As(1)
	return nil
}

// greet starts init and takes its hello.
func (c *container) greet(ctx context.Context, e entry) (hello wire.Hello, err error) {
	engine, release, err := c.p.adapter.enter(ctx, e)
	if err != nil {
		return hello, err
	}
	c.engine, c.released = engine, make(chan error, 1)
	defer func() { go func() { c.released <- release() }() }()
	c.conn = wire.NewConn(c.engine.stdout(), c.engine.stdin())
	c.lifeline = sync.OnceFunc(func() { c.engine.stdin().Close() })
	context.AfterFunc(ctx, c.lifeline)
	if err := c.expect(startTimeout, wire.KindHello, &hello); err != nil {
		return hello, err
	}
	c.greeted = true
	c.p.phases.done("start")
	if hello.Version != wire.Version {
		return hello, &Error{Reason: ReasonInitLost, Msg: fmt.Sprintf("init speaks version %d, not %d", hello.Version, wire.Version)}
	}
	return hello, nil
}

// decideAttached compares, decides the process for who init is, and tells the caller.
func (p *prepared) decideAttached(ctx context.Context, hello wire.Hello, rec *Record) error {
	home := ""
	for _, kv := range hello.Environ {
		home = strings.TrimPrefix(kv, "HOME=")
	}
	plan, err := spec.Attach(p.job.Harness, p.host, spec.Entered{UID: hello.UIDs[0], GID: hello.GIDs[0], Home: home}, spec.Options{
		Command: p.job.Command, Interactive: p.job.interactive(), EnvFiles: p.envFiles, Terminal: p.job.terminalEnv(), PromptPath: p.promptPath,
	})
	if err != nil {
		return asError(err)
	}
	p.plan = plan
	if plan.Process.Terminal {
		p.terminal = p.control.terminal
	}
	rec.Widenings = plan.Widenings
	look := posture{attestation: attestation{plan: plan, host: p.host, hello: hello}, container: *p.foreign}
	look.image, look.imageErr = p.adapter.InspectImage(ctx, p.job.Harness.Image)
	rec.Attached.Posture = look.findings()
	p.phases.done("posture")
	if p.job.Attached != nil {
		p.job.Attached(*rec.Attached)
	}
	if len(p.job.Harness.Seeds()) > 0 {
		p.job.Notice("warning: the files that provider %q has in the home are not written into the container", p.job.Harness.Harness.Provider)
	}
	return rec.write(p.folders)
}

// leave lets go of init, which ends the step, and waits for its end.
func (c *container) leave() error {
	if c.engine == nil {
		return nil
	}
	defer c.engine.close()
	ended := c.letGo()
	err := <-c.released
	c.p.phases.done("end")
	if !ended {
		err = errors.Join(c.lostBecause(&Error{Reason: ReasonEngineLost, Msg: "init does not end"}), err)
	}
	return err
}

// lostInside says why init in another's container said no more.
func (c *container) lostInside(err error) error {
	if !within(endTimeout, c.engine.done()) {
		c.engine.drop()
		return c.lostBecause(&Error{Reason: ReasonEngineLost, Msg: "the engine does not say how init ended", Err: err})
	}
	status, failed := c.engine.result()
	switch {
	case errors.Is(err, wire.ErrProtocol):
		return c.lostBecause(&Error{Reason: ReasonInitLost, Err: err})
	case failed != nil:
		return c.lostBecause(&Error{Reason: ReasonEngineLost, Msg: failed.Error() + c.said()})
	case !c.greeted:
		return EngineFailure(&EngineError{Argv: []string{c.p.host.Engine.Kind, "exec"}, Stderr: c.engine.said(), Err: status})
	}
	return c.lostBecause(&Error{Reason: ReasonInitLost, Msg: "init ended without saying how the harness ended" + c.said()})
}

// lostBecause adds what to look for.
func (c *container) lostBecause(e *Error) error {
	e.Hint = fmt.Sprintf("the container was stopped, or something in it killed or stopped init: processes of the harness may be left (%s top %.12s)",
		c.p.host.Engine.Kind, c.p.foreign.ID)
	return e
}
