package mounts

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/agentshim/agentshim/harness"
)

// Values of Mount.Why for what Guards makes.
const (
	// WhyProtect is a path bound read-only onto itself.
	WhyProtect = "protect"
	// WhyGuard is a folder above a protected or hidden path, bound onto itself so that
	// it can't be renamed, removed or exchanged.
	WhyGuard = "guard"
	// WhyHide is an empty read-only file or folder over a path.
	WhyHide = "hide"
)

// Bounds of the guards.
const (
	maxGuardDepth = 32
	maxGuardPaths = 256
	// maxGuardMounts and maxGuardBytes keep the engine's argument list and its launch
	// short: execve(2) takes a quarter of the stack limit, 2 MiB as a rule.
	maxGuardMounts = 200
	maxGuardBytes  = 256 << 10
	maxNameBytes   = 255
)

// GuardDefault is one path that is protected in every writable workspace.
type GuardDefault struct{ Path, Reason string }

// guardDefaults are what a host's program runs by itself, or by the habit of a tool
// that nobody thinks of as running the project's code: opening the folder, entering
// it, committing. Left out is what the user runs knowingly and the agent is there to
// change (Makefile, package.json, build scripts, tests), what runs on another machine
// after review (.github/workflows), and what only names values (.env, .npmrc).
var guardDefaults = []GuardDefault{
	{".aider.conf.yml", "Aider runs its lint and test commands"},
	{".claude/agents", "Claude Code loads its agents with their tools and permissions"},
	{".claude/commands", "Claude Code runs the shell lines in its commands"},
	{".claude/hooks", "Claude Code's settings name these programs as hooks"},
	{".claude/settings.json", "Claude Code runs its hooks and grants its permissions"},
	{".claude/settings.local.json", "Claude Code runs its hooks and grants its permissions"},
	{".claude/skills", "Claude Code runs the shell lines in its skills"},
	{".codex", "Codex starts its servers and runs its notifier"},
	{".cursor/hooks.json", "Cursor runs its hooks"},
	{".cursor/mcp.json", "Cursor starts its servers"},
	{".devcontainer", "editors run initializeCommand on the host, and mount what it names"},
	{".devcontainer.json", "editors run initializeCommand on the host, and mount what it names"},
	{".envrc", "direnv runs it when a shell enters the folder"},
	{".exrc", "vi runs it when started in the folder"},
	{".gemini/settings.json", "Gemini CLI starts its servers and runs its hooks"},
	{".githooks", "git runs it where core.hooksPath names it"},
	{".hg/hgrc", "Mercurial runs its hooks and aliases"},
	{".husky", "git runs it where core.hooksPath names it"},
	{".idea", "JetBrains editors run its start-up tasks, watchers and interpreters"},
	{".jj/repo/config.toml", "Jujutsu runs the programs it names"},
	{".lefthook.yml", "Lefthook runs it at every commit"},
	{".mcp.json", "agents start its servers"},
	{".mise.local.toml", "mise runs its hooks when a shell enters the folder"},
	{".mise.toml", "mise runs its hooks when a shell enters the folder"},
	{".nvim.lua", "Neovim runs it when started in the folder"},
	{".opencode", "OpenCode runs its plugins"},
	{".pre-commit-config.yaml", "pre-commit runs it at every commit"},
	{".roo/mcp.json", "Roo Code starts its servers"},
	{".run", "JetBrains editors offer it as run configurations"},
	{".vscode/launch.json", "VS Code runs it, and its tasks, at the press of a key"},
	{".vscode/mcp.json", "VS Code starts its servers"},
	{".vscode/settings.json", "VS Code's extensions run the programs it names"},
	{".vscode/tasks.json", "VS Code runs tasks when the folder is opened"},
	{".zed", "Zed runs the language servers, tasks and debuggers it names"},
	{"lefthook.yml", "Lefthook runs it at every commit"},
	{"mise.local.toml", "mise runs its hooks when a shell enters the folder"},
	{"mise.toml", "mise runs its hooks when a shell enters the folder"},
	{"opencode.json", "OpenCode starts its servers and plugins"},
	{"opencode.jsonc", "OpenCode starts its servers and plugins"},
}

// DefaultGuards are the paths that are protected without being named, sorted.
func DefaultGuards() []GuardDefault { return slices.Clone(guardDefaults) }

// OwnFile is a host file that steers agentshim: the harness file, or one it names.
type OwnFile struct {
	// Path is its real path on the host, JSON where the harness file names it ("$"
	// for itself), Reason why the agent may not change it.
	Path, JSON, Reason string
}

// GuardPath is one path below the workspace that is protected or hidden.
type GuardPath struct {
	// Rel is clean and relative to the workspace.
	Rel  string `json:"path"`
	Hide bool   `json:"hide,omitempty"`
	// JSON is where the harness file names it, empty for a default.
	JSON string `json:"-"`
	// Reason says why.
	Reason string `json:"reason"`
}

// named says that the file lists the path, other than agentshim's own files.
func (g GuardPath) named() bool { return strings.HasPrefix(g.JSON, "$.workspace.") }

// GuardPaths lists what w protects and hides, defaults and own files with it, sorted,
// each path once: hidden goes before protected, named before default. root is the
// workspace's real path. Every refusal is reported at once, each a *Problem that is
// ErrRefused. It reads nothing: whether a path exists is for ProbeGuards.
func GuardPaths(w harness.Workspace, root string, own []OwnFile) ([]GuardPath, error) {
	var ps problems
	byRel := map[string]GuardPath{}
	named := func(at string, list []string, hide bool, reason string) {
		for i, raw := range list {
			g := GuardPath{Rel: path.Clean(raw), Hide: hide, JSON: fmt.Sprintf("%s[%d]", at, i), Reason: reason}
			if p := relProblem(g.JSON, raw); p != nil {
				ps.add(p)
			} else if _, twice := byRel[g.Rel]; !twice {
				byRel[g.Rel] = g
			}
		}
	}
	named("$.workspace.hide", w.Hide, true, "the harness file hides it")
	named("$.workspace.protect", w.Protect, false, "the harness file protects it")
	for _, o := range own {
		if !below(o.Path, root) {
			continue
		}
		g := GuardPath{Rel: strings.TrimPrefix(o.Path[len(root):], "/"), JSON: o.JSON, Reason: o.Reason}
		reason := unportable(g.Rel)
		if reason == "" && hasControl(g.Rel) {
			reason = "it holds a control character"
		}
		if reason != "" {
			ps.add(refuse(g.JSON, g.Rel, "the engines can't take this path, so it can't be protected: "+reason, "rename it, or keep it outside the workspace"))
			continue
		}
		if _, twice := byRel[g.Rel]; !twice {
			byRel[g.Rel] = g
		}
	}
	for _, d := range guardDefaults {
		if _, twice := byRel[d.Path]; !twice {
			byRel[d.Path] = GuardPath{Rel: d.Path, Reason: d.Reason}
		}
	}
	if len(byRel) > maxGuardPaths {
		ps.add(refuse("$.workspace", fmt.Sprint(len(byRel)), fmt.Sprintf("at most %d paths may be protected or hidden", maxGuardPaths), "name folders instead of files"))
	}
	if err := ps.join(); err != nil {
		return nil, err
	}
	out := make([]GuardPath, 0, len(byRel))
	for _, g := range byRel {
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b GuardPath) int { return strings.Compare(a.Rel, b.Rel) })
	return out, nil
}

// relProblem says why raw can't be protected or hidden. ".." is refused even where it
// stays inside: what it leads to depends on links.
func relProblem(at, raw string) *Problem {
	const name = "name a file or folder below the workspace"
	parts := strings.Split(raw, "/")
	switch {
	case raw == "":
		return refuse(at, raw, "it is empty", name)
	case strings.HasPrefix(raw, "/"):
		return refuse(at, raw, "it is absolute", name+", relative to it")
	case raw == "~", strings.HasPrefix(raw, "~/"):
		return refuse(at, raw, "it lies outside the workspace", name+", relative to it")
	case slices.Contains(parts, ".."):
		return refuse(at, raw, `".." may lead out of the workspace`, name+` without ".."`)
	case path.Clean(raw) == ".":
		return refuse(at, raw, "it is the workspace itself", `use workspace.mode, "read-only" or "none"`)
	case slices.ContainsFunc(parts, func(p string) bool { return strings.EqualFold(p, ".git") }):
		return refuse(at, raw, "what becomes of .git is said by workspace.git", `use workspace.git, "private" or "none"`)
	case strings.ContainsAny(raw, "*?"):
		return refuse(at, raw, "patterns are not expanded, and this would match nothing", "name each path, or the folder they lie in")
	case unportable(raw) != "":
		return refuse(at, raw, "the engines can't take this path: "+unportable(raw), "rename it")
	case hasControl(raw):
		return refuse(at, raw, "it holds a control character", "rename it")
	case len(parts) > maxGuardDepth:
		return refuse(at, raw, fmt.Sprintf("it is more than %d folders deep", maxGuardDepth), "name a folder above it")
	case slices.ContainsFunc(parts, func(p string) bool { return len(p) > maxNameBytes }):
		return refuse(at, raw[:maxNameBytes], fmt.Sprintf("no name has more than %d bytes", maxNameBytes), name)
	}
	return nil
}

// Further values of GuardNode.Kind.
const (
	NodeLink = "link"
	// NodeUnknown stands where the caller was not allowed to look.
	NodeUnknown = "unknown"
)

// GuardNode is what stands at one path below the workspace.
type GuardNode struct {
	// Kind is NodeDir, NodeFile, NodeLink, NodeOther, NodeUnknown, or empty where
	// nothing stands.
	Kind     string
	Dev, Ino uint64
	// Links counts a file's names.
	Links uint64
	// Born and Changed are nanoseconds since 1970: statx(2)'s btime, 0 where the file
	// system has none, and ctime, which nobody can set.
	Born, Changed int64
}

// GuardFacts is what ProbeGuards saw: a node for each guarded path and each folder
// above it, as far as they exist, by their path relative to the workspace.
type GuardFacts map[string]GuardNode

// At says what stands at rel, and the path that decides it: rel itself, or the link or
// unreadable folder above it. A file or special file above it means that nothing is there.
func (f GuardFacts) At(rel string) (GuardNode, string) {
	for i := 0; i < len(rel); i++ {
		if rel[i] != '/' {
			continue
		}
		switch n := f[rel[:i]]; n.Kind {
		case NodeDir:
		case NodeLink, NodeUnknown:
			return n, rel[:i]
		default:
			return GuardNode{}, rel
		}
	}
	return f[rel], rel
}

// What covers hidden paths, in the run's own folder: an empty file and an empty
// folder, readable by everyone.
const (
	EmptyFile = "empty/file"
	EmptyDir  = "empty/folder"
)

// GuardSet is what Guards decided.
type GuardSet struct {
	// Mounts are in mount order, parents before children.
	Mounts []Mount
	// Warnings are shown to the user; nothing is refused by them.
	Warnings []string
}

// Guards decides the mounts that keep the paths from being changed or seen through
// ws, the workspace's bind. root is the host's folder, of which ws may be a copy, which
// has nothing of what is hidden; facts come from ProbeGuards, others are the container's
// other mounts. It is pure and equal arguments give an equal GuardSet. Every refusal
// is reported at once, each a *Problem that is ErrRefused.
//
// It guarantees, against a process without capabilities in the container, that what
// exists can't be written, renamed, removed, replaced or linked over, neither itself
// nor by way of a folder above it. Where ws is read-only nothing needs protection. It
// does not keep the agent from creating what is absent, says nothing about files that
// a protected one refers to, and ends for a path that the host removes or replaces
// during the run: the kernel then takes the mount away (mount_namespaces(7), Linux 3.18).
func Guards(ws Mount, root string, paths []GuardPath, facts GuardFacts, others []Mount) (GuardSet, error) {
	c := guarding{ws: ws, root: root, facts: facts, others: others, roles: map[string]string{}}
	for _, g := range paths {
		c.path(g)
	}
	c.prune()
	set := GuardSet{Warnings: c.warnings}
	size := 0
	for rel, why := range c.roles {
		m := c.mount(rel, why)
		size += len(m.Source) + len(m.Own) + len(m.Target)
		set.Mounts = append(set.Mounts, m)
	}
	if len(set.Mounts) > maxGuardMounts || size > maxGuardBytes {
		c.ps.add(refuse("$.workspace", fmt.Sprint(len(set.Mounts)),
			fmt.Sprintf("the guards would be more than %d mounts, or have more than %d KiB of paths", maxGuardMounts, maxGuardBytes>>10), "name folders instead of files"))
	}
	if err := c.ps.join(); err != nil {
		return GuardSet{}, err
	}
	slices.SortFunc(set.Mounts, func(a, b Mount) int { return strings.Compare(a.Target, b.Target) })
	return set, nil
}

type guarding struct {
	ws       Mount
	root     string
	facts    GuardFacts
	others   []Mount
	roles    map[string]string
	ps       problems
	warnings []string
}

// at is a problem's JSON path: defaults are the workspace's.
func (g GuardPath) at() string {
	if g.JSON == "" {
		return "$.workspace"
	}
	return g.JSON
}

func (c *guarding) path(g GuardPath) {
	node, at := c.facts.At(g.Rel)
	if !g.Hide && !c.ws.Writable {
		if node.Kind != "" {
			c.exposed(g)
		}
		return
	}
	if node.Kind == "" {
		c.absent(g)
		return
	}
	if p := nodeProblem(g, node, at); p != nil {
		c.ps.add(p)
		return
	}
	c.exposed(g)
	switch {
	case !g.Hide:
		c.role(g.Rel, WhyProtect)
	case c.ws.Own != "":
		c.nestedInHidden(g)
		return // it is not in the copy
	default:
		c.role(g.Rel, WhyHide)
		c.nestedInHidden(g)
	}
	if !c.ws.Writable {
		return
	}
	for dir := path.Dir(g.Rel); dir != "."; dir = path.Dir(dir) {
		c.role(dir, WhyGuard)
	}
}

func (c *guarding) absent(g GuardPath) {
	switch {
	case g.Hide:
		c.warnings = append(c.warnings, fmt.Sprintf("%s: %q does not exist: nothing is hidden", g.JSON, g.Rel))
	case g.JSON != "" && c.ws.Own != "":
		c.warnings = append(c.warnings, fmt.Sprintf("%s: %q does not exist: the agent can create it in its copy, and agentshim apply leaves it there", g.JSON, g.Rel))
	case g.JSON != "":
		c.warnings = append(c.warnings, fmt.Sprintf("%s: %q does not exist: the agent can create it, which is said at the end", g.JSON, g.Rel))
	}
}

// nodeProblem refuses what a bind mount can't hold fast: mount(2) follows links, and a
// second name of a file leads past the mount on the first.
func nodeProblem(g GuardPath, n GuardNode, at string) *Problem {
	verb := "protected"
	if g.Hide {
		verb = "hidden"
	}
	where := func(what string) string {
		if at == g.Rel {
			return "it is " + what
		}
		return fmt.Sprintf("%q is %s", at, what)
	}
	why := ""
	if g.JSON == "" {
		why = " (" + g.Reason + ")"
	}
	otherwise := `, or use workspace.mode "read-only"`
	if g.Hide {
		otherwise = ", or hide the folder it lies in"
	}
	switch {
	case n.Kind == NodeLink:
		return refuse(g.at(), g.Rel, where("a link, which can't be "+verb)+why, "put a real file or folder in its place"+otherwise)
	case n.Kind == NodeUnknown:
		return refuse(g.at(), g.Rel, where("out of your reach, so it can't be "+verb)+why, "give yourself search permission"+otherwise)
	case n.Kind == NodeOther:
		return refuse(g.at(), g.Rel, where("neither a file nor a folder, so it can't be "+verb)+why, "remove it"+otherwise)
	case n.Kind == NodeFile && n.Links > 1:
		return refuse(g.at(), g.Rel, fmt.Sprintf("it has %d names, and through another it would not be %s%s", n.Links, verb, why),
			"replace it by a copy of itself (cp -p, then mv)"+otherwise)
	}
	return nil
}

// shows says that m has the path, or something below it. By another name of the host's,
// a bind mount of the same folder, it is known where it is the workspace, the path or a
// folder between.
func (c *guarding) shows(m Mount, rel string) bool {
	source := path.Join(c.root, rel)
	if atOrBelow(source, m.Source) || below(m.Source, source) {
		return true
	}
	same := func(dev, ino uint64) bool { return ino != 0 && m.Dev == dev && m.Ino == ino }
	for ; rel != "."; rel = path.Dir(rel) {
		if n := c.facts[rel]; same(n.Dev, n.Ino) {
			return true
		}
	}
	return same(c.ws.Dev, c.ws.Ino)
}

// exposed: what another bind shows of the workspace is not guarded there.
func (c *guarding) exposed(g GuardPath) {
	for _, m := range c.others {
		if m.Type != TypeBind || !m.Writable && !g.Hide || !c.shows(m, g.Rel) {
			continue
		}
		switch {
		case g.Hide:
			c.ps.add(refuse(g.JSON, g.Rel, fmt.Sprintf("the mount on %q shows it", m.Target), "mount a narrower folder, or don't hide it"))
		case g.JSON != "":
			c.ps.add(refuse(g.JSON, g.Rel, fmt.Sprintf("the writable mount on %q lets the agent change it", m.Target), "make that mount read-only, or don't protect it"))
		default:
			c.warnings = append(c.warnings, fmt.Sprintf("%q can be changed through the writable mount on %q: %s", g.Rel, m.Target, g.Reason))
		}
	}
}

// nestedInHidden: the engine could not make a mount point in an empty read-only folder.
func (c *guarding) nestedInHidden(g GuardPath) {
	for _, m := range c.others {
		if below(m.Target, path.Join(c.ws.Target, g.Rel)) {
			c.ps.add(refuse(g.JSON, g.Rel, fmt.Sprintf("the mount on %q lies in it", m.Target), "choose another target, or don't hide it"))
		}
	}
}

// OwnWarnings names the own files that the agent can change through a writable bind
// that is not the workspace's, where nothing guards them.
func OwnWarnings(own []OwnFile, all []Mount) []string {
	var out []string
	for _, o := range own {
		for _, m := range all {
			if m.Type == TypeBind && m.Writable && m.Why == WhyMount && atOrBelow(o.Path, m.Source) {
				out = append(out, fmt.Sprintf("%s: the agent can change %q through the writable mount on %q: %s", o.JSON, o.Path, m.Target, o.Reason))
			}
		}
	}
	return out
}

var roleRank = map[string]int{WhyGuard: 1, WhyProtect: 2, WhyHide: 3}

func (c *guarding) role(rel, why string) {
	if roleRank[why] > roleRank[c.roles[rel]] {
		c.roles[rel] = why
	}
}

// prune drops what needs no mount of its own: what lies below a hidden folder, what is
// not hidden below a protected one, and what another mount covers. A mount point can't
// be renamed or removed itself, but the folders above it can: those stay.
func (c *guarding) prune() {
	var drop []string
	for rel, why := range c.roles {
		if c.covered(rel) || c.within(rel, why) {
			drop = append(drop, rel)
		}
	}
	for _, rel := range drop {
		delete(c.roles, rel)
	}
}

func (c *guarding) covered(rel string) bool {
	target := path.Join(c.ws.Target, rel)
	return slices.ContainsFunc(c.others, func(m Mount) bool {
		return below(m.Target, c.ws.Target) && atOrBelow(target, m.Target)
	})
}

func (c *guarding) within(rel, why string) bool {
	for dir := path.Dir(rel); dir != "."; dir = path.Dir(dir) {
		switch c.roles[dir] {
		case WhyHide:
			return true
		case WhyProtect:
			if why != WhyHide {
				return true
			}
		}
	}
	return false
}

// mount: where the workspace's source is the run's own, so are its guards', and they
// are as little known before.
func (c *guarding) mount(rel, why string) Mount {
	m, n := c.ws, c.facts[rel]
	m.Target, m.Why, m.Writable = path.Join(c.ws.Target, rel), why, why == WhyGuard
	switch {
	case why == WhyHide:
		m.Source, m.Own, m.Kept, m.Dev, m.Ino, m.Label = "", EmptyFile, false, 0, 0, ""
		if n.Kind == NodeDir {
			m.Own = EmptyDir
		}
	case c.ws.Own != "":
		m.Own = path.Join(c.ws.Own, rel)
	default:
		m.Source, m.Dev, m.Ino = path.Join(c.ws.Source, rel), n.Dev, n.Ino
	}
	return m
}
