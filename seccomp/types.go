// Package seccomp is the system call policy: compiled from the harness file,
// rendered for an engine, checked with libseccomp.
package seccomp
