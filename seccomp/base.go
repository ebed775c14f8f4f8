package seccomp

import (
	"fmt"
	"slices"
	"sync"

	moby "github.com/moby/profiles/seccomp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
)

const baseReason = "moby default profile, no capabilities"

// native maps GOARCH to libseccomp's name of the ABI. moby's own filters use GOARCH
// names for both, so no second table is needed.
var native = map[string]oci.Arch{
	"amd64": oci.ArchX86_64,
	"arm64": oci.ArchAARCH64,
}

// resolve returns base's clauses per call, and arch with its partner ABIs, for a
// process without capabilities on a current kernel. It reads base and
// nothing else, and shares no memory with it.
func resolve(base *moby.Seccomp, goarch string) (map[string][]clause, []oci.Arch, error) {
	arches, err := partners(base, goarch)
	if err != nil {
		return nil, nil, err
	}
	return callsOf(base.Syscalls, goarch), arches, nil
}

func callsOf(rules []*moby.Syscall, goarch string) map[string][]clause {
	calls := map[string][]clause{}
	for _, s := range rules {
		if !applies(s, goarch) {
			continue
		}
		for _, name := range names(s) {
			calls[name] = append(calls[name], baseClause(s))
		}
	}
	return calls
}

// foreignCalls are the names that moby's profile has for any architecture.
var foreignCalls = sync.OnceValue(func() map[string]bool {
	known := map[string]bool{}
	for _, s := range moby.DefaultProfile().Syscalls {
		for _, name := range names(s) {
			known[name] = true
		}
	}
	return known
})

func partners(base *moby.Seccomp, goarch string) ([]oci.Arch, error) {
	for _, a := range base.ArchMap {
		if want, ok := native[goarch]; ok && a.Arch == want {
			return append([]oci.Arch{a.Arch}, a.SubArches...), nil
		}
	}
	return nil, fmt.Errorf("arch %q: %w", goarch, ErrArch)
}

// applies takes a rule that asks for a minimal kernel and leaves out one that excludes it.
func applies(s *moby.Syscall, goarch string) bool {
	if in := s.Includes; in != nil {
		if len(in.Caps) > 0 || len(in.Arches) > 0 && !slices.Contains(in.Arches, goarch) {
			return false
		}
	}
	if ex := s.Excludes; ex != nil {
		if ex.MinKernel != nil || slices.Contains(ex.Arches, goarch) {
			return false
		}
	}
	return true
}

func names(s *moby.Syscall) []string {
	if s.Name != "" { //nolint:staticcheck // the old form of a profile is still valid
		return []string{s.Name} //nolint:staticcheck // as above
	}
	return s.Names
}

func baseClause(s *moby.Syscall) clause {
	c := clause{args: slices.Clone(s.Args), action: s.Action}
	if c.action == oci.ActErrno {
		c.errno = ePERM // what every runtime answers without errnoRet
		if s.ErrnoRet != nil {
			c.errno = *s.ErrnoRet
		}
	}
	return c
}
