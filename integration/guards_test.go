package integration

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/shim"
)

// guardTrials are what an agent tries on protected and hidden paths, each in a folder
// of its own. In the control run nothing of them is guarded.
var guardTrials = []trial{
	{"write", []string{"openwrite", "w/f"}, "EROFS", "ok"},
	{"mode", []string{"chmod", "w/f"}, "EROFS", "ok"},
	{"unlink", []string{"unlink", "u/f"}, "EBUSY", "ok"},
	{"rename", []string{"rename", "r/f", "r/g"}, "EBUSY", "ok"},
	{"rename over", []string{"rename", "o/other", "o/f"}, "EBUSY", "ok"},
	{"exchange", []string{"exchange", "x/other", "x/f"}, "EBUSY", "ok"},
	{"second name", []string{"link", "l/f", "l/g"}, "EXDEV", "ok"},
	{"mv of its folder", []string{"rename", "m", "gone"}, "EBUSY", "ok"},
	{"mv of a folder further up", []string{"rename", "a", "away"}, "EBUSY", "ok"},
	{"exchange of a folder on the way", []string{"exchange", "b/other", "b/c"}, "EBUSY", "ok"},
	{"create in a protected folder", []string{"create", "p"}, "EROFS", "ok"},
	{"beside a protected file", []string{"create", "w"}, "ok", "ok"},
	{"read a hidden file", []string{"read", "hidden"}, "ok: empty", "ok: data"},
	{"write a hidden file", []string{"openwrite", "hidden"}, "EACCES", "ok"},
	{"unlink a hidden file", []string{"unlink", "hidden"}, "EBUSY", "ok"},
	{"list a hidden folder", []string{"list", "keys/all"}, "ok", "ok: id"},
	{"mv of the folder above it", []string{"rename", "keys", "moved"}, "EBUSY", "ok"},
	{"mv of a default's folder", []string{"rename", ".vscode", ".gone"}, "EBUSY", "ok"},
	{"rename over the harness file", []string{"rename", "new.json", "harness.json"}, "EBUSY", "ok"},
	{"make what is absent", []string{"put", ".envrc"}, "ok", "ok"},
	{"make a protected folder that is absent", []string{"put", ".idea/x"}, "ok", "ok"},
	{"make a named one that is absent", []string{"put", "absent/f"}, "ok", "ok"},
	{"make a repository", []string{"put", "sub/.git/HEAD"}, "ok", "ok"},
	{"make a git link", []string{"put", "lib/.git"}, "ok", "ok"},
}

// guardFiles are the host's, as long as nobody takes them away.
var guardFiles = []string{
	"w/f", "u/f", "r/f", "o/f", "o/other", "x/f", "x/other", "l/f", "m/f", "a/b/c/f", "b/c/f", "b/other", "p/f",
	"hidden", "keys/all/id", ".vscode/tasks.json", "new.json",
}

// inWorkspace makes the operands paths of the container's workspace.
func inWorkspace(trials []trial) []trial {
	var out []trial
	for _, tr := range trials {
		op := []string{tr.op[0]}
		for _, rel := range tr.op[1:] {
			op = append(op, "/workspace/"+rel)
		}
		tr.op = op
		out = append(out, tr)
	}
	return out
}

// TestGuards: A57, A63, A65, M13, M15, T10. What exists is held fast, what is hidden
// reads empty, what appears is reported, and the exit code is the harness's. In the
// control run on the same files the two lists are empty, .vscode's file has no guarded
// name, and the harness file that is used lies elsewhere.
func TestGuards(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		trials := inWorkspace(guardTrials)
		run := func(guards bool) (tried, shim.Record, string, string) {
			dir, state := s.folder(t), s.private(t)
			for _, f := range guardFiles {
				place(t, filepath.Join(dir, f), []byte("host"), 0o644)
			}
			ws := map[string]any{"source": dir, "mode": "writable"}
			if guards {
				ws["protect"] = []string{"w/f", "u/f", "r/f", "o/f", "x/f", "l/f", "m/f", "a/b/c/f", "b/c/f", "p", "absent"}
				ws["hide"] = []string{"hidden", "keys/all"}
			} else if err := os.Rename(filepath.Join(dir, ".vscode/tasks.json"), filepath.Join(dir, ".vscode/my-tasks.json")); err != nil {
				t.Fatal(err)
			}
			file := s.write(t, withHelper(t, spec{"workspace": ws}))
			inside := place(t, filepath.Join(dir, "harness.json"), mustRead(t, file), 0o644)
			s.own(t, dir)
			if guards {
				file = inside
			}
			r := s.call(t, call{State: state}, "exec", "--spec", file, "--", of(trials).json(t))
			return endings(t, r, of(trials)), record(t, state), r.Stderr, dir
		}
		sandbox, rec, said, dir := run(true)
		control, _, _, _ := run(false)
		judge(t, trials, sandbox, control)
		for _, f := range guardFiles {
			if b := mustRead(t, filepath.Join(dir, f)); string(b) != "host" {
				t.Errorf("%s holds %q", f, b)
			}
		}
		var got []string
		for _, p := range rec.Planted.Items {
			got = append(got, strings.Join([]string{p.What, p.Kind, p.Path}, " "))
		}
		want := []string{"created file .envrc", "created dir .idea", "created dir absent", "created file lib/.git", "created dir sub/.git"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s\n%s", diff, said)
		}
		wantText(t, said, "agentshim: planted: .envrc (file) was created", "direnv", `"absent" does not exist`, "agentshim: planted: read them before")
	})
}

// TestLooseGuards: with mount namespaces of its own the agent can move what is guarded,
// but change and see none of it, and the end says so. In the control run on the default
// policy it can't make any.
func TestLooseGuards(t *testing.T) {
	trials := []trial{
		{"mv of a guarded folder", []string{"rename", "/workspace/.vscode", "/workspace/away"}, "EBUSY", "EBUSY"},
		{"from a namespace without its mounts", []string{"loose", "/workspace", ".vscode", "away"}, "ok", "EPERM"},
		{"mv of .git", []string{"loose", "/workspace", ".git", "was"}, "ok", "EPERM"},
		{"mv of a hidden file", []string{"loose", "/workspace", "hidden", "seen"}, "ok", "EPERM"},
		{"read of it", []string{"read", "/workspace/seen"}, "ok: empty", "ENOENT"},
		{"write of a protected file", []string{"openwrite", "/workspace/away/tasks.json"}, "EROFS", "ENOENT"},
		{"another in its place", []string{"put", "/workspace/.vscode/tasks.json"}, "ok", "EROFS"},
		{"another repository", []string{"put", "/workspace/.git/config"}, "ok", "EROFS"},
	}
	each(t, func(t *testing.T, s setup) {
		run := func(profile string) (tried, string, string) {
			dir := s.folder(t)
			for _, f := range []string{".vscode/tasks.json", ".git/HEAD", "hidden"} {
				place(t, filepath.Join(dir, f), []byte("host"), 0o644)
			}
			s.own(t, dir)
			file := s.write(t, withHelper(t, spec{
				"workspace": map[string]any{"source": dir, "mode": "writable", "git": "none", "hide": []string{"hidden"}},
				"seccomp":   map[string]any{"profile": profile}, "accept": []string{"nested-seccomp", "rootless-cgroup-limits"},
			}))
			r := s.call(t, call{State: s.private(t)}, "exec", "--spec", file, "--", of(trials).json(t))
			return endings(t, r, of(trials)), r.Stderr, dir
		}
		loose, said, dir := run("nested")
		control, _, _ := run("default")
		judge(t, trials, loose, control)
		if b := mustRead(t, filepath.Join(dir, "away/tasks.json")); string(b) != "host" {
			t.Errorf("the protected file holds %q", b)
		}
		wantText(t, said, "planted: .vscode/tasks.json (file) was replaced", "planted: .git (dir) was replaced", "planted: hidden (file) was removed")
	})
}

// TestGuardsRefused: what can't be held fast is refused before anything runs; the
// control is the same workspace read-only.
func TestGuardsRefused(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		for name, plant := range map[string]func(dir string) error{
			"link":        func(dir string) error { return os.Symlink("/etc/passwd", filepath.Join(dir, ".envrc")) },
			"link above":  func(dir string) error { return os.Symlink("/etc", filepath.Join(dir, ".vscode")) },
			"FIFO":        func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, ".mcp.json"), 0o600) },
			"second name": func(dir string) error { return os.Link(filepath.Join(dir, "file"), filepath.Join(dir, ".envrc")) },
		} {
			t.Run(name, func(t *testing.T) {
				dir := s.folder(t)
				place(t, filepath.Join(dir, "file"), []byte("host"), 0o644)
				if err := plant(dir); err != nil {
					t.Fatal(err)
				}
				fields := spec{"workspace": map[string]any{"source": dir, "mode": "writable"}}
				r := s.sh(t, fields, "echo ran").refused(t, shim.ReasonMount)
				wantText(t, r.Stderr, "$.workspace: ", "be protected", `workspace.mode "read-only"`)
				if name == "link" {
					fields["workspace"] = map[string]any{"source": dir, "hide": []string{"file"}}
					if r := s.sh(t, fields, `cat file; test -L .envrc && echo link`).ok(t); r.Stdout != "link\n" {
						t.Errorf("read-only, with a hidden file: %q", r.Stdout)
					}
				}
			})
		}
	})
}

// TestPlantedByAKilledRun: a run that is ended from outside reports too, quiet or not;
// and a second run on the same files says so at its start, one elsewhere doesn't.
func TestPlantedByAKilledRun(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir, other := s.folder(t), s.folder(t)
		place(t, filepath.Join(dir, "sub/file"), nil, 0o644)
		s.own(t, dir)
		writable := func(dir string) spec {
			return spec{"workspace": map[string]any{"source": dir, "mode": "writable"}, "stopGrace": "1s"}
		}
		b := s.begin(t, writable(dir), `touch .envrc; trap "" TERM; echo ready; while :; do sleep 0.1; done`)
		state := s.private(t)
		second := s.call(t, call{State: state}, "exec", "--spec", s.write(t, writable(filepath.Join(dir, "sub"))), "--", "true").ok(t)
		overlaps := record(t, state).Overlaps
		elsewhere := s.sh(t, writable(other), "true").ok(t)
		b.signal(t, syscall.SIGTERM)
		_, rec := b.ended(t, 128+int(syscall.SIGKILL))
		if diff := cmp.Diff([]shim.Overlap{{Run: rec.ID, Workspace: dir}}, overlaps); diff != "" {
			t.Error(diff)
		}
		wantText(t, second.Stderr, "agentshim: warning: run "+rec.ID)
		if strings.Contains(elsewhere.Stderr, "warning: run") {
			t.Errorf("on other files: %s", elsewhere.Stderr)
		}
		if rec.Planted == nil || len(rec.Planted.Items) != 1 || rec.Planted.Items[0].Path != ".envrc" {
			t.Errorf("planted: %+v", rec.Planted)
		}
		wantText(t, b.stderr.String(), "agentshim: planted: .envrc (file) was created")
	})
}
