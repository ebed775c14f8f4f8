package spec

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// Who owns a copy on the host is who the agent is there; where that can't be, the run
// is refused.
func TestCopyOwner(t *testing.T) {
	group := func() Host {
		h := dockerRoot()
		h.Caller.UID, h.Caller.GID = 1001, 1001
		return h
	}
	type owner struct {
		uid, gid uint32
		chown    bool
	}
	for _, tt := range []struct {
		name string
		host Host
		file string
		want owner
	}{
		{"root, the workspace's owner", dockerRoot(), "", owner{1000, 1000, true}},
		{"root, a user", podmanRoot(), `"user":"1234:1235",`, owner{1234, 1235, true}},
		{"docker group", group(), "", owner{1001, 1001, false}},
		{"docker group, another group id", group(), `"user":"1001:7",`, owner{1001, 1001, false}},
		{"rootless", podmanRootless(), "", owner{1001, 1001, false}},
		{"rootless, a user", podmanRootless(), `"user":"1234:1234",`, owner{1001, 1001, false}},
		{"rootless, root", podmanRootless(), `"user":"0:0",`, owner{1001, 1001, false}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			plan, err := Compile(parse(t, copyFile(tt.file)), tt.host, Options{})
			if err != nil {
				t.Fatal(err)
			}
			if got := (owner{plan.Copy.UID, plan.Copy.GID, plan.Copy.Chown}); got != tt.want {
				t.Errorf("owner %+v, want %+v", got, tt.want)
			}
			if plan.Copy.Dev != 64768 || plan.Copy.Ino != 11 {
				t.Errorf("the host's folder is %d/%d", plan.Copy.Dev, plan.Copy.Ino)
			}
		})
	}
	for _, tt := range []struct {
		name string
		host Host
		file string
	}{
		{"docker group, another uid", group(), `"user":"1234:1234",`},
		{"rootless, engine's mapping", podmanRootless(), `"user":"1234:1234","userns":"engine",`},
		{"rootless, auto", podmanRootless(), `"userns":"auto",`},
		{"rootful, auto", podmanRoot(), `"userns":"auto",`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Compile(parse(t, copyFile(tt.file)), tt.host, Options{})
			var refusal *Refusal
			if !errors.As(err, &refusal) || refusal.Reason != "identity" || refusal.Hint == "" {
				t.Errorf("got %v; want identity, with a hint", err)
			}
		})
	}
}

// What is bound is the run's copy, and never the host's folder.
func TestCopyIsBound(t *testing.T) {
	plan, err := Compile(parse(t, copyFile("")), dockerRoot(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	run := RunPaths{ID: "x", Dir: "/run-dir", Init: "/init", State: "/state"}
	c, err := plan.DockerContainer(run)
	if err != nil {
		t.Fatal(err)
	}
	bound := func(m DockerMount) bool { return m.Source == "/state/copy/tree" && m.Target == "/workspace" }
	if text := createText(t, c); !slices.ContainsFunc(c.HostConfig.Mounts, bound) || strings.Contains(text, "/home/user/project") {
		t.Errorf("asked for: %s", text)
	}
	if slices.ContainsFunc(plan.Widenings, func(n Note) bool { return strings.HasPrefix(n.Name, "writable:") }) {
		t.Errorf("a copy is no widening: %v", plan.Widenings)
	}
}

func copyFile(extra string) string {
	return `{"version":1,"image":"agent:dev",` + extra + `"harness":{"binary":"agent"},
"workspace":{"source":".","mode":"copy"},"accept":["rootless-cgroup-limits","root-user"]}`
}
