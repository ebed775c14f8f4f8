package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
)

// serve ADDRESS... listens, says so on standard error, and does with each connection what
// its first line asks for, until one asks to stop.
func serve(arg []string) (string, error) {
	stop := make(chan struct{})
	var once sync.Once
	for _, address := range arg {
		l, err := net.Listen("tcp", address)
		if err != nil {
			return "", err
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					if serveOne(c.(*net.TCPConn)) == "stop" {
						once.Do(func() { close(stop) })
					}
				}()
			}
		}()
	}
	fmt.Fprintln(os.Stderr, "serving")
	<-stop
	return "", nil
}

// serveOne serves a connection by its first line and gives it.
func serveOne(c *net.TCPConn) string {
	defer c.Close()
	in := bufio.NewReader(c)
	line, _ := in.ReadString('\n')
	line = strings.TrimSpace(line)
	switch order := strings.Fields(line); {
	case len(order) == 0:
	case order[0] == "echo":
		_, _ = io.Copy(c, in)
	case order[0] == "sum": // of all that comes, once it has ended
		h := sha256.New()
		_, _ = io.Copy(h, in)
		fmt.Fprint(c, hex.EncodeToString(h.Sum(nil)))
	case order[0] == "send": // N bytes of zeros, and the end
		_, _ = io.CopyN(c, zeros{}, int64(number(order[1])))
		_ = c.CloseWrite()
		_, _ = io.Copy(io.Discard, in)
	case order[0] == "print": // N lines on standard output
		_, _ = os.Stdout.Write(bytes.Repeat([]byte("x\n"), number(order[1])))
		fmt.Fprint(c, "printed")
	case order[0] == "reset":
		_ = c.SetLinger(0)
	case order[0] == "stall": // neither reads nor closes
		select {}
	case order[0] == "flood": // sends without end and reads nothing
		_, _ = io.Copy(c, zeros{})
		select {}
	}
	return line
}

// zeros never ends.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
