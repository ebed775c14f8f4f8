package harness

import (
	"slices"
)

// attachable are the fields that hold in a container that agentshim did not start.
var attachable = []string{
	"$schema", "version", "name", "engine", "image", "user", "harness", "prompt", "promptFile", "workingDir",
	"env", "envFrom", "envFiles", "timeout", "stopGrace", "terminal", "accept",
}

// Attachable refuses everything in a harness file's text that can't hold in a container that
// agentshim did not start, whatever its value is. h is what Parse made of the text. The
// error is like Parse's.
func Attachable(text []byte, h Harness) error {
	p := &problems{offsets: map[string]int64{}}
	tree, ok := parseTree(text, p)
	if !ok {
		return p.err()
	}
	fields, _ := tree.(map[string]any)
	for name := range fields {
		if !slices.Contains(attachable, name) {
			p.add(member("$", name), nil, "can't be had in a container that agentshim did not start", "remove it, or run without --container")
		}
	}
	if slices.ContainsFunc(h.Home.Files, func(f HomeFile) bool { return f.Auth != "" }) {
		p.add("$.harness.auth", h.Harness.Auth, "needs files in a home that agentshim made", "write api-key or none, or run without --container")
	}
	return p.err()
}
