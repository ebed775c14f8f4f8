// The runtime reads no processor limits of a container: this program is gone at once.
//
//go:debug containermaxprocs=0
//go:debug updatemaxprocs=0

// Command agentshim-netns makes the one way out of a sandbox's network namespace: it
// opens the gateway's sockets there, puts the packet rules in and hands both to the
// shim. Agentshim runs it as its child, below `podman unshare` or in a container that
// shares the sandbox's network namespace. It waits for its order on the hand-over's
// socket, and ends with it.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/netpolicy"
)

// arg is the hand-over's version.
const arg = "netns/3"

// A network namespace is a thread's: main stays on the one it starts on.
func init() { runtime.LockOSThread() }

func main() {
	if len(os.Args) != 3 || os.Args[1] != arg {
		fail(errors.New("agentshim starts this: " + arg + " SOCKET"))
	}
	if err := run(os.Args[2]); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintf(os.Stderr, "agentshim-netns: %v\n", err)
	os.Exit(1)
}

// run hands over what was opened, or the error, which is returned too.
func run(socket string) error {
	if err := setEnvironment(filepath.Dir(socket)); err != nil {
		return err
	}
	conn, err := netpolicy.Dial(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	order, err := netpolicy.ReadOrder(conn)
	if err != nil {
		return err
	}
	sockets, report, failed := open(order)
	return errors.Join(failed, netpolicy.Send(conn, sockets, report, failed))
}

// setEnvironment is what iptables runs with. The lock of its legacy back end is a file of
// the run's own: the one that all programs share only root may open, any of them may hold,
// and nobody else programs this namespace.
func setEnvironment(folder string) error {
	os.Clearenv()
	return errors.Join(
		os.Setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
		os.Setenv("LC_ALL", "C"),
		os.Setenv("XTABLES_LOCKFILE", filepath.Join(folder, "xtables.lock")),
	)
}

func open(o netpolicy.Order) (netpolicy.Sockets, netpolicy.Report, error) {
	var err error
	if o.PID != 0 {
		err = enter(o.Netns, o.PID)
	}
	if err == nil {
		err = checkThread(o.Netns)
	}
	if err != nil {
		return nil, netpolicy.Report{}, err
	}
	return netpolicy.Apply(o.Setup)
}

// enter moves this thread into the network namespace of a process, which must be the
// one named and not the thread's own: the number of a process that ended is used again.
func enter(netns string, pid int) error {
	own, err := netpolicy.ThreadNetns()
	if err != nil {
		return err
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return err
	}
	defer ns.Close()
	found, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", ns.Fd()))
	switch {
	case err != nil:
		return err
	case found != netns:
		return fmt.Errorf("process %d is in %s, not in %s", pid, found, netns)
	case found == own:
		return fmt.Errorf("process %d is in this program's own %s", pid, own)
	}
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("setns %s: %w", netns, err)
	}
	return nil
}

func checkThread(netns string) error {
	got, err := netpolicy.ThreadNetns()
	if err != nil {
		return err
	}
	if got != netns {
		return fmt.Errorf("this is %s, not %s", got, netns)
	}
	return nil
}
