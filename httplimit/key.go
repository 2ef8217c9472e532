package httplimit

import (
	"errors"
	"net/http"

	"github.com/pgratelimit/ratelimit/internal/edge"
)

// Key returns the key that a request takes from. A *[RequestError] is answered with its status, and
// any other error like a failure of the store. Do not take a value that a client can choose freely:
// it would choose a new one for each request.
//
// Keys are stored in the database, and the database's own errors may show them; see [Hashed] for
// secrets.
type Key = func(*http.Request) (string, error)

// ForAll returns "", one key for all requests.
func ForAll(*http.Request) (string, error) { return "", nil }

// ByHeader returns a key that is the value of a header, such as an API key that was checked before:
// see [BySubject]. Use [Hashed] for secrets. Without the header the request is answered 400. So it
// is with several values, since the handler may read another one.
func ByHeader(name string) Key {
	name = http.CanonicalHeaderKey(name)
	return func(r *http.Request) (string, error) {
		values := r.Header[name]
		if len(values) != 1 || values[0] == "" {
			return "", &RequestError{http.StatusBadRequest, "header " + name + " must be given once"}
		}
		return values[0], nil
	}
}

// BySubject returns a key that is the user whom authentication has found, such as in the request's
// context. If subject returns "", the request is answered 401.
func BySubject(subject func(*http.Request) string) Key {
	return func(r *http.Request) (string, error) {
		if s := subject(r); s != "" {
			return s, nil
		}
		return "", &RequestError{http.StatusUnauthorized, "the request must be authenticated"}
	}
}

// ByRoute returns a key that is the pattern by which mux serves a request, such as "GET
// /orders/{id}". Requests that match no pattern share one key. A nil mux is for a middleware around
// single handlers, behind the mux.
func ByRoute(mux *http.ServeMux) Key {
	return func(r *http.Request) (string, error) {
		if mux == nil {
			return r.Pattern, nil
		}
		_, pattern := mux.Handler(r)
		return pattern, nil
	}
}

// Join returns a key of several parts, such as a user and a route. Different parts make different
// keys: see [ratelimit.Key].
func Join(key Key, keys ...Key) Key { return edge.Join(key, keys...) }

// FirstOf returns the first of several keys that the request has, such as its user's, or else its
// address. Keys of different places in the list differ, so a user name that looks like an address
// is another key.
func FirstOf(keys ...Key) Key {
	return edge.FirstOf(isRequestError, &RequestError{http.StatusBadRequest, "the request has no key"}, keys...)
}

// Hashed returns a key that is the SHA-256 of key in base64. It is for keys that are secret, long,
// or not UTF-8. It does not hide keys that can be guessed, such as addresses.
func Hashed(key Key) Key { return edge.Hashed(key) }

// HashedKey returns the key that [Hashed] makes of key, for an override, a pause or a reset.
func HashedKey(key string) string { return edge.Hash(key) }

// PlacedKey returns the key that [FirstOf] makes of the key at a place in its list, counted from 0.
func PlacedKey(place int, key string) string { return edge.Place(place, key) }

// RequestError is a fault of the request, such as a missing header. A [Key], a [Cost] and a
// Policy.Tier may return one. The client gets Status and Detail.
type RequestError struct {
	Status int    // 400 to 499
	Detail string // for the client: name the missing part, without the key
}

func (e *RequestError) Error() string { return "httplimit: " + e.Detail }

// isRequestError reports whether an error is a fault of the request.
func isRequestError(err error) bool {
	var request *RequestError
	return errors.As(err, &request)
}
