package netpolicy

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strings"

	"github.com/miekg/dns"
)

// ttl of a synthetic address, in seconds: it holds as long as the run.
const ttl = 60

// udpSize is what the resolver says it takes over UDP (EDNS, RFC 6891; the size that
// passes everywhere unfragmented).
const udpSize = 1232

// Resolver answers a sandbox's DNS questions without asking anybody: permitted names
// get a synthetic address, siblings' names their own, everything else does not exist.
type Resolver struct {
	Names *Names
	// Permitted reports whether a canonical name is the target of some rule.
	Permitted func(name string) bool
	// Siblings gives the addresses of another container of the sandbox's network, none for
	// what is no sibling's name, an error where that is not known; nil where there is no
	// network. Names of one label come here only. Who answers must not ask anybody outside:
	// the sandbox chooses the names.
	Siblings func(name string) ([]netip.Addr, error)
	// Refused is told each question for a name that is not permitted; it may be nil.
	// The name is canonical, or empty for one that is no host name.
	Refused func(name string)
}

// maxRecords is how many questions and records a question may hold: it has one of
// each, a transaction signature and little else.
const maxRecords = 8

// overfull looks at the counts only: a record of a few bytes can point to a name of
// 255, and hundreds of those take long to read.
func overfull(packet []byte) bool {
	const counts, end = 4, 12 // RFC 1035 4.1.1
	n := 0
	for i := counts; i < end && len(packet) >= end; i += 2 {
		n += int(binary.BigEndian.Uint16(packet[i:]))
	}
	return n > maxRecords
}

// siblingTTL is that of a sibling's address, in seconds: containers come and go.
const siblingTTL = 2

// siblings are the addresses of another container, nil for none.
func (r Resolver) siblings(name string) ([]netip.Addr, error) {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if r.Siblings == nil || !isSiblingName(name) {
		return nil, nil
	}
	return r.Siblings(name)
}

// isSiblingName takes what engines take for names of containers: letters, digits, hyphens,
// underscores and dots.
func isSiblingName(name string) bool {
	strange := func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' && c != '.'
	}
	return name != "" && len(name) <= 253 && !strings.ContainsFunc(name, strange)
}

// siblingRecords answer for the addresses of the family that is asked for.
func siblingRecords(q dns.Question, addrs []netip.Addr) []dns.RR {
	var out []dns.RR
	for _, a := range addrs {
		head := dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: siblingTTL}
		switch {
		case q.Qtype == dns.TypeA && a.Is4():
			out = append(out, &dns.A{Hdr: head, A: a.AsSlice()})
		case q.Qtype == dns.TypeAAAA && a.Is6():
			out = append(out, &dns.AAAA{Hdr: head, AAAA: a.AsSlice()})
		}
	}
	return out
}

// Answer gives the reply to one message, nil for what deserves none: a response,
// nothing that can be parsed, or more than a question has. It never looks a name up.
func (r Resolver) Answer(packet []byte) []byte {
	if overfull(packet) {
		return nil
	}
	q := new(dns.Msg)
	if err := q.Unpack(packet); err != nil || q.Response {
		return nil
	}
	reply := new(dns.Msg)
	reply.SetReply(q)
	reply.RecursionAvailable = true
	reply.Rcode = r.answer(q, reply)
	if opt := q.IsEdns0(); opt != nil {
		reply.SetEdns0(udpSize, false)
		if opt.Version() != 0 {
			reply.Rcode, reply.Answer = dns.RcodeBadVers, nil
		}
	}
	out, err := reply.Pack()
	if err != nil {
		return nil
	}
	return out
}

func (r Resolver) answer(q, reply *dns.Msg) int {
	if q.Opcode != dns.OpcodeQuery {
		return dns.RcodeNotImplemented
	}
	if len(q.Question) != 1 {
		return dns.RcodeFormatError
	}
	question := q.Question[0]
	if question.Qclass != dns.ClassINET {
		return dns.RcodeRefused
	}
	name, err := CanonicalName(question.Name)
	if err != nil || !r.Permitted(name) {
		found, err := r.siblings(question.Name)
		if err != nil {
			return dns.RcodeServerFailure
		}
		if found != nil {
			reply.Answer = siblingRecords(question, found)
			return dns.RcodeSuccess
		}
		if r.Refused != nil {
			r.Refused(name)
		}
		return dns.RcodeNameError
	}
	if question.Qtype != dns.TypeA {
		// No AAAA: the way out is IPv4. No HTTPS and SVCB: they carry keys for hiding
		// the name that the hello is judged by. The name exists all the same.
		return dns.RcodeSuccess
	}
	addr, ok := r.Names.Addr(name)
	if !ok {
		return dns.RcodeServerFailure
	}
	reply.Answer = append(reply.Answer, &dns.A{
		// The name as it was asked: resolvers compare it to the letter (0x20).
		Hdr: dns.RR_Header{Name: question.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: ttl},
		A:   net.IP(addr.AsSlice()),
	})
	return dns.RcodeSuccess
}
