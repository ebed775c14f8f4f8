package shim

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// RecordVersion is the record's schema version.
const RecordVersion = 1

// Record is what a run was and how it ended. It holds no secret: no value of a
// variable, no prompt, no output.
type Record struct {
	Version   int    `json:"version"`
	ID        string `json:"id"`
	Name      string `json:"name,omitempty"`
	Agentshim string `json:"agentshim"`
	// Start is UTC; End is zero while the run lasts.
	Start time.Time `json:"start"`
	End   time.Time `json:"end,omitzero"`
	// Owner guards against a pid that is used again.
	Owner Owner `json:"owner"`
	// SpecDigest is the SHA-256 of the harness file, PlanDigest that of the plan.
	SpecDigest string `json:"specDigest,omitempty"`
	PlanDigest string `json:"planDigest,omitempty"`
	// Container is the engine's id, once known.
	Container string        `json:"container,omitempty"`
	Engine    *spec.Engine  `json:"engine,omitempty"`
	Image     *spec.Image   `json:"image,omitempty"`
	Caller    *spec.Caller  `json:"caller,omitempty"`
	Machine   *spec.Machine `json:"machine,omitempty"`
	Widenings []spec.Note   `json:"widenings,omitempty"`
	Gaps      []spec.Note   `json:"gaps,omitempty"`
	// Session is set for a session and for each step of one.
	Session *SessionRecord `json:"session,omitempty"`
	// Attached is set where the container is not agentshim's.
	Attached *AttachedRecord `json:"attached,omitempty"`
	// Attestation is what init saw, and what was weaker than planned.
	Attestation *Attestation `json:"attestation,omitempty"`
	// Copy is the workspace's private copy, nil where the run has none.
	Copy *CopyRecord `json:"copy,omitempty"`
	// Egress is what the run could reach, once that is decided.
	Egress *EgressRecord `json:"egress,omitempty"`
	// Publish are the ports on the host that lead into the sandbox.
	Publish []PublishRecord `json:"publish,omitempty"`
	// Git is what became of the workspace's repository, nil where it has none.
	Git    *GitRecord `json:"git,omitempty"`
	Phases []Phase    `json:"phases,omitempty"`
	// Overlaps are the runs that could write to the same workspace when this one began.
	Overlaps []Overlap `json:"overlaps,omitempty"`
	// Planted is what appeared in the workspace that the host may obey; absent where the
	// agent could not write to it, or never ran.
	Planted *PlantedReport `json:"planted,omitempty"`
	Harness *wire.Exit     `json:"harness,omitempty"`
	// WriteBack is what became of the home's files with writeBack, once they came back.
	WriteBack []WriteBack `json:"writeBack,omitempty"`
	// Output is what became of the output file, once the harness had ended; nil without one.
	Output *StepOutput `json:"output,omitempty"`
	// Cause says what ended the harness; Signal is the first signal to end that was
	// passed on to it, e.g. SIGTERM.
	Cause  Cause  `json:"cause,omitempty"`
	Signal string `json:"signal,omitempty"`
	// Exit is agentshim's exit code, 125 until the run has ended; Reason says why where
	// it is agentshim's own.
	Exit   int    `json:"exit"`
	Reason Reason `json:"reason,omitempty"`
	// Message is the refusal in words; Retry says that a retry can help.
	Message string `json:"message,omitempty"`
	Retry   bool   `json:"retry,omitempty"`
}

// Owner identifies the shim process of a run.
type Owner struct {
	PID int `json:"pid"`
	// StartTicks is the process's start time in clock ticks since boot.
	StartTicks uint64 `json:"startTicks"`
	BootID     string `json:"bootId"`
}

// Attestation is the proof that the container is what was planned.
type Attestation struct {
	Hello wire.Hello `json:"hello"`
	// Probe is the live network probe, absent when the run stopped before it.
	Probe *wire.Probed `json:"probe,omitempty"`
	// Bundle says whether the engine's own OCI config was compared: "compared", or
	// why not.
	Bundle      string       `json:"bundle,omitempty"`
	Differences []Difference `json:"differences,omitempty"`
}

// Phase is one part of a run and how long it took.
type Phase struct {
	Name   string `json:"name"`
	Micros int64  `json:"micros"`
}

func (r Record) json() ([]byte, error) {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	return append(b, '\n'), nil
}

// write puts the record into its run's folder, 0600, in one step.
func (r Record) write(f folders) error {
	dir := f.record(r.ID)
	b, err := r.json()
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil {
		err = writeWhole(filepath.Join(dir, "record.json"), b)
	}
	if err != nil {
		_ = os.Remove(dir) // what is empty was no run
	}
	return unwritten(err, f.state, "XDG_STATE_HOME")
}

// WriteResult writes the record to a file whose place was taken before the run, 0600, in one
// step: a reader sees the old file or the new one. A link there is replaced, not followed.
func (r Record) WriteResult(f *NewFile) error {
	b, err := r.json()
	if err == nil {
		err = f.Write(b)
	}
	if err != nil {
		return &Error{Reason: ReasonState, Err: err}
	}
	return nil
}

func writeWhole(path string, b []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".record-*")
	if err != nil {
		return err
	}
	_, err = tmp.Write(b)
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name())
	}
	return err
}

// phases measures a run's parts.
type phases struct {
	list []Phase
	last time.Time
}

func newPhases() *phases { return &phases{last: time.Now()} }

// done ends the part that began when the one before it ended.
func (p *phases) done(name string) {
	now := time.Now()
	p.list = append(p.list, Phase{Name: name, Micros: now.Sub(p.last).Microseconds()})
	p.last = now
}
