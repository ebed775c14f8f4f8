package shim

import (
	"crypto/x509"
	"errors"
	"net/url"
	"path/filepath"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/netpolicy"
)

// probeProxy finds the upstream proxy that the file asks for, and keeps its credentials out
// of the host's facts.
func (p *prepared) probeProxy() error {
	proxy, noProxy, err := findProxy(p.job.Harness.Egress.Proxy, p.job.getenv)
	if err != nil || proxy == nil {
		return err
	}
	p.host.Proxy, p.proxyUser = &netpolicy.Proxy{Scheme: proxy.Scheme, Address: proxy.Address, NoProxy: noProxy}, proxy.User
	if proxy.Scheme == netpolicy.ProxyHTTPS {
		return anyRoots(x509.SystemCertPool())
	}
	return nil
}

// anyRoots refuses a host that can't tell the proxy from another one. Go's crypto/x509 leaves
// out what it doesn't find.
func anyRoots(roots *x509.CertPool, err error) error {
	if err == nil && roots.Equal(x509.NewCertPool()) {
		err = errors.New("this host trusts no certificate authority")
	}
	if err == nil {
		return nil
	}
	return &Error{
		Reason: ReasonPolicy, Msg: "egress.proxy: an https proxy can't be verified", Err: err,
		Hint: "install the host's ca-certificates, or name a file of certificates in SSL_CERT_FILE",
	}
}

// rootsEnv are the variables by which Go's crypto/x509 finds the host's certificate authorities.
func rootsEnv(getenv func(string) string) []string {
	out := []string{}
	if file := getenv("SSL_CERT_FILE"); file != "" {
		if abs, err := filepath.Abs(file); err == nil {
			file = abs
		}
		out = append(out, "SSL_CERT_FILE="+file)
	}
	if dirs := getenv("SSL_CERT_DIR"); dirs != "" {
		out = append(out, "SSL_CERT_DIR="+dirs)
	}
	return out
}

// findProxy gives the file's proxy, or the one that the caller's variables name for https:
// every connection is made by CONNECT. Nil is none. What a message names is the
// variable, never its value.
func findProxy(value string, getenv func(string) string) (*harness.Proxy, string, error) {
	switch value {
	case "":
		return nil, "", nil
	case harness.ProxyEnv:
	default:
		proxy, err := harness.ParseProxy(value)
		if err != nil {
			return nil, "", &Error{Reason: ReasonSpecInvalid, Msg: "egress.proxy", Err: err}
		}
		return &proxy, "", nil
	}
	name, text := firstSet(getenv, "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
	if name == "" {
		return nil, "", nil
	}
	if u, err := url.Parse(text); err != nil || u.Scheme == "" || u.Host == "" {
		text = "http://" + text // curl(1): without a scheme
	}
	proxy, err := harness.ParseProxy(text)
	if err != nil {
		return nil, "", &Error{
			Reason: ReasonPolicy, Msg: "egress.proxy: the variable " + name, Err: err,
			Hint: "write http://HOST:PORT there (or https, socks5, socks5h), or in egress.proxy",
		}
	}
	_, noProxy := firstSet(getenv, "NO_PROXY", "no_proxy")
	return &proxy, noProxy, nil
}

// firstSet is the first of the variables that is not empty.
func firstSet(getenv func(string) string, names ...string) (name, value string) {
	for _, name := range names {
		if value := getenv(name); value != "" {
			return name, value
		}
	}
	return "", ""
}

// upstream is the plan's proxy with its credentials, nil for none.
func (p *prepared) upstream() *netpolicy.Upstream {
	if p.plan.Egress.Proxy == nil {
		return nil
	}
	return netpolicy.NewUpstream(*p.plan.Egress.Proxy, p.proxyUser)
}
