package shim

import (
	"errors"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/spec"
)

func TestWantedEngine(t *testing.T) {
	for _, tc := range []struct {
		name, engine string
		vars         map[string]string
		want         string
		err          error
	}{
		{"nothing", "", nil, "auto", nil},
		{"auto", "auto", nil, "auto", nil},
		{"flag before variables", "podman", map[string]string{"AGENTSHIM_ENGINE": "docker"}, "podman", nil},
		{"ours first", "auto", map[string]string{"AGENTSHIM_ENGINE": "podman", "DAGU_CONTAINER_RUNTIME": "docker"}, "podman", nil},
		{"ours is auto", "auto", map[string]string{"AGENTSHIM_ENGINE": "auto", "DAGU_CONTAINER_RUNTIME": "docker"}, "docker", nil},
		{"dagu's", "", map[string]string{"DAGU_CONTAINER_RUNTIME": "docker"}, "docker", nil},
		{"unknown flag", "nerdctl", nil, "", ReasonSpecInvalid},
		{"unknown variable", "auto", map[string]string{"AGENTSHIM_ENGINE": "Docker"}, "", ReasonSpecInvalid},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := wantedEngine(ProbeOptions{Engine: tc.engine, Getenv: env(tc.vars)})
			if got != tc.want || (err != nil) != (tc.err != nil) || tc.err != nil && !errors.Is(err, tc.err) {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

func TestProbeEngineAuto(t *testing.T) {
	daemon := startDaemon(t, nil)
	podmanService := startDaemon(t, map[string]http.HandlerFunc{"/version": answer(`{"Components":[{"Name":"Podman Engine"}]}`)})
	old := startDaemon(t, map[string]http.HandlerFunc{"/version": answer(versionJSON("19.3.1", "1.40", mustKernel(t)))})
	none := filepath.Join(shortDir(t), "none.sock")
	identify := identifyCall(dockerClientJSON, noServer)
	asPodman := scriptedCall{argv: []string{"/usr/bin/docker", "info", "--format", "json"}, out: rootfulInfo}
	for _, tc := range []struct {
		name     string
		programs []string
		socket   string
		vars     map[string]string
		calls    []scriptedCall
		want     string
		client   string
		err      error
		mentions []string
	}{
		{"both", []string{"docker", "podman"}, daemon.socket, nil, []scriptedCall{identify}, spec.Docker, "/usr/bin/docker", nil, nil},
		{"client but no daemon", []string{"docker", "podman"}, none, nil, []scriptedCall{identify, infoCall(rootfulInfo, nil)}, spec.Podman, "/usr/bin/podman", nil, nil},
		{"only podman", []string{"podman"}, none, nil, []scriptedCall{infoCall(rootfulInfo, nil)}, spec.Podman, "/usr/bin/podman", nil, nil},
		{"L09 docker is podman", []string{"docker"}, none, nil, []scriptedCall{identifyCall(podmanClientJSON, nil), asPodman}, spec.Podman, "/usr/bin/docker", nil, nil},
		{"L09 podman on docker's socket", []string{"docker", "podman"}, podmanService.socket, nil, []scriptedCall{identify, infoCall(rootfulInfo, nil)}, spec.Podman, "/usr/bin/podman", nil, nil},
		{"A95 neither", nil, none, nil, nil, "", "", ReasonEngineMissing, []string{"no docker client", "no podman"}},
		{"docker down and no podman", []string{"docker"}, none, nil, []scriptedCall{identify}, "", "", ReasonEngineDown, []string{"no socket", "no podman"}},
		{"docker down and podman broken", []string{"docker", "podman"}, none, nil, []scriptedCall{identify, infoCall("", failedCall(125, "Error: boom", "podman", "info"))}, "", "", ReasonEngineDown, []string{"no socket", "boom"}},
		{"M21 remote docker is not passed over", []string{"docker", "podman"}, "", map[string]string{"DOCKER_HOST": "tcp://127.0.0.1:1"}, nil, "", "", ReasonEngineRemote, []string{"tcp://127.0.0.1:1"}},
		{"bad context is not passed over", []string{"docker", "podman"}, "", map[string]string{"DOCKER_CONTEXT": "nope"}, nil, "", "", ReasonEngineContext, []string{"nope"}},
		{"old docker is not passed over", []string{"docker", "podman"}, old.socket, nil, []scriptedCall{identify}, "", "", ReasonEngineUnsupported, []string{"19.3.1"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			vars := map[string]string{"PATH": "/usr/bin", "HOME": "/home/u"}
			if tc.socket != "" {
				vars["DOCKER_HOST"] = "unix://" + tc.socket
			}
			for k, v := range tc.vars {
				vars[k] = v
			}
			uid := 0
			a, err := ProbeEngine(t.Context(), ProbeOptions{
				DockerConfig: t.TempDir(), Getenv: env(vars), Runner: script(t, tc.calls...), root: fakeHost(t, append(tc.programs, "crun")...), uid: &uid,
			})
			if tc.err == nil {
				if err != nil {
					t.Fatal(err)
				}
				if e := a.Engine(); e.Kind != tc.want || e.Client != tc.client {
					t.Errorf("%s at %s", e.Kind, e.Client)
				}
				return
			}
			if !errors.Is(ReasonOf(err), tc.err) {
				t.Fatalf("%s: %v", ReasonOf(err), err)
			}
			for _, text := range tc.mentions {
				if strings.Count(err.Error(), text) != 1 {
					t.Errorf("%q does not say %q once", err, text)
				}
			}
		})
	}
}

func mustKernel(t *testing.T) string {
	t.Helper()
	kernel, err := kernelRelease()
	if err != nil {
		t.Fatal(err)
	}
	return kernel
}

func TestAtLeast(t *testing.T) {
	for version, want := range map[string]bool{
		"20.10.24+dfsg1": true, "20.10": true, "28.2.2": true, "20.11-rc1": true, "20.9.9": false, "19.99.1": false,
		"": false, "20": false, "v20.10": false, "dev": false, "master.dockerproject": false, "20.x": false,
	} {
		if got := atLeast(version, 20, 10); got != want {
			t.Errorf("%q: %v", version, got)
		}
	}
}

func TestLookPathSkipsWhatCannotRun(t *testing.T) {
	root := t.TempDir()
	writeFile(t, root, "/a/docker", "", 0o644)
	writeFile(t, root, "/b/docker/x", "", 0o755)
	writeFile(t, root, "/c/docker", "", 0o755)
	got, ok := lookPath(ProbeOptions{root: root, Getenv: env(map[string]string{"PATH": ":.:c:/a:/b:/c"})}, "docker")
	if got != "/c/docker" || !ok {
		t.Errorf("%q, %v", got, ok)
	}
}

func TestCacheFolder(t *testing.T) {
	base := t.TempDir()
	link := filepath.Join(base, "link")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(base, "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		dir  string
		want bool
	}{
		"made": {filepath.Join(base, "a/b"), true}, "link": {link, false}, "readable by others": {open, false}, "relative": {"x", false}, "none": {"", false},
	} {
		t.Run(name, func(t *testing.T) {
			c := openCache(tc.dir)
			c.put("x", "k", 7)
			var got int
			if hit := c.get("x", "k", &got); hit != tc.want || hit && got != 7 {
				t.Errorf("hit %v, value %d", hit, got)
			}
			if c.get("x", "other", &got) {
				t.Error("a hit with another key")
			}
			if tc.want {
				st, err := os.Stat(c.file("x"))
				if err != nil || st.Mode().Perm() != 0o600 {
					t.Errorf("mode %v, %v", st.Mode(), err)
				}
			}
		})
	}
}

func TestProbeMachineAndCaller(t *testing.T) {
	machine, err := ProbeMachine()
	if err != nil {
		t.Fatal(err)
	}
	if machine.OS != "linux" || machine.Kernel != mustKernel(t) || machine.MemoryBytes < 64<<20 {
		t.Errorf("%+v", machine)
	}
	for _, kind := range []string{"pid", "net", "mnt", "user", "uts", "ipc"} {
		if link := machine.Namespaces[kind]; !strings.HasPrefix(link, kind+":[") {
			t.Errorf("namespace %s is %q", kind, link)
		}
	}
	caller, err := ProbeCaller(env(map[string]string{"HOME": "/h"}))
	if err != nil {
		t.Fatal(err)
	}
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		t.Fatal(err)
	}
	if caller.UID != uint32(os.Getuid()) || caller.CPUs < 1 || caller.Home != "/h" || caller.HardNoFile != files.Max {
		t.Errorf("%+v", caller)
	}
}

func TestHardLimit(t *testing.T) {
	const text = "Limit                     Soft Limit           Hard Limit           Units     \n" +
		"Max processes             10                   unlimited            processes \n" +
		"Max open files            1024                 524288               files     \n" +
		"Max file locks            x\n"
	for row, want := range map[string]struct {
		n  uint64
		ok bool
	}{
		"Max open files": {524288, true}, "Max processes": {math.MaxUint64, true}, "Max file locks": {0, false}, "Max nice": {0, false},
	} {
		if n, ok := hardLimit(text, row); n != want.n || ok != want.ok {
			t.Errorf("%s: %d, %v", row, n, ok)
		}
	}
}

// U06: the ranges are those of the user by name or by number, summed.
func TestSubordinate(t *testing.T) {
	root := t.TempDir()
	writeFile(t, root, "/etc/subuid", "# comment\nother:1:9\n424242:100000:65536\n424242:300000:1000\n424242:x:1\n424242:1\n", 0o644)
	uid := 424242
	uids, gids := subordinate(ProbeOptions{root: root, uid: &uid})
	if uids != 66536 || gids != 0 {
		t.Errorf("%d, %d", uids, gids)
	}
}

func TestParseCgroups(t *testing.T) {
	for name, tc := range map[string]struct {
		mounts  string
		said    string
		version int
		hybrid  bool
	}{
		"hybrid":           {hybridMounts, "1", 1, true},
		"v2":               {"30 1 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n", "2", 2, false},
		"v1":               {"32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n", "", 1, false},
		"v2 and said none": {"30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "", 2, false},
		"systemd's name only beside v2": {"30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n" +
			"31 1 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n", "2", 2, false},
		"nothing": {"bad line\n", "", 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			got := parseCgroups(tc.mounts)
			if got.hybrid() != tc.hybrid || got.version(tc.said) != tc.version {
				t.Errorf("%+v: version %d", got, got.version(tc.said))
			}
		})
	}
}

// A72: an old number is a remark that names the fault, since packages patch old numbers.
func TestRuntimeNotes(t *testing.T) {
	for _, tc := range []struct {
		runtime, version string
		want             []string
	}{
		{"runc", "1.1.5+ds1", []string{"CVE-2024-21626", "CVE-2024-45310", "CVE-2025-31133"}},
		{"runc", "1.1.12", []string{"CVE-2024-45310", "CVE-2025-31133"}},
		{"runc", "1.2.7", []string{"CVE-2025-31133"}},
		{"runc", "1.2.8", nil},
		{"runc", "1.3.2", []string{"CVE-2025-31133"}},
		{"runc", "1.3.6", nil},
		{"runc", "1.4.0", nil},
		{"runc", "unknown", nil},
		{"crun", "1.8.1", nil},
		{"crun", "1.4.3", []string{"CVE-2022-27650"}},
	} {
		t.Run(tc.runtime+" "+tc.version, func(t *testing.T) {
			got := strings.Join(runtimeNotes(tc.runtime, tc.version), "\n")
			var named []string
			for _, cve := range []string{"CVE-2024-21626", "CVE-2024-45310", "CVE-2025-31133", "CVE-2022-27650"} {
				if strings.Contains(got, cve) {
					named = append(named, cve)
				}
			}
			if diff := cmp.Diff(tc.want, named); diff != "" {
				t.Error(diff)
			}
		})
	}
}
