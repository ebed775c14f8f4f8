package mounts

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/agentshim/agentshim/harness"
)

// AgentHome is the agent's home in the container.
const AgentHome = "/home/agent"

// defaultWorkspace is the workspace's target where the file gives none.
const defaultWorkspace = "/workspace"

// CopyTree is where a run keeps its private copy of the workspace: Mount.Own of a
// workspace whose mode is copy.
const CopyTree = "copy/tree"

var (
	errTilde    = errors.New(`only "~/" is expanded`)
	errEmpty    = errors.New("it is empty")
	errRelative = errors.New("it is relative and there is no workspace")
	errEscape   = errors.New("it leaves the folder it is relative to")
)

// bind is one bind, or cache, the harness file asks for.
type bind struct {
	// json is the entry's JSON path.
	json string
	// source and rawTarget are as written; key is the source made absolute and
	// target the target resolved and clean.
	source, key       string
	rawTarget, target string
	// sourceErr and targetErr say why key or target could not be made.
	sourceErr, targetErr error
	// writable is not set for a copy, through which the agent changes no source.
	writable, noExec, copy bool
	label, why             string
}

// binds lists what the file asks for, in the file's order, workspace first.
func binds(h harness.Harness, home string) []bind {
	var all []bind
	root := ""
	if w := h.Workspace; w != nil && w.Mode != "none" {
		b := bind{
			json: "$.workspace", source: w.Source, rawTarget: w.Target,
			writable: w.Mode == "writable", copy: w.Mode == "copy", why: WhyWorkspace,
		}
		if b.rawTarget == "" {
			b.rawTarget = defaultWorkspace
		}
		b.key, b.sourceErr = absolute(w.Source, h.Dir, home)
		b.target, b.targetErr = resolveTarget(b.rawTarget, "")
		root = b.target
		all = append(all, b)
	}
	for i, m := range h.Mounts {
		b := bind{
			json: fmt.Sprintf("$.mounts[%d]", i), source: m.Source, rawTarget: m.Target,
			writable: m.Writable, noExec: m.NoExec, label: m.Label, why: WhyMount,
		}
		if b.label == "none" {
			b.label = ""
		}
		b.key, b.sourceErr = absolute(m.Source, h.Dir, home)
		b.target, b.targetErr = resolveTarget(m.Target, root)
		all = append(all, b)
	}
	return all
}

// targets lists everything that the file mounts: binds, then caches, which have no
// source on the host.
func targets(h harness.Harness, home string) []bind {
	return append(binds(h, home), cacheBinds(h)...)
}

// absolute makes a source as written absolute. It does not clean it: "link/.."
// is for the kernel to resolve.
func absolute(source, dir, home string) (string, error) {
	switch {
	case source == "":
		return "", errEmpty
	case strings.HasPrefix(source, "/"):
		return source, nil
	case strings.HasPrefix(source, "~/"):
		if !strings.HasPrefix(home, "/") {
			return "", fmt.Errorf("the caller's home %q is not absolute", home)
		}
		return home + source[1:], nil
	case strings.HasPrefix(source, "~"):
		return "", errTilde
	case !strings.HasPrefix(dir, "/"):
		return "", fmt.Errorf("the harness file's folder %q is not absolute", dir)
	}
	return strings.TrimSuffix(dir, "/") + "/" + source, nil
}

// resolveTarget makes a target absolute and clean: "~/" is the agent's home,
// a relative one lies under workspace, the workspace's target.
func resolveTarget(target, workspace string) (string, error) {
	switch {
	case target == "":
		return "", errEmpty
	case strings.HasPrefix(target, "/"):
		return path.Clean(target), nil
	case strings.HasPrefix(target, "~/"):
		return inside(AgentHome, target[2:])
	case strings.HasPrefix(target, "~"):
		return "", errTilde
	case workspace == "":
		return "", errRelative
	}
	return inside(workspace, target)
}

func inside(dir, rel string) (string, error) {
	p := path.Join(dir, rel)
	if p != dir && !below(p, dir) {
		return "", errEscape
	}
	return p, nil
}

// below says that the clean absolute path p lies strictly below dir.
func below(p, dir string) bool {
	if dir == "/" {
		return p != "/" && strings.HasPrefix(p, "/")
	}
	return len(p) > len(dir) && p[len(dir)] == '/' && strings.HasPrefix(p, dir)
}

func atOrBelow(p, dir string) bool { return p == dir || below(p, dir) }

// enclosing is the bind whose target lies nearest above b's, or nil.
func enclosing(b bind, all []bind) *bind {
	var nearest *bind
	for i := range all {
		c := &all[i]
		if c.targetErr != nil || !below(b.target, c.target) {
			continue
		}
		if nearest == nil || len(c.target) > len(nearest.target) {
			nearest = c
		}
	}
	return nearest
}

// nestedPath is the host path in parent's source (resolved) that b is mounted on.
func nestedPath(parentSource string, parent *bind, b bind) string {
	return path.Join(parentSource, strings.TrimPrefix(b.target, parent.target))
}
