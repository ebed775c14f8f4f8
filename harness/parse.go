package harness

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// MaxFile is the largest harness file, in bytes.
const MaxFile = 1 << 20

// Overrides are values of the command line that replace the file's; an empty
// one replaces nothing. Paths are absolute.
type Overrides struct {
	Engine    string
	Image     string
	Workspace string
	// PromptFile replaces prompt and promptFile.
	PromptFile string
	// Prompt replaces them, too; nil is none.
	Prompt *string
	// Args are options of the harness's and words of the prompt, in any order; what a word
	// is tell their form and the options that there are. Words are words whatever their
	// form. All words are joined by one space into the prompt.
	Args, Words []string
	// OutputFile is what the harness leaves for its caller: a path in the container,
	// absolute or relative to the home.
	OutputFile string
	// EnvFrom is added to the file's.
	EnvFrom []string
	// Timeout and WorkingDir replace the file's.
	Timeout    string
	WorkingDir string
	// Providers are the user's own, beside Providers: see UserProviders.
	Providers []Provider
}

// Load reads and parses a harness file; see Parse. Relative paths in it start
// at the folder the file is named in, whose links are not resolved.
func Load(file string, o Overrides) (Harness, error) {
	absolute, err := filepath.Abs(file)
	if err != nil {
		return Harness{}, fmt.Errorf("%w: %q: %w", ErrInvalid, file, err)
	}
	data, err := readBounded(absolute)
	if err != nil {
		return Harness{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	h, err := Parse(data, filepath.Dir(absolute), o)
	if err != nil {
		return Harness{}, fmt.Errorf("%q: %w", file, err)
	}
	return h, nil
}

// readBounded reads a file, and no more than one byte past MaxFile of it.
func readBounded(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // read only
	return io.ReadAll(io.LimitReader(f, MaxFile+1))
}

// Parse turns a harness file's text into a Harness. It fills in the defaults
// that do not depend on the host, cleans container paths, and sets Dir to dir;
// `~/` in host paths stays for mounts to expand. It is pure: it reads no file,
// so whether a source or an environment file exists is not checked.
//
// Every problem is reported at once, in the order of the file, as a joined
// error of *Problem; each matches ErrInvalid, and ErrNotBuilt where a field
// belongs to a feature that is not there yet. Only a text that is no JSON ends
// the search early.
func Parse(data []byte, dir string, o Overrides) (Harness, error) {
	p := &problems{offsets: map[string]int64{}}
	tree, ok := parseTree(data, p)
	if !ok {
		return Harness{}, p.err()
	}
	tree = checkSchema(rootSchema(), tree, o.Image != "", p)
	h := decode[Harness](tree, p)
	h.Dir = dir
	c := checker{h: &h, problems: p, flags: map[string]string{}}
	c.onlyOnePrompt()
	c.provider(o.Providers)
	c.spellOptions()
	c.override(o)
	h.setDefaults()
	c.all()
	if err := p.err(); err != nil {
		return Harness{}, err
	}
	return h, nil
}

// decode fills a T from a tree that checkSchema has been through. Numbers
// of unknown use become json.Number, as written.
func decode[T any](tree any, p *problems) T {
	var zero T
	text, err := json.Marshal(tree)
	if err == nil {
		var value T
		dec := json.NewDecoder(bytes.NewReader(text))
		dec.UseNumber()
		if err = dec.Decode(&value); err == nil {
			return value
		}
	}
	p.add("$", nil, "can't be decoded", "")
	return zero
}

// override applies the command line.
func (c *checker) override(o Overrides) {
	if o.Engine != "" {
		c.h.Engine, c.flags["$.engine"] = o.Engine, "--engine"
	}
	if o.Image != "" {
		c.h.Image, c.flags["$.image"] = o.Image, "--image"
	}
	c.overridePrompt(o)
	c.outputFile(o.OutputFile)
	c.overrideStep(o)
	if o.Workspace == "" {
		return
	}
	if c.h.Workspace == nil {
		c.h.Workspace = &Workspace{}
	}
	if c.h.Workspace.Mode == "none" {
		c.add("--workspace", nil, "the file says that there is no workspace", "change $.workspace.mode")
	}
	c.h.Workspace.Source, c.flags["$.workspace.source"] = o.Workspace, "--workspace"
}

// overrideStep takes what a run, or a step of a session, has of its own.
func (c *checker) overrideStep(o Overrides) {
	for _, name := range o.EnvFrom {
		if !slices.Contains(c.h.EnvFrom, name) {
			c.flags[element("$.envFrom", len(c.h.EnvFrom))] = "--env"
			c.h.EnvFrom = append(c.h.EnvFrom, name)
		}
	}
	if o.Timeout != "" {
		c.h.Timeout, c.flags["$.timeout"] = o.Timeout, "--timeout"
	}
	if o.WorkingDir != "" {
		c.h.WorkingDir, c.flags["$.workingDir"] = o.WorkingDir, "--working-dir"
	}
}

// overridePrompt takes the prompt of the command line, of which there is at most one.
func (c *checker) overridePrompt(o Overrides) {
	var given []string
	text := o.Prompt
	if o.Prompt != nil {
		given = append(given, "--prompt")
	}
	if words := slices.Concat(c.arguments(o.Args), o.Words); len(words) > 0 {
		joined := strings.Join(words, " ")
		text, given = &joined, append(given, "words")
	}
	if o.PromptFile != "" {
		given = append(given, "--prompt-file")
		c.h.Prompt = nil
		c.h.PromptFile, c.flags["$.promptFile"] = o.PromptFile, "--prompt-file"
	}
	if len(given) > 1 {
		c.add(given[0], nil, "given beside "+strings.Join(given[1:], " and "), "keep one prompt")
	}
	if text != nil {
		c.h.Prompt, c.h.PromptFile = text, ""
		c.flags["$.prompt"] = "the prompt of the command line"
	}
}

// MarshalJSON gives the string form where only the host is set.
func (a Allow) MarshalJSON() ([]byte, error) {
	if a == (Allow{Host: a.Host}) {
		return json.Marshal(a.Host)
	}
	type object Allow
	return json.Marshal(object(a))
}

// UnmarshalJSON takes a string or an object.
func (a *Allow) UnmarshalJSON(data []byte) error {
	*a = Allow{}
	if len(data) > 0 && data[0] == '"' {
		return json.Unmarshal(data, &a.Host)
	}
	type object Allow
	return json.Unmarshal(data, (*object)(a))
}

// setDefaults fills in what does not depend on the host.
func (h *Harness) setDefaults() {
	preset(&h.Engine, "auto")
	preset(&h.Pull, "missing")
	preset(&h.StopGrace, "10s")
	preset(&h.Terminal, "auto")
	preset(&h.TmpSizeMB, 512)
	preset(&h.Home.SizeMB, 512)
	preset(&h.Egress.Mode, "deny-all")
	preset(&h.Egress.Renderer, "auto")
	preset(&h.Seccomp.Profile, "default")
	preset(&h.Resources.PIDs, 512)
	preset(&h.Resources.NoFile, 8192)
	preset(&h.Resources.ShmMB, 64)
	preset(&h.Harness.PromptMode, "arg")
	preset(&h.Harness.PromptPosition, "before-flags")
	preset(&h.Harness.FlagStyle, "gnu-long")
	preset(&h.Harness.Auth, "none")
	if h.Workspace != nil {
		preset(&h.Workspace.Mode, "read-only")
		preset(&h.Workspace.Target, "/workspace")
	}
	for i := range h.Mounts {
		preset(&h.Mounts[i].Label, "none")
	}
}

// preset sets a field that is not given.
func preset[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
