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
	Version int `json:"version" jsonschema:"enum=1"`
	// Name names the run in records and listings.
	Name string `json:"name,omitempty" jsonschema:"pattern=^[A-Za-z0-9][A-Za-z0-9_.-]{0\\,62}$"`
	// Engine is auto, docker or podman. Default auto: Docker when its daemon
	// answers, else Podman.
	Engine string `json:"engine,omitempty" jsonschema:"enum=auto,enum=docker,enum=podman,default=auto"`
	// Image is a reference or an ID the engine knows.
	Image string `json:"image" jsonschema:"minLength=1"`
	// Pull is missing, always, never or fallback (pull, else the local one).
	// Default missing.
	Pull string `json:"pull,omitempty" jsonschema:"enum=missing,enum=always,enum=never,enum=fallback,default=missing"`
	// Platform is OS/ARCH or OS/ARCH/VARIANT; the image must match it. Default: the host's.
	Platform string `json:"platform,omitempty" jsonschema:"pattern=^linux/[a-z0-9]+(/[a-z0-9]+)?$"`
	// User is UID:GID, two plain decimal numbers. Default: see spec.Compile.
	User string `json:"user,omitempty" jsonschema:"pattern=^(0|[1-9][0-9]*):(0|[1-9][0-9]*)$"`
	// Userns is keep-id, auto or engine; rootless Podman only. Default keep-id.
	Userns string `json:"userns,omitempty" jsonschema:"enum=keep-id,enum=auto,enum=engine"`
	// Capabilities may hold CHOWN only.
	Capabilities []string `json:"capabilities,omitempty" jsonschema:"enum=CHOWN,uniqueItems=true"`
	// Harness is the program to run.
	Harness Command `json:"harness"`
	// Fallback holds the images and harnesses tried when the first ends with one
	// of the exit codes in fallbackOn.
	Fallback []Fallback `json:"fallback,omitempty"`
	// FallbackOn holds the exit codes that start the next fallback.
	FallbackOn []int `json:"fallbackOn,omitempty" jsonschema:"minimum=0,maximum=255"`
	// Prompt is the prompt's text. At most one of prompt and promptFile is given.
	Prompt *string `json:"prompt,omitempty"`
	// PromptFile is a file that holds the prompt.
	PromptFile string `json:"promptFile,omitempty" jsonschema:"minLength=1"`
	// Workspace is the folder the agent works on. Default: none.
	Workspace *Workspace `json:"workspace,omitempty"`
	// Mounts are further host folders and files.
	Mounts []Mount `json:"mounts,omitempty" jsonschema:"maxItems=256"`
	// Caches are named engine volumes that outlive a run.
	Caches []Cache `json:"caches,omitempty"`
	// Home is the agent's private home, a tmpfs on /home/agent.
	Home Home `json:"home,omitzero"`
	// TmpSizeMB caps /tmp, in MiB. Default 512.
	TmpSizeMB int `json:"tmpSizeMb,omitempty" jsonschema:"minimum=1,maximum=1048576,default=512"`
	// RootfsWritable makes the container's root file system writable: a widening.
	RootfsWritable bool `json:"rootfsWritable,omitempty"`
	// WorkingDir is the agent's working folder. Default: the workspace's target, else the home.
	WorkingDir string `json:"workingDir,omitempty" jsonschema:"pattern=^/"`
	// Env is set in the agent's environment; it wins over envFrom and envFiles.
	Env map[string]string `json:"env,omitempty"`
	// EnvFrom names variables taken from the caller; an unset one is an error. It
	// wins over envFiles.
	EnvFrom []string `json:"envFrom,omitempty" jsonschema:"pattern=^[A-Za-z_][A-Za-z0-9_]*$,uniqueItems=true"`
	// EnvFiles are files of NAME=value lines, byte-exact; see ParseEnvFile.
	EnvFiles []string `json:"envFiles,omitempty" jsonschema:"minLength=1"`
	// CACertificates are PEM files the agent's programs trust besides the image's.
	CACertificates []string `json:"caCertificates,omitempty" jsonschema:"minLength=1"`
	// Egress says what the agent may reach. Default: nothing.
	Egress Egress `json:"egress,omitzero"`
	// Seccomp adjusts the system call policy.
	Seccomp Seccomp `json:"seccomp,omitzero"`
	// Resources limits the container.
	Resources Resources `json:"resources,omitzero"`
	// Devices are character devices of the host, like /dev/kvm, that the agent may
	// read and write; each is the widening device:PATH.
	Devices []string `json:"devices,omitempty" jsonschema:"minLength=1,maxItems=64"`
	// Groups are supplementary group ids; each is the widening group:GID. Not with
	// rootless Podman.
	Groups []int `json:"groups,omitempty" jsonschema:"minimum=0,maximum=4294967294,maxItems=64"`
	// Labels are set on the container, besides agentshim's own.
	Labels map[string]string `json:"labels,omitempty"`
	// Session rules one container shared by several steps.
	Session *Session `json:"session,omitempty"`
	// Timeout ends the run with exit 124 when it passes, e.g. "30m". Default: none.
	Timeout string `json:"timeout,omitempty" jsonschema:"minLength=1"`
	// StopGrace is the time between the stop signal and the kill. Default "10s".
	StopGrace string `json:"stopGrace,omitempty" jsonschema:"minLength=1,default=10s"`
	// Terminal is auto (a terminal when both ends are one) or never. Default auto.
	Terminal string `json:"terminal,omitempty" jsonschema:"enum=auto,enum=never,default=auto"`
	// Accept names the gaps and widenings the caller accepts.
	Accept []string `json:"accept,omitempty" jsonschema:"minLength=1"`

	// OutputFile is the path in the container of what the harness leaves for its caller,
	// absolute and clean; set by Parse from the command line, empty for none.
	OutputFile string `json:"-"`
	// Dir is the folder relative paths start from, absolute; set by Load and Parse.
	Dir string `json:"-"`
}

// Command says which program runs and how it takes its prompt and options.
type Command struct {
	// Provider names an agent CLI that agentshim knows; otherwise Binary names the program.
	Provider string `json:"provider,omitempty" jsonschema:"minLength=1"`
	// Binary is an absolute path in the container or a name looked up in PATH.
	Binary string `json:"binary,omitempty" jsonschema:"minLength=1"`
	// PrefixArgs stand between the binary and everything else.
	PrefixArgs []string `json:"prefixArgs,omitempty"`
	// PromptMode is arg, flag, stdin or file. Default arg.
	PromptMode string `json:"promptMode,omitempty" jsonschema:"enum=arg,enum=flag,enum=stdin,enum=file,default=arg"`
	// PromptFlag carries the prompt (mode flag) or its path (mode file).
	PromptFlag string `json:"promptFlag,omitempty" jsonschema:"pattern=^--?[A-Za-z0-9][A-Za-z0-9_.-]*$"`
	// PromptPosition is before-flags or after-flags. Default before-flags.
	PromptPosition string `json:"promptPosition,omitempty" jsonschema:"enum=before-flags,enum=after-flags,default=before-flags"`
	// FlagStyle is gnu-long (--name value) or single-dash (-name value). Default gnu-long.
	FlagStyle string `json:"flagStyle,omitempty" jsonschema:"enum=gnu-long,enum=single-dash,default=gnu-long"`
	// Options are the harness's own options by name. A value is a string, a number
	// (held as json.Number, so it is passed as written), a boolean, or a list of
	// strings and numbers.
	Options map[string]any `json:"options,omitempty"`
	// OptionFlags maps an option's name to its flag. It also names options that only the
	// command line gives.
	OptionFlags map[string]string `json:"optionFlags,omitempty"`
	// Auth is none, account, api-key or broker, as the provider defines them.
	Auth string `json:"auth,omitempty" jsonschema:"enum=none,enum=account,enum=api-key,enum=broker,default=none"`
	// Env is set for the harness, after everything else.
	Env map[string]string `json:"env,omitempty"`

	// Provided is the provider that Provider names; set by Parse, nil without one. What
	// the file does not say is filled in from it.
	Provided *Provider `json:"-"`
	// AuthEnv are the caller's variables that Auth stands for; set by Parse.
	AuthEnv []string `json:"-"`
}

// Fallback is one further image and harness.
type Fallback struct {
	// Image is the image of this fallback. Default: the file's.
	Image string `json:"image,omitempty" jsonschema:"minLength=1"`
	// Harness is the program of this fallback.
	Harness Command `json:"harness"`
	// Home is the private home of this fallback. Default: the file's.
	Home *Home `json:"home,omitempty"`
}

// Workspace is the folder the agent works on.
type Workspace struct {
	// Source is a host folder; relative to the file's own folder. Needed unless the mode is none.
	Source string `json:"source,omitempty" jsonschema:"minLength=1"`
	// Target is its place in the container. Default /workspace.
	Target string `json:"target,omitempty" jsonschema:"minLength=1,default=/workspace"`
	// Mode is writable, read-only, copy or none. Default read-only.
	Mode string `json:"mode,omitempty" jsonschema:"enum=writable,enum=read-only,enum=copy,enum=none,default=read-only"`
	// Git is what becomes of the workspace's repository: private (the agent has one of
	// its own with the current branch, and its commits come back as
	// refs/agentshim/RUN), shared (it has the host's, and what it writes there can run
	// on the host) or none (it sees none). Default: private, or none with a warning
	// where the repository does not allow private.
	Git string `json:"git,omitempty" jsonschema:"enum=private,enum=shared,enum=none"`
	// Protect holds paths below the workspace that stay read-only.
	Protect []string `json:"protect,omitempty" jsonschema:"minLength=1"`
	// Hide holds paths below the workspace that the agent doesn't see.
	Hide []string `json:"hide,omitempty" jsonschema:"minLength=1"`
}

// Mount is one host folder or file seen by the agent.
type Mount struct {
	// Source is the host path; relative to the file's own folder.
	Source string `json:"source" jsonschema:"minLength=1"`
	// Target is its place in the container: absolute, ~/… in the agent's home, or
	// relative to the workspace.
	Target string `json:"target" jsonschema:"minLength=1"`
	// Writable lets the agent change the source. Default: read-only.
	Writable bool `json:"writable,omitempty"`
	// NoExec forbids running programs from it.
	NoExec bool `json:"noexec,omitempty"`
	// Label is none, z or Z. With z the engine gives the source, for good, an SELinux
	// label that every container may use; with Z one for this run alone. Default none.
	Label string `json:"label,omitempty" jsonschema:"enum=none,enum=z,enum=Z,default=none"`
}

// Cache is one named volume.
type Cache struct {
	// Name names the cache.
	Name string `json:"name" jsonschema:"minLength=1"`
	// Key tells caches of one name apart.
	Key string `json:"key,omitempty" jsonschema:"minLength=1"`
	// Target is its place in the container.
	Target string `json:"target" jsonschema:"minLength=1"`
}

// Home is the agent's private home.
type Home struct {
	// SizeMB caps it, in MiB. Default 512.
	SizeMB int `json:"sizeMb,omitempty" jsonschema:"minimum=1,maximum=1048576,default=512"`
	// NoExec forbids running programs from it.
	NoExec bool `json:"noexec,omitempty"`
	// Files are copied in at launch, mode 0600.
	Files []HomeFile `json:"files,omitempty" jsonschema:"maxItems=256"`
}

// HomeFile is one host file copied into the home.
type HomeFile struct {
	// Source is a host file; relative to the file's own folder.
	Source string `json:"source" jsonschema:"minLength=1"`
	// Target is relative to the home.
	Target string `json:"target" jsonschema:"minLength=1"`
	// WriteBack copies it back at the end.
	WriteBack bool `json:"writeBack,omitempty"`

	// Auth is the form of harness.auth that a file is added by; set by Parse, with what
	// follows. Members are the members of the JSON object in the source that are
	// taken; none are all, and then any file does.
	Auth    string   `json:"-"`
	Members []string `json:"-"`
}

// Egress is the network policy.
type Egress struct {
	// Mode is deny-all, allow-list, open or network. Default deny-all.
	Mode string `json:"mode,omitempty" jsonschema:"enum=deny-all,enum=allow-list,enum=open,enum=network,default=deny-all"`
	// Allow lists what may be reached.
	Allow []Allow `json:"allow,omitempty"`
	// Deny lists names that stay closed whatever else allows them.
	Deny []string `json:"deny,omitempty" jsonschema:"minLength=1"`
	// Presets names lists of the catalogue.
	Presets []string `json:"presets,omitempty" jsonschema:"minLength=1"`
	// HostServices opens ports of the host's loopback under a name.
	HostServices []HostService `json:"hostServices,omitempty"`
	// Publish makes ports inside reachable on the host: PORT, HOSTPORT:PORT or ADDRESS:HOSTPORT:PORT,
	// an IPv6 address in brackets. The address is 127.0.0.1 where none is given; host port 0 is chosen by the kernel.
	Publish []string `json:"publish,omitempty" jsonschema:"minLength=1,maxItems=64"`
	// Brokers add credentials outside the container.
	Brokers []Broker `json:"brokers,omitempty"`
	// Network is the engine network that mode network attaches.
	Network string `json:"network,omitempty" jsonschema:"minLength=1"`
	// Renderer is auto, nftables or iptables. Default auto.
	Renderer string `json:"renderer,omitempty" jsonschema:"enum=auto,enum=nftables,enum=iptables,default=auto"`
	// Proxy is http://[USER:PASSWORD@]HOST[:PORT] of a proxy that connections to the outside go through, or
	// https, socks5 or socks5h instead of http, or env for the caller's variables.
	Proxy string `json:"proxy,omitempty" jsonschema:"minLength=1"`
}

// Allow is one allowed target: an object, or the string HOST[:PORT] or
// CIDR[:PORT][/udp]. The string stands in Host as written, with its port; taking it
// apart is the network policy's work.
type Allow struct {
	// Host is a name, *.name, an address or a CIDR range; the last two with /udp behind
	// in mode network.
	Host string `json:"host" jsonschema:"minLength=1"`
	// Port is the allowed port; never 53, which agentshim answers. Default 443; of a CIDR range all.
	Port int `json:"port,omitempty" jsonschema:"minimum=1,maximum=65535"`
	// Raw lets something other than TLS pass on the port.
	Raw bool `json:"raw,omitempty"`
	// ECH lets encrypted hellos pass.
	ECH bool `json:"ech,omitempty"`
}

// HostService is one port on the host's loopback.
type HostService struct {
	// Name makes it reachable as name.host.internal.
	Name string `json:"name" jsonschema:"minLength=1"`
	// Port is the port on the host's loopback.
	Port int `json:"port" jsonschema:"minimum=1,maximum=65535"`
}

// Broker adds a credential outside the container.
type Broker struct {
	// Name is the broker's name inside the container.
	Name string `json:"name" jsonschema:"minLength=1"`
	// Upstream is the one URL it forwards to.
	Upstream string `json:"upstream" jsonschema:"minLength=1"`
	// Header is the header that carries the credential.
	Header string `json:"header" jsonschema:"minLength=1"`
	// ValueFrom says where the credential comes from.
	ValueFrom ValueFrom `json:"valueFrom"`
}

// ValueFrom says where a secret comes from.
type ValueFrom struct {
	// Env names a variable of the caller.
	Env string `json:"env,omitempty" jsonschema:"minLength=1"`
	// File is a host file.
	File string `json:"file,omitempty" jsonschema:"minLength=1"`
}

// Seccomp adjusts the system call policy.
type Seccomp struct {
	// Profile is default, nested (the widening nested-seccomp) or a file in Docker's format, whose
	// name has a slash or a dot (the widening custom-seccomp). Default default.
	Profile string `json:"profile,omitempty" jsonschema:"minLength=1,default=default"`
	// Allow names system calls to allow besides the profile's; each is the widening syscall:NAME.
	Allow []string `json:"allow,omitempty" jsonschema:"minLength=1,maxItems=512,uniqueItems=true"`
	// Deny names system calls to refuse besides the profile's.
	Deny []string `json:"deny,omitempty" jsonschema:"minLength=1,maxItems=512,uniqueItems=true"`
}

// Resources limits the container. Zero means the default.
type Resources struct {
	// CPUs is the number of CPUs, fractions allowed. Default: all the caller may use.
	CPUs float64 `json:"cpus,omitempty" jsonschema:"minimum=0.01,maximum=4096"`
	// MemoryMB is memory and swap together, in MiB. Default: half of the machine's, at most 8192.
	MemoryMB int `json:"memoryMb,omitempty" jsonschema:"minimum=64,maximum=16777216"`
	// PIDs bounds processes and threads. Default 512.
	PIDs int `json:"pids,omitempty" jsonschema:"minimum=16,maximum=4194304,default=512"`
	// NoFile bounds open files per process. Default 8192, clamped to the hard limit.
	NoFile int `json:"nofile,omitempty" jsonschema:"minimum=64,maximum=1048576,default=8192"`
	// ShmMB caps /dev/shm, in MiB. Default 64.
	ShmMB int `json:"shmMb,omitempty" jsonschema:"minimum=1,maximum=1048576,default=64"`
}

// Session rules a container shared by several steps.
type Session struct {
	// Idle ends the session when no step has run for so long; its own program is none.
	// Default: never.
	Idle string `json:"idle,omitempty" jsonschema:"minLength=1"`
	// Maximum ends the session so long after its container is proven, ready or not.
	// Default: never.
	Maximum string `json:"maximum,omitempty" jsonschema:"minLength=1"`
	// Ready says when the session is ready. One that is not after ten minutes ends. Default: at
	// once, or when its own program runs.
	Ready *Ready `json:"ready,omitempty"`
}

// Ready says when a session is ready.
type Ready struct {
	// Port is ready when something listens on it inside, on 127.0.0.1 or ::1.
	Port int `json:"port,omitempty" jsonschema:"minimum=1,maximum=65535"`
	// Command is ready when it exits with 0. Until then it runs again and again, for 30
	// seconds at most each time.
	Command []string `json:"command,omitempty" jsonschema:"minLength=1"`
}
