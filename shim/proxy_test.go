package shim

import (
	"strings"
	"testing"
)

// TestFindProxy: the file's proxy, or the caller's; neither a value nor a password is in a message.
func TestFindProxy(t *testing.T) {
	for name, c := range map[string]struct {
		value     string
		env       map[string]string
		want, no  string
		reason    Reason
		hasSecret bool
	}{
		"none":                {"", map[string]string{"HTTPS_PROXY": "http://p:1"}, "", "", "", false},
		"the file's":          {"http://u:s3cret@p:1", map[string]string{"HTTPS_PROXY": "http://q:1", "NO_PROXY": "x"}, "p:1", "", "", true},
		"the caller's":        {"env", map[string]string{"HTTPS_PROXY": "http://u:s3cret@q:1", "NO_PROXY": "x.example"}, "q:1", "x.example", "", true},
		"in lower case":       {"env", map[string]string{"https_proxy": "http://q:1", "no_proxy": "y"}, "q:1", "y", "", false},
		"for all":             {"env", map[string]string{"ALL_PROXY": "http://q:1"}, "q:1", "", "", false},
		"without a scheme":    {"env", map[string]string{"HTTPS_PROXY": "q:1"}, "q:1", "", "", false},
		"none of the caller":  {"env", map[string]string{"HTTP_PROXY": "http://q:1", "NO_PROXY": "*"}, "", "", "", false},
		"one that can't be":   {"env", map[string]string{"HTTPS_PROXY": "socks5://u:s3cret@q:1"}, "", "", ReasonPolicy, false},
		"one that is no URL":  {"env", map[string]string{"ALL_PROXY": "http://u:s3cret@q:1:2"}, "", "", ReasonPolicy, false},
		"the file's is wrong": {"https://u:s3cret@q:1", nil, "", "", ReasonSpecInvalid, false},
	} {
		t.Run(name, func(t *testing.T) {
			p, no, err := findProxy(c.value, func(name string) string { return c.env[name] })
			if ReasonOf(err) != c.reason || err != nil && strings.Contains(err.Error()+HintOf(err), "s3cret") {
				t.Fatalf("%v, hint %q", err, HintOf(err))
			}
			got := ""
			if p != nil {
				got = p.Address
				if (p.User != nil) != c.hasSecret {
					t.Errorf("credentials: %v", p.User != nil)
				}
			}
			if got != c.want || no != c.no {
				t.Errorf("%q but %q", got, no)
			}
		})
	}
}
