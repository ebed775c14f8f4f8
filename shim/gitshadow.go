package shim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// gitProgram runs the host's git, and only on git dirs that agentshim made.
type gitProgram struct {
	Runner Runner
	// Path is absolute.
	Path string
	// Memory bounds what one git process allocates, in bytes, FileSize what it writes
	// to one file; 0 is defaultGitMemory and defaultGitFile.
	Memory, FileSize uint64
}

// Defaults of gitProgram.
const (
	defaultGitMemory = 4 << 30
	defaultGitFile   = 64 << 30
)

// gitEnv is the whole environment of every git process: no configuration of the
// system, the user or the repository's own, no program but git itself, no network,
// no prompt.
func gitEnv(gitDir string) []string {
	return []string{
		"GIT_ALLOW_PROTOCOL=none",
		"GIT_ASKPASS=/bin/false",
		"GIT_ATTR_NOSYSTEM=1",
		"GIT_CEILING_DIRECTORIES=/",
		"GIT_CONFIG_GLOBAL=/dev/null",
		"GIT_CONFIG_NOSYSTEM=1",
		"GIT_CONFIG_SYSTEM=/dev/null",
		"GIT_DIR=" + gitDir,
		"GIT_EDITOR=/bin/false",
		"GIT_GRAFT_FILE=/dev/null",
		"GIT_NO_LAZY_FETCH=1",
		"GIT_NO_REPLACE_OBJECTS=1",
		"GIT_OPTIONAL_LOCKS=0",
		"GIT_PAGER=cat",
		"GIT_SSH_COMMAND=/bin/false",
		"GIT_TERMINAL_PROMPT=0",
		"LC_ALL=C",
		"PATH=/usr/local/bin:/usr/bin:/bin",
	}
}

// run runs one git command with stdin and gives its standard output, at most
// maxStdout bytes. Its limits are set right after it started: what it reads from
// stdin comes later.
func (g gitProgram) run(ctx context.Context, gitDir, stdin string, args ...string) (string, error) {
	c := Command{Path: g.Path, Args: args, Env: gitEnv(gitDir)}
	p, err := g.Runner.Start(ctx, c)
	if ctx.Err() != nil && err != nil {
		err = &EngineError{Argv: c.Argv(), Err: context.Cause(ctx)}
	}
	if err != nil {
		return "", err
	}
	limitErr := g.limit(p.PID())
	if limitErr != nil {
		_ = p.Signal(unix.SIGKILL) // it may have ended already
	}
	stdout, stderr := &cappedBuffer{limit: maxStdout}, &tailBuffer{limit: maxStderr}
	done := make(chan struct{}, 3)
	go func() { _, _ = io.WriteString(p.Stdin(), stdin); p.Stdin().Close(); done <- struct{}{} }()
	go func() { _, _ = io.Copy(stdout, p.Stdout()); p.Stdout().Close(); done <- struct{}{} }()
	go func() { _, _ = io.Copy(stderr, p.Stderr()); p.Stderr().Close(); done <- struct{}{} }()
	for range cap(done) {
		<-done
	}
	status, err := p.Wait()
	switch {
	case limitErr != nil:
		err = limitErr
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case err == nil && status != ExitStatus{}:
		err = status
	case err == nil && stdout.over:
		err = ErrOutputTooLarge
	}
	if err != nil {
		return "", &EngineError{Argv: c.Argv(), Stderr: string(stderr.bytes()), Err: err}
	}
	return stdout.buf.String(), nil
}

// limit uses RLIMIT_DATA and not RLIMIT_AS, which the mapping of a pack would count
// against (since Linux 4.7, setrlimit(2)).
func (g gitProgram) limit(pid int) error {
	memory, file := g.Memory, g.FileSize
	if memory == 0 {
		memory = defaultGitMemory
	}
	if file == 0 {
		file = defaultGitFile
	}
	for _, l := range []struct {
		what  int
		value uint64
	}{{unix.RLIMIT_DATA, memory}, {unix.RLIMIT_FSIZE, file}, {unix.RLIMIT_CORE, 0}} {
		var old unix.Rlimit
		err := unix.Prlimit(pid, l.what, nil, &old)
		if err == nil {
			now := unix.Rlimit{Cur: min(l.value, old.Max), Max: min(l.value, old.Max)}
			err = unix.Prlimit(pid, l.what, &now, nil)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("limit git: %w", err)
		}
	}
	return nil
}

// shadowSettings configure every git dir that agentshim itself runs git on. Commit
// graphs, bitmaps and multi-pack indexes say what objects hold without proof.
var shadowSettings = []gitSetting{
	{Key: "core.repositoryformatversion", Value: "0"},
	{Key: "core.bare", Value: "true"},
	{Key: "core.attributesfile", Value: "/dev/null"},
	{Key: "core.commitgraph", Value: "false"},
	{Key: "core.fsmonitor", Value: "false"},
	{Key: "core.hookspath", Value: "/dev/null"},
	{Key: "core.logallrefupdates", Value: "false"},
	{Key: "core.multipackindex", Value: "false"},
	{Key: "gc.auto", Value: "0"},
	{Key: "maintenance.auto", Value: "false"},
	{Key: "pack.usebitmaps", Value: "false"},
	{Key: "pack.writereverseindex", Value: "false"},
	{Key: "protocol.allow", Value: "never"},
}

// makeShadow makes a git dir without references at dir, with objects borrowed from
// the folders named in alternates, which are agentshim's own.
func makeShadow(dir string, shallow []string, alternates ...string) error {
	if err := gitMkdir(dir, dir+"/objects", dir+"/objects/info", dir+"/objects/pack", dir+"/refs"); err != nil {
		return err
	}
	files := map[string]string{
		"HEAD":   "ref: refs/heads/none\n",
		"config": string(renderGitConfig(shadowSettings)),
	}
	if len(shallow) > 0 {
		files["shallow"] = strings.Join(shallow, "\n") + "\n"
	}
	if len(alternates) > 0 {
		var b strings.Builder
		for _, a := range alternates {
			b.WriteString(quoteAlternate(a) + "\n")
		}
		files["objects/info/alternates"] = b.String()
	}
	return writeGitFiles(dir, files)
}

// quoteAlternate quotes a path as git does: a line that begins with a quote is
// C-quoted.
func quoteAlternate(p string) string {
	var b strings.Builder
	b.WriteByte('"')
	for i := range len(p) {
		switch c := p[i]; {
		case c == '"' || c == '\\':
			b.WriteString(`\` + string(rune(c)))
		case c < 0x20 || c >= 0x7f:
			fmt.Fprintf(&b, `\%03o`, c)
		default:
			b.WriteByte(c)
		}
	}
	b.WriteByte('"')
	return b.String()
}

func writeGitFiles(dir string, files map[string]string) error {
	for name, content := range files {
		if err := os.WriteFile(path.Join(dir, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// packHistory puts what is reachable from tip and not from base into one pack below
// to, and gives the pack's path without its suffix; "" when there is nothing. Deltas
// are reused, not looked for.
func (g gitProgram) packHistory(ctx context.Context, gitDir, tip, base, to string) (string, error) {
	revs := tip + "\n"
	if base != "" {
		revs += "^" + base + "\n"
	}
	out, err := g.run(ctx, gitDir, revs, "pack-objects", "--revs", "--quiet", "--delta-base-offset", "--window=0", "--non-empty", path.Join(to, "pack"))
	if err != nil {
		return "", err
	}
	id := strings.TrimSpace(out)
	if id == "" {
		return "", nil
	}
	if !isObjectID(id) {
		return "", gitRefuse(gitBadObjects, "", "git wrote no pack")
	}
	return path.Join(to, "pack-"+id), nil
}

// isCommit says whether id is a commit that is there.
func (g gitProgram) isCommit(ctx context.Context, gitDir, id string) error {
	out, err := g.run(ctx, gitDir, id+"\n", "cat-file", "--batch-check=%(objecttype)")
	if err == nil && strings.TrimSpace(out) != "commit" {
		err = gitRefuse(gitIncomplete, id, "it is no commit that is there")
	}
	return err
}

// withTimeout names the limit in the error that its end causes.
func withTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, d, &gitError{Reason: gitTooLarge, Msg: fmt.Sprintf("it takes longer than %s", d)})
}

// gitSays gives git's own words for a refusal.
func gitSays(err error) string {
	var e *EngineError
	if !errors.As(err, &e) {
		return ""
	}
	line, _, _ := bytes.Cut([]byte(strings.TrimSpace(e.Stderr)), []byte("\n"))
	return printable(string(line))
}

// author is user.name and user.email as the host's git knows them: the repository's
// own, else those of the user and the system. Either is empty where nothing names it.
// The user's configuration is the caller's, so git may read it with its includes; the
// repository's is data. getenv gives HOME and XDG_CONFIG_HOME.
func (g gitProgram) author(ctx context.Context, h gitHost, getenv func(string) string) (name, email string, err error) {
	if name, err = g.userSetting(ctx, h.Name, "user.name", getenv); err != nil {
		return "", "", err
	}
	email, err = g.userSetting(ctx, h.Email, "user.email", getenv)
	return name, email, err
}

// userSetting runs git config outside every repository; its exit code 1 says that
// there is no such setting.
func (g gitProgram) userSetting(ctx context.Context, own, key string, getenv func(string) string) (string, error) {
	if own != "" {
		return own, nil
	}
	env := []string{"GIT_DIR=/nonexistent", "GIT_TERMINAL_PROMPT=0", "LC_ALL=C", "PATH=/usr/local/bin:/usr/bin:/bin"}
	for _, k := range []string{"HOME", "XDG_CONFIG_HOME"} {
		if v := getenv(k); v != "" {
			env = append(env, k+"="+v)
		}
	}
	out, err := g.Runner.Run(ctx, Command{Path: g.Path, Args: []string{"config", "--includes", "--get", key}, Env: env})
	var status ExitStatus
	if errors.As(err, &status) && status == (ExitStatus{Code: 1}) {
		return "", nil
	}
	return strings.TrimSuffix(string(out.Stdout), "\n"), err
}
