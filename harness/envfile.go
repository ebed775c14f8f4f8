package harness

import (
	"bytes"
	"fmt"
	"strings"
	"unicode/utf8"
)

// EnvVar is one variable of an environment file.
type EnvVar struct{ Name, Value string }

// ParseEnvFile reads NAME=value lines, in the order of the file. A value is
// every byte from the first "=" to the end of the line: quotes, backslashes,
// "$", further "=" and trailing blanks stay, and nothing is expanded. Blank
// lines and lines that start with "#" are skipped.
//
// A value can't hold a line break; such values belong into env. Refused are
// carriage returns (a file with Windows line ends would add one to each value),
// NUL, text that is not UTF-8, names given twice, names agentshim sets itself,
// `export`, and files larger than MaxFile. Every problem is reported at once, as
// *Problem with the line's number as its path and never a value.
func ParseEnvFile(data []byte) ([]EnvVar, error) {
	p := &problems{offsets: map[string]int64{}}
	if len(data) > MaxFile {
		p.add("line 1", nil, fmt.Sprintf("the file is larger than %d bytes", MaxFile), "")
		return nil, p.err()
	}
	var vars []EnvVar
	lines := map[string]int{}
	number := 0
	for line := range bytes.SplitSeq(data, []byte("\n")) {
		number++
		at := fmt.Sprintf("line %d", number)
		p.offsets[at] = int64(number)
		text := string(line)
		if strings.Trim(text, " \t") == "" || text[0] == '#' {
			continue
		}
		name, value, message := envLine(text)
		if message != "" {
			p.add(at, nil, message, "")
			continue
		}
		if first, twice := lines[name]; twice {
			p.add(at, nil, fmt.Sprintf("%s is given on line %d already", name, first), "keep one of them")
			continue
		}
		lines[name] = number
		vars = append(vars, EnvVar{name, value})
	}
	if err := p.err(); err != nil {
		return nil, err
	}
	return vars, nil
}

// envLine splits one line, or says what is wrong with it.
func envLine(line string) (name, value, message string) {
	name, value, found := strings.Cut(line, "=")
	switch {
	case strings.Contains(line, "\r"):
		message = "holds a carriage return; use Unix line ends"
	case strings.ContainsRune(line, 0):
		message = "must not hold NUL"
	case !utf8.ValidString(line):
		message = "not valid UTF-8"
	case !found:
		message = `has no "="; to pass on a variable of the caller use envFrom`
	case strings.HasPrefix(name, "export "):
		message = `this is no shell script; leave out "export"`
	case len(line) > maxArgument:
		message = fmt.Sprintf("longer than a variable may be (%d bytes)", maxArgument)
	default:
		message = variableFault(name)
	}
	return name, value, message
}
