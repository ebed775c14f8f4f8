package shim

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// quoteName gives a file's name for a terminal and for people: as it is when every
// rune prints, else in Go's quotes, with control characters, direction marks and
// bytes that are no UTF-8 escaped.
func quoteName(name string) string {
	if name == "" {
		return "."
	}
	q := strconv.Quote(name)
	if plain := q[1 : len(q)-1]; plain == name && strings.TrimSpace(name) == name {
		return name
	}
	return q
}

// ShowName gives a path that an agent may have made, safe for a terminal and for one line.
func ShowName(p string) string { return quoteName(p) }

// briefName is quoteName for a message: of a long name its end.
func briefName(name string) string {
	q := []rune(quoteName(name))
	if len(q) > maxLine {
		return "…" + string(q[len(q)-maxLine:])
	}
	return string(q)
}

// maxShownLine cuts lines of a diff.
const maxShownLine = 1000

// escapeLine makes one line of an untrusted file safe for a terminal: what does not
// print is escaped, a tab stays, and what is too long is cut.
func escapeLine(line []byte) string {
	var b strings.Builder
	for n := 0; len(line) > 0; n++ {
		if n == maxShownLine {
			b.WriteString("…")
			break
		}
		r, size := utf8.DecodeRune(line)
		switch {
		case r == utf8.RuneError && size == 1:
			b.WriteString(`\x` + hexByte(line[0]))
		case r == '\t' || strconv.IsPrint(r):
			b.WriteRune(r)
		default:
			q := strconv.QuoteRune(r)
			b.WriteString(q[1 : len(q)-1])
		}
		line = line[size:]
	}
	return b.String()
}

func hexByte(b byte) string {
	const digits = "0123456789abcdef"
	return string([]byte{digits[b>>4], digits[b&15]})
}
