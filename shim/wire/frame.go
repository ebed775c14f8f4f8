// Package wire is the protocol between the shim and agentshim-init, carried by
// the engine client's standard input and output. With a session, its steps' shims and
// the session's keeper speak the same.
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
	KindHello        Kind = 1 + iota // ← Hello
	KindProbe                        // → ask for a live network probe
	KindProbed                       // ← Probed
	KindFile                         // → File: the next KindFileData frames are its content
	KindFileData                     // → bytes
	KindLaunch                       // → Launch
	KindStarted                      // ← the harness runs
	KindRefused                      // ← Refused: the harness was not started
	KindData                         // ↔ bytes of a stream
	KindEOF                          // ↔ end of a stream
	KindCredit                       // ↔ big-endian uint32: further bytes the peer may send
	KindSignal                       // → big-endian uint32: signal number for the harness
	KindExit                         // ← Exit
	KindWindow                       // → big-endian uint32: a Size, packed, for the harness's terminal
	KindBack                         // ← Back: the next KindBackData frames are its content
	KindBackData                     // ← bytes
	KindDial                         // → big-endian uint32: a port inside to connect a new tunnel to
	KindTunnelData                   // ↔ bytes of a tunnel
	KindTunnelEOF                    // ↔ end of one direction of a tunnel
	KindTunnelCredit                 // ↔ big-endian uint32: further bytes the peer may send
	KindTunnelEnd                    // ↔ the sender's last frame of a tunnel
	KindCut                          // → kill a step with all of its processes
	KindFinish                       // → end a session: kill what runs, send the home's files back, exit
	KindRequest                      // a client's question to a session's keeper
	KindReply                        // its answer
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
	// MaxData bounds the payload of a data, file or back frame.
	MaxData = 32 << 10
	// MaxLaunch, MaxHello and MaxNote bound the payloads of a launch (and of what a
	// keeper is asked), of a hello and of the small JSON messages. What a hello decodes to is some hundred times
	// its size at most.
	MaxLaunch = 4 << 20
	MaxHello  = 512 << 10
	MaxNote   = 64 << 10
	// Window is the credit each stream starts with, TunnelWindow that of each direction
	// of a tunnel.
	Window       = 256 << 10
	TunnelWindow = 64 << 10
	// MaxSteps bounds the steps that run at one time.
	MaxSteps = 64
)

// ErrProtocol is what a peer that breaks the protocol ends with.
var ErrProtocol = errors.New("wire protocol broken")

// Frame is one frame. Stream is the stream's or the tunnel's number. Payload is valid
// until the next Recv.
type Frame struct {
	Kind   Kind
	Stream uint8
	// Step is the step it belongs to. Step 0 is a run's own: the container ends with
	// it. Any other one is a session's, which has no step 0.
	Step    uint16
	Payload []byte
}

// Conn frames a pair of byte streams. Send may be called from several
// goroutines, Recv from one.
type Conn struct {
	r    *bufio.Reader
	buf  []byte
	step uint16
	*writer
}

// writer is what the steps of one connection share.
type writer struct {
	mu sync.Mutex
	w  io.Writer
	// out holds a frame so that each is one write.
	out    []byte
	broken error
}

// NewConn returns a Conn that reads r and writes w, and sends frames of step 0.
func NewConn(r io.Reader, w io.Writer) *Conn {
	return &Conn{r: bufio.NewReaderSize(r, headerSize+MaxData), writer: &writer{w: w}}
}

// Of is the same connection for sending frames of one step. It can't receive.
func (c *Conn) Of(step uint16) *Conn { return &Conn{writer: c.writer, step: step} }

// As is the same connection with one step alone: it takes the place of c.
func (c *Conn) As(step uint16) *Conn { return &Conn{r: c.r, writer: c.writer, step: step} }

// bounds are the least and the most bytes a frame's payload has.
func bounds(k Kind) (least, most int) {
	switch k {
	case KindData, KindFileData, KindBackData, KindTunnelData:
		return 1, MaxData
	case KindProbe, KindStarted, KindEOF, KindTunnelEOF, KindTunnelEnd, KindCut, KindFinish:
		return 0, 0
	case KindCredit, KindSignal, KindWindow, KindDial, KindTunnelCredit:
		return 4, 4
	case KindHello:
		return 1, MaxHello
	case KindLaunch, KindRequest, KindReply:
		return 1, MaxLaunch
	default:
		return 1, MaxNote
	}
}

// lastStream is the highest number that a frame of that kind may have.
func lastStream(k Kind) uint8 {
	switch k {
	case KindData, KindEOF, KindCredit:
		return Stderr
	case KindDial, KindTunnelData, KindTunnelEOF, KindTunnelCredit, KindTunnelEnd:
		return MaxTunnels - 1
	default:
		return 0
	}
}

// ofStep says whether a frame of that kind may belong to a session's step.
func ofStep(k Kind) bool {
	switch k {
	case KindFile, KindFileData, KindLaunch, KindStarted, KindRefused, KindData, KindEOF, KindCredit, KindSignal, KindWindow, KindExit, KindBack, KindBackData, KindCut:
		return true
	default:
		return false
	}
}

// Recv reads one frame. It returns io.EOF when the peer closed between frames,
// io.ErrUnexpectedEOF inside one, ErrProtocol for what no peer of this version sends.
func (c *Conn) Recv() (Frame, error) {
	var h [headerSize]byte
	if _, err := io.ReadFull(c.r, h[:]); err != nil {
		return Frame{}, err
	}
	f := Frame{Kind: Kind(h[0]), Stream: h[1], Step: binary.BigEndian.Uint16(h[2:])}
	n := int64(binary.BigEndian.Uint32(h[4:]))
	if err := checkHeader(f.Kind, f.Stream, f.Step, n); err != nil {
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

func checkHeader(k Kind, stream uint8, step uint16, n int64) error {
	least, most := bounds(k)
	switch {
	case k == 0 || k >= kindEnd:
		return fmt.Errorf("%w: frame kind %d", ErrProtocol, k)
	case stream > lastStream(k):
		return fmt.Errorf("%w: frame kind %d of stream %d", ErrProtocol, k, stream)
	case step != 0 && !ofStep(k):
		return fmt.Errorf("%w: frame kind %d of step %d", ErrProtocol, k, step)
	case n < int64(least) || n > int64(most):
		return fmt.Errorf("%w: frame kind %d of %d bytes", ErrProtocol, k, n)
	}
	return nil
}

func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Send writes one frame whole. A frame that Recv would not take is ErrProtocol and
// writes nothing. After a failed write every further one fails with its error: the
// peer may have got a part of that frame.
func (c *Conn) Send(k Kind, stream uint8, payload []byte) error {
	if err := checkHeader(k, stream, c.step, int64(len(payload))); err != nil {
		return fmt.Errorf("sending: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken != nil {
		return c.broken
	}
	c.out = append(c.out[:0], byte(k), stream)
	c.out = binary.BigEndian.AppendUint16(c.out, c.step)
	c.out = binary.BigEndian.AppendUint32(c.out, uint32(len(payload)))
	c.out = append(c.out, payload...)
	_, c.broken = c.w.Write(c.out)
	if cap(c.out) > headerSize+MaxData {
		c.out = nil
	}
	return c.broken
}

// SendJSON writes a control frame that carries v.
func (c *Conn) SendJSON(k Kind, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("frame kind %d: %w", k, err)
	}
	return c.Send(k, 0, b)
}

// SendUint32 writes a frame that carries one number.
func (c *Conn) SendUint32(k Kind, stream uint8, n uint32) error {
	return c.Send(k, stream, binary.BigEndian.AppendUint32(nil, n))
}

// JSON decodes a control frame's payload, an object, into v.
func (f Frame) JSON(v any) error {
	if len(f.Payload) == 0 || f.Payload[0] != '{' {
		return fmt.Errorf("%w: frame kind %d holds no object", ErrProtocol, f.Kind)
	}
	if err := json.Unmarshal(f.Payload, v); err != nil {
		return fmt.Errorf("%w: frame kind %d: %w", ErrProtocol, f.Kind, err)
	}
	return nil
}

// Uint32 decodes the payload of a frame that carries one number.
func (f Frame) Uint32() (uint32, error) {
	if len(f.Payload) != 4 {
		return 0, fmt.Errorf("%w: frame kind %d of %d bytes", ErrProtocol, f.Kind, len(f.Payload))
	}
	return binary.BigEndian.Uint32(f.Payload), nil
}
