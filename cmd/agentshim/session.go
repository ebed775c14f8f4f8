package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/shim"
	"github.com/agentshim/agentshim/spec"
)

func newUp() *cobra.Command {
	var f specFlags
	var name string
	var quiet bool
	cmd := &cobra.Command{
		Use:   "up --spec FILE [flags] [-- ARGV…]",
		Short: "Start a session: one container for several steps",
		Long: "Start a container in which steps run one after another or at the same time\n" +
			"(agentshim exec --session). When it is proven and ready, the session's id is printed,\n" +
			"alone, on standard output; a process in the background, its keeper, goes on holding it.\n" +
			"Where the id can't be printed, the session is ended.\n\n" +
			"The words behind -- are a program that runs there from the start, such as a server that\n" +
			"the steps use; the first MiB of what it writes goes to the keeper's log. The session goes\n" +
			"on when it ends. session.ready in the file says what to wait for, for ten minutes at most;\n" +
			"session.idle and session.maximum when the session ends by itself: without them it lives\n" +
			"until agentshim down. Steps share the container's files, home and network: they are one\n" +
			"trust domain.",
		Example: "  id=$(agentshim up --spec harness.json --name work)\n" +
			"  agentshim exec --session work -- fix the failing test\n" +
			"  agentshim down work",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 && cmd.ArgsLenAtDash() != 0 {
				return invalid("%q is not behind --", "--name gives the session a name; a program of its own stands behind --", args[0])
			}
			job, err := f.job()
			if err != nil {
				return err
			}
			job.Command = args
			return shim.Up(cmd.Context(), job, name, quiet, os.Stderr, func(id string) error {
				if _, err := fmt.Fprintln(cmd.OutOrStdout(), id); err != nil {
					return &shim.Error{Reason: shim.ReasonOutputClosed, Msg: "the session is ended: its id can't be printed", Err: err}
				}
				return nil
			})
		},
	}
	f.register(cmd)
	cmd.Flags().StringVar(&name, "name", "", "a name for the session, which no other one has while it lasts")
	cmd.Flags().BoolVar(&quiet, "quiet", false, "say nothing but errors")
	return cmd
}

// newKeep is what up starts; it is nobody else's business.
func newKeep() *cobra.Command {
	return &cobra.Command{
		Use: shim.KeepVerb, Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			signals := make(chan os.Signal, 16)
			catch(signals, shim.Signals(false)...)
			ctx := context.WithoutCancel(cmd.Context())
			return shim.Keep(ctx, os.NewFile(3, "up"), shim.KeepOptions{Version: version, Signals: signals, Dress: dress, Log: os.Stderr})
		},
	}
}

// dress lets a run's start, and a session's, say what it does.
func dress(j *shim.Job, w io.Writer) {
	j.Progress = w
	j.Notice = func(format string, args ...any) {
		fmt.Fprintf(w, "agentshim: %s\n", visible(fmt.Sprintf(format, args...)))
	}
	j.Proven = func(p spec.Plan, a shim.Attestation) { printProven(w, p, a) }
	j.Log = logrus.Debugf
}

func newDown() *cobra.Command {
	var quiet bool
	cmd := &cobra.Command{
		Use: "down SESSION", Short: "End a session", Args: cobra.ExactArgs(1),
		Long: "End a session, given by its id or name, and return when its container is gone. Steps\n" +
			"that run get TERM; what is left after stopGrace is killed. What a run says at its end,\n" +
			"down says. The id of a session that has ended already is no error, its name is: another\n" +
			"session may have it by now. One that fails meanwhile, or lost its keeper, gives its reason.",
		Example: "  agentshim down work",
		RunE: func(cmd *cobra.Command, args []string) error {
			store, err := shim.OpenStore(nil)
			if err != nil {
				return err
			}
			rec, err := store.Down(cmd.Context(), args[0])
			printOutcome(os.Stderr, rec, quiet)
			return err
		},
	}
	cmd.Flags().BoolVar(&quiet, "quiet", false, "say nothing but errors and what was planted in the workspace")
	return cmd
}

func newPs() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ps", Short: "List your sessions", Args: cobra.NoArgs,
		Long: "List your sessions, oldest first. A session is silent when its keeper does not answer\n" +
			"within two seconds, and lost when its keeper is gone and wrote no end; agentshim down or\n" +
			"prune removes what it left. Those that have ended are in agentshim runs.",
		Example: "  agentshim ps\n  agentshim ps --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			store, err := shim.OpenStore(nil)
			if err != nil {
				return err
			}
			list, err := store.Sessions()
			return errors.Join(printSessions(cmd.OutOrStdout(), list, asJSON), err)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON document")
	return cmd
}

func printSessions(w io.Writer, list []shim.SessionInfo, asJSON bool) error {
	if asJSON {
		return printJSON(w, map[string]any{"version": 1, "sessions": append([]shim.SessionInfo{}, list...)})
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SESSION\tNAME\tSTATE\tENGINE\tIMAGE\tSTART\tRUNNING\tSTEPS")
	for _, s := range list {
		start := ""
		if !s.Start.IsZero() {
			start = s.Start.Local().Format(time.DateTime)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\n", s.ID, s.Name, s.State, s.Engine, visible(s.Image), start, s.Running, s.Steps)
	}
	return t.Flush()
}
