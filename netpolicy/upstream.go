package netpolicy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpproxy"
	"golang.org/x/net/proxy"
	"golang.org/x/sys/unix"
)

// The schemes of proxies.
const (
	// ProxyHTTP and ProxyHTTPS are asked by CONNECT, the second over TLS.
	ProxyHTTP  = "http"
	ProxyHTTPS = "https"
	// ProxySOCKS5 is asked for addresses, ProxySOCKS5H for names.
	ProxySOCKS5  = "socks5"
	ProxySOCKS5H = "socks5h"
)

// Proxy is an upstream proxy, without its credentials.
type Proxy struct {
	Scheme string `json:"scheme"`
	// Address is its HOST:PORT. It may be anywhere, also on the host's loopback.
	Address string `json:"address"`
	// NoProxy lists what is dialled without it, as NO_PROXY does: names with all below them,
	// addresses, ranges, each with a port or without, or * for everything. Loopback
	// addresses are never asked of it.
	NoProxy string `json:"noProxy,omitempty"`
}

// String is its URL.
func (p Proxy) String() string { return p.Scheme + "://" + p.Address }

// Resolves says whether it is asked for names, so that nobody judges where they lead.
func (p Proxy) Resolves() bool { return p.Scheme != ProxySOCKS5 }

// Carries says whether it is asked for a target: not for what NoProxy leaves out. It is
// never asked for host services, nor for addresses where those are reached directly.
func (p Proxy) Carries(x Target) bool {
	return NewUpstream(p, nil).carries(destination{name: x.Name, addr: x.Addr, port: x.Port})
}

// Text says the proxy in one line.
func (p Proxy) Text() string {
	text := "connections go through " + p.String()
	if p.NoProxy != "" {
		text += fmt.Sprintf(", but for %q", p.NoProxy)
	}
	if !p.Resolves() {
		text += "; names are looked up on this host"
	}
	return text
}

// Upstream is a proxy as the gateway uses it, for each connection to the outside that
// NoProxy does not leave out. One that resolves is asked for names, and nobody judges the
// addresses that they lead to. What has no name, and what a name leads to on this host for
// one that does not resolve, is judged, then asked for by its address. What the
// sandbox says to a target is judged as without a proxy. That the proxy connects to what it
// was asked for, and that nobody reads the credentials of one that is not asked over TLS,
// it does not guarantee.
type Upstream struct {
	proxy Proxy
	user  *url.Userinfo
	// roots are who may vouch for a proxy over TLS, nil for those of the host.
	roots *x509.CertPool
	// through gives a URL for what goes through the proxy.
	through func(*url.URL) (*url.URL, error)
}

// NewUpstream is for a proxy and its credentials, nil where it needs none. Nothing is dialled:
// a proxy that can't be used, or of another scheme, shows as RefusedProxy in each connection.
func NewUpstream(p Proxy, user *url.Userinfo) *Upstream {
	// The scheme takes no part in what goes through it.
	config := httpproxy.Config{HTTPSProxy: "http://" + p.Address, NoProxy: p.NoProxy}
	return &Upstream{proxy: p, user: user, through: config.ProxyFunc()}
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

// outward is a connection to a target, or to a proxy that carries it.
type outward interface {
	net.Conn
	CloseWrite() error
}

// dialProxy has the proxy connect to a permitted target.
func (g *Gateway) dialProxy(ctx context.Context, t destination) (outward, netip.Addr, Verdict) {
	ctx, cancel := context.WithTimeout(ctx, g.limits.dialWait)
	defer cancel()
	if t.name != "" && g.upstream.proxy.Resolves() {
		out, err := g.ask(ctx, t.host())
		if err != nil {
			return nil, t.addr, failure(t, err)
		}
		return out, t.addr, t.verdict
	}
	addrs := []netip.Addr{t.addr}
	if t.name != "" {
		var err error
		if addrs, err = g.resolver.LookupNetIP(ctx, "ip", t.name+"."); err != nil {
			return nil, t.addr, failure(t, err)
		}
	}
	return g.askEach(ctx, t, addrs)
}

// askEach judges each address, as if it were dialled, before the proxy is asked for it.
func (g *Gateway) askEach(ctx context.Context, t destination, addrs []netip.Addr) (outward, netip.Addr, Verdict) {
	a := &attempts{table: g.table, routing: g.routingBeyond, port: t.port}
	var failed error
	for _, addr := range addrs {
		target := netip.AddrPortFrom(addr.Unmap(), uint16(t.port))
		err := a.control(ctx, "tcp", target.String(), nil)
		if err == nil {
			var out outward
			if out, err = g.ask(ctx, target.String()); err == nil {
				return out, target.Addr(), t.verdict
			}
		}
		failed = errors.Join(failed, err)
	}
	addr, v := a.verdict(t, failed)
	return nil, addr, v
}

// routingBeyond is routing for addresses that the proxy dials: this host needs no way there.
func (g *Gateway) routingBeyond(addr netip.Addr) (bool, error) {
	local, err := g.routing(addr)
	if errors.Is(err, unix.ENETUNREACH) {
		return false, nil
	}
	return local, err
}

// ask has the proxy connect to a target. The connection's next byte is the target's.
func (g *Gateway) ask(ctx context.Context, host string) (outward, error) {
	d := net.Dialer{Resolver: g.resolver}
	c, err := d.DialContext(ctx, "tcp", g.upstream.proxy.Address)
	if err != nil {
		return nil, proxyError("the upstream proxy: " + failure(destination{}, err).Why)
	}
	tcp := c.(*net.TCPConn) // what a net.Dialer gives for "tcp"
	g.lean(tcp)
	stop := context.AfterFunc(ctx, func() { reset(tcp) })
	out, err := g.upstream.connect(ctx, tcp, host, g.limits.headerBytes)
	if !stop() || err != nil {
		reset(tcp)
		return nil, proxyFault(ctx, err)
	}
	return out, nil
}

// proxyError is why a proxy carries nothing.
type proxyError string

func (e proxyError) Error() string { return string(e) }

// proxyFault tells nothing that only the proxy knows: the sandbox reads it.
func proxyFault(ctx context.Context, err error) proxyError {
	var status proxyStatus
	var refused socksError
	var cert *tls.CertificateVerificationError
	switch {
	case errors.As(err, &status):
		return proxyError("the upstream proxy answered " + status.Error())
	case errors.As(err, &cert):
		return proxyError("the upstream proxy's certificate " + certificateFault(err))
	case errors.Is(ctx.Err(), context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return "the upstream proxy did not answer in time"
	case err == nil, ctx.Err() != nil:
		return "it was given up"
	case errors.As(err, &refused):
		return proxyError("the upstream proxy: " + refused.Error())
	}
	return "the upstream proxy did not answer as a proxy"
}

func certificateFault(err error) string {
	var name x509.HostnameError
	var unknown x509.UnknownAuthorityError
	switch {
	case errors.As(err, &name):
		return "is for another name"
	case errors.As(err, &unknown):
		return "is signed by nobody that this host trusts"
	}
	return "is not valid"
}

// connect asks for the target, and reads the answer and no byte behind it. The end of ctx
// closes c.
func (u *Upstream) connect(ctx context.Context, c *net.TCPConn, host string, most int) (outward, error) {
	switch u.proxy.Scheme {
	case ProxyHTTP:
		return c, u.request(c, host, most)
	case ProxyHTTPS:
		over := tls.Client(c, u.tls())
		if err := over.HandshakeContext(ctx); err != nil {
			return nil, err
		}
		return over, u.request(over, host, most)
	case ProxySOCKS5, ProxySOCKS5H:
		return c, u.socks(ctx, c, host)
	}
	return nil, fmt.Errorf("a proxy of scheme %q", u.proxy.Scheme)
}

// tls has the proxy prove the name or address under which it is known. HTTP/2 is not offered.
func (u *Upstream) tls() *tls.Config {
	host, _, _ := net.SplitHostPort(u.proxy.Address)
	return &tls.Config{ServerName: host, RootCAs: u.roots, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}
}

// proxyStatus is a proxy's answer other than a success.
type proxyStatus int

func (s proxyStatus) Error() string { return fmt.Sprintf("%d %s", int(s), http.StatusText(int(s))) }

// request asks by CONNECT. An answer has one head of at most most bytes.
func (u *Upstream) request(c net.Conn, host string, most int) error {
	if _, err := io.WriteString(c, "CONNECT "+host+" HTTP/1.1\r\nHost: "+host+"\r\n"+u.authorization()+"\r\n"); err != nil {
		return err
	}
	head, err := readHead(c, most)
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
	return nil
}

// authorization is a header field with its line end, or empty.
func (u *Upstream) authorization() string {
	if u.user == nil {
		return ""
	}
	password, _ := u.user.Password()
	return "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(u.user.Username()+":"+password)) + "\r\n"
}

// socksError is what a SOCKS5 proxy answered, in words.
type socksError string

func (e socksError) Error() string { return string(e) }

// socks asks by SOCKS5 (RFC 1928, 1929), the answers to which are of some 260 bytes at most.
func (u *Upstream) socks(ctx context.Context, c net.Conn, host string) error {
	var auth *proxy.Auth
	if u.user != nil {
		password, _ := u.user.Password()
		auth = &proxy.Auth{User: u.user.Username(), Password: password}
	}
	d, err := proxy.SOCKS5("tcp", u.proxy.Address, auth, dialledAlready{c})
	if err != nil {
		return err
	}
	_, err = d.(proxy.ContextDialer).DialContext(ctx, "tcp", host)
	return socksFault(err)
}

// socksFault tells what was answered, for which the library has texts without anything of the
// proxy's but numbers, from errors of the connection.
func socksFault(err error) error {
	var op *net.OpError
	var broken net.Error
	if !errors.As(err, &op) || errors.As(op.Err, &broken) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	return socksError(strings.TrimPrefix(op.Err.Error(), "unknown error "))
}

// dialledAlready is a connection in the form of its dialer.
type dialledAlready struct{ net.Conn }

func (d dialledAlready) Dial(_, _ string) (net.Conn, error) { return d.Conn, nil }

func (d dialledAlready) DialContext(context.Context, string, string) (net.Conn, error) {
	return d.Conn, nil
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
