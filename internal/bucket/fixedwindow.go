package bucket

import (
	"hash/fnv"
	"io"
	"math"
	"time"
)

// fixedWindow is a level that refills all at once. It is a token bucket with a clock that
// stands still between the edges of its windows. The two kinds differ in nothing else, here and
// in SQL.
type fixedWindow struct{ level }

func (*fixedWindow) String() string     { return "fixed window" }
func (*fixedWindow) statements() string { return "window" }

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

// pause has the next edge at until.
func (w *fixedWindow) pause(d *Definition, settled State, paused bool, now, until time.Time) State {
	return w.emptied(d, settled, paused, now, until.Add(-d.Period), until)
}

// resume gives the row its own edges back, but none before the end of the tokens that are out,
// which would be refilled besides.
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

// backInWindow is back for a row whose clock stands still, which is not settled; a pause swallows
// what is left of a lease. The edges since the tokens were taken have filled the row without them.
func (d *Definition) backInWindow(s State, out Out, r *Return, now time.Time, paused bool) (State, Out) {
	past := r.past(s, now)
	out = d.less(out, r, r.End, past)
	room := d.Capacity - d.Owed(out, now)
	switch {
	case s.TS.After(r.Taken), r.leftover() && (paused || s.TS.Before(r.Taken) || !past.Before(r.End)):
	case room < d.Capacity:
		s.Value = max(min(s.Value, d.Capacity), min(s.Value+r.Count, room))
	default:
		s.Value = min(s.Value+r.Count, max(s.Value, room))
	}
	return s, out
}

// full has the next edge not before the end of the tokens that are out: a row that was paused
// would otherwise be refilled before.
func (*fixedWindow) full(d *Definition, key string, s State, out Out, now time.Time) State {
	settled := d.Refill(s, now)
	full := State{Value: max(settled.Value, d.Capacity-d.Owed(out, now)), TS: Later(d.Fresh(key, now).TS, out.Until.Add(-d.Period))}
	if !s.Paused.After(now) {
		full.TS = Later(full.TS, settled.TS)
	}
	return full
}

// edge is the last edge up to now of windows or slots that have one at ts.
func edge(ts, now, width int64) int64 {
	past := (now - ts) % width
	if past < 0 {
		past += width
	}
	return now - past
}

// firstEdge is where edges are counted from: long before any instant that is
// asked about, so that no negative time is divided.
var firstEdge = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()

// origin is an edge of the windows, or slots, of key's rows when they are fresh: the first
// one since firstEdge, or that and a phase that spreads the windows of different keys over
// the period. That is a hash, the same on every machine and for ever, since a row that
// was pruned must have the edges again that it had.
func (d *Definition) origin(key string) int64 {
	if tick := d.Tick(); !d.Start.IsZero() {
		return edge(d.Start.UnixMicro(), firstEdge+tick-1, tick)
	}
	return firstEdge + int64(Hash(d.Name, key)%uint64(d.Period.Microseconds()))
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
