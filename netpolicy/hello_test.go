package netpolicy

import (
	"bytes"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"io"
	"math/big"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// tlsServer answers hellos for every name, tells the name that it saw, and keeps the
// bytes that reached it.
type tlsServer struct {
	*server
	roots *x509.CertPool
	ech   []byte // an ECH config list whose public name is web.example.com

	mu    sync.Mutex
	bytes bytes.Buffer
}

func newTLSServer(t testing.TB) *tlsServer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"web.example.com", "evil.example.net"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	s := &tlsServer{roots: x509.NewCertPool()}
	s.roots.AddCert(cert)
	echKey, list := echConfig(t)
	s.ech = list
	config := &tls.Config{
		Certificates:             []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		EncryptedClientHelloKeys: []tls.EncryptedClientHelloKey{echKey},
	}
	s.server = newServer(t, "127.0.0.1:0", func(c *net.TCPConn) {
		tapped := tls.Server(tapped{c, s}, config)
		if tapped.Handshake() == nil {
			_, _ = io.WriteString(tapped, tapped.ConnectionState().ServerName)
			tapped.Close()
		}
	})
	return s
}

type tapped struct {
	net.Conn
	s *tlsServer
}

func (t tapped) Read(p []byte) (int, error) {
	n, err := t.Conn.Read(p)
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	t.s.bytes.Write(p[:n])
	return n, err
}

// echConfig makes an ECH key and its config list (RFC 9849 4).
func echConfig(t testing.TB) (tls.EncryptedClientHelloKey, []byte) {
	t.Helper()
	const publicName = "web.example.com"
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	public := key.PublicKey().Bytes()
	body := []byte{1, 0, 0x20, 0, byte(len(public))} // id, DHKEM(X25519)
	body = append(body, public...)
	body = append(body, 0, 4, 0, 1, 0, 1, 0, byte(len(publicName))) // HKDF-SHA256, AES-128-GCM
	body = append(append(body, publicName...), 0, 0)
	config := binary.BigEndian.AppendUint16([]byte{0xfe, 0x0d}, uint16(len(body)))
	config = append(config, body...)
	return tls.EncryptedClientHelloKey{Config: config, PrivateKey: key.Bytes()},
		append(binary.BigEndian.AppendUint16(nil, uint16(len(config))), config...)
}

// helloFor is what a client sends first.
func helloFor(t testing.TB, config *tls.Config) []byte {
	t.Helper()
	config.InsecureSkipVerify = config.EncryptedClientHelloConfigList == nil // only its first bytes are wanted
	var out bytes.Buffer
	_ = tls.Client(sink{&out}, config).Handshake()
	return out.Bytes()
}

type sink struct{ w io.Writer }

func (s sink) Write(p []byte) (int, error)    { return s.w.Write(p) }
func (sink) Read([]byte) (int, error)         { return 0, io.EOF }
func (sink) Close() error                     { return nil }
func (sink) LocalAddr() net.Addr              { return nil }
func (sink) RemoteAddr() net.Addr             { return nil }
func (sink) SetDeadline(time.Time) error      { return nil }
func (sink) SetReadDeadline(time.Time) error  { return nil }
func (sink) SetWriteDeadline(time.Time) error { return nil }

type replay struct {
	sink
	r io.Reader
}

func (r replay) Read(p []byte) (int, error) { return r.r.Read(p) }

func newTLSWorld(t testing.TB, s *tlsServer, v Verdict) (*world, string) {
	t.Helper()
	w := newWorld(t, func(w *world) {
		w.g.tlsPort = s.port
		w.zone.set("web.example.com", "127.0.0.1")
	})
	return w, w.allow("web.example.com", s.port, v)
}

// TestServerName: A07, A27, A29: on the TLS port a hello must be for the name, and for
// everybody to see. The controls are the rows that reach the server.
func TestServerName(t *testing.T) {
	s := newTLSServer(t)
	named := func(name string) *tls.Config { return &tls.Config{ServerName: name, RootCAs: s.roots} }
	hidden := func(name string) *tls.Config {
		return &tls.Config{ServerName: name, RootCAs: s.roots, EncryptedClientHelloConfigList: s.ech, MinVersion: tls.VersionTLS13}
	}
	unnamed := func() *tls.Config { return &tls.Config{InsecureSkipVerify: true} }
	for name, c := range map[string]struct {
		config *tls.Config
		rule   Verdict
		want   string // the name the server sees
		reason Refusal
	}{
		"its name":                    {named("web.example.com"), Verdict{}, "web.example.com", ""},
		"its name, TLS 1.2":           {&tls.Config{ServerName: "web.example.com", RootCAs: s.roots, MaxVersion: tls.VersionTLS12}, Verdict{}, "web.example.com", ""},
		"another name":                {named("evil.example.net"), Verdict{}, "", RefusedServerName},
		"another name, raw":           {named("evil.example.net"), Verdict{Raw: true}, "evil.example.net", ""},
		"no name":                     {unnamed(), Verdict{}, "", RefusedServerName},
		"no name, raw":                {unnamed(), Verdict{Raw: true}, "-", ""},
		"hidden":                      {hidden("evil.example.net"), Verdict{}, "", RefusedECH},
		"hidden, and the rule has it": {hidden("evil.example.net"), Verdict{ECH: true}, "evil.example.net", ""},
		"raw has no checks":           {hidden("evil.example.net"), Verdict{Raw: true}, "evil.example.net", ""},
	} {
		t.Run(name, func(t *testing.T) {
			taken := s.taken.Load()
			w, target := newTLSWorld(t, s, c.rule)
			c.config.Time = time.Now
			conn := tls.Client(w.connect(target), c.config)
			got, err := io.ReadAll(conn)
			if c.reason == "" {
				if err != nil || string(got) != strings.Trim(c.want, "-") {
					t.Fatalf("%q, %v; want %q", got, err, c.want)
				}
				return
			}
			if err == nil {
				t.Fatalf("the server answered %q", got)
			}
			e := w.refused(EventConnect, c.reason)
			if (e.Verdict.Entry != "") != (c.reason == RefusedECH) {
				t.Errorf("%+v", e)
			}
			if n := w.zone.questions.Load(); n != 0 || s.taken.Load() != taken {
				t.Errorf("%d questions, %d connections", n, s.taken.Load()-taken)
			}
		})
	}
}

// TestCanonicalServerName: A15: upper case is the same name, and is passed on as it is.
func TestCanonicalServerName(t *testing.T) {
	s := newTLSServer(t)
	w, target := newTLSWorld(t, s, Verdict{})
	upper := bytes.Replace(helloFor(t, &tls.Config{ServerName: "web.example.com"}), []byte("web.example.com"), []byte("WEB.Example.com"), 1)
	c := w.connect(target)
	_, _ = c.Write(upper)
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	if n, err := c.Read(make([]byte, 1)); n != 1 {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !bytes.HasPrefix(s.bytes.Bytes(), upper) {
		t.Error("the hello was changed")
	}
	for _, odd := range []string{"web.example.co\x00", "web.example.co%", "web.example.co ", "web@example.com", "web.examplE.c\xc3\xa9"} {
		h := hello{complete: true, serverName: odd}
		if v := h.judge(destination{name: "web.example.com", port: 443, verdict: Verdict{Allowed: true}}); v.Allowed || v.Reason != RefusedServerName {
			t.Errorf("%q: %+v", odd, v)
		}
	}
}

// TestNotTLS: A34: nothing but a hello opens the TLS port.
func TestNotTLS(t *testing.T) {
	s := newServer(t, "127.0.0.1:0", func(c *net.TCPConn) { _, _ = c.Write([]byte("SSH-2.0-x\r\n")) })
	whole := helloFor(t, &tls.Config{ServerName: "web.example.com"})
	for name, bytes := range map[string][]byte{
		"HTTP":            []byte("GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n"),
		"CONNECT":         []byte("CONNECT web.example.com:443 HTTP/1.1\r\n\r\n"),
		"SSH":             []byte("SSH-2.0-OpenSSH_9.2\r\n"),
		"SOCKS":           {5, 1, 0},
		"an alert first":  append([]byte{21, 3, 1, 0, 2, 1, 0}, whole...),
		"half a hello":    whole[:len(whole)/2],
		"a record header": whole[:5],
		"no end":          append([]byte{22, 3, 1, 0x40, 0, 1, 0, 0xff, 0xff}, make([]byte, 1<<16)...),
	} {
		for _, raw := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				w := newWorld(t, func(w *world) {
					w.g.tlsPort = s.port
					w.g.limits.headWait = 300 * time.Millisecond
					w.zone.set("web.example.com", "127.0.0.1")
				})
				c := w.connect(w.allow("web.example.com", s.port, Verdict{Raw: raw}))
				_, _ = c.Write(bytes)
				got, _ := io.ReadAll(c)
				if raw {
					if len(got) == 0 && len(bytes) < 1<<12 {
						t.Errorf("the control got nothing")
					}
					return
				}
				if e := w.refused(EventConnect, RefusedHello); len(got) != 0 || !strings.Contains(e.Verdict.Entry, `"raw": true`) {
					t.Errorf("%q, %+v", got, e)
				}
			})
		}
	}
}

// TestSilentTLS: a client that waits for the server to speak is refused after the
// wait; one that says nothing and goes leaves no trace.
func TestSilentTLS(t *testing.T) {
	s := newTLSServer(t)
	w, target := newTLSWorld(t, s, Verdict{})
	w.connect(target).Close()
	wantReset(t, w.connect(target)) // after the wait
	w.refused(EventConnect, RefusedHello)
	if len(w.all()) != 1 || w.zone.questions.Load() != 0 {
		t.Errorf("%+v", w.all())
	}
}

// FuzzHello: nothing harms the reader; what it takes is what a server would take, and
// is kept to the byte.
func FuzzHello(f *testing.F) {
	_, list := echConfig(f)
	for _, c := range []*tls.Config{
		{ServerName: "web.example.com"},
		{ServerName: "web.example.com", MaxVersion: tls.VersionTLS12},
		{ServerName: "evil.example.net", EncryptedClientHelloConfigList: list, MinVersion: tls.VersionTLS13},
		{},
	} {
		f.Add(helloFor(f, c))
	}
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte{21, 3, 1, 0, 2, 1, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		const most = 1 << 12
		h := readHello(replay{r: bytes.NewReader(in)}, most)
		if len(h.raw) > most || !bytes.HasPrefix(in, h.raw) {
			t.Fatalf("%d bytes kept of %d", len(h.raw), len(in))
		}
		v := h.judge(destination{name: "web.example.com", port: 443, verdict: Verdict{Allowed: true}})
		if !v.Allowed {
			return
		}
		if in[0] != recordHandshake || !strings.EqualFold(strings.TrimSuffix(h.serverName, "."), "web.example.com") || h.ech {
			t.Errorf("permitted: %+v", h)
		}
		if !bytes.Contains(bytes.ToLower(h.raw), []byte("web.example")) && len(in) < 64 {
			t.Errorf("permitted without the name: %x", h.raw)
		}
	})
}
