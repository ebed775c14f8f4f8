// Command reach makes network attempts and prints how each ended. Its one argument
// is a JSON list of attempts, [["kind", "operand", ...], ...]; its output is the JSON
// list of outcomes in the same order: "ok", "ok: detail", "reset" for a connection that
// was accepted and then reset without a byte, "closed" for one that ended without one,
// an error number's name, or a DNS response code. One that took longer than a second
// has " late" behind it.
package main

import (
	"bufio"
	"bytes"
	"crypto/ecdh"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// attempts are the kinds. Each returns a detail and an error.
var attempts = map[string]func(arg []string) (string, error){
	"tcp": tcp, "udp": udp, "name": name, "dns": question, "tls": hello, "http": requests,
	"datagram": datagram, "raw": raw, "echo": echo, "run": run, "many": many, "socket": socket, "upload": upload,
	"fetch": fetch, "serve": serve, "sibling": sibling,
}

// sibling echoes what comes to a port, TCP and UDP, until this program is killed.
func sibling(arg []string) (string, error) {
	l, err := net.Listen("tcp", ":"+arg[0])
	if err != nil {
		return "", err
	}
	u, err := net.ListenPacket("udp", ":"+arg[0])
	if err != nil {
		return "", err
	}
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = u.WriteTo(b[:n], from)
		}
	}()
	for {
		c, err := l.Accept()
		if err != nil {
			return "", err
		}
		go func() {
			defer c.Close()
			_, _ = io.Copy(c, c)
		}()
	}
}

// patience bounds an attempt, late is when a refusal was not quick.
const (
	patience = 4 * time.Second
	late     = time.Second
)

func main() {
	var all [][]string
	if len(os.Args) != 2 || json.Unmarshal([]byte(os.Args[1]), &all) != nil {
		fmt.Fprintln(os.Stderr, "reach: one JSON list of attempts is wanted")
		os.Exit(2)
	}
	outcomes := make([]string, 0, len(all))
	for _, a := range all {
		f := attempts[a[0]]
		if f == nil {
			fmt.Fprintf(os.Stderr, "reach: no attempt %q\n", a[0])
			os.Exit(2)
		}
		start := time.Now()
		out := outcome(f(a[1:]))
		if time.Since(start) > late {
			out += " late"
		}
		outcomes = append(outcomes, out)
	}
	if err := json.NewEncoder(os.Stdout).Encode(outcomes); err != nil {
		os.Exit(1)
	}
}

func outcome(detail string, err error) string {
	var errno syscall.Errno
	var name *net.DNSError
	var netErr net.Error
	switch {
	case err == nil && detail == "":
		return "ok"
	case err == nil:
		return "ok: " + detail
	case errors.As(err, &name) && name.IsNotFound:
		return "NXDOMAIN"
	case errors.As(err, &name):
		return "not resolved: " + name.Err
	case errors.Is(err, errReset):
		return "reset"
	case errors.Is(err, io.EOF):
		return "closed"
	case errors.As(err, &errno):
		return unix.ErrnoName(errno)
	case errors.As(err, &netErr) && netErr.Timeout():
		return "timeout"
	}
	return err.Error()
}

// errReset tells a connection that was made and then reset from one that was refused.
var errReset = errors.New("reset")

func afterConnect(err error) error {
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return errReset
	}
	return err
}

func connect(addr string) (net.Conn, error) {
	c, err := net.DialTimeout("tcp", addr, patience)
	// A reset right behind the handshake can be there before the caller looks.
	err = afterConnect(err)
	if err == nil {
		err = c.SetDeadline(time.Now().Add(patience))
	}
	return c, err
}

// tcp ADDRESS [TEXT] sends the text, if there is one, and gives what comes first.
func tcp(arg []string) (string, error) {
	c, err := connect(arg[0])
	if err != nil {
		return "", err
	}
	defer c.Close()
	if len(arg) > 1 {
		if _, err := io.WriteString(c, arg[1]); err != nil {
			return "", afterConnect(err)
		}
	}
	b := make([]byte, 64)
	n, err := c.Read(b)
	return strings.TrimSpace(string(b[:n])), afterConnect(err)
}

// udp ADDRESS TEXT sends one datagram and gives the answer.
func udp(arg []string) (string, error) {
	c, err := net.DialTimeout("udp", arg[0], patience)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, arg[1]); err != nil {
		return "", err
	}
	b := make([]byte, 64)
	n, err := c.Read(b)
	return string(b[:n]), err
}

// name NAME asks the resolver of /etc/resolv.conf, and /etc/hosts.
func name(arg []string) (string, error) {
	addrs, err := net.LookupHost(arg[0])
	slices.Sort(addrs)
	return strings.Join(addrs, " "), err
}

// dns NETWORK SERVER NAME TYPE asks that server and gives the response code and the
// number of answers.
func question(arg []string) (string, error) {
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(arg[2]), dns.StringToType[arg[3]])
	c := dns.Client{Net: arg[0], Timeout: patience}
	r, _, err := c.Exchange(m, arg[1])
	if err != nil {
		return "", afterConnect(err)
	}
	return fmt.Sprintf("%s %d", dns.RcodeToString[r.Rcode], len(r.Answer)), nil
}

// tls ADDRESS SERVER-NAME HOST [ECH-PUBLIC-NAME] makes a request over TLS and gives the
// first line of the answer's body. An empty server name sends none.
func hello(arg []string) (string, error) {
	c, err := connect(arg[0])
	if err != nil {
		return "", err
	}
	defer c.Close()
	// Who answers is what the body says.
	conf := &tls.Config{ServerName: arg[1], InsecureSkipVerify: true}
	if len(arg) > 3 {
		conf.EncryptedClientHelloConfigList = echConfigs(arg[3])
		conf.MinVersion = tls.VersionTLS13
		conf.EncryptedClientHelloRejectionVerify = func(tls.ConnectionState) error { return nil }
	}
	t := tls.Client(c, conf)
	if err := t.Handshake(); err != nil {
		return "", afterConnect(err)
	}
	fmt.Fprintf(t, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", arg[2])
	r, err := http.ReadResponse(bufio.NewReader(t), nil)
	if err != nil {
		return "", afterConnect(err)
	}
	return firstLine(r.Body)
}

// echConfigs is a configuration (draft-ietf-tls-esni, section 4) for the world's key.
func echConfigs(public string) []byte {
	key, err := ecdh.X25519().NewPrivateKey(bytes.Repeat([]byte{7}, 32))
	if err != nil {
		panic(err)
	}
	var body []byte
	body = append(body, 1, 0, 0x20) // id, DHKEM(X25519)
	body = vector(body, key.PublicKey().Bytes())
	body = vector(body, []byte{0, 1, 0, 1}) // HKDF-SHA256, AES-128-GCM
	body = append(body, 32, byte(len(public)))
	body = append(body, public...)
	body = append(body, 0, 0)
	return vector(nil, vector([]byte{0xfe, 0x0d}, body))
}

func vector(b, content []byte) []byte {
	return append(binary.BigEndian.AppendUint16(b, uint16(len(content))), content...)
}

func firstLine(r io.Reader) (string, error) {
	line, err := bufio.NewReader(r).ReadString('\n')
	if errors.Is(err, io.EOF) && line != "" {
		err = nil
	}
	return strings.TrimSpace(line), afterConnect(err)
}

// http ADDRESS BYTES sends the bytes on one connection and gives each answer's status
// and body's first line.
func requests(arg []string) (string, error) {
	c, err := connect(arg[0])
	if err != nil {
		return "", err
	}
	defer c.Close()
	if _, err := io.WriteString(c, arg[1]); err != nil {
		return "", afterConnect(err)
	}
	var got []string
	in := bufio.NewReader(c)
	for range strings.Count(arg[1], "\r\n\r\n") {
		r, err := http.ReadResponse(in, nil)
		if err != nil && len(got) == 0 {
			return "", afterConnect(err)
		}
		if err != nil {
			break
		}
		if r.StatusCode == http.StatusSwitchingProtocols {
			return "101 " + r.Header.Get("Upgrade"), nil
		}
		b, _ := io.ReadAll(r.Body)
		line, _, _ := strings.Cut(string(b), "\n")
		got = append(got, fmt.Sprintf("%d %s", r.StatusCode, line))
	}
	return strings.Join(got, "; "), nil
}

// datagram PROTOCOL ADDRESS sends eight bytes through a datagram socket of that protocol.
func datagram(arg []string) (string, error) { return send(unix.SOCK_DGRAM, arg) }

// raw PROTOCOL ADDRESS does it through a raw socket.
func raw(arg []string) (string, error) { return send(unix.SOCK_RAW, arg) }

func send(kind int, arg []string) (string, error) {
	target, err := net.ResolveUDPAddr("udp", arg[1])
	if err != nil {
		return "", err
	}
	family, sa := sockaddr(target)
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, number(arg[0]))
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	if kind == unix.SOCK_DGRAM {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1)
	}
	if err == nil && len(arg) > 2 {
		_, from := sockaddr(&net.UDPAddr{IP: net.ParseIP(arg[2])})
		err = unix.Bind(fd, from)
	}
	if err != nil {
		return "", err
	}
	b := []byte{8, 0, 0, 0, 0, 0, 0, 0} // an ICMP echo request
	if family == unix.AF_INET6 {
		b[0] = 128
	}
	return "", unix.Sendto(fd, b, 0, sa)
}

func sockaddr(a *net.UDPAddr) (int, unix.Sockaddr) {
	if v4 := a.IP.To4(); v4 != nil {
		return unix.AF_INET, &unix.SockaddrInet4{Port: a.Port, Addr: [4]byte(v4)}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Port: a.Port, Addr: [16]byte(a.IP)}
}

// socket FAMILY KIND PROTOCOL makes a socket.
func socket(arg []string) (string, error) {
	fd, err := unix.Socket(number(arg[0]), number(arg[1])|unix.SOCK_CLOEXEC, number(arg[2]))
	if err != nil {
		return "", err
	}
	return "", unix.Close(fd)
}

// echo NETWORK LISTEN [DIAL-HOST] carries a byte to a server of its own and back.
func echo(arg []string) (string, error) {
	if strings.HasPrefix(arg[0], "udp") {
		l, err := net.ListenPacket(arg[0], arg[1])
		if err != nil {
			return "", err
		}
		defer l.Close()
		go func() {
			b := make([]byte, 64)
			if n, from, err := l.ReadFrom(b); err == nil {
				_, _ = l.WriteTo(b[:n], from)
			}
		}()
		return udp([]string{dialled(l.LocalAddr(), arg), "x"})
	}
	l, err := net.Listen(arg[0], arg[1])
	if err != nil {
		return "", err
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			_, _ = io.CopyN(c, c, 1)
			c.Close()
		}
	}()
	return tcp([]string{dialled(l.Addr(), arg), "x"})
}

func dialled(l net.Addr, arg []string) string {
	host, port, _ := net.SplitHostPort(l.String())
	if len(arg) > 2 {
		host = arg[2]
	}
	return net.JoinHostPort(host, port)
}

// run PROGRAM ARGS... gives its last line, or its exit code and that line.
func run(arg []string) (string, error) {
	out, err := exec.Command(arg[0], arg[1:]...).CombinedOutput()
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	last := lines[len(lines)-1]
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return fmt.Sprintf("exit %d %s", exit.ExitCode(), last), nil
	}
	return last, err
}

// many N ADDRESS opens N connections at a time, holds them for a second and gives how
// many of them ended each way.
func many(arg []string) (string, error) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	open, ended := 0, 0
	for range number(arg[0]) {
		wg.Go(func() {
			c, err := connect(arg[1])
			if err == nil {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(time.Second))
				_, err = c.Read(make([]byte, 1))
			}
			mu.Lock()
			defer mu.Unlock()
			if errors.Is(err, os.ErrDeadlineExceeded) {
				open++
			} else {
				ended++
			}
		})
	}
	wg.Wait()
	return fmt.Sprintf("%d open, %d ended", open, ended), nil
}

// upload ADDRESS sends until it can't, after a line on standard error.
func upload(arg []string) (string, error) {
	c, err := net.DialTimeout("tcp", arg[0], patience)
	if err != nil {
		return "", err
	}
	defer c.Close()
	b := bytes.Repeat([]byte("x"), 64<<10)
	for n := 0; ; n++ {
		if _, err := c.Write(b); err != nil {
			return "", afterConnect(err)
		}
		if n == 0 {
			fmt.Fprintln(os.Stderr, "uploading")
		}
	}
}

// fetch URL [CA-FILE] uses net/http as programs do, and gives the first line. Without a file
// the system's certificates are trusted.
func fetch(arg []string) (string, error) {
	var roots *x509.CertPool
	if len(arg) > 1 {
		ca, err := os.ReadFile(arg[1])
		if err != nil {
			return "", err
		}
		roots = x509.NewCertPool()
		roots.AppendCertsFromPEM(ca)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{RootCAs: roots}
	r, err := (&http.Client{Transport: transport, Timeout: patience}).Get(arg[0])
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	return firstLine(r.Body)
}

func number(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		panic(err)
	}
	return n
}
