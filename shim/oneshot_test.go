package shim

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentshim/agentshim/spec"
)

// TestOneShotIsBounded: a client that hangs is ended, and so is one whose run ends.
func TestOneShotIsBounded(t *testing.T) {
	hang := Command{Path: "/bin/sleep", Args: []string{"100"}}
	if _, err := runBounded(t.Context(), Exec{}, 20*time.Millisecond, hang); err == nil || !strings.Contains(err.Error(), "no end in 20ms") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, err := runBounded(ctx, Exec{}, time.Minute, hang); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// stuckClient is an engine's client that waits for a lock that nobody lets go of.
type stuckClient struct{ Runner }

func (stuckClient) Run(ctx context.Context, c Command) (Output, error) {
	<-ctx.Done()
	return Output{}, &EngineError{Argv: c.Argv(), Err: context.Cause(ctx)}
}

// TestStuckClient: what is asked before a run, or by prune, is given up, and is no answer.
func TestStuckClient(t *testing.T) {
	p := &podman{runner: stuckClient{}, engine: spec.Engine{Kind: spec.Podman, Client: "/podman"}}
	o := ProbeOptions{Runner: p.runner, CacheDir: t.TempDir(), root: t.TempDir(), Getenv: func(string) string { return "" }}
	for name, question := range map[string]func(context.Context) error{
		"client":   func(ctx context.Context) error { _, err := clientKind(ctx, o, "/docker"); return err },
		"info":     func(ctx context.Context) error { _, err := podmanInfoOf(ctx, o, "/podman", "key"); return err },
		"runtime":  func(ctx context.Context) error { _, err := askRuntime(ctx, o, "/runc"); return err },
		"image":    func(ctx context.Context) error { _, err := p.inspectImage(ctx, "some"); return err },
		"network":  func(ctx context.Context) error { _, err := p.network(ctx, "some", false); return err },
		"another":  func(ctx context.Context) error { _, err := p.foreign(ctx, "some"); return err },
		"volumes":  func(ctx context.Context) error { _, err := volumes(ctx, p); return err },
		"leftover": func(ctx context.Context) error { _, err := removeByLabel(ctx, p, "id", true); return err },
		"program":  func(ctx context.Context) error { _, err := entrypointIsOurs(ctx, p, "id"); return err },
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			start := time.Now()
			if err := question(ctx); err == nil || ReasonOf(err) == ReasonInterrupted || time.Since(start) != questionTimeout {
				t.Errorf("%s: %v after %v", name, err, time.Since(start))
			}
		})
	}
}
