// Package shim runs a plan: it reads the host, drives the engine, compares the
// container with the plan, starts the harness and writes the record. It owns every
// command that is started outside a container.
package shim

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/seccomp"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// Job is one run as the caller asks for it.
type Job struct {
	Harness harness.Harness
	// Spec is the harness file's bytes; only their digest is kept. SpecPath is where it
	// is, absolute: in a writable workspace it is kept from the agent. Empty without a file.
	Spec     []byte
	SpecPath string
	// Command is an argv that runs instead of the harness.
	Command []string
	// Words are joined by a space into the prompt.
	Words []string
	// Overrides are those that Harness was made with. Of a step, they are what it has of
	// its own.
	Overrides harness.Overrides
	// Session is the id or name of a session: the job is a step of it, of the session's
	// harness, and Harness, Spec and SpecPath have no effect.
	Session string
	// Container is the id or name of a container that agentshim did not start: the harness
	// runs in it. Attached is called once with what it is, before the harness starts; may be nil.
	Container string
	Attached  func(AttachedRecord)
	// Stdin, Stdout and Stderr are the harness's. Without any prompt, Stdin to its end
	// is the prompt. A nil Stdin is empty.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// StdinTerminal says that Stdin is a terminal: it is no prompt.
	StdinTerminal bool
	// Terminal is the caller's where both Stdin and Stdout are one; nil otherwise. The
	// harness then gets a terminal, unless the file says never or its stdin is the
	// prompt. It is in raw mode while the harness runs.
	Terminal *os.File
	// Signals are what the caller received of Signals; may be nil. INT, TERM and HUP
	// end the run: before the harness runs at once, then by passing the signal on. While
	// its commits are taken, INT and TERM leave them for Store.TakeGit.
	Signals <-chan os.Signal
	// LearnEgress runs in egress mode open, whatever the file says but network, which is
	// refused, and has the record say which allow list would have permitted what was used;
	// LearnWildcards lets that list hold wildcards. The content of connections is checked as
	// with an allow list.
	LearnEgress, LearnWildcards bool
	// Progress gets an image pull's output; nil for none.
	Progress io.Writer
	// Proven is called once when the posture is proven, before the harness starts; may be nil.
	Proven func(spec.Plan, Attestation)
	// Notice gets a line for the user that is neither an error nor the plan's; may be nil.
	Notice func(format string, args ...any)
	// Log gets a line for each step that takes long or may be of interest; may be nil.
	Log func(format string, args ...any)
	// LookupEnv reads the caller's environment; nil is os.LookupEnv.
	LookupEnv func(string) (string, bool)
	// Version is agentshim's own, for the record.
	Version string

	// keeper makes the job a session.
	keeper *keeper
}

func (j Job) withDefaults() Job {
	if j.LookupEnv == nil {
		j.LookupEnv = os.LookupEnv
	}
	if j.Log == nil {
		j.Log = func(string, ...any) {}
	}
	if j.Notice == nil {
		j.Notice = func(string, ...any) {}
	}
	if j.Stdin == nil {
		j.Stdin = strings.NewReader("")
	}
	return j
}

// getenv is LookupEnv with unset as empty.
func (j Job) getenv(name string) string {
	v, _ := j.LookupEnv(name)
	return v
}

// prepared is everything decided about a job.
type prepared struct {
	job     Job
	folders folders
	adapter Adapter
	host    spec.Host
	plan    spec.Plan
	values  spec.Values
	files   []homeFile
	// proxyUser has the upstream proxy's credentials.
	proxyUser *url.Userinfo
	// git is the workspace's repository, read as data.
	git gitHost
	// stdin is what the harness reads.
	stdin  io.Reader
	phases *phases
	// control is Run's; terminal is nil where the harness gets none.
	control  *control
	terminal *terminal
	// launched is set when the harness may have run.
	launched bool
	// foreign is set for a container that is not agentshim's, envFiles are then the names of
	// the variables of each file.
	foreign  *foreign
	envFiles [][]string
	// begun is called when the harness runs, and may be nil.
	begun func()
	// session is set for a session's step, promptPath is where its prompt's file is.
	session    *sessionStep
	promptPath string
}

// Plan decides a job and starts nothing. What it decides is what Run does. The
// image is pulled when the file's pull policy says so. Where this build has
// libseccomp, the system call policy is checked with it.
//
// The second result is what the engine is asked, as indented JSON: Podman's client's
// argv, or the body of Docker's POST /containers/create.
func Plan(ctx context.Context, j Job) (spec.Plan, []byte, error) {
	j = j.withDefaults()
	p, err := prepare(ctx, j, newPhases(), false)
	if err != nil {
		return spec.Plan{}, nil, err
	}
	if !seccomp.IsFile(j.Harness.Seccomp.Profile) { // one that is was verified already
		if err := p.verifySeccomp(); err != nil {
			return spec.Plan{}, nil, err
		}
	}
	request, err := p.adapter.request(p.plan, spec.SymbolicPaths)
	if err != nil {
		return spec.Plan{}, nil, asError(err)
	}
	return p.plan, request, nil
}

// prepare reads the host and compiles the plan; with values it also reads the
// prompt, the variables and the home's files. With an error, what it returns has
// the folders if they could be opened, for the record.
func prepare(ctx context.Context, j Job, ph *phases, withValues bool) (*prepared, error) {
	p := &prepared{job: j, phases: ph, stdin: j.Stdin}
	p.job.Stdin = interruptible{ctx, steadyReader(j.Stdin)} // a prompt, read before anything runs
	var err error
	if p.folders, err = openFolders(j.getenv, homeFolder(j.getenv)); err != nil {
		return nil, err
	}
	return p, p.decide(ctx, withValues)
}

func (p *prepared) decide(ctx context.Context, withValues bool) error {
	if err := p.probe(ctx); err != nil {
		return err
	}
	ph := p.phases
	ph.done("probe")
	names, err := p.readEnvFiles()
	if err == nil && withValues {
		err = p.readValues()
	}
	if err != nil {
		return err
	}
	if err := errors.Join(p.probePresets(), p.probeProxy(), p.readSeccomp()); err != nil {
		return err
	}
	ph.done("inputs")
	p.plan, err = spec.Compile(p.job.Harness, p.host, spec.Options{
		Command: p.job.Command, Interactive: p.job.interactive(), Labels: p.job.stepLabels(), EnvFiles: names, Terminal: p.job.terminalEnv(),
		LearnEgress: p.job.LearnEgress,
	})
	for _, s := range p.plan.Seeds {
		p.files = append(p.files, homeFile{target: wire.HomeDir + "/" + s.Target, content: []byte(s.Content)})
	}
	if err == nil && seccomp.IsFile(p.job.Harness.Seccomp.Profile) {
		err = p.verifySeccomp()
	}
	ph.done("plan")
	return asError(err)
}

func homeFolder(getenv func(string) string) string {
	return ProbeOptions{Getenv: getenv}.home()
}

// probe reads the engine, the image, and what the file names on the host.
func (p *prepared) probe(ctx context.Context) error {
	h := p.job.Harness
	opts, err := p.probeOptions()
	if err != nil {
		return err
	}
	p.host, p.adapter, err = Probe(ctx, opts, ImageRequest{Ref: h.Image, Pull: h.Pull, Platform: h.Platform, Progress: p.job.Progress})
	if err != nil {
		return err
	}
	if err := p.probeDevices(opts.withDefaults()); err != nil {
		return err
	}
	if err := p.probeNetworkFacts(ctx); err != nil {
		return err
	}
	return p.probeMounts()
}

// probeOptions is the folders' for the job's engine.
func (p *prepared) probeOptions() (ProbeOptions, error) {
	o, err := p.folders.probeOptions()
	o.Engine, o.Getenv = p.job.Harness.Engine, p.job.getenv
	return o, err
}

// probeOptions makes the folders that a probe uses.
func (f folders) probeOptions() (ProbeOptions, error) {
	o := ProbeOptions{DockerConfig: filepath.Join(f.state, "docker-config"), CacheDir: filepath.Join(f.state, "cache")}
	return o, errors.Join(privateFolder(o.DockerConfig), privateFolder(o.CacheDir))
}

// probeMounts reads the mounts' sources, once the engine is known.
func (p *prepared) probeMounts() error {
	var err error
	paths := mounts.ProbePaths{
		Home: homeFolder(p.job.getenv), UID: p.host.Caller.UID, GID: p.host.Caller.GID, Groups: p.host.Caller.Groups,
		Protected:    slices.Concat([]string{p.folders.state, p.folders.runtime}, p.configFolder(), p.host.Engine.Dirs, engineStores(homeFolder(p.job.getenv))),
		KnownSockets: p.knownSockets(),
	}
	p.host.Mounts, err = mounts.Probe(p.job.Harness, paths)
	if err != nil {
		return asError(err)
	}
	if err := p.probeGit(paths); err != nil {
		return err
	}
	return p.probeGuards()
}

// configFolder is where the user's own providers are: an agent that could write there would
// write what later runs are given.
func (p *prepared) configFolder() []string {
	config := ProbeOptions{Getenv: p.job.getenv}.configHome()
	if config == "" {
		return nil
	}
	return []string{filepath.Dir(harness.ProviderDir(config))}
}

// engineStores are the data folders of every engine at their default places: those
// of an engine that this run does not use hold other containers' files too.
func engineStores(home string) []string {
	dirs := []string{"/var/lib/containerd", "/var/lib/containers", "/var/lib/docker"}
	if filepath.IsAbs(home) {
		data := filepath.Join(home, ".local", "share")
		dirs = append(dirs, filepath.Join(data, "containers"), filepath.Join(data, "docker"))
	}
	return dirs
}

// knownSockets are sockets the caller's environment names.
func (p *prepared) knownSockets() []string {
	var out []string
	for _, name := range []string{"SSH_AUTH_SOCK", "DOCKER_HOST", "DBUS_SESSION_BUS_ADDRESS", "GPG_AGENT_INFO"} {
		v := p.job.getenv(name)
		v = strings.TrimPrefix(strings.TrimPrefix(v, "unix://"), "unix:path=")
		v, _, _ = strings.Cut(v, ",")
		if filepath.IsAbs(v) {
			out = append(out, v)
		}
	}
	return append(out, p.host.Engine.Socket)
}

// asError gives an error of another package its reason.
func asError(err error) error {
	var e *Error
	var refusal *spec.Refusal
	var problem *mounts.Problem
	switch {
	case err == nil || errors.As(err, &e):
		return err
	case errors.As(err, &refusal):
		return &Error{Reason: Reason(refusal.Reason), Hint: hints(err), Err: err}
	case errors.Is(err, mounts.ErrGit):
		return &Error{Reason: ReasonGit, Err: err}
	case errors.Is(err, harness.ErrInvalid):
		return &Error{Reason: ReasonSpecInvalid, Err: err}
	case errors.As(err, &problem), errors.Is(err, mounts.ErrSource), errors.Is(err, mounts.ErrRefused):
		return &Error{Reason: ReasonMount, Err: err}
	}
	return &Error{Reason: ReasonInternal, Err: err}
}

// hints joins the remedies of every refusal in err, each once.
func hints(err error) string {
	if r, ok := err.(*spec.Refusal); ok { //nolint:errorlint // each node is looked at by itself
		return r.Hint
	}
	var out []string
	switch u := err.(type) { //nolint:errorlint // as above
	case interface{ Unwrap() []error }:
		for _, e := range u.Unwrap() {
			if h := hints(e); h != "" && !slices.Contains(out, h) {
				out = append(out, h)
			}
		}
	case interface{ Unwrap() error }:
		if e := u.Unwrap(); e != nil {
			return hints(e)
		}
	}
	return strings.Join(out, "; ")
}

// Run decides the job, runs it and returns its record, which is also kept in the
// state folder. The error is nil when the harness ran to its own end, whatever its
// exit code; otherwise it is an *Error, and the harness's container is gone.
//
// When ctx ends, the container is ended at once. Signals end it as their senders
// expect: see Job.Signals.
func Run(ctx context.Context, j Job) (Record, error) {
	j = j.withDefaults()
	ph := newPhases()
	rec := Record{Version: RecordVersion, ID: newRunID(), Name: j.Harness.Name, Agentshim: j.Version, Start: time.Now().UTC(), SpecDigest: digest(j.Spec), Exit: ExitRefused}
	owner, err := self()
	if err != nil {
		return rec.failed(err), err
	}
	rec.Owner = owner
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ctl := newControl(j, cancel)
	done := make(chan struct{})
	defer close(done)
	go ctl.listen(j.Signals, done)
	p, err := begin(ctx, j, ph, &rec)
	if err == nil {
		p.attach(ctl)
		if err = p.run(ctx, &rec); err == nil {
			err = outputLost(&rec)
		}
	}
	rec.Phases, rec.End = ph.list, time.Now().UTC()
	if err != nil {
		err = interrupted(ctx, err)
		rec = rec.failed(err)
	}
	if p != nil {
		err = errors.Join(err, rec.write(p.folders))
		p.reclaim(ctx)
	}
	return rec, err
}

// begin decides a job as what it is: a run, a session or a session's step.
func begin(ctx context.Context, j Job, ph *phases, rec *Record) (*prepared, error) {
	if k := j.keeper; k != nil {
		rec.ID, rec.Session = k.id, &SessionRecord{ID: k.id, Name: k.name}
	}
	if j.Session != "" {
		return prepareStep(ctx, j, ph, rec)
	}
	if j.Container != "" {
		return prepareAttached(ctx, j, ph, rec)
	}
	return prepare(ctx, j, ph, true)
}

// run does what was decided.
func (p *prepared) run(ctx context.Context, rec *Record) error {
	if p.session != nil {
		if err := rec.write(p.folders); err != nil {
			return err
		}
		return p.runStep(ctx, rec)
	}
	if p.foreign != nil {
		return p.runAttached(ctx, rec)
	}
	rec.describe(p)
	if p.job.keeper == nil {
		return p.execute(ctx, rec)
	}
	name, err := p.folders.takeName(p.job.keeper.name)
	if err != nil {
		return err
	}
	defer p.folders.giveName(name)
	return p.execute(ctx, rec)
}

// reclaim removes what lost runs of this user left. It is no part of this run:
// what fails is said and left to prune.
func (p *prepared) reclaim(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	s := Store{folders: p.folders, getenv: p.job.getenv, runner: Exec{}}
	if err := s.pruneQuickly(ctx); err != nil {
		p.job.Log("reclaim: %v", err)
	}
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func (r Record) failed(err error) Record {
	r.Exit, r.Reason, r.Message = ExitCode(err), ReasonOf(err), err.Error()
	r.Retry = r.Reason.Retryable()
	return r
}

// interrupted names the caller's own wish to end as the reason, behind a container that may
// still be there.
func interrupted(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	ended := &Error{Reason: ReasonInterrupted, Msg: "ended on request", Err: context.Cause(ctx)}
	var left leftBehind
	if errors.As(err, &left) {
		return errors.Join(left, ended)
	}
	return ended
}

// attach connects the run to the caller's signals and, if the harness gets one, terminal.
func (p *prepared) attach(c *control) {
	p.control = c
	c.setGrace(duration(p.job.Harness.StopGrace))
	if p.plan.Process.Terminal {
		p.terminal = c.terminal
	}
}

func (r *Record) describe(p *prepared) {
	r.Engine, r.Image, r.Caller, r.Machine = &p.host.Engine, &p.host.Image, &p.host.Caller, &p.host.Machine
	r.Widenings, r.Gaps = p.plan.Widenings, p.plan.Gaps
	// A plan that compiled marshals.
	r.PlanDigest, _ = p.plan.Digest()
	r.Egress = &EgressRecord{Mode: p.plan.Egress.Mode}
}

// execute makes the run's folder, runs the container and removes both.
func (p *prepared) execute(ctx context.Context, rec *Record) (err error) {
	published, err := bindPublished(p.plan.Publish)
	if err != nil {
		return err
	}
	defer func() {
		published.close()
		rec.Publish = published.records()
	}()
	rec.Publish = published.records()
	// The record stands before the container does, so that a later run can reclaim it.
	if err := rec.write(p.folders); err != nil {
		return err
	}
	paths := spec.RunPaths{ID: rec.ID, State: p.folders.record(rec.ID)}
	if paths.Dir, err = p.folders.makeRunFolder(rec.ID, claim{Owner: rec.Owner, Workspace: p.writable().Path, Session: rec.Session}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, asError(os.RemoveAll(paths.Dir))) }()
	if err := p.writeRunFolder(&paths); err != nil {
		return p.folders.failed(err)
	}
	rec.Overlaps = p.overlaps(rec.ID)
	p.phases.done("prepare")
	if err := p.setUpCaches(ctx, paths); err != nil {
		return err
	}
	if err := p.makeCopy(ctx, rec); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.keepCopy(rec)) }()
	if err := p.makeGit(ctx, rec, paths); err != nil {
		return err
	}
	gone := true
	defer func() {
		lost := p.takeGit(ctx, rec, paths, gone)
		if err == nil && rec.Exit == 0 {
			err = lost // else the record says it
		}
	}()
	look := p.lookForPlanted(ctx)
	c := &container{p: p, paths: paths, look: look, published: published, backs: newBacks(p.files)}
	err = c.drive(ctx, rec)
	err = egressFailed(err, c.egress.close(rec))
	ended := c.end(err)
	gone = ended == nil
	left := errors.Join(ended, c.way.close())
	if left != nil {
		killContainer(c.id())
	}
	if look != nil && p.launched {
		rec.Planted = look.report(ctx)
		p.phases.done("planted")
	}
	// A container that may still be there is what the caller must know first.
	return errors.Join(left, err)
}

// writeRunFolder generates what the container mounts and Podman's client reads.
func (p *prepared) writeRunFolder(paths *spec.RunPaths) error {
	if err := os.Mkdir(filepath.Join(paths.Dir, "etc"), 0o700); err != nil {
		return err
	}
	var err error
	if paths.Init, err = unpackInit(paths.Dir); err != nil {
		return err
	}
	for _, f := range p.plan.Etc {
		if err := os.WriteFile(filepath.Join(paths.Dir, "etc", f.Name), []byte(f.Content), 0o444); err != nil {
			return err
		}
	}
	if err := makeCovers(paths.Dir); err != nil {
		return err
	}
	if p.plan.Engine.Kind == spec.Docker {
		return nil
	}
	profile := filepath.Join(paths.Dir, "seccomp.json")
	return os.WriteFile(profile, p.plan.Seccomp.Profile(), 0o600)
}
