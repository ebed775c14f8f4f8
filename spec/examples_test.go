package spec

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/agentshim/agentshim/harness"
)

// TestExamples: each example plans, and its plan.txt is what that says.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../examples/*/README.md")
	if err != nil || len(files) < 4 {
		t.Fatalf("%d examples: %v", len(files), err)
	}
	for _, file := range files {
		dir := filepath.Dir(file)
		t.Run(filepath.Base(dir), func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join(dir, "harness.json"))
			if err != nil {
				t.Fatal(err)
			}
			h := parse(t, string(text))
			host := dockerRoot()
			host.Image.Ref, host.Image.Env = h.Image, nil
			host.Presets = map[string][]harness.Allow{}
			for _, name := range h.Egress.Presets {
				preset, _ := harness.FindPreset(name)
				for _, entry := range preset.Allow {
					host.Presets[name] = append(host.Presets[name], harness.Allow{Host: entry})
				}
			}
			plan, err := Compile(h, host, Options{})
			if err != nil {
				t.Fatal(err)
			}
			golden(t, filepath.Join(dir, "plan.txt"), plan.Text())
		})
	}
}
