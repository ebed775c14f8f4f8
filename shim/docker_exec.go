package shim

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/agentshim/agentshim/shim/wire"
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

// enter waits for what ctx cuts short: a request that nobody waits for may still take effect.
func (d *docker) enter(ctx context.Context, e entry) (attached, error) {
	ctx, cancel := outlast(ctx, endTimeout)
	defer cancel()
	if err := d.putProgram(ctx, e); err != nil {
		return nil, err
	}
	x, err := d.api.exec(ctx, e, []string{e.program(), wire.AttachArg}, e.user)
	if err != nil {
		return nil, err
	}
	return x, nil
}

// putProgram makes a fresh folder with init's program in the container. It is uid 0's, and
// nobody may write it.
func (d *docker) putProgram(ctx context.Context, e entry) error {
	program, err := embedded.ReadFile("embedded/agentshim-init")
	if err != nil {
		return notEmbedded("agentshim-init")
	}
	archive, err := programArchive(e.folder, program)
	if err != nil {
		return err
	}
	req, err := d.api.request(ctx, http.MethodPut, "/containers/"+e.container+"/archive", url.Values{"path": {"/"}, "noOverwriteDirNonDir": {"1"}}, archive)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/x-tar")
	_, err = d.api.do(ctx, req)
	return notAsked(err)
}

func programArchive(folder string, program []byte) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	name := strings.TrimPrefix(folder, "/") + "/"
	_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755, Format: tar.FormatUSTAR})
	_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name + wire.ProgramName, Mode: 0o111, Size: int64(len(program)), Format: tar.FormatUSTAR})
	_, err := w.Write(program)
	return b.Bytes(), errors.Join(err, w.Close())
}

// removeProgram has init's own program remove itself and its folder, as uid 0: the API has
// no call for it, and what else is in the container is not agentshim's to run. One that was
// put there in part is put there whole first.
func (d *docker) removeProgram(ctx context.Context, e entry) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	err := d.runRemove(ctx, e)
	if err == nil {
		return nil
	}
	if perr := d.putProgram(ctx, e); perr != nil {
		return errors.Join(err, perr)
	}
	return d.runRemove(ctx, e)
}

func (d *docker) runRemove(ctx context.Context, e entry) error {
	x, err := d.api.exec(ctx, e, []string{e.program(), wire.RemoveArg, e.folder}, "0:0")
	if err != nil {
		return err
	}
	defer x.close()
	defer context.AfterFunc(ctx, x.drop)()
	x.stdin().Close()
	_, _ = io.Copy(io.Discard, x.stdout())
	status, err := x.result()
	if err == nil && status.Code != 0 {
		err = &EngineError{Argv: []string{"docker", "exec"}, Stderr: x.said(), Err: status}
	}
	return err
}

// exec starts a program in a running container, with a connection of its own for its streams.
func (a *dockerAPI) exec(ctx context.Context, e entry, argv []string, user string) (*dockerExec, error) {
	body, err := json.Marshal(map[string]any{
		"AttachStdin": true, "AttachStdout": true, "AttachStderr": true, "Cmd": argv, "User": user, "Env": steadyEnv, "WorkingDir": "/",
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

// result asks how it ended. The daemon knows a moment after the streams' end.
func (x *dockerExec) result() (ExitStatus, error) {
	ctx, cancel := context.WithTimeout(context.Background(), apiTimeout)
	defer cancel()
	for {
		var state struct {
			Running  bool
			ExitCode *int
		}
		err := x.api.get(ctx, "/exec/"+x.id+"/json", &state)
		switch {
		case err != nil:
			return ExitStatus{}, notAsked(err)
		case !state.Running && state.ExitCode != nil:
			return ExitStatus{Code: *state.ExitCode}, nil
		}
		time.Sleep(10 * time.Millisecond)
	}
}
