package shim

import (
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

// self identifies this process.
func self() (Owner, error) {
	boot, err := bootID()
	if err != nil {
		return Owner{}, &Error{Reason: ReasonInternal, Err: err}
	}
	ticks, err := startTicks(os.Getpid())
	if err != nil {
		return Owner{}, &Error{Reason: ReasonInternal, Err: err}
	}
	return Owner{PID: os.Getpid(), StartTicks: ticks, BootID: boot}, nil
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

// startTicks is field 22 of /proc/PID/stat; the second field, in parentheses, may
// hold anything (proc_pid_stat(5)). A process that has ended does not exist, whether its
// parent has taken notice or not.
func startTicks(pid int) (uint64, error) {
	path := fmt.Sprintf("/proc/%d/stat", pid)
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(f) < 20 {
		return 0, fmt.Errorf("%s: %d fields", path, len(f))
	}
	if f[0] == "Z" {
		return 0, fmt.Errorf("%s: %w", path, fs.ErrNotExist)
	}
	return strconv.ParseUint(f[19], 10, 64)
}
