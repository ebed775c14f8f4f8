package main

import (
	"fmt"
	"os"

	"github.com/agentshim/agentshim/shim/wire"
)

// findArg has init look for a program instead: `agentshim-init find NAME` prints where
// a harness of that name would be started from in this environment, and ends with 1
// where it would not be. It is what runs in the place of a harness when only the
// container is to be proven, in an image that may hold nothing else.
const findArg = "find"

func find(name string) int {
	dir, err := os.Getwd()
	if err != nil {
		dir = "/"
	}
	program, refused := lookPath(wire.Launch{Args: []string{name}, Env: os.Environ(), Dir: dir})
	if refused == nil {
		if err := executable(program); err != nil {
			refused = refuse("harness-exec", "%v", err)
		}
	}
	if refused != nil {
		fmt.Fprintln(os.Stderr, refused.Detail)
		return 1
	}
	fmt.Println(program)
	return 0
}
