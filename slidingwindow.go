package ratelimit

import (
	"fmt"
	"math"
	"time"
)

// MaxSlots is the largest number of slots of a [SlidingWindow].
const MaxSlots = 1000

// defaultSlots loses a seventeenth of the rate of a flood, and keeps a row small.
const defaultSlots = 16

// SlidingWindow is a limit that never grants more than Rate in any stretch of Period. It is for
// third parties that document "no more than 100 in any 60 seconds", and ban callers that exceed it.
//
// Time is cut into slots of Period / Slots. Tokens come back Slots + 1 slots after their own, when
// no window holds both. So idleness brings all of Rate back, and a flood gets Slots / (Slots + 1)
// of it.
//
// An allowed call counts in the slot of its Status.At. A reservation is for the start of a slot,
// and its work may start up to SlotWidth late. Reservations are served in order, and nothing is
// allowed before them. More:
// https://github.com/pgratelimit/ratelimit/blob/main/docs/limits.md#sliding-windows.
type SlidingWindow struct {
	// Name is the limit's identity in the database, together with the key.
	// Required, at most MaxNameLength bytes. A limit that was of another kind
	// needs a new name: while programs with both are at work, the bound of neither is kept.
	Name string

	// Rate is how many tokens any window may hold, and so also the largest
	// count, and the largest burst. Required, at least 1, may be a fraction.
	Rate float64

	// Period is the length of a window. Required, positive, in whole
	// microseconds (PostgreSQL's resolution).
	Period time.Duration

	// Slots is the number of slots that the period is cut into, at most MaxSlots. More of them
	// waste less of the rate, make rows larger (by 8 bytes each), and allow work to start less
	// late. Zero means 16.
	Slots int

	// MaxReserved is how far ahead reservations may go, as the tokens that Rate
	// is in that time; the bound is inclusive. With a Rate of 100 a minute, 50
	// are 30 seconds. Zero means unlimited (in effect, MaxSpan), which is right for a
	// queue of jobs; where somebody waits, set it. None means not at all.
	MaxReserved float64

	// Shards spreads each key over that many rows, so that a limit that
	// all calls take from is not one hot row. Zero means 1.
	Shards int

	// Start is an instant at which a slot starts; the others follow from it, in
	// both directions. The zero time gives each key a phase of its own, a hash of
	// name and key.
	Start time.Time
}

// For implements [Limit].
func (l SlidingWindow) For(key string) Request { return Request{Limit: l, Key: key, Count: 1} }

// ForN implements [Limit].
func (l SlidingWindow) ForN(key string, n float64) Request {
	return Request{Limit: l, Key: key, Count: n}
}

// Validate implements [Limit].
func (l SlidingWindow) Validate() error {
	capacity := 0.0
	if badRate(l.Rate) == "" {
		capacity = l.Rate
	}
	f := FixedWindow{Name: l.Name, Rate: l.Rate, Period: l.Period, Capacity: capacity, MaxReserved: l.MaxReserved, Shards: l.Shards}.check()
	if l.Rate < 1 && !f.have("Rate") {
		f.add("Rate", l.Rate, "can never grant a whole token, since no window holds more: state the rate over a longer period")
	}
	if y := l.Start.UTC().Year(); y < 1 || y > 9999 {
		f.add("Start", l.Start, "must be in the years 1 to 9999")
	}
	if l.Slots < 0 || l.Slots > MaxSlots {
		f.add("Slots", l.Slots, fmt.Sprintf("must be from 1 to %d (0 means %d)", MaxSlots, defaultSlots))
	}
	return f.err()
}

// Definition implements [Limit].
func (l SlidingWindow) Definition() Definition {
	d := Definition{
		Name: l.Name, Kind: KindSlidingWindow, Rate: l.Rate, Period: l.Period,
		Capacity:    l.Rate,
		MaxReserved: orDefault(l.MaxReserved, math.Inf(1)),
		Shards:      max(l.Shards, 1),
		Start:       l.Start.Round(0).UTC(), // comparable: no monotonic clock, one zone
		Slots:       l.Slots,
	}
	if d.Slots == 0 {
		d.Slots = defaultSlots
	}
	return d
}

func (SlidingWindow) sealed() {}

// SlotWidth returns the length of a sliding window's slot: how late the work of a reservation
// may start so that the bound is kept. It is Period / Slots, rounded up to a whole microsecond.
// It is 0 for the other kinds, whose bound is for work that starts on time.
func (d *Definition) SlotWidth() time.Duration { return d.bucket().SlotWidth() }
