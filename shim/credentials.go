package shim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
)

// credentialError says that what harness.auth stands for is not usable, and how to get it.
func (p *prepared) credentialError(msg string, err error) error {
	c := p.job.Harness.Harness
	hint := `write "auth": "none" to run without`
	if signIn := c.Provided.Credentials(c.Auth).SignIn; signIn != "" {
		hint = signIn + ", or " + hint
	}
	return &Error{Reason: ReasonCredentials, Msg: fmt.Sprintf("auth %q of provider %q: %s", c.Auth, c.Provider, msg), Err: err, Hint: hint}
}

// errMembers stands for a text, never for what is in it: it is a credential.
var errMembers = errors.New("it is no JSON object, or lacks the members that are needed")

// keepMembers leaves of the file's content, a JSON object, only the named members. Those that
// the object has not are left out, too; with none at all it is errMembers.
func (f *homeFile) keepMembers(members []string) error {
	if len(members) == 0 {
		return nil
	}
	kept, err := pickMembers(f.content, members)
	if err != nil {
		return err
	}
	if f.host != nil {
		f.host.whole = f.content
	}
	f.members = members
	f.content, err = json.Marshal(kept)
	return err
}

func pickMembers(text []byte, members []string) (map[string]json.RawMessage, error) {
	var object map[string]json.RawMessage
	if json.Unmarshal(text, &object) != nil {
		return nil, errMembers
	}
	kept := map[string]json.RawMessage{}
	for _, name := range members {
		if value, ok := object[name]; ok && !bytes.Equal(value, []byte("null")) {
			kept[name] = value
		}
	}
	if len(kept) == 0 {
		return nil, fmt.Errorf("%w: %s", errMembers, strings.Join(members, ", "))
	}
	return kept, nil
}

// merged is what the host's file holds and what is to take its place: the agent's
// file, or, where only members were delivered, the host's with these as the agent left
// them. Members that it removed stay, so that no sign-in is lost by accident.
func (f homeFile) merged(agents []byte) (old, content []byte, err error) {
	if len(f.members) == 0 {
		return f.content, agents, nil
	}
	old = f.host.whole
	kept, err := pickMembers(agents, f.members)
	if err != nil {
		return nil, nil, err
	}
	if text, err := json.Marshal(kept); err != nil || bytes.Equal(text, f.content) {
		return old, old, err
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(old, &object); err != nil {
		return nil, nil, errMembers // it was one when it was read
	}
	maps.Copy(object, kept)
	content, err = json.MarshalIndent(object, "", "  ")
	return old, append(content, '\n'), err
}
