package bucket

import (
	"hash/fnv"
	"io"
	"math"
	"time"
)

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
	return int64(Hash(d.Name, key) % uint64(d.Period.Microseconds()))
}

// Hash returns a hash of texts, the same on every machine and for ever.
func Hash(texts ...string) uint64 {
	h := fnv.New64a()
	for i, text := range texts {
		if i > 0 {
			h.Write([]byte{0}) // in no name and no key, so ("a", "bc") is not ("ab", "c")
		}
		io.WriteString(h, text)
	}
	return mix(h.Sum64())
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
