package mounts

import (
	"errors"
	"fmt"
	"strings"
)

// ErrSource says that a source can't be used as it stands on the host: it is
// missing, out of reach, or neither a folder nor a regular file.
var ErrSource = errors.New("mount source unusable")

// ErrRefused says that a mount is refused by policy, whatever the host allows.
var ErrRefused = errors.New("mount refused")

// Problem is one thing wrong with one mount. It unwraps to ErrSource,
// ErrRefused or ErrGit, and to the system's error where there was one.
type Problem struct {
	// Path is the JSON path in the harness file; $image.volumes[N] for the image's.
	Path string
	// Value is the host source or the container target that Path holds.
	Value string
	// Reason says what is wrong, Remedy what to do about it.
	Reason, Remedy string
	// Kind is ErrSource, ErrRefused or ErrGit; Err the system's error, or nil.
	Kind, Err error
}

func (p *Problem) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %q: %s", p.Path, p.Value, p.Reason)
	if p.Err != nil {
		fmt.Fprintf(&b, ": %v", p.Err)
	}
	if p.Remedy != "" {
		fmt.Fprintf(&b, "; %s", p.Remedy)
	}
	return b.String()
}

// Unwrap lets errors.Is find the sentinel and the system's error.
func (p *Problem) Unwrap() []error {
	if p.Err == nil {
		return []error{p.Kind}
	}
	return []error{p.Kind, p.Err}
}

func refuse(path, value, reason, remedy string) *Problem {
	return &Problem{Path: path, Value: value, Reason: reason, Remedy: remedy, Kind: ErrRefused}
}

// problems collects every problem, so that all are reported at once.
type problems []error

func (ps *problems) add(p *Problem) {
	if p != nil {
		*ps = append(*ps, p)
	}
}

func (ps problems) join() error { return errors.Join(ps...) }
