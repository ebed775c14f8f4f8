package shim

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/agentshim/agentshim/seccomp"
	"github.com/agentshim/agentshim/spec"
)

// inputs checks what the harness file takes from the caller, by name: nothing that is
// read here gets into a finding.
func (d *doctor) inputs() {
	p := &prepared{job: d.job, folders: d.folders}
	h := d.job.Harness
	if err := p.readCallerEnv(); err != nil {
		d.add("spec", "variables", failed(err))
	} else {
		d.add("spec", "variables", pass("%s", listText("set", h.EnvFrom, "none are taken from the caller")))
	}
	// Where a mount is refused its engine's report says so; a file is then judged
	// without knowing that mount.
	_ = p.readCaller(d.probe)
	_ = p.probeMounts()
	_, envErr := p.readEnvFiles()
	var promptErr error
	var names []string
	if names = append(names, h.EnvFiles...); h.PromptFile != "" {
		_, promptErr = p.readPromptFile(h.PromptFile)
		names = append(names, h.PromptFile)
	}
	for _, f := range h.Home.Files {
		names = append(names, f.Source)
	}
	if seccomp.IsFile(h.Seccomp.Profile) {
		names = append(names, h.Seccomp.Profile)
	}
	names = append(names, h.CACertificates...)
	if err := errors.Join(envErr, p.readHomeFiles(), p.readCertificates(), promptErr, p.readSeccomp()); err != nil {
		d.add("spec", "files", failed(err))
		return
	}
	d.add("spec", "files", pass("%s", listText("readable", names, "none are read")))
}

func (p *prepared) readCaller(o ProbeOptions) error {
	var err error
	p.host.Caller, err = probeCaller(o)
	return err
}

func listText(what string, names []string, none string) string {
	if len(names) == 0 {
		return none
	}
	quoted := make([]string, len(names))
	for i, n := range names {
		quoted[i] = fmt.Sprintf("%q", n)
	}
	return what + ": " + strings.Join(quoted, ", ")
}

// planned checks on one engine what a run of the harness file would be decided from.
func (d *doctor) planned(ctx context.Context, r *report, a Adapter) bool {
	p := &prepared{job: d.job, folders: d.folders, adapter: a, host: spec.Host{Engine: a.Engine()}}
	h := d.job.Harness
	err := p.readCaller(d.probe)
	if err == nil {
		p.host.Machine, err = ProbeMachine()
	}
	if err == nil {
		err = p.probeDevices(d.probe)
	}
	if err != nil {
		r.add("plan", failed(err))
		return false
	}
	p.host.Caller.HardNoFile, p.host.Caller.HardNProc = a.HardLimits()
	imageOK, mountsOK := d.image(ctx, r, p), d.mounts(r, p)
	names, err := p.readEnvFiles()
	err = errors.Join(err, p.readSeccomp())
	if err != nil || !imageOK || !mountsOK {
		r.add("plan", skipped("mend what is above first", "not decided: an input is missing"))
		return false
	}
	plan, err := spec.Compile(h, p.host, spec.Options{EnvFiles: names})
	if err != nil {
		r.add("plan", failed(asError(err)))
		return false
	}
	r.add("plan", pass("uid %d, gid %d, %s", plan.Identity.UID, plan.Identity.GID, noteText(plan)))
	return true
}

// image looks at the harness file's image without pulling it.
func (d *doctor) image(ctx context.Context, r *report, p *prepared) bool {
	h := d.job.Harness
	var err error
	p.host.Image, err = EnsureImage(ctx, p.adapter, p.host.Machine, ImageRequest{Ref: h.Image, Pull: pullNever, Platform: h.Platform})
	if err != nil {
		r.add("image", failed(unwrapTime(ctx, err)))
		return false
	}
	i := p.host.Image
	user := "no user"
	if i.User != "" {
		user = fmt.Sprintf("user %q", printable(i.User))
	}
	r.add("image", pass("%q is here: %s/%s, %s", h.Image, i.OS, i.Arch, user))
	return true
}

func (d *doctor) mounts(r *report, p *prepared) bool {
	if err := p.probeMounts(); err != nil {
		r.add("mounts", failed(err))
		return false
	}
	h := d.job.Harness
	var names []string
	if h.HasWorkspace() {
		names = append(names, h.Workspace.Source)
	}
	for _, m := range h.Mounts {
		names = append(names, m.Source)
	}
	r.add("mounts", pass("%s", listText("usable", names, "none are asked for")))
	return true
}

// noteText names what the plan opens and what the host can't enforce.
func noteText(p spec.Plan) string {
	names := func(notes []spec.Note) string {
		if len(notes) == 0 {
			return "none"
		}
		list := make([]string, len(notes))
		for i, n := range notes {
			list[i] = n.Name
		}
		return strings.Join(list, ", ")
	}
	return fmt.Sprintf("widenings: %s, gaps: %s", names(p.Widenings), names(p.Gaps))
}
