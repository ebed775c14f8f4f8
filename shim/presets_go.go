package shim

import (
	"path/filepath"
	"strings"
)

// readGo reads GOPROXY and GOSUMDB from where the go command does (go help
// environment): the environment, the user's file, the installation's go.env.
func readGo(r *presetReader) {
	settings := map[string]setting{}
	for _, file := range r.goFiles() {
		b, _ := r.file(file)
		n := 0
		for line := range strings.Lines(string(b)) {
			n++
			key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
			if ok && !strings.HasPrefix(key, "#") && value != "" {
				settings[key] = setting{value, place(file, n)}
			}
		}
	}
	for _, name := range []string{"GOPROXY", "GOSUMDB"} {
		if v := r.getenv(name); v != "" {
			settings[name] = setting{v, name}
		}
	}
	r.goProxies(settings["GOPROXY"])
	if len(r.entries) > 0 {
		r.goSumDB(settings["GOSUMDB"])
	}
}

// goFiles are the files, the one that wins last.
func (r *presetReader) goFiles() []string {
	var files []string
	root := r.o.Getenv("GOROOT")
	if root == "" {
		root = r.installation("go")
	}
	if filepath.IsAbs(root) {
		files = append(files, filepath.Join(root, "go.env"))
	}
	switch own := r.o.Getenv("GOENV"); {
	case own == "off":
	case own != "":
		files = append(files, own)
	case r.o.configHome() != "":
		files = append(files, filepath.Join(r.o.configHome(), "go", "env"))
	}
	return files
}

// goProxies adds a list of proxies, separated by commas and bars. What comes behind
// direct or off is never asked.
func (r *presetReader) goProxies(v setting) {
	for _, item := range strings.FieldsFunc(v.text, func(c rune) bool { return c == ',' || c == '|' }) {
		switch item = strings.TrimSpace(item); item {
		case "":
		case "direct", "noproxy":
			r.note(v.from, "direct opens nothing: modules fetched from their own hosts need entries in egress.allow")
			return
		case "off":
			r.note(v.from, "off opens nothing")
			return
		default:
			if !strings.Contains(item, ":/") && !strings.HasPrefix(item, "/") { // the go command's own rule
				item = "https://" + item
			}
			r.url(item, v.from)
		}
	}
}

// goSumDB adds the checksum database: NAME, NAME+KEY, or either of them and a URL.
func (r *presetReader) goSumDB(v setting) {
	fields := strings.Fields(v.text)
	switch {
	case len(fields) == 0 || fields[0] == "off":
	case len(fields) > 1:
		r.url(fields[1], v.from)
	default:
		name, _, _ := strings.Cut(fields[0], "+")
		r.url("https://"+name, v.from)
	}
}
