package integration

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"math/big"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

var noLog = log.New(io.Discard, "", 0)

// answer is what the world's DNS server says about a name.
type answer struct {
	addrs []string
	cname string
	rcode int
	delay time.Duration
}

// zone is the world's DNS server. A name that was not set does not exist.
type zone struct {
	mu    sync.Mutex
	names map[string]func(n int) answer
	asked map[string]int
	// hints has the names with an HTTPS record.
	hints map[string]bool
}

func newZone() *zone {
	return &zone{names: map[string]func(int) answer{}, asked: map[string]int{}, hints: map[string]bool{}}
}

// set gives a name its addresses.
func (z *zone) set(name string, addrs ...string) {
	z.on(name, func(int) answer { return answer{addrs: addrs} })
}

// on has f answer for a name; n counts its A questions from 0.
func (z *zone) on(name string, f func(n int) answer) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.names[name] = f
	z.asked[name+" A"] = 0
}

// https gives a name an HTTPS record.
func (z *zone) https(name string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.hints[name] = true
}

// questions are how often each name was asked for, of any type.
func (z *zone) questions() map[string]int {
	z.mu.Lock()
	defer z.mu.Unlock()
	return maps.Clone(z.asked)
}

// freeBind lets a socket answer from addresses that only a route makes the namespace's.
var freeBind = net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_FREEBIND, 1) })
}}

// startAt serves an address of this thread's namespace, or all.
func (z *zone) startAt(host string) error {
	udp, err := freeBind.ListenPacket(context.Background(), "udp", host+":53")
	if err != nil {
		return err
	}
	tcp, err := net.Listen("tcp", host+":53")
	if err != nil {
		return err
	}
	go func() { _ = (&dns.Server{PacketConn: udp, Handler: z}).ActivateAndServe() }()
	go func() { _ = (&dns.Server{Listener: tcp, Handler: z}).ActivateAndServe() }()
	return nil
}

func (z *zone) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	reply := new(dns.Msg)
	reply.SetReply(q)
	if len(q.Question) == 1 {
		z.answer(reply, q.Question[0])
	}
	_ = w.WriteMsg(reply)
}

func (z *zone) answer(reply *dns.Msg, q dns.Question) {
	name := strings.ToLower(strings.TrimSuffix(q.Name, "."))
	z.mu.Lock()
	f := z.names[name]
	n := z.asked[name+" A"]
	z.asked[name]++
	if q.Qtype == dns.TypeA {
		z.asked[name+" A"]++
	}
	hint := z.hints[name]
	z.mu.Unlock()
	if hint && q.Qtype == dns.TypeHTTPS {
		reply.Answer = append(reply.Answer, resource(q.Name, "HTTPS", "1 . alpn=h2"))
	}
	if f == nil {
		reply.Rcode = dns.RcodeNameError
		return
	}
	a := f(n)
	time.Sleep(a.delay)
	reply.Rcode = a.rcode
	if a.cname != "" {
		reply.Answer = append(reply.Answer, resource(q.Name, "CNAME", dns.Fqdn(a.cname)))
		q.Name = dns.Fqdn(a.cname)
		z.answer(reply, q)
		return
	}
	for _, text := range a.addrs {
		kind := "A"
		if netip.MustParseAddr(text).Is6() {
			kind = "AAAA"
		}
		if dns.StringToType[kind] == q.Qtype {
			reply.Answer = append(reply.Answer, resource(q.Name, kind, text))
		}
	}
}

func resource(name, kind, value string) dns.RR {
	rr, err := dns.NewRR(name + " 0 IN " + kind + " " + value)
	if err != nil {
		panic(err)
	}
	return rr
}

// authority signs a certificate for every server name that is asked for.
type authority struct {
	pem  []byte
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "agentshim test CA"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		return nil, err
	}
	if c, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	return &authority{pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), cert: c, key: key}, nil
}

// config also opens hellos that are encrypted for testdata/reach's key.
func (a *authority) config() *tls.Config {
	key, err := ecdh.X25519().NewPrivateKey(bytes.Repeat([]byte{7}, 32))
	if err != nil {
		panic(err)
	}
	c := &tls.Config{GetCertificate: a.certificate, NextProtos: []string{"h2", "http/1.1"}}
	for _, public := range []string{"a.example", "api.allowed.example", "ech.allowed.example"} {
		c.EncryptedClientHelloKeys = append(c.EncryptedClientHelloKeys, tls.EncryptedClientHelloKey{
			Config: echConfig(key.PublicKey().Bytes(), public), PrivateKey: key.Bytes(),
		})
	}
	return c
}

// echConfig is draft-ietf-tls-esni's ECHConfig, section 4: X25519, HKDF-SHA256, AES-128-GCM.
func echConfig(key []byte, public string) []byte {
	body := append([]byte{1, 0, 0x20, 0, byte(len(key))}, key...)
	body = append(body, 0, 4, 0, 1, 0, 1, 32, byte(len(public)))
	body = append(append(body, public...), 0, 0)
	return append(binary.BigEndian.AppendUint16([]byte{0xfe, 0x0d}, uint16(len(body))), body...)
}

func (a *authority) certificate(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "world"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if h.ServerName != "" {
		c.DNSNames = []string{h.ServerName}
	} else {
		c.IPAddresses = []net.IP{h.Conn.LocalAddr().(*net.TCPAddr).IP}
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// capture counts the bytes of every packet that comes in over a link, by where it goes.
type capture struct {
	fd   int
	done chan struct{}
	mu   sync.Mutex
	n    map[string]int
}

func newCapture() *capture { return &capture{done: make(chan struct{}), n: map[string]int{}} }

func (c *capture) start(link string) error {
	i, err := net.InterfaceByName(link)
	if err != nil {
		return err
	}
	all := uint16(unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8) // in network byte order
	c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(all))
	if err != nil {
		return err
	}
	err = errors.Join(
		unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: i.Index}),
		unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
	)
	go c.read()
	return err
}

func (c *capture) read() {
	b := make([]byte, 256)
	for {
		n, from, err := unix.Recvfrom(c.fd, b, unix.MSG_TRUNC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		ll, ok := from.(*unix.SockaddrLinklayer)
		if err != nil || !ok {
			return
		}
		if ll.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if flow := target(b[:min(n, len(b))]); flow != "" {
			c.mu.Lock()
			c.n[flow] += n
			c.mu.Unlock()
		}
	}
}

// flows gives the bytes by target, when all that has arrived so far is counted.
func (c *capture) flows(t *testing.T) map[string]int {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if n, err := unix.IoctlGetInt(c.fd, unix.TIOCINQ); err == nil && n == 0 {
			break
		}
	}
	time.Sleep(20 * time.Millisecond)
	if s, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS); err != nil || s.Drops > 0 {
		t.Fatalf("packets went uncounted: %v %v", s, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.n)
}

// target says where a packet goes, empty for neighbour discovery and what is not IP.
func target(b []byte) string {
	if len(b) < 20 {
		return ""
	}
	var proto byte
	var addr netip.Addr
	var rest []byte
	switch b[0] >> 4 {
	case 4:
		proto, addr = b[9], netip.AddrFrom4([4]byte(b[16:20]))
		rest = b[min(len(b), int(b[0]&15)*4):]
	case 6:
		if len(b) < 40 {
			return ""
		}
		proto, addr, rest = b[6], netip.AddrFrom16([16]byte(b[24:40])), b[40:]
	default:
		return ""
	}
	switch {
	case (proto == unix.IPPROTO_TCP || proto == unix.IPPROTO_UDP) && len(rest) >= 4:
		name := map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}[proto]
		return name + " " + net.JoinHostPort(addr.String(), strconv.Itoa(int(binary.BigEndian.Uint16(rest[2:]))))
	case proto == unix.IPPROTO_ICMPV6 && len(rest) > 0 && rest[0] >= 133 && rest[0] <= 137:
		return ""
	case proto == 0 && addr.IsMulticast(): // hop-by-hop: multicast listener reports
		return ""
	}
	return fmt.Sprintf("protocol %d %s", proto, addr)
}
