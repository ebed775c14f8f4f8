package shim

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// folders are agentshim's own places on the host.
type folders struct {
	// state outlives runs: records and caches of facts.
	state string
	// runtime holds what exists while runs do: init's copy, generated files.
	runtime string
}

// record is where a run's record and all that outlives the run lie.
func (f folders) record(id string) string { return filepath.Join(f.state, "runs", id) }

// openFolders finds and creates both, 0700 and owned by the caller.
func openFolders(getenv func(string) string, home string) (folders, error) {
	state := getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(state) {
		if !filepath.IsAbs(home) {
			return folders{}, &Error{Reason: ReasonState, Msg: "neither XDG_STATE_HOME nor HOME names a folder", Hint: "set HOME"}
		}
		state = filepath.Join(home, ".local", "state")
	}
	f := folders{state: filepath.Join(state, "agentshim")}
	if err := privateFolder(f.state); err != nil {
		return folders{}, err
	}
	runtime, err := runtimeFolder(getenv)
	f.runtime = runtime
	return f, err
}

// runtimeFolder is $XDG_RUNTIME_DIR/agentshim, else a folder of the user in the
// system's temporary folder. Places mounted noexec are skipped: init is run from
// there.
func runtimeFolder(getenv func(string) string) (string, error) {
	var candidates []string
	if dir := getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) && ownedByCaller(dir) {
		candidates = append(candidates, filepath.Join(dir, "agentshim"))
	}
	name := fmt.Sprintf("agentshim-%d", os.Getuid())
	candidates = append(candidates, filepath.Join("/tmp", name), filepath.Join("/var/tmp", name))
	for _, dir := range candidates {
		if noexec(filepath.Dir(dir)) {
			continue
		}
		return dir, privateFolder(dir)
	}
	return "", &Error{
		Reason: ReasonState, Msg: fmt.Sprintf("every place for the runtime folder is mounted noexec (%q)", candidates),
		Hint: "set XDG_RUNTIME_DIR to a folder of yours on a file system that allows running programs",
	}
}

// failed is the error of what could not be made in the runtime folder.
func (f folders) failed(err error) error { return unwritten(err, f.runtime, "XDG_RUNTIME_DIR") }

// unwritten is the error of what could not be written in dir, which the variable can move.
func unwritten(err error, dir, variable string) error {
	var e *Error
	if err == nil || errors.As(err, &e) {
		return err
	}
	failed := &Error{Reason: ReasonState, Err: err}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		failed.Hint = fmt.Sprintf("free space for %q, or set %s to another folder of yours", dir, variable)
	}
	return failed
}

func ownedByCaller(dir string) bool {
	var st unix.Stat_t
	return unix.Lstat(dir, &st) == nil && int(st.Uid) == os.Getuid()
}

func noexec(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) != nil || st.Flags&unix.ST_NOEXEC != 0
}

// privateFolder makes dir, or checks that it is a folder of the caller's that
// nobody else can enter: a stranger may have made it first in a shared folder.
func privateFolder(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return &Error{Reason: ReasonState, Err: err, Hint: "make the folder writable, or set XDG_STATE_HOME and XDG_RUNTIME_DIR"}
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &Error{Reason: ReasonState, Msg: fmt.Sprintf("folder %q", dir), Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Getuid() || st.Mode&0o077 != 0 {
		return &Error{
			Reason: ReasonState, Msg: fmt.Sprintf("%q is not a private folder of uid %d (owner %d, mode %04o)", dir, os.Getuid(), st.Uid, st.Mode&0o7777),
			Hint: fmt.Sprintf("remove it or make it yours: chmod 700 %s", dir),
		}
	}
	return nil
}

// newRunID is 16 hexadecimal digits from the system's random source.
func newRunID() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand
	return hex.EncodeToString(b[:])
}
