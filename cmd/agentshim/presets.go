package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/shim"
)

func newPresets() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "presets [NAME]", Short: "List the targets that egress.presets can name", Args: cobra.MaximumNArgs(1),
		Long: "List the presets for egress.presets, or show one. A provider's hosts are agentshim's own\n" +
			"list; verified says that the CLI was run with it and nothing else. A package manager's\n" +
			"come from your own configuration: its files in your home and in /etc and the environment,\n" +
			"never the workspace's. Showing one reads that configuration; nothing is contacted.",
		Example: "  agentshim presets\n  agentshim presets npm",
		RunE: func(cmd *cobra.Command, args []string) error {
			infos, err := presetInfos(args)
			if err != nil {
				return err
			}
			switch {
			case asJSON:
				return printJSON(cmd.OutOrStdout(), map[string]any{"version": 1, "presets": infos})
			case len(args) == 1:
				return printPreset(cmd.OutOrStdout(), infos[0])
			}
			return printPresets(cmd.OutOrStdout(), infos)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON document")
	return cmd
}

// presetInfo is a preset, and what it opens here where one is asked for by name.
type presetInfo struct {
	harness.Preset
	Entries []shim.PresetEntry `json:"entries,omitempty"`
	Notes   []string           `json:"notes,omitempty"`
}

// presetInfos gives all presets, or the named one.
func presetInfos(names []string) ([]presetInfo, error) {
	var infos []presetInfo
	if len(names) == 0 {
		for _, p := range harness.Presets() {
			infos = append(infos, presetInfo{Preset: p})
		}
		return infos, nil
	}
	probed, err := shim.ProbePresets(names, shim.ProbeOptions{}, nil)
	if err != nil {
		return nil, err
	}
	p, _ := harness.FindPreset(names[0])
	return []presetInfo{{p, probed[p.Name].Entries, probed[p.Name].Notes}}, nil
}

func printPresets(w io.Writer, infos []presetInfo) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tKIND\tVERIFIED\tHOSTS")
	for _, p := range infos {
		hosts := strings.Join(p.Allow, " ")
		if p.Kind == harness.PackageManagerPreset {
			hosts = "from your configuration"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", p.Name, p.Kind, yesNo(p.Verified), hosts)
	}
	return t.Flush()
}

func printPreset(w io.Writer, p presetInfo) error {
	fmt.Fprintf(w, "%s (%s)\n%s\n", p.Name, p.Kind, p.Description)
	if p.Kind == harness.ProviderPreset {
		fmt.Fprintf(w, "source: %s\nverified: %s\n", p.Source, yesNo(p.Verified))
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, e := range p.Entries {
		fmt.Fprintf(t, "  %s\t%s\n", e.Allow, e.From)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, note := range p.Notes {
		fmt.Fprintf(w, "note: %s\n", note)
	}
	return nil
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
