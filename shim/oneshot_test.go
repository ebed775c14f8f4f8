package shim

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

// TestOneShotIsBounded: a client that hangs is ended, and so is one whose run ends.
func TestOneShotIsBounded(t *testing.T) {
	hang := Command{Path: "/bin/sleep", Args: []string{"100"}}
	if err := runBounded(t.Context(), Exec{}, 20*time.Millisecond, hang); err == nil || !strings.Contains(err.Error(), "no end in 20ms") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	if err := runBounded(ctx, Exec{}, time.Minute, hang); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
