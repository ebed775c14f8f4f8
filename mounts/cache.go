package mounts

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/agentshim/agentshim/harness"
)

// Labels of a cache's volume. A label alone proves nothing: ParseCache compares them
// with the volume's name, which is made of all they say.
const (
	// LabelCache holds the version of this layout; volumes are listed by it.
	LabelCache = "agentshim.cache"
	// LabelCacheMade tells two volumes of one name apart: see CacheMade.
	LabelCacheMade = "agentshim.cache.made"

	labelCacheProject = "agentshim.cache.project"
	labelCacheImage   = "agentshim.cache.image"
	labelCacheUser    = "agentshim.cache.user"
	labelCacheName    = "agentshim.cache.name"
	labelCacheKey     = "agentshim.cache.key"

	cacheVersion = "1"
	cachePrefix  = "agentshim-cache-"
)

// maxCaches bounds the caches of one run.
const maxCaches = 64

// Names and keys go into labels and are typed in commands: no blank, no slash, no
// leading dash or dot.
var (
	cacheNameForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)
	cacheKeyForm  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:+=@-]{0,127}$`)
)

// CacheOwner is what the caches of one run have in common.
type CacheOwner struct {
	// Project is the real path of the project's folder on the host.
	Project string `json:"project"`
	// ImageID is the image's ID, never a tag.
	ImageID string `json:"imageId"`
	// UID and GID are the agent's.
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
}

// CacheID identifies one cache. Two that differ in any field are two volumes.
type CacheID struct {
	CacheOwner
	// Name is the harness file's, Key what tells caches of one name apart, or empty.
	Name string `json:"name"`
	Key  string `json:"key,omitempty"`
}

// Volume is the name of the engine's volume: stable, 80 bytes of [a-z0-9-], and
// different for different IDs as far as SHA-256 is.
func (id CacheID) Volume() string {
	sum := sha256.New()
	user := strconv.FormatUint(uint64(id.UID), 10) + ":" + strconv.FormatUint(uint64(id.GID), 10)
	for _, field := range []string{"agentshim cache " + cacheVersion, id.Project, id.ImageID, user, id.Name, id.Key} {
		// With its length before it, no field can run into the next.
		var size [8]byte
		binary.BigEndian.PutUint64(size[:], uint64(len(field)))
		sum.Write(size[:])
		sum.Write([]byte(field))
	}
	return cachePrefix + hex.EncodeToString(sum.Sum(nil))
}

// Labels are the volume's labels. They hold what Volume is made of, which the harness
// file and the mounts of a container show too, and nothing secret. The project's path
// is quoted as a Go string, so that any path is one line of UTF-8.
func (id CacheID) Labels() map[string]string {
	return map[string]string{
		LabelCache:        cacheVersion,
		labelCacheProject: strconv.QuoteToASCII(id.Project),
		labelCacheImage:   id.ImageID,
		labelCacheUser:    strconv.FormatUint(uint64(id.UID), 10) + ":" + strconv.FormatUint(uint64(id.GID), 10),
		labelCacheName:    id.Name,
		labelCacheKey:     id.Key,
	}
}

// ParseCache reads a volume's labels back. It is false where the volume is none of
// agentshim's: its labels are incomplete, or its name is not the one that they make.
// It does not prove who made the volume: whoever may use the engine can make one of
// any name, so its driver and options have to be looked at before it is mounted.
func ParseCache(volume string, labels map[string]string) (CacheID, bool) {
	if !IsCacheVolume(volume) || labels[LabelCache] != cacheVersion {
		return CacheID{}, false
	}
	project, err := strconv.Unquote(labels[labelCacheProject])
	if err != nil {
		return CacheID{}, false
	}
	user, group, _ := strings.Cut(labels[labelCacheUser], ":")
	uid, err := strconv.ParseUint(user, 10, 32)
	if err != nil {
		return CacheID{}, false
	}
	gid, err := strconv.ParseUint(group, 10, 32)
	if err != nil {
		return CacheID{}, false
	}
	id := CacheID{
		CacheOwner: CacheOwner{Project: project, ImageID: labels[labelCacheImage], UID: uint32(uid), GID: uint32(gid)},
		Name:       labels[labelCacheName], Key: labels[labelCacheKey],
	}
	if cacheProblem("", id.Name, id.Key) != nil || id.Volume() != volume {
		return CacheID{}, false
	}
	return id, true
}

// IsCacheVolume says that name has the form of a cache's volume.
func IsCacheVolume(name string) bool {
	sum, ok := strings.CutPrefix(name, cachePrefix)
	return ok && len(sum) == 2*sha256.Size && strings.Trim(sum, "0123456789abcdef") == ""
}

// Cache is one cache of a run, decided.
type Cache struct {
	ID     CacheID `json:"id"`
	Volume string  `json:"volume"`
	// Target is absolute and clean.
	Target string `json:"target"`
}

// caches decides h's caches, in the order of their targets. Every refusal is reported,
// but for those of the targets, which Compile judges as it does every mount's.
func caches(h harness.Harness, f Facts, t Target) ([]Cache, problems) {
	if len(h.Caches) == 0 {
		return nil, nil
	}
	var ps problems
	if len(h.Caches) > maxCaches {
		ps.add(refuse("$.caches", fmt.Sprint(len(h.Caches)), fmt.Sprintf("at most %d caches", maxCaches), "put several into one"))
	}
	owner := CacheOwner{Project: CacheProject(h, f), ImageID: t.ImageID, UID: t.UID, GID: t.GID}
	var out []Cache
	for i, b := range cacheBinds(h) {
		c := h.Caches[i]
		ps.add(cacheProblem(b.json, c.Name, c.Key))
		ps.add(cacheTwice(b, i, h))
		id := CacheID{CacheOwner: owner, Name: c.Name, Key: c.Key}
		out = append(out, Cache{ID: id, Volume: id.Volume(), Target: b.target})
	}
	slices.SortFunc(out, func(a, b Cache) int { return strings.Compare(a.Target, b.Target) })
	return out, ps
}

// mount is the cache as a mount of the container. Docker's --mount has no nosuid and
// nodev for volumes either.
func (c Cache) mount(t Target) Mount {
	m := bindMount(bind{target: c.Target, writable: true, why: WhyCache}, Source{Path: c.Volume}, t)
	m.Type, m.UID, m.GID = TypeVolume, c.ID.UID, c.ID.GID
	return m
}

func cacheBinds(h harness.Harness) []bind {
	workspace := ""
	if w := h.Workspace; h.HasWorkspace() {
		// A workspace whose own target is unusable is reported by Compile.
		workspace, _ = resolveTarget(cmpOr(w.Target, defaultWorkspace), "")
	}
	var all []bind
	for i, c := range h.Caches {
		b := bind{json: fmt.Sprintf("$.caches[%d]", i), rawTarget: c.Target, writable: true, why: WhyCache}
		b.target, b.targetErr = resolveTarget(c.Target, workspace)
		all = append(all, b)
	}
	return all
}

func cacheProblem(at, name, key string) *Problem {
	switch {
	case !cacheNameForm.MatchString(name):
		return refuse(at+".name", name, "it is no name for a cache", "use letters, digits, dot, dash and underscore, a letter or digit first, at most 64")
	case key != "" && !cacheKeyForm.MatchString(key):
		return refuse(at+".key", key, "it is no key for a cache", "use letters, digits and . _ : + = @ -, a letter or digit first, at most 128")
	}
	return nil
}

// cacheTwice refuses one volume on two targets.
func cacheTwice(b bind, index int, h harness.Harness) *Problem {
	c := h.Caches[index]
	for i, o := range h.Caches {
		if i != index && o.Name == c.Name && o.Key == c.Key {
			return refuse(b.json+".name", c.Name, fmt.Sprintf("$.caches[%d] is the same cache", i), "give each its own name or key")
		}
	}
	return nil
}

// CacheProject is what keys the caches of h: the workspace's real path, else the
// folder of the harness file.
func CacheProject(h harness.Harness, f Facts) string {
	if s, ok := Workspace(h, f); ok {
		return s.Path
	}
	return path.Clean(h.Dir)
}
