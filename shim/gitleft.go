package shim

import (
	"context"
	"errors"
	"maps"
	"path"
	"slices"
	"strings"
)

// Bounds of what is looked at beside HEAD.
const (
	maxOthers     = 1000
	maxOtherDepth = 16
)

const (
	gitHeads = "refs/heads"
	gitStash = "refs/stash"
)

// readOthers gives the branches and the stash of an agent's repository, at most
// maxOthers, by reference; the entry "" stands for more. What git would not take for
// a branch is none.
func readOthers(agent gitFolder) (map[string]string, error) {
	o := gitOthers{agent: agent, tips: map[string]string{}}
	b, err := agent.readAny("packed-refs", maxPackedRefs)
	if err != nil {
		return nil, err
	}
	err = eachPackedRef(b, func(id, name string) {
		if name == gitStash || strings.HasPrefix(name, gitHeads+"/") {
			o.add(name, id)
		}
	})
	if err != nil {
		return nil, err
	}
	o.loose(gitStash)
	o.folder(gitHeads, 0)
	return o.tips, nil
}

type gitOthers struct {
	agent gitFolder
	tips  map[string]string
	// looked counts the entries of folders.
	looked int
}

func (o *gitOthers) add(ref, id string) {
	switch {
	case !validRef(ref):
	case o.tips[ref] == "" && len(o.tips) >= maxOthers:
		o.tips[""] = id
	default:
		o.tips[ref] = id
	}
}

// loose takes a reference's file, which goes before a packed one.
func (o *gitOthers) loose(ref string) {
	b, err := o.agent.read(ref, maxGitFile)
	if err != nil {
		return
	}
	if id, ok := parseID(b); ok {
		o.add(ref, id)
	}
}

func (o *gitOthers) folder(dir string, depth int) {
	f, err := o.agent.folder(dir)
	if err != nil {
		return
	}
	defer f.close()
	names, err := f.names(maxOthers)
	if err != nil || depth > maxOtherDepth || o.looked > maxOthers*maxOtherDepth {
		o.tips[""] = strings.Repeat("0", 40)
		return
	}
	for _, name := range names {
		o.looked++
		o.loose(path.Join(dir, name))
		o.folder(path.Join(dir, name), depth+1)
	}
}

// left gives the references whose object is not in a git dir of agentshim's own, which
// has what the host's repository has of the run.
func (g gitProgram) left(ctx context.Context, gitDir string, others map[string]string) ([]string, error) {
	var ids strings.Builder
	refs := slices.Sorted(maps.Keys(others))
	for _, ref := range refs {
		ids.WriteString(others[ref] + "\n")
	}
	if len(refs) == 0 {
		return nil, nil
	}
	out, err := g.run(ctx, gitDir, ids.String(), "cat-file", "--batch-check=%(objectname)")
	if err != nil {
		return nil, err
	}
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if len(lines) != len(refs) {
		return nil, errors.New("git cat-file: not one line for each object")
	}
	var left []string
	for i, ref := range refs {
		if strings.HasSuffix(lines[i], " missing") {
			left = append(left, ref)
		}
	}
	return left, nil
}
