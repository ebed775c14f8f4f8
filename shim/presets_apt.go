package shim

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// aptFile matches the names of files that apt reads (sources.list(5)).
var aptFile = regexp.MustCompile(`^[A-Za-z0-9_.-]+\.(list|sources)$`)

// aptFolder holds further sources.
const aptFolder = "/etc/apt/sources.list.d"

// readApt reads the machine's own sources, which need not be those of the image.
func readApt(r *presetReader) {
	files := append([]string{"/etc/apt/sources.list"}, r.aptFolder()...)
	for _, file := range files {
		b, ok := r.file(file)
		switch {
		case !ok:
		case filepath.Ext(file) == ".sources":
			r.aptStanzas(b, file)
		default:
			r.aptLines(b, file)
		}
	}
}

// aptFolder gives the folder's files that apt reads, sorted.
func (r *presetReader) aptFolder() []string {
	r.looked = append(r.looked, aptFolder)
	entries, err := os.ReadDir(r.o.path(aptFolder))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.fail(aptFolder, "it can't be read as a folder", "")
	}
	var files []string
	for _, e := range entries {
		if aptFile.MatchString(e.Name()) {
			files = append(files, filepath.Join(aptFolder, e.Name()))
		}
	}
	return files
}

// aptLines reads the one-line format: deb [OPTIONS] URI SUITE …
func (r *presetReader) aptLines(b []byte, file string) {
	n := 0
	for line := range strings.Lines(string(b)) {
		n++
		line, _, _ = strings.Cut(line, "#")
		kind, rest, _ := strings.Cut(strings.TrimSpace(strings.ReplaceAll(line, "\t", " ")), " ")
		if kind == "" {
			continue
		}
		rest = strings.TrimSpace(rest)
		if strings.HasPrefix(rest, "[") {
			_, rest, _ = strings.Cut(rest, "]")
		}
		fields := strings.Fields(rest)
		if kind != "deb" && kind != "deb-src" || len(fields) == 0 {
			r.fail(place(file, n), "it is no source (deb URI SUITE COMPONENT)", "")
			continue
		}
		r.url(fields[0], place(file, n))
	}
}

// aptStanza is what of a deb822 stanza matters.
type aptStanza struct {
	uris []setting
	off  bool
}

// aptStanzas reads the deb822 format.
func (r *presetReader) aptStanzas(b []byte, file string) {
	var s aptStanza
	field, n := "", 0
	for line := range strings.Lines(string(b)) {
		n++
		switch text := strings.TrimSpace(line); {
		case strings.HasPrefix(line, "#"):
		case text == "":
			r.aptStanza(s)
			s, field = aptStanza{}, ""
		case line[0] == ' ' || line[0] == '\t':
			s.add(field, text, place(file, n))
		default:
			name, value, ok := strings.Cut(text, ":")
			if !ok {
				r.fail(place(file, n), "it is no field (NAME: VALUE)", "")
			}
			field = strings.ToLower(strings.TrimSpace(name))
			s.add(field, value, place(file, n))
		}
	}
	r.aptStanza(s)
}

func (s *aptStanza) add(field, value, from string) {
	switch field {
	case "uris":
		for _, u := range strings.Fields(value) {
			s.uris = append(s.uris, setting{u, from})
		}
	case "enabled":
		s.off = slices.Contains([]string{"no", "false", "without", "off", "disable", "0"}, strings.ToLower(strings.TrimSpace(value)))
	}
}

func (r *presetReader) aptStanza(s aptStanza) {
	if s.off {
		return
	}
	for _, u := range s.uris {
		r.url(u.text, u.from)
	}
}
