package main

import (
	"encoding/json"
	"errors"
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
// the first process either, the watcher ends the step when init, or who is at its other end, is gone.
const watchArg = "watch/1"

// watchEnv keeps the runtime to the threads that it has at its start: where the agent
// fills the container's pids limit, there is no other one to be had.
var watchEnv = []string{"GOMAXPROCS=1", "GOGC=off"}

// The watcher's descriptors.
const (
	watchOrders  = 0
	watchReports = 1
	watchStreams = 3 // and the two after it are the harness's
	// watchLifeline is init's standard input, where init's end is not the container's.
	watchLifeline = 6
)

// order is what a watcher is to start.
type order struct {
	Program string      `json:"program"`
	Launch  wire.Launch `json:"launch"`
	// Init is init's pid where its end is not the container's, else 0.
	Init int `json:"init,omitempty"`
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
	defer orders.Close()
	if err := json.NewDecoder(io.LimitReader(orders, 2*wire.MaxLaunch)).Decode(&o); err != nil {
		return exitRefused
	}
	reports := json.NewEncoder(os.NewFile(watchReports, "reports"))
	bond, err := tie(o.Init)
	if err != nil {
		_ = reports.Encode(started{Refused: refuse("steps", "pidfd_open: %v", err)})
		return exitRefused
	}
	pid, err := spawn(o.Program, o.Launch, []uintptr{watchStreams, watchStreams + 1, watchStreams + 2})
	if err != nil {
		_ = reports.Encode(started{Refused: execRefused(o.Program, err)})
		return exitRefused
	}
	ignoreSignals()
	if err := bond.of(pid); err != nil {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		_ = reap(pid, killChildren)
		_ = reports.Encode(started{Refused: refuse("steps", "pidfd_open: %v", err)})
		return exitRefused
	}
	for fd := range 3 {
		unix.Close(watchStreams + fd)
	}
	if err := reports.Encode(started{PID: pid}); err != nil {
		return exitRefused
	}
	exit := reap(pid, killChildren)
	bond.wake()
	_ = reports.Encode(exit)
	return 0
}

func killChildren() {
	for _, left := range children(os.Getpid()) {
		_ = syscall.Kill(left, syscall.SIGKILL)
	}
}

// bond is what a harness's life has to do with init's where init is not the first process: nil
// where it is.
type bond struct {
	// init is a pidfd; harness takes the harness's.
	init    int
	harness chan int
}

// tie begins to wait for the end of init, whose end of the orders then closes, and of the lifeline:
// the agent can stop init. The thread for that is there before the harness can use up what there may be.
func tie(init int) (*bond, error) {
	if init == 0 {
		return nil, nil
	}
	fd, err := unix.PidfdOpen(init, 0)
	if err == nil && os.Getppid() != init { // else the number may be another's
		err = unix.ESRCH
	}
	if err != nil {
		return nil, err
	}
	b := &bond{init: fd, harness: make(chan int, 1)}
	waits := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(waits)
		ends := []unix.PollFd{{Fd: watchOrders}, {Fd: watchLifeline}} // no events: POLLHUP alone
		for _, err := unix.Poll(ends, -1); errors.Is(err, unix.EINTR); _, err = unix.Poll(ends, -1) {
		}
		_ = unix.PidfdSendSignal(<-b.harness, unix.SIGKILL, nil, 0) // ESRCH: it has ended
	}()
	<-waits
	return b, nil
}

// of names the harness.
func (b *bond) of(pid int) error {
	if b == nil {
		return nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err == nil {
		b.harness <- fd
	}
	return err
}

// wake lets an init go on that the agent has stopped.
func (b *bond) wake() {
	if b != nil {
		_ = unix.PidfdSendSignal(b.init, unix.SIGCONT, nil, 0) // ESRCH: it is gone
	}
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
