package integration

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentshim/agentshim/shim"
)

// attempt is a run that ought to be refused, with everything looked at that it
// could have created.
type attempt struct {
	s      setup
	name   string
	dir    string
	result string
	marker string
	check  func()
	before []string
}

// newAttempt makes a workspace that no refused run may change.
func newAttempt(t *testing.T, s setup) attempt {
	t.Helper()
	a := attempt{s: s, name: "test-" + strings.ReplaceAll(filepath.Base(s.private(t)), "_", "-"), dir: s.folder(t)}
	a.marker = filepath.Join(a.dir, "marker")
	place(t, filepath.Join(a.dir, "repo/file"), []byte("x"), 0o644)
	s.own(t, a.dir)
	a.result = filepath.Join(s.private(t), "result.json")
	a.check = untouched(t, a.dir)
	a.before = a.left(t)
	return a
}

// left lists the containers of this attempt's name, and the engine's volumes.
func (a attempt) left(t *testing.T) []string {
	t.Helper()
	containers := a.s.bare(t, "ps", "-aq", "--filter", "label=agentshim.name="+a.name).ok(t).Stdout
	return strings.Fields(containers + a.s.bare(t, "volume", "ls", "-q").ok(t).Stdout)
}

// fields are a harness that would show that it ran, in the workspace and on stdout.
func (a attempt) fields(more spec) spec {
	f := spec{
		"name": a.name, "workspace": map[string]any{"source": a.dir, "mode": "writable"},
		"harness": map[string]any{"binary": "sh", "prefixArgs": []string{"-c", "echo ran; touch marker " + a.marker}},
	}
	for k, v := range more {
		f[k] = v
	}
	return f
}

// refused runs the file and wants the reason on stderr, a hint, the same in
// --result, and nothing created.
func (a attempt) refused(t *testing.T, c call, file string, reason shim.Reason) result {
	t.Helper()
	if err := os.Remove(a.result); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	r := a.s.call(t, c, "exec", "--spec", file, "--result", a.result, "--", "x").refused(t, reason)
	rec := readRecord(t, a.result)
	if rec.Version != shim.RecordVersion || rec.Exit != 125 || rec.Reason != reason || rec.Message == "" || rec.Retry != reason.Retryable() || rec.Harness != nil {
		t.Errorf("--result: version %d, exit %d, reason %q, message %q, retry %v", rec.Version, rec.Exit, rec.Reason, rec.Message, rec.Retry)
	}
	a.check()
	return r
}

// Every field that is wrong is named with its JSON path, its value and what to
// write instead; A88's and E09's are among them.
func TestBadInput(t *testing.T) {
	sh := map[string]any{"binary": "sh"}
	with := func(more map[string]any) map[string]any {
		for k, v := range sh {
			more[k] = v
		}
		return more
	}
	rows := []struct {
		name  string
		more  spec
		parts []string
	}{
		{"version", spec{"version": 2}, []string{"$.version", "2"}},
		{"no harness", spec{"harness": nil}, []string{"$.harness"}},
		{"engine", spec{"engine": "dokcer"}, []string{"$.engine", `"dokcer"`, "docker"}},
		{"wrong type", spec{"tmpSizeMb": "big"}, []string{"$.tmpSizeMb"}},
		{"negative", spec{"home": map[string]any{"sizeMb": -1}}, []string{"$.home.sizeMb"}},
		{"E09 image as an option", spec{"image": "--privileged"}, []string{"$.image", `"--privileged"`, "name:tag"}},
		{"E09 image with a short option", spec{"image": "-v/:/host"}, []string{"$.image"}},
		{"E09 image with a blank", spec{"image": "a --privileged b"}, []string{"$.image"}},
		{"E09 image with a line feed", spec{"image": "a\nb"}, []string{"$.image"}},
		{"E09 a transport", spec{"image": "docker-archive:/etc/passwd"}, []string{"$.image"}},
		{"E09 name", spec{"name": "--privileged"}, []string{"$.name"}},
		{"E09 program", spec{"harness": map[string]any{"binary": "--privileged"}}, []string{"$.harness.binary"}},
		{"E09 platform", spec{"platform": "linux/amd64 --privileged"}, []string{"$.platform"}},
		{"E09 label", spec{"labels": map[string]any{"--privileged": "x"}}, []string{"$.labels"}},
		{"agentshim's own label", spec{"labels": map[string]any{"agentshim.run": "x"}}, []string{`$.labels["agentshim.run"]`}},
		{"A88 privileged", spec{"privileged": true}, []string{"$.privileged"}},
		{"A88 capAdd", spec{"capAdd": []string{"ALL"}}, []string{"$.capAdd"}},
		{"A88 capabilities", spec{"capabilities": []string{"SYS_ADMIN"}}, []string{"$.capabilities[0]", "CHOWN"}},
		{"A88 NET_ADMIN beside CHOWN", spec{"user": "0:0", "capabilities": []string{"CHOWN", "NET_ADMIN"}}, []string{"$.capabilities[1]"}},
		{"A88 host namespaces", spec{"pid": "host", "ipc": "host", "uts": "host", "network": "host"}, []string{"$.pid", "$.ipc", "$.uts", "$.network"}},
		{"A88 userns host", spec{"userns": "host"}, []string{"$.userns"}},
		{"A88 network mode host", spec{"egress": map[string]any{"mode": "host"}}, []string{"$.egress.mode"}},
		{"A88 securityOpt", spec{"securityOpt": []string{"seccomp=unconfined"}}, []string{"$.securityOpt"}},
		{"A88 seccomp unconfined", spec{"seccomp": map[string]any{"profile": "unconfined"}}, []string{"$.seccomp.profile"}},
		{"A88 device", spec{"devices": []string{"/dev/kvm:/dev/kvm:rwm", "--privileged"}}, []string{"$.devices[0]", "$.devices[1]"}},
		{"A88 engine arguments", spec{"engineArgs": []string{"--privileged"}, "extraArgs": []string{"-v/:/h"}}, []string{"$.engineArgs", "$.extraArgs"}},
		{"A88 accept", spec{"accept": []string{"everything"}}, []string{"$.accept[0]", `"everything"`}},
		{"fixed variable", spec{"env": map[string]any{"HOME": "/"}}, []string{"$.env.HOME"}},
		{"not built", spec{"fallbackOn": []int{75}}, []string{"$.fallbackOn", "not built yet"}},
		{"all at once", spec{"nope": 1, "user": "x", "harness": with(map[string]any{"promptMode": "x"}), "mounts": []any{map[string]any{"source": ".", "target": "/proc"}}}, []string{"$.nope", "$.user", "$.harness.promptMode", "$.mounts[0].target"}},
	}
	each(t, func(t *testing.T, s setup) {
		a := newAttempt(t, s)
		for _, tc := range rows {
			t.Run(tc.name, func(t *testing.T) {
				r := a.refused(t, call{}, s.write(t, a.fields(tc.more)), shim.ReasonSpecInvalid)
				wantText(t, r.Stderr, tc.parts...)
			})
		}
		t.Run("not a harness file", func(t *testing.T) {
			for name, text := range map[string]string{"empty": "", "no JSON": "image: x", "trailing": `{"version":1,"image":"x","harness":{"binary":"sh"}} {}`, "twice": `{"version":1,"version":1,"image":"x","harness":{"binary":"sh"}}`} {
				file := place(t, filepath.Join(s.private(t), "harness.json"), []byte(text), 0o644)
				if r := a.refused(t, call{}, file, shim.ReasonSpecInvalid); !strings.Contains(r.Stderr, "agentshim: spec-invalid: ") {
					t.Errorf("%s: %s", name, r.Stderr)
				}
			}
			r := a.refused(t, call{}, "/no/such/harness.json", shim.ReasonSpecInvalid)
			wantText(t, r.Stderr, "/no/such/harness.json")
		})
		t.Run("flags", func(t *testing.T) {
			file := s.write(t, a.fields(nil))
			for _, flags := range [][]string{{"--image=--privileged"}, {"--engine=x"}, {"--privileged"}, {"--log-level=x"}, {"--command"}, {"--workspace=/no/such"}} {
				r := s.call(t, call{}, append([]string{"exec", "--spec", file}, flags...)...)
				name, _, _ := strings.Cut(flags[0], "=")
				if r.Code != 125 || r.Stdout != "" || !strings.HasPrefix(r.Stderr, "agentshim: ") {
					t.Errorf("%s: %+v", flags, r)
				}
				if name != "--workspace" && !strings.Contains(r.Stderr, name) {
					t.Errorf("%s is not named: %s", name, r.Stderr)
				}
			}
			a.check()
		})
		if after := a.left(t); !slices.Equal(a.before, after) {
			t.Errorf("containers and volumes: %q before, %q after", a.before, after)
		}
		// The control: the same file without the fault runs and leaves its marker.
		r := s.call(t, call{}, "exec", "--spec", s.write(t, a.fields(nil)), "--", "x")
		if !strings.Contains(r.Stdout, "ran\n") {
			t.Errorf("control: %+v", r)
		}
		if _, err := os.Lstat(a.marker); err != nil {
			t.Errorf("control: %v", err)
		}
	})
}

// withoutEngines is a PATH with nothing on it.
func withoutEngines(t *testing.T, s setup) string {
	t.Helper()
	return "PATH=" + s.private(t)
}

// dockerContext writes a client configuration whose current context has that
// endpoint, and returns its folder.
func dockerContext(t *testing.T, s setup, host string) string {
	t.Helper()
	dir := s.private(t)
	const name = "faraway"
	place(t, filepath.Join(dir, "config.json"), []byte(`{"currentContext":"`+name+`"}`), 0o600)
	if host != "" {
		meta, err := json.Marshal(map[string]any{"Name": name, "Endpoints": map[string]any{"docker": map[string]any{"Host": host}}})
		if err != nil {
			t.Fatal(err)
		}
		place(t, filepath.Join(dir, "contexts/meta", sum([]byte(name)), "meta.json"), meta, 0o600)
	}
	s.chown(t, dir)
	return dir
}

// L10, L11, M21, A95: an engine that is missing, down, denied, misconfigured or far
// away is told apart, with a remedy each; nothing runs, and nothing is contacted.
func TestEngineStates(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	contacted := make(chan string, 64)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			contacted <- conn.RemoteAddr().String()
			conn.Close()
		}
	}()
	far := listener.Addr().String()
	each(t, func(t *testing.T, s setup) {
		a := newAttempt(t, s)
		type row struct {
			name   string
			engine string
			env    []string
			reason shim.Reason
			parts  []string
		}
		rows := []row{
			{"missing", "docker", []string{withoutEngines(t, s)}, shim.ReasonEngineMissing, []string{"docker", "PATH", "install"}},
			{"missing podman", "podman", []string{withoutEngines(t, s)}, shim.ReasonEngineMissing, []string{"podman", "PATH", "install"}},
			{"missing both", "auto", []string{withoutEngines(t, s)}, shim.ReasonEngineMissing, []string{"docker", "podman"}},
			{"down", "docker", []string{"DOCKER_HOST=unix:///nonexistent"}, shim.ReasonEngineDown, []string{"/nonexistent", "start"}},
			{"bad context", "docker", []string{"DOCKER_CONTEXT=nope"}, shim.ReasonEngineContext, []string{`"nope"`, "DOCKER_CONTEXT", "docker context ls"}},
			{"bad current context", "docker", []string{"DOCKER_CONFIG=" + dockerContext(t, s, "")}, shim.ReasonEngineContext, []string{`"faraway"`, "docker context ls"}},
			{"bad context, auto", "auto", []string{"DOCKER_CONTEXT=nope"}, shim.ReasonEngineContext, []string{`"nope"`}},
			{"M21 tcp", "docker", []string{"DOCKER_HOST=tcp://" + far}, shim.ReasonEngineRemote, []string{"DOCKER_HOST", far, "unset DOCKER_HOST"}},
			{"M21 tcp, auto", "auto", []string{"DOCKER_HOST=tcp://" + far}, shim.ReasonEngineRemote, []string{"DOCKER_HOST"}},
			{"M21 ssh", "docker", []string{"DOCKER_HOST=ssh://user:word@127.0.0.1"}, shim.ReasonEngineRemote, []string{"ssh://127.0.0.1"}},
			{"M21 context", "docker", []string{"DOCKER_CONFIG=" + dockerContext(t, s, "tcp://"+far)}, shim.ReasonEngineRemote, []string{`"faraway"`, far}},
			{"M21 podman's service", "podman", []string{"CONTAINER_HOST=tcp://" + far}, shim.ReasonEngineRemote, []string{"CONTAINER_HOST", "unset"}},
			{"M21 podman over ssh", "podman", []string{"CONTAINER_HOST=ssh://root@127.0.0.1/run/podman/podman.sock"}, shim.ReasonEngineRemote, []string{"CONTAINER_HOST"}},
			{"M21 podman's connection", "podman", []string{"CONTAINER_CONNECTION=far"}, shim.ReasonEngineRemote, []string{"CONTAINER_CONNECTION"}},
			{"M21 dagu's", "podman", []string{"DAGU_PODMAN_HOST=tcp://" + far}, shim.ReasonEngineRemote, []string{"DAGU_PODMAN_HOST"}},
		}
		if s.rootless() {
			rows = append(rows,
				row{"denied", "docker", nil, shim.ReasonEngineDenied, []string{"docker.sock", "usermod -aG docker"}},
				row{"L10", "podman", []string{"XDG_RUNTIME_DIR=/root"}, shim.ReasonEngineDenied, []string{`"/root"`, "unset XDG_RUNTIME_DIR"}})
		}
		messages := map[string]string{}
		for _, tc := range rows {
			t.Run(tc.name, func(t *testing.T) {
				r := a.refused(t, call{Env: tc.env}, s.write(t, a.fields(spec{"engine": tc.engine})), tc.reason)
				wantText(t, r.Stderr, append(tc.parts, "agentshim: hint: ")...)
				if strings.Contains(r.Stderr, "user:word") || strings.Contains(r.Stderr, "word@") {
					t.Errorf("a password is shown: %s", r.Stderr)
				}
				messages[string(tc.reason)] = r.Stderr
			})
		}
		distinct := map[string]bool{}
		for _, text := range messages {
			distinct[text] = true
		}
		if len(distinct) < 4 || len(distinct) != len(messages) {
			t.Errorf("%d messages for %d reasons", len(distinct), len(messages))
		}
		if after := a.left(t); !slices.Equal(a.before, after) {
			t.Errorf("containers and volumes: %q before, %q after", a.before, after)
		}
	})
	select {
	case who := <-contacted:
		t.Errorf("a remote endpoint was contacted, from %s", who)
	default:
	}
	if conn, err := net.Dial("tcp", far); err != nil { // the control
		t.Error(err)
	} else {
		conn.Close()
		select {
		case <-contacted:
		case <-time.After(5 * time.Second):
			t.Error("control: the listener sees no connection")
		}
	}
}

// L09: a docker that is Podman is used as Podman; Podman behind Docker's socket is
// not taken for Docker.
func TestDockerThatIsPodman(t *testing.T) {
	inTurn(t, func(t *testing.T, s setup) {
		if s.engine != "podman" {
			return // docker's own set-ups are every other test's
		}
		podman, err := exec.LookPath("podman")
		if err != nil {
			t.Fatal(err)
		}
		t.Run("wrapper", func(t *testing.T) {
			dir := s.private(t)
			place(t, filepath.Join(dir, "docker"), []byte("#!/bin/sh\necho 'Emulate Docker CLI using podman.' >&2\nexec "+podman+" \"$@\"\n"), 0o755)
			s.chown(t, dir)
			state := s.private(t)
			file := s.write(t, spec{"engine": "docker"})
			r := s.call(t, call{State: state, Env: []string{"PATH=" + dir + ":" + os.Getenv("PATH")}}, "exec", "--quiet", "--spec", file, "--", "echo ran").ok(t)
			if r.Stdout != "ran\n" || r.Stderr != "" {
				t.Errorf("%+v", r)
			}
			if kind := record(t, state).Engine.Kind; kind != "podman" {
				t.Errorf("recorded as %s", kind)
			}
		})
		t.Run("socket", func(t *testing.T) {
			socket := filepath.Join(s.private(t), "podman.sock")
			service, cancel := s.command(t, call{}, podman, "system", "service", "--time=60", "unix://"+socket)
			if err := service.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				cancel() // kills the service by its pid
				_ = service.Wait()
			}()
			for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
				if conn, err := net.Dial("unix", socket); err == nil {
					conn.Close()
					break
				} else if time.Now().After(end) {
					t.Fatal(err)
				}
			}
			file := s.write(t, spec{"engine": "docker"})
			r := s.call(t, call{Env: []string{"DOCKER_HOST=unix://" + socket}}, "exec", "--spec", file, "--", "true").refused(t, shim.ReasonEngineMismatch)
			wantText(t, r.Stderr, socket, "agentshim: hint: ", "--engine podman")
		})
	})
}

// archive is a docker-archive of an image for arch with nothing in it.
func archive(t *testing.T, ref, arch string) []byte {
	t.Helper()
	layer := tarOf(t, map[string][]byte{"empty": nil})
	config := fmt.Appendf(nil, `{"architecture":%q,"os":"linux","config":{},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}`, arch, sum(layer))
	manifest := fmt.Appendf(nil, `[{"Config":"config.json","RepoTags":[%q],"Layers":["layer.tar"]}]`, ref)
	return tarOf(t, map[string][]byte{"layer.tar": layer, "config.json": config, "manifest.json": manifest})
}

func tarOf(t *testing.T, files map[string][]byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(files[name]))})
		if err == nil {
			_, err = w.Write(files[name])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// L12: an image for another architecture is refused before anything starts, unless
// the file asks for that very platform.
func TestForeignImage(t *testing.T) {
	const arch = "s390x"
	each(t, func(t *testing.T, s setup) {
		a := newAttempt(t, s)
		ref := "localhost/agentshim/foreign:" + a.name
		cmd, cancel := s.command(t, call{Stdin: bytes.NewReader(archive(t, ref, arch))}, s.engine, "load", "--quiet")
		defer cancel()
		finish(t, cmd).ok(t)
		t.Cleanup(func() { s.bare(t, "rmi", "-f", ref) })
		if got := s.bare(t, "image", "inspect", "--format", "{{.Architecture}}", ref).ok(t).Stdout; got != arch+"\n" {
			t.Fatalf("the image is for %q", got)
		}
		for name, fields := range map[string]spec{
			"foreign image":    {"image": ref},
			"foreign platform": {"platform": "linux/" + arch},
			"neither":          {"image": ref, "platform": "linux/riscv64"},
		} {
			t.Run(name, func(t *testing.T) {
				r := a.refused(t, call{}, s.write(t, a.fields(fields)), shim.ReasonImagePlatform)
				wantText(t, r.Stderr, "linux/"+arch, "agentshim: hint: ")
			})
		}
		// The control: with its platform named it is taken, and has no sh.
		a.refused(t, call{}, s.write(t, a.fields(spec{"image": ref, "platform": "linux/" + arch})), shim.ReasonHarnessMissing)
	})
}

// A path of --result that can't be written is said, and no half file is left.
func TestResultFile(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.private(t)
		r := s.call(t, call{}, "exec", "--spec", s.write(t, nil), "--result", filepath.Join(dir, "no/such/result.json"), "--", "exit 3")
		if r.Code != 125 || !strings.Contains(r.Stderr, "agentshim: state: ") {
			t.Errorf("%+v", r)
		}
		// A link is replaced, not followed.
		target := place(t, filepath.Join(dir, "target"), []byte("kept"), 0o600)
		link := filepath.Join(dir, "result.json")
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
		s.chown(t, dir)
		s.call(t, call{}, "exec", "--spec", s.write(t, nil), "--result", link, "--", "exit 3")
		if rec := readRecord(t, link); rec.Exit != 3 || rec.Reason != "" {
			t.Errorf("exit %d, reason %q", rec.Exit, rec.Reason)
		}
		if b, err := os.ReadFile(target); err != nil || string(b) != "kept" {
			t.Errorf("the link's target holds %q, %v", b, err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 2 {
			t.Errorf("left in the folder: %v, %v", entries, err)
		}
		if info, err := os.Lstat(link); err != nil || info.Mode()&fs.ModeSymlink != 0 {
			t.Errorf("%v, %v", info, err)
		}
		s.resultStays(t)
	})
}

// resultStays: an agent that puts a link in the place of the result's folder leads nothing elsewhere.
func (s setup) resultStays(t *testing.T) {
	t.Helper()
	for script, code := range map[string]int{"exit 3": 3, `mv out gone && ln -s "$0" out; exit 3`: 125} {
		ws, elsewhere := s.folder(t), s.private(t)
		out := filepath.Join(ws, "out")
		uid, gid := s.ids(t)
		if uid == 0 {
			uid, gid = folderOwner, folderOwner
		}
		if err := errors.Join(os.Mkdir(out, 0o777), os.Chown(out, uid, gid)); err != nil {
			t.Fatal(err)
		}
		file := s.write(t, spec{"workspace": map[string]any{"source": ws, "mode": "writable"}, "user": nil})
		r := s.call(t, call{}, "exec", "--spec", file, "--result", filepath.Join(out, "result.json"), "--command", "--", "sh", "-c", script, elsewhere)
		if r.Code != code || code == 125 && !strings.Contains(r.Stderr, "agentshim: state: ") {
			t.Errorf("%s: %+v", script, r)
		}
		if code == 3 {
			if rec := readRecord(t, filepath.Join(out, "result.json")); rec.Exit != 3 {
				t.Errorf("exit %d", rec.Exit)
			}
			continue
		}
		for _, dir := range []string{elsewhere, filepath.Join(ws, "gone")} {
			if list, err := os.ReadDir(dir); err != nil || len(list) > 0 {
				t.Errorf("%s has %v, %v", dir, list, err)
			}
		}
		if text, err := os.Readlink(out); err != nil || text != elsewhere {
			t.Errorf("control: the link is %q, %v", text, err)
		}
	}
}
