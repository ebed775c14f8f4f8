package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/shim"
	"github.com/agentshim/agentshim/spec"
)

// slowStart is when a person begins to wonder.
const slowStart = 5 * time.Second

type execFlags struct {
	specFlags
	result string
	// record is the result's file.
	record  *shim.NewFile
	quiet   bool
	command bool
	session string
	// container is one that agentshim did not start.
	container string
	// learn names learned, a file for what a run in mode open used; wildcards may be in it.
	learn     string
	learned   *shim.NewFile
	wildcards bool
	// temporary replaces 125 where a retry can help; 0 is off.
	temporary int
}

func newExec() *cobra.Command {
	f := execFlags{specFlags: specFlags{instead: ", or --session SESSION"}}
	cmd := &cobra.Command{
		Use:   "exec {--spec FILE [--container CONTAINER] | --session SESSION} [flags] [harness options] [-- WORDS…]",
		Short: "Run the harness",
		Long: "Run the harness of the file in its container. The prompt is the words, --prompt or\n" +
			"--prompt-file; else the file's; else standard input, to its end. On a terminal without\n" +
			"a prompt the provider's own interactive form starts.\n\n" +
			"Options of the harness stand anywhere beside agentshim's own flags, as --max-turns 3,\n" +
			"--max_turns=3 or -max_turns 3: those of the provider, and those that the file names in\n" +
			"options or optionFlags. Behind -- all is prompt.\n\n" +
			"Standard output carries the harness's and nothing else. The exit code is the\n" +
			"harness's own, and 128+n when signal n ended it. Otherwise standard error has the\n" +
			"reason (agentshim reasons lists them): 125 when agentshim refused or failed, 124 when\n" +
			"the harness's timeout passed, 141 when the reader of standard output went away, 128+n\n" +
			"when signal n came before the harness ran. A closed standard error ends nothing.\n\n" +
			"INT, TERM and HUP are passed on to the harness; what is left after stopGrace is\n" +
			"killed. A second one shortens the grace to one second. QUIT, USR1, USR2 and CONT are\n" +
			"passed on and that is all. A stopped agentshim pauses the harness's streams only.\n\n" +
			"Where standard input and output are a terminal, the harness gets one too (unless the\n" +
			"file says \"terminal\": \"never\", or its standard input is the prompt), and every key\n" +
			"is the harness's: Ctrl-C does not end the run by itself. The caller's TERM, COLORTERM,\n" +
			"LANG and TZ go along. The terminal's mode is restored however the run ends, unless\n" +
			"agentshim itself is killed by SIGKILL; then type reset.\n\n" +
			"With --session it is a step of a session that agentshim up made, of the session's harness;\n" +
			"all of this holds for it, too. The file and what replaces it in the container, --engine,\n" +
			"--image and --workspace, are the session's, and so are the egress and its log.\n\n" +
			"With --container the harness runs in a container that someone else started, where the file\n" +
			"accepts \"attached-container\". Nothing of it is agentshim's doing or promise: what it is, is\n" +
			"looked at and said on standard error first. Streams, signals, timeout and record are a run's.\n" +
			"--image, --workspace, --output-file and --learn-egress can't be had there.",
		Example: "  agentshim exec --spec harness.json -- fix the failing test\n" +
			"  agentshim exec --spec harness.json --workspace . --model small < task.md\n" +
			"  agentshim exec --spec harness.json --command -- sh -l\n" +
			"  agentshim exec --session work -- fix the failing test",
	}
	takeHarnessArgs(cmd, f.run)
	f.register(cmd)
	f.registerPrompt(cmd)
	cmd.Flags().StringVar(&f.session, "session", "", "id or name of a session to run in, instead of --spec")
	cmd.Flags().StringVar(&f.container, "container", "", "id or name of a container of someone else's to run in, instead of one that agentshim makes")
	cmd.Flags().StringArrayVar(&f.overrides.EnvFrom, "env", nil, "name of a variable of yours that the harness gets, besides the file's envFrom; repeatable")
	cmd.Flags().StringVar(&f.overrides.Timeout, "timeout", "", "time after which the harness is ended, instead of the file's")
	cmd.Flags().StringVar(&f.overrides.WorkingDir, "working-dir", "", "working folder in the container, instead of the file's")
	cmd.Flags().StringVar(&f.result, "result", "", "write the run's record to this file")
	cmd.Flags().StringVar(&f.overrides.OutputFile, "output-file", "", "append this file of the container's to the one that DAGU_OUTPUT_FILE names")
	cmd.Flags().BoolVar(&f.quiet, "quiet", false, "say nothing but errors, what was planted in the workspace, and what a container of someone else's leaves open")
	cmd.Flags().BoolVar(&f.command, "command", false, "the words behind -- are an argv that runs instead of the harness")
	cmd.Flags().StringVar(&f.learn, "learn-egress", "", "run in egress mode open, and write the allow list of what was used to this new file, for review")
	cmd.Flags().BoolVar(&f.wildcards, "learn-wildcards", false, "with --learn-egress: one wildcard for several names below the same name")
	cmd.Flags().IntVar(&f.temporary, "temporary-code", 0, "exit code instead of 125 where a retry can help (1 to 255)")
	return cmd
}

func (f *execFlags) run(cmd *cobra.Command, given arguments) error {
	var err error
	if f.result != "" {
		if f.record, err = shim.OpenResultFile(f.result); err != nil {
			return err
		}
		defer f.record.Close()
	}
	if f.temporary < 0 || f.temporary > 255 {
		return f.fail(invalid("--temporary-code %d", "use 1 to 255", f.temporary))
	}
	if f.wildcards && f.learn == "" {
		return f.fail(invalid("--learn-wildcards without --learn-egress", "name the file with --learn-egress FILE"))
	}
	if cmd.Flags().Changed("container") && f.container == "" {
		return f.fail(invalid("--container without a name", "an empty one would make a container of agentshim's"))
	}
	job, err := f.execJob(given)
	if err != nil {
		return f.fail(err)
	}
	if cmd.Flags().Changed("learn-egress") {
		if f.learned, err = shim.OpenNewFile(f.learn); err != nil {
			return f.fail(invalid("--learn-egress: %v", "name a new file in a folder where you can write", err))
		}
		defer f.learned.Close()
	}
	job.LearnEgress, job.LearnWildcards = f.learned != nil, f.wildcards
	if f.command && len(job.Command) == 0 {
		return f.fail(invalid("--command without a program", "write the program and its arguments behind --"))
	}
	job.Stdin, job.Stdout, job.Stderr = os.Stdin, os.Stdout, os.Stderr
	job.StdinTerminal, job.Terminal = term.IsTerminal(int(os.Stdin.Fd())), callersTerminal()
	job.Log = logrus.Debugf
	job.Attached = func(a shim.AttachedRecord) { printAttached(os.Stderr, a, f.quiet) }
	if !f.quiet {
		dress(&job, os.Stderr)
	}
	if !f.quiet && f.session == "" { // a step starts no container
		proven, attached := job.Proven, job.Attached
		slow := time.AfterFunc(slowStart, func() { fmt.Fprintln(os.Stderr, "agentshim: the engine is still starting the container") })
		defer slow.Stop()
		job.Attached = func(a shim.AttachedRecord) {
			slow.Stop()
			attached(a)
		}
		job.Proven = func(p spec.Plan, a shim.Attestation) {
			slow.Stop()
			proven(p, a)
		}
	}
	rec, err := runSignalled(cmd.Context(), job)
	printOutcome(os.Stderr, rec, f.quiet)
	err = errors.Join(err, f.writeResult(rec), f.writeLearned(os.Stderr, rec))
	switch {
	case err != nil && f.temporary != 0 && shim.ExitCode(err) == shim.ExitRefused && shim.ReasonOf(err).Retryable():
		return codedError{err, f.temporary}
	case err != nil:
		return err
	case rec.Exit != 0:
		return exitError(rec.Exit)
	}
	return nil
}

// execJob is a run of the file's, or a step of a session.
func (f *execFlags) execJob(given arguments) (shim.Job, error) {
	switch {
	case f.session != "" && f.container != "":
		return shim.Job{}, invalid("--session with --container", "keep one of them")
	case f.container != "":
		return f.attachedJob(given)
	case f.session == "":
		return f.promptedJob(given, f.command)
	}
	o := f.overrides
	if f.file != "" || o.Engine != "" || o.Image != "" || o.Workspace != "" {
		return shim.Job{}, invalid("--session with a flag that makes a container", "a session's harness file, and what replaces it, is given to agentshim up")
	}
	if f.learn != "" {
		return shim.Job{}, invalid("--learn-egress with --session", "a session's egress is its file's: `agentshim egress suggest` reads the session's log")
	}
	if err := absolute("--prompt-file", &f.overrides.PromptFile); err != nil {
		return shim.Job{}, err
	}
	argv, err := f.take(given, f.command)
	return shim.Job{Session: f.session, Command: argv, Overrides: f.overrides, Version: version}, err
}

// attachedJob is a run of the file's in a container of someone else's.
func (f *execFlags) attachedJob(given arguments) (shim.Job, error) {
	o := f.overrides
	for _, flag := range []struct {
		name  string
		given bool
	}{{"image", o.Image != ""}, {"workspace", o.Workspace != ""}, {"learn-egress", f.learn != ""}, {"output-file", o.OutputFile != ""}} {
		if flag.given {
			return shim.Job{}, invalid("--%s with --container", "the container is there already, and not agentshim's", flag.name)
		}
	}
	job, err := f.promptedJob(given, f.command)
	job.Container = f.container
	return job, err
}

// printAttached says, also to who asked for quiet, that a container is not agentshim's.
func printAttached(w io.Writer, a shim.AttachedRecord, quiet bool) {
	fmt.Fprintf(w, "agentshim: not ours: container %.12s (%s): nothing of it is guaranteed", a.ID, visible(a.Name))
	if quiet {
		var open []string
		for _, f := range a.Posture {
			if f.Open {
				open = append(open, f.Name)
			}
		}
		fmt.Fprintf(w, "; open: %s\n", strings.Join(open, ", "))
		return
	}
	fmt.Fprintf(w, "; what was found, image %s:\n", visible(a.Image))
	for _, f := range a.Posture {
		fmt.Fprintf(w, "agentshim: not ours: %s\n", visible(f.String()))
	}
}

// writeLearned writes the allow list of a run that came as far as having a log.
func (f *execFlags) writeLearned(w io.Writer, rec shim.Record) error {
	if f.learned == nil || rec.Egress == nil || rec.Egress.Learned == nil {
		return nil
	}
	l := rec.Egress.Learned
	if err := f.learned.Write(l.Snippet(netpolicy.AllowList)); err != nil {
		return &shim.Error{Reason: shim.ReasonState, Msg: "--learn-egress", Err: err, Hint: "the list is in the record, too: agentshim show " + rec.ID}
	}
	if !f.quiet {
		fmt.Fprintf(w, "agentshim: egress: %d allow entries for what was used are in %q: review them\n", len(l.Allow), f.learn)
	}
	printMissed(w, l)
	return nil
}

// printMissed says that a list is not all of it.
func printMissed(w io.Writer, l *shim.EgressLearned) {
	if l.Missed > 0 {
		fmt.Fprintf(w, "agentshim: egress: the list is not all: %d lines of the log stand for no entry (agentshim egress tail shows them)\n", l.Missed)
	}
}

// callersTerminal is standard input where it and standard output are terminals.
func callersTerminal() *os.File {
	if term.IsTerminal(int(os.Stdin.Fd())) && term.IsTerminal(int(os.Stdout.Fd())) {
		return os.Stdin
	}
	return nil
}

// runSignalled runs a job that gets this process's signals, instead of being ended
// by them through ctx.
func runSignalled(ctx context.Context, job shim.Job) (shim.Record, error) {
	signals := make(chan os.Signal, 16)
	catch(signals, shim.Signals(job.Terminal != nil)...)
	defer signal.Stop(signals)
	job.Signals = signals
	if ctx.Err() == nil { // else a signal came before this caught any
		ctx = context.WithoutCancel(ctx)
	}
	return shim.Run(ctx, job)
}

// printOutcome says what is to be known of a run, or a session, that has ended.
func printOutcome(w io.Writer, rec shim.Record, quiet bool) {
	if !quiet {
		printEnd(w, rec)
	}
	printPlanted(w, rec)
	if rec.Reason != shim.ReasonGit { // else the error says it
		printGitLost(w, rec)
	}
}

// printEnd says what the harness's exit code does not.
func printEnd(w io.Writer, rec shim.Record) {
	if rec.Egress != nil {
		when := ""
		if rec.Session != nil && rec.Session.ID != rec.ID {
			when = "while the step ran, " // another step's, perhaps
		}
		for _, line := range rec.Egress.Refusals {
			fmt.Fprintf(w, "agentshim: egress: %s%s\n", when, line)
		}
	}
	if rec.Session != nil && rec.Session.ID != rec.ID && rec.Session.Ended != "" {
		fmt.Fprintf(w, "agentshim: session: it ended while the step ran: %s\n", visible(rec.Session.Ended))
	}
	if rec.Copy != nil {
		fmt.Fprintf(w, "agentshim: copy: the agent's changes are in a copy of %q: agentshim diff %s shows them, agentshim apply %s applies them\n", rec.Copy.Source, rec.ID, rec.ID)
	}
	printGit(w, rec)
	if rec.Harness != nil && rec.Harness.OOMKills > 0 {
		fmt.Fprintf(w, "agentshim: the kernel killed %d process(es) of the container for lack of memory (resources.memoryMb)\n", rec.Harness.OOMKills)
	}
	if rec.Harness != nil && rec.Exit == 128+int(unix.SIGSYS) {
		fmt.Fprintf(w, "agentshim: a system call filter killed the program (SIGSYS): agentshim's policy does so only to programs for an ABI that seccomp.profile doesn't list (32-bit ones), else it was a filter of its own\n")
	}
}

// printPlanted says, also to who asked for quiet, what the host may obey from now on.
func printPlanted(w io.Writer, rec shim.Record) {
	if rec.Planted == nil {
		return
	}
	for _, line := range rec.Planted.Lines() {
		fmt.Fprintf(w, "agentshim: planted: %s\n", line)
	}
}

func (f *execFlags) writeResult(rec shim.Record) error {
	if f.record == nil {
		return nil
	}
	return rec.WriteResult(f.record)
}

// fail writes the result of a run that never began.
func (f *execFlags) fail(err error) error {
	now := time.Now().UTC()
	rec := shim.Record{
		Version: shim.RecordVersion, Agentshim: version, Start: now, End: now,
		Exit: shim.ExitRefused, Reason: shim.ReasonOf(err), Message: err.Error(),
	}
	return errors.Join(err, f.writeResult(rec))
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
	fmt.Fprintf(w, "agentshim: proven: network %s: %v only; %sto a documentation address: packet %s, connection %s\n",
		p.Egress.Mode, h.Interfaces, map[bool]string{true: "packet rules read back; "}[p.Egress.HasGateway()], a.Probe.UDP4, a.Probe.TCP4)
	for _, n := range p.Gaps {
		if n.Accepted {
			fmt.Fprintf(w, "agentshim: gap accepted: %s: %s\n", n.Name, visible(n.Detail))
		}
	}
	for _, warning := range p.Warnings {
		fmt.Fprintf(w, "agentshim: warning: %s\n", visible(warning))
	}
}

func capabilityText(names []string) string {
	if len(names) == 0 {
		return "no capabilities"
	}
	return fmt.Sprintf("capabilities %v", names)
}
