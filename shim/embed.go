package shim

import (
	"embed"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// make build puts agentshim-init here.
//
//go:embed embedded
var embedded embed.FS

// unpackInit writes init into the run's folder with mode 0111: who can't read a
// program's file can't trace or inspect the process that runs it (execve(2),
// PR_SET_DUMPABLE). Its owner can't read it either, and so can't check a copy
// kept from an earlier run: every run has its own.
func unpackInit(dir string) (string, error) {
	src, err := embedded.Open("embedded/agentshim-init")
	if err != nil {
		return "", noInit()
	}
	defer src.Close()
	p := filepath.Join(dir, "agentshim-init")
	f, err := os.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o200)
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	_, err = io.Copy(f, src)
	if err == nil {
		err = f.Chmod(0o111)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	return p, nil
}

func noInit() error {
	return &Error{
		Reason: ReasonInitMissing, Msg: "this agentshim was built without agentshim-init",
		Hint: "build agentshim with make build",
	}
}
