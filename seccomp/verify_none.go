//go:build !cgo || !libseccomp

package seccomp

// Verify needs libseccomp, which this binary does not have: ErrNoLibseccomp.
func Verify(*Policy) error { return ErrNoLibseccomp }
