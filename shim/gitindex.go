package shim

import (
	"bytes"
	"crypto/sha1"
	"encoding/binary"
)

// Offsets in an index of version 2: gitformat-index(5).
const (
	indexHeader  = 12
	indexMode    = 24
	indexFlags   = 60
	indexName    = 62
	indexTrailer = sha1.Size

	modeGitlink     = 0o160000
	flagAssumeValid = 0x8000
)

// unseen are paths of an index whose content the agent's working tree does not have.
type unseen struct {
	// gitlinks are submodules' places, hidden what the harness file hides.
	gitlinks, hidden []string
}

// keepUnseen sets "assume unchanged" on every gitlink, and on what lies at or below one
// of the hidden paths, in an index that git has just written. An agent can't see a
// submodule's repository: git add and git status would end with an error on looking
// into one. A hidden file is empty or gone for it: git add -A would take that for its change.
func keepUnseen(index []byte, hidden []string) ([]byte, unseen, error) {
	var found unseen
	bad := gitRefuse(gitMalformed, "index", "git wrote one that is not of version 2")
	if len(index) < indexHeader+indexTrailer || string(index[:8]) != "DIRC\x00\x00\x00\x02" {
		return nil, unseen{}, bad
	}
	out, end := bytes.Clone(index), len(index)-indexTrailer
	at := indexHeader
	for range binary.BigEndian.Uint32(index[8:]) {
		if at+indexName >= end {
			return nil, unseen{}, bad
		}
		n := bytes.IndexByte(out[at+indexName:end], 0)
		if n < 0 {
			return nil, unseen{}, bad
		}
		name := string(out[at+indexName : at+indexName+n])
		link, hide := binary.BigEndian.Uint32(out[at+indexMode:]) == modeGitlink, inAnyPath(name, hidden)
		if link {
			found.gitlinks = append(found.gitlinks, name)
		}
		if hide {
			found.hidden = append(found.hidden, name)
		}
		if link || hide {
			flags := binary.BigEndian.Uint16(out[at+indexFlags:])
			binary.BigEndian.PutUint16(out[at+indexFlags:], flags|flagAssumeValid)
		}
		at += (indexName + n + 8) &^ 7 // padded with one to eight NULs
	}
	sum := sha1.Sum(out[:end])
	return append(out[:end], sum[:]...), found, nil
}
