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

// keepGitlinks sets "assume unchanged" on every gitlink of an index that git has
// just written, and gives their paths. An agent can't see a submodule's repository:
// git add and git status would end with an error on looking into one.
func keepGitlinks(index []byte) ([]byte, []string, error) {
	bad := gitRefuse(gitMalformed, "index", "git wrote one that is not of version 2")
	if len(index) < indexHeader+indexTrailer || string(index[:8]) != "DIRC\x00\x00\x00\x02" {
		return nil, nil, bad
	}
	out, end := bytes.Clone(index), len(index)-indexTrailer
	var paths []string
	at := indexHeader
	for range binary.BigEndian.Uint32(index[8:]) {
		if at+indexName >= end {
			return nil, nil, bad
		}
		n := bytes.IndexByte(out[at+indexName:end], 0)
		if n < 0 {
			return nil, nil, bad
		}
		if binary.BigEndian.Uint32(out[at+indexMode:]) == modeGitlink {
			flags := binary.BigEndian.Uint16(out[at+indexFlags:])
			binary.BigEndian.PutUint16(out[at+indexFlags:], flags|flagAssumeValid)
			paths = append(paths, string(out[at+indexName:at+indexName+n]))
		}
		at += (indexName + n + 8) &^ 7 // padded with one to eight NULs
	}
	sum := sha1.Sum(out[:end])
	return append(out[:end], sum[:]...), paths, nil
}
