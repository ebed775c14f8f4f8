package shim

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/spec"
)

const (
	hintDockerInstall = "install Docker, or use `--engine podman`"
	hintDockerStart   = "`systemctl start docker` (without systemd: start dockerd)"
	hintDockerGroup   = "`usermod -aG docker USER` and log in again; note that this group is as mighty as root"
	hintDockerContext = "`docker context ls` lists the contexts, `docker context use default` goes back"
	hintDockerLocal   = "agentshim needs the engine of this machine: unset DOCKER_HOST and DOCKER_CONTEXT, or point them to a unix:// socket of a local daemon"
	hintDockerUpgrade = "install Docker 20.10 or newer"
)

// defaultDockerSocket is where Docker's client looks without any configuration.
const defaultDockerSocket = "/var/run/docker.sock"

// docker is the Adapter of a local Docker daemon.
type docker struct {
	engine        spec.Engine
	api           *dockerAPI
	version       string // the API's
	config        string
	runner        Runner
	pullEnv       []string
	nofile, nproc uint64
	lacking       []string
}

func (d *docker) Engine() spec.Engine                { return d.engine }
func (d *docker) Runner() Runner                     { return d.runner }
func (d *docker) HardLimits() (nofile, nproc uint64) { return d.nofile, d.nproc }
func (d *docker) lacks() []string                    { return d.lacking }

// Command has an empty environment: what Docker's client would take from it, the
// endpoint and the configuration, is on the command line. With `--env NAME` the
// client finds no NAME to pass on.
func (d *docker) Command(args ...string) Command {
	return Command{
		Path: d.engine.Client,
		Args: append([]string{"--host", "unix://" + d.engine.Socket, "--config", d.config}, args...),
	}
}

func (d *docker) pull(ctx context.Context, ref, platform string, progress io.Writer) error {
	args := []string{"--host", "unix://" + d.engine.Socket, "pull"}
	if platform != "" {
		args = append(args, "--platform", platform)
	}
	_, err := d.runner.Run(ctx, Command{
		Path: d.engine.Client, Args: append(args, "--", ref),
		Env: d.pullEnv, Progress: progress,
	})
	return err
}

// probeDocker finds the client, resolves the endpoint without contacting anything,
// and asks the daemon. A client that is Podman by another name is probed as Podman.
func probeDocker(ctx context.Context, o ProbeOptions) (Adapter, error) {
	client, ok := lookPath(o, "docker")
	if !ok {
		return nil, &Error{Reason: ReasonEngineMissing, Msg: "no docker client in PATH", Hint: hintDockerInstall}
	}
	socket, err := dockerEndpoint(o)
	if err != nil {
		return nil, err
	}
	answers := make(chan dockerAnswer, 1)
	probeCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { answers <- askDocker(probeCtx, o, socket) }()
	kind, err := clientKind(ctx, o, client)
	if err != nil {
		return nil, err
	}
	if kind == spec.Podman {
		return probePodman(ctx, o, client)
	}
	answer := <-answers
	if answer.err != nil {
		return nil, answer.err
	}
	if err := checkDockerConfig(o); err != nil {
		return nil, err
	}
	return newDocker(o, client, answer)
}

// checkDockerConfig keeps the client from reading a configuration that isn't ours.
func checkDockerConfig(o ProbeOptions) error {
	if !filepath.IsAbs(o.DockerConfig) {
		return &Error{Reason: ReasonInternal, Msg: fmt.Sprintf("folder %q for docker's configuration is not absolute", o.DockerConfig)}
	}
	if st, err := os.Stat(o.DockerConfig); err != nil || !st.IsDir() {
		return &Error{Reason: ReasonState, Msg: fmt.Sprintf("folder %q for docker's configuration", o.DockerConfig), Err: err}
	}
	if _, err := os.Lstat(filepath.Join(o.DockerConfig, "config.json")); !errors.Is(err, fs.ErrNotExist) {
		return &Error{
			Reason: ReasonState, Msg: fmt.Sprintf("folder %q holds a config.json", o.DockerConfig),
			Hint: "remove that file: agentshim runs docker without any configuration",
		}
	}
	return nil
}

// dockerEndpoint is the socket that Docker's client would use. It reads files only.
func dockerEndpoint(o ProbeOptions) (string, error) {
	if host := o.Getenv("DOCKER_HOST"); host != "" {
		return socketPath(host, "DOCKER_HOST")
	}
	dir := o.Getenv("DOCKER_CONFIG")
	if dir == "" {
		if home := o.home(); home != "" {
			dir = filepath.Join(home, ".docker")
		}
	}
	name, source, err := contextName(o, dir)
	if err != nil {
		return "", err
	}
	if name == "" || name == "default" {
		return defaultDockerSocket, nil
	}
	host, err := contextHost(o, dir, name)
	if err != nil {
		return "", &Error{
			Reason: ReasonEngineContext, Msg: fmt.Sprintf("docker context %q from %s", name, source),
			Hint: hintDockerContext, Err: err,
		}
	}
	return socketPath(host, fmt.Sprintf("docker context %q", name))
}

const maxConfigFile = 1 << 20

// contextName is the context in force and where it is set.
func contextName(o ProbeOptions, dir string) (name, source string, err error) {
	if name := o.Getenv("DOCKER_CONTEXT"); name != "" {
		return name, "DOCKER_CONTEXT", nil
	}
	if dir == "" {
		return "", "", nil
	}
	file := filepath.Join(dir, "config.json")
	var config struct {
		CurrentContext string `json:"currentContext"`
	}
	err = readJSON(o.path(file), &config)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", "", &Error{
			Reason: ReasonEngineContext, Msg: fmt.Sprintf("docker's configuration %q", file), Err: err,
			Hint: "mend the file, or check that HOME and DOCKER_CONFIG are this user's",
		}
	}
	return config.CurrentContext, file, nil
}

// contextHost reads the endpoint of a stored context.
func contextHost(o ProbeOptions, dir, name string) (string, error) {
	if dir == "" {
		return "", errors.New("no folder of contexts: HOME and DOCKER_CONFIG are not set")
	}
	sum := sha256.Sum256([]byte(name))
	file := filepath.Join(dir, "contexts", "meta", hex.EncodeToString(sum[:]), "meta.json")
	var meta struct {
		Endpoints map[string]struct{ Host string }
	}
	if err := readJSON(o.path(file), &meta); errors.Is(err, fs.ErrNotExist) {
		return "", errors.New("no such context")
	} else if err != nil {
		return "", err
	}
	endpoint, ok := meta.Endpoints["docker"]
	if !ok {
		return "", errors.New("the context names no docker endpoint")
	}
	if endpoint.Host == "" {
		return "unix://" + defaultDockerSocket, nil
	}
	return endpoint.Host, nil
}

// readJSON reads one value from a small regular file.
func readJSON(path string, value any) error {
	// O_NONBLOCK: a FIFO in the place of the file must not hang the probe.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConfigFile+1))
	if err != nil {
		return err
	}
	if len(data) > maxConfigFile {
		return fmt.Errorf("larger than %d bytes", maxConfigFile)
	}
	return json.Unmarshal(data, value)
}

// socketPath takes the path out of a unix:// endpoint and refuses every other kind.
func socketPath(host, source string) (string, error) {
	path, ok := strings.CutPrefix(host, "unix://")
	if !ok {
		return "", &Error{
			Reason: ReasonEngineRemote,
			Msg:    fmt.Sprintf("%s points to %q, which is not a local socket", source, withoutSecrets(host)),
			Hint:   hintDockerLocal,
		}
	}
	if path == "" {
		return defaultDockerSocket, nil
	}
	if !filepath.IsAbs(path) {
		return "", &Error{
			Reason: ReasonEngineContext, Msg: fmt.Sprintf("%s: socket %q is not an absolute path", source, path),
			Hint: "write unix:///path/to/docker.sock",
		}
	}
	return filepath.Clean(path), nil
}

// withoutSecrets keeps the scheme and host of an endpoint: the rest may hold a password.
func withoutSecrets(host string) string {
	u, err := url.Parse(host)
	if err != nil || u.Host == "" {
		if scheme, _, ok := strings.Cut(host, "://"); ok {
			return scheme + "://…"
		}
		_, after, _ := strings.Cut("@"+host, "@")
		return after[strings.LastIndex(after, "@")+1:]
	}
	return u.Scheme + "://" + u.Host
}

// dockerAPI speaks HTTP over the daemon's socket: no proxy, no redirect, bounded
// bodies and times.
type dockerAPI struct {
	socket string
	client *http.Client
}

const (
	apiTimeout = 10 * time.Second
	// apiIdle is how long a connection waits for another call: a caller of Run keeps
	// none after it.
	apiIdle  = time.Second
	apiLimit = 4 << 20
)

// errNotFound is the API's 404.
var errNotFound = errors.New("not found")

func newDockerAPI(socket string) *dockerAPI {
	api := &dockerAPI{socket: socket}
	api.client = &http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DialContext:            api.dial,
			DisableCompression:     true,
			MaxIdleConns:           2,
			IdleConnTimeout:        apiIdle,
			MaxResponseHeaderBytes: 64 << 10,
		},
	}
	return api
}

func (a *dockerAPI) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", a.socket)
}

// peer connects once, sends nothing, and gives who listens.
func (a *dockerAPI) peer(ctx context.Context) (*unix.Ucred, error) {
	// connect(2) waits while the daemon's backlog is full.
	dialCtx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	conn, err := a.dial(dialCtx, "", "")
	if err != nil {
		return nil, a.transportError(ctx, err)
	}
	defer conn.Close()
	cred, err := netpolicy.PeerCred(conn.(*net.UnixConn))
	if err != nil {
		return nil, &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("who listens on %q", a.socket), Err: err}
	}
	return cred, nil
}

// get fills value from one GET. path starts with a slash and is escaped here.
func (a *dockerAPI) get(ctx context.Context, path string, value any) error {
	body, err := a.call(ctx, http.MethodGet, path, nil, nil)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, value); err != nil {
		return &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("GET %s on %q", path, a.socket), Err: err}
	}
	return nil
}

// post has the daemon do something; a nil value is no body.
func (a *dockerAPI) post(ctx context.Context, path string, query url.Values, value any) error {
	var body []byte
	if value != nil {
		var err error
		if body, err = json.Marshal(value); err != nil {
			return err
		}
	}
	_, err := a.call(ctx, http.MethodPost, path, query, body)
	return err
}

// call returns the body of an answer that is no error. Without a deadline of ctx's it
// has apiTimeout for it.
func (a *dockerAPI) call(ctx context.Context, method, path string, query url.Values, body []byte) ([]byte, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, apiTimeout)
		defer cancel()
	}
	req, err := a.request(ctx, method, path, query, body)
	if err != nil {
		return nil, err
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return nil, a.transportError(ctx, err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, apiLimit+1))
	if err != nil {
		return nil, a.transportError(ctx, err)
	}
	if len(answer) > apiLimit {
		return nil, &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("%s %s on %q: answer larger than %d bytes", method, path, a.socket, apiLimit)}
	}
	if resp.StatusCode/100 != 2 {
		return nil, a.statusError(method, path, resp.StatusCode, answer)
	}
	return answer, nil
}

func (a *dockerAPI) request(ctx context.Context, method, path string, query url.Values, body []byte) (*http.Request, error) {
	target := url.URL{Scheme: "http", Host: "docker", Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, target.String(), bytes.NewReader(body))
	if err == nil && len(body) > 0 {
		req.Header.Set("Content-Type", "application/json")
	}
	return req, err
}

func (a *dockerAPI) statusError(method, path string, status int, body []byte) error {
	var answer struct{ Message string }
	_ = json.Unmarshal(body, &answer) // a body that is no JSON has no message
	text := fmt.Sprintf("status %d: %s", status, printable(answer.Message))
	if status == http.StatusNotFound {
		return fmt.Errorf("%s: %w", text, errNotFound)
	}
	failure := EngineFailure(&EngineError{Argv: []string{method, path}, Stderr: answer.Message, Err: errors.New(text)})
	return &Error{Reason: failure.Reason, Hint: failure.Hint, Msg: fmt.Sprintf("%s %s on %q: %s", method, path, a.socket, text)}
}

// transportError tells the causes of no answer apart.
func (a *dockerAPI) transportError(ctx context.Context, err error) error {
	var urlErr *url.Error
	if errors.As(err, &urlErr) {
		err = urlErr.Err // without the URL of a host that isn't one
	}
	var timeout net.Error
	switch {
	case ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded):
		return &Error{Reason: ReasonInterrupted, Msg: fmt.Sprintf("docker on %q", a.socket), Err: context.Cause(ctx)}
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return &Error{Reason: ReasonEngineDenied, Msg: fmt.Sprintf("docker's socket %q may not be opened by this user", a.socket), Hint: hintDockerGroup, Err: syscall.EACCES}
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ENOTDIR):
		return &Error{Reason: ReasonEngineDown, Msg: fmt.Sprintf("docker's daemon does not run: no socket %q", a.socket), Hint: hintDockerStart, Err: syscall.ENOENT}
	case errors.Is(err, syscall.ECONNREFUSED):
		return &Error{Reason: ReasonEngineDown, Msg: fmt.Sprintf("docker's daemon does not run: nothing listens on %q", a.socket), Hint: hintDockerStart, Err: syscall.ECONNREFUSED}
	case errors.As(err, &timeout) && timeout.Timeout():
		return &Error{Reason: ReasonEngineDown, Msg: fmt.Sprintf("docker's daemon on %q gave no answer in time", a.socket), Hint: "restart the daemon: `systemctl restart docker`"}
	}
	return &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("docker on %q", a.socket), Err: err}
}

// dockerVersion is the part of GET /version that is used.
type dockerVersion struct {
	Version       string
	APIVersion    string `json:"ApiVersion"`
	KernelVersion string
	Components    []struct{ Name, Version string }
}

func (v dockerVersion) component(name string) (string, bool) {
	for _, c := range v.Components {
		if c.Name == name {
			return c.Version, true
		}
	}
	return "", false
}

// dockerInfo is the part of GET /info that is used.
type dockerInfo struct {
	ServerVersion, OperatingSystem, KernelVersion string
	DockerRootDir                                 string
	CgroupDriver, CgroupVersion                   string
	DefaultRuntime                                string
	SecurityOptions                               []string
	MemoryLimit, SwapLimit                        bool
	PidsLimit                                     bool
	CPUCfsQuota                                   bool `json:"CpuCfsQuota"`
}

func (i dockerInfo) option(name string) bool {
	for _, opt := range i.SecurityOptions {
		// "name=seccomp,profile=default"
		if first, _, _ := strings.Cut(opt, ","); first == "name="+name {
			return true
		}
	}
	return false
}

type dockerAnswer struct {
	api     *dockerAPI
	version dockerVersion
	info    dockerInfo
	peer    *unix.Ucred
	daemon  int // dockerd's pid where it is known, else 0
	err     error
}

// dockerFacts is what is cached of an answer.
type dockerFacts struct {
	Version dockerVersion `json:"version"`
	Info    dockerInfo    `json:"info"`
}

// askDocker connects, and takes the daemon's last answers where it is the same
// process with the same configuration: each of the two requests makes the daemon run
// its helpers' --version, which costs 10 to 30 ms.
func askDocker(ctx context.Context, o ProbeOptions, socket string) dockerAnswer {
	a := dockerAnswer{api: newDockerAPI(socket)}
	if a.peer, a.err = a.api.peer(ctx); a.err != nil {
		return a
	}
	a.daemon = daemonPID(o, int(a.peer.Pid))
	store, key := openCache(o.CacheDir), dockerKey(o, socket, a.daemon)
	var facts dockerFacts
	if key != "" && store.get("docker", key, &facts) {
		a.version, a.info = facts.Version, facts.Info
		return a
	}
	a.err = a.ask(ctx)
	if a.err == nil && key != "" {
		store.put("docker", key, dockerFacts{a.version, a.info})
	}
	return a
}

// ask reads both answers at once.
func (a *dockerAnswer) ask(ctx context.Context) error {
	var infoErr error
	done := make(chan struct{})
	go func() {
		defer close(done)
		infoErr = a.api.get(ctx, "/info", &a.info)
	}()
	err := a.api.get(ctx, "/version", &a.version)
	<-done
	if err == nil {
		if _, ok := a.version.component("Podman Engine"); ok {
			return &Error{
				Reason: ReasonEngineMismatch, Msg: fmt.Sprintf("Podman answers on docker's socket %q", a.api.socket),
				Hint: "use `--engine podman`",
			}
		}
		err = infoErr
	}
	if errors.Is(err, errNotFound) {
		return &Error{Reason: ReasonEngineMismatch, Msg: fmt.Sprintf("what answers on %q is not docker's daemon", a.api.socket), Hint: hintDockerLocal, Err: err}
	}
	return err
}

// dockerKey names one start of the daemon and the configuration that it may have
// reloaded since; empty where the daemon's process is not known.
func dockerKey(o ProbeOptions, socket string, daemon int) string {
	if daemon == 0 {
		return ""
	}
	start, ok := startTime(o, daemon)
	boot, err := os.ReadFile(o.path("/proc/sys/kernel/random/boot_id"))
	if !ok || err != nil {
		return ""
	}
	parts := []string{"docker 1", identity(o.path(socket)), strconv.Itoa(daemon), start, string(boot), identity(o.path("/etc/docker/daemon.json"))}
	if runc, ok := findProgram(o, filepath.SplitList(systemPath), "runc"); ok {
		parts = append(parts, identity(o.path(runc)))
	}
	return cacheKey(parts)
}

// startTime is field 22 of proc_pid_stat(5), which with the pid names one process of this boot.
func startTime(o ProbeOptions, pid int) (string, bool) {
	data, err := os.ReadFile(o.path(fmt.Sprintf("/proc/%d/stat", pid)))
	if err != nil {
		return "", false
	}
	// The second field, the name, may hold blanks and brackets.
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(fields) < 20 {
		return "", false
	}
	return fields[19], true
}

// newDocker judges the answers and turns them into facts.
func newDocker(o ProbeOptions, client string, a dockerAnswer) (*docker, error) {
	kernel, err := kernelRelease()
	if err != nil {
		return nil, err
	}
	if err := checkLocal(a, kernel); err != nil {
		return nil, err
	}
	if err := checkDockerFeatures(a); err != nil {
		return nil, err
	}
	cgroups, err := readCgroups(o)
	if err != nil {
		return nil, err
	}
	info := a.info
	runtimeVersion, _ := a.version.component(info.DefaultRuntime)
	d := &docker{
		api: a.api, version: a.version.APIVersion, config: o.DockerConfig, runner: o.Runner,
		pullEnv: dockerPullEnv(o), lacking: dockerLacks(info),
		engine: spec.Engine{
			Kind: spec.Docker, Client: client, Socket: a.api.socket, Version: a.version.Version,
			Rootless:      info.option("rootless"),
			UserNamespace: info.option("userns"),
			CgroupVersion: cgroups.version(info.CgroupVersion),
			CgroupHybrid:  cgroups.hybrid(),
			CgroupDriver:  info.CgroupDriver,
			LimitsHold:    len(dockerLacks(info)) == 0,
			Runtime:       info.DefaultRuntime, RuntimeVersion: runtimeVersion,
			AppArmor: info.option("apparmor"), SELinux: info.option("selinux"),
			Dirs:  dockerDirs(info),
			Notes: runtimeNotes(info.DefaultRuntime, runtimeVersion),
		},
	}
	d.nofile, d.nproc, err = daemonLimits(o, a.daemon)
	return d, err
}

// dockerLacks are the limits that the daemon can't set.
func dockerLacks(info dockerInfo) []string {
	var lacks []string
	for _, limit := range []struct {
		name  string
		holds bool
	}{{"memory", info.MemoryLimit && info.SwapLimit}, {"cpu", info.CPUCfsQuota}, {"pids", info.PidsLimit}} {
		if !limit.holds || info.CgroupDriver == "none" {
			lacks = append(lacks, limit.name)
		}
	}
	return lacks
}

func dockerDirs(info dockerInfo) []string {
	var dirs []string
	if filepath.IsAbs(info.DockerRootDir) {
		dirs = append(dirs, filepath.Clean(info.DockerRootDir))
	}
	return dirs
}

// checkLocal refuses a daemon that does not share this machine's kernel and pid
// namespace: the paths it mounts and the namespaces it makes would not be ours. A
// daemon in another mount namespace of the same kernel and pid namespace passes; the
// attestation compares device and inode of what it mounted.
func checkLocal(a dockerAnswer, kernel string) error {
	remote := func(why string) error {
		return &Error{Reason: ReasonEngineRemote, Msg: fmt.Sprintf("docker on %q %s", a.api.socket, why), Hint: hintDockerLocal}
	}
	switch {
	case a.peer.Pid == 0:
		return &Error{
			Reason: ReasonEngineRemote,
			Msg:    fmt.Sprintf("docker on %q runs outside the container that agentshim runs in: its paths are not the paths seen here", a.api.socket),
			Hint:   "run agentshim where the daemon runs, or start a daemon inside this container",
		}
	case strings.HasPrefix(a.info.OperatingSystem, "Docker Desktop"):
		return remote("is Docker Desktop, which runs in a virtual machine")
	case a.version.KernelVersion != kernel || a.info.KernelVersion != kernel:
		return remote(fmt.Sprintf("runs on kernel %q, this machine has %q", printable(a.version.KernelVersion), kernel))
	}
	return nil
}

func checkDockerFeatures(a dockerAnswer) error {
	switch {
	case !atLeast(a.version.Version, 20, 10), !atLeast(a.version.APIVersion, 1, 41):
		return &Error{
			Reason: ReasonEngineUnsupported, Hint: hintDockerUpgrade,
			Msg: fmt.Sprintf("docker %q with API %q is too old", printable(a.version.Version), printable(a.version.APIVersion)),
		}
	case !a.info.option("seccomp"):
		return &Error{
			Reason: ReasonEngineUnsupported, Msg: "docker's daemon does not support seccomp",
			Hint: "use a kernel with CONFIG_SECCOMP_FILTER and a daemon built with seccomp (`docker info`, Security Options)",
		}
	}
	return nil
}

// dockerPullEnv is what a registry login may need: the caller's configuration and
// what credential helpers use. It never reaches `docker run`.
func dockerPullEnv(o ProbeOptions) []string {
	path := systemPath
	if p := o.Getenv("PATH"); p != "" {
		path = p
	}
	env := []string{"LC_ALL=C", "PATH=" + path}
	if home := o.home(); home != "" {
		env = append(env, "HOME="+home)
	}
	env = append(env, passed(o, "DOCKER_CONFIG", "DOCKER_CONTENT_TRUST", "DOCKER_CONTENT_TRUST_SERVER",
		"XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "GNUPGHOME", "PASSWORD_STORE_DIR")...)
	return append(env, passed(o, proxyAndCA...)...)
}

// daemonPID finds dockerd's process. With socket activation the listener is systemd;
// then the daemon's pid file tells. 0 where neither is a dockerd.
func daemonPID(o ProbeOptions, listener int) int {
	pids := []int{listener}
	for _, file := range []string{"/var/run/docker.pid", filepath.Join("/", o.Getenv("XDG_RUNTIME_DIR"), "docker.pid")} {
		if data, err := os.ReadFile(o.path(file)); err == nil {
			if n, err := strconv.Atoi(strings.TrimSpace(string(data))); err == nil {
				pids = append(pids, n)
			}
		}
	}
	for _, pid := range pids {
		if pid > 0 && fileIs(o.path(fmt.Sprintf("/proc/%d/comm", pid)), "dockerd") {
			return pid
		}
	}
	return 0
}

// daemonLimits reads the daemon's hard limits, which its containers inherit. Where the
// daemon's process is not known the caller's own stand in: they may be lower than what
// the daemon could give, or higher, in which case the engine reports it.
func daemonLimits(o ProbeOptions, daemon int) (nofile, nproc uint64, err error) {
	if data, err := os.ReadFile(o.path(fmt.Sprintf("/proc/%d/limits", daemon))); daemon > 0 && err == nil {
		nofile, okFile := hardLimit(string(data), "Max open files")
		nproc, okProc := hardLimit(string(data), "Max processes")
		if okFile && okProc {
			return nofile, nproc, nil
		}
	}
	return ownHardLimits()
}
