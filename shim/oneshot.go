package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/spec"
)

// giveVolume ends with ctx only after the container: a client killed while the engine
// creates a container leaves it behind.
func (p *podman) giveVolume(ctx context.Context, plan spec.Plan, paths spec.RunPaths, c mounts.Cache) error {
	argv, err := plan.CacheArgv(paths, c)
	if err != nil {
		return asError(err)
	}
	if _, err = runBounded(context.WithoutCancel(ctx), p.runner, helperContainerTimeout, p.Command(argv...)); err == nil {
		return context.Cause(ctx)
	}
	return errors.Join(err, removeContainer(context.WithoutCancel(ctx), p, paths.CacheName(c)))
}

func (d *docker) giveVolume(ctx context.Context, plan spec.Plan, paths spec.RunPaths, c mounts.Cache) error {
	body, err := plan.CacheContainer(paths, c)
	if err != nil {
		return asError(err)
	}
	name := paths.CacheName(c)
	r, err := d.run(ctx, name, body, func(string) error { return nil })
	if err != nil {
		return err
	}
	defer r.close()
	if err = r.awaitEnd(helperContainerTimeout); err == nil {
		return context.Cause(ctx)
	}
	return errors.Join(err, removeContainer(context.WithoutCancel(ctx), d, name))
}

// awaitEnd waits for the end of a container that says nothing on standard output.
func (r *dockerRun) awaitEnd(timeout time.Duration) error {
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		_, _ = io.Copy(io.Discard, r.stdout())
	}()
	if !within(timeout, r.done()) {
		r.drop()
		return fmt.Errorf("no end in %v", timeout)
	}
	_ = within(time.Second, heard) // what it said last
	status, err := r.result()
	if err == nil && status.Code != 0 {
		err = &EngineError{Argv: []string{spec.Docker, "run"}, Stderr: r.said(), Err: status}
	}
	return err
}

// runBounded ends the command when it runs longer than timeout.
func runBounded(ctx context.Context, r Runner, timeout time.Duration, cmd Command) (Output, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer startCountdown(timeout, func() { cancel(fmt.Errorf("no end in %v", timeout)) }).stop()
	return r.Run(ctx, cmd)
}

// questionTimeout is for what an engine's client only asks, or notes. Podman's waits for locks,
// which a process of another that stands still may hold.
const questionTimeout = 2 * time.Minute

// runQuestion is runBounded with questionTimeout.
func runQuestion(ctx context.Context, r Runner, cmd Command) (Output, error) {
	return runBounded(ctx, r, questionTimeout, cmd)
}
