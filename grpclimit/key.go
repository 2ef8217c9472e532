package grpclimit

import (
	"context"
	"errors"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/ratelimit/internal/edge"
)

// Key returns the key of the limit that a call takes from. An error that is a status of the call's
// own fault, such as InvalidArgument, Unauthenticated or PermissionDenied, is answered as it is,
// any other as a failure of the store. A value that a client can choose freely is no key: it would
// choose a new one for each call.
//
// Keys are stored in the database and named in its errors; see [Hashed] for secrets.
type Key = func(*Call) (string, error)

// ForAll is one key for all calls.
func ForAll(*Call) (string, error) { return "", nil }

// ByMetadata is the value of metadata that was checked before, such as an API key, of which
// [Hashed] keeps the hash. Nobody must be able to make one up: see [BySubject]. Without it, or
// with several values, of which the handler may see another one, the answer is InvalidArgument.
func ByMetadata(name string) Key {
	name = strings.ToLower(name)
	return func(c *Call) (string, error) {
		values := metadata.ValueFromIncomingContext(c.Context, name)
		if len(values) != 1 || values[0] == "" {
			return "", status.Error(codes.InvalidArgument, "metadata "+name+" must be given once")
		}
		return values[0], nil
	}
}

// BySubject is the user that authentication has found, from the call's context. Without one,
// "", the answer is Unauthenticated.
func BySubject(subject func(context.Context) string) Key {
	return func(c *Call) (string, error) {
		if s := subject(c.Context); s != "" {
			return s, nil
		}
		return "", status.Error(codes.Unauthenticated, "the call must be authenticated")
	}
}

// ByMethod is the full name of the method, such as "/shop.Orders/Place". Clients of a server
// with an UnknownServiceHandler can choose it.
func ByMethod(c *Call) (string, error) { return c.Method, nil }

// Join is a key of several, such as a user and a method. Different parts make different keys:
// see [ratelimit.Key].
func Join(key Key, keys ...Key) Key { return edge.Join(key, keys...) }

// FirstOf is the first of keys that the call has, such as the user's, or else the address.
// Keys of different places in the list differ, so nobody can take another's address for a name.
func FirstOf(keys ...Key) Key {
	return edge.FirstOf(isFault, status.Error(codes.InvalidArgument, "the call has no key"), keys...)
}

// Hashed is the SHA-256 of key in base64, for keys that are secrets, of any length or not
// UTF-8. It hides only values that cannot be guessed: not addresses.
func Hashed(key Key) Key { return edge.Hashed(key) }

// HashedKey returns the key that [Hashed] makes of one: what an override, a pause or a reset writes.
func HashedKey(key string) string { return edge.Hash(key) }

// PlacedKey returns the key that [FirstOf] makes of the one at a place in its list, counted from 0.
func PlacedKey(place int, key string) string { return edge.Place(place, key) }

// Cost says how many tokens a call takes, such as by its message; 0 takes none. Its errors are
// answered as those of a [Key]. A client's own claim must not make its call cheaper.
type Cost = func(*Call) (float64, error)

// Fixed is the same cost for all calls.
func Fixed(n float64) Cost {
	return func(*Call) (float64, error) { return n, nil }
}

// faults are the codes that say that a call itself is at fault.
var faults = []codes.Code{
	codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied,
	codes.FailedPrecondition, codes.OutOfRange, codes.Unauthenticated,
}

// statusOf returns the status that err is, or nil.
func statusOf(err error) *status.Status {
	var s interface{ GRPCStatus() *status.Status }
	if errors.As(err, &s) {
		return s.GRPCStatus()
	}
	return nil
}

// isFault reports whether an error is one of the call.
func isFault(err error) bool {
	s := statusOf(err)
	return s != nil && slices.Contains(faults, s.Code())
}
