package netpolicy

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"time"

	"github.com/miekg/dns"
)

// maxQuestion is how long a question may be.
const maxQuestion = 4096

func (g *Gateway) refusedName(name string) {
	v := Verdict{Reason: RefusedName, Why: "it is no host name"}
	if name != "" {
		v = g.table.Name(name, DefaultPort)
	}
	g.tell(Event{Kind: EventName, Name: name, Verdict: v})
}

// answerUDP answers the questions that come one by one. What comes too fast is
// dropped by the kernel.
func (g *Gateway) answerUDP() {
	buf := make([]byte, maxQuestion)
	for g.questions.Wait(g.ctx) == nil {
		n, from, err := g.listeners.DNS.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || !g.open.Load() {
			continue
		}
		if out := fit(buf[:n], g.answers.Answer(buf[:n])); out != nil {
			_, _ = g.listeners.DNS.WriteToUDPAddrPort(out, from)
		}
	}
}

// fit cuts the reply to what the asker takes over UDP, and says so in it (TC).
func fit(question, reply []byte) []byte {
	if len(reply) <= dns.MinMsgSize {
		return reply
	}
	q, r := new(dns.Msg), new(dns.Msg)
	if q.Unpack(question) != nil || r.Unpack(reply) != nil {
		return nil
	}
	size := dns.MinMsgSize
	if opt := q.IsEdns0(); opt != nil {
		size = max(size, min(int(opt.UDPSize()), udpSize))
	}
	r.Truncate(size)
	out, err := r.Pack()
	if err != nil {
		return nil
	}
	return out
}

func (g *Gateway) answerTCP() {
	slots := make(chan struct{}, g.limits.dnsConns)
	for {
		c := g.accept(g.listeners.DNSTCP, g.questions)
		if c == nil {
			return
		}
		select {
		case slots <- struct{}{}:
		default:
			reset(c)
			continue
		}
		serve := func() {
			defer func() { <-slots }()
			defer g.resetAtEnd(c)()
			g.answerStream(c)
		}
		if !g.open.Load() || !g.spawn(serve) {
			<-slots
			reset(c)
		}
	}
}

// answerStream answers a connection's questions, each with its length before it
// (RFC 1035 4.2.2), until a pause gets too long.
func (g *Gateway) answerStream(c net.Conn) {
	defer c.Close()
	for {
		_ = c.SetDeadline(time.Now().Add(g.limits.questionWait))
		q, err := readQuestion(c)
		if err != nil || g.questions.Wait(g.ctx) != nil {
			return
		}
		out := g.answers.Answer(q)
		if out == nil {
			return
		}
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(out))), out...)); err != nil {
			return
		}
	}
}

func readQuestion(r io.Reader) ([]byte, error) {
	var head [2]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint16(head[:])
	if n > maxQuestion {
		return nil, dns.ErrBuf
	}
	q := make([]byte, n)
	_, err := io.ReadFull(r, q)
	return q, err
}
