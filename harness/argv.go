package harness

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Argv is the harness's argument vector for one prompt: binary, the provider's
// arguments, prefixArgs, then the prompt and the options in the order of
// promptPosition, the options sorted by name, with the provider's that keep it from asking a person.
// The prompt stands in it with promptMode arg and flag, promptPath with file;
// stdin has neither. A value is always an argument of its own. A prompt that
// starts with a dash is passed as it is: whether the harness takes it for a flag
// is up to the harness, and promptMode stdin or file rule it out.
func (c Command) Argv(prompt, promptPath string) []string {
	argv := []string{c.Binary}
	if c.Provided != nil {
		argv = append(argv, c.Provided.Headless.Args...)
	}
	argv = append(argv, c.PrefixArgs...)
	options := c.optionArgs(c.headlessOptions())
	if c.PromptPosition == "after-flags" {
		return slices.Concat(argv, options, c.promptArgs(prompt, promptPath))
	}
	return slices.Concat(argv, c.promptArgs(prompt, promptPath), options)
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

func (c Command) optionArgs(options map[string]any) []string {
	var args []string
	for _, name := range slices.Sorted(maps.Keys(options)) {
		flag, value := c.flag(name), options[name]
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

// flag is an option's flag: the one the file names, else the provider's, else made of its name.
func (c Command) flag(name string) string {
	if flag, ok := c.OptionFlags[name]; ok {
		return flag
	}
	if c.Provided != nil {
		if option, ok := c.Provided.Options[name]; ok {
			return option.Flag
		}
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
