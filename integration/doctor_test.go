package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentshim/agentshim/shim"
)

// diagnosis is a doctor's report and how it was given.
type diagnosis struct {
	result
	shim.Diagnosis
}

// doctor runs the doctor on the set-up's engine and reads its document, which is all
// that it prints.
func (s setup) doctor(t *testing.T, c call, args ...string) diagnosis {
	t.Helper()
	began := time.Now()
	d := diagnosis{result: s.call(t, c, append([]string{"doctor", "--json", "--engine", s.engine}, args...)...)}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("the doctor took %v", took)
	}
	if err := json.Unmarshal([]byte(d.Stdout), &d.Diagnosis); err != nil {
		t.Fatalf("exit %d: %v\nstdout: %s\nstderr: %s", d.Code, err, d.Stdout, d.Stderr)
	}
	if d.Stderr != "" {
		t.Errorf("stderr: %s", d.Stderr)
	}
	if want := min(d.Count(shim.Failed), 1); d.Code != want {
		t.Errorf("exit %d with %d failures", d.Code, d.Count(shim.Failed))
	}
	for _, c := range d.Checks {
		if c.Finding == "" || (c.Remedy == "") != (c.Status == shim.Passed) {
			t.Errorf("%+v", c)
		}
	}
	return d
}

func (d diagnosis) check(scope, name string) shim.Check {
	i := slices.IndexFunc(d.Checks, func(c shim.Check) bool { return c.Scope == scope && c.Name == name })
	if i < 0 {
		return shim.Check{}
	}
	return d.Checks[i]
}

// says fails t unless the check has the status and its line or remedy the texts.
func (d diagnosis) says(t *testing.T, scope, name string, status shim.Status, texts ...string) {
	t.Helper()
	c := d.check(scope, name)
	if c.Status != status {
		t.Errorf("%s %s: %s, want %s\n%s", scope, name, c.Status, status, d.Text())
	}
	for _, text := range texts {
		if !strings.Contains(c.Finding+"\n"+c.Remedy, text) {
			t.Errorf("%s %s does not say %q: %+v", scope, name, text, c)
		}
	}
}

// leftovers are the doctor's images in the set-up's store, and agentshim's containers.
func (s setup) leftovers(t *testing.T) []string {
	t.Helper()
	images := s.bare(t, "images", "--format", "{{.Repository}}:{{.Tag}}", "--filter", "reference=*/agentshim/doctor").ok(t).Stdout
	return append(strings.Fields(images), s.containers(t)...)
}

// TestDoctor has nothing to find fault with: the posture and the refused packet are a
// container's, and neither it nor its image is left.
func TestDoctor(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		state := s.private(t)
		d := s.doctor(t, call{State: state})
		if d.Code != 0 || d.Version != shim.DiagnosisVersion {
			t.Fatalf("exit %d\n%s", d.Code, d.Text())
		}
		for _, name := range []string{"engine", "netns", "disk", "way out", "posture", "network", "program", "image"} {
			d.says(t, s.engine, name, shim.Passed)
		}
		other := map[string]string{"docker": "podman", "podman": "docker"}[s.engine]
		d.says(t, other, "engine", shim.Skipped, "set to "+s.engine)
		// runc 1.1.5 on cgroup v1 is what the test machine has.
		d.says(t, s.engine, "versions", shim.Warned, "CVE-2024-21626", "distribution")
		limits := shim.Passed
		if s.rootless() {
			limits = shim.Warned
			for _, name := range []string{"runtime folder", "id helpers", "subordinate ids", "user namespaces", "network helpers"} {
				d.says(t, s.engine, name, shim.Passed)
			}
		}
		d.says(t, s.engine, "limits", limits)

		if len(d.Proofs) != 1 || d.Proofs[0].Attestation == nil || len(d.Proofs[0].Attestation.Differences) != 0 {
			t.Fatalf("proofs %+v", d.Proofs)
		}
		rec := record(t, state)
		if rec.ID != d.Proofs[0].Run || rec.Exit != 0 || rec.Attestation.Probe.UDP4 != "EPERM" {
			t.Errorf("record %+v", rec)
		}
		d.says(t, s.engine, "network", shim.Passed, "udp EPERM, tcp ECONNRESET")
		if left := s.leftovers(t); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// TestDoctorSpec breaks one need of a harness file after the other; the first row is
// the control.
func TestDoctorSpec(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		secret := []string{"TOKEN=value-of-token"}
		needs := func(more spec) spec {
			full := spec{"envFrom": []string{"TOKEN"}, "workspace": map[string]any{"source": s.folder(t), "mode": "writable"}}
			for k, v := range more {
				full[k] = v
			}
			return full
		}
		rows := []struct {
			name        string
			fields      spec
			env         []string
			args        []string
			scope, fail string
			texts       []string
		}{
			{name: "control", env: secret},
			{name: "harness", fields: spec{"harness": map[string]any{"binary": "no-such-agent"}}, env: secret, fail: "program", texts: []string{"no-such-agent", "harness-missing"}},
			{name: "image", fields: spec{"image": "agentshim/none:test"}, env: secret, fail: "image", texts: []string{"agentshim/none:test", s.engine + " pull"}},
			{name: "image flag", args: []string{"--image", "agentshim/none:test"}, env: secret, fail: "image", texts: []string{"agentshim/none:test"}},
			{name: "platform", fields: spec{"platform": "linux/s390x"}, env: secret, fail: "image", texts: []string{"linux/s390x"}},
			{name: "user", fields: spec{"image": "agentshim/user:test", "user": nil, "workspace": nil}, env: secret, fail: "plan", texts: []string{"user"}},
			{name: "mount", fields: spec{"mounts": []any{map[string]any{"source": "/nowhere/at/all", "target": "/data"}}}, env: secret, fail: "mounts", texts: []string{"/nowhere/at/all"}},
			{name: "gap", fields: spec{"accept": []string{}, "user": "0:0"}, env: secret, fail: "plan", texts: []string{"root-user"}},
			{name: "variable", scope: "spec", fail: "variables", texts: []string{"TOKEN"}},
			{name: "env file", fields: spec{"envFiles": []string{"no.env"}}, env: secret, scope: "spec", fail: "files", texts: []string{"no.env"}},
		}
		if s.name != "docker-root" && s.name != "podman-rootless" {
			rows = rows[:3] // the rest is told without the engine, or by its adapter
		}
		for _, tc := range rows {
			t.Run(tc.name, func(t *testing.T) {
				d := s.doctor(t, call{Env: tc.env}, append([]string{"--spec", s.write(t, needs(tc.fields))}, tc.args...)...)
				if strings.Contains(d.Stdout, "value-of-token") {
					t.Error("a value is shown")
				}
				if tc.fail == "" {
					d.says(t, "spec", "variables", shim.Passed, "TOKEN")
					d.says(t, s.engine, "program", shim.Passed, `"sh" is /bin/sh`)
					if d.Count(shim.Failed) != 0 {
						t.Errorf("%s", d.Text())
					}
					return
				}
				scope := tc.scope
				if scope == "" {
					scope = s.engine
				}
				d.says(t, scope, tc.fail, shim.Failed, tc.texts...)
				for _, c := range d.Checks {
					if c.Status == shim.Failed && c.Name != tc.fail && c.Name != "plan" && c.Name != "proof" {
						t.Errorf("fails too: %+v", c)
					}
				}
			})
		}
	})
}

// TestDoctorDeviatingEngine has the engine add a capability: the proof fails and names it.
func TestDoctorDeviatingEngine(t *testing.T) {
	Need(t)
	s := setups[0]
	dev := newDeviant(t, s)
	dev.edit(t, deviation{edit: []change{with("HostConfig CapAdd", "NET_RAW")}})
	d := s.doctor(t, call{Env: []string{dev.env()}})
	d.says(t, s.engine, "proof", shim.Failed, "posture", "CapBnd")
	if c := d.check(s.engine, "posture"); c.Status != "" {
		t.Errorf("%+v", c)
	}
	if left := s.leftovers(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	dev.edit(t, deviation{})
	s.doctor(t, call{Env: []string{dev.env()}}).says(t, s.engine, "posture", shim.Passed)
}

// TestDoctorNoWayOut takes each way into a network namespace away: that is a warning,
// and what needs no way out is still proven.
func TestDoctorNoWayOut(t *testing.T) {
	Need(t)
	group, rootless := setups[1], setups[3]
	for _, s := range []setup{group, rootless} {
		t.Run(s.name, func(t *testing.T) {
			d := s.doctor(t, call{Env: []string{withoutWay(t, s)}})
			d.says(t, s.engine, "way out", shim.Warned, "not this")
			d.says(t, s.engine, "posture", shim.Passed)
			d.says(t, s.engine, "network", shim.Passed, "ENETUNREACH")
		})
	}
	t.Run("docker-root", func(t *testing.T) {
		cmd, cancel := setups[0].command(t, call{}, "/usr/bin/setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", agentshim, "doctor", "--engine", "docker")
		defer cancel()
		r := finish(t, cmd).ok(t)
		if !strings.Contains(r.Stdout, "WARN  way out") || !strings.Contains(r.Stdout, "CAP_NET_ADMIN") || !strings.Contains(r.Stdout, "PASS  posture") {
			t.Errorf("%s", r.Stdout)
		}
	})
}

// refusing is a folder with a client that refuses one kind of call.
func refusing(t *testing.T, s setup, words string) string {
	t.Helper()
	real, err := exec.LookPath(s.engine)
	if err != nil {
		t.Fatal(err)
	}
	dir := s.folder(t)
	place(t, filepath.Join(dir, s.engine), fmt.Appendf(nil, "#!/bin/sh\ncase \" $* \" in *'%s'*) echo not this >&2; exit 1;; esac\nexec %s \"$@\"\n", words, real), 0o755)
	return dir
}

// refusingDaemon is the environment with a daemon that makes no container in another
// one's network.
func refusingDaemon(t *testing.T, s setup) string {
	t.Helper()
	p := newDockerProxy(t, s)
	p.rule(proxyRules{edit: func(_ bool, body map[string]any) error {
		host, _ := body["HostConfig"].(map[string]any)
		if mode, _ := host["NetworkMode"].(string); strings.HasPrefix(mode, "container:") {
			return errors.New("not this")
		}
		return nil
	}})
	return p.env()
}

// withoutWay is the environment that takes a set-up's way into network namespaces away.
func withoutWay(t *testing.T, s setup) string {
	t.Helper()
	if s.engine == "docker" {
		return refusingDaemon(t, s)
	}
	return "PATH=" + refusing(t, s, " unshare -- ") + ":" + os.Getenv("PATH")
}

// TestDoctorBrokenEngines takes one thing away that the engine needs.
func TestDoctorBrokenEngines(t *testing.T) {
	Need(t)
	docker, group, rootless := setups[0], setups[1], setups[3]
	nowhere := filepath.Join(docker.folder(t), "docker.sock")
	for _, tc := range []struct {
		name   string
		s      setup
		env    []string
		check  string
		status shim.Status
		texts  []string
	}{
		{"L11 no daemon", docker, []string{"DOCKER_HOST=unix://" + nowhere}, "engine", shim.Failed, []string{"engine-down", "systemctl start docker"}},
		{"M21 remote daemon", group, []string{"DOCKER_HOST=tcp://127.0.0.1:1"}, "engine", shim.Failed, []string{"engine-remote", "unset DOCKER_HOST"}},
		{"L11 bad context", docker, []string{"DOCKER_CONTEXT=nope"}, "engine", shim.Failed, []string{"engine-context", "docker context ls"}},
		{"L11 not in the group", setup{name: "docker-denied", engine: "docker", account: rootless.account}, nil, "engine", shim.Failed, []string{"engine-denied", "usermod -aG docker"}},
		{"podman elsewhere", rootless, []string{"CONTAINER_HOST=unix:///run/podman.sock"}, "engine", shim.Failed, []string{"engine-remote"}},
		{"L10 another user's runtime folder", rootless, []string{"XDG_RUNTIME_DIR=/root"}, "runtime folder", shim.Failed, []string{"uid 0", "unset XDG_RUNTIME_DIR"}},
		{"no client", rootless, []string{"PATH=" + docker.folder(t)}, "engine", shim.Failed, []string{"engine-missing"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := tc.s.doctor(t, call{Env: tc.env})
			d.says(t, tc.s.engine, tc.check, tc.status, tc.texts...)
			d.says(t, tc.s.engine, "proof", shim.Skipped)
			if len(d.Proofs) != 0 {
				t.Errorf("proofs %+v", d.Proofs)
			}
		})
	}
}

// TestDoctorBrokenMachine hides a file of the machine from one doctor, in a mount
// namespace of its own.
func TestDoctorBrokenMachine(t *testing.T) {
	Need(t)
	s := setups[3]
	u, err := user.Lookup(s.account)
	if err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(s.folder(t), "empty")
	if err := os.WriteFile(empty, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		hidden, check string
		status        shim.Status
		texts         []string
	}{
		{"/usr/bin/newuidmap", "id helpers", shim.Failed, []string{"newuidmap", "apt install uidmap"}},
		{"/etc/subuid", "subordinate ids", shim.Failed, []string{"/etc/subuid", "usermod --add-subuids"}},
	} {
		t.Run(tc.hidden, func(t *testing.T) {
			broken := setup{name: "root", engine: "podman", account: "root"}
			state := s.private(t)
			cmd, cancel := broken.command(t, call{State: state}, "/usr/bin/unshare", "--mount", "sh", "-c",
				"mount --bind "+empty+" "+tc.hidden+" && exec setpriv --reuid "+u.Uid+" --regid "+u.Gid+" --init-groups "+agentshim+" doctor --json --engine podman")
			defer cancel()
			cmd.Env = append(cmd.Env, "HOME="+u.HomeDir)
			d := diagnosis{result: finish(t, cmd)}
			if err := json.Unmarshal([]byte(d.Stdout), &d.Diagnosis); err != nil || d.Code != 1 {
				t.Fatalf("%v: %+v", err, d.result)
			}
			d.says(t, "podman", tc.check, tc.status, tc.texts...)
			d.says(t, "podman", "proof", shim.Skipped)
		})
	}
}

// TestDoctorWithoutEngineFlag: what is wrong with the engine that exec would not
// choose is a warning.
func TestDoctorWithoutEngineFlag(t *testing.T) {
	Need(t)
	s := setups[3]
	r := s.call(t, call{}, "doctor")
	r.ok(t)
	for _, want := range []string{"\ndocker\n  WARN  engine ", "(exec uses podman)", "\npodman\n", "PASS  posture "} {
		if !strings.Contains(r.Stdout, want) {
			t.Errorf("%q is not in\n%s", want, r.Stdout)
		}
	}
}

// TestDoctorInterrupted ends the doctor while its container runs: both are gone, and
// the image.
func TestDoctorInterrupted(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		state := s.private(t)
		cmd, cancel := s.command(t, call{State: state}, agentshim, "doctor", "--engine", s.engine)
		defer cancel()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// The record is written just before the engine is asked for the container.
		for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
			if found, _ := filepath.Glob(filepath.Join(state, "agentshim/runs/*/record.json")); len(found) > 0 {
				break
			}
			if time.Since(began) > 20*time.Second {
				t.Fatal("no record")
			}
		}
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		err := cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 128+int(syscall.SIGINT) {
			t.Errorf("exit %d, %v", code, err)
		}
		if rec := record(t, state); rec.Reason != shim.ReasonInterrupted {
			t.Errorf("record: %s %s", rec.Reason, rec.Message)
		}
		if left := s.leftovers(t); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// TestDoctorFullDisk gives agentshim's folders a file system that is too small.
func TestDoctorFullDisk(t *testing.T) {
	Need(t)
	s := setups[0]
	state := s.private(t)
	if err := syscall.Mount("tmpfs", state, "tmpfs", 0, "size=64k,mode=700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(state, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	s.doctor(t, call{State: state}).says(t, "machine", "disk", shim.Failed, "XDG_STATE_HOME")
}
