package netpolicy

import (
	"io"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"
)

// junction is a proxy that answers each request with what a test says, and keeps what it
// was asked.
type junction struct {
	addr  string
	asked chan string
}

// serveEach gives the address of a server that has each connection from f, which it then closes.
func serveEach(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				f(c)
			}()
		}
	}()
	return l.Addr().String()
}

func newJunction(t *testing.T, answer string) *junction {
	t.Helper()
	j := &junction{asked: make(chan string, 16)}
	j.addr = serveEach(t, func(c net.Conn) { j.connected(c, answer) })
	return j
}

// connected takes a CONNECT, and then echoes.
func (j *junction) connected(c net.Conn, answer string) {
	head, err := readHead(c, 4096)
	if err != nil {
		return
	}
	j.asked <- string(head)
	_, _ = io.WriteString(c, answer)
	_, _ = io.Copy(c, c)
}

// through gives a world whose gateway uses the proxy.
func through(t *testing.T, j *junction, user *url.Userinfo) *world {
	return newWorld(t, func(w *world) {
		w.g.Via(NewUpstream(Proxy{Scheme: ProxyHTTP, Address: j.addr}, user))
		w.g.limits.headerBytes = 1024
	})
}

// TestUpstream: a connection goes to the proxy, which is asked for the name; the first byte
// behind its answer is the target's. Nothing is looked up.
func TestUpstream(t *testing.T) {
	j := newJunction(t, "HTTP/1.1 200 Connection established\r\nX-Any: thing\r\n\r\nthe target speaks first")
	w := through(t, j, url.UserPassword("user", "s3cret:word"))
	c := w.connect(w.allow("db.example", 5432, Verdict{Rule: "db.example:5432"}))
	got := make([]byte, len("the target speaks first"))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "the target speaks first" {
		t.Fatalf("%q %v", got, err)
	}
	if _, err := io.WriteString(c, "echo"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, got[:4]); err != nil || string(got[:4]) != "echo" {
		t.Fatalf("%q %v", got[:4], err)
	}
	want := "CONNECT db.example:5432 HTTP/1.1\r\nHost: db.example:5432\r\nProxy-Authorization: Basic dXNlcjpzM2NyZXQ6d29yZA==\r\n\r\n"
	if head := <-j.asked; head != want {
		t.Errorf("%q", head)
	}
	e := w.seen("connect", func(e Event) bool { return e.Kind == EventConnect && e.Verdict.Allowed })
	if e.Name != "db.example" || e.Addr.IsValid() {
		t.Errorf("%+v", e)
	}
}

// TestUpstreamAnswers: what isn't a proxy's consent is a refusal that says so, and nothing of
// what the proxy wrote.
func TestUpstreamAnswers(t *testing.T) {
	for name, c := range map[string]struct{ answer, why string }{
		"refused":               {"HTTP/1.1 403 secret of the proxy\r\n\r\nsecret", "the upstream proxy answered 403 Forbidden"},
		"credentials":           {"HTTP/1.1 407 Who\r\nProxy-Authenticate: Basic realm=secret\r\n\r\n", "the upstream proxy answered 407 Proxy Authentication Required"},
		"no HTTP":               {"SSH-2.0-secret\r\n\r\n", "the upstream proxy did not answer as a proxy"},
		"a long head":           {"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 2000) + "\r\n\r\n", "the upstream proxy did not answer as a proxy"},
		"a control code":        {"HTTP/1.1 200 OK\r\nX\x01: y\r\n\r\n", "the upstream proxy did not answer as a proxy"},
		"another number":        {"HTTP/1.1 999 x\r\n\r\n", "the upstream proxy answered 999 "},
		"only on its way":       {strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 2000), "the upstream proxy answered 103 Early Hints"},
		"another protocol":      {"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "the upstream proxy answered 101 Switching Protocols"},
		"an end without an end": {"HTTP/1.1 200 OK\r\nX: ", "the upstream proxy did not answer in time"},
	} {
		t.Run(name, func(t *testing.T) {
			w := through(t, newJunction(t, c.answer), nil)
			w.g.limits.dialWait = time.Second
			wantReset(t, w.connect(w.allow("db.example", 5432, Verdict{Rule: "db.example:5432"})))
			if e := w.refused(EventConnect, RefusedProxy); e.Verdict.Why != c.why || e.Verdict.Rule != "db.example:5432" {
				t.Errorf("%+v", e.Verdict)
			}
		})
	}
	t.Run("nobody there", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		w := through(t, &junction{addr: l.Addr().String()}, nil)
		wantReset(t, w.connect(w.allow("db.example", 5432, Verdict{})))
		if e := w.refused(EventConnect, RefusedProxy); e.Verdict.Why != "the upstream proxy: connection refused" {
			t.Errorf("%+v", e.Verdict)
		}
	})
}

// TestUpstreamCarries: which targets go through the proxy.
func TestUpstreamCarries(t *testing.T) {
	u := NewUpstream(Proxy{Scheme: ProxyHTTP, Address: "127.0.0.1:1", NoProxy: "direct.example, .below.example,*.under.example,10.0.0.0/8,192.0.2.7,[2001:db8::7]:80,port.example:80,,:1"}, nil)
	for _, c := range []struct {
		name, addr string
		port       int
		want       bool
	}{
		{"any.example", "", 443, true},
		{"direct.example", "", 443, false},
		{"x.direct.example", "", 443, false},
		{"xdirect.example", "", 443, true},
		{"x.below.example", "", 443, false},
		{"below.example", "", 443, true},
		{"port.example", "", 80, false},
		{"port.example", "", 443, true},
		{"", "10.1.2.3", 443, false},
		{"", "192.0.2.1", 443, true},
		{"", "192.0.2.7", 443, false},
		{"", "2001:db8::7", 80, false},
		{"", "2001:db8::7", 443, true},
		{"x.under.example", "", 443, false},
		{"under.example", "", 443, true},
	} {
		d := destination{name: c.name, port: c.port}
		if c.addr != "" {
			d.addr = netip.MustParseAddr(c.addr)
		}
		if got := u.carries(d); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
	all := NewUpstream(Proxy{Scheme: ProxySOCKS5H, Address: "127.0.0.1:1", NoProxy: "*"}, nil)
	if all.carries(destination{name: "a.example", port: 443}) {
		t.Error("but for all")
	}
	var none *Upstream
	if none.carries(destination{name: "a.example", port: 443}) {
		t.Error("without a proxy")
	}
}

// TestUpstreamJudges: an address is judged before the proxy is asked for it; what the sandbox
// says to a name is, too.
func TestUpstreamJudges(t *testing.T) {
	j := newJunction(t, "HTTP/1.1 200 OK\r\n\r\n")
	w := through(t, j, nil)
	w.policy.dial = onlyReachable
	w.policy.allow("10.1.2.3:5432", Verdict{})
	wantReset(t, w.connect("10.1.2.3:5432"))
	w.refused(EventConnect, RefusedAddress)
	w.policy.allow("93.184.216.34:5432", Verdict{})
	c := w.connect("93.184.216.34:5432")
	if _, err := io.WriteString(c, "x"); err != nil {
		t.Fatal(err)
	}
	if head := <-j.asked; !strings.HasPrefix(head, "CONNECT 93.184.216.34:5432 ") {
		t.Errorf("%q", head)
	}
	tls := w.connect(w.allow("tls.example", 443, Verdict{}))
	if _, err := io.WriteString(tls, "GET / HTTP/1.1\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	wantReset(t, tls)
	w.refused(EventConnect, RefusedHello)
	if len(j.asked) > 0 {
		t.Errorf("the proxy was asked: %q", <-j.asked)
	}
}

// TestUpstreamExempt: what NO_PROXY names is looked up, judged and dialled as without a proxy.
func TestUpstreamExempt(t *testing.T) {
	j := newJunction(t, "HTTP/1.1 200 OK\r\n\r\n")
	w := newWorld(t, func(w *world) {
		w.g.Via(NewUpstream(Proxy{Scheme: ProxyHTTP, Address: j.addr, NoProxy: "direct.example"}, nil))
	})
	w.zone.set("db.direct.example", "10.1.2.3")
	w.zone.set("db.proxied.example", "10.1.2.3")
	w.policy.judgeDials(onlyReachable)
	wantReset(t, w.connect(w.allow("db.direct.example", 5432, Verdict{})))
	if e := w.refused(EventConnect, RefusedAddress); e.Addr != netip.MustParseAddr("10.1.2.3") || len(j.asked) > 0 {
		t.Errorf("%+v, the proxy was asked %d times", e, len(j.asked))
	}
	echoes(t, w.connect(w.allow("db.proxied.example", 5432, Verdict{})))
}

// echoes checks that what is sent comes back.
func echoes(t *testing.T, c net.Conn) {
	t.Helper()
	got := make([]byte, 4)
	if _, err := io.WriteString(c, "echo"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "echo" {
		t.Fatalf("%q %v", got, err)
	}
}

// wholeAnswer is a proxy whose whole answer is there.
type wholeAnswer struct {
	net.Conn
	r io.Reader
}

func (a wholeAnswer) Read(p []byte) (int, error)  { return a.r.Read(p) }
func (a wholeAnswer) Write(p []byte) (int, error) { return len(p), nil }
func (a wholeAnswer) Close() error                { return nil }
func (a wholeAnswer) SetDeadline(time.Time) error { return nil }

// FuzzUpstream: whatever a proxy answers, what it wrote is in no message, and what stands behind a
// consent is all there.
func FuzzUpstream(f *testing.F) {
	f.Add("HTTP/1.1 200 OK\r\n\r\nrest", false)
	f.Add("HTTP/1.1 407 Who\r\nContent-Length: 3\r\n\r\nyou", false)
	f.Add("\x05\x02\x01\x00\x05\x00\x00\x03\x02ab\x00\x50rest", true)
	f.Add("\x05\xff", true)
	f.Add("\x05\x00\x05\x02\x00\x01\x00\x00\x00\x00\x00\x00", true)
	f.Fuzz(func(t *testing.T, in string, socks bool) {
		u := NewUpstream(Proxy{Scheme: ProxyHTTP, Address: "proxy.example:1"}, url.UserPassword("user", "s3cret"))
		left := strings.NewReader(in)
		ask := func() error { return u.request(wholeAnswer{r: left}, "db.example:5432", 256) }
		if socks {
			ask = func() error { return u.socks(t.Context(), wholeAnswer{r: left}, "db.example:5432") }
		}
		err := ask()
		if err == nil {
			if taken := len(in) - left.Len(); taken > 270 || !socks && !strings.HasSuffix(in[:taken], "\r\n\r\n") {
				t.Fatalf("%q: %d bytes taken", in, taken)
			}
			return
		}
		text := string(proxyFault(t.Context(), err))
		if len(text) > 100 || strings.Contains(text, "s3cret") || escape(text) != text {
			t.Fatalf("%q: %q", in, text)
		}
	})
}

// FuzzReadHead: of a proxy's answer no more than the bound is kept, and no byte behind the
// empty line is taken.
func FuzzReadHead(f *testing.F) {
	f.Add("HTTP/1.1 200 OK\r\n\r\nrest")
	f.Add("\r\n\r\n\r\n\r\n")
	f.Add(strings.Repeat("x", 100))
	f.Fuzz(func(t *testing.T, in string) {
		r := strings.NewReader(in)
		head, err := readHead(r, 64)
		end := strings.Index(in, "\r\n\r\n")
		if good := end >= 0 && end+4 <= 64; good != (err == nil) {
			t.Fatalf("%q: %v", in, err)
		}
		if err == nil && (string(head) != in[:end+4] || r.Len() != len(in)-end-4) {
			t.Fatalf("%q: %q, %d left", in, head, r.Len())
		}
	})
}
