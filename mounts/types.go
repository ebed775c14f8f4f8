// Package mounts decides what the agent's container sees of the host's files:
// binds, tmpfs, and image volumes. Probe reads the host, Compile is pure.
package mounts

// Facts is what Probe read from the host.
type Facts struct {
	// Home is the caller's home, for sources that start with ~/.
	Home string
	// Sources holds one entry per source path named by the harness file, keyed by
	// the path as written, made absolute.
	Sources map[string]Source
	// Nested says what stands in a bind's source where another mount's target lies
	// inside that bind: NodeDir, NodeFile or NodeOther (a link among them), keyed by
	// the host path; absent where nothing stands. No link was followed.
	Nested map[string]string
	// Protected folders may not be mounted, nor anything below or above them:
	// engines' data and state, agentshim's own folders.
	Protected []string
	// HomeRoots are the home folders of the users of this machine; neither they nor
	// a folder above them may be mounted.
	HomeRoots []string
	// SystemLinks maps a system folder that is itself a link (/home on some systems)
	// to what it resolves to.
	SystemLinks map[string]string
	// Git is what the workspace is to git.
	Git GitFacts
	// SELinux says that the kernel enforces it.
	SELinux bool
	// UID is the caller's.
	UID uint32
	// Own are the host files that steer agentshim, where the agent might reach them.
	Own []OwnFile
	// Guards is what stands at the workspace's guarded paths, of GuardPaths with Own;
	// nil where nobody has looked, which Compile refuses where it matters.
	Guards GuardFacts
}

// Source is one host folder or file.
type Source struct {
	// Path is absolute and holds no link.
	Path string
	Dir  bool
	// Dev and Ino identify it; the attestation compares them with what init sees.
	Dev, Ino uint64
	UID, GID uint32
	// Mode holds the permission bits.
	Mode uint32
	// NoExec says that the file system it lies on is mounted noexec.
	NoExec bool
	// Label is its SELinux label, user:role:type:level; empty where it has none.
	Label string
	// Submounts are the mount points below it.
	Submounts []string
	// Sockets are the sockets at or below it that something listens on, or that
	// have an engine's, an agent's or the desktop's well-known name.
	Sockets []string
	// GroupOnly says that the caller can read it only through a supplementary group.
	GroupOnly bool
}

// What may stand at a nested target.
const (
	NodeDir   = "dir"
	NodeFile  = "file"
	NodeOther = "other"
)

// Target is what Compile must know about the container.
type Target struct {
	// Podman picks Podman's mechanisms; otherwise Docker's.
	Podman bool
	// Rootless says that the engine runs as the caller.
	Rootless bool
	// SELinux says that the engine confines its containers with it.
	SELinux bool
	// UID and GID own the tmpfs.
	UID, GID uint32
	// MemoryBytes is the container's limit, 0 where none holds.
	MemoryBytes int64
	// ImageID is the image's ID, which keys caches.
	ImageID string
	// ImageVolumes are the image's VOLUME paths.
	ImageVolumes []string
	// Reserved are the container's paths that the plan itself mounts something on
	// (init, /etc/hosts, …); no target may be one of them, or above or below one.
	Reserved []string
}

// Mount is one mount of the container.
type Mount struct {
	// Target is absolute and clean.
	Target string `json:"target"`
	// Type is bind, tmpfs or volume.
	Type string `json:"type"`
	// Source is the host path of a bind, empty where Own is set, or the name of a volume.
	Source string `json:"source,omitempty"`
	// Own is a bind's source relative to the run's own folder, which is made for the
	// run: Dev and Ino are not known before.
	Own string `json:"own,omitempty"`
	// Kept says that Own is relative to the run's folder in the state folder, which
	// outlives the run, and not to the one that ends with it.
	Kept     bool `json:"kept,omitempty"`
	Writable bool `json:"writable"`
	NoExec   bool `json:"noexec"`
	// NoSUIDBy, NoDevBy and NoExecBy name what enforces each: "flag" (the mount
	// flag), "no-new-privileges", "devices-cgroup", "" (not asked for) or
	// "gap" (asked for and not enforced).
	NoSUIDBy string `json:"nosuidBy"`
	NoDevBy  string `json:"nodevBy"`
	NoExecBy string `json:"noexecBy,omitempty"`
	// SizeBytes and Mode are a tmpfs's; UID and GID own a tmpfs or volume.
	SizeBytes int64  `json:"sizeBytes,omitempty"`
	Mode      uint32 `json:"mode,omitempty"`
	UID       uint32 `json:"uid,omitempty"`
	GID       uint32 `json:"gid,omitempty"`
	// Label is what the engine does to the source's SELinux label before it mounts it:
	// z, Z or nothing.
	Label string `json:"label,omitempty"`
	// Dev and Ino identify the bind's source.
	Dev uint64 `json:"-"`
	Ino uint64 `json:"-"`
	// Why says what it is for: workspace, mount, home, tmp, run, shm,
	// image-volume, parent, cache, protect, guard, hide, git.
	Why string `json:"why"`
}

// Set is everything Compile decided.
type Set struct {
	// Mounts are in mount order: parents before children.
	Mounts []Mount `json:"mounts"`
	// Caches are the volumes among them, in the order of their targets.
	Caches []Cache `json:"caches,omitempty"`
	// Git is what becomes of the workspace's .git: GitPrivate, GitShared or GitNone, or
	// empty where it has none.
	Git string `json:"git,omitempty"`
	// BindNoExec lists targets where noexec was asked for and this engine can't
	// enforce it (the gap bind-noexec).
	BindNoExec []string `json:"bindNoExec,omitempty"`
	// Guards are the workspace's paths that are protected or hidden where they exist.
	Guards []GuardPath `json:"guards,omitempty"`
	// Warnings are shown to the user; nothing is refused by them.
	Warnings []string `json:"warnings,omitempty"`
}
