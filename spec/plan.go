package spec

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path"
	"slices"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/seccomp"
)

// PlanVersion is the plan's schema version.
const PlanVersion = 1

// Fixed names inside every container.
const (
	// Home is the agent's home, InitPath where init is mounted.
	Home     = "/home/agent"
	InitPath = "/.agentshim-init"
	// InitArg is init's one argument: the wire protocol's version.
	InitArg = "wire/1"
	// Hostname is the container's host name.
	Hostname = "agentshim"
	// PromptPath holds the prompt with promptMode file.
	PromptPath = Home + "/.agentshim-prompt"
	// DefaultPath is the PATH an image without one gets, and init's own.
	DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// OutputVariable names the file for a step's output: on the host the orchestrator's, in the
// container the one whose content is appended to it.
const OutputVariable = "DAGU_OUTPUT_FILE"

// Labels every container carries. A label alone proves nothing: images pass
// theirs on.
const (
	LabelRun  = "agentshim.run"
	LabelName = "agentshim.name"
)

// Plan is everything exec does, decided. Equal inputs give byte-equal plans. It
// holds no secret: values of env, envFrom, envFiles and the prompt are put in by
// the shim at launch, and stand here as <env>, <envFrom>, <envFile> and <prompt>.
type Plan struct {
	Version  int      `json:"version"`
	Name     string   `json:"name,omitempty"`
	Engine   Engine   `json:"engine"`
	Image    Image    `json:"image"`
	Identity Identity `json:"identity"`
	Process  Process  `json:"process"`
	// Mounts are tmpfs, workspace, mounts, caches and image volumes in mount order.
	Mounts []mounts.Mount `json:"mounts"`
	// Copy is the workspace's private copy, nil where there is none.
	Copy *Copy `json:"copy,omitempty"`
	// Caches are the volumes among them: what makes each another one.
	Caches []mounts.Cache `json:"caches,omitempty"`
	// Devices are the host's devices beside the default ones, sorted by name.
	Devices []HostDevice `json:"devices,omitempty"`
	// Guards are the workspace's paths that are read-only or hidden where they exist. What
	// appears there in a host's folder during the run is in the record.
	Guards []mounts.GuardPath `json:"guards,omitempty"`
	// Git is what becomes of the workspace's .git, nil where it has none.
	Git *Git `json:"git,omitempty"`
	// Etc are the generated files below /etc, mounted read-only.
	Etc []EtcFile `json:"etc"`
	// HomeFiles are the targets copied into the home, relative to it.
	HomeFiles []HomeFile `json:"homeFiles,omitempty"`
	// Seeds are files that the provider has in the home; a file of HomeFiles goes before one.
	Seeds []SeedFile `json:"seeds,omitempty"`
	// CACertificates are the host's files whose certificates programs trust besides the image's.
	CACertificates []string `json:"caCertificates,omitempty"`
	// Capabilities are the capabilities of every set; normally none.
	Capabilities   []string `json:"capabilities"`
	ReadOnlyRootfs bool     `json:"readOnlyRootfs"`
	Limits         Limits   `json:"limits"`
	// Namespaces are private to the container.
	Namespaces    []string          `json:"namespaces"`
	MaskedPaths   []string          `json:"maskedPaths"`
	ReadonlyPaths []string          `json:"readonlyPaths"`
	Sysctls       map[string]string `json:"sysctls"`
	Labels        map[string]string `json:"labels,omitempty"`
	Egress        netpolicy.Policy  `json:"egress"`
	// EgressWay is how the packet rules get into the sandbox, empty where there are none.
	EgressWay string `json:"egressWay,omitempty"`
	// EgressRenderer is what puts them in: nftables, iptables, or auto, which is iptables
	// where the kernel has no nf_tables.
	EgressRenderer string `json:"egressRenderer,omitempty"`
	// EgressRules are the packet rules of the sandbox's network namespace, as lines of
	// iptables-save; none where the mode has no way out.
	EgressRules []string `json:"egressRules,omitempty"`
	// Publish are the ports of the sandbox that are reached on the host.
	Publish []Published `json:"publish,omitempty"`
	// SeccompDigest identifies the system call policy.
	SeccompDigest string `json:"seccompDigest"`
	// SeccompChanges says in words how it differs from the default policy, empty where it does not.
	SeccompChanges string `json:"seccompChanges,omitempty"`
	// Widenings are what the file opened; Gaps what this host can't enforce.
	Widenings []Note `json:"widenings,omitempty"`
	Gaps      []Note `json:"gaps,omitempty"`
	// Warnings change nothing.
	Warnings []string `json:"warnings,omitempty"`

	// Seccomp is the policy itself; rendered by OCI and SeccompProfile.
	Seccomp *seccomp.Policy `json:"-"`
}

// procUnmasked says that nothing of /proc is masked or read-only.
func (p Plan) procUnmasked() bool { return len(p.ReadonlyPaths) == 0 }

// Identity is who the agent is.
type Identity struct {
	UID    uint32   `json:"uid"`
	GID    uint32   `json:"gid"`
	Groups []uint32 `json:"groups,omitempty"`
	Name   string   `json:"name"`
	// Userns is the engine's --userns value, empty for none.
	Userns string `json:"userns,omitempty"`
	// From says what decided it: user, caller, workspace, container.
	From string `json:"from"`
}

// Process is the harness as it starts.
type Process struct {
	Args []string `json:"args"`
	Env  []EnvVar `json:"env"`
	Cwd  string   `json:"cwd"`
	// Provider is the provider's name, Auth the form of its credentials; empty without one.
	Provider string `json:"provider,omitempty"`
	Auth     string `json:"auth,omitempty"`
	// PromptMode is arg, flag, stdin or file, command when the caller gave the argv, or
	// interactive when a person at a terminal gets the provider's own form.
	PromptMode string `json:"promptMode"`
	// RuntimeDir is XDG_RUNTIME_DIR.
	RuntimeDir string `json:"runtimeDir"`
	// Terminal says that the three streams are a terminal.
	Terminal bool `json:"terminal,omitempty"`
}

// EnvVar is one variable of the harness.
type EnvVar struct {
	Name string `json:"name"`
	// From is default, image, agentshim, terminal, provider, auth, envFile, envFrom, env or harness.
	From string `json:"from"`
	// Value is set for default, image, agentshim, terminal and provider only.
	Value string `json:"value,omitempty"`
}

// Secret reports whether the value is the caller's and left out of the plan.
func (v EnvVar) Secret() bool {
	return !slices.Contains([]string{fromDefault, fromImage, fromShim, fromTerminal, fromProvider}, v.From)
}

// EtcFile is one generated file.
type EtcFile struct {
	// Name is the file's name below /etc.
	Name    string `json:"name"`
	Content string `json:"content"`
}

// HomeFile is one file copied into the home.
type HomeFile struct {
	Source string `json:"source"`
	Target string `json:"target"`
	// WriteBack replaces the source with what the agent left, when it ends.
	WriteBack bool `json:"writeBack,omitempty"`
	// Auth is the form of credentials that it is part of, empty for a file of home.files.
	Auth string `json:"auth,omitempty"`
	// Members are the members of its JSON object that are taken; none are all.
	Members []string `json:"members,omitempty"`
}

// SeedFile is one file of the provider's in the home. It holds no secret.
type SeedFile struct {
	Target  string `json:"target"`
	Content string `json:"content"`
}

// Limits are the container's bounds. Memory counts swap; 0 means that the limit
// can't be enforced here (gap rootless-cgroup-limits).
type Limits struct {
	MemoryBytes int64   `json:"memoryBytes"`
	CPUs        float64 `json:"cpus"`
	PIDs        int64   `json:"pids"`
	NoFile      uint64  `json:"nofile"`
	NProc       uint64  `json:"nproc"`
	Core        uint64  `json:"core"`
	ShmBytes    int64   `json:"shmBytes"`
}

// Note is one widening or gap.
type Note struct {
	Name   string `json:"name"`
	Detail string `json:"detail"`
	// NeedsAccept says that the run is refused unless the file accepts Name.
	NeedsAccept bool `json:"needsAccept"`
	Accepted    bool `json:"accepted"`
}

// RunPaths are the names of one run, the only part of the engine's argv and the
// OCI config that differs between equal runs.
type RunPaths struct {
	// ID is the run's id; Dir its folder on the host, which ends with it; State its
	// folder beside its record; Init the host path of agentshim-init.
	ID, Dir, State, Init string
}

// Source is the host path of one of the plan's binds.
func (r RunPaths) Source(m mounts.Mount) string {
	switch {
	case m.Own == "":
		return m.Source
	case m.Kept:
		return path.Join(r.State, m.Own)
	}
	return path.Join(r.Dir, m.Own)
}

// SymbolicPaths stands for a run's names where a plan is only shown.
var SymbolicPaths = RunPaths{ID: "RUN_ID", Dir: "/RUN_DIR", State: "/RUN_STATE", Init: "/AGENTSHIM_INIT"}

// JSON renders the plan, indented, with a trailing newline.
func (p Plan) JSON() ([]byte, error) {
	return indent(p)
}

// Digest is the SHA-256 of the plan's JSON.
func (p Plan) Digest() (string, error) {
	b, err := p.JSON()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}

func indent(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("plan: %w", err)
	}
	return b.Bytes(), nil
}

// Refusal is a decision against the run. Reason is one of the documented
// reasons (shim.Reason), Hint the remedy.
type Refusal struct {
	Reason, Message, Hint string
}

func (r *Refusal) Error() string { return r.Message }

func refuse(reason, hint, format string, args ...any) *Refusal {
	return &Refusal{Reason: reason, Message: fmt.Sprintf(format, args...), Hint: hint}
}
