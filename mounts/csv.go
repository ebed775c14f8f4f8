package mounts

import (
	"encoding/csv"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// ErrCSV says that a field can't be carried by an engine's --mount flag.
var ErrCSV = errors.New("field can't be written as CSV")

// CSV writes fields as the one CSV record that the --mount flag of Docker and
// Podman takes, without a line end. Commas, quotes, blanks, line feeds and lone
// carriage returns survive. Fields that would not are ErrCSV: empty ones, those
// with a NUL or CR LF (Go's csv reader turns it into LF inside quotes too), and
// invalid UTF-8 (both engines replace it on the way through JSON). Tried with
// Docker 20.10 (client 28.2) and Podman 4.3, as source and as target. It knows
// nothing of the fields' meaning.
func CSV(fields ...string) (string, error) {
	if len(fields) == 0 {
		return "", fmt.Errorf("%w: no fields", ErrCSV)
	}
	for _, f := range fields {
		if reason := unportable(f); reason != "" {
			return "", fmt.Errorf("%w: %q: %s", ErrCSV, f, reason)
		}
	}
	var b strings.Builder
	w := csv.NewWriter(&b)
	if err := w.Write(fields); err != nil {
		return "", fmt.Errorf("%w: %w", ErrCSV, err)
	}
	w.Flush()
	if err := w.Error(); err != nil {
		return "", fmt.Errorf("%w: %w", ErrCSV, err)
	}
	return strings.TrimSuffix(b.String(), "\n"), nil
}

// unportable says why a string can't reach an engine unchanged, or "".
func unportable(s string) string {
	switch {
	case s == "":
		return "it is empty"
	case strings.Contains(s, "\x00"):
		return "it holds a NUL"
	case strings.Contains(s, "\r\n"):
		return "it holds a carriage return before a line feed"
	case !utf8.ValidString(s):
		return "it is not UTF-8"
	}
	return ""
}
