package shim

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/agentshim/agentshim/mounts"
)

// ErrNoCache is returned for a name that no cache, or more than one, has.
var ErrNoCache = errors.New("no such cache")

// CacheInfo is one cache on an engine.
type CacheInfo struct {
	mounts.CacheID
	Volume string `json:"volume"`
	Engine string `json:"engine"`
	// Made is when its volume was made, Used when this user last used it; zero where
	// that is not known.
	Made time.Time `json:"made,omitzero"`
	Used time.Time `json:"used,omitzero"`
	// Bytes is what it holds, -1 where this user can't tell.
	Bytes int64 `json:"bytes"`
	// InUse says that a container has it mounted.
	InUse bool `json:"inUse"`
	// Kept says why a prune kept it; empty when it was removed, or would be.
	Kept string `json:"kept,omitempty"`
}

// cacheStore is a Store's view of one engine's caches.
type cacheStore struct {
	Store
	adapter Adapter
	uses    cacheUses
}

func (s Store) caches(ctx context.Context, engine string) (cacheStore, []CacheInfo, error) {
	o, err := s.folders.probeOptions()
	if err != nil {
		return cacheStore{}, nil, err
	}
	o.Engine, o.Getenv, o.Runner = engine, s.getenv, s.runner
	a, err := ProbeEngine(ctx, o)
	if err != nil {
		return cacheStore{}, nil, err
	}
	c := cacheStore{s, a, cacheUses{cache: openCache(s.folders.uses()), engine: a.Engine()}}
	list, err := c.list(ctx)
	return c, list, err
}

// Caches lists an engine's caches, by project and name, whoever's they are. Volumes that
// only look like one are left out.
func (s Store) Caches(ctx context.Context, engine string) ([]CacheInfo, error) {
	_, list, err := s.caches(ctx, engine)
	return list, err
}

func (c cacheStore) list(ctx context.Context) ([]CacheInfo, error) {
	have, err := cacheVolumes(ctx, c.adapter)
	if err != nil {
		return nil, err
	}
	usage, err := volumeUsage(ctx, c.adapter, have)
	if err != nil {
		return nil, err
	}
	var list []CacheInfo
	for name, v := range have {
		id, err := cacheOf(v)
		if err != nil {
			continue
		}
		list = append(list, CacheInfo{
			CacheID: id, Volume: name, Engine: c.adapter.Engine().Kind, Made: madeAt(v), Used: c.uses.last(v),
			Bytes: usage[name].bytes, InUse: usage[name].inUse,
		})
	}
	slices.SortFunc(list, func(a, b CacheInfo) int {
		return cmp.Or(cmp.Compare(a.Project, b.Project), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Key, b.Key), cmp.Compare(a.Volume, b.Volume))
	})
	return list, nil
}

// ShortID is what tells the cache apart in a list: the first digits of its volume's name.
func (c CacheInfo) ShortID() string { return c.digits()[:12] }

func (c CacheInfo) digits() string { return c.Volume[strings.LastIndexByte(c.Volume, '-')+1:] }

// RemoveCaches removes caches by their volumes' names or the first of its digits. One
// that a container has mounted is an error, the engine's own if it came between. It
// returns what was removed.
func (s Store) RemoveCaches(ctx context.Context, engine string, names []string) ([]CacheInfo, error) {
	c, list, err := s.caches(ctx, engine)
	if err != nil {
		return nil, err
	}
	var asked, removed []CacheInfo
	var errs []error
	for _, name := range names {
		info, err := findCache(list, name)
		errs = append(errs, err)
		if err == nil && !slices.Contains(asked, info) {
			asked = append(asked, info)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	for _, info := range asked {
		if err := c.remove(ctx, info); err != nil {
			return removed, err
		}
		removed = append(removed, info)
	}
	return removed, nil
}

func findCache(list []CacheInfo, name string) (CacheInfo, error) {
	var found []CacheInfo
	for _, info := range list {
		if info.Volume == name || len(name) >= 4 && strings.HasPrefix(info.digits(), name) {
			found = append(found, info)
		}
	}
	if len(found) != 1 {
		return CacheInfo{}, &Error{
			Reason: ReasonState, Msg: fmt.Sprintf("%q: %d caches have that name", name, len(found)), Err: ErrNoCache,
			Hint: "agentshim cache ls lists them; the digits in its first column name one",
		}
	}
	return found[0], nil
}

// remove never forces: the engine refuses to remove a volume that a container has.
func (c cacheStore) remove(ctx context.Context, info CacheInfo) error {
	if info.InUse {
		return &Error{
			Reason: ReasonState, Msg: fmt.Sprintf("cache %s (%s) is mounted in a container", info.ShortID(), info.Name),
			Hint: "wait for its run to end; agentshim prune removes what a lost run left",
		}
	}
	if _, err := c.adapter.Runner().Run(ctx, c.adapter.Command("volume", "rm", info.Volume)); err != nil {
		return engineFailed(err)
	}
	c.uses.forget(info.Volume)
	return nil
}

// PruneCaches removes this user's caches that no container has and that were not used
// for at least older; without a note of a use, since they were made. Caches whose agent
// has another uid and that this user's state folder does not know stay: on a shared
// engine they are another user's. With dryRun it only says what it would remove.
func (s Store) PruneCaches(ctx context.Context, engine string, older time.Duration, dryRun bool) ([]CacheInfo, error) {
	c, list, err := s.caches(ctx, engine)
	if err != nil {
		return nil, err
	}
	var errs []error
	for i := range list {
		list[i].Kept = keptBecause(list[i], uint32(os.Getuid()), older, time.Now())
		if list[i].Kept == "" && !dryRun {
			if err := c.remove(ctx, list[i]); err != nil {
				list[i].Kept = "it could not be removed"
				errs = append(errs, err)
			}
		}
	}
	return list, errors.Join(errs...)
}

func keptBecause(c CacheInfo, caller uint32, older time.Duration, now time.Time) string {
	last := c.Used
	if last.IsZero() {
		last = c.Made
	}
	switch {
	case c.InUse:
		return "a container has it"
	case c.Used.IsZero() && (caller == 0 || c.UID != caller):
		return "it is not known to be yours; rm removes it"
	case older > 0 && last.IsZero():
		return "its age is not known"
	case now.Sub(last) < older:
		return "it was used later than that"
	}
	return ""
}

// volumeUse is what an engine says of a volume's use.
type volumeUse struct {
	bytes int64
	inUse bool
}

// usageTimeout bounds a daemon that counts every file of its volumes.
const usageTimeout = 2 * time.Minute

func volumeUsage(ctx context.Context, a Adapter, of map[string]volume) (map[string]volumeUse, error) {
	if len(of) == 0 {
		return nil, nil
	}
	if d, ok := a.(*docker); ok {
		return d.volumeUsage(ctx)
	}
	out, err := runQuestion(ctx, a.Runner(), a.Command("volume", "ls", "--filter", "dangling=true", "--format", "json"))
	if err != nil {
		return nil, engineFailed(err)
	}
	var free []volume
	if err := json.Unmarshal(out.Stdout, &free); err != nil {
		return nil, &Error{Reason: ReasonEngineFailed, Msg: "podman volume ls", Err: err}
	}
	usage := map[string]volumeUse{}
	for name, v := range of {
		inUse := !slices.ContainsFunc(free, func(f volume) bool { return f.Name == name })
		usage[name] = volumeUse{bytes: folderSize(ctx, v.Mountpoint), inUse: inUse}
	}
	return usage, nil
}

func (d *docker) volumeUsage(ctx context.Context) (map[string]volumeUse, error) {
	client := *d.api.client
	client.Timeout = usageTimeout
	patient := dockerAPI{socket: d.api.socket, client: &client}
	var got struct {
		Volumes []struct {
			Name      string
			UsageData struct{ Size, RefCount int64 }
		}
	}
	if err := patient.get(ctx, "/system/df", &got); err != nil {
		return nil, err
	}
	usage := map[string]volumeUse{}
	for _, v := range got.Volumes {
		usage[v.Name] = volumeUse{bytes: v.UsageData.Size, inUse: v.UsageData.RefCount != 0}
	}
	return usage, nil
}

// folderSize is what the files below dir take on the disk, -1 where this user may not
// see all of them. The agent wrote them: no link is followed out of dir.
func folderSize(ctx context.Context, dir string) int64 {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return -1
	}
	defer root.Close()
	var sum int64
	err = fs.WalkDir(root.FS(), ".", func(_ string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed meanwhile
		}
		if err != nil || e.IsDir() {
			return cmp.Or(err, ctx.Err())
		}
		info, err := e.Info()
		if err != nil {
			return nil //nolint:nilerr // as above
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			sum += st.Blocks * 512
		}
		return nil
	})
	if err != nil {
		return -1
	}
	return sum
}
