package netpolicy

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestSummary: A92: what was refused, how often, why, and the entry that permits it.
func TestSummary(t *testing.T) {
	var s Summary
	for _, e := range sampleEvents() {
		s.Add(e)
	}
	s.Add(sampleEvents()[5])
	want := []string{
		`refused 2 times: web.example.com:443: ech; to allow it, add {"host":"web.example.com","ech":true} to egress.allow`,
		`refused once: name evil.example.org: unlisted; to allow it, add "evil.example.org:443" to egress.allow`,
		`refused once: api.example.com:22: unlisted: allowed on port 443 only; to allow it, add "api.example.com:22" to egress.allow`,
		`refused once: 169.254.169.254:80: unlisted: an address without a name needs an entry of its own; to allow it, add "169.254.169.254/32:80" to egress.allow`,
		`refused once: web.example.com:443: server-name (it sent "other.example.net")`,
		`refused once: request to plain.example.com:80: host (it sent "h\x1b[31m\u202e\u2028\ufffd\x7f\u009b<&>\ud83d\ude00")`,
		`refused once: a name: malformed-name (it sent "..")`,
		`refused once: telemetry.example.com:443: denied: egress.deny holds telemetry.example.com:443`,
	}
	if diff := cmp.Diff(want, s.Lines(20)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(append(want[:2:2], "and 6 more, refused 6 times"), s.Lines(3)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(want, s.Lines(8)); diff != "" {
		t.Error(diff)
	}
	if got := s.Lines(0); got != nil {
		t.Error(got)
	}
}

func TestSummaryEmpty(t *testing.T) {
	var s Summary
	s.Add(sampleEvents()[0])
	s.Add(Event{Kind: EventEnd})
	if got := s.Lines(20); len(got) != 0 {
		t.Error(got)
	}
}

// TestSummaryBounded: A56: refused targets without end take neither memory nor lines.
func TestSummaryBounded(t *testing.T) {
	var s Summary
	for i := range 5000 {
		s.Add(Event{Kind: EventName, Name: fmt.Sprintf("n%d.example.com", i), Verdict: Verdict{Reason: RefusedUnlisted}})
	}
	if len(s.targets) != maxSummary {
		t.Errorf("%d targets", len(s.targets))
	}
	got := s.Lines(20)
	if len(got) != 20 || got[19] != "and more than 1005 more targets, refused 4981 times" || !strings.Contains(got[0], "n0.example.com") {
		t.Errorf("%q", got)
	}
}
