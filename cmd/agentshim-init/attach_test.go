package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// startAttached runs init as it is in a container that is not agentshim's: among other processes, and
// not the first one.
func startAttached(t *testing.T) *steps {
	t.Helper()
	cmd := exec.Command(binary(t), wire.AttachArg)
	cmd.Env = []string{"HOME=/root", "OWNERS=secret"}
	return stepsOf(greet(t, cmd))
}

// marked are the processes with a word in their arguments.
func marked(t *testing.T, word string) (n int) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && slices.Contains(strings.Split(string(b), "\x00"), word) {
			n++
		}
	}
	return n
}

// lasting is a process of the step's that hides, with a word in its arguments.
func lasting(word string) string {
	return `(setsid sh -c 'while :; do sleep 0.2; done' ` + word + ` </dev/null >/dev/null 2>&1 &); echo hidden; `
}

func TestAttach(t *testing.T) {
	s := startAttached(t)
	if s.hello.PID == 1 || !slices.Equal(s.hello.Environ, []string{"HOME=/root"}) {
		t.Errorf("hello: pid %d, %q", s.hello.PID, s.hello.Environ)
	}
	s.script(1, lasting("attached-1")+"kill -TERM $(cut -d' ' -f4 /proc/$PPID/stat); sleep 0.3; exit 4")
	if e := s.ends(1); e.Code != 4 || e.Left < 1 || e.Lost {
		t.Errorf("%+v", e)
	}
	if n := marked(t, "attached-1"); n != 0 {
		t.Errorf("%d processes left", n)
	}
	s.in.Close()
	s.peer.ends()
}

// TestAttachEnds: whatever ends the step, all of its processes end, and no other one does.
func TestAttachEnds(t *testing.T) {
	hidden, others := fmt.Sprintf("attached-2-%d", os.Getpid()), fmt.Sprintf("not-attached-%d", os.Getpid())
	other := exec.Command("sh", "-c", "while :; do sleep 0.2; done", others)
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	})
	for _, row := range []struct {
		name string
		end  func(s *steps) error
		// later says that the processes may outlast init for a moment.
		later bool
	}{
		{name: "the connection's end", end: func(s *steps) error { return s.in.Close() }},
		{name: "a frame of no step", end: func(s *steps) error { return s.conn.Send(wire.KindFinish, 0, nil) }},
		{name: "a broken frame", end: func(s *steps) error {
			_, err := s.in.Write([]byte("no frame at all"))
			return err
		}},
		{name: "init is stopped", end: func(s *steps) error {
			return errors.Join(s.cmd.Process.Signal(unix.SIGSTOP), s.in.Close())
		}},
		{name: "init is killed", end: func(s *steps) error { return s.cmd.Process.Kill() }, later: true},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := startAttached(t)
			s.script(1, lasting(hidden)+"exec sleep 1000")
			s.says(1, "hidden")
			for end := time.Now().Add(10 * time.Second); marked(t, hidden) == 0 && time.Now().Before(end); {
				time.Sleep(10 * time.Millisecond)
			}
			if marked(t, hidden) == 0 {
				t.Fatal("no process hides")
			}
			if err := row.end(s); err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, readerOf(s.conn))
			_ = s.cmd.Wait()
			for end := time.Now().Add(10 * time.Second); row.later && marked(t, hidden) > 0 && time.Now().Before(end); {
				time.Sleep(10 * time.Millisecond)
			}
			if n := marked(t, hidden); n != 0 {
				t.Errorf("%d processes left", n)
			}
			if marked(t, others) == 0 {
				t.Error("another process ended")
			}
		})
	}
}

// readerOf gives nothing, until the connection's end.
func readerOf(c *wire.Conn) io.Reader { return untilEnd{c} }

type untilEnd struct{ c *wire.Conn }

func (u untilEnd) Read([]byte) (int, error) {
	_, err := u.c.Recv()
	return 0, err
}

// TestAttachFile: a step's file is in /tmp, for the step alone.
func TestAttachFile(t *testing.T) {
	s := startAttached(t)
	name := filepath.Join(wire.AttachDir, "agentshim-test-"+filepath.Base(t.TempDir()))
	step := s.conn.Of(1)
	if err := errors.Join(
		step.SendJSON(wire.KindFile, wire.File{Path: name, Size: 5}), step.Send(wire.KindFileData, 0, []byte("hello")),
		step.SendJSON(wire.KindLaunch, launchOf("sh", "-c", `stat -c %a "$0"; cat "$0"`, name)),
	); err != nil {
		t.Fatal(err)
	}
	if e := s.ends(1); e.Code != 0 || s.out[1] != "600\nhello" {
		t.Errorf("%+v %q %v", e, s.out[1], s.refused)
	}
	if _, err := os.Lstat(name); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is left: %v", err)
	}
}

// TestHold: who has the same uid can execute the program by the link of a process that holds it, and
// by no other one of that program.
func TestHold(t *testing.T) {
	dir, err := os.MkdirTemp("/var/tmp", "agentshim-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	program, nobody := filepath.Join(dir, "init"), &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	b, err := os.ReadFile(binary(t))
	if err := errors.Join(err, os.Chmod(dir, 0o755), os.WriteFile(program, b, 0o111), os.Chown(program, 65534, 65534)); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		arg  string
		want error
	}{{holdArg, nil}, {wire.AttachArg, unix.EACCES}} {
		cmd := exec.Command(program, row.arg)
		cmd.SysProcAttr, cmd.Env = nobody, []string{}
		in, err1 := cmd.StdinPipe()
		out, err2 := cmd.StdoutPipe()
		if err := errors.Join(err1, err2, cmd.Start()); err != nil {
			t.Fatal(err)
		}
		line := make([]byte, 1)
		if _, err := io.ReadFull(out, line); err != nil { // its first word: it has done what it does first
			t.Error(err)
		}
		again := exec.Command(fmt.Sprintf("/proc/%d/exe", cmd.Process.Pid), wire.DialArg, "x")
		again.SysProcAttr = nobody
		var failed *exec.ExitError
		if err := again.Run(); row.want != nil && !errors.Is(err, row.want) || row.want == nil && !errors.As(err, &failed) {
			t.Errorf("%s: %v, want %v", row.arg, err, row.want)
		}
		in.Close()
		rest, _ := io.ReadAll(out)
		if row.arg == holdArg && string(line)+string(rest) != fmt.Sprintln(cmd.Process.Pid) {
			t.Errorf("it says %q", string(line)+string(rest))
		}
		if err := cmd.Wait(); row.arg == holdArg && err != nil {
			t.Errorf("its end: %v", err)
		}
	}
}
