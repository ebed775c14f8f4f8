package netpolicy

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf16"
)

// LogVersion is the version of the log's lines.
const LogVersion = 1

// Bounds of one run's log.
const (
	// MaxLog bounds the file in bytes; lines about what was refused get MaxRefusedLog
	// of it, so that an agent can't push out what was permitted by being refused.
	MaxLog        = 16 << 20
	MaxRefusedLog = 4 << 20
	// logReserve is kept for the last lines: four of the log itself, and one that ends it.
	logReserve = 4 << 10
	// maxLogLine bounds one line: the texts below with every byte escaped, and the rest.
	maxLogLine = 16 << 10
	maxName    = 256
	maxDetail  = 256
	maxText    = 512
)

// Events of the log itself, beside EventKind's.
const (
	logStart EventKind = "start"
	logMany  EventKind = "many"
	logFull  EventKind = "full"
	logStop  EventKind = "stop"
)

// What LogLine.Verdict says.
const (
	VerdictAllow  = "allow"
	VerdictRefuse = "refuse"
)

// LogLine is one line of an egress log. Fields with nothing to say are left out of
// the JSON; V, Seq, Time, Run, Event and Prev are always there, Prev but for the
// first line. Texts are cut at some hundred bytes.
type LogLine struct {
	V    int       `json:"v"`
	Seq  uint64    `json:"seq"` // the line's number, from 1
	Time time.Time `json:"time"`
	Run  string    `json:"run"`
	// Event is one of the gateway's, or start (the first line), many (from here on a new
	// target of this verdict may have no line), full (decisions of this verdict are only
	// counted) and stop (the last line).
	Event EventKind `json:"event"`
	Conn  uint64    `json:"conn,omitzero"`
	// Count is how many equal events there were with this one, where some of those
	// before it were only counted.
	Count   uint64  `json:"count,omitzero"`
	Name    string  `json:"name,omitzero"`
	Addr    string  `json:"addr,omitzero"`
	Port    int     `json:"port,omitzero"`
	Verdict string  `json:"verdict,omitzero"`
	Rule    string  `json:"rule,omitzero"`
	Reason  Refusal `json:"reason,omitzero"`
	Why     string  `json:"why,omitzero"`
	Entry   string  `json:"entry,omitzero"`
	Detail  string  `json:"detail,omitzero"`
	// Sent and Received are bytes from and to the sandbox, Micros microseconds, of an end.
	Sent     int64 `json:"sent,omitzero"`
	Received int64 `json:"received,omitzero"`
	Micros   int64 `json:"micros,omitzero"`
	// Totals stand in the last line.
	Totals *Totals `json:"totals,omitempty"`
	// Prev is the SHA-256 of the line before, in hexadecimal, without its line feed.
	Prev string `json:"prev,omitzero"`
}

// Totals are a run's decisions, and the bytes of the connections that ended.
type Totals struct {
	Allowed uint64 `json:"allowed"`
	Refused uint64 `json:"refused"`
	// Counted are those of both that have no line.
	Counted  uint64 `json:"counted"`
	Sent     int64  `json:"sent"`
	Received int64  `json:"received"`
}

// Head says what a log holds. Whoever has the SHA-256 of the last line can tell
// that no line was changed, added or cut off. It proves nothing where it lies beside the log:
// who can write both can write both anew.
type Head struct {
	Lines  uint64 `json:"lines"`
	SHA256 string `json:"sha256"`
	Totals
}

// Log is a run's egress log: JSON lines, each with the digest of the one before.
// It is safe for concurrent use. A line is handed to the kernel before Write returns;
// it outlives agentshim, and a power cut only if the kernel came to write it.
//
// Of equal events the first few have a line, then the 2^nth: floods are counted.
// The file never grows beyond MaxLog. Decisions that have no line are in the totals. So not
// every target has a line: behind 4096 different events of a verdict, or where there is no more
// room, one can be counted only, and is permitted all the same. A line says from where on.
//
// A log that can't be written fails closed. The first error stays: every Write
// returns it, and whoever decides must let nothing through any more, what is open
// included, so that there is no traffic that the log does not tell of.
type Log struct {
	run string
	now func() time.Time

	mu   sync.Mutex
	file logFile
	err  error
	head Head
	// size and refusedSize are bytes written, all and those about refusals.
	size, refusedSize int64
	// many and full are the verdicts that have such a line.
	many, full       map[string]bool
	allowed, refused thinner
}

// logFile is an *os.File; tests have one that fails.
type logFile interface {
	Write(b []byte) (int, error)
	Truncate(size int64) error
	Close() error
}

// CreateLog makes the log of a run at path, which must not exist, for its owner only
// (0600), and writes its first line.
func CreateLog(path, run string, now func() time.Time) (*Log, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("egress log: %w", err)
	}
	l, err := newLog(f, run, now)
	if err != nil {
		f.Close()
		return nil, err
	}
	return l, nil
}

func newLog(f logFile, run string, now func() time.Time) (*Log, error) {
	l := &Log{
		run: run, now: now, file: f, many: map[string]bool{}, full: map[string]bool{},
		allowed: newThinner(1024), refused: newThinner(8),
	}
	return l, l.put(LogLine{Event: logStart})
}

// Write logs one event, or counts it. Its error is the log's first one, or
// os.ErrClosed behind Close; what was to be permitted must then be refused.
func (l *Log) Write(e Event) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	l.count(e)
	n, write, known := l.thinnerOf(e).count(keyOf(e))
	if write {
		line := lineOf(e)
		if n > l.thinnerOf(e).first {
			line.Count = n
		}
		if written, err := l.putBounded(line); written || err != nil {
			return err
		}
	}
	if e.Kind == EventEnd {
		return nil
	}
	l.head.Counted++
	if known {
		return nil
	}
	return l.once(l.many, logMany, lineOf(e).Verdict)
}

// once writes a line of the log's own about a verdict, unless there is one.
func (l *Log) once(said map[string]bool, kind EventKind, verdict string) error {
	if said[verdict] {
		return nil
	}
	said[verdict] = true
	return l.put(LogLine{Event: kind, Verdict: verdict})
}

// Close writes the last line, with the totals, and closes the file. The head is that
// of the last line that could be written, also when there is an error.
func (l *Log) Close() (Head, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.err
	if err == nil {
		totals := l.head.Totals
		err = l.put(LogLine{Event: logStop, Totals: &totals})
	}
	if cerr := l.file.Close(); err == nil && cerr != nil {
		err = fmt.Errorf("egress log: %w", cerr)
	}
	if l.err == nil {
		l.err = os.ErrClosed
	}
	return l.head, err
}

func (l *Log) count(e Event) {
	switch {
	case e.Kind == EventEnd:
		l.head.Sent += e.Sent
		l.head.Received += e.Received
	case e.permitted():
		l.head.Allowed++
	default:
		l.head.Refused++
	}
}

// permitted reports a decision to permit, or the end of what was.
func (e Event) permitted() bool { return e.Verdict.Allowed || e.Kind == EventEnd }

func (l *Log) thinnerOf(e Event) *thinner {
	if e.permitted() {
		return &l.allowed
	}
	return &l.refused
}

// putBounded writes the line if there is room. Where there is none, it says so once.
func (l *Log) putBounded(line LogLine) (bool, error) {
	if l.full[line.Verdict] {
		return false, nil
	}
	before := l.size
	if before+maxLogLine > MaxLog-logReserve || line.Verdict == VerdictRefuse && l.refusedSize+maxLogLine > MaxRefusedLog {
		return false, l.once(l.full, logFull, line.Verdict)
	}
	err := l.put(line)
	if line.Verdict == VerdictRefuse {
		l.refusedSize += l.size - before
	}
	return err == nil, err
}

// put writes one line and makes it the head.
func (l *Log) put(line LogLine) error {
	line.V, line.Seq, line.Run, line.Time, line.Prev = LogVersion, l.head.Lines+1, l.run, l.now().UTC(), l.head.SHA256
	b, err := line.encode()
	if err == nil {
		_, err = l.file.Write(append(b, '\n'))
	}
	if err != nil {
		// A full disk takes a part of a line. Without it the log holds as far as it goes.
		_ = l.file.Truncate(l.size)
		l.err = fmt.Errorf("egress log: %w", err)
		return l.err
	}
	l.size += int64(len(b)) + 1
	l.head.Lines, l.head.SHA256 = line.Seq, lineDigest(b)
	return nil
}

func lineDigest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func lineOf(e Event) LogLine {
	line := LogLine{
		Event: e.Kind, Conn: e.Conn, Name: bounded(e.Name, maxName), Port: e.Port, Verdict: VerdictRefuse,
		Rule: bounded(e.Verdict.Rule, maxText), Reason: e.Verdict.Reason, Why: bounded(e.Verdict.Why, maxText),
		Entry: bounded(e.Verdict.Entry, maxText), Detail: bounded(e.Detail, maxDetail),
		Sent: e.Sent, Received: e.Received, Micros: e.Micros,
	}
	if e.permitted() {
		line.Verdict = VerdictAllow
	}
	if e.Addr.IsValid() {
		line.Addr = e.Addr.WithZone("").String()
	}
	return line
}

// bounded cuts text at n bytes, with an ellipsis, and makes it valid UTF-8.
func bounded(text string, n int) string {
	text = strings.ToValidUTF8(text, "\ufffd")
	if len(text) > n {
		const more = "…"
		text = strings.ToValidUTF8(text[:n-len(more)], "") + more
	}
	return text
}

// encode gives the line's only form: fields in order, printable ASCII.
func (line LogLine) encode() ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(line); err != nil {
		return nil, err
	}
	return []byte(escape(strings.TrimSuffix(b.String(), "\n"))), nil
}

// escape writes everything but printable ASCII as \uXXXX, as JSON has it, so that
// nothing can steer a terminal or reorder what is read.
func escape(text string) string {
	var b strings.Builder
	for _, r := range text {
		switch {
		case ' ' <= r && r <= '~':
			b.WriteRune(r)
		case r <= 0xffff:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		}
	}
	return b.String()
}

// eventKey is what makes events equal. The address counts where there is no name.
type eventKey struct {
	kind   EventKind
	name   string
	addr   netip.Addr
	port   int
	reason Refusal
}

func keyOf(e Event) eventKey {
	k := eventKey{kind: e.Kind, name: e.Name, port: e.Port, reason: e.Verdict.Reason}
	if e.Name == "" {
		k.addr = e.Addr
	}
	return k
}

// maxKeys bounds a thinner's memory.
const maxKeys = 4096

// thinner picks the events that get a line: the first ones of equal ones, then those
// whose number is a power of two. Behind maxKeys different ones, all new ones of a
// kind and reason are equal.
type thinner struct {
	first uint64
	seen  map[eventKey]uint64
}

func newThinner(first uint64) thinner { return thinner{first: first, seen: map[eventKey]uint64{}} }

// count gives the event's number among its equals, whether it gets a line, and whether it is
// told apart.
func (t *thinner) count(k eventKey) (n uint64, write, known bool) {
	_, known = t.seen[k]
	known = known || len(t.seen) < maxKeys
	if !known {
		k = eventKey{kind: k.kind, reason: k.reason}
	}
	t.seen[k]++
	n = t.seen[k]
	return n, n <= t.first || n&(n-1) == 0, known
}
