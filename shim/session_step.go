package shim

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// parse reads the harness of a file with what replaces it, as when it was first read.
func (f sessionFile) parse() (harness.Harness, error) {
	h, err := harness.Parse(f.Spec, f.Dir, f.Overrides)
	return h, asError(err)
}

// of is the file of a step that has own of its own. A prompt of its own goes before the session's.
func (f sessionFile) of(own harness.Overrides) sessionFile {
	o := f.Overrides
	if own.Prompt != nil || own.PromptFile != "" || len(own.Args) > 0 || len(own.Words) > 0 {
		o.Prompt, o.PromptFile = own.Prompt, own.PromptFile
	}
	o.Args, o.Words, o.EnvFrom = own.Args, own.Words, own.EnvFrom
	o.Timeout, o.WorkingDir, o.OutputFile = own.Timeout, own.WorkingDir, own.OutputFile
	f.Overrides = o
	return f
}

// sessionStep is a step's end of its session.
type sessionStep struct {
	id, name string
	conn     *keeperConn
	// folders are the host's in which the session's agents may have made links.
	folders []string
}

// prepareStep finds the session and decides a step of it.
func prepareStep(ctx context.Context, j Job, ph *phases, rec *Record) (*prepared, error) {
	p := &prepared{job: j, phases: ph, stdin: j.Stdin, promptPath: spec.PromptPath + "-" + rec.ID}
	p.job.Stdin = interruptible{ctx, steadyReader(j.Stdin)}
	var err error
	if p.folders, err = openFolders(j.getenv, homeFolder(j.getenv)); err != nil {
		return nil, err
	}
	id, c, err := p.folders.findSession(j.Session)
	if err != nil {
		return p, err
	}
	conn, err := p.folders.awaitKeeper(ctx, id, c)
	if err != nil {
		return p, err
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := p.openStep(conn); err != nil {
		conn.Close()
		return p, err
	}
	rec.Name, rec.Session = p.job.Harness.Name, &SessionRecord{ID: p.session.id, Name: p.session.name}
	rec.Egress = &EgressRecord{Mode: p.job.Harness.Egress.Mode}
	return p, nil
}

// openStep asks the keeper at the other end for a step.
func (p *prepared) openStep(conn *keeperConn) error {
	slow := time.AfterFunc(readyNotice, func() {
		p.job.Notice("session %q is not ready yet, or does not answer: agentshim ps says which", p.job.Session)
	})
	opened, err := ask(conn.wire, request{Op: opOpen})
	slow.Stop()
	if err != nil {
		return talkFailed(p.job.Session, err)
	}
	file := opened.File.of(p.job.Overrides)
	if p.job.Harness, err = file.parse(); err != nil {
		return err
	}
	p.session = &sessionStep{id: opened.ID, name: opened.Name, conn: conn, folders: opened.AgentFolders}
	p.phases.done("session")
	names, err := p.readEnvFiles()
	if err = errors.Join(err, p.readCallerEnv()); err != nil {
		return err
	}
	if err := errors.Join(p.findOutput(), p.readPrompt()); err != nil {
		return err
	}
	p.phases.done("inputs")
	return p.decideStep(file, names)
}

// decideStep has the keeper compile the step's process. What bytes it is made of need not
// be text: the argv is made here.
func (p *prepared) decideStep(file sessionFile, names [][]string) error {
	o := spec.Options{
		Command: p.job.Command, Interactive: p.job.interactive(), EnvFiles: names, Terminal: p.job.terminalEnv(), PromptPath: p.promptPath,
	}
	decided, err := ask(p.session.conn.wire, request{Op: opStep, File: &file, Options: &o})
	if err != nil {
		return talkFailed(p.session.id, err)
	}
	if decided.Process == nil {
		return talkFailed(p.session.id, wire.ErrProtocol)
	}
	p.plan.Process = *decided.Process
	p.plan.Process.Args = spec.Args(p.job.Harness, o)
	p.phases.done("plan")
	return nil
}

// talkFailed gives an answer that did not come its reason.
func talkFailed(id string, err error) error {
	var e *Error
	if errors.As(err, &e) {
		return err
	}
	return &Error{Reason: ReasonSession, Msg: "session " + printable(id) + " does not answer", Err: err, Hint: "agentshim ps"}
}

// runStep runs a decided step to its end.
func (p *prepared) runStep(ctx context.Context, rec *Record) error {
	end := &farEnd{Conn: p.session.conn.Conn, closed: make(chan struct{})}
	c := &container{p: p, engine: end, conn: wire.NewConn(end, end), lifeline: end.drop, greeted: true, backs: newBacks(p.files)}
	defer c.lifeline()
	defer context.AfterFunc(ctx, c.lifeline)()
	err := c.runHarness(rec)
	if rec.Harness != nil && rec.Session != nil {
		last := c.lastWord()
		rec.Egress.Refusals, rec.Session.Ended = last.Refusals, last.Ended
	}
	if err != nil {
		return err
	}
	switch {
	case !rec.Harness.Lost:
		return nil
	case rec.Session != nil && rec.Session.Ended != "":
		return c.lost(errors.New("the session ended: " + printable(rec.Session.Ended)))
	}
	return &Error{
		Reason: ReasonSessionLost, Msg: msgStepLost + ": what watched it was killed",
		Hint: "a process of the session did that, or the kernel for lack of memory",
	}
}

const msgStepLost = "the step was lost with its processes"

// lastWord is what the keeper says behind the step's end. One that is gone says nothing.
func (c *container) lastWord() reply {
	defer c.watchdog(lookTimeout).stop()
	last, _ := receiveReply(c.conn)
	return last
}

// sessionLost is why a step did not end as a step does.
func sessionLost(id string, err error) error {
	return &Error{
		Reason: ReasonSessionLost, Msg: msgStepLost, Err: err,
		Hint: "agentshim show " + id + " has the session's end, if that is why",
	}
}

// farEnd is a session's keeper in the place of the engine.
type farEnd struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
}

// Write hangs up where the connection broke: the error is the connection's, and no
// stream's of the caller.
func (e *farEnd) Write(p []byte) (int, error) {
	n, err := e.Conn.Write(p)
	if err != nil {
		e.drop()
	}
	return n, err
}

// Close implements stdin.
func (e *farEnd) Close() error {
	e.drop()
	return nil
}

// drop hangs up: the keeper then cuts the step.
func (e *farEnd) drop() {
	e.once.Do(func() { close(e.closed) })
	e.Conn.Close()
}

func (e *farEnd) stdin() io.WriteCloser       { return e }
func (e *farEnd) stdout() io.Reader           { return e.Conn }
func (e *farEnd) done() <-chan struct{}       { return e.closed }
func (e *farEnd) result() (ExitStatus, error) { return ExitStatus{}, nil }
func (e *farEnd) said() string                { return "" }
func (e *farEnd) close()                      {}

// environment is a copy of variables to look up.
type environment map[string]string

func (e environment) lookup(name string) (string, bool) {
	v, ok := e[name]
	return v, ok
}
