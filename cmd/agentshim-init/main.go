// The runtime neither reads the container's processor limits nor keeps their files
// open: init sets its own.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0

// Command agentshim-init is PID 1 inside an agent's container. It shows the shim
// the container's posture, waits for its word, runs the harness and ends the
// container when the harness or the shim is gone.
//
// It is started from a file of mode 0111, so that it is non-dumpable from its
// first instruction: an agent of the same uid can't reach its memory or its
// descriptors. It has no recover: a panic ends the container.
package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// arg is the one argument the shim starts init with.
const arg = "wire/1"

const exitRefused = 125

func main() {
	if len(os.Args) == 3 && os.Args[1] == findArg && os.Getpid() != 1 {
		os.Exit(find(os.Args[2]))
	}
	if len(os.Args) == 3 && os.Args[1] == wire.DialArg && os.Getpid() != 1 {
		os.Exit(listens(os.Args[2]))
	}
	if len(os.Args) == 2 && os.Args[1] == watchArg && os.Getpid() != 1 {
		os.Exit(watchStep())
	}
	if len(os.Args) == 5 && os.Args[1] == cacheArg && os.Getpid() == 1 {
		os.Exit(setUpCache(os.Args[2], os.Args[3], os.Args[4]))
	}
	if len(os.Args) == 2 && os.Args[1] == wire.AttachArg && os.Getpid() != 1 {
		attach()
	}
	if len(os.Args) == 2 && os.Args[1] == holdArg && os.Getpid() != 1 {
		os.Exit(hold())
	}
	if os.Getpid() != 1 || len(os.Args) != 2 || os.Args[1] != arg {
		fmt.Fprintln(os.Stderr, "agentshim-init: this is the first process of an agentshim container; agentshim starts it, nothing else can")
		os.Exit(exitRefused)
	}
	defaultSignals()
	reserveThreads()
	hello := inspect(true)
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		fatal("prctl PR_SET_DUMPABLE", err)
	}
	conn := wire.NewConn(os.NewFile(0, "wire-in"), os.NewFile(1, "wire-out"))
	in := &initProcess{
		conn:     conn,
		tunnels:  wire.NewTunnels(conn),
		oomScore: openOwnOOMScore(),
		oomKills: openOOMCounter(),
	}
	in.begin(hello)
}

// begin says hello and serves what is asked.
func (in *initProcess) begin(hello wire.Hello) {
	closeOnExec()
	if err := in.conn.SendJSON(wire.KindHello, hello); err != nil {
		fatal("hello", err)
	}
	in.serve()
}

// fatal ends the container. The engine's client shows the text to the shim.
func fatal(what string, err error) {
	fmt.Fprintf(os.Stderr, "agentshim-init: %s: %v\n", what, err)
	os.Exit(exitRefused)
}

// closeOnExec marks every descriptor. The harness gets only what launch gives it.
func closeOnExec() {
	for fd := range openFDs() {
		unix.CloseOnExec(fd)
	}
}
