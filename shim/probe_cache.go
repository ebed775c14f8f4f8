package shim

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// cache keeps one answer per name in a folder of the caller's own, each valid for
// exactly one key. It holds no secret and decides nothing that the attestation does
// not check again. The zero value caches nothing; so does a folder that another user
// could write to. No error of the cache is ever an error of the probe.
type cache struct{ dir string }

type cacheEntry struct {
	Key   string          `json:"key"`
	Value json.RawMessage `json:"value"`
}

const maxCacheFile = 256 << 10

// openCache makes dir where it is missing.
func openCache(dir string) cache {
	if !filepath.IsAbs(dir) {
		return cache{}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return cache{}
	}
	var st unix.Stat_t
	if unix.Lstat(dir, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR ||
		int(st.Uid) != os.Geteuid() || st.Mode&0o077 != 0 {
		return cache{}
	}
	return cache{dir: dir}
}

func (c cache) file(name string) string { return filepath.Join(c.dir, "probe-"+name+".json") }

// get fills value where the entry is there and was made with key.
func (c cache) get(name, key string, value any) bool {
	if c.dir == "" {
		return false
	}
	f, err := os.OpenFile(c.file(name), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxCacheFile))
	if err != nil {
		return false
	}
	var entry cacheEntry
	return json.Unmarshal(data, &entry) == nil && entry.Key == key && json.Unmarshal(entry.Value, value) == nil
}

// put replaces the entry as a whole, or leaves it as it is.
func (c cache) put(name, key string, value any) {
	if c.dir == "" {
		return
	}
	raw, err := json.Marshal(value)
	if err != nil {
		return
	}
	data, err := json.Marshal(cacheEntry{Key: key, Value: raw})
	if err != nil {
		return
	}
	tmp, err := os.CreateTemp(c.dir, ".probe-*") // 0600
	if err != nil {
		return
	}
	_, err = tmp.Write(data)
	if closeErr := tmp.Close(); err != nil || closeErr != nil || os.Rename(tmp.Name(), c.file(name)) != nil {
		os.Remove(tmp.Name())
	}
}

// drop removes the entry, if there is one.
func (c cache) drop(name string) {
	if c.dir != "" {
		os.Remove(c.file(name))
	}
}

// identity names the state of a file: two equal ones were not replaced or changed in
// between, as far as the file system's clock tells. A missing file has one too.
func identity(path string) string {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fmt.Sprintf("%s %v", path, err)
	}
	return fmt.Sprintf("%s %d %d %d.%d %d.%d %d", path, st.Dev, st.Ino, st.Mtim.Sec, st.Mtim.Nsec, st.Ctim.Sec, st.Ctim.Nsec, st.Size)
}

// cacheKey is the digest of parts.
func cacheKey(parts []string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d %s\n", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil))
}
