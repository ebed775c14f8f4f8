package netpolicy

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/agentshim/agentshim/harness"
)

func table(t *testing.T, e harness.Egress) *Table {
	t.Helper()
	p, err := Compile(e, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p.Table()
}

// short writes a verdict for comparison.
func short(v Verdict) string {
	if v.Allowed {
		return fmt.Sprintf("allow %s%s%s", v.Rule, map[bool]string{true: " raw"}[v.Raw], map[bool]string{true: " ech"}[v.ECH])
	}
	return fmt.Sprintf("%s %s", v.Reason, v.Entry)
}

// TestTableName: A18, A19, N29: whole labels, and the port counts.
func TestTableName(t *testing.T) {
	tab := table(t, harness.Egress{
		Mode: AllowList,
		Allow: append(allow("api.example.com", "*.example.org:443", "*.deep.example.org:8443", "ssh.example.com:22"),
			harness.Allow{Host: "raw.example.org", Raw: true}, harness.Allow{Host: "*.ech.example", ECH: true}),
		Deny:         []string{"bad.example.org", "half.example.org:443", "*.worse.example.org"},
		HostServices: []harness.HostService{{Name: "mcp", Port: 3000}},
	})
	for _, c := range []struct {
		name string
		port int
		want string
	}{
		{"api.example.com", 443, "allow api.example.com:443"},
		{"api.example.com", 22, "unlisted api.example.com:22"},
		{"evilapi.example.com", 443, "unlisted evilapi.example.com"},
		{"api.example.com.evil.net", 443, "unlisted api.example.com.evil.net"},
		{"x.api.example.com", 443, "unlisted x.api.example.com"},
		{"example.org", 443, "unlisted example.org"},
		{"a.example.org", 443, "allow *.example.org:443"},
		{"a.b.example.org", 443, "allow *.example.org:443"},
		{"a.deep.example.org", 8443, "allow *.deep.example.org:8443"},
		{"a.deep.example.org", 443, "allow *.example.org:443"},
		{"raw.example.org", 443, "allow raw.example.org:443 raw"},
		{"x.ech.example", 443, "allow *.ech.example:443 ech"},
		{"bad.example.org", 443, "denied "},
		{"x.bad.example.org", 443, "allow *.example.org:443"},
		{"half.example.org", 443, "denied "},
		{"x.worse.example.org", 443, "denied "},
		{"mcp.host.internal", 3000, "allow mcp.host.internal:3000"},
		{"mcp.host.internal", 3001, "unlisted "},
		{"other.host.internal", 3000, "unlisted "},
	} {
		if got := short(tab.Name(c.name, c.port)); got != c.want {
			t.Errorf("%s:%d: %s, want %s", c.name, c.port, got, c.want)
		}
	}
	for name, want := range map[string]bool{
		"api.example.com": true, "ssh.example.com": true, "x.example.org": true, "bad.example.org": false,
		"half.example.org": true, "example.org": false, "mcp.host.internal": true, "other.host.internal": false, "host.internal": false,
	} {
		if got := tab.Knows(name); got != want {
			t.Errorf("Knows(%s) = %v", name, got)
		}
	}
}

func TestTableOpen(t *testing.T) {
	tab := table(t, harness.Egress{Mode: Open, Allow: allow("192.0.2.0/24:5432")})
	denying := table(t, harness.Egress{Mode: Open, Deny: []string{"*.example.net"}, Allow: []harness.Allow{{Host: "e.example", ECH: true}}})
	for _, c := range []struct {
		got  Verdict
		want string
	}{
		{tab.Name("any.example", 25), "allow open raw ech"},
		{tab.Name("x.host.internal", 25), "unlisted "},
		{tab.Addr(netip.MustParseAddr("192.0.2.7"), 5432), "allow 192.0.2.0/24:5432 raw ech"},
		{tab.Addr(netip.MustParseAddr("93.184.216.34"), 443), "unlisted 93.184.216.34/32:443"},
		{denying.Name("x.example.net", 443), "denied "},
		{denying.Name("any.example", 443), "allow open"},
		{denying.Name("e.example", 443), "allow e.example:443 ech"},
	} {
		if got := short(c.got); got != c.want {
			t.Errorf("%s, want %s", got, c.want)
		}
	}
	if !tab.Knows("any.example") || tab.Knows("x.host.internal") || denying.Knows("x.example.net") {
		t.Error("names")
	}
}

// TestTableDial: A09, A36, A37: where a name may lead to, and which rule opens it. A
// rule for everything opens nothing special, one for a block not what is exact in it.
func TestTableDial(t *testing.T) {
	tab := table(t, harness.Egress{Mode: AllowList, Allow: allow(
		"0.0.0.0/0", "[::/0]:443", "10.0.0.0/8:5432", "169.254.0.0/16", "127.0.0.0/8", "192.168.1.7:80", "93.184.216.40:443", "fd12::/16",
	), Deny: []string{"93.184.216.66", "10.9.0.0/16"}})
	one := table(t, harness.Egress{Mode: AllowList, Allow: allow("169.254.169.254:80", "127.0.0.1:9")})
	for _, c := range []struct {
		t     *Table
		addr  string
		port  int
		local bool
		want  string
	}{
		{tab, "93.184.216.34", 443, false, "allow "},
		{tab, "2606:2800::1", 443, false, "allow "},
		{tab, "93.184.216.66", 443, false, "denied "},
		{tab, "93.184.216.34", 443, true, "address "},
		{tab, "93.184.216.40", 443, true, "allow 93.184.216.40/32:443"},
		{tab, "10.1.2.3", 5432, false, "allow 10.0.0.0/8:5432"},
		{tab, "10.1.2.3", 443, false, "address 10.1.2.3/32:443"},
		{tab, "10.1.2.3", 5432, true, "address "},
		{tab, "10.9.2.3", 5432, false, "denied "},
		{tab, "172.16.0.1", 443, false, "address 172.16.0.1/32:443"},
		{tab, "192.168.1.7", 80, false, "allow 192.168.1.7/32:80"},
		{tab, "192.168.1.8", 80, false, "address 192.168.1.8/32:80"},
		{tab, "169.254.169.254", 80, false, "address "},
		{tab, "127.0.0.1", 80, true, "address "},
		{tab, "::ffff:127.0.0.1", 80, false, "address "},
		{tab, "::1", 443, false, "address "},
		{tab, "fd00:ec2::254", 80, false, "address "},
		{tab, "fd12:3::1", 80, false, "allow fd12::/16"},
		{tab, "64:ff9b::a01:203", 443, false, "address "},
		{tab, "2002:a01:203::1", 443, false, "address "},
		{tab, "fe80::1%lo", 443, false, "address "},
		{one, "169.254.169.254", 80, false, "allow 169.254.169.254/32:80"},
		{one, "127.0.0.1", 9, true, "allow 127.0.0.1/32:9"},
		{one, "127.0.0.1", 10, true, "address "},
	} {
		if got := short(c.t.Dial(netip.MustParseAddr(c.addr), c.port, c.local)); got != c.want {
			t.Errorf("%s:%d local %v: %s, want %s", c.addr, c.port, c.local, got, c.want)
		}
	}
}

// TestTableEntryOpens: the entry that a refusal names does open it.
func TestTableEntryOpens(t *testing.T) {
	empty := table(t, harness.Egress{Mode: AllowList, Allow: allow("other.example")})
	for _, port := range []int{443, 80, 22} {
		v := empty.Name("x.example", port)
		if !table(t, harness.Egress{Mode: AllowList, Allow: allow(v.Entry)}).Name("x.example", port).Allowed {
			t.Errorf("%q does not open it", v.Entry)
		}
		for _, a := range []string{"93.184.216.34", "192.0.2.1", "10.0.0.1"} {
			addr := netip.MustParseAddr(a)
			v := empty.Addr(addr, port)
			opened := table(t, harness.Egress{Mode: AllowList, Allow: allow(v.Entry)})
			if !opened.Addr(addr, port).Allowed || !opened.Dial(addr, port, false).Allowed {
				t.Errorf("%q does not open it", v.Entry)
			}
		}
	}
}

// BenchmarkTable: a decision costs the same whatever the number of rules.
func BenchmarkTable(b *testing.B) {
	for _, n := range []int{10, 1000, 100_000} {
		var e harness.Egress
		e.Mode = AllowList
		for i := range n {
			e.Allow = append(e.Allow, harness.Allow{Host: fmt.Sprintf("h%d.example.com", i)})
		}
		p, err := Compile(e, nil, nil)
		if err != nil {
			b.Fatal(err)
		}
		tab := p.Table()
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				if !tab.Name("h7.example.com", 443).Allowed || tab.Name("x.y.example.net", 443).Allowed {
					b.Fatal("verdict")
				}
			}
		})
	}
}
