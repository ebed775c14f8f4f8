package harness_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/invopop/jsonschema"
	validator "github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/agentshim/agentshim/harness"
)

var update = flag.Bool("update", false, "rewrite schema.json and the goldens")

const variablePattern = "^[A-Za-z_][A-Za-z0-9_]*$"

// generate makes the JSON Schema from the Go types and their comments.
func generate(t *testing.T) []byte {
	t.Helper()
	r := jsonschema.Reflector{Anonymous: true}
	if err := r.AddGoComments("github.com/agentshim/agentshim/harness", "./", jsonschema.WithFullComment()); err != nil {
		t.Fatal(err)
	}
	for name, text := range r.CommentMap {
		r.CommentMap[name] = strings.Join(strings.Fields(text), " ")
	}
	schema := r.Reflect(harness.Harness{})
	schema.ID = "urn:agentshim:harness:1"
	schema.Title = "agentshim harness file, version 1"
	refine(schema)
	text, err := json.MarshalIndent(schema, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return append(text, '\n')
}

// refine adds what the Go types can't say.
func refine(schema *jsonschema.Schema) {
	property := func(def, name string) *jsonschema.Schema {
		p, ok := schema.Definitions[def].Properties.Get(name)
		if !ok {
			panic(def + " has no " + name)
		}
		return p
	}
	text, one := &jsonschema.Schema{Type: "string"}, uint64(1)
	scalar := []*jsonschema.Schema{text, {Type: "number"}}
	property("Command", "options").AdditionalProperties = &jsonschema.Schema{AnyOf: append(scalar[:2:2],
		&jsonschema.Schema{Type: "boolean"},
		&jsonschema.Schema{Type: "array", Items: &jsonschema.Schema{AnyOf: scalar}})}
	for _, env := range []*jsonschema.Schema{property("Harness", "env"), property("Command", "env")} {
		env.PropertyNames = &jsonschema.Schema{Pattern: variablePattern}
	}
	object := *schema.Definitions["Allow"]
	object.Description = ""
	schema.Definitions["Allow"] = &jsonschema.Schema{
		Description: schema.Definitions["Allow"].Description,
		AnyOf:       []*jsonschema.Schema{{Type: "string", MinLength: &one}, &object},
	}
}

func TestSchemaIsFresh(t *testing.T) {
	want := generate(t)
	if *update {
		if err := os.WriteFile("schema.json", want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(string(want), string(harness.Schema())); diff != "" {
		t.Errorf("schema.json is stale, run go generate (-generated +checked in):\n%s", diff)
	}
	if again := generate(t); !bytes.Equal(want, again) {
		t.Error("two generations differ")
	}
}

func TestSchemaIsACopy(t *testing.T) {
	clear(harness.Schema())
	if harness.Schema()[0] != '{' {
		t.Error("a caller can change the schema")
	}
}

func schemaDocument(t *testing.T) map[string]any {
	t.Helper()
	var doc map[string]any
	if err := json.Unmarshal(harness.Schema(), &doc); err != nil {
		t.Fatal(err)
	}
	return doc
}

func TestSchemaDescribesEveryField(t *testing.T) {
	goName := regexp.MustCompile(`^\S`)
	for name, def := range schemaDocument(t)["$defs"].(map[string]any) {
		object := def.(map[string]any)
		if branches, ok := object["anyOf"].([]any); ok {
			object = branches[1].(map[string]any)
		}
		if object["additionalProperties"] != false {
			t.Errorf("%s takes unknown keys", name)
		}
		for field, property := range object["properties"].(map[string]any) {
			if text, _ := property.(map[string]any)["description"].(string); !goName.MatchString(text) {
				t.Errorf("%s.%s has no description", name, field)
			}
		}
	}
}

func TestSchemaRequires(t *testing.T) {
	root := schemaDocument(t)["$defs"].(map[string]any)["Harness"].(map[string]any)
	if diff := cmp.Diff([]any{"version", "image", "harness"}, root["required"]); diff != "" {
		t.Error(diff)
	}
}

// What the schema calls a default is what Parse fills in.
func TestSchemaDefaults(t *testing.T) {
	h, err := harness.Parse([]byte(`{"version":1,"image":"a","harness":{"binary":"b"},"workspace":{"source":"."},"mounts":[{"source":"a","target":"/a"}]}`), "/", harness.Overrides{})
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]any{
		"Harness": h, "Command": h.Harness, "Workspace": *h.Workspace, "Mount": h.Mounts[0],
		"Home": h.Home, "Egress": h.Egress, "Seccomp": h.Seccomp, "Resources": h.Resources,
	}
	checked := 0
	for name, def := range schemaDocument(t)["$defs"].(map[string]any) {
		properties, _ := def.(map[string]any)["properties"].(map[string]any)
		for field, property := range properties {
			want, given := property.(map[string]any)["default"]
			if !given {
				continue
			}
			checked++
			if got := jsonField(t, values[name], field); !reflect.DeepEqual(got, want) {
				t.Errorf("%s.%s: Parse gives %v, the schema says %v", name, field, got, want)
			}
		}
	}
	if checked < 15 {
		t.Errorf("only %d defaults in the schema", checked)
	}
}

func jsonField(t *testing.T, value any, field string) any {
	t.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(text, &fields); err != nil {
		t.Fatal(err)
	}
	return fields[field]
}

// The example with every field fits the schema, and names every property of it.
func TestFullExampleFitsTheSchema(t *testing.T) {
	text, err := os.ReadFile("testdata/full.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := fullValidator(t)(text); err != nil {
		t.Error(err)
	}
	for name, def := range schemaDocument(t)["$defs"].(map[string]any) {
		object := def.(map[string]any)
		if branches, ok := object["anyOf"].([]any); ok {
			object = branches[1].(map[string]any)
		}
		for field := range object["properties"].(map[string]any) {
			if !bytes.Contains(text, []byte(`"`+field+`":`)) {
				t.Errorf("%s.%s is not in testdata/full.json", name, field)
			}
		}
	}
}

// fullValidator checks a text with an independent JSON Schema validator.
func fullValidator(t testing.TB) func(text []byte) error {
	t.Helper()
	doc, err := validator.UnmarshalJSON(bytes.NewReader(harness.Schema()))
	if err != nil {
		t.Fatal(err)
	}
	c := validator.NewCompiler()
	if err := c.AddResource("urn:test", doc); err != nil {
		t.Fatal(err)
	}
	schema := c.MustCompile("urn:test")
	return func(text []byte) error {
		instance, err := validator.UnmarshalJSON(bytes.NewReader(text))
		if err != nil {
			return err
		}
		return schema.Validate(instance)
	}
}
