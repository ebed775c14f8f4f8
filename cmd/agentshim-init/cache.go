package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// cacheArg is the first argument of the other use of this program: in a container of
// its own it gives a volume to an agent. The volume's path, uid and gid follow.
const cacheArg = "cache/1"

// setUpCache gives the folder dir to uid:gid, mode 0700, and says how the process ends.
// It needs CHOWN and no other capability. One that has that owner already is left as it
// is: its mode is the owner's. Another process may do the same at the same time.
func setUpCache(dir, uid, gid string) int {
	owner, err1 := strconv.ParseUint(uid, 10, 32)
	group, err2 := strconv.ParseUint(gid, 10, 32)
	err := errors.Join(err1, err2)
	if err == nil {
		err = giveFolder(dir, uint32(owner), uint32(group))
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "agentshim-init: %q for %s:%s: %v\n", dir, uid, gid, err)
		return exitRefused
	}
	return 0
}

func giveFolder(dir string, uid, gid uint32) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return err
	}
	switch me := uint32(os.Geteuid()); {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return unix.ENOTDIR
	case st.Uid == uid && uid != me:
		return nil
	}
	// Only the owner may change the mode. EPERM: the folder was given away meanwhile.
	if err := unix.Chmod(dir, 0o700); err != nil && !errors.Is(err, unix.EPERM) {
		return err
	}
	return unix.Lchown(dir, int(uid), int(gid))
}
