package integration

import (
	"strings"
	"testing"
)

// TestHello is the thin run through all four set-ups.
func TestHello(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		r := s.sh(t, nil, "echo out; echo err >&2; exit 7")
		if r.Code != 7 || r.Stdout != "out\n" || !strings.HasSuffix(r.Stderr, "err\n") {
			t.Fatalf("%+v", r)
		}
		if left := s.containers(t); len(left) > 0 {
			t.Errorf("containers left: %v", left)
		}
	})
}
