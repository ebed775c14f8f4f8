package seccomp

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	moby "github.com/moby/profiles/seccomp"

	"github.com/agentshim/agentshim/harness"
)

func mustOpen(t *testing.T, s harness.Seccomp, target Target) *Policy {
	t.Helper()
	p, err := Compile(s, target)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func forTargets(t *testing.T, f func(t *testing.T, target Target)) {
	t.Helper()
	for name, target := range targets {
		t.Run(name, func(t *testing.T) { f(t, target) })
	}
}

// What is allowed by name reaches the kernel; the control is the default policy.
func TestAllow(t *testing.T) {
	forTargets(t, func(t *testing.T, target Target) {
		s := harness.Seccomp{Allow: []string{"ptrace", "get_mempolicy", "ioctl", "read", "cachestat"}}
		p, control := mustOpen(t, s, target), mustCompile(t, target)
		tioc := [6]uint64{0, tiocSTI}
		for _, call := range []struct {
			name string
			args [6]uint64
			was  syscall.Errno
		}{{"ptrace", [6]uint64{}, syscall.EPERM}, {"get_mempolicy", [6]uint64{}, syscall.ENOSYS}, {"ioctl", tioc, syscall.EPERM}} {
			wantVerdict(t, control, "", call.name, call.args, call.was)
			wantVerdict(t, p, "", call.name, call.args, allowed)
		}
		want := []Opening{
			{"syscall:get_mempolicy", false, "the agent may call get_mempolicy, refused otherwise: NUMA placement, as on a kernel without it; runtimes probe it"},
			{"syscall:ioctl", true, "the agent may call ioctl with any arguments, some of them refused otherwise: no TIOCSTI, no TIOCLINUX: both type into the caller's terminal (CVE-2023-1523)"},
			{"syscall:ptrace", true, "the agent may call ptrace, refused otherwise: reads or changes another process"},
		}
		if diff := cmp.Diff(want, p.Openings()); diff != "" {
			t.Error(diff)
		}
		remarks := []string{
			"seccomp.allow of cachestat has no effect: it is allowed already",
			"seccomp.allow of read has no effect: it is allowed already",
		}
		if diff := cmp.Diff(remarks, p.Remarks()); diff != "" {
			t.Error(diff)
		}
	})
}

func TestDeny(t *testing.T) {
	forTargets(t, func(t *testing.T, target Target) {
		p, control := mustOpen(t, harness.Seccomp{Deny: []string{"ptrace", "fchmodat", "ioctl"}}, target), mustCompile(t, target)
		for _, name := range []string{"fchmodat", "ioctl"} {
			wantVerdict(t, control, "", name, [6]uint64{}, allowed)
			wantVerdict(t, p, "", name, [6]uint64{}, syscall.EPERM)
		}
		if got := p.Remarks(); !slices.Equal(got, []string{"seccomp.deny of ptrace has no effect: it is refused already"}) || len(p.Openings()) > 0 {
			t.Errorf("remarks %q, openings %v", got, p.Openings())
		}
		if p.Summary() != "also denies fchmodat ioctl ptrace" {
			t.Errorf("summary %q", p.Summary())
		}
	})
}

// The lists' order changes nothing, and neither do names that are there twice.
func TestListsAreOrderIndependent(t *testing.T) {
	forTargets(t, func(t *testing.T, target Target) {
		a := mustOpen(t, harness.Seccomp{Allow: []string{"ptrace", "bpf", "mbind"}, Deny: []string{"chmod", "fchmod"}}, target)
		b := mustOpen(t, harness.Seccomp{Allow: []string{"mbind", "ptrace", "bpf", "ptrace"}, Deny: []string{"fchmod", "chmod", "chmod"}}, target)
		if a.Digest() != b.Digest() || a.Summary() != b.Summary() || !slices.Equal(a.Openings(), b.Openings()) || !slices.Equal(a.Remarks(), b.Remarks()) {
			t.Errorf("%s\n%q\n%s\n%q", a.Summary(), a.Remarks(), b.Summary(), b.Remarks())
		}
	})
}

func TestListsRefuse(t *testing.T) {
	for _, tc := range []struct {
		name   string
		file   harness.Seccomp
		want   error
		path   string
		remedy string
	}{
		{"typo", harness.Seccomp{Allow: []string{"bpf", "ptrce"}}, ErrName, "$.seccomp.allow[1]", `did you mean "ptrace"?`},
		{"typo in deny", harness.Seccomp{Deny: []string{"chmodd"}}, ErrName, "$.seccomp.deny[0]", `did you mean "chmod"?`},
		{"another architecture's", harness.Seccomp{Allow: []string{"s390_pci_mmio_read"}}, ErrName, "$.seccomp.allow[0]", "agentshim seccomp show lists the names"},
		{"hostile name", harness.Seccomp{Allow: []string{"\x1b]0;a\n" + strings.Repeat("x", 1000)}}, ErrName, "$.seccomp.allow[0]", "agentshim seccomp show lists the names"},
		{"empty", harness.Seccomp{Deny: []string{""}}, ErrName, "$.seccomp.deny[0]", ""},
		{"both", harness.Seccomp{Allow: []string{"chmod"}, Deny: []string{"chmod"}}, ErrBoth, "$.seccomp.allow[0]", "take it out of one of them"},
		{"needed", harness.Seccomp{Deny: []string{"execve"}}, ErrNeeded, "$.seccomp.deny[0]", "take it out of deny"},
		{"needed under conditions", harness.Seccomp{Deny: []string{"clone"}}, ErrNeeded, "$.seccomp.deny[0]", "take it out of deny"},
		{"another process's limits", harness.Seccomp{Allow: []string{"prlimit64"}}, ErrFixed, "$.seccomp.allow[0]", "take it out of allow"},
		{"another process's scheduling", harness.Seccomp{Allow: []string{"sched_setscheduler"}}, ErrFixed, "$.seccomp.allow[0]", "take it out of allow"},
		{"another process's priority", harness.Seccomp{Allow: []string{"setpriority"}}, ErrFixed, "$.seccomp.allow[0]", "take it out of allow"},
		{"forged signals", harness.Seccomp{Allow: []string{"rt_sigqueueinfo"}}, ErrFixed, "$.seccomp.allow[0]", "take it out of allow"},
		{"every family", harness.Seccomp{Allow: []string{"socket"}}, ErrFixed, "$.seccomp.allow[0]", "take it out of allow"},
		{"every family of i386", harness.Seccomp{Allow: []string{"socketcall"}}, ErrFixed, "$.seccomp.allow[0]", "take it out of allow"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, err := Compile(tc.file, Target{Arch: "amd64"})
			var problem *Problem
			if !errors.Is(err, tc.want) || !errors.As(err, &problem) || p != nil {
				t.Fatalf("policy %v, error %v, want %v", p, err, tc.want)
			}
			if problem.Path != tc.path || tc.remedy != "" && problem.Remedy != tc.remedy {
				t.Errorf("path %s, remedy %q", problem.Path, problem.Remedy)
			}
			if strings.ContainsAny(problem.Error(), "\x1b\n") || len(problem.Error()) > 300 {
				t.Errorf("%q", problem.Error())
			}
		})
	}
	_, err := Compile(harness.Seccomp{Allow: []string{"aa", "prlimit64"}, Deny: []string{"bb", "execve"}}, Target{Arch: "amd64"})
	for _, part := range []string{"allow[0]", "allow[1]", "deny[0]", "deny[1]"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%v does not name %q", err, part)
		}
	}
}

// Every call that moby's profile knows for the architecture is judged, also those that it
// opens with a capability only; so a name that is not judged is none.
func TestEveryNameOfTheBaseIsJudged(t *testing.T) {
	forTargets(t, func(t *testing.T, target Target) {
		p := mustCompile(t, target)
		for _, s := range moby.DefaultProfile().Syscalls {
			if s.Includes != nil && len(s.Includes.Arches) > 0 && !slices.Contains(s.Includes.Arches, target.Arch) {
				continue
			}
			for _, name := range names(s) {
				if _, ok := p.judged[name]; !ok {
					t.Errorf("%s", name)
				}
			}
		}
	})
}

// Every judged call can be allowed or says why not, and denied or says why not; each
// result is a policy without contradictions.
func TestEveryCallCanBeNamed(t *testing.T) {
	target := targets["amd64-docker"]
	for _, name := range slices.Sorted(maps.Keys(mustCompile(t, target).judged)) {
		p, err := Compile(harness.Seccomp{Allow: []string{name}}, target)
		switch {
		case errors.Is(err, ErrFixed):
		case err != nil:
			t.Errorf("allow %s: %v", name, err)
		default:
			wantVerdict(t, p, "", name, [6]uint64{1, 2, 3, 4, 5, 6}, allowed)
		}
		p, err = Compile(harness.Seccomp{Deny: []string{name}}, target)
		switch {
		case errors.Is(err, ErrNeeded) != slices.Contains(neededCalls, name):
			t.Errorf("deny %s: %v", name, err)
		case err == nil && p.judged[name].some(allow().action):
			t.Errorf("deny %s: %+v", name, p.judged[name])
		}
	}
}
