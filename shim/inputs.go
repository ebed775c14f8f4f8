package shim

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentshim/agentshim/harness"
	"github.com/agentshim/agentshim/mounts"
	"github.com/agentshim/agentshim/shim/wire"
	"github.com/agentshim/agentshim/spec"
)

// Bounds of what the caller hands over, in bytes.
const (
	maxPrompt  = 10 << 20
	maxEnvFile = 1 << 20
	// maxArg is MAX_ARG_STRLEN, with the final zero byte: execve(2).
	maxArg = 128<<10 - 1
)

// homeFile is a file for the agent's home, read from the host.
type homeFile struct {
	target  string
	content []byte
	// host is what the agent's version replaces in the end; nil without writeBack.
	host *hostFile
	// members are those of the JSON object on the host that content has; none are all.
	members []string
	// output says that nothing goes in, and that what the harness leaves is for this file.
	output *outputFile
	// after are files of the image that content goes behind: see wire.File.
	after []string
}

// readValues reads what a plan leaves out, beyond the envFiles.
func (p *prepared) readValues() error {
	return errors.Join(p.readCallerEnv(), p.readHomeFiles(), p.readCertificates(), p.findOutput(), p.readPrompt())
}

func (p *prepared) readHomeFiles() error {
	for _, f := range p.job.Harness.Home.Files {
		read, hint := p.readHomeFile, "home.files copies readable files of at most 64 MiB"
		if f.WriteBack {
			read, hint = p.readBackFile, "writeBack needs a file of yours of at most 1 MiB, in a folder that you may write; leave it out to copy the file in only"
		}
		file, err := read(f.Source)
		if err == nil {
			err = file.keepMembers(f.Members)
		}
		switch {
		case err != nil && f.Auth != "":
			return p.credentialError(fmt.Sprintf("credential %q", f.Source), err)
		case err != nil:
			return &Error{Reason: ReasonMount, Msg: fmt.Sprintf("home file %q", f.Source), Err: err, Hint: hint}
		}
		file.target = wire.HomeDir + "/" + f.Target
		p.files = append(p.files, file)
	}
	return nil
}

func (p *prepared) readHomeFile(source string) (homeFile, error) {
	b, err := p.readHostFile(source, wire.MaxFile)
	return homeFile{content: b}, err
}

// hostPath resolves a path of the harness file.
func (p *prepared) hostPath(path string) string {
	if rest, ok := strings.CutPrefix(path, "~/"); ok {
		return filepath.Join(homeFolder(p.job.getenv), rest)
	}
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(p.job.Harness.Dir, path)
}

// readHostFile reads a file that the harness file names. Its way may not lead
// through a link that an agent may have made, now or while it is being read.
func (p *prepared) readHostFile(name string, limit int64) ([]byte, error) {
	real, err := p.realPath(name)
	if err != nil {
		return nil, err
	}
	return readBounded(real, limit)
}

func (p *prepared) realPath(name string) (string, error) {
	return mounts.Resolve(p.hostPath(name), p.agentFolders())
}

// agentFolders are the host's folders in which an agent may have made links.
func (p *prepared) agentFolders() []string {
	if p.session != nil {
		return p.session.folders
	}
	if p.foreign != nil {
		return p.foreign.writable()
	}
	return mounts.AgentFolders(p.job.Harness, p.host.Mounts)
}

// readBounded reads a regular file of at most limit bytes; a FIFO or device would
// block or never end. No link is followed.
func readBounded(path string, limit int64) ([]byte, error) {
	f, err := openRegular(unix.AT_FDCWD, path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f, limit)
}

// openRegular opens a regular file below dir without following any link.
func openRegular(dir int, path string) (*os.File, error) {
	fd, err := unix.Openat2(dir, path, &unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY, Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%q is not a regular file", path)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

var errTooLarge = errors.New("too large")

func readAll(r io.Reader, limit int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%w: more than %d bytes", errTooLarge, limit)
	}
	return b, err
}

// readCallerEnv reads the variables of envFrom and of harness.auth.
func (p *prepared) readCallerEnv() error {
	var errs []error
	p.values.Caller = map[string]string{}
	for _, name := range p.job.Harness.Harness.AuthEnv {
		v := p.job.getenv(name)
		if v == "" {
			errs = append(errs, p.credentialError(fmt.Sprintf("variable %q is not set", name), nil))
		}
		p.values.Caller[name] = v
	}
	for _, name := range p.job.Harness.EnvFrom {
		v, ok := p.job.LookupEnv(name)
		if !ok {
			errs = append(errs, &Error{
				Reason: ReasonEnvMissing, Msg: fmt.Sprintf("variable %q of envFrom is not set", name),
				Hint: fmt.Sprintf("export %s, or take it out of envFrom", name),
			})
		}
		p.values.Caller[name] = v
	}
	return errors.Join(errs...)
}

// readEnvFiles reads the envFiles and returns their variables' names, sorted, per file.
func (p *prepared) readEnvFiles() ([][]string, error) {
	var names [][]string
	var errs []error
	for _, file := range p.job.Harness.EnvFiles {
		vars, err := p.envFile(file)
		errs = append(errs, err)
		p.values.EnvFiles = append(p.values.EnvFiles, vars)
		names = append(names, slices.Sorted(maps.Keys(vars)))
	}
	return names, errors.Join(errs...)
}

func (p *prepared) envFile(file string) (map[string]string, error) {
	const hint = "envFiles are files of NAME=value lines, at most 1 MiB"
	b, err := p.readHostFile(file, maxEnvFile)
	if err != nil {
		return nil, &Error{Reason: ReasonEnvMissing, Msg: fmt.Sprintf("env file %q", file), Err: err, Hint: hint}
	}
	list, err := harness.ParseEnvFile(b)
	if err != nil {
		return nil, &Error{Reason: ReasonSpecInvalid, Msg: fmt.Sprintf("env file %q", file), Err: err, Hint: hint}
	}
	vars := map[string]string{}
	for _, v := range list {
		vars[v.Name] = v.Value
	}
	return vars, nil
}

// readPrompt takes the prompt from the first of: words, the file's own, its
// promptFile, standard input to its end. A session has none: each step has its own.
func (p *prepared) readPrompt() error {
	j, h := p.job, p.job.Harness
	if len(j.Command) > 0 || j.interactive() || j.keeper != nil {
		return nil
	}
	switch {
	case len(j.Words) > 0:
		p.values.Prompt = strings.Join(j.Words, " ")
	case h.Prompt != nil:
		p.values.Prompt = *h.Prompt
	case h.PromptFile != "":
		b, err := p.readPromptFile(h.PromptFile)
		if err != nil {
			return err
		}
		p.values.Prompt = string(b)
	case j.StdinTerminal:
		return &Error{Reason: ReasonPrompt, Msg: "no prompt given", Hint: hintPrompt}
	default:
		b, err := readAll(j.Stdin, maxPrompt)
		if err != nil {
			return &Error{Reason: ReasonPrompt, Msg: "prompt on standard input", Err: err, Hint: "a prompt is at most 10 MiB"}
		}
		p.values.Prompt, p.stdin = string(b), strings.NewReader("")
	}
	if p.values.Prompt == "" && h.Harness.Provided != nil {
		return &Error{Reason: ReasonPrompt, Msg: "the prompt is empty", Hint: hintPrompt}
	}
	return p.placePrompt(h.Harness.PromptMode)
}

const hintPrompt = "put it behind --, into the harness file, or on standard input"

// interactive says that a person at a terminal gets the provider's own form: there is no
// prompt anywhere.
func (j Job) interactive() bool {
	h := j.Harness
	given := len(j.Command) > 0 || len(j.Words) > 0 || h.Prompt != nil || h.PromptFile != ""
	return !given && j.Terminal != nil && h.Terminal != "never" && h.Harness.HasInteractive()
}

func (p *prepared) readPromptFile(name string) ([]byte, error) {
	b, err := p.readHostFile(name, maxPrompt)
	if err != nil {
		return nil, &Error{Reason: ReasonPrompt, Msg: fmt.Sprintf("prompt file %q", name), Err: err, Hint: "a prompt file holds at most 10 MiB of text"}
	}
	return b, nil
}

func (p *prepared) placePrompt(mode string) error {
	prompt := p.values.Prompt
	switch mode {
	case "stdin":
		p.stdin = strings.NewReader(prompt)
	case "file":
		p.files = append(p.files, homeFile{target: cmp.Or(p.promptPath, spec.PromptPath), content: []byte(prompt)})
	default:
		if len(prompt) > maxArg || strings.ContainsRune(prompt, 0) {
			return &Error{
				Reason: ReasonPrompt, Msg: fmt.Sprintf("a prompt of %d bytes, or one with a zero byte, can't be an argument", len(prompt)),
				Hint: "use \"promptMode\": \"stdin\" or \"file\"",
			}
		}
	}
	return nil
}
