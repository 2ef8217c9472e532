package grpclimit

import (
	"fmt"
	"net/netip"
	"strings"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// AddressConfig says how the client's address is found behind proxies: Trusted are the addresses of
// the proxies whose word is believed, none by default; Header is the one metadata in which they tell
// it, x-forwarded-for by default; UnixSocket trusts calls over a Unix socket; IPv4Bits and IPv6Bits
// are how much of an address is the key, 32 and 64 by default.
type AddressConfig = edge.AddressConfig

// Addresses finds the addresses of clients. It is safe for concurrent use.
type Addresses struct{ finder edge.Addresses }

// NewAddresses returns an Addresses. A nil config trusts no proxy. Errors are
// [ratelimit.ErrInvalid] and report every fault: a *[ratelimit.FieldError], or several joined.
func NewAddresses(config *AddressConfig) (*Addresses, error) {
	var c AddressConfig
	if config != nil {
		c = *config
	}
	finder, err := edge.NewAddresses("grpclimit", c)
	if err != nil {
		return nil, err
	}
	return &Addresses{*finder}, nil
}

// Key returns the client's address, cut as the config says: "192.0.2.1/32" or "2001:db8::/64". It
// is a [Key].
func (a *Addresses) Key(c *Call) (string, error) {
	addr, err := a.Of(c)
	if err != nil {
		return "", err
	}
	return a.finder.Key(addr)
}

// KeyOf returns the key of an address, for overrides, pauses and resets. An invalid address is
// [ratelimit.ErrInvalid].
func (a *Addresses) KeyOf(addr netip.Addr) (string, error) {
	if !addr.IsValid() {
		return "", &ratelimit.FieldError{Package: "grpclimit", Field: "Address", Value: addr, Reason: "must be valid"}
	}
	return a.finder.Key(addr)
}

// Of returns the client's address: the nearest hop, going from this server towards the client, that
// is not a trusted proxy. If all hops are trusted, it is the furthest. Where a trusted proxy gives
// no readable address, it is the proxy's own, so that a client cannot get a new key by sending
// garbage.
func (a *Addresses) Of(c *Call) (netip.Addr, error) {
	remote := ""
	if p, ok := peer.FromContext(c.Context); ok && p.Addr != nil {
		remote = p.Addr.String()
	}
	addr, err := a.finder.Of(remote, metadata.ValueFromIncomingContext(c.Context, strings.ToLower(a.finder.Header())))
	if err != nil {
		return addr, fmt.Errorf("grpclimit: the peer is %q: %w", remote, err)
	}
	return addr, nil
}
