package netpolicy

import (
	"net/netip"
	"testing"
)

// TestGloballyReachable: A09, A36. The first and last address of each block, and
// their neighbours outside.
func TestGloballyReachable(t *testing.T) {
	for text, want := range map[string]bool{
		"0.0.0.0": false, "0.255.255.255": false, "1.0.0.0": true, "9.255.255.255": true,
		"10.0.0.0": false, "10.255.255.255": false, "11.0.0.0": true,
		"100.63.255.255": true, "100.64.0.0": false, "100.127.255.255": false, "100.128.0.0": true,
		"127.0.0.1": false, "128.0.0.1": true, "168.63.129.15": true, "168.63.129.16": false,
		"169.253.255.255": true, "169.254.169.254": false, "169.255.0.0": true,
		"172.15.255.255": true, "172.16.0.0": false, "172.31.255.255": false, "172.32.0.0": true,
		"192.0.0.1": false, "192.0.1.0": true, "192.0.2.1": false, "192.88.99.1": false, "192.168.1.1": false,
		"198.17.255.255": true, "198.18.0.1": false, "198.19.255.255": false, "198.20.0.0": true,
		"198.51.100.1": false, "203.0.113.1": false, "223.255.255.255": true, "224.0.0.1": false, "240.0.0.1": false, "255.255.255.255": false,
		"::": false, "::1": false, "::ffff:10.0.0.1": false, "::ffff:1.0.0.0": true, "::1.0.0.0": false, "64:ff9b::1.0.0.0": false, "64:ff9b:1::1": false,
		"100::1": false, "2001::1": false, "2001:1ff::1": false, "2001:200::1": true, "2001:db8::1": false, "2002:a00:1::1": false,
		"2600::1": true, "2a00::1": true, "3fff::1": false, "3fff:1000::1": true, "4000::1": false, "5f00::1": false,
		"fc00::1": false, "fd00:ec2::254": false, "fe80::1": false, "fe80::1%eth0": false, "fec0::1": false, "ff02::1": false,
	} {
		ok, why := GloballyReachable(netip.MustParseAddr(text))
		if ok != want || ok != (why == "") {
			t.Errorf("%s: %v %q", text, ok, why)
		}
	}
	if ok, _ := GloballyReachable(netip.Addr{}); ok {
		t.Error("no address at all is reachable")
	}
}
