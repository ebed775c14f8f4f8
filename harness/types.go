// Package harness is the harness file: its Go types, strict parsing, defaults,
// validation and JSON Schema. It reads no host state and runs nothing.
package harness

// Harness is one harness file, version 1. Parse returns it with every default
// that does not depend on the host filled in; zero values that remain
// (Resources.CPUs, Resources.MemoryMB, User, WorkingDir) are decided by
// spec.Compile from the host's facts.
type Harness struct {
	// Schema names the JSON Schema for editors; it has no effect.
	Schema string `json:"$schema,omitempty"`
	// Version is the file format's version: 1.
	Version int `json:"version"`
	// Name names the run in records and listings.
	Name string `json:"name,omitempty"`
	// Engine is auto, docker or podman. Default auto: Docker when its daemon
	// answers, else Podman.
	Engine string `json:"engine,omitempty"`
	// Image is a reference or an ID the engine knows.
	Image string `json:"image"`
	// Pull is missing, always, never or fallback (pull, else the local one).
	// Default missing.
	Pull string `json:"pull,omitempty"`
	// Platform is OS/ARCH or OS/ARCH/VARIANT; the image must match it. Default: the host's.
	Platform string `json:"platform,omitempty"`
	// User is UID:GID, two plain decimal numbers. Default: see spec.Compile.
	User string `json:"user,omitempty"`
	// Userns is keep-id, auto or engine; rootless Podman only. Default keep-id.
	Userns string `json:"userns,omitempty"`
	// Capabilities may hold CHOWN only.
	Capabilities []string `json:"capabilities,omitempty"`
	// Harness is the program to run.
	Harness Command `json:"harness"`
	// Fallback holds the images and harnesses tried when the first ends with one
	// of FallbackOn.
	Fallback   []Fallback `json:"fallback,omitempty"`
	FallbackOn []int      `json:"fallbackOn,omitempty"`
	// Prompt is the prompt's text; PromptFile a file that holds it. At most one is given.
	Prompt     *string `json:"prompt,omitempty"`
	PromptFile string  `json:"promptFile,omitempty"`
	// Workspace is the folder the agent works on. Default: none.
	Workspace *Workspace `json:"workspace,omitempty"`
	// Mounts are further host folders and files.
	Mounts []Mount `json:"mounts,omitempty"`
	// Caches are named engine volumes that outlive a run.
	Caches []Cache `json:"caches,omitempty"`
	// Home is the agent's private home, a tmpfs on /home/agent.
	Home Home `json:"home,omitzero"`
	// TmpSizeMB caps /tmp, in MiB. Default 512.
	TmpSizeMB int `json:"tmpSizeMb,omitempty"`
	// RootfsWritable makes the container's root file system writable: a widening.
	RootfsWritable bool `json:"rootfsWritable,omitempty"`
	// WorkingDir is the agent's working folder. Default: the workspace's target, else the home.
	WorkingDir string `json:"workingDir,omitempty"`
	// Env, EnvFrom (names taken from the caller; unset is an error) and EnvFiles
	// (NAME=value lines) make the agent's environment.
	Env      map[string]string `json:"env,omitempty"`
	EnvFrom  []string          `json:"envFrom,omitempty"`
	EnvFiles []string          `json:"envFiles,omitempty"`
	// CACertificates are PEM files the agent's programs trust besides the image's.
	CACertificates []string `json:"caCertificates,omitempty"`
	// Egress says what the agent may reach. Default: nothing.
	Egress Egress `json:"egress,omitzero"`
	// Seccomp adjusts the system call policy.
	Seccomp Seccomp `json:"seccomp,omitzero"`
	// Resources limits the container.
	Resources Resources `json:"resources,omitzero"`
	// Devices are host device paths; Groups supplementary group ids; each is a widening.
	Devices []string `json:"devices,omitempty"`
	Groups  []int    `json:"groups,omitempty"`
	// Labels are set on the container, besides agentshim's own.
	Labels map[string]string `json:"labels,omitempty"`
	// Session rules one container shared by several steps.
	Session *Session `json:"session,omitempty"`
	// Timeout ends the run with exit 124 when it passes, e.g. "30m". Default: none.
	Timeout string `json:"timeout,omitempty"`
	// StopGrace is the time between the stop signal and the kill. Default "10s".
	StopGrace string `json:"stopGrace,omitempty"`
	// Terminal is auto (a terminal when both ends are one) or never. Default auto.
	Terminal string `json:"terminal,omitempty"`
	// Accept names the gaps and widenings the caller accepts.
	Accept []string `json:"accept,omitempty"`

	// Dir is the folder relative paths start from, absolute; set by Load.
	Dir string `json:"-"`
}

// Command says which program runs and how it takes its prompt and options.
type Command struct {
	// Provider is a catalogue name; otherwise Binary names the program.
	Provider string `json:"provider,omitempty"`
	// Binary is an absolute path in the container or a name looked up in PATH.
	Binary string `json:"binary,omitempty"`
	// PrefixArgs stand between the binary and everything else.
	PrefixArgs []string `json:"prefixArgs,omitempty"`
	// PromptMode is arg, flag, stdin or file. Default arg.
	PromptMode string `json:"promptMode,omitempty"`
	// PromptFlag carries the prompt (mode flag) or its path (mode file).
	PromptFlag string `json:"promptFlag,omitempty"`
	// PromptPosition is before-flags or after-flags. Default before-flags.
	PromptPosition string `json:"promptPosition,omitempty"`
	// FlagStyle is gnu-long (--name value) or single-dash (-name value). Default gnu-long.
	FlagStyle string `json:"flagStyle,omitempty"`
	// Options are the harness's own options by name; OptionFlags maps a name to its flag.
	Options     map[string]any    `json:"options,omitempty"`
	OptionFlags map[string]string `json:"optionFlags,omitempty"`
	// Auth is none, account, api-key or broker, as the provider defines them.
	Auth string `json:"auth,omitempty"`
	// Env is set for the harness, after everything else.
	Env map[string]string `json:"env,omitempty"`
}

// Fallback is one further image and harness.
type Fallback struct {
	Image   string  `json:"image,omitempty"`
	Harness Command `json:"harness"`
	Home    *Home   `json:"home,omitempty"`
}

// Workspace is the folder the agent works on.
type Workspace struct {
	// Source is a host folder; relative to the file's own folder.
	Source string `json:"source"`
	// Target is its place in the container. Default /workspace.
	Target string `json:"target,omitempty"`
	// Mode is writable, read-only, copy or none. Default read-only.
	Mode string `json:"mode,omitempty"`
	// Git is private, shared or none; empty when the file does not say.
	Git string `json:"git,omitempty"`
	// Protect and Hide are paths below the workspace.
	Protect []string `json:"protect,omitempty"`
	Hide    []string `json:"hide,omitempty"`
}

// Mount is one host folder or file seen by the agent.
type Mount struct {
	Source string `json:"source"`
	Target string `json:"target"`
	// Writable lets the agent change the source. Default: read-only.
	Writable bool `json:"writable,omitempty"`
	// NoExec forbids running programs from it.
	NoExec bool `json:"noexec,omitempty"`
	// Label is none, z or Z (SELinux). Default none.
	Label string `json:"label,omitempty"`
}

// Cache is one named volume.
type Cache struct {
	Name   string `json:"name"`
	Key    string `json:"key,omitempty"`
	Target string `json:"target"`
}

// Home is the agent's private home.
type Home struct {
	// SizeMB caps it, in MiB. Default 512.
	SizeMB int  `json:"sizeMb,omitempty"`
	NoExec bool `json:"noexec,omitempty"`
	// Files are copied in at launch, mode 0600.
	Files []HomeFile `json:"files,omitempty"`
}

// HomeFile is one host file copied into the home.
type HomeFile struct {
	Source string `json:"source"`
	// Target is relative to the home.
	Target string `json:"target"`
	// WriteBack copies it back at the end.
	WriteBack bool `json:"writeBack,omitempty"`
}

// Egress is the network policy.
type Egress struct {
	// Mode is deny-all, allow-list, open or network. Default deny-all.
	Mode    string   `json:"mode,omitempty"`
	Allow   []Allow  `json:"allow,omitempty"`
	Deny    []string `json:"deny,omitempty"`
	Presets []string `json:"presets,omitempty"`
	// HostServices opens ports of the host's loopback under a name.
	HostServices []HostService `json:"hostServices,omitempty"`
	// Publish holds ADDRESS:HOSTPORT:PORT entries.
	Publish  []string `json:"publish,omitempty"`
	Brokers  []Broker `json:"brokers,omitempty"`
	Network  string   `json:"network,omitempty"`
	Renderer string   `json:"renderer,omitempty"`
	// Proxy is a URL, or env for the caller's variables.
	Proxy string `json:"proxy,omitempty"`
}

// Allow is one allowed target: a string HOST[:PORT] or CIDR[:PORT], or an object.
type Allow struct {
	Host string `json:"host"`
	Port int    `json:"port,omitempty"`
	// Raw lets something other than TLS pass on the port; ECH lets encrypted hellos pass.
	Raw bool `json:"raw,omitempty"`
	ECH bool `json:"ech,omitempty"`
}

// HostService is one port on the host's loopback.
type HostService struct {
	Name string `json:"name"`
	Port int    `json:"port"`
}

// Broker adds a credential outside the container.
type Broker struct {
	Name      string    `json:"name"`
	Upstream  string    `json:"upstream"`
	Header    string    `json:"header"`
	ValueFrom ValueFrom `json:"valueFrom"`
}

// ValueFrom says where a secret comes from.
type ValueFrom struct {
	Env  string `json:"env,omitempty"`
	File string `json:"file,omitempty"`
}

// Seccomp adjusts the system call policy.
type Seccomp struct {
	// Profile is default, nested or a file in Docker's format. Default default.
	Profile string   `json:"profile,omitempty"`
	Allow   []string `json:"allow,omitempty"`
	Deny    []string `json:"deny,omitempty"`
}

// Resources limits the container. Zero means the default.
type Resources struct {
	// CPUs is the number of CPUs, fractions allowed. Default: all the caller may use.
	CPUs float64 `json:"cpus,omitempty"`
	// MemoryMB is memory and swap together, in MiB. Default: half of the machine's, at most 8192.
	MemoryMB int `json:"memoryMb,omitempty"`
	// PIDs bounds processes and threads. Default 512.
	PIDs int `json:"pids,omitempty"`
	// NoFile bounds open files per process. Default 8192, clamped to the hard limit.
	NoFile int `json:"nofile,omitempty"`
	// ShmMB caps /dev/shm, in MiB. Default 64.
	ShmMB int `json:"shmMb,omitempty"`
}

// Session rules a container shared by several steps.
type Session struct {
	Idle    string `json:"idle,omitempty"`
	Maximum string `json:"maximum,omitempty"`
	Ready   *Ready `json:"ready,omitempty"`
}

// Ready says when a session is ready.
type Ready struct {
	Port    int      `json:"port,omitempty"`
	Command []string `json:"command,omitempty"`
}
