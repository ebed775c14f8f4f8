package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/mounts"
)

// PlantedReport is what appeared in the workspace during a run that a program of the
// host may obey. It is a report only: it changes no exit code.
type PlantedReport struct {
	// Items are sorted by path and at most maxPlantedItems; More counts the rest.
	Items []Planted `json:"items,omitempty"`
	More  int       `json:"more,omitempty"`
	// Limit names the bound that ended the search for repositories before its end:
	// "entries", "time" or "finds"; "names" where the search of protected folders for
	// files with further names was ended; "root" where the workspace could not be
	// looked at any more; empty where all was seen.
	Limit string `json:"limit,omitempty"`
	// Unread counts the folders that could not be looked into, more than before the run.
	Unread int `json:"unread,omitempty"`
}

// Planted is one such path.
type Planted struct {
	// Path is relative to the workspace; where not all of it prints, it is a Go string
	// in quotes, and what is too long is cut.
	Path string `json:"path"`
	// What is created, replaced, changed or removed.
	What string `json:"what"`
	// Kind is file, dir, link, other, unknown or repository (a folder with what git
	// takes for a repository, whatever its name).
	Kind string `json:"kind"`
	// Reason says which program obeys it.
	Reason string `json:"reason"`
}

// Values of Planted.What.
const (
	PlantedCreated  = "created"
	PlantedReplaced = "replaced"
	PlantedChanged  = "changed"
	PlantedRemoved  = "removed"
)

// Values of PlantedReport.Limit.
const (
	limitEntries = "entries"
	limitTime    = "time"
	limitFinds   = "finds"
	limitNames   = "names"
	limitRoot    = "root"
)

const (
	// nodeRepository is the kind of a folder that is a repository itself.
	nodeRepository = "repository"

	plantedEntries  = 500_000
	plantedTime     = 5 * time.Second
	maxPlantedFinds = 10_000
	maxPlantedItems = 200
	maxPlantedLines = 20
	maxPlantedPath  = 1024

	plantedGitReason = "git takes its folder for a repository and runs what the configuration in it names"
)

// plantedLimits bound a snapshot; zero values are the defaults.
type plantedLimits struct {
	entries, finds int
	time           time.Duration
}

func (l plantedLimits) withDefaults() plantedLimits {
	if l.entries <= 0 {
		l.entries = plantedEntries
	}
	if l.finds <= 0 {
		l.finds = maxPlantedFinds
	}
	if l.time <= 0 {
		l.time = plantedTime
	}
	return l
}

// plantedSnapshot is what a workspace holds at one time that the host may obey.
type plantedSnapshot struct {
	taken  time.Time
	guards mounts.GuardFacts
	// git has each entry named .git, as nodeRepository each folder that git would take
	// for a bare repository, and what git obeys in both, by path relative to the workspace.
	git map[string]mounts.GuardNode
	// entries counts what was looked at, unread the folders that could not be.
	entries, unread int
	limit           string
}

// takePlantedSnapshot looks at the guarded paths and walks the workspace for
// repositories, shallow folders first. It follows no link, crosses into no other
// file system, opens nothing but folders, and of a folder named .git sees only what
// git obeys in it: its configuration and its hooks.
// What moves while it walks may be missed or be seen twice. A folder whose path has
// more than 4095 bytes counts as unread. An error says that the root can't be looked
// at; bounds that were hit are none.
func takePlantedSnapshot(ctx context.Context, root mounts.Source, guards []mounts.GuardPath, limits plantedLimits) (plantedSnapshot, error) {
	limits = limits.withDefaults()
	s := plantedSnapshot{taken: time.Now(), git: map[string]mounts.GuardNode{}}
	var err error
	if s.guards, err = mounts.ProbeGuards(root, guards); err != nil {
		return plantedSnapshot{}, err
	}
	fd, err := mounts.OpenRoot(root)
	if err != nil {
		return plantedSnapshot{}, err
	}
	defer unix.Close(fd)
	ctx, cancel := context.WithTimeout(ctx, limits.time)
	defer cancel()
	w := plantedWalk{ctx: ctx, root: fd, limits: limits, s: &s}
	w.run()
	return s, nil
}

type plantedWalk struct {
	ctx    context.Context
	root   int
	limits plantedLimits
	s      *plantedSnapshot
}

// plantedFolder knows its way by its parents, so that deep trees cost no long paths.
type plantedFolder struct {
	parent *plantedFolder
	name   string
}

func (f *plantedFolder) path() string {
	var names []string
	for ; f.parent != nil; f = f.parent {
		names = append(names, f.name)
	}
	slices.Reverse(names)
	return strings.Join(names, "/")
}

func (w *plantedWalk) run() {
	queue := []*plantedFolder{{}}
	for len(queue) > 0 && w.s.limit == "" {
		f := queue[0]
		queue = append(queue[1:], w.folder(f)...)
	}
}

// open opens a folder below the root. It is false for one that is gone, or a link by now,
// and one that can't be looked into, which is counted.
func (w *plantedWalk) open(rel string) (int, bool) {
	fd, err := unix.Openat2(w.root, path.Join(".", rel), &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
	case err != nil:
		w.s.unread++
	}
	return fd, err == nil
}

// folder looks at one folder's names and gives its subfolders.
func (w *plantedWalk) folder(f *plantedFolder) []*plantedFolder {
	rel := f.path()
	fd, ok := w.open(rel)
	if !ok {
		return nil
	}
	defer unix.Close(fd)
	var subs []*plantedFolder
	var git gitNames
	w.names(fd, func(e os.DirEntry) { w.entry(f, fd, rel, e, &git, &subs) })
	if git.repository() {
		w.find(fd, "", rel)
		w.obeyed(fd, ".", rel)
	}
	w.bounds()
	return subs
}

// names gives each name in the folder fd, until a bound is hit.
func (w *plantedWalk) names(fd int, see func(os.DirEntry)) {
	// Where the file system doesn't tell a name's type, ReadDir looks by this path.
	dir, err := os.Open("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		w.s.unread++
		return
	}
	defer dir.Close()
	for w.s.limit == "" {
		list, err := dir.ReadDir(1024)
		for _, e := range list {
			w.s.entries++
			see(e)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			w.s.unread++
			break
		}
		w.bounds()
	}
}

func (w *plantedWalk) entry(f *plantedFolder, fd int, rel string, e os.DirEntry, git *gitNames, subs *[]*plantedFolder) {
	name := e.Name()
	git.add(name)
	switch {
	case strings.EqualFold(name, ".git"): // macOS and Windows shares know no case
		w.find(fd, name, path.Join(rel, name))
		for _, inner := range w.obeyed(fd, name, path.Join(rel, name)) {
			*subs = append(*subs, &plantedFolder{parent: &plantedFolder{parent: f, name: name}, name: inner})
		}
	case e.IsDir():
		*subs = append(*subs, &plantedFolder{parent: f, name: name})
	}
}

func (w *plantedWalk) bounds() {
	switch {
	case w.s.limit != "":
	case w.s.entries > w.limits.entries:
		w.s.limit = limitEntries
	case w.ctx.Err() != nil:
		w.s.limit = limitTime
	case len(w.s.git) > w.limits.finds:
		w.s.limit = limitFinds
	}
}

// find notes name in the folder fd, or the folder itself as a repository.
func (w *plantedWalk) find(fd int, name, rel string) {
	flags := unix.AT_SYMLINK_NOFOLLOW
	if name == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	var st unix.Statx_t
	if unix.Statx(fd, name, flags, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st) != nil {
		return // gone
	}
	n := mounts.GuardNode{
		Kind: nodeKind(st.Mode), Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Ino: st.Ino,
		Changed: st.Ctime.Sec*1e9 + int64(st.Ctime.Nsec),
	}
	if name == "" {
		n.Kind = nodeRepository
	}
	if st.Mask&unix.STATX_BTIME != 0 {
		n.Born = st.Btime.Sec*1e9 + int64(st.Btime.Nsec)
	}
	w.s.git[path.Join(".", rel)] = n
}

// gitObeyed are the files of a repository that make git run something, or name another
// repository: git-config(1), githooks(5), gitattributes(5), gitrepository-layout(5).
var gitObeyed = []string{"commondir", "config", "config.worktree", "info/attributes"}

const gitHooks = "hooks"

// gitInner are the folders of a repository with repositories in them: those of its
// submodules and linked working trees (gitrepository-layout(5)).
var gitInner = []string{"modules", "worktrees"}

// obeyed notes what git obeys in the repository name in the folder fd, if it is one, and
// gives the folders of it that hold others.
func (w *plantedWalk) obeyed(fd int, name, rel string) (inner []string) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV}
	repo, err := unix.Openat2(fd, name, &how)
	if err != nil {
		return nil // a git link, or gone
	}
	defer unix.Close(repo)
	for _, file := range gitObeyed {
		at, base := repo, path.Base(file)
		if dir := path.Dir(file); dir != "." {
			if at, err = unix.Openat2(repo, dir, &how); err != nil {
				continue
			}
			defer unix.Close(at)
		}
		w.find(at, base, path.Join(rel, file))
	}
	w.hooks(repo, path.Join(rel, gitHooks))
	for _, dir := range gitInner {
		var st unix.Stat_t
		if unix.Fstatat(repo, dir, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			inner = append(inner, dir)
		}
	}
	return inner
}

// hooks notes what lies in the hooks of a repository, samples left out: git runs none.
// A folder that can be searched but not read counts as unread: git runs what is in it.
func (w *plantedWalk) hooks(repo int, rel string) {
	fd, err := unix.Openat2(repo, gitHooks, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	switch {
	case errors.Is(err, unix.EACCES):
		w.s.unread++
		return
	case err != nil:
		w.find(repo, gitHooks, rel) // a link, perhaps
		return
	}
	defer unix.Close(fd)
	w.names(fd, func(e os.DirEntry) {
		if !strings.HasSuffix(e.Name(), ".sample") {
			w.find(fd, e.Name(), path.Join(rel, e.Name()))
		}
	})
}

// furtherNames gives the files in protected folders that have a further name, which may
// lie within the agent's reach: what changes through it, no mount keeps from changing.
// It is false where not all could be looked at.
func furtherNames(ctx context.Context, root mounts.Source, guards []mounts.GuardPath, limits plantedLimits) ([]mounts.GuardPath, bool, error) {
	limits = limits.withDefaults()
	fd, err := mounts.OpenRoot(root)
	if err != nil {
		return nil, false, err
	}
	defer unix.Close(fd)
	ctx, cancel := context.WithTimeout(ctx, limits.time)
	defer cancel()
	w := plantedWalk{ctx: ctx, root: fd, limits: limits, s: &plantedSnapshot{}}
	var found []mounts.GuardPath
	for _, g := range guards {
		queue := []string{g.Rel}
		for !g.Hide && len(queue) > 0 && w.s.limit == "" {
			rel := queue[0]
			queue = queue[1:]
			at, ok := w.open(rel)
			if !ok {
				continue
			}
			w.names(at, func(e os.DirEntry) {
				var st unix.Stat_t
				name := path.Join(rel, e.Name())
				switch {
				case e.IsDir():
					queue = append(queue, name)
				case len(found) == limits.finds:
					w.s.limit = limitFinds
				case e.Type().IsRegular() && unix.Fstatat(at, e.Name(), &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Nlink > 1:
					found = append(found, mounts.GuardPath{Rel: name, Reason: g.Reason})
				}
			})
			unix.Close(at)
			w.bounds()
		}
	}
	return found, w.s.limit == "" && w.s.unread == 0, nil
}

// without drops what lies at or below the paths: the run could not reach it.
func (s *plantedSnapshot) without(covered []string) {
	maps.DeleteFunc(s.git, func(rel string, _ mounts.GuardNode) bool {
		return slices.ContainsFunc(covered, func(c string) bool { return rel == c || strings.HasPrefix(rel, c+"/") })
	})
}

func nodeKind(mode uint16) string {
	switch uint32(mode) & unix.S_IFMT {
	case unix.S_IFDIR:
		return mounts.NodeDir
	case unix.S_IFREG:
		return mounts.NodeFile
	case unix.S_IFLNK:
		return mounts.NodeLink
	}
	return mounts.NodeOther
}

// gitNames collects what makes a folder a repository for git (setup.c,
// is_git_directory): HEAD, and objects and refs, here or where commondir says.
type gitNames struct{ head, objects, refs, common bool }

func (g *gitNames) add(name string) {
	switch name {
	case "HEAD":
		g.head = true
	case "objects":
		g.objects = true
	case "refs":
		g.refs = true
	case "commondir":
		g.common = true
	}
}

func (g *gitNames) repository() bool { return g.head && (g.common || g.objects && g.refs) }

// comparePlanted says what appeared, was replaced, changed or went between the two.
// It is pure. Who did it is not known: the host's own programs may have.
func comparePlanted(guards []mounts.GuardPath, before, after plantedSnapshot) PlantedReport {
	found := map[string]Planted{}
	for _, g := range guards {
		old, _ := before.guards.At(g.Rel)
		now, at := after.guards.At(g.Rel)
		kind, what := now.Kind, plantedChange(old, now)
		if kind == "" {
			kind = old.Kind
		}
		if what != "" {
			found[at] = Planted{Path: plantedPath(at), What: what, Kind: kind, Reason: g.Reason}
		}
	}
	for rel, now := range after.git {
		old := before.git[rel]
		if old.Kind == "" && before.limit != "" && now.Changed < before.taken.Add(-time.Second).UnixNano() {
			continue // it was there when the first search ended before it came to it
		}
		if inNew(rel, before.git, after.git) {
			continue // the repository itself is new, and named
		}
		if what := plantedChange(old, now); what != "" {
			found[rel] = Planted{Path: plantedPath(rel), What: what, Kind: now.Kind, Reason: plantedGitReason}
		}
	}
	r := PlantedReport{Limit: after.limit, Unread: max(0, after.unread-before.unread)}
	for _, rel := range slices.Sorted(maps.Keys(found)) {
		if len(r.Items) == maxPlantedItems {
			r.More++
			continue
		}
		r.Items = append(r.Items, found[rel])
	}
	return r
}

// inNew says that rel lies in a repository that is named as new itself.
func inNew(rel string, before, after map[string]mounts.GuardNode) bool {
	for dir := path.Dir(rel); dir != "."; dir = path.Dir(dir) {
		if now, found := after[dir]; found && (now.Kind == mounts.NodeDir || now.Kind == nodeRepository) {
			what := plantedChange(before[dir], now)
			if what == PlantedCreated || what == PlantedReplaced {
				return true
			}
		}
	}
	return false
}

// plantedChange compares two looks at one path. A file's number may be used again for
// another file, so its birth counts too. A folder's ctime says only that something in
// it came or went.
func plantedChange(old, now mounts.GuardNode) string {
	switch {
	case old.Kind == "" && now.Kind == "":
		return ""
	case old.Kind == "":
		return PlantedCreated
	case now.Kind == "":
		return PlantedRemoved
	case old.Kind != now.Kind, old.Dev != now.Dev, old.Ino != now.Ino, old.Born != now.Born:
		return PlantedReplaced
	case now.Kind == mounts.NodeFile && old.Changed != now.Changed:
		return PlantedChanged
	}
	return ""
}

// plantedPath is a path as a terminal and JSON can have it.
func plantedPath(rel string) string {
	cut := ""
	if len(rel) > maxPlantedPath {
		rel, cut = rel[:maxPlantedPath], fmt.Sprintf("… (%d bytes)", len(rel))
	}
	return quoteName(rel) + cut
}

// Lines are the report for people, without control characters: empty where there is
// nothing to say, else at most maxPlantedLines paths and a few lines more.
func (r PlantedReport) Lines() []string {
	var out []string
	for _, p := range r.Items[:min(len(r.Items), maxPlantedLines)] {
		out = append(out, fmt.Sprintf("%s (%s) was %s during the run: %s", p.Path, p.Kind, p.What, p.Reason))
	}
	if rest := len(r.Items) - len(out) + r.More; rest > 0 {
		out = append(out, fmt.Sprintf("and %d more paths, in the record", rest))
	}
	switch r.Limit {
	case limitEntries:
		out = append(out, "the workspace is too large to be searched whole: there may be new repositories that are not named here")
	case limitTime:
		out = append(out, "the search took too long and was ended: there may be new repositories that are not named here")
	case limitFinds:
		out = append(out, "there are too many repositories to name: there may be new ones that are not named here")
	}
	if r.Limit == limitNames {
		out = append(out, "not all of the protected folders could be searched for files that have a second name elsewhere: what changed through one may not be named here")
	}
	if r.Limit == limitRoot {
		out = append(out, "the workspace is not the folder it was, or can't be looked into: what appeared in it is not known")
	}
	if r.Unread > 0 {
		out = append(out, fmt.Sprintf("%d folders can't be looked into that could before the run", r.Unread))
	}
	if len(r.Items) > 0 {
		out = append(out, "read them before you open, enter or commit in the workspace")
	}
	return out
}
