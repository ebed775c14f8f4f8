package wire

import (
	"fmt"
	"io"
	"sync"
)

// channel is where one flow-controlled stream's frames go: their kinds and number, and
// the credit that it starts with, which is the most there ever is.
type channel struct {
	conn              *Conn
	data, eof, credit Kind
	stream            uint8
	window            int
}

// stream is the channel of one of the harness's streams.
func stream(c *Conn, number uint8) channel {
	return channel{conn: c, data: KindData, eof: KindEOF, credit: KindCredit, stream: number, window: Window}
}

func (c channel) send(k Kind, payload []byte) error { return c.conn.Send(k, c.stream, payload) }

func (c channel) grant(n int) error { return c.conn.SendUint32(c.credit, c.stream, uint32(n)) }

// Source sends what it reads as one stream, within the peer's credit.
type Source struct {
	channel

	mu     sync.Mutex
	cond   sync.Cond
	left   int64 // credit that is not used yet
	closed bool
}

// NewSource returns the sending end of a stream.
func NewSource(c *Conn, number uint8) *Source { return newSource(stream(c, number)) }

func newSource(c channel) *Source {
	s := &Source{channel: c, left: int64(c.window)}
	s.cond.L = &s.mu
	return s
}

// Grant adds credit. A peer may not grant more than one window in all.
func (s *Source) Grant(n uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left+int64(n) > int64(s.window) {
		return fmt.Errorf("%w: credit of %d on stream %d passes the window", ErrProtocol, n, s.stream)
	}
	s.left += int64(n)
	s.cond.Signal()
	return nil
}

// Close makes Run return once its current read does.
func (s *Source) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.cond.Signal()
}

// wait returns the credit at hand, at least 1, or 0 once closed.
func (s *Source) wait() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.left == 0 && !s.closed {
		s.cond.Wait()
	}
	if s.closed {
		return 0
	}
	return s.left
}

func (s *Source) take(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left -= int64(n)
}

// Run sends src until its end and then the stream's end. It never reads a byte
// for which there is no credit. A read error ends the stream like its end; the
// returned error is a write error of the connection.
func (s *Source) Run(src io.Reader) error {
	end, err := s.pump(src)
	if end == nil {
		return err
	}
	return s.send(s.eof, nil)
}

// pump sends src until it ends with an error, io.EOF among them. The end is nil when
// the source was closed before, or with an error of the connection.
func (s *Source) pump(src io.Reader) (end, err error) {
	buf := make([]byte, min(MaxData, s.window/4))
	for {
		credit := s.wait()
		if credit == 0 {
			return nil, nil
		}
		n, end := src.Read(buf[:min(credit, int64(len(buf)))])
		if n > 0 {
			s.take(n)
			if err := s.send(s.data, buf[:n]); err != nil {
				return nil, err
			}
		}
		if end != nil {
			return end, nil
		}
	}
}

// Sink receives one stream. It holds at most one window of unwritten data, so
// that Put never blocks.
type Sink struct {
	channel

	mu      sync.Mutex
	cond    sync.Cond
	pending []byte
	// unacked counts what was received and not yet granted again.
	unacked int
	ended   bool
	dead    bool
	// abandoned: what comes is dropped and earns credit.
	abandoned bool
}

// NewSink returns the receiving end of a stream.
func NewSink(c *Conn, number uint8) *Sink { return newSink(stream(c, number)) }

func newSink(c channel) *Sink {
	s := &Sink{channel: c}
	s.cond.L = &s.mu
	return s
}

// Put takes a data frame's payload. It returns ErrProtocol when the peer sends
// past its credit or past the end.
func (s *Sink) Put(p []byte) error {
	dropped, err := s.put(p)
	if err != nil || !dropped {
		return err
	}
	return s.grant(len(p))
}

func (s *Sink) put(p []byte) (dropped bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.unacked+len(p) > s.window {
		return false, fmt.Errorf("%w: data beyond credit or end on stream %d", ErrProtocol, s.stream)
	}
	if s.abandoned {
		return true, nil
	}
	s.unacked += len(p)
	if !s.dead {
		s.pending = append(s.pending, p...)
		s.cond.Signal()
	}
	return false, nil
}

// Abandon drops what Run has not written and everything later, and grants credit
// for it: the peer isn't held up by a writer that stands still. It does not make
// Run return while dst blocks.
func (s *Sink) Abandon() error {
	s.mu.Lock()
	owed := s.unacked
	if s.ended || s.abandoned {
		owed = 0
	}
	s.abandoned, s.unacked, s.pending = true, 0, nil
	s.mu.Unlock()
	if owed == 0 {
		return nil
	}
	return s.grant(owed)
}

// CloseWrite marks the stream's end: Run returns when all is written.
func (s *Sink) CloseWrite() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.cond.Signal()
}

// next swaps out what is pending; false at the stream's end, and once the sink is dead.
func (s *Sink) next(spare []byte) ([]byte, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.pending) == 0 && !s.ended && !s.dead {
		s.cond.Wait()
	}
	p := s.pending
	s.pending = spare[:0]
	return p, len(p) > 0
}

// ack grants credit for what was written. After the stream's end nobody needs it,
// and the peer may be gone.
func (s *Sink) ack(n int) error {
	s.mu.Lock()
	if !s.abandoned {
		s.unacked -= n
	}
	done := s.ended || s.abandoned
	s.mu.Unlock()
	if done {
		return nil
	}
	return s.grant(n)
}

// Run writes the stream to dst until its end, granting credit as it goes. When
// dst fails, or the connection while the stream's end has not come, it returns that
// error; what comes later is dropped and earns no credit, so the peer stops by itself.
func (s *Sink) Run(dst io.Writer) error {
	var spare []byte
	for {
		p, ok := s.next(spare)
		if !ok {
			return nil
		}
		if _, err := dst.Write(p); err != nil {
			s.kill()
			return err
		}
		if err := s.ack(len(p)); err != nil {
			s.kill()
			return err
		}
		spare = p
	}
}

// kill drops what is there and what comes later, and makes Run return unless dst blocks.
func (s *Sink) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dead, s.pending = true, nil
	s.cond.Signal()
}

// hasEnded says whether the stream's end has come.
func (s *Sink) hasEnded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}
