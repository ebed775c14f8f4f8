package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The relay benchmark's sizes. A gateway takes 500 connections and dials 200 times a
// second, a thousand at once: the latency is measured below that, and a burst with all
// of it unused.
const (
	connects   = 200
	pace       = 150
	bucketFull = 6 * time.Second
	streamed   = 1 << 30
	idle       = 1000
)

// The lists' lengths, in entries.
var lengths = []int{10, 1_000, 100_000}

// relayPart compares the gateway's relay with a direct connection and with proxies.
func relayPart() error {
	if os.Geteuid() != 0 {
		return errors.New("the relay's part makes network namespaces: it needs root")
	}
	runtime.LockOSThread() // the proxies end with the thread that started them
	w, err := newWorld()
	defer w.close()
	if err != nil {
		return err
	}
	fmt.Printf(`relay (%d interleaved rounds; server, client and what is between them are processes on %d processors)
  The gateway's limits (1000 dials at once, then 200 in a second) are not reached. The relay without
  rules copies and decides nothing: it shows what a second connection costs by itself. The proxies have
  Debian's defaults and no cache.
`, *rounds, runtime.NumCPU())
	for _, part := range []func(*world) error{idleMemory, traffic, listLengths} {
		back := w.mark()
		err := part(w)
		back()
		if err != nil {
			return err
		}
	}
	return nil
}

// --- memory -----------------------------------------------------------------

// idleMemory takes fresh processes, since memory once used is seldom given back.
func idleMemory(w *world) error {
	kinds := []struct {
		name string
		make func() (way, error)
	}{
		{"relay", func() (way, error) {
			listed, _, err := w.relay(lengths[0])
			return listed, err
		}},
		{"a relay without rules", w.plain},
		{"tinyproxy", w.tinyproxy},
		{"squid", w.squid},
	}
	base, grown, fds := make([][]float64, len(kinds)), make([][]float64, len(kinds)), make([][]float64, len(kinds))
	for range min(*rounds, 3) {
		for k, kind := range kinds {
			back := w.mark()
			b, g, f, err := holdIdle(kind.make)
			back()
			if err != nil {
				return fmt.Errorf("%s: %w", kind.name, err)
			}
			base[k], grown[k], fds[k] = append(base[k], b), append(grown[k], g), append(fds[k], f)
		}
	}
	fmt.Printf("\n  memory for %d idle connections (resident, of a fresh process; the kernel's own is not in it)\n", idle)
	fmt.Printf("    %-22s %12s %12s %12s %14s\n", "", "before, MiB", "more, MiB", "ratio", "descriptors")
	for k, kind := range kinds {
		fmt.Printf("    %-22s %12.1f %12.1f %12.2f %14.0f\n", kind.name, mid(base[k])/1024, mid(grown[k])/1024, mid(grown[k])/mid(grown[0]), mid(fds[k]))
	}
	return nil
}

// holdIdle gives a carrier's memory before, and what idle connections add: KiB, descriptors.
func holdIdle(start func() (way, error)) (base, grown, fds float64, err error) {
	one, err := start()
	if err != nil {
		return 0, 0, 0, err
	}
	if _, err := one.ask(order{Op: "connect", N: 10, Rate: 100}); err != nil {
		return 0, 0, 0, err
	}
	time.Sleep(500 * time.Millisecond)
	base, before := float64(memory(one.carrier, "VmRSS:")), descriptors(one.carrier)
	if _, err := one.ask(order{Op: "hold", N: idle}); err != nil {
		return 0, 0, 0, err
	}
	time.Sleep(500 * time.Millisecond)
	grown, fds = float64(memory(one.carrier, "VmRSS:"))-base, float64(descriptors(one.carrier)-before)
	_, err = one.ask(order{Op: "drop"})
	return base, grown, fds, err
}

// --- streams and connections ------------------------------------------------

func traffic(w *world) error {
	listed, service, err1 := w.relay(lengths[0])
	tiny, err2 := w.tinyproxy()
	squid, err3 := w.squid()
	plain, err4 := w.plain()
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}
	if err := streams([]way{w.direct(), service, plain, tiny, squid}); err != nil {
		return err
	}
	if err := latency([]way{w.direct(), service, listed, plain, tiny, squid}); err != nil {
		return err
	}
	return bursts([]way{w.direct(), service, plain, tiny, squid})
}

// interleaved calls f for each way in each round, in another order each time.
func interleaved(ways []way, f func(i int) error) error {
	for r := range *rounds {
		for j := range ways {
			if err := f((r + j) % len(ways)); err != nil {
				return err
			}
		}
	}
	return nil
}

func streams(ways []way) error {
	fmt.Printf("\n  throughput, medians [quartiles of the ratio of a round]\n")
	fmt.Printf("    %-22s %10s %28s %22s\n", "", "GB/s", "ratio to direct", "carrier's CPU s/GB")
	for _, load := range []struct {
		name        string
		n           int
		upload, tls bool
	}{
		{"one stream, download", 1, false, false},
		{"one stream, upload", 1, true, false},
		{"one stream, download, TLS between client and server", 1, false, true},
		{"100 streams, download", 100, false, false},
	} {
		speed, cpu := make([][]float64, len(ways)), make([]float64, len(ways))
		err := interleaved(ways, func(i int) error {
			before := processorTime(ways[i].carrier)
			a, err := ways[i].ask(order{Op: "stream", N: load.n, Bytes: int64(streamed / load.n), Upload: load.upload, TLS: load.tls})
			cpu[i] += (processorTime(ways[i].carrier) - before).Seconds()
			speed[i] = append(speed[i], streamed/1e9/a.Took.Seconds())
			return err
		})
		if err != nil {
			return err
		}
		fmt.Printf("   %s\n", load.name)
		for i, one := range ways {
			fmt.Printf("    %-22s %10.2f %28s %22.2f\n", one.name, mid(speed[i]), ratios(speed[i], speed[0]), cpu[i]/float64(*rounds)/(streamed/1e9))
		}
	}
	return nil
}

// latency is that of one connection after the other beside open ones: the time until
// the server's first byte.
func latency(ways []way) error {
	fmt.Printf("\n  connecting, until the server's first byte: %d connections a round, %d in a second, beside open ones; ms\n", connects, pace)
	fmt.Printf("    %-22s %8s %8s %12s %12s %22s\n", "", "p50", "p99", "added p50", "added p99", "ratio to direct, p50")
	for _, open := range []int{1, 100, 1000} {
		err := holdAll(ways, open-1)
		if err != nil {
			return err
		}
		all, err := connectTimes(ways)
		if err != nil {
			return err
		}
		fmt.Printf("   %d open\n", open)
		for i, one := range ways {
			fmt.Printf("    %-22s %8.2f %8.2f %12.2f %12.2f %22s\n", one.name,
				all.pooled(i, 50), all.pooled(i, 99), mid(all.added(i, 50)), all.pooled(i, 99)-all.pooled(0, 99), ratios(all.p(i, 50), all.p(0, 50)))
		}
		for _, one := range ways {
			if _, err := one.ask(order{Op: "drop"}); err != nil {
				return err
			}
		}
		time.Sleep(time.Second)
	}
	return nil
}

// holdAll opens n connections on each way, and waits for the gateway's limits.
func holdAll(ways []way, n int) error {
	for _, one := range ways {
		if _, err := one.ask(order{Op: "hold", N: n}); err != nil {
			return err
		}
	}
	time.Sleep(bucketFull)
	return nil
}

// times are those of a way's connections, by way and round, sorted, in ms.
type times [][][]float64

func connectTimes(ways []way) (times, error) {
	all := make(times, len(ways))
	return all, interleaved(ways, func(i int) error {
		a, err := ways[i].ask(order{Op: "connect", N: connects, Rate: pace})
		all[i] = append(all[i], sortedMs(a.Each))
		return err
	})
}

// p gives a percentile of each round, pooled that of all rounds together.
func (t times) p(way, percent int) []float64 {
	out := make([]float64, len(t[way]))
	for i, round := range t[way] {
		out[i] = percentile(round, percent)
	}
	return out
}

func (t times) pooled(way, percent int) float64 {
	return percentile(slices.Sorted(slices.Values(slices.Concat(t[way]...))), percent)
}

// added is by how much a percentile exceeds the first way's, in each round.
func (t times) added(way, percent int) []float64 {
	out := t.p(way, percent)
	for i, direct := range t.p(0, percent) {
		out[i] -= direct
	}
	return out
}

// bursts makes many connections at once.
func bursts(ways []way) error {
	fmt.Printf("\n  connecting at once, until the server's first byte: ms; per connection, µs\n")
	fmt.Printf("    %-22s %8s %8s %16s %22s\n", "", "p50", "p99", "all, per one", "ratio to direct, all")
	for _, n := range []int{100, 1000} {
		all, took := make(times, len(ways)), make([][]float64, len(ways))
		err := interleaved(ways, func(i int) error {
			if ways[i].limited {
				time.Sleep(bucketFull)
			}
			a, err := ways[i].ask(order{Op: "burst", N: n})
			all[i], took[i] = append(all[i], sortedMs(a.Each)), append(took[i], float64(a.Took.Microseconds())/float64(n))
			return err
		})
		if err != nil {
			return err
		}
		fmt.Printf("   %d at once\n", n)
		for i, one := range ways {
			fmt.Printf("    %-22s %8.2f %8.2f %16.0f %22s\n", one.name, all.pooled(i, 50), all.pooled(i, 99), mid(took[i]), ratios(took[i], took[0]))
		}
	}
	return nil
}

// --- lists ------------------------------------------------------------------

// listLengths connects through gateways whose lists differ in length.
func listLengths(w *world) error {
	var ways []way
	for _, n := range lengths {
		listed, _, err := w.relay(n)
		if err != nil {
			return err
		}
		listed.name = strconv.Itoa(n) + " entries"
		ways = append(ways, listed)
	}
	all, err := connectTimes(ways)
	if err != nil {
		return err
	}
	fmt.Printf("\n  allow-lists of names, wildcards and addresses: connecting to a listed name, ms\n")
	fmt.Printf("    %-22s %8s %8s %28s %14s\n", "", "p50", "p99", "ratio to the shortest, p50", "resident, MiB")
	for i, one := range ways {
		fmt.Printf("    %-22s %8.2f %8.2f %28s %14.1f\n", one.name, all.pooled(i, 50), all.pooled(i, 99),
			ratios(all.p(i, 50), all.p(0, 50)), float64(memory(one.carrier, "VmRSS:"))/1024)
	}
	return nil
}

// --- numbers ----------------------------------------------------------------

func sortedMs(d []time.Duration) []float64 {
	out := make([]float64, len(d))
	for i := range d {
		out[i] = float64(d[i].Microseconds()) / 1000
	}
	slices.Sort(out)
	return out
}

// percentile is that of sorted numbers.
func percentile[T cmp.Ordered](sorted []T, percent int) T {
	return sorted[min(len(sorted)*percent/100, len(sorted)-1)]
}

func mid(numbers []float64) float64 { return percentile(slices.Sorted(slices.Values(numbers)), 50) }

// ratios gives the median and the quartiles of the rounds' ratios.
func ratios(a, b []float64) string {
	r := make([]float64, len(a))
	for i := range a {
		r[i] = a[i] / b[i]
	}
	slices.Sort(r)
	return fmt.Sprintf("%.2f [%.2f–%.2f]", percentile(r, 50), percentile(r, 25), percentile(r, 75))
}

func descriptors(pid int) int {
	found, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	return len(found)
}

// processorTime is what a process has used, of both kinds (proc(5), fields 14 and 15);
// 0 for no process.
func processorTime(pid int) time.Duration {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0
	}
	const tick = 10 * time.Millisecond // USER_HZ is 100 on every Linux
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return time.Duration(user+system) * tick
}
