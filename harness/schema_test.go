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

// generate makes the harness file's JSON Schema from the Go types and their comments.
func generate(t *testing.T) []byte {
	t.Helper()
	schema := reflectSchema(t, harness.Harness{})
	schema.ID = "urn:agentshim:harness:1"
	schema.Title = "agentshim harness file, version 1"
	refine(schema)
	return schemaText(t, schema)
}

// generateProvider makes that of provider files.
func generateProvider(t *testing.T) []byte {
	t.Helper()
	schema := reflectSchema(t, harness.Provider{})
	schema.ID = "urn:agentshim:provider:1"
	schema.Title = "agentshim provider file, version 1"
	refineProvider(schema)
	return schemaText(t, schema)
}

func reflectSchema(t *testing.T, value any) *jsonschema.Schema {
	t.Helper()
	r := jsonschema.Reflector{Anonymous: true}
	if err := r.AddGoComments("github.com/agentshim/agentshim/harness", "./", jsonschema.WithFullComment()); err != nil {
		t.Fatal(err)
	}
	for name, text := range r.CommentMap {
		r.CommentMap[name] = strings.Join(strings.Fields(text), " ")
	}
	return r.Reflect(value)
}

func schemaText(t *testing.T, schema *jsonschema.Schema) []byte {
	t.Helper()
	text, err := json.MarshalIndent(schema, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return append(text, '\n')
}

func property(schema *jsonschema.Schema, def, name string) *jsonschema.Schema {
	p, ok := schema.Definitions[def].Properties.Get(name)
	if !ok {
		panic(def + " has no " + name)
	}
	return p
}

// optionValues are the values that an option may have.
func optionValues() *jsonschema.Schema {
	scalar := []*jsonschema.Schema{{Type: "string"}, {Type: "number"}}
	return &jsonschema.Schema{AnyOf: append(scalar[:2:2],
		&jsonschema.Schema{Type: "boolean"},
		&jsonschema.Schema{Type: "array", Items: &jsonschema.Schema{AnyOf: scalar}})}
}

// refine adds what the Go types can't say.
func refine(schema *jsonschema.Schema) {
	text, one := &jsonschema.Schema{Type: "string"}, uint64(1)
	property(schema, "Command", "options").AdditionalProperties = optionValues()
	for _, env := range []*jsonschema.Schema{property(schema, "Harness", "env"), property(schema, "Command", "env")} {
		env.PropertyNames = &jsonschema.Schema{Pattern: variablePattern}
	}
	object := *schema.Definitions["Allow"]
	object.Description = ""
	schema.Definitions["Allow"] = &jsonschema.Schema{
		Description: schema.Definitions["Allow"].Description,
		AnyOf:       []*jsonschema.Schema{{MinLength: &one, Type: text.Type}, &object},
	}
}

func refineProvider(schema *jsonschema.Schema) {
	property(schema, "Provider", "unattended").AdditionalProperties = optionValues()
	for _, env := range []*jsonschema.Schema{property(schema, "Provider", "env"), property(schema, "Credentials", "set")} {
		env.PropertyNames = &jsonschema.Schema{Pattern: variablePattern}
	}
	member := &jsonschema.Schema{Ref: "#/$defs/Any"}
	property(schema, "Seed", "json").AdditionalProperties = member
	schema.Definitions["Any"] = &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "string"},
		{Type: "number"},
		{Type: "boolean"},
		{Type: "array", Items: member},
		{Type: "object", AdditionalProperties: member},
	}}
}

func TestSchemaIsFresh(t *testing.T) {
	for _, tt := range []struct {
		file     string
		generate func(*testing.T) []byte
		schema   func() []byte
	}{
		{"schema.json", generate, harness.Schema},
		{"provider.schema.json", generateProvider, harness.ProviderSchema},
	} {
		t.Run(tt.file, func(t *testing.T) {
			want := tt.generate(t)
			if *update {
				if err := os.WriteFile(tt.file, want, 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(string(want), string(tt.schema())); diff != "" {
				t.Errorf("stale, run go generate (-generated +checked in):\n%s", diff)
			}
			if again := tt.generate(t); !bytes.Equal(want, again) {
				t.Error("two generations differ")
			}
		})
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
