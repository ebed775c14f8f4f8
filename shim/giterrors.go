package shim

import (
	"fmt"
)

// gitReason names why a repository, or what an agent left in one, is refused. A
// gitReason is also the sentinel to compare with: errors.Is(err, gitAlternates).
type gitReason string

// Error lets a gitReason be the target of errors.Is.
func (r gitReason) Error() string { return string(r) }

// What is refused of the host's repository.
const (
	gitMalformed     gitReason = "malformed"
	gitLink          gitReason = "link"
	gitForeign       gitReason = "foreign"
	gitBare          gitReason = "bare"
	gitWorkElsewhere gitReason = "worktree-elsewhere"
	gitAlternates    gitReason = "alternates"
	gitGrafts        gitReason = "grafts"
	gitPartial       gitReason = "partial-clone"
	gitSparse        gitReason = "sparse-checkout"
	gitObjectFormat  gitReason = "object-format"
	gitRefFormat     gitReason = "ref-format"
	gitExtension     gitReason = "extension"
	gitTooLarge      gitReason = "too-large"
	gitIncomplete    gitReason = "incomplete"
	gitSwapped       gitReason = "swapped"
)

// What is refused of an agent's repository, or when its commits are handed over.
const (
	gitBadObjects  gitReason = "bad-objects"
	gitRewritten   gitReason = "rewritten"
	gitHistoryGone gitReason = "history-gone"
	gitRefTaken    gitReason = "ref-taken"
)

// gitRemedies is what a user can do about a reason; the ones without an entry have
// their cause in the error only.
var gitRemedies = map[gitReason]string{
	gitLink:          `replace the link by the folder or file itself, or write "git": "none"`,
	gitForeign:       `run "git worktree repair" in the repository that the workspace belongs to, or write "git": "none"`,
	gitBare:          `give a folder with a working tree: git worktree add ../work`,
	gitWorkElsewhere: `give the repository's own working tree as the workspace, or: git config --unset core.worktree`,
	gitAlternates:    `copy the borrowed objects: git repack -a -d && rm .git/objects/info/alternates`,
	gitGrafts:        `turn the grafts into replacements: git replace --convert-graft-file`,
	gitPartial:       `fetch what is missing into a full clone, or write "git": "none"`,
	gitSparse:        `check everything out: git sparse-checkout disable`,
	gitObjectFormat:  `only SHA-1 repositories are supported: write "git": "shared" or "none"`,
	gitRefFormat:     `keep references as files: git refs migrate --ref-format=files`,
	gitExtension:     `write "git": "shared" or "none"`,
	gitIncomplete:    `look with "git fsck" what is missing`,
	gitRefTaken:      `look what is there: git for-each-ref refs/agentshim; remove a stale .lock file`,
	gitHistoryGone:   `fetch or restore the branch's earlier history, then take the run's commits again`,
}

// gitError is a refusal with its reason. What is the file or object it is about,
// relative to the repository, or empty. It unwraps to the reason and to the cause.
type gitError struct {
	Reason gitReason
	What   string
	Msg    string
	// Err is the cause, and may be nil.
	Err error
}

func (e *gitError) Error() string {
	msg := "git: " + string(e.Reason)
	if e.What != "" {
		msg += fmt.Sprintf(": %q", e.What)
	}
	if e.Msg != "" {
		msg += ": " + e.Msg
	}
	if e.Err != nil {
		msg += ": " + e.Err.Error()
	}
	return msg
}

func (e *gitError) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Reason}
	}
	return []error{e.Reason, e.Err}
}

// Remedy is what the user can do, or "".
func (e *gitError) Remedy() string { return gitRemedies[e.Reason] }

func gitRefuse(r gitReason, what, msg string) error {
	return &gitError{Reason: r, What: what, Msg: msg}
}
