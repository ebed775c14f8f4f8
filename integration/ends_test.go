package integration

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// P15: timeout ends a run with 124, whatever the harness makes of it.
func TestTimeout(t *testing.T) {
	bothWays(t, func(t *testing.T, s setup) {
		for _, tc := range []struct {
			name    string
			timeout string
			script  string
			code    int
			reason  shim.Reason
			cause   shim.Cause
			signal  string
			harness int // its own status
		}{
			{"dies", "1s", "echo ready; exec sleep 300", 124, shim.ReasonTimeout, shim.CauseSignal, "SIGTERM", 143},
			{"ends well", "1s", "trap 'exit 0' TERM; echo ready; while :; do sleep 0.1; done", 124, shim.ReasonTimeout, shim.CauseSignal, "SIGTERM", 0},
			{"ignores it", "1s", deaf, 124, shim.ReasonTimeout, shim.CauseKilled, "SIGTERM", 137},
			// The control run.
			{"in time", "40s", "echo ready; sleep 1.5; exit 9", 9, "", shim.CauseItself, "", 9},
		} {
			if tc.name != "dies" && !s.full() {
				continue
			}
			t.Run(tc.name, func(t *testing.T) {
				start := time.Now()
				b := s.begin(t, spec{"timeout": tc.timeout, "stopGrace": "1s"}, tc.script)
				_, rec := b.ended(t, tc.code)
				wantEnd(t, rec, tc.reason, tc.cause, tc.signal)
				if d := time.Since(start); d < time.Second || d > 15*time.Second {
					t.Errorf("took %v", d)
				}
				if rec.Harness == nil {
					t.Fatal("no harness in the record")
				}
				if status, err := rec.Harness.Status(); status != tc.harness || err != nil {
					t.Errorf("the harness's own status is %d, want %d", status, tc.harness)
				}
				if said := strings.Contains(b.stderr.String(), "agentshim: timeout: "); said != (tc.reason != "") {
					t.Errorf("said: %s", b.stderr.String())
				}
			})
		}
	})
}

// P09: a reader of standard output that goes away ends the run, whether the harness
// writes or not. Standard error's does not.
func TestClosedOutput(t *testing.T) {
	bothWays(t, func(t *testing.T, s setup) {
		for _, tc := range []struct{ name, script string }{
			{"while it writes", "while :; do echo ready; done"},
			{"while it is silent", "echo ready; sleep 300"},
		} {
			if tc.name == "while it is silent" && !s.full() {
				continue
			}
			file := filepath.Join(s.private(t), "result.json")
			script := fmt.Sprintf(`{ "$0" exec --quiet %s --result %s -- '%s'; echo "code $?" >&2; } | head -n1`, s.targetText(t), file, tc.script)
			cmd, cancel := s.command(t, call{Timeout: 30 * time.Second}, "/bin/sh", "-c", script, agentshim)
			r := finish(t, cmd)
			cancel()
			wantText(t, r.Stderr, "code 141\n", "agentshim: output-closed: ")
			rec := readRecord(t, file)
			if r.Stdout != "ready\n" || rec.Exit != 141 || rec.Reason != shim.ReasonOutputClosed {
				t.Errorf("%s: %+v, record: exit %d %q", tc.name, r, rec.Exit, rec.Reason)
			}
			(&begun{setup: s}).gone(t, rec)
		}
		if !s.full() {
			return
		}
		t.Run("standard error", func(t *testing.T) {
			script := fmt.Sprintf(`exec 3>&1; { "$0" exec --quiet %s -- '%s' 2>&1 >&3; echo "code $?" >&3; } | head -n1 >&2`,
				s.targetText(t), "i=0; while [ $i -lt 9000 ]; do echo 0123456789012345678901234567890123456789012345678901234567890123456789 >&2; i=$((i+1)); done; echo out; exit 6")
			cmd, cancel := s.command(t, call{Timeout: 30 * time.Second}, "/bin/sh", "-c", script, agentshim)
			defer cancel()
			if r := finish(t, cmd); r.Stdout != "out\ncode 6\n" {
				t.Errorf("%+v", r)
			}
		})
		t.Run("full disk", func(t *testing.T) {
			full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer full.Close()
			cmd, cancel := s.command(t, call{Timeout: 30 * time.Second}, agentshim, "exec", "--quiet", "--spec", s.write(t, nil), "--", "echo x; sleep 20")
			defer cancel()
			var stderr strings.Builder
			cmd.Stdout, cmd.Stderr = full, &stderr
			_ = cmd.Run()
			if cmd.ProcessState.ExitCode() != 125 || !strings.Contains(stderr.String(), "agentshim: output-closed: ") {
				t.Errorf("exit %d: %s", cmd.ProcessState.ExitCode(), &stderr)
			}
		})
	})
}

// A reader that stands still can't keep a run that is asked to end.
func TestStuckReader(t *testing.T) {
	someBothWays(t, func(t *testing.T, s setup) {
		b := s.begin(t, spec{"stopGrace": "1s"}, "trap 'exit 5' TERM; echo ready; cat /dev/zero & wait")
		time.Sleep(500 * time.Millisecond) // the pipe and the window fill up
		start := time.Now()
		b.signal(t, unix.SIGTERM)
		rec := b.over(t, 5)
		wantEnd(t, rec, "", shim.CauseSignal, "SIGTERM")
		if d := time.Since(start); d > 10*time.Second {
			t.Errorf("took %v", d)
		}
	})
}

// P15: a kill by the kernel for lack of memory, and one by someone else.
func TestOOM(t *testing.T) {
	some(t, func(t *testing.T, s setup) {
		t.Run("someone's kill", func(t *testing.T) {
			_, rec := s.begin(t, nil, "echo ready; kill -9 $$").ended(t, 137)
			wantEnd(t, rec, "", shim.CauseUnknown, "")
		})
		if s.rootless() {
			return // no memory limit here: the gap rootless-cgroup-limits
		}
		fields := small(spec{})
		fields["resources"] = map[string]any{"shmMb": 8, "memoryMb": 128}
		b := s.begin(t, fields, "echo ready; exec tail /dev/zero")
		_, rec := b.ended(t, 137)
		wantEnd(t, rec, "", shim.CauseOOM, "")
		if rec.Harness == nil || rec.Harness.OOMKills < 1 {
			t.Errorf("no evidence: %+v", rec.Harness)
		}
	})
}

// Exit codes that a caller chose for what a retry can help with.
func TestTemporaryCode(t *testing.T) {
	one(t, func(t *testing.T, s setup) {
		for _, tc := range []struct {
			name    string
			answers map[string]http.HandlerFunc
			fields  spec
			code    int
		}{
			{"a retry can help", map[string]http.HandlerFunc{"create": refuseCall(http.StatusInternalServerError, "broken")}, nil, 75},
			{"it can't", nil, spec{"harness": map[string]any{"binary": "/nope"}}, 125},
		} {
			p := newDockerProxy(t, s)
			p.rule(proxyRules{answers: tc.answers})
			r := s.call(t, call{Env: []string{p.env()}}, "exec", "--temporary-code", "75", "--spec", s.write(t, tc.fields), "--", "x")
			if r.Code != tc.code {
				t.Errorf("%s: exit %d, want %d: %s", tc.name, r.Code, tc.code, r.Stderr)
			}
		}
	})
}
