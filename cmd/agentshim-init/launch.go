package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// homeFile is the file of the home that is being written.
type homeFile struct {
	f    *os.File
	left int64
}

// maxDetail bounds a refusal's text, in bytes.
const maxDetail = 1 << 10

func refuse(reason, format string, args ...any) *wire.Refused {
	detail := fmt.Sprintf(format, args...)
	return &wire.Refused{Reason: reason, Detail: detail[:min(len(detail), maxDetail)]}
}

// createHomeFile opens one new file below home, 0600, its parents 0700. No link
// leads it out of home. There is none to write where only what comes back is asked for.
func createHomeFile(home string, file wire.File) (*homeFile, *wire.Refused) {
	if file.BackOnly {
		return nil, nil
	}
	name, ok := strings.CutPrefix(file.Path, home+"/")
	if !ok || path.Clean(file.Path) != file.Path {
		return nil, refuse("home-file", "path %q is not below %s", file.Path, home)
	}
	if file.Size < 0 || file.Size > wire.MaxFile {
		return nil, refuse("home-file", "%q: size %d", file.Path, file.Size)
	}
	root, err := os.OpenRoot(home)
	if err != nil {
		return nil, refuse("home-file", "%v", err)
	}
	defer root.Close()
	if err := root.MkdirAll(path.Dir(name), 0o700); err != nil {
		return nil, refuse("home-file", "%q: %v", file.Path, err)
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, refuse("home-file", "%q: %v", file.Path, err)
	}
	if err := copyFirst(f, file.After); err != nil {
		return nil, refuse("home-file", "%q: %v", file.Path, err)
	}
	h := &homeFile{f: f, left: file.Size}
	if h.left == 0 {
		return h, h.close()
	}
	return h, nil
}

// copyFirst copies the first of the image's files that is one, and a line feed. Links in the
// image are its own: what they lead to is read with the agent's rights.
func copyFirst(to *os.File, paths []string) error {
	for _, name := range paths {
		f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
		if err != nil {
			continue
		}
		st, err := f.Stat()
		if err != nil || !st.Mode().IsRegular() || st.Size() > wire.MaxAfter {
			f.Close()
			continue
		}
		_, err = io.Copy(to, io.LimitReader(f, wire.MaxAfter))
		f.Close()
		if err == nil {
			_, err = to.WriteString("\n")
		}
		return err
	}
	return nil
}

// write takes the next part and closes the file after its last byte.
func (h *homeFile) write(p []byte) *wire.Refused {
	if int64(len(p)) > h.left {
		return refuse("home-file", "%q: more data than announced", h.f.Name())
	}
	if _, err := h.f.Write(p); err != nil {
		return refuse("home-file", "%v", err)
	}
	if h.left -= int64(len(p)); h.left > 0 {
		return nil
	}
	return h.close()
}

func (h *homeFile) close() *wire.Refused {
	if err := h.f.Close(); err != nil {
		return refuse("home-file", "%v", err)
	}
	return nil
}

// complete refuses a file that has not got all of its data. A nil file is complete.
func (h *homeFile) complete() *wire.Refused {
	if h == nil || h.left == 0 {
		return nil
	}
	return refuse("home-file", "%q: %d bytes missing", h.f.Name(), h.left)
}

// launch starts a harness in a session of its own, on fresh pipes or a terminal.
func (in *initProcess) launch(s *step, l wire.Launch) *wire.Refused {
	if r := s.file.complete(); r != nil {
		return r
	}
	if len(l.Args) == 0 {
		return refuse("harness-missing", "no program given")
	}
	if !in.attached {
		if err := os.MkdirAll(l.RuntimeDir, 0o700); err != nil {
			return refuse("runtime-dir", "%v", err)
		}
	}
	if err := checkDir(l.Dir); err != nil {
		return refuse("workdir", "%v", err)
	}
	program, r := lookPath(l)
	if r != nil {
		return r
	}
	p := &streams{}
	defer p.closeChildEnds()
	if err := p.open(l.Terminal); err != nil {
		p.close()
		return refuse("streams", "%v", err)
	}
	s.attach(p)
	if s.id != 0 {
		return in.launchStep(s, p, program, l)
	}
	var pid int
	err := raised(in.oomScore, func() (err error) {
		pid, err = spawn(program, l, p.child())
		return err
	})
	if err != nil {
		return execRefused(program, err)
	}
	s.pid.Store(int64(pid))
	s.launched = true
	if err := in.conn.Send(wire.KindStarted, 0, nil); err != nil {
		fatal("started", err)
	}
	in.run(p)
	return nil
}

// spawn starts the program with the descriptors as its three streams. With a terminal
// it becomes the program's controlling one.
func spawn(program string, l wire.Launch, fds []uintptr) (pid int, err error) {
	return syscall.ForkExec(program, l.Args, &syscall.ProcAttr{
		Dir: l.Dir, Env: l.Env, Files: fds,
		// Ctty is the child's descriptor 0.
		Sys: &syscall.SysProcAttr{Setsid: true, Setctty: l.Terminal != nil},
	})
}

func execRefused(program string, err error) *wire.Refused {
	if errors.Is(err, syscall.E2BIG) {
		return refuse("arguments", "%q: %v", program, err)
	}
	return refuse("harness-exec", "%q: %v", program, err)
}

func checkDir(dir string) error {
	st, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if !st.IsDir() {
		return &os.PathError{Op: "chdir", Path: dir, Err: syscall.ENOTDIR}
	}
	if err := unix.Access(dir, unix.X_OK); err != nil {
		return &os.PathError{Op: "chdir", Path: dir, Err: err}
	}
	return nil
}

// lookPath finds the program as execvp(3) does: a name without a slash is looked
// up in the PATH of the harness's own environment.
func lookPath(l wire.Launch) (string, *wire.Refused) {
	name := l.Args[0]
	if strings.Contains(name, "/") {
		p := name
		if !path.IsAbs(p) {
			p = path.Join(l.Dir, p)
		}
		if _, err := os.Stat(p); err != nil {
			return "", refuse("harness-missing", "%v", err)
		}
		return name, nil
	}
	search := ""
	for _, v := range l.Env {
		if p, ok := strings.CutPrefix(v, "PATH="); ok {
			search = p
		}
	}
	var denied error
	for _, dir := range strings.Split(search, ":") {
		if dir == "" {
			continue // an empty entry means the working folder, which the agent can write
		}
		p := path.Join(dir, name)
		err := executable(p)
		if err == nil {
			return p, nil
		}
		if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
			denied = err
		}
	}
	if denied != nil {
		return "", refuse("harness-exec", "%q in PATH %q: %v", name, search, denied)
	}
	return "", refuse("harness-missing", "%q is in no folder of PATH %q", name, search)
}

func executable(p string) error {
	st, err := os.Stat(p)
	switch {
	case err != nil:
		return err
	case st.IsDir():
		return &os.PathError{Op: "exec", Path: p, Err: syscall.EISDIR}
	}
	if err := unix.Access(p, unix.X_OK); err != nil {
		return &os.PathError{Op: "exec", Path: p, Err: err}
	}
	return nil
}

// streams are the harness's three: ends are init's, by stream. With a terminal the
// master is both stdin and stdout, and there is no stderr.
type streams struct {
	ends     [3]*os.File
	childs   [3]*os.File
	terminal *terminal
}

func (p *streams) open(size *wire.Size) (err error) {
	if size == nil {
		return p.openPipes()
	}
	if p.terminal, err = openTerminal(*size); err != nil {
		return err
	}
	p.ends = [3]*os.File{wire.Stdin: p.terminal.master, wire.Stdout: p.terminal.master}
	return nil
}

func (p *streams) openPipes() error {
	for s := range p.ends {
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		p.ends[s], p.childs[s] = r, w
		if uint8(s) == wire.Stdin {
			p.ends[s], p.childs[s] = w, r
		}
	}
	return nil
}

func (p *streams) child() []uintptr {
	if p.terminal != nil {
		fd := p.terminal.harness.Fd()
		return []uintptr{fd, fd, fd}
	}
	return []uintptr{p.childs[0].Fd(), p.childs[1].Fd(), p.childs[2].Fd()}
}

// outputs are the streams that the harness writes.
func (p *streams) outputs() map[uint8]*output {
	if p.terminal != nil {
		return map[uint8]*output{wire.Stdout: {f: p.ends[wire.Stdout], left: -1, terminal: true}}
	}
	return map[uint8]*output{
		wire.Stdout: {f: p.ends[wire.Stdout], left: -1},
		wire.Stderr: {f: p.ends[wire.Stderr], left: -1},
	}
}

// close closes init's ends, and a terminal whole.
func (p *streams) close() {
	if p.terminal != nil {
		p.terminal.close()
		return
	}
	for _, f := range p.ends {
		if f != nil {
			f.Close()
		}
	}
}

func (p *streams) closeChildEnds() {
	for _, f := range p.childs {
		if f != nil {
			f.Close()
		}
	}
}
