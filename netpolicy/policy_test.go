package netpolicy

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

func allow(entries ...string) []harness.Allow {
	var out []harness.Allow
	for _, e := range entries {
		out = append(out, harness.Allow{Host: e})
	}
	return out
}

// TestCompileMode: A55 among it: an empty list opens nothing.
func TestCompileMode(t *testing.T) {
	for name, c := range map[string]struct {
		e    harness.Egress
		mode string
		err  error
	}{
		"zero":            {harness.Egress{}, DenyAll, nil},
		"deny-all":        {harness.Egress{Mode: DenyAll}, DenyAll, nil},
		"empty list":      {harness.Egress{Mode: AllowList}, DenyAll, nil},
		"denied only":     {harness.Egress{Mode: AllowList, Deny: []string{"x.example"}}, DenyAll, nil},
		"list":            {harness.Egress{Mode: AllowList, Allow: allow("a.example")}, AllowList, nil},
		"services only":   {harness.Egress{Mode: AllowList, HostServices: []harness.HostService{{Name: "mcp", Port: 3000}}}, AllowList, nil},
		"open":            {harness.Egress{Mode: Open}, Open, nil},
		"network":         {harness.Egress{Mode: "network"}, AttachNetwork, nil},
		"deny-all, allow": {harness.Egress{Mode: DenyAll, Allow: allow("a.example")}, "", ErrNoEffect},
		"twice":           {harness.Egress{Mode: AllowList, HostServices: []harness.HostService{{Name: "mcp", Port: 3000}, {Name: "mcp", Port: 3000}}}, "", ErrNoEffect},
		"questions":       {harness.Egress{Mode: AllowList, Allow: allow("dns.example:53")}, "", ErrNoEffect},
		"to the host":     {harness.Egress{Mode: AllowList, HostServices: []harness.HostService{{Name: "dns", Port: 53}}}, "", ErrNoEffect},
		"dots":            {harness.Egress{Mode: AllowList, HostServices: []harness.HostService{{Name: "a.b", Port: 3000}}}, "", ErrName},
		"rule":            {harness.Egress{Mode: AllowList, Allow: allow("a.example", "*.com")}, "", ErrRule},
		"deny":            {harness.Egress{Mode: Open, Deny: []string{"http://x"}}, "", ErrRule},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := Compile(c.e, nil, nil)
			if !errors.Is(err, c.err) || err == nil && p.Mode != c.mode {
				t.Errorf("%q %v, want %q %v", p.Mode, err, c.mode, c.err)
			}
		})
	}
}

func TestCompileNamesEveryFault(t *testing.T) {
	_, err := Compile(harness.Egress{
		Mode: AllowList, Allow: allow("ok.example", "*", "https://x.example/"), Deny: []string{"1.2.3"},
		Presets: []string{"p"},
	}, map[string][]harness.Allow{"p": allow("10.0.0.1/8")}, nil)
	for _, path := range []string{"$.egress.allow[1]: ", "$.egress.allow[2]: ", "$.egress.deny[0]: ", "$.egress.presets[0]: "} {
		if err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s is not in %v", path, err)
		}
	}
}

// TestCompileIsStable: order and doubles don't show.
func TestCompileIsStable(t *testing.T) {
	presets := map[string][]harness.Allow{"p": {{Host: "b.example"}, {Host: "c.example", ECH: true}}}
	a, errA := Compile(harness.Egress{Mode: AllowList, Presets: []string{"p"}, Allow: append(allow("b.example", "a.example:22"), harness.Allow{Host: "b.example", Raw: true})}, presets, nil)
	b, errB := Compile(harness.Egress{Mode: AllowList, Presets: []string{"p"}, Allow: append(allow("a.example:22"), harness.Allow{Host: "b.example:443", Raw: true})}, presets, nil)
	if diff := cmp.Diff(a, b, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" || errors.Join(errA, errB) != nil {
		t.Error(diff, errA, errB)
	}
	if len(a.Allow) != 3 || a.Allow[1].Preset != "" || !a.Allow[1].Raw || a.Allow[2].Preset != "p" {
		t.Errorf("%+v", a.Allow)
	}
}

func TestExtraInterfaces(t *testing.T) {
	p, err := Compile(harness.Egress{}, nil, nil)
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
	for outcome, want := range map[string]bool{"EPERM": true, "ECONNRESET": true, "open": false, "timeout": false, "": false} {
		if got := (Policy{}).Refused(outcome); got != want {
			t.Errorf("%q: %v", outcome, got)
		}
	}
}
