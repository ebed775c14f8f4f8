package harness

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// argumentForm is an option on the command line, with one dash or two and perhaps a value.
// What has another form, like a list's "- item", is a word of the prompt.
var argumentForm = regexp.MustCompile(`(?s)^--?([A-Za-z][A-Za-z0-9_.-]*)(=(.*))?$`)

// OptionArgument takes an option of the command line apart: its name with dashes for
// underscores, and its value if it is written behind "=". ok is false for a word.
func OptionArgument(arg string) (name, value string, hasValue, ok bool) {
	form := argumentForm.FindStringSubmatch(arg)
	if form == nil {
		return "", "", false, false
	}
	return kebab(form[1]), form[3], form[2] != "", true
}

func kebab(name string) string { return strings.ReplaceAll(name, "_", "-") }

// arguments takes what the command line gives the harness: options, at any place, and words of the
// prompt, which it returns. An option given there goes before the file's; given more
// than once, it is a list.
func (c *checker) arguments(args []string) (words []string) {
	given := map[string]any{}
	for i := 0; i < len(args); i++ {
		name, value, hasValue, ok := OptionArgument(args[i])
		if !ok {
			words = append(words, args[i])
			continue
		}
		option, known := c.findOption(name)
		if !known {
			c.unknownOption(name)
			continue
		}
		if c.isSwitch(option) {
			c.give(given, option, c.switchValue(name, value, hasValue))
			continue
		}
		if !hasValue {
			if i++; i == len(args) || c.isOption(args[i]) {
				c.add("--"+name, nil, "needs a value", "")
				i--
				continue
			}
			value = args[i]
		}
		c.give(given, option, value)
	}
	if len(given) > 0 {
		options := map[string]any{}
		maps.Copy(options, c.h.Harness.Options)
		maps.Copy(options, given)
		c.h.Harness.Options = options
	}
	return words
}

func (c *checker) give(given map[string]any, name string, value any) {
	c.flags[member("$.harness.options", name)] = "--" + kebab(name)
	_, twice := given[name]
	text, isText := value.(string)
	if !twice || !isText {
		given[name] = value
		return
	}
	if list, ok := given[name].([]any); ok {
		given[name] = append(list, text)
		return
	}
	given[name] = []any{given[name], text}
}

func (c *checker) switchValue(name, value string, hasValue bool) bool {
	if hasValue && value != "true" && value != "false" {
		c.add("--"+name, nil, "is a switch: true or false", "")
	}
	return value != "false"
}

// isOption says that a word of the command line is an option that is known.
func (c *checker) isOption(arg string) bool {
	name, _, _, ok := OptionArgument(arg)
	if ok {
		_, ok = c.findOption(name)
	}
	return ok
}

// optionNames are the options that the command line may give, sorted: the provider's and those
// that the file names.
func (c *checker) optionNames() []string {
	cmd := c.h.Harness
	names := map[string]bool{}
	for name := range cmd.Options {
		names[name] = true
	}
	for name := range cmd.OptionFlags {
		names[name] = true
	}
	if cmd.Provided != nil {
		for name := range cmd.Provided.Options {
			names[name] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// findOption finds an option whether dashes or underscores are in its name.
func (c *checker) findOption(name string) (string, bool) {
	names := c.optionNames()
	i := slices.IndexFunc(names, func(known string) bool { return kebab(known) == kebab(name) })
	if i < 0 {
		return "", false
	}
	return names[i], true
}

// isSwitch says that no value follows: the provider says so, or the file gives true or false.
func (c *checker) isSwitch(name string) bool {
	if p := c.h.Harness.Provided; p != nil {
		if option, known := p.Options[name]; known {
			return option.Switch
		}
	}
	_, is := c.h.Harness.Options[name].(bool)
	return is
}

func (c *checker) unknownOption(name string) {
	cmd, names := c.h.Harness, c.optionNames()
	who := "this harness"
	if cmd.Provided != nil {
		who = fmt.Sprintf("provider %q", cmd.Provided.Name)
	}
	remedy := "the file names none in $.harness.options or $.harness.optionFlags; a prompt with a dash in front goes behind --"
	if len(names) > 0 {
		for i := range names {
			names[i] = "--" + kebab(names[i])
		}
		remedy = "it has " + strings.Join(names, ", ")
	}
	if near := c.didYouMean("--"+name, names); near != "" {
		remedy = near + " " + remedy
	}
	c.add("--"+name, nil, "no flag of agentshim and no option of "+who, remedy)
}

// spellOptions gives the file's options the provider's spelling, max_turns and max-turns alike.
func (c *checker) spellOptions() {
	cmd := &c.h.Harness
	if cmd.Provided == nil {
		return
	}
	options := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(cmd.Options)) {
		spelled := name
		if _, known := cmd.Provided.Options[kebab(name)]; known {
			spelled = kebab(name)
		}
		if _, twice := options[spelled]; twice {
			c.fault(member("$.harness.options", name), nil, "given twice, in two spellings", "keep one of them")
			continue
		}
		options[spelled] = cmd.Options[name]
	}
	cmd.Options = options
}

// optionList judges the options, wherever they are from.
func (c *checker) optionList() {
	cmd := c.h.Harness
	for _, name := range slices.Sorted(maps.Keys(cmd.Options)) {
		at := member("$.harness.options", name)
		if !optionForm.MatchString(name) {
			c.fault(at, nil, "not an option name", "write it without dashes in front")
		}
		if _, own := cmd.OptionFlags[name]; cmd.Provided != nil && !own {
			if message, remedy := cmd.Provided.optionFault(name, cmd.Options[name]); message != "" {
				c.fault(at, nil, message, remedy)
			}
		}
		for _, text := range optionTexts(cmd.Options[name]) {
			c.argument(at, text)
			c.unexpanded(at, text)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(cmd.OptionFlags)) {
		if flag := cmd.OptionFlags[name]; !flagForm.MatchString(flag) {
			c.fault(member("$.harness.optionFlags", name), flag, "not a flag", `write it as "--name" or "-n"`)
		}
	}
}

// unexpanded refuses what a caller's template left over: nothing here expands variables.
func (c *checker) unexpanded(at, text string) {
	if strings.Contains(text, "${") {
		c.fault(at, nil, `holds "${": variables are not expanded, and this one was not before`, "write the value itself")
	}
}
