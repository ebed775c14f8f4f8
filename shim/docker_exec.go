package shim

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// dockerExec is init in a container that is not agentshim's, attached over the API: when the
// connection closes, whoever closed it, the daemon closes init's standard input.
type dockerExec struct {
	api *dockerAPI
	// id is the exec's.
	id   string
	conn *net.UnixConn
	out  *demultiplexer
	// ended is closed with the end of what init says.
	ended chan struct{}
	once  sync.Once
}

func (d *docker) foreign(ctx context.Context, name string) (foreign, error) {
	var f foreign
	err := d.api.get(ctx, "/containers/"+name+"/json", &f)
	if errors.Is(err, errNotFound) {
		return f, noContainer(d, name)
	}
	f.Name = strings.TrimPrefix(f.Name, "/")
	return f, err
}

// enter starts init by the link to a holder's program: Docker's exec can be given no
// descriptor, and starts only what the container can see. ctx cuts no request short: one
// that nobody waits for may still take effect.
func (d *docker) enter(ctx context.Context, e entry) (attached, func() error, error) {
	ctx, cancel := outlast(ctx, endTimeout)
	defer cancel()
	h, pid, err := d.hold(ctx, e)
	if err != nil {
		return nil, nil, err
	}
	x, err := d.api.exec(ctx, e, fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return nil, nil, errors.Join(h.release(), err)
	}
	return x, h.release, nil
}

// holder shows init's program to a container.
type holder struct {
	*dockerRun
	docker *docker
	name   string
}

// hold starts one, and returns its number as the other container's processes see it.
func (d *docker) hold(ctx context.Context, e entry) (*holder, int, error) {
	body, err := spec.Holder(e.host, e.paths, e.container, cmp.Or(e.user, e.host.Image.User))
	if err != nil {
		return nil, 0, asError(err)
	}
	h := &holder{docker: d, name: e.paths.HolderName()}
	if h.dockerRun, err = d.run(ctx, h.name, body, func(string) error { return nil }); err != nil {
		return nil, 0, err
	}
	pid, err := h.pid(ctx)
	if err != nil {
		return nil, 0, errors.Join(h.release(), err)
	}
	return h, pid, nil
}

// maxPIDLine bounds a holder's one line, startTimeout the wait for it.
const maxPIDLine = 32

func (h *holder) pid(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	defer context.AfterFunc(ctx, h.drop)()
	line, err := bufio.NewReader(io.LimitReader(h.stdout(), maxPIDLine)).ReadString('\n')
	pid := 0
	if err == nil {
		pid, err = strconv.Atoi(strings.TrimSuffix(line, "\n"))
	}
	if err == nil && pid > 1 {
		return pid, nil
	}
	return 0, &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("the container that shows init says %q and %q", line, firstWords(h.said())), Err: err}
}

// release ends a holder, and waits until it is gone.
func (h *holder) release() error {
	h.stdin().Close()
	if within(endTimeout, h.done()) {
		h.close()
		return nil
	}
	h.drop()
	return removeContainer(context.Background(), h.docker, h.name)
}

// exec starts init in a running container, with a connection of its own for its streams.
func (a *dockerAPI) exec(ctx context.Context, e entry, program string) (*dockerExec, error) {
	body, err := json.Marshal(map[string]any{
		"AttachStdin": true, "AttachStdout": true, "AttachStderr": true, "Cmd": []string{program, wire.AttachArg}, "User": e.user, "Env": steadyEnv, "WorkingDir": "/",
	})
	if err != nil {
		return nil, err
	}
	answer, err := a.call(ctx, http.MethodPost, "/containers/"+e.container+"/exec", nil, body)
	if err != nil {
		return nil, notAsked(err)
	}
	x := &dockerExec{api: a, ended: make(chan struct{})}
	var created struct{ ID string }
	if err := json.Unmarshal(answer, &created); err != nil || !isContainerID(created.ID) {
		return nil, &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("exec id %q on %q", firstWords(created.ID), a.socket), Err: err}
	}
	x.id = created.ID
	x.conn, x.out, err = a.hijack(ctx, "/exec/"+x.id+"/start", nil, []byte(`{"Detach":false,"Tty":false}`))
	if err != nil {
		return nil, err
	}
	return x, nil
}

func (x *dockerExec) stdin() io.WriteCloser { return dockerStdin{x.conn} }
func (x *dockerExec) stdout() io.Reader     { return x }
func (x *dockerExec) done() <-chan struct{} { return x.ended }
func (x *dockerExec) said() string          { return x.out.said() }
func (x *dockerExec) close()                { x.drop() }

// Read is what init says. Its end is init's.
func (x *dockerExec) Read(p []byte) (int, error) {
	n, err := x.out.Read(p)
	if err != nil {
		x.end()
	}
	return n, err
}

func (x *dockerExec) end() { x.once.Do(func() { close(x.ended) }) }

func (x *dockerExec) drop() {
	x.conn.Close()
	x.end()
}

// afterStreams is how soon after its streams' end the daemon knows that a program has ended.
const afterStreams = 2 * time.Second

// result asks how it ended.
func (x *dockerExec) result() (ExitStatus, error) {
	for end := time.Now().Add(afterStreams); ; time.Sleep(10 * time.Millisecond) {
		var state struct {
			Running  bool
			ExitCode *int
		}
		err := x.api.get(context.Background(), "/exec/"+x.id+"/json", &state)
		switch {
		case err != nil:
			return ExitStatus{}, notAsked(err)
		case !state.Running && state.ExitCode != nil:
			return ExitStatus{Code: *state.ExitCode}, nil
		case time.Now().After(end):
			return ExitStatus{}, &Error{Reason: ReasonEngineLost, Msg: "the program still runs"}
		}
	}
}
