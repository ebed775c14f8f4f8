package spec

// The ways into a sandbox's network namespace.
const (
	// WayDirect: agentshim runs as root and enters it.
	WayDirect = "direct"
	// WayUserns: through the user namespace of rootless Podman.
	WayUserns = "userns"
	// WayContainer: a second, short-lived container that shares the namespace.
	WayContainer = "container"
)

// way decides how the packet rules get into a sandbox of this host.
func way(h Host) string {
	switch {
	case h.Engine.Kind == Podman && h.Engine.Rootless:
		return WayUserns
	case h.Caller.UID == 0:
		return WayDirect
	}
	return WayContainer
}
