package shim

import (
	"embed"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// make build puts agentshim-init and agentshim-netns here.
//
//go:embed embedded
var embedded embed.FS

// unpackInit writes init into the run's folder with mode 0111: who can't read a
// program's file can't trace or inspect the process that runs it (execve(2),
// PR_SET_DUMPABLE). Its owner can't read it either, and so can't check a copy
// kept from an earlier run: every run has its own.
func unpackInit(dir string) (string, error) {
	p := filepath.Join(dir, "agentshim-init")
	return p, unpack("agentshim-init", p, 0o111)
}

func unpackHelper(path string) error { return unpack("agentshim-netns", path, 0o555) }

// unpack writes an embedded program to path. No process is forked meanwhile: it would have
// the file open for writing until its exec, which is ETXTBSY to who starts the program.
func unpack(name, path string, mode os.FileMode) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	src, err := embedded.Open("embedded/" + name)
	if err != nil {
		return notEmbedded(name)
	}
	defer src.Close()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o200)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	_, err = io.Copy(f, src)
	if err == nil {
		err = f.Chmod(mode)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func notEmbedded(name string) error {
	return &Error{
		Reason: ReasonInitMissing, Msg: "this agentshim was built without " + name,
		Hint: "build agentshim with make build",
	}
}
