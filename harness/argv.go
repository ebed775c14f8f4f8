package harness

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Argv is the harness's argument vector: binary, prefixArgs, then the prompt
// and the options in the order of promptPosition, the options sorted by name.
// The prompt stands in it with promptMode arg and flag, promptPath with file;
// stdin has neither. A value is always an argument of its own. A prompt that
// starts with a dash is passed as it is: whether the harness takes it for a flag
// is up to the harness, and promptMode stdin or file rule it out.
func (c Command) Argv(prompt, promptPath string) []string {
	argv := append([]string{c.Binary}, c.PrefixArgs...)
	if c.PromptPosition == "after-flags" {
		return slices.Concat(argv, c.optionArgs(), c.promptArgs(prompt, promptPath))
	}
	return slices.Concat(argv, c.promptArgs(prompt, promptPath), c.optionArgs())
}

func (c Command) promptArgs(prompt, promptPath string) []string {
	switch c.PromptMode {
	case "stdin":
		return nil
	case "flag":
		return []string{c.PromptFlag, prompt}
	case "file":
		if c.PromptFlag == "" {
			return []string{promptPath}
		}
		return []string{c.PromptFlag, promptPath}
	default:
		return []string{prompt}
	}
}

func (c Command) optionArgs() []string {
	var args []string
	for _, name := range slices.Sorted(maps.Keys(c.Options)) {
		flag, value := c.flag(name), c.Options[name]
		if on, isBool := value.(bool); isBool {
			if on {
				args = append(args, flag)
			}
			continue
		}
		for _, text := range optionTexts(value) {
			args = append(args, flag, text)
		}
	}
	return args
}

// flag is an option's flag: the one the file names, else made of its name.
func (c Command) flag(name string) string {
	if flag, ok := c.OptionFlags[name]; ok {
		return flag
	}
	dashes := "--"
	if c.FlagStyle == "single-dash" {
		dashes = "-"
	}
	return dashes + strings.ReplaceAll(name, "_", "-")
}

// optionTexts are an option's values as arguments; a boolean has none.
func optionTexts(value any) []string {
	switch v := value.(type) {
	case nil, bool:
		return nil
	case string:
		return []string{v}
	case json.Number:
		return []string{v.String()}
	case float64:
		return []string{strconv.FormatFloat(v, 'f', -1, 64)}
	case []string:
		return v
	case []any:
		var texts []string
		for _, item := range v {
			texts = append(texts, optionTexts(item)...)
		}
		return texts
	default:
		return []string{fmt.Sprint(v)}
	}
}
