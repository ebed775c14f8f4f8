package netpolicy

import "net/netip"

// special is a block of addresses that a name may not lead to.
type special struct {
	prefix netip.Prefix
	why    string
}

// specials are the blocks of the IANA special-purpose address registries that are
// not globally reachable (RFC 6890 and its updates), multicast (RFC 5771), the
// blocks that carry another address inside, and the address under which Azure's
// hosts answer their guests. Blocks of the registries that are globally reachable
// but serve a protocol of their own are refused with the block around them.
var specials = []special{
	{netip.MustParsePrefix("0.0.0.0/8"), "this network"},
	{netip.MustParsePrefix("10.0.0.0/8"), "private"},
	{netip.MustParsePrefix("100.64.0.0/10"), "shared by carriers"},
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
	{netip.MustParsePrefix("168.63.129.16/32"), "a cloud host's own services"},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local, where cloud metadata lives"},
	{netip.MustParsePrefix("172.16.0.0/12"), "private"},
	{netip.MustParsePrefix("192.0.0.0/24"), "protocol assignments"},
	{netip.MustParsePrefix("192.0.2.0/24"), "documentation"},
	{netip.MustParsePrefix("192.88.99.0/24"), "6to4 relays"},
	{netip.MustParsePrefix("192.168.0.0/16"), "private"},
	{netip.MustParsePrefix("198.18.0.0/15"), "benchmarking, and the sandbox's own"},
	{netip.MustParsePrefix("198.51.100.0/24"), "documentation"},
	{netip.MustParsePrefix("203.0.113.0/24"), "documentation"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("240.0.0.0/4"), "reserved"},

	{netip.MustParsePrefix("2001::/23"), "protocol assignments, Teredo among them"},
	{netip.MustParsePrefix("2001:db8::/32"), "documentation"},
	{netip.MustParsePrefix("2002::/16"), "6to4, an IPv4 address inside"},
	{netip.MustParsePrefix("3fff::/20"), "documentation"},
}

// global6 holds every globally reachable unicast IPv6 address (RFC 4291, IANA's
// assignments). What lies outside, loopback, NAT64, unique local, link-local and
// multicast among it, is refused as a whole.
var global6 = netip.MustParsePrefix("2000::/3")

// GloballyReachable reports whether addr is one that a name in a policy may lead
// to, and why not. An IPv4-mapped address is judged as the IPv4 address. It does not
// know the host's own addresses.
func GloballyReachable(addr netip.Addr) (ok bool, why string) {
	if addr.Zone() != "" {
		return false, "it has a zone"
	}
	addr = addr.Unmap()
	if !addr.IsValid() {
		return false, "no address"
	}
	for _, s := range specials {
		if s.prefix.Contains(addr) {
			return false, s.why
		}
	}
	if addr.Is6() && !global6.Contains(addr) {
		return false, "not global unicast"
	}
	return true, ""
}
