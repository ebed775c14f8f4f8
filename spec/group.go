package spec

import (
	"errors"
	"fmt"
	"slices"
)

// groups are the supplementary groups of the agent, who is id.
func (c *compiler) groups(id Identity) ([]uint32, error) {
	if len(c.h.Groups) == 0 {
		return nil, nil
	}
	if c.rootless() || id.Userns != "" {
		return nil, refuse("identity", "leave groups out, and give your own user access to the files or devices",
			"groups: a user namespace has no group of the host's but your own, and keeping all of yours would open them all")
	}
	var groups []uint32
	var errs []error
	for i, n := range c.h.Groups {
		g := uint32(n)
		owns := c.host.GroupOwns[g]
		if g == 0 {
			owns = "what is root's"
		}
		if owns != "" {
			errs = append(errs, refuse("identity", "leave it out of groups", "$.groups[%d]: %d: this group opens %s", i, g, owns))
			continue
		}
		if g != id.GID {
			groups = append(groups, g)
		}
	}
	slices.Sort(groups)
	return groups, errors.Join(errs...)
}

func (c *compiler) groupNotes() {
	for _, g := range c.plan.Identity.Groups {
		c.widen(fmt.Sprintf("group:%d", g), true, "the agent may use what the host's group %d may", g)
	}
}
