package edge

import (
	"crypto/sha256"
	"encoding/base64"
	"strconv"

	"github.com/pgratelimit/ratelimit"
)

// Join joins keys to one. Different parts make different keys.
func Join[R any](key func(R) (string, error), keys ...func(R) (string, error)) func(R) (string, error) {
	return func(r R) (string, error) {
		first, err := key(r)
		if err != nil {
			return "", err
		}
		rest := make([]string, len(keys))
		for i, k := range keys {
			if rest[i], err = k(r); err != nil {
				return "", err
			}
		}
		return ratelimit.Key(first, rest...), nil
	}
}

// FirstOf returns the first key that the request has, marked by its place in the list. If an error
// is a fault of the request, it tries the next key. Without keys it returns the error none.
func FirstOf[R any](fault func(error) bool, none error, keys ...func(R) (string, error)) func(R) (string, error) {
	return func(r R) (string, error) {
		err := none
		for i, k := range keys {
			var key string
			if key, err = k(r); err == nil {
				return Place(i, key), nil
			}
			if !fault(err) {
				return "", err
			}
		}
		return "", err
	}
}

// Hashed returns a function that hashes keys with Hash.
func Hashed[R any](key func(R) (string, error)) func(R) (string, error) {
	return func(r R) (string, error) {
		k, err := key(r)
		if err != nil {
			return "", err
		}
		return Hash(k), nil
	}
}

// Hash returns the SHA-256 of a key in base64.
func Hash(key string) string {
	sum := sha256.Sum256([]byte(key))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// Place returns the key that FirstOf makes of the key at a place, counted from 0.
func Place(i int, key string) string { return ratelimit.Key(strconv.Itoa(i), key) }
