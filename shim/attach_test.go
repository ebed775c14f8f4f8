package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

func TestUsable(t *testing.T) {
	good := func() foreign {
		f := foreign{ID: someContainer, Name: "theirs", Path: "sleep"}
		f.State.Running = true
		return f
	}
	for name, tc := range map[string]struct {
		change func(f *foreign)
		engine string
		reason Reason
		hint   string
	}{
		"runs":               {func(*foreign) {}, spec.Docker, "", ""},
		"does not run":       {func(f *foreign) { f.State.Running = false }, spec.Docker, ReasonContainer, "docker start theirs"},
		"paused":             {func(f *foreign) { f.State.Paused = true }, spec.Podman, ReasonContainer, "podman unpause theirs"},
		"a run's own":        {func(f *foreign) { f.Path = spec.InitPath }, spec.Docker, ReasonContainer, "--session"},
		"a run's helper":     {func(f *foreign) { f.Path = spec.HelperPath }, spec.Docker, ReasonContainer, "--session"},
		"no id to rely upon": {func(f *foreign) { f.ID = "../x" }, spec.Docker, ReasonEngineFailed, ""},
	} {
		f := good()
		tc.change(&f)
		if err := f.usable(tc.engine); ReasonOf(err) != tc.reason || !strings.Contains(HintOf(err), tc.hint) {
			t.Errorf("%s: %v, hint %q", name, err, HintOf(err))
		}
	}
}

// execDaemon is a daemon with one container of someone else's, whose exec says back what it is
// told, and one container that it makes, a holder.
type execDaemon struct {
	*docker
	mu sync.Mutex
	// created is what the holder was made of, execs what was asked to start.
	created spec.DockerContainer
	execs   []map[string]any
	// gone is closed when nobody holds the holder's standard input.
	gone chan struct{}
}

// refusal answers an exec by an error.
func startExecDaemon(t *testing.T, says string, refusal int, more ...scriptedCall) *execDaemon {
	t.Helper()
	const exec = "e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0"
	holder := strings.Repeat("cd", 32)
	d := &execDaemon{gone: make(chan struct{})}
	upgraded := func(w http.ResponseWriter, r *http.Request, first string, last func(told []byte) string) {
		_, _ = io.Copy(io.Discard, r.Body)
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"+first)
		told, _ := io.ReadAll(buffered)
		_, _ = io.WriteString(conn, last(told))
	}
	state := `{"Id":"` + someContainer + `","Name":"/theirs","Path":"sleep","State":{"Running":true}}`
	daemon := startDaemon(t, map[string]http.HandlerFunc{
		"/containers/theirs/json": answer(state),
		"/containers/create": func(w http.ResponseWriter, r *http.Request) {
			if name := r.URL.Query().Get("name"); name != "agentshim-00000000000000aa-hold" {
				t.Errorf("container %q", name)
			}
			if err := json.NewDecoder(r.Body).Decode(&d.created); err != nil {
				t.Error(err)
			}
			w.WriteHeader(http.StatusCreated)
			fmt.Fprintf(w, `{"Id":%q}`, holder)
		},
		"/containers/" + holder + "/wait": func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-d.gone:
			case <-r.Context().Done():
			}
			fmt.Fprint(w, `{"StatusCode":0}`)
		},
		"/containers/" + holder + "/attach": func(w http.ResponseWriter, r *http.Request) {
			defer close(d.gone)
			upgraded(w, r, muxed(1, says), func([]byte) string { return "" })
		},
		"/containers/" + holder + "/start": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) },
		"/containers/" + someContainer + "/exec": func(w http.ResponseWriter, r *http.Request) {
			var body map[string]any
			if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
				t.Error(err)
			}
			d.mu.Lock()
			defer d.mu.Unlock()
			d.execs = append(d.execs, body)
			if refusal != 0 {
				w.WriteHeader(refusal)
				fmt.Fprint(w, `{"message":"no luck"}`)
				return
			}
			w.WriteHeader(http.StatusCreated)
			fmt.Fprintf(w, `{"Id":%q}`, exec)
		},
		"/exec/" + exec + "/start": func(w http.ResponseWriter, r *http.Request) {
			upgraded(w, r, "", func(told []byte) string { return muxed(2, "bye\n") + muxed(1, string(told)) })
		},
		"/exec/" + exec + "/json": answer(`{"Running":false,"ExitCode":3}`),
	})
	d.docker = &docker{runner: script(t, more...), api: newDockerAPI(daemon.socket), engine: spec.Engine{Kind: spec.Docker, Client: "/docker", Socket: "/s"}, config: "/c"}
	return d
}

// ended says that the holder was let go.
func (d *execDaemon) ended() bool { return within(time.Minute, d.gone) }

func someEntry(user string) entry {
	return entry{
		container: someContainer, user: user, paths: spec.RunPaths{ID: "00000000000000aa", Init: "/run/init"},
		host: spec.Host{
			Engine: spec.Engine{Kind: spec.Docker}, Machine: spec.Machine{Arch: "amd64"},
			Image: spec.Image{ID: "sha256:0123", User: "7", Env: []string{"GOGC=off"}},
		},
	}
}

// TestDockerEnter: what shows init to a container is the exec's user and has nothing; what is started
// has no variable of the container's that steers it.
func TestDockerEnter(t *testing.T) {
	for user, holders := range map[string]string{"5:6": "5:6", "": "7"} {
		d := startExecDaemon(t, "77\n", 0)
		x, release, err := d.enter(t.Context(), someEntry(user))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(x.stdin(), "hello"); err != nil {
			t.Error(err)
		}
		if err := release(); err != nil || !d.ended() {
			t.Errorf("the holder: %v", err)
		}
		x.stdin().Close()
		out, err := io.ReadAll(x.stdout())
		<-x.done()
		if status, serr := x.result(); string(out) != "hello" || err != nil || serr != nil || status.Code != 3 || x.said() != "bye" {
			t.Errorf("%q %v, %v %v, said %q", out, err, status, serr, x.said())
		}
		x.close()
		want := []map[string]any{{
			"AttachStdin": true, "AttachStdout": true, "AttachStderr": true, "User": user, "WorkingDir": "/",
			"Cmd": []any{"/proc/77/exe", wire.AttachArg},
			"Env": []any{"GODEBUG=", "GOGC=", "GOMAXPROCS=", "GOMEMLIMIT=", "GOTRACEBACK="},
		}}
		if d := cmp.Diff(want, d.execs); d != "" {
			t.Errorf("exec (-want +got):\n%s", d)
		}
		if d.created.User != holders {
			t.Errorf("the holder is %q", d.created.User)
		}
	}
}

// TestDockerEnterFails: without an exec there is no holder either.
func TestDockerEnterFails(t *testing.T) {
	for name, tc := range map[string]struct {
		says    string
		refusal int
		execs   int
	}{
		"no exec":       {"77\n", http.StatusConflict, 1},
		"no number":     {"x\n", 0, 0},
		"process 1":     {"1\n", 0, 0},
		"no end":        {strings.Repeat("7", 100), 0, 0},
		"a path's part": {"7/../8\n", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			d := startExecDaemon(t, tc.says, tc.refusal)
			x, release, err := d.enter(t.Context(), someEntry("5:6"))
			if x != nil || release != nil || ReasonOf(err) != ReasonEngineFailed || len(d.execs) != tc.execs || !d.ended() {
				t.Errorf("%v, then %v", err, d.execs)
			}
		})
	}
	d := startExecDaemon(t, "", 0)
	if _, err := d.foreign(t.Context(), "none"); !errors.Is(err, ReasonContainer) {
		t.Errorf("%v", err)
	}
}

// TestPodmanForeign reads what Podman 4.3 prints.
func TestPodmanForeign(t *testing.T) {
	argv := []string{"/podman", "inspect", "--type", "container", "theirs"}
	p := &podman{engine: spec.Engine{Kind: spec.Podman, Client: "/podman"}, runner: script(t,
		scriptedCall{argv: argv, out: `[{"Id":"` + someContainer + `","Name":"theirs","Image":"0123","ImageName":"localhost/x:1","State":{"Running":true},"Config":{"Env":["A=b"]},"Mounts":[{"Type":"bind","Source":"/s","Destination":"/d","RW":true}]}]`},
		scriptedCall{argv: argv, err: failedCall(125, `Error: inspecting object: no such container "theirs"`, argv...)},
		scriptedCall{argv: argv, out: `[]`},
	)}
	f, err := p.foreign(context.Background(), "theirs")
	if err != nil || f.Image != "sha256:0123" || f.imageName() != "localhost/x:1" || !slices.Equal(f.writable(), []string{"/s"}) || f.usable(spec.Podman) != nil {
		t.Errorf("%+v %v", f, err)
	}
	if _, err := p.foreign(context.Background(), "theirs"); !errors.Is(err, ReasonContainer) {
		t.Errorf("%v", err)
	}
	if _, err := p.foreign(context.Background(), "theirs"); !errors.Is(err, ReasonEngineFailed) {
		t.Errorf("%v", err)
	}
}
