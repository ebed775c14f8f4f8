package mounts

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/harness"
	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

const gib = int64(1) << 30

// base is a harness whose workspace is /src/proj; edit changes a copy of it.
func base(edit func(*harness.Harness)) harness.Harness {
	h := harness.Harness{
		Version: 1, Image: "agent:dev", Dir: "/src/proj",
		Workspace: &harness.Workspace{Source: ".", Target: "/workspace", Mode: "read-only"},
		Home:      harness.Home{SizeMB: 512}, TmpSizeMB: 512, Resources: harness.Resources{ShmMB: 64},
	}
	if edit != nil {
		edit(&h)
	}
	return h
}

// facts knows the workspace and a few sources; edit changes a copy.
func facts(edit func(*Facts)) Facts {
	f := Facts{
		Home: "/home/me",
		Sources: map[string]Source{
			"/src/proj/.":      {Path: "/src/proj", Dir: true, Dev: 1, Ino: 2, UID: 1000, GID: 1000, Mode: 0o755},
			"/data":            {Path: "/data", Dir: true, Dev: 1, Ino: 3, Mode: 0o755},
			"/more":            {Path: "/more", Dir: true, Dev: 1, Ino: 4, Mode: 0o755},
			"/conf/one":        {Path: "/conf/one", Dev: 1, Ino: 5, Mode: 0o644},
			"/home/me/sets":    {Path: "/mnt/sets", Dir: true, Dev: 2, Ino: 2, Mode: 0o755},
			"/src/proj/./sub":  {Path: "/src/proj/sub", Dir: true, Dev: 1, Ino: 6, Mode: 0o755},
			"/data,with:a\"q'": {Path: "/data,with:a\"q'", Dir: true, Dev: 1, Ino: 7, Mode: 0o755},
		},
		Protected: []string{"/var/lib/docker", "/srv/state/agentshim"},
		HomeRoots: []string{"/accounts/eve", "/home/me"},
		Nested:    map[string]string{},
		Guards:    GuardFacts{},
	}
	if edit != nil {
		edit(&f)
	}
	return f
}

func target(podman bool) Target {
	return Target{Podman: podman, Rootless: podman, UID: 1000, GID: 1000, MemoryBytes: 4 * gib, Reserved: []string{"/.agentshim/init"}}
}

func engines(t *testing.T, test func(t *testing.T, podman bool)) {
	for _, podman := range []bool{false, true} {
		name := "docker"
		if podman {
			name = "podman"
		}
		t.Run(name, func(t *testing.T) { test(t, podman) })
	}
}

// problemAt finds the problem of kind with that JSON path.
func problemAt(err error, at string, kind error) *Problem {
	var joined interface{ Unwrap() []error }
	if !errors.As(err, &joined) {
		return nil
	}
	for _, e := range joined.Unwrap() {
		var p *Problem
		if errors.As(e, &p) && p.Path == at && errors.Is(p, kind) {
			return p
		}
	}
	return nil
}

func wantProblem(t *testing.T, err error, at string, kind error) *Problem {
	t.Helper()
	p := problemAt(err, at, kind)
	if p == nil {
		t.Fatalf("got %v; want a problem at %s that is %q", err, at, kind)
	}
	if p.Reason == "" || p.Remedy == "" {
		t.Errorf("problem without reason or remedy: %v", p)
	}
	return p
}

func withMount(m harness.Mount) harness.Harness {
	return base(func(h *harness.Harness) { h.Mounts = append(h.Mounts, m) })
}

func TestCompileGolden(t *testing.T) {
	writable := func(h *harness.Harness) { h.Workspace.Mode = "writable" }
	for _, tc := range []struct {
		name  string
		h     harness.Harness
		facts Facts
		edit  func(*Target)
	}{
		{"bare", base(func(h *harness.Harness) { h.Workspace = nil }), facts(nil), nil},
		{"workspace-read-only", base(nil), facts(nil), nil},
		{"workspace-writable", base(writable), facts(nil), nil},
		{"workspace-copy", base(func(h *harness.Harness) { h.Workspace.Mode = "copy" }), facts(nil), nil},
		{"workspace-none", base(func(h *harness.Harness) { h.Workspace.Mode = "none" }), facts(nil), nil},
		{"sizes", base(func(h *harness.Harness) {
			h.Home, h.TmpSizeMB, h.Resources.ShmMB = harness.Home{SizeMB: 64, NoExec: true}, 32, 16
		}), facts(nil), func(t *Target) { t.UID, t.GID = 0, 0 }},
		{"mounts", base(func(h *harness.Harness) {
			writable(h)
			h.Mounts = []harness.Mount{
				{Source: "~/sets", Target: "~/sets", NoExec: true},
				{Source: "/data", Target: "vendor/data"},
				{Source: "/conf/one", Target: "/etc/tool.conf", Writable: true},
				{Source: "./sub", Target: "sub"},
				{Source: "/data,with:a\"q'", Target: "/tmp/a,b:c", Writable: true, NoExec: true, Label: "z"},
			}
		}), facts(func(f *Facts) {
			f.Nested = map[string]string{"/src/proj/vendor/data": NodeDir, "/src/proj/sub": NodeDir}
			f.Sources["/home/me/sets"] = Source{Path: "/mnt/sets", Dir: true, NoExec: true, GroupOnly: true, GID: 77}
		}), nil},
		{"guards", base(func(h *harness.Harness) {
			writable(h)
			h.Workspace.Protect, h.Workspace.Hide = []string{"deploy/keys.toml", "absent"}, []string{".env", "deploy/secrets", "deploy/data/key"}
			h.Mounts = []harness.Mount{{Source: "/data", Target: "deploy/data"}, {Source: "./sub", Target: "/sub", Writable: true}}
		}), facts(func(f *Facts) {
			f.Nested = map[string]string{"/src/proj/deploy/data": NodeDir}
			f.Guards = guardFacts(".vscode/tasks.json", "deploy/keys.toml", ".env", "deploy/secrets/", "deploy/data/key", "harness.json", "sub/task.md")
			f.Own = []OwnFile{
				{"/src/proj/harness.json", "$", "it says what the agent may"}, {"/elsewhere/x.env", "$.envFiles[0]", "it is read for every run"},
			}
		}), nil},
		{"guards-copy", base(func(h *harness.Harness) {
			h.Workspace.Mode, h.Workspace.Protect, h.Workspace.Hide = "copy", []string{"deploy/keys.toml"}, []string{".env"}
		}), facts(func(f *Facts) { f.Guards = guardFacts(".envrc@", "deploy/keys.toml", ".env", ".vscode/tasks.json") }), nil},
		{"guards-read-only", base(func(h *harness.Harness) {
			h.Workspace.Protect, h.Workspace.Hide = []string{"deploy"}, []string{".env", "deploy/secrets"}
		}), facts(func(f *Facts) { f.Guards = guardFacts(".envrc@", "deploy/secrets/", ".env") }), nil},
		{"image-volumes", base(nil), facts(nil), func(t *Target) {
			t.ImageVolumes = []string{"/var/lib/db", "/tmp", "/workspace", "/cache", "/cache", "/cache/sub"}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			engines(t, func(t *testing.T, podman bool) {
				to := target(podman)
				if tc.edit != nil {
					tc.edit(&to)
				}
				set, err := Compile(tc.h, tc.facts, to)
				if err != nil {
					t.Fatal(err)
				}
				golden(t, filepath.Join("testdata", tc.name, filepath.Base(t.Name())+".json"), set)
			})
		})
	}
}

func golden(t *testing.T, file string, set Set) {
	t.Helper()
	got, err := json.MarshalIndent(set, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, '\n')
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}

// TestCompileGuards: what can't be guarded is refused with everything else, and so is
// a workspace whose paths nobody looked at.
func TestCompileGuards(t *testing.T) {
	named := func(h *harness.Harness) {
		h.Workspace.Mode, h.Workspace.Protect = "writable", []string{"../x"}
		h.Mounts = []harness.Mount{{Source: "/data", Target: "/proc/x"}}
	}
	_, err := Compile(base(named), facts(nil), target(true))
	wantProblem(t, err, "$.workspace.protect[0]", ErrRefused)
	wantProblem(t, err, "$.mounts[0].target", ErrRefused)
	for name, edit := range map[string]func(*harness.Harness){
		"writable": func(h *harness.Harness) { h.Workspace.Mode = "writable" },
		"hidden":   func(h *harness.Harness) { h.Workspace.Hide = []string{".env"} },
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Compile(base(edit), facts(func(f *Facts) { f.Guards = nil }), target(true)); !errors.Is(err, ErrSource) {
				t.Errorf("not looked at: %v", err)
			}
			link := facts(func(f *Facts) { f.Guards = guardFacts(".env@", ".envrc@") })
			if _, err := Compile(base(edit), link, target(true)); !errors.Is(err, ErrRefused) {
				t.Errorf("a link: %v", err)
			}
		})
	}
	shown := func(h *harness.Harness) {
		h.Workspace.Mode, h.Workspace.Hide = "copy", []string{"sub"}
		h.Mounts = []harness.Mount{{Source: "./sub", Target: "/x"}}
	}
	_, err = Compile(base(shown), facts(func(f *Facts) { f.Guards = guardFacts("sub/") }), target(true))
	wantProblem(t, err, "$.workspace.hide[0]", ErrRefused)
	for writable, refused := range map[bool]bool{true: true, false: false} {
		readOnly := func(h *harness.Harness) {
			h.Workspace.Protect = []string{"sub"}
			h.Mounts = []harness.Mount{{Source: "./sub", Target: "/x", Writable: writable}}
		}
		_, err := Compile(base(readOnly), facts(func(f *Facts) { f.Guards = guardFacts("sub/") }), target(true))
		if (problemAt(err, "$.workspace.protect[0]", ErrRefused) != nil) != refused {
			t.Errorf("read-only workspace, mount writable %v: %v", writable, err)
		}
	}
	if _, err := Compile(base(nil), facts(func(f *Facts) { f.Guards = nil }), target(true)); err != nil {
		t.Errorf("control, read-only and nothing hidden: %v", err)
	}
}

// M17, A66 and DESIGN's list of refused sources; the control is that /data itself,
// or the changed fact's absence, is fine.
func TestRefusedSources(t *testing.T) {
	dir := func(p string) Source { return Source{Path: p, Dir: true, Mode: 0o755} }
	type row struct {
		name   string
		source Source
		edit   func(*Facts)
	}
	rows := []row{
		{"protected itself", dir("/var/lib/docker"), nil},
		{"below protected", dir("/var/lib/docker/volumes"), nil},
		{"above protected", dir("/srv/state"), nil},
		{"home root", dir("/home/me"), nil},
		{"above a home root", dir("/accounts"), nil},
		{"linked system folder", dir("/var/home"), func(f *Facts) { f.SystemLinks = map[string]string{"/home": "/var/home"} }},
		{"below a linked system folder", dir("/private/run/x"), func(f *Facts) { f.SystemLinks = map[string]string{"/run": "/private/run"} }},
		{"live socket", Source{Path: "/data", Dir: true, Sockets: []string{"/data/s"}}, nil},
		{"submount", Source{Path: "/data", Dir: true, Submounts: []string{"/data/m"}}, nil},
		{"file named docker.sock", Source{Path: "/data/docker.sock"}, nil},
		{"file named podman.sock", Source{Path: "/data/podman.sock"}, nil},
		{"file named containerd.sock", Source{Path: "/data/containerd.sock"}, nil},
		{"file named S.gpg-agent.ssh", Source{Path: "/data/S.gpg-agent.ssh"}, nil},
		{"file named wayland-7", Source{Path: "/data/wayland-7"}, nil},
		{"file named system_bus_socket", Source{Path: "/data/system_bus_socket"}, nil},
		{"not UTF-8", dir("/data/\xff"), nil},
		{"CR LF", dir("/data/a\r\nb"), nil},
	}
	for _, p := range []string{"/", "/boot", "/etc", "/home", "/root", "/usr", "/var", "/tmp", "/proc", "/proc/1/root", "/sys", "/sys/fs", "/dev", "/dev/shm/x", "/run", "/run/user/1000"} {
		rows = append(rows, row{p, dir(p), nil})
	}
	for _, tc := range rows {
		t.Run(tc.name, func(t *testing.T) {
			engines(t, func(t *testing.T, podman bool) {
				for _, writable := range []bool{false, true} {
					f := facts(tc.edit)
					f.Sources["/data"] = tc.source
					h := withMount(harness.Mount{Source: "/data", Target: "/data", Writable: writable})
					_, err := Compile(h, f, target(podman))
					wantProblem(t, err, "$.mounts[0].source", ErrRefused)
				}
			})
		})
	}
}

func TestAllowedSources(t *testing.T) {
	for _, p := range []string{"/etc/ssl", "/home/me/proj", "/root/proj", "/usr/share/dict", "/var/www", "/tmp/x", "/procedure", "/developers", "/home/me2", "/var/lib/docker2", "/data/a\nb", "/data/a\rb", "/data/$H -x"} {
		t.Run(p, func(t *testing.T) {
			f := facts(nil)
			f.Sources["/data"] = Source{Path: p, Dir: true}
			if _, err := Compile(withMount(harness.Mount{Source: "/data", Target: "/data"}), f, target(true)); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestSocketListIsBounded(t *testing.T) {
	f := facts(nil)
	var sockets []string
	for i := range 500 {
		sockets = append(sockets, fmt.Sprintf("/data/s%03d", i))
	}
	f.Sources["/data"] = Source{Path: "/data", Dir: true, Sockets: sockets}
	_, err := Compile(withMount(harness.Mount{Source: "/data", Target: "/data"}), f, target(true))
	p := wantProblem(t, err, "$.mounts[0].source", ErrRefused)
	if !strings.Contains(p.Reason, `"/data/s000"`) || !strings.Contains(p.Reason, "497 more") || strings.Contains(p.Reason, "s003") {
		t.Errorf("reason = %q", p.Reason)
	}
}

func TestSourcesAsWritten(t *testing.T) {
	for _, tc := range []struct {
		name, source string
		kind         error
	}{
		{"M06 bare tilde", "~", ErrSource},
		{"M06 another user's home", "~eve/x", ErrSource},
		{"empty", "", ErrSource},
		{"never probed", "/never", ErrSource},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Compile(withMount(harness.Mount{Source: tc.source, Target: "/data"}), facts(nil), target(false))
			wantProblem(t, err, "$.mounts[0].source", tc.kind)
		})
	}
}

// M12, M18, A59.
func TestRefusedTargets(t *testing.T) {
	for _, to := range []string{
		"/", "/..", "/a/..", "/proc", "/proc/self", "/a/../proc", "/sys", "/sys/fs/cgroup", "/dev", "/dev/shm", "/dev/shm/x", "/dev/null",
		"/run", "/tmp", "/tmp/", "/home/agent", "~/", "~/.", "/home", "/etc", "/etc/hosts", "/etc/passwd/x", "/run/secrets", "/run/secrets/x", "/.dockerenv",
		"/.agentshim", "/.agentshim/init", "/.agentshim/init/x", harness.InitPath,
		"/workspace", "/x/../workspace/", ".", "", "~", "~root/x", "../x", "~/../x",
		"/a\nb", "/a\x1bb", "/a\xff", "/a\x7f",
	} {
		t.Run(to, func(t *testing.T) {
			engines(t, func(t *testing.T, podman bool) {
				_, err := Compile(withMount(harness.Mount{Source: "/data", Target: to}), facts(nil), target(podman))
				p := wantProblem(t, err, "$.mounts[0].target", ErrRefused)
				if errors.Is(p, ErrSource) {
					t.Errorf("%v is also ErrSource", p)
				}
			})
		})
	}
}

func TestAllowedTargets(t *testing.T) {
	for _, tc := range []struct{ to, want string }{
		{"/data", "/data"},
		{"/data/deep/er/", "/data/deep/er"},
		{"~/x", "/home/agent/x"},
		{"/home/agent/.npm", "/home/agent/.npm"},
		{"/home/other/deep", "/home/other/deep"},
		{"/tmp/x", "/tmp/x"},
		{"/run/x", "/run/x"},
		{"/processes", "/processes"},
		{"/devel/a,b:c d$e", "/devel/a,b:c d$e"},
		{"/etc/tool", "/etc/tool"},
		{"/workspace2", "/workspace2"},
		{"/-dash", "/-dash"},
	} {
		t.Run(tc.to, func(t *testing.T) {
			set, err := Compile(withMount(harness.Mount{Source: "/data", Target: tc.to}), facts(nil), target(false))
			if err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(set.Mounts, func(m Mount) bool { return m.Target == tc.want && m.Source == "/data" }) {
				t.Errorf("no mount on %q in %+v", tc.want, set.Mounts)
			}
		})
	}
}

func TestRelativeTargetNeedsWorkspace(t *testing.T) {
	h := withMount(harness.Mount{Source: "/data", Target: "data"})
	h.Workspace.Mode = "none"
	_, err := Compile(h, facts(nil), target(true))
	wantProblem(t, err, "$.mounts[0].target", ErrRefused)
}

// T08, T09, A62: nothing is created in a source, and a nested mount is allowed
// either way round where its target stands there.
func TestNestedTargets(t *testing.T) {
	const at = "/src/proj/sub/new"
	for _, tc := range []struct {
		name, source string
		nested       map[string]string
		refused      bool
	}{
		{"T08 absent", "/data", nil, true},
		{"folder on folder", "/data", map[string]string{at: NodeDir}, false},
		{"file on file", "/conf/one", map[string]string{at: NodeFile}, false},
		{"folder on file", "/data", map[string]string{at: NodeFile}, true},
		{"file on folder", "/conf/one", map[string]string{at: NodeDir}, true},
		{"on a link", "/data", map[string]string{at: NodeOther}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			engines(t, func(t *testing.T, podman bool) {
				for _, outer := range []string{"read-only", "writable"} {
					for _, writable := range []bool{false, true} {
						h := withMount(harness.Mount{Source: tc.source, Target: "sub/new", Writable: writable})
						h.Workspace.Mode = outer
						_, err := Compile(h, facts(func(f *Facts) { f.Nested = tc.nested }), target(podman))
						if !tc.refused {
							if err != nil {
								t.Error(err)
							}
							continue
						}
						p := wantProblem(t, err, "$.mounts[0].target", ErrRefused)
						if !strings.Contains(p.Reason, at) {
							t.Errorf("reason %q does not name %q", p.Reason, at)
						}
					}
				}
			})
		})
	}
}

func TestParentsComeFirst(t *testing.T) {
	h := base(func(h *harness.Harness) {
		h.Mounts = []harness.Mount{{Source: "/data", Target: "/m/a/b"}, {Source: "/more", Target: "/m/a"}}
	})
	set, err := Compile(h, facts(func(f *Facts) { f.Nested["/more/b"] = NodeDir }), target(false))
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range set.Mounts {
		for _, earlier := range set.Mounts[:i] {
			if below(earlier.Target, m.Target) {
				t.Errorf("%q comes before its parent %q", earlier.Target, m.Target)
			}
		}
	}
}

func TestDuplicateTargets(t *testing.T) {
	h := base(func(h *harness.Harness) {
		h.Mounts = []harness.Mount{{Source: "/data", Target: "/m"}, {Source: "/more", Target: "/x/../m/"}}
	})
	_, err := Compile(h, facts(nil), target(true))
	wantProblem(t, err, "$.mounts[1].target", ErrRefused)
	if p := problemAt(err, "$.mounts[0].target", ErrRefused); p != nil {
		t.Errorf("the first one is refused too: %v", p)
	}
}

func TestImageVolumesRefused(t *testing.T) {
	for _, v := range []string{
		"/", "/etc", "/etc/x", "/usr", "/usr/share/x", "/bin", "/lib64", "/proc", "/proc/x", "/sys", "/dev", "/boot", "/root", "/home", "/var",
		"relative", "", "/a/", "/a/../b", "//a", "/a:b", "/a,b", "/a\nb", "/a\xff",
		"/workspace/node_modules", "/.agentshim", "/.agentshim/init", harness.InitPath,
	} {
		t.Run(v, func(t *testing.T) {
			to := target(false)
			to.ImageVolumes = []string{v}
			_, err := Compile(base(nil), facts(nil), to)
			wantProblem(t, err, "$image.volumes[0]", ErrRefused)
			to = target(true)
			to.ImageVolumes = []string{v}
			set, err := Compile(base(nil), facts(nil), to)
			if err != nil || slices.ContainsFunc(set.Mounts, func(m Mount) bool { return m.Why == WhyImageVolume }) {
				t.Errorf("Podman ignores volumes; got %+v, %v", set.Mounts, err)
			}
		})
	}
}

func TestBelowImageVolume(t *testing.T) {
	to := target(false)
	to.ImageVolumes = []string{"/cache", "/cache/v/w"}
	set, err := Compile(withMount(harness.Mount{Source: "/data", Target: "/cache/a/b"}), facts(nil), to)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, m := range set.Mounts {
		if atOrBelow(m.Target, "/cache") {
			got[m.Target] = m.Why
		}
	}
	want := map[string]string{
		"/cache": WhyImageVolume, "/cache/a": WhyParent, "/cache/a/b": WhyMount, "/cache/v": WhyParent, "/cache/v/w": WhyImageVolume,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// T05: the sum is exact to the byte.
func TestTmpfsSum(t *testing.T) {
	const sum = (512 + 512 + 64 + 16) * miB
	for _, tc := range []struct {
		name    string
		memory  int64
		uid     uint32
		volumes []string
		refused bool
	}{
		{"just fits", sum + 64*miB, 1000, nil, false},
		{"one byte short", sum + 64*miB - 1, 1000, nil, true},
		{"no limit", 0, 0, nil, false},
		{"uid 0 fills /dev", sum + 64*miB, 0, nil, true},
		{"uid 0 with room", sum + 128*miB, 0, nil, false},
		{"image volume counts", sum + 64*miB, 1000, []string{"/v"}, true},
		{"image volume with room", sum + 80*miB, 1000, []string{"/v"}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			to := Target{MemoryBytes: tc.memory, UID: tc.uid, ImageVolumes: tc.volumes}
			_, err := Compile(base(nil), facts(nil), to)
			if !tc.refused {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			p := wantProblem(t, err, "$.resources.memoryMb", ErrRefused)
			if tc.name == "one byte short" && (!strings.Contains(p.Reason, "1104 MiB") || !strings.Contains(p.Remedy, "1168")) {
				t.Errorf("numbers are missing: %v", p)
			}
		})
	}
}

func TestTmpfsSizes(t *testing.T) {
	for _, tc := range []struct {
		at   string
		edit func(*harness.Harness, int)
	}{
		{"$.home.sizeMb", func(h *harness.Harness, n int) { h.Home.SizeMB = n }},
		{"$.tmpSizeMb", func(h *harness.Harness, n int) { h.TmpSizeMB = n }},
		{"$.resources.shmMb", func(h *harness.Harness, n int) { h.Resources.ShmMB = n }},
	} {
		for _, n := range []int{-1, maxTmpfsMB + 1} {
			t.Run(fmt.Sprint(tc.at, n), func(t *testing.T) {
				_, err := Compile(base(func(h *harness.Harness) { tc.edit(h, n) }), facts(nil), Target{})
				wantProblem(t, err, tc.at, ErrRefused)
			})
		}
		t.Run(tc.at+" zero is the default, never unlimited", func(t *testing.T) {
			set, err := Compile(base(func(h *harness.Harness) { tc.edit(h, 0) }), facts(nil), Target{})
			if err != nil {
				t.Fatal(err)
			}
			want, err := Compile(base(nil), facts(nil), Target{})
			if diff := cmp.Diff(want, set); diff != "" || err != nil {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestWorkspaceRefused(t *testing.T) {
	t.Run("no such mode", func(t *testing.T) {
		_, err := Compile(base(func(h *harness.Harness) { h.Workspace.Mode = "shared" }), facts(nil), target(true))
		wantProblem(t, err, "$.workspace.mode", ErrRefused)
	})
	t.Run("mounts below a copied one", func(t *testing.T) {
		h := base(func(h *harness.Harness) { h.Workspace.Mode = "copy" })
		_, err := Compile(h, facts(func(f *Facts) {
			s := f.Sources["/src/proj/."]
			s.Submounts = []string{"/src/proj/m"}
			f.Sources["/src/proj/."] = s
		}), target(true))
		wantProblem(t, err, "$.workspace.source", ErrRefused)
	})
	t.Run("sockets, which are not copied", func(t *testing.T) {
		for mode, refused := range map[string]bool{"copy": false, "read-only": true} {
			h := base(func(h *harness.Harness) { h.Workspace.Mode = mode })
			_, err := Compile(h, facts(func(f *Facts) {
				s := f.Sources["/src/proj/."]
				s.Sockets = []string{"/src/proj/s"}
				f.Sources["/src/proj/."] = s
			}), target(true))
			if errors.Is(err, ErrRefused) != refused {
				t.Errorf("%s: %v", mode, err)
			}
		}
	})
	t.Run("a file is no workspace", func(t *testing.T) {
		h := base(func(h *harness.Harness) { h.Workspace.Source = "/conf/one" })
		_, err := Compile(h, facts(nil), target(true))
		wantProblem(t, err, "$.workspace.source", ErrRefused)
	})
}

// M17. What is refused is refused on every host, also where no engine would relabel.
func TestLabels(t *testing.T) {
	type where struct{ podman, selinux bool }
	everywhere := []where{{true, true}, {true, false}, {false, false}}
	mine := func(path string) Source { return Source{Path: path, Dir: true, UID: 1000} }
	for _, tc := range []struct {
		name, label string
		source      Source
		edit        func(*harness.Harness, *Facts)
		on          []where
		// want is in the refusal; empty is a mount with the label.
		want string
	}{
		{"shared", "z", mine("/data"), nil, everywhere, ""},
		{"private", "Z", mine("/data"), nil, everywhere, ""},
		{"none", "none", mine("/etc/tool"), nil, append(everywhere, where{false, true}), ""},
		{"a folder in a home", "Z", mine("/home/me/proj"), nil, everywhere, ""},
		{"Docker can't", "z", mine("/data"), nil, []where{{false, true}}, "chcon"},
		{"below /usr", "z", mine("/usr/share/x"), nil, everywhere, "break the host"},
		{"below /etc", "Z", mine("/etc/tool"), nil, everywhere, "break the host"},
		{"below a linked system folder", "z", mine("/system/share"), func(_ *harness.Harness, f *Facts) { f.SystemLinks = map[string]string{"/usr": "/system"} }, everywhere, "break the host"},
		{"a home's .ssh", "Z", mine("/home/me/.ssh"), nil, everywhere, "break the host"},
		{"another's", "z", Source{Path: "/data", Dir: true, UID: 1001}, nil, everywhere, "not yours"},
		{"root's", "z", Source{Path: "/data", Dir: true}, nil, everywhere, "not yours"},
		{"the agent's, root calls", "z", mine("/data"), func(_ *harness.Harness, f *Facts) { f.UID = 0 }, everywhere, ""},
		{"another's, root calls", "z", Source{Path: "/data", Dir: true, UID: 1001}, func(_ *harness.Harness, f *Facts) { f.UID = 0 }, everywhere, "not yours"},
		{"above the workspace", "z", mine("/src"), nil, everywhere, "holds the workspace"},
		{"the workspace once more", "z", mine("/src/proj"), nil, everywhere, ""},
		{"in the workspace", "z", mine("/src/proj/sub"), nil, everywhere, "put a link"},
		{"in a writable mount", "Z", mine("/more/sub"), func(h *harness.Harness, _ *Facts) {
			h.Mounts = append(h.Mounts, harness.Mount{Source: "/more", Target: "/more", Writable: true})
		}, everywhere, "put a link"},
		{"in a read-only mount", "Z", mine("/more/sub"), func(h *harness.Harness, _ *Facts) {
			h.Mounts = append(h.Mounts, harness.Mount{Source: "/more", Target: "/more"})
		}, everywhere, ""},
		{"unknown", "x", mine("/data"), nil, everywhere, "no label"},
	} {
		for _, on := range tc.on {
			t.Run(fmt.Sprintf("%s %+v", tc.name, on), func(t *testing.T) {
				f := facts(func(f *Facts) { f.UID, f.SELinux = 1000, on.selinux })
				f.Sources["/data"] = tc.source
				h := withMount(harness.Mount{Source: "/data", Target: "/data", Label: tc.label})
				if tc.edit != nil {
					tc.edit(&h, &f)
				}
				to := target(on.podman)
				to.SELinux = on.selinux
				set, err := Compile(h, f, to)
				if tc.want != "" {
					wantProblem(t, err, "$.mounts[0].label", ErrRefused)
					if !strings.Contains(err.Error(), tc.want) {
						t.Error(err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				want := strings.TrimPrefix(tc.label, "none")
				if !on.selinux {
					want = ""
				}
				if i := slices.IndexFunc(set.Mounts, func(m Mount) bool { return m.Target == "/data" }); set.Mounts[i].Label != want {
					t.Errorf("label = %q, want %q", set.Mounts[i].Label, want)
				}
			})
		}
	}
}

func TestWarnings(t *testing.T) {
	file := harness.Mount{Source: "/conf/one", Target: "/x", Writable: true}
	dir := harness.Mount{Source: "/data", Target: "/x"}
	confined := func(podman bool) Target {
		to := target(podman)
		to.SELinux = true
		return to
	}
	selinux := func(label string) func(*Facts) {
		return func(f *Facts) {
			f.SELinux, f.Sources["/data"] = true, Source{Path: "/data", Dir: true, Label: label}
		}
	}
	groupOnly := func(f *Facts) { f.Sources["/data"] = Source{Path: "/data", Dir: true, GID: 77, GroupOnly: true} }
	for _, tc := range []struct {
		name   string
		mount  harness.Mount
		facts  func(*Facts)
		groups []int
		target Target
		want   string
	}{
		{"nothing", dir, nil, nil, target(true), ""},
		{"M07 M08 writable file", file, nil, nil, target(false), "EBUSY"},
		{"read-only file", harness.Mount{Source: "/conf/one", Target: "/x"}, nil, nil, target(false), ""},
		{"writable folder", harness.Mount{Source: "/data", Target: "/x", Writable: true}, nil, nil, target(false), ""},
		{"noexec below", dir, func(f *Facts) { f.Sources["/data"] = Source{Path: "/data", Dir: true, NoExec: true} }, nil, target(false), "noexec"},
		{"U07 docker", dir, groupOnly, nil, target(false), "supplementary group 77"},
		{"U07 docker with the group", dir, groupOnly, []int{77}, target(false), ""},
		{"U07 rootless maps no groups", dir, groupOnly, []int{77}, target(true), "supplementary group 77"},
		{"SELinux without label", dir, func(f *Facts) { f.SELinux = true }, nil, confined(true), `"label": "z"`},
		{"SELinux and Docker", dir, func(f *Facts) { f.SELinux = true }, nil, confined(false), "chcon -R -t container_file_t"},
		{"SELinux that the engine does not use", dir, func(f *Facts) { f.SELinux = true }, nil, target(true), ""},
		{"SELinux that is not enforced", dir, nil, nil, confined(true), ""},
		{"labelled for containers", dir, selinux("system_u:object_r:container_file_t:s0"), nil, confined(true), ""},
		{"labelled for one container", dir, selinux("system_u:object_r:container_file_t:s0:c1,c2"), nil, confined(true), "SELinux"},
		{"labelled as a home", dir, selinux("unconfined_u:object_r:user_home_t:s0"), nil, confined(true), "SELinux"},
		{"label without effect", harness.Mount{Source: "/data", Target: "/x", Label: "z"}, nil, nil, target(true), "no effect"},
		{"label with effect", harness.Mount{Source: "/data", Target: "/x", Label: "z"}, func(f *Facts) { f.SELinux = true }, nil, confined(true), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := withMount(tc.mount)
			h.Workspace, h.Groups = nil, tc.groups
			set, err := Compile(h, facts(tc.facts), tc.target)
			if err != nil {
				t.Fatal(err)
			}
			got := strings.Join(set.Warnings, "\n")
			if tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
				t.Errorf("warnings = %q, want %q", got, tc.want)
			}
			if got != "" && !strings.HasPrefix(got, "$.mounts[0]: ") {
				t.Errorf("warning without its JSON path: %q", got)
			}
		})
	}
}

func TestReadOnlyReachableWritable(t *testing.T) {
	for _, tc := range []struct {
		name, target string
		want         int
	}{
		{"elsewhere", "/ro", 1},
		{"on its own place", "sub", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := withMount(harness.Mount{Source: "./sub", Target: tc.target})
			h.Workspace.Mode = "writable"
			f := facts(func(f *Facts) { f.Nested["/src/proj/sub"] = NodeDir })
			set, err := Compile(h, f, target(false))
			if err != nil || len(set.Warnings) != tc.want {
				t.Errorf("warnings = %q, %v; want %d", set.Warnings, err, tc.want)
			}
		})
	}
}

func TestEveryProblemIsReported(t *testing.T) {
	h := base(func(h *harness.Harness) {
		h.Workspace.Mode, h.Home.SizeMB = "shared", -1
		h.Mounts = []harness.Mount{{Source: "~", Target: "/"}, {Source: "/data", Target: "/proc"}, {Source: "/more", Target: "/x", Label: "q"}}
	})
	to := target(false)
	to.ImageVolumes = []string{"rel"}
	_, err := Compile(h, facts(nil), to)
	for at, kind := range map[string]error{
		"$.workspace.mode": ErrRefused, "$.home.sizeMb": ErrRefused, "$.mounts[0].source": ErrSource, "$.mounts[0].target": ErrRefused,
		"$.mounts[1].target": ErrRefused, "$.mounts[2].label": ErrRefused, "$image.volumes[0]": ErrRefused,
	} {
		wantProblem(t, err, at, kind)
	}
}

func TestCompileIsStableAndPure(t *testing.T) {
	h := base(func(h *harness.Harness) {
		h.Mounts = []harness.Mount{{Source: "/more", Target: "/b"}, {Source: "/data", Target: "/a"}}
	})
	to := target(false)
	to.ImageVolumes = []string{"/z", "/y"}
	f := facts(nil)
	first, err := Compile(h, f, to)
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(to.ImageVolumes)
	again, err := Compile(h, f, to)
	if diff := cmp.Diff(first, again); diff != "" || err != nil {
		t.Errorf("%v (-first +again):\n%s", err, diff)
	}
	if diff := cmp.Diff(facts(nil), f); diff != "" {
		t.Errorf("facts changed:\n%s", diff)
	}
	if !slices.Equal(to.ImageVolumes, []string{"/y", "/z"}) {
		t.Errorf("image volumes changed: %q", to.ImageVolumes)
	}
}
