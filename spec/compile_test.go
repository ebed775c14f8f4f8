package spec

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	moby "github.com/moby/profiles/seccomp"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/netpolicy"
)

var update = flag.Bool("update", false, "rewrite the goldens in testdata")

// Hosts as shim.Probe would describe them.

func dockerRoot() Host {
	return Host{
		Engine: Engine{
			Kind: Docker, Client: "/usr/bin/docker", Socket: "/var/run/docker.sock", Version: "20.10.24",
			CgroupVersion: 1, LimitsHold: true, Runtime: "runc", RuntimeVersion: "1.1.5",
		},
		Image:   image(),
		Caller:  Caller{HardNoFile: 20000, HardNProc: 90000, CPUs: 2},
		Machine: machine(),
		Mounts:  facts(),
		Devices: deviceFiles(),
		Presets: map[string][]harness.Allow{"claude": {{Host: "api.preset.example"}}},
	}
}

func podmanRootless() Host {
	h := dockerRoot()
	h.Engine = Engine{
		Kind: Podman, Client: "/usr/bin/podman", Version: "4.3.1", Rootless: true,
		CgroupVersion: 1, Runtime: "runc", RuntimeVersion: "1.1.5", RuntimePath: "/usr/bin/runc",
	}
	h.Caller.UID, h.Caller.GID, h.Caller.SubUIDs, h.Caller.SubGIDs = 1001, 1001, 65536, 65536
	return h
}

func podmanRoot() Host {
	h := podmanRootless()
	h.Engine.Rootless, h.Engine.LimitsHold = false, true
	h.Caller = dockerRoot().Caller
	return h
}

func image() Image {
	return Image{
		Ref: "agent:dev", ID: "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
		OS: "linux", Arch: "amd64", Env: []string{"PATH=/opt/agent/bin:/usr/bin:/bin", "LD_PRELOAD=/evil.so", "GODEBUG=x", "EDITOR=vi"},
	}
}

func machine() Machine {
	return Machine{OS: "linux", Arch: "amd64", Kernel: "6.1.0", MemoryBytes: 16 << 30, IPv6: true}
}

func facts() mounts.Facts {
	source := func(path string, dir bool, ino uint64) mounts.Source {
		return mounts.Source{Path: path, Dir: dir, Dev: 64768, Ino: ino, UID: 1000, GID: 1000, Mode: 0o755}
	}
	return mounts.Facts{
		Home: "/home/user",
		Sources: map[string]mounts.Source{
			"/home/user/project/.": source("/home/user/project", true, 11),
			"/srv/data set,1":      source("/srv/data set,1", true, 12),
			"/srv/out":             source("/srv/out", true, 13),
			"/srv/repo/.git":       source("/srv/repo/.git", true, 15),
			"/srv/model.bin":       source("/srv/model.bin", false, 14),
		},
		HomeRoots: []string{"/home/user"},
		Guards: mounts.GuardFacts{
			".vscode":            {Kind: mounts.NodeDir, Dev: 64768, Ino: 21},
			".vscode/tasks.json": {Kind: mounts.NodeFile, Links: 1, Dev: 64768, Ino: 22},
			"deploy":             {Kind: mounts.NodeDir, Dev: 64768, Ino: 23},
			"deploy/prod.toml":   {Kind: mounts.NodeFile, Links: 1, Dev: 64768, Ino: 24},
			"deploy/secrets":     {Kind: mounts.NodeDir, Dev: 64768, Ino: 25},
			".env":               {Kind: mounts.NodeFile, Links: 1, Dev: 64768, Ino: 26},
			"harness.json":       {Kind: mounts.NodeFile, Links: 1, Dev: 64768, Ino: 27},
		},
		Own:       []mounts.OwnFile{{Path: "/home/user/project/harness.json", JSON: "$", Reason: "it says what the agent may do"}},
		Protected: []string{"/var/lib/docker"},
	}
}

func parse(t *testing.T, data string) harness.Harness {
	t.Helper()
	h, err := harness.Parse([]byte(data), "/home/user/project", harness.Overrides{})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// gitFacts are the repositories of the goldens, by the harness file's name.
var gitFacts = map[string]mounts.GitFacts{
	"git-folder": {Node: mounts.NodeDir, Program: true, Dirs: []string{"/home/user/project/.git"}, GuardPaths: mounts.GitGuardPaths(".git"), Guards: mounts.GuardFacts{
		".git": {Kind: mounts.NodeDir}, ".git/config": {Kind: mounts.NodeFile, Links: 1}, ".git/hooks": {Kind: mounts.NodeDir},
	}},
	"git-file": {Node: mounts.NodeFile, Program: true, Common: "/srv/repo/.git", Linked: true, Dirs: []string{"/srv/repo/.git/worktrees/project", "/srv/repo/.git"}, GuardPaths: mounts.GitGuardPaths(""), Guards: mounts.GuardFacts{
		"config": {Kind: mounts.NodeFile, Links: 1}, "hooks": {Kind: mounts.NodeDir},
	}},
	"git-sub":     {Node: mounts.NodeFile, Program: true, Common: "/srv/repo/.git", Dirs: []string{"/srv/repo/.git"}},
	"git-refused": {Node: mounts.NodeDir, Program: true, Refused: "git: alternates", Remedy: "git repack -a -d"},
}

var hosts = map[string]func() Host{"docker": dockerRoot, "podman-rootless": podmanRootless, "podman-root": podmanRoot}

// TestGoldens compiles every harness file of testdata for every engine. The
// goldens' diff is the security review.
func TestGoldens(t *testing.T) {
	files, err := filepath.Glob("testdata/*/harness.json")
	if err != nil || len(files) < 12 {
		t.Fatalf("%d harness files: %v", len(files), err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		h := parse(t, string(data))
		for name, host := range hosts {
			t.Run(filepath.Base(filepath.Dir(file))+"/"+name, func(t *testing.T) {
				dir := filepath.Join(filepath.Dir(file), name)
				for file, content := range render(t, compileGolden(t, h, host())) {
					golden(t, filepath.Join(dir, file), content)
				}
			})
		}
	}
}

func compileGolden(t *testing.T, h harness.Harness, host Host) Plan {
	t.Helper()
	if h.Image == "volumes:1" {
		host.Image.Volumes = []string{"/data", "/var/cache/app"}
	}
	host.Mounts.Git = gitFacts[h.Name]
	host.Network = networkFacts(h, host)
	if h.Egress.Proxy != "" {
		p, err := harness.ParseProxy(h.Egress.Proxy)
		if err != nil {
			t.Fatal(err)
		}
		host.Proxy = &netpolicy.Proxy{Scheme: p.Scheme, Address: p.Address, NoProxy: "direct.example"}
	}
	plan, err := Compile(h, host, Options{EnvFiles: envFileNames(h)})
	if err != nil {
		t.Fatal(err)
	}
	again, err := Compile(h, host, Options{EnvFiles: envFileNames(h)})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(render(t, plan), render(t, again)); diff != "" {
		t.Errorf("two compilations differ: %s", diff)
	}
	return plan
}

func envFileNames(h harness.Harness) [][]string {
	if len(h.EnvFiles) == 0 {
		return nil
	}
	return [][]string{{"FROM_FILE", "LANG"}}
}

// render gives every form of a plan. The system call policy has goldens of its
// own; here its digest stands for it.
func render(t *testing.T, p Plan) map[string]string {
	t.Helper()
	config := p.OCI(SymbolicPaths)
	config.Linux.Seccomp = nil
	oci, err := indent(config)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := p.JSON()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{
		"config.json": string(oci), "plan.json": string(plan), "plan.txt": p.Text(),
	}
	name, asked := asked(t, p)
	out[name] = asked
	if p.Egress.HasGateway() {
		out["rules"] = p.RulesText()
	}
	if p.Egress.HasGateway() && p.Engine.Kind == Docker {
		container, err := p.HelperContainer(SymbolicPaths, "CONTAINER_ID")
		if err != nil {
			t.Fatal(err)
		}
		out["helper.json"] = createText(t, container)
	}
	return out
}

// asked is what the engine is asked for a run, as a golden's name and content.
func asked(t *testing.T, p Plan) (name, content string) {
	t.Helper()
	if p.Engine.Kind == Podman {
		argv, err := p.PodmanArgv(SymbolicPaths)
		if err != nil {
			t.Fatal(err)
		}
		return "argv", strings.Join(argv, "\n") + "\n"
	}
	c, err := p.DockerContainer(SymbolicPaths)
	if err != nil {
		t.Fatal(err)
	}
	c.HostConfig.SecurityOpt = slices.Clone(c.HostConfig.SecurityOpt)
	for i, option := range c.HostConfig.SecurityOpt {
		if strings.HasPrefix(option, "seccomp=") {
			c.HostConfig.SecurityOpt[i] = "seccomp=" + p.SeccompDigest
		}
	}
	return "create.json", createText(t, c)
}

func createText(t *testing.T, c DockerContainer) string {
	t.Helper()
	b, err := c.JSON()
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(got), 0o644)); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v (go test ./spec -update)", err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s: %s", file, diff)
	}
}

// TestRefusals: what Compile must not let through, and for which reason.
func TestRefusals(t *testing.T) {
	const head = `{"version":1,"image":"agent:dev","harness":{"binary":"agent"},`
	with := func(base func() Host, change func(*Host)) func() Host {
		return func() Host {
			h := base()
			change(&h)
			return h
		}
	}
	for name, c := range map[string]struct {
		file   string
		host   func() Host
		reason string
		want   string
	}{
		"root caller without workspace": {`"accept":[]}`, dockerRoot, "identity", "no workspace"},
		"root caller, root's workspace": {`"workspace":{"source":"."}}`, with(dockerRoot, func(h *Host) {
			h.Mounts.Sources["/home/user/project/."] = mounts.Source{Path: "/home/user/project", Dir: true}
		}), "identity", "belongs to root"},
		"uid 0 not accepted":         {`"user":"0:0"}`, dockerRoot, "widening", "root-user"},
		"CHOWN without uid 0":        {`"user":"0:0","capabilities":["CHOWN"]}`, dockerRoot, "widening", "root-user"},
		"limits that don't hold":     {`"user":"5:5"}`, podmanRootless, "gap", "rootless-cgroup-limits"},
		"noexec on Docker":           {`"user":"5:5","mounts":[{"source":"/srv/out","target":"/o","noexec":true}]}`, dockerRoot, "gap", "bind-noexec"},
		"keep-id as root":            {`"user":"5:5","userns":"keep-id"}`, podmanRoot, "policy", "keep-id"},
		"userns auto on Docker":      {`"user":"5:5","userns":"auto"}`, dockerRoot, "policy", "Podman only"},
		"caches with userns auto":    {`"user":"5:5","userns":"auto","caches":[{"name":"c","target":"/c"}]}`, podmanRoot, "policy", "another id"},
		"uid beyond the range":       {`"user":"70000:5","accept":["rootless-cgroup-limits"]}`, podmanRootless, "identity", "65536"},
		"userns engine without user": {`"userns":"engine","accept":["rootless-cgroup-limits"]}`, podmanRootless, "identity", "engine"},
		"image for another uid":      {`"workspace":{"source":"."}}`, with(dockerRoot, func(h *Host) { h.Image.User = "1234:5" }), "image-user", "1234"},
		"egress rule":                {`"user":"5:5","egress":{"mode":"allow-list","allow":["a.example","*"]}}`, dockerRoot, "policy", "$.egress.allow[1]: "},
		"egress without effect":      {`"user":"5:5","egress":{"allow":["a.example"]}}`, dockerRoot, "policy", "$.egress.mode: "},
		"proxy not accepted":         {`"user":"5:5","egress":{"mode":"open","proxy":"env"}}`, with(dockerRoot, func(h *Host) { h.Proxy = &netpolicy.Proxy{Scheme: "http", Address: "p:1"} }), "widening", "proxy-resolves"},
		"SOCKS proxy not accepted":   {`"user":"5:5","egress":{"mode":"open","proxy":"env"}}`, with(dockerRoot, func(h *Host) { h.Proxy = &netpolicy.Proxy{Scheme: "socks5h", Address: "p:1"} }), "widening", "proxy-resolves"},
		"dangerous call":             {`"user":"5:5","seccomp":{"allow":["ptrace"]}}`, dockerRoot, "widening", "syscall:ptrace"},
		"another call accepted":      {`"user":"5:5","seccomp":{"allow":["ptrace"]},"accept":["syscall:bpf"]}`, dockerRoot, "widening", "syscall:ptrace"},
		"nested not accepted":        {`"user":"5:5","seccomp":{"profile":"nested"}}`, dockerRoot, "widening", "nested-seccomp"},
		"protect with loose mounts":  {`"user":"5:5","seccomp":{"profile":"nested"},"workspace":{"source":".","mode":"writable","protect":["x"]},"accept":["nested-seccomp"]}`, dockerRoot, "policy", "workspace.protect can't be held"},
		"unmasked for uid 0":         {`"user":"0:0","seccomp":{"profile":"nested"},"accept":["root-user","nested-seccomp","unmasked-proc"]}`, dockerRoot, "policy", "unmasked-proc"},
		"profile file's fault":       {`"user":"5:5","seccomp":{"profile":"./p.json"},"accept":["custom-seccomp"]}`, with(dockerRoot, func(h *Host) { h.SeccompFile = []byte(`{}`) }), "policy", "defaultAction"},
		"call's typo":                {`"user":"5:5","seccomp":{"allow":["mbind","ptrce"]}}`, dockerRoot, "policy", "$.seccomp.allow[1]: "},
		"needed call":                {`"user":"5:5","seccomp":{"deny":["execve"]}}`, dockerRoot, "policy", "$.seccomp.deny[0]: "},
		"foreign architecture":       {`"user":"5:5"}`, with(dockerRoot, func(h *Host) { h.Machine.Arch = "riscv64" }), "policy", "riscv64"},
		"rootless Docker":            {`"user":"5:5"}`, with(dockerRoot, func(h *Host) { h.Engine.Rootless = true }), "engine-unsupported", "rootless Docker"},
		"Docker with userns-remap":   {`"user":"5:5"}`, with(dockerRoot, func(h *Host) { h.Engine.UserNamespace = true }), "engine-unsupported", "userns-remap"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Compile(parse(t, head+c.file), c.host(), Options{})
			var r *Refusal
			if !errors.As(err, &r) || r.Reason != c.reason || !strings.Contains(r.Message, c.want) || r.Hint == "" {
				t.Fatalf("%v (%+v)", err, r)
			}
		})
	}
}

// TestMaskedForOthers: where no sandbox of the agent's own can be made, accepting unmasked-proc
// opens nothing.
func TestMaskedForOthers(t *testing.T) {
	for name, profile := range map[string]string{"default": "default", "file": "./p.json"} {
		t.Run(name, func(t *testing.T) {
			host := dockerRoot()
			var err error
			if host.SeccompFile, err = json.Marshal(moby.DefaultProfile()); err != nil {
				t.Fatal(err)
			}
			p, err := Compile(parse(t, `{"version":1,"image":"agent:dev","harness":{"binary":"agent"},"user":"5:5",
				"seccomp":{"profile":"`+profile+`","deny":["ptrace","process_vm_readv","process_vm_writev"]},"accept":["custom-seccomp","unmasked-proc"]}`), host, Options{})
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(p.MaskedPaths, "/proc/keys") || !slices.Contains(p.ReadonlyPaths, "/proc/sys") {
				t.Errorf("masked %v, read-only %v", p.MaskedPaths, p.ReadonlyPaths)
			}
		})
	}
}

// TestLearnEgress: learning is open whatever the file says, with the checks of an allow-list;
// a network's use can't be learned.
func TestLearnEgress(t *testing.T) {
	const head = `{"version":1,"image":"agent:dev","user":"5:5","harness":{"binary":"agent"}`
	for _, egress := range []string{"", `,"egress":{"mode":"deny-all"}`, `,"egress":{"mode":"allow-list","allow":["a.example"]}`} {
		p, err := Compile(parse(t, head+egress+`}`), dockerRoot(), Options{LearnEgress: true})
		if err != nil || p.Egress.Mode != netpolicy.Open || !p.Egress.Learning {
			t.Errorf("%s: %v %+v", egress, err, p.Egress)
		}
	}
	var r *Refusal
	_, err := Compile(parse(t, head+`,"egress":{"mode":"network"}}`), dockerRoot(), Options{LearnEgress: true})
	if !errors.As(err, &r) || r.Reason != "policy" || !strings.Contains(r.Message, "can't be learned") {
		t.Error(err)
	}
}

// TestRefusalsAreJoined: all of them are reported at once.
func TestRefusalsAreJoined(t *testing.T) {
	_, err := Compile(parse(t, `{"version":1,"image":"a","harness":{"binary":"a"},"user":"0:0","mounts":[{"source":"/srv/out","target":"/o","noexec":true}]}`), dockerRoot(), Options{})
	if err == nil || !strings.Contains(err.Error(), "root-user") || !strings.Contains(err.Error(), "bind-noexec") {
		t.Fatal(err)
	}
}

// TestShownPath: no host path makes a line of the plan's text of its own.
func TestShownPath(t *testing.T) {
	for in, want := range map[string]string{"/home/me/a b": "/home/me/a b", "/a\x1b[31m\nwidening": `"/a\x1b[31m\nwidening"`, "/a\u202e": `"/a\u202e"`} {
		if got := shownPath(in); got != want {
			t.Errorf("%q: %s", in, got)
		}
	}
}

func TestImageUser(t *testing.T) {
	for name, c := range map[string]struct {
		user, file string
	}{
		"the same uid":  {"1000", `"workspace":{"source":"."}`},
		"a name":        {"node", `"workspace":{"source":"."}`},
		"none":          {"", `"workspace":{"source":"."}`},
		"user is given": {"1234", `"user":"1000:1000"`},
	} {
		t.Run(name, func(t *testing.T) {
			host := dockerRoot()
			host.Image.User = c.user
			p, err := Compile(parse(t, `{"version":1,"image":"a","harness":{"binary":"a"},`+c.file+`}`), host, Options{})
			if err != nil || p.Identity.UID != 1000 {
				t.Fatalf("%v %+v", err, p.Identity)
			}
		})
	}
}

func TestIdentity(t *testing.T) {
	caller := func(h Host) Host {
		h.Caller.UID, h.Caller.GID = 1001, 1002
		return h
	}
	workspace := func(h Host, uid, gid uint32) Host {
		h.Mounts.Sources["/home/user/project/."] = mounts.Source{Path: "/home/user/project", Dir: true, UID: uid, GID: gid}
		return h
	}
	for name, c := range map[string]struct {
		file string
		host Host
		want Identity
	}{
		"caller":                  {``, caller(dockerRoot()), Identity{UID: 1001, GID: 1002, Name: "agent", From: "caller"}},
		"caller, rootful Podman":  {``, caller(podmanRoot()), Identity{UID: 1001, GID: 1002, Name: "agent", From: "caller"}},
		"caller, rootless":        {``, podmanRootless(), Identity{UID: 1001, GID: 1001, Name: "agent", From: "caller", Userns: "keep-id"}},
		"user, rootless":          {`,"user":"7:8"`, podmanRootless(), Identity{UID: 7, GID: 8, Name: "agent", From: "user", Userns: "keep-id:uid=7,gid=8"}},
		"keep-id on Docker":       {`,"userns":"keep-id"`, caller(dockerRoot()), Identity{UID: 1001, GID: 1002, Name: "agent", From: "caller"}},
		"userns engine":           {`,"user":"7:8","userns":"engine"`, podmanRootless(), Identity{UID: 7, GID: 8, Name: "agent", From: "user"}},
		"userns auto":             {`,"user":"7:8","userns":"auto"`, podmanRoot(), Identity{UID: 7, GID: 8, Name: "agent", From: "user", Userns: "auto"}},
		"workspace's owner":       {`,"workspace":{"source":"."}`, workspace(dockerRoot(), 7, 8), Identity{UID: 7, GID: 8, Name: "agent", From: "workspace"}},
		"workspace of group root": {`,"workspace":{"source":"."}`, workspace(dockerRoot(), 7, 0), Identity{UID: 7, GID: 7, Name: "agent", From: "workspace"}},
		"root":                    {`,"user":"0:0"`, dockerRoot(), Identity{Name: "root", From: "user"}},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := Compile(parse(t, `{"version":1,"image":"a","harness":{"binary":"a"},"accept":["root-user","rootless-cgroup-limits"]`+c.file+`}`), c.host, Options{})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, p.Identity); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestRenderer: iptables only where it is asked for or needed, and never where it can't be.
func TestRenderer(t *testing.T) {
	without := func(h Host) Host {
		h.Machine.NoNftables = true
		return h
	}
	group := dockerRoot()
	group.Caller.UID = 1001
	for name, c := range map[string]struct {
		renderer string
		host     Host
		want     string // empty is a refusal
	}{
		"auto":                              {"auto", dockerRoot(), "nftables"},
		"auto, rootless":                    {"auto", podmanRootless(), "auto"},
		"nftables, rootless":                {"nftables", podmanRootless(), "nftables"},
		"auto without nf_tables":            {"auto", without(dockerRoot()), "iptables"},
		"nftables without nf_tables":        {"nftables", without(podmanRoot()), "nftables"},
		"iptables":                          {"iptables", podmanRoot(), "iptables"},
		"iptables, rootless":                {"iptables", podmanRootless(), "iptables"},
		"auto, docker group":                {"auto", group, "nftables"},
		"iptables, docker group":            {"iptables", group, ""},
		"docker group without nf_tables":    {"auto", without(group), ""},
		"nftables, docker group without it": {"nftables", without(group), "nftables"},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := Compile(parse(t, `{"version":1,"image":"a","user":"5:5","harness":{"binary":"a"},"accept":["rootless-cgroup-limits"],
				"egress":{"mode":"open","renderer":"`+c.renderer+`"}}`), c.host, Options{})
			var r *Refusal
			switch {
			case c.want != "" && err != nil:
				t.Error(err)
			case c.want == "" && (!errors.As(err, &r) || r.Reason != "egress-setup" || r.Hint == ""):
				t.Errorf("%v", err)
			case p.EgressRenderer != c.want:
				t.Errorf("%s, want %s", p.EgressRenderer, c.want)
			}
		})
	}
}

// TestNoSecretInPlan: values the caller gave are in none of a plan's forms.
func TestNoSecretInPlan(t *testing.T) {
	const marker = "s3cr3t-marker"
	h := parse(t, `{"version":1,"image":"a","user":"5:5","prompt":"`+marker+`","env":{"A":"`+marker+`"},
		"harness":{"binary":"a","env":{"B":"`+marker+`"}},"home":{"files":[{"source":"/x","target":"y"}]}}`)
	p, err := Compile(h, dockerRoot(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	for form, text := range render(t, p) {
		if strings.Contains(text, marker) {
			t.Errorf("%s holds it", form)
		}
	}
	// The control: at launch they are there.
	args, env := p.Launch(h, Values{Prompt: marker})
	if !strings.Contains(strings.Join(args, " "), marker) || strings.Count(strings.Join(env, " "), marker) != 2 {
		t.Errorf("%q %q", args, env)
	}
}

func TestLaunch(t *testing.T) {
	h := parse(t, `{"version":1,"image":"a","user":"5:5","harness":{"binary":"a","env":{"ALL":"harness","H":"h"}},
		"env":{"ALL":"env","E":"e"},"envFrom":["ALL","C"],"envFiles":["one","two"]}`)
	host := dockerRoot()
	host.Image.Env = []string{"ALL=image", "I=i", "LD_LIBRARY_PATH=/x", "HOME=/root"}
	p, err := Compile(h, host, Options{EnvFiles: [][]string{{"ALL", "F", "G"}, {"G"}}})
	if err != nil {
		t.Fatal(err)
	}
	_, env := p.Launch(h, Values{
		EnvFiles: []map[string]string{{"ALL": "one", "F": "f", "G": "one"}, {"G": "two"}},
		Caller:   map[string]string{"ALL": "caller", "C": "c=d e"},
	})
	got := map[string]string{}
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		got[name] = value
	}
	want := map[string]string{
		"ALL": "harness", "C": "c=d e", "E": "e", "F": "f", "G": "two", "H": "h", "I": "i",
		"HOME": "/home/agent", "USER": "agent", "LOGNAME": "agent", "SHELL": "/bin/sh", "PATH": DefaultPath,
		"XDG_RUNTIME_DIR": "/run/user/5", "XDG_CONFIG_HOME": "/home/agent/.config", "XDG_CACHE_HOME": "/home/agent/.cache",
		"XDG_DATA_HOME": "/home/agent/.local/share", "XDG_STATE_HOME": "/home/agent/.local/state",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestLimitsAreClamped: what the host can't give is lowered, never raised.
func TestLimitsAreClamped(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		want Limits
	}{
		"defaults": {`{}`, Limits{MemoryBytes: 2 << 30, CPUs: 2, PIDs: 512, NoFile: 4096, NProc: 100, ShmBytes: 64 << 20}},
		"too much": {`{"memoryMb":999999,"cpus":64,"pids":9999,"nofile":1000000}`, Limits{MemoryBytes: 4 << 30, CPUs: 2, PIDs: 9999, NoFile: 4096, NProc: 100, ShmBytes: 64 << 20}},
		"less":     {`{"memoryMb":1500,"cpus":0.5,"pids":20,"nofile":70,"shmMb":1}`, Limits{MemoryBytes: 1500 << 20, CPUs: 0.5, PIDs: 20, NoFile: 70, NProc: 100, ShmBytes: 1 << 20}},
	} {
		t.Run(name, func(t *testing.T) {
			host := dockerRoot()
			host.Machine.MemoryBytes, host.Caller.HardNoFile, host.Caller.HardNProc = 4<<30, 4096, 100
			p, err := Compile(parse(t, `{"version":1,"image":"a","user":"5:5","harness":{"binary":"a"},"resources":`+c.file+`}`), host, Options{})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, p.Limits); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestKeepIDMaps: every container id is mapped once, and the agent's to the caller.
func TestKeepIDMaps(t *testing.T) {
	for _, id := range []uint32{0, 1, 1000, 65535} {
		next, total := uint32(0), uint32(0)
		for _, m := range keepID(id) {
			if m.ContainerID != next {
				t.Errorf("id %d: gap before %d", id, m.ContainerID)
			}
			if m.ContainerID <= id && id < m.ContainerID+m.Size && m.HostID+id-m.ContainerID != 0 {
				t.Errorf("id %d is not the caller", id)
			}
			next, total = m.ContainerID+m.Size, total+m.Size
		}
		if total != 65536 {
			t.Errorf("id %d: %d ids mapped", id, total)
		}
	}
}

// TestPlanJSONIsStrict: a plan reads back as what was written.
func TestPlanJSONIsStrict(t *testing.T) {
	p, err := Compile(parse(t, `{"version":1,"image":"a","user":"5:5","harness":{"binary":"a"}}`), dockerRoot(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	b, err := p.JSON()
	if err != nil {
		t.Fatal(err)
	}
	var back Plan
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	c, err := back.JSON()
	if err != nil || string(b) != string(c) {
		t.Errorf("%v: %s", err, cmp.Diff(string(b), string(c)))
	}
}

// TestTerminal: who gets one, and the caller's variables with it.
func TestTerminal(t *testing.T) {
	const file = `"version":1,"image":"a","user":"1000:1000"`
	vars := map[string]string{"TERM": "xterm-direct", "LANG": "de_DE.UTF-8", "COLORTERM": ""}
	for _, tt := range []struct {
		name    string
		fields  string
		options Options
		want    bool
	}{
		{"auto", `"harness":{"binary":"x"}`, Options{Terminal: vars}, true},
		{"auto without one", `"harness":{"binary":"x"}`, Options{}, false},
		{"auto, no variable set", `"harness":{"binary":"x"}`, Options{Terminal: map[string]string{}}, true},
		{"never", `"terminal":"never","harness":{"binary":"x"}`, Options{Terminal: vars}, false},
		{"prompt on stdin", `"harness":{"binary":"x","promptMode":"stdin"}`, Options{Terminal: vars}, false},
		{"another program", `"harness":{"binary":"x","promptMode":"stdin"}`, Options{Terminal: vars, Command: []string{"sh"}}, true},
		{"the file's own wins", `"env":{"LANG":"C"},"harness":{"binary":"x"}`, Options{Terminal: vars}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			host := dockerRoot()
			host.Image.Env = []string{"TERM=dumb", "TZ=Image/Zone"}
			plan, err := Compile(parse(t, "{"+file+","+tt.fields+"}"), host, tt.options)
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]EnvVar{}
			for _, v := range plan.Process.Env {
				got[v.Name] = v
			}
			want := map[string]EnvVar{"TERM": {"TERM", "image", "dumb"}, "TZ": {"TZ", "image", "Image/Zone"}}
			if tt.want && len(tt.options.Terminal) > 0 {
				want["TERM"], want["LANG"] = EnvVar{"TERM", "terminal", "xterm-direct"}, EnvVar{"LANG", "terminal", "de_DE.UTF-8"}
			}
			if strings.Contains(tt.fields, `"env"`) {
				want["LANG"] = EnvVar{Name: "LANG", From: "env"}
			}
			for _, name := range TerminalEnv {
				if got[name] != want[name] {
					t.Errorf("%+v, want %+v", got[name], want[name])
				}
			}
			if plan.Process.Terminal != tt.want {
				t.Errorf("terminal %v, want %v", plan.Process.Terminal, tt.want)
			}
		})
	}
}
