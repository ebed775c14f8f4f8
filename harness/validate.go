package harness

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	// maxID is the largest uid and gid; the kernel keeps 2^32-1 for "unchanged".
	maxID = 1<<32 - 2
	// maxArgument is MAX_ARG_STRLEN less its NUL: execve(2) takes no longer
	// argument or variable.
	maxArgument = 128<<10 - 1
	maxDuration = 30 * 24 * time.Hour
	maxImage    = 512
)

// checker judges a Harness that fits the schema and has its defaults.
type checker struct {
	h *Harness
	*problems
	// flags names, by path, the command-line flag a value came from.
	flags map[string]string
}

func (c *checker) all() {
	c.identity()
	c.image()
	c.command()
	c.prompt()
	c.workspace()
	c.mountList()
	c.homeFiles()
	c.seeds()
	c.workingDir()
	c.environment()
	c.deviceList()
	c.groupList()
	c.seccomp()
	c.labels()
	c.durations()
	c.accepted()
	c.presets()
	c.published()
	c.proxy()
	c.missingFeatures()
}

// fault reports a problem, unless the value is known to be wrong already.
func (c *checker) fault(at string, value any, message, remedy string) {
	if flag, ok := c.flags[at]; ok {
		c.add(flag, value, message, remedy)
		return
	}
	if !c.covers(at) {
		c.dropWeak(at)
		c.add(at, value, message, remedy)
	}
}

var (
	nameForm     = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$`)
	platformForm = regexp.MustCompile(`^linux/[a-z0-9]+(/[a-z0-9]+)?$`)
	userForm     = regexp.MustCompile(`^(0|[1-9][0-9]{0,9}):(0|[1-9][0-9]{0,9})$`)
)

// identity judges the engine, the names, the user and what depends on it. Engines take partial users
// and run ":1234" as uid 0, hence the narrow form.
func (c *checker) identity() {
	if !slices.Contains([]string{"auto", "docker", "podman"}, c.h.Engine) {
		c.fault("$.engine", c.h.Engine, "must be auto, docker or podman", c.didYouMean(c.h.Engine, []string{"auto", "docker", "podman"}))
	}
	if c.h.Name != "" && !nameForm.MatchString(c.h.Name) {
		c.fault("$.name", c.h.Name, "must be at most 63 letters, digits, dots, dashes and underscores, a letter or digit first", "")
	}
	if c.h.Platform != "" && !platformForm.MatchString(c.h.Platform) {
		c.fault("$.platform", c.h.Platform, "must be linux/ARCH or linux/ARCH/VARIANT", `write "linux/amd64" or "linux/arm64"`)
	}
	uid, _, _ := strings.Cut(c.h.User, ":")
	if c.h.User != "" && !validUser(c.h.User) {
		c.fault("$.user", c.h.User, fmt.Sprintf("must be two plain decimal numbers, UID:GID, each at most %d", maxID), `write "1000:1000"`)
		return
	}
	if len(c.h.Capabilities) > 0 && uid != "0" && !c.covers("$.user") {
		c.fault("$.capabilities", nil, "has an effect only for uid 0", `remove it, or set user to "0:0"`)
	}
}

func validUser(user string) bool {
	ids := userForm.FindStringSubmatch(user)
	if ids == nil {
		return false
	}
	for _, id := range ids[1:] {
		if n, err := strconv.ParseUint(id, 10, 64); err != nil || n > maxID {
			return false
		}
	}
	return true
}

// imageForm is the grammar of an image reference (distribution/reference) or an ID.
var imageForm = regexp.MustCompile(`^(?:sha256:[0-9a-f]{12,64}|` +
	`(?:(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?/)?` +
	`[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*` +
	`(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?(?:@sha256:[0-9a-f]{64})?)$`)

// transport matches containers-transports(5) names that Podman takes before a
// colon: it would read the image from a host path or another store.
var transport = regexp.MustCompile(`^(atomic|containers-storage|dir|docker-archive|docker-daemon|oci|oci-archive|ostree|sif|tarball):`)

func (c *checker) image() {
	image := c.h.Image
	switch {
	case image == "": // reported as missing, unless it is null
		c.fault("$.image", nil, "needed and not given", "")
	case len(image) > maxImage || !imageForm.MatchString(image):
		c.fault("$.image", image, "not an image reference or ID", `write it as "name:tag" or "registry.example.com/name:tag"`)
	case transport.MatchString(image):
		c.fault("$.image", image, "names a transport, not a registry or a local image", `write "localhost/…" before it for a local image`)
	}
}

var (
	flagForm   = regexp.MustCompile(`^--?[A-Za-z0-9][A-Za-z0-9_.-]*$`)
	optionForm = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_.-]*$`)
)

func (c *checker) command() {
	cmd := &c.h.Harness
	c.binary()
	for i, arg := range cmd.PrefixArgs {
		c.argument(element("$.harness.prefixArgs", i), arg)
	}
	if !c.covers("$.harness.promptMode") {
		c.promptFlag("$.harness.", cmd.PromptMode, cmd.PromptFlag)
	}
	c.optionList()
}

func (c *checker) binary() {
	cmd := &c.h.Harness
	const at = "$.harness.binary"
	switch {
	case cmd.Provided != nil && cmd.Binary != cmd.Provided.Binary:
		c.fault(at, cmd.Binary, "given beside $.harness.provider", "keep one of them")
	case cmd.Provider == "" && cmd.Binary == "":
		if !c.covers("$.harness.provider") {
			c.fault(at, nil, "needed and not given", `write a name looked up in PATH, or an absolute path in the container`)
		}
	default:
		c.program(at, cmd.Binary)
	}
}

// program judges the name of a program in the container.
func (c *checker) program(at, binary string) {
	switch {
	case strings.HasPrefix(binary, "-") || pathFault(binary) != "" || strings.HasPrefix(binary, "~"):
		c.fault(at, binary, "not a program's name or path", "")
	case strings.Contains(binary, "/") && !path.IsAbs(binary):
		c.fault(at, binary, "must be a plain name or an absolute path in the container", "")
	}
}

// promptFlag judges how the prompt is handed over, below the path where it is written.
func (c *checker) promptFlag(below, mode, flag string) {
	at := below + "promptFlag"
	if flag != "" && !flagForm.MatchString(flag) {
		c.fault(at, flag, "not a flag", `write it as "--name" or "-n"`)
	}
	switch mode {
	case "flag":
		if flag == "" {
			c.fault(at, nil, "needed with promptMode flag", "")
		}
	case "arg", "stdin":
		if flag != "" {
			c.fault(at, flag, "has no effect with promptMode "+mode, "remove it, or set promptMode to flag or file")
		}
	}
}

// argument judges one argument of the harness.
func (c *checker) argument(at, text string) {
	switch {
	case strings.ContainsRune(text, 0):
		c.fault(at, nil, "must not hold NUL", "")
	case len(text) > maxArgument:
		c.fault(at, nil, fmt.Sprintf("longer than an argument may be (%d bytes)", maxArgument), "")
	}
}

// onlyOnePrompt judges the file as written, before the command line replaces anything.
func (c *checker) onlyOnePrompt() {
	if c.h.Prompt != nil && c.h.PromptFile != "" {
		c.fault("$.promptFile", c.h.PromptFile, "given beside $.prompt", "keep one of them")
	}
}

func (c *checker) prompt() {
	c.source("$.promptFile", c.h.PromptFile)
	mode := c.h.Harness.PromptMode
	if c.h.Prompt == nil || mode != "arg" && mode != "flag" {
		return
	}
	switch prompt := *c.h.Prompt; {
	case strings.ContainsRune(prompt, 0):
		c.fault("$.prompt", nil, "must not hold NUL with promptMode "+mode, "set promptMode to stdin or file")
	case len(prompt) > maxArgument:
		c.fault("$.prompt", nil, fmt.Sprintf("longer than an argument may be (%d bytes)", maxArgument), "set promptMode to stdin or file")
	}
}

// source judges a host path by its text. Nothing in it is expanded but a
// leading "~/", so what looks like a variable is refused, not taken literally.
func (c *checker) source(at, source string) {
	switch {
	case strings.ContainsFunc(source, isControl):
		c.fault(at, source, "must not hold control characters", "")
	case strings.HasPrefix(source, "~") && !strings.HasPrefix(source, "~/"):
		c.fault(at, source, `"~" is understood only as "~/"`, `write "~/…", "./~…" or an absolute path`)
	case strings.HasPrefix(source, "$") || strings.Contains(source, "${"):
		c.fault(at, source, "variables are not expanded", "write the path itself")
	}
}

// target judges a container path that something is mounted on, and returns it clean.
func (c *checker) target(at, target string) string {
	if target == "" {
		return target
	}
	if message := pathFault(target); message != "" {
		c.fault(at, target, message, "")
		return target
	}
	full := c.h.ContainerPath(target)
	if full == "" {
		c.fault(at, target, "is relative, and there is no workspace", "write an absolute path, or ~/… for the agent's home")
		return target
	}
	if place := blocked(full); place != "" {
		c.fault(at, target, "collides with "+place+", where no mount may be", "choose another target")
	}
	return cleanTarget(target)
}

func (c *checker) workspace() {
	w := c.h.Workspace
	if w == nil {
		return
	}
	if w.Mode != "none" && w.Source == "" && !c.covers("$.workspace.mode") {
		c.fault("$.workspace.source", nil, "needed and not given", `write "." for the file's own folder`)
	}
	c.source("$.workspace.source", w.Source)
	c.withoutWorkspace()
	if pathFault(w.Target) == "" && !anchored(w.Target) {
		c.fault("$.workspace.target", w.Target, "must be absolute", `write "/`+path.Clean(w.Target)+`"`)
		return
	}
	w.Target = c.target("$.workspace.target", w.Target)
	for at, list := range map[string][]string{"$.workspace.protect": w.Protect, "$.workspace.hide": w.Hide} {
		for i, name := range list {
			c.unexpanded(element(at, i), name)
		}
	}
}

// withoutWorkspace: what says something of a workspace's files needs one.
func (c *checker) withoutWorkspace() {
	w := c.h.Workspace
	if w.Mode != "none" {
		return
	}
	for _, f := range []struct {
		at   string
		list []string
	}{{"$.workspace.protect", w.Protect}, {"$.workspace.hide", w.Hide}} {
		if len(f.list) > 0 {
			c.fault(f.at, nil, "has no effect where workspace.mode is none", "remove it, or choose another mode")
		}
	}
}

// mountList judges the mounts. Two on one target would hide one of them: engines
// refuse some such pairs and reorder others.
func (c *checker) mountList() {
	taken := map[string]string{}
	if c.h.HasWorkspace() {
		taken[c.h.ContainerPath(c.h.Workspace.Target)] = "$.workspace.target"
	}
	for i := range c.h.Mounts {
		m := &c.h.Mounts[i]
		at := element("$.mounts", i)
		c.source(at+".source", m.Source)
		m.Target = c.target(at+".target", m.Target)
		full := c.h.ContainerPath(m.Target)
		if full == "" {
			continue
		}
		if other, twice := taken[full]; twice {
			c.fault(at+".target", m.Target, "is the target of "+other+" too", "choose another target")
			continue
		}
		taken[full] = at + ".target"
	}
}

// homeFiles judges the files copied into the home. One that lies in a mount would be
// written to the host, one in a cache would stay there after the run.
func (c *checker) homeFiles() {
	taken := map[string]string{}
	for i := range c.h.Home.Files {
		f := &c.h.Home.Files[i]
		at := element("$.home.files", i)
		c.source(at+".source", f.Source)
		if f.Target == "" {
			continue
		}
		if message := homeTargetFault(f.Target); message != "" {
			c.fault(at+".target", f.Target, message, `write it relative to the home, like ".config/tool.json"`)
			continue
		}
		f.Target = path.Clean(f.Target)
		for _, other := range slices.Sorted(maps.Keys(taken)) {
			if within(f.Target, other) || within(other, f.Target) {
				c.fault(at+".target", f.Target, "is, holds or lies in the target of "+taken[other], "choose another target")
				break
			}
		}
		taken[f.Target] = at
		c.notInMount(at+".target", f.Target)
	}
}

func homeTargetFault(target string) string {
	switch fault := pathFault(target); {
	case fault != "":
		return fault
	case path.IsAbs(target), strings.HasPrefix(target, "~/"):
		return "must be relative to the home"
	case path.Clean(target) == "." || strings.HasSuffix(target, "/"):
		return "must name a file"
	default:
		return ""
	}
}

func (c *checker) notInMount(at, target string) {
	full := path.Join(HomeDir, target)
	mounted := make([]string, 0, len(c.h.Mounts)+1)
	for _, m := range c.h.Mounts {
		mounted = append(mounted, m.Target)
	}
	for _, m := range c.h.Caches {
		mounted = append(mounted, m.Target)
	}
	if c.h.HasWorkspace() {
		mounted = append(mounted, c.h.Workspace.Target)
	}
	for _, m := range mounted {
		dir := c.h.ContainerPath(m)
		if dir != "" && (within(full, dir) || within(dir, full)) {
			c.fault(at, target, "collides with the mount on "+quote(dir), "choose another target")
			return
		}
	}
}

// workingDir judges the working folder. /proc/self/fd/N as working folder led
// out of the container (CVE-2024-21626).
func (c *checker) workingDir() {
	const at = "$.workingDir"
	dir := c.h.WorkingDir
	if dir == "" {
		return
	}
	if message := pathFault(dir); message != "" {
		c.fault(at, dir, message, "")
		return
	}
	if !path.IsAbs(dir) {
		c.fault(at, dir, "must be absolute", "")
		return
	}
	c.h.WorkingDir = path.Clean(dir)
	for _, closed := range []string{"/proc", "/sys", "/dev"} {
		if within(c.h.WorkingDir, closed) {
			c.fault(at, dir, "must not lie in "+closed, "")
		}
	}
}

// outputFile judges where the harness is to leave its output. What the kernel makes up is none.
func (c *checker) outputFile(name string) {
	const at = "--output-file"
	if name == "" {
		return
	}
	if message := pathFault(name); message != "" || strings.HasPrefix(name, "~") || strings.HasSuffix(name, "/") {
		c.add(at, name, "must be the path of a file in the container", "write it absolute, or relative to the agent's home")
		return
	}
	if !path.IsAbs(name) {
		name = path.Join(HomeDir, name)
	}
	c.h.OutputFile = path.Clean(name)
	for _, closed := range closedTargets {
		if within(c.h.OutputFile, closed) && closed != "/run" && closed != "/var/run" {
			c.add(at, name, "must not lie in "+closed, "")
		}
	}
	for _, f := range c.h.Home.Files {
		if path.Join(HomeDir, f.Target) == c.h.OutputFile {
			c.add(at, name, "is the target of a file in $.home.files", "choose another path")
		}
	}
}

var variableForm = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// fixedVariables are set by agentshim and by nothing else.
var fixedVariables = []string{"HOME", "XDG_RUNTIME_DIR"}

// variableFault is what is wrong with a variable's name; "" if nothing.
func variableFault(name string) string {
	switch {
	case !variableForm.MatchString(name):
		return "not a variable's name (letters, digits, _)"
	case slices.Contains(fixedVariables, name):
		return "set by agentshim, and can't be overridden"
	default:
		return ""
	}
}

// callerVariableFault is what is wrong with a variable that is to be taken from the caller.
func callerVariableFault(name string) string {
	if strings.HasPrefix(name, "DAGU_") {
		return "a setting of the orchestrator's own service, which is no agent's to know"
	}
	return variableFault(name)
}

func (c *checker) environment() {
	c.variables("$.env", c.h.Env)
	c.variables("$.harness.env", c.h.Harness.Env)
	for i, name := range c.h.EnvFrom {
		at := element("$.envFrom", i)
		if message := callerVariableFault(name); message != "" && !c.covers(at) {
			c.fault(at, name, message, "")
		}
	}
	for i, file := range c.h.EnvFiles {
		c.source(element("$.envFiles", i), file)
	}
	for i, file := range c.h.CACertificates {
		c.source(element("$.caCertificates", i), file)
	}
}

func (c *checker) variables(at string, env map[string]string) {
	for _, name := range slices.Sorted(maps.Keys(env)) {
		here := member(at, name)
		if message := variableFault(name); message != "" {
			c.fault(here, nil, message, "")
		}
		if strings.ContainsRune(env[name], 0) {
			c.fault(here, nil, "must not hold NUL", "")
		}
		if len(name)+1+len(env[name]) > maxArgument {
			c.fault(here, nil, fmt.Sprintf("longer than a variable may be (%d bytes)", maxArgument), "")
		}
	}
}

// deviceForm leaves out what separates the fields of the engines' --device.
var deviceForm = regexp.MustCompile(`^/dev/[A-Za-z0-9][A-Za-z0-9._+@-]*(/[A-Za-z0-9][A-Za-z0-9._+@-]*)*$`)

func (c *checker) deviceList() {
	for i, device := range c.h.Devices {
		at := element("$.devices", i)
		switch {
		case !deviceForm.MatchString(device):
			c.fault(at, device, "must be the plain path of a device below /dev (letters, digits, . _ + @ - /)", `write "/dev/kvm"`)
		case slices.Contains(c.h.Devices[:i], device):
			c.fault(at, device, "is given twice", "remove one")
		}
	}
}

func (c *checker) groupList() {
	for i, gid := range c.h.Groups {
		if slices.Contains(c.h.Groups[:i], gid) {
			c.fault(element("$.groups", i), gid, "is given twice", "remove one")
		}
	}
}

// seccomp takes what has a slash or a dot for a file, so that a slip of a profile's name is
// none, and neither is an engine's "unconfined".
func (c *checker) seccomp() {
	profiles := []string{"default", "nested"}
	profile := c.h.Seccomp.Profile
	if slices.Contains(profiles, profile) || strings.ContainsAny(profile, "/.") {
		return
	}
	remedy := c.didYouMean(profile, profiles)
	if remedy == "" {
		remedy = "write ./FILE for a file of that name"
	}
	c.fault("$.seccomp.profile", profile, "must be default, nested or a file in Docker's format", remedy)
}

var labelForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/-]*$`)

func (c *checker) labels() {
	for _, name := range slices.Sorted(maps.Keys(c.h.Labels)) {
		at, value := member("$.labels", name), c.h.Labels[name]
		switch {
		case len(name) > 128 || !labelForm.MatchString(name):
			c.fault(at, nil, "not a label's name (letters, digits, . _ / -)", "")
		case strings.HasPrefix(name, "agentshim."):
			c.fault(at, nil, "labels under agentshim. are agentshim's own", "choose another name")
		case strings.ContainsFunc(value, isControl) || len(value) > 4096:
			c.fault(at, value, "must be at most 4096 bytes without control characters", "")
		}
	}
}

func (c *checker) durations() {
	c.duration("$.timeout", c.h.Timeout)
	c.duration("$.stopGrace", c.h.StopGrace)
	if c.h.Session != nil {
		c.duration("$.session.idle", c.h.Session.Idle)
		c.duration("$.session.maximum", c.h.Session.Maximum)
		c.ready(c.h.Session.Ready)
	}
}

func (c *checker) ready(r *Ready) {
	if r != nil && (r.Port == 0) == (len(r.Command) == 0) {
		c.add("$.session.ready", nil, "needs a port or a command, and not both", "keep one of them")
	}
}

func (c *checker) duration(at, text string) {
	if text == "" {
		return
	}
	switch d, err := time.ParseDuration(text); {
	case err != nil:
		c.fault(at, text, "not a duration", `write it as "90s", "30m" or "1h30m"`)
	case d <= 0:
		c.fault(at, text, "must be more than zero", "")
	case d > maxDuration:
		c.fault(at, text, "must be at most 720h", "")
	}
}

// acceptNames is the closed list of gaps and widenings; one that ends in ":"
// is followed by what it is about.
var acceptNames = []string{
	"rootless-cgroup-limits", "bind-noexec", "tmpfs-inodes", "shared-uid-quotas",
	"root-user", "nested-seccomp", "custom-seccomp", "unmasked-proc", "attached-container", "proxy-resolves",
	"syscall:", "device:", "group:",
}

var acceptForm = regexp.MustCompile(`^(syscall:[a-z0-9_]+|device:/[^\x00-\x1f\x7f]+|group:(0|[1-9][0-9]{0,9}))$`)

func (c *checker) accepted() {
	for i, name := range c.h.Accept {
		kind, rest, _ := strings.Cut(name, ":")
		if strings.HasSuffix(name, ":") || !slices.Contains(acceptNames, name) && !acceptForm.MatchString(name) {
			remedy := c.didYouMean(name, acceptNames)
			if rest != "" {
				remedy = c.didYouMean(kind+":", acceptNames)
			}
			c.fault(element("$.accept", i), name, "no gap or widening has this name", remedy)
		}
	}
}
