package wire

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"
)

// endless never stops giving bytes and counts them.
type endless struct{ n int }

func (e *endless) Read(p []byte) (int, error) {
	e.n += len(p)
	return len(p), nil
}

// counter takes frames and counts their bytes per kind.
type counter struct {
	mu    sync.Mutex
	bytes map[Kind]int
}

func (c *counter) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.bytes == nil {
		c.bytes = map[Kind]int{}
	}
	c.bytes[Kind(p[0])] += len(p) - headerSize
	return len(p), nil
}

func (c *counter) of(k Kind) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes[k]
}

func TestSourceStaysWithinCredit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out counter
		src := &endless{}
		s := NewSource(NewConn(nil, &out), Stdout)
		ended := make(chan error)
		go func() { ended <- s.Run(src) }()
		total := Window
		for _, grant := range []int{0, 1, 7, MaxData, MaxData + 1, Window} {
			total += grant
			if grant > 0 {
				if err := s.Grant(uint32(grant)); err != nil {
					t.Fatal(err)
				}
			}
			synctest.Wait()
			if out.of(KindData) != total || src.n != total {
				t.Fatalf("sent %d, read %d with a credit of %d in all", out.of(KindData), src.n, total)
			}
		}
		s.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestGrantBeyondWindow(t *testing.T) {
	s := NewSource(NewConn(nil, io.Discard), Stdout)
	for _, n := range []uint32{1, Window, 0xffffffff} {
		if err := s.Grant(n); !errors.Is(err, ErrProtocol) {
			t.Errorf("grant of %d on a full window: %v", n, err)
		}
	}
	if err := s.Run(io.LimitReader(&endless{}, 10)); err != nil {
		t.Fatal(err)
	}
	if err := s.Grant(11); !errors.Is(err, ErrProtocol) {
		t.Errorf("grant of more than was sent: %v", err)
	}
	if err := s.Grant(10); err != nil {
		t.Errorf("grant of what was sent: %v", err)
	}
}

func TestSourceEnds(t *testing.T) {
	for _, row := range []struct {
		name string
		src  io.Reader
	}{
		{"at the end", bytes.NewReader([]byte("abc"))},
		{"with data and end in one read", iotest.DataErrReader(bytes.NewReader([]byte("abc")))},
		{"at a read error", io.MultiReader(bytes.NewReader([]byte("abc")), iotest.ErrReader(errShort))},
	} {
		t.Run(row.name, func(t *testing.T) {
			var out bytes.Buffer
			if err := NewSource(NewConn(nil, &out), Stderr).Run(row.src); err != nil {
				t.Fatal(err)
			}
			want := raw(byte(KindData), Stderr, 0, 0, 3, "abc") + raw(byte(KindEOF), Stderr, 0, 0, 0, "")
			if out.String() != want {
				t.Errorf("%q", out.String())
			}
		})
	}
	t.Run("at a write error", func(t *testing.T) {
		if err := NewSource(NewConn(nil, &shortWriter{}), Stdout).Run(&endless{}); !errors.Is(err, errShort) {
			t.Error(err)
		}
	})
}

func TestSinkRefuses(t *testing.T) {
	full := func() *Sink {
		s := NewSink(NewConn(nil, io.Discard), Stdin)
		for range Window / MaxData {
			if err := s.Put(make([]byte, MaxData)); err != nil {
				t.Fatal(err)
			}
		}
		return s
	}
	if err := full().Put([]byte{0}); !errors.Is(err, ErrProtocol) {
		t.Errorf("a byte past the window: %v", err)
	}
	dead := full()
	dead.kill()
	if err := dead.Put([]byte{0}); !errors.Is(err, ErrProtocol) {
		t.Errorf("a byte past a dead sink's window: %v", err)
	}
	ended := NewSink(NewConn(nil, io.Discard), Stdin)
	ended.CloseWrite()
	if err := ended.Put([]byte{0}); !errors.Is(err, ErrProtocol) {
		t.Errorf("a byte past the end: %v", err)
	}
}

// gate lets one write pass per value.
type gate struct {
	open chan struct{}
	bytes.Buffer
}

func (g *gate) Write(p []byte) (int, error) {
	<-g.open
	return g.Buffer.Write(p)
}

func TestSinkGrantsWhatWasWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out counter
		dst := &gate{open: make(chan struct{})}
		s := NewSink(NewConn(nil, &out), Stdout)
		ended := make(chan error)
		go func() { ended <- s.Run(dst) }()
		if err := s.Put([]byte("abc")); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if out.of(KindCredit) != 0 {
			t.Error("credit for what was not written")
		}
		dst.open <- struct{}{}
		synctest.Wait()
		if out.of(KindCredit) != 4 {
			t.Error("no credit for what was written")
		}
		s.CloseWrite()
		if err := <-ended; err != nil || dst.String() != "abc" {
			t.Errorf("%q %v", dst.String(), err)
		}
	})
}

func TestDeadSinkEarnsNoCredit(t *testing.T) {
	var out counter
	s := NewSink(NewConn(nil, &out), Stdin)
	if err := s.Put([]byte("abc")); err != nil {
		t.Fatal(err)
	}
	if err := s.Run(&shortWriter{}); !errors.Is(err, errShort) {
		t.Errorf("%v", err)
	}
	if err := s.Put([]byte("def")); err != nil {
		t.Errorf("data for a dead sink: %v", err)
	}
	if len(s.pending) > 0 || out.of(KindCredit) > 0 {
		t.Errorf("%d bytes kept, %d bytes of credit frames", len(s.pending), out.of(KindCredit))
	}
}

// TestSinkOutlivesConnection: a slow reader gets everything that came before the
// end, though the peer is gone by then.
func TestSinkOutlivesConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, w := io.Pipe()
		r.Close() // every credit fails
		dst := &gate{open: make(chan struct{})}
		s := NewSink(NewConn(nil, w), Stdout)
		ended := make(chan error)
		go func() { ended <- s.Run(dst) }()
		for _, p := range []string{"abc", "def"} {
			if err := s.Put([]byte(p)); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		s.CloseWrite()
		close(dst.open)
		if err := <-ended; err != nil || dst.String() != "abcdef" {
			t.Errorf("%q %v", dst.String(), err)
		}
	})
}

func TestSinkConnectionError(t *testing.T) {
	s := NewSink(NewConn(nil, &shortWriter{}), Stdout)
	if err := s.Put([]byte("abc")); err != nil {
		t.Fatal(err)
	}
	if err := s.Run(io.Discard); !errors.Is(err, errShort) || !s.dead {
		t.Errorf("%v, dead: %v", err, s.dead)
	}
}

// pipes are two connected Conns.
func pipes() (a, b *Conn, cut func()) {
	ar, bw := io.Pipe()
	br, aw := io.Pipe()
	return NewConn(ar, aw), NewConn(br, bw), func() {
		for _, c := range []io.Closer{ar, bw, br, aw} {
			c.Close()
		}
	}
}

// TestControlPassesStalledStream: nobody reads stdout, and the exit frame arrives.
func TestControlPassesStalledStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shim, inside, cut := pipes()
		source := NewSource(inside, Stdout)
		var wg sync.WaitGroup
		wg.Go(func() { _ = source.Run(&endless{}) })
		sink := NewSink(shim, Stdout)
		stalled := &gate{open: make(chan struct{})}
		wg.Go(func() { _ = sink.Run(stalled) })
		exited := false
		wg.Go(func() {
			for !exited {
				f, err := shim.Recv()
				if err != nil {
					t.Error(err)
					return
				}
				if exited = f.Kind == KindExit; exited {
					return
				}
				if err := sink.Put(f.Payload); err != nil {
					t.Error(err)
				}
			}
		})
		synctest.Wait()
		if source.left != 0 {
			t.Error("the stream is not stalled")
		}
		if err := inside.SendJSON(KindExit, Exit{Code: 3}); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if !exited {
			t.Error("the exit frame is behind data that nobody reads")
		}
		cut()
		source.Close()
		close(stalled.open)
		sink.CloseWrite()
		wg.Wait()
	})
}

// flow is a direction of TestFlow: random data in random pieces, with pauses.
type flow struct {
	data   []byte
	source *Source
	sink   *Sink
	got    bytes.Buffer
	rnd    *rand.Rand
}

func (f *flow) pause() {
	if f.rnd.IntN(8) == 0 {
		time.Sleep(time.Duration(f.rnd.IntN(1000)) * time.Microsecond)
	}
}

// Read gives the next piece of the data.
func (f *flow) Read(p []byte) (int, error) {
	f.pause()
	if len(f.data) == 0 {
		return 0, io.EOF
	}
	n := copy(p, f.data[:min(len(f.data), 1+f.rnd.IntN(2*MaxData))])
	f.data = f.data[n:]
	return n, nil
}

type slowly struct {
	*flow
	rnd *rand.Rand
}

func (s slowly) Write(p []byte) (int, error) {
	if s.rnd.IntN(8) == 0 {
		time.Sleep(time.Duration(s.rnd.IntN(1000)) * time.Microsecond)
	}
	return s.got.Write(p)
}

// route gives a connection's frames to the ends of its streams until count of the
// peer's streams have ended.
func route(c *Conn, streams map[uint8]*flow, sinks int) error {
	for {
		f, err := c.Recv()
		if err != nil {
			return err
		}
		switch f.Kind {
		case KindData:
			err = streams[f.Stream].sink.Put(f.Payload)
		case KindEOF:
			streams[f.Stream].sink.CloseWrite()
			sinks--
		case KindCredit:
			var n uint32
			if n, err = f.Uint32(); err == nil {
				err = streams[f.Stream].source.Grant(n)
			}
		}
		if err != nil {
			return err
		}
	}
}

// TestFlow is the model: whatever the sizes of reads and writes and the pauses
// between them, each stream's bytes arrive complete and in order.
func TestFlow(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) { testFlow(t, seed) })
	}
}

func testFlow(t *testing.T, seed uint64) {
	shim, inside, cut := pipes()
	rnd := rand.New(rand.NewPCG(seed, 1))
	streams := map[uint8]*flow{}
	want := map[uint8][]byte{}
	var pumps, routes sync.WaitGroup
	for _, id := range []uint8{Stdin, Stdout, Stderr} {
		from, to := inside, shim
		if id == Stdin {
			from, to = shim, inside
		}
		data := make([]byte, rnd.IntN(6*Window))
		for i := range data {
			data[i] = byte(rnd.Uint32())
		}
		want[id] = data
		f := &flow{data: data, source: NewSource(from, id), sink: NewSink(to, id), rnd: rand.New(rand.NewPCG(seed, uint64(id)))}
		streams[id] = f
		pumps.Go(func() {
			if err := f.source.Run(f); err != nil {
				t.Errorf("seed %d stream %d: source: %v", seed, id, err)
			}
		})
		pumps.Go(func() {
			if err := f.sink.Run(slowly{f, rand.New(rand.NewPCG(seed, 100+uint64(id)))}); err != nil {
				t.Errorf("seed %d stream %d: sink: %v", seed, id, err)
			}
		})
	}
	for _, c := range []*Conn{shim, inside} {
		routes.Go(func() {
			if err := route(c, streams, 3); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrClosedPipe) {
				t.Errorf("seed %d: %v", seed, err)
			}
		})
	}
	pumps.Wait()
	cut()
	routes.Wait()
	for id, f := range streams {
		if !bytes.Equal(f.got.Bytes(), want[id]) {
			t.Errorf("seed %d stream %d: %d bytes arrived of %d, or not the same", seed, id, f.got.Len(), len(want[id]))
		}
	}
}

// TestAbandon: a sink whose writer stands still takes everything once it is abandoned.
func TestAbandon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shim, inside, cut := pipes()
		source := NewSource(inside, Stdout)
		var wg sync.WaitGroup
		ended := false
		wg.Go(func() {
			_ = source.Run(io.LimitReader(&endless{}, 5*Window+1))
			ended = true
		})
		sink := NewSink(shim, Stdout)
		stalled := &gate{open: make(chan struct{})}
		wg.Go(func() { _ = sink.Run(stalled) })
		wg.Go(func() { // the peer's receiving side
			for {
				f, err := inside.Recv()
				if err != nil {
					return
				}
				n, err := f.Uint32()
				if err == nil {
					err = source.Grant(n)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for {
				f, err := shim.Recv()
				if err != nil {
					return
				}
				if f.Kind == KindEOF {
					sink.CloseWrite()
				} else if err := sink.Put(f.Payload); err != nil {
					t.Error(err)
				}
			}
		})
		synctest.Wait()
		if ended {
			t.Error("the stream is not stalled")
		}
		for range 2 {
			if err := sink.Abandon(); err != nil {
				t.Error(err)
			}
		}
		synctest.Wait()
		if !ended || source.left != Window {
			t.Errorf("ended %v, credit %d", ended, source.left)
		}
		close(stalled.open)
		synctest.Wait()
		cut()
		wg.Wait()
	})
}
