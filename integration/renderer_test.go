package integration

import (
	"strings"
	"testing"

	"github.com/agentshim/agentshim/shim"
)

// withBackend has a command run where iptables is the programs of one back end: in a mount
// namespace of its own, in which Debian's default ones are covered.
func withBackend(backend, path string, args []string) (string, []string) {
	return "unshare", append([]string{
		"--mount", "sh", "-c", `mount --bind "/usr/sbin/xtables-$1-multi" /usr/sbin/xtables-nft-multi && shift && exec "$@"`,
		"sh", backend, path,
	}, args...)
}

// TestLegacyIptables: both back ends of iptables, as root, give the same; the record says
// which it was.
func TestLegacyIptables(t *testing.T) {
	w := outside(t)
	w.settle()
	rows := battery()
	for _, s := range setups {
		if !s.root() {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			for _, backend := range []string{"nft", "legacy"} {
				state := s.private(t)
				file := s.write(t, reachFields(t, byIptables(allowed()), nil))
				path, args := withBackend(backend, agentshim, []string{"exec", "--spec", file, "--", opsOf(rows).json(t)})
				w.rebind()
				cmd, cancel := s.command(t, call{Net: w, State: state}, path, args...)
				r := finish(t, cmd)
				cancel()
				got := endings(t, r, opsOf(rows))
				for _, row := range rows {
					if out := got.of(row.op...); row.list != "" && !isOutcome(row.list, out) {
						t.Errorf("%s: %s: %s, want %s", backend, row.name, out, row.list)
					}
				}
				suffix := map[string]string{"nft": " nf_tables", "legacy": " legacy"}[backend]
				if by := record(t, state).Egress.Renderer; !strings.HasPrefix(by, "iptables v") || !strings.HasSuffix(by, suffix) {
					t.Errorf("%s: the record says %q", backend, by)
				}
				if strings.Contains(r.Stderr, "warning") {
					t.Errorf("%s: %s", backend, r.Stderr)
				}
			}
		})
	}
}

// TestIptablesRefused: where there is no iptables, or a program of it is missing, nothing
// runs, and the remedy is said. The controls are a caller who has it and nftables.
func TestIptablesRefused(t *testing.T) {
	inTurn(t, func(t *testing.T, s setup) {
		list := map[string]any{"mode": "allow-list", "allow": []any{"api.allowed.example"}}
		file := s.write(t, spec{"egress": byIptables(list)})
		if s.name == "docker-group" {
			if r := s.exec(t, file, "echo ran").refused(t, shim.ReasonEgressSetup); !strings.Contains(r.Stderr, "agentshim: hint: leave egress.renderer out") {
				t.Errorf("%s", r.Stderr)
			}
			list["renderer"] = "auto"
			s.exec(t, s.write(t, spec{"egress": list}), "echo ran").ok(t)
			return
		}
		s.exec(t, file, "echo ran").ok(t)
		if !s.root() {
			return // its helper runs in the mount namespace of Podman's own process
		}
		const cover = `mount -t tmpfs none /usr/local/sbin && ln -s /bin/false /usr/local/sbin/ip6tables && exec "$@"`
		cmd, cancel := s.command(t, call{}, "unshare", "--mount", "sh", "-c", cover, "sh", agentshim, "exec", "--spec", file, "--", "echo ran")
		defer cancel()
		r := finish(t, cmd).refused(t, shim.ReasonEgressSetup)
		if !strings.Contains(r.Stderr, "ip6tables") || !strings.Contains(r.Stderr, "agentshim: hint: install iptables") {
			t.Errorf("%s", r.Stderr)
		}
	})
}

// TestIptablesLockHeld: N10: the lock that all programs of the legacy back end share, held
// by another one, keeps no run waiting. The control is iptables itself.
func TestIptablesLockHeld(t *testing.T) {
	w := outside(t)
	s := setups[0]
	file := s.write(t, spec{"egress": byIptables(map[string]any{"mode": "open"})})
	held := func(path string, args ...string) result {
		path, args = withBackend("legacy", path, args)
		cmd, cancel := s.command(t, call{Net: w}, "flock", append([]string{"/run/xtables.lock", path}, args...)...)
		defer cancel()
		return finish(t, cmd)
	}
	held(agentshim, "exec", "--spec", file, "--", "echo ran").ok(t)
	if r := held("iptables", "--wait", "1", "-S"); r.Code != 4 {
		t.Errorf("control: %+v", r)
	}
}
