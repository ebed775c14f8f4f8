package integration

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// The outside of the egress tests: two network namespaces joined by one link. In
// caller agentshim runs, with a default route; in the other, every address there is
// answers. Neither has another link, so nothing leaves the machine whatever fails. The
// addresses that look public belong to the AS112 sinks (RFC 7535), which are globally
// reachable by the registries and which nobody is.
const (
	callerAddr  = "192.31.196.10"
	callerAddr6 = "2620:4f:8000::10"
	callerLAN   = "192.168.77.10"
	worldAddr   = "192.31.196.1"
	worldAddr6  = "2620:4f:8000::1"
	worldDNS    = "192.175.48.53"
	// Servers, by what they are to the caller.
	publicAddr  = "192.175.48.20"
	publicAddr6 = "2620:4f:8000:48::20"
	otherAddr   = "192.175.48.66"
	neighbour   = "192.168.77.5"
)

// Ports of the world's servers.
const (
	echoPort, sshPort, silentPort, discardPort = 9007, 22, 9001, 9
)

// Ports of the host's own servers: those on its loopback and on its other addresses.
const (
	servicePort, otherServicePort, hostPort = 3000, 3001, 8088
)

// world is that outside.
type world struct {
	dir string
	// holder is a process in the caller's namespaces, which last as long as it.
	holder         *exec.Cmd
	caller, beyond netns.NsHandle
	ca             *authority
	zone           *zone
	seen           *capture
	host           *tally
	accepted       *tally
	web            *http.ServeMux
}

var sharedWorld = sync.OnceValues(newWorld)

// outside is the world of this test binary's run.
func outside(t *testing.T) *world {
	t.Helper()
	Need(t)
	// Podman's pause process must not be the first to enter the caller's namespaces.
	setups[3].bare(t, "info").ok(t)
	w, err := sharedWorld()
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func newWorld() (*world, error) {
	w := &world{
		dir: filepath.Join(filepath.Dir(agentshim), "world"), zone: newZone(), seen: newCapture(),
		host: newTally(), accepted: newTally(), web: http.NewServeMux(),
	}
	if err := os.Mkdir(w.dir, 0o755); err != nil {
		return nil, err
	}
	var err error
	if w.ca, err = newAuthority(); err != nil {
		return nil, err
	}
	if err := os.WriteFile(w.caFile(), w.ca.pem, 0o644); err != nil {
		return nil, err
	}
	return w, errors.Join(w.hold(), w.link(), w.serve(), w.serveHost())
}

// caFile has the certificate that the world's servers are signed with.
func (w *world) caFile() string { return filepath.Join(w.dir, "ca.pem") }

// hold makes the namespaces. In the caller's mount namespace /etc/resolv.conf names
// the world's DNS server.
func (w *world) hold() error {
	conf := filepath.Join(w.dir, "resolv.conf")
	if err := os.WriteFile(conf, []byte("nameserver "+worldDNS+"\noptions timeout:2 attempts:1\n"), 0o644); err != nil {
		return err
	}
	// The process ends when its standard input does, with this one.
	cmd := exec.Command("sh", "-c", `mount --make-rslave / && mount --bind "$1" /etc/resolv.conf && echo ready && exec cat`, "sh", conf)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	_, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2, cmd.Start()); err != nil {
		return err
	}
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		return fmt.Errorf("the caller's namespaces: %w: %s", err, &stderr)
	}
	w.holder = cmd
	var err error
	if w.caller, err = netns.GetFromPid(cmd.Process.Pid); err != nil {
		return err
	}
	return onThread(func() error {
		w.beyond, err = netns.New()
		return err
	})
}

// onThread runs f on a thread that ends with it, whatever namespace f has entered.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- f()
	}()
	return <-done
}

// within runs f in a network namespace.
func within(ns netns.NsHandle, f func() error) error {
	return onThread(func() error {
		if err := netns.Set(ns); err != nil {
			return err
		}
		return f()
	})
}

func (w *world) link() error {
	err := within(w.beyond, func() error {
		pair := netlink.NewLinkAttrs()
		pair.Name = "beyond0"
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: pair, PeerName: "caller0", PeerNamespace: netlink.NsFd(w.caller)})
	})
	if err != nil {
		return fmt.Errorf("veth: %w", err)
	}
	err = within(w.beyond, func() error {
		if err := ready("beyond0", worldAddr+"/24", worldAddr6+"/64"); err != nil {
			return err
		}
		// The LAN is on the same link; whatever isn't the caller's is this side's own.
		lan := &netlink.Route{Dst: mustCIDR(callerLAN + "/32"), Scope: netlink.SCOPE_LINK}
		return errors.Join(addRoute("beyond0", lan), anyAddress("0.0.0.0/0"), anyAddress("::/0"))
	})
	if err != nil {
		return fmt.Errorf("the world's side: %w", err)
	}
	err = within(w.caller, func() error {
		if err := ready("caller0", callerAddr+"/24", callerLAN+"/24", callerAddr6+"/64"); err != nil {
			return err
		}
		return errors.Join(
			os.WriteFile("/proc/sys/net/ipv4/ping_group_range", []byte("0 2147483647"), 0),
			addRoute("caller0", &netlink.Route{Gw: net.ParseIP(worldAddr)}),
			addRoute("caller0", &netlink.Route{Gw: net.ParseIP(worldAddr6)}),
		)
	})
	if err != nil {
		return fmt.Errorf("the caller's side: %w", err)
	}
	return nil
}

// ready brings loopback and a link of this namespace up and gives it the addresses.
func ready(name string, addrs ...string) error {
	lo, err1 := netlink.LinkByName("lo")
	l, err2 := netlink.LinkByName(name)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	for _, a := range addrs {
		n := mustCIDR(a)
		if err := netlink.AddrAdd(l, &netlink.Addr{IPNet: n, Flags: unix.IFA_F_NODAD}); err != nil {
			return fmt.Errorf("address %s: %w", a, err)
		}
	}
	return errors.Join(netlink.LinkSetUp(lo), netlink.LinkSetUp(l))
}

// mustCIDR keeps the bits behind the length.
func mustCIDR(text string) *net.IPNet {
	ip, n, err := net.ParseCIDR(text)
	if err != nil {
		panic(err)
	}
	n.IP = ip
	return n
}

func addRoute(name string, r *netlink.Route) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	r.LinkIndex = l.Attrs().Index
	if err := netlink.RouteAdd(r); err != nil {
		return fmt.Errorf("route %v: %w", r, err)
	}
	return nil
}

// anyAddress makes every address of the range this namespace's own. The route is in
// the main table, behind the ones to the caller.
func anyAddress(prefix string) error {
	return addRoute("lo", &netlink.Route{
		Dst: mustCIDR(prefix), Table: unix.RT_TABLE_MAIN, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
	})
}

// wrap is the command in the caller's namespaces as that user.
func (w *world) wrap(t *testing.T, c *syscall.Credential, path string, args []string) (string, []string) {
	t.Helper()
	nsenter, err := exec.LookPath("nsenter")
	if err != nil {
		t.Fatal(err)
	}
	full := []string{"--target", strconv.Itoa(w.holder.Process.Pid), "--net", "--mount", "--"}
	if c != nil {
		groups := make([]string, len(c.Groups))
		for i, g := range c.Groups {
			groups[i] = strconv.Itoa(int(g))
		}
		full = append(
			full, "setpriv", "--reuid", strconv.Itoa(int(c.Uid)), "--regid", strconv.Itoa(int(c.Gid)),
			"--groups", strings.Join(groups, ","), "--",
		)
	}
	return nsenter, append(append(full, path), args...)
}

// plain makes the attempts as a process of the set-up's user in the caller's
// namespaces: what is reachable where no policy is.
func (w *world) plain(t *testing.T, s setup, ops attempts) tried {
	t.Helper()
	cmd, cancel := s.command(t, call{Net: w}, filepath.Join(mustReach(t), "reach"), ops.json(t))
	defer cancel()
	return endings(t, finish(t, cmd), ops)
}

// reachProgram is the folder with testdata/reach as a static program.
var reachProgram = sync.OnceValues(func() (string, error) {
	dir := filepath.Join(filepath.Dir(agentshim), "reach")
	cmd := exec.Command("go", "build", "-trimpath", "-o", filepath.Join(dir, "reach"), "./testdata/reach")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return dir, errors.Join(os.Chmod(dir, 0o755), os.Chmod(filepath.Join(dir, "reach"), 0o755))
})

func mustReach(t *testing.T) string {
	t.Helper()
	dir, err := reachProgram()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// left runs f and gives what went out into the world meanwhile: "tcp 192.0.2.1:443",
// sorted, each once. Neighbour discovery does not count.
func (w *world) left(t *testing.T, f func()) []string {
	t.Helper()
	before := w.seen.flows(t)
	f()
	var out []string
	for flow, n := range w.seen.flows(t) {
		if n != before[flow] {
			out = append(out, flow)
		}
	}
	slices.Sort(out)
	return out
}

// tally counts by name.
type tally struct {
	mu sync.Mutex
	n  map[string]int
}

func newTally() *tally { return &tally{n: map[string]int{}} }

func (c *tally) add(name string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[name] += n
}

func (c *tally) get(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[name]
}

// serve starts the world's servers. Each listens on all addresses.
func (w *world) serve() error {
	w.web.HandleFunc("/", func(rw http.ResponseWriter, r *http.Request) {
		sni := "none"
		if r.TLS != nil {
			sni = r.TLS.ServerName
		}
		at := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		fmt.Fprintf(rw, "world sni=%s host=%s at=%s\n", sni, r.Host, at)
	})
	w.web.HandleFunc("/redirect", func(rw http.ResponseWriter, r *http.Request) {
		http.Redirect(rw, r, r.URL.Query().Get("to"), http.StatusFound)
	})
	w.web.HandleFunc("/upgrade", upgrade)
	return within(w.beyond, func() error {
		return errors.Join(
			w.seen.start("beyond0"), w.zone.startAt(""), w.startWeb(80, false), w.startWeb(8080, false),
			w.startWeb(443, true), w.startWeb(8443, true),
			w.startTCP(echoPort, echoOnce), w.startTCP(5432, echoOnce), w.startTCP(853, echoOnce),
			w.startTCP(sshPort, w.serveSSH),
			w.startTCP(silentPort, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }),
			w.startTCP(discardPort, w.discard),
			startUDP(443), startUDP(123), startUDP(853), startUDP(5353), startUDP(5355), startUDP(echoPort),
		)
	})
}

// upgrade answers a websocket handshake and then echoes.
func upgrade(rw http.ResponseWriter, r *http.Request) {
	c, in, err := rw.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	defer c.Close()
	fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", r.Header.Get("Upgrade"))
	_, _ = io.Copy(c, in)
}

func (w *world) startWeb(port int, tls bool) error {
	l, err := w.listen(port)
	if err != nil {
		return err
	}
	s := &http.Server{Handler: w.web, TLSConfig: w.ca.config(), ReadHeaderTimeout: time.Minute, ErrorLog: noLog}
	if tls {
		go func() { _ = s.ServeTLS(l, "", "") }()
	} else {
		go func() { _ = s.Serve(l) }()
	}
	return nil
}

func (w *world) listen(port int) (net.Listener, error) {
	l, err := net.Listen("tcp", ":"+strconv.Itoa(port))
	return counting{l, w.accepted}, err
}

// counting counts the connections of a listener by its end's address.
type counting struct {
	net.Listener
	n *tally
}

func (l counting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.n.add(c.LocalAddr().String(), 1)
	}
	return c, err
}

func (w *world) startTCP(port int, f func(net.Conn)) error {
	l, err := w.listen(port)
	if err != nil {
		return err
	}
	go acceptAll(l, f)
	return nil
}

func acceptAll(l net.Listener, f func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			f(c)
		}()
	}
}

func echoOnce(c net.Conn) { _, _ = io.Copy(c, c) }

// discard counts the bytes under "discarded".
func (w *world) discard(c net.Conn) {
	b := make([]byte, 64<<10)
	for {
		n, err := c.Read(b)
		w.accepted.add("discarded", n)
		if err != nil {
			return
		}
	}
}

// startUDP answers every datagram with itself, from the address it went to.
func startUDP(port int) error {
	for _, family := range []string{"udp4", "udp6"} {
		c, err := net.ListenUDP(family, &net.UDPAddr{Port: port})
		if err != nil {
			return err
		}
		if err := packetInfo(c, family); err != nil {
			return err
		}
		go func() {
			b, oob := make([]byte, 2048), make([]byte, 256)
			for {
				n, on, _, from, err := c.ReadMsgUDP(b, oob)
				if err != nil {
					return
				}
				if family == "udp6" && on >= 36 {
					clear(oob[32:36]) // the interface it came in by (struct in6_pktinfo)
				}
				_, _, _ = c.WriteMsgUDP(b[:n], oob[:on], from)
			}
		}()
	}
	return nil
}

// packetInfo has each message's own address stand beside it (ip(7), IP_PKTINFO).
func packetInfo(c *net.UDPConn, family string) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = raw.Control(func(fd uintptr) {
		if family == "udp4" {
			set = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_PKTINFO, 1)
		} else {
			// Answers from addresses that only the route makes this namespace's need FREEBIND.
			set = errors.Join(
				unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, 1),
				unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_FREEBIND, 1),
			)
		}
	})
	return errors.Join(err, set)
}

// serveHost starts the host's own services. Each says its address.
func (w *world) serveHost() error {
	return within(w.caller, func() error {
		// A resolver on the host's loopback, where Docker's embedded one is, too.
		errs := []error{w.zone.startAt("127.0.0.53"), w.zone.startAt("127.0.0.11")}
		for _, a := range hostServices() {
			l, err := net.Listen("tcp", a)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			go acceptAll(l, func(c net.Conn) {
				w.host.add(a, 1)
				_, _ = io.WriteString(c, "host "+a+"\n")
			})
		}
		return errors.Join(errs...)
	})
}

func hostServices() []string {
	out := []string{
		fmt.Sprintf("127.0.0.1:%d", servicePort), fmt.Sprintf("127.0.0.1:%d", otherServicePort),
		fmt.Sprintf("[::1]:%d", otherServicePort),
	}
	for _, a := range []string{callerAddr, callerAddr6, callerLAN} {
		out = append(out, net.JoinHostPort(a, strconv.Itoa(hostPort)))
	}
	return out
}

// TestWorld is the control of every egress test: without a policy, as each set-up's
// user, everything answers; and the bare engine's --network none reaches nothing.
func TestWorld(t *testing.T) {
	w := outside(t)
	w.zone.set("world.example", publicAddr, publicAddr6)
	inTurn(t, func(t *testing.T, s setup) {
		trials := worldTrials()
		got := w.plain(t, s, of(trials))
		none := s.reachBare(t, []string{"--network=none"}, of(trials))
		for _, tr := range trials {
			if out := got.of(tr.op...); out != tr.control {
				t.Errorf("%s: %s, want %s", tr.name, out, tr.control)
			}
			if out := none.of(tr.op...); strings.HasPrefix(out, "ok") {
				t.Errorf("%s without a network: %s", tr.name, out)
			}
		}
	})
}

func worldTrials() []trial {
	at := func(addr string, port int) string { return net.JoinHostPort(addr, strconv.Itoa(port)) }
	list := []trial{
		{"name", []string{"name", "world.example"}, "", "ok: " + publicAddr + " " + publicAddr6},
		{"unknown name", []string{"name", "nobody.example"}, "", "NXDOMAIN"},
		{"DNS over TCP at any address", []string{"dns", "tcp", "1.1.1.1:53", "world.example", "A"}, "", "ok: NOERROR 1"},
		{"TLS", []string{"tls", at(publicAddr, 443), "a.example", "b.example"}, "", "ok: world sni=a.example host=b.example at=" + at(publicAddr, 443)},
		{"TLS by IPv6", []string{"tls", at(publicAddr6, 443), "a.example", "b.example"}, "", "ok: world sni=a.example host=b.example at=" + at(publicAddr6, 443)},
		{"hidden server name", []string{"tls", at(publicAddr, 443), "hidden.example", "b.example", "a.example"}, "", "ok: world sni=hidden.example host=b.example at=" + at(publicAddr, 443)},
		{"the server speaks first", []string{"tcp", at(publicAddr, sshPort)}, "", "ok: SSH-2.0-Go"},
		{"UDP", []string{"udp", at(publicAddr, 443), "quic"}, "", "ok: quic"},
		{"UDP by IPv6", []string{"udp", at(publicAddr6, 443), "quic"}, "", "ok: quic"},
		{"ICMP", []string{"datagram", "1", at(publicAddr, 0)}, "", "ok"},
	}
	for _, a := range []string{"169.254.169.254", "fd00:ec2::254", "168.63.129.16", neighbour, "10.0.0.5", "fc00::5", "100.64.0.5", "192.0.2.1"} {
		list = append(list, trial{a, []string{"http", at(a, 80), "GET / HTTP/1.0\r\nHost: x.example\r\n\r\n"}, "", "ok: 200 world sni=none host=x.example at=" + at(a, 80)})
	}
	for _, a := range hostServices() {
		list = append(list, trial{"host " + a, []string{"tcp", a}, "", "ok: host " + a})
	}
	return list
}

// reachBare makes the attempts in a container of the bare engine's.
func (s setup) reachBare(t *testing.T, flags []string, ops attempts) tried {
	t.Helper()
	args := append([]string{"run", "--rm", "--entrypoint=/reach/reach", "--volume=" + mustReach(t) + ":/reach:ro"}, flags...)
	return endings(t, s.bare(t, append(args, "agentshim/hello:test", ops.json(t))...), ops)
}
