package netpolicy

import (
	"net/netip"
)

// EventKind is what an Event tells.
type EventKind string

// The kinds of events.
const (
	// EventName is a DNS question for a name that no rule is for.
	EventName EventKind = "name"
	// EventConnect is the decision on one connection, EventRequest that on one HTTP
	// request of a connection to port 80, EventEnd the end of a permitted connection.
	EventConnect EventKind = "connect"
	EventRequest EventKind = "request"
	EventEnd     EventKind = "end"
)

// Event is one decision of the gateway, or the end of what it permitted. Names hold
// only what CanonicalName takes, or are empty; other text from the sandbox stands in
// Detail, and is escaped where it is shown.
type Event struct {
	Kind EventKind
	// Conn numbers the run's connections from 1; 0 for names.
	Conn uint64
	// Name is the name the sandbox asked for, Addr the address it dialled (refused
	// addresses, address ranges) or, for a permitted name, the one the host dialled.
	Name string
	Addr netip.Addr
	Port int
	// Verdict is why: the rule, or the refusal and what would permit it.
	Verdict Verdict
	// Detail is what the sandbox sent that was judged: a server name, a Host, a method.
	Detail string
	// Sent and Received are bytes from and to the sandbox, for EventEnd.
	Sent, Received int64
	// Micros is how long the connection lasted, for EventEnd.
	Micros int64
}

// Verdict is what the policy says of one target.
type Verdict struct {
	Allowed bool
	// Rule is the rule that allowed or denied it, as the file would write it; empty
	// where none did.
	Rule string
	// Reason says why it is refused: one of the Refusal constants; empty when allowed.
	Reason Refusal
	// Why is more about the reason, in words, for people.
	Why string
	// Entry is the allow entry that would permit it, as JSON or plain text for the
	// file's egress.allow; empty where nothing would.
	Entry string
	// Raw lets something other than TLS pass on port 443 and something other than HTTP
	// on port 80; ECH lets encrypted hellos pass.
	Raw, ECH bool
	// HostPort is the port on the host's loopback that a host service's name stands
	// for, 0 for every other target.
	HostPort int
}

// Refusal is a reason for which something is refused.
type Refusal string

// The reasons.
const (
	// RefusedUnlisted: no allow entry is for it.
	RefusedUnlisted Refusal = "unlisted"
	// RefusedDenied: a deny entry is for it.
	RefusedDenied Refusal = "denied"
	// RefusedName: it is no host name in canonical form.
	RefusedName Refusal = "malformed-name"
	// RefusedAddress: the name leads to an address that is not globally reachable, or
	// is the host's own, and no range inside that block is allowed.
	RefusedAddress Refusal = "address"
	// RefusedResolve: the name could not be resolved, RefusedDial: nothing answered.
	RefusedResolve Refusal = "resolve"
	RefusedDial    Refusal = "dial"
	// RefusedProxy: the upstream proxy refused it, or could not be used.
	RefusedProxy Refusal = "proxy"
	// RefusedHello: on port 443, what came is not TLS; RefusedServerName: its server
	// name is another; RefusedECH: it hides its server name.
	RefusedHello      Refusal = "not-tls"
	RefusedServerName Refusal = "server-name"
	RefusedECH        Refusal = "ech"
	// RefusedHost: on port 80, a request for another host; RefusedRequest: a method or
	// an upgrade that is not passed on, or no HTTP/1 request at all.
	RefusedHost    Refusal = "host"
	RefusedRequest Refusal = "request"
	// RefusedLimit: too many connections are open.
	RefusedLimit Refusal = "limit"
)

// failed says that the policy permits what was not reached.
func (r Refusal) failed() bool {
	return r == RefusedDial || r == RefusedResolve || r == RefusedProxy
}
