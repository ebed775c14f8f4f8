package harness

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"
)

//go:generate go test . -run TestSchemaIsFresh -update

//go:embed schema.json
var schemaJSON []byte

// Schema is the JSON Schema (draft 2020-12) of the harness file, the same bytes
// each time. It knows shapes, names and ranges. Rules between fields are not in
// it, nor that some fields are not built yet: what it accepts, Parse may refuse.
// What it refuses, Parse refuses.
func Schema() []byte { return bytes.Clone(schemaJSON) }

// node is the part of JSON Schema that schema.json is written in. Parse checks
// files with it and not with a full validator, because the one at hand compiles
// five meta-schemas at each start of the process, which is slower than all of
// Parse; the tests hold the two against each other.
type node struct {
	Ref                  string           `json:"$ref"`
	Defs                 map[string]*node `json:"$defs"`
	AnyOf                []*node          `json:"anyOf"`
	Type                 string           `json:"type"`
	Properties           map[string]*node `json:"properties"`
	Required             []string         `json:"required"`
	AdditionalProperties *additional      `json:"additionalProperties"`
	PropertyNames        *node            `json:"propertyNames"`
	Items                *node            `json:"items"`
	MaxItems             *int             `json:"maxItems"`
	UniqueItems          bool             `json:"uniqueItems"`
	Enum                 []any            `json:"enum"`
	Minimum              *float64         `json:"minimum"`
	Maximum              *float64         `json:"maximum"`
	MinLength            int              `json:"minLength"`
	Pattern              string           `json:"pattern"`

	// Annotations, without effect.
	Version     string `json:"$schema"`
	ID          string `json:"$id"`
	Title       string `json:"title"`
	Description string `json:"description"`
	Default     any    `json:"default"`

	compile sync.Once
	pattern *regexp.Regexp
}

// matches says whether text has the node's pattern.
func (n *node) matches(text string) bool {
	n.compile.Do(func() { n.pattern = regexp.MustCompile(n.Pattern) })
	return n.pattern.MatchString(text)
}

// additional is false, or the schema of members that have no property.
type additional struct{ schema *node }

func (a *additional) UnmarshalJSON(data []byte) error {
	if string(data) == "false" {
		return nil
	}
	return decodeSchema(data, &a.schema)
}

// decodeSchema refuses keywords that node does not know, so that none is ignored.
func decodeSchema(data []byte, target any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	return dec.Decode(target)
}

var rootSchema = embeddedSchema("schema.json", &schemaJSON)

// embeddedSchema decodes an embedded schema at its first use.
func embeddedSchema(name string, text *[]byte) func() *node {
	return sync.OnceValue(func() *node {
		var root *node
		if err := decodeSchema(*text, &root); err != nil {
			panic(fmt.Sprintf("embedded %s: %v", name, err))
		}
		return root
	})
}

// shapes checks values against the schema.
type shapes struct {
	defs       map[string]*node
	imageGiven bool
	*problems
}

// checkSchema reports what in tree does not fit the schema, and returns the
// tree without those values (null in lists), so that the rest can be decoded
// and judged further.
func checkSchema(root *node, tree any, imageGiven bool, p *problems) any {
	return shapes{root.Defs, imageGiven, p}.check("$", tree, root)
}

// check returns value, or nil where it is of no use.
func (s shapes) check(path string, value any, n *node) any {
	if s.covers(path) {
		return nil
	}
	n, wanted := s.resolve(n, value)
	if n == nil {
		got := typeOf(value)
		if got == "a number" && slices.Contains(wanted, "a whole number") {
			s.add(path, value, "must be a whole number, written plainly", "")
			return nil
		}
		s.add(path, nil, fmt.Sprintf("must be %s, not %s", orList(wanted), got), "")
		return nil
	}
	switch v := value.(type) {
	case map[string]any:
		s.object(path, v, n)
	case []any:
		if n.MaxItems != nil && len(v) > *n.MaxItems {
			s.add(path, nil, fmt.Sprintf("must have at most %d entries, not %d", *n.MaxItems, len(v)), "")
			return nil
		}
		s.list(path, v, n)
	default:
		if message, remedy := s.scalarFault(value, n); message != "" {
			s.add(path, value, message, remedy)
			return nil
		}
		if text, ok := value.(string); ok && !n.matches(text) {
			s.add(path, value, "not of the form "+n.Pattern, "").weak = true
		}
	}
	return value
}

// resolve finds the schema whose type value has, through references and
// alternatives; when there is none it gives the types that would do.
func (s shapes) resolve(n *node, value any) (found *node, wanted []string) {
	for n.Ref != "" {
		n = s.defs[strings.TrimPrefix(n.Ref, "#/$defs/")]
	}
	if len(n.AnyOf) == 0 {
		if hasType(value, n.Type) {
			return n, nil
		}
		return nil, []string{typeNames[n.Type]}
	}
	for _, branch := range n.AnyOf {
		one, types := s.resolve(branch, value)
		if one != nil {
			return one, nil
		}
		wanted = append(wanted, types...)
	}
	return nil, wanted
}

func (s shapes) object(path string, fields map[string]any, n *node) {
	for _, name := range n.Required {
		at := member(path, name)
		if _, given := fields[name]; !given && !(at == "$.image" && s.imageGiven) {
			s.add(at, nil, "needed and not given", "")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		at := member(path, name)
		if n.PropertyNames != nil && !n.PropertyNames.matches(name) {
			s.add(at, nil, "not a name of the form "+n.PropertyNames.Pattern, "").weak = true
		}
		schema := n.Properties[name]
		if schema == nil && n.AdditionalProperties != nil {
			schema = n.AdditionalProperties.schema
		}
		if schema == nil {
			s.add(at, nil, "unknown key", s.didYouMean(name, slices.Sorted(maps.Keys(n.Properties))))
			delete(fields, name)
			continue
		}
		fields[name] = s.check(at, fields[name], schema)
	}
}

func (s shapes) list(path string, items []any, n *node) {
	first := map[any]int{}
	for i := range items {
		at := element(path, i)
		items[i] = s.check(at, items[i], n.Items)
		text, ok := items[i].(string)
		if !ok || !n.UniqueItems {
			continue
		}
		if j, twice := first[text]; twice {
			s.add(at, text, fmt.Sprintf("the same as [%d]", j), "keep one of them").beside = true
			continue
		}
		first[text] = i
	}
}

// scalarFault is what is wrong with a value of the right type, but for its pattern.
func (s shapes) scalarFault(value any, n *node) (message, remedy string) {
	if len(n.Enum) > 0 && !inEnum(value, n.Enum) {
		names := make([]string, len(n.Enum))
		for i, one := range n.Enum {
			names[i] = fmt.Sprint(one)
		}
		got, _ := value.(string)
		return "must be " + orList(names), s.didYouMean(got, names)
	}
	switch v := value.(type) {
	case string:
		if utf8.RuneCountInString(v) < n.MinLength {
			return "must not be empty", ""
		}
	case json.Number:
		f, err := v.Float64()
		switch {
		case err != nil:
			return "number out of range", ""
		case n.Minimum != nil && f < *n.Minimum:
			return "must be at least " + plain(*n.Minimum), ""
		case n.Maximum != nil && f > *n.Maximum:
			return "must be at most " + plain(*n.Maximum), ""
		}
	}
	return "", ""
}

func inEnum(value any, enum []any) bool {
	if number, ok := value.(json.Number); ok {
		f, err := number.Float64()
		return err == nil && slices.Contains(enum, any(f))
	}
	return slices.Contains(enum, value)
}

var wholeForm = regexp.MustCompile(`^-?[0-9]+$`)

// typeNames are the JSON Schema types in words.
var typeNames = map[string]string{
	"object": "an object", "array": "a list", "string": "a string",
	"integer": "a whole number", "number": "a number", "boolean": "true or false",
}

func hasType(value any, name string) bool {
	if number, ok := value.(json.Number); ok && name == "integer" {
		return wholeForm.MatchString(number.String())
	}
	return value != nil && typeOf(value) == typeNames[name]
}

func typeOf(value any) string {
	switch value.(type) {
	case map[string]any:
		return "an object"
	case []any:
		return "a list"
	case string:
		return "a string"
	case json.Number:
		return "a number"
	case bool:
		return "true or false"
	default:
		return "null"
	}
}

func orList(words []string) string {
	if len(words) == 1 {
		return words[0]
	}
	return strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
}

func plain(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }
