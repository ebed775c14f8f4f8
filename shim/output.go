package shim

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// StepOutput is what became of the file that the harness leaves for its caller.
type StepOutput struct {
	// Path is in the container, File the caller's.
	Path string `json:"path"`
	File string `json:"file"`
	// Bytes were appended to File. Problem says why there are none.
	Bytes   int    `json:"bytes"`
	Problem string `json:"problem,omitempty"`
}

// outputFile is the caller's file, by its folder's real path: no link is on it.
type outputFile struct{ dir, name string }

// findOutput finds the caller's file before anything starts.
func (p *prepared) findOutput() error {
	inside := p.job.Harness.OutputFile
	if inside == "" {
		return nil
	}
	host := p.job.getenv(spec.OutputVariable)
	if !filepath.IsAbs(host) {
		return &Error{
			Reason: ReasonOutputFile, Msg: fmt.Sprintf("%s is no absolute path, but %q", spec.OutputVariable, host),
			Hint: "leave --output-file out where no orchestrator sets " + spec.OutputVariable,
		}
	}
	dir, err := mounts.Resolve(filepath.Dir(host), p.agentFolders())
	if err != nil {
		return &Error{Reason: ReasonOutputFile, Msg: fmt.Sprintf("%s %q", spec.OutputVariable, host), Err: err}
	}
	p.files = append(p.files, homeFile{target: inside, output: &outputFile{dir, filepath.Base(host)}})
	return nil
}

// append adds what the harness left. All of it is the agent's word.
func (o *outputFile) append(inside string, b back) *StepOutput {
	out := &StepOutput{Path: inside, File: filepath.Join(o.dir, o.name)}
	if b.Problem != "" {
		out.Problem = printable(b.Problem)
		return out
	}
	if err := o.write(b.content); err != nil {
		out.Problem = printable(err.Error())
		return out
	}
	out.Bytes = len(b.content)
	return out
}

// write appends to the file, which it makes where it is missing. It follows no link and
// waits for no reader of a FIFO.
func (o *outputFile) write(content []byte) error {
	path := filepath.Join(o.dir, o.name)
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags: unix.O_WRONLY | unix.O_APPEND | unix.O_CREAT | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Mode:  0o600, Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	st, err := f.Stat()
	switch {
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		return fmt.Errorf("%q is not a regular file", path)
	}
	_, err = f.Write(content)
	return err
}

// outputLost is the error of a run that went well but for its output.
func outputLost(rec *Record) error {
	if rec.Output == nil || rec.Output.Problem == "" || rec.Exit != 0 {
		return nil
	}
	return &Error{
		Reason: ReasonOutputFile, Msg: fmt.Sprintf("%s: %s", rec.Output.Path, rec.Output.Problem),
		Hint: fmt.Sprintf("the harness has to leave a regular file of at most %d MiB there", wire.MaxBack>>20),
	}
}

// stepVariables are what an orchestrator says of the step that it runs, by their label.
var stepVariables = map[string]string{
	"agentshim.dag-name": "DAG_NAME", "agentshim.dag-run-id": "DAG_RUN_ID", "agentshim.dag-run-step-name": "DAG_RUN_STEP_NAME",
}

// maxStepLabel bounds one of them, in bytes.
const maxStepLabel = 256

// stepLabels are the container's labels of the orchestrator's step, nil outside of one.
func (j Job) stepLabels() map[string]string {
	var labels map[string]string
	for label, variable := range stepVariables {
		value := j.getenv(variable)
		if value == "" {
			continue
		}
		if labels == nil {
			labels = map[string]string{}
		}
		labels[label] = plainLabel(value)
	}
	return labels
}

// plainLabel makes a value one that prints, and not too long.
func plainLabel(value string) string {
	value = strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(value, "?"))
	for len(value) > maxStepLabel {
		value = value[:len(value)-1]
	}
	return strings.ToValidUTF8(value, "")
}
