package integration

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim"
)

// swapping exchanges two names as fast as it can until the function it returns is called.
func swapping(t *testing.T, one, other string) (stop func()) {
	t.Helper()
	done, over := make(chan struct{}), sync.WaitGroup{}
	over.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				if err := unix.Renameat2(unix.AT_FDCWD, one, unix.AT_FDCWD, other, unix.RENAME_EXCHANGE); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	return sync.OnceFunc(func() { close(done); over.Wait() })
}

// M10, M13: while an agent of another run exchanges a source for a link, the agent
// sees the source or is not started, and never sees what the link leads to.
func TestSwappedSource(t *testing.T) {
	launches := 10
	if soaking() {
		launches = 50
	}
	someAtOnce(t, func(t *testing.T, s setup) {
		dir, ws := s.folder(t), s.folder(t)
		secret := filepath.Join(dir, "secret")
		place(t, filepath.Join(secret, "key"), []byte("SECRET"), 0o644)
		place(t, filepath.Join(ws, "data/key"), []byte("shown"), 0o644)
		s.own(t, dir)
		s.own(t, ws)
		link := filepath.Join(ws, "link")
		if err := os.Symlink(secret, link); err != nil {
			t.Fatal(err)
		}
		source := filepath.Join(ws, "data")
		file := s.write(t, spec{
			"workspace": map[string]any{"source": ws, "mode": "writable"},
			"mounts":    []any{map[string]any{"source": source, "target": "/data"}},
		})
		stop := swapping(t, source, link)
		defer stop()
		for range launches {
			r := s.exec(t, file, "cat /data/key")
			if r.Code == 0 && r.Stdout == "shown" {
				continue
			}
			r.refused(t, shim.ReasonMount)
		}
		saw := false
		for range 20 {
			c := s.bare(t, "run", "--rm", "--network=none", "--mount=type=bind,source="+source+",target=/data,readonly", "agentshim/hello:test", "cat", "/data/key")
			if saw = strings.Contains(c.Stdout, "SECRET"); saw {
				break
			}
		}
		if !saw {
			t.Error("control: the bare engine never mounted what the link leads to")
		}
	})
}

// hostileNames are file names that break lines, options, terminals or text.
var hostileNames = []string{
	"new\nline", "\xff\xfe", "-rf", "\x1b[2J", "tab\t", "cr\r", "$(id)", "..x", " ", strings.Repeat("n", 255), "é\u202e", "agentshim",
}

// hostileTree fills a workspace with what an agent may leave there to mislead the next
// run: links out of it, files that block, names that are no text, and paths that are
// too long to be named. It returns how many names there are at its top.
func hostileTree(t *testing.T, s setup, dir string) {
	t.Helper()
	u, err := user.Lookup(s.account)
	if err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{
		"ssh": filepath.Join(u.HomeDir, ".ssh"), "environ": "/proc/self/environ", "root": "/", "round": "round", "dangling": "/no/such", "up": "../..", "fd": "/proc/self/fd",
	} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range hostileNames {
		place(t, filepath.Join(dir, name), nil, 0o644)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd) // nobody listens on it
	if err := errors.Join(
		unix.Mkfifo(filepath.Join(dir, "fifo"), 0o666), unix.Bind(fd, &unix.SockaddrUnix{Name: filepath.Join(dir, "socket")}),
		os.MkdirAll(filepath.Join(dir, "closed/in"), 0o755),
	); err != nil {
		t.Fatal(err)
	}
	many := 500
	if soaking() {
		many = 100_000
	}
	if err := os.Mkdir(filepath.Join(dir, "many"), 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range many {
		if err := os.WriteFile(filepath.Join(dir, "many", fmt.Sprint(i)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s.own(t, dir)
	deepFolder(t, filepath.Join(dir, "deep"), 20)
	if err := os.Chmod(filepath.Join(dir, "closed"), 0); err != nil {
		t.Fatal(err)
	}
}

// deepFolder makes folders of 250 bytes below each other, beyond PATH_MAX.
func deepFolder(t *testing.T, dir string, levels int) {
	t.Helper()
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	for range levels {
		if err != nil {
			break
		}
		name := strings.Repeat("d", 250)
		if err = unix.Mkdirat(fd, name, 0o755); err == nil {
			below, openErr := unix.Openat(fd, name, unix.O_PATH|unix.O_CLOEXEC, 0)
			unix.Close(fd)
			fd, err = below, openErr
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
}

// top lists what stands in a folder itself: name, kind, and where a link leads.
func top(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	list := make([]string, 0, len(entries))
	for _, e := range entries {
		to, _ := os.Readlink(filepath.Join(dir, e.Name()))
		list = append(list, fmt.Sprintf("%q %v %q", e.Name(), e.Type(), to))
	}
	return list
}

// A hostile workspace: agentshim neither hangs nor follows, and what is there is the
// agent's as it is. A57, A61.
func TestHostileWorkspace(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		hostileTree(t, s, dir)
		before := top(t, dir)
		run := func(t *testing.T, fields spec, script string) result {
			t.Helper()
			return s.call(t, call{Env: []string{"HOST_SECRET=hunter2"}, Timeout: time.Minute}, "exec", "--spec", s.write(t, fields), "--", script)
		}
		for _, mode := range []string{"read-only", "writable"} {
			t.Run(mode, func(t *testing.T) {
				r := run(t, spec{"workspace": map[string]any{"source": dir, "mode": mode}}, `ls -A | wc -l; cat environ | tr '\0' '\n' | grep -c HOST_SECRET; ls ssh/ up/etc/shadow fd/9 2>/dev/null; ls root/`)
				lines := strings.Split(r.ok(t).Stdout, "\n")
				if want := fmt.Sprint(len(before)); lines[0] != want || lines[1] != "0" || !slices.Contains(lines, ".agentshim-init") && !slices.Contains(lines, "workspace") {
					t.Errorf("the agent saw %q, want %s names, no variable of the host's and the container's root", lines, want)
				}
				if strings.ContainsAny(r.Stderr, "\x1b\r") || !utf8.ValidString(r.Stderr) {
					t.Errorf("the names reach the terminal: %q", r.Stderr)
				}
				if after := top(t, dir); !slices.Equal(before, after) {
					t.Errorf("the workspace changed:\n%q\n%q", before, after)
				}
			})
		}
		t.Run("named as inputs", func(t *testing.T) { hostileInputs(t, s, dir) })
		t.Run("named as mounts", func(t *testing.T) { hostileMounts(t, s, dir) })
	})
}

func hostileInputs(t *testing.T, s setup, dir string) {
	stdin := map[string]any{"binary": "cat", "promptMode": "stdin"}
	for name, c := range map[string]struct {
		fields spec
		reason shim.Reason
	}{
		"a FIFO as prompt":      {spec{"promptFile": dir + "/fifo"}, shim.ReasonPrompt},
		"a socket as prompt":    {spec{"promptFile": dir + "/socket"}, shim.ReasonPrompt},
		"a process's variables": {spec{"workspace": map[string]any{"source": dir}, "promptFile": dir + "/environ"}, shim.ReasonPrompt},
		"a FIFO as variables":   {spec{"envFiles": []string{dir + "/fifo"}}, shim.ReasonEnvMissing},
		"a folder as home file": {spec{"home": map[string]any{"files": []any{map[string]any{"source": dir + "/closed", "target": "x"}}}}, shim.ReasonMount},
		"a circle as home file": {spec{"home": map[string]any{"files": []any{map[string]any{"source": dir + "/round", "target": "x"}}}}, shim.ReasonMount},
	} {
		c.fields["harness"] = stdin
		r := s.call(t, call{Timeout: time.Minute, Stdin: strings.NewReader("x")}, "exec", "--spec", s.write(t, c.fields))
		if r.Code != 125 || !strings.Contains(r.Stderr, "agentshim: "+string(c.reason)+": ") || r.Stdout != "" {
			t.Errorf("%s: exit %d, %q, %s", name, r.Code, r.Stdout, r.Stderr)
		}
	}
}

// hostileMounts names what lies in the workspace: as sources, then as targets inside of it.
func hostileMounts(t *testing.T, s setup, dir string) {
	fields := func(list []map[string]any) spec {
		return spec{"workspace": map[string]any{"source": dir, "mode": "writable"}, "mounts": list}
	}
	refuses := func(list []map[string]any) {
		t.Helper()
		r := s.call(t, call{Timeout: time.Minute}, "exec", "--spec", s.write(t, fields(list)), "--", "true").refused(t, shim.ReasonMount)
		for i, m := range list {
			if !strings.Contains(r.Stderr, fmt.Sprintf("$.mounts[%d].", i)) {
				t.Errorf("%q on %q is not refused:\n%s", m["source"], m["target"], r.Stderr)
			}
		}
	}
	var links, sources, targets []map[string]any
	for i, name := range []string{"ssh", "root", "up", "root/usr/share", "environ", "fd"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			links = append(links, map[string]any{"source": filepath.Join(dir, name), "target": fmt.Sprint("/m/", i)})
		}
	}
	for i, name := range []string{"round", "dangling", "fifo", "socket", "deep/" + strings.Repeat(strings.Repeat("d", 250)+"/", 18)} {
		sources = append(sources, map[string]any{"source": filepath.Join(dir, name), "target": fmt.Sprint("/m/", i)})
	}
	for _, name := range []string{"fifo", "socket", "root/srv", "ssh", "round", "dangling", "environ"} {
		targets = append(targets, map[string]any{"source": filepath.Join(dir, "many"), "target": name})
	}
	refuses(links)
	refuses(sources)
	refuses(targets)
}

// A long source and a long target work. Longer ones are refused by name.
func TestLongPaths(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		long := dir
		for len(long) < 3800 {
			long = filepath.Join(long, strings.Repeat("s", 200))
		}
		place(t, filepath.Join(long, "f"), []byte("deep"), 0o644)
		s.own(t, dir)
		target := "/m" + strings.Repeat("/"+strings.Repeat("t", 254), 12)
		r := s.sh(t, spec{"mounts": []any{map[string]any{"source": long, "target": target}}}, "cat "+target+"/f").ok(t)
		if r.Stdout != "deep" {
			t.Errorf("printed %q", r.Stdout)
		}
		r = s.sh(t, spec{"mounts": []any{map[string]any{"source": long, "target": target + target}}}, "true").refused(t, shim.ReasonSpecInvalid)
		wantText(t, r.Stderr, "$.mounts[0].target")
	})
}

// What an agent has written is there and nothing else when agentshim is killed.
func TestKilledRunLeavesTheWorkspace(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		dir := s.folder(t)
		place(t, filepath.Join(dir, "old"), []byte("old"), 0o644)
		s.own(t, dir)
		name := "killed-" + s.name
		file := s.write(t, spec{"name": name, "workspace": map[string]any{"source": dir, "mode": "writable"}})
		cmd, cancel := s.command(t, call{}, agentshim, "exec", "--spec", file, "--", `rm old; i=0; while :; do i=$((i+1)); echo $i >> log; done`)
		defer cancel()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the agent writes", func() bool { info, err := os.Stat(filepath.Join(dir, "log")); return err == nil && info.Size() > 100 })
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
		eventually(t, "the container is gone", func() bool {
			return s.bare(t, "ps", "-aq", "--filter", "label=agentshim.name="+name).ok(t).Stdout == ""
		})
		log, err := os.ReadFile(filepath.Join(dir, "log"))
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range bytes.Split(bytes.TrimSuffix(log, []byte("\n")), []byte("\n")) {
			if string(line) != fmt.Sprint(i+1) {
				t.Fatalf("line %d is %q", i+1, line)
			}
		}
		if got := top(t, dir); len(got) != 1 {
			t.Errorf("the workspace holds %q", got)
		}
		uid, gid := s.hostOwner(t)
		if wrong, _ := notOwnedBy(t, dir, uid, gid); len(wrong) > 0 {
			t.Errorf("not the owner's: %q", wrong)
		}
	})
}
