package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agentshim/agentshim/shim"
	"github.com/agentshim/agentshim/spec"
)

// slowStart is when a person begins to wonder.
const slowStart = 5 * time.Second

type execFlags struct {
	specFlags
	result  string
	quiet   bool
	command bool
}

func newExec() *cobra.Command {
	var f execFlags
	cmd := &cobra.Command{
		Use:   "exec --spec FILE [flags] [-- WORDS…]",
		Short: "Run the harness",
		Long: "Run the harness of the file in its container. Words behind -- are the prompt; else\n" +
			"the file's; else standard input, to its end.\n\n" +
			"Standard output carries the harness's and nothing else. The exit code is the\n" +
			"harness's own; 128+n when signal n ended it; 125 when agentshim refused or failed,\n" +
			"with the reason on standard error (agentshim reasons lists them).",
		Example: "  agentshim exec --spec harness.json -- fix the failing test\n" +
			"  agentshim exec --spec harness.json --workspace . < task.md\n" +
			"  agentshim exec --spec harness.json --command -- ls -la",
		RunE: func(cmd *cobra.Command, args []string) error { return f.run(cmd, args) },
	}
	f.register(cmd)
	cmd.Flags().StringVar(&f.result, "result", "", "write the run's record to this file")
	cmd.Flags().BoolVar(&f.quiet, "quiet", false, "say nothing but errors")
	cmd.Flags().BoolVar(&f.command, "command", false, "the words behind -- are an argv that runs instead of the harness")
	return cmd
}

func (f *execFlags) run(cmd *cobra.Command, words []string) error {
	job, err := f.job()
	if err != nil {
		return f.fail(err)
	}
	job.Words = words
	if f.command {
		if len(words) == 0 {
			return f.fail(invalid("--command without a program", "write the program and its arguments behind --"))
		}
		job.Words, job.Command = nil, words
	}
	job.Stdin, job.Stdout, job.Stderr = os.Stdin, os.Stdout, os.Stderr
	job.StdinTerminal = term.IsTerminal(int(os.Stdin.Fd()))
	job.Log = func(format string, args ...any) { logrus.Debugf(format, args...) }
	if !f.quiet {
		job.Progress = os.Stderr
		slow := time.AfterFunc(slowStart, func() { fmt.Fprintln(os.Stderr, "agentshim: the engine is still starting the container") })
		defer slow.Stop()
		job.Proven = func(p spec.Plan, a shim.Attestation) {
			slow.Stop()
			printProven(os.Stderr, p, a)
		}
	}
	rec, err := shim.Run(cmd.Context(), job)
	if f.result != "" {
		err = errors.Join(err, rec.WriteFile(f.result))
	}
	if err != nil {
		return err
	}
	if rec.Exit != 0 {
		return exitError(rec.Exit)
	}
	return nil
}

// fail writes the result of a run that never began.
func (f *execFlags) fail(err error) error {
	if f.result == "" {
		return err
	}
	now := time.Now().UTC()
	rec := shim.Record{
		Version: shim.RecordVersion, Agentshim: version, Start: now, End: now,
		Exit: shim.ExitRefused, Reason: shim.ReasonOf(err), Message: err.Error(),
	}
	return errors.Join(err, rec.WriteFile(f.result))
}

// printProven says in a few lines what was proven before the harness started.
func printProven(w io.Writer, p spec.Plan, a shim.Attestation) {
	h := a.Hello
	root := "writable"
	if p.ReadOnlyRootfs {
		root = "read-only"
	}
	fmt.Fprintf(w, "agentshim: proven: uid %d, gid %d, %s, no new privileges, seccomp filter in force, root %s\n",
		h.UIDs[0], h.GIDs[0], capabilityText(p.Capabilities), root)
	fmt.Fprintf(w, "agentshim: proven: network %s: %v only; packet to a documentation address: %s\n", p.Egress.Mode, h.Interfaces, a.Probe.UDP4)
	for _, n := range p.Gaps {
		if n.Accepted {
			fmt.Fprintf(w, "agentshim: gap accepted: %s: %s\n", n.Name, n.Detail)
		}
	}
	for _, warning := range p.Warnings {
		fmt.Fprintf(w, "agentshim: warning: %s\n", warning)
	}
}

func capabilityText(names []string) string {
	if len(names) == 0 {
		return "no capabilities"
	}
	return fmt.Sprintf("capabilities %v", names)
}
