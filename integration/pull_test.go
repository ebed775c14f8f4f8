package integration

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/agentshim/agentshim/shim"
)

const (
	registryUser     = "alice"
	registryPassword = "dock-side"
	// registryHash is registryPassword by bcrypt, the one form the registry takes.
	registryHash = "$2b$04$06qu8fqfJ6yxm5BpN6EkXeFJnvuNpbWXG9RVUOUBQOkLpGMjkTwqq"
)

// registry is Debian's docker-registry on a loopback port, without TLS: Docker takes
// 127.0.0.0/8 so, Podman by a drop-in for that port.
type registry struct {
	addr string
	proc *exec.Cmd
	// login is a folder with a config.json that holds the user's login.
	login string
}

func startRegistry(t *testing.T, withLogin bool) *registry {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &registry{addr: listener.Addr().String()}
	listener.Close()
	dir := t.TempDir()
	config := fmt.Sprintf("version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: %s/data}}\nhttp: {addr: %q}\n", dir, r.addr)
	if withLogin {
		config += fmt.Sprintf("auth: {htpasswd: {realm: test, path: %s/htpasswd}}\n", dir)
	}
	mustWrite(t, filepath.Join(dir, "config.yml"), config)
	mustWrite(t, filepath.Join(dir, "htpasswd"), registryUser+":"+registryHash+"\n")
	dropIn := fmt.Sprintf("/etc/containers/registries.conf.d/agentshim-test-%s.conf", r.addr[strings.LastIndex(r.addr, ":")+1:])
	mustWrite(t, dropIn, fmt.Sprintf("[[registry]]\nlocation = %q\ninsecure = true\n", r.addr))
	t.Cleanup(func() { os.Remove(dropIn) })
	r.proc = exec.Command("docker-registry", "serve", filepath.Join(dir, "config.yml"))
	r.proc.Env = []string{"PATH=" + os.Getenv("PATH")}
	if err := r.proc.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.stop)
	r.login = loginFolder(t, r.addr)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		conn, err := net.Dial("tcp", r.addr)
		if err == nil {
			conn.Close()
			return r
		}
		if time.Now().After(deadline) {
			t.Fatalf("docker-registry does not listen: %v", err)
		}
	}
}

// stop ends the registry; its port refuses then.
func (r *registry) stop() {
	if r.proc.ProcessState == nil {
		_ = r.proc.Process.Kill() // ended already, if it is an error
		_ = r.proc.Wait()         // killed
	}
}

// loginFolder writes what `docker login` and `podman login` write. Its parents may be
// entered by every user of the set-ups.
func loginFolder(t *testing.T, addr string) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "agentshim-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	auth := base64.StdEncoding.EncodeToString([]byte(registryUser + ":" + registryPassword))
	b := []byte(mustJSON(t, map[string]any{"auths": map[string]any{addr: map[string]string{"auth": auth}}}))
	mustWrite(t, filepath.Join(dir, "config.json"), string(b))
	return dir
}

// env is the login as each engine's user has it.
func (r *registry) env() []string {
	return []string{"DOCKER_CONFIG=" + r.login, "REGISTRY_AUTH_FILE=" + filepath.Join(r.login, "config.json")}
}

func mustWrite(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// push puts an image whose /version holds version under name:1 into the registry,
// by the registry's own protocol: no engine's store has it afterwards.
func (r *registry) push(t *testing.T, name, version, arch string) {
	t.Helper()
	layer := imageTar(t, version)
	config := []byte(mustJSON(t, map[string]any{
		"os": "linux", "architecture": arch, "config": map[string]any{},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(layer)}},
	}))
	descriptor := func(media string, blob []byte) map[string]any {
		return map[string]any{"mediaType": media, "digest": digest(blob), "size": len(blob)}
	}
	manifest := []byte(mustJSON(t, map[string]any{
		"schemaVersion": 2, "mediaType": manifestType,
		"config": descriptor("application/vnd.docker.container.image.v1+json", config),
		"layers": []any{descriptor("application/vnd.docker.image.rootfs.diff.tar", layer)},
	}))
	for _, blob := range [][]byte{layer, config} {
		place := r.send(t, http.MethodPost, "http://"+r.addr+"/v2/"+name+"/blobs/uploads/", "", nil)
		r.send(t, http.MethodPut, place+"&digest="+digest(blob), "application/octet-stream", blob)
	}
	r.send(t, http.MethodPut, "http://"+r.addr+"/v2/"+name+"/manifests/1", manifestType, manifest)
}

const manifestType = "application/vnd.docker.distribution.manifest.v2+json"

// send makes one request as the user and gives the place that the answer names.
func (r *registry) send(t *testing.T, method, url, media string, body []byte) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.SetBasicAuth(registryUser, registryPassword)
	if media != "" {
		req.Header.Set("Content-Type", media)
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req) // no proxy
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000)) // for the message only
		t.Fatalf("%s %s: %s: %s", method, url, resp.Status, text)
	}
	return resp.Header.Get("Location")
}

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

func mustLookPath(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// imageTar is a root file system: the machine's static busybox as sh, and /version.
func imageTar(t *testing.T, version string) []byte {
	t.Helper()
	busybox, err := os.ReadFile(mustLookPath(t, "busybox"))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, dir := range []string{"bin/", "etc/", "tmp/"} {
		if err := w.WriteHeader(&tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []struct {
		name string
		data []byte
		mode int64
	}{{"bin/sh", busybox, 0o755}, {"version", []byte(version + "\n"), 0o644}} {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Typeflag: tar.TypeReg, Mode: f.mode, Size: int64(len(f.data))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(f.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// pulls runs the image's /version reader with a pull policy.
func (s setup) pulls(t *testing.T, c call, fields spec) result {
	t.Helper()
	return s.call(t, c, "exec", "--spec", s.write(t, fields), "--", "read v </version; echo $v")
}

// forget removes ref from the set-up's store, now and at the end.
func (s setup) forget(t *testing.T, ref string) {
	t.Helper()
	s.bare(t, "rmi", "--force", ref) // one that isn't there is as good
	t.Cleanup(func() { s.bare(t, "rmi", "--force", ref) })
}

func (r result) printed(t *testing.T, want string) {
	t.Helper()
	if r.ok(t).Stdout != want+"\n" {
		t.Fatalf("printed %q, want %q\nstderr: %s", r.Stdout, want, r.Stderr)
	}
}

func TestPullPolicies(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		r := startRegistry(t, false)
		ref, gone := r.addr+"/x:1", r.addr+"/x:none"
		s.forget(t, ref)
		r.push(t, "x", "one", runtime.GOARCH)
		with := func(ref, policy string) result {
			return s.pulls(t, call{}, spec{"image": ref, "pull": policy})
		}
		with(ref, "never").refused(t, shim.ReasonImageMissing)
		with(ref, "missing").printed(t, "one")
		with(ref, "never").printed(t, "one")
		r.push(t, "x", "two", runtime.GOARCH)
		with(ref, "missing").printed(t, "one") // the local one is enough
		with(ref, "always").printed(t, "two")
		r.push(t, "x", "three", runtime.GOARCH)
		with(ref, "fallback").printed(t, "three")
		for _, policy := range []string{"missing", "always"} {
			with(gone, policy).refused(t, shim.ReasonImageMissing)
		}
		r.stop()
		with(ref, "fallback").printed(t, "three")
		with(ref, "missing").printed(t, "three")
		with(ref, "always").refused(t, shim.ReasonPullFailed)
	})
}

func TestPullWithTheEnginesOwnLogin(t *testing.T) {
	each(t, func(t *testing.T, s setup) {
		r := startRegistry(t, true)
		ref := r.addr + "/private:1"
		s.forget(t, ref)
		r.push(t, "private", "secret", runtime.GOARCH)
		fields := spec{"image": ref, "pull": "always"}
		refused := s.pulls(t, call{}, fields).refused(t, shim.ReasonPullFailed)
		if want := s.engine + " login " + r.addr; !strings.Contains(refused.Stderr, want) {
			t.Errorf("stderr does not say %q: %s", want, refused.Stderr)
		}
		s.pulls(t, call{Env: r.env()}, fields).printed(t, "secret")
	})
}

// TestPullPlatform is L12: the wrong architecture is refused before anything starts.
func TestPullPlatform(t *testing.T) {
	other := map[string]string{"amd64": "arm64", "arm64": "amd64"}[runtime.GOARCH]
	each(t, func(t *testing.T, s setup) {
		r := startRegistry(t, false)
		foreign, own := r.addr+"/foreign:1", r.addr+"/own:1"
		s.forget(t, foreign)
		s.forget(t, own)
		r.push(t, "foreign", "foreign", other)
		r.push(t, "own", "own", runtime.GOARCH)
		refused := s.pulls(t, call{}, spec{"image": foreign, "pull": "always"}).refused(t, shim.ReasonImagePlatform)
		if !strings.Contains(refused.Stderr, "linux/"+other) {
			t.Errorf("stderr does not say linux/%s: %s", other, refused.Stderr)
		}
		s.pulls(t, call{}, spec{"image": foreign, "pull": "never"}).refused(t, shim.ReasonImagePlatform)
		s.pulls(t, call{}, spec{"image": own, "pull": "always", "platform": "linux/" + other}).refused(t, shim.ReasonImagePlatform)
		s.pulls(t, call{}, spec{"image": own, "pull": "missing", "platform": "linux/" + runtime.GOARCH}).printed(t, "own")
	})
}
