package harness

import (
	"bytes"
	_ "embed"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
)

//go:generate go test . -run TestSchemaIsFresh -update

//go:embed schema.json
var schemaJSON []byte

const schemaURL = "urn:agentshim:harness:1"

// Schema is the JSON Schema (draft 2020-12) of the harness file, the same bytes
// each time. It knows shapes, names and ranges. Rules between fields are not in
// it, nor that some fields are not built yet: what it accepts, Parse may refuse.
func Schema() []byte { return bytes.Clone(schemaJSON) }

// compiled holds the schema as a document and ready for use.
var compiled = sync.OnceValues(func() (map[string]any, *jsonschema.Schema) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(schemaJSON))
	if err != nil {
		panic(fmt.Sprintf("embedded schema: %v", err))
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource(schemaURL, doc); err != nil {
		panic(fmt.Sprintf("embedded schema: %v", err))
	}
	return doc.(map[string]any), c.MustCompile(schemaURL)
})

// checkSchema reports what in tree does not fit the schema, and returns the
// tree with those values taken out (null in lists), so that what is left can be
// decoded and judged further.
func checkSchema(tree any, imageGiven bool, p *problems) any {
	doc, schema := compiled()
	err := schema.Validate(tree)
	if err == nil {
		return tree
	}
	t := translator{tree: tree, doc: doc, imageGiven: imageGiven, problems: p}
	for _, leaf := range leaves(err.(*jsonschema.ValidationError)) {
		t.report(leaf)
	}
	return t.tree
}

// leaves are the errors that say something by themselves.
func leaves(e *jsonschema.ValidationError) []*jsonschema.ValidationError {
	switch e.ErrorKind.(type) {
	case *kind.Schema, *kind.Group, *kind.Reference, *kind.AllOf:
		var all []*jsonschema.ValidationError
		for _, cause := range e.Causes {
			all = append(all, leaves(cause)...)
		}
		return all
	case *kind.AnyOf:
		return bestBranch(e)
	default:
		return []*jsonschema.ValidationError{e}
	}
}

// bestBranch is the alternative whose type fits the value; where none does, one
// error that names the types of all.
func bestBranch(e *jsonschema.ValidationError) []*jsonschema.ValidationError {
	wrong := &kind.Type{}
	for _, cause := range e.Causes {
		branch := leaves(cause)
		i := slices.IndexFunc(branch, func(leaf *jsonschema.ValidationError) bool {
			_, isType := leaf.ErrorKind.(*kind.Type)
			return isType && len(leaf.InstanceLocation) == len(e.InstanceLocation)
		})
		if i < 0 {
			return branch
		}
		mismatch := branch[i].ErrorKind.(*kind.Type)
		wrong.Got, wrong.Want = mismatch.Got, append(wrong.Want, mismatch.Want...)
	}
	return []*jsonschema.ValidationError{{SchemaURL: e.SchemaURL, InstanceLocation: e.InstanceLocation, ErrorKind: wrong}}
}

// translator turns the schema library's errors into problems.
type translator struct {
	tree       any
	doc        map[string]any
	imageGiven bool
	*problems
}

func (t *translator) report(e *jsonschema.ValidationError) {
	path, value := t.find(e.InstanceLocation)
	if t.covers(path) {
		return
	}
	switch k := e.ErrorKind.(type) {
	case *kind.Required:
		for _, name := range k.Missing {
			if at := member(path, name); at != "$.image" || !t.imageGiven {
				t.add(at, nil, "needed and not given", "")
			}
		}
	case *kind.AdditionalProperties:
		known := t.knownKeys(e.SchemaURL)
		for _, name := range k.Properties {
			t.add(member(path, name), nil, "unknown key", didYouMean(name, known))
			delete(value.(map[string]any), name)
		}
	case *kind.Pattern:
		t.add(path, value, "not of the form "+k.Want, "").weak = true
	case *kind.PropertyNames:
		t.add(member(path, k.Property), nil, "not a valid name", "").weak = true
	case *kind.UniqueItems:
		j := k.Duplicates[1]
		t.add(element(path, j), nil, fmt.Sprintf("the same as [%d]", k.Duplicates[0]), "keep one of them").beside = true
	default:
		message, remedy := words(e.ErrorKind, value)
		t.add(path, value, message, remedy)
		t.clear(e.InstanceLocation)
	}
}

// words says what a value must be.
func words(k jsonschema.ErrorKind, value any) (message, remedy string) {
	switch k := k.(type) {
	case *kind.Type:
		return fmt.Sprintf("must be %s, not %s", typeNames(k.Want), typeName(k.Got)), ""
	case *kind.Enum:
		names := make([]string, len(k.Want))
		for i, want := range k.Want {
			names[i] = fmt.Sprint(want)
		}
		got, _ := value.(string)
		return "must be " + orList(names), didYouMean(got, names)
	case *kind.Minimum:
		return "must be at least " + number(k.Want), ""
	case *kind.Maximum:
		return "must be at most " + number(k.Want), ""
	case *kind.MinLength:
		return "must not be empty", ""
	default:
		return "does not fit the schema", ""
	}
}

func typeNames(kinds []string) string {
	names := make([]string, len(kinds))
	for i, one := range kinds {
		names[i] = typeName(one)
	}
	return orList(names)
}

func typeName(jsonType string) string {
	switch jsonType {
	case "object":
		return "an object"
	case "array":
		return "a list"
	case "string":
		return "a string"
	case "integer":
		return "a whole number"
	case "number":
		return "a number"
	case "boolean":
		return "true or false"
	default:
		return jsonType
	}
}

func orList(words []string) string {
	if len(words) == 1 {
		return words[0]
	}
	return strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
}

func number(r *big.Rat) string {
	f, _ := r.Float64()
	return strconv.FormatFloat(f, 'f', -1, 64)
}

// find gives the path and the value at a location.
func (t *translator) find(location []string) (string, any) {
	path, value := "$", t.tree
	for _, token := range location {
		switch v := value.(type) {
		case map[string]any:
			path, value = member(path, token), v[token]
		case []any:
			i, _ := strconv.Atoi(token)
			path, value = element(path, i), v[i]
		}
	}
	return path, value
}

// clear sets the value at a location to null, which decodes as "not given".
func (t *translator) clear(location []string) {
	if len(location) == 0 {
		t.tree = nil
		return
	}
	last := location[len(location)-1]
	switch _, parent := t.find(location[:len(location)-1]); v := parent.(type) {
	case map[string]any:
		v[last] = nil
	case []any:
		i, _ := strconv.Atoi(last)
		v[i] = nil
	}
}

// knownKeys are the properties of the object schema at url.
func (t *translator) knownKeys(url string) []string {
	_, fragment, _ := strings.Cut(url, "#")
	node := t.doc
	for token := range strings.SplitSeq(strings.TrimPrefix(fragment, "/"), "/") {
		switch next := node[token].(type) {
		case map[string]any:
			node = next
		case []any:
			return t.branchKeys(next)
		}
	}
	properties, _ := node["properties"].(map[string]any)
	return slices.Sorted(maps.Keys(properties))
}

// branchKeys are the properties of all alternatives.
func (t *translator) branchKeys(branches []any) []string {
	var keys []string
	for _, branch := range branches {
		properties, _ := branch.(map[string]any)["properties"].(map[string]any)
		keys = append(keys, slices.Sorted(maps.Keys(properties))...)
	}
	return keys
}

