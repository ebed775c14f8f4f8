package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/agentshim/agentshim/shim"
)

// copyRun is a script's command: "copyrun RUN DIR" makes the record and the copy of an
// ended run on the workspace DIR.
func copyRun(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: copyrun RUN DIR")
	}
	ts.Check(makeCopyRun(ts.Getenv("XDG_STATE_HOME"), args[0], ts.MkAbs(args[1])))
}

func makeCopyRun(state, id, dir string) error {
	run := filepath.Join(state, "agentshim", "runs", id)
	tree := filepath.Join(run, "copy", "tree")
	if err := errors.Join(os.MkdirAll(tree, 0o700), os.Chmod(filepath.Join(state, "agentshim"), 0o700)); err != nil {
		return err
	}
	src, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.Open(tree)
	if err != nil {
		return err
	}
	defer dst.Close()
	base, _, err := shim.CopyTree(context.Background(), src, dst, shim.CopyOptions{})
	if err != nil {
		return err
	}
	st, err := src.Stat()
	if err != nil {
		return err
	}
	sys := st.Sys().(*syscall.Stat_t)
	now := time.Now().UTC()
	rec := shim.Record{Version: shim.RecordVersion, ID: id, Start: now, End: now, Copy: &shim.CopyRecord{
		Source: dir, Dev: sys.Dev, Ino: sys.Ino, UID: uint32(os.Getuid()), ProtectedNames: []string{".git"}, Synced: true,
	}}
	b, err := json.Marshal(rec)
	return errors.Join(err, shim.WriteBase(filepath.Join(run, "copy", "base"), base), os.WriteFile(filepath.Join(run, "record.json"), b, 0o600))
}
