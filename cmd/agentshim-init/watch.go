package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// watchArg makes init's program watch one step of a session instead: it starts the
// harness, adopts what the harness's processes leave behind wherever they go, and ends
// when none is left. Like init it is non-dumpable. The agent can kill it, since it is not
// the first process; then init adopts what it watched, and kills that.
const watchArg = "watch/1"

// watchEnv keeps the runtime to the threads that it has at its start: where the agent
// fills the container's pids limit, there is no other one to be had.
var watchEnv = []string{"GOMAXPROCS=1", "GOGC=off"}

// The watcher's descriptors.
const (
	watchOrders  = 0
	watchReports = 1
	watchStreams = 3 // and the two after it are the harness's
)

// order is what a watcher is to start.
type order struct {
	Program string      `json:"program"`
	Launch  wire.Launch `json:"launch"`
}

// started is a watcher's first report; the second is a wire.Exit.
type started struct {
	PID     int           `json:"pid,omitempty"`
	Refused *wire.Refused `json:"refused,omitempty"`
}

// watchStep is the watcher's whole life. Its reports have one reader, init.
func watchStep() int {
	defaultSignals()
	if err := becomeWatcher(); err != nil {
		return exitRefused
	}
	closeOnExec()
	var o order
	if err := json.NewDecoder(io.LimitReader(os.NewFile(watchOrders, "orders"), 2*wire.MaxLaunch)).Decode(&o); err != nil {
		return exitRefused
	}
	reports := json.NewEncoder(os.NewFile(watchReports, "reports"))
	pid, err := spawn(o.Program, o.Launch, []uintptr{watchStreams, watchStreams + 1, watchStreams + 2})
	if err != nil {
		_ = reports.Encode(started{Refused: execRefused(o.Program, err)})
		return exitRefused
	}
	ignoreSignals()
	for fd := range 3 {
		unix.Close(watchStreams + fd)
	}
	if err := reports.Encode(started{PID: pid}); err != nil {
		return exitRefused
	}
	exit := reap(pid, func() {
		for _, left := range children(os.Getpid()) {
			_ = syscall.Kill(left, syscall.SIGKILL)
		}
	})
	_ = reports.Encode(exit)
	return 0
}

func becomeWatcher() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("prctl PR_SET_DUMPABLE: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("prctl PR_SET_CHILD_SUBREAPER: %w", err)
	}
	return nil
}
