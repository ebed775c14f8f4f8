package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/shim"
)

func newDoctor() *cobra.Command {
	var o shim.DoctorOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor [flags]",
		Short: "Check this machine, and prove it with a real container",
		Long: "Check what a run needs of this machine and its engines, then start a container on each\n" +
			"engine, show what was proven in it, and remove it. Nothing is pulled: without --spec or\n" +
			"--image a one-file image is imported and removed.\n\n" +
			"FAIL means that exec would not work, and the exit code is then 1. WARN is weaker or\n" +
			"narrower than it could be; without --engine it is also what is wrong with the engine\n" +
			"that exec would not choose. What to do stands behind an arrow.",
		Example: "  agentshim doctor\n" +
			"  agentshim doctor --engine podman --spec harness.json",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Version = version
			d, err := shim.Doctor(cmd.Context(), o)
			if err != nil {
				return err
			}
			text := []byte(d.Text())
			if asJSON {
				if text, err = json.MarshalIndent(d, "", "  "); err != nil {
					return err
				}
				text = append(text, '\n')
			}
			if _, err := cmd.OutOrStdout().Write(text); err != nil {
				return fmt.Errorf("report: %w", err)
			}
			if d.Count(shim.Failed) > 0 {
				return exitError(1)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Engine, "engine", "", "auto, docker or podman: look at that one only")
	f.StringVar(&o.SpecFile, "spec", "", "harness file whose needs are checked too")
	f.StringVar(&o.Image, "image", "", "local image to start, instead of an imported one or the file's")
	f.BoolVar(&asJSON, "json", false, "print one JSON document")
	return cmd
}
