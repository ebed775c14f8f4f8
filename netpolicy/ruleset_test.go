package netpolicy

import (
	"flag"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the goldens in testdata")

// TestIptablesText: the golden's diff is the security review.
func TestIptablesText(t *testing.T) {
	const file = "testdata/open.rules"
	got := OpenRules(1053, 1080).Iptables()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Error(diff)
	}
}

// TestRulesRoundTrip: what exprs writes, packetRule reads.
func TestRulesRoundTrip(t *testing.T) {
	for _, c := range OpenRules(1053, 1080).Chains {
		for _, r := range c.Rules {
			got, err := packetRule(r.exprs(c.IPv6), c.IPv6)
			if err != nil || got != r {
				t.Errorf("%+v gives %+v, %v", r, got, err)
			}
		}
	}
}
