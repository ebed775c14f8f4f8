package netpolicy

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

func testResolver(refused *[]string) Resolver {
	return Resolver{
		Names:     NewNames(),
		Permitted: func(name string) bool { return name == "api.example.com" || strings.HasSuffix(name, ".wild.example") },
		Refused: func(name string) {
			if refused != nil {
				*refused = append(*refused, name)
			}
		},
	}
}

func ask(t *testing.T, r Resolver, q *dns.Msg) *dns.Msg {
	t.Helper()
	packet, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	out := r.Answer(packet)
	if out == nil {
		return nil
	}
	reply := new(dns.Msg)
	if err := reply.Unpack(out); err != nil {
		t.Fatal(err)
	}
	if reply.Id != q.Id || !reply.Response {
		t.Fatalf("%v is no reply to %v", reply, q)
	}
	return reply
}

func question(name string, kind uint16) *dns.Msg {
	return new(dns.Msg).SetQuestion(name, kind)
}

// TestResolver: A01–A08: what is answered, and that nothing else exists.
func TestResolver(t *testing.T) {
	for name, c := range map[string]struct {
		q       *dns.Msg
		rcode   int
		answers int
		refused string
	}{
		"permitted":            {question("api.example.com.", dns.TypeA), dns.RcodeSuccess, 1, ""},
		"permitted, 0x20":      {question("aPi.ExAmple.COM.", dns.TypeA), dns.RcodeSuccess, 1, ""},
		"below a wildcard":     {question("x.wild.example.", dns.TypeA), dns.RcodeSuccess, 1, ""},
		"AAAA":                 {question("api.example.com.", dns.TypeAAAA), dns.RcodeSuccess, 0, ""},
		"HTTPS":                {question("api.example.com.", dns.TypeHTTPS), dns.RcodeSuccess, 0, ""},
		"SVCB":                 {question("api.example.com.", dns.TypeSVCB), dns.RcodeSuccess, 0, ""},
		"TXT":                  {question("api.example.com.", dns.TypeTXT), dns.RcodeSuccess, 0, ""},
		"ANY":                  {question("api.example.com.", dns.TypeANY), dns.RcodeSuccess, 0, ""},
		"unlisted":             {question("secret.evil.com.", dns.TypeA), dns.RcodeNameError, 0, "secret.evil.com"},
		"unlisted TXT":         {question("secret.evil.com.", dns.TypeTXT), dns.RcodeNameError, 0, "secret.evil.com"},
		"one label":            {question("intranet.", dns.TypeA), dns.RcodeNameError, 0, "\x00"},
		"root":                 {question(".", dns.TypeNS), dns.RcodeNameError, 0, "\x00"},
		"reverse":              {question("1.0.18.198.in-addr.arpa.", dns.TypePTR), dns.RcodeNameError, 0, "1.0.18.198.in-addr.arpa"},
		"zero byte in a label": {question(`evil\000.api.example.com.`, dns.TypeA), dns.RcodeNameError, 0, "\x00"},
		"dot in a label":       {question(`api\.example.com.`, dns.TypeA), dns.RcodeNameError, 0, "\x00"},
	} {
		t.Run(name, func(t *testing.T) {
			var refused []string
			reply := ask(t, testResolver(&refused), c.q)
			if reply.Rcode != c.rcode || len(reply.Answer) != c.answers || len(reply.Ns)+len(reply.Extra) != 0 {
				t.Fatalf("%v", reply)
			}
			if reply.Question[0] != c.q.Question[0] {
				t.Errorf("question %v comes back as %v", c.q.Question, reply.Question)
			}
			if c.answers == 1 && reply.Answer[0].Header().Name != c.q.Question[0].Name {
				t.Errorf("%v", reply.Answer[0])
			}
			if want := strings.Trim(c.refused, "\x00"); (c.refused != "") != (len(refused) == 1) || len(refused) == 1 && refused[0] != want {
				t.Errorf("refused %q, want %q", refused, want)
			}
		})
	}
}

func TestResolverFormats(t *testing.T) {
	r := testResolver(nil)
	two := question("api.example.com.", dns.TypeA)
	two.Question = append(two.Question, two.Question[0])
	if reply := ask(t, r, two); reply.Rcode != dns.RcodeFormatError {
		t.Error(reply)
	}
	chaos := question("version.bind.", dns.TypeTXT)
	chaos.Question[0].Qclass = dns.ClassCHAOS
	if reply := ask(t, r, chaos); reply.Rcode != dns.RcodeRefused {
		t.Error(reply)
	}
	update := new(dns.Msg)
	update.SetUpdate("example.com.")
	if reply := ask(t, r, update); reply.Rcode != dns.RcodeNotImplemented {
		t.Error(reply)
	}
	response := question("api.example.com.", dns.TypeA)
	response.Response = true
	if reply := ask(t, r, response); reply != nil {
		t.Error(reply)
	}
	edns := question("api.example.com.", dns.TypeA)
	edns.SetEdns0(4096, true)
	if reply := ask(t, r, edns); reply.IsEdns0() == nil || reply.IsEdns0().UDPSize() != udpSize || len(reply.Answer) != 1 {
		t.Error(reply)
	}
	edns.IsEdns0().SetVersion(1)
	if reply := ask(t, r, edns); reply.Rcode != dns.RcodeBadVers || len(reply.Answer) != 0 {
		t.Error(reply)
	}
}

// TestOverfull: a packet whose records all point to one long name is not read. Without
// the bound it takes a millisecond, and two thousand a second are let in.
func TestOverfull(t *testing.T) {
	for kind, record := range map[string][]byte{
		"questions": {0xc0, 12, 0, 1, 0, 1},
		"answers":   {0xc0, 12, 0, 2, 0, 1, 0, 0, 0, 0, 0, 2, 0xc0, 12},
	} {
		for n, answered := range map[int]bool{4: true, 250: false} {
			packet := append(make([]byte, 12), bytes.Repeat([]byte{1, 'a'}, 126)...)
			packet = append(packet, 0, 0, 1, 0, 1)
			packet = append(packet, bytes.Repeat(record, n)...)
			packet[5] = 1
			if kind == "questions" {
				packet[5] += byte(n)
			} else {
				packet[7] = byte(n)
			}
			if out := testResolver(nil).Answer(packet); (out != nil) != answered {
				t.Errorf("%d %s: %x", n, kind, out)
			}
		}
	}
}

func TestNames(t *testing.T) {
	n := NewNames()
	seen := map[netip.Addr]bool{}
	for i := range MaxNames {
		name := fmt.Sprintf("n%d.example.com", i)
		a, ok := n.Addr(name)
		if !ok || !namePool.Contains(a) || seen[a] || a == SandboxAddr || a == ResolverAddr {
			t.Fatalf("%s: %v", name, a)
		}
		seen[a] = true
		if again, _ := n.Addr(name); again != a {
			t.Fatalf("%s: %v, then %v", name, a, again)
		}
		if back, ok := n.Name(a); !ok || back != name {
			t.Fatalf("%v stands for %q", a, back)
		}
	}
	if a, ok := n.Addr("one.too.many"); ok {
		t.Errorf("an address past the bound: %v", a)
	}
	if _, ok := n.Addr("n0.example.com"); !ok {
		t.Error("a known name has no address any more")
	}
	for _, a := range []string{"198.18.0.1", "198.18.0.255", "198.19.255.255", "127.0.0.1", "2001:db8::1"} {
		if name, ok := n.Name(netip.MustParseAddr(a)); ok {
			t.Errorf("%s stands for %q", a, name)
		}
	}
}

// TestPoolEmpty: the next name gets SERVFAIL, not somebody else's address.
func TestPoolEmpty(t *testing.T) {
	r := testResolver(nil)
	for i := range MaxNames {
		r.Names.Addr(fmt.Sprintf("n%d.wild.example", i))
	}
	if reply := ask(t, r, question("late.wild.example.", dns.TypeA)); reply.Rcode != dns.RcodeServerFailure {
		t.Error(reply)
	}
}

// FuzzAnswer: no packet harms the resolver, and only permitted names get an address.
func FuzzAnswer(f *testing.F) {
	for _, q := range []*dns.Msg{question("api.example.com.", dns.TypeA), question("evil.com.", dns.TypeHTTPS), question(".", dns.TypeNS)} {
		b, err := q.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, packet []byte) {
		out := testResolver(nil).Answer(packet)
		if out == nil {
			return
		}
		reply := new(dns.Msg)
		if err := reply.Unpack(out); err != nil {
			t.Fatal(err)
		}
		for _, rr := range reply.Answer {
			if name := strings.ToLower(strings.TrimSuffix(rr.Header().Name, ".")); name != "api.example.com" && !strings.HasSuffix(name, ".wild.example") {
				t.Errorf("an address for %q", name)
			}
		}
		if len(out) > udpSize {
			t.Errorf("%d bytes", len(out))
		}
	})
}
