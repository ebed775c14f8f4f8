//go:build cgo && libseccomp

package seccomp

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	libseccomp "github.com/seccomp/libseccomp-golang"
	"golang.org/x/sys/unix"
)

// Verify builds p's filter with the linked libseccomp, the way runtimes do, and
// compiles it, but never loads it. It reports every call name, ABI and rule that
// libseccomp refuses, as ErrLibseccomp, and a filter that is longer than the kernel takes,
// as ErrTooLong. A name newer than the linked version is no
// error when the table of newer calls says so: runtimes skip it. It does not
// compare the compiled filter with the policy.
func Verify(p *Policy) error {
	program, err := bpf(p)
	if n := len(program) / instructionBytes; err == nil && n > maxInstructions {
		err = fmt.Errorf("%d instructions, %d are left to a policy: %w", n, maxInstructions, ErrTooLong)
	}
	return err
}

// The kernel takes a filter of 4096 instructions of struct sock_filter: BPF_MAXINSNS. Runtimes
// put some of their own in front (runc's check for calls newer than the profile).
const (
	instructionBytes = 8
	maxInstructions  = 4096 - 64
)

// BPF returns p's filter as the kernel gets it: an array of struct sock_filter in the machine's
// byte order. The error is ErrLibseccomp where Verify's would be.
func BPF(p *Policy) ([]byte, error) { return bpf(p) }

// PFC returns p's filter as libseccomp's pseudo code, for people.
func PFC(p *Policy) ([]byte, error) {
	return compiled(p, (*libseccomp.ScmpFilter).ExportPFC)
}

// Number is the number of a call on a GOARCH; false where the architecture has no call of that
// name, or the linked libseccomp does not know it.
func Number(goarch, name string) (int, bool) {
	call, err := libseccomp.GetSyscallFromNameByArch(name, libseccompArch[native[goarch]])
	return int(call), err == nil && call >= 0
}

// bpf returns p's filter as an array of struct sock_filter, the machine's byte order.
func bpf(p *Policy) ([]byte, error) {
	return compiled(p, (*libseccomp.ScmpFilter).ExportBPF)
}

func compiled(p *Policy, write func(*libseccomp.ScmpFilter, *os.File) error) ([]byte, error) {
	filter, err := build(p)
	if filter == nil {
		return nil, err
	}
	defer filter.Release()
	program, exportErr := export(filter, write)
	if exportErr != nil {
		exportErr = fmt.Errorf("compile filter: %w: %w", ErrLibseccomp, exportErr)
	}
	return program, errors.Join(err, exportErr)
}

// export goes through a file in memory: libseccomp before 2.6 writes to descriptors only.
func export(filter *libseccomp.ScmpFilter, write func(*libseccomp.ScmpFilter, *os.File) error) ([]byte, error) {
	fd, err := unix.MemfdCreate("seccomp", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	file := os.NewFile(uintptr(fd), "seccomp")
	defer file.Close()
	if err := write(filter, file); err != nil {
		return nil, err
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return io.ReadAll(file)
}

var libseccompArch = map[oci.Arch]libseccomp.ScmpArch{
	oci.ArchX86_64:  libseccomp.ArchAMD64,
	oci.ArchX86:     libseccomp.ArchX86,
	oci.ArchX32:     libseccomp.ArchX32,
	oci.ArchAARCH64: libseccomp.ArchARM64,
	oci.ArchARM:     libseccomp.ArchARM,
}

var libseccompOp = map[oci.LinuxSeccompOperator]libseccomp.ScmpCompareOp{
	oci.OpEqualTo:      libseccomp.CompareEqual,
	oci.OpNotEqual:     libseccomp.CompareNotEqual,
	oci.OpLessThan:     libseccomp.CompareLess,
	oci.OpLessEqual:    libseccomp.CompareLessOrEqual,
	oci.OpGreaterThan:  libseccomp.CompareGreater,
	oci.OpGreaterEqual: libseccomp.CompareGreaterEqual,
	oci.OpMaskedEqual:  libseccomp.CompareMaskedEqual,
}

// build returns the filter, to be released by the caller, with every error met. On
// errors of single rules the filter holds the others.
func build(p *Policy) (*libseccomp.ScmpFilter, error) {
	filter, err := libseccomp.NewFilter(libseccomp.ActErrno.SetReturnCode(int16(p.defaultErrno)))
	if err != nil {
		return nil, fmt.Errorf("new filter: %w: %w", ErrLibseccomp, err)
	}
	errs := []error{setArches(filter, p.arches)}
	for _, r := range p.rules {
		for _, name := range r.names {
			if err := addRule(filter, name, r.clause); err != nil {
				errs = append(errs, fmt.Errorf("rule for %q: %w: %w", name, ErrLibseccomp, err))
			}
		}
	}
	return filter, errors.Join(errs...)
}

// setArches makes arches the filter's only ones; a new filter has the machine's own.
func setArches(filter *libseccomp.ScmpFilter, arches []oci.Arch) error {
	own, err := libseccomp.GetNativeArch()
	if err != nil {
		return fmt.Errorf("native arch: %w: %w", ErrLibseccomp, err)
	}
	wanted := make([]libseccomp.ScmpArch, 0, len(arches))
	for _, a := range arches {
		arch, ok := libseccompArch[a]
		if !ok {
			return fmt.Errorf("arch %q: %w", a, ErrLibseccomp)
		}
		if err := filter.AddArch(arch); err != nil {
			return fmt.Errorf("arch %q: %w: %w", a, ErrLibseccomp, err)
		}
		wanted = append(wanted, arch)
	}
	if slices.Contains(wanted, own) {
		return nil
	}
	if err := filter.RemoveArch(own); err != nil {
		return fmt.Errorf("remove arch %q: %w: %w", own, ErrLibseccomp, err)
	}
	return nil
}

func addRule(filter *libseccomp.ScmpFilter, name string, c clause) error {
	call, err := libseccomp.GetSyscallFromName(name)
	if err != nil {
		if newerThanLinked(name) {
			return nil
		}
		return err
	}
	action := libseccomp.ActAllow
	if c.action == oci.ActErrno {
		action = libseccomp.ActErrno.SetReturnCode(int16(c.errno))
	}
	if len(c.args) == 0 {
		return filter.AddRule(call, action)
	}
	var conditions []libseccomp.ScmpCondition
	for _, a := range c.args {
		condition, err := condition(a)
		if err != nil {
			return fmt.Errorf("argument %+v: %w", a, err)
		}
		conditions = append(conditions, condition)
	}
	return filter.AddRuleConditional(call, action, conditions)
}

func condition(a oci.LinuxSeccompArg) (libseccomp.ScmpCondition, error) {
	if a.Op == oci.OpMaskedEqual {
		return libseccomp.MakeCondition(a.Index, libseccomp.CompareMaskedEqual, a.Value, a.ValueTwo)
	}
	return libseccomp.MakeCondition(a.Index, libseccompOp[a.Op], a.Value)
}

func newerThanLinked(name string) bool {
	since, ok := newer[name]
	major, minor, micro := libseccomp.GetLibraryVersion()
	return ok && slices.Compare([]uint{major, minor, micro}, since[:]) < 0
}
