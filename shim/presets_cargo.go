package shim

import (
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// cargoConfig is what of cargo's configuration names a registry.
type cargoConfig struct {
	Source map[string]struct {
		ReplaceWith string `toml:"replace-with"`
		Registry    string `toml:"registry"`
		Git         string `toml:"git"`
	} `toml:"source"`
	Registries map[string]struct {
		Index string `toml:"index"`
	} `toml:"registries"`
}

// readCargo reads the user's configuration (the Cargo book, "Configuration"), but for
// the files above the working folder, which may be the agent's. An index names the
// host that crates are downloaded from by itself; where that is another one, it needs
// an entry.
func readCargo(r *presetReader) {
	home := r.o.Getenv("CARGO_HOME")
	if home == "" {
		home = strings.Join(r.inHome(".cargo"), "")
	}
	var config cargoConfig
	var file string
	if home != "" {
		config, file = r.cargoConfig(home)
	}
	r.cargoSources(config, file)
	r.cargoIndexes(config, file)
}

// cargoVariable is the variable that overrides a registry's index.
func cargoVariable(registry string) string {
	return "CARGO_REGISTRIES_" + strings.ToUpper(strings.ReplaceAll(registry, "-", "_")) + "_INDEX"
}

// cargoIndexes adds the indexes of registries. A registry's variable wins, and may
// name one that the file does not have.
func (r *presetReader) cargoIndexes(config cargoConfig, file string) {
	r.looked = append(r.looked, "CARGO_REGISTRIES_*_INDEX")
	indexes := map[string]setting{}
	for name, registry := range config.Registries {
		if registry.Index != "" {
			indexes[cargoVariable(name)] = setting{registry.Index, file + ": [registries." + name + "]"}
		}
	}
	for _, name := range r.names() {
		if v := r.o.Getenv(name); v != "" && strings.HasPrefix(name, "CARGO_REGISTRIES_") && strings.HasSuffix(name, "_INDEX") {
			indexes[name] = setting{v, name}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(indexes)) {
		r.cargoURL(indexes[name].text, indexes[name].from)
	}
}

// cargoConfig reads the one file that cargo takes of the two: the older name wins.
func (r *presetReader) cargoConfig(home string) (cargoConfig, string) {
	var config cargoConfig
	for _, name := range []string{"config", "config.toml"} {
		file := filepath.Join(home, name)
		b, ok := r.file(file)
		if !ok {
			continue
		}
		if err := toml.Unmarshal(b, &config); err != nil {
			line := 0
			var at *toml.DecodeError
			if errors.As(err, &at) {
				line, _ = at.Position()
			}
			r.fail(place(file, line), "it is no TOML, or not of cargo's form", "")
			return cargoConfig{}, file
		}
		return config, file
	}
	return config, ""
}

// cargoSources adds what stands in the end for each source that is replaced. A
// source that nothing is replaced with is not asked.
func (r *presetReader) cargoSources(config cargoConfig, file string) {
	for _, name := range slices.Sorted(maps.Keys(config.Source)) {
		if config.Source[name].ReplaceWith == "" {
			continue
		}
		end := name
		for range config.Source {
			if next := config.Source[end].ReplaceWith; next != "" {
				end = next
			}
		}
		if config.Source[end].ReplaceWith != "" {
			r.fail(file+": [source."+name+"]", "its replacements go round in a circle", "")
			continue
		}
		// The end may also be the name of a registry, whose index is added anyway.
		from := file + ": [source." + end + "]"
		for _, u := range []string{config.Source[end].Registry, config.Source[end].Git} {
			if u != "" {
				r.cargoURL(u, from)
			}
		}
	}
}

// cargoURL adds an index: sparse+https://…, or the https URL of a Git repository.
func (r *presetReader) cargoURL(text, from string) {
	text = strings.TrimPrefix(text, "sparse+")
	text = strings.TrimPrefix(text, "registry+")
	r.url(text, from)
}
