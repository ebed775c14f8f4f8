package shim

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/spec"
)

// ProbeOptions say where to look. Only DockerConfig is required, and only for Docker.
type ProbeOptions struct {
	// Engine is auto (or empty), docker or podman: the flag or the file's value.
	// Where it is auto, AGENTSHIM_ENGINE and then DAGU_CONTAINER_RUNTIME decide.
	Engine string
	// DockerConfig is an absolute folder without a config.json. Docker's client gets it
	// as its configuration, so that nothing of the caller's (proxies, plugins, headers)
	// gets into a container. Pulls use the caller's own configuration.
	DockerConfig string
	// CacheDir keeps what the engine's clients answered, 0700 and the caller's own;
	// empty or not usable means that they are asked each time.
	CacheDir string
	// Getenv reads the caller's environment, nil is os.Getenv.
	Getenv func(string) string
	// Runner starts the clients, nil is Exec.
	Runner Runner

	// root is put before each host path, uid replaces the caller's, environ os.Environ,
	// of which only names are used; for tests.
	root    string
	uid     *int
	environ func() []string
}

// Adapter talks to the one engine that a probe settled on. It keeps no container
// state and is safe for concurrent use.
type Adapter interface {
	// Engine is what the probe found.
	Engine() spec.Engine
	// Command is the client with its global flags, args, and the fixed environment:
	// nothing of the caller's environment is in it but the folders that Podman needs.
	// Args are not checked; image names must have passed EnsureImage.
	Command(args ...string) Command
	// Runner is what starts the client.
	Runner() Runner
	// InspectImage reads a local image's facts; it never pulls. A missing image is
	// ReasonImageMissing.
	InspectImage(ctx context.Context, ref string) (spec.Image, error)
	// HardLimits are the nofile and nproc limits that bound a container's.
	HardLimits() (nofile, nproc uint64)

	// lacks are the limits that don't take effect: memory, cpu, pids.
	lacks() []string
	// request is what start asks of the engine, as indented JSON.
	request(plan spec.Plan, paths spec.RunPaths) ([]byte, error)
	// start starts the run's container. It ends with ctx only before that. Docker's calls
	// made when the container has its ID, before it starts.
	start(ctx context.Context, plan spec.Plan, paths spec.RunPaths, made func()) (attached, error)
	// awaitEnd waits until the container's streams ended for good, or ctx did, and reports
	// whether somebody had it started once more instead. An error says that the engine does
	// not tell.
	awaitEnd(ctx context.Context, l life) (restarted bool, err error)
	// network is what the engine says of one of its networks; the empty name is the one that
	// it gives a container by default. Names have passed checkNetworkName.
	network(ctx context.Context, name string, ipv6 bool) (netpolicy.Network, error)
	// siblings are the running containers of a network: their addresses there, by every
	// name they have.
	siblings(ctx context.Context, network string) (map[string][]netip.Addr, error)
	// makeVolume makes a cache's volume, or fails where there is one of that name.
	makeVolume(ctx context.Context, plan spec.Plan, c mounts.Cache, made string) error
	// giveVolume runs the container that gives a cache's volume to the agent, to its end.
	giveVolume(ctx context.Context, plan spec.Plan, paths spec.RunPaths, c mounts.Cache) error
	// foreign is what the engine says of one of its containers, by its id or name.
	foreign(ctx context.Context, name string) (foreign, error)
	// enter starts init in a running container that is not agentshim's, and changes nothing of
	// its file system. release is for when init has said hello, or won't: it ends what the
	// start needed.
	enter(ctx context.Context, e entry) (a attached, release func() error, err error)
	// pull has the engine fetch ref; progress may be nil.
	pull(ctx context.Context, ref, platform string, progress io.Writer) error
}

func (o ProbeOptions) withDefaults() ProbeOptions {
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	if o.Runner == nil {
		o.Runner = Exec{}
	}
	if o.environ == nil {
		o.environ = os.Environ
	}
	return o
}

// path gives the place of an absolute host path.
func (o ProbeOptions) path(p string) string { return filepath.Join(o.root, p) }

func (o ProbeOptions) callerUID() int {
	if o.uid != nil {
		return *o.uid
	}
	return os.Getuid()
}

// home is the caller's home folder, empty where neither HOME nor the user database knows one.
func (o ProbeOptions) home() string {
	if home := o.Getenv("HOME"); filepath.IsAbs(home) {
		return home
	}
	if u, err := user.LookupId(strconv.Itoa(o.callerUID())); err == nil && filepath.IsAbs(u.HomeDir) {
		return u.HomeDir
	}
	return ""
}

// configHome is the user's configuration folder (XDG base directories), or empty.
func (o ProbeOptions) configHome() string {
	if dir := o.Getenv("XDG_CONFIG_HOME"); filepath.IsAbs(dir) {
		return dir
	}
	if home := o.home(); home != "" {
		return filepath.Join(home, ".config")
	}
	return ""
}

// Probe fills everything of a Host but its Mounts: the engine, the image after the
// pull decision, the caller and the machine. It changes nothing on the host but the
// engine's image store (a pull) and opts.CacheDir.
func Probe(ctx context.Context, opts ProbeOptions, image ImageRequest) (spec.Host, Adapter, error) {
	opts = opts.withDefaults()
	if err := checkRef(image.Ref); err != nil {
		return spec.Host{}, nil, err
	}
	machine, err := ProbeMachine()
	if err != nil {
		return spec.Host{}, nil, err
	}
	caller, err := probeCaller(opts)
	if err != nil {
		return spec.Host{}, nil, err
	}
	adapter, err := ProbeEngine(ctx, opts)
	if err != nil {
		return spec.Host{}, nil, err
	}
	caller.HardNoFile, caller.HardNProc = adapter.HardLimits()
	facts, err := EnsureImage(ctx, adapter, machine, image)
	if err != nil {
		return spec.Host{}, nil, err
	}
	return spec.Host{Engine: adapter.Engine(), Image: facts, Caller: caller, Machine: machine}, adapter, nil
}

// autoEngine is the harness file's word for "the one that answers".
const autoEngine = "auto"

// wantedEngine is the engine asked for.
func wantedEngine(o ProbeOptions) (string, error) {
	kind, source := o.Engine, "engine"
	for _, name := range []string{"AGENTSHIM_ENGINE", "DAGU_CONTAINER_RUNTIME"} {
		if kind != "" && kind != autoEngine {
			break
		}
		if v := o.Getenv(name); v != "" {
			kind, source = v, name
		}
	}
	switch kind {
	case "":
		kind = autoEngine
	case autoEngine, spec.Docker, spec.Podman:
	default:
		return "", &Error{
			Reason: ReasonSpecInvalid,
			Msg:    fmt.Sprintf("%s %q", source, kind),
			Hint:   "use auto, docker or podman",
		}
	}
	return kind, nil
}

// ProbeEngine finds the engine to use and reads its facts. With auto that is Docker
// when its daemon answers, else Podman; where neither does, the error names both
// causes. A remote endpoint and a broken Docker context are refused under auto too:
// they say which engine the user means. Nothing but the local engine is contacted.
func ProbeEngine(ctx context.Context, opts ProbeOptions) (Adapter, error) {
	opts = opts.withDefaults()
	kind, err := wantedEngine(opts)
	if err != nil {
		return nil, err
	}
	switch kind {
	case spec.Docker:
		return probeDocker(ctx, opts)
	case spec.Podman:
		return probePodman(ctx, opts, "")
	}
	docker, dockerErr := probeDocker(ctx, opts)
	if dockerErr == nil {
		return docker, nil
	}
	switch ReasonOf(dockerErr) {
	case ReasonEngineMissing, ReasonEngineDown, ReasonEngineDenied, ReasonEngineMismatch:
	default:
		return nil, dockerErr
	}
	podman, podmanErr := probePodman(ctx, opts, "")
	if podmanErr == nil {
		return podman, nil
	}
	if ctx.Err() != nil {
		return nil, podmanErr
	}
	return nil, neither(dockerErr, podmanErr)
}

// neither joins the causes. Its reason is Docker's, or Podman's where Docker isn't installed at all.
func neither(docker, podman error) error {
	reason := ReasonOf(docker)
	if reason == ReasonEngineMissing {
		reason = ReasonOf(podman)
	}
	var hints []string
	for _, hint := range []string{HintOf(docker), HintOf(podman)} {
		if hint != "" && !slices.Contains(hints, hint) {
			hints = append(hints, hint)
		}
	}
	return &Error{
		Reason: reason,
		Msg:    "no engine can be used",
		Hint:   strings.Join(hints, "; or "),
		Err:    bothCauses{docker, podman},
	}
}

// bothCauses is Docker's error and Podman's, on one line.
type bothCauses [2]error

func (b bothCauses) Error() string   { return fmt.Sprintf("docker: %v; podman: %v", b[0], b[1]) }
func (b bothCauses) Unwrap() []error { return b[:] }

// lookPath finds a program in the caller's PATH. Relative entries are skipped: what
// they name depends on the folder agentshim is started in.
func lookPath(o ProbeOptions, name string) (string, bool) {
	return findProgram(o, filepath.SplitList(o.Getenv("PATH")), name)
}

func findProgram(o ProbeOptions, dirs []string, name string) (string, bool) {
	for _, dir := range dirs {
		if !filepath.IsAbs(dir) {
			continue
		}
		p := filepath.Join(dir, name)
		if st, err := os.Stat(o.path(p)); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return p, true
		}
	}
	return "", false
}

// systemPath is the PATH of every engine client.
const systemPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// passed gives NAME=value for those of names that the caller has set.
func passed(o ProbeOptions, names ...string) []string {
	var env []string
	for _, name := range names {
		if v := o.Getenv(name); v != "" {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// proxyAndCA are the variables that a pull needs to reach a registry.
var proxyAndCA = []string{
	"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
	"http_proxy", "https_proxy", "no_proxy", "all_proxy",
	"SSL_CERT_FILE", "SSL_CERT_DIR",
}

// atLeast compares the first two numbers of a version such as 20.10.24+dfsg1. A text
// that does not start with two numbers is never enough.
func atLeast(version string, major, minor int) bool {
	var have [2]int
	parts := strings.SplitN(version, ".", 3)
	if len(parts) < 2 {
		return false
	}
	for i := range have {
		digits := strings.IndexFunc(parts[i], func(r rune) bool { return r < '0' || r > '9' })
		if digits < 0 {
			digits = len(parts[i])
		}
		n, err := strconv.Atoi(parts[i][:digits])
		if err != nil {
			return false
		}
		have[i] = n
	}
	return have[0] > major || have[0] == major && have[1] >= minor
}
