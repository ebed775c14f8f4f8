package shim

import (
	"fmt"
	"sync"

	"github.com/agentshim/agentshim/shim/wire"
)

// carried is one step between its client and init. What init sends is queued, so that
// a client that stands still holds up no other one; credit bounds the queue.
type carried struct {
	id   uint16
	own  bool
	conn *keeperConn

	mu    sync.Mutex
	cond  sync.Cond
	queue []wire.Frame
	size  int
	// ended: the last frame is in the queue. closed: nobody takes the rest.
	ended, closed bool

	// launched is the forwarding goroutine's.
	launched bool
	// last gives the keeper's word behind the step's end.
	last func() reply
}

// maxQueue bounds what waits for one client, in bytes: two windows of output, and
// what init grants for input that comes in small pieces.
const maxQueue = 4 << 20

// frameCost is what a frame costs beside its payload.
const frameCost = 64

// carry registers a step, answers its request with r, and moves its frames until it is over
// or its client is gone, which cuts it.
func (k *keeper) carry(conn *keeperConn, r reply, own bool) {
	s, err := k.begin(conn, own)
	if err != nil {
		_ = conn.wire.SendJSON(wire.KindReply, refused(err))
		return
	}
	defer s.last()
	if conn.wire.SendJSON(wire.KindReply, r) == nil {
		var written sync.WaitGroup
		written.Go(s.write)
		k.forward(s)
		s.close()
		written.Wait()
	}
	k.drop(s)
}

// begin gives a step its number.
func (k *keeper) begin(conn *keeperConn, own bool) (*carried, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.state == SessionEnding:
		return nil, &Error{Reason: ReasonSession, Msg: "session " + k.id + " is ending", Hint: "agentshim up makes a new one"}
	case len(k.steps) >= wire.MaxSteps:
		return nil, &Error{Reason: ReasonSessionBusy, Msg: fmt.Sprintf("session %s runs %d steps already", k.id, wire.MaxSteps), Hint: "wait for one to end"}
	}
	k.last++
	for k.last == 0 || k.steps[k.last] != nil {
		k.last++
	}
	refusals := k.c.egress.refusals()
	s := &carried{id: k.last, own: own, conn: conn, last: func() reply { return reply{Refusals: refusals(), Ended: k.why()} }}
	s.cond.L = &s.mu
	k.steps[s.id] = s
	if !own {
		k.begun++
		k.busy++
		k.idle.stop()
	}
	return s, nil
}

// drop cuts a step whose client is gone. Init says when a launched one has ended; of any
// other it says nothing any more.
func (k *keeper) drop(s *carried) {
	_ = k.c.conn.Of(s.id).Send(wire.KindCut, 0, nil) // a write error shows in receive too
	k.mu.Lock()
	waits := s.launched || k.steps[s.id] != s
	k.mu.Unlock()
	if !waits {
		k.left(s)
	}
}

// forward hands a client's frames to init until the client is gone. After the step's end
// some may be on their way.
func (k *keeper) forward(s *carried) {
	init := k.c.conn.Of(s.id)
	for {
		f, err := s.conn.wire.Recv()
		if err != nil || !s.may(f) {
			return
		}
		if !s.over() && init.Send(f.Kind, f.Stream, f.Payload) != nil {
			return
		}
	}
}

// may says whether a client may send that now.
func (s *carried) may(f wire.Frame) bool {
	switch f.Kind {
	case wire.KindFile, wire.KindFileData:
		return !s.launched && f.Step == 0
	case wire.KindLaunch:
		first := !s.launched
		s.launched = true
		return first && f.Step == 0
	case wire.KindData, wire.KindEOF:
		return s.launched && f.Step == 0 && f.Stream == wire.Stdin
	case wire.KindCredit:
		return s.launched && f.Step == 0 && f.Stream != wire.Stdin
	case wire.KindSignal, wire.KindWindow:
		return s.launched && f.Step == 0
	}
	return false
}

// put queues a frame for the client; false where that does not take what was sent before.
func (s *carried) put(f wire.Frame) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return true
	}
	if s.size += len(f.Payload) + frameCost; s.size > maxQueue {
		s.closed = true
		s.conn.Close()
		s.cond.Signal()
		return false
	}
	f.Payload = append([]byte(nil), f.Payload...)
	s.queue = append(s.queue, f)
	s.cond.Signal()
	return true
}

// write sends the queue and, behind the step's last frame, the keeper's own word; less
// where nobody takes it.
func (s *carried) write() {
	for {
		f, ok := s.next()
		if !ok {
			break
		}
		if s.conn.wire.Send(f.Kind, f.Stream, f.Payload) != nil {
			s.close()
			break
		}
	}
	if last := s.last(); s.over() {
		_ = s.conn.wire.SendJSON(wire.KindReply, last) // its client may be gone
	}
}

func (s *carried) next() (wire.Frame, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.queue) == 0 && !s.ended && !s.closed {
		s.cond.Wait()
	}
	if s.closed || len(s.queue) == 0 {
		return wire.Frame{}, false
	}
	f := s.queue[0]
	s.queue = s.queue[1:]
	s.size -= len(f.Payload) + frameCost
	return f, true
}

// close drops what is queued and what comes later.
func (s *carried) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed, s.queue = true, nil
	s.cond.Signal()
}

// finish says that the last frame is queued.
func (s *carried) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.cond.Signal()
}

func (s *carried) over() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}
