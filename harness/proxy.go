package harness

import (
	"errors"
	"net"
	"net/netip"
	"net/url"
	"regexp"
)

// ProxyEnv is the value of egress.proxy that stands for the caller's variables.
const ProxyEnv = "env"

// Proxy is an upstream proxy for connections to the outside.
type Proxy struct {
	// Address is its HOST:PORT.
	Address string
	// User has its credentials, nil where there are none. They belong in no plan and no message.
	User *url.Userinfo
}

var errProxy = errors.New("not a proxy's URL")

// ParseProxy takes http://[USER:PASSWORD@]HOST[:PORT], without a path; the port is 80 where
// none is given. No error holds any of the text, which may have a password in it.
func ParseProxy(text string) (Proxy, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return Proxy{}, errProxy
	case u.Scheme != "http":
		return Proxy{}, errors.New("only a proxy at http:// is supported")
	case u.Opaque != "" || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return Proxy{}, errors.New("a proxy's URL has no path, query or fragment")
	case !proxyHost(u.Hostname()):
		return Proxy{}, errProxy
	}
	port := u.Port()
	if port == "" {
		port = "80"
	}
	if n, err := portNumber(port); err != nil || n == 0 {
		return Proxy{}, errProxy
	}
	return Proxy{Address: net.JoinHostPort(u.Hostname(), port), User: u.User}, nil
}

var proxyName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$`)

// proxyHost takes an address without a zone, or a name of letters, digits, dots, dashes and
// underscores.
func proxyHost(host string) bool {
	if addr, err := netip.ParseAddr(host); err == nil {
		return addr.Zone() == ""
	}
	return len(host) <= 253 && proxyName.MatchString(host)
}

// String leaves the credentials out.
func (p Proxy) String() string { return "http://" + p.Address }

// proxy judges egress.proxy. Its value is never shown: it may have a password in it.
func (c *checker) proxy() {
	e := c.h.Egress
	const at = "$.egress.proxy"
	if e.Proxy == "" || c.covers(at) {
		return
	}
	if e.Mode == "deny-all" {
		c.fault(at, nil, "has no effect where egress.mode is deny-all", "remove it, or choose another mode")
	}
	if e.Mode == "network" {
		c.fault(at, nil, "is for modes without a network of their own", "remove it, or choose mode allow-list or open")
	}
	if e.Proxy == ProxyEnv {
		return
	}
	if _, err := ParseProxy(e.Proxy); err != nil {
		c.fault(at, nil, err.Error(), `write it as "http://HOST:PORT", or "env" for your own variables`)
	}
}
