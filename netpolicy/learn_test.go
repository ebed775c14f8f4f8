package netpolicy

import (
	"bytes"
	"encoding/json"
	"fmt"
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
		Allow:        append(allow("10.0.0.0/8", "192.0.2.0/24:5432", "93.184.216.99"), harness.Allow{Host: "*.raw.example", Raw: true}),
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
		used("own.example", "93.184.216.99", 443, ok), // of the host's own, by its entry
		Event{Kind: EventRequest, Name: "old.example", Port: 80, Verdict: Verdict{Reason: RefusedRequest, Entry: OptionEntry("old.example", 80, "raw")}},
		Event{Kind: EventRequest, Name: "method.example", Port: 80, Verdict: Verdict{Reason: RefusedRequest}},
		used("other.example", "", 443, Verdict{Reason: RefusedServerName}), used("lost.example", "", 443, Verdict{Reason: RefusedDial}),
		used("", "93.184.216.34", 443, Verdict{Reason: RefusedUnlisted, Entry: "93.184.216.34/32:443"}),
		Event{Kind: EventName, Name: "never.example", Verdict: Verdict{Reason: RefusedDenied}},
	)
	want := []string{
		`"10.1.2.3/32:5432"`, `"192.0.2.9/32:5432"`, `"93.184.216.99/32:443"`, `"a.cdn.example"`, `"a.cdn.example:80"`, `"b.cdn.example"`, `"example.com"`,
		`{"host": "hidden.example", "port": 8443, "ech": true}`, `"inside.example:5432"`, `{"host": "old.example", "port": 80, "raw": true}`, `"one.example.com:22"`, `"own.example"`,
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

// TestLearnMany: a list that is shorter than what was used says so.
func TestLearnMany(t *testing.T) {
	for n, missed := range map[int]int{maxKeys + 1024: 0, maxKeys + 1025: 1, maxKeys + 3000: 1} {
		var events []Event
		for i := range n {
			events = append(events, used(fmt.Sprintf("n%d.example", i), "", 443, Verdict{Allowed: true}))
		}
		l := NewLearner(Policy{Mode: Open, Learning: true})
		logged(t, l.Used, events...)
		if l.Missed != missed || missed == 0 && len(l.Entries(false)) != n {
			t.Errorf("%d names: %d missed, %d entries", n, l.Missed, len(l.Entries(false)))
		}
	}
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
		used("api.example", "", 443, Verdict{Reason: RefusedDial}), used("api.example", "", 443, Verdict{Reason: RefusedResolve}),
		used("api.example", "", 443, Verdict{Reason: RefusedProxy}), used("api.example", "", 443, Verdict{Reason: RefusedLimit}),
	)
	want := []string{`"93.184.216.34/32:9"`, `"api.example:22"`, `{"host": "api.example", "ech": true}`, `"evil.example"`}
	// The two are the metadata address and the server name.
	if diff := cmp.Diff(want, texts(l.Entries(false))); diff != "" || l.Missed != 2 {
		t.Errorf("%d missed, %s", l.Missed, diff)
	}
}

// TestLearnRoundTrip: what is proposed for a refusal permits, beside what there was, what
// was refused, and nothing near it.
func TestLearnRoundTrip(t *testing.T) {
	private, private6 := netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("fc00::7")
	named := func(name string, port int) func(*Table) Verdict {
		return func(t *Table) Verdict { return t.Name(name, port) }
	}
	dialled := func(addr netip.Addr, port int) func(*Table) Verdict {
		return func(t *Table) Verdict { return t.Dial(addr, port, false) }
	}
	said := func(name string, port int, h hello) func(*Table) Verdict {
		return func(t *Table) Verdict {
			return h.judge(destination{name: name, port: port, verdict: t.Name(name, port)})
		}
	}
	asText := func(name string) func(*Table) Verdict { // on the HTTP port, what is no request
		return func(t *Table) Verdict {
			v := t.Name(name, 80)
			if !v.Raw {
				v.Allowed, v.Reason, v.Entry = false, RefusedRequest, OptionEntry(name, 80, "raw")
			}
			return v
		}
	}
	addressed := func(addr string, port int) func(*Table) Verdict {
		return func(t *Table) Verdict { return t.Addr(netip.MustParseAddr(addr), port) }
	}
	for name, c := range map[string]struct {
		event        Event
		judge, other func(*Table) Verdict
	}{
		"a name that was asked for":   {Event{Kind: EventName, Name: "new.example"}, named("new.example", 443), named("new.example", 80)},
		"a port":                      {used("api.example", "", 22, Verdict{}), named("api.example", 22), named("x.api.example", 22)},
		"a port below a wildcard":     {used("a.wild.example", "", 22, Verdict{}), named("a.wild.example", 22), named("b.wild.example", 22)},
		"an address":                  {used("", "93.184.216.34", 9, Verdict{}), addressed("93.184.216.34", 9), addressed("93.184.216.34", 10)},
		"a private address of a name": {used("api.example", "10.1.2.3", 443, Verdict{}), dialled(private, 443), dialled(private.Next(), 443)},
		"one of IPv6":                 {used("api.example", "fc00::7", 443, Verdict{}), dialled(private6, 443), dialled(private6, 80)},
		"no TLS":                      {used("api.example", "", 443, Verdict{}), said("api.example", 443, hello{}), said("a.wild.example", 443, hello{})},
		"no TLS below a wildcard":     {used("a.wild.example", "", 443, Verdict{}), said("a.wild.example", 443, hello{}), said("b.wild.example", 443, hello{})},
		"a hidden server name": {
			used("api.example", "", 443, Verdict{}), said("api.example", 443, hello{complete: true, serverName: "api.example", ech: true}),
			said("a.wild.example", 443, hello{complete: true, serverName: "a.wild.example", ech: true}),
		},
		"no HTTP": {Event{Kind: EventRequest, Name: "web.example", Port: 80}, asText("web.example"), named("web.example", 443)},
	} {
		t.Run(name, func(t *testing.T) {
			e := harness.Egress{Mode: AllowList, Allow: allow("api.example", "*.wild.example", "web.example:80")}
			before := table(t, e)
			c.event.Verdict = c.judge(before)
			if c.event.Verdict.Allowed || c.other(before).Allowed {
				t.Fatal("permitted before")
			}
			l := NewLearner(Policy{})
			logged(t, l.Wanted, c.event)
			entries := l.Entries(false)
			if len(entries) != 1 || l.Missed != 0 {
				t.Fatalf("%q, %d missed", texts(entries), l.Missed)
			}
			var a harness.Allow
			if err := json.Unmarshal(entries[0], &a); err != nil {
				t.Fatal(err)
			}
			e.Allow = append(e.Allow, a)
			// What passes unlooked at is not judged by its content.
			after := table(t, e)
			if v := c.judge(after); !v.Allowed && !after.Name(c.event.Name, c.event.Port).Raw {
				t.Errorf("with %s: %+v", entries[0], v)
			}
			if v := c.other(after); v.Allowed {
				t.Errorf("with %s: %+v", entries[0], v)
			}
		})
	}
}
