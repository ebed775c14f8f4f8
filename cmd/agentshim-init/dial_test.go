package main

import (
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/agentshim/agentshim/shim/wire"
)

// end is the host's end of a tunnel.
type end struct{ *net.TCPConn }

func (e end) Reset() {
	_ = e.SetLinger(0)
	e.Close()
}

// tunnels carries connections to an init whose harness is running, until the test ends.
// The sandbox's loopback is here the test's own.
func (p *peer) tunnels() (connect func(port int) *net.TCPConn) {
	p.t.Helper()
	tunnels := wire.NewTunnels(p.conn)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		p.t.Fatal(err)
	}
	var receiving sync.WaitGroup
	receiving.Go(func() {
		for {
			f, err := p.conn.Recv()
			if err == nil && f.Kind != wire.KindExit {
				err = tunnels.Handle(f)
			}
			if err != nil {
				if !errors.Is(err, io.EOF) {
					p.t.Errorf("receiving: %v", err)
				}
				return
			}
		}
	})
	p.t.Cleanup(func() {
		l.Close()
		p.in.Close()
		receiving.Wait()
		tunnels.Close()
	})
	return func(port int) *net.TCPConn {
		p.t.Helper()
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			p.t.Fatal(err)
		}
		host, err := l.Accept()
		if err != nil {
			p.t.Fatal(err)
		}
		if !tunnels.Open(end{host.(*net.TCPConn)}, uint16(port)) {
			p.t.Fatal("no room for a tunnel")
		}
		return c.(*net.TCPConn)
	}
}

// TestTunnel: init connects to 127.0.0.1 or, where nothing listens there, to ::1, and
// carries each direction, its end, and a reset.
func TestTunnel(t *testing.T) {
	p := start(t)
	p.script("sleep 60")
	connect := p.tunnels()
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(address, func(t *testing.T) {
			l, err := net.Listen("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			client := connect(l.Addr().(*net.TCPAddr).Port)
			defer client.Close()
			server, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			question := strings.Repeat("question", 100_000)
			go func() {
				_, _ = io.WriteString(client, question)
				_ = client.CloseWrite()
			}()
			if got, err := io.ReadAll(server); err != nil || string(got) != question {
				t.Fatalf("%d bytes, %v", len(got), err)
			}
			if _, err := io.WriteString(server, question); err != nil {
				t.Fatal(err)
			}
			server.Close()
			if got, err := io.ReadAll(client); err != nil || string(got) != question {
				t.Errorf("%d bytes, %v", len(got), err)
			}
			gone, other := connect(l.Addr().(*net.TCPAddr).Port), net.Conn(nil)
			if other, err = l.Accept(); err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			end{gone}.Reset()
			if _, err := other.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("a reset arrives as %v", err)
			}
		})
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close() // nobody listens there
	client := connect(l.Addr().(*net.TCPAddr).Port)
	defer client.Close()
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("without a server: %v", err)
	}
}

// TestTunnelBeforeLaunch: nothing is dialled before a harness runs.
func TestTunnelBeforeLaunch(t *testing.T) {
	p := start(t)
	if err := p.conn.SendUint32(wire.KindDial, 0, 80); err != nil {
		t.Fatal(err)
	}
	if code := p.ends(); code != exitRefused {
		t.Errorf("exit %d", code)
	}
}
