package netpolicy

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

const testRun = "4f1c9a0be2d37786"

// testClock ticks a millisecond at each look.
func testClock() func() time.Time {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	return func() time.Time {
		at = at.Add(time.Millisecond)
		return at
	}
}

func mustCreateLog(t testing.TB, path string) *Log {
	t.Helper()
	l, err := CreateLog(path, testRun, testClock())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.file.Close() })
	return l
}

func mustWrite(t testing.TB, l *Log, events ...Event) {
	t.Helper()
	for _, e := range events {
		if err := l.Write(e); err != nil {
			t.Fatal(err)
		}
	}
}

// sampleEvents are one of each kind, the last ones with text that tries to steer.
func sampleEvents() []Event {
	web := Verdict{Allowed: true, Rule: "api.example.com:443"}
	at := netip.MustParseAddr("203.0.113.7")
	return []Event{
		{Kind: EventConnect, Conn: 1, Name: "api.example.com", Addr: at, Port: 443, Verdict: web, Detail: "api.example.com"},
		{Kind: EventName, Name: "evil.example.org", Verdict: Verdict{Reason: RefusedUnlisted, Entry: "evil.example.org:443"}},
		{
			Kind: EventConnect, Conn: 2, Name: "api.example.com", Port: 22,
			Verdict: Verdict{Reason: RefusedUnlisted, Why: "allowed on port 443 only", Entry: "api.example.com:22"},
		},
		{
			Kind: EventConnect, Conn: 3, Addr: netip.MustParseAddr("169.254.169.254"), Port: 80,
			Verdict: Verdict{Reason: RefusedUnlisted, Why: "an address without a name needs an entry of its own", Entry: "169.254.169.254/32:80"},
		},
		{
			Kind: EventConnect, Conn: 4, Name: "web.example.com", Port: 443, Detail: "other.example.net",
			Verdict: Verdict{Reason: RefusedServerName},
		},
		{
			Kind: EventConnect, Conn: 5, Name: "web.example.com", Port: 443,
			Verdict: Verdict{Reason: RefusedECH, Entry: `{"host":"web.example.com","ech":true}`},
		},
		{
			Kind: EventRequest, Conn: 6, Name: "plain.example.com", Port: 80, Detail: "h\x1b[31m\u202e\u2028\xff\x7f\u009b<&>😀",
			Verdict: Verdict{Reason: RefusedHost},
		},
		{Kind: EventName, Detail: "..", Verdict: Verdict{Reason: RefusedName}},
		{Kind: EventConnect, Conn: 7, Name: "telemetry.example.com", Port: 443, Verdict: Verdict{Reason: RefusedDenied, Rule: "telemetry.example.com:443", Why: "egress.deny holds telemetry.example.com:443"}},
		{Kind: EventEnd, Conn: 1, Name: "api.example.com", Addr: at, Port: 443, Verdict: web, Sent: 1000, Received: 200000, Micros: 1234567},
	}
}

// sampleLog is the golden's bytes and their head.
func sampleLog(t testing.TB) ([]byte, Head) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "egress.jsonl")
	l := mustCreateLog(t, path)
	mustWrite(t, l, sampleEvents()...)
	head, err := l.Close()
	if err != nil {
		t.Fatal(err)
	}
	return mustRead(t, path), head
}

func mustRead(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestLogFormat: the golden is the format that programs read. What people read of it
// stands beside it.
func TestLogFormat(t *testing.T) {
	got, head := sampleLog(t)
	var text strings.Builder
	for line := range bytes.Lines(got) {
		l, err := ParseLogLine(bytes.TrimSuffix(line, []byte("\n")))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&text, l.Text())
	}
	for file, got := range map[string]string{"testdata/egress.jsonl": string(got), "testdata/egress.text": text.String()} {
		if *update {
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if diff := cmp.Diff(string(mustRead(t, file)), got); diff != "" {
			t.Error(diff)
		}
		if i := strings.IndexFunc(got, func(r rune) bool { return r != '\n' && (r < ' ' || r > '~') }); i >= 0 {
			t.Errorf("%s: %q", file, got[i:])
		}
	}
	want := Head{Lines: 12, SHA256: head.SHA256, Totals: Totals{Allowed: 1, Refused: 8, Sent: 1000, Received: 200000}}
	if head != want {
		t.Errorf("%+v", head)
	}
	if again, err := VerifyLog(bytes.NewReader(got), testRun, head.SHA256); err != nil || again != head {
		t.Errorf("%+v, %v", again, err)
	}
}

// TestLogFile: the caller's only, and never another's.
func TestLogFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "egress.jsonl")
	mustCreateLog(t, path)
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink("/dev/null", link); err != nil {
		t.Fatal(err)
	}
	for _, taken := range []string{path, link} {
		if _, err := CreateLog(taken, testRun, time.Now); !errors.Is(err, fs.ErrExist) {
			t.Errorf("%s: %v", taken, err)
		}
	}
}

// TestLogConcurrent: the chain holds whoever writes.
func TestLogConcurrent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "egress.jsonl")
	l := mustCreateLog(t, path)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for n := range 200 {
				e := Event{Kind: EventConnect, Name: fmt.Sprintf("n%d.example.com", i), Port: n + 1, Verdict: Verdict{Allowed: n%2 == 0}}
				if err := l.Write(e); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	head, err := l.Close()
	if err != nil || head.Lines != 2+16*200 || head.Allowed != 1600 || head.Refused != 1600 || head.Counted != 0 {
		t.Fatalf("%+v, %v", head, err)
	}
	if again, err := VerifyLog(bytes.NewReader(mustRead(t, path)), ""); err != nil || again != head {
		t.Errorf("%+v, %v", again, err)
	}
}

// TestLogFlood: A56: equal refusals are counted; so are those of ever new targets;
// neither takes room from what is permitted.
func TestLogFlood(t *testing.T) {
	path := filepath.Join(t.TempDir(), "egress.jsonl")
	l := mustCreateLog(t, path)
	const n = 20_000
	for range n {
		mustWrite(t, l, Event{Kind: EventName, Name: "same.example.com", Verdict: Verdict{Reason: RefusedUnlisted}})
	}
	if l.head.Lines > 30 {
		t.Errorf("%d lines of equal refusals", l.head.Lines)
	}
	long := strings.Repeat("a", 200)
	for i := range n {
		mustWrite(t, l, Event{Kind: EventName, Name: fmt.Sprintf("%s%d.example.com", long, i), Detail: long, Verdict: Verdict{Reason: RefusedUnlisted, Why: long + long, Entry: long + long}})
	}
	if len(l.refused.seen) > maxKeys+16 {
		t.Errorf("%d keys", len(l.refused.seen))
	}
	permitted := Event{Kind: EventConnect, Name: "api.example.com", Port: 443, Verdict: Verdict{Allowed: true, Rule: "unseen"}}
	mustWrite(t, l, permitted)
	head, err := l.Close()
	if err != nil {
		t.Fatal(err)
	}
	written := mustRead(t, path)
	if len(written) > MaxRefusedLog+maxLogLine {
		t.Errorf("%d bytes", len(written))
	}
	if !bytes.Contains(written, []byte(`"rule":"unseen"`)) {
		t.Error("what was permitted has no line")
	}
	for _, event := range []string{"many", "full"} {
		if n := bytes.Count(written, fmt.Appendf(nil, `"event":%q,"verdict":"refuse"`, event)); n != 1 || bytes.Contains(written, fmt.Appendf(nil, `"event":%q,"verdict":"allow"`, event)) {
			t.Errorf("%d lines say %s of refusals, or one of what was permitted", n, event)
		}
	}
	if head.Refused != 2*n || head.Allowed != 1 || head.Counted != 2*n+1-(head.Lines-4) {
		t.Errorf("%+v", head)
	}
	if again, err := VerifyLog(bytes.NewReader(written), testRun, head.SHA256); err != nil || again != head {
		t.Errorf("%+v, %v", again, err)
	}
}

// TestLogBound: permitted connections without end don't fill the disk either; their
// bytes are in the totals.
func TestLogBound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "egress.jsonl")
	l := mustCreateLog(t, path)
	const n = 4_000
	why := strings.Repeat("\x00", maxText)
	for i := range n {
		e := Event{Kind: EventConnect, Name: fmt.Sprintf("n%d.example.com", i%maxKeys), Port: 443, Verdict: Verdict{Allowed: true, Rule: why}}
		mustWrite(t, l, e)
		e.Kind, e.Sent, e.Received = EventEnd, 2, 3
		mustWrite(t, l, e)
	}
	head, err := l.Close()
	if err != nil || head.Allowed != n || head.Sent != 2*n || head.Received != 3*n || head.Counted == 0 {
		t.Fatalf("%+v, %v", head, err)
	}
	written := mustRead(t, path)
	if len(written) > MaxLog {
		t.Errorf("%d bytes", len(written))
	}
	if again, err := VerifyLog(bytes.NewReader(written), testRun, head.SHA256); err != nil || again != head {
		t.Errorf("%+v, %v", again, err)
	}
}

// TestLogLineBound: the longest event gives a line that can be read back.
func TestLogLineBound(t *testing.T) {
	for _, worst := range []string{"\x01", "\xff", "é", "\U0001f600", "\u202e"} {
		text := strings.Repeat(worst, 100_000)
		path := filepath.Join(t.TempDir(), "egress.jsonl")
		l := mustCreateLog(t, path)
		mustWrite(t, l, Event{
			Kind: EventConnect, Conn: 1<<64 - 1, Name: text, Addr: netip.MustParseAddr("fe80::ffff:1%x"), Port: 65535, Detail: text,
			Verdict: Verdict{Rule: text, Why: text, Entry: text, Reason: RefusedServerName},
		})
		head, err := l.Close()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := VerifyLog(bytes.NewReader(mustRead(t, path)), "", head.SHA256); err != nil {
			t.Errorf("%q: %v", worst, err)
		}
		if cut := bounded(text, maxDetail); len(cut) > maxDetail || !utf8.ValidString(cut) || utf8.ValidString(text) && !strings.HasSuffix(cut, "…") {
			t.Errorf("%q is %d bytes", cut, len(cut))
		}
	}
}

// fullDisk is a file that takes room bytes, the last write's first half included.
type fullDisk struct {
	bytes.Buffer
	room int
}

func (d *fullDisk) Write(b []byte) (int, error) {
	if d.Len()+len(b) > d.room {
		n, _ := d.Buffer.Write(b[:len(b)/2])
		return n, syscall.ENOSPC
	}
	return d.Buffer.Write(b)
}

func (d *fullDisk) Truncate(size int64) error { d.Buffer.Truncate(int(size)); return nil }
func (d *fullDisk) Close() error              { return nil }

// TestLogFullDisk: the first error stays and is told; what was written holds as far
// as it goes. The control is the same disk with room.
func TestLogFullDisk(t *testing.T) {
	for name, room := range map[string]int{"full": 1000, "with room": 1 << 20} {
		t.Run(name, func(t *testing.T) {
			disk := &fullDisk{room: room}
			l, err := newLog(disk, testRun, testClock())
			if err != nil {
				t.Fatal(err)
			}
			var failed error
			for _, e := range sampleEvents() {
				if err := l.Write(e); err != nil || failed != nil {
					if failed != nil && !errors.Is(err, failed) {
						t.Errorf("%v behind %v", err, failed)
					}
					failed = err
					disk.room = 1 << 20 // somebody made room: too late
				}
			}
			head, err := l.Close()
			_, verr := VerifyLog(bytes.NewReader(disk.Bytes()), testRun, head.SHA256)
			if room > 1000 {
				if failed != nil || err != nil || verr != nil {
					t.Fatal(failed, err, verr)
				}
				return
			}
			if !errors.Is(failed, syscall.ENOSPC) || !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("%v, %v", failed, err)
			}
			if verr != ErrLogOpen || head.Lines < 2 { //nolint:errorlint // nothing else may be wrong
				t.Errorf("%v, %+v", verr, head)
			}
		})
	}
	if _, err := newLog(&fullDisk{room: 10}, testRun, testClock()); !errors.Is(err, syscall.ENOSPC) {
		t.Error(err)
	}
}

func TestLogClosed(t *testing.T) {
	l := mustCreateLog(t, filepath.Join(t.TempDir(), "egress.jsonl"))
	head, err := l.Close()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Write(Event{}); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
	if again, err := l.Close(); !errors.Is(err, os.ErrClosed) || again != head {
		t.Errorf("%+v, %v", again, err)
	}
}

// TestVerifyLog: whatever is done to a log is found, at its line. The control is the
// log as it is, in TestLogFormat.
func TestVerifyLog(t *testing.T) {
	whole, head := sampleLog(t)
	lines := bytes.SplitAfter(bytes.TrimSuffix(whole, []byte("\n")), []byte("\n"))
	lines[len(lines)-1] = append(slices.Clone(lines[len(lines)-1]), '\n')
	with := func(change func(l [][]byte) [][]byte) []byte { return bytes.Join(change(slices.Clone(lines)), nil) }
	replaced := func(n int, old, new string) []byte {
		return with(func(l [][]byte) [][]byte {
			changed := bytes.Replace(l[n-1], []byte(old), []byte(new), 1)
			if bytes.Equal(changed, l[n-1]) {
				t.Fatalf("%s is not in %s", old, l[n-1])
			}
			l[n-1] = changed
			return l
		})
	}
	last := len(lines)
	for name, c := range map[string]struct {
		log  []byte
		line uint64
	}{
		"empty":                {nil, 1},
		"a changed name":       {replaced(3, "evil.example.org", "good.example.org"), 4},
		"a changed verdict":    {replaced(4, `"refuse"`, `"allow"`), 5},
		"a changed first line": {replaced(1, "2026", "2025"), 2},
		"another version":      {replaced(2, `{"v":1,`, `{"v":2,`), 2},
		"another run":          {replaced(2, testRun, "0000000000000000"), 2},
		"another run first":    {replaced(1, testRun, "0000000000000000"), 1},
		"a space":              {replaced(5, `{"v"`, `{ "v"`), 5},
		"another order":        {replaced(2, `{"v":1,"seq":2,`, `{"seq":2,"v":1,`), 2},
		"a field more":         {replaced(2, `"prev"`, `"new":1,"prev"`), 2},
		"a field twice":        {replaced(2, `{"v":1,`, `{"v":1,"v":1,`), 2},
		"a field's case":       {replaced(2, `"seq"`, `"Seq"`), 2},
		"another spelling":     {replaced(8, `\u001b`, `\u001B`), 8},
		"a raw control byte":   {replaced(8, `\u007f`, "\x7f"), 8},
		"a raw bidi control":   {replaced(8, `\u202e`, "\u202e"), 8},
		"invalid UTF-8":        {replaced(8, `\ufffd`, "\xff"), 8},
		"a lone surrogate":     {replaced(8, `\ufffd`, `\ud800`), 8},
		"a changed last line":  {replaced(last, `"refused":8`, `"refused":7`), uint64(last)},
		"a changed last time":  {replaced(last, "2026", "2027"), uint64(last)},
		"no line feed":         {bytes.TrimSuffix(whole, []byte("\n")), uint64(last)},
		"half a line":          {whole[:len(whole)-100], uint64(last)},
		"more at the end":      {append(slices.Clone(whole), lines[1]...), uint64(last) + 1},
		"an empty line":        {append(slices.Clone(whole), '\n'), uint64(last) + 1},
		"a line too long":      {with(func(l [][]byte) [][]byte { return slices.Insert(l, 3, bytes.Repeat([]byte("x"), 1<<20)) }), 4},
		"a binary":             {bytes.Repeat([]byte{0}, 1<<20), 1},
		"a line removed":       {with(func(l [][]byte) [][]byte { return slices.Delete(l, 3, 4) }), 4},
		"the first removed":    {with(func(l [][]byte) [][]byte { return l[1:] }), 1},
		"a line twice":         {with(func(l [][]byte) [][]byte { return slices.Insert(l, 3, l[3]) }), 5},
		"two lines swapped":    {with(func(l [][]byte) [][]byte { l[3], l[4] = l[4], l[3]; return l }), 4},
		"cut":                  {with(func(l [][]byte) [][]byte { return l[:5] }), 5},
		"cut to one":           {with(func(l [][]byte) [][]byte { return l[:1] }), 1},
		"the last cut":         {with(func(l [][]byte) [][]byte { return l[:last-1] }), uint64(last) - 1},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := VerifyLog(bytes.NewReader(c.log), testRun, head.SHA256)
			var bad *LogError
			if !errors.As(err, &bad) || bad.Line != c.line {
				t.Errorf("%v, want line %d", err, c.line)
			}
		})
	}
}

// TestVerifyLogCut: without the head from elsewhere, cut lines are found by the last
// line that is missing, which is also what a run's log looks like while it goes on.
func TestVerifyLogCut(t *testing.T) {
	whole, _ := sampleLog(t)
	for end := len(whole); ; {
		end = bytes.LastIndexByte(whole[:end-1], '\n') + 1
		if end == 0 {
			break
		}
		if _, err := VerifyLog(bytes.NewReader(whole[:end]), testRun); !errors.Is(err, ErrLogOpen) {
			t.Errorf("%d bytes: %v", end, err)
		}
	}
	if _, err := VerifyLog(bytes.NewReader(whole), ""); err != nil {
		t.Error(err)
	}
}

// TestVerifyLogRewritten: a log that somebody wrote anew is whole by itself; the
// head from the record tells.
func TestVerifyLogRewritten(t *testing.T) {
	_, head := sampleLog(t)
	path := filepath.Join(t.TempDir(), "egress.jsonl")
	l := mustCreateLog(t, path)
	mustWrite(t, l, sampleEvents()[:3]...)
	if _, err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := VerifyLog(bytes.NewReader(mustRead(t, path)), testRun); err != nil {
		t.Error(err)
	}
	var bad *LogError
	if _, err := VerifyLog(bytes.NewReader(mustRead(t, path)), testRun, "", head.SHA256); !errors.As(err, &bad) || bad.Line != 5 {
		t.Error(err)
	}
}

// FuzzVerifyLog: no input harms it, and only the log itself has the log's head.
func FuzzVerifyLog(f *testing.F) {
	whole, head := sampleLog(f)
	f.Add(whole)
	f.Add(whole[:len(whole)/2])
	f.Add([]byte("{}\n"))
	f.Add(bytes.ReplaceAll(whole, []byte(`"v":1`), []byte(`"v":1.0`)))
	f.Fuzz(func(t *testing.T, log []byte) {
		if _, err := VerifyLog(bytes.NewReader(log), testRun, head.SHA256); err == nil && !bytes.Equal(log, whole) {
			t.Errorf("%q has the same head", log)
		}
		got, err := VerifyLog(bytes.NewReader(log), "")
		if (err == nil || errors.Is(err, ErrLogOpen)) && got.Lines != uint64(bytes.Count(log, []byte("\n"))) {
			t.Errorf("%q: %+v", log, got)
		}
	})
}

// FuzzLogWrite: whatever the sandbox sends, the log stays whole and plain.
func FuzzLogWrite(f *testing.F) {
	f.Add("name", "evil.example.com", "\x1b]0;x\a\u202e", "why\n", uint64(1), 443)
	f.Add("end", "", "\xff\xfe\U0001f600", "", uint64(1<<63), -1)
	f.Fuzz(func(t *testing.T, kind, name, detail, why string, conn uint64, port int) {
		e := Event{Kind: EventKind(kind), Name: name, Detail: detail, Conn: conn, Port: port, Verdict: Verdict{Why: why, Rule: why, Entry: detail}}
		if !slices.Contains([]EventKind{EventName, EventConnect, EventRequest, EventEnd}, e.Kind) {
			e.Kind = EventConnect
		}
		disk := &fullDisk{room: 1 << 20}
		l, err := newLog(disk, testRun, testClock())
		if err != nil {
			t.Fatal(err)
		}
		mustWrite(t, l, e)
		head, err := l.Close()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := VerifyLog(bytes.NewReader(disk.Bytes()), testRun, head.SHA256); err != nil {
			t.Error(err)
		}
		var s Summary
		s.Add(e)
		for _, line := range append(s.Lines(2), disk.String()) {
			if strings.ContainsFunc(line, func(r rune) bool { return r != '\n' && (r < ' ' || r > '~') }) {
				t.Errorf("%q", line)
			}
		}
	})
}

// BenchmarkLogWrite: what a decision waits for its line.
func BenchmarkLogWrite(b *testing.B) {
	for name, e := range map[string]Event{"written": sampleEvents()[0], "counted": sampleEvents()[2]} {
		b.Run(name, func(b *testing.B) {
			l := mustCreateLog(b, filepath.Join(b.TempDir(), "egress.jsonl"))
			for b.Loop() {
				if e.Verdict.Allowed {
					clear(l.allowed.seen)
					l.size = 0
				}
				mustWrite(b, l, e)
			}
		})
	}
}
