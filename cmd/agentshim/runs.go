package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/shim"
)

func newRuns() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "runs", Short: "List your recorded runs", Args: cobra.NoArgs,
		Long: "List your recorded runs, oldest first, sessions and their steps among them. A run is\n" +
			"lost when its agentshim is gone and wrote no end; agentshim prune removes what it left.",
		Example: "  agentshim runs\n  agentshim runs --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			store, err := shim.OpenStore(nil)
			if err != nil {
				return err
			}
			runs, err := store.Runs()
			if werr := printRuns(cmd.OutOrStdout(), runs, asJSON); werr != nil {
				return werr
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON document")
	return cmd
}

func printRuns(w io.Writer, runs []shim.RunInfo, asJSON bool) error {
	if asJSON {
		return printJSON(w, map[string]any{"version": 1, "runs": append([]shim.RunInfo{}, runs...)})
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "RUN\tSESSION\tNAME\tSTATE\tSTART\tTIME\tEXIT\tREASON\tCOPY")
	for _, r := range runs {
		end, exit, session := "", "", ""
		if r.Session != nil {
			session = r.Session.ID
		}
		if r.State == shim.RunEnded {
			end = r.End.Sub(r.Start).Round(time.Millisecond).String()
			exit = fmt.Sprint(r.Exit)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.ID, session, r.Name, r.State, r.Start.Local().Format(time.DateTime), end, exit, r.Reason, copyText(r))
	}
	return t.Flush()
}

// copyText says what became of a run's copy.
func copyText(r shim.RunInfo) string {
	switch {
	case r.Copy == nil:
		return ""
	case !r.Copy.Removed.IsZero():
		return "removed"
	case len(r.Copy.Applied) > 0:
		return "applied"
	}
	return "kept"
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func newShow() *cobra.Command {
	return &cobra.Command{
		Use: "show RUN", Short: "Print one run's record", Args: cobra.ExactArgs(1),
		Long:    "Print one run's record as JSON: digests, engine, image, attestation, timings, exit.",
		Example: "  agentshim show 4f1c9a0be2d37786",
		RunE: func(cmd *cobra.Command, args []string) error {
			store, err := shim.OpenStore(nil)
			if err != nil {
				return err
			}
			run, err := store.Run(args[0])
			if err != nil {
				return err
			}
			return printJSON(cmd.OutOrStdout(), run)
		},
	}
}

func newPrune() *cobra.Command {
	var dryRun bool
	var age string
	cmd := &cobra.Command{
		Use: "prune", Short: "Remove what lost runs left behind", Args: cobra.NoArgs,
		Long: "Remove the containers and files of your runs whose agentshim is gone. A container goes\n" +
			"only if it carries the run's label, the run has a record of yours, and its entrypoint is\n" +
			"agentshim's. Commits of an agent with a repository of its own are taken first, as at the\n" +
			"end of a run. Records and egress logs stay, and so do private copies of workspaces, whose\n" +
			"size is said; --copies-older-than removes those of runs that ended longer ago, applied\n" +
			"or not.",
		Example: "  agentshim prune --dry-run\n  agentshim prune\n  agentshim prune --copies-older-than 30d",
		RunE: func(cmd *cobra.Command, _ []string) error {
			store, err := shim.OpenStore(nil)
			if err != nil {
				return err
			}
			left, err := store.Prune(cmd.Context(), dryRun)
			for _, l := range left {
				fmt.Fprintln(cmd.OutOrStdout(), leftoverText(l, dryRun))
			}
			return errors.Join(err, pruneCopies(cmd.OutOrStdout(), store, age, dryRun))
		},
	}
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would be removed")
	cmd.Flags().StringVar(&age, "copies-older-than", "", "also remove the copies of workspaces of runs that ended longer ago, e.g. 30d")
	return cmd
}

func leftoverText(l shim.Leftover, dryRun bool) string {
	what := "files"
	if l.Container != "" {
		what = fmt.Sprintf("%s container %.12s", l.Engine, l.Container)
	}
	verb := "removed"
	switch {
	case l.Ref != "":
		return fmt.Sprintf("run %s: its commits: git log %s", l.Run, l.Ref)
	case l.Kept != "" && l.Container == "":
		return fmt.Sprintf("run %s: kept: %s", l.Run, l.Kept)
	case l.Kept != "":
		return fmt.Sprintf("run %s: kept %s: %s", l.Run, what, l.Kept)
	case dryRun:
		verb = "would remove"
	}
	return fmt.Sprintf("run %s: %s %s", l.Run, verb, what)
}
