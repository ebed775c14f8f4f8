package netpolicy

import (
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http/httptest"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"
)

// secured has a server of f over TLS, for 127.0.0.1 and example.com; roots are who vouches for it.
func secured(t *testing.T, f func(*tls.Conn)) (addr string, roots *x509.CertPool) {
	t.Helper()
	s := httptest.NewTLSServer(nil) // for its certificate
	s.Close()
	roots = x509.NewCertPool()
	roots.AddCert(s.Certificate())
	config := &tls.Config{Certificates: s.TLS.Certificates, NextProtos: []string{"h2", "http/1.1"}}
	return serveEach(t, func(c net.Conn) {
		over := tls.Server(c, config)
		if over.Handshake() == nil {
			f(over)
		}
	}), roots
}

// throughTLS gives a world whose gateway uses the proxy over TLS.
func throughTLS(t *testing.T, addr string, roots *x509.CertPool, user *url.Userinfo) *world {
	return newWorld(t, func(w *world) {
		u := NewUpstream(Proxy{Scheme: ProxyHTTPS, Address: addr}, user)
		u.roots = roots
		w.g.Via(u)
	})
}

const consent = "HTTP/1.1 200 OK\r\n\r\n"

// TestUpstreamTLS: the request and all behind it go over TLS; each direction ends for itself,
// with what was sent before, and is counted.
func TestUpstreamTLS(t *testing.T) {
	j := &junction{asked: make(chan string, 16)}
	addr, roots := secured(t, func(c *tls.Conn) {
		if p := c.ConnectionState().NegotiatedProtocol; p != "http/1.1" {
			t.Errorf("protocol %q", p)
		}
		j.connected(c, consent+"first")
		_ = c.CloseWrite()
	})
	w := throughTLS(t, addr, roots, url.UserPassword("user", "s3cret"))
	c := w.connect(w.allow("db.example", 5432, Verdict{}))
	sent := make([]byte, 3<<20)
	_, _ = rand.Read(sent)
	go func() {
		_, _ = c.Write(sent)
		_ = c.CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, append([]byte("first"), sent...)) {
		t.Errorf("%d bytes came, %v", len(got), err)
	}
	if head := <-j.asked; !strings.HasPrefix(head, "CONNECT db.example:5432 ") || !strings.Contains(head, "Basic dXNlcjpzM2NyZXQ=") {
		t.Errorf("%q", head)
	}
	e := w.seen("end", func(e Event) bool { return e.Kind == EventEnd })
	if e.Sent != int64(len(sent)) || e.Received != int64(len(sent)+len("first")) {
		t.Errorf("%+v", e)
	}
}

// TestUpstreamTLSUnproven: a proxy that does not prove its name is not asked, and gets no credentials.
func TestUpstreamTLSUnproven(t *testing.T) {
	j := &junction{asked: make(chan string, 16)}
	addr, roots := secured(t, func(c *tls.Conn) { j.connected(c, consent) })
	plain := serveEach(t, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 1))
		_, _ = io.WriteString(c, consent)
	})
	_, port, _ := net.SplitHostPort(addr)
	for name, c := range map[string]struct {
		addr  string
		roots *x509.CertPool
		why   string
	}{
		"nobody vouches": {addr, nil, "the upstream proxy's certificate is signed by nobody that this host trusts"},
		"another name":   {"localhost:" + port, roots, "the upstream proxy's certificate is for another name"},
		"no TLS":         {plain, roots, "the upstream proxy did not answer as a proxy"},
	} {
		t.Run(name, func(t *testing.T) {
			w := throughTLS(t, c.addr, c.roots, url.UserPassword("user", "s3cret"))
			wantReset(t, w.connect(w.allow("db.example", 5432, Verdict{})))
			if e := w.refused(EventConnect, RefusedProxy); e.Verdict.Why != c.why {
				t.Errorf("%+v", e.Verdict)
			}
		})
	}
	if len(j.asked) > 0 {
		t.Error("the proxy was asked")
	}
	w := throughTLS(t, addr, roots, nil)
	echoes(t, w.connect(w.allow("db.example", 5432, Verdict{})))
}

// TestUpstreamTLSEnds: a tunnel that is cut within a record is a reset; a sandbox that goes while the proxy takes nothing leaves no connection.
func TestUpstreamTLSEnds(t *testing.T) {
	t.Run("cut by the proxy", func(t *testing.T) {
		addr, roots := secured(t, func(c *tls.Conn) {
			_, _ = readHead(c, 4096)
			_, _ = io.WriteString(c, consent+"some")
			_, _ = io.WriteString(c.NetConn(), "\x17\x03\x03\x00\x40cut")
			_ = c.NetConn().Close()
		})
		w := throughTLS(t, addr, roots, nil)
		c := w.connect(w.allow("db.example", 5432, Verdict{}))
		if got, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%q, %v", got, err)
		}
	})
	t.Run("the proxy takes nothing", func(t *testing.T) {
		hold := make(chan struct{})
		defer close(hold)
		addr, roots := secured(t, func(c *tls.Conn) {
			_, _ = readHead(c, 4096)
			_, _ = io.WriteString(c, consent)
			<-hold
		})
		w := throughTLS(t, addr, roots, nil)
		c := w.connect(w.allow("db.example", 5432, Verdict{}))
		_ = c.SetWriteDeadline(time.Now().Add(time.Second))
		if _, err := c.Write(make([]byte, 64<<20)); err == nil {
			t.Fatal("all was taken")
		}
		reset(c)
		w.seen("end", func(e Event) bool { return e.Kind == EventEnd })
	})
}

// TestUpstreamTLSJudges: what is said to a name is judged before the proxy is asked, and goes
// through it: a hello, and requests.
func TestUpstreamTLSJudges(t *testing.T) {
	j := &junction{asked: make(chan string, 16)}
	addr, roots := secured(t, func(c *tls.Conn) {
		head, err := readHead(c, 4096)
		if err != nil {
			return
		}
		j.asked <- string(head)
		_, _ = io.WriteString(c, consent)
		if bytes.Contains(head, []byte(":80 ")) {
			_, _ = readHead(c, 4096)
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
		}
		_, _ = io.Copy(c, c)
	})
	w := throughTLS(t, addr, roots, nil)
	bad := w.connect(w.allow("tls.example", 443, Verdict{}))
	if _, err := io.WriteString(bad, "GET / HTTP/1.1\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	wantReset(t, bad)
	w.refused(EventConnect, RefusedHello)
	if len(j.asked) > 0 {
		t.Errorf("the proxy was asked: %q", <-j.asked)
	}
	good := w.connect("tls.example:443")
	go func() {
		_ = tls.Client(good, &tls.Config{ServerName: "tls.example", MinVersion: tls.VersionTLS12}).Handshake()
	}()
	if head := <-j.asked; !strings.HasPrefix(head, "CONNECT tls.example:443 ") {
		t.Errorf("%q", head)
	}
	web := w.connect(w.allow("web.example", 80, Verdict{}))
	if _, err := io.WriteString(web, "GET / HTTP/1.1\r\nHost: web.example\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(web); err != nil || !strings.HasSuffix(string(got), "ok") {
		t.Errorf("%q %v", got, err)
	}
	refusing := throughTLS(t, addr, nil, nil)
	web = refusing.connect(refusing.allow("web.example", 80, Verdict{}))
	if _, err := io.WriteString(web, "GET / HTTP/1.1\r\nHost: web.example\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(web)
	if err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 502 ") || !strings.Contains(string(got), "web.example:80: the upstream proxy's certificate ") {
		t.Errorf("%q %v", got, err)
	}
}
