package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim"
)

// specFlags are the flags of every verb that reads a harness file.
type specFlags struct {
	file      string
	overrides harness.Overrides
}

func (s *specFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&s.file, "spec", "", "harness file (required)")
	f.StringVar(&s.overrides.Engine, "engine", "", "auto, docker or podman, instead of the file's")
	f.StringVar(&s.overrides.Image, "image", "", "image, instead of the file's")
	f.StringVar(&s.overrides.Workspace, "workspace", "", "workspace folder, instead of the file's source")
	f.StringVar(&s.overrides.PromptFile, "prompt-file", "", "file that holds the prompt, instead of the file's")
}

// job loads the harness file into a job. Paths on the command line start from the
// caller's working folder.
func (s *specFlags) job() (shim.Job, error) {
	if s.file == "" {
		return shim.Job{}, invalid("no harness file given", "add --spec harness.json")
	}
	o := s.overrides
	for _, p := range []*string{&o.Workspace, &o.PromptFile} {
		if *p == "" {
			continue
		}
		abs, err := filepath.Abs(*p)
		if err != nil {
			return shim.Job{}, err
		}
		*p = abs
	}
	h, err := harness.Load(s.file, o)
	if err != nil {
		return shim.Job{}, &shim.Error{Reason: shim.ReasonSpecInvalid, Err: err}
	}
	raw, err := os.ReadFile(s.file)
	if err != nil {
		return shim.Job{}, &shim.Error{Reason: shim.ReasonSpecInvalid, Err: err}
	}
	abs, err := filepath.Abs(s.file)
	if err != nil {
		return shim.Job{}, err
	}
	return shim.Job{Harness: h, Spec: raw, SpecPath: abs, Version: version}, nil
}

func invalid(msg, hint string, args ...any) error {
	return &shim.Error{Reason: shim.ReasonSpecInvalid, Msg: fmt.Sprintf(msg, args...), Hint: hint}
}
