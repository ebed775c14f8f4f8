package netpolicy

import (
	"io"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"testing"
)

// junction is a proxy that answers each request with what a test says, and keeps what it
// was asked.
type junction struct {
	addr  string
	asked chan string
}

func newJunction(t *testing.T, answer string) *junction {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	j := &junction{addr: l.Addr().String(), asked: make(chan string, 16)}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				head, err := readHead(c, 4096)
				if err != nil {
					return
				}
				j.asked <- string(head)
				_, _ = io.WriteString(c, answer)
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return j
}

// through gives a world whose gateway uses the proxy.
func through(t *testing.T, j *junction, user *url.Userinfo) *world {
	return newWorld(t, func(w *world) {
		w.g.Via(NewUpstream(Proxy{Address: j.addr}, user))
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
		"refused":        {"HTTP/1.1 403 secret of the proxy\r\n\r\nsecret", "the upstream proxy answered 403 Forbidden"},
		"credentials":    {"HTTP/1.1 407 Who\r\nProxy-Authenticate: Basic realm=secret\r\n\r\n", "the upstream proxy answered 407 Proxy Authentication Required"},
		"no HTTP":        {"SSH-2.0-secret\r\n\r\n", "the upstream proxy did not answer as a proxy"},
		"a long head":    {"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 2000) + "\r\n\r\n", "the upstream proxy did not answer as a proxy"},
		"a control code": {"HTTP/1.1 200 OK\r\nX\x01: y\r\n\r\n", "the upstream proxy did not answer as a proxy"},
		"another number": {"HTTP/1.1 999 x\r\n\r\n", "the upstream proxy answered 999 "},
	} {
		t.Run(name, func(t *testing.T) {
			w := through(t, newJunction(t, c.answer), nil)
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
	u := NewUpstream(Proxy{Address: "127.0.0.1:1", NoProxy: "direct.example, .below.example,10.0.0.0/8,port.example:80"}, nil)
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
	} {
		d := destination{name: c.name, port: c.port}
		if c.addr != "" {
			d.addr = netip.MustParseAddr(c.addr)
		}
		if got := u.carries(d); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
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
