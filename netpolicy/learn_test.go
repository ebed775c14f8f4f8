package netpolicy

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

// logged is the log of these events, read back.
func logged(t *testing.T, each func(LogLine), events ...Event) {
	t.Helper()
	path := t.TempDir() + "/egress.jsonl"
	l, err := CreateLog(path, "0123456789abcdef", time.Now)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events {
		if err := l.Write(e); err != nil {
			t.Fatal(err)
		}
	}
	head, err := l.Close()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ReadLog(bytes.NewReader(mustRead(t, path)), each, "0123456789abcdef", head.SHA256); err != nil {
		t.Fatal(err)
	}
}

func texts(list []json.RawMessage) []string {
	out := []string{}
	for _, e := range list {
		out = append(out, string(e))
	}
	return out
}

func used(name, addr string, port int, v Verdict) Event {
	e := Event{Kind: EventConnect, Conn: 1, Name: name, Port: port, Verdict: v}
	if addr != "" {
		e.Addr = netip.MustParseAddr(addr)
	}
	return e
}

// TestLearnUsed: the list permits what was used, and nothing else.
func TestLearnUsed(t *testing.T) {
	p, err := Compile(harness.Egress{
		Mode:         Open,
		Allow:        append(allow("10.0.0.0/8", "192.0.2.0/24:5432"), harness.Allow{Host: "*.raw.example", Raw: true}),
		HostServices: []harness.HostService{{Name: "mcp", Port: 3000}},
	}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	p.Learning = true
	table := p.Table()
	if v := table.Name("any.example", 443); !v.Allowed || v.Raw || v.ECH {
		t.Errorf("content is not judged: %+v", v)
	}
	l := NewLearner(p)
	ok := Verdict{Allowed: true, Rule: Open}
	logged(t, l.Used,
		used("b.cdn.example", "93.184.216.34", 443, ok), used("a.cdn.example", "93.184.216.34", 443, ok), used("a.cdn.example", "93.184.216.35", 443, ok),
		used("a.cdn.example", "93.184.216.34", 80, ok), used("example.com", "93.184.216.34", 443, ok), used("one.example.com", "93.184.216.34", 22, ok),
		used("inside.example", "10.1.2.3", 5432, ok), used("", "192.0.2.9", 5432, Verdict{Allowed: true, Rule: "192.0.2.0/24:5432"}),
		used("x.raw.example", "93.184.216.34", 443, Verdict{Allowed: true, Rule: "*.raw.example:443", Raw: true}),
		used("mcp.host.internal", "127.0.0.1", 3000, Verdict{Allowed: true, HostPort: 3000}),
		used("plain.example", "", 443, table.helloRefused("plain.example", hello{})),
		used("hidden.example", "", 8443, Verdict{Reason: RefusedECH, Entry: OptionEntry("hidden.example", 8443, "ech")}),
		used("other.example", "", 443, Verdict{Reason: RefusedServerName}), used("lost.example", "", 443, Verdict{Reason: RefusedDial}),
		used("", "93.184.216.34", 443, Verdict{Reason: RefusedUnlisted, Entry: "93.184.216.34/32:443"}),
		Event{Kind: EventName, Name: "never.example", Verdict: Verdict{Reason: RefusedDenied}},
	)
	want := []string{
		`"10.1.2.3/32:5432"`, `"192.0.2.9/32:5432"`, `"a.cdn.example"`, `"a.cdn.example:80"`, `"b.cdn.example"`, `"example.com"`,
		`{"host": "hidden.example", "port": 8443, "ech": true}`, `"inside.example:5432"`, `"one.example.com:22"`,
		`{"host": "plain.example", "raw": true}`, `{"host": "x.raw.example", "raw": true}`,
	}
	if diff := cmp.Diff(want, texts(l.Entries(false))); diff != "" || l.Missed != 0 {
		t.Errorf("%d missed, %s", l.Missed, diff)
	}
	again := Policy{Mode: AllowList}
	for _, e := range l.Entries(false) {
		var a harness.Allow
		if err := json.Unmarshal(e, &a); err != nil {
			t.Fatal(err)
		}
		r, err := ParseRule(a)
		if err != nil {
			t.Fatalf("%s: %v", e, err)
		}
		again.Allow = append(again.Allow, r)
	}
	for name, port := range map[string]int{"a.cdn.example": 80, "inside.example": 5432, "x.raw.example": 443} {
		if !again.Table().Name(name, port).Allowed {
			t.Errorf("%s:%d is not permitted by what was learned", name, port)
		}
	}
	if again.Table().Name("c.cdn.example", 443).Allowed || again.Table().Name("b.cdn.example", 80).Allowed || again.Table().Addr(netip.MustParseAddr("192.0.2.10"), 5432).Allowed {
		t.Error("what was not used is permitted")
	}
}

// helloRefused is what is said of a hello to a name.
func (t *Table) helloRefused(name string, h hello) Verdict {
	return h.judge(destination{name: name, port: 443, verdict: t.Name(name, 443)})
}

// TestLearnWildcards: names become a wildcard only when asked, when there are several, and
// where not everybody has names there.
func TestLearnWildcards(t *testing.T) {
	l := NewLearner(Policy{Mode: Open, Learning: true})
	for _, name := range []string{
		"a.cdn.example.com", "b.cdn.example.com", "c.d.cdn.example.com", "one.example.org", "a.example.net", "example.net",
		"a.github.io", "b.github.io", "x.com", "y.com",
	} {
		l.Used(LogLine{Event: EventConnect, Name: name, Addr: "93.184.216.34", Port: 443, Verdict: VerdictAllow})
	}
	want := []string{
		`"*.cdn.example.com"`, `"a.example.net"`, `"a.github.io"`, `"b.github.io"`, `"example.net"`, `"one.example.org"`, `"x.com"`, `"y.com"`,
	}
	if diff := cmp.Diff(want, texts(l.Entries(true))); diff != "" {
		t.Error(diff)
	}
}

// TestLearnWanted: what was refused is proposed, but for what a deny entry refused and what
// no entry permits.
func TestLearnWanted(t *testing.T) {
	table := table(t, harness.Egress{Mode: AllowList, Allow: allow("api.example:443"), Deny: []string{"never.example"}})
	l := NewLearner(Policy{})
	logged(t, l.Wanted,
		Event{Kind: EventName, Name: "evil.example", Verdict: table.Name("evil.example", 443)},
		used("api.example", "", 22, table.Name("api.example", 22)), used("api.example", "93.184.216.34", 443, table.Name("api.example", 443)),
		used("", "93.184.216.34", 9, table.Addr(netip.MustParseAddr("93.184.216.34"), 9)),
		used("", "169.254.169.254", 80, table.Addr(netip.MustParseAddr("169.254.169.254"), 80)),
		used("never.example", "", 443, table.Name("never.example", 443)),
		used("api.example", "", 443, Verdict{Reason: RefusedECH, Entry: OptionEntry("api.example", 443, "ech")}),
		used("api.example", "", 443, Verdict{Reason: RefusedServerName}),
	)
	want := []string{`"93.184.216.34/32:9"`, `"api.example:22"`, `{"host": "api.example", "ech": true}`, `"evil.example"`}
	// The two are the metadata address and the server name.
	if diff := cmp.Diff(want, texts(l.Entries(false))); diff != "" || l.Missed != 2 {
		t.Errorf("%d missed, %s", l.Missed, diff)
	}
}
