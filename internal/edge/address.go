package edge

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// AddressConfig says how to find a client's address behind proxies.
type AddressConfig struct {
	// Trusted are the addresses of trusted proxies; the default is none. Headers of requests from
	// other addresses are ignored.
	Trusted []netip.Prefix

	// Header is the header in which trusted proxies pass on a client's address: X-Forwarded-For,
	// Forwarded (RFC 7239), or one with a single address such as X-Real-IP. Every trusted proxy
	// must append to it or replace it. Other headers are ignored, because clients can send them.
	// The default is X-Forwarded-For.
	Header string

	// UnixSocket trusts requests over a Unix socket, which has no address, like a proxy on the same
	// machine. Without it they fail.
	UnixSocket bool

	// IPv4Bits and IPv6Bits are how many bits of an address make the key: a customer has many IPv6
	// addresses. The defaults are 32 and 64.
	IPv4Bits, IPv6Bits int
}

// Addresses finds the addresses of clients. It is safe for concurrent use.
type Addresses[R any] struct {
	pkg    string
	config AddressConfig
	peer   func(r R, header string) (remote string, lines []string)
}

// NewAddresses makes an Addresses; a nil config trusts no proxy. Its errors name the package. peer
// returns the peer of a request's connection, and the values of a header.
func NewAddresses[R any](pkg string, config *AddressConfig, peer func(r R, header string) (remote string, lines []string)) (*Addresses[R], error) {
	var c AddressConfig
	if config != nil {
		c = *config
	}
	c.Trusted = slices.Clone(c.Trusted)
	f := Faults{Package: pkg}
	for i, p := range c.Trusted {
		f.Must(p.IsValid(), fmt.Sprintf("Trusted[%d]", i), p, "must be a valid prefix")
		c.Trusted[i] = unmapped(p)
	}
	f.Must(c.IPv4Bits >= 0 && c.IPv4Bits <= 32, "IPv4Bits", c.IPv4Bits, "must be 1 to 32")
	f.Must(c.IPv6Bits >= 0 && c.IPv6Bits <= 128, "IPv6Bits", c.IPv6Bits, "must be 1 to 128")
	if err := f.Err(); err != nil {
		return nil, err
	}
	c.Header = cmp.Or(c.Header, "X-Forwarded-For")
	c.IPv4Bits = cmp.Or(c.IPv4Bits, 32)
	c.IPv6Bits = cmp.Or(c.IPv6Bits, 64)
	return &Addresses[R]{pkg, c, peer}, nil
}

// unmapped returns p as addresses are compared: ::ffff:10.0.0.0/104 becomes 10.0.0.0/8.
func unmapped(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		return netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p
}

// Key returns the client's address with the bits of the config: "192.0.2.1/32" or "2001:db8::/64".
func (a *Addresses[R]) Key(r R) (string, error) {
	addr, err := a.Of(r)
	if err != nil {
		return "", err
	}
	return a.KeyOf(addr)
}

// KeyOf returns the key of an address, for an override, a pause or a reset. The error for an
// invalid address is [ratelimit.ErrInvalid].
func (a *Addresses[R]) KeyOf(addr netip.Addr) (string, error) {
	addr = addr.WithZone("").Unmap()
	bits := a.config.IPv6Bits
	switch {
	case !addr.IsValid():
		return "", Invalid(a.pkg, "Address", addr, "must be valid")
	case addr.Is4():
		bits = a.config.IPv4Bits
	}
	prefix, err := addr.Prefix(bits)
	return prefix.String(), err
}

// Of returns the client's address. Going from this server towards the client, that is the first hop
// that is not a trusted proxy; if all are trusted, the last. If a trusted proxy gives no valid
// address, it is the proxy's own, so an invalid header makes no new key.
func (a *Addresses[R]) Of(r R) (netip.Addr, error) {
	remote, lines := a.peer(r, a.config.Header)
	addr, ok := parseNode(remote)
	trusted := a.trusts(addr) || !ok && a.config.UnixSocket
	for i := len(lines) - 1; i >= 0 && trusted; i-- {
		for rest, more := lines[i], true; more && trusted; {
			var hop string
			rest, hop, more = last(rest, ',')
			next, isAddress := a.parse(hop)
			trusted = isAddress && a.trusts(next)
			if isAddress {
				addr, ok = next, true
			}
		}
	}
	if !ok {
		return netip.Addr{}, fmt.Errorf("%s: the peer is %q: neither it nor a trusted proxy has an address", a.pkg, remote)
	}
	return addr, nil
}

func (a *Addresses[R]) trusts(addr netip.Addr) bool {
	for _, p := range a.config.Trusted {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

func (a *Addresses[R]) parse(hop string) (netip.Addr, bool) {
	if strings.EqualFold(a.config.Header, "Forwarded") {
		return parseForwarded(hop)
	}
	return parseNode(hop)
}

// last splits the last element off a list. It reads from the right, where trusted proxies write. So
// an open quote further to the left, from a client, cannot swallow their elements.
func last(list string, separator byte) (rest, element string, more bool) {
	quoted := false
	for i := len(list) - 1; i >= 0; i-- {
		switch list[i] {
		case '"':
			quoted = quoted != !escaped(list, i)
		case separator:
			if !quoted {
				return list[:i], list[i+1:], true
			}
		}
	}
	return "", list, false
}

// escaped reports whether the quote at i is escaped in a quoted string.
func escaped(s string, i int) bool {
	before := strings.TrimRight(s[:i], `\`)
	return (i-len(before))%2 == 1
}

// parseForwarded returns the address in an element of a Forwarded header. It finds none in
// for=unknown and in obfuscated names.
func parseForwarded(element string) (addr netip.Addr, ok bool) {
	found := false
	for more := true; more; {
		var pair string
		element, pair, more = last(element, ';')
		name, value, _ := strings.Cut(strings.TrimSpace(pair), "=")
		if !strings.EqualFold(strings.TrimSpace(name), "for") {
			continue
		}
		if found {
			return netip.Addr{}, false
		}
		found = true
		value = strings.TrimSpace(value)
		if inner, quoted := strings.CutPrefix(value, `"`); quoted {
			value, quoted = strings.CutSuffix(inner, `"`)
			if !quoted {
				return netip.Addr{}, false
			}
		}
		addr, ok = parseNode(value)
	}
	return addr, ok
}

// parseNode returns the address in "192.0.2.1", "192.0.2.1:80", "2001:db8::1", "[2001:db8::1]" or
// "[2001:db8::1]:80". It drops the zone, and unmaps IPv4.
func parseNode(s string) (netip.Addr, bool) {
	s = strings.TrimSpace(s)
	if withPort, err := netip.ParseAddrPort(s); err == nil {
		return withPort.Addr().WithZone("").Unmap(), true
	}
	if strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]") {
		s = s[1 : len(s)-1]
	}
	addr, err := netip.ParseAddr(s)
	return addr.WithZone("").Unmap(), err == nil
}
