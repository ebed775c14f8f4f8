package integration

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agentshim/agentshim/shim"
	plan "github.com/agentshim/agentshim/spec"
)

// planned is what exec would do with the file.
func (s setup) planned(t *testing.T, file string) plan.Plan {
	t.Helper()
	var p plan.Plan
	r := s.call(t, call{}, "plan", "--spec", file, "--format", "json").ok(t)
	if err := json.Unmarshal([]byte(r.Stdout), &p); err != nil {
		t.Fatal(err)
	}
	return p
}

// dropCaches removes the volumes of the file's caches, now and at the test's end.
func (s setup) dropCaches(t *testing.T, file string) {
	t.Helper()
	var names []string
	for _, c := range s.planned(t, file).Caches {
		names = append(names, c.Volume)
	}
	drop := func() { s.bare(t, append([]string{"volume", "rm", "-f"}, names...)...) }
	drop()
	t.Cleanup(drop)
}

// volumeFolder is where the engine keeps a volume's files.
func (s setup) volumeFolder(t *testing.T, name string) string {
	t.Helper()
	return strings.TrimSpace(s.bare(t, "volume", "inspect", "--format", "{{.Mountpoint}}", name).ok(t).Stdout)
}

// TestCaches: a cache is the agent's own, outlasts the run, and is another one for
// another project.
func TestCaches(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		fields := spec{
			"workspace": map[string]any{"source": dir}, "home": map[string]any{"sizeMb": 16},
			"caches": []map[string]any{
				{"name": "npm", "key": "k", "target": "~/.cache/npm"},
				{"name": "history", "target": "~/.local/share/agent/sessions"},
			},
		}
		file, state := s.write(t, fields), s.private(t)
		s.dropCaches(t, file)
		volume := s.planned(t, file).Caches[0].Volume
		exec := func(script string) result {
			return s.call(t, call{State: state}, "exec", "--spec", file, "--", script)
		}
		uid, gid := s.agent(t)
		own := fmt.Sprintf("700:%d:%d", uid, gid)

		r := exec(`for d in .cache .cache/npm .local .local/share .local/share/agent .local/share/agent/sessions; do
	echo "$d=$(stat -c %a:%u:%g $HOME/$d)"; echo "$d write=$(touch $HOME/$d/f 2>&1)"; done
echo "root=$(touch / 2>&1 | grep -o 'Read-only')"
echo said > ~/.local/share/agent/sessions/1; chmod 0 ~/.cache/npm/f; chmod 0755 ~/.cache/npm`).ok(t)
		want := map[string]string{"root": "Read-only"}
		for _, d := range []string{".cache", ".cache/npm", ".local", ".local/share", ".local/share/agent", ".local/share/agent/sessions"} {
			want[d], want[d+" write"] = own, ""
		}
		wantPairs(t, r.Stdout, want)

		t.Run("the next run has it", func(t *testing.T) {
			r := exec(`echo "history=$(cat ~/.local/share/agent/sessions/1)"; echo "npm=$(ls ~/.cache/npm)"; echo "parent=$(ls -A ~/.local/share)"`).ok(t)
			wantPairs(t, r.Stdout, map[string]string{"history": "said", "npm": "f", "parent": "agent"})
		})
		t.Run("the caller of a host without it has it", func(t *testing.T) {
			// A fresh state folder knows of no set-up.
			r := s.exec(t, file, `cat ~/.local/share/agent/sessions/1`).ok(t)
			if r.Stdout != "said\n" {
				t.Errorf("printed %q", r.Stdout)
			}
		})
		t.Run("another project has not", func(t *testing.T) {
			other := maps.Clone(fields)
			other["workspace"] = map[string]any{"source": s.folder(t)}
			file := s.write(t, other)
			s.dropCaches(t, file)
			if r := s.exec(t, file, "ls -A ~/.cache/npm ~/.local/share/agent/sessions").ok(t); strings.Count(r.Stdout, "\n") != 3 {
				t.Errorf("printed %q", r.Stdout)
			}
		})
		t.Run("a killed run leaves it usable", func(t *testing.T) {
			b := s.begin(t, fields, "echo killed > ~/.cache/npm/killed; echo ready; sleep 100")
			b.signal(t, syscall.SIGKILL)
			<-b.waited
			if r := exec("cat ~/.cache/npm/killed").ok(t); r.Stdout != "killed\n" {
				t.Errorf("printed %q", r.Stdout)
			}
		})
		t.Run("a volume of another's is seen", func(t *testing.T) {
			// The note of the first run still says that it was given to the agent.
			other := 4321
			if s.rootless() {
				other = s.subUID(t)
			}
			if err := os.Chown(s.volumeFolder(t, volume), other, other); err != nil {
				t.Fatal(err)
			}
			r := exec("true").refused(t, shim.ReasonPosture)
			wantText(t, r.Stderr, "/home/agent/.cache/npm")
			exec("touch ~/.cache/npm/again").ok(t) // control: it is set up anew
		})
		t.Run("by hand", func(t *testing.T) { s.plantedVolumes(t, file, volume) })
	})
}

// plantedVolumes: a volume with the cache's name that agentshim did not make could be
// any folder of the host.
func (s setup) plantedVolumes(t *testing.T, file, volume string) {
	outside := s.private(t)
	if err := os.Chmod(outside, 0o777); err != nil {
		t.Fatal(err)
	}
	place(t, filepath.Join(outside, "secret"), []byte("secret"), 0o644)
	labels := []string{}
	var made map[string]string
	inspected := s.bare(t, "volume", "inspect", "--format", "{{json .Labels}}", volume).ok(t)
	if err := json.Unmarshal([]byte(inspected.Stdout), &made); err != nil {
		t.Fatal(err)
	}
	for k, v := range made {
		label := k + "=" + v
		if s.engine == "podman" {
			label = `"` + strings.ReplaceAll(label, `"`, `""`) + `"`
		}
		labels = append(labels, "--label", label)
	}
	bind := []string{"--opt", "type=none", "--opt", "o=bind", "--opt", "device=" + outside}
	for name, flags := range map[string][]string{"no labels": nil, "options": append(bind, labels...)} {
		s.bare(t, "volume", "rm", volume).ok(t)
		s.bare(t, append(append([]string{"volume", "create"}, flags...), volume)...).ok(t)
		r := s.exec(t, file, "cat ~/.cache/npm/secret").refused(t, shim.ReasonMount)
		wantText(t, r.Stderr, "is not one of agentshim's", "agentshim: hint: ", "volume rm "+volume)
		if s.rootless() || flags == nil {
			continue // a rootless engine can't bind by a volume's options
		}
		c := s.bare(t, "run", "--rm", "--network=none", "--mount=type=volume,source="+volume+",target=/c", "agentshim/hello:test", "cat", "/c/secret")
		if c.Stdout != "secret" {
			t.Errorf("control, %s: the bare engine shows %q: %s", name, c.Stdout, c.Stderr)
		}
	}
	s.bare(t, "volume", "rm", volume).ok(t)
}

// TestCachesAtOnce: runs that make one cache at the same time all get it.
func TestCachesAtOnce(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		file := s.write(t, spec{"workspace": map[string]any{"source": dir}, "caches": []map[string]any{{"name": "c", "target": "/opt/cache/deep"}}, "rootfsWritable": true})
		s.dropCaches(t, file)
		var all sync.WaitGroup
		results := make([]result, 3)
		for i := range results {
			all.Go(func() {
				// With a writable root too, a folder on the way is the image's root's.
				results[i] = s.exec(t, file, fmt.Sprintf(`echo %d > /opt/cache/deep/%[1]d; stat -c %%u:%%a /opt/cache; touch /opt/cache/x 2>&1 | grep -o denied`, i))
			})
		}
		all.Wait()
		for _, r := range results {
			r.ok(t)
			if want := "0:755\ndenied\n"; r.Stdout != want && !s.rootless() {
				t.Errorf("printed %q, want %q", r.Stdout, want)
			}
		}
		if r := s.exec(t, file, "ls /opt/cache/deep").ok(t); r.Stdout != "0\n1\n2\n" {
			t.Errorf("left: %q", r.Stdout)
		}
		// What a kill can leave of a set-up goes with prune.
		for end := time.Now().Add(5 * time.Second); ; time.Sleep(200 * time.Millisecond) {
			left := s.bare(t, "ps", "-aq", "--filter", "label=agentshim.helper=cache/1").ok(t).Stdout
			if left == "" {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("set-up containers are left: %s", left)
			}
		}
	})
}

// TestCacheCommands: caches are listed with their sizes; only agentshim's go, and none
// that a container has.
func TestCacheCommands(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		fields := spec{
			"workspace": map[string]any{"source": s.folder(t)},
			"caches":    []map[string]any{{"name": "one", "key": "k", "target": "/opt/one"}, {"name": "two", "target": "/opt/two"}},
		}
		file, state := s.write(t, fields), ""
		s.dropCaches(t, file)
		p := s.planned(t, file)
		one, two := p.Caches[0], p.Caches[1]
		cache := func(words ...string) result {
			return s.call(t, call{State: state}, append([]string{"cache", "--engine", s.engine}, words...)...)
		}
		list := func() map[string]shim.CacheInfo {
			var got struct{ Caches []shim.CacheInfo }
			if err := json.Unmarshal([]byte(cache("ls", "--json").ok(t).Stdout), &got); err != nil {
				t.Fatal(err)
			}
			all := map[string]shim.CacheInfo{}
			for _, c := range got.Caches {
				all[c.Volume] = c
			}
			return all
		}
		// A stranger's volume that only has the name, and one that only has the labels.
		const stranger = "agentshim-cache-0000000000000000000000000000000000000000000000000000000000000000"
		s.bare(t, "volume", "create", stranger).ok(t)
		s.bare(t, "volume", "create", "--label=agentshim.cache=1", "agentshim-test-labels").ok(t)
		t.Cleanup(func() { s.bare(t, "volume", "rm", "-f", stranger, "agentshim-test-labels") })

		b := s.begin(t, fields, "head -c 300000 /dev/urandom > /opt/one/f; ln -s / /opt/one/root; echo ready; sleep 100")
		state = b.state
		all := list()
		if c := all[one.Volume]; !c.InUse || c.Bytes < 300000 || c.Bytes > 320000 || c.CacheID != one.ID || c.Used.IsZero() || time.Since(c.Made) > time.Minute {
			t.Errorf("%+v", c)
		}
		if _, listed := all[stranger]; listed {
			t.Error("a stranger's volume is listed")
		}
		cache("rm", one.Volume).refused(t, shim.ReasonState)
		r := cache("prune").ok(t)
		wantText(t, r.Stdout, "kept "+all[one.Volume].ShortID()+": one/k", "a container has it")
		if r := s.bare(t, "volume", "rm", one.Volume); r.Code == 0 {
			t.Error("the engine itself removes a volume in use")
		}
		b.signal(t, syscall.SIGTERM)
		<-b.waited

		if c := list()[one.Volume]; c.InUse || c.Bytes < 300000 {
			t.Errorf("after the run: %+v", c)
		}
		wantText(t, cache("ls").ok(t).Stdout, "one/k", "two", "KiB", "free")
		wantText(t, cache("prune", "--dry-run").ok(t).Stdout, "would remove "+all[one.Volume].ShortID())
		wantText(t, cache("prune", "--older-than", "1d").ok(t).Stdout, "kept "+all[one.Volume].ShortID())
		for _, name := range []string{"ffff", "agentshim-test-labels", stranger, "../x", ""} {
			cache("rm", name).refused(t, shim.ReasonState)
		}
		wantText(t, cache("rm", all[two.Volume].ShortID()).ok(t).Stdout, "removed")
		wantText(t, cache("prune").ok(t).Stdout, "removed "+all[one.Volume].ShortID())
		after := list()
		for _, c := range p.Caches {
			if _, left := after[c.Volume]; left {
				t.Errorf("cache %s is left", c.ID.Name)
			}
		}
		s.bare(t, "volume", "inspect", stranger, "agentshim-test-labels").ok(t)
	})
}
