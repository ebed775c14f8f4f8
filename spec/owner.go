package spec

import (
	"fmt"
	"strings"
)

// HostOwner is who the agent is on the host, for what a run makes there for it.
type HostOwner struct {
	UID uint32 `json:"uid"`
	GID uint32 `json:"gid"`
	// Chown says that the caller, who is root, must give it away; else it is the
	// caller's own.
	Chown bool `json:"chown,omitempty"`
}

// hostOwner says why the caller can make nothing that the agent owns, if that is so.
func (c *compiler) hostOwner() (owner HostOwner, why string) {
	id, caller := c.plan.Identity, c.host.Caller
	mapped := c.rootless() && (id.Userns == "keep-id" || strings.HasPrefix(id.Userns, "keep-id:") || id.Userns == "" && id.UID == 0)
	switch {
	case mapped:
		return HostOwner{UID: caller.UID, GID: caller.GID}, ""
	case c.rootless() || id.Userns != "":
		return HostOwner{}, "it would be a subordinate uid on the host"
	case caller.UID == 0:
		return HostOwner{UID: id.UID, GID: id.GID, Chown: true}, ""
	case id.UID != caller.UID:
		return HostOwner{}, fmt.Sprintf("only root may give files to uid %d", id.UID)
	}
	return HostOwner{UID: caller.UID, GID: caller.GID}, ""
}
