package bucket

import (
	"hash/fnv"
	"io"
	"math"
	"time"
)

// fixedWindow is a level that refills all at once: a token bucket whose clock stands still between
// the edges of its windows.
type fixedWindow struct{ level }

func (*fixedWindow) String() string { return "fixed window" }

func (*fixedWindow) last(d *Definition, ts, now int64) int64 {
	return edge(ts, now, d.Period.Microseconds())
}

func (*fixedWindow) next(d *Definition, ts int64) int64 { return ts + d.Period.Microseconds() }

func (*fixedWindow) reach(d *Definition, ts int64, tokens float64) int64 {
	return ts + int64(math.Ceil(tokens/d.Rate))*d.Period.Microseconds()
}

func (w *fixedWindow) fresh(d *Definition, key string, now time.Time) State {
	return State{Value: d.Capacity, TS: instant(w.last(d, d.origin(key), now.UnixMicro()))}
}

func (*fixedWindow) refill(d *Definition, s State, now time.Time) State {
	ts := s.TS.UnixMicro()
	tick := max(ts, edge(ts, now.UnixMicro(), d.Period.Microseconds()))
	return State{Value: d.refilled(s.Value, tick-ts), TS: instant(tick), Paused: s.Paused}
}

// pause puts the next edge at until.
func (w *fixedWindow) pause(d *Definition, settled State, paused bool, now, until time.Time) State {
	return w.emptied(d, settled, paused, now, until.Add(-d.Period), until)
}

// resume gives the row its own edges back, but no edge before the end of tokens that are out: that
// edge would refill them besides.
func (w *fixedWindow) resume(d *Definition, key string, settled State, out Out, now time.Time) State {
	resumed := w.level.resume(d, key, settled, out, now)
	if d.Owed(out, now) > 0 {
		resumed.TS = Later(resumed.TS, out.Until.Add(-d.Period))
	}
	return resumed
}

func (*fixedWindow) back(d *Definition, s State, out Out, r *Return, now time.Time) (State, Out) {
	return d.backInWindow(s, out, r, now, s.Paused.After(now))
}

// backInWindow implements back for rows whose clock stands still; s is not settled. A pause
// discards the rest of a lease. If an edge has passed since the tokens were taken, it has refilled
// the row, and nothing comes back.
func (d *Definition) backInWindow(s State, out Out, r *Return, now time.Time, paused bool) (State, Out) {
	past := r.past(s, now)
	out = d.less(out, r, r.End, past)
	refilled := s.TS.After(r.Taken)
	if gone := r.leftover() && (paused || s.TS.Before(r.Taken) || !past.Before(r.End)); !refilled && !gone {
		s.Value = max(s.Value, min(s.Value+r.Count, d.Capacity-d.Owed(out, now))) // a value above Capacity stays
	}
	return s, out
}

// full puts the next edge at or after the end of the tokens that are out. Otherwise the key's own
// edges could refill a row that was paused before that end.
func (*fixedWindow) full(d *Definition, key string, s State, out Out, now time.Time) State {
	settled := d.Refill(s, now)
	full := State{Value: max(settled.Value, d.Capacity-d.Owed(out, now)), TS: Later(d.Fresh(key, now).TS, out.Until.Add(-d.Period))}
	if !s.Paused.After(now) {
		full.TS = Later(full.TS, settled.TS)
	}
	return full
}

// edge returns the last edge up to now of windows or slots with an edge at ts.
func edge(ts, now, width int64) int64 {
	past := (now - ts) % width
	if past < 0 {
		past += width
	}
	return now - past
}

// Edges are counted from firstEdge, before any instant that occurs, so that no division has a
// negative time.
var firstEdge = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()

// origin returns an edge of the fresh rows of key, from which their others are counted. Unless
// Start is set, it is shifted by a hash of the key, so the windows of different keys are spread.
// The hash stays the same for ever, since a row that was pruned must get the same edges again.
func (d *Definition) origin(key string) int64 {
	if tick := d.Tick(); !d.Start.IsZero() {
		return edge(d.Start.UnixMicro(), firstEdge+tick-1, tick)
	}
	return firstEdge + int64(Hash(d.Name, key)%uint64(d.Period.Microseconds()))
}

// Hash returns a hash of texts that never changes.
func Hash(texts ...string) uint64 {
	h := fnv.New64a()
	for i, text := range texts {
		if i > 0 {
			h.Write([]byte{0}) // no name or key holds a zero byte, so ("a", "bc") differs from ("ab", "c")
		}
		io.WriteString(h, text)
	}
	return mix(h.Sum64())
}

// mix is the finalizer of MurmurHash3 (Austin Appleby, public domain). FNV alone hardly spreads
// short keys that differ only in their last byte.
func mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	h ^= h >> 33
	return h
}
