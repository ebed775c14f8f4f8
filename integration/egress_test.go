package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/agentshim/agentshim/shim"
)

// row is one attempt to reach something, and how it ends: as a plain process of the
// user's where no policy is (control), under mode open with a deny entry, and under the
// allow-list. In an outcome * is anything and | separates alternatives. An empty one is
// not looked at, and an attempt with an empty control not made there. Under deny-all no row may end well.
type row struct {
	name                string
	op                  []string
	control, open, list string
}

// allowed is the egress section of the battery's allow-list runs.
func allowed() map[string]any {
	return map[string]any{
		"mode": "allow-list",
		"allow": []any{
			"api.allowed.example", "api.allowed.example:80", "ssh.allowed.example:22", "db.allowed.example:5432",
			"*.wild.example", "*.private.example:9007", "*.private.example:3001", "*.private.example:8088", "*.private.example:80",
			"192.175.48.40/32", "10.9.0.0/16:9007", "broken.allowed.example:9007",
			map[string]any{"host": "ech.allowed.example", "ech": true},
			map[string]any{"host": "raw.allowed.example", "port": 443, "raw": true},
		},
		"deny":         []any{"denied.wild.example"},
		"hostServices": []any{map[string]any{"name": "mcp", "port": servicePort}},
	}
}

// byIptables has iptables put the packet rules in.
func byIptables(egress map[string]any) map[string]any {
	egress = maps.Clone(egress)
	egress["renderer"] = "iptables"
	return egress
}

// opened is the same for open.
func opened() map[string]any {
	return map[string]any{
		"mode": "open", "deny": []any{"denied.wild.example"}, "allow": []any{
			map[string]any{"host": "ech.allowed.example", "ech": true},
			map[string]any{"host": "raw.allowed.example", "port": 443, "raw": true},
		},
		"hostServices": []any{map[string]any{"name": "mcp", "port": servicePort}},
	}
}

// privates are the addresses that no name may lead to (A09), and where the control
// gets its answer from.
var privates = map[string]string{
	"ten": "10.0.0.5", "lan": neighbour, "twelve": "172.16.0.5", "carrier": "100.64.0.5", "linklocal": "169.254.7.7",
	"docs": "192.0.2.5", "unique": "fc00::5", "docs6": "2001:db8::5", "mapped": "::ffff:10.0.0.5",
	"nat64": "64:ff9b::a00:5", "sixtofour": "2002:a00:5::1", "teredo": "2001:0:a00:5::1", "bench": "198.18.9.9",
	"azure": "168.63.129.16", "ec2": "fd00:ec2::254",
}

// settle gives the world's names their addresses.
func (w *world) settle() {
	for _, name := range []string{
		"api.allowed.example", "ssh.allowed.example", "db.allowed.example", "raw.allowed.example", "ech.allowed.example",
		"one.wild.example", "denied.wild.example", "dot.wild.example",
	} {
		w.zone.set(name, publicAddr, publicAddr6)
	}
	for _, name := range []string{"evil.example", "secret.evil.example", "xallowed.example", "wild.example", "xapi.allowed.example", "cdn.evil.example"} {
		w.zone.set(name, otherAddr)
	}
	for label, addr := range privates {
		w.zone.set(label+".private.example", addr)
	}
	w.zone.set("permitted.private.example", "10.9.0.5")
	w.zone.set("loop.private.example", "127.0.0.1")
	w.zone.set("loop6.private.example", "::1")
	w.zone.set("zero.private.example", "0.0.0.0")
	w.zone.set("host.private.example", callerAddr)
	w.zone.set("host6.private.example", callerAddr6)
	w.zone.set("hostlan.private.example", callerLAN)
	w.zone.set("metadata.google.internal", "169.254.169.254")
	w.zone.set("metadata.private.example", "169.254.169.254")
	w.zone.set("host.docker.internal", callerAddr)
	w.zone.set("host.containers.internal", callerLAN)
	w.zone.on("cname.private.example", func(int) answer { return answer{cname: "ten.private.example"} })
	w.zone.on("alias.private.example", func(int) answer { return answer{cname: "cdn.evil.example"} })
	w.zone.on("broken.allowed.example", func(int) answer { return answer{rcode: dns.RcodeServerFailure} })
	w.zone.on("secondary.private.example", func(int) answer { return answer{addrs: []string{"10.0.0.5", publicAddr}} })
	w.zone.https("api.allowed.example")
	w.rebind()
}

// rebind has a name lead to a public address once and to a private one from then on
// (A10), and another to two servers by turns (N28).
func (w *world) rebind() {
	for name, addrs := range map[string][2]string{
		"rebind.private.example": {publicAddr, "10.0.0.5"}, "rotating.private.example": {publicAddr, otherAddr},
	} {
		w.zone.on(name, func(n int) answer { return answer{addrs: addrs[min(n, 1):][:1]} })
	}
}

// nothing is how a direct IPv6 attempt ends: there is no route.
const nothing = "ENETUNREACH|EPERM|EACCES"

func at(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

func get(host string) string { return "GET / HTTP/1.1\r\nHost: " + host + "\r\n\r\n" }

func battery() []row {
	const api = "api.allowed.example"
	var rows []row
	rows = append(rows, nameRows(api)...)
	rows = append(rows, privateRows()...)
	rows = append(rows, transportRows(api)...)
	rows = append(rows, tlsRows(api)...)
	rows = append(rows, webRows(api)...)
	return append(rows, hostRows()...)
}

func nameRows(api string) []row {
	const ask = "198.18.0.2:53"
	rows := []row{
		{"A01 UDP", []string{"dns", "udp", "1.1.1.1:53", "secret.evil.example", "A"}, "ok: NOERROR 1", "ok: NOERROR 1", "ok: NXDOMAIN 0"},
		{"A01 TCP", []string{"dns", "tcp", "1.1.1.1:53", "secret.evil.example", "A"}, "ok: NOERROR 1", "ok: NOERROR 1", "ok: NXDOMAIN 0"},
		{"A01 IPv6", []string{"dns", "udp", at(publicAddr6, 53), "secret.evil.example", "A"}, "ok: NOERROR 1", nothing, nothing},
		{"A02 name", []string{"name", "secret.evil.example"}, "ok: " + otherAddr, "ok: 198.18.*", "NXDOMAIN"},
		{"A04 N02 N03 N05 UDP", []string{"dns", "udp", "127.0.0.11:53", "secret.evil.example", "A"}, "ok: NOERROR 1", "ECONNREFUSED", "ECONNREFUSED"},
		{"A04 TCP", []string{"dns", "tcp", "127.0.0.53:53", "secret.evil.example", "A"}, "ok: NOERROR 1", "ECONNREFUSED", "ECONNREFUSED"},
		{"A06 DoT by name", []string{"tcp", "dot.evil.example:853", "x"}, "NXDOMAIN", "reset", "NXDOMAIN"},
		{"A06 DoT by address", []string{"tcp", "1.1.1.1:853", "x"}, "ok: x", "reset", "reset"},
		{"A06 DoT of an allowed name", []string{"tcp", api + ":853", "x"}, "ok: x", "ok: x", "reset"},
		{"A06 DoQ", []string{"udp", at(publicAddr, 853), "x"}, "ok: x", "EPERM", "EPERM"},
		{"A06 mDNS", []string{"datagram", "17", "224.0.0.251:5353"}, "ok", "EPERM", "EPERM"},
		{"A06 LLMNR", []string{"datagram", "17", "224.0.0.252:5355"}, "ok", "EPERM", "EPERM"},
		{"A07 HTTPS record", []string{"dns", "udp", ask, api, "HTTPS"}, "ok: NOERROR 1", "ok: NOERROR 0", "ok: NOERROR 0"},
		{"A08 AAAA", []string{"dns", "udp", ask, api, "AAAA"}, "ok: NOERROR 1", "ok: NOERROR 0", "ok: NOERROR 0"},
		{"A08 both", []string{"name", api}, "ok: " + publicAddr + " " + publicAddr6, "ok: 198.18.*", "ok: 198.18.*"},
		{"A53", []string{"tcp", "broken.allowed.example:9007", "x"}, "not resolved: *", "reset", "reset"},
		{"deny wins", []string{"name", "denied.wild.example"}, "ok: *", "NXDOMAIN", "NXDOMAIN"},
		{"A37 N20 name", []string{"tcp", at("host.docker.internal", hostPort)}, "ok: host *", "reset", "NXDOMAIN"},
		{"A37 Podman's name", []string{"tcp", at("host.containers.internal", hostPort)}, "ok: host *", "reset", "NXDOMAIN"},
		{"A36 name", []string{"http", "metadata.google.internal:80", get("metadata.google.internal")}, "ok: 200 *", "ok: 403 *", "NXDOMAIN"},
	}
	for _, a := range []struct{ name, list string }{
		// A15: one form is matched; A16: only A-labels; A18: label boundaries.
		{"API.Allowed.EXAMPLE.", "ok: NOERROR 1"},
		{`api\.allowed.example`, "ok: NXDOMAIN 0"},
		{`api.allowed.example\000.evil.example`, "ok: NXDOMAIN 0"},
		{`x@api.allowed.example`, "ok: NXDOMAIN 0"},
		{`api.allowed.example\032`, "ok: NXDOMAIN 0"},
		{`api%00.allowed.example`, "ok: NXDOMAIN 0"},
		{`api\227\128\130allowed.example`, "ok: NXDOMAIN 0"},
		{"xapi.allowed.example", "ok: NXDOMAIN 0"},
		{"wild.example", "ok: NXDOMAIN 0"},
		{"xwild.example", "ok: NXDOMAIN 0"},
		{"a.b.wild.example", "ok: NOERROR 1"},
		{"api.allowed.example.evil.example", "ok: NXDOMAIN 0"},
	} {
		rows = append(rows, row{"A15 A16 A18 " + a.name, []string{"dns", "udp", ask, a.name, "A"}, "", "", a.list})
	}
	return rows
}

func privateRows() []row {
	var rows []row
	for label, addr := range privates {
		name := label + ".private.example"
		rows = append(
			rows,
			row{"A09 N29 " + addr, []string{"tcp", at(name, echoPort), "x"}, "ok: x", "reset", "reset"},
			row{"A09 by address " + addr, []string{"tcp", at(addr, echoPort), "x"}, "ok: x", "reset|" + nothing, "reset|" + nothing},
		)
	}
	slices.SortFunc(rows, func(a, b row) int { return strings.Compare(a.name, b.name) })
	return append(rows, []row{
		{"A09 the rule inside the block", []string{"tcp", "permitted.private.example:9007", "x"}, "ok: x", "reset", "ok: x"},
		{"A09 another port of it", []string{"tcp", "permitted.private.example:3001", "x"}, "*", "reset", "reset"},
		{"A09 loopback", []string{"tcp", "loop.private.example:3001"}, "ok: host *", "reset", "reset"},
		{"A09 ::1", []string{"tcp", "loop6.private.example:3001"}, "ok: host *", "reset", "reset"},
		{"A09 0.0.0.0", []string{"tcp", "zero.private.example:3001"}, "ok: host *", "reset", "reset"},
		{"A09 the host's public address", []string{"tcp", at("host.private.example", hostPort)}, "ok: host *", "reset", "reset"},
		{"A09 the host's public IPv6 address", []string{"tcp", at("host6.private.example", hostPort)}, "ok: host *", "reset", "reset"},
		{"A09 the host's LAN address", []string{"tcp", at("hostlan.private.example", hostPort)}, "ok: host *", "reset", "reset"},
		{"A09 an alias of a private name", []string{"tcp", "cname.private.example:9007", "x"}, "ok: x", "reset", "reset"},
		{"N29 an alias of an unlisted name", []string{"tcp", "alias.private.example:9007", "x"}, "ok: x", "ok: x", "ok: x"},
		{"A09 one of two is private", []string{"tcp", "secondary.private.example:9007", "x"}, "ok: x", "ok: x", "ok: x"},
		{"A10 first", []string{"tcp", "rebind.private.example:9007", "x"}, "ok: x", "ok: x", "ok: x"},
		{"A10 then", []string{"tcp", "rebind.private.example:9007", "y"}, "ok: y", "reset", "reset"},
		{"N28 first", []string{"tcp", "rotating.private.example:9007", "x"}, "ok: x", "ok: x", "ok: x"},
		{"N28 then", []string{"tcp", "rotating.private.example:9007", "y"}, "ok: y", "ok: y", "ok: y"},
	}...)
}

func transportRows(api string) []row {
	rows := []row{
		{"the server speaks first", []string{"tcp", "ssh.allowed.example:22"}, "ok: SSH-2.0*", "ok: SSH-2.0*", "ok: SSH-2.0*"},
		{"another port", []string{"tcp", "db.allowed.example:5432", "x"}, "ok: x", "ok: x", "ok: x"},
		{"A19 :22", []string{"tcp", api + ":22"}, "ok: SSH-2.0*", "ok: SSH-2.0*", "reset"},
		{"A19 :8443", []string{"tls", api + ":8443", api, api}, "ok: *", "ok: *", "reset"},
		{"A19 db:443", []string{"tls", "db.allowed.example:443", "db.allowed.example", "x"}, "ok: *", "ok: *", "reset"},
		{"A20 N06 TCP", []string{"tcp", at(publicAddr6, echoPort), "x"}, "ok: x", nothing, nothing},
		{"A20 UDP", []string{"udp", at(publicAddr6, 443), "x"}, "ok: x", nothing, nothing},
		{"A20 ICMPv6", []string{"datagram", "58", at(publicAddr6, 0)}, "ok", nothing, nothing},
		{"A23 N31 QUIC by address", []string{"udp", at(publicAddr, 443), "x"}, "ok: x", "EPERM", "EPERM"},
		{"A23 QUIC by name", []string{"udp", api + ":443", "x"}, "ok: x", "EPERM", "EPERM"},
		{"A23 NTP", []string{"udp", at(publicAddr, 123), "x"}, "ok: x", "EPERM", "EPERM"},
		{"A23 UDP to an allowed range", []string{"udp", at("192.175.48.40", echoPort), "x"}, "ok: x", "EPERM", "EPERM"},
		{"A24 N31 ICMP", []string{"datagram", "1", at(publicAddr, 0)}, "ok", "EPERM|EACCES", "EPERM|EACCES"},
		{"A24 UDP-Lite", []string{"datagram", "136", at(publicAddr, 9)}, "", "EPERM", "EPERM"},
		{"an allowed range", []string{"tcp", at("192.175.48.40", echoPort), "x"}, "ok: x", "reset", "ok: x"},
		{"an allowed range, its port", []string{"tcp", "10.9.3.4:9007", "x"}, "ok: x", "reset", "ok: x"},
		{"an allowed range, another port", []string{"tcp", "10.9.3.4:5432", "x"}, "ok: x", "reset", "reset"},
		{"nobody listens", []string{"tcp", at("192.175.48.40", 4), "x"}, "ECONNREFUSED", "reset", "reset"},
	}
	for _, proto := range []int{1, 6, 17, 47, 132, 255} {
		rows = append(rows, row{fmt.Sprintf("A24 raw %d", proto), []string{"raw", strconv.Itoa(proto), at(publicAddr, 0)}, "", "EPERM", "EPERM"})
	}
	for name, op := range map[string][]string{
		"SCTP": {"socket", "2", "5", "132"}, "SCTP datagrams": {"socket", "2", "1", "132"}, "DCCP": {"socket", "2", "6", "33"},
		"AF_PACKET": {"socket", "17", "3", "0"}, "netfilter": {"socket", "16", "3", "12"}, "vsock": {"socket", "40", "1", "0"},
	} {
		rows = append(rows, row{"A24 A41 " + name, op, "", "E*", "E*"})
	}
	for _, op := range [][]string{
		{"/bin/busybox", "ip", "route", "add", "10.0.0.0/8", "dev", "lo"},
		{"/bin/busybox", "ip", "link", "set", "lo", "down"},
		{"/bin/busybox", "ip", "addr", "add", "192.0.2.9/32", "dev", "lo"},
		{"/bin/busybox", "ip", "route", "flush", "table", "local"},
		{"/bin/busybox", "unshare", "-n", "/bin/true"},
		{"/bin/busybox", "ip", "link", "add", "v0", "type", "veth"},
	} {
		rows = append(rows, row{"A41 N17 " + strings.Join(op[1:], " "), append([]string{"run"}, op...), "", "ok: exit *", "ok: exit *"})
	}
	return rows
}

func tlsRows(api string) []row {
	return []row{
		{"TLS", []string{"tls", api + ":443", api, api}, "ok: world sni=" + api + "*", "ok: world sni=" + api + "*", "ok: world sni=" + api + "*"},
		{"a wildcard's name", []string{"tls", "one.wild.example:443", "one.wild.example", "x"}, "ok: *", "ok: *", "ok: *"},
		{"A02 a name by its server name only", []string{"tls", api + ":443", "secret.evil.example", api}, "ok: *", "reset", "reset"},
		{"A07 ECH", []string{"tls", api + ":443", "hidden.example", "x", api}, "ok: world sni=hidden.example*", "reset", "reset"},
		{"A07 ECH, where it is allowed", []string{"tls", "ech.allowed.example:443", "hidden.example", "x", "ech.allowed.example"}, "ok: world sni=hidden.example*", "ok: world sni=hidden.example*", "ok: world sni=hidden.example*"},
		{"A07 ECH with another outer name", []string{"tls", "ech.allowed.example:443", "hidden.example", "x", api}, "ok: *", "reset", "reset"},
		{"A27 by address, no name", []string{"tls", at(publicAddr, 443), "", "x"}, "ok: *", "reset", "reset"},
		{"A27 by address, an allowed name", []string{"tls", at(publicAddr, 443), api, "x"}, "ok: *", "reset", "reset"},
		{"A27 no server name", []string{"tls", api + ":443", "", api}, "ok: *", "reset", "reset"},
		{"A29", []string{"tls", api + ":443", "other.example", "x"}, "ok: *", "reset", "reset"},
		{"not TLS", []string{"http", api + ":443", get(api)}, "ok: 400 *", "reset", "reset"},
		{"not TLS, raw", []string{"http", "raw.allowed.example:443", get(api)}, "ok: 400 *", "ok: 400 *", "ok: 400 *"},
		{"TLS to a range", []string{"tls", at("192.175.48.40", 443), "any.example", "x"}, "ok: *", "reset", "ok: *"},
	}
}

func webRows(api string) []row {
	web := api + ":80"
	return []row{
		{"HTTP", []string{"http", web, get(api)}, "ok: 200 world*", "ok: 200 world*", "ok: 200 world*"},
		{"A32 unlisted host", []string{"http", "evil.example:80", get("evil.example")}, "ok: 200 *", "ok: 200 *", "NXDOMAIN"},
		{"A32 unlisted port 80", []string{"http", "ssh.allowed.example:80", get("ssh.allowed.example")}, "ok: 200 *", "ok: 200 *", `ok: 403 agentshim: egress: ssh.allowed.example:80 is not allowed*add "ssh.allowed.example:80" to egress.allow`},
		{"A32 by address", []string{"http", at(publicAddr, 80), get(api)}, "ok: 200 *", "ok: 403 *", "ok: 403 *"},
		{"A32 another Host", []string{"http", web, get("evil.example")}, "ok: 200 *", "ok: 403 *", "ok: 403 *"},
		{"A32 Host changes", []string{"http", web, get(api) + get("evil.example")}, "ok: 200 *; 200 *", "ok: 200 *; 403 *", "ok: 200 *; 403 *"},
		{"A32 absolute form", []string{"http", web, "GET http://evil.example/ HTTP/1.1\r\nHost: " + api + "\r\n\r\n"}, "ok: 200 *", "ok: 403 *", "ok: 403 *"},
		{"A32 two Hosts", []string{"http", web, "GET / HTTP/1.1\r\nHost: " + api + "\r\nHost: evil.example\r\n\r\n"}, "ok: 400 *", "ok: 400 *", "ok: 400 *"},
		{"A02 A34 CONNECT", []string{"http", web, "CONNECT secret.evil.example:443 HTTP/1.1\r\nHost: secret.evil.example:443\r\n\r\n"}, "ok: *", "ok: 403 *", "ok: 403 *"},
		{"A35 websocket", []string{"http", web, "GET /upgrade HTTP/1.1\r\nHost: " + api + "\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"}, "ok: 101 *", "ok: 101 *", "ok: 101 *"},
		{"A35 websocket to an unlisted host", []string{"http", web, "GET /upgrade HTTP/1.1\r\nHost: evil.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"}, "ok: 101 *", "ok: 403 *", "ok: 403 *"},
		{"A35 another upgrade", []string{"http", web, "GET /upgrade HTTP/1.1\r\nHost: " + api + "\r\nConnection: Upgrade\r\nUpgrade: tunnel\r\n\r\n"}, "ok: 101 *", "ok: 403 *", "ok: 403 *"},
		{"A35 HTTP/2 with prior knowledge", []string{"http", web, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"}, "ok: *|closed|reset", "ok: 403 *|ok: 400 *|ok: 505 *", "ok: 403 *|ok: 400 *|ok: 505 *"},
		{"A32 a private name", []string{"http", "metadata.private.example:80", get("metadata.private.example")}, "ok: 200 *", "ok: 403 *", "ok: 403 *"},
	}
}

func hostRows() []row {
	var rows []row
	for _, a := range []string{"169.254.169.254", "fd00:ec2::254", "168.63.129.16"} {
		rows = append(rows, row{"A36 " + a, []string{"http", at(a, 80), get(a)}, "ok: 200 *", "ok: 403 *|" + nothing, "ok: 403 *|" + nothing})
	}
	for _, a := range []string{callerAddr, callerLAN, callerAddr6} {
		rows = append(rows, row{"A37 N19 the host at " + a, []string{"tcp", at(a, hostPort)}, "ok: host *", "reset|" + nothing, "reset|" + nothing})
	}
	return append(rows, []row{
		{"A37 N19 the gateway", []string{"tcp", at(worldAddr, echoPort), "x"}, "ok: x", "reset", "reset"},
		{"N20 slirp's host", []string{"tcp", "10.0.2.2:9007", "x"}, "ok: x", "reset", "reset"},
		{"A37 Docker's gateway", []string{"tcp", "172.17.0.1:9007", "x"}, "ok: x", "reset", "reset"},
		{"A37 a neighbour", []string{"tcp", at(neighbour, echoPort), "x"}, "ok: x", "reset", "reset"},
		{"the host's loopback", []string{"tcp", at("127.0.0.1", otherServicePort)}, "ok: host *", "ECONNREFUSED", "ECONNREFUSED"},
		{"the host's ::1", []string{"tcp", at("::1", otherServicePort)}, "ok: host *", "ECONNREFUSED", "ECONNREFUSED"},
		{"a host service", []string{"tcp", at("mcp.host.internal", servicePort)}, "NXDOMAIN", "ok: host 127.0.0.1:3000", "ok: host 127.0.0.1:3000"},
		{"another port of the host", []string{"tcp", at("mcp.host.internal", otherServicePort)}, "NXDOMAIN", "reset", "reset"},
		{"no host service", []string{"tcp", at("other.host.internal", servicePort)}, "NXDOMAIN", "NXDOMAIN", "NXDOMAIN"},
	}...)
}

// ownRows are the sandbox's own loopback: it works in every mode.
func ownRows() attempts {
	ops := attempts{
		{"echo", "tcp", "127.0.0.1:0"},
		{"echo", "tcp", "127.9.9.9:0"},
		{"echo", "tcp", "0.0.0.0:0", "0.0.0.0"},
		{"echo", "tcp", "[::1]:0"},
		{"echo", "tcp", "[::]:0", "::1"},
		{"echo", "tcp", "[::]:0", "localhost"},
		{"echo", "tcp", "localhost:0", "localhost"},
		{"echo", "tcp", "0.0.0.0:0", "agentshim"},
		{"echo", "udp", "127.0.0.1:0"},
		{"echo", "udp", "127.9.9.9:0"},
		{"echo", "udp", "0.0.0.0:0", "127.0.0.1"},
		{"echo", "udp", "[::1]:0"},
		{"echo", "tcp", "127.0.0.1:53"},
		{"echo", "udp", "127.0.0.1:5353"},
	}
	return ops
}

func opsOf(rows []row) attempts {
	var ops attempts
	for _, r := range rows {
		ops = append(ops, r.op)
	}
	return ops
}

// isOutcome reports whether an outcome is one of those wanted.
func isOutcome(want, got string) bool {
	for alternative := range strings.SplitSeq(want, "|") {
		parts := strings.Split(alternative, "*")
		for i, p := range parts {
			parts[i] = regexp.QuoteMeta(p)
		}
		if regexp.MustCompile("^" + strings.Join(parts, ".*") + "$").MatchString(got) {
			return true
		}
	}
	return false
}

// reachFields adds testdata/reach to a harness file.
func reachFields(t *testing.T, egress map[string]any, fields spec) spec {
	t.Helper()
	full := spec{
		"harness": map[string]any{"binary": "/reach/reach"},
		"mounts":  []any{map[string]any{"source": mustReach(t), "target": "/reach"}},
	}
	if egress != nil {
		full["egress"] = egress
	}
	for k, v := range fields {
		full[k] = v
	}
	return full
}

// reach makes the attempts as the harness, under an egress section.
func (s setup) reach(t *testing.T, w *world, egress map[string]any, ops attempts) (tried, result) {
	t.Helper()
	file := s.write(t, reachFields(t, egress, nil))
	r := s.call(t, call{Net: w}, "exec", "--spec", file, "--", ops.json(t))
	return endings(t, r, ops), r
}

// TestEgressBattery makes every attempt in each mode, on all set-ups, and looks at what
// arrived in the world.
func TestEgressBattery(t *testing.T) {
	w := outside(t)
	w.settle()
	rows := battery()
	inTurn(t, func(t *testing.T, s setup) {
		t.Run("control", func(t *testing.T) {
			w.rebind()
			// Some of the others would change the caller's namespace, as root.
			tried := slices.DeleteFunc(slices.Clone(rows), func(r row) bool { return r.control == "" })
			got := w.plain(t, s, opsOf(tried))
			for _, r := range tried {
				if out := strings.TrimSuffix(got.of(r.op...), " late"); !isOutcome(r.control, out) {
					t.Errorf("%s: %s, want %s", r.name, out, r.control)
				}
			}
		})
		t.Run("allow-list", func(t *testing.T) { s.batteryRun(t, w, allowed(), rows, func(r row) string { return r.list }) })
		t.Run("allow-list in a session", func(t *testing.T) {
			s.stepping(t).batteryRun(t, w, allowed(), rows, func(r row) string { return r.list })
		})
		if s.name != "docker-group" { // which has no iptables
			t.Run("allow-list by iptables", func(t *testing.T) {
				s.batteryRun(t, w, byIptables(allowed()), rows, func(r row) string { return r.list })
			})
			t.Run("open by iptables", func(t *testing.T) {
				s.batteryRun(t, w, byIptables(opened()), rows, func(r row) string { return r.open })
			})
		}
		t.Run("open", func(t *testing.T) { s.batteryRun(t, w, opened(), rows, func(r row) string { return r.open }) })
		t.Run("deny-all", func(t *testing.T) {
			flows := w.left(t, func() {
				got, _ := s.reach(t, w, nil, append(opsOf(rows), ownRows()...))
				for _, r := range rows {
					if out := got.of(r.op...); r.op[0] != "run" && (strings.HasPrefix(out, "ok") || strings.HasSuffix(out, "late")) {
						t.Errorf("%s: %s", r.name, out)
					}
				}
				own(t, got)
			})
			if len(flows) > 0 {
				t.Errorf("packets left: %q", flows)
			}
		})
	})
}

func own(t *testing.T, got tried) {
	t.Helper()
	for _, op := range ownRows() {
		if out := got.of(op...); out != "ok: x" {
			t.Errorf("own loopback, %v: %s", op, out)
		}
	}
}

// batteryRun is one mode: outcomes, and that nothing else went out.
func (s setup) batteryRun(t *testing.T, w *world, egress map[string]any, rows []row, want func(row) string) {
	w.rebind()
	asked, hosts := w.zone.questions(), w.host.get(at("127.0.0.1", servicePort))
	others := w.otherHosts()
	ops := append(append(opsOf(rows), ownRows()...), attempts{{"echo", "tcp", "0.0.0.0:0", "198.18.0.1"}, {"echo", "udp", "0.0.0.0:0", "198.18.0.1"}}...)
	flows := w.left(t, func() {
		got, _ := s.reach(t, w, egress, ops)
		for _, r := range rows {
			if out := got.of(r.op...); want(r) != "" && !isOutcome(want(r), out) {
				t.Errorf("%s: %s, want %s", r.name, out, want(r))
			}
		}
		own(t, got)
		for _, op := range ops[len(ops)-2:] {
			if out := got.of(op...); out != "ok: x" {
				t.Errorf("own address, %v: %s", op, out)
			}
		}
	})
	for _, flow := range flows {
		if !mayLeave(t, flow, egress["mode"] == "open") {
			t.Errorf("%s left", flow)
		}
	}
	if egress["mode"] == "allow-list" {
		for name, n := range w.zone.questions() {
			if n != asked[name] && (strings.Contains(name, "evil") && !strings.HasPrefix(name, "cdn.evil.example") || strings.Contains(name, "denied")) {
				t.Errorf("%s was looked up", name)
			}
		}
	}
	if n := w.host.get(at("127.0.0.1", servicePort)) - hosts; n != 1 {
		t.Errorf("the host service was reached %d times, want once", n)
	}
	if n := w.otherHosts(); n != others {
		t.Errorf("the host's other services were reached %d times", n-others)
	}
}

// otherHosts is how often the services were reached that no file names.
func (w *world) otherHosts() int {
	n := 0
	for _, a := range hostServices() {
		if a != at("127.0.0.1", servicePort) {
			n += w.host.get(a)
		}
	}
	return n
}

// mayLeave says which packets the battery's policies let out: questions to the host's
// resolver, and TCP to what the allowed names lead to.
func mayLeave(t *testing.T, flow string, open bool) bool {
	t.Helper()
	if flow == "udp "+at(worldDNS, 53) {
		return true
	}
	network, target, _ := strings.Cut(flow, " ")
	a, err := netip.ParseAddrPort(target)
	if network != "tcp" || err != nil {
		return false
	}
	switch a.Addr().String() {
	case publicAddr, publicAddr6, otherAddr:
		return open || slices.Contains([]uint16{443, 80, sshPort, 5432, echoPort}, a.Port())
	case "192.175.48.40":
		return !open
	}
	return !open && a.Port() == echoPort && netip.MustParsePrefix("10.9.0.0/16").Contains(a.Addr())
}

// TestOpenWithoutDeny: where every name may be reached and none is denied, nothing is
// judged by its content, and addresses without a name stay closed.
func TestOpenWithoutDeny(t *testing.T) {
	w := outside(t)
	w.settle()
	const api = "api.allowed.example"
	rows := []row{
		{"ECH", []string{"tls", api + ":443", "hidden.example", "x", api}, "", "ok: world sni=hidden.example*", ""},
		{"not TLS", []string{"http", api + ":443", get(api)}, "", "ok: 400 *", ""},
		{"any port", []string{"tcp", api + ":9007", "x"}, "", "ok: x", ""},
		{"A36", []string{"http", "169.254.169.254:80", get("x.example")}, "", "ok: 403 *", ""},
		{"A09", []string{"tcp", "ten.private.example:9007", "x"}, "", "reset", ""},
		{"A10 by address", []string{"tcp", at(publicAddr, echoPort), "x"}, "", "reset", ""},
		{"A23", []string{"udp", at(publicAddr, 443), "x"}, "", "EPERM", ""},
	}
	inTurn(t, func(t *testing.T, s setup) {
		got, _ := s.reach(t, w, map[string]any{"mode": "open"}, opsOf(rows))
		for _, r := range rows {
			if out := got.of(r.op...); !isOutcome(r.open, out) {
				t.Errorf("%s: %s, want %s", r.name, out, r.open)
			}
		}
	})
}

// TestEmptyList: A55, an empty allow-list is deny-all, and with a host service only that.
func TestEmptyList(t *testing.T) {
	w := outside(t)
	w.settle()
	ops := attempts{{"tls", "api.allowed.example:443", "api.allowed.example", "x"}, {"tcp", at(publicAddr, echoPort), "x"}, {"tcp", at("mcp.host.internal", servicePort)}}
	inTurn(t, func(t *testing.T, s setup) {
		for service, egress := range map[string]map[string]any{
			"": {"mode": "allow-list"},
			"ok: host 127.0.0.1:3000": {
				"mode": "allow-list", "allow": []any{}, "hostServices": []any{map[string]any{"name": "mcp", "port": servicePort}},
			},
		} {
			flows := w.left(t, func() {
				got, _ := s.reach(t, w, egress, ops)
				for _, op := range ops[:2] {
					if out := got.of(op...); strings.HasPrefix(out, "ok") {
						t.Errorf("%v: %s", op, out)
					}
				}
				if out := got.of(ops[2]...); strings.HasPrefix(out, "ok") != (service != "") || service != "" && out != service {
					t.Errorf("host service: %s, want %q", out, service)
				}
			})
			if len(flows) > 0 {
				t.Errorf("packets left: %q", flows)
			}
		}
		for _, bad := range []string{`{"mode":"allow-list","allow":null}`, `{"allow-list":[]}`, `{"mode":"allow-list","alow":[]}`, `{"mode":""}`, `{"mode":"none"}`, `{"mode":"allow-list","allow":["*"]}`, `{"mode":"allow-list","allow":["*.com"]}`} {
			var egress any
			if err := json.Unmarshal([]byte(bad), &egress); err != nil {
				t.Fatal(err)
			}
			file := s.write(t, reachFields(t, nil, spec{"egress": egress}))
			r := s.call(t, call{Net: w}, "exec", "--spec", file, "--", ops[:1].json(t))
			if r.Code != shim.ExitRefused && strings.HasPrefix(endings(t, r, ops[:1]).of(ops[0]...), "ok") {
				t.Errorf("%s: %+v", bad, r)
			}
		}
	})
}

// TestRefusalNamesTheEntry: what is refused is named at the end with the entry that
// would allow it, and with those entries added the same attempts succeed.
func TestRefusalNamesTheEntry(t *testing.T) {
	w := outside(t)
	w.settle()
	entry := regexp.MustCompile(`to allow it, add (\S.*) to egress\.allow`)
	trials := []row{
		{"a name", []string{"tls", "evil.example:443", "evil.example", "x"}, "", "", `"evil.example"`},
		{"a port", []string{"tcp", "api.allowed.example:9007", "x"}, "", "", `"api.allowed.example:9007"`},
		{"an address", []string{"tcp", at(publicAddr, echoPort), "x"}, "", "", `"` + publicAddr + `/32:9007"`},
		{"a private address of a name", []string{"tcp", "ten.private.example:9007", "x"}, "", "", `"10.0.0.5/32:9007"`},
		{"ECH", []string{"tls", "ech.allowed.example:443", "hidden.example", "x", "ech.allowed.example"}, "", "", `{"ech":true,"host":"ech.allowed.example"}`},
		{"not TLS", []string{"http", "raw.allowed.example:443", get("x.example")}, "", "", `{"host":"raw.allowed.example","raw":true}`},
		{"port 80", []string{"http", "api.allowed.example:80", get("api.allowed.example")}, "", "", `"api.allowed.example:80"`},
	}
	good := func(out string) bool { return strings.HasPrefix(out, "ok: ") && !strings.HasPrefix(out, "ok: 403") }
	named := func(t *testing.T, s setup) {
		allow := []any{"api.allowed.example", "*.private.example:9007", "ech.allowed.example", "raw.allowed.example"}
		egress := map[string]any{"mode": "allow-list", "allow": allow}
		got, before := s.reach(t, w, egress, opsOf(trials))
		found := map[string]any{}
		for _, m := range entry.FindAllStringSubmatch(before.Stderr, -1) {
			var add any
			if err := json.Unmarshal([]byte(m[1]), &add); err != nil {
				t.Fatalf("%s: %v", m[1], err)
			}
			found[entryText(t, add)] = add
			allow = append(allow, add)
		}
		for _, r := range trials {
			if out := got.of(r.op...); good(out) {
				t.Errorf("%s: %s without an entry", r.name, out)
			}
			if found[r.list] == nil {
				t.Errorf("%s: there is no entry %s:\n%s", r.name, r.list, before.Stderr)
			}
		}
		if len(found) != len(trials) {
			t.Errorf("%d entries for %d trials: %v", len(found), len(trials), found)
		}
		egress["allow"] = allow
		got, after := s.reach(t, w, egress, opsOf(trials))
		for _, r := range trials {
			if out := got.of(r.op...); !good(out) {
				t.Errorf("%s: %s with the entry\n%s", r.name, out, after.Stderr)
			}
		}
	}
	inTurn(t, func(t *testing.T, s setup) {
		named(t, s)
		t.Run("in a session", func(t *testing.T) { named(t, s.stepping(t)) })
	})
}

// entryText is an entry in one spelling: without the port that is there by default.
func entryText(t *testing.T, entry any) string {
	t.Helper()
	if m, ok := entry.(map[string]any); ok && m["port"] == float64(443) {
		entry = maps.Clone(m)
		delete(entry.(map[string]any), "port")
	}
	b, err := json.Marshal(entry)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestLaunchRace: N15, A44: a program that connects at once never gets out where it may
// not, and always where it may.
func TestLaunchRace(t *testing.T) {
	w := outside(t)
	w.settle()
	runs := 20
	if soaking() {
		runs = 200
	}
	good, bad := []string{"tcp", "db.allowed.example:5432", "x"}, []string{"tcp", at(publicAddr, echoPort), "x"}
	inTurn(t, func(t *testing.T, s setup) {
		file := s.write(t, reachFields(t, allowed(), nil))
		state := s.private(t)
		flows := w.left(t, func() {
			var wg sync.WaitGroup
			turns := make(chan struct{}, 4)
			for range runs {
				turns <- struct{}{}
				wg.Go(func() {
					defer func() { <-turns }()
					ops := attempts{bad, good}
					got := endings(t, s.call(t, call{Net: w, State: state}, "exec", "--spec", file, "--", ops.json(t)), ops)
					if got.of(bad...) != "reset" || got.of(good...) != "ok: x" {
						t.Errorf("%v", got)
					}
				})
			}
			wg.Wait()
		})
		for _, f := range flows {
			if f != "udp "+at(worldDNS, 53) && f != "tcp "+at(publicAddr, 5432) && f != "tcp "+at(publicAddr6, 5432) {
				t.Errorf("%s left", f)
			}
		}
	})
}

// TestFlood: A56, A12: connections and questions are bounded, and what may be reached
// still is.
func TestFlood(t *testing.T) {
	w := outside(t)
	w.settle()
	ops := attempts{
		{"many", "400", at("192.175.48.40", silentPort)},
		{"many", "400", at(publicAddr, silentPort)},
		{"tcp", "db.allowed.example:5432", "x"},
	}
	inTurn(t, func(t *testing.T, s setup) {
		got, r := s.reach(t, w, allowed(), ops)
		if out := strings.TrimSuffix(got.of(ops[0]...), " late"); !strings.HasPrefix(out, "ok: ") || out == "ok: 0 open, 400 ended" {
			t.Errorf("allowed: %s", out)
		}
		if out := strings.TrimSuffix(got.of(ops[1]...), " late"); out != "ok: 0 open, 400 ended" {
			t.Errorf("refused: %s", out)
		}
		if out := got.of(ops[2]...); out != "ok: x" {
			t.Errorf("afterwards: %s", out)
		}
		if n := strings.Count(r.Stderr, "\n"); n > 30 {
			t.Errorf("%d lines on standard error:\n%s", n, r.Stderr)
		}
	})
}

// TestKilledMidTransfer: A49, A50: when agentshim is killed, no byte goes out any more,
// and nothing of rules or namespaces stays.
func TestKilledMidTransfer(t *testing.T) {
	w := outside(t)
	w.settle()
	inTurn(t, func(t *testing.T, s setup) {
		before := network(t)
		egress := map[string]any{"mode": "allow-list", "allow": []any{"db.allowed.example:9"}}
		file := s.write(t, reachFields(t, egress, nil))
		cmd, cancel := s.command(t, call{Net: w}, agentshim, "exec", "--spec", file, "--", attempts{{"upload", "db.allowed.example:9"}}.json(t))
		defer cancel()
		start := w.accepted.get("discarded")
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		moved := func() bool { return w.accepted.get("discarded") > start+1<<20 }
		if !within10s(moved) {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			t.Fatalf("nothing was uploaded: %s", &stderr)
		}
		ns := namespaceOf(t, "/reach/reach", "db.allowed.example:9")
		if len(users(t, ns)) < 2 {
			t.Error("the sandbox's processes are not found in its namespace")
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		time.Sleep(200 * time.Millisecond) // what the kernel held for the socket
		after := w.accepted.get("discarded")
		if flows := w.left(t, func() { time.Sleep(time.Second) }); len(flows) > 0 {
			t.Errorf("after the end: %q", flows)
		}
		if n := w.accepted.get("discarded"); n != after {
			t.Errorf("%d bytes arrived after the end", n-after)
		}
		if left := s.containers(t); len(left) > 0 {
			t.Errorf("containers left: %v", left)
		}
		gone := func() bool { return len(users(t, ns)) == 0 && network(t) == before }
		if !within10s(gone) {
			t.Errorf("in the sandbox's namespace: %v\n%s", users(t, ns), cmp.Diff(before, network(t)))
		}
	})
}

func within10s(f func() bool) bool {
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if f() {
			return true
		}
	}
	return false
}

// network is the host's packet rules, the namespaces that a mount keeps, and its links.
func network(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("sh", "-c", `nft --stateless list ruleset && grep -o ' - nsfs .*' /proc/self/mountinfo | sort; ls /run/netns; ip -brief link`).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// users are the processes in a network namespace.
func users(t *testing.T, ns string) []string {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(links, func(l string) bool {
		name, err := os.Readlink(l)
		return err != nil || name != ns
	})
}

// namespaceOf is the network namespace of the one process with that argument.
func namespaceOf(t *testing.T, program, arg string) string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err == nil && strings.HasPrefix(string(b), program+"\x00") && strings.Contains(string(b), arg) {
			ns, err := os.Readlink(filepath.Join(filepath.Dir(f), "ns/net"))
			if err != nil {
				t.Fatal(err)
			}
			return ns
		}
	}
	t.Fatalf("no process %s %s", program, arg)
	return ""
}

// TestParallelEgress: N14, 32 runs at a time leave the host's rules as they are, and each
// has its own.
func TestParallelEgress(t *testing.T) {
	w := outside(t)
	w.settle()
	s := setups[0]
	Need(t)
	before := network(t)
	outer := callerRules(t, w)
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			good, bad := fmt.Sprintf("192.175.48.%d", 100+i), fmt.Sprintf("192.175.48.%d", 100+(i+1)%32)
			ops := attempts{{"tcp", at(good, echoPort), "x"}, {"tcp", at(bad, echoPort), "x"}}
			got, _ := s.reach(t, w, map[string]any{"mode": "allow-list", "allow": []any{good + "/32:9007"}}, ops)
			if got.of(ops[0]...) != "ok: x" || got.of(ops[1]...) != "reset" {
				t.Errorf("%v", got)
			}
		})
	}
	wg.Wait()
	if !within10s(func() bool { return network(t) == before }) {
		t.Error(cmp.Diff(before, network(t)))
	}
	if got := callerRules(t, w); got != outer {
		t.Error(cmp.Diff(outer, got))
	}
}

// callerRules are the rules of the namespace that agentshim runs in.
func callerRules(t *testing.T, w *world) string {
	t.Helper()
	path, args := w.wrap(t, nil, "nft", []string{"--stateless", "list", "ruleset"})
	out, err := exec.Command(path, args...).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// TestEgressLog: every refusal of the battery is in the run's log, the log is whole, and
// a changed one is found out.
func TestEgressLog(t *testing.T) {
	w := outside(t)
	w.settle()
	ops := attempts{
		{"tls", "api.allowed.example:443", "api.allowed.example", "x"}, {"name", "evil.example"}, {"tcp", at(publicAddr, echoPort), "x"},
	}
	inTurn(t, func(t *testing.T, s setup) {
		state := s.private(t)
		file := s.write(t, reachFields(t, allowed(), nil))
		s.call(t, call{Net: w, State: state}, "exec", "--spec", file, "--", ops.json(t)).ok(t)
		rec := record(t, state)
		if rec.Egress == nil || rec.Egress.Log == nil || rec.Egress.Log.Allowed != 1 || rec.Egress.Log.Refused != 3 {
			t.Fatalf("record: %+v", rec.Egress) // the name was asked for twice: A and AAAA
		}
		in := func(args ...string) result {
			return s.call(t, call{State: state}, append([]string{"egress"}, args...)...)
		}
		tail := in("tail", "--no-follow", rec.ID).ok(t).Stdout
		for _, want := range []string{"allowed  api.allowed.example:443 (", "refused  name evil.example: unlisted", "refused  " + at(publicAddr, echoPort) + ": unlisted"} {
			if !strings.Contains(tail, want) {
				t.Errorf("tail has no %q:\n%s", want, tail)
			}
		}
		in("verify", rec.ID).ok(t)
		path := filepath.Join(state, "agentshim/runs", rec.ID, "egress.jsonl")
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, bytes.Replace(b, []byte("evil.example"), []byte("good.example"), 1), 0o600); err != nil {
			t.Fatal(err)
		}
		if r := in("verify", rec.ID); r.Code != 1 || !strings.Contains(r.Stderr, "line ") {
			t.Errorf("a changed log: %+v", r)
		}
	})
}

// TestWhyAgrees: A93, agentshim why says of every target that the battery tries what the
// gateway decided.
func TestWhyAgrees(t *testing.T) {
	w := outside(t)
	w.settle()
	rows := battery()
	inTurn(t, func(t *testing.T, s setup) {
		for _, egress := range []map[string]any{allowed(), opened()} {
			state := s.private(t)
			file := s.write(t, reachFields(t, egress, nil))
			s.call(t, call{Net: w, State: state}, "exec", "--spec", file, "--", opsOf(rows).json(t)).ok(t)
			decided := decisions(t, state)
			if len(decided) < 40 {
				t.Errorf("%s: %d targets were decided on", egress["mode"], len(decided))
			}
			for target, want := range decided {
				r := s.call(t, call{Net: w, State: state}, "why", "--json", "--spec", file, target)
				var got shim.Answer
				if err := json.Unmarshal([]byte(r.Stdout), &got); err != nil {
					t.Fatalf("why %s: %v: %+v", target, err, r)
				}
				if got.Allowed != (r.Code == 0) || got.Allowed == want.refuses || want.refuses && (string(got.Reason) != want.Reason || got.Entry != want.Entry) {
					t.Errorf("%s: why says %+v, the gateway %+v", target, got, want)
				}
			}
		}
	})
}

// decision is what a log says of a target.
type decision struct {
	Event, Name, Addr, Verdict, Reason, Entry string
	Port                                      int
	// refuses says that the policy itself does, whatever was sent and wherever the
	// name led.
	refuses bool
}

// decisions are a run's by target.
func decisions(t *testing.T, state string) map[string]decision {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(state, "agentshim/runs/*/egress.jsonl"))
	if err != nil || len(files) != 1 {
		t.Fatalf("logs: %v %v", files, err)
	}
	b, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]decision{}
	for line := range strings.Lines(string(b)) {
		var d decision
		if err := json.Unmarshal([]byte(line), &d); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		host := d.Name
		if host == "" {
			host = d.Addr
		}
		if host == "" || d.Event != "name" && d.Event != "connect" {
			continue
		}
		d.refuses = d.Reason == "unlisted" || d.Reason == "denied"
		if d.Event == "name" {
			d.Port = 443
		}
		out[at(host, d.Port)] = d
	}
	return out
}

// TestEgressTail: a run's decisions are shown while it runs, and tail ends with it.
func TestEgressTail(t *testing.T) {
	w := outside(t)
	w.settle()
	ops := attempts{{"tcp", at(publicAddr, echoPort), "x"}, {"many", "1", at("192.175.48.40", silentPort)}}
	inTurn(t, func(t *testing.T, s setup) {
		state := s.private(t)
		file := s.write(t, reachFields(t, allowed(), nil))
		cmd, cancel := s.command(t, call{Net: w, State: state}, agentshim, "exec", "--spec", file, "--", ops.json(t))
		defer cancel()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var logs []string
		if !within10s(func() bool {
			logs, _ = filepath.Glob(filepath.Join(state, "agentshim/runs/*/egress.jsonl"))
			return len(logs) == 1
		}) {
			_ = cmd.Process.Kill()
			t.Fatal("there is no log")
		}
		tail := s.call(t, call{State: state, Timeout: 30 * time.Second}, "egress", "tail", filepath.Base(filepath.Dir(logs[0]))).ok(t)
		if err := cmd.Wait(); err != nil {
			t.Errorf("the run: %v", err)
		}
		for _, want := range []string{"refused  " + at(publicAddr, echoPort), "allowed  " + at("192.175.48.40", silentPort), "end: 1 allowed, 1 refused"} {
			if !strings.Contains(tail.Stdout, want) {
				t.Errorf("tail has no %q:\n%s", want, tail.Stdout)
			}
		}
	})
}
