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

// Key returns the key of the limit that a call takes from. An error that is a status of the
// caller's fault, such as InvalidArgument, Unauthenticated or PermissionDenied, is the answer; any
// other error counts as a failure of the store. Never use a value that a client can choose freely:
// it would choose a new one for each call.
//
// Keys are stored in the database as they are, and its log may name them; see [Hashed] for secrets.
type Key = func(*Call) (string, error)

// ForAll returns one key for all calls.
func ForAll(*Call) (string, error) { return "", nil }

// ByMetadata returns the value of metadata that was authenticated before, such as an API key;
// [Hashed] keeps it out of the database. Use it only where nobody can make up a value: see
// [BySubject]. Without the value, or with several, the answer is InvalidArgument.
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

// BySubject returns the user that authentication put into the call's context. Without one, "", the
// answer is Unauthenticated.
func BySubject(subject func(context.Context) string) Key {
	return func(c *Call) (string, error) {
		if s := subject(c.Context); s != "" {
			return s, nil
		}
		return "", status.Error(codes.Unauthenticated, "the call must be authenticated")
	}
}

// ByMethod returns the full name of the method, such as "/shop.Orders/Place". With an
// UnknownServiceHandler clients can choose it.
func ByMethod(c *Call) (string, error) { return c.Method, nil }

// Join joins several keys into one, such as a user and a method. Different parts make different
// keys: see [ratelimit.Key].
func Join(key Key, keys ...Key) Key { return edge.Join(key, keys...) }

// FirstOf returns the first key that the call has, such as the user's, or else the address. The
// place in the list is part of the key, so nobody can take another's address for a name.
func FirstOf(keys ...Key) Key {
	return edge.FirstOf(isFault, status.Error(codes.InvalidArgument, "the call has no key"), keys...)
}

// Hashed returns the SHA-256 of a key in base64, for secrets, keys of any length, and keys that are
// not UTF-8. It hides only values that cannot be guessed: not addresses.
func Hashed(key Key) Key { return edge.Hashed(key) }

// HashedKey returns what [Hashed] makes of a key, for overrides, pauses and resets.
func HashedKey(key string) string { return edge.Hash(key) }

// PlacedKey returns what [FirstOf] makes of the key at a place in its list, counted from 0.
func PlacedKey(place int, key string) string { return edge.Place(place, key) }

// Cost returns how many tokens a call takes; 0 takes none. Its errors are answered as a [Key]'s. A
// client's own claim must not make its call cheaper.
type Cost = func(*Call) (float64, error)

// Fixed returns the same cost for all calls.
func Fixed(n float64) Cost {
	return func(*Call) (float64, error) { return n, nil }
}

// faults are the codes that blame the caller.
var faults = []codes.Code{
	codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied,
	codes.FailedPrecondition, codes.OutOfRange, codes.Unauthenticated,
}

// statusOf returns the status in err, or nil.
func statusOf(err error) *status.Status {
	var s interface{ GRPCStatus() *status.Status }
	if errors.As(err, &s) {
		return s.GRPCStatus()
	}
	return nil
}

// isFault reports whether err blames the caller.
func isFault(err error) bool {
	s := statusOf(err)
	return s != nil && slices.Contains(faults, s.Code())
}
