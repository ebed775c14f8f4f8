package shim

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/spec"
)

// localDriver is the driver of every cache's volume.
const localDriver = "local"

// volume is what both engines say of one.
type volume struct {
	Name, Driver, Mountpoint string
	Labels, Options          map[string]string
}

// cacheVolumes lists the volumes that are named as caches are, by name. Whether they are
// agentshim's is cacheOf's to say.
func cacheVolumes(ctx context.Context, a Adapter) (map[string]volume, error) {
	all, err := volumes(ctx, a)
	if err != nil {
		return nil, err
	}
	named := map[string]volume{}
	for _, v := range all {
		if mounts.IsCacheVolume(v.Name) {
			named[v.Name] = v
		}
	}
	return named, nil
}

func volumes(ctx context.Context, a Adapter) ([]volume, error) {
	if d, ok := a.(*docker); ok {
		var got struct{ Volumes []volume }
		err := d.api.get(ctx, "/volumes", &got)
		return got.Volumes, err
	}
	out, err := runQuestion(ctx, a.Runner(), a.Command("volume", "ls", "--format", "json"))
	if err != nil {
		return nil, engineFailed(err)
	}
	var all []volume
	if err := json.Unmarshal(out.Stdout, &all); err != nil {
		return nil, &Error{Reason: ReasonEngineFailed, Msg: "podman volume ls", Err: err}
	}
	return all, nil
}

// cacheOf reads v as a cache. Whoever may use the engine can make a volume of any name,
// and by its driver or options it could be any folder of the host.
func cacheOf(v volume) (mounts.CacheID, error) {
	id, ok := mounts.ParseCache(v.Name, v.Labels)
	switch {
	case !ok:
		return id, fmt.Errorf("volume %q is not one of agentshim's: its labels don't say what its name does", v.Name)
	case v.Driver != localDriver:
		return id, fmt.Errorf("volume %q is not one of agentshim's: its driver is %q", v.Name, v.Driver)
	case len(v.Options) > 0:
		return id, fmt.Errorf("volume %q is not one of agentshim's: it has mount options", v.Name)
	}
	return id, nil
}

// setUpCaches makes the volumes of the run's caches, as far as they are missing, and
// gives each to the agent. Runs that do so at the same time don't disturb each other.
func (p *prepared) setUpCaches(ctx context.Context, run spec.RunPaths) error {
	if len(p.plan.Caches) == 0 {
		return nil
	}
	defer p.phases.done("caches")
	have, err := cacheVolumes(ctx, p.adapter)
	if err != nil {
		return err
	}
	for _, c := range p.plan.Caches {
		if err := p.setUpCache(ctx, run, c, have); err != nil {
			return err
		}
	}
	return nil
}

func (p *prepared) setUpCache(ctx context.Context, run spec.RunPaths, c mounts.Cache, have map[string]volume) error {
	v, ok := have[c.Volume]
	if !ok {
		var err error
		if v, err = p.makeVolume(ctx, run, c); err != nil {
			return err
		}
	}
	if _, err := cacheOf(v); err != nil {
		return &Error{Reason: ReasonMount, Msg: fmt.Sprintf("cache %q", c.ID.Name), Err: err, Hint: p.withoutVolume(c)}
	}
	uses := p.cacheUses()
	if !uses.given(v) {
		if err := p.giveVolume(ctx, run, c); err != nil {
			return err
		}
	}
	uses.note(v, time.Now())
	return nil
}

// makeVolume tolerates another run that made it first.
func (p *prepared) makeVolume(ctx context.Context, run spec.RunPaths, c mounts.Cache) (volume, error) {
	failed := p.adapter.makeVolume(ctx, p.plan, c, cacheMade{time.Now(), run.ID}.String())
	have, err := cacheVolumes(ctx, p.adapter)
	if err != nil {
		return volume{}, err
	}
	if v, ok := have[c.Volume]; ok {
		return v, nil
	}
	if failed == nil {
		failed = fmt.Errorf("volume %q is gone", c.Volume)
	}
	return volume{}, engineFailed(failed)
}

func (p *podman) makeVolume(ctx context.Context, plan spec.Plan, c mounts.Cache, made string) error {
	argv, err := plan.CacheVolumeArgv(c, made)
	if err != nil {
		return asError(err)
	}
	_, err = runQuestion(ctx, p.runner, p.Command(argv...))
	return err
}

// makeVolume: Docker keeps an existing volume of the name as it is. What is there has to
// be inspected on either engine: its driver's options could make it any folder of the host.
func (d *docker) makeVolume(ctx context.Context, _ spec.Plan, c mounts.Cache, made string) error {
	return d.api.post(ctx, "/volumes/create", nil, map[string]any{
		"Name": c.Volume, "Driver": localDriver, "Labels": spec.CacheVolumeLabels(c, made),
	})
}

func (p *prepared) giveVolume(ctx context.Context, run spec.RunPaths, c mounts.Cache) error {
	p.job.Log("cache %s: setting up volume %s", c.ID.Name, c.Volume)
	if err := p.adapter.giveVolume(ctx, p.plan, run, c); err != nil {
		failed := engineFailed(err)
		return &Error{
			Reason: ReasonOf(failed), Hint: cmp.Or(HintOf(failed), p.withoutVolume(c)), Err: err,
			Msg: fmt.Sprintf("cache %q: its volume %s can't be given to the agent", c.ID.Name, c.Volume),
		}
	}
	return nil
}

func (p *prepared) withoutVolume(c mounts.Cache) string {
	return fmt.Sprintf("if nobody needs what is in it: `%s volume rm %s`", p.plan.Engine.Kind, c.Volume)
}

// cacheMade is when and by which run a cache's volume was made: the value of
// mounts.LabelCacheMade.
type cacheMade struct {
	at  time.Time
	run string
}

func (m cacheMade) String() string { return m.at.UTC().Format(time.RFC3339) + " " + m.run }

// madeAt is zero where v does not say it.
func madeAt(v volume) time.Time {
	text, _, _ := strings.Cut(v.Labels[mounts.LabelCacheMade], " ")
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return time.Time{}
	}
	return at
}

// uses is the folder where this user's last uses of caches are noted.
func (f folders) uses() string { return filepath.Join(f.state, "cache") }

// cacheUses notes that a volume was given to the agent, and when it was last used by
// this user. A note that is lost costs a set-up container; one that is wrong is found
// out by the attestation, which looks at the volume's owner.
type cacheUses struct {
	cache  cache
	engine spec.Engine
}

func (u cacheUses) name(v volume) string { return u.engine.Kind + "-" + v.Name }

func (u cacheUses) key(v volume) string {
	return cacheKey(append([]string{"volume 1", u.engine.Socket, v.Mountpoint, v.Labels[mounts.LabelCacheMade]}, u.engine.Dirs...))
}

func (u cacheUses) given(v volume) bool { return !u.last(v).IsZero() }

// last is zero where this user's state knows of no use.
func (u cacheUses) last(v volume) time.Time {
	var at time.Time
	if v.Labels[mounts.LabelCacheMade] == "" || !u.cache.get(u.name(v), u.key(v), &at) {
		return time.Time{}
	}
	return at
}

func (u cacheUses) note(v volume, at time.Time) { u.cache.put(u.name(v), u.key(v), at.UTC()) }

// forget makes the next run set the volume up again.
func (u cacheUses) forget(name string) { u.cache.drop(u.name(volume{Name: name})) }

// cacheUses are this user's notes for the plan's engine.
func (p *prepared) cacheUses() cacheUses {
	return cacheUses{cache: openCache(p.folders.uses()), engine: p.plan.Engine}
}

// forgetCaches is for a container that was not as planned.
func (p *prepared) forgetCaches() {
	for _, c := range p.plan.Caches {
		p.cacheUses().forget(c.Volume)
	}
}
