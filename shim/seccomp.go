package shim

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/seccomp"
	"github.com/agentshim/agentshim/spec"
)

// readSeccomp reads the system call profile that the harness file names. No link on its way
// may be an agent's making; spec.Compile judges what it holds.
func (p *prepared) readSeccomp() error {
	profile := p.job.Harness.Seccomp.Profile
	if !seccomp.IsFile(profile) {
		return nil
	}
	content, err := p.readHostFile(profile, seccomp.MaxFile)
	if err != nil {
		return &Error{
			Reason: ReasonPolicy, Msg: fmt.Sprintf("$.seccomp.profile: %q", profile), Err: err,
			Hint: `write "default", "nested", or the path of a file in Docker's format of at most 1 MiB`,
		}
	}
	p.host.SeccompFile = content
	return nil
}

// verifySeccomp has libseccomp compile the policy. A build without it goes on: the policy is the
// same, and a file's that is too long makes the engine's runtime fail before anything runs.
func (p *prepared) verifySeccomp() error {
	err := seccomp.Verify(p.plan.Seccomp)
	switch {
	case err == nil, errors.Is(err, seccomp.ErrNoLibseccomp):
		return nil
	case errors.Is(err, seccomp.ErrTooLong):
		return &Error{
			Reason: ReasonPolicy, Msg: fmt.Sprintf("$.seccomp.profile: %q", p.job.Harness.Seccomp.Profile), Err: err,
			Hint: "take rules with conditions on arguments out of the file, or architectures",
		}
	}
	return &Error{Reason: ReasonPolicy, Err: err, Hint: "this libseccomp does not take the system call policy: use the build's own"}
}

// SyscallPolicy is the system call policy of a job on this machine, without an engine: where
// the file leaves the engine open, Docker's flavour. It does not say whether the file accepts
// what it opens.
func SyscallPolicy(j Job) (*seccomp.Policy, error) {
	j = j.withDefaults()
	p := &prepared{job: j}
	p.host.Machine.Arch, p.host.Engine.Kind = runtime.GOARCH, j.Harness.Engine
	var err error
	if p.host.Mounts, err = mounts.Probe(j.Harness, mounts.ProbePaths{Home: homeFolder(j.getenv)}); err != nil {
		return nil, asError(err)
	}
	if err := p.readSeccomp(); err != nil {
		return nil, err
	}
	policy, err := spec.Seccomp(j.Harness, p.host)
	return policy, asError(err)
}
