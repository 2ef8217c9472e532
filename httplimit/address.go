package httplimit

import (
	"net/http"

	"github.com/pgratelimit/ratelimit/internal/edge"
)

// AddressConfig says how to find a client's address behind proxies. Only the proxies with Trusted
// addresses are believed; the default is none. They tell the client's address in Header, by default
// X-Forwarded-For. UnixSocket trusts requests that come over a Unix socket. IPv4Bits and IPv6Bits
// are the part of an address that is the key, by default 32 and 64 bits.
type AddressConfig = edge.AddressConfig

// Addresses finds the addresses of clients. Its method Key is a [Key], Of returns a request's
// address, and KeyOf the key of an address. It is safe for concurrent use.
type Addresses = edge.Addresses[*http.Request]

// NewAddresses makes an Addresses. A nil config trusts no proxy. An error is
// [ratelimit.ErrInvalid], and names every invalid field: it is a *[ratelimit.FieldError], or
// several joined.
func NewAddresses(config *AddressConfig) (*Addresses, error) {
	return edge.NewAddresses("httplimit", config, func(r *http.Request, header string) (string, []string) {
		return r.RemoteAddr, r.Header.Values(header)
	})
}
