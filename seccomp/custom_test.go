package seccomp

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	moby "github.com/moby/profiles/seccomp"
	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentshim/agentshim/harness"
)

// engineDefault is Docker's own profile, as its file.
func engineDefault(t *testing.T) []byte {
	t.Helper()
	return []byte(mustJSON(t, moby.DefaultProfile()))
}

// custom compiles a profile file.
func custom(t *testing.T, target Target, file string, allow, deny []string) (*Policy, error) {
	t.Helper()
	target.File = []byte(file)
	return Compile(harness.Seccomp{Profile: "p.json", Allow: allow, Deny: deny}, target)
}

// minimal is a file that allows the needed calls and what rules say.
func minimal(rules string) string {
	if rules != "" {
		rules = "," + rules
	}
	names, _ := json.Marshal(neededCalls)
	return fmt.Sprintf(`{"defaultAction":"SCMP_ACT_ERRNO","architectures":["SCMP_ARCH_X86_64","SCMP_ARCH_AARCH64"],"syscalls":[{"names":%s,"action":"SCMP_ACT_ALLOW"}%s]}`, names, rules)
}

// conditions are n rules that allow a call, each for other arguments.
func conditions(n int, call string, arguments ...int) string {
	rules := make([]string, n)
	for i := range rules {
		var args []string
		for _, index := range arguments {
			args = append(args, fmt.Sprintf(`{"index":%d,"value":%d,"valueTwo":%d,"op":"SCMP_CMP_MASKED_EQ"}`, index, 1<<16|i, i))
		}
		rules[i] = fmt.Sprintf(`{"name":%q,"action":"SCMP_ACT_ALLOW","args":[%s]}`, call, strings.Join(args, ","))
	}
	return strings.Join(rules, ",")
}

// accepts are the names that must be accepted.
func accepts(openings []Opening) []string {
	var out []string
	for _, o := range openings {
		if o.NeedsAccept {
			out = append(out, o.Name)
		}
	}
	return out
}

// What the sandboxes of an agent's own need is open; what else the default refuses is not.
func TestNested(t *testing.T) {
	forTargets(t, func(t *testing.T, target Target) {
		p, control := mustOpen(t, harness.Seccomp{Profile: "nested"}, target), mustCompile(t, target)
		for _, name := range []string{"unshare", "setns", "mount", "umount2", "pivot_root", "chroot"} {
			wantVerdict(t, control, "", name, [6]uint64{}, syscall.EPERM)
			wantVerdict(t, p, "", name, [6]uint64{}, allowed)
		}
		newUser := [6]uint64{cloneNewUser | uint64(syscall.SIGCHLD)}
		wantVerdict(t, control, "", "clone", newUser, syscall.EPERM)
		wantVerdict(t, p, "", "clone", newUser, allowed)
		opened := map[string]bool{}
		for _, d := range nested {
			for _, name := range d.names {
				opened[name] = true
			}
		}
		for name, j := range control.judged {
			if !opened[name] && !cmp.Equal(j, p.judged[name], cmp.AllowUnexported(judgement{}, clause{})) {
				t.Errorf("%s changed", name)
			}
		}
		for _, name := range []string{"clone3", "fsopen", "move_mount", "open_tree"} {
			wantVerdict(t, p, "", name, [6]uint64{}, syscall.ENOSYS)
		}
		if got := accepts(p.Openings()); !slices.Equal(got, []string{"nested-seccomp"}) || p.Summary() != "profile nested" {
			t.Errorf("openings %q, summary %q", got, p.Summary())
		}
	})
}

// TestLooseMounts: both halves are needed, a namespace and a way to drop its mounts.
func TestLooseMounts(t *testing.T) {
	forTargets(t, func(t *testing.T, target Target) {
		for name, c := range map[string]struct {
			s    harness.Seccomp
			want bool
		}{
			"default":                {harness.Seccomp{}, false},
			"nested":                 {harness.Seccomp{Profile: "nested"}, true},
			"nested without umount":  {harness.Seccomp{Profile: "nested", Deny: []string{"umount", "umount2"}}, false},
			"a namespace alone":      {harness.Seccomp{Allow: []string{"unshare"}}, false},
			"umount2 alone":          {harness.Seccomp{Allow: []string{"umount2"}}, false},
			"unshare and umount2":    {harness.Seccomp{Allow: []string{"unshare", "umount2"}}, true},
			"clone and umount2":      {harness.Seccomp{Allow: []string{"clone", "umount2"}}, true},
			"clone3, with any flags": {harness.Seccomp{Allow: []string{"clone3", "umount2"}}, true},
		} {
			p, err := Compile(c.s, target)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if got := p.LooseMounts(); got != c.want {
				t.Errorf("%s: %v", name, got)
			}
		}
	})
}

// Docker's own profile as a file: what it opens beyond ours is named, one by one, and
// agentshim's conditions stay.
func TestCustomEngineDefault(t *testing.T) {
	forTargets(t, func(t *testing.T, target Target) {
		p, err := custom(t, target, string(engineDefault(t)), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := accepts(p.Openings()); !slices.Equal(got, []string{"custom-seccomp", "syscall:process_vm_readv", "syscall:process_vm_writev", "syscall:ptrace"}) {
			t.Errorf("openings %q", got)
		}
		if got := p.Remarks(); len(got) != 1 || !strings.HasSuffix(got[0], "conditions stay: ioctl ioprio_set pidfd_send_signal prlimit64 rt_sigqueueinfo "+
			"rt_tgsigqueueinfo sched_setaffinity sched_setattr sched_setparam sched_setscheduler setpriority socket socketcall socketpair") {
			t.Errorf("remarks %q", got)
		}
		control := mustCompile(t, target)
		for _, r := range control.rules {
			for _, name := range r.names {
				j := control.judged[name]
				if !j.some(oci.ActAllow) || len(j.clauses) == 1 && len(j.clauses[0].args) == 0 {
					continue
				}
				for _, args := range samples() {
					a, b := control.Decide("", name, args), p.Decide("", name, args)
					if a.Allowed() != b.Allowed() {
						t.Fatalf("%s%#x: default %+v, file %+v", name, args, a, b)
					}
				}
			}
		}
		for _, name := range []string{"socketcall", "rt_sigqueueinfo", "rt_tgsigqueueinfo"} {
			wantVerdict(t, p, "", name, [6]uint64{}, control.Decide("", name, [6]uint64{}).Errno)
		}
		wantVerdict(t, p, "", "clone3", [6]uint64{}, syscall.ENOSYS)
	})
}

// Podman's file has keys that Docker's format has not.
func TestCustomPodmansFile(t *testing.T) {
	const file = "/usr/share/containers/seccomp.json"
	data, err := os.ReadFile(file)
	if err != nil {
		t.Skip(err)
	}
	if _, err := custom(t, Target{Arch: "amd64"}, string(data), nil, nil); !errors.Is(err, ErrFile) || !strings.Contains(err.Error(), "no key of Docker's format") {
		t.Error(err)
	}
}

func TestCustomNarrows(t *testing.T) {
	forTargets(t, func(t *testing.T, target Target) {
		p, err := custom(t, target, minimal(`{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[{"index":1,"value":21505,"op":"SCMP_CMP_EQ"}]},
			{"names":["chmod","fchmodat"],"action":"SCMP_ACT_ERRNO","errnoRet":95},{"name":"setpriority","action":"SCMP_ACT_ALLOW","args":[{"index":2,"value":5,"op":"SCMP_CMP_EQ"}]}`), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := accepts(p.Openings()); !slices.Equal(got, []string{"custom-seccomp"}) {
			t.Errorf("openings %q", got)
		}
		wantVerdict(t, p, "", "ioctl", [6]uint64{0, 21505}, allowed)
		wantVerdict(t, p, "", "ioctl", [6]uint64{0, tiocSTI}, syscall.EPERM)
		wantVerdict(t, p, "", "ioctl", [6]uint64{0, 21506}, syscall.Errno(p.defaultErrno))
		wantVerdict(t, p, "", "setpriority", [6]uint64{0, 0, 5}, allowed)
		wantVerdict(t, p, "", "setpriority", [6]uint64{0, 0, 6}, syscall.Errno(p.defaultErrno))
		wantVerdict(t, p, "", "setpriority", [6]uint64{0, 7, 5}, syscall.EPERM)
		wantVerdict(t, p, "", "fchmodat", [6]uint64{}, syscall.EOPNOTSUPP)
		wantVerdict(t, p, "", "chown", [6]uint64{}, syscall.EPERM)
		wantVerdict(t, p, "", "prlimit64", [6]uint64{1}, syscall.EPERM)
		wantVerdict(t, p, "", "socket", [6]uint64{40}, syscall.EAFNOSUPPORT)
		if len(p.arches) != 1 {
			t.Errorf("arches %v", p.arches)
		}
	})
}

// allow and deny hold over a file: what the default policy allows is harmless to add,
// a denied call opens nothing.
func TestCustomWithLists(t *testing.T) {
	file := minimal(`{"names":["ptrace","bpf"],"action":"SCMP_ACT_ALLOW"}`)
	p, err := custom(t, Target{Arch: "amd64"}, file, []string{"chmod"}, []string{"bpf"})
	if err != nil {
		t.Fatal(err)
	}
	if got := accepts(p.Openings()); !slices.Equal(got, []string{"custom-seccomp", "syscall:ptrace"}) || len(p.Openings()) != 3 {
		t.Errorf("openings %+v", p.Openings())
	}
	wantVerdict(t, p, "", "chmod", [6]uint64{}, allowed)
	wantVerdict(t, p, "", "ptrace", [6]uint64{}, allowed)
	wantVerdict(t, p, "", "bpf", [6]uint64{}, syscall.EPERM)
	if want := `profile "p.json"; also allows chmod; also denies bpf`; p.Summary() != want {
		t.Errorf("summary %q", p.Summary())
	}
}

func TestCustomRefuses(t *testing.T) {
	without := func(drop string) string {
		return strings.Replace(minimal(""), `"`+drop+`",`, "", 1)
	}
	for _, tc := range []struct {
		name, file, text string
		kind             error
	}{
		{"empty", ``, "not valid JSON in line 1", ErrFile},
		{"a list", `[]`, "has a value of the wrong kind", ErrFile},
		{"null", `null`, "defaultAction", ErrFile},
		{"no rules", `{"defaultAction":"SCMP_ACT_ERRNO"}`, "execve", ErrNeeded},
		{"more than one value", minimal("") + `{}`, "not valid JSON", ErrFile},
		{"default allow", strings.Replace(minimal(""), "SCMP_ACT_ERRNO", "SCMP_ACT_ALLOW", 1), "defaultAction", ErrFile},
		{"default kill", strings.Replace(minimal(""), "SCMP_ACT_ERRNO", "SCMP_ACT_KILL", 1), "defaultAction", ErrFile},
		{"kill", minimal(`{"names":["bpf"],"action":"SCMP_ACT_KILL_PROCESS"}`), "syscalls[1].action", ErrFile},
		{"notify", minimal(`{"names":["bpf"],"action":"SCMP_ACT_NOTIFY"}`), "syscalls[1].action", ErrFile},
		{"trace", minimal(`{"names":["bpf"],"action":"SCMP_ACT_TRACE"}`), "syscalls[1].action", ErrFile},
		{"listener", strings.Replace(minimal(""), "{", `{"listenerPath":"/x",`, 1), "listenerPath", ErrFile},
		{"flags", strings.Replace(minimal(""), "{", `{"flags":["SECCOMP_FILTER_FLAG_SPEC_ALLOW"],`, 1), "flags", ErrFile},
		{"unknown key", strings.Replace(minimal(""), "{", `{"defaultErrno":"EPERM",`, 1), `"/defaultErrno" is no key`, ErrFile},
		{"key in another case", strings.Replace(minimal(""), "defaultAction", "DefaultAction", 1), `"/DefaultAction" is no key`, ErrFile},
		{"key twice", strings.Replace(minimal(""), "{", `{"defaultAction":"SCMP_ACT_ERRNO",`, 1), "given twice", ErrFile},
		{"both architectures", strings.Replace(minimal(""), "{", `{"archMap":[{"architecture":"SCMP_ARCH_X86_64","subArchitectures":[]}],`, 1), "architectures and archMap", ErrFile},
		{"another architecture", strings.Replace(minimal(""), `"SCMP_ARCH_X86_64",`, "", 1), "not for amd64", ErrFile},
		{"errno 0", minimal(`{"names":["bpf"],"action":"SCMP_ACT_ERRNO","errnoRet":0}`), "errnoRet", ErrFile},
		{"large errno", minimal(`{"names":["bpf"],"action":"SCMP_ACT_ERRNO","errnoRet":65536}`), "errnoRet", ErrFile},
		{"negative errno", minimal(`{"names":["bpf"],"action":"SCMP_ACT_ERRNO","errnoRet":-1}`), "errnoRet", ErrFile},
		{"errno of allow", minimal(`{"names":["chmod"],"action":"SCMP_ACT_ALLOW","errnoRet":1}`), "errnoRet", ErrFile},
		{"null rule", minimal(`null`), "syscalls[1] is null", ErrFile},
		{"no name", minimal(`{"action":"SCMP_ACT_ALLOW"}`), "names or name", ErrFile},
		{"argument twice", minimal(`{"names":["chmod"],"action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":1,"op":"SCMP_CMP_NE"},{"index":0,"value":2,"op":"SCMP_CMP_NE"}]}`), "syscalls[1].args", ErrFile},
		{"argument 6", minimal(`{"names":["chmod"],"action":"SCMP_ACT_ALLOW","args":[{"index":6,"value":1,"op":"SCMP_CMP_NE"}]}`), "syscalls[1].args", ErrFile},
		{"unknown comparison", minimal(`{"names":["chmod"],"action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":1,"op":"=="}]}`), "syscalls[1].args", ErrFile},
		{"new kernel", minimal(`{"names":["chmod"],"action":"SCMP_ACT_ALLOW","includes":{"minKernel":"6.1"}}`), "minKernel", ErrFile},
		{"typo", minimal(`{"names":["chmodd"],"action":"SCMP_ACT_ALLOW"}`), `"chmodd", did you mean "chmod"?`, ErrName},
		{"contradiction", minimal(`{"names":["chmod"],"action":"SCMP_ACT_ALLOW"},{"names":["chmod"],"action":"SCMP_ACT_ERRNO","errnoRet":1}`), "contradict", ErrFile},
		{"conditional contradiction", minimal(`{"names":["chmod"],"action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":1,"op":"SCMP_CMP_GT"}]},{"names":["chmod"],"action":"SCMP_ACT_ERRNO","errnoRet":2,"args":[{"index":0,"value":5,"op":"SCMP_CMP_EQ"}]}`), "contradict", ErrFile},
		{"not to be combined", minimal(`{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[{"index":1,"value":5000,"op":"SCMP_CMP_GT"}]}`), "can't be combined", ErrFile},
		{"without execve", without("execve"), "execve must be allowed", ErrNeeded},
		{"without a family", strings.Replace(minimal(`{"names":["socket"],"action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":1,"op":"SCMP_CMP_EQ"}]}`), `"socket",`, "", 1), "socket must be allowed", ErrNeeded},
		{"without mmap", without("mmap"), "mmap must be allowed", ErrNeeded},
		{"hostile text", `{"defaultAction":"\u001b]0;x\u0007"}`, `defaultAction "\x1b]0;x\a"`, ErrFile},
		{"hostile key", `{"\u001b]0;x\n":1}`, `is no key`, ErrFile},
		{"too large", strings.Repeat(" ", MaxFile+1), "larger than", ErrFile},
		{"too many rules", minimal(strings.TrimSuffix(strings.Repeat(`{"names":["chmod"],"action":"SCMP_ACT_ALLOW"},`, maxRules), ",")), "more than", ErrFile},
		{"two arguments each", minimal(conditions(maxConditions, "madvise", 1, 2)), "the rules for madvise are on too many", ErrTooLong},
		{"six arguments each", minimal(conditions(5, "mremap", 0, 1, 2, 3, 4, 5)), "the rules for mremap are on too many", ErrTooLong},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, err := custom(t, Target{Arch: "amd64"}, tc.file, nil, nil)
			var problem *Problem
			if !errors.Is(err, tc.kind) || !errors.As(err, &problem) || p != nil || problem.Path != "$.seccomp.profile" {
				t.Fatalf("policy %v, error %v", p, err)
			}
			if text := err.Error(); !strings.Contains(text, tc.text) || strings.ContainsAny(text, "\x1b\a") || len(text) > 8192 {
				t.Errorf("%q", text)
			}
		})
	}
}

// Rules for capabilities and other architectures are none of this policy's.
func TestCustomResolves(t *testing.T) {
	rules := `{"names":["bpf"],"action":"SCMP_ACT_ALLOW","includes":{"caps":["CAP_BPF"]}},
		{"names":["chmod"],"action":"SCMP_ACT_ALLOW","excludes":{"caps":["CAP_BPF"]}},
		{"names":["ptrace"],"action":"SCMP_ACT_ALLOW","includes":{"arches":["arm64"]}},
		{"names":["s390_pci_mmio_read"],"action":"SCMP_ACT_ALLOW"},
		{"names":["chown"],"action":"SCMP_ACT_ALLOW","includes":{"minKernel":"4.8"}},
		{"names":["lchown"],"action":"SCMP_ACT_ALLOW","excludes":{"minKernel":"4.8"}}`
	p, err := custom(t, Target{Arch: "amd64"}, minimal(rules), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]syscall.Errno{"bpf": syscall.EPERM, "chmod": allowed, "ptrace": syscall.EPERM, "chown": allowed, "lchown": syscall.EPERM} {
		wantVerdict(t, p, "", name, [6]uint64{}, want)
	}
	if got := accepts(p.Openings()); !slices.Equal(got, []string{"custom-seccomp"}) {
		t.Errorf("openings %q", got)
	}
}

// What a policy is rendered as is a file that says the same, but for conditions that stay.
func TestCustomTakesOwnProfile(t *testing.T) {
	forTargets(t, func(t *testing.T, target Target) {
		for _, s := range []harness.Seccomp{{}, {Allow: []string{"ptrace", "clone3"}, Deny: []string{"chmod"}}} {
			want := mustOpen(t, s, target)
			got, err := custom(t, target, string(want.Profile()), nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			if diff := Diff(want, got); len(diff) > 0 {
				t.Errorf("%+v: %v", s, diff)
			}
		}
	})
}

// inside and both must never claim more than holds.
func TestMeetIsSound(t *testing.T) {
	all := sampleArgs()
	values := []uint64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ^uint64(0) - 1, ^uint64(0)}
	for _, x := range all {
		for _, y := range all {
			if inside(x, y) {
				for _, v := range values {
					if holds(x, v) && !holds(y, v) {
						t.Fatalf("%+v is not inside %+v: %d", x, y, v)
					}
				}
			}
			a, b := clause{args: []oci.LinuxSeccompArg{x}}, clause{args: []oci.LinuxSeccompArg{y}}
			if c, ok := both(a, b); ok && !disjoint(a, b) {
				for _, v := range values {
					if c.matches([6]uint64{v}) != (holds(x, v) && holds(y, v)) {
						t.Fatalf("%+v and %+v: %+v for %d", x, y, c, v)
					}
				}
			}
		}
	}
}

// FuzzFile: whatever a profile file holds, it is refused, or the policy allows nothing
// that the default policy refuses without naming it.
func FuzzFile(f *testing.F) {
	b, err := json.Marshal(moby.DefaultProfile())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(minimal("")))
	f.Add([]byte(minimal(`{"names":["ptrace"],"action":"SCMP_ACT_ALLOW"}`)))
	f.Add([]byte(minimal(`{"names":["ioctl"],"action":"SCMP_ACT_ALLOW","args":[{"index":1,"value":255,"valueTwo":18,"op":"SCMP_CMP_MASKED_EQ"}]}`)))
	f.Add([]byte(minimal(conditions(5, "mremap", 0, 1, 2, 3, 4, 5))))
	f.Add([]byte(minimal(`{"name":"prlimit64","action":"SCMP_ACT_ALLOW"},{"names":["chmod"],"action":"SCMP_ACT_ERRNO","errnoRet":38,"excludes":{"caps":["CAP_CHOWN"]}}`)))
	f.Add([]byte(`{"defaultAction":"SCMP_ACT_ERRNO","defaultErrnoRet":38,"archMap":[{"architecture":"SCMP_ARCH_X86_64","subArchitectures":["SCMP_ARCH_X86"]}],
		"syscalls":[{"name":"socket","action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":16,"op":"SCMP_CMP_LE"}],"includes":{"minKernel":"4.8"}}]}`))
	target := Target{Arch: "amd64", Docker: true}
	control, err := Compile(harness.Seccomp{}, target)
	if err != nil {
		f.Fatal(err)
	}
	vectors := samples()
	f.Fuzz(func(t *testing.T, data []byte) {
		target := target
		target.File = data
		p, err := Compile(harness.Seccomp{Profile: "p.json"}, target)
		if err != nil {
			var problem *Problem
			if !errors.As(err, &problem) || errors.Is(err, ErrContradiction) {
				t.Fatalf("%v", err)
			}
			return
		}
		opened := map[string]bool{}
		for _, o := range p.Openings() {
			opened[strings.TrimPrefix(o.Name, "syscall:")] = true
		}
		for name, j := range control.judged {
			if opened[name] || j.whole(oci.ActAllow) || !p.judged[name].some(oci.ActAllow) {
				continue
			}
			theirs, ours := allows(p.judged[name].clauses), allows(j.clauses)
			for _, args := range vectors {
				if anyMatches(theirs, args) && !anyMatches(ours, args) {
					t.Fatalf("%s%#x is open", name, args)
				}
			}
		}
	})
}

func anyMatches(clauses []clause, args [6]uint64) bool {
	return slices.ContainsFunc(clauses, func(c clause) bool { return c.matches(args) })
}
