package shim

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/spec"
)

// rootfulInfo and rootlessInfo are `podman info --format json` of Podman 4.3.1, cut to
// what matters.
const rootfulInfo = `{"host":{"buildahVersion":"1.28.2","cgroupManager":"cgroupfs","cgroupVersion":"v1",
"cgroupControllers":["cpuset","cpu","cpuacct","blkio","memory","devices","freezer","pids"],
"idMappings":{"gidmap":null,"uidmap":null},
"ociRuntime":{"name":"crun","path":"/usr/bin/crun","version":"crun version 1.8.1\ncommit: f8a096be\nspec: 1.0.0"},
"serviceIsRemote":false,"security":{"apparmorEnabled":false,"rootless":false,"seccompEnabled":true,"selinuxEnabled":false}},
"store":{"graphRoot":"/var/lib/containers/storage","runRoot":"/run/containers/storage","volumePath":"/var/lib/containers/storage/volumes"},
"version":{"APIVersion":"4.3.1","Version":"4.3.1"}}`

const rootlessInfo = `{"host":{"buildahVersion":"1.28.2","cgroupManager":"systemd","cgroupVersion":"v2","cgroupControllers":["memory","cpu","pids"],
"idMappings":{"gidmap":[{"container_id":0,"host_id":424242,"size":1},{"container_id":1,"host_id":100000,"size":65536}],
"uidmap":[{"container_id":0,"host_id":424242,"size":1},{"container_id":1,"host_id":100000,"size":65536}]},
"ociRuntime":{"name":"crun","path":"/usr/bin/crun","version":"crun version 1.8.1"},
"serviceIsRemote":false,"security":{"rootless":true,"seccompEnabled":true}},
"store":{"graphRoot":"/home/u/.local/share/containers/storage","runRoot":"/run/user/424242/containers","volumePath":"/home/u/.local/share/containers/storage/volumes"},
"version":{"Version":"4.9.0"}}`

const hybridMounts = `31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
`

func infoCall(answer string, err error) scriptedCall {
	return scriptedCall{argv: []string{"/usr/bin/podman", "info", "--format", "json"}, out: answer, err: err}
}

func rootfulOptions(root string, runner Runner) ProbeOptions {
	uid := 0
	return ProbeOptions{
		Engine: spec.Podman, Runner: runner, root: root, uid: &uid,
		Getenv: env(map[string]string{
			"PATH": "/usr/bin:/opt/pod", "HOME": "/root", "XDG_CONFIG_HOME": "/root/.config", "HTTPS_PROXY": "http://p", "REGISTRY_AUTH_FILE": "/a.json",
			"CONTAINERS_CONF": "/c.conf", "LD_PRELOAD": "/x.so", "TMPDIR": "/big",
		}),
	}
}

// rootlessHost has all that rootless Podman needs.
func rootlessHost(t *testing.T) string {
	t.Helper()
	root := fakeHost(t, "podman", "crun")
	for _, name := range []string{"newuidmap", "newgidmap"} {
		writeFile(t, root, "/usr/bin/"+name, "#!", 0o755|os.ModeSetuid)
	}
	writeFile(t, root, "/etc/subuid", "other:100000:65536\n424242:165536:65536\n", 0o644)
	writeFile(t, root, "/etc/subgid", "424242:165536:65536\n", 0o644)
	return root
}

func rootlessOptions(root string, runner Runner) ProbeOptions {
	uid := 424242
	return ProbeOptions{
		Engine: spec.Podman, Runner: runner, root: root, uid: &uid,
		Getenv: env(map[string]string{"PATH": "/usr/bin", "HOME": "/home/u"}),
	}
}

func TestProbePodmanRootful(t *testing.T) {
	root := fakeHost(t, "podman", "crun")
	writeFile(t, root, "/opt/pod/conmon", "#!", 0o755)
	check := infoCall(rootfulInfo, nil)
	wantEnv := []string{
		"LC_ALL=C", "PATH=" + systemPath + ":/opt/pod", "HOME=/root", "XDG_CONFIG_HOME=/root/.config", "TMPDIR=/big",
	}
	check.check = func(t *testing.T, c Command) {
		if diff := cmp.Diff(wantEnv, c.Env); diff != "" {
			t.Error(diff)
		}
	}
	o := rootfulOptions(root, script(t, check))
	a, err := ProbeEngine(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	want := spec.Engine{
		Kind: spec.Podman, Client: "/usr/bin/podman", Version: "4.3.1", CgroupVersion: 1, CgroupDriver: "cgroupfs", LimitsHold: true,
		Runtime: "crun", RuntimeVersion: "1.8.1",
		Dirs: []string{"/var/lib/containers/storage", "/run/containers/storage", "/var/lib/containers/storage/volumes"},
	}
	if diff := cmp.Diff(want, a.Engine()); diff != "" {
		t.Error(diff)
	}
	// X01: Podman lowers its own limit of processes to the kernel's pid_max.
	ownFiles, ownProcs, err := ownHardLimits()
	if nofile, nproc := a.HardLimits(); err != nil || nofile != ownFiles || nproc != min(77, ownProcs) {
		t.Errorf("limits %d, %d; own are %d, %d (%v)", nofile, nproc, ownFiles, ownProcs, err)
	}
	cmd := a.Command("rm", "x")
	if diff := cmp.Diff([]string{"/usr/bin/podman", "rm", "x"}, cmd.Argv()); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(wantEnv, cmd.Env); diff != "" {
		t.Error(diff)
	}
}

func TestProbePodmanRootless(t *testing.T) {
	a, err := ProbeEngine(t.Context(), rootlessOptions(rootlessHost(t), script(t, infoCall(rootlessInfo, nil))))
	if err != nil {
		t.Fatal(err)
	}
	if e := a.Engine(); !e.Rootless || !e.LimitsHold || e.CgroupVersion != 2 || e.RuntimePath != "" {
		t.Errorf("%+v", e)
	}
}

func TestPodmanLimitsHold(t *testing.T) {
	all := []string{"cpuset", "cpu", "memory", "pids"}
	for _, tc := range []struct {
		name        string
		engine      spec.Engine
		controllers []string
		want        bool
	}{
		{"rootful v1", spec.Engine{CgroupVersion: 1, CgroupDriver: "cgroupfs"}, all, true},
		{"rootful without pids", spec.Engine{CgroupVersion: 1}, all[:3], false},
		{"rootless v2 delegated", spec.Engine{Rootless: true, CgroupVersion: 2, CgroupDriver: "systemd"}, all, true},
		{"rootless v2 without cpu", spec.Engine{Rootless: true, CgroupVersion: 2, CgroupDriver: "systemd"}, []string{"memory", "pids"}, false},
		{"X02 rootless v1", spec.Engine{Rootless: true, CgroupVersion: 1, CgroupDriver: "systemd"}, all, false},
		{"X04 rootless cgroupfs", spec.Engine{Rootless: true, CgroupVersion: 2, CgroupDriver: "cgroupfs"}, all, false},
		{"nothing known", spec.Engine{}, nil, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := len(podmanLacks(tc.engine, tc.controllers)) == 0; got != tc.want {
				t.Errorf("%v", got)
			}
		})
	}
}

// X03: crun refuses a hybrid set-up whose v2 side owns a controller.
func TestPodmanRuntimeOnHybridCgroups(t *testing.T) {
	runc := scriptedCall{argv: []string{"/usr/sbin/runc", "--version"}, out: "runc version 1.3.6\ncommit: x\n"}
	for _, tc := range []struct {
		name        string
		info        string
		controllers string
		runc        bool
		calls       []scriptedCall
		want        spec.Engine
		err         error
	}{
		{"runc is there", rootfulInfo, "hugetlb\n", true, []scriptedCall{runc}, spec.Engine{Runtime: "runc", RuntimePath: "/usr/sbin/runc", RuntimeVersion: "1.3.6", CgroupHybrid: true}, nil},
		{"runc is missing", rootfulInfo, "hugetlb\n", false, nil, spec.Engine{}, ReasonEngineUnsupported},
		{"v2 owns nothing", rootfulInfo, "\n", false, nil, spec.Engine{Runtime: "crun", RuntimeVersion: "1.8.1", CgroupHybrid: true}, nil},
		{"runc by configuration", strings.ReplaceAll(rootfulInfo, "crun", "runc"), "hugetlb\n", true, nil, spec.Engine{Runtime: "runc", RuntimeVersion: "1.8.1", CgroupHybrid: true}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := fakeHost(t, "podman", "crun")
			writeFile(t, root, "/proc/self/mountinfo", hybridMounts, 0o444)
			writeFile(t, root, "/sys/fs/cgroup/unified/cgroup.controllers", tc.controllers, 0o444)
			if tc.runc {
				writeFile(t, root, "/usr/sbin/runc", "#!", 0o755)
			}
			a, err := ProbeEngine(t.Context(), rootfulOptions(root, script(t, append([]scriptedCall{infoCall(tc.info, nil)}, tc.calls...)...)))
			if tc.err != nil {
				if !errors.Is(err, tc.err) || !strings.Contains(HintOf(err), "runc") {
					t.Errorf("%v, hint %q", err, HintOf(err))
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			e := a.Engine()
			got := spec.Engine{Runtime: e.Runtime, RuntimePath: e.RuntimePath, RuntimeVersion: e.RuntimeVersion, CgroupHybrid: e.CgroupHybrid}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestPodmanRefused(t *testing.T) {
	for _, tc := range []struct {
		name string
		call scriptedCall
		want Reason
		hint string
	}{
		{"remote by configuration", infoCall(strings.Replace(rootfulInfo, `"serviceIsRemote":false`, `"serviceIsRemote":true`, 1), nil), ReasonEngineRemote, "remote=true"},
		{"remote that does not answer", infoCall("", failedCall(125, "Cannot connect to Podman. Please verify your connection", "podman")), ReasonEngineRemote, "remote=true"},
		{"old", infoCall(strings.Replace(rootfulInfo, `"Version":"4.3.1"}`, `"Version":"4.2.9"}`, 1), nil), ReasonEngineUnsupported, "4.3"},
		{"no seccomp", infoCall(strings.Replace(rootfulInfo, `"seccompEnabled":true`, `"seccompEnabled":false`, 1), nil), ReasonEngineUnsupported, "seccomp"},
		{"not Podman", infoCall(`{"host":{}}`, nil), ReasonEngineMissing, "install Podman"},
		{"not JSON", infoCall(`Podman`, nil), ReasonEngineMissing, "install Podman"},
		{"A71 namespace", infoCall("", failedCall(125, `cannot set up namespace using "/usr/bin/newuidmap": exit status 1`, "podman")), ReasonEngineUnsupported, "/etc/subuid"},
		{"own error", infoCall("", failedCall(125, "Error: boom", "podman")), ReasonEngineFailed, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := ProbeEngine(t.Context(), rootfulOptions(fakeHost(t, "podman", "crun"), script(t, tc.call)))
			if !errors.Is(err, tc.want) || !strings.Contains(HintOf(err), tc.hint) {
				t.Errorf("%s: %v, hint %q", ReasonOf(err), err, HintOf(err))
			}
		})
	}
}

// M21: nothing is run where a variable points elsewhere.
func TestPodmanRemoteByVariable(t *testing.T) {
	for _, name := range []string{"CONTAINER_HOST", "CONTAINER_CONNECTION", "DAGU_PODMAN_HOST"} {
		t.Run(name, func(t *testing.T) {
			o := rootfulOptions(fakeHost(t, "podman"), script(t))
			o.Getenv = env(map[string]string{"PATH": "/usr/bin", name: "ssh://me:secret@far/run/podman.sock"})
			_, err := ProbeEngine(t.Context(), o)
			if !errors.Is(err, ReasonEngineRemote) || !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), "secret") {
				t.Errorf("%v", err)
			}
		})
	}
}

// An orchestrator's Podman is this user's own, or another's.
func TestPodmanServiceOfTheCaller(t *testing.T) {
	for host, want := range map[string]bool{
		"unix:///run/podman/podman.sock": true, "/run/podman/podman.sock": true, "unix:///run/user/7/podman/podman.sock": false,
		"unix:///run/podman/podman.sock/../../x": false, "tcp://127.0.0.1:1": false, "ssh://me@far/run/podman/podman.sock": false,
	} {
		o := rootfulOptions(fakeHost(t, "podman"), script(t))
		o.Getenv = env(map[string]string{"DAGU_PODMAN_HOST": host})
		if err := checkPodmanLocal(o); (err == nil) != want {
			t.Errorf("%s: %v", host, err)
		}
		o.Getenv = env(map[string]string{"CONTAINER_HOST": host})
		if err := checkPodmanLocal(o); err == nil {
			t.Errorf("%s: Podman itself would go there", host)
		}
	}
}

func TestRootlessPrerequisites(t *testing.T) {
	for _, tc := range []struct {
		name string
		edit func(t *testing.T, root string)
		vars map[string]string
		want string // in the message, "" for no error
		hint string
	}{
		{"all there", func(*testing.T, string) {}, nil, "", ""},
		{"A71 no subuid", func(t *testing.T, root string) {
			writeFile(t, root, "/etc/subuid", "other:100000:65536\n", 0o644)
		}, nil, "/etc/subuid", "usermod --add-subuids 165536-231071 424242"},
		{"A71 no file", func(t *testing.T, root string) { os.Remove(filepath.Join(root, "etc/subgid")) }, nil, "/etc/subgid", "usermod --add-subgids 100000-165535 424242"},
		{"ranges in the name service", func(t *testing.T, root string) {
			os.Remove(filepath.Join(root, "etc/subuid"))
			writeFile(t, root, "/etc/nsswitch.conf", "passwd: files sss\nsubid: sss\n", 0o644)
		}, nil, "", ""},
		{"no newgidmap", func(t *testing.T, root string) { os.Remove(filepath.Join(root, "usr/bin/newgidmap")) }, nil, "newgidmap", "uidmap"},
		{"newuidmap without privilege", func(t *testing.T, root string) {
			os.Chmod(filepath.Join(root, "usr/bin/newuidmap"), 0o755)
		}, nil, "setuid bit", "uidmap"},
		{"L10 runtime folder of another user", func(t *testing.T, root string) {
			os.MkdirAll(filepath.Join(root, "run/user/0"), 0o700)
		}, map[string]string{"XDG_RUNTIME_DIR": "/run/user/0"}, "another user", "unset XDG_RUNTIME_DIR"},
		{"L10 no runtime folder", func(*testing.T, string) {}, map[string]string{"XDG_RUNTIME_DIR": "/run/user/1"}, "XDG_RUNTIME_DIR", "loginctl enable-linger"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := rootlessHost(t)
			tc.edit(t, root)
			var calls []scriptedCall
			if tc.want == "" {
				calls = append(calls, infoCall(rootlessInfo, nil))
			}
			o := rootlessOptions(root, script(t, calls...))
			vars := map[string]string{"PATH": "/usr/bin", "HOME": "/home/u"}
			for k, v := range tc.vars {
				vars[k] = v
			}
			o.Getenv = env(vars)
			_, err := ProbeEngine(t.Context(), o)
			if tc.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(HintOf(err), tc.hint) {
				t.Errorf("%v, hint %q", err, HintOf(err))
			}
			if r := ReasonOf(err); r != ReasonEngineUnsupported && r != ReasonEngineDenied {
				t.Errorf("reason %s", r)
			}
		})
	}
}

func TestPodmanInfoIsCachedUntilSomethingChanges(t *testing.T) {
	for _, tc := range []struct {
		name  string
		again bool // whether podman must be asked again
		edit  func(t *testing.T, o *ProbeOptions)
	}{
		{"nothing", false, func(*testing.T, *ProbeOptions) {}},
		{"client", true, func(t *testing.T, o *ProbeOptions) { writeFile(t, o.root, "/usr/bin/podman", "#!new", 0o755) }},
		{"runtime", true, func(t *testing.T, o *ProbeOptions) { writeFile(t, o.root, "/usr/bin/crun", "#!new", 0o755) }},
		{"system's configuration", true, func(t *testing.T, o *ProbeOptions) {
			writeFile(t, o.root, "/etc/containers/containers.conf", "x", 0o644)
		}},
		{"a drop-in", true, func(t *testing.T, o *ProbeOptions) {
			writeFile(t, o.root, "/etc/containers/containers.conf.d/1.conf", "x", 0o644)
		}},
		{"user's configuration", true, func(t *testing.T, o *ProbeOptions) {
			writeFile(t, o.root, "/home/u/.config/containers/storage.conf", "x", 0o644)
		}},
		{"subuid", true, func(t *testing.T, o *ProbeOptions) {
			writeFile(t, o.root, "/etc/subuid", "424242:165536:65536\nx:1:1\n", 0o644)
		}},
		{"boot", true, func(t *testing.T, o *ProbeOptions) {
			writeFile(t, o.root, "/proc/sys/kernel/random/boot_id", "2", 0o444)
		}},
		{"session", true, func(t *testing.T, o *ProbeOptions) { writeFile(t, o.root, "/proc/self/cgroup", "0::/x\n", 0o444) }},
		{"user", true, func(t *testing.T, o *ProbeOptions) {
			o.Getenv = env(map[string]string{"PATH": "/usr/bin", "HOME": "/home/v"})
		}},
		{"no cache", true, func(_ *testing.T, o *ProbeOptions) { o.CacheDir = "" }},
		{"damaged cache", true, func(t *testing.T, o *ProbeOptions) {
			writeFile(t, o.CacheDir, "probe-podman.json", `{"key":`, 0o600)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := rootlessHost(t)
			o := rootlessOptions(root, script(t, infoCall(rootlessInfo, nil)))
			o.CacheDir = filepath.Join(t.TempDir(), "c")
			first, err := ProbeEngine(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			tc.edit(t, &o)
			var calls []scriptedCall
			if tc.again {
				calls = append(calls, infoCall(rootlessInfo, nil))
			}
			o.Runner = script(t, calls...)
			second, err := ProbeEngine(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(first.Engine(), second.Engine()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A range that Podman does not use yet must not be remembered: `podman system
// migrate` changes the answer and no file.
func TestPodmanInfoWithStaleMappingsIsNotCached(t *testing.T) {
	root := rootlessHost(t)
	writeFile(t, root, "/etc/subuid", "424242:165536:131072\n", 0o644)
	o := rootlessOptions(root, script(t, infoCall(rootlessInfo, nil), infoCall(rootlessInfo, nil)))
	o.CacheDir = filepath.Join(t.TempDir(), "c")
	for range 2 {
		if _, err := ProbeEngine(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCachedInfoKeepsEveryFieldThatIsUsed(t *testing.T) {
	var info, back podmanInfo
	if err := json.Unmarshal([]byte(rootlessInfo), &info); err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(info)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(info, back); diff != "" {
		t.Error(diff)
	}
}
