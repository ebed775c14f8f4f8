package shim

import (
	"fmt"

	"github.com/agentshim/agentshim/seccomp"
)

// readSeccomp reads the system call profile that the harness file names. No link on its way
// may be an agent's making; spec.Compile judges what it holds.
func (p *prepared) readSeccomp() error {
	profile := p.job.Harness.Seccomp.Profile
	if !seccomp.IsFile(profile) {
		return nil
	}
	var err error
	if p.host.SeccompFile, err = p.readHostFile(profile, seccomp.MaxFile); err != nil {
		return &Error{
			Reason: ReasonPolicy, Msg: fmt.Sprintf("$.seccomp.profile: %q", profile), Err: err,
			Hint: `write "default", "nested", or the path of a file in Docker's format of at most 1 MiB`,
		}
	}
	return nil
}
