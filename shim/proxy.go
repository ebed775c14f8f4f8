package shim

import (
	"net/url"

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
	p.host.Proxy, p.proxyUser = &netpolicy.Proxy{Address: proxy.Address, NoProxy: noProxy}, proxy.User
	return nil
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
			Hint: "write http://HOST:PORT there, or in egress.proxy",
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
