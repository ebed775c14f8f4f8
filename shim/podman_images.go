package shim

import (
	"path/filepath"
	"strings"

	"github.com/agentshim/agentshim/spec"
)

// imageCache keeps what Podman said of images for as long as its list of images and
// the configuration that names are looked up by stay the same: a start of its client
// takes longer than all the rest of a probe. The zero value keeps nothing.
type imageCache struct {
	store cache
	parts []string
	// list is the storage's list of images, which Podman replaces as a whole.
	list string
}

const maxCachedImages = 64

// cachedImage is with the variables that a plan leaves out.
type cachedImage struct {
	spec.Image
	Variables []string
}

// newImageCache takes podmanKey's key for the configuration. It keeps nothing where images may also come from another storage, whose
// list is elsewhere.
func newImageCache(o ProbeOptions, key string, info podmanInfo) imageCache {
	store := info.Store
	if store.GraphRoot == "" || store.GraphDriverName == "" {
		return imageCache{}
	}
	for name := range store.GraphOptions {
		if strings.Contains(strings.ToLower(name), "imagestore") {
			return imageCache{}
		}
	}
	c := imageCache{
		store: openCache(o.CacheDir), parts: []string{"images 1", key},
		list: o.path(filepath.Join(store.GraphRoot, store.GraphDriverName+"-images", "images.json")),
	}
	for _, dir := range []string{"/var/cache", o.Getenv("XDG_CACHE_HOME"), filepath.Join(o.home(), ".cache")} {
		c.parts = append(c.parts, identity(o.path(filepath.Join(dir, "containers", "short-name-aliases.conf"))))
	}
	return c
}

// key stands for everything that an image's name is looked up by; empty for nothing.
func (c imageCache) key() string {
	if c.list == "" {
		return ""
	}
	return cacheKey(append(c.parts[:len(c.parts):len(c.parts)], identity(c.list)))
}

func (c imageCache) get(key, ref string) (spec.Image, bool) {
	known, ok := c.all(key)[ref]
	image := known.Image
	image.Env = known.Variables
	return image, ok && image.Ref == ref && idForm.MatchString(strings.TrimPrefix(image.ID, "sha256:"))
}

func (c imageCache) all(key string) map[string]cachedImage {
	var known map[string]cachedImage
	if key == "" || !c.store.get("images", key, &known) {
		return nil
	}
	return known
}

// put forgets the others when there are too many.
func (c imageCache) put(key string, image spec.Image) {
	if key == "" {
		return
	}
	known := map[string]cachedImage{image.Ref: {Image: image, Variables: image.Env}}
	if others := c.all(key); len(others) < maxCachedImages {
		for ref, other := range others {
			if ref != image.Ref {
				known[ref] = other
			}
		}
	}
	c.store.put("images", key, known)
}
