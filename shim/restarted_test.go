package shim

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/spec"
)

// TestDockerRestarted: a container that runs as another process was started once more; one
// that is on its way out, or of which the daemon says nothing, was not.
func TestDockerRestarted(t *testing.T) {
	for name, c := range map[string]struct {
		pids      []int // as they are told, one after another; the last one stays
		restarted bool
	}{
		"restarted":               {[]int{7, 0, 0, 8}, true},
		"gone":                    {[]int{7, 0, -404}, false},
		"not told":                {[]int{-500}, false},
		"stopped and not gone":    {[]int{7, 0}, false},
		"the same, still":         {[]int{7}, false},
		"told only after a while": {[]int{-500, -500, 8}, true},
	} {
		t.Run(name, func(t *testing.T) {
			var asked atomic.Int64
			h := func(w http.ResponseWriter, _ *http.Request) {
				pid := c.pids[min(int(asked.Add(1)), len(c.pids))-1]
				if pid < 0 {
					http.Error(w, `{"message":"no"}`, -pid)
					return
				}
				fmt.Fprintf(w, `{"State":{"Pid":%d}}`, pid)
			}
			d := &docker{api: newDockerAPI(startDaemon(t, map[string]http.HandlerFunc{"/v1.41/containers/x/json": h, "/containers/x/json": h}).socket)}
			ended := make(chan struct{})
			time.AfterFunc(5*restartPoll, func() { close(ended) })
			if got, _ := d.awaitEnd(t.Context(), life{id: "x", pid: 7, ended: ended}); got != c.restarted {
				t.Errorf("%v", got)
			}
		})
	}
}

// TestPodmanRestarted: Podman is asked when its client has ended, and what it may not tell
// is an error.
func TestPodmanRestarted(t *testing.T) {
	id := strings.Repeat("a1", 32)
	argv := []string{
		"/podman", "events", "--stream=false", "--since=2026-11-30T08:00:00Z", "--filter=container=" + id, "--filter=event=restart", "--format={{.Status}}",
	}
	p := &podman{engine: spec.Engine{Kind: spec.Podman, Client: "/podman"}}
	p.runner = script(
		t, scriptedCall{argv: argv, out: "restart\n"}, scriptedCall{argv: argv},
		scriptedCall{argv: argv, out: "restart\n", err: failedCall(125, "permission denied")},
	)
	l := life{id: id, since: time.Date(2026, 11, 30, 8, 0, 0, 5, time.UTC), ended: make(chan struct{})}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if got, err := p.awaitEnd(over, l); got || err != nil {
		t.Errorf("before its end: %v %v", got, err)
	}
	ended := make(chan struct{})
	close(ended)
	l.ended = ended
	if got, err := p.awaitEnd(t.Context(), life{ended: ended}); got || err != nil {
		t.Errorf("never made: %v %v", got, err)
	}
	for i, want := range []bool{true, false, false} {
		if got, err := p.awaitEnd(t.Context(), l); got != want || (err != nil) != (i == 2) {
			t.Errorf("%d: %v %v", i, got, err)
		}
	}
}

// TestEgressFailed: what happened to the container says more than what that did to its
// network, and nothing else hides what happened to the network.
func TestEgressFailed(t *testing.T) {
	restarted, killed := restartedError(), &Error{Reason: ReasonInitLost, Err: errKilled}
	lost := &Error{Reason: ReasonInitLost}
	posture := func(err error) error { return &Error{Reason: ReasonPosture, Err: err} }
	changed, gone, log := posture(netpolicy.ErrChanged), posture(netpolicy.ErrGone), &Error{Reason: ReasonEgressLost}
	for _, c := range []struct{ run, egress, want error }{
		{restarted, changed, restarted},
		{restarted, gone, restarted},
		{restarted, log, log},
		{restarted, nil, restarted},
		{killed, gone, killed},
		{killed, changed, changed},
		{killed, log, log},
		{lost, gone, gone},
		{lost, changed, changed},
		{nil, gone, gone},
		{lost, nil, lost},
	} {
		if got := egressFailed(c.run, c.egress); !errors.Is(got, c.want) {
			t.Errorf("%v, %v: %v", c.run, c.egress, got)
		}
	}
}

// TestAwaitProcess: a process's end is noticed, also by who is not its parent, and closing
// ends the wait.
func TestAwaitProcess(t *testing.T) {
	if !awaitProcess(nil) {
		t.Error("nil is a process that is gone")
	}
	for _, kill := range []bool{true, false} {
		cmd := exec.Command("sleep", "60")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		fd, err := unix.PidfdOpen(cmd.Process.Pid, 0)
		if err == nil {
			err = unix.SetNonblock(fd, true)
		}
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "pidfd")
		gone := make(chan bool)
		go func() { gone <- awaitProcess(f) }()
		select {
		case <-gone:
			t.Error("it is not gone yet")
		case <-time.After(20 * time.Millisecond):
		}
		if kill {
			err = cmd.Process.Kill()
		} else {
			err = f.Close()
		}
		if got := <-gone; got != kill || err != nil {
			t.Errorf("killed %v: %v %v", kill, got, err)
		}
		f.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

// TestWatchInitRefused: a run whose init can't be watched does not go on.
func TestWatchInitRefused(t *testing.T) {
	for name, pid := range map[string]string{"no file": "", "no number": "x"} {
		c := &container{p: &prepared{}, paths: spec.RunPaths{Dir: t.TempDir()}}
		c.p.plan.Engine.Kind = spec.Podman
		if pid != "" {
			if err := os.WriteFile(c.paths.PIDFile(), []byte(pid), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.watchInit(); !errors.Is(err, ReasonEngineFailed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
