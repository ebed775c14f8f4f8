package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// The git benchmark's repository: each commit after the first changes a fiftieth of the files.
const (
	gitFiles   = 50_000
	gitCommits = 20
	gitSpec    = "git.json"
)

// gitPart compares a run's private repository with git clone --single-branch, without a
// working tree and with an index, as the private one has. The shim makes it, whatever
// the engine is: one set-up is enough.
func gitPart() error {
	for _, s := range setups {
		if !strings.Contains(s.name, *only) {
			continue
		}
		b, err := newBench(s)
		if err == nil {
			err = b.git()
		}
		b.close()
		return err
	}
	return nil
}

func (b *bench) git() error {
	repo, to := filepath.Join(b.dir, "repo"), filepath.Join(b.dir, "clone")
	text := fmt.Sprintf(`{"version":1,"image":"agentshim/hello:test","pull":"never","engine":%q,"user":"24199:24199",
	"harness":{"binary":"true"},"accept":["rootless-cgroup-limits"],"workspace":{"source":%q,"git":"private"}}`, b.engine, repo)
	if err := errors.Join(
		makeGitSource(repo), exec.Command("chown", "-R", b.account, repo).Run(),
		os.WriteFile(filepath.Join(b.dir, gitSpec), []byte(text), 0o644),
	); err != nil {
		return err
	}
	clone := fmt.Sprintf("git -c protocol.file.allow=always clone -q --no-checkout --single-branch %s %s && git -C %s read-tree HEAD", repo, to, to)
	kinds := [][]string{
		{"sh", "-c", strings.Replace(clone, repo, "file://"+repo, 1)},
		{"sh", "-c", clone},
		b.exec(gitSpec, "true"),
		b.exec(denyAll, "true"),
	}
	times := make([][]time.Duration, len(kinds))
	phases := map[string][]time.Duration{}
	for i := range *rounds + 1 { // the first one warms the cache
		for j := range kinds {
			k := (i + j) % len(kinds)
			d, err := b.timed(kinds[k])
			if err := errors.Join(err, os.RemoveAll(to)); err != nil {
				return err
			}
			if i == 0 {
				continue
			}
			times[k] = append(times[k], d)
			if k == 2 {
				b.addPhases(phases)
			}
		}
	}
	fmt.Printf("private repository of a branch with %d files and %d commits (%s, %d interleaved rounds, median [quartiles] in ms)\n", gitFiles, gitCommits, b.name, *rounds)
	for k, name := range []string{"git clone --single-branch file://", "git clone --single-branch (hard links)", "exec with it", "exec without a workspace"} {
		fmt.Printf("  %-40s %s\n", name, spread(times[k]))
	}
	made := phases["git"]
	fmt.Printf("  %-40s %s  ratio to clone file:// %.2f\n", "making it (exec's phase git)", spread(made), float64(median(made))/float64(median(times[0])))
	return nil
}

func makeGitSource(repo string) error {
	if err := exec.Command("git", "init", "-q", "-b", "main", repo).Run(); err != nil {
		return err
	}
	var in strings.Builder
	for c := range gitCommits {
		fmt.Fprintf(&in, "commit refs/heads/main\ncommitter a <b> %d +0000\ndata 1\nx\n", c)
		for i := range gitFiles {
			if c == 0 || i%50 == c {
				text := strings.Repeat(fmt.Sprintf("file %d of commit %d\n", i, c), 20)
				fmt.Fprintf(&in, "M 100644 inline d%d/e%d/f%d\ndata %d\n%s\n", i/2500, i/50%50, i, len(text), text)
			}
		}
	}
	cmd := exec.Command("git", "-C", repo, "-c", "fastimport.unpackLimit=0", "fast-import", "--quiet")
	cmd.Stdin = strings.NewReader(in.String())
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("git fast-import: %w: %s", err, out)
	}
	return nil
}
