package shim

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	// copyBuffer is each worker's.
	copyBuffer = 256 << 10
	// digestMax is the largest file that is copied through this process and so gets a
	// digest on its way. Larger ones are copied by the kernel, or not at all where
	// blocks can be shared.
	digestMax = 1 << 20
)

// copyModes remembers what the file system can't do, so that it is asked once.
type copyModes struct {
	noClone, noRange atomic.Bool
}

// copy writes the first st.Size bytes of in to the empty file out. Holes stay
// holes. digest is set for files up to digestMax.
func (m *copyModes) copy(in, out int, st *unix.Stat_t, buf []byte, digest *Digest) error {
	if st.Size <= digestMax {
		return copySmall(in, out, st, buf, digest)
	}
	if !m.noClone.Load() {
		// FICLONE shares the blocks, holes too: ioctl_ficlone(2).
		if unix.IoctlFileClone(out, in) == nil {
			return unix.Ftruncate(out, st.Size)
		}
		m.noClone.Store(true)
	}
	if err := unix.Ftruncate(out, st.Size); err != nil {
		return err
	}
	if !sparse(st) {
		return m.copyRange(in, out, 0, st.Size, buf)
	}
	return m.copySparse(in, out, st.Size, buf)
}

func sparse(st *unix.Stat_t) bool { return st.Blocks*512 < st.Size }

// copySmall reads and writes, and takes the digest of what it wrote.
func copySmall(in, out int, st *unix.Stat_t, buf []byte, digest *Digest) error {
	hash := sha256.New()
	holes := sparse(st)
	if holes {
		if err := unix.Ftruncate(out, st.Size); err != nil {
			return err
		}
	}
	for at := int64(0); at < st.Size; {
		n, err := preadSome(in, buf[:min(int64(len(buf)), st.Size-at)], at)
		if err != nil {
			return err
		}
		hash.Write(buf[:n])
		if err := writeAt(out, buf[:n], at, holes); err != nil {
			return err
		}
		at += int64(n)
	}
	*digest = Digest(hash.Sum(nil))
	return nil
}

// preadSome is pread(2) that does not end before the file should.
func preadSome(fd int, b []byte, at int64) (int, error) {
	for {
		n, err := unix.Pread(fd, b, at)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, err
		case n == 0:
			return 0, ErrTreeChanged
		default:
			return n, nil
		}
	}
}

// zeros is one block of a hole.
var zeros [4096]byte

// writeAt writes b, leaving out blocks of zeros where holes are wanted.
func writeAt(fd int, b []byte, at int64, holes bool) error {
	if !holes {
		return pwriteAll(fd, b, at)
	}
	for len(b) > 0 {
		n := min(len(b), len(zeros))
		if !bytes.Equal(b[:n], zeros[:n]) {
			if err := pwriteAll(fd, b[:n], at); err != nil {
				return err
			}
		}
		b, at = b[n:], at+int64(n)
	}
	return nil
}

func pwriteAll(fd int, b []byte, at int64) error {
	for len(b) > 0 {
		n, err := unix.Pwrite(fd, b, at)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return io.ErrShortWrite
		}
		b, at = b[max(n, 0):], at+int64(max(n, 0))
	}
	return nil
}

// copySparse copies the data between holes: lseek(2), SEEK_DATA.
func (m *copyModes) copySparse(in, out int, size int64, buf []byte) error {
	for at := int64(0); at < size; {
		start, err := unix.Seek(in, at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // a hole to the end
		}
		if errors.Is(err, unix.EINVAL) {
			return m.copyRange(in, out, at, size, buf)
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(in, start, unix.SEEK_HOLE)
		if errors.Is(err, unix.ENXIO) {
			return ErrTreeChanged // cut meanwhile
		}
		if err != nil {
			return err
		}
		if at = min(end, size); start < at {
			if err := m.copyRange(in, out, start, at, buf); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyRange copies bytes [at, end).
func (m *copyModes) copyRange(in, out int, at, end int64, buf []byte) error {
	for at < end && !m.noRange.Load() {
		from, to := at, at
		n, err := unix.CopyFileRange(in, &from, out, &to, int(min(end-at, 1<<30)), 0)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EXDEV), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPERM):
			m.noRange.Store(true)
		case err != nil:
			return err
		case n == 0:
			return ErrTreeChanged
		default:
			at += int64(n)
		}
	}
	for at < end {
		n, err := preadSome(in, buf[:min(int64(len(buf)), end-at)], at)
		if err != nil {
			return err
		}
		if err := pwriteAll(out, buf[:n], at); err != nil {
			return err
		}
		at += int64(n)
	}
	return nil
}
