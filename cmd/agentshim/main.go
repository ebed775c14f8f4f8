// Command agentshim runs an AI coding agent in a hardened container.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim"
)

// version is set by make build.
var version = "dev"

func main() {
	// net/http quotes what a server sends unasked in the standard log.
	log.SetOutput(io.Discard)
	ctx, stop := signalContext()
	code := run(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

// catch asks for signals, but for those that the caller made agentshim ignore
// (nohup, a shell's background job).
func catch(ch chan<- os.Signal, signals ...os.Signal) {
	for _, s := range signals {
		if !signal.Ignored(s) {
			signal.Notify(ch, s)
		}
	}
}

// signalContext ends with the first INT, TERM or HUP.
func signalContext() (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	ch := make(chan os.Signal, 1)
	catch(ch, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		if s, ok := (<-ch).(syscall.Signal); ok {
			cancel(shim.SignalError{Signal: s})
		}
	}()
	return ctx, func() { cancel(nil) }
}

// exitError carries an exit code whose message has been printed or needs none.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit %d", int(e)) }

// codedError is an error to print, with an exit code that the caller asked for.
type codedError struct {
	error
	code int
}

func (e codedError) Unwrap() error { return e.error }

// run is main without the process: it prints errors and returns the exit code.
func run(ctx context.Context, args []string) int {
	cmd := newRoot()
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(ctx)
	var exit exitError
	var coded codedError
	var sig shim.SignalError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return int(exit)
	}
	printError(err)
	switch {
	case errors.As(err, &coded):
		return coded.code
	case errors.As(err, &sig):
		return 128 + int(sig.Signal)
	}
	return shim.ExitCode(err)
}

// printError writes "agentshim: reason: …", a line for each problem, and hints.
func printError(err error) {
	reason := shim.ReasonOf(err)
	var e *shim.Error
	if !errors.As(err, &e) {
		reason = shim.ReasonSpecInvalid // cobra's own: an unknown flag or verb
	}
	for line := range strings.Lines(err.Error()) {
		fmt.Fprintf(os.Stderr, "agentshim: %s: %s\n", reason, visible(strings.TrimRight(line, "\n")))
	}
	if hint := shim.HintOf(err); hint != "" {
		fmt.Fprintf(os.Stderr, "agentshim: hint: %s\n", visible(hint))
	}
}

// visible writes what does not print as a Go string would: the names in a message may
// come from a folder that an agent made, and a terminal obeys them.
func visible(line string) string {
	var b strings.Builder
	for _, r := range strings.ToValidUTF8(line, "\uFFFD") {
		if strconv.IsPrint(r) {
			b.WriteRune(r)
		} else {
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}

func newRoot() *cobra.Command {
	var level, format string
	root := &cobra.Command{
		Use:   "agentshim",
		Short: "Run an AI coding agent in a container that is hardened, proven and closed",
		Long: "agentshim runs an AI coding agent inside a Docker or Podman container. It decides\n" +
			"everything first, proves from inside the container that what runs is what was\n" +
			"planned, and only then starts the agent.",
		Example: "  agentshim exec --spec harness.json -- fix the failing test\n" +
			"  agentshim plan --spec harness.json",
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       version,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			return setUpLog(level, format)
		},
	}
	root.SetVersionTemplate("agentshim {{.Version}}\n")
	root.PersistentFlags().StringVar(&level, "log-level", "warning", "error, warning, info or debug")
	root.PersistentFlags().StringVar(&format, "log-format", "text", "text or json")
	root.AddCommand(newExec(), newUp(), newDown(), newPs(), newKeep(), newPlan(), newRuns(), newShow(), newWhy(), newSeccomp(), newEgress(), newDiff(), newApply(), newDiscard(), newPrune(), newTake(), newCache(), newDoctor(), newPresets(), newProviders(), newSnippet(), newSchema(), newReasons(), newVersion())
	return root
}

func setUpLog(level, format string) error {
	l, err := logrus.ParseLevel(level)
	if err != nil {
		return &shim.Error{Reason: shim.ReasonSpecInvalid, Msg: fmt.Sprintf("--log-level %q", level), Hint: "use error, warning, info or debug"}
	}
	logrus.SetLevel(l)
	logrus.SetOutput(os.Stderr)
	switch format {
	case "text":
		logrus.SetFormatter(&logrus.TextFormatter{DisableColors: true, FullTimestamp: true})
	case "json":
		logrus.SetFormatter(&logrus.JSONFormatter{})
	default:
		return &shim.Error{Reason: shim.ReasonSpecInvalid, Msg: fmt.Sprintf("--log-format %q", format), Hint: "use text or json"}
	}
	return nil
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		Run: func(cmd *cobra.Command, _ []string) { fmt.Fprintf(cmd.OutOrStdout(), "agentshim %s\n", version) },
	}
}

func newSchema() *cobra.Command {
	var provider bool
	cmd := &cobra.Command{
		Use: "schema", Short: "Print the harness file's JSON Schema", Args: cobra.NoArgs,
		Example: "  agentshim schema > harness.schema.json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			text := harness.Schema()
			if provider {
				text = harness.ProviderSchema()
			}
			_, err := cmd.OutOrStdout().Write(text)
			return err
		},
	}
	cmd.Flags().BoolVar(&provider, "provider", false, "that of provider files")
	return cmd
}

func newReasons() *cobra.Command {
	return &cobra.Command{
		Use: "reasons", Short: "List the reasons for an exit code of agentshim's own", Args: cobra.NoArgs,
		Run: func(cmd *cobra.Command, _ []string) {
			for _, r := range shim.Reasons() {
				retry := ""
				if r.Retry {
					retry = " A retry can help."
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%-20s %s%s\n", r.Reason, r.Doc, retry)
			}
		},
	}
}
