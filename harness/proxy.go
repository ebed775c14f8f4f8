package harness

import (
	"errors"
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"strings"
)

// ProxyEnv is the value of egress.proxy that stands for the caller's variables.
const ProxyEnv = "env"

// proxyPorts are the kinds of upstream proxies, by their URL's scheme, and the port where it
// names none: those asked by CONNECT, over TLS or not, and SOCKS5 with names looked up by the
// caller's side (socks5) or by the proxy (socks5h), as curl(1) has them.
var proxyPorts = map[string]string{"http": "80", "https": "443", "socks5": "1080", "socks5h": "1080"}

// Proxy is an upstream proxy for connections to the outside.
type Proxy struct {
	// Scheme is http, https, socks5 or socks5h.
	Scheme string
	// Address is its HOST:PORT.
	Address string
	// User has its credentials, nil where there are none. They belong in no plan and no message.
	User *url.Userinfo
}

var errProxy = errors.New("not a proxy's URL")

// ParseProxy takes SCHEME://[USER:PASSWORD@]HOST[:PORT], without a path. No error holds any of
// the text, which may have a password in it.
func ParseProxy(text string) (Proxy, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return Proxy{}, errProxy
	case proxyPorts[u.Scheme] == "":
		return Proxy{}, errors.New("a proxy's URL begins with http://, https://, socks5:// or socks5h://")
	case u.Opaque != "" || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return Proxy{}, errors.New("a proxy's URL has no path, query or fragment")
	case !proxyHost(u.Hostname()):
		return Proxy{}, errProxy
	case !proxyUser(u):
		return Proxy{}, errors.New("a proxy's user is not empty and has no colon in it; SOCKS5 takes 255 bytes of user and password each")
	}
	port := u.Port()
	if port == "" {
		port = proxyPorts[u.Scheme]
	}
	if n, err := portNumber(port); err != nil || n == 0 {
		return Proxy{}, errProxy
	}
	return Proxy{Scheme: u.Scheme, Address: net.JoinHostPort(u.Hostname(), port), User: u.User}, nil
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

// proxyUser says whether the credentials, if there are any, can be sent: RFC 7617 has no colon
// in a user, RFC 1929 lengths of one byte.
func proxyUser(u *url.URL) bool {
	if u.User == nil {
		return true
	}
	name := u.User.Username()
	password, _ := u.User.Password()
	if strings.HasPrefix(u.Scheme, "socks") {
		return name != "" && len(name) <= 255 && len(password) <= 255
	}
	return name != "" && !strings.Contains(name, ":")
}

// String leaves the credentials out.
func (p Proxy) String() string { return p.Scheme + "://" + p.Address }

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
	if e.Proxy == ProxyEnv {
		return
	}
	if _, err := ParseProxy(e.Proxy); err != nil {
		c.fault(at, nil, err.Error(), `write it as "http://HOST:PORT" (or https, socks5, socks5h), or "env" for your own variables`)
	}
}
