package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentshim/agentshim/shim"
)

// trusting are programs that say which certificates they trust in no option, and what each
// gives for a page of the world.
var trusting = []struct{ name, command string }{
	{"node", `node -e 'fetch(process.argv[1]).then(r => r.text()).then(console.log, e => { console.log(e.cause.code); process.exit(1) })' URL`},
	{"python", `python3 -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode().strip())' URL`},
	{"curl", `curl -sS --max-time 20 URL`},
	{"git", `cd "$(mktemp -d)" && git clone -q URLgit/repo.git got && echo "world $(cat got/file)"`},
	{"Go", `/reach/reach '[["fetch","URL"]]'`},
}

// TestCertificates: programs trust what caCertificates names besides the image's own. The
// control is each program without the variables that tell it.
func TestCertificates(t *testing.T) {
	w := outside(t)
	w.settle()
	if err := clientWorld(); err != nil {
		t.Fatal(err)
	}
	const without = "env -u NODE_EXTRA_CA_CERTS -u SSL_CERT_FILE -u REQUESTS_CA_BUNDLE -u CURL_CA_BUNDLE -u GIT_SSL_CAINFO "
	var ops attempts
	for _, c := range trusting {
		command := strings.ReplaceAll(c.command, "URL", "https://api.allowed.example/")
		ops = append(ops, []string{"run", "sh", "-c", command}, []string{"run", "sh", "-c", without + "sh -c '" + strings.ReplaceAll(command, "'", `'\''`) + "'"})
	}
	// The image's own stand in front of the one that is added.
	count := []string{"run", "sh", "-c", `cd ~/.agentshim-ca; cat /etc/ssl/certs/ca-certificates.crt > both 2>/dev/null; echo >> both; cat extra.pem >> both; cmp both bundle.pem && grep -c BEGIN extra.pem`}
	ops = append(ops, count)
	inTurn(t, func(t *testing.T, s setup) {
		file := s.write(t, reachFields(t, allowed(), spec{
			"image": "agentshim/clients:test", "caCertificates": []string{w.caFile()}, "resources": map[string]any{"memoryMb": 2048},
		}))
		r := s.call(t, call{Net: w}, "exec", "--spec", file, "--", ops.json(t))
		got := endings(t, r, ops)
		for i, c := range trusting {
			if out := got.of(ops[2*i]...); !strings.Contains(out, "world ") {
				t.Errorf("%s: %s", c.name, out)
			}
			if out := got.of(ops[2*i+1]...); strings.Contains(out, "world ") {
				t.Errorf("%s trusts it unasked: %s", c.name, out)
			}
		}
		if out := got.of(count...); !strings.HasPrefix(out, "ok: 1") {
			t.Errorf("the bundle: %s", out)
		}
		if t.Failed() {
			t.Log(r.Stderr)
		}
	})
	one(t, func(t *testing.T, s setup) {
		dir := s.private(t)
		key := filepath.Join(dir, "key.pem")
		place(t, key, []byte("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"), 0o600)
		s.chown(t, dir)
		for file, want := range map[string]shim.Reason{key: shim.ReasonSpecInvalid, filepath.Join(dir, "none.pem"): shim.ReasonEnvMissing, os.DevNull: shim.ReasonEnvMissing} {
			s.sh(t, spec{"caCertificates": []string{file}}, "true").refused(t, want)
		}
	})
}
