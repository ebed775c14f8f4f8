// Package spec decides a run: a harness file and the host's facts become one
// Plan. Everything in it is pure: no function reads a file, the environment or
// the clock.
package spec

import (
	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/netpolicy"
)

// Host is what shim.Probe found; tests write it as a literal.
type Host struct {
	Engine  Engine
	Image   Image
	Caller  Caller
	Machine Machine
	Mounts  mounts.Facts
	// Devices holds an entry for each device path of the harness file.
	Devices map[string]DeviceFile
	// GroupOwns says what a group that the harness file names owns on the host that no
	// agent may have: an engine's socket, a disk, password files.
	GroupOwns map[uint32]string
	// Presets are the targets of the egress presets that the file names.
	Presets map[string][]harness.Allow
	// Network is the engine's network that the file wants, nil where it wants none.
	Network *netpolicy.Network
	// Proxy is the upstream proxy that the file asks for, without credentials; nil where it asks
	// for none, or for the caller's and the caller has none.
	Proxy *netpolicy.Proxy
	// SeccompFile is the content of the file that seccomp.profile names, nil where it names none.
	SeccompFile []byte
}

// Kinds of engine.
const (
	Docker = "docker"
	Podman = "podman"
)

// Engine is the container engine as it answered.
type Engine struct {
	// Kind is Docker or Podman, told by what answered and not by the client's name.
	Kind string `json:"kind"`
	// Client is the absolute path of the client program.
	Client string `json:"client"`
	// Socket is the path of Docker's API socket; empty for Podman.
	Socket  string `json:"socket,omitempty"`
	Version string `json:"version"`
	// Rootless says that the engine runs without root on the host.
	Rootless bool `json:"rootless"`
	// UserNamespace says that containers get a user namespace by the engine's own
	// configuration (Docker's userns-remap).
	UserNamespace bool `json:"userNamespace"`
	// CgroupVersion is 1 or 2; CgroupHybrid says that a v2 hierarchy is mounted beside v1.
	CgroupVersion int  `json:"cgroupVersion"`
	CgroupHybrid  bool `json:"cgroupHybrid"`
	// LimitsHold says that memory, cpus and pids limits take effect.
	LimitsHold bool `json:"limitsHold"`
	// Runtime is the OCI runtime's name; RuntimePath is passed to the engine when
	// the configured one can't run here (crun on hybrid cgroups), else empty.
	Runtime        string `json:"runtime"`
	RuntimeVersion string `json:"runtimeVersion"`
	RuntimePath    string `json:"runtimePath,omitempty"`
	// CgroupDriver is cgroupfs, systemd or none, as the engine says.
	CgroupDriver string `json:"cgroupDriver,omitempty"`
	// AppArmor and SELinux say that the engine confines containers with them; the
	// kernel alone having them is not enough.
	AppArmor bool `json:"apparmor"`
	SELinux  bool `json:"selinux"`
	// Dirs are the engine's data and state folders, to be protected from mounts.
	Dirs []string `json:"-"`
	// Notes are one-line remarks for the user, e.g. an OCI runtime with known faults.
	Notes []string `json:"notes,omitempty"`
}

// Image is the image after the pull decision.
type Image struct {
	// Ref is what the file named, ID what runs: "sha256:…".
	Ref string `json:"ref"`
	ID  string `json:"id"`
	// Digest is the repository digest, empty for a local image.
	Digest string `json:"digest,omitempty"`
	OS     string `json:"os"`
	Arch   string `json:"arch"`
	// Variant is the architecture's variant, e.g. v7.
	Variant string `json:"variant,omitempty"`
	// User is the image's USER as written.
	User string `json:"user,omitempty"`
	// Env is the image's ENV in order, NAME=value.
	Env         []string `json:"-"`
	Volumes     []string `json:"volumes,omitempty"`
	HealthCheck bool     `json:"healthCheck,omitempty"`
	WorkingDir  string   `json:"workingDir,omitempty"`
}

// Caller is the user that runs agentshim.
type Caller struct {
	UID    uint32   `json:"uid"`
	GID    uint32   `json:"gid"`
	Groups []uint32 `json:"groups,omitempty"`
	// SubUIDs and SubGIDs are the lengths of the caller's subordinate id ranges.
	SubUIDs uint32 `json:"subUids,omitempty"`
	SubGIDs uint32 `json:"subGids,omitempty"`
	// HardNoFile and HardNProc are the hard limits that bound a container's ulimits:
	// the daemon's for Docker, the caller's for Podman.
	HardNoFile uint64 `json:"hardNofile"`
	HardNProc  uint64 `json:"hardNproc"`
	// CPUs is the number of CPUs the caller may use.
	CPUs int `json:"cpus"`
	// WorkingDir and Home are for messages only.
	Home string `json:"-"`
}

// Machine is the host itself.
type Machine struct {
	OS          string `json:"os"`
	Arch        string `json:"arch"`
	Kernel      string `json:"kernel"`
	MemoryBytes int64  `json:"memoryBytes"`
	// IPv6 says that the kernel has IPv6.
	IPv6 bool `json:"ipv6"`
	// NoNftables says that the kernel answered that it has no nf_tables. Only root gets an
	// answer: rootless Podman's helper asks itself, for others it is taken for granted.
	NoNftables bool `json:"noNftables,omitempty"`
	// Namespaces are the caller's own, "kind:[inode]" by kind; a container's must differ.
	Namespaces map[string]string `json:"-"`
	SELinux    bool              `json:"selinux"`
	AppArmor   bool              `json:"apparmor"`
}
