package harness_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

func TestArgv(t *testing.T) {
	options := map[string]any{
		"model": "x y", "max_turns": json.Number("10000000"), "verbose": true, "quiet": false,
		"tool": []any{"a", json.Number("1e-3")}, "none": []any{},
	}
	for _, tt := range []struct {
		name string
		c    harness.Command
		want []string
	}{
		{"prompt alone", harness.Command{Binary: "sh"}, []string{"sh", "PROMPT"}},
		{"prefix", harness.Command{Binary: "sh", PrefixArgs: []string{"-c", ""}, PromptMode: "arg"}, []string{"sh", "-c", "", "PROMPT"}},
		{"flag", harness.Command{Binary: "sh", PromptMode: "flag", PromptFlag: "-p"}, []string{"sh", "-p", "PROMPT"}},
		{"file", harness.Command{Binary: "sh", PromptMode: "file"}, []string{"sh", "/PATH"}},
		{"file with flag", harness.Command{Binary: "sh", PromptMode: "file", PromptFlag: "--file"}, []string{"sh", "--file", "/PATH"}},
		{"stdin", harness.Command{Binary: "sh", PromptMode: "stdin"}, []string{"sh"}},
		{
			"options, gnu-long",
			harness.Command{Binary: "sh", PrefixArgs: []string{"run"}, PromptPosition: "before-flags", FlagStyle: "gnu-long", Options: options},
			[]string{"sh", "run", "PROMPT", "--max-turns", "10000000", "--model", "x y", "--tool", "a", "--tool", "1e-3", "--verbose"},
		},
		{
			"options, single-dash, after",
			harness.Command{
				Binary: "sh", PromptPosition: "after-flags", FlagStyle: "single-dash", Options: options,
				OptionFlags: map[string]string{"model": "--Model", "verbose": "-v"},
			},
			[]string{"sh", "-max-turns", "10000000", "--Model", "x y", "-tool", "a", "-tool", "1e-3", "-v", "PROMPT"},
		},
		{
			"Go values",
			harness.Command{Binary: "sh", PromptMode: "stdin", Options: map[string]any{"a": 1e7, "b": 3, "c": []string{"x"}}},
			[]string{"sh", "--a", "10000000", "--b", "3", "--c", "x"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, tt.c.Argv("PROMPT", "/PATH")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestArgvFromFile(t *testing.T) {
	h, err := parse(withHarness(`"options":{"big":9007199254740993,"list":[1.50,"x"]},"promptMode":"stdin"`))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"sh", "--big", "9007199254740993", "--list", "1.50", "--list", "x"}
	if diff := cmp.Diff(want, h.Harness.Argv("", "")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A second call must not write into what the first returned.
func TestArgvShares(t *testing.T) {
	c := harness.Command{Binary: "sh", PrefixArgs: append(make([]string, 0, 8), "-c")}
	first := c.Argv("one", "")
	c.Argv("two", "")
	if diff := cmp.Diff([]string{"sh", "-c", "one"}, first); diff != "" {
		t.Error(diff)
	}
}
