package harness_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/harness"
)

func TestParseProxy(t *testing.T) {
	for text, want := range map[string]string{
		"http://proxy.corp.example:3128":            "http://proxy.corp.example:3128",
		"http://proxy":                              "http://proxy:80",
		"https://proxy":                             "https://proxy:443",
		"https://proxy.example:3129/":               "https://proxy.example:3129",
		"socks5://127.0.0.1":                        "socks5://127.0.0.1:1080",
		"socks5h://u:pass%20word@[::1]:9050":        "socks5h://[::1]:9050",
		"SOCKS5H://proxy":                           "socks5h://proxy:1080",
		"http://" + strings.Repeat("u", 300) + "@p": "http://p:80",
		"http://127.0.0.1:3128/":                    "http://127.0.0.1:3128",
		"http://[::1]:3128":                         "http://[::1]:3128",
		"http://user:pass%20word@proxy.example:1":   "http://proxy.example:1",
	} {
		p, err := harness.ParseProxy(text)
		if err != nil || p.String() != want {
			t.Errorf("%q: %v %v", text, p, err)
		}
		if password, _ := p.User.Password(); strings.Contains(text, "pass") && password != "pass word" {
			t.Errorf("%q: password %q", text, password)
		}
	}
	for _, text := range []string{
		"", "env", "proxy:3128", "socks4://s3cret@p:1", "socks4a://s3cret@p:1", "socks://s3cret@p:1", "ftp://s3cret@p:1", "socks5://:s3cret@p:1", "http://@p:1", "https://a%3As3cret@p:1",
		"socks5h://" + strings.Repeat("s3cret", 50) + "@p", "socks5://u:" + strings.Repeat("s3cret", 50) + "@p", "socks5://s3cret@p:1/x", "http://s3cret@", "http://s3cret@p:0", "http://s3cret@p:65536", "http://s3cret@p:x",
		"http://s3cret@p:1/path", "http://p:1?s3cret", "http://p:1#s3cret", "http://s3cret@p q:1", "http://s3cret@[fe80::1%25lo]:1", "http://s3cret@-p:1",
		"http://s3cret@p:1\r\nx", "http:s3cret",
	} {
		if p, err := harness.ParseProxy(text); err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%q: %v %v", text, p, err)
		}
	}
}

// TestProxyProblems: a faulty proxy is told without its text, which may hold a password.
func TestProxyProblems(t *testing.T) {
	for _, egress := range []string{`"mode":"open","proxy":"socks4://u:s3cret@p:1"`, `"proxy":"http://u:s3cret@p:1"`, `"mode":"open","proxy":"http://u:s3cret@p:1/x"`} {
		_, err := parse(with(`"egress":{` + egress + `}`))
		if !errors.Is(err, harness.ErrInvalid) || !strings.Contains(err.Error(), "$.egress.proxy: ") || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: %v", egress, err)
		}
	}
	for _, egress := range []string{`"mode":"open","proxy":"env"`, `"mode":"network","proxy":"socks5h://u:s3cret@p:1"`, `"mode":"open","proxy":"https://p"`, `"mode":"allow-list","allow":["a.example"],"proxy":"http://u:p@p:1"`} {
		if _, err := parse(with(`"egress":{` + egress + `}`)); err != nil {
			t.Errorf("%s: %v", egress, err)
		}
	}
}
