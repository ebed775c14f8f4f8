// Package integration tests agentshim against real engines and kernels.
package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentshim/agentshim/shim"
)

// agentshim is the binary under test, where every user can run it.
var agentshim string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	if os.Getenv("AGENTSHIM_TEST_ENGINES") == "" {
		return m.Run() // each test asks Need
	}
	dir, err := os.MkdirTemp("", "agentshim-test-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	agentshim = filepath.Join(dir, "agentshim")
	b, err := os.ReadFile("../bin/agentshim")
	if err == nil {
		err = errors.Join(os.WriteFile(agentshim, b, 0o755), os.Chmod(dir, 0o755))
	}
	if err != nil {
		panic(err)
	}
	return m.Run()
}

// Need skips t unless the engines of the test machine are set up; with
// AGENTSHIM_REQUIRE_ALL set it fails instead, so that a lost privilege never reads
// as a pass.
func Need(t *testing.T) {
	t.Helper()
	if os.Getenv("AGENTSHIM_TEST_ENGINES") != "" {
		return
	}
	if os.Getenv("AGENTSHIM_REQUIRE_ALL") != "" {
		t.Fatal("AGENTSHIM_REQUIRE_ALL is set and AGENTSHIM_TEST_ENGINES is not")
	}
	t.Skip("needs the engines of make test")
}

// setup is one of the four ways to use an engine.
type setup struct {
	name   string
	engine string
	// account is the user that runs agentshim, "root" or one that setup.sh made.
	account string
	// steps makes each exec of a file a step of a session of that file; nil for runs.
	steps *sessions
}

var setups = []setup{
	{name: "docker-root", engine: "docker", account: "root"},
	{name: "docker-group", engine: "docker", account: "agentshim-docker"},
	{name: "podman-root", engine: "podman", account: "root"},
	{name: "podman-rootless", engine: "podman", account: "agentshim-rootless"},
}

// each runs f as a subtest for every set-up. Stores that don't know each other are
// used at the same time: f looks at its own runs and its own store only.
func each(t *testing.T, f func(t *testing.T, s setup)) { atOnce(t, setups, f) }

// atOnce runs f for the set-ups, those that share a store one after another. It
// returns when all have ended.
func atOnce(t *testing.T, list []setup, f func(t *testing.T, s setup)) {
	Need(t)
	stores := map[string][]setup{}
	for _, s := range list {
		stores[s.store()] = append(stores[s.store()], s)
	}
	t.Run("stores", func(t *testing.T) {
		for store, users := range stores {
			t.Run(store, func(t *testing.T) {
				t.Parallel()
				for _, s := range users {
					t.Run(s.name, func(t *testing.T) { f(t, s) })
				}
			})
		}
	})
}

// inTurn is each for tests that look at the whole machine, or share something.
func inTurn(t *testing.T, f func(t *testing.T, s setup)) {
	Need(t)
	for _, s := range setups {
		t.Run(s.name, func(t *testing.T) { f(t, s) })
	}
}

// store names where the set-up's containers are.
func (s setup) store() string {
	if s.engine == "docker" {
		return s.engine
	}
	return s.name
}

func (s setup) rootless() bool { return s.name == "podman-rootless" }

func (s setup) root() bool { return s.account == "root" }

// agentUID is the uid the agent gets when the harness file names no user: the
// caller's, or for root the owner of the workspace that s.folder makes.
func (s setup) agentUID(t *testing.T) int {
	uid, _ := s.ids(t)
	if uid == 0 {
		return folderOwner
	}
	return uid
}

// folderOwner owns the folders that a root set-up works on.
const folderOwner = 24199

func (s setup) ids(t *testing.T) (uid, gid int) {
	t.Helper()
	u, err := user.Lookup(s.account)
	if err != nil {
		t.Fatal(err)
	}
	return mustInt(t, u.Uid), mustInt(t, u.Gid)
}

func mustInt(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// folder makes a folder whose owner is the agent's uid on the host. It lies
// outside t.TempDir, whose parents only root may enter.
func (s setup) folder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "agentshim-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	uid, gid := s.ids(t)
	if uid == 0 {
		uid, gid = folderOwner, folderOwner
	}
	if err := os.Chown(dir, uid, gid); err != nil {
		t.Fatal(err)
	}
	return dir
}

// private makes a folder of the calling user's.
func (s setup) private(t *testing.T) string {
	t.Helper()
	dir := s.folder(t)
	uid, gid := s.ids(t)
	if err := errors.Join(os.Chown(dir, uid, gid), os.Chmod(dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// spec is a harness file as JSON; fields that are not given are hello's.
type spec map[string]any

// write puts a harness file into a folder of the caller's.
func (s setup) write(t *testing.T, fields spec) string {
	t.Helper()
	full := spec{
		"version": 1, "image": "agentshim/hello:test", "pull": "never", "engine": s.engine,
		"harness": map[string]any{"binary": "sh", "prefixArgs": []string{"-c"}},
		"accept":  []string{"rootless-cgroup-limits"},
	}
	if s.root() {
		full["user"] = "24199:24199"
	}
	for k, v := range fields {
		if v == nil {
			delete(full, k)
			continue
		}
		full[k] = v
	}
	b, err := json.Marshal(full)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(s.private(t), "harness.json")
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// result is how a command ended.
type result struct {
	Stdout, Stderr string
	Code           int
}

// call is one command as the set-up's user.
type call struct {
	Stdin io.Reader
	Env   []string
	// State is XDG_STATE_HOME; empty is a fresh folder.
	State string
	// Timeout bounds it; zero is two minutes.
	Timeout time.Duration
	// Net is where it runs; nil is the host itself.
	Net *world
}

// exec runs a harness file with words behind --.
func (s setup) exec(t *testing.T, file string, words ...string) result {
	t.Helper()
	return s.call(t, call{}, append([]string{"exec", "--spec", file, "--"}, words...)...)
}

// sh runs a script as the harness of a file made of fields.
func (s setup) sh(t *testing.T, fields spec, script string) result {
	t.Helper()
	return s.exec(t, s.write(t, fields), script)
}

// call runs agentshim.
func (s setup) call(t *testing.T, c call, args ...string) result {
	t.Helper()
	cmd, cancel := s.command(t, c, agentshim, args...)
	defer cancel()
	return finish(t, cmd)
}

// bare runs the engine's own client, for control runs.
func (s setup) bare(t *testing.T, args ...string) result {
	t.Helper()
	return s.bareIn(t, nil, args...)
}

// bareIn is bare in the world's namespaces, nil for the host's.
func (s setup) bareIn(t *testing.T, w *world, args ...string) result {
	t.Helper()
	path, err := exec.LookPath(s.engine)
	if err != nil {
		t.Fatal(err)
	}
	cmd, cancel := s.command(t, call{Net: w}, path, args...)
	defer cancel()
	return finish(t, cmd)
}

// command is a program as the set-up's user with a small environment.
func (s setup) command(t *testing.T, c call, path string, args ...string) (*exec.Cmd, context.CancelFunc) {
	t.Helper()
	if c.Timeout == 0 {
		c.Timeout = 2 * time.Minute
	}
	u, err := user.Lookup(s.account)
	if err != nil {
		t.Fatal(err)
	}
	if c.State == "" {
		c.State = s.private(t)
	}
	if s.steps != nil && path == agentshim {
		args = s.steps.step(t, s, c, args)
	}
	var as *syscall.Credential
	if !s.root() {
		as = credential(t, u)
	}
	if c.Net != nil {
		path, args = c.Net.wrap(t, as, path, args)
		as = nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir = "/"
	cmd.Stdin = c.Stdin
	cmd.Env = append([]string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + u.HomeDir, "USER=" + s.account, "XDG_STATE_HOME=" + c.State,
	}, c.Env...)
	if as != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as}
	}
	return cmd, cancel
}

func credential(t *testing.T, u *user.User) *syscall.Credential {
	t.Helper()
	ids, err := u.GroupIds()
	if err != nil {
		t.Fatal(err)
	}
	c := &syscall.Credential{Uid: uint32(mustInt(t, u.Uid)), Gid: uint32(mustInt(t, u.Gid))}
	for _, id := range ids {
		c.Groups = append(c.Groups, uint32(mustInt(t, id)))
	}
	return c
}

func finish(t *testing.T, cmd *exec.Cmd) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%q: %v", cmd.Args, err)
	}
	return result{Stdout: stdout.String(), Stderr: stderr.String(), Code: cmd.ProcessState.ExitCode()}
}

// ok fails t unless the command ended with exit code 0.
func (r result) ok(t *testing.T) result {
	t.Helper()
	if r.Code != 0 {
		t.Fatalf("exit %d\nstdout: %s\nstderr: %s", r.Code, r.Stdout, r.Stderr)
	}
	return r
}

// refused fails t unless agentshim refused for the reason.
func (r result) refused(t *testing.T, reason shim.Reason) result {
	t.Helper()
	if r.Code != shim.ExitRefused || !strings.Contains(r.Stderr, "agentshim: "+string(reason)+": ") {
		t.Fatalf("exit %d, want 125 %s\nstdout: %s\nstderr: %s", r.Code, reason, r.Stdout, r.Stderr)
	}
	if r.Stdout != "" {
		t.Errorf("a refused run printed %q", r.Stdout)
	}
	return r
}

// record is the one record below a state folder.
func record(t *testing.T, state string) shim.Record {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(state, "agentshim/runs/*/record.json"))
	if err != nil || len(files) != 1 {
		t.Fatalf("records in %s: %v %v", state, files, err)
	}
	b, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	var r shim.Record
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// containers lists the engine's containers that carry agentshim's label. One that an
// earlier test killed the client of may be on its way out: it has five seconds.
func (s setup) containers(t *testing.T) []string {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		list := strings.Fields(s.bare(t, "ps", "-aq", "--filter", "label=agentshim.run").ok(t).Stdout)
		if len(list) == 0 || time.Now().After(end) {
			return list
		}
	}
}
