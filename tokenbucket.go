package ratelimit

import (
	"math"
	"time"
)

// TokenBucket is a limit that refills continuously: with Rate tokens a Period, up
// to Capacity. It grants at most Capacity + Rate · elapsed / Period
// over any stretch of time.
type TokenBucket struct {
	// Name is the limit's identity in the database, together with the key.
	// Required, at most MaxNameLength bytes.
	Name string

	// Rate is how many tokens are refilled per Period. Required, positive, may
	// be a fraction; below 1 only with a Capacity.
	Rate float64

	// Period is the time in which Rate tokens are refilled. Required, positive,
	// in whole microseconds (PostgreSQL's resolution).
	Period time.Duration

	// Capacity is the most tokens that can accumulate: the largest burst, and the largest count
	// that Allow can grant. Zero means Rate; None means an empty bucket, whose reservations are
	// spaced evenly.
	Capacity float64

	// MaxReserved is how many tokens of debt reservations may take the limit into; the bound is
	// inclusive. Zero means unlimited (in effect, the tokens refilled during MaxSpan), which is
	// right for a queue: every job gets an instant, and none is refused. Where a person waits,
	// set it: to wait no longer than w, set Rate · w / Period, and a reservation that would be
	// due later is refused. None means no debt.
	MaxReserved float64

	// Shards spreads each key over that many rows, so that a limit that
	// all calls take from is not one hot row. Zero means 1.
	Shards int
}

// For implements [Limit].
func (l TokenBucket) For(key string) Request { return Request{Limit: l, Key: key, Count: 1} }

// ForN implements [Limit].
func (l TokenBucket) ForN(key string, n float64) Request {
	return Request{Limit: l, Key: key, Count: n}
}

// Validate implements [Limit].
func (l TokenBucket) Validate() error {
	f := FixedWindow{Name: l.Name, Rate: l.Rate, Period: l.Period, Capacity: l.Capacity, MaxReserved: l.MaxReserved, Shards: l.Shards}.check()
	return f.err()
}

// Definition implements [Limit].
func (l TokenBucket) Definition() Definition {
	return Definition{
		Name: l.Name, Kind: KindTokenBucket, Rate: l.Rate, Period: l.Period,
		Capacity:    orDefault(l.Capacity, l.Rate),
		MaxReserved: orDefault(l.MaxReserved, math.Inf(1)),
		Shards:      max(l.Shards, 1),
	}
}

func (TokenBucket) sealed() {}
