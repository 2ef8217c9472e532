package ratelimit

import (
	"math"
	"time"
)

// FixedWindow is a limit that refills all at once: with Rate tokens at the edge
// of each window of length Period, up to Capacity. A Capacity above
// Rate lets unused windows roll over.
type FixedWindow struct {
	// Name is the limit's identity in the database, together with the key.
	// Required, at most MaxNameLength bytes.
	Name string

	// Rate is how many tokens are refilled at each window's start. Required,
	// positive, may be a fraction; below 1 only with a Capacity.
	Rate float64

	// Period is the length of a window. Required, positive, in whole
	// microseconds (PostgreSQL's resolution).
	Period time.Duration

	// Capacity is the most tokens that accumulate. Zero means Rate; None means
	// none, so that only reservations succeed.
	Capacity float64

	// MaxReserved is how deep into debt reservations may take the limit; the
	// bound is inclusive. Zero means unlimited (in effect, what is refilled
	// during MaxSpan), which is right for a queue: each job gets an instant, however
	// many there are, and none is refused. Where somebody waits, set it: to wait no
	// longer than w, to Rate · w / Period, and a reservation that would be due later
	// is refused. None means no debt.
	MaxReserved float64

	// Shards spreads each key over that many rows, so that a limit that
	// all calls take from is not one hot row. Zero means 1.
	Shards int

	// Start is an instant at which a window starts; the others follow from it
	// by Period, in both directions. The zero time gives each key a phase of
	// its own, a hash of name and key, so that not all customers' windows
	// open in the same instant; it is the same on every machine.
	Start time.Time
}

// For implements [Limit].
func (l FixedWindow) For(key string) Request { return l.ForN(key, 1) }

// ForN implements [Limit].
func (l FixedWindow) ForN(key string, n float64) Request {
	return Request{Limit: l, Key: key, Count: n}
}

// Validate implements [Limit].
func (l FixedWindow) Validate() error {
	f := fields{l.Name, l.Rate, l.Period, l.Capacity, l.MaxReserved, l.Shards}.check()
	if y := l.Start.UTC().Year(); y < 1 || y > 9999 {
		f.add("Start", l.Start, "must be in the years 1 to 9999")
	}
	return f.err()
}

// Definition implements [Limit].
func (l FixedWindow) Definition() Definition {
	return Definition{
		Name: l.Name, Kind: KindFixedWindow, Rate: l.Rate, Period: l.Period,
		Capacity:    orDefault(l.Capacity, l.Rate),
		MaxReserved: orDefault(l.MaxReserved, math.Inf(1)),
		Shards:      max(l.Shards, 1),
		Start:       l.Start.Round(0).UTC(), // comparable: no monotonic clock, one zone
	}
}

func (FixedWindow) sealed() {}
