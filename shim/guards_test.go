package shim

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/seccomp"
	"github.com/agentshim/agentshim/spec"
)

// guardedJob is a prepared run on a writable workspace with a harness file in it.
func guardedJob(t *testing.T, files ...string) *prepared {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range append(files, "harness.json") {
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		t.Fatal(err)
	}
	p := &prepared{}
	policy := mustPolicy(t, "default")
	p.job = Job{Harness: harness.Harness{Dir: dir, Workspace: &harness.Workspace{Source: dir, Mode: "writable"}}, SpecPath: dir + "/harness.json"}.withDefaults()
	p.host.Mounts.Sources = map[string]mounts.Source{dir: {Path: dir, Dir: true, Dev: st.Dev, Ino: st.Ino}}
	p.plan = spec.Plan{Seccomp: policy, Mounts: []mounts.Mount{{Type: mounts.TypeBind, Source: dir, Target: "/workspace", Writable: true, Why: mounts.WhyWorkspace}}}
	return p
}

func mustPolicy(t *testing.T, profile string) *seccomp.Policy {
	t.Helper()
	policy, err := seccomp.Compile(harness.Seccomp{Profile: profile}, seccomp.Target{Arch: "amd64"})
	if err != nil {
		t.Fatal(err)
	}
	return policy
}

// TestOwnPaths: A65. What steers the next run is known by its real path; a harness file
// behind a link that the agent may have made is refused, the control a link elsewhere.
func TestOwnPaths(t *testing.T) {
	p := guardedJob(t, "task.md", "a.env", "ca.pem", "profile.json")
	dir, h := p.job.Harness.Dir, &p.job.Harness
	outside, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(outside, "link.json")
	if err := os.Symlink(p.job.SpecPath, link); err != nil {
		t.Fatal(err)
	}
	p.job.SpecPath = link
	h.PromptFile, h.EnvFiles, h.CACertificates, h.Seccomp.Profile = "task.md", []string{"missing", dir + "/a.env"}, []string{"ca.pem"}, "profile.json"
	own, err := p.ownPaths()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, o := range own {
		if got[o.JSON] = o.Path; o.Reason == "" {
			t.Errorf("%v has no reason", o)
		}
	}
	want := map[string]string{
		"$": dir + "/harness.json", "$.promptFile": dir + "/task.md", "$.envFiles[1]": dir + "/a.env",
		"$.caCertificates[0]": dir + "/ca.pem", "$.seccomp.profile": dir + "/profile.json",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if err := p.probeGuards(); err != nil || p.host.Mounts.Guards["task.md"].Kind != mounts.NodeFile {
		t.Errorf("%v %v", p.host.Mounts.Guards, err)
	}
	if err := os.Symlink(outside, filepath.Join(dir, "agents")); err != nil {
		t.Fatal(err)
	}
	p.job.SpecPath = dir + "/agents/link.json"
	if err := p.probeGuards(); !errors.Is(err, mounts.ErrAgentLink) || ReasonOf(err) != ReasonMount {
		t.Errorf("an agent's link: %v", err)
	}
}

// TestOverlaps: live runs on the same files, and no others.
func TestOverlaps(t *testing.T) {
	p := guardedJob(t)
	p.folders = testStore(t).folders
	var said int
	p.job.Notice = func(string, ...any) { said++ }
	ws, gone := p.job.Harness.Dir, mustSelf(t)
	gone.StartTicks++
	for id, c := range map[string]claim{
		"00000000000000a0": {Owner: mustSelf(t), Workspace: ws},
		"00000000000000a1": {Owner: mustSelf(t), Workspace: ws + "/sub"},
		"00000000000000a2": {Owner: mustSelf(t), Workspace: filepath.Dir(ws)},
		"00000000000000b0": {Owner: mustSelf(t), Workspace: ws + "2"},
		"00000000000000b1": {Owner: mustSelf(t)},
		"00000000000000b2": {Owner: gone, Workspace: ws},
		"00000000000000ff": {Owner: mustSelf(t), Workspace: ws},
	} {
		if _, err := p.folders.makeRunFolder(id, c); err != nil {
			t.Fatal(err)
		}
	}
	want := []Overlap{{"00000000000000a0", ws}, {"00000000000000a1", ws + "/sub"}, {"00000000000000a2", filepath.Dir(ws)}}
	if diff := cmp.Diff(want, p.overlaps("00000000000000ff")); diff != "" || said != len(want) {
		t.Errorf("%d lines; %s", said, diff)
	}
	p.plan.Mounts[0].Writable = false
	if got := p.overlaps("00000000000000ff"); got != nil {
		t.Errorf("read-only: %v", got)
	}
}

// TestPlantedLook: what a run reports, and when.
func TestPlantedLook(t *testing.T) {
	look := func(p *prepared, during func()) *PlantedReport {
		l := p.lookForPlanted(t.Context())
		if err := l.done(); err != nil {
			t.Fatal(err)
		}
		during()
		return l.report(t.Context())
	}
	p := guardedJob(t)
	p.plan.Guards = []mounts.GuardPath{{Rel: ".envrc", Reason: "direnv"}}
	dir := p.job.Harness.Dir
	if r := look(p, func() {}); r == nil || r.Lines() != nil {
		t.Errorf("nothing happened: %+v", r)
	}
	r := look(p, func() { _ = os.WriteFile(dir+"/.envrc", nil, 0o600) })
	if diff := cmp.Diff([]Planted{{Path: ".envrc", What: PlantedCreated, Kind: mounts.NodeFile, Reason: "direnv"}}, r.Items); diff != "" {
		t.Error(diff)
	}
	p.plan.Mounts = append(p.plan.Mounts, mounts.Mount{Type: mounts.TypeBind, Target: "/workspace/.git", Own: "git", Why: "git"})
	p.job.Harness.Workspace.Target = "/workspace"
	r = look(p, func() { _ = os.MkdirAll(dir+"/.git/hooks", 0o700); _ = os.WriteFile(dir+"/.git/config", nil, 0o600) })
	if len(r.Items) != 0 {
		t.Errorf("what the agent can't reach is reported: %v", r.Items)
	}
	p.plan.Mounts = append(p.plan.Mounts, mounts.Mount{Type: mounts.TypeBind, Source: filepath.Dir(dir), Target: "/up", Writable: true, Why: mounts.WhyMount})
	r = look(p, func() { _ = os.WriteFile(dir+"/.git/hooks/pre-push", nil, 0o700) })
	if diff := cmp.Diff([]string{"created file .git/hooks/pre-push"}, brief(*r)); diff != "" {
		t.Errorf("where another mount shows it: %s", diff)
	}
	p.plan.Mounts = p.plan.Mounts[:2]
	p.plan.Seccomp = mustPolicy(t, "nested")
	r = look(p, func() { _ = os.Rename(dir+"/.git", dir+"/gone"); _ = os.Mkdir(dir+"/.git", 0o700) })
	if diff := cmp.Diff([]string{"replaced dir .git"}, brief(*r)); diff != "" {
		t.Errorf("where the agent can get round a mount: %s", diff)
	}
	for _, d := range []string{"/hooks/deep", "/keys"} {
		if err := os.MkdirAll(dir+d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for name, second := range map[string]string{"hooks/deep/x": "build", "hooks/y": "hooks/z", "keys/k": "seen"} {
		if err := errors.Join(os.WriteFile(dir+"/"+name, nil, 0o600), os.Link(dir+"/"+name, dir+"/"+second)); err != nil {
			t.Fatal(err)
		}
	}
	p.plan.Guards = []mounts.GuardPath{{Rel: "absent", Reason: "r"}, {Rel: "hooks", Reason: "runs"}, {Rel: "keys", Hide: true, Reason: "hidden"}}
	time.Sleep(5 * time.Millisecond) // ctime moves with the kernel's tick
	r = look(p, func() {
		_ = os.WriteFile(dir+"/build", []byte("agent"), 0o600)
		_ = os.WriteFile(dir+"/seen", []byte("agent"), 0o600)
		_ = os.Remove(dir + "/build")
	})
	if diff := cmp.Diff([]Planted{{Path: "hooks/deep/x", What: PlantedChanged, Kind: mounts.NodeFile, Reason: "runs"}}, r.Items); diff != "" {
		t.Error(diff)
	}
	if more, all, err := furtherNames(t.Context(), p.writable(), p.plan.Guards, plantedLimits{entries: 1}); err != nil || all || len(more) > 3 {
		t.Errorf("bounds: %v %v %v", more, all, err)
	}
	moved := look(p, func() { _ = os.Rename(dir, dir+".old"); _ = os.Mkdir(dir, 0o700) })
	if moved.Limit != limitRoot || len(moved.Lines()) == 0 {
		t.Errorf("another folder: %+v", moved)
	}
	if err := p.lookForPlanted(t.Context()).done(); ReasonOf(err) != ReasonMount {
		t.Errorf("another folder before the run: %v", err)
	}
	p.plan.Mounts[0].Writable = false
	if l := p.lookForPlanted(t.Context()); l != nil || l.done() != nil || l.report(t.Context()) != nil {
		t.Error("a read-only workspace is looked at")
	}
}

// TestCovers: readable by the agent whatever the caller's umask is.
func TestCovers(t *testing.T) {
	defer unix.Umask(unix.Umask(0o077))
	dir := t.TempDir()
	if err := makeCovers(dir); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]os.FileMode{mounts.EmptyFile: 0o444, mounts.EmptyDir: os.ModeDir | 0o555} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Mode() != want {
			t.Errorf("%s: %v %v", name, st, err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Error(err)
	}
}
