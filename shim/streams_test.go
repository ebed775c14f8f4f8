package shim

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// nonblocking opens a pipe whose ends os.File believes to block and that do not, as
// when a process that shares them sets O_NONBLOCK.
func nonblocking(t *testing.T) (r, w *os.File) {
	t.Helper()
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	r, w = os.NewFile(uintptr(fds[0]), "r"), os.NewFile(uintptr(fds[1]), "w")
	t.Cleanup(func() { r.Close(); w.Close() })
	if err := errors.Join(unix.SetNonblock(fds[0], true), unix.SetNonblock(fds[1], true)); err != nil {
		t.Fatal(err)
	}
	return r, w
}

// TestSteady: data passes through descriptors that were made non-blocking, and
// without steady it does not.
func TestSteady(t *testing.T) {
	data := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	pass := func(t *testing.T, reader func(*os.File) io.Reader, writer func(*os.File) io.Writer) ([]byte, error, error) {
		r, w := nonblocking(t)
		end := make(chan error, 1)
		go func() {
			time.Sleep(20 * time.Millisecond)
			_, err := writer(w).Write(data)
			w.Close()
			end <- err
		}()
		got, err := io.ReadAll(reader(r))
		if err != nil {
			r.Close()
		}
		return got, err, <-end
	}
	got, rerr, werr := pass(t, func(f *os.File) io.Reader { return steadyReader(f) }, func(f *os.File) io.Writer { return steadyWriter(f) })
	if rerr != nil || werr != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v, %v", len(got), rerr, werr)
	}
	if _, rerr, _ := pass(t, func(f *os.File) io.Reader { return f }, func(f *os.File) io.Writer { return f }); !errors.Is(rerr, syscall.EAGAIN) {
		t.Errorf("control: %v", rerr)
	}
}

// failing fails at its second write.
type failing struct{ writes int }

func (f *failing) Write(p []byte) (int, error) {
	if f.writes++; f.writes > 1 {
		return 0, syscall.EPIPE
	}
	return len(p), nil
}

func TestLossy(t *testing.T) {
	f := &failing{}
	l := &lossy{w: f}
	for range 5 {
		if n, err := l.Write([]byte("abc")); n != 3 || err != nil {
			t.Errorf("%d %v", n, err)
		}
	}
	if f.writes != 2 {
		t.Errorf("%d writes", f.writes)
	}
}

func TestInterruptible(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	if b, err := io.ReadAll(interruptible{ctx, strings.NewReader("text")}); string(b) != "text" || err != nil {
		t.Errorf("%q %v", b, err)
	}
	r, w := io.Pipe()
	defer w.Close()
	want := errors.New("enough")
	time.AfterFunc(10*time.Millisecond, func() { cancel(want) })
	if _, err := (interruptible{ctx, r}).Read(make([]byte, 1)); !errors.Is(err, want) {
		t.Errorf("%v", err)
	}
}
