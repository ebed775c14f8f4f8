package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestFind(t *testing.T) {
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"tool": 0o755, "data": 0o644} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!"), mode); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
	for name, want := range map[string]int{
		"tool": 0, filepath.Join(dir, "tool"): 0,
		"data": 1, filepath.Join(dir, "data"): 1, "none": 1, dir: 1, "": 1,
	} {
		t.Run(name, func(t *testing.T) {
			if got := find(name); got != want {
				t.Errorf("%d, want %d", got, want)
			}
		})
	}
}
