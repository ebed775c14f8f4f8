package harness

import (
	"embed"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"sync"
)

// Provider is one agent CLI: how it is started, what it reads, and where each of
// these facts is from. It says nothing about the sandbox: a provider's file opens
// nothing, and its credentials reach an agent only where a harness file asks for
// them with auth.
type Provider struct {
	// Schema names the JSON Schema for editors; it has no effect.
	Schema string `json:"$schema,omitempty"`
	// Version is the format's version: 1.
	Version int `json:"version" jsonschema:"enum=1"`
	// Name is what harness.provider says; the file is called NAME.json.
	Name string `json:"name" jsonschema:"pattern=^[a-z0-9][a-z0-9-]{0\\,31}$"`
	// Title is the CLI's own name.
	Title string `json:"title" jsonschema:"minLength=1"`
	// Install says where the CLI comes from.
	Install string `json:"install,omitempty" jsonschema:"minLength=1"`
	// Binary is the program's name, looked up in the image's PATH, or an absolute path.
	Binary string `json:"binary" jsonschema:"minLength=1"`
	// VersionArgs are the arguments that make it print its version.
	VersionArgs []string `json:"versionArgs,omitempty"`
	// Headless is how one prompt is run without a person.
	Headless Headless `json:"headless"`
	// Interactive is how it is started for a person at a terminal. Without it there is no such form.
	Interactive *Interactive `json:"interactive,omitempty"`
	// Options are the options that a harness file or command line may give it, by name.
	Options map[string]ProviderOption `json:"options,omitempty"`
	// Output says which option chooses the format of the result.
	Output *OutputFormat `json:"output,omitempty"`
	// Unattended are options of the headless form that keep it from asking a person, unless
	// the harness file or command line gives them otherwise.
	Unattended map[string]any `json:"unattended,omitempty"`
	// Env switches off updates and telemetry. A harness file's own variables win.
	Env map[string]string `json:"env,omitempty"`
	// Seed are files of the home that answer the questions of a first start. They hold no secret.
	Seed []Seed `json:"seed,omitempty"`
	// Auth are the credentials by the forms of harness.auth.
	Auth ProviderAuth `json:"auth,omitzero"`
	// History are the home's folders that a conversation is resumed from.
	History []string `json:"history,omitempty" jsonschema:"pattern=^~/."`
	// Egress is the preset of egress.presets with the CLI's hosts. It opens nothing by itself.
	Egress string `json:"egress,omitempty" jsonschema:"minLength=1"`
	// BaseURL says how another endpoint is named.
	BaseURL *BaseURL `json:"baseUrl,omitempty"`
	// Notes are for people.
	Notes []string `json:"notes,omitempty" jsonschema:"minLength=1"`
	// Facts say where the fields' content is from, by the field's name.
	Facts map[string]Fact `json:"facts,omitempty"`

	// File is the file of a user's own provider, empty for an embedded one.
	File string `json:"-"`
}

// Headless is how one prompt is run; see Command for the fields.
type Headless struct {
	// Args stand between the binary and everything else.
	Args []string `json:"args,omitempty"`
	// PromptMode is arg, flag, stdin or file.
	PromptMode string `json:"promptMode" jsonschema:"enum=arg,enum=flag,enum=stdin,enum=file"`
	// PromptFlag carries the prompt (mode flag) or its path (mode file).
	PromptFlag string `json:"promptFlag,omitempty" jsonschema:"pattern=^--?[A-Za-z0-9][A-Za-z0-9_.-]*$"`
	// PromptPosition is before-flags or after-flags. Default before-flags.
	PromptPosition string `json:"promptPosition,omitempty" jsonschema:"enum=before-flags,enum=after-flags"`
}

// Interactive is how the CLI is started for a person.
type Interactive struct {
	// Args stand between the binary and the options.
	Args []string `json:"args,omitempty"`
}

// ProviderOption is one option of the CLI.
type ProviderOption struct {
	// Flag is the CLI's own flag.
	Flag string `json:"flag" jsonschema:"pattern=^--?[A-Za-z0-9][A-Za-z0-9_.-]*$"`
	// Switch says that the flag stands alone; else a value follows.
	Switch bool `json:"switch,omitempty"`
}

// OutputFormat is the option that chooses the result's format.
type OutputFormat struct {
	// Option is one of the provider's options.
	Option string `json:"option" jsonschema:"minLength=1"`
	// Values are the option's, none for a switch.
	Values []string `json:"values,omitempty"`
}

// Seed is one file that is written into the home before the start. In its text
// {cwd} stands for the working folder, escaped as in a JSON string.
type Seed struct {
	// Target is relative to the home.
	Target string `json:"target" jsonschema:"minLength=1"`
	// Text is the file's content; not beside json.
	Text string `json:"text,omitempty"`
	// JSON is the file's content as an object.
	JSON map[string]any `json:"json,omitempty"`
}

// ProviderAuth are a provider's credentials.
type ProviderAuth struct {
	// Account is a sign-in that was made on the host.
	Account *Credentials `json:"account,omitempty"`
	// APIKey is a key of the provider's API.
	APIKey *Credentials `json:"api-key,omitempty"`
}

// Credentials are what one form of harness.auth gives the agent, no more.
type Credentials struct {
	// Files are copied into the home.
	Files []CredentialFile `json:"files,omitempty"`
	// Env names variables of the caller.
	Env []string `json:"env,omitempty" jsonschema:"pattern=^[A-Za-z_][A-Za-z0-9_]*$"`
	// Set are variables that choose this form. They hold no secret.
	Set map[string]string `json:"set,omitempty"`
	// Seed are files that choose this form, in the place of seed's of the same name.
	Seed []Seed `json:"seed,omitempty"`
	// SignIn says how to get what is missing.
	SignIn string `json:"signIn,omitempty" jsonschema:"minLength=1"`
}

// CredentialFile is one file of the host with a credential.
type CredentialFile struct {
	// Source is the file on the host.
	Source string `json:"source" jsonschema:"pattern=^~/."`
	// Target is relative to the home.
	Target string `json:"target" jsonschema:"minLength=1"`
	// Members are the members of the JSON object in it that are taken. Without them it is taken whole.
	Members []string `json:"members,omitempty" jsonschema:"minLength=1"`
	// WriteBack puts what the CLI refreshed into the host's file at the end.
	WriteBack bool `json:"writeBack,omitempty"`
}

// BaseURL says how another endpoint is named.
type BaseURL struct {
	// Env is the variable with the URL, if there is one.
	Env string `json:"env,omitempty" jsonschema:"pattern=^[A-Za-z_][A-Za-z0-9_]*$"`
	// How says it in words.
	How string `json:"how,omitempty" jsonschema:"minLength=1"`
}

// Fact is where one field's content is from.
type Fact struct {
	// Source is the document, file or command.
	Source string `json:"source" jsonschema:"minLength=1"`
	// Checked is the version of the CLI that this was tried with; empty where it was not.
	Checked string `json:"checked,omitempty"`
}

//go:embed providers/*.json
var providerFiles embed.FS

// embeddedNames are the names of the embedded providers, sorted.
var embeddedNames = sync.OnceValue(func() []string {
	entries, err := providerFiles.ReadDir("providers")
	if err != nil {
		panic("harness: " + err.Error())
	}
	names := make([]string, len(entries))
	for i, entry := range entries {
		names[i] = strings.TrimSuffix(entry.Name(), ".json")
	}
	return names
})

// embeddedProvider parses one of them; a test holds all to their form.
func embeddedProvider(name string) Provider {
	text, err := providerFiles.ReadFile("providers/" + name + ".json")
	if err != nil {
		panic("harness: " + err.Error())
	}
	p, err := ParseProvider(text)
	if err != nil {
		panic("harness: " + name + ": " + err.Error())
	}
	return p
}

// Providers are the embedded providers, sorted by name. The caller owns them.
func Providers() []Provider {
	var list []Provider
	for _, name := range embeddedNames() {
		list = append(list, embeddedProvider(name))
	}
	return list
}

// FindProvider gives the provider of that name, an embedded one or one of the user's;
// false where there is none.
func FindProvider(name string, users []Provider) (Provider, bool) {
	if slices.Contains(embeddedNames(), name) {
		return embeddedProvider(name), true
	}
	i := slices.IndexFunc(users, func(p Provider) bool { return p.Name == name })
	if i < 0 {
		return Provider{}, false
	}
	return users[i], true
}

// ProviderNames are the names that harness.provider may have, the embedded ones first.
func ProviderNames(users []Provider) []string {
	names := slices.Clone(embeddedNames())
	for _, p := range users {
		names = append(names, p.Name)
	}
	return names
}

// Forms are the values of harness.auth that the provider has, none first.
func (p Provider) Forms() []string {
	forms := []string{"none"}
	if p.Auth.Account != nil {
		forms = append(forms, "account")
	}
	if p.Auth.APIKey != nil {
		forms = append(forms, "api-key")
	}
	return forms
}

// Credentials are those of one form; the zero value for none and what it does not have.
func (p Provider) Credentials(form string) Credentials {
	var c *Credentials
	switch form {
	case "account":
		c = p.Auth.Account
	case "api-key":
		c = p.Auth.APIKey
	}
	if c == nil {
		return Credentials{}
	}
	return *c
}

// Unverified names the facts that were not tried with the CLI itself, sorted.
func (p Provider) Unverified() []string {
	var names []string
	for _, name := range p.Stated() {
		if p.Facts[name].Checked == "" {
			names = append(names, name)
		}
	}
	return names
}

// Stated names the fields with facts in them, sorted.
func (p Provider) Stated() []string {
	given := map[string]bool{
		"binary": true, "headless": true, "versionArgs": p.VersionArgs != nil, "interactive": p.Interactive != nil, "options": p.Options != nil,
		"output": p.Output != nil, "unattended": p.Unattended != nil, "env": p.Env != nil, "seed": p.Seed != nil,
		"auth.account": p.Auth.Account != nil, "auth.api-key": p.Auth.APIKey != nil, "history": p.History != nil,
		"egress": p.Egress != "", "baseUrl": p.BaseURL != nil,
	}
	maps.DeleteFunc(given, func(_ string, is bool) bool { return !is })
	return slices.Sorted(maps.Keys(given))
}

// Content is the file's text for a working folder.
func (s Seed) Content(cwd string) string {
	text := s.Text
	if s.JSON != nil {
		b, err := json.MarshalIndent(s.JSON, "", "  ")
		if err != nil {
			panic("harness: a parsed object does not marshal: " + err.Error())
		}
		text = string(b) + "\n"
	}
	quoted, _ := json.Marshal(cwd) // a string always marshals
	return strings.ReplaceAll(text, "{cwd}", string(quoted[1:len(quoted)-1]))
}
