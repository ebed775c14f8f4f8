package wire

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// MaxTunnels is how many connections are carried at one time.
const MaxTunnels = 128

// TunnelBuffer is what a tunnel's socket may hold each way (SO_SNDBUF, SO_RCVBUF): the
// kernel would let a stalled connection grow to megabytes, which no cgroup may account.
const TunnelBuffer = 2 * TunnelWindow

// lastWrites bounds how long what came before a reset is still written to who reads slowly.
const lastWrites = 2 * time.Second

// Socket is one end of a connection that a tunnel carries. Its errors after a deadline
// match os.ErrDeadlineExceeded. Close and Reset may be called more than once and make
// reads and writes in progress fail.
type Socket interface {
	io.ReadWriteCloser
	CloseWrite() error
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
	// Reset ends the connection so that its other end sees a reset.
	Reset()
}

// Tunnels carries TCP connections over a Conn: each direction with credit of its own, the
// end of each direction by itself, and a reset as one. What was sent right before a reset
// may be lost, as with TCP. A connection that nobody reads holds up no other frame and at
// most one TunnelWindow on each side.
//
// The side that opens tunnels chooses their numbers. One is free again when both
// sides have sent their last frame of it.
type Tunnels struct {
	conn *Conn

	mu     sync.Mutex
	slots  [MaxTunnels]*tunnel
	closed bool
}

// NewTunnels returns the tunnels of a connection, none yet.
func NewTunnels(c *Conn) *Tunnels { return &Tunnels{conn: c} }

// tunnel is one side of one carried connection.
type tunnel struct {
	source *Source
	sink   *Sink

	// Below, Tunnels.mu guards.

	socket Socket // nil until the accepting side has dialled
	// finished: the source's end is on its way or sent; ending and ended: so is the
	// last frame. over: the peer's last frame came.
	finished, ending, ended, over bool
	// cut: the peer gave up before both directions had ended.
	cut bool
}

func (t *Tunnels) tunnel(number uint8) *tunnel {
	c := channel{
		conn: t.conn, data: KindTunnelData, eof: KindTunnelEOF, credit: KindTunnelCredit, stream: number, window: TunnelWindow,
	}
	return &tunnel{source: newSource(c), sink: newSink(c)}
}

// Open carries a connection to that port of the other side. False: there is no room for
// it, and s is left as it is. It returns when the peer has been asked.
func (t *Tunnels) Open(s Socket, port uint16) bool {
	number, tn := t.take(s)
	if tn == nil {
		return false
	}
	if err := t.conn.SendUint32(KindDial, number, uint32(port)); err != nil {
		s.Reset() // the connection is broken: the receiving loop says so
		return true
	}
	go t.run(number, tn, s)
	return true
}

func (t *Tunnels) take(s Socket) (uint8, *tunnel) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return 0, nil
	}
	for i, used := range t.slots {
		if used == nil {
			number := uint8(i)
			t.slots[i] = t.tunnel(number)
			t.slots[i].socket = s
			return number, t.slots[i]
		}
	}
	return 0, nil
}

// Accept takes a KindDial frame: it calls dial, with the port, beside the receiving
// loop, and carries what that returns. A connection that can't be dialled is reset.
func (t *Tunnels) Accept(f Frame, dial func(port uint16) (Socket, error)) error {
	port, err := f.Uint32()
	if err != nil {
		return err
	}
	if port == 0 || port > 1<<16-1 {
		return fmt.Errorf("%w: tunnel to port %d", ErrProtocol, port)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	// The peer uses a number again as soon as it has this side's last frame.
	if old := t.slots[f.Stream]; old != nil && !(old.ending && old.over) {
		return fmt.Errorf("%w: tunnel %d is open already", ErrProtocol, f.Stream)
	}
	number, tn := f.Stream, t.tunnel(f.Stream)
	t.slots[number] = tn
	go func() {
		s, err := dial(uint16(port))
		if err != nil {
			t.end(number, tn)
			return
		}
		t.attach(tn, s)
		t.run(number, tn, s)
	}()
	return nil
}

// attach gives a tunnel its socket.
func (t *Tunnels) attach(tn *tunnel, s Socket) {
	t.mu.Lock()
	defer t.mu.Unlock()
	tn.socket = s
	switch {
	case t.closed:
		s.Reset()
	case tn.cut:
		hurry(s)
	}
}

// Handle takes one of the KindTunnel frames. It never blocks.
func (t *Tunnels) Handle(f Frame) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	tn := t.slots[f.Stream]
	if tn == nil || tn.over {
		return fmt.Errorf("%w: frame kind %d of tunnel %d, which is not open", ErrProtocol, f.Kind, f.Stream)
	}
	switch f.Kind {
	case KindTunnelData:
		return tn.sink.Put(f.Payload)
	case KindTunnelEOF:
		tn.sink.CloseWrite()
		return nil
	case KindTunnelCredit:
		n, err := f.Uint32()
		if err != nil {
			return err
		}
		return tn.source.Grant(n)
	case KindTunnelEnd:
		t.ended(f.Stream, tn)
		return nil
	}
	return fmt.Errorf("%w: frame kind %d is no tunnel's", ErrProtocol, f.Kind)
}

// ended takes the peer's last frame of a tunnel.
func (t *Tunnels) ended(number uint8, tn *tunnel) {
	tn.over = true
	if !tn.finished || !tn.sink.hasEnded() {
		tn.cut = true
		tn.source.Close()
		tn.sink.CloseWrite()
		if tn.socket != nil {
			hurry(tn.socket)
		}
	}
	if tn.ended {
		t.slots[number] = nil
	}
}

// hurry ends the reads of a socket, and its writes soon.
func hurry(s Socket) {
	_ = s.SetReadDeadline(time.Unix(1, 0))
	_ = s.SetWriteDeadline(time.Now().Add(lastWrites))
}

// run carries a connection until both directions have ended, or one of its ends is gone.
func (t *Tunnels) run(number uint8, tn *tunnel, s Socket) {
	written := make(chan error, 1)
	go func() {
		err := tn.sink.Run(s)
		if err == nil && !t.isCut(tn) {
			_ = s.CloseWrite() // ENOTCONN: the other end is gone, which the source reads
		}
		written <- err
	}()
	end, err := tn.source.pump(s)
	whole := errors.Is(end, io.EOF)
	if whole {
		t.set(&tn.finished)
		err = tn.source.send(KindTunnelEOF, nil)
	}
	// After the peer's end, what it sent before is written still; else a socket that
	// failed takes nothing any more.
	if err != nil || end != nil && !whole && !errors.Is(end, os.ErrDeadlineExceeded) {
		s.Reset()
		tn.sink.kill()
	}
	if <-written == nil && whole && err == nil && !t.isCut(tn) {
		s.Close()
	} else {
		s.Reset()
	}
	t.end(number, tn)
}

func (t *Tunnels) set(flag *bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	*flag = true
}

func (t *Tunnels) isCut(tn *tunnel) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return tn.cut
}

// end sends this side's last frame of a tunnel. It has to be sent before this side uses
// the number again, and noted before the peer can.
func (t *Tunnels) end(number uint8, tn *tunnel) {
	t.set(&tn.ending)
	// A write error shows in the receiving loop too.
	_ = t.conn.Send(KindTunnelEnd, number, nil)
	t.mu.Lock()
	defer t.mu.Unlock()
	tn.ended = true
	if tn.over && t.slots[number] == tn {
		t.slots[number] = nil
	}
}

// Close resets every connection. No further one is opened.
func (t *Tunnels) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	for _, tn := range t.slots {
		if tn != nil && tn.socket != nil {
			tn.socket.Reset()
		}
	}
}
