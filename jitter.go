package ratelimit

import (
	"math/bits"
	"math/rand/v2"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Jitter returns a random instant from at up to spread later, in whole microseconds, so that
// many callers with the same instant do not call at once. It only ever adds, so the promise of
// a RetryAt holds for the instant returned. A spread under a microsecond adds nothing.
func Jitter(at time.Time, spread time.Duration) time.Time {
	if spread < time.Microsecond {
		return at
	}
	return at.Add(time.Duration(rand.Int64N(spread.Microseconds())) * time.Microsecond)
}

// JitterFor returns an instant from at up to spread later, in whole microseconds. The shift is a
// share of the spread, from 0 to 1, that is always the same for an identity, such as a job's or a
// customer's ID: on every machine and for every spread. Shares are even over identities.
func JitterFor(identity string, at time.Time, spread time.Duration) time.Time {
	if spread < time.Microsecond {
		return at
	}
	shift, _ := bits.Mul64(bucket.Hash(identity), uint64(spread.Microseconds())) // the hash, as a fraction of 1, times spread
	return at.Add(time.Duration(shift) * time.Microsecond)
}
