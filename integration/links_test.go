package integration

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/shim"
)

// TestLinksOfTheAgent: M13, A57. A link that an agent left in its workspace leads
// nothing into the next run. The control names the link from outside the workspace.
func TestLinksOfTheAgent(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		secret, ws := s.folder(t), s.folder(t)
		if err := errors.Join(
			os.WriteFile(filepath.Join(secret, "key"), []byte("KEY=s3cret"), 0o644),
			os.Symlink(secret, filepath.Join(ws, "data")),
		); err != nil {
			t.Fatal(err)
		}
		for name, c := range map[string]struct {
			fields func(dir string) spec
			reason shim.Reason
		}{
			"mount": {func(dir string) spec {
				return spec{"mounts": []any{map[string]any{"source": dir + "/data", "target": "/data"}}}
			}, shim.ReasonMount},
			"home file": {func(dir string) spec {
				return spec{"home": map[string]any{"files": []any{map[string]any{"source": dir + "/data/key", "target": "key"}}}}
			}, shim.ReasonMount},
			"prompt":   {func(dir string) spec { return spec{"promptFile": dir + "/data/key"} }, shim.ReasonPrompt},
			"env file": {func(dir string) spec { return spec{"envFiles": []string{dir + "/data/key"}} }, shim.ReasonEnvMissing},
		} {
			t.Run(name, func(t *testing.T) {
				fields := c.fields(ws)
				if name != "mount" {
					fields["harness"] = map[string]any{"binary": "true", "promptMode": "stdin"}
				}
				fields["workspace"] = map[string]any{"source": ws}
				r := s.call(t, call{}, "exec", "--spec", s.write(t, fields)).refused(t, c.reason)
				if !strings.Contains(r.Stderr, "a link that an agent may have made") || strings.Contains(r.Stderr, "s3cret") {
					t.Error(r.Stderr)
				}
				delete(fields, "workspace")
				s.call(t, call{}, "exec", "--spec", s.write(t, fields)).ok(t)
			})
		}
	})
}
