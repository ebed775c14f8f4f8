package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/shim"
)

func newEgress() *cobra.Command {
	cmd := &cobra.Command{
		Use: "egress", Short: "Read a run's egress log", Args: cobra.NoArgs,
		Long: "Read a run's egress log: what the harness tried to reach, and what was decided. Runs\n" +
			"whose egress.mode is not deny-all have one; that of steps is their session's. What an\n" +
			"egress.mode network reaches directly is not in it.",
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newTail(), newVerify(), newSuggest())
	return cmd
}

func newVerify() *cobra.Command {
	var head string
	cmd := &cobra.Command{
		Use: "verify FILE|RUN", Short: "Check that a log is as it was written", Args: cobra.ExactArgs(1),
		Long: "Check that an egress log is as it was written: every line whole, in its place, and with\n" +
			"the digest of the one before it. The digest of the last line, the head, must be the one\n" +
			"in the run's record (for a file, in a record.json beside it), and the one given.\n" +
			"A file's name has a slash or a dot in it, e.g. ./FILE.\n" +
			"Without any head, a log that was written anew as a whole is not found out, nor is one\n" +
			"whose record was written anew with it: keep the head elsewhere, and give it.\n\n" +
			"Exit code 1 names the first line that is wrong, or says that the last one is missing.\n" +
			"The log of a run that still goes on has no last line yet.",
		Example: "  agentshim egress verify 4f1c9a0be2d37786\n" +
			"  agentshim egress verify egress.jsonl --head HASH",
		RunE: func(cmd *cobra.Command, args []string) error {
			if head != "" && (len(head) != 64 || strings.Trim(head, "0123456789abcdef") != "") {
				return invalid("--head %q", "it is 64 hexadecimal digits; agentshim show RUN has it as egress.log.sha256", head)
			}
			v, err := verification(args[0])
			if err != nil {
				return err
			}
			if head != "" {
				v.heads = append(v.heads, head)
			}
			return v.run(cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().StringVar(&head, "head", "", "the digest that the last line must have")
	return cmd
}

func newSuggest() *cobra.Command {
	var wildcards bool
	cmd := &cobra.Command{
		Use: "suggest RUN", Short: "Print the allow list that would permit what a run was refused", Args: cobra.ExactArgs(1),
		Long: "Print the entries that would have permitted what an ended run was refused, as they stand\n" +
			"in a harness file, to be added to its own. Read them before you take any: the harness\n" +
			"chose what to ask for. What a deny entry refused is left out, and so are addresses\n" +
			"that a name led to and that only an entry of their own opens. The log is verified first;\n" +
			"where it does not have everything, standard error says so.\n\n" +
			"Of a name that does not exist inside, only the question is known: it stands with port\n" +
			"443, and where it leads is not known yet. Run again with it to see what else is refused.",
		Example: "  agentshim egress suggest 4f1c9a0be2d37786",
		RunE: func(cmd *cobra.Command, args []string) error {
			store, err := shim.OpenStore(nil)
			if err != nil {
				return err
			}
			list, err := store.SuggestEgress(args[0], wildcards)
			if err != nil {
				return err
			}
			printSuggested(cmd.ErrOrStderr(), list)
			_, err = cmd.OutOrStdout().Write(list.Snippet(""))
			return err
		},
	}
	cmd.Flags().BoolVar(&wildcards, "wildcards", false, "one wildcard for several names below the same name")
	return cmd
}

// printSuggested says what to do with the entries.
func printSuggested(w io.Writer, l *shim.EgressLearned) {
	if len(l.Allow) == 0 {
		fmt.Fprintln(w, "agentshim: egress: nothing was refused that an entry of egress.allow would permit")
	} else {
		fmt.Fprintf(w, "agentshim: egress: review these, and add what you want to egress.allow (%d in all)\n", len(l.Allow))
	}
	printMissed(w, l)
}

// logVerification is a log and what is known of it from elsewhere.
type logVerification struct {
	path, runID string
	heads       []string
	running     bool
}

// verification finds the log of a run, or a file and the record beside it. What
// holds a slash or a dot is a file: no name that an agent could give a file in the
// caller's working folder is taken for a run's.
func verification(arg string) (logVerification, error) {
	if strings.ContainsAny(arg, "/.") {
		return fileVerification(arg)
	}
	store, err := shim.OpenStore(nil)
	if err != nil {
		return logVerification{}, err
	}
	path, run, err := store.EgressLog(arg)
	v := logVerification{path: path, running: run.State == shim.RunRunning}
	return v.with(run.Record), err
}

func fileVerification(path string) (logVerification, error) {
	v := logVerification{path: path}
	if _, err := os.Stat(path); err != nil {
		return v, &shim.Error{Reason: shim.ReasonSpecInvalid, Err: err}
	}
	rec, err := shim.RecordBeside(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return v, nil
	case err != nil:
		return v, &shim.Error{Reason: shim.ReasonState, Err: err}
	}
	return v.with(rec), nil
}

func (v logVerification) with(rec shim.Record) logVerification {
	v.runID = rec.ID
	if rec.Egress != nil && rec.Egress.Log != nil {
		v.heads = append(v.heads, rec.Egress.Log.SHA256)
	}
	return v
}

// run prints one line: to out when the log is whole, else to errOut.
func (v logVerification) run(out, errOut io.Writer) error {
	f, err := os.Open(v.path)
	if err != nil {
		return &shim.Error{Reason: shim.ReasonState, Err: err}
	}
	defer f.Close()
	head, err := netpolicy.VerifyLog(f, v.runID, v.heads...)
	var bad *netpolicy.LogError
	switch {
	case err == nil:
		fmt.Fprintf(out, "ok: %d decisions, head %s%s\n", head.Allowed+head.Refused, head.SHA256, v.note(head))
		return nil
	case errors.As(err, &bad):
		fmt.Fprintf(errOut, "agentshim: %q: %v\n", v.path, bad)
	case errors.Is(err, netpolicy.ErrLogOpen) && v.running:
		fmt.Fprintf(errOut, "agentshim: %q: the run still goes on; the %d lines so far are in order\n", v.path, head.Lines)
	case errors.Is(err, netpolicy.ErrLogOpen):
		fmt.Fprintf(errOut, "agentshim: %q: %d lines are in order; %v\n", v.path, head.Lines, err)
	default:
		return &shim.Error{Reason: shim.ReasonState, Err: err}
	}
	return exitError(1)
}

// note says what the one line would hide.
func (v logVerification) note(head netpolicy.Head) string {
	var note string
	if head.Counted > 0 {
		note += fmt.Sprintf(", %d only counted", head.Counted)
	}
	if len(v.heads) == 0 {
		note += " (compared with no record)"
	}
	return note
}

func newTail() *cobra.Command {
	var t logTail
	var noFollow bool
	cmd := &cobra.Command{
		Use: "tail RUN", Short: "Show what a run reaches and is refused", Args: cobra.ExactArgs(1),
		Long: "Show the decisions of a run from its first one, and new ones as they come, until the run\n" +
			"has ended. Repeated ones are counted and not all shown. It does not compare digests:\n" +
			"agentshim egress verify does.",
		Example: "  agentshim egress tail 4f1c9a0be2d37786\n" +
			"  agentshim egress tail 4f1c9a0be2d37786 --json --no-follow | jq 'select(.verdict == \"refuse\")'",
		RunE: func(cmd *cobra.Command, args []string) error {
			store, err := shim.OpenStore(nil)
			if err != nil {
				return err
			}
			t.out = cmd.OutOrStdout()
			t.find = func() (string, shim.RunInfo, error) { return store.EgressLog(args[0]) }
			return t.follow(cmd.Context(), !noFollow)
		},
	}
	cmd.Flags().BoolVar(&t.asJSON, "json", false, "the log's own lines")
	cmd.Flags().BoolVar(&noFollow, "no-follow", false, "end where the log ends now")
	return cmd
}

// tailInterval is how long a new line may wait to be shown.
const tailInterval = 200 * time.Millisecond

// logTail shows a log that grows.
type logTail struct {
	asJSON bool
	out    io.Writer
	find   func() (string, shim.RunInfo, error)
	in     *bufio.Reader
	// pending is the part of a line that is there.
	pending []byte
	shown   int
}

func (t *logTail) follow(ctx context.Context, follow bool) error {
	for {
		// The run's state is read before the log: what an ended run wrote is there.
		path, run, err := t.find()
		going := follow && run.State == shim.RunRunning
		switch {
		case err == nil:
			err = t.read(path)
		case errors.Is(err, shim.ErrNoEgressLog) && going && canHaveLog(run):
			err = nil // not made yet
		}
		if err != nil || !going {
			return err
		}
		select {
		case <-ctx.Done():
			return tailEnd(ctx)
		case <-time.After(tailInterval):
		}
	}
}

func canHaveLog(run shim.RunInfo) bool {
	return run.Egress == nil || netpolicy.Policy{Mode: run.Egress.Mode}.HasGateway()
}

// tailEnd: a signal is how a person ends it; there is nothing to say.
func tailEnd(ctx context.Context) error {
	var sig shim.SignalError
	if errors.As(context.Cause(ctx), &sig) {
		return exitError(128 + int(sig.Signal))
	}
	return context.Cause(ctx)
}

// read shows what is new. The file stays open until the process ends.
func (t *logTail) read(path string) error {
	if t.in == nil {
		f, err := os.Open(path)
		if err != nil {
			return &shim.Error{Reason: shim.ReasonState, Err: err}
		}
		t.in = bufio.NewReaderSize(f, 1<<16)
	}
	for {
		b, err := t.in.ReadSlice('\n')
		t.pending = append(t.pending, b...)
		if errors.Is(err, io.EOF) && len(t.pending) < 1<<16 {
			return nil
		}
		if err == nil {
			err = t.show()
		}
		if err != nil {
			return &shim.Error{Reason: shim.ReasonState, Msg: fmt.Sprintf("%q: line %d", path, t.shown+1), Err: err, Hint: "agentshim egress verify says more"}
		}
	}
}

// show prints the pending line. What is not in the log's form is not printed: it
// could steer a terminal.
func (t *logTail) show() error {
	b := t.pending[:len(t.pending)-1]
	line, err := netpolicy.ParseLogLine(b)
	if err != nil {
		return err
	}
	text := string(b)
	if !t.asJSON {
		text = line.Time.Local().Format("15:04:05.000") + "  " + line.Text()
	}
	t.pending = t.pending[:0]
	t.shown++
	_, err = fmt.Fprintln(t.out, text)
	return err
}
