package spec

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/mounts"
)

func cacheOfPlan(p Plan) mounts.Cache {
	id := mounts.CacheID{
		CacheOwner: mounts.CacheOwner{Project: "/home/me/pro ject", ImageID: p.Image.ID, UID: p.Identity.UID, GID: p.Identity.GID},
		Name:       "npm", Key: "lock-7f3a",
	}
	return mounts.Cache{ID: id, Volume: id.Volume(), Target: Home + "/.npm"}
}

// TestCacheGoldens: the words that make a cache's volume and give it to the agent.
func TestCacheGoldens(t *testing.T) {
	h := parse(t, `{"version":1,"image":"agent:dev","harness":{"binary":"agent"},"user":"1001:1001","accept":["rootless-cgroup-limits"]}`)
	for name, host := range hosts {
		t.Run(name, func(t *testing.T) {
			p := compileGolden(t, h, host())
			c := cacheOfPlan(p)
			argv, err := p.CacheArgv(SymbolicPaths, c)
			if err != nil {
				t.Fatal(err)
			}
			dir := filepath.Join("testdata", "cache", name)
			volume, err := p.CacheVolumeArgv(c, "2026-01-02T03:04:05Z RUN_ID")
			if err != nil {
				t.Fatal(err)
			}
			golden(t, filepath.Join(dir, "volume"), strings.Join(volume, "\n")+"\n")
			golden(t, filepath.Join(dir, "container"), strings.Join(argv, "\n")+"\n")
		})
	}
}

// TestCacheArgv: what the container of a cache may and may not.
func TestCacheArgv(t *testing.T) {
	h := parse(t, `{"version":1,"image":"agent:dev","harness":{"binary":"agent"},"user":"1001:1001","accept":["rootless-cgroup-limits"],"capabilities":[],"env":{"TOKEN":"secret"}}`)
	for name, host := range hosts {
		p := compileGolden(t, h, host())
		c := cacheOfPlan(p)
		argv, err := p.CacheArgv(SymbolicPaths, c)
		if err != nil {
			t.Fatal(err)
		}
		end := slices.Index(argv, "--")
		want := []string{"--", p.Image.ID, CacheArg, CachePath, "1001", "1001"}
		if !slices.Equal(argv[end:], want) {
			t.Errorf("%s: %q", name, argv[end:])
		}
		var mounted, added int
		for _, word := range argv[:end] {
			switch {
			case strings.HasPrefix(word, "--mount="):
				mounted++
				if !strings.Contains(word, c.Volume) && !strings.Contains(word, ",readonly") {
					t.Errorf("%s: %s", name, word)
				}
			case strings.HasPrefix(word, "--cap-add="):
				added++
			case strings.Contains(word, "secret"), strings.HasPrefix(word, "--volume"), strings.HasPrefix(word, "--privileged"), strings.HasPrefix(word, "--device"):
				t.Errorf("%s: %s", name, word)
			}
		}
		for _, word := range []string{"--network=none", "--cap-drop=ALL", "--cap-add=CHOWN", "--security-opt=no-new-privileges", "--read-only", "--entrypoint=" + InitPath} {
			if !slices.Contains(argv[:end], word) {
				t.Errorf("%s: no %s", name, word)
			}
		}
		if mounted != 2 || added != 1 {
			t.Errorf("%s: %d mounts, %d capabilities", name, mounted, added)
		}
		if other := cacheOfPlan(p); SymbolicPaths.CacheName(other) != SymbolicPaths.CacheName(c) {
			t.Errorf("%s: %s", name, SymbolicPaths.CacheName(other))
		}
	}
}
