package main

import (
	"os"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// loose renames in a folder from a mount namespace that has left the container's mounts
// behind: the folder, then both names in it.
func loose(arg []string) (string, error) {
	self := func(id int) []syscall.SysProcIDMap { return []syscall.SysProcIDMap{{HostID: id, Size: 1}} }
	c := exec.Command("/proc/self/exe", append([]string{"loose"}, arg...)...)
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS, UidMappings: self(os.Getuid()), GidMappings: self(os.Getgid()),
	}
	out, err := c.Output()
	if err != nil || len(out) == 0 {
		return "", err
	}
	return strings.TrimSpace(string(out)), nil
}

// looseChild prints at which step it failed, or nothing.
func looseChild(arg []string) {
	const root, old = "/tmp/loose", "/old"
	dir, err := unix.Open(arg[0], unix.O_PATH|unix.O_DIRECTORY, 0)
	for _, step := range []struct {
		name string
		f    func() error
	}{
		{"open", func() error { return err }},
		{"mkdir", func() error { return os.MkdirAll(root, 0o700) }},
		{"mount", func() error { return unix.Mount("loose", root, "tmpfs", 0, "") }},
		{"mkdir", func() error { return os.Mkdir(root+old, 0o700) }},
		{"pivot_root", func() error { return unix.PivotRoot(root, root+old) }},
		{"chdir", func() error { return os.Chdir("/") }},
		{"umount", func() error { return unix.Unmount(old, unix.MNT_DETACH) }},
		{"rename", func() error { return unix.Renameat(dir, arg[1], dir, arg[2]) }},
	} {
		if err := step.f(); err != nil {
			os.Stdout.WriteString(step.name + ": " + err.Error())
			return
		}
	}
}
