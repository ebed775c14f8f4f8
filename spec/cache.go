package spec

import (
	"errors"
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

// CacheVolumeLabels are the labels that make a volume c's; made is that of
// mounts.LabelCacheMade.
func CacheVolumeLabels(c mounts.Cache, made string) map[string]string {
	labels := c.ID.Labels()
	labels[mounts.LabelCacheMade] = made
	return labels
}

// CacheVolumeArgv is the argument list of Podman's client that makes c's volume. It
// refuses where one of the name exists.
func (p Plan) CacheVolumeArgv(c mounts.Cache, made string) ([]string, error) {
	var a argv
	a.add("volume", "create")
	labels := CacheVolumeLabels(c, made)
	for _, k := range sortedKeys(labels) {
		// Here, unlike with run, --label is a CSV record (Podman 4.3).
		label, err := mounts.CSV(k + "=" + labels[k])
		if err != nil {
			return nil, err
		}
		a.flag("label", label)
	}
	a.add("--", c.Volume)
	return a.args, nil
}

// cacheProgram is what runs in the one-shot container that gives c's volume to the agent.
func cacheProgram(c mounts.Cache) []string {
	return []string{
		CacheArg, CachePath,
		strconv.FormatUint(uint64(c.ID.UID), 10), strconv.FormatUint(uint64(c.ID.GID), 10),
	}
}

// CacheArgv is the argument list of Podman's client for the one-shot container that gives
// c's volume to the agent, as PodmanArgv's is for the run's own: no network, no
// capability but CHOWN, nothing of the host but init, nothing writable but the volume.
// It runs from the run's own image, of which it uses nothing, in the user namespace of
// the run's kind, so that the owner is the same one seen from both.
func (p Plan) CacheArgv(run RunPaths, c mounts.Cache) ([]string, error) {
	a := argv{plan: p, run: run}
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
	a.ownDefaults()
	a.helperLimits()
	// Podman's defaults need CAP_SYS_RESOURCE where they are above the caller's.
	a.ulimit("nofile", p.Limits.NoFile)
	a.ulimit("nproc", p.Limits.NProc)
	a.environment()
	a.volume(c.Volume, CachePath)
	a.bind(a.ownBind(run.Init, InitPath))
	a.flag("workdir", "/")
	a.flag("entrypoint", InitPath)
	a.add("--", p.Image.ID)
	a.add(cacheProgram(c)...)
	return a.args, a.err
}

// CacheContainer is the same for Docker. Writable are also empty volumes for the image's
// VOLUMEs, which go with it. The system call policy is the run's own.
func (p Plan) CacheContainer(run RunPaths, c mounts.Cache) (DockerContainer, error) {
	d := p.dockerBase(Hostname, "0:0", append([]string{InitPath}, cacheProgram(c)...)...)
	d.AttachStdout, d.AttachStderr = true, true
	d.Labels[LabelHelper], d.Labels[LabelRun] = CacheArg, run.ID
	h := &d.HostConfig
	h.NetworkMode, h.CapAdd = "none", []string{"CHOWN"}
	h.helperLimits(p.Limits)
	h.volume(c.Volume, CachePath)
	h.bind(run.Init, InitPath, false)
	return d, errors.Join(h.confine(p.Seccomp), h.portable())
}

// volume mounts an engine's volume. Podman would fill an empty one with the image's files
// on its first use only, and that is on a path that no image has.
func (a *argv) volume(name, target string) {
	record, err := mounts.CSV("type=volume", "source="+name, "target="+target, "nosuid", "nodev")
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
