package shim

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/spec"
)

var testMachine = spec.Machine{OS: "linux", Arch: "amd64"}

const (
	testID     = "582c129a42a6db83c15647ca7ae54a7300a49c288d7a340064a524b271df5b7b"
	testDigest = "sha256:d007cf3833c88e5618d88317a004d43c4c10c5301348c0b1249a246c480069b7"
)

const dockerImageJSON = `{"Id":"sha256:` + testID + `","RepoDigests":["127.0.0.1:5000/x@` + testDigest + `"],"Os":"linux","Architecture":"amd64",
"Config":{"User":"app","Env":["A=1","B=x=y"],"Volumes":{"/z":{},"/a":{}},"WorkingDir":"/w","Healthcheck":{"Test":["CMD","true"]}}}`

const podmanImageJSON = `[{"Id":"` + testID + `","RepoDigests":["127.0.0.1:5000/x@` + testDigest + `","localhost/x@sha256:00"],"Os":"linux","Architecture":"amd64",
"Config":{"User":"app","Env":["A=1","B=x=y"],"Volumes":{"/z":{},"/a":{}},"WorkingDir":"/w"},"Healthcheck":{"Test":["CMD","true"]}}]`

var wantImage = spec.Image{
	Ref: "127.0.0.1:5000/x:1", ID: "sha256:" + testID, Digest: testDigest, OS: "linux", Arch: "amd64",
	User: "app", Env: []string{"A=1", "B=x=y"}, Volumes: []string{"/a", "/z"}, HealthCheck: true, WorkingDir: "/w",
}

func dockerFor(t *testing.T, override map[string]http.HandlerFunc, runner Runner) *docker {
	t.Helper()
	d := startDaemon(t, override)
	return &docker{
		engine: spec.Engine{Kind: spec.Docker, Client: "/usr/bin/docker", Socket: d.socket}, api: newDockerAPI(d.socket),
		version: "1.41", config: "/empty", runner: runner, pullEnv: []string{"DOCKER_CONFIG=/login"},
	}
}

func podmanFor(runner Runner) *podman {
	return &podman{engine: spec.Engine{Kind: spec.Podman, Client: "/usr/bin/podman"}, runner: runner, env: []string{"HOME=/h"}, pullEnv: []string{"HOME=/h", "HTTPS_PROXY=p"}}
}

func inspectCall(ref, out string, err error) scriptedCall {
	return scriptedCall{argv: []string{"/usr/bin/podman", "image", "inspect", "--", ref}, out: out, err: err, check: wantEnv("HOME=/h")}
}

func pullCall(ref, platform, stderr string) scriptedCall {
	argv := []string{"/usr/bin/podman", "pull"}
	if platform != "" {
		argv = append(argv, "--platform", platform)
	}
	call := scriptedCall{argv: append(argv, "--", ref), check: wantEnv("HOME=/h", "HTTPS_PROXY=p")}
	if stderr != "" {
		call.err = failedCall(125, stderr, "/usr/bin/podman", "pull")
	}
	return call
}

func wantEnv(env ...string) func(*testing.T, Command) {
	return func(t *testing.T, c Command) {
		if diff := cmp.Diff(env, c.Env); diff != "" {
			t.Errorf("%q: environment: %s", c.Args, diff)
		}
	}
}

func TestInspectImageIsTheSameOnBothEngines(t *testing.T) {
	docker := dockerFor(t, map[string]http.HandlerFunc{"/v1.41/images/127.0.0.1:5000/x:1/json": answer(dockerImageJSON)}, script(t))
	podman := podmanFor(script(t, inspectCall(wantImage.Ref, podmanImageJSON, nil)))
	for _, a := range []Adapter{docker, podman} {
		t.Run(a.Engine().Kind, func(t *testing.T) {
			got, err := a.InspectImage(t.Context(), wantImage.Ref)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(wantImage, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestInspectImageErrors(t *testing.T) {
	for _, tc := range []struct {
		name    string
		adapter Adapter
		want    Reason
	}{
		{"docker has none", dockerFor(t, nil, script(t)), ReasonImageMissing},
		{"docker's ID is none", dockerFor(t, map[string]http.HandlerFunc{"/v1.41/images/x/json": answer(`{"Id":"--privileged"}`)}, script(t)), ReasonEngineFailed},
		{"podman has none", podmanFor(script(t, inspectCall("x", "[]", failedCall(125, "Error: inspecting object: x: image not known", "podman")))), ReasonImageMissing},
		{"podman breaks", podmanFor(script(t, inspectCall("x", "", failedCall(125, "Error: database is locked", "podman")))), ReasonEngineFailed},
		{"podman says two", podmanFor(script(t, inspectCall("x", "[{},{}]", nil))), ReasonEngineFailed},
		{"podman's ID is none", podmanFor(script(t, inspectCall("x", `[{"Id":"x"}]`, nil))), ReasonEngineFailed},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := tc.adapter.InspectImage(t.Context(), "x"); !errors.Is(err, tc.want) {
				t.Errorf("%s: %v", ReasonOf(err), err)
			}
		})
	}
}

// E09, A61: no name becomes an option, a path of the API or another kind of source.
func TestImageNames(t *testing.T) {
	for _, ok := range []string{"bb:1", "a/b/c", "127.0.0.1:5000/x:1", "[::1]:5000/x", "x@" + testDigest, "sha256:" + testID, testID, "localhost/x"} {
		if err := checkRef(ok); err != nil {
			t.Errorf("%q: %v", ok, err)
		}
	}
	for _, bad := range []string{
		"", "-x", "--privileged", "a b", "a\nb", "a;b", "$HOME", "a?b", "a%2e", "docker://x", "oci:dir", "dir:/etc", "docker-archive:x.tar",
		"containers-storage:x", "../x", "a/../b", "a/.b", "/x", ":1", "ä", strings.Repeat("a", maxRef+1),
	} {
		for _, a := range []Adapter{podmanFor(script(t)), &docker{engine: spec.Engine{Kind: spec.Docker}, runner: script(t)}} {
			for _, policy := range []string{"missing", "always", "never", "fallback"} {
				if _, err := EnsureImage(t.Context(), a, testMachine, ImageRequest{Ref: bad, Pull: policy}); !errors.Is(err, ReasonSpecInvalid) {
					t.Errorf("%s, %s, %q: %v", a.Engine().Kind, policy, bad, err)
				}
			}
			if _, err := a.InspectImage(t.Context(), bad); !errors.Is(err, ReasonSpecInvalid) {
				t.Errorf("inspect %q: %v", bad, err)
			}
		}
	}
}

func TestEnsureImagePolicies(t *testing.T) {
	const ref = "127.0.0.1:5000/x:1"
	here := inspectCall(ref, podmanImageJSON, nil)
	none := inspectCall(ref, "[]", failedCall(125, "Error: inspecting object: image not known", "podman"))
	pull := pullCall(ref, "", "")
	refused := pullCall(ref, "", "Error: dial tcp 127.0.0.1:5000: connect: connection refused")
	for _, tc := range []struct {
		name, policy string
		calls        []scriptedCall
		want         error
	}{
		{"missing, here", "missing", []scriptedCall{here}, nil},
		{"missing is the default", "", []scriptedCall{here}, nil},
		{"missing, not here", "missing", []scriptedCall{none, pull, here}, nil},
		{"missing, no registry", "missing", []scriptedCall{none, refused}, ReasonPullFailed},
		{"always", "always", []scriptedCall{pull, here}, nil},
		{"always, no registry", "always", []scriptedCall{refused}, ReasonPullFailed},
		{"never, here", "never", []scriptedCall{here}, nil},
		{"never, not here", "never", []scriptedCall{none}, ReasonImageMissing},
		{"fallback, pulled", "fallback", []scriptedCall{pull, here}, nil},
		{"fallback, no registry, here", "fallback", []scriptedCall{refused, here}, nil},
		{"fallback, no registry, not here", "fallback", []scriptedCall{refused, none}, ReasonPullFailed},
		{"unknown", "sometimes", nil, ReasonSpecInvalid},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := EnsureImage(t.Context(), podmanFor(script(t, tc.calls...)), testMachine, ImageRequest{Ref: ref, Pull: tc.policy, Progress: &bytes.Buffer{}})
			if tc.want != nil {
				if !errors.Is(err, tc.want) {
					t.Errorf("%s: %v", ReasonOf(err), err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(wantImage, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestAnImageIDIsNeverPulled(t *testing.T) {
	ref := "sha256:" + testID
	for _, policy := range []string{"missing", "always", "fallback", "never"} {
		none := inspectCall(ref, "[]", failedCall(125, "Error: image not known", "podman"))
		if _, err := EnsureImage(t.Context(), podmanFor(script(t, none)), testMachine, ImageRequest{Ref: ref, Pull: policy}); !errors.Is(err, ReasonImageMissing) {
			t.Errorf("%s: %v", policy, err)
		}
	}
}

func TestDockerPull(t *testing.T) {
	image := map[string]http.HandlerFunc{"/v1.41/images/x:1/json": answer(dockerImageJSON)}
	d := dockerFor(t, image, nil)
	var progress bytes.Buffer
	d.runner = script(t, scriptedCall{
		argv: []string{"/usr/bin/docker", "--host", "unix://" + d.engine.Socket, "pull", "--platform", "linux/amd64", "--", "x:1"},
		check: func(t *testing.T, c Command) {
			wantEnv("DOCKER_CONFIG=/login")(t, c)
			if c.Progress != &progress {
				t.Error("no progress")
			}
		},
	})
	if _, err := EnsureImage(t.Context(), d, testMachine, ImageRequest{Ref: "x:1", Pull: "always", Platform: "linux/x86_64", Progress: &progress}); err != nil {
		t.Error(err)
	}
}

func TestDockerPullEnvironment(t *testing.T) {
	got := dockerPullEnv(ProbeOptions{Getenv: env(map[string]string{
		"PATH": "/p", "HOME": "/h", "DOCKER_CONFIG": "/dc", "https_proxy": "p", "SSL_CERT_FILE": "/ca", "DOCKER_HOST": "tcp://x", "LD_PRELOAD": "/x", "SECRET": "s",
	})})
	want := []string{"LC_ALL=C", "PATH=/p", "HOME=/h", "DOCKER_CONFIG=/dc", "https_proxy=p", "SSL_CERT_FILE=/ca"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestPullErrors(t *testing.T) {
	for _, tc := range []struct {
		name, ref, stderr string
		want              Reason
		hint              string
	}{
		{"L06 full disk", "x", "failed to register layer: write /a: no space left on device", ReasonPullFailed, "system df"},
		{"login", "r.example:5000/x", "unauthorized: authentication required", ReasonPullFailed, "docker login r.example:5000"},
		{"login at Docker's registry", "me/x", "pull access denied for me/x", ReasonPullFailed, "`docker login`"},
		{"no such tag", "r.example/x:2", "manifest for r.example/x:2 not found: manifest unknown", ReasonImageMissing, "docker build -t r.example/x:2"},
		{"L12 no such platform", "x", "no matching manifest for linux/s390x in the manifest list entries", ReasonImagePlatform, "manifest inspect x"},
		{"no TLS", "r/x", "http: server gave HTTP response to HTTPS client", ReasonPullFailed, "insecure"},
		{"else", "x", "boom", ReasonPullFailed, "docker pull x"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := pullError(t.Context(), spec.Docker, tc.ref, failedCall(1, tc.stderr, "/usr/bin/docker", "pull"))
			if !errors.Is(err, tc.want) || !strings.Contains(HintOf(err), tc.hint) {
				t.Errorf("%s: %v, hint %q", ReasonOf(err), err, HintOf(err))
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := pullError(ctx, spec.Docker, "x", context.Canceled); !errors.Is(err, ReasonInterrupted) {
		t.Errorf("%v", err)
	}
}

// L12: an image for another machine is refused before anything starts.
func TestPlatforms(t *testing.T) {
	image := func(os, arch, variant string) string {
		return `[{"Id":"` + testID + `","Os":"` + os + `","Architecture":"` + arch + `","Variant":"` + variant + `"}]`
	}
	arm := spec.Machine{OS: "linux", Arch: "arm64"}
	for _, tc := range []struct {
		name     string
		machine  spec.Machine
		platform string
		image    string
		want     error
	}{
		{"the machine's own", testMachine, "", image("linux", "amd64", ""), nil},
		{"kernel's name", testMachine, "", image("linux", "x86_64", ""), nil},
		{"arm64 on amd64", testMachine, "", image("linux", "arm64", "v8"), ReasonImagePlatform},
		{"amd64 on arm64", arm, "", image("linux", "amd64", ""), ReasonImagePlatform},
		{"aarch64 with a variant", arm, "", image("linux", "aarch64", "v8"), nil},
		{"another system", testMachine, "", image("windows", "amd64", ""), ReasonImagePlatform},
		{"nothing said", testMachine, "", image("", "", ""), ReasonImagePlatform},
		{"asked for and there", testMachine, "linux/aarch64", image("linux", "arm64", ""), nil},
		{"asked for and another there", testMachine, "linux/arm64", image("linux", "amd64", ""), ReasonImagePlatform},
		{"variant", testMachine, "linux/arm/v7", image("linux", "arm", "v7"), nil},
		{"other variant", testMachine, "linux/armhf", image("linux", "arm", "v6"), ReasonImagePlatform},
		{"variant unknown", testMachine, "linux/arm/v7", image("linux", "arm", ""), nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := podmanFor(script(t, inspectCall("x", tc.image, nil)))
			_, err := EnsureImage(t.Context(), a, tc.machine, ImageRequest{Ref: "x", Platform: tc.platform})
			if (err != nil) != (tc.want != nil) || tc.want != nil && !errors.Is(err, tc.want) {
				t.Errorf("%v", err)
			}
		})
	}
	for _, bad := range []string{"amd64", "linux/", "linux/amd64/v1/x", "--privileged", "linux/amd64,linux/arm64", "linux/amd64 "} {
		if _, err := EnsureImage(t.Context(), podmanFor(script(t)), testMachine, ImageRequest{Ref: "x", Platform: bad}); !errors.Is(err, ReasonSpecInvalid) {
			t.Errorf("platform %q: %v", bad, err)
		}
	}
}

func TestHealthCheckRuns(t *testing.T) {
	for name, tc := range map[string]struct {
		check *healthCheck
		want  bool
	}{
		"none": {nil, false}, "empty": {&healthCheck{}, false}, "NONE": {&healthCheck{Test: []string{"NONE"}}, false}, "a command": {&healthCheck{Test: []string{"CMD-SHELL", "true"}}, true},
	} {
		if got := tc.check.runs(); got != tc.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestRepoDigest(t *testing.T) {
	digests := []string{"b.example/x@sha256:2", "a.example/x@sha256:1", "localhost/x@sha256:3"}
	for ref, want := range map[string]string{
		"b.example/x:tag": "sha256:2", "a.example/x@sha256:1": "sha256:1", "x": "sha256:1", "b.example:5000/y": "sha256:1", testID: "sha256:1",
	} {
		if got := repoDigest(ref, digests); got != want {
			t.Errorf("%s: %s, want %s", ref, got, want)
		}
	}
	if got := repoDigest("localhost/x", digests[2:]); got != "" {
		t.Errorf("a local image has digest %s", got)
	}
}
