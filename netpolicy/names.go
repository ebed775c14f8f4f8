package netpolicy

import (
	"net/netip"
	"sync"
)

// Bounds of the names of one run.
const (
	// MaxNames is how many names get an address. A wildcard lets an agent ask for any
	// number of them.
	MaxNames = 16384
	// firstName is the first address given out: those below are the sandbox's own.
	firstName = 256
)

// namePool is where synthetic addresses come from (RFC 2544: no host has them).
var namePool = netip.MustParsePrefix("198.18.0.0/15")

// Names gives each permitted name of a run an address that stands for it, and never
// for another one as long as the run lasts. It is safe for concurrent use.
type Names struct {
	mu     sync.Mutex
	byName map[string]netip.Addr
	list   []string
}

// NewNames returns an empty pool.
func NewNames() *Names { return &Names{byName: map[string]netip.Addr{}} }

// Addr gives the address of a canonical name, false when MaxNames have one.
func (n *Names) Addr(name string) (netip.Addr, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if a, ok := n.byName[name]; ok {
		return a, true
	}
	if len(n.list) == MaxNames {
		return netip.Addr{}, false
	}
	a := nth(len(n.list))
	n.byName[name] = a
	n.list = append(n.list, name)
	return a, true
}

// Name gives the name that an address stands for.
func (n *Names) Name(a netip.Addr) (string, bool) {
	if !namePool.Contains(a) {
		return "", false
	}
	i := index(a)
	n.mu.Lock()
	defer n.mu.Unlock()
	if i < 0 || i >= len(n.list) {
		return "", false
	}
	return n.list[i], true
}

func nth(i int) netip.Addr {
	b := namePool.Addr().As4()
	v := i + firstName
	b[1] += byte(v >> 16)
	b[2], b[3] = byte(v>>8), byte(v)
	return netip.AddrFrom4(b)
}

func index(a netip.Addr) int {
	b, base := a.As4(), namePool.Addr().As4()
	return int(b[1]-base[1])<<16 + int(b[2])<<8 + int(b[3]) - firstName
}
