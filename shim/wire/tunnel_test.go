package wire

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"
)

// tcp is a Socket on a connection.
type tcp struct{ *net.TCPConn }

func (c tcp) Reset() {
	_ = c.SetLinger(0)
	c.Close()
}

// pair is a connection's two ends.
func pair(t *testing.T, l net.Listener) (dialled, accepted *net.TCPConn) {
	t.Helper()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); a.Close() })
	return c.(*net.TCPConn), a.(*net.TCPConn)
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// tunnelled are two sides joined by a Conn, and the server behind the accepting one.
type tunnelled struct {
	t              *testing.T
	outside        net.Listener // whose connections are tunnelled
	server         net.Listener
	opener, accept *Tunnels
	cut            func()
}

func tunnels(t *testing.T) *tunnelled {
	t.Helper()
	shim, inside, cut := pipes()
	w := &tunnelled{t: t, outside: listen(t), server: listen(t), opener: NewTunnels(shim), accept: NewTunnels(inside), cut: cut}
	port := w.server.Addr().(*net.TCPAddr).Port
	dial := func(p uint16) (Socket, error) {
		if int(p) != port {
			return nil, syscall.ECONNREFUSED
		}
		c, err := net.Dial("tcp", w.server.Addr().String())
		if err != nil {
			return nil, err
		}
		return tcp{c.(*net.TCPConn)}, nil
	}
	var loops sync.WaitGroup
	receive := func(c *Conn, f func(Frame) error) {
		loops.Go(func() {
			for {
				frame, err := c.Recv()
				if err == nil {
					err = f(frame)
				}
				if err != nil {
					if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrClosedPipe) {
						t.Errorf("receiving: %v", err)
					}
					cut()
					return
				}
			}
		})
	}
	receive(shim, w.opener.Handle)
	receive(inside, func(f Frame) error {
		if f.Kind == KindDial {
			return w.accept.Accept(f, dial)
		}
		return w.accept.Handle(f)
	})
	t.Cleanup(func() {
		w.opener.Close()
		w.accept.Close()
		cut()
		loops.Wait()
	})
	return w
}

// open gives a client's end and, where a server takes it, the server's.
func (w *tunnelled) open() (client, server *net.TCPConn) {
	w.t.Helper()
	client = w.openTo(uint16(w.server.Addr().(*net.TCPAddr).Port))
	s, err := w.server.Accept()
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { s.Close() })
	return client, s.(*net.TCPConn)
}

func (w *tunnelled) openTo(port uint16) *net.TCPConn {
	w.t.Helper()
	client, end := pair(w.t, w.outside)
	if !w.opener.Open(tcp{end}, port) {
		w.t.Fatal("no room for a tunnel")
	}
	return client
}

// empty waits until no tunnel is left on either side.
func (w *tunnelled) empty() {
	w.t.Helper()
	for _, t := range []*Tunnels{w.opener, w.accept} {
		for end := time.Now().Add(10 * time.Second); t.used() > 0; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				w.t.Fatalf("%d tunnels are left", t.used())
			}
		}
	}
}

func (t *Tunnels) used() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for _, tn := range t.slots {
		if tn != nil {
			n++
		}
	}
	return n
}

func read(t *testing.T, r io.Reader, want string) {
	t.Helper()
	b := make([]byte, len(want))
	if _, err := io.ReadFull(r, b); err != nil || string(b) != want {
		t.Fatalf("%q %v, want %q", b, err, want)
	}
}

func write(t *testing.T, w io.Writer, text string) {
	t.Helper()
	if _, err := io.WriteString(w, text); err != nil {
		t.Fatal(err)
	}
}

// TestTunnelHalfClose: the end of one direction leaves the other open, either way round.
func TestTunnelHalfClose(t *testing.T) {
	w := tunnels(t)
	for range 2 {
		client, server := w.open()
		first, second := client, server
		write(t, first, "question")
		if err := first.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(second); err != nil || string(got) != "question" {
			t.Fatalf("%q %v", got, err)
		}
		write(t, second, "answer")
		second.Close()
		if got, err := io.ReadAll(first); err != nil || string(got) != "answer" {
			t.Errorf("%q %v", got, err)
		}
		w.empty()
	}
	client, server := w.open()
	write(t, server, "greeting")
	if err := server.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(client); err != nil || string(got) != "greeting" {
		t.Fatalf("%q %v", got, err)
	}
	write(t, client, "later")
	client.Close()
	if got, err := io.ReadAll(server); err != nil || string(got) != "later" {
		t.Errorf("%q %v", got, err)
	}
	w.empty()
}

// TestTunnelReset: a reset of one end is one of the other, behind what was sent before it.
func TestTunnelReset(t *testing.T) {
	w := tunnels(t)
	for _, name := range []string{"of the client", "of the server"} {
		t.Run(name, func(t *testing.T) {
			gone, other := w.open()
			if name == "of the server" {
				gone, other = other, gone
			}
			write(t, gone, "before")
			read(t, other, "before")
			tcp{gone}.Reset()
			if n, err := other.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%d bytes, %v", n, err)
			}
			w.empty()
		})
	}
	t.Run("with data behind it that nobody reads", func(t *testing.T) {
		client, server := w.open()
		write(t, client, "unread")
		write(t, server, "answer")
		time.Sleep(10 * time.Millisecond) // what was written must be there when it closes
		server.Close()
		got, err := io.ReadAll(client)
		if string(got) != "answer" || !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%q %v", got, err)
		}
		w.empty()
	})
	t.Run("without a server", func(t *testing.T) {
		client := w.openTo(1)
		if n, err := client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%d bytes, %v", n, err)
		}
		w.empty()
	})
}

// TestTunnelsFlow: connections in parallel, with data both ways in pieces of any size,
// arrive whole; their numbers are used again.
func TestTunnelsFlow(t *testing.T) {
	w := tunnels(t)
	go acceptEcho(w.server)
	var all sync.WaitGroup
	for i := range 50 {
		rnd := rand.New(rand.NewPCG(uint64(i), 7))
		all.Go(func() {
			for range 6 {
				client := w.openTo(uint16(w.server.Addr().(*net.TCPAddr).Port))
				data := make([]byte, rnd.IntN(5*TunnelWindow))
				for i := range data {
					data[i] = byte(rnd.Uint32())
				}
				go func() {
					_, _ = client.Write(data)
					_ = client.CloseWrite()
				}()
				got, err := io.ReadAll(client)
				if err != nil || sha256.Sum256(got) != sha256.Sum256(data) {
					t.Errorf("%d bytes of %d, or not the same: %v", len(got), len(data), err)
				}
				client.Close()
			}
		})
	}
	all.Wait()
	w.empty()
}

func acceptEcho(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			_, _ = io.Copy(c, c)
			c.Close()
		}()
	}
}

// TestTunnelsBounded: connections that nobody reads hold up no other and no control
// frame, cost a window each, and there are MaxTunnels of them at most.
func TestTunnelsBounded(t *testing.T) {
	w := tunnels(t)
	var stalled []*net.TCPConn
	for range MaxTunnels - 1 {
		client, server := w.open()
		go func() { _, _ = io.Copy(client, &endless{}) }()
		go func() { _, _ = io.Copy(server, &endless{}) }()
		stalled = append(stalled, client)
	}
	client, server := w.open()
	for range 100 {
		write(t, client, "ping")
		read(t, server, "ping")
		write(t, server, "pong")
		read(t, client, "pong")
	}
	_, end := pair(t, w.outside)
	if w.opener.Open(tcp{end}, 1) {
		t.Error("a tunnel too many was opened")
	}
	for _, side := range []*Tunnels{w.opener, w.accept} {
		for i, tn := range side.slots {
			tn.sink.mu.Lock()
			if tn.sink.unacked > TunnelWindow || cap(tn.sink.pending) > 2*TunnelWindow {
				t.Errorf("tunnel %d holds %d bytes in %d", i, tn.sink.unacked, cap(tn.sink.pending))
			}
			tn.sink.mu.Unlock()
		}
	}
	for _, c := range stalled {
		tcp{c}.Reset()
	}
	for _, c := range []*net.TCPConn{client, server} {
		c.Close()
	}
	w.opener.Close()
	if w.opener.Open(tcp{end}, 1) {
		t.Error("a tunnel was opened behind the end")
	}
	if n, err := client.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes behind the end", n)
	}
}

// frameOf is a frame that carries a number, or nothing.
func frameOf(k Kind, number uint8, payload ...byte) Frame {
	return Frame{Kind: k, Stream: number, Payload: payload}
}

func TestTunnelProtocol(t *testing.T) {
	credit := binary.BigEndian.AppendUint32(nil, 1)
	full := frameOf(KindTunnelData, 0, bytes.Repeat([]byte{'x'}, MaxData)...)
	for _, row := range []struct {
		name   string
		frames []Frame
	}{
		{"data of no tunnel", []Frame{frameOf(KindTunnelData, 5, 'x')}},
		{"end of no tunnel", []Frame{frameOf(KindTunnelEnd, 5)}},
		{"end twice", []Frame{frameOf(KindTunnelEnd, 0), frameOf(KindTunnelEnd, 0)}},
		{"data behind the end of the direction", []Frame{frameOf(KindTunnelEOF, 0), frameOf(KindTunnelData, 0, 'x')}},
		{"data beyond credit", []Frame{full, full, full}},
		{"credit that was not used", []Frame{frameOf(KindTunnelCredit, 0, credit...)}},
		{"credit without a number", []Frame{frameOf(KindTunnelCredit, 0)}},
		{"another kind", []Frame{frameOf(KindExit, 0)}},
		{"a dial the wrong way round", []Frame{frameOf(KindDial, 0, credit...)}},
	} {
		t.Run(row.name, func(t *testing.T) {
			tunnels := NewTunnels(NewConn(nil, io.Discard))
			tunnels.slots[0] = tunnels.tunnel(0)
			var err error
			for i, f := range row.frames {
				if err != nil {
					t.Fatalf("frame %d: %v", i-1, err)
				}
				err = tunnels.Handle(f)
			}
			if !errors.Is(err, ErrProtocol) {
				t.Errorf("%v", err)
			}
		})
	}
	refused := func(uint16) (Socket, error) { return nil, syscall.ECONNREFUSED }
	tunnels := NewTunnels(NewConn(nil, io.Discard))
	tunnels.slots[0] = tunnels.tunnel(0)
	for name, f := range map[string]Frame{
		"port 0":                frameOf(KindDial, 1, 0, 0, 0, 0),
		"port 65536":            frameOf(KindDial, 1, 0, 1, 0, 0),
		"no port":               frameOf(KindDial, 1),
		"a number that is open": frameOf(KindDial, 0, 0, 0, 0, 80),
	} {
		if err := tunnels.Accept(f, refused); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// still is a socket that takes nothing and gives nothing until it is closed.
type still struct {
	once sync.Once
	done chan struct{}
}

func (s *still) Read([]byte) (int, error)         { <-s.done; return 0, net.ErrClosed }
func (s *still) Write([]byte) (int, error)        { <-s.done; return 0, net.ErrClosed }
func (s *still) CloseWrite() error                { return nil }
func (s *still) SetReadDeadline(time.Time) error  { s.Reset(); return nil }
func (s *still) SetWriteDeadline(time.Time) error { s.Reset(); return nil }
func (s *still) Reset()                           { s.once.Do(func() { close(s.done) }) }
func (s *still) Close() error                     { s.Reset(); return nil }

// FuzzTunnels: whatever frames come for tunnels, on either side, they are taken or
// refused with ErrProtocol, within the bounds of memory, and all of it ends.
func FuzzTunnels(f *testing.F) {
	f.Add([]byte{byte(KindDial), 0, byte(KindTunnelData), 0, byte(KindTunnelEOF), 0, byte(KindTunnelEnd), 0})
	f.Add([]byte{byte(KindTunnelEnd), 1, byte(KindTunnelEnd), 1})
	f.Add(bytes.Repeat([]byte{byte(KindTunnelData), 2}, 8))
	f.Add([]byte{byte(KindDial), 9, byte(KindTunnelEnd), 9, byte(KindDial), 9})
	f.Add([]byte{byte(KindTunnelCredit), 1, byte(KindTunnelCredit), 200})
	payloads := map[Kind][]byte{
		KindDial: {0, 0, 0, 80}, KindTunnelCredit: {0, 0, 0, 1}, KindTunnelData: make([]byte, MaxData/2),
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		tunnels := NewTunnels(NewConn(nil, io.Discard))
		for range 3 {
			if !tunnels.Open(&still{done: make(chan struct{})}, 80) {
				t.Fatal("no room")
			}
		}
		for ; len(in) > 1; in = in[2:] {
			frame := Frame{Kind: Kind(in[0]), Stream: in[1] % MaxTunnels}
			frame.Payload = payloads[frame.Kind]
			var err error
			if frame.Kind == KindDial {
				err = tunnels.Accept(frame, func(uint16) (Socket, error) { return &still{done: make(chan struct{})}, nil })
			} else {
				err = tunnels.Handle(frame)
			}
			if err != nil && !errors.Is(err, ErrProtocol) {
				t.Fatal(err)
			}
		}
		tunnels.Close()
		tunnels.mu.Lock()
		defer tunnels.mu.Unlock()
		for i, tn := range tunnels.slots {
			if tn != nil && tn.sink.unacked > TunnelWindow {
				t.Fatalf("tunnel %d holds %d bytes", i, tn.sink.unacked)
			}
		}
	})
}
