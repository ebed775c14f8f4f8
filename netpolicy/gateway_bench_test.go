package netpolicy

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/time/rate"
)

// benchWorld has no rates: the machine is measured, not the bounds. Every connection
// goes to the one server, by name.
func benchWorld(b *testing.B, handle func(c *net.TCPConn)) (direct, relay string) {
	s := newServer(b, "127.0.0.1:0", handle)
	w := newWorld(b, func(w *world) {
		w.zone.set("api.example.com", "127.0.0.1")
		addr, _ := w.g.names.Addr("api.example.com")
		w.g.original = func(*net.TCPConn) (netip.AddrPort, error) { return netip.AddrPortFrom(addr, uint16(s.port)), nil }
		w.g.routing = hostRouting
		w.g.limits.connRate, w.g.limits.dialRate = rate.Inf, rate.Inf
		w.g.log = func(Event) error { return nil }
	})
	w.allow("api.example.com", s.port, Verdict{})
	return s.Addr().String(), w.g.listeners.Relay.Addr().String()
}

// BenchmarkStream compares one stream over loopback with the same through the relay.
func BenchmarkStream(b *testing.B) {
	const chunk = 128 << 10
	direct, relay := benchWorld(b, func(c *net.TCPConn) {
		buf := make([]byte, chunk)
		for {
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	})
	for _, way := range []struct{ name, addr string }{{"direct", direct}, {"relay", relay}} {
		b.Run(way.name, func(b *testing.B) {
			c, err := net.Dial("tcp4", way.addr)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			buf := make([]byte, chunk)
			b.SetBytes(chunk)
			for b.Loop() {
				if _, err := io.ReadFull(c, buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkConnect is the time until a server's first byte arrives; through the relay
// with a lookup, a routing question and a second connection.
func BenchmarkConnect(b *testing.B) {
	direct, relay := benchWorld(b, func(c *net.TCPConn) { _, _ = c.Write([]byte{1}) })
	for _, way := range []struct{ name, addr string }{{"direct", direct}, {"relay", relay}} {
		b.Run(way.name, func(b *testing.B) {
			var took []time.Duration
			for b.Loop() {
				start := time.Now()
				c, err := net.Dial("tcp4", way.addr)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := c.Read(make([]byte, 1)); err != nil {
					b.Fatal(err)
				}
				took = append(took, time.Since(start))
				c.Close()
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
		})
	}
}

// BenchmarkIdle is the gateway's memory for one idle connection; the test's own ends
// are in it.
func BenchmarkIdle(b *testing.B) {
	const n = 1000
	_, relay := benchWorld(b, func(c *net.TCPConn) {
		_, _ = c.Write([]byte{1})
		_, err := c.Read(make([]byte, 1))
		if err != nil && !errors.Is(err, io.EOF) {
			return
		}
	})
	for b.Loop() {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		var open []net.Conn
		for range n {
			c, err := net.Dial("tcp4", relay)
			if err != nil {
				b.Fatal(err)
			}
			_, _ = c.Read(make([]byte, 1))
			open = append(open, c)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapInuse+after.StackInuse-before.HeapInuse-before.StackInuse)/n, "B/conn")
		for _, c := range open {
			c.Close()
		}
	}
}
