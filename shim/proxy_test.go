package shim

import (
	"crypto/x509"
	"errors"
	"slices"
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
		"the file's":          {"http://u:s3cret@p:1", map[string]string{"HTTPS_PROXY": "http://q:1", "NO_PROXY": "x"}, "http://p:1", "", "", true},
		"the caller's":        {"env", map[string]string{"HTTPS_PROXY": "http://u:s3cret@q:1", "NO_PROXY": "x.example"}, "http://q:1", "x.example", "", true},
		"in lower case":       {"env", map[string]string{"https_proxy": "http://q:1", "no_proxy": "y"}, "http://q:1", "y", "", false},
		"for all":             {"env", map[string]string{"ALL_PROXY": "http://q:1"}, "http://q:1", "", "", false},
		"without a scheme":    {"env", map[string]string{"HTTPS_PROXY": "q:1"}, "http://q:1", "", "", false},
		"none of the caller":  {"env", map[string]string{"HTTP_PROXY": "http://q:1", "NO_PROXY": "*"}, "", "", "", false},
		"over TLS":            {"env", map[string]string{"HTTPS_PROXY": "https://q"}, "https://q:443", "", "", false},
		"SOCKS":               {"env", map[string]string{"ALL_PROXY": "socks5h://u:s3cret@q"}, "socks5h://q:1080", "", "", true},
		"user and no scheme":  {"env", map[string]string{"ALL_PROXY": "u:s3cret@q:1"}, "http://q:1", "", "", true},
		"one that can't be":   {"env", map[string]string{"HTTPS_PROXY": "socks4://u:s3cret@q:1"}, "", "", ReasonPolicy, false},
		"an unknown scheme":   {"env", map[string]string{"HTTPS_PROXY": "ftp://u:s3cret@q:1"}, "", "", ReasonPolicy, false},
		"SOCKS and no scheme": {"env", map[string]string{"HTTPS_PROXY": "socks5:q:1"}, "", "", ReasonPolicy, false},
		"with a space":        {"env", map[string]string{"HTTPS_PROXY": " http://u:s3cret@q:1"}, "", "", ReasonPolicy, false},
		"one that is no URL":  {"env", map[string]string{"ALL_PROXY": "http://u:s3cret@q:1:2"}, "", "", ReasonPolicy, false},
		"the file's is wrong": {"https://u:s3cret@q:1/x", nil, "", "", ReasonSpecInvalid, false},
	} {
		t.Run(name, func(t *testing.T) {
			p, no, err := findProxy(c.value, func(name string) string { return c.env[name] })
			if ReasonOf(err) != c.reason || err != nil && strings.Contains(err.Error()+HintOf(err), "s3cret") {
				t.Fatalf("%v, hint %q", err, HintOf(err))
			}
			got := ""
			if p != nil {
				got = p.String()
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

// TestAnyRoots: without a certificate authority no proxy over TLS could be told from another.
func TestAnyRoots(t *testing.T) {
	if ReasonOf(anyRoots(x509.NewCertPool(), nil)) != ReasonPolicy || ReasonOf(anyRoots(nil, errors.New("x"))) != ReasonPolicy {
		t.Error("taken")
	}
	some := x509.NewCertPool()
	some.AddCert(&x509.Certificate{Raw: []byte("x"), RawSubject: []byte("x")})
	if err := anyRoots(some, nil); err != nil {
		t.Error(err)
	}
}

// TestRootsEnv: a keeper gets the names of the caller's certificates, and nothing else.
func TestRootsEnv(t *testing.T) {
	env := map[string]string{"SSL_CERT_FILE": "/a.pem", "SSL_CERT_DIR": "/b:/c", "GODEBUG": "x"}
	if got := rootsEnv(func(name string) string { return env[name] }); !slices.Equal(got, []string{"SSL_CERT_FILE=/a.pem", "SSL_CERT_DIR=/b:/c"}) {
		t.Errorf("%q", got)
	}
	if got := rootsEnv(func(string) string { return "" }); got == nil || len(got) > 0 {
		t.Errorf("%q", got) // nil would be the caller's whole environment
	}
}
