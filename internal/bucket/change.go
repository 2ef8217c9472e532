package bucket

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/slots"
)

// Change returns the rows of key at now when the definition to replaces d. Each state is a row of
// d, in the order of shards. Used tokens stay used: the value changes by as much as the capacity
// does. A cut leaves no debt, and debt stays. A pause stays. A past edge refills nothing.
//
// Tokens that are out count as unused: a row that was cut owes them until they come back. The new
// rows share all tokens evenly. A row with tokens out gets at most the capacity less the tokens
// that it owes; outs may be nil. Rows that only d has become empty: to a program that still has d,
// a missing row would be full.
func (d *Definition) Change(to *Definition, key string, states []State, outs []Out, now time.Time) []State {
	each, empty := d.kind().change(d, to, key, states, allOut(outs, now), now)
	if to.Capacity != d.Capacity && !each.Paused.After(now) { // it is over, or a mark, which is of the value before
		each.Paused, empty.Paused = time.Time{}, time.Time{}
	}
	rows, share := make([]State, max(len(states), to.Shards)), to.Shard()
	for shard := range rows {
		if rows[shard] = empty; shard >= to.Shards {
			continue
		}
		rows[shard] = each
		if shard < len(outs) && !to.Slotted() {
			rows[shard].Value = min(each.Value, max(0, share.Capacity-share.Owed(outs[shard], now)))
		}
	}
	return rows
}

// allOut returns the tokens that are out of all rows together.
func allOut(outs []Out, now time.Time) (all Out) {
	for _, out := range outs {
		if out.Tokens > 0 && out.Until.After(now) {
			all = Out{Tokens: all.Tokens + out.Tokens, Until: Later(all.Until, out.Until)}
		}
	}
	return all
}

// Floors reports whether a cut from d to the definition to takes less than the difference of their
// capacities, because more was used or there is debt. Then the rows do not show what was left
// before.
func (d *Definition) Floors(to *Definition, states []State, outs []Out, now time.Time) bool {
	total, shard := allOut(outs, now).Tokens, d.Shard()
	for _, s := range states {
		total += shard.Refill(s, now).Value
	}
	return total+(to.Capacity-d.Capacity) < min(total, 0)
}

func (*level) change(d, to *Definition, key string, states []State, out Out, now time.Time) (each, empty State) {
	shard := d.Shard()
	for i, s := range states {
		s = shard.Refill(s, now)
		each.Value += s.Value
		each.Paused = Later(each.Paused, s.Paused)
		if i == 0 || s.TS.After(each.TS) { // the latest: a pause sets ts ahead
			each.TS = s.TS
		}
	}
	total := each.Value + out.Tokens // they may come back
	left := min(to.Capacity, max(total+(to.Capacity-d.Capacity), min(total, 0))) - out.Tokens
	each.Value, each.TS = left/float64(to.Shards), d.begins(to, key, each, out, now)
	return each, State{TS: each.TS, Paused: each.Paused}
}

// Mark returns a pause that marks rows as changed at an instant: one that ended a hundred years
// before it. The mark needs no column, and takes leave it alone. It goes when the row goes or is
// paused.
func Mark(at time.Time) time.Time { return at.Add(-36500 * 24 * time.Hour).Truncate(time.Microsecond) }

// MarkUncut returns the mark of rows whose values still belong to the capacity before a cut.
func MarkUncut(at time.Time) time.Time { return Mark(Mark(at)) }

// Raise returns a row at now, raised to d. At since its value was right for the definition by[0].
// All definitions of by may have taken from it and filled it meanwhile. The value rises by the
// difference of the capacities, less the tokens that can have come in since: a definition with more
// capacity fills a row further. A sliding window stays as it is, and so does a window after an
// edge. The value of an uncut row was right for by[1]; if d has less capacity the row is cut.
func (d *Definition) Raise(by []*Definition, uncut bool, s State, out Out, since, now time.Time) State {
	marked := s
	s = d.Refill(s, now)
	if d.Slotted() || d.Stepped() && s.TS.After(since) {
		return s
	}
	was := by[0].Capacity
	if uncut {
		was = by[1].Capacity
	}
	if uncut && d.Capacity < was {
		before := *d
		before.Capacity = was // what is left above d's counts as well
		s = before.Refill(marked, now)
		s.Value = max(s.Value+d.Capacity-was, min(s.Value, 0))
		return s
	}
	came := d.Inflow(max(0, s.TS.Sub(since)))
	for _, b := range by {
		came = max(came, b.Inflow(max(0, s.TS.Sub(since))))
	}
	s.Value = max(s.Value, min(s.Value+d.Capacity-was-came, d.Capacity-d.Owed(out, now)))
	return s
}

// begins returns the ts of a settled row when the definition to replaces d. A window of another
// length begins at its newest past edge, but not before the end of tokens that are out. If only the
// edges move, no tokens come in sooner than by d: edges that are moved to tomorrow each day must
// not refill each day. By the calendar the row then keeps its ts: see refill.
func (d *Definition) begins(to *Definition, key string, s State, out Out, now time.Time) time.Time {
	switch {
	case d.Kind != FixedWindow:
		return s.TS
	case d.Every == to.Every && d.Period == to.Period:
		if to.Every != 0 {
			return to.Refill(s, now).TS // an edge that is past counts, and refills nothing
		} else if d.Start.Equal(to.Start) {
			return s.TS
		}
		return to.Fresh(key, s.TS.Add(to.Period-time.Microsecond)).TS
	}
	from := Later(now, out.Until.Add(-time.Microsecond))
	if !s.Paused.After(now) {
		from = Later(from, s.TS)
	}
	begins := to.Fresh(key, from).TS
	if s.Paused.After(now) && to.Every == 0 {
		begins = Later(begins, s.Paused.Add(-to.Period))
	}
	return begins
}

// change adds the rows up slot by slot, up to the newest slot of all. If to has other slots, all
// tokens go to its newest one.
func (w *slidingWindow) change(d, to *Definition, key string, states []State, out Out, now time.Time) (each, empty State) {
	shard := d.Shard()
	settled := make([]State, len(states))
	for i, s := range states {
		settled[i] = shard.Refill(s, now)
		each.TS, each.Paused = Later(each.TS, settled[i].TS), Later(each.Paused, s.Paused)
	}
	newest := each.TS.UnixMicro()
	for _, s := range settled {
		newest = max(newest, shard.slotStart(s, 0))
	}
	total := slots.New(d.Tick(), d.Slots)
	total.Ahead = (newest - each.TS.UnixMicro()) / total.Width
	for _, s := range settled {
		moved := s.Slots.Move((newest-shard.slotStart(s, 0))/total.Width, 0)
		for i := range total.Totals {
			total.Totals[i] += moved.Totals[i] - moved.Base()
		}
	}
	nothing := State{TS: each.TS, Paused: each.Paused, Slots: slots.New(total.Width, d.Slots)}
	if each.Slots = total; to.Tick() != total.Width || to.Slots != d.Slots {
		each = to.moved(key, each, out, now)
	}
	for i := range each.Slots.Totals {
		each.Slots.Totals[i] /= float64(to.Shards)
	}
	return to.Shard().valued(each), shard.give(shard.valued(nothing), shard.Rate, 0)
}

// moved returns the row s in the slots of d, with all its tokens in the newest slot: the slot of
// now, of the last reservation's end, or of the end of tokens that are out, whichever is last.
func (d *Definition) moved(key string, s State, out Out, now time.Time) State {
	at := Later(now, s.TS)
	last := Later(at, out.Until.Add(-time.Microsecond))
	if s.Slots.Ahead > 0 {
		last = Later(last, instant(d.slotStart(s, 1)-1))
	}
	moved := State{TS: d.Fresh(key, at).TS, Paused: s.Paused, Slots: slots.New(d.Tick(), d.Slots)}
	moved.Slots.Ahead = d.Fresh(key, last).TS.Sub(moved.TS).Microseconds() / d.Tick()
	moved.Slots.Totals[d.Slots+1] = s.Slots.Held(0)
	return moved
}
