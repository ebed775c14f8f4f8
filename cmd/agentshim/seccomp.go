package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/seccomp"
	"github.com/agentshim/agentshim/shim"
)

func newSeccomp() *cobra.Command {
	cmd := &cobra.Command{
		Use: "seccomp", Short: "Read the system call policy", Args: cobra.NoArgs,
		Long: "Read the system call policy: what is allowed, what is refused, and why. With --spec it\n" +
			"is the policy of a harness file, else the default one of this machine's architecture.\n" +
			"No engine is asked. Where the engine is left open, it is the policy for Docker; for\n" +
			"Podman only the answer to calls that no rule is about differs.",
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newSeccompShow(), newSeccompExplain(), newSeccompDiff(), newSeccompBPF())
	return cmd
}

// policyFlags name the harness file whose policy is meant.
type policyFlags struct{ specFlags }

func (f *policyFlags) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.file, "spec", "", "harness file (default: the default policy)")
	cmd.Flags().StringVar(&f.overrides.Engine, "engine", "", "docker or podman, instead of the file's")
}

// defaultHarness is a harness file that says nothing.
func defaultHarness(engine string) harness.Harness {
	return harness.Harness{Engine: engine}
}

func (f *policyFlags) policy() (*seccomp.Policy, error) {
	if f.file != "" {
		job, err := f.job()
		if err != nil {
			return nil, err
		}
		return shim.SyscallPolicy(job)
	}
	if !slices.Contains([]string{"", "auto", "docker", "podman"}, f.overrides.Engine) {
		return nil, invalid("--engine %q", "use docker or podman", f.overrides.Engine)
	}
	return shim.SyscallPolicy(shim.Job{Harness: defaultHarness(f.overrides.Engine)})
}

func newSeccompShow() *cobra.Command {
	var f policyFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use: "show", Short: "List all calls, with verdicts and reasons", Args: cobra.NoArgs,
		Long: "List every system call by verdict and reason. Calls that stand under \"conditional\" depend\n" +
			"on their arguments: agentshim seccomp explain CALL says how. With --json it is the\n" +
			"file that the engine gets, in Docker's format.",
		Example: "  agentshim seccomp show\n  agentshim seccomp show --spec harness.json --json > profile.json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := f.policy()
			if err != nil {
				return err
			}
			if asJSON {
				_, err = cmd.OutOrStdout().Write(p.Profile())
				return err
			}
			return showPolicy(cmd.OutOrStdout(), p)
		},
	}
	f.register(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "the engine's file, in Docker's format")
	return cmd
}

func showPolicy(w io.Writer, p *seccomp.Policy) error {
	summary := p.Summary()
	if summary == "" {
		summary = "the default policy"
	}
	if _, err := fmt.Fprintf(w, "%s, sha256:%s: %s\n", p.Target().Arch, p.Digest(), summary); err != nil {
		return err
	}
	for _, o := range p.Openings() {
		fmt.Fprintf(w, "opens: %s: %s\n", o.Name, o.Detail)
	}
	for _, r := range p.Remarks() {
		fmt.Fprintf(w, "note: %s\n", r)
	}
	for _, g := range p.Groups() {
		fmt.Fprintf(w, "\n%s: %s\n", g.Verdict, g.Reason)
		for _, line := range wrap(g.Calls, 96) {
			fmt.Fprintf(w, "    %s\n", line)
		}
	}
	return nil
}

// wrap joins words to lines of at most width bytes; a longer word stands alone.
func wrap(words []string, width int) []string {
	var lines []string
	for _, w := range words {
		if n := len(lines); n > 0 && len(lines[n-1])+1+len(w) <= width {
			lines[n-1] += " " + w
			continue
		}
		lines = append(lines, w)
	}
	return lines
}

func newSeccompExplain() *cobra.Command {
	var f policyFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use: "explain CALL[,ARGUMENT=VALUE...]", Short: "Say what a call gets, and why", Args: cobra.ExactArgs(1),
		Long: "Say what the policy answers to a system call, by which rule and for which reason, what the\n" +
			"program sees, and how a harness file opens it, if at all. ARGUMENT is arg0 to arg5 or, for\n" +
			"calls that have rules on it, its name: family, flags, request, pid, which, who. VALUE is a\n" +
			"number or a constant, also several joined by \"|\".\n\n" +
			"The exit code is 0 also for a refused call; agentshim why tells them apart by it.",
		Example: "  agentshim seccomp explain ptrace\n" +
			"  agentshim seccomp explain socket,family=AF_VSOCK\n" +
			"  agentshim seccomp explain --spec harness.json 'clone,flags=CLONE_NEWUSER|SIGCHLD'",
		RunE: func(cmd *cobra.Command, args []string) error {
			_, err := explain(cmd.OutOrStdout(), &f, args[0], asJSON)
			return err
		},
	}
	f.register(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	return cmd
}

// explain prints what the policy says of a call.
func explain(w io.Writer, f *policyFlags, query string, asJSON bool) (seccomp.Explanation, error) {
	p, err := f.policy()
	if err != nil {
		return seccomp.Explanation{}, err
	}
	e, err := p.Explain(query)
	if err != nil {
		return e, asInvalid(err)
	}
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		return e, enc.Encode(e)
	}
	text := e.Text()
	if nr, ok := seccomp.Number(p.Target().Arch, e.Call); ok {
		text += fmt.Sprintf("%-11s %d on %s\n", "number", nr, p.Target().Arch)
	}
	_, err = io.WriteString(w, text)
	return e, err
}

// asInvalid is for what was typed.
func asInvalid(err error) error {
	var p *seccomp.Problem
	if errors.As(err, &p) {
		return &shim.Error{Reason: shim.ReasonSpecInvalid, Err: err, Hint: p.Remedy}
	}
	return err
}

func newSeccompDiff() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "diff A B", Short: "Compare two policies, call by call", Args: cobra.ExactArgs(2),
		Long: "Compare two policies, call by call. Each is default, nested, engine (the default of Docker,\n" +
			"for a process without capabilities), a harness file or a profile in Docker's format; a\n" +
			"file's name has a slash or a dot in it.\n\n" +
			"The exit code is 0 for no difference and 1 for one.",
		Example: "  agentshim seccomp diff engine default\n" +
			"  agentshim seccomp diff default harness.json",
		RunE: func(cmd *cobra.Command, args []string) error {
			a, errA := operand(args[0])
			b, errB := operand(args[1])
			if err := errors.Join(errA, errB); err != nil {
				return err
			}
			return showChanges(cmd.OutOrStdout(), args, seccomp.Diff(a, b), asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	return cmd
}

func showChanges(w io.Writer, names []string, changes []seccomp.Change, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		if err := enc.Encode(changes); err != nil {
			return err
		}
	} else if len(changes) > 0 {
		if _, err := fmt.Fprintf(w, "%-24s %-12q %q\n", "call", names[0], names[1]); err != nil {
			return err
		}
		for _, c := range changes {
			if _, err := fmt.Fprintf(w, "%-24s %-12s %s\n", c.Call, c.A, c.B); err != nil {
				return err
			}
		}
	}
	if len(changes) > 0 {
		return exitError(1)
	}
	return nil
}

// operand is one of diff's policies.
func operand(name string) (*seccomp.Policy, error) {
	h := defaultHarness("")
	switch {
	case name == "engine":
		return seccomp.EngineDefault(seccomp.Target{Arch: runtime.GOARCH, Docker: true})
	case name == "default", name == "nested":
		h.Seccomp.Profile = name
		return shim.SyscallPolicy(shim.Job{Harness: h})
	case !strings.ContainsAny(name, "/."):
		return nil, invalid("no policy is named %q", "use default, nested, engine or a file (./FILE)", name)
	}
	data, err := readOperand(name)
	if err != nil {
		return nil, &shim.Error{Reason: shim.ReasonSpecInvalid, Err: err}
	}
	var keys map[string]json.RawMessage
	if json.Unmarshal(data, &keys) == nil && keys["defaultAction"] == nil {
		f := policyFlags{specFlags{file: name}}
		return f.policy()
	}
	h.Seccomp.Profile = name
	p, err := seccomp.Compile(h.Seccomp, seccomp.Target{Arch: runtime.GOARCH, Docker: true, File: data})
	return p, asInvalid(err)
}

// readOperand reads one byte more than a profile or a harness file may have, at most.
func readOperand(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, max(seccomp.MaxFile, harness.MaxFile)+1))
}

func newSeccompBPF() *cobra.Command {
	var f policyFlags
	var pfc bool
	cmd := &cobra.Command{
		Use: "bpf", Short: "Print the compiled filter", Args: cobra.NoArgs,
		Long: "Print the policy's filter as libseccomp compiles it: the kernel's array of instructions or,\n" +
			"with --pfc, libseccomp's pseudo code. The engine's own libseccomp can compile another\n" +
			"filter of the same meaning. It needs a build of agentshim with libseccomp.",
		Example: "  agentshim seccomp bpf --pfc | less\n  agentshim seccomp bpf > filter.bpf",
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := f.policy()
			if err != nil {
				return err
			}
			compile := seccomp.BPF
			if pfc {
				compile = seccomp.PFC
			} else if term.IsTerminal(int(os.Stdout.Fd())) {
				return invalid("the filter is binary", "use --pfc, or send standard output to a file")
			}
			out, err := compile(p)
			switch {
			case errors.Is(err, seccomp.ErrNoLibseccomp):
				return &shim.Error{
					Reason: shim.ReasonSpecInvalid, Msg: "seccomp bpf", Err: err,
					Hint: "use a build with libseccomp: make build where gcc, pkg-config and libseccomp-dev are",
				}
			case err != nil:
				return &shim.Error{Reason: shim.ReasonPolicy, Err: err}
			}
			_, err = cmd.OutOrStdout().Write(out)
			return err
		},
	}
	f.register(cmd)
	cmd.Flags().BoolVar(&pfc, "pfc", false, "pseudo code instead of instructions")
	return cmd
}
