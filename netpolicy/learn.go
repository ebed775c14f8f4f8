package netpolicy

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/agentshim/agentshim/harness"
)

// Learner collects from the lines of a log what an allow list would have to hold. It
// takes names and addresses as the log has them: only VerifyLog knows whether that is
// what the gateway wrote. The list holds what the sandbox chose to ask for, not what it
// should have: somebody has to read it.
type Learner struct {
	table *Table
	rules []Rule
	// Missed counts lines, not decisions, that no entry stands for: those that say that some
	// decisions are only counted, and what can't be allowed. Above 0 the list is not all.
	Missed int
}

// NewLearner is for the log of a run of that policy. Wanted does not look at the policy.
func NewLearner(p Policy) *Learner { return &Learner{table: p.Table()} }

// Used takes what the line permitted: the name or address with its port, and the entry
// for the address that a name led to where only that opened it: it is not globally reachable,
// or one that the file names alone, which may be the host's own.
// Of what was refused it takes a name that open permits, but whose content was not TLS or
// HTTP, or an encrypted hello. Host services are no allow entries: they are left out.
func (l *Learner) Used(line LogLine) {
	switch {
	case line.Event.someUnsaid() && line.Verdict == VerdictAllow:
		l.Missed++
	case line.Event == EventConnect && line.Verdict == VerdictAllow:
		l.permitted(line)
	case line.Reason == RefusedHello || line.Reason == RefusedECH || line.Reason == RefusedRequest && line.Entry != "":
		l.entry(line.Entry)
	}
}

// someUnsaid says that targets behind the line may have none.
func (k EventKind) someUnsaid() bool { return k == logMany || k == logFull }

func (l *Learner) permitted(line LogLine) {
	addr, _ := netip.ParseAddr(line.Addr)
	addr = addr.Unmap()
	if line.Name == "" {
		l.entry(addrEntry(addr, line.Port))
		return
	}
	v := l.table.Name(line.Name, line.Port)
	if v.HostPort != 0 {
		return
	}
	l.add(harness.Allow{Host: line.Name, Port: line.Port, Raw: v.Raw, ECH: v.ECH})
	if addr.IsValid() && l.opened(addr, line.Port) {
		l.entry(addrEntry(addr, line.Port))
	}
}

// opened reports whether a name leads to the address only by an entry for the address.
func (l *Learner) opened(addr netip.Addr, port int) bool {
	_, special := notGlobal(addr)
	return special || slices.ContainsFunc(l.table.allow.holding(addr), func(r Rule) bool {
		return r.Prefix.IsSingleIP() && (r.Port == 0 || r.Port == port)
	})
}

// Wanted takes what the line refused, as the entry that would have permitted it. What a
// deny entry refused stays so; what failed for another reason than the policy, no entry mends.
func (l *Learner) Wanted(line LogLine) {
	switch {
	case line.Event.someUnsaid() && line.Verdict == VerdictRefuse:
		l.Missed++
	case line.Verdict == VerdictRefuse && line.Reason != RefusedDenied && line.Reason != RefusedLimit && !line.Reason.failed():
		l.entry(line.Entry)
	}
}

// entry takes an allow entry in the form of a Verdict's.
func (l *Learner) entry(text string) {
	a := harness.Allow{Host: text}
	if strings.HasPrefix(text, "{") {
		if err := json.Unmarshal([]byte(text), &a); err != nil {
			l.Missed++
			return
		}
	}
	l.add(a)
}

func (l *Learner) add(a harness.Allow) {
	r, err := ParseRule(a)
	if err != nil {
		l.Missed++ // no entry would permit it
		return
	}
	l.rules = append(l.rules, r)
}

// Entries are the allow entries, as JSON, sorted and each once. With wildcards, names with one
// parent and one port become one entry, where there are two and not everybody
// can have a name below that parent.
func (l *Learner) Entries(wildcards bool) []json.RawMessage {
	list := sorted(slices.Clone(l.rules))
	if wildcards {
		list = withoutCovered(sorted(widened(list)))
	}
	out := make([]json.RawMessage, len(list))
	for i, r := range list {
		out[i] = r.entry()
	}
	return out
}

// widened puts *.PARENT in the place of names right below it that want the same.
func widened(list []Rule) []Rule {
	parent := func(r Rule) (Rule, bool) {
		_, above, _ := strings.Cut(r.Name, ".")
		w, err := ParseRule(harness.Allow{Host: "*." + above, Port: r.Port, Raw: r.Raw, ECH: r.ECH})
		return w, err == nil && !r.Wildcard
	}
	children := map[Rule]int{}
	for _, r := range list {
		if w, ok := parent(r); ok {
			children[w]++
		}
	}
	out := slices.Clone(list)
	for i, r := range out {
		if w, ok := parent(r); ok && children[w] > 1 {
			out[i] = w
		}
	}
	return out
}

// withoutCovered leaves out names that a wildcard beside them permits as they do.
func withoutCovered(list []Rule) []Rule {
	return slices.DeleteFunc(slices.Clone(list), func(r Rule) bool {
		return slices.ContainsFunc(list, func(w Rule) bool {
			return w.Wildcard && w.MatchesName(r.Name, r.Port) && w.Raw == r.Raw && w.ECH == r.ECH
		})
	})
}

// entry is the rule as a file's list has it.
func (r Rule) entry() json.RawMessage {
	short := r
	if r.Name != "" && r.Port == DefaultPort {
		short.Port = 0
	}
	if !r.Raw && !r.ECH {
		text, _ := json.Marshal(short.String()) // a string marshals
		return text
	}
	host := r
	host.Port = 0
	options := ""
	if short.Port != 0 {
		options += fmt.Sprintf(`, "port": %d`, r.Port)
	}
	if r.Raw {
		options += `, "raw": true`
	}
	if r.ECH {
		options += `, "ech": true`
	}
	return json.RawMessage(fmt.Sprintf(`{"host": %q%s}`, host.String(), options))
}
