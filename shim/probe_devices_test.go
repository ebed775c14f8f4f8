package shim

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

const procDevices = `Character devices:
  1 mem
  4 /dev/vc/0
  4 tty
 10 misc
226 drm

Block devices:
  7 loop
226 drm-disk
`

func mustPlace(t *testing.T, root, name, text string) {
	t.Helper()
	name = filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestDrivers(t *testing.T) {
	root := t.TempDir()
	mustPlace(t, root, "proc/devices", procDevices)
	mustPlace(t, root, "proc/misc", "232 kvm\n235 autofs\n")
	d, err := readDrivers(ProbeOptions{root: root})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		major, minor uint32
		want         []string
	}{
		{1, 3, []string{"mem"}},
		{4, 70, []string{"/dev/vc/0", "tty"}},
		{226, 128, []string{"drm"}},
		{10, 232, []string{"kvm"}},
		{10, 1, nil},
		{7, 0, nil},
		{999, 0, nil},
	} {
		if diff := cmp.Diff(c.want, d.of(c.major, c.minor)); diff != "" {
			t.Errorf("%d:%d: %s", c.major, c.minor, diff)
		}
	}
}

// A link is not followed, wherever it stands; what is no device is none.
func TestProbeDevices(t *testing.T) {
	root := t.TempDir()
	mustPlace(t, root, "proc/devices", procDevices)
	mustPlace(t, root, "dev/file", "")
	for name, to := range map[string]string{"dev/link": "/dev/null", "dev/dir": "/dev", "dev/loop": "loop"} {
		if err := os.Symlink(to, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(root, "dev/fifo"), 0o666); err != nil {
		t.Fatal(err)
	}
	names := []string{"/dev/link", "/dev/dir/null", "/dev/loop", "/dev/file", "/dev/fifo", "/dev/none"}
	found, err := deviceFiles(ProbeOptions{root: root}, harness.Harness{Devices: names})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"link", "link", "link", "no device", "no device", "no such file"} {
		if got := found[names[i]].Fault; !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", names[i], got, want)
		}
	}
	found, err = deviceFiles(ProbeOptions{}, harness.Harness{Devices: []string{"/dev/null"}})
	if err != nil {
		t.Fatal(err)
	}
	want := spec.DeviceFile{Major: 1, Minor: 3, Drivers: []string{"mem"}, Mode: 0o666}
	if diff := cmp.Diff(want, found["/dev/null"]); diff != "" {
		t.Error(diff)
	}
}

func TestProbeGroups(t *testing.T) {
	root := t.TempDir()
	mustPlace(t, root, "etc/group", "root:x:0:\ndisk:x:6:\nvideo:x:44:me\nbroken\nlxd:x:-1:\ndocker:x:998:me\n")
	mustPlace(t, root, "etc/shadow", "")
	mustPlace(t, root, "srv/engine.sock", "")
	mustPlace(t, root, "dev/shm/x", "")
	own := uint32(os.Getegid()) // of what was placed
	for _, c := range []struct {
		socket string
		want   map[uint32]string
	}{
		{"", map[uint32]string{6: "disks", 998: "an engine", own: `"/etc/shadow"`}},
		{"/srv/engine.sock", map[uint32]string{6: "disks", 998: "an engine", own: `"/srv/engine.sock"`}},
	} {
		got, err := groupOwns(ProbeOptions{root: root}, harness.Harness{Groups: []int{44}}, c.socket)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Error(diff)
		}
	}
	if got, err := groupOwns(ProbeOptions{root: root}, harness.Harness{}, ""); got != nil || err != nil {
		t.Errorf("without groups: %v, %v", got, err)
	}
}

// withDevices puts two devices into a base's plan, as its engine makes them.
func withDevices(t *testing.T, name string) base {
	t.Helper()
	b := mustBase(t, name)
	b.plan.Devices = []spec.HostDevice{
		{Device: spec.Device{Name: "dri/card0", Major: 226, Minor: 0}, Mode: 0o660},
		{Device: spec.Device{Name: "kvm", Major: 10, Minor: 232}, Mode: 0o666},
	}
	b.Hello.DevNodes = append(b.Hello.DevNodes, "d dri", "c 226:0 dri/card0", "c 10:232 kvm")
	if b.Engine.Rootless {
		for _, d := range b.plan.Devices {
			b.extra(wire.Mount{Target: d.Path(), Root: "/" + d.Name, Type: "devtmpfs", Options: []string{"nosuid", "noexec"}, Mode: unix.S_IFCHR | d.Mode})
		}
	}
	return b
}

func TestComparePlannedDevices(t *testing.T) {
	for _, name := range bases {
		t.Run(name, func(t *testing.T) {
			if diffs := withDevices(t, name).compare(); diffs != nil {
				t.Error(diffs)
			}
			for change, c := range map[string]struct {
				edit func(*base)
				want []string
			}{
				"not made":           {func(b *base) { b.Hello.DevNodes = b.Hello.DevNodes[:len(b.Hello.DevNodes)-1] }, nil},
				"another number":     {func(b *base) { b.Hello.DevNodes[len(b.Hello.DevNodes)-1] = "c 1:1 kvm" }, []string{"device"}},
				"a block device":     {func(b *base) { b.Hello.DevNodes[len(b.Hello.DevNodes)-1] = "b 10:232 kvm" }, []string{"device"}},
				"one more":           {func(b *base) { b.Hello.DevNodes = append(b.Hello.DevNodes, "c 226:1 dri/card1") }, []string{"device"}},
				"its name elsewhere": {func(b *base) { b.Hello.DevNodes = append(b.Hello.DevNodes, "c 10:232 dri/kvm") }, []string{"device"}},
				"another file": {func(b *base) {
					b.extra(wire.Mount{Target: "/dev/kvm", Root: "/mem", Type: "devtmpfs", Mode: unix.S_IFCHR})
				}, []string{`mount "/dev/kvm"`}},
				"no device there": {func(b *base) {
					b.extra(wire.Mount{Target: "/dev/kvm", Root: "/kvm", Type: "ext4", Mode: unix.S_IFREG})
				}, []string{`mount "/dev/kvm"`}},
			} {
				b := withDevices(t, name)
				c.edit(&b)
				if diff := cmp.Diff(c.want, fields(b.compare())); diff != "" {
					t.Errorf("%s: %s", change, diff)
				}
			}
		})
	}
}

func TestComparePlannedDeviceConfig(t *testing.T) {
	configured := func() (base, *oci.Spec) {
		b := withDevices(t, "podman-root")
		got := b.plan.OCI(b.run)
		got.Process.Args, got.Process.Env = initArgs, nil
		got.Root.Path = b.Engine.Dirs[0] + "/overlay/x/merged"
		return b, got
	}
	last := func(s *oci.Spec) *oci.LinuxDeviceCgroup {
		return &s.Linux.Resources.Devices[len(s.Linux.Resources.Devices)-1]
	}
	for name, c := range map[string]struct {
		edit func(*oci.Spec)
		want []string
	}{
		"as planned":     {func(*oci.Spec) {}, nil},
		"mknod":          {func(s *oci.Spec) { last(s).Access = "rwm" }, []string{"config device cgroup"}},
		"a whole class":  {func(s *oci.Spec) { last(s).Minor = nil }, []string{"config device cgroup"}},
		"a block device": {func(s *oci.Spec) { last(s).Type = "b" }, []string{"config device cgroup"}},
		"another number": {func(s *oci.Spec) { s.Linux.Devices[0].Minor = 9 }, []string{"config device"}},
		"another place":  {func(s *oci.Spec) { s.Linux.Devices[0].Path = "/opt/card0" }, []string{"config device"}},
		"bound elsewhere": {func(s *oci.Spec) {
			s.Mounts = append(s.Mounts, oci.Mount{Destination: "/dev/kvm", Type: "bind", Source: "/dev/mem", Options: []string{"bind"}})
		}, []string{`config mount "/dev/kvm"`}},
	} {
		t.Run(name, func(t *testing.T) {
			b, got := configured()
			c.edit(got)
			if diff := cmp.Diff(c.want, fields(compareConfig(b.plan, b.host, b.run, got))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestCompareInspectedDevices(t *testing.T) {
	b, got := mustInspected(t)
	b.plan.Devices = []spec.HostDevice{{Device: spec.Device{Name: "kvm", Major: 10, Minor: 232}}}
	for _, c := range []struct {
		device spec.DockerDevice
		want   []string
	}{
		{spec.DockerDevice{PathOnHost: "/dev/kvm", PathInContainer: "/dev/kvm", CgroupPermissions: "rw"}, nil},
		{spec.DockerDevice{PathOnHost: "/dev/kvm", PathInContainer: "/dev/kvm", CgroupPermissions: "rwm"}, []string{"inspect device"}},
		{spec.DockerDevice{PathOnHost: "/dev/mem", PathInContainer: "/dev/kvm", CgroupPermissions: "rw"}, []string{"inspect device"}},
		{spec.DockerDevice{PathOnHost: "/dev/kvm", PathInContainer: "/opt/kvm", CgroupPermissions: "rw"}, []string{"inspect device"}},
	} {
		got.HostConfig.Devices = []spec.DockerDevice{c.device}
		if diff := cmp.Diff(c.want, fields(compareDocker(b.plan, b.run, got))); diff != "" {
			t.Errorf("%v: %s", c.device, diff)
		}
	}
}
