package netpolicy

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"testing"

	"github.com/miekg/dns"
)

// FuzzDNS: whatever comes over either transport, what goes back fits, is framed, and
// answers the question; nothing else ends the stream.
func FuzzDNS(f *testing.F) {
	for _, q := range []*dns.Msg{question("api.example.com.", dns.TypeA), question("evil.com.", dns.TypeHTTPS), question(".", dns.TypeNS)} {
		b, err := q.Pack()
		if err != nil {
			f.Fatal(err)
		}
		framed := append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
		f.Add(framed)
		f.Add(append(framed, framed...))
		f.Add(append(framed, 0xff, 0xff))
	}
	w := newWorld(f, func(w *world) { w.policy.allow("api.example.com:443", Verdict{}) })
	f.Fuzz(func(t *testing.T, in []byte) {
		var out bytes.Buffer
		w.g.answerStream(replay{sink{&out}, bytes.NewReader(in)})
		for out.Len() > 0 {
			reply, err := readQuestion(&out)
			r := new(dns.Msg)
			if err != nil || r.Unpack(reply) != nil || !r.Response || len(r.Answer) > 1 {
				t.Fatalf("%x gives %x, %v", in, reply, err)
			}
		}
		if len(in) < 2 {
			return
		}
		if reply := fit(in[2:], w.g.answers.Answer(in[2:])); len(reply) > udpSize {
			t.Errorf("%d bytes over UDP", len(reply))
		}
	})
}

// TestFraming: a question may come in pieces; one that is too long ends the stream.
func TestFraming(t *testing.T) {
	w := newWorld(t, func(w *world) { w.policy.allow("api.example.com:443", Verdict{}) })
	q, err := question("api.example.com.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp4", w.g.listeners.DNSTCP.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, b := range append([]byte{0, byte(len(q))}, q...) {
		_, _ = c.Write([]byte{b})
	}
	reply, err := readQuestion(c)
	if r := new(dns.Msg); err != nil || r.Unpack(reply) != nil || len(r.Answer) != 1 {
		t.Errorf("%x %v", reply, err)
	}
	_, _ = c.Write([]byte{0xff, 0xff})
	if rest, err := io.ReadAll(c); len(rest) != 0 || err != nil {
		t.Errorf("%x %v", rest, err)
	}
}
