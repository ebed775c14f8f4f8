package shim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// What can be wrong with a tree that is copied; the *Error around one names the
// path and the remedy.
var (
	// ErrTreeBytes, ErrTreeEntries and ErrTreeDepth say which bound of TreeLimits is passed.
	ErrTreeBytes   = errors.New("more data than a copy may hold")
	ErrTreeEntries = errors.New("more files than a copy may hold")
	ErrTreeDepth   = errors.New("folders are nested too deep for a copy")
	// ErrTreeChanged says that a file changed again each time it was read.
	ErrTreeChanged = errors.New("it changes while it is read")
	// ErrTreeMount says that something is mounted inside the tree.
	ErrTreeMount = errors.New("something is mounted on it")
	// ErrTreeItself says that the copy would be made inside the tree.
	ErrTreeItself = errors.New("the copy is made in it")
)

// TreeLimits bound what is read of a tree. A zero field is its default.
type TreeLimits struct {
	// Bytes of data, holes not counted: 16 GiB.
	Bytes int64
	// Entries are files, folders and links, also those that are not copied: 1,000,000.
	Entries int
	// Depth of folders below the root: 128.
	Depth int
}

func (l TreeLimits) withDefaults() TreeLimits {
	l.Bytes = cmp.Or(l.Bytes, 16<<30)
	l.Entries = cmp.Or(l.Entries, 1_000_000)
	l.Depth = cmp.Or(l.Depth, 128)
	return l
}

// FileOwner is who a copied file belongs to.
type FileOwner struct{ UID, GID uint32 }

// CopyOptions say how CopyTree copies. The zero value copies everything it can read.
type CopyOptions struct {
	// Owner, where not nil, is given every copy, which takes privilege. What Owner
	// could not read in the original, by its permission bits, is not copied: a
	// privileged caller must not open files for the agent.
	Owner *FileOwner
	// Exclude are paths relative to the root that are left out with all below them.
	Exclude []string
	Limits  TreeLimits
}

// LeftOut is something that was not copied, and why.
type LeftOut struct {
	Path string `json:"path"`
	Why  string `json:"why"`
}

// Why something was left out of a copy.
const (
	leftExcluded   = "excluded"
	leftSpecial    = "not a file, folder or link"
	leftUnreadable = "not readable"
	leftVanished   = "removed meanwhile"
	leftName       = "its path is too long"
)

// maxLeftOut bounds the names in a CopyReport.
const maxLeftOut = 100

// CopyReport says what CopyTree did.
type CopyReport struct {
	Files, Folders, Links int
	// Bytes of data in files, holes not counted.
	Bytes int64
	// LeftOut names the first hundred in the order of their paths; LeftOutCount counts all.
	LeftOut      []LeftOut
	LeftOutCount int
	// Split counts files that had several names: each name has its own copy.
	Split int
}

// CopyTree copies the tree below the folder src into the empty folder dst and
// returns what ParseBase reads back. It follows no link and leaves neither folder,
// whatever is renamed meanwhile; links are copied as their text. Modes (without setuid, setgid and
// sticky bits) and times are kept, holes stay holes, names of one file become
// files of their own; extended attributes, access lists and capabilities are
// dropped. FIFOs, sockets and devices are not copied, and never opened for long
// enough to block.
//
// Every file in the copy is one that the original held at one moment, by its change
// time: this is not promised on file systems whose time stamps are coarser than
// 20 ms. The tree as a whole is no snapshot: what is created, moved or removed
// meanwhile may be in the copy or not, and is not in the base when not in the copy.
//
// With an error, which is an *Error for what is wrong with the tree, dst holds a part of it.
func CopyTree(ctx context.Context, src, dst *os.File, opt CopyOptions) (Base, CopyReport, error) {
	var to unix.Stat_t
	if err := unix.Fstat(int(dst.Fd()), &to); err != nil {
		return Base{}, CopyReport{}, fmt.Errorf("stat %q: %w", dst.Name(), err)
	}
	if empty, err := emptyFolder(int(dst.Fd())); err != nil || !empty {
		return Base{}, CopyReport{}, cmp.Or(err, fmt.Errorf("copy into %q: the folder is not empty", dst.Name()))
	}
	c := &treeCopy{
		ctx: ctx, src: int(src.Fd()), dst: int(dst.Fd()), owner: opt.Owner, exclude: map[string]bool{}, dev: to.Dev, ino: to.Ino,
		budget: treeBudget{limits: opt.Limits.withDefaults()},
	}
	for _, p := range opt.Exclude {
		c.exclude[path.Clean(p)] = true
	}
	c.wake = sync.NewCond(&c.mu)
	c.queue = []folderTask{{}}
	entries, report, err := c.run()
	if err != nil {
		return Base{}, report, err
	}
	if err := c.finish(entries); err != nil {
		return Base{}, report, err
	}
	// So that a write to the copy right behind this is seen in a change time.
	time.Sleep(stampGrain)
	return Base{Entries: entries}, report, nil
}

// folderTask is a folder to list, or a part of a listed one.
type folderTask struct {
	path  string
	depth int
	names []dirent
}

// folderPart is how many names of one folder are one task: a flat folder is shared
// among the workers, too.
const folderPart = 256

// treeCopy is one CopyTree.
type treeCopy struct {
	ctx      context.Context
	src, dst int
	dev, ino uint64 // dst's
	owner    *FileOwner
	exclude  map[string]bool
	budget   treeBudget
	bytes    copyModes

	mu    sync.Mutex
	wake  *sync.Cond
	queue []folderTask
	busy  int
	err   error
}

// copyWorker is what one goroutine gathers.
type copyWorker struct {
	*treeCopy
	buf     []byte
	entries []BaseEntry
	left    []LeftOut
	report  CopyReport
}

func (c *treeCopy) run() ([]BaseEntry, CopyReport, error) {
	workers := make([]*copyWorker, min(8, 2*runtime.GOMAXPROCS(0)))
	var wg sync.WaitGroup
	for i := range workers {
		w := &copyWorker{treeCopy: c, buf: make([]byte, copyBuffer)}
		workers[i] = w
		wg.Go(w.work)
	}
	wg.Wait()
	var entries []BaseEntry
	var report CopyReport
	for _, w := range workers {
		entries = append(entries, w.entries...)
		report.add(w)
	}
	report.bound()
	report.Bytes = c.budget.bytes.Load()
	slices.SortFunc(entries, func(a, b BaseEntry) int { return strings.Compare(a.Path, b.Path) })
	return entries, report, c.err
}

func (r *CopyReport) add(w *copyWorker) {
	r.Files += w.report.Files
	r.Folders += w.report.Folders
	r.Links += w.report.Links
	r.Split += w.report.Split
	r.LeftOut = append(r.LeftOut, w.left...)
}

func (r *CopyReport) bound() {
	slices.SortFunc(r.LeftOut, func(a, b LeftOut) int { return strings.Compare(a.Path, b.Path) })
	r.LeftOutCount = len(r.LeftOut)
	r.LeftOut = slices.Clone(r.LeftOut[:min(len(r.LeftOut), maxLeftOut)])
}

// work does tasks until none is left that could make others, or one failed.
func (w *copyWorker) work() {
	for {
		task, ok := w.next()
		if !ok {
			return
		}
		w.done(w.folder(task))
	}
}

func (c *treeCopy) next() (folderTask, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.queue) == 0 && c.busy > 0 && c.err == nil {
		c.wake.Wait()
	}
	if c.err != nil || len(c.queue) == 0 {
		return folderTask{}, false
	}
	// Last in, first out: the queue stays as short as the tree is deep and wide.
	task := c.queue[len(c.queue)-1]
	c.queue = c.queue[:len(c.queue)-1]
	c.busy++
	return task, true
}

func (c *treeCopy) done(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.busy--
	c.err = cmp.Or(c.err, err)
	c.wake.Broadcast()
}

func (c *treeCopy) push(tasks ...folderTask) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = append(c.queue, tasks...)
	c.wake.Broadcast()
}

// folder copies what stands in one folder; folders in it become tasks.
func (w *copyWorker) folder(t folderTask) error {
	src, err := openFolder(w.src, t.path, unix.O_RDONLY)
	if err != nil {
		return w.unopened(t.path, err)
	}
	defer unix.Close(src)
	if t.names == nil {
		if t, err = w.list(t, src); err != nil || len(t.names) == 0 {
			return err
		}
	}
	dst, err := openFolder(w.dst, t.path, unix.O_PATH)
	if err != nil {
		return fmt.Errorf("open copy of folder %q: %w", t.path, err)
	}
	defer unix.Close(dst)
	for _, d := range t.names {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		if err := w.entry(src, dst, t, d); err != nil {
			return err
		}
	}
	return nil
}

// list makes the copy of a folder and reads the names in the original; what is
// more than one part becomes tasks.
func (w *copyWorker) list(t folderTask, src int) (folderTask, error) {
	if ok, err := w.makeFolder(t, src); !ok || err != nil {
		return t, err
	}
	names, err := readNames(src, w.budget.entriesLeft())
	if errors.Is(err, unix.ENOENT) { // removed since it was opened: getdents(2)
		w.leave(t.path, leftVanished)
		return t, nil
	}
	if err != nil {
		return t, treeError(t.path, err)
	}
	if err := w.budget.take(len(names), 0); err != nil {
		return t, treeError(t.path, err)
	}
	for len(names) > folderPart {
		w.push(folderTask{path: t.path, depth: t.depth, names: names[:folderPart]})
		names = names[folderPart:]
	}
	t.names = names
	return t, nil
}

// makeFolder makes the copy of a folder, 0700 until finish; false when the folder
// is not for the agent.
func (w *copyWorker) makeFolder(t folderTask, src int) (bool, error) {
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil {
		return false, fmt.Errorf("stat folder %q: %w", t.path, err)
	}
	if st.Dev == w.dev && st.Ino == w.ino {
		return false, treeError(t.path, ErrTreeItself)
	}
	if !mayRead(&st, w.owner) {
		return false, w.unopened(t.path, unix.EACCES)
	}
	if t.path == "" {
		return true, giveOwner(w.dst, w.owner)
	}
	w.report.Folders++
	w.entries = append(w.entries, baseEntry(t.path, &st))
	parent, err := openFolder(w.dst, parentOf(t.path), unix.O_PATH)
	if err != nil {
		return false, fmt.Errorf("open copy of folder %q: %w", parentOf(t.path), err)
	}
	defer unix.Close(parent)
	if err := unix.Mkdirat(parent, path.Base(t.path), 0o700); err != nil {
		return false, fmt.Errorf("make copy of folder %q: %w", t.path, err)
	}
	return true, chownAt(parent, path.Base(t.path), w.owner)
}

// unopened says what a folder is that was listed and can't be opened now.
func (w *copyWorker) unopened(p string, err error) error {
	if p == "" {
		return treeError(p, fmt.Errorf("open the folder to copy: %w", err))
	}
	if !w.leftOut(p, err) {
		return treeError(p, err)
	}
	return nil
}

// leftOut leaves p out where err says that it is gone or can't be read.
func (w *copyWorker) leftOut(p string, err error) bool {
	switch {
	case errors.Is(err, unix.ENOENT):
		w.leave(p, leftVanished)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		w.leave(p, leftUnreadable)
	default:
		return false
	}
	return true
}

func (w *copyWorker) leave(p, why string) { w.left = append(w.left, LeftOut{p, why}) }

// maxTreeTries is how often a file is read that changes meanwhile.
const maxTreeTries = 4

// entry copies one name of a folder, again when it has become something else or
// changes meanwhile.
func (w *copyWorker) entry(src, dst int, t folderTask, d dirent) error {
	p := path.Join(t.path, d.name)
	if w.exclude[p] {
		w.leave(p, leftExcluded)
		return nil
	}
	// Longer paths can't be reached in one openat2(2): PATH_MAX.
	if len(p) >= unix.PathMax {
		w.leave(p, leftName)
		return nil
	}
	kind := d.kind
	for range maxTreeTries {
		err := w.once(src, dst, t, d.name, kind)
		switch {
		case w.leftOut(p, err):
			return nil
		case !isTreeChange(err):
			return treeError(p, err)
		}
		kind = unix.DT_UNKNOWN
		time.Sleep(stampGrain)
	}
	return treeError(p, ErrTreeChanged)
}

// isTreeChange: what open says when a name stands for something else than listed.
// EAGAIN also comes from openat2(2) beside a rename.
func isTreeChange(err error) bool {
	return errors.Is(err, ErrTreeChanged) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) ||
		errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.EAGAIN)
}

func (w *copyWorker) once(src, dst int, t folderTask, name string, kind uint8) error {
	if kind == unix.DT_UNKNOWN {
		var st unix.Stat_t
		if err := unix.Fstatat(src, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		kind = uint8(st.Mode & unix.S_IFMT >> 12) // dirent's DT_… are the mode's upper bits: IFTODT
	}
	p := path.Join(t.path, name)
	switch kind {
	case unix.DT_DIR:
		if t.depth+1 > w.budget.limits.Depth {
			return ErrTreeDepth
		}
		w.push(folderTask{path: p, depth: t.depth + 1})
		return nil
	case unix.DT_LNK:
		return w.link(src, dst, p, name)
	case unix.DT_REG:
		return w.file(src, dst, p, name)
	}
	w.leave(p, leftSpecial)
	return nil
}

// openKind opens an entry that is expected to be of one kind; ErrTreeChanged where it
// is of another by now.
func openKind(dir int, name string, flags uint64, kind uint32) (int, unix.Stat_t, error) {
	var st unix.Stat_t
	fd, err := openBeneath(dir, name, flags|unix.O_NOFOLLOW)
	if err != nil {
		return -1, st, err
	}
	if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT != kind {
		err = ErrTreeChanged
	}
	if err != nil {
		unix.Close(fd)
	}
	return fd, st, err
}

func (w *copyWorker) link(src, dst int, p, name string) error {
	fd, st, err := openKind(src, name, unix.O_PATH, unix.S_IFLNK)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	text, err := readLink(fd)
	if err != nil {
		return err
	}
	e := baseEntry(p, &st)
	e.Link, e.Size = text, int64(len(text))
	if err := w.makeLink(dst, name, &e); err != nil {
		return copySide("copy link", p, err)
	}
	w.report.Links++
	w.entries = append(w.entries, e)
	return nil
}

func (w *copyWorker) makeLink(dst int, name string, e *BaseEntry) error {
	if err := unix.Symlinkat(e.Link, dst, name); err != nil {
		return err
	}
	if err := chownAt(dst, name, w.owner); err != nil {
		return err
	}
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, e.Host.MTime.timespec()}
	if err := unix.UtimesNanoAt(dst, name, times, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	var st unix.Stat_t
	err := unix.Fstatat(dst, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	e.Copy = stampOf(&st)
	return err
}

func (w *copyWorker) file(src, dst int, p, name string) error {
	// O_NONBLOCK: a FIFO put there meanwhile doesn't block, and has its own mode below.
	fd, st, err := openKind(src, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, unix.S_IFREG)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if !mayRead(&st, w.owner) {
		return unix.EACCES
	}
	if err := w.budget.take(0, dataSize(&st)); err != nil {
		return err
	}
	e := baseEntry(p, &st)
	settle(e.Host.CTime)
	if err := w.makeFile(fd, dst, name, &st, &e); err != nil {
		w.budget.give(dataSize(&st))
		return err
	}
	if st.Nlink > 1 {
		w.report.Split++
	}
	w.report.Files++
	w.entries = append(w.entries, e)
	return nil
}

// makeFile writes one file's copy; without one when it fails.
func (w *copyWorker) makeFile(fd, dst int, name string, st *unix.Stat_t, e *BaseEntry) error {
	out, err := unix.Openat(dst, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, e.Mode)
	if err != nil {
		return copySide("copy", e.Path, err)
	}
	defer unix.Close(out)
	if err = w.bytes.copy(fd, out, st, w.buf, &e.Digest); err == nil {
		err = unchanged(fd, st)
	}
	if err == nil {
		if err = w.setFile(out, e); err != nil {
			err = copySide("copy", e.Path, err)
		}
	}
	if err != nil {
		_ = unix.Unlinkat(dst, name, 0)
	}
	return err
}

// copySide keeps an errno of the copy's side from being read as the original's. A full
// disk can be the copy's only.
func copySide(what, p string, err error) error {
	if diskHint(err) != "" {
		return err
	}
	return fmt.Errorf("%s %q: %v", what, p, err) //nolint:errorlint // see above
}

// setFile gives a written copy its owner, mode and time, and notes how it stands.
func (w *copyWorker) setFile(out int, e *BaseEntry) error {
	// chown before chmod: it may clear mode bits (chown(2)).
	if err := giveOwner(out, w.owner); err != nil {
		return err
	}
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, e.Host.MTime.timespec()}
	if err := futimens(out, times); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(out, &st); err != nil {
		return err
	}
	if st.Mode&0o7777 != e.Mode {
		if err := unix.Fchmod(out, e.Mode); err != nil {
			return err
		}
		if err := unix.Fstat(out, &st); err != nil {
			return err
		}
	}
	e.Copy = stampOf(&st)
	return nil
}

// finish gives the copied folders their modes and times, the deepest first.
func (c *treeCopy) finish(entries []BaseEntry) error {
	for i := len(entries) - 1; i >= 0; i-- {
		if e := &entries[i]; e.Type == TypeFolder {
			if err := c.finishFolder(e); err != nil {
				return fmt.Errorf("finish copy of folder %q: %w", e.Path, err)
			}
		}
	}
	return nil
}

func (c *treeCopy) finishFolder(e *BaseEntry) error {
	fd, err := openFolder(c.dst, e.Path, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Fchmod(fd, e.Mode); err != nil {
		return err
	}
	if err := futimens(fd, []unix.Timespec{{Nsec: unix.UTIME_OMIT}, e.Host.MTime.timespec()}); err != nil {
		return err
	}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	e.Copy = stampOf(&st)
	return err
}

// treeError gives what is wrong with a tree its remedy.
func treeError(p string, err error) error {
	hint := ""
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, ErrTreeBytes), errors.Is(err, ErrTreeEntries), errors.Is(err, ErrTreeDepth):
		hint = "take a smaller folder as the workspace, remove what the agent does not need, or use workspace mode \"writable\" or \"read-only\""
	case errors.Is(err, ErrTreeItself):
		hint = "set XDG_STATE_HOME to a folder outside of the workspace"
	case isTreeChange(err):
		err, hint = ErrTreeChanged, "stop what writes into the workspace (an editor's or a build's watcher, another run) and try again"
	case diskHint(err) != "":
		return &Error{Reason: ReasonState, Msg: "copy of " + briefName(p), Hint: diskHint(err), Err: err}
	case p == "" && errors.Is(err, unix.EACCES):
		hint = "let the agent's uid list and enter the workspace, or run as another one"
	case errors.Is(err, unix.EXDEV):
		err, hint = ErrTreeMount, "unmount it, or take a folder without mounts as the workspace"
	}
	return &Error{Reason: ReasonMount, Msg: "workspace: " + briefName(p), Hint: hint, Err: err}
}
