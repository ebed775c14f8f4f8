package main

import (
	"embed"

	"github.com/spf13/cobra"
)

//go:embed snippets/*.yaml
var snippets embed.FS

func newSnippet() *cobra.Command {
	cmd := &cobra.Command{
		Use: "snippet", Short: "Print a block for an orchestrator's file", Args: cobra.NoArgs,
		Long: "Print a block for an orchestrator's file. docs/orchestrators.md says what else there is to know.",
	}
	cmd.AddCommand(newSnippetDagu())
	return cmd
}

func newSnippetDagu() *cobra.Command {
	var session bool
	cmd := &cobra.Command{
		Use: "dagu", Short: "Print a block for a DAG of Dagu", Args: cobra.NoArgs,
		Example: "  agentshim snippet dagu >> fix.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			name := "snippets/dagu.yaml"
			if session {
				name = "snippets/dagu-session.yaml"
			}
			text, err := snippets.ReadFile(name)
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
	cmd.Flags().BoolVar(&session, "session", false, "steps that share one container")
	return cmd
}
