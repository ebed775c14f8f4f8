package integration

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// soakTime is how long TestSoakFaults goes on.
const soakTime = 5 * time.Minute

// TestSoakFaults runs random cells of the fault table on random set-ups, and prints
// how often each came up: for soakTime in make soak, else one on each set-up that
// TestFaults leaves out.
func TestSoakFaults(t *testing.T) {
	Need(t)
	counts := map[string]int{}
	var benches []*faultBench
	for _, s := range setups {
		if soaking() || !s.full() {
			benches = append(benches, newFaultBench(t, s))
		}
	}
	for end := time.Now().Add(soakTime); soaking() && time.Now().Before(end); {
		counts[pick(benches).randomFault(t)]++
	}
	for _, b := range benches {
		counts[b.randomFault(t)]++
		b.tidy(t)
	}
	total := 0
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		t.Logf("%4d %s", counts[name], name)
		total += counts[name]
	}
	t.Logf("%4d faults, %d different ones", total, len(counts))
}

// randomFault runs one cell and gives its name.
func (b *faultBench) randomFault(t *testing.T) string {
	t.Helper()
	p, victim, kill := pick(phases), pick(victims), rand.N(2) == 0
	for !p.has(victim) {
		victim = pick(victims)
	}
	name := fmt.Sprintf("%s/%s/%s/SIGSTOP and SIGCONT", b.name, p.name, victim)
	if kill {
		name = fmt.Sprintf("%s/%s/%s/SIGKILL", b.name, p.name, victim)
	}
	t.Run(name, func(t *testing.T) {
		if kill {
			b.kills(t, p, victim)
		} else {
			b.stops(t, p, []string{victim})
		}
	})
	return name
}

func pick[T any](list []T) T { return list[rand.N(len(list))] }
