package netpolicy

import (
	"crypto/tls"
	"errors"
	"net"
	"os"
	"slices"
)

// extensionECH is encrypted_client_hello (RFC 9849).
const extensionECH = 0xfe0d

// recordHandshake is the first byte of a TLS stream that starts with a hello.
const recordHandshake = 22

// hello is how a connection to the TLS port began.
type hello struct {
	// raw is all that was read, to be passed on unchanged.
	raw []byte
	// complete says that it holds a whole ClientHello; gone that the sandbox closed
	// without a byte.
	complete, gone bool
	serverName     string
	ech            bool
}

// tape keeps what is read, and lets nothing be written.
type tape struct {
	net.Conn
	read []byte
	left int
}

var errTooLong = errors.New("too long")

func (t *tape) Read(p []byte) (int, error) {
	if t.left == 0 {
		return 0, errTooLong
	}
	n, err := t.Conn.Read(p[:min(len(p), t.left)])
	t.read = append(t.read, p[:n]...)
	t.left -= n
	return n, err
}

func (*tape) Write(p []byte) (int, error) { return len(p), nil }

var errSeen = errors.New("the hello is complete")

// readHello reads a ClientHello, at most most bytes; the caller bounds its time.
func readHello(c net.Conn, most int) hello {
	t := &tape{Conn: c, left: most}
	var h hello
	err := tls.Server(t, &tls.Config{GetConfigForClient: func(i *tls.ClientHelloInfo) (*tls.Config, error) {
		h.complete, h.serverName, h.ech = true, i.ServerName, slices.Contains(i.Extensions, extensionECH)
		return nil, errSeen
	}}).Handshake()
	h.raw = t.read
	h.gone = len(h.raw) == 0 && !errors.Is(err, os.ErrDeadlineExceeded)
	// A server may read on after an alert. What it would take for the hello then is
	// the business of its parser and not of ours.
	h.complete = h.complete && h.raw[0] == recordHandshake
	return h
}

// judge says whether the hello is for the target's name, for everybody to see.
func (h hello) judge(t destination) Verdict {
	refused := Verdict{Rule: t.verdict.Rule}
	name, err := CanonicalName(h.serverName)
	switch {
	case !h.complete:
		refused.Reason, refused.Why = RefusedHello, "no TLS hello came"
		refused.Entry = OptionEntry(t.name, t.port, "raw")
	case h.serverName == "":
		refused.Reason, refused.Why = RefusedServerName, "its TLS hello names no server"
	case err != nil || name != t.name:
		refused.Reason, refused.Why = RefusedServerName, "its TLS hello is for another server"
	case h.ech && !t.verdict.ECH:
		refused.Reason, refused.Why = RefusedECH, "its TLS hello has an encrypted part"
		refused.Entry = OptionEntry(t.name, t.port, "ech")
	default:
		return t.verdict
	}
	return refused
}
