// Command threads locks an operating system's thread for each of its goroutines.
package main

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
)

func main() {
	var wg sync.WaitGroup
	var n atomic.Int64
	for range 8 {
		wg.Go(func() {
			runtime.LockOSThread()
			n.Add(1)
		})
	}
	wg.Wait()
	fmt.Println("goroutines", n.Load())
}
