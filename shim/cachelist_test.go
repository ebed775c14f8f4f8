package shim

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentshim/agentshim/mounts"
)

func TestFindCache(t *testing.T) {
	info := func(digits string) CacheInfo {
		return CacheInfo{Volume: "agentshim-cache-" + digits + strings.Repeat("0", 64-len(digits))}
	}
	list := []CacheInfo{info("abcd1"), info("abcd2"), info("ffff")}
	for name, want := range map[string]int{"abcd1": 0, "abcd2": 1, list[2].Volume: 2, list[1].ShortID(): 1} {
		if got, err := findCache(list, name); err != nil || got.Volume != list[want].Volume {
			t.Errorf("%q: %s %v", name, got.Volume, err)
		}
	}
	for _, name := range []string{"", "abcd", "fff", "ABCD1", "agentshim-cache-ffff", "-", "x"} {
		if _, err := findCache(list, name); !errors.Is(err, ErrNoCache) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestKeptBecause(t *testing.T) {
	now := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	ago := func(days int) time.Time { return now.AddDate(0, 0, -days) }
	const day = 24 * time.Hour
	owner := mounts.CacheID{CacheOwner: mounts.CacheOwner{UID: 1000}}
	for name, c := range map[string]struct {
		info   CacheInfo
		caller uint32
		older  time.Duration
		kept   bool
	}{
		"own":                   {CacheInfo{CacheID: owner, Made: ago(9)}, 1000, 0, false},
		"in use":                {CacheInfo{CacheID: owner, Made: ago(9), InUse: true}, 1000, 0, true},
		"another's":             {CacheInfo{CacheID: owner, Made: ago(9)}, 1001, 0, true},
		"another's, root calls": {CacheInfo{CacheID: owner, Made: ago(9)}, 0, 0, true},
		"root's agent":          {CacheInfo{Made: ago(9)}, 0, 0, true},
		"used by the caller":    {CacheInfo{CacheID: owner, Made: ago(9), Used: ago(8)}, 0, 0, false},
		"old":                   {CacheInfo{CacheID: owner, Made: ago(9)}, 1000, 7 * day, false},
		"old, used lately":      {CacheInfo{CacheID: owner, Made: ago(9), Used: ago(1)}, 1000, 7 * day, true},
		"young":                 {CacheInfo{CacheID: owner, Made: ago(6)}, 1000, 7 * day, true},
		"of no known age":       {CacheInfo{CacheID: owner}, 1000, 7 * day, true},
	} {
		if got := keptBecause(c.info, c.caller, c.older, now); (got != "") != c.kept {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// TestFolderSize: what is counted lies in the folder, whatever its links say.
func TestFolderSize(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	for _, p := range []string{filepath.Join(dir, "a/b"), filepath.Join(outside, "large")} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, make([]byte, 1<<20), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(outside, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if got := folderSize(t.Context(), dir); got < 1<<20 || got >= 2<<20 {
		t.Errorf("%d bytes", got)
	}
	if got := folderSize(t.Context(), filepath.Join(dir, "none")); got != -1 {
		t.Errorf("a missing folder holds %d bytes", got)
	}
}
