package integration

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

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
