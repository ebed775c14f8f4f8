package shim

import (
	"bufio"
	"bytes"
	"compress/zlib"
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// gitTakeOptions say how an agent's commits are taken.
type gitTakeOptions struct {
	// Run is the last part of the reference's name: refs/agentshim/RUN.
	Run string
	// Dir is a folder for the work, which does not exist yet and is gone afterwards;
	// as gitOptions.Dir.
	Dir string
	// AllowRewrite takes a history too that does not go on from the commit that the
	// run began with, as after an amended commit or a rebase.
	AllowRewrite bool
	// Branch is the one to take; empty for HEAD's or the one that the run began with.
	Branch string
	Limits gitLimits
}

// gitLimits bound what is taken of an agent's repository; a zero is the default.
type gitLimits struct {
	// Files and Bytes are what its objects may be on disk.
	Files int
	Bytes int64
	// Objects, Object and Expanded are the new objects: how many, the largest, and all
	// together, unpacked.
	Objects  int
	Object   int64
	Expanded int64
	Time     time.Duration
}

// maxTakenObjects is also what show-index can list in maxStdout.
const maxTakenObjects = 100_000

func (l gitLimits) withDefaults() gitLimits {
	return gitLimits{
		Files: orDefault(l.Files, 200_000), Bytes: orDefault(l.Bytes, 1<<30),
		Objects: min(orDefault(l.Objects, maxTakenObjects), maxTakenObjects),
		Object:  orDefault(l.Object, 256<<20), Expanded: orDefault(l.Expanded, 4<<30),
		Time: orDefault(l.Time, 5*time.Minute),
	}
}

func orDefault[T comparable](v, otherwise T) T {
	var zero T
	if v == zero {
		return otherwise
	}
	return v
}

// gitTaken is what came of a run; the zero value stands for no new commits.
type gitTaken struct {
	// Ref is the reference that now holds Commit, the last of Commits new ones.
	Ref     string `json:"ref"`
	Commit  string `json:"commit"`
	Commits int    `json:"commits"`
	// Branch is where the agent's HEAD stood, empty when it was detached.
	Branch string `json:"branch,omitempty"`
	// Rewritten says that the history does not go on from the run's first commit.
	Rewritten bool `json:"rewritten,omitempty"`
	// Left are the agent's other branches that have commits which Ref has not, and its
	// stash, as full references, sorted; "" among them stands for too many to look at.
	Left []string `json:"left,omitempty"`
}

// takeBack hands what an agent committed over to the host's repository, as one pack
// and one reference that was not there before. HEAD's commit is taken, or the
// branch's that the run began with, where HEAD has nothing new.
//
// The agent's git dir is read as data: HEAD and references by a parser, objects by
// their own content, whose IDs are computed anew; git runs on copies in a git dir of
// agentshim's own. The new objects pass git's own checks (index-pack --strict, which
// are those of fsck --strict) and lead to nothing but themselves and the branch's
// history as it was given to the agent. What they say is not judged: a commit may
// hold any file.
//
// In the host's repository no reference, index, configuration or object that is
// there is changed, and nothing is written when there is no new commit or anything is
// refused. A hook does not run. The caller says when the agent can't write any more.
func (g gitProgram) takeBack(ctx context.Context, p gitPrivate, o gitTakeOptions) (t gitTaken, err error) {
	ref := "refs/agentshim/" + o.Run
	if !validRef(ref) || strings.Contains(o.Run, "/") || strings.HasPrefix(o.Run, "-") {
		return t, gitRefuse(gitMalformed, o.Run, "it is no name for a reference")
	}
	o.Limits = o.Limits.withDefaults()
	ctx, stop := withTimeout(ctx, o.Limits.Time)
	defer stop()
	agent, err := openGitFolder(p.Private())
	if err != nil {
		return t, err
	}
	defer agent.close()
	tips, err := readTips(agent, p.Host.Head, o.Branch)
	if err != nil {
		return t, err
	}
	if tips.take == "" {
		t.Left, err = g.left(ctx, p.base(), tips.others)
		return t, err
	}
	if err := os.Mkdir(o.Dir, 0o700); err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(o.Dir)) }()
	w := gitWork{git: g, private: p, dir: o.Dir, limits: o.Limits, tips: tips}
	if err := w.quarantine(ctx, agent); err != nil {
		return t, err
	}
	if err := w.pack(ctx); err != nil {
		return t, err
	}
	left, err := g.left(ctx, w.fresh(), tips.others)
	if err != nil || w.packed == "" {
		return gitTaken{Left: left}, err
	}
	t = gitTaken{Ref: ref, Commit: tips.take, Branch: tips.branch, Left: left}
	if err := w.verify(ctx, &t, o.AllowRewrite); err != nil {
		return gitTaken{}, err
	}
	if err := w.fits(ctx); err != nil {
		return gitTaken{}, err
	}
	if err := deliver(p.Host, w.packed, ref, t.Commit); err != nil {
		return gitTaken{}, err
	}
	return t, nil
}

// gitTips are the commits of an agent's repository that matter.
type gitTips struct {
	// base is where the run began, "" for a branch without a commit.
	base string
	// take is new, or "".
	take string
	// branch is HEAD's.
	branch string
	// others are the other branches and the stash, by reference.
	others map[string]string
}

func readTips(agent gitFolder, was gitHead, branch string) (gitTips, error) {
	head, err := readGitHead(agent, agent)
	if err != nil {
		return gitTips{}, err
	}
	began := ""
	if was.Branch != "" {
		if began, err = readGitRef(agent, "refs/heads/"+was.Branch); err != nil {
			return gitTips{}, err
		}
	}
	t := chooseTips(was, head, began)
	if branch != "" {
		t.branch = branch
		if t.take, err = readBranch(agent, branch); err != nil {
			return gitTips{}, err
		}
	}
	t.others, err = readOthers(agent)
	return t, err
}

func readBranch(agent gitFolder, branch string) (string, error) {
	if !validBranch(branch) {
		return "", gitRefuse(gitMalformed, branch, "it is no name for a branch")
	}
	id, err := readGitRef(agent, gitHeads+"/"+branch)
	if err == nil && id == "" {
		err = gitRefuse(gitMalformed, branch, "there is no such branch")
	}
	return id, err
}

func chooseTips(was, head gitHead, began string) gitTips {
	t := gitTips{base: was.Commit, branch: head.Branch}
	isNew := func(id string) bool { return id != "" && id != was.Commit }
	switch {
	case isNew(head.Commit):
		t.take = head.Commit
	case isNew(began):
		t.take, t.branch = began, was.Branch
	}
	return t
}

// gitWork is one hand-over under way, with two git dirs below dir: agent has the
// agent's objects, new the ones that are handed over; both borrow the branch's history.
type gitWork struct {
	git     gitProgram
	private gitPrivate
	dir     string
	limits  gitLimits
	tips    gitTips
	// packed is the pack with the new objects, without its suffix; "" for none.
	packed string
}

func (w *gitWork) agent() string { return path.Join(w.dir, "agent") }
func (w *gitWork) fresh() string { return path.Join(w.dir, "new") }

// quarantine copies the agent's objects and finds out what they are.
func (w *gitWork) quarantine(ctx context.Context, agent gitFolder) error {
	if err := makeShadow(w.agent(), w.private.Host.Shallow, w.private.Objects()); err != nil {
		return err
	}
	objects, err := agent.folder("objects")
	if err != nil {
		return asMalformed("objects", err)
	}
	defer objects.close()
	to := path.Join(w.agent(), "objects")
	s := gitSnapshot{NoIndex: true, Borrowed: true, MaxFiles: w.limits.Files, MaxBytes: w.limits.Bytes}
	if err := s.take(objects, to); err != nil {
		return err
	}
	if err := w.verifyLoose(ctx, to); err != nil {
		return err
	}
	packs, _ := filepath.Glob(globEscape(to) + "/pack/*.pack")
	for _, pack := range packs {
		idx := strings.TrimSuffix(pack, ".pack") + ".idx"
		if _, err := w.git.run(ctx, w.agent(), "", "index-pack", "-o", idx, pack); err != nil {
			return badObjects(err)
		}
	}
	return nil
}

// globEscape lets a path stand for itself in a pattern.
func globEscape(p string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(p)
}

func (w *gitWork) verifyLoose(ctx context.Context, objects string) error {
	files, _ := filepath.Glob(globEscape(objects) + "/[0-9a-f][0-9a-f]/*")
	room := w.limits.Expanded
	for _, name := range files {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		id := path.Base(path.Dir(name)) + path.Base(name)
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		n, err := verifyLooseObject(f, id, min(room, w.limits.Object))
		f.Close()
		if err != nil {
			return err
		}
		room -= n
	}
	return nil
}

// verifyLooseObject says how large a loose object is that is the one it is named
// after: zlib of "type size\0" and size bytes. It reads no more than limit bytes of
// content, and never more than the object says it has.
func verifyLooseObject(r io.Reader, id string, limit int64) (int64, error) {
	bad := func(why string) error { return gitRefuse(gitBadObjects, id, why) }
	z, err := zlib.NewReader(bufio.NewReader(r))
	if err != nil {
		return 0, bad("it is not compressed")
	}
	b := bufio.NewReaderSize(z, 4096)
	header, err := readLooseHeader(b)
	if err != nil {
		return 0, bad("its header is malformed")
	}
	_, digits, _ := strings.Cut(header, " ")
	size, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || size < 0 {
		return 0, bad("its header is malformed")
	}
	if size > limit {
		return 0, gitRefuse(gitTooLarge, id, fmt.Sprintf("an object of %d bytes", size))
	}
	sum := sha1.New()
	io.WriteString(sum, header+"\x00")
	if n, err := io.Copy(sum, io.LimitReader(b, size)); err != nil || n != size {
		return 0, bad("it is cut off")
	}
	if _, err := b.ReadByte(); !errors.Is(err, io.EOF) {
		return 0, bad("it is longer than it says")
	}
	if hexSum(sum) != id {
		return 0, bad("it is another object than its name says")
	}
	return size, nil
}

func hexSum(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)) }

// readLooseHeader reads up to the NUL; the longest is "commit " and 19 digits.
func readLooseHeader(b *bufio.Reader) (string, error) {
	var header []byte
	for len(header) < 32 {
		c, err := b.ReadByte()
		if err != nil {
			return "", err
		}
		if c == 0 {
			return string(header), nil
		}
		header = append(header, c)
	}
	return "", io.ErrUnexpectedEOF
}

func badObjects(err error) error {
	var status ExitStatus
	if !errors.As(err, &status) {
		return err
	}
	return &gitError{Reason: gitBadObjects, Msg: gitSays(err), Err: err}
}

// pack puts the new objects into one pack of the second git dir and checks them
// there, with nothing else in reach than the branch's history.
func (w *gitWork) pack(ctx context.Context) error {
	if err := makeShadow(w.fresh(), w.private.Host.Shallow, w.private.Objects()); err != nil {
		return err
	}
	if err := w.git.isCommit(ctx, w.agent(), w.tips.take); err != nil {
		return err
	}
	packed, err := w.git.packHistory(ctx, w.agent(), w.tips.take, w.tips.base, path.Join(w.fresh(), "objects", "pack"))
	if err != nil || packed == "" {
		return badObjects(err)
	}
	if err := w.checkCount(packed + ".pack"); err != nil {
		return err
	}
	// pack-objects writes the index from what the agent's git dir said.
	if err := os.Remove(packed + ".idx"); err != nil {
		return err
	}
	_, err = w.git.run(ctx, w.fresh(), "", "index-pack", "--strict", "-o", packed+".idx", packed+".pack")
	if err != nil {
		return badObjects(err)
	}
	w.packed = packed
	return w.checkSizes(ctx)
}

// checkCount reads the pack's header: "PACK", version, number of objects.
func (w *gitWork) checkCount(pack string) error {
	f, err := os.Open(pack)
	if err != nil {
		return err
	}
	defer f.Close()
	var h [12]byte
	if _, err := io.ReadFull(f, h[:]); err != nil {
		return err
	}
	n := uint64(h[8])<<24 | uint64(h[9])<<16 | uint64(h[10])<<8 | uint64(h[11])
	if n > uint64(w.limits.Objects) {
		return gitRefuse(gitTooLarge, "", fmt.Sprintf("%d new objects", n))
	}
	return nil
}

func (w *gitWork) checkSizes(ctx context.Context) error {
	idx, err := os.ReadFile(w.packed + ".idx")
	if err != nil {
		return err
	}
	out, err := w.git.run(ctx, w.fresh(), string(idx), "show-index")
	if err != nil {
		return badObjects(err)
	}
	var ids bytes.Buffer
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) > 1 {
			ids.WriteString(f[1] + "\n")
		}
	}
	out, err = w.git.run(ctx, w.fresh(), ids.String(), "cat-file", "--batch-check=%(objectsize)")
	if err != nil {
		return badObjects(err)
	}
	return w.limits.checkSizes(out)
}

func (l gitLimits) checkSizes(lines string) error {
	room := l.Expanded
	for line := range strings.Lines(lines) {
		n, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
		if err != nil {
			return &gitError{Reason: gitBadObjects, Err: err}
		}
		if room -= n; n > l.Object || room < 0 {
			return gitRefuse(gitTooLarge, "", fmt.Sprintf("an object of %d bytes, or all new ones together", n))
		}
	}
	return nil
}

// verify walks the new history and says how it stands to the one before.
func (w *gitWork) verify(ctx context.Context, t *gitTaken, allowRewrite bool) error {
	if err := w.git.isCommit(ctx, w.fresh(), w.tips.take); err != nil {
		return err
	}
	if err := w.walk(ctx, w.fresh(), w.tips.base); err != nil {
		return badObjects(err)
	}
	out, err := w.git.run(ctx, w.fresh(), revs(w.tips.take, w.tips.base), "rev-list", "--count", "--stdin")
	if err != nil {
		return badObjects(err)
	}
	if t.Commits, err = strconv.Atoi(strings.TrimSpace(out)); err != nil {
		return &gitError{Reason: gitBadObjects, Err: err}
	}
	if w.tips.base != "" {
		follows, err := w.git.isAncestor(ctx, w.fresh(), w.tips.base, w.tips.take)
		if err != nil {
			return badObjects(err)
		}
		t.Rewritten = !follows
	}
	if t.Rewritten && !allowRewrite {
		return gitRefuse(gitRewritten, w.tips.branch, "the agent's history does not go on from where the run began")
	}
	return nil
}

// walk fails if anything that is reachable from the new commit, and not from the
// others, is missing.
func (w *gitWork) walk(ctx context.Context, gitDir string, not ...string) error {
	_, err := w.git.run(ctx, gitDir, revs(w.tips.take, not...), "rev-list", "--objects", "--quiet", "--stdin")
	return err
}

func revs(tip string, not ...string) string {
	s := tip + "\n"
	for _, id := range not {
		if id != "" {
			s += "^" + id + "\n"
		}
	}
	return s
}

// isAncestor follows merge-base's exit code: 0 yes, 1 no.
func (g gitProgram) isAncestor(ctx context.Context, gitDir, old, tip string) (bool, error) {
	_, err := g.run(ctx, gitDir, "", "merge-base", "--is-ancestor", old, tip)
	var status ExitStatus
	if errors.As(err, &status) && status == (ExitStatus{Code: 1}) {
		return false, nil
	}
	return err == nil, err
}

// fits says whether the host's repository, as it is now, has what the new commits
// build on: its user may have dropped it during the run.
func (w *gitWork) fits(ctx context.Context) error {
	host := w.private.Host
	now, err := host.now()
	if err != nil {
		return err
	}
	shadow, both := path.Join(w.dir, "host"), path.Join(w.dir, "both")
	if err := now.shadow(shadow); err != nil {
		return err
	}
	if err := makeShadow(both, now.Shallow, path.Join(shadow, "objects"), path.Join(w.fresh(), "objects")); err != nil {
		return err
	}
	// The new git dir borrows the branch's history, which the host's may have lost.
	if err := os.Remove(path.Join(w.fresh(), "objects/info/alternates")); err != nil {
		return err
	}
	if err := w.walk(ctx, both, now.Head.Commit); err != nil {
		var status ExitStatus
		if errors.As(err, &status) {
			return &gitError{Reason: gitHistoryGone, Msg: gitSays(err), Err: err}
		}
		return err
	}
	return nil
}

// now is h with HEAD and shallow commits as they are. A HEAD that can't be read is an
// empty one: the walk that it would shorten is then a whole one.
func (h gitHost) now() (gitHost, error) {
	dir, common, err := h.open()
	if err != nil {
		return h, err
	}
	defer dir.close()
	defer common.close()
	if h.Head, err = readGitHead(dir, common); err != nil {
		h.Head = gitHead{}
	}
	b, err := common.readAny("shallow", maxPackedRefs)
	if err != nil {
		return h, err
	}
	h.Shallow, err = parseShallow(b)
	return h, err
}
