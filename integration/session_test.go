package integration

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// step runs a script as a step of a session.
func (s setup) step(t *testing.T, c call, id, script string, flags ...string) result {
	t.Helper()
	args := append([]string{"exec", "--quiet", "--session", id}, flags...)
	return s.call(t, c, append(args, "--", script)...)
}

// inBackground starts a script as a step and returns once it has printed ready.
func (s setup) inBackground(t *testing.T, id, script string) *begun {
	t.Helper()
	b := s.started(t, call{}, []string{"--session", id}, script)
	if line, err := b.out.ReadString('\n'); line != "ready\n" {
		t.Fatalf("first line %q, %v; %s", line, err, b.stderr.String())
	}
	return b
}

// here says whether the session's container is there.
func (s setup) here(t *testing.T, id string) bool {
	t.Helper()
	return s.bare(t, "ps", "-aq", "--filter", "name=agentshim-"+id).ok(t).Stdout != ""
}

// proven says whether the session's container is, after which its keeper makes the socket.
func (s setup) proven(t *testing.T, id string) bool {
	t.Helper()
	_, err := os.Lstat(filepath.Join(s.runtimeDir(t), id, "keeper.sock"))
	return err == nil
}

// goneSoon fails t unless the session's container goes by itself.
func (s setup) goneSoon(t *testing.T, id string) {
	t.Helper()
	eventually(t, "the container goes", func() bool { return !s.here(t, id) })
}

// TestSession: one container for many steps, from its start to its end.
func TestSession(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		state, dir := s.private(t), s.folder(t)
		file := s.write(t, spec{"workspace": map[string]any{"source": dir, "mode": "writable"}, "stopGrace": "2s"})
		name := "work-" + s.name
		id := s.upHoldsNothing(t, state, file, name)
		x, ok := s.find(t, id)
		if !ok || x.State != shim.SessionReady || x.Name != name || x.Engine != s.engine || x.Steps != 0 {
			t.Errorf("ps: %+v", x)
		}
		t.Run("the name is taken", func(t *testing.T) {
			s.call(t, call{}, "up", "--spec", file, "--name", name).refused(t, shim.ReasonSession)
		})
		t.Run("steps share files and meet", func(t *testing.T) {
			b := s.inBackground(t, id, "echo one >/tmp/one; echo ready; until [ -e /tmp/two ]; do sleep 0.05; done; cat /tmp/two; exit 3")
			s.step(t, call{}, name, "cat /tmp/one ~/none 2>/dev/null; echo two >/tmp/two; echo x >file").ok(t)
			if rest, rec := b.ended(t, 3); rest != "two\n" || rec.Session == nil || rec.Session.ID != id || rec.Harness.Code != 3 {
				t.Errorf("%q %+v", rest, rec.Session)
			}
			if got := string(mustRead(t, filepath.Join(dir, "file"))); got != "x\n" {
				t.Errorf("the workspace has %q", got)
			}
		})
		t.Run("a step has its own", func(t *testing.T) {
			c := call{Env: []string{"MINE=it's \"mine\""}}
			if r := s.step(t, c, id, `echo "[$MINE] $PWD"`, "--env", "MINE", "--working-dir", "/tmp"); r.Stdout != "[it's \"mine\"] /tmp\n" {
				t.Errorf("%+v", r)
			}
			if r := s.step(t, c, id, `echo "[$MINE] $PWD"`); r.Stdout != "[] /workspace\n" {
				t.Errorf("control: %+v", r)
			}
			if r := s.step(t, c, id, "sleep 300", "--timeout", "1s"); r.Code != shim.ExitTimeout {
				t.Errorf("%+v", r)
			}
			s.step(t, call{}, id, "true", "--env", "UNSET_HERE").refused(t, shim.ReasonEnvMissing)
			s.step(t, call{}, id, "true", "--env", "HOME").refused(t, shim.ReasonSpecInvalid)
			s.step(t, call{}, id, "true", "--working-dir", "/no/such").refused(t, shim.ReasonMount)
			s.step(t, call{}, id, "true", "--image", "x").refused(t, shim.ReasonSpecInvalid)
			s.call(t, call{}, "exec", "--session", id, "--command", "--", "/no/such").refused(t, shim.ReasonHarnessMissing)
			s.step(t, call{}, "no-such-session", "true").refused(t, shim.ReasonSession)
		})
		t.Run("what watches a step is out of its reach", func(t *testing.T) {
			look := "for f in fd/1 mem maps environ; do cat <%[1]s/$f >/dev/null 2>&1 && echo reads $f; done; echo 0 2>/dev/null >%[1]s/oom_score_adj && echo writes; true"
			if r := s.step(t, call{}, id, fmt.Sprintf(look, "/proc/$PPID")).ok(t); r.Stdout != "" {
				t.Errorf("%q", r.Stdout)
			}
			control := "sleep 5 >/dev/null & sleep 0.3; " + fmt.Sprintf(look, "/proc/$!") + "; kill $!"
			if r := s.step(t, call{}, id, control).ok(t); r.Stdout != "reads fd/1\nreads maps\nreads environ\nwrites\n" {
				t.Errorf("control: %q", r.Stdout)
			}
		})
		t.Run("a step that fills the container", func(t *testing.T) {
			// 2 is the shell's where it can't fork; rootless there is no limit here.
			if r := s.step(t, call{}, id, "i=0; while [ $i -lt 600 ]; do sleep 100 & i=$((i+1)); done; exit 5"); r.Code != 2 && r.Code != 5 {
				t.Errorf("%+v", r)
			}
			if r := s.step(t, call{}, id, "exit 6"); r.Code != 6 {
				t.Errorf("afterwards: %+v", r)
			}
		})
		t.Run("nothing of a step is in its keeper", func(t *testing.T) { s.keepsNoSecret(t, state, id, x.PID) })
		t.Run("what a step costs goes with it", func(t *testing.T) { s.manySteps(t, id, x.PID) })

		b := s.inBackground(t, id, "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.1; done")
		s.call(t, call{State: state}, "down", name).ok(t)
		if s.here(t, id) {
			t.Error("down returned before the container was gone")
		}
		if rest, _ := b.ended(t, 5); rest != "bye\n" {
			t.Errorf("the step said %q", rest)
		}
		if _, ok := s.find(t, id); ok {
			t.Error("ps still has it")
		}
		rec := sessionRecord(t, state, id)
		if rec.Exit != 0 || rec.Reason != "" || rec.Session == nil || rec.Session.Ended != "down" || rec.Session.Steps < 20 {
			t.Errorf("%+v, exit %d %s", rec.Session, rec.Exit, rec.Reason)
		}
		s.call(t, call{State: state}, "down", id).ok(t)
		gone := s.call(t, call{State: state}, "down", name).refused(t, shim.ReasonSession)
		wantText(t, gone.Stderr, "no such session any more: "+id+" ended at ", ": down")
		s.step(t, call{}, id, "true").refused(t, shim.ReasonSession)
	})
}

// upHoldsNothing starts a session and fails t unless the output ends with up, which
// printed nothing but the id.
func (s setup) upHoldsNothing(t *testing.T, state, file, name string) string {
	t.Helper()
	cmd, cancel := s.command(t, call{State: state}, agentshim, "up", "--quiet", "--spec", file, "--name", name)
	defer cancel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = w, w, []*os.File{w}
	if err := errors.Join(cmd.Start(), w.Close()); err != nil {
		t.Fatal(err)
	}
	_ = r.SetReadDeadline(time.Now().Add(time.Minute))
	out, err := io.ReadAll(r)
	if err != nil {
		t.Errorf("the output does not end: %v", err)
	}
	if err := cmd.Wait(); err != nil || len(out) != 17 || out[16] != '\n' {
		t.Fatalf("%v: %q", err, out)
	}
	id := string(out[:16])
	t.Cleanup(func() { s.call(t, call{}, "down", id) })
	return id
}

// keepsNoSecret runs a step with a secret variable and prompt, and looks at what everyone
// may see of the keeper and of init.
func (s setup) keepsNoSecret(t *testing.T, state, id string, keeper int) {
	const secret = "s3cr3t-of-a-step"
	r := s.step(t, call{Env: []string{"TOKEN=" + secret}, Stdin: strings.NewReader(secret)}, id, `echo "$TOKEN" | wc -c`, "--env", "TOKEN").ok(t)
	if strings.TrimSpace(r.Stdout) != strconv.Itoa(len(secret)+1) {
		t.Errorf("the step has no secret: %+v", r)
	}
	looked := map[string]string{"log": string(mustRead(t, filepath.Join(state, "agentshim/runs", id, "keeper.log")))}
	for _, name := range []string{"cmdline", "environ"} {
		looked[name] = string(mustRead(t, fmt.Sprintf("/proc/%d/%s", keeper, name)))
	}
	looked["inspect"] = s.bare(t, "inspect", "agentshim-"+id).ok(t).Stdout
	for where, text := range looked {
		if strings.Contains(text, secret) || where == "environ" && text != "" {
			t.Errorf("%s: %q", where, text)
		}
	}
	if string(looked["cmdline"]) != "agentshim\x00keep\x00" {
		t.Errorf("command line %q", looked["cmdline"])
	}
}

// counts are what a process holds, its memory in KiB.
type counts struct{ fds, threads, memory int }

func countOf(t *testing.T, pid int) counts {
	t.Helper()
	n := func(what string) int {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, what))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	return counts{n("fd"), n("task"), memoryOf(t, pid)}
}

// holder is a process that a session's steps pass through, and what it may hold more after
// many than after the first ones: the runtime of Go keeps threads and memory that were in
// use at one time.
type holder struct {
	name  string
	pid   int
	spare counts
}

// holders are the session's keeper and init, and the engine's process between them: on
// Docker the daemon, which others use too, else the container's monitor.
func (s setup) holders(t *testing.T, id string, keeper int) []holder {
	t.Helper()
	name := "agentshim-" + id
	init := mustInt(t, strings.TrimSpace(s.bare(t, "inspect", "--format", "{{.State.Pid}}", name).ok(t).Stdout))
	list := []holder{{"keeper", keeper, counts{1, 6, 6 << 10}}, {"init", init, counts{1, 6, 4 << 10}}}
	if s.engine == "docker" {
		pid := mustInt(t, strings.TrimSpace(string(mustRead(t, "/var/run/docker.pid"))))
		return append(list, holder{"dockerd", pid, counts{20, 20, 60 << 10}})
	}
	return append(list, holder{"conmon", s.monitor(t, id), counts{0, 0, 1 << 10}})
}

// monitor is conmon's process for a session's container.
func (s setup) monitor(t *testing.T, id string) int {
	t.Helper()
	for _, pid := range processes(t, "cmdline", "agentshim-"+id) {
		if comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); string(comm) == "conmon\n" {
			return pid
		}
	}
	t.Fatal("no conmon")
	return 0
}

// manySteps runs steps, some of them at a time, and fails t where what they pass through
// holds more after them than after the first ones.
func (s setup) manySteps(t *testing.T, id string, keeper int) {
	n, atOnce := 20, 4
	if s.full() || soaking() {
		n, atOnce = 500, 50
	}
	run := func(n int) {
		var all sync.WaitGroup
		for range n {
			all.Go(func() {
				if r := s.step(t, call{}, id, "(sleep 100 &); echo x; exit 4"); r.Code != 4 || r.Stdout != "x\n" {
					t.Errorf("%+v", r)
				}
			})
		}
		all.Wait()
	}
	run(atOnce)
	holders, before := s.holders(t, id, keeper), map[string]counts{}
	for _, h := range holders {
		before[h.name] = countOf(t, h.pid)
	}
	for range n/atOnce - 1 {
		run(atOnce)
	}
	for _, h := range holders {
		b, after := before[h.name], counts{}
		// A client is gone a moment before its connection is.
		eventually(t, h.name+" holds no more than before", func() bool {
			after = countOf(t, h.pid)
			return after.fds <= b.fds+h.spare.fds && after.threads <= b.threads+h.spare.threads && after.memory <= b.memory+h.spare.memory
		})
		t.Logf("%s: %+v, then %+v", h.name, b, after)
	}
	if kib := memoryOf(t, keeper); kib > 25<<10 {
		t.Errorf("the keeper has %d KiB of memory", kib)
	}
}

// memoryOf is a process's resident memory without what it shares with its file, in KiB.
func memoryOf(t *testing.T, pid int) int {
	t.Helper()
	for line := range strings.Lines(string(mustRead(t, fmt.Sprintf("/proc/%d/status", pid)))) {
		if f := strings.Fields(line); f[0] == "RssAnon:" {
			return mustInt(t, f[1])
		}
	}
	t.Fatal("no RssAnon")
	return 0
}

// hidden are processes that left their step's group, session, parents and environment.
const hidden = `(setsid sh -c '(trap "" TERM HUP INT; exec env -i /bin/sleep 4242) &' &); (trap '' HUP; exec sleep 4242 >/dev/null 2>&1 &); `

// sleepers counts them.
const sleepers = `n=0; for f in /proc/[0-9]*/cmdline; do tr '\0' ' ' <$f 2>/dev/null | grep -q 'slee[p] 4242' && n=$((n+1)); done; echo $n`

// TestStepCancelled: all processes of a step end with it, wherever they went, and no
// other step's.
func TestStepCancelled(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		id := s.up(t, call{}, s.write(t, spec{"stopGrace": "1s"}))
		other := s.inBackground(t, id, "echo ready; sleep 300; exit 3")
		for _, tc := range []struct {
			name string
			sig  syscall.Signal
			code int
		}{
			{"TERM", unix.SIGTERM, 143},
			{"KILL", unix.SIGKILL, -1},
		} {
			t.Run(tc.name, func(t *testing.T) {
				b := s.inBackground(t, id, hidden+"echo ready; exec sleep 300")
				count := func() string { return strings.TrimSpace(s.step(t, call{}, id, sleepers).ok(t).Stdout) }
				eventually(t, "both hide", func() bool { return count() == "2" })
				b.signal(t, tc.sig)
				<-b.waited
				if code := b.cmd.ProcessState.ExitCode(); code != tc.code {
					t.Errorf("exit %d: %s", code, b.stderr.String())
				}
				if tc.sig == unix.SIGTERM {
					if n := count(); n != "0" {
						t.Errorf("%s processes are left", n)
					}
				}
				eventually(t, "none is left", func() bool { return count() == "0" })
			})
		}
		other.signal(t, unix.SIGTERM)
		other.ended(t, 143)
	})
}

// TestSessionEnds: whatever ends a session ends its container, and its steps know.
func TestSessionEnds(t *testing.T) {
	kill := func(pid int, sig syscall.Signal) error { return unix.Kill(pid, sig) }
	each(t, func(t *testing.T, s setup) {
		for _, tc := range []struct {
			name    string
			all     bool
			session any
			do      func(t *testing.T, id string, keeper int) error
			code    int
			step    shim.Reason
			reason  shim.Reason
			ended   string
		}{
			{"keeper killed", true, nil, func(_ *testing.T, _ string, keeper int) error { return kill(keeper, unix.SIGKILL) }, 125, shim.ReasonSessionLost, shim.ReasonInitLost, ""},
			{"keeper asked to end", false, nil, func(_ *testing.T, _ string, keeper int) error { return kill(keeper, unix.SIGTERM) }, 143, "", "", "signal"},
			{"init killed", true, nil, func(t *testing.T, id string, _ int) error {
				return kill(mustInt(t, strings.TrimSpace(s.bare(t, "inspect", "--format", "{{.State.Pid}}", "agentshim-"+id).ok(t).Stdout)), unix.SIGKILL)
			}, 125, shim.ReasonSessionLost, shim.ReasonInitLost, ""},
			{"engine's client killed", false, nil, func(t *testing.T, _ string, keeper int) error {
				killChild(t, keeper)
				return nil
			}, 125, shim.ReasonSessionLost, shim.ReasonEngineLost, ""},
			{"monitor killed", true, nil, func(t *testing.T, id string, _ int) error {
				return kill(s.monitor(t, id), unix.SIGKILL)
			}, 125, shim.ReasonSessionLost, shim.ReasonEngineLost, ""},
			{"maximum", false, map[string]any{"maximum": "2s"}, func(*testing.T, string, int) error { return nil }, 143, "", "", "maximum"},
		} {
			if !tc.all && !s.full() || tc.reason == shim.ReasonEngineLost && s.engine == "docker" { // which has neither
				continue
			}
			t.Run(tc.name, func(t *testing.T) {
				state := s.private(t)
				id := s.up(t, call{State: state}, s.write(t, spec{"session": tc.session, "stopGrace": "1s"}))
				x, _ := s.find(t, id)
				b := s.inBackground(t, id, "echo ready; exec sleep 300")
				if err := tc.do(t, id, x.PID); err != nil {
					t.Fatal(err)
				}
				_, rec := b.ended(t, tc.code)
				if rec.Reason != tc.step {
					t.Errorf("the step's reason is %q", rec.Reason)
				}
				s.goneSoon(t, id)
				// The step's end, as any run's, reclaims what a killed keeper left.
				s.step(t, call{}, id, "true").refused(t, shim.ReasonSession)
				s.call(t, call{State: state}, "down", id) // no error where it has ended already
				eventually(t, "the end of the session's record", func() bool { return !sessionRecord(t, state, id).End.IsZero() })
				if rec := sessionRecord(t, state, id); rec.Reason != tc.reason || rec.Session.Ended != tc.ended {
					t.Errorf("session: %q %+v", rec.Reason, rec.Session)
				}
				if _, ok := s.find(t, id); ok {
					t.Error("ps still has it")
				}
			})
		}
	})
}

// TestSessionIdle: the time counts while nothing runs.
func TestSessionIdle(t *testing.T) {
	someAtOnce(t, func(t *testing.T, s setup) {
		state := s.private(t)
		id := s.up(t, call{State: state}, s.write(t, spec{"session": map[string]any{"idle": "2s"}}))
		s.step(t, call{}, id, "sleep 3; exit 3") // longer than that
		if !s.here(t, id) {
			t.Error("it ended while a step ran")
		}
		s.goneSoon(t, id)
		eventually(t, "the end of the record", func() bool { return !sessionRecord(t, state, id).End.IsZero() })
		if rec := sessionRecord(t, state, id); rec.Reason != "" || rec.Session.Ended != "idle" {
			t.Errorf("%q %+v", rec.Reason, rec.Session)
		}
	})
}

// TestSessionReady: up returns when the port is open or the command succeeds, and not
// before.
func TestSessionReady(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		const slow = "sleep 1; echo served >/tmp/page; exec httpd -f -p 127.0.0.1:8080 -h /tmp"
		fetch := "wget -q -O - http://127.0.0.1:8080/page"
		port := spec{"session": map[string]any{"ready": map[string]any{"port": 8080}}}
		id := s.up(t, call{}, s.write(t, port), "--", "sh", "-c", slow)
		if r := s.step(t, call{}, id, fetch); r.Stdout != "served\n" {
			t.Errorf("%+v", r)
		}
		if !s.full() {
			return
		}
		t.Run("published", func(t *testing.T) {
			fields := spec{"egress": map[string]any{"publish": []string{"127.0.0.1:0:8080"}}}
			for k, v := range port {
				fields[k] = v
			}
			r := s.call(t, call{}, "up", "--spec", s.write(t, fields), "--", "sh", "-c", slow).ok(t)
			id := strings.TrimSpace(r.Stdout)
			t.Cleanup(func() { s.call(t, call{}, "down", id) })
			_, at, _ := strings.Cut(r.Stderr, "publish: ")
			at, _, _ = strings.Cut(at, " ")
			get, err := http.Get("http://" + at + "/page")
			if err != nil {
				t.Fatal(err)
			}
			defer get.Body.Close()
			if b, err := io.ReadAll(get.Body); string(b) != "served\n" || err != nil {
				t.Errorf("%q %v", b, err)
			}
			s.call(t, call{}, "down", id).ok(t)
			if conn, err := net.Dial("tcp", at); err == nil {
				conn.Close()
				t.Error("the port is open after the session's end")
			}
		})
		t.Run("control: without waiting", func(t *testing.T) {
			id := s.up(t, call{}, s.write(t, nil), "--", "sh", "-c", slow)
			if r := s.step(t, call{}, id, fetch); r.Code == 0 {
				t.Errorf("%+v", r)
			}
		})
		t.Run("command", func(t *testing.T) {
			ready := spec{"session": map[string]any{"ready": map[string]any{"command": []string{"test", "-e", "/tmp/made"}}}}
			id := s.up(t, call{}, s.write(t, ready), "--", "sh", "-c", "sleep 1; touch /tmp/made; exec sleep 300")
			s.step(t, call{}, id, "test -e /tmp/made").ok(t)
		})
		t.Run("its program is missing", func(t *testing.T) {
			r := s.call(t, call{}, "up", "--spec", s.write(t, nil), "--", "no-such-program").refused(t, shim.ReasonSession)
			wantText(t, r.Stderr, "no-such-program", "agentshim: hint: install the program")
		})
		t.Run("never", func(t *testing.T) {
			file := s.write(t, spec{"session": map[string]any{"ready": map[string]any{"command": []string{"false"}}, "maximum": "6s"}})
			r := s.call(t, call{}, "up", "--spec", file).refused(t, shim.ReasonSession)
			wantText(t, r.Stderr, `not ready yet: ["false"] ended with exit code 1`, "session.maximum passed", "agentshim: hint: look at session.ready")
		})
		t.Run("its program ends", func(t *testing.T) {
			state := s.private(t)
			r := s.call(t, call{State: state}, "up", "--spec", s.write(t, port), "--", "sh", "-c", "echo why; exit 3").refused(t, shim.ReasonSession)
			wantText(t, r.Stderr, "exit code 3", "keeper.log")
			rec := record(t, state)
			s.goneSoon(t, rec.ID)
			wantText(t, string(mustRead(t, filepath.Join(state, "agentshim/runs", rec.ID, "keeper.log"))), "why")
		})
		for _, tc := range []struct {
			name string
			do   func(up *os.Process, x shim.SessionInfo) error
			code int
		}{
			{"up is interrupted", func(up *os.Process, _ shim.SessionInfo) error { return up.Signal(unix.SIGINT) }, 130},
			{"up is killed", func(up *os.Process, _ shim.SessionInfo) error { return up.Kill() }, -1},
			{"the keeper is killed", func(_ *os.Process, x shim.SessionInfo) error { return unix.Kill(x.PID, unix.SIGKILL) }, 125},
			{"down meanwhile", func(_ *os.Process, x shim.SessionInfo) error {
				if r := s.call(t, call{}, "down", x.ID); r.Code != 0 {
					return fmt.Errorf("%+v", r)
				}
				return nil
			}, 125},
		} {
			t.Run(tc.name, func(t *testing.T) {
				cmd, cancel := s.command(t, call{}, agentshim, "up", "--spec", s.write(t, port))
				defer cancel()
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				var x shim.SessionInfo
				eventually(t, "the session waits", func() bool {
					for _, x = range s.sessionList(t) {
						if x.State == shim.SessionStarting && s.proven(t, x.ID) {
							return true
						}
					}
					return false
				})
				if err := tc.do(cmd.Process, x); err != nil {
					t.Error(err)
				}
				_ = cmd.Wait()
				if code := cmd.ProcessState.ExitCode(); code != tc.code {
					t.Errorf("exit %d", code)
				}
				s.goneSoon(t, x.ID)
				s.call(t, call{}, "prune").ok(t)
			})
		}
	})
}

// TestSessionRaces: of those who want one name one gets it; steps and downs at the same
// time end well.
func TestSessionRaces(t *testing.T) {
	someAtOnce(t, func(t *testing.T, s setup) {
		file, state, name := s.write(t, nil), s.private(t), "raced-"+s.name
		var all sync.WaitGroup
		ups := make([]result, 3)
		for i := range ups {
			all.Go(func() { ups[i] = s.call(t, call{State: state}, "up", "--quiet", "--spec", file, "--name", name) })
		}
		all.Wait()
		won := 0
		for _, r := range ups {
			if r.Code == 0 {
				won++
			} else {
				r.refused(t, shim.ReasonSession)
			}
		}
		if won != 1 {
			t.Fatalf("%d sessions have one name: %+v", won, ups)
		}
		var downs [2]result
		for i := range downs {
			all.Go(func() {
				time.Sleep(200 * time.Millisecond)
				downs[i] = s.call(t, call{State: state}, "down", name)
			})
		}
		for range 4 {
			all.Go(func() {
				r := s.step(t, call{}, name, "sleep 0.3; exit 7")
				if r.Code != 7 && r.Code != 143 && !(r.Code == 125 && strings.Contains(r.Stderr, "agentshim: session")) {
					t.Errorf("%+v", r)
				}
			})
		}
		all.Wait()
		if downs[0].Code != 0 && downs[1].Code != 0 {
			t.Errorf("%+v", downs)
		}
		for _, r := range downs {
			if r.Code != 0 {
				r.refused(t, shim.ReasonSession)
			}
		}
		if slices.ContainsFunc(s.sessionList(t), func(x shim.SessionInfo) bool { return x.Name == name }) {
			t.Error("ps still has it")
		}
	})
}

// TestSessionSocket: a socket that is not its keeper's is not spoken to.
func TestSessionSocket(t *testing.T) {
	Need(t)
	s := setups[1]
	id := s.up(t, call{}, s.write(t, nil))
	socket := filepath.Join(s.runtimeDir(t), id, "keeper.sock")
	info, err := os.Stat(socket)
	if err != nil || info.Mode().Perm() != 0o600 || info.Sys().(*syscall.Stat_t).Uid != uint32(callerUID(t, s)) {
		t.Errorf("%v %v", info, err)
	}
	s.step(t, call{}, id, "true").ok(t) // the control run
	if err := os.Rename(socket, socket+".aside"); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.Chmod(socket, 0o666); err != nil {
		t.Fatal(err)
	}
	wantText(t, s.step(t, call{}, id, "true").refused(t, shim.ReasonSession).Stderr, "another user's process")
	if err := errors.Join(l.Close(), os.Rename(socket+".aside", socket)); err != nil {
		t.Fatal(err)
	}
	s.step(t, call{}, id, "true").ok(t)
	t.Run("a keeper that is stuck", func(t *testing.T) {
		x, _ := s.find(t, id)
		if err := unix.Kill(x.PID, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Kill(x.PID, unix.SIGCONT) }()
		wantText(t, s.call(t, call{}, "down", id).refused(t, shim.ReasonSession).Stderr, "does not answer", fmt.Sprintf("process %d", x.PID))
		if x, _ := s.find(t, id); x.State != shim.SessionSilent {
			t.Errorf("%+v", x)
		}
	})
	t.Run("another user at the keeper's", func(t *testing.T) {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		if n, err := conn.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("root reads %d bytes, %v", n, err)
		}
	})
}
