package harness_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentshim/agentshim/harness"
)

// with is the smallest harness file, plus members.
func with(members string) string {
	if members != "" {
		members = "," + members
	}
	return `{"version":1,"image":"agent:dev","harness":{"binary":"sh"}` + members + `}`
}

// withHarness is the smallest file whose harness has further members.
func withHarness(members string) string {
	return `{"version":1,"image":"agent:dev","harness":{"binary":"sh",` + members + `}}`
}

func parse(text string) (harness.Harness, error) {
	return harness.Parse([]byte(text), "/spec", harness.Overrides{})
}

// list takes a joined error apart; every part has to be a problem of its own.
func list(t *testing.T, err error) []*harness.Problem {
	t.Helper()
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatalf("not a joined error: %v", err)
	}
	var problems []*harness.Problem
	for _, one := range joined.Unwrap() {
		problem, ok := errors.AsType[*harness.Problem](one)
		if !ok || !errors.Is(one, harness.ErrInvalid) {
			t.Fatalf("%T %v is no problem that matches ErrInvalid", one, one)
		}
		problems = append(problems, problem)
	}
	return problems
}

func paths(t *testing.T, err error) []string {
	t.Helper()
	var all []string
	for _, p := range list(t, err) {
		all = append(all, p.Path)
	}
	return all
}

func TestDefaults(t *testing.T) {
	got, err := parse(with(`"workspace":{"source":"."},"mounts":[{"source":"a","target":"/a"}]`))
	if err != nil {
		t.Fatal(err)
	}
	want := harness.Harness{
		Version: 1, Image: "agent:dev", Engine: "auto", Pull: "missing",
		Harness: harness.Command{
			Binary: "sh", PromptMode: "arg", PromptPosition: "before-flags", FlagStyle: "gnu-long", Auth: "none",
		},
		Workspace: &harness.Workspace{Source: ".", Target: "/workspace", Mode: "read-only"},
		Mounts:    []harness.Mount{{Source: "a", Target: "/a", Label: "none"}},
		Home:      harness.Home{SizeMB: 512}, TmpSizeMB: 512,
		Egress:    harness.Egress{Mode: "deny-all", Renderer: "auto"},
		Seccomp:   harness.Seccomp{Profile: "default"},
		Resources: harness.Resources{PIDs: 512, NoFile: 8192, ShmMB: 64},
		StopGrace: "10s", Terminal: "auto", Dir: "/spec",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestAccepted(t *testing.T) {
	long := strings.Repeat("x", 1000)
	for name, text := range map[string]string{
		"smallest":              with(""),
		"empty later fields":    with(`"egress":{"mode":"deny-all","allow":[],"renderer":"auto"},"seccomp":{"profile":"default","allow":[],"deny":[]},"devices":[],"groups":[],"caches":[],"fallback":[]`),
		"user":                  with(`"user":"0:4294967294"`),
		"chown":                 with(`"user":"0:0","capabilities":["CHOWN"]`),
		"image registry":        `{"version":1,"image":"Registry.example.com:5000/team/agent__x:V1.2@sha256:` + strings.Repeat("a", 64) + `","harness":{"binary":"sh"}}`,
		"image id":              `{"version":1,"image":"sha256:0123456789ab","harness":{"binary":"sh"}}`,
		"image ipv6":            `{"version":1,"image":"[::1]:5000/a","harness":{"binary":"sh"}}`,
		"image docker:dind":     `{"version":1,"image":"docker:dind","harness":{"binary":"sh"}}`,
		"platform":              with(`"platform":"linux/arm/v7","pull":"fallback","userns":"auto"`),
		"E08 env byte-exact":    with(`"env":{"A":"x=y z=$H \\ \"q\" é\n ","EMPTY":""}`),
		"longest target":        with(`"mounts":[{"source":"a","target":"/` + strings.Repeat("a/", 1535) + `b"}]`),
		"devices and groups":    with(`"devices":["/dev/kvm","/dev/dri/renderD128"],"groups":[0,4294967294]`),
		"SELinux labels":        with(`"mounts":[{"source":"a","target":"/a","label":"z"},{"source":"a","target":"/b","label":"Z"}]`),
		"labels":                with(`"labels":{"com.example/team":"a b, c"}`),
		"workspace none":        with(`"workspace":{"mode":"none"}`),
		"workspace git private": with(`"workspace":{"source":".","git":"private"}`),
		"workspace git shared":  with(`"workspace":{"source":".","git":"shared"}`),
		"workspace git none":    with(`"workspace":{"source":"~/w","git":"none","mode":"writable","target":"~/w"}`),
		"mounts":                with(`"workspace":{"source":"."},"mounts":[{"source":"~/d,a:t","target":"~/d"},{"source":"/x","target":"sub/dir"},{"source":"b","target":"/tmp/b"},{"source":"c","target":"/etc/ssl/certs"},{"source":"d","target":"/processes"},{"source":"e","target":"/...x"}]`),
		"home files":            with(`"home":{"sizeMb":1,"noexec":true,"files":[{"source":"~/a","target":".a/b"},{"source":"b","target":".a/c"}]}`),
		"working dir":           with(`"workingDir":"/processes"`),
		"duration":              with(`"stopGrace":"720h"`),
		"session":               with(`"session":{"idle":"30m","maximum":"8h","ready":{"port":8080}}`),
		"session, empty":        with(`"session":{}`),
		"ready by command":      with(`"session":{"ready":{"command":["test","-e","/x"]}}`),
		"every gap and opening": with(`"accept":["rootless-cgroup-limits","bind-noexec","tmpfs-inodes","shared-uid-quotas","root-user","nested-seccomp","custom-seccomp","unmasked-proc","attached-container","proxy-resolves","syscall:io_uring_setup","device:/dev/fuse","group:44"]`),
		"flag mode":             withHarness(`"promptMode":"flag","promptFlag":"-p"`),
		"file mode, no flag":    withHarness(`"promptMode":"file"`),
		"options":               withHarness(`"options":{"a_b":[1,"x"],"c":true,"d":1e-3},"optionFlags":{"c":"-c"},"prefixArgs":["-c",""]`),
		"NUL prompt on stdin":   `{"version":1,"image":"a","harness":{"binary":"/bin/sh","promptMode":"stdin"},"prompt":"a\u0000b"}`,
		"resources":             with(`"resources":{"cpus":0.5,"memoryMb":64,"pids":16,"nofile":64,"shmMb":1}`),
		"long prompt":           with(`"prompt":"` + long + `"`),
		"schema key":            with(`"$schema":"x"`),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := parse(text); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestCleanTargets(t *testing.T) {
	h, err := parse(with(`"workspace":{"source":".","target":"/w//x/"},"workingDir":"/w/./x/","mounts":[{"source":"a","target":"~//c/"},{"source":"b","target":"./d//e"}],"home":{"files":[{"source":"a","target":"./x//y"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	got := []string{h.Workspace.Target, h.WorkingDir, h.Mounts[0].Target, h.Mounts[1].Target, h.Home.Files[0].Target, h.ContainerPath(h.Mounts[0].Target), h.ContainerPath(h.Mounts[1].Target)}
	want := []string{"/w/x", "/w/x", "~/c", "d/e", "x/y", "/home/agent/c", "/w/x/d/e"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestRefused(t *testing.T) {
	mount := func(target string) string {
		return with(`"workspace":{"source":"."},"mounts":[{"source":"a","target":` + quoted(target) + `}]`)
	}
	schema := fullValidator(t)
	image := func(image string) string {
		return `{"version":1,"image":` + quoted(image) + `,"harness":{"binary":"sh"}}`
	}
	for _, tt := range []struct{ name, text, path string }{
		// Text.
		{"empty", "", "$"},
		{"blank", " \n", "$"},
		{"cut off", `{"version":1,"image":`, "$.image"},
		{"trailing value", with("") + "{}", "$"},
		{"trailing text", with("") + "x", "$"},
		{"trailing comma", `{"version":1,}`, "$"},
		{"comment", `{"version":1, // one` + "\n}", "$"},
		{"byte order mark", "\ufeff" + with(""), "$"},
		{"not UTF-8", with("\"name\":\"a\xffb\""), "$.name"},
		{"lone surrogate", with(`"name":"\ud800"`), "$.name"},
		{"too large", with(`"prompt":"` + strings.Repeat("x", harness.MaxFile) + `"`), "$"},
		{"duplicate key", with(`"name":"a","name":"b"`), "$.name"},
		{"duplicate key, escaped", with(`"name":"a","n\u0061me":"b"`), "$.name"},
		{"duplicate env", with(`"env":{"A":"1","A":"2"}`), "$.env.A"},
		// Shape.
		{"no object", `[]`, "$"},
		{"text", `"x"`, "$"},
		{"null", `null`, "$"},
		{"no version", `{"image":"a","harness":{"binary":"sh"}}`, "$.version"},
		{"other version", `{"version":2,"image":"a","harness":{"binary":"sh"}}`, "$.version"},
		{"version as text", `{"version":"1","image":"a","harness":{"binary":"sh"}}`, "$.version"},
		{"version 1.0", `{"version":1.0,"image":"a","harness":{"binary":"sh"}}`, "$.version"},
		{"no image", `{"version":1,"harness":{"binary":"sh"}}`, "$.image"},
		{"no harness", `{"version":1,"image":"a"}`, "$.harness"},
		{"unknown key", with(`"volumes":[]`), "$.volumes"},
		{"unknown key, other case", with(`"Name":"a"`), "$.Name"},
		{"unknown key inside", with(`"mounts":[{"source":"a","target":"/a"},{"source":"b","target":"/b","readonly":true}]`), "$.mounts[1].readonly"},
		{"A88 privileged", with(`"privileged":true`), "$.privileged"},
		{"A88 host network", with(`"networkMode":"host"`), "$.networkMode"},
		{"A88 passthrough", with(`"engineArgs":["--privileged"]`), "$.engineArgs"},
		{"A55 null", with(`"egress":null`), "$.egress"},
		{"A55 null allow", with(`"egress":{"allow":null}`), "$.egress.allow"},
		{"null in list", with(`"envFrom":[null]`), "$.envFrom[0]"},
		{"null option", withHarness(`"options":{"a":null}`), "$.harness.options.a"},
		{"object option", withHarness(`"options":{"a":{}}`), "$.harness.options.a"},
		{"boolean in list option", withHarness(`"options":{"a":["x",true]}`), "$.harness.options.a[1]"},
		{"text for list", with(`"envFrom":"A"`), "$.envFrom"},
		{"number for text", with(`"env":{"A":1}`), "$.env.A"},
		{"text for boolean", with(`"rootfsWritable":"true"`), "$.rootfsWritable"},
		{"allow port", with(`"egress":{"allow":["a","b",{"host":"c","port":70000}]}`), "$.egress.allow[2].port"},
		{"allow key", with(`"egress":{"allow":[{"host":"c","prot":1}]}`), "$.egress.allow[0].prot"},
		{"allow type", with(`"egress":{"allow":[1]}`), "$.egress.allow[0]"},
		{"host service port", with(`"egress":{"hostServices":[{"name":"a","port":0}]}`), "$.egress.hostServices[0].port"},
		{"exit code", with(`"fallbackOn":[256]`), "$.fallbackOn[0]"},
		{"huge number", with(`"tmpSizeMb":1e999999999`), "$.tmpSizeMb"},
		{"large exponent", with(`"tmpSizeMb":1e400`), "$.tmpSizeMb"},
		{"cut inside a list", `{"version":1,"envFrom":["A",`, "$.envFrom"},
		{"long number", with(`"tmpSizeMb":1` + strings.Repeat("0", 100)), "$.tmpSizeMb"},
		{"fraction", with(`"tmpSizeMb":1.5`), "$.tmpSizeMb"},
		{"exponent", with(`"tmpSizeMb":1e2`), "$.tmpSizeMb"},
		{"explicit zero", with(`"resources":{"pids":0}`), "$.resources.pids"},
		{"negative size", with(`"home":{"sizeMb":-1}`), "$.home.sizeMb"},
		{"size too large", with(`"tmpSizeMb":1048577`), "$.tmpSizeMb"},
		{"no cpu", with(`"resources":{"cpus":0}`), "$.resources.cpus"},
		{"too little memory", with(`"resources":{"memoryMb":63}`), "$.resources.memoryMb"},
		{"too many files", with(`"resources":{"nofile":1048577}`), "$.resources.nofile"},
		{"empty shm", with(`"resources":{"shmMb":0}`), "$.resources.shmMb"},
		{"name", with(`"name":"--x"`), "$.name"},
		{"empty name", with(`"name":""`), "$.name"},
		{"engine", with(`"engine":"nerdctl"`), "$.engine"},
		{"pull", with(`"pull":"newer"`), "$.pull"},
		{"platform", with(`"platform":"linux"`), "$.platform"},
		{"other system", with(`"platform":"windows/amd64"`), "$.platform"},
		{"userns", with(`"userns":"host"`), "$.userns"},
		{"terminal", with(`"terminal":"always"`), "$.terminal"},
		{"too many mounts", with(`"mounts":[` + strings.Repeat(`{"source":"a","target":"/a"},`, 256) + `{"source":"a","target":"/a"}]`), "$.mounts"},
		// Identity.
		{"U09 no uid", with(`"user":":1234"`), "$.user"},
		{"U09 no gid", with(`"user":"1234:"`), "$.user"},
		{"U09 one number", with(`"user":"1234"`), "$.user"},
		{"U09 name", with(`"user":"root:root"`), "$.user"},
		{"U09 negative", with(`"user":"-1:0"`), "$.user"},
		{"U09 sign", with(`"user":"+1:1"`), "$.user"},
		{"U09 leading zero", with(`"user":"01:1"`), "$.user"},
		{"U09 blank", with(`"user":"1:1 "`), "$.user"},
		{"U09 line", with(`"user":"1:1\n"`), "$.user"},
		{"U09 too large", with(`"user":"4294967295:0"`), "$.user"},
		{"U09 far too large", with(`"user":"1:99999999999999999999"`), "$.user"},
		{"U09 empty", with(`"user":""`), "$.user"},
		{"U09 other digits", with(`"user":"١:١"`), "$.user"},
		{"capability", with(`"user":"0:0","capabilities":["NET_ADMIN"]`), "$.capabilities[0]"},
		{"capability twice", with(`"user":"0:0","capabilities":["CHOWN","CHOWN"]`), "$.capabilities[1]"},
		{"capability without root", with(`"user":"1:1","capabilities":["CHOWN"]`), "$.capabilities"},
		{"capability without user", with(`"capabilities":["CHOWN"]`), "$.capabilities"},
		// Image.
		{"E09 option", image("--privileged"), "$.image"},
		{"E09 blank", image("a b"), "$.image"},
		{"empty image", image(""), "$.image"},
		{"upper case", image("a/B"), "$.image"},
		{"short digest", image("a@sha256:abc"), "$.image"},
		{"transport", image("oci:a"), "$.image"},
		{"transport with path", image("docker-archive:/x.tar"), "$.image"},
		{"URL", image("docker://a"), "$.image"},
		{"line", image("a\n"), "$.image"},
		{"long", image(strings.Repeat("a", 513)), "$.image"},
		// Command.
		{"no program", `{"version":1,"image":"a","harness":{}}`, "$.harness.binary"},
		{"relative program", `{"version":1,"image":"a","harness":{"binary":"./x"}}`, "$.harness.binary"},
		{"option as program", `{"version":1,"image":"a","harness":{"binary":"-x"}}`, "$.harness.binary"},
		{"tilde program", `{"version":1,"image":"a","harness":{"binary":"~/x"}}`, "$.harness.binary"},
		{"NUL argument", withHarness(`"prefixArgs":["a","b\u0000"]`), "$.harness.prefixArgs[1]"},
		{"long argument", withHarness(`"prefixArgs":["` + strings.Repeat("x", 1<<17) + `"]`), "$.harness.prefixArgs[0]"},
		{"flag mode without flag", withHarness(`"promptMode":"flag"`), "$.harness.promptFlag"},
		{"flag without use", withHarness(`"promptFlag":"-p"`), "$.harness.promptFlag"},
		{"flag with stdin", withHarness(`"promptMode":"stdin","promptFlag":"-p"`), "$.harness.promptFlag"},
		{"no flag", withHarness(`"promptMode":"flag","promptFlag":"p x"`), "$.harness.promptFlag"},
		{"prompt mode", withHarness(`"promptMode":"args"`), "$.harness.promptMode"},
		{"flag style", withHarness(`"flagStyle":"gnu"`), "$.harness.flagStyle"},
		{"prompt position", withHarness(`"promptPosition":"first"`), "$.harness.promptPosition"},
		{"option name", withHarness(`"options":{"--x":1}`), `$.harness.options["--x"]`},
		{"NUL option", withHarness(`"options":{"x":["\u0000"]}`), "$.harness.options.x"},
		{"option flag", withHarness(`"options":{"x":1},"optionFlags":{"x":"x"}`), "$.harness.optionFlags.x"},
		{"template in an option", withHarness(`"options":{"x":["a","${MODEL}"]}`), "$.harness.options.x"},
		{"template in a target", with(`"mounts":[{"source":"/a","target":"/data/${RUN}"}]`), "$.mounts[0].target"},
		{"template in a home target", with(`"home":{"files":[{"source":"/a","target":"${RUN}"}]}`), "$.home.files[0].target"},
		{"template in the working folder", with(`"workingDir":"/${RUN}"`), "$.workingDir"},
		{"template in a guarded path", with(`"workspace":{"source":".","hide":["${RUN}"]}`), "$.workspace.hide[0]"},
		{"setting of the orchestrator", with(`"envFrom":["DAGU_API_TOKEN"]`), "$.envFrom[0]"},
		{"auth without a provider", withHarness(`"auth":"account"`), "$.harness.auth"},
		{"two prompts", with(`"prompt":"a","promptFile":"b"`), "$.promptFile"},
		{"NUL prompt", with(`"prompt":"a\u0000"`), "$.prompt"},
		{"prompt too long for argv", with(`"prompt":"` + strings.Repeat("x", 1<<17) + `"`), "$.prompt"},
		// Sources.
		{"M06 other home", with(`"mounts":[{"source":"~root/x","target":"/x"}]`), "$.mounts[0].source"},
		{"M06 bare tilde", with(`"workspace":{"source":"~"}`), "$.workspace.source"},
		{"A61 variable", with(`"mounts":[{"source":"$HOME/x","target":"/x"}]`), "$.mounts[0].source"},
		{"A61 braces", with(`"mounts":[{"source":"/a/${HOME}","target":"/x"}]`), "$.mounts[0].source"},
		{"A61 NUL", with(`"mounts":[{"source":"a\u0000b","target":"/x"}]`), "$.mounts[0].source"},
		{"A61 line", with(`"envFiles":["a\nb"]`), "$.envFiles[0]"},
		{"empty source", with(`"mounts":[{"source":"","target":"/x"}]`), "$.mounts[0].source"},
		{"no source", with(`"mounts":[{"target":"/x"}]`), "$.mounts[0].source"},
		{"no workspace source", with(`"workspace":{}`), "$.workspace.source"},
		{"prompt file", with(`"promptFile":"$X"`), "$.promptFile"},
		{"home source", with(`"home":{"files":[{"source":"~x","target":"a"}]}`), "$.home.files[0].source"},
		// Targets.
		{"M12 root", mount("/"), "$.mounts[0].target"},
		{"M12 root, unclean", mount("//."), "$.mounts[0].target"},
		{"M12 dots", mount("/a/../proc"), "$.mounts[0].target"},
		{"M12 dots below", mount("/a/.."), "$.mounts[0].target"},
		{"M12 proc", mount("/proc"), "$.mounts[0].target"},
		{"M12 below proc", mount("/proc/self"), "$.mounts[0].target"},
		{"M12 sys", mount("/sys/"), "$.mounts[0].target"},
		{"M12 dev", mount("//dev/shm"), "$.mounts[0].target"},
		{"M12 run", mount("/run/x"), "$.mounts[0].target"},
		{"M12 var run", mount("/var/run"), "$.mounts[0].target"},
		{"M12 parent of var run", mount("/var"), "$.mounts[0].target"},
		{"M12 init", mount("/.agentshim-init"), "$.mounts[0].target"},
		{"M12 below init", mount("/.agentshim-init/x"), "$.mounts[0].target"},
		{"M12 etc", mount("/etc"), "$.mounts[0].target"},
		{"M12 passwd", mount("/etc/passwd"), "$.mounts[0].target"},
		{"M12 group", mount("/etc/group"), "$.mounts[0].target"},
		{"M12 hosts", mount("/etc/hosts"), "$.mounts[0].target"},
		{"M12 resolv.conf", mount("/etc/resolv.conf"), "$.mounts[0].target"},
		{"M12 hostname", mount("/etc/./hostname"), "$.mounts[0].target"},
		{"M12 homes", mount("/home"), "$.mounts[0].target"},
		{"M18 home", mount("/home/agent"), "$.mounts[0].target"},
		{"M18 home as tilde", mount("~/"), "$.mounts[0].target"},
		{"M18 tmp", mount("/tmp"), "$.mounts[0].target"},
		{"A59 tilde user", mount("~root/x"), "$.mounts[0].target"},
		{"A59 dots in home", mount("~/../x"), "$.mounts[0].target"},
		{"A59 relative dots", mount("../x"), "$.mounts[0].target"},
		{"A61 NUL in target", mount("/a\x00"), "$.mounts[0].target"},
		{"M18 workspace", mount("/workspace/"), "$.mounts[0].target"},
		{"M18 workspace as dot", mount("."), "$.mounts[0].target"},
		{"empty target", mount(""), "$.mounts[0].target"},
		{"M18 same target", with(`"mounts":[{"source":"a","target":"/x"},{"source":"b","target":"/x/."}]`), "$.mounts[1].target"},
		{"M18 same in two forms", with(`"mounts":[{"source":"a","target":"~/x"},{"source":"b","target":"/home/agent/x"}]`), "$.mounts[1].target"},
		{"relative without workspace", with(`"mounts":[{"source":"a","target":"x"}]`), "$.mounts[0].target"},
		{"relative with mode none", with(`"workspace":{"mode":"none"},"mounts":[{"source":"a","target":"x"}]`), "$.mounts[0].target"},
		{"workspace on proc", with(`"workspace":{"source":".","target":"/proc"}`), "$.workspace.target"},
		{"workspace on home", with(`"workspace":{"source":".","target":"/home/agent"}`), "$.workspace.target"},
		{"relative workspace", with(`"workspace":{"source":".","target":"w"}`), "$.workspace.target"},
		{"workspace mode", with(`"workspace":{"source":".","mode":"rw"}`), "$.workspace.mode"},
		{"A73 proc fd", with(`"workingDir":"/proc/self/fd/7"`), "$.workingDir"},
		{"M20 sys", with(`"workingDir":"//sys"`), "$.workingDir"},
		{"M20 dev", with(`"workingDir":"/dev/fd"`), "$.workingDir"},
		{"M20 dots", with(`"workingDir":"/a/../proc"`), "$.workingDir"},
		{"relative working dir", with(`"workingDir":"a"`), "$.workingDir"},
		{"home target absolute", with(`"home":{"files":[{"source":"a","target":"/a"}]}`), "$.home.files[0].target"},
		{"home target tilde", with(`"home":{"files":[{"source":"a","target":"~/a"}]}`), "$.home.files[0].target"},
		{"home target dots", with(`"home":{"files":[{"source":"a","target":"a/../../b"}]}`), "$.home.files[0].target"},
		{"home target dot", with(`"home":{"files":[{"source":"a","target":"."}]}`), "$.home.files[0].target"},
		{"home target folder", with(`"home":{"files":[{"source":"a","target":"a/"}]}`), "$.home.files[0].target"},
		{"home target twice", with(`"home":{"files":[{"source":"a","target":"a"},{"source":"b","target":"./a"}]}`), "$.home.files[1].target"},
		{"home target below file", with(`"home":{"files":[{"source":"a","target":"a"},{"source":"b","target":"a/b"}]}`), "$.home.files[1].target"},
		{"home target in mount", with(`"mounts":[{"source":"a","target":"~/.c"}],"home":{"files":[{"source":"a","target":".c/auth"}]}`), "$.home.files[0].target"},
		{"home target in workspace", with(`"workspace":{"source":".","target":"~/w"},"home":{"files":[{"source":"a","target":"w/auth"}]}`), "$.home.files[0].target"},
		// Environment, labels, the rest.
		{"env name", with(`"env":{"A-B":"x"}`), `$.env["A-B"]`},
		{"env empty name", with(`"env":{"":"x"}`), `$.env[""]`},
		{"env digit", with(`"env":{"1A":"x"}`), `$.env["1A"]`},
		{"env home", with(`"env":{"HOME":"/x"}`), "$.env.HOME"},
		{"env runtime dir", withHarness(`"env":{"XDG_RUNTIME_DIR":"/x"}`), "$.harness.env.XDG_RUNTIME_DIR"},
		{"env NUL", with(`"env":{"A":"\u0000"}`), "$.env.A"},
		{"env long", with(`"env":{"A":"` + strings.Repeat("x", 1<<17) + `"}`), "$.env.A"},
		{"envFrom name", with(`"envFrom":["A=B"]`), "$.envFrom[0]"},
		{"envFrom home", with(`"envFrom":["A","HOME"]`), "$.envFrom[1]"},
		{"envFrom twice", with(`"envFrom":["A","A"]`), "$.envFrom[1]"},
		{"seccomp unconfined", with(`"seccomp":{"profile":"unconfined"}`), "$.seccomp.profile"},
		{"seccomp slip", with(`"seccomp":{"profile":"nestd"}`), "$.seccomp.profile"},
		{"seccomp call twice", with(`"seccomp":{"allow":["a","a"]}`), "$.seccomp.allow[1]"},
		{"device elsewhere", with(`"devices":["/srv/kvm"]`), "$.devices[0]"},
		{"device folder climbed out of", with(`"devices":["/dev/../etc/x"]`), "$.devices[0]"},
		{"device with options", with(`"devices":["/dev/kvm:/dev/kvm:rwm"]`), "$.devices[0]"},
		{"device all", with(`"devices":["/dev"]`), "$.devices[0]"},
		{"device with a line feed", with(`"devices":["/dev/kvm\n"]`), "$.devices[0]"},
		{"device twice", with(`"devices":["/dev/kvm","/dev/kvm"]`), "$.devices[1]"},
		{"group twice", with(`"groups":[7,7]`), "$.groups[1]"},
		{"group too large", with(`"groups":[4294967295]`), "$.groups[0]"},
		{"long target", with(`"mounts":[{"source":"a","target":"/a` + strings.Repeat("/aaaa", 700) + `"}]`), "$.mounts[0].target"},
		{"long name in a target", with(`"mounts":[{"source":"a","target":"/a/` + strings.Repeat("a", 256) + `/b"}]`), "$.mounts[0].target"},
		{"own label", with(`"labels":{"agentshim.run":"x"}`), `$.labels["agentshim.run"]`},
		{"label name", with(`"labels":{"a=b":"x"}`), `$.labels["a=b"]`},
		{"label value", with(`"labels":{"a":"x\n"}`), "$.labels.a"},
		{"duration", with(`"stopGrace":"10"`), "$.stopGrace"},
		{"duration zero", with(`"stopGrace":"0s"`), "$.stopGrace"},
		{"duration negative", with(`"stopGrace":"-1s"`), "$.stopGrace"},
		{"duration long", with(`"stopGrace":"721h"`), "$.stopGrace"},
		{"session idle", with(`"session":{"idle":"1"}`), "$.session.idle"},
		{"session maximum", with(`"session":{"maximum":"-1s"}`), "$.session.maximum"},
		{"ready by nothing", with(`"session":{"ready":{}}`), "$.session.ready"},
		{"ready by both", with(`"session":{"ready":{"port":80,"command":["true"]}}`), "$.session.ready"},
		{"accept", with(`"accept":["root"]`), "$.accept[0]"},
		{"accept without operand", with(`"accept":["syscall:"]`), "$.accept[0]"},
		{"accept group name", with(`"accept":["group:video"]`), "$.accept[0]"},
		{"accept everything", with(`"accept":["*"]`), "$.accept[0]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if fits, decided := harness.FitsSchema([]byte(tt.text)); decided {
				if err := schema([]byte(tt.text)); fits != (err == nil) {
					t.Errorf("own verdict on the shape %v, the validator's: %v", fits, err)
				}
			}
			h, err := parse(tt.text)
			if !errors.Is(err, harness.ErrInvalid) {
				t.Fatalf("want ErrInvalid, got %v", err)
			}
			if diff := cmp.Diff(harness.Harness{}, h); diff != "" {
				t.Errorf("a value came beside the error: %s", diff)
			}
			for _, p := range list(t, err) {
				if errors.Is(p, harness.ErrNotBuilt) {
					continue // the examples of later fields are refused for that too
				}
				if p.Path != tt.path {
					t.Errorf("%v: want path %s", p, tt.path)
				}
				tt.path = "" // exactly one
			}
			if tt.path != "" {
				t.Errorf("no problem at %s: %v", tt.path, err)
			}
		})
	}
}

func quoted(s string) string {
	text, _ := json.Marshal(s)
	return string(text)
}

func TestNotBuilt(t *testing.T) {
	for _, tt := range []struct{ path, text string }{
		{"$.harness.auth", withHarness(`"auth":"broker"`)},
		{"$.fallback", with(`"fallback":[{"harness":{"binary":"x"}}]`)},
		{"$.fallbackOn", with(`"fallbackOn":[75]`)},
		{"$.egress.brokers", with(`"egress":{"brokers":[{"name":"a","upstream":"https://a","header":"b","valueFrom":{}}]}`)},
	} {
		t.Run(tt.path, func(t *testing.T) {
			_, err := parse(tt.text)
			if !errors.Is(err, harness.ErrNotBuilt) || !errors.Is(err, harness.ErrInvalid) {
				t.Fatalf("want ErrNotBuilt and ErrInvalid, got %v", err)
			}
			if diff := cmp.Diff([]string{tt.path}, paths(t, err)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestNotBuiltIsNotJustInvalid(t *testing.T) {
	if _, err := parse(with(`"name":"-"`)); errors.Is(err, harness.ErrNotBuilt) {
		t.Errorf("a plain problem matches ErrNotBuilt: %v", err)
	}
}

func TestDepth(t *testing.T) {
	nested := func(depth int) error {
		_, err := parse(with(`"x":` + strings.Repeat("[", depth) + strings.Repeat("]", depth)))
		return err
	}
	deepest := "$.x" + strings.Repeat("[0]", 63)
	// One level is the file's own object; x is unknown either way.
	if got := paths(t, nested(63)); len(got) != 1 || got[0] != "$.x" {
		t.Errorf("63 levels: %v", got)
	}
	for _, depth := range []int{64, 5000, 500_000} {
		got := strings.Join(paths(t, nested(depth)), " ")
		if !strings.Contains(got, deepest) && !strings.HasPrefix(got, "$.x[0][0]") {
			t.Errorf("%d levels: no problem of depth: %.200s", depth, got)
		}
	}
}

// golden compares got with testdata/name, or rewrites it with -update.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}

// The goldens hold every problem of a file, in its order, word by word.
func TestAllProblemsAtOnce(t *testing.T) {
	for _, name := range []string{"full", "wrong"} {
		t.Run(name, func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join("testdata", name+".json"))
			if err != nil {
				t.Fatal(err)
			}
			_, err = parse(string(text))
			if err == nil {
				t.Fatal("want an error")
			}
			golden(t, name+".errors", err.Error()+"\n")
			for range 20 {
				if _, again := parse(string(text)); again.Error() != err.Error() {
					t.Fatalf("two runs differ:\n%v\n%v", err, again)
				}
			}
		})
	}
}

// No value of a place that may hold a secret stands in an error.
func TestSecretsStayOut(t *testing.T) {
	const secret = "s3cr3t"
	for name, text := range map[string]string{
		"env value":        with(`"env":{"A":"s3cr3t\u0000"}`),
		"env type":         with(`"env":"s3cr3t"`),
		"env list":         with(`"env":["A=s3cr3t"]`),
		"env key":          with(`"env":{"A=s3cr3t":""}`),
		"env number":       with(`"env":{"A-":"s3cr3t"}`),
		"envFrom":          with(`"envFrom":["A=s3cr3t"]`),
		"envFrom type":     with(`"envFrom":"A=s3cr3t"`),
		"harness type":     `{"version":1,"image":"a","harness":"claude --key s3cr3t"}`,
		"harness env":      withHarness(`"env":{"A":"s3cr3t\u0000"}`),
		"harness env key":  withHarness(`"env":{"A=s3cr3t":"","A=s3cr3t":""}`),
		"fallback env key": with(`"fallback":[{"harness":{"binary":"x","env":{"A=s3cr3t":1}}}]`),
		"prompt":           with(`"prompt":"s3cr3t\u0000"`),
		"prompt type":      with(`"prompt":["s3cr3t"]`),
		"option":           withHarness(`"options":{"k":"s3cr3t\u0000"}`),
		"options type":     withHarness(`"options":"s3cr3t"`),
		"prefix":           withHarness(`"prefixArgs":["s3cr3t\u0000"]`),
		"prefix type":      withHarness(`"prefixArgs":"s3cr3t"`),
		"proxy":            with(`"egress":{"proxy":"http://u:s3cr3t@x"}`),
		"broker":           with(`"egress":{"brokers":[{"name":"a","upstream":"b","header":"c","valueFrom":"s3cr3t"}]}`),
		"unknown key":      with(`"apiKey":"s3cr3t"`),
		"syntax":           with(`"env":{"A":"s3cr3t" x}`),
		"syntax escape":    with(`"env":{"A":"\s3cr3t"}`),
		"not UTF-8":        with("\"env\":{\"A\":\"s3cr3t\xff\"}"),
		"duplicate":        with(`"env":{"A":"s3cr3t","A":"s3cr3t"}`),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parse(text)
			if err == nil {
				t.Fatal("want an error")
			}
			if strings.Contains(err.Error(), secret) {
				t.Error(err)
			}
		})
	}
}

func TestSuggestions(t *testing.T) {
	for _, tt := range []struct{ text, remedy string }{
		{with(`"workspce":{}`), `did you mean "workspace"?`},
		{with(`"envfrom":[]`), `did you mean "envFrom"?`},
		{with(`"resources":{"memory":1}`), `did you mean "memoryMb"?`},
		{with(`"egress":{"allow":[{"host":"a","prot":1}]}`), `did you mean "port"?`},
		{with(`"engine":"pdoman"`), `did you mean "podman"?`},
		{with(`"accept":["bind-no-exec"]`), `did you mean "bind-noexec"?`},
		{with(`"accept":["sycall:x"]`), `did you mean "syscall:"?`},
		{with(`"zzzzzzzzzzzz":1`), ""},
	} {
		t.Run(tt.text, func(t *testing.T) {
			_, err := parse(tt.text)
			for _, p := range list(t, err) {
				if !errors.Is(p, harness.ErrNotBuilt) && p.Remedy != tt.remedy {
					t.Errorf("want %q: %v", tt.remedy, p)
				}
			}
		})
	}
}

func TestLongValuesAreCut(t *testing.T) {
	_, err := parse(with(`"` + strings.Repeat("é", 5000) + `":1,"engine":"` + strings.Repeat("é", 5000) + `"`))
	for _, p := range list(t, err) {
		if len(p.Error()) > 300 {
			t.Errorf("%d bytes: %.100s", len(p.Error()), p)
		}
	}
}

// A file that is wrong everywhere costs no more than a bounded time and text.
func TestManyProblems(t *testing.T) {
	var many, env strings.Builder
	for i := range 60_000 {
		fmt.Fprintf(&many, `,"%d":1`, i)
		fmt.Fprintf(&env, `"%d":1,`, i)
	}
	for name, text := range map[string]string{
		"unknown keys": with(many.String()[1:]),
		"variables":    with(`"env":{` + env.String() + `"A":"b"}`),
		"labels":       with(`"labels":{` + env.String() + `"A":"b"}`),
		"accept":       with(`"accept":[` + strings.Repeat(`"x",`, 100_000) + `"x"]`),
		"home files":   with(`"home":{"files":[` + strings.Repeat(`{"source":"a","target":"b"},`, 30_000) + `{}]}`),
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			_, err := parse(text)
			if !errors.Is(err, harness.ErrInvalid) || len(err.Error()) > 100_000 {
				t.Errorf("%.200v", err)
			}
			if spent := time.Since(start); spent > 10*time.Second {
				t.Errorf("took %v", spent)
			}
		})
	}
}

func TestOverrides(t *testing.T) {
	noImage := `{"version":1,"harness":{"binary":"sh"}}`
	for _, tt := range []struct {
		name, text string
		o          harness.Overrides
		paths      []string // none: accepted
		check      func(h harness.Harness) error
	}{
		{"image supplied", noImage, harness.Overrides{Image: "x:1"}, nil, func(h harness.Harness) error { return same(h.Image, "x:1") }},
		{"image replaced", with(""), harness.Overrides{Image: "x:1"}, nil, func(h harness.Harness) error { return same(h.Image, "x:1") }},
		{"E09 image", with(""), harness.Overrides{Image: "--privileged"}, []string{"--image"}, nil},
		{"engine", with(`"engine":"docker"`), harness.Overrides{Engine: "podman"}, nil, func(h harness.Harness) error { return same(h.Engine, "podman") }},
		{"bad engine", with(""), harness.Overrides{Engine: "lxc"}, []string{"--engine"}, nil},
		{"workspace made", with(""), harness.Overrides{Workspace: "/w"}, nil, func(h harness.Harness) error {
			return same(*h.Workspace, harness.Workspace{Source: "/w", Target: "/workspace", Mode: "read-only"})
		}},
		{"workspace replaced", with(`"workspace":{"source":"a","mode":"writable"}`), harness.Overrides{Workspace: "/w"}, nil, func(h harness.Harness) error {
			return same(*h.Workspace, harness.Workspace{Source: "/w", Target: "/workspace", Mode: "writable"})
		}},
		{"workspace supplied", with(`"workspace":{"mode":"writable"}`), harness.Overrides{Workspace: "/w"}, nil, func(h harness.Harness) error { return same(h.Workspace.Source, "/w") }},
		{"workspace against none", with(`"workspace":{"mode":"none"}`), harness.Overrides{Workspace: "/w"}, []string{"--workspace"}, nil},
		{"workspace line", with(""), harness.Overrides{Workspace: "/w\n"}, []string{"--workspace"}, nil},
		{"prompt file", with(`"prompt":"a"`), harness.Overrides{PromptFile: "/p"}, nil, func(h harness.Harness) error {
			if h.Prompt != nil {
				return errors.New("the file's prompt is still there")
			}
			return same(h.PromptFile, "/p")
		}},
		{"file stays checked", with(`"prompt":"a","promptFile":"b","engine":"x"`), harness.Overrides{PromptFile: "/p", Engine: "docker"}, []string{"$.engine", "$.promptFile"}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h, err := harness.Parse([]byte(tt.text), "/spec", tt.o)
			if tt.paths != nil {
				got := map[string]bool{}
				for _, p := range paths(t, err) {
					got[p] = true
				}
				for _, want := range tt.paths {
					if !got[want] {
						t.Errorf("no problem at %s: %v", want, err)
					}
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := tt.check(h); err != nil {
				t.Error(err)
			}
		})
	}
}

func same(got, want any) error {
	if diff := cmp.Diff(want, got); diff != "" {
		return errors.New(diff)
	}
	return nil
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	good := write("good.json", with(""))
	t.Run("absolute", func(t *testing.T) {
		if h, err := harness.Load(good, harness.Overrides{}); err != nil || h.Dir != dir {
			t.Errorf("dir %q, %v", h.Dir, err)
		}
	})
	t.Run("relative", func(t *testing.T) {
		t.Chdir(filepath.Dir(dir))
		if h, err := harness.Load(filepath.Join(filepath.Base(dir), "good.json"), harness.Overrides{}); err != nil || h.Dir != dir {
			t.Errorf("dir %q, %v", h.Dir, err)
		}
	})
	t.Run("missing", func(t *testing.T) {
		_, err := harness.Load(filepath.Join(dir, "none.json"), harness.Overrides{})
		if !errors.Is(err, harness.ErrInvalid) || !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	})
	t.Run("folder", func(t *testing.T) {
		if _, err := harness.Load(dir, harness.Overrides{}); !errors.Is(err, harness.ErrInvalid) {
			t.Error(err)
		}
	})
	t.Run("too large", func(t *testing.T) {
		file := write("large.json", with("")+strings.Repeat(" ", harness.MaxFile))
		if _, err := harness.Load(file, harness.Overrides{}); !errors.Is(err, harness.ErrInvalid) {
			t.Error(err)
		}
	})
	t.Run("largest", func(t *testing.T) {
		text := with("")
		file := write("largest.json", text+strings.Repeat(" ", harness.MaxFile-len(text)))
		if _, err := harness.Load(file, harness.Overrides{}); err != nil {
			t.Error(err)
		}
	})
	t.Run("names the file", func(t *testing.T) {
		file := write("bad.json", "{}")
		if _, err := harness.Load(file, harness.Overrides{}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", file)) {
			t.Error(err)
		}
	})
}

func TestAllowForms(t *testing.T) {
	const text = `["a.example:443",{"host":"b","port":1,"raw":true},{"host":"c","ech":true}]`
	var allow []harness.Allow
	if err := json.Unmarshal([]byte(text), &allow); err != nil {
		t.Fatal(err)
	}
	want := []harness.Allow{{Host: "a.example:443"}, {Host: "b", Port: 1, Raw: true}, {Host: "c", ECH: true}}
	if diff := cmp.Diff(want, allow); diff != "" {
		t.Error(diff)
	}
	if back, err := json.Marshal(allow); err != nil || string(back) != text {
		t.Errorf("%s, %v", back, err)
	}
}

func FuzzParse(f *testing.F) {
	for _, file := range []string{"full.json", "wrong.json"} {
		text, err := os.ReadFile(filepath.Join("testdata", file))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(with("")))
	f.Add([]byte(with(`"workspace":{"source":"."},"mounts":[{"source":"~/a","target":"~/b"}],"env":{"A":"x=y"},"user":"1:1"`)))
	f.Add([]byte(withHarness(`"options":{"a":[1,"x"],"b":1e-3,"c":true},"promptMode":"file"`)))
	f.Add([]byte(`{"a":{"a":1,"a":2},"version":1e9}{}`))
	f.Add(bytes.Repeat([]byte("["), 200))
	schema := fullValidator(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		if fits, decided := harness.FitsSchema(data); decided {
			if err := schema(data); fits != (err == nil) {
				t.Errorf("own verdict %v, the validator's: %v", fits, err)
			}
		}
		h, err := harness.Parse(data, "/spec", harness.Overrides{})
		if err != nil {
			list(t, err)
			return
		}
		if err := schema(data); err != nil {
			t.Errorf("Parse accepts what the schema refuses: %v", err)
		}
		text, err := json.Marshal(h)
		if err != nil {
			t.Fatal(err)
		}
		again, err := harness.Parse(text, "/spec", harness.Overrides{})
		if err != nil {
			t.Fatalf("%s\n%v", text, err)
		}
		if once, twice := mustMarshal(t, h), mustMarshal(t, again); once != twice {
			t.Errorf("parsed again it is another:\n%s\n%s", once, twice)
		}
	})
}

func mustMarshal(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
