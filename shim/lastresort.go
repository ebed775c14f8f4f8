package shim

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// killContainer ends the first process of a container, and with it all of them,
// without the engine: a daemon that was killed leaves its containers running, with
// their standard input held open by containerd's shim. The container is known by its
// cgroup. Where the caller may not signal its processes, or none has a cgroup of that
// name, nothing happens.
func killContainer(id string) {
	if !isContainerID(id) {
		return
	}
	dirs, _ := filepath.Glob("/proc/[0-9]*") // the pattern is valid
	for _, dir := range dirs {
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil && isFirstOf(pid, id) {
			killFirst(pid, id)
		}
	}
}

// killFirst holds the process before it looks again: the number may have a new owner.
func killFirst(pid int, id string) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if isFirstOf(pid, id) {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) // EPERM: not the caller's
	}
}

// isFirstOf says whether pid is the first process of a pid namespace below the
// caller's, in a cgroup named after the container. Both files are readable for
// everyone, also those of a process that is not dumpable (proc(5)).
func isFirstOf(pid int, id string) bool {
	cgroup, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil || !bytes.Contains(cgroup, []byte(id)) {
		return false
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "NSpid:"); ok {
			levels := strings.Fields(rest)
			return len(levels) > 1 && levels[len(levels)-1] == "1"
		}
	}
	return false
}
