package netpolicy

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// ErrLogOpen is VerifyLog's for a log that holds as far as it goes and has no last
// line: its run still goes on, its agentshim was killed or could not write on, or
// lines were cut off.
var ErrLogOpen = errors.New("no last line: the run still goes on, or ended without one, or lines were cut off")

// LogError is the first line of a log that is not as it was written.
type LogError struct {
	Line    uint64
	Problem string
}

// Error names the line.
func (e *LogError) Error() string { return fmt.Sprintf("line %d: %s", e.Line, e.Problem) }

// VerifyLog reads a log to its end and tells whether it is whole: every line in its
// only form and order, of one run, with the digest of the line before it, and the
// totals of the last line those of the others. A run and heads that are not empty
// must be the log's. The error is a *LogError, ErrLogOpen, or the reader's.
//
// Without a head from elsewhere, a log that somebody wrote anew from some line on
// is whole.
func VerifyLog(r io.Reader, run string, heads ...string) (Head, error) {
	return ReadLog(r, func(LogLine) {}, run, heads...)
}

// ReadLog is VerifyLog that also gives each line, as soon as it is known to belong behind the
// one before. Only without an error are the lines those that were written.
func ReadLog(r io.Reader, each func(LogLine), run string, heads ...string) (Head, error) {
	c := logCheck{run: run, each: each}
	in := bufio.NewReaderSize(r, maxLogLine)
	for {
		b, err := in.ReadSlice('\n')
		if errors.Is(err, io.EOF) && len(b) == 0 {
			break
		}
		if err != nil {
			return c.head, c.readError(err)
		}
		if err := c.line(bytes.TrimSuffix(b, []byte{'\n'})); err != nil {
			return c.head, err
		}
	}
	return c.head, c.end(heads)
}

// logCheck is the state between two lines.
type logCheck struct {
	run     string
	each    func(LogLine)
	head    Head
	written Totals
	stopped bool
}

func (c *logCheck) bad(format string, args ...any) error {
	return &LogError{Line: c.head.Lines + 1, Problem: fmt.Sprintf(format, args...)}
}

func (c *logCheck) readError(err error) error {
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return c.bad("longer than %d bytes", maxLogLine)
	case errors.Is(err, io.EOF):
		return c.bad("cut short")
	}
	return err
}

func (c *logCheck) line(b []byte) error {
	line, err := ParseLogLine(b)
	if err != nil {
		return c.bad("%v", err)
	}
	if err := c.place(line); err != nil {
		return err
	}
	if err := c.count(line); err != nil {
		return err
	}
	c.head.Lines, c.head.SHA256 = line.Seq, lineDigest(b)
	c.each(line)
	return nil
}

// place checks that the line belongs behind the one before.
func (c *logCheck) place(line LogLine) error {
	first := c.head.Lines == 0
	if first && c.run == "" {
		c.run = line.Run
	}
	switch {
	case c.stopped:
		return c.bad("it stands behind the last line")
	case first != (line.Event == logStart):
		return c.bad("event %+q; the first line, and no other, is %q", line.Event, logStart)
	case line.Run != c.run:
		return c.bad("it is of run %+q, not of %+q", line.Run, c.run)
	case line.Seq != c.head.Lines+1:
		return c.bad("its number is %d", line.Seq)
	case line.Prev != c.head.SHA256:
		return c.bad("it does not follow line %d: one of the two was changed", c.head.Lines)
	}
	return nil
}

func (c *logCheck) count(line LogLine) error {
	switch line.Event {
	case logStart, logMany, logFull:
	case logStop:
		c.stopped = true
		return c.stop(line.Totals)
	case EventEnd:
		c.written.Sent += line.Sent
		c.written.Received += line.Received
	default:
		if line.Verdict == VerdictAllow {
			c.written.Allowed++
		} else {
			c.written.Refused++
		}
	}
	return nil
}

// stop compares the totals with the lines: what was only counted has none.
func (c *logCheck) stop(t *Totals) error {
	w := c.written
	if t == nil || t.Allowed < w.Allowed || t.Refused < w.Refused || t.Sent < w.Sent || t.Received < w.Received ||
		t.Allowed-w.Allowed+t.Refused-w.Refused != t.Counted {
		return c.bad("its totals are not those of the lines before it")
	}
	c.head.Totals = *t
	return nil
}

func (c *logCheck) end(heads []string) error {
	if c.head.Lines == 0 {
		return c.bad("missing: the log is empty")
	}
	for _, head := range heads {
		if head != "" && head != c.head.SHA256 {
			return &LogError{Line: c.head.Lines, Problem: fmt.Sprintf("the log ends here with head %s, and should with %s", c.head.SHA256, escape(head))}
		}
	}
	if !c.stopped {
		c.head.Totals = c.written
		return ErrLogOpen
	}
	return nil
}

// ParseLogLine reads one line, without its line feed. It takes the one form that a
// Log writes and nothing else: no other version, field, order, spacing or character.
func ParseLogLine(b []byte) (LogLine, error) {
	var line LogLine
	if err := json.Unmarshal(b, &line); err != nil {
		return LogLine{}, fmt.Errorf("no log line: %s", escape(err.Error()))
	}
	if line.V != LogVersion {
		return LogLine{}, fmt.Errorf("version %d is not known", line.V)
	}
	again, err := line.encode()
	if err != nil || !bytes.Equal(again, b) {
		return LogLine{}, errors.New("not written by agentshim")
	}
	return line, nil
}
