package seccomp

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/go-json-experiment/json"
	moby "github.com/moby/profiles/seccomp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
)

// Explanation is what a policy says of one call, for people and programs.
type Explanation struct {
	// Call is the call's name, Args what was said of its arguments, as written.
	Call string `json:"call"`
	Args string `json:"args,omitempty"`
	// Verdict is allowed, refused, or conditional where it depends on arguments that
	// were not given.
	Verdict string `json:"verdict"`
	// Rules are those that can decide, in no order: at most one holds, or several of one answer.
	Rules []ExplainedRule `json:"rules"`
	// Otherwise is the answer where none of them holds; empty where one must.
	Otherwise string `json:"otherwise,omitempty"`
	Reason    string `json:"reason"`
	// Open says how a harness file opens what is refused, GivesUp what that gives up
	// beyond what Reason says. Both are empty for an allowed call.
	Open    string `json:"open,omitempty"`
	GivesUp string `json:"givesUp,omitempty"`
}

// ExplainedRule is one rule.
type ExplainedRule struct {
	// When is the rule's condition on the arguments that were not given; empty for none.
	When string `json:"when,omitempty"`
	// Answer is allowed, or the name of the error number that the program sees.
	Answer string `json:"answer"`
}

// The verdicts of an Explanation.
const (
	VerdictAllowed     = "allowed"
	VerdictRefused     = "refused"
	VerdictConditional = "conditional"
)

// Explain says what the policy says of a call, written CALL[,ARGUMENT=VALUE…]. ARGUMENT is
// the name in the manual page where this package has rules on it, or arg0 to arg5; VALUE is a number or
// constants joined by |. It is Decide's answer for the native ABI. The error is a *Problem.
func (p *Policy) Explain(query string) (Explanation, error) {
	name, rest, more := strings.Cut(query, ",")
	if _, ok := p.judged[name]; !ok {
		return Explanation{}, unknown("system call", name, p.judged, p.target.Arch)
	}
	given := map[uint]uint64{}
	if more {
		var err error
		if given, err = parseArgs(name, rest); err != nil {
			return Explanation{}, err
		}
	}
	e := p.explain(name, given)
	e.Args = rest
	return e, nil
}

func (p *Policy) explain(name string, given map[uint]uint64) Explanation {
	j := p.judged[name]
	e := Explanation{Call: name, Reason: j.reason, Rules: []ExplainedRule{}}
	certain := false
	for _, c := range j.clauses {
		left, possible := c.given(given)
		if !possible {
			continue
		}
		certain = certain || len(left) == 0
		e.Rules = append(e.Rules, ExplainedRule{conditionText(name, left), answer(c)})
	}
	if !certain && !j.exhaustive {
		e.Otherwise = answer(refuse(p.defaultErrno))
	}
	e.Verdict = e.verdict()
	if e.Verdict != VerdictAllowed {
		e.Open, e.GivesUp = opens(name, j), j.gives
	}
	return e
}

// given returns what is left to know of the clause's conditions, and whether it can still hold.
func (c clause) given(args map[uint]uint64) (left []oci.LinuxSeccompArg, possible bool) {
	for _, a := range c.args {
		v, known := args[a.Index]
		switch {
		case !known:
			left = append(left, a)
		case !holds(a, v):
			return nil, false
		}
	}
	return left, true
}

func (e Explanation) verdict() string {
	allowed, refused := false, e.Otherwise != ""
	for _, r := range e.Rules {
		if r.Answer == VerdictAllowed {
			allowed = true
		} else {
			refused = true
		}
		if r.When == "" { // it holds, so that no other answer is left: check
			return map[bool]string{true: VerdictAllowed, false: VerdictRefused}[r.Answer == VerdictAllowed]
		}
	}
	switch {
	case allowed && refused:
		return VerdictConditional
	case allowed:
		return VerdictAllowed
	}
	return VerdictRefused
}

func answer(c clause) string {
	if c.action == oci.ActAllow {
		return VerdictAllowed
	}
	return errnoName(c.errno)
}

func errnoName(errno uint) string {
	if name := unix.ErrnoName(syscall.Errno(errno)); name != "" {
		return name
	}
	return fmt.Sprint("errno ", errno)
}

// opens says how a harness file can allow more of a call.
func opens(name string, j judgement) string {
	switch {
	case j.reason == reasonDeny:
		return fmt.Sprintf("take %q out of seccomp.deny", name)
	case j.open == fixed:
		return "it can't be opened"
	case j.open == harmless:
		return fmt.Sprintf("add %q to seccomp.allow", name)
	}
	text := fmt.Sprintf("add %q to seccomp.allow and %q to accept", name, "syscall:"+name)
	for _, d := range nested {
		if slices.Contains(d.names, name) && d.clauses[0].action == oci.ActAllow {
			text += `; for a sandbox of the agent's own, write "profile": "nested" and add "nested-seccomp" to accept`
		}
	}
	return text
}

// maxConditionsShown bounds how many rules of one answer Text lists.
const maxConditionsShown = 20

// Text is the explanation for people: one fact a line.
func (e Explanation) Text() string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-11s %s\n", name, fmt.Sprintf(format, args...))
	}
	call := e.Call
	if e.Args != "" {
		call += " with " + e.Args
	}
	line(e.Verdict, "%s", call)
	if e.Verdict != VerdictAllowed {
		e.ruleText(line)
	}
	line("reason", "%s", e.Reason)
	if e.Open != "" {
		line("to open", "%s", e.Open)
	}
	if e.GivesUp != "" {
		line("gives up", "%s", e.GivesUp)
	}
	return b.String()
}

func (e Explanation) ruleText(line func(name, format string, args ...any)) {
	whens := map[string][]string{}
	for _, r := range e.Rules {
		whens[r.Answer] = append(whens[r.Answer], r.When)
	}
	for _, answer := range slices.Sorted(maps.Keys(whens)) {
		switch list := whens[answer]; {
		case slices.Contains(list, ""):
			line("answer", "%s", seen(answer))
		case len(list) > maxConditionsShown:
			line("if", "not refused by another rule: %s (%d rules; agentshim seccomp show --json has them)", seen(answer), len(list))
		default:
			line("if", "%s: %s", strings.Join(list, "; or "), seen(answer))
		}
	}
	if e.Otherwise != "" {
		line("otherwise", "%s", seen(e.Otherwise))
	}
}

// seen is an answer as the program gets to know it.
func seen(answer string) string {
	for errno := syscall.Errno(1); errno < 134; errno++ {
		if unix.ErrnoName(errno) == answer {
			return fmt.Sprintf("%s (%v)", answer, errno)
		}
	}
	return answer
}

// argNames are the arguments that rules of this package and common questions are about.
var argNames = map[string][]string{
	"socket": {"family", "type", "protocol"}, "socketpair": {"family", "type", "protocol"},
	"clone": {"flags"}, "unshare": {"flags"}, "setns": {"fd", "nstype"},
	"ioctl":     {"fd", "request"},
	"prlimit64": {"pid", "resource"}, "sched_setaffinity": {"pid"}, "sched_setattr": {"pid"}, "sched_setparam": {"pid"}, "sched_setscheduler": {"pid", "policy"},
	"setpriority": {"which", "who", "priority"}, "ioprio_set": {"which", "who", "priority"},
	"personality": {"persona"}, "pidfd_send_signal": {"pidfd", "signal", "info", "flags"}, "ptrace": {"request", "pid"},
}

// constants are the names of values, equal on every architecture of this package.
var constants = map[string]uint64{
	"AF_UNIX": afUnix, "AF_INET": afInet, "AF_INET6": afInet6, "AF_NETLINK": afNetlink, "AF_PACKET": 17, "AF_ALG": 38, "AF_VSOCK": 40,
	"AF_BLUETOOTH": 31, "AF_XDP": 44, "AF_TIPC": 30, "AF_KEY": 15, "AF_CAN": 29, "AF_NFC": 39, "AF_UNSPEC": 0,
	"SOCK_STREAM": 1, "SOCK_DGRAM": 2, "SOCK_RAW": 3, "NETLINK_ROUTE": netlinkRoute,
	"CLONE_NEWNS": cloneNewNS, "CLONE_NEWCGROUP": cloneNewCgroup, "CLONE_NEWUTS": cloneNewUTS, "CLONE_NEWIPC": cloneNewIPC,
	"CLONE_NEWUSER": cloneNewUser, "CLONE_NEWPID": cloneNewPID, "CLONE_NEWNET": cloneNewNet, "CLONE_VM": 0x100, "CLONE_THREAD": 0x10000, "SIGCHLD": 17,
	"TIOCSTI": tiocSTI, "TIOCLINUX": tiocLinux, "PRIO_PROCESS": prioProcess, "PRIO_PGRP": 1, "PRIO_USER": 2,
	"IOPRIO_WHO_PROCESS": ioprioWhoProcess, "IOPRIO_WHO_PGRP": 2, "IOPRIO_WHO_USER": 3, "ADDR_NO_RANDOMIZE": 0x40000,
}

// prefixes say which constants an argument's values are shown as.
var prefixes = map[string]string{"family": "AF_", "request": "TIOC"}

func parseArgs(call, text string) (map[uint]uint64, error) {
	given := map[uint]uint64{}
	for _, word := range strings.Split(text, ",") {
		name, value, ok := strings.Cut(word, "=")
		index, known := argIndex(call, name)
		if !ok || !known {
			return nil, &Problem{"system call", fmt.Sprintf("%s has no argument %s here", call, quote(word)), "write arg0=VALUE to arg5=VALUE" + orNames(call), ErrName}
		}
		v, err := parseValue(value)
		if err != nil {
			return nil, err
		}
		given[index] = v
	}
	return given, nil
}

func orNames(call string) string {
	if len(argNames[call]) == 0 {
		return ""
	}
	return ", or " + strings.Join(argNames[call], ", ")
}

func argIndex(call, name string) (uint, bool) {
	if i := slices.Index(argNames[call], name); i >= 0 {
		return uint(i), true
	}
	n, err := strconv.ParseUint(strings.TrimPrefix(name, "arg"), 10, 3)
	return uint(n), err == nil && n <= 5 && strings.HasPrefix(name, "arg")
}

func parseValue(text string) (uint64, error) {
	var sum uint64
	for _, word := range strings.Split(text, "|") {
		v, known := constants[word]
		if !known {
			var err error
			if v, err = strconv.ParseUint(word, 0, 64); err != nil {
				remedy := "write a number"
				if near := harness.Nearest(word, slices.Sorted(maps.Keys(constants))); near != "" {
					remedy = fmt.Sprintf("did you mean %q?", near)
				}
				return 0, &Problem{"system call", quote(word) + " is no value", remedy, ErrName}
			}
		}
		sum |= v
	}
	return sum, nil
}

// conditionText is a clause's conditions in words.
func conditionText(call string, args []oci.LinuxSeccompArg) string {
	words := make([]string, len(args))
	for i, a := range args {
		words[i] = argText(call, a)
	}
	return strings.Join(words, " and ")
}

var signs = map[oci.LinuxSeccompOperator]string{
	oci.OpEqualTo: "=", oci.OpNotEqual: "is not", oci.OpLessThan: "<", oci.OpLessEqual: "<=", oci.OpGreaterThan: ">", oci.OpGreaterEqual: ">=",
}

func argText(call string, a oci.LinuxSeccompArg) string {
	name := fmt.Sprint("arg", a.Index)
	if names := argNames[call]; int(a.Index) < len(names) {
		name = names[a.Index]
	}
	if a.Op == oci.OpMaskedEqual {
		if a.Value == 0xffffffff {
			return fmt.Sprintf("%s = %s", name, valueText(call, name, a.ValueTwo))
		}
		if low := ^uint32(a.Value); a.Value <= 0xffffffff && low&(low+1) == 0 { // a block: its size is a power of two
			return fmt.Sprintf("%s from %d to %d", name, a.ValueTwo, a.ValueTwo+uint64(low))
		}
		return fmt.Sprintf("%s & %s = %s", name, valueText(call, name, a.Value), valueText(call, name, a.ValueTwo))
	}
	return fmt.Sprintf("%s %s %s", name, signs[a.Op], valueText(call, name, a.Value))
}

func valueText(call, arg string, v uint64) string {
	prefix := prefixes[arg]
	if call == "clone" && v != 0 {
		prefix = "CLONE_"
	}
	for _, name := range slices.Sorted(maps.Keys(constants)) {
		if prefix != "" && strings.HasPrefix(name, prefix) && constants[name] == v {
			return name
		}
	}
	if v > 255 {
		return fmt.Sprintf("%#x", v)
	}
	return fmt.Sprint(v)
}

// Group are the calls of one verdict and reason.
type Group struct {
	// Verdict is allowed, conditional, or the name of an error number.
	Verdict string
	Reason  string
	// Calls are sorted.
	Calls []string
}

// Groups returns every call that the policy names, allowed ones first.
func (p *Policy) Groups() []Group {
	var groups []Group
	for _, name := range slices.Sorted(maps.Keys(p.judged)) {
		g := Group{Verdict: p.verdict(name), Reason: p.judged[name].reason}
		i := slices.IndexFunc(groups, func(have Group) bool { return have.Verdict == g.Verdict && have.Reason == g.Reason })
		if i < 0 {
			i, groups = len(groups), append(groups, g)
		}
		groups[i].Calls = append(groups[i].Calls, name)
	}
	order := []string{VerdictAllowed, VerdictConditional}
	rank := func(g Group) int { return (slices.Index(order, g.Verdict) + len(order) + 1) % (len(order) + 1) }
	slices.SortStableFunc(groups, func(a, b Group) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Verdict, b.Verdict), cmp.Compare(a.Reason, b.Reason))
	})
	return groups
}

// verdict is allowed, conditional or an errno's name; the default's for a call that no rule is about.
func (p *Policy) verdict(name string) string {
	switch j := p.judged[name]; {
	case len(j.clauses) == 0:
		return errnoName(p.defaultErrno)
	case len(j.clauses) == 1 && len(j.clauses[0].args) == 0:
		return answer(j.clauses[0])
	}
	return VerdictConditional
}

// Change is a call on which two policies differ: A and B are the verdicts of each.
type Change struct {
	Call string `json:"call"`
	A    string `json:"a"`
	B    string `json:"b"`
}

// Diff returns the calls on which a and b differ, sorted. Of two that are conditional it says
// only that their rules are not the same.
func Diff(a, b *Policy) []Change {
	names := slices.Concat(slices.Collect(maps.Keys(a.judged)), slices.Collect(maps.Keys(b.judged)))
	slices.Sort(names)
	changes := []Change{}
	for _, name := range slices.Compact(names) {
		c := Change{name, a.verdict(name), b.verdict(name)}
		if c.A == VerdictConditional && c.B == VerdictConditional && !equalClauses(a.judged[name].clauses, b.judged[name].clauses) {
			c.B = "other conditions"
		}
		if c.A != c.B {
			changes = append(changes, c)
		}
	}
	return changes
}

func equalClauses(a, b []clause) bool {
	a, b = slices.SortedFunc(slices.Values(a), compareClauses), slices.SortedFunc(slices.Values(b), compareClauses)
	return slices.EqualFunc(a, b, func(x, y clause) bool { return compareClauses(x, y) == 0 })
}

// EngineDefault is moby's own profile for a process without capabilities, to compare
// with. It is no policy to run under: nothing of it is checked.
func EngineDefault(t Target) (*Policy, error) {
	return engineProfile(moby.DefaultProfile(), t)
}

// EngineProfile is another profile in Docker's format, read as EngineDefault is.
func EngineProfile(data []byte, t Target) (*Policy, error) {
	var base moby.Seccomp
	if err := json.Unmarshal(data, &base); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFile, err)
	}
	return engineProfile(&base, t)
}

func engineProfile(base *moby.Seccomp, t Target) (*Policy, error) {
	judged, arches, err := judge(base, nil, t.Arch)
	if err != nil {
		return nil, err
	}
	p := &Policy{target: t, arches: arches, defaultErrno: ePERM, judged: judged}
	p.rules = group(p.effective(judged.rules()))
	return p, nil
}
