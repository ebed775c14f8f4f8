package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"
)

// sessionPart compares a step of a session with the engine's exec in the same container,
// says what the keeper costs in memory, and how long 50 steps at once take.
func sessionPart() error { return eachSetup((*bench).session) }

// atOnce is how many steps run at once in the end.
const atOnce = 50

func (b *bench) session() (err error) {
	start := time.Now()
	out, err := b.command(b.agentshim, "up", "--quiet", "--spec", filepath.Join(b.dir, denyAll)).Output()
	if err != nil {
		return fmt.Errorf("up: %w", err)
	}
	up := time.Since(start)
	id := strings.TrimSpace(string(out))
	defer func() { err = errors.Join(err, b.command(b.agentshim, "down", id).Run()) }()
	step := []string{b.agentshim, "exec", "--quiet", "--session", id, "--command", "--", "true"}
	kinds := []kind{{b.engine + " exec", []string{b.engine, "exec", "agentshim-" + id, "true"}}, {"step", step}}
	times, err := b.interleave(kinds, func(int) {})
	if err != nil {
		return err
	}
	fmt.Printf("%s: steps (%d interleaved, median [quartiles] in ms)\n", b.name, *pairs)
	for k, kind := range kinds {
		fmt.Printf("  %-18s %s\n", kind.name, spread(times[k]))
	}
	fmt.Printf("  paired ratio step/%s exec, median of pairs: %.2f\n", b.engine, pairedRatio(times[1], times[0]))
	all, err := b.together(atOnce, step)
	if err != nil {
		return err
	}
	keeper, err := b.keeper()
	fmt.Printf("  up %.2f s, %d steps at once %.2f s\n", up.Seconds(), atOnce, all.Seconds())
	fmt.Printf("  keeper after that: %.1f MiB of its own (RssAnon), %.1f MiB with its program's pages (VmRSS)\n",
		float64(memory(keeper, "RssAnon:"))/1024, float64(memory(keeper, "VmRSS:"))/1024)
	return err
}

// keeper is the pid of the only session's keeper.
func (b *bench) keeper() (int, error) {
	out, err := b.command(b.agentshim, "ps", "--json").Output()
	if err != nil {
		return 0, err
	}
	var list struct{ Sessions []struct{ PID int } }
	if err := json.Unmarshal(out, &list); err != nil || len(list.Sessions) != 1 {
		return 0, fmt.Errorf("sessions: %s %w", out, err)
	}
	return list.Sessions[0].PID, nil
}
