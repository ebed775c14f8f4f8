package main

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/netpolicy"
)

// The relay benchmark's own processes, so that each has its own memory and processor
// time. They take orders on standard input, answer each on standard output, and end
// with the input.
var roles = map[string]func(args []string) error{"server": serverRole, "client": clientRole, "gateway": gatewayRole, "plain": plainRole, "swallow": swallowRole, "blast": blastRole}

// order is what a client is told to do; target, n and the rest as the operation needs.
type order struct {
	Op     string
	Target target
	// N are connections, Rate how many are made in a second.
	N, Rate int
	// Bytes are those of each stream, towards the client or else to the server.
	Bytes       int64
	Upload, TLS bool
	// Path is the socket file of a hand-over, Name what is looked up.
	Path, Name string
}

type answer struct {
	Err    string
	Cookie uint64
	Text   string
	// Each is the time of each connection, Took that of all.
	Each []time.Duration
	Took time.Duration
}

// target is an address to connect to; with Connect set it is an HTTP proxy's, which
// is asked for that one.
type target struct{ Dial, Connect string }

// connectWait bounds one connection's making.
const connectWait = time.Minute

// connect gives a connection on which the server has said its first byte.
func connect(t target) (net.Conn, error) {
	c, err := net.DialTimeout("tcp4", t.Dial, connectWait)
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(connectWait))
	// Behind its first byte the server says nothing unasked: nothing stays in r.
	r := bufio.NewReaderSize(c, 512)
	if t.Connect != "" {
		err = askProxy(c, r, t.Connect)
	}
	if err == nil {
		_, err = r.ReadByte()
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, c.SetDeadline(time.Time{})
}

func askProxy(w io.Writer, r *bufio.Reader, host string) error {
	if _, err := fmt.Fprintf(w, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", host, host); err != nil {
		return err
	}
	resp, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the proxy answers %s", resp.Status)
	}
	return nil
}

// --- server -----------------------------------------------------------------

// What a server is told: that TLS begins, or, with a length, a stream's direction.
const (
	streamOrder = 9
	download    = 'd'
	upload      = 'u'
	encrypted   = 't'
)

// buffer is how much both ends of a stream read and write at once.
const buffer = 256 << 10

func serverRole([]string) error {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(answer{Text: l.Addr().String()}); err != nil {
		return err
	}
	certificate, err := newCertificate()
	if err != nil {
		return err
	}
	go serveAll(l, func(c net.Conn) {
		defer c.Close()
		if _, err := c.Write([]byte{0}); err == nil {
			_ = serveStreams(c, &tls.Config{Certificates: []tls.Certificate{certificate}})
		}
	})
	return untilEnd()
}

func serveAll(l net.Listener, serve func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go serve(c)
	}
}

// untilEnd waits for the end of the input.
func untilEnd() error {
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// newCertificate makes one that nobody checks.
func newCertificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

// serveStreams does what it is told until the client ends.
func serveStreams(c net.Conn, config *tls.Config) error {
	for {
		var head [streamOrder]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			return err
		}
		n := int64(binary.BigEndian.Uint64(head[1:]))
		var err error
		switch head[0] {
		case encrypted:
			c = tls.Server(c, config)
		case download:
			err = write(c, n)
		case upload:
			if err = read(c, n); err == nil {
				_, err = c.Write([]byte{0})
			}
		}
		if err != nil {
			return err
		}
	}
}

func write(w io.Writer, n int64) error {
	b := make([]byte, buffer)
	for n > 0 {
		k, err := w.Write(b[:min(n, buffer)])
		if err != nil {
			return err
		}
		n -= int64(k)
	}
	return nil
}

func read(r io.Reader, n int64) error {
	b := make([]byte, buffer)
	for n > 0 {
		k, err := r.Read(b[:min(n, buffer)])
		if err != nil {
			return err
		}
		n -= int64(k)
	}
	return nil
}

// --- client -----------------------------------------------------------------

// client has the connections that it holds open.
type client struct{ held []net.Conn }

func clientRole([]string) error {
	c := &client{}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var o order
		if err := in.Decode(&o); err != nil {
			return nil // the benchmark's end
		}
		a, err := c.do(o)
		if err != nil {
			a.Err = err.Error()
		}
		if err := out.Encode(a); err != nil {
			return err
		}
	}
}

func (c *client) do(o order) (answer, error) {
	switch o.Op {
	case "cookie":
		cookie, err := netpolicy.NetCookie()
		return answer{Cookie: cookie}, err
	case "apply":
		return answer{}, handOver(o.Path)
	case "resolve":
		addr, err := resolve(o.Name)
		return answer{Text: addr.String()}, err
	case "hold":
		return answer{}, c.hold(o)
	case "drop":
		for _, one := range c.held {
			one.Close()
		}
		c.held = nil
		return answer{}, nil
	case "connect":
		return paced(o)
	case "burst":
		return burst(o)
	case "stream":
		return stream(o)
	}
	return answer{}, fmt.Errorf("no operation %q", o.Op)
}

// handOver makes the way out of this process's network namespace, as agentshim-netns
// does, for the gateway that listens at path.
func handOver(path string) error {
	conn, err := netpolicy.Dial(path)
	if err != nil {
		return err
	}
	defer conn.Close()
	sockets, report, failed := netpolicy.Apply(netpolicy.Setup{Rules: netpolicy.SandboxRules(true)})
	return errors.Join(failed, netpolicy.Send(conn, sockets, report, failed))
}

func resolve(name string) (netip.Addr, error) {
	q := new(dns.Msg).SetQuestion(name+".", dns.TypeA)
	reply, err := dns.Exchange(q, net.JoinHostPort(netpolicy.ResolverAddr.String(), "53"))
	if err != nil {
		return netip.Addr{}, err
	}
	if len(reply.Answer) == 1 {
		if a, ok := reply.Answer[0].(*dns.A); ok {
			addr, _ := netip.AddrFromSlice(a.A.To4())
			return addr, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("%s: %s", name, dns.RcodeToString[reply.Rcode])
}

func (c *client) hold(o order) error {
	for range o.N {
		one, err := connect(o.Target)
		if err != nil {
			return fmt.Errorf("connection %d: %w", len(c.held)+1, err)
		}
		c.held = append(c.held, one)
	}
	return nil
}

// paced makes one connection after the other, o.Rate in a second.
func paced(o order) (answer, error) {
	var a answer
	start := time.Now()
	for i := range o.N {
		time.Sleep(time.Until(start.Add(time.Duration(i) * time.Second / time.Duration(o.Rate))))
		began := time.Now()
		c, err := connect(o.Target)
		if err != nil {
			return a, err
		}
		a.Each = append(a.Each, time.Since(began))
		c.Close()
	}
	return a, nil
}

// burst makes o.N connections at once, and closes them when all are there.
func burst(o order) (answer, error) {
	a := answer{Each: make([]time.Duration, o.N)}
	conns, errs := make([]net.Conn, o.N), make([]error, o.N)
	var wg sync.WaitGroup
	start := time.Now()
	for i := range o.N {
		wg.Go(func() {
			conns[i], errs[i] = connect(o.Target)
			a.Each[i] = time.Since(start)
		})
	}
	wg.Wait()
	a.Took = time.Since(start)
	closeConns(conns)
	return a, errors.Join(errs...)
}

func closeConns(conns []net.Conn) {
	for _, c := range conns {
		if c != nil {
			c.Close()
		}
	}
}

// stream moves o.Bytes on each of o.N connections, which exist before the clock starts.
func stream(o order) (answer, error) {
	conns, errs := make([]net.Conn, o.N), make([]error, o.N)
	defer func() { closeConns(conns) }()
	for i := range conns {
		var err error
		if conns[i], err = connect(o.Target); err == nil && o.TLS {
			conns[i], err = encrypt(conns[i])
		}
		if err != nil {
			return answer{}, err
		}
	}
	var wg sync.WaitGroup
	start := time.Now()
	for i, c := range conns {
		wg.Go(func() { errs[i] = move(c, o) })
	}
	wg.Wait()
	return answer{Took: time.Since(start)}, errors.Join(errs...)
}

func tell(c net.Conn, kind byte, n int64) error {
	_, err := c.Write(binary.BigEndian.AppendUint64([]byte{kind}, uint64(n)))
	return err
}

// encrypt goes on in TLS with a server that is not checked.
func encrypt(c net.Conn) (net.Conn, error) {
	if err := tell(c, encrypted, 0); err != nil {
		return c, err
	}
	secured := tls.Client(c, &tls.Config{InsecureSkipVerify: true})
	return secured, secured.Handshake()
}

func move(c net.Conn, o order) error {
	kind := byte(download)
	if o.Upload {
		kind = upload
	}
	if err := tell(c, kind, o.Bytes); err != nil {
		return err
	}
	if !o.Upload {
		return read(c, o.Bytes)
	}
	if err := write(c, o.Bytes); err != nil {
		return err
	}
	return read(c, 1)
}

// --- a plain relay ----------------------------------------------------------

// plainRole carries connections to the server at args[0] and decides nothing: what a
// second connection costs by itself.
func plainRole(args []string) error {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(answer{Text: l.Addr().String()}); err != nil {
		return err
	}
	go serveAll(l, func(in net.Conn) {
		defer in.Close()
		out, err := net.Dial("tcp4", args[0])
		if err != nil {
			return
		}
		defer out.Close()
		ended := make(chan struct{}, 2)
		pass := func(dst, src net.Conn) {
			_, _ = io.Copy(dst, src) // splices
			_ = dst.(*net.TCPConn).CloseWrite()
			ended <- struct{}{}
		}
		go pass(in, out)
		go pass(out, in)
		<-ended
		<-ended
	})
	return untilEnd()
}

// --- gateway ----------------------------------------------------------------

// The server's names. The second is a host service's.
const (
	listedName  = "listed.example.com"
	serviceName = "bench"
)

// gatewayRole takes a sandbox's sockets and serves them as the shim does. Its
// arguments are a folder of its own, the sandbox's cookie, the server's port and the
// number of entries of its allow-list.
func gatewayRole(args []string) error {
	if len(args) != 4 {
		return errors.New("gateway DIR COOKIE PORT ENTRIES")
	}
	cookie, err1 := strconv.ParseUint(args[1], 10, 64)
	port, err2 := strconv.Atoi(args[2])
	entries, err3 := strconv.Atoi(args[3])
	// The host's resolver finds the name in the hosts file, as quickly as may be.
	err4 := unix.Mount(filepath.Join(args[0], "hosts"), "/etc/hosts", "", unix.MS_BIND, "")
	policy, err5 := netpolicy.Compile(allowing(port, entries), nil, nil)
	if err := errors.Join(err1, err2, err3, err4, err5); err != nil {
		return err
	}
	return serveSandbox(args[0], cookie, policy)
}

func serveSandbox(dir string, cookie uint64, policy netpolicy.Policy) error {
	out := json.NewEncoder(os.Stdout)
	socket, err := netpolicy.Listen(filepath.Join(dir, "socket"))
	if err != nil {
		return err
	}
	if err := out.Encode(answer{Text: "listening"}); err != nil {
		return err
	}
	peer, err := netpolicy.AcceptPeer(socket, time.Minute)
	if err != nil {
		return err
	}
	defer peer.Close()
	listeners, report, err := peer.Receive(cookie, nil, time.Minute)
	if err != nil || report.Error != "" {
		return fmt.Errorf("hand-over: %s %w", report.Error, err)
	}
	log, err := netpolicy.CreateLog(filepath.Join(dir, "egress.jsonl"), "bench", time.Now)
	if err != nil {
		return err
	}
	var summary netpolicy.Summary
	g := netpolicy.NewGateway(policy.Table(), listeners, nil, func(e netpolicy.Event) error {
		summary.Add(e)
		return log.Write(e)
	})
	g.Open()
	if err := out.Encode(answer{Text: "open"}); err != nil {
		return err
	}
	err = untilEnd()
	closed := g.Close()
	_, logged := log.Close()
	return errors.Join(err, closed, logged)
}

// allowing gives an allow-list of n entries: the server's name and address, and
// names, wildcards and addresses that nobody asks for.
func allowing(port, n int) harness.Egress {
	p := strconv.Itoa(port)
	e := harness.Egress{
		Mode:         netpolicy.AllowList,
		Allow:        []harness.Allow{{Host: listedName + ":" + p}, {Host: "127.0.0.1/32:" + p}},
		HostServices: []harness.HostService{{Name: serviceName, Port: port}},
	}
	for i := len(e.Allow); i < n; i++ {
		other := [...]string{
			fmt.Sprintf("n%d.example.org", i),
			fmt.Sprintf("*.w%d.example.org", i),
			fmt.Sprintf("10.%d.%d.%d/32", byte(i>>16), byte(i>>8), byte(i)),
		}
		e.Allow = append(e.Allow, harness.Allow{Host: other[i%len(other)]})
	}
	return e
}
