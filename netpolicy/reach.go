package netpolicy

import "net/netip"

// special is a block of addresses that a name may not lead to unless an address
// range inside it is allowed.
type special struct {
	prefix netip.Prefix
	why    string
	// exact says that only a rule for the one address opens it: behind a range, nobody
	// would see that it is among them.
	exact bool
}

// specials are the blocks of the IANA special-purpose address registries that are
// not globally reachable (RFC 6890 and its updates), multicast (RFC 5771), the
// blocks that carry another address inside, and the address under which Azure's
// hosts answer their guests. Blocks of the registries that are globally reachable
// but serve a protocol of their own are refused with the block around them.
var specials = []special{
	block("169.254.169.254/32", "cloud metadata").exactly(),
	block("169.254.0.0/16", "link-local, where cloud metadata lives").exactly(),
	block("168.63.129.16/32", "a cloud host's own services").exactly(),
	block("100.100.100.200/32", "cloud metadata").exactly(),
	block("192.0.0.192/32", "cloud metadata").exactly(),
	block("0.0.0.0/8", "this network").exactly(),
	block("127.0.0.0/8", "loopback").exactly(),
	block("10.0.0.0/8", "private"),
	block("100.64.0.0/10", "shared by carriers"),
	block("172.16.0.0/12", "private"),
	block("192.0.0.0/24", "protocol assignments"),
	block("192.0.2.0/24", "documentation"),
	block("192.88.99.0/24", "6to4 relays"),
	block("192.168.0.0/16", "private"),
	block("198.18.0.0/15", "benchmarking, and the sandbox's own").exactly(),
	block("198.51.100.0/24", "documentation"),
	block("203.0.113.0/24", "documentation"),
	block("224.0.0.0/4", "multicast").exactly(),
	block("240.0.0.0/4", "reserved").exactly(),

	block("fd00:ec2::/32", "cloud metadata").exactly(),
	block("fc00::/7", "unique local"),
	block("2001::/23", "protocol assignments, Teredo among them").exactly(),
	block("2001:db8::/32", "documentation"),
	block("2002::/16", "6to4, an IPv4 address inside").exactly(),
	block("3fff::/20", "documentation"),
}

func block(prefix, why string) special {
	return special{prefix: netip.MustParsePrefix(prefix), why: why}
}

func (s special) exactly() special {
	s.exact = true
	return s
}

// global6 holds every globally reachable unicast IPv6 address (RFC 4291, IANA's
// assignments). What lies outside, loopback, NAT64, link-local and multicast among
// it, is refused as a whole.
var global6 = netip.MustParsePrefix("2000::/3")

// notGlobal finds the block for which an address is not globally reachable.
func notGlobal(addr netip.Addr) (special, bool) {
	for _, s := range specials {
		if s.prefix.Contains(addr) {
			return s, true
		}
	}
	if addr.Is6() && !global6.Contains(addr) {
		return special{prefix: host(addr), why: "not global unicast", exact: true}, true
	}
	return special{}, false
}

// GloballyReachable reports whether addr is one that a name in a policy may lead
// to, and why not. An IPv4-mapped address is judged as the IPv4 address. It does not
// know the host's own addresses.
func GloballyReachable(addr netip.Addr) (ok bool, why string) {
	if !addr.IsValid() || addr.Zone() != "" {
		return false, "no plain address"
	}
	s, found := notGlobal(addr.Unmap())
	return !found, s.why
}
