package edge

import (
	"encoding/base64"
	"encoding/hex"
	"net/netip"
	"regexp"
	"strings"

	"github.com/pgratelimit/ratelimit"
)

// Shape returns the form of a key, by which doctor recognizes keys that a middleware derives. It
// returns "address", "IPv4/32" or "IPv6/64" for networks as Addresses makes them, "hash",
// "hexadecimal" for a hash written otherwise, "empty" or "text". For a key of several parts it
// returns theirs, joined by colons.
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

// whole returns the form of a key as one part; "text" if it has no other.
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

// hashed is the length of a hash in bytes.
const hashed = 32

// split returns the parts of a key that ratelimit.Key made.
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

// network matches a network in a shape; $1 is its family.
var network = regexp.MustCompile(`(IPv[46])/[0-9]+`)

// Alike reports whether key can be one of the keys with these shapes; there is at least one.
// Networks of IPv4 and IPv6 are alike, unless shapes has another width for key's family.
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

// Like returns the key that a middleware derives from key, as it derived another: the network of an
// address, the hash of a text, the place in FirstOf. It returns false if it cannot tell.
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
