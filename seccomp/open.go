package seccomp

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
)

// Reasons of the harness file's own rules.
const (
	reasonAllow = "seccomp.allow"
	reasonDeny  = "seccomp.deny"
)

// Openings returns what the harness file opens beyond the default policy, in the
// order of the names within each of profile and allow. The caller owns the slice.
func (p *Policy) Openings() []Opening { return slices.Clone(p.openings) }

// Remarks returns what a reader of the harness file may not expect, for people. The
// caller owns the slice.
func (p *Policy) Remarks() []string { return slices.Clone(p.remarks) }

// Summary names the profile and what the file allows and denies; empty for the
// default policy.
func (p *Policy) Summary() string { return p.summary }

// lists applies allow and deny.
// LooseMounts says that a process without capabilities may make a mount namespace of its
// own, by way of a user namespace, and leave its mounts behind there. A mount then keeps
// nobody in it from renaming or replacing what it is mounted on: for rename(2) and
// unlink(2) only the mount points of the caller's namespace are busy
// (mount_namespaces(7), Linux 3.18).
func (p *Policy) LooseMounts() bool {
	allowed := func(name string, arg uint64) bool { return p.Decide("", name, [6]uint64{arg}).Allowed() }
	made := allowed("unshare", unix.CLONE_NEWUSER) || allowed("clone", unix.CLONE_NEWUSER) || allowed("clone3", 0)
	return made && (allowed("umount2", 0) || allowed("umount", 0))
}

func (p *Policy) lists(s harness.Seccomp) []error {
	var errs []error
	at := func(list string, names []string, do func(path, name string) *Problem) {
		for i, name := range names {
			path := fmt.Sprintf("$.seccomp.%s[%d]", list, i)
			if _, ok := p.judged[name]; !ok {
				errs = append(errs, unknown(path, name, p.judged, p.target.Arch))
			} else if slices.Contains(names[:i], name) {
				continue
			} else if problem := do(path, name); problem != nil {
				errs = append(errs, problem)
			}
		}
	}
	at("allow", s.Allow, func(path, name string) *Problem {
		if slices.Contains(s.Deny, name) {
			return &Problem{path, name + " is also in deny", "take it out of one of them", ErrBoth}
		}
		return p.allow(path, name)
	})
	at("deny", s.Deny, p.deny)
	slices.SortFunc(p.openings, func(a, b Opening) int { return strings.Compare(a.Name, b.Name) })
	slices.Sort(p.remarks)
	p.summary = summary(s)
	return errs
}

func summary(s harness.Seccomp) string {
	var words []string
	switch {
	case s.Profile == profileNested:
		words = append(words, "profile nested")
	case IsFile(s.Profile):
		words = append(words, "profile "+quote(s.Profile))
	}
	for _, list := range []struct {
		word  string
		names []string
	}{{"also allows", s.Allow}, {"also denies", s.Deny}} {
		if len(list.names) > 0 {
			words = append(words, list.word+" "+strings.Join(slices.Compact(slices.Sorted(slices.Values(list.names))), " "))
		}
	}
	return strings.Join(words, "; ")
}

// unknown is the problem of a name that no rule is about.
func unknown(path, name string, judged judgements, arch string) *Problem {
	remedy := "agentshim seccomp show lists the names"
	if near := harness.Nearest(name, slices.Sorted(maps.Keys(judged))); near != "" {
		remedy = fmt.Sprintf("did you mean %q?", near)
	}
	return &Problem{path, fmt.Sprintf("%s has no system call %q", arch, cut(name)), remedy, ErrName}
}

// cut bounds what a message repeats of a name.
func cut(name string) string {
	if len(name) > 64 {
		return name[:64] + "…"
	}
	return name
}

func (p *Policy) allow(path, name string) *Problem {
	j := p.judged[name]
	switch {
	case j.whole(oci.ActAllow):
		p.remark("seccomp.allow of %s has no effect: it is allowed already", name)
		return nil
	case j.open == fixed:
		return &Problem{path, fmt.Sprintf("%s can't be opened further: %s", name, j.reason), "take it out of allow", ErrFixed}
	}
	p.open(name, j)
	p.judged[name] = judgement{clauses: []clause{allow()}, reason: reasonAllow, open: j.open}
	if _, ok := newer[name]; ok {
		p.remark("%s is new: a container runtime whose libseccomp doesn't know it goes on refusing it", name)
	}
	return nil
}

// open notes that more of name is allowed than j does.
func (p *Policy) open(name string, j judgement) {
	o := Opening{Name: "syscall:" + name, NeedsAccept: j.open == dangerous}
	if o.Detail = fmt.Sprintf("the agent may call %s, refused otherwise: %s", name, j.reason); j.some(oci.ActAllow) {
		o.Detail = fmt.Sprintf("the agent may call %s with any arguments, some of them refused otherwise: %s", name, j.reason)
	}
	if j.gives != "" {
		o.Detail += "; " + j.gives
	}
	if !slices.Contains(p.openings, o) {
		p.openings = append(p.openings, o)
	}
}

func (p *Policy) deny(path, name string) *Problem {
	j := p.judged[name]
	switch {
	case slices.Contains(neededCalls, name):
		return &Problem{path, fmt.Sprintf("%s can't be denied: init, the container's runtime or every program ends without it", name), "take it out of deny", ErrNeeded}
	case !j.some(oci.ActAllow):
		p.remark("seccomp.deny of %s has no effect: it is refused already", name)
		return nil
	}
	p.openings = slices.DeleteFunc(p.openings, func(o Opening) bool { return o.Name == "syscall:"+name })
	p.judged[name] = judgement{clauses: []clause{refuse(ePERM)}, reason: reasonDeny, open: j.open}
	return nil
}

func (p *Policy) remark(format string, args ...any) {
	p.remarks = append(p.remarks, fmt.Sprintf(format, args...))
}

// whole says that one verdict holds whatever the arguments are.
func (j judgement) whole(action oci.LinuxSeccompAction) bool {
	return len(j.clauses) == 1 && len(j.clauses[0].args) == 0 && j.clauses[0].action == action
}

// some says that a clause has the verdict.
func (j judgement) some(action oci.LinuxSeccompAction) bool {
	return slices.ContainsFunc(j.clauses, func(c clause) bool { return c.action == action })
}
