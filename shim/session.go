package shim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// SessionRecord says in a record what the run has to do with a session.
type SessionRecord struct {
	// ID is the session's. It is the record's own for the session itself, another for a
	// step of it.
	ID   string `json:"id"`
	Name string `json:"name,omitempty"`
	// Steps counts those of clients that began, for the session itself: not its own program,
	// nor what asked whether it is ready.
	Steps int `json:"steps,omitempty"`
	// Ended says why the session ended: down, idle, maximum or signal; empty while it
	// runs and where something failed. A step has it where that ended the step.
	Ended string `json:"ended,omitempty"`
}

// Values of SessionRecord.Ended.
const (
	endedDown    = "down"
	endedIdle    = "idle"
	endedMaximum = "maximum"
	endedSignal  = "signal"
)

// SessionState says what a session's keeper tells.
type SessionState string

// The states. A session is starting until it is ready, and ending from when something ends
// it. It is silent when its keeper lives and does not answer within two seconds, lost when
// its keeper is gone and wrote no end. One that has ended is none any more.
const (
	SessionStarting SessionState = "starting"
	SessionReady    SessionState = "ready"
	SessionEnding   SessionState = "ending"
	SessionSilent   SessionState = "silent"
	SessionLost     SessionState = "lost"
)

// SessionInfo is one session of the caller's. Running and Steps are 0 where the keeper does
// not answer, Engine, Image and Start empty where its record can't be read.
type SessionInfo struct {
	ID     string       `json:"id"`
	Name   string       `json:"name,omitempty"`
	State  SessionState `json:"state"`
	Engine string       `json:"engine,omitempty"`
	Image  string       `json:"image,omitempty"`
	Start  time.Time    `json:"start,omitzero"`
	// Running counts the steps that run now, Steps those that have begun.
	Running int `json:"running"`
	Steps   int `json:"steps"`
	// PID is the keeper's.
	PID int `json:"pid"`
}

// ErrNoSession is returned for a name or an id that no session of the caller's has.
var ErrNoSession = errors.New("no such session")

// lookTimeout bounds the wait for a keeper's word about itself.
const lookTimeout = 2 * time.Second

// silence is after how long one that has to answer is taken for stuck.
const silence = 10 * time.Second

// Sessions lists the caller's sessions with this runtime folder, oldest first. It asks one
// keeper after another, so each that is silent costs two seconds. Its error has the reason
// state: the runtime folder can't be read.
func (s Store) Sessions() ([]SessionInfo, error) {
	entries, err := os.ReadDir(s.folders.runtime)
	if err != nil {
		return nil, &Error{Reason: ReasonState, Err: err}
	}
	var out []SessionInfo
	for _, e := range entries {
		if c, ok := s.folders.sessionClaim(e.Name()); ok {
			out = append(out, s.session(e.Name(), c))
		}
	}
	slices.SortFunc(out, func(a, b SessionInfo) int { return a.Start.Compare(b.Start) })
	return out, nil
}

// session asks one session's keeper.
func (s Store) session(id string, c claim) SessionInfo {
	info := SessionInfo{ID: id, Name: c.Session.Name, State: SessionLost, PID: c.Owner.PID}
	store := s
	store.folders.state = c.State
	if r, err := store.Run(id); err == nil {
		info.Start = r.Start
		if r.Engine != nil {
			info.Engine = r.Engine.Kind
		}
		if r.Image != nil {
			info.Image = r.Image.Ref
		}
	}
	if !c.Owner.alive() {
		return info
	}
	info.State = SessionSilent
	k, err := dialKeeper(s.folders.keeperSocket(id))
	if errors.Is(err, fs.ErrNotExist) {
		info.State = SessionStarting
	}
	if err != nil {
		return info
	}
	defer k.Close()
	_ = k.SetDeadline(time.Now().Add(lookTimeout))
	if a, err := ask(k.wire, request{Op: opLook}); err == nil {
		info.State, info.Running, info.Steps = a.State, a.Running, a.Steps
	}
	return info
}

// sessionClaim reads a session's claim; false for a folder that is none's.
func (f folders) sessionClaim(name string) (claim, bool) {
	if !isRunID(name) {
		return claim{}, false
	}
	c, err := readClaim(filepath.Join(f.runtime, name))
	return c, err == nil && c.Session != nil
}

// findSession gives the id of the session with that id or name. Of several with one
// name it is the one whose keeper lives.
func (f folders) findSession(name string) (id string, c claim, err error) {
	entries, err := os.ReadDir(f.runtime)
	if err != nil {
		return "", claim{}, &Error{Reason: ReasonState, Err: err}
	}
	for _, e := range entries {
		found, ok := f.sessionClaim(e.Name())
		if !ok || name == "" || e.Name() != name && found.Session.Name != name { // one without a name is no other's
			continue
		}
		if id == "" || found.Owner.alive() {
			id, c = e.Name(), found
		}
	}
	if id == "" {
		return "", claim{}, f.noSession(name)
	}
	return id, c, nil
}

// noSession also says what became of the last one of that name.
func (f folders) noSession(name string) error {
	e := &Error{Reason: ReasonSession, Msg: fmt.Sprintf("session %q", name), Err: ErrNoSession, Hint: "agentshim ps lists them; agentshim up makes one"}
	runs, _ := Store{folders: f}.Runs() // of those that can't be read there is nothing to say
	for _, r := range slices.Backward(runs) {
		if name != "" && r.isSession() && r.State == RunEnded && (r.ID == name || r.Session.Name == name) {
			e.Err = fmt.Errorf("%w any more: %s ended at %s: %s", ErrNoSession, r.ID, r.End.Local().Format(time.DateTime), cmp.Or(r.Session.Ended, string(r.Reason)))
			break
		}
	}
	return e
}

// downPatience is how long Down waits for a keeper beyond the grace that it gives.
const downPatience = 2 * time.Minute

// Down ends a session, given by its id or name, and returns when its container is gone,
// with its record. Steps that run get TERM, and what is left after stopGrace is killed.
// The id of a session that has ended already is no error, however that ended. Its name is
// ErrNoSession: another session may have it by now. What a keeper left that is gone is
// removed, and the error is then the session's (init-lost), as of any that failed.
func (s Store) Down(ctx context.Context, name string) (Record, error) {
	id, c, err := s.folders.findSession(name)
	if err != nil {
		if r, rerr := s.Run(name); rerr == nil && r.isSession() && r.State == RunEnded {
			return r.Record, nil
		}
		return Record{}, err
	}
	if c.Owner.alive() {
		if err := s.askDown(ctx, id, c); err != nil {
			return Record{}, err
		}
	}
	store := s
	store.folders.state = c.State
	left, err := store.pruneFolders(ctx, map[string]Adapter{}, false)
	if err != nil {
		return Record{}, err
	}
	r, err := store.Run(id)
	switch {
	case err != nil:
		return Record{}, err
	case r.State == RunLost:
		return r.Record, notRemoved(id, left)
	case r.Reason != "":
		return r.Record, &Error{Reason: r.Reason, Msg: r.Message}
	}
	return r.Record, nil
}

// notRemoved is for a session whose keeper is gone and whose container may be there.
func notRemoved(id string, left []Leftover) error {
	e := &Error{Reason: ReasonSession, Msg: "what the keeper of session " + id + " left is not removed", Hint: "agentshim prune tries again"}
	for _, l := range left {
		if l.Run == id && l.Kept != "" {
			e.Err = errors.New(l.Kept)
		}
	}
	return e
}

// askDown asks a keeper to end, and waits until it did.
func (s Store) askDown(ctx context.Context, id string, c claim) error {
	k, err := s.folders.awaitKeeper(ctx, id, c)
	if err != nil {
		if !c.Owner.alive() {
			return nil
		}
		return err
	}
	defer k.Close()
	defer context.AfterFunc(ctx, func() { k.Close() })()
	_ = k.SetDeadline(time.Now().Add(silence))
	if _, err := ask(k.wire, request{Op: opLook}); err != nil && ctx.Err() == nil && c.Owner.alive() {
		return &Error{Reason: ReasonSession, Msg: fmt.Sprintf("session %s does not answer", id), Err: err, Hint: killHint(c.Owner.PID)}
	}
	_ = k.SetDeadline(time.Time{})
	_, err = ask(k.wire, request{Op: opDown})
	if ctx.Err() != nil {
		return &Error{Reason: ReasonInterrupted, Msg: "the session is ending", Err: context.Cause(ctx)}
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for c.Owner.alive() && ctx.Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
	}()
	if err == nil && !within(downPatience, gone) || err != nil && !within(lookTimeout, gone) {
		return &Error{Reason: ReasonSession, Msg: fmt.Sprintf("session %s does not end", id), Err: err, Hint: killHint(c.Owner.PID)}
	}
	return nil
}

func killHint(keeper int) string {
	return fmt.Sprintf("kill its keeper, process %d; then: agentshim prune", keeper)
}

func (r Record) isSession() bool { return r.Session != nil && r.Session.ID == r.ID }

var sessionName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$`)

// checkSessionName refuses what could be a path, a flag or an id.
func checkSessionName(name string) error {
	if name == "" || sessionName.MatchString(name) && !isRunID(name) {
		return nil
	}
	return &Error{
		Reason: ReasonSpecInvalid, Msg: fmt.Sprintf("session name %q", name),
		Hint: "up to 63 letters, digits, dots, dashes and underscores, and not the form of an id",
	}
}

// namePrefix begins the files by which a name is one session's.
const namePrefix = "name-"

// takeName makes a name the caller's for as long as the file that it returns is open:
// the kernel lets go of it with the process. No name is never taken.
func (f folders) takeName(name string) (*os.File, error) {
	if name == "" {
		return nil, nil
	}
	path := filepath.Join(f.runtime, namePrefix+name)
	for {
		lock, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, &Error{Reason: ReasonState, Err: err}
		}
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			lock.Close()
			return nil, &Error{Reason: ReasonSession, Msg: fmt.Sprintf("a session named %q is there already", name), Hint: "agentshim ps lists them; agentshim down " + name + " ends it"}
		}
		if err == nil && sameFile(lock, path) {
			return lock, nil
		}
		lock.Close()
		if err != nil {
			return nil, &Error{Reason: ReasonState, Err: err}
		}
		// Who had the name removed the file meanwhile.
	}
}

func sameFile(f *os.File, path string) bool {
	a, err := f.Stat()
	b, berr := os.Lstat(path)
	return err == nil && berr == nil && os.SameFile(a, b)
}

// giveName lets go of a name.
func (f folders) giveName(lock *os.File) {
	if lock == nil {
		return
	}
	os.Remove(lock.Name())
	lock.Close()
}

// pruneName removes the file of a name that nobody has.
func (f folders) pruneName(file string) {
	if name, ok := strings.CutPrefix(file, namePrefix); ok {
		if lock, err := f.takeName(name); err == nil {
			f.giveName(lock)
		}
	}
}

func (f folders) keeperSocket(id string) string { return filepath.Join(f.runtime, id, "keeper.sock") }

// KeeperLog is where a session's keeper says what goes wrong.
func (f folders) keeperLog(id string) string { return filepath.Join(f.record(id), "keeper.log") }
