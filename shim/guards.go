package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/seccomp"
)

// probeGuards looks at what the workspace's guards are decided from.
func (p *prepared) probeGuards() error {
	f := &p.host.Mounts
	var err error
	if f.Own, err = p.ownPaths(); err == nil {
		f.Guards, err = mounts.ProbeWorkspaceGuards(p.job.Harness, *f)
	}
	return asError(err)
}

const hooksReason = "the host's git runs it: core.hooksPath names it"

// ownPaths are the host files that say what a run is: who can change them decides
// about the next one. Files that can't be found are left to who reads them, except
// for the harness file, which was read by its name: a link on its way that an agent
// may have made is refused.
func (p *prepared) ownPaths() ([]mounts.OwnFile, error) {
	h := p.job.Harness
	dirs := mounts.AgentFolders(h, p.host.Mounts)
	var own []mounts.OwnFile
	add := func(name, at, reason string) error {
		if name == "" || len(dirs) == 0 {
			return nil
		}
		real, err := mounts.Resolve(p.hostPath(name), dirs)
		if err == nil {
			own = append(own, mounts.OwnFile{Path: real, JSON: at, Reason: reason})
		}
		return err
	}
	if err := add(p.job.SpecPath, "$", "it says what the agent may do"); errors.Is(err, mounts.ErrAgentLink) {
		return nil, &mounts.Problem{
			Path: "$", Value: p.job.SpecPath, Kind: mounts.ErrRefused, Err: err, Reason: "the harness file is not what it seems",
			Remedy: "name the file itself, outside of what an agent can write",
		}
	}
	if p.git.HooksPath != "" && !below(p.git.HooksPath, p.git.Dir, p.git.Common) {
		// What is not there, or is a link, is for the guards to judge.
		if add(p.git.HooksPath, "$.workspace", hooksReason) != nil {
			own = append(own, mounts.OwnFile{Path: p.git.HooksPath, JSON: "$.workspace", Reason: hooksReason})
		}
	}
	_ = add(h.PromptFile, "$.promptFile", "it is the prompt of the next run, too")
	for i, name := range h.EnvFiles {
		_ = add(name, fmt.Sprintf("$.envFiles[%d]", i), "the next run's variables come from it")
	}
	for i, name := range h.CACertificates {
		_ = add(name, fmt.Sprintf("$.caCertificates[%d]", i), "the next run trusts what it holds")
	}
	if profile := h.Seccomp.Profile; seccomp.IsFile(profile) {
		_ = add(profile, "$.seccomp.profile", "it is the next run's system call policy")
	}
	return own, nil
}

// makeCovers makes the empty file and folder that hidden paths are covered with.
func makeCovers(dir string) error {
	file, folder := filepath.Join(dir, mounts.EmptyFile), filepath.Join(dir, mounts.EmptyDir)
	return errors.Join(
		os.Mkdir(filepath.Dir(folder), 0o700),
		os.WriteFile(file, nil, 0o444),
		os.Mkdir(folder, 0o555),
		// whatever the umask is
		os.Chmod(file, 0o444), os.Chmod(folder, 0o555),
	)
}

// writable is the host's folder that the agent works on and can write to, the zero
// Source where there is none.
func (p *prepared) writable() mounts.Source {
	for _, m := range p.plan.Mounts {
		if m.Why == mounts.WhyWorkspace && m.Writable && m.Own == "" {
			root, _ := mounts.Workspace(p.job.Harness, p.host.Mounts)
			return root
		}
	}
	return mounts.Source{}
}

// covered are the paths of the workspace that the agent finds something else at, and
// can't get at otherwise.
func (p *prepared) covered() []string {
	if p.plan.Seccomp.LooseMounts() {
		return nil
	}
	target, root := p.job.Harness.ContainerPath(p.job.Harness.Workspace.Target), p.writable().Path
	shown := func(rel string) bool {
		return slices.ContainsFunc(p.plan.Mounts, func(m mounts.Mount) bool {
			return m.Why == mounts.WhyMount && m.Writable && sameFiles(m.Source, filepath.Join(root, rel))
		})
	}
	var out []string
	for _, m := range p.plan.Mounts {
		if rel, ok := strings.CutPrefix(m.Target, target+"/"); ok && m.Why != mounts.WhyGuard && !shown(rel) {
			out = append(out, rel)
		}
	}
	return out
}

// plantedLook compares a workspace before a run and after. A nil one finds nothing.
type plantedLook struct {
	root   mounts.Source
	guards []mounts.GuardPath
	// covered are the paths that the container has another mount on.
	covered []string
	// taken is closed when the rest is there.
	taken  chan struct{}
	before plantedSnapshot
	// unsearched says that not all of the protected folders' files are among guards that
	// have a further name.
	unsearched bool
	err        error
}

// lookForPlanted begins with the first look, beside the engine's start. It is nil
// where the agent can write to no workspace.
func (p *prepared) lookForPlanted(ctx context.Context) *plantedLook {
	root := p.writable()
	if root.Path == "" {
		return nil
	}
	l := &plantedLook{root: root, guards: slices.Clone(p.plan.Guards), covered: p.covered(), taken: make(chan struct{})}
	go func() {
		defer close(l.taken)
		l.err = l.first(ctx)
	}()
	return l
}

func (l *plantedLook) first(ctx context.Context) error {
	more, all, err := furtherNames(ctx, l.root, l.guards, plantedLimits{})
	if err != nil {
		return err
	}
	l.guards, l.unsearched = append(l.guards, more...), !all
	l.before, err = takePlantedSnapshot(ctx, l.root, l.guards, plantedLimits{})
	return err
}

// done waits for the first look, without which the harness may not run.
func (l *plantedLook) done() error {
	if l == nil {
		return nil
	}
	<-l.taken
	return asError(l.err)
}

// report takes the second look, once the container is gone.
func (l *plantedLook) report(ctx context.Context) *PlantedReport {
	if l == nil {
		return nil
	}
	after, err := takePlantedSnapshot(context.WithoutCancel(ctx), l.root, l.guards, plantedLimits{})
	if err != nil {
		return &PlantedReport{Limit: limitRoot}
	}
	l.before.without(l.covered)
	after.without(l.covered)
	r := comparePlanted(l.guards, l.before, after)
	if l.unsearched && r.Limit == "" {
		r.Limit = limitNames
	}
	return &r
}

// sameFiles says that one of the folders is, or lies in, the other.
func sameFiles(a, b string) bool {
	return a != "" && b != "" && (a == b || below(a, b) || below(b, a))
}

// Overlap is another run whose agent can write to the same files.
type Overlap struct {
	Run string `json:"run"`
	// Workspace is the other's, the same as this run's or above or below it.
	Workspace string `json:"workspace"`
}

// overlaps finds the caller's live runs with the same runtime folder that can write
// to p's writable workspace, and says so. Each run writes its claim before it looks,
// so of two that start together one at least sees the other. Other users' runs, and
// writable mounts, are not looked at.
func (p *prepared) overlaps(id string) []Overlap {
	own := p.writable().Path
	entries, err := os.ReadDir(p.folders.runtime)
	if own == "" || err != nil {
		return nil
	}
	var found []Overlap
	for _, e := range entries {
		if e.Name() == id || !isRunID(e.Name()) {
			continue
		}
		c, err := readClaim(filepath.Join(p.folders.runtime, e.Name()))
		if err != nil || !sameFiles(c.Workspace, own) || !c.Owner.alive() {
			continue
		}
		found = append(found, Overlap{Run: e.Name(), Workspace: c.Workspace})
		p.job.Notice("warning: run %s works on %q now: each agent can change the other's files", e.Name(), c.Workspace)
	}
	return found
}
