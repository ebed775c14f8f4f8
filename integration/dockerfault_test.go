package integration

import (
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentshim/agentshim/shim"
)

// made is the moment when Docker's daemon has made the container and not started it.
var made = phase{name: "made", at: "made", script: quietScript, reach: (*faulty).atGate}

// TestMadeNotStarted: a run that ends between the two calls leaves nothing; when its
// shim was killed, after the next run. A50.
func TestMadeNotStarted(t *testing.T) {
	Need(t)
	for i, end := range []struct {
		name string
		do   func(t *testing.T, r *faulty)
		code int
	}{
		{"shim killed", func(t *testing.T, r *faulty) { r.killer(t, "shim")() }, -1},
		{"connections cut", func(_ *testing.T, r *faulty) { r.proxy.cut() }, shim.ExitRefused},
		{"SIGTERM", func(t *testing.T, r *faulty) { noError(t, r.cmd.Process.Signal(syscall.SIGTERM)) }, 128 + int(syscall.SIGTERM)},
	} {
		t.Run(end.name, func(t *testing.T) {
			b := newFaultBench(t, setups[i%2]) // root, and the docker group
			r := b.begin(t, made)
			if list := r.listed(t); len(list) != 1 {
				t.Errorf("control: containers %q", list)
			}
			end.do(t, r)
			time.AfterFunc(time.Second, r.proxy.open) // a daemon that is only slow
			r.awaitEnd(t, endBound)
			if code := r.cmd.ProcessState.ExitCode(); code != end.code {
				t.Errorf("exit %d, want %d: %s", code, end.code, r.stderr.String())
			}
			r.release(t)
			r.clientGone(t)
			r.emptied(t, time.Now())
			if end.code < 0 {
				b.tidy(t)
			}
			r.unlaunched(t)
			r.forgotten(t)
		})
	}
}

// TestDaemonAnswers: whatever Docker's daemon says of a container that was asked for,
// nothing of the harness runs and nothing is left.
func TestDaemonAnswers(t *testing.T) {
	Need(t)
	s := setups[0]
	d := newDeviant(t, s)
	left := func() string {
		return s.bare(t, "ps", "-aq", "--filter", "label=agentshim.name="+d.label).ok(t).Stdout
	}
	broken := refuseCall(http.StatusInternalServerError, "broken")
	another := func(answer map[string]any) {
		answer["Id"] = strings.TrimSpace(s.bare(t, "create", "--rm", "agentshim/hello:test", "true").ok(t).Stdout)
	}
	answer := func(point string, h http.HandlerFunc) proxyRules {
		return proxyRules{answers: map[string]http.HandlerFunc{point: h}}
	}
	for _, row := range []struct {
		name  string
		rules proxyRules
	}{
		{"create: no id", proxyRules{created: func(answer map[string]any) { delete(answer, "Id") }}},
		{"create: no such id", proxyRules{created: func(answer map[string]any) { answer["Id"] = fakeID }}},
		{"create: a path", proxyRules{created: func(answer map[string]any) { answer["Id"] = "../images/create" }}},
		{"create: another's id", proxyRules{created: another}},
		{"create: no object", answer("create", replyWith(http.StatusCreated, "made"))},
		{"create: hung up", answer("create", hangUp)},
		{"attach: refused", answer("attach", broken)},
		{"attach: hung up", answer("attach", hangUp)},
		{"start: refused", answer("start", broken)},
		{"start: hung up", answer("start", hangUp)},
		{"wait: refused", answer("wait", broken)},
		{"wait: hung up", answer("wait", hangUp)},
	} {
		t.Run(row.name, func(t *testing.T) {
			d.proxy.rule(row.rules)
			r, started := d.launch(t)
			r.refused(t, shim.ReasonEngineFailed)
			if started || left() != "" {
				t.Errorf("the agent started: %v, containers left: %q", started, left())
			}
		})
	}
	t.Run("attach: no frames", func(t *testing.T) {
		d.proxy.rule(answer("attach", attachedTo([]byte("hello, world"))))
		begin := time.Now()
		r, started := d.launch(t)
		r.refused(t, shim.ReasonEngineLost)
		if started || left() != "" {
			t.Errorf("the agent started: %v, containers left: %q", started, left())
		}
		t.Logf("ended after %v", time.Since(begin).Round(time.Millisecond))
	})
	t.Run("control", func(t *testing.T) {
		d.proxy.rule(proxyRules{})
		if r, started := d.launch(t); r.Code != 0 || !started {
			t.Errorf("%+v", r)
		}
	})
}
