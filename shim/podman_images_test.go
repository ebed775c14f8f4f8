package shim

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/spec"
)

// imageStore is a storage with one list of images.
func imageStore(t *testing.T) (ProbeOptions, podmanInfo, string) {
	t.Helper()
	root := t.TempDir()
	o := ProbeOptions{CacheDir: filepath.Join(t.TempDir(), "cache"), Getenv: func(string) string { return "" }, root: root}
	var info podmanInfo
	info.Store.GraphRoot, info.Store.GraphDriverName = "/graph", "overlay"
	list := filepath.Join(root, "graph/overlay-images/images.json")
	if err := os.MkdirAll(filepath.Dir(list), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, list, "[]", 0o600)
	return o, info, list
}

// TestImageCache: what Podman said is kept until its list of images is another one.
func TestImageCache(t *testing.T) {
	o, info, list := imageStore(t)
	var asked int
	inspect := func(ref string) spec.Image {
		t.Helper()
		runner := script(t, inspectCall(ref, podmanImageJSON, nil))
		p := podmanFor(runner)
		p.images = newImageCache(o, podmanKey(o, "/usr/bin/podman", nil), info)
		got, err := p.InspectImage(t.Context(), ref)
		if err != nil {
			t.Fatal(err)
		}
		asked += 1 - len(runner.calls)
		runner.calls = nil
		return got
	}
	same := func(want int) {
		t.Helper()
		if diff := cmp.Diff(wantImage, inspect(wantImage.Ref)); diff != "" {
			t.Error(diff)
		}
		if asked != want {
			t.Errorf("podman was asked %d times, not %d", asked, want)
		}
	}
	same(1)
	same(1)
	inspect("other:1")
	same(2)
	// A list that is replaced, as Podman does it, also by one of the same size and time.
	for range 2 {
		info, err := os.Stat(list)
		if err != nil {
			t.Fatal(err)
		}
		write(t, list+".new", "[]", 0o600)
		if err := os.Chtimes(list+".new", info.ModTime(), info.ModTime()); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(list+".new", list); err != nil {
			t.Fatal(err)
		}
		asked = 0
		same(1)
		same(1)
	}
	asked = 0
	if err := os.MkdirAll(filepath.Join(o.root, "etc/containers"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(o.root, "etc/containers/registries.conf"), "", 0o600)
	same(1)
	for i := range 2 * maxCachedImages {
		inspect(fmt.Sprintf("other:%d", i))
	}
	if c := newImageCache(o, podmanKey(o, "/usr/bin/podman", nil), info); len(c.all(c.key())) > maxCachedImages {
		t.Errorf("%d images are kept", len(c.all(c.key())))
	}
}

// TestImageCacheKeepsNothing where it could not see a change, and no missing image.
func TestImageCacheKeepsNothing(t *testing.T) {
	o, info, _ := imageStore(t)
	info.Store.GraphOptions = map[string]any{"overlay.imagestore": "/shared"}
	if c := newImageCache(o, podmanKey(o, "/usr/bin/podman", nil), info); c.key() != "" {
		t.Error("images of another storage are kept")
	}
	o, info, _ = imageStore(t)
	p := podmanFor(script(t,
		inspectCall("x", "[]", failedCall(125, "Error: x: image not known", "podman")),
		inspectCall("x", "[]", failedCall(125, "Error: x: image not known", "podman"))))
	p.images = newImageCache(o, podmanKey(o, "/usr/bin/podman", nil), info)
	for range 2 {
		if _, err := p.InspectImage(t.Context(), "x"); err == nil {
			t.Error("no error")
		}
	}
}
