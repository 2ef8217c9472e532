package ratelimit

import (
	"hash/fnv"
	"io"
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
	// during MaxSpan); None means no debt.
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
func (l FixedWindow) For(key string) Request { return Request{l, key, 1} }

// ForN implements [Limit].
func (l FixedWindow) ForN(key string, n float64) Request { return Request{l, key, n} }

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

// A fixed window is a token bucket whose clock stands still between the edges
// of its windows. That is all that tells the two kinds apart, here and in SQL.

// windowTick is the last edge up to now of the windows, or slots, that have one at
// edge.
func (d *Definition) windowTick(edge, now int64) int64 {
	tick := d.tick()
	past := (now - edge) % tick
	if past < 0 {
		past += tick
	}
	return now - past
}

// windowWait is how long, in microseconds, from one edge to the one at which
// tokens have been refilled.
func (d *Definition) windowWait(tokens float64) int64 {
	return int64(math.Ceil(tokens/d.Rate)) * d.Period.Microseconds()
}

// firstEdge is where edges are counted from: long before any instant that is
// asked about, so that no negative time is divided.
var firstEdge = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()

// origin is an edge of the windows, or slots, of key's rows when they are fresh.
func (d *Definition) origin(key string) int64 {
	if !d.Start.IsZero() {
		return d.windowTick(d.Start.UnixMicro(), firstEdge+d.tick()-1)
	}
	return firstEdge + d.phase(key)
}

// phase spreads the windows of different keys over the period: a hash, the
// same on every machine and for ever, since a row that was pruned must have
// the edges again that it had.
func (d *Definition) phase(key string) int64 {
	h := fnv.New64a()
	io.WriteString(h, d.Name)
	h.Write([]byte{0}) // in neither name nor key, so ("a", "bc") is not ("ab", "c")
	io.WriteString(h, key)
	return int64(mix(h.Sum64()) % uint64(d.Period.Microseconds()))
}

// mix is the finalizer of MurmurHash3 (Austin Appleby, public domain). FNV
// alone hardly spreads short keys that differ in their last byte.
func mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	h ^= h >> 33
	return h
}
