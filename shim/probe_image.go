package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/agentshim/agentshim/spec"
)

// Pull policies of the harness file.
const (
	pullMissing  = "missing"
	pullAlways   = "always"
	pullNever    = "never"
	pullFallback = "fallback"
)

// ImageRequest names the image of a run.
type ImageRequest struct {
	Ref string
	// Pull is missing (or empty), always, never or fallback.
	Pull string
	// Platform is os/arch[/variant], empty for the machine's own.
	Platform string
	// Progress gets what a pull says while it runs; nil for none.
	Progress io.Writer
}

// refForm is a subset of what both engines take: no leading hyphen, no white space,
// nothing that a URL or a shell could read otherwise.
var refForm = regexp.MustCompile(`^(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9])[A-Za-z0-9._:/@-]*$`)

// transports are Podman's other sources of images; to Docker they are plain names.
var transports = []string{
	"containers-storage", "dir", "docker", "docker-archive", "docker-daemon", "oci", "oci-archive", "ostree", "sif", "tarball",
}

const maxRef = 1024

// checkRef keeps a name from being read as an option or as another kind of source.
func checkRef(ref string) error {
	invalid := func(why string) error {
		return &Error{
			Reason: ReasonSpecInvalid, Msg: fmt.Sprintf("image %q %s", ref, why),
			Hint: "write NAME[:TAG], HOST/NAME[:TAG] or NAME@sha256:DIGEST",
		}
	}
	switch {
	case ref == "":
		return invalid("is empty")
	case len(ref) > maxRef:
		return &Error{Reason: ReasonSpecInvalid, Msg: fmt.Sprintf("image name of %d bytes is longer than %d", len(ref), maxRef)}
	case !refForm.MatchString(ref), strings.Contains(ref, "//"), strings.Contains(ref, "/."):
		return invalid("is not an image name")
	}
	if name, _, ok := strings.Cut(ref, ":"); ok && slices.Contains(transports, name) {
		return invalid("names a transport and not an image")
	}
	return nil
}

// platform is a normalised os/arch/variant.
type platform struct{ os, arch, variant string }

func (p platform) String() string {
	s := p.os + "/" + p.arch
	if p.variant != "" {
		s += "/" + p.variant
	}
	return s
}

// archNames maps what engines, kernels and people write to Go's names.
var archNames = map[string]platform{
	"x86_64": {arch: "amd64"}, "x86-64": {arch: "amd64"}, "aarch64": {arch: "arm64"},
	"armhf": {arch: "arm", variant: "v7"}, "armv7l": {arch: "arm", variant: "v7"},
	"armel": {arch: "arm", variant: "v6"}, "armv6l": {arch: "arm", variant: "v6"},
	"i386": {arch: "386"}, "i686": {arch: "386"},
	"ppc64el": {arch: "ppc64le"}, "mips64el": {arch: "mips64le"}, "loong64": {arch: "loong64"}, "loongarch64": {arch: "loong64"},
}

// normalise gives one spelling to each platform; the variants that every machine of
// the architecture has are left out.
func normalise(os, arch, variant string) platform {
	p := platform{os: strings.ToLower(os), arch: strings.ToLower(arch), variant: strings.ToLower(variant)}
	if known, ok := archNames[p.arch]; ok {
		p.arch = known.arch
		if p.variant == "" {
			p.variant = known.variant
		}
	}
	if p.arch == "arm64" && (p.variant == "8" || p.variant == "v8") || p.arch == "amd64" && p.variant == "v1" {
		p.variant = ""
	}
	return p
}

// platformForm keeps an option or a list out of the engine's argv.
var platformForm = regexp.MustCompile(`^[a-z0-9]+/[A-Za-z0-9_-]+(/[A-Za-z0-9.]+)?$`)

func parsePlatform(text string) (platform, error) {
	if !platformForm.MatchString(text) {
		return platform{}, &Error{Reason: ReasonSpecInvalid, Msg: fmt.Sprintf("platform %q", text), Hint: "write os/arch or os/arch/variant, e.g. linux/amd64"}
	}
	parts := append(strings.Split(text, "/"), "")
	return normalise(parts[0], parts[1], parts[2]), nil
}

// EnsureImage applies the pull policy and gives the facts of the image that is then on
// the machine, whose ID is what to run: a tag may move afterwards. Its platform is
// req.Platform, or the machine's own where that is empty; with req.Platform set it
// may differ from the machine's, which is emulation if it runs at all. Nothing is
// retried. A name that is an image ID is never pulled.
func EnsureImage(ctx context.Context, a Adapter, machine spec.Machine, req ImageRequest) (spec.Image, error) {
	if err := checkRef(req.Ref); err != nil {
		return spec.Image{}, err
	}
	want, asked := normalise(machine.OS, machine.Arch, ""), ""
	if req.Platform != "" {
		p, err := parsePlatform(req.Platform)
		if err != nil {
			return spec.Image{}, err
		}
		want, asked = p, p.String()
	}
	image, err := byPolicy(ctx, a, req, asked)
	if err != nil {
		return spec.Image{}, err
	}
	return image, checkPlatform(image, want, a.Engine().Kind)
}

func byPolicy(ctx context.Context, a Adapter, req ImageRequest, platform string) (spec.Image, error) {
	policy := req.Pull
	if strings.HasPrefix(req.Ref, "sha256:") {
		policy = pullNever
	}
	switch policy {
	case pullNever:
		return a.InspectImage(ctx, req.Ref)
	case pullMissing, "":
		image, err := a.InspectImage(ctx, req.Ref)
		if !errors.Is(err, ReasonImageMissing) {
			return image, err
		}
		return pulled(ctx, a, req, platform)
	case pullAlways:
		return pulled(ctx, a, req, platform)
	case pullFallback:
		return pulledOrLocal(ctx, a, req, platform)
	}
	return spec.Image{}, &Error{Reason: ReasonSpecInvalid, Msg: fmt.Sprintf("pull %q", req.Pull), Hint: "use missing, always, never or fallback"}
}

func pulled(ctx context.Context, a Adapter, req ImageRequest, platform string) (spec.Image, error) {
	if err := a.pull(ctx, req.Ref, platform, req.Progress); err != nil {
		return spec.Image{}, pullError(ctx, a.Engine().Kind, req.Ref, err)
	}
	return a.InspectImage(ctx, req.Ref)
}

func pulledOrLocal(ctx context.Context, a Adapter, req ImageRequest, platform string) (spec.Image, error) {
	image, pullErr := pulled(ctx, a, req, platform)
	if pullErr == nil || ctx.Err() != nil {
		return image, pullErr
	}
	image, err := a.InspectImage(ctx, req.Ref)
	if errors.Is(err, ReasonImageMissing) {
		return spec.Image{}, pullErr
	}
	if err == nil && req.Progress != nil {
		fmt.Fprintf(req.Progress, "%v; using the image that is here\n", pullErr)
	}
	return image, err
}

// pullTexts are what registries and engines answer, in lower case, first match wins.
var pullTexts = []struct {
	text   string
	reason Reason
	hint   func(kind, ref string) string
}{
	{"no space left on device", ReasonPullFailed, func(kind, _ string) string {
		return "free space where the engine keeps its data: `" + kind + " system df`"
	}},
	{"disk quota exceeded", ReasonPullFailed, func(kind, _ string) string {
		return "free space where the engine keeps its data: `" + kind + " system df`"
	}},
	{"no matching manifest", ReasonImagePlatform, platformHint},
	{"no image found in manifest list", ReasonImagePlatform, platformHint},
	{"no image found in image index", ReasonImagePlatform, platformHint},
	{"does not match the specified platform", ReasonImagePlatform, platformHint},
	{"unauthorized", ReasonPullFailed, loginHint},
	{"authentication required", ReasonPullFailed, loginHint},
	{"no basic auth credentials", ReasonPullFailed, loginHint},
	{"denied", ReasonPullFailed, loginHint},
	{"manifest unknown", ReasonImageMissing, missingHint},
	{"manifest for", ReasonImageMissing, missingHint}, // Docker: "manifest for X not found"
	{"name unknown", ReasonImageMissing, missingHint},
	{"did not resolve to an alias", ReasonImageMissing, func(string, string) string {
		return "write the registry's host before the name, or set unqualified-search-registries in registries.conf"
	}},
	{"server gave http response to https client", ReasonPullFailed, func(string, string) string {
		return "the registry speaks no TLS: use one that does, or mark it insecure in the engine's own configuration"
	}},
}

func pullError(ctx context.Context, kind, ref string, err error) error {
	if ctx.Err() != nil {
		return &Error{Reason: ReasonInterrupted, Msg: fmt.Sprintf("pull of image %q", ref), Err: context.Cause(ctx)}
	}
	e := &Error{
		Reason: ReasonPullFailed, Msg: fmt.Sprintf("pull of image %q", ref), Err: err,
		Hint: fmt.Sprintf("try `%s pull %s`, or set pull to never or fallback to use the image that is here", kind, ref),
	}
	var failed *EngineError
	if !errors.As(err, &failed) {
		return e
	}
	text := strings.ToLower(failed.Stderr)
	for _, known := range pullTexts {
		if strings.Contains(text, known.text) {
			e.Reason, e.Hint = known.reason, known.hint(kind, ref)
			break
		}
	}
	return e
}

func loginHint(kind, ref string) string {
	host, _, ok := strings.Cut(ref, "/")
	if !ok || !strings.ContainsAny(host, ".:") && host != "localhost" {
		return fmt.Sprintf("`%s login`, or check the image's name", kind)
	}
	return fmt.Sprintf("`%s login %s`, or check the image's name", kind, host)
}

func platformHint(kind, ref string) string {
	return fmt.Sprintf("set platform to one that the image has (`%s manifest inspect %s` lists them)", kind, ref)
}

func missingHint(kind, ref string) string {
	return fmt.Sprintf("check the name, build the image (`%s build -t %s .`) or pull it (`%s pull %s`)", kind, ref, kind, ref)
}

func missingImage(e spec.Engine, ref string) *Error {
	hint := missingHint(e.Kind, ref)
	switch {
	case strings.HasPrefix(ref, "sha256:"):
		hint = fmt.Sprintf("`%s images --no-trunc` lists the images that are here", e.Kind)
	case e.Kind == spec.Podman && e.Rootless:
		hint += "; rootless podman has a store of its own, apart from root's and docker's"
	}
	return &Error{Reason: ReasonImageMissing, Msg: fmt.Sprintf("%s has no image %q", e.Kind, ref), Hint: hint}
}

// checkPlatform compares what the image says of itself; a variant counts only where
// both sides name one.
func checkPlatform(image spec.Image, want platform, kind string) error {
	have := normalise(image.OS, image.Arch, image.Variant)
	if have.os == want.os && have.arch == want.arch &&
		(have.variant == want.variant || have.variant == "" || want.variant == "") {
		return nil
	}
	return &Error{
		Reason: ReasonImagePlatform,
		Msg:    fmt.Sprintf("image %q is for %s, wanted is %s", image.Ref, have, want),
		Hint:   fmt.Sprintf("`%s pull --platform %s %s`, or set platform to %q to run it under emulation", kind, want, image.Ref, have),
	}
}

// imageConfig is the part of an image's configuration that both engines write alike.
type imageConfig struct {
	User        string
	Env         []string
	Volumes     map[string]struct{}
	WorkingDir  string
	Healthcheck *healthCheck
}

type healthCheck struct{ Test []string }

func (h *healthCheck) runs() bool { return h != nil && len(h.Test) > 0 && h.Test[0] != "NONE" }

// imageFacts is one inspected image. Podman keeps the health check beside Config.
type imageFacts struct {
	ID           string `json:"Id"`
	RepoDigests  []string
	OS           string `json:"Os"`
	Architecture string
	Variant      string
	Config       *imageConfig
	Healthcheck  *healthCheck
}

var idForm = regexp.MustCompile(`^[0-9a-f]{64}$`)

// image turns the facts into what a plan needs; arch names become Go's.
func (f imageFacts) image(ref string) (spec.Image, error) {
	hex := strings.TrimPrefix(f.ID, "sha256:")
	if !idForm.MatchString(hex) {
		return spec.Image{}, &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("image %q has ID %q, which is no sha256", ref, printable(f.ID))}
	}
	p := normalise(f.OS, f.Architecture, f.Variant)
	image := spec.Image{
		Ref: ref, ID: "sha256:" + hex, Digest: repoDigest(ref, f.RepoDigests),
		OS: p.os, Arch: p.arch, Variant: p.variant, HealthCheck: f.Healthcheck.runs(),
	}
	if c := f.Config; c != nil {
		image.User, image.Env, image.WorkingDir = c.User, c.Env, c.WorkingDir
		image.Volumes = slices.Sorted(maps.Keys(c.Volumes))
		image.HealthCheck = image.HealthCheck || c.Healthcheck.runs()
	}
	return image, nil
}

// repoDigest is the digest under which the image is known in ref's own repository, or
// in the first one. Podman makes up digests under localhost/ for images that never
// were in a registry; they don't count.
func repoDigest(ref string, digests []string) string {
	repo := ref
	if i := strings.IndexByte(repo, '@'); i >= 0 {
		repo = repo[:i]
	}
	if i := strings.LastIndexByte(repo, ':'); i > strings.LastIndexByte(repo, '/') {
		repo = repo[:i]
	}
	first := ""
	for _, d := range slices.Sorted(slices.Values(digests)) {
		name, digest, ok := strings.Cut(d, "@")
		if !ok || strings.HasPrefix(name, "localhost/") {
			continue
		}
		if name == repo || strings.HasSuffix(name, "/"+repo) {
			return digest
		}
		if first == "" {
			first = digest
		}
	}
	return first
}

func (d *docker) InspectImage(ctx context.Context, ref string) (spec.Image, error) {
	if err := checkRef(ref); err != nil {
		return spec.Image{}, err
	}
	var facts imageFacts
	err := d.api.get(ctx, "/v"+d.version+"/images/"+ref+"/json", &facts)
	if errors.Is(err, errNotFound) {
		return spec.Image{}, missingImage(d.engine, ref)
	}
	if err != nil {
		return spec.Image{}, err
	}
	return facts.image(ref)
}

func (p *podman) InspectImage(ctx context.Context, ref string) (spec.Image, error) {
	if err := checkRef(ref); err != nil {
		return spec.Image{}, err
	}
	key := p.images.key() // before the look: a change during it makes another key
	if image, ok := p.images.get(key, ref); ok {
		return image, nil
	}
	image, err := p.inspectImage(ctx, ref)
	if err == nil {
		p.images.put(key, image)
	}
	return image, err
}

func (p *podman) inspectImage(ctx context.Context, ref string) (spec.Image, error) {
	out, err := runQuestion(ctx, p.runner, p.Command("image", "inspect", "--", ref))
	if err != nil {
		return spec.Image{}, p.inspectError(ctx, ref, err)
	}
	var found []imageFacts
	if err := json.Unmarshal(out.Stdout, &found); err != nil {
		return spec.Image{}, &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("podman's facts of image %q", ref), Err: err}
	}
	if len(found) != 1 {
		return spec.Image{}, &Error{Reason: ReasonEngineFailed, Msg: fmt.Sprintf("podman knows %d images of the name %q", len(found), ref)}
	}
	return found[0].image(ref)
}

func (p *podman) inspectError(ctx context.Context, ref string, err error) error {
	var failed *EngineError
	if ctx.Err() == nil && errors.As(err, &failed) {
		text := strings.ToLower(failed.Stderr)
		for _, known := range []string{"image not known", "no such image", "unable to find"} {
			if strings.Contains(text, known) {
				missing := missingImage(p.engine, ref)
				if p.hintIgnored != "" {
					missing.Hint += "; " + p.hintIgnored
				}
				return missing
			}
		}
	}
	return podmanError(ctx, p.engine.Client, err)
}
