package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// raw is a frame's bytes with any header.
func raw(kind, stream, r1, r2 byte, size uint32, payload string) string {
	h := []byte{kind, stream, r1, r2}
	return string(binary.BigEndian.AppendUint32(h, size)) + payload
}

func TestRoundTrip(t *testing.T) {
	big := bytes.Repeat([]byte{'x'}, MaxLaunch)
	frames := []Frame{
		{Kind: KindHello, Payload: []byte("{}")},
		{Kind: KindProbe, Payload: []byte{}},
		{Kind: KindLaunch, Payload: big},
		{Kind: KindStarted, Payload: []byte{}},
		{Kind: KindData, Stream: Stdout, Payload: big[:MaxData]},
		{Kind: KindData, Stream: Stderr, Payload: []byte{0}},
		{Kind: KindEOF, Stream: Stderr, Payload: []byte{}},
		{Kind: KindCredit, Stream: Stdin, Step: 0x1234, Payload: []byte{0, 0, 1, 0}},
		{Kind: KindExit, Payload: []byte(`{"code":0}`)},
	}
	r, w := io.Pipe()
	go func() {
		c := NewConn(nil, w)
		for _, f := range frames {
			if err := c.Of(f.Step).Send(f.Kind, f.Stream, f.Payload); err != nil {
				t.Errorf("frame kind %d: %v", f.Kind, err)
			}
		}
		w.Close()
	}()
	c := NewConn(r, nil)
	for _, want := range frames {
		got, err := c.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if got.Kind != want.Kind || got.Stream != want.Stream || got.Step != want.Step || !bytes.Equal(got.Payload, want.Payload) {
			t.Errorf("frame kind %d: got kind %d stream %d step %d of %d bytes", want.Kind, got.Kind, got.Stream, got.Step, len(got.Payload))
		}
	}
	if _, err := c.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last frame: %v", err)
	}
	if cap(c.buf) > headerSize+MaxData {
		t.Errorf("%d bytes kept after a large frame", cap(c.buf))
	}
}

// kindRules are the bounds of each kind's payload, and the streams and steps it may name.
var kindRules = []struct {
	kind        Kind
	least, most int
	stream      uint8
	step        bool
}{
	{KindHello, 1, 512 << 10, 0, false},
	{KindProbe, 0, 0, 0, false},
	{KindProbed, 1, 64 << 10, 0, false},
	{KindFile, 1, 64 << 10, 0, true},
	{KindFileData, 1, 32 << 10, 0, true},
	{KindLaunch, 1, 4 << 20, 0, true},
	{KindStarted, 0, 0, 0, true},
	{KindRefused, 1, 64 << 10, 0, true},
	{KindData, 1, 32 << 10, 2, true},
	{KindEOF, 0, 0, 2, true},
	{KindCredit, 4, 4, 2, true},
	{KindSignal, 4, 4, 0, true},
	{KindExit, 1, 64 << 10, 0, true},
	{KindWindow, 4, 4, 0, true},
	{KindBack, 1, 64 << 10, 0, true},
	{KindBackData, 1, 32 << 10, 0, true},
	{KindDial, 4, 4, 127, false},
	{KindTunnelData, 1, 32 << 10, 127, false},
	{KindTunnelEOF, 0, 0, 127, false},
	{KindTunnelCredit, 4, 4, 127, false},
	{KindTunnelEnd, 0, 0, 127, false},
	{KindCut, 0, 0, 0, true},
	{KindFinish, 0, 0, 0, false},
	{KindRequest, 1, 4 << 20, 0, false},
	{KindReply, 1, 4 << 20, 0, false},
}

// TestBounds holds Recv and Send to the same rules.
func TestBounds(t *testing.T) {
	if len(kindRules) != int(kindEnd)-1 {
		t.Fatalf("%d rules for %d kinds", len(kindRules), kindEnd-1)
	}
	for _, rule := range kindRules {
		for _, row := range []struct {
			size   int
			stream uint8
			step   uint16
			ok     bool
		}{
			{rule.least, 0, 0, true},
			{rule.most, 0, 0, true},
			{rule.least - 1, 0, 0, false},
			{rule.most + 1, 0, 0, false},
			{rule.most, rule.stream, 0, true},
			{rule.most, rule.stream + 1, 0, false},
			{rule.most, 255, 0, false},
			{rule.most, 0, 1, rule.step},
			{rule.most, rule.stream, 0xfffe, rule.step},
		} {
			if row.size < 0 {
				continue
			}
			t.Run(fmt.Sprintf("kind %d size %d stream %d step %d", rule.kind, row.size, row.stream, row.step), func(t *testing.T) {
				payload := strings.Repeat("x", row.size)
				in := raw(byte(rule.kind), row.stream, byte(row.step>>8), byte(row.step), uint32(row.size), payload)
				_, err := NewConn(strings.NewReader(in), nil).Recv()
				check(t, "Recv", row.ok, err)
				var out bytes.Buffer
				err = NewConn(nil, &out).Of(row.step).Send(rule.kind, row.stream, []byte(payload))
				check(t, "Send", row.ok, err)
				if want := map[bool]string{true: in}[row.ok]; out.String() != want {
					t.Errorf("Send wrote %d bytes, want %d", out.Len(), len(want))
				}
			})
		}
	}
}

func check(t *testing.T, what string, ok bool, err error) {
	t.Helper()
	if ok && err != nil || !ok && !errors.Is(err, ErrProtocol) {
		t.Errorf("%s: %v, wanted to pass: %v", what, err, ok)
	}
}

func TestRecvErrors(t *testing.T) {
	data := byte(KindData)
	for _, row := range []struct {
		name, in string
		want     error
	}{
		{"nothing", "", io.EOF},
		{"header cut", "\x09\x00\x00", io.ErrUnexpectedEOF},
		{"no payload", raw(data, 1, 0, 0, 5, ""), io.ErrUnexpectedEOF},
		{"payload cut", raw(data, 1, 0, 0, 5, "1234"), io.ErrUnexpectedEOF},
		{"kind 0", raw(0, 0, 0, 0, 0, ""), ErrProtocol},
		{"kind past the last", raw(byte(kindEnd), 0, 0, 0, 0, ""), ErrProtocol},
		{"kind 255", raw(255, 0, 0, 0, 0, ""), ErrProtocol},
		{"step of a hello", raw(byte(KindHello), 0, 0, 1, 2, "{}"), ErrProtocol},
		{"largest length", raw(byte(KindLaunch), 0, 0, 0, 0xffffffff, ""), ErrProtocol},
	} {
		t.Run(row.name, func(t *testing.T) {
			if _, err := NewConn(strings.NewReader(row.in), nil).Recv(); !errors.Is(err, row.want) {
				t.Errorf("%v, want %v", err, row.want)
			}
		})
	}
}

// TestRecvMemory: a length alone, without the bytes, costs no more than its bound.
func TestRecvMemory(t *testing.T) {
	c := NewConn(strings.NewReader(raw(byte(KindLaunch), 0, 0, 0, MaxLaunch, "x")), nil)
	if _, err := c.Recv(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatal(err)
	}
	if cap(c.buf) > MaxLaunch {
		t.Errorf("%d bytes", cap(c.buf))
	}
}

func TestConcurrentSend(t *testing.T) {
	const senders, each = 8, 200
	r, w := io.Pipe()
	c := NewConn(nil, w)
	var wg sync.WaitGroup
	for i := range senders {
		wg.Go(func() {
			payload := bytes.Repeat([]byte{byte(i)}, 1+i*97)
			for range each {
				if err := c.Send(KindData, Stdout, payload); err != nil {
					t.Error(err)
				}
			}
		})
	}
	go func() {
		wg.Wait()
		w.Close()
	}()
	in := NewConn(r, nil)
	count := map[byte]int{}
	for {
		f, err := in.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		sender := f.Payload[0]
		if want := bytes.Repeat([]byte{sender}, 1+int(sender)*97); !bytes.Equal(f.Payload, want) {
			t.Fatalf("frames of sender %d are mixed up", sender)
		}
		count[sender]++
	}
	for i := range senders {
		if count[byte(i)] != each {
			t.Errorf("sender %d: %d frames", i, count[byte(i)])
		}
	}
}

// shortWriter writes a part of the first frame and works later.
type shortWriter struct{ calls int }

var errShort = errors.New("short write")

func (w *shortWriter) Write(p []byte) (int, error) {
	if w.calls++; w.calls == 1 {
		return len(p) / 2, errShort
	}
	return len(p), nil
}

func TestSendAfterFailedWrite(t *testing.T) {
	w := &shortWriter{}
	c := NewConn(nil, w)
	for range 2 {
		if err := c.Send(KindProbe, 0, nil); !errors.Is(err, errShort) {
			t.Errorf("%v", err)
		}
	}
	if w.calls != 1 {
		t.Errorf("%d writes", w.calls)
	}
}

func TestSendJSONUnencodable(t *testing.T) {
	var out bytes.Buffer
	if err := NewConn(nil, &out).SendJSON(KindExit, func() {}); err == nil || out.Len() > 0 {
		t.Errorf("%v, %d bytes", err, out.Len())
	}
}

func TestJSONErrors(t *testing.T) {
	for _, in := range []string{
		"", "null", "[]", "0", `"x"`, "{", "{} {}", `{"code":"1"}`, `{"code":1e99}`,
		`{"x":` + strings.Repeat("[", 20000) + strings.Repeat("]", 20000) + "}",
	} {
		var e Exit
		if err := (Frame{Kind: KindExit, Payload: []byte(in)}).JSON(&e); !errors.Is(err, ErrProtocol) {
			t.Errorf("%.20q: %v", in, err)
		}
	}
}

// TestLaunchBytes: what execve can be given arrives byte for byte.
func TestLaunchBytes(t *testing.T) {
	var all strings.Builder
	for b := 1; b < 256; b++ {
		all.WriteByte(byte(b))
	}
	want := Launch{
		Args: []string{"sh", "", all.String(), "\xff\xfe", "a\nb \"c\" \\ =é ", "<&>\u2028"},
		Env:  []string{"A=" + all.String(), "EMPTY="}, Dir: "/workspace", RuntimeDir: "/run/user/1",
		Terminal: &Size{Rows: 24, Cols: 80},
	}
	r, w := io.Pipe()
	go func() {
		_ = NewConn(nil, w).SendJSON(KindLaunch, want)
		w.Close()
	}()
	f, err := NewConn(r, nil).Recv()
	if err != nil {
		t.Fatal(err)
	}
	var got Launch
	if err := f.JSON(&got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestUint32(t *testing.T) {
	var out bytes.Buffer
	if err := NewConn(nil, &out).SendUint32(KindSignal, 0, 0xfffffffe); err != nil {
		t.Fatal(err)
	}
	f, err := NewConn(&out, nil).Recv()
	if err != nil {
		t.Fatal(err)
	}
	if n, err := f.Uint32(); n != 0xfffffffe || err != nil {
		t.Errorf("%d %v", n, err)
	}
	if _, err := (Frame{Kind: KindSignal, Payload: []byte{1}}).Uint32(); !errors.Is(err, ErrProtocol) {
		t.Errorf("%v", err)
	}
}

func TestSize(t *testing.T) {
	for _, s := range []Size{{}, {Rows: 1}, {Cols: 1}, {Rows: 24, Cols: 80}, {Rows: 0xffff, Cols: 0xfffe}} {
		if got := SizeOf(s.Packed()); got != s {
			t.Errorf("%+v became %+v", s, got)
		}
	}
}

func TestExitStatus(t *testing.T) {
	for code := range 256 {
		if got, err := (Exit{Code: code}).Status(); got != code || err != nil {
			t.Errorf("code %d: %d %v", code, got, err)
		}
	}
	for sig := 1; sig <= 64; sig++ {
		if got, err := (Exit{Code: -1, Signal: sig}).Status(); got != 128+sig || err != nil {
			t.Errorf("signal %d: %d %v", sig, got, err)
		}
	}
	for _, e := range []Exit{{Code: -1}, {Code: 256}, {Code: -2}, {Code: 0, Signal: 9}, {Code: -1, Signal: -1}, {Code: -1, Signal: 65}} {
		if got, err := e.Status(); !errors.Is(err, ErrProtocol) {
			t.Errorf("%+v: %d %v", e, got, err)
		}
	}
}
