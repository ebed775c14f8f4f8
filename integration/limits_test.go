package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/shim"
	plan "github.com/agentshim/agentshim/spec"
)

// bounded are small limits. The tmpfs sizes leave 64 MiB of the memory.
var bounded = map[string]any{"memoryMb": 128, "pids": 40, "nofile": 64, "cpus": 0.5, "shmMb": 8}

// TestLimits: memory, swap, processes, CPUs, descriptors and core dumps are bounded
// for real; the numbers are read from the kernel, never from inspect. A87, X04.
func TestLimits(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		trials := []trial{
			{"nofile", []string{"open", "300"}, "ok: highest 63 EMFILE", "ok: 300"},
			{"core", []string{"cat", "/proc/self/limits"}, "", ""},
		}
		enforced := []trial{
			{"processes", []string{"fork", "200"}, "", "ok: 200"},
			{"memory", []string{"eat", "300"}, "ok: signal: killed", "ok"},
			{"memory file", []string{"cat", memoryFile}, "ok: 134217728\n", ""},
			{"swap file", []string{"cat", swapFile}, "ok: 134217728\n", ""},
			{"quota file", []string{"cat", quotaFile}, "ok: 50000\n", "ok: -1\n"},
			{"pids file", []string{"cat", pidsFile}, "ok: 40\n", ""},
			{"CPU time", []string{"burn", "1000"}, "", ""},
		}
		ops := of(trials)
		if !s.rootless() {
			ops = append(ops, of(enforced)...)
		}
		sandbox, rec := s.try(t, small(spec{"resources": bounded}), ops)
		// The engines' own limit of core dumps may be 0 too; a flag takes the place of
		// Podman's configured ulimits.
		control := s.control(t, []string{"--ulimit=core=4096:4096", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"}, ops)
		judge(t, trials[:1], sandbox, control)
		t.Run("core", func(t *testing.T) {
			if got := coreLimit(sandbox.detail(t, trials[1].op...)); got != "0 0" {
				t.Errorf("%q", got)
			}
			if got := coreLimit(control.detail(t, trials[1].op...)); got != "4096 4096" {
				t.Errorf("%q in the control run", got)
			}
		})
		if s.rootless() {
			return // TestRootlessLimits
		}
		t.Run("processes", func(t *testing.T) { s.processes(t, sandbox, control) })
		judge(t, enforced[1:6], sandbox, control)
		t.Run("CPU time", func(t *testing.T) {
			// Throttling is by periods of 100 ms, so a short measure is a bit over.
			if got := float(t, sandbox.detail(t, "burn", "1000")); got > 0.75 {
				t.Errorf("%.2f CPUs of 0.5", got)
			}
		})
		t.Run("record", func(t *testing.T) {
			got := rec.Attestation.Hello.Cgroup
			if got.Memory != 128<<20 || got.MemorySwap != 128<<20 || got.PIDs != 40 || got.CPUQuota*2 != got.CPUPeriod {
				t.Errorf("%+v", got)
			}
			if rec.Harness == nil || rec.Harness.OOMKills < 1 {
				t.Errorf("no out-of-memory kill: %+v", rec.Harness)
			}
		})
	})
}

// The files of cgroup v1, as a container sees its own group.
const (
	memoryFile = "/sys/fs/cgroup/memory/memory.limit_in_bytes"
	swapFile   = "/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes"
	quotaFile  = "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"
	pidsFile   = "/sys/fs/cgroup/pids/pids.max"
)

func (s setup) processes(t *testing.T, sandbox, control tried) {
	count, errno, _ := strings.Cut(sandbox.detail(t, "fork", "200"), " ")
	if n := mustInt(t, count); errno != "EAGAIN" || n >= 40 || n < 10 {
		t.Errorf("%d processes, then %s", n, errno)
	}
	if got := control.of("fork", "200"); got != "ok: 200" {
		t.Errorf("in the control run: %s", got)
	}
}

func float(t *testing.T, text string) float64 {
	t.Helper()
	f, err := strconv.ParseFloat(text, 64)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// coreLimit is soft and hard of proc_pid_limits(5).
func coreLimit(limits string) string {
	for line := range strings.Lines(limits) {
		if rest, ok := strings.CutPrefix(line, "Max core file size"); ok {
			f := strings.Fields(rest)
			return f[0] + " " + f[1]
		}
	}
	return ""
}

// TestDefaultLimits: a file that asks for nothing is bounded all the same, and by no
// more than the host's hard limits, or rootful Podman could not start. X01.
func TestDefaultLimits(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		p := s.plan(t, nil)
		if l := p.Limits; l.NoFile == 0 || l.NoFile > 8192 || l.Core != 0 || l.ShmBytes != 64<<20 {
			t.Errorf("%+v", l)
		}
		if l := p.Limits; !s.rootless() && (l.MemoryBytes == 0 || l.MemoryBytes > 8192<<20 || l.PIDs != 512 || l.CPUs == 0) {
			t.Errorf("%+v", l)
		}
		// More than any hard limit is clamped; the bare engine fails at it.
		const tooMuch = 1 << 20
		s.sh(t, spec{"resources": map[string]any{"nofile": tooMuch}}, "true").ok(t)
		if s.engine == "podman" {
			if r := s.bare(t, "run", "--rm", "--network=none", fmt.Sprintf("--ulimit=nofile=%d:%[1]d", tooMuch), "--", "agentshim/hello:test", "true"); r.Code == 0 {
				t.Errorf("the control run got its %d descriptors", tooMuch)
			}
		}
	})
}

// TestRootlessLimits: where the kernel takes no limits from the engine, that is a gap
// and an error, unless it is accepted, and then the record tells. X02, X04.
func TestRootlessLimits(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		const name = "rootless-cgroup-limits"
		file := s.write(t, small(spec{"accept": []string{}, "resources": bounded}))
		if !s.rootless() {
			s.call(t, call{}, "plan", "--spec", file).ok(t)
			return
		}
		r := s.exec(t, file, "true").refused(t, shim.ReasonGap)
		if !strings.Contains(r.Stderr, name) {
			t.Errorf("the gap is not named: %s", r.Stderr)
		}
		// The engine itself says nothing but a line, and its inspect shows the limit.
		control := s.bare(t, "run", "--rm", "--network=none", "--memory=32m", "--", "agentshim/hello:test", "cat", memoryFile).ok(t)
		if got, err := strconv.ParseUint(strings.TrimSpace(control.Stdout), 10, 64); err != nil || got <= 32<<20 {
			t.Errorf("the control run's limit is %q: this host is no case of the gap", control.Stdout)
		}
		_, rec := s.try(t, spec{"resources": bounded}, attempts{{"status", "Uid"}})
		if got := rec.Attestation.Hello.Cgroup; got.Memory == 128<<20 || got.PIDs == 40 {
			t.Errorf("the limits hold: %+v", got)
		}
		if len(rec.Gaps) == 0 || rec.Gaps[0].Name != name || !rec.Gaps[0].Accepted {
			t.Errorf("the record's gaps: %+v", rec.Gaps)
		}
	})
}

// TestRuntimeThatCannotRunHere: on hybrid cgroups crun refuses every container, and
// agentshim takes runc. X03.
func TestRuntimeThatCannotRunHere(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		if s.engine != "podman" {
			return // Docker's runtime is the daemon's, and is runc here
		}
		configured := s.withCrun(t)
		run := func(path string, args ...string) result {
			cmd, cancel := configured(path, args...)
			defer cancel()
			return finish(t, cmd)
		}
		var p plan.Plan
		if err := json.Unmarshal([]byte(run(agentshim, "plan", "--format=json", "--spec", s.write(t, nil)).ok(t).Stdout), &p); err != nil {
			t.Fatal(err)
		}
		if p.Engine.Runtime != "runc" || !strings.HasSuffix(p.Engine.RuntimePath, "/runc") || !p.Engine.CgroupHybrid {
			t.Errorf("engine %+v", p.Engine)
		}
		run(agentshim, "exec", "--spec", s.write(t, nil), "--", "true").ok(t)
		r := run(mustLookPath(t, "podman"), "run", "--rm", "--network=none", "--", "agentshim/hello:test", "true")
		if r.Code == 0 || !strings.Contains(r.Stderr, "crun") {
			t.Errorf("the control run: %+v", r)
		}
	})
}

// withCrun gives commands for which Podman's configured runtime is crun: by the
// user's own file, or for root by another file in the place of the system's.
func (s setup) withCrun(t *testing.T) func(path string, args ...string) (*exec.Cmd, context.CancelFunc) {
	t.Helper()
	dir := s.private(t)
	file := filepath.Join(dir, "containers", "containers.conf")
	text := "[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=1024:1024\"]\n[engine]\nruntime = \"crun\"\n"
	uid, gid := s.ids(t)
	err := errors.Join(os.Mkdir(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644),
		os.Chown(filepath.Dir(file), uid, gid), os.Chown(file, uid, gid))
	if err != nil {
		t.Fatal(err)
	}
	if !s.root() {
		return func(path string, args ...string) (*exec.Cmd, context.CancelFunc) {
			return s.command(t, call{Env: []string{"XDG_CONFIG_HOME=" + dir}}, path, args...)
		}
	}
	return func(path string, args ...string) (*exec.Cmd, context.CancelFunc) {
		const script = `mount --bind "$0" /etc/containers/containers.conf && exec "$@"`
		args = append([]string{"--mount", "sh", "-c", script, file, path}, args...)
		return s.command(t, call{}, mustLookPath(t, "unshare"), args...)
	}
}
