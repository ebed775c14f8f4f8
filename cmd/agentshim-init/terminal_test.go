package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/shim/wire"
)

// terminal launches a shell on a terminal.
func (p *peer) terminal(size wire.Size, script string) {
	p.t.Helper()
	l := launchOf("sh", "-c", script)
	l.Terminal = &size
	p.sendJSON(wire.KindLaunch, l)
	p.recv(wire.KindStarted, nil)
}

// until takes output up to text.
func (p *peer) until(text string) string {
	p.t.Helper()
	var got strings.Builder
	for !strings.Contains(got.String(), text) {
		f, err := p.conn.Recv()
		if err != nil || f.Kind != wire.KindData || f.Stream != wire.Stdout {
			p.t.Fatalf("frame kind %d %q, %v, after %q: %s", f.Kind, f.Payload, err, got.String(), p.stderr.String())
		}
		got.Write(f.Payload)
	}
	return got.String()
}

// TestTerminal: the three streams are one terminal, the controlling one, of the
// right size from the start; its size follows window frames.
func TestTerminal(t *testing.T) {
	p := start(t)
	p.terminal(wire.Size{Rows: 31, Cols: 97}, `stty size; trap 'stty size; exit 6' WINCH
		test -t 0 && test -t 1 && test -t 2 && echo terminals >/dev/tty
		echo error >&2; ps -o pid=,sid=,tpgid= -p $$; echo ready; while :; do sleep 0.05; done`)
	got := p.until("ready\r\n")
	if !strings.HasPrefix(got, "31 97\r\nterminals\r\nerror\r\n") {
		t.Errorf("%q", got)
	}
	var pid, session, foreground int
	lines := strings.Split(got, "\r\n")
	if _, err := fmt.Sscan(lines[3], &pid, &session, &foreground); err != nil || pid != session || pid != foreground {
		t.Errorf("pid, session and foreground group: %q %v", lines[3], err)
	}
	if err := p.conn.SendUint32(wire.KindWindow, 0, wire.Size{Rows: 32, Cols: 98}.Packed()); err != nil {
		t.Fatal(err)
	}
	if exit, out, stderr := p.finish(); exit.Code != 6 || out != "32 98\r\n" || stderr != "" {
		t.Errorf("%+v %q %q", exit, out, stderr)
	}
}

// TestTerminalInterrupt: a control character becomes a signal in the terminal alone.
func TestTerminalInterrupt(t *testing.T) {
	p := start(t)
	p.terminal(wire.Size{}, `trap 'echo caught; exit 4' INT; echo ready; while :; do sleep 0.05; done`)
	p.until("ready\r\n")
	p.send(wire.KindData, wire.Stdin, "\x03")
	if exit, out, _ := p.finish(); exit.Code != 4 || !strings.HasSuffix(out, "caught\r\n") {
		t.Errorf("%+v %q", exit, out)
	}
}

// TestTerminalOutput: all of it arrives, also what is written just before the end,
// and the end of input is no end of the terminal.
func TestTerminalOutput(t *testing.T) {
	p := start(t)
	p.terminal(wire.Size{}, `stty -onlcr; head -c 150000 /dev/zero | tr '\0' x; printf end`)
	p.send(wire.KindEOF, wire.Stdin, "")
	if exit, out, _ := p.finish(); exit.Code != 0 || out != strings.Repeat("x", 150000)+"end" {
		t.Errorf("%+v, %d bytes", exit, len(out))
	}
}

// TestTerminalReopened: a harness without any open stream can open its terminal again.
func TestTerminalReopened(t *testing.T) {
	p := start(t)
	p.terminal(wire.Size{}, `exec <&- >&- 2>&-; sleep 0.3; echo again >/dev/tty; exit 9`)
	if exit, out, _ := p.finish(); exit.Code != 9 || out != "again\r\n" {
		t.Errorf("%+v %q", exit, out)
	}
}

// TestTerminalHeld: a terminal that someone outside the container holds ends with
// the harness.
func TestTerminalHeld(t *testing.T) {
	p := start(t)
	p.terminal(wire.Size{}, `tty; read line; echo bye`)
	name := strings.TrimSpace(p.until("\r\n"))
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	p.send(wire.KindData, wire.Stdin, "\n")
	begin := time.Now()
	if exit, out, _ := p.finish(); exit.Code != 0 || out != "\r\nbye\r\n" || time.Since(begin) > 5*time.Second {
		t.Errorf("%+v %q after %v", exit, out, time.Since(begin))
	}
}
