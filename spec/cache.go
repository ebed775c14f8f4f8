package spec

import (
	"strconv"

	"github.com/agentshim/agentshim/mounts"
)

// Fixed names of the container that gives a fresh cache to the agent. Its program is
// init with another argument, so that prune knows it by its entrypoint.
const (
	// CachePath is where it has the volume.
	CachePath = "/.agentshim-cache"
	// CacheArg is its first argument; CachePath, uid and gid follow.
	CacheArg = "cache/1"
)

// VolumesDir stands for the engine's folder of volumes where a plan is only shown.
const VolumesDir = "/ENGINE_VOLUMES"

// VolumeRoot is where both engines keep what a volume of the local driver holds, in
// their folder of volumes.
func VolumeRoot(name string) string { return name + "/_data" }

// CacheName is the name of the container that sets c up.
func (r RunPaths) CacheName(c mounts.Cache) string {
	return "agentshim-" + r.ID + "-cache-" + c.Volume[max(0, len(c.Volume)-8):]
}

// CacheVolumeArgv is the argument list of the engine's client that makes c's volume,
// with its labels; made is that of mounts.LabelCacheMade. Docker keeps an existing
// volume of the name as it is, Podman refuses: what is there has to be inspected either
// way, since its driver's options could make it any folder of the host.
func (p Plan) CacheVolumeArgv(c mounts.Cache, made string) ([]string, error) {
	var a argv
	a.add("volume", "create")
	labels := c.ID.Labels()
	labels[mounts.LabelCacheMade] = made
	for _, k := range sortedKeys(labels) {
		label := k + "=" + labels[k]
		if p.Engine.Kind == Podman {
			// Here, unlike with run, its --label is a CSV record (Podman 4.3).
			if label, a.err = mounts.CSV(label); a.err != nil {
				return nil, a.err
			}
		}
		a.flag("label", label)
	}
	a.add("--", c.Volume)
	return a.args, nil
}

// CacheArgv is the argument list of the engine's client for the one-shot container
// that gives c's volume to the agent, as Argv's is for the run's own: no network, no
// capability but CHOWN, nothing of the host but init, nothing writable but the volume
// (and, with Docker, empty ones for the image's VOLUMEs, which go with it). It runs from the run's own image, of which it uses nothing, in the user namespace of
// the run's kind, so that the owner is the same one seen from both.
func (p Plan) CacheArgv(run RunPaths, c mounts.Cache) ([]string, error) {
	a := argv{plan: p, run: run, podman: p.Engine.Kind == Podman}
	a.global()
	a.add("run", "--rm", "--sig-proxy=false", "--init=false", "--pull=never",
		"--log-driver=none", "--no-healthcheck", "--stop-signal=SIGKILL")
	a.flag("name", run.CacheName(c))
	a.flag("label", LabelHelper+"="+CacheArg)
	a.flag("label", LabelRun+"="+run.ID)
	a.flag("network", "none")
	a.flag("hostname", Hostname)
	a.flag("ipc", "private")
	a.flag("cgroupns", "private")
	a.flag("user", "0:0")
	if p.Identity.Userns != "" {
		a.flag("userns", p.Identity.Userns)
	}
	a.flag("cap-drop", "ALL")
	a.flag("cap-add", "CHOWN")
	a.flag("security-opt", "no-new-privileges")
	a.add("--read-only")
	if a.podman {
		a.add("--unsetenv-all", "--http-proxy=false", "--image-volume=ignore", "--passwd=false", "--no-hosts",
			"--read-only-tmpfs=false", "--systemd=false", "--umask=0022")
	}
	a.helperLimits()
	if a.podman {
		// Podman's defaults need CAP_SYS_RESOURCE where they are above the caller's.
		a.ulimit("nofile", p.Limits.NoFile)
		a.ulimit("nproc", p.Limits.NProc)
	}
	a.environment()
	a.volume(c.Volume, CachePath)
	a.bind(a.ownBind(run.Init, InitPath))
	a.flag("workdir", "/")
	a.flag("entrypoint", InitPath)
	a.add("--", p.Image.ID, CacheArg, CachePath,
		strconv.FormatUint(uint64(c.ID.UID), 10), strconv.FormatUint(uint64(c.ID.GID), 10))
	return a.args, a.err
}

// volume mounts an engine's volume. Docker would fill an empty one with the image's
// files, and give it their owner: volume-nocopy. Podman's --mount has no such word;
// there it happens on a volume's first use only, on a path that no image has.
func (a *argv) volume(name, target string) {
	fields := []string{"type=volume", "source=" + name, "target=" + target}
	if a.podman {
		fields = append(fields, "nosuid", "nodev")
	} else {
		fields = append(fields, "volume-nocopy")
	}
	record, err := mounts.CSV(fields...)
	if err != nil {
		a.err = err
		return
	}
	a.flag("mount", record)
}

// cacheLabel is a cache's name with its key.
func cacheLabel(id mounts.CacheID) string {
	if id.Key == "" {
		return id.Name
	}
	return id.Name + "/" + id.Key
}
