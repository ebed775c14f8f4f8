package netpolicy

import (
	"crypto/tls"
	"io"
	"net"
	"time"
)

// A TLS record carries copySize bytes at most. While more than tunedConns connections are open,
// leanCopySize has to do: each direction has such a buffer as long as its connection lasts.
const (
	copySize     = 16 << 10
	leanCopySize = 4 << 10
)

// pair carries bytes between the sandbox's connection and the one outside until both directions
// have ended. What goes through TLS this process has to see, so that no pipe can move it.
func (g *Gateway) pair(in *net.TCPConn, out outward) (sent, received int64) {
	switch out := out.(type) {
	case *net.TCPConn:
		return g.pipes.pair(in, out)
	case *tls.Conn:
		size := copySize
		if len(g.slots) > tunedConns {
			size = leanCopySize
		}
		return pairTLS(in, out, size, g.limits.stallWait)
	}
	reset(in)
	reset(out)
	return 0, 0
}

// pairTLS is pipes.pair for a connection over TLS, by copies. A write that nobody takes ends
// when one of the two is found broken, which is looked at once in a stall.
func pairTLS(a *net.TCPConn, b *tls.Conn, size int, stall time.Duration) (ab, ba int64) {
	one := func(dst, src outward, n *int64, ended chan<- struct{}) {
		defer close(ended)
		var err error
		// Neither side may choose another way to copy than this buffer.
		*n, err = io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, make([]byte, size))
		if err == nil {
			err = dst.CloseWrite()
		}
		if err != nil {
			reset(a)
			reset(b)
		}
	}
	there, back := make(chan struct{}), make(chan struct{})
	go one(b, a, &ab, there)
	go one(a, b, &ba, back)
	look := time.NewTicker(stall)
	defer look.Stop()
	for there != nil || back != nil {
		select {
		case <-there:
			there = nil
		case <-back:
			back = nil
		case <-look.C:
			if brokenConn(a) || brokenConn(b.NetConn()) {
				reset(a)
				reset(b)
			}
		}
	}
	a.Close()
	b.Close()
	return ab, ba
}

func brokenConn(c net.Conn) bool {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return true
	}
	raw, err := tcp.SyscallConn()
	return err != nil || broken(raw)
}
