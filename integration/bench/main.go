// Command bench measures agentshim. Part exec does so against the bare engine, on the
// same image with the same flags, on every set-up of this machine; part session compares a
// step of a session with the engine's exec; part mounts does the first with
// 1, 20 and 200 mounts; part relay measures the way out of a sandbox against a direct
// connection and against proxies; part copy measures the private copy of a workspace
// against cp -r; part git measures the private repository against git clone; part seccomp measures a
// system call under agentshim's policy against the engine's default; part network measures an
// attached network against the bare engine. Runs are interleaved. It prints medians and ratios and judges nothing;
// run it on a quiet machine.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/agentshim/agentshim/shim"
	"github.com/agentshim/agentshim/spec"
)

var (
	pairs = flag.Int("pairs", 15, "interleaved pairs per set-up")
	only  = flag.String("only", "", "set-ups whose name contains this")

	part   = flag.String("part", "all", "exec, session, mounts, relay, copy, git, seccomp, network or all")
	rounds = flag.Int("rounds", 5, "interleaved rounds of the relay's, the copy's and git's measurements")
)

// roleArg, as the first argument, makes this program one of the relay benchmark's own.
const roleArg = "role"

type setup struct{ name, engine, account string }

var setups = []setup{
	{"docker-root", "docker", "root"},
	{"docker-group", "docker", "agentshim-docker"},
	{"podman-root", "podman", "root"},
	{"podman-rootless", "podman", "agentshim-rootless"},
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) > 1 && args[0] == roleArg {
		if f := roles[args[1]]; f != nil {
			return f(args[2:])
		}
	}
	flag.Parse()
	switch *part {
	case "exec":
		return execPart()
	case "session":
		return sessionPart()
	case "mounts":
		return mountsPart()
	case "relay":
		return relayPart()
	case "copy":
		return copyPart()
	case "git":
		return gitPart()
	case "seccomp":
		return seccompPart()
	case "network":
		return networkPart()
	case "all":
		return errors.Join(execPart(), sessionPart(), mountsPart(), relayPart(), copyPart(), gitPart(), seccompPart(), networkPart())
	}
	return fmt.Errorf("no part %q", *part)
}

func execPart() error { return eachSetup((*bench).run) }

func eachSetup(part func(*bench) error) error {
	for _, s := range setups {
		if !strings.Contains(s.name, *only) {
			continue
		}
		b, err := newBench(s)
		if err == nil {
			err = part(b)
		}
		b.close()
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// bench is one set-up's folder, harness file and bare command.
type bench struct {
	setup
	user      *user.User
	dir       string
	agentshim string
	bare      []string
	shimRSS   int
	initRSS   int
}

func newBench(s setup) (*bench, error) {
	b := &bench{setup: s}
	var err error
	if b.user, err = user.Lookup(s.account); err != nil {
		return b, fmt.Errorf("%w (integration/setup.sh all)", err)
	}
	if b.dir, err = os.MkdirTemp("/var/tmp", "agentshim-bench-"); err != nil {
		return b, err
	}
	b.agentshim = filepath.Join(b.dir, "agentshim.bin")
	if err := errors.Join(
		exec.Command("cp", "bin/agentshim", b.agentshim).Run(),
		os.Chmod(b.dir, 0o755),
		b.writeSpec(),
		exec.Command("chown", "-R", s.account, b.dir).Run(),
	); err != nil {
		return b, err
	}
	return b, b.capture()
}

func (b *bench) close() {
	if b.dir != "" {
		os.RemoveAll(b.dir)
	}
}

func (b *bench) writeSpec() error {
	write := func(name, egress string) error {
		text := fmt.Sprintf(`{"version":1,"image":"agentshim/hello:test","pull":"never","engine":%q,"user":"24199:24199",
		"harness":{"binary":"true"},"accept":["rootless-cgroup-limits"],"egress":%s}`, b.engine, egress)
		return os.WriteFile(filepath.Join(b.dir, name), []byte(text), 0o644)
	}
	return errors.Join(write(denyAll, `{}`), write(allowList, `{"mode":"allow-list","allow":["api.example.com"]}`), write(attached, `{"mode":"network"}`))
}

// The harness files.
const (
	denyAll   = "harness.json"
	allowList = "allow-list.json"
	attached  = "attached.json"
)

// command runs a program as the set-up's user.
func (b *bench) command(argv ...string) *exec.Cmd {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + b.user.HomeDir, "XDG_STATE_HOME=" + b.dir}
	if b.account == "root" {
		return cmd
	}
	ids, _ := b.user.GroupIds()
	c := &syscall.Credential{Uid: number(b.user.Uid), Gid: number(b.user.Gid)}
	for _, id := range ids {
		c.Groups = append(c.Groups, number(id))
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c}
	return cmd
}

func number(s string) uint32 {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		panic(err)
	}
	return uint32(n)
}

func (b *bench) exec(file string, words ...string) []string {
	return append([]string{
		b.agentshim, "exec", "--quiet", "--spec", filepath.Join(b.dir, file),
		"--result", filepath.Join(b.dir, "result.json"), "--command", "--",
	}, words...)
}

// capture starts a run that sleeps, reads both processes' peak memory, and keeps
// the files of its run folder for the bare command.
func (b *bench) capture() error {
	cmd := b.command(b.exec(denyAll, "sleep", "60")...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	id, err := waitForRun(b.dir)
	if err != nil {
		return err
	}
	b.shimRSS = memory(cmd.Process.Pid, "VmHWM:")
	b.initRSS = memory(findInit(), "VmHWM:")
	runDir, err := runFolder(b.user.Uid, id)
	if err != nil {
		return err
	}
	copied := filepath.Join(b.dir, "run")
	if err := errors.Join(exec.Command("cp", "-rp", runDir, copied).Run(), os.Remove(filepath.Join(copied, "cid"))); err != nil {
		return err
	}
	b.bare, err = b.bareArgv(denyAll)
	return err
}

// bareArgv is what the engine is asked for a file's run, in words of its client, with
// true as the entrypoint and the captured run's folder.
func (b *bench) bareArgv(file string) ([]string, error) {
	out, err := b.command(b.agentshim, "plan", "--format", "engine", "--spec", filepath.Join(b.dir, file)).Output()
	if err != nil {
		return nil, fmt.Errorf("plan: %w", err)
	}
	runDir := filepath.Join(b.dir, "run")
	text := strings.ReplaceAll(string(out), "/RUN_DIR/", runDir+"/")
	text = strings.ReplaceAll(text, "/AGENTSHIM_INIT", runDir+"/agentshim-init")
	if b.engine == "docker" {
		return b.dockerArgv([]byte(text), runDir)
	}
	var argv, bare []string
	if err := json.Unmarshal([]byte(text), &argv); err != nil {
		return nil, err
	}
	for _, a := range argv {
		switch {
		case strings.HasPrefix(a, "--cidfile="), strings.HasPrefix(a, "--name="), a == "wire/1":
			continue
		case strings.HasPrefix(a, "--entrypoint="):
			a = "--entrypoint=/bin/true"
		}
		bare = append(bare, a)
	}
	return bare, nil
}

// dockerArgv says a request of the API's in words of Docker's client.
func (b *bench) dockerArgv(request []byte, dir string) ([]string, error) {
	var c spec.DockerContainer
	if err := json.Unmarshal(request, &c); err != nil {
		return nil, err
	}
	h := c.HostConfig
	argv := []string{
		"docker", "run", "--rm", "--interactive", "--log-driver=none", "--no-healthcheck", "--pull=never",
		"--network=" + h.NetworkMode, "--ipc=" + h.IpcMode, "--cgroupns=" + h.CgroupnsMode, "--hostname=" + c.Hostname,
		"--user=" + c.User, "--cap-drop=ALL", "--workdir=" + c.WorkingDir, "--entrypoint=/bin/true",
		fmt.Sprintf("--memory=%d", h.Memory), fmt.Sprintf("--memory-swap=%d", h.MemorySwap), fmt.Sprintf("--pids-limit=%d", h.PidsLimit),
		fmt.Sprintf("--cpus=%g", float64(h.NanoCpus)/1e9), fmt.Sprintf("--shm-size=%d", h.ShmSize),
	}
	if h.ReadonlyRootfs {
		argv = append(argv, "--read-only")
	}
	for _, option := range h.SecurityOpt {
		if profile, ok := strings.CutPrefix(option, "seccomp="); ok {
			file := filepath.Join(dir, "seccomp.json")
			if err := os.WriteFile(file, []byte(profile), 0o644); err != nil {
				return nil, err
			}
			option = "seccomp=" + file
		}
		argv = append(argv, "--security-opt="+option)
	}
	for name, value := range h.Sysctls {
		argv = append(argv, "--sysctl="+name+"="+value)
	}
	for _, l := range h.Ulimits {
		argv = append(argv, fmt.Sprintf("--ulimit=%s=%d:%d", l.Name, l.Soft, l.Hard))
	}
	for _, variable := range c.Env {
		argv = append(argv, "--env="+variable)
	}
	for target, options := range h.Tmpfs {
		argv = append(argv, "--tmpfs="+target+":"+options)
	}
	for _, m := range h.Mounts {
		word := "--mount=type=" + m.Type + ",source=" + m.Source + ",target=" + m.Target
		if m.ReadOnly {
			word += ",readonly"
		}
		argv = append(argv, word)
	}
	return append(argv, "--", c.Image), nil
}

func waitForRun(state string) (string, error) {
	for range 200 {
		time.Sleep(100 * time.Millisecond)
		if dirs, _ := filepath.Glob(filepath.Join(state, "agentshim/runs/*")); len(dirs) == 1 && findInit() != 0 {
			time.Sleep(500 * time.Millisecond)
			return filepath.Base(dirs[0]), nil
		}
	}
	return "", errors.New("the run does not start")
}

func runFolder(uid, id string) (string, error) {
	dirs, err := filepath.Glob("/tmp/agentshim-" + uid + "/" + id)
	if err != nil || len(dirs) != 1 {
		return "", fmt.Errorf("run folder of %s: %v %w", id, dirs, err)
	}
	return dirs[0], nil
}

// findInit is the host pid of an agentshim-init, 0 without one.
func findInit() int {
	comms, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, c := range comms {
		if text, err := os.ReadFile(c); err == nil && strings.HasPrefix(string(text), "/.agentshim-init\x00") {
			pid, _ := strconv.Atoi(strings.Split(c, "/")[2])
			return pid
		}
	}
	return 0
}

// memory is one of a process's figures in KiB: VmHWM: is the most it had resident,
// VmRSS: what it has now (proc_pid_status(5)).
func memory(pid int, key string) int {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == key {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	return 0
}

func (b *bench) run() error {
	plain := []string{b.engine, "run", "--rm", "agentshim/hello:test", "true"}
	kinds := []kind{{"bare, same flags", b.bare}, {"exec deny-all", b.exec(denyAll, "true")}, {"plain run", plain}, {"exec allow-list", b.exec(allowList, "true")}, {"exec network", b.exec(attached, "true")}}
	phases := map[int]map[string][]time.Duration{1: {}, 3: {}}
	times, err := b.interleave(kinds, func(k int) {
		if p := phases[k]; p != nil {
			b.addPhases(p)
		}
	})
	if err != nil {
		return err
	}
	fmt.Printf("%s (%d interleaved runs each, median [quartiles] in ms)\n", b.name, *pairs)
	for k, kind := range kinds {
		fmt.Printf("  %-18s %s  ratio to bare %.2f\n", kind.name, spread(times[k]), float64(median(times[k]))/float64(median(times[0])))
	}
	fmt.Printf("  paired ratio exec deny-all/bare, median of pairs: %.2f\n", pairedRatio(times[1], times[0]))
	fmt.Printf("  paired ratio exec allow-list/plain run, median of pairs: %.2f\n", pairedRatio(times[3], times[2]))
	fmt.Printf("  paired ratio exec network/plain run, median of pairs: %.2f\n", pairedRatio(times[4], times[2]))
	fmt.Printf("  phases, deny-all and allow-list\n")
	for _, name := range []string{"probe", "inputs", "plan", "prepare", "start", "prove", "egress", "launch", "harness", "end"} {
		fmt.Printf("    %-9s %s  %s\n", name, spread(phases[1][name]), spread(phases[3][name]))
	}
	fmt.Printf("  peak resident: shim %.1f MiB, init %.1f MiB\n", float64(b.shimRSS)/1024, float64(b.initRSS)/1024)
	return b.parallel()
}

// kind is one of the commands that are compared.
type kind struct {
	name string
	argv []string
}

// interleave runs the kinds in turn, once to warm up and then as often as -pairs says,
// and calls after behind each run that counts.
func (b *bench) interleave(kinds []kind, after func(k int)) ([][]time.Duration, error) {
	times := make([][]time.Duration, len(kinds))
	for i := range *pairs + 1 {
		for j := range kinds {
			k := (i + j) % len(kinds)
			d, err := b.timed(kinds[k].argv)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", kinds[k].name, err)
			}
			if i > 0 {
				times[k] = append(times[k], d)
				after(k)
			}
		}
	}
	return times, nil
}

func (b *bench) timed(argv []string) (time.Duration, error) {
	cmd := b.command(argv...)
	start := time.Now()
	out, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, out)
	}
	return time.Since(start), nil
}

func (b *bench) addPhases(phases map[string][]time.Duration) {
	var rec shim.Record
	text, err := os.ReadFile(filepath.Join(b.dir, "result.json"))
	if err == nil {
		err = json.Unmarshal(text, &rec)
	}
	if err != nil {
		panic(err)
	}
	for _, p := range rec.Phases {
		phases[p.Name] = append(phases[p.Name], time.Duration(p.Micros)*time.Microsecond)
	}
}

// parallel times n runs at once, bare and agentshim.
func (b *bench) parallel() error {
	for _, n := range []int{1, 10, 50} {
		bare, err := b.together(n, b.bare)
		if err != nil {
			return err
		}
		ours, err := b.together(n, b.exec(denyAll, "true"))
		if err != nil {
			return err
		}
		fmt.Printf("  %2d at once: bare %6.2f s, agentshim exec %6.2f s\n", n, bare.Seconds(), ours.Seconds())
	}
	return nil
}

func (b *bench) together(n int, argv []string) (time.Duration, error) {
	var wg sync.WaitGroup
	errs := make([]error, n)
	start := time.Now()
	for i := range n {
		wg.Go(func() { _, errs[i] = b.timed(argv) })
	}
	wg.Wait()
	return time.Since(start), errors.Join(errs...)
}

func median(d []time.Duration) time.Duration { return quantile(d, 2) }

// quantile gives the q-th quartile.
func quantile(d []time.Duration, q int) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(d))
	return s[min(len(s)*q/4, len(s)-1)]
}

func spread(d []time.Duration) string {
	ms := func(q int) float64 { return float64(quantile(d, q).Microseconds()) / 1000 }
	return fmt.Sprintf("%7.1f [%.1f–%.1f]", ms(2), ms(1), ms(3))
}

func pairedRatio(a, b []time.Duration) float64 {
	r := make([]float64, len(a))
	for i := range a {
		r[i] = float64(a[i]) / float64(b[i])
	}
	slices.Sort(r)
	return r[len(r)/2]
}
