package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"testing"
	"time"
)

func outputPipe(t *testing.T) (*output, *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return &output{f: r, left: -1}, w
}

// within fails t when f takes longer than a few seconds.
func within(t *testing.T, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("doesn't end")
	}
}

func mustWrite(t *testing.T, w *os.File, p []byte) {
	t.Helper()
	if _, err := w.Write(p); err != nil {
		t.Fatal(err)
	}
}

// TestOutput: the pipe's writing end stays open in each row.
func TestOutput(t *testing.T) {
	data := bytes.Repeat([]byte("0123456789abcdef"), 1000)
	t.Run("end after the data", func(t *testing.T) {
		o, w := outputPipe(t)
		mustWrite(t, w, data)
		o.end()
		within(t, func() {
			if got, err := io.ReadAll(o); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		})
	})
	t.Run("end while a read waits", func(t *testing.T) {
		o, w := outputPipe(t)
		mustWrite(t, w, data)
		time.AfterFunc(50*time.Millisecond, o.end)
		within(t, func() {
			if got, err := io.ReadAll(o); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		})
	})
	t.Run("someone writes on", func(t *testing.T) {
		o, w := outputPipe(t)
		go func() {
			for {
				if _, err := w.Write(data); err != nil {
					return
				}
			}
		}()
		time.AfterFunc(20*time.Millisecond, o.end)
		within(t, func() {
			if _, err := io.Copy(io.Discard, o); err != nil {
				t.Error(err)
			}
		})
		w.Close()
	})
	t.Run("closed by all", func(t *testing.T) {
		o, w := outputPipe(t)
		mustWrite(t, w, data)
		w.Close()
		if got, err := io.ReadAll(o); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
		o.end()
		if n, err := o.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("%d %v", n, err)
		}
	})
}
