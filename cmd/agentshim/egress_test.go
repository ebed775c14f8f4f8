package main

import (
	"context"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/shim"
)

func startTail(t *testing.T, ctx context.Context, find func() (string, shim.RunInfo, error)) (next func() string, ended <-chan error) {
	t.Helper()
	r, w := io.Pipe()
	out := make(chan string)
	go func() {
		defer close(out)
		for {
			b := make([]byte, 1<<16)
			n, err := r.Read(b)
			if err != nil {
				return
			}
			out <- string(b[:n])
		}
	}()
	done := make(chan error, 1)
	go func() {
		tail := logTail{out: w, find: find}
		done <- tail.follow(ctx, true)
		w.Close()
	}()
	return func() string {
		t.Helper()
		select {
		case line := <-out:
			return line
		case <-time.After(10 * time.Second):
			t.Fatal("nothing comes")
			return ""
		}
	}, done
}

// TestTailFollows a run from before its log exists to its end.
func TestTailFollows(t *testing.T) {
	path := filepath.Join(t.TempDir(), "egress.jsonl")
	states := make(chan shim.RunState, 1)
	states <- shim.RunRunning
	missing := make(chan struct{})
	find := func() (string, shim.RunInfo, error) {
		state := <-states
		states <- state
		run := shim.RunInfo{State: state}
		select {
		case <-missing:
			return path, run, nil
		default:
			return path, run, &shim.Error{Reason: shim.ReasonState, Err: shim.ErrNoEgressLog}
		}
	}
	next, ended := startTail(t, t.Context(), find)
	time.Sleep(tailInterval) // at least one look finds no log
	l, err := netpolicy.CreateLog(path, "run", time.Now)
	if err != nil {
		t.Fatal(err)
	}
	close(missing)
	if line := next(); !strings.Contains(line, "log of run run") {
		t.Error(line)
	}
	if err := l.Write(netpolicy.Event{Kind: netpolicy.EventName, Name: "evil.example.org", Verdict: netpolicy.Verdict{Reason: netpolicy.RefusedUnlisted}}); err != nil {
		t.Fatal(err)
	}
	if line := next(); !strings.HasSuffix(line, "refused  name evil.example.org: unlisted\n") {
		t.Error(line)
	}
	if _, err := l.Close(); err != nil {
		t.Fatal(err)
	}
	<-states
	states <- shim.RunEnded
	if line := next(); !strings.Contains(line, "end: 0 allowed, 1 refused") {
		t.Error(line)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestTailInterrupted: Ctrl-C ends it, with nothing to say.
func TestTailInterrupted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "egress.jsonl")
	if _, err := netpolicy.CreateLog(path, "run", time.Now); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	next, ended := startTail(t, ctx, func() (string, shim.RunInfo, error) {
		return path, shim.RunInfo{State: shim.RunRunning}, nil
	})
	next()
	cancel(shim.SignalError{Signal: syscall.SIGINT})
	var exit exitError
	if err := <-ended; !errors.As(err, &exit) || exit != 130 {
		t.Error(err)
	}
}

// TestTailDenyAll: a run that never has a log is not waited for.
func TestTailDenyAll(t *testing.T) {
	run := shim.RunInfo{State: shim.RunRunning}
	run.Egress = &shim.EgressRecord{Mode: netpolicy.DenyAll}
	tail := logTail{find: func() (string, shim.RunInfo, error) {
		return "", run, &shim.Error{Reason: shim.ReasonState, Err: shim.ErrNoEgressLog}
	}}
	if err := tail.follow(t.Context(), true); !errors.Is(err, shim.ErrNoEgressLog) {
		t.Error(err)
	}
}
