//go:build !cgo || !libseccomp

package seccomp

import (
	"errors"
	"testing"
)

func TestVerifyWithoutLibseccomp(t *testing.T) {
	if err := Verify(mustCompile(t, targets["amd64-docker"])); !errors.Is(err, ErrNoLibseccomp) {
		t.Errorf("error %v, want %v", err, ErrNoLibseccomp)
	}
}
