package shim

import (
	"bytes"
	"compress/zlib"
	"context"
	"crypto/sha1"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// tripwire is a program that a git dir can name, and what makes plain git run it.
type tripwire struct {
	name string
	// plant writes it into a git dir; trip is the program.
	plant func(f *gitFixture, gitDir, trip string)
	// fire is a plain git command in the repository that runs the program.
	fire []string
}

func configWire(name, config string, fire ...string) tripwire {
	return tripwire{name, func(f *gitFixture, gitDir, trip string) {
		f.append(filepath.Join(gitDir, "config"), "\n"+strings.ReplaceAll(config, "TRIP", trip)+"\n")
	}, fire}
}

func hookWire(hook string, fire ...string) tripwire {
	return tripwire{"hook " + hook, func(f *gitFixture, gitDir, trip string) {
		must(f.t, os.MkdirAll(filepath.Join(gitDir, "hooks"), 0o755))
		must(f.t, os.Symlink(trip, filepath.Join(gitDir, "hooks", hook)))
	}, fire}
}

// attributeWire names the driver x for every file, in the git dir's own attributes.
func attributeWire(name, attribute, config string, fire ...string) tripwire {
	w := configWire(name, config, fire...)
	return tripwire{name, func(f *gitFixture, gitDir, trip string) {
		w.plant(f, gitDir, trip)
		f.append(filepath.Join(gitDir, "info/attributes"), "* "+attribute+"\n")
	}, fire}
}

var tripwires = []tripwire{
	configWire("fsmonitor", "[core]\nfsmonitor = TRIP", "status"),
	configWire("hooksPath", "[core]\nhooksPath = DIRTRIP", "checkout", "-q", "HEAD"),
	configWire("editor", "[core]\neditor = TRIP", "commit", "--allow-empty"),
	configWire("credential helper", "[credential]\nhelper = TRIP", "credential", "fill"),
	configWire("include.path", "[include]\npath = TRIP.inc", "status"),
	configWire("sshCommand", "[core]\nsshCommand = TRIP\n[remote \"r\"]\nurl = ssh://x/y", "fetch", "r"),
	configWire("uploadpack", "[remote \"r\"]\nurl = .\nuploadpack = TRIP", "fetch", "r"),
	configWire("ext remote", "[protocol]\nallow = always\n[remote \"r\"]\nurl = ext::TRIP x\npromisor = false", "fetch", "r"),
	configWire("alias", "[alias]\nx = !TRIP", "x"),
	configWire("gpg program", "[gpg]\nprogram = TRIP\n[commit]\ngpgSign = true", "commit", "--allow-empty", "-m", "x"),
	configWire("diff program", "[diff]\nexternal = TRIP", "diff", "HEAD~1", "HEAD"),
	attributeWire("filter clean", "filter=x", "[filter \"x\"]\nclean = TRIP", "add", "--renormalize", "."),
	attributeWire("filter smudge", "filter=x", "[filter \"x\"]\nsmudge = TRIP", "checkout-index", "-a", "--prefix=smudged/"),
	attributeWire("textconv", "diff=x", "[diff \"x\"]\ntextconv = TRIP", "show"),
	hookWire("post-checkout", "checkout", "-q", "HEAD"),
	hookWire("post-index-change", "read-tree", "HEAD"),
	hookWire("reference-transaction", "update-ref", "refs/x/y", "HEAD"),
	hookWire("pre-receive", "push", "-q", "GITDIR", "HEAD:refs/x/z"),
	hookWire("update", "push", "-q", "GITDIR", "HEAD:refs/x/w"),
	hookWire("post-commit", "commit", "-q", "--allow-empty", "-m", "x"),
}

// trip makes a program that leaves a mark, and the ways to name it.
func (f *gitFixture) trip() (program, mark string) {
	mark = filepath.Join(f.dir, "tripped")
	program = filepath.Join(f.dir, "trip")
	f.put(program, "#!/bin/sh\n: >"+mark+"\nexit 0\n")
	f.put(program+".inc", "[core]\nfsmonitor = "+program+"\n")
	must(f.t, os.Chmod(program, 0o755))
	hooks := filepath.Join(f.dir, "hooks")
	must(f.t, os.MkdirAll(hooks, 0o755))
	must(f.t, os.Symlink(program, filepath.Join(hooks, "post-checkout")))
	return program, mark
}

func (w tripwire) into(f *gitFixture, gitDir, program string) {
	w.plant(f, gitDir, program)
	file := filepath.Join(gitDir, "config")
	b, err := os.ReadFile(file)
	must(f.t, err)
	must(f.t, os.WriteFile(file, bytes.ReplaceAll(b, []byte("DIR"+program), []byte(filepath.Join(f.dir, "hooks"))), 0o644))
}

// M15, A63: what an agent wrote into the host's git dir in an earlier, shared run.
func TestGitTripwiresInTheHostsRepository(t *testing.T) {
	for _, w := range tripwires {
		t.Run(w.name, func(t *testing.T) {
			f := newGitFixture(t)
			program, mark := f.trip()
			gitDir := filepath.Join(f.work, ".git")
			saved, err := os.ReadFile(filepath.Join(gitDir, "config"))
			must(t, err)
			w.into(f, gitDir, program)

			p := f.mustPrivate()
			commit := f.agentCommits(p)
			if fired(mark) {
				t.Fatal("the agent's git ran it: it must not be in the private repository")
			}
			got, err := f.take(p)
			must(t, err)
			if fired(mark) {
				t.Error("it ran")
			}
			if got.Commit != commit {
				t.Errorf("got %+v", got)
			}
			f.control(w, gitDir, mark)
			// The host's git is to look at the result without it.
			must(t, os.WriteFile(filepath.Join(gitDir, "config"), saved, 0o644))
			_ = os.RemoveAll(filepath.Join(gitDir, "hooks"))
		})
	}
}

// The same in the agent's own git dir, when its commits are taken.
func TestGitTripwiresInTheAgentsRepository(t *testing.T) {
	for _, w := range tripwires {
		t.Run(w.name, func(t *testing.T) {
			f := newGitFixture(t)
			program, mark := f.trip()
			p := f.mustPrivate()
			commit := f.agentCommits(p)
			w.into(f, p.Private(), program)
			got, err := f.take(p)
			must(t, err)
			if fired(mark) {
				t.Error("it ran")
			}
			if got.Commit != commit {
				t.Errorf("got %+v", got)
			}
			f.control(w, p.Private(), mark)
		})
	}
}

func fired(mark string) bool { _, err := os.Stat(mark); return err == nil }

// control shows that plain git runs the program; git may well fail afterwards.
func (f *gitFixture) control(w tripwire, gitDir, mark string) {
	f.t.Helper()
	args := []string{"--git-dir=" + gitDir, "--work-tree=" + f.work}
	for _, a := range w.fire {
		args = append(args, strings.ReplaceAll(a, "GITDIR", gitDir))
	}
	out, _ := f.plain(f.work, args...)
	if !fired(mark) {
		f.t.Errorf("control: git %q does not run it:\n%s", w.fire, out)
	}
}

// What a host's repository is refused for. control shows what plain git makes of it.
func TestGitRefusesTheHostsRepository(t *testing.T) {
	git := func(name string) string { return filepath.Join(".git", name) }
	for name, c := range map[string]struct {
		change  func(f *gitFixture)
		want    gitReason
		control func(f *gitFixture)
	}{
		"alternates outside": {func(f *gitFixture) {
			f.put(filepath.Join(f.work, git("objects/info/alternates")), f.other()+"/.git/objects\n")
			f.put(filepath.Join(f.work, git("refs/heads/main")), f.git(f.other(), "rev-parse", "HEAD")+"\n")
		}, gitAlternates, func(f *gitFixture) { f.wantOther() }},
		"objects is a link": {func(f *gitFixture) {
			f.replaceByLink(git("objects"), f.other()+"/.git/objects")
			f.put(filepath.Join(f.work, git("refs/heads/main")), f.git(f.other(), "rev-parse", "HEAD")+"\n")
		}, gitLink, func(f *gitFixture) { f.wantOther() }},
		"a fan-out folder is a link": {func(f *gitFixture) {
			id := f.host("rev-parse", "main")
			f.replaceByLink(git("objects/"+id[:2]), f.dir)
		}, gitLink, nil},
		"an object is a link": {func(f *gitFixture) {
			id := f.git(f.other(), "rev-parse", "HEAD")
			for _, o := range strings.Fields(f.git(f.other(), "rev-list", "--objects", "--no-object-names", "HEAD")) {
				must(f.t, os.MkdirAll(filepath.Join(f.work, git("objects/"+o[:2])), 0o755))
				must(f.t, os.Symlink(filepath.Join(f.other(), git("objects/"+o[:2]+"/"+o[2:])), filepath.Join(f.work, git("objects/"+o[:2]+"/"+o[2:]))))
			}
			f.put(filepath.Join(f.work, git("refs/heads/main")), id+"\n")
		}, gitLink, func(f *gitFixture) { f.wantOther() }},
		"an object is a FIFO": {func(f *gitFixture) {
			must(f.t, os.MkdirAll(filepath.Join(f.work, git("objects/ff")), 0o755))
			must(f.t, unix.Mkfifo(filepath.Join(f.work, git("objects/ff/"+long(38))), 0o600))
			must(f.t, unix.Mkfifo(filepath.Join(f.work, git("objects/ff/"+strings.Repeat("f", 38))), 0o600))
		}, gitMalformed, nil},
		"a pack is a link": {func(f *gitFixture) {
			f.git(f.other(), "gc", "-q")
			packs, _ := filepath.Glob(filepath.Join(f.other(), git("objects/pack/pack-*")))
			must(f.t, os.MkdirAll(filepath.Join(f.work, git("objects/pack")), 0o755))
			for _, p := range packs {
				must(f.t, os.Symlink(p, filepath.Join(f.work, git("objects/pack/"+filepath.Base(p)))))
			}
			f.put(filepath.Join(f.work, git("refs/heads/main")), f.git(f.other(), "rev-parse", "HEAD")+"\n")
		}, gitLink, func(f *gitFixture) { f.wantOther() }},
		"the pack folder is a link": {func(f *gitFixture) { f.replaceByLink(git("objects/pack"), f.dir) }, gitLink, nil},
		"refs is a link":            {func(f *gitFixture) { f.replaceByLink(git("refs"), f.other()+"/.git/refs") }, gitLink, nil},
		"a ref is a link":           {func(f *gitFixture) { f.replaceByLink(git("refs/heads/main"), "/etc/passwd") }, gitLink, nil},
		"HEAD is a link":            {func(f *gitFixture) { f.replaceByLink(git("HEAD"), "refs/heads/main") }, gitLink, func(f *gitFixture) { f.host("log") }},
		"HEAD is a FIFO":            {func(f *gitFixture) { f.replaceByFIFO(git("HEAD")) }, gitMalformed, nil},
		"config is a FIFO":          {func(f *gitFixture) { f.replaceByFIFO(git("config")) }, gitMalformed, nil},
		"packed-refs is a link":     {func(f *gitFixture) { f.host("pack-refs", "--all"); f.replaceByLink(git("packed-refs"), "/etc/passwd") }, gitLink, nil},
		"shallow is a link":         {func(f *gitFixture) { must(f.t, os.Symlink("/etc/passwd", filepath.Join(f.work, git("shallow")))) }, gitLink, nil},
		"info is a link":            {func(f *gitFixture) { f.replaceByLink(git("info"), "/etc") }, gitLink, nil},
		"exclude is a link":         {func(f *gitFixture) { f.replaceByLink(git("info/exclude"), "/etc/passwd") }, gitLink, nil},
		".git is a link":            {func(f *gitFixture) { f.replaceByLink(".git", f.other()+"/.git") }, gitLink, func(f *gitFixture) { f.wantOther() }},
		".git is a FIFO":            {func(f *gitFixture) { f.replaceByFIFO(".git") }, gitMalformed, nil},
		".git file to another repository": {func(f *gitFixture) {
			f.replaceByFile("gitdir: " + f.other() + "/.git\n")
		}, gitForeign, func(f *gitFixture) { f.wantOther() }},
		".git file to another's working tree": {func(f *gitFixture) {
			f.git(f.other(), "worktree", "add", "-q", filepath.Join(f.dir, "wt"), "-b", "wt")
			f.replaceByFile("gitdir: " + f.other() + "/.git/worktrees/wt\n")
		}, gitForeign, func(f *gitFixture) { f.wantOther() }},
		".git file to a made-up working tree": {func(f *gitFixture) {
			fake := filepath.Join(f.work, "fake/worktrees/x")
			f.put(filepath.Join(fake, "HEAD"), "ref: refs/heads/main\n")
			f.put(filepath.Join(fake, "commondir"), f.other()+"/.git\n")
			f.put(filepath.Join(fake, "gitdir"), filepath.Join(f.work, ".git")+"\n")
			f.replaceByFile("gitdir: fake/worktrees/x\n")
		}, gitForeign, func(f *gitFixture) { f.wantOther() }},
		".git file through a link of the agent's": {func(f *gitFixture) {
			must(f.t, os.Symlink(f.other(), filepath.Join(f.work, "way")))
			f.replaceByFile("gitdir: way/.git\n")
		}, gitForeign, func(f *gitFixture) { f.wantOther() }},
		".git file to nowhere":     {func(f *gitFixture) { f.replaceByFile("gitdir: /no/such\n") }, gitForeign, nil},
		".git file to a file":      {func(f *gitFixture) { f.replaceByFile("gitdir: /etc/passwd\n") }, gitForeign, nil},
		".git file of other words": {func(f *gitFixture) { f.replaceByFile("hello\n") }, gitMalformed, nil},
		"commondir": {func(f *gitFixture) {
			f.put(filepath.Join(f.work, git("commondir")), f.other()+"/.git\n")
		}, gitForeign, func(f *gitFixture) { f.wantOther() }},
		"core.worktree": {func(f *gitFixture) { f.host("config", "core.worktree", f.other()) }, gitWorkElsewhere, nil},
		"core.bare":     {func(f *gitFixture) { f.host("config", "core.bare", "true") }, gitBare, nil},
		"grafts": {func(f *gitFixture) {
			f.put(filepath.Join(f.work, git("info/grafts")), f.host("rev-parse", "main")+"\n")
		}, gitGrafts, func(f *gitFixture) {
			if out := f.host("-c", "advice.graftFileDeprecated=false", "log", "--format=%s"); out != "two" {
				f.t.Errorf("control: the graft has no effect: %s", out)
			}
		}},
		"promisor pack": {func(f *gitFixture) {
			f.host("gc", "-q")
			packs, _ := filepath.Glob(filepath.Join(f.work, git("objects/pack/*.pack")))
			f.put(strings.TrimSuffix(packs[0], ".pack")+".promisor", "")
		}, gitPartial, nil},
		"partial clone": {func(f *gitFixture) { f.host("config", "remote.o.promisor", "true") }, gitPartial, nil},
		"sparse":        {func(f *gitFixture) { f.host("sparse-checkout", "set", "src") }, gitSparse, nil},
		"ref to a ref":  {func(f *gitFixture) { f.host("symbolic-ref", "refs/heads/main", "refs/heads/secret") }, gitMalformed, nil},
		"ref to a blob": {func(f *gitFixture) {
			f.put(filepath.Join(f.work, git("refs/heads/main")), f.host("rev-parse", "main:README")+"\n")
		}, gitIncomplete, nil},
		"ref to nothing": {func(f *gitFixture) {
			f.put(filepath.Join(f.work, git("refs/heads/main")), strings.Repeat("1", 40)+"\n")
		}, gitIncomplete, nil},
		"a missing blob": {func(f *gitFixture) {
			id := f.host("rev-parse", "main:README")
			must(f.t, os.Remove(filepath.Join(f.work, git("objects/"+id[:2]+"/"+id[2:]))))
		}, gitIncomplete, nil},
		"huge HEAD":     {func(f *gitFixture) { must(f.t, os.Truncate(filepath.Join(f.work, git("HEAD")), 1<<40)) }, gitTooLarge, nil},
		"a bad config":  {func(f *gitFixture) { f.append(filepath.Join(f.work, git("config")), "[[\n") }, gitMalformed, nil},
		"no config":     {func(f *gitFixture) { must(f.t, os.Remove(filepath.Join(f.work, git("config")))) }, gitMalformed, nil},
		"no HEAD":       {func(f *gitFixture) { must(f.t, os.Remove(filepath.Join(f.work, git("HEAD")))) }, gitMalformed, nil},
		"HEAD, newline": {func(f *gitFixture) { f.put(filepath.Join(f.work, git("HEAD")), "ref: refs/heads/a\nb\n") }, gitMalformed, nil},
		"HEAD leads up": {func(f *gitFixture) { f.put(filepath.Join(f.work, git("HEAD")), "ref: refs/heads/../../../x\n") }, gitMalformed, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := hostileFixture(t)
			c.change(f)
			before := treeOf(t, f.work)
			done := make(chan error, 1)
			go func() { _, err := f.private(); done <- err }()
			select {
			case err := <-done:
				wantReason(t, err, c.want)
			case <-time.After(time.Minute):
				t.Fatal("it waits")
			}
			left, _ := os.ReadDir(filepath.Join(f.dir, "own"))
			if len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			if got := onlyAdds(t, before, treeOf(t, f.work)); len(got) > 0 {
				t.Errorf("added %q", got)
			}
			if c.control != nil {
				c.control(f)
			}
		})
	}
}

// hostileFixture is newGitFixture without the look at the host's repository at the end,
// which these tests break themselves.
func hostileFixture(t *testing.T) *gitFixture {
	t.Helper()
	f := bareFixture(t)
	f.host("init", "-q", "-b", "main", ".")
	f.write("README", "one\n")
	f.write("src/a.txt", "a\n")
	f.host("add", ".")
	f.host("commit", "-q", "-m", "one")
	f.host("branch", "secret")
	f.write("README", "two\n")
	f.host("commit", "-q", "-a", "-m", "two")
	return f
}

// other is another repository of the user's, which the agent must not see.
func (f *gitFixture) other() string {
	f.t.Helper()
	dir := filepath.Join(f.dir, "other")
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	f.git(f.dir, "init", "-q", "-b", "main", dir)
	f.put(filepath.Join(dir, "private"), "another repository's\n")
	f.git(dir, "add", ".")
	f.git(dir, "commit", "-q", "-m", "another repository's")
	return dir
}

// wantOther is a control: plain git in the workspace shows the other repository's.
func (f *gitFixture) wantOther() {
	f.t.Helper()
	if out, err := f.plain(f.work, "log", "-p"); err != nil || !strings.Contains(out, "another repository's") {
		f.t.Errorf("control: plain git does not show the other repository: %v\n%s", err, out)
	}
}

func (f *gitFixture) replaceByLink(name, target string) {
	f.t.Helper()
	must(f.t, os.RemoveAll(filepath.Join(f.work, name)))
	must(f.t, os.Symlink(target, filepath.Join(f.work, name)))
}

func (f *gitFixture) replaceByFile(content string) {
	f.t.Helper()
	must(f.t, os.RemoveAll(filepath.Join(f.work, ".git")))
	f.write(".git", content)
}

func (f *gitFixture) replaceByFIFO(name string) {
	f.t.Helper()
	must(f.t, os.RemoveAll(filepath.Join(f.work, name)))
	must(f.t, unix.Mkfifo(filepath.Join(f.work, name), 0o600))
}

// A folder that is exchanged between the look and the use.
func TestGitSeesASwap(t *testing.T) {
	f := hostileFixture(t)
	h, err := findGit(f.work, nil)
	must(t, err)
	must(t, os.Rename(filepath.Join(f.work, ".git"), filepath.Join(f.work, "old")))
	must(t, os.Rename(filepath.Join(f.other(), ".git"), filepath.Join(f.work, ".git")))
	_, err = f.prog.newPrivate(context.Background(), h, gitOptions{Dir: filepath.Join(f.dir, "own/x"), ObjectsTarget: "/x"})
	wantReason(t, err, gitSwapped)
}

// While objects is exchanged for a link in a loop, no object of the other
// repository arrives.
func TestGitObjectsExchangedInALoop(t *testing.T) {
	f := hostileFixture(t)
	other := f.git(f.other(), "rev-parse", "HEAD")
	f.put(filepath.Join(f.work, ".git/refs/heads/main"), other+"\n")
	link, objects := filepath.Join(f.work, "link"), filepath.Join(f.work, ".git/objects")
	must(t, os.Symlink(filepath.Join(f.other(), ".git/objects"), link))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, link, unix.AT_FDCWD, objects, unix.RENAME_EXCHANGE)
			}
		}
	}()
	for range 50 {
		_, err := f.private()
		if !errors.Is(err, gitLink) && !errors.Is(err, gitIncomplete) {
			t.Errorf("got %v", err)
		}
	}
	close(stop)
	<-stopped
	// Control: in one of the two states plain git shows the other repository's commit.
	shown := false
	for range 2 {
		out, err := f.plain(f.work, "log", "-p", other)
		shown = shown || (err == nil && strings.Contains(out, "another repository's"))
		must(t, unix.Renameat2(unix.AT_FDCWD, link, unix.AT_FDCWD, objects, unix.RENAME_EXCHANGE))
	}
	if !shown {
		t.Error("control: the link shows nothing")
	}
}

// The same with a pack and a loose object: names that a snapshot takes one by one.
func TestGitPackExchangedInALoop(t *testing.T) {
	f := hostileFixture(t)
	f.git(f.other(), "gc", "-q")
	packs, err := filepath.Glob(filepath.Join(f.other(), ".git/objects/pack/pack-*"))
	must(t, err)
	stop, stopped := make(chan struct{}), make(chan struct{})
	var pairs [][2]string
	for _, p := range packs {
		inside := filepath.Join(f.work, ".git/objects/pack", filepath.Base(p))
		link := inside + ".link"
		f.put(inside, "not a pack")
		must(t, os.Symlink(p, link))
		pairs = append(pairs, [2]string{link, inside})
	}
	exchange := func() {
		for _, p := range pairs {
			_ = unix.Renameat2(unix.AT_FDCWD, p[0], unix.AT_FDCWD, p[1], unix.RENAME_EXCHANGE)
		}
	}
	other := f.git(f.other(), "rev-parse", "HEAD")
	f.put(filepath.Join(f.work, ".git/refs/heads/main"), other+"\n")
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				exchange()
			}
		}
	}()
	for range 50 {
		if _, err := f.private(); !errors.Is(err, gitLink) && !errors.Is(err, gitIncomplete) {
			t.Errorf("got %v", err)
		}
	}
	close(stop)
	<-stopped
	shown := false
	for range 2 {
		out, err := f.plain(f.work, "log", "-p", other)
		shown = shown || (err == nil && strings.Contains(out, "another repository's"))
		exchange()
	}
	if !shown {
		t.Error("control: the links show nothing")
	}
}

// What an agent's repository is refused for; nothing is written then.
func TestGitRefusesTheAgentsRepository(t *testing.T) {
	for name, c := range map[string]struct {
		change func(f *gitFixture, p gitPrivate)
		want   gitReason
		limits gitLimits
	}{
		"HEAD is a link to a secret": {func(f *gitFixture, p gitPrivate) { f.link(p, "HEAD", "/etc/passwd") }, gitLink, gitLimits{}},
		"HEAD is a FIFO":             {func(f *gitFixture, p gitPrivate) { f.fifo(p, "HEAD") }, gitMalformed, gitLimits{}},
		"HEAD is gone":               {func(f *gitFixture, p gitPrivate) { must(f.t, os.Remove(p.Private()+"/HEAD")) }, gitMalformed, gitLimits{}},
		"HEAD leads up":              {func(f *gitFixture, p gitPrivate) { f.put(p.Private()+"/HEAD", "ref: refs/heads/../../../../x\n") }, gitMalformed, gitLimits{}},
		"HEAD leads to -x":           {func(f *gitFixture, p gitPrivate) { f.put(p.Private()+"/HEAD", "ref: refs/heads/--upload-pack=x\n") }, gitMalformed, gitLimits{}},
		"reftable":                   {func(f *gitFixture, p gitPrivate) { f.put(p.Private()+"/HEAD", "ref: refs/heads/.invalid\n") }, gitRefFormat, gitLimits{}},
		"refs is a link":             {func(f *gitFixture, p gitPrivate) { f.link(p, "refs", f.work+"/.git/refs") }, gitLink, gitLimits{}},
		"the branch is a link":       {func(f *gitFixture, p gitPrivate) { f.link(p, "refs/heads/main", "/etc/passwd") }, gitLink, gitLimits{}},
		"objects is a link":          {func(f *gitFixture, p gitPrivate) { f.link(p, "objects", f.work+"/.git/objects") }, gitLink, gitLimits{}},
		"the pack folder is a link":  {func(f *gitFixture, p gitPrivate) { f.link(p, "objects/pack", f.work+"/.git/objects/pack") }, gitLink, gitLimits{}},
		"packed-refs is huge": {func(f *gitFixture, p gitPrivate) {
			f.link(p, "refs/heads/main", "x")
			must(f.t, os.Remove(p.Private()+"/refs/heads/main"))
			must(f.t, os.Truncate(p.Private()+"/packed-refs", 1<<40))
		}, gitTooLarge, gitLimits{}},
		"an object of another branch": {func(f *gitFixture, p gitPrivate) {
			f.put(p.Private()+"/refs/heads/main", f.host("rev-parse", "secret")+"\n")
		}, gitIncomplete, gitLimits{}},
		"a tree with another branch's file": {func(f *gitFixture, p gitPrivate) {
			f.agentTree(p, "100644 blob "+f.host("rev-parse", "secret:token")+"\ttoken\n")
		}, gitBadObjects, gitLimits{}},
		"alternates to the host's own": {func(f *gitFixture, p gitPrivate) {
			f.append(p.Private()+"/objects/info/alternates", f.work+"/.git/objects\n")
			f.agentTree(p, "100644 blob "+f.host("rev-parse", "secret:token")+"\ttoken\n")
		}, gitBadObjects, gitLimits{}},
		"a commit whose tree is missing": {func(f *gitFixture, p gitPrivate) {
			f.agentRef(p, f.loose(p, "commit", "tree "+strings.Repeat("1", 40)+"\nauthor a <b> 1 +0000\ncommitter a <b> 1 +0000\n\nx\n"))
		}, gitBadObjects, gitLimits{}},
		"an object under another's name": {func(f *gitFixture, p gitPrivate) {
			commit := f.agentCommits(p)
			f.replaceLoose(p, commit, looseBytes("commit 5\x00hello"))
		}, gitBadObjects, gitLimits{}},
		"an object that is cut off": {func(f *gitFixture, p gitPrivate) {
			f.replaceLoose(p, f.agentCommits(p), looseBytes("commit 500\x00hello"))
		}, gitBadObjects, gitLimits{}},
		"an object of no zlib": {func(f *gitFixture, p gitPrivate) { f.replaceLoose(p, f.agentCommits(p), []byte("x")) }, gitBadObjects, gitLimits{}},
		"a loose bomb": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			f.loose(p, "blob", strings.Repeat("\x00", 2<<20))
		}, gitTooLarge, gitLimits{Object: 1 << 20}},
		"a loose bomb that says nothing": {func(f *gitFixture, p gitPrivate) {
			f.replaceLoose(p, f.agentCommits(p), looseBytes("blob 3\x00"+strings.Repeat("\x00", 8<<20)))
		}, gitBadObjects, gitLimits{}},
		"a packed bomb": {func(f *gitFixture, p gitPrivate) {
			f.agentTree(p, "100644 blob "+f.loose(p, "blob", strings.Repeat("\x00", 8<<20))+"\tzero\n")
			f.agent(p, "repack", "-q", "-a", "-d", "-l")
		}, gitTooLarge, gitLimits{Object: 1 << 20}},
		"many in all":  {func(f *gitFixture, p gitPrivate) { f.agentCommits(p); f.agent(p, "repack", "-q", "-a", "-d", "-l") }, gitTooLarge, gitLimits{Expanded: 100}},
		"many objects": {func(f *gitFixture, p gitPrivate) { f.agentCommits(p) }, gitTooLarge, gitLimits{Objects: 2}},
		"many files":   {func(f *gitFixture, p gitPrivate) { f.agentCommits(p) }, gitTooLarge, gitLimits{Files: 2}},
		"many bytes":   {func(f *gitFixture, p gitPrivate) { f.agentCommits(p) }, gitTooLarge, gitLimits{Bytes: 50}},
		"a long time":  {func(f *gitFixture, p gitPrivate) { f.agentCommits(p) }, gitTooLarge, gitLimits{Time: 1}},
		"a sparse file of a terabyte": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			f.put(p.Private()+"/objects/pack/pack-"+someID+".pack", "")
			must(f.t, os.Truncate(p.Private()+"/objects/pack/pack-"+someID+".pack", 1<<40))
		}, gitTooLarge, gitLimits{}},
		"a pack of garbage": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			f.put(p.Private()+"/objects/pack/pack-"+someID+".pack", "PACK\x00\x00\x00\x02\xff\xff\xff\xff")
		}, gitBadObjects, gitLimits{}},
		"a pack that promises memory": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			f.put(p.Private()+"/objects/pack/pack-"+someID+".pack", string(hugeDelta()))
		}, gitBadObjects, gitLimits{}},
		"a FIFO among the packs": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			must(f.t, unix.Mkfifo(p.Private()+"/objects/pack/pack-"+someID+".pack", 0o644))
		}, gitMalformed, gitLimits{}},
		"a FIFO among the objects": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			must(f.t, os.MkdirAll(p.Private()+"/objects/01", 0o755))
			must(f.t, unix.Mkfifo(p.Private()+"/objects/01/"+someID[2:], 0o644))
		}, gitMalformed, gitLimits{}},
		"a device's link among the objects": {func(f *gitFixture, p gitPrivate) {
			f.agentCommits(p)
			must(f.t, os.MkdirAll(p.Private()+"/objects/01", 0o755))
			must(f.t, os.Symlink("/dev/zero", p.Private()+"/objects/01/"+someID[2:]))
		}, gitLink, gitLimits{}},
		"the tip is a tag": {func(f *gitFixture, p gitPrivate) {
			f.agentRef(p, f.loose(p, "tag", "object "+p.Host.Head.Commit+"\ntype commit\ntag x\ntagger a <b> 1 +0000\n\nx\n"))
		}, gitIncomplete, gitLimits{}},
		"the tip is a blob": {func(f *gitFixture, p gitPrivate) { f.agentRef(p, f.loose(p, "blob", "x")) }, gitIncomplete, gitLimits{}},
		"a malformed commit": {func(f *gitFixture, p gitPrivate) {
			f.agentRef(p, f.loose(p, "commit", "tree "+f.agent(p, "rev-parse", "HEAD^{tree}")+"\nparent "+p.Host.Head.Commit+"\nauthor x\ncommitter y\n\n"))
		}, gitBadObjects, gitLimits{}},
		"another root": {func(f *gitFixture, p gitPrivate) { f.agentRef(p, f.agent(p, "commit-tree", "-m", "x", "HEAD^{tree}")) }, gitRewritten, gitLimits{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newGitFixture(t)
			p := f.mustPrivate()
			before := treeOf(t, filepath.Join(f.work, ".git"))
			c.change(f, p)
			done := make(chan error, 1)
			go func() { _, err := f.take(p, func(o *gitTakeOptions) { o.Limits = c.limits }); done <- err }()
			select {
			case err := <-done:
				wantReason(t, err, c.want)
			case <-time.After(time.Minute):
				t.Fatal("it waits")
			}
			if got := onlyAdds(t, before, treeOf(t, filepath.Join(f.work, ".git"))); len(got) > 0 {
				t.Errorf("added %q", got)
			}
		})
	}
}

func (f *gitFixture) link(p gitPrivate, name, target string) {
	f.t.Helper()
	f.agentCommits(p)
	must(f.t, os.RemoveAll(filepath.Join(p.Private(), name)))
	must(f.t, os.Symlink(target, filepath.Join(p.Private(), name)))
}

func (f *gitFixture) fifo(p gitPrivate, name string) {
	f.t.Helper()
	must(f.t, os.RemoveAll(filepath.Join(p.Private(), name)))
	must(f.t, unix.Mkfifo(filepath.Join(p.Private(), name), 0o644))
}

// loose writes an object as it stands, whatever git would say to it.
func (f *gitFixture) loose(p gitPrivate, kind, content string) string {
	f.t.Helper()
	raw := fmt.Sprintf("%s %d\x00%s", kind, len(content), content)
	sum := sha1.Sum([]byte(raw))
	id := hex.EncodeToString(sum[:])
	f.put(filepath.Join(p.Private(), "objects", id[:2], id[2:]), string(looseBytes(raw)))
	return id
}

func (f *gitFixture) replaceLoose(p gitPrivate, id string, b []byte) {
	f.t.Helper()
	name := filepath.Join(p.Private(), "objects", id[:2], id[2:])
	must(f.t, os.Remove(name))
	must(f.t, os.WriteFile(name, b, 0o644))
}

func looseBytes(raw string) []byte {
	var b bytes.Buffer
	z := zlib.NewWriter(&b)
	_, _ = z.Write([]byte(raw))
	_ = z.Close()
	return b.Bytes()
}

func (f *gitFixture) agentRef(p gitPrivate, id string) {
	f.t.Helper()
	f.put(filepath.Join(p.Private(), "refs/heads/main"), id+"\n")
}

// agentTree commits a tree of git's textual form.
func (f *gitFixture) agentTree(p gitPrivate, entries string) {
	f.t.Helper()
	var raw bytes.Buffer
	for line := range strings.Lines(entries) {
		what, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		parts := strings.Fields(what)
		id, err := hex.DecodeString(parts[2])
		must(f.t, err)
		raw.WriteString(strings.TrimPrefix(parts[0], "0") + " " + name + "\x00")
		raw.Write(id)
	}
	tree := f.loose(p, "tree", raw.String())
	commit := f.loose(p, "commit", "tree "+tree+"\nparent "+p.Host.Head.Commit+"\nauthor a <b> 1 +0000\ncommitter a <b> 1 +0000\n\nx\n")
	f.agentRef(p, commit)
}

// hugeDelta is a pack of one blob and a delta on it that says its result has 2^60 bytes.
func hugeDelta() []byte {
	var b bytes.Buffer
	b.WriteString("PACK\x00\x00\x00\x02\x00\x00\x00\x02")
	base := b.Len()
	b.WriteByte(3<<4 | 1) // a blob of one byte
	b.Write(looseBytes("x"))
	delta := binary.AppendUvarint(nil, 1)
	delta = binary.AppendUvarint(delta, 1<<60)
	delta = append(delta, 1, 'y')
	at := b.Len()
	b.WriteByte(byte(6<<4 | len(delta)))
	b.WriteByte(byte(at - base)) // offset delta
	b.Write(looseBytes(string(delta)))
	sum := sha1.Sum(b.Bytes())
	b.Write(sum[:])
	return b.Bytes()
}

// Names that a checkout would write into the host's .git, on this or another file
// system, and names that are only strange.
func TestGitNamesInTrees(t *testing.T) {
	for name, refused := range map[string]bool{
		".git": true, ".GIT": true, ".Git": true, "git~1": true, "GIT~1": true, ".git ": true, ".git.": true, ".git::$INDEX_ALLOCATION": true,
		".g\u200cit": true, "..": true, ".": true, "a/b": true, "": true, ".git\\x": true,
		"a\nb": false, "-x": false, "\xff": false, ".gitx": false, "git~2": false, "$(x)": false, strings.Repeat("x", 300): false,
	} {
		t.Run(fmt.Sprintf("%q", name), func(t *testing.T) {
			t.Parallel()
			f := newGitFixture(t)
			p := f.mustPrivate()
			blob := f.loose(p, "blob", "x")
			if name == "a\nb" {
				f.nameWithNewline(p, blob)
			} else {
				f.agentTree(p, "100644 blob "+blob+"\t"+name+"\n")
			}
			_, err := f.take(p)
			if refused {
				wantReason(t, err, gitBadObjects)
			}
			if refused && name != "" {
				// Control: plain git takes the commit when it is not told to look.
				f.host("-c", "fetch.fsckObjects=false", "fetch", "-q", p.Private(), "main:refs/heads/plain")
				f.host("update-ref", "-d", "refs/heads/plain")
				f.host("gc", "-q", "--prune=now")
			}
			if !refused && err != nil {
				t.Error(err)
			}
		})
	}
}

func (f *gitFixture) nameWithNewline(p gitPrivate, blob string) {
	id, err := hex.DecodeString(blob)
	must(f.t, err)
	tree := f.loose(p, "tree", "100644 a\nb\x00"+string(id))
	f.agentRef(p, f.loose(p, "commit", "tree "+tree+"\nparent "+p.Host.Head.Commit+"\nauthor a <b> 1 +0000\ncommitter a <b> 1 +0000\n\nx\n"))
}

// A .gitmodules that would have git run something: CVE-2018-17456, CVE-2018-11235.
func TestGitModulesFile(t *testing.T) {
	for _, content := range []string{"[submodule \"x\"]\npath = x\nurl = -u./payload\n", "[submodule \"../../x\"]\npath = x\nurl = ./y\n", "[submodule \"x\"]\npath = -x\nurl = ./y\n"} {
		f := newGitFixture(t)
		p := f.mustPrivate()
		f.agentTree(p, "100644 blob "+f.loose(p, "blob", content)+"\t.gitmodules\n")
		_, err := f.take(p)
		wantReason(t, err, gitBadObjects)
	}
	f := newGitFixture(t)
	p := f.mustPrivate()
	f.agentTree(p, "100644 blob "+f.loose(p, "blob", "[submodule \"x\"]\npath = x\nurl = ./y\n")+"\t.gitmodules\n")
	if _, err := f.take(p); err != nil {
		t.Errorf("control: %v", err)
	}
}

// An index that lies, bitmaps and graphs beside the agent's pack are not read.
func TestGitAgentsIndexIsNotRead(t *testing.T) {
	f := newGitFixture(t)
	p := f.mustPrivate()
	commit := f.agentCommits(p)
	f.agent(p, "repack", "-q", "-a", "-d", "-l")
	idx, _ := filepath.Glob(p.Private() + "/objects/pack/*.idx")
	must(t, os.Remove(idx[0]))
	f.put(idx[0], "a lie")
	for _, name := range []string{"pack/multi-pack-index", "info/commit-graph", strings.TrimPrefix(strings.TrimSuffix(idx[0], ".idx")+".bitmap", p.Private()+"/objects/")} {
		f.put(filepath.Join(p.Private(), "objects", name), "a lie")
	}
	if out, err := f.plain(f.work, "--git-dir="+p.Private(), "cat-file", "-p", commit); err == nil {
		t.Errorf("control: plain git reads the commit in spite of the index: %s", out)
	}
	got, err := f.take(p)
	if err != nil || got.Commit != commit {
		t.Errorf("got %+v, %v", got, err)
	}
}

// What stands in the way in the host's repository stays.
func TestGitNeverOverwrites(t *testing.T) {
	const ref = "refs/agentshim/0123456789abcdef"
	for name, c := range map[string]struct {
		change func(f *gitFixture)
		want   error
	}{
		"the reference, loose":         {func(f *gitFixture) { f.host("update-ref", ref, "main~1") }, gitRefTaken},
		"the reference, packed":        {func(f *gitFixture) { f.host("update-ref", ref, "main~1"); f.host("pack-refs", "--all") }, gitRefTaken},
		"a reference below it":         {func(f *gitFixture) { f.host("update-ref", ref+"/x", "main~1") }, gitRefTaken},
		"a reference below it, packed": {func(f *gitFixture) { f.host("update-ref", ref+"/x", "main~1"); f.host("pack-refs", "--all") }, gitRefTaken},
		"a reference in a folder's":    {func(f *gitFixture) { f.host("update-ref", "refs/agentshim", "main~1") }, gitRefTaken},
		"the same, packed":             {func(f *gitFixture) { f.host("update-ref", "refs/agentshim", "main~1"); f.host("pack-refs", "--all") }, gitRefTaken},
		"a lock":                       {func(f *gitFixture) { f.put(filepath.Join(f.work, ".git", ref+".lock"), "") }, gitRefTaken},
		"a link in the folder's place": {func(f *gitFixture) { must(f.t, os.Symlink(f.dir, filepath.Join(f.work, ".git/refs/agentshim"))) }, gitLink},
		"another repository in its place": {func(f *gitFixture) {
			must(f.t, os.Rename(filepath.Join(f.work, ".git"), filepath.Join(f.dir, "moved")))
			f.git(f.dir, "clone", "-q", "--bare", filepath.Join(f.dir, "moved"), filepath.Join(f.work, ".git"))
			f.host("config", "core.bare", "false")
		}, gitSwapped},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newGitFixture(t)
			p := f.mustPrivate()
			f.agentCommits(p)
			c.change(f)
			before := treeOf(t, filepath.Join(f.work, ".git"))
			_, err := f.take(p)
			if !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if got := onlyAdds(t, before, treeOf(t, filepath.Join(f.work, ".git"))); len(got) > 0 {
				t.Errorf("added %q", got)
			}
			_ = os.Remove(filepath.Join(f.work, ".git", ref+".lock"))
			if fi, err := os.Lstat(filepath.Join(f.work, ".git/refs/agentshim")); err == nil && fi.Mode()&os.ModeSymlink != 0 {
				must(t, os.Remove(filepath.Join(f.work, ".git/refs/agentshim")))
			}
		})
	}
}

// What the host's user does meanwhile stays, and the commits come all the same.
func TestGitConcurrentEdits(t *testing.T) {
	f := newGitFixture(t)
	p := f.mustPrivate()
	commit := f.agentCommits(p)
	f.write("README", "three\n")
	f.host("commit", "-q", "-a", "-m", "three")
	f.host("branch", "-D", "secret")
	f.write("staged", "x")
	f.host("add", "staged")
	f.host("gc", "-q", "--prune=now")
	before := treeOf(t, filepath.Join(f.work, ".git"))
	got, err := f.take(p)
	if err != nil || got.Commit != commit {
		t.Fatalf("got %+v, %v", got, err)
	}
	onlyAdds(t, before, treeOf(t, filepath.Join(f.work, ".git")))
	if out := f.host("status", "--porcelain"); out != "A  staged" {
		t.Errorf("status: %s", out)
	}
}

// The host's user dropped what the commits build on.
func TestGitHistoryGone(t *testing.T) {
	f := newGitFixture(t)
	p := f.mustPrivate()
	f.agentCommits(p)
	f.host("reset", "-q", "--hard", "HEAD~1")
	f.host("reflog", "expire", "--expire=now", "--all")
	f.host("gc", "-q", "--prune=now")
	before := treeOf(t, filepath.Join(f.work, ".git"))
	_, err := f.take(p)
	wantReason(t, err, gitHistoryGone)
	if got := onlyAdds(t, before, treeOf(t, filepath.Join(f.work, ".git"))); len(got) > 0 {
		t.Errorf("added %q", got)
	}
}

// Packing and collecting in a loop beside it loses nothing.
func TestGitBesideACollection(t *testing.T) {
	f := newGitFixture(t)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = f.plain(f.work, "repack", "-q", "-a", "-d") // it may find its own files gone
				_, _ = f.plain(f.work, "pack-refs", "--all", "--prune")
			}
		}
	}()
	for i := range 8 {
		p, err := f.private()
		if err != nil {
			t.Error(err)
			continue
		}
		f.agent(p, "commit", "-q", "--allow-empty", "-m", fmt.Sprint(i))
		got, err := f.take(p, func(o *gitTakeOptions) { o.Run = fmt.Sprint("run", i) })
		if err != nil {
			t.Error(err)
			continue
		}
		f.host("cat-file", "-e", got.Commit)
	}
	close(stop)
	<-stopped
	if out := f.host("for-each-ref", "refs/agentshim"); len(strings.Split(out, "\n")) != 8 {
		t.Errorf("references:\n%s", out)
	}
}

func TestGitRunNames(t *testing.T) {
	f := newGitFixture(t)
	p := f.mustPrivate()
	f.agentCommits(p)
	for _, run := range []string{"", "-x", "..", "../heads/main", "a/b", "a\nb", "a b", "x.lock", ".x"} {
		_, err := f.take(p, func(o *gitTakeOptions) { o.Run = run })
		wantReason(t, err, gitMalformed)
	}
}

func TestGitIsNotRunWithoutLimits(t *testing.T) {
	f := bareFixture(t)
	f.prog.Memory = 1 << 20
	must(t, makeShadow(filepath.Join(f.dir, "own/s"), nil))
	if _, err := f.prog.run(context.Background(), filepath.Join(f.dir, "own/s"), strings.Repeat("x", 64<<20), "hash-object", "--stdin"); err == nil {
		t.Error("git had more memory than its limit")
	}
	f.prog.Memory = 0
	_, err := f.prog.run(context.Background(), filepath.Join(f.dir, "own/s"), strings.Repeat("x", 64<<20), "hash-object", "--stdin")
	if err != nil {
		t.Errorf("control: %v", err)
	}
}
