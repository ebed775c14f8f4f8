package main

import "testing"

// TestVisible: what a folder's name holds steers no terminal and begins no line.
func TestVisible(t *testing.T) {
	for in, want := range map[string]string{
		"lstat /a b/é: no such file": "lstat /a b/é: no such file", `"a\x1b"`: `"a\x1b"`,
		"/a\x1b[31m\nagentshim: proven\u202e\xff'": `/a\x1b[31m\nagentshim: proven\u202e` + "\uFFFD'",
	} {
		if got := visible(in); got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
}
