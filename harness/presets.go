package harness

import (
	_ "embed" // the catalogue
	"encoding/json"
	"slices"
	"sync"
)

// Kinds of preset.
const (
	// ProviderPreset is the hosts that one agent's CLI needs for its models and to sign in.
	ProviderPreset = "provider"
	// PackageManagerPreset is hosts that only the caller's own configuration knows.
	PackageManagerPreset = "package-manager"
)

// Preset is a named list of targets for egress.presets. The lists leave out
// telemetry, updates and package registries.
type Preset struct {
	Name        string `json:"name"`
	Kind        string `json:"kind"`
	Description string `json:"description"`
	// Allow holds allow entries, HOST[:PORT], sorted; none for a package manager.
	Allow []string `json:"allow,omitempty"`
	// Source says where the list is from, of a package manager what is read.
	Source string `json:"source"`
	// Verified says that the CLI itself was run with this list and nothing else.
	Verified bool `json:"verified"`
}

//go:embed presets.json
var presetsJSON []byte

// catalogue is presets.json; a test holds it to its form.
var catalogue = sync.OnceValue(func() []Preset {
	var list []Preset
	if err := json.Unmarshal(presetsJSON, &list); err != nil {
		panic("harness: presets.json: " + err.Error())
	}
	return list
})

// Presets are all presets, sorted by name. The caller owns the list, not what its
// elements hold.
func Presets() []Preset { return slices.Clone(catalogue()) }

// PresetNames are the names that egress.presets may hold, sorted.
func PresetNames() []string {
	names := make([]string, 0, len(catalogue()))
	for _, p := range catalogue() {
		names = append(names, p.Name)
	}
	return names
}

// FindPreset gives the preset of that name, false where there is none.
func FindPreset(name string) (Preset, bool) {
	i := slices.IndexFunc(catalogue(), func(p Preset) bool { return p.Name == name })
	if i < 0 {
		return Preset{}, false
	}
	return catalogue()[i], true
}

// presets judges the names of $.egress.presets.
func (c *checker) presets() {
	names := PresetNames()
	for i, name := range c.h.Egress.Presets {
		at := element("$.egress.presets", i)
		if !slices.Contains(names, name) {
			remedy := c.didYouMean(name, names)
			if remedy == "" {
				remedy = "agentshim presets lists them"
			}
			c.fault(at, name, "no preset has this name", remedy)
			continue
		}
		if slices.Contains(c.h.Egress.Presets[:i], name) {
			c.fault(at, name, "is there twice", "remove one of them")
		}
	}
}
