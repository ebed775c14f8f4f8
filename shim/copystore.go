package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/mounts"
)

// Why a run's copy can't be used.
var (
	// ErrNoCopy says that a run has no copy of a workspace, or none any more.
	ErrNoCopy = errors.New("it has no copy of a workspace")
	// ErrRunning says that a run still goes on.
	ErrRunning = errors.New("it still goes on")
	// ErrCopyCut says that the machine went down before the copy was on its disk.
	ErrCopyCut = errors.New("the machine went down before its copy was on the disk: files in it may be cut short")
)

// RunCopy is a run's private copy of its workspace beside the host's folder, both open.
// The caller closes it.
type RunCopy struct {
	Run RunInfo
	// Path is the copy's folder.
	Path string

	store        Store
	base         Base
	copied, host *os.File
	lock         *os.File
}

// OpenCopy opens the copy of a run and the host's folder, which must be the very folder
// that was copied. Only one process at a time has it open to change something; no
// other then removes the copy or applies it.
func (s Store) OpenCopy(id string, change bool) (*RunCopy, error) {
	run, err := s.runWithCopy(id)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(s.folders.record(id), copyFolder)
	c := &RunCopy{Run: run, store: s, Path: filepath.Join(dir, copyTree)}
	if err := c.open(dir, change); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// runWithCopy reads a run that has a copy.
func (s Store) runWithCopy(id string) (RunInfo, error) {
	run, err := s.Run(id)
	if err != nil {
		return RunInfo{}, err
	}
	hint := ""
	switch {
	case run.Copy != nil && run.Copy.Removed.IsZero():
		return run, nil
	case run.Copy != nil:
		hint = "it was removed on " + run.Copy.Removed.Local().Format(time.DateTime)
	case run.State != RunRunning:
		hint = `runs with workspace.mode "copy" that came to start the harness have one`
	}
	return RunInfo{}, &Error{Reason: ReasonState, Msg: "run " + id, Err: ErrNoCopy, Hint: hint}
}

func (c *RunCopy) open(dir string, change bool) error {
	rec := c.Run.Copy
	var err error
	if change {
		if c.lock, err = c.takeLock(dir); err != nil {
			return err
		}
		if err := c.usable(); err != nil {
			return err
		}
	}
	if c.base, err = ReadBase(filepath.Join(dir, copyBase)); err == nil {
		c.copied, err = os.OpenFile(c.Path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	}
	if err != nil {
		return &Error{Reason: ReasonState, Msg: "copy of run " + c.Run.ID, Err: err}
	}
	c.host, err = openWorkspace(rec.Source, c.hostDevice(), rec.Ino)
	if errors.Is(err, mounts.ErrExchanged) {
		return &Error{
			Reason: ReasonMount, Msg: fmt.Sprintf("the workspace %q is not the folder that was copied", rec.Source), Err: err,
			Hint: "changes are for that very folder: put it back in its place, or take what you need from " + c.Path,
		}
	}
	return asError(err)
}

// hostDevice is the device on which the host's folder is sought. Numbers of devices
// can be others after a start of the machine: then the folder's own is taken.
func (c *RunCopy) hostDevice() uint64 {
	var st unix.Stat_t
	if c.Run.Owner.sameBoot() || unix.Lstat(c.Run.Copy.Source, &st) != nil {
		return c.Run.Copy.Dev
	}
	return st.Dev
}

// usable says why a copy's changes may not be applied.
func (c *RunCopy) usable() error {
	switch {
	case c.Run.State == RunRunning:
		return &Error{Reason: ReasonState, Msg: "run " + c.Run.ID, Err: ErrRunning, Hint: "wait for its end; agentshim diff shows what there is"}
	case c.Cut():
		return &Error{Reason: ReasonState, Msg: "run " + c.Run.ID, Err: ErrCopyCut, Hint: "look at agentshim diff, and take by hand what is whole from " + c.Path}
	}
	return nil
}

// Cut says that the machine went down before the copy was on its disk.
func (c *RunCopy) Cut() bool { return !c.Run.Copy.Synced && !c.Run.Owner.sameBoot() }

// takeLock waits for no one.
func (c *RunCopy) takeLock(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	switch {
	case err == nil:
		return f, nil
	case errors.Is(err, unix.EWOULDBLOCK):
		err = &Error{Reason: ReasonState, Msg: "another agentshim works on the copy of run " + c.Run.ID, Hint: "wait for it"}
	case errors.Is(err, fs.ErrNotExist):
		err = &Error{Reason: ReasonState, Msg: "run " + c.Run.ID, Err: ErrNoCopy}
	default:
		err = &Error{Reason: ReasonState, Err: err}
	}
	if f != nil {
		f.Close()
	}
	return nil, err
}

// Close closes what OpenCopy opened.
func (c *RunCopy) Close() {
	for _, f := range []*os.File{c.copied, c.host, c.lock} {
		if f != nil {
			f.Close()
		}
	}
}

// Changes compares the copy with what was copied and with the host's folder now.
func (c *RunCopy) Changes(ctx context.Context) (Changes, error) {
	rec := c.Run.Copy
	changes, err := FindChanges(ctx, c.base, c.copied, c.host, ChangeRules{
		ProtectedNames: rec.ProtectedNames, ProtectedPaths: rec.ProtectedPaths, Root: rec.Source, AgentUID: &rec.UID, Umask: callersUmask(),
	})
	return changes, c.failed(ctx, err)
}

// failed gives an error its reason.
func (c *RunCopy) failed(ctx context.Context, err error) error {
	var e *Error
	switch {
	case err == nil || errors.As(err, &e):
		return err
	case ctx.Err() != nil:
		return interrupted(ctx, err)
	case errors.Is(err, ErrApplyRace):
		return &Error{Reason: ReasonMount, Msg: "workspace", Err: err, Hint: "stop what writes into the workspace, and try again: what is applied already stays"}
	}
	return &Error{Reason: ReasonMount, Msg: "workspace", Err: err}
}

// Diff writes changes for people; see WriteDiff.
func (c *RunCopy) Diff(w io.Writer, changes Changes, limits DiffLimits) error {
	return WriteDiff(w, changes, c.copied, c.host, limits)
}

// Apply applies changes to the host's folder, which they must have been found with, and notes it in the
// run's record. Those that are refused never are applied; with conflicts nothing is,
// unless partly is given: ErrBlocked.
func (c *RunCopy) Apply(ctx context.Context, changes Changes, partly bool) (Applied, error) {
	conflicts := changes.Count(VerdictConflict)
	if c.lock == nil {
		return Applied{}, &Error{Reason: ReasonInternal, Msg: "the copy is open for reading only"}
	}
	if conflicts > 0 && !partly {
		return Applied{}, fmt.Errorf("%w: %d of %d are in conflict", ErrBlocked, conflicts, len(changes.List))
	}
	done, err := Apply(ctx, changes, c.copied, c.host, ApplyOptions{Partly: true})
	if len(done.Written)+len(done.Deleted)+len(done.Modes) == 0 {
		return done, c.failed(ctx, err)
	}
	return done, errors.Join(c.failed(ctx, err), c.note(func(r *CopyRecord) {
		r.Applied = append(r.Applied, AppliedRecord{
			Time: time.Now().UTC(), Written: len(done.Written), Deleted: len(done.Deleted), Modes: len(done.Modes),
			Skipped: conflicts + changes.Count(VerdictRefused), Failed: err != nil,
		})
	}))
}

// note changes the run's record.
func (c *RunCopy) note(change func(*CopyRecord)) error {
	run, err := c.store.Run(c.Run.ID)
	if err != nil || run.Copy == nil {
		return err
	}
	change(run.Copy)
	return run.write(c.store.folders)
}

// sameBoot says that the machine was not started anew since.
func (o Owner) sameBoot() bool {
	boot, err := bootID()
	return err == nil && boot == o.BootID
}

// callersUmask reads this process's umask without changing it: proc_pid_status(5), 022 where
// it can't be read.
func callersUmask() uint32 {
	const otherwise = 0o022
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return otherwise
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "Umask:"); ok {
			if n, err := strconv.ParseUint(strings.TrimSpace(v), 8, 32); err == nil {
				return uint32(n)
			}
		}
	}
	return otherwise
}

// KeptCopy is a run's copy that is there, or was when it was removed.
type KeptCopy struct {
	Run RunInfo `json:"run"`
	// Bytes is the disk space that it takes.
	Bytes int64 `json:"bytes"`
	// Kept says why it was not removed; empty when it was, or would be.
	Kept string `json:"kept,omitempty"`
}

// Age is how long ago the run ended, or began where it wrote no end.
func (k KeptCopy) Age(now time.Time) time.Duration {
	if k.Run.End.IsZero() {
		return now.Sub(k.Run.Start)
	}
	return now.Sub(k.Run.End)
}

// Copies lists the copies of the caller's runs, the oldest run first.
func (s Store) Copies() ([]KeptCopy, error) {
	runs, err := s.Runs()
	var out []KeptCopy
	for _, r := range runs {
		if r.Copy != nil && r.Copy.Removed.IsZero() {
			out = append(out, KeptCopy{Run: r, Bytes: s.copyBytes(r.ID)})
		}
	}
	return out, err
}

func (s Store) copyBytes(id string) int64 {
	fd, err := unix.Open(filepath.Join(s.folders.record(id), copyFolder), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	return treeBytes(fd, 0)
}

// Discard removes the copy of an ended run, whether or not its changes were applied, and
// gives the disk space that it took. The record stays and says when.
func (s Store) Discard(id string) (int64, error) {
	run, err := s.runWithCopy(id)
	if err != nil {
		return 0, err
	}
	c := &RunCopy{Run: run, store: s}
	defer c.Close()
	dir := s.folders.record(id)
	if c.lock, err = c.takeLock(filepath.Join(dir, copyFolder)); err != nil {
		return 0, err
	}
	if run.State == RunRunning {
		return 0, &Error{Reason: ReasonState, Msg: "run " + id, Err: ErrRunning, Hint: "wait for its end"}
	}
	bytes := s.copyBytes(id)
	// Prune finishes what is cut short here.
	if err := os.Rename(filepath.Join(dir, copyFolder), filepath.Join(dir, newCopyFolder)); err != nil {
		return 0, &Error{Reason: ReasonState, Err: err}
	}
	if err := c.note(func(r *CopyRecord) { r.Removed = time.Now().UTC() }); err != nil {
		return 0, err
	}
	return bytes, removeTree(dir, newCopyFolder)
}

// PruneCopies removes the copies of runs that ended longer ago than age; with dryRun it
// only says which. Those of runs that still go on stay.
func (s Store) PruneCopies(age time.Duration, dryRun bool) ([]KeptCopy, error) {
	copies, err := s.Copies()
	errs := []error{err}
	var out []KeptCopy
	for _, k := range copies {
		if k.Run.State == RunRunning || k.Age(time.Now()) < age {
			continue
		}
		if !dryRun {
			if _, err := s.Discard(k.Run.ID); err != nil {
				k.Kept = err.Error()
				errs = append(errs, err)
			}
		}
		out = append(out, k)
	}
	return out, errors.Join(errs...)
}
