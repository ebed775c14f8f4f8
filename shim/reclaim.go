package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentshim/agentshim/spec"
)

// RunState says what a run's record and its shim process tell together.
type RunState string

// The states. A run is lost when its shim is gone and wrote no end.
const (
	RunRunning RunState = "running"
	RunEnded   RunState = "ended"
	RunLost    RunState = "lost"
)

// RunInfo is one recorded run.
type RunInfo struct {
	Record
	State RunState `json:"state"`
}

// maxRecord bounds a record file, in bytes.
const maxRecord = 8 << 20

// ErrNoRun is returned for an id that no record of the caller's has.
var ErrNoRun = errors.New("no such run")

// Store is the caller's records and what runs left behind.
type Store struct {
	folders folders
	getenv  func(string) string
	runner  Runner
}

// OpenStore finds the caller's state and runtime folders. A nil lookupEnv is
// os.LookupEnv.
func OpenStore(lookupEnv func(string) (string, bool)) (Store, error) {
	j := Job{LookupEnv: lookupEnv}.withDefaults()
	f, err := openFolders(j.getenv, homeFolder(j.getenv))
	return Store{folders: f, getenv: j.getenv, runner: Exec{}}, err
}

// Runs lists the recorded runs, oldest first. Records that can't be read are an
// error; the others are listed all the same. A folder without a record is no run: one is
// about to begin, or never did.
func (s Store) Runs() ([]RunInfo, error) {
	entries, err := os.ReadDir(filepath.Join(s.folders.state, "runs"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, &Error{Reason: ReasonState, Err: err}
	}
	var runs []RunInfo
	var errs []error
	for _, e := range entries {
		r, err := s.Run(e.Name())
		switch {
		case err == nil:
			runs = append(runs, r)
		case !isRunID(e.Name()) || !errors.Is(err, ErrNoRun):
			errs = append(errs, err)
		}
	}
	slices.SortFunc(runs, func(a, b RunInfo) int { return a.Start.Compare(b.Start) })
	return runs, errors.Join(errs...)
}

// Run reads one record by its id.
func (s Store) Run(id string) (RunInfo, error) {
	if !isRunID(id) {
		return RunInfo{}, &Error{Reason: ReasonState, Msg: fmt.Sprintf("run %q", id), Err: ErrNoRun, Hint: "agentshim runs lists them"}
	}
	b, err := readRecord(filepath.Join(s.folders.record(id), "record.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return RunInfo{}, &Error{Reason: ReasonState, Msg: fmt.Sprintf("run %q", id), Err: ErrNoRun, Hint: "agentshim runs lists them"}
	}
	var r RunInfo
	if err == nil {
		err = json.Unmarshal(b, &r.Record)
	}
	if err == nil && (r.Version != RecordVersion || r.ID != id) {
		err = fmt.Errorf("version %d of run %q", r.Version, r.ID)
	}
	if err != nil {
		return RunInfo{}, &Error{Reason: ReasonState, Msg: fmt.Sprintf("record of run %s", id), Err: err, Hint: "remove its folder if you don't need it: " + s.folders.record(id)}
	}
	r.State = stateOf(r.Record)
	return r, nil
}

// readRecord reads at most maxRecord bytes.
func readRecord(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f, maxRecord)
}

func isRunID(id string) bool {
	return len(id) == 16 && strings.Trim(id, "0123456789abcdef") == ""
}

func stateOf(r Record) RunState {
	switch {
	case !r.End.IsZero():
		return RunEnded
	case r.Owner.alive():
		return RunRunning
	}
	return RunLost
}

// alive reports whether the very process still runs: a pid is used again, a pid
// with its start time since boot is not.
func (o Owner) alive() bool {
	boot, err := bootID()
	if err != nil || boot != o.BootID {
		return err != nil // can't tell: treat it as running, nothing is removed
	}
	ticks, err := startTicks(o.PID)
	if errors.Is(err, fs.ErrNotExist) {
		return false
	}
	return err != nil || ticks == o.StartTicks
}

// Leftover is what a run left behind.
type Leftover struct {
	Run string `json:"run"`
	// Engine and Container name its container, empty when only files are left.
	Engine    string `json:"engine,omitempty"`
	Container string `json:"container,omitempty"`
	// Ref is a reference that now has the run's commits.
	Ref string `json:"ref,omitempty"`
	// Kept says why it was not removed; empty when it was, or would be.
	Kept string `json:"kept,omitempty"`
}

// Prune removes what lost runs of the caller left: containers that carry the run's
// label, have a record of the caller's and a program of agentshim's as entrypoint, and
// files in the runtime folder. With dryRun it only says what it would remove.
// Nothing else is touched: not a running run, not another user's.
func (s Store) Prune(ctx context.Context, dryRun bool) ([]Leftover, error) {
	runs, err := s.Runs()
	errs := []error{err}
	engines := map[string]Adapter{}
	var out []Leftover
	for _, r := range runs {
		if r.State == RunEnded && !dryRun {
			errs = append(errs, removeTree(s.folders.record(r.ID), newCopyFolder))
		}
		if r.State != RunLost && r.Reason != ReasonEngineLost {
			continue
		}
		left, err := s.reclaim(ctx, engines, r, dryRun)
		out = append(out, left...)
		errs = append(errs, err)
	}
	left, err := s.pruneFolders(ctx, engines, dryRun)
	return append(out, left...), errors.Join(append(errs, err)...)
}

// pruneQuickly reclaims what stands in the runtime folder: leftovers since the last
// boot. It is what a run does at its end; it costs one folder listing when there is
// nothing to do.
func (s Store) pruneQuickly(ctx context.Context) error {
	_, err := s.pruneFolders(ctx, map[string]Adapter{}, false)
	return err
}

// pruneFolders reclaims runs whose folder is left and whose shim is gone. The folder
// names its owner and the state folder with its record, which may be another one
// than this store's.
func (s Store) pruneFolders(ctx context.Context, engines map[string]Adapter, dryRun bool) ([]Leftover, error) {
	entries, err := os.ReadDir(s.folders.runtime)
	if err != nil {
		return nil, &Error{Reason: ReasonState, Err: err}
	}
	var out []Leftover
	var errs []error
	for _, e := range entries {
		dir := filepath.Join(s.folders.runtime, e.Name())
		claim, err := readClaim(dir)
		if !dryRun {
			s.folders.pruneName(e.Name())
		}
		if abandoned(e) && !dryRun {
			errs = append(errs, os.RemoveAll(dir))
		}
		if !isRunID(e.Name()) || err != nil || claim.Owner.alive() {
			continue
		}
		store := s
		store.folders.state = claim.State
		if r, err := store.Run(e.Name()); err == nil && r.State == RunLost {
			left, err := store.reclaim(ctx, engines, r, dryRun)
			out = append(out, left...)
			errs = append(errs, err)
		}
		out = append(out, Leftover{Run: e.Name()})
		if !dryRun {
			errs = append(errs, os.RemoveAll(dir))
		}
	}
	return out, errors.Join(errs...)
}

// abandoned reports a folder whose making was cut short.
func abandoned(e fs.DirEntry) bool {
	info, err := e.Info()
	return err == nil && strings.HasPrefix(e.Name(), newFolder) && time.Since(info.ModTime()) > time.Hour
}

const newFolder = ".new-"

// claim says whose a run's folder in the runtime folder is.
type claim struct {
	Owner Owner `json:"owner"`
	// State is the state folder that holds the run's record.
	State string `json:"state"`
	// Workspace is the real path of the folder that the agent can write to, if any.
	Workspace string `json:"workspace,omitempty"`
	// Session is set for a session.
	Session *SessionRecord `json:"session,omitempty"`
}

const claimFile = "owner.json"

// makeRunFolder makes the folder of a run with its claim in it, in one step: there
// is never a folder without one.
func (f folders) makeRunFolder(id string, c claim) (string, error) {
	dir := filepath.Join(f.runtime, id)
	c.State = f.state
	b, err := json.Marshal(c)
	if err != nil {
		return "", err
	}
	fresh, err := os.MkdirTemp(f.runtime, newFolder)
	if err == nil {
		err = os.WriteFile(filepath.Join(fresh, claimFile), b, 0o600)
	}
	if err == nil {
		err = os.Rename(fresh, dir)
	}
	if err != nil {
		os.RemoveAll(fresh)
		return "", f.failed(err)
	}
	return dir, nil
}

func readClaim(dir string) (claim, error) {
	var c claim
	b, err := readRecord(filepath.Join(dir, claimFile))
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err == nil && !filepath.IsAbs(c.State) {
		err = fmt.Errorf("state folder %q", c.State)
	}
	return c, err
}

// reclaim removes one lost run's container and ends its record.
func (s Store) reclaim(ctx context.Context, engines map[string]Adapter, r RunInfo, dryRun bool) ([]Leftover, error) {
	var out []Leftover
	if r.Engine != nil {
		adapter, err := s.engine(ctx, engines, *r.Engine)
		if err != nil {
			return []Leftover{{Run: r.ID, Engine: r.Engine.Kind, Kept: "its engine can't be asked: " + err.Error()}}, nil
		}
		out, err = removeByLabel(ctx, adapter, r.ID, dryRun)
		if err != nil {
			return out, err
		}
	}
	if dryRun {
		return out, nil
	}
	kept := slices.ContainsFunc(out, func(l Leftover) bool { return l.Kept != "" })
	if err := removeTree(s.folders.record(r.ID), newCopyFolder); err != nil {
		return out, err
	}
	if kept {
		return out, nil
	}
	left, err := s.reclaimGit(ctx, &r.Record)
	out = append(out, left...)
	if err != nil || r.State != RunLost {
		return out, err
	}
	r.Record = r.failed(&Error{Reason: ReasonInitLost, Msg: "agentshim ended before the run did; reclaimed"})
	r.End = time.Now().UTC()
	return out, r.write(s.folders)
}

// engine probes each engine once. The record says which one, not where: the
// caller's present environment must lead to it.
func (s Store) engine(ctx context.Context, engines map[string]Adapter, e spec.Engine) (Adapter, error) {
	if a, ok := engines[e.Kind]; ok {
		return a, nil
	}
	a, err := ProbeEngine(ctx, ProbeOptions{
		Engine: e.Kind, DockerConfig: filepath.Join(s.folders.state, "docker-config"),
		CacheDir: filepath.Join(s.folders.state, "cache"), Getenv: s.getenv, Runner: s.runner,
	})
	if err == nil && (a.Engine().Socket != e.Socket || a.Engine().Rootless != e.Rootless) {
		err = fmt.Errorf("another %s answers than the run used", e.Kind)
	}
	if err == nil {
		engines[e.Kind] = a
	}
	return a, err
}

// removeByLabel removes the containers of one run. A label alone proves nothing,
// since images pass theirs on: the entrypoint must be ours too.
func removeByLabel(ctx context.Context, a Adapter, id string, dryRun bool) ([]Leftover, error) {
	out, err := runQuestion(ctx, a.Runner(), a.Command("ps", "--all", "--quiet", "--no-trunc", "--filter", "label="+spec.LabelRun+"="+id))
	if err != nil {
		return nil, &Error{Reason: ReasonEngineFailed, Err: err}
	}
	var left []Leftover
	for _, container := range strings.Fields(string(out.Stdout)) {
		l := Leftover{Run: id, Engine: a.Engine().Kind, Container: container}
		ours, err := entrypointIsOurs(ctx, a, container)
		switch {
		case errors.Is(err, errGone):
			continue
		case err != nil:
			return left, err
		case !ours:
			l.Kept = "its entrypoint is not agentshim's"
		case !dryRun:
			err = removeContainer(ctx, a, container)
		}
		left = append(left, l)
		if err != nil {
			return left, err
		}
	}
	return left, nil
}

// errGone says that a container ended and was removed since it was listed.
var errGone = errors.New("the container is gone")

// gone reports an engine that does not know a container.
func gone(err error) bool {
	var failed *EngineError
	return errors.As(err, &failed) && strings.Contains(strings.ToLower(failed.Stderr), "no such container")
}

// entrypointIsOurs reports whether the container runs init, for an agent, to set a cache up
// or to be executed by another container, or the helper that makes a sandbox's way out.
func entrypointIsOurs(ctx context.Context, a Adapter, container string) (bool, error) {
	out, err := runQuestion(ctx, a.Runner(), a.Command("inspect", "--type", "container", "--format", "{{.Path}} {{json .Args}}", container))
	if gone(err) {
		return false, errGone
	}
	if err != nil {
		return false, &Error{Reason: ReasonEngineFailed, Err: err}
	}
	argv := strings.TrimSpace(string(out.Stdout))
	return argv == spec.InitPath+` ["`+spec.InitArg+`"]` ||
		argv == spec.InitPath+` ["`+spec.HoldArg+`"]` ||
		strings.HasPrefix(argv, spec.InitPath+` ["`+spec.CacheArg+`",`) || strings.HasPrefix(argv, spec.HelperPath+` ["`+spec.HelperArg+`",`), nil
}

// removeContainer has the engine remove a container and its volumes. One that is
// gone, or on its way, is no error.
func removeContainer(ctx context.Context, a Adapter, name string) error {
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	out, err := a.Runner().Run(ctx, a.Command("rm", "--force", "--volumes", name))
	if err == nil || gone(err) || strings.Contains(strings.ToLower(string(out.Stderr)), "is already in progress") {
		return nil
	}
	return leftBehind{&Error{
		Reason: ReasonEngineLost, Msg: fmt.Sprintf("container %s could not be removed", name), Err: err,
		Hint: "agentshim prune tries again",
	}}
}

// leftBehind is a container that may still be there. It stands before whatever else a run
// failed with: Prune finds an ended run's by its reason.
type leftBehind struct{ err error }

func (l leftBehind) Error() string { return l.err.Error() }
func (l leftBehind) Unwrap() error { return l.err }
