package spec

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/mounts"
)

func cacheOfPlan(p Plan) mounts.Cache {
	id := mounts.CacheID{
		CacheOwner: mounts.CacheOwner{Project: "/home/me/pro ject", ImageID: p.Image.ID, UID: p.Identity.UID, GID: p.Identity.GID},
		Name:       "npm", Key: "lock-7f3a",
	}
	return mounts.Cache{ID: id, Volume: id.Volume(), Target: Home + "/.npm"}
}

// TestCacheGoldens: what makes a cache's volume and gives it to the agent.
func TestCacheGoldens(t *testing.T) {
	h := parse(t, `{"version":1,"image":"agent:dev","harness":{"binary":"agent"},"user":"1001:1001","accept":["rootless-cgroup-limits"],"env":{"TOKEN":"hunter2"}}`)
	for name, host := range hosts {
		t.Run(name, func(t *testing.T) {
			p := compileGolden(t, h, host())
			c := cacheOfPlan(p)
			dir := filepath.Join("testdata", "cache", name)
			if p.Engine.Kind == Docker {
				d, err := p.CacheContainer(SymbolicPaths, c)
				if err != nil {
					t.Fatal(err)
				}
				judgeCacheContainer(t, p, c, d)
				d.HostConfig.SecurityOpt = []string{d.HostConfig.SecurityOpt[0], "seccomp=" + p.SeccompDigest}
				golden(t, filepath.Join(dir, "container.json"), createText(t, d))
				return
			}
			argv, err := p.CacheArgv(SymbolicPaths, c)
			if err != nil {
				t.Fatal(err)
			}
			judgeCacheArgv(t, p, c, argv)
			volume, err := p.CacheVolumeArgv(c, "2026-01-02T03:04:05Z RUN_ID")
			if err != nil {
				t.Fatal(err)
			}
			golden(t, filepath.Join(dir, "volume"), strings.Join(volume, "\n")+"\n")
			golden(t, filepath.Join(dir, "container"), strings.Join(argv, "\n")+"\n")
		})
	}
}

// judgeCacheContainer: what the container of a cache may and may not.
func judgeCacheContainer(t *testing.T, p Plan, c mounts.Cache, d DockerContainer) {
	t.Helper()
	h := d.HostConfig
	if diff := cmp.Diff([]string{CacheArg, CachePath, "1001", "1001"}, d.Cmd); diff != "" {
		t.Error(diff)
	}
	if d.Image != p.Image.ID || !slices.Equal(d.Entrypoint, []string{InitPath}) || d.User != "0:0" {
		t.Errorf("image %s, entrypoint %q, user %s", d.Image, d.Entrypoint, d.User)
	}
	if h.NetworkMode != "none" || !slices.Equal(h.CapDrop, []string{"ALL"}) || !slices.Equal(h.CapAdd, []string{"CHOWN"}) || !h.ReadonlyRootfs || len(h.Devices) > 0 {
		t.Errorf("%+v", h)
	}
	if h.SecurityOpt[0] != "no-new-privileges" || len(h.SecurityOpt) != 2 {
		t.Errorf("security options %q", h.SecurityOpt)
	}
	for _, m := range h.Mounts {
		if m.Source != c.Volume && !m.ReadOnly {
			t.Errorf("writable: %+v", m)
		}
	}
	if text := createText(t, d); len(h.Mounts) != 2 || strings.Contains(text, "hunter2") {
		t.Error(text)
	}
}

// judgeCacheArgv is the same in Podman's words.
func judgeCacheArgv(t *testing.T, p Plan, c mounts.Cache, argv []string) {
	t.Helper()
	end := slices.Index(argv, "--")
	if want := []string{"--", p.Image.ID, CacheArg, CachePath, "1001", "1001"}; !slices.Equal(argv[end:], want) {
		t.Errorf("%q", argv[end:])
	}
	var mounted, added int
	for _, word := range argv[:end] {
		switch {
		case strings.HasPrefix(word, "--mount="):
			mounted++
			if !strings.Contains(word, c.Volume) && !strings.Contains(word, ",readonly") {
				t.Error(word)
			}
		case strings.HasPrefix(word, "--cap-add="):
			added++
		case strings.Contains(word, "hunter2"), strings.HasPrefix(word, "--volume"), strings.HasPrefix(word, "--privileged"), strings.HasPrefix(word, "--device"):
			t.Error(word)
		}
	}
	for _, word := range []string{"--network=none", "--cap-drop=ALL", "--cap-add=CHOWN", "--security-opt=no-new-privileges", "--read-only", "--entrypoint=" + InitPath} {
		if !slices.Contains(argv[:end], word) {
			t.Errorf("no %s", word)
		}
	}
	if mounted != 2 || added != 1 {
		t.Errorf("%d mounts, %d capabilities", mounted, added)
	}
}
