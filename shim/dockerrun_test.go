package shim

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/spec"
)

func muxed(stream byte, text string) string {
	header := [muxHeaderSize]byte{stream}
	binary.BigEndian.PutUint32(header[4:], uint32(len(text)))
	return string(header[:]) + text
}

func TestDemultiplexer(t *testing.T) {
	long := strings.Repeat("x", 3*maxStderr)
	for name, tc := range map[string]struct {
		in, out, said string
		err           error
	}{
		"nothing":            {},
		"one part":           {in: muxed(1, "out"), out: "out"},
		"empty parts":        {in: muxed(1, "") + muxed(2, "") + muxed(1, "out"), out: "out"},
		"both":               {in: muxed(1, "a") + muxed(2, "err\n") + muxed(1, "b") + muxed(3, "daemon\n"), out: "ab", said: "err\ndaemon"},
		"the end is kept":    {in: muxed(2, long+"end"), said: long[:2*maxStderr] + "end"},
		"another stream":     {in: muxed(1, "a") + muxed(4, "b"), out: "a", err: errMultiplexed},
		"standard input":     {in: muxed(0, "b"), err: errMultiplexed},
		"not multiplexed":    {in: "HTTP/1.1 200 OK\r\n", err: errMultiplexed},
		"header cut short":   {in: muxed(1, "a") + "\x01\x00", out: "a", err: io.ErrUnexpectedEOF},
		"output cut short":   {in: muxed(1, "abc")[:muxHeaderSize+2], out: "ab", err: io.ErrUnexpectedEOF},
		"standard error cut": {in: muxed(2, "abc")[:muxHeaderSize+2], said: "ab", err: io.ErrUnexpectedEOF},
	} {
		t.Run(name, func(t *testing.T) {
			for _, r := range []io.Reader{strings.NewReader(tc.in), iotest.OneByteReader(strings.NewReader(tc.in))} {
				d := &demultiplexer{r: bufio.NewReader(r), chatter: &tailBuffer{limit: maxStderr}}
				out, err := io.ReadAll(d)
				if string(out) != tc.out || !errors.Is(err, tc.err) {
					t.Errorf("%q %v, want %q %v", out, err, tc.out, tc.err)
				}
				if said := d.said(); !strings.HasSuffix(tc.said, said) || len(said) < min(len(tc.said), maxStderr) {
					t.Errorf("said %d bytes", len(said))
				}
			}
		})
	}
}

// What the daemon's connection carries is bounded by what is asked for, whatever it says.
func FuzzDemultiplexer(f *testing.F) {
	f.Add([]byte(muxed(1, "out") + muxed(2, "err")))
	f.Add([]byte("\x01\x00\x00\x00\xff\xff\xff\xffx"))
	f.Fuzz(func(t *testing.T, in []byte) {
		d := &demultiplexer{r: bufio.NewReader(bytes.NewReader(in)), chatter: &tailBuffer{limit: 16}}
		out, _ := io.ReadAll(d)
		if len(out)+len(d.said()) > len(in) {
			t.Errorf("%d bytes in, %d and %d out", len(in), len(out), len(d.said()))
		}
	})
}

// runDaemon is a daemon with one container, "id", whose init says back what it is told.
type runDaemon struct {
	id string
	// status answers a call by another code than a daemon's, by the last word of its path.
	status map[string]int
	// hang keeps a call unanswered, by the last word of its path.
	hang string
	// cut ends the wait for the removal without an answer.
	cut bool
	// stays keeps the container where nobody is attached any more.
	stays bool
}

func (d runDaemon) start(t *testing.T, more ...scriptedCall) *docker {
	t.Helper()
	over, ended := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(over) })
	handlers := map[string]http.HandlerFunc{}
	call := func(path string, good http.HandlerFunc) {
		word := path[strings.LastIndex(path, "/")+1:]
		handlers[path] = func(w http.ResponseWriter, r *http.Request) {
			if d.hang == word {
				<-r.Context().Done()
				return
			}
			if code := d.status[word]; code != 0 {
				w.WriteHeader(code)
				fmt.Fprint(w, `{"message":"no luck"}`)
				return
			}
			good(w, r)
		}
	}
	call("/containers/create", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusCreated)
		fmt.Fprintf(w, `{"Id":%q}`, d.id)
	})
	call("/containers/"+d.id+"/wait", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-ended:
		case <-r.Context().Done():
		case <-over:
		}
		if d.cut {
			panic(http.ErrAbortHandler)
		}
		fmt.Fprint(w, `{"StatusCode":3}`)
	})
	call("/containers/"+d.id+"/attach", func(w http.ResponseWriter, _ *http.Request) {
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		if !d.stays {
			defer close(ended)
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
		told, _ := io.ReadAll(buffered) // until the lifeline ends
		_, _ = io.WriteString(conn, muxed(2, "bye\n")+muxed(1, string(told)))
	})
	call("/containers/"+d.id+"/start", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	return &docker{
		runner: script(t, more...), api: newDockerAPI(startDaemon(t, handlers).socket),
		engine: spec.Engine{Kind: spec.Docker, Client: "/docker", Socket: "/s"}, config: "/c",
	}
}

var (
	someContainer = strings.Repeat("ab", 32)
	removeSome    = scriptedCall{argv: []string{"/docker", "--host", "unix:///s", "--config", "/c", "rm", "--force", "--volumes", "some"}}
	noteNothing   = func(string) error { return nil }
)

func TestDockerRun(t *testing.T) {
	d := runDaemon{id: someContainer}.start(t)
	var made string
	r, err := d.run(t.Context(), "some", spec.DockerContainer{OpenStdin: true}, func(id string) error {
		made = id
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	if _, err := io.WriteString(r.stdin(), "hello"); err != nil {
		t.Error(err)
	}
	if err := r.stdin().Close(); err != nil {
		t.Error(err)
	}
	out, err := io.ReadAll(r.stdout())
	if string(out) != "hello" || err != nil || made != someContainer {
		t.Errorf("%q %v, container %q", out, err, made)
	}
	<-r.done()
	if status, err := r.result(); status.Code != 3 || err != nil || r.said() != "bye" {
		t.Errorf("%v %v, said %q", status, err, r.said())
	}
	if _, err := io.WriteString(r.stdin(), "late"); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("after the end: %v", err)
	}
}

// TestDockerRunFails: whatever a call fails with, the container is removed by name.
func TestDockerRunFails(t *testing.T) {
	for name, tc := range map[string]struct {
		daemon runDaemon
		made   func(string) error
		want   string
	}{
		"not created":      {runDaemon{id: someContainer, status: map[string]int{"create": 500}}, noteNothing, "no luck"},
		"no such image":    {runDaemon{id: someContainer, status: map[string]int{"create": 404}}, noteNothing, "no luck"},
		"no ID":            {runDaemon{id: ""}, noteNothing, `container id ""`},
		"another's path":   {runDaemon{id: "../../../etc"}, noteNothing, `container id "../../../etc"`},
		"not noted":        {runDaemon{id: someContainer}, func(string) error { return errors.New("disk full") }, "disk full"},
		"no attach":        {runDaemon{id: someContainer, status: map[string]int{"attach": 409}}, noteNothing, "no luck"},
		"nothing attached": {runDaemon{id: someContainer, status: map[string]int{"attach": 404}}, noteNothing, "no luck"},
		"no wait":          {runDaemon{id: someContainer, status: map[string]int{"wait": 500}}, noteNothing, "no luck"},
		"not started":      {runDaemon{id: someContainer, status: map[string]int{"start": 500}}, noteNothing, "no luck"},
		"nothing started":  {runDaemon{id: someContainer, status: map[string]int{"start": 404}}, noteNothing, "no luck"},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := tc.daemon.start(t, removeSome).run(t.Context(), "some", spec.DockerContainer{}, tc.made)
			var known *Error
			if r != nil || !errors.As(err, &known) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
}

// TestDockerRunLeft: a container that may still be there goes before why it was given up, also
// before the caller's wish to end: by that reason prune looks for it.
func TestDockerRunLeft(t *testing.T) {
	stuck := removeSome
	stuck.err = &EngineError{Argv: stuck.argv, Err: context.DeadlineExceeded}
	d := runDaemon{id: someContainer, status: map[string]int{"start": 500}}.start(t, stuck)
	_, err := d.run(t.Context(), "some", spec.DockerContainer{}, noteNothing)
	if ReasonOf(err) != ReasonEngineLost || !strings.Contains(err.Error(), "no luck") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	if got := interrupted(ctx, err); got.Error() != err.Error() {
		t.Error(got)
	}
	cancel(SignalError{unix.SIGINT})
	got := interrupted(ctx, err)
	if ReasonOf(got) != ReasonEngineLost || !errors.Is(got, ReasonInterrupted) || HintOf(got) != HintOf(err) || ExitCode(got) != ExitRefused {
		t.Error(got)
	}
	if got := interrupted(ctx, errors.New("no container")); ReasonOf(got) != ReasonInterrupted || ExitCode(got) != exitSignal+int(unix.SIGINT) {
		t.Error(got)
	}
}

// TestDockerRunInterrupted: a request that is on its way is waited for, for a while, and
// a container that was made is not started.
func TestDockerRunInterrupted(t *testing.T) {
	d := runDaemon{id: someContainer, status: map[string]int{"start": 500}}.start(t, removeSome)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := d.run(ctx, "some", spec.DockerContainer{}, func(string) error {
		cancel()
		return nil
	})
	if !errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "no luck") {
		t.Error(err)
	}
	ended, stop := outlast(ctx, time.Millisecond)
	defer stop()
	<-ended.Done()
	if cause := context.Cause(ended); !errors.Is(cause, context.Canceled) {
		t.Error(cause)
	}
	lasting, stop := outlast(ctx, time.Hour)
	defer stop()
	if lasting.Err() != nil {
		t.Error(lasting.Err())
	}
}

// TestDockerJoinHangs: a daemon that answers neither call holds nothing longer than ctx.
func TestDockerJoinHangs(t *testing.T) {
	for _, word := range []string{"wait", "attach"} {
		d := runDaemon{id: someContainer, hang: word}.start(t)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if r, err := d.api.join(ctx, someContainer, true); r != nil || !errors.As(err, new(*Error)) {
			t.Errorf("%s: %v", word, err)
		}
	}
}

// TestDockerRunLost: a daemon that dies says nothing of the container; drop waits for none.
func TestDockerRunLost(t *testing.T) {
	cut := runDaemon{id: someContainer, cut: true}.start(t)
	r, err := cut.run(t.Context(), "some", spec.DockerContainer{OpenStdin: true}, noteNothing)
	if err != nil {
		t.Fatal(err)
	}
	r.stdin().Close()
	<-r.done()
	if _, err := r.result(); !errors.Is(err, ReasonEngineLost) {
		t.Error(err)
	}
	r.close()
	r, err = runDaemon{id: someContainer, stays: true}.start(t).run(t.Context(), "some", spec.DockerContainer{}, noteNothing)
	if err != nil {
		t.Fatal(err)
	}
	r.drop()
	<-r.done()
	if _, err := r.result(); !errors.Is(err, ReasonEngineLost) {
		t.Error(err)
	}
	r.close()
}
