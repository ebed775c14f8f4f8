package shim

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/netpolicy"
	"github.com/agentshim/agentshim/spec"
)

// importTime bounds the import of the doctor's image and its removal, each. Neither is
// cut short by a signal: an engine that is left in the middle may keep half of it.
const importTime = 10 * time.Second

// prove starts a container and reports what was attested in it.
func (d *doctor) prove(ctx context.Context, r *report, a Adapter) {
	job := d.job
	job.Command = []string{spec.InitPath, "find", spec.InitPath}
	if d.spec {
		if !d.planned(ctx, r, a) {
			r.add("proof", skipped("mend what is above first", "no container was started"))
			return
		}
		job.Harness.Engine, job.Harness.Pull = r.kind, pullNever
		job.Command[2] = job.Harness.Harness.Binary
		d.start(ctx, r, job)
		return
	}
	ref := d.opts.Image
	if ref == "" {
		var err error
		if ref, err = importImage(ctx, a); err != nil {
			r.add("image", failed(err))
			r.add("proof", skipped("mend what is above first", "no container was started"))
			return
		}
		defer func() { r.add("image", removedVerdict(a, ref)) }()
	}
	for _, egress := range []harness.Egress{proofEgress, {}} {
		var err error
		if job.Harness, job.Spec, err = d.harness(r.kind, ref, egress); err != nil {
			r.add("proof", failed(&Error{Reason: ReasonSpecInvalid, Err: err}))
			return
		}
		// Without a way out, egress deny-all is still worth its proof.
		if d.start(ctx, r, job) {
			return
		}
	}
}

// proofEgress needs a way out and lets nothing through it: no such name exists (RFC 6761).
var proofEgress = harness.Egress{Mode: netpolicy.AllowList, Allow: []harness.Allow{{Host: "agentshim.invalid"}}}

// harness is the harness file of the doctor's own: small, and the caller's identity,
// or nobody's for root.
func (d *doctor) harness(kind, ref string, egress harness.Egress) (harness.Harness, []byte, error) {
	caller, err := probeCaller(d.probe)
	if err != nil {
		return harness.Harness{}, nil, err
	}
	uid, gid := caller.UID, caller.GID
	if uid == 0 {
		uid = nobodyID
	}
	if gid == 0 {
		gid = nobodyID
	}
	raw, err := json.Marshal(map[string]any{
		"version": 1, "name": "doctor", "engine": kind, "image": ref, "pull": pullNever,
		"user": fmt.Sprintf("%d:%d", uid, gid), "harness": map[string]any{"binary": spec.InitPath},
		"home": map[string]any{"sizeMb": 16}, "tmpSizeMb": 16, "terminal": "never",
		"resources": map[string]any{"memoryMb": 256, "pids": 64, "shmMb": 16},
		"accept":    []string{"rootless-cgroup-limits"},
		"egress":    egress,
	})
	if err != nil {
		return harness.Harness{}, nil, err
	}
	h, err := harness.Parse(raw, "/", harness.Overrides{})
	return h, raw, err
}

const nobodyID = 65534

// start runs the job. What it starts looks for a program and ends. It reports whether
// another egress mode would not help.
func (d *doctor) start(ctx context.Context, r *report, job Job) bool {
	var stdout, stderr cappedBuffer
	stdout.limit, stderr.limit = maxLine, maxLine
	job.Stdout, job.Stderr = &stdout, &stderr
	proven := false
	job.Proven = func(p spec.Plan, at Attestation) {
		proven = true
		if p.Egress.HasGateway() {
			r.add("way out", pass("proven in a container: %s, packet rules read back, connections come to agentshim", p.EgressWay))
		}
		r.add("posture", postureVerdict(p, at))
		r.add("network", networkVerdict(at))
	}
	rec, err := Run(ctx, job)
	r.proofs = append(r.proofs, Proof{Engine: r.kind, Run: rec.ID, Attestation: rec.Attestation})
	switch {
	case ReasonOf(err) == ReasonEgressSetup && !d.spec:
		r.add("way out", warned(HintOf(err), "%v; no egress.mode but deny-all works here", err))
		return false
	case err != nil && proven:
		r.add("program", failed(unwrapTime(ctx, err)))
	case err != nil:
		r.add("proof", failed(unwrapTime(ctx, err)))
	default:
		r.add("program", programVerdict(job.Command[2], rec.Exit, stdout.buf.String(), stderr.buf.String()))
	}
	return true
}

func postureVerdict(p spec.Plan, at Attestation) verdict {
	h := at.Hello
	caps := "no capabilities"
	if len(p.Capabilities) > 0 {
		caps = "capabilities " + strings.Join(p.Capabilities, ", ")
	}
	root := "writable root"
	if p.ReadOnlyRootfs {
		root = "read-only root"
	}
	return pass("proven in a container: uid %d, gid %d, %s, no new privileges, seccomp filter, %s, %d mounts as planned",
		h.UIDs[0], h.GIDs[0], caps, root, len(h.Mounts))
}

func networkVerdict(at Attestation) verdict {
	n := at.Probe
	return pass("proven in a container: only %s; refused: udp %s, tcp %s, ipv6 %s, icmp %s, vsock %s",
		strings.Join(at.Hello.Interfaces, ", "), n.UDP4, n.TCP4, n.UDP6, n.Ping, n.VSock)
}

// programVerdict judges what agentshim-init found in the place of the harness.
func programVerdict(name string, exit int, stdout, stderr string) verdict {
	switch exit {
	case 0:
		if name == spec.InitPath {
			return pass("started in the container, and ended")
		}
		return pass("%q is %s in the image", name, printable(stdout))
	case 1:
		return failed(&Error{Reason: ReasonHarnessMissing, Msg: printable(stderr), Hint: initReasons["harness-missing"].hint})
	}
	return failed(&Error{Reason: ReasonInternal, Msg: fmt.Sprintf("agentshim-init ended with %d: %s", exit, printable(stderr))})
}

// importImage makes an image of one file, agentshim-init, and gives its name, which
// no other diagnosis has. It reaches the engine's client on standard input.
func importImage(ctx context.Context, a Adapter) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", context.Cause(ctx)
	}
	layer, err := initLayer()
	if err != nil {
		return "", err
	}
	ref := "localhost/agentshim/doctor:" + newRunID()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), importTime)
	defer cancel()
	cmd := a.Command("import", "-", ref)
	cmd.Stdin = bytes.NewReader(layer)
	if _, err := a.Runner().Run(ctx, cmd); err != nil {
		return "", errors.Join(engineFailed(err), removeImage(a, ref))
	}
	return ref, nil
}

// initLayer is a tar archive that holds init alone.
func initLayer() ([]byte, error) {
	content, err := fs.ReadFile(embedded, "embedded/agentshim-init")
	if err != nil {
		return nil, notEmbedded("agentshim-init")
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "agentshim-init", Mode: 0o555, Size: int64(len(content))})
	if err == nil {
		_, err = w.Write(content)
	}
	return b.Bytes(), errors.Join(err, w.Close())
}

// removeImage takes ref away; an image that isn't there is no error.
func removeImage(a Adapter, ref string) error {
	ctx, cancel := context.WithTimeout(context.Background(), importTime)
	defer cancel()
	_, err := a.Runner().Run(ctx, a.Command("image", "rm", ref))
	var said *EngineError
	if errors.As(err, &said) {
		text := strings.ToLower(said.Stderr)
		for _, gone := range []string{"no such image", "image not known"} {
			if strings.Contains(text, gone) {
				return nil
			}
		}
	}
	return err
}

func removedVerdict(a Adapter, ref string) verdict {
	if err := removeImage(a, ref); err != nil {
		return warned(fmt.Sprintf("`%s image rm %s`", a.Engine().Kind, ref), "the doctor's image could not be removed: %v", err)
	}
	return pass("imported one of agentshim-init alone, and removed it")
}
