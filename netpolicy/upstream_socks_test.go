package netpolicy

import (
	"io"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// socks is a SOCKS5 proxy. It keeps what it was asked, the credentials and each request.
type socks struct {
	addr  string
	asked chan string
	// method is what it answers to the offer, auth to the credentials, reply to a request.
	method, auth string
	reply        func(request string) string
}

const granted = "\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00"

func newSOCKS(t *testing.T, method, auth string, reply func(string) string) *socks {
	t.Helper()
	s := &socks{asked: make(chan string, 32), method: method, auth: auth, reply: reply}
	s.addr = serveEach(t, s.serve)
	return s
}

func (s *socks) serve(c net.Conn) {
	read := func(n int) string {
		b := make([]byte, n)
		if _, err := io.ReadFull(c, b); err != nil {
			return strings.Repeat("\x00", n)
		}
		return string(b)
	}
	read(int(read(2)[1]))
	_, _ = io.WriteString(c, s.method)
	if s.method == "\x05\x02" {
		user := read(int(read(2)[1]))
		s.asked <- user + ":" + read(int(read(1)[0]))
		_, _ = io.WriteString(c, s.auth)
	}
	request := read(4)
	switch request[3] {
	case 1:
		request += read(6)
	case 3:
		n := read(1)
		request += n + read(int(n[0])+2)
	case 4:
		request += read(18)
	default:
		return
	}
	s.asked <- request
	_, _ = io.WriteString(c, s.reply(request))
	_, _ = io.Copy(c, c)
}

func throughSOCKS(t *testing.T, scheme, addr string, user *url.Userinfo) *world {
	return newWorld(t, func(w *world) {
		w.g.Via(NewUpstream(Proxy{Scheme: scheme, Address: addr}, user))
		w.g.limits.dialWait = time.Second
	})
}

// TestUpstreamSOCKS: the proxy is asked for the name, or for the address of what has none, with
// the credentials it wants; the first byte behind its answer is the target's.
func TestUpstreamSOCKS(t *testing.T) {
	for name, reply := range map[string]string{
		"from an IPv4 address": granted,
		"from an IPv6 address": "\x05\x00\x00\x04" + strings.Repeat("x", 18),
		"from a name":          "\x05\x00\x00\x03\xff" + strings.Repeat("x", 257),
	} {
		t.Run(name, func(t *testing.T) {
			s := newSOCKS(t, "\x05\x02", "\x01\x00", func(string) string { return reply + "first" })
			w := throughSOCKS(t, ProxySOCKS5H, s.addr, url.UserPassword("user", "s3cret:word"))
			w.policy.judgeDials(onlyReachable)
			c := w.connect(w.allow("db.example", 5432, Verdict{}))
			got := make([]byte, len("first"))
			if _, err := io.ReadFull(c, got); err != nil || string(got) != "first" {
				t.Fatalf("%q %v", got, err)
			}
			echoes(t, c)
			if user, request := <-s.asked, <-s.asked; user != "user:s3cret:word" || request != "\x05\x01\x00\x03\x0adb.example\x15\x38" {
				t.Errorf("%q %q", user, request)
			}
			w.policy.allow("10.1.2.3:5432", Verdict{})
			wantReset(t, w.connect("10.1.2.3:5432"))
			w.refused(EventConnect, RefusedAddress)
			w.policy.allow("93.184.216.34:5432", Verdict{})
			_, _ = io.ReadFull(w.connect("93.184.216.34:5432"), got)
			if <-s.asked; string(got) != "first" {
				t.Errorf("%q", got)
			}
			if request := <-s.asked; request != "\x05\x01\x00\x01\x5d\xb8\xd8\x22\x15\x38" {
				t.Errorf("%q", request)
			}
		})
	}
}

// TestUpstreamSOCKSAnswers: all but a consent is a refusal that says what it was.
func TestUpstreamSOCKSAnswers(t *testing.T) {
	const other = "the upstream proxy did not answer as a proxy"
	code := func(n string) string { return "\x05" + n + "\x00\x01\x00\x00\x00\x00\x00\x00" }
	for name, c := range map[string]struct{ method, auth, reply, why string }{
		"a failure":               {"\x05\x00", "", code("\x01"), "the upstream proxy: general SOCKS server failure"},
		"its rules":               {"\x05\x00", "", code("\x02"), "the upstream proxy: connection not allowed by ruleset"},
		"no network":              {"\x05\x00", "", code("\x03"), "the upstream proxy: network unreachable"},
		"no host":                 {"\x05\x00", "", code("\x04"), "the upstream proxy: host unreachable"},
		"refused":                 {"\x05\x00", "", code("\x05"), "the upstream proxy: connection refused"},
		"too far":                 {"\x05\x00", "", code("\x06"), "the upstream proxy: TTL expired"},
		"no such command":         {"\x05\x00", "", code("\x07"), "the upstream proxy: command not supported"},
		"no such address":         {"\x05\x00", "", code("\x08"), "the upstream proxy: address type not supported"},
		"a number of its own":     {"\x05\x00", "", code("\x63"), "the upstream proxy: unknown code: 99"},
		"another kind of address": {"\x05\x00", "", "\x05\x00\x00\x09", "the upstream proxy: unknown address type 9"},
		"reserved":                {"\x05\x00", "", "\x05\x00\x01\x01", "the upstream proxy: non-zero reserved field"},
		"no method":               {"\x05\xff", "", "", "the upstream proxy: no acceptable authentication methods"},
		"another method":          {"\x05\x01", "", "", "the upstream proxy: unsupported authentication method 1"},
		"wrong credentials":       {"\x05\x02", "\x01\x01", "", "the upstream proxy: username/password authentication failed"},
		"another version of them": {"\x05\x02", "\x05\x00", "", "the upstream proxy: invalid username/password version"},
		"SOCKS4":                  {"\x00\x5a\x00\x00", "", "", "the upstream proxy: unexpected protocol version 0"},
		"HTTP":                    {"HTTP/1.1 400 s3cret\r\n\r\n", "", "", "the upstream proxy: unexpected protocol version 72"},
		"another version later":   {"\x05\x00", "", "\x04\x00\x00\x01", "the upstream proxy: unexpected protocol version 4"},
		"a part of an answer":     {"\x05\x00", "", "\x05\x00\x00", "the upstream proxy did not answer in time"},
		"a part of a name":        {"\x05\x00", "", "\x05\x00\x00\x03\xffx", "the upstream proxy did not answer in time"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSOCKS(t, c.method, c.auth, func(string) string { return c.reply })
			w := throughSOCKS(t, ProxySOCKS5H, s.addr, url.UserPassword("user", "s3cret"))
			wantReset(t, w.connect(w.allow("db.example", 5432, Verdict{Rule: "db.example:5432"})))
			if e := w.refused(EventConnect, RefusedProxy); e.Verdict.Why != c.why || e.Verdict.Rule != "db.example:5432" {
				t.Errorf("%+v", e.Verdict)
			}
		})
	}
	for name, f := range map[string]func(net.Conn){
		"closes at once":    func(net.Conn) {},
		"closes in between": func(c net.Conn) { _, _ = io.WriteString(c, "\x05") },
		"resets":            func(c net.Conn) { _, _ = c.Read(make([]byte, 1)); reset(c) },
	} {
		t.Run(name, func(t *testing.T) {
			w := throughSOCKS(t, ProxySOCKS5H, serveEach(t, f), nil)
			wantReset(t, w.connect(w.allow("db.example", 5432, Verdict{})))
			if e := w.refused(EventConnect, RefusedProxy); e.Verdict.Why != other {
				t.Errorf("%+v", e.Verdict)
			}
		})
	}
}

// TestUpstreamSlow: an answer that comes byte by byte, or never, ends in time, whatever the proxy is.
func TestUpstreamSlow(t *testing.T) {
	for _, scheme := range []string{ProxyHTTP, ProxyHTTPS, ProxySOCKS5H} {
		t.Run(scheme, func(t *testing.T) {
			ended := make(chan error, 1)
			addr := serveEach(t, func(c net.Conn) {
				answer := "HTTP/1.1 200 " + strings.Repeat("x", 1000)
				if scheme == ProxySOCKS5H {
					answer = "\x05\x00\x05\x00\x00\x03\xff" + strings.Repeat("x", 1000)
				}
				if scheme == ProxyHTTPS {
					answer = "\x16\x03\x03\x40\x00" + strings.Repeat("x", 1000)
				}
				var err error
				for i := 0; i < len(answer) && err == nil; i++ {
					_, err = io.WriteString(c, answer[i:i+1])
					time.Sleep(20 * time.Millisecond)
				}
				ended <- err
			})
			w := throughSOCKS(t, scheme, addr, nil)
			wantReset(t, w.connect(w.allow("db.example", 5432, Verdict{})))
			if e := w.refused(EventConnect, RefusedProxy); e.Verdict.Why != "the upstream proxy did not answer in time" {
				t.Errorf("%+v", e.Verdict)
			}
			if <-ended == nil {
				t.Error("the proxy wrote all")
			}
		})
	}
}

// TestUpstreamResolvesHere: for a proxy that is asked for addresses, names are looked up and each
// address is judged as if it were dialled.
func TestUpstreamResolvesHere(t *testing.T) {
	s := newSOCKS(t, "\x05\x00", "", func(request string) string {
		if strings.HasPrefix(request[4:], "\x5d\xb8\xd8\x22") {
			return "\x05\x04\x00\x01\x00\x00\x00\x00\x00\x00" // host unreachable
		}
		return granted
	})
	w := throughSOCKS(t, ProxySOCKS5, s.addr, nil)
	w.policy.judgeDials(onlyReachable)
	w.g.routing = func(a netip.Addr) (bool, error) {
		switch a.String() {
		case "93.184.216.1":
			return true, nil
		case "93.184.216.2":
			return true, unix.EHOSTUNREACH
		}
		return true, unix.ENETUNREACH // a host that reaches nothing but its proxy
	}
	w.zone.set("db.example", "10.1.2.3", "93.184.216.34", "93.184.216.35")
	w.zone.set("private.example", "10.1.2.3", "fc00::1")
	w.zone.set("own.example", "93.184.216.1")
	w.zone.set("closed.example", "93.184.216.2")
	w.zone.set("gone.example", "93.184.216.34")
	c := w.connect(w.allow("db.example", 5432, Verdict{Rule: "db.example:5432"}))
	echoes(t, c)
	e := w.seen("connect", func(e Event) bool { return e.Kind == EventConnect && e.Verdict.Allowed })
	if e.Name != "db.example" || e.Addr != netip.MustParseAddr("93.184.216.35") {
		t.Errorf("%+v", e)
	}
	for range 2 {
		if request := <-s.asked; !strings.HasPrefix(request, "\x05\x01\x00\x01\x5d\xb8\xd8") {
			t.Errorf("%q", request)
		}
	}
	for name, reason := range map[string]Refusal{
		"private.example": RefusedAddress, "own.example": RefusedAddress, "closed.example": RefusedDial,
		"nobody.example": RefusedResolve, "gone.example": RefusedProxy,
	} {
		wantReset(t, w.connect(w.allow(name, 5432, Verdict{})))
		w.seen(name, func(e Event) bool { return e.Name == name && e.Verdict.Reason == reason })
	}
	if len(s.asked) != 1 { // for gone.example
		t.Errorf("the proxy was asked %d times", len(s.asked))
	}
	w.zone.setFunc("many.example", func() []string {
		var list []string
		for range maxDialled + 4 {
			list = append(list, "93.184.216.34")
		}
		return list
	})
	<-s.asked
	wantReset(t, w.connect(w.allow("many.example", 5432, Verdict{})))
	w.seen("many", func(e Event) bool { return e.Name == "many.example" && e.Verdict.Reason == RefusedProxy })
	if len(s.asked) > maxDialled {
		t.Errorf("the proxy was asked %d times for one name", len(s.asked))
	}
}

// TestUpstreamEager: a proxy that answers before it is asked gains nothing by it: what it is asked
// stays the same, and bytes of the target's are none of the answer.
func TestUpstreamEager(t *testing.T) {
	for scheme, answer := range map[string]string{ProxyHTTP: consent, ProxySOCKS5H: "\x05\x00" + granted} {
		t.Run(scheme, func(t *testing.T) {
			asked := make(chan string, 1)
			addr := serveEach(t, func(c net.Conn) {
				_, _ = io.WriteString(c, answer+"first")
				b, _ := io.ReadAll(c)
				asked <- string(b)
			})
			c := throughSOCKS(t, scheme, addr, nil)
			in := c.connect(c.allow("db.example", 5432, Verdict{}))
			got := make([]byte, len("first"))
			if _, err := io.ReadFull(in, got); err != nil || string(got) != "first" {
				t.Errorf("%q %v", got, err)
			}
			_, _ = io.WriteString(in, "sent")
			_ = in.CloseWrite()
			if b := <-asked; !strings.Contains(b, "db.example") || !strings.HasSuffix(b, "sent") {
				t.Errorf("%q", b)
			}
		})
	}
}
