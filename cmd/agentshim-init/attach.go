package main

import (
	"fmt"
	"io"
	"os"
	"time"

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

// holdArg has init's program wait to be executed by others.
const holdArg = "hold/1"

// hold lets who has the same uid execute this program by /proc/PID/exe, from a container that
// this one shares the pid namespace with: the kernel shows that link of a dumpable process
// only (ptrace(2), PTRACE_MODE_READ), and its file makes it none. It has no secret. It says
// its number there, and ends with its standard input.
func hold() int {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0); err != nil {
		fatal("prctl PR_SET_DUMPABLE", err)
	}
	fmt.Println(os.Getpid())
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// byItself is how long a watcher has to end its step.
const byItself = 2 * time.Second

// abandon ends a container's one step when nobody is at the other end, and this process
// once no process of the step is left. What it still has to say nobody hears. The watcher
// ends the step by itself, when the orders end: were it killed, and this process stopped by the
// agent right then, nobody would. It is killed where it doesn't.
func (in *initProcess) abandon() {
	if in.attached {
		for _, s := range in.session.all() {
			if s.launched {
				s.watch.orders.Close()
				select {
				case <-s.watch.gone:
				case <-time.After(byItself):
				}
			}
			in.session.cut(s)
			if s.launched {
				<-s.watch.gone
				s.removeFiles()
			}
		}
	}
	os.Exit(exitRefused)
}
