package shim

import (
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// npmRegistry matches the settings that name a registry: registry, @scope:registry.
var npmRegistry = regexp.MustCompile(`^(@[^:/]+:)?registry$`)

// readNpm reads what npm itself takes its registries from (npmrc(5), config(7)), but
// for the project's file: the environment wins, then the user's file, then the global one.
func readNpm(r *presetReader) {
	vars := r.npmVariables()
	user := r.npmPath(r.o.Getenv("NPM_CONFIG_USERCONFIG"))
	if user == "" {
		user = strings.Join(r.inHome(".npmrc"), "")
	}
	userSettings := map[string]setting{}
	if user != "" {
		userSettings = r.npmrc(user)
	}
	settings := map[string]setting{}
	for _, file := range r.npmGlobal(userSettings) {
		maps.Copy(settings, r.npmrc(file))
	}
	maps.Copy(settings, userSettings)
	maps.Copy(settings, vars)
	for _, key := range slices.Sorted(maps.Keys(settings)) {
		if npmRegistry.MatchString(key) {
			r.npmURL(settings[key])
		}
	}
}

// npmVariables reads npm_config_*, in whatever case the prefix is written.
func (r *presetReader) npmVariables() map[string]setting {
	r.looked = append(r.looked, "NPM_CONFIG_REGISTRY")
	vars := map[string]setting{}
	names := append([]string{"NPM_CONFIG_REGISTRY", "npm_config_registry"}, r.names()...)
	for _, name := range names {
		key := strings.ToLower(name)
		if key, ok := strings.CutPrefix(key, "npm_config_"); ok && npmRegistry.MatchString(key) {
			if v := r.o.Getenv(name); v != "" {
				vars[key] = setting{v, name}
			}
		}
	}
	return vars
}

// npmGlobal gives the global files, the one that wins last: Debian's, and etc/npmrc
// below the prefix, which is where the node in PATH is unless it is set.
func (r *presetReader) npmGlobal(user map[string]setting) []string {
	if file := r.o.Getenv("NPM_CONFIG_GLOBALCONFIG"); file != "" {
		return []string{r.npmPath(file)}
	}
	files := []string{"/etc/npmrc"}
	prefix := r.npmPath(r.o.Getenv("NPM_CONFIG_PREFIX"))
	if prefix == "" {
		prefix = r.npmPath(user["prefix"].text)
	}
	if prefix == "" {
		prefix = r.installation("node")
	}
	if file := filepath.Join(prefix, "etc", "npmrc"); filepath.IsAbs(file) && !slices.Contains(files, file) {
		files = append(files, file)
	}
	return files
}

// installation is the folder above the one that holds the real file of a program in
// PATH, or empty.
func (r *presetReader) installation(program string) string {
	found, ok := lookPath(r.o, program)
	if !ok {
		return ""
	}
	real, err := filepath.EvalSymlinks(r.o.path(found))
	if err != nil {
		return ""
	}
	dir := filepath.Dir(filepath.Dir(real))
	if r.o.root != "" {
		dir = strings.TrimPrefix(dir, r.o.root)
	}
	return dir
}

// npmrc reads the settings of one file that stand before any section, as npm's ini does.
func (r *presetReader) npmrc(file string) map[string]setting {
	settings := map[string]setting{}
	b, _ := r.file(file)
	n := 0
	for line := range strings.Lines(string(b)) {
		n++
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "[") && strings.HasSuffix(line, "]") {
			break
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok || strings.HasPrefix(line, ";") || strings.HasPrefix(line, "#") {
			continue
		}
		settings[iniText(key)] = setting{iniText(value), place(file, n)}
	}
	return settings
}

// iniText takes off quotes, or what follows an unescaped ; or #.
func iniText(text string) string {
	text = strings.TrimSpace(text)
	if len(text) >= 2 && (text[0] == '"' || text[0] == '\'') && text[len(text)-1] == text[0] {
		return text[1 : len(text)-1]
	}
	if i := strings.IndexAny(text, ";#"); i >= 0 && (i == 0 || text[i-1] != '\\') {
		text = strings.TrimSpace(text[:i])
	}
	return text
}

// npmVariable is ${NAME}, or ${NAME?} for empty where it is not set.
var npmVariable = regexp.MustCompile(`\$\{([^${}?]+)(\?)?\}`)

func (r *presetReader) npmExpand(text string) string {
	return npmVariable.ReplaceAllStringFunc(text, func(ref string) string {
		m := npmVariable.FindStringSubmatch(ref)
		if v := r.o.Getenv(m[1]); v != "" || m[2] != "" {
			return v
		}
		return ref
	})
}

// npmPath expands a path's variables and its leading ~/.
func (r *presetReader) npmPath(text string) string {
	text = r.npmExpand(text)
	if rest, ok := strings.CutPrefix(text, "~/"); ok {
		return strings.Join(r.inHome(rest), "")
	}
	return text
}

func (r *presetReader) npmURL(v setting) {
	text := r.npmExpand(v.text)
	if strings.Contains(text, "${") {
		r.fail(v.from, "it names a variable that is not set", "")
		return
	}
	if !isURL(text) {
		r.fail(v.from, "it is no http or https URL", "")
		return
	}
	r.url(text, v.from)
}

func isURL(text string) bool {
	lower := strings.ToLower(text)
	return strings.HasPrefix(lower, "http://") || strings.HasPrefix(lower, "https://")
}
