package shim

import (
	"bufio"
	"context"
	"io"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestPodmanClientKilled: the streams end with the client's first process, also where another
// one holds them. What it wrote before it ended by itself is still there.
func TestPodmanClientKilled(t *testing.T) {
	begin := func(script string) *podmanRun {
		p := &podman{runner: Exec{}}
		a, err := p.attach(context.Background(), Command{Path: "/bin/sh", Args: []string{"-c", script}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(a.close)
		return a.(*podmanRun)
	}
	r := begin("sleep 300 & echo ready; wait")
	out := bufio.NewReader(r.stdout())
	if line, err := out.ReadString('\n'); line != "ready\n" {
		t.Fatal(line, err)
	}
	pid := r.proc.PID()
	t.Cleanup(func() { _ = unix.Kill(-pid, unix.SIGKILL) })
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, out)
		close(ended)
	}()
	if !within(10*time.Second, ended) {
		t.Error("the stream goes on")
	}
	if _, err := r.stdin().Write([]byte("x")); err == nil {
		t.Error("standard input is open")
	}
	r = begin("echo last")
	<-r.done()
	if rest, err := io.ReadAll(r.stdout()); string(rest) != "last\n" || err != nil {
		t.Errorf("%q %v", rest, err)
	}
}
