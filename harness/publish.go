package harness

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Published is one port of the sandbox's loopback that is reached on the host.
type Published struct {
	// Address is the host's address that is listened on. It has no zone.
	Address netip.Addr
	// HostPort is the port there; 0 leaves it to the kernel.
	HostPort uint16
	// Port is the port inside.
	Port uint16
}

// String is the entry in its full form.
func (p Published) String() string {
	return fmt.Sprintf("%s:%d", netip.AddrPortFrom(p.Address, p.HostPort), p.Port)
}

// publishRemedy shows the forms.
const publishRemedy = `write it as "3000", "8080:3000", "127.0.0.1:8080:3000" or "[::1]:8080:3000"; 0 before the last colon lets the kernel choose`

// ParsePublish takes PORT, HOSTPORT:PORT or ADDRESS:HOSTPORT:PORT, an IPv6 address in
// brackets. The address is 127.0.0.1 where none is given. It does not look at the host.
func ParsePublish(text string) (Published, error) {
	p := Published{Address: netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	ports := text
	if address, rest, given := cutAddress(text); given {
		addr, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(address, "["), "]"))
		switch bracketed := strings.HasPrefix(address, "["); {
		case err != nil:
			return p, errors.New("holds no IP address")
		case addr.Is6() != bracketed:
			return p, errors.New("brackets belong to an IPv6 address, and only to one")
		case addr.Zone() != "" || addr.Is4In6():
			return p, errors.New("must not hold a zone, or an IPv4 address in IPv6's form")
		case addr.IsMulticast():
			return p, errors.New("nobody can listen on a multicast address")
		}
		p.Address, ports = addr, rest
	}
	host, inside, two := strings.Cut(ports, ":")
	if !two {
		host, inside = ports, ports
	}
	var err1, err2 error
	p.HostPort, err1 = portNumber(host)
	p.Port, err2 = portNumber(inside)
	if err1 != nil || err2 != nil || p.Port == 0 {
		return p, errors.New("holds no port (1 to 65535)")
	}
	return p, nil
}

// cutAddress takes the address off; false where the entry has none.
func cutAddress(text string) (address, ports string, given bool) {
	if i := strings.Index(text, "]:"); strings.HasPrefix(text, "[") && i > 0 {
		return text[:i+1], text[i+2:], true
	}
	if strings.Count(text, ":") < 2 {
		return "", text, false
	}
	return strings.Cut(text, ":")
}

// portNumber takes plain decimal digits.
func portNumber(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err == nil && strconv.FormatUint(n, 10) != text {
		err = strconv.ErrSyntax
	}
	return uint16(n), err
}

// Published are the entries of egress.publish, which must have been validated.
func (e Egress) Published() []Published {
	var out []Published
	for _, text := range e.Publish {
		if p, err := ParsePublish(text); err == nil {
			out = append(out, p)
		}
	}
	return out
}

// published judges the entries. One address and port can be listened on once.
func (c *checker) published() {
	taken := map[netip.AddrPort]string{}
	for i, text := range c.h.Egress.Publish {
		at := element("$.egress.publish", i)
		p, err := ParsePublish(text)
		if err != nil {
			if text != "" { // reported by the schema
				c.fault(at, text, err.Error(), publishRemedy)
			}
			continue
		}
		where := netip.AddrPortFrom(p.Address, p.HostPort)
		if other, twice := taken[where]; twice && p.HostPort != 0 {
			c.fault(at, text, "is on the host's port of "+other+" too", "choose another port")
			continue
		}
		taken[where] = at
	}
}
