package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// dockerSocket is where the test machine's daemon listens.
const dockerSocket = "/var/run/docker.sock"

// dockerProxy stands before Docker's daemon: what concerns a run's own container can
// be changed, held, answered in the daemon's place, or cut. All else passes as it is,
// the containers that help a run among it.
//
// Its points are "create", "attach", "start" and "wait" for a call on its way to the
// daemon, "input" and "output" for the bytes to and from an attached container.
type dockerProxy struct {
	socket  string
	forward *httputil.ReverseProxy

	mu      sync.Mutex
	rules   proxyRules
	own     map[string]bool // ids and names of runs' own containers
	calls   map[*ownCall]bool
	held    map[string]chan struct{}
	waiting map[string]int
}

// proxyRules are what a proxy does beside passing on; the zero value is nothing.
type proxyRules struct {
	// edit may change the body of a container that is made, and refuses it with an error.
	edit func(own bool, body map[string]any) error
	// created may change the daemon's answer to the making of a run's own container.
	created func(answer map[string]any)
	// answers stand for the daemon's, by point.
	answers map[string]http.HandlerFunc
}

// ownCall is one call about a run's own container, with what it keeps open.
type ownCall struct {
	point string
	conns []net.Conn
}

func newDockerProxy(t *testing.T, s setup) *dockerProxy {
	t.Helper()
	p := &dockerProxy{
		socket: filepath.Join(s.folder(t), "docker.sock"),
		own:    map[string]bool{fakeID: true}, calls: map[*ownCall]bool{}, held: map[string]chan struct{}{}, waiting: map[string]int{},
	}
	p.forward = httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: "docker"})
	p.forward.FlushInterval = -1
	p.forward.Transport = &http.Transport{DialContext: dialDocker, DisableCompression: true}
	p.forward.ModifyResponse = p.answered
	p.forward.ErrorHandler = func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }
	l, err := net.Listen("unix", p.socket)
	if err == nil {
		err = os.Chmod(p.socket, 0o666)
	}
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: p, ConnContext: func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, connKey{}, c)
	}}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() {
		server.Close()
		p.cut()
		p.open()
	})
	return p
}

func dialDocker(ctx context.Context, _, _ string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", dockerSocket)
}

// env has agentshim take the proxy for the daemon.
func (p *dockerProxy) env() string { return "DOCKER_HOST=unix://" + p.socket }

// rule replaces the rules for the calls to come.
func (p *dockerProxy) rule(r proxyRules) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = r
}

// hold stops what comes to the points. release lets go on what it stopped, and so does
// open.
func (p *dockerProxy) hold(points ...string) (release func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var gates []string
	for _, point := range points {
		if p.held[point] == nil {
			p.held[point] = make(chan struct{})
			gates = append(gates, point)
		}
	}
	return func() { p.letGo(gates) }
}

// open lets go on all that is held.
func (p *dockerProxy) open() {
	p.letGo([]string{"create", "attach", "start", "wait", "input", "output"})
}

func (p *dockerProxy) letGo(points []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, point := range points {
		if gate := p.held[point]; gate != nil {
			close(gate)
			delete(p.held, point)
		}
	}
}

// waits says that something is held at a point.
func (p *dockerProxy) waits(point string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.waiting[point] > 0
}

// cut closes, at both ends and without a word, what is open of the runs' own calls.
func (p *dockerProxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.calls {
		for _, conn := range c.conns {
			conn.Close()
		}
	}
}

// pass waits while the point is held; false when ctx ends before that.
func (p *dockerProxy) pass(ctx context.Context, point string) bool {
	p.mu.Lock()
	gate := p.held[point]
	if gate != nil {
		p.waiting[point]++
	}
	p.mu.Unlock()
	if gate == nil {
		return true
	}
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.waiting[point]--
	}()
	select {
	case <-gate:
		return true
	case <-ctx.Done():
		return false
	}
}

type (
	connKey struct{} // a call's connection
	ownKey  struct{} // that a container is a run's own
)

// containerCall is a path of the API that names a container, or create.
var containerCall = regexp.MustCompile(`^(?:/v[0-9.]+)?/containers/([^/]+)(?:/([^/]+))?$`)

func (p *dockerProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m := containerCall.FindStringSubmatch(r.URL.Path)
	switch {
	case m != nil && r.Method == http.MethodPost && m[1] == "create":
		p.create(w, r)
	case m != nil && r.Method == http.MethodPost && p.owns(m[1]):
		p.callOwn(m[2], w, r)
	case r.Header.Get("Upgrade") != "":
		p.splice(w, r, &ownCall{}, "", "")
	default:
		p.forward.ServeHTTP(w, r)
	}
}

func (p *dockerProxy) owns(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.own[name]
}

func (p *dockerProxy) claim(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.own[name] = true
}

// create passes a container's making on.
func (p *dockerProxy) create(w http.ResponseWriter, r *http.Request) {
	body, err := decodeObject(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	labels, _ := body["Labels"].(map[string]any)
	own := labels["agentshim.run"] != nil && labels["agentshim.helper"] == nil
	p.mu.Lock()
	edit := p.rules.edit
	p.mu.Unlock()
	if edit != nil {
		if err := edit(own, body); err != nil {
			refuseCall(http.StatusForbidden, err.Error())(w, r)
			return
		}
	}
	b, err := json.Marshal(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(b)), int64(len(b))
	if !own {
		p.forward.ServeHTTP(w, r)
		return
	}
	p.claim(r.URL.Query().Get("name"))
	p.callOwn("create", w, r.WithContext(context.WithValue(r.Context(), ownKey{}, true)))
}

func decodeObject(r io.Reader) (map[string]any, error) {
	d := json.NewDecoder(r)
	d.UseNumber()
	var value map[string]any
	return value, d.Decode(&value)
}

// answered learns the id of a run's own container.
func (p *dockerProxy) answered(resp *http.Response) error {
	if resp.Request.Context().Value(ownKey{}) == nil || resp.StatusCode != http.StatusCreated {
		return nil
	}
	answer, err := decodeObject(resp.Body)
	if err != nil {
		return err
	}
	if id, ok := answer["Id"].(string); ok {
		p.claim(id)
	}
	p.mu.Lock()
	created := p.rules.created
	p.mu.Unlock()
	if created != nil {
		created(answer)
	}
	b, err := json.Marshal(answer)
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(b)), int64(len(b))
	resp.Header.Set("Content-Length", strconv.Itoa(len(b)))
	return err
}

// callOwn is a call about a run's own container. One whose caller is gone before it is
// let go on never comes to the daemon.
func (p *dockerProxy) callOwn(point string, w http.ResponseWriter, r *http.Request) {
	conn, _ := r.Context().Value(connKey{}).(net.Conn)
	c := &ownCall{point: point, conns: []net.Conn{conn}}
	p.mu.Lock()
	p.calls[c] = true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.calls, c)
	}()
	if !p.pass(r.Context(), point) || hungUp(conn) {
		panic(http.ErrAbortHandler)
	}
	p.mu.Lock()
	answer := p.rules.answers[point]
	p.mu.Unlock()
	switch {
	case answer != nil:
		answer(w, r)
	case r.Header.Get("Upgrade") != "":
		p.splice(w, r, c, "input", "output")
	default:
		p.forward.ServeHTTP(w, r)
	}
}

// hungUp says that the other end of a connection is closed.
func hungUp(c net.Conn) bool {
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return true
	}
	poll := []unix.PollFd{{Events: unix.POLLRDHUP}}
	err = raw.Control(func(fd uintptr) {
		poll[0].Fd = int32(fd)
		_, _ = unix.Poll(poll, 0)
	})
	return err != nil || poll[0].Revents&(unix.POLLRDHUP|unix.POLLHUP) != 0
}

// splice hands a call over to the daemon with its connection, whose two directions end
// independently.
func (p *dockerProxy) splice(w http.ResponseWriter, r *http.Request, c *ownCall, in, out string) {
	daemon, err := dialDocker(r.Context(), "", "")
	if err == nil {
		defer daemon.Close()
		err = r.Write(daemon)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	client, buffered, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err)
	}
	defer client.Close()
	p.mu.Lock()
	c.conns = []net.Conn{client, daemon}
	p.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { p.carry(daemon, buffered, in) })
	both.Go(func() { p.carry(client, daemon, out) })
	both.Wait()
}

// carry copies one direction to its end.
func (p *dockerProxy) carry(to net.Conn, from io.Reader, point string) {
	b := make([]byte, 64<<10)
	for {
		n, rerr := from.Read(b)
		p.pass(context.Background(), point)
		_, werr := to.Write(b[:n])
		if rerr != nil || werr != nil {
			_ = to.(*net.UnixConn).CloseWrite()
			return
		}
	}
}

// fakeID is a container that no daemon knows.
const fakeID = "fa4efa4efa4efa4efa4efa4efa4efa4efa4efa4efa4efa4efa4efa4efa4efa4e"

// refuseCall answers as the daemon does when it fails.
func refuseCall(status int, message string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, status, map[string]any{"message": message})
	}
}

// replyWith answers in the daemon's words.
func replyWith(status int, value any) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { answerJSON(w, status, value) }
}

func answerJSON(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if status != http.StatusNoContent {
		_ = json.NewEncoder(w).Encode(value)
	}
}

// hangUp closes the connection without an answer.
func hangUp(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

// attachedTo answers a caller that attaches with a stream that holds the words and ends.
func attachedTo(stream []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			panic(err)
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
		_, _ = conn.Write(stream)
	}
}

// stdoutFrame is a piece of a container's standard output as Docker's API frames it.
func stdoutFrame(words string) []byte {
	return append([]byte{1, 0, 0, 0, 0, 0, 0, byte(len(words))}, words...)
}

// noContainer are the answers of a daemon that makes nothing, behind the stream.
func noContainer(stream []byte) map[string]http.HandlerFunc {
	return map[string]http.HandlerFunc{
		"create": replyWith(http.StatusCreated, map[string]any{"Id": fakeID, "Warnings": []string{}}),
		"attach": attachedTo(stream),
		"start":  replyWith(http.StatusNoContent, nil),
		"wait":   replyWith(http.StatusOK, map[string]any{"StatusCode": 0}),
	}
}
