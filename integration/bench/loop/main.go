// Command loop makes system calls in a tight loop, as often as it is told to. Each line of its
// standard input is a call's name and a number; it answers with the nanoseconds of all of them.
package main

import (
	"fmt"
	"os"
	"syscall"
	"time"
)

// calls go past Go's scheduler, which would cost as much as the call.
var calls = map[string]func() syscall.Errno{
	"getppid": func() syscall.Errno {
		_, _, errno := syscall.RawSyscall(syscall.SYS_GETPPID, 0, 0, 0)
		return errno
	},
	"socket": func() syscall.Errno {
		fd, _, errno := syscall.RawSyscall(syscall.SYS_SOCKET, syscall.AF_INET, syscall.SOCK_STREAM, 0)
		if errno == 0 {
			_, _, errno = syscall.RawSyscall(syscall.SYS_CLOSE, fd, 0, 0)
		}
		return errno
	},
}

func main() {
	for {
		var name string
		var n int
		if _, err := fmt.Scanln(&name, &n); err != nil {
			return
		}
		call := calls[name]
		start := time.Now()
		for range n {
			if errno := call(); errno != 0 {
				fmt.Fprintln(os.Stderr, name, errno)
				os.Exit(1)
			}
		}
		fmt.Println(time.Since(start).Nanoseconds())
	}
}
