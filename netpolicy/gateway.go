package netpolicy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"
)

// decider is what the gateway asks of a policy. *Table is the one of a run.
type decider interface {
	Knows(name string) bool
	Name(name string, port int) Verdict
	Addr(addr netip.Addr, port int) Verdict
	Dial(addr netip.Addr, port int, local bool) Verdict
}

// limits bound what a sandbox can make the gateway do: its work is done outside the
// sandbox's own limits.
type limits struct {
	// conns are open connections, webConns those of them to the HTTP port, dnsConns those
	// to the resolver.
	conns, webConns, dnsConns int
	// Events per second; what comes faster waits in the kernel.
	connRate, dialRate, requestRate, questionRate rate.Limit
	// burst is how many of them may come at once.
	burst int
	// helloBytes is how long a TLS hello may be, with its record headers; headerBytes
	// the same for the head of an HTTP message, and headerFields how many fields it may
	// have: each takes a hundred bytes and more, and four bytes of the message.
	helloBytes, headerBytes, headerFields int
	// The waits for a hello or a request's head, for the next request of a connection,
	// for resolving and dialling, for the next question, and for a write that nobody
	// takes before its connection is looked at.
	headWait, idleWait, dialWait, questionWait, stallWait time.Duration
}

func defaultLimits() limits {
	return limits{
		conns: maxConns(), webConns: 256, dnsConns: 64,
		connRate: 500, dialRate: 200, requestRate: 1000, questionRate: 2000, burst: 1000,
		helloBytes: 32 << 10, headerBytes: 32 << 10, headerFields: 256,
		headWait: 15 * time.Second, idleWait: 3 * time.Minute, dialWait: 30 * time.Second,
		questionWait: 10 * time.Second, stallWait: 10 * time.Second,
	}
}

// maxConns keeps the descriptors of the rest of the program free. A connection has
// two sockets and, while data moves both ways, two pipes.
func maxConns() int {
	const most, perConn, spare = 2048, 6, 256
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &r) != nil {
		return 64
	}
	return max(16, (int(min(r.Cur, spare+most*perConn))-spare)/perConn)
}

// tunedConns get buffers as large as the kernel likes. Those of later ones, while so many
// are open, have bufferSize each: socket memory of the host's is accounted to no sandbox.
const (
	tunedConns = 256
	bufferSize = 32 << 10
)

// lean bounds the buffers of a connection when many are open.
func (g *Gateway) lean(c *net.TCPConn) {
	if len(g.slots) > tunedConns {
		_ = c.SetReadBuffer(bufferSize)
		_ = c.SetWriteBuffer(bufferSize)
	}
}

// closeWait is how long Close waits for what it ended.
const closeWait = 5 * time.Second

// Gateway is a sandbox's only way out: it answers the names and carries the
// connections that a policy permits, and tells of each decision. It guarantees that
// nothing is looked up or dialled that the policy does not permit, and that the
// address it dials is the one that was judged. It does not look into TLS behind its
// hello, and what goes to a permitted target is the target's.
type Gateway struct {
	table     decider
	names     *Names
	answers   Resolver
	log       func(Event) error
	listeners Listeners
	limits    limits
	resolver  *net.Resolver
	// upstream is the proxy that is dialled instead of targets, nil for none.
	upstream *Upstream
	// original is where the sandbox meant to connect to. routing says whether the
	// host's own routing calls an address local, an error where it has no route.
	original func(*net.TCPConn) (netip.AddrPort, error)
	routing  func(netip.Addr) (local bool, err error)
	// tlsPort and httpPort are those whose content is judged.
	tlsPort, httpPort int

	open     atomic.Bool
	accepted atomic.Int64
	number   atomic.Uint64
	slots    chan struct{}
	pipes    *pipes
	web      *web

	conns, dials, requests, questions *rate.Limiter

	ctx     context.Context
	cancel  context.CancelFunc
	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup
}

// NewGateway serves the listeners, which are the gateway's from now on, by the table.
// It is not open yet. log is told each decision, from many goroutines at once, and a
// permission before a byte moves by it. Its error ends all traffic for good: nothing is
// carried that is not logged. siblings is Resolver.Siblings, asked for what no deny entry
// names; it may be nil, and takes part in how fast questions are answered.
func NewGateway(t *Table, l Listeners, siblings func(name string) ([]netip.Addr, error), log func(Event) error) *Gateway {
	g := newGateway(t, l, log)
	if siblings != nil {
		g.answers.Siblings = func(name string) ([]netip.Addr, error) {
			if _, denied := onPort(t.deny.named(name), 0); denied {
				return nil, nil
			}
			return siblings(name)
		}
	}
	g.start()
	return g
}

func newGateway(t decider, l Listeners, log func(Event) error) *Gateway {
	g := &Gateway{
		table: t, names: NewNames(), log: log, listeners: l, limits: defaultLimits(),
		// Go's own resolver asks for the absolute name only, and gives up in time.
		resolver: &net.Resolver{PreferGo: true},
		original: originalDestination, routing: hostRouting,
		tlsPort: 443, httpPort: 80,
	}
	g.answers = Resolver{Names: g.names, Permitted: t.Knows, Refused: g.refusedName}
	return g
}

func (g *Gateway) start() {
	g.ctx, g.cancel = context.WithCancel(context.Background())
	g.slots = make(chan struct{}, g.limits.conns)
	g.pipes = newPipes(g.limits.stallWait)
	limiter := func(r rate.Limit) *rate.Limiter { return rate.NewLimiter(r, g.limits.burst) }
	g.conns, g.dials = limiter(g.limits.connRate), limiter(g.limits.dialRate)
	g.requests, g.questions = limiter(g.limits.requestRate), limiter(g.limits.questionRate)
	g.web = newWeb(g)
	g.spawn(g.relay)
	g.spawn(g.answerUDP)
	g.spawn(g.answerTCP)
	g.spawn(func() { _ = g.web.server.Serve(g.web) })
}

// Via has connections to the outside go through a proxy, from the next Open on.
func (g *Gateway) Via(u *Upstream) { g.upstream = u }

// Open lets the policy decide. Before it, every connection is reset and every
// question dropped; nothing is looked up or dialled.
func (g *Gateway) Open() { g.open.Store(true) }

// Accepted is how many connections the relay has reset because it was not open: one
// that was made inside the sandbox shows that the redirect works.
func (g *Gateway) Accepted() int64 { return g.accepted.Load() }

// Close ends everything at once: listeners, connections, lookups. No byte moves
// after it. An error says that something did not end in time.
func (g *Gateway) Close() error {
	g.stop()
	done := make(chan struct{})
	go func() { g.running.Wait(); close(done) }()
	select {
	case <-done:
		g.pipes.close()
		return nil
	case <-time.After(closeWait):
		return fmt.Errorf("gateway: connections are open %s after its end", closeWait)
	}
}

// stop ends everything and waits for nothing.
func (g *Gateway) stop() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.cancel()
	g.listeners.Close()
	g.web.server.Close()
}

// tell logs an event, and reports whether there is still a log.
func (g *Gateway) tell(e Event) bool {
	if g.log(e) == nil {
		return true
	}
	g.stop()
	return false
}

// enter reports whether there is still something to do; running.Done is due then.
func (g *Gateway) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.running.Add(1)
	}
	return !g.closed
}

// spawn runs f unless the gateway is closed.
func (g *Gateway) spawn(f func()) bool {
	if !g.enter() {
		return false
	}
	go func() {
		defer g.running.Done()
		f()
	}()
	return true
}

// accept takes one connection, at the limiter's pace, nil at the gateway's end. An
// error of one connection, or a lack of descriptors, is no reason to end.
func (g *Gateway) accept(l *net.TCPListener, pace *rate.Limiter) *net.TCPConn {
	for pace.Wait(g.ctx) == nil {
		c, err := l.AcceptTCP()
		if err == nil {
			return c
		}
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
	}
	return nil
}

// reset ends a connection with RST, the one below where c is over TLS.
func reset(c net.Conn) {
	if over, ok := c.(*tls.Conn); ok {
		c = over.NetConn()
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	c.Close()
}
