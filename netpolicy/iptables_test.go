package netpolicy

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

// eachBackend runs f in a network namespace for each back end of iptables.
func eachBackend(t *testing.T, f func(t *testing.T, dir string)) {
	for _, backend := range []string{"nft", "legacy"} {
		t.Run(backend, func(t *testing.T) {
			dir := useBackend(t, backend)
			inNetns(t, func() { f(t, dir) })
		})
	}
}

// mustRun is one program in the thread's network namespace.
func mustRun(t *testing.T, path string, args ...string) string {
	t.Helper()
	out, err := run(path, "", args...)
	if err != nil {
		t.Error(err)
	}
	return out
}

func mustFind(t *testing.T, r Ruleset) programs {
	t.Helper()
	ps, err := findIptables(r, 1)
	if err != nil {
		t.Error(err)
	}
	return ps
}

// TestIptablesIsExact: N04: other rules stay and come after, a second time is refused and
// changes nothing, and what somebody changed is noticed.
func TestIptablesIsExact(t *testing.T) {
	eachBackend(t, func(t *testing.T, dir string) {
		iptables := filepath.Join(dir, "iptables")
		mustRun(t, iptables, "-t", "nat", "-N", "THEIRS")
		mustRun(t, iptables, "-t", "nat", "-A", "OUTPUT", "-d", "127.0.0.11", "-j", "THEIRS")
		rules := SandboxRules(true)
		ps := mustFind(t, rules)
		if _, err := ps.apply(rules); err != nil {
			t.Error(err)
			return
		}
		if got, err := ps.read(rules); err != nil || got != rules.Iptables() {
			t.Errorf("%v\n%s", err, got)
		}
		if out := mustRun(t, iptables, "-t", "nat", "-S", "OUTPUT"); !strings.HasSuffix(out, "-A OUTPUT -j AGENTSHIM-OUTPUT\n-A OUTPUT -d 127.0.0.11/32 -j THEIRS\n") {
			t.Errorf("the others' rule: %s", out)
		}
		before := mustRun(t, iptables+"-save")
		if _, err := ps.apply(OpenRules(5354, 8081)); !errors.Is(err, ErrIptables) {
			t.Errorf("a second time: %v", err)
		}
		if after := mustRun(t, iptables+"-save"); stripComments(after) != stripComments(before) {
			t.Errorf("the second time changed\n%s\n%s", before, after)
		}
		for _, change := range [][2]string{
			{"-I OUTPUT 1 -d 192.0.2.1 -j ACCEPT", "-D OUTPUT 1"},
			{"-I AGENTSHIM-OUTPUT 1 -d 192.0.2.1 -j ACCEPT", "-D AGENTSHIM-OUTPUT 1"},
			{"-A AGENTSHIM-OUTPUT -j ACCEPT", "-D AGENTSHIM-OUTPUT -j ACCEPT"},
			{"-D OUTPUT -j AGENTSHIM-OUTPUT", "-I OUTPUT 1 -j AGENTSHIM-OUTPUT"},
		} {
			mustRun(t, iptables, strings.Fields(change[0])...)
			if _, err := ps.read(rules); !errors.Is(err, ErrReadBack) {
				t.Errorf("%s: %v", change[0], err)
			}
			mustRun(t, iptables, strings.Fields(change[1])...)
			if _, err := ps.read(rules); err != nil {
				t.Errorf("%s: %v", change[1], err)
			}
		}
	})
}

// stripComments takes the times and packet counts out of iptables-save's text.
func stripComments(text string) string {
	var out []string
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, ":") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "")
}

// TestOtherBackend: N09: rules of the other back end are seen, by each renderer.
func TestOtherBackend(t *testing.T) {
	rules := SandboxRules(true)
	eachBackend(t, func(t *testing.T, dir string) {
		ps := mustFind(t, rules)
		others := func() string {
			t.Helper()
			text, err := ps.others()
			if err != nil {
				t.Error(err)
			}
			return text
		}
		if _, err := ps.apply(rules); err != nil {
			t.Error(err)
		}
		legacy := filepath.Join(dir, "iptables-legacy")
		if text := others(); text != "" {
			t.Errorf("alone: %s", text)
		}
		if ps[false].legacy() {
			conn, err := nftables.New()
			if err != nil {
				t.Error(err)
				return
			}
			drop := nftables.ChainPolicyDrop
			conn.AddChain(&nftables.Chain{
				Name: "c", Table: conn.AddTable(&nftables.Table{Name: "theirs", Family: nftables.TableFamilyIPv4}), Type: nftables.ChainTypeFilter,
				Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityFilter, Policy: &drop,
			})
			if err := conn.Flush(); err != nil {
				t.Error(err)
			}
		} else {
			mustRun(t, legacy, "-S") // makes the table, without a rule
			if text := others(); text != "" {
				t.Errorf("an empty table: %s", text)
			}
			mustRun(t, legacy, "-A", "OUTPUT", "-d", "192.0.2.1", "-j", "DROP")
			if text, err := (netlinkRules{}).others(); err != nil || text == "" {
				t.Errorf("for nftables: %q %v", text, err)
			}
		}
		if others() == "" {
			t.Error("the other back end's rules are not seen")
		}
		if err := os.Remove(legacy); err != nil {
			t.Error(err)
		}
		if others() == "" {
			t.Error("without the legacy program what is there is taken for nothing")
		}
	})
}

// TestIptablesLock: N10: a lock that another program holds is waited for, but not for long;
// then nothing is there. The control is another lock.
func TestIptablesLock(t *testing.T) {
	dir := useBackend(t, "legacy")
	rules := SandboxRules(true)
	for _, name := range []string{"lock", "other"} {
		t.Run(name, func(t *testing.T) {
			fd, err := unix.Open(filepath.Join(dir, name), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			if err := unix.Flock(fd, unix.LOCK_EX); err != nil {
				t.Fatal(err)
			}
			inNetns(t, func() {
				_, err := mustFind(t, rules).apply(rules)
				if name == "other" {
					if err != nil {
						t.Error(err)
					}
					return
				}
				if !errors.Is(err, ErrIptables) || !strings.Contains(err.Error(), "xtables lock") {
					t.Errorf("%v", err)
				}
				if b, err := os.ReadFile("/proc/thread-self/net/ip_tables_names"); err != nil || len(b) > 0 {
					t.Errorf("tables %q %v", b, err)
				}
			})
		})
	}
}

// TestIptablesMissing: what the rules need must be there, of one back end.
func TestIptablesMissing(t *testing.T) {
	replace := func(name, target string) func(dir string) error {
		return func(dir string) error {
			path := filepath.Join(dir, name)
			if err := os.Remove(path); err != nil || target == "" {
				return err
			}
			return os.Symlink(target, path)
		}
	}
	const legacy = "/usr/sbin/xtables-legacy-multi"
	for name, tt := range map[string]struct {
		spoil       func(dir string) error
		four, sixes bool // whether rules without and with IPv6 can be put in
	}{
		"all there":            {func(string) error { return nil }, true, true},
		"no iptables":          {replace("iptables", ""), false, false},
		"no iptables-restore":  {replace("iptables-restore", ""), false, false},
		"no ip6tables":         {replace("ip6tables", ""), true, false},
		"no ip6tables-restore": {replace("ip6tables-restore", ""), true, false},
		"ip6tables of another": {func(dir string) error {
			return errors.Join(replace("ip6tables", legacy)(dir), replace("ip6tables-restore", legacy)(dir))
		}, true, false},
		"iptables-restore of another": {replace("iptables-restore", legacy), false, false},
		"another program":             {replace("iptables-restore", "/bin/true"), false, false},
	} {
		t.Run(name, func(t *testing.T) {
			if err := tt.spoil(useBackend(t, "nft")); err != nil {
				t.Fatal(err)
			}
			for _, six := range []bool{false, true} {
				want := tt.four
				if six {
					want = tt.sixes
				}
				inNetns(t, func() {
					rules := SandboxRules(six)
					ps, err := findIptables(rules, 1)
					if err == nil {
						_, err = ps.apply(rules)
					}
					if (err == nil) != want {
						t.Errorf("IPv6 %v: %v", six, err)
					}
					if err != nil && !errors.Is(err, ErrIptables) && !errors.Is(err, ErrReadBack) && !errors.Is(err, exec.ErrNotFound) {
						t.Errorf("IPv6 %v: %v", six, err)
					}
				})
			}
		})
	}
}

// TestBackend: the text by which a back end is told.
func TestBackend(t *testing.T) {
	for version, want := range map[string]string{
		"iptables-restore v1.8.9 (nf_tables)": "v1.8.9 nf_tables", "iptables-restore v1.8.9 (legacy)": "v1.8.9 legacy",
		"iptables-restore v1.6.1": "v1.6.1 legacy", "": "unknown", "busybox": "unknown",
	} {
		p := program{version: version}
		if got := p.backend(); got != want || p.legacy() != strings.HasSuffix(want, " legacy") {
			t.Errorf("%q: %s", version, got)
		}
	}
}

// TestNoNftables: only a kernel's own answer says that nf_tables is absent.
func TestNoNftables(t *testing.T) {
	for err, want := range map[error]bool{
		nil: false, unix.EINVAL: true, unix.EPROTONOSUPPORT: true, unix.EAFNOSUPPORT: true,
		unix.EPERM: false, unix.EACCES: false, unix.EAGAIN: false, unix.EINTR: false, unix.ENOBUFS: false, unix.EMFILE: false, unix.EBADMSG: false,
	} {
		if NoNftables(err) != want {
			t.Errorf("%v: %v", err, !want)
		}
	}
}

// TestNftRulesMayNotAsk: who may not look is not told that nothing is there. The control is
// root.
func TestNftRulesMayNotAsk(t *testing.T) {
	inNetns(t, func() {
		if text, err := nftRules(); text != "" || err != nil {
			t.Errorf("control: %q %v", text, err)
		}
		// This thread only; the rest of the program keeps its user.
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, 65534, 65534, 65534); errno != 0 {
			t.Error(errno)
			return
		}
		if text, err := nftRules(); text != "" || !errors.Is(err, unix.EPERM) {
			t.Errorf("%q %v", text, err)
		}
	})
}

// TestAutoRenderer: who may not ask whether there is nf_tables gets an error, not the other
// renderer. The control is root.
func TestAutoRenderer(t *testing.T) {
	useBackend(t, "legacy")
	inNetns(t, func() {
		if r, err := newRenderer(Auto, SandboxRules(true)); err != nil || r.name() != Nftables {
			t.Errorf("control: %v %v", r, err)
		}
		// This thread only; the rest of the program keeps its user.
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, 65534, 65534, 65534); errno != 0 {
			t.Error(errno)
			return
		}
		if r, err := newRenderer(Auto, SandboxRules(true)); !errors.Is(err, unix.EPERM) {
			t.Errorf("%v %v", r, err)
		}
	})
}
