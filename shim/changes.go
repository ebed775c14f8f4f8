package shim

import (
	"cmp"
	"path"
	"slices"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

// ChangeKind is what an agent did to a name.
type ChangeKind string

// The kinds of changes. A moved file is one deleted and one added.
const (
	ChangeAdded    ChangeKind = "added"
	ChangeModified ChangeKind = "modified"
	ChangeDeleted  ChangeKind = "deleted"
	ChangeMode     ChangeKind = "mode"
	ChangeType     ChangeKind = "type"
)

// Verdict is what becomes of a change.
type Verdict string

// The verdicts.
const (
	// VerdictApply: the host's file is as it was copied, and can be changed.
	VerdictApply Verdict = "apply"
	// VerdictDone: the host has it already.
	VerdictDone Verdict = "done"
	// VerdictConflict: the host's file changed, too, in another way.
	VerdictConflict Verdict = "conflict"
	// VerdictRefused: it is never applied.
	VerdictRefused Verdict = "refused"
)

// Change is one name that is not in the copy as it was copied.
type Change struct {
	Path    string
	Kind    ChangeKind
	Verdict Verdict
	// Why says it in words for a conflict or a refusal, with nothing from the agent in it.
	Why string
	// From and To are what it was and is; Size is the length of a file in the copy.
	From, To NodeType
	Size     int64
	// Mode are the permission bits that it would have on the host.
	Mode uint32

	base       *BaseEntry
	copy, host treeNode
}

// ChangeRules are what is wanted of changes beside what never can be. The zero
// value protects no path.
type ChangeRules struct {
	// Ignore are paths whose changes are handled elsewhere: left out with all below them.
	Ignore []string
	// ProtectedNames are refused in any folder, with all below them, in every
	// spelling that a file system may take for the same: ".git".
	ProtectedNames []string
	// ProtectedPaths are refused with all below them, and so is what they lead to where a
	// link was copied. Root is the host's folder, for links that are absolute.
	ProtectedPaths []string
	Root           string
	// FileBytes is the length of the largest file, 1 GiB if 0. Limits are the copy's.
	FileBytes int64
	Limits    TreeLimits
	// Umask is taken off the permissions of what is new, 022 if 0.
	Umask uint32
	// AgentUID, where not nil, is whom each added and modified file must belong to.
	AgentUID *uint32

	// repositories are folders, folded, in which what git obeys is refused.
	repositories map[string]bool
}

func (r ChangeRules) withDefaults() ChangeRules {
	r.FileBytes = cmp.Or(r.FileBytes, 1<<30)
	r.Umask = cmp.Or(r.Umask, 0o022) & 0o777
	r.Limits = r.Limits.withDefaults()
	return r
}

// treeNode is what stands under a name in one of the two trees.
type treeNode struct {
	Path  string
	Type  NodeType
	Mode  uint32 // all twelve bits
	Size  int64
	Stamp FileStamp
	UID   uint32
	GID   uint32
	Links uint64
	// Same says that the copy was not touched since it was made.
	Same   bool
	Digest Digest
	Link   string
	// Names are of a host's folder that the copy has no more.
	Names []string
	// Bad says why it could not be looked at.
	Bad string
}

func nodeOf(p string, st *unix.Stat_t) treeNode {
	n := treeNode{Path: p, Type: typeOf(st.Mode), Mode: st.Mode & 0o7777, Stamp: stampOf(st), UID: st.Uid, GID: st.Gid, Links: uint64(st.Nlink)}
	if n.Type == TypeFile {
		n.Size = st.Size
	}
	return n
}

// findDeltas compares a base with its copy as it is now; both are sorted by path. The changes
// have no verdict yet.
func findDeltas(base Base, nodes []treeNode, rules ChangeRules) []Change {
	var out []Change
	blind := map[string]bool{} // folders that could not be read: nothing below one counts as deleted
	add := func(e *BaseEntry, n treeNode) {
		p := n.Path
		if e != nil {
			p = e.Path
		}
		if blind[parentOf(p)] {
			blind[p] = true
			return
		}
		if inAnyPath(p, rules.Ignore) {
			return
		}
		if n.Bad != "" {
			blind[p] = true
		}
		if c, ok := delta(p, e, n); ok {
			out = append(out, c)
		}
	}
	i, j := 0, 0
	for i < len(base.Entries) || j < len(nodes) {
		order := 1
		switch {
		case j == len(nodes):
			order = -1
		case i < len(base.Entries):
			order = strings.Compare(base.Entries[i].Path, nodes[j].Path)
		}
		switch {
		case order < 0:
			add(&base.Entries[i], treeNode{})
			i++
		case order > 0:
			add(nil, nodes[j])
			j++
		default:
			add(&base.Entries[i], nodes[j])
			i, j = i+1, j+1
		}
	}
	return out
}

func delta(p string, e *BaseEntry, n treeNode) (Change, bool) {
	c := Change{Path: p, To: n.Type, Size: n.Size, base: e, copy: n}
	if e != nil {
		c.From = e.Type
	}
	switch {
	case e == nil:
		c.Kind = ChangeAdded
	case n.Type == TypeNone:
		c.Kind = ChangeDeleted
	case n.Type != e.Type:
		c.Kind = ChangeType
	case n.Type == TypeLink && n.Link != e.Link, n.Type == TypeFile && contentChanged(e, n):
		c.Kind = ChangeModified
	case n.Type != TypeLink && n.Mode&^unix.S_ISVTX != e.Mode:
		c.Kind = ChangeMode
	default:
		return c, n.Bad != ""
	}
	return c, true
}

// contentChanged also says so when it can't be known: that a large file was written
// with its own bytes shows when the host's is read.
func contentChanged(e *BaseEntry, n treeNode) bool {
	switch {
	case n.Same:
		return false
	case n.Size != e.Size:
		return true
	case n.Digest == (Digest{}) || e.Digest == (Digest{}):
		return true
	}
	return n.Digest != e.Digest
}

// judge gives each change its verdict by what the host has at its path. Changes are
// sorted by path; a path that is not in host is not there.
func judge(changes []Change, host map[string]treeNode, rules ChangeRules) {
	gone := map[string]bool{} // paths that are, or will be, free
	names := namesOfOne(host)
	// From the end, so that what is in a folder is judged before the folder.
	for i := len(changes) - 1; i >= 0; i-- {
		c := &changes[i]
		c.host = host[c.Path]
		c.Mode = wantMode(c, rules.Umask)
		if why := refusal(c, rules); why != "" {
			c.Verdict, c.Why = VerdictRefused, why
			continue
		}
		if names[c.host.Stamp.Ino] > 1 {
			c.Verdict, c.Why = VerdictConflict, "the host takes two of the changed names for one"
			continue
		}
		c.Verdict, c.Why = compareHost(c, gone)
		if c.Kind == ChangeDeleted && (c.Verdict == VerdictApply || c.Verdict == VerdictDone) {
			gone[c.Path] = true
		}
	}
	blockBelow(changes)
}

// namesOfOne counts by inode how often a file or link of one name was found: more than
// once where the host's file system folds names. To add README and delete Readme would
// lose both.
func namesOfOne(host map[string]treeNode) map[uint64]int {
	found := map[uint64]int{}
	for _, n := range host {
		if n.Links == 1 {
			found[n.Stamp.Ino]++
		}
	}
	return found
}

// blockBelow keeps back what would stand in a folder that is not made.
func blockBelow(changes []Change) {
	blocked := map[string]Verdict{}
	for i := range changes {
		c := &changes[i]
		if v, ok := blocked[parentOf(c.Path)]; ok && c.Kind != ChangeDeleted && c.Verdict != VerdictRefused {
			c.Verdict, c.Why = v, "the folder it is in can't be applied"
		}
		if c.To == TypeFolder && c.Kind != ChangeMode && c.Verdict != VerdictApply && c.Verdict != VerdictDone {
			blocked[c.Path] = c.Verdict
		}
	}
}

// wantMode takes the umask's bits off what the agent gave, as far as the file did
// not have them before; a mode that the agent left alone stays the host's.
func wantMode(c *Change, umask uint32) uint32 {
	mode := c.copy.Mode & 0o777
	switch {
	case c.To == TypeNone || c.To == TypeLink:
		return 0
	case c.base == nil || c.Kind == ChangeType:
		return mode &^ umask
	case mode == c.base.Mode && c.host.Type != TypeNone:
		return c.host.Mode & 0o777
	}
	return mode &^ (umask &^ c.base.Mode)
}

// refusal says why a change is never applied, "" when nothing speaks against it.
func refusal(c *Change, rules ChangeRules) string {
	n := &c.copy
	switch {
	case protected(c.Path, rules):
		return whyProtected
	case obeyed(c.Path, rules.repositories):
		return whyObeyed
	case n.Bad != "":
		return n.Bad
	case c.Kind == ChangeDeleted:
		return ""
	case n.Type == TypeSpecial:
		return "it is a FIFO, a socket or a device"
	case n.Type == TypeFile && n.Size > rules.FileBytes:
		return "it is too large"
	case n.Mode&(unix.S_ISUID|unix.S_ISGID) != 0:
		return "it has a setuid or setgid bit"
	case rules.AgentUID != nil && n.UID != *rules.AgentUID:
		return "it does not belong to the agent"
	case n.Type == TypeLink:
		return linkRefusal(c.Path, n.Link, rules)
	}
	return ""
}

const whyProtected = "its path is protected"

// foldProtected drops what was added below a folder that is refused for its path: a
// repository that the agent made is one line, not thousands.
func foldProtected(changes []Change) []Change {
	folders := map[string]bool{}
	return slices.DeleteFunc(changes, func(c Change) bool {
		if c.Kind != ChangeAdded || c.Why != whyProtected && c.Why != whyObeyed {
			return false
		}
		folders[c.Path] = c.To == TypeFolder
		return folders[parentOf(c.Path)]
	})
}

// linkRefusal judges a link by its text alone. ".." is taken at the start only: behind a name, which may be a
// link itself, it can lead anywhere.
func linkRefusal(p, text string, rules ChangeRules) string {
	if strings.HasPrefix(text, "/") {
		return "it is a link out of the workspace"
	}
	at, down := parentOf(p), false
	for name := range strings.SplitSeq(text, "/") {
		switch {
		case name == "" || name == ".":
		case name != "..":
			down = true
			at = path.Join(at, name)
		case down:
			return "it is a link that leads into a folder and back"
		case at == "":
			return "it is a link out of the workspace"
		default:
			at = parentOf(at)
		}
	}
	switch {
	case at != "" && protected(at, rules):
		return "it is a link to a protected path"
	case aboveProtected(p, rules):
		return "it is a link in the place of a folder with a protected path"
	}
	return ""
}

// aboveProtected says whether a protected path would lie below p, and a link there would
// lead it to another file.
func aboveProtected(p string, rules ChangeRules) bool {
	folded := []string{foldPath(p)}
	return slices.ContainsFunc(rules.ProtectedPaths, func(q string) bool { return inAnyPath(foldPath(path.Clean(q)), folded) })
}

// compareHost judges what is not refused by what the host has there now. gone are
// the deleted paths below c that the host lets go.
func compareHost(c *Change, gone map[string]bool) (Verdict, string) {
	h := &c.host
	switch {
	case h.Bad != "":
		return VerdictConflict, h.Bad
	case h.Type == TypeNone && c.Kind == ChangeDeleted:
		return VerdictDone, ""
	case h.Type == TypeNone && c.Kind == ChangeAdded:
		return VerdictApply, ""
	case h.Type == TypeNone:
		return VerdictConflict, "the host's was removed meanwhile"
	case c.Kind != ChangeDeleted && alreadyThere(c):
		return VerdictDone, ""
	case c.Kind == ChangeAdded:
		return VerdictConflict, "the host has another " + h.Type.String() + " there"
	case h.Type != c.From:
		return VerdictConflict, "the host's is a " + h.Type.String() + " by now"
	case c.Kind == ChangeMode:
		return compareMode(c)
	case h.Type == TypeFolder:
		if !slices.ContainsFunc(h.Names, func(name string) bool { return !gone[path.Join(c.Path, name)] }) {
			return VerdictApply, ""
		}
		return VerdictConflict, "the host has something in this folder that stays"
	case !asCopied(c.base, h):
		return VerdictConflict, "the host's was changed meanwhile"
	case c.Kind == ChangeModified && h.Type == TypeFile:
		return compareMode(c)
	}
	return VerdictApply, ""
}

// compareMode: of two different new modes none wins.
func compareMode(c *Change) (Verdict, string) {
	if mode := c.host.Mode & 0o777; mode != c.base.Mode && mode != c.Mode {
		return VerdictConflict, "the host's permissions were changed meanwhile"
	}
	return VerdictApply, ""
}

// alreadyThere says whether the host has what applying c would give.
func alreadyThere(c *Change) bool {
	h, n := &c.host, &c.copy
	switch {
	case h.Type != n.Type:
		return false
	case n.Type == TypeLink:
		return h.Link == n.Link
	case n.Type == TypeFolder:
		return c.Kind != ChangeMode || h.Mode&0o777 == c.Mode
	case c.Kind == ChangeMode:
		return h.Mode&0o777 == c.Mode
	}
	return h.Size == n.Size && h.Digest != (Digest{}) && h.Digest == n.Digest && h.Mode&0o777 == c.Mode
}

// asCopied says whether the host's file or link holds what was copied.
func asCopied(e *BaseEntry, h *treeNode) bool {
	switch {
	case h.Type == TypeLink:
		return h.Link == e.Link
	case h.Size != e.Size:
		return false
	case h.Stamp == e.Host:
		return true
	}
	return e.Digest != (Digest{}) && h.Digest == e.Digest
}

// inAnyPath says whether p is one of paths or below one.
func inAnyPath(p string, paths []string) bool {
	return slices.ContainsFunc(paths, func(dir string) bool {
		rest, ok := strings.CutPrefix(p, path.Clean(dir))
		return ok && (rest == "" || rest[0] == '/')
	})
}

// maxFollowed bounds the links on the way to a protected path, as the kernel's 40 does.
const maxFollowed = 40

// followProtected gives the protected paths and, where a link among what was copied stands
// at or above one, each path by which that goes on. root is the host's folder, into which
// an absolute link may lead.
func followProtected(b Base, root string, paths []string) []string {
	links := map[string]string{}
	for i := range b.Entries {
		if e := &b.Entries[i]; e.Type == TypeLink {
			links[e.Path] = e.Link
		}
	}
	out := slices.Clone(paths)
	if len(links) == 0 {
		return out
	}
	for _, p := range paths {
		out = append(out, followLinks(path.Clean(p), root, links)...)
	}
	return out
}

// followLinks walks p as the kernel does, and gives what is left to walk at each link and
// at the end; it ends where p leads out of the tree.
func followLinks(p, root string, links map[string]string) []string {
	var out []string
	at, rest := "", strings.Split(p, "/")
	for followed := 0; len(rest) > 0 && followed <= maxFollowed; {
		name := rest[0]
		rest = rest[1:]
		switch {
		case name == "" || name == ".":
			continue
		case name == ".." && at == "":
			return out
		case name == "..":
			at = parentOf(at)
			continue
		}
		text, ok := links[path.Join(at, name)]
		if !ok {
			at = path.Join(at, name)
			continue
		}
		out = append(out, path.Join(at, name, path.Join(rest...)))
		followed++
		if path.IsAbs(text) {
			if text, ok = strings.CutPrefix(path.Clean(text)+"/", root+"/"); !ok {
				return out
			}
			at = ""
		}
		rest = append(strings.Split(text, "/"), rest...)
	}
	if at != "" && at != p {
		out = append(out, at)
	}
	return out
}

func protected(p string, rules ChangeRules) bool {
	folded := foldPath(p)
	for _, dir := range rules.ProtectedPaths {
		if inAnyPath(folded, []string{foldPath(path.Clean(dir))}) {
			return true
		}
	}
	for name := range strings.SplitSeq(folded, "/") {
		for _, bad := range rules.ProtectedNames {
			if name == foldName(bad) || shortName(name, bad) {
				return true
			}
		}
	}
	return false
}

func foldPath(p string) string {
	names := strings.Split(p, "/")
	for i := range names {
		names[i] = foldName(names[i])
	}
	return strings.Join(names, "/")
}

// foldName gives one form to names that a case-folding ext4 or f2fs (which also
// skips runes that are ignored by default), vfat or ntfs (which drop dots and
// blanks at the end) may take for one.
func foldName(name string) string {
	name = strings.Map(func(r rune) rune {
		if unicode.In(r, unicode.Cf, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector) {
			return -1
		}
		// The smallest rune of those that differ in case only.
		low := r
		for f := unicode.SimpleFold(r); f != r; f = unicode.SimpleFold(f) {
			low = min(low, f)
		}
		return low
	}, name)
	if trimmed := strings.TrimRight(name, ". "); trimmed != "" {
		name = trimmed
	}
	name, _, _ = strings.Cut(name, "::$") // ntfs: the file's own stream
	return name
}

// shortName says whether name, folded, may be the 8.3 name of bad: GIT~1.
func shortName(name, bad string) bool {
	stem, number, ok := strings.Cut(name, "~")
	bad = strings.ReplaceAll(foldName(strings.TrimLeft(bad, ".")), ".", "")
	return ok && number != "" && strings.Trim(number, "0123456789") == "" && stem != "" && stem == bad[:min(len(bad), 6)]
}
