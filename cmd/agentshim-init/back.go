package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// sendBacks sends what stands at each path below home, once no process of the container
// is left that could change it.
func sendBacks(conn *wire.Conn, home string, paths []string) error {
	for _, path := range paths {
		content, err := readBack(home, path)
		back := wire.Back{Path: path, Size: int64(len(content))}
		if err != nil {
			text := err.Error()
			back.Problem = text[:min(len(text), maxDetail)]
		}
		if err := conn.SendJSON(wire.KindBack, back); err != nil {
			return err
		}
		for n := 0; len(content) > 0; content = content[n:] {
			n = min(len(content), wire.MaxData)
			if err := conn.Send(wire.KindBackData, 0, content[:n]); err != nil {
				return err
			}
		}
	}
	return nil
}

var (
	errGone      = errors.New("it is gone")
	errNoFile    = errors.New("it is no regular file")
	errBehind    = errors.New("it is a link, or lies behind one")
	errLargeBack = fmt.Errorf("it is larger than %d bytes", wire.MaxBack)
)

// readBack reads a regular file with the rights of the agent, whose uid init has. It follows
// no link, below home or, for a path elsewhere, at all, and waits for no FIFO and no device.
func readBack(home, path string) ([]byte, error) {
	if !strings.HasPrefix(path, home+"/") {
		home = ""
	}
	dir, err := unix.Open(home+"/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(dir)
	fd, err := unix.Openat2(dir, strings.TrimPrefix(path, home+"/"), &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return nil, errGone
	case errors.Is(err, unix.ELOOP):
		return nil, errBehind
	case errors.Is(err, unix.ENXIO): // a socket, or a FIFO's like
		return nil, errNoFile
	case err != nil:
		return nil, err
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	st, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		return nil, errNoFile
	case st.Size() > wire.MaxBack:
		return nil, errLargeBack
	}
	content, err := io.ReadAll(io.LimitReader(f, wire.MaxBack+1))
	if err == nil && len(content) > wire.MaxBack {
		return nil, errLargeBack
	}
	return content, err
}
