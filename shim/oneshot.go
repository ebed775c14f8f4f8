package shim

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// runOneShot runs a container of agentshim's own, of that name, to its end. It ends with
// ctx only after that: a client killed while the engine creates a container leaves it behind.
func runOneShot(ctx context.Context, a Adapter, name string, argv []string) error {
	err := runBounded(context.WithoutCancel(ctx), a.Runner(), helperContainerTimeout, a.Command(argv...))
	if err == nil {
		return context.Cause(ctx)
	}
	return errors.Join(err, removeContainer(context.WithoutCancel(ctx), a, name))
}

// runBounded ends the command when it runs longer than timeout.
func runBounded(ctx context.Context, r Runner, timeout time.Duration, cmd Command) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer startCountdown(timeout, func() { cancel(fmt.Errorf("no end in %v", timeout)) }).stop()
	_, err := r.Run(ctx, cmd)
	return err
}
