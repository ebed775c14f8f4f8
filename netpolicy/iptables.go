package netpolicy

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/coreos/go-iptables/iptables"
)

// iptablesChain is agentshim's own chain of each hook; what is in other chains is never
// touched.
const iptablesChain = "AGENTSHIM"

// iptablesWait bounds the wait for the lock that all programs of the legacy back end
// share, in seconds.
const iptablesWait = 5

// ErrIptables says that the host's iptables can't be used.
var ErrIptables = errors.New("iptables")

// program is iptables of one family.
type program struct {
	*iptables.IPTables
	// restore is the path of its iptables-restore, version what that says of itself:
	// "iptables-restore v1.8.9 (nf_tables)".
	restore, version string
	wait             int
}

// programs are the host's iptables, by IPv6.
type programs map[bool]program

// findIptables finds what the rules need, in this program's PATH. Both programs of both
// families must have the same version and back end.
// Wait is in seconds.
func findIptables(r Ruleset, wait int) (programs, error) {
	found := programs{}
	for _, c := range r.Chains {
		if _, ok := found[c.IPv6]; ok {
			continue
		}
		p, err := findProgram(c.IPv6, wait)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrIptables, err)
		}
		found[c.IPv6] = p
	}
	four, six := found[false], found[true]
	if six.restore != "" && four.backend() != six.backend() {
		return nil, fmt.Errorf("%w: %s is %s, %s is %s", ErrIptables, four.restore, four.backend(), six.restore, six.backend())
	}
	return found, nil
}

func findProgram(six bool, wait int) (program, error) {
	name, family := "iptables", iptables.ProtocolIPv4
	if six {
		name, family = "ip6tables", iptables.ProtocolIPv6
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return program{}, err
	}
	p := program{restore: path + "-restore", wait: wait}
	if p.IPTables, err = iptables.New(iptables.IPFamily(family), iptables.Path(path), iptables.Timeout(wait)); err != nil {
		return program{}, fmt.Errorf("%s: %w", path, err)
	}
	p.version, err = run(p.restore, "", "--version")
	p.version = strings.TrimSpace(p.version)
	x, y, z := p.GetIptablesVersion()
	if own := fmt.Sprintf("v%d.%d.%d", x, y, z); err == nil && !slices.Contains(strings.Fields(p.version), own) {
		err = fmt.Errorf("%s is %s, %s is %q", path, own, p.restore, p.version)
	}
	return p, err
}

// backend is nf_tables or legacy, behind the version: "v1.8.9 nf_tables".
func (p program) backend() string {
	words := strings.Fields(strings.NewReplacer("(", "", ")", "").Replace(p.version))
	if len(words) < 2 {
		return "unknown"
	}
	if words = words[1:]; len(words) == 1 {
		words = append(words, "legacy") // before 1.8 there is no other, and nothing says so
	}
	return words[0] + " " + words[1]
}

func (p program) legacy() bool { return strings.HasSuffix(p.backend(), " legacy") }

// run is one program, with this one's environment.
func run(path, stdin string, args ...string) (string, error) {
	cmd := exec.Command(path, args...) //nolint:forbidigo // the helper runs where no Runner is
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", path, err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

func (ps programs) name() string { return "iptables " + ps[false].backend() }

// apply puts the rules into the thread's network namespace, each table in one
// transaction, and reads them back by the same program. Where agentshim's own chains are
// there already, nothing is changed.
func (ps programs) apply(r Ruleset) (string, error) {
	for _, c := range r.Chains {
		there, err := ps[c.IPv6].ChainExists(c.Table, c.own())
		if err != nil {
			return "", fmt.Errorf("%w: %w", ErrIptables, err)
		}
		if there {
			return "", fmt.Errorf("%w: table %s has a chain %s already", ErrIptables, c.Table, c.own())
		}
	}
	for _, six := range []bool{false, true} {
		p, needed := ps[six]
		if !needed {
			continue
		}
		if _, err := run(p.restore, r.restore(six), "--noflush", "--wait="+strconv.Itoa(p.wait)); err != nil {
			return "", fmt.Errorf("%w: %w", ErrIptables, err)
		}
	}
	return ps.read(r)
}

// own is the name of agentshim's chain of the hook.
func (c Chain) own() string {
	if c.Part != "" {
		return iptablesChain + "-" + c.Hook() + "-" + c.Part
	}
	return iptablesChain + "-" + c.Hook()
}

// restore renders the family's rules for iptables-restore: own chains that the hooks'
// chains go to first. A drop at the end stands for a policy, which is not agentshim's own.
func (r Ruleset) restore(six bool) string {
	var b strings.Builder
	for _, c := range r.Chains {
		if c.IPv6 != six {
			continue
		}
		fmt.Fprintf(&b, "*%s\n:%s - [0:0]\n-I %s %d -j %s\n", c.Table, c.own(), c.Hook(), c.place()+1, c.own())
		for _, line := range c.ownLines() {
			b.WriteString(line + "\n")
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

// ownLines are the rules of the own chain as `iptables -S` prints them.
func (c Chain) ownLines() []string {
	lines := c.lines(c.own())
	if c.Policy == Drop {
		lines = append(lines, "-A "+c.own()+" -j DROP")
	}
	return lines
}

// read compares agentshim's own chains, and that their hooks go to them first, and gives
// the rules as Ruleset.Iptables does. A difference is ErrReadBack.
func (ps programs) read(r Ruleset) (string, error) {
	for _, c := range r.Chains {
		hook, err := ps[c.IPv6].rules(c.Table, c.Hook())
		if err != nil {
			return "", err
		}
		if want := "-A " + c.Hook() + " -j " + c.own(); len(hook) <= c.place() || hook[c.place()] != want {
			return "", fmt.Errorf("%w: table %s does not begin with %q: %q", ErrReadBack, c.Table, want, hook)
		}
		own, err := ps[c.IPv6].rules(c.Table, c.own())
		if err != nil {
			return "", err
		}
		if want := c.ownLines(); !slices.Equal(own, want) {
			return "", fmt.Errorf("%w: table %s: %s", ErrReadBack, c.Table, firstDifference(want, own))
		}
	}
	return r.Iptables(), nil
}

// firstDifference names the first line that two lists don't have both.
func firstDifference(want, got []string) string {
	i := 0
	for i < min(len(want), len(got)) && want[i] == got[i] {
		i++
	}
	line := func(lines []string) string {
		return strconv.Quote(strings.Join(lines[min(i, len(lines)):min(i+1, len(lines))], ""))
	}
	return fmt.Sprintf("line %d: want %s, got %s", i+1, line(want), line(got))
}

// rules are a chain's, without the lines that say its policy or name.
func (p program) rules(table, chain string) ([]string, error) {
	lines, err := p.List(table, chain)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrIptables, err)
	}
	var out []string
	for _, l := range lines {
		if strings.HasPrefix(l, "-A ") {
			out = append(out, strings.Replace(l, "-j CT --notrack", "-j NOTRACK", 1)) // the same target, by version
		}
	}
	return out, nil
}
