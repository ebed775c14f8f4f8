package shim

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
)

// scriptedCall is one command that a test expects and what it answers.
type scriptedCall struct {
	argv []string
	out  string
	err  error
	// check looks at the rest of the command.
	check func(*testing.T, Command)
}

// scriptedRunner answers the calls in their order. A call that isn't the next one
// fails the test at once, one that never came fails it at its end.
type scriptedRunner struct {
	t     *testing.T
	mu    sync.Mutex
	calls []scriptedCall
}

func script(t *testing.T, calls ...scriptedCall) *scriptedRunner {
	t.Helper()
	s := &scriptedRunner{t: t, calls: calls}
	t.Cleanup(func() {
		for _, c := range s.calls {
			t.Errorf("never called: %q", c.argv)
		}
	})
	return s
}

func (s *scriptedRunner) Run(_ context.Context, c Command) (Output, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.calls) == 0 || !slices.Equal(s.calls[0].argv, c.Argv()) {
		s.t.Errorf("unexpected call: %q", c.Argv())
		return Output{}, errors.New("unexpected call")
	}
	call := s.calls[0]
	s.calls = s.calls[1:]
	if call.check != nil {
		call.check(s.t, c)
	}
	return Output{Stdout: []byte(call.out)}, call.err
}

func (s *scriptedRunner) Start(_ context.Context, c Command) (Process, error) {
	s.t.Errorf("unexpected start: %q", c.Argv())
	return nil, errors.New("unexpected start")
}

// failedCall is what Exec returns for a client that wrote stderr and ended with code.
func failedCall(code int, stderr string, argv ...string) error {
	return &EngineError{Argv: argv, Stderr: stderr, Err: ExitStatus{Code: code}}
}
