package edge

import (
	"encoding/base64"
	"encoding/hex"
	"net/netip"
	"regexp"
	"strings"

	"github.com/pgratelimit/ratelimit"
)

// Shape returns what a key looks like, by which it is told from keys that a door makes otherwise: of
// each of its parts, with colons between them, "address", "IPv4/32" or "IPv6/64" for the network that
// Addresses makes of one, "hash", "hexadecimal" for a hash that others have written, "empty" or "text".
func Shape(key string) string {
	if kind := whole(key); kind != "text" {
		return kind
	}
	parts := split(key)
	if len(parts) == 1 {
		return "text"
	}
	for i, part := range parts {
		parts[i] = Shape(part)
	}
	return strings.Join(parts, ":")
}

// whole returns the shape of a key that is not of parts, "text" if that cannot be told.
func whole(key string) string {
	if key == "" {
		return "empty"
	}
	if _, err := netip.ParseAddr(key); err == nil {
		return "address"
	}
	if network, err := netip.ParsePrefix(key); err == nil {
		family, bits, _ := strings.Cut(network.String(), "/")
		if strings.Contains(family, ":") {
			return "IPv6/" + bits
		}
		return "IPv4/" + bits
	}
	if sum, err := base64.RawURLEncoding.DecodeString(key); err == nil && len(sum) == hashed {
		return "hash"
	}
	if sum, err := hex.DecodeString(key); err == nil && len(sum) == hashed {
		return "hexadecimal"
	}
	return "text"
}

// hashed is the bytes of a hash.
const hashed = 32

// split returns the parts of a key that ratelimit.Key has made.
func split(key string) (parts []string) {
	var part strings.Builder
	for i := 0; i < len(key); i++ {
		switch c := key[i]; {
		case c == ':':
			parts = append(parts, part.String())
			part.Reset()
		case c == '\\' && i+1 < len(key):
			i++
			part.WriteByte(key[i])
		default:
			part.WriteByte(c)
		}
	}
	return append(parts, part.String())
}

// network is the family and the bits of a network in a shape.
var network = regexp.MustCompile(`(IPv[46])/[0-9]+`)

// Alike reports whether a key may be one of those that have shapes, of which there is one at least.
// Networks of IPv4 and of IPv6 are alike, unless one of the family has other bits.
func Alike(key string, shapes map[string]bool) bool {
	shape := Shape(key)
	if shapes[shape] {
		return true
	}
	alike := false
	for s := range shapes {
		if network.ReplaceAllString(s, "$1") == network.ReplaceAllString(shape, "$1") {
			return false
		}
		alike = alike || network.ReplaceAllString(s, "") == network.ReplaceAllString(shape, "")
	}
	return alike
}

// Like returns the key that the door makes of what was given as a key, which has made another: the
// network of an address, the hash of a text, the place in FirstOf. It reports false if that cannot be
// told.
func Like(key, another string) (string, bool) {
	if parts := split(another); len(parts) == 2 && len(parts[0]) == 1 && parts[0][0] >= '0' && parts[0][0] <= '9' {
		if Shape(parts[1]) == Shape(key) {
			return ratelimit.Key(parts[0], key), true
		}
		like, ok := Like(key, parts[1])
		return ratelimit.Key(parts[0], like), ok
	}
	if of, err := netip.ParsePrefix(another); err == nil {
		addr, err := netip.ParseAddr(key)
		if given, isNetwork := netip.ParsePrefix(key); isNetwork == nil {
			addr, err = given.Addr(), nil
		}
		if err != nil || addr.WithZone("").Unmap().Is4() != of.Addr().Is4() {
			return "", false
		}
		like, err := addr.WithZone("").Unmap().Prefix(of.Bits())
		return like.String(), err == nil
	}
	return Hash(key), Shape(another) == "hash" && Shape(key) == "text"
}
