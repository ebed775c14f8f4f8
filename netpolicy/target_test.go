package netpolicy

import (
	"net/netip"
	"testing"

	"github.com/agentshim/agentshim/harness"
)

func TestTarget(t *testing.T) {
	tab := table(t, harness.Egress{Mode: AllowList, Allow: allow("api.example.com", "0.0.0.0/0", "10.0.0.0/8:5432", "[::/0]:443")})
	for text, want := range map[string]string{
		"api.example.com":      "allow api.example.com:443",
		"API.example.com.:443": "allow api.example.com:443",
		"api.example.com:80":   "unlisted api.example.com:80",
		"93.184.216.34":        "allow 0.0.0.0/0 raw ech",
		"93.184.216.34:53":     "unlisted ",
		"api.example.com:53":   "unlisted ",
		"10.1.1.1:53":          "unlisted ",
		"10.1.1.1:5432":        "allow 10.0.0.0/8:5432 raw ech",
		"10.1.1.1":             "address 10.1.1.1/32:443",
		"[2606:2800::1]:443":   "unlisted ",
		"127.0.0.1:22":         "address ",
		"[::1]:22":             "address ",
		"0.0.0.0:22":           "address ",
		"198.18.0.1:22":        "address ",
		"2606:2800::1":         "unlisted ",
	} {
		x, err := ParseTarget(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got := short(tab.Target(x, false)); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
		if again, err := ParseTarget(x.String()); err != nil || again != x {
			t.Errorf("%s: its own text gives %v %v", text, again, err)
		}
	}
	for _, text := range []string{"", "x", "127.1", "a.example:0", "https://a.example", "a.example/x", "fe80::1%lo", "[::1"} {
		if x, err := ParseTarget(text); err == nil {
			t.Errorf("%q gives %v", text, x)
		}
	}
	if v := tab.Target(Target{Addr: netip.MustParseAddr("93.184.216.34"), Port: 443}, true); v.Allowed {
		t.Error("a local address")
	}
}

// FuzzRule: whatever is taken has one canonical text.
func FuzzRule(f *testing.F) {
	for _, s := range []string{"api.example.com:443", "*.example.org", "203.0.113.0/24:5432", "[2001:db8::/32]:443", "10.0.0.1", "::1", "[", "a..b:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseRule(harness.Allow{Host: s})
		if err != nil {
			return
		}
		if again, err := ParseRule(harness.Allow{Host: r.String()}); err != nil || again != r {
			t.Fatalf("%q: %q gives %+v, %v", s, r, again, err)
		}
	})
}
