package shim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// Bounds of a session's start.
const (
	// readyTimeout is for session.ready, unless session.maximum is less.
	readyTimeout = 10 * time.Minute
	// readyAttempt is for one try, readyInterval between two; after readyNotice who waits is told.
	readyAttempt  = "30s"
	readyInterval = 200 * time.Millisecond
	readyNotice   = 5 * time.Second
	// maxServiceLog bounds what a session's own program writes to the keeper's log.
	maxServiceLog = 1 << 20
)

// keeper is a session's process: it holds the container, its way out, and the socket
// over which steps come. As what control steers it stands for the harness of a run.
type keeper struct {
	id, name string
	// service is an argv that runs from the session's start to its end.
	service []string
	// log takes what the service writes.
	log io.Writer
	// announce tells who waits for the session's start that it is ready. Its error says that
	// nobody heard it.
	announce func(id string) error
	// done is closed when the container is gone and the record is written.
	done chan struct{}

	c       *container
	tunnels *wire.Tunnels

	mu sync.Mutex
	// Below, mu guards.

	state SessionState
	// opened is closed when state leaves starting.
	opened chan struct{}
	steps  map[uint16]*carried
	last   uint16
	begun  int
	// busy counts the clients' steps: the keeper's own are none.
	busy  int
	idle  *countdown
	ended string
	// finishing says that init has been told to end.
	finishing bool
	// downs counts the clients that wait for the end, carrying those that have a step.
	downs, carrying sync.WaitGroup
}

func newKeeper(id, name string, service []string) *keeper {
	return &keeper{
		id: id, name: name, service: service, log: io.Discard, announce: func(string) error { return nil }, done: make(chan struct{}),
		state: SessionStarting, opened: make(chan struct{}), steps: map[uint16]*carried{},
	}
}

// keep serves a proven session until it has ended, in place of a harness.
func (k *keeper) keep(ctx context.Context, c *container, rec *Record) error {
	k.c = c
	rec.Session = &SessionRecord{ID: rec.ID, Name: k.name}
	for _, f := range c.p.files {
		if err := c.sendFile(f); err != nil {
			return err
		}
	}
	c.p.launched = true
	ctl := c.p.control
	ctl.started(k, false, duration(k.session().Maximum))
	defer ctl.over()
	l, err := listenKeeper(c.p.folders.keeperSocket(rec.ID))
	if err != nil {
		return &Error{Reason: ReasonState, Msg: "the session's socket", Err: err}
	}
	defer k.publish()()
	go k.accept(l)
	// Nobody finds the socket any more once the run's folder is gone.
	defer func() { go func() { <-k.done; l.Close() }() }()
	failed := make(chan error, 1)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		if err := k.open(ctx); err != nil {
			failed <- err
			ctl.stop(unix.SIGTERM)
		}
	}()
	exit, err := k.receive()
	refused := k.over(rec, failed)
	if c.backs.complete() {
		rec.WriteBack, rec.Output = c.p.writeBack(c.backs.got)
	}
	if err == nil && refused == nil {
		rec.Harness, rec.Exit = &exit, 0
		return nil
	}
	if err != nil {
		err = c.lost(err)
	}
	return unready(refused, err)
}

// unready puts what kept a session from being ready before how it then ended. A step of the
// keeper's own that was lost was lost with what it ran in.
func unready(refused, ended error) error {
	if ended != nil && errors.Is(refused, ReasonSessionLost) {
		return ended
	}
	return errors.Join(refused, ended)
}

// publish begins to carry connections of published ports, until the function that it
// returns is called.
func (k *keeper) publish() (end func()) {
	// The first frame of a step makes a session of the container; this one says nothing else.
	_ = k.c.conn.Of(1).Send(wire.KindCut, 0, nil) // a write error shows in receive too
	k.tunnels = wire.NewTunnels(k.c.conn)
	k.c.published.serve(k.tunnels, func(f func()) { go f() })
	return func() {
		k.c.published.close()
		k.tunnels.Close()
	}
}

// session is what the file says of it.
func (k *keeper) session() (s struct{ Idle, Maximum string }) {
	if h := k.c.p.job.Harness.Session; h != nil {
		s.Idle, s.Maximum = h.Idle, h.Maximum
	}
	return s
}

// over notes how the session went, and gives the error of one that did not become ready
// and that nobody ended.
func (k *keeper) over(rec *Record, failed <-chan error) error {
	_, timedOut, _ := k.c.p.control.outcome()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.setState(SessionEnding)
	k.idle.stop()
	var err error
	if k.ended == "" && timedOut {
		k.ended = endedMaximum
	}
	select {
	case refused := <-failed:
		if k.ended == "" {
			err = refused
		}
	default:
		if k.ended == "" && k.finishing {
			k.ended = endedSignal
		}
	}
	rec.Session.Steps, rec.Session.Ended = k.begun, k.ended
	for _, s := range k.steps {
		s.conn.Close()
	}
	return err
}

// why is what ends the session, once something does.
func (k *keeper) why() string {
	k.mu.Lock()
	ended, ending := k.ended, k.state == SessionEnding
	k.mu.Unlock()
	if ended != "" || !ending {
		return ended
	}
	if _, timedOut, _ := k.c.p.control.outcome(); timedOut {
		return endedMaximum
	}
	return endedSignal
}

// setState wakes who waits for the session to be ready, or not to become it.
func (k *keeper) setState(s SessionState) {
	if k.state == SessionStarting && s != SessionStarting {
		close(k.opened)
	}
	k.state = s
}

// open starts the session's own program, waits until the session is ready, and says so.
func (k *keeper) open(ctx context.Context) error {
	over, err := k.serve(ctx)
	if err == nil {
		err = k.await(ctx, over)
	}
	if err != nil {
		return err
	}
	k.mu.Lock()
	ended := k.state != SessionStarting
	if !ended {
		k.setState(SessionReady)
		k.rest()
	}
	k.mu.Unlock()
	if ended {
		return &Error{Reason: ReasonSession, Msg: "the session ended before it was ready"}
	}
	return k.announce(k.id)
}

// serve starts the session's own program, if it has one, and gives its end.
func (k *keeper) serve(ctx context.Context) (<-chan error, error) {
	if len(k.service) == 0 {
		return nil, nil
	}
	begun, over := make(chan struct{}), make(chan error, 1)
	go func() {
		rec, err := k.inside(ctx, k.service, "", &lossy{w: &limited{w: k.log, left: maxServiceLog}}, func() { close(begun) })
		if err == nil {
			err = fmt.Errorf("it ended with exit code %d", rec.Exit)
		}
		fmt.Fprintf(k.log, "agentshim: the session's program: %s\n", printable(err.Error()))
		over <- &Error{
			Reason: ReasonSession, Msg: fmt.Sprintf("the session's program %q", k.service[0]), Err: err,
			Hint: cmp.Or(HintOf(err), "its output is in the keeper's log: "+k.c.p.folders.keeperLog(k.id)),
		}
	}()
	select {
	case <-begun:
		return over, nil
	case err := <-over:
		return nil, err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// limited writes the first bytes and drops the rest.
type limited struct {
	w    io.Writer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	part := p[:min(len(p), l.left)]
	l.left -= len(part)
	if _, err := l.w.Write(part); err != nil {
		return 0, err
	}
	return len(p), nil
}

// await waits for session.ready. over is the end of the session's own program.
func (k *keeper) await(ctx context.Context, over <-chan error) error {
	argv := k.readiness()
	if argv == nil {
		return nil
	}
	late := make(chan struct{})
	defer startCountdown(readyTimeout, func() { close(late) }).stop()
	for notice := time.Now().Add(readyNotice); ; {
		rec, err := k.inside(ctx, argv, readyAttempt, io.Discard, nil)
		if err != nil && !errors.Is(err, ReasonTimeout) {
			return err
		}
		if err == nil && rec.Exit == 0 {
			return nil
		}
		unready := fmt.Sprintf("%q ended with exit code %d", argv, rec.Exit)
		if port := k.c.p.job.Harness.Session.Ready.Port; port != 0 {
			unready = fmt.Sprintf("nothing listens on port %d inside", port)
		}
		if !notice.IsZero() && time.Now().After(notice) {
			k.c.p.job.Notice("the session is not ready yet: %s", unready)
			notice = time.Time{}
		}
		select {
		case err := <-over:
			return err
		case <-late:
			return &Error{Reason: ReasonSession, Msg: fmt.Sprintf("not ready after %v: %s", readyTimeout, unready), Hint: hintReady}
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(readyInterval):
		}
	}
}

const hintReady = "look at session.ready in the harness file"

// readiness is the program whose exit code 0 says that the session is ready; nil for none.
func (k *keeper) readiness() []string {
	h := k.c.p.job.Harness.Session
	switch {
	case h == nil || h.Ready == nil:
		return nil
	case h.Ready.Port != 0:
		return []string{spec.InitPath, wire.DialArg, fmt.Sprint(h.Ready.Port)}
	}
	return h.Ready.Command
}

// inside runs a program as a step of the keeper's own. begun is called when it runs, and may
// be nil.
func (k *keeper) inside(ctx context.Context, argv []string, timeout string, out io.Writer, begun func()) (Record, error) {
	near, far := net.Pipe()
	defer near.Close()
	go k.client(newKeeperConn(far), true)
	j := k.c.p.job
	j.Command, j.Words, j.keeper, j.Session = argv, nil, nil, k.id
	j.Overrides = harness.Overrides{}
	j.Stdin, j.Stdout, j.Stderr, j.Terminal = eofReader{}, out, out, nil
	p := &prepared{job: j, phases: newPhases(), folders: k.c.p.folders, stdin: j.Stdin, begun: begun}
	rec := Record{ID: newRunID()}
	err := p.openStep(newKeeperConn(near))
	if err == nil {
		p.job.Harness.Timeout = timeout
		p.attach(newControl(j, func(error) {}))
		err = p.runStep(ctx, &rec)
	}
	return rec, err
}

type eofReader struct{}

func (eofReader) Read([]byte) (int, error) { return 0, io.EOF }

// receive hands init's frames on until it says how the session ended.
func (k *keeper) receive() (wire.Exit, error) {
	var exit wire.Exit
	for {
		f, err := k.c.conn.Recv()
		if err == nil {
			err = k.take(f, &exit)
		}
		if errors.Is(err, errHarnessEnded) {
			k.c.p.control.exited()
			return exit, nil
		}
		if err != nil {
			return exit, err
		}
	}
}

func (k *keeper) take(f wire.Frame, exit *wire.Exit) error {
	if f.Step == 0 {
		return k.takeOwn(f, exit)
	}
	switch f.Kind {
	case wire.KindStarted, wire.KindRefused, wire.KindData, wire.KindEOF, wire.KindCredit, wire.KindBack, wire.KindBackData, wire.KindExit:
	default:
		return wire.ErrProtocol
	}
	k.mu.Lock()
	s := k.steps[f.Step]
	k.mu.Unlock()
	if s == nil {
		return nil // a refusal of what its client gave up
	}
	if !s.put(f) {
		go func() { _ = k.c.conn.Of(s.id).Send(wire.KindCut, 0, nil) }() // never wait here: init may wait for this loop
	}
	if f.Kind == wire.KindExit || f.Kind == wire.KindRefused {
		k.left(s)
	}
	return nil
}

// takeOwn handles a frame that is no step's: the session's end.
func (k *keeper) takeOwn(f wire.Frame, exit *wire.Exit) error {
	switch f.Kind {
	case wire.KindTunnelData, wire.KindTunnelEOF, wire.KindTunnelCredit, wire.KindTunnelEnd:
		return k.tunnels.Handle(f)
	case wire.KindBack:
		return k.c.backs.begin(f)
	case wire.KindBackData:
		return k.c.backs.add(f.Payload)
	case wire.KindExit:
		k.mu.Lock()
		expected := k.finishing
		k.mu.Unlock()
		if !expected || !k.c.backs.finish() {
			return wire.ErrProtocol
		}
		if err := f.JSON(exit); err != nil {
			return err
		}
		return errHarnessEnded
	}
	return wire.ErrProtocol
}

// left takes a step off the list: init says nothing of it any more.
func (k *keeper) left(s *carried) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.steps, s.id)
	s.finish()
	if !s.own {
		k.busy--
		k.rest()
	}
	if k.state == SessionEnding && len(k.steps) == 0 {
		k.finishLocked()
	}
}

// rest lets the idle time begin, if nothing runs.
func (k *keeper) rest() {
	idle := duration(k.session().Idle)
	if k.state != SessionReady || k.busy > 0 || idle == 0 {
		return
	}
	k.idle = startCountdown(idle, func() { k.end(endedIdle) })
}

// end ends the session, once.
func (k *keeper) end(why string) {
	k.mu.Lock()
	first := k.ended == "" && k.state != SessionEnding
	if first {
		k.ended = why
	}
	k.mu.Unlock()
	if first {
		k.c.p.control.stop(unix.SIGTERM)
	}
}

// order implements running: a signal to end is every step's, and SIGKILL ends what is left.
func (k *keeper) order(kind wire.Kind, n uint32) {
	if kind != wire.KindSignal {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	switch n {
	case uint32(unix.SIGKILL):
		k.setState(SessionEnding)
		k.finishLocked()
	case uint32(unix.SIGTERM), uint32(unix.SIGINT), uint32(unix.SIGHUP):
		k.setState(SessionEnding)
		for id := range k.steps {
			go func() { _ = k.c.conn.Of(id).SendUint32(wire.KindSignal, 0, uint32(unix.SIGTERM)) }()
		}
		if len(k.steps) == 0 {
			k.finishLocked()
		}
	}
}

// finishLocked tells init to end. It may not read at once.
func (k *keeper) finishLocked() {
	if !k.finishing {
		k.finishing = true
		go func() { _ = k.c.conn.Send(wire.KindFinish, 0, nil) }() // a write error shows in receive too
	}
}

// abandon implements running: the steps' output is their clients' business.
func (k *keeper) abandon() {}

// cut implements running.
func (k *keeper) cut() {
	k.c.lifeline()
	k.c.watchdog(endTimeout)
}

// accept takes clients until the session's folder is gone.
func (k *keeper) accept(l *net.UnixListener) {
	for {
		conn, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // too many descriptors: a client that ends makes room
			time.Sleep(readyInterval)
			continue
		}
		if checkPeer(conn) != nil {
			conn.Close()
			continue
		}
		go k.client(newKeeperConn(conn), false)
	}
}

// patience is how long a client may take for its first question.
const patience = 30 * time.Second

// client answers one client until it goes.
func (k *keeper) client(conn *keeperConn, own bool) {
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	for {
		var q request
		if receiveJSON(conn.wire, wire.KindRequest, &q) != nil {
			return
		}
		_ = conn.SetReadDeadline(time.Time{}) // it may read a prompt now
		if q.Op == opDown {
			k.down(conn)
			return
		}
		r, err := k.answer(q, own)
		if err != nil {
			r = refused(err)
		}
		if q.Op == opStep && err == nil {
			k.carrying.Add(1)
			defer k.carrying.Done()
			k.carry(conn, r, own)
			return
		}
		if conn.wire.SendJSON(wire.KindReply, r) != nil || err != nil {
			return
		}
	}
}

// down ends the session for a client and answers when it has ended.
func (k *keeper) down(conn *keeperConn) {
	k.downs.Add(1)
	defer k.downs.Done()
	k.end(endedDown)
	<-k.done
	_ = conn.wire.SendJSON(wire.KindReply, reply{})
}

func (k *keeper) answer(q request, own bool) (reply, error) {
	switch q.Op {
	case opLook:
		k.mu.Lock()
		defer k.mu.Unlock()
		return reply{State: k.state, Running: k.busy, Steps: k.begun}, nil
	case opOpen:
		if !own {
			<-k.opened
		}
		return k.file(), nil
	case opStep:
		return k.step(q)
	}
	return reply{}, &Error{Reason: ReasonInternal, Msg: fmt.Sprintf("a keeper is not asked for %q", printable(q.Op))}
}

// file is what a step begins with.
func (k *keeper) file() reply {
	p := k.c.p
	return reply{
		ID: k.id, Name: k.name, File: p.job.sessionFile(), AgentFolders: mounts.AgentFolders(p.job.Harness, p.host.Mounts),
	}
}

// sessionFile is what the job's harness was made of.
func (j Job) sessionFile() sessionFile {
	return sessionFile{Spec: j.Spec, Dir: j.Harness.Dir, Overrides: j.Overrides}
}

// step decides a step's process.
func (k *keeper) step(q request) (reply, error) {
	if q.Options == nil || q.File == nil {
		return reply{}, &Error{Reason: ReasonInternal, Msg: "a step without options"}
	}
	h, err := q.File.parse()
	if err != nil {
		return reply{}, err
	}
	process := spec.Step(k.c.p.plan, h, k.c.p.host, *q.Options)
	return reply{Process: &process}, nil
}
