package netpolicy

import (
	"errors"
	"flag"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables/expr"
)

var update = flag.Bool("update", false, "rewrite the goldens in testdata")

// TestIptablesText: the golden's diff is the security review.
func TestIptablesText(t *testing.T) {
	goldenText(t, "testdata/open.rules", OpenRules(1053, 1080).Iptables())
}

func goldenText(t *testing.T, file, got string) {
	t.Helper()
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

// TestForeignExpressions: what no rule is made of is not taken for one.
func TestForeignExpressions(t *testing.T) {
	flags := func(mask, value byte) []expr.Any {
		return matchMasked(load(fieldFlags, 1), []byte{value}, []byte{mask})
	}
	limit := func(change func(*expr.Limit)) []expr.Any {
		l := connectionLimit.expr()
		change(l)
		return []expr.Any{l}
	}
	for name, exprs := range map[string][]expr.Any{
		"another mask":    flags(0x02, 0x02),
		"another flag":    flags(0x17, 0x10),
		"no mask":         {load(fieldFlags, 1), equals([]byte{synOnly})},
		"another state":   matchMasked(&expr.Ct{Key: expr.CtKeySTATE, Register: 1}, make([]byte, 4), stateNew),
		"a mark":          matchMasked(&expr.Ct{Key: expr.CtKeyMARK, Register: 1}, stateNew, stateNew),
		"over":            limit(func(l *expr.Limit) { l.Over = true }),
		"a minute":        limit(func(l *expr.Limit) { l.Unit = expr.LimitTimeMinute }),
		"bytes":           limit(func(l *expr.Limit) { l.Type = expr.LimitTypePktBytes }),
		"a rate too high": limit(func(l *expr.Limit) { l.Rate |= 1 << 32 }),
		"a counter":       {&expr.Counter{}},
	} {
		if got, err := packetRule(exprs, false); !errors.Is(err, ErrReadBack) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	if _, err := packetRule(append(flags(synMask, synOnly), limit(func(*expr.Limit) {})...), false); err != nil {
		t.Errorf("control: %v", err)
	}
}
