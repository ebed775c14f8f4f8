package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim"
)

// specFlags are the flags of every verb that reads a harness file.
type specFlags struct {
	file      string
	overrides harness.Overrides
	prompt    promptFlag
	// instead names, for a hint, what there can be in the file's place.
	instead string
}

// promptFlag is the flag --prompt: given, it may be empty.
type promptFlag struct{ text *string }

func (p *promptFlag) String() string { return "" }
func (p *promptFlag) Type() string   { return "text" }

func (p *promptFlag) Set(text string) error {
	p.text = &text
	return nil
}

func (s *specFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&s.file, "spec", "", "harness file (required)")
	f.StringVar(&s.overrides.Engine, "engine", "", "auto, docker or podman, instead of the file's")
	f.StringVar(&s.overrides.Image, "image", "", "image, instead of the file's")
	f.StringVar(&s.overrides.Workspace, "workspace", "", "workspace folder, instead of the file's source")
	f.StringVar(&s.overrides.PromptFile, "prompt-file", "", "file that holds the prompt, instead of the file's")
}

// registerPrompt adds the flag of the verbs that run the harness.
func (s *specFlags) registerPrompt(cmd *cobra.Command) {
	cmd.Flags().Var(&s.prompt, "prompt", "the prompt, instead of the file's")
}

// take puts what the command line gives the harness into the overrides. With command the
// words are an argv instead, which it returns.
func (s *specFlags) take(given arguments, command bool) (argv []string, err error) {
	if command {
		return given.words()
	}
	s.overrides.Prompt, s.overrides.Args, s.overrides.Words = s.prompt.text, given.before, given.after
	return nil, nil
}

// promptedJob loads the harness file with what the command line gives the harness; see take.
func (s *specFlags) promptedJob(given arguments, command bool) (shim.Job, error) {
	if s.file == "" {
		if _, err := given.words(); err != nil {
			return shim.Job{}, err
		}
	}
	argv, err := s.take(given, command)
	if err != nil {
		return shim.Job{}, err
	}
	job, err := s.job()
	job.Command = argv
	return job, err
}

// job loads the harness file into a job. Paths on the command line start from the
// caller's working folder.
func (s *specFlags) job() (shim.Job, error) {
	if s.file == "" {
		return shim.Job{}, invalid("no harness file given", "add --spec harness.json"+s.instead)
	}
	o := s.overrides
	for _, p := range []struct {
		flag string
		path *string
	}{{"--spec", &s.file}, {"--workspace", &o.Workspace}, {"--prompt-file", &o.PromptFile}} {
		if err := absolute(p.flag, p.path); err != nil {
			return shim.Job{}, err
		}
	}
	var err error
	if o.Providers, err = userProviders(); err != nil {
		return shim.Job{}, err
	}
	h, err := harness.Load(s.file, o)
	if err != nil {
		return shim.Job{}, &shim.Error{Reason: shim.ReasonSpecInvalid, Err: err}
	}
	raw, err := os.ReadFile(s.file)
	if err != nil {
		return shim.Job{}, &shim.Error{Reason: shim.ReasonSpecInvalid, Err: err}
	}
	return shim.Job{Harness: h, Spec: raw, SpecPath: s.file, Overrides: o, Version: version}, nil
}

// absolute makes a path of the command line one that does not depend on the working folder.
func absolute(flag string, path *string) error {
	if *path == "" {
		return nil
	}
	if strings.Contains(*path, "${") {
		return invalid("%s %q: variables are not expanded, and this one was not before", "write the path itself", flag, *path)
	}
	abs, err := filepath.Abs(*path)
	*path = abs
	return err
}

// userProviders are those of the caller's own folder.
func userProviders() ([]harness.Provider, error) {
	config, err := os.UserConfigDir()
	if err != nil {
		return nil, nil // no home: no folder
	}
	list, err := harness.UserProviders(harness.ProviderDir(config))
	if err != nil {
		return nil, &shim.Error{Reason: shim.ReasonSpecInvalid, Err: err}
	}
	return list, nil
}

func invalid(msg, hint string, args ...any) error {
	return &shim.Error{Reason: shim.ReasonSpecInvalid, Msg: fmt.Sprintf(msg, args...), Hint: hint}
}
