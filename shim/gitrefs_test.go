package shim

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const someID = "0123456789abcdef0123456789abcdef01234567"

func TestParseHead(t *testing.T) {
	for in, want := range map[string]gitHead{
		"ref: refs/heads/main\n":          {Branch: "main"},
		"ref:\trefs/heads/a/b":            {Branch: "a/b"},
		"ref: refs/heads/f\xfc\xe9\n":     {Branch: "f\xfc\xe9"},
		someID + "\n":                     {Commit: someID},
		"ref: refs/heads/with-dash.1@x\n": {Branch: "with-dash.1@x"},
	} {
		if got, err := parseHead([]byte(in)); err != nil || got != want {
			t.Errorf("%q: %+v, %v", in, got, err)
		}
	}
	for in, want := range map[string]gitReason{
		"":                                     gitMalformed,
		"ref: refs/heads/\n":                   gitMalformed,
		"ref: refs/heads/../../x\n":            gitMalformed,
		"ref: refs/heads/a/../../config\n":     gitMalformed,
		"ref: refs/heads/-x\n":                 gitMalformed,
		"ref: refs/heads/a\nb\n":               gitMalformed,
		"ref: refs/heads/a\x00b\n":             gitMalformed,
		"ref: refs/heads/x.lock\n":             gitMalformed,
		"ref: refs/heads/.x\n":                 gitMalformed,
		"ref: refs/heads//x\n":                 gitMalformed,
		"ref: refs/heads/HEAD\n":               gitMalformed,
		"ref: refs/tags/x\n":                   gitMalformed,
		"ref: ../../etc/passwd\n":              gitMalformed,
		"ref: /etc/passwd\n":                   gitMalformed,
		"refs/heads/main\n":                    gitMalformed,
		strings.ToUpper(someID) + "\n":         gitMalformed,
		someID + "0\n":                         gitMalformed,
		someID + someID[:24] + "\n":            gitMalformed, // SHA-256
		"ref: refs/heads/.invalid\n":           gitRefFormat,
		"ref: refs/heads/" + long(1200) + "\n": gitMalformed,
	} {
		if got, err := parseHead([]byte(in)); !errors.Is(err, want) {
			t.Errorf("%q: %+v, %v, want %s", in, got, err, want)
		}
	}
}

func long(n int) string { return strings.Repeat("x", n) }

// git itself must take every name that validBranch takes.
func TestValidBranchAgreesWithGit(t *testing.T) {
	git, err := exec.LookPath("git")
	if err != nil {
		t.Skip("no git")
	}
	for _, name := range []string{
		"main", "a/b", "a.b", "a..b", ".a", "a/.b", "a.", "a.lock", "a.lock/b", "a/", "/a", "a//b", "@", "a@b", "a@{b", "-a", "a-", "HEAD",
		"a b", "a~b", "a^b", "a:b", "a?b", "a*b", "a[b", "a\\b", "a\tb", "a\x7fb", "\xff", "ü", "a\nb", "refs/heads/x", "{", "a'b\"", "$(x)", ";",
	} {
		err := exec.Command(git, "check-ref-format", "--branch", name).Run()
		if got, want := validBranch(name), err == nil; got != want {
			t.Errorf("%q: %v, git says %v", name, got, want)
		}
	}
}

func TestFindPackedRef(t *testing.T) {
	other := strings.Repeat("f", 40)
	in := "# pack-refs with: peeled \n" + other + " refs/heads/main2\n" + someID + " refs/heads/main\n^" + other + "\n"
	for ref, want := range map[string]string{"refs/heads/main": someID, "refs/heads/main2": other, "refs/heads/mai": "", "main": ""} {
		if got, err := findPackedRef([]byte(in), ref); err != nil || got != want {
			t.Errorf("%s: %q, %v", ref, got, err)
		}
	}
	for _, in := range []string{"x\n", someID + "\n", someID + " \n", someID + " refs/heads/main", "^x\n", someID[1:] + " refs/heads/main\n"} {
		if _, err := findPackedRef([]byte(in), "refs/heads/main"); !errors.Is(err, gitMalformed) {
			t.Errorf("%q: %v", in, err)
		}
	}
}

func TestRefConflict(t *testing.T) {
	for name, want := range map[string]bool{
		"refs/agentshim/r": true, "refs/agentshim": true, "refs/agentshim/r/x": true, "refs": true,
		"refs/agentshim/r2": false, "refs/agent": false, "refs/heads/r": false,
	} {
		if got := refConflict(name, "refs/agentshim/r"); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestParseGitFile(t *testing.T) {
	for in, want := range map[string]string{
		"gitdir: /a/b\n": "/a/b", "gitdir: ../x": "../x", "gitdir: /a b\r\n": "/a b", "gitdir: /\xff\n": "/\xff",
		"": "", "gitdir:/a\n": "", "gitdir: \n": "", "gitdir: /a\n/b\n": "", "gitdir: /a\x00b": "", "/a": "",
	} {
		got, err := parseGitFile([]byte(in))
		if got != want && want != "" || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
}

func TestChooseTips(t *testing.T) {
	a, b, c := strings.Repeat("a", 40), strings.Repeat("b", 40), strings.Repeat("c", 40)
	was := gitHead{Branch: "main", Commit: a}
	for name, row := range map[string]struct {
		head  gitHead
		began string
		want  gitTips
	}{
		"nothing":     {was, a, gitTips{base: a, branch: "main"}},
		"both gone":   {gitHead{Branch: "x"}, "", gitTips{base: a, branch: "x"}},
		"HEAD's":      {gitHead{Branch: "main", Commit: b}, b, gitTips{base: a, take: b, branch: "main"}},
		"HEAD's, two": {gitHead{Branch: "x", Commit: b}, c, gitTips{base: a, take: b, branch: "x"}},
		"the branch's": {
			gitHead{Commit: a},
			c,
			gitTips{base: a, take: c, branch: "main"},
		},
	} {
		if got := chooseTips(was, row.head, row.began); !reflect.DeepEqual(got, row.want) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

var configs = []string{
	"", "[core]\n\tbare = false\n", "[Core]BARE=true # x\n", "[a \"B c\"]\n x = \"1 ; 2\" ; three\n",
	"[a.B]\nx\n", "[a]x=1\\\n2\n[a]\nx = a\\tb\\\\c\\\"d\\n\n", "[a \"q\\\"\\\\u\"]\nk=v  \n", "; c\n[a]\n; d\nk =\n",
	"[a]\nk = \" x \" y \n", "[a]\r\nk = v\r\n", "[a]\nk = one two  three\n", "[remote \"o\"]\n\tpromisor = true\n\turl=x:y\n",
	"[include]\npath = /etc/passwd\n", "[a]\nk=v", "\ufeff[a]\nk=v\n", "[a]\nk = \"\"\n", "[a]\nk = x#y\n", "[a-1]\nk-2 = x\n",
}

var badConfigs = []string{
	"x=1\n", "[a\nx=1\n", "[]\nx=1\n", "[a]\n=1\n", "[a]\n_x=1\n", "[a]\nx y\n", "[a]\nx=\"1\n", "[a]\nx=\\q\n", "[a \"b]\nx=1\n", "[a \"b\n\"]\n", "[a]\n-x=1\n", "[a]\nx=\\",
}

// What is taken is read as git reads it. Refused may be more than git refuses.
func TestParseGitConfigAgreesWithGit(t *testing.T) {
	git, err := exec.LookPath("git")
	if err != nil {
		t.Skip("no git")
	}
	for i, in := range slices.Concat(configs, badConfigs) {
		file := filepath.Join(t.TempDir(), "config")
		must(t, os.WriteFile(file, []byte(in), 0o644))
		cmd := exec.Command(git, "config", "--no-includes", "-f", file, "--list", "-z")
		out, gitErr := cmd.Output()
		settings, err := parseGitConfig([]byte(in))
		if taken := err == nil; taken != (i < len(configs)) || taken && gitErr != nil {
			t.Errorf("%q: %v, git says %v", in, err, gitErr)
			continue
		}
		var got strings.Builder
		for _, s := range settings {
			got.WriteString(s.Key)
			if !s.Bare {
				got.WriteString("\n" + s.Value)
			}
			got.WriteString("\x00")
		}
		if diff := cmp.Diff(string(out), got.String()); err == nil && diff != "" {
			t.Errorf("%q: %s", in, diff)
		}
	}
}

func TestRenderGitConfigIsReadBack(t *testing.T) {
	want := []gitSetting{{Key: "user.name", Value: "a \"b\" \\ #;\n\t[x]\ny = z"}, {Key: "user.email", Value: " <x@y> "}, {Key: "core.bare", Value: "false"}}
	got, err := parseGitConfig(renderGitConfig(want))
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v %s", err, diff)
	}
}

func TestCheckGitConfig(t *testing.T) {
	for in, want := range map[string]gitReason{
		"[core]\nbare\n": gitBare, "[core]\nbare = maybe\n": gitBare, "[core]\nsparseCheckout = true\n": gitSparse,
		"[core]\nrepositoryformatversion = 2\n": gitExtension, "[extensions]\nobjectFormat = sha256\n": gitObjectFormat,
		"[extensions]\nrefStorage = reftable\n": gitRefFormat, "[extensions]\npartialClone = origin\n": gitPartial,
		"[remote \"o\"]\npromisor = true\n": gitPartial, "[remote \"o\"]\npartialclonefilter = blob:none\n": gitPartial,
		"[extensions]\nnew = 1\n": gitExtension, "[extensions]\ncompatObjectFormat = sha256\n": gitObjectFormat,
	} {
		s, err := parseGitConfig([]byte(in))
		must(t, err)
		if err := checkGitConfig(s, false); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %s", in, err, want)
		}
	}
	for _, in := range []string{
		"[core]\nbare = false\nbare = no\n", "[extensions]\nobjectFormat = SHA1\nrefStorage = files\nworktreeConfig = true\n",
		"[remote \"o\"]\npromisor = false\n", "[core]\nrepositoryformatversion = 1\n", "[core]\nbare=true\n[core]\nbare=false\n",
	} {
		s, err := parseGitConfig([]byte(in))
		must(t, err)
		if err := checkGitConfig(s, false); err != nil {
			t.Errorf("%q: %v", in, err)
		}
	}
}

func TestEveryRemedyBelongsToAReason(t *testing.T) {
	for reason, remedy := range gitRemedies {
		e := &gitError{Reason: reason}
		if e.Remedy() != remedy || remedy == "" || !errors.Is(e, reason) {
			t.Errorf("%s: %q", reason, e.Remedy())
		}
	}
}

func FuzzParseGitConfig(f *testing.F) {
	for _, s := range slices.Concat(configs, badConfigs) {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		settings, err := parseGitConfig(b)
		if err != nil {
			return
		}
		_ = checkGitConfig(settings, false)
		kept := gitSettings(settings).kept()
		again, err := parseGitConfig(renderGitConfig(kept))
		if err != nil || len(again) != len(kept) {
			t.Errorf("%v %v", again, err)
		}
	})
}

func FuzzGitRefs(f *testing.F) {
	for _, s := range []string{"ref: refs/heads/main\n", someID + "\n", someID + " refs/heads/main\n^" + someID + "\n", "gitdir: ../x\n", "ref: refs/heads/../x"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseHead(b)
		if err == nil && (h.Branch == "") == (h.Commit == "") {
			t.Errorf("%+v", h)
		}
		if strings.Contains("/"+h.Branch+"/", "/../") || strings.HasPrefix(h.Branch, "/") || strings.ContainsAny(h.Branch, "\x00\n") {
			t.Errorf("branch %q", h.Branch)
		}
		if id, err := findPackedRef(b, "refs/heads/main"); err == nil && id != "" && !isObjectID(id) {
			t.Errorf("id %q", id)
		}
		if ids, err := parseShallow(b); err == nil {
			for _, id := range ids {
				if !isObjectID(id) {
					t.Errorf("id %q", id)
				}
			}
		}
		if p, err := parseGitFile(b); err == nil && strings.ContainsAny(p, "\x00\n") {
			t.Errorf("path %q", p)
		}
	})
}

func FuzzKeepUnseen(f *testing.F) {
	f.Add([]byte("DIRC\x00\x00\x00\x02\x00\x00\x00\x01" + long(120)))
	f.Fuzz(func(t *testing.T, b []byte) {
		out, _, err := keepUnseen(b, []string{"a"})
		if err == nil && len(out) != len(b) {
			t.Errorf("%d bytes of %d", len(out), len(b))
		}
	})
}

func FuzzVerifyLooseObject(f *testing.F) {
	f.Add(looseBytes("blob 2\x00ab"))
	f.Add(looseBytes("blob 9223372036854775807\x00ab"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := verifyLooseObject(strings.NewReader(string(b)), someID, 1<<10)
		if err == nil && n > 1<<10 {
			t.Errorf("%d bytes", n)
		}
	})
}
