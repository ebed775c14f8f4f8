package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// mountCounts are the numbers of mounts that a launch is measured with.
var mountCounts = []int{1, 20, 200}

// mountsPart measures what mounts cost a launch, agentshim's against the bare engine's
// with the same ones.
func mountsPart() error { return eachSetup((*bench).mounts) }

func (b *bench) mounts() error {
	var kinds []kind
	for _, n := range mountCounts {
		file, err := b.writeMounts(n)
		if err != nil {
			return err
		}
		bare, err := b.bareArgv(file)
		if err != nil {
			return err
		}
		kinds = append(kinds, kind{fmt.Sprintf("bare, %d mounts", n), bare}, kind{fmt.Sprintf("exec, %d mounts", n), b.exec(file, "true")})
	}
	times, err := b.interleave(kinds, func(int) {})
	if err != nil {
		return err
	}
	fmt.Printf("%s (%d interleaved runs each, median [quartiles] in ms)\n", b.name, *pairs)
	for k, kind := range kinds {
		fmt.Printf("  %-18s %s", kind.name, spread(times[k]))
		if k%2 == 1 {
			fmt.Printf("  paired ratio to bare %.2f", pairedRatio(times[k], times[k-1]))
		}
		fmt.Println()
	}
	return nil
}

// writeMounts makes a harness file with n mounts.
func (b *bench) writeMounts(n int) (string, error) {
	type mount struct {
		Source string `json:"source"`
		Target string `json:"target"`
	}
	var list []mount
	for i := range n {
		m := mount{filepath.Join(b.dir, "sources", fmt.Sprint(i)), fmt.Sprintf("/m/%d", i)}
		if err := os.MkdirAll(m.Source, 0o755); err != nil {
			return "", err
		}
		list = append(list, m)
	}
	text, err := json.Marshal(map[string]any{
		"version": 1, "image": "agentshim/hello:test", "pull": "never", "engine": b.engine, "user": "24199:24199",
		"harness": map[string]any{"binary": "true"}, "accept": []string{"rootless-cgroup-limits"}, "mounts": list,
	})
	file := fmt.Sprintf("mounts-%d.json", n)
	return file, errors.Join(err, os.WriteFile(filepath.Join(b.dir, file), text, 0o644), exec.Command("chown", "-R", b.account, b.dir).Run())
}
