package main

import (
	"os"
	"sync/atomic"
	"syscall"

	"github.com/agentshim/agentshim/shim/wire"
)

// step is one harness with its streams: a run's only one, or one of a session's.
type step struct {
	id   uint16
	conn *wire.Conn
	// home is the folder that its files are below.
	home string

	file *homeFile
	// backs are the paths of the home's files to send back, files those that go with
	// the step.
	backs, files []string
	// refused and launched are the receiving goroutine's.
	refused, launched bool
	// pid is the harness's, 0 until it runs.
	pid      atomic.Int64
	stdin    *wire.Sink
	outputs  [3]*wire.Source // by stream; Stdin is unused, with a terminal Stderr too
	terminal *terminal
	// over says that no frame has an effect any more.
	over atomic.Bool
	// watch is a session's step's.
	watch watch
}

func newStep(conn *wire.Conn, id uint16) *step {
	return &step{id: id, conn: conn.Of(id), home: wire.HomeDir}
}

// begin makes the next file of the home. One of a session's step goes with it.
func (s *step) begin(file wire.File) *wire.Refused {
	refused := s.file.complete()
	if refused == nil {
		s.file, refused = createHomeFile(s.home, file)
	}
	if refused != nil {
		return refused
	}
	if s.id != 0 && !file.BackOnly {
		s.files = append(s.files, file.Path)
	}
	if file.WriteBack {
		s.backs = append(s.backs, file.Path)
	}
	return nil
}

// attach makes the ends of the streams' flow control.
func (s *step) attach(p *streams) {
	s.terminal = p.terminal
	s.stdin = wire.NewSink(s.conn, wire.Stdin)
	for stream := range p.outputs() {
		s.outputs[stream] = wire.NewSource(s.conn, stream)
	}
}

// pumped are the outputs on their way.
type pumped struct {
	outputs map[uint8]*output
	done    chan error
}

// pump begins to carry the harness's streams.
func (s *step) pump(p *streams) pumped {
	w := pumped{outputs: p.outputs(), done: make(chan error, 2)}
	for stream, o := range w.outputs {
		source := s.outputs[stream]
		go func() { w.done <- source.Run(o) }()
	}
	go func() {
		// EPIPE: the harness closed its input; the rest is dropped.
		_ = s.stdin.Run(p.ends[wire.Stdin])
		if s.terminal == nil {
			p.ends[wire.Stdin].Close()
		}
	}()
	return w
}

// drain sends what is left of the outputs of a harness none of whose processes is left.
func (s *step) drain(p *streams, w pumped) {
	if p.terminal != nil {
		p.terminal.harness.Close()
	}
	for _, o := range w.outputs {
		o.end()
	}
	for range w.outputs {
		if err := <-w.done; err != nil {
			fatal("output", err)
		}
	}
}

// giveUp keeps output that nobody takes from holding up the step's end.
func (s *step) giveUp() {
	for _, source := range s.outputs {
		if source != nil {
			source.Close()
		}
	}
}

// stream handles a running harness's frames.
func (s *step) stream(f wire.Frame) error {
	switch f.Kind {
	case wire.KindData:
		if f.Stream != wire.Stdin {
			return unexpected(f)
		}
		return s.stdin.Put(f.Payload)
	case wire.KindEOF:
		if f.Stream != wire.Stdin {
			return unexpected(f)
		}
		s.stdin.CloseWrite()
		return nil
	}
	n, err := f.Uint32()
	if err != nil {
		return err
	}
	switch f.Kind {
	case wire.KindCredit:
		if s.outputs[f.Stream] == nil {
			return unexpected(f)
		}
		return s.outputs[f.Stream].Grant(n)
	case wire.KindWindow:
		if s.terminal == nil {
			return unexpected(f)
		}
		// EIO: the terminal has ended with its session's leader.
		_ = s.terminal.resize(wire.SizeOf(n))
	default:
		s.signal(syscall.Signal(n))
	}
	return nil
}

// signal reaches the process group that the harness leads.
func (s *step) signal(sig syscall.Signal) {
	if pid := int(s.pid.Load()); pid > 0 {
		_ = syscall.Kill(-pid, sig) // ESRCH: it has just ended
	}
}

// removeFiles removes what was delivered for this step alone. What the agent did to
// it in the meantime is the agent's.
func (s *step) removeFiles() {
	root, err := os.OpenRoot(s.home)
	if err != nil {
		return
	}
	defer root.Close()
	for _, path := range s.files {
		_ = root.Remove(path[len(s.home)+1:])
	}
}
