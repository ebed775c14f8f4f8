package netpolicy

import (
	"net"
	"net/netip"
)

// Where the gateway listens inside a sandbox's network namespace. Both ports lie
// above the range that connections without a port of their own get one from.
var (
	DNSListener   = netip.AddrPortFrom(redirectAddr, 61053)
	RelayListener = netip.AddrPortFrom(redirectAddr, 61080)
)

// Listeners are the sockets of one sandbox: opened inside its network namespace,
// served outside.
type Listeners struct {
	DNS    *net.UDPConn
	DNSTCP *net.TCPListener
	Relay  *net.TCPListener
	// Watch is nil where there is no network to watch.
	Watch *Watch
}

// Close closes all of them. The sandbox's traffic stops: nothing answers it. The zero
// Listeners have nothing to close.
func (l Listeners) Close() {
	if l == (Listeners{}) {
		return
	}
	l.DNS.Close()
	l.DNSTCP.Close()
	l.Relay.Close()
	if l.Watch != nil {
		l.Watch.Close()
	}
}
