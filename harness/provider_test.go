package harness_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

// Every embedded provider is whole: it says where each of its facts is from, and its preset is there.
func TestProvidersAreWhole(t *testing.T) {
	for _, p := range harness.Providers() {
		t.Run(p.Name, func(t *testing.T) {
			if found, ok := harness.FindProvider(p.Name, nil); !ok || found.Name != p.Name {
				t.Errorf("not found by its name, but %q", found.Name)
			}
			for name, fact := range p.Facts {
				if fact.Source == "" {
					t.Errorf("fact %s has no source", name)
				}
			}
			if missing := without(p); len(missing) > 0 {
				t.Errorf("no fact for %v", missing)
			}
			if p.Interactive == nil || p.Options == nil || p.History == nil || p.Egress == "" && p.Notes == nil {
				t.Error("a field is missing")
			}
		})
	}
}

// without names the fields that no fact stands for: a provider without facts is unverified in all.
func without(p harness.Provider) []string {
	facts := p.Facts
	p.Facts = nil
	var missing []string
	for _, name := range p.Unverified() {
		if _, ok := facts[name]; !ok {
			missing = append(missing, name)
		}
	}
	return missing
}

func provided(t *testing.T, text string, o harness.Overrides) harness.Harness {
	t.Helper()
	h, err := harness.Parse([]byte(text), "/spec", o)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func withProvider(members string) string {
	return `{"version":1,"image":"agent:dev","harness":{"provider":"claude"` + members + `}}`
}

func TestProviderArgv(t *testing.T) {
	for _, tt := range []struct{ name, members, want, interactive string }{
		{"as it is", "", "claude -p --permission-mode bypassPermissions", "claude"},
		{
			"options in the file's spelling", `,"options":{"max_turns":3,"permission-mode":"plan","continue":true}`,
			"claude -p --continue --max-turns 3 --permission-mode plan", "claude --continue --max-turns 3 --permission-mode plan",
		},
		{
			"an option that it does not know", `,"options":{"new":"x"},"optionFlags":{"new":"--brand-new"},"prefixArgs":["--ide"]`,
			"claude -p --ide --brand-new x --permission-mode bypassPermissions", "claude --ide --brand-new x",
		},
		{
			"another way for the prompt", `,"promptMode":"arg","promptPosition":"after-flags"`,
			"claude -p --permission-mode bypassPermissions PROMPT", "claude",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := provided(t, withProvider(tt.members), harness.Overrides{})
			if got := strings.Join(h.Harness.Argv("PROMPT", "/PATH"), " "); got != tt.want {
				t.Errorf("headless: got %q, want %q", got, tt.want)
			}
			if got := strings.Join(h.Harness.InteractiveArgv(), " "); got != tt.interactive {
				t.Errorf("interactive: got %q, want %q", got, tt.interactive)
			}
		})
	}
	if argv := provided(t, withHarness(`"options":{"a":1}`), harness.Overrides{}).Harness.InteractiveArgv(); argv != nil {
		t.Errorf("a program without a provider has an interactive form: %q", argv)
	}
}

// What auth stands for is exactly what the provider's file names.
func TestProviderAuth(t *testing.T) {
	for _, tt := range []struct {
		auth  string
		files []harness.HomeFile
		env   []string
	}{
		{auth: "none"},
		{auth: "account", files: []harness.HomeFile{{
			Source: "~/.claude/.credentials.json", Target: ".claude/.credentials.json", WriteBack: true,
			Auth: "account", Members: []string{"claudeAiOauth"},
		}}},
		{auth: "api-key", env: []string{"ANTHROPIC_API_KEY"}},
	} {
		t.Run(tt.auth, func(t *testing.T) {
			h := provided(t, withProvider(`,"auth":"`+tt.auth+`"`), harness.Overrides{})
			if diff := cmp.Diff(tt.files, h.Home.Files); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(tt.env, h.Harness.AuthEnv); diff != "" {
				t.Error(diff)
			}
			if len(h.EnvFrom) != 0 || len(h.Egress.Presets) != 0 {
				t.Errorf("auth opens more than it names: %v %v", h.EnvFrom, h.Egress.Presets)
			}
		})
	}
}

func TestProviderSeeds(t *testing.T) {
	h := provided(t, `{"version":1,"image":"a","harness":{"provider":"gemini","auth":"api-key"}}`, harness.Overrides{})
	seeds := h.Seeds()
	if len(seeds) != 1 || !strings.Contains(seeds[0].Content("/w"), `"selectedType": "gemini-api-key"`) {
		t.Errorf("the form's own seed does not stand: %v", seeds)
	}
	h = provided(t, withProvider(""), harness.Overrides{})
	if text := h.Seeds()[0].Content(`/a "b`); !strings.Contains(text, `"/a \"b": {`) {
		t.Errorf("the working folder is not escaped: %s", text)
	}
	h = provided(t, `{"version":1,"image":"a","harness":{"provider":"claude"},"home":{"files":[{"source":"~/x","target":".claude.json"}]}}`, harness.Overrides{})
	if len(h.Seeds()) != 0 {
		t.Errorf("the file's own does not go before: %v", h.Seeds())
	}
}

func TestProviderRefused(t *testing.T) {
	for _, tt := range []struct{ name, text, path, says string }{
		{"unknown", `{"version":1,"image":"a","harness":{"provider":"claud"}}`, "$.harness.provider", `did you mean "claude"?`},
		{"binary beside it", withProvider(`,"binary":"x"`), "$.harness.binary", "keep one"},
		{"unknown option", withProvider(`,"options":{"modl":"x"}`), "$.harness.options.modl", "max-turns"},
		{"switch with a value", withProvider(`,"options":{"verbose":"x"}`), "$.harness.options.verbose", "switch"},
		{"value as a switch", withProvider(`,"options":{"model":true}`), "$.harness.options.model", "needs a value"},
		{"two spellings", withProvider(`,"options":{"max_turns":1,"max-turns":2}`), "$.harness.options.max_turns", "two spellings"},
		{"template", withProvider(`,"options":{"model":"${MODEL}"}`), "$.harness.options.model", "not expanded"},
		{"broker", withProvider(`,"auth":"broker"`), "$.harness.auth", "not built yet"},
		{
			"credential given twice", `{"version":1,"image":"a","harness":{"provider":"claude","auth":"account"},"home":{"files":[{"source":"~/x","target":".claude/.credentials.json"}]}}`,
			"$.harness.auth", "keep one",
		},
		{
			"a cache over the seed", `{"version":1,"image":"a","harness":{"provider":"codex"},"caches":[{"name":"c","target":"~/.codex"}]}`,
			"$.harness.provider", "collides",
		},
		{
			"a cache over the credential", `{"version":1,"image":"a","harness":{"provider":"opencode","auth":"account"},"caches":[{"name":"c","target":"~/.local/share/opencode"}]}`,
			"$.harness.auth: file 1 of provider \"opencode\"", "collides",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parse(tt.text)
			if !errors.Is(err, harness.ErrInvalid) {
				t.Fatalf("want ErrInvalid, got %v", err)
			}
			for _, p := range list(t, err) {
				if strings.HasPrefix(p.Path, tt.path) && strings.Contains(p.Error(), tt.says) {
					return
				}
			}
			t.Errorf("no problem at %s that says %q in:\n%v", tt.path, tt.says, err)
		})
	}
}

// What an orchestrator hands over, in any order.
func TestArguments(t *testing.T) {
	text := withProvider(`,"options":{"model":"small"},"optionFlags":{"permission-mode":"--mode"}`)
	for _, tt := range []struct {
		name   string
		args   []string
		words  []string
		prompt string
		want   string
	}{
		{"prompt before the options", []string{"fix it", "--max_turns", "3", "--model", "x"}, nil, "fix it", "--max-turns 3 --model x --mode bypassPermissions"},
		{"prompt behind them", []string{"--max-turns", "3", "--model=x", "fix it"}, nil, "fix it", "--max-turns 3 --model x --mode bypassPermissions"},
		{"prompt between", []string{"-max_turns", "3", "fix it", "-model", "x"}, nil, "fix it", "--max-turns 3 --model x --mode bypassPermissions"},
		{"a switch takes no word", []string{"--verbose", "fix it"}, nil, "fix it", "--model small --mode bypassPermissions --verbose"},
		{"a switch that is off", []string{"fix it", "--verbose=false"}, nil, "fix it", "--model small --mode bypassPermissions"},
		{"a list", []string{"--allowed_tools", "a", "x", "--allowed_tools", "b", "--allowed_tools", "c"}, nil, "x", "--allowed-tools a --allowed-tools b --allowed-tools c --model small --mode bypassPermissions"},
		{"a prompt like a list", []string{"- one\n- two", "--model", "-1"}, nil, "- one\n- two", "--model -1 --mode bypassPermissions"},
		{"a prompt like a flag", []string{"--model", "x"}, []string{"--verbose", "${HOME}"}, "--verbose ${HOME}", "--model x --mode bypassPermissions"},
		{"an empty value", []string{"p", "--model", ""}, nil, "p", "--model  --mode bypassPermissions"},
		{"an empty prompt", []string{"--model", "x", ""}, nil, "", "--model x --mode bypassPermissions"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := provided(t, text, harness.Overrides{Args: tt.args, Words: tt.words})
			if h.Prompt == nil || *h.Prompt != tt.prompt {
				t.Fatalf("prompt %v, want %q", h.Prompt, tt.prompt)
			}
			if got := strings.Join(h.Harness.Argv("", "")[2:], " "); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestArgumentsRefused(t *testing.T) {
	custom := withHarness(`"options":{"quick":true},"optionFlags":{"depth":"-d"}`)
	for _, tt := range []struct {
		name, text string
		o          harness.Overrides
		path, says string
	}{
		{"unknown", withProvider(""), harness.Overrides{Args: []string{"--modle", "x"}}, "--modle", "--max-turns"},
		{"unknown of a file's own harness", custom, harness.Overrides{Args: []string{"--model", "x"}}, "--model", "--depth, --quick"},
		{"of a harness without any", withHarness(`"promptMode":"arg"`), harness.Overrides{Args: []string{"--model", "x"}}, "--model", "behind --"},
		{"no value", withProvider(""), harness.Overrides{Args: []string{"--model"}}, "--model", "needs a value"},
		{"an option for a value", withProvider(""), harness.Overrides{Args: []string{"--model", "--verbose"}}, "--model", "needs a value"},
		{"a switch with a value", withProvider(""), harness.Overrides{Args: []string{"--verbose=x"}}, "--verbose", "switch"},
		{"template", withProvider(""), harness.Overrides{Args: []string{"--model", "${MODEL}"}}, "--model", "not expanded"},
		{"two prompts", withProvider(""), harness.Overrides{Args: []string{"a"}, PromptFile: "/b"}, "words", "keep one prompt"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := harness.Parse([]byte(tt.text), "/spec", tt.o)
			if err == nil {
				t.Fatal("is taken")
			}
			for _, p := range list(t, err) {
				if p.Path == tt.path && strings.Contains(p.Error(), tt.says) {
					return
				}
			}
			t.Errorf("no problem at %s that says %q in:\n%v", tt.path, tt.says, err)
		})
	}
}

func TestOutputFile(t *testing.T) {
	for in, want := range map[string]string{
		"": "", "out.env": "/home/agent/out.env", "a/./b": "/home/agent/a/b", "/workspace/out": "/workspace/out", "/tmp//x": "/tmp/x",
		"../x": "!", "/proc/1/environ": "!", "/dev/stdin": "!", "/etc/passwd": "!", "~/x": "!", "x/": "!", "a\n": "!", "${OUT}": "!",
	} {
		h, err := harness.Parse([]byte(with("")), "/spec", harness.Overrides{OutputFile: in})
		if want == "!" {
			if err == nil {
				t.Errorf("%q is taken", in)
			}
		} else if err != nil || h.OutputFile != want {
			t.Errorf("%q: %q, %v", in, h.OutputFile, err)
		}
	}
}

const ownProvider = `{"version":1,"name":"mine","title":"Mine","binary":"mine","headless":{"promptMode":"arg"},"auth":{"api-key":{"env":["MY_KEY"]}}}`

func TestUserProviders(t *testing.T) {
	if list, err := harness.UserProviders(filepath.Join(t.TempDir(), "none")); err != nil || list != nil {
		t.Errorf("a folder that is not there: %v, %v", list, err)
	}
	for _, tt := range []struct {
		name, file, text string
		mode             os.FileMode
		says             string
	}{
		{"good", "mine.json", ownProvider, 0o644, ""},
		{"another name", "other.json", ownProvider, 0o644, "must be called mine.json"},
		{"an embedded one's name", "claude.json", strings.ReplaceAll(ownProvider, `"name":"mine"`, `"name":"claude"`), 0o644, "choose another name"},
		{"others may write it", "mine.json", ownProvider, 0o666, "chmod go-w"},
		{"no provider", "mine.json", `{"version":1}`, 0o644, "$.name: needed"},
		{"more than a provider says", "mine.json", strings.Replace(ownProvider, `"version":1`, `"version":1,"accept":["root-user"],"egressAllow":["x"],"mounts":[]`, 1), 0o644, "$.accept: unknown key"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, tt.file)
			if err := os.WriteFile(file, []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(file, tt.mode); err != nil {
				t.Fatal(err)
			}
			users, err := harness.UserProviders(dir)
			if tt.says != "" {
				if !errors.Is(err, harness.ErrInvalid) || !strings.Contains(err.Error(), tt.says) {
					t.Fatalf("want %q, got %v", tt.says, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			h := provided(t, `{"version":1,"image":"a","harness":{"provider":"mine","auth":"api-key"}}`, harness.Overrides{Providers: users})
			if h.Harness.Binary != "mine" || !slices.Equal(h.Harness.AuthEnv, []string{"MY_KEY"}) {
				t.Errorf("not taken: %+v", h.Harness)
			}
		})
	}
}

func TestParseProviderRefuses(t *testing.T) {
	replace := func(old, with string) string { return strings.Replace(ownProvider, old, with, 1) }
	for _, tt := range []struct{ name, text, path string }{
		{"binary", replace(`"binary":"mine"`, `"binary":"../x"`), "$.binary"},
		{"prompt flag", replace(`"promptMode":"arg"`, `"promptMode":"flag"`), "$.headless.promptFlag"},
		{"seed outside", replace(`"headless"`, `"seed":[{"target":"../x","text":"a"}],"headless"`), "$.seed[0].target"},
		{"seed without content", replace(`"headless"`, `"seed":[{"target":"x"}],"headless"`), "$.seed[0]"},
		{"unattended unknown", replace(`"headless"`, `"unattended":{"x":true},"headless"`), "$.unattended.x"},
		{"output unknown", replace(`"headless"`, `"output":{"option":"x"},"headless"`), "$.output.option"},
		{"preset", replace(`"headless"`, `"egress":"nothing","headless"`), "$.egress"},
		{"empty credentials", replace(`{"env":["MY_KEY"]}`, `{}`), `$.auth["api-key"]`},
		{"HOME as credential", replace(`MY_KEY`, `HOME`), `$.auth["api-key"].env[0]`},
		{"fact about nothing", replace(`"headless"`, `"facts":{"x":{"source":"y"}},"headless"`), "$.facts.x"},
		{"not JSON", "{", "$"},
		{"too large", `{"version":1,"title":"` + strings.Repeat("x", harness.MaxFile) + `"}`, "$"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := harness.ParseProvider([]byte(tt.text))
			if err == nil {
				t.Fatal("is taken")
			}
			if !slices.Contains(paths(t, err), tt.path) {
				t.Errorf("no problem at %s in:\n%v", tt.path, err)
			}
		})
	}
}

func FuzzParseProvider(f *testing.F) {
	f.Add([]byte(ownProvider))
	for _, name := range []string{"claude", "codex", "gemini"} {
		text, err := os.ReadFile("providers/" + name + ".json")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := harness.ParseProvider(text)
		if err != nil {
			if !errors.Is(err, harness.ErrInvalid) {
				t.Errorf("no ErrInvalid: %v", err)
			}
			return
		}
		for _, s := range p.Seed {
			if filepath.IsAbs(s.Target) || !filepath.IsLocal(filepath.Clean(s.Target)) {
				t.Errorf("seed target %q leaves the home", s.Target)
			}
		}
	})
}

func FuzzArguments(f *testing.F) {
	f.Add("--model", "x", "fix it")
	f.Add("- a", "--max_turns=3", "--verbose")
	f.Fuzz(func(t *testing.T, a, b, c string) {
		h, err := harness.Parse([]byte(withProvider("")), "/spec", harness.Overrides{Args: []string{a, b, c}})
		if err != nil {
			return
		}
		for _, arg := range h.Harness.Argv("", "")[2:] {
			if strings.Contains(arg, "${") {
				t.Errorf("%q got through", arg)
			}
		}
	})
}
