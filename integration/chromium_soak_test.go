//go:build soak

package integration

import (
	"strings"
	"testing"
)

// TestChromium: A07, a browser whose every hello has an encrypted part, or one that
// looks like it (GREASE), gets through where the entry says ech, and only there.
func TestChromium(t *testing.T) {
	w := outside(t)
	w.settle()
	page := func(url string) []string {
		return []string{"run", "sh", "-c", `chromium-headless-shell --no-sandbox --disable-gpu --disable-dev-shm-usage --ignore-certificate-errors --dump-dom ` + url + ` 2>/dev/null | grep -o 'world sni=[^ ]*' || echo nothing`}
	}
	open, closed := page("https://ech.allowed.example/"), page("https://api.allowed.example/")
	inTurn(t, func(t *testing.T, s setup) {
		file := s.write(t, reachFields(t, allowed(), spec{"image": "agentshim/chromium:test", "resources": map[string]any{"memoryMb": 3072}}))
		ops := attempts{open, closed}
		r := s.call(t, call{Net: w}, "exec", "--spec", file, "--", ops.json(t))
		got := endings(t, r, ops)
		if out := strings.TrimSuffix(got.of(open...), " late"); out != "ok: world sni=ech.allowed.example" {
			t.Errorf("with ech: %s\n%s", out, r.Stderr)
		}
		if out := strings.TrimSuffix(got.of(closed...), " late"); out != "ok: nothing" || !strings.Contains(r.Stderr, `"ech": true} to egress.allow`) {
			t.Errorf("without ech: %s\n%s", out, r.Stderr)
		}
	})
}

// TestChromiumSandbox: the browser starts with its own sandbox under the profile nested, and,
// the control, not under the default one.
func TestChromiumSandbox(t *testing.T) {
	page := []string{"run", "sh", "-c", `chromium-headless-shell --disable-gpu --disable-dev-shm-usage --dump-dom 'data:text/html,works' 2>&1 | grep -oE '>works<|No usable sandbox' | sort -u`}
	inTurn(t, func(t *testing.T, s setup) {
		for profile, want := range map[string]string{"nested": "ok: >works<", "default": "ok: No usable sandbox"} {
			got := endings(t, s.exec(t, s.write(t, reachFields(t, nil, spec{
				"image": "agentshim/chromium:test", "resources": map[string]any{"memoryMb": 3072},
				"seccomp": map[string]any{"profile": profile}, "accept": []string{"nested-seccomp", "rootless-cgroup-limits"},
			})), attempts{page}.json(t)), attempts{page})
			if out := strings.TrimSuffix(got.of(page...), " late"); out != want {
				t.Errorf("%s: %s, want %s", profile, out, want)
			}
		}
	})
}
