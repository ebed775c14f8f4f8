package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agentshim/agentshim/netpolicy"
)

// peer is one of the benchmark's own processes.
type peer struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
}

// startPeer starts this program in a role, in new namespaces where flags say so.
func startPeer(cloned, unshared uintptr, args ...string) (*peer, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &peer{cmd: exec.Command(self, append([]string{roleArg}, args...)...)}
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: cloned, Unshareflags: unshared}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = json.NewDecoder(out)
	return p, p.cmd.Start()
}

func (p *peer) answer() (answer, error) {
	var a answer
	if err := p.out.Decode(&a); err != nil {
		return a, fmt.Errorf("%s: %w", strings.Join(p.cmd.Args[1:], " "), err)
	}
	if a.Err != "" {
		return a, errors.New(a.Err)
	}
	return a, nil
}

func (p *peer) ask(o order) (answer, error) {
	if err := json.NewEncoder(p.in).Encode(o); err != nil {
		return answer{}, err
	}
	return p.answer()
}

func (p *peer) stop() {
	p.in.Close()
	_ = p.cmd.Wait()
}

// way is one way to the server.
type way struct {
	name   string
	client *peer
	target target
	// carrier is the process between client and server, 0 for none.
	carrier int
	// limited says that the carrier bounds how fast connections are made.
	limited bool
}

func (w way) ask(o order) (answer, error) {
	o.Target = w.target
	a, err := w.client.ask(o)
	if err != nil {
		return a, fmt.Errorf("%s: %s: %w", w.name, o.Op, err)
	}
	return a, nil
}

// world is the server, a client beside it, and what was started since.
type world struct {
	dir    string
	server string
	client *peer
	stops  []func()
}

func newWorld() (*world, error) {
	w := &world{}
	var err error
	if w.dir, err = os.MkdirTemp("/var/tmp", "agentshim-bench-"); err != nil {
		return w, err
	}
	if err := os.Chmod(w.dir, 0o755); err != nil { // the proxies have users of their own
		return w, err
	}
	server, err := w.peer(0, 0, "server")
	if err != nil {
		return w, err
	}
	a, err := server.answer()
	if err != nil {
		return w, err
	}
	w.server = a.Text
	w.client, err = w.peer(0, 0, "client")
	return w, err
}

func (w *world) peer(cloned, unshared uintptr, args ...string) (*peer, error) {
	p, err := startPeer(cloned, unshared, args...)
	if err == nil {
		w.stops = append(w.stops, p.stop)
	}
	return p, err
}

// mark remembers what runs; the function it gives stops what was started since.
func (w *world) mark() (back func()) {
	n := len(w.stops)
	return func() {
		for i := len(w.stops) - 1; i >= n; i-- {
			w.stops[i]()
		}
		w.stops = w.stops[:n]
	}
}

func (w *world) close() {
	for i := len(w.stops) - 1; i >= 0; i-- {
		w.stops[i]()
	}
	if w.dir != "" {
		os.RemoveAll(w.dir)
	}
}

// folder makes a new folder.
func (w *world) folder(name string) (string, error) { return os.MkdirTemp(w.dir, name+"-") }

func (w *world) direct() way {
	return way{name: "direct", client: w.client, target: target{Dial: w.server}}
}

// plain is the way through a relay that decides nothing.
func (w *world) plain() (way, error) {
	p, err := w.peer(0, 0, "plain", w.server)
	if err != nil {
		return way{}, err
	}
	a, err := p.answer()
	return way{"a relay without rules", w.client, target{Dial: a.Text}, p.cmd.Process.Pid, false}, err
}

// relay makes a sandbox's network namespace with a client in it and a gateway before
// it. It gives the way to the server by its listed name, and by a host service's.
func (w *world) relay(entries int) (listed, service way, err error) {
	dir, err := w.folder("gateway")
	if err != nil {
		return way{}, way{}, err
	}
	if err := os.WriteFile(filepath.Join(dir, "hosts"), []byte("127.0.0.1 "+listedName+"\n"), 0o644); err != nil {
		return way{}, way{}, err
	}
	client, err := w.peer(syscall.CLONE_NEWNET, 0, "client")
	if err != nil {
		return way{}, way{}, err
	}
	gateway, err := w.gateway(dir, client, entries)
	if err != nil {
		return way{}, way{}, err
	}
	to := func(kind, name string) (way, error) {
		a, err := client.ask(order{Op: "resolve", Name: name})
		_, port, _ := net.SplitHostPort(w.server)
		return way{"relay, " + kind, client, target{Dial: net.JoinHostPort(a.Text, port)}, gateway.cmd.Process.Pid, true}, err
	}
	listed, err1 := to("a name", listedName)
	service, err2 := to("host service", serviceName+"."+netpolicy.HostDomain)
	return listed, service, errors.Join(err1, err2)
}

// gateway starts the gateway that serves the client's namespace.
func (w *world) gateway(dir string, client *peer, entries int) (*peer, error) {
	a, err := client.ask(order{Op: "cookie"})
	if err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(w.server)
	if err != nil {
		return nil, err
	}
	g, err := w.peer(0, syscall.CLONE_NEWNS, "gateway", dir, strconv.FormatUint(a.Cookie, 10), port, strconv.Itoa(entries))
	if err != nil {
		return nil, err
	}
	if _, err := g.answer(); err != nil { // it listens
		return nil, err
	}
	if _, err := client.ask(order{Op: "apply", Path: filepath.Join(dir, "socket")}); err != nil {
		return nil, err
	}
	_, err = g.answer() // it is open
	return g, err
}

// The proxies' configurations, with their log as it is by default; the folder and the
// port are theirs.
const (
	tinyproxyConf = `Port %[2]s
Listen 127.0.0.1
MaxClients 4096
Timeout 600
LogFile "%[1]s/tinyproxy.log"
LogLevel Info
Allow 127.0.0.1
`
	squidConf = `http_port 127.0.0.1:%[2]s
http_access allow all
cache deny all
cache_mem 8 MB
access_log stdio:%[1]s/access.log
cache_log %[1]s/cache.log
pid_filename %[1]s/squid.pid
coredump_dir %[1]s
max_filedescriptors 16384
shutdown_lifetime 0 seconds
pinger_enable off
visible_hostname bench
`
)

func (w *world) tinyproxy() (way, error) {
	return w.proxy("tinyproxy", tinyproxyConf, "tinyproxy", "-d", "-c")
}

func (w *world) squid() (way, error) { return w.proxy("squid", squidConf, "squid", "-N", "-f") }

// proxy starts an HTTP proxy, as Debian's own user for that, and waits until it listens.
func (w *world) proxy(name, conf string, argv ...string) (way, error) {
	dir, err := w.folder(name)
	if err != nil {
		return way{}, err
	}
	addr, err := freeAddr()
	if err != nil {
		return way{}, err
	}
	_, port, _ := net.SplitHostPort(addr)
	file := filepath.Join(dir, "conf")
	if err := os.WriteFile(file, fmt.Appendf(nil, conf, dir, port), 0o644); err != nil {
		return way{}, err
	}
	cmd, err := proxyCommand(dir, append(argv, file))
	if err != nil {
		return way{}, err
	}
	if err := cmd.Start(); err != nil {
		return way{}, fmt.Errorf("%w (integration/setup.sh bench)", err)
	}
	w.stops = append(w.stops, func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return way{name, w.client, target{Dial: addr, Connect: w.server}, cmd.Process.Pid, false}, waitListening(addr)
}

func proxyCommand(dir string, argv []string) (*exec.Cmd, error) {
	account, err := user.Lookup("proxy")
	if err != nil {
		return nil, err
	}
	uid, gid := number(account.Uid), number(account.Gid)
	if err := os.Chown(dir, int(uid), int(gid)); err != nil {
		return nil, err
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: uid, Gid: gid},
		Pdeathsig:  syscall.SIGKILL, // relayPart's thread lives as long as the program
	}
	return cmd, nil
}

func freeAddr() (string, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

func waitListening(addr string) error {
	var err error
	for range 200 {
		var c net.Conn
		if c, err = net.Dial("tcp4", addr); err == nil {
			return c.Close()
		}
		time.Sleep(50 * time.Millisecond)
	}
	return err
}
