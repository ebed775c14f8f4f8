package shim

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/spec"
)

// dockerClientJSON is what `docker version --format '{{json .Client}}'` prints.
const dockerClientJSON = `{"Platform":{"Name":""},"Version":"20.10.24","ApiVersion":"1.41","DefaultAPIVersion":"1.41","Os":"linux","Arch":"amd64","Context":"default"}`

const podmanClientJSON = `{"APIVersion":"4.3.1","Version":"4.3.1","GoVersion":"go1.19.8","GitCommit":"","BuiltTime":"Thu Jan  1 00:00:00 1970","Built":0,"OsArch":"linux/amd64","Os":"linux"}`

// shortDir is a folder whose path leaves room for a socket's name (108 bytes, unix(7)).
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "as")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// fakeDaemon answers on a socket as Docker does; override replaces or adds paths.
type fakeDaemon struct {
	socket   string
	requests atomic.Int32
}

func startDaemon(t *testing.T, override map[string]http.HandlerFunc) *fakeDaemon {
	t.Helper()
	kernel, err := kernelRelease()
	if err != nil {
		t.Fatal(err)
	}
	d := &fakeDaemon{socket: filepath.Join(shortDir(t), "d.sock")}
	handlers := map[string]http.HandlerFunc{
		"/version": answer(versionJSON("20.10.24+dfsg1", "1.41", kernel)),
		"/info":    answer(infoJSON(kernel, `"name=seccomp,profile=default"`)),
	}
	maps.Copy(handlers, override)
	listener, err := net.Listen("unix", d.socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d.requests.Add(1)
		if h, ok := handlers[r.URL.Path]; ok {
			h(w, r)
			return
		}
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"message":"No such image: x"}`)
	})}}
	server.Start()
	t.Cleanup(server.Close)
	return d
}

func answer(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) }
}

func versionJSON(version, api, kernel string) string {
	return fmt.Sprintf(`{"Components":[{"Name":"Engine","Version":%[1]q},{"Name":"runc","Version":"1.3.6"}],"Version":%[1]q,"ApiVersion":%[2]q,"KernelVersion":%[3]q}`, version, api, kernel)
}

func infoJSON(kernel, options string) string {
	return fmt.Sprintf(`{"ID":"X","MemoryLimit":true,"SwapLimit":true,"CpuCfsQuota":true,"PidsLimit":true,"CgroupDriver":"systemd","CgroupVersion":"2",
"KernelVersion":%q,"OperatingSystem":"Debian GNU/Linux 12 (bookworm)","DockerRootDir":"/data/docker","DefaultRuntime":"runc","SecurityOptions":[%s]}`, kernel, options)
}

// fakeHost is a folder that stands for / with the named programs in /usr/bin.
func fakeHost(t *testing.T, programs ...string) string {
	t.Helper()
	root := t.TempDir()
	writeFile(t, root, "/proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n", 0o444)
	writeFile(t, root, "/proc/sys/kernel/pid_max", "77\n", 0o444)
	for _, p := range programs {
		writeFile(t, root, "/usr/bin/"+p, "#!", 0o755)
	}
	return root
}

func writeFile(t *testing.T, root, path, text string, mode os.FileMode) {
	t.Helper()
	file := filepath.Join(root, path)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, mode); err != nil { // not cut by the umask
		t.Fatal(err)
	}
}

func env(vars map[string]string) func(string) string {
	return func(name string) string { return vars[name] }
}

func dockerOptions(t *testing.T, root, socket string, runner Runner) ProbeOptions {
	t.Helper()
	return ProbeOptions{
		Engine: spec.Docker, DockerConfig: t.TempDir(), Runner: runner, root: root,
		Getenv: env(map[string]string{"PATH": "relative:/usr/bin", "HOME": "/home/u", "DOCKER_HOST": "unix://" + socket, "HTTP_PROXY": "http://p", "DOCKER_CONFIG": "/home/u/dc"}),
	}
}

func identifyCall(answer string, err error) scriptedCall {
	return scriptedCall{
		argv: []string{"/usr/bin/docker", "version", "--format", "{{json .Client}}"}, out: answer, err: err,
		check: func(t *testing.T, c Command) {
			for _, v := range c.Env {
				if strings.Contains(v, "PROXY") || strings.HasPrefix(v, "DOCKER_HOST=") && v != "DOCKER_HOST=unix:///dev/null/none" {
					t.Errorf("client is asked with %q", v)
				}
			}
		},
	}
}

// noServer is how Docker's client ends when it printed its own half only.
var noServer = failedCall(1, "Cannot connect to the Docker daemon at unix:///dev/null/none. Is the docker daemon running?", "docker", "version")

func TestProbeDocker(t *testing.T) {
	d := startDaemon(t, nil)
	o := dockerOptions(t, fakeHost(t, "docker"), d.socket, script(t, identifyCall(dockerClientJSON, noServer)))
	a, err := ProbeEngine(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	want := spec.Engine{
		Kind: spec.Docker, Client: "/usr/bin/docker", Socket: d.socket, Version: "20.10.24+dfsg1",
		CgroupVersion: 2, CgroupDriver: "systemd", LimitsHold: true, Runtime: "runc", RuntimeVersion: "1.3.6", Dirs: []string{"/data/docker"},
	}
	if diff := cmp.Diff(want, a.Engine()); diff != "" {
		t.Error(diff)
	}
	cmd := a.Command("run", "--rm")
	wantArgv := []string{"/usr/bin/docker", "--host", "unix://" + d.socket, "--config", o.DockerConfig, "run", "--rm"}
	if diff := cmp.Diff(wantArgv, cmd.Argv()); diff != "" {
		t.Error(diff)
	}
	if len(cmd.Env) != 0 {
		t.Errorf("environment %q", cmd.Env)
	}
	nofile, nproc := a.HardLimits()
	ownFiles, ownProcs, err := ownHardLimits()
	if err != nil || nofile != ownFiles || nproc != ownProcs {
		t.Errorf("limits %d, %d; own are %d, %d (%v)", nofile, nproc, ownFiles, ownProcs, err)
	}
}

func TestProbeDockerJudgesWhatAnswers(t *testing.T) {
	kernel, err := kernelRelease()
	if err != nil {
		t.Fatal(err)
	}
	seccomp := `"name=seccomp,profile=default"`
	for _, tc := range []struct {
		name          string
		version, info http.HandlerFunc
		want          Reason
		hint          string
	}{
		{name: "L09 Podman's service", version: answer(`{"Components":[{"Name":"Podman Engine","Version":"4.3.1"}],"Version":"4.3.1","ApiVersion":"1.41"}`), want: ReasonEngineMismatch, hint: "--engine podman"},
		{name: "old engine", version: answer(versionJSON("19.03.15", "1.41", kernel)), want: ReasonEngineUnsupported, hint: "20.10"},
		{name: "old API", version: answer(versionJSON("20.10.24", "1.40", kernel)), want: ReasonEngineUnsupported, hint: "20.10"},
		{name: "no version", version: answer(versionJSON("", "", kernel)), want: ReasonEngineUnsupported, hint: "20.10"},
		{name: "M21 other kernel", version: answer(versionJSON("20.10.24", "1.41", "5.0")), want: ReasonEngineRemote, hint: "unset DOCKER_HOST"},
		{name: "M21 Docker Desktop", info: answer(strings.Replace(infoJSON(kernel, seccomp), "Debian GNU/Linux 12 (bookworm)", "Docker Desktop", 1)), want: ReasonEngineRemote, hint: "unset DOCKER_HOST"},
		{name: "no seccomp", info: answer(infoJSON(kernel, `"name=apparmor"`)), want: ReasonEngineUnsupported, hint: "seccomp"},
		{name: "no daemon", version: func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "<html>", http.StatusNotFound) }, want: ReasonEngineMismatch, hint: "unset DOCKER_HOST"},
		{name: "redirect", version: func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusFound)
		}, want: ReasonEngineFailed},
		{name: "endless body", info: func(w http.ResponseWriter, _ *http.Request) {
			for range 5 << 10 {
				w.Write(make([]byte, 1<<10))
			}
		}, want: ReasonEngineFailed},
		{name: "not JSON", info: answer("hello"), want: ReasonEngineFailed},
		{name: "L06 full disk", info: func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusInternalServerError)
			fmt.Fprint(w, `{"message":"write /x: no space left on device"}`)
		}, want: ReasonEngineFailed, hint: "free space"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			override := map[string]http.HandlerFunc{}
			if tc.version != nil {
				override["/version"] = tc.version
			}
			if tc.info != nil {
				override["/info"] = tc.info
			}
			d := startDaemon(t, override)
			o := dockerOptions(t, fakeHost(t, "docker"), d.socket, script(t, identifyCall(dockerClientJSON, noServer)))
			_, err := ProbeEngine(t.Context(), o)
			if !errors.Is(err, tc.want) || !strings.Contains(HintOf(err), tc.hint) {
				t.Errorf("%s: %v, hint %q", ReasonOf(err), err, HintOf(err))
			}
		})
	}
}

func TestDockerFactsFromInfo(t *testing.T) {
	kernel, _ := kernelRelease()
	info := func(options string, edits ...string) dockerInfo {
		var i dockerInfo
		text := strings.NewReplacer(edits...).Replace(infoJSON(kernel, options))
		if err := json.Unmarshal([]byte(text), &i); err != nil {
			t.Fatal(err)
		}
		return i
	}
	seccomp := `"name=seccomp,profile=default"`
	for _, tc := range []struct {
		name string
		info dockerInfo
		want func(*spec.Engine)
	}{
		{"plain", info(seccomp), func(*spec.Engine) {}},
		{"rootless", info(seccomp + `,"name=rootless"`), func(e *spec.Engine) { e.Rootless = true }},
		{"userns-remap", info(seccomp + `,"name=userns"`), func(e *spec.Engine) { e.UserNamespace = true }},
		{"apparmor and selinux", info(seccomp + `,"name=apparmor","name=selinux"`), func(e *spec.Engine) { e.AppArmor, e.SELinux = true, true }},
		{"no swap limit", info(seccomp, `"SwapLimit":true`, `"SwapLimit":false`), func(e *spec.Engine) { e.LimitsHold = false }},
		{"no pids limit", info(seccomp, `"PidsLimit":true`, `"PidsLimit":false`), func(e *spec.Engine) { e.LimitsHold = false }},
		{"no cpu quota", info(seccomp, `"CpuCfsQuota":true`, `"CpuCfsQuota":false`), func(e *spec.Engine) { e.LimitsHold = false }},
		{"no memory limit", info(seccomp, `"MemoryLimit":true`, `"MemoryLimit":false`), func(e *spec.Engine) { e.LimitsHold = false }},
		{"no cgroups", info(seccomp, `"systemd"`, `"none"`), func(e *spec.Engine) { e.LimitsHold, e.CgroupDriver = false, "none" }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var version dockerVersion
			if err := json.Unmarshal([]byte(versionJSON("20.10.24", "1.41", kernel)), &version); err != nil {
				t.Fatal(err)
			}
			o := ProbeOptions{root: fakeHost(t)}.withDefaults()
			d, err := newDocker(o, "/usr/bin/docker", dockerAnswer{api: newDockerAPI("/s"), version: version, info: tc.info, peer: &unix.Ucred{Pid: 1}})
			if err != nil {
				t.Fatal(err)
			}
			want := spec.Engine{
				Kind: spec.Docker, Client: "/usr/bin/docker", Socket: "/s", Version: "20.10.24", CgroupVersion: 2, CgroupDriver: "systemd",
				LimitsHold: true, Runtime: "runc", RuntimeVersion: "1.3.6", Dirs: []string{"/data/docker"},
			}
			tc.want(&want)
			if diff := cmp.Diff(want, d.Engine()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestDaemonOutsideOurPidNamespaceIsRemote(t *testing.T) {
	err := checkLocal(dockerAnswer{api: newDockerAPI("/s"), peer: &unix.Ucred{}}, "k")
	if !errors.Is(err, ReasonEngineRemote) || !strings.Contains(err.Error(), "container") {
		t.Errorf("%v", err)
	}
}

func TestProbeDockerCachesOneStartOfTheDaemon(t *testing.T) {
	d := startDaemon(t, nil)
	root := fakeHost(t, "docker")
	pid := os.Getpid()
	stat := func(start string) string {
		return fmt.Sprintf("%d (do) ckerd x) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 %s 20", pid, start)
	}
	writeFile(t, root, fmt.Sprintf("/proc/%d/comm", pid), "dockerd\n", 0o444)
	writeFile(t, root, fmt.Sprintf("/proc/%d/stat", pid), stat("777"), 0o444)
	writeFile(t, root, fmt.Sprintf("/proc/%d/limits", pid), "Limit   Soft Limit  Hard Limit  Units\nMax processes   unlimited  unlimited  processes\nMax open files  1024  4096  files\n", 0o444)
	writeFile(t, root, "/proc/sys/kernel/random/boot_id", "b\n", 0o444)
	o := dockerOptions(t, root, d.socket, script(t, identifyCall(dockerClientJSON, noServer)))
	o.CacheDir = filepath.Join(t.TempDir(), "cache")
	var first spec.Engine
	probe := func(name string, wantRequests int32) {
		t.Helper()
		before := d.requests.Load()
		a, err := ProbeEngine(t.Context(), o)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := d.requests.Load() - before; got != wantRequests {
			t.Errorf("%s: %d requests, want %d", name, got, wantRequests)
		}
		if first.Kind == "" {
			first = a.Engine()
		}
		if diff := cmp.Diff(first, a.Engine()); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if nofile, nproc := a.HardLimits(); nofile != 4096 || nproc != 1<<64-1 {
			t.Errorf("%s: limits %d, %d are not the daemon's", name, nofile, nproc)
		}
	}
	probe("first", 2)
	probe("same daemon", 0)
	writeFile(t, root, fmt.Sprintf("/proc/%d/stat", pid), stat("778"), 0o444)
	probe("restarted daemon", 2)
	probe("same again", 0)
	writeFile(t, root, "/etc/docker/daemon.json", "{}", 0o644)
	probe("reloaded configuration", 2)
	if err := os.Chmod(o.CacheDir, 0o777); err != nil {
		t.Fatal(err)
	}
	o.Runner = script(t, identifyCall(dockerClientJSON, noServer))
	probe("a folder that others write", 2)
}

// L11: each fault has its own reason and remedy, told apart without a daemon.
func TestDockerFaults(t *testing.T) {
	dir := shortDir(t)
	dead := filepath.Join(dir, "dead.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	vars := func(pairs ...string) map[string]string {
		m := map[string]string{"PATH": "/usr/bin", "HOME": "/home/u"}
		for i := 0; i < len(pairs); i += 2 {
			m[pairs[i]] = pairs[i+1]
		}
		return m
	}
	for _, tc := range []struct {
		name     string
		vars     map[string]string
		identify bool
		want     Reason
		hint     string
	}{
		{"no client", vars("PATH", ""), false, ReasonEngineMissing, "install"},
		{"client only in a relative folder", vars("PATH", "usr/bin"), false, ReasonEngineMissing, "install"},
		{"no socket", vars("DOCKER_HOST", "unix://"+dir+"/none"), true, ReasonEngineDown, "systemctl start docker"},
		{"dead socket", vars("DOCKER_HOST", "unix://"+dead), true, ReasonEngineDown, "systemctl start docker"},
		{"unknown context", vars("DOCKER_CONTEXT", "nope"), false, ReasonEngineContext, "docker context ls"},
		{"M21 tcp", vars("DOCKER_HOST", "tcp://127.0.0.1:1"), false, ReasonEngineRemote, "unset DOCKER_HOST"},
		{"M21 no scheme", vars("DOCKER_HOST", "127.0.0.1:1"), false, ReasonEngineRemote, "unset DOCKER_HOST"},
		{"relative socket", vars("DOCKER_HOST", "unix://docker.sock"), false, ReasonEngineContext, "unix:///"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var calls []scriptedCall
			if tc.identify {
				calls = append(calls, identifyCall(dockerClientJSON, noServer))
			}
			_, err := ProbeEngine(t.Context(), ProbeOptions{
				Engine: spec.Docker, Getenv: env(tc.vars), Runner: script(t, calls...), root: fakeHost(t, "docker"), DockerConfig: t.TempDir(),
			})
			if !errors.Is(err, tc.want) || !strings.Contains(HintOf(err), tc.hint) {
				t.Errorf("%s: %v, hint %q", ReasonOf(err), err, HintOf(err))
			}
		})
	}
}

func TestTransportErrors(t *testing.T) {
	api := newDockerAPI("/s")
	dialed := func(errno syscall.Errno) error {
		return &url.Error{Op: "Get", URL: "http://docker/info", Err: &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", errno)}}
	}
	for _, tc := range []struct {
		name string
		err  error
		want Reason
		hint string
	}{
		{"not permitted", dialed(syscall.EACCES), ReasonEngineDenied, "usermod -aG docker"},
		{"no socket", dialed(syscall.ENOENT), ReasonEngineDown, "systemctl start"},
		{"refused", dialed(syscall.ECONNREFUSED), ReasonEngineDown, "systemctl start"},
		{"no answer", &url.Error{Op: "Get", Err: os.ErrDeadlineExceeded}, ReasonEngineDown, "restart"},
		{"cut", &url.Error{Op: "Get", Err: syscall.ECONNRESET}, ReasonEngineFailed, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := api.transportError(t.Context(), tc.err)
			if !errors.Is(err, tc.want) || !strings.Contains(HintOf(err), tc.hint) {
				t.Errorf("%v, hint %q", err, HintOf(err))
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := api.transportError(ctx, dialed(syscall.ENOENT)); !errors.Is(err, ReasonInterrupted) {
		t.Errorf("a cancelled probe is %v", err)
	}
}

func TestDockerEndpoint(t *testing.T) {
	root := t.TempDir()
	meta := func(dir, name, text string) {
		sum := sha256.Sum256([]byte(name))
		writeFile(t, root, filepath.Join(dir, "contexts/meta", hex.EncodeToString(sum[:]), "meta.json"), text, 0o644)
	}
	meta("/home/u/.docker", "local", `{"Name":"local","Endpoints":{"docker":{"Host":"unix:///run/user/1/../1/docker.sock"}}}`)
	meta("/home/u/.docker", "far", `{"Name":"far","Endpoints":{"docker":{"Host":"ssh://me:secret@far.example"}}}`)
	meta("/home/u/.docker", "same", `{"Name":"same","Endpoints":{"docker":{}}}`)
	meta("/home/u/.docker", "kube", `{"Name":"kube","Endpoints":{"kubernetes":{"Host":"x"}}}`)
	meta("/home/u/.docker", "broken", `{`)
	meta("/cfg", "local", `{"Name":"local","Endpoints":{"docker":{"Host":"unix:///cfg.sock"}}}`)
	writeFile(t, root, "/cfg/config.json", `{"currentContext":"local","auths":{}}`, 0o600)
	writeFile(t, root, "/bad/config.json", `{"currentContext":`, 0o600)
	if err := os.MkdirAll(filepath.Join(root, "pipe"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(root, "pipe/config.json"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		vars map[string]string
		want string
		err  error
	}{
		{"nothing set", map[string]string{"HOME": "/home/u"}, defaultDockerSocket, nil},
		{"empty unix", map[string]string{"DOCKER_HOST": "unix://"}, defaultDockerSocket, nil},
		{"host before context", map[string]string{"DOCKER_HOST": "unix:///a", "DOCKER_CONTEXT": "nope"}, "/a", nil},
		{"context by name", map[string]string{"HOME": "/home/u", "DOCKER_CONTEXT": "local"}, "/run/user/1/docker.sock", nil},
		{"context without a host", map[string]string{"HOME": "/home/u", "DOCKER_CONTEXT": "same"}, defaultDockerSocket, nil},
		{"default context", map[string]string{"HOME": "/home/u", "DOCKER_CONTEXT": "default"}, defaultDockerSocket, nil},
		{"current context", map[string]string{"HOME": "/home/u", "DOCKER_CONFIG": "/cfg"}, "/cfg.sock", nil},
		{"variable before current", map[string]string{"DOCKER_CONFIG": "/cfg", "DOCKER_CONTEXT": "default"}, defaultDockerSocket, nil},
		{"far context", map[string]string{"HOME": "/home/u", "DOCKER_CONTEXT": "far"}, "", ReasonEngineRemote},
		{"no docker endpoint", map[string]string{"HOME": "/home/u", "DOCKER_CONTEXT": "kube"}, "", ReasonEngineContext},
		{"broken context", map[string]string{"HOME": "/home/u", "DOCKER_CONTEXT": "broken"}, "", ReasonEngineContext},
		{"unknown context", map[string]string{"HOME": "/home/u", "DOCKER_CONTEXT": "../../x"}, "", ReasonEngineContext},
		{"broken configuration", map[string]string{"DOCKER_CONFIG": "/bad"}, "", ReasonEngineContext},
		{"configuration is a pipe", map[string]string{"DOCKER_CONFIG": "/pipe"}, "", ReasonEngineContext},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := dockerEndpoint(ProbeOptions{Getenv: env(tc.vars), root: root})
			if got != tc.want || (err != nil) != (tc.err != nil) || tc.err != nil && !errors.Is(err, tc.err) {
				t.Errorf("%q, %v", got, err)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("a password in %q", err)
			}
		})
	}
}

func TestDockerConfigMustBeEmpty(t *testing.T) {
	d := startDaemon(t, nil)
	for _, tc := range []struct {
		name string
		edit func(*ProbeOptions)
		want Reason
	}{
		{"not named", func(o *ProbeOptions) { o.DockerConfig = "" }, ReasonInternal},
		{"missing", func(o *ProbeOptions) { o.DockerConfig += "/none" }, ReasonState},
		{"holds proxies", func(o *ProbeOptions) { writeFile(t, o.DockerConfig, "config.json", `{"proxies":{}}`, 0o600) }, ReasonState},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := dockerOptions(t, fakeHost(t, "docker"), d.socket, script(t, identifyCall(dockerClientJSON, noServer)))
			tc.edit(&o)
			if _, err := ProbeEngine(t.Context(), o); !errors.Is(err, tc.want) {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestUnknownDockerClient(t *testing.T) {
	d := startDaemon(t, nil)
	for name, call := range map[string]scriptedCall{
		"other answer": identifyCall(`{"version":"1"}`, nil),
		"no answer":    identifyCall("", failedCall(127, "not found", "docker")),
	} {
		t.Run(name, func(t *testing.T) {
			o := dockerOptions(t, fakeHost(t, "docker"), d.socket, script(t, call))
			if _, err := ProbeEngine(t.Context(), o); !errors.Is(err, ReasonEngineMissing) {
				t.Errorf("%v", err)
			}
		})
	}
}
