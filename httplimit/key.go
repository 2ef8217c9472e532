package httplimit

import (
	"errors"
	"net/http"

	"github.com/pgratelimit/ratelimit/internal/edge"
)

// Key returns the key that a request takes from. An error that is a *[RequestError] is answered
// with its status, any other as a failure of the store. A value that a client can choose freely
// is no key: it would choose a new one for each request.
//
// Keys are stored in the database and named in its errors; see [Hashed] for secrets.
type Key = func(*http.Request) (string, error)

// ForAll is one key for all requests.
func ForAll(*http.Request) (string, error) { return "", nil }

// ByHeader is the value of a header that was checked before, such as an API key, of which
// [Hashed] keeps the hash. Nobody must be able to make one up: see [BySubject].
// Without it, or with several values, of which the handler may see another one, the
// request is answered 400.
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

// BySubject is the user that authentication has found, such as from the request's
// context. Without one, "", the request is answered 401.
func BySubject(subject func(*http.Request) string) Key {
	return func(r *http.Request) (string, error) {
		if s := subject(r); s != "" {
			return s, nil
		}
		return "", &RequestError{http.StatusUnauthorized, "the request must be authenticated"}
	}
}

// ByRoute is the pattern by which mux serves a request, such as "GET /orders/{id}";
// requests that match none share one key. A nil mux is the one that has routed the
// request already, for a middleware around single handlers.
func ByRoute(mux *http.ServeMux) Key {
	return func(r *http.Request) (string, error) {
		if mux == nil {
			return r.Pattern, nil
		}
		_, pattern := mux.Handler(r)
		return pattern, nil
	}
}

// Join is a key of several, such as a user and a route. Different parts make
// different keys: see [ratelimit.Key].
func Join(key Key, keys ...Key) Key { return edge.Join(key, keys...) }

// FirstOf is the first of keys that the request has, such as the user's, or else the
// address. Keys of different places in the list differ, so nobody can take another's
// address for a name.
func FirstOf(keys ...Key) Key {
	return edge.FirstOf(isRequestError, &RequestError{http.StatusBadRequest, "the request has no key"}, keys...)
}

// Hashed returns the SHA-256 of key in base64, for keys that are secrets, of any length or not
// UTF-8. It does not hide keys that can be guessed, such as addresses.
func Hashed(key Key) Key { return edge.Hashed(key) }

// HashedKey returns the key that [Hashed] makes of one: what an override, a pause or a reset writes.
func HashedKey(key string) string { return edge.Hash(key) }

// PlacedKey returns the key that [FirstOf] makes of the one at a place in its list, counted from 0.
func PlacedKey(place int, key string) string { return edge.Place(place, key) }

// RequestError is a fault of the request, such as a header that is missing. A [Key],
// a [Cost] and a Policy.Tier may return one; the client is told Status and Detail.
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
