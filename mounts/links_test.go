package mounts

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
)

// linkTree: secret/key beside a workspace whose links lead there.
func linkTree(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	at := func(rel string) string { return filepath.Join(dir, rel) }
	if err := errors.Join(
		os.MkdirAll(at("secret"), 0o755), os.MkdirAll(at("ws/real/deep"), 0o755),
		os.WriteFile(at("secret/key"), nil, 0o600), os.WriteFile(at("ws/real/file"), nil, 0o600),
		os.Symlink("../secret", at("ws/link")), os.Symlink(at("secret/key"), at("ws/key")),
		os.Symlink("real", at("ws/inner")), os.Symlink("ws", at("mine")), os.Symlink("round", at("round")),
	); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestResolve(t *testing.T) {
	dir := linkTree(t)
	for p, want := range map[string]struct {
		real string
		err  error
	}{
		"ws/real/file":             {"ws/real/file", nil},
		"ws/./real//deep/../file":  {"ws/real/file", nil},
		"mine/real/file":           {"ws/real/file", nil},
		"ws":                       {"ws", nil},
		"mine":                     {"ws", nil},
		"secret/key":               {"secret/key", nil},
		"ws/../secret/key":         {"secret/key", nil},
		"ws/link/key":              {"", ErrAgentLink},
		"ws/link":                  {"", ErrAgentLink},
		"ws/key":                   {"", ErrAgentLink},
		"ws/inner/file":            {"", ErrAgentLink},
		"mine/inner/file":          {"", ErrAgentLink},
		"ws/real/deep/../../inner": {"", ErrAgentLink},
		"ws/none":                  {"", fs.ErrNotExist},
		"round":                    {"", unix.ELOOP},
	} {
		t.Run(p, func(t *testing.T) {
			got, err := Resolve(dir+"/"+p, []string{dir + "/ws"})
			if !errors.Is(err, want.err) {
				t.Fatalf("%v, want %v", err, want.err)
			}
			if err == nil && got != dir+"/"+want.real {
				t.Errorf("%q, want %q", got, want.real)
			}
		})
	}
	// The control: without a folder of an agent's, links are followed.
	if got, err := Resolve(dir+"/ws/link/key", nil); err != nil || got != dir+"/secret/key" {
		t.Errorf("%q, %v", got, err)
	}
}

// TestProbeRefusesAgentLinks: M13. The workspace counts whatever its mode is now.
func TestProbeRefusesAgentLinks(t *testing.T) {
	dir := linkTree(t)
	probe := func(h harness.Harness) error {
		h.Dir = dir
		_, err := Probe(h, ProbePaths{Home: dir})
		return err
	}
	for name, h := range map[string]harness.Harness{
		"workspace": {
			Workspace: &harness.Workspace{Source: "ws", Target: "/w", Mode: "read-only"},
			Mounts:    []harness.Mount{{Source: "ws/link", Target: "/s"}},
		},
		"writable mount": {Mounts: []harness.Mount{{Source: "mine", Target: "/w", Writable: true}, {Source: "ws/key", Target: "/s"}}},
	} {
		t.Run(name, func(t *testing.T) {
			if err := probe(h); !errors.Is(err, ErrRefused) || !errors.Is(err, ErrAgentLink) {
				t.Error(err)
			}
		})
	}
	if err := probe(harness.Harness{Mounts: []harness.Mount{{Source: "ws", Target: "/w"}, {Source: "ws/link", Target: "/s"}}}); err != nil {
		t.Error("a link below a read-only mount is the user's own:", err)
	}
}

// A source that is exchanged for a link as fast as it can be is seen as itself or
// refused. The control: what opening by name alone sees.
func TestProbeOfExchangedSource(t *testing.T) {
	dir := linkTree(t)
	source, link, secret := dir+"/ws/real", dir+"/ws/link", dir+"/secret"
	var stop atomic.Bool
	var over sync.WaitGroup
	over.Go(func() {
		for !stop.Load() {
			if err := unix.Renameat2(unix.AT_FDCWD, source, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE); err != nil {
				t.Error(err)
				return
			}
		}
	})
	defer func() { stop.Store(true); over.Wait() }()
	h := harness.Harness{
		Dir: dir, Workspace: &harness.Workspace{Source: "ws", Mode: "writable"},
		Mounts: []harness.Mount{{Source: "ws/real", Target: "/data"}},
	}
	shown, refused, followed := 0, 0, 0
	for range 100 {
		f, err := Probe(h, ProbePaths{Home: dir})
		switch {
		case err == nil && f.Sources[source].Path == source:
			shown++
		case errors.Is(err, ErrSource) || errors.Is(err, ErrRefused):
			refused++
		default:
			t.Fatalf("%+v, %v", f.Sources[source], err)
		}
		if s, problem := inspect(bind{key: source}, ProbePaths{}); problem == nil && s.Path == secret {
			followed++
		}
	}
	if refused == 0 || followed == 0 {
		t.Errorf("shown %d, refused %d, control followed the link %d times", shown, refused, followed)
	}
}
