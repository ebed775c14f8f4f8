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
// everywhere. Every problem of the input is reported at once; the errors are
// ErrArch and ErrUnsupported. ErrContradiction means a defect in the
// tables. It does not tell whether a libseccomp accepts the result; Verify does.
func Compile(s harness.Seccomp, t Target) (*Policy, error) {
	return compile(moby.DefaultProfile(), differences, s, t)
}

func compile(base *moby.Seccomp, table []difference, s harness.Seccomp, t Target) (*Policy, error) {
	calls, arches, err := resolve(base, t.Arch)
	if err := errors.Join(supported(s), err); err != nil {
		return nil, err
	}
	p := &Policy{target: t, arches: arches, defaultErrno: eNOSYS}
	if t.Docker {
		p.defaultErrno = ePERM
	}
	p.rules = group(p.effective(ungrouped(calls, table)))
	if err := check(p.rules, p.defaultErrno); err != nil {
		return nil, err
	}
	return p, nil
}

// supported refuses what is not built, by name; nothing is ignored.
func supported(s harness.Seccomp) error {
	var errs []error
	if s.Profile != "" && s.Profile != "default" {
		errs = append(errs, fmt.Errorf("seccomp.profile %q: %w", s.Profile, ErrUnsupported))
	}
	if len(s.Allow) > 0 {
		errs = append(errs, fmt.Errorf("seccomp.allow %q: %w", s.Allow, ErrUnsupported))
	}
	if len(s.Deny) > 0 {
		errs = append(errs, fmt.Errorf("seccomp.deny %q: %w", s.Deny, ErrUnsupported))
	}
	return errors.Join(errs...)
}

// ungrouped returns one rule per call and clause, the table's in place of the base's.
func ungrouped(base map[string][]clause, table []difference) []rule {
	var rules []rule
	base = maps.Clone(base)
	for _, d := range table {
		for _, name := range d.names {
			delete(base, name)
			for _, c := range d.clauses {
				rules = append(rules, rule{[]string{name}, c, d.reason})
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(base)) {
		for _, c := range base[name] {
			rules = append(rules, rule{[]string{name}, c, baseReason})
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
