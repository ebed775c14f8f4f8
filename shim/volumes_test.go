package shim

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

const volumeTarget = "/home/agent/.npm"

// withVolume adds a cache to a base's plan and to what its init saw.
func withVolume(b *base) string {
	id := mounts.CacheID{CacheOwner: mounts.CacheOwner{Project: "/p", ImageID: "sha256:0", UID: b.plan.Identity.UID, GID: b.plan.Identity.GID}, Name: "npm"}
	name, flag := id.Volume(), ""
	if b.plan.Engine.Kind == spec.Podman {
		flag = mounts.ByFlag
	}
	b.plan.Mounts = append(b.plan.Mounts, mounts.Mount{
		Target: volumeTarget, Type: mounts.TypeVolume, Source: name, Writable: true, NoSUIDBy: flag, NoDevBy: flag, UID: id.UID, GID: id.GID, Why: mounts.WhyCache,
	})
	b.extra(wire.Mount{
		Target: volumeTarget, Root: "/store/volumes/" + name + "/_data", Type: "ext4", Options: []string{"rw", "nosuid", "nodev"}, Mode: unix.S_IFDIR | 0o700, UID: id.UID, GID: id.GID,
	})
	return name
}

func TestCompareVolume(t *testing.T) {
	for _, name := range bases {
		for what, c := range map[string]struct {
			passes bool
			change func(*wire.Mount)
		}{
			"the volume":       {true, func(*wire.Mount) {}},
			"a mode of its":    {true, func(m *wire.Mount) { m.Mode |= 0o755 }},
			"another volume":   {false, func(m *wire.Mount) { m.Root = strings.Replace(m.Root, "/agentshim-cache-", "/agentshim-cache-0", 1) }},
			"a folder of host": {false, func(m *wire.Mount) { m.Root = "/home" }},
			"another's":        {false, func(m *wire.Mount) { m.UID = 0 }},
			"a file":           {false, func(m *wire.Mount) { m.Mode = unix.S_IFREG }},
			"unreadable":       {false, func(m *wire.Mount) { m.Stat = "EACCES" }},
			"shared":           {false, func(m *wire.Mount) { m.Propagation = []string{"shared:1"} }},
			"slave":            {name != rootless && name != "podman-root", func(m *wire.Mount) { m.Propagation = []string{"master:1"} }},
			"no flags":         {name != rootless && name != "podman-root", func(m *wire.Mount) { m.Options = []string{"rw"} }},
		} {
			b := mustBase(t, name)
			withVolume(&b)
			c.change(b.mount(volumeTarget))
			if diffs := b.compare(); (diffs == nil) != c.passes {
				t.Errorf("%s, %s: %v", name, what, diffs)
			}
		}
		b := mustBase(t, name)
		withVolume(&b)
		b.Hello.Mounts = b.Hello.Mounts[:len(b.Hello.Mounts)-1]
		if diff := cmp.Diff([]string{`mount "` + volumeTarget + `"`}, fields(b.compare())); diff != "" {
			t.Errorf("%s, not mounted: %s", name, diff)
		}
	}
}

func TestCompareConfiguredVolume(t *testing.T) {
	for _, name := range []string{dockerRoot, "podman-root", rootless} {
		for what, c := range map[string]struct {
			passes bool
			change func(*oci.Mount)
		}{
			"the volume":        {true, func(*oci.Mount) {}},
			"another volume":    {false, func(m *oci.Mount) { m.Source = strings.Replace(m.Source, "/agentshim-cache-", "/agentshim-cache-0", 1) }},
			"outside the store": {false, func(m *oci.Mount) { m.Source = "/srv" + m.Source }},
			"shared":            {false, func(m *oci.Mount) { m.Options = append(m.Options, "rshared") }},
			"id mapped":         {false, func(m *oci.Mount) { m.UIDMappings = []oci.LinuxIDMapping{{Size: 1}} }},
		} {
			b := mustConfig(t, name)
			volume := withVolume(&b.base)
			m := oci.Mount{Destination: volumeTarget, Type: "bind", Source: b.plan.Engine.Dirs[0] + "/volumes/" + volume + "/_data", Options: []string{"rbind"}}
			c.change(&m)
			b.config.Mounts = append(b.config.Mounts, m)
			if diffs := b.compareConfig(); (diffs == nil) != c.passes {
				t.Errorf("%s, %s: %v", name, what, diffs)
			}
		}
		b := mustConfig(t, name)
		withVolume(&b.base)
		if b.compareConfig() == nil {
			t.Errorf("%s: a missing volume passes", name)
		}
	}
}

func TestCompareInspectedVolume(t *testing.T) {
	for what, c := range map[string]struct {
		passes bool
		change func(*dockerMount)
	}{
		"the volume":     {true, func(*dockerMount) {}},
		"another volume": {false, func(m *dockerMount) { m.Name += "0" }},
		"another driver": {false, func(m *dockerMount) { m.Driver = "nfs" }},
		"a bind":         {false, func(m *dockerMount) { m.Type = "bind" }},
	} {
		b, got := mustInspected(t)
		m := dockerMount{Type: "volume", Name: withVolume(&b), Driver: "local", Destination: volumeTarget, RW: true}
		c.change(&m)
		got.Mounts = append(got.Mounts, m)
		if diffs := compareDocker(b.plan, b.run, got); (diffs == nil) != c.passes {
			t.Errorf("%s: %v", what, diffs)
		}
	}
}

func TestCacheOf(t *testing.T) {
	id := mounts.CacheID{CacheOwner: mounts.CacheOwner{Project: "/p", ImageID: "sha256:0", UID: 1, GID: 2}, Name: "npm"}
	good := volume{Name: id.Volume(), Driver: "local", Labels: id.Labels()}
	if got, err := cacheOf(good); err != nil || got != id {
		t.Errorf("%+v %v", got, err)
	}
	for name, v := range map[string]volume{
		"no labels":      {Name: good.Name, Driver: "local"},
		"another name":   {Name: "data", Driver: "local", Labels: good.Labels},
		"another driver": {Name: good.Name, Driver: "nfs", Labels: good.Labels},
		"options":        {Name: good.Name, Driver: "local", Labels: good.Labels, Options: map[string]string{"o": "bind"}},
	} {
		if _, err := cacheOf(v); err == nil {
			t.Error(name)
		}
	}
}

// TestCacheUses: a note is for one volume as it was made once, and can be taken back.
func TestCacheUses(t *testing.T) {
	u := cacheUses{cache: openCache(filepath.Join(t.TempDir(), "notes")), engine: spec.Engine{Kind: spec.Docker, Socket: "/s"}}
	made := cacheMade{time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), "r1"}
	v := volume{Name: "agentshim-cache-1", Labels: map[string]string{mounts.LabelCacheMade: made.String()}}
	at := time.Date(2026, 2, 1, 0, 0, 0, 0, time.UTC)
	if u.given(v) {
		t.Error("known before it was noted")
	}
	u.note(v, at)
	if !u.last(v).Equal(at) || !madeAt(v).Equal(made.at) {
		t.Errorf("%v %v", u.last(v), madeAt(v))
	}
	again := volume{Name: v.Name, Labels: map[string]string{mounts.LabelCacheMade: cacheMade{made.at, "r2"}.String()}}
	unmarked := volume{Name: v.Name}
	u.note(unmarked, at)
	if u.given(unmarked) {
		t.Error("a volume that does not say when it was made is noted")
	}
	u.note(v, at)
	elsewhere := u
	elsewhere.engine.Socket = "/other"
	if u.given(again) || elsewhere.given(v) || !u.given(v) {
		t.Error("a note holds for another volume of the name")
	}
	u.forget(v.Name)
	if u.given(v) {
		t.Error("not forgotten")
	}
}
