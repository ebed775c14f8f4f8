package shim

import (
	"path/filepath"
	"slices"
	"strings"
)

// pipOptions are the options that name an index or a page of links, pipSections the
// commands that fetch.
var (
	pipOptions  = []string{"index-url", "extra-index-url", "find-links"}
	pipSections = []string{"global", "download", "install", "lock", "wheel"}
)

// readPip reads what pip itself takes its indexes from (pip's "Configuration" page),
// but for a virtual environment's file, which may be the agent's. A variable wins,
// then the file that comes last.
func readPip(r *presetReader) {
	found := map[string]iniItem{}
	for _, file := range r.pipFiles() {
		b, _ := r.file(file)
		items, bad := parseINI(b, file)
		if bad > 0 {
			r.fail(place(file, bad), "it is no section, no KEY = VALUE and no continuation", "")
		}
		for _, it := range items {
			if slices.Contains(pipSections, it.section) && slices.Contains(pipOptions, it.key) {
				found[it.section+"."+it.key] = it
			}
		}
	}
	for _, option := range pipOptions {
		r.pipOption(option, found)
	}
}

func (r *presetReader) pipOption(option string, found map[string]iniItem) {
	name := "PIP_" + strings.ToUpper(strings.ReplaceAll(option, "-", "_"))
	if v := r.getenv(name); v != "" {
		r.pipURLs(v, name)
		return
	}
	for _, section := range pipSections {
		if it, ok := found[section+"."+option]; ok {
			r.pipURLs(it.value, it.from)
		}
	}
}

func (r *presetReader) pipURLs(text, from string) {
	for _, u := range strings.Fields(text) {
		r.url(u, from)
	}
}

// pipFiles are the files in the order in which they are read. PIP_CONFIG_FILE comes
// last; it replaces the user's, and all of them when it is /dev/null.
func (r *presetReader) pipFiles() []string {
	own := r.o.Getenv("PIP_CONFIG_FILE")
	if own == "/dev/null" {
		return nil
	}
	dirs := r.o.Getenv("XDG_CONFIG_DIRS")
	if dirs == "" {
		dirs = "/etc/xdg"
	}
	var files []string
	for _, dir := range filepath.SplitList(dirs) {
		if filepath.IsAbs(dir) {
			files = append(files, filepath.Join(dir, "pip", "pip.conf"))
		}
	}
	files = append(files, "/etc/pip.conf")
	if own != "" {
		return append(files, own)
	}
	files = append(files, r.inHome(".pip/pip.conf")...)
	if dir := r.o.configHome(); dir != "" {
		files = append(files, filepath.Join(dir, "pip", "pip.conf"))
	}
	return files
}

// iniItem is one setting of a file.
type iniItem struct{ section, key, value, from string }

// parseINI reads Python's configparser format. bad is the first line that it does not
// know, 0 where there is none.
func parseINI(b []byte, file string) (items []iniItem, bad int) {
	section, n, open := "", 0, false
	for line := range strings.Lines(string(b)) {
		n++
		text := strings.TrimSpace(line)
		switch {
		case text == "" || text[0] == '#' || text[0] == ';':
		case open && (line[0] == ' ' || line[0] == '\t'):
			items[len(items)-1].value += "\n" + text
		case text[0] == '[' && text[len(text)-1] == ']':
			section, open = text[1:len(text)-1], false
		default:
			i := strings.IndexAny(text, "=:")
			if i <= 0 || section == "" {
				return items, n
			}
			items = append(items, iniItem{section, pipKey(text[:i]), strings.TrimSpace(text[i+1:]), place(file, n)})
			open = true
		}
	}
	return items, 0
}

// pipKey is pip's own normal form of an option's name.
func pipKey(text string) string {
	return strings.TrimPrefix(strings.ReplaceAll(strings.ToLower(strings.TrimSpace(text)), "_", "-"), "--")
}
