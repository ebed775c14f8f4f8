package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
)

func TestReasonsAreDocumentedOnce(t *testing.T) {
	seen := map[Reason]bool{}
	for _, info := range Reasons() {
		if seen[info.Reason] {
			t.Errorf("%s is listed twice", info.Reason)
		}
		seen[info.Reason] = true
		if !strings.HasSuffix(info.Doc, ".") || strings.ContainsAny(string(info.Reason), " :") {
			t.Errorf("%q: doc %q", info.Reason, info.Doc)
		}
		if info.Reason.Retryable() != info.Retry {
			t.Errorf("%s: Retryable is not what the list says", info.Reason)
		}
	}
	for _, r := range []Reason{
		ReasonSpecInvalid, ReasonEngineMissing, ReasonEngineDenied, ReasonEngineDown, ReasonEngineContext, ReasonEngineRemote,
		ReasonEngineMismatch, ReasonEngineUnsupported, ReasonEngineFailed, ReasonImageMissing, ReasonImagePlatform, ReasonImageUser, ReasonIdentity, ReasonOutputClosed, ReasonEgressLost,
		ReasonPullFailed, ReasonHarnessMissing, ReasonGap, ReasonWidening, ReasonPosture, ReasonEgressSetup, ReasonPublish, ReasonMount, ReasonGit, ReasonPolicy,
		ReasonEnvMissing, ReasonCredentials, ReasonPrompt, ReasonOutputFile, ReasonState, ReasonInitMissing, ReasonInitLost, ReasonEngineLost, ReasonTimeout, ReasonInterrupted, ReasonInternal,
		ReasonSession, ReasonSessionBusy, ReasonSessionLost, ReasonContainer,
	} {
		if !seen[r] {
			t.Errorf("%s is not in the list", r)
		}
		delete(seen, r)
	}
	if len(seen) != 0 {
		t.Errorf("listed but not tested: %v", seen)
	}
	if Reason("nonsense").Retryable() {
		t.Error("an unknown reason is retryable")
	}
}

func TestErrorChain(t *testing.T) {
	inner := &Error{Reason: ReasonPullFailed, Msg: "pull", Hint: "log in", Err: io.ErrUnexpectedEOF}
	outer := fmt.Errorf("image %q: %w", "x", inner)
	if got, want := outer.Error(), `image "x": pull: unexpected EOF`; got != want {
		t.Errorf("text %q, want %q", got, want)
	}
	for _, target := range []error{ReasonPullFailed, &Error{Reason: ReasonPullFailed}, io.ErrUnexpectedEOF} {
		if !errors.Is(outer, target) {
			t.Errorf("not %#v", target)
		}
	}
	for _, target := range []error{ReasonGap, &Error{Reason: ReasonGap}, &Error{Reason: ReasonPullFailed, Msg: "pull"}} {
		if errors.Is(outer, target) {
			t.Errorf("is %#v", target)
		}
	}
	wrapped := &Error{Reason: ReasonInternal, Err: outer}
	if ReasonOf(wrapped) != ReasonInternal || ReasonOf(outer) != ReasonPullFailed || ReasonOf(io.EOF) != ReasonInternal || ReasonOf(nil) != "" {
		t.Error("ReasonOf is not the outermost reason")
	}
	if HintOf(wrapped) != "log in" || HintOf(io.EOF) != "" || HintOf(nil) != "" {
		t.Errorf("hint %q", HintOf(wrapped))
	}
}

func TestEngineFailure(t *testing.T) {
	for _, tc := range []struct {
		name, stderr string
		want         Reason
		hint         string
	}{
		{"L06 full disk", "Error: writing blob: write /var/x: no space left on device", ReasonEngineFailed, "free space"},
		{"X01 rlimit", "Error: runc: runc create failed: error setting rlimit type 7: operation not permitted: OCI permission denied", ReasonEngineUnsupported, "nofile"},
		{"X03 crun", "Error: OCI runtime error: crun: cgroups in hybrid mode not supported, drop all controllers from cgroup v1 unified", ReasonEngineUnsupported, "runc"},
		{"daemon down", "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?\n", ReasonEngineDown, "systemctl start docker"},
		{"denied", "permission denied while trying to connect to the Docker daemon socket", ReasonEngineDenied, "usermod"},
		{"L08 locks", "Error: allocating lock: allocation failed; exceeded num_locks (2048)", ReasonEngineFailed, "num_locks"},
		{"unknown", "Error: something else", ReasonEngineFailed, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cause := &EngineError{Argv: []string{"/usr/bin/podman", "run"}, Stderr: tc.stderr, Err: ExitStatus{Code: 125}}
			err := EngineFailure(cause)
			if err.Reason != tc.want || !strings.Contains(err.Hint, tc.hint) || (tc.hint == "") != (err.Hint == "") {
				t.Errorf("%s, hint %q", err.Reason, err.Hint)
			}
			var status ExitStatus
			if !errors.As(err, &status) || status.Code != 125 {
				t.Error("the cause is lost")
			}
		})
	}
}

func TestEngineErrorText(t *testing.T) {
	for _, tc := range []struct {
		name string
		err  EngineError
		want string
	}{
		{"verb behind global flags", EngineError{Argv: []string{"/usr/bin/docker", "--host", "unix:///x", "--config", "/e", "run", "-i"}, Err: ExitStatus{Code: 125}}, "docker run: exit status 125"},
		{"last line that says something", EngineError{Argv: []string{"/usr/bin/podman", "--remote=false", "pull"}, Stderr: "a\nError: b\n\nSee 'podman pull --help'\n", Err: ExitStatus{Code: 1}}, "podman pull: exit status 1: Error: b"},
		{"terminal controls", EngineError{Argv: []string{"/x"}, Stderr: "\x1b]0;title\x07red\u202e\x9b", Err: ExitStatus{Code: -1, Signal: 9}}, "x: ended by signal SIGKILL: ]0;title red ?"},
		{"no argv", EngineError{Err: io.EOF}, "command: EOF"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := tc.err.Error(); got != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
	if got := printable(strings.Repeat("ä", 1000)); len(got) > maxLine+len("…") {
		t.Errorf("a line of %d bytes", len(got))
	}
}

func TestExitCode(t *testing.T) {
	reason := func(r Reason, err error) error { return fmt.Errorf("run: %w", &Error{Reason: r, Err: err}) }
	for _, tt := range []struct {
		name string
		err  error
		want int
	}{
		{"none", nil, 0},
		{"without a reason", io.EOF, 125},
		{"refused", reason(ReasonGap, nil), 125},
		{"timeout", reason(ReasonTimeout, nil), 124},
		{"timeout and a lost engine", reason(ReasonTimeout, reason(ReasonEngineLost, nil)), 124},
		{"signal", reason(ReasonInterrupted, SignalError{syscall.SIGTERM}), 143},
		{"ended by the caller's context", reason(ReasonInterrupted, context.Canceled), 125},
		{"signal with another reason", reason(ReasonMount, SignalError{syscall.SIGTERM}), 125},
		{"reader gone", reason(ReasonOutputClosed, &os.PathError{Err: syscall.EPIPE}), 141},
		{"terminal gone", reason(ReasonOutputClosed, syscall.EIO), 141},
		{"disk full", reason(ReasonOutputClosed, syscall.ENOSPC), 125},
		{"broken pipe of the engine's", reason(ReasonEngineLost, syscall.EPIPE), 125},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := ExitCode(tt.err); got != tt.want {
				t.Errorf("%d, want %d", got, tt.want)
			}
		})
	}
}
