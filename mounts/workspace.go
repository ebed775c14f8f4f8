package mounts

import "github.com/agentshim/agentshim/harness"

// Workspace gives the facts of h's workspace, false where there is none.
func Workspace(h harness.Harness, f Facts) (Source, bool) {
	if !h.HasWorkspace() {
		return Source{}, false
	}
	p, err := absolute(h.Workspace.Source, h.Dir, f.Home)
	if err != nil {
		return Source{}, false
	}
	s, ok := f.Sources[p]
	return s, ok
}
