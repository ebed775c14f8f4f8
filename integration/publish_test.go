package integration

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agentshim/agentshim/shim"
)

// dial connects to an address of the caller's namespace.
func (w *world) dial(addr string) (*net.TCPConn, error) {
	var c net.Conn
	err := within(w.caller, func() (err error) {
		c, err = net.Dial("tcp", addr)
		return err
	})
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// server is a run whose harness serves, and where its ports are on the host.
type server struct {
	t       *testing.T
	w       *world
	cmd     *exec.Cmd
	state   string
	stdout  bytes.Buffer
	stderr  lines
	address []string // by entry of publish
}

// lines collects what is written and finds text in it.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// serve starts a run that serves at addresses inside, until it is told to stop.
func (s setup) serve(t *testing.T, w *world, egress map[string]any, inside ...string) *server {
	t.Helper()
	v := &server{t: t, w: w, state: s.private(t)}
	ops := attempts{append([]string{"serve"}, inside...)}
	c := call{Net: w, State: v.state}
	args := slices.Concat([]string{"exec"}, s.target(t, c, s.write(t, reachFields(t, egress, nil))), []string{"--", ops.json(t)})
	cmd, cancel := s.command(t, c, agentshim, args...)
	t.Cleanup(cancel)
	v.cmd, cmd.Stdout, cmd.Stderr = cmd, &v.stdout, &v.stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if v.cmd.ProcessState == nil {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			_ = cmd.Wait()
		}
	})
	if !within10s(func() bool { return strings.Contains(v.stderr.String(), "serving\n") }) {
		t.Fatalf("it does not serve:\n%s", v.stderr.String())
	}
	whole, _ := s.whole(t, record(t, v.state), v.state)
	for _, p := range whole.Publish {
		v.address = append(v.address, at(p.Address.String(), int(p.HostPort)))
	}
	return v
}

// ask opens a connection with an order.
func (v *server) ask(address, order string) *net.TCPConn {
	v.t.Helper()
	c, err := v.w.dial(address)
	if err == nil {
		_, err = io.WriteString(c, order+"\n")
	}
	if err == nil {
		err = c.SetReadDeadline(time.Now().Add(time.Minute))
	}
	if err != nil {
		v.t.Fatalf("%s: %v", address, err)
	}
	v.t.Cleanup(func() { c.Close() })
	return c
}

// answer sends an order and data, the end of the direction, and gives the digest of
// what comes back.
func (v *server) answer(address, order string, data []byte) string {
	v.t.Helper()
	c := v.ask(address, order)
	go func() {
		_, _ = c.Write(data)
		_ = c.CloseWrite()
	}()
	h := sha256.New()
	if _, err := io.Copy(h, c); err != nil {
		v.t.Errorf("%s: %v", order, err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// stop ends the run from inside.
func (v *server) stop() {
	v.t.Helper()
	v.ask(v.address[0], "stop")
	if err := v.cmd.Wait(); err != nil {
		v.t.Errorf("the end: %v\n%s", err, v.stderr.String())
	}
}

// ended says how a connection ends where nothing comes.
func ended(c *net.TCPConn) error {
	_, err := c.Read(make([]byte, 1))
	return err
}

// TestPublish: servers inside are reached on the host's ports, in the mode that has no
// network at all; whole, in parallel, beside connections that nobody reads, and until the
// end of the run.
func TestPublish(t *testing.T) {
	w := outside(t)
	each(t, func(t *testing.T, s setup) {
		egress := map[string]any{"publish": []any{"0:3000", "[::1]:0:3001", "0:3002", "0.0.0.0:0:3000"}}
		v := s.serve(t, w, egress, "127.0.0.1:3000", "[::1]:3001")
		for _, p := range v.address {
			if want := "agentshim: publish: " + p + " leads to port 300"; !strings.Contains(v.stderr.String(), want) {
				t.Errorf("standard error has no %q:\n%s", want, v.stderr.String())
			}
		}
		t.Run("both families, half-closed", func(t *testing.T) {
			for _, address := range v.address[:2] {
				if got, want := v.answer(address, "echo", []byte("question")), sum([]byte("question")); got != want {
					t.Errorf("%s: another answer", address)
				}
			}
		})
		t.Run("large", func(t *testing.T) {
			const size = 32 * mib
			data := random(t, size)
			if got, want := v.answer(v.address[0], "sum", data), sum([]byte(sum(data))); got != want {
				t.Error("what arrived inside is not what was sent")
			}
			if got, want := v.answer(v.address[0], fmt.Sprintf("send %d", size), nil), sum(make([]byte, size)); got != want {
				t.Error("what came out is not what was sent")
			}
			if got, want := v.answer(v.address[1], "echo", data), sum(data); got != want {
				t.Error("what came back is not what was sent")
			}
		})
		t.Run("50 at a time", func(t *testing.T) {
			data := random(t, mib/2)
			var all sync.WaitGroup
			for range 50 {
				all.Go(func() {
					if got, want := v.answer(v.address[0], "echo", data), sum(data); got != want {
						t.Error("what came back is not what was sent")
					}
				})
			}
			all.Wait()
		})
		t.Run("beside stalled ones", func(t *testing.T) {
			for range 20 {
				stalled, flooding := v.ask(v.address[0], "stall"), v.ask(v.address[0], "flood")
				go func() { _, _ = io.Copy(stalled, &endless{}) }()
				go func() { _, _ = io.Copy(flooding, &endless{}) }()
			}
			data := random(t, mib)
			if got, want := v.answer(v.address[0], "echo", data), sum(data); got != want {
				t.Error("what came back is not what was sent")
			}
			if got, want := v.answer(v.address[0], "print 1000000", nil), sum([]byte("printed")); got != want {
				t.Error("standard output stands still")
			}
		})
		t.Run("reset", func(t *testing.T) {
			if err := ended(v.ask(v.address[0], "reset")); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("by the server: %v", err)
			}
			c, err := w.dial(v.address[2])
			if err == nil { // else the reset was there before the dial looked
				err = ended(c)
			}
			if !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("without a server: %v", err)
			}
		})
		t.Run("in use", func(t *testing.T) { v.refusesAnother(s) })
		t.Run("only where it was asked for", func(t *testing.T) {
			_, port, _ := net.SplitHostPort(v.address[0])
			if _, err := w.dial(net.JoinHostPort(callerAddr, port)); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("a port of 127.0.0.1 on another address: %v", err)
			}
			_, port, _ = net.SplitHostPort(v.address[3])
			c, err := w.dial(net.JoinHostPort(callerAddr, port))
			if err != nil {
				t.Fatalf("control: a port of all addresses: %v", err)
			}
			c.Close()
		})
		v.stop()
		for _, address := range v.address {
			if c, err := w.dial(address); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%s after the end: %v %v", address, c, err)
			}
		}
		if n := strings.Count(v.stdout.String(), "x\n"); n != 1000000 {
			t.Errorf("%d lines on standard output", n)
		}
		rec := record(t, v.state)
		if len(rec.Publish) != 4 || rec.Publish[0].Connections < 95 || rec.Publish[0].Refused != 0 || rec.Publish[2].Connections != 1 {
			t.Errorf("record: %+v", rec.Publish)
		}
		if !v.widened(rec) {
			t.Errorf("the port of all addresses is no widening: %+v", rec.Widenings)
		}
	})
}

// refusesAnother runs with a port that this one has.
func (v *server) refusesAnother(s setup) {
	v.t.Helper()
	_, port, _ := net.SplitHostPort(v.address[0])
	state := s.private(v.t)
	file := s.write(v.t, spec{"egress": map[string]any{"publish": []any{"0:1", port + ":1"}}})
	r := s.call(v.t, call{Net: v.w, State: state}, "exec", "--spec", file, "--", "echo ran").refused(v.t, shim.ReasonPublish)
	if !strings.Contains(r.Stderr, v.address[0]) || !strings.Contains(r.Stderr, "hint: ") {
		v.t.Errorf("stderr: %s", r.Stderr)
	}
	if rec := record(v.t, state); rec.Container != "" || rec.Attestation != nil || rec.Reason != shim.ReasonPublish || !rec.Retry {
		v.t.Errorf("record: %+v", rec)
	}
}

func (v *server) widened(rec shim.Record) bool {
	n := 0
	for _, w := range rec.Widenings {
		if strings.HasPrefix(w.Name, "publish:") {
			n++
		}
	}
	return n == 1
}

// TestPublishElsewhere: in the other modes, and to a session's steps, it is the same;
// without an entry nothing listens.
func TestPublishElsewhere(t *testing.T) {
	w := outside(t)
	bothWays(t, func(t *testing.T, s setup) {
		var with *server
		for _, egress := range []map[string]any{
			{"mode": "deny-all"}, {"mode": "open"}, {"mode": "network"}, {"mode": "allow-list", "allow": []any{"api.allowed.example"}},
		} {
			if egress["mode"] != "allow-list" && !s.full() {
				continue
			}
			egress["publish"] = []any{"0:3000"}
			with = s.serve(t, w, egress, "127.0.0.1:3000")
			if got, want := with.answer(with.address[0], "echo", []byte("x")), sum([]byte("x")); got != want {
				t.Errorf("%s: another answer", egress["mode"])
			}
			with.stop()
		}
		if s.steps != nil {
			return // the port is the session's
		}
		_, port, _ := net.SplitHostPort(with.address[0])
		without := s.serve(t, w, nil, "127.0.0.1:"+port)
		if c, err := w.dial(with.address[0]); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("without an entry: %v %v", c, err)
		}
		if len(without.address) != 0 {
			t.Errorf("published: %v", without.address)
		}
	})
}
