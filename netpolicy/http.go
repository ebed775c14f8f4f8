package netpolicy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"
)

// web judges the requests of the connections to the HTTP port. net/http reads them
// and writes them anew, so that the target sees what was judged and nothing else.
type web struct {
	g      *Gateway
	server *http.Server
	proxy  *httputil.ReverseProxy
	queue  chan *webConn
	// slots are taken by the connections served.
	slots chan struct{}
}

// webConn is one connection of the sandbox. Each has its own connections outside.
type webConn struct {
	net.Conn
	g         *Gateway
	target    destination
	transport *http.Transport
	// ctx ends with the connection, also when it is reset: broken ends it.
	broken         func()
	ctx            context.Context
	closed         chan struct{}
	closing        sync.Once
	dialled        atomic.Pointer[netip.Addr] // the first address outside
	requests       atomic.Int64
	sent, received atomic.Int64
}

type webConnKey struct{}

func newWeb(g *Gateway) *web {
	w := &web{g: g, queue: make(chan *webConn), slots: make(chan struct{}, g.limits.webConns)}
	silent := log.New(io.Discard, "", 0)
	var http1 http.Protocols
	http1.SetHTTP1(true)
	w.proxy = &httputil.ReverseProxy{
		Rewrite: rewrite, ModifyResponse: w.bounded, Transport: w, FlushInterval: -1, ErrorHandler: w.failed, ErrorLog: silent,
	}
	w.server = &http.Server{
		Handler: w, Protocols: &http1, ErrorLog: silent,
		ReadHeaderTimeout: g.limits.headWait, IdleTimeout: g.limits.idleWait, MaxHeaderBytes: g.limits.headerBytes,
		DisableGeneralOptionsHandler: true,
		BaseContext:                  func(net.Listener) context.Context { return g.ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, webConnKey{}, c)
		},
	}
	return w
}

// serve has one connection served, and returns at its end.
func (w *web) serve(in *net.TCPConn, t destination) {
	select {
	case w.slots <- struct{}{}:
		defer func() { <-w.slots }()
	default:
		w.g.refuse(in, t, Verdict{Reason: RefusedLimit, Why: fmt.Sprintf("%d connections to port %d are open", cap(w.slots), t.port)}, "")
		return
	}
	ctx, cancel := context.WithCancel(w.g.ctx)
	defer cancel()
	c := &webConn{Conn: in, g: w.g, target: t, ctx: ctx, broken: cancel, closed: make(chan struct{})}
	c.transport = &http.Transport{
		DialContext: c.dial, DisableCompression: true, MaxIdleConnsPerHost: 1,
		IdleConnTimeout: w.g.limits.idleWait, ExpectContinueTimeout: time.Second,
		MaxResponseHeaderBytes: int64(w.g.limits.headerBytes),
	}
	defer c.transport.CloseIdleConnections()
	select {
	case w.queue <- c:
		<-c.closed
	case <-ctx.Done():
		return
	}
	c.ended()
}

// Accept, Close and Addr make web the server's listener.
func (w *web) Accept() (net.Conn, error) {
	select {
	case c := <-w.queue:
		return c, nil
	case <-w.g.ctx.Done():
		return nil, net.ErrClosed
	}
}

func (w *web) Close() error { return nil }

func (w *web) Addr() net.Addr { return &net.TCPAddr{} }

// ServeHTTP judges one request.
func (w *web) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if !w.g.enter() {
		panic(http.ErrAbortHandler)
	}
	defer w.g.running.Done()
	c := r.Context().Value(webConnKey{}).(*webConn)
	c.requests.Add(1)
	if len(r.Header) > w.g.limits.headerFields {
		refuse(rw, http.StatusRequestHeaderFieldsTooLarge, c.target, Verdict{Why: errManyFields.Error()}, "")
		return
	}
	if !c.target.verdict.Allowed {
		refuse(rw, http.StatusForbidden, c.target, c.target.verdict, "")
		return
	}
	if w.g.requests.Wait(r.Context()) != nil {
		panic(http.ErrAbortHandler)
	}
	if v, detail := c.judge(r); !v.Allowed {
		c.log(v, detail)
		refuse(rw, http.StatusForbidden, c.target, v, detail)
		return
	}
	// The answer's header is the target's own: nothing is guessed or added.
	rw.Header()["Content-Type"], rw.Header()["Date"] = nil, nil
	// The server takes the end of what a client sends for the end of its interest.
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	w.proxy.ServeHTTP(rw, r.WithContext(ctx))
}

var errManyFields = errors.New("too many header fields")

// bounded refuses an answer whose head would take much memory for as long as nobody
// takes it.
func (w *web) bounded(r *http.Response) error {
	if len(r.Header) > w.g.limits.headerFields {
		return errManyFields
	}
	return nil
}

// log tells of a request that is not passed on.
func (c *webConn) log(v Verdict, detail string) {
	e := c.target.event(v, netip.Addr{})
	e.Kind, e.Detail = EventRequest, clip(detail)
	c.g.tell(e)
}

// judge decides on one request by what it says it is for. The detail is what was
// refused, as it came.
func (c *webConn) judge(r *http.Request) (Verdict, string) {
	refused := Verdict{Rule: c.target.verdict.Rule, Reason: RefusedRequest}
	upgrade := upgradeOf(r)
	switch {
	case r.ProtoMajor != 1 || r.Method == http.MethodConnect || r.Method == "PRI":
		refused.Why = "this method is not passed on"
		return refused, r.Method
	case upgrade != "" && !strings.EqualFold(upgrade, "websocket"):
		refused.Why = "this upgrade is not passed on"
		return refused, upgrade
	case r.URL.Opaque != "" || r.URL.User != nil || r.URL.Scheme != "" && r.URL.Scheme != "http":
		refused.Why = "its target is no path and no plain http URL"
		return refused, r.RequestURI
	case !isHost(r.Host, c.target):
		refused.Reason, refused.Why = RefusedHost, "the connection is to "+c.target.name
		refused.Entry = c.entryFor(r.Host)
		return refused, r.Host
	}
	return c.target.verdict, ""
}

// entryFor is what would permit the host a request was for.
func (c *webConn) entryFor(host string) string {
	host = strings.TrimSuffix(host, ":"+strconv.Itoa(c.target.port))
	name, err := CanonicalName(host)
	if err != nil {
		return ""
	}
	return c.g.table.Name(name, c.target.port).Entry
}

// isHost reports whether a Host names the target, the port being the target's or absent.
func isHost(host string, t destination) bool {
	name, err := CanonicalName(strings.TrimSuffix(host, ":"+strconv.Itoa(t.port)))
	return err == nil && name == t.name
}

// upgradeOf is the protocol that a request wants to change to. An offer of HTTP/2
// is taken out instead, as if the server knew none (RFC 9110 7.8): clients make it
// by default.
func upgradeOf(r *http.Request) string {
	if !httpguts.HeaderValuesContainsToken(r.Header["Connection"], "upgrade") {
		return ""
	}
	up := strings.Join(r.Header["Upgrade"], ",")
	if strings.EqualFold(up, "h2c") {
		r.Header.Del("Upgrade")
		r.Header.Del("HTTP2-Settings")
		return ""
	}
	return up
}

// rewrite addresses a judged request to the connection's target. The rest stays as
// it came.
func rewrite(p *httputil.ProxyRequest) {
	t := p.In.Context().Value(webConnKey{}).(*webConn).target
	p.Out.URL.Scheme, p.Out.URL.Host, p.Out.Host = "http", net.JoinHostPort(t.name, strconv.Itoa(t.port)), t.name
	p.Out.URL.RawQuery = p.In.URL.RawQuery
	for _, h := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v, ok := p.In.Header[h]; ok {
			p.Out.Header[h] = v
		}
	}
}

// RoundTrip passes a request on over its own connection's.
func (w *web) RoundTrip(r *http.Request) (*http.Response, error) {
	return r.Context().Value(webConnKey{}).(*webConn).transport.RoundTrip(r)
}

// refusedError carries a verdict through the transport.
type refusedError struct{ Verdict }

func (e *refusedError) Error() string { return string(e.Reason) }

// dial connects to the target, as often as its server wants new connections.
func (c *webConn) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	if !c.g.enter() {
		return nil, net.ErrClosed
	}
	defer c.g.running.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	out, addr, v := c.g.dial(ctx, c.target)
	if out == nil {
		if ctx.Err() == nil {
			c.g.tell(c.target.event(v, addr))
		}
		return nil, &refusedError{v}
	}
	first := c.dialled.CompareAndSwap(nil, &addr)
	if (first || *c.dialled.Load() != addr) && !c.g.tell(c.target.event(v, addr)) {
		reset(out)
		return nil, net.ErrClosed
	}
	return &outside{out, context.AfterFunc(c.ctx, func() { reset(out) })}, nil
}

// outside is a connection that ends with the sandbox's.
type outside struct {
	net.Conn
	forget func() bool
}

func (o *outside) Close() error {
	o.forget()
	return o.Conn.Close()
}

// failed answers a request that got no answer.
func (w *web) failed(rw http.ResponseWriter, r *http.Request, err error) {
	c := r.Context().Value(webConnKey{}).(*webConn)
	code, v := http.StatusBadGateway, Verdict{Why: "its server gave no answer"}
	var refused *refusedError
	if errors.As(err, &refused) {
		v = refused.Verdict
		if !v.Reason.failed() {
			code = http.StatusForbidden
		}
	}
	refuse(rw, code, c.target, v, "")
}

// refuse answers with one line that says what is missing, and ends the connection.
func refuse(rw http.ResponseWriter, code int, t destination, v Verdict, detail string) {
	h := rw.Header()
	h.Set("Connection", "close")
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	rw.WriteHeader(code)
	fmt.Fprintln(rw, refusalLine(t, v, detail))
	// net/http waits for the rest of the request's body.
	_ = http.NewResponseController(rw).SetReadDeadline(time.Now())
}

// refusalLine is the line for people: what, why, what to write.
func refusalLine(t destination, v Verdict, detail string) string {
	host := t.name
	if host == "" {
		host = t.addr.String()
	}
	line := "agentshim: egress: " + net.JoinHostPort(host, strconv.Itoa(t.port))
	if detail != "" {
		line += ": " + strconv.QuoteToASCII(clip(detail))
	}
	if v.Reason != "" && !v.Reason.failed() {
		line += " is not allowed"
	}
	if v.Why != "" {
		line += ": " + v.Why
	}
	if v.Entry != "" {
		line += "; add " + QuoteEntry(v.Entry) + " to egress.allow"
	}
	return line
}

// ended tells how the connection ended: what was no request at all, and what moved.
func (c *webConn) ended() {
	if c.target.verdict.Allowed && c.requests.Load() == 0 && c.sent.Load() > 0 {
		c.log(Verdict{
			Rule: c.target.verdict.Rule, Reason: RefusedRequest, Why: "no HTTP/1 request came", Entry: OptionEntry(c.target.name, c.target.port, "raw"),
		}, "")
	}
	if addr := c.dialled.Load(); addr != nil {
		t := c.target
		t.addr = *addr
		c.g.tell(t.end(c.sent.Load(), c.received.Load()))
	}
}

func (c *webConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.sent.Add(int64(n))
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrDeadlineExceeded) {
		c.broken()
	}
	return n, err
}

func (c *webConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.received.Add(int64(n))
	return n, err
}

// CloseWrite lets the server end its answer before it closes.
func (c *webConn) CloseWrite() error { return c.Conn.(*net.TCPConn).CloseWrite() }

func (c *webConn) Close() error {
	err := c.Conn.Close()
	c.closing.Do(func() { close(c.closed) })
	return err
}
