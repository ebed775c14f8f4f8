package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// FuzzRecv: whatever arrives, Recv gives frames within their bounds that Send
// writes as the same bytes, and then one of its three errors.
func FuzzRecv(f *testing.F) {
	f.Add([]byte(raw(byte(KindData), 1, 0, 0, 3, "abc") + raw(byte(KindEOF), 1, 0, 0, 0, "")))
	f.Add([]byte(raw(byte(KindHello), 0, 0, 0, 2, "{}") + raw(byte(KindProbe), 0, 0, 0, 0, "")))
	f.Add([]byte(raw(byte(KindCredit), 0, 0, 0, 4, "\x00\x00\x00\x01")))
	f.Add([]byte(raw(byte(KindWindow), 0, 0, 0, 4, "\x00\x18\x00\x50")))
	f.Add([]byte(raw(byte(KindLaunch), 0, 0, 0, 0xffffffff, "")))
	f.Add([]byte(raw(byte(KindData), 3, 1, 1, 9, "abc")))
	f.Add([]byte(raw(byte(KindBack), 0, 0, 0, 2, "{}") + raw(byte(KindBackData), 0, 0, 0, 1, "x")))
	f.Add([]byte(raw(byte(KindExit), 0, 0, 0, 10, `{"code":0}`)))
	f.Add([]byte(raw(byte(KindCut), 0, 0x12, 0x34, 0, "") + raw(byte(KindFinish), 0, 0, 0, 0, "")))
	f.Add([]byte{9})
	f.Fuzz(func(t *testing.T, in []byte) {
		c := NewConn(bytes.NewReader(in), nil)
		var again bytes.Buffer
		back := NewConn(nil, &again)
		for {
			frame, err := c.Recv()
			if cap(c.buf) > MaxLaunch {
				t.Fatalf("%d bytes of memory", cap(c.buf))
			}
			if err != nil {
				if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, ErrProtocol) {
					t.Fatal(err)
				}
				break
			}
			if err := back.Of(frame.Step).Send(frame.Kind, frame.Stream, frame.Payload); err != nil {
				t.Fatalf("Recv took what Send refuses: %v", err)
			}
		}
		if !bytes.HasPrefix(in, again.Bytes()) {
			t.Error("frames differ from the bytes they came from")
		}
	})
}

// FuzzHello: every JSON message decodes to a value that survives another round, or
// fails with ErrProtocol.
func FuzzHello(f *testing.F) {
	for _, v := range []any{
		Hello{Version: 1, FDs: map[int]string{0: "pipe:[1]"}, Mounts: []Mount{{Target: "/"}}, UIDMap: [][3]uint32{{0, 1, 2}}},
		Exit{Code: -1, Signal: 9},
		Launch{Args: []string{"a\xff"}, Env: []string{"A=1"}, Terminal: &Size{Rows: 24, Cols: 80}},
		Refused{Reason: "workdir", Detail: "x"},
		Probed{UDP4: "ENETUNREACH"},
		File{Path: "/home/agent/x", Size: 1, WriteBack: true},
		Back{Path: "/home/agent/x", Size: 1},
		Back{Path: "/home/agent/x", Problem: "gone"},
	} {
		b, err := json.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"mounts":[{},{},{}],"groups":[1,1,1],"fds":{"-1":""}}`))
	f.Add([]byte(`{"fds":{"x":""}}`))
	f.Add([]byte(`{"x":[[[[[[[[]]]]]]]]}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		var hello Hello
		roundTrip(t, in, &hello, &Hello{})
		var exit Exit
		roundTrip(t, in, &exit, &Exit{})
		if code, err := exit.Status(); err == nil && (code < 0 || code > 192 && exit.Signal != 0 || code > 255) {
			t.Errorf("%+v has status %d", exit, code)
		}
		roundTrip(t, in, &Launch{}, &Launch{})
		roundTrip(t, in, &Refused{}, &Refused{})
		roundTrip(t, in, &Probed{}, &Probed{})
		roundTrip(t, in, &File{}, &File{})
		roundTrip(t, in, &Back{}, &Back{})
	})
}

func roundTrip(t *testing.T, in []byte, v, again any) {
	t.Helper()
	if err := (Frame{Kind: KindHello, Payload: in}).JSON(v); err != nil {
		if !errors.Is(err, ErrProtocol) {
			t.Fatal(err)
		}
		return
	}
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if err := (Frame{Payload: b}).JSON(again); err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	if diff := cmp.Diff(v, again, cmpopts.EquateEmpty()); diff != "" {
		t.Error(diff)
	}
}
