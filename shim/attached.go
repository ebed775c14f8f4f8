package shim

import (
	"context"
	"encoding/json"
	"io"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/spec"
)

// attached is a container that was started, with init's standard streams. Its end of
// standard input is init's lifeline.
type attached interface {
	stdin() io.WriteCloser
	stdout() io.Reader
	// done is closed when the engine says that the container ended, or can't say anything
	// any more.
	done() <-chan struct{}
	// result is how the container ended, or the error of not knowing. It stands once done
	// is closed.
	result() (ExitStatus, error)
	// said is the end of what the engine and a dying init said.
	said() string
	// drop lets go of the engine at once: done follows, also where the engine hangs. The
	// container ends with its lifeline, but nobody waits for that.
	drop()
	// close is for the end, after done.
	close()
}

// podmanRun is attached by Podman's client, which lives as long as the container.
type podmanRun struct {
	proc Process
	// chatter is the client's standard error; chatted is closed with its end.
	chatter *tailBuffer
	chatted chan struct{}
	ended   chan struct{}
	status  ExitStatus
}

func (p *podman) start(ctx context.Context, plan spec.Plan, paths spec.RunPaths, _ func()) (attached, error) {
	argv, err := plan.PodmanArgv(paths)
	if err != nil {
		return nil, asError(err)
	}
	return p.attach(ctx, p.Command(argv...))
}

// attach starts a client that carries init's streams.
func (p *podman) attach(ctx context.Context, cmd Command) (attached, error) {
	// Not ctx: the client is ended through init first.
	proc, err := p.runner.Start(context.WithoutCancel(ctx), cmd)
	if err != nil {
		return nil, &Error{Reason: ReasonEngineFailed, Err: err}
	}
	r := &podmanRun{
		proc: proc, chatter: &tailBuffer{limit: maxStderr}, chatted: make(chan struct{}), ended: make(chan struct{}),
	}
	go func() {
		defer close(r.chatted)
		_, _ = io.Copy(r.chatter, proc.Stderr())
	}()
	go func() {
		r.status, _ = proc.Wait()
		close(r.ended)
		// Rootless Podman's client is two processes: the one that is left would carry the
		// streams on.
		if r.status.Signal != 0 {
			proc.Stdin().Close()
			proc.Stdout().Close()
		}
	}()
	return r, nil
}

func (p *podman) request(plan spec.Plan, paths spec.RunPaths) ([]byte, error) {
	argv, err := plan.PodmanArgv(paths)
	if err != nil {
		return nil, err
	}
	b, err := json.MarshalIndent(p.Command(argv...).Argv(), "", "  ")
	return append(b, '\n'), err
}

func (r *podmanRun) stdin() io.WriteCloser { return r.proc.Stdin() }
func (r *podmanRun) stdout() io.Reader     { return r.proc.Stdout() }
func (r *podmanRun) done() <-chan struct{} { return r.ended }
func (r *podmanRun) drop()                 { _ = r.proc.Signal(syscall.SIGKILL) }

func (r *podmanRun) result() (ExitStatus, error) {
	if r.status.Signal != 0 {
		return r.status, &Error{Reason: ReasonEngineLost, Msg: "the engine's client was ended by " + unix.SignalName(r.status.Signal)}
	}
	return r.status, nil
}

func (r *podmanRun) said() string {
	select {
	case <-r.chatted:
	case <-time.After(time.Second): // a child of the client keeps its stderr
	}
	return strings.TrimSpace(string(r.chatter.bytes()))
}

func (r *podmanRun) close() {
	r.proc.Stdout().Close()
	r.proc.Stderr().Close()
}

// cidFile is where the engine's ID of the run's container is, once it has one.
func cidFile(paths spec.RunPaths) string { return filepath.Join(paths.Dir, "cid") }
