package shim_test

import (
	"context"
	"fmt"
	"os"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim"
)

// A program that runs a harness file as agentshim exec does. It needs an engine and
// the image, so it has no output to compare.
func ExampleRun() {
	h, err := harness.Load("harness.json", harness.Overrides{})
	if err != nil {
		fmt.Println(err)
		return
	}
	record, err := shim.Run(context.Background(), shim.Job{
		Harness: h,
		Words:   []string{"fix", "the", "failing", "test"},
		Stdout:  os.Stdout,
		Stderr:  os.Stderr,
	})
	if err != nil {
		fmt.Println(shim.ReasonOf(err), shim.HintOf(err))
		return
	}
	fmt.Println("the agent ended with", record.Exit)
}
