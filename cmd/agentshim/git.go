package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/shim"
)

// printGit says where the agent's commits are.
func printGit(w io.Writer, rec shim.Record) {
	if rec.Git == nil {
		return
	}
	for _, t := range rec.Git.Taken {
		of, rewritten, noun := "", "", "commits"
		if t.Branch != "" {
			of = fmt.Sprintf(" of %q", t.Branch)
		}
		if t.Rewritten {
			rewritten = ", which don't go on from the commit that the run began with"
		}
		if t.Commits == 1 {
			noun = "commit"
		}
		fmt.Fprintf(w, "agentshim: git: %d new %s%s%s: git log %s\n", t.Commits, noun, of, rewritten, t.Ref)
	}
}

// printGitLost says what did not come back, and where it is.
func printGitLost(w io.Writer, rec shim.Record) {
	g := rec.Git
	switch {
	case g == nil || g.Kept == "":
	case g.Error != "":
		fmt.Fprintf(w, "agentshim: git: the agent's commits were not taken; its repository is kept in %q: %s\n", g.Kept, g.Error)
		if g.Hint != "" {
			fmt.Fprintf(w, "agentshim: hint: %s\n", g.Hint)
		}
	case len(g.Left) > 0:
		quoted := make([]string, len(g.Left))
		for i, name := range g.Left {
			quoted[i] = fmt.Sprintf("%q", name)
		}
		fmt.Fprintf(w, "agentshim: git: commits of the agent's on %s were not taken; its repository is kept in %q\n", strings.Join(quoted, ", "), g.Kept)
		fmt.Fprintf(w, "agentshim: hint: agentshim take %s --branch NAME takes them, agentshim take %s --discard removes the repository\n", rec.ID, rec.ID)
	default:
		fmt.Fprintf(w, "agentshim: git: the agent's repository is kept in %q until agentshim prune could remove the container\n", g.Kept)
	}
}

func newTake() *cobra.Command {
	var branch string
	var discard bool
	cmd := &cobra.Command{
		Use: "take RUN", Short: "Take the commits that a run's agent left behind", Args: cobra.ExactArgs(1),
		Long: "Take commits from the repository of a run's agent that was kept because not all of it\n" +
			"came back: those that could not be taken at the run's end, as refs/agentshim/RUN, or\n" +
			"with --branch those of another branch, as refs/agentshim/RUN-NAME. They are verified,\n" +
			"and nothing else in your repository changes. The agent's repository goes when nothing\n" +
			"is left in it. Don't run git in it yourself: its configuration is the agent's.",
		Example: "  agentshim take 4f1c9a0be2d37786\n  agentshim take 4f1c9a0be2d37786 --branch idea\n  agentshim take 4f1c9a0be2d37786 --discard",
		RunE: func(cmd *cobra.Command, args []string) error {
			store, err := shim.OpenStore(nil)
			if err != nil {
				return err
			}
			if discard {
				return store.DiscardGit(args[0])
			}
			rec, err := store.TakeGit(cmd.Context(), args[0], branch)
			if err != nil {
				return err
			}
			printGit(cmd.OutOrStdout(), rec)
			printGitLost(cmd.ErrOrStderr(), rec)
			return nil
		},
	}
	cmd.Flags().StringVar(&branch, "branch", "", "take this branch of the agent's")
	cmd.Flags().BoolVar(&discard, "discard", false, "remove the agent's repository with all that is left in it")
	cmd.MarkFlagsMutuallyExclusive("branch", "discard")
	return cmd
}
