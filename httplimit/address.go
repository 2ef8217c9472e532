package httplimit

import (
	"fmt"
	"net/http"
	"net/netip"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// AddressConfig says how to find a client's address behind proxies. Only the proxies with Trusted
// addresses are believed; the default is none. They tell the client's address in Header, by default
// X-Forwarded-For. UnixSocket trusts requests that come over a Unix socket. IPv4Bits and IPv6Bits
// are the part of an address that is the key, by default 32 and 64 bits.
type AddressConfig = edge.AddressConfig

// Addresses finds the addresses of clients. It is safe for concurrent use.
type Addresses struct{ finder edge.Addresses }

// NewAddresses makes an Addresses. A nil config trusts no proxy. An error is
// [ratelimit.ErrInvalid], and names every invalid field: it is a *[ratelimit.FieldError], or
// several joined.
func NewAddresses(config *AddressConfig) (*Addresses, error) {
	var c AddressConfig
	if config != nil {
		c = *config
	}
	c.Header = http.CanonicalHeaderKey(c.Header)
	finder, err := edge.NewAddresses("httplimit", c)
	if err != nil {
		return nil, err
	}
	return &Addresses{*finder}, nil
}

// Key returns the client's address with the bits of the config: "192.0.2.1/32" or "2001:db8::/64".
// It is a [Key].
func (a *Addresses) Key(r *http.Request) (string, error) {
	addr, err := a.Of(r)
	if err != nil {
		return "", err
	}
	return a.finder.Key(addr)
}

// KeyOf returns the key of an address, for an override, a pause or a reset. The error for an
// invalid address is [ratelimit.ErrInvalid].
func (a *Addresses) KeyOf(addr netip.Addr) (string, error) {
	if !addr.IsValid() {
		return "", &ratelimit.FieldError{Package: "httplimit", Field: "Address", Value: addr, Reason: "must be valid"}
	}
	return a.finder.Key(addr)
}

// Of returns the client's address. It goes from this server towards the client, and returns the
// first hop that is not a trusted proxy. If all hops are trusted, it returns the furthest. If a
// trusted proxy gives no valid address, it returns that proxy's own, so that an invalid header
// makes no new key.
func (a *Addresses) Of(r *http.Request) (netip.Addr, error) {
	addr, err := a.finder.Of(r.RemoteAddr, r.Header[a.finder.Header()])
	if err != nil {
		return addr, fmt.Errorf("httplimit: RemoteAddr is %q: %w", r.RemoteAddr, err)
	}
	return addr, nil
}
