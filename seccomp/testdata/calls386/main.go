// calls386 makes calls by the i386 ABI and prints one errno a line. It is
// built for GOARCH=386 by the package's test and by nothing else.
package main

import (
	"fmt"
	"syscall"
	"unsafe"
)

const (
	socketcall = 102
	socket     = 359
	keyctl     = 288
	prlimit64  = 340
)

func main() {
	vsock := [3]uintptr{40, 1, 0}
	unix := [3]uintptr{1, 1, 0}
	for _, call := range [][4]uintptr{
		{socketcall, 1, uintptr(unsafe.Pointer(&vsock))},
		{socketcall, 1, uintptr(unsafe.Pointer(&unix))},
		{socket, 40, 1, 0},
		{socket, 16, 3, 15},
		{socket, 1, 1, 0},
		{socket, 16, 3, 0},
		{keyctl, 99, 0, 0},
		{prlimit64, 1, 99, 0},
		{prlimit64, 0, 99, 0},
	} {
		_, _, errno := syscall.Syscall(call[0], call[1], call[2], call[3])
		fmt.Println(int(errno))
	}
}
