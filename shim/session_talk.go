package shim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// What a keeper is asked.
const (
	opLook = "look" // its state
	opOpen = "open" // the session's harness; waits until the session is ready
	opStep = "step" // a step; what follows is as between a shim and init
	opDown = "down" // to end; the answer comes when the container is gone
)

// sessionFile is a harness file and what makes a harness of it.
type sessionFile struct {
	Spec      []byte            `json:"spec"`
	Dir       string            `json:"dir"`
	Overrides harness.Overrides `json:"overrides"`
}

// request is one question to a session's keeper, or what up tells it at its start.
type request struct {
	Op string `json:"op"`
	// File is the step's harness file: the session's with what the step has of its own.
	File *sessionFile `json:"file,omitempty"`
	// Options are the step's for spec.Step.
	Options *spec.Options `json:"options,omitempty"`
	// Start is what up tells.
	Start *keeperStart `json:"start,omitempty"`
}

// reply is a keeper's answer.
type reply struct {
	// Reason, Message and Hint are a refusal.
	Reason  Reason `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	Hint    string `json:"hint,omitempty"`

	State   SessionState `json:"state,omitempty"`
	Running int          `json:"running,omitempty"`
	Steps   int          `json:"steps,omitempty"`

	ID   string `json:"id,omitempty"`
	Name string `json:"name,omitempty"`
	// File is the session's harness file, AgentFolders are the host's folders in which its
	// agents may have made links.
	File         sessionFile `json:"file,omitzero"`
	AgentFolders []string    `json:"agentFolders,omitempty"`
	// Process is the step as it starts.
	Process *spec.Process `json:"process,omitempty"`
	// Refusals are what the session was refused while the step ran, in the keeper's last word
	// behind the step's end.
	Refusals []string `json:"refusals,omitempty"`
	// Ended says in that word what ends the session, if something does.
	Ended string `json:"ended,omitempty"`
	// Say is text for up's standard error.
	Say []byte `json:"say,omitempty"`
}

// refused makes an error an answer.
func refused(err error) reply {
	return reply{Reason: ReasonOf(err), Message: err.Error(), Hint: HintOf(err)}
}

// err is what a refusal says; nil for any other answer.
func (r reply) err() error {
	if r.Reason == "" {
		return nil
	}
	return &Error{Reason: r.Reason, Msg: printable(r.Message), Hint: printable(r.Hint)}
}

// ask sends a request and waits for its answer.
func ask(c *wire.Conn, q request) (reply, error) {
	if err := c.SendJSON(wire.KindRequest, q); err != nil {
		return reply{}, err
	}
	r, err := receiveReply(c)
	if err == nil {
		err = r.err()
	}
	return r, err
}

func receiveReply(c *wire.Conn) (reply, error) {
	var r reply
	return r, receiveJSON(c, wire.KindReply, &r)
}

func receiveJSON(c *wire.Conn, kind wire.Kind, v any) error {
	f, err := c.Recv()
	if err != nil {
		return err
	}
	if f.Kind != kind {
		return fmt.Errorf("%w: frame kind %d, not %d", wire.ErrProtocol, f.Kind, kind)
	}
	d := json.NewDecoder(bytes.NewReader(f.Payload))
	d.UseNumber() // options are passed as written
	return d.Decode(v)
}

// keeperConn is a connection between a session's keeper and a client.
type keeperConn struct {
	net.Conn
	wire *wire.Conn
}

func newKeeperConn(c net.Conn) *keeperConn { return &keeperConn{Conn: c, wire: wire.NewConn(c, c)} }

var errStranger = errors.New("another user's process is at the other end")

// checkPeer refuses who is not this user.
func checkPeer(c *net.UnixConn) error {
	cred, err := netpolicy.PeerCred(c)
	if err == nil && int(cred.Uid) != os.Getuid() {
		err = fmt.Errorf("%w: uid %d", errStranger, cred.Uid)
	}
	return err
}

// dialKeeper connects to a keeper of this user's.
func dialKeeper(path string) (*keeperConn, error) {
	addr, done, err := netpolicy.UnixAddr("unix", path)
	if err != nil {
		return nil, err
	}
	defer done()
	c, err := net.DialUnix("unix", nil, addr)
	if err != nil {
		return nil, err
	}
	if err := checkPeer(c); err != nil {
		c.Close()
		return nil, err
	}
	return newKeeperConn(c), nil
}

// listenKeeper makes a keeper's socket, which only this user may connect to.
func listenKeeper(path string) (*net.UnixListener, error) {
	addr, done, err := netpolicy.UnixAddr("unix", path)
	if err != nil {
		return nil, err
	}
	defer done()
	l, err := net.ListenUnix("unix", addr)
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // its name is gone with UnixAddr's descriptor
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// awaitKeeper connects to a keeper that may be about to listen.
func (f folders) awaitKeeper(ctx context.Context, id string, c claim) (*keeperConn, error) {
	for {
		k, err := dialKeeper(f.keeperSocket(id))
		switch {
		case err == nil:
			return k, nil
		case errors.Is(err, errStranger):
			return nil, &Error{Reason: ReasonSession, Msg: "session " + id, Err: err, Hint: "look who replaced the socket in " + f.runtime}
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.EAGAIN):
			return nil, &Error{Reason: ReasonSession, Msg: "session " + id, Err: err}
		case !c.Owner.alive():
			return nil, keeperGone(id)
		}
		select {
		case <-ctx.Done():
			return nil, &Error{Reason: ReasonInterrupted, Msg: "waiting for session " + id, Err: context.Cause(ctx)}
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func keeperGone(id string) error {
	return &Error{Reason: ReasonSession, Msg: "the keeper of session " + id + " is gone", Err: ErrNoSession, Hint: "agentshim down " + id + " removes what it left; agentshim up makes a new one"}
}
