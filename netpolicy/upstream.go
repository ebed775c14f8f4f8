package netpolicy

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"time"

	"golang.org/x/net/http/httpproxy"
)

// Proxy is an upstream HTTP proxy, without its credentials.
type Proxy struct {
	// Address is its HOST:PORT. It may be anywhere, also on the host's loopback.
	Address string `json:"address"`
	// NoProxy lists what is dialled without it, as NO_PROXY does.
	NoProxy string `json:"noProxy,omitempty"`
}

// Text says the proxy in one line.
func (p Proxy) Text() string {
	text := "connections go through the one at " + p.Address
	if p.NoProxy != "" {
		text += fmt.Sprintf(", but for %q", p.NoProxy)
	}
	return text
}

// Upstream is a proxy as the gateway uses it: with CONNECT, for each connection to the
// outside that NoProxy does not leave out. It resolves names by itself, so that nobody
// judges the address that a name leads to. What has no name is judged, then asked for by its
// address. What the sandbox says to a target is judged as without a proxy.
type Upstream struct {
	proxy Proxy
	// authorization is a header field with its line end, or empty.
	authorization string
	// through gives a URL for what goes through the proxy.
	through func(*url.URL) (*url.URL, error)
}

// NewUpstream is for a proxy and its credentials, nil where it needs none.
func NewUpstream(p Proxy, user *url.Userinfo) *Upstream {
	u := &Upstream{proxy: p}
	if user != nil {
		password, _ := user.Password()
		u.authorization = "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(user.Username()+":"+password)) + "\r\n"
	}
	u.through = (&httpproxy.Config{HTTPSProxy: "http://" + p.Address, NoProxy: p.NoProxy}).ProxyFunc()
	return u
}

// host is the target as it is asked for.
func (t destination) host() string {
	host := t.name
	if host == "" {
		host = t.addr.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(t.port))
}

// carries says whether a target is reached through the proxy.
func (u *Upstream) carries(t destination) bool {
	if u == nil {
		return false
	}
	via, err := u.through(&url.URL{Scheme: "https", Host: t.host()})
	return err != nil || via != nil
}

// dialProxy has the proxy connect to a permitted target.
func (g *Gateway) dialProxy(ctx context.Context, t destination) (*net.TCPConn, netip.Addr, Verdict) {
	if v := g.judgeAddress(t); !v.Allowed {
		return nil, t.addr, v
	}
	d := net.Dialer{Timeout: g.limits.dialWait, Resolver: g.resolver}
	c, err := d.DialContext(ctx, "tcp", g.upstream.proxy.Address)
	if err != nil {
		v := failure(t, err)
		v.Reason, v.Why = RefusedProxy, "the upstream proxy: "+v.Why
		return nil, t.addr, v
	}
	out := c.(*net.TCPConn) // what a net.Dialer gives for "tcp"
	g.lean(out)
	stop := context.AfterFunc(ctx, func() { reset(out) })
	err = g.upstream.connect(out, t, g.limits)
	if !stop() || err != nil {
		reset(out)
		return nil, t.addr, Verdict{Rule: t.verdict.Rule, Reason: RefusedProxy, Why: proxyFault(err)}
	}
	return out, t.addr, t.verdict
}

// judgeAddress is for a target without a name: the address is known, so that it is judged
// as if it were dialled.
func (g *Gateway) judgeAddress(t destination) Verdict {
	if t.name != "" {
		return Verdict{Allowed: true}
	}
	local, err := g.routing(t.addr)
	if err != nil {
		return failure(t, err)
	}
	return g.table.Dial(t.addr, t.port, local)
}

// proxyStatus is a proxy's answer other than a success.
type proxyStatus int

func (s proxyStatus) Error() string { return fmt.Sprintf("%d %s", int(s), http.StatusText(int(s))) }

// proxyFault tells nothing that only the proxy knows: the sandbox reads it.
func proxyFault(err error) string {
	var status proxyStatus
	switch {
	case errors.As(err, &status):
		return "the upstream proxy answered " + status.Error()
	case err == nil, errors.Is(err, net.ErrClosed):
		return "it was given up"
	}
	return "the upstream proxy did not answer as a proxy"
}

// connect asks for the target, and reads the answer and no byte behind it: the next ones are
// the target's.
func (u *Upstream) connect(c *net.TCPConn, t destination, l limits) error {
	if err := c.SetDeadline(time.Now().Add(l.dialWait)); err != nil {
		return err
	}
	host := t.host()
	if _, err := io.WriteString(c, "CONNECT "+host+" HTTP/1.1\r\nHost: "+host+"\r\n"+u.authorization+"\r\n"); err != nil {
		return err
	}
	head, err := readHead(c, l.headerBytes)
	if err != nil {
		return err
	}
	r, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(head)), &http.Request{Method: http.MethodConnect})
	if err != nil {
		return err
	}
	r.Body.Close()
	if r.StatusCode/100 != 2 {
		return proxyStatus(r.StatusCode)
	}
	return c.SetDeadline(time.Time{})
}

var errLongHead = errors.New("an answer's head is too long")

// readHead reads up to the empty line that ends the head of a message.
func readHead(r io.Reader, most int) ([]byte, error) {
	var head []byte
	one := make([]byte, 1)
	for !bytes.HasSuffix(head, []byte("\r\n\r\n")) {
		if len(head) == most {
			return nil, errLongHead
		}
		if _, err := io.ReadFull(r, one); err != nil {
			return nil, err
		}
		head = append(head, one[0])
	}
	return head, nil
}
