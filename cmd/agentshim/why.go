package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/shim"
)

func newWhy() *cobra.Command {
	var f specFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "why --spec FILE TARGET",
		Short: "Say whether the file lets the agent reach a target, and why",
		Long: "Say whether the file lets the agent reach TARGET, and by which rule or for which\n" +
			"reason not. TARGET is NAME[:PORT], ADDRESS[:PORT] or [ADDRESS]:PORT; the port is 443\n" +
			"unless given. Nothing is looked up or dialled: where a name leads is judged when the\n" +
			"agent connects. The answer comes from the code that decides then.\n\n" +
			"The exit code is 0 for an allowed target and 1 for a refused one.",
		Example: "  agentshim why --spec harness.json api.example.com\n" +
			"  agentshim why --spec harness.json 10.1.2.3:5432",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			job, err := f.job()
			if err != nil {
				return err
			}
			answer, err := shim.Why(job, args[0])
			if err != nil {
				return err
			}
			if asJSON {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				err = e.Encode(answer)
			} else {
				_, err = fmt.Fprint(cmd.OutOrStdout(), answer.Text())
			}
			if err == nil && !answer.Allowed {
				return exitError(1)
			}
			return err
		},
	}
	f.register(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	return cmd
}
