package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"agentshim": func() { os.Exit(run(context.Background(), os.Args[1:])) },
	})
}

// TestScripts runs testdata/script: what a user types and sees. No engine is needed
// and none is touched: PATH is empty.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:  "testdata/script",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"copyrun": copyRun},
		Setup: func(env *testscript.Env) error {
			env.Setenv("XDG_STATE_HOME", env.WorkDir+"/state")
			env.Setenv("XDG_RUNTIME_DIR", "")
			env.Setenv("HOME", env.WorkDir)
			root, err := filepath.Abs("../../harness")
			if err != nil {
				return err
			}
			env.Setenv("ROOT", root)
			return putClients(env)
		},
	})
}

// putClients names the binary by its path, for scripts that change PATH, and makes
// clients that answer as the real ones do when they are asked for their version.
func putClients(env *testscript.Env) error {
	self, err := exec.LookPath("agentshim")
	if err != nil {
		return err
	}
	env.Setenv("AGENTSHIM", self)
	bin := filepath.Join(env.WorkDir, "bin")
	return errors.Join(
		os.Mkdir(bin, 0o755),
		os.WriteFile(filepath.Join(bin, "docker"), []byte("#!/bin/sh\necho '{\"ApiVersion\":\"1.41\"}'\n"), 0o755),
		os.WriteFile(filepath.Join(bin, "podman"), []byte("#!/bin/sh\nexit 1\n"), 0o755),
	)
}
