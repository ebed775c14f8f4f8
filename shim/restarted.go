package shim

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/netpolicy"
)

// errRestarted says that somebody had the engine start the run's container once more: in
// namespaces of its own, for which nothing was proven and no rules were made.
var errRestarted = errors.New("somebody restarted the container")

// errKilled says that a signal ended init.
var errKilled = errors.New("a signal ended init")

// killedStatus is from where on an exit status is a signal's: init has no such one.
const killedStatus = 128

// life is what tells one start of a container from the next.
type life struct {
	id string
	// pid is init's as the host numbers it, where Docker's daemon told it, else 0.
	pid int
	// since is before the container was made.
	since time.Time
	ended <-chan struct{}
}

// awaitEnd waits for the end of a container whose streams have ended, but no longer than
// endTimeout. It may have been restarted instead.
func (c *container) awaitEnd() (ended, restarted bool) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	looked := make(chan struct{})
	go func() {
		defer close(looked)
		var err error
		if restarted, err = c.p.adapter.awaitEnd(ctx, life{c.id(), c.pid, c.since, c.engine.done()}); err != nil {
			c.p.job.Log("whether the container was restarted: %v", err)
		}
	}()
	within(endTimeout, looked)
	cancel()
	<-looked
	select {
	case <-c.engine.done():
		return true, restarted
	default:
		return false, restarted
	}
}

// watchInit lets go of an engine that is not done endTimeout after init's process: Podman's
// client stays for a container that was started once more, and says nothing.
func (c *container) watchInit() error {
	pid, err := c.hostPID()
	fd := -1
	if err == nil {
		fd, err = unix.PidfdOpen(pid, 0)
	}
	if err == nil {
		err = unix.SetNonblock(fd, true) // so that closing ends the wait
	}
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return &Error{Reason: ReasonEngineFailed, Msg: "init's process can't be watched", Err: err}
	}
	if fd >= 0 {
		c.init = os.NewFile(uintptr(fd), "init")
	}
	go func() {
		if awaitProcess(c.init) && !within(endTimeout, c.engine.done()) {
			c.engine.drop()
		}
	}()
	return nil
}

// awaitProcess waits until a pidfd's process is gone, which nil is: it is readable then
// (pidfd_open(2)). It reports false when the file was closed.
func awaitProcess(f *os.File) bool {
	if f == nil {
		return true
	}
	conn, err := f.SyscallConn()
	if err == nil {
		err = conn.Read(func(fd uintptr) bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0) //nolint:gosec // a descriptor
			return n > 0 && err == nil
		})
	}
	return err == nil
}

func restartedError() error {
	return &Error{
		Reason: ReasonPosture, Msg: "the run was ended", Err: errRestarted,
		Hint: "keep what restarts containers away from those named agentshim-…",
	}
}

// restartPoll is how often Docker's daemon is asked.
const restartPoll = 100 * time.Millisecond

// awaitEnd looks at the process: a container that is started once more is not removed in
// between, whatever was asked for, and its events may be forgotten.
func (d *docker) awaitEnd(ctx context.Context, l life) (restarted bool, err error) {
	for l.pid != 0 {
		var got dockerContainer
		err = d.api.get(ctx, "/containers/"+l.id+"/json", &got)
		if err == nil && got.State.Pid != 0 && got.State.Pid != l.pid {
			return true, nil
		}
		if errors.Is(err, errNotFound) {
			err = nil // what it was is what ended says
		}
		select {
		case <-l.ended:
			return false, err
		case <-ctx.Done():
			return false, err
		case <-time.After(restartPoll):
		}
	}
	select {
	case <-l.ended:
	case <-ctx.Done():
	}
	return false, nil
}

// awaitEnd asks for Podman's events: with --rm a container is often removed between its
// end and its start, and the pid file is written anew.
func (p *podman) awaitEnd(ctx context.Context, l life) (restarted bool, err error) {
	select {
	case <-l.ended:
	case <-ctx.Done():
		return false, nil
	}
	if !isContainerID(l.id) {
		return false, nil // there never was one, and an empty filter holds all
	}
	out, err := p.runner.Run(ctx, p.Command(
		"events", "--stream=false", "--since="+l.since.UTC().Format(time.RFC3339), "--filter=container="+l.id,
		"--filter=event=restart", "--format={{.Status}}",
	))
	return err == nil && len(out.Stdout) > 0, err
}

// egressFailed puts the log's error before what it led to, and what happened to the whole
// container before what that did to its network.
func egressFailed(run, egress error) error {
	switch {
	case errors.Is(run, errRestarted) && errors.Is(egress, netpolicy.ErrChanged),
		errors.Is(run, errKilled) && errors.Is(egress, netpolicy.ErrGone):
		return run
	case errors.Is(egress, ReasonEgressLost), errors.Is(egress, ReasonPosture):
		return egress
	}
	return errors.Join(run, egress)
}
