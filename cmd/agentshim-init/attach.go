package main

import (
	"fmt"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// attach is init's whole life in a container that is not agentshim's. It is not the first
// process: the kernel drops no signal for it, so it ignores those that can be, and it
// touches no process but its own descendants, which come to it as to any child subreaper.
// Its oom_score_adj stays, since to open that it would have to be dumpable for a moment.
func attach() {
	ignoreSignals()
	if err := becomeWatcher(); err != nil {
		fatal("attach", err)
	}
	reserveThreads()
	hello := inspect(false)
	// The other variables are the container's, and no secret of its owner's leaves it. With the
	// host's pid namespace, the processes are too many to tell of.
	hello.Environ, hello.Processes = []string{"HOME=" + os.Getenv("HOME")}, nil
	conn := wire.NewConn(os.NewFile(0, "wire-in"), os.NewFile(1, "wire-out"))
	in := &initProcess{conn: conn, tunnels: wire.NewTunnels(conn), attached: true, oomScore: -1, oomKills: openOOMCounter()}
	in.begin(hello)
}

// remove removes this program from its folder, and the folder.
func remove(folder string) int {
	if err := removeProgram(folder); err != nil {
		fmt.Fprintf(os.Stderr, "agentshim-init: %v\n", err)
		return 1
	}
	return 0
}

// removeProgram removes nothing that has another name, and follows no link.
func removeProgram(folder string) error {
	dir, err := unix.Open(folder, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: folder, Err: err}
	}
	defer unix.Close(dir)
	if err := unix.Unlinkat(dir, wire.ProgramName, 0); err != nil {
		return &os.PathError{Op: "unlink", Path: path.Join(folder, wire.ProgramName), Err: err}
	}
	if err := unix.Rmdir(folder); err != nil {
		return &os.PathError{Op: "rmdir", Path: folder, Err: err}
	}
	return nil
}

// abandon ends a container's one step when nobody is at the other end, and this process
// once no process of the step is left. What it still has to say nobody hears.
func (in *initProcess) abandon() {
	if in.attached {
		for _, s := range in.session.all() {
			in.session.cut(s)
			if s.launched {
				<-s.watch.gone
				s.removeFiles()
			}
		}
	}
	os.Exit(exitRefused)
}
