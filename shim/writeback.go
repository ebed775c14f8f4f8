package shim

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// WriteBack is what became of one file of the home with writeBack.
type WriteBack struct {
	// Target is relative to the home, Source the host's file as the harness file names it.
	Target string `json:"target"`
	Source string `json:"source"`
	// Outcome is replaced, unchanged or kept; Detail says why it was kept.
	Outcome string `json:"outcome"`
	Detail  string `json:"detail,omitempty"`
}

// Values of WriteBack.Outcome.
const (
	BackReplaced  = "replaced"
	BackUnchanged = "unchanged"
	BackKept      = "kept"
)

// hostFile is the host's file that was delivered.
type hostFile struct {
	// source is as written, path real: no link is on it.
	source, path string
	dev          uint64
	node         treeNode
	// whole is all of it, where only some of its members were delivered.
	whole []byte
}

// readBackFile reads a file that may be replaced in the end. What could not be done then
// for a reason that is known now is refused now.
func (p *prepared) readBackFile(source string) (homeFile, error) {
	real, err := p.realPath(source)
	if err != nil {
		return homeFile{}, err
	}
	f, err := openRegular(unix.AT_FDCWD, real)
	if err != nil {
		return homeFile{}, err
	}
	defer f.Close()
	host, err := hostFileOf(f, source, real)
	if err != nil {
		return homeFile{}, err
	}
	content, err := readAll(f, wire.MaxBack)
	if err == nil {
		err = host.stillIs(f)
	}
	return homeFile{content: content, host: host}, err
}

func hostFileOf(f *os.File, source, real string) (*hostFile, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	if uid := os.Geteuid(); uid != 0 && int(st.Uid) != uid {
		return nil, fmt.Errorf("it belongs to uid %d, and what replaces it would be yours", st.Uid)
	}
	if err := unix.Access(filepath.Dir(real), unix.W_OK|unix.X_OK); err != nil {
		return nil, &os.PathError{Op: "write in", Path: filepath.Dir(real), Err: err}
	}
	return &hostFile{source: source, path: real, dev: st.Dev, node: nodeOf(filepath.Base(real), &st)}, nil
}

// stillIs is ErrApplyRace where f is another file than the one delivered, or changed since.
func (h *hostFile) stillIs(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Dev != h.dev || !sameThing(&st, &h.node, true) {
		return ErrApplyRace
	}
	return nil
}

// replace puts content in the place of the file, if that is still the very one that was
// delivered, with old in it: in one step, with its mode and owner, in the folder itself,
// through no link. Its access list and other names are not kept.
func (h *hostFile) replace(old, content []byte) error {
	dir, err := unix.Openat2(unix.AT_FDCWD, filepath.Dir(h.path), &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return raced(err)
	}
	defer unix.Close(dir)
	if err := h.holds(dir, old); err != nil {
		return err
	}
	temp := ".agentshim-" + newRunID()
	if err := h.stage(dir, temp, content); err != nil {
		return err
	}
	return unix.Fsync(dir)
}

// holds looks at the file once more.
func (h *hostFile) holds(dir int, old []byte) error {
	f, err := openRegular(dir, h.node.Path)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrApplyRace, err) // it could be opened before
	}
	defer f.Close()
	if err := h.stillIs(f); err != nil {
		return err
	}
	now, err := readAll(f, wire.MaxBack)
	if err == nil && !bytes.Equal(now, old) {
		err = ErrApplyRace
	}
	return err
}

// stage writes the new file under a temporary name, which is gone afterwards.
func (h *hostFile) stage(dir int, temp string, content []byte) error {
	fd, err := unix.Openat(dir, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return &os.PathError{Op: "create", Path: temp, Err: err}
	}
	f := os.NewFile(uintptr(fd), temp)
	defer f.Close()
	var made unix.Stat_t
	err = unix.Fstat(fd, &made)
	if err == nil && (made.Uid != h.node.UID || made.Gid != h.node.GID) {
		err = giveOwner(fd, &FileOwner{h.node.UID, h.node.GID})
	}
	if err == nil {
		_, err = f.Write(content)
	}
	if err == nil {
		err = errors.Join(unix.Fchmod(fd, h.node.Mode&0o777), f.Sync())
	}
	if err == nil {
		err = replaceNode(dir, temp, h.node.Path, TypeFile, &h.node)
	}
	if err == nil {
		return nil
	}
	// After a failed exchange back the name may hold the host's own file, which stays.
	var st unix.Stat_t
	if unix.Fstatat(dir, temp, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Ino == made.Ino && made.Ino != 0 {
		_ = unix.Unlinkat(dir, temp, 0)
	}
	return err
}

// backs takes what init sends of the home's files at the end: each that was asked for,
// once, in order.
type backs struct {
	want []string
	got  []back
	done bool
}

// back is one file as the agent left it. All of it is the agent's word.
type back struct {
	wire.Back
	content []byte
}

func (b *backs) begin(f wire.Frame) error {
	var next back
	if err := f.JSON(&next.Back); err != nil {
		return err
	}
	switch n := len(b.got); {
	case !b.filled(), n == len(b.want), next.Path != b.want[n]:
		return fmt.Errorf("%w: a file that was not asked for", wire.ErrProtocol)
	case next.Size < 0 || next.Size > wire.MaxBack || next.Problem != "" && next.Size != 0:
		return fmt.Errorf("%w: a file of %d bytes", wire.ErrProtocol, next.Size)
	}
	b.got = append(b.got, next)
	return nil
}

func (b *backs) add(p []byte) error {
	if b.filled() {
		return fmt.Errorf("%w: more of a file than announced", wire.ErrProtocol)
	}
	last := &b.got[len(b.got)-1]
	if int64(len(last.content)+len(p)) > last.Size {
		return fmt.Errorf("%w: more of a file than announced", wire.ErrProtocol)
	}
	last.content = append(last.content, p...)
	return nil
}

// filled says that the last file begun has all of its bytes.
func (b *backs) filled() bool {
	n := len(b.got)
	return n == 0 || int64(len(b.got[n-1].content)) == b.got[n-1].Size
}

// finish is false where init did not send all.
func (b *backs) finish() bool {
	b.done = len(b.got) == len(b.want) && b.filled()
	return b.done
}

// complete says that init sent all, and then how the harness ended.
func (b *backs) complete() bool { return b.done }

// writeBack replaces the host's files with what the agent left, where it changed them and
// the host did not, and appends what it left as output.
func (p *prepared) writeBack(got []back) (out []WriteBack, output *StepOutput) {
	for _, f := range p.files {
		if !f.comesBack() {
			continue
		}
		b := got[0]
		got = got[1:]
		if f.output != nil {
			output = f.output.append(f.target, b)
			continue
		}
		w := writeBackOne(f, b)
		switch w.Outcome {
		case BackReplaced:
			p.job.Notice("write-back: %q now holds what the agent left in ~/%s", w.Source, printable(w.Target))
		case BackKept:
			p.job.Notice("write-back: %q stays as it is: %s", w.Source, w.Detail)
		}
		out = append(out, w)
	}
	return out, output
}

// comesBack says that what stands at the target in the end is asked for.
func (f homeFile) comesBack() bool { return f.host != nil || f.output != nil }

func writeBackOne(f homeFile, got back) WriteBack {
	w := WriteBack{Target: strings.TrimPrefix(f.target, wire.HomeDir+"/"), Source: f.host.source, Outcome: BackKept}
	switch {
	case got.Problem != "":
		w.Detail = "the agent's: " + printable(got.Problem)
		return w
	case bytes.Equal(f.content, got.content):
		w.Outcome = BackUnchanged
		return w
	case len(got.content) == 0:
		w.Detail = "the agent's is empty"
		return w
	}
	old, content, err := f.merged(got.content)
	switch {
	case err != nil:
		w.Detail = "the agent's: " + printable(err.Error())
		return w
	case bytes.Equal(old, content):
		w.Outcome = BackUnchanged
		return w
	}
	switch err := f.host.replace(old, content); {
	case errors.Is(err, ErrApplyRace):
		w.Detail = "it changed on the host during the run, and the agent's version is dropped"
	case err != nil:
		w.Detail = printable(err.Error()) + "; the agent's version is dropped"
	default:
		w.Outcome = BackReplaced
	}
	return w
}

// newBacks expects every file that was delivered with writeBack.
func newBacks(files []homeFile) backs {
	var b backs
	for _, f := range files {
		if f.comesBack() {
			b.want = append(b.want, f.target)
		}
	}
	return b
}
