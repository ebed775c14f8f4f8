package shim

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// benchFiles is how many files the repository has; each of its twenty commits
// changes a thousand.
const benchFiles = 50_000

// BenchmarkGitPrivate compares a private repository of 50,000 files, and taking one
// commit back, with what git does; -benchtime=3x is enough.
func BenchmarkGitPrivate(b *testing.B) {
	for _, form := range []string{"packed", "loose"} {
		b.Run(form, func(b *testing.B) {
			f := benchFixture(b, form)
			b.Run("private", func(b *testing.B) {
				for b.Loop() {
					p, err := f.private()
					if err != nil {
						b.Fatal(err)
					}
					b.StopTimer()
					_ = os.RemoveAll(p.Dir)
					b.StartTimer()
				}
			})
			b.Run("clone", func(b *testing.B) { f.benchClone(b, "file://"+f.work) })
			b.Run("clone-local", func(b *testing.B) { f.benchClone(b, f.work) })
			b.Run("take", func(b *testing.B) {
				p, err := f.private()
				if err != nil {
					b.Fatal(err)
				}
				f.agent(p, "commit", "-q", "--allow-empty", "-m", "x")
				n := 0
				for b.Loop() {
					n++
					if _, err := f.take(p, func(o *gitTakeOptions) { o.Run = fmt.Sprint("run", b.N, "-", n) }); err != nil {
						b.Fatal(err)
					}
				}
			})
		})
	}
}

func (f *gitFixture) benchClone(b *testing.B, url string) {
	to := filepath.Join(f.dir, "clone")
	for b.Loop() {
		f.git(f.dir, "clone", "-q", "--no-checkout", "--single-branch", "--branch=main", url, to)
		f.git(to, "read-tree", "HEAD")
		b.StopTimer()
		_ = os.RemoveAll(to)
		b.StartTimer()
	}
}

func benchFixture(b *testing.B, form string) *gitFixture {
	f := bareFixture(b)
	f.host("init", "-q", "-b", "main", ".")
	var in strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&in, format+"\n", args...) }
	for c := range 20 {
		line("commit refs/heads/main\ncommitter a <b> %d +0000\ndata 1\nx", c)
		for i := range benchFiles {
			if c == 0 || i%50 == c {
				text := strings.Repeat(fmt.Sprintf("file %d of commit %d\n", i, c), 20)
				line("M 100644 inline d%d/e%d/f%d\ndata %d\n%s", i/2500, i/50%50, i, len(text), text)
			}
		}
	}
	if out, err := f.withInput(in.String(), f.work, "-c", "fastimport.unpackLimit=0", "fast-import", "--quiet"); err != nil {
		b.Fatal(err, out)
	}
	if form == "loose" {
		packs, _ := filepath.Glob(filepath.Join(f.work, ".git/objects/pack/*.pack"))
		moved := filepath.Join(f.dir, "moved.pack")
		must(b, os.Rename(packs[0], moved))
		must(b, os.RemoveAll(filepath.Join(f.work, ".git/objects/pack")))
		pack, err := os.ReadFile(moved)
		must(b, err)
		if out, err := f.withInput(string(pack), f.work, "unpack-objects", "-q"); err != nil {
			b.Fatal(err, out)
		}
	}
	return f
}
