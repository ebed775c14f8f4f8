package integration

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// nestedSandboxes are what agents bring along, each told to keep a program from writing where
// the container lets it. Codex's goes on without a /proc of its own where it gets none.
var nestedSandboxes = []struct{ name, command string }{
	{"bubblewrap", `bwrap --ro-bind / / --dev-bind /dev /dev true && bwrap --ro-bind / / --dev-bind /dev /dev sh -c '! echo x >/tmp/f' && echo held`},
	{"bubblewrap, processes, network and more of its own", `bwrap --ro-bind / / --dev-bind /dev /dev --unshare-all sh -c '! echo x >/tmp/f && kill -9 -1; echo held'`},
	{"bubblewrap, a /proc of its own", ownProc},
	{"codex", `cd "$HOME" && codex sandbox -- sh -c '! echo x >/tmp/f && echo held' 2>&1`},
}

// ownProc works only where nothing of /proc is masked.
const ownProc = `bwrap --ro-bind / / --dev-bind /dev /dev --unshare-pid --proc /proc sh -c '! echo x >/tmp/f && test $$ -lt 9 && echo held'`

// TestNestedSandboxes: C12, they work under the profile nested. The control is the default
// one, which refuses what they begin with.
func TestNestedSandboxes(t *testing.T) {
	var ops attempts
	for _, b := range nestedSandboxes {
		ops = append(ops, []string{"run", "sh", "-c", b.command})
	}
	each(t, func(t *testing.T, s setup) {
		run := func(profile string, accept ...string) tried {
			file := s.write(t, programFields(t, spec{
				"seccomp": map[string]any{"profile": profile}, "accept": append(accept, "rootless-cgroup-limits"),
			}))
			return endings(t, s.exec(t, file, ops.json(t)), ops)
		}
		standard, nested, unmasked := run("default"), run("nested", "nested-seccomp"), run("nested", "nested-seccomp", "unmasked-proc")
		for i, b := range nestedSandboxes {
			want := "ok: held"
			if b.command == ownProc {
				want = "ok: exit 1 bwrap: Can't mount proc on *: Operation not permitted"
			}
			if out := strings.TrimSuffix(nested.of(ops[i]...), " late"); !isOutcome(want, out) {
				t.Errorf("%s: %s, want %s", b.name, out, want)
			}
			if out := strings.TrimSuffix(unmasked.of(ops[i]...), " late"); out != "ok: held" {
				t.Errorf("%s with /proc unmasked: %s", b.name, out)
			}
			if out := standard.of(ops[i]...); !isOutcome("ok: exit 1 bwrap: No permissions to create new namespace*", out) {
				t.Errorf("%s under the default policy: %s", b.name, out)
			}
		}
	})
}

// TestNestedEgress: the rows of the battery about names and packets end the same for root with
// all capabilities in a sandbox of the agent's own. The battery has their control.
func TestNestedEgress(t *testing.T) {
	w := outside(t)
	w.settle()
	const api = "api.allowed.example"
	rows := slices.DeleteFunc(append(nameRows(api), transportRows(api)...), func(r row) bool {
		return slices.Contains(r.op, "unshare") // which nested allows
	})
	ops := attempts{append(strings.Fields("run bwrap --unshare-user --uid 0 --cap-add ALL --ro-bind / / --dev-bind /dev /dev /reach/reach"), opsOf(rows).json(t))}
	inTurn(t, func(t *testing.T, s setup) {
		file := s.write(t, programFields(t, spec{
			"egress": allowed(), "seccomp": map[string]any{"profile": "nested"}, "accept": []string{"nested-seccomp", "rootless-cgroup-limits"},
		}))
		r := s.call(t, call{Net: w}, "exec", "--spec", file, "--", ops.json(t))
		out := strings.TrimSuffix(strings.TrimPrefix(endings(t, r, ops).of(ops[0]...), "ok: "), " late")
		got := endings(t, result{Stdout: out}, opsOf(rows))
		for _, row := range rows {
			if out := got.of(row.op...); row.list != "" && !isOutcome(row.list, out) {
				t.Errorf("%s: %s, want %s", row.name, out, row.list)
			}
		}
	})
}

// TestNestedPowers: root with all capabilities in a user namespace of the agent's own has
// none over what is the container's: its network, and init. The control runs are the same on
// a network namespace that belongs to the user namespace, and on the process itself.
func TestNestedPowers(t *testing.T) {
	own := func(op ...string) []string {
		return []string{"nested", "run", "/bin/unshare", "-n", "/try/try", attempts{op}.json(t)}
	}
	raw := []string{"syscall", fmt.Sprint(unix.SYS_SOCKET), fmt.Sprint(unix.AF_INET), fmt.Sprint(unix.SOCK_RAW), fmt.Sprint(unix.IPPROTO_ICMP)}
	ip := func(words string) []string { return append([]string{"run", "/bin/ip"}, strings.Fields(words)...) }
	address, route := ip("addr add 192.0.2.2/32 dev lo"), ip("route add local 192.0.2.0/24 dev lo table local")
	const denied = "ok: exit status 2\nip: RTNETLINK answers: Operation not permitted"
	trials := []struct {
		name          string
		op, control   []string
		want, granted string
	}{
		{"raw socket", raw, own(raw...), "EPERM", `ok: ["ok"]`},
		{"address", address, own(address...), denied, `ok: ["ok"]`},
		{"route", route, own(route...), denied, `ok: ["ok"]`},
		{"init's memory", []string{"openread", "/proc/1/mem"}, []string{"nested", "openread", "/proc/self/mem"}, "EACCES", "ok"},
		{"init's environment", []string{"openread", "/proc/1/environ"}, []string{"nested", "openread", "/proc/self/environ"}, "EACCES", "ok"},
		{"init's network namespace", []string{"openread", "/proc/1/ns/net"}, []string{"nested", "openread", "/proc/self/ns/net"}, "EACCES", "ok"},
		{"the end of init", []string{"run", "/bin/kill", "-9", "1"}, []string{"nested", "run", "/bin/sh", "-c", "sleep 9 & kill -9 $!"}, "ok", "ok"},
		{"init's priority", []string{"syscall", fmt.Sprint(unix.SYS_SETPRIORITY), "0", "1", "19"}, []string{"nested", "syscall", fmt.Sprint(unix.SYS_SETPRIORITY), "0", "0", "19"}, "EPERM", "ok"},
	}
	var ops attempts
	for _, tr := range trials {
		ops = append(ops, append([]string{"nested"}, tr.op...), tr.control)
	}
	each(t, func(t *testing.T, s setup) {
		got, _ := s.try(t, spec{"seccomp": map[string]any{"profile": "nested"}, "accept": []string{"nested-seccomp", "rootless-cgroup-limits"}}, ops)
		for i, tr := range trials {
			if out := got.of(ops[2*i]...); out != "ok: "+tr.want {
				t.Errorf("%s: %s, want %s", tr.name, out, tr.want)
			}
			if out := got.of(tr.control...); out != "ok: "+tr.granted {
				t.Errorf("%s, control: %s, want %s", tr.name, out, tr.granted)
			}
		}
	})
}
