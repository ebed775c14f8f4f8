package shim

import (
	"errors"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// deliver puts one pack and one new reference into the host's repository, without
// running git there: its configuration could have been written by an agent. Nothing
// that is there is replaced. It follows git's own order: the reference's lock, a
// .keep file so that a concurrent repack leaves the pack alone, pack, index,
// reference. What is written belongs to the repository's owner.
//
// A second call with the same arguments succeeds. When it fails half way, an
// unreachable pack may stay behind; git gc takes it away.
func deliver(h gitHost, packed, ref, commit string) error {
	common, err := openKnown(h.Common, h.CommonID)
	if err != nil {
		return err
	}
	defer common.close()
	d := delivery{common: common, owner: h.CommonID}
	// Before the lock too: a refusal makes no folder.
	if there, err := d.checkRef(ref, commit); there || err != nil {
		return err
	}
	lock, err := d.lock(ref)
	if err != nil {
		return err
	}
	defer lock.drop()
	if there, err := d.checkRef(ref, commit); there || err != nil {
		return err
	}
	done, err := d.packs(packed)
	if err != nil {
		return err
	}
	defer done()
	return lock.commit(commit)
}

type delivery struct {
	common gitFolder
	owner  gitInode
}

// checkRef is true when ref holds commit already, and refuses what stands in its way.
func (d delivery) checkRef(ref, commit string) (bool, error) {
	id, err := readGitRef(d.common, ref)
	if err != nil {
		return false, err
	}
	if id == commit {
		return true, nil
	}
	b, err := d.common.readAny("packed-refs", maxPackedRefs)
	if err != nil {
		return false, err
	}
	taken := id != ""
	err = eachPackedRef(b, func(_, name string) { taken = taken || refConflict(name, ref) })
	if err == nil && taken {
		err = gitRefuse(gitRefTaken, ref, "there is such a reference")
	}
	return false, err
}

// refLock is REF.lock, which git takes too before it writes REF.
type refLock struct {
	d    delivery
	dir  gitFolder
	name string
	file *os.File
}

// lock makes the folders above ref, as git does, and the lock file.
func (d delivery) lock(ref string) (*refLock, error) {
	dir, err := d.common.folder("refs")
	if err != nil {
		return nil, err
	}
	parts := strings.Split(ref, "/")
	for _, part := range parts[1 : len(parts)-1] {
		next, err := d.mkdir(dir, part)
		dir.close()
		if errors.Is(err, unix.ENOTDIR) {
			return nil, &gitError{Reason: gitRefTaken, What: ref, Err: err}
		}
		if err != nil {
			return nil, err
		}
		dir = next
	}
	l := &refLock{d: d, dir: dir, name: parts[len(parts)-1]}
	var st unix.Stat_t
	if unix.Fstatat(dir.fd(), l.name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		dir.close()
		return nil, gitRefuse(gitRefTaken, ref, "something else stands in its place")
	}
	l.file, err = d.create(dir, l.name+".lock", d.refMode())
	if errors.Is(err, unix.EEXIST) {
		err = &gitError{Reason: gitRefTaken, What: ref + ".lock", Msg: "something writes it just now, or broke off when it did", Err: err}
	}
	if err != nil {
		dir.close()
		return nil, err
	}
	return l, nil
}

// refMode is that of HEAD, which follows core.sharedRepository.
func (d delivery) refMode() uint32 {
	var st unix.Stat_t
	if unix.Fstatat(d.common.fd(), "HEAD", &st, unix.AT_SYMLINK_NOFOLLOW) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return 0o644
	}
	return st.Mode & 0o666
}

// commit writes the reference, unless one has come meanwhile.
func (l *refLock) commit(id string) error {
	if _, err := io.WriteString(l.file, id+"\n"); err != nil {
		return err
	}
	if err := l.file.Sync(); err != nil {
		return err
	}
	if err := renameNew(l.dir, l.name+".lock", l.name); err != nil {
		if errors.Is(err, unix.EEXIST) {
			return &gitError{Reason: gitRefTaken, What: l.name, Err: err}
		}
		return err
	}
	return l.dir.f.Sync()
}

// drop takes the lock away, if it has not become the reference.
func (l *refLock) drop() {
	_ = unix.Unlinkat(l.dir.fd(), l.name+".lock", 0) // ENOENT after commit
	l.file.Close()
	l.dir.close()
}

// packs brings the pack in and returns what lets git repack it again.
func (d delivery) packs(packed string) (done func(), err error) {
	dir, err := d.common.folder("objects/pack")
	if isAbsent(err) {
		dir, err = d.makePackFolder()
	}
	if err != nil {
		return nil, err
	}
	name := path.Base(packed)
	keep, err := d.create(dir, name+".keep", 0o444)
	switch {
	case err == nil:
		keep.Close()
		done = func() { _ = unix.Unlinkat(dir.fd(), name+".keep", 0); dir.close() }
	case errors.Is(err, unix.EEXIST):
		done = dir.close // the user's own, or that of a hand-over which broke off
	default:
		dir.close()
		return nil, err
	}
	for _, suffix := range []string{".pack", ".idx"} {
		if err := d.bring(dir, packed+suffix); err != nil {
			done()
			return nil, err
		}
	}
	if err := dir.f.Sync(); err != nil {
		done()
		return nil, err
	}
	return done, nil
}

func (d delivery) makePackFolder() (gitFolder, error) {
	objects, err := d.common.folder("objects")
	if err != nil {
		return gitFolder{}, err
	}
	defer objects.close()
	return d.mkdir(objects, "pack")
}

// bring copies one file under git's name for files that are not finished, which git
// gc takes away, and gives it its own name when it is whole.
func (d delivery) bring(dir gitFolder, from string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	name, temp := path.Base(from), "tmp_pack_"+newRunID()
	dst, err := d.create(dir, temp, 0o444)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	err = errors.Join(err, dst.Sync(), dst.Close())
	if err == nil {
		err = renameNew(dir, temp, name)
	}
	if err == nil {
		return nil
	}
	_ = unix.Unlinkat(dir.fd(), temp, 0)
	if errors.Is(err, unix.EEXIST) {
		return sameSize(dir, name, src)
	}
	return err
}

// sameSize accepts the file of a hand-over that broke off: a pack's name is the hash
// of its content.
func sameSize(dir gitFolder, name string, src *os.File) error {
	f, st, err := dir.file(name)
	if err != nil {
		return err
	}
	f.Close()
	want, err := src.Stat()
	if err == nil && want.Size() != st.Size {
		err = gitRefuse(gitSwapped, name, "another pack has this name")
	}
	return err
}

// create makes a file that is not there yet, with exactly this mode.
func (d delivery) create(dir gitFolder, name string, mode uint32) (*os.File, error) {
	fd, err := unix.Openat(dir.fd(), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &os.PathError{Op: "create", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	if err := errors.Join(d.own(fd), unix.Fchmod(fd, mode)); err != nil {
		f.Close()
		_ = unix.Unlinkat(dir.fd(), name, 0)
		return nil, &os.PathError{Op: "create", Path: name, Err: err}
	}
	return f, nil
}

// mkdir opens a folder and makes it first where it is missing, with its parent's
// mode.
func (d delivery) mkdir(dir gitFolder, name string) (gitFolder, error) {
	err := unix.Mkdirat(dir.fd(), name, 0o700)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return gitFolder{}, &os.PathError{Op: "mkdir", Path: name, Err: err}
	}
	f, openErr := dir.folder(name)
	if err != nil || openErr != nil {
		return f, openErr
	}
	var st unix.Stat_t
	err = errors.Join(d.own(f.fd()), unix.Fstat(dir.fd(), &st))
	if err == nil {
		err = unix.Fchmod(f.fd(), st.Mode&0o7777)
	}
	if err != nil {
		f.close()
	}
	return f, err
}

// own gives a file to the repository's owner; only root can, and only root needs to.
func (d delivery) own(fd int) error {
	if os.Geteuid() != 0 {
		return nil
	}
	return unix.Fchown(fd, d.owner.UID, d.owner.GID)
}

// renameNew renames within dir and never replaces. File systems without
// RENAME_NOREPLACE (NFS) answer EINVAL; link(2) does not replace either.
func renameNew(dir gitFolder, from, to string) error {
	err := unix.Renameat2(dir.fd(), from, dir.fd(), to, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) {
		err = unix.Linkat(dir.fd(), from, dir.fd(), to, 0)
		if err == nil {
			err = unix.Unlinkat(dir.fd(), from, 0)
		}
	}
	if err != nil {
		return &os.PathError{Op: "rename", Path: to, Err: err}
	}
	return nil
}
