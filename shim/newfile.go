package shim

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// NewFile is one that is written at a run's end. Its folder is opened before the
// run, so that nothing that an agent makes meanwhile leads it elsewhere.
type NewFile struct {
	path   string
	folder *os.Root
}

// OpenNewFile takes a path where nothing is and where the caller can write. Nothing is left there
// if Write is never called.
func OpenNewFile(path string) (*NewFile, error) {
	return openNewFile(path, func(fs.FileInfo) error { return fs.ErrExist })
}

// OpenResultFile is OpenNewFile for a file that may be there: it stays as it is until Write
// replaces it, or the link at its place. Errors have the reason state.
func OpenResultFile(path string) (*NewFile, error) {
	o, err := openNewFile(path, func(there fs.FileInfo) error {
		if there.IsDir() {
			return syscall.EISDIR
		}
		return nil
	})
	if err != nil {
		return nil, &Error{Reason: ReasonState, Err: err, Hint: "name a file in a folder where you can write"}
	}
	return o, nil
}

// openNewFile has judge look at what is there.
func openNewFile(path string, judge func(there fs.FileInfo) error) (*NewFile, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	switch there, err := os.Lstat(path); {
	case err == nil:
		if err := judge(there); err != nil {
			return nil, fmt.Errorf("%q: %w", path, err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	o := &NewFile{path: path}
	if o.folder, err = os.OpenRoot(filepath.Dir(path)); err != nil {
		return nil, err
	}
	temporary, err := o.temporary(nil)
	if err == nil {
		err = o.folder.Remove(temporary)
	}
	if err != nil {
		o.folder.Close()
		return nil, fmt.Errorf("%q: %w", path, err)
	}
	return o, nil
}

// temporary writes a file of its own into the folder, 0600.
func (o *NewFile) temporary(b []byte) (string, error) {
	name := ".agentshim-" + rand.Text()
	f, err := o.folder.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return "", err
	}
	_, err = f.Write(b)
	return name, errors.Join(err, f.Close())
}

// Write puts the file in place in one step. A file or link that has come there is replaced. A
// folder that is no longer at its path is an error.
func (o *NewFile) Write(b []byte) error {
	err := o.inPlace()
	var temporary string
	if err == nil {
		temporary, err = o.temporary(b)
	}
	if err == nil {
		err = o.folder.Rename(temporary, filepath.Base(o.path))
	}
	if err != nil {
		if temporary != "" {
			_ = o.folder.Remove(temporary)
		}
		return fmt.Errorf("%q: %w", o.path, err)
	}
	return nil
}

// inPlace compares the folder with what is at its path now.
func (o *NewFile) inPlace() error {
	opened, err := o.folder.Stat(".")
	if err != nil {
		return err
	}
	now, err := os.Stat(filepath.Dir(o.path))
	if err == nil && !os.SameFile(opened, now) {
		err = errors.New("its folder was replaced since the start")
	}
	return err
}

// Close forgets the folder.
func (o *NewFile) Close() { o.folder.Close() }
