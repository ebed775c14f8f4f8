package main

import (
	_ "embed" // the snippets

	"github.com/spf13/cobra"
)

//go:embed snippets/dagu.yaml
var daguSnippet []byte

func newSnippet() *cobra.Command {
	cmd := &cobra.Command{
		Use: "snippet", Short: "Print a block for an orchestrator's file", Args: cobra.NoArgs,
		Long: "Print a block for an orchestrator's file. docs/orchestrators.md says what else there is to know.",
	}
	cmd.AddCommand(&cobra.Command{
		Use: "dagu", Short: "Print a block for a DAG of Dagu", Args: cobra.NoArgs,
		Example: "  agentshim snippet dagu >> fix.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(daguSnippet)
			return err
		},
	})
	return cmd
}
