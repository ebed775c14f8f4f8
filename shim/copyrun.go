package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/mounts"
)

// A run's copy stands in its record's folder, which no run may mount: the tree that
// the agent works on, and beside it, out of the agent's reach, what it was at first.
const (
	copyFolder = "copy"
	copyTree   = "tree" // mounts.CopyTree
	copyBase   = "base"
	// newCopyFolder is copyFolder until it is whole.
	newCopyFolder = ".copy-new"
)

// CopyRecord is a run's private copy of the workspace, and what was made of it.
type CopyRecord struct {
	// Source is the host's folder, identified by Dev and Ino.
	Source string `json:"source"`
	Dev    uint64 `json:"dev"`
	Ino    uint64 `json:"ino"`
	// UID is whom the agent's files belong to on the host.
	UID uint32 `json:"uid"`
	// Files, Folders, Links and Bytes were copied.
	Files   int   `json:"files"`
	Folders int   `json:"folders"`
	Links   int   `json:"links"`
	Bytes   int64 `json:"bytes"`
	// LeftOut names the first of LeftOutCount paths that were not copied; what does not
	// print is a Go string in quotes, and what is too long is cut.
	LeftOut      []LeftOut `json:"leftOut,omitempty"`
	LeftOutCount int       `json:"leftOutCount,omitempty"`
	// ProtectedNames and ProtectedPaths are what no change is applied to.
	ProtectedNames []string `json:"protectedNames,omitempty"`
	ProtectedPaths []string `json:"protectedPaths,omitempty"`
	// Synced says that the copy reached the disk at the run's end.
	Synced bool `json:"synced,omitempty"`
	// Applied lists when changes were applied to the host's folder, oldest first.
	Applied []AppliedRecord `json:"applied,omitempty"`
	// Removed is when the copy was removed, zero while it is there.
	Removed time.Time `json:"removed,omitzero"`
}

// AppliedRecord is one time that changes were applied.
type AppliedRecord struct {
	Time time.Time `json:"time"`
	// Written, Deleted and Modes count paths; Skipped counts the changes in conflict or refused.
	Written int `json:"written"`
	Deleted int `json:"deleted"`
	Modes   int `json:"modes"`
	Skipped int `json:"skipped,omitempty"`
	// Failed says that it ended before its end.
	Failed bool `json:"failed,omitempty"`
}

// makeCopy makes the workspace's private copy and notes it in the record, before any
// container exists. With an error, or when the process dies meanwhile, there is no copy:
// what stands under newCopyFolder is removed here or by a later run or prune.
func (p *prepared) makeCopy(ctx context.Context, rec *Record) error {
	plan := p.plan.Copy
	if plan == nil {
		return nil
	}
	began := time.Now()
	dir := p.folders.record(rec.ID)
	report, err := p.fillCopy(ctx, dir)
	if err != nil {
		return errors.Join(copyFailed(plan.Source, err), asError(removeTree(dir, newCopyFolder)))
	}
	rec.Copy = &CopyRecord{
		Source: plan.Source, Dev: plan.Dev, Ino: plan.Ino, UID: plan.UID,
		Files: report.Files, Folders: report.Folders, Links: report.Links, Bytes: report.Bytes,
		LeftOut: report.LeftOut, LeftOutCount: report.LeftOutCount,
		ProtectedNames: plan.ProtectedNames, ProtectedPaths: plan.ProtectedPaths,
	}
	for i := range rec.Copy.LeftOut {
		rec.Copy.LeftOut[i].Path = briefName(rec.Copy.LeftOut[i].Path)
	}
	p.phases.done("copy")
	p.sayCopied(rec.Copy, time.Since(began))
	// A killed run's copy is found by its record.
	if err := rec.write(p.folders); err != nil {
		rec.Copy = nil
		return errors.Join(err, removeTree(dir, copyFolder))
	}
	return nil
}

// fillCopy makes the folder newCopyFolder in dir and, when it is whole, renames it to copyFolder.
func (p *prepared) fillCopy(ctx context.Context, dir string) (CopyReport, error) {
	plan := p.plan.Copy
	src, err := openWorkspace(plan.Source, plan.Dev, plan.Ino)
	if err != nil {
		return CopyReport{}, err
	}
	defer src.Close()
	fresh := filepath.Join(dir, newCopyFolder)
	tree := filepath.Join(fresh, copyTree)
	if err := errors.Join(os.Mkdir(fresh, 0o700), os.Mkdir(tree, 0o700)); err != nil {
		return CopyReport{}, err
	}
	dst, err := os.Open(tree)
	if err != nil {
		return CopyReport{}, err
	}
	defer dst.Close()
	opt := CopyOptions{Exclude: plan.Exclude}
	if plan.Chown {
		opt.Owner = &FileOwner{plan.UID, plan.GID}
	}
	base, report, err := CopyTree(ctx, src, dst, opt)
	if err == nil {
		err = errors.Join(p.mountPoints(base), p.gitMountPoint(tree))
	}
	if err == nil {
		err = WriteBase(filepath.Join(fresh, copyBase), base)
	}
	if err == nil {
		err = os.Rename(fresh, filepath.Join(dir, copyFolder))
	}
	return report, err
}

// openWorkspace opens a host's folder that must be the one that was seen before.
func openWorkspace(source string, dev, ino uint64) (*os.File, error) {
	fd, err := mounts.OpenRoot(mounts.Source{Path: source, Dev: dev, Ino: ino})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), source), nil
}

// mountPoints refuses a mount whose target inside the workspace was not copied: the
// engine would make it, as root.
func (p *prepared) mountPoints(base Base) error {
	have := map[string]NodeType{}
	for i := range base.Entries {
		have[base.Entries[i].Path] = base.Entries[i].Type
	}
	for _, m := range p.plan.Mounts {
		rel, ok := strings.CutPrefix(m.Target, p.plan.Copy.Target+"/")
		if t := have[path.Clean(rel)]; ok && m.Why != mounts.WhyGit && t != TypeFolder && t != TypeFile {
			return &Error{
				Reason: ReasonMount, Msg: fmt.Sprintf("the target %q lies in the workspace, and nothing was copied there", m.Target),
				Hint: "choose a target outside of the workspace, or one that is not hidden and that you may read",
			}
		}
	}
	return nil
}

// gitMountPoint makes what stands under .git while the run lasts: the copy has none.
func (p *prepared) gitMountPoint(tree string) error {
	if !p.hasPrivateGit() {
		return nil
	}
	name := filepath.Join(tree, ".git")
	if p.git.Kind == gitOwn {
		return os.Mkdir(name, 0o755)
	}
	return os.WriteFile(name, nil, 0o644)
}

// copyFailed names what the copy is of, and gives errors of the state folder their remedy.
func copyFailed(source string, err error) error {
	var e *Error
	var problem *mounts.Problem
	switch {
	case errors.As(err, &e), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.As(err, &problem):
		return asError(err)
	}
	return &Error{Reason: ReasonState, Msg: fmt.Sprintf("copy of the workspace %q", source), Hint: diskHint(err), Err: err}
}

func diskHint(err error) string {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return hintDiskFull
	}
	return ""
}

const hintDiskFull = "free space where agentshim keeps its runs (agentshim prune --copies-older-than 7d), or set XDG_STATE_HOME to a folder on a larger disk"

// maxSaidLeftOut bounds the lines about what was left out.
const maxSaidLeftOut = 10

func (p *prepared) sayCopied(c *CopyRecord, took time.Duration) {
	p.job.Notice("copy: %d files, %s of %q in %v", c.Files, SizeText(c.Bytes), c.Source, took.Round(time.Millisecond))
	for i, l := range c.LeftOut {
		if i == maxSaidLeftOut {
			break
		}
		if l.Path == ".git" && p.hasPrivateGit() {
			continue // the agent has its own
		}
		p.job.Notice("copy: left out: %s: %s", l.Path, l.Why)
	}
	if more := c.LeftOutCount - min(len(c.LeftOut), maxSaidLeftOut); more > 0 {
		p.job.Notice("copy: left out: %d more; the run's record names the first %d", more, maxLeftOut)
	}
}

// SizeText gives a number of bytes as people read it.
func SizeText(n int64) string {
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB"}
	f, i := float64(n), 0
	for f >= 1024 && i < len(units)-1 {
		f, i = f/1024, i+1
	}
	if i == 0 {
		return fmt.Sprintf("%d %s", n, units[0])
	}
	return fmt.Sprintf("%.1f %s", f, units[i])
}

// keepCopy is called when the container is gone. A copy that no agent had is
// removed; any other stays until it is discarded, and is written to the disk, so
// that a machine that goes down later cuts no file of it short.
func (p *prepared) keepCopy(rec *Record) error {
	if rec.Copy == nil {
		return nil
	}
	dir := p.folders.record(rec.ID)
	if !p.launched {
		rec.Copy = nil
		return asError(removeTree(dir, copyFolder))
	}
	if p.hasPrivateGit() {
		_ = os.Remove(filepath.Join(dir, copyFolder, copyTree, ".git")) // gitMountPoint's, empty
	}
	if err := syncFolder(filepath.Join(dir, copyFolder)); err != nil {
		p.job.Notice("copy: it is not on the disk yet: %v; apply it before the machine goes down", err)
		return nil
	}
	rec.Copy.Synced = true
	p.phases.done("sync")
	return nil
}

// syncFolder waits until the file system that dir is on has everything on its disk.
func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}
