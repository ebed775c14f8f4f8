package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// Bounds of the waits on the engine.
const (
	// startTimeout is from the engine's start to init's hello.
	startTimeout = 2 * time.Minute
	// answerTimeout is for init's answers between hello and launch.
	answerTimeout = 30 * time.Second
	// endTimeout is for the engine's client to end once init has been told to.
	endTimeout = 10 * time.Second
	// removeTimeout is for the engine to remove a container by force.
	removeTimeout = 30 * time.Second
)

// container is one run's container with the connection to init inside.
type container struct {
	p     *prepared
	paths spec.RunPaths
	// since is before the engine was asked for the container.
	since time.Time
	// engine is nil until the container was started.
	engine attached
	conn   *wire.Conn
	// lifeline closes init's standard input: the container ends.
	lifeline func()
	// greeted is set once init said hello.
	greeted bool
	// pid is init's as the host numbers it, once Docker's daemon has told it.
	pid int
	// init is a pidfd of it.
	init *os.File
	// way makes the way out, egress is it; nil without one.
	way    *way
	egress *egress
	// published are the host's ports that lead inside.
	published *published
	// look finds what appears in the workspace, nil where the agent can't write to it.
	look *plantedLook
	// backs are the home's files that come back at the end.
	backs backs
	// released says, in a container that is not agentshim's, that what init's start needed
	// is gone.
	released chan error
}

// start has the engine start the container.
func (c *container) start(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.since = time.Now()
	engine, err := c.p.adapter.start(ctx, c.p.plan, c.paths, c.way.containerMade)
	if err != nil {
		return err
	}
	c.engine, c.conn = engine, wire.NewConn(engine.stdout(), engine.stdin())
	c.lifeline = sync.OnceFunc(func() { engine.stdin().Close() })
	return nil
}

// drive takes the container from its start to the harness's end.
func (c *container) drive(ctx context.Context, rec *Record) error {
	var err error
	if c.way, err = c.startWay(ctx, unpackHelper); err != nil {
		return err
	}
	if err := c.start(ctx); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, c.lifeline)()
	if err := c.prove(ctx, rec); err != nil {
		c.p.forgetCaches()
		return err
	}
	if c.p.job.Proven != nil {
		c.p.job.Proven(c.p.plan, *rec.Attestation)
	}
	if err := c.look.done(); err != nil {
		return err
	}
	c.egress.let()
	if err := c.published.listen(c.p.job.Notice); err != nil {
		return err
	}
	if k := c.p.job.keeper; k != nil {
		return k.keep(ctx, c, rec)
	}
	return c.runHarness(rec)
}

// runHarness takes a container, or a session's step, from launch to the harness's end.
func (c *container) runHarness(rec *Record) error {
	defer c.p.control.over()
	if err := c.launch(); err != nil {
		return err
	}
	c.p.phases.done("launch")
	if c.p.begun != nil {
		c.p.begun()
	}
	exit, err := c.stream()
	c.egress.end()
	if c.backs.complete() {
		rec.WriteBack, rec.Output = c.p.writeBack(c.backs.got)
	}
	first, timedOut, killed := c.p.control.outcome()
	if first != 0 {
		rec.Signal = unix.SignalName(first)
	}
	if err == nil {
		c.p.phases.done("harness")
		rec.Harness, rec.Cause = &exit, causeOf(exit, first != 0, killed)
		rec.Exit, err = exit.Status()
	}
	if timedOut {
		return &Error{Reason: ReasonTimeout, Msg: "the harness ran longer than its timeout of " + c.p.job.Harness.Timeout, Err: err}
	}
	return err
}

// prove compares what init sees with the plan. Nothing is launched before it
// returns nil.
func (c *container) prove(ctx context.Context, rec *Record) error {
	var hello wire.Hello
	if err := c.expect(startTimeout, wire.KindHello, &hello); err != nil {
		return err
	}
	c.greeted = true
	c.p.phases.done("start")
	rec.Container = c.id()
	own, err := c.ownFiles()
	if err != nil {
		return err
	}
	at := &Attestation{Hello: hello}
	rec.Attestation = at
	at.Differences = compare(c.p.plan, c.p.host, own, hello)
	if len(at.Differences) == 0 {
		at.Differences = c.compareAccount(rec.Container)
	}
	if len(at.Differences) > 0 {
		return notProven(at.Differences)
	}
	if err := c.watchInit(); err != nil {
		return err
	}
	if err := c.proveRest(ctx, at, rec); err != nil {
		return err
	}
	return notProven(at.Differences)
}

// proveRest compares the engine's bundle while the network is made and tried: neither
// lets anything run or pass.
func (c *container) proveRest(ctx context.Context, at *Attestation, rec *Record) error {
	var bundle []Difference
	compared := make(chan struct{})
	go func() {
		defer close(compared)
		at.Bundle, bundle = c.compareBundle(rec.Container)
	}()
	network, err := c.proveNetwork(ctx, at, rec)
	<-compared
	at.Differences = append(bundle, network...)
	if len(bundle) > 0 {
		return nil // what differs says more than what then failed
	}
	return err
}

// proveNetwork makes the way out, if there is one, and has init try all others.
func (c *container) proveNetwork(ctx context.Context, at *Attestation, rec *Record) ([]Difference, error) {
	phase := "prove"
	if c.p.plan.Egress.HasGateway() {
		c.p.phases.done(phase)
		phase = "egress"
	}
	if err := c.openEgress(ctx, at.Hello, rec); err != nil {
		return nil, err
	}
	defer c.p.phases.done(phase)
	return c.probeNetwork(at)
}

func (c *container) probeNetwork(at *Attestation) ([]Difference, error) {
	if err := c.send(func() error { return c.conn.Send(wire.KindProbe, 0, nil) }); err != nil {
		return nil, err
	}
	at.Probe = &wire.Probed{}
	if err := c.expect(answerTimeout, wire.KindProbed, at.Probe); err != nil {
		return nil, err
	}
	diffs := compareProbe(c.p.plan.Egress, *at.Probe)
	if !c.egress.redirected() {
		diffs = append(diffs, Difference{Field: "network probe TCP IPv4", Want: "at the gateway", Got: at.Probe.TCP4})
	}
	return diffs, nil
}

func notProven(diffs []Difference) error {
	if len(diffs) == 0 {
		return nil
	}
	lines := make([]string, len(diffs))
	for i, d := range diffs {
		lines[i] = d.String()
	}
	if !slices.ContainsFunc(diffs, func(d Difference) bool { return !d.swapped }) {
		return &Error{
			Reason: ReasonMount, Msg: "a source was replaced while the container started: " + strings.Join(lines, "; "),
			Hint: "look for what replaces it, an agent in another run perhaps, and try again",
		}
	}
	return &Error{
		Reason: ReasonPosture, Msg: "the container is weaker than planned: " + strings.Join(lines, "; "),
		Hint: "look for what adds it: the engine's configuration (daemon.json, containers.conf), a wrapper around its client or runtime",
	}
}

// ownFiles identifies agentshim's own binds by target.
func (c *container) ownFiles() (map[string]fileID, error) {
	own := map[string]fileID{}
	add := func(source, target string) error {
		var st unix.Stat_t
		if err := unix.Lstat(source, &st); err != nil {
			return &Error{Reason: ReasonState, Msg: source, Err: err}
		}
		own[target] = fileID{dev: st.Dev, ino: st.Ino}
		return nil
	}
	errs := []error{add(c.paths.Init, spec.InitPath)}
	for _, m := range c.p.plan.Mounts {
		if m.Own != "" {
			errs = append(errs, add(c.paths.Source(m), m.Target))
		}
	}
	for _, f := range c.p.plan.Etc {
		errs = append(errs, add(filepath.Join(c.paths.Dir, "etc", f.Name), "/etc/"+f.Name))
	}
	return own, errors.Join(errs...)
}

// launch sends the home's files and the harness's start, and waits until it runs.
func (c *container) launch() error {
	for _, f := range c.p.files {
		if err := c.sendFile(f); err != nil {
			return err
		}
	}
	args, env := c.p.plan.Launch(c.p.job.Harness, c.p.values)
	launch := wire.Launch{Args: args, Env: env, Dir: c.p.plan.Process.Cwd, RuntimeDir: c.p.plan.Process.RuntimeDir}
	if c.p.terminal != nil {
		size := c.p.terminal.size()
		launch.Terminal = &size
	}
	if !c.p.control.launch() {
		return &Error{Reason: ReasonInterrupted, Msg: "a signal came before the harness was started"}
	}
	c.p.launched = true
	if err := c.send(func() error { return c.conn.SendJSON(wire.KindLaunch, launch) }); err != nil {
		return err
	}
	return c.expect(answerTimeout, wire.KindStarted, nil)
}

func (c *container) sendFile(f homeFile) error {
	file := wire.File{Path: f.target, Size: int64(len(f.content)), WriteBack: f.comesBack(), BackOnly: f.output != nil, After: f.after}
	if err := c.send(func() error { return c.conn.SendJSON(wire.KindFile, file) }); err != nil {
		return err
	}
	for b := f.content; len(b) > 0; {
		n := min(len(b), wire.MaxData)
		if err := c.send(func() error { return c.conn.Send(wire.KindFileData, 0, b[:n]) }); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// watchdog lets go of the engine unless it is stopped in time: who waits for init gets
// an error.
func (c *container) watchdog(timeout time.Duration) *countdown {
	return startCountdown(timeout, c.engine.drop)
}

// send bounds a write and turns its failure into the reason for it. A protocol
// error is a value too large for a frame.
func (c *container) send(write func() error) error {
	timer := c.watchdog(answerTimeout)
	err := write()
	timer.stop()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, wire.ErrProtocol):
		return &Error{Reason: ReasonSpecInvalid, Msg: "arguments and environment are larger than 3 MiB", Err: err}
	}
	// Init may have said why before it closed.
	if _, rerr := c.recv(answerTimeout); rerr != nil {
		return rerr
	}
	return c.lost(err)
}

// expect receives one frame of kind and decodes it into v. Init's refusal becomes
// its own reason.
func (c *container) expect(timeout time.Duration, kind wire.Kind, v any) error {
	f, err := c.recv(timeout)
	if err != nil {
		return err
	}
	if f.Kind != kind {
		return &Error{Reason: ReasonInitLost, Msg: fmt.Sprintf("init sent frame kind %d, not %d", f.Kind, kind)}
	}
	if v == nil {
		return nil
	}
	if err := f.JSON(v); err != nil {
		return &Error{Reason: ReasonInitLost, Err: err}
	}
	return nil
}

// recv bounds the wait for one frame.
func (c *container) recv(timeout time.Duration) (wire.Frame, error) {
	timer := c.watchdog(timeout)
	f, err := c.conn.Recv()
	late := !timer.stop() && err != nil
	switch {
	case late && c.p.session != nil:
		return f, sessionLost(c.p.session.id, fmt.Errorf("no answer in %v: %w", timeout, err))
	case late:
		return f, &Error{Reason: ReasonEngineLost, Msg: fmt.Sprintf("no answer from the container in %v", timeout), Err: err}
	case err != nil:
		return f, c.lost(err)
	}
	if f.Kind == wire.KindRefused {
		var r wire.Refused
		if err := f.JSON(&r); err != nil {
			return f, &Error{Reason: ReasonInitLost, Err: err}
		}
		return f, c.refusedByInit(r)
	}
	return f, nil
}

// initReasons are the reasons for init's refusals.
var initReasons = map[string]struct {
	reason Reason
	hint   string
}{
	"harness-missing": {ReasonHarnessMissing, "install the program in the image, or correct harness.binary"},
	"harness-exec":    {ReasonHarnessMissing, "the program must be executable by the agent's uid, and its interpreter must be in the image"},
	"arguments":       {ReasonSpecInvalid, "one argument or variable holds at most 128 KiB: use promptMode stdin or file for a longer prompt"},
	"workdir":         {ReasonMount, "workingDir must be a folder in the image or in a mount that the agent may enter"},
	"home-file":       {ReasonMount, "home.files need room in the home (home.sizeMb) and targets that don't collide"},
	"steps":           {ReasonSessionBusy, "end other steps, or raise resources.pids and resources.memoryMb"},
}

// insideReasons are the hints where the container is not agentshim's.
var insideReasons = map[string]string{
	"home-file": "promptMode file needs a folder " + wire.AttachDir + " in the container that its user may write",
	"steps":     "the container's limits and its system call filter must leave room for two more processes, and pidfd_open(2)",
}

func (c *container) refusedByInit(r wire.Refused) error {
	known, ok := initReasons[r.Reason]
	if !ok {
		known.reason = ReasonInternal
	}
	if inside, ok := insideReasons[r.Reason]; ok && c.p.foreign != nil {
		known.reason, known.hint = ReasonContainer, inside
	}
	if p := c.p.job.Harness.Harness.Provided; p != nil && known.reason == ReasonHarnessMissing && p.Install != "" {
		known.hint += " (" + p.Install + ")"
	}
	return &Error{Reason: known.reason, Msg: printable(r.Detail), Hint: known.hint}
}

// lost says why the connection ended before init said how the harness ended.
func (c *container) lost(err error) error {
	c.egress.end()
	c.lifeline()
	if c.p.session != nil {
		return sessionLost(c.p.session.id, err)
	}
	if c.p.foreign != nil {
		return c.lostInside(err)
	}
	// A stream that is not the container's carries no lifeline either.
	ended, restarted := false, false
	if !errors.Is(err, errMultiplexed) {
		ended, restarted = c.awaitEnd()
	}
	if !ended {
		c.engine.drop() // end need not wait for it again
	}
	switch {
	case restarted:
		return restartedError()
	case !ended:
		return &Error{Reason: ReasonEngineLost, Msg: "the engine does not say how the container ended", Err: err}
	}
	status, failed := c.engine.result()
	switch {
	case errors.Is(err, wire.ErrProtocol):
		return &Error{Reason: ReasonInitLost, Err: err}
	case failed != nil:
		return &Error{Reason: ReasonEngineLost, Msg: failed.Error() + c.said()}
	case !c.greeted:
		return EngineFailure(&EngineError{Argv: []string{c.p.plan.Engine.Kind, "run"}, Stderr: c.engine.said(), Err: status})
	}
	lost := &Error{Reason: ReasonInitLost, Msg: "the container ended without saying how the harness ended" + c.said()}
	if status.Code > killedStatus {
		lost.Err = fmt.Errorf("%w: %s", errKilled, unix.SignalName(unix.Signal(status.Code-killedStatus)))
	}
	return lost
}

// said is what the engine said, as the end of a message.
func (c *container) said() string {
	if text := c.engine.said(); text != "" {
		return ": " + printable(text)
	}
	return ""
}

// end waits until the container is gone and, unless it went by itself after the harness
// had ended, has the engine remove it by force.
func (c *container) end(failed error) error {
	if c.engine == nil {
		return nil
	}
	defer c.engine.close()
	defer c.init.Close() // nil where it is not watched
	ended := c.letGo()
	c.p.phases.done("end")
	if _, lost := c.engine.result(); failed == nil && ended && lost == nil {
		return nil
	}
	return c.remove()
}

// letGo lets go of init, and reports whether the engine told of its end in time. It says no
// more afterwards.
func (c *container) letGo() (ended bool) {
	c.lifeline()
	// Tunnels may have sent on; an engine that can't hand that over does not end.
	go func() { _, _ = io.Copy(io.Discard, c.engine.stdout()) }()
	ended = within(endTimeout, c.engine.done())
	if !ended {
		c.engine.drop()
		<-c.engine.done()
	}
	return ended
}

// remove has the engine remove the container and its volumes, if it is still there.
func (c *container) remove() error {
	return removeContainer(context.Background(), c.p.adapter, containerName(c.paths.ID))
}

// containerName is the name of a run's container.
func containerName(run string) string { return "agentshim-" + run }
