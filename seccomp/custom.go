package seccomp

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentshim/agentshim/harness"
)

const (
	profilePath = "$.seccomp.profile"
	fileAllows  = "seccomp.profile allows it"
	fileRefuses = "seccomp.profile refuses it"
	fileOmits   = "seccomp.profile leaves it out"
)

// profileNested is the one other profile that has a name.
const profileNested = "nested"

// IsFile says that a profile of the harness file is a file and none of the names.
func IsFile(profile string) bool {
	return profile != "" && profile != "default" && profile != profileNested
}

// profile puts the file's profile in place of the default.
func (p *Policy) profile(s harness.Seccomp) []error {
	if s.Profile == profileNested {
		p.openings = append(p.openings, Opening{"nested-seccomp", true, nestedDetail})
		p.judged.put(nested)
	}
	if !IsFile(s.Profile) {
		return nil
	}
	var errs []error
	for _, fault := range p.custom(s.Profile) {
		errs = append(errs, &Problem{profilePath, quote(s.Profile) + ": " + fault.text, "correct the file", fault.kind})
	}
	return errs
}

// fault is one error of a profile file: text is printable and short, kind a sentinel.
type fault struct {
	text string
	kind error
}

// custom replaces the default policy by the target's file, resolved for a process without
// capabilities. What agentshim's own rules refuse under conditions stays refused;
// a call that they refuse whole is opened as by allow, unless the rule is fixed.
func (p *Policy) custom(file string) []fault {
	f, texts := parseFile(p.target.File)
	if f == nil {
		found := make([]fault, len(texts))
		for i, text := range texts {
			found[i] = fault{text, ErrFile}
		}
		return found
	}
	arches := fileArches(f, p.arches)
	if len(arches) == 0 {
		return []fault{{"not for " + p.target.Arch, ErrFile}}
	}
	calls := callsOf(f.Syscalls, p.target.Arch)
	errno := uint(ePERM)
	if f.DefaultErrnoRet != nil {
		errno = *f.DefaultErrnoRet
	}
	found := p.unknownCalls(calls)
	ours := maps.Clone(p.judged)
	var kept []string
	for _, name := range slices.Sorted(maps.Keys(ours)) {
		theirs, err := plain(calls[name])
		if err != nil {
			found = append(found, fault{"the rules for " + name + " contradict each other", ErrFile})
			continue
		}
		j, narrowed, ok := combine(ours[name], theirs, errno)
		if !ok {
			found = append(found, fault{"the conditions for " + name + " can't be combined with agentshim's own", ErrFile})
		}
		if narrowed {
			kept = append(kept, name)
		}
		if !ours[name].some(oci.ActAllow) && j.some(oci.ActAllow) {
			p.open(name, ours[name])
		}
		p.judged[name] = j
	}
	if len(found) > 0 {
		return found
	}
	p.arches = arches
	p.openings = append(p.openings, Opening{"custom-seccomp", true, fmt.Sprintf("the system call policy is made from %s", quote(file))})
	if len(kept) > 0 {
		p.remark("seccomp.profile allows more of some calls than agentshim does; agentshim's conditions stay: %s", strings.Join(kept, " "))
	}
	if name, ok := p.branching(); !ok {
		return []fault{{fmt.Sprintf("the rules for %s are on too many combinations of arguments to be compiled", name), ErrTooLong}}
	}
	return p.missing(ours)
}

// branching names the call whose rules are too much to compile, all calls taken together, and is not ok
// then. For rules on several arguments of one call libseccomp writes one tree: what is
// left of every other rule below each comparison, and so for n rules on d arguments up to n to the d
// branches, in a time of the square of that.
func (p *Policy) branching() (name string, ok bool) {
	sum := 0
	for _, name := range slices.Sorted(maps.Keys(p.judged)) {
		clauses, branches, arguments := p.judged[name].clauses, 1, 0
		for _, c := range clauses {
			arguments = max(arguments, len(c.args))
		}
		if arguments < 2 {
			continue
		}
		for range arguments {
			branches = min(branches*len(clauses), maxBranches+1)
		}
		if sum += branches; sum > maxBranches {
			return name, false
		}
	}
	return "", true
}

// unknownCalls refuses names that no architecture's profile knows. Those of other
// architectures are dropped: Docker's own profile has many.
func (p *Policy) unknownCalls(calls map[string][]clause) []fault {
	var found []fault
	for _, name := range slices.Sorted(maps.Keys(calls)) {
		if _, ok := p.judged[name]; ok || foreignCalls()[name] {
			continue
		}
		if len(found) == maxFaults {
			return append(found, fault{"more names that no system call has", ErrName})
		}
		u := unknown(profilePath, name, p.judged, p.target.Arch)
		found = append(found, fault{u.Msg + ", " + u.Remedy, ErrName})
	}
	return found
}

// plain drops repeated clauses, and conditional ones beside one without conditions of the
// same verdict. ErrContradiction means that two verdicts are given for one call.
func plain(clauses []clause) ([]clause, error) {
	var out []clause
	for _, c := range clauses {
		if !slices.ContainsFunc(out, func(have clause) bool { return compareClauses(have, c) == 0 }) {
			out = append(out, c)
		}
	}
	if i := slices.IndexFunc(out, func(c clause) bool { return len(c.args) == 0 }); i >= 0 {
		whole := out[i]
		out = slices.DeleteFunc(out, func(c clause) bool { return len(c.args) > 0 && c.action == whole.action && c.errno == whole.errno })
	}
	return out, consistent(out)
}

// combine is what a file makes of a call: never more than ours, but for a call that ours
// refuses whole and that is not fixed. errno is for what the file leaves out. narrowed
// says that the file allows more than what comes out; not ok, that the two can't be combined.
func combine(ours judgement, theirs []clause, errno uint) (out judgement, narrowed, ok bool) {
	theirAllows := allows(theirs)
	switch {
	case ours.whole(oci.ActAllow):
		return judgement{clauses: ownOr(theirs, errno), reason: reasonOf(theirs), open: harmless}, false, true
	case !ours.some(oci.ActAllow):
		if len(theirAllows) == 0 || ours.open == fixed {
			return ours, len(theirAllows) > 0, true
		}
		return judgement{clauses: theirs, reason: fileAllows, open: ours.open}, false, true
	case len(theirAllows) == 0:
		return judgement{clauses: ownOr(theirs, errno), reason: reasonOf(theirs), open: ours.open}, false, true
	}
	met, ok := meet(allows(ours.clauses), theirAllows)
	out = judgement{clauses: met, reason: ours.reason, open: ours.open, gives: ours.gives}
	for _, c := range ours.clauses {
		if c.action != oci.ActAllow {
			out.clauses = append(out.clauses, c)
		}
	}
	if len(met) == 0 {
		out.clauses = []clause{refuse(errno)}
	}
	return out, !covered(theirAllows, met), ok
}

// ownOr is the file's rules for a call, or a refusal where it allows nothing of it.
func ownOr(theirs []clause, errno uint) []clause {
	switch {
	case len(allows(theirs)) > 0, len(theirs) == 1 && len(theirs[0].args) == 0:
		return theirs
	}
	return []clause{refuse(errno)}
}

func reasonOf(theirs []clause) string {
	switch {
	case len(theirs) == 0:
		return fileOmits
	case len(allows(theirs)) == 0:
		return fileRefuses
	}
	return fileAllows
}

func allows(clauses []clause) []clause {
	return filter(clauses, func(c clause) bool { return c.action == oci.ActAllow })
}

// missing names the needed calls of which the file allows less than the default policy.
func (p *Policy) missing(ours judgements) []fault {
	var names []string
	for _, name := range neededCalls {
		if !covered(allows(ours[name].clauses), allows(p.judged[name].clauses)) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return []fault{{strings.Join(names, " ") + " must be allowed: init, the container's runtime or every program ends without them", ErrNeeded}}
}

// covered says that each of some lies in one of all; false may also mean that it can't tell.
func covered(some, all []clause) bool {
	for _, s := range some {
		if !slices.ContainsFunc(all, func(a clause) bool { return within(s, a) }) {
			return false
		}
	}
	return true
}

// within says that whatever satisfies a satisfies b; false may also mean that it can't tell.
func within(a, b clause) bool {
	for _, y := range b.args {
		if !slices.ContainsFunc(a.args, func(x oci.LinuxSeccompArg) bool { return x.Index == y.Index && inside(x, y) }) {
			return false
		}
	}
	return true
}

// inside says that every value that satisfies x satisfies y; false may also mean that it can't tell.
func inside(x, y oci.LinuxSeccompArg) bool {
	switch {
	case compareArgs(x, y) == 0:
		return true
	case x.Op == oci.OpEqualTo:
		return holds(y, x.Value)
	case x.Op == oci.OpNotEqual:
		return false
	case y.Op == oci.OpNotEqual:
		return !holds(x, y.Value)
	case y.Op == oci.OpMaskedEqual:
		return x.Op == oci.OpMaskedEqual && x.Value&y.Value == y.Value && x.ValueTwo&y.Value == y.ValueTwo
	case y.Op == oci.OpEqualTo, y.Op == oci.OpLessThan && y.Value == 0, y.Op == oci.OpGreaterThan && y.Value == ^uint64(0):
		return false
	}
	xlo, xhi := bounds(x)
	ylo, yhi := bounds(y)
	return ylo <= xlo && xhi <= yhi
}

// maxMet bounds the rules of one call that come of agentshim's and a file's.
const maxMet = 256

// meet returns clauses that allow what both lists allow. It is not ok where one comparison
// per argument, all that runtimes agree on, can't say it, or not in few clauses.
func meet(ours, theirs []clause) (out []clause, ok bool) {
	covers := func(list []clause) func(clause) bool {
		return func(c clause) bool { return covered([]clause{c}, list) }
	}
	whole := slices.Concat(filter(ours, covers(theirs)), filter(theirs, covers(ours)))
	for _, a := range filter(ours, not(covers(theirs))) {
		for _, b := range filter(theirs, not(covers(ours))) {
			if disjoint(a, b) {
				continue
			}
			c, ok := both(a, b)
			if !ok {
				return nil, false
			}
			whole = append(whole, c)
		}
	}
	for _, c := range whole {
		if !covered([]clause{c}, out) {
			out = append(out, c)
		}
	}
	return out, len(out) <= maxMet
}

func filter(list []clause, keep func(clause) bool) []clause {
	return slices.DeleteFunc(slices.Clone(list), not(keep))
}

func not(f func(clause) bool) func(clause) bool { return func(c clause) bool { return !f(c) } }

// both is the clause that holds where a and b hold, which are not disjoint.
func both(a, b clause) (clause, bool) {
	args := slices.Clone(a.args)
	for _, y := range b.args {
		i := slices.IndexFunc(args, func(x oci.LinuxSeccompArg) bool { return x.Index == y.Index })
		switch {
		case i < 0:
			args = append(args, y)
		case inside(args[i], y):
		case inside(y, args[i]):
			args[i] = y
		case satisfiable(args[i]) && satisfiable(y): // and not apart: they agree on the common bits
			args[i].Value |= y.Value
			args[i].ValueTwo |= y.ValueTwo
		default:
			return clause{}, false
		}
	}
	slices.SortFunc(args, compareArgs)
	return allow(args...), true
}

// satisfiable says that a compares bits under a mask, and that some value satisfies it.
func satisfiable(a oci.LinuxSeccompArg) bool {
	return a.Op == oci.OpMaskedEqual && a.ValueTwo&^a.Value == 0
}
