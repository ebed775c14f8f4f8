package shim

import (
	"slices"
	"strings"
)

// gitSetting is one line of a git configuration. Key is section.name or
// section.subsection.name, with section and name in lower case.
type gitSetting struct {
	Key   string `json:"key"`
	Value string `json:"value"`
	// Bare is a key without "=", which stands for true.
	Bare bool `json:"-"`
}

// maxSettings bounds what parseGitConfig keeps.
const maxSettings = 20_000

// parseGitConfig reads a git configuration as data: nothing is included, expanded
// or run. What git itself would not read is refused.
func parseGitConfig(b []byte) ([]gitSetting, error) {
	p := configParser{rest: strings.TrimPrefix(string(b), "\ufeff")}
	for p.next() {
		if len(p.out) > maxSettings {
			return nil, gitRefuse(gitTooLarge, "config", "too many settings")
		}
	}
	if p.bad != "" {
		return nil, gitRefuse(gitMalformed, "config", p.bad)
	}
	return p.out, nil
}

type configParser struct {
	rest    string
	section string
	out     []gitSetting
	bad     string
}

// next takes one section header, one setting or one comment; false at the end or
// after a fault.
func (p *configParser) next() bool {
	p.rest = strings.TrimLeft(p.rest, " \t\r\n")
	switch {
	case p.rest == "":
		return false
	case p.rest[0] == '#' || p.rest[0] == ';':
		_, p.rest, _ = strings.Cut(p.rest, "\n")
		return true
	case p.rest[0] == '[':
		return p.header()
	}
	return p.setting()
}

func (p *configParser) fail(why string) bool {
	p.bad = why
	return false
}

// header is [section], [section.sub] or [section "sub"].
func (p *configParser) header() bool {
	i := 1
	for i < len(p.rest) && (isConfigName(p.rest[i]) || p.rest[i] == '.') {
		i++
	}
	p.section = strings.ToLower(p.rest[1:i])
	p.rest = strings.TrimLeft(p.rest[i:], " \t")
	if strings.HasPrefix(p.rest, `"`) && !p.subsection() {
		return false
	}
	if p.section == "" || !strings.HasPrefix(p.rest, "]") {
		return p.fail("a section's name is malformed")
	}
	p.rest = p.rest[1:]
	return true
}

// subsection keeps its case; a backslash stands for the character behind it.
func (p *configParser) subsection() bool {
	var sub strings.Builder
	for i := 1; i < len(p.rest); i++ {
		switch c := p.rest[i]; c {
		case '"':
			p.section += "." + sub.String()
			p.rest = p.rest[i+1:]
			return true
		case '\n':
			return p.fail("a section's name is malformed")
		case '\\':
			if i++; i == len(p.rest) || p.rest[i] == '\n' {
				return p.fail("a section's name is malformed")
			}
			sub.WriteByte(p.rest[i])
		default:
			sub.WriteByte(c)
		}
	}
	return p.fail("a section's name is malformed")
}

func (p *configParser) setting() bool {
	i := 0
	for i < len(p.rest) && isConfigName(p.rest[i]) {
		i++
	}
	if i == 0 || p.rest[0] == '-' || p.section == "" {
		return p.fail("a line is no setting")
	}
	s := gitSetting{Key: p.section + "." + strings.ToLower(p.rest[:i])}
	p.rest = strings.TrimLeft(p.rest[i:], " \t")
	switch {
	case strings.HasPrefix(p.rest, "="):
		p.rest = p.rest[1:]
		value, ok := p.value()
		if !ok {
			return p.fail("a value is malformed")
		}
		s.Value = value
	case p.rest == "" || strings.IndexByte("\r\n#;", p.rest[0]) >= 0:
		s.Bare, s.Value = true, "true"
	default:
		return p.fail("a line is no setting")
	}
	p.out = append(p.out, s)
	return true
}

// value ends at the line's end or a comment; space at both ends is dropped, quotes
// keep it; a backslash at the end of a line goes on with the next.
func (p *configParser) value() (string, bool) {
	var out []byte
	keep, quoted := 0, false // out[:keep] is what trailing space is cut down to
	s := strings.TrimLeft(p.rest, " \t")
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case c == '\n' || (!quoted && (c == '#' || c == ';')):
			if c != '\n' {
				_, p.rest, _ = strings.Cut(s[i:], "\n")
			} else {
				p.rest = s[i+1:]
			}
			return string(out[:keep]), !quoted
		case c == '"':
			quoted = !quoted
			keep = len(out)
			continue
		case c == '\\':
			i++
			if i+1 < len(s) && s[i] == '\r' && s[i+1] == '\n' {
				i++
			}
			if i < len(s) && s[i] == '\n' {
				continue
			}
			if i == len(s) || strings.IndexByte(`tbn\"`, s[i]) < 0 {
				return "", false
			}
			c = map[byte]byte{'t': '\t', 'b': '\b', 'n': '\n', '\\': '\\', '"': '"'}[s[i]]
			out = append(out, c)
			keep = len(out)
			continue
		}
		out = append(out, c)
		if quoted || (c != ' ' && c != '\t' && c != '\r') {
			keep = len(out)
		}
	}
	p.rest = ""
	return string(out[:keep]), !quoted
}

func isConfigName(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-'
}

// gitSettings answers by key; the last line wins, as in git.
type gitSettings []gitSetting

func (s gitSettings) get(key string) (string, bool) {
	for _, e := range slices.Backward(s) {
		if e.Key == key {
			return e.Value, true
		}
	}
	return "", false
}

// isTrue follows git's boolean words; any other value counts as true, which is the
// stricter answer for everything asked here.
func (s gitSettings) isTrue(key string) bool {
	v, ok := s.get(key)
	if !ok {
		return false
	}
	switch strings.ToLower(v) {
	case "", "0", "false", "no", "off":
		return false
	}
	return true
}

// keptSettings are the ones that say how the working tree was written, with the
// values they may have. Nothing else of the host's configuration reaches an agent.
var keptSettings = []struct {
	key    string
	values []string
}{
	{"core.autocrlf", []string{"true", "false", "input"}},
	{"core.eol", []string{"lf", "crlf", "native"}},
	{"core.filemode", []string{"true", "false"}},
	{"core.ignorecase", []string{"true", "false"}},
	{"core.precomposeunicode", []string{"true", "false"}},
	{"core.safecrlf", []string{"true", "false", "warn"}},
	{"core.symlinks", []string{"true", "false"}},
}

func (s gitSettings) kept() []gitSetting {
	var out []gitSetting
	for _, k := range keptSettings {
		if v, ok := s.get(k.key); ok && slices.Contains(k.values, strings.ToLower(v)) {
			out = append(out, gitSetting{Key: k.key, Value: strings.ToLower(v)})
		}
	}
	return out
}

// checkGitConfig refuses what the private repository could not keep up. linked
// says that the configuration is that of a linked working tree, which may belong to
// a bare repository.
func checkGitConfig(s gitSettings, linked bool) error {
	version, _ := s.get("core.repositoryformatversion")
	if version != "" && version != "0" && version != "1" {
		return gitRefuse(gitExtension, "config", "core.repositoryformatversion is not 0 or 1")
	}
	if s.isTrue("core.bare") && !linked {
		return gitRefuse(gitBare, "config", "core.bare is set")
	}
	if s.isTrue("core.sparsecheckout") {
		return gitRefuse(gitSparse, "config", "core.sparseCheckout is set")
	}
	for _, e := range s {
		if err := checkGitSetting(e); err != nil {
			return err
		}
	}
	return nil
}

func checkGitSetting(e gitSetting) error {
	value := strings.ToLower(e.Value)
	switch {
	case e.Key == "extensions.partialclone",
		strings.HasPrefix(e.Key, "remote.") && strings.HasSuffix(e.Key, ".promisor") && gitSettings{e}.isTrue(e.Key),
		strings.HasPrefix(e.Key, "remote.") && strings.HasSuffix(e.Key, ".partialclonefilter"):
		return gitRefuse(gitPartial, "config", printable(e.Key)+" is set")
	case e.Key == "extensions.objectformat" && value != "sha1", e.Key == "extensions.compatobjectformat":
		return gitRefuse(gitObjectFormat, "config", printable(e.Key)+" is set")
	case e.Key == "extensions.refstorage" && value != "files":
		return gitRefuse(gitRefFormat, "config", printable(e.Key)+" is set")
	}
	name, ok := strings.CutPrefix(e.Key, "extensions.")
	if ok && !slices.Contains([]string{"noop", "objectformat", "preciousobjects", "refstorage", "relativeworktrees", "worktreeconfig"}, name) {
		return gitRefuse(gitExtension, "config", "extensions has an unknown name")
	}
	return nil
}

// renderGitConfig writes settings whose keys are section.name, in the given order.
func renderGitConfig(settings []gitSetting) []byte {
	var b strings.Builder
	for _, s := range settings {
		section, name, _ := strings.Cut(s.Key, ".")
		b.WriteString("[" + section + "]\n\t" + name + " = " + quoteConfig(s.Value) + "\n")
	}
	return []byte(b.String())
}

// quoteConfig quotes every value. A configuration can't hold a NUL; it is dropped.
func quoteConfig(v string) string {
	return `"` + strings.NewReplacer("\\", `\\`, `"`, `\"`, "\n", `\n`, "\t", `\t`, "\b", `\b`, "\x00", "").Replace(v) + `"`
}
