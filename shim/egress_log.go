package shim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agentshim/agentshim/netpolicy"
)

// EgressRecord is what a run could reach, and what it asked for.
type EgressRecord struct {
	Mode string `json:"mode"`
	// Way is how the sandbox's network namespace was reached; empty where it was not.
	Way string `json:"way,omitempty"`
	// Renderer is what put the packet rules in: "nftables", "iptables v1.8.9 nf_tables".
	Renderer string `json:"renderer,omitempty"`
	// Log is the head of the egress log, absent while the run lasts and where there is
	// no log. It holds the numbers of what was allowed, refused and only counted.
	Log *netpolicy.Head `json:"log,omitempty"`
	// Refusals say in words what was refused, most frequent first, and which allow
	// entry would permit it. All is printable ASCII. A session's step has what the session
	// was refused while the step ran.
	Refusals []string `json:"refusals,omitempty"`
	// Learned is what a run that was to learn found out.
	Learned *EgressLearned `json:"learned,omitempty"`
}

// EgressLearned is an allow list that was made of a run's log.
type EgressLearned struct {
	// Allow are entries for egress.allow.
	Allow []json.RawMessage `json:"allow"`
	// Missed counts the log's lines that no entry stands for: what can't be allowed, and the
	// notes that decisions are only counted from there on, for more targets than are told apart
	// or for a full log. Above 0 the list is not all.
	Missed int `json:"missed,omitempty"`
}

// learnEgress makes the list of what an ended run's log permitted. The log must be whole.
func learnEgress(path, run string, head netpolicy.Head, p netpolicy.Policy, wildcards bool) (*EgressLearned, error) {
	l := netpolicy.NewLearner(p)
	return readLearned(path, l, l.Used, wildcards, run, head.SHA256)
}

// SuggestEgress makes the list that would have permitted what an ended run was refused.
// Nothing is proposed for what a deny entry refused. A log that is not as it was written,
// or of a run that still goes on, is an error.
func (s Store) SuggestEgress(id string, wildcards bool) (*EgressLearned, error) {
	path, run, err := s.EgressLog(id)
	if err != nil {
		return nil, err
	}
	if run.State == RunRunning {
		return nil, &Error{Reason: ReasonState, Msg: "run " + run.ID + " still goes on", Hint: "wait for its end, or watch it: agentshim egress tail " + run.ID}
	}
	head := ""
	if run.Egress != nil && run.Egress.Log != nil {
		head = run.Egress.Log.SHA256
	}
	l := netpolicy.NewLearner(netpolicy.Policy{})
	learned, err := readLearned(path, l, l.Wanted, wildcards, run.ID, head)
	if err != nil {
		return nil, &Error{Reason: ReasonState, Msg: fmt.Sprintf("%q", path), Err: err, Hint: "agentshim egress verify says more"}
	}
	return learned, nil
}

func readLearned(path string, l *netpolicy.Learner, each func(netpolicy.LogLine), wildcards bool, run, head string) (*EgressLearned, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, err := netpolicy.ReadLog(f, each, run, head); err != nil {
		return nil, err
	}
	return &EgressLearned{Allow: l.Entries(wildcards), Missed: l.Missed}, nil
}

// Snippet is the list as a harness file's egress section, indented, one entry a line. An empty
// mode is left out, for entries that are to stand beside a file's own.
func (l EgressLearned) Snippet(mode string) []byte {
	var b bytes.Buffer
	b.WriteString("{\n  \"egress\": {\n")
	if mode != "" {
		fmt.Fprintf(&b, "    \"mode\": %q,\n", mode)
	}
	b.WriteString("    \"allow\": [")
	for i, entry := range l.Allow {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString("\n      ")
		b.Write(entry)
	}
	if len(l.Allow) > 0 {
		b.WriteString("\n    ")
	}
	b.WriteString("]\n  }\n}\n")
	return b.Bytes()
}

// ErrNoEgressLog is returned for a run that has no egress log, or none yet.
var ErrNoEgressLog = errors.New("no egress log")

// egressLog is where a run's log is: beside its record, and kept as long.
func (f folders) egressLog(id string) string {
	return filepath.Join(f.record(id), "egress.jsonl")
}

// EgressLog finds the egress log of one of the caller's runs, and its record, which
// has the log's head once the run has ended. With ErrNoEgressLog the record is valid.
func (s Store) EgressLog(id string) (string, RunInfo, error) {
	run, err := s.Run(id)
	if err != nil {
		return "", run, err
	}
	path := s.folders.egressLog(id)
	_, err = os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return path, run, noEgressLog(run)
	case err != nil:
		return path, run, &Error{Reason: ReasonState, Err: err}
	}
	return path, run, nil
}

func noEgressLog(run RunInfo) error {
	e := &Error{Reason: ReasonState, Msg: "run " + run.ID, Err: ErrNoEgressLog}
	switch {
	case run.Session != nil && run.Session.ID != run.ID:
		e.Hint = "it is a step, and the log is its session's: " + run.Session.ID
	case run.Egress != nil:
		e.Hint = fmt.Sprintf("its egress.mode is %s; it has no log", run.Egress.Mode)
		if run.Egress.Mode == netpolicy.DenyAll {
			e.Hint = "its egress.mode is deny-all, so that there was no gateway to ask; agentshim exec --learn-egress FILE makes a first list"
		}
	}
	return e
}

// RecordBeside reads the record in the folder of an egress log, fs.ErrNotExist where
// there is none.
func RecordBeside(log string) (Record, error) {
	path := filepath.Join(filepath.Dir(log), "record.json")
	b, err := readRecord(path)
	if err != nil {
		return Record{}, err
	}
	var r Record
	if err := json.Unmarshal(b, &r); err != nil {
		return Record{}, fmt.Errorf("record %q: %w", path, err)
	}
	if r.Version != RecordVersion {
		return Record{}, fmt.Errorf("record %q: version %d", path, r.Version)
	}
	return r, nil
}
