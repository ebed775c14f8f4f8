package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/shim"
)

// deviation is what the engine is told otherwise than the plan says: on Docker by a
// proxy before its daemon, on Podman by a wrapper around its client.
type deviation struct {
	name string
	// edit is Docker's. Sources may hold the %-words of deviant.fill.
	edit []change
	// The others are Podman's. drop are shell patterns of words to leave out; add are words put behind run,
	// global before it. Their %-words are those of deviant.fill.
	drop, add, global []string
	// on are the set-ups where this can be said; nil is all.
	on []string
	// want stands on stderr, each of them; reason is posture when empty.
	want   []string
	reason shim.Reason
	// joins says that other deviations leave this one's difference in sight. Where the
	// engine has another set-up with a run for each, these share one.
	joins bool
}

var (
	rootful   = []string{"docker-root", "docker-group", "podman-root"}
	onDocker  = []string{"docker-root", "docker-group"}
	onPodman  = []string{"podman-root", "podman-rootless"}
	rootlessy = []string{"podman-rootless"}
)

// Where init never runs, or is not the first process, there is no hello to compare:
// the engine's client ends, and the reason is engine-failed.
var deviations = []deviation{
	{
		name: "capability", joins: true, edit: []change{with("HostConfig CapAdd", "NET_RAW")}, add: []string{"--cap-add=NET_RAW"},
		want: []string{"capabilities CapBnd: want 0000000000000000"},
	},
	{name: "privileged", edit: []change{set("HostConfig Privileged", true)}, add: []string{"--privileged"}, want: []string{"capabilities CapBnd"}},
	{name: "engine's own seccomp profile", edit: []change{engineSeccomp}, drop: []string{"--security-opt=seccomp=*"}, want: []string{"system call "}},
	{
		name: "no seccomp", edit: []change{engineSeccomp, with("HostConfig SecurityOpt", "seccomp=unconfined")},
		drop: []string{"--security-opt=seccomp=*"}, add: []string{"--security-opt=seccomp=unconfined"},
		want: []string{"seccomp mode: want 2, got 0", "seccomp filters"},
	},
	{
		name: "a policy with one call more", edit: []change{setns("SCMP_ACT_ALLOW")}, drop: []string{"--security-opt=seccomp=*"},
		add: []string{"--security-opt=seccomp=%weak"}, want: []string{"system call setns(1073741824, …): want EPERM, got EBADF"},
	},
	{
		name: "a policy that kills", edit: []change{setns("SCMP_ACT_KILL_PROCESS")}, drop: []string{"--security-opt=seccomp=*"},
		add: []string{"--security-opt=seccomp=%kill"}, reason: shim.ReasonEngineFailed,
	},
	{
		name: "new privileges", joins: true, edit: []change{without("HostConfig SecurityOpt", "no-new-privileges")},
		drop: []string{"--security-opt=no-new-privileges"}, want: []string{"no_new_privs: want true, got false"},
	},
	{
		name: "kernel paths", joins: true, edit: []change{set("HostConfig MaskedPaths", []string{}), set("HostConfig ReadonlyPaths", []string{})},
		drop: []string{"--security-opt=mask=*"}, add: []string{"--security-opt=unmask=ALL"},
		want: []string{"masked path /proc/keys", "read-only path /proc/sys"},
	},
	{name: "user", edit: []change{set("User", "0:0")}, drop: []string{"--user=*"}, add: []string{"--user=0:0"}, want: []string{"uids: ", "gids: "}},
	{name: "group", joins: true, edit: []change{with("HostConfig GroupAdd", "0")}, add: []string{"--group-add=0"}, want: []string{"groups: "}},
	{name: "user namespace", drop: []string{"--userns=*"}, on: rootlessy, want: []string{"uid map: "}},

	{
		name: "bridge", joins: true, edit: []change{set("HostConfig NetworkMode", "default"), unset("NetworkingConfig")},
		drop: []string{"--network=*"}, want: []string{"interface: ", "routes beyond loopback"},
	},
	{
		name: "host's network", edit: []change{set("HostConfig NetworkMode", "host"), unset("NetworkingConfig"), unset("HostConfig Sysctls")},
		drop: []string{"--network=*", "--sysctl=*"}, add: []string{"--network=host"}, want: []string{"network namespace: "},
	},
	{
		name: "host's pids", edit: []change{set("HostConfig PidMode", "host")}, add: []string{"--pid=host"},
		reason: shim.ReasonEngineFailed, want: []string{"agentshim starts it"},
	},
	// Rootless Podman binds the host's /dev/mqueue here, which need not exist.
	{
		name: "host's ipc", edit: []change{set("HostConfig IpcMode", "host"), unset("HostConfig ShmSize")},
		drop: []string{"--ipc=*", "--shm-size=*"}, add: []string{"--ipc=host"}, on: rootful, want: []string{"ipc namespace: "},
	},
	{name: "shareable ipc", edit: []change{set("HostConfig IpcMode", "shareable")}, on: onDocker, want: []string{"inspect ipc namespace"}},
	{
		name: "host's uts", edit: []change{set("HostConfig UTSMode", "host"), unset("Hostname")},
		drop: []string{"--hostname=*"}, add: []string{"--uts=host"}, want: []string{"uts namespace: "},
	},
	{
		name: "host's cgroup", edit: []change{set("HostConfig CgroupnsMode", "host")},
		drop: []string{"--cgroupns=*"}, add: []string{"--cgroupns=host"}, want: []string{"cgroup namespace: "},
	},
	{
		name: "host name", joins: true, edit: []change{set("Hostname", "other")},
		drop: []string{"--hostname=*"}, add: []string{"--hostname=other"}, want: []string{"host name: want agentshim, got other"},
	},
	{
		name: "sysctl", joins: true, edit: []change{set("HostConfig Sysctls net.ipv4.ping_group_range", "0 0")},
		drop: []string{"--sysctl=net.ipv4.ping_group_range=*"}, add: []string{"--sysctl=net.ipv4.ping_group_range=0 0"},
		want: []string{"sysctl net.ipv4.ping_group_range: want 1 0"},
	},

	{name: "variable", joins: true, edit: []change{with("Env", "GODEBUG=x=hunter2")}, add: []string{"--env=GODEBUG=x=hunter2"}, want: []string{`variable "GODEBUG"`}},
	{
		name: "device", joins: true, edit: []change{with("HostConfig Devices", device("/dev/net/tun", "/dev/net/tun"))},
		add: []string{"--device=/dev/net/tun"}, want: []string{"net/tun"},
	},
	{
		name: "device elsewhere", edit: []change{with("HostConfig Devices", device("/dev/net/tun", "/opt/tun"))},
		add: []string{"--device=/dev/net/tun:/opt/tun"}, want: []string{"/opt/tun"},
	},
	{
		name: "device rule", edit: []change{with("HostConfig DeviceCgroupRules", "c 10:200 rwm")}, add: []string{"--device-cgroup-rule=c 10:200 rwm"},
		on: rootful, want: []string{"device cgroup: "},
	},
	{name: "hook", global: []string{"--hooks-dir=%hooks"}, on: []string{"podman-root"}, want: []string{"config hook: "}},

	{
		name: "mount", joins: true, edit: []change{with("HostConfig Mounts", map[string]any{"Type": "bind", "Source": "/usr/share", "Target": "/extra", "ReadOnly": true})},
		add: []string{"--mount=type=bind,source=/usr/share,target=/extra,readonly"}, want: []string{`mount "/extra": want not mounted`},
	},
	{name: "tmpfs", joins: true, edit: []change{set("HostConfig Tmpfs /more", "")}, add: []string{"--tmpfs=/more"}, want: []string{`mount "/more": want not mounted`}},
	{
		name: "larger tmpfs", joins: true, edit: []change{set("HostConfig Tmpfs /tmp", "rw,nosuid,nodev,exec,size=1g,mode=1777")},
		drop: []string{"--tmpfs=/tmp:*"}, add: []string{"--tmpfs=/tmp:rw,nosuid,nodev,exec,size=1g,mode=1777"},
		want: []string{`mount "/tmp": want at most 536870912 bytes`},
	},
	{name: "no tmpfs", joins: true, edit: []change{unset("HostConfig Tmpfs /run")}, drop: []string{"--tmpfs=/run:*"}, want: []string{`mount "/run": want mounted`}},
	{name: "writable root", joins: true, edit: []change{set("HostConfig ReadonlyRootfs", false)}, drop: []string{"--read-only"}, want: []string{`mount "/": want ro`}},
	{
		name: "writable mount", joins: true, edit: []change{remount("/data", "ReadOnly", false)},
		drop: []string{"--mount=*target=/data,*"}, add: []string{"--mount=type=bind,source=%data,target=/data"}, want: []string{`mount "/data": want ro`},
	},
	{
		name: "another source", edit: []change{remount("/data", "Source", "/usr/share")},
		drop: []string{"--mount=*target=/data,*"}, add: []string{"--mount=type=bind,source=/usr/share,target=/data,readonly,nosuid,nodev"},
		want: []string{`mount "/data": want the file the plan saw`}, reason: shim.ReasonMount,
	},
	{name: "no mount", edit: []change{unmount("/data")}, drop: []string{"--mount=*target=/data,*"}, want: []string{`mount "/data": want mounted`}},

	{
		name: "no limits", joins: true, edit: []change{
			unset("HostConfig Memory"), unset("HostConfig MemorySwap"), unset("HostConfig NanoCpus"), unset("HostConfig CpuQuota"), set("HostConfig PidsLimit", -1),
		},
		drop: []string{"--memory=*", "--memory-swap=*", "--pids-limit=*", "--cpus=*"}, add: []string{"--pids-limit=-1"}, on: rootful,
		want: []string{"memory limit: ", "memory and swap limit: ", "pids limit: ", "cpu quota: "},
	},
	{
		name: "higher limits", joins: true, edit: []change{ulimit("nofile", 9999), ulimit("core", 4096)},
		drop: []string{"--ulimit=nofile=*", "--ulimit=core=*"}, add: []string{"--ulimit=nofile=9999:9999", "--ulimit=core=4096:4096"},
		want: []string{"rlimit nofile: want at most 8192", "rlimit core: want at most 0"},
	},

	{name: "engine's init", edit: []change{set("HostConfig Init", true)}, drop: []string{"--init=*"}, add: []string{"--init"}, reason: shim.ReasonEngineFailed},
	{
		name: "entrypoint", edit: []change{set("Entrypoint", []string{"/bin/sh"})},
		drop: []string{"--entrypoint=*"}, add: []string{"--entrypoint=/bin/sh"}, reason: shim.ReasonEngineFailed,
	},
	{
		name: "another program as init", edit: []change{remount("/.agentshim-init", "Source", "/bin/true")}, drop: []string{"--mount=*target=/.agentshim-init,*"},
		add: []string{"--mount=type=bind,source=/bin/true,target=/.agentshim-init,readonly"}, reason: shim.ReasonEngineFailed,
	},
	{
		name: "init from elsewhere", edit: []change{remount("/.agentshim-init", "Source", "%init")},
		drop: []string{"--mount=*target=/.agentshim-init,*"}, add: []string{"--mount=type=bind,source=%init,target=/.agentshim-init,readonly"},
		want: []string{`mount "/.agentshim-init": want agentshim's own file`, "dumpable: "},
	},
	{name: "another image", edit: []change{set("Image", "agentshim/health:test")}, drop: []string{"sha256:*"}, add: []string{"%image"}, want: []string{"image: "}},
	{name: "no container id", drop: []string{"--cidfile=*"}, on: onPodman, want: []string{"container id: "}},
}

// engineSeccomp has Docker take its own profile.
var engineSeccomp = without("HostConfig SecurityOpt", "seccomp=")

// deviant is a set-up whose engine is told something else than agentshim says.
type deviant struct {
	setup
	// proxy is Docker's; nil on Podman.
	proxy *dockerProxy
	// dir comes first in PATH and holds Podman's wrapper, which reads edit.
	dir, work, data, state, file, label string
}

// newDeviant makes the proxy or the wrapper once: agentshim keeps what it learns of an
// engine for as long as its client and its socket are the same.
func newDeviant(t *testing.T, s setup) deviant {
	t.Helper()
	d := deviant{setup: s, dir: s.folder(t), work: s.folder(t), data: s.folder(t), state: s.private(t), label: fmt.Sprintf("attest-%d", os.Getpid())}
	if err := os.Chmod(d.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if s.engine == "docker" {
		d.proxy = newDockerProxy(t, s)
	} else {
		place(t, d.path(s.engine), []byte("#!/bin/sh\n. "+d.path("edit")+"\n"), 0o755)
	}
	d.file = s.write(t, spec{
		"name": d.label, "workspace": map[string]any{"source": d.work, "mode": "writable"},
		"mounts": []any{map[string]any{"source": d.data, "target": "/data"}},
	})
	d.hook(t)
	d.init(t)
	if s.engine == "podman" {
		d.policy(t, "weak", "SCMP_ACT_ALLOW")
		d.policy(t, "kill", "SCMP_ACT_KILL_PROCESS")
	}
	return d
}

// env has agentshim meet the deviating engine.
func (d deviant) env() string {
	if d.proxy != nil {
		return d.proxy.env()
	}
	return "PATH=" + d.dir + ":" + os.Getenv("PATH")
}

func (d deviant) path(name string) string { return filepath.Join(d.dir, name) }

// hook is one for every container, in the format of oci-hooks(5).
func (d deviant) hook(t *testing.T) {
	t.Helper()
	content := `{"version": "1.0.0", "hook": {"path": "/bin/true"}, "when": {"always": true}, "stages": ["prestart"]}`
	if err := errors.Join(os.Mkdir(d.path("hooks"), 0o755), os.WriteFile(d.path("hooks/x.json"), []byte(content), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// init is a copy of the embedded one.
func (d deviant) init(t *testing.T) {
	t.Helper()
	b, err := os.ReadFile("../shim/embedded/agentshim-init")
	if err == nil {
		err = errors.Join(os.WriteFile(d.path("init"), b, 0o755), os.Chmod(d.path("init"), 0o755))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// policy is agentshim's own, for Podman's wrapper, with another action for setns.
func (d deviant) policy(t *testing.T, name, action string) {
	t.Helper()
	profile, err := withSetns([]byte(d.call(t, call{}, "seccomp", "show", "--json", "--engine", d.engine).ok(t).Stdout), action)
	if err != nil {
		t.Fatal(err)
	}
	place(t, d.path(name), profile, 0o644)
}

// setns has Docker take the policy with another action for setns.
func setns(action string) change {
	return func(body map[string]any) {
		o, key := owner(body, "HostConfig SecurityOpt")
		for i, entry := range o[key].([]any) {
			if text, ok := strings.CutPrefix(entry.(string), "seccomp="); ok {
				profile, err := withSetns([]byte(text), action)
				if err != nil {
					panic(err) // it is agentshim's own JSON
				}
				o[key].([]any)[i] = "seccomp=" + string(profile)
			}
		}
	}
}

// withSetns is a profile with another action for setns.
func withSetns(text []byte, action string) ([]byte, error) {
	var profile map[string]any
	if err := json.Unmarshal(text, &profile); err != nil {
		return nil, err
	}
	rules := profile["syscalls"].([]any)
	for _, r := range rules {
		rule := r.(map[string]any)
		rule["names"] = slices.DeleteFunc(rule["names"].([]any), func(name any) bool { return name == "setns" })
	}
	profile["syscalls"] = append(rules, map[string]any{"names": []string{"setns"}, "action": action})
	return json.Marshal(profile)
}

// edit has the engine deviate from now on.
func (d deviant) edit(t *testing.T, dev deviation) {
	t.Helper()
	if d.proxy == nil {
		d.wrap(t, dev)
		return
	}
	d.proxy.rule(proxyRules{edit: func(own bool, body map[string]any) error {
		if own {
			for _, change := range dev.edit {
				change(body)
			}
			entries("HostConfig Mounts", d.fillSource)(body)
		}
		return nil
	}})
}

// fillSource fills in what a change has as a mount's source.
func (d deviant) fillSource(entry any) bool {
	m := entry.(map[string]any)
	source, _ := m["Source"].(string)
	m["Source"] = d.fill(source)
	return true
}

// wrap is the wrapper's body for one deviation.
func (d deviant) wrap(t *testing.T, dev deviation) {
	t.Helper()
	client, err := exec.LookPath(d.engine)
	if err != nil {
		t.Fatal(err)
	}
	quote := func(words []string) string {
		var out []string
		for _, w := range words {
			out = append(out, "'"+d.fill(w)+"'")
		}
		return strings.Join(out, " ")
	}
	drop := "''"
	if dev.drop != nil {
		drop = strings.ReplaceAll(strings.Join(dev.drop, "|"), " ", `\ `)
	}
	// The image is the last word but one, so that its replacement goes there too.
	add, image := dev.add, ""
	if slices.Equal(add, []string{"%image"}) {
		add, image = nil, "agentshim/health:test"
	}
	script := fmt.Sprintf(`run=
for word do
	shift
	if [ "$run" ]; then
		case $word in
		sha256:*) [ -z %[4]q ] || { set -- "$@" %[4]q; continue; } ;;
		%[1]s) continue ;;
		esac
	elif [ "$word" = run ]; then
		run=1
		set -- "$@" %[2]s run %[3]s
		continue
	fi
	set -- "$@" "$word"
done
exec %[5]s "$@"
`, drop, quote(dev.global), quote(add), image, client)
	if err := os.WriteFile(d.path("edit"), []byte(script), 0o644); err != nil {
		t.Fatal(err)
	}
}

func (d deviant) fill(word string) string {
	return strings.NewReplacer("%data", d.data, "%hooks", d.path("hooks"), "%init", d.path("init"), "%weak", d.path("weak"), "%kill", d.path("kill")).Replace(word)
}

// launch runs an agent that leaves a marker, and says whether it did.
func (d deviant) launch(t *testing.T) (result, bool) {
	t.Helper()
	marker := filepath.Join(d.work, "marker")
	if err := os.RemoveAll(marker); err != nil {
		t.Fatal(err)
	}
	r := d.call(t, call{State: d.state, Env: []string{d.env()}},
		"exec", "--spec", d.file, "--", "touch /workspace/marker")
	_, err := os.Lstat(marker)
	return r, err == nil
}

// TestDeviatingEngine has the engine do something else than it is told, and expects
// that the difference is named and the agent never started.
func TestDeviatingEngine(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		d := newDeviant(t, s)
		t.Run("control", func(t *testing.T) {
			d.edit(t, deviation{})
			r, started := d.launch(t)
			r.ok(t)
			if !started {
				t.Error("the agent left no marker")
			}
			want := "compared"
			if !s.root() {
				uid, _ := s.ids(t)
				want = fmt.Sprintf("not readable by uid %d", uid)
			}
			if got := record(t, d.state).Attestation.Bundle; got != want {
				t.Errorf("the engine's config: %q, want %q", got, want)
			}
		})
		for _, dev := range s.deviations() {
			t.Run(dev.name, func(t *testing.T) { d.refuses(t, dev) })
		}
		if left := strings.Fields(s.bare(t, "ps", "-aq", "--filter", "label=agentshim.name="+d.label).ok(t).Stdout); len(left) > 0 {
			t.Errorf("containers left: %v", left)
		}
	})
}

// deviations are those the set-up can express.
func (s setup) deviations() []deviation {
	var out []deviation
	joined := deviation{name: "joined"}
	for _, dev := range deviations {
		switch {
		case dev.on != nil && !slices.Contains(dev.on, s.name):
		case dev.joins && !slices.Contains([]string{"docker-root", "podman-root"}, s.name):
			joined.edit = append(joined.edit, dev.edit...)
			joined.drop = append(joined.drop, dev.drop...)
			joined.add = append(joined.add, dev.add...)
			joined.want = append(joined.want, dev.want...)
		default:
			out = append(out, dev)
		}
	}
	if joined.want != nil {
		out = append(out, joined)
	}
	return out
}

func (d deviant) refuses(t *testing.T, dev deviation) {
	if d.proxy != nil && dev.edit == nil {
		t.Fatal("no edit for Docker")
	}
	d.edit(t, dev)
	r, started := d.launch(t)
	if started {
		t.Error("the agent was started")
	}
	if dev.reason == "" {
		dev.reason = shim.ReasonPosture
	}
	r.refused(t, dev.reason)
	for _, want := range dev.want {
		if !strings.Contains(r.Stderr, want) {
			t.Errorf("no %q in %s", want, r.Stderr)
		}
	}
	if strings.Contains(r.Stderr, "hunter2") {
		t.Errorf("a variable's value in %s", r.Stderr)
	}
}
