package netpolicy

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

// The renderers: what puts the packet rules into a network namespace.
const (
	// Nftables talks to the kernel itself and needs no program.
	Nftables = "nftables"
	// Iptables runs the host's iptables-restore and ip6tables-restore.
	Iptables = "iptables"
	// Auto is Nftables, or Iptables where the kernel has no nf_tables, which is asked in the
	// network namespace itself.
	Auto = "auto"
)

// renderer is one of them.
type renderer interface {
	// apply puts the rules in, reads them back and gives them as Ruleset.Iptables does. A
	// difference is ErrReadBack.
	apply(Ruleset) (string, error)
	// name says what it is, for people.
	name() string
	// others says what of the other back end holds rules in this namespace, which are in
	// force too; empty for nothing.
	others() (string, error)
}

// newRenderer finds the named one; empty is Nftables.
func newRenderer(name string, r Ruleset) (renderer, error) {
	switch name {
	case "", Nftables:
		return netlinkRules{}, nil
	case Iptables:
		return findIptables(r, iptablesWait)
	case Auto:
		return autoRenderer(r)
	}
	return nil, fmt.Errorf("renderer %q: there is none", name)
}

// autoRenderer takes an answer that the kernel has no nf_tables for one, and no other error.
func autoRenderer(r Ruleset) (renderer, error) {
	conn, err := nftables.New()
	if err == nil {
		_, err = conn.ListTables()
	}
	switch {
	case NoNftables(err):
		return findIptables(r, iptablesWait)
	case err != nil:
		return nil, fmt.Errorf("nftables: %w", err)
	}
	return netlinkRules{}, nil
}

// netlinkRules is the renderer that speaks netlink.
type netlinkRules struct{}

func (netlinkRules) apply(r Ruleset) (string, error) {
	got, err := applyNftables(r)
	return got.Iptables(), err
}

func (netlinkRules) name() string { return Nftables }

func (netlinkRules) others() (string, error) { return legacyRules() }

func (ps programs) others() (string, error) {
	if ps[false].legacy() {
		return nftRules()
	}
	return legacyRules()
}

// nftRules names a table of nf_tables that holds rules.
func nftRules() (string, error) {
	conn, err := nftables.New()
	if err != nil {
		return "", fmt.Errorf("nftables: %w", err)
	}
	chains, err := conn.ListChains()
	if NoNftables(err) {
		return "", nil // nor any rules of it
	}
	if err != nil {
		return "", fmt.Errorf("nftables: %w", err)
	}
	for _, c := range chains {
		rules, err := conn.GetRules(c.Table, c)
		if err != nil {
			return "", fmt.Errorf("nftables: %w", err)
		}
		if len(rules) > 0 || c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop {
			return "nf_tables table " + c.Table.Name, nil
		}
	}
	return "", nil
}

// NoNftables reports whether err is a kernel's answer that it has no nf_tables: no family
// of sockets that it is asked through, or nobody who takes the message
// (nfnetlink_rcv_msg, which looks for a module first). Who may not ask, or gets no answer,
// is told nothing by it.
func NoNftables(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EAFNOSUPPORT)
}

// legacyRules names a legacy table that holds rules, or may: only the legacy program can
// tell a table that was looked at from one that is used.
func legacyRules() (string, error) {
	for _, family := range []string{"ip", "ip6"} {
		b, err := os.ReadFile("/proc/thread-self/net/" + family + "_tables_names")
		if errors.Is(err, fs.ErrPermission) {
			return "legacy " + family + "tables, perhaps: its tables can't be looked at", nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		for table := range strings.FieldsSeq(string(b)) {
			if legacyHolds(family, table) {
				return "legacy " + family + "tables, table " + table, nil
			}
		}
	}
	return "", nil
}

func legacyHolds(family, table string) bool {
	path, err := exec.LookPath(family + "tables-legacy")
	if err != nil {
		return true
	}
	text, err := run(path, "", "--wait", strconv.Itoa(iptablesWait), "-t", table, "-S")
	return err != nil || strings.Contains(text, "\n-A ") || strings.Contains(text, " DROP\n")
}
