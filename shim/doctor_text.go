package shim

import (
	"fmt"
	"slices"
	"strings"
)

// Text is the report for a person: a group for each scope, a line for each check, and
// its remedy: below it, or behind it where the check was skipped.
func (d Diagnosis) Text() string {
	var b strings.Builder
	width := 0
	for _, c := range d.Checks {
		width = max(width, len(c.Name))
	}
	for _, scope := range d.scopes() {
		fmt.Fprintf(&b, "%s\n", scope)
		for _, c := range d.Checks {
			if c.Scope != scope {
				continue
			}
			fmt.Fprintf(&b, "  %s  %-*s  %s", c.Status, width, c.Name, printable(c.Finding))
			if c.Remedy != "" {
				sep := fmt.Sprintf("\n  %4s  %*s  ", "", width, "")
				if c.Status == Skipped {
					sep = " "
				}
				fmt.Fprintf(&b, "%s-> %s", sep, printable(c.Remedy))
			}
			b.WriteByte('\n')
		}
	}
	fmt.Fprintf(&b, "%d passed, %d warned, %d failed, %d skipped\n", d.Count(Passed), d.Count(Warned), d.Count(Failed), d.Count(Skipped))
	return b.String()
}

// scopes are the groups in a fixed order.
func (d Diagnosis) scopes() []string {
	var out []string
	for _, scope := range []string{"machine", "spec", "docker", "podman"} {
		if slices.ContainsFunc(d.Checks, func(c Check) bool { return c.Scope == scope }) {
			out = append(out, scope)
		}
	}
	return out
}
