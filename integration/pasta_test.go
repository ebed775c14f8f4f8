package integration

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/netpolicy"
	plans "github.com/agentshim/agentshim/spec"
)

// pastaRules put packet rules in and then run a command: iptables' text, then ip6tables'.
const pastaRules = `printf %s "$1" | iptables-restore --noflush && printf %s "$2" | ip6tables-restore --noflush && shift 2 && exec "$@"`

// TestPasta: A37, N20: pasta itself, with what agentshim asks of it and the packet rules of
// mode network: the host's loopback is closed by each of the two where they reach. No
// Podman of the test machine has pasta. The controls are pasta's defaults, and the rules left out.
func TestPasta(t *testing.T) {
	w, s := outside(t), setups[3]
	options := func(ipv6 bool) []string {
		n := plans.UserNetwork(plans.PastaNetwork, ipv6)
		p := plans.Plan{Engine: plans.Engine{Kind: plans.Podman}, Egress: netpolicy.Policy{Network: &n}}
		_, text, _ := strings.Cut(p.NetworkMode(), ":")
		return strings.Split(text, ",")
	}
	rules := func(ipv6 bool) []string {
		n := plans.UserNetwork(plans.PastaNetwork, ipv6)
		e := harness.Egress{Mode: netpolicy.AttachNetwork, Allow: []harness.Allow{{Host: "0.0.0.0/0"}, {Host: "::/0"}}, Deny: []string{"192.175.48.45"}}
		p, err := netpolicy.Compile(e, nil, &n)
		if err != nil {
			t.Fatal(err)
		}
		four, six, _ := strings.Cut(p.Rules(true).Iptables(), "# ip6tables\n")
		return append([]string{"sh", "-c", pastaRules, "sh"}, four, six)
	}
	var (
		loopback, loopback6 = []string{"tcp", at("127.0.0.1", otherServicePort)}, []string{"tcp", at("::1", otherServicePort)}
		gateway, gateway6   = []string{"tcp", at("10.0.2.2", otherServicePort)}, []string{"tcp", at("fd00::2", otherServicePort)}
		theirs              = []string{"tcp", at(worldAddr, otherServicePort)}
		good, good6         = []string{"tcp", "192.175.48.40:9007", "x"}, []string{"tcp", at(publicAddr6, echoPort), "x"}
		denied              = []string{"udp", "192.175.48.45:9007", "x"}
	)
	const host = "ok: host 127.0.0.1:3001"
	mapped := func(list []string) []string { // the host's loopback at the gateway's address, as is pasta's default
		return strings.Split(strings.Replace(strings.Join(list, ","), "--no-map-gw,", "", 1), ",")
	}
	for name, c := range map[string]struct {
		options, rules []string
		want           map[string]string
	}{
		"pasta's defaults": {nil, nil, map[string]string{
			strings.Join(loopback, " "): host, strings.Join(theirs, " "): host, strings.Join(denied, " "): "ok: x",
		}},
		"the host's loopback at the gateway": {mapped(options(false)), nil, map[string]string{strings.Join(gateway, " "): host}},
		"the same and rules":                 {mapped(options(false)), rules(false), map[string]string{strings.Join(gateway, " "): "ECONNREFUSED"}},
		"no rules": {options(false), nil, map[string]string{
			strings.Join(loopback, " "): "ECONNREFUSED", strings.Join(gateway, " "): "timeout*", strings.Join(good, " "): "ok: x",
			strings.Join(denied, " "): "ok: x", strings.Join(good6, " "): "ENETUNREACH|EADDRNOTAVAIL",
		}},
		"rules": {options(false), rules(false), map[string]string{
			strings.Join(loopback, " "): "ECONNREFUSED", strings.Join(gateway, " "): "ECONNREFUSED", strings.Join(good, " "): "ok: x", strings.Join(denied, " "): "EPERM",
		}},
		"IPv6 and rules": {options(true), rules(true), map[string]string{
			strings.Join(loopback6, " "): "ECONNREFUSED", strings.Join(gateway6, " "): "ECONNREFUSED", strings.Join(good, " "): "ok: x", strings.Join(good6, " "): "ok: x",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var ops attempts
			for op := range c.want {
				ops = append(ops, strings.Fields(op))
			}
			args := append([]string{"--config-net", "--quiet"}, c.options...)
			args = append(append(append(args, "--"), c.rules...), filepath.Join(mustReach(t), "reach"), ops.json(t))
			cmd, cancel := s.command(t, call{Net: w}, "pasta", args...)
			defer cancel()
			got := endings(t, finish(t, cmd), ops)
			for op, want := range c.want {
				if out := got.of(strings.Fields(op)...); !isOutcome(want, out) {
					t.Errorf("%s: %s, want %s", op, out, want)
				}
			}
		})
	}
}
