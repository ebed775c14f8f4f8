package spec

import (
	"fmt"
	"strings"

	"github.com/agentshim/agentshim/mounts"
)

// gitName is never copied and never applied: a repository is no part of a copy.
const gitName = ".git"

// Copy is the private copy of the workspace that a run makes.
type Copy struct {
	// Source is the host's folder, Target where the agent finds its copy.
	Source string `json:"source"`
	Target string `json:"target"`
	// UID and GID own the copy on the host. Chown says that the caller must give it to
	// them; else it is the caller's own.
	UID   uint32 `json:"uid"`
	GID   uint32 `json:"gid"`
	Chown bool   `json:"chown,omitempty"`
	// Exclude are paths below Source that are not copied, with all below them.
	Exclude []string `json:"exclude"`
	// ProtectedNames and ProtectedPaths are what no change is applied to, at any place
	// and below Source, with all below them.
	ProtectedNames []string `json:"protectedNames"`
	ProtectedPaths []string `json:"protectedPaths"`
	// Dev and Ino identify the host's folder.
	Dev uint64 `json:"-"`
	Ino uint64 `json:"-"`
}

// copy decides the workspace's copy, where the file asks for one.
func (c *compiler) copy() error {
	if !c.h.HasWorkspace() || c.h.Workspace.Mode != "copy" {
		return nil
	}
	src, ok := mounts.Workspace(c.h, c.host.Mounts)
	if !ok {
		return nil // mounts refused it
	}
	guards, err := mounts.GuardPaths(*c.h.Workspace, src.Path, c.host.Mounts.Own)
	if err != nil {
		return nil // mounts refused them
	}
	p := &Copy{
		Source: src.Path, Target: c.h.ContainerPath(c.h.Workspace.Target), Dev: src.Dev, Ino: src.Ino,
		Exclude: []string{gitName}, ProtectedNames: []string{gitName},
	}
	for _, g := range guards {
		p.ProtectedPaths = append(p.ProtectedPaths, g.Rel)
		if g.Hide { // what the copy holds could be read by another way than its name
			p.Exclude = append(p.Exclude, g.Rel)
		}
	}
	c.plan.Copy = p
	return c.copyOwner(p)
}

// copyOwner decides who owns the copy on the host: who the agent is there.
func (c *compiler) copyOwner(p *Copy) error {
	owner, why := c.hostOwner()
	if why != "" {
		return refuse("identity", `leave "user" and "userns" out, or use workspace.mode "read-only"`, "the workspace's copy can't be given to the agent: %s", why)
	}
	p.UID, p.GID, p.Chown = owner.UID, owner.GID, owner.Chown
	return nil
}

// text is the plan's line for people.
func (p *Copy) text() string {
	return fmt.Sprintf("%s is a private copy of %q, owned by %d:%d, without %s; changes stay in it until agentshim apply, which never changes %s or %d protected paths",
		p.Target, p.Source, p.UID, p.GID, quotedList(p.Exclude), quotedList(p.ProtectedNames), len(p.ProtectedPaths))
}

func quotedList(words []string) string {
	out := make([]string, len(words))
	for i, w := range words {
		out[i] = fmt.Sprintf("%q", w)
	}
	return strings.Join(out, ", ")
}
