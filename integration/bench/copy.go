package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/agentshim/agentshim/shim"
)

// The copy benchmark's tree: files of up to 8 KiB, 25 in a folder.
const (
	copyFiles     = 50_000
	copyPerFolder = 25
	copyFileMax   = 8 << 10
	copyChanged   = 500
)

// copyPart compares the private copy of a workspace with cp -r, and times what looks at
// its changes. No engine takes part.
func copyPart() error {
	dir, err := os.MkdirTemp("/var/tmp", "agentshim-bench-copy-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	src := filepath.Join(dir, "src")
	if err := makeCopySource(src); err != nil {
		return err
	}
	c := copyBench{dir: dir, src: src}
	for i := range *rounds + 1 { // the first one warms the cache
		if err := c.round(i); err != nil {
			return err
		}
	}
	fmt.Printf("copy of a workspace of %d files (%d interleaved rounds, median [quartiles] in ms)\n", copyFiles, *rounds)
	for k, name := range copyKinds {
		fmt.Printf("  %-38s %s  ratio to cp -r %.2f\n", name, spread(c.times[k]), float64(median(c.times[k]))/float64(median(c.times[0])))
	}
	return nil
}

var copyKinds = []string{"cp -r", "copy with its base, as a run makes it", "diff: nothing changed", fmt.Sprintf("diff: %d files changed", copyChanged), "apply: these", "discard: rm -r"}

type copyBench struct {
	dir, src string
	times    [6][]time.Duration
}

// round does each once, in turns, in folders of its own.
func (c *copyBench) round(i int) error {
	plain, own := filepath.Join(c.dir, "plain"), filepath.Join(c.dir, "own")
	steps := []func() error{
		func() error {
			return c.time(i, 0, func() error { return exec.Command("cp", "-r", c.src, plain).Run() })
		},
		func() error { return c.own(i, own) },
	}
	if i%2 == 1 {
		steps[0], steps[1] = steps[1], steps[0]
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return errors.Join(os.RemoveAll(plain), c.time(i, 5, func() error { return os.RemoveAll(own) }))
}

func (c *copyBench) time(i, kind int, f func() error) error {
	start := time.Now()
	err := f()
	if i > 0 {
		c.times[kind] = append(c.times[kind], time.Since(start))
	}
	return err
}

func (c *copyBench) own(i int, dir string) error {
	if err := os.MkdirAll(filepath.Join(dir, "tree"), 0o700); err != nil {
		return err
	}
	src, err1 := os.Open(c.src)
	dst, err2 := os.Open(filepath.Join(dir, "tree"))
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	defer src.Close()
	defer dst.Close()
	ctx := context.Background()
	var base shim.Base
	err := c.time(i, 1, func() (err error) {
		if base, _, err = shim.CopyTree(ctx, src, dst, shim.CopyOptions{}); err == nil {
			err = shim.WriteBase(filepath.Join(dir, "base"), base)
		}
		return err
	})
	var changes shim.Changes
	find := func() (err error) {
		changes, err = shim.FindChanges(ctx, base, dst, src, shim.ChangeRules{})
		return err
	}
	if err == nil {
		err = c.time(i, 2, find)
	}
	for n := 0; err == nil && n < copyChanged; n++ {
		err = os.WriteFile(copyPath(dst.Name(), n*(copyFiles/copyChanged)), fmt.Appendf(nil, "round %d", i), 0o644)
	}
	if err == nil {
		err = c.time(i, 3, find)
	}
	if err == nil && changes.Count(shim.VerdictApply) != copyChanged {
		err = fmt.Errorf("%d changes", changes.Count(shim.VerdictApply))
	}
	if err == nil {
		err = c.time(i, 4, func() error {
			_, err := shim.Apply(ctx, changes, dst, src, shim.ApplyOptions{})
			return err
		})
	}
	return err
}

func copyPath(dir string, n int) string {
	folder := n / copyPerFolder
	return filepath.Join(dir, fmt.Sprintf("d%d", folder/50), fmt.Sprintf("d%d", folder), fmt.Sprintf("f%d", n))
}

func makeCopySource(dir string) error {
	text := make([]byte, copyFileMax)
	for i := range text {
		text[i] = byte('a' + i%26)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for n := range copyFiles {
		p := copyPath(dir, n)
		if n%copyPerFolder == 0 {
			if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
				return err
			}
		}
		if err := os.WriteFile(p, text[:r.IntN(copyFileMax)], 0o644); err != nil {
			return err
		}
	}
	return nil
}
