package harness

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
)

// maxDepth bounds the nesting of objects and lists.
const maxDepth = 64

// walker reads a file into plain values: map[string]any, []any, string,
// json.Number, bool and nil. Of a repeated key the first value stays.
type walker struct {
	dec  *jsontext.Decoder
	data []byte
	*problems
}

// parseTree reads data as exactly one JSON value. It reports false when the text is
// no JSON or larger than MaxFile, because then nothing more can be said about it.
func parseTree(data []byte, p *problems) (any, bool) {
	if len(data) > MaxFile {
		p.add("$", nil, fmt.Sprintf("the file is larger than %d bytes", MaxFile), "")
		return nil, false
	}
	w := walker{jsontext.NewDecoder(bytes.NewReader(data), jsontext.AllowDuplicateNames(true)), data, p}
	tree, err := w.value("$", 0)
	if err != nil {
		w.syntaxError(err)
		return nil, false
	}
	if _, err := w.dec.ReadToken(); !errors.Is(err, io.EOF) {
		w.add("$", nil, "more follows after the end of the object, at "+w.place(w.dec.InputOffset()), "remove it")
		return nil, false
	}
	return tree, true
}

func (w walker) value(path string, depth int) (any, error) {
	kind := w.dec.PeekKind()
	if _, seen := w.offsets[path]; !seen {
		w.offsets[path] = w.dec.InputOffset()
	}
	switch kind {
	case '{', '[':
		if depth == maxDepth {
			w.add(path, nil, fmt.Sprintf("nested deeper than %d levels", maxDepth), "")
			return nil, w.dec.SkipValue()
		}
		if _, err := w.dec.ReadToken(); err != nil {
			return nil, err
		}
		if kind == '{' {
			return w.object(path, depth+1)
		}
		return w.list(path, depth+1)
	case '0':
		return w.number(path)
	default:
		return w.scalar()
	}
}

func (w walker) object(path string, depth int) (any, error) {
	fields := map[string]any{}
	for w.dec.PeekKind() != '}' {
		name, err := w.dec.ReadToken()
		if err != nil {
			return nil, err
		}
		key := name.String()
		at := member(path, key)
		value, err := w.value(at, depth)
		if err != nil {
			return nil, err
		}
		if _, twice := fields[key]; twice {
			w.add(at, nil, "given twice", "keep one of them").beside = true
			continue
		}
		fields[key] = value
	}
	_, err := w.dec.ReadToken()
	return fields, err
}

func (w walker) list(path string, depth int) (any, error) {
	items := []any{}
	for w.dec.PeekKind() != ']' {
		item, err := w.value(element(path, len(items)), depth)
		if err != nil {
			return nil, err
		}
		items = append(items, item)
	}
	_, err := w.dec.ReadToken()
	return items, err
}

var numberForm = regexp.MustCompile(`^-?[0-9.]{1,40}(?:[eE]([+-]?[0-9]{1,3}))?$`)

// number keeps a number as written. Its length and exponent are bounded, since
// an exact big number is made of it later.
func (w walker) number(path string) (any, error) {
	raw, err := w.dec.ReadValue()
	if err != nil {
		return nil, err
	}
	form := numberForm.FindSubmatch(raw)
	if form == nil {
		w.add(path, json.Number(raw), "number out of range", "")
		return json.Number("0"), nil
	}
	if exp, _ := strconv.Atoi(string(form[1])); exp > 300 || exp < -300 {
		w.add(path, json.Number(raw), "number out of range", "")
		return json.Number("0"), nil
	}
	return json.Number(raw), nil
}

func (w walker) scalar() (any, error) {
	token, err := w.dec.ReadToken()
	if err != nil {
		return nil, err
	}
	switch token.Kind() {
	case '"':
		return token.String(), nil
	case 't', 'f':
		return token.Bool(), nil
	default:
		return nil, nil
	}
}

// syntaxError names the place and the path, never the text around it.
func (w walker) syntaxError(err error) {
	syntax, ok := errors.AsType[*jsontext.SyntacticError](err)
	if !ok {
		w.add("$", nil, "ends before the value is complete", "")
		return
	}
	w.add(w.pointerPath(syntax.JSONPointer), nil, fmt.Sprintf("not valid JSON at %s: %s", w.place(syntax.ByteOffset), reason(syntax.Err)), "")
}

// reason is the cause in words. Texts of the JSON package may quote what stands
// in the file, so only known ones pass.
func reason(err error) string {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "the text ends early"
	case err != nil && invalidUTF8.MatchString(err.Error()):
		return "not valid UTF-8"
	default:
		return "unexpected text"
	}
}

var invalidUTF8 = regexp.MustCompile(`(?i)utf-8|surrogate`)

// pointerPath is the path of a JSON Pointer. Which tokens are list positions is
// told by the values seen so far. It ends at maxDepth.
func (w walker) pointerPath(pointer jsontext.Pointer) string {
	path, depth := "$", 0
	for token := range pointer.Tokens() {
		if depth++; depth > maxDepth {
			break
		}
		next := member(path, token)
		if i, err := strconv.Atoi(token); err == nil {
			if _, seen := w.offsets[element(path, i)]; seen {
				next = element(path, i)
			}
		}
		path = next
	}
	return path
}

// place turns a byte offset into a line and a column.
func (w walker) place(offset int64) string {
	before := w.data[:min(int(offset), len(w.data))]
	line := bytes.Count(before, []byte("\n")) + 1
	return fmt.Sprintf("line %d, column %d", line, len(before)-bytes.LastIndexByte(before, '\n'))
}
