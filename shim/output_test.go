package shim

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/shim/wire"
)

// What the harness left is appended to the caller's file, and nothing of the caller's is lost.
func TestOutputAppend(t *testing.T) {
	dir := t.TempDir()
	for name, tt := range map[string]struct {
		before  func(path string) error
		back    back
		want    string
		problem string
	}{
		"a file":     {func(p string) error { return os.WriteFile(p, []byte("a=1\n"), 0o640) }, back{content: []byte("b=2\n")}, "a=1\nb=2\n", ""},
		"none there": {func(string) error { return nil }, back{content: []byte("b=2\n")}, "b=2\n", ""},
		"nothing left": {
			func(p string) error { return os.WriteFile(p, []byte("a=1\n"), 0o640) },
			back{Back: wire.Back{Problem: "it is gone\x1b[2J"}},
			"a=1\n", "it is gone",
		},
		"a link": {func(p string) error {
			return errors.Join(os.WriteFile(p+".other", []byte("mine"), 0o600), os.Symlink(p+".other", p))
		}, back{content: []byte("b=2\n")}, "mine", "too many levels"},
		"a FIFO":   {func(p string) error { return unix.Mkfifo(p, 0o600) }, back{content: []byte("b=2\n")}, "", "no such device"},
		"a folder": {func(p string) error { return os.Mkdir(p, 0o700) }, back{content: []byte("b=2\n")}, "", "is a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			o := &outputFile{dir, strings.ReplaceAll(name, " ", "-")}
			path := filepath.Join(o.dir, o.name)
			if err := tt.before(path); err != nil {
				t.Fatal(err)
			}
			out := o.append("/home/agent/out", tt.back)
			if (tt.problem == "") != (out.Problem == "") || !strings.Contains(out.Problem, tt.problem) {
				t.Errorf("%+v", out)
			}
			if st, err := os.Stat(path); err != nil || !st.Mode().IsRegular() {
				return
			}
			if b, err := os.ReadFile(path); err != nil || string(b) != tt.want {
				t.Errorf("%q, %v; want %q", b, err, tt.want)
			}
		})
	}
}

// Where the output goes is known before anything starts.
func TestFindOutput(t *testing.T) {
	dir := t.TempDir()
	for name, tt := range map[string]struct {
		inside, host string
		want         error
	}{
		"asked for":       {"out", filepath.Join(dir, "o"), nil},
		"not asked for":   {"", "relative", nil},
		"no variable":     {"out", "", ReasonOutputFile},
		"relative":        {"out", "o", ReasonOutputFile},
		"no such folder":  {"out", filepath.Join(dir, "none", "o"), ReasonOutputFile},
		"an agent's link": {"out", filepath.Join(dir, "work", "link", "o"), ReasonOutputFile},
	} {
		t.Run(name, func(t *testing.T) {
			work := filepath.Join(dir, "work")
			if err := os.MkdirAll(work, 0o700); err != nil {
				t.Fatal(err)
			}
			_ = os.Symlink(dir, filepath.Join(work, "link"))
			h, err := harness.Parse([]byte(`{"version":1,"image":"a","harness":{"binary":"b"},"workspace":{"source":"work","mode":"writable"}}`), dir, harness.Overrides{OutputFile: tt.inside})
			if err != nil {
				t.Fatal(err)
			}
			p := &prepared{job: Job{Harness: h, LookupEnv: func(string) (string, bool) { return tt.host, true }}.withDefaults()}
			p.host.Mounts.Sources = map[string]mounts.Source{work: {Path: work, Dir: true}}
			if err := p.findOutput(); !errors.Is(err, tt.want) {
				t.Fatalf("got %v, want %v", err, tt.want)
			}
			if got := len(newBacks(p.files).want); got != map[bool]int{true: 1}[tt.want == nil && tt.inside != ""] {
				t.Errorf("%d files are asked for", got)
			}
		})
	}
}

// A good run without its output is none; a failed one keeps its own code.
func TestOutputLost(t *testing.T) {
	lost := &StepOutput{Path: "/home/agent/out", Problem: "it is gone"}
	for name, tt := range map[string]struct {
		rec  Record
		want error
	}{
		"lost":         {Record{Output: lost}, ReasonOutputFile},
		"lost, failed": {Record{Output: lost, Exit: 3}, nil},
		"there":        {Record{Output: &StepOutput{Bytes: 1}}, nil},
		"none asked":   {Record{}, nil},
	} {
		if err := outputLost(&tt.rec); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestStepLabels(t *testing.T) {
	env := map[string]string{"DAG_NAME": "nightly\n--privileged\x1b", "DAG_RUN_ID": strings.Repeat("ü", 200), "DAGU_API_TOKEN": "s3cret"}
	j := Job{LookupEnv: func(name string) (string, bool) { return env[name], env[name] != "" }}
	labels := j.stepLabels()
	if labels["agentshim.dag-name"] != "nightly?--privileged?" || labels["agentshim.dag-run-id"] != strings.Repeat("ü", 128) || len(labels) != 2 {
		t.Errorf("%q", labels)
	}
	if labels := (Job{LookupEnv: func(string) (string, bool) { return "", false }}).stepLabels(); labels != nil {
		t.Errorf("outside of a step: %q", labels)
	}
}
