package main

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/shim"
)

func newDiff() *cobra.Command {
	var stat bool
	cmd := &cobra.Command{
		Use: "diff RUN", Short: "Show what a run changed in its copy of the workspace", Args: cobra.ExactArgs(1),
		Long: "Show what the agent changed in its private copy of the workspace (workspace.mode\n" +
			"\"copy\"), against the workspace as it is now. The workspace has none of it until\n" +
			"agentshim apply. Conflicts (the workspace changed meanwhile, too) and what is never\n" +
			"applied (protected paths, links out of the workspace, FIFOs) have one line with the\n" +
			"reason. What the workspace has already is left out.\n\n" +
			"Names and lines are escaped for the terminal: this is no patch.\n\n" +
			"Exit code 0: no changes. 1: changes. 125: they could not be found out.",
		Example: "  agentshim diff 4f1c9a0be2d37786 | less\n" +
			"  agentshim diff 4f1c9a0be2d37786 --stat",
		RunE: func(cmd *cobra.Command, args []string) error {
			c, changes, err := openChanges(cmd, args[0], false)
			if err != nil {
				return err
			}
			defer c.Close()
			printCopyState(cmd.ErrOrStderr(), c)
			if err := c.Diff(cmd.OutOrStdout(), changes, shim.DiffLimits{Stat: stat}); err != nil {
				return &shim.Error{Reason: shim.ReasonOutputClosed, Err: err}
			}
			if changes.Count(shim.VerdictDone) < len(changes.List) {
				return exitError(1)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&stat, "stat", false, "only one line for each changed file")
	return cmd
}

func openChanges(cmd *cobra.Command, id string, change bool) (*shim.RunCopy, shim.Changes, error) {
	store, err := shim.OpenStore(nil)
	if err != nil {
		return nil, shim.Changes{}, err
	}
	c, err := store.OpenCopy(id, change)
	if err != nil {
		return nil, shim.Changes{}, err
	}
	changes, err := c.Changes(cmd.Context())
	if err != nil {
		c.Close()
		return nil, shim.Changes{}, err
	}
	return c, changes, nil
}

// printCopyState says what a reader of a diff must know.
func printCopyState(w io.Writer, c *shim.RunCopy) {
	if c.Run.State == shim.RunRunning {
		fmt.Fprintln(w, "agentshim: the run still goes on: this is what there is so far")
	}
	if c.Cut() {
		fmt.Fprintf(w, "agentshim: warning: %v\n", shim.ErrCopyCut)
	}
	if n := len(c.Run.Copy.Applied); n > 0 {
		fmt.Fprintf(w, "agentshim: changes of this run were applied on %s\n", c.Run.Copy.Applied[n-1].Time.Local().Format(time.DateTime))
	}
}

type applyFlags struct{ dryRun, partly bool }

func newApply() *cobra.Command {
	var f applyFlags
	cmd := &cobra.Command{
		Use: "apply RUN", Short: "Apply what a run changed in its copy to the workspace", Args: cobra.ExactArgs(1),
		Long: "Apply what the agent changed in its private copy of the workspace (workspace.mode\n" +
			"\"copy\") to the workspace itself. Look at agentshim diff first: what comes is the\n" +
			"agent's, and may be run by you.\n\n" +
			"A file that changed in the workspace, too, is a conflict; with one, nothing is\n" +
			"applied, unless --partly leaves out what is in conflict. Never applied are protected\n" +
			"paths (.git, the settings of editors and agents, the harness file, workspace.protect\n" +
			"and workspace.hide), links that lead out of the workspace, FIFOs and the like, and\n" +
			"setuid files: they are named and left out. No link is followed; each file is put in\n" +
			"place whole.\n\n" +
			"Exit code 0: everything is applied. 1: something is not, and is named. 125: it could\n" +
			"not be done, or not to its end; what was applied until then stays, and a second apply\n" +
			"goes on. The copy stays until agentshim discard.",
		Example: "  agentshim apply 4f1c9a0be2d37786 --dry-run\n" +
			"  agentshim apply 4f1c9a0be2d37786",
		RunE: func(cmd *cobra.Command, args []string) error { return f.run(cmd, args[0]) },
	}
	cmd.Flags().BoolVar(&f.dryRun, "dry-run", false, "only say what would be applied")
	cmd.Flags().BoolVar(&f.partly, "partly", false, "apply the others when there are conflicts")
	return cmd
}

func (f applyFlags) run(cmd *cobra.Command, id string) error {
	c, changes, err := openChanges(cmd, id, !f.dryRun)
	if err != nil {
		return err
	}
	defer c.Close()
	out, errOut := cmd.OutOrStdout(), cmd.ErrOrStderr()
	left := printLeftOut(errOut, changes)
	conflicts := changes.Count(shim.VerdictConflict)
	switch {
	case conflicts > 0 && !f.partly:
		fmt.Fprintf(errOut, "agentshim: nothing is applied: %d of %d changes are in conflict\n"+
			"agentshim: hint: --partly applies the others; the agent's files are in %s\n", conflicts, len(changes.List), c.Path)
		return exitError(1)
	case f.dryRun:
		for _, line := range shim.ApplyText(changes) {
			fmt.Fprintf(out, "%s\n", line)
		}
		fmt.Fprintf(out, "%s would be applied to %q\n", countText(changes.Count(shim.VerdictApply), "change", "changes"), c.Run.Copy.Source)
	default:
		done, err := c.Apply(cmd.Context(), changes, f.partly)
		printApplied(out, done)
		fmt.Fprintf(out, "applied %s to %q\n", countText(len(done.Written)+len(done.Deleted)+len(done.Modes), "change", "changes"), c.Run.Copy.Source)
		if err != nil {
			return err
		}
	}
	if left > 0 {
		return exitError(1)
	}
	return nil
}

func countText(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// maxApplyLines bounds the lines about what was left out.
const maxApplyLines = 100

// printLeftOut names what is never applied and what is in conflict.
func printLeftOut(w io.Writer, changes shim.Changes) int {
	n := 0
	for i := range changes.List {
		c := &changes.List[i]
		if c.Verdict != shim.VerdictConflict && c.Verdict != shim.VerdictRefused {
			continue
		}
		if n++; n <= maxApplyLines {
			fmt.Fprintf(w, "agentshim: %s: %s: %s\n", c.Verdict, shim.ShowName(c.Path), c.Why)
		}
	}
	if n > maxApplyLines {
		fmt.Fprintf(w, "agentshim: … and %d more; agentshim diff names them\n", n-maxApplyLines)
	}
	return n
}

func printApplied(w io.Writer, done shim.Applied) {
	for _, list := range []struct {
		what  string
		paths []string
	}{{"written", done.Written}, {"deleted", done.Deleted}, {"permissions", done.Modes}} {
		for _, p := range list.paths {
			fmt.Fprintf(w, "%s: %s\n", list.what, shim.ShowName(p))
		}
	}
}

func newDiscard() *cobra.Command {
	return &cobra.Command{
		Use: "discard RUN…", Short: "Remove a run's copy of the workspace", Args: cobra.MinimumNArgs(1),
		Long: "Remove the private copies of ended runs with all that the agents changed in them,\n" +
			"applied or not. Records and logs stay. agentshim prune --copies-older-than does so for\n" +
			"all runs that ended long ago.",
		Example: "  agentshim discard 4f1c9a0be2d37786",
		RunE: func(cmd *cobra.Command, args []string) error {
			store, err := shim.OpenStore(nil)
			if err != nil {
				return err
			}
			var errs []error
			for _, id := range args {
				bytes, err := store.Discard(id)
				if err == nil {
					fmt.Fprintf(cmd.OutOrStdout(), "run %s: removed its copy, %s\n", id, shim.SizeText(bytes))
				}
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		},
	}
}

// parseAge reads a duration that may be in days.
func parseAge(text string) (time.Duration, error) {
	if days, ok := strings.CutSuffix(text, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 16)
		return time.Duration(n) * 24 * time.Hour, err
	}
	d, err := time.ParseDuration(text)
	if err == nil && d < 0 {
		err = strconv.ErrRange
	}
	return d, err
}

// pruneCopies removes old copies, or says which ones there are.
func pruneCopies(w io.Writer, store shim.Store, age string, dryRun bool) error {
	if age == "" {
		return printKept(w, store)
	}
	d, err := parseAge(age)
	if err != nil {
		return invalid("--copies-older-than %q", "give a number of days or hours, e.g. 30d or 12h", age)
	}
	copies, err := store.PruneCopies(d, dryRun)
	for _, k := range copies {
		verb := map[bool]string{true: "would remove", false: "removed"}[dryRun]
		if k.Kept != "" {
			verb = "kept"
		}
		fmt.Fprintf(w, "run %s: %s its copy of %q, %s%s\n", k.Run.ID, verb, k.Run.Copy.Source, shim.SizeText(k.Bytes), appliedText(k.Run))
	}
	return err
}

func appliedText(run shim.RunInfo) string {
	if len(run.Copy.Applied) == 0 {
		return ", never applied"
	}
	return ""
}

// printKept says what copies take, where there are any.
func printKept(w io.Writer, store shim.Store) error {
	copies, err := store.Copies()
	var sum int64
	for _, k := range copies {
		sum += k.Bytes
	}
	if len(copies) > 0 {
		fmt.Fprintf(w, "kept: %s of workspaces, %s; --copies-older-than 30d removes those of runs that ended longer ago\n", countText(len(copies), "copy", "copies"), shim.SizeText(sum))
	}
	return err
}
