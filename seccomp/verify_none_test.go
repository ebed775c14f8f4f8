//go:build !cgo || !libseccomp

package seccomp

import (
	"errors"
	"testing"
)

func TestVerifyWithoutLibseccomp(t *testing.T) {
	p := mustCompile(t, targets["amd64-docker"])
	_, bpfErr := BPF(p)
	_, pfcErr := PFC(p)
	for _, err := range []error{Verify(p), bpfErr, pfcErr} {
		if !errors.Is(err, ErrNoLibseccomp) {
			t.Errorf("error %v, want %v", err, ErrNoLibseccomp)
		}
	}
	if nr, ok := Number("amd64", "read"); ok {
		t.Errorf("number %d", nr)
	}
}
