package seccomp

import (
	"errors"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentshim/agentshim/harness"
)

// With all arguments given, Explain's verdict is Decide's; with none, it covers it.
func TestExplainIsDecide(t *testing.T) {
	for _, s := range []harness.Seccomp{{}, {Profile: "nested", Deny: []string{"chmod"}, Allow: []string{"ptrace"}}} {
		p := mustOpen(t, s, targets["amd64-docker"])
		for name, j := range p.judged {
			vectors := samples()
			if len(j.clauses[0].args) == 0 {
				vectors = vectors[:1]
			}
			e, err := p.Explain(name)
			if err != nil || e.Reason == "" {
				t.Fatalf("%s: %+v, %v", name, e, err)
			}
			if e.Verdict == VerdictAllowed != (e.Open == "") {
				t.Errorf("%s: %s, to open: %q", name, e.Verdict, e.Open)
			}
			for _, args := range vectors[:min(len(vectors), 400)] {
				v := p.Decide("", name, args)
				if j.exhaustive && !anyMatches(j.clauses, args) {
					t.Fatalf("%s%#x: no rule", name, args)
				}
				if e.Verdict == VerdictAllowed && !v.Allowed() || e.Verdict == VerdictRefused && v.Allowed() {
					t.Fatalf("%s%#x: %+v, explained as %s", name, args, v, e.Verdict)
				}
				given := map[uint]uint64{}
				for i, a := range args {
					given[uint(i)] = a
				}
				full := p.explain(name, given)
				want := errnoName(uint(v.Errno))
				if v.Allowed() {
					want = VerdictAllowed
				}
				got := full.Otherwise
				for _, r := range full.Rules {
					got = r.Answer
				}
				if got != want || full.Verdict == VerdictConditional {
					t.Fatalf("%s%#x: %s %q, want %q", name, args, full.Verdict, got, want)
				}
			}
		}
	}
}

func TestExplainRefuses(t *testing.T) {
	p := mustCompile(t, targets["amd64-podman"])
	for _, query := range []string{"", "ptrce", "read,", "read,arg0", "read,arg6=1", "read,arg-1=1", "read,family=1", "socket,family=", "socket,family=AF_X", "socket,family=-1", "a\x1b\n,b", strings.Repeat("x", 9000)} {
		e, err := p.Explain(query)
		var problem *Problem
		if !errors.As(err, &problem) || problem.Remedy == "" || e.Call != "" {
			t.Errorf("%.40q: %+v, %v", query, e, err)
		}
		if err != nil && (strings.ContainsAny(err.Error(), "\x1b\n") || len(err.Error()) > 300) {
			t.Errorf("%q", err.Error())
		}
	}
}

func TestExplainText(t *testing.T) {
	p := mustOpen(t, harness.Seccomp{Deny: []string{"chmod"}}, targets["amd64-podman"])
	for query, want := range map[string]string{
		"chmod":                     "take \"chmod\" out of seccomp.deny",
		"prlimit64":                 "if          pid is not 0: EPERM (operation not permitted)\nif          pid = 0: allowed\n",
		"sched_setattr,pid=1":       "answer      EPERM",
		"setpriority,which=0,who=0": "allowed     setpriority with which=0,who=0",
		"ioctl,request=0x5401":      "allowed     ioctl with",
		"clone":                     "flags & CLONE_NEWUSER = CLONE_NEWUSER",
		"personality":               "otherwise   ENOSYS",
	} {
		e, err := p.Explain(query)
		if err != nil || !strings.Contains(e.Text(), want) {
			t.Errorf("%s: %v\n%s", query, err, e.Text())
		}
	}
}

func TestDiff(t *testing.T) {
	target := targets["amd64-podman"]
	a, b := mustCompile(t, target), mustOpen(t, harness.Seccomp{Allow: []string{"ptrace"}, Deny: []string{"chmod"}}, target)
	if got := Diff(a, a); len(got) > 0 {
		t.Errorf("%v", got)
	}
	want := []Change{{"chmod", VerdictAllowed, "EPERM"}, {"ptrace", "EPERM", VerdictAllowed}}
	if got := Diff(a, b); len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("%v", got)
	}
	engine, err := EngineDefault(target)
	if err != nil {
		t.Fatal(err)
	}
	opened := 0
	for _, c := range Diff(engine, a) {
		if c.B == VerdictAllowed {
			opened++
			t.Errorf("%s is open here and not under the engine's default", c.Call)
		}
	}
	if v := engine.Decide("", "ptrace", [6]uint64{}); v.Action != oci.ActAllow {
		t.Errorf("engine's default: %+v", v)
	}
}
