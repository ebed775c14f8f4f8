package shim

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/netpolicy"
)

// maxPresetFile bounds a package manager's configuration file, in bytes.
const maxPresetFile = 1 << 20

// ProbedPreset is what one egress preset opens on this host.
type ProbedPreset struct {
	// Entries are sorted, each is there once.
	Entries []PresetEntry `json:"entries"`
	// Notes say what of the configuration opens nothing.
	Notes []string `json:"notes,omitempty"`
}

// PresetEntry is one target.
type PresetEntry struct {
	// Allow is an allow entry, HOST:PORT or, of an address, CIDR:PORT.
	Allow string `json:"allow"`
	// From is the file and line, or the variable, that it came from. It holds no value.
	From string `json:"from"`
}

// presetManager reads one package manager's configuration.
type presetManager struct {
	read func(*presetReader)
	// remedy is how a registry is set.
	remedy string
}

var presetManagers = map[string]presetManager{
	"apt":   {readApt, "add a source to /etc/apt/sources.list.d"},
	"cargo": {readCargo, "set [registries.NAME] index, or [source.crates-io] replace-with, in cargo's config.toml"},
	"go":    {readGo, "set it with `go env -w GOPROXY=URL`"},
	"npm":   {readNpm, "set it with `npm config set registry URL`"},
	"pip":   {readPip, "set it with `pip config set global.index-url URL`"},
}

// ProbePresets gives the targets of the named presets: a provider's from the
// catalogue, a package manager's from the caller's own configuration, which is the
// only place that knows them. Of that it reads the environment and the user's and
// the system's files, never the workspace's: what an agent wrote would widen its
// next run. For the same reason a file that lies in one of agentFolders, or is
// reached through a link in one, is refused; they are real paths. Credentials in
// URLs are dropped. A name that leads to an address which is not globally reachable
// is not opened by its preset: that takes an entry for the address range too.
func ProbePresets(names []string, o ProbeOptions, agentFolders []string) (map[string]ProbedPreset, error) {
	o = o.withDefaults()
	probed, errs := map[string]ProbedPreset{}, []error(nil)
	for _, name := range names {
		p, ok := harness.FindPreset(name)
		if !ok {
			errs = append(errs, &Error{Reason: ReasonSpecInvalid, Msg: fmt.Sprintf("no preset %q", name), Hint: "agentshim presets lists them"})
			continue
		}
		if p.Kind == harness.ProviderPreset {
			probed[name] = cataloguePreset(p)
			continue
		}
		r := &presetReader{o: o, agentFolders: agentFolders, name: name, entries: map[string]string{}}
		presetManagers[name].read(r)
		var err error
		probed[name], err = r.result()
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return probed, nil
}

// PresetAllow gives the allow entries by preset.
func PresetAllow(probed map[string]ProbedPreset) map[string][]harness.Allow {
	allow := map[string][]harness.Allow{}
	for name, p := range probed {
		for _, e := range p.Entries {
			allow[name] = append(allow[name], harness.Allow{Host: e.Allow})
		}
	}
	return allow
}

func cataloguePreset(p harness.Preset) ProbedPreset {
	var probed ProbedPreset
	for _, entry := range p.Allow {
		probed.Entries = append(probed.Entries, PresetEntry{Allow: entry, From: "agentshim's catalogue"})
	}
	return probed
}

// setting is one setting as written, and where it stands.
type setting struct{ text, from string }

// presetReader collects what one package manager's configuration names.
type presetReader struct {
	o            ProbeOptions
	agentFolders []string
	name         string
	// looked are the places where a registry could be, for the message.
	looked []string
	// entries gives the place of each allow entry.
	entries map[string]string
	notes   []string
	errs    []error
}

// result is what was found; nothing found is an error, as the manager's built-in
// default is not known here.
func (r *presetReader) result() (ProbedPreset, error) {
	if len(r.errs) == 0 && len(r.entries) == 0 {
		msg := fmt.Sprintf("preset %s: no registry is configured in %s", r.name, printable(strings.Join(r.looked, ", ")))
		for _, note := range r.notes {
			msg += "; " + note
		}
		r.errs = append(r.errs, &Error{
			Reason: ReasonPolicy, Msg: msg,
			Hint: presetManagers[r.name].remedy + ", or name the hosts in egress.allow instead of the preset",
		})
	}
	if len(r.errs) > 0 {
		return ProbedPreset{}, errors.Join(r.errs...)
	}
	p := ProbedPreset{Notes: r.notes}
	for _, entry := range slices.Sorted(maps.Keys(r.entries)) {
		p.Entries = append(p.Entries, PresetEntry{Allow: entry, From: r.entries[entry]})
	}
	return p, nil
}

// fail reports a problem at a place. why holds no text from there: a URL that can't
// be read may be a credential.
func (r *presetReader) fail(from, why, hint string) {
	r.errs = append(r.errs, &Error{Reason: ReasonPolicy, Msg: fmt.Sprintf("preset %s: %s: %s", r.name, printable(from), why), Hint: hint})
}

func (r *presetReader) note(from, what string) {
	r.notes = append(r.notes, printable(from)+": "+what)
}

// getenv reads a variable in which a registry or a file's place could be.
func (r *presetReader) getenv(name string) string {
	r.looked = append(r.looked, name)
	return r.o.Getenv(name)
}

// names gives the names of the caller's variables, sorted.
func (r *presetReader) names() []string {
	var names []string
	for _, v := range r.o.environ() {
		name, _, _ := strings.Cut(v, "=")
		names = append(names, name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// file reads a configuration file, false where there is none to read.
func (r *presetReader) file(path string) ([]byte, bool) {
	r.looked = append(r.looked, path)
	if !filepath.IsAbs(path) {
		r.fail(path, "its path is not absolute", "")
		return nil, false
	}
	b, err := r.readFile(path)
	switch {
	case err == nil:
		return b, true
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR):
	case errors.Is(err, mounts.ErrAgentLink):
		r.fail(path, "it lies, or leads, where an agent can write", "keep it outside of the workspace and the writable mounts, or name the hosts in egress.allow")
	case errors.Is(err, errTooLarge):
		r.fail(path, fmt.Sprintf("it is larger than %d bytes", maxPresetFile), "")
	default:
		r.fail(path, "it can't be read as a file", "make it a readable file, or name the hosts in egress.allow")
	}
	return nil, false
}

func (r *presetReader) readFile(path string) ([]byte, error) {
	real, err := mounts.Resolve(r.o.path(path), r.agentFolders)
	if err != nil {
		return nil, err
	}
	for _, dir := range r.agentFolders {
		if rel, err := filepath.Rel(dir, real); err == nil && filepath.IsLocal(rel) {
			return nil, mounts.ErrAgentLink
		}
	}
	return readBounded(real, maxPresetFile)
}

// inHome gives paths below the caller's home, none where there is no home.
func (r *presetReader) inHome(paths ...string) []string {
	home := r.o.home()
	if home == "" {
		return nil
	}
	for i, p := range paths {
		paths[i] = filepath.Join(home, p)
	}
	return paths
}

// url adds the host of an http or https URL. One of another scheme, or a path, opens
// nothing and is noted.
func (r *presetReader) url(text, from string) {
	scheme, _, ok := strings.Cut(text, ":")
	switch scheme = strings.ToLower(scheme); {
	case !ok || strings.HasPrefix(text, "/") || strings.HasPrefix(text, "."):
		r.note(from, "a path opens nothing")
		return
	case scheme != "http" && scheme != "https":
		r.note(from, "only http and https URLs open something")
		return
	}
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" {
		r.fail(from, "it is no URL with a host", "")
		return
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[scheme]
	}
	r.host(u.Hostname(), port, from)
}

// hintLoopback: the sandbox's loopback is its own.
const hintLoopback = "a service on this machine is reached through egress.hostServices"

// host adds one target in its canonical form.
func (r *presetReader) host(host, port, from string) {
	entry := host + ":" + port
	if addr, err := netip.ParseAddr(host); err == nil {
		addr = addr.Unmap()
		if addr.IsLoopback() {
			r.fail(from, "its host is this machine's loopback", hintLoopback)
			return
		}
		if addr.Zone() != "" || addr.IsUnspecified() || addr.IsMulticast() || addr.IsLinkLocalUnicast() {
			r.fail(from, "its address is no other host's", "")
			return
		}
		entry = netip.PrefixFrom(addr, addr.BitLen()).String() + ":" + port
		if addr.Is6() {
			entry = "[" + netip.PrefixFrom(addr, addr.BitLen()).String() + "]:" + port
		}
	}
	rule, err := netpolicy.ParseRule(harness.Allow{Host: entry})
	switch {
	case host == "localhost" || err == nil && (rule.Name == "localhost" || strings.HasSuffix(rule.Name, ".localhost")):
		r.fail(from, "its host is this machine's loopback", hintLoopback)
	case err != nil || rule.Wildcard:
		r.fail(from, "its host is not a full name (at least two labels of letters, digits and hyphens) and not an address", "write the full name, or name the hosts in egress.allow")
	default:
		if _, found := r.entries[rule.String()]; !found {
			r.entries[rule.String()] = printable(from)
		}
	}
}

// place is a line of a file.
func place(file string, line int) string { return fmt.Sprintf("%s:%d", file, line) }
