package integration

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim"
)

// repeats are the numbers of runs after one another, and at once.
func (s setup) repeats() (sequential, parallel int) {
	switch {
	case soaking():
		return 200, 50
	case s.full():
		return 4, 6
	}
	return 2, 3
}

// traces are what a container leaves on the host, by kind. All of them are found by
// the ids, but volumes: those are all that the engine has.
type traces struct {
	Containers, Processes, Mounts, Cgroups, Volumes []string
}

// traces looks for what is left of the containers with a mark and of the run and
// container ids given.
func (s setup) traces(t *testing.T, mark string, ids []string) traces {
	t.Helper()
	return traces{
		Containers: s.marked(t, mark),
		Processes:  naming(t, "cmdline", ids),
		Mounts:     naming(t, "mountinfo", ids),
		Cgroups:    cgroupsNamed(t, ids),
		Volumes:    strings.Fields(s.bare(t, "volume", "ls", "-q").ok(t).Stdout),
	}
}

// naming lists the processes whose file in /proc holds one of the ids.
func naming(t *testing.T, file string, ids []string) []string {
	t.Helper()
	names, err := filepath.Glob("/proc/[0-9]*/" + file)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err == nil && slices.ContainsFunc(ids, func(id string) bool { return bytes.Contains(b, []byte(id)) }) {
			found = append(found, name)
		}
	}
	return found
}

func cgroupsNamed(t *testing.T, ids []string) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // a group that is gone by now
		}
		if d.IsDir() && slices.ContainsFunc(ids, func(id string) bool { return strings.Contains(d.Name(), id) }) {
			found = append(found, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestNothingIsLeft: many runs after one another and at once leave nothing, and each
// exit code is exact. P13, L01, L08.
func TestNothingIsLeft(t *testing.T) {
	inTurn(t, func(t *testing.T, s setup) {
		sequential, parallel := s.repeats()
		mark := hex.EncodeToString(must(t, randomBytes))
		state := s.private(t)
		file := s.write(t, spec{"image": "agentshim/volume:test", "labels": map[string]any{"test.mark": mark}})
		before := s.traces(t, mark, nil)
		descriptors := s.daemonDescriptors(t)

		for range sequential {
			s.randomEnds(t, state, file, 1)
		}
		s.randomEnds(t, state, file, parallel)

		runs := ids(t, state)
		if len(runs) != sequential+parallel {
			t.Errorf("%d records of %d runs", len(runs), sequential+parallel)
		}
		all := s.recordedIDs(t, state)
		if len(all) != 2*len(runs) {
			t.Errorf("%d ids of %d runs", len(all), len(runs))
		}
		for id := range runs {
			if _, err := os.Lstat(filepath.Join(s.runtimeDir(t), id)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the folder of run %s: %v", id, err)
			}
		}
		// The engines' own helpers end a moment after the client.
		var after traces
		ended := time.Now()
		for end := time.Now().Add(tidyBound); ; time.Sleep(200 * time.Millisecond) {
			after = s.traces(t, mark, all)
			if a, b := mustJSON(t, after), mustJSON(t, before); a == b || time.Now().After(end) {
				break
			}
		}
		t.Logf("looked for traces for %v", time.Since(ended).Round(time.Millisecond))
		if a, b := mustJSON(t, after), mustJSON(t, before); a != b {
			t.Errorf("left: %s\nbefore: %s", a, b)
		}
		eventually(t, "the daemon's descriptors are not more by one for each run", func() bool {
			return s.daemonDescriptors(t)-descriptors < len(runs)
		})
		t.Run("control", func(t *testing.T) { s.leavesTraces(t, mark, before) })
	})
}

// randomEnds starts runs at once and compares their exit codes.
func (s setup) randomEnds(t *testing.T, state, file string, n int) {
	t.Helper()
	var wg sync.WaitGroup
	defer wg.Wait()
	for range n {
		code := rand.N(256)
		cmd, cancel := s.command(t, call{State: state, Timeout: 5 * time.Minute}, agentshim, "exec", "--quiet", "--spec", file, "--", fmt.Sprintf("exit %d", code))
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		wg.Go(func() {
			defer cancel()
			err := cmd.Run()
			var exit *exec.ExitError
			if got := cmd.ProcessState.ExitCode(); got != code || err != nil && !errors.As(err, &exit) || stderr.Len() > 0 {
				t.Errorf("exit %d, want %d: %v, %s", got, code, err, stderr.String())
			}
		})
	}
}

// recordedIDs are the run and container ids in a state folder.
func (s setup) recordedIDs(t *testing.T, state string) []string {
	t.Helper()
	var all []string
	for id := range ids(t, state) {
		rec := readRecord(t, filepath.Join(state, "agentshim/runs", id, "record.json"))
		if len(rec.Container) != 64 || slices.Contains(all, rec.Container) {
			t.Errorf("container %q of run %s", rec.Container, id)
			continue
		}
		all = append(all, id, rec.Container)
	}
	return all
}

// daemonDescriptors counts those of Docker's daemon; Podman has none.
func (s setup) daemonDescriptors(t *testing.T) int {
	t.Helper()
	if s.engine != "docker" {
		return 0
	}
	conn, err := net.Dial("unix", "/var/run/docker.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var peer *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(cerr, err); err != nil {
		t.Fatal(err)
	}
	return len(openFiles(t, int(peer.Pid)))
}

func openFiles(t *testing.T, pid int) []string {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, e := range entries {
		target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, e.Name()))
		list = append(list, e.Name()+" "+target)
	}
	return list
}

// leavesTraces is the control: each kind is seen of a container that is there.
func (s setup) leavesTraces(t *testing.T, mark string, before traces) {
	id := strings.TrimSpace(s.bare(t, "run", "--detach", "--network=none", "--label=test.mark="+mark, "--", "agentshim/volume:test", "sleep", "600").ok(t).Stdout)
	got := s.traces(t, mark, []string{id})
	s.bare(t, "kill", id) // the first process has no handler for SIGTERM
	s.bare(t, "rm", "--force", "--volumes", id).ok(t)
	if len(got.Containers) != 1 || len(got.Processes) == 0 || len(got.Mounts) == 0 || len(got.Volumes) <= len(before.Volumes) {
		t.Errorf("of a running container: %s", mustJSON(t, got))
	}
	if len(got.Cgroups) == 0 && !s.rootless() { // rootless on cgroup v1: the container has none
		t.Errorf("no cgroup of a running container")
	}
}

// TestRunKeepsNothingOpen: shim.Run leaves its caller neither descriptors nor
// goroutines.
func TestRunKeepsNothingOpen(t *testing.T) {
	inTurn(t, func(t *testing.T, s setup) {
		if !s.root() {
			return // this process is root's
		}
		state := s.private(t)
		file := s.write(t, nil)
		run := func() {
			h, err := harness.Load(file, harness.Overrides{})
			if err != nil {
				t.Fatal(err)
			}
			rec, err := shim.Run(t.Context(), shim.Job{
				Harness: h, Words: []string{"exit 3"}, Stdout: os.Stdout, Stderr: os.Stderr,
				LookupEnv: func(name string) (string, bool) {
					v, ok := map[string]string{"XDG_STATE_HOME": state, "HOME": "/root", "PATH": os.Getenv("PATH")}[name]
					return v, ok
				},
			})
			if err != nil || rec.Exit != 3 {
				t.Fatalf("exit %d, %v", rec.Exit, err)
			}
		}
		run() // what is opened once
		if s.engine == "docker" {
			time.Sleep(2 * time.Second) // its connections to the daemon wait for more
		}
		files, routines := openFiles(t, os.Getpid()), runtime.NumGoroutine()
		for range 2 {
			run()
		}
		var after []string
		eventually(t, "descriptors and goroutines are as before", func() bool {
			after = openFiles(t, os.Getpid())
			return len(after) <= len(files) && runtime.NumGoroutine() <= routines
		})
		if t.Failed() {
			t.Errorf("%d goroutines, now %d; open before:\n%s\nand after:\n%s",
				routines, runtime.NumGoroutine(), strings.Join(files, "\n"), strings.Join(after, "\n"))
		}
	})
}

// TestFailedStart: a container that was created and can't start is removed. L02.
func TestFailedStart(t *testing.T) {
	some(t, func(t *testing.T, s setup) {
		d := newDeviant(t, s)
		d.edit(t, deviation{edit: []change{set("Entrypoint", []string{"/no/such/program"})}, drop: []string{"--entrypoint=*"}, add: []string{"--entrypoint=/no/such/program"}})
		left := func() string {
			return s.bare(t, "ps", "-aq", "--filter", "label=agentshim.name="+d.label).ok(t).Stdout
		}
		r, started := d.launch(t)
		r.refused(t, shim.ReasonEngineFailed)
		if started || left() != "" {
			t.Errorf("the agent started: %v, containers left: %q", started, left())
		}
		name := "agentshim-" + d.label
		s.bare(t, "create", "--name="+name, "--label=agentshim.name="+d.label, "--entrypoint=/no/such/program", "agentshim/hello:test").ok(t)
		if r := s.bare(t, "start", name); r.Code == 0 || left() == "" {
			t.Errorf("control: %+v, containers %q", r, left())
		}
		s.bare(t, "rm", "--force", name).ok(t)
	})
}

// TestNoEngineBehindTheClient: a client or a daemon that does nothing, or says something
// else than init would, is never taken for a run, and nothing runs on the host. A45, A95.
func TestNoEngineBehindTheClient(t *testing.T) {
	some(t, func(t *testing.T, s setup) {
		b := newFaultBench(t, s)
		marker := filepath.Join(b.work, "marker") // as the host names it
		for _, row := range []struct {
			mode   string
			stream []byte // what Docker's daemon says
			reason shim.Reason
		}{
			{"silent", nil, shim.ReasonEngineFailed},
			{"junk", stdoutFrame("this is no hello\n"), shim.ReasonInitLost},
			{"none", nil, shim.ReasonEngineMissing},
		} {
			t.Run(row.mode, func(t *testing.T) {
				c := call{Env: b.env()}
				switch {
				case row.mode == "none":
					c.Env = []string{"PATH=" + b.work}
				case b.proxy != nil:
					b.proxy.rule(proxyRules{answers: noContainer(row.stream)})
				default:
					b.hold(t, row.mode)
				}
				s.call(t, c, "exec", "--quiet", "--spec", b.file, "--", "touch "+marker).refused(t, row.reason)
				if _, err := os.Lstat(marker); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("something ran on the host: %v", err)
				}
			})
		}
	})
}
