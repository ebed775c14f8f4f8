package shim

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/netpolicy"
)

// secret stands in URLs of the tests, and nowhere in what is shown.
const secret = "s3cr3t"

// presetOptions is a host with these files and this environment, and HOME /home/u.
func presetOptions(t *testing.T, files, vars map[string]string) ProbeOptions {
	t.Helper()
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range slices.Sorted(maps.Keys(files)) {
		mode := os.FileMode(0o600)
		if strings.Contains(path, "/bin/") {
			mode = 0o755
		}
		writeFile(t, root, path, files[path], mode)
	}
	all := map[string]string{"HOME": "/home/u"}
	maps.Copy(all, vars)
	return ProbeOptions{root: root, Getenv: env(all), environ: func() []string {
		var list []string
		for name, v := range all {
			list = append(list, name+"="+v)
		}
		return list
	}}
}

type presetCase struct {
	name  string
	files map[string]string
	vars  map[string]string
	want  []PresetEntry
	// notes is a part of each note, mentions of the error, which is ErrPolicy.
	notes    []string
	mentions []string
}

func testPreset(t *testing.T, preset string, cases []presetCase) {
	t.Helper()
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			o := presetOptions(t, tc.files, tc.vars)
			probed, err := ProbePresets([]string{preset}, o, nil)
			if tc.mentions != nil {
				if !errors.Is(err, ReasonPolicy) {
					t.Fatalf("%v, %v", probed, err)
				}
				for _, m := range tc.mentions {
					if !strings.Contains(err.Error(), m) {
						t.Errorf("no %q in: %v", m, err)
					}
				}
				if strings.Contains(err.Error()+HintOf(err), secret) {
					t.Errorf("a credential is shown: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got := probed[preset]
			if diff := cmp.Diff(tc.want, got.Entries); diff != "" {
				t.Error(diff)
			}
			if len(got.Notes) != len(tc.notes) {
				t.Fatalf("notes %q", got.Notes)
			}
			for i, part := range tc.notes {
				if !strings.Contains(got.Notes[i], part) {
					t.Errorf("no %q in %q", part, got.Notes[i])
				}
			}
		})
	}
}

func TestPresetNpm(t *testing.T) {
	const url = "https://me:" + secret + "@npm.example.com/repo/"
	testPreset(t, "npm", []presetCase{
		{name: "nothing", mentions: []string{"preset npm: no registry is configured in NPM_CONFIG_REGISTRY, /home/u/.npmrc, /etc/npmrc"}},
		{
			name: "user's file", files: map[string]string{"/home/u/.npmrc": "; c\n\n registry = " + url + " ; x\n//npm.example.com/:_authToken=" + secret + "\n"},
			want: []PresetEntry{{"npm.example.com:443", "/home/u/.npmrc:3"}},
		},
		{
			name: "scopes", files: map[string]string{"/home/u/.npmrc": "@a:registry=https://a.example.com:8443\n\"@b:registry\" = 'http://b.example.com'\n"},
			want: []PresetEntry{{"a.example.com:8443", "/home/u/.npmrc:1"}, {"b.example.com:80", "/home/u/.npmrc:2"}},
		},
		{
			name: "user before global", files: map[string]string{"/home/u/.npmrc": "registry=https://u.example.com", "/etc/npmrc": "registry=https://g.example.com\n@a:registry=https://a.example.com"},
			want: []PresetEntry{{"a.example.com:443", "/etc/npmrc:2"}, {"u.example.com:443", "/home/u/.npmrc:1"}},
		},
		{
			name: "variable before files", files: map[string]string{"/home/u/.npmrc": "registry=https://u.example.com"}, vars: map[string]string{"NPM_CONFIG_REGISTRY": "https://E.example.com."},
			want: []PresetEntry{{"e.example.com:443", "NPM_CONFIG_REGISTRY"}},
		},
		{
			name: "lower-case variable, scoped variable", vars: map[string]string{"npm_config_registry": "https://e.example.com", "npm_config_@a:registry": "https://a.example.com"},
			want: []PresetEntry{{"a.example.com:443", "npm_config_@a:registry"}, {"e.example.com:443", "npm_config_registry"}},
		},
		{
			name: "variables inside", files: map[string]string{"/home/u/.npmrc": "registry=https://${USR}:${PASS?}@${H}.example.com\n"}, vars: map[string]string{"USR": secret, "H": "h"},
			want: []PresetEntry{{"h.example.com:443", "/home/u/.npmrc:1"}},
		},
		{name: "variable not set", files: map[string]string{"/home/u/.npmrc": "registry=https://${H}.example.com\n"}, mentions: []string{"/home/u/.npmrc:1: it names a variable that is not set"}},
		{
			name: "other user file", files: map[string]string{"/x/npmrc": "registry=https://x.example.com", "/home/u/.npmrc": "registry=https://u.example.com"}, vars: map[string]string{"NPM_CONFIG_USERCONFIG": "/x/npmrc"},
			want: []PresetEntry{{"x.example.com:443", "/x/npmrc:1"}},
		},
		{
			name: "global by prefix of the user's file", files: map[string]string{"/home/u/.npmrc": "prefix=~/.npm", "/home/u/.npm/etc/npmrc": "registry=https://p.example.com"},
			want: []PresetEntry{{"p.example.com:443", "/home/u/.npm/etc/npmrc:1"}},
		},
		{
			name: "global by node", files: map[string]string{"/opt/node/bin/node": "", "/opt/node/etc/npmrc": "registry=https://n.example.com"}, vars: map[string]string{"PATH": "/opt/node/bin"},
			want: []PresetEntry{{"n.example.com:443", "/opt/node/etc/npmrc:1"}},
		},
		{name: "in a section", files: map[string]string{"/home/u/.npmrc": "[x]\nregistry=https://u.example.com"}, mentions: []string{"no registry"}},
		{
			name: "same host twice", files: map[string]string{"/home/u/.npmrc": "registry=https://n.example.com/a\n@x:registry=https://n.example.com/b"},
			want: []PresetEntry{{"n.example.com:443", "/home/u/.npmrc:2"}},
		},
		{
			name: "address", files: map[string]string{"/home/u/.npmrc": "registry=http://10.1.2.3:4873/\n@x:registry=https://[2001:db8::1]/\n@y:registry=https://[::ffff:10.1.2.4]"},
			want: []PresetEntry{{"10.1.2.3/32:4873", "/home/u/.npmrc:1"}, {"10.1.2.4/32:443", "/home/u/.npmrc:3"}, {"[2001:db8::1/128]:443", "/home/u/.npmrc:2"}},
		},
		{name: "loopback name", files: map[string]string{"/home/u/.npmrc": "registry=http://localhost:4873/"}, mentions: []string{"/home/u/.npmrc:1: its host is this machine's loopback"}},
		{name: "below localhost", vars: map[string]string{"NPM_CONFIG_REGISTRY": "http://a.localhost"}, mentions: []string{"NPM_CONFIG_REGISTRY: its host is this machine's loopback"}},
		{name: "loopback address", vars: map[string]string{"NPM_CONFIG_REGISTRY": "http://[::ffff:127.0.0.1]:4873"}, mentions: []string{"loopback"}},
		{name: "metadata address", vars: map[string]string{"NPM_CONFIG_REGISTRY": "http://169.254.169.254"}, mentions: []string{"no other host's"}},
		{name: "any address", vars: map[string]string{"NPM_CONFIG_REGISTRY": "http://0.0.0.0"}, mentions: []string{"no other host's"}},
		{name: "one label", vars: map[string]string{"NPM_CONFIG_REGISTRY": "https://nexus"}, mentions: []string{"not a full name"}},
		{name: "address in another spelling", vars: map[string]string{"NPM_CONFIG_REGISTRY": "https://0x7f.1"}, mentions: []string{"not a full name"}},
		{name: "wildcard", vars: map[string]string{"NPM_CONFIG_REGISTRY": "https://*.example.com"}, mentions: []string{"not a full name"}},
		{name: "odd port", vars: map[string]string{"NPM_CONFIG_REGISTRY": "https://a.example.com:0"}, mentions: []string{"not a full name"}},
		{name: "secret in place of the port", vars: map[string]string{"NPM_CONFIG_REGISTRY": "https://me:" + secret + "/@a.example.com"}, mentions: []string{"no URL"}},
		{name: "secret in place of the host", vars: map[string]string{"NPM_CONFIG_REGISTRY": "https://" + secret + "/@a.example.com"}, mentions: []string{"not a full name"}},
		{name: "no scheme", vars: map[string]string{"NPM_CONFIG_REGISTRY": secret}, mentions: []string{"NPM_CONFIG_REGISTRY: it is no http or https URL"}},
		{name: "two problems", files: map[string]string{"/home/u/.npmrc": "registry=x\n@a:registry=https://y"}, mentions: []string{".npmrc:1", ".npmrc:2"}},
		{name: "relative file", vars: map[string]string{"NPM_CONFIG_USERCONFIG": "npmrc"}, mentions: []string{"npmrc: its path is not absolute"}},
		{name: "control character in a path", vars: map[string]string{"NPM_CONFIG_USERCONFIG": "n\x1b[2J"}, mentions: []string{"n [2J: its path"}},
		{name: "too large", files: map[string]string{"/home/u/.npmrc": strings.Repeat("#", maxPresetFile+1)}, mentions: []string{"/home/u/.npmrc: it is larger than"}},
	})
}

func TestPresetPip(t *testing.T) {
	testPreset(t, "pip", []presetCase{
		{name: "nothing", mentions: []string{"no registry is configured in /etc/xdg/pip/pip.conf, /etc/pip.conf, /home/u/.pip/pip.conf, /home/u/.config/pip/pip.conf, PIP_INDEX_URL"}},
		{
			name: "variables", vars: map[string]string{"PIP_INDEX_URL": "https://u:" + secret + "@i.example.com/simple", "PIP_EXTRA_INDEX_URL": "https://a.example.com http://b.example.com:8080/x"},
			want: []PresetEntry{{"a.example.com:443", "PIP_EXTRA_INDEX_URL"}, {"b.example.com:8080", "PIP_EXTRA_INDEX_URL"}, {"i.example.com:443", "PIP_INDEX_URL"}},
		},
		{name: "files, the last wins", files: map[string]string{
			"/etc/pip.conf":                 "[global]\nindex-url = https://g.example.com\nextra-index-url: https://e.example.com\n",
			"/home/u/.config/pip/pip.conf":  "# c\n[global]\nindex_url = https://u.example.com/simple\n",
			"/workspace/pip.conf":           "[global]\nindex-url = https://w.example.com\n",
			"/home/u/.config/pip/other.ini": "x",
		}, want: []PresetEntry{{"e.example.com:443", "/etc/pip.conf:3"}, {"u.example.com:443", "/home/u/.config/pip/pip.conf:3"}}},
		{
			name: "continued", files: map[string]string{"/home/u/.pip/pip.conf": "[install]\nfind-links =\n    https://a.example.com/x\n\n    # c\n    /srv/wheels\n    https://b.example.com\n[list]\nindex-url = https://c.example.com\n"},
			want: []PresetEntry{{"a.example.com:443", "/home/u/.pip/pip.conf:2"}, {"b.example.com:443", "/home/u/.pip/pip.conf:2"}}, notes: []string{"/home/u/.pip/pip.conf:2: a path opens nothing"},
		},
		{
			name: "own file instead of the user's", files: map[string]string{"/x.conf": "[global]\nindex-url=https://x.example.com", "/home/u/.pip/pip.conf": "[global]\nextra-index-url=https://u.example.com"}, vars: map[string]string{"PIP_CONFIG_FILE": "/x.conf"},
			want: []PresetEntry{{"x.example.com:443", "/x.conf:2"}},
		},
		{name: "no file", files: map[string]string{"/etc/pip.conf": "[global]\nindex-url=https://x.example.com"}, vars: map[string]string{"PIP_CONFIG_FILE": "/dev/null"}, mentions: []string{"no registry"}},
		{
			name: "XDG folders", files: map[string]string{"/c/pip/pip.conf": "[global]\nindex-url=https://c.example.com", "/d/pip/pip.conf": "[global]\nextra-index-url=https://d.example.com"}, vars: map[string]string{"XDG_CONFIG_HOME": "/c", "XDG_CONFIG_DIRS": "rel:/d"},
			want: []PresetEntry{{"c.example.com:443", "/c/pip/pip.conf:2"}, {"d.example.com:443", "/d/pip/pip.conf:2"}},
		},
		{name: "other scheme", vars: map[string]string{"PIP_INDEX_URL": "https://i.example.com", "PIP_FIND_LINKS": "file:///srv"}, want: []PresetEntry{{"i.example.com:443", "PIP_INDEX_URL"}}, notes: []string{"PIP_FIND_LINKS: only http and https"}},
		{name: "not a configuration", files: map[string]string{"/etc/pip.conf": "[global]\n" + secret + "\n"}, mentions: []string{"/etc/pip.conf:2: it is no section"}},
		{name: "before any section", files: map[string]string{"/etc/pip.conf": "index-url = https://" + secret + "\n"}, mentions: []string{"/etc/pip.conf:1: it is no section"}},
	})
}

func TestPresetCargo(t *testing.T) {
	const file = "/home/u/.cargo/config.toml"
	testPreset(t, "cargo", []presetCase{
		{name: "nothing", mentions: []string{"no registry is configured in /home/u/.cargo/config, /home/u/.cargo/config.toml, CARGO_REGISTRIES_*_INDEX"}},
		{
			name: "replaced", files: map[string]string{file: "[source.crates-io]\nreplace-with = \"a\"\n[source.a]\nreplace-with = 'm'\n[source.m]\nregistry = \"sparse+https://u:" + secret + "@m.example.com/index/\"\n[source.unused]\nregistry = \"https://n.example.com\"\n"},
			want: []PresetEntry{{"m.example.com:443", file + ": [source.m]"}},
		},
		{
			name: "registries", files: map[string]string{file: "[registries.my-own]\nindex = \"https://git.example.com:8443/index.git\"\ntoken = \"" + secret + "\"\n[registries]\nx.index = 'sparse+http://x.example.com/'\n"},
			want: []PresetEntry{{"git.example.com:8443", file + ": [registries.my-own]"}, {"x.example.com:80", file + ": [registries.x]"}},
		},
		{
			name: "variable before the file, and without it", files: map[string]string{file: "[registries.my-own]\nindex = \"https://f.example.com\"\n"},
			vars: map[string]string{"CARGO_REGISTRIES_MY_OWN_INDEX": "sparse+https://v.example.com", "CARGO_REGISTRIES_B_INDEX": "https://b.example.com", "CARGO_REGISTRIES_B_TOKEN": secret},
			want: []PresetEntry{{"b.example.com:443", "CARGO_REGISTRIES_B_INDEX"}, {"v.example.com:443", "CARGO_REGISTRIES_MY_OWN_INDEX"}},
		},
		{
			name: "other home, older name first", files: map[string]string{"/c/config": "registries.a.index = 'https://a.example.com'", "/c/config.toml": "registries.b.index = 'https://b.example.com'"}, vars: map[string]string{"CARGO_HOME": "/c"},
			want: []PresetEntry{{"a.example.com:443", "/c/config: [registries.a]"}},
		},
		{name: "vendored", files: map[string]string{file: "[source.crates-io]\nreplace-with='v'\n[source.v]\ndirectory='/v'\n"}, mentions: []string{"no registry"}},
		{name: "circle", files: map[string]string{file: "[source.a]\nreplace-with='b'\n[source.b]\nreplace-with='a'\n"}, mentions: []string{"[source.a]: its replacements", "[source.b]"}},
		{
			name: "ssh", files: map[string]string{file: "registries.a.index = 'ssh://git@a.example.com/i'\nregistries.b.index='https://b.example.com'"},
			want: []PresetEntry{{"b.example.com:443", file + ": [registries.b]"}}, notes: []string{"[registries.a]: only http and https"},
		},
		{name: "no TOML", files: map[string]string{file: "\n[x\ntoken = '" + secret + "'"}, mentions: []string{file + ":2: it is no TOML"}},
		{name: "another type", files: map[string]string{file: "\nregistries = '" + secret + "'"}, mentions: []string{file + ":", "it is no TOML, or not of cargo's form"}},
	})
}

func TestPresetGo(t *testing.T) {
	const file = "/home/u/.config/go/env"
	testPreset(t, "go", []presetCase{
		{name: "nothing", mentions: []string{"no registry is configured in " + file + ", GOPROXY, GOSUMDB"}},
		{
			name: "variable", vars: map[string]string{"GOPROXY": "https://u:" + secret + "@a.example.com/x|http://b.example.com:3000,file:///m,c.example.com,direct,https://never.example.com"},
			want:  []PresetEntry{{"a.example.com:443", "GOPROXY"}, {"b.example.com:3000", "GOPROXY"}, {"c.example.com:443", "GOPROXY"}},
			notes: []string{"only http and https", "GOPROXY: direct opens nothing"},
		},
		{
			name: "user's file before the installation's", files: map[string]string{"/usr/go/bin/go": "", "/usr/go/go.env": "# c\nGOPROXY=https://i.example.com,direct\nGOSUMDB=sum.example.com\n", file: "GOPROXY=https://u.example.com\n"}, vars: map[string]string{"PATH": "/usr/go/bin"},
			want: []PresetEntry{{"sum.example.com:443", "/usr/go/go.env:3"}, {"u.example.com:443", file + ":1"}},
		},
		{name: "installation by variable", files: map[string]string{"/g/go.env": "GOPROXY=https://i.example.com"}, vars: map[string]string{"GOROOT": "/g"}, want: []PresetEntry{{"i.example.com:443", "/g/go.env:1"}}},
		{
			name: "other file, database with key", files: map[string]string{"/e": "GOPROXY=https://e.example.com\nGOSUMDB=sum.example.com+abc+Zm9v"}, vars: map[string]string{"GOENV": "/e"},
			want: []PresetEntry{{"e.example.com:443", "/e:1"}, {"sum.example.com:443", "/e:2"}},
		},
		{
			name: "database with URL", vars: map[string]string{"GOPROXY": "https://e.example.com", "GOSUMDB": "sum.example.com+abc+Zm9v https://d.example.com"},
			want: []PresetEntry{{"d.example.com:443", "GOSUMDB"}, {"e.example.com:443", "GOPROXY"}},
		},
		{name: "database off", vars: map[string]string{"GOPROXY": "https://e.example.com", "GOSUMDB": "off"}, want: []PresetEntry{{"e.example.com:443", "GOPROXY"}}},
		{name: "no file", files: map[string]string{file: "GOPROXY=https://u.example.com"}, vars: map[string]string{"GOENV": "off"}, mentions: []string{"no registry"}},
		{name: "direct only", vars: map[string]string{"GOPROXY": "direct", "GOSUMDB": "sum.example.com"}, mentions: []string{"no registry is configured", "GOPROXY: direct opens nothing"}},
		{name: "off", vars: map[string]string{"GOPROXY": "off"}, mentions: []string{"GOPROXY: off opens nothing"}},
	})
}

func TestPresetApt(t *testing.T) {
	const dir = "/etc/apt/sources.list.d/"
	testPreset(t, "apt", []presetCase{
		{name: "nothing", mentions: []string{"no registry is configured in /etc/apt/sources.list.d, /etc/apt/sources.list"}},
		{
			name: "one-line", files: map[string]string{"/etc/apt/sources.list": "# deb http://c.example.com x\ndeb\t[ arch=amd64 signed-by=/k ]  http://u:" + secret + "@a.example.com/debian bookworm main # c\ndeb-src https://b.example.com:8443/ x main\n", dir + "x.list": "deb cdrom:[Debian x]/ x main\n", dir + "x.save": "deb https://s.example.com x"},
			want: []PresetEntry{{"a.example.com:80", "/etc/apt/sources.list:2"}, {"b.example.com:8443", "/etc/apt/sources.list:3"}}, notes: []string{dir + "x.list:1: only http and https"},
		},
		{
			name: "deb822", files: map[string]string{dir + "a.sources": "Types: deb\n# URIs: http://c.example.com\nUris: http://a.example.com/debian\n https://b.example.com\nSuites: x\n\nURIs: https://off.example.com\nEnabled: No\n\nSigned-By:\n -----BEGIN\n .\n http://key.example.com\nURIs: mirror+file:/etc/m\n", dir + "b c.sources": "URIs: https://n.example.com"},
			want: []PresetEntry{{"a.example.com:80", dir + "a.sources:3"}, {"b.example.com:443", dir + "a.sources:4"}}, notes: []string{"a.sources:14: only http and https"},
		},
		{name: "no source", files: map[string]string{"/etc/apt/sources.list": "\nhttps://" + secret + "\n"}, mentions: []string{"/etc/apt/sources.list:2: it is no source"}},
		{name: "no field", files: map[string]string{dir + "a.sources": secret + "\n"}, mentions: []string{"a.sources:1: it is no field"}},
	})
}

// TestPresetFiles: what an agent could have written is refused, also behind a link,
// with a control; so is what is no file.
func TestPresetFiles(t *testing.T) {
	const text = "registry=https://n.example.com"
	o := presetOptions(t, map[string]string{"/w/npmrc": text, "/x/npmrc": text}, nil)
	at := func(p string) string { return filepath.Join(o.root, p) }
	if err := os.MkdirAll(at("/home/u"), 0o700); err != nil {
		t.Fatal(err)
	}
	probe := func(file string, agent ...string) error {
		o.Getenv = env(map[string]string{"HOME": "/home/u", "NPM_CONFIG_USERCONFIG": file})
		_, err := ProbePresets([]string{"npm"}, o, agent)
		return err
	}
	for _, link := range []struct{ name, target string }{{"/w/link", at("/x/npmrc")}, {"/home/u/.npmrc", at("/w/npmrc")}, {"/y", at("/x")}} {
		if err := os.Symlink(link.target, at(link.name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"/w/npmrc", "/w/link", "/home/u/.npmrc"} {
		if err := probe(file, at("/w")); !errors.Is(err, ReasonPolicy) || !strings.Contains(err.Error(), "agent can write") {
			t.Errorf("%s: %v", file, err)
		}
		if err := probe(file, at("/ww")); err != nil {
			t.Errorf("control: %s: %v", file, err)
		}
	}
	if err := probe("/y/npmrc", at("/w")); err != nil {
		t.Errorf("the user's own link: %v", err)
	}
	if err := probe("/x", at("/w")); !errors.Is(err, ReasonPolicy) || !strings.Contains(err.Error(), "can't be read as a file") {
		t.Errorf("a folder: %v", err)
	}
	if err := probe("/x/npmrc/none"); !errors.Is(err, ReasonPolicy) || !strings.Contains(err.Error(), "no registry") {
		t.Errorf("below a file: %v", err)
	}
}

func TestProbePresets(t *testing.T) {
	o := presetOptions(t, nil, map[string]string{"NPM_CONFIG_REGISTRY": "https://n.example.com"})
	probed, err := ProbePresets([]string{"npm", "deepseek"}, o, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]harness.Allow{"npm": {{Host: "n.example.com:443"}}, "deepseek": {{Host: "api.deepseek.com"}}}
	if diff := cmp.Diff(want, PresetAllow(probed), nil); diff != "" {
		t.Error(diff)
	}
	p, err := netpolicy.Compile(harness.Egress{Mode: "allow-list", Presets: []string{"npm", "deepseek"}}, PresetAllow(probed), nil)
	if err != nil || len(p.Allow) != 2 {
		t.Errorf("%+v, %v", p, err)
	}
	_, err = ProbePresets([]string{"npm", "nothing", "pip"}, o, nil)
	if !errors.Is(err, ReasonSpecInvalid) || !errors.Is(err, ReasonPolicy) {
		t.Errorf("%v", err)
	}
	// Each package manager of the catalogue can be read.
	for _, p := range harness.Presets() {
		if _, ok := presetManagers[p.Name]; ok != (p.Kind == harness.PackageManagerPreset) {
			t.Errorf("%s: %s, reader %v", p.Name, p.Kind, ok)
		}
	}
}

// FuzzPresetFiles: whatever stands in the files, what comes out are rules with a port,
// or errors.
func FuzzPresetFiles(f *testing.F) {
	for _, seed := range []string{
		"registry=https://a.example.com\n@x:registry=${X}\n", "[global]\nindex-url = https://a.example.com\n http://b.example.com",
		"[registries.a]\nindex='sparse+https://a.example.com'\n[source.a]\nreplace-with='a'", "GOPROXY=https://a.example.com,direct\nGOSUMDB=x y",
		"deb [x] http://a.example.com x", "URIs: http://a.example.com\n http://[::1]\nEnabled: no\n",
	} {
		f.Add(seed)
	}
	files := []string{
		"/home/u/.npmrc", "/etc/pip.conf", "/home/u/.cargo/config.toml", "/home/u/.config/go/env", "/etc/apt/sources.list", "/etc/apt/sources.list.d/x.sources",
	}
	root, err := filepath.EvalSymlinks(f.TempDir())
	if err != nil {
		f.Fatal(err)
	}
	o := ProbeOptions{root: root, Getenv: env(map[string]string{"HOME": "/home/u"}), environ: func() []string { return nil }}
	f.Fuzz(func(t *testing.T, text string) {
		for _, file := range files {
			writeFile(t, root, file, text, 0o600)
		}
		for name := range presetManagers {
			probed, _ := ProbePresets([]string{name}, o, nil)
			for _, e := range probed[name].Entries {
				if r, err := netpolicy.ParseRule(harness.Allow{Host: e.Allow}); err != nil || r.String() != e.Allow || r.Port == 0 {
					t.Errorf("%s: %q: %v", name, e.Allow, err)
				}
			}
		}
	})
}
