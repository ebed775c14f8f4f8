package mounts

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// wellKnown are places of engine, agent and desktop sockets relative to the
// folder that usually holds them. They are looked up by name as well as in
// /proc/net/unix, because a rootless daemon listens in its own network namespace.
var wellKnown = []string{
	"docker.sock", "podman.sock", "containerd.sock", "buildkitd.sock", "crio.sock", "cri-dockerd.sock",
	"podman/podman.sock", "containerd/containerd.sock", "buildkit/buildkitd.sock", "docker/docker.sock",
	".docker/run/docker.sock", ".docker/desktop/docker.sock", ".colima/default/docker.sock", ".rd/docker.sock",
	"bus", "system_bus_socket", "dbus/system_bus_socket", "at-spi/bus",
	"agent.sock", "ssh-agent", "ssh-agent.sock", "ssh-agent.socket", "openssh_agent", "keyring/ssh", "keyring/control",
	"S.gpg-agent", "S.gpg-agent.ssh", "S.gpg-agent.extra", "S.gpg-agent.browser",
	"gnupg/S.gpg-agent", "gnupg/S.gpg-agent.ssh", ".gnupg/S.gpg-agent", ".gnupg/S.gpg-agent.ssh",
	"wayland-0", "wayland-1", "X0", "X1", ".X11-unix/X0", ".X11-unix/X1", "pulse/native", "pipewire-0",
}

// isWellKnown says that a file of this name is taken for such a socket.
func isWellKnown(name string) bool {
	if strings.HasPrefix(name, "S.gpg-agent") || strings.HasPrefix(name, "wayland-") {
		return true
	}
	return strings.HasSuffix(name, ".sock") && slices.Contains(wellKnown, name) || name == "system_bus_socket"
}

// host is what the kernel says about mounts and sockets.
type host struct {
	mounts []*mountinfo.Info
	// absolute are real paths of sockets; relative the names as bound.
	absolute, relative []string
	// cwds are the processes' working folders; read only where relative names exist.
	cwds []string
}

func readHost(p ProbePaths) (*host, error) {
	h := &host{}
	b, err := os.ReadFile(filepath.Join(p.Proc, "self/mountinfo"))
	if err != nil {
		return nil, fmt.Errorf("read mount table: %w", err)
	}
	if h.mounts, err = mountinfo.GetMountsFromReader(bytes.NewReader(b), nil); err != nil {
		return nil, fmt.Errorf("parse mount table: %w", err)
	}
	b, err = os.ReadFile(filepath.Join(p.Proc, "net/unix"))
	if err != nil {
		return nil, fmt.Errorf("read socket table: %w", err)
	}
	names := slices.Concat(reachable(string(b)), p.KnownSockets)
	slices.Sort(names)
	h.sortOut(slices.Compact(names))
	if len(h.relative) > 0 {
		h.cwds = workingFolders(p.Proc)
	}
	return h, nil
}

// unixLine is one line of /proc/net/unix (net/unix/af_unix.c, unix_seq_show).
var unixLine = regexp.MustCompile(`^[0-9a-f]+: [0-9A-F]{8} [0-9A-F]{8} ([0-9A-F]{8}) ([0-9A-F]{4}) [0-9A-F]{2} +[0-9]+(?: (.*))?$`)

const (
	acceptsConnections = 0x10000 // __SO_ACCEPTCON: listen(2) was called
	typeDatagram       = 2
)

// reachable lists the names of sockets that others can connect or send to:
// listening ones and bound datagram ones. The kernel writes names unescaped, so a
// line that is none continues the name before it.
func reachable(table string) []string {
	var names []string
	open := false
	for i, line := range strings.Split(strings.TrimSuffix(table, "\n"), "\n") {
		m := unixLine.FindStringSubmatch(line)
		switch {
		case m == nil && i > 0 && open:
			names[len(names)-1] += "\n" + line
			continue
		case m == nil:
			continue
		}
		flags, _ := strconv.ParseUint(m[1], 16, 32)
		kind, _ := strconv.ParseUint(m[2], 16, 16)
		open = m[3] != "" && (flags&acceptsConnections != 0 || kind == typeDatagram)
		if open {
			names = append(names, m[3])
		}
	}
	return names
}

// sortOut splits names into relative ones and the real paths of absolute ones
// that still exist.
func (h *host) sortOut(names []string) {
	dirs := map[string]string{}
	for _, name := range names {
		if !strings.HasPrefix(name, "/") {
			h.relative = append(h.relative, name)
			continue
		}
		i := strings.LastIndexByte(name, '/')
		dir, seen := dirs[name[:i+1]]
		if !seen {
			dir = realFolder(name[:i+1])
			dirs[name[:i+1]] = dir
		}
		if dir == "" {
			continue
		}
		p := filepath.Join(dir, name[i+1:])
		// Only a name from the environment can end in a link: bind(2) makes none.
		if real, err := filepath.EvalSymlinks(p); err == nil {
			p = real
		}
		if maybeSocket(p) {
			h.absolute = append(h.absolute, p)
		}
	}
}

// realFolder resolves dir's links; "" when it doesn't exist, cleaned when it
// can't be looked at.
func realFolder(dir string) string {
	real, err := filepath.EvalSymlinks(dir)
	switch {
	case err == nil:
		return real
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return ""
	}
	return filepath.Clean(dir)
}

// maybeSocket is false only where surely no socket stands.
func maybeSocket(p string) bool {
	fi, err := os.Lstat(p)
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR)
	}
	return fi.Mode()&fs.ModeSocket != 0
}

func isSocket(p string) bool {
	fi, err := os.Lstat(p)
	return err == nil && fi.Mode()&fs.ModeSocket != 0
}

// workingFolders lists the working folders of the processes that can be looked at.
func workingFolders(proc string) []string {
	links, _ := filepath.Glob(filepath.Join(proc, "[0-9]*/cwd"))
	var out []string
	for _, l := range links {
		if dir, err := os.Readlink(l); err == nil {
			out = append(out, dir)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// submounts lists the mount points below dir, also ones another mount hides.
func (h *host) submounts(dir string) []string {
	var out []string
	for _, m := range h.mounts {
		if below(m.Mountpoint, dir) {
			out = append(out, m.Mountpoint)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// socketsBelow lists the sockets at or below dir, by path, through another mount
// of the same tree, or by a well-known name; sorted.
func (h *host) socketsBelow(dir string) []string {
	var out []string
	for _, s := range h.absolute {
		if atOrBelow(s, dir) || h.sameTree(s, dir) {
			out = append(out, s)
		}
	}
	for _, from := range append([]string{dir}, h.cwds...) {
		for _, name := range h.relative {
			if p := filepath.Join(from, name); below(p, dir) && isSocket(p) {
				out = append(out, p)
			}
		}
	}
	for _, name := range wellKnown {
		if p := filepath.Join(dir, name); isSocket(p) {
			out = append(out, p)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// sameTree says that p lies at or below dir on the file system they share,
// wherever either is mounted.
func (h *host) sameTree(p, dir string) bool {
	pDev, pPath := h.locate(p)
	dDev, dPath := h.locate(dir)
	return pDev != "" && pDev == dDev && atOrBelow(pPath, dPath)
}

// locate gives p's device and its path within that file system.
func (h *host) locate(p string) (device, within string) {
	var on *mountinfo.Info
	for _, m := range h.mounts {
		if atOrBelow(p, m.Mountpoint) && (on == nil || len(m.Mountpoint) >= len(on.Mountpoint)) {
			on = m
		}
	}
	if on == nil {
		return "", ""
	}
	return fmt.Sprintf("%d:%d", on.Major, on.Minor), filepath.Join(on.Root, strings.TrimPrefix(p, on.Mountpoint))
}
