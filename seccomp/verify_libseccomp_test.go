//go:build cgo && libseccomp

package seccomp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	libseccomp "github.com/seccomp/libseccomp-golang"

	"github.com/agentshim/agentshim/harness"
)

func TestVerify(t *testing.T) {
	for name, target := range targets {
		t.Run(name, func(t *testing.T) {
			helper, err := Helper(target)
			if err := errors.Join(err, Verify(helper), Verify(mustCompile(t, target))); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestRenderings(t *testing.T) {
	p := mustCompile(t, targets["arm64-podman"])
	program, err := BPF(p)
	if err != nil || len(program) == 0 || len(program)%8 != 0 {
		t.Errorf("%d bytes: %v", len(program), err)
	}
	text, err := PFC(p)
	if err != nil || !strings.Contains(string(text), "filter for arch aarch64") {
		t.Errorf("%.200s: %v", text, err)
	}
	for _, call := range []struct {
		arch, name string
		nr         int
		ok         bool
	}{
		{"amd64", "read", 0, true}, {"arm64", "read", 63, true}, {"arm64", "open", 0, false}, {"amd64", "ptrce", 0, false}, {"mips", "read", 0, false},
	} {
		if nr, ok := Number(call.arch, call.name); ok != call.ok || ok && nr != call.nr {
			t.Errorf("%+v: %d %t", call, nr, ok)
		}
	}
}

// A84
func TestVerifyReports(t *testing.T) {
	one := func(name string, c clause) *Policy {
		return &Policy{
			target: Target{Arch: "amd64"}, arches: []oci.Arch{oci.ArchX86_64}, defaultErrno: eNOSYS,
			rules: []rule{{[]string{name}, c, "test"}},
		}
	}
	foreign := one("read", allow())
	foreign.arches = []oci.Arch{"SCMP_ARCH_NONE"}
	for _, tc := range []struct {
		name string
		p    *Policy
		want error
	}{
		{"good rule", one("read", allow()), nil},
		{"newer than the linked version", one("file_getattr", allow()), nil},
		{"typo", one("raed", allow()), ErrLibseccomp},
		{"rule equal to the default", one("read", refuse(eNOSYS)), ErrLibseccomp},
		{"argument twice", one("read", allow(eq(0, 1), ne(0, 2))), ErrLibseccomp},
		{"argument 6", one("read", allow(eq(6, 1))), ErrLibseccomp},
		{"unknown arch", foreign, ErrLibseccomp},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := Verify(tc.p); !errors.Is(err, tc.want) {
				t.Errorf("error %v, want %v", err, tc.want)
			}
		})
	}
}

// A file's filter can be longer than the kernel takes; the control is most of it.
func TestVerifyCountsInstructions(t *testing.T) {
	most := conditions(1000, "madvise", 1)
	for rules, want := range map[string]error{most: nil, most + "," + conditions(14, "lseek", 0, 1, 2): ErrTooLong} {
		file := strings.Replace(minimal(rules), `"SCMP_ARCH_X86_64"`, `"SCMP_ARCH_X86_64","SCMP_ARCH_X86","SCMP_ARCH_X32"`, 1)
		p, err := custom(t, Target{Arch: "amd64"}, file, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := Verify(p); !errors.Is(err, want) {
			t.Errorf("%d bytes: %v", len(file), err)
		}
	}
}

// Every call that the linked libseccomp knows has a rule, so that no answer is left to a default.
func TestEveryKnownCallHasARule(t *testing.T) {
	forPolicies(t, func(t *testing.T, p *Policy, abi string) {
		named := map[string]bool{}
		for _, r := range p.rules {
			for _, name := range r.names {
				named[name] = true
			}
		}
		judged := map[string]bool{}
		for _, d := range differences {
			for _, name := range d.names {
				judged[name] = true
			}
		}
		for _, name := range numbers(abi) {
			if !named[name] && !judged[name] {
				t.Errorf("%s has no rule", name)
			}
		}
	})
}

// variants are harness files of every kind; a nil file is none.
func variants(t *testing.T) map[string]struct {
	s    harness.Seccomp
	file []byte
} {
	return map[string]struct {
		s    harness.Seccomp
		file []byte
	}{
		"default": {},
		"lists": {s: harness.Seccomp{
			Allow: []string{"ptrace", "ioctl", "personality", "clone3", "mbind", "io_uring_setup", "file_getattr"}, Deny: []string{"chmod", "pidfd_send_signal", "socketpair"},
		}},
		"nested": {s: harness.Seccomp{Profile: "nested", Deny: []string{"setns"}}},
		"engine": {harness.Seccomp{Profile: "docker.json", Allow: []string{"mbind"}}, engineDefault(t)},
		"narrow": {harness.Seccomp{Profile: "narrow.json"}, []byte(minimal(`{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[{"index":1,"value":21505,"op":"SCMP_CMP_EQ"}]},
			{"names":["chmod","fchmodat"],"action":"SCMP_ACT_ERRNO","errnoRet":95},{"name":"setpriority","action":"SCMP_ACT_ALLOW","args":[{"index":2,"value":5,"op":"SCMP_CMP_EQ"}]}`))},
	}
}

// The compiled BPF decides as Decide does, for every call number of every ABI, whatever
// the harness file says. i386 is where it would not by itself: there libseccomp also
// derives socketcall rules from those for socket.
func TestCompiledFilterEqualsPolicy(t *testing.T) {
	for variant, v := range variants(t) {
		for name, target := range targets {
			target.File = v.file
			p := mustOpen(t, v.s, target)
			if err := Verify(p); err != nil {
				t.Fatalf("%s: %v", variant, err)
			}
			program, err := bpf(p)
			if err != nil {
				t.Fatal(err)
			}
			if len(program) > 8*4096 {
				t.Errorf("%s: %d instructions are more than the kernel takes", variant, len(program)/8)
			}
			forABIs(t, variant+"/"+name, p, func(t *testing.T, p *Policy, abi string) { compareDecisions(t, p, program, abi) })
		}
	}
}

func compareDecisions(t *testing.T, p *Policy, program []byte, abi string) {
	t.Helper()
	known, compared := numbers(abi), 0
	for _, nr := range allNumbers(abi) {
		name, ok := known[nr]
		if !ok {
			name = "unknown"
		}
		for _, args := range argumentsFor(p, name) {
			got := run(t, program, data(abi, nr, args))
			v := p.Decide(abi, name, args)
			want := uint32(retErrno | uint32(v.Errno))
			if v.Allowed() {
				want = retAllow
			}
			if got != want {
				t.Fatalf("%s (%d) %#x: filter %#x, policy %+v", name, nr, args, got, v)
			}
			compared++
		}
	}
	if compared < 10000 {
		t.Errorf("only %d decisions compared", compared)
	}
}

// An ABI that is not listed is killed by libseccomp: what Decide says of it.
func TestForeignABIIsKilled(t *testing.T) {
	p := mustCompile(t, targets["amd64-podman"])
	program, err := bpf(p)
	if err != nil {
		t.Fatal(err)
	}
	if got := run(t, program, data("arm", 3, [6]uint64{})); got != retKillThread {
		t.Errorf("verdict %#x", got)
	}
}

func argumentsFor(p *Policy, name string) [][6]uint64 {
	for _, r := range p.rules {
		if slices.Contains(r.names, name) && len(r.clause.args) > 0 {
			return samples()
		}
	}
	if name == "unknown" {
		return [][6]uint64{{}, {1, 2, 3, 4, 5, 6}}
	}
	subset := [][6]uint64{{}, {^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0)}}
	for first := range uint64(64) { // socketcall's and ipc's sub-calls
		subset = append(subset, [6]uint64{first, 0x1000})
	}
	return subset
}

var (
	libseccompABI = map[string]libseccomp.ScmpArch{
		"amd64": libseccomp.ArchAMD64, "386": libseccomp.ArchX86, "x32": libseccomp.ArchX32,
		"arm64": libseccomp.ArchARM64, "arm": libseccomp.ArchARM,
	}
	// auditArch holds AUDIT_ARCH_* of linux/audit.h; x32 is told by its numbers.
	auditArch = map[string]uint32{
		"amd64": 0xc000003e, "386": 0x40000003, "x32": 0xc000003e, "arm64": 0xc00000b7, "arm": 0x40000028,
	}
)

// allNumbers returns every number that a call of the ABI may have, and some that none has.
func allNumbers(abi string) []uint32 {
	ranges := [][2]uint32{{0, 1024}}
	switch abi {
	case "x32":
		ranges = [][2]uint32{{0x40000000, 0x40000400}}
	case "arm":
		ranges = append(ranges, [2]uint32{0xf0000, 0xf0010}) // the ABI's private calls
	}
	var all []uint32
	for _, r := range ranges {
		for nr := r[0]; nr < r[1]; nr++ {
			all = append(all, nr)
		}
	}
	return all
}

// numbers returns the ABI's calls by number, as the linked libseccomp knows them.
func numbers(abi string) map[uint32]string {
	known := map[uint32]string{}
	for _, nr := range allNumbers(abi) {
		if name, err := libseccomp.ScmpSyscall(nr).GetNameByArch(libseccompABI[abi]); err == nil {
			known[nr] = name
		}
	}
	return known
}

// data is struct seccomp_data of linux/seccomp.h.
func data(abi string, nr uint32, args [6]uint64) []byte {
	b := make([]byte, 64)
	binary.LittleEndian.PutUint32(b, nr)
	binary.LittleEndian.PutUint32(b[4:], auditArch[abi])
	for i, a := range args {
		// The kernel widens arm's registers with zeros; x32 has whole ones, and so has a 64-bit program
		// that makes an i386 call (int $0x80), of which the call itself then reads the low halves.
		if abi == "arm" {
			a &= 0xffffffff
		}
		binary.LittleEndian.PutUint64(b[16+8*i:], a)
	}
	return b
}

// SECCOMP_RET_* of linux/seccomp.h.
const (
	retKillThread = 0x00000000
	retErrno      = 0x00050000
	retAllow      = 0x7fff0000
)

// run evaluates the part of classic BPF that libseccomp emits.
func run(t *testing.T, program, data []byte) uint32 {
	t.Helper()
	var acc uint32
	for pc := 0; ; pc++ {
		if 8*pc+8 > len(program) {
			t.Fatalf("program of %d bytes left at %d", len(program), pc)
		}
		ins := program[8*pc:]
		code, k := binary.LittleEndian.Uint16(ins), binary.LittleEndian.Uint32(ins[4:])
		jump := func(cond bool) {
			pc += int(ins[3])
			if cond {
				pc += int(ins[2]) - int(ins[3])
			}
		}
		switch code {
		case 0x20: // ld [k]
			acc = binary.LittleEndian.Uint32(data[k:])
		case 0x54: // and k
			acc &= k
		case 0x05: // ja
			pc += int(k)
		case 0x15:
			jump(acc == k)
		case 0x25:
			jump(acc > k)
		case 0x35:
			jump(acc >= k)
		case 0x45:
			jump(acc&k != 0)
		case 0x06: // ret k
			return k
		default:
			t.Fatal(fmt.Errorf("instruction %#x at %d", code, pc))
		}
	}
}
