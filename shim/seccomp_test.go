package shim

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/seccomp"
)

// TestReadSeccomp: A84. A profile file is read whole or the run is refused; a link in a
// writable workspace is the agent's, the control one elsewhere.
func TestReadSeccomp(t *testing.T) {
	p := guardedJob(t, "profile.json")
	dir, outside := p.job.Harness.Dir, t.TempDir()
	real := filepath.Join(outside, "real.json")
	content := []byte(`{"defaultAction":"SCMP_ACT_ERRNO"}`)
	large := filepath.Join(outside, "large.json")
	for _, err := range []error{
		os.WriteFile(real, content, 0o600), os.WriteFile(large, make([]byte, seccomp.MaxFile+1), 0o600),
		os.Symlink(real, filepath.Join(dir, "link.json")), os.Symlink(real, filepath.Join(outside, "link.json")),
		unix.Mkfifo(filepath.Join(outside, "fifo"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name, profile string
		want          []byte
		err           error
	}{
		{"default", "default", nil, nil},
		{"nested", "nested", nil, nil},
		{"file", real, content, nil},
		{"link elsewhere", filepath.Join(outside, "link.json"), content, nil},
		{"link of the agent's", "link.json", nil, mounts.ErrAgentLink},
		{"missing", "none.json", nil, os.ErrNotExist},
		{"too large", large, nil, errTooLarge},
		{"FIFO", filepath.Join(outside, "fifo"), nil, ReasonPolicy},
		{"folder", outside, nil, ReasonPolicy},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := *p
			p.job.Harness.Seccomp.Profile = tc.profile
			err := p.readSeccomp()
			if !errors.Is(err, tc.err) || tc.err != nil && !errors.Is(err, ReasonPolicy) || !bytes.Equal(p.host.SeccompFile, tc.want) {
				t.Errorf("%d bytes, %v", len(p.host.SeccompFile), err)
			}
		})
	}
}

func TestSyscallPolicy(t *testing.T) {
	policy, err := SyscallPolicy(Job{Harness: harness.Harness{Engine: "podman", Seccomp: harness.Seccomp{Allow: []string{"ptrace"}}}})
	if err != nil || policy.Target().Docker || !policy.Decide("", "ptrace", [6]uint64{}).Allowed() {
		t.Errorf("%+v, %v", policy, err)
	}
	_, err = SyscallPolicy(Job{Harness: harness.Harness{Seccomp: harness.Seccomp{Allow: []string{"ptrce"}}}})
	if !errors.Is(err, ReasonPolicy) || !strings.Contains(HintOf(err), "ptrace") {
		t.Errorf("%v, hint %q", err, HintOf(err))
	}
}
