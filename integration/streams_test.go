package integration

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentshim/agentshim/shim"
)

// Sizes of the streams; make soak has larger ones.
const mib = 1 << 20

func streamed() (stdin, output int) {
	if os.Getenv("AGENTSHIM_SOAK") != "" {
		return 100 * mib, 1024
	}
	return 20 * mib, 64
}

func random(t *testing.T, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	return b
}

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// wantBytes compares long outputs without printing them.
func wantBytes(t *testing.T, name, got string, want []byte) {
	t.Helper()
	if got == string(want) {
		return
	}
	i := 0
	for i < len(got) && i < len(want) && got[i] == want[i] {
		i++
	}
	t.Errorf("%s: %d bytes, want %d; they differ at byte %d: %q", name, len(got), len(want), i, got[i:min(len(got), i+200)])
}

// program runs an argv in a plain sandbox, quietly, so that stderr is the program's.
func (s setup) program(t *testing.T, fields spec, c call, argv ...string) result {
	t.Helper()
	return s.call(t, c, append([]string{"exec", "--quiet", "--spec", s.write(t, fields), "--command", "--"}, argv...)...)
}

// P17: every size of standard input comes through, and its end.
func TestStdin(t *testing.T) {
	large, _ := streamed()
	bothWays(t, func(t *testing.T, s setup) {
		for _, size := range []int{0, 64<<10 + 1, large} {
			in := random(t, size)
			r := s.program(t, nil, call{Stdin: bytes.NewReader(in)}, "cat").ok(t)
			wantBytes(t, fmt.Sprintf("cat of %d bytes", size), r.Stdout, in)
			if r.Stderr != "" {
				t.Errorf("stderr: %q", r.Stderr)
			}
		}
		// The engine without --interactive: the input is dropped.
		cmd, cancel := s.command(t, call{Stdin: strings.NewReader("x")}, s.engine, "run", "--rm", "--network=none", "agentshim/hello:test", "cat")
		defer cancel()
		if r := finish(t, cmd); r.Stdout != "" {
			t.Errorf("control: %q", r.Stdout)
		}
	})
}

// P19, P20's sizes, P21, P25: two clean streams, byte for byte, nothing of
// agentshim's or the engine's in them.
func TestOutputs(t *testing.T) {
	bothWays(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		one, two := random(t, 8191*128+1), random(t, 8193*129)
		place(t, filepath.Join(dir, "one"), one, 0o644)
		place(t, filepath.Join(dir, "two"), two, 0o644)
		s.own(t, dir)
		fields := spec{"workspace": map[string]any{"source": dir}}
		// Each file in blocks of each size: three times after one another.
		blocks := func(name, to string) string {
			return fmt.Sprintf("for b in 8191 8192 8193; do dd if=%s bs=$b %s 2>/dev/null; done", name, to)
		}
		r := s.program(t, fields, call{}, "sh", "-c", "{ "+blocks("two", ">&2")+"; } & "+blocks("one", "")+"; wait; exit 3")
		if r.Code != 3 {
			t.Errorf("exit %d, want 3", r.Code)
		}
		wantBytes(t, "stdout", r.Stdout, bytes.Repeat(one, 3))
		wantBytes(t, "stderr", r.Stderr, bytes.Repeat(two, 3))
		t.Run("without a last newline, CR and LF as they are", func(t *testing.T) {
			r := s.program(t, nil, call{}, "printf", `a\r\nb\nc`).ok(t)
			wantBytes(t, "stdout", r.Stdout, []byte("a\r\nb\nc"))
		})
		if s.engine == "docker" {
			return // no client runs here
		}
		t.Run("P25", func(t *testing.T) {
			r := s.program(t, nil, call{Env: []string{"PATH=" + noisyClient(t, s) + ":" + os.Getenv("PATH")}}, "sh", "-c", "echo out; echo err >&2").ok(t)
			if r.Stdout != "out\n" || r.Stderr != "err\n" {
				t.Errorf("%+v", r)
			}
		})
	})
}

// noisyClient is a folder with a client that prints a banner before it becomes the
// engine's own.
func noisyClient(t *testing.T, s setup) string {
	t.Helper()
	real, err := exec.LookPath(s.engine)
	if err != nil {
		t.Fatal(err)
	}
	dir := s.folder(t)
	place(t, filepath.Join(dir, s.engine), fmt.Appendf(nil, "#!/bin/sh\necho 'banner of the day' >&2\nexec %s \"$@\"\n", real), 0o755)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// counter hashes what is written to it; pause is slept before each of the first writes.
type counter struct {
	hash   hash.Hash
	n      int64
	pause  time.Duration
	paused int
}

func (c *counter) Write(p []byte) (int, error) {
	if c.paused > 0 {
		c.paused--
		time.Sleep(c.pause)
	}
	c.n += int64(len(p))
	return c.hash.Write(p)
}

func (c *counter) sum() string { return hex.EncodeToString(c.hash.Sum(nil)) }

// P19: a large output on both streams at once, and a reader that is slow at first.
func TestLargeOutput(t *testing.T) {
	_, total := streamed()
	bothWays(t, func(t *testing.T, s setup) {
		half := total / 2
		if !s.full() {
			half = 4
		}
		dir := s.folder(t)
		block := random(t, mib)
		place(t, filepath.Join(dir, "block"), block, 0o644)
		s.own(t, dir)
		want := sha256.New()
		for range half {
			want.Write(block)
		}
		script := fmt.Sprintf(`{ for i in $(seq %[1]d); do cat block >&2; done; } & for i in $(seq %[1]d); do cat block; done; wait`, half)
		file := s.write(t, spec{"workspace": map[string]any{"source": dir}})
		cmd, cancel := s.command(t, call{}, agentshim, "exec", "--quiet", "--spec", file, "--command", "--", "sh", "-c", script)
		defer cancel()
		stdout := &counter{hash: sha256.New(), pause: 50 * time.Millisecond, paused: 20}
		stderr := &counter{hash: sha256.New()}
		cmd.Stdout, cmd.Stderr = stdout, stderr
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		for name, c := range map[string]*counter{"stdout": stdout, "stderr": stderr} {
			if c.n != int64(half)*mib || c.sum() != hex.EncodeToString(want.Sum(nil)) {
				t.Errorf("%s: %d bytes with another digest, want %d", name, c.n, half*mib)
			}
		}
	})
}

// endless never ends and counts what was taken.
type endless struct{ n int64 }

func (e *endless) Read(p []byte) (int, error) {
	e.n += int64(len(p))
	return len(p), nil
}

// P18: an endless writer on standard input neither holds up the end nor changes
// the exit code of a harness that never reads.
func TestUnreadStdin(t *testing.T) {
	bothWays(t, func(t *testing.T, s setup) {
		in := &endless{}
		r := s.program(t, nil, call{Stdin: in, Timeout: time.Minute}, "sh", "-c", "sleep 1; echo done; exit 7")
		if r.Code != 7 || r.Stdout != "done\n" || r.Stderr != "" {
			t.Errorf("%+v", r)
		}
		if in.n < 64<<10 {
			t.Errorf("only %d bytes were taken: nothing was left unread", in.n)
		}
		t.Run("closed by the harness", func(t *testing.T) {
			r := s.program(t, nil, call{Stdin: &endless{}, Timeout: time.Minute}, "sh", "-c", "exec <&-; sleep 0.5; exit 8")
			if r.Code != 8 || r.Stderr != "" {
				t.Errorf("%+v", r)
			}
		})
	})
}

// A harness that closes its outputs early runs on.
func TestOutputClosedByHarness(t *testing.T) {
	bothWays(t, func(t *testing.T, s setup) {
		r := s.program(t, nil, call{}, "sh", "-c", "echo out; exec >&-; sleep 0.3; echo err >&2; exec 2>&-; sleep 0.3; exit 5")
		if r.Code != 5 || r.Stdout != "out\n" || r.Stderr != "err\n" {
			t.Errorf("%+v", r)
		}
	})
}

// P16: started without any of the three streams, or without standard input alone.
func TestClosedStreams(t *testing.T) {
	bothWays(t, func(t *testing.T, s setup) {
		of := s.targetText(t)
		for _, closed := range []string{"<&-", "<&- >&- 2>&-"} {
			result := filepath.Join(s.private(t), "result.json")
			script := fmt.Sprintf(`exec "$0" exec %s --result %s --command -- sh -c 'cat; echo o; echo e >&2; exit 9' %s`, of, result, closed)
			cmd, cancel := s.command(t, call{Timeout: time.Minute}, "/bin/sh", "-c", script, agentshim)
			r := finish(t, cmd)
			cancel()
			if r.Code != 9 {
				t.Errorf("with %s: %+v", closed, r)
			}
			if rec := readRecord(t, result); rec.Exit != 9 || rec.Harness == nil || rec.Reason != "" {
				t.Errorf("with %s: record says exit %d %q", closed, rec.Exit, rec.Reason)
			}
		}
	})
}

// Nothing that agentshim starts keeps the caller's output open: the reader sees
// the end when agentshim has ended. Rootless Podman leaves a process behind, so it
// gets a runtime folder where none runs yet.
func TestOutputsEnd(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		c := call{}
		if s.rootless() {
			run, data := s.private(t), s.private(t)
			c.Env = []string{"XDG_RUNTIME_DIR=" + run, "XDG_DATA_HOME=" + data}
			defer endPause(t, filepath.Join(run, "libpod/tmp/pause.pid"))
		}
		cmd, cancel := s.command(t, c, agentshim, "exec", "--spec", s.write(t, nil), "--", "echo out")
		defer cancel()
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		cmd.Stdout, cmd.Stderr = w, w
		if err := errors.Join(cmd.Start(), w.Close()); err != nil {
			t.Fatal(err)
		}
		end := make(chan error, 1)
		go func() {
			_, err := io.Copy(io.Discard, r)
			end <- err
		}()
		var exit *exec.ExitError
		if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		select {
		case err := <-end:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(2 * time.Second):
			t.Error("the output is still open 2 s after agentshim ended")
		}
	})
}

// endPause ends the process that keeps a rootless Podman's namespaces, and fails t
// if there is none: then the test showed nothing.
func endPause(t *testing.T, file string) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Error(err)
		return
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err == nil {
		err = syscall.Kill(pid, syscall.SIGKILL)
	}
	if err != nil {
		t.Error(err)
	}
}

// full says that s is one of the two set-ups, one of each engine, that try what
// does not depend on who calls.
func (s setup) full() bool { return s.name == "docker-root" || s.name == "podman-rootless" }

// prompts are texts that words, flags, lines and shells end somewhere.
var prompts = []string{
	"-n \"lead\"\n\ttwo  lines 'kept'\n" + "`id` $HOME $(id) \\n é→😀 \n\n", "--help", "", "\n", "-", " blanks ",
}

// How a prompt gets to the harness: each mode, byte for byte.
func TestPromptModes(t *testing.T) {
	// Each prints the prompt between brackets.
	modes := []struct {
		name    string
		harness map[string]any
	}{
		{"arg", map[string]any{"binary": "sh", "prefixArgs": []string{"-c", `printf '[%s]' "$@"`, "sh"}}},
		{"flag", map[string]any{
			"binary": "sh", "prefixArgs": []string{"-c", `test "$1" = --prompt && shift && printf '[%s]' "$@"`, "sh"},
			"promptMode": "flag", "promptFlag": "--prompt",
		}},
		{"stdin", map[string]any{"binary": "sh", "prefixArgs": []string{"-c", `printf '['; cat; printf ']'`}, "promptMode": "stdin"}},
		{"file", map[string]any{
			"binary": "sh", "prefixArgs": []string{"-c", `printf '['; cat "$1"; printf ']'; stat -c %a "$1" >&2`, "sh"}, "promptMode": "file",
		}},
		{"file with flag", map[string]any{
			"binary": "sh", "prefixArgs": []string{"-c", `test "$1" = -f && printf '[' && cat "$2" && printf ']'`, "sh"}, "promptMode": "file", "promptFlag": "-f",
		}},
	}
	bothWays(t, func(t *testing.T, s setup) {
		for i, mode := range modes {
			if strings.Contains(mode.name, "flag") && !s.full() {
				continue
			}
			t.Run(mode.name, func(t *testing.T) {
				file := s.write(t, spec{"harness": mode.harness})
				for j, prompt := range prompts {
					// One prompt in every mode and set-up, each other in one mode of one set-up.
					if j > 0 && (j%len(modes) != i || s.name != setups[0].name) {
						continue
					}
					r := s.call(t, call{Stdin: strings.NewReader(prompt)}, "exec", "--spec", file).ok(t)
					if r.Stdout != "["+prompt+"]" {
						t.Errorf("prompt %q arrived as %q", prompt, r.Stdout)
					}
				}
			})
		}
	})
}

// Where a prompt comes from.
func TestPromptSources(t *testing.T) {
	echo := map[string]any{"binary": "sh", "prefixArgs": []string{"-c", `printf '[%s]' "$@"; cat`, "sh"}}
	bothWays(t, func(t *testing.T, s setup) {
		for _, tc := range []struct {
			name   string
			fields spec
			flags  []string
			stdin  string
			want   string
			all    bool
		}{
			{"words are joined", nil, []string{"--", "fix", "the  test", "-v", ""}, "rest", "[fix the  test -v ]rest", false},
			{"words win over the file's", spec{"prompt": "file"}, []string{"--", "words"}, "", "[words]", false},
			{"the file's own", spec{"prompt": "in\nfile\n"}, nil, "rest", "[in\nfile\n]rest", false},
			{"promptFile", spec{"promptFile": "task.md"}, nil, "rest", "[from task\n]rest", false},
			{"--prompt-file", spec{"prompt": "file"}, []string{"--prompt-file", "TASK"}, "rest", "[from task\n]rest", false},
			{"standard input when there is nothing else", nil, nil, "piped\n", "[piped\n]", true},
		} {
			if !tc.all && !s.full() {
				continue
			}
			t.Run(tc.name, func(t *testing.T) {
				fields := spec{"harness": echo}
				for k, v := range tc.fields {
					fields[k] = v
				}
				file := s.write(t, fields)
				task := place(t, filepath.Join(filepath.Dir(file), "task.md"), []byte("from task\n"), 0o644)
				args := []string{"exec", "--spec", file}
				for _, flag := range tc.flags {
					if flag == "TASK" {
						flag = task
					}
					args = append(args, flag)
				}
				r := s.call(t, call{Stdin: strings.NewReader(tc.stdin)}, args...).ok(t)
				if r.Stdout != tc.want {
					t.Errorf("printed %q, want %q", r.Stdout, tc.want)
				}
			})
		}
	})
}

// The bounds of a prompt: 10 MiB, and what execve(2) takes as one argument.
func TestPromptSizes(t *testing.T) {
	const maxPrompt, maxArg = 10 << 20, 128<<10 - 1
	digest := func(mode, script string) map[string]any {
		return map[string]any{"binary": "sh", "prefixArgs": []string{"-c", script, "sh"}, "promptMode": mode}
	}
	text := bytes.Repeat([]byte("prompt\n"), maxPrompt/7+1)
	bothWays(t, func(t *testing.T, s setup) {
		for _, tc := range []struct {
			name    string
			harness map[string]any
			size    int
			byFile  bool
			refused bool
		}{
			{"stdin", digest("stdin", "sha256sum"), maxPrompt, false, false},
			{"file", digest("file", `sha256sum < "$1"`), maxPrompt, true, false},
			{"a byte more", digest("stdin", "sha256sum"), maxPrompt + 1, false, true},
			{"a byte more by file", digest("file", "sha256sum"), maxPrompt + 1, true, true},
			{"arg", digest("arg", `printf %s "$1" | sha256sum`), maxArg, true, false},
			{"arg, a byte more", digest("arg", `printf %s "$1" | sha256sum`), maxArg + 1, false, true},
			{"arg, a byte more by file", digest("arg", `printf %s "$1" | sha256sum`), maxArg + 1, true, true},
		} {
			if !tc.refused && !s.full() {
				continue
			}
			t.Run(tc.name, func(t *testing.T) {
				file := s.write(t, spec{"harness": tc.harness})
				prompt := append(bytes.Clone(text[:tc.size-1]), '.') // a shell keeps a last byte that is no newline
				task := place(t, filepath.Join(filepath.Dir(file), "task"), prompt, 0o644)
				c, args := call{Stdin: bytes.NewReader(prompt)}, []string{"exec", "--spec", file}
				if tc.byFile {
					c, args = call{}, append(args, "--prompt-file", task)
				}
				r := s.call(t, c, args...)
				if tc.refused {
					r.refused(t, shim.ReasonPrompt)
					wantText(t, r.Stderr, "agentshim: hint: ")
				} else if r.ok(t); r.Stdout != sum(prompt)+"  -\n" {
					t.Errorf("another digest: %q", r.Stdout)
				}
			})
		}
		t.Run("NUL as argument", func(t *testing.T) {
			s.call(t, call{Stdin: strings.NewReader("a\x00b")}, "exec", "--spec", s.write(t, nil)).refused(t, shim.ReasonPrompt)
		})
		t.Run("no such prompt file", func(t *testing.T) {
			r := s.call(t, call{}, "exec", "--spec", s.write(t, nil), "--prompt-file", "/no/such").refused(t, shim.ReasonPrompt)
			wantText(t, r.Stderr, "/no/such", "agentshim: hint: ")
		})
	})
}

// P10: a harness's 125, 126 and 127 are its own; agentshim's are said out of band.
func TestOwnCodes(t *testing.T) {
	bothWays(t, func(t *testing.T, s setup) {
		for _, code := range []int{125, 127} {
			if code != 125 && !s.full() {
				continue
			}
			file := filepath.Join(s.private(t), "result.json")
			r := s.call(t, call{}, "exec", "--quiet", "--result", file, "--spec", s.write(t, nil), "--", fmt.Sprintf("exit %d", code))
			rec := readRecord(t, file)
			if r.Code != code || r.Stderr != "" || rec.Reason != "" || rec.Exit != code || rec.Harness == nil || rec.Harness.Code != code {
				t.Errorf("exit %d: %+v, record: exit %d %q", code, r, rec.Exit, rec.Reason)
			}
		}
		for _, tc := range []struct {
			name   string
			fields spec
			reason shim.Reason
		}{
			{"image missing", spec{"image": "agentshim/no-such:test"}, shim.ReasonImageMissing},
			{"program missing", spec{"harness": map[string]any{"binary": "/nope"}}, shim.ReasonHarnessMissing},
			{"program not executable", spec{"harness": map[string]any{"binary": "/etc/passwd"}}, shim.ReasonHarnessMissing},
		} {
			if s.steps != nil && tc.reason == shim.ReasonImageMissing {
				continue // there is no session of it
			}
			t.Run(tc.name, func(t *testing.T) {
				file := filepath.Join(s.private(t), "result.json")
				r := s.call(t, call{}, "exec", "--result", file, "--spec", s.write(t, tc.fields), "--", "x").refused(t, tc.reason)
				wantText(t, r.Stderr, "agentshim: hint: ")
				if rec := readRecord(t, file); rec.Exit != 125 || rec.Reason != tc.reason || rec.Harness != nil {
					t.Errorf("record: exit %d %q", rec.Exit, rec.Reason)
				}
			})
		}
	})
}
