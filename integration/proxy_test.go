package integration

import (
	"bufio"
	"encoding/base64"
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
	// proxyPort is the upstream proxy's, on a private address of the world's.
	proxyPort = 3128
	// proxySecret is its password.
	proxySecret = "s3cret-of-the-proxy"
)

// upstream is a proxy in the world. Names lead where it likes; one that begins with "blocked"
// it refuses.
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
	return u, within(w.beyond, func() error { return w.startTCP(proxyPort, u.serve) })
})

func (u *upstream) serve(c net.Conn) {
	r, err := http.ReadRequest(bufio.NewReader(c))
	if err != nil {
		return
	}
	u.mu.Lock()
	u.asked = append(u.asked, r.Method+" "+r.Host)
	u.mu.Unlock()
	host, port, _ := net.SplitHostPort(r.Host)
	want := "Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+proxySecret))
	switch {
	case r.Method != http.MethodConnect || r.Header.Get("Proxy-Authorization") != want:
		fmt.Fprint(c, "HTTP/1.1 407 No\r\n\r\n")
		return
	case strings.HasPrefix(host, "blocked."):
		fmt.Fprint(c, "HTTP/1.1 403 "+proxySecret+"\r\n\r\n")
		return
	case net.ParseIP(host) == nil:
		host = publicAddr
	}
	var out net.Conn
	err = within(u.w.beyond, func() (err error) {
		out, err = net.Dial("tcp", net.JoinHostPort(host, port))
		return err
	})
	if err != nil {
		fmt.Fprint(c, "HTTP/1.1 502 No\r\n\r\n")
		return
	}
	defer out.Close()
	fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n")
	go func() {
		_, _ = io.Copy(out, c)
		_ = out.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(c, out)
}

// was says whether the proxy was asked for the target.
func (u *upstream) was(target string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Contains(u.asked, http.MethodConnect+" "+target)
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
		if !u.was(target) {
			t.Errorf("the proxy was not asked for %s", target)
		}
	}
	for _, target := range []string{"direct.allowed.example:9007", "inner.proxied.example:5432", "evil.example:443"} {
		if u.was(target) {
			t.Errorf("the proxy was asked for %s", target)
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
	texts := map[string]string{"output": ran.Stdout + ran.Stderr, "plan": plan.Stdout + plan.Stderr, "refusal": refused.Stderr}
	err := filepath.WalkDir(state, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		texts[path] = string(b)
		return err
	})
	if err != nil || len(texts) < 5 {
		t.Errorf("%d texts: %v", len(texts), err)
	}
	encoded := base64.StdEncoding.EncodeToString([]byte("user:" + proxySecret))
	for name, text := range texts {
		if strings.Contains(text, proxySecret) || strings.Contains(text, encoded) {
			t.Errorf("%s holds the password", name)
		}
	}
}
