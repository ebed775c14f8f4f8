package netpolicy

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/harness"
)

// TestParseRule: A14–A19, what an entry means.
func TestParseRule(t *testing.T) {
	for entry, want := range map[string]string{
		"api.example.com":       "api.example.com:443",
		"api.example.com:22":    "api.example.com:22",
		"API.Example.COM.":      "api.example.com:443",
		"*.example.org:443":     "*.example.org:443",
		"*.a.b.example.org":     "*.a.b.example.org:443",
		"xn--bcher-kva.example": "xn--bcher-kva.example:443",
		"_dmarc.example.com":    "_dmarc.example.com:443",
		"1.2.3.example.com":     "1.2.3.example.com:443",
		"203.0.113.0/24":        "203.0.113.0/24",
		"203.0.113.0/24:5432":   "203.0.113.0/24:5432",
		"203.0.113.7/32:1":      "203.0.113.7/32:1",
		"2001:db8::/32":         "2001:db8::/32",
		"[2001:db8::/32]":       "2001:db8::/32",
		"[2001:db8::/32]:443":   "[2001:db8::/32]:443",
		"::/0":                  "::/0",
		"user.github.io":        "user.github.io:443",
		"*.user.github.io":      "*.user.github.io:443",
	} {
		t.Run(entry, func(t *testing.T) {
			r, err := ParseRule(harness.Allow{Host: entry})
			if err != nil || r.String() != want {
				t.Fatalf("%q, %v; want %q", r, err, want)
			}
			again, err := ParseRule(harness.Allow{Host: r.String()})
			if err != nil || again != r {
				t.Errorf("its own text gives %+v, %v", again, err)
			}
		})
	}
}

func TestParseRuleRefuses(t *testing.T) {
	for _, entry := range []string{
		"", ".", "*", "*.", "*.*", "**.example.com", "foo.*.com", "f*.example.com", "*.com", "*.co.uk", "*.github.io", "*.kobe.jp", "*.compute.amazonaws.com", "com", "localhost",
		"https://example.com", "example.com/path", "user@example.com", "example.com\\x", "exa mple.com", "example.com%00", "ex\x00ample.com",
		"example\u3002com", "b\u00fccher.example", "-a.example.com", "a-.example.com", "a..example.com", strings.Repeat("a", 64) + ".com",
		strings.Repeat("a.", 127) + "com", "example.com:", "example.com:0", "example.com:65536", "example.com:+1", "example.com:01", "example.com:443:1",
		"127.1", "0x7f.0.0.1", "2130706433", "0177.0.0.1", "example.1", "1.0x1",
		"203.0.113.1/24", "203.0.113.0/024", "203.0.113.0/33", "203.0.113/24", "010.0.0.0/8", "2001:DB8::/32", "2001:db8:0::/32", "::ffff:1.2.3.0/120",
		"::ffff:192.0.2.1", "127.0.0.01", "fe80::1%lo", "198.18.0.9", "198.18.1.0/24", "db.host.internal", "*.host.internal", "[2001:db8::/32", "[2001:db8::/32]443", "[203.0.113.0/24]:1", "[example.com]:443", "fe80::%eth0/64",
	} {
		t.Run(entry, func(t *testing.T) {
			if r, err := ParseRule(harness.Allow{Host: entry}); !errors.Is(err, ErrRule) {
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
	for _, a := range []harness.Allow{
		{Host: "example.com:1", Port: 2},
		{Host: "example.com", Port: 65536},
		{Host: "example.com", Port: -1},
		{Host: "203.0.113.0/24", Raw: true},
		{Host: "203.0.113.0/24", ECH: true},
	} {
		if r, err := ParseRule(a); !errors.Is(err, ErrRule) {
			t.Errorf("%+v: %+v, %v", a, r, err)
		}
	}
}

// TestMatchesName: A18, label boundaries; A19, the port is part of the rule.
func TestMatchesName(t *testing.T) {
	for _, c := range []struct {
		entry, name string
		port        int
		want        bool
	}{
		{"example.com", "example.com", 443, true},
		{"example.com", "example.com", 22, false},
		{"example.com", "www.example.com", 443, false},
		{"example.com", "evilexample.com", 443, false},
		{"example.com", "example.com.evil.net", 443, false},
		{"*.example.com", "www.example.com", 443, true},
		{"*.example.com", "a.b.example.com", 443, true},
		{"*.example.com", "example.com", 443, false},
		{"*.example.com", "evilexample.com", 443, false},
		{"*.example.com", ".example.com", 443, true}, // no canonical name: CanonicalName refuses it
		{"203.0.113.0/24", "example.com", 443, false},
	} {
		r, err := ParseRule(harness.Allow{Host: c.entry})
		if err != nil {
			t.Fatal(err)
		}
		if r.MatchesName(c.name, c.port) != c.want {
			t.Errorf("%s for %s:%d", c.entry, c.name, c.port)
		}
	}
	if _, err := CanonicalName(".example.com"); !errors.Is(err, ErrName) {
		t.Error(err)
	}
}

func TestMatchesAddr(t *testing.T) {
	for _, c := range []struct {
		entry, addr string
		port        int
		want        bool
	}{
		{"203.0.113.0/24", "203.0.113.9", 1, true},
		{"203.0.113.0/24", "::ffff:203.0.113.9", 1, true},
		{"203.0.113.0/24", "203.0.114.9", 1, false},
		{"203.0.113.0/24:5432", "203.0.113.9", 1, false},
		{"203.0.113.0/24:5432", "203.0.113.9", 5432, true},
		{"2001:db8::/32", "2001:db8::1", 80, true},
		{"example.com", "203.0.113.9", 443, false},
	} {
		r, err := ParseRule(harness.Allow{Host: c.entry})
		if err != nil {
			t.Fatal(err)
		}
		if r.MatchesAddr(netip.MustParseAddr(c.addr), c.port) != c.want {
			t.Errorf("%s for %s:%d", c.entry, c.addr, c.port)
		}
	}
}

// FuzzParseRule: what is accepted has one form, and that form means the same.
func FuzzParseRule(f *testing.F) {
	for _, s := range []string{"example.com", "*.example.org:443", "203.0.113.0/24:5432", "[2001:db8::/32]:443", "EXAMPLE.com.", "::/0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, entry string) {
		r, err := ParseRule(harness.Allow{Host: entry})
		if err != nil {
			return
		}
		again, err := ParseRule(harness.Allow{Host: r.String()})
		if err != nil || again != r {
			t.Errorf("%q gives %q, which gives %+v, %v", entry, r, again, err)
		}
		if r.Name != "" {
			if name, err := CanonicalName(r.Name); err != nil || name != r.Name {
				t.Errorf("%q holds the name %q: %v", entry, r.Name, err)
			}
		}
	})
}
