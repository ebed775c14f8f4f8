package shim

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

func (p *podman) foreign(ctx context.Context, name string) (foreign, error) {
	out, err := runQuestion(ctx, p.runner, p.Command("inspect", "--type", "container", name))
	if gone(err) {
		return foreign{}, noContainer(p, name)
	}
	if err != nil {
		return foreign{}, engineFailed(err)
	}
	var found []foreign
	if err := json.Unmarshal(out.Stdout, &found); err != nil || len(found) != 1 {
		return foreign{}, &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("podman inspect: %d containers", len(found)), Err: err}
	}
	f := found[0]
	f.Image = "sha256:" + strings.TrimPrefix(f.Image, "sha256:")
	return f, nil
}

// enter hands init's program over as a descriptor: nothing of it is in the container's file
// system. Podman has to have the file open, and its owner may not read it.
func (p *podman) enter(ctx context.Context, e entry) (attached, func() error, error) {
	path := e.paths.Init
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, nil, &Error{Reason: ReasonState, Err: &os.PathError{Op: "open", Path: path, Err: err}}
	}
	program := os.NewFile(uintptr(fd), path)
	defer program.Close()
	args := []string{"exec", "--interactive", "--preserve-fds=1", "--detach-keys=", "--workdir=/"}
	for _, kv := range steadyEnv {
		args = append(args, "--env="+kv)
	}
	if e.user != "" {
		args = append(args, "--user="+e.user)
	}
	cmd := p.Command(append(args, e.container, "/proc/self/fd/3", wire.AttachArg)...)
	cmd.Files = []*os.File{program}
	a, err := p.attach(ctx, cmd)
	return a, func() error { return nil }, err
}
