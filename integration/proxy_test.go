package integration

import (
	"bufio"
	"crypto/tls"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/agentshim/agentshim/shim"
)

const (
	// proxyPort is the upstream proxy's, on a private address of the world's; the others are
	// those of the same proxy over TLS, and by SOCKS5.
	proxyPort, proxyTLSPort, socksPort = 3128, 3129, 1080
	// proxySecret is its password.
	proxySecret = "s3cret-of-the-proxy"
)

// upstream is a proxy in the world, which wants credentials. Names lead where it likes; one
// that begins with "blocked" it refuses.
type upstream struct {
	w     *world
	mu    sync.Mutex
	asked []string
}

var sharedUpstream = sync.OnceValues(func() (*upstream, error) {
	w, err := sharedWorld()
	if err != nil {
		return nil, err
	}
	u := &upstream{w: w}
	return u, within(w.beyond, func() error {
		return errors.Join(
			w.startTCP(proxyPort, func(c net.Conn) { u.serve(c, "CONNECT ") }),
			w.startTCP(proxyTLSPort, func(c net.Conn) { u.serve(tls.Server(c, w.ca.config()), "TLS ") }),
			w.startTCP(socksPort, u.serveSOCKS),
		)
	})
})

// serve takes one CONNECT, and keeps it under the kind.
func (u *upstream) serve(c net.Conn, kind string) {
	r, err := http.ReadRequest(bufio.NewReader(c))
	if err != nil {
		return
	}
	u.ask(kind + r.Host)
	host, _, _ := net.SplitHostPort(r.Host)
	want := "Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+proxySecret))
	switch {
	case r.Method != http.MethodConnect || r.Header.Get("Proxy-Authorization") != want:
		fmt.Fprint(c, "HTTP/1.1 407 No\r\n\r\n")
		return
	case strings.HasPrefix(host, "blocked."):
		fmt.Fprint(c, "HTTP/1.1 403 "+proxySecret+"\r\n\r\n")
		return
	}
	u.carry(c, r.Host, "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 502 No\r\n\r\n")
}

// serveSOCKS takes one request by SOCKS5 (RFC 1928, 1929).
func (u *upstream) serveSOCKS(c net.Conn) {
	read := func(n int) []byte {
		b := make([]byte, n)
		_, _ = io.ReadFull(c, b)
		return b
	}
	read(int(read(2)[1]))
	fmt.Fprint(c, "\x05\x02")
	user := string(read(int(read(2)[1])))
	if user != "user" || string(read(int(read(1)[0]))) != proxySecret {
		fmt.Fprint(c, "\x01\x01")
		return
	}
	fmt.Fprint(c, "\x01\x00")
	var host string
	switch read(4)[3] {
	case 1:
		host = net.IP(read(4)).String()
	case 3:
		host = string(read(int(read(1)[0])))
	case 4:
		host = net.IP(read(16)).String()
	}
	target := net.JoinHostPort(host, fmt.Sprint(binary.BigEndian.Uint16(read(2))))
	u.ask("SOCKS " + target)
	const end = "\x00\x01\x00\x00\x00\x00\x00\x00"
	if strings.HasPrefix(host, "blocked.") {
		fmt.Fprint(c, "\x05\x02"+end)
		return
	}
	u.carry(c, target, "\x05\x00"+end, "\x05\x04"+end)
}

// carry connects to the target, answers, and moves bytes both ways.
func (u *upstream) carry(c net.Conn, target, yes, no string) {
	host, port, _ := net.SplitHostPort(target)
	if net.ParseIP(host) == nil {
		host = publicAddr
	}
	var out net.Conn
	err := within(u.w.beyond, func() (err error) {
		out, err = net.Dial("tcp", net.JoinHostPort(host, port))
		return err
	})
	if err != nil {
		fmt.Fprint(c, no)
		return
	}
	defer out.Close()
	fmt.Fprint(c, yes)
	go func() {
		_, _ = io.Copy(out, c)
		_ = out.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(c, out)
	if over, ok := c.(*tls.Conn); ok {
		_ = over.CloseWrite()
	}
}

func (u *upstream) ask(what string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.asked = append(u.asked, what)
}

// was says whether the proxy was asked: "CONNECT name:port", "TLS …" or "SOCKS …".
func (u *upstream) was(what string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Contains(u.asked, what)
}

// TestUpstreamProxy: connections to the outside go through the proxy that the file or the caller's
// variables name, and nothing else leaves; what is said to a name is judged as ever; the
// password is nowhere.
func TestUpstreamProxy(t *testing.T) {
	w := outside(t)
	w.settle()
	w.zone.set("direct.allowed.example", otherAddr)
	u, err := sharedUpstream()
	if err != nil {
		t.Fatal(err)
	}
	url := fmt.Sprintf("http://user:%s@%s", proxySecret, at(neighbour, proxyPort))
	egress := func(proxy string) map[string]any {
		return map[string]any{"mode": "allow-list", "proxy": proxy, "allow": []any{
			"inner.proxied.example", "inner.proxied.example:80", "inner.proxied.example:22", "blocked.proxied.example:9007",
			"direct.allowed.example:9007", "192.175.48.40/32:9007", "10.0.0.0/8:9007",
		}}
	}
	accepted := []any{"rootless-cgroup-limits", "proxy-resolves"}
	rows := []row{
		{"TLS", []string{"tls", "inner.proxied.example:443", "inner.proxied.example", "x"}, "NXDOMAIN", "", "ok: world sni=inner.proxied.example*"},
		{"another server name", []string{"tls", "inner.proxied.example:443", "evil.example", "x"}, "NXDOMAIN", "", "reset"},
		{"the server speaks first", []string{"tcp", "inner.proxied.example:22"}, "NXDOMAIN", "", "ok: SSH-2.0*"},
		{"HTTP", []string{"http", "inner.proxied.example:80", get("inner.proxied.example")}, "NXDOMAIN", "", "ok: 200 *"},
		{"another host", []string{"http", "inner.proxied.example:80", get("evil.example")}, "NXDOMAIN", "", "ok: 403 *"},
		{"refused by the proxy", []string{"tcp", "blocked.proxied.example:9007", "x"}, "NXDOMAIN", "", "reset"},
		{"an address", []string{"tcp", at("192.175.48.40", echoPort), "x"}, "ok: x", "", "ok: x"},
		{"a port that is not allowed", []string{"tcp", "inner.proxied.example:5432", "x"}, "NXDOMAIN", "", "reset"},
		{"an unlisted name", []string{"name", "evil.example"}, "ok: *", "", "NXDOMAIN"},
		{"NO_PROXY", []string{"tcp", "direct.allowed.example:9007", "x"}, "ok: x", "", "ok: x"},
	}
	control := w.plain(t, setups[0], opsOf(rows))
	for _, r := range rows {
		if out := control.of(r.op...); !isOutcome(r.control, out) {
			t.Errorf("control: %s: %s, want %s", r.name, out, r.control)
		}
	}
	flows := w.left(t, func() {
		each(t, func(t *testing.T, s setup) {
			state := s.private(t)
			file := s.write(t, reachFields(t, egress("env"), spec{"accept": accepted}))
			env := []string{"HTTPS_PROXY=" + url, "NO_PROXY=direct.allowed.example"}
			r := s.call(t, call{Net: w, State: state, Env: env}, "exec", "--spec", file, "--", opsOf(rows).json(t))
			got := endings(t, r, opsOf(rows))
			for _, row := range rows {
				if out := got.of(row.op...); !isOutcome(row.list, out) {
					t.Errorf("%s: %s, want %s\n%s", row.name, out, row.list, r.Stderr)
				}
			}
			if !strings.Contains(r.Stderr, "blocked.proxied.example:9007: proxy: the upstream proxy answered 403 Forbidden") {
				t.Errorf("stderr: %s", r.Stderr)
			}
			s.keepsProxySecret(t, w, state, r, egress(url), accepted)
		})
	})
	for _, f := range flows {
		if f != "tcp "+at(neighbour, proxyPort) && f != "tcp "+at(otherAddr, echoPort) && f != "udp "+at(worldDNS, 53) {
			t.Errorf("%s left", f)
		}
	}
	for _, target := range []string{"inner.proxied.example:443", "inner.proxied.example:22", "inner.proxied.example:80", "192.175.48.40:9007"} {
		if !u.was("CONNECT " + target) {
			t.Errorf("the proxy was not asked for %s", target)
		}
	}
	for _, target := range []string{"direct.allowed.example:9007", "inner.proxied.example:5432", "evil.example:443"} {
		if u.was("CONNECT " + target) {
			t.Errorf("the proxy was asked for %s", target)
		}
	}
}

// TestUpstreamKinds: what TestUpstreamProxy shows of a proxy by CONNECT holds for one over TLS,
// which has to prove its name, and for one by SOCKS5. For one that is asked for addresses, names are
// looked up and judged here, and nothing has to be accepted.
func TestUpstreamKinds(t *testing.T) {
	w := outside(t)
	w.settle()
	u, err := sharedUpstream()
	if err != nil {
		t.Fatal(err)
	}
	w.zone.set("proxy.corp.example", neighbour)
	w.zone.set("named.proxied.example", otherAddr)
	w.zone.set("private.proxied.example", "10.0.0.5")
	over := fmt.Sprintf("https://user:%s@proxy.corp.example:%d", proxySecret, proxyTLSPort)
	socks := fmt.Sprintf("://user:%s@%s", proxySecret, at(neighbour, socksPort))
	tls := []string{"tls", "inner.proxied.example:443", "inner.proxied.example", "x"}
	first := []string{"tcp", "inner.proxied.example:22"}
	web := []string{"http", "inner.proxied.example:80", get("inner.proxied.example")}
	blocked := []string{"tcp", "blocked.proxied.example:9007", "x"}
	addr := []string{"tcp", at("192.175.48.41", echoPort), "x"}
	named, private := []string{"tcp", "named.proxied.example:9007", "x"}, []string{"tcp", "private.proxied.example:9007", "x"}
	resolving := []row{
		{"TLS", tls, "NXDOMAIN", "", "ok: world sni=inner.proxied.example*"},
		{"the server speaks first", first, "NXDOMAIN", "", "ok: SSH-2.0*"},
		{"HTTP", web, "NXDOMAIN", "", "ok: 200 *"},
		{"refused by the proxy", blocked, "NXDOMAIN", "", "reset"},
		{"an address", addr, "ok: x", "", "ok: x"},
	}
	judging := []row{
		{"a name that nobody here knows", first, "NXDOMAIN", "", "reset"},
		{"a name", named, "ok: x", "", "ok: x"},
		{"a name for a private address", private, "ok: x", "", "reset"},
		{"an address", addr, "ok: x", "", "ok: x"},
	}
	kinds := []struct {
		name, proxy string
		env         []string
		accept      []any
		rows        []row
		says        string
		asked       []string
	}{
		{"over TLS", over, []string{"SSL_CERT_FILE=" + w.caFile()}, []any{"proxy-resolves"}, resolving, "the upstream proxy answered 403 Forbidden", []string{
			"TLS inner.proxied.example:443", "TLS inner.proxied.example:22", "TLS inner.proxied.example:80", "TLS 192.175.48.41:9007",
		}},
		{"SOCKS by name", "env", []string{"ALL_PROXY=socks5h" + socks}, []any{"proxy-resolves"}, resolving, "the upstream proxy: connection not allowed by ruleset", []string{
			"SOCKS inner.proxied.example:443", "SOCKS inner.proxied.example:22", "SOCKS inner.proxied.example:80", "SOCKS 192.175.48.41:9007",
		}},
		{"SOCKS by address", "socks5" + socks, nil, nil, judging, "10.0.0.5 is not globally reachable", []string{"SOCKS " + at(otherAddr, echoPort)}},
		{"over TLS, not vouched for", over, nil, []any{"proxy-resolves"}, []row{{"a name", first, "NXDOMAIN", "", "reset"}}, "is signed by nobody that this host trusts", nil},
	}
	control := w.plain(t, setups[0], opsOf(append(resolving, judging...)))
	for _, r := range append(resolving, judging...) {
		if out := control.of(r.op...); !isOutcome(r.control, out) {
			t.Errorf("control: %s: %s, want %s", r.name, out, r.control)
		}
	}
	flows := w.left(t, func() {
		each(t, func(t *testing.T, s setup) {
			for _, k := range kinds {
				t.Run(k.name, func(t *testing.T) {
					state := s.private(t)
					egress := map[string]any{"mode": "allow-list", "proxy": k.proxy, "allow": []any{
						"inner.proxied.example", "inner.proxied.example:80", "inner.proxied.example:22", "blocked.proxied.example:9007",
						"named.proxied.example:9007", "private.proxied.example:9007", "192.175.48.41/32:9007",
					}}
					file := s.write(t, reachFields(t, egress, spec{"accept": append([]any{"rootless-cgroup-limits"}, k.accept...)}))
					r := s.call(t, call{Net: w, State: state, Env: k.env}, "exec", "--spec", file, "--", opsOf(k.rows).json(t))
					got := endings(t, r, opsOf(k.rows))
					for _, row := range k.rows {
						if out := got.of(row.op...); !isOutcome(row.list, out) {
							t.Errorf("%s: %s, want %s\n%s", row.name, out, row.list, r.Stderr)
						}
					}
					if !strings.Contains(r.Stderr, k.says) {
						t.Errorf("stderr: %s", r.Stderr)
					}
					holdNoSecret(t, state, map[string]string{"output": r.Stdout + r.Stderr})
				})
			}
		})
	})
	for _, f := range flows {
		if f != "tcp "+at(neighbour, proxyTLSPort) && f != "tcp "+at(neighbour, socksPort) && f != "udp "+at(worldDNS, 53) {
			t.Errorf("%s left", f)
		}
	}
	for _, k := range kinds {
		for _, what := range k.asked {
			if !u.was(what) {
				t.Errorf("the proxy was not asked: %s", what)
			}
		}
	}
	for _, what := range []string{"SOCKS named.proxied.example:9007", "SOCKS 10.0.0.5:9007"} {
		if u.was(what) {
			t.Errorf("the proxy was asked: %s", what)
		}
	}
}

// keepsProxySecret: the password is in no output and no file of the run's, nor in a plan or a
// refusal; without the file's consent the run is refused.
func (s setup) keepsProxySecret(t *testing.T, w *world, state string, ran result, egress map[string]any, accepted []any) {
	t.Helper()
	file := s.write(t, reachFields(t, egress, spec{"accept": accepted}))
	plan := s.call(t, call{Net: w}, "plan", "--spec", file, "--format", "json").ok(t)
	refused := s.call(t, call{Net: w}, "exec", "--spec", s.write(t, reachFields(t, egress, nil)), "--", "[]").refused(t, shim.ReasonWidening)
	if !strings.Contains(plan.Stdout, at(neighbour, proxyPort)) || !strings.Contains(refused.Stderr, "proxy-resolves") {
		t.Errorf("plan: %s\nrefused: %s", plan.Stdout, refused.Stderr)
	}
	holdNoSecret(t, state, map[string]string{"output": ran.Stdout + ran.Stderr, "plan": plan.Stdout + plan.Stderr, "refusal": refused.Stderr})
}

// holdNoSecret: the password is in none of the texts, nor in a file of the state folder.
func holdNoSecret(t *testing.T, state string, texts map[string]string) {
	t.Helper()
	given := len(texts)
	err := filepath.WalkDir(state, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		texts[path] = string(b)
		return err
	})
	if err != nil || len(texts) < given+2 {
		t.Errorf("%d texts: %v", len(texts), err)
	}
	encoded := base64.StdEncoding.EncodeToString([]byte("user:" + proxySecret))
	for name, text := range texts {
		if strings.Contains(text, proxySecret) || strings.Contains(text, encoded) {
			t.Errorf("%s holds the password", name)
		}
	}
}
