package seccomp

// nested is what sandboxes of an agent's own (bubblewrap, Codex's, Chromium's) need beside
// the default policy: user namespaces, and in them mounts. It replaces rows of
// the default table. What the kernel still keeps, whoever has capabilities in a user
// namespace of its own: mounts of the container's stay locked there (nothing that is
// masked or read-only opens), no fresh /proc while /proc is masked, devices and the
// container's network and processes are out of reach.
var nested = []difference{
	{
		names:   []string{"clone", "unshare"},
		clauses: []clause{allow()},
		reason:  "nested: makes the user, mount, pid and network namespaces of a sandbox",
		open:    dangerous,
	},
	{
		names:   []string{"setns"},
		clauses: []clause{allow()},
		reason:  "nested: goes back into a namespace of the agent's own; init's can't be opened",
		open:    dangerous,
	},
	{
		names:   []string{"mount", "umount", "umount2"},
		clauses: []clause{allow()},
		reason:  "nested: builds a sandbox's view in a mount namespace of its own",
		open:    dangerous,
	},
	{
		names:   []string{"chroot", "pivot_root"},
		clauses: []clause{allow()},
		reason:  "nested: leaves the old root behind (bubblewrap, Chromium)",
		open:    dangerous,
	},
	{
		names:   []string{"fsconfig", "fsmount", "fsopen", "fspick", "mount_setattr", "move_mount", "open_tree", "open_tree_attr"},
		clauses: []clause{refuse(eNOSYS)},
		reason:  "nested: callers fall back to mount, which is less kernel code",
		open:    dangerous,
	},
}

const nestedDetail = "the agent may make user namespaces and has capabilities over kernel code in them (clone, unshare, setns, mount, umount2, pivot_root, chroot)"
