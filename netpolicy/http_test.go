package netpolicy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// webServer keeps the bytes that reach it and answers each request it finds with its
// own line.
type webServer struct {
	*server
	mu    sync.Mutex
	bytes bytes.Buffer
	lines []string
}

func newWebServer(t testing.TB) *webServer {
	t.Helper()
	s := &webServer{}
	s.server = newServer(t, "127.0.0.1:0", func(c *net.TCPConn) {
		r := bufio.NewReader(io.TeeReader(c, s))
		for {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			body, _ := io.ReadAll(req.Body)
			line := req.Method + " " + req.RequestURI + " " + req.Host + " " + string(body)
			s.mu.Lock()
			s.lines = append(s.lines, line)
			s.mu.Unlock()
			if req.Header.Get("Upgrade") == "websocket" {
				_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
				_, _ = io.Copy(c, r)
				return
			}
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(line), line)
		}
	})
	return s
}

func (s *webServer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bytes.Write(p)
}

func (s *webServer) got() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bytes.String()
}

func (s *webServer) requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string{}, s.lines...)
}

func newHTTPWorld(t testing.TB, port int) (*world, string) {
	t.Helper()
	w := newWorld(t, func(w *world) {
		w.g.httpPort = port
		w.zone.set("web.example.com", "127.0.0.1")
		w.zone.set("other.example.com", "127.0.0.1")
	})
	return w, w.allow("web.example.com", port, Verdict{})
}

// send gives the answers to what was sent over one connection, and the connection.
func send(t testing.TB, c *net.TCPConn, text string) (*bufio.Reader, *http.Response, string) {
	t.Helper()
	_, _ = c.Write([]byte(text))
	r := bufio.NewReader(c)
	resp, body := next(t, r)
	return r, resp, body
}

func next(t testing.TB, r *bufio.Reader) (*http.Response, string) {
	t.Helper()
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		return nil, err.Error()
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Error(err)
	}
	return resp, string(body)
}

// TestRequests: A15, A32, A34, A35: what is passed on, and what is answered with the
// reason instead. The rows that reach the server are the controls.
func TestRequests(t *testing.T) {
	const head = "GET / HTTP/1.1\r\nHost: "
	for name, c := range map[string]struct {
		request string
		want    string // what the server sees
		reason  Refusal
	}{
		"its host":              {head + "web.example.com\r\n\r\n", "GET / web.example.com ", ""},
		"upper case, final dot": {head + "WEB.Example.COM.\r\n\r\n", "GET / web.example.com ", ""},
		"with the port":         {head + "web.example.com:PORT\r\n\r\n", "GET / web.example.com ", ""},
		"absolute form":         {"GET http://web.example.com/x?a=b;c HTTP/1.1\r\nHost: web.example.com\r\n\r\n", "GET /x?a=b;c web.example.com ", ""},
		"absolute, Host differs": {
			"GET http://web.example.com/x HTTP/1.1\r\nHost: evil.example.net\r\n\r\n", "GET /x web.example.com ", "",
		},
		"two slashes":  {"GET //evil.example.net/x HTTP/1.1\r\nHost: web.example.com\r\n\r\n", "GET //evil.example.net/x web.example.com ", ""},
		"odd path":     {"GET /a%2Fb/../c HTTP/1.1\r\nHost: web.example.com\r\n\r\n", "GET /a%2Fb/../c web.example.com ", ""},
		"a body":       {"POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 3\r\n\r\nabc", "POST / web.example.com abc", ""},
		"all of it":    {"OPTIONS * HTTP/1.1\r\nHost: web.example.com\r\n\r\n", "OPTIONS * web.example.com ", ""},
		"HTTP/2 offer": {head + "web.example.com\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n", "GET / web.example.com ", ""},

		"another host":            {head + "evil.example.net\r\n\r\n", "", RefusedHost},
		"another permitted host":  {head + "other.example.com\r\n\r\n", "", RefusedHost},
		"another port":            {head + "web.example.com:81\r\n\r\n", "", RefusedHost},
		"an empty port":           {head + "web.example.com:\r\n\r\n", "", RefusedHost},
		"an address":              {head + "127.0.0.1\r\n\r\n", "", RefusedHost},
		"an empty host":           {head + "\r\n\r\n", "", RefusedHost},
		"no host, HTTP/1.0":       {"GET / HTTP/1.0\r\n\r\n", "", RefusedHost},
		"longer":                  {head + "web.example.com.evil.example.net\r\n\r\n", "", RefusedHost},
		"absolute, other host":    {"GET http://evil.example.net/ HTTP/1.1\r\nHost: web.example.com\r\n\r\n", "", RefusedHost},
		"absolute, with a user":   {"GET http://web.example.com@evil.example.net/ HTTP/1.1\r\nHost: web.example.com\r\n\r\n", "", RefusedRequest},
		"absolute, other scheme":  {"GET https://web.example.com/ HTTP/1.1\r\nHost: web.example.com\r\n\r\n", "", RefusedRequest},
		"opaque":                  {"GET web.example.com:443 HTTP/1.1\r\nHost: web.example.com\r\n\r\n", "", RefusedRequest},
		"CONNECT":                 {"CONNECT web.example.com:443 HTTP/1.1\r\nHost: web.example.com:443\r\n\r\n", "", RefusedRequest},
		"CONNECT, its host":       {"CONNECT web.example.com HTTP/1.1\r\nHost: web.example.com\r\n\r\n", "", RefusedRequest},
		"HTTP/2, prior knowledge": {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "", RefusedRequest},
		"an upgrade":              {head + "web.example.com\r\nConnection: upgrade\r\nUpgrade: TLS/1.0\r\n\r\n", "", RefusedRequest},
		"two upgrades":            {head + "web.example.com\r\nConnection: upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c\r\n\r\n", "", RefusedRequest},
	} {
		t.Run(name, func(t *testing.T) {
			s := newWebServer(t)
			w, target := newHTTPWorld(t, s.port)
			w.allow("other.example.com", s.port, Verdict{})
			conn := w.connect(target)
			r, resp, body := send(t, conn, strings.ReplaceAll(c.request, "PORT", strconv.Itoa(s.port)))
			if resp == nil {
				t.Fatal(body)
			}
			if c.reason == "" {
				if resp.StatusCode != 200 || body != c.want {
					t.Errorf("%d %q, want %q", resp.StatusCode, body, c.want)
				}
				return
			}
			if resp.StatusCode != 403 || !strings.HasPrefix(body, "agentshim: egress: web.example.com:") || strings.Count(body, "\n") != 1 {
				t.Errorf("%d %q", resp.StatusCode, body)
			}
			if rest, err := io.ReadAll(r); len(rest) != 0 || err != nil {
				t.Errorf("afterwards %q %v", rest, err)
			}
			if e := w.refused(EventRequest, c.reason); e.Conn == 0 || e.Name != "web.example.com" {
				t.Errorf("%+v", e)
			}
			if s.taken.Load() != 0 || w.zone.questions.Load() != 0 {
				t.Errorf("the server got %q", s.got())
			}
		})
	}
}

// TestEachRequest: A32: the second request of a connection is judged as the first.
func TestEachRequest(t *testing.T) {
	s := newWebServer(t)
	w, target := newHTTPWorld(t, s.port)
	c := w.connect(target)
	r, _, body := send(t, c, "GET /1 HTTP/1.1\r\nHost: web.example.com\r\n\r\nGET /2 HTTP/1.1\r\nHost: web.example.com\r\n\r\n"+
		"GET /3 HTTP/1.1\r\nHost: evil.example.net\r\n\r\nGET /4 HTTP/1.1\r\nHost: web.example.com\r\n\r\n")
	_, second := next(t, r)
	refused, line := next(t, r)
	if body != "GET /1 web.example.com " || second != "GET /2 web.example.com " || refused == nil || refused.StatusCode != 403 {
		t.Errorf("%q %q %q", body, second, line)
	}
	if rest, _ := io.ReadAll(r); len(rest) != 0 {
		t.Errorf("answered after a refusal: %q", rest)
	}
	if e := w.refused(EventRequest, RefusedHost); e.Detail != "evil.example.net" {
		t.Errorf("%+v", e)
	}
	if s.taken.Load() != 1 || len(s.requests()) != 2 {
		t.Errorf("%d connections, %q", s.taken.Load(), s.requests())
	}
	if e := w.seen("end", func(e Event) bool { return e.Kind == EventEnd }); e.Sent == 0 || e.Received == 0 || e.Addr.String() != "127.0.0.1" {
		t.Errorf("%+v", e)
	}
}

// TestSmuggling: the server sees the requests that were judged and no others,
// whichever way it would have read them.
func TestSmuggling(t *testing.T) {
	const inner = "GET /smuggled HTTP/1.1\r\nHost: evil.example.net\r\n\r\n"
	length := strconv.Itoa(len(inner))
	post := "POST /outer HTTP/1.1\r\nHost: web.example.com\r\n"
	for name, request := range map[string]string{
		"CL.TE":               post + "Content-Length: " + strconv.Itoa(len(inner)+5) + "\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner,
		"TE.CL":               post + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + fmt.Sprintf("%x", len(inner)) + "\r\n" + inner + "\r\n0\r\n\r\n",
		"TE.TE":               post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + inner,
		"odd TE":              post + "Transfer-Encoding: xchunked\r\nContent-Length: " + length + "\r\n\r\n" + inner,
		"TE with a space":     post + "Transfer-Encoding : chunked\r\nContent-Length: " + length + "\r\n\r\n" + inner,
		"TE after a tab":      post + "Transfer-Encoding:\tchunked\r\nContent-Length: " + length + "\r\n\r\n" + inner,
		"two lengths":         post + "Content-Length: 0\r\nContent-Length: " + length + "\r\n\r\n" + inner,
		"a signed length":     post + "Content-Length: +" + length + "\r\n\r\n" + inner,
		"a length list":       post + "Content-Length: 0, " + length + "\r\n\r\n" + inner,
		"GET with a length":   "GET /outer HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: " + length + "\r\n\r\n" + inner,
		"bare line feeds":     "POST /outer HTTP/1.1\nHost: web.example.com\nContent-Length: " + length + "\n\n" + inner,
		"a folded header":     post + "X: y\r\n Content-Length: 0\r\nContent-Length: " + length + "\r\n\r\n" + inner,
		"CR in a header":      post + "X: y\rContent-Length: 0\r\nContent-Length: " + length + "\r\n\r\n" + inner,
		"chunk extension":     post + "Transfer-Encoding: chunked\r\n\r\n" + fmt.Sprintf("%x;a=\nb", len(inner)) + "\r\n" + inner + "\r\n0\r\n\r\n",
		"odd chunk size":      post + "Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n" + inner,
		"Connection hides CL": post + "Connection: Content-Length, Transfer-Encoding\r\nContent-Length: " + length + "\r\n\r\n" + inner,
		"expect":              post + "Expect: 100-continue\r\nContent-Length: " + length + "\r\n\r\n" + inner,
		"HTTP/1.0 and TE":     "POST /outer HTTP/1.0\r\nHost: web.example.com\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive\r\n\r\n0\r\n\r\n" + inner,
	} {
		t.Run(name, func(t *testing.T) {
			s := newWebServer(t)
			w, target := newHTTPWorld(t, s.port)
			c := w.connect(target)
			_, _ = c.Write([]byte(request))
			_ = c.CloseWrite()
			_, _ = io.ReadAll(c)
			seen := s.got()
			for _, line := range s.requests() {
				if !strings.HasPrefix(line, "POST /outer web.example.com ") && !strings.HasPrefix(line, "GET /outer web.example.com ") {
					t.Errorf("the server read %q of\n%q", line, seen)
				}
			}
			heads, _, _ := strings.Cut(strings.ToLower(seen), "\r\n\r\n")
			if strings.Count(heads, "\ncontent-length:")+strings.Count(heads, "\ntransfer-encoding:") > 1 || strings.Contains(heads, "evil") {
				t.Errorf("the server saw an ambiguous head\n%q", seen)
			}
		})
	}
	// The control: without the gateway, such a server takes the inner one for a request.
	s := newWebServer(t)
	c, err := net.Dial("tcp4", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = c.Write([]byte(post + "Content-Length: 60\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner))
	_ = c.(*net.TCPConn).CloseWrite()
	_, _ = io.ReadAll(c)
	if lines := s.requests(); len(lines) != 2 || !strings.Contains(lines[1], "/smuggled") {
		t.Errorf("control: %q", lines)
	}
}

// TestWebSocket: A35: it passes to the connection's own host, and only after the
// server has agreed.
func TestWebSocket(t *testing.T) {
	s := newWebServer(t)
	w, target := newHTTPWorld(t, s.port)
	c := w.connect(target)
	r, resp, _ := send(t, c, "GET /ws HTTP/1.1\r\nHost: web.example.com\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	if resp == nil || resp.StatusCode != 101 {
		t.Fatalf("%v", resp)
	}
	_, _ = c.Write([]byte("frames"))
	got := make([]byte, 6)
	if _, err := io.ReadFull(r, got); err != nil || string(got) != "frames" {
		t.Errorf("%q %v", got, err)
	}
	reset(c)
	w.seen("end", func(e Event) bool { return e.Kind == EventEnd })
	c = w.connect(target)
	if _, resp, _ := send(t, c, "GET /ws HTTP/1.1\r\nHost: evil.example.net\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"); resp == nil || resp.StatusCode != 403 {
		t.Errorf("%v", resp)
	}
}

// TestRefusedHTTP: a refused target on the HTTP port is told what is missing; nothing
// is looked up.
func TestRefusedHTTP(t *testing.T) {
	w, _ := newHTTPWorld(t, 8099)
	for _, target := range []string{"evil.example.net:8099", "203.0.113.7:8099"} {
		_, resp, body := send(t, w.connect(target), "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		want := "agentshim: egress: " + target + " is not allowed; add \"" + target + "\" to egress.allow\n"
		if resp == nil || resp.StatusCode != 403 || body != want || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/plain") {
			t.Errorf("%v %q", resp, body)
		}
	}
	for _, e := range w.all() {
		if e.Kind != EventConnect || e.Verdict.Reason != RefusedUnlisted {
			t.Errorf("%+v", e)
		}
	}
	if len(w.all()) != 2 || w.zone.questions.Load() != 0 {
		t.Errorf("%+v", w.all())
	}
}

// TestRefusalLine: what the sandbox sent can't make lines of its own.
func TestRefusalLine(t *testing.T) {
	line := refusalLine(destination{name: "web.example.com", port: 80}, Verdict{Reason: RefusedHost, Why: "why", Entry: `{"host": "x", "raw": true}`},
		"a\r\nb\x1b[31m\u202e"+strings.Repeat("x", 1<<16))
	if strings.ContainsAny(line, "\r\n\x1b\u202e") || len(line) > 1000 || !strings.HasSuffix(line, `; add {"host": "x", "raw": true} to egress.allow`) {
		t.Errorf("%q", line)
	}
}

// TestHTTPFailures: a target that can't be reached is told in one line.
func TestHTTPFailures(t *testing.T) {
	gone := newServer(t, "127.0.0.1:0", echo)
	gone.Close()
	cut := newServer(t, "127.0.0.1:0", func(c *net.TCPConn) { _, _ = c.Read(make([]byte, 100)) })
	for name, c := range map[string]struct {
		port   int
		zone   []string
		dial   func(addr netip.Addr, port int, local bool) Verdict
		code   int
		reason Refusal
	}{
		"no such name": {gone.port, nil, nil, 502, RefusedResolve},
		"no answer":    {gone.port, []string{"127.0.0.1"}, nil, 502, RefusedDial},
		"private":      {cut.port, []string{"127.0.0.1"}, onlyReachable, 403, RefusedAddress},
		"cut off":      {cut.port, []string{"127.0.0.1"}, nil, 502, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w, target := newHTTPWorld(t, c.port)
			w.policy.judgeDials(c.dial)
			w.zone.set("web.example.com", c.zone...)
			_, resp, body := send(t, w.connect(target), "POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 0\r\n\r\n")
			if resp == nil || resp.StatusCode != c.code || !strings.HasPrefix(body, "agentshim: egress: web.example.com:") || strings.Count(body, "\n") != 1 {
				t.Fatalf("%v %q", resp, body)
			}
			if c.reason != "" {
				w.refused(EventConnect, c.reason)
			}
		})
	}
}

// TestHTTPTransparent: what a server and a client see of each other is their own.
func TestHTTPTransparent(t *testing.T) {
	var got *http.Request
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r
		w.Header()["Date"] = nil
		w.Header()["Content-Type"] = nil
		w.WriteHeader(200)
		_, _ = w.Write([]byte("<html>"))
	}))
	defer s.Close()
	port := s.Listener.Addr().(*net.TCPAddr).Port
	w, target := newHTTPWorld(t, port)
	_, resp, body := send(t, w.connect(target), "GET / HTTP/1.1\r\nHost: web.example.com\r\nX-Forwarded-For: 1.2.3.4\r\nVia: mine\r\n\r\n")
	if resp == nil || body != "<html>" || len(resp.Header["Content-Type"])+len(resp.Header["Date"])+len(resp.Header["Via"]) != 0 {
		t.Errorf("%v %q", resp, body)
	}
	if h := got.Header; len(h) != 2 || h.Get("X-Forwarded-For") != "1.2.3.4" || h.Get("Via") != "mine" {
		t.Errorf("%v", h)
	}
}

// TestSlowHTTP: A56: a head that does not come or does not end is given up.
func TestSlowHTTP(t *testing.T) {
	s := newWebServer(t)
	w := newWorld(t, func(w *world) {
		w.g.httpPort = s.port
		w.g.limits.headWait = 300 * time.Millisecond
		w.g.limits.headerBytes = 8 << 10
		w.zone.set("web.example.com", "127.0.0.1")
	})
	target := w.allow("web.example.com", s.port, Verdict{})
	start := time.Now()
	for _, text := range []string{"", "GET / HTTP/1.1\r\nHost: web.example.com\r\nX: "} {
		c := w.connect(target)
		_, _ = c.Write([]byte(text))
		_, _ = io.ReadAll(c)
	}
	if took := time.Since(start); took > 4*time.Second {
		t.Errorf("%s", took)
	}
	_, resp, _ := send(t, w.connect(target), "GET / HTTP/1.1\r\nHost: web.example.com\r\nX: "+strings.Repeat("x", 64<<10)+"\r\n\r\n")
	if resp == nil || resp.StatusCode != 431 {
		t.Errorf("%v", resp)
	}
	if s.taken.Load() != 0 {
		t.Errorf("the server got %q", s.got())
	}
}

// TestRequestRate: A56: requests that come too fast wait, and are answered.
func TestRequestRate(t *testing.T) {
	s := newWebServer(t)
	w, target := newHTTPWorld(t, s.port)
	w.g.requests.SetBurst(1)
	w.g.requests.SetLimit(50)
	start := time.Now()
	c := w.connect(target)
	r, _, body := send(t, c, strings.Repeat("GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n", 20))
	for range 19 {
		if _, next := next(t, r); next != body {
			t.Errorf("%q, then %q", body, next)
		}
	}
	if took := time.Since(start); took < 300*time.Millisecond || s.taken.Load() != 1 {
		t.Errorf("twenty requests at fifty a second took %s and %d connections", took, s.taken.Load())
	}
}

// TestNotHTTP: on the HTTP port, something else is refused and the entry is raw.
func TestNotHTTP(t *testing.T) {
	s := newServer(t, "127.0.0.1:0", echo)
	w, target := newHTTPWorld(t, s.port)
	c := w.connect(target)
	_, _ = c.Write([]byte("SSH-2.0-OpenSSH\r\n\r\n"))
	_, _ = io.ReadAll(c)
	if e := w.refused(EventRequest, RefusedRequest); !strings.Contains(e.Verdict.Entry, `"raw": true`) || s.taken.Load() != 0 {
		t.Errorf("%+v", e)
	}
	w.allow("web.example.com", s.port, Verdict{Raw: true})
	if got := w.exchange(target, "SSH-2.0-OpenSSH\r\n"); got != "SSH-2.0-OpenSSH\r\n" {
		t.Errorf("raw: %q", got)
	}
}

// TestHTTPGoesAway: the outside ends with the sandbox's connection, in the middle of
// an answer too, and all of it with the gateway.
func TestHTTPGoesAway(t *testing.T) {
	for name, end := range map[string]func(w *world, c *net.TCPConn){
		"reset":   func(_ *world, c *net.TCPConn) { reset(c) },
		"closed":  func(_ *world, c *net.TCPConn) { c.Close() },
		"gateway": func(w *world, _ *net.TCPConn) { _ = w.g.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			torn := make(chan error, 1)
			s := newServer(t, "127.0.0.1:0", func(c *net.TCPConn) {
				_, _ = http.ReadRequest(bufio.NewReader(c))
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegun")
				_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
				_, err := c.Read(make([]byte, 1))
				torn <- err
			})
			w, target := newHTTPWorld(t, s.port)
			c := w.connect(target)
			_, _ = c.Write([]byte("GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n"))
			if _, err := c.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			end(w, c)
			if err := <-torn; err == nil || strings.Contains(err.Error(), "timeout") {
				t.Errorf("%v", err)
			}
		})
	}
}

// TestHTTPHalfClose: who says no more waits for the answer all the same, also a slow one.
func TestHTTPHalfClose(t *testing.T) {
	s := newServer(t, "127.0.0.1:0", func(c *net.TCPConn) {
		_, _ = http.ReadRequest(bufio.NewReader(c))
		time.Sleep(300 * time.Millisecond)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")
	})
	w, target := newHTTPWorld(t, s.port)
	if got := w.exchange(target, "GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n"); !strings.HasSuffix(got, "\r\n\r\ndone") {
		t.Errorf("%q", got)
	}
}

// TestManyFields: a head is as large in memory as it has fields, and stays there as
// long as somebody likes: its body is awaited, and its receiver.
func TestManyFields(t *testing.T) {
	fields := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "%x:\r\n", i)
		}
		return b.String()
	}
	s := newServer(t, "127.0.0.1:0", func(c *net.TCPConn) {
		req, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		n, _ := strconv.Atoi(req.URL.Query().Get("n"))
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n%s\r\n", fields(n))
	})
	w, target := newHTTPWorld(t, s.port)
	for _, c := range []struct{ sent, answered, code int }{{100, 100, 200}, {1000, 0, 431}, {0, 1000, 502}, {0, 10000, 502}} {
		in, body := w.connect(target), ""
		if c.sent < 1000 {
			body = "nine more"
		}
		_, resp, body := send(t, in, fmt.Sprintf("POST /?n=%d HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 9\r\n%s\r\n%s", c.answered, fields(c.sent), body))
		if resp == nil || resp.StatusCode != c.code {
			t.Fatalf("%+v: %v %q", c, resp, body)
		}
		if c.code == http.StatusOK {
			continue
		}
		if _, err := in.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("%+v: the connection is still open: %v", c, err)
		}
	}
}

// TestEachAddress: a server that ends its connections can have the next one led
// elsewhere; the log says where.
func TestEachAddress(t *testing.T) {
	s := newServer(t, "0.0.0.0:0", func(c *net.TCPConn) {
		if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		}
	})
	w, target := newHTTPWorld(t, s.port)
	leads := []string{"127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.1"}
	var asked atomic.Int64
	w.zone.setFunc("web.example.com", func() []string { return leads[min(int(asked.Load()), len(leads)-1):][:1] })
	c := w.connect(target)
	r := bufio.NewReader(c)
	for range leads {
		_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n")
		if resp, body := next(t, r); resp == nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%v %s", resp, body)
		}
		asked.Add(1)
	}
	var logged []string
	for _, e := range w.all() {
		if e.Kind == EventConnect && e.Verdict.Allowed {
			logged = append(logged, e.Addr.String())
		}
	}
	if want := []string{"127.0.0.1", "127.0.0.2"}; !slices.Equal(logged, want) {
		t.Errorf("logged %q, want %q", logged, want)
	}
}

// TestWebConnections: they have a number of their own.
func TestWebConnections(t *testing.T) {
	s := newWebServer(t)
	w := newWorld(t, func(w *world) {
		w.g.httpPort, w.g.limits.webConns = s.port, 1
		w.zone.set("web.example.com", "127.0.0.1")
	})
	target := w.allow("web.example.com", s.port, Verdict{})
	const get = "GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n"
	first := w.connect(target)
	if _, resp, _ := send(t, first, get); resp == nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("control: %v", resp)
	}
	wantReset(t, w.connect(target))
	w.refused(EventConnect, RefusedLimit)
	first.Close()
	for range 100 {
		if _, resp, _ := send(t, w.connect(target), get); resp != nil && resp.StatusCode == http.StatusOK {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("the connection's place is not free again")
}

// FuzzHTTP: whatever is sent, the server sees only requests for its own name.
func FuzzHTTP(f *testing.F) {
	const inner = "GET /smuggled HTTP/1.1\r\nHost: evil.example.net\r\n\r\n"
	for _, s := range []string{
		"GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner,
		"POST / HTTP/1.1\r\nHost: web.example.com\r\nContent-Length: 3\r\n\r\nabc" + inner,
		"GET http://web.example.com/ HTTP/1.1\r\nHost: evil.example.net\r\n\r\n",
		"CONNECT web.example.com:443 HTTP/1.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"GET /ws HTTP/1.1\r\nHost: web.example.com\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + inner,
	} {
		f.Add([]byte(s))
	}
	s := newWebServer(f)
	w, target := newHTTPWorld(f, s.port)
	f.Fuzz(func(t *testing.T, in []byte) {
		c, err := w.tryConnect(target)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = c.Write(in)
		_ = c.CloseWrite()
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		_, _ = io.Copy(io.Discard, c)
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, line := range s.lines {
			if parts := strings.SplitN(line, " ", 4); len(parts) < 3 || parts[2] != "web.example.com" {
				t.Errorf("the server got %q of %q", line, in)
			}
		}
		s.lines = nil
		s.bytes.Reset()
	})
}
