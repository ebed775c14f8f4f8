package netpolicy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// maxSummary bounds the targets that a summary tells apart.
const maxSummary = 1024

// Summary counts what was refused, by target and reason. The zero Summary is empty
// and ready. It is safe for concurrent use, and bounded: refusals of targets behind
// the 1024th are counted together.
type Summary struct {
	mu      sync.Mutex
	targets map[eventKey]*refusedTarget
	// rest counts the refusals of targets that have no entry.
	rest uint64
}

type refusedTarget struct {
	first Event
	order int
	count uint64
}

// Add counts the event if it is a refusal.
func (s *Summary) Add(e Event) {
	if e.permitted() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	k := keyOf(e)
	t := s.targets[k]
	switch {
	case t != nil:
		t.count++
	case len(s.targets) == maxSummary:
		s.rest++
	default:
		if s.targets == nil {
			s.targets = map[eventKey]*refusedTarget{}
		}
		e.Detail = bounded(e.Detail, maxDetail)
		s.targets[k] = &refusedTarget{first: e, order: len(s.targets), count: 1}
	}
}

// Lines says in at most n lines what was refused, how often, why, and which entry of
// the file's egress.allow would permit it: the most frequent first, then the one seen
// first. What does not fit is the last line's number. All is printable ASCII.
func (s *Summary) Lines(n int) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*refusedTarget, 0, len(s.targets))
	for _, t := range s.targets {
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b *refusedTarget) int {
		return cmp.Or(cmp.Compare(b.count, a.count), cmp.Compare(a.order, b.order))
	})
	shown := len(all)
	if shown > n || s.rest > 0 && shown == n {
		shown = max(n-1, 0)
	}
	var lines []string
	for _, t := range all[:shown] {
		lines = append(lines, t.text())
	}
	if more := s.more(all[shown:]); more != "" && n > 0 {
		lines = append(lines, more)
	}
	return lines
}

func (t *refusedTarget) text() string {
	line := lineOf(t.first)
	return escape(fmt.Sprintf("refused %s: %s: %s", times(t.count), line.target(), line.refusal()))
}

// more says what is left out, or nothing.
func (s *Summary) more(hidden []*refusedTarget) string {
	count := s.rest
	for _, t := range hidden {
		count += t.count
	}
	switch {
	case count == 0:
		return ""
	case s.rest > 0:
		return fmt.Sprintf("and more than %d more targets, refused %s", len(hidden), times(count))
	}
	return fmt.Sprintf("and %d more, refused %s", len(hidden), times(count))
}

func times(n uint64) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

// Text is the line for people, without its time: printable ASCII, whatever the
// line holds.
func (line LogLine) Text() string {
	text := line.text()
	if line.Count > 0 {
		text += fmt.Sprintf(" (number %d of its kind; not all have a line)", line.Count)
	}
	return escape(text)
}

func (line LogLine) text() string {
	switch {
	case line.Event == logStart:
		return "log of run " + line.Run
	case line.Event == logMany && line.Verdict == VerdictAllow:
		return "more targets than the log tells apart: of those allowed from here on, some are only counted"
	case line.Event == logMany:
		return "more targets than the log tells apart: of those refused from here on, some are only counted"
	case line.Event == logFull && line.Verdict == VerdictAllow:
		return "the log is full: what is allowed is only counted from here on"
	case line.Event == logFull:
		return "the log is full: what is refused is only counted from here on"
	case line.Event == logStop && line.Totals != nil:
		return "end: " + line.Totals.Text()
	case line.Event == EventEnd:
		return fmt.Sprintf("ended    %s: %d bytes sent, %d received, %d ms", line.target(), line.Sent, line.Received, line.Micros/1000)
	case line.Verdict == VerdictAllow:
		return "allowed  " + line.target() + line.permission()
	}
	return "refused  " + line.target() + ": " + line.refusal()
}

// Text says the totals in one line.
func (t Totals) Text() string {
	text := fmt.Sprintf("%d allowed, %d refused, %d bytes sent, %d received", t.Allowed, t.Refused, t.Sent, t.Received)
	if t.Counted > 0 {
		text += fmt.Sprintf("; %d have no line", t.Counted)
	}
	return text
}

// target is what the sandbox wanted to reach, as people write it.
func (line LogLine) target() string {
	at := line.Name
	if at == "" {
		at = line.Addr
	}
	switch {
	case line.Event == EventName && at == "":
		return "a name"
	case line.Event == EventName:
		return "name " + at
	case at == "":
		at = "connection " + strconv.FormatUint(line.Conn, 10)
	case line.Port != 0 && strings.Contains(at, ":"):
		at = "[" + at + "]:" + strconv.Itoa(line.Port)
	case line.Port != 0:
		at += ":" + strconv.Itoa(line.Port)
	}
	if line.Event == EventRequest {
		at = "request to " + at
	}
	return at
}

// permission says what let it through, and where the name led.
func (line LogLine) permission() string {
	var out string
	if _, err := netip.ParseAddr(line.Addr); err == nil && line.Name != "" {
		out += " (" + line.Addr + ")"
	}
	if line.Rule != "" {
		out += ", by " + line.Rule
	}
	if line.Detail != "" && line.Detail != line.Name {
		out += ", " + line.Detail
	}
	return out
}

// refusal says why, and what would permit it.
func (line LogLine) refusal() string {
	text := string(line.Reason)
	switch {
	case line.Why != "":
		text += ": " + line.Why
	case line.Rule != "":
		text += ", by " + line.Rule
	}
	if line.Detail != "" {
		text += fmt.Sprintf(" (it sent %q)", line.Detail)
	}
	if line.Entry != "" {
		text += "; to allow it, add " + QuoteEntry(line.Entry) + " to egress.allow"
	}
	return text
}
