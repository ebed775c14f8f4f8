package mounts

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

// gitTargets are the mounts of set that stand for .git, as "target writable source".
func gitTargets(set Set) []string {
	var out []string
	for _, m := range set.Mounts {
		if m.Why == WhyGit {
			access := "ro"
			if m.Writable {
				access = "rw"
			}
			out = append(out, strings.Join([]string{m.Target, access, m.Source + m.Own}, " "))
		}
	}
	return out
}

func TestGit(t *testing.T) {
	const (
		objects = "/.agentshim-git/objects ro git/base/objects"
		private = "/workspace/.git rw git/private"
		void    = "/workspace/.git ro empty/folder"
		empty   = "/workspace/.git ro empty/file"
	)
	var (
		folder  = GitFacts{Node: NodeDir, Program: true}
		file    = GitFacts{Node: NodeFile, Program: true, Common: "/data", Linked: true}
		sub     = GitFacts{Node: NodeFile, Program: true, Common: "/data"}
		odd     = GitFacts{Node: NodeDir, Program: true, Refused: "git: alternates", Remedy: "git repack"}
		foreign = GitFacts{Node: NodeFile, Program: true, Refused: "git: foreign"}
		link    = GitFacts{Node: NodeLink, Program: true, Refused: "git: link"}
		special = GitFacts{Node: NodeOther, Program: true, Refused: "git: malformed"}
		unknown = GitFacts{Node: NodeUnknown, Program: true}
		bare    = GitFacts{Bare: true, Program: true, Refused: "git: bare"}
		without = GitFacts{Node: NodeDir}
	)
	for _, tc := range []struct {
		name, mode, git string
		facts           GitFacts
		want            string
		targets         []string
		warning         string
	}{
		{name: "no repository", mode: "writable", git: "private"},
		{name: "no workspace", mode: "none", git: "private", facts: folder},
		{name: "default", mode: "read-only", facts: folder, want: "private", targets: []string{objects, private}},
		{name: "private", mode: "writable", git: "private", facts: folder, want: "private", targets: []string{objects, private}},
		{name: "private copy", mode: "copy", git: "private", facts: folder, want: "private", targets: []string{objects, private}},
		{name: "linked working tree", mode: "writable", facts: file, want: "private", targets: []string{"/.agentshim-git/dir rw git/private", objects, "/workspace/.git ro git/dotgit"}},
		{name: "default, not possible", mode: "writable", facts: odd, want: "none", targets: []string{void}, warning: "git repack"},
		{name: "default, foreign file", mode: "writable", facts: foreign, want: "none", targets: []string{empty}, warning: "foreign"},
		{name: "default, bare", mode: "read-only", facts: bare, warning: "repository's own folder"},
		{name: "none", mode: "writable", git: "none", facts: folder, want: "none", targets: []string{void}},
		{name: "none, file", mode: "writable", git: "none", facts: foreign, want: "none", targets: []string{empty}},
		{name: "none without git", mode: "writable", git: "none", facts: without, want: "none", targets: []string{void}},
		{name: "none, copied", mode: "copy", git: "none", facts: folder, want: "none"},
		{name: "shared", mode: "writable", git: "shared", facts: odd, want: "shared"},
		{name: "shared, bare", mode: "writable", git: "shared", facts: bare, want: "shared"},
		{name: "shared, linked", mode: "writable", git: "shared", facts: file, want: "shared", targets: []string{"/.agentshim-git/dir rw /data", "/workspace/.git ro git/dotgit"}},
		{name: "shared, submodule, read-only", mode: "read-only", git: "shared", facts: sub, want: "shared", targets: []string{"/.agentshim-git/dir ro /data", "/.agentshim-git/dir/config ro git/config", "/workspace/.git ro git/dotgit"}},

		{name: "private, not possible", mode: "writable", git: "private", facts: odd, want: "refused"},
		{name: "private, bare", mode: "writable", git: "private", facts: bare, want: "refused"},
		{name: "default, writable bare", mode: "writable", facts: bare, want: "refused"},
		{name: "none, writable bare", mode: "writable", git: "none", facts: bare, want: "refused"},
		{name: "default without git", mode: "read-only", facts: without, want: "refused"},
		{name: "private without git", mode: "writable", git: "private", facts: without, want: "refused"},
		{name: "default, link", mode: "writable", facts: link, want: "refused"},
		{name: "none, link", mode: "read-only", git: "none", facts: link, want: "refused"},
		{name: "shared, link", mode: "writable", git: "shared", facts: link, want: "refused"},
		{name: "none, special file", mode: "writable", git: "none", facts: special, want: "refused"},
		{name: "none, out of reach", mode: "writable", git: "none", facts: unknown, want: "refused"},
		{name: "shared, foreign file", mode: "writable", git: "shared", facts: foreign, want: "refused"},
		{name: "shared copy", mode: "copy", git: "shared", facts: folder, want: "refused"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := base(func(h *harness.Harness) { h.Workspace.Mode, h.Workspace.Git = tc.mode, tc.git })
			set, err := Compile(h, facts(func(f *Facts) { f.Git = tc.facts }), target(true))
			if tc.want == "refused" {
				wantProblem(t, err, "$.workspace.git", ErrGit)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if set.Git != tc.want {
				t.Errorf("mode %q, want %q", set.Git, tc.want)
			}
			if diff := cmp.Diff(tc.targets, gitTargets(set)); diff != "" {
				t.Error(diff)
			}
			if got := strings.Join(set.Warnings, "\n"); tc.warning == "" && got != "" || !strings.Contains(got, tc.warning) {
				t.Errorf("warnings %q, want %q", got, tc.warning)
			}
		})
	}
}

// The folder that a .git file leads to is judged as every other source.
func TestGitSharedSource(t *testing.T) {
	h := base(func(h *harness.Harness) { h.Workspace.Git = "shared" })
	_, err := Compile(h, facts(func(f *Facts) {
		f.Git = GitFacts{Node: NodeFile, Program: true, Common: "/data", Linked: true}
		f.Protected = append(f.Protected, "/data")
	}), target(true))
	wantProblem(t, err, "$.workspace.source", ErrRefused)
}

func TestGitCollision(t *testing.T) {
	for git, refused := range map[string]bool{"": true, "none": true, "shared": false} {
		h := withMount(harness.Mount{Source: "/data", Target: ".git/data"})
		h.Workspace.Git = git
		_, err := Compile(h, facts(func(f *Facts) {
			f.Git = GitFacts{Node: NodeDir, Program: true}
			f.Nested["/src/proj/.git/data"] = NodeDir
		}), target(true))
		if got := errors.Is(err, ErrRefused); got != refused {
			t.Errorf("git %q: %v", git, err)
		}
	}
	_, err := Compile(withMount(harness.Mount{Source: "/data", Target: "/.agentshim-git/objects/x"}), facts(nil), target(true))
	wantProblem(t, err, "$.mounts[0].target", ErrRefused)
}

func TestGitExposed(t *testing.T) {
	for source, want := range map[string]bool{"/data": true, "/more": false} {
		set, err := Compile(withMount(harness.Mount{Source: source, Target: "/x", Writable: true}), facts(func(f *Facts) {
			f.Git = GitFacts{Node: NodeFile, Program: true, Dirs: []string{"/data/.git/worktrees/x", "/data/.git"}}
		}), target(true))
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.ContainsFunc(set.Warnings, func(w string) bool { return strings.Contains(w, "change the host's repository") }); got != want {
			t.Errorf("%s: %q", source, set.Warnings)
		}
	}
}
