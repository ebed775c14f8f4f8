package spec

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
)

// Where a variable comes from.
const (
	fromDefault  = "default"
	fromImage    = "image"
	fromShim     = "agentshim"
	fromTerminal = "terminal"
	fromProvider = "provider"
	fromEnvFile  = "envFile"
	fromAuth     = "auth"
	fromCaller   = "envFrom"
	fromEnv      = "env"
	fromHarness  = "harness"
)

// TerminalEnv are the caller's variables that a harness with a terminal gets.
var TerminalEnv = []string{"COLORTERM", "LANG", "TERM", "TZ"}

// PromptPlaceholder stands for the prompt in a plan's argv.
const PromptPlaceholder = "<prompt>"

func (c *compiler) process() error {
	p := Process{
		Args: Args(c.h, c.o), Env: c.env(), Cwd: c.cwd(), PromptMode: promptMode(c.h, c.o), Terminal: c.terminal(),
		RuntimeDir: fmt.Sprintf("/run/user/%d", c.plan.Identity.UID),
	}
	if c.h.Harness.Provided != nil {
		p.Provider, p.Auth = c.h.Harness.Provider, c.h.Harness.Auth
	}
	c.plan.Process = p
	return nil
}

// Args is the argument vector of a process, with a placeholder for the prompt.
func Args(h harness.Harness, o Options) []string {
	switch promptMode(h, o) {
	case modeCommand:
		return slices.Clone(o.Command)
	case modeInteractive:
		return h.Harness.InteractiveArgv()
	}
	return h.Harness.Argv(PromptPlaceholder, cmp.Or(o.PromptPath, PromptPath))
}

// seeds are what the provider writes into the home, for the process's folder.
func (c *compiler) seeds() error {
	for _, s := range c.h.Seeds() {
		c.plan.Seeds = append(c.plan.Seeds, SeedFile{Target: s.Target, Content: s.Content(c.plan.Process.Cwd)})
	}
	return nil
}

// Values of Process.PromptMode where there is no prompt.
const (
	modeCommand     = "command"
	modeInteractive = "interactive"
)

// Step decides the process of one step of the session whose plan and host these are. h is
// the session's harness with what the step has of its own.
func Step(p Plan, h harness.Harness, host Host, o Options) Process {
	c := compiler{h: h, host: host, o: o, plan: p}
	_ = c.process() // refuses nothing
	return c.plan.Process
}

func promptMode(h harness.Harness, o Options) string {
	switch {
	case len(o.Command) > 0:
		return modeCommand
	case o.Interactive:
		return modeInteractive
	}
	return h.Harness.PromptMode
}

// terminal says that the harness gets one. Where its standard input is the prompt,
// that has to end, which a terminal's does not.
func (c *compiler) terminal() bool {
	return c.o.Terminal != nil && c.h.Terminal != "never" && promptMode(c.h, c.o) != "stdin"
}

func (c *compiler) cwd() string {
	switch {
	case c.h.WorkingDir != "":
		return path.Clean(c.h.WorkingDir)
	case c.h.HasWorkspace():
		return path.Clean(c.h.Workspace.Target)
	case c.entered != nil:
		return cmp.Or(c.host.Image.WorkingDir, "/")
	}
	return Home
}

// env lists the harness's variables; a later source wins, and the list is sorted
// by name.
func (c *compiler) env() []EnvVar {
	vars := map[string]EnvVar{}
	set := func(from, name, value string) {
		vars[name] = EnvVar{Name: name, From: from, Value: value}
	}
	set(fromDefault, "PATH", DefaultPath)
	for _, kv := range c.host.Image.Env {
		name, value, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, "LD_") {
			set(fromImage, name, value)
		}
	}
	for name, value := range c.ownEnv() {
		set(fromShim, name, value)
	}
	if g := c.plan.Git; g != nil {
		for name, value := range mounts.GitEnv(g.Mode, c.h.ContainerPath(c.h.Workspace.Target), c.host.Mounts.Git) {
			set(fromShim, name, value)
		}
	}
	if c.terminal() {
		for _, name := range TerminalEnv {
			if value := c.o.Terminal[name]; value != "" {
				set(fromTerminal, name, value)
			}
		}
	}
	if len(c.h.CACertificates) > 0 {
		for name, value := range caEnv {
			set(fromShim, name, value)
		}
	}
	if c.h.OutputFile != "" {
		set(fromShim, OutputVariable, c.h.OutputFile)
	}
	for name, value := range c.h.Harness.ProviderEnv() {
		set(fromProvider, name, value)
	}
	for _, name := range c.h.Harness.AuthEnv {
		set(fromAuth, name, "")
	}
	for _, names := range c.o.EnvFiles {
		for _, name := range names {
			set(fromEnvFile, name, "")
		}
	}
	for _, name := range c.h.EnvFrom {
		set(fromCaller, name, "")
	}
	for name := range c.h.Env {
		set(fromEnv, name, "")
	}
	for name := range c.h.Harness.Env {
		set(fromHarness, name, "")
	}
	var out []EnvVar
	for _, name := range sortedKeys(vars) {
		out = append(out, vars[name])
	}
	return out
}

// ownEnv is what agentshim sets whatever the image or engine says. In another's container
// that is the home alone, as the engine gives it.
func (c *compiler) ownEnv() map[string]string {
	id := c.plan.Identity
	if c.entered != nil {
		return c.entered.env()
	}
	return map[string]string{
		"HOME": Home, "USER": id.Name, "LOGNAME": id.Name, "SHELL": "/bin/sh",
		"XDG_RUNTIME_DIR": fmt.Sprintf("/run/user/%d", id.UID),
		"XDG_CONFIG_HOME": Home + "/.config", "XDG_CACHE_HOME": Home + "/.cache",
		"XDG_DATA_HOME": Home + "/.local/share", "XDG_STATE_HOME": Home + "/.local/state",
	}
}

// etc generates the files the engines would otherwise fill differently, or copy
// from the host.
func (c *compiler) etc() error {
	id := c.plan.Identity
	c.plan.Etc = []EtcFile{
		{"group", group(id)},
		{"hostname", Hostname + "\n"},
		{"hosts", hostsFile(c.plan.Egress)},
		{"passwd", passwd(id)},
		{"resolv.conf", resolvConf(c.plan.Egress)},
	}
	return nil
}

const nobody = 65534

func passwd(id Identity) string {
	var b strings.Builder
	if id.UID != 0 {
		b.WriteString("root:x:0:0:root:/root:/sbin/nologin\n")
	}
	if id.UID != nobody {
		fmt.Fprintf(&b, "nobody:x:%d:%d:nobody:/:/sbin/nologin\n", nobody, nobody)
	}
	fmt.Fprintf(&b, "%s:x:%d:%d::%s:/bin/sh\n", id.Name, id.UID, id.GID, Home)
	return b.String()
}

// group lists the agent's own groups by number where no better name is known.
func group(id Identity) string {
	names := map[uint32]string{0: "root", nobody: "nogroup"}
	if id.GID != 0 && id.GID != nobody {
		names[id.GID] = "agent"
	}
	for _, g := range id.Groups {
		if names[g] == "" {
			names[g] = fmt.Sprintf("group%d", g)
		}
	}
	gids := make([]uint32, 0, len(names))
	for g := range names {
		gids = append(gids, g)
	}
	slices.Sort(gids)
	var b strings.Builder
	for _, g := range gids {
		fmt.Fprintf(&b, "%s:x:%d:\n", names[g], g)
	}
	return b.String()
}

// Values are the caller's secrets and inputs that a plan leaves out.
type Values struct {
	// EnvFiles holds each envFiles entry's variables; Caller those of envFrom and auth.
	EnvFiles []map[string]string
	Caller   map[string]string
	Prompt   string
}

// Launch puts the values into the plan's process: the argv and environment the
// harness starts with.
func (p Plan) Launch(h harness.Harness, v Values) (args, env []string) {
	args = slices.Clone(p.Process.Args)
	if p.Process.PromptMode == "arg" || p.Process.PromptMode == "flag" {
		args = h.Harness.Argv(v.Prompt, PromptPath)
	}
	for _, e := range p.Process.Env {
		env = append(env, e.Name+"="+v.value(h, e))
	}
	return args, env
}

func (v Values) value(h harness.Harness, e EnvVar) string {
	switch e.From {
	case fromEnvFile:
		for _, f := range slices.Backward(v.EnvFiles) {
			if value, ok := f[e.Name]; ok {
				return value
			}
		}
	case fromCaller, fromAuth:
		return v.Caller[e.Name]
	case fromEnv:
		return h.Env[e.Name]
	case fromHarness:
		return h.Harness.Env[e.Name]
	}
	return e.Value
}
