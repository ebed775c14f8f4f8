package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// KeepVerb is the verb by which agentshim becomes a session's keeper; only Up starts one.
const KeepVerb = "keep"

// opStart begins what up tells a keeper, opEnviron is the caller's environment.
const (
	opStart   = "start"
	opEnviron = "environ"
)

// keeperStart is what up tells a keeper: over a socket, since the harness file's values and
// the environment are nobody else's business.
type keeperStart struct {
	ID       string   `json:"id"`
	Name     string   `json:"name,omitempty"`
	Service  [][]byte `json:"service,omitempty"`
	SpecPath string   `json:"specPath,omitempty"`
	Quiet    bool     `json:"quiet,omitempty"`
	Environ  [][]byte `json:"environ,omitempty"`
}

// Up starts a session of j's harness and has take know its id once it is ready: its container
// is proven, its own program (Job.Command, if any) runs, and session.ready holds. What its
// keeper has to say until then goes to say. The keeper goes on without the caller: it
// holds none of the caller's descriptors and is in a session of its own.
//
// With an error there is no session any more, or the keeper does not answer: one that has to
// end the session is waited for ten minutes, and named. Record and keeper's log stay. Take's
// error is Up's: a session that nobody knows is ended, and so is one whose caller ends, or ctx,
// before it was taken. Later no end of the caller's ends it: that is for Store.Down,
// session.idle and session.maximum.
//
// name may be empty; else it is up to 63 letters, digits, dots, dashes and underscores that no
// other session of the caller's with this runtime folder has (reasons spec-invalid, session).
func Up(ctx context.Context, j Job, name string, quiet bool, say io.Writer, take func(id string) error) error {
	j = j.withDefaults()
	if err := checkSessionName(name); err != nil {
		return err
	}
	f, err := openFolders(j.getenv, homeFolder(j.getenv))
	if err != nil {
		return err
	}
	start := keeperStart{ID: newRunID(), Name: name, Service: bytesOf(j.Command), SpecPath: j.SpecPath, Quiet: quiet}
	conn, pid, err := f.startKeeper(start.ID)
	if err != nil {
		return err
	}
	defer conn.Close()
	end := func() { giveUp(conn) }
	defer context.AfterFunc(ctx, end)()
	if err := tellKeeper(conn.wire, j, start); err != nil && ctx.Err() == nil {
		return &Error{Reason: ReasonInternal, Msg: "the session's keeper", Err: err}
	}
	hear := func() error {
		err := hearKeeper(ctx, conn.wire, f.keeperLog(start.ID), say)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return &Error{Reason: ReasonSession, Msg: fmt.Sprintf("session %s does not end", start.ID), Err: os.ErrDeadlineExceeded, Hint: killHint(pid)}
		}
		return err
	}
	if err := hear(); err != nil {
		return err
	}
	if err := takeSession(conn, start.ID, take); err != nil {
		end()
		// The keeper's last word comes when the session is gone.
		if late := hear(); errors.Is(late, os.ErrDeadlineExceeded) {
			err = errors.Join(err, late)
		}
		return err
	}
	return nil
}

// takeSession has the caller know a session, and then tells the keeper.
func takeSession(keeper io.Writer, id string, take func(id string) error) error {
	if err := take(id); err != nil {
		return err
	}
	if _, err := keeper.Write([]byte{0}); err != nil {
		return &Error{Reason: ReasonInterrupted, Msg: "ended on request", Err: err}
	}
	return nil
}

// upPatience is how long Up waits for a keeper that has to end the session: it may take the
// commits of a program that ran in it.
const upPatience = 10 * time.Minute

// giveUp has a keeper end the session, which it does when it reads the end before the session
// was taken, and waits upPatience for it. Closing alone would not end a write to one that is stuck.
func giveUp(conn *keeperConn) {
	_ = conn.Conn.(interface{ CloseWrite() error }).CloseWrite()
	startCountdown(upPatience, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
}

func bytesOf(list []string) [][]byte {
	out := make([][]byte, len(list))
	for i, s := range list {
		out[i] = []byte(s)
	}
	return out
}

func stringsOf(list [][]byte) []string {
	var out []string
	for _, b := range list {
		out = append(out, string(b))
	}
	return out
}

// startKeeper runs this very program as a session's keeper, with nothing of the caller's but
// its ids and which certificate authorities it trusts, and returns the connection to it and its pid.
func (f folders) startKeeper(id string) (*keeperConn, int, error) {
	if err := os.MkdirAll(f.record(id), 0o700); err != nil {
		return nil, 0, &Error{Reason: ReasonState, Err: err}
	}
	log, err := os.OpenFile(f.keeperLog(id), os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600)
	if err != nil {
		return nil, 0, &Error{Reason: ReasonState, Err: err}
	}
	defer log.Close()
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, 0, &Error{Reason: ReasonInternal, Err: err}
	}
	defer theirs.Close()
	// What the caller left open in this process must not stay open in the keeper.
	if err := unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		ours.Close()
		return nil, 0, &Error{Reason: ReasonInternal, Msg: "close_range", Err: err}
	}
	cmd := exec.Command("/proc/self/exe", KeepVerb)
	cmd.Args[0] = "agentshim"
	cmd.Env, cmd.Dir = rootsEnv(os.Getenv), "/"
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		ours.Close()
		return nil, 0, &Error{Reason: ReasonInternal, Msg: "the session's keeper", Err: err}
	}
	go func() { _ = cmd.Wait() }()
	return newKeeperConn(ours), cmd.Process.Pid, nil
}

func socketPair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "keeper")
	f := os.NewFile(uintptr(fds[0]), "up")
	defer f.Close()
	ours, err := net.FileConn(f)
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

func tellKeeper(c *wire.Conn, j Job, start keeperStart) error {
	file := j.sessionFile()
	if err := c.SendJSON(wire.KindRequest, request{Op: opStart, File: &file, Start: &start}); err != nil {
		return err
	}
	environ := os.Environ()
	return c.SendJSON(wire.KindRequest, request{Op: opEnviron, Start: &keeperStart{Environ: bytesOf(environ)}})
}

// hearKeeper passes on what the keeper says until the session is ready or gone.
func hearKeeper(ctx context.Context, c *wire.Conn, log string, say io.Writer) error {
	for {
		r, err := receiveReply(c)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return err
		case err != nil && ctx.Err() != nil:
			return &Error{Reason: ReasonInterrupted, Msg: "ended on request", Err: context.Cause(ctx)}
		case err != nil:
			return &Error{Reason: ReasonSession, Msg: "the session's keeper ended", Err: err, Hint: "its log is " + log}
		case r.Reason == ReasonInterrupted && ctx.Err() != nil:
			return &Error{Reason: ReasonInterrupted, Msg: "ended on request", Err: context.Cause(ctx)}
		case r.Reason != "":
			return r.err()
		case r.State == SessionReady:
			return nil
		}
		_, _ = say.Write(r.Say)
	}
}

// KeepOptions are what the command line gives a keeper.
type KeepOptions struct {
	Version string
	// Signals end the session as they end a run.
	Signals <-chan os.Signal
	// Dress sets what a job tells its user, who reads w until the session is ready.
	Dress func(j *Job, w io.Writer)
	// Log takes what is said later.
	Log io.Writer
}

// upLink is the connection to up. After the session's start it is the log.
type upLink struct {
	log io.Writer

	mu   sync.Mutex
	conn *keeperConn // nil once up is done with
	// heard is closed when up has taken the session, or is gone; taken says which.
	heard chan struct{}
	taken bool
}

func (l *upLink) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return l.log.Write(p)
	}
	_ = l.conn.wire.SendJSON(wire.KindReply, reply{Say: p}) // up is gone: its end is seen elsewhere
	return len(p), nil
}

// last says the last word to up, unless that was said.
func (l *upLink) last(r reply) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return
	}
	_ = l.conn.wire.SendJSON(wire.KindReply, r) // up is gone
	l.conn.Close()
	l.conn = nil
}

// keeperGC keeps a keeper's heap near its live size: it does little for a long time.
const keeperGC = 25

// Keep is the whole life of a session's keeper. Its one inherited descriptor is conn. It
// returns when the container is gone and the record is written, with the error of a session
// that failed; Up has that error too, while it waits.
func Keep(ctx context.Context, conn *os.File, o KeepOptions) error {
	c, err := net.FileConn(conn)
	conn.Close()
	if err != nil {
		return &Error{Reason: ReasonInternal, Msg: "agentshim up starts a keeper, nothing else can", Err: err}
	}
	link := &upLink{log: o.Log, conn: newKeeperConn(c), heard: make(chan struct{})}
	j, k, err := link.order(o)
	if err != nil {
		link.last(refused(err))
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go link.watch(c, cancel)
	k.announce = func(id string) error {
		debug.FreeOSMemory()
		return link.ready(id)
	}
	debug.SetGCPercent(keeperGC)
	rec, err := Run(ctx, j)
	close(k.done)
	k.downs.Wait()
	carried := make(chan struct{})
	go func() { k.carrying.Wait(); close(carried) }()
	within(lookTimeout, carried) // the steps' clients read how they ended
	if err == nil {
		early := &Error{Reason: ReasonSession, Msg: "the session was ended before it was ready: " + rec.Session.Ended}
		if rec.Session.Ended == endedMaximum {
			early.Msg, early.Hint = "session.maximum passed before the session was ready", hintReady
		}
		link.last(refused(early))
		return nil
	}
	link.last(refused(err))
	return err
}

// ready tells up, and waits until it has taken the session.
func (l *upLink) ready(id string) error {
	l.mu.Lock()
	if l.conn != nil {
		_ = l.conn.wire.SendJSON(wire.KindReply, reply{State: SessionReady, ID: id}) // its end is seen below
	}
	l.mu.Unlock()
	<-l.heard
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.taken {
		return &Error{Reason: ReasonInterrupted, Msg: "agentshim up ended before it had the session"}
	}
	return nil
}

// watch ends a session whose up is gone before it has taken it, by one byte.
func (l *upLink) watch(c net.Conn, cancel context.CancelCauseFunc) {
	n, _ := c.Read(make([]byte, 1))
	l.mu.Lock()
	defer l.mu.Unlock()
	defer close(l.heard)
	switch {
	case l.conn == nil:
	case n == 1:
		l.taken = true
		l.conn.Close()
		l.conn = nil
	default:
		cancel(SignalError{unix.SIGTERM})
	}
}

// order takes what up tells.
func (l *upLink) order(o KeepOptions) (Job, *keeper, error) {
	var start, environ request
	err := receiveJSON(l.conn.wire, wire.KindRequest, &start)
	if err == nil {
		err = receiveJSON(l.conn.wire, wire.KindRequest, &environ)
	}
	if err == nil && (start.Op != opStart || start.Start == nil || start.File == nil || environ.Op != opEnviron || environ.Start == nil) {
		err = errors.New("no order")
	}
	if err != nil {
		return Job{}, nil, &Error{Reason: ReasonInternal, Msg: "agentshim up starts a keeper, nothing else can", Err: err}
	}
	h, err := start.File.parse()
	if err != nil {
		return Job{}, nil, err
	}
	vars := environment{}
	for _, word := range environ.Start.Environ {
		name, value, _ := strings.Cut(string(word), "=")
		vars[name] = value
	}
	s := start.Start
	k := newKeeper(s.ID, s.Name, stringsOf(s.Service))
	k.log = o.Log
	j := Job{
		Harness: h, Spec: start.File.Spec, Overrides: start.File.Overrides, SpecPath: s.SpecPath, Version: o.Version, Signals: o.Signals, LookupEnv: vars.lookup,
		Stdout: io.Discard, Stderr: io.Discard, keeper: k,
	}
	if !s.Quiet {
		o.Dress(&j, l)
	}
	return j, k, nil
}
