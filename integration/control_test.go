package integration

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/shim"
	plan "github.com/agentshim/agentshim/spec"
)

// The tests of this file, limits_test.go and kernel_test.go try what the plan
// forbids. The program of testdata/try makes the attempts, many in one container.

// attempts are what that program does: kind and operands.
type attempts [][]string

// helper is the folder with the program, which every user can read.
var helper = sync.OnceValues(func() (string, error) {
	dir := filepath.Join(filepath.Dir(agentshim), "try")
	build := func(name, source string, env ...string) error {
		cmd := exec.Command("go", "build", "-trimpath", "-o", filepath.Join(dir, name), source)
		cmd.Env = append(os.Environ(), append(env, "CGO_ENABLED=0", "GOFLAGS=")...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go build %s: %w\n%s", source, err, out)
		}
		return os.Chmod(filepath.Join(dir, name), 0o755)
	}
	errs := []error{build("try", "./testdata/try")}
	if runtime.GOARCH == "amd64" {
		errs = append(errs, build("calls386", "../seccomp/testdata/calls386", "GOARCH=386"))
	}
	return dir, errors.Join(append(errs, os.Chmod(dir, 0o755))...)
})

func mustHelper(t *testing.T) string {
	t.Helper()
	dir, err := helper()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// tried holds how each attempt of one container ended, by the attempt.
type tried map[string]string

func (tr tried) of(op ...string) string { return tr[strings.Join(op, " ")] }

// detail is what a successful attempt told.
func (tr tried) detail(t *testing.T, op ...string) string {
	t.Helper()
	got := tr.of(op...)
	if got != "ok" && !strings.HasPrefix(got, "ok: ") {
		t.Fatalf("%v: %s", op, got)
	}
	return strings.TrimPrefix(strings.TrimPrefix(got, "ok"), ": ")
}

func endings(t *testing.T, r result, ops attempts) tried {
	t.Helper()
	r.ok(t)
	var all []string
	if err := json.Unmarshal([]byte(r.Stdout), &all); err != nil || len(all) != len(ops) {
		t.Fatalf("%d attempts, outcomes %q: %v", len(ops), r.Stdout, err)
	}
	got := tried{}
	for i, op := range ops {
		got[strings.Join(op, " ")] = all[i]
	}
	return got
}

func (ops attempts) json(t *testing.T) string {
	t.Helper()
	b, err := json.Marshal(ops)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// withHelper adds the program and its folder to a harness file.
func withHelper(t *testing.T, fields spec) spec {
	t.Helper()
	full := spec{"harness": map[string]any{"binary": "/try/try"}}
	for k, v := range fields {
		full[k] = v
	}
	binds, _ := full["mounts"].([]any)
	full["mounts"] = append(slices.Clone(binds), map[string]any{"source": mustHelper(t), "target": "/try"})
	return full
}

// try makes the attempts as the harness of a file made of fields.
func (s setup) try(t *testing.T, fields spec, ops attempts) (tried, shim.Record) {
	t.Helper()
	state := s.private(t)
	file := s.write(t, withHelper(t, fields))
	r := s.call(t, call{State: state}, "exec", "--spec", file, "--", ops.json(t))
	return endings(t, r, ops), record(t, state)
}

// control makes the attempts in a container of the bare engine's.
func (s setup) control(t *testing.T, flags []string, ops attempts) tried {
	t.Helper()
	args := []string{"run", "--rm", "--entrypoint=/try/try", "--volume=" + mustHelper(t) + ":/try:ro"}
	if !slices.ContainsFunc(flags, func(f string) bool { return strings.HasPrefix(f, "--network") }) {
		args = append(args, "--network=none")
	}
	args = append(args, flags...)
	if !slices.Contains(flags, "--") {
		args = append(args, "--", "agentshim/hello:test")
	}
	return endings(t, s.bare(t, append(args, ops.json(t))...), ops)
}

// trial is one attempt, how it must end in the sandbox, and how it ends in the
// control run. With an empty control it has none of its own.
type trial struct {
	name          string
	op            []string
	want, control string
}

func of(trials []trial) attempts {
	var ops attempts
	for _, tr := range trials {
		ops = append(ops, tr.op)
	}
	return ops
}

// judge compares both runs with the table.
func judge(t *testing.T, trials []trial, sandbox, control tried) {
	t.Helper()
	for _, tr := range trials {
		t.Run(tr.name, func(t *testing.T) {
			if got := sandbox.of(tr.op...); got != tr.want {
				t.Errorf("%v: %s, want %s", tr.op, got, tr.want)
			}
			if got := control.of(tr.op...); tr.control != "" && got != tr.control {
				t.Errorf("%v in the control run: %s, want %s", tr.op, got, tr.control)
			}
		})
	}
}

// accepted are the gaps and widenings that a run as uid 0 needs on any set-up.
var accepted = []string{"root-user", "rootless-cgroup-limits"}

// rootUser are the fields of a run as uid 0, the strongest agent there is.
func rootUser(more spec) spec {
	fields := spec{"user": "0:0", "accept": accepted}
	for k, v := range more {
		fields[k] = v
	}
	return fields
}

// agent is the uid and gid that a file without rootUser gives here.
func (s setup) agent(t *testing.T) (uid, gid int) {
	t.Helper()
	if s.root() {
		return 24199, 24199
	}
	return s.ids(t)
}

const (
	noCaps   = "ok: 0000000000000000"
	chownCap = "ok: 0000000000000001"
)

// TestNoCapabilities: all five sets are empty for the harness, whoever it is, and
// what needs a capability is refused. C01, C03.
func TestNoCapabilities(t *testing.T) {
	sets := []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}
	each(t, func(t *testing.T, s setup) {
		trials := privileged(s)
		for _, set := range sets {
			trials = append(trials, trial{name: set, op: []string{"status", set}, want: noCaps})
		}
		trials = append(trials, trial{name: "no_new_privs", op: []string{"status", "NoNewPrivs"}, want: "ok: 1", control: "ok: 0"})
		sandbox, _ := s.try(t, rootUser(nil), of(trials))
		control := s.control(t, []string{"--cap-add=SYS_ADMIN", "--cap-add=MKNOD", "--cap-add=NET_RAW"}, of(trials))
		judge(t, trials, sandbox, control)
		if got := control.of("status", "CapBnd"); got == noCaps {
			t.Errorf("the control run's bounding set is empty too")
		}
		t.Run("agent", func(t *testing.T) {
			var want []trial
			for _, set := range sets {
				want = append(want, trial{name: set, op: []string{"status", set}, want: noCaps})
			}
			agent, _ := s.try(t, nil, of(want))
			judge(t, want, agent, nil)
		})
	})
}

// privileged are attempts that need a capability each.
func privileged(s setup) []trial {
	node := "ok"
	if s.rootless() {
		node = "EPERM" // no device can be made in a user namespace, capability or not
	}
	const denied = "exit status 1\nPING 127.0.0.1 (127.0.0.1): 56 data bytes\nping: permission denied (are you root?)"
	return []trial{
		{"CHOWN", []string{"chown", "/tmp", "1234"}, "EPERM", "ok"},
		{"MKNOD", []string{"mknod", "/tmp"}, "EPERM", node},
		{"NET_RAW", []string{"syscall", strconv.Itoa(sysSocket), "2", "3", "1"}, "EPERM", "ok"},
		{"ping", []string{"run", "/bin/ping", "-c1", "127.0.0.1"}, "ok: " + denied, ""},
		{"SYS_ADMIN", []string{"mount", "/tmp"}, "EPERM", "ok"},
		{"SYS_CHROOT", []string{"chroot"}, "EPERM", "ok"},
		{"DAC_OVERRIDE", []string{"locked", "/tmp"}, "error: no folder of another's: chown /tmp/.try-locked: operation not permitted", "ok"},
		{"SETUID", []string{"setuid", "1234"}, "EPERM", "ok"}, // last: it succeeds in the control run
	}
}

// TestChownCapability: CHOWN is all that can be asked for, only for uid 0, and it
// is shown.
func TestChownCapability(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		fields := rootUser(spec{"capabilities": []string{"CHOWN"}})
		trials := []trial{
			{name: "chown works", op: []string{"chown", "/tmp", "1234"}, want: "ok"},
			{name: "CapPrm", op: []string{"status", "CapPrm"}, want: chownCap},
			{name: "CapEff", op: []string{"status", "CapEff"}, want: chownCap},
			{name: "CapBnd", op: []string{"status", "CapBnd"}, want: chownCap},
			{name: "CapInh", op: []string{"status", "CapInh"}, want: noCaps},
			{name: "CapAmb", op: []string{"status", "CapAmb"}, want: noCaps},
			{name: "C01 no DAC_OVERRIDE", op: []string{"locked", "/tmp"}, want: "EACCES"},
		}
		for _, tr := range privileged(s) {
			if tr.name != "CHOWN" && tr.name != "DAC_OVERRIDE" {
				trials = append(trials, trial{name: tr.name, op: tr.op, want: tr.want})
			}
		}
		sandbox, rec := s.try(t, fields, of(trials))
		judge(t, trials, sandbox, nil)
		for _, name := range []string{"capability:CHOWN", "root-user"} {
			if !slices.ContainsFunc(rec.Widenings, func(n plan.Note) bool { return n.Name == name }) {
				t.Errorf("the record does not show the widening %q: %v", name, rec.Widenings)
			}
		}
	})
}

// TestRootAndCapabilitiesAreRefused without what they need.
func TestRootAndCapabilitiesAreRefused(t *testing.T) {
	gap := []string{"rootless-cgroup-limits"}
	rows := []struct {
		name   string
		fields spec
		reason shim.Reason
	}{
		{"root without accept", spec{"user": "0:0", "accept": gap}, shim.ReasonWidening},
		{"CHOWN without accept", spec{"user": "0:0", "accept": gap, "capabilities": []string{"CHOWN"}}, shim.ReasonWidening},
		{"CHOWN for another uid", spec{"user": "24199:24199", "accept": accepted, "capabilities": []string{"CHOWN"}}, shim.ReasonSpecInvalid},
		{"NET_RAW", rootUser(spec{"capabilities": []string{"NET_RAW"}}), shim.ReasonSpecInvalid},
		{"ALL", rootUser(spec{"capabilities": []string{"ALL"}}), shim.ReasonSpecInvalid},
	}
	each(t, func(t *testing.T, s setup) {
		for _, row := range rows {
			t.Run(row.name, func(t *testing.T) {
				s.sh(t, row.fields, "true").refused(t, row.reason)
			})
		}
	})
}

// TestSetuidProgram: a set-uid program gives nothing. C03.
func TestSetuidProgram(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		uid, gid := s.agent(t)
		dir := s.setuidCopy(t)
		ops := attempts{{"run", "/su/try", `[["status","Uid"]]`}}
		sandbox, _ := s.try(t, spec{"mounts": []any{map[string]any{"source": dir, "target": "/su"}}}, ops)
		flags := []string{"--volume=" + dir + ":/su", "--user=" + fmt.Sprintf("%d:%d", uid, gid)}
		if s.engine == "podman" {
			flags[0] += ":suid"
		}
		if s.rootless() {
			flags = append(flags, "--userns=keep-id")
		}
		control := s.control(t, flags, ops)
		if got, want := sandbox.of(ops[0]...), fmt.Sprintf(`ok: ["ok: %[1]d %[1]d %[1]d %[1]d"]`, uid); got != want {
			t.Errorf("a set-uid program ran as %s, want %s", got, want)
		}
		if got, want := control.of(ops[0]...), fmt.Sprintf(`ok: ["ok: %d 0 0 0"]`, uid); got != want {
			t.Errorf("in the control run it ran as %s, want %s", got, want)
		}
	})
}

// setuidCopy is a folder with a copy of the helper that belongs to the container's
// uid 0 and is set-uid.
func (s setup) setuidCopy(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(mustHelper(t), "try"))
	if err != nil {
		t.Fatal(err)
	}
	dir, owner := s.folder(t), 0
	if s.rootless() {
		owner = s.subUID(t) // what keep-id maps 0 to
	}
	p := filepath.Join(dir, "try")
	if err := errors.Join(os.WriteFile(p, b, 0o755), os.Chown(p, owner, owner), os.Chmod(p, 0o755|os.ModeSetuid), os.Chmod(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// subUID is the first of the account's subordinate uids.
func (s setup) subUID(t *testing.T) int {
	t.Helper()
	f, err := os.Open("/etc/subuid")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Split(lines.Text(), ":"); fields[0] == s.account {
			return mustInt(t, fields[1])
		}
	}
	t.Fatalf("%s has no subordinate uids", s.account)
	return 0
}

func environment(t *testing.T, tr tried) map[string]string {
	t.Helper()
	var list []string
	if err := json.Unmarshal([]byte(tr.detail(t, "environ")), &list); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{}
	for _, kv := range list {
		name, value, _ := strings.Cut(kv, "=")
		env[name] = value
	}
	return env
}

// TestNamespaces: every namespace is the container's own, and none of the host's
// can be asked for.
func TestNamespaces(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		own := map[string]string{}
		for _, ns := range []string{"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"} {
			link, err := os.Readlink("/proc/thread-self/ns/" + ns) // the first thread may have made the world's namespace
			if err != nil {
				t.Fatal(err)
			}
			own[ns] = link
		}
		read := func(tr tried) (links map[string]string) {
			if err := json.Unmarshal([]byte(tr.detail(t, "namespaces")), &links); err != nil {
				t.Fatal(err)
			}
			return links
		}
		sandbox, _ := s.try(t, nil, attempts{{"namespaces"}})
		inside := read(sandbox)
		flags := []string{"--pid=host", "--ipc=host", "--uts=host", "--cgroupns=host", "--network=host"}
		if s.rootless() {
			flags[1] = "--ipc=private" // it would bind /dev/mqueue, which not every host has
		}
		control := read(s.control(t, flags, attempts{{"namespaces"}}))
		for ns, host := range own {
			t.Run(ns, func(t *testing.T) {
				if inside[ns] == "" || (inside[ns] == host) != (ns == "user" && !s.rootless()) {
					t.Errorf("inside %s, on the host %s", inside[ns], host)
				}
				if ns != "mnt" && ns != "user" && !slices.Contains(flags, "--"+ns+"=private") && control[ns] != host {
					t.Errorf("in the control run %s, on the host %s", control[ns], host)
				}
			})
		}
		for _, field := range []string{"pid", "ipc", "uts", "cgroupns", "network", "privileged", "namespaces", "securityOpt"} {
			t.Run("no field "+field, func(t *testing.T) {
				s.call(t, call{}, "plan", "--spec", s.write(t, spec{field: "host"})).refused(t, shim.ReasonSpecInvalid)
			})
		}
	})
}

// small are sizes that a test fills quickly; their sum with /run is 40 MiB.
func small(more spec) spec {
	fields := spec{"home": map[string]any{"sizeMb": 8}, "tmpSizeMb": 8, "resources": map[string]any{"shmMb": 8}}
	for k, v := range more {
		fields[k] = v
	}
	return fields
}

// TestReadOnlyRoot: nothing but the four tmpfs can be written, each has its size
// and flags. T03, T05, T06.
func TestReadOnlyRoot(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		uid, _ := s.agent(t)
		var trials []trial
		for _, dir := range []string{"/", "/bin", "/etc", "/home", "/root", "/usr", "/usr/bin", "/var"} {
			trials = append(trials,
				trial{"create in " + dir, []string{"create", dir}, "EROFS", "ok"},
				trial{"mkdir in " + dir, []string{"mkdir", dir}, "EROFS", "ok"})
		}
		for _, file := range []string{"/etc/passwd", "/etc/group", "/bin/busybox"} {
			trials = append(trials, trial{"change " + file, []string{"chmod", file}, "EROFS", "ok"})
		}
		for _, file := range []string{"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", plan.InitPath, "/sys", "/sys/fs/cgroup/cpu"} {
			trials = append(trials, trial{name: "change " + file, op: []string{"chmod", file}, want: "EROFS"})
		}
		sandbox, _ := s.try(t, rootUser(small(nil)), append(of(trials), []string{"writable"}))
		judge(t, trials, sandbox, s.control(t, nil, of(trials)))

		t.Run("agent", func(t *testing.T) { s.writablePlaces(t, uid) })
		// Linux gives uid 0 the engine's /dev; its size counts in the plan's sum.
		want := "/dev /dev/shm /home/agent /run /run/user /run/user/0 /tmp"
		if got := withoutQueues(sandbox.detail(t, "writable")); got != want {
			t.Errorf("uid 0 can write %s, want %s", got, want)
		}
	})
}

// withoutQueues leaves out /dev/mqueue, where a file is a POSIX message queue,
// bounded by RLIMIT_MSGQUEUE.
func withoutQueues(places string) string {
	return strings.Join(slices.DeleteFunc(strings.Fields(places), func(p string) bool { return p == "/dev/mqueue" }), " ")
}

func (s setup) writablePlaces(t *testing.T, uid int) {
	trials := []trial{
		{"size of home", []string{"fill", "/home/agent", "40"}, "ok: 8 MiB ENOSPC", ""},
		{"size of /tmp", []string{"fill", "/tmp", "40"}, "ok: 8 MiB ENOSPC", "ok: 40 MiB"},
		{"size of /dev/shm", []string{"fill", "/dev/shm", "40"}, "ok: 8 MiB ENOSPC", "ok: 40 MiB"},
		{"size of /run", []string{"fill", "/run", "40"}, "ok: 16 MiB ENOSPC", "ok: 40 MiB"},
		{"exec in home", []string{"execin", "/home/agent"}, "ok", ""},
		{"exec in /tmp", []string{"execin", "/tmp"}, "ok", "EACCES"},
		{"exec in /dev/shm", []string{"execin", "/dev/shm"}, "EACCES", ""},
	}
	ops := append(of(trials), []string{"writable"}, []string{"cat", "/proc/self/mountinfo"})
	sandbox, _ := s.try(t, small(nil), ops)
	judge(t, trials, sandbox, s.control(t, []string{"--tmpfs=/tmp:noexec"}, of(trials)))
	want := fmt.Sprintf("/dev/shm /home/agent /run /run/user /run/user/%d /tmp", uid)
	if got := withoutQueues(sandbox.detail(t, "writable")); got != want {
		t.Errorf("the agent can write %s, want %s", got, want)
	}
	flags := mountFlags(sandbox.detail(t, "cat", "/proc/self/mountinfo"))
	for _, target := range []string{"/home/agent", "/tmp", "/run", "/dev/shm"} {
		for _, flag := range []string{"nosuid", "nodev"} {
			if !slices.Contains(flags[target], flag) {
				t.Errorf("%s is %v, without %s", target, flags[target], flag)
			}
		}
	}
	if !slices.Contains(flags["/"], "ro") {
		t.Errorf("/ is %v", flags["/"])
	}
}

// mountFlags are the topmost mount's options by mount point: proc(5).
func mountFlags(mountinfo string) map[string][]string {
	flags := map[string][]string{}
	for line := range strings.Lines(mountinfo) {
		if f := strings.Fields(line); len(f) > 5 {
			flags[f[4]] = strings.Split(f[5], ",")
		}
	}
	return flags
}

// TestHomeNoExec: the one field decides, on both engines. T03.
func TestHomeNoExec(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		sandbox, _ := s.try(t, spec{"home": map[string]any{"noexec": true}}, attempts{{"execin", "/home/agent"}})
		if got := sandbox.of("execin", "/home/agent"); got != "EACCES" {
			t.Errorf("a program in a noexec home: %s", got)
		}
	})
}

// TestHomeIsEmpty: what an image holds in the home is not copied up. T04.
func TestHomeIsEmpty(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		uid, gid := s.agent(t)
		image := s.importImage(t, "home/agent/.dotfile")
		trials := []trial{
			{name: "list", op: []string{"list", "/home/agent"}, want: "ok"},
			{name: "owner", op: []string{"stat", "/home/agent"}, want: fmt.Sprintf("ok: %d:%d 0700", uid, gid)},
		}
		if s.engine == "podman" {
			trials[0].control = "ok: .dotfile"
		}
		sandbox, _ := s.try(t, spec{"image": image}, of(trials))
		control := s.control(t, []string{"--tmpfs=/home/agent", "--", image}, of(trials))
		judge(t, trials, sandbox, control)
	})
}

// TestImageFolderModes: the modes of an image's folders don't become those of the
// tmpfs on top of them, as a runtime would have it.
func TestImageFolderModes(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		uid, gid := s.agent(t)
		image := s.importTree(t, func(root string) error {
			var errs []error
			for dir, mode := range map[string]os.FileMode{"home/agent": 0o777, "tmp": 0o711, "run": 0o777, "data": 0o777 | os.ModeSticky} {
				p := filepath.Join(root, dir)
				errs = append(errs, os.MkdirAll(p, 0o755), os.Chmod(p, mode))
			}
			return errors.Join(errs...)
		}, "--change=VOLUME /data")
		trials := []trial{
			{name: "home", op: []string{"stat", "/home/agent"}, want: fmt.Sprintf("ok: %d:%d 0700", uid, gid)},
			{name: "tmp", op: []string{"create", "/tmp"}, want: "ok"},
			{name: "run", op: []string{"stat", "/run"}, want: fmt.Sprintf("ok: %d:%d 0755", uid, gid)},
		}
		if s.engine == "docker" {
			trials = append(trials, trial{name: "volume", op: []string{"create", "/data"}, want: "ok"})
		}
		sandbox, _ := s.try(t, spec{"image": image}, of(trials))
		judge(t, trials, sandbox, sandbox)
	})
}

// importImage makes an image of empty files.
func (s setup) importImage(t *testing.T, files ...string) string {
	t.Helper()
	return s.importTree(t, func(root string) error {
		var errs []error
		for _, f := range files {
			p := filepath.Join(root, f)
			errs = append(errs, os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, nil, 0o644))
		}
		return errors.Join(errs...)
	})
}

// importTree makes an image of what build puts into a folder.
func (s setup) importTree(t *testing.T, build func(root string) error, flags ...string) string {
	t.Helper()
	dir, tag := s.folder(t), "agentshim/"+s.name+"-"+filepath.Base(s.folder(t))+":test"
	root := filepath.Join(dir, "root")
	if err := errors.Join(os.Mkdir(root, 0o755), build(root)); err != nil {
		t.Fatal(err)
	}
	tar := filepath.Join(dir, "root.tar")
	if out, err := exec.Command("tar", "--create", "--file="+tar, "--owner=0", "--group=0", "--directory="+root, ".").CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, out)
	}
	tag = strings.ToLower(tag)
	s.bare(t, append(append([]string{"import"}, flags...), tar, tag)...).ok(t)
	t.Cleanup(func() { s.bare(t, "rmi", tag) })
	return tag
}

// TestTmpfsSum: tmpfs that could together fill the memory limit are refused.
func TestTmpfsSum(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		with := func(memory int) result {
			fields := small(spec{"resources": map[string]any{"shmMb": 8, "memoryMb": memory}})
			return s.call(t, call{}, "plan", "--spec", s.write(t, fields))
		}
		with(104).ok(t) // 8+8+8+16 and 64 MiB to spare
		if s.rootless() {
			return // no memory limit holds there: gap rootless-cgroup-limits
		}
		with(103).refused(t, shim.ReasonMount)
	})
}

// TestRootfsWritable works and is shown in plan and record.
func TestRootfsWritable(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		fields := rootUser(spec{"rootfsWritable": true})
		sandbox, rec := s.try(t, fields, attempts{{"create", "/var"}, {"create", "/etc"}})
		for op, got := range sandbox {
			if got != "ok" {
				t.Errorf("%s: %s", op, got)
			}
		}
		isIt := func(n plan.Note) bool { return n.Name == "rootfs-writable" }
		if !slices.ContainsFunc(rec.Widenings, isIt) {
			t.Errorf("the record's widenings: %v", rec.Widenings)
		}
		if p := s.plan(t, fields); !slices.ContainsFunc(p.Widenings, isIt) || p.ReadOnlyRootfs {
			t.Errorf("the plan's widenings: %v, read-only %v", p.Widenings, p.ReadOnlyRootfs)
		}
		text := s.call(t, call{}, "plan", "--spec", s.write(t, fields)).ok(t).Stdout
		if !strings.Contains(text, "rootfs-writable") {
			t.Errorf("the plan's text does not show it:\n%s", text)
		}
	})
}

// plan is what plan --format json prints.
func (s setup) plan(t *testing.T, fields spec) (p plan.Plan) {
	t.Helper()
	out := s.call(t, call{}, "plan", "--format=json", "--spec", s.write(t, fields)).ok(t).Stdout
	if err := json.Unmarshal([]byte(out), &p); err != nil {
		t.Fatal(err)
	}
	return p
}

// TestImageVolume: a VOLUME does not open the read-only root.
func TestImageVolume(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		want := map[string]string{"docker": "ok: 16 MiB ENOSPC", "podman": "ENOENT"}[s.engine]
		trials := []trial{{"fill", []string{"fill", "/data", "40"}, want, "ok: 40 MiB"}}
		sandbox, _ := s.try(t, rootUser(spec{"image": "agentshim/volume:test"}), of(trials))
		control := s.control(t, []string{"--read-only", "--", "agentshim/volume:test"}, of(trials))
		judge(t, trials, sandbox, control)
	})
}

// TestImageEnv: the image's variables reach the harness, but LD_*, and never init.
func TestImageEnv(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		uid, gid := s.agent(t)
		ops := attempts{{"environ"}, {"openread", "/proc/1/environ"}}
		sandbox, rec := s.try(t, spec{"image": "agentshim/env:test"}, ops)
		env := environment(t, sandbox)
		for name, want := range map[string]string{"FOO": "bar", "GODEBUG": "gctrace=1", "GOGC": "1", "PATH": "/bin:/usr/bin"} {
			if env[name] != want {
				t.Errorf("the harness has %s=%q, want %q", name, env[name], want)
			}
		}
		if v, ok := env["LD_PRELOAD"]; ok {
			t.Errorf("the harness has LD_PRELOAD=%q", v)
		}
		if got := sandbox.of("openread", "/proc/1/environ"); got != "EACCES" {
			t.Errorf("init's environment: %s", got)
		}
		for _, kv := range rec.Attestation.Hello.Environ {
			if name, _, _ := strings.Cut(kv, "="); slices.Contains([]string{"FOO", "GODEBUG", "GOGC", "LD_PRELOAD"}, name) {
				t.Errorf("init has %s", kv)
			}
		}
		control := s.control(t, []string{fmt.Sprintf("--user=%d:%d", uid, gid), "--", "agentshim/env:test"}, ops)
		if env := environment(t, control); env["LD_PRELOAD"] == "" || env["GOGC"] != "1" {
			t.Errorf("PID 1 of the control run has %v", env)
		}
		if got := control.of("openread", "/proc/1/environ"); got != "ok" {
			t.Errorf("PID 1's environment in the control run: %s", got)
		}
	})
}

// live is a run that waits for the end of its standard input.
type live struct {
	container string
	state     string
	stop      func() result
}

// start runs a script that is followed by a wait, and returns once the script is
// done.
func (s setup) start(t *testing.T, fields spec, script string) live {
	t.Helper()
	state := s.private(t)
	in, stdin := io.Pipe()
	cmd, cancel := s.command(t, call{State: state}, agentshim, "exec", "--quiet", "--spec", s.write(t, fields), "--", script+"; echo ready; cat >/dev/null")
	cmd.Stdin = in
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	reader := bufio.NewReader(out)
	stop := func() result {
		once.Do(func() {
			stdin.Close()
			_, _ = io.Copy(io.Discard, reader)
			_ = cmd.Wait()
			cancel()
		})
		return result{Stderr: stderr.String(), Code: cmd.ProcessState.ExitCode()}
	}
	t.Cleanup(func() { stop() })
	for {
		line, err := reader.ReadString('\n')
		if err != nil {
			t.Fatalf("the run ended early: %+v", stop())
		}
		if line == "ready\n" {
			break
		}
	}
	return live{container: "agentshim-" + record(t, state).ID, state: state, stop: stop}
}

// TestLiveContainer looks at a running container from the host: no log, no health
// check, our label over the image's. And nothing is left at the end. P26, L13.
func TestLiveContainer(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		inspect := func(name, format string) string {
			return strings.TrimSpace(s.bare(t, "inspect", "--format", format, name).ok(t).Stdout)
		}
		marker := "marker-" + filepath.Base(s.folder(t))
		image := "agentshim/health:test"
		l := s.start(t, rootUser(spec{"image": image, "rootfsWritable": true}), "echo "+marker+"; sleep 2; ls / | grep health && exit 9")
		t.Run("no log", func(t *testing.T) {
			if got := inspect(l.container, "{{.HostConfig.LogConfig.Type}}"); got != "none" {
				t.Errorf("log driver %q", got)
			}
			for _, f := range s.logs(t, inspect(l.container, "{{.Id}}")) {
				if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), marker) {
					t.Errorf("%s holds the output", f)
				}
			}
		})
		t.Run("label", func(t *testing.T) {
			if got := inspect(l.container, `{{index .Config.Labels "agentshim.run"}}`); "agentshim-"+got != l.container {
				t.Errorf("agentshim.run is %q", got)
			}
		})
		t.Run("no health check", func(t *testing.T) {
			got := inspect(l.container, "{{json .Config.Healthcheck}}")
			if got != "null" && !strings.Contains(got, `"NONE"`) {
				t.Errorf("health check %s", got)
			}
			if s.engine == "podman" { // its timers need systemd: ask for the check by hand
				if r := s.bare(t, "healthcheck", "run", l.container); r.Code == 0 {
					t.Errorf("a health check ran")
				}
			}
		})
		if r := l.stop(); r.Code != 0 {
			t.Errorf("%+v", r) // 9: the check had run
		}
		t.Run("nothing is left", func(t *testing.T) {
			if r := s.bare(t, "inspect", l.container); r.Code == 0 {
				t.Errorf("%s is left", l.container)
			}
		})
		t.Run("control", func(t *testing.T) { s.liveControl(t, image, marker, inspect) })
	})
}

// liveControl: without the controls the engine keeps a log, runs the check, and
// keeps the container.
func (s setup) liveControl(t *testing.T, image, marker string, inspect func(name, format string) string) {
	id := strings.TrimSpace(s.bare(t, "run", "--detach", "--network=none", "--", image, "sh", "-c", "echo "+marker+"; sleep 600").ok(t).Stdout)
	defer func() {
		s.bare(t, "kill", id) // PID 1 has no handler for SIGTERM, and Podman would wait
		s.bare(t, "rm", "--force", "--volumes", id)
	}()
	if s.engine == "podman" {
		s.bare(t, "healthcheck", "run", id).ok(t)
	}
	eventually(t, "the health check runs", func() bool { return s.bare(t, "exec", id, "ls", "/health").Code == 0 })
	eventually(t, "the log holds the output", func() bool {
		return slices.ContainsFunc(s.logs(t, inspect(id, "{{.Id}}")), func(f string) bool {
			b, err := os.ReadFile(f)
			return err == nil && strings.Contains(string(b), marker)
		})
	})
}

// logs are the files in the engine's folders of a container.
func (s setup) logs(t *testing.T, id string) []string {
	t.Helper()
	pattern := "/var/lib/docker/containers"
	if s.engine == "podman" { // DRIVER-containers
		pattern = strings.TrimSpace(s.bare(t, "info", "--format", "{{.Store.GraphRoot}}").ok(t).Stdout) + "/*-containers"
	}
	dirs, err := filepath.Glob(filepath.Join(pattern, id))
	if err != nil || len(dirs) != 1 {
		t.Fatalf("the engine's folder of the container: %v %v", dirs, err)
	}
	dir := dirs[0]
	var files []string
	err = filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files = append(files, p)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// TestExitCodesAreToldApart: the harness's own 125 carries no word of agentshim's
// and no reason in the record; a refusal has both. P10.
func TestExitCodesAreToldApart(t *testing.T) {
	rows := []struct {
		name    string
		fields  spec
		script  string
		code    int
		reason  shim.Reason
		harness bool
	}{
		{name: "own 125", script: "exit 125", code: 125, harness: true},
		{name: "missing program", fields: spec{"harness": map[string]any{"binary": "/nope"}}, code: 125, reason: shim.ReasonHarnessMissing},
		{name: "missing image", fields: spec{"image": "agentshim/none:test"}, code: 125, reason: shim.ReasonImageMissing},
	}
	type end struct {
		Code    int
		Reason  shim.Reason
		Harness bool
		Speaks  bool
	}
	each(t, func(t *testing.T, s setup) {
		for _, row := range rows {
			t.Run(row.name, func(t *testing.T) {
				state := s.private(t)
				r := s.call(t, call{State: state}, "exec", "--quiet", "--result", filepath.Join(state, "result.json"), "--spec", s.write(t, row.fields), "--", row.script)
				b, err := os.ReadFile(filepath.Join(state, "result.json"))
				if err != nil {
					t.Fatal(err)
				}
				var rec shim.Record
				if err := json.Unmarshal(b, &rec); err != nil {
					t.Fatal(err)
				}
				got := end{rec.Exit, rec.Reason, rec.Harness != nil && rec.Harness.Code == row.code, strings.Contains(r.Stderr, "agentshim: ")}
				want := end{row.code, row.reason, row.harness, row.reason != ""}
				if d := cmp.Diff(want, got); d != "" || r.Code != row.code {
					t.Errorf("exit %d, record -want +got:\n%s\nstderr: %s", r.Code, d, r.Stderr)
				}
				if row.reason != "" {
					r.refused(t, row.reason)
				}
			})
		}
	})
}

// TestHostTmpfsKeepsItsMode: a folder on a tmpfs of the host's is no tmpfs of the
// sandbox's, whatever mode its owner gave it.
func TestHostTmpfsKeepsItsMode(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		if s.rootless() {
			return // its mount namespace, made by an earlier run, may not have the mount
		}
		dir := s.folder(t)
		mountTmpfs(t, dir, 0, "size=1m")
		s.own(t, dir)
		if err := os.Chmod(dir, 0o775); err != nil {
			t.Fatal(err)
		}
		s.sh(t, spec{"workspace": map[string]any{"source": dir, "mode": "writable"}}, "touch x").ok(t)
		st, err := os.Stat(dir)
		if err != nil || st.Mode().Perm() != 0o775 {
			t.Errorf("%v %v", st, err)
		}
	})
}
