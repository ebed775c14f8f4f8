package main

import (
	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/shim"
	"github.com/agentshim/agentshim/spec"
)

func newPlan() *cobra.Command {
	var f specFlags
	var format string
	var command bool
	cmd := &cobra.Command{
		Use:   "plan --spec FILE [flags] [harness options] [-- WORDS…]",
		Short: "Print what exec would do",
		Long: "Print what exec would do with the same command line, and start nothing. Equal inputs print\n" +
			"equal bytes. Values of variables and the prompt are never shown. The file's pull policy is obeyed.",
		Example: "  agentshim plan --spec harness.json\n" +
			"  agentshim plan --spec harness.json --format oci > config.json",
	}
	takeHarnessArgs(cmd, func(cmd *cobra.Command, given arguments) error {
		render, ok := planFormats[format]
		if !ok {
			return invalid("--format %q", "use text, json, oci, engine or rules", format)
		}
		job, err := f.promptedJob(given, command)
		if err != nil {
			return err
		}
		job.Progress, job.Terminal = cmd.ErrOrStderr(), callersTerminal()
		plan, request, err := shim.Plan(cmd.Context(), job)
		if err != nil {
			return err
		}
		out, err := render(plan, request)
		if err != nil {
			return err
		}
		_, err = cmd.OutOrStdout().Write(out)
		return err
	})
	f.register(cmd)
	f.registerPrompt(cmd)
	cmd.Flags().StringVar(&format, "format", "text", "text, json, oci (an OCI runtime config), engine (what it is asked: Podman's argv or the body of Docker's POST /containers/create) or rules (iptables text)")
	cmd.Flags().BoolVar(&command, "command", false, "the words behind -- are an argv that runs instead of the harness")
	return cmd
}

var planFormats = map[string]func(p spec.Plan, request []byte) ([]byte, error){
	"text":   func(p spec.Plan, _ []byte) ([]byte, error) { return []byte(p.Text()), nil },
	"json":   func(p spec.Plan, _ []byte) ([]byte, error) { return p.JSON() },
	"rules":  func(p spec.Plan, _ []byte) ([]byte, error) { return []byte(p.RulesText()), nil },
	"oci":    func(p spec.Plan, _ []byte) ([]byte, error) { return p.OCIJSON(spec.SymbolicPaths) },
	"engine": func(_ spec.Plan, request []byte) ([]byte, error) { return request, nil },
}
