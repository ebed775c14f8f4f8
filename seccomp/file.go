package seccomp

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	moby "github.com/moby/profiles/seccomp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// Bounds of a profile file. The kernel takes a filter of 4096 instructions, so that a
// file within these can still be more than it takes: Verify tells.
const (
	// MaxFile is the largest profile file, in bytes.
	MaxFile       = 1 << 20
	maxRules      = 2048
	maxNames      = 32768
	maxConditions = 1024
	// maxBranches bounds what Policy.branching counts: about the length of a filter.
	maxBranches = 4096
	// maxFaults bounds what is reported of one file.
	maxFaults = 20
	// maxErrno is the kernel's MAX_ERRNO.
	maxErrno = 4095
)

// faults are the errors of one profile file, each with its place in the file.
type faults struct {
	list []string
	more int
}

// add takes only arguments that are printable and short.
func (f *faults) add(format string, args ...any) {
	if len(f.list) == maxFaults {
		f.more++
		return
	}
	f.list = append(f.list, fmt.Sprintf(format, args...))
}

func (f *faults) texts() []string {
	if f.more > 0 {
		return append(slices.Clone(f.list), fmt.Sprintf("%d more problems", f.more))
	}
	return f.list
}

// quote makes a string of a file safe to print.
func quote[S ~string](s S) string { return strconv.Quote(cut(string(s))) }

// parseFile reads a profile in Docker's format. Unknown and repeated keys, actions other
// than SCMP_ACT_ALLOW and SCMP_ACT_ERRNO, an errno of 0, which would read as success,
// and keys that steer more than the filter are faults. With faults the profile is nil.
func parseFile(data []byte) (*moby.Seccomp, []string) {
	if len(data) > MaxFile {
		return nil, []string{fmt.Sprintf("larger than %d bytes", MaxFile)}
	}
	var p moby.Seccomp
	if err := json.Unmarshal(data, &p, json.RejectUnknownMembers(true)); err != nil {
		return nil, []string{formFault(data, err)}
	}
	f := &faults{}
	f.head(&p)
	f.rules(p.Syscalls)
	if len(f.list) > 0 {
		return nil, f.texts()
	}
	return &p, nil
}

// formFault says where the text is not of the format. Texts of the JSON package are not
// repeated: they may quote what stands in the file.
func formFault(data []byte, err error) string {
	if syntax, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		if errors.Is(err, jsontext.ErrDuplicateName) {
			return quote(syntax.JSONPointer) + " is given twice"
		}
		line := 1 + bytes.Count(data[:min(int(syntax.ByteOffset), len(data))], []byte("\n"))
		return fmt.Sprintf("not valid JSON in line %d", line)
	}
	if semantic, ok := errors.AsType[*json.SemanticError](err); ok {
		if errors.Is(err, json.ErrUnknownName) {
			return quote(semantic.JSONPointer) + " is no key of Docker's format"
		}
		return quote(semantic.JSONPointer) + " has a value of the wrong kind"
	}
	return "not of Docker's format"
}

func (f *faults) head(p *moby.Seccomp) {
	if p.DefaultAction != oci.ActErrno {
		f.add("defaultAction %s: must be SCMP_ACT_ERRNO, so that nothing is allowed unnamed", quote(p.DefaultAction))
	}
	f.errno("defaultErrnoRet", p.DefaultErrnoRet)
	if len(p.Flags) > 0 || p.ListenerPath != "" || p.ListenerMetadata != "" {
		f.add("flags, listenerPath and listenerMetadata can't be used")
	}
	if len(p.ArchMap) > 0 && len(p.Architectures) > 0 {
		f.add("architectures and archMap are both given")
	}
}

func (f *faults) errno(at string, errno *uint) {
	if errno != nil && (*errno < 1 || *errno > maxErrno) {
		f.add("%s: must be 1 to %d, not %d", at, maxErrno, *errno)
	}
}

func (f *faults) rules(rules []*moby.Syscall) {
	names, conditions := 0, 0
	for i, s := range rules {
		if s == nil {
			f.add("syscalls[%d] is null", i)
			continue
		}
		f.rule(fmt.Sprintf("syscalls[%d]", i), s)
		names += len(s.Names) + 1
		if len(s.Args) > 0 {
			conditions += len(s.Names) + 1
		}
	}
	if len(rules) > maxRules || names > maxNames || conditions > maxConditions {
		f.add("more than %d rules, %d names or %d names with conditions", maxRules, maxNames, maxConditions)
	}
}

func (f *faults) rule(at string, s *moby.Syscall) {
	old := s.Name //nolint:staticcheck // the old form of a profile is still valid
	if (old == "") == (len(s.Names) == 0) || slices.Contains(s.Names, "") {
		f.add("%s: must have either names or name", at)
	}
	if s.Action != oci.ActAllow && s.Action != oci.ActErrno {
		f.add("%s.action %s: must be SCMP_ACT_ALLOW or SCMP_ACT_ERRNO", at, quote(s.Action))
	}
	if s.Action == oci.ActAllow && s.ErrnoRet != nil {
		f.add("%s.errnoRet: has no meaning for SCMP_ACT_ALLOW", at)
	}
	f.errno(at+".errnoRet", s.ErrnoRet)
	if err := (clause{args: s.Args, action: oci.ActAllow}).check(0); err != nil {
		f.add("%s.args: each needs an op, an index up to 5 that no other has, and values of 32 bits", at)
	}
	for _, filter := range []*moby.Filter{s.Includes, s.Excludes} {
		f.filter(at, filter)
	}
}

// filter lets no rule depend on the host's kernel: Compile does not look at it, and all
// that agentshim runs on are newer than oldestKernel.
func (f *faults) filter(at string, filter *moby.Filter) {
	if filter == nil || filter.MinKernel == nil {
		return
	}
	if v := *filter.MinKernel; v.Kernel == 0 || v.Kernel > oldestKernel.Kernel || v.Kernel == oldestKernel.Kernel && v.Major > oldestKernel.Major {
		f.add("%s: minKernel must be %s or older: the policy can't depend on the host's kernel", at, oldestKernel.String())
	}
}

// oldestKernel has openat2(2).
var oldestKernel = moby.KernelVersion{Kernel: 5, Major: 6}

// fileArches returns those of partners that the file lists, its native one first. A file that
// lists none has the native one; none come back where it lists others only.
func fileArches(p *moby.Seccomp, partners []oci.Arch) []oci.Arch {
	listed := p.Architectures
	for _, m := range p.ArchMap {
		if m.Arch == partners[0] {
			listed = append([]oci.Arch{m.Arch}, m.SubArches...)
		}
	}
	if len(listed) == 0 && len(p.ArchMap) == 0 {
		return partners[:1]
	}
	arches := slices.DeleteFunc(slices.Clone(partners), func(a oci.Arch) bool { return !slices.Contains(listed, a) })
	if len(arches) == 0 || arches[0] != partners[0] {
		return nil
	}
	return arches
}
