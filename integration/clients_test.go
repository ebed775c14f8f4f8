package integration

import (
	"crypto/ed25519"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/crypto/ssh"
)

// client is a program that knows nothing of a proxy: what it does where it may, and
// where it may not. Both are commands of a shell; their last lines are compared.
type client struct {
	name         string
	may, want    string
	mayNot, told string
	// control is what mayNot gives where no policy is; empty where the machine may not
	// have the program.
	control string
}

// clients use /world/ca.pem, each by its own option.
func clients() []client {
	const (
		curl   = "curl -sS --max-time 20 --cacert /world/ca.pem "
		wget   = "wget -q -T 20 -t 1 -O - --ca-certificate=/world/ca.pem "
		node   = `NODE_EXTRA_CA_CERTS=/world/ca.pem node -e 'fetch(process.argv[1]).then(r => r.text()).then(console.log, e => { console.log(e.cause.code); process.exit(1) })' `
		python = `SSL_CERT_FILE=/world/ca.pem python3 -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode().strip())' `
		addrs  = `python3 -c 'import socket, sys; print(len(socket.getaddrinfo(sys.argv[1], 443, 0, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)) > 0)' `
		clone  = `cd "$(mktemp -d)" && git -c http.sslCAInfo=/world/ca.pem clone -q `
		read   = " got && cat got/file"
		keys   = "export GIT_SSH_COMMAND='ssh -F none -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null'; "
		npm    = `cd "$(mktemp -d)" && npm_config_cafile=/world/ca.pem npm_config_update_notifier=false npm install --silent --no-audit --no-fund --fetch-retries=0 --registry https://api.allowed.example/npm/ `
		api    = "https://api.allowed.example/"
		evil   = "https://evil.example/"
		got    = "ok: world sni=api.allowed.example host=api.allowed.example*"
		leaked = "ok: world sni=evil.example host=evil.example*"
	)
	return []client{
		{"curl", curl + api, got, curl + evil, "ok: exit 6 *", leaked},
		{"curl, another port", curl + "http://api.allowed.example/", "ok: world sni=none*", curl + "https://api.allowed.example:8443/", "ok: exit 35 *|ok: exit 7 *", "ok: world *"},
		{"curl, A25", "NO_PROXY='*' https_proxy=http://127.0.0.1:9 " + curl + "--noproxy '*' " + api, got, "https_proxy=http://evil.example:80 " + curl + "--noproxy '*' " + evil, "ok: exit 6 *", leaked},
		{"curl, IPv6 asked for", curl + "-4 " + api, got, curl + "-6 " + api, "ok: exit *", "ok: world *"},
		{"curl, A35 redirect", curl + "-L 'https://api.allowed.example/redirect?to=/'", got, curl + "-L 'https://api.allowed.example/redirect?to=https://evil.example/'", "ok: exit 6 *", leaked},
		{"wget", wget + api, got, wget + evil, "ok: exit 4 *", ""},
		{"node fetch", node + api, got, node + evil, "ok: exit 1 ENOTFOUND", ""},
		{"python urllib", python + api, got, python + evil, "ok: exit 1 *", leaked},
		{"AI_ADDRCONFIG", addrs + "api.allowed.example", "ok: True", addrs + "evil.example", "ok: exit 1 *", "ok: True"},
		{"git, https", clone + "https://api.allowed.example/git/repo.git" + read, "ok: content", clone + "https://evil.example/git/repo.git" + read, "ok: exit 128 *", "ok: content"},
		{"git, ssh", keys + clone + "ssh://git@ssh.allowed.example/repo.git" + read, "ok: content", keys + clone + "ssh://git@evil.example/repo.git" + read, "ok: exit 128 *", ""},
		{"npm", npm + "tiny && cat node_modules/tiny/index.js", "ok: tiny content", npm + "https://evil.example/npm/tiny/-/tiny-1.0.0.tgz && cat node_modules/tiny/index.js", "ok: exit *", ""},
		{"apt", apt("api.allowed.example"), "ok: deb content", apt("evil.example"), "ok: exit *", ""},
		{"Go", "/reach/reach '[[\"fetch\",\"" + api + "\",\"/world/ca.pem\"]]'", `ok: ["ok: world sni=api.allowed.example*`, "/reach/reach '[[\"fetch\",\"" + evil + "\",\"/world/ca.pem\"]]'", `ok: ["NXDOMAIN"]`, `ok: ["ok: world*`},
		{"musl", "/world/musl db.allowed.example 5432", "ok: got x", "/world/musl evil.example 5432", "ok: exit 1 Name does not resolve", "ok: got x"},
	}
}

// apt updates from a repository of the host, and takes a package from it.
func apt(host string) string {
	return `d=$(mktemp -d) && cd "$d" && mkdir -p state/lists/partial cache/archives/partial &&
echo "deb [trusted=yes] http://` + host + `/apt ./" >sources.list &&
o="-o Dir::State=$d/state -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache=$d/cache -o Dir::Etc::sourcelist=$d/sources.list -o Dir::Etc::sourceparts=/none -o Debug::NoLocking=1 -o APT::Sandbox::User= -o APT::Update::Error-Mode=any -o Acquire::Retries=0" &&
apt-get -q $o update >log 2>&1 && apt-get -q $o download tiny >log 2>&1 && dpkg-deb -x tiny_*.deb out && cat out/tiny`
}

// clientWorld adds to the world what the clients fetch.
var clientWorld = sync.OnceValue(func() error {
	w, err := sharedWorld()
	if err != nil {
		return err
	}
	return errors.Join(w.makeRepository(), w.makePackages(), w.makeArchive(), w.makeMusl())
})

func runIn(dir, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(
		os.Environ(), "GIT_AUTHOR_NAME=w", "GIT_AUTHOR_EMAIL=w@world.example", "GIT_COMMITTER_NAME=w",
		"GIT_COMMITTER_EMAIL=w@world.example", "GIT_CONFIG_GLOBAL=/dev/null",
	)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %q: %w\n%s", name, args, err, out)
	}
	return nil
}

// makeRepository serves a git repository, as files and over ssh.
func (w *world) makeRepository() error {
	dir := filepath.Join(w.dir, "git")
	work := filepath.Join(dir, "work")
	if err := os.MkdirAll(work, 0o755); err != nil {
		return err
	}
	err := errors.Join(
		os.WriteFile(filepath.Join(work, "file"), []byte("content\n"), 0o644), runIn(work, "git", "init", "-q"), runIn(work, "git", "add", "file"),
		runIn(work, "git", "commit", "-q", "-m", "file"), runIn(dir, "git", "clone", "-q", "--bare", "work", "repo.git"),
		runIn(filepath.Join(dir, "repo.git"), "git", "update-server-info"),
	)
	w.web.Handle("/git/", http.StripPrefix("/git/", http.FileServer(http.Dir(dir))))
	return err
}

// makePackages serves an npm registry of one package.
func (w *world) makePackages() error {
	dir := filepath.Join(w.dir, "npm", "package")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	err := errors.Join(
		os.WriteFile(filepath.Join(dir, "package.json"), []byte(`{"name":"tiny","version":"1.0.0"}`), 0o644),
		os.WriteFile(filepath.Join(dir, "index.js"), []byte("tiny content\n"), 0o644),
		runIn(filepath.Dir(dir), "tar", "-czf", "tiny.tgz", "package"),
	)
	b, readErr := os.ReadFile(filepath.Join(w.dir, "npm", "tiny.tgz"))
	sum := sha1.Sum(b)
	w.web.HandleFunc("/npm/tiny", func(rw http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(rw).Encode(map[string]any{
			"name": "tiny", "dist-tags": map[string]string{"latest": "1.0.0"},
			"versions": map[string]any{"1.0.0": map[string]any{
				"name": "tiny", "version": "1.0.0",
				"dist": map[string]string{"shasum": hex.EncodeToString(sum[:]), "tarball": "https://" + r.Host + "/npm/tiny/-/tiny-1.0.0.tgz"},
			}},
		})
	})
	w.web.HandleFunc("/npm/tiny/-/tiny-1.0.0.tgz", func(rw http.ResponseWriter, _ *http.Request) { _, _ = rw.Write(b) })
	return errors.Join(err, readErr)
}

// makeArchive serves a Debian repository of one package.
func (w *world) makeArchive() error {
	dir := filepath.Join(w.dir, "apt")
	control := filepath.Join(dir, "root", "DEBIAN", "control")
	if err := os.MkdirAll(filepath.Dir(control), 0o755); err != nil {
		return err
	}
	const fields = "Package: tiny\nVersion: 1.0\nArchitecture: all\nMaintainer: w <w@world.example>\nDescription: tiny\n"
	err := errors.Join(
		os.WriteFile(control, []byte(fields), 0o644),
		os.WriteFile(filepath.Join(dir, "root", "tiny"), []byte("deb content\n"), 0o644),
		runIn(dir, "dpkg-deb", "--root-owner-group", "-b", "root", "tiny_1.0_all.deb"),
	)
	if err != nil {
		return err
	}
	deb, err := os.ReadFile(filepath.Join(dir, "tiny_1.0_all.deb"))
	if err != nil {
		return err
	}
	list := fmt.Appendf(nil, "%sFilename: ./tiny_1.0_all.deb\nSize: %d\nSHA256: %x\n\n", fields, len(deb), sha256.Sum256(deb))
	release := fmt.Appendf(nil, "Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n %x %d Packages\n", sha256.Sum256(list), len(list))
	err = errors.Join(
		os.WriteFile(filepath.Join(dir, "Packages"), list, 0o644), os.WriteFile(filepath.Join(dir, "Release"), release, 0o644),
	)
	w.web.Handle("/apt/", http.StripPrefix("/apt/", http.FileServer(http.Dir(dir))))
	return err
}

// makeMusl builds testdata/musl against a libc that is not Debian's.
func (w *world) makeMusl() error {
	return runIn("testdata/musl", "musl-gcc", "-static", "-O1", "-o", filepath.Join(w.dir, "musl"), "main.c")
}

// serveSSH takes everybody and gives them the repository to read.
func (w *world) serveSSH(c net.Conn) {
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		return
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		return
	}
	conf := &ssh.ServerConfig{NoClientAuth: true}
	conf.AddHostKey(signer)
	_, channels, requests, err := ssh.NewServerConn(c, conf)
	if err != nil {
		return
	}
	go ssh.DiscardRequests(requests)
	for ch := range channels {
		channel, requests, err := ch.Accept()
		if err != nil {
			return
		}
		go w.uploadPack(channel, requests)
	}
}

func (w *world) uploadPack(c ssh.Channel, requests <-chan *ssh.Request) {
	defer c.Close()
	for r := range requests {
		if r.Type != "exec" {
			_ = r.Reply(r.Type == "env", nil)
			continue
		}
		_ = r.Reply(true, nil)
		cmd := exec.Command("git", "upload-pack", filepath.Join(w.dir, "git", "repo.git"))
		cmd.Stdin, cmd.Stdout = c, c
		status := []byte{0, 0, 0, 0}
		if cmd.Run() != nil {
			status[3] = 1
		}
		_, _ = c.SendRequest("exit-status", false, status)
		return
	}
}

// TestClients: A26, A25: programs that know of no proxy reach what they may and fail
// fast where they may not. The control is the same program on the caller's side.
func TestClients(t *testing.T) {
	w := outside(t)
	w.settle()
	if err := clientWorld(); err != nil {
		t.Fatal(err)
	}
	egress := allowed()
	list := clients()
	var ops, controls attempts
	for _, c := range list {
		ops = append(ops, []string{"run", "sh", "-c", c.may}, []string{"run", "sh", "-c", c.mayNot})
		controls = append(controls, []string{"run", "sh", "-c", w.onHost(t, c.mayNot)})
	}
	inTurn(t, func(t *testing.T, s setup) {
		file := s.write(t, reachFields(t, egress, spec{
			"image": "agentshim/clients:test",
			"mounts": []any{
				map[string]any{"source": mustReach(t), "target": "/reach"}, map[string]any{"source": w.dir, "target": "/world"},
			},
			"resources": map[string]any{"memoryMb": 2048},
		}))
		r := s.call(t, call{Net: w}, "exec", "--spec", file, "--", ops.json(t))
		got, control := endings(t, r, ops), w.plain(t, s, controls)
		for i, c := range list {
			if out := got.of(ops[2*i]...); !isOutcome(c.want, strings.TrimSuffix(out, " late")) {
				t.Errorf("%s, allowed: %s, want %s", c.name, out, c.want)
			}
			if out := got.of(ops[2*i+1]...); !isOutcome(c.told, strings.TrimSuffix(out, " late")) {
				t.Errorf("%s, refused: %s, want %s", c.name, out, c.told)
			}
			if out := strings.TrimSuffix(control.of(controls[i]...), " late"); c.control != "" && !isOutcome(c.control, out) {
				t.Errorf("%s, without a policy: %s, want %s", c.name, out, c.control)
			}
		}
		if t.Failed() {
			t.Log(r.Stderr)
		}
	})
}

// onHost is a command with the host's paths of what is mounted for the clients.
func (w *world) onHost(t *testing.T, command string) string {
	return strings.NewReplacer("/world/", w.dir+"/", "/reach/", mustReach(t)+"/").Replace(command)
}
