//go:build !cgo || !libseccomp

package seccomp

// Verify needs libseccomp, which this binary does not have: ErrNoLibseccomp.
func Verify(*Policy) error { return ErrNoLibseccomp }

// BPF needs libseccomp, as Verify.
func BPF(*Policy) ([]byte, error) { return nil, ErrNoLibseccomp }

// PFC needs libseccomp, as Verify.
func PFC(*Policy) ([]byte, error) { return nil, ErrNoLibseccomp }

// Number needs libseccomp: false.
func Number(string, string) (int, bool) { return 0, false }
