package harness

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// provider puts what the named provider says into the harness, where the file does
// not say otherwise. It runs before the defaults are filled in.
func (c *checker) provider(users []Provider) {
	cmd := &c.h.Harness
	const at = "$.harness.provider"
	if cmd.Provider == "" {
		c.authAlone()
		return
	}
	p, ok := FindProvider(cmd.Provider, users)
	if !ok {
		remedy := c.didYouMean(cmd.Provider, ProviderNames(users))
		if remedy == "" {
			remedy = "agentshim providers lists them"
		}
		c.fault(at, cmd.Provider, "no provider has this name", remedy)
		return
	}
	cmd.Provided = &p
	if cmd.Binary == "" {
		cmd.Binary = p.Binary
	} // else binary reports it
	if cmd.PromptMode == "" {
		cmd.PromptMode = p.Headless.PromptMode
		preset(&cmd.PromptFlag, p.Headless.PromptFlag)
	}
	preset(&cmd.PromptPosition, p.Headless.PromptPosition)
	c.auth(p)
}

// authAlone: credentials are a provider's.
func (c *checker) authAlone() {
	const at = "$.harness.auth"
	if auth := c.h.Harness.Auth; slices.Contains([]string{"account", "api-key"}, auth) && !c.covers(at) && !c.covers("$.harness.provider") {
		c.fault(at, auth, "needs $.harness.provider", "name the credentials with $.home.files and $.envFrom")
	}
}

// auth adds the files and variables of the form of credentials that the file asks for.
func (c *checker) auth(p Provider) {
	cmd := &c.h.Harness
	const at = "$.harness.auth"
	if cmd.Auth == "" || cmd.Auth == "none" || cmd.Auth == "broker" {
		return
	}
	if !slices.Contains(p.Forms(), cmd.Auth) {
		c.fault(at, cmd.Auth, fmt.Sprintf("provider %q has no such credentials", p.Name), "it has "+strings.Join(p.Forms(), ", "))
		return
	}
	credentials := p.Credentials(cmd.Auth)
	for i, f := range credentials.Files {
		target := path.Clean(f.Target)
		if slices.ContainsFunc(c.h.Home.Files, func(h HomeFile) bool { return path.Clean(h.Target) == target }) {
			c.fault(at, cmd.Auth, "its file "+quote(target)+" is given in $.home.files too", "keep one of them")
			continue
		}
		c.h.Home.Files = append(c.h.Home.Files, HomeFile{
			Source: f.Source, Target: f.Target, WriteBack: f.WriteBack, Members: f.Members, Auth: cmd.Auth,
		})
		c.flags[element("$.home.files", len(c.h.Home.Files)-1)+".target"] = fmt.Sprintf("%s: file %d of provider %q", at, i+1, p.Name)
	}
	cmd.AuthEnv = credentials.Env
}

// Seeds are the files that the provider writes into the home, sorted by target. A file
// of home.files at the same place goes before it.
func (h Harness) Seeds() []Seed {
	p := h.Harness.Provided
	if p == nil {
		return nil
	}
	byTarget := map[string]Seed{}
	for _, s := range slices.Concat(p.Seed, p.Credentials(h.Harness.Auth).Seed) {
		byTarget[path.Clean(s.Target)] = s
	}
	for _, f := range h.Home.Files {
		delete(byTarget, path.Clean(f.Target))
	}
	var seeds []Seed
	for _, target := range slices.Sorted(maps.Keys(byTarget)) {
		seed := byTarget[target]
		seed.Target = target
		seeds = append(seeds, seed)
	}
	return seeds
}

// seeds judges where they lie.
func (c *checker) seeds() {
	for _, s := range c.h.Seeds() {
		c.notInMount("$.harness.provider", s.Target)
		for _, f := range c.h.Home.Files {
			if within(s.Target, f.Target) || within(f.Target, s.Target) {
				c.fault("$.harness.provider", s.Target, "its file collides with the one on "+quote(f.Target), "choose another target for that")
			}
		}
	}
}

// ProviderEnv are the variables that the provider sets, a fresh map.
func (c Command) ProviderEnv() map[string]string {
	env := map[string]string{}
	if c.Provided != nil {
		maps.Copy(env, c.Provided.Env)
		maps.Copy(env, c.Provided.Credentials(c.Auth).Set)
	}
	return env
}

// HasInteractive says that the harness can be started for a person at a terminal.
func (c Command) HasInteractive() bool { return c.Provided != nil && c.Provided.Interactive != nil }

// InteractiveArgv is the argument vector for a person at a terminal: binary, the
// form's arguments, prefixArgs and the options that are given. It is nil where the
// harness has no such form.
func (c Command) InteractiveArgv() []string {
	if !c.HasInteractive() {
		return nil
	}
	return slices.Concat([]string{c.Binary}, c.Provided.Interactive.Args, c.PrefixArgs, c.optionArgs(c.Options))
}

// headlessOptions are the options given, and the provider's that keep it from asking.
func (c Command) headlessOptions() map[string]any {
	if c.Provided == nil {
		return c.Options
	}
	options := maps.Clone(c.Provided.Unattended)
	if options == nil {
		options = map[string]any{}
	}
	maps.Copy(options, c.Options)
	return options
}
