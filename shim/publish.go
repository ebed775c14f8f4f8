package shim

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// PublishRecord is one port on the host that leads into the sandbox.
type PublishRecord struct {
	spec.Published
	// Connections were carried, Refused reset because there were wire.MaxTunnels already.
	Connections int64 `json:"connections"`
	Refused     int64 `json:"refused,omitempty"`
}

// published are a run's ports on the host. They are taken before anything is started, so
// that one in use refuses the run, and listened on when the sandbox is proven. Until then who
// has SO_REUSEADDR set, too, can listen there first, which refuses the run then. Nil is none.
type published struct{ ports []*publishedPort }

// publishedPort is bound, then a listener.
type publishedPort struct {
	spec.Published
	socket               *os.File
	listener             net.Listener
	connections, refused atomic.Int64
}

// bindPublished takes the ports. With an error none is taken.
func bindPublished(list []spec.Published) (*published, error) {
	p := &published{}
	for _, one := range list {
		socket, at, err := bindPort(netip.AddrPortFrom(one.Address, one.HostPort))
		if err != nil {
			p.close()
			return nil, publishRefused(one, err)
		}
		one.HostPort = at
		p.ports = append(p.ports, &publishedPort{Published: one, socket: socket})
	}
	return p, nil
}

// bindPort binds a TCP socket without listening on it, and tells its port.
func bindPort(at netip.AddrPort) (*os.File, uint16, error) {
	family, address := unix.AF_INET, unix.Sockaddr(nil)
	if at.Addr().Is4() {
		address = &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	} else {
		family, address = unix.AF_INET6, &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, 0, err
	}
	port, err := bindTo(fd, family, address)
	if err != nil {
		unix.Close(fd)
		return nil, 0, err
	}
	return os.NewFile(uintptr(fd), at.String()), port, nil
}

// bindTo takes a port that only closed connections of an earlier run still have
// (SO_REUSEADDR), and leaves IPv4 to others. Accepted sockets inherit the buffers' sizes.
func bindTo(fd, family int, address unix.Sockaddr) (uint16, error) {
	err := errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, wire.TunnelBuffer),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, wire.TunnelBuffer),
	)
	if err == nil && family == unix.AF_INET6 {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
	}
	if err == nil {
		err = unix.Bind(fd, address)
	}
	if err != nil {
		return 0, err
	}
	bound, err := unix.Getsockname(fd)
	switch a := bound.(type) {
	case *unix.SockaddrInet4:
		return uint16(a.Port), nil
	case *unix.SockaddrInet6:
		return uint16(a.Port), nil
	}
	return 0, err
}

// publishRefused says which port it is, and what can be done.
func publishRefused(p spec.Published, err error) error {
	e := &Error{Reason: ReasonPublish, Msg: "egress.publish: " + netip.AddrPortFrom(p.Address, p.HostPort).String(), Err: err}
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		e.Hint = fmt.Sprintf("end what listens there, choose another port, or %q for any free one", harness.Published{Address: p.Address, Port: p.Port})
	case errors.Is(err, unix.EADDRNOTAVAIL):
		e.Hint = "the address must be one of this host's"
	case errors.Is(err, unix.EACCES):
		e.Hint = "low ports are root's (sysctl net.ipv4.ip_unprivileged_port_start): choose a higher one"
	}
	return e
}

// listen opens the ports: connections wait until they are served.
func (p *published) listen(notice func(string, ...any)) error {
	for _, port := range p.all() {
		if err := port.listen(); err != nil {
			return publishRefused(port.Published, err)
		}
		notice("publish: %s leads to port %d of the sandbox", netip.AddrPortFrom(port.Address, port.HostPort), port.Port)
	}
	return nil
}

func (p *publishedPort) listen() error {
	raw, err := p.socket.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), unix.SOMAXCONN) })
	if err = errors.Join(cerr, err); err != nil {
		return err
	}
	p.listener, err = net.FileListener(p.socket)
	if err != nil {
		return err
	}
	return p.socket.Close() // the listener has a descriptor of its own
}

// serve carries what connects until the listeners are closed.
func (p *published) serve(tunnels *wire.Tunnels, start func(func())) {
	for _, port := range p.all() {
		start(func() { port.serve(tunnels) })
	}
}

// acceptPause is slept when no connection can be taken for want of descriptors.
const acceptPause = 100 * time.Millisecond

func (p *publishedPort) serve(tunnels *wire.Tunnels) {
	for {
		conn, err := p.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(acceptPause)
			continue
		}
		end := hostEnd{conn.(*net.TCPConn)}
		if !tunnels.Open(end, p.Port) {
			p.refused.Add(1)
			end.Reset()
			continue
		}
		p.connections.Add(1)
	}
}

// hostEnd is the host's end of a connection.
type hostEnd struct{ *net.TCPConn }

// Reset implements wire.Socket.
func (h hostEnd) Reset() {
	_ = h.SetLinger(0)
	h.Close()
}

// close frees the ports; connections that are carried end with their tunnels.
func (p *published) close() {
	for _, port := range p.all() {
		if port.listener != nil {
			port.listener.Close()
		}
		port.socket.Close() // an error: it was closed when the listener was made
	}
}

func (p *published) records() []PublishRecord {
	var out []PublishRecord
	for _, port := range p.all() {
		out = append(out, PublishRecord{Published: port.Published, Connections: port.connections.Load(), Refused: port.refused.Load()})
	}
	return out
}

func (p *published) all() []*publishedPort {
	if p == nil {
		return nil
	}
	return p.ports
}
