package netpolicy

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/agentshim/agentshim/harness"
)

// TestPresets: every entry of the catalogue is a rule for a name on port 443, written
// in the one canonical way, and none is for names that belong to anybody.
func TestPresets(t *testing.T) {
	for _, p := range harness.Presets() {
		if !slices.IsSorted(p.Allow) || len(slices.Compact(slices.Clone(p.Allow))) != len(p.Allow) {
			t.Errorf("%s: not sorted, or an entry twice: %q", p.Name, p.Allow)
		}
		for _, entry := range p.Allow {
			r, err := ParseRule(harness.Allow{Host: entry})
			if err != nil {
				t.Errorf("%s: %v", p.Name, err)
				continue
			}
			if r.Prefix != (netip.Prefix{}) || r.Port != DefaultPort || r.String() != entry+":443" {
				t.Errorf("%s: %q is %v", p.Name, entry, r)
			}
		}
	}
}
