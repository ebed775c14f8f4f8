package shim

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// NodeType is what stands under a name.
type NodeType byte

// The types of nodes. Only files, folders and links are copied and applied.
const (
	TypeNone    NodeType = 0
	TypeFile    NodeType = 'f'
	TypeFolder  NodeType = 'd'
	TypeLink    NodeType = 'l'
	TypeSpecial NodeType = 's'
)

// String names the type for people.
func (t NodeType) String() string {
	switch t {
	case TypeNone:
		return "nothing"
	case TypeFile:
		return "file"
	case TypeFolder:
		return "folder"
	case TypeLink:
		return "link"
	}
	return "special file"
}

func typeOf(mode uint32) NodeType {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return TypeFile
	case unix.S_IFDIR:
		return TypeFolder
	case unix.S_IFLNK:
		return TypeLink
	}
	return TypeSpecial
}

// Digest is the SHA-256 of a file's bytes; zero is unknown.
type Digest [sha256.Size]byte

// FileTime is a time stamp as the kernel keeps it; hostile files have any.
type FileTime struct {
	Sec  int64
	Nsec uint32
}

func fileTime(t unix.Timespec) FileTime {
	sec, nsec := t.Unix()
	return FileTime{sec, uint32(nsec)}
}

func (t FileTime) timespec() unix.Timespec {
	return unix.Timespec{Sec: t.Sec, Nsec: int64(t.Nsec)}
}

// FileStamp tells whether a file was written, changed in its attributes or
// replaced: nobody without power over the machine's clock can set a change time.
type FileStamp struct {
	Ino   uint64
	MTime FileTime
	CTime FileTime
}

func stampOf(st *unix.Stat_t) FileStamp {
	return FileStamp{Ino: st.Ino, MTime: fileTime(st.Mtim), CTime: fileTime(st.Ctim)}
}

// BaseEntry is one file, folder or link as it was copied.
type BaseEntry struct {
	// Path is relative to the root, its bytes as the file system has them.
	Path string
	Type NodeType
	// Mode are the copy's permission bits, without setuid, setgid and sticky.
	Mode uint32
	// Size is a file's length or that of a link's text, 0 for folders.
	Size int64
	// Host and Copy are the original's and the copy's stamps when it was copied.
	Host, Copy FileStamp
	// Digest is of the copied bytes; only files up to 1 MiB have one.
	Digest Digest
	// Link is a link's text.
	Link string
}

func baseEntry(p string, st *unix.Stat_t) BaseEntry {
	e := BaseEntry{Path: p, Type: typeOf(st.Mode), Mode: st.Mode & 0o777, Host: stampOf(st)}
	if e.Type == TypeFile {
		e.Size = st.Size
	}
	return e
}

// Base is what a tree was when it was copied: what an agent changed, and what the
// host changed meanwhile, is told by it. Entries are sorted by the bytes of their
// paths; each stands behind the folder it is in. The root has none.
type Base struct {
	Entries []BaseEntry
}

// ErrBase says that bytes are no base, were cut or altered, or are of another version.
var ErrBase = errors.New("not a base of a workspace's copy")

const (
	baseMagic = "agentshim base 1\n"
	// baseMax bounds a base file: a million entries with paths of 400 bytes.
	baseMax        = 512 << 20
	baseMaxEntries = 4_000_000
	// baseFixed is the size of an entry without path, link and digest.
	baseFixed = 1 + 2 + 8 + 2*(8+12+12) + 1 + 2 + 2
)

// Encode gives the base's file form: a line with the version, the number of
// entries, the entries in big-endian fixed width, and the SHA-256 of all that.
func (b Base) Encode() []byte {
	out := make([]byte, 0, len(baseMagic)+8+len(b.Entries)*(baseFixed+sha256.Size+64))
	out = append(out, baseMagic...)
	out = binary.BigEndian.AppendUint64(out, uint64(len(b.Entries)))
	for i := range b.Entries {
		out = b.Entries[i].append(out)
	}
	sum := sha256.Sum256(out)
	return append(out, sum[:]...)
}

func (e *BaseEntry) append(out []byte) []byte {
	out = append(out, byte(e.Type))
	out = binary.BigEndian.AppendUint16(out, uint16(e.Mode))
	out = binary.BigEndian.AppendUint64(out, uint64(e.Size))
	for _, s := range []FileStamp{e.Host, e.Copy} {
		out = binary.BigEndian.AppendUint64(out, s.Ino)
		for _, t := range []FileTime{s.MTime, s.CTime} {
			out = binary.BigEndian.AppendUint64(out, uint64(t.Sec))
			out = binary.BigEndian.AppendUint32(out, t.Nsec)
		}
	}
	digest := e.Digest[:]
	if e.Digest == (Digest{}) {
		digest = nil
	}
	out = append(out, byte(len(digest)))
	out = binary.BigEndian.AppendUint16(out, uint16(len(e.Path)))
	out = binary.BigEndian.AppendUint16(out, uint16(len(e.Link)))
	out = append(out, digest...)
	out = append(out, e.Path...)
	return append(out, e.Link...)
}

// ParseBase reads what Encode wrote, and nothing else: any other bytes are ErrBase.
// Parsed bytes encode to themselves.
func ParseBase(data []byte) (Base, error) {
	body, ok := bytes.CutPrefix(data, []byte(baseMagic))
	if !ok || len(body) < 8+sha256.Size {
		return Base{}, fmt.Errorf("%w: it does not start as one of version 1", ErrBase)
	}
	end := len(data) - sha256.Size
	if sha256.Sum256(data[:end]) != [sha256.Size]byte(data[end:]) {
		return Base{}, fmt.Errorf("%w: its checksum is wrong", ErrBase)
	}
	r := &baseReader{rest: body[:len(body)-sha256.Size]}
	count := r.number(8)
	if count > baseMaxEntries || count > uint64(len(body)/baseFixed) {
		return Base{}, fmt.Errorf("%w: %d entries", ErrBase, count)
	}
	b := Base{Entries: make([]BaseEntry, 0, count)}
	folders := map[string]bool{"": true}
	last := ""
	for range count {
		e, err := r.entry()
		if err == nil {
			err = e.check(last, folders)
		}
		if err != nil {
			return Base{}, err
		}
		last = e.Path
		b.Entries = append(b.Entries, e)
	}
	if len(r.rest) != 0 {
		return Base{}, fmt.Errorf("%w: %d bytes behind its entries", ErrBase, len(r.rest))
	}
	return b, nil
}

// baseReader takes fields off the front; short says that one was cut.
type baseReader struct {
	rest  []byte
	short bool
}

func (r *baseReader) take(n int) []byte {
	if len(r.rest) < n {
		r.short = true
		return make([]byte, n)
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

func (r *baseReader) number(size int) uint64 {
	var n uint64
	for _, b := range r.take(size) {
		n = n<<8 | uint64(b)
	}
	return n
}

func (r *baseReader) stamp() FileStamp {
	s := FileStamp{Ino: r.number(8)}
	for _, t := range []*FileTime{&s.MTime, &s.CTime} {
		t.Sec, t.Nsec = int64(r.number(8)), uint32(r.number(4))
	}
	return s
}

func (r *baseReader) entry() (BaseEntry, error) {
	e := BaseEntry{Type: NodeType(r.number(1)), Mode: uint32(r.number(2)), Size: int64(r.number(8))}
	e.Host, e.Copy = r.stamp(), r.stamp()
	digest, name, link := r.number(1), int(r.number(2)), int(r.number(2))
	if digest != 0 && digest != sha256.Size {
		return e, fmt.Errorf("%w: a digest of %d bytes", ErrBase, digest)
	}
	if digest != 0 {
		e.Digest = Digest(r.take(sha256.Size))
		if e.Digest == (Digest{}) {
			return e, fmt.Errorf("%w: a digest of zeros", ErrBase)
		}
	}
	e.Path, e.Link = string(r.take(name)), string(r.take(link))
	if r.short {
		return e, fmt.Errorf("%w: it ends inside an entry", ErrBase)
	}
	return e, nil
}

// check refuses what CopyTree never writes.
func (e *BaseEntry) check(last string, folders map[string]bool) error {
	bad := func(why string) error { return fmt.Errorf("%w: entry %q: %s", ErrBase, e.Path, why) }
	nsec := max(e.Host.MTime.Nsec, e.Host.CTime.Nsec, e.Copy.MTime.Nsec, e.Copy.CTime.Nsec)
	switch {
	case !validPath(e.Path):
		return bad("not a path below the root")
	case e.Path <= last:
		return bad("not in order")
	case !folders[parentOf(e.Path)]:
		return bad("not in a folder")
	case e.Mode > 0o777 || nsec > 999_999_999 || e.Size < 0:
		return bad("a number out of range")
	case e.Type != TypeFile && e.Digest != (Digest{}):
		return bad("a digest of what is no file")
	}
	switch e.Type {
	case TypeFile:
		if e.Link != "" {
			return bad("a file with a link's text")
		}
	case TypeFolder:
		if e.Link != "" || e.Size != 0 {
			return bad("a folder with a size")
		}
		folders[e.Path] = true
	case TypeLink:
		if !validText(e.Link) || e.Size != int64(len(e.Link)) {
			return bad("not a link's text")
		}
	default:
		return bad("of no type that is copied")
	}
	return nil
}

// validPath says whether p names something below a root, in one way only.
func validPath(p string) bool {
	if p == "" || len(p) >= unix.PathMax || strings.IndexByte(p, 0) >= 0 {
		return false
	}
	for name := range strings.SplitSeq(p, "/") {
		if name == "" || name == "." || name == ".." || len(name) > 255 {
			return false
		}
	}
	return true
}

// validText says whether a link can have the text.
func validText(s string) bool {
	return s != "" && len(s) < unix.PathMax && strings.IndexByte(s, 0) < 0
}

// WriteBase writes b to the new file p, 0600 and whole: it stands there after a
// crash or not at all. p must be where no agent can write.
func WriteBase(p string, b Base) error {
	data := b.Encode()
	if len(data) > baseMax || len(b.Entries) > baseMaxEntries {
		return &Error{
			Reason: ReasonState, Msg: fmt.Sprintf("write %q: %d entries in %d bytes", p, len(b.Entries), len(data)),
			Hint: "take a smaller folder as the workspace", Err: ErrTreeEntries,
		}
	}
	f, err := os.CreateTemp(filepath.Dir(p), ".base-*")
	if err != nil {
		return fmt.Errorf("write base: %w", err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(data)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write base: %w", err)
	}
	if err := os.Rename(f.Name(), p); err != nil {
		return fmt.Errorf("write base: %w", err)
	}
	return nil
}

// ReadBase reads what WriteBase wrote.
func ReadBase(p string) (Base, error) {
	f, err := os.Open(p)
	if err != nil {
		return Base{}, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(bufio.NewReader(f), baseMax+1))
	if err != nil {
		return Base{}, fmt.Errorf("read base: %w", err)
	}
	if len(data) > baseMax {
		return Base{}, fmt.Errorf("%w: %q is larger than %d bytes", ErrBase, p, baseMax)
	}
	b, err := ParseBase(data)
	if err != nil {
		return Base{}, fmt.Errorf("%q: %w", p, err)
	}
	return b, nil
}
