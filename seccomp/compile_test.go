package seccomp

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	moby "github.com/moby/profiles/seccomp"
	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentshim/agentshim/harness"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// targets holds every flavour; the names are the golden files'.
var targets = map[string]Target{
	"amd64-docker": {Arch: "amd64", Docker: true},
	"amd64-podman": {Arch: "amd64"},
	"arm64-docker": {Arch: "arm64", Docker: true},
	"arm64-podman": {Arch: "arm64"},
}

func mustCompile(t *testing.T, target Target) *Policy {
	t.Helper()
	p, err := Compile(harness.Seccomp{}, target)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestProfileGolden(t *testing.T) {
	for name, target := range targets {
		t.Run(name, func(t *testing.T) {
			got := mustCompile(t, target).Profile()
			path := filepath.Join("testdata", name+".json")
			if *update {
				if err := os.WriteFile(path, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("profile changed (-golden +got):\n%s", diff)
			}
		})
	}
}

func TestRenderingsAreStable(t *testing.T) {
	for name, target := range targets {
		t.Run(name, func(t *testing.T) {
			a, b := mustCompile(t, target), mustCompile(t, target)
			if a.Digest() != b.Digest() || a.Digest() == "" {
				t.Errorf("digests %q and %q", a.Digest(), b.Digest())
			}
			if diff := cmp.Diff(a.OCI(), b.OCI()); diff != "" {
				t.Error(diff)
			}
			a.OCI().Syscalls[0].Names[0] = "changed"
			*a.OCI().Syscalls[1].ErrnoRet = 0
			a.OCI().Architectures[0] = "changed"
			if diff := cmp.Diff(a.OCI(), b.OCI()); diff != "" {
				t.Errorf("a caller changed the policy:\n%s", diff)
			}
		})
	}
	if mustCompile(t, targets["amd64-docker"]).Digest() == mustCompile(t, targets["amd64-podman"]).Digest() {
		t.Error("the flavours share a digest")
	}
}

// C07: the file is one flavour, and says the same as the OCI value.
func TestProfileIsOCIInFileForm(t *testing.T) {
	for name, target := range targets {
		t.Run(name, func(t *testing.T) {
			p := mustCompile(t, target)
			var keys map[string]json.RawMessage
			if err := json.Unmarshal(p.Profile(), &keys); err != nil {
				t.Fatal(err)
			}
			if keys["archMap"] != nil || keys["architectures"] == nil {
				t.Error("want architectures and no archMap")
			}
			if _, ok := keys["defaultErrnoRet"]; ok == target.Docker {
				t.Errorf("defaultErrnoRet present: %t", ok)
			}
			var parsed oci.LinuxSeccomp
			if err := json.Unmarshal(p.Profile(), &parsed); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(p.OCI(), &parsed); diff != "" {
				t.Errorf("file differs from OCI (-oci +file):\n%s", diff)
			}
			loaded, err := moby.LoadProfile(string(p.Profile()), &oci.Spec{})
			if err != nil {
				t.Fatalf("the engine's own parser: %v", err)
			}
			if diff := cmp.Diff(p.OCI(), loaded); diff != "" {
				t.Errorf("the engine's own parser differs (-oci +engine):\n%s", diff)
			}
		})
	}
}

func TestCompileLeavesTheBaseAlone(t *testing.T) {
	base := moby.DefaultProfile()
	before := mustJSON(t, base)
	table := slices.Clone(differences)
	for _, target := range targets {
		if _, err := compile(base, differences, harness.Seccomp{}, target); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(before, mustJSON(t, base)); diff != "" {
		t.Errorf("base changed:\n%s", diff)
	}
	if diff := cmp.Diff(table, differences, cmp.AllowUnexported(difference{}, clause{})); diff != "" {
		t.Errorf("table changed:\n%s", diff)
	}
}

func mustJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestCompileRefuses(t *testing.T) {
	for _, tc := range []struct {
		name   string
		file   harness.Seccomp
		target Target
		want   error
	}{
		{"no architecture", harness.Seccomp{}, Target{}, ErrArch},
		{"foreign architecture", harness.Seccomp{}, Target{Arch: "riscv64"}, ErrArch},
		{"libseccomp's name of the architecture", harness.Seccomp{}, Target{Arch: "x86_64"}, ErrArch},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, err := Compile(tc.file, tc.target)
			if !errors.Is(err, tc.want) || p != nil {
				t.Errorf("policy %v, error %v, want %v", p, err, tc.want)
			}
		})
	}
	if _, err := Compile(harness.Seccomp{Profile: "default"}, Target{Arch: "amd64"}); err != nil {
		t.Errorf("profile default: %v", err)
	}
}

// Every call is judged by exactly one row, so that no row undoes another.
func TestTableNamesEachCallOnce(t *testing.T) {
	seen := map[string]bool{}
	for _, d := range differences {
		if d.reason == "" || len(d.clauses) == 0 {
			t.Errorf("row %q lacks a reason or clauses", d.names)
		}
		if !slices.IsSorted(d.names) {
			t.Errorf("row %q is not sorted", d.names)
		}
		for _, name := range d.names {
			if seen[name] {
				t.Errorf("%s stands in two rows", name)
			}
			seen[name] = true
		}
	}
}

// C08, A77: what check promises holds in every policy, looked at through OCI alone.
func TestNoRuleUndoesAnother(t *testing.T) {
	for name, target := range targets {
		t.Run(name, func(t *testing.T) {
			p := mustCompile(t, target)
			unconditional, conditional := map[string]bool{}, map[string]bool{}
			sawSocketcall := false
			for _, s := range p.OCI().Syscalls {
				if s.Action == oci.ActErrno && *s.ErrnoRet == p.defaultErrno {
					t.Errorf("%q equals the default", s.Names)
				}
				if s.Action != oci.ActErrno && s.Action != oci.ActAllow {
					t.Errorf("%q has action %s", s.Names, s.Action)
				}
				for _, n := range s.Names {
					if unconditional[n] || len(s.Args) == 0 && conditional[n] {
						t.Errorf("%s: a rule without conditions beside another", n)
					}
					unconditional[n] = unconditional[n] || len(s.Args) == 0
					conditional[n] = conditional[n] || len(s.Args) > 0
					sawSocketcall = sawSocketcall || n == "socketcall"
					if n == "socket" && !sawSocketcall {
						t.Error("socket before socketcall")
					}
				}
			}
		})
	}
}

func TestCheckRefuses(t *testing.T) {
	r := func(c ...clause) []rule {
		var rules []rule
		for _, c := range c {
			rules = append(rules, rule{[]string{"call"}, c, "test"})
		}
		return rules
	}
	for _, tc := range []struct {
		name  string
		rules []rule
		ok    bool
	}{
		{"unconditional beside conditional", r(allow(), refuse(ePERM, eq(0, 1))), false},
		{"unconditional beside conditional of one verdict", r(allow(eq(0, 1)), allow()), false},
		{"unconditional twice", r(allow(), allow()), false},
		{"one rule twice", r(allow(eq(0, 1)), allow(eq(0, 1))), false},
		{"equal to the default", r(refuse(eNOSYS)), false},
		{"overlapping ranges", r(allow(gt(1)), refuse(ePERM, gt(5))), false},
		{"value inside a range", r(allow(gt(1)), refuse(ePERM, eq(0, 5))), false},
		{"two values not excluded", r(allow(ne(0, 1)), refuse(ePERM, eq(0, 2))), false},
		{"different arguments", r(allow(eq(0, 1)), refuse(ePERM, ne(1, 1))), false},
		{"value under a mask", r(allow(masked(0, 0xf, 1)), refuse(ePERM, eq(0, 0x21))), false},
		{"masks without a common bit", r(allow(masked(0, 1, 1)), refuse(ePERM, masked(0, 2, 2))), false},
		{"argument twice", r(allow(gt(1), ne(0, 5))), false},
		{"argument 6", r(allow(eq(6, 1))), false},
		{"value beyond 32 bits", r(allow(eq(0, 1<<32))), false},
		{"unknown comparison", r(allow(oci.LinuxSeccompArg{Op: "SCMP_CMP_XX"})), false},
		{"kill", r(clause{action: oci.ActKillProcess}), false},
		{"two errnos", r(refuse(ePERM, gt(1)), refuse(eACCES, gt(2))), false},

		{"equality and its negation", r(allow(eq(0, 1)), refuse(ePERM, ne(0, 1))), true},
		{"apart in the second argument", r(allow(eq(0, 1), eq(1, 0)), refuse(ePERM, eq(0, 1), ne(1, 0))), true},
		{"value below a range", r(allow(eq(0, 1)), refuse(ePERM, gt(1))), true},
		{"masks apart", r(allow(masked(0, 3, 0)), refuse(ePERM, masked(0, 2, 2))), true},
		{"one verdict may overlap", r(refuse(ePERM, masked(0, 1, 1)), refuse(ePERM, masked(0, 2, 2))), true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := check(tc.rules, eNOSYS)
			if tc.ok && err != nil || !tc.ok && !errors.Is(err, ErrContradiction) {
				t.Errorf("error %v, want accepted: %t", err, tc.ok)
			}
		})
	}
}

// sampleArgs are comparisons of one argument with few values, of every kind.
func sampleArgs() []oci.LinuxSeccompArg {
	ops := []oci.LinuxSeccompOperator{
		oci.OpEqualTo, oci.OpNotEqual, oci.OpLessThan, oci.OpLessEqual, oci.OpGreaterThan, oci.OpGreaterEqual, oci.OpMaskedEqual,
	}
	var all []oci.LinuxSeccompArg
	for _, op := range ops {
		for _, v := range []uint64{0, 1, 2, 3, 6, 7, ^uint64(0)} {
			for _, w := range []uint64{0, 1, 2, 5} {
				all = append(all, oci.LinuxSeccompArg{Op: op, Value: v, ValueTwo: w})
			}
		}
	}
	return all
}

// disjoint must never claim it for clauses that one value satisfies.
func TestDisjointIsSound(t *testing.T) {
	all := sampleArgs()
	samples := []uint64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ^uint64(0) - 1, ^uint64(0)}
	for _, a := range all {
		for _, b := range all {
			if !disjoint(clause{args: []oci.LinuxSeccompArg{a}}, clause{args: []oci.LinuxSeccompArg{b}}) {
				continue
			}
			for _, v := range samples {
				if holds(a, v) && holds(b, v) {
					t.Fatalf("%+v and %+v both hold for %d", a, b, v)
				}
			}
		}
	}
}

func TestResolve(t *testing.T) {
	entry := func(name string, in, ex *moby.Filter) *moby.Syscall {
		return &moby.Syscall{
			LinuxSyscall: oci.LinuxSyscall{Names: []string{name}, Action: oci.ActAllow},
			Includes:     in, Excludes: ex,
		}
	}
	kernel := &moby.KernelVersion{Kernel: 99, Major: 1}
	base := &moby.Seccomp{
		ArchMap: moby.DefaultProfile().ArchMap,
		Syscalls: []*moby.Syscall{
			entry("plain", nil, nil),
			entry("with a capability", &moby.Filter{Caps: []string{"CAP_CHOWN"}}, nil),
			entry("without a capability", nil, &moby.Filter{Caps: []string{"CAP_CHOWN"}}),
			entry("this arch", &moby.Filter{Arches: []string{"amd64"}}, nil),
			entry("other arch", &moby.Filter{Arches: []string{"arm64"}}, nil),
			entry("not this arch", nil, &moby.Filter{Arches: []string{"amd64"}}),
			entry("newer kernel", &moby.Filter{MinKernel: kernel}, nil),
			entry("older kernel", nil, &moby.Filter{MinKernel: kernel}),
			{Name: "old form", LinuxSyscall: oci.LinuxSyscall{Action: oci.ActErrno}},
		},
	}
	calls, arches, err := resolve(base, "amd64")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]clause{
		"plain": {allow()}, "without a capability": {allow()}, "this arch": {allow()}, "newer kernel": {allow()},
		"old form": {refuse(ePERM)},
	}
	if diff := cmp.Diff(want, calls, cmp.AllowUnexported(clause{})); diff != "" {
		t.Error(diff)
	}
	if want := []oci.Arch{oci.ArchX86_64, oci.ArchX86, oci.ArchX32}; !slices.Equal(arches, want) {
		t.Errorf("arches %v, want %v", arches, want)
	}
}
