package netpolicy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// maxHandover bounds the one message of a hand-over, in bytes.
const maxHandover = 192 << 10

// handoverVersion is that of both messages.
const handoverVersion = 3

// ErrHandover says that what came from the helper is not what it must hand over.
var ErrHandover = errors.New("hand-over refused")

// Order is what a helper waits for once it is connected: the sandbox that it is for.
type Order struct {
	Version int `json:"version"`
	// Netns is the link of the sandbox's network namespace: "net:[4026532281]".
	Netns string `json:"netns"`
	// PID is a process in it as the helper numbers it; 0 for a helper that is in it
	// already.
	PID int `json:"pid,omitempty"`
	Setup
}

// Setup is what a helper makes in the sandbox's network namespace.
type Setup struct {
	// Renderer is Nftables, Iptables or Auto; empty is Nftables.
	Renderer string `json:"renderer,omitempty"`
	// Rules are the packet rules.
	Rules Ruleset `json:"rules"`
	// Network is what the sandbox is attached to, nil for nothing.
	Network *Network `json:"network,omitempty"`
}

// Report is what a helper did in a sandbox's network namespace, or why it didn't.
type Report struct {
	Version int `json:"version"`
	// Rules are the packet rules as the kernel holds them, as iptables' text.
	Rules string `json:"rules,omitempty"`
	// Netns is the link of the network namespace: "net:[4026532281]".
	Netns string `json:"netns,omitempty"`
	// Renderer is what put the rules in: "nftables", "iptables v1.8.9 nf_tables".
	Renderer string `json:"renderer,omitempty"`
	// Others is what of the other back end holds rules there, too; empty for nothing.
	Others string `json:"others,omitempty"`
	// Error is why nothing is handed over; the others are then empty.
	Error string `json:"error,omitempty"`
}

// planned are the sockets of a hand-over, in their order.
var planned = [...]struct {
	kind, proto int
	addr        netip.AddrPort
}{
	{unix.SOCK_DGRAM, unix.IPPROTO_UDP, DNSListener},
	{unix.SOCK_STREAM, unix.IPPROTO_TCP, DNSListener},
	{unix.SOCK_STREAM, unix.IPPROTO_TCP, RelayListener},
}

// backlog is how many connections wait for the gateway to take them.
const backlog = 4096

// Sockets are the descriptors of one sandbox's listeners on their way out.
type Sockets []int

// Close closes all of them.
func (s Sockets) Close() {
	for _, fd := range s {
		unix.Close(fd)
	}
}

// ThreadNetns is the link of the calling thread's network namespace. The caller has
// locked its goroutine to the thread.
func ThreadNetns() (string, error) { return os.Readlink("/proc/thread-self/ns/net") }

// Apply makes the one way out of the calling thread's network namespace, which must be
// a fresh one, or attached to the one network: listeners first, then the packet rules, read
// back, and the route last, so that without a network no packet ever leaves a socket without
// the rules. The caller has made sure that the namespace is the sandbox's. One that is not
// as it must be is left as it is; what Apply did before another error stays, and leads
// nowhere. The iptables renderer runs programs with this one's environment.
func Apply(s Setup) (Sockets, Report, error) {
	if len(s.Rules.Chains) == 0 {
		return nil, Report{}, errors.New("no packet rules are given")
	}
	watch, err := s.watch() // before the look at the namespace: it tells of what changes after
	if err != nil {
		return nil, Report{}, err
	}
	listeners, report, err := s.open()
	if err != nil {
		watch.Close()
		return nil, Report{}, err
	}
	return append(listeners, watch...), report, nil
}

// open is Apply without the watch.
func (s Setup) open() (Sockets, Report, error) {
	if err := checkNamespace(s.Network); err != nil {
		return nil, Report{}, err
	}
	if err := loopbackUp(); err != nil {
		return nil, Report{}, err
	}
	listeners, err := listenAll()
	if err != nil {
		return nil, Report{}, err
	}
	report, err := s.apply()
	if err != nil {
		listeners.Close()
		return nil, Report{}, err
	}
	return listeners, report, nil
}

func (s Setup) apply() (Report, error) {
	renderer, err := newRenderer(s.Renderer, s.Rules)
	if err != nil {
		return Report{}, err
	}
	report := Report{Version: handoverVersion, Renderer: renderer.name()}
	if report.Rules, err = renderer.apply(s.Rules); err != nil {
		return Report{}, err
	}
	way := everything
	if s.Network != nil {
		way = namePool // all other addresses have routes of the network's
	}
	if err := AddWay(way); err != nil {
		return Report{}, err
	}
	if report.Others, err = renderer.others(); err != nil {
		return Report{}, err
	}
	report.Netns, err = ThreadNetns()
	return report, err
}

func listenAll() (Sockets, error) {
	var out Sockets
	for _, p := range planned {
		fd, err := listenOn(p.kind, p.proto, p.addr)
		if err != nil {
			out.Close()
			return nil, fmt.Errorf("listen on %s: %w", p.addr, err)
		}
		out = append(out, fd)
	}
	return out, nil
}

// watch is openWatch's socket where there is a network, none where there is not.
func (s Setup) watch() (Sockets, error) {
	if s.Network == nil {
		return nil, nil
	}
	fd, err := openWatch()
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	return Sockets{fd}, nil
}

func listenOn(kind, proto int, addr netip.AddrPort) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return 0, err
	}
	err = unix.Bind(fd, &unix.SockaddrInet4{Addr: addr.Addr().As4(), Port: int(addr.Port())})
	if err == nil && kind == unix.SOCK_STREAM {
		err = unix.Listen(fd, backlog)
	}
	if err != nil {
		unix.Close(fd)
		return 0, err
	}
	return fd, nil
}

// Listen makes the socket file of a hand-over, which everyone who reaches its folder
// may connect to. It is the caller's to remove.
func Listen(path string) (*net.UnixListener, error) {
	addr, done, err := UnixAddr("unixpacket", path)
	if err != nil {
		return nil, err
	}
	defer done()
	l, err := net.ListenUnix("unixpacket", addr)
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // its name is gone with UnixAddr's descriptor
	if err := os.Chmod(path, 0o666); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Dial connects to the socket file of a hand-over.
func Dial(path string) (*net.UnixConn, error) {
	addr, done, err := UnixAddr("unixpacket", path)
	if err != nil {
		return nil, err
	}
	defer done()
	return net.DialUnix("unixpacket", nil, addr)
}

// UnixAddr names a socket file through its folder's descriptor, until done is
// called: a socket's address holds 107 bytes (unix(7)).
func UnixAddr(network, path string) (addr *net.UnixAddr, done func(), err error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, nil, err
	}
	name := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))
	return &net.UnixAddr{Net: network, Name: name}, func() { dir.Close() }, nil
}

// ReadOrder waits for the order, and for as long as the shim is there.
func ReadOrder(conn *net.UnixConn) (Order, error) {
	message := make([]byte, maxHandover)
	n, err := conn.Read(message)
	if err != nil {
		return Order{}, fmt.Errorf("no order: %w", err)
	}
	var o Order
	if err := decodeOne(message[:n], &o); err != nil {
		return Order{}, fmt.Errorf("order: %w", err)
	}
	if o.Version != handoverVersion || o.Netns == "" || o.PID < 0 {
		return Order{}, fmt.Errorf("order: not one of version %d", handoverVersion)
	}
	return o, nil
}

// Send hands over what Apply made, or its error, in one message. The sockets are
// closed here, whatever becomes of it.
func Send(conn *net.UnixConn, sockets Sockets, report Report, failed error) error {
	defer sockets.Close()
	if failed != nil {
		sockets, report = nil, Report{Version: handoverVersion, Error: failed.Error()}
	}
	b, err := json.Marshal(report)
	if err != nil {
		return err
	}
	var rights []byte
	if len(sockets) > 0 {
		rights = unix.UnixRights(sockets...)
	}
	if _, _, err := conn.WriteMsgUnix(b, rights, nil); err != nil {
		return fmt.Errorf("hand-over: %w", err)
	}
	return nil
}

// Peer is a helper that connected. Its methods don't wait longer than their timeout.
type Peer struct {
	conn *net.UnixConn
	// process is a pidfd of the number it connected with. Should it have ended by then and
	// the number be another's, AwaitEnd waits for that one.
	process int
}

// AcceptPeer waits for the one helper and closes l.
func AcceptPeer(l *net.UnixListener, timeout time.Duration) (*Peer, error) {
	defer l.Close()
	err := l.SetDeadline(time.Now().Add(timeout))
	var conn *net.UnixConn
	if err == nil {
		conn, err = l.AcceptUnix()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrHandover, err) // closed: nobody will connect
	}
	process, err := peerProcess(conn)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("%w: its process: %w", ErrHandover, err)
	}
	return &Peer{conn: conn, process: process}, nil
}

// PeerCred is who called connect(2), or listen(2), on the other end of conn; its pid is 0
// where that process is outside this pid namespace (unix(7), SO_PEERCRED).
func PeerCred(conn *net.UnixConn) (*unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var sockErr error
	err = raw.Control(func(fd uintptr) {
		cred, sockErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	return cred, errors.Join(err, sockErr)
}

func peerProcess(conn *net.UnixConn) (int, error) {
	cred, err := PeerCred(conn)
	if err != nil {
		return -1, err
	}
	return unix.PidfdOpen(int(cred.Pid), 0) // EINVAL for 0
}

// Close lets the helper go: without a report sent it ends.
func (p *Peer) Close() {
	p.conn.Close()
	unix.Close(p.process)
}

// Order tells the helper which sandbox it is for.
func (p *Peer) Order(o Order, timeout time.Duration) error {
	o.Version = handoverVersion
	b, err := json.Marshal(o)
	if err != nil {
		return err
	}
	if err := p.conn.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := p.conn.Write(b); err != nil {
		return fmt.Errorf("%w: order: %w", ErrHandover, err)
	}
	return nil
}

// Receive takes the helper's one message, with a watch where there is a network. Every
// socket in it is checked: that it is what was planned, and that it lies in the network
// namespace of that cookie, which is not the caller's own. Anything else is
// ErrHandover with nothing left open. A Report with an Error is returned with nothing else
// and no error. The rules in the report are the helper's word: the caller compares them.
func (p *Peer) Receive(cookie uint64, network *Network, timeout time.Duration) (Listeners, Report, error) {
	if err := p.conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return Listeners{}, Report{}, err
	}
	count := len(planned)
	if network != nil {
		count++
	}
	files, report, err := receive(p.conn, count)
	defer closeAll(files) // what is passed on are duplicates
	if err != nil || report.Error != "" {
		return Listeners{}, report, err
	}
	if err := checkSockets(files, cookie); err != nil {
		return Listeners{}, Report{}, err
	}
	listeners, err := adopt(files, network)
	return listeners, report, err
}

// AwaitEnd waits until the helper's process is gone: its pidfd is then readable
// (pidfd_open(2)).
func (p *Peer) AwaitEnd(timeout time.Duration) error {
	for end := time.Now().Add(timeout); ; {
		fds := []unix.PollFd{{Fd: int32(p.process), Events: unix.POLLIN}} //nolint:gosec // a descriptor
		n, err := unix.Poll(fds, int(max(0, time.Until(end).Milliseconds())))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return fmt.Errorf("%w: the helper does not end", ErrHandover)
		default:
			return nil
		}
	}
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// receive takes one message. It returns every descriptor that came, also with an error.
func receive(conn *net.UnixConn, want int) ([]*os.File, Report, error) {
	message := make([]byte, maxHandover)
	rights := make([]byte, unix.CmsgSpace(4*want))
	n, rn, flags, _, err := conn.ReadMsgUnix(message, rights) // close-on-exec
	files, rerr := parseRights(rights[:rn])
	if err := errors.Join(err, rerr); err != nil {
		return files, Report{}, fmt.Errorf("%w: %w", ErrHandover, err)
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return files, Report{}, fmt.Errorf("%w: the message or its descriptors are too many", ErrHandover)
	}
	report, err := parseReport(message[:n])
	if err != nil {
		return files, Report{}, err
	}
	if report.Error != "" {
		want = 0
	}
	if len(files) != want {
		return files, Report{}, fmt.Errorf("%w: %d descriptors, not %d", ErrHandover, len(files), want)
	}
	return files, report, nil
}

func parseRights(b []byte) ([]*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(b)
	if err != nil {
		return nil, err
	}
	var out []*os.File
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return out, err
		}
		for _, fd := range fds {
			out = append(out, os.NewFile(uintptr(fd), "hand-over"))
		}
	}
	return out, nil
}

// parseReport takes one report and nothing else.
func parseReport(b []byte) (Report, error) {
	var r Report
	if err := decodeOne(b, &r); err != nil {
		return Report{}, fmt.Errorf("%w: %w", ErrHandover, err)
	}
	done := r.Rules != "" && r.Netns != ""
	failed := r == Report{Version: r.Version, Error: r.Error} && r.Error != ""
	if r.Version != handoverVersion || done == failed || done && r.Error != "" {
		return Report{}, fmt.Errorf("%w: neither a result nor an error of version %d", ErrHandover, handoverVersion)
	}
	return r, nil
}

// decodeOne takes one JSON value of known fields and nothing behind it.
func decodeOne(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one value")
	}
	return nil
}

func checkSockets(files []*os.File, cookie uint64) error {
	own, err := NetCookie()
	if err != nil {
		return err
	}
	if cookie == 0 || cookie == own {
		return fmt.Errorf("%w: the network namespace is this program's own", ErrHandover)
	}
	for i, f := range files {
		check := checkSocket
		if i == len(planned) {
			check = checkWatch
		}
		if err := check(i, int(f.Fd()), cookie); err != nil {
			return err
		}
	}
	return nil
}

// checkSocket compares one socket with what was planned: socket(7).
func checkSocket(i, fd int, cookie uint64) error {
	want, listening := planned[i], 0
	if want.kind == unix.SOCK_STREAM {
		listening = 1
	}
	if err := checkOptions(i, fd, []socketOption{
		{"family", unix.SO_DOMAIN, unix.AF_INET},
		{"type", unix.SO_TYPE, want.kind},
		{"protocol", unix.SO_PROTOCOL, want.proto},
		{"listening", unix.SO_ACCEPTCONN, listening},
	}); err != nil {
		return err
	}
	return checkPlace(i, fd, cookie)
}

type socketOption struct {
	name      string
	opt, want int
}

func checkOptions(i, fd int, options []socketOption) error {
	for _, opt := range options {
		got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, opt.opt)
		if err != nil {
			return fmt.Errorf("%w: descriptor %d: %w", ErrHandover, i, err)
		}
		if got != opt.want {
			return fmt.Errorf("%w: socket %d: %s %d, not %d", ErrHandover, i, opt.name, got, opt.want)
		}
	}
	return nil
}

func checkPlace(i, fd int, cookie uint64) error {
	name, err := unix.Getsockname(fd)
	if err != nil {
		return fmt.Errorf("%w: socket %d: %w", ErrHandover, i, err)
	}
	in, ok := name.(*unix.SockaddrInet4)
	if want := planned[i].addr; !ok || in.Addr != want.Addr().As4() || in.Port != int(want.Port()) {
		return fmt.Errorf("%w: socket %d is not on %s", ErrHandover, i, want)
	}
	return checkCookie(i, fd, cookie)
}

func checkCookie(i, fd int, cookie uint64) error {
	got, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return fmt.Errorf("%w: socket %d: %w", ErrHandover, i, err)
	}
	if got != cookie {
		return fmt.Errorf("%w: socket %d is in network namespace %d, not %d", ErrHandover, i, got, cookie)
	}
	return nil
}

// NetCookie is the cookie of the calling thread's network namespace, which no other one
// has until the next boot (Linux 5.14).
func NetCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}

// adopt makes listeners of duplicates of the files.
func adopt(files []*os.File, network *Network) (Listeners, error) {
	dns, err1 := net.FilePacketConn(files[0])
	dnsTCP, err2 := net.FileListener(files[1])
	relay, err3 := net.FileListener(files[2])
	if err := errors.Join(err1, err2, err3); err != nil {
		for _, c := range []io.Closer{dns, dnsTCP, relay} {
			if c != nil {
				c.Close()
			}
		}
		return Listeners{}, fmt.Errorf("hand-over: %w", err)
	}
	l := Listeners{DNS: dns.(*net.UDPConn), DNSTCP: dnsTCP.(*net.TCPListener), Relay: relay.(*net.TCPListener)}
	if network == nil {
		return l, nil
	}
	var err error
	if l.Watch, err = newWatch(files[len(planned)], *network); err != nil {
		l.Close()
		return Listeners{}, fmt.Errorf("hand-over: %w", err)
	}
	return l, nil
}
