package mounts

import (
	"encoding/csv"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A61, M01, M02: parsed the way both engines' --mount parsers do.
func TestCSV(t *testing.T) {
	for _, tc := range []struct {
		name   string
		fields []string
		want   string
		err    error
	}{
		{"plain", []string{"type=bind", "source=/a", "readonly"}, "type=bind,source=/a,readonly", nil},
		{"comma", []string{"source=/d,c"}, `"source=/d,c"`, nil},
		{"colon", []string{"source=/d:c"}, "source=/d:c", nil},
		{"quote", []string{`source=/q"q`}, `"source=/q""q"`, nil},
		{"single quote", []string{"source=/it's"}, "source=/it's", nil},
		{"dollar", []string{"source=/$HOME"}, "source=/$HOME", nil},
		{"leading dash", []string{"-source"}, "-source", nil},
		{"blanks", []string{" a ", "b"}, `" a ",b`, nil},
		{"line feed", []string{"a\nb"}, "\"a\nb\"", nil},
		{"carriage return", []string{"a\rb"}, "\"a\rb\"", nil},
		{"trailing carriage return", []string{"a\r", "b"}, "\"a\r\",b", nil},
		{"trailing line feed", []string{"a\n"}, "\"a\n\"", nil},
		{"other control", []string{"a\x01\tb"}, "a\x01\tb", nil},
		{"not ASCII", []string{"é\u00a0"}, "é\u00a0", nil},
		{"CR LF", []string{"a\r\nb"}, "", ErrCSV},
		{"not UTF-8", []string{"a\xff"}, "", ErrCSV},
		{"NUL", []string{"a\x00"}, "", ErrCSV},
		{"empty field", []string{"a", ""}, "", ErrCSV},
		{"no fields", nil, "", ErrCSV},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := CSV(tc.fields...)
			if !errors.Is(err, tc.err) || got != tc.want {
				t.Fatalf("CSV(%q) = %q, %v; want %q, %v", tc.fields, got, err, tc.want, tc.err)
			}
			if err == nil {
				checkCSV(t, got, tc.fields)
			}
		})
	}
}

// checkCSV parses record as the engines do and expects exactly fields.
func checkCSV(t *testing.T, record string, fields []string) {
	t.Helper()
	r := csv.NewReader(strings.NewReader(record))
	got, err := r.Read()
	if err != nil {
		t.Fatalf("parse %q: %v", record, err)
	}
	if diff := cmp.Diff(fields, got); diff != "" {
		t.Errorf("record %q (-want +got):\n%s", record, diff)
	}
	if _, err := r.Read(); !errors.Is(err, io.EOF) {
		t.Errorf("record %q holds more than one record", record)
	}
}

func FuzzCSV(f *testing.F) {
	for _, s := range []string{"a", "d,c", `q"q`, "n\nl", "cr\r", "\r\n", "bad\xff", " x ", `\.`, "#", "\ufeff"} {
		f.Add(s, "b")
		f.Add("source="+s, s)
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		fields := []string{a, b}
		record, err := CSV(fields...)
		if err != nil {
			if !errors.Is(err, ErrCSV) || !slices.ContainsFunc(fields, func(s string) bool { return unportable(s) != "" }) {
				t.Fatalf("CSV(%q): %v", fields, err)
			}
			return
		}
		checkCSV(t, record, fields)
	})
}
