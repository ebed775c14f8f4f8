package spec

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/mounts"
)

// groupsAdded is how the engines are asked for the groups 44 and 107 and no other.
var groupsAdded = regexp.MustCompile(`\n--group-add=44\n--group-add=107\n--[^g]|"GroupAdd": \[\s+"44",\s+"107"\s+\]`)

// deviceFiles are the devices of the hosts in compile_test.go.
func deviceFiles() map[string]DeviceFile {
	return map[string]DeviceFile{
		"/dev/kvm":            {Major: 10, Minor: 232, Drivers: []string{"kvm"}, Mode: 0o660, GID: 107},
		"/dev/dri/renderD128": {Major: 226, Minor: 128, Drivers: []string{"drm"}, Mode: 0o666, GID: 105},
	}
}

// refused wants one Refusal for the reason whose text holds want.
func refused(t *testing.T, err error, reason, want string) {
	t.Helper()
	var r *Refusal
	if !errors.As(err, &r) || r.Reason != reason || !strings.Contains(r.Message, want) || r.Hint == "" {
		t.Errorf("%v (%+v), want %s: %s", err, r, reason, want)
	}
}

// What no file can accept.
func TestDevicesRefused(t *testing.T) {
	h := parse(t, `{"version":1,"image":"a","harness":{"binary":"a"},"user":"5:5","devices":["/dev/x"],"accept":["device:/dev/x","rootless-cgroup-limits"]}`)
	character := func(major, minor uint32, drivers ...string) DeviceFile {
		return DeviceFile{Major: major, Minor: minor, Drivers: drivers, Mode: 0o666}
	}
	for name, c := range map[string]struct {
		file DeviceFile
		want string
	}{
		"missing":            {DeviceFile{Fault: "no such file or directory"}, "no such file"},
		"block device":       {DeviceFile{Block: true, Major: 8, Drivers: []string{"drm"}}, "block device"},
		"memory":             {character(1, 1, "mem"), opensMemory},
		"kernel memory":      {character(1, 2, "mem"), opensMemory},
		"ports":              {character(1, 4, "mem"), opensMemory},
		"kernel log":         {character(1, 11, "mem"), opensMemory},
		"null":               {character(1, 3, "mem"), "already"},
		"tty":                {character(5, 0, "/dev/tty"), "already"},
		"console":            {character(5, 1, "/dev/tty", "/dev/console", "/dev/ptmx"), opensTerminal},
		"virtual console":    {character(4, 1, "/dev/vc/0", "tty", "ttyS"), opensTerminal},
		"someone's terminal": {character(136, 3, "pts"), opensTerminal},
		"keyboard":           {character(13, 64, "input"), opensTerminal},
		"SCSI":               {character(21, 0, "sg"), opensDisks},
		"NVMe":               {character(241, 0, "nvme"), opensDisks},
		"model registers":    {character(202, 0, "cpu/msr"), opensMemory},
		"IOMMU group":        {character(511, 0, "vfio"), opensMemory},
		"loop control":       {character(10, 237, "loop-control"), opensHost},
		"device mapper":      {character(10, 236, "device-mapper"), opensHost},
		"virtual input":      {character(10, 223, "uinput"), opensHost},
		"network tunnel":     {character(10, 200, "tun"), opensHost},
		"watchdog":           {character(10, 130, "watchdog"), opensHost},
		"unknown":            {character(511, 7), "no driver"},
		"unknown control":    {character(10, 99), "no driver"},
	} {
		for engine, host := range hosts {
			t.Run(name+"/"+engine, func(t *testing.T) {
				f := host()
				f.Devices = map[string]DeviceFile{"/dev/x": c.file}
				_, err := Compile(h, f, Options{})
				refused(t, err, "mount", c.want)
			})
		}
	}
	t.Run("not probed", func(t *testing.T) {
		_, err := Compile(h, dockerRoot(), Options{})
		refused(t, err, "mount", "nothing is known")
	})
}

func TestDeviceNeedsAccept(t *testing.T) {
	const file = `{"version":1,"image":"a","harness":{"binary":"a"},"user":"5:5","devices":["/dev/kvm"],"accept":[`
	for name, host := range hosts {
		t.Run(name, func(t *testing.T) {
			_, err := Compile(parse(t, file+`"rootless-cgroup-limits","device:/dev/kvm2"]}`), host(), Options{})
			refused(t, err, "widening", "device:/dev/kvm")
			if _, err := Compile(parse(t, file+`"rootless-cgroup-limits","device:/dev/kvm"]}`), host(), Options{}); err != nil {
				t.Error(err)
			}
		})
	}
}

// A device that the permission bits keep from the agent is said to be one.
func TestClosedDevice(t *testing.T) {
	for name, c := range map[string]struct {
		host         func() Host
		user, groups string
		file         DeviceFile
		want         string
	}{
		"its group":           {dockerRoot, "5:5", "[]", DeviceFile{Mode: 0o660, GID: 107}, "add 107 to groups"},
		"with its group":      {dockerRoot, "5:5", "[107]", DeviceFile{Mode: 0o660, GID: 107}, ""},
		"root's group":        {dockerRoot, "5:5", "[]", DeviceFile{Mode: 0o660}, "mode 0660 may keep"},
		"root's":              {dockerRoot, "5:5", "[]", DeviceFile{Mode: 0o600}, "mode 0600 may keep"},
		"uid 0":               {dockerRoot, "0:0", "[]", DeviceFile{Mode: 0o600}, ""},
		"everyone's":          {podmanRoot, "5:5", "[]", DeviceFile{Mode: 0o666}, ""},
		"readable":            {podmanRoot, "5:5", "[]", DeviceFile{Mode: 0o664}, "may keep"},
		"all but its owner's": {dockerRoot, "5:5", "[]", DeviceFile{Mode: 0o066, UID: 5}, "may keep"},
		"rootless":            {podmanRootless, "5:5", "[]", DeviceFile{Mode: 0o660, GID: 107}, "give your own user access"},
		"rootless, caller's":  {podmanRootless, "5:5", "[]", DeviceFile{Mode: 0o600, UID: 1001}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			c.file.Major, c.file.Drivers = 226, []string{"drm"}
			host := c.host()
			host.Devices = map[string]DeviceFile{"/dev/x": c.file}
			p, err := Compile(parse(t, `{"version":1,"image":"a","harness":{"binary":"a"},"user":"`+c.user+`","devices":["/dev/x"],"groups":`+c.groups+`,
				"accept":["device:/dev/x","group:107","root-user","rootless-cgroup-limits"]}`), host, Options{})
			if err != nil {
				t.Fatal(err)
			}
			got := strings.Join(p.Warnings, "\n")
			if c.want == "" && got != "" || !strings.Contains(got, c.want) {
				t.Errorf("warnings %q, want %q", got, c.want)
			}
		})
	}
}

func TestGroups(t *testing.T) {
	const head = `{"version":1,"image":"a","harness":{"binary":"a"},"user":"5:6",`
	owns := func(base func() Host) func() Host {
		return func() Host {
			h := base()
			h.GroupOwns = map[uint32]string{999: `"/run/docker.sock"`}
			return h
		}
	}
	for name, c := range map[string]struct {
		file         string
		host         func() Host
		reason, want string
	}{
		"root's":                      {`"groups":[0],"accept":["group:0"]}`, dockerRoot, "identity", "root's"},
		"an engine's":                 {`"groups":[44,999],"accept":["group:44","group:999"]}`, owns(podmanRoot), "identity", "docker.sock"},
		"not accepted":                {`"groups":[44]}`, dockerRoot, "widening", "group:44"},
		"another accepted":            {`"groups":[44],"accept":["group:45"]}`, podmanRoot, "widening", "group:44"},
		"rootless":                    {`"groups":[44],"accept":["group:44","rootless-cgroup-limits"]}`, podmanRootless, "identity", "user namespace"},
		"rootful in a user namespace": {`"userns":"auto","groups":[44],"accept":["group:44"]}`, podmanRoot, "identity", "user namespace"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Compile(parse(t, head+c.file), c.host(), Options{})
			refused(t, err, c.reason, c.want)
		})
	}
	for _, host := range []func() Host{owns(dockerRoot), owns(podmanRoot)} {
		p, err := Compile(parse(t, head+`"groups":[107,6,44],"accept":["group:44","group:107"]}`), host(), Options{})
		if err != nil {
			t.Fatal(err)
		}
		if _, text := asked(t, p); !groupsAdded.MatchString(text) {
			t.Error(text)
		}
		if diff := cmp.Diff([]uint32{44, 107}, p.OCI(SymbolicPaths).Process.User.AdditionalGids); diff != "" {
			t.Error(diff)
		}
		if text := p.Text(); !strings.Contains(text, "gid 6, groups 44 107,") || !strings.Contains(text, "group:44 (accepted)") {
			t.Error(text)
		}
	}
}

// M17: what Podman is told where it uses SELinux. Nothing is relabelled unasked.
func TestRelabel(t *testing.T) {
	for label, want := range map[string]string{"": "", "none": "", "z": ",relabel=shared", "Z": ",relabel=private"} {
		for _, base := range []func() Host{podmanRoot, podmanRootless} {
			host := base()
			host.Engine.SELinux, host.Mounts.SELinux = true, true
			host.Mounts.UID = host.Caller.UID
			host.Mounts.Sources["/srv/out"] = mounts.Source{Path: "/srv/out", Dir: true, UID: host.Caller.UID}
			file := `{"version":1,"image":"a","harness":{"binary":"a"},"user":"5:5","mounts":[{"source":"/srv/out","target":"/o"`
			if label != "" {
				file += `,"label":"` + label + `"`
			}
			p, err := Compile(parse(t, file+`}],"accept":["rootless-cgroup-limits"]}`), host, Options{})
			if err != nil {
				t.Fatal(err)
			}
			argv, err := p.PodmanArgv(SymbolicPaths)
			if err != nil {
				t.Fatal(err)
			}
			bind := "--mount=type=bind,source=/srv/out,target=/o,bind-propagation=rprivate,readonly,nosuid,nodev" + want
			if !slices.Contains(argv, bind) {
				t.Errorf("label %q: no %q in %q", label, bind, argv)
			}
			for _, word := range argv { // agentshim's own files have no label of their own
				if own := strings.Contains(word, "source=/RUN_DIR/") || strings.Contains(word, "source="+SymbolicPaths.Init); own && !strings.HasSuffix(word, ",relabel=shared") {
					t.Errorf("not relabelled: %s", word)
				}
			}
			shown := strings.Contains(p.Text(), "relabel:/o: ") && strings.Contains(p.Text(), "SELinux label "+label)
			if shown != (want != "") {
				t.Errorf("label %q: %s", label, p.Text())
			}
		}
	}
}
