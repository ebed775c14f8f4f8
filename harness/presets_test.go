package harness_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

// TestPresets holds the catalogue to its form; netpolicy's TestPresets reads the entries.
func TestPresets(t *testing.T) {
	names := harness.PresetNames()
	if !slices.IsSorted(names) || len(slices.Compact(slices.Clone(names))) != len(names) {
		t.Errorf("not sorted, or a name twice: %q", names)
	}
	for _, p := range harness.Presets() {
		t.Run(p.Name, func(t *testing.T) {
			if found, ok := harness.FindPreset(p.Name); !ok || !cmp.Equal(found, p) {
				t.Errorf("found %+v", found)
			}
			if p.Name != strings.ToLower(p.Name) || p.Description == "" || p.Source == "" || strings.Contains(p.Description+p.Source, "\n") {
				t.Errorf("%+v", p)
			}
			if p.Verified {
				t.Error("nothing here ran its CLI with this list alone")
			}
			switch p.Kind {
			case harness.ProviderPreset:
				if len(p.Allow) == 0 {
					t.Error("no entry")
				}
			case harness.PackageManagerPreset:
				if len(p.Allow) != 0 {
					t.Error("entries of a package manager are the caller's own")
				}
			default:
				t.Errorf("kind %q", p.Kind)
			}
		})
	}
	harness.Presets()[0].Name = "changed"
	if harness.PresetNames()[0] == "changed" {
		t.Error("the caller's list is the catalogue itself")
	}
	if _, ok := harness.FindPreset("nothing"); ok {
		t.Error("found nothing")
	}
}

func TestPresetProblems(t *testing.T) {
	for name, tt := range map[string]struct{ list, path, text string }{
		"slip":        {`["claude","codx"]`, "$.egress.presets[1]", `$.egress.presets[1]: no preset has this name, got "codx"; did you mean "codex"?`},
		"capital":     {`["Claude"]`, "$.egress.presets[0]", `did you mean "claude"?`},
		"far off":     {`["everything-there-is"]`, "$.egress.presets[0]", "agentshim presets lists them"},
		"twice":       {`["npm","claude","npm"]`, "$.egress.presets[2]", "is there twice"},
		"empty":       {`[""]`, "$.egress.presets[0]", ""},
		"not a name":  {`[1]`, "$.egress.presets[0]", ""},
		"not a list":  {`"claude"`, "$.egress.presets", ""},
		"unknown two": {`["x","x"]`, "$.egress.presets[1]", "no preset has this name"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parse(with(`"egress":{"presets":` + tt.list + `}`))
			if err == nil {
				t.Fatal("accepted")
			}
			for _, p := range list(t, err) {
				if p.Path == tt.path && strings.Contains(p.Error(), tt.text) {
					return
				}
			}
			t.Errorf("%v", err)
		})
	}
}
