package harness_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/harness"
)

func TestParseProxy(t *testing.T) {
	for text, want := range map[string]string{
		"http://proxy.corp.example:3128":          "http://proxy.corp.example:3128",
		"http://proxy":                            "http://proxy:80",
		"http://127.0.0.1:3128/":                  "http://127.0.0.1:3128",
		"http://[::1]:3128":                       "http://[::1]:3128",
		"http://user:pass%20word@proxy.example:1": "http://proxy.example:1",
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
		"", "env", "proxy:3128", "https://s3cret@p:1", "socks5://s3cret@p:1", "http://s3cret@", "http://s3cret@p:0", "http://s3cret@p:65536", "http://s3cret@p:x",
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
	for _, egress := range []string{`"mode":"open","proxy":"socks5://u:s3cret@p:1"`, `"proxy":"http://u:s3cret@p:1"`, `"mode":"network","proxy":"http://u:s3cret@p:1"`, `"mode":"open","proxy":"http://u:s3cret@p:1/x"`} {
		_, err := parse(with(`"egress":{` + egress + `}`))
		if !errors.Is(err, harness.ErrInvalid) || !strings.Contains(err.Error(), "$.egress.proxy: ") || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: %v", egress, err)
		}
	}
	for _, egress := range []string{`"mode":"open","proxy":"env"`, `"mode":"allow-list","allow":["a.example"],"proxy":"http://u:p@p:1"`} {
		if _, err := parse(with(`"egress":{` + egress + `}`)); err != nil {
			t.Errorf("%s: %v", egress, err)
		}
	}
}
