package spec

import (
	"fmt"

	"github.com/agentshim/agentshim/mounts"
)

// Git is what becomes of the workspace's .git.
type Git struct {
	// Mode is mounts.GitPrivate, GitShared or GitNone.
	Mode string `json:"mode"`
	// Owner has the private repository on the host.
	Owner *HostOwner `json:"owner,omitempty"`
}

// GitRef is the reference that gets a run's commits.
func (r RunPaths) GitRef() string { return "refs/agentshim/" + r.ID }

func (g Git) text() string {
	switch g.Mode {
	case mounts.GitPrivate:
		return fmt.Sprintf("private: the agent has a repository of its own with the current branch; its commits come back as %s, verified, and change nothing else", SymbolicPaths.GitRef())
	case mounts.GitShared:
		return "shared: the agent has the host's repository"
	}
	return "none: the agent sees no repository"
}

func (Git) shared(writable bool) string {
	if writable {
		return "the agent has the host's repository: what it writes there can run on the host"
	}
	return "the agent can read the host's repository, all branches and the configuration with it"
}

// git decides who has the private repository, and shows what shared opens.
func (c *compiler) git(mode string) error {
	if mode == "" {
		return nil
	}
	c.plan.Git = &Git{Mode: mode}
	if mode != mounts.GitPrivate {
		return nil
	}
	owner, why := c.hostOwner()
	if why != "" {
		return refuse("git", `leave "user" and "userns" out, or write "git": "none" in the workspace`, "the agent can't have a repository of its own: %s", why)
	}
	c.plan.Git.Owner = &owner
	return nil
}
