package shim

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

func publishedAt(address string, hostPort, port uint16) spec.Published {
	return spec.Published{Address: netip.MustParseAddr(address), HostPort: hostPort, Port: port}
}

// TestPublishedPort: a port is taken at once and listened on later; in use it is refused
// by name; behind the end it is free again, whatever its connections do.
func TestPublishedPort(t *testing.T) {
	for _, address := range []string{"127.0.0.1", "::1"} {
		t.Run(address, func(t *testing.T) {
			p, err := bindPublished([]spec.Published{publishedAt(address, 0, 3000)})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { p.close() }()
			port := p.records()[0].HostPort
			at := netip.AddrPortFrom(netip.MustParseAddr(address), port).String()
			if c, err := net.Dial("tcp", at); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("before the launch: %v %v", c, err)
			}
			var said []string
			if err := p.listen(func(format string, args ...any) { said = append(said, format) }); err != nil || len(said) != 1 {
				t.Fatalf("%v, said %q", err, said)
			}
			other, err := bindPublished([]spec.Published{publishedAt(address, 0, 1), publishedAt(address, port, 1)})
			if !errors.Is(err, ReasonPublish) || !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), at) || HintOf(err) == "" {
				t.Errorf("%v: %v, hint %q", other, err, HintOf(err))
			}
			c, err := net.Dial("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			p.close()
			if _, err := net.Dial("tcp", at); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("behind the end: %v", err)
			}
			again, err := bindPublished([]spec.Published{publishedAt(address, port, 1)})
			if err != nil {
				t.Fatalf("another run: %v", err)
			}
			again.close()
		})
	}
}

// TestPublishRefused: what the host can't listen on is refused with what to do.
func TestPublishRefused(t *testing.T) {
	// 192.0.2.7 is no host's (RFC 5737).
	if _, err := bindPublished([]spec.Published{publishedAt("192.0.2.7", 0, 1)}); !errors.Is(err, ReasonPublish) || HintOf(err) == "" {
		t.Errorf("%v, hint %q", err, HintOf(err))
	}
	for _, err := range []error{syscall.EADDRINUSE, syscall.EACCES} {
		if e := publishRefused(publishedAt("127.0.0.1", 80, 1), err); !errors.Is(e, err) || HintOf(e) == "" {
			t.Errorf("%v, hint %q", e, HintOf(e))
		}
	}
	var none *published
	none.close()
	if err := none.listen(nil); err != nil || none.records() != nil {
		t.Error(err)
	}
}

// TestPublishedServe: connections are carried up to the bound, the next one is reset, and
// the record counts both.
func TestPublishedServe(t *testing.T) {
	p, err := bindPublished([]spec.Published{publishedAt("127.0.0.1", 0, 3000)})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.listen(func(string, ...any) {}); err != nil {
		t.Fatal(err)
	}
	tunnels := wire.NewTunnels(wire.NewConn(nil, io.Discard))
	p.serve(tunnels, func(f func()) { go f() })
	at := p.ports[0].listener.Addr().String()
	for range wire.MaxTunnels {
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	c, err := net.Dial("tcp", at)
	if err == nil {
		defer c.Close()
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("one too many: %v", err)
	}
	p.close()
	tunnels.Close()
	if r := p.records()[0]; r.Connections != wire.MaxTunnels || r.Refused != 1 {
		t.Errorf("%+v", r)
	}
}
