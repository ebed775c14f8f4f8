package integration

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/agentshim/agentshim/harness"
	plan "github.com/agentshim/agentshim/spec"
)

// ociPlan is a plan as Docker as root would get it on a machine like this one.
func ociPlan(t *testing.T) plan.Plan {
	t.Helper()
	h, err := harness.Parse([]byte(`{"version":1,"image":"a","user":"1000:1000","harness":{"binary":"/bin/sh","prefixArgs":["-c"]}}`), "/", harness.Overrides{})
	if err != nil {
		t.Fatal(err)
	}
	p, err := plan.Compile(h, plan.Host{
		Engine:  plan.Engine{Kind: plan.Podman, CgroupVersion: 1, LimitsHold: true},
		Image:   plan.Image{OS: "linux", Arch: "amd64"},
		Caller:  plan.Caller{HardNoFile: 4096, HardNProc: 4096, CPUs: 1},
		Machine: plan.Machine{OS: "linux", Arch: "amd64", MemoryBytes: 4 << 30},
	}, plan.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestOCISchema checks the OCI config against the runtime spec's own JSON Schema.
func TestOCISchema(t *testing.T) {
	schema := ociSchema(t)
	validate := func(c *oci.Spec) error {
		b, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		v, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		return schema.Validate(v)
	}
	config := ociPlan(t).OCI(plan.SymbolicPaths)
	if err := validate(config); err != nil {
		t.Error(err)
	}
	config.Process.Cwd = ""
	config.Linux.Namespaces[0].Type = "nonsense"
	if validate(config) == nil {
		t.Error("the schema accepts nonsense: this test can't fail")
	}
}

func ociSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/opencontainers/runtime-spec").Output()
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft4)
	c.UseLoader(slashLoader{})
	s, err := c.Compile(filepath.Join(strings.TrimSpace(string(out)), "schema", "config-schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// slashLoader reads schema files. The runtime spec writes references without the
// slash that a JSON pointer starts with.
type slashLoader struct{}

func (slashLoader) Load(url string) (any, error) {
	b, err := os.ReadFile(strings.TrimPrefix(url, "file://"))
	if err != nil {
		return nil, err
	}
	return jsonschema.UnmarshalJSON(bytes.NewReader(bytes.ReplaceAll(b, []byte("#definitions/"), []byte("#/definitions/"))))
}

// TestOCIBundle runs the OCI config as it stands, with runc and with crun.
func TestOCIBundle(t *testing.T) {
	Need(t)
	for _, c := range []struct {
		runtime string
		argv    []string
	}{
		{"runc", []string{"runc"}},
		// crun refuses hybrid cgroups: it runs in a mount namespace without the v2 part.
		{"crun", []string{"unshare", "--mount", "sh", "-c", `umount /sys/fs/cgroup/unified 2>/dev/null; exec crun "$@"`, "crun"}},
	} {
		t.Run(c.runtime, func(t *testing.T) {
			bundle, out := t.TempDir(), &bytes.Buffer{}
			if err := os.Chmod(bundle, 0o755); err != nil {
				t.Fatal(err)
			}
			writeBundle(t, bundle, `
				grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status; id; cat /etc/hostname
				touch /x 2>&1; ip link 2>/dev/null | grep -c mtu; echo ok > /tmp/y && cat /tmp/y`)
			argv := append(c.argv, "run", "--bundle", bundle, "agentshim-test-"+c.runtime)
			cmd := exec.Command(argv[0], argv[1:]...)
			cmd.Stdout, cmd.Stderr = out, out
			err := cmd.Run()
			for _, want := range []string{
				"CapBnd:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2",
				"uid=1000(agent) gid=1000(agent)", plan.Hostname, "touch: /x: Read-only file system", "\n1\n", "ok\n",
			} {
				if !strings.Contains(out.String(), want) {
					t.Errorf("%q is missing (%v) in:\n%s", want, err, out)
				}
			}
		})
	}
}

// writeBundle makes an OCI bundle of busybox and the plan's config, with script as
// its program.
func writeBundle(t *testing.T, dir, script string) {
	t.Helper()
	p := ociPlan(t)
	run := plan.RunPaths{ID: "test", Dir: dir, Init: filepath.Join(dir, "init")}
	config := p.OCI(run)
	config.Process.Args = []string{"/bin/sh", "-c", script}
	b, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, "rootfs")
	errs := []error{
		os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600),
		os.WriteFile(run.Init, nil, 0o444),
		os.MkdirAll(filepath.Join(root, "bin"), 0o755), os.MkdirAll(filepath.Join(dir, "etc"), 0o755),
		exec.Command("cp", busybox, filepath.Join(root, "bin/busybox")).Run(),
		exec.Command("chroot", root, "/bin/busybox", "--install", "-s", "/bin").Run(),
	}
	for _, f := range p.Etc {
		errs = append(errs, os.WriteFile(filepath.Join(dir, "etc", f.Name), []byte(f.Content), 0o444))
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
