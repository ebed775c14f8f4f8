package shim

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/spec"
)

// wantVerdict compares the status, and wants every text in the finding or the remedy,
// which only a pass may lack.
func wantVerdict(t *testing.T, got verdict, status Status, texts ...string) {
	t.Helper()
	if got.status != status {
		t.Errorf("%s, want %s: %q", got.status, status, got.finding)
	}
	if (got.remedy == "") != (status == Passed) {
		t.Errorf("%s with the remedy %q", status, got.remedy)
	}
	if got.finding == "" || strings.Contains(got.finding, "\n") {
		t.Errorf("finding %q is not one line", got.finding)
	}
	for _, text := range texts {
		if !strings.Contains(got.finding+"\n"+got.remedy, text) {
			t.Errorf("%q, %q do not say %q", got.finding, got.remedy, text)
		}
	}
}

func TestSystemVerdict(t *testing.T) {
	for goos, want := range map[string]struct {
		status Status
		text   string
	}{
		"linux": {Passed, ""}, "darwin": {Failed, "`podman machine start`"}, "windows": {Failed, "WSL 2"}, "freebsd": {Failed, "virtual machine"},
	} {
		t.Run(goos, func(t *testing.T) { wantVerdict(t, systemVerdict(goos), want.status, want.text) })
	}
}

// Nothing else is looked at on another system.
func TestDoctorOnMacOS(t *testing.T) {
	d, err := Doctor(t.Context(), DoctorOptions{goos: "darwin", Runner: script(t), LookupEnv: lookup(nil)})
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Checks) != 1 || d.Count(Failed) != 1 || !strings.Contains(d.Text(), "podman machine start") {
		t.Errorf("%s", d.Text())
	}
}

func TestKernelVerdict(t *testing.T) {
	for release, want := range map[string]struct {
		status Status
		text   string
	}{
		"6.1.0-28-amd64":                     {Passed, ""},
		"5.6.0":                              {Passed, ""},
		"5.5.19":                             {Failed, "newer kernel"},
		"4.4.0-19041-Microsoft":              {Failed, "wsl --set-version"},
		"5.15.153.1-microsoft-standard-WSL2": {Warned, "cgroup_no_v1=all"}, // A98
	} {
		t.Run(release, func(t *testing.T) { wantVerdict(t, kernelVerdict(release), want.status, want.text) })
	}
}

func TestSeccompVerdict(t *testing.T) {
	const file = "/proc/sys/kernel/seccomp/actions_avail"
	for name, tc := range map[string]struct {
		actions string
		status  Status
		text    string
	}{
		"all":      {"kill_process kill_thread trap errno trace log allow\n", Passed, ""},
		"no errno": {"kill_process kill_thread trap trace log allow\n", Failed, "errno"},
		"none":     {"", Failed, "CONFIG_SECCOMP_FILTER"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if tc.actions != "" {
				writeFile(t, root, file, tc.actions, 0o444)
			}
			wantVerdict(t, seccompVerdict(ProbeOptions{root: root}), tc.status, tc.text)
		})
	}
}

func TestNetfilterVerdict(t *testing.T) {
	const tables, program = "/proc/net/ip_tables_names", "/usr/sbin/iptables-restore"
	for _, tc := range []struct {
		name   string
		nft    error
		files  []string
		status Status
		texts  []string
	}{
		{"nf_tables", nil, nil, Passed, []string{"nf_tables answers"}},
		{"legacy", syscall.EINVAL, []string{tables, program}, Passed, []string{"iptables is installed"}},
		{"not root", syscall.EPERM, []string{program}, Skipped, []string{"as root"}},
		{"N13 program without tables", syscall.EINVAL, []string{program}, Warned, []string{"modprobe nf_tables"}},
		{"tables without program", syscall.EPROTONOSUPPORT, []string{tables}, Warned, []string{"deny-all needs none"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := t.TempDir()
			for _, f := range tc.files {
				writeFile(t, root, f, "filter\n", 0o755)
			}
			wantVerdict(t, netfilterVerdict(ProbeOptions{root: root}, tc.nft), tc.status, tc.texts...)
		})
	}
}

func TestNetlinkError(t *testing.T) {
	answer := func(kind uint16, code int32) []byte {
		b := make([]byte, unix.NLMSG_HDRLEN+4)
		binary.NativeEndian.PutUint16(b[4:], kind)
		binary.NativeEndian.PutUint32(b[unix.NLMSG_HDRLEN:], uint32(code))
		return b
	}
	for name, tc := range map[string]struct {
		answer []byte
		want   error
	}{
		"generation": {answer(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN, 7), nil},
		"denied":     {answer(unix.NLMSG_ERROR, -int32(syscall.EPERM)), syscall.EPERM},
		"done":       {answer(unix.NLMSG_ERROR, 0), nil},
		"cut":        {answer(unix.NLMSG_ERROR, 0)[:unix.NLMSG_HDRLEN], syscall.EBADMSG},
		"empty":      {nil, syscall.EBADMSG},
	} {
		t.Run(name, func(t *testing.T) {
			if err := netlinkError(tc.answer); !errors.Is(err, tc.want) {
				t.Errorf("%v, want %v", err, tc.want)
			}
		})
	}
}

func TestSpaceVerdict(t *testing.T) {
	for name, tc := range map[string]struct {
		space  space
		status Status
		text   string
	}{
		"plenty":         {space{free: 20 << 30, files: 100, freeFiles: 90}, Passed, "20 GiB"},
		"not counted":    {space{free: 20 << 30}, Passed, ""},
		"little":         {space{free: 300 << 20}, Warned, "300 MiB"},
		"none":           {space{free: 1 << 20}, Failed, "1 MiB"},
		"without inodes": {space{free: 20 << 30, files: 100, freeFiles: 3}, Failed, "3 inodes"},
	} {
		t.Run(name, func(t *testing.T) {
			wantVerdict(t, spaceVerdict("/d", tc.space, 64*mib, 1024*mib, "make room"), tc.status, tc.text)
		})
	}
	t.Run("a folder that is not there yet", func(t *testing.T) {
		wantVerdict(t, diskVerdict(filepath.Join(t.TempDir(), "a/b"), 0, 0, "x"), Passed)
	})
}

func TestWorst(t *testing.T) {
	bad, weak, good := verdict{Failed, "bad", "r"}, verdict{Warned, "weak", "r"}, pass("good")
	if got := worst(good, weak, bad); got != bad {
		t.Errorf("%v", got)
	}
	if got := worst(good, weak, good); got != weak {
		t.Errorf("%v", got)
	}
	if got := worst(good, good); got != pass("good; good") {
		t.Errorf("%v", got)
	}
}

func lookup(vars map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) { v, ok := vars[name]; return v, ok }
}

func statuses(d Diagnosis) map[string]Status {
	out := map[string]Status{}
	for _, c := range d.Checks {
		out[c.Scope+" "+c.Name] = c.Status
	}
	return out
}

func TestDoctorFolders(t *testing.T) {
	for name, edit := range map[string]func(t *testing.T, state string){
		"a file in the way": func(t *testing.T, state string) { writeFile(t, state, "agentshim", "", 0o600) },
		"open to others":    func(t *testing.T, state string) { writeFile(t, state, "agentshim/x", "", 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			state := t.TempDir()
			edit(t, state)
			d, err := Doctor(t.Context(), DoctorOptions{
				Runner: script(t), root: rootlessHost(t), LookupEnv: lookup(map[string]string{"XDG_STATE_HOME": state, "PATH": "/usr/bin", "HOME": "/home/u"}),
			})
			if err != nil {
				t.Fatal(err)
			}
			got := statuses(d)
			if got["machine folders"] != Failed || got["podman engine"] != Skipped {
				t.Errorf("%s", d.Text())
			}
		})
	}
}

// Each row breaks one prerequisite of rootless Podman; the others pass, and the engine
// is not called broken a second time.
func TestDoctorRootlessPrerequisites(t *testing.T) {
	for _, tc := range []struct {
		name, check string
		edit        func(t *testing.T, root string)
		vars        map[string]string
		remedy      string
	}{
		{"A71 no range", "subordinate ids", func(t *testing.T, root string) { writeFile(t, root, "/etc/subuid", "", 0o644) }, nil, "usermod --add-subuids"},
		{"no helper", "id helpers", func(t *testing.T, root string) { os.Remove(filepath.Join(root, "usr/bin/newuidmap")) }, nil, "apt install uidmap"},
		{"helper without its bit", "id helpers", func(t *testing.T, root string) { os.Chmod(filepath.Join(root, "usr/bin/newgidmap"), 0o755) }, nil, "setuid bit"},
		{"L10 another user's folder", "runtime folder", func(t *testing.T, root string) {
			writeFile(t, root, "/run/user/0/x", "", 0o600)
		}, map[string]string{"XDG_RUNTIME_DIR": "/run/user/0"}, "unset XDG_RUNTIME_DIR"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := rootlessHost(t)
			tc.edit(t, root)
			d, err := Doctor(t.Context(), rootlessDoctor(t, root, script(t), tc.vars))
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range d.Checks {
				switch {
				case c.Scope != "podman":
				case c.Name == tc.check:
					wantVerdict(t, verdict{c.Status, c.Finding, c.Remedy}, Failed, tc.remedy)
				case c.Status == Failed:
					t.Errorf("%s failed too: %s", c.Name, c.Finding)
				}
			}
			if got := statuses(d); got["podman "+tc.check] != Failed || got["podman engine"] != Skipped || got["podman proof"] != Skipped {
				t.Errorf("%s", d.Text())
			}
		})
	}
}

func rootlessDoctor(t *testing.T, root string, runner Runner, vars map[string]string) DoctorOptions {
	t.Helper()
	uid := 424242
	all := map[string]string{"PATH": "/usr/bin", "HOME": "/home/u", "XDG_STATE_HOME": t.TempDir()}
	for k, v := range vars {
		all[k] = v
	}
	return DoctorOptions{Engine: spec.Podman, Runner: runner, root: root, uid: &uid, LookupEnv: lookup(all)}
}

// A98
func TestUsernsVerdict(t *testing.T) {
	const clone, most, apparmor = "/proc/sys/kernel/unprivileged_userns_clone", "/proc/sys/user/max_user_namespaces", "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
	for _, tc := range []struct {
		name   string
		files  map[string]string
		works  bool
		status Status
		text   string
	}{
		{"Debian's switch", map[string]string{clone: "0\n"}, false, Failed, "sysctl kernel.unprivileged_userns_clone=1"},
		{"Debian's switch is on", map[string]string{clone: "1\n", most: "100\n"}, true, Passed, ""},
		{"none allowed", map[string]string{most: "0\n"}, false, Failed, "sysctl user.max_user_namespaces="},
		{"A98 Ubuntu's AppArmor", map[string]string{apparmor: "1\n"}, false, Failed, "kernel.apparmor_restrict_unprivileged_userns=0"},
		{"A98 with a profile for podman", map[string]string{apparmor: "1\n"}, true, Passed, "profile"},
		{"podman broken otherwise", map[string]string{most: "100\n"}, false, Passed, "no setting"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := t.TempDir()
			for file, text := range tc.files {
				writeFile(t, root, file, text, 0o644)
			}
			wantVerdict(t, usernsVerdict(ProbeOptions{root: root}, tc.works), tc.status, tc.text)
		})
	}
}

func TestHelpersVerdict(t *testing.T) {
	const tun = "/dev/net/tun"
	for _, tc := range []struct {
		name   string
		files  []string
		status Status
		text   string
	}{
		{"all there", []string{"/usr/bin/slirp4netns", tun}, Passed, "slirp4netns"},
		{"pasta", []string{"/usr/bin/pasta", tun}, Passed, "pasta"},
		{"no program", []string{tun}, Warned, "apt install slirp4netns"},
		{"no device", []string{"/usr/bin/slirp4netns"}, Warned, "modprobe tun"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := t.TempDir()
			for _, f := range tc.files {
				writeFile(t, root, f, "", 0o755)
			}
			wantVerdict(t, helpersVerdict(ProbeOptions{root: root, Getenv: env(nil)}), tc.status, tc.text)
		})
	}
}

func TestVersionsVerdict(t *testing.T) {
	fresh := spec.Engine{Kind: spec.Docker, Version: "28.5.0", Runtime: "runc", RuntimeVersion: "1.3.6"}
	wantVerdict(t, versionsVerdict(fresh), Passed, faultsAsOf)
	for name, tc := range map[string]struct {
		edit func(*spec.Engine)
		text string
	}{
		"runc":   {func(e *spec.Engine) { e.RuntimeVersion = "1.3.2" }, "CVE-2025-31133"},
		"docker": {func(e *spec.Engine) { e.Version = "25.0.4" }, "CVE-2024-29018"},
		"crun":   {func(e *spec.Engine) { e.Runtime, e.RuntimeVersion = "crun", "1.4.3" }, "CVE-2022-27650"},
		"podman": {func(e *spec.Engine) { e.Kind, e.Version = spec.Podman, "4.4.1" }, "CVE-2023-0778"},
	} {
		t.Run(name, func(t *testing.T) {
			e := fresh
			tc.edit(&e)
			wantVerdict(t, versionsVerdict(e), Warned, tc.text, "distribution")
		})
	}
}

func TestLimitsVerdict(t *testing.T) {
	for _, tc := range []struct {
		name   string
		engine spec.Engine
		lacks  []string
		status Status
		text   string
	}{
		{"hold", spec.Engine{Kind: spec.Docker, CgroupVersion: 2, CgroupDriver: "systemd"}, nil, Passed, "cgroup v2, systemd"},
		{"rootless on v1", spec.Engine{Kind: spec.Podman, Rootless: true, CgroupVersion: 1, CgroupHybrid: true}, []string{"memory", "cpu", "pids"}, Warned, "systemd.unified_cgroup_hierarchy=1"},
		{"rootless without systemd", spec.Engine{Kind: spec.Podman, Rootless: true, CgroupVersion: 2, CgroupDriver: "cgroupfs"}, []string{"memory"}, Warned, "enable-linger"},
		{"not delegated", spec.Engine{Kind: spec.Podman, Rootless: true, CgroupVersion: 2, CgroupDriver: "systemd"}, []string{"cpu"}, Warned, "Delegate="},
		{"no memory controller", spec.Engine{Kind: spec.Docker, CgroupVersion: 1}, []string{"memory"}, Warned, "cgroup_enable=memory"},
		{"no controller for podman", spec.Engine{Kind: spec.Podman, CgroupVersion: 1}, []string{"pids"}, Warned, "do not hold: pids"},
	} {
		t.Run(tc.name, func(t *testing.T) { wantVerdict(t, limitsVerdict(tc.engine, tc.lacks), tc.status, tc.text) })
	}
}

func TestDockerLacks(t *testing.T) {
	all := dockerInfo{MemoryLimit: true, SwapLimit: true, PidsLimit: true, CPUCfsQuota: true, CgroupDriver: "cgroupfs"}
	for name, tc := range map[string]struct {
		edit func(*dockerInfo)
		want []string
	}{
		"nothing": {func(*dockerInfo) {}, nil},
		"memory":  {func(i *dockerInfo) { i.MemoryLimit = false }, []string{"memory"}},
		"swap":    {func(i *dockerInfo) { i.SwapLimit = false }, []string{"memory"}},
		"cpu":     {func(i *dockerInfo) { i.CPUCfsQuota = false }, []string{"cpu"}},
		"pids":    {func(i *dockerInfo) { i.PidsLimit = false }, []string{"pids"}},
		"driver":  {func(i *dockerInfo) { i.CgroupDriver = "none" }, []string{"memory", "cpu", "pids"}},
	} {
		t.Run(name, func(t *testing.T) {
			info := all
			tc.edit(&info)
			if diff := cmp.Diff(tc.want, dockerLacks(info)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestSELinuxVerdict(t *testing.T) {
	docker, labels := spec.Engine{Kind: spec.Docker}, spec.Engine{Kind: spec.Podman, SELinux: true}
	wantVerdict(t, selinuxVerdict(false, false, docker), Passed)
	wantVerdict(t, selinuxVerdict(false, true, docker), Passed, "permissive")
	wantVerdict(t, selinuxVerdict(true, true, labels), Passed, `"label"`)
	wantVerdict(t, selinuxVerdict(true, true, docker), Warned, "selinux-enabled", "container-selinux") // A98
	wantVerdict(t, selinuxVerdict(true, true, spec.Engine{Kind: spec.Podman}), Warned, "container-selinux")
}

func TestNetnsVerdict(t *testing.T) {
	uid := func(n int) *int { return &n }
	unshare := scriptedCall{argv: []string{"/usr/bin/podman", "unshare", "true"}}
	broken := unshare
	broken.err = failedCall(125, "cannot set up namespace", "podman", "unshare")
	for _, tc := range []struct {
		name   string
		uid    *int
		caps   string
		engine string
		calls  []scriptedCall
		status Status
		text   string
	}{
		{"root", uid(0), "000001ffffffffff", spec.Docker, nil, Passed, "as root"},
		{"root without SYS_ADMIN", uid(0), "00000000a80435fb", spec.Docker, nil, Warned, "CAP_SYS_ADMIN"},
		{"root that can't be read", uid(0), "", spec.Podman, nil, Warned, "CAP_NET_ADMIN"},
		{"rootless", uid(5), "0", spec.Podman, []scriptedCall{unshare}, Passed, "unshare"},
		{"rootless, broken", uid(5), "0", spec.Podman, []scriptedCall{broken}, Warned, "podman system migrate"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := t.TempDir()
			if tc.caps != "" {
				writeFile(t, root, "/proc/self/status", "Name:\tx\nCapEff:\t"+tc.caps+"\n", 0o444)
			}
			a := &podman{engine: spec.Engine{Kind: tc.engine, Client: "/usr/bin/podman"}, runner: script(t, tc.calls...)}
			wantVerdict(t, netnsVerdict(t.Context(), ProbeOptions{root: root, uid: tc.uid}, a), tc.status, tc.text)
		})
	}
}

// The docker group's way leads through the daemon, which can give what it has.
func TestNetnsThroughTheDaemon(t *testing.T) {
	self := os.Getpid()
	for name, tc := range map[string]struct {
		caps   string
		status Status
	}{"without NET_ADMIN": {"00000000a80425fb", Warned}, "with NET_ADMIN": {"0000000000001000", Passed}} {
		t.Run(name, func(t *testing.T) {
			root, uid := t.TempDir(), 5
			pid := filepath.Join("/proc", strconv.Itoa(self))
			writeFile(t, root, pid+"/comm", "dockerd\n", 0o444)
			writeFile(t, root, pid+"/status", "CapBnd:\t"+tc.caps+"\n", 0o444)
			a := &docker{engine: spec.Engine{Kind: spec.Docker}, api: newDockerAPI(startDaemon(t, nil).socket)}
			wantVerdict(t, netnsVerdict(t.Context(), ProbeOptions{root: root, uid: &uid, Getenv: env(nil)}, a), tc.status)
		})
	}
}

func TestEngineVerdict(t *testing.T) {
	e := spec.Engine{Kind: spec.Podman, Version: "4.3.1", Client: "/usr/bin/docker", Rootless: true, Runtime: "runc", RuntimePath: "/usr/sbin/runc"}
	// L09, X03
	wantVerdict(t, engineVerdict(spec.Docker, e), Passed, "podman by the name of docker", "rootless", "in place of the configured runtime")
	wantVerdict(t, engineVerdict(spec.Docker, spec.Engine{Kind: spec.Docker, Version: "28", Socket: "/s"}), Passed, "docker 28, as root", "local daemon on /s")
}

func TestProgramVerdict(t *testing.T) {
	wantVerdict(t, programVerdict(spec.InitPath, 0, spec.InitPath, ""), Passed, "started")
	wantVerdict(t, programVerdict("sh", 0, "/bin/sh\n", ""), Passed, "/bin/sh")
	wantVerdict(t, programVerdict("sh", 1, "", "\"sh\" is in no folder\n"), Failed, "harness-missing", "in no folder", "install the program")
	wantVerdict(t, programVerdict("sh", 125, "", "x"), Failed, "internal")
}

// Every hint of a joined error is in the remedy once; the text stays on one line.
func TestFailedVerdict(t *testing.T) {
	a := &Error{Reason: ReasonEnvMissing, Msg: "a", Hint: "do a"}
	wantVerdict(t, failed(errors.Join(a, &Error{Reason: ReasonEnvMissing, Msg: "b", Hint: "do b"}, a)), Failed, "a; b; a", "do a; do b", "env-missing")
	wantVerdict(t, failed(errors.New("x")), Failed, "internal: x")
}

func TestDemote(t *testing.T) {
	for _, tc := range []struct {
		name, wanted           string
		dockerUsable, passed   bool
		podmanUsable           bool
		wantDocker, wantPodman Status
	}{
		{"docker answers", autoEngine, true, false, true, Failed, Warned},
		{"docker is down", autoEngine, false, true, true, Warned, Failed},
		{"docker is remote", autoEngine, false, false, true, Failed, Failed},
		{"neither", autoEngine, false, true, false, Failed, Failed},
		{"named", spec.Podman, false, true, true, Failed, Failed},
	} {
		t.Run(tc.name, func(t *testing.T) {
			reports := []report{{kind: spec.Docker, usable: tc.dockerUsable, passedOver: tc.passed}, {kind: spec.Podman, usable: tc.podmanUsable}}
			for i := range reports {
				reports[i].add("x", verdict{Failed, "f", "r"})
			}
			demote(tc.wanted, reports)
			if d, p := reports[0].checks[0].Status, reports[1].checks[0].Status; d != tc.wantDocker || p != tc.wantPodman {
				t.Errorf("docker %s, podman %s", d, p)
			}
		})
	}
}

// What the daemon lacks fails the engine, not the machine.
func TestDoctorEngineRefusals(t *testing.T) {
	kernel := mustKernel(t)
	for name, tc := range map[string]struct {
		daemon *fakeDaemon
		text   string
	}{
		"no seccomp": {startDaemon(t, map[string]http.HandlerFunc{"/info": answer(infoJSON(kernel, ""))}), "engine-unsupported"},
		"too old":    {startDaemon(t, map[string]http.HandlerFunc{"/version": answer(versionJSON("19.3.1", "1.40", kernel))}), "19.3.1"},
		"other host": {startDaemon(t, map[string]http.HandlerFunc{"/version": answer(versionJSON("28.0.0", "1.48", "1.2.3"))}), "engine-remote"},
	} {
		t.Run(name, func(t *testing.T) {
			d, err := Doctor(t.Context(), DoctorOptions{
				Engine: spec.Docker, root: fakeHost(t, "docker"), Runner: script(t, identifyCall(dockerClientJSON, noServer)),
				LookupEnv: lookup(map[string]string{"PATH": "/usr/bin", "HOME": "/home/u", "XDG_STATE_HOME": t.TempDir(), "DOCKER_HOST": "unix://" + tc.daemon.socket}),
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := statuses(d); got["docker engine"] != Failed || got["podman engine"] != Skipped || !strings.Contains(d.Text(), tc.text) {
				t.Errorf("%s", d.Text())
			}
		})
	}
}

func TestDoctorOptions(t *testing.T) {
	_, err := Doctor(t.Context(), DoctorOptions{Engine: "lxc", Runner: script(t), LookupEnv: lookup(nil)})
	if !errors.Is(err, ReasonSpecInvalid) {
		t.Errorf("%v", err)
	}
}

func TestDoctorInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	cancel(why)
	_, err := Doctor(ctx, DoctorOptions{root: fakeHost(t), Runner: script(t), LookupEnv: lookup(map[string]string{"HOME": "/home/u", "XDG_STATE_HOME": t.TempDir()})})
	if !errors.Is(err, ReasonInterrupted) || !errors.Is(err, why) {
		t.Errorf("%v", err)
	}
}

// The doctor's own harness file is valid, small, and never root's.
func TestDoctorHarness(t *testing.T) {
	d := newDoctor(DoctorOptions{LookupEnv: lookup(nil)})
	h, _, err := d.harness(spec.Docker, "a:b", proofEgress)
	if err != nil {
		t.Fatal(err)
	}
	if h.Pull != pullNever || strings.HasPrefix(h.User, "0:") || h.User == "" || h.Egress.Mode != netpolicy.AllowList {
		t.Errorf("%+v", h)
	}
}

// importer answers an import and a removal.
type importer struct {
	importErr, removeErr error
	layer                []byte
	removed              []string
}

func (i *importer) Run(_ context.Context, c Command) (Output, error) {
	if c.Args[0] == "import" {
		var err error
		if i.layer, err = io.ReadAll(c.Stdin); err != nil {
			return Output{}, err
		}
		return Output{}, i.importErr
	}
	i.removed = append(i.removed, c.Args[len(c.Args)-1])
	return Output{}, i.removeErr
}

func (i *importer) Start(context.Context, Command) (Process, error) {
	return nil, errors.New("unexpected start")
}

func TestImportImage(t *testing.T) {
	if _, err := embedded.Open("embedded/agentshim-init"); err != nil {
		t.Skip("needs make build")
	}
	run := &importer{}
	a := &podman{engine: spec.Engine{Kind: spec.Podman}, runner: run}
	ref, err := importImage(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	if err := checkRef(ref); err != nil {
		t.Error(err)
	}
	archive := tar.NewReader(bytes.NewReader(run.layer))
	header, err := archive.Next()
	if err != nil || header.Name != "agentshim-init" {
		t.Errorf("%v %v", header, err)
	}
	if _, err := archive.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("a second file: %v", err)
	}
	if other, _ := importImage(t.Context(), a); other == ref {
		t.Error("two diagnoses have the same image")
	}
	run.removed = nil
	wantVerdict(t, removedVerdict(a, ref), Passed)
	if diff := cmp.Diff([]string{ref}, run.removed); diff != "" {
		t.Error(diff)
	}
	t.Run("removal fails", func(t *testing.T) {
		run.removeErr = failedCall(2, "image is in use")
		wantVerdict(t, removedVerdict(a, ref), Warned, "podman image rm "+ref)
		run.removeErr = failedCall(1, "Error: "+ref+": image not known")
		wantVerdict(t, removedVerdict(a, ref), Passed)
	})
	t.Run("import fails", func(t *testing.T) {
		run := &importer{importErr: failedCall(1, "no space left on device")}
		a := &podman{engine: spec.Engine{Kind: spec.Podman}, runner: run}
		_, err := importImage(t.Context(), a)
		wantVerdict(t, failed(err), Failed, "free space")
		if len(run.removed) != 1 {
			t.Errorf("removed %q", run.removed)
		}
	})
	t.Run("interrupted before", func(t *testing.T) {
		run := &importer{}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := importImage(ctx, &podman{runner: run}); err == nil || run.layer != nil {
			t.Errorf("%v, %d bytes imported", err, len(run.layer))
		}
	})
}

// The findings name what the file takes from the caller, and hold no value.
func TestDoctorInputs(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, dir, "a.env", "NAME=secret-value\n", 0o600)
	writeFile(t, dir, "task.md", "secret-prompt", 0o600)
	writeFile(t, dir, "login.json", "secret-login", 0o600)
	full := harness.Harness{Dir: dir, EnvFrom: []string{"TOKEN"}, EnvFiles: []string{"a.env"}, PromptFile: "task.md"}
	full.Home.Files = []harness.HomeFile{{Source: "login.json", Target: "x"}}
	for _, tc := range []struct {
		name, failed string
		edit         func(*harness.Harness)
		texts        []string
	}{
		{"all there", "", func(*harness.Harness) {}, []string{`"TOKEN"`, `"a.env"`, `"task.md"`, `"login.json"`}},
		{"variable", "variables", func(h *harness.Harness) { h.EnvFrom = []string{"TOKEN", "OTHER"} }, []string{`"OTHER" of envFrom is not set`}},
		{"env file", "files", func(h *harness.Harness) { h.EnvFiles = []string{"no.env"} }, []string{"no.env"}},
		{"prompt file", "files", func(h *harness.Harness) { h.PromptFile = "no.md" }, []string{"no.md"}},
		{"home file", "files", func(h *harness.Harness) { h.Home.Files[0].Source = "no.json" }, []string{"no.json"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := newDoctor(DoctorOptions{LookupEnv: lookup(map[string]string{"TOKEN": "secret-token", "HOME": dir})})
			h := full
			h.Home.Files = []harness.HomeFile{full.Home.Files[0]}
			tc.edit(&h)
			d.job.Harness, d.folders = h, folders{state: t.TempDir(), runtime: t.TempDir()}
			d.inputs()
			for _, c := range d.out.Checks {
				want := Passed
				if c.Name == tc.failed {
					want = Failed
				}
				wantVerdict(t, verdict{c.Status, c.Finding, c.Remedy}, want)
			}
			text := d.out.Text()
			for _, want := range tc.texts {
				if !strings.Contains(text, want) {
					t.Errorf("%s does not say %s", text, want)
				}
			}
			if strings.Contains(text, "secret") {
				t.Errorf("a value is shown: %s", text)
			}
		})
	}
}

func TestDiagnosisText(t *testing.T) {
	d := Diagnosis{Checks: []Check{
		{"machine", "kernel", Passed, "Linux 6", ""},
		{"podman", "engine", Skipped, "not\x1b[31m asked for", "name it"},
		{"docker", "a long name", Warned, "old", "upgrade"},
		{"docker", "proof", Failed, "no", "try"},
	}}
	want := `machine
  PASS  kernel       Linux 6
docker
  WARN  a long name  old
                     -> upgrade
  FAIL  proof        no
                     -> try
podman
  SKIP  engine       not [31m asked for -> name it
1 passed, 1 warned, 1 failed, 1 skipped
`
	if diff := cmp.Diff(want, d.Text()); diff != "" {
		t.Error(diff)
	}
}

// A daemon that hangs does not hold the doctor up.
func TestDoctorGivesUp(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	hang := func(http.ResponseWriter, *http.Request) { <-release }
	daemon := startDaemon(t, map[string]http.HandlerFunc{"/version": hang, "/info": hang})
	d, err := Doctor(t.Context(), DoctorOptions{
		Engine: spec.Docker, root: fakeHost(t, "docker"), Runner: script(t, identifyCall(dockerClientJSON, noServer)), limit: 200 * time.Millisecond,
		LookupEnv: lookup(map[string]string{"PATH": "/usr/bin", "HOME": "/home/u", "XDG_STATE_HOME": t.TempDir(), "DOCKER_HOST": "unix://" + daemon.socket}),
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := statuses(d); got["docker engine"] != Failed || !strings.Contains(d.Text(), "gives up") {
		t.Errorf("%s", d.Text())
	}
}
