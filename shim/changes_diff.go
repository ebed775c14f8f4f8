package shim

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/rogpeppe/go-internal/diff"
	"golang.org/x/sys/unix"
)

// DiffLimits bound what WriteDiff shows. A zero field is its default.
type DiffLimits struct {
	// FileBytes is the largest file whose lines are shown: 512 KiB.
	FileBytes int64
	// Bytes of all lines: 8 MiB. What comes after has one line each.
	Bytes int
	// Files that have a line at all: 10,000.
	Files int
	// Stat leaves out all but the summary.
	Stat bool
}

func (l DiffLimits) withDefaults() DiffLimits {
	if l.FileBytes == 0 {
		l.FileBytes = 512 << 10
	}
	if l.Bytes == 0 {
		l.Bytes = 8 << 20
	}
	if l.Files == 0 {
		l.Files = 10_000
	}
	return l
}

// WriteDiff writes for people what c changes: text as a unified diff against the
// host's file, one line for all else, then a summary. Nothing that is written can
// steer a terminal: names and lines are escaped, so the text is no patch to apply.
// What the host has already is left out; a conflict shows no lines, since what was
// copied is not kept.
func WriteDiff(w io.Writer, c Changes, copied, host *os.File, limits DiffLimits) error {
	all := bufio.NewWriter(w)
	d := &diffWriter{w: all, copied: int(copied.Fd()), host: int(host.Fd()), limits: limits.withDefaults()}
	if limits.Stat {
		d.w = bufio.NewWriter(io.Discard)
	}
	for i := range c.List {
		if c.List[i].Verdict == VerdictDone {
			continue
		}
		if d.files++; d.files > d.limits.Files {
			continue
		}
		d.change(&c.List[i])
	}
	if more := d.files - d.limits.Files; more > 0 {
		fmt.Fprintf(d.w, "… and %d more\n", more)
	}
	if d.files > 0 {
		fmt.Fprintln(d.w)
	}
	d.w = all
	d.summary(c)
	return d.w.Flush()
}

type diffWriter struct {
	w              *bufio.Writer
	copied, host   int
	limits         DiffLimits
	files          int
	shown          int
	added, removed int
	stats          []string
}

func (d *diffWriter) change(c *Change) {
	name := quoteName(c.Path)
	switch {
	case c.Verdict == VerdictRefused, c.Verdict == VerdictConflict:
		fmt.Fprintf(d.w, "%s: %s: %s\n", c.Verdict, name, c.Why)
		d.stat(name, string(c.Verdict))
		return
	case c.Kind == ChangeMode, c.To == TypeFolder, c.From == TypeFolder && c.To == TypeNone:
		d.head(c, name)
		return
	}
	d.head(c, name)
	before, after, why := d.texts(c)
	if why != "" {
		fmt.Fprintf(d.w, "  %s\n", why)
		d.stat(name, why)
		return
	}
	plus, minus := d.lines(diff.Diff("a", before, "b", after))
	d.added, d.removed = d.added+plus, d.removed+minus
	d.stat(name, strings.TrimSpace(fmt.Sprintf("%d %s", plus+minus, bars(plus, minus))))
}

func (d *diffWriter) head(c *Change, name string) {
	what := c.To.String()
	switch {
	case c.Kind == ChangeDeleted:
		what = c.From.String()
	case c.Kind == ChangeType:
		what = fmt.Sprintf("%s to %s", c.From, c.To)
	case c.Kind == ChangeMode, c.Kind == ChangeModified && c.To == TypeFile && c.Mode != c.host.Mode&0o777:
		what = fmt.Sprintf("%s, permissions %03o to %03o", c.To, c.host.Mode&0o777, c.Mode)
	case c.To == TypeFile && c.Kind == ChangeAdded && c.Mode&0o111 != 0:
		what = "program"
	}
	fmt.Fprintf(d.w, "%s: %s (%s)\n", c.Kind, name, what)
	if c.Kind == ChangeMode || c.To == TypeFolder || c.From == TypeFolder && c.To == TypeNone {
		d.stat(name, string(c.Kind))
	}
}

// texts gives both sides' lines, or why there are none to show.
func (d *diffWriter) texts(c *Change) (before, after []byte, why string) {
	before, why = d.side(d.host, &c.host)
	if why == "" {
		after, why = d.side(d.copied, &c.copy)
	}
	return before, after, why
}

func (d *diffWriter) side(root int, n *treeNode) ([]byte, string) {
	switch {
	case n.Type == TypeLink:
		return []byte(n.Link + "\n"), ""
	case n.Type != TypeFile:
		return nil, ""
	case n.Size > d.limits.FileBytes:
		return nil, fmt.Sprintf("too large to show: %d bytes", n.Size)
	case d.shown > d.limits.Bytes:
		return nil, "not shown: the diff is too long"
	}
	text, err := readNode(root, n)
	switch {
	case err != nil:
		return nil, "it can't be read now"
	case bytes.IndexByte(text, 0) >= 0:
		return nil, fmt.Sprintf("binary, %d bytes", n.Size)
	}
	return text, ""
}

// readNode reads the whole file that n was taken of.
func readNode(root int, n *treeNode) ([]byte, error) {
	fd, err := openNode(root, n.Path, n)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	text := make([]byte, n.Size)
	for at := 0; at < len(text); {
		got, err := preadSome(fd, text[at:], int64(at))
		if err != nil {
			return nil, err
		}
		at += got
	}
	return text, errors.Join(sameNode(fd, n))
}

// lines writes a unified diff without its three lines of head.
func (d *diffWriter) lines(unified []byte) (plus, minus int) {
	for range 3 {
		_, unified, _ = bytes.Cut(unified, []byte("\n"))
	}
	for line := range bytes.Lines(unified) {
		line = bytes.TrimSuffix(line, []byte("\n"))
		switch line[0] {
		case '+':
			plus++
		case '-':
			minus++
		}
		text := escapeLine(line)
		d.shown += len(text) + 1
		d.w.WriteString(text)
		d.w.WriteByte('\n')
	}
	return plus, minus
}

// maxStats bounds the lines of the summary.
const maxStats = 200

func (d *diffWriter) stat(name, what string) {
	if len(d.stats) < maxStats {
		d.stats = append(d.stats, fmt.Sprintf(" %s | %s", name, what))
	}
}

// bars draws up to forty signs.
func bars(plus, minus int) string {
	if all := plus + minus; all > 40 {
		plus, minus = (plus*40+all-1)/all, minus*40/all
	}
	return strings.Repeat("+", plus) + strings.Repeat("-", minus)
}

func (d *diffWriter) summary(c Changes) {
	if d.files == 0 {
		fmt.Fprintln(d.w, "no changes")
		return
	}
	for _, line := range d.stats {
		fmt.Fprintln(d.w, line)
	}
	if more := d.files - len(d.stats); more > 0 {
		fmt.Fprintf(d.w, " … and %d more\n", more)
	}
	fmt.Fprintf(d.w, " %d changed, %d lines added, %d removed", d.files, d.added, d.removed)
	for _, v := range []Verdict{VerdictConflict, VerdictRefused} {
		if n := c.Count(v); n > 0 {
			fmt.Fprintf(d.w, ", %d %s", n, map[Verdict]string{VerdictConflict: "in conflict", VerdictRefused: "refused"}[v])
		}
	}
	fmt.Fprintln(d.w)
}
