package main

import (
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentshim/agentshim/shim"
)

func newCache() *cobra.Command {
	cmd := &cobra.Command{
		Use: "cache", Short: "List and remove caches",
		Long: "List and remove caches: the volumes of the harness files' caches, which outlast runs.\n" +
			"Only volumes that agentshim made are looked at, and none that a container has mounted\n" +
			"is removed.",
	}
	var engine string
	cmd.PersistentFlags().StringVar(&engine, "engine", "", "auto, docker or podman")
	cmd.AddCommand(newCacheList(&engine), newCacheRemove(&engine), newCachePrune(&engine))
	return cmd
}

func newCacheList(engine *string) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ls", Short: "List the engine's caches", Args: cobra.NoArgs,
		Long: "List the engine's caches, whoever's they are. USED is your own last use, or when it was\n" +
			"made. A size that you may not see is ?.",
		Example: "  agentshim cache ls\n  agentshim cache ls --engine podman --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			store, err := shim.OpenStore(nil)
			if err != nil {
				return err
			}
			list, err := store.Caches(cmd.Context(), *engine)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), map[string]any{"version": 1, "caches": append([]shim.CacheInfo{}, list...)})
			}
			return printCaches(cmd.OutOrStdout(), list)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON document")
	return cmd
}

func printCaches(w io.Writer, list []shim.CacheInfo) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "CACHE\tNAME\tUID:GID\tSIZE\tUSED\tSTATE\tPROJECT")
	for _, c := range list {
		used, state := c.Used, "free"
		if used.IsZero() {
			used = c.Made
		}
		if c.InUse {
			state = "in use"
		}
		when := "?"
		if !used.IsZero() {
			when = used.Local().Format(time.DateTime)
		}
		fmt.Fprintf(t, "%s\t%s\t%d:%d\t%s\t%s\t%s\t%s\n", c.ShortID(), cacheName(c), c.UID, c.GID, sizeText(c.Bytes), when, state, strconv.QuoteToASCII(c.Project))
	}
	return t.Flush()
}

func cacheName(c shim.CacheInfo) string {
	if c.Key == "" {
		return c.Name
	}
	return c.Name + "/" + c.Key
}

func sizeText(n int64) string {
	if n < 0 {
		return "?"
	}
	return shim.SizeText(n)
}

func newCacheRemove(engine *string) *cobra.Command {
	return &cobra.Command{
		Use: "rm CACHE…", Short: "Remove caches", Args: cobra.MinimumNArgs(1),
		Long:    "Remove caches by the digits that ls shows, or the first of them, or the volumes' names.",
		Example: "  agentshim cache rm e578682736e2",
		RunE: func(cmd *cobra.Command, names []string) error {
			store, err := shim.OpenStore(nil)
			if err != nil {
				return err
			}
			removed, err := store.RemoveCaches(cmd.Context(), *engine, names)
			for _, c := range removed {
				fmt.Fprintf(cmd.OutOrStdout(), "removed %s: %s, %s\n", c.ShortID(), cacheName(c), sizeText(c.Bytes))
			}
			return err
		},
	}
}

func newCachePrune(engine *string) *cobra.Command {
	var older string
	var dryRun bool
	cmd := &cobra.Command{
		Use: "prune", Short: "Remove your caches that nothing uses", Args: cobra.NoArgs,
		Long: "Remove your caches that no container has mounted. Yours are those that runs of yours used,\n" +
			"as far as the state folder tells, and those of agents with your uid.",
		Example: "  agentshim cache prune --older-than 30d --dry-run\n  agentshim cache prune",
		RunE: func(cmd *cobra.Command, _ []string) error {
			age, err := parseAge(older)
			if err != nil {
				return invalid("--older-than %q", "give a number of days or hours, e.g. 30d or 12h", older)
			}
			store, err := shim.OpenStore(nil)
			if err != nil {
				return err
			}
			list, err := store.PruneCaches(cmd.Context(), *engine, age, dryRun)
			for _, c := range list {
				fmt.Fprintln(cmd.OutOrStdout(), prunedText(c, dryRun))
			}
			return err
		},
	}
	cmd.Flags().StringVar(&older, "older-than", "0h", "only those not used for that long: 30d, 12h")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would be removed")
	return cmd
}

func prunedText(c shim.CacheInfo, dryRun bool) string {
	what := fmt.Sprintf("%s: %s, %s", c.ShortID(), cacheName(c), sizeText(c.Bytes))
	switch {
	case c.Kept != "":
		return "kept " + what + ": " + c.Kept
	case dryRun:
		return "would remove " + what
	}
	return "removed " + what
}
