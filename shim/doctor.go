package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/spec"
)

// DiagnosisVersion is the schema version of a Diagnosis.
const DiagnosisVersion = 1

// Status is how a check came out.
type Status string

// The statuses. A check that is Failed keeps exec from working; Warned is weaker or
// narrower than it could be; Skipped does not apply, or can't be told here.
const (
	Passed  Status = "PASS"
	Warned  Status = "WARN"
	Failed  Status = "FAIL"
	Skipped Status = "SKIP"
)

// Check is one thing that was looked at.
type Check struct {
	// Scope is machine, docker, podman or spec.
	Scope string `json:"scope"`
	Name  string `json:"name"`

	Status Status `json:"status"`
	// Finding is one line, without the value of any variable of the harness's.
	Finding string `json:"finding"`
	// Remedy is what to type or change; empty only where Status is Passed.
	Remedy string `json:"remedy,omitempty"`
}

// Proof is a container that was started for the diagnosis. It is gone.
type Proof struct {
	Engine string `json:"engine"`
	// Run is the id of its record.
	Run         string       `json:"run"`
	Attestation *Attestation `json:"attestation,omitempty"`
}

// Diagnosis is what Doctor found, in the order of the report.
type Diagnosis struct {
	Version   int     `json:"version"`
	Agentshim string  `json:"agentshim"`
	Checks    []Check `json:"checks"`
	Proofs    []Proof `json:"proofs,omitempty"`
}

// Count gives the number of checks with the status.
func (d Diagnosis) Count(s Status) int {
	n := 0
	for _, c := range d.Checks {
		if c.Status == s {
			n++
		}
	}
	return n
}

// DoctorOptions say what to look at. The zero value looks at every engine that is
// installed.
type DoctorOptions struct {
	// Engine is auto (or empty), docker or podman. A named engine is the only one
	// that is looked at.
	Engine string
	// SpecFile is a harness file whose needs are checked and whose image is used.
	SpecFile string
	// Image is a local image to start instead of a made one, or of the file's.
	Image string
	// Version is agentshim's own.
	Version string
	// LookupEnv reads the caller's environment; nil is os.LookupEnv.
	LookupEnv func(string) (string, bool)
	// Runner starts the clients, nil is Exec.
	Runner Runner

	// goos, root and uid replace the host's, limit doctorTime; for tests.
	goos, root string
	uid        *int
	limit      time.Duration
}

// doctorTime bounds a diagnosis; removing what it made comes on top.
const doctorTime = 9 * time.Second

var errDoctorTime = fmt.Errorf("the doctor gives up after %v: the engine hangs, or the machine is busy", doctorTime)

// doctor is one diagnosis on its way.
type doctor struct {
	opts    DoctorOptions
	job     Job
	probe   ProbeOptions
	folders folders
	// ready says that the folders can be used.
	ready bool
	// spec is set when the harness file is valid.
	spec bool
	out  Diagnosis
}

// Doctor looks at the host, the engines and, with a harness file, at what the file
// needs; then it starts a container on each usable engine and removes it. It never
// pulls, and changes nothing but agentshim's own folders and, for a moment, the
// engine's store. What it finds wrong is in the Diagnosis; the error is for a wrong
// option and for a ctx that ended, after everything made is gone.
//
// A check fails when exec would not work. Without a named engine exec uses only one
// of the two: what is wrong with the other is a warning.
func Doctor(ctx context.Context, o DoctorOptions) (Diagnosis, error) {
	d := newDoctor(o)
	wanted, err := d.load()
	if err != nil {
		return d.out, err
	}
	if !d.system() {
		return d.out, nil
	}
	limited, cancel := context.WithTimeoutCause(ctx, d.opts.limit, errDoctorTime)
	defer cancel()
	d.machine()
	if d.spec && d.ready {
		d.inputs()
	}
	reports := d.engines(limited, wanted)
	if ctx.Err() != nil {
		return d.out, interrupted(ctx, nil)
	}
	for _, r := range demote(wanted, reports) {
		d.out.Checks = append(d.out.Checks, r.checks...)
		d.out.Proofs = append(d.out.Proofs, r.proofs...)
	}
	return d.out, nil
}

func newDoctor(o DoctorOptions) *doctor {
	if o.LookupEnv == nil {
		o.LookupEnv = os.LookupEnv
	}
	if o.Runner == nil {
		o.Runner = Exec{}
	}
	if o.goos == "" {
		o.goos = runtime.GOOS
	}
	if o.limit == 0 {
		o.limit = doctorTime
	}
	d := &doctor{opts: o, out: Diagnosis{Version: DiagnosisVersion, Agentshim: o.Version}}
	d.job = Job{LookupEnv: o.LookupEnv, Version: o.Version}.withDefaults()
	d.probe = ProbeOptions{Engine: o.Engine, Getenv: d.job.getenv, Runner: o.Runner, root: o.root, uid: o.uid}
	return d
}

// load reads the harness file, and gives the engine that is asked for.
func (d *doctor) load() (string, error) {
	wanted, err := wantedEngine(d.probe)
	if err != nil || d.opts.SpecFile == "" {
		return wanted, err
	}
	h, err := harness.Load(d.opts.SpecFile, harness.Overrides{Engine: d.opts.Engine, Image: d.opts.Image})
	if err != nil {
		d.add("spec", "file", failed(&Error{Reason: ReasonSpecInvalid, Err: err, Hint: "`agentshim schema` prints what a harness file may hold"}))
		return wanted, nil
	}
	raw, err := os.ReadFile(d.opts.SpecFile)
	if err != nil {
		return wanted, &Error{Reason: ReasonSpecInvalid, Err: err}
	}
	d.spec, d.job.Harness, d.job.Spec = true, h, raw
	d.probe.Engine = h.Engine
	d.add("spec", "file", pass("%q is valid: engine %s, image %q, harness %q", d.opts.SpecFile, h.Engine, h.Image, h.Harness.Binary))
	return wantedEngine(d.probe)
}

// verdict is a check's outcome without its place.
type verdict struct {
	status          Status
	finding, remedy string
}

func pass(format string, args ...any) verdict {
	return verdict{Passed, fmt.Sprintf(format, args...), ""}
}

func warned(remedy, format string, args ...any) verdict {
	return verdict{Warned, fmt.Sprintf(format, args...), remedy}
}

func skipped(remedy, format string, args ...any) verdict {
	return verdict{Skipped, fmt.Sprintf(format, args...), remedy}
}

// failed is an error's verdict: its text on one line and all of its hints.
func failed(err error) verdict {
	remedy := strings.Join(remedies(asError(err)), "; ")
	if remedy == "" {
		remedy = "mend what the line says, then run the doctor again"
	}
	text := strings.ReplaceAll(err.Error(), "\n", "; ")
	return verdict{Failed, string(ReasonOf(asError(err))) + ": " + text, remedy}
}

// remedies are the hints of every error in err's tree, each once.
func remedies(err error) []string {
	var out []string
	add := func(hints ...string) {
		for _, h := range hints {
			if h != "" && !slices.Contains(out, h) {
				out = append(out, h)
			}
		}
	}
	if e, ok := err.(*Error); ok { //nolint:errorlint // each node is looked at by itself
		add(e.Hint)
	}
	switch u := err.(type) { //nolint:errorlint // as above
	case interface{ Unwrap() []error }:
		for _, e := range u.Unwrap() {
			add(remedies(e)...)
		}
	case interface{ Unwrap() error }:
		if e := u.Unwrap(); e != nil {
			add(remedies(e)...)
		}
	}
	return out
}

func (v verdict) check(scope, name string) Check {
	return Check{Scope: scope, Name: name, Status: v.status, Finding: v.finding, Remedy: v.remedy}
}

func (d *doctor) add(scope, name string, v verdict) {
	d.out.Checks = append(d.out.Checks, v.check(scope, name))
}

// report is what one engine gave.
type report struct {
	kind   string
	checks []Check
	proofs []Proof
	// usable says that the engine answered; passedOver that exec, free to choose,
	// would go on to the other engine.
	usable, passedOver bool
}

func (r *report) add(name string, v verdict) { r.checks = append(r.checks, v.check(r.kind, name)) }

// engines looks at both engines at the same time.
func (d *doctor) engines(ctx context.Context, wanted string) []report {
	kinds := []string{spec.Docker, spec.Podman}
	reports := make([]report, len(kinds))
	var wait sync.WaitGroup
	for i, kind := range kinds {
		reports[i].kind = kind
		switch {
		case wanted != autoEngine && wanted != kind:
			reports[i].add("engine", skipped("leave the engine open, or name this one", "not asked for: the engine is set to %s", wanted))
		case wanted == autoEngine && !d.installed(kind):
			reports[i].add("engine", skipped("install it if you want it", "not installed: no %s in PATH", kind))
			reports[i].passedOver = true
		default:
			wait.Go(func() { d.engine(ctx, &reports[i]) })
		}
	}
	wait.Wait()
	if wanted == autoEngine && !d.installed(spec.Docker) && !d.installed(spec.Podman) {
		d.add("machine", "engine", failed(&Error{Reason: ReasonEngineMissing, Msg: "neither docker nor podman is in PATH", Hint: "install Docker 20.10 or newer, or Podman 4.3 or newer"}))
	}
	return reports
}

func (d *doctor) installed(kind string) bool {
	_, ok := lookPath(d.probe, kind)
	return ok
}

// demote turns the failures of the engine that exec would not choose into warnings.
// The choice is ProbeEngine's: Docker where it answers, and Podman only where Docker
// is missing, down or denied.
func demote(wanted string, reports []report) []report {
	if wanted != autoEngine {
		return reports
	}
	docker, podman := &reports[0], &reports[1]
	switch {
	case docker.usable:
		podman.demote(docker.kind)
	case podman.usable && docker.passedOver:
		docker.demote(podman.kind)
	}
	return reports
}

func (r *report) demote(chosen string) {
	for i, c := range r.checks {
		if c.Status == Failed {
			r.checks[i].Status = Warned
			r.checks[i].Finding += " (exec uses " + chosen + ")"
		}
	}
}

// passesOver are the reasons for which ProbeEngine goes on to the other engine.
func passesOver(err error) bool {
	return slices.Contains([]Reason{ReasonEngineMissing, ReasonEngineDown, ReasonEngineDenied, ReasonEngineMismatch}, ReasonOf(err))
}

// unwrapTime names the doctor's own limit instead of a request to end.
func unwrapTime(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), errDoctorTime) {
		return &Error{Reason: ReasonEngineFailed, Err: errDoctorTime, Hint: "look at the engine's own log, or try again on a quiet machine"}
	}
	return err
}
