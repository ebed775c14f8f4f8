package harness_test

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

// everyField are the names of a harness file's fields.
func everyField() []string {
	var names []string
	for f := range reflect.TypeFor[harness.Harness]().Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "-" {
			names = append(names, name)
		}
	}
	return names
}

// Each field is one that holds in another's container, or is refused there, all at once.
func TestAttachable(t *testing.T) {
	held := []string{
		"$schema", "version", "name", "engine", "image", "user", "harness", "prompt", "promptFile", "workingDir",
		"env", "envFrom", "envFiles", "timeout", "stopGrace", "terminal", "accept",
	}
	var text []string
	var want []string
	for _, name := range everyField() {
		text = append(text, `"`+name+`": null`)
		if !slices.Contains(held, name) {
			want = append(want, "$."+name)
		}
	}
	err := harness.Attachable([]byte("{"+strings.Join(text, ",")+"}"), harness.Harness{})
	var got []string
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
		var p *harness.Problem
		if !errors.As(e, &p) || !errors.Is(e, harness.ErrInvalid) {
			t.Fatalf("%v", e)
		}
		got = append(got, p.Path)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("refused (-want +got):\n%s", d)
	}
	if len(want) < 15 || !slices.Contains(want, "$.egress") || !slices.Contains(want, "$.workspace") {
		t.Errorf("%q are not all fields", want)
	}
}

// Credentials that are files need a home; those that are a variable do not.
func TestAttachableAuth(t *testing.T) {
	for auth, path := range map[string]string{"account": "$.harness.auth", "api-key": "", "none": ""} {
		text := `{"version":1,"image":"a","harness":{"provider":"claude","auth":"` + auth + `"},"accept":["attached-container"]}`
		h, err := harness.Parse([]byte(text), "/", harness.Overrides{})
		if err != nil {
			t.Fatal(err)
		}
		var p *harness.Problem
		if err := harness.Attachable([]byte(text), h); errors.As(err, &p) != (path != "") || p != nil && p.Path != path {
			t.Errorf("%s: %v", auth, err)
		}
	}
}
