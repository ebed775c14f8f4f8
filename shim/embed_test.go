package shim

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
)

// TestUnpackBesideForks: a program can be started as soon as it is unpacked, whatever else
// is started at the same time.
func TestUnpackBesideForks(t *testing.T) {
	done := make(chan struct{})
	var forks sync.WaitGroup
	for range 4 {
		forks.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
					_ = exec.Command("/bin/true").Run()
				}
			}
		})
	}
	defer forks.Wait()
	defer close(done)
	dir := t.TempDir()
	for i := range 40 {
		path := filepath.Join(dir, fmt.Sprint(i))
		if err := unpackHelper(path); err != nil {
			t.Fatal(err)
		}
		if err := exec.Command(path).Run(); errors.Is(err, syscall.ETXTBSY) {
			t.Fatalf("start %d: %v", i, err)
		}
	}
}
