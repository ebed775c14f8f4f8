// Package wire is the protocol between the shim and agentshim-init, carried by
// the engine client's standard input and output.
//
// Frames are bounded by kind. Data streams are flow-controlled by credit: a
// peer sends no more data than it was granted, so a frame of another kind is
// never behind data that nobody reads.
package wire

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Version is the protocol's version; the hello carries it and both ends must agree.
const Version = 1

// Kind says what a frame means.
type Kind uint8

// The kinds of frame. Those marked → go from the shim to init, ← the other way.
const (
	KindHello    Kind = 1 + iota // ← Hello
	KindProbe                    // → ask for a live network probe
	KindProbed                   // ← Probed
	KindFile                     // → File: the next KindFileData frames are its content
	KindFileData                 // → bytes
	KindLaunch                   // → Launch
	KindStarted                  // ← the harness runs
	KindRefused                  // ← Refused: the harness was not started
	KindData                     // ↔ bytes of a stream
	KindEOF                      // ↔ end of a stream
	KindCredit                   // ↔ big-endian uint32: further bytes the peer may send
	KindSignal                   // → big-endian uint32: signal number for the harness
	KindExit                     // ← Exit
	kindEnd
)

// The data streams.
const (
	Stdin  uint8 = 0
	Stdout uint8 = 1
	Stderr uint8 = 2
)

// Limits, in bytes.
const (
	headerSize = 8
	// MaxData bounds the payload of a data or file frame.
	MaxData = 32 << 10
	// MaxControl bounds the payload of every other frame.
	MaxControl = 4 << 20
	// Window is the credit each stream starts with.
	Window = 256 << 10
)

// ErrProtocol is what a peer that breaks the protocol ends with.
var ErrProtocol = errors.New("wire protocol broken")

// Frame is one frame. Payload is valid until the next Recv.
type Frame struct {
	Kind    Kind
	Stream  uint8
	Payload []byte
}

// Conn frames a pair of byte streams. Send may be called from several
// goroutines, Recv from one.
type Conn struct {
	r   *bufio.Reader
	buf []byte

	mu sync.Mutex
	w  io.Writer
	// out holds a frame so that each is one write.
	out []byte
}

// NewConn returns a Conn that reads r and writes w.
func NewConn(r io.Reader, w io.Writer) *Conn {
	return &Conn{r: bufio.NewReaderSize(r, headerSize+MaxData), w: w}
}

func limit(k Kind) int {
	switch k {
	case KindData, KindFileData:
		return MaxData
	case KindProbe, KindStarted, KindEOF:
		return 0
	case KindCredit, KindSignal:
		return 4
	default:
		return MaxControl
	}
}

// Recv reads one frame. It returns io.EOF when the peer closed between frames,
// io.ErrUnexpectedEOF inside one, ErrProtocol for what no peer of this version sends.
func (c *Conn) Recv() (Frame, error) {
	var h [headerSize]byte
	if _, err := io.ReadFull(c.r, h[:]); err != nil {
		return Frame{}, err
	}
	f := Frame{Kind: Kind(h[0]), Stream: h[1]}
	n := int64(binary.BigEndian.Uint32(h[4:]))
	if err := checkHeader(f, h, n); err != nil {
		return Frame{}, err
	}
	if int64(cap(c.buf)) < n {
		c.buf = make([]byte, n)
	}
	f.Payload = c.buf[:n]
	if _, err := io.ReadFull(c.r, f.Payload); err != nil {
		return Frame{}, unexpected(err)
	}
	if cap(c.buf) > headerSize+MaxData {
		c.buf = nil // a large control frame is rare: don't keep its memory
	}
	return f, nil
}

func checkHeader(f Frame, h [headerSize]byte, n int64) error {
	switch {
	case f.Kind == 0 || f.Kind >= kindEnd:
		return fmt.Errorf("%w: frame kind %d", ErrProtocol, f.Kind)
	case f.Stream > Stderr:
		return fmt.Errorf("%w: stream %d", ErrProtocol, f.Stream)
	case h[2] != 0 || h[3] != 0:
		return fmt.Errorf("%w: reserved header bytes are set", ErrProtocol)
	case n > int64(limit(f.Kind)):
		return fmt.Errorf("%w: frame kind %d of %d bytes", ErrProtocol, f.Kind, n)
	}
	return nil
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Send writes one frame whole.
func (c *Conn) Send(k Kind, stream uint8, payload []byte) error {
	if len(payload) > limit(k) {
		return fmt.Errorf("%w: sending frame kind %d of %d bytes", ErrProtocol, k, len(payload))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out = append(c.out[:0], byte(k), stream, 0, 0)
	c.out = binary.BigEndian.AppendUint32(c.out, uint32(len(payload)))
	c.out = append(c.out, payload...)
	_, err := c.w.Write(c.out)
	if cap(c.out) > headerSize+MaxData {
		c.out = nil
	}
	return err
}

// SendJSON writes a control frame that carries v.
func (c *Conn) SendJSON(k Kind, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("frame kind %d: %w", k, err)
	}
	return c.Send(k, 0, b)
}

// SendUint32 writes a credit or signal frame.
func (c *Conn) SendUint32(k Kind, stream uint8, n uint32) error {
	return c.Send(k, stream, binary.BigEndian.AppendUint32(nil, n))
}

// JSON decodes a control frame's payload into v.
func (f Frame) JSON(v any) error {
	if err := json.Unmarshal(f.Payload, v); err != nil {
		return fmt.Errorf("%w: frame kind %d: %w", ErrProtocol, f.Kind, err)
	}
	return nil
}

// Uint32 decodes a credit or signal frame's payload.
func (f Frame) Uint32() (uint32, error) {
	if len(f.Payload) != 4 {
		return 0, fmt.Errorf("%w: frame kind %d of %d bytes", ErrProtocol, f.Kind, len(f.Payload))
	}
	return binary.BigEndian.Uint32(f.Payload), nil
}
