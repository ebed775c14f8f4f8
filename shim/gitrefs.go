package shim

import (
	"bytes"
	"path"
	"strings"
)

// Bounds of what is read of a repository. A packed-refs of 64 MiB holds about a
// million references.
const (
	maxGitFile    = 64 << 10
	maxGitConfig  = 1 << 20
	maxPackedRefs = 64 << 20
	maxRefName    = 1024
)

// gitHead is where HEAD stands. Both may be empty only one at a time.
type gitHead struct {
	// Branch is without refs/heads/; empty when HEAD is detached.
	Branch string `json:"branch,omitempty"`
	// Commit is 40 hexadecimal digits; empty for a branch without a commit.
	Commit string `json:"commit,omitempty"`
}

// isObjectID says whether s is a SHA-1 object ID in git's own spelling.
func isObjectID(s string) bool { return isLowerHex(s, 40) }

func isLowerHex(s string, n int) bool {
	if len(s) != n {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// parseHead takes the content of HEAD. A reference to anything but a branch is
// refused: reftable repositories point to refs/heads/.invalid.
func parseHead(b []byte) (gitHead, error) {
	if id, ok := parseID(b); ok {
		return gitHead{Commit: id}, nil
	}
	rest, ok := strings.CutPrefix(string(b), "ref:")
	name, full := strings.CutPrefix(strings.Trim(rest, " \t\r\n"), "refs/heads/")
	switch {
	case ok && full && name == ".invalid":
		return gitHead{}, gitRefuse(gitRefFormat, "HEAD", "references are not kept as files")
	case !ok || !full || !validBranch(name):
		return gitHead{}, gitRefuse(gitMalformed, "HEAD", "it is neither a commit nor a branch")
	}
	return gitHead{Branch: name}, nil
}

// parseID takes the content of a loose reference: an ID and the end of the line.
func parseID(b []byte) (string, bool) {
	s := strings.TrimRight(string(b), " \t\r\n")
	return s, isObjectID(s)
}

// validBranch follows git-check-ref-format(1) for refs/heads/NAME, and --branch's
// rule that a name does not begin with a dash. Git has no bound of its own; a path
// has.
func validBranch(name string) bool {
	return name != "HEAD" && !strings.HasPrefix(name, "-") && validRef("refs/heads/"+name)
}

func validRef(ref string) bool {
	if len(ref) > maxRefName || strings.Contains(ref, "..") || strings.Contains(ref, "@{") {
		return false
	}
	for i := range len(ref) {
		if c := ref[i]; c < 0x20 || c == 0x7f || strings.IndexByte(" ~^:?*[\\", c) >= 0 {
			return false
		}
	}
	for part := range strings.SplitSeq(ref, "/") {
		if part == "" || part[0] == '.' || strings.HasSuffix(part, ".") || strings.HasSuffix(part, ".lock") {
			return false
		}
	}
	return true
}

// findPackedRef looks ref up in the content of packed-refs, "" when it is not there.
// A line that is none of the format's is refused, wherever it stands.
func findPackedRef(b []byte, ref string) (string, error) {
	found := ""
	err := eachPackedRef(b, func(id, name string) {
		if name == ref {
			found = id
		}
	})
	return found, err
}

// eachPackedRef calls f for every reference, valid or not as a name. The format is
// a header "# pack-refs with: …", then "ID name" lines, each of which may be followed
// by "^ID", what the tag before leads to.
func eachPackedRef(b []byte, f func(id, name string)) error {
	for len(b) > 0 {
		line, rest, ok := bytes.Cut(b, []byte("\n"))
		if !ok {
			return gitRefuse(gitMalformed, "packed-refs", "its last line has no end")
		}
		b = rest
		if len(line) == 0 || line[0] == '#' || (line[0] == '^' && isObjectID(string(line[1:]))) {
			continue
		}
		id, name, ok := strings.Cut(string(line), " ")
		if !ok || !isObjectID(id) || name == "" {
			return gitRefuse(gitMalformed, "packed-refs", "a line is not a reference")
		}
		f(id, name)
	}
	return nil
}

// refConflict says whether a reference cannot exist beside ref: it is ref, or one
// of them would be a folder of the other.
func refConflict(name, ref string) bool {
	return name == ref || strings.HasPrefix(name, ref+"/") || strings.HasPrefix(ref, name+"/")
}

// parseGitFile takes the content of a .git file and gives the path in it, absolute
// or relative to the file's folder.
func parseGitFile(b []byte) (string, error) {
	p, ok := strings.CutPrefix(string(b), "gitdir: ")
	p = strings.TrimRight(p, "\r\n")
	if !ok || p == "" || strings.ContainsAny(p, "\x00\n") {
		return "", gitRefuse(gitMalformed, ".git", `it is no file of the form "gitdir: PATH"`)
	}
	return p, nil
}

// parsePathLine takes the content of commondir or gitdir: one path.
func parsePathLine(b []byte, what string) (string, error) {
	p := strings.TrimRight(string(b), "\r\n")
	if p == "" || strings.ContainsAny(p, "\x00\n") {
		return "", gitRefuse(gitMalformed, what, "it holds no path")
	}
	return p, nil
}

// parseShallow takes the content of the file shallow: the commits whose parents
// are not there.
func parseShallow(b []byte) ([]string, error) {
	var ids []string
	for line := range strings.Lines(string(b)) {
		id := strings.TrimRight(line, "\n")
		if !isObjectID(id) {
			return nil, gitRefuse(gitMalformed, "shallow", "a line is no commit")
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// joinPath gives p, as written in a file of folder dir, as an absolute path.
func joinPath(dir, p string) string {
	if path.IsAbs(p) {
		return path.Clean(p)
	}
	return path.Join(dir, p)
}
