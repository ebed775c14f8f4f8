package integration

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// deviceNode makes a node of FUSE's device below the host's /dev, of a mode that no
// udev rule changes.
func deviceNode(t *testing.T, s setup, kind string, mode uint32) string {
	t.Helper()
	name := fmt.Sprintf("/dev/agentshim-test-%s-%s", s.name, kind)
	t.Cleanup(func() { os.Remove(name) })
	os.Remove(name)
	if err := errors.Join(unix.Mknod(name, unix.S_IFCHR|mode, int(unix.Mkdev(10, 229))), os.Chmod(name, os.FileMode(mode))); err != nil {
		t.Fatal(err)
	}
	return name
}

// A device of the file is there, with its number and the host's permissions, and no
// other; without it, it is not there.
func TestDevices(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		open, closed := deviceNode(t, s, "open", 0o666), deviceNode(t, s, "closed", 0o600)
		fields := spec{"devices": []string{open, closed}, "accept": []string{"device:" + open, "device:" + closed, "rootless-cgroup-limits"}}
		given := []trial{
			{"open", []string{"openwrite", open}, "ok", ""},
			{"closed by the host's permissions", []string{"openwrite", closed}, "EACCES", ""},
			{"another", []string{"openwrite", "/dev/kvm"}, "ENOENT", ""},
			{"made by the agent", []string{"mknod", "/tmp"}, "EPERM", ""},
			{"null", []string{"openwrite", "/dev/null"}, "ok", ""},
		}
		got, rec := s.try(t, fields, of(given))
		judge(t, given, got, tried{})
		names := make([]string, 0, len(rec.Widenings))
		for _, w := range rec.Widenings {
			names = append(names, w.Name)
		}
		if !slices.Contains(names, "device:"+open) || !slices.Contains(names, "device:"+closed) {
			t.Errorf("the record's widenings: %q", names)
		}
		without := []trial{{"not asked for", []string{"openwrite", open}, "ENOENT", ""}}
		got, _ = s.try(t, nil, of(without))
		judge(t, without, got, tried{})
		t.Run("warning and accept", func(t *testing.T) {
			r := s.call(t, call{}, "plan", "--spec", s.write(t, fields)).ok(t)
			wantText(t, r.Stdout, "warning      $.devices[1]: ", "mode 0600 may keep the agent from it", "device:"+open+" (accepted)")
			fields["accept"] = []string{"device:" + closed, "rootless-cgroup-limits"}
			r = s.sh(t, fields, "true").refused(t, shim.ReasonWidening)
			wantText(t, r.Stderr, "device:"+open, `agentshim: hint: add "device:`+open)
		})
		t.Run("control, uid 0 in the bare engine", func(t *testing.T) {
			args := []string{"run", "--rm", "--network=none", "--device=" + open}
			if c := s.bare(t, append(args, "agentshim/hello:test", "sh", "-c", ": 3<>"+open)...); c.Code != 0 {
				t.Errorf("the device is not there: %s", c.Stderr)
			}
		})
	})
}

// Disks, memory, terminals and what controls the host are refused whatever the file
// accepts, as is what a link leads to.
func TestDevicesRefused(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		link := "/dev/shm/agentshim-test-" + s.name
		t.Cleanup(func() { os.Remove(link) })
		os.Remove(link)
		if err := os.Symlink("/dev/fuse", link); err != nil {
			t.Fatal(err)
		}
		disguised := fmt.Sprintf("/dev/agentshim-test-%s-disguised", s.name)
		t.Cleanup(func() { os.Remove(disguised) })
		os.Remove(disguised)
		if err := unix.Mknod(disguised, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 1))); err != nil {
			t.Fatal(err)
		}
		rows := []struct{ device, want string }{
			{"/dev/loop0", "block device"},
			{disguised, "memory"},
			{"/dev/kmsg", "memory"},
			{"/dev/null", "already"},
			{"/dev/tty1", "terminals"},
			{"/dev/console", "terminals"},
			{"/dev/ptmx", "terminals"},
			{"/dev/loop-control", "controls the host"},
			{"/dev/net/tun", "controls the host"},
			{"/dev/stdin", "link"},
			{link, "link"},
			{"/dev/shm", "no device"},
			{"/dev/no-such", "no such file"},
		}
		var devices, accept []string
		for _, row := range rows {
			devices, accept = append(devices, row.device), append(accept, "device:"+row.device)
		}
		r := s.sh(t, spec{"devices": devices, "accept": append(accept, "rootless-cgroup-limits")}, "true").refused(t, shim.ReasonMount)
		for i, row := range rows {
			line := lineWith(r.Stderr, fmt.Sprintf("$.devices[%d]: ", i))
			if !strings.Contains(line, row.want) {
				t.Errorf("%s: %q, want %s", row.device, line, row.want)
			}
		}
	})
}

// lineWith is the first line of text that holds part.
func lineWith(text, part string) string {
	for line := range strings.Lines(text) {
		if strings.Contains(line, part) {
			return line
		}
	}
	return ""
}

// A group of the file opens what is the group's; engines', disks' and root's groups
// are refused, and every one where there is a user namespace. U07.
func TestGroups(t *testing.T) {
	const group = 24777
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		place(t, filepath.Join(dir, "f"), []byte("shared"), 0o644)
		if err := errors.Join(os.Chown(dir, 0, group), os.Chmod(dir, 0o750)); err != nil {
			t.Fatal(err)
		}
		fields := func(groups []int, accept ...string) spec {
			return spec{"groups": groups, "accept": append(accept, "rootless-cgroup-limits"), "mounts": []any{map[string]any{"source": dir, "target": "/m"}}}
		}
		accepted := fields([]int{group}, fmt.Sprint("group:", group))
		if s.rootless() {
			r := s.sh(t, accepted, "true").refused(t, shim.ReasonIdentity)
			wantText(t, r.Stderr, "user namespace", "agentshim: hint: leave groups out")
			return
		}
		uid, gid := s.agent(t)
		r := s.sh(t, accepted, "id -G; cat /m/f").ok(t)
		if want := fmt.Sprintf("%d %d\nshared", gid, group); r.Stdout != want && r.Stdout != fmt.Sprintf("%d %d\nshared", group, gid) {
			t.Errorf("uid %d printed %q, want %q", uid, r.Stdout, want)
		}
		if r := s.sh(t, fields([]int{}), "id -G; cat /m/f"); r.Code == 0 || r.Stdout != fmt.Sprintln(gid) {
			t.Errorf("control, without the group: %+v", r)
		}
		r = s.sh(t, fields([]int{group}), "true").refused(t, shim.ReasonWidening)
		wantText(t, r.Stderr, fmt.Sprint("group:", group))
		t.Run("refused", func(t *testing.T) {
			powerful := []int{0}
			for _, name := range []string{"docker", "disk", "shadow", "kmem"} {
				if g, err := user.LookupGroup(name); err == nil {
					powerful = append(powerful, mustInt(t, g.Gid))
				}
			}
			if len(powerful) < 3 {
				t.Fatalf("groups of this machine: %v", powerful)
			}
			accept := []string{}
			for _, g := range powerful {
				accept = append(accept, fmt.Sprint("group:", g))
			}
			r := s.sh(t, fields(powerful, accept...), "true").refused(t, shim.ReasonIdentity)
			for i, g := range powerful {
				if line := lineWith(r.Stderr, fmt.Sprintf("$.groups[%d]: %d: ", i, g)); line == "" {
					t.Errorf("group %d is not refused:\n%s", g, r.Stderr)
				}
			}
		})
	})
}

// M17: nothing is relabelled unasked, nor where it would break the host. This machine
// has no SELinux; what an engine that has it is told is a test of the spec package.
func TestLabels(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		u, err := user.Lookup(s.account)
		if err != nil {
			t.Fatal(err)
		}
		hidden, err := os.MkdirTemp(u.HomeDir, ".agentshim-test-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(hidden) })
		outer := s.private(t)
		inner, other := filepath.Join(outer, "ws/sub"), s.folder(t)
		mine := s.private(t)
		place(t, filepath.Join(mine, "f"), []byte("seen"), 0o644)
		if err := errors.Join(os.MkdirAll(inner, 0o755), os.Chown(other, 4321, 4321)); err != nil {
			t.Fatal(err)
		}
		for _, dir := range []string{hidden, outer, mine} {
			s.chown(t, dir)
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		rows := []struct{ source, want string }{
			{hidden, "break the host"}, {"/usr/share", "break the host"}, {other, "not yours"}, {outer, "holds the workspace"}, {inner, "put a link"},
		}
		fields := func(label string) spec {
			var list []map[string]any
			for i, row := range rows {
				list = append(list, map[string]any{"source": row.source, "target": fmt.Sprint("/m/", i), "label": label})
			}
			return spec{"workspace": map[string]any{"source": filepath.Dir(inner), "mode": "writable"}, "mounts": list}
		}
		r := s.sh(t, fields("Z"), "true").refused(t, shim.ReasonMount)
		for i, row := range rows {
			if line := lineWith(r.Stderr, fmt.Sprintf("$.mounts[%d].label: ", i)); !strings.Contains(line, row.want) {
				t.Errorf("%s: %q, want %s", row.source, line, row.want)
			}
		}
		s.sh(t, fields("none"), "true").ok(t) // control
		r = s.sh(t, spec{"mounts": []any{
			map[string]any{"source": mine, "target": "/z", "label": "z"}, map[string]any{"source": mine, "target": "/Z", "label": "Z"},
		}}, "cat /z/f /Z/f").ok(t)
		if r.Stdout != "seenseen" || strings.Count(r.Stderr, "has no effect here") != 2 {
			t.Errorf("with labels: %q\n%s", r.Stdout, r.Stderr)
		}
		if _, err := unix.Getxattr(mine, "security.selinux", nil); !errors.Is(err, unix.ENODATA) {
			t.Errorf("the source has a label: %v", err)
		}
	})
}
