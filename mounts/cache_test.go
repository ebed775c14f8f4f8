package mounts

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

var cacheOwner = CacheOwner{Project: "/home/me/ws", ImageID: "sha256:0123", UID: 1000, GID: 100}

func TestCacheVolume(t *testing.T) {
	id := CacheID{CacheOwner: cacheOwner, Name: "npm", Key: "lock-7f3a"}
	// Stable: a changed name would lose every cache.
	if got, want := id.Volume(), "agentshim-cache-e578682736e2b853f06691f12ff35d0b2ad2277e8d1f0f66932942a8d2871301"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	// docker volume create: [a-zA-Z0-9][a-zA-Z0-9_.-]*, the file system's 255 bytes.
	form := regexp.MustCompile(`^[a-z0-9][a-z0-9-]{1,100}$`)
	seen := map[string]CacheID{}
	change := func(f func(*CacheID)) {
		other := id
		f(&other)
		v := other.Volume()
		if clash, twice := seen[v]; twice || !form.MatchString(v) || !IsCacheVolume(v) {
			t.Errorf("%+v: %s, also of %+v", other, v, clash)
		}
		seen[v] = other
		got, ok := ParseCache(v, other.Labels())
		if valid := cacheProblem("", other.Name, other.Key) == nil; ok != valid || ok && got != other {
			t.Errorf("%+v was read back as %+v, %v", other, got, ok)
		}
	}
	change(func(*CacheID) {})
	change(func(id *CacheID) { id.Project += "/" })
	change(func(id *CacheID) { id.Project = "/home/me/w s\n\xff\"" })
	change(func(id *CacheID) { id.Project = strings.Repeat("/n", 2048) })
	change(func(id *CacheID) { id.ImageID = "sha256:0124" })
	change(func(id *CacheID) { id.UID, id.GID = 100, 1000 })
	change(func(id *CacheID) { id.UID, id.GID = 10001, 0 })
	change(func(id *CacheID) { id.UID = 4294967295 })
	change(func(id *CacheID) { id.Name, id.Key = "npml", "ock-7f3a" })
	change(func(id *CacheID) { id.Name, id.Key = "npmlock-7f3a", "" })
	change(func(id *CacheID) { id.Key = "" })
	change(func(id *CacheID) { id.Name = "NPM" })
	change(func(id *CacheID) { id.Name = "../npm" })
}

func TestParseCacheRefuses(t *testing.T) {
	id := CacheID{CacheOwner: cacheOwner, Name: "npm"}
	for name, c := range map[string]struct {
		volume string
		change func(map[string]string)
	}{
		"no labels":       {"", func(l map[string]string) { clear(l) }},
		"another version": {"", func(l map[string]string) { l[LabelCache] = "2" }},
		"another project": {"", func(l map[string]string) { l[labelCacheProject] = `"/other"` }},
		"another user":    {"", func(l map[string]string) { l[labelCacheUser] = "0:0" }},
		"user too large":  {"", func(l map[string]string) { l[labelCacheUser] = "4294968296:100" }},
		"user spelled":    {"", func(l map[string]string) { l[labelCacheUser] = "1000" }},
		"bad quoting":     {"", func(l map[string]string) { l[labelCacheProject] = "/home/me/ws" }},
		"another name":    {"", func(l map[string]string) { l[labelCacheName] = "pip" }},
		"another volume":  {"agentshim-cache-" + strings.Repeat("0", 64), func(map[string]string) {}},
		"short volume":    {"agentshim-cache-0", func(map[string]string) {}},
		"a stranger's":    {"data", func(map[string]string) {}},
	} {
		labels := id.Labels()
		c.change(labels)
		if c.volume == "" {
			c.volume = id.Volume()
		}
		if got, ok := ParseCache(c.volume, labels); ok {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestCaches(t *testing.T) {
	engines(t, func(t *testing.T, podman bool) {
		h := base(func(h *harness.Harness) {
			h.Mounts = []harness.Mount{{Source: "/data", Target: "/cache"}}
			h.Caches = []harness.Cache{{Name: "npm", Target: "~/.cache/npm"}, {Name: "npm", Key: "b", Target: "/cache/x/"}, {Name: "nm", Target: "sub"}}
		})
		to := target(podman)
		to.ImageID = "sha256:0123"
		set, err := Compile(h, facts(func(f *Facts) { f.Nested = map[string]string{"/data/x": NodeDir, "/src/proj/sub": NodeDir} }), to)
		if err != nil {
			t.Fatal(err)
		}
		cache := func(name, key, target string) Cache {
			id := CacheID{CacheOwner: CacheOwner{Project: "/src/proj", ImageID: "sha256:0123", UID: 1000, GID: 1000}, Name: name, Key: key}
			return Cache{ID: id, Volume: id.Volume(), Target: target}
		}
		want := []Cache{cache("npm", "b", "/cache/x"), cache("npm", "", AgentHome+"/.cache/npm"), cache("nm", "", "/workspace/sub")}
		if diff := cmp.Diff(want, set.Caches); diff != "" {
			t.Error(diff)
		}
		mounted := slices.DeleteFunc(slices.Clone(set.Mounts), func(m Mount) bool { return m.Why != WhyCache && m.Why != WhyParent })
		by := [2]string{ByNoNewPrivs, ByDevicesCgroup}
		if podman {
			by = [2]string{ByFlag, ByFlag}
		}
		volume := func(c Cache) Mount {
			return Mount{Target: c.Target, Type: TypeVolume, Source: c.Volume, Writable: true, NoSUIDBy: by[0], NoDevBy: by[1], UID: 1000, GID: 1000, Why: WhyCache}
		}
		parent := Mount{
			Target: AgentHome + "/.cache", Type: TypeTmpfs, Writable: true, NoSUIDBy: ByFlag, NoDevBy: ByFlag,
			SizeBytes: 512 * miB, Mode: 0o700, UID: 1000, GID: 1000, Why: WhyParent,
		}
		if diff := cmp.Diff([]Mount{volume(want[0]), parent, volume(want[1]), volume(want[2])}, mounted); diff != "" {
			t.Error(diff)
		}
	})
}

// TestCachesRefuses: M12, M18, A59, T08.
func TestCachesRefuses(t *testing.T) {
	one := func(name, key, target string) []harness.Cache {
		return []harness.Cache{{Name: name, Key: key, Target: target}}
	}
	for name, c := range map[string]struct {
		caches []harness.Cache
		at     []string
	}{
		"no name":            {one("", "", "/c"), []string{"$.caches[0].name"}},
		"path as name":       {one("../x", "", "/c"), []string{"$.caches[0].name"}},
		"slash":              {one("a/b", "", "/c"), []string{"$.caches[0].name"}},
		"dots":               {one("..", "", "/c"), []string{"$.caches[0].name"}},
		"dash":               {one("-v", "", "/c"), []string{"$.caches[0].name"}},
		"line":               {one("a\n", "", "/c"), []string{"$.caches[0].name"}},
		"long name":          {one(strings.Repeat("n", 65), "", "/c"), []string{"$.caches[0].name"}},
		"letter of no ASCII": {one("ä", "", "/c"), []string{"$.caches[0].name"}},
		"key":                {one("a", "../k", "/c"), []string{"$.caches[0].key"}},
		"comma in key":       {one("a", "k,readonly", "/c"), []string{"$.caches[0].key"}},
		"long key":           {one("a", strings.Repeat("k", 129), "/c"), []string{"$.caches[0].key"}},
		"empty target":       {one("a", "", ""), []string{"$.caches[0].target"}},
		"outside":            {one("a", "", "../x"), []string{"$.caches[0].target"}},
		"absent in a source": {one("a", "", "absent"), []string{"$.caches[0].target"}},
		"file in a source":   {one("a", "", "file"), []string{"$.caches[0].target"}},
		"link in a source":   {one("a", "", "link"), []string{"$.caches[0].target"}},
		"the workspace":      {one("a", "", "/workspace"), []string{"$.caches[0].target"}},
		"root":               {one("a", "", "/"), []string{"$.caches[0].target"}},
		"proc":               {one("a", "", "/x/../proc/1"), []string{"$.caches[0].target"}},
		"passwd":             {one("a", "", "/etc"), []string{"$.caches[0].target"}},
		"whole home":         {one("a", "", "~/"), []string{"$.caches[0].target"}},
		"over the home":      {one("a", "", "/home"), []string{"$.caches[0].target"}},
		"a mount's":          {one("a", "", "/data/in/"), []string{"$.caches[0].target"}},
		"mount in it":        {one("a", "", "/data"), []string{"$.mounts[0].target"}},
		"home's mount":       {one("a", "", "~/.cfg"), []string{"$.caches[0].target"}},
		"two on one":         {[]harness.Cache{{Name: "a", Target: "/c"}, {Name: "b", Target: "/d/../c"}}, []string{"$.caches[1].target"}},
		"one in another":     {[]harness.Cache{{Name: "a", Target: "/c/x"}, {Name: "b", Target: "/c"}}, []string{"$.caches[0].target"}},
		"one twice":          {[]harness.Cache{{Name: "a", Target: "/c"}, {Name: "a", Target: "/d"}}, []string{"$.caches[0].name", "$.caches[1].name"}},
		"too many":           {slices.Repeat(one("a", "", "/c"), maxCaches+1), []string{"$.caches"}},
	} {
		t.Run(name, func(t *testing.T) {
			h := base(func(h *harness.Harness) {
				h.Mounts = []harness.Mount{{Source: "/data", Target: "/data/in"}, {Source: "/more", Target: "~/.cfg"}}
				h.Caches = c.caches
			})
			_, err := Compile(h, facts(func(f *Facts) { f.Nested = map[string]string{"/src/proj/file": NodeFile, "/src/proj/link": NodeOther} }), target(false))
			for _, at := range c.at {
				wantProblem(t, err, at, ErrRefused)
			}
		})
	}
}

// TestParents: no folder on the way to a target below a tmpfs is an engine's.
func TestParents(t *testing.T) {
	engines(t, func(t *testing.T, podman bool) {
		h := base(func(h *harness.Harness) {
			h.Home.NoExec = true
			h.Mounts = []harness.Mount{{Source: "/data", Target: "~/.local/share/app"}, {Source: "/more", Target: "/run/a/b"}, {Source: "/conf/one", Target: "/opt/x/y/z"}}
			h.Caches = []harness.Cache{{Name: "c", Target: "~/.local/share/other/c"}, {Name: "d", Target: "~/d"}}
		})
		to := target(podman)
		to.ImageVolumes = []string{"/tmp/v/w"}
		set, err := Compile(h, facts(nil), to)
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]int64{"/home/agent/.local": 512, "/home/agent/.local/share": 512, "/home/agent/.local/share/other": 512, "/run/a": 16}
		if !podman { // which ignores the image's VOLUMEs
			want["/tmp/v"] = 512
		}
		got := map[string]int64{}
		for _, m := range set.Mounts {
			if m.Why != WhyParent {
				continue
			}
			got[m.Target] = m.SizeBytes / miB
			if m.Type != TypeTmpfs || m.Mode != 0o700 || m.UID != 1000 || m.GID != 1000 || m.NoExec != strings.HasPrefix(m.Target, AgentHome) {
				t.Errorf("%+v", m)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	})
}

// TestParentsRefused: a parent's path must fit --tmpfs, and its size into the memory.
func TestParentsRefused(t *testing.T) {
	for _, name := range []string{"a:b", "a,b"} {
		_, err := Compile(withMount(harness.Mount{Source: "/data", Target: "~/" + name + "/x"}), facts(nil), target(false))
		wantProblem(t, err, "$.mounts[0].target", ErrRefused)
		if _, err := Compile(withMount(harness.Mount{Source: "/data", Target: "~/" + name}), facts(nil), target(false)); err != nil {
			t.Errorf("control: %v", err)
		}
	}
	to := target(true)
	to.MemoryBytes = 512*3*miB + 64*miB + 16*miB + 64*miB - 1
	_, err := Compile(withMount(harness.Mount{Source: "/data", Target: "~/.cache/x"}), facts(nil), to)
	p := wantProblem(t, err, "$.resources.memoryMb", ErrRefused)
	if !strings.Contains(p.Reason, "1 on the way") {
		t.Error(p.Reason)
	}
	if _, err := Compile(withMount(harness.Mount{Source: "/data", Target: "~/x"}), facts(nil), to); err != nil {
		t.Errorf("control: %v", err)
	}
}

func TestCacheProject(t *testing.T) {
	f := Facts{Sources: map[string]Source{"/here/ws": {Path: "/real/ws", Dir: true}}}
	h := harness.Harness{Dir: "/here", Workspace: &harness.Workspace{Source: "ws", Mode: "writable"}}
	if got := CacheProject(h, f); got != "/real/ws" {
		t.Error(got)
	}
	h.Workspace = nil
	if got := CacheProject(h, f); got != "/here" {
		t.Error(got)
	}
}

func FuzzParseCache(f *testing.F) {
	id := CacheID{CacheOwner: cacheOwner, Name: "npm", Key: "k"}
	l := id.Labels()
	f.Add(id.Volume(), l[labelCacheProject], l[labelCacheImage], l[labelCacheUser], "npm", "k")
	f.Add("agentshim-cache-", `"`, "", ":", "", "")
	f.Fuzz(func(t *testing.T, volume, project, image, user, name, key string) {
		got, ok := ParseCache(volume, map[string]string{
			LabelCache: cacheVersion, labelCacheProject: project, labelCacheImage: image, labelCacheUser: user, labelCacheName: name, labelCacheKey: key,
		})
		if ok && (got.Volume() != volume || got.Name != name || got.Key != key || got.ImageID != image) {
			t.Errorf("%+v", got)
		}
	})
}
