package mounts

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

func TestDefaultGuards(t *testing.T) {
	list := DefaultGuards()
	if !slices.IsSortedFunc(list, func(a, b GuardDefault) int { return strings.Compare(a.Path, b.Path) }) {
		t.Error("not sorted")
	}
	seen := map[string]bool{}
	for _, d := range list {
		if p := relProblem("$", d.Path); p != nil || path.Clean(d.Path) != d.Path || d.Reason == "" || seen[d.Path] {
			t.Errorf("%q: %v, reason %q, twice %v", d.Path, p, d.Reason, seen[d.Path])
		}
		seen[d.Path] = true
	}
	for _, p := range []string{
		".vscode/tasks.json", ".vscode/settings.json", ".vscode/launch.json", ".idea", ".envrc", ".claude/settings.json",
		".claude/settings.local.json", ".mcp.json", ".cursor/mcp.json", ".devcontainer",
	} {
		if !seen[p] {
			t.Errorf("%s is not protected", p)
		}
	}
	// What the user runs knowingly, or another machine runs after review.
	for _, p := range []string{"Makefile", "package.json", ".github/workflows", ".git"} {
		if seen[p] {
			t.Errorf("%s is protected", p)
		}
	}
	list[0].Path = "changed"
	if DefaultGuards()[0].Path == "changed" {
		t.Error("the list is shared")
	}
}

// TestGuardPathsRefuses: M13, A57, A59, A61.
func TestGuardPathsRefuses(t *testing.T) {
	for name, raw := range map[string]string{
		"empty": "", "dot": ".", "dot slash": "./", "dots": "a/./..", "up": "..", "up inside": "a/../b", "up out": "../x",
		"absolute": "/etc/passwd", "root": "/", "home": "~/x", "tilde": "~", "git": ".git", "in git": ".git/config", "nested git": "sub/.git/hooks",
		"git in capitals": ".GIT/config", "star": ".env*", "question": "a?b", "not UTF-8": "a\xff", "NUL": "a\x00b",
		"line": "a\nb", "CR LF": "a\r\nb", "deep": strings.Repeat("a/", 40) + "b", "long name": strings.Repeat("n", 256), "4 KiB": strings.Repeat("n", 4096),
	} {
		t.Run(name, func(t *testing.T) {
			for _, w := range []harness.Workspace{{Protect: []string{"ok", raw}}, {Hide: []string{"ok", raw}}} {
				_, err := GuardPaths(w, "/ws", nil)
				var p *Problem
				if !errors.Is(err, ErrRefused) || !errors.As(err, &p) || !strings.HasSuffix(p.Path, "[1]") || p.Remedy == "" {
					t.Errorf("%q: %v", raw, err)
				}
			}
		})
	}
	_, err := GuardPaths(harness.Workspace{Protect: []string{"/a"}, Hide: []string{"..", "*"}}, "/ws", nil)
	for _, at := range []string{"$.workspace.protect[0]", "$.workspace.hide[0]", "$.workspace.hide[1]"} {
		if err == nil || !strings.Contains(err.Error(), at) {
			t.Errorf("%s is not in %v", at, err)
		}
	}
	many := harness.Workspace{}
	for i := range maxGuardPaths {
		many.Protect = append(many.Protect, fmt.Sprint("f", i))
	}
	if _, err := GuardPaths(many, "/ws", nil); !errors.Is(err, ErrRefused) {
		t.Errorf("%d paths: %v", len(many.Protect), err)
	}
	if _, err := GuardPaths(harness.Workspace{}, "/ws", []OwnFile{{Path: "/ws/a\xff.json", JSON: "$"}}); !errors.Is(err, ErrRefused) {
		t.Errorf("own file that no engine can take: %v", err)
	}
}

func TestGuardPaths(t *testing.T) {
	w := harness.Workspace{Protect: []string{"./b//c/", ".envrc", "both", "[slug]/p,q:r", "b/c"}, Hide: []string{"both", ".mcp.json"}}
	own := []OwnFile{{"/ws/agent/h.json", "$", "steers"}, {"/wsother/x", "$.promptFile", "outside"}, {"/ws", "$", "not a file"}}
	got, err := GuardPaths(w, "/ws", own)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]GuardPath{
		"b/c": {JSON: "$.workspace.protect[0]"}, ".envrc": {JSON: "$.workspace.protect[1]"}, "[slug]/p,q:r": {JSON: "$.workspace.protect[3]"},
		"both": {JSON: "$.workspace.hide[0]", Hide: true}, ".mcp.json": {JSON: "$.workspace.hide[1]", Hide: true}, "agent/h.json": {JSON: "$"}, ".idea": {},
	}
	seen := map[string]GuardPath{}
	for _, g := range got {
		if _, twice := seen[g.Rel]; twice || g.Reason == "" {
			t.Errorf("twice or without a reason: %+v", g)
		}
		seen[g.Rel] = g
	}
	for rel, g := range want {
		if s, ok := seen[rel]; !ok || s.JSON != g.JSON || s.Hide != g.Hide {
			t.Errorf("%s: got %+v, want %+v", rel, s, g)
		}
	}
	if n := len(guardDefaults) + 4; len(got) != n {
		t.Errorf("%d paths, want %d", len(got), n)
	}
}

// guardFacts makes facts out of "path" lines: "a/" a folder, "a" a file, "a@" a link,
// "a|" a FIFO, "a!" unknown, "a+" a file with two names. Folders above come by themselves.
func guardFacts(lines ...string) GuardFacts {
	f := GuardFacts{}
	ino := uint64(100)
	put := func(rel string, n GuardNode) {
		if _, ok := f[rel]; !ok {
			ino++
			n.Dev, n.Ino = 7, ino
			f[rel] = n
		}
	}
	for _, l := range lines {
		n := GuardNode{Kind: NodeFile, Links: 1}
		rel := strings.TrimRight(l, "/@|!+")
		switch l[len(rel):] {
		case "/":
			n = GuardNode{Kind: NodeDir}
		case "@":
			n.Kind = NodeLink
		case "|":
			n.Kind = NodeOther
		case "!":
			n = GuardNode{Kind: NodeUnknown}
		case "+":
			n.Links = 2
		}
		for i := range rel {
			if rel[i] == '/' {
				put(rel[:i], GuardNode{Kind: NodeDir})
			}
		}
		put(rel, n)
	}
	return f
}

const guardRoot = "/home/me/ws"

var guardWorkspace = Mount{
	Target: "/workspace", Type: TypeBind, Source: guardRoot, Writable: true, NoSUIDBy: ByFlag, NoDevBy: ByFlag,
	Dev: 7, Ino: 1, Why: WhyWorkspace,
}

func protect(rels ...string) (out []GuardPath) {
	for i, r := range rels {
		out = append(out, GuardPath{Rel: r, JSON: fmt.Sprintf("$.workspace.protect[%d]", i), Reason: "r"})
	}
	return out
}

func hide(rels ...string) (out []GuardPath) {
	for i, r := range rels {
		out = append(out, GuardPath{Rel: r, Hide: true, JSON: fmt.Sprintf("$.workspace.hide[%d]", i), Reason: "r"})
	}
	return out
}

func byDefault(rels ...string) (out []GuardPath) {
	for _, r := range rels {
		out = append(out, GuardPath{Rel: r, Reason: "runs"})
	}
	return out
}

func shown(set GuardSet) (out []string) {
	for _, m := range set.Mounts {
		mode := "ro"
		if m.Writable {
			mode = "rw"
		}
		out = append(out, fmt.Sprintf("%s %s %s", m.Why, mode, strings.TrimPrefix(m.Target, "/workspace/")))
	}
	return out
}

// TestGuards: M15, T10, A62, A63, A65.
func TestGuards(t *testing.T) {
	readOnly := guardWorkspace
	readOnly.Writable = false
	bind := func(source, target string, writable bool) []Mount {
		return []Mount{{Type: TypeBind, Source: source, Target: target, Writable: writable, Why: WhyMount}}
	}
	for name, c := range map[string]struct {
		ws     Mount
		paths  []GuardPath
		facts  GuardFacts
		others []Mount
		want   []string
		warns  int
	}{
		"file at the root":    {paths: protect(".envrc"), facts: guardFacts(".envrc"), want: []string{"protect ro .envrc"}},
		"absent":              {paths: byDefault(".envrc", ".vscode/tasks.json"), facts: guardFacts(".vscode/")},
		"named and absent":    {paths: append(protect(".envrc"), hide("x")...), warns: 2},
		"file above":          {paths: byDefault(".vscode/tasks.json"), facts: guardFacts(".vscode")},
		"FIFO above":          {paths: byDefault(".vscode/tasks.json"), facts: guardFacts(".vscode|")},
		"shared ancestors":    {paths: protect("a/b/x", "a/b/y", "a/z"), facts: guardFacts("a/b/x", "a/b/y", "a/z"), want: []string{"guard rw a", "guard rw a/b", "protect ro a/b/x", "protect ro a/b/y", "protect ro a/z"}},
		"parents first":       {paths: protect("a/b/c/d", "a-b/x"), facts: guardFacts("a/b/c/d", "a-b/x"), want: []string{"guard rw a", "guard rw a-b", "protect ro a-b/x", "guard rw a/b", "guard rw a/b/c", "protect ro a/b/c/d"}},
		"folder":              {paths: protect(".idea"), facts: guardFacts(".idea/"), want: []string{"protect ro .idea"}},
		"below a folder":      {paths: protect("a", "a/b/c"), facts: guardFacts("a/b/c"), want: []string{"protect ro a"}},
		"hidden":              {paths: hide(".env", "s/keys"), facts: guardFacts(".env", "s/keys/"), want: []string{"hide ro .env", "guard rw s", "hide ro s/keys"}},
		"hide over protect":   {paths: append(protect("a/x"), hide("a")...), facts: guardFacts("a/x"), want: []string{"hide ro a"}},
		"hide in protect":     {paths: append(protect("a"), hide("a/b/x")...), facts: guardFacts("a/b/x"), want: []string{"protect ro a", "hide ro a/b/x"}},
		"hide in hide":        {paths: hide("a", "a/b/x"), facts: guardFacts("a/b/x"), want: []string{"hide ro a"}},
		"read-only workspace": {ws: readOnly, paths: append(protect("a/x", "l", "n+"), hide("s/.env")...), facts: guardFacts("a/x", "s/.env", "l@"), want: []string{"hide ro s/.env"}},
		"covered":             {paths: byDefault("a/b/c/x", "a/y"), facts: guardFacts("a/b/c/x", "a/y"), others: bind("/data", "/workspace/a/b", true), want: []string{"guard rw a", "protect ro a/y"}},
		"covered, with what is above it": {
			paths: byDefault("a/b/c/x"), facts: guardFacts("a/b/c/x"), others: bind("/data", "/workspace/a/b", true),
			want: []string{"guard rw a"},
		},
		"covered itself":                         {paths: hide("a/.env"), facts: guardFacts("a/.env"), others: bind("/data/env", "/workspace/a/.env", false), want: []string{"guard rw a"}},
		"mount in protected":                     {paths: protect(".idea"), facts: guardFacts(".idea/"), others: bind("/data", "/workspace/.idea/x", true), want: []string{"protect ro .idea"}},
		"default shown elsewhere":                {paths: byDefault(".envrc"), facts: guardFacts(".envrc"), others: bind("/home/me/ws", "/other", true), want: []string{"protect ro .envrc"}, warns: 1},
		"default opened by a bind":               {paths: byDefault(".idea"), facts: guardFacts(".idea/"), others: bind("/home/me/ws/.idea", "/workspace/.idea", true), warns: 1},
		"part shown elsewhere":                   {paths: byDefault(".idea"), facts: guardFacts(".idea/"), others: bind("/home/me/ws/.idea/x", "/x", true), want: []string{"protect ro .idea"}, warns: 1},
		"writable bind in a read-only workspace": {ws: readOnly, paths: byDefault(".idea", ".run"), facts: guardFacts(".idea/x", ".run/"), others: bind("/home/me/ws/.idea", "/workspace/.idea", true), warns: 1},
		"another folder elsewhere":               {paths: protect(".envrc"), facts: guardFacts(".envrc"), others: []Mount{{Type: TypeBind, Source: "/mnt/x", Target: "/other", Writable: true, Dev: 7, Ino: 99999}}, want: []string{"protect ro .envrc"}},
		"read-only elsewhere":                    {paths: protect(".envrc"), facts: guardFacts(".envrc"), others: bind("/home/me/ws", "/other", false), want: []string{"protect ro .envrc"}},
		"name beside it elsewhere":               {paths: protect(".envrc"), facts: guardFacts(".envrc"), others: bind("/home/me/ws/.envrc2", "/other", true), want: []string{"protect ro .envrc"}},
	} {
		t.Run(name, func(t *testing.T) {
			if c.ws.Target == "" {
				c.ws = guardWorkspace
			}
			set, err := Guards(c.ws, guardRoot, c.paths, c.facts, c.others)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, shown(set)); diff != "" {
				t.Error(diff)
			}
			if len(set.Warnings) != c.warns {
				t.Errorf("warnings: %q", set.Warnings)
			}
			reversed := slices.Clone(c.paths)
			slices.Reverse(reversed)
			again, err := Guards(c.ws, guardRoot, reversed, c.facts, c.others)
			if err != nil || cmp.Diff(set.Mounts, again.Mounts) != "" {
				t.Errorf("the order of the paths matters: %v %v", again, err)
			}
		})
	}
}

// TestGuardsIdentity: what hello is compared with.
func TestGuardsIdentity(t *testing.T) {
	facts := guardFacts("a/x", ".env", "s/")
	set, err := Guards(guardWorkspace, guardRoot, append(protect("a/x"), hide(".env", "s")...), facts, nil)
	if err != nil {
		t.Fatal(err)
	}
	base := guardWorkspace
	mount := func(rel, why string, writable bool, source string, dev, ino uint64) Mount {
		m := base
		m.Target, m.Why, m.Writable, m.Source, m.Dev, m.Ino = "/workspace/"+rel, why, writable, source, dev, ino
		return m
	}
	cover := func(rel, own string) Mount {
		m := mount(rel, WhyHide, false, "", 0, 0)
		m.Own = own
		return m
	}
	want := []Mount{
		cover(".env", EmptyFile),
		mount("a", WhyGuard, true, "/home/me/ws/a", 7, facts["a"].Ino),
		mount("a/x", WhyProtect, false, "/home/me/ws/a/x", 7, facts["a/x"].Ino),
		cover("s", EmptyDir),
	}
	if diff := cmp.Diff(want, set.Mounts); diff != "" {
		t.Error(diff)
	}
}

// TestGuardsOfTheRunsOwn: a workspace that is made for the run has its guards in it; what
// is hidden is not in it.
func TestGuardsOfTheRunsOwn(t *testing.T) {
	ws := guardWorkspace
	ws.Source, ws.Own, ws.Kept, ws.Dev, ws.Ino = "", "copy/files", true, 0, 0
	set, err := Guards(ws, guardRoot, append(protect("a/x"), hide(".env")...), guardFacts("a/x", ".env"), nil)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range set.Mounts {
		got = append(got, fmt.Sprintf("%s own %s kept %v, source %q, %d %d", m.Target, m.Own, m.Kept, m.Source, m.Dev, m.Ino))
	}
	want := []string{
		`/workspace/a own copy/files/a kept true, source "", 0 0`,
		`/workspace/a/x own copy/files/a/x kept true, source "", 0 0`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestGuardsRefuses: A57, A62, M13.
func TestGuardsRefuses(t *testing.T) {
	show := []Mount{{Type: TypeBind, Source: "/home/me", Target: "/other", Writable: true, Why: WhyMount}}
	readOnly := []Mount{{Type: TypeBind, Source: "/home/me/ws/s/key", Target: "/key", Why: WhyMount}}
	alias := func(n GuardNode, writable bool) []Mount { // a bind mount of the host's elsewhere
		return []Mount{{Type: TypeBind, Source: "/mnt/x", Target: "/other", Writable: writable, Why: WhyMount, Dev: n.Dev, Ino: n.Ino}}
	}
	root := GuardNode{Dev: guardWorkspace.Dev, Ino: guardWorkspace.Ino}
	nested := []Mount{{Type: TypeBind, Source: "/data", Target: "/workspace/s/data", Why: WhyMount}}
	var many []GuardPath
	var files []string
	for i := range maxGuardMounts/2 + 1 {
		rel := fmt.Sprintf("d%d/f", i)
		files = append(files, rel)
		many = append(many, byDefault(rel)...)
	}
	for name, c := range map[string]struct {
		paths  []GuardPath
		facts  GuardFacts
		others []Mount
		at     string
	}{
		"link":                {paths: protect(".envrc"), facts: guardFacts(".envrc@"), at: "$.workspace.protect[0]"},
		"default link":        {paths: byDefault(".envrc"), facts: guardFacts(".envrc@"), at: "$.workspace"},
		"link above":          {paths: byDefault(".vscode/tasks.json"), facts: guardFacts(".vscode@"), at: "$.workspace"},
		"hidden link":         {paths: hide(".env"), facts: guardFacts(".env@"), at: "$.workspace.hide[0]"},
		"FIFO":                {paths: byDefault(".envrc"), facts: guardFacts(".envrc|"), at: "$.workspace"},
		"second name":         {paths: byDefault(".envrc"), facts: guardFacts(".envrc+"), at: "$.workspace"},
		"hidden, second name": {paths: hide(".env"), facts: guardFacts(".env+"), at: "$.workspace.hide[0]"},
		"out of reach":        {paths: byDefault("a/b"), facts: guardFacts("a/b!"), at: "$.workspace"},
		"named, open by another name of the workspace": {paths: protect("a/b/x"), facts: guardFacts("a/b/x"), others: alias(root, true), at: "$.workspace.protect[0]"},
		"named, open by another name of a folder":      {paths: protect("a/b/x"), facts: guardFacts("a/b/x"), others: alias(guardFacts("a/b/x")["a"], true), at: "$.workspace.protect[0]"},
		"hidden, shown by another name":                {paths: hide(".env"), facts: guardFacts(".env"), others: alias(root, false), at: "$.workspace.hide[0]"},
		"named, open elsewhere":                        {paths: protect(".envrc"), facts: guardFacts(".envrc"), others: show, at: "$.workspace.protect[0]"},
		"hidden, shown":                                {paths: hide("s"), facts: guardFacts("s/"), others: readOnly, at: "$.workspace.hide[0]"},
		"mount in hidden":                              {paths: hide("s"), facts: guardFacts("s/"), others: nested, at: "$.workspace.hide[0]"},
		"too many":                                     {paths: many, facts: guardFacts(files...), at: "$.workspace"},
	} {
		t.Run(name, func(t *testing.T) {
			set, err := Guards(guardWorkspace, guardRoot, c.paths, c.facts, c.others)
			var p *Problem
			if !errors.Is(err, ErrRefused) || !errors.As(err, &p) || p.Path != c.at || p.Remedy == "" || set.Mounts != nil {
				t.Errorf("%v, %v", err, set)
			}
		})
	}
}

// TestGuardsReadOnlyRefuses: a writable bind opens a part of a read-only workspace. A65.
func TestGuardsReadOnlyRefuses(t *testing.T) {
	ws := guardWorkspace
	ws.Writable = false
	open := []Mount{{Type: TypeBind, Source: "/home/me/ws/out", Target: "/workspace/out", Writable: true, Why: WhyMount}}
	paths := []GuardPath{{Rel: "out/harness.json", JSON: "$", Reason: "it says what the agent may"}}
	if _, err := Guards(ws, guardRoot, paths, guardFacts("out/harness.json"), open); !errors.Is(err, ErrRefused) {
		t.Error(err)
	}
	own := []OwnFile{{"/data/h.json", "$", "r"}, {"/data", "$.a", "r"}, {"/database/x", "$.b", "r"}}
	all := []Mount{
		{Type: TypeBind, Source: "/data", Target: "/d", Writable: true, Why: WhyMount},
		{Type: TypeBind, Source: "/data", Target: "/e", Why: WhyMount},
		{Type: TypeBind, Source: "/data", Target: "/w", Writable: true, Why: WhyWorkspace},
	}
	if got := OwnWarnings(own, all); len(got) != 2 || !strings.HasPrefix(got[0], `$: the agent can change "/data/h.json" through the writable mount on "/d"`) {
		t.Errorf("%q", got)
	}
}

func FuzzGuardPaths(f *testing.F) {
	for _, s := range []string{"", "a", "./a//b/", "../x", "a/../..", ".git", "x/.GIT/y", "*", "a\n", "\xff", "~/x", "/", strings.Repeat("a/", 33)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		list, err := GuardPaths(harness.Workspace{Protect: []string{raw}, Hide: []string{raw}}, "/ws", nil)
		if err != nil {
			if !errors.Is(err, ErrRefused) {
				t.Fatal(err)
			}
			return
		}
		facts := GuardFacts{}
		for _, g := range list {
			full := path.Join("/ws", g.Rel)
			if path.Clean(g.Rel) != g.Rel || !below(full, "/ws") || strings.Contains("/"+strings.ToLower(g.Rel)+"/", "/.git/") {
				t.Fatalf("%q became %q", raw, g.Rel)
			}
			facts[g.Rel] = GuardNode{Kind: NodeFile, Links: 1}
			for dir := path.Dir(g.Rel); dir != "."; dir = path.Dir(dir) {
				facts[dir] = GuardNode{Kind: NodeDir}
			}
		}
		set, err := Guards(guardWorkspace, guardRoot, list, facts, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range set.Mounts {
			if !below(m.Target, guardWorkspace.Target) || m.Writable != (m.Why == WhyGuard) {
				t.Fatalf("%q made %+v", raw, m)
			}
		}
	})
}
