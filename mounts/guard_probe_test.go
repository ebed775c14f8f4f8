package mounts

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// guardRoot is the world's workspace as Probe saw it.
func (w *world) guardRoot() Source {
	w.t.Helper()
	var st unix.Stat_t
	w.must(unix.Lstat(w.at("src/proj"), &st))
	return Source{Path: w.at("src/proj"), Dir: true, Dev: st.Dev, Ino: st.Ino}
}

// TestProbeGuards: A57, M13; hostile workspaces.
func TestProbeGuards(t *testing.T) {
	w := newWorld(t)
	w.file("secret/tasks.json", "s")
	w.file("src/proj/.vscode/tasks.json", "{}")
	w.link(w.at("secret"), "src/proj/.claude")
	w.link(w.at("secret/tasks.json"), "src/proj/.envrc")
	w.link("/nowhere", "src/proj/.idea")
	w.link("/proc/self/fd/0", "src/proj/.mcp.json")
	w.link(".husky", "src/proj/.husky")
	w.file("src/proj/file", "x")
	w.file("src/proj/one", "x")
	w.must(os.Link(w.at("src/proj/one"), w.at("src/proj/two")))
	w.must(unix.Mkfifo(w.at("src/proj/fifo"), 0o600))
	w.listen("unix", w.at("src/proj/sock"))
	deep := strings.TrimSuffix(strings.Repeat("d/", maxGuardDepth), "/")
	w.file("src/proj/"+deep, "x")
	paths := protect(".vscode/tasks.json", ".vscode/none", ".claude/settings.json", ".envrc", ".idea", ".idea/x", ".mcp.json", ".husky", "file/x",
		"two", "fifo", "fifo/x", "sock", "none/deeper", deep, strings.Repeat("n", 255))
	facts, err := ProbeGuards(w.guardRoot(), paths)
	w.must(err)
	for rel, want := range map[string][2]string{
		".vscode/tasks.json": {NodeFile, ".vscode/tasks.json"}, ".vscode/none": {"", ".vscode/none"},
		".claude/settings.json": {NodeLink, ".claude"}, ".envrc": {NodeLink, ".envrc"}, ".idea": {NodeLink, ".idea"}, ".idea/x": {NodeLink, ".idea"},
		".mcp.json": {NodeLink, ".mcp.json"}, ".husky": {NodeLink, ".husky"}, "file/x": {"", "file/x"}, "two": {NodeFile, "two"},
		"fifo": {NodeOther, "fifo"}, "fifo/x": {"", "fifo/x"}, "sock": {NodeOther, "sock"}, "none/deeper": {"", "none/deeper"}, deep: {NodeFile, deep},
	} {
		if n, at := facts.At(rel); n.Kind != want[0] || at != want[1] {
			t.Errorf("%s: %+v at %q, want %q", rel, n, at, want)
		}
	}
	var st unix.Stat_t
	w.must(unix.Lstat(w.at("src/proj/.vscode/tasks.json"), &st))
	if n := facts[".vscode/tasks.json"]; n.Dev != st.Dev || n.Ino != st.Ino || n.Links != 1 || n.Changed == 0 {
		t.Errorf("%+v", n)
	}
	if facts["two"].Links != 2 {
		t.Errorf("%+v", facts["two"])
	}
	for rel := range facts {
		if strings.HasPrefix(rel, ".claude/") || strings.HasPrefix(rel, ".idea/") {
			t.Errorf("%q was looked at behind a link", rel)
		}
	}
}

// TestProbeGuardsRoot: the workspace itself was exchanged since Probe.
func TestProbeGuardsRoot(t *testing.T) {
	w := newWorld(t)
	w.dir("other")
	root := w.guardRoot()
	if _, err := ProbeGuards(root, protect("x")); err != nil {
		t.Fatal(err)
	}
	w.must(os.Rename(w.at("src/proj"), w.at("src/old")))
	for name, put := range map[string]func(){
		"gone":   func() {},
		"link":   func() { w.link(w.at("src/old"), "src/proj") },
		"folder": func() { w.dir("src/proj") },
		"file":   func() { w.file("src/proj", "x") },
	} {
		put()
		if _, err := ProbeGuards(root, protect("x")); !errors.Is(err, ErrExchanged) || !errors.Is(err, ErrSource) {
			t.Errorf("%s: %v", name, err)
		}
		os.RemoveAll(w.at("src/proj"))
	}
}

// TestProbeGuardsReach: what an agent made unreachable does not read as absent.
func TestProbeGuardsReach(t *testing.T) {
	needRoot(t)
	w := newWorld(t)
	w.file("src/proj/.vscode/tasks.json", "{}")
	w.must(os.Chmod(w.root, 0o755))
	w.must(os.Chmod(w.at("src/proj/.vscode"), 0))
	root := w.guardRoot()
	onThread(t, func() error {
		if err := becomeNobody(); err != nil {
			return err
		}
		facts, err := ProbeGuards(root, protect(".vscode/tasks.json", ".vscode"))
		if err != nil {
			return err
		}
		if n, at := facts.At(".vscode/tasks.json"); n.Kind != NodeUnknown || at != ".vscode/tasks.json" {
			t.Errorf("%+v at %q", n, at)
		}
		if n, _ := facts.At(".vscode"); n.Kind != NodeDir {
			t.Errorf("%+v", n)
		}
		return nil
	})
}

// TestProbeGuardsRace: a folder that is exchanged for a link in a tight loop never
// shows what the link points to. The control follows the link and sees it.
func TestProbeGuardsRace(t *testing.T) {
	w := newWorld(t)
	w.file("secret/tasks.json", "s")
	w.file("src/proj/a/.vscode/tasks.json", "{}")
	w.link(w.at("secret"), "src/proj/a/link")
	var secret unix.Stat_t
	w.must(unix.Lstat(w.at("secret/tasks.json"), &secret))
	stop := make(chan struct{})
	var swapping sync.WaitGroup
	swapping.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				unix.Renameat2(unix.AT_FDCWD, w.at("src/proj/a/.vscode"), unix.AT_FDCWD, w.at("src/proj/a/link"), unix.RENAME_EXCHANGE)
			}
		}
	})
	defer swapping.Wait()
	defer close(stop)
	links, followed := 0, 0
	for i := 0; i < 5000 || i < 200000 && (links == 0 || followed == 0); i++ {
		facts, err := ProbeGuards(w.guardRoot(), protect("a/.vscode/tasks.json"))
		w.must(err)
		n, _ := facts.At("a/.vscode/tasks.json")
		if n.Ino == secret.Ino {
			t.Fatal("the link was followed")
		}
		if n.Kind == NodeLink {
			links++
		}
		if fi, err := os.Stat(filepath.Join(w.at("src/proj"), "a/.vscode/tasks.json")); err == nil && fi.Size() == 1 {
			followed++
		}
	}
	if links == 0 || followed == 0 {
		t.Errorf("the race was not run: %d links, control %d", links, followed)
	}
}
