package harness

import (
	"bytes"
	_ "embed"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

//go:embed provider.schema.json
var providerSchemaJSON []byte

var providerSchema = embeddedSchema("provider.schema.json", &providerSchemaJSON)

// ProviderSchema is the JSON Schema of provider files; see Schema.
func ProviderSchema() []byte { return bytes.Clone(providerSchemaJSON) }

// ParseProvider turns a provider file's text into a Provider. Like Parse it is
// strict and pure, and reports every problem at once, in the order of the file.
func ParseProvider(data []byte) (Provider, error) {
	p := &problems{offsets: map[string]int64{}}
	tree, ok := parseTree(data, p)
	if !ok {
		return Provider{}, p.err()
	}
	provider := decode[Provider](checkSchema(providerSchema(), tree, false, p), p)
	c := providerChecker{&provider, &checker{h: &Harness{}, problems: p}}
	c.all()
	if err := p.err(); err != nil {
		return Provider{}, err
	}
	return provider, nil
}

// maxProviders bounds the work on a user's folder.
const maxProviders = 256

// UserProviders reads the provider files NAME.json of a folder, sorted by name; a folder that
// is not there has none. A file that others than its owner may write, or that takes
// an embedded provider's name, is an error, and so is one that does not parse.
func UserProviders(dir string) ([]Provider, error) {
	entries, err := os.ReadDir(dir)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	var list []Provider
	for _, entry := range entries {
		if !strings.HasSuffix(entry.Name(), ".json") {
			continue
		}
		if len(list) == maxProviders {
			return nil, fmt.Errorf("%w: %q holds more than %d providers", ErrInvalid, dir, maxProviders)
		}
		file := filepath.Join(dir, entry.Name())
		p, err := userProvider(file)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", file, err)
		}
		list = append(list, p)
	}
	return list, nil
}

func userProvider(file string) (Provider, error) {
	st, err := os.Stat(file)
	switch {
	case err != nil:
		return Provider{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	case !st.Mode().IsRegular():
		return Provider{}, fmt.Errorf("%w: not a regular file", ErrInvalid)
	case st.Mode()&0o022 != 0:
		return Provider{}, fmt.Errorf("%w: others may write it: chmod go-w", ErrInvalid)
	}
	data, err := readBounded(file)
	if err != nil {
		return Provider{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	p, err := ParseProvider(data)
	if err != nil {
		return Provider{}, err
	}
	if p.Name+".json" != filepath.Base(file) {
		return Provider{}, fmt.Errorf("%w: $.name: the file of provider %q must be called %s.json", ErrInvalid, p.Name, p.Name)
	}
	if slices.Contains(embeddedNames(), p.Name) {
		return Provider{}, fmt.Errorf("%w: $.name: agentshim has a provider %q of its own; choose another name", ErrInvalid, p.Name)
	}
	p.File = file
	return p, nil
}

// providerChecker judges a Provider that fits the schema.
type providerChecker struct {
	p *Provider
	*checker
}

func (c providerChecker) all() {
	c.program("$.binary", c.p.Binary)
	c.headless()
	c.optionList()
	c.variables("$.env", c.p.Env)
	c.seeds("$.seed", c.p.Seed)
	for _, form := range c.p.Forms()[1:] {
		c.credentials(member("$.auth", form), c.p.Credentials(form))
	}
	if _, known := FindPreset(c.p.Egress); c.p.Egress != "" && !known {
		c.fault("$.egress", c.p.Egress, "no preset has this name", c.didYouMean(c.p.Egress, PresetNames()))
	}
	known := c.p.Stated()
	for _, name := range slices.Sorted(maps.Keys(c.p.Facts)) {
		if !slices.Contains(known, name) {
			c.fault(member("$.facts", name), nil, "the provider states no such fact", c.didYouMean(name, known))
		}
	}
}

func (c providerChecker) headless() {
	h := c.p.Headless
	for i, arg := range h.Args {
		c.argument(element("$.headless.args", i), arg)
	}
	c.promptFlag("$.headless.", h.PromptMode, h.PromptFlag)
}

func (c providerChecker) optionList() {
	for _, name := range slices.Sorted(maps.Keys(c.p.Options)) {
		at := member("$.options", name)
		if !optionForm.MatchString(name) || strings.Contains(name, "_") {
			c.fault(at, nil, "not an option name (letters, digits, dashes)", "")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.p.Unattended)) {
		at := member("$.unattended", name)
		if message, remedy := c.p.optionFault(name, c.p.Unattended[name]); message != "" {
			c.fault(at, nil, message, remedy)
		}
	}
	if o := c.p.Output; o != nil {
		if _, known := c.p.Options[o.Option]; !known {
			c.fault("$.output.option", o.Option, "is none of $.options", "")
		}
	}
}

// optionFault is what is wrong with an option and its value for this provider; "" if nothing.
func (p Provider) optionFault(name string, value any) (message, remedy string) {
	option, known := p.Options[name]
	_, isSwitch := value.(bool)
	switch {
	case !known:
		return fmt.Sprintf("no option of provider %q", p.Name), p.optionRemedy()
	case option.Switch && !isSwitch:
		return "is a switch: true or false", ""
	case !option.Switch && isSwitch:
		return "needs a value", ""
	}
	return "", ""
}

// optionRemedy lists the options there are.
func (p Provider) optionRemedy() string {
	if len(p.Options) == 0 {
		return "it has none; name the flag in $.harness.optionFlags"
	}
	return "it has " + strings.Join(slices.Sorted(maps.Keys(p.Options)), ", ") + "; name another one's flag in $.harness.optionFlags"
}

func (c providerChecker) seeds(at string, list []Seed) {
	for i, s := range list {
		here := element(at, i)
		c.homeTarget(here+".target", s.Target)
		if (s.Text == "") == (s.JSON == nil) {
			c.fault(here, nil, "needs one of text and json", "")
		}
	}
}

func (c providerChecker) homeTarget(at, target string) {
	if message := homeTargetFault(target); message != "" && target != "" {
		c.fault(at, target, message, `write it relative to the home, like ".config/tool.json"`)
	}
}

func (c providerChecker) credentials(at string, cr Credentials) {
	if len(cr.Files) == 0 && len(cr.Env) == 0 {
		c.fault(at, nil, "names neither a file nor a variable", "")
	}
	for i, f := range cr.Files {
		c.source(element(at+".files", i)+".source", f.Source)
		c.homeTarget(element(at+".files", i)+".target", f.Target)
	}
	for i, name := range cr.Env {
		if message := callerVariableFault(name); message != "" {
			c.fault(element(at+".env", i), name, message, "")
		}
	}
	c.variables(at+".set", cr.Set)
	c.seeds(at+".seed", cr.Seed)
}

// ProviderDir is where a user's own providers are, below a folder of configuration.
func ProviderDir(config string) string { return path.Join(config, "agentshim", "providers") }
