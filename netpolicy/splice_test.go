package netpolicy

import (
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pipeWorld is a world with one server that does what it is told.
func pipeWorld(t testing.TB, handle func(c *net.TCPConn)) (*world, string) {
	t.Helper()
	s := newServer(t, "127.0.0.1:0", handle)
	w := newWorld(t, func(w *world) { w.zone.set("api.example.com", "127.0.0.1") })
	return w, w.allow("api.example.com", s.port, Verdict{})
}

// TestHalfClose: each side may end its own direction and go on reading.
func TestHalfClose(t *testing.T) {
	w, target := pipeWorld(t, func(c *net.TCPConn) {
		got, _ := io.ReadAll(c) // to the end
		_, _ = c.Write(append([]byte("got "), got...))
	})
	if got := w.exchange(target, "all of it"); got != "got all of it" {
		t.Errorf("%q", got)
	}
	w, target = pipeWorld(t, func(c *net.TCPConn) {
		_, _ = c.Write([]byte("hello"))
		_ = c.CloseWrite()
		got, _ := io.ReadAll(c)
		if string(got) != "still here" {
			t.Errorf("after its own end the server got %q", got)
		}
	})
	c := w.connect(target)
	if got, err := io.ReadAll(c); string(got) != "hello" || err != nil {
		t.Errorf("%q %v", got, err)
	}
	_, _ = c.Write([]byte("still here"))
	_ = c.CloseWrite()
	if e := w.seen("end", func(e Event) bool { return e.Kind == EventEnd }); e.Sent != 10 || e.Received != 5 {
		t.Errorf("%+v", e)
	}
}

// TestUrgentByte: what comes behind it arrives, both while the connection lasts and at
// its end.
func TestUrgentByte(t *testing.T) {
	w, target := pipeWorld(t, echo)
	c := w.connect(target)
	_, _ = c.Write([]byte("before,"))
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	send := func() {
		var errno error
		if err := raw.Control(func(fd uintptr) { errno = unix.Sendto(int(fd), []byte("!"), unix.MSG_OOB, nil) }); err != nil || errno != nil {
			t.Fatal(err, errno)
		}
	}
	send()
	_, _ = c.Write([]byte("between,"))
	got := make([]byte, len("before,between,"))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "before,between," {
		t.Fatalf("%q %v", got, err)
	}
	send()
	_, _ = c.Write([]byte("after"))
	_ = c.CloseWrite()
	if rest, err := io.ReadAll(c); string(rest) != "after" || err != nil {
		t.Errorf("%q %v", rest, err)
	}
}

// TestServerSpeaksFirst, as for SSH and databases.
func TestServerSpeaksFirst(t *testing.T) {
	w, target := pipeWorld(t, func(c *net.TCPConn) {
		_, _ = c.Write([]byte("SSH-2.0-x\r\n"))
		_, _ = io.Copy(io.Discard, c)
	})
	got := make([]byte, 11)
	if _, err := io.ReadFull(w.connect(target), got); err != nil || string(got) != "SSH-2.0-x\r\n" {
		t.Errorf("%q %v", got, err)
	}
}

// TestChecksum: 64 MiB there and back at once arrive as they were sent.
func TestChecksum(t *testing.T) {
	const size = 64 << 20
	w, target := pipeWorld(t, echo)
	c := w.connect(target)
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	sent := sha256.New()
	go func() {
		random := rand.NewChaCha8([32]byte{1})
		_, _ = io.CopyN(io.MultiWriter(c, sent), random, size)
		_ = c.CloseWrite()
	}()
	got := sha256.New()
	n, err := io.Copy(got, c)
	if err != nil || n != size || string(got.Sum(nil)) != string(sent.Sum(nil)) {
		t.Fatalf("%d bytes, %v", n, err)
	}
	if e := w.seen("end", func(e Event) bool { return e.Kind == EventEnd }); e.Sent != size || e.Received != size {
		t.Errorf("%+v", e)
	}
}

// TestTearDown: a reset on one side ends the other, also when the side that is reset
// had ended its direction, or when one of them takes nothing.
func TestTearDown(t *testing.T) {
	nothing := func(*net.TCPConn) {}
	for name, c := range map[string]struct{ stays, goes func(c *net.TCPConn) }{
		"idle":                             {nothing, nothing},
		"after its end":                    {nothing, func(c *net.TCPConn) { _ = c.CloseWrite() }},
		"after the other's end":            {func(c *net.TCPConn) { _ = c.CloseWrite() }, nothing},
		"with bytes that nobody takes":     {nothing, fillUp},
		"with bytes that it does not take": {fillUp, nothing},
	} {
		for _, side := range []string{"sandbox", "outside"} {
			t.Run(side+", "+name, func(t *testing.T) {
				served := make(chan *net.TCPConn)
				w, target := pipeWorld(t, func(s *net.TCPConn) {
					served <- s
					<-t.Context().Done()
				})
				goes := w.connect(target)
				stays := <-served
				if side == "outside" {
					goes, stays = stays, goes
				}
				c.stays(stays)
				c.goes(goes)
				time.Sleep(50 * time.Millisecond)
				torn := make(chan error, 1)
				go func() { torn <- waitBroken(stays) }()
				reset(goes)
				wantTorn(t, w, torn)
			})
		}
	}
}

func wantTorn(t *testing.T, w *world, torn chan error) {
	t.Helper()
	select {
	case err := <-torn:
		if !errors.Is(err, errBroken) {
			t.Errorf("%v", err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("the other side is still open")
	}
	w.seen("end", func(e Event) bool { return e.Kind == EventEnd })
}

// fillUp writes until nobody takes any more.
func fillUp(c *net.TCPConn) {
	for {
		_ = c.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err := c.Write(make([]byte, 1<<16)); err != nil {
			break
		}
	}
	_ = c.SetWriteDeadline(time.Time{})
}

func descriptors(t testing.TB) (total, pipeEnds int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
			total++
			if strings.HasPrefix(to, "pipe:") {
				pipeEnds++
			}
		}
	}
	return total, pipeEnds
}

// TestIdleConnections: a thousand of them cost two sockets and two goroutines each,
// and no pipe.
func TestIdleConnections(t *testing.T) {
	const n = 1000
	// Not echo: io.Copy between sockets keeps a pipe while it waits.
	w, target := pipeWorld(t, func(c *net.TCPConn) { _, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) })
	fds, pipeEnds := descriptors(t)
	goroutines := runtime.NumGoroutine()
	var open []*net.TCPConn
	for range n {
		c := w.connect(target)
		roundTrip(t, c, "ping")
		open = append(open, c)
	}
	time.Sleep(100 * time.Millisecond)
	nowFds, nowPipes := descriptors(t)
	// The test's own client and server are two more sockets, and the server a goroutine.
	if each := nowFds - fds - 4*n; each > 100 {
		t.Errorf("%d descriptors more than two sockets each", each)
	}
	if nowPipes-pipeEnds > 2*cap(w.g.pipes.free) {
		t.Errorf("%d ends of pipes", nowPipes-pipeEnds)
	}
	if more := runtime.NumGoroutine() - goroutines - 3*n; more > 50 {
		t.Errorf("%d goroutines more than two each", more)
	}
	for _, c := range open {
		c.Close()
	}
	for range 500 {
		if left, _ := descriptors(t); left <= fds+100 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	left, _ := descriptors(t)
	t.Errorf("%d descriptors are left, %d before", left, fds)
}

// TestLeanConnections: the host's memory for what waits in sockets is bounded: behind
// the first connections, each end has small buffers.
func TestLeanConnections(t *testing.T) {
	w, target := pipeWorld(t, echo)
	lean := func() (n int) {
		for fd := range 4096 {
			if size, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF); err == nil && size == 2*bufferSize {
				n++ // the kernel doubles what is asked for: socket(7)
			}
		}
		return n
	}
	before := lean()
	for i := range tunedConns + 5 {
		roundTrip(t, w.connect(target), "x")
		if i+1 == tunedConns && lean() != before {
			t.Errorf("%d of the first connections have small buffers", lean()-before)
		}
	}
	if n := lean() - before; n != 2*5 {
		t.Errorf("%d sockets have small buffers, want 10", n)
	}
}

// TestPipesAreBounded: those that are kept for later.
func TestPipesAreBounded(t *testing.T) {
	p := newPipes(time.Second)
	_, before := descriptors(t)
	var taken []*pipe
	for range 100 {
		one, err := p.get()
		if err != nil {
			t.Fatal(err)
		}
		taken = append(taken, one)
	}
	for _, one := range taken {
		p.put(one)
	}
	if _, now := descriptors(t); now-before != 2*cap(p.free) {
		t.Errorf("%d ends are kept", now-before)
	}
	p.close()
	if _, now := descriptors(t); now != before {
		t.Errorf("%d ends are left", now-before)
	}
}

// TestNoDescriptors: A56: with none left, connections wait, and the gateway goes on.
func TestNoDescriptors(t *testing.T) {
	w, target := pipeWorld(t, echo)
	roundTrip(t, w.connect(target), "before")
	next, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(next)
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	// Room for the test's own end of one connection.
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(next) + 1, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	c := w.connect(target)
	time.Sleep(200 * time.Millisecond)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("kept")); err == nil {
		got, err := io.ReadAll(io.LimitReader(c, 4))
		if string(got) != "kept" && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%q %v", got, err)
		}
	}
	roundTrip(t, w.connect(target), "after")
}
