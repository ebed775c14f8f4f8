package main

import (
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// lastSignal is the kernel's _NSIG.
const lastSignal = 64

// defaultSignals gives every signal its default action. For the first process of
// a pid namespace the kernel drops such a signal when it comes from inside,
// whoever sends it and in whatever way: pid_namespaces(7). A handler would be
// weaker: the Go runtime ends the process for a SIGSEGV that doesn't look like
// kill(2)'s, and fcntl(2)'s F_SETSIG sends one. A fault of init's own still ends it.
//
// SIGURG stays with the runtime, which preempts goroutines with it and takes any
// number of them. The harness inherits the default actions, also of signals that
// the engine ignored.
func defaultSignals() { setSignals(0) }

// ignoreSignals lets no signal end a watcher but those that can't be ignored: it is not
// the first process. Its children's ends must not be ignored: wait(2).
func ignoreSignals() { setSignals(1, unix.SIGCHLD) }

// setSignals gives every signal an action, SIG_DFL (0) or SIG_IGN (1), but for those
// that are left as they are.
func setSignals(action uint64, but ...unix.Signal) {
	act := [4]uint64{action} // struct sigaction: no flags, no restorer, empty mask
	but = append(but, unix.SIGKILL, unix.SIGSTOP, unix.SIGURG)
	for sig := uintptr(1); sig <= lastSignal; sig++ {
		if slices.Contains(but, unix.Signal(sig)) {
			continue
		}
		_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&act)), 0, 8, 0, 0)
		if errno != 0 {
			fatal("rt_sigaction", errno)
		}
	}
}

const (
	// processors bounds the threads that run Go code at one time.
	processors = 2
	// spareThreads are enough for every goroutine of init to be in a system call
	// while the processors run others; those of tunnels are there one at a time.
	spareThreads = 7
	// gcPercent keeps the heap near its live size, some hundred KiB.
	gcPercent = 20
)

// reserveThreads makes the threads that the Go runtime may want later. It keeps
// idle ones; but when it can't create one, because the agent fills the
// container's pids limit, it ends the process.
func reserveThreads() {
	debug.SetGCPercent(gcPercent)
	runtime.GOMAXPROCS(processors)
	var running, ended sync.WaitGroup
	gate := make(chan struct{})
	running.Add(spareThreads)
	for range spareThreads {
		ended.Go(func() {
			// A locked goroutine has a thread of its own until it unlocks.
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			running.Done()
			<-gate
		})
	}
	running.Wait()
	close(gate)
	ended.Wait()
}
