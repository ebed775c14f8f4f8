package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// watchArg makes init's program watch one step of a session instead: it starts the
// harness, adopts what the harness's processes leave behind wherever they go, and ends
// when none is left. Like init it is non-dumpable. The agent can kill it, since it is not
// the first process; then init adopts what it watched, and kills that. Where init is not
// the first process either, the watcher ends the step when init is gone.
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
	// Outlives says that init's end is not the container's.
	Outlives bool `json:"outlives,omitempty"`
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
	orders := os.NewFile(watchOrders, "orders")
	if err := json.NewDecoder(io.LimitReader(orders, 2*wire.MaxLaunch)).Decode(&o); err != nil {
		return exitRefused
	}
	var mortal chan<- int
	if o.Outlives {
		mortal = endWith(orders)
	}
	reports := json.NewEncoder(os.NewFile(watchReports, "reports"))
	pid, err := spawn(o.Program, o.Launch, []uintptr{watchStreams, watchStreams + 1, watchStreams + 2})
	if err != nil {
		_ = reports.Encode(started{Refused: execRefused(o.Program, err)})
		return exitRefused
	}
	ignoreSignals()
	if o.Outlives {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			_ = reap(pid, killChildren)
			_ = reports.Encode(started{Refused: refuse("steps", "pidfd_open: %v", err)})
			return exitRefused
		}
		mortal <- fd
	}
	for fd := range 3 {
		unix.Close(watchStreams + fd)
	}
	if err := reports.Encode(started{PID: pid}); err != nil {
		return exitRefused
	}
	exit := reap(pid, killChildren)
	_ = reports.Encode(exit)
	return 0
}

func killChildren() {
	for _, left := range children(os.Getpid()) {
		_ = syscall.Kill(left, syscall.SIGKILL)
	}
}

// endWith ends the harness whose pidfd it is sent when init is gone, whose end of the orders
// then closes. The thread for that is there before the harness can use up what there may be.
func endWith(orders io.Reader) chan<- int {
	harness, waits := make(chan int, 1), make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(waits)
		_, _ = io.Copy(io.Discard, orders)
		_ = unix.PidfdSendSignal(<-harness, unix.SIGKILL, nil, 0) // ESRCH: it has ended
	}()
	<-waits
	return harness
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
