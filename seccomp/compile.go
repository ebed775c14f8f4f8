package seccomp

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	moby "github.com/moby/profiles/seccomp"
	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentshim/agentshim/harness"
)

// Compile returns the policy for s on t. It is pure: it reads neither the host's
// kernel nor its architecture, so the same input gives the same bytes
// everywhere, whatever the order of s's lists. What s opens is in the policy's
// Openings; whether it is accepted is the caller's to check. Every problem of the
// input is reported at once, as a *Problem each, but ErrArch alone. ErrContradiction
// means a defect in the tables. Compile does not tell whether a libseccomp accepts the result; Verify does.
func Compile(s harness.Seccomp, t Target) (*Policy, error) {
	return compile(moby.DefaultProfile(), differences, s, t)
}

func compile(base *moby.Seccomp, table []difference, s harness.Seccomp, t Target) (*Policy, error) {
	judged, arches, err := judge(base, table, t.Arch)
	if err != nil {
		return nil, err
	}
	p := &Policy{target: t, arches: arches, defaultErrno: eNOSYS, judged: judged}
	if t.Docker {
		p.defaultErrno = ePERM
	}
	if err := errors.Join(append(p.profile(s), p.lists(s)...)...); err != nil {
		return nil, err
	}
	p.rules = group(p.effective(p.judged.rules()))
	if err := check(p.rules, p.defaultErrno); err != nil {
		if IsFile(s.Profile) { // the tables alone are tested whole
			return nil, &Problem{profilePath, quote(s.Profile) + ": the rules contradict each other", "correct the file", ErrFile}
		}
		return nil, err
	}
	return p, nil
}

// judgement is what the policy says of one call, and what a harness file may make of it.
type judgement struct {
	clauses []clause
	reason  string
	open    opening
	gives   string
	// exhaustive says that one of clauses holds whatever the arguments are.
	exhaustive bool
}

type judgements map[string]judgement

// judge returns the default policy: the table's judgements in place of the base's.
func judge(base *moby.Seccomp, table []difference, goarch string) (judgements, []oci.Arch, error) {
	calls, arches, err := resolve(base, goarch)
	if err != nil {
		return nil, nil, err
	}
	judged := judgements{}
	for name, clauses := range calls {
		judged[name] = judgement{clauses: clauses, reason: baseReason, open: dangerous}
	}
	judged.put(table)
	return judged, arches, nil
}

func (j judgements) put(table []difference) {
	for _, d := range table {
		for _, name := range d.names {
			j[name] = judgement{clauses: d.clauses, reason: d.reason, open: d.open, gives: d.gives, exhaustive: true}
		}
	}
}

// rules returns one rule per call and clause.
func (j judgements) rules() []rule {
	var rules []rule
	for _, name := range slices.Sorted(maps.Keys(j)) {
		for _, c := range j[name].clauses {
			rules = append(rules, rule{[]string{name}, c, j[name].reason})
		}
	}
	return rules
}

// effective leaves out what the default says anyway: libseccomp refuses such a
// rule (EACCES), and runtimes differ in whether they skip it first.
func (p *Policy) effective(rules []rule) []rule {
	return slices.DeleteFunc(rules, func(r rule) bool { return r.clause.isDefault(p.defaultErrno) })
}

func (c clause) isDefault(errno uint) bool {
	return c.action == oci.ActErrno && c.errno == errno
}

// group merges calls with one clause and reason, and sorts. Unconditional rules
// come first: libseccomp must know that socketcall is refused before it derives
// i386 socketcall rules from those for socket.
func group(rules []rule) []rule {
	slices.SortFunc(rules, func(a, b rule) int {
		return cmp.Or(compareClauses(a.clause, b.clause), cmp.Compare(a.reason, b.reason), slices.Compare(a.names, b.names))
	})
	var merged []rule
	for _, r := range rules {
		if n := len(merged); n > 0 && merged[n-1].reason == r.reason && compareClauses(merged[n-1].clause, r.clause) == 0 {
			merged[n-1].names = append(merged[n-1].names, r.names...)
			continue
		}
		merged = append(merged, rule{slices.Clone(r.names), r.clause, r.reason})
	}
	slices.SortFunc(merged, func(a, b rule) int {
		return cmp.Or(
			cmp.Compare(min(len(a.clause.args), 1), min(len(b.clause.args), 1)),
			slices.Compare(a.names, b.names),
			compareClauses(a.clause, b.clause),
			cmp.Compare(a.reason, b.reason),
		)
	})
	return merged
}

func compareClauses(a, b clause) int {
	return cmp.Or(
		cmp.Compare(a.action, b.action),
		cmp.Compare(a.errno, b.errno),
		slices.CompareFunc(a.args, b.args, compareArgs),
	)
}

func compareArgs(a, b oci.LinuxSeccompArg) int {
	return cmp.Or(
		cmp.Compare(a.Index, b.Index),
		cmp.Compare(a.Op, b.Op),
		cmp.Compare(a.Value, b.Value),
		cmp.Compare(a.ValueTwo, b.ValueTwo),
	)
}

// check proves what libseccomp and the runtimes leave to the author: that the
// verdict does not depend on the order of rules. It is conservative: it may refuse rules
// that do not contradict, never accept two that do.
func check(rules []rule, defaultErrno uint) error {
	var errs []error
	byName := map[string][]clause{}
	for _, r := range rules {
		if err := r.clause.check(defaultErrno); err != nil {
			errs = append(errs, fmt.Errorf("calls %q: %w", r.names, err))
		}
		for _, name := range r.names {
			byName[name] = append(byName[name], r.clause)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		if err := consistent(byName[name]); err != nil {
			errs = append(errs, fmt.Errorf("call %q: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func (c clause) check(defaultErrno uint) error {
	if c.action != oci.ActAllow && c.action != oci.ActErrno {
		return fmt.Errorf("action %q: %w", c.action, ErrContradiction)
	}
	if c.isDefault(defaultErrno) {
		return fmt.Errorf("errno %d equals the default: %w", c.errno, ErrContradiction)
	}
	seen := map[uint]bool{}
	for _, a := range c.args {
		// 32-bit ABIs compare the low halves only, and C runtimes read signed numbers.
		if a.Index > 5 || seen[a.Index] || max(a.Value, a.ValueTwo) > 0xffffffff || !knownOp(a.Op) {
			return fmt.Errorf("argument %+v: %w", a, ErrContradiction)
		}
		seen[a.Index] = true
	}
	return nil
}

// consistent refuses an unconditional clause beside any other (libseccomp then
// forgets the conditions), equal clauses, and overlapping ones with different verdicts.
func consistent(clauses []clause) error {
	for i, a := range clauses {
		for _, b := range clauses[:i] {
			switch {
			case len(a.args) == 0 || len(b.args) == 0:
				return fmt.Errorf("a rule without conditions beside another: %w", ErrContradiction)
			case compareClauses(a, b) == 0:
				return fmt.Errorf("one rule twice: %w", ErrContradiction)
			case (a.action != b.action || a.errno != b.errno) && !disjoint(a, b):
				return fmt.Errorf("overlapping %+v and %+v: %w", a, b, ErrContradiction)
			}
		}
	}
	return nil
}
