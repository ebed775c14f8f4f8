// Package seccomp is the system call policy: compiled from the harness file,
// rendered for an engine, checked with libseccomp.
//
// # The policy
//
// The base is moby's default profile for a process without capabilities. A
// small table (differences.go) replaces what the base says of some calls; every
// row has its reason. Dangerous calls answer EPERM. Calls a libc or runtime
// probes before it falls back answer ENOSYS. Nothing is killed, so a probe never
// ends a program.
//
// # Foreign ABIs
//
// A policy for amd64 also judges i386 and x32, one for arm64 also arm: libseccomp
// kills the callers of an ABI that is not listed and OCI has no field to change
// that. Listing them is sound because every conditional rule here stands on
// arguments with the same index and meaning in each of these ABIs, and
// because the one call that hides them, socketcall, is refused (see the table).
// A 32-bit program whose libc knows only socketcall therefore has no sockets.
//
// # Upper halves of arguments
//
// The kernel reads a pid, an address family or an ioctl request from the low 32
// bits of a register; seccomp sees all 64. A rule that allows compares all 64, so
// that odd upper bits are refused. A rule that refuses one value out of many
// compares the low 32 under a mask, so that upper bits do not get around it.
//
// # Not covered
//
// seccomp does not see behind pointers: paths, socket addresses and clone3's
// flags are out of its reach. A call newer than every call in the profile is
// answered by the runtime itself (runc: ENOSYS). Linux lets uretprobe and uprobe
// pass every filter: they only serve probes that the host's root placed.
package seccomp

import (
	"errors"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// Sentinels of Compile and Verify.
var (
	// ErrArch means that no policy exists for the architecture.
	ErrArch = errors.New("architecture without a seccomp policy")
	// ErrName means that the architecture has no call of that name.
	ErrName = errors.New("no such system call")
	// ErrNeeded means that nothing could start without the call.
	ErrNeeded = errors.New("needed to start")
	// ErrFixed means that a guarantee stands on the call's rules, whatever is accepted.
	ErrFixed = errors.New("not to be opened")
	// ErrFile means that a profile file is not of Docker's format, or says what can't be taken over.
	ErrFile = errors.New("profile file not usable")
	// ErrBoth means that a call is in allow and in deny.
	ErrBoth = errors.New("allowed and denied")
	// ErrContradiction means that two rules judge one call differently, or that a
	// rule has no effect or none that every runtime agrees on.
	ErrContradiction = errors.New("contradictory seccomp rules")
	// ErrNoLibseccomp means that this binary was built without libseccomp.
	ErrNoLibseccomp = errors.New("built without libseccomp")
	// ErrTooLong means that the policy compiles to more instructions than the kernel takes.
	ErrTooLong = errors.New("more than the kernel takes")
	// ErrLibseccomp means that libseccomp does not accept the policy.
	ErrLibseccomp = errors.New("libseccomp refuses the policy")
)

// Target is what the policy will run on.
type Target struct {
	// Arch is a GOARCH: amd64 or arm64. It is not defaulted to the host's.
	Arch string
	// Docker is set for an engine that ignores defaultErrnoRet, as Docker 20.10
	// does: what no rule names is then EPERM there, and ENOSYS needs a rule.
	// An engine that honours the field may be given either flavour; one that does not
	// would answer EPERM to clone3 with the other, and no glibc thread would start.
	Docker bool
	// File is the content of the file that harness.Seccomp.Profile names, at most MaxFile
	// bytes; without effect for the profiles default and nested.
	File []byte
}

// Policy is a compiled system call policy. It is immutable: every method returns
// a fresh value, and equal inputs of Compile give byte-equal renderings.
type Policy struct {
	target       Target
	arches       []oci.Arch
	defaultErrno uint
	rules        []rule
	// judged says the same per call; openings and remarks how it differs from the default.
	judged   judgements
	openings []Opening
	remarks  []string
	summary  string
}

// Opening is what a harness file opens beyond the default policy.
type Opening struct {
	// Name is what the file's accept calls it: syscall:NAME, nested-seccomp or custom-seccomp.
	Name string
	// NeedsAccept is set unless the default policy refuses the call for tidiness only.
	NeedsAccept bool
	// Detail says for people what it opens, in printable characters.
	Detail string
}

// Problem is one error of the harness file's seccomp part.
type Problem struct {
	// Path is the JSON path in the harness file.
	Path string
	// Msg says what is wrong, Remedy what to do about it; both in printable characters.
	Msg, Remedy string
	// Kind is one of the sentinels.
	Kind error
}

func (p *Problem) Error() string { return p.Path + ": " + p.Msg }

func (p *Problem) Unwrap() error { return p.Kind }

// rule is one verdict for several calls. Without args it holds whatever the arguments are.
type rule struct {
	names  []string // sorted
	clause clause
	reason string
}

// clause is what a rule asks and answers: every one of args must hold.
type clause struct {
	args   []oci.LinuxSeccompArg
	action oci.LinuxSeccompAction
	errno  uint // only with oci.ActErrno
}
