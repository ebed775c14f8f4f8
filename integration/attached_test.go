package integration

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// owned starts a container as someone who does not know agentshim would.
func (s setup) owned(t *testing.T, flags ...string) string {
	t.Helper()
	name := fmt.Sprintf("owned-%s-%d-%s", s.name, os.Getpid(), strings.ToLower(filepath.Base(t.Name())))
	args := append([]string{"run", "-d", "--rm", "--name", name}, flags...)
	s.bare(t, append(args, "agentshim/hello:test", "sleep", "3600")...).ok(t)
	t.Cleanup(func() {
		rm := []string{"rm", "--force"}
		if s.engine == "podman" {
			rm = append(rm, "--time=0")
		}
		s.bare(t, append(rm, name)...).ok(t)
	})
	return name
}

// attachable is a harness file that may run in a container of someone else's.
func (s setup) attachable(t *testing.T, fields spec) string {
	t.Helper()
	full := spec{"pull": nil, "user": "24199:24199", "stopGrace": "1s", "accept": []string{"attached-container"}}
	for k, v := range fields {
		full[k] = v
	}
	return s.write(t, full)
}

// inside runs a script in a container of someone else's.
func (s setup) inside(t *testing.T, c call, file, container, script string, flags ...string) result {
	t.Helper()
	args := append([]string{"exec", "--spec", file, "--container", container}, flags...)
	return s.call(t, c, append(args, "--", script)...)
}

// names are all of the container's own files.
func (s setup) names(t *testing.T, container string) string {
	t.Helper()
	// Without a capability, uid 0 may not look into each folder.
	return s.bare(t, "exec", "--user=0", container, "find", "/", "-xdev").Stdout
}

// findings are a record's, by name.
func findings(t *testing.T, rec shim.Record) map[string]shim.Finding {
	t.Helper()
	if rec.Attached == nil {
		t.Fatalf("the record says nothing of the container: %+v", rec)
	}
	byName := map[string]shim.Finding{}
	for _, f := range rec.Attached.Posture {
		byName[f.Name] = f
	}
	return byName
}

// wantPosture compares findings with the open ones, each with a text that it names, and fails t for
// any other open one.
func wantPosture(t *testing.T, got map[string]shim.Finding, open map[string]string) {
	t.Helper()
	for name, f := range got {
		text, want := open[name]
		if f.Open != want || !strings.Contains(f.Detail, text) {
			t.Errorf("%s; want open %v with %q", f, want, text)
		}
	}
	for name := range open {
		if _, ok := got[name]; !ok {
			t.Errorf("no finding %q", name)
		}
	}
}

// A harness in a container of someone else's: all of a run that does not need the container to be
// agentshim's, and the truth about what that container is.
func TestAttached(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		t.Run("open", s.attachedOpen)
		t.Run("hardened", s.attachedHardened)
	})
}

// attachedOpen works in a container that holds nearly nothing back, among the host's processes.
func (s setup) attachedOpen(t *testing.T) {
	dir := s.folder(t)
	socket, err := net.Listen("unix", filepath.Join(dir, "host.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	loose := []string{"--privileged"}
	if s.engine == "docker" { // its --privileged needs every capability of the machine's root
		loose = []string{"--cap-add=SYS_ADMIN", "--security-opt=seccomp=unconfined", "--security-opt=systempaths=unconfined", "--device=/dev/zero:/dev/extra"}
	}
	name := s.owned(t, append(loose, "--pid=host", "--network=host", "-v", dir+":/data", "-v", dir+"/host.sock:/host.sock",
		"-v", filepath.Dir(agentshim)+":/tool:ro", "-e", "GODEBUG=inittrace=1", "-e", "GOGC=off", "-e", "LD_AUDIT=/none", "-e", "OWNERS=s3cr3t-of-the-owner")...)
	file := s.attachable(t, spec{"image": "agentshim/env:test", "env": map[string]string{"MINE": "s3cr3t-of-mine"}})
	theirs := "owners-" + name
	s.bare(t, "exec", "-d", name, "sh", "-c", "while :; do sleep 1; done", theirs).ok(t)
	t.Cleanup(func() { // it is in the host's pid namespace, and does not end with its container
		for _, pid := range processes(t, "cmdline", "\x00"+theirs+"\x00") {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	})
	if r := s.bare(t, "exec", name, "/tool/agentshim", "reasons").ok(t); !strings.Contains(r.Stderr, "init internal/") {
		t.Errorf("control: the container's variables steer no Go program: %q", r.Stderr)
	}
	before := s.names(t, name)

	t.Run("posture", func(t *testing.T) {
		state := s.private(t)
		r := s.inside(t, call{State: state}, file, name, "true").ok(t)
		rec := record(t, state)
		open := map[string]string{
			"image": "not the file's", "capabilities": "bounding: ", "no-new-privileges": "not set", "seccomp": "mode 0", "system-calls": "ptrace",
			"root": "writable", "shared-namespaces": "net, pid", "engine": `pid "host"`, "kernel-paths": "/proc/", "network": "routes",
			"writable-mounts": `"/data" (bind "` + dir + `")`, "sockets": `"/host.sock"`, "devices": `"`, "limits": "no memory limit", "security-module": "",
		}
		wantPosture(t, findings(t, rec), open)
		if text := findings(t, rec)["capabilities"].Detail; !strings.Contains(text, "SYS_ADMIN") && !strings.Contains(text, "all") {
			t.Errorf("capabilities: %s", text)
		}
		if s.engine == "podman" && !strings.Contains(findings(t, rec)["engine"].Detail, "privileged") {
			t.Errorf("engine: %s", findings(t, rec)["engine"].Detail)
		}
		for _, f := range rec.Attached.Posture {
			if !strings.Contains(r.Stderr, "agentshim: not ours: "+f.String()+"\n") {
				t.Errorf("standard error does not say %q", f)
			}
		}
		if strings.Contains(r.Stderr, "init internal/") || strings.Contains(r.Stderr, "s3cr3t") {
			t.Errorf("init is steered, or a value is told: %s", r.Stderr)
		}
		b, err := json.Marshal(rec)
		if err != nil || strings.Contains(string(b), "s3cr3t") || rec.Attached.UID != 24199 || rec.Attestation != nil {
			t.Errorf("%v %s", err, b)
		}
	})
	t.Run("streams", func(t *testing.T) {
		r := s.inside(t, call{Stdin: strings.NewReader("in")}, file, name, `cat; echo " $PWD $MINE $OWNERS ${LD_AUDIT-none} $(id -u)"; echo err >&2; exit 7`, "--working-dir", "/data", "--quiet")
		if r.Code != 7 || r.Stdout != "in /data s3cr3t-of-mine s3cr3t-of-the-owner none 24199\n" || !strings.HasSuffix(r.Stderr, "\nerr\n") || strings.Count(r.Stderr, "\n") != 2 {
			t.Errorf("%+v", r)
		}
		if r := s.inside(t, call{}, file, name, "kill -USR1 $$", "--quiet"); r.Code != 128+int(unix.SIGUSR1) {
			t.Errorf("%+v", r)
		}
		asFile := s.attachable(t, spec{"harness": map[string]any{"binary": "sh", "promptMode": "file"}})
		if r := s.inside(t, call{}, asFile, name, "echo $0"); !strings.HasPrefix(r.Stdout, "/tmp/.agentshim-prompt-") {
			t.Errorf("a prompt in a file: %+v", r)
		}
	})
	t.Run("terminal", func(t *testing.T) {
		x := s.onTerminal(t, call{Env: []string{"TERM=xterm"}}, agentshim, "exec", "--spec", file, "--container", name, "--command", "--", "sh")
		x.until(t, "$ ")
		x.types(t, "stty size; tty; sleep 100\r")
		x.until(t, "31 97\r\n/dev/pts/")
		x.types(t, "\x03")
		x.until(t, "$ ")
		x.types(t, "exit 9\r")
		if code := x.ends(t); code != 9 {
			t.Errorf("exit %d: %q", code, x.all())
		}
	})
	t.Run("ends", func(t *testing.T) { s.attachedEnds(t, file, name, theirs) })
	if after := s.names(t, name); after != before {
		t.Errorf("files before:\n%s\nand after:\n%s", before, after)
	}
	if len(processes(t, "cmdline", theirs)) == 0 {
		t.Error("the owner's process is gone")
	}
	t.Run("a run's own container", func(t *testing.T) {
		b := s.begin(t, spec{"workspace": nil}, "echo ready; sleep 60")
		s.call(t, call{}, "exec", "--spec", file, "--container", "agentshim-"+b.running(t).ID, "--", "true").refused(t, shim.ReasonContainer)
		b.signal(t, syscall.SIGTERM)
		b.ended(t, 143)
	})
}

// attachedEnds ends harnesses that hide processes, in every way there is. theirs marks what is
// not to end.
func (s setup) attachedEnds(t *testing.T, file, name, theirs string) {
	signal := func(sig syscall.Signal) func(*testing.T, *begun, *os.File) {
		return func(t *testing.T, b *begun, _ *os.File) { b.signal(t, sig) }
	}
	let := func(t *testing.T, _ *begun, stdin *os.File) {
		if _, err := stdin.WriteString("\n"); err != nil {
			t.Fatal(err)
		}
	}
	const loop = `sh -c 'while :; do sleep 1; done' `
	for i, tc := range []struct {
		name, script string
		do           func(t *testing.T, b *begun, stdin *os.File)
		code         int
		reason       shim.Reason
	}{
		{name: "the harness's own end", script: "exit 5", code: 5},
		{name: "a signal", script: "cat", do: signal(syscall.SIGTERM), code: 143},
		{name: "timeout", script: "trap '' TERM; cat", code: 124, reason: shim.ReasonTimeout},
		{name: "agentshim is killed", script: "cat", do: signal(syscall.SIGKILL), code: -1},
		// Of its parent, and its parent's, an agent can end one. Of the same uid, it could end both at once.
		{name: "the watcher is killed", script: "read go; kill -9 $PPID; cat", do: let, code: 125, reason: shim.ReasonInitLost},
		{name: "init is killed", script: `read go; kill -9 $(cut -d" " -f4 /proc/$PPID/stat); cat`, do: let, code: 125, reason: shim.ReasonInitLost},
		{
			name: "init is stopped", script: `kill -STOP $(cut -d" " -f4 /proc/$PPID/stat); exec sh -c 'while :; do sleep 1; done' stopped-` + name, code: -1,
			do: func(t *testing.T, b *begun, _ *os.File) {
				eventually(t, "init is stopped", func() bool { return len(processes(t, "cmdline", "\x00stopped-"+name)) > 0 })
				b.signal(t, syscall.SIGKILL)
			},
		},
		{name: "init is told to end", script: `read go; kill $(cut -d" " -f4 /proc/$PPID/stat) $PPID; echo on; exit 6`, do: let, code: 6},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ours := fmt.Sprintf("ours-%s-%d", name, i)
			hide := loop + ours + ` </dev/null >/dev/null 2>&1 & (setsid ` + loop + ours + ` </dev/null >/dev/null 2>&1 & ); echo ready; `
			of := []string{"--spec", file, "--container", name}
			if tc.reason == shim.ReasonTimeout {
				of = append(of, "--timeout", "1s")
			}
			stdin, in := blocked(t)
			b := s.started(t, call{Stdin: stdin}, of, hide+tc.script)
			if line, err := b.out.ReadString('\n'); line != "ready\n" {
				t.Fatalf("first line %q, %v; %s", line, err, b.stderr.String())
			}
			if n := len(processes(t, "cmdline", "s3cr3t")) + len(processes(t, "environ", "s3cr3t-of-mine")); tc.do != nil && n == 0 {
				t.Error("control: no process has the variable")
			}
			if n := len(processes(t, "cmdline", "s3cr3t")); n != 0 {
				t.Errorf("a value is in the arguments of %d processes", n)
			}
			if tc.do != nil {
				eventually(t, "all of it runs", func() bool { return len(processes(t, "cmdline", "\x00"+ours)) >= 2 })
				tc.do(t, b, in)
			}
			if tc.code >= 0 {
				if _, rec := b.ended(t, tc.code); rec.Reason != tc.reason {
					t.Errorf("reason %q: %s", rec.Reason, rec.Message)
				}
			}
			<-b.waited
			left := func() int { return len(processes(t, "cmdline", "\x00"+ours)) }
			if tc.code >= 0 && tc.code != 125 && left() != 0 {
				t.Errorf("%d processes outlast agentshim", left())
			}
			eventually(t, "no process is left", func() bool { return left() == 0 && len(processes(t, "cmdline", "\x00stopped-"+name)) == 0 })
			if len(processes(t, "cmdline", theirs)) == 0 {
				t.Fatal("the owner's process is gone")
			}
		})
	}
}

// blocked is a standard input that neither has anything nor ends, and its other end.
func blocked(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.Close()
		w.Close()
	})
	return r, w
}

// running is the record of a run that has not ended.
func (b *begun) running(t *testing.T) shim.Record {
	t.Helper()
	return record(t, b.state)
}

// attachedHardened has the same said of a container that its owner made as tight as agentshim's own.
func (s setup) attachedHardened(t *testing.T) {
	profile := filepath.Join(s.folder(t), "seccomp.json")
	policy := s.call(t, call{}, "seccomp", "show", "--engine", s.engine, "--json").ok(t).Stdout
	if err := os.WriteFile(profile, []byte(policy), 0o644); err != nil {
		t.Fatal(err)
	}
	flags := []string{
		"--cap-drop=ALL", "--security-opt=no-new-privileges", "--security-opt=seccomp=" + profile, "--network=none", "--cgroupns=private",
		"--user=24199:24199", "--read-only",
	}
	open := map[string]string{"security-module": "", "shared-namespaces": "user"}
	if s.rootless() {
		delete(open, "shared-namespaces")
		open["limits"] = "no memory limit"
	} else {
		flags = append(flags, "--memory=64m", "--cpus=1", "--pids-limit=64")
	}
	if s.engine == "podman" {
		flags = append(flags, "--read-only-tmpfs=false")
	}
	name := s.owned(t, flags...)
	file := s.attachable(t, spec{"user": nil})
	state := s.private(t)
	r := s.inside(t, call{State: state}, file, name, "id -u", "--quiet").ok(t)
	wantPosture(t, findings(t, record(t, state)), open)
	if r.Stdout != "24199\n" || strings.Count(r.Stderr, "\n") != 1 || !strings.Contains(r.Stderr, "nothing of it is guaranteed; open: ") {
		t.Errorf("%+v", r)
	}

	s.inside(t, call{}, s.attachable(t, spec{"accept": nil}), name, "true").refused(t, shim.ReasonWidening)
	s.inside(t, call{}, s.attachable(t, spec{"user": "0:0"}), name, "true").refused(t, shim.ReasonWidening)
	s.inside(t, call{}, s.attachable(t, spec{"workspace": map[string]any{"source": "."}}), name, "true").refused(t, shim.ReasonSpecInvalid)
	s.inside(t, call{}, file, name, "true", "--workspace", "/tmp").refused(t, shim.ReasonSpecInvalid)
	s.inside(t, call{}, file, "no-such-container", "true").refused(t, shim.ReasonContainer)
	if !s.rootless() { // needs a cgroup of its own
		s.bare(t, "pause", name).ok(t)
		s.inside(t, call{}, file, name, "true").refused(t, shim.ReasonContainer)
		s.bare(t, "unpause", name).ok(t)
	}
	if n := s.names(t, name); strings.Contains(n, ".agentshim") {
		t.Errorf("something is left: %s", n)
	}
	if list := s.containers(t); len(list) > 0 {
		t.Errorf("containers of agentshim's are left: %q", list)
	}
}
