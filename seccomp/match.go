package seccomp

import (
	"slices"
	"syscall"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// Verdict is what the kernel answers a call.
type Verdict struct {
	// Action is oci.ActAllow, oci.ActErrno, or oci.ActKillThread for an ABI the policy does not list.
	Action oci.LinuxSeccompAction
	// Errno is what the caller sees; 0 unless Action is oci.ActErrno.
	Errno syscall.Errno
	// Default is set when no rule decided.
	Default bool
	// Reason is the deciding rule's.
	Reason string
}

// Allowed tells whether the call reaches the kernel.
func (v Verdict) Allowed() bool { return v.Action == oci.ActAllow }

// abis maps the names Decide takes. Filters compare the low halves of arguments on
// the 32-bit ones; x32 counts as one in libseccomp.
var abis = map[string]struct {
	arch   oci.Arch
	narrow bool
}{
	"amd64": {oci.ArchX86_64, false},
	"386":   {oci.ArchX86, true},
	"x32":   {oci.ArchX32, true},
	"arm64": {oci.ArchAARCH64, false},
	"arm":   {oci.ArchARM, true},
}

// Decide returns the policy's verdict on one call, as the rules say it. arch is a
// GOARCH or x32; empty means the target's. A name no rule knows, a typo too,
// gets the default. It does not model what a runtime's libseccomp leaves out (names
// it does not know), runc's ENOSYS for numbers above every one in the profile, or
// the kernel's own exceptions (see the package).
func (p *Policy) Decide(arch, name string, args [6]uint64) Verdict {
	if arch == "" {
		arch = p.target.Arch
	}
	abi, ok := abis[arch]
	if !ok || !slices.Contains(p.arches, abi.arch) {
		return Verdict{Action: oci.ActKillThread, Default: true, Reason: "ABI not listed: libseccomp kills the caller"}
	}
	if abi.narrow {
		for i := range args {
			args[i] &= 0xffffffff
		}
	}
	for _, r := range p.rules {
		if _, named := slices.BinarySearch(r.names, name); named && r.clause.matches(args) {
			return Verdict{Action: r.clause.action, Errno: syscall.Errno(r.clause.errno), Reason: r.reason}
		}
	}
	return Verdict{Action: oci.ActErrno, Errno: syscall.Errno(p.defaultErrno), Default: true, Reason: "no rule names it"}
}

func (c clause) matches(args [6]uint64) bool {
	for _, a := range c.args {
		if !holds(a, args[a.Index]) {
			return false
		}
	}
	return true
}

func knownOp(op oci.LinuxSeccompOperator) bool {
	switch op {
	case oci.OpEqualTo, oci.OpNotEqual, oci.OpLessThan, oci.OpLessEqual, oci.OpGreaterThan, oci.OpGreaterEqual, oci.OpMaskedEqual:
		return true
	}
	return false
}

func holds(a oci.LinuxSeccompArg, v uint64) bool {
	switch a.Op {
	case oci.OpEqualTo:
		return v == a.Value
	case oci.OpNotEqual:
		return v != a.Value
	case oci.OpLessThan:
		return v < a.Value
	case oci.OpLessEqual:
		return v <= a.Value
	case oci.OpGreaterThan:
		return v > a.Value
	case oci.OpGreaterEqual:
		return v >= a.Value
	case oci.OpMaskedEqual:
		return v&a.Value == a.ValueTwo
	}
	return false // check lets no other operator into a policy
}

// disjoint tells that no arguments satisfy both clauses. It looks at one argument
// at a time, so false may also mean that it cannot tell.
func disjoint(a, b clause) bool {
	for _, x := range a.args {
		for _, y := range b.args {
			if x.Index == y.Index && (apart(x, y) || apart(y, x)) {
				return true
			}
		}
	}
	return false
}

// apart tells that no value satisfies both comparisons.
func apart(x, y oci.LinuxSeccompArg) bool {
	if x.Op == oci.OpEqualTo {
		return !holds(y, x.Value)
	}
	if x.Op == oci.OpMaskedEqual && y.Op == oci.OpMaskedEqual {
		return (x.ValueTwo^y.ValueTwo)&x.Value&y.Value != 0
	}
	xlo, xhi := bounds(x)
	ylo, yhi := bounds(y)
	return xhi < ylo || yhi < xlo
}

// bounds encloses the values that satisfy a; an empty set comes out as a wider one.
func bounds(a oci.LinuxSeccompArg) (lo, hi uint64) {
	const most = ^uint64(0)
	switch a.Op {
	case oci.OpEqualTo:
		return a.Value, a.Value
	case oci.OpLessThan:
		return 0, max(a.Value, 1) - 1
	case oci.OpLessEqual:
		return 0, a.Value
	case oci.OpGreaterThan:
		return min(a.Value, most-1) + 1, most
	case oci.OpGreaterEqual:
		return a.Value, most
	case oci.OpMaskedEqual:
		return a.ValueTwo, a.ValueTwo | ^a.Value
	}
	return 0, most
}
