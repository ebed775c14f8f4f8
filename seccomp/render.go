package seccomp

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// profile is the engines' file format, Docker's, as far as it is used here. It has
// architectures and never archMap, which engines refuse together, and neither
// includes nor excludes: nothing is left for an engine to resolve.
type profile struct {
	DefaultAction   oci.LinuxSeccompAction `json:"defaultAction"`
	DefaultErrnoRet *uint                  `json:"defaultErrnoRet,omitempty"`
	Architectures   []oci.Arch             `json:"architectures"`
	Syscalls        []profileRule          `json:"syscalls"`
}

type profileRule struct {
	Names    []string               `json:"names"`
	Action   oci.LinuxSeccompAction `json:"action"`
	ErrnoRet *uint                  `json:"errnoRet,omitempty"`
	Args     []oci.LinuxSeccompArg  `json:"args,omitempty"`
	Comment  string                 `json:"comment"`
}

// OCI returns linux.seccomp of the runtime spec. Where the engine ignores
// defaultErrnoRet it is absent, as in the bundle such an engine writes.
func (p *Policy) OCI() *oci.LinuxSeccomp {
	s := &oci.LinuxSeccomp{
		DefaultAction:   oci.ActErrno,
		DefaultErrnoRet: p.defaultErrnoRet(),
		Architectures:   slices.Clone(p.arches),
	}
	for _, r := range p.rules {
		s.Syscalls = append(s.Syscalls, oci.LinuxSyscall{
			Names:    slices.Clone(r.names),
			Action:   r.clause.action,
			ErrnoRet: r.clause.errnoRet(),
			Args:     slices.Clone(r.clause.args),
		})
	}
	return s
}

// Profile returns the file for `--security-opt seccomp=FILE`: the rules of OCI
// with their reasons as comments, indented, ending in a newline.
func (p *Policy) Profile() []byte {
	out := profile{
		DefaultAction:   oci.ActErrno,
		DefaultErrnoRet: p.defaultErrnoRet(),
		Architectures:   p.arches,
	}
	for _, r := range p.rules {
		out.Syscalls = append(out.Syscalls, profileRule{r.names, r.clause.action, r.clause.errnoRet(), r.clause.args, r.reason})
	}
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(out); err != nil {
		panic(fmt.Sprintf("seccomp profile of plain strings and numbers: %v", err))
	}
	return buf.Bytes()
}

// Target is what the policy was compiled for.
func (p *Policy) Target() Target { return p.target }

// Digest returns the SHA-256 of Profile in hexadecimal.
func (p *Policy) Digest() string {
	sum := sha256.Sum256(p.Profile())
	return hex.EncodeToString(sum[:])
}

func (p *Policy) defaultErrnoRet() *uint {
	if p.target.Docker {
		return nil
	}
	errno := p.defaultErrno
	return &errno
}

func (c clause) errnoRet() *uint {
	if c.action != oci.ActErrno {
		return nil
	}
	errno := c.errno
	return &errno
}
