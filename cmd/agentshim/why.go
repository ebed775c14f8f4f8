package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/seccomp"
	"github.com/agentshim/agentshim/shim"
)

func newWhy() *cobra.Command {
	var f specFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "why --spec FILE TARGET",
		Short: "Say whether the file lets the agent reach a target or make a system call, and why",
		Long: "Say whether the file lets the agent reach TARGET, and by which rule or for which\n" +
			"reason not. TARGET is NAME[:PORT], ADDRESS[:PORT] or [ADDRESS]:PORT; the port is 443\n" +
			"unless given. Nothing is looked up or dialled: where a name leads is judged when the\n" +
			"agent connects, and not at all behind an upstream proxy that looks names up, which the\n" +
			"answer then says. The answer comes from the code that decides then. In mode network the\n" +
			"engine is asked for the network's containers. What the file has to accept is not looked\n" +
			"at: agentshim plan does that.\n\n" +
			"TARGET can also be syscall:CALL[,ARGUMENT=VALUE...], as agentshim seccomp explain has it.\n\n" +
			"The exit code is 0 for an allowed target, and 1 for a refused one or a call that is\n" +
			"allowed with some arguments only.",
		Example: "  agentshim why --spec harness.json api.example.com\n" +
			"  agentshim why --spec harness.json 10.1.2.3:5432\n" +
			"  agentshim why --spec harness.json syscall:ptrace",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			job, err := f.job()
			if err != nil {
				return err
			}
			if call, ok := strings.CutPrefix(args[0], "syscall:"); ok { // no host has a name of one label
				e, err := explain(cmd.OutOrStdout(), &policyFlags{f}, call, asJSON)
				if err == nil && e.Verdict != seccomp.VerdictAllowed {
					return exitError(1)
				}
				return err
			}
			answer, err := shim.Why(cmd.Context(), job, args[0])
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
