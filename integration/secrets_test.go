package integration

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentshim/agentshim/shim"
)

// secret is a value that stands nowhere else on the machine.
func secret(t *testing.T) string {
	t.Helper()
	return "secret" + hex.EncodeToString(random(t, 16))
}

// sightings lists where the host shows any of the markers: command lines and
// environments of all processes but those of the agent itself, and the files
// below the places.
func sightings(t *testing.T, markers []string, places ...string) []string {
	t.Helper()
	return append(processSightings(t, markers), fileSightings(t, markers, places)...)
}

// processSightings looks at every process. Skipped is what runs inside a container
// and is not its init: the agent has its secrets, and ps shows them to root.
func processSightings(t *testing.T, markers []string) []string {
	t.Helper()
	own, err := os.Readlink("/proc/thread-self/ns/pid")
	if err != nil {
		t.Fatal(err)
	}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, dir := range dirs {
		cmdline, err := os.ReadFile(dir + "/cmdline")
		if err != nil || dir == fmt.Sprintf("/proc/%d", os.Getpid()) {
			continue // it has ended, or is this test
		}
		ns, _ := os.Readlink(dir + "/ns/pid")
		if ns != own && !bytes.Contains(cmdline, []byte("agentshim-init")) {
			continue
		}
		environ, _ := os.ReadFile(dir + "/environ")
		for name, text := range map[string][]byte{"cmdline": cmdline, "environ": environ} {
			for _, m := range holds(text, markers) {
				found = append(found, fmt.Sprintf("%s/%s (%q): %s", dir, name, firstWord(cmdline), m))
			}
		}
	}
	return found
}

func firstWord(cmdline []byte) []byte {
	word, _, _ := bytes.Cut(cmdline, []byte{0})
	return word
}

func holds(text []byte, markers []string) (found []string) {
	for _, m := range markers {
		if bytes.Contains(text, []byte(m)) {
			found = append(found, m)
		}
	}
	return found
}

// maxSearched bounds the files that are read: an engine's records are small.
const maxSearched = 8 << 20

func fileSightings(t *testing.T, markers, places []string) []string {
	t.Helper()
	var found []string
	for _, place := range places {
		err := filepath.WalkDir(place, func(path string, e fs.DirEntry, err error) error {
			switch {
			case errors.Is(err, fs.ErrNotExist) && path != place:
				return nil // gone meanwhile
			case err != nil:
				return err
			case e.IsDir() && e.Name() == "rootfs":
				return filepath.SkipDir // the container's own root
			case !e.Type().IsRegular():
				return nil
			}
			info, err := e.Info()
			if err != nil || info.Size() > maxSearched {
				return nil
			}
			b, err := os.ReadFile(path)
			if err != nil {
				return nil
			}
			for _, m := range holds(b, markers) {
				found = append(found, path+": "+m)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
}

// enginePlaces are the folders where the engine writes what it knows of a container.
func (s setup) enginePlaces(t *testing.T, id string) []string {
	t.Helper()
	if s.engine == "docker" {
		root := strings.TrimSpace(s.bare(t, "info", "--format", "{{.DockerRootDir}}").ok(t).Stdout)
		return existing("/run/docker", "/run/containerd", filepath.Join(root, "containers"))
	}
	var facts []struct{ StaticDir, OCIConfigPath, ConmonPidFile string }
	r := s.bare(t, "container", "inspect", id).ok(t)
	if err := json.Unmarshal([]byte(r.Stdout), &facts); err != nil || len(facts) != 1 {
		t.Fatalf("inspect: %v\n%s", err, r.Stdout)
	}
	return []string{facts[0].StaticDir, filepath.Dir(facts[0].OCIConfigPath), filepath.Dir(facts[0].ConmonPidFile)}
}

func existing(paths ...string) []string {
	return slices.DeleteFunc(paths, func(p string) bool {
		_, err := os.Lstat(p)
		return err != nil
	})
}

// children lists the processes whose parent is pid.
func children(t *testing.T, pid int) []int {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	var list []int
	for _, file := range stats {
		b, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		if len(fields) > 1 && fields[1] == strconv.Itoa(pid) {
			list = append(list, mustInt(t, strings.Split(file, "/")[2]))
		}
	}
	return list
}

// E03, E06, A89, part 8: while a run with secrets of every kind is under way, and
// in all it leaves and prints, none of them shows.
func TestSecretsStayHidden(t *testing.T) {
	bothWays(t, func(t *testing.T, s setup) {
		for _, mode := range []string{"stdin", "file"} {
			if mode == "file" && !s.full() {
				continue
			}
			t.Run("prompt by "+mode, func(t *testing.T) { hideSecrets(t, s, mode) })
		}
		if s.steps == nil {
			t.Run("control", func(t *testing.T) { showSecret(t, s) })
		}
	})
}

func hideSecrets(t *testing.T, s setup, mode string) {
	m := map[string]string{}
	for _, name := range []string{"env", "envFrom", "envFile", "harness", "prompt", "home"} {
		m[name] = secret(t)
	}
	markers := slices.Collect(maps.Values(m))
	dir := s.private(t)
	place(t, filepath.Join(dir, "agent.env"), []byte("BY_FILE="+m["envFile"]+"\n"), 0o600)
	place(t, filepath.Join(dir, "token"), []byte(m["home"]), 0o600)
	s.chown(t, dir)
	gate := s.folder(t)
	read := map[string]string{"stdin": "cat", "file": `cat "$1"`}[mode]
	script := `printf '%s %s %s %s %s %s\n' "$BY_ENV" "$BY_FROM" "$BY_FILE" "$BY_HARNESS" "$(` + read + `)" "$(cat ~/token)"
		while [ ! -e /workspace/go ]; do sleep 0.1; done`
	file := s.write(t, spec{
		"env": map[string]string{"BY_ENV": m["env"]}, "envFrom": []string{"BY_FROM"}, "envFiles": []string{filepath.Join(dir, "agent.env")},
		"harness":   map[string]any{"binary": "sh", "prefixArgs": []string{"-c", script, "sh"}, "promptMode": mode, "env": map[string]string{"BY_HARNESS": m["harness"]}},
		"prompt":    m["prompt"],
		"home":      map[string]any{"sizeMb": 8, "files": []any{map[string]any{"source": filepath.Join(dir, "token"), "target": "token"}}},
		"workspace": map[string]any{"source": gate},
	})
	state, runtime := s.private(t), s.runtimeDir(t)
	c := call{State: state, Env: []string{"BY_FROM=" + m["envFrom"]}}
	cmd, cancel := s.command(t, c, agentshim, "exec", "--log-level", "debug", "--spec", file)
	defer cancel()
	var stderr bytes.Buffer
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	open := func() { place(t, filepath.Join(gate, "go"), nil, 0o644) }
	defer open()
	line, err := bufio.NewReader(stdout).ReadString('\n')
	want := strings.Join([]string{m["env"], m["envFrom"], m["envFile"], m["harness"], m["prompt"], m["home"]}, " ") + "\n"
	if line != want { // the search below would find nothing for the wrong reason
		t.Fatalf("the agent got %q, want %q: %v\n%s", line, want, err, stderr.String())
	}
	whole, wholeState := s.whole(t, record(t, state), state)
	name := "agentshim-" + whole.ID
	if text := s.bare(t, "inspect", name).ok(t).Stdout; len(holds([]byte(text), markers)) > 0 {
		t.Errorf("inspect shows %q", holds([]byte(text), markers))
	}
	found := sightings(t, markers, append(s.enginePlaces(t, name), state, wholeState, runtime)...)
	// What the caller exported stands in agentshim's own environment.
	shimEnv := fmt.Sprintf("/proc/%d/environ ", cmd.Process.Pid)
	found = slices.DeleteFunc(found, func(f string) bool { return strings.HasPrefix(f, shimEnv) && strings.HasSuffix(f, m["envFrom"]) })
	if len(found) > 0 {
		t.Errorf("the host shows secrets:\n%s", strings.Join(found, "\n"))
	}
	s.checkClients(t, whole.Owner.PID)
	open()
	if _, err := io.Copy(io.Discard, stdout); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	if found := holds(stderr.Bytes(), markers); len(found) > 0 {
		t.Errorf("stderr with --log-level debug shows %q", found)
	}
	if found := fileSightings(t, markers, []string{state, wholeState, runtime}); len(found) > 0 {
		t.Errorf("after the run: %q", found)
	}
	for _, format := range []string{"text", "json", "oci", "engine"} {
		r := s.call(t, c, "plan", "--spec", file, "--format", format).ok(t)
		if found := holds([]byte(r.Stdout+r.Stderr), markers); len(found) > 0 {
			t.Errorf("plan --format %s shows %q", format, found)
		}
	}
}

// runtimeDir is agentshim's, which exists during runs at least.
func (s setup) runtimeDir(t *testing.T) string {
	t.Helper()
	uid, _ := s.ids(t)
	return fmt.Sprintf("/tmp/agentshim-%d", uid)
}

// checkClients looks at the environment of the engine's client: nothing of the
// caller's steers it but the folders that Podman needs. Docker's daemon needs no client.
func (s setup) checkClients(t *testing.T, pid int) {
	t.Helper()
	clients := children(t, pid)
	if (len(clients) > 0) != (s.engine == "podman") {
		t.Errorf("agentshim has %d children", len(clients))
	}
	allowed := map[string]bool{}
	for _, name := range []string{"LC_ALL", "PATH", "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "TMPDIR"} {
		allowed[name] = true
	}
	for _, name := range []string{"_CONTAINERS_USERNS_CONFIGURED", "_CONTAINERS_ROOTLESS_UID", "_CONTAINERS_ROOTLESS_GID"} {
		allowed[name] = true // Podman's own, when it runs itself again in its namespace
	}
	for _, client := range clients {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", client))
		if err != nil {
			t.Error(err)
		}
		for v := range strings.SplitSeq(strings.TrimSuffix(string(b), "\x00"), "\x00") {
			if name, _, _ := strings.Cut(v, "="); name != "" && !allowed[name] {
				t.Errorf("the engine's client has %s in its environment", name)
			}
		}
	}
}

// showSecret is the control: the same search finds what the bare engine shows.
func showSecret(t *testing.T, s setup) {
	m, name := secret(t), "agentshim-test-"+secret(t)
	t.Cleanup(func() { s.bare(t, "rm", "-f", "-v", name) })
	cmd, cancel := s.command(t, call{}, s.engine, "run", "--rm", "--network=none", "--name="+name, "-e", "X="+m, "agentshim/hello:test", "sh", "-c", "echo ready; sleep 60")
	defer cancel()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	time.Sleep(100 * time.Millisecond) // a started container's record may be written a little later
	text := s.bare(t, "inspect", name).ok(t).Stdout
	processes := processSightings(t, []string{m})
	files := fileSightings(t, []string{m}, s.enginePlaces(t, name))
	if !strings.Contains(text, m) || len(processes) == 0 || len(files) == 0 {
		t.Errorf("the search misses a secret: inspect %v, processes %q, files %q", strings.Contains(text, m), processes, files)
	}
	s.bare(t, "kill", name)
	_ = cmd.Wait() // ended by the kill
}

// environ reads `env -0`.
func environ(out string) map[string]string {
	m := map[string]string{}
	for v := range strings.SplitSeq(strings.TrimSuffix(out, "\x00"), "\x00") {
		name, value, _ := strings.Cut(v, "=")
		m[name] = value
	}
	return m
}

// values are texts that lines, shells and "=" end somewhere.
var values = []string{
	"l1\nl2=x", "x=y z=$H", `back\slash "q" 'q'`, "é→\u2028😀", "trailing  ", "", "\ttab", "-dash", "# hash", "a=b=c=", "`id` $(id) ${HOME}", "\n", "\x01\x1b[0m",
}

// E01, E05, E08: every value arrives byte for byte by every way, and nothing else does.
func TestEnvRoundTrip(t *testing.T) {
	bothWays(t, func(t *testing.T, s setup) {
		want := map[string]string{
			"PATH": "/bin:/usr/bin", "HOME": "/home/agent", "USER": "agent", "LOGNAME": "agent", "SHELL": "/bin/sh",
			"XDG_CONFIG_HOME": "/home/agent/.config", "XDG_CACHE_HOME": "/home/agent/.cache",
			"XDG_DATA_HOME": "/home/agent/.local/share", "XDG_STATE_HOME": "/home/agent/.local/state",
		}
		uid := 24199
		if !s.root() {
			uid, _ = s.ids(t)
		}
		want["XDG_RUNTIME_DIR"] = fmt.Sprintf("/run/user/%d", uid)
		env, harnessEnv := map[string]string{}, map[string]string{"LATE": "harness"}
		var from, exported []string
		lines := "# a comment\n\n"
		for i, v := range values {
			e, f, l, h := fmt.Sprintf("ENV_%d", i), fmt.Sprintf("FROM_%d", i), fmt.Sprintf("LINE_%d", i), fmt.Sprintf("HARNESS_%d", i)
			env[e], harnessEnv[h] = v, v
			from, exported = append(from, f), append(exported, f+"="+v)
			want[e], want[f], want[h] = v, v, v
			if !strings.Contains(v, "\n") {
				lines += l + "=" + v + "\n"
				want[l] = v
			}
		}
		// The order of the sources: a later one wins.
		lines += "MID=file\nLATE=file\nONE=file"
		exported, from = append(exported, "MID=caller", "LATE=caller"), append(from, "MID")
		env["LATE"] = "env"
		want["ONE"], want["MID"], want["LATE"] = "file", "caller", "harness"
		file := s.write(t, spec{
			"env": env, "envFrom": from, "envFiles": []string{"agent.env"},
			"harness": map[string]any{"binary": "env", "prefixArgs": []string{"-0"}, "promptMode": "stdin", "env": harnessEnv},
		})
		place(t, filepath.Join(filepath.Dir(file), "agent.env"), []byte(lines), 0o644)
		r := s.call(t, call{Env: append(exported, "NOT_ASKED=x")}, "exec", "--spec", file).ok(t)
		got := environ(r.Stdout)
		for name, value := range want {
			if v, ok := got[name]; !ok || v != value {
				t.Errorf("%s = %q (set: %v), want %q", name, v, ok, value)
			}
		}
		for name := range got {
			if _, ok := want[name]; !ok {
				t.Errorf("%s=%q is in the agent's environment", name, got[name])
			}
		}
		if s.steps != nil {
			return // what is refused there is refused of the session
		}
		t.Run("E05", func(t *testing.T) {
			file := s.write(t, spec{"envFrom": []string{"NOT_SET_A", "SET", "NOT_SET_B"}})
			r := s.call(t, call{Env: []string{"SET="}}, "exec", "--spec", file, "--", "true").refused(t, shim.ReasonEnvMissing)
			wantText(t, r.Stderr, `"NOT_SET_A"`, `"NOT_SET_B"`, "agentshim: hint: export NOT_SET_A")
		})
		t.Run("missing env file", func(t *testing.T) {
			r := s.sh(t, spec{"envFiles": []string{"none.env"}}, "true").refused(t, shim.ReasonEnvMissing)
			wantText(t, r.Stderr, `"none.env"`, "agentshim: hint: ")
		})
		t.Run("a bad env file shows no value", func(t *testing.T) {
			m := secret(t)
			file := s.write(t, spec{"envFiles": []string{"bad.env"}})
			place(t, filepath.Join(filepath.Dir(file), "bad.env"), []byte("A-B="+m+"\n"+m+"\nHOME="+m+"\nX="+m+"\r\n"), 0o644)
			r := s.exec(t, file, "true").refused(t, shim.ReasonSpecInvalid)
			wantText(t, r.Stderr, "line 1", "line 2", "line 3", "line 4")
			if strings.Contains(r.Stderr, m) {
				t.Errorf("stderr shows the value: %s", r.Stderr)
			}
		})
	})
}

// E10: variables that steer a loader or a runtime reach the agent, never init, be
// they the file's or the image's.
func TestEnvDoesNotSteerInit(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		steer := map[string]string{
			"LD_PRELOAD": "/workspace/x.so", "LD_LIBRARY_PATH": "/workspace", "NODE_OPTIONS": "--require=/workspace/x.js",
			"GODEBUG": "gctrace=1", "GOGC": "1", "GOMAXPROCS": "1", "BASH_ENV": "/workspace/x", "PYTHONPATH": "/workspace",
		}
		state := s.private(t)
		file := s.write(t, spec{"image": "agentshim/env:test", "env": steer, "harness": map[string]any{"binary": "env", "prefixArgs": []string{"-0"}, "promptMode": "stdin"}})
		r := s.call(t, call{State: state}, "exec", "--quiet", "--spec", file).ok(t)
		got := environ(r.Stdout)
		for name, value := range steer {
			if got[name] != value {
				t.Errorf("the agent has %s=%q, want %q", name, got[name], value)
			}
		}
		if got["FOO"] != "bar" {
			t.Errorf("the image's FOO is %q for the agent", got["FOO"])
		}
		if r.Stderr != "" {
			t.Errorf("stderr: %q (init obeys GODEBUG?)", r.Stderr)
		}
		allowed := []string{"PATH", "HOME", "HOSTNAME", "TERM", "container"}
		for _, v := range record(t, state).Attestation.Hello.Environ {
			if name, _, _ := strings.Cut(v, "="); !slices.Contains(allowed, name) {
				t.Errorf("init has %s", v)
			}
		}
		t.Run("image's alone", func(t *testing.T) {
			if !s.full() {
				return // the same variables, one source fewer
			}
			file := s.write(t, spec{"image": "agentshim/env:test", "harness": map[string]any{"binary": "env", "prefixArgs": []string{"-0"}, "promptMode": "stdin"}})
			got := environ(s.call(t, call{}, "exec", "--spec", file).ok(t).Stdout)
			if v, ok := got["LD_PRELOAD"]; ok {
				t.Errorf("the agent has the image's LD_PRELOAD=%s", v)
			}
		})
		c := environ(s.bare(t, "run", "--rm", "--network=none", "agentshim/env:test", "env", "-0").ok(t).Stdout)
		if c["GODEBUG"] == "" || c["LD_PRELOAD"] == "" {
			t.Errorf("control: the bare engine's PID 1 has %q", c)
		}
	})
}

// What the caller's environment and client configuration hold for the engine's
// client neither enters the container nor steers the client.
func TestClientSettingsStayOut(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		config := s.private(t)
		place(t, filepath.Join(config, "config.json"), []byte(`{"proxies":{"default":{"httpProxy":"http://marker.invalid:1","noProxy":"marker.invalid"}}}`), 0o600)
		place(t, filepath.Join(config, "containers.conf"), []byte("[containers]\nenv = [\"MARKER=1\"]\nprivileged = true\n"), 0o600)
		s.chown(t, config)
		env := []string{
			"HTTP_PROXY=http://marker.invalid:2", "https_proxy=http://marker.invalid:3", "NO_PROXY=marker.invalid", "all_proxy=http://marker.invalid:4",
			"DOCKER_CONFIG=" + config, "DOCKER_DEFAULT_PLATFORM=linux/arm64", "DOCKER_CONTENT_TRUST=1", "DOCKER_API_VERSION=1.12",
			"CONTAINERS_CONF=" + filepath.Join(config, "containers.conf"), "PODMAN_USERNS=host", "BUILDAH_ISOLATION=chroot",
		}
		print := []string{"--command", "--", "env", "-0"}
		r := s.call(t, call{Env: env}, append([]string{"exec", "--spec", s.write(t, nil)}, print...)...).ok(t)
		if strings.Contains(strings.ToLower(r.Stdout), "marker") || strings.Contains(r.Stdout, "DOCKER_") {
			t.Errorf("the agent has %q", environ(r.Stdout))
		}
		path, err := exec.LookPath(s.engine)
		if err != nil {
			t.Fatal(err)
		}
		args := []string{"run", "--rm", "--network=none", "agentshim/hello:test", "env", "-0"}
		if s.engine == "docker" {
			args = append([]string{"--config", config}, args...)
		}
		cmd, cancel := s.command(t, call{Env: env[:4]}, path, args...)
		defer cancel()
		if c := finish(t, cmd).ok(t); !strings.Contains(c.Stdout, "marker.invalid") {
			t.Errorf("control: the bare engine passes nothing on: %q", environ(c.Stdout))
		}
	})
}

// The harness file's own secrets, and the caller's, in messages about bad input.
func TestErrorsShowNoSecret(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		m := secret(t)
		for name, fields := range map[string]spec{
			"env":        {"env": map[string]any{"HOME": m, "A": []string{m}, "B C": m}},
			"options":    {"harness": map[string]any{"binary": "sh", "options": map[string]any{"-x": m, "y": m + "\x00"}}},
			"prompt":     {"prompt": m + "\x00"},
			"prompts":    {"prompt": m, "promptFile": "x"},
			"prefixArgs": {"harness": map[string]any{"binary": "sh", "prefixArgs": []string{m + "\x00"}}},
		} {
			r := s.call(t, call{}, "exec", "--log-level", "debug", "--spec", s.write(t, fields)).refused(t, shim.ReasonSpecInvalid)
			if strings.Contains(r.Stderr, m) {
				t.Errorf("%s: %s", name, r.Stderr)
			}
		}
	})
}
