package netpolicy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// nftTable is the name of agentshim's own tables, one per family. Other tables are
// never touched.
const nftTable = "agentshim"

// ErrReadBack says that what the kernel holds is not what was asked for.
var ErrReadBack = errors.New("packet rules read back differ")

// nftHook is where iptables' table of that name stands: netfilter's priorities.
var nftHook = map[string]struct {
	kind     nftables.ChainType
	priority *nftables.ChainPriority
}{
	"raw":    {nftables.ChainTypeFilter, nftables.ChainPriorityRaw},
	"nat":    {nftables.ChainTypeNAT, nftables.ChainPriorityNATDest},
	"filter": {nftables.ChainTypeFilter, nftables.ChainPriorityFilter},
}

// ApplyNftables puts the rules into the thread's network namespace, in one
// transaction, and reads them back. An earlier set of agentshim's own is EEXIST and
// stays as it is.
func ApplyNftables(r Ruleset) error {
	_, err := applyNftables(r)
	return err
}

// applyNftables gives what was read back, too.
func applyNftables(r Ruleset) (Ruleset, error) {
	conn, err := nftables.New()
	if err != nil {
		return Ruleset{}, fmt.Errorf("nftables: %w", err)
	}
	tables := map[bool]*nftables.Table{}
	for _, c := range r.Chains {
		if tables[c.IPv6] == nil {
			tables[c.IPv6] = addTable(conn, c.IPv6)
		}
		addChain(conn, tables[c.IPv6], c)
	}
	if err := conn.Flush(); err != nil {
		return Ruleset{}, fmt.Errorf("nftables: %w", err)
	}
	got, err := ReadNftables(r)
	if err != nil {
		return Ruleset{}, err
	}
	if !reflect.DeepEqual(r, got) {
		return Ruleset{}, fmt.Errorf("%w: want %+v, got %+v", ErrReadBack, r, got)
	}
	return got, nil
}

// addTable makes agentshim's own table of the family. A transaction that deletes one
// waits for an RCU grace period, which is most of its time.
func addTable(conn *nftables.Conn, six bool) *nftables.Table {
	t := &nftables.Table{Name: nftTable, Family: nftables.TableFamilyIPv4}
	if six {
		t.Family = nftables.TableFamilyIPv6
	}
	return conn.CreateTable(t)
}

// nftName is the chain's name in agentshim's own table.
func (c Chain) nftName() string {
	name := c.Table
	if c.Prerouting {
		name += "-in"
	}
	if c.Part != "" {
		name += "-" + strings.ToLower(c.Part)
	}
	return name
}

func (c Chain) nftHook() *nftables.ChainHook {
	if c.Prerouting {
		return nftables.ChainHookPrerouting
	}
	return nftables.ChainHookOutput
}

func (c Chain) nftPriority() *nftables.ChainPriority {
	return nftables.ChainPriorityRef(*nftHook[c.Table].priority + nftables.ChainPriority(c.place())) //nolint:gosec // 0 or 1
}

func addChain(conn *nftables.Conn, t *nftables.Table, c Chain) {
	hook, policy := nftHook[c.Table], nftables.ChainPolicyAccept
	if c.Policy == Drop {
		policy = nftables.ChainPolicyDrop
	}
	chain := conn.AddChain(&nftables.Chain{
		Name: c.nftName(), Table: t, Type: hook.kind, Hooknum: c.nftHook(), Priority: c.nftPriority(), Policy: &policy,
	})
	for _, r := range c.Rules {
		conn.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: r.exprs(c.IPv6)})
	}
}

// field is where a header field stands.
type field struct {
	base   expr.PayloadBase
	offset uint32
}

var (
	fieldSPort = field{expr.PayloadBaseTransportHeader, 0}
	fieldDPort = field{expr.PayloadBaseTransportHeader, 2}
	fieldFlags = field{expr.PayloadBaseTransportHeader, 13}
	fieldICMP  = fieldSPort // the type, one byte long
)

// stateNew is a connection's state as nftables holds it, in the host's byte order.
var (
	stateNew       = binary.NativeEndian.AppendUint32(nil, expr.CtStateBitNEW)
	stateRelated   = binary.NativeEndian.AppendUint32(nil, expr.CtStateBitRELATED)
	stateUntracked = binary.NativeEndian.AppendUint32(nil, expr.CtStateBitUNTRACKED)
)

// loName is loopback's name as nftables holds it.
var loName = append([]byte("lo"), make([]byte, unix.IFNAMSIZ-len("lo"))...)

// The flags of a TCP header that tell what asks for a connection: of FIN, SYN, RST and
// ACK only SYN.
const (
	synMask = 0x17
	synOnly = 0x02
)

func fieldSrc(six bool) field {
	if six {
		return field{expr.PayloadBaseNetworkHeader, 8}
	}
	return field{expr.PayloadBaseNetworkHeader, 12}
}

func fieldDst(six bool) field {
	if six {
		return field{expr.PayloadBaseNetworkHeader, 24}
	}
	return field{expr.PayloadBaseNetworkHeader, 16}
}

var protocols = map[string]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, protoICMPv6: unix.IPPROTO_ICMPV6}

// protoICMPv6 is ICMPv6 as iptables names it.
const protoICMPv6 = "ipv6-icmp"

// exprs is the rule in nftables' machine: load, compare, act.
func (r PacketRule) exprs(six bool) []expr.Any {
	var out []expr.Any
	if r.Src.IsValid() {
		out = append(out, matchPrefix(fieldSrc(six), r.Src)...)
	}
	if r.Dst.IsValid() {
		out = append(out, matchPrefix(fieldDst(six), r.Dst)...)
	}
	if r.Outside {
		out = append(out, &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: loName})
	}
	if r.Proto != "" {
		out = append(out, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, equals([]byte{protocols[r.Proto]}))
	}
	if r.ICMP != 0 {
		out = append(out, load(fieldICMP, 1), equals([]byte{r.ICMP}))
	}
	if r.SPort != 0 {
		out = append(out, load(fieldSPort, 2), equals(port(r.SPort)))
	}
	if r.DPort != 0 {
		out = append(out, load(fieldDPort, 2), equals(port(r.DPort)))
	}
	if r.Syn {
		out = append(out, matchMasked(load(fieldFlags, 1), []byte{synOnly}, []byte{synMask})...)
	}
	if r.New {
		out = append(out, matchState(stateNew)...)
	}
	if r.Untracked {
		out = append(out, matchState(stateUntracked)...)
	}
	if r.Related {
		out = append(out, matchState(stateRelated)...)
	}
	if r.Limit != (Limit{}) {
		out = append(out, r.Limit.expr())
	}
	return append(out, r.act()...)
}

func (l Limit) expr() *expr.Limit {
	return &expr.Limit{Type: expr.LimitTypePkts, Rate: uint64(l.PerSecond), Unit: expr.LimitTimeSecond, Burst: l.Burst}
}

func load(f field, n uint32) expr.Any {
	return &expr.Payload{DestRegister: 1, Base: f.base, Offset: f.offset, Len: n}
}

func equals(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data} }

func port(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }

func matchPrefix(f field, p netip.Prefix) []expr.Any {
	addr := p.Addr().AsSlice()
	return matchMasked(load(f, uint32(len(addr))), addr, mask(p))
}

// matchMasked compares the bits of mask of what load loads.
func matchMasked(load expr.Any, data, mask []byte) []expr.Any {
	n := uint32(len(data))
	return []expr.Any{
		load,
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: n, Mask: mask, Xor: make([]byte, n)},
		equals(data),
	}
}

func matchState(state []byte) []expr.Any {
	return matchMasked(&expr.Ct{Key: expr.CtKeySTATE, Register: 1}, state, state)
}

func mask(p netip.Prefix) []byte {
	m := make([]byte, p.Addr().BitLen()/8)
	for i := range p.Bits() {
		m[i/8] |= 0x80 >> (i % 8)
	}
	return m
}

var verdicts = map[Action]expr.VerdictKind{Accept: expr.VerdictAccept, Drop: expr.VerdictDrop, Return: expr.VerdictReturn}

func (r PacketRule) act() []expr.Any {
	switch r.Action {
	case NoTrack:
		return []expr.Any{&expr.Notrack{}}
	case Reject:
		return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}
	case Redirect:
		return []expr.Any{&expr.Immediate{Register: 1, Data: port(r.To)}, &expr.Redir{RegisterProtoMin: 1}}
	}
	return []expr.Any{&expr.Verdict{Kind: verdicts[r.Action]}}
}

// ReadNftables reads agentshim's own chains of the shape of r from the thread's
// network namespace.
func ReadNftables(r Ruleset) (Ruleset, error) {
	conn, err := nftables.New()
	if err != nil {
		return Ruleset{}, fmt.Errorf("nftables: %w", err)
	}
	chains, err := conn.ListChains()
	if err != nil {
		return Ruleset{}, fmt.Errorf("nftables: %w", err)
	}
	var out Ruleset
	for _, want := range r.Chains {
		for _, c := range chains {
			six := c.Table.Family == nftables.TableFamilyIPv6
			if c.Table.Name != nftTable || c.Name != want.nftName() || six != want.IPv6 {
				continue
			}
			got, err := readChain(conn, c, want)
			if err != nil {
				return Ruleset{}, err
			}
			out.Chains = append(out.Chains, got)
		}
	}
	return out, nil
}

func readChain(conn *nftables.Conn, c *nftables.Chain, want Chain) (Chain, error) {
	out := Chain{Table: want.Table, IPv6: want.IPv6, Prerouting: want.Prerouting, Part: want.Part, Policy: Accept}
	if c.Type != nftHook[want.Table].kind || c.Hooknum == nil || *c.Hooknum != *want.nftHook() || c.Priority == nil || *c.Priority != *want.nftPriority() {
		return out, fmt.Errorf("%w: chain %s is not where it belongs", ErrReadBack, c.Name)
	}
	if c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop {
		out.Policy = Drop
	}
	rules, err := conn.GetRules(c.Table, c)
	if err != nil {
		return out, fmt.Errorf("nftables: %w", err)
	}
	for _, r := range rules {
		got, err := packetRule(r.Exprs, want.IPv6)
		if err != nil {
			return out, err
		}
		out.Rules = append(out.Rules, got)
	}
	return out, nil
}

// packetRule is the inverse of exprs.
func packetRule(exprs []expr.Any, six bool) (PacketRule, error) {
	var r PacketRule
	var loaded, masked any
	for _, e := range exprs {
		switch e := e.(type) {
		case *expr.Payload:
			loaded, masked = field{e.Base, e.Offset}, nil
		case *expr.Meta:
			loaded, masked = e.Key, nil
		case *expr.Ct:
			loaded, masked = e.Key, nil
		case *expr.Bitwise:
			masked = e.Mask
		case *expr.Cmp:
			if e.Op == expr.CmpOpNeq && loaded == expr.MetaKeyIIFNAME && bytes.Equal(e.Data, loName) {
				r.Outside = true
				continue
			}
			if e.Op != expr.CmpOpEq || !r.compared(loaded, masked, e.Data, six) {
				return r, fmt.Errorf("%w: comparison %+v of %v", ErrReadBack, e, loaded)
			}
		case *expr.Limit:
			r.Limit = Limit{PerSecond: uint32(e.Rate), Burst: e.Burst}
			if *e != *r.Limit.expr() {
				return r, fmt.Errorf("%w: limit %+v", ErrReadBack, e)
			}
		case *expr.Immediate:
			r.To = binary.BigEndian.Uint16(e.Data)
		case *expr.Reject:
			if e.Type != unix.NFT_REJECT_TCP_RST {
				return r, fmt.Errorf("%w: reject %d", ErrReadBack, e.Type)
			}
			r.Action = Reject
		case *expr.Redir:
			r.Action = Redirect
		case *expr.Notrack:
			r.Action = NoTrack
		case *expr.Verdict:
			for a, kind := range verdicts {
				if kind == e.Kind {
					r.Action = a
				}
			}
		default:
			return r, fmt.Errorf("%w: %T", ErrReadBack, e)
		}
	}
	return r, nil
}

// compared takes one comparison into the rule, false for one that no rule has.
func (r *PacketRule) compared(loaded, masked any, data []byte, six bool) bool {
	switch loaded {
	case fieldSrc(six):
		r.Src = prefix(data, masked)
		return r.Src.IsValid()
	case fieldDst(six):
		r.Dst = prefix(data, masked)
		return r.Dst.IsValid()
	case fieldSPort:
		if len(data) == 1 { // fieldICMP
			r.ICMP = data[0]
			return true
		}
		r.SPort = binary.BigEndian.Uint16(data)
		return true
	case fieldDPort:
		r.DPort = binary.BigEndian.Uint16(data)
		return true
	case fieldFlags:
		m, _ := masked.([]byte)
		r.Syn = bytes.Equal(m, []byte{synMask}) && bytes.Equal(data, []byte{synOnly})
		return r.Syn
	case expr.CtKeySTATE:
		m, _ := masked.([]byte)
		is := func(state []byte) bool { return bytes.Equal(m, state) && bytes.Equal(data, state) }
		r.New, r.Related, r.Untracked = is(stateNew), is(stateRelated), is(stateUntracked)
		return r.New || r.Related || r.Untracked
	case expr.MetaKeyL4PROTO:
		for name, number := range protocols {
			if data[0] == number {
				r.Proto = name
			}
		}
		return r.Proto != ""
	}
	return false
}

func prefix(addr []byte, masked any) netip.Prefix {
	a, ok := netip.AddrFromSlice(addr)
	bits := a.BitLen()
	if m, ok := masked.([]byte); ok {
		bits = 0
		for _, b := range m {
			for ; b != 0; b <<= 1 {
				bits++
			}
		}
	}
	if !ok {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(a, bits)
}
