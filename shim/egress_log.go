package shim

import (
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
	// entry would permit it. All is printable ASCII.
	Refusals []string `json:"refusals,omitempty"`
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
	if run.Egress != nil {
		e.Hint = fmt.Sprintf("its egress.mode is %s; it has no log", run.Egress.Mode)
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
