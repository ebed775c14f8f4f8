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
	Project string
	// ImageID is the image's ID, never a tag.
	ImageID string
	// UID and GID are the agent's.
	UID, GID uint32
}

// CacheID identifies one cache. Two that differ in any field are two volumes.
type CacheID struct {
	CacheOwner
	// Name is the harness file's, Key what tells caches of one name apart, or empty.
	Name, Key string
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
	ID     CacheID
	Volume string
	// Target is absolute and clean.
	Target string
}

// Caches decides h's caches, in the order of their targets. others are the container's
// mounts but for the caches. It is pure. Every refusal is reported at once, each a
// *Problem that is ErrRefused, and whether there is one does not depend on the order
// of the entries: everyone who shares a target is named.
//
// It guarantees that no two mounts meet on one target and that none lies in a cache,
// where an engine would leave a folder of root's for good. That a target below a bind
// or a tmpfs exists or can be made is Compile's rule for every mount, not checked here.
func Caches(h harness.Harness, owner CacheOwner, others []Mount, t Target) ([]Cache, error) {
	var ps problems
	asked := cacheBinds(h)
	if len(asked) > maxCaches {
		return nil, refuse("$.caches", fmt.Sprint(len(asked)), fmt.Sprintf("at most %d caches", maxCaches), "put several into one")
	}
	var out []Cache
	for i, b := range asked {
		c := h.Caches[i]
		ps.add(cacheProblem(b.json, c.Name, c.Key))
		ps.add(targetProblem(b, nil, tmpfsOf(others), t))
		ps.add(cacheCollision(b, i, asked, others))
		ps.add(cacheTwice(b, i, h))
		id := CacheID{CacheOwner: owner, Name: c.Name, Key: c.Key}
		out = append(out, Cache{ID: id, Volume: id.Volume(), Target: b.target})
	}
	if err := ps.join(); err != nil {
		return nil, err
	}
	slices.SortFunc(out, func(a, b Cache) int { return strings.Compare(a.Target, b.Target) })
	return out, nil
}

func cacheBinds(h harness.Harness) []bind {
	workspace := ""
	if w := h.Workspace; h.HasWorkspace() {
		// A workspace whose own target is unusable is reported by Compile.
		workspace, _ = resolveTarget(cmpOr(w.Target, defaultWorkspace), "")
	}
	var all []bind
	for i, c := range h.Caches {
		b := bind{json: fmt.Sprintf("$.caches[%d]", i), rawTarget: c.Target, writable: true}
		b.target, b.targetErr = resolveTarget(c.Target, workspace)
		all = append(all, b)
	}
	return all
}

func tmpfsOf(all []Mount) (out []Mount) {
	for _, m := range all {
		if m.Type == TypeTmpfs {
			out = append(out, m)
		}
	}
	return out
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

// cacheCollision names everything that b meets: on its target, or below it.
func cacheCollision(b bind, index int, asked []bind, others []Mount) *Problem {
	if b.targetErr != nil {
		return nil // targetProblem reports it
	}
	var same, inside []string
	meet := func(target, name string) {
		switch {
		case target == b.target:
			same = append(same, name)
		case below(target, b.target):
			inside = append(inside, name)
		}
	}
	for i, o := range asked {
		if i != index && o.targetErr == nil {
			meet(o.target, o.json)
		}
	}
	for _, m := range others {
		if m.Type != TypeTmpfs { // tmpfsCollision's
			meet(m.Target, fmt.Sprintf("the %s on %s", m.Why, quote(m.Target)))
		}
	}
	switch {
	case len(same) > 0:
		return refuse(b.json+".target", b.target, "it is also the target of "+strings.Join(same, ", "), "give each its own target")
	case len(inside) > 0:
		return refuse(b.json+".target", b.target, "in it lie the targets of "+strings.Join(inside, ", ")+", and the engine would leave folders of root's in the cache",
			"choose targets beside each other")
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
