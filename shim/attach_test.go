package shim

import (
	"archive/tar"
	"bytes"
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
		"read-only, Podman":  {func(f *foreign) { f.HostConfig.ReadonlyRootfs = true }, spec.Podman, "", ""},
		"read-only, Docker":  {func(f *foreign) { f.HostConfig.ReadonlyRootfs = true }, spec.Docker, ReasonContainer, "--read-only"},
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

// execDaemon is a daemon with one container whose execs say back what they are told.
type execDaemon struct {
	*docker
	mu sync.Mutex
	// archive is what was put into the container, execs what was asked to start.
	archive []byte
	execs   []map[string]any
	// codes are the exit codes of the execs, in order; 0 where there are fewer.
	codes []int
	// put answers what puts something there.
	put int
}

func (d *execDaemon) code() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.execs); n <= len(d.codes) {
		return d.codes[n-1]
	}
	return 0
}

func startExecDaemon(t *testing.T, codes ...int) *execDaemon {
	t.Helper()
	const exec = "e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0"
	d := &execDaemon{codes: codes, put: http.StatusOK}
	state := `{"Id":"` + someContainer + `","Name":"/theirs","Path":"sleep","State":{"Running":true}}`
	daemon := startDaemon(t, map[string]http.HandlerFunc{
		"/containers/theirs/json":                answer(state),
		"/containers/" + someContainer + "/json": answer(state),
		"/containers/" + someContainer + "/archive": func(w http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			d.mu.Lock()
			defer d.mu.Unlock()
			if r.Method != http.MethodPut || r.URL.Query().Get("path") != "/" || r.Header.Get("Content-Type") != "application/x-tar" {
				t.Errorf("%s %s", r.Method, r.URL)
			}
			d.archive = b
			w.WriteHeader(d.put)
		},
		"/containers/" + someContainer + "/exec": func(w http.ResponseWriter, r *http.Request) {
			var body map[string]any
			if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
				t.Error(err)
			}
			d.mu.Lock()
			defer d.mu.Unlock()
			d.execs = append(d.execs, body)
			w.WriteHeader(http.StatusCreated)
			fmt.Fprintf(w, `{"Id":%q}`, exec)
		},
		"/exec/" + exec + "/start": func(w http.ResponseWriter, r *http.Request) {
			if b, _ := io.ReadAll(r.Body); !strings.Contains(string(b), `"Tty":false`) {
				t.Errorf("start: %s", b)
			}
			conn, buffered, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			_, _ = io.WriteString(conn, "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
			told, _ := io.ReadAll(buffered)
			_, _ = io.WriteString(conn, muxed(2, "bye\n")+muxed(1, string(told)))
		},
		"/exec/" + exec + "/json": func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"Running":false,"ExitCode":%d}`, d.code())
		},
	})
	d.docker = &docker{runner: script(t), api: newDockerAPI(daemon.socket), engine: spec.Engine{Kind: spec.Docker, Client: "/docker", Socket: daemon.socket}, config: "/c"}
	return d
}

var someEntry = entry{container: someContainer, folder: "/.agentshim-00000000000000aa", user: "5:6"}

// TestDockerEnter: what is put into a container is a folder that only uid 0 may write, with a program that nobody
// may read; what is started has no variable of the container's that steers it.
func TestDockerEnter(t *testing.T) {
	d := startExecDaemon(t, 3)
	x, err := d.enter(t.Context(), someEntry)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(x.stdin(), "hello"); err != nil {
		t.Error(err)
	}
	x.stdin().Close()
	out, err := io.ReadAll(x.stdout())
	<-x.done()
	if status, serr := x.result(); string(out) != "hello" || err != nil || serr != nil || status.Code != 3 || x.said() != "bye" {
		t.Errorf("%q %v, %v %v, said %q", out, err, status, serr, x.said())
	}
	x.close()
	program, err := embedded.ReadFile("embedded/agentshim-init")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(bytes.NewReader(d.archive)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, fmt.Sprintf("%s %o %d:%d", h.Name, h.Mode, h.Uid, h.Gid))
		if b, _ := io.ReadAll(r); len(b) > 0 && !bytes.Equal(b, program) {
			t.Error("the program is another")
		}
	}
	if d := cmp.Diff([]string{".agentshim-00000000000000aa/ 755 0:0", ".agentshim-00000000000000aa/init 111 0:0"}, names); d != "" {
		t.Errorf("archive (-want +got):\n%s", d)
	}
	want := []map[string]any{{
		"AttachStdin": true, "AttachStdout": true, "AttachStderr": true, "User": "5:6", "WorkingDir": "/",
		"Cmd": []any{"/.agentshim-00000000000000aa/init", wire.AttachArg},
		"Env": []any{"GODEBUG=", "GOGC=", "GOMAXPROCS=", "GOMEMLIMIT=", "GOTRACEBACK="},
	}}
	if d := cmp.Diff(want, d.execs); d != "" {
		t.Errorf("exec (-want +got):\n%s", d)
	}
}

func TestDockerEnterFails(t *testing.T) {
	d := startExecDaemon(t)
	d.put = http.StatusForbidden
	if x, err := d.enter(t.Context(), someEntry); x != nil || ReasonOf(err) != ReasonEngineFailed || len(d.execs) != 0 {
		t.Errorf("%v, then %v", err, d.execs)
	}
	if _, err := d.foreign(t.Context(), "none"); !errors.Is(err, ReasonContainer) {
		t.Errorf("%v", err)
	}
}

// TestDockerRemoveProgram: uid 0 removes what is there; what is not there whole is put there first.
func TestDockerRemoveProgram(t *testing.T) {
	for name, tc := range map[string]struct {
		codes []int
		execs int
		put   bool
		fails bool
	}{
		"whole":    {nil, 1, false, false},
		"in part":  {[]int{126}, 2, true, false},
		"it stays": {[]int{1, 1}, 2, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			d := startExecDaemon(t, tc.codes...)
			err := d.removeProgram(t.Context(), someEntry)
			if (err != nil) != tc.fails || len(d.execs) != tc.execs || (d.archive != nil) != tc.put {
				t.Errorf("%v after %d execs", err, len(d.execs))
			}
			for _, x := range d.execs {
				if argv := fmt.Sprint(x["Cmd"]); x["User"] != "0:0" || argv != "[/.agentshim-00000000000000aa/init remove/1 /.agentshim-00000000000000aa]" {
					t.Errorf("as %v: %s", x["User"], argv)
				}
			}
		})
	}
}

// TestPruneAttached: only the folder that a lost run's record names by the run's own id is removed.
func TestPruneAttached(t *testing.T) {
	lost := mustSelf(t)
	lost.StartTicks++
	for name, tc := range map[string]struct {
		id, folder string
		dry        bool
		removes    bool
		left       []Leftover
		kept       string // what the record still names
	}{
		"removed":      {id: someContainer, removes: true, left: []Leftover{{Container: someContainer, Path: "/.agentshim-00000000000000aa"}}},
		"dry run":      {id: someContainer, dry: true, left: []Leftover{{Container: someContainer, Path: "/.agentshim-00000000000000aa"}}, kept: "/.agentshim-00000000000000aa"},
		"gone":         {id: strings.Repeat("cd", 32)},
		"another path": {id: someContainer, folder: "/etc", kept: "/etc"},
		"no id":        {id: "x/../y", kept: "/.agentshim-00000000000000aa"},
	} {
		t.Run(name, func(t *testing.T) {
			s, d := testStore(t), startExecDaemon(t)
			if tc.folder == "" {
				tc.folder = "/.agentshim-00000000000000aa"
			}
			r := Record{Version: RecordVersion, ID: "00000000000000aa", Owner: lost, Attached: &AttachedRecord{ID: tc.id, Folder: tc.folder}}
			if err := r.write(s.folders); err != nil {
				t.Fatal(err)
			}
			left, err := s.pruneAttached(t.Context(), d, &r, tc.dry)
			for i := range tc.left {
				tc.left[i].Run, tc.left[i].Engine = r.ID, spec.Docker
			}
			if err != nil || !slices.Equal(left, tc.left) || (len(d.execs) > 0) != tc.removes {
				t.Errorf("%+v %v, %d execs", left, err, len(d.execs))
			}
			if kept, err := s.Run(r.ID); err != nil || kept.Attached.Folder != tc.kept {
				t.Errorf("the record names %q, %v", kept.Attached.Folder, err)
			}
		})
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
