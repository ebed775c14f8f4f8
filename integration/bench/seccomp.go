package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/seccomp"
)

// podmanProfile is what Podman takes for its default where it is there: containers-common.
const podmanProfile = "/usr/share/containers/seccomp.json"

// loops are the calls that are measured, and how many make about two milliseconds: few of such
// loops are interrupted, and the faster quarter of them tells what a call costs.
var loops = []struct {
	call string
	n    int
}{{"getppid", 10_000}, {"socket", 500}}

// loopRounds is how many loops of each kind a pair of runs stands for.
const loopRounds = 100

// seccompPart measures what agentshim's system call policy costs a call against the engine's
// default, and counts what either allows.
func seccompPart() error {
	return errors.Join(eachSetup((*bench).seccomp), countCalls(os.Stdout))
}

// seccomp runs one container with each policy and the same flags, and has them make their
// calls in turn, so that they meet the same noise.
func (b *bench) seccomp() error {
	program := filepath.Join(b.dir, "loop")
	build := exec.Command("go", "build", "-o", program, "./integration/bench/loop")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	var loopers []*looper
	defer func() {
		for _, l := range loopers {
			l.stop()
		}
	}()
	for _, option := range []string{"", "seccomp=unconfined", "keep"} {
		l, err := b.startLooper(program, option)
		if err != nil {
			return err
		}
		loopers = append(loopers, l)
	}
	fmt.Printf("%s: one system call (%d interleaved loops, lowest quartile in ns)\n", b.name, *pairs*loopRounds)
	for _, loop := range loops {
		times, err := interleaveLoops(loopers, loop.call, loop.n)
		if err != nil {
			return err
		}
		ns := func(k int) float64 { return float64(quantile(times[k], 1)) / float64(loop.n) }
		fmt.Printf("  %-8s without a policy %6.1f, engine's default %6.1f, agentshim's %6.1f; ratio to the engine's %.3f\n",
			loop.call, ns(1), ns(0), ns(2), ns(2)/ns(0))
	}
	return nil
}

func interleaveLoops(loopers []*looper, call string, n int) ([][]time.Duration, error) {
	times := make([][]time.Duration, len(loopers))
	for i := range *pairs*loopRounds + 1 {
		for j := range loopers {
			k := (i + j) % len(loopers)
			d, err := loopers[k].loop(call, n)
			if err != nil {
				return nil, err
			}
			if i > 0 {
				times[k] = append(times[k], d)
			}
		}
	}
	return times, nil
}

// looper is a container that makes calls.
type looper struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// startLooper has agentshim's flags, with another option in the place of its policy's unless
// that is keep.
func (b *bench) startLooper(program, option string) (*looper, error) {
	var argv []string
	for _, a := range b.bare {
		switch {
		case strings.HasPrefix(a, "--security-opt=seccomp=") && option != "keep":
			if option == "" {
				continue
			}
			a = "--security-opt=" + option
		case strings.HasPrefix(a, "--entrypoint="):
			argv = append(argv, "--mount=type=bind,source="+program+",target=/loop,readonly")
			a = "--entrypoint=/loop"
		}
		argv = append(argv, a)
	}
	l := &looper{cmd: b.command(argv...)}
	l.cmd.Stderr = os.Stderr
	in, errIn := l.cmd.StdinPipe()
	out, errOut := l.cmd.StdoutPipe()
	if err := errors.Join(errIn, errOut, l.cmd.Start()); err != nil {
		return nil, err
	}
	l.in, l.out = in, bufio.NewReader(out)
	return l, nil
}

func (l *looper) loop(call string, n int) (time.Duration, error) {
	var ns int64
	_, err := fmt.Fprintln(l.in, call, n)
	if err == nil {
		_, err = fmt.Fscanln(l.out, &ns)
	}
	return time.Duration(ns), err
}

// stop ends the container by the end of its input.
func (l *looper) stop() {
	l.in.Close()
	_ = l.cmd.Wait()
}

// countCalls prints how many calls each policy allows, by name and over all ABIs.
func countCalls(w io.Writer) error {
	t := seccomp.Target{Arch: runtime.GOARCH, Docker: true}
	ours, err := seccomp.Compile(harness.Seccomp{}, t)
	if err != nil {
		return err
	}
	docker, err := seccomp.EngineDefault(t)
	if err != nil {
		return err
	}
	policies := []struct {
		name string
		p    *seccomp.Policy
	}{{"agentshim's default", ours}, {"moby's default", docker}}
	data, err := os.ReadFile(podmanProfile)
	switch {
	case errors.Is(err, os.ErrNotExist):
		fmt.Fprintf(w, "no %s: Podman's default is not counted\n", podmanProfile)
	case err != nil:
		return err
	default:
		podman, err := seccomp.EngineProfile(data, t)
		if err != nil {
			return fmt.Errorf("%s: %w", podmanProfile, err)
		}
		policies = append(policies, struct {
			name string
			p    *seccomp.Policy
		}{"Podman's default", podman})
	}
	fmt.Fprintf(w, "system calls by name, for a process without capabilities\n")
	for _, c := range policies {
		n := map[string]int{}
		for _, g := range c.p.Groups() {
			n[g.Verdict] += len(g.Calls)
		}
		fmt.Fprintf(w, "  %-20s allowed %3d, by their arguments %2d\n", c.name, n[seccomp.VerdictAllowed], n[seccomp.VerdictConditional])
	}
	return nil
}
