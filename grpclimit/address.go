package grpclimit

import (
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/pgratelimit/ratelimit/internal/edge"
)

// AddressConfig says how the client's address is found behind proxies: Trusted are the addresses of
// the proxies whose word is believed, none by default; Header is the one metadata in which they tell
// it, x-forwarded-for by default; UnixSocket trusts calls over a Unix socket; IPv4Bits and IPv6Bits
// are how much of an address is the key, 32 and 64 by default.
type AddressConfig = edge.AddressConfig

// Addresses finds the addresses of clients. Its method Key is a [Key], Of returns a call's address,
// and KeyOf the key of an address. It is safe for concurrent use.
type Addresses = edge.Addresses[*Call]

// NewAddresses returns an Addresses. A nil config trusts no proxy. Errors are
// [ratelimit.ErrInvalid] and report every fault: a *[ratelimit.FieldError], or several joined.
func NewAddresses(config *AddressConfig) (*Addresses, error) {
	return edge.NewAddresses("grpclimit", config, func(c *Call, header string) (remote string, lines []string) {
		if p, ok := peer.FromContext(c.Context); ok && p.Addr != nil {
			remote = p.Addr.String()
		}
		return remote, metadata.ValueFromIncomingContext(c.Context, header)
	})
}
