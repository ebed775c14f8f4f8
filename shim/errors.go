package shim

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"unicode"
)

// Reason is the one word that a refused or failed run carries: it stands after
// "agentshim:" on stderr and in the record. The list is closed and documented by
// Reasons. A Reason is also the sentinel to compare with:
// errors.Is(err, ReasonEngineDown).
type Reason string

// Error lets a Reason be the target of errors.Is.
func (r Reason) Error() string { return string(r) }

// The reasons.
const (
	ReasonSpecInvalid       Reason = "spec-invalid"
	ReasonEngineMissing     Reason = "engine-missing"
	ReasonEngineDenied      Reason = "engine-denied"
	ReasonEngineDown        Reason = "engine-down"
	ReasonEngineContext     Reason = "engine-context"
	ReasonEngineRemote      Reason = "engine-remote"
	ReasonEngineMismatch    Reason = "engine-mismatch"
	ReasonEngineUnsupported Reason = "engine-unsupported"
	ReasonEngineFailed      Reason = "engine-failed"
	ReasonImageMissing      Reason = "image-missing"
	ReasonImagePlatform     Reason = "image-platform"
	ReasonImageUser         Reason = "image-user"
	ReasonPullFailed        Reason = "pull-failed"
	ReasonIdentity          Reason = "identity"
	ReasonHarnessMissing    Reason = "harness-missing"
	ReasonGap               Reason = "gap"
	ReasonWidening          Reason = "widening"
	ReasonPosture           Reason = "posture"
	ReasonEgressSetup       Reason = "egress-setup"
	ReasonPublish           Reason = "publish"
	ReasonMount             Reason = "mount"
	ReasonGit               Reason = "git"
	ReasonPolicy            Reason = "policy"
	ReasonEnvMissing        Reason = "env-missing"
	ReasonCredentials       Reason = "credentials"
	ReasonPrompt            Reason = "prompt"
	ReasonOutputFile        Reason = "output-file"
	ReasonState             Reason = "state"
	ReasonInitMissing       Reason = "init-missing"
	ReasonInitLost          Reason = "init-lost"
	ReasonEngineLost        Reason = "engine-lost"
	ReasonEgressLost        Reason = "egress-lost"
	ReasonOutputClosed      Reason = "output-closed"
	ReasonSession           Reason = "session"
	ReasonSessionBusy       Reason = "session-busy"
	ReasonSessionLost       Reason = "session-lost"
	ReasonContainer         Reason = "container"
	ReasonTimeout           Reason = "timeout"
	ReasonInterrupted       Reason = "interrupted"
	ReasonInternal          Reason = "internal"
)

// ReasonInfo documents one Reason.
type ReasonInfo struct {
	Reason Reason
	// Retry says that the same run may succeed later with nothing changed by the user.
	Retry bool
	// Doc is one sentence for the manual.
	Doc string
}

// Reasons returns the whole list in the order of the manual; the caller owns it.
func Reasons() []ReasonInfo {
	return []ReasonInfo{
		{ReasonSpecInvalid, false, "The harness file, a flag or a name in them is not valid."},
		{ReasonEngineMissing, false, "No container engine, or no client for it, is installed."},
		{ReasonEngineDenied, false, "The engine is there, but this user may not use it."},
		{ReasonEngineDown, true, "The engine's daemon does not run or does not answer."},
		{ReasonEngineContext, false, "The engine's own configuration names an endpoint that can't be used."},
		{ReasonEngineRemote, false, "The engine runs on another machine, in a VM, or outside the container that agentshim runs in."},
		{ReasonEngineMismatch, false, "Another engine answered than the one asked for."},
		{ReasonEngineUnsupported, false, "The engine, its runtime or its set-up lacks something that agentshim needs."},
		{ReasonEngineFailed, true, "The engine reported an error of its own."},
		{ReasonImageMissing, false, "The image is not on this machine and was not, or could not be, pulled."},
		{ReasonImagePlatform, false, "The image is for another platform."},
		{ReasonImageUser, false, "The image names another user than the one that the run would have."},
		{ReasonPullFailed, true, "The image could not be pulled."},
		{ReasonIdentity, false, "There is no uid and gid that the agent could safely have."},
		{ReasonHarnessMissing, false, "The harness's program is not in the image or can't be executed."},
		{ReasonGap, false, "The host can't enforce something, and the file does not accept that."},
		{ReasonWidening, false, "The file opens something that it does not also accept by name."},
		{ReasonPosture, false, "The container is not what was planned."},
		{ReasonEgressSetup, true, "The network policy could not be applied or proven."},
		{ReasonPublish, true, "A port of egress.publish can't be listened on."},
		{ReasonMount, false, "A mount is refused or its source is not usable, or the workspace can't be copied."},
		{ReasonGit, false, "The workspace's repository can't be given to the agent as asked, or its commits can't be taken back."},
		{ReasonPolicy, false, "The network or system call policy is not valid or is denied."},
		{ReasonEnvMissing, false, "A variable or file that the environment is made of is not there."},
		{ReasonCredentials, false, "A file or variable that harness.auth stands for is not there, or has not what is needed."},
		{ReasonPrompt, false, "The prompt is missing, too long or not readable."},
		{ReasonOutputFile, false, "The harness left no output file, or it can't be handed over. Its own exit code, if that is not 0, goes before."},
		{ReasonState, false, "agentshim's own state or runtime folder can't be used."},
		{ReasonInitMissing, false, "The program that runs inside the container is missing or altered."},
		{ReasonInitLost, true, "The container ended without saying how the harness ended."},
		{ReasonEngineLost, true, "The engine or its client went away during the run."},
		{ReasonEgressLost, true, "The egress gateway or its log could not go on during the run."},
		{ReasonOutputClosed, false, "Standard output can't be written. Exit code 141 when its reader went away."},
		{ReasonSession, false, "There is no such session, its name is taken, or it did not become ready, or does not end."},
		{ReasonSessionBusy, true, "The session runs as many steps as it can."},
		{ReasonSessionLost, true, "The session, or what watches the step in it, went away during the step."},
		{ReasonContainer, false, "The container of --container is not there, does not run, can't be entered, or is agentshim's own."},
		{ReasonTimeout, false, "The harness ran longer than its timeout. Exit code 124."},
		{ReasonInterrupted, true, "A signal ended agentshim before the harness started. Exit code 128 and the signal's number."},
		{ReasonInternal, false, "A fault of agentshim itself."},
	}
}

// Retryable says whether a retry with nothing changed can help. An unknown reason
// is not retryable.
func (r Reason) Retryable() bool {
	for _, info := range Reasons() {
		if info.Reason == r {
			return info.Retry
		}
	}
	return false
}

// Exit codes of agentshim's own.
const (
	// ExitRefused is for a refusal or failure.
	ExitRefused = 125
	// ExitTimeout is for a harness that ran longer than its timeout.
	ExitTimeout = 124
	// exitSignal is added to the number of a signal: SIGPIPE's stands for the reader
	// of standard output that went away.
	exitSignal = 128
)

// ExitCode is agentshim's exit code for an error of Run's, 0 for nil.
func ExitCode(err error) int {
	var sig SignalError
	switch reason := ReasonOf(err); {
	case err == nil:
		return 0
	case reason == ReasonTimeout:
		return ExitTimeout
	case reason == ReasonInterrupted && errors.As(err, &sig):
		return exitSignal + int(sig.Signal)
	case reason == ReasonOutputClosed && readerGone(err):
		return exitSignal + int(syscall.SIGPIPE)
	}
	return ExitRefused
}

// readerGone tells a pipe, socket or terminal without its other end from a full disk.
func readerGone(err error) bool {
	return errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EIO)
}

// Error is a refusal or failure with its reason. Msg holds no reason word, no
// control characters from elsewhere and no secret; Hint is what the user can type
// or change, and may be empty.
type Error struct {
	Reason Reason
	Msg    string
	Hint   string
	// Err is the cause, and may be nil.
	Err error
}

// Error gives the message and its cause, without the reason and the hint.
func (e *Error) Error() string {
	switch {
	case e.Err == nil:
		return e.Msg
	case e.Msg == "":
		return e.Err.Error()
	}
	return e.Msg + ": " + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// Is matches e's own Reason, and another *Error of the same reason that says nothing else.
func (e *Error) Is(target error) bool {
	switch t := target.(type) {
	case Reason:
		return t == e.Reason
	case *Error:
		return t.Reason == e.Reason && t.Msg == "" && t.Err == nil
	}
	return false
}

// ReasonOf gives the outermost reason in err's chain, ReasonInternal where there is
// none, and "" for nil.
func ReasonOf(err error) Reason {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Reason
	}
	return ReasonInternal
}

// HintOf gives the outermost hint in err's chain, or "".
func HintOf(err error) string {
	for err != nil {
		var e *Error
		if !errors.As(err, &e) {
			return ""
		}
		if e.Hint != "" {
			return e.Hint
		}
		err = e.Err
	}
	return ""
}

// EngineError is an engine client that did not do what it was asked. Argv is the
// whole command line (agentshim puts no secret on one), Stderr the end of what the
// client wrote, as written; Err is an ExitStatus, a context error or the error of
// starting it.
type EngineError struct {
	Argv   []string
	Stderr string
	Err    error
}

// Error names the program and its verb, and quotes the client's last line with
// control characters removed.
func (e *EngineError) Error() string {
	msg := fmt.Sprintf("%s: %v", commandName(e.Argv), e.Err)
	if line := lastLine(e.Stderr); line != "" {
		msg += ": " + line
	}
	return msg
}

func (e *EngineError) Unwrap() error { return e.Err }

// commandName gives "docker run" for an argv with global flags before the verb.
func commandName(argv []string) string {
	if len(argv) == 0 {
		return "command"
	}
	name := filepath.Base(argv[0])
	for i := 1; i < len(argv); i++ {
		switch arg := argv[i]; {
		case arg == "--host", arg == "--config", arg == "--runtime":
			i++
		case !strings.HasPrefix(arg, "-"):
			return name + " " + arg
		}
	}
	return name
}

// maxLine bounds what one foreign line adds to a message.
const maxLine = 400

// lastLine gives the last line of text that says something, made safe for a terminal.
func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if line := printable(lines[i]); line != "" && !isAdvice(line) {
			return line
		}
	}
	return ""
}

// isAdvice reports the line with which Docker's client ends: its help verb.
func isAdvice(line string) bool {
	return strings.HasPrefix(line, "See '") || strings.HasPrefix(line, "Run '")
}

// printable drops what could steer a terminal and cuts the rest at maxLine bytes.
func printable(line string) string {
	line = strings.TrimSpace(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(line, "?")))
	if len(line) > maxLine {
		line = strings.ToValidUTF8(line[:maxLine], "") + "…"
	}
	return line
}

// engineTexts are engine messages with a known cause, first match wins. The texts
// are those of LC_ALL=C; a client that words them differently is engine-failed.
var engineTexts = []struct {
	text   string
	reason Reason
	hint   string
}{
	{"no space left on device", ReasonEngineFailed, "free space where the engine keeps its data (`docker system df`, `podman system df`)"},
	{"disk quota exceeded", ReasonEngineFailed, "free space where the engine keeps its data (`docker system df`, `podman system df`)"},
	{"permission denied while trying to connect", ReasonEngineDenied, hintDockerGroup},
	{"cannot connect to the docker daemon", ReasonEngineDown, hintDockerStart},
	{"is the docker daemon running", ReasonEngineDown, hintDockerStart},
	{"cgroups in hybrid mode not supported", ReasonEngineUnsupported, hintCrun},
	{"error setting rlimit", ReasonEngineUnsupported, "the engine asks for more than its hard limit: lower resources.nofile, or set default_ulimits in containers.conf"},
	{"setrlimit", ReasonEngineUnsupported, "the engine asks for more than its hard limit: lower resources.nofile, or set default_ulimits in containers.conf"},
	{"database is locked", ReasonEngineFailed, "too many containers start at once: try again"},
	{"allocation failed; exceeded num_locks", ReasonEngineFailed, "`podman volume prune`, or raise num_locks in containers.conf and run `podman system renumber`"},
	{"cannot set up namespace", ReasonEngineUnsupported, "check /etc/subuid and /etc/subgid, then run `podman system migrate`"},
	{"cannot connect to podman", ReasonEngineRemote, hintPodmanRemote},
}

// EngineFailure gives a failed client call its reason and remedy by what the client
// wrote, ReasonEngineFailed where nothing is known about it. The cause stays in the chain.
func EngineFailure(err *EngineError) *Error {
	text := strings.ToLower(err.Stderr)
	for _, known := range engineTexts {
		if strings.Contains(text, known.text) {
			return &Error{Reason: known.reason, Hint: known.hint, Err: err}
		}
	}
	return &Error{Reason: ReasonEngineFailed, Err: err}
}

// engineFailed is EngineFailure for any error of a Runner or of Docker's API.
func engineFailed(err error) error {
	var known *Error
	if errors.As(err, &known) {
		return err
	}
	var failed *EngineError
	if errors.As(err, &failed) {
		return EngineFailure(failed)
	}
	return &Error{Reason: ReasonEngineFailed, Err: err}
}
