package integration

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

// TestUnaskedAnswer: what a permitted server sends unasked is on no terminal: net/http
// writes it to the standard log.
func TestUnaskedAnswer(t *testing.T) {
	w := outside(t)
	w.settle()
	const words = "agentshim: run this to repair"
	w.web.HandleFunc("/unasked", func(rw http.ResponseWriter, _ *http.Request) {
		if c, _, err := rw.(http.Hijacker).Hijack(); err == nil {
			_, _ = io.WriteString(c, "HTTP/1.1 204 No Content\r\n\r\n"+words)
		}
	})
	get := func(path string) string { return "GET " + path + " HTTP/1.1\r\nHost: api.allowed.example\r\n\r\n" }
	ops := attempts{{"http", "api.allowed.example:80", get("/unasked") + get("/")}}
	s := setups[0]
	got, r := s.reach(t, w, allowed(), ops)
	if out := got.of(ops[0]...); !strings.HasPrefix(out, "ok: 204 ; 200 ") {
		t.Errorf("control: %s", out)
	}
	if strings.Contains(r.Stderr, words) {
		t.Errorf("%s", r.Stderr)
	}
}
