package wire

import (
	"fmt"
	"io"
	"sync"
)

// Source sends what it reads as one stream, within the peer's credit.
type Source struct {
	conn   *Conn
	stream uint8

	mu     sync.Mutex
	cond   sync.Cond
	credit int64
	closed bool
}

// NewSource returns the sending end of a stream.
func NewSource(c *Conn, stream uint8) *Source {
	s := &Source{conn: c, stream: stream, credit: Window}
	s.cond.L = &s.mu
	return s
}

// Grant adds credit. A peer may not grant more than one Window in all.
func (s *Source) Grant(n uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.credit+int64(n) > Window {
		return fmt.Errorf("%w: credit of %d on stream %d passes the window", ErrProtocol, n, s.stream)
	}
	s.credit += int64(n)
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
	for s.credit == 0 && !s.closed {
		s.cond.Wait()
	}
	if s.closed {
		return 0
	}
	return s.credit
}

func (s *Source) take(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.credit -= int64(n)
}

// Run sends src until its end and then the stream's end. It never reads a byte
// for which there is no credit. A read error ends the stream like its end; the
// returned error is a write error of the connection.
func (s *Source) Run(src io.Reader) error {
	buf := make([]byte, MaxData)
	for {
		credit := s.wait()
		if credit == 0 {
			return nil
		}
		n, err := src.Read(buf[:min(credit, MaxData)])
		if n > 0 {
			s.take(n)
			if err := s.conn.Send(KindData, s.stream, buf[:n]); err != nil {
				return err
			}
		}
		if err != nil {
			return s.conn.Send(KindEOF, s.stream, nil)
		}
	}
}

// Sink receives one stream. It holds at most one Window of unwritten data, so
// that Put never blocks.
type Sink struct {
	conn   *Conn
	stream uint8

	mu      sync.Mutex
	cond    sync.Cond
	pending []byte
	// unacked counts what was received and not yet granted again.
	unacked int
	eof     bool
	dead    bool
	// abandoned: what comes is dropped and earns credit.
	abandoned bool
}

// NewSink returns the receiving end of a stream.
func NewSink(c *Conn, stream uint8) *Sink {
	s := &Sink{conn: c, stream: stream}
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
	return s.conn.SendUint32(KindCredit, s.stream, uint32(len(p)))
}

func (s *Sink) put(p []byte) (dropped bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.eof || s.unacked+len(p) > Window {
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
	if s.eof || s.abandoned {
		owed = 0
	}
	s.abandoned, s.unacked, s.pending = true, 0, nil
	s.mu.Unlock()
	if owed == 0 {
		return nil
	}
	return s.conn.SendUint32(KindCredit, s.stream, uint32(owed))
}

// CloseWrite marks the stream's end: Run returns when all is written.
func (s *Sink) CloseWrite() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.eof = true
	s.cond.Signal()
}

// next swaps out what is pending; false at the stream's end.
func (s *Sink) next(spare []byte) ([]byte, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.pending) == 0 && !s.eof {
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
	done := s.eof || s.abandoned
	s.mu.Unlock()
	if done {
		return nil
	}
	return s.conn.SendUint32(KindCredit, s.stream, uint32(n))
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

func (s *Sink) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dead, s.pending = true, nil
}
