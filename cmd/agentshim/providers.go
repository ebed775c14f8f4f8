package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/harness"
)

func newProviders() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "providers [NAME]", Short: "List the agent CLIs that harness.provider can name", Args: cobra.MaximumNArgs(1),
		Long: "List the providers for harness.provider, or show one: how it is started, its options, what its\n" +
			"credentials are, where each fact is from, and whether it was tried with the CLI itself. Your own\n" +
			"are files NAME.json in agentshim/providers below XDG_CONFIG_HOME or ~/.config.",
		Example: "  agentshim providers\n  agentshim providers codex\n  agentshim providers codex --json",
		RunE: func(cmd *cobra.Command, args []string) error {
			infos, err := providerInfos(args)
			if err != nil {
				return err
			}
			switch {
			case asJSON:
				return printJSON(cmd.OutOrStdout(), map[string]any{"version": 1, "providers": infos})
			case len(args) == 1:
				return printProvider(cmd.OutOrStdout(), infos[0])
			}
			return printProviders(cmd.OutOrStdout(), infos)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON document")
	return cmd
}

// providerInfo is a provider, and which of its facts nobody tried.
type providerInfo struct {
	harness.Provider
	// File is the user's own file, empty for an embedded provider.
	File       string   `json:"file,omitempty"`
	Unverified []string `json:"unverified"`
}

// providerInfos gives the named providers, or all where none is named.
func providerInfos(names []string) ([]providerInfo, error) {
	users, err := userProviders()
	if err != nil {
		return nil, err
	}
	var list []harness.Provider
	if len(names) == 0 {
		list = slices.Concat(harness.Providers(), users)
	}
	for _, name := range names {
		p, ok := harness.FindProvider(name, users)
		if !ok {
			return nil, invalid("no provider %q", "agentshim providers lists them", name)
		}
		list = append(list, p)
	}
	infos := make([]providerInfo, len(list))
	for i, p := range list {
		infos[i] = providerInfo{p, p.File, append([]string{}, p.Unverified()...)}
	}
	return infos, nil
}

func printProviders(w io.Writer, infos []providerInfo) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tCLI\tPROMPT\tAUTH\tEGRESS\tVERIFIED")
	for _, p := range infos {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", p.Name, visible(p.Title), p.Headless.PromptMode, strings.Join(p.Forms(), " "), orNone(p.Egress), p.verified())
	}
	return t.Flush()
}

// verified says how much was tried with the CLI itself.
func (p providerInfo) verified() string {
	switch len(p.Unverified) {
	case 0:
		return "yes"
	case len(p.Stated()):
		return "no"
	}
	return "all but " + strings.Join(p.Unverified, ", ")
}

func orNone(text string) string {
	if text == "" {
		return "none"
	}
	return text
}

func printProvider(w io.Writer, p providerInfo) error {
	fmt.Fprintf(w, "%s (%s)\n", p.Name, visible(p.Title))
	if p.File != "" {
		fmt.Fprintf(w, "  file          %s\n", visible(p.File))
	}
	// fact is what one field says, and where that is from.
	fact := func(name, text string) {
		fmt.Fprintf(w, "  %-13s %s\n  %-13s (%s)\n", name, visible(text), "", visible(p.from(name)))
	}
	fact("binary", strings.TrimSuffix(p.Binary+"; "+p.Install, "; "))
	if p.VersionArgs != nil {
		fact("versionArgs", p.Binary+" "+strings.Join(p.VersionArgs, " "))
	}
	fact("headless", p.headless())
	if p.Interactive != nil {
		fact("interactive", strings.Join(append([]string{p.Binary}, p.Interactive.Args...), " "))
	}
	if p.Options != nil {
		fact("options", p.optionText())
	}
	if p.Output != nil {
		fact("output", strings.TrimSpace("--"+p.Output.Option+" "+strings.Join(p.Output.Values, ", ")))
	}
	if p.Unattended != nil {
		fact("unattended", optionText(p.Unattended))
	}
	if p.Env != nil {
		fact("env", envText(p.Env))
	}
	if p.Seed != nil {
		fact("seed", seedText(p.Seed))
	}
	for _, form := range p.Forms()[1:] {
		fact("auth."+form, credentialText(p.Credentials(form)))
	}
	if p.History != nil {
		fact("history", strings.Join(p.History, ", "))
	}
	if p.Egress != "" {
		fact("egress", "preset "+p.Egress)
	}
	if p.BaseURL != nil {
		fact("baseUrl", strings.Trim(p.BaseURL.Env+"; "+p.BaseURL.How, "; "))
	}
	for _, note := range p.Notes {
		fmt.Fprintf(w, "note: %s\n", visible(note))
	}
	return nil
}

// from says where a fact is from and what it was tried with.
func (p providerInfo) from(name string) string {
	f := p.Facts[name]
	switch {
	case f.Checked != "":
		return fmt.Sprintf("verified with %s: %s", f.Checked, f.Source)
	case f.Source != "":
		return "unverified: " + f.Source
	}
	return "unverified"
}

// headless is the argv for one prompt.
func (p providerInfo) headless() string {
	c := harness.Command{
		Binary: p.Binary, Provided: &p.Provider, PromptMode: p.Headless.PromptMode, PromptFlag: p.Headless.PromptFlag,
		PromptPosition: p.Headless.PromptPosition,
	}
	text := strings.Join(c.Argv("PROMPT", "PROMPT-FILE"), " ")
	if p.Headless.PromptMode == "stdin" {
		text += " < PROMPT"
	}
	return text
}

func (p providerInfo) optionText() string {
	var words []string
	for _, name := range slices.Sorted(maps.Keys(p.Options)) {
		option := p.Options[name]
		word := name
		if option.Flag != "--"+name {
			word += " (" + option.Flag + ")"
		}
		words = append(words, word)
	}
	return strings.Join(words, ", ")
}

func optionText(options map[string]any) string {
	var words []string
	for _, name := range slices.Sorted(maps.Keys(options)) {
		words = append(words, fmt.Sprintf("%s: %v", name, options[name]))
	}
	return strings.Join(words, ", ")
}

func envText(env map[string]string) string {
	var words []string
	for _, name := range slices.Sorted(maps.Keys(env)) {
		words = append(words, name+"="+env[name])
	}
	return strings.Join(words, " ")
}

func seedText(list []harness.Seed) string {
	var words []string
	for _, s := range list {
		words = append(words, "~/"+s.Target)
	}
	return strings.Join(words, ", ")
}

func credentialText(c harness.Credentials) string {
	words := slices.Clone(c.Env)
	for _, f := range c.Files {
		word := f.Source
		if len(f.Members) > 0 {
			word += " (" + strings.Join(f.Members, ", ") + ")"
		}
		if f.WriteBack {
			word += ", written back"
		}
		words = append(words, word)
	}
	text := strings.Join(words, ", ")
	if len(c.Set) > 0 {
		text += "; sets " + envText(c.Set)
	}
	if len(c.Seed) > 0 {
		text += "; writes " + seedText(c.Seed)
	}
	return text
}
