package shim

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agentshim/agentshim/spec"
)

// dockerRun is attached over the API: the daemon carries init's streams on one
// connection and answers another when the container is gone.
type dockerRun struct {
	conn *net.UnixConn
	out  *demultiplexer
	// wait ends the second one.
	wait   context.CancelFunc
	ended  chan struct{}
	status ExitStatus
	failed error
}

func (d *docker) request(plan spec.Plan, paths spec.RunPaths) ([]byte, error) {
	body, err := plan.DockerContainer(paths)
	if err != nil {
		return nil, err
	}
	return body.JSON()
}

func (d *docker) start(ctx context.Context, plan spec.Plan, paths spec.RunPaths, made func()) (attached, error) {
	body, err := plan.DockerContainer(paths)
	if err != nil {
		return nil, asError(err)
	}
	r, err := d.run(ctx, containerName(paths.ID), body, func(id string) error {
		defer made()
		return os.WriteFile(cidFile(paths), []byte(id), 0o600)
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// run creates a container, attaches to it and starts it; made gets its ID before that.
// With an error there is no container, unless removing it failed, too. What ctx cuts
// short is waited for first: a request that nobody waits for may still take effect.
func (d *docker) run(ctx context.Context, name string, body spec.DockerContainer, made func(id string) error) (*dockerRun, error) {
	lasting, cancel := outlast(ctx, endTimeout)
	defer cancel()
	lasting, stop := context.WithTimeout(lasting, startTimeout)
	defer stop()
	r, err := d.createAndStart(lasting, ctx, name, body, made)
	if err != nil {
		return nil, errors.Join(removeContainer(context.WithoutCancel(ctx), d, name), err)
	}
	return r, nil
}

func (d *docker) createAndStart(ctx, caller context.Context, name string, body spec.DockerContainer, made func(id string) error) (*dockerRun, error) {
	id, err := d.api.create(ctx, name, body)
	if err != nil {
		return nil, err
	}
	if err := made(id); err != nil {
		return nil, asError(err)
	}
	r, err := d.api.join(ctx, id, body.OpenStdin)
	if err != nil {
		return nil, err
	}
	if err = caller.Err(); err == nil {
		err = notAsked(d.api.post(ctx, "/containers/"+id+"/start", nil, nil))
	}
	if err != nil {
		r.drop()
		r.close()
		return nil, err
	}
	return r, nil
}

// outlast is a context that ends grace after ctx does.
func outlast(ctx context.Context, grace time.Duration) (context.Context, context.CancelFunc) {
	lasting, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(grace, func() { cancel(context.Cause(ctx)) })
		context.AfterFunc(lasting, func() { timer.Stop() })
	})
	return lasting, func() {
		stop()
		cancel(nil)
	}
}

// notAsked makes a refusal of what is not there a refusal like any other: nobody asked
// whether it is.
func notAsked(err error) error {
	if errors.Is(err, errNotFound) {
		return &Error{Reason: ReasonEngineFailed, Err: err}
	}
	return err
}

// refused is the error that the answer to a POST is.
func (a *dockerAPI) refused(path string, resp *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, apiLimit)) // one cut short has no message
	return notAsked(a.statusError(http.MethodPost, path, resp.StatusCode, body))
}

// create has the daemon make a container and returns its ID.
func (a *dockerAPI) create(ctx context.Context, name string, body spec.DockerContainer) (string, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return "", err
	}
	const path = "/containers/create"
	answer, err := a.call(ctx, http.MethodPost, path, url.Values{"name": {name}}, data)
	if err != nil {
		return "", notAsked(err)
	}
	var created struct{ ID string }
	if err := json.Unmarshal(answer, &created); err != nil || !isContainerID(created.ID) {
		return "", &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("POST %s on %q: container id %s", path, a.socket, strconv.Quote(firstWords(created.ID))), Err: err}
	}
	return created.ID, nil
}

// join attaches to a container that was created and waits for its removal.
func (a *dockerAPI) join(ctx context.Context, id string, stdin bool) (*dockerRun, error) {
	r := &dockerRun{ended: make(chan struct{})}
	waitCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	r.wait = func() { cancel(nil) }
	// Until the daemon has taken note; from then on only drop ends the wait.
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	removed, err := a.waitRemoved(waitCtx, id)
	stop()
	if err != nil {
		r.wait()
		return nil, err
	}
	go func() {
		defer close(r.ended)
		r.status, r.failed = removed()
	}()
	if r.conn, r.out, err = a.attach(ctx, id, stdin); err != nil {
		r.wait()
		<-r.ended
		return nil, err
	}
	return r, nil
}

// waitRemoved returns once the daemon has taken note; what it returns waits until the
// container is removed.
func (a *dockerAPI) waitRemoved(ctx context.Context, id string) (func() (ExitStatus, error), error) {
	path := "/containers/" + id + "/wait"
	req, err := a.request(ctx, http.MethodPost, path, url.Values{"condition": {"removed"}}, nil)
	if err != nil {
		return nil, err
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return nil, a.transportError(ctx, err)
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, a.refused(path, resp)
	}
	return func() (ExitStatus, error) {
		defer resp.Body.Close()
		var end struct {
			StatusCode int
			Error      *struct{ Message string }
		}
		err := json.NewDecoder(io.LimitReader(resp.Body, apiLimit)).Decode(&end)
		if err == nil && end.Error != nil && end.Error.Message != "" {
			err = errors.New(printable(end.Error.Message))
		}
		if err != nil {
			return ExitStatus{}, &Error{Reason: ReasonEngineLost, Msg: fmt.Sprintf("docker's daemon on %q no longer says how the container is", a.socket), Err: err}
		}
		return ExitStatus{Code: end.StatusCode}, nil
	}, nil
}

// attach turns a connection of its own into the container's streams.
func (a *dockerAPI) attach(ctx context.Context, id string, stdin bool) (*net.UnixConn, *demultiplexer, error) {
	query := url.Values{"stream": {"1"}, "stdout": {"1"}, "stderr": {"1"}}
	if stdin {
		query.Set("stdin", "1")
	}
	return a.hijack(ctx, "/containers/"+id+"/attach", query, nil)
}

// hijack turns the connection of a POST into the streams that it asks for.
func (a *dockerAPI) hijack(ctx context.Context, path string, query url.Values, body []byte) (*net.UnixConn, *demultiplexer, error) {
	req, err := a.request(ctx, http.MethodPost, path, query, body)
	if err != nil {
		return nil, nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "tcp")
	dialed, err := a.dial(ctx, "", "")
	if err != nil {
		return nil, nil, a.transportError(ctx, err)
	}
	conn := dialed.(*net.UnixConn)
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	r := bufio.NewReaderSize(conn, 32<<10)
	err = conn.SetDeadline(time.Now().Add(apiTimeout))
	if err == nil {
		err = req.Write(conn)
	}
	var resp *http.Response
	if err == nil {
		resp, err = http.ReadResponse(r, req)
	}
	switch {
	case err != nil:
		err = a.transportError(ctx, err)
	case resp.StatusCode != http.StatusSwitchingProtocols && resp.StatusCode != http.StatusOK:
		err = a.refused(path, resp)
	default:
		err = conn.SetDeadline(time.Time{})
	}
	if err != nil {
		conn.Close()
		return nil, nil, err
	}
	return conn, &demultiplexer{r: r, chatter: &tailBuffer{limit: maxStderr}}, nil
}

func (r *dockerRun) stdin() io.WriteCloser       { return dockerStdin{r.conn} }
func (r *dockerRun) stdout() io.Reader           { return r.out }
func (r *dockerRun) done() <-chan struct{}       { return r.ended }
func (r *dockerRun) result() (ExitStatus, error) { return r.status, r.failed }
func (r *dockerRun) said() string                { return r.out.said() }

func (r *dockerRun) drop() {
	r.conn.Close()
	r.wait()
}

func (r *dockerRun) close() {
	r.conn.Close()
	<-r.ended
	r.wait()
}

// dockerStdin is the writing side of the attached connection.
type dockerStdin struct{ conn *net.UnixConn }

// Write says of a connection that is gone what a pipe would.
func (s dockerStdin) Write(p []byte) (int, error) {
	n, err := s.conn.Write(p)
	if err != nil {
		err = fmt.Errorf("%w: %w", io.ErrClosedPipe, err)
	}
	return n, err
}

func (s dockerStdin) Close() error { return s.conn.CloseWrite() }

// Streams of the daemon's multiplexing, and the size of its header: the stream, three
// zero bytes, the length of what follows in big-endian order.
const (
	muxStdout     = 1
	muxStderr     = 2
	muxSystem     = 3 // an error of the daemon's
	muxHeaderSize = 8
)

// errMultiplexed is for a header that the daemon does not write.
var errMultiplexed = errors.New("not docker's multiplexed stream")

// demultiplexer reads standard output out of an attached connection, and keeps the end
// of everything else.
type demultiplexer struct {
	r *bufio.Reader
	// left is what is still to be read of standard output's part.
	left uint32

	mu      sync.Mutex
	chatter *tailBuffer
}

func (d *demultiplexer) Read(p []byte) (int, error) {
	for d.left == 0 {
		if err := d.next(); err != nil {
			return 0, err
		}
	}
	n, err := d.r.Read(p[:min(len(p), int(d.left))])
	d.left -= uint32(n)
	return n, cut(err)
}

// next reads one header, and what follows it unless it is standard output's.
func (d *demultiplexer) next() error {
	var header [muxHeaderSize]byte
	if _, err := io.ReadFull(d.r, header[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(header[4:])
	switch {
	case header[1]|header[2]|header[3] != 0:
		return errMultiplexed
	case header[0] == muxStdout:
		d.left = size
		return nil
	case header[0] == muxStderr || header[0] == muxSystem:
		d.mu.Lock()
		defer d.mu.Unlock()
		_, err := io.CopyN(d.chatter, d.r, int64(size))
		return cut(err)
	}
	return errMultiplexed
}

// cut: inside a part, the end is not one.
func cut(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (d *demultiplexer) said() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return strings.TrimSpace(string(d.chatter.bytes()))
}
