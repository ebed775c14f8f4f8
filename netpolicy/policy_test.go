package netpolicy

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

func TestCompile(t *testing.T) {
	for mode, want := range map[string]error{"": nil, "deny-all": nil, "open": ErrMode, "allow-list": ErrMode, "network": ErrMode, "x": ErrMode} {
		t.Run(mode, func(t *testing.T) {
			p, err := Compile(harness.Egress{Mode: mode}, nil)
			if !errors.Is(err, want) {
				t.Fatalf("%v, want %v", err, want)
			}
			if err == nil && p.Mode != DenyAll {
				t.Errorf("mode %q", p.Mode)
			}
		})
	}
}

func TestExtraInterfaces(t *testing.T) {
	p, err := Compile(harness.Egress{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ found, want []string }{
		{[]string{"lo"}, []string{}},
		{[]string{"lo", "sit0", "tunl0"}, []string{}},
		{[]string{"eth0", "lo"}, []string{"eth0"}},
		{[]string{"lo0"}, []string{"lo0"}},
	} {
		if diff := cmp.Diff(c.want, p.ExtraInterfaces(c.found)); diff != "" {
			t.Errorf("%v: %s", c.found, diff)
		}
	}
}

func TestRefused(t *testing.T) {
	for outcome, want := range map[string]bool{"ENETUNREACH": true, "EPERM": true, "open": false, "timeout": false, "": false} {
		if (Policy{}).Refused(outcome) != want {
			t.Errorf("%q", outcome)
		}
	}
}
