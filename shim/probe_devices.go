package shim

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/spec"
)

// probeDevices reads the devices and groups that the harness file names, once the
// engine is known.
func (p *prepared) probeDevices(o ProbeOptions) error {
	var err error
	if p.host.Devices, err = deviceFiles(o, p.job.Harness); err != nil {
		return err
	}
	p.host.GroupOwns, err = groupOwns(o, p.job.Harness, p.host.Engine.Socket)
	return err
}

// deviceFiles reads what stands at the device paths of the harness file. A node is
// looked at through a descriptor of it that follows no link and does not open the
// device: opening may act on it.
func deviceFiles(o ProbeOptions, h harness.Harness) (map[string]spec.DeviceFile, error) {
	if len(h.Devices) == 0 {
		return nil, nil
	}
	drivers, err := readDrivers(o)
	if err != nil {
		return nil, err
	}
	found := map[string]spec.DeviceFile{}
	for _, name := range h.Devices {
		found[name] = deviceFile(o.path(name), drivers)
	}
	return found, nil
}

func deviceFile(name string, drivers drivers) spec.DeviceFile {
	fd, err := unix.Openat2(unix.AT_FDCWD, name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS})
	switch {
	case errors.Is(err, unix.ELOOP):
		return spec.DeviceFile{Fault: "it is a link or lies behind one: name the device itself"}
	case err != nil:
		return spec.DeviceFile{Fault: err.Error()}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return spec.DeviceFile{Fault: err.Error()}
	}
	kind := st.Mode & unix.S_IFMT
	if kind != unix.S_IFCHR && kind != unix.S_IFBLK {
		return spec.DeviceFile{Fault: "it is no device"}
	}
	major, minor := unix.Major(st.Rdev), unix.Minor(st.Rdev)
	return spec.DeviceFile{
		Block: kind == unix.S_IFBLK, Major: major, Minor: minor, Drivers: drivers.of(major, minor),
		Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid,
	}
}

// drivers are the kernel's names for character devices: by major number, and by
// minor for the miscellaneous ones.
type drivers struct {
	majors, misc map[uint32][]string
}

// miscDriver is the name of the driver whose devices have a driver of their own each.
const miscDriver = "misc"

func (d drivers) of(major, minor uint32) []string {
	if names := d.majors[major]; !slices.Equal(names, []string{miscDriver}) {
		return names
	}
	return d.misc[minor]
}

// readDrivers reads /proc/devices and /proc/misc: lines of a number and a name.
func readDrivers(o ProbeOptions) (drivers, error) {
	devices, err := os.ReadFile(o.path("/proc/devices"))
	if err != nil {
		return drivers{}, fmt.Errorf("read the kernel's drivers: %w", err)
	}
	misc, err := os.ReadFile(o.path("/proc/misc"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return drivers{}, fmt.Errorf("read the kernel's drivers: %w", err)
	}
	characters, _, _ := strings.Cut(string(devices), "Block devices:")
	return drivers{majors: numberedNames(characters), misc: numberedNames(string(misc))}, nil
}

func numberedNames(text string) map[uint32][]string {
	names := map[uint32][]string{}
	for line := range strings.Lines(text) {
		number, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		if n, err := strconv.ParseUint(number, 10, 32); err == nil && name != "" {
			names[uint32(n)] = append(names[uint32(n)], name)
		}
	}
	return names
}

// ownedByEngines are sockets whose group may use an engine, or a service that gives
// root as one does; ownedByLogins are the password files.
var (
	ownedByEngines = []string{
		"/run/docker.sock", "/run/podman/podman.sock", "/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/buildkit/buildkitd.sock",
		"/run/libvirt/libvirt-sock", "/run/incus/unix.socket", "/var/lib/incus/unix.socket", "/var/lib/lxd/unix.socket", "/var/snap/lxd/common/lxd/unix.socket",
	}
	ownedByLogins = []string{"/etc/shadow", "/etc/gshadow"}
	// powerfulGroups are such groups by their usual names, whatever they own now.
	powerfulGroups = map[string]string{
		"disk": "disks", "docker": "an engine", "incus": "an engine", "incus-admin": "an engine", "kmem": "the host's memory",
		"libvirt": "virtual machines", "lxd": "an engine", "podman": "an engine", "shadow": "password files",
	}
)

// groupOwns says which groups of the harness file own what no agent may have. A
// group that opens such a thing by an access list is not found.
func groupOwns(o ProbeOptions, h harness.Harness, engineSocket string) (map[uint32]string, error) {
	if len(h.Groups) == 0 {
		return nil, nil
	}
	owns := map[uint32]string{}
	named, err := groupNames(o)
	if err != nil {
		return nil, err
	}
	maps.Copy(owns, named)
	for _, name := range slices.Concat(ownedByEngines, ownedByLogins, []string{cmp.Or(engineSocket, "/run/docker.sock")}) {
		var st unix.Stat_t
		if unix.Stat(o.path(name), &st) == nil {
			owns[st.Gid] = strconv.Quote(name)
		}
	}
	return owns, diskOwners(o, owns)
}

// groupNames finds the powerful groups in /etc/group: group(5).
func groupNames(o ProbeOptions) (map[uint32]string, error) {
	data, err := os.ReadFile(o.path("/etc/group"))
	if err != nil {
		return nil, fmt.Errorf("read groups: %w", err)
	}
	owns := map[uint32]string{}
	for line := range strings.Lines(string(data)) {
		f := strings.Split(line, ":")
		if len(f) < 3 {
			continue
		}
		gid, err := strconv.ParseUint(f[2], 10, 32)
		if what := powerfulGroups[f[0]]; what != "" && err == nil {
			owns[uint32(gid)] = what
		}
	}
	return owns, nil
}

// maxDevEntries bounds the walk of /dev.
const maxDevEntries = 10000

// diskOwners adds the groups of the block devices and memory devices below /dev.
func diskOwners(o ProbeOptions, owns map[uint32]string) error {
	seen := 0
	return filepath.WalkDir(o.path("/dev"), func(name string, e fs.DirEntry, err error) error {
		if seen++; err != nil && name == o.path("/dev") {
			return err
		} else if err != nil || seen > maxDevEntries {
			return fs.SkipDir
		}
		if e.IsDir() && slices.Contains([]string{"hugepages", "mqueue", "pts", "shm"}, path.Base(name)) {
			return fs.SkipDir // no device nodes; what users make there has no end
		}
		var st unix.Stat_t
		if e.Type()&fs.ModeDevice == 0 || unix.Lstat(name, &st) != nil {
			return nil
		}
		// mem(4): 1 is /dev/mem, 2 kmem, 4 port.
		memory := st.Mode&unix.S_IFMT == unix.S_IFCHR && unix.Major(st.Rdev) == 1 && slices.Contains([]uint32{1, 2, 4}, unix.Minor(st.Rdev))
		if st.Mode&unix.S_IFMT == unix.S_IFBLK || memory {
			owns[st.Gid] = strconv.Quote(name)
		}
		return nil
	})
}
