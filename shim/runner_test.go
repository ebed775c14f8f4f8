package shim

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// sh is the program under test here, not a way to build commands.
func sh(text string) Command { return Command{Path: "/bin/sh", Args: []string{"-c", text}} }

func TestRunPassesNothingOfTheCallersEnvironment(t *testing.T) {
	t.Setenv("AGENTSHIM_MARKER", "leak")
	for name, env := range map[string][]string{"nil": nil, "empty": {}, "one": {"A=b c"}} {
		t.Run(name, func(t *testing.T) {
			out, err := Exec{}.Run(t.Context(), Command{Path: "/usr/bin/env", Env: env})
			if err != nil {
				t.Fatal(err)
			}
			want := ""
			if len(env) > 0 {
				want = strings.Join(env, "\n") + "\n"
			}
			if string(out.Stdout) != want {
				t.Errorf("environment %q, want %q", out.Stdout, want)
			}
		})
	}
}

func TestRunReportsHowItEnded(t *testing.T) {
	for _, tc := range []struct {
		name, text string
		want       ExitStatus
	}{
		{"code", "echo out; echo why >&2; exit 7", ExitStatus{Code: 7}},
		{"signal", "echo out; echo why >&2; kill -9 $$", ExitStatus{Code: -1, Signal: unix.SIGKILL}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var progress bytes.Buffer
			cmd := sh(tc.text)
			cmd.Progress = &progress
			out, err := Exec{}.Run(t.Context(), cmd)
			var failed *EngineError
			var status ExitStatus
			if !errors.As(err, &failed) || !errors.As(err, &status) || status != tc.want {
				t.Fatalf("error %#v", err)
			}
			if failed.Stderr != "why\n" || string(out.Stdout) != "out\n" || string(out.Stderr) != "why\n" {
				t.Errorf("output %q, %q, error's %q", out.Stdout, out.Stderr, failed.Stderr)
			}
			if got := progress.String(); !strings.Contains(got, "out\n") || !strings.Contains(got, "why\n") {
				t.Errorf("progress %q", got)
			}
		})
	}
}

func TestRunRefusesARelativePath(t *testing.T) {
	if _, err := (Exec{}).Run(t.Context(), Command{Path: "env"}); err == nil {
		t.Error("a relative path was looked up")
	}
	_, err := Exec{}.Run(t.Context(), Command{Path: "/no/such"})
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}

func TestRunBoundsOutput(t *testing.T) {
	out, err := Exec{}.Run(t.Context(), sh("exec head -c 9000000 /dev/zero"))
	if !errors.Is(err, ErrOutputTooLarge) || len(out.Stdout) != maxStdout {
		t.Errorf("%d bytes, error %v", len(out.Stdout), err)
	}
	out, err = Exec{}.Run(t.Context(), sh("head -c 1000000 /dev/zero >&2; echo end >&2"))
	if err != nil || len(out.Stderr) != maxStderr || !bytes.HasSuffix(out.Stderr, []byte("end\n")) {
		t.Errorf("%d bytes of stderr, error %v", len(out.Stderr), err)
	}
}

func TestRunEndsTheGroupWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("why")
	r, w := io.Pipe()
	cmd := sh("sleep 100 & echo $!; wait")
	cmd.Progress = w
	go func() {
		line := make([]byte, 32)
		n, _ := r.Read(line)
		pid, _ := strconv.Atoi(strings.TrimSpace(string(line[:n])))
		cancel(why)
		// Until it is reaped the child is a zombie, which a signal still reaches.
		for range 200 {
			if stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat"); err != nil || strings.Contains(string(stat), ") Z ") {
				r.Close()
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("child %d outlived the command", pid)
		r.Close()
	}()
	start := time.Now()
	_, err := Exec{}.Run(ctx, cmd)
	if !errors.Is(err, why) {
		t.Errorf("error %v", err)
	}
	if took := time.Since(start); took > stopGrace {
		t.Errorf("took %v", took)
	}
	<-func() chan struct{} {
		c := make(chan struct{})
		go func() { io.Copy(io.Discard, r); close(c) }()
		return c
	}()
}

func TestStart(t *testing.T) {
	p, err := Exec{}.Start(t.Context(), sh("echo err >&2; cat; exit 3"))
	if err != nil {
		t.Fatal(err)
	}
	pgid, err := unix.Getpgid(p.PID())
	if err != nil || pgid != p.PID() {
		t.Errorf("process group %d of %d, error %v", pgid, p.PID(), err)
	}
	if _, err := io.WriteString(p.Stdin(), "through"); err != nil {
		t.Fatal(err)
	}
	p.Stdin().Close()
	status, err := p.Wait()
	if err != nil || status != (ExitStatus{Code: 3}) {
		t.Fatalf("status %v, error %v", status, err)
	}
	// What is unread when the process ends is still there after Wait.
	out, _ := io.ReadAll(p.Stdout())
	stderr, _ := io.ReadAll(p.Stderr())
	if string(out) != "through" || string(stderr) != "err\n" {
		t.Errorf("streams %q, %q", out, stderr)
	}
	if err := p.Signal(unix.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("signal after the end: %v", err)
	}
}

func TestStartEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	p, err := Exec{}.Start(ctx, Command{Path: "/bin/sleep", Args: []string{"100"}})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if status, err := p.Wait(); err != nil || status.Signal != unix.SIGKILL {
		t.Errorf("status %v, error %v", status, err)
	}
	if _, err := (Exec{}).Start(t.Context(), Command{Path: "/no/such"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}
