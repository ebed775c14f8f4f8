package integration

import (
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// program is a command of a shell that works under the default policy; what it prints last is wanted.
type program struct{ name, command, want string }

// programs are what agents are and run. Each starts threads or processes, or speaks to the
// kernel in a way of its own: what breaks under too strict a policy.
var programs = []program{
	{"node, worker threads", "node /programs/workers.mjs", "counted 4000"},
	{"npm install from a folder", `cd "$(mktemp -d)" && cp -r /programs/package . && npm install --offline --silent ./package && node_modules/.bin/local`, "from a folder"},
	{"python3, threads and processes", "python3 /programs/processes.py", "threads 8 processes 200 child"},
	{"go build", `cp -r /programs/module "$HOME/m" && cd "$HOME/m" && echo "func init() {}" >>main.go && export GOCACHE="$HOME/m/cache" GOPROXY=off GOTOOLCHAIN=local CGO_ENABLED=0 && /goroot/bin/go build -trimpath -buildvcs=false -o threads . && ./threads 2>&1`, "goroutines 8"},
	{"gcc", `cd "$(mktemp -d)" && gcc -pthread -o threads /programs/threads.c && ./threads`, "threads 2 child 2"},
	{"git", `cd "$(mktemp -d)" && export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@a.example GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@a.example && git init -q a && cp -r /programs a/p && git -C a add . && git -C a commit -qm content && git -C a gc --quiet --aggressive && git clone -q file://"$PWD"/a b && git -C b log --format=%s`, "content"},
	{"sqlite3, WAL, three writers", `cd "$(mktemp -d)" && sqlite3 d "pragma journal_mode=wal; create table t(n)" && for i in 1 2 3; do sqlite3 -cmd ".timeout 10000" d "insert into t values($i)" & done; wait; sqlite3 d "select count(*) || ' rows' from t"`, "3 rows"},
	{"tmux", `cd "$(mktemp -d)" && tmux -S s new-session -d && tmux -S s send-keys 'echo one$((1+1))three' Enter && until tmux -S s capture-pane -p | grep -o one2three; do sleep 0.1; done; tmux -S s kill-server`, "one2three"},
	{"ripgrep", "rg --threads 4 --files-with-matches pthread_create /programs", "/programs/threads.c"},
	{"java, collector's and compiler's threads", `cd "$(mktemp -d)" && java -XX:+UseG1GC -XX:ParallelGCThreads=4 -version 2>/dev/null && keytool -genkeypair -alias a -keyalg EC -dname CN=a -storepass secret -keystore k 2>/dev/null && keytool -list -storepass secret -keystore k | grep -o PrivateKeyEntry`, "PrivateKeyEntry"},
	{"claude, built with bun", "claude -p hello </dev/null", "exit 1 Not logged in*"},
	{"codex, in Rust", "codex login status 2>&1", "exit 1 Not logged in"},
}

// programFolder has testdata/programs and, so that four set-ups needn't compile the standard
// library, a cache of what the module needs of it.
var programFolder = sync.OnceValues(func() (string, error) {
	dir := filepath.Join(filepath.Dir(agentshim), "programs")
	err := errors.Join(
		os.CopyFS(dir, os.DirFS("testdata/programs")), os.Chmod(filepath.Join(dir, "package/index.js"), 0o755),
		runIn(filepath.Join(dir, "module"), "env", "CGO_ENABLED=0", "GOCACHE="+filepath.Join(dir, "module/cache"), "go", "build", "-trimpath", "-buildvcs=false", "-o", os.DevNull, "."),
	)
	return dir, err
})

// programFields mount what the programs work on.
func programFields(t *testing.T, fields spec) spec {
	t.Helper()
	dir, err := programFolder()
	if err != nil {
		t.Fatal(err)
	}
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	full := reachFields(t, nil, spec{
		"image": "agentshim/agent:test", "resources": map[string]any{"memoryMb": 3072},
		"mounts": []any{
			map[string]any{"source": mustReach(t), "target": "/reach"},
			map[string]any{"source": dir, "target": "/programs"},
			map[string]any{"source": strings.TrimSpace(string(root)), "target": "/goroot"},
		},
	})
	maps.Copy(full, fields)
	return full
}

// TestPrograms: real programs work under the default policy, and with a file system that is
// read-only and nothing but loopback. TestSystemCalls has what the policy refuses.
func TestPrograms(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		var ops attempts
		for _, p := range programs {
			ops = append(ops, []string{"run", "sh", "-c", p.command})
		}
		r := s.call(t, call{Timeout: 10 * time.Minute}, "exec", "--spec", s.write(t, programFields(t, nil)), "--", ops.json(t))
		got := endings(t, r, ops)
		for i, p := range programs {
			if out := strings.TrimSuffix(got.of(ops[i]...), " late"); !isOutcome("ok: "+p.want, out) {
				t.Errorf("%s: %s, want %s", p.name, out, p.want)
			}
		}
	})
}
