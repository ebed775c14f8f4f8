package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/spec"
)

const (
	hintPodmanInstall = "install Podman 4.3 or newer, or use `--engine docker`"
	hintPodmanRemote  = "agentshim needs the engine of this machine: unset CONTAINER_HOST, CONTAINER_CONNECTION and DAGU_PODMAN_HOST, and take remote=true out of containers.conf"
	hintCrun          = "install runc (Debian: `apt install runc`), or boot with cgroups v2 only (`systemd.unified_cgroup_hierarchy=1`)"
	hintUidmap        = "install newuidmap and newgidmap with their setuid bit (Debian: `apt install uidmap`, Fedora: shadow-utils)"
)

// podman is the Adapter of Podman on this machine, as root or rootless.
type podman struct {
	engine        spec.Engine
	runner        Runner
	env, pullEnv  []string
	hintIgnored   string
	nofile, nproc uint64
	lacking       []string
	// rootlessNetwork is the program that makes rootless containers' networks, empty where
	// Podman does not say.
	rootlessNetwork string
	images          imageCache
}

func (p *podman) Engine() spec.Engine                { return p.engine }
func (p *podman) Runner() Runner                     { return p.runner }
func (p *podman) HardLimits() (nofile, nproc uint64) { return p.nofile, p.nproc }
func (p *podman) lacks() []string                    { return p.lacking }

// Command has only the folders that Podman finds its store by in its environment. No
// flag says that Podman is local: --remote=false loses to remote=true in
// containers.conf (Podman 4.3), which is why the probe asks.
// The runtime is not among the global flags: who starts a container passes
// Engine.RuntimePath with --runtime.
func (p *podman) Command(args ...string) Command {
	return Command{Path: p.engine.Client, Args: args, Env: p.env}
}

func (p *podman) pull(ctx context.Context, ref, platform string, progress io.Writer) error {
	args := []string{"pull"}
	if platform != "" {
		args = append(args, "--platform", platform)
	}
	cmd := p.Command(append(args, "--", ref)...)
	cmd.Env, cmd.Progress = p.pullEnv, progress
	_, err := p.runner.Run(ctx, cmd)
	return err
}

// probePodman asks the client at path, or the podman in PATH where path is empty.
func probePodman(ctx context.Context, o ProbeOptions, path string) (Adapter, error) {
	if err := checkPodmanLocal(o); err != nil {
		return nil, err
	}
	if path == "" {
		var ok bool
		if path, ok = lookPath(o, "podman"); !ok {
			return nil, &Error{Reason: ReasonEngineMissing, Msg: "no podman in PATH", Hint: hintPodmanInstall}
		}
	}
	if o.callerUID() != 0 {
		if err := checkRootless(o); err != nil {
			return nil, err
		}
	}
	key := podmanKey(o, path, podmanEnv(o, path))
	info, err := podmanInfoOf(ctx, o, path, key)
	if err != nil {
		return nil, err
	}
	return newPodman(ctx, o, path, key, info)
}

// checkPodmanLocal refuses every variable that sends Podman elsewhere, even to a
// local socket: the service behind it could be another user's.
func checkPodmanLocal(o ProbeOptions) error {
	for _, name := range []string{"CONTAINER_HOST", "CONTAINER_CONNECTION", "DAGU_PODMAN_HOST"} {
		if v := o.Getenv(name); v != "" && !(name == "DAGU_PODMAN_HOST" && ownService(o, v)) {
			return &Error{
				Reason: ReasonEngineRemote, Hint: hintPodmanRemote,
				Msg: fmt.Sprintf("%s is %q: podman would run containers through a service, whose paths and users need not be the ones here", name, withoutSecrets(v)),
			}
		}
	}
	return nil
}

// ownService says that an orchestrator's Podman is this user's own service at its usual place:
// what that runs is in the very store that the client here works on.
func ownService(o ProbeOptions, host string) bool {
	const socket = "podman/podman.sock"
	own := []string{filepath.Join("/run/user", strconv.Itoa(int(o.callerUID())), socket)}
	if o.callerUID() == 0 {
		own = []string{filepath.Join("/run", socket), filepath.Join("/var/run", socket)}
	}
	if dir := o.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		own = append(own, filepath.Join(dir, socket))
	}
	return slices.Contains(own, strings.TrimPrefix(host, "unix://"))
}

// podmanFolders are the variables by which Podman finds its store and runtime folder.
func podmanFolders(o ProbeOptions) []string {
	var env []string
	if home := o.home(); home != "" {
		env = append(env, "HOME="+home)
	}
	return append(env, passed(o, "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "TMPDIR")...)
}

// podmanEnv is the whole environment of every call but a pull.
func podmanEnv(o ProbeOptions, client string) []string {
	return append([]string{"LC_ALL=C", "PATH=" + podmanPath(o, client)}, podmanFolders(o)...)
}

// podmanPath is the system's PATH and, behind it, the folders of the programs that
// Podman starts where they are only in the caller's PATH.
func podmanPath(o ProbeOptions, client string) string {
	dirs := filepath.SplitList(systemPath)
	add := func(dir string) {
		if !slices.Contains(dirs, dir) && !strings.Contains(dir, ":") {
			dirs = append(dirs, dir)
		}
	}
	add(filepath.Dir(client))
	for _, name := range []string{"newuidmap", "newgidmap", "conmon", "slirp4netns", "pasta", "fuse-overlayfs", "crun", "runc"} {
		if _, ok := findProgram(o, dirs, name); ok {
			continue
		}
		if found, ok := lookPath(o, name); ok {
			add(filepath.Dir(found))
		}
	}
	return strings.Join(dirs, ":")
}

// podmanIgnored are settings of the caller that no call of agentshim's gets.
var podmanIgnored = []string{"CONTAINERS_CONF", "CONTAINERS_CONF_OVERRIDE", "CONTAINERS_STORAGE_CONF", "CONTAINERS_REGISTRIES_CONF", "STORAGE_DRIVER", "STORAGE_OPTS"}

func ignoredHint(o ProbeOptions) string {
	var names []string
	for _, name := range podmanIgnored {
		if o.Getenv(name) != "" {
			names = append(names, name)
		}
	}
	if names == nil {
		return ""
	}
	return strings.Join(names, ", ") + " set here but not passed on to podman: use its configuration files instead"
}

// podmanInfo is the part of `podman info` that is used, and what is cached.
type podmanInfo struct {
	Host struct {
		CgroupManager     string   `json:"cgroupManager"`
		CgroupVersion     string   `json:"cgroupVersion"`
		CgroupControllers []string `json:"cgroupControllers"`
		BuildahVersion    string   `json:"buildahVersion"`
		IDMappings        struct {
			GIDMap []idMapping `json:"gidmap"`
			UIDMap []idMapping `json:"uidmap"`
		} `json:"idMappings"`
		OCIRuntime struct {
			Name    string `json:"name"`
			Path    string `json:"path"`
			Version string `json:"version"`
		} `json:"ociRuntime"`
		RootlessNetworkCmd string `json:"rootlessNetworkCmd"`
		ServiceIsRemote    bool   `json:"serviceIsRemote"`
		Security           struct {
			AppArmorEnabled bool `json:"apparmorEnabled"`
			Rootless        bool `json:"rootless"`
			SeccompEnabled  bool `json:"seccompEnabled"`
			SELinuxEnabled  bool `json:"selinuxEnabled"`
		} `json:"security"`
	} `json:"host"`
	Store struct {
		GraphDriverName string         `json:"graphDriverName"`
		GraphOptions    map[string]any `json:"graphOptions"`
		GraphRoot       string         `json:"graphRoot"`
		RunRoot         string         `json:"runRoot"`
		VolumePath      string         `json:"volumePath"`
	} `json:"store"`
	Version struct {
		Version string `json:"Version"`
	} `json:"version"`
}

type idMapping struct {
	ContainerID uint64 `json:"container_id"`
	HostID      uint64 `json:"host_id"`
	Size        uint64 `json:"size"`
}

// cachedInfo also names the runtime's file: an upgrade of it alone changes the answer.
type cachedInfo struct {
	Info    podmanInfo `json:"info"`
	Runtime string     `json:"runtime"`
}

// podmanInfoOf runs `podman info`, or takes its last answer where nothing that it
// depends on has changed since.
func podmanInfoOf(ctx context.Context, o ProbeOptions, client, key string) (podmanInfo, error) {
	store := openCache(o.CacheDir)
	var known cachedInfo
	if store.get("podman", key, &known) && known.Runtime == identity(o.path(known.Info.Host.OCIRuntime.Path)) {
		return known.Info, nil
	}
	out, err := runQuestion(ctx, o.Runner, Command{Path: client, Args: []string{"info", "--format", "json"}, Env: podmanEnv(o, client)})
	if err != nil {
		return podmanInfo{}, podmanError(ctx, client, err)
	}
	var info podmanInfo
	if err := json.Unmarshal(out.Stdout, &info); err != nil || info.Host.BuildahVersion == "" {
		return podmanInfo{}, &Error{
			Reason: ReasonEngineMissing, Msg: fmt.Sprintf("%q does not answer as podman does", client),
			Hint: hintPodmanInstall, Err: err,
		}
	}
	if err := checkPodman(info); err != nil {
		return podmanInfo{}, err
	}
	if mappingsSettled(o, info) {
		store.put("podman", key, cachedInfo{Info: info, Runtime: identity(o.path(info.Host.OCIRuntime.Path))})
	}
	return info, nil
}

func podmanError(ctx context.Context, client string, err error) error {
	if ctx.Err() != nil {
		return &Error{Reason: ReasonInterrupted, Msg: fmt.Sprintf("podman %q", client), Err: context.Cause(ctx)}
	}
	if errors.Is(err, fs.ErrPermission) {
		return &Error{Reason: ReasonEngineDenied, Msg: fmt.Sprintf("podman %q may not be executed by this user", client), Err: err}
	}
	return engineFailed(err)
}

// mappingsSettled says that Podman uses the id ranges of the files: a process of
// Podman's keeps the old ones until `podman system migrate`, which changes no file
// that the cache could see.
func mappingsSettled(o ProbeOptions, info podmanInfo) bool {
	if !info.Host.Security.Rootless {
		return true
	}
	uids, gids := subordinate(o)
	return mapped(info.Host.IDMappings.UIDMap) == uids && mapped(info.Host.IDMappings.GIDMap) == gids
}

// mapped is how many ids besides the caller's own are mapped.
func mapped(ranges []idMapping) uint32 {
	var sum uint64
	for _, r := range ranges {
		sum += r.Size
	}
	if sum == 0 {
		return 0
	}
	return clamp32(sum - 1)
}

// podmanKey names everything that `podman info` depends on but the runtime's file.
func podmanKey(o ProbeOptions, client string, env []string) string {
	parts := append([]string{"podman 3", strconv.Itoa(o.callerUID()), identity(o.path(client))}, env...)
	for _, file := range podmanFiles(o) {
		parts = append(parts, identity(o.path(file)))
	}
	// What is delegated to the caller depends on the session and its cgroup.
	for _, file := range []string{
		"/proc/sys/kernel/random/boot_id", "/proc/self/cgroup", "/proc/self/uid_map", "/sys/fs/cgroup/cgroup.controllers",
		fmt.Sprintf("/sys/fs/cgroup/user.slice/user-%[1]d.slice/user@%[1]d.service/cgroup.controllers", o.callerUID()),
	} {
		data, err := os.ReadFile(o.path(file))
		parts = append(parts, fmt.Sprintf("%s %q %v", file, data, err))
	}
	return cacheKey(parts)
}

// podmanFiles are the configuration files that `podman info` reads.
func podmanFiles(o ProbeOptions) []string {
	dirs := []string{"/usr/share/containers", "/etc/containers"}
	config := o.Getenv("XDG_CONFIG_HOME")
	if config == "" && o.home() != "" {
		config = filepath.Join(o.home(), ".config")
	}
	if config != "" {
		dirs = append(dirs, filepath.Join(config, "containers"))
	}
	files := []string{"/etc/subuid", "/etc/subgid", "/etc/passwd"}
	for _, dir := range dirs {
		for _, name := range []string{"containers.conf", "storage.conf", "registries.conf"} {
			file := filepath.Join(dir, name)
			files = append(files, file, file+".d")
			entries, _ := os.ReadDir(o.path(file + ".d")) // the folder's own identity stands for its absence
			for _, entry := range entries {
				files = append(files, filepath.Join(file+".d", entry.Name()))
			}
		}
	}
	return files
}

// checkPodman refuses what no run could work with.
func checkPodman(info podmanInfo) error {
	switch {
	case info.Host.ServiceIsRemote:
		return &Error{Reason: ReasonEngineRemote, Msg: "podman is set up to use a remote service", Hint: hintPodmanRemote}
	case !atLeast(info.Version.Version, 4, 3):
		return &Error{Reason: ReasonEngineUnsupported, Msg: fmt.Sprintf("podman %q is too old", printable(info.Version.Version)), Hint: hintPodmanInstall}
	case !info.Host.Security.SeccompEnabled:
		return &Error{Reason: ReasonEngineUnsupported, Msg: "podman does not support seccomp here", Hint: "use a kernel with CONFIG_SECCOMP_FILTER and a podman built with seccomp (`podman info`, security)"}
	}
	return nil
}

func newPodman(ctx context.Context, o ProbeOptions, client, key string, info podmanInfo) (*podman, error) {
	cgroups, err := readCgroups(o)
	if err != nil {
		return nil, err
	}
	p := &podman{
		runner: o.Runner, env: podmanEnv(o, client), hintIgnored: ignoredHint(o), images: newImageCache(o, key, info),
		engine: spec.Engine{
			Kind: spec.Podman, Client: client, Version: info.Version.Version,
			Rootless:       info.Host.Security.Rootless,
			CgroupVersion:  cgroups.version(strings.TrimPrefix(info.Host.CgroupVersion, "v")),
			CgroupHybrid:   cgroups.hybrid(),
			CgroupDriver:   info.Host.CgroupManager,
			Runtime:        info.Host.OCIRuntime.Name,
			RuntimeVersion: runtimeVersion(info.Host.OCIRuntime.Version),
			AppArmor:       info.Host.Security.AppArmorEnabled,
			SELinux:        info.Host.Security.SELinuxEnabled,
			Dirs:           podmanDirs(info),
		},
	}
	p.rootlessNetwork = info.Host.RootlessNetworkCmd
	p.lacking = podmanLacks(p.engine, info.Host.CgroupControllers)
	p.engine.LimitsHold = len(p.lacking) == 0
	p.pullEnv = append(slices.Clip(p.env), passed(o, append([]string{"REGISTRY_AUTH_FILE", "DOCKER_CONFIG"}, proxyAndCA...)...)...)
	if err := p.chooseRuntime(ctx, o, cgroups); err != nil {
		return nil, err
	}
	p.engine.Notes = runtimeNotes(p.engine.Runtime, p.engine.RuntimeVersion)
	if p.nofile, p.nproc, err = ownHardLimits(); err != nil {
		return nil, err
	}
	p.nproc, err = podmanNProc(o, p.nproc)
	return p, err
}

// podmanNProc: Podman lowers its own hard limit to kernel.pid_max before it starts
// a container, and can't raise it again (Podman 4.3).
func podmanNProc(o ProbeOptions, hard uint64) (uint64, error) {
	b, err := os.ReadFile(o.path("/proc/sys/kernel/pid_max"))
	if err != nil {
		return 0, &Error{Reason: ReasonInternal, Err: err}
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0, &Error{Reason: ReasonInternal, Err: err}
	}
	return min(hard, n), nil
}

func podmanDirs(info podmanInfo) []string {
	var dirs []string
	for _, dir := range []string{info.Store.GraphRoot, info.Store.RunRoot, info.Store.VolumePath} {
		if dir = filepath.Clean(dir); filepath.IsAbs(dir) && !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// podmanLacks are the limits that don't hold: rootless ones are silently dropped on
// cgroup v1, and on v2 they hold only where the controller is delegated and systemd
// makes the cgroups.
func podmanLacks(e spec.Engine, controllers []string) []string {
	var lacks []string
	for _, name := range []string{"memory", "cpu", "pids"} {
		if !slices.Contains(controllers, name) || e.Rootless && (e.CgroupVersion != 2 || e.CgroupDriver != "systemd") {
			lacks = append(lacks, name)
		}
	}
	return lacks
}

// runtimeVersion takes the number out of "runc version 1.1.5\ncommit: …".
func runtimeVersion(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	if _, version, ok := strings.Cut(line, " version "); ok {
		line = version
	}
	return printable(line)
}

// chooseRuntime replaces crun where it refuses the host's cgroups: crun 1.8 works on
// a hybrid set-up only while no controller is on the v2 side, also with cgroups off.
func (p *podman) chooseRuntime(ctx context.Context, o ProbeOptions, cgroups cgroupMounts) error {
	if p.engine.Runtime != "crun" || !cgroups.unifiedOwnsControllers(o) {
		return nil
	}
	path, ok := findProgram(o, filepath.SplitList(systemPath), "runc")
	if !ok {
		return &Error{
			Reason: ReasonEngineUnsupported, Hint: hintCrun,
			Msg: fmt.Sprintf("crun refuses this machine's cgroups (v1 hierarchies beside %q, which owns a controller), and there is no runc", cgroups.unified),
		}
	}
	version, err := askRuntime(ctx, o, path)
	if err != nil {
		return err
	}
	p.engine.Runtime, p.engine.RuntimePath, p.engine.RuntimeVersion = "runc", path, version
	return nil
}

// askRuntime reads and keeps the version of a runtime that Podman did not report on.
func askRuntime(ctx context.Context, o ProbeOptions, path string) (string, error) {
	store, key := openCache(o.CacheDir), cacheKey([]string{"runtime 1", identity(o.path(path))})
	var version string
	if store.get("runtime", key, &version) {
		return version, nil
	}
	out, err := runQuestion(ctx, o.Runner, Command{Path: path, Args: []string{"--version"}, Env: []string{"LC_ALL=C", "PATH=" + systemPath}})
	if err != nil {
		return "", podmanError(ctx, path, err)
	}
	version = runtimeVersion(string(out.Stdout))
	store.put("runtime", key, version)
	return version, nil
}

// checkRootless looks at what Podman needs before Podman fails on it.
func checkRootless(o ProbeOptions) error {
	for _, check := range []func(ProbeOptions) error{checkRuntimeDir, checkUidmap, checkSubordinate} {
		if err := check(o); err != nil {
			return err
		}
	}
	return nil
}

// checkRuntimeDir finds the runtime folder of another user, as `su` and cron leave it.
func checkRuntimeDir(o ProbeOptions) error {
	dir := o.Getenv("XDG_RUNTIME_DIR")
	if dir == "" {
		return nil
	}
	hint := fmt.Sprintf("unset XDG_RUNTIME_DIR, or set it to /run/user/%d after `loginctl enable-linger %s`", o.callerUID(), o.userName())
	st, err := os.Stat(o.path(dir))
	if err != nil {
		return &Error{Reason: ReasonEngineDenied, Msg: fmt.Sprintf("XDG_RUNTIME_DIR %q can't be used by podman", dir), Hint: hint, Err: err}
	}
	owner := st.Sys().(*syscall.Stat_t).Uid
	if !st.IsDir() || int(owner) != o.callerUID() {
		return &Error{
			Reason: ReasonEngineDenied, Hint: hint,
			Msg: fmt.Sprintf("XDG_RUNTIME_DIR %q belongs to uid %d, and this is uid %d: the variable is another user's (su, sudo or cron)", dir, owner, o.callerUID()),
		}
	}
	return nil
}

// checkUidmap wants both helpers, privileged by their setuid bit or file capabilities.
func checkUidmap(o ProbeOptions) error {
	for _, name := range []string{"newuidmap", "newgidmap"} {
		path, ok := findProgram(o, filepath.SplitList(systemPath), name)
		if !ok {
			path, ok = lookPath(o, name)
		}
		if !ok {
			return &Error{Reason: ReasonEngineUnsupported, Msg: "rootless podman needs " + name + ", which is not installed", Hint: hintUidmap}
		}
		st, err := os.Stat(o.path(path))
		if err != nil {
			return &Error{Reason: ReasonEngineUnsupported, Msg: "rootless podman needs " + name, Hint: hintUidmap, Err: err}
		}
		if st.Mode()&fs.ModeSetuid == 0 && !hasFileCaps(o.path(path)) {
			return &Error{Reason: ReasonEngineUnsupported, Msg: fmt.Sprintf("%q has neither its setuid bit nor file capabilities", path), Hint: hintUidmap}
		}
	}
	return nil
}

func hasFileCaps(path string) bool {
	n, err := unix.Getxattr(path, "security.capability", nil)
	return err == nil && n > 0
}

// checkSubordinate wants a range in each file. Where the name service keeps the
// ranges (nsswitch.conf, subid) the files say nothing, and Podman's answer counts.
func checkSubordinate(o ProbeOptions) error {
	if subidElsewhere(o) {
		return nil
	}
	uids, gids := subordinate(o)
	var missing, flags []string
	if uids == 0 {
		missing, flags = append(missing, "/etc/subuid"), append(flags, "--add-subuids "+freeRange(o, "/etc/subuid"))
	}
	if gids == 0 {
		missing, flags = append(missing, "/etc/subgid"), append(flags, "--add-subgids "+freeRange(o, "/etc/subgid"))
	}
	if missing == nil {
		return nil
	}
	return &Error{
		Reason: ReasonEngineUnsupported,
		Msg:    fmt.Sprintf("user %q has no range in %s, which rootless podman needs", o.userName(), strings.Join(missing, " and ")),
		Hint:   fmt.Sprintf("`usermod %s %s` as root, then `podman system migrate`", strings.Join(flags, " "), o.userName()),
	}
}

func subidElsewhere(o ProbeOptions) bool {
	data, err := os.ReadFile(o.path("/etc/nsswitch.conf"))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(data)) {
		if sources, ok := strings.CutPrefix(strings.TrimSpace(line), "subid:"); ok {
			return strings.TrimSpace(sources) != "files"
		}
	}
	return false
}

// userName is the caller's name, or its number where it has none.
func (o ProbeOptions) userName() string {
	id := strconv.Itoa(o.callerUID())
	if u, err := user.LookupId(id); err == nil {
		return u.Username
	}
	return id
}
