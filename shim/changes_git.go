package shim

import "strings"

const whyObeyed = "git obeys it: its folder is a repository"

// foldedGitNames gives gitNames' and gitObeyed's names by what foldName makes of them.
var foldedGitNames = foldNames("HEAD", "objects", "refs", "commondir")

// foldedObeyed are the paths below a repository's folder, folded, that make git take it for
// one or run something.
var foldedObeyed = foldPaths(append([]string{"HEAD", gitHooks}, gitObeyed...))

func foldNames(names ...string) map[string]string {
	out := map[string]string{}
	for _, name := range names {
		out[foldName(name)] = name
	}
	return out
}

func foldPaths(paths []string) []string {
	out := make([]string, len(paths))
	for i, p := range paths {
		out[i] = foldPath(p)
	}
	return out
}

// findRepositories gives the folders, folded, that git would take for a repository whatever
// their names, of what was copied and what is there now together.
func findRepositories(base Base, nodes []treeNode) map[string]bool {
	found := map[string]*gitNames{}
	add := func(p string) {
		dir := parentOf(p)
		name := strings.TrimPrefix(p[len(dir):], "/")
		known, ok := foldedGitNames[foldName(name)]
		if !ok {
			return
		}
		dir = foldPath(dir)
		if found[dir] == nil {
			found[dir] = &gitNames{}
		}
		found[dir].add(known)
	}
	for i := range base.Entries {
		add(base.Entries[i].Path)
	}
	for i := range nodes {
		add(nodes[i].Path)
	}
	out := map[string]bool{}
	for dir, names := range found {
		if names.repository() {
			out[dir] = true
		}
	}
	return out
}

// obeyed says whether git obeys p in one of the repositories.
func obeyed(p string, repositories map[string]bool) bool {
	if len(repositories) == 0 {
		return false
	}
	p = foldPath(p)
	for dir := parentOf(p); ; dir = parentOf(dir) {
		if repositories[dir] && inAnyPath(strings.TrimPrefix(p[len(dir):], "/"), foldedObeyed) {
			return true
		}
		if dir == "" {
			return false
		}
	}
}
