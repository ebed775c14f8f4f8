package wire

import (
	"encoding/json"
	"fmt"
)

// Hello is init's look at itself and its container, taken before anything else
// runs there.
type Hello struct {
	Version int `json:"version"`
	PID     int `json:"pid"`
	// UIDs and GIDs are real, effective, saved and file system ids.
	UIDs   [4]uint32 `json:"uids"`
	GIDs   [4]uint32 `json:"gids"`
	Groups []uint32  `json:"groups"`
	// Capabilities holds the five sets by their /proc/self/status name
	// (CapInh, CapPrm, CapEff, CapBnd, CapAmb), as lower-case hexadecimal.
	Capabilities   map[string]string `json:"capabilities"`
	NoNewPrivs     bool              `json:"noNewPrivs"`
	SecureBits     int               `json:"secureBits"`
	SeccompMode    int               `json:"seccompMode"`
	SeccompFilters int               `json:"seccompFilters"`
	// Dumpable is PR_GET_DUMPABLE as the kernel set it at exec.
	Dumpable int `json:"dumpable"`
	// Namespaces are the links of /proc/self/ns by name.
	Namespaces map[string]string `json:"namespaces"`
	// UIDMap and GIDMap are /proc/self/{uid,gid}_map: inside, outside, length.
	UIDMap [][3]uint32 `json:"uidMap"`
	GIDMap [][3]uint32 `json:"gidMap"`
	Mounts []Mount     `json:"mounts"`
	// Rlimits are soft and hard by their RLIMIT_ name in lower case; infinity is
	// the largest value. The Go runtime raises its own soft nofile.
	Rlimits map[string][2]uint64 `json:"rlimits"`
	Cgroup  Cgroup               `json:"cgroup"`
	// FDs are the descriptors found open, number to link.
	FDs map[int]string `json:"fds"`
	// Environ is init's own environment; in a container that is not agentshim's its HOME alone.
	Environ []string `json:"environ"`
	// DevNodes is everything below /dev but the folders pts, shm and mqueue
	// themselves: "c 1:3 null", "c 5:2 pts/ptmx", "b 8:0 sda", "l fd /proc/self/fd",
	// "d net", "f shm/name". The walk ends after MaxDevNodes.
	DevNodes []string `json:"devNodes"`
	// Interfaces are the network interfaces' names; Routes counts the IPv4 and
	// IPv6 routes that are not of loopback.
	Interfaces []string `json:"interfaces"`
	Routes     int      `json:"routes"`
	// Addresses are those of the interfaces: "eth0 172.18.0.2".
	Addresses []string `json:"addresses,omitempty"`
	// NetCookie is the network namespace's SO_NETNS_COOKIE: a number that no other one
	// has until the next boot. It is 0 where the kernel has none (before Linux 5.14).
	NetCookie uint64 `json:"netCookie"`
	// Processes are the pids visible in /proc, none in a container that is not agentshim's.
	Processes []int `json:"processes"`
	// LSM is /proc/self/attr/current, empty without a security module.
	LSM     string            `json:"lsm"`
	Sysctls map[string]string `json:"sysctls"`
	// Hostname is the UTS node name.
	Hostname string `json:"hostname"`
	Umask    int    `json:"umask"`
	// KernelPaths says which of the package's KernelPaths exist.
	KernelPaths map[string]bool `json:"kernelPaths"`
	// Syscalls are the outcomes of the package's Syscalls, in order: an errno's
	// name, or "ok".
	Syscalls []string `json:"syscalls"`
	// Errors are facts that could not be read, by name.
	Errors map[string]string `json:"errors,omitempty"`
}

// Mount is one line of /proc/self/mountinfo with the identity of what it shows.
type Mount struct {
	Target string `json:"target"`
	// Root is the path within the file system that is mounted.
	Root string `json:"root"`
	Type string `json:"type"`
	// Options are the mount's own, Super the file system's.
	Options []string `json:"options"`
	Super   []string `json:"super"`
	// Propagation are the optional fields.
	Propagation []string `json:"propagation,omitempty"`
	// Dev, Ino, Mode, UID and GID are what stat says of Target; Mode holds the
	// type bits. Stat is empty or the error.
	Dev  uint64 `json:"dev"`
	Ino  uint64 `json:"ino"`
	Mode uint32 `json:"mode"`
	UID  uint32 `json:"uid"`
	GID  uint32 `json:"gid"`
	Stat string `json:"stat,omitempty"`
	// Empty says that Target is a folder without entries. It is looked at for the
	// tmpfs below /proc and /sys only.
	Empty bool `json:"empty,omitempty"`
}

// Cgroup is what the cgroup files say, -1 where there is no limit and -2 where
// no file can be read.
type Cgroup struct {
	Version int `json:"version"`
	// Memory and MemorySwap are bytes; on v2 MemorySwap is memory plus swap.
	Memory     int64 `json:"memory"`
	MemorySwap int64 `json:"memorySwap"`
	// CPUQuota is in microseconds per CPUPeriod.
	CPUQuota  int64 `json:"cpuQuota"`
	CPUPeriod int64 `json:"cpuPeriod"`
	PIDs      int64 `json:"pids"`
}

// Probed is the outcome of the live network probe: per attempt the errno's name,
// or "open" when it succeeded, or "timeout". A TCP connection that was made counts by
// its end: ECONNRESET when it was reset without a byte.
type Probed struct {
	UDP4  string `json:"udp4"`
	UDP6  string `json:"udp6"`
	TCP4  string `json:"tcp4"`
	TCP6  string `json:"tcp6"`
	VSock string `json:"vsock"`
	// Ping is an unprivileged ICMP socket: icmp(7).
	Ping string `json:"ping"`
	// Micros is the time all attempts took together, in microseconds.
	Micros int64 `json:"micros"`
}

// MaxDevNodes bounds Hello.DevNodes: a container has about a dozen.
const MaxDevNodes = 256

// File is one file for the agent's home; its content follows in data frames.
type File struct {
	// Path is absolute, clean and below HomeDir.
	Path string `json:"path"`
	Size int64  `json:"size"`
	// WriteBack asks for what stands there when the harness has ended.
	WriteBack bool `json:"writeBack,omitempty"`
	// BackOnly says that nothing is written: Path, which may lie anywhere, is what the
	// harness itself may leave. Size is 0 and WriteBack is set.
	BackOnly bool `json:"backOnly,omitempty"`
	// After are absolute paths of the container. The content of the first of them that is a
	// regular file of at most MaxAfter stands in front of the data, with a line feed behind it.
	After []string `json:"after,omitempty"`
}

// Back is what stands at a file's path at the end; its content follows in data frames.
// Init sends one for each File with WriteBack, in their order, between the end of the
// streams and Exit.
type Back struct {
	Path string `json:"path"`
	Size int64  `json:"size"`
	// Problem says why there is no content: the file is gone, is no regular file, is
	// larger than MaxBack, or can't be read. At most 1 KiB.
	Problem string `json:"problem,omitempty"`
}

// DialArg has init's program look whether something listens: `agentshim-init dial PORT`.
const DialArg = "dial"

// AttachArg makes init's program the init of one step in a container that is not
// agentshim's; the step's files go to AttachDir.
const (
	AttachArg = "attach/1"
	AttachDir = "/tmp"
)

// HomeDir is the agent's home in every container; MaxFile bounds a file in it, MaxBack
// one that is sent back.
const (
	HomeDir = "/home/agent"
	MaxFile = 64 << 20
	MaxBack = 1 << 20
	// MaxAfter bounds a file of the image that another one goes behind.
	MaxAfter = 4 << 20
)

// Launch starts the harness. Args and Env arrive byte for byte, UTF-8 or not.
type Launch struct {
	Args []string
	Env  []string
	Dir  string
	// RuntimeDir is created with mode 0700 (XDG_RUNTIME_DIR), but in a container that
	// is not agentshim's.
	RuntimeDir string
	// Terminal, unless nil, makes the harness's three streams one terminal of that
	// size, its controlling one. Its output is stdout; there is no stderr, and the end
	// of stdin is not passed on.
	Terminal *Size
}

// Size is a terminal's, in characters; 0 is unknown.
type Size struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// Packed is the size as a window frame's number, SizeOf the other way.
func (s Size) Packed() uint32 { return uint32(s.Rows)<<16 | uint32(s.Cols) }

// SizeOf unpacks a window frame's number.
func SizeOf(n uint32) Size { return Size{Rows: uint16(n >> 16), Cols: uint16(n)} }

// launchJSON carries the words in base64: a JSON string can't hold every byte.
type launchJSON struct {
	Args       [][]byte `json:"args"`
	Env        [][]byte `json:"env"`
	Dir        string   `json:"dir"`
	RuntimeDir string   `json:"runtimeDir"`
	Terminal   *Size    `json:"terminal,omitempty"`
}

// MarshalJSON implements json.Marshaler.
func (l Launch) MarshalJSON() ([]byte, error) {
	return json.Marshal(launchJSON{
		Args: words[[]byte](l.Args), Env: words[[]byte](l.Env), Dir: l.Dir, RuntimeDir: l.RuntimeDir, Terminal: l.Terminal,
	})
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *Launch) UnmarshalJSON(b []byte) error {
	var j launchJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	*l = Launch{
		Args: words[string](j.Args), Env: words[string](j.Env), Dir: j.Dir, RuntimeDir: j.RuntimeDir, Terminal: j.Terminal,
	}
	return nil
}

func words[To, From string | []byte](from []From) []To {
	to := make([]To, len(from))
	for i, w := range from {
		to[i] = To(w)
	}
	return to
}

// Refused says why the harness was not started. Init does nothing more after it.
type Refused struct {
	// Reason is harness-missing, harness-exec, arguments, workdir, home-file,
	// runtime-dir, streams or steps.
	Reason string `json:"reason"`
	// Detail names the operand and the error, at most 1 KiB.
	Detail string `json:"detail"`
}

// Exit is how the harness ended.
type Exit struct {
	// Code is the exit code, -1 when Signal ended it.
	Code   int `json:"code"`
	Signal int `json:"signal,omitempty"`
	// OOMKills counts the container's out-of-memory kills, -1 when unknown.
	OOMKills int64 `json:"oomKills"`
	// Left counts the processes killed after the harness had ended.
	Left         int   `json:"left"`
	UserMicros   int64 `json:"userMicros"`
	SystemMicros int64 `json:"systemMicros"`
	MaxRSSKiB    int64 `json:"maxRssKib"`
	// Lost says that a session's step was killed as a whole, or lost what watches it,
	// so that nothing is known of its end but that none of its processes is left.
	Lost bool `json:"lost,omitempty"`
}

// Status is the harness's end as a shell shows it: the exit code, or 128 and the
// signal. It returns ErrProtocol for what no process ends with.
func (e Exit) Status() (int, error) {
	switch {
	case e.Signal == 0 && e.Code >= 0 && e.Code <= 255:
		return e.Code, nil
	case e.Code == -1 && e.Signal > 0 && e.Signal <= 64:
		return 128 + e.Signal, nil
	}
	return 0, fmt.Errorf("%w: exit code %d with signal %d", ErrProtocol, e.Code, e.Signal)
}

// KernelPaths are paths below /proc and /sys that engines mask or make
// read-only; init says which of them exist in its container.
var KernelPaths = []string{
	"/proc/acpi", "/proc/asound", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/kcore", "/proc/keys",
	"/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/sys", "/proc/sysrq-trigger",
	"/proc/timer_list", "/proc/timer_stats", "/sys/dev/block", "/sys/firmware", "/sys/fs/selinux",
}

// Syscall is one system call that init tries on itself. Its arguments make it
// harmless where it is allowed.
type Syscall struct {
	Name string
	Args [6]uint64
}

// Syscalls are tried before anything is launched; the shim compares each outcome
// with what the system call policy decides for it. There is one at least for each way out
// that the policy closes.
var Syscalls = []Syscall{
	{Name: "socket", Args: [6]uint64{40, 1, 0}},  // AF_VSOCK
	{Name: "socket", Args: [6]uint64{38, 5, 0}},  // AF_ALG
	{Name: "socket", Args: [6]uint64{17, 3, 0}},  // AF_PACKET
	{Name: "socket", Args: [6]uint64{16, 3, 15}}, // NETLINK_KOBJECT_UEVENT
	{Name: "socketpair", Args: [6]uint64{2, 1, 0, nowhere}},
	{Name: "keyctl", Args: [6]uint64{0, 0, 0}},
	{Name: "add_key", Args: [6]uint64{nowhere}},
	{Name: "ptrace", Args: [6]uint64{99999}},
	{Name: "kcmp", Args: [6]uint64{1, 1, 99}},
	{Name: "process_vm_readv", Args: [6]uint64{1}},
	{Name: "process_vm_writev", Args: [6]uint64{1}},
	{Name: "pidfd_getfd", Args: [6]uint64{noFD}},
	{Name: "prlimit64", Args: [6]uint64{1, 99}},
	{Name: "sched_setparam", Args: [6]uint64{1}},
	{Name: "sched_setaffinity", Args: [6]uint64{1, 8, nowhere}},
	{Name: "sched_setattr", Args: [6]uint64{1}},
	{Name: "setpriority", Args: [6]uint64{0, 1 << 30}},
	{Name: "ioprio_set", Args: [6]uint64{1, 1 << 30}},
	{Name: "rt_sigqueueinfo", Args: [6]uint64{1 << 30, 0, nowhere}},
	{Name: "unshare", Args: [6]uint64{}},
	{Name: "setns", Args: [6]uint64{noFD}},
	{Name: "clone", Args: [6]uint64{0x10010000}}, // CLONE_NEWUSER, and CLONE_THREAD without what it needs
	{Name: "clone3", Args: [6]uint64{}},
	{Name: "mount", Args: [6]uint64{nowhere, nowhere, nowhere}},
	{Name: "umount2", Args: [6]uint64{nowhere, nowhere}},
	{Name: "pivot_root", Args: [6]uint64{nowhere, nowhere}},
	{Name: "chroot", Args: [6]uint64{nowhere}},
	{Name: "open_tree", Args: [6]uint64{0, nowhere, nowhere}},
	{Name: "fsopen", Args: [6]uint64{nowhere, nowhere}},
	{Name: "open_by_handle_at", Args: [6]uint64{noFD, nowhere}},
	{Name: "io_uring_setup", Args: [6]uint64{}},
	{Name: "io_uring_enter", Args: [6]uint64{noFD}},
	{Name: "userfaultfd", Args: [6]uint64{0xffffffff}},
	{Name: "bpf", Args: [6]uint64{9999}},
	{Name: "perf_event_open", Args: [6]uint64{nowhere}},
	{Name: "finit_module", Args: [6]uint64{noFD, 0, nowhere}},
	{Name: "ioctl", Args: [6]uint64{noFD, 0x5412}},         // TIOCSTI
	{Name: "ioctl", Args: [6]uint64{noFD, 1<<32 | 0x5412}}, // whatever the upper half is
}

// What no process of a container has: an address, and a descriptor.
const (
	nowhere = 1<<63 - 1
	noFD    = 1 << 30
)
