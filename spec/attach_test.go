package spec

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

func attachable(t *testing.T, fields string) harness.Harness {
	t.Helper()
	h, err := harness.Parse([]byte(`{"version":1,"image":"agent:dev","harness":{"binary":"sh","promptMode":"file","promptFlag":"--in"}`+fields+`}`), "/", harness.Overrides{})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestCheckAttach(t *testing.T) {
	var r *Refusal
	if err := CheckAttach(attachable(t, "")); !errors.As(err, &r) || r.Reason != "widening" || !strings.Contains(r.Hint, `"attached-container"`) {
		t.Errorf("%v", err)
	}
	if err := CheckAttach(attachable(t, `,"accept":["attached-container"]`)); err != nil {
		t.Error(err)
	}
}

// The process has the container's variables and home, and nothing that agentshim's own has.
func TestAttach(t *testing.T) {
	host := dockerRoot()
	host.Image.WorkingDir = "/srv"
	p, err := Attach(attachable(t, `,"env":{"MINE":"x"},"accept":["attached-container"]`), host, Entered{UID: 5, GID: 6, Home: "/home/five"}, Options{PromptPath: "/tmp/p"})
	if err != nil {
		t.Fatal(err)
	}
	want := Process{
		Args: []string{"sh", "--in", "/tmp/p"}, Cwd: "/srv", PromptMode: "file",
		Env: []EnvVar{
			{Name: "EDITOR", From: "image", Value: "vi"},
			{Name: "GODEBUG", From: "image", Value: "x"},
			{Name: "HOME", From: "agentshim", Value: "/home/five"},
			{Name: "MINE", From: "env"},
			{Name: "PATH", From: "image", Value: "/opt/agent/bin:/usr/bin:/bin"},
		},
	}
	if d := cmp.Diff(want, p.Process); d != "" {
		t.Errorf("process (-want +got):\n%s", d)
	}
	if !slices.ContainsFunc(p.Widenings, func(n Note) bool { return n.Name == "attached-container" && n.Accepted }) {
		t.Errorf("widenings: %+v", p.Widenings)
	}
	if p.Seccomp == nil || len(p.MaskedPaths) == 0 {
		t.Error("nothing to compare with")
	}
}

func TestAttachAsRoot(t *testing.T) {
	var r *Refusal
	if _, err := Attach(attachable(t, `,"accept":["attached-container"]`), dockerRoot(), Entered{}, Options{}); !errors.As(err, &r) || r.Reason != "widening" || !strings.Contains(r.Message, "root-user") {
		t.Errorf("%v", err)
	}
	p, err := Attach(attachable(t, `,"workingDir":"/w","accept":["attached-container","root-user"]`), dockerRoot(), Entered{}, Options{})
	if err != nil || p.Process.Cwd != "/w" || slices.ContainsFunc(p.Process.Env, func(v EnvVar) bool { return v.Name == "HOME" }) {
		t.Errorf("%+v %v", p.Process, err)
	}
}

// TestHolder: of the other container's it has the processes, of the host init's file.
func TestHolder(t *testing.T) {
	host := dockerRoot()
	d, err := Holder(host, SymbolicPaths, "0123", "5:6")
	if err != nil {
		t.Fatal(err)
	}
	policy := d.HostConfig.SecurityOpt
	d.HostConfig.SecurityOpt = nil
	want := DockerContainer{
		Image: host.Image.ID, Entrypoint: []string{InitPath}, Cmd: []string{HoldArg}, User: "5:6", WorkingDir: "/",
		Env: d.Env, StopSignal: "SIGKILL", Labels: map[string]string{LabelHelper: HoldArg, LabelRun: SymbolicPaths.ID},
		AttachStdin: true, AttachStdout: true, AttachStderr: true, OpenStdin: true, StdinOnce: true,
		HostConfig: DockerHostConfig{
			NetworkMode: "none", IpcMode: "private", CgroupnsMode: "private", PidMode: "container:0123",
			CapDrop: []string{"ALL"}, CapAdd: []string{}, ReadonlyRootfs: true, AutoRemove: true, Ulimits: []DockerUlimit{{Name: "core"}},
			Mounts: []DockerMount{{Type: "bind", Source: SymbolicPaths.Init, Target: InitPath, ReadOnly: true, BindOptions: &DockerBind{"rprivate"}}},
		},
	}
	want.Healthcheck.Test, want.HostConfig.LogConfig.Type = []string{"NONE"}, "none"
	if d := cmp.Diff(want, d); d != "" {
		t.Errorf("holder (-want +got):\n%s", d)
	}
	if len(policy) != 2 || policy[0] != "no-new-privileges" || !strings.Contains(policy[1], `"SCMP_ACT_ERRNO"`) || strings.Contains(policy[1], `"ptrace"`) {
		t.Errorf("security: %.200q", policy)
	}
	for _, kv := range d.Env {
		if name, _, value := strings.Cut(kv, "="); value && name != "PATH" {
			t.Errorf("the image's %s is there", name)
		}
	}
}
