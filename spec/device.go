package spec

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// DeviceFile is what stands at a path below /dev of the host.
type DeviceFile struct {
	// Fault says why there is no device to use; empty where there is one.
	Fault string
	// Block says that it is a block device, not a character device.
	Block        bool
	Major, Minor uint32
	// Drivers are the names under which the kernel registered the major number
	// (/proc/devices), for the major number of miscellaneous devices the one of the
	// minor (/proc/misc). None where nothing serves the device.
	Drivers []string
	// Mode holds the permission bits.
	Mode     uint32
	UID, GID uint32
}

// HostDevice is a device of the host that the agent may read and write.
type HostDevice struct {
	Device
	// Mode, UID and GID are the host's. A rootful engine makes a node with them, a
	// rootless one binds the host's.
	Mode uint32 `json:"mode"`
	UID  uint32 `json:"uid"`
	GID  uint32 `json:"gid"`
}

// Path is the device's place, the same on the host and in the container.
func (d Device) Path() string { return "/dev/" + d.Name }

// miscMajor is the major number that drivers with one device each share; its devices
// are controls of the kernel, but for miscDevices.
const miscMajor = 10

var miscDevices = []string{"fuse", "hw_random", "kvm"}

// What a refused device would open.
const (
	opensDisks    = "it gives raw access to disks"
	opensMemory   = "it gives access to the host's memory or processors"
	opensTerminal = "it gives access to the host's terminals, screens or input"
	opensBus      = "it gives access to whatever is plugged in"
	opensHost     = "it controls the host"
)

// refusedDrivers are character devices that no file can ask for, by the kernel's own
// name for their driver: a node's path and, for many drivers, its number are chosen
// by the host.
var refusedDrivers = map[string]string{
	"bsg": opensDisks, "ch": opensDisks, "megaraid_sas_ioctl": opensDisks, "mtd": opensDisks, "nvme": opensDisks, "nvme-generic": opensDisks,
	"raw": opensDisks, "rpmb": opensDisks, "sg": opensDisks, "st": opensDisks, "ubi": opensDisks, "ublk-char": opensDisks,
	"cpu/msr": opensMemory, "dax": opensMemory, "dimmctl": opensMemory, "firewire": opensMemory, "ndctl": opensMemory, "mem": opensMemory, "uio": opensMemory, "vfio": opensMemory,
	"/dev/console": opensTerminal, "/dev/ptmx": opensTerminal, "/dev/tty": opensTerminal, "/dev/vc/0": opensTerminal, "fb": opensTerminal,
	"hidraw": opensTerminal, "input": opensTerminal, "ptm": opensTerminal, "pts": opensTerminal, "tty": opensTerminal, "ttyS": opensTerminal, "vcs": opensTerminal,
	"i2c": opensBus, "spi": opensBus, "usb": opensBus, "usb_device": opensBus,
	"gpiochip": opensHost, "ipmidev": opensHost, "ipvtap": opensHost, "macvtap": opensHost, "mei": opensHost, "ppp": opensHost, "tpm": opensHost,
	"watchdog": opensHost,
}

// refusal says why a device may not be given to the agent, whatever the file
// accepts; empty where it may.
func (d DeviceFile) refusal() string {
	isDefault := func(e Device) bool { return e.Major == int64(d.Major) && e.Minor == int64(d.Minor) }
	switch {
	case d.Fault != "":
		return d.Fault
	case d.Block:
		return "it is a block device: " + opensDisks
	case slices.ContainsFunc(Devices, isDefault):
		return "every container has it already"
	case len(d.Drivers) == 0:
		return "no driver of this kernel serves it"
	case d.Major == miscMajor && !slices.Contains(miscDevices, d.Drivers[0]):
		return opensHost
	}
	for _, name := range d.Drivers {
		if opens := refusedDrivers[name]; opens != "" {
			return opens
		}
	}
	return ""
}

// devices decides which nodes the container has beside the default ones.
func (c *compiler) devices() error {
	var errs []error
	for i, path := range c.h.Devices {
		at := fmt.Sprintf("$.devices[%d]: %q: ", i, path)
		f, known := c.host.Devices[path]
		if !known {
			f.Fault = "nothing is known about it"
		}
		if reason := f.refusal(); reason != "" {
			errs = append(errs, refuse("mount", "take it out of devices; character devices like /dev/kvm, /dev/fuse or /dev/dri/renderD128 can be given", "%s%s", at, reason))
			continue
		}
		d := HostDevice{
			Device: Device{Name: strings.TrimPrefix(path, "/dev/"), Major: int64(f.Major), Minor: int64(f.Minor)},
			Mode:   f.Mode, UID: f.UID, GID: f.GID,
		}
		c.plan.Devices = append(c.plan.Devices, d)
		if !c.opens(d) {
			c.plan.Warnings = append(c.plan.Warnings, at+c.closedDevice(d))
		}
	}
	slices.SortFunc(c.plan.Devices, func(a, b HostDevice) int { return strings.Compare(a.Name, b.Name) })
	return errors.Join(errs...)
}

// opens says that the permission bits let the agent read and write the device.
// Access lists are not looked at.
func (c *compiler) opens(d HostDevice) bool {
	const readWrite = 6
	uid, groups := c.plan.Identity.UID, append([]uint32{c.plan.Identity.GID}, c.plan.Identity.Groups...)
	if c.rootless() { // the agent is the caller, seen from the host
		uid, groups = c.host.Caller.UID, []uint32{c.host.Caller.GID}
	}
	bits := d.Mode
	switch {
	case uid == d.UID:
		bits >>= 6
	case slices.Contains(groups, d.GID):
		bits >>= 3
	}
	return bits&readWrite == readWrite
}

func (c *compiler) closedDevice(d HostDevice) string {
	text := fmt.Sprintf("its owner %d:%d and mode %04o may keep the agent from it", d.UID, d.GID, d.Mode)
	switch {
	case c.rootless():
		return text + "; give your own user access to it (no group of yours goes with the agent)"
	case d.Mode>>3&6 == 6 && d.GID != 0:
		return text + fmt.Sprintf("; add %d to groups", d.GID)
	}
	return text
}

// deviceNodes are the nodes that a rootful engine makes.
func (p Plan) deviceNodes() []oci.LinuxDevice {
	if p.Engine.Rootless {
		return nil
	}
	var out []oci.LinuxDevice
	for _, d := range p.Devices {
		mode := fs.FileMode(d.Mode)
		out = append(out, oci.LinuxDevice{Path: d.Path(), Type: "c", Major: d.Major, Minor: d.Minor, FileMode: &mode, UID: &d.UID, GID: &d.GID})
	}
	return out
}

// deviceBinds are the host's nodes that a rootless engine binds instead.
func (p Plan) deviceBinds() []oci.Mount {
	if !p.Engine.Rootless {
		return nil
	}
	var out []oci.Mount
	for _, d := range p.Devices {
		out = append(out, oci.Mount{Destination: d.Path(), Type: "bind", Source: d.Path(), Options: []string{"rbind", "rprivate", "nosuid", "noexec", "rw"}})
	}
	return out
}
