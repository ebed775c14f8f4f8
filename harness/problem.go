package harness

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// ErrInvalid is matched by every error of this package.
var ErrInvalid = errors.New("harness file is not valid")

// ErrNotBuilt is matched by a problem with a field whose feature this version
// does not have. Such a problem matches ErrInvalid too.
var ErrNotBuilt = errors.New("not built yet")

// shownLength bounds the text of a value or key in an error.
const shownLength = 60

// maxProblems bounds the work on a file that is wrong everywhere.
const maxProblems = 200

// Problem is one thing wrong with the harness file. It holds no environment
// value, prompt, option or credential of the file; names and paths it does hold.
type Problem struct {
	// Path is the JSON path, $.egress.allow[2].port, the command-line flag whose
	// value is at fault, or "line N" of an environment file.
	Path string
	// Value is the offending value, quoted and shortened; empty where there is
	// none or it may be secret.
	Value string
	// Message says what is wrong.
	Message string
	// Remedy says what to write instead; it may be empty.
	Remedy string

	notBuilt bool
	// weak problems give way to a plainer one on the same path; beside ones say
	// nothing about the value that was kept.
	weak, beside bool
}

// Error is one line: path, message, value, remedy.
func (p *Problem) Error() string {
	text := p.Path + ": " + p.Message
	if p.Value != "" {
		text += ", got " + p.Value
	}
	if p.Remedy != "" {
		text += "; " + p.Remedy
	}
	return text
}

// Is matches ErrInvalid, and ErrNotBuilt for a feature that is not there yet.
func (p *Problem) Is(target error) bool {
	return target == ErrInvalid || p.notBuilt && target == ErrNotBuilt
}

// problems collects what is wrong with one file.
type problems struct {
	list []*Problem
	// offsets holds the place of every value of the file by path.
	offsets map[string]int64
	// more counts what was found after maxProblems.
	more int
}

func (p *problems) add(path string, value any, message, remedy string) *Problem {
	if p.full() {
		p.more++
		return &Problem{}
	}
	one := &Problem{Path: path, Value: shown(path, value), Message: message, Remedy: remedy}
	p.list = append(p.list, one)
	return one
}

func (p *problems) full() bool { return len(p.list) == maxProblems }

// covers says whether path, or something it lies in, is known to be wrong.
func (p *problems) covers(path string) bool {
	return slices.ContainsFunc(p.list, func(have *Problem) bool {
		rest, found := strings.CutPrefix(path, have.Path)
		return found && !have.weak && !have.beside && (rest == "" || rest[0] == '.' || rest[0] == '[')
	})
}

// dropWeak removes the weak problems on path.
func (p *problems) dropWeak(path string) {
	p.list = slices.DeleteFunc(p.list, func(have *Problem) bool { return have.weak && have.Path == path })
}

// err joins the problems in the order of the file; nil when there are none.
func (p *problems) err() error {
	slices.SortStableFunc(p.list, func(a, b *Problem) int {
		if d := p.offset(a.Path) - p.offset(b.Path); d != 0 {
			return int(d)
		}
		return strings.Compare(a.Error(), b.Error())
	})
	errs := make([]error, len(p.list))
	for i, one := range p.list {
		errs[i] = one
	}
	if p.more > 0 {
		errs = append(errs, &Problem{Path: "$", Message: fmt.Sprintf("%d more problems", p.more)})
	}
	return errors.Join(errs...)
}

// offset is the place of path in the file, or of the nearest value around it.
func (p *problems) offset(path string) int64 {
	for path != "" {
		if at, ok := p.offsets[path]; ok {
			return at
		}
		path = path[:max(strings.LastIndexAny(path, ".["), 0)]
	}
	return 0
}

// secretPath matches values that never stand in an error.
var secretPath = regexp.MustCompile(`^\$\.(prompt|env|egress\.(proxy|brokers)|(fallback\[\d+\]\.)?harness\.(env|options|prefixArgs))([.\[]|$)`)

// namePath matches lists of variable names, where NAME=value is a likely slip.
var namePath = regexp.MustCompile(`^\$\.envFrom\[`)

// envPath matches the maps whose keys are variable names.
var envPath = regexp.MustCompile(`^\$\.((fallback\[\d+\]\.)?harness\.)?env$`)

// shown renders a scalar for an error; lists, objects and secrets give "".
func shown(path string, value any) string {
	if secretPath.MatchString(path) {
		return ""
	}
	switch v := value.(type) {
	case string:
		if namePath.MatchString(path) {
			v, _, _ = strings.Cut(v, "=")
		}
		return quote(v)
	case nil, []any, map[string]any:
		return ""
	default:
		return shorten(fmt.Sprint(v))
	}
}

func quote(s string) string { return strconv.Quote(shorten(s)) }

// shorten cuts s at a rune boundary near shownLength.
func shorten(s string) string {
	if len(s) <= shownLength {
		return s
	}
	cut := shownLength
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}

var plainKey = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// member is the path of an object's member. A variable's name is cut at its
// first "=", after which a value may stand.
func member(path, key string) string {
	if plainKey.MatchString(key) && len(key) <= shownLength {
		return path + "." + key
	}
	if envPath.MatchString(path) {
		key, _, _ = strings.Cut(key, "=")
	}
	return path + "[" + quote(key) + "]"
}

func element(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

// Nearest is the candidate that got is most likely a slip of; "" if none is near.
func Nearest(got string, candidates []string) string {
	best, bound := "", max(2, len(got)/3)+1
	if len(got) > shownLength {
		return ""
	}
	for _, c := range candidates {
		if d := distance(strings.ToLower(got), strings.ToLower(c)); d < bound && d < len(c) {
			best, bound = c, d
		}
	}
	return best
}

// distance counts the edits (insert, delete, replace, swap neighbours) from a to b.
func distance(a, b string) int {
	older, old := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range old {
		old[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row := make([]int, len(b)+1)
		row[0] = i
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			row[j] = min(old[j]+1, row[j-1]+1, old[j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], older[j-2]+1)
			}
		}
		older, old = old, row
	}
	return old[len(b)]
}

// didYouMean is a remedy naming the nearest candidate, "" if none is near.
func (p *problems) didYouMean(got string, candidates []string) string {
	if p.full() {
		return ""
	}
	if best := Nearest(got, candidates); best != "" {
		return fmt.Sprintf("did you mean %q?", best)
	}
	return ""
}
