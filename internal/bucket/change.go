package bucket

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/slots"
)

// Change returns the rows of key at now when the definition to replaces d, by which states, one of
// each shard, were written. What was used stays used: the value is as much more or less as the
// capacity is, but a cut leaves no debt, and debt stays. Tokens that are out count as unused: a row
// that was cut owes them until they come back. A pause stays, and nothing is refilled
// by an edge that is past. The rows share the tokens of all, and none has more than fits beside
// the tokens of it that are out; outs may be nil. Rows that only d has are empty: to a program
// that still has d a missing one would be full.
func (d *Definition) Change(to *Definition, key string, states []State, outs []Out, now time.Time) []State {
	each, empty := d.kind().change(d, to, key, states, allOut(outs, now), now)
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

// allOut returns what is out of all rows.
func allOut(outs []Out, now time.Time) (all Out) {
	for _, out := range outs {
		if out.Tokens > 0 && out.Until.After(now) {
			all = Out{Tokens: all.Tokens + out.Tokens, Until: Later(all.Until, out.Until)}
		}
	}
	return all
}

// Floors reports whether a change from d to a definition of less capacity takes less than the difference,
// since more was used, or there is debt: the rows do not say afterwards what was left before.
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
		if i == 0 || s.TS.After(each.TS) { // paused: nothing is refilled before the last of them
			each.TS = s.TS
		}
	}
	total := each.Value + out.Tokens // which may come back
	left := min(to.Capacity, max(total+(to.Capacity-d.Capacity), min(total, 0))) - out.Tokens
	each.Value, each.TS = left/float64(to.Shards), d.begins(to, key, each, out, now)
	return each, State{TS: each.TS, Paused: each.Paused}
}

// Mark returns the mark of rows that were changed at an instant: a pause that was over a hundred
// years before it. It takes no room, takes leave it as it is, and it goes with the row, and when
// the row is paused.
func Mark(at time.Time) time.Time { return at.Add(-36500 * 24 * time.Hour).Truncate(time.Microsecond) }

// MarkUncut returns the mark of rows that are still measured by the capacity before a cut.
func MarkUncut(at time.Time) time.Time { return Mark(Mark(at)) }

// Raise returns a row that was measured by the first of some definitions at an instant as d measures
// it at now. Calls by all of these have taken from it since. It is raised by as much as the
// capacity of d is larger, less what can have come in: calls by d have filled it further than those
// by a definition of less capacity. After the edge of a window that is all. A row that is uncut was
// measured by the capacity of the second, and is cut if d has less.
func (d *Definition) Raise(by []*Definition, uncut bool, s State, out Out, since, now time.Time) State {
	s = d.Refill(s, now)
	if d.Slotted() || d.Stepped() && s.TS.After(since) {
		return s
	}
	was := by[0].Capacity
	if uncut {
		was = by[1].Capacity
	}
	if uncut && d.Capacity < was {
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
// length begins at the newest edge that is past, or is when the tokens end that are out. If only
// the edges are others, nothing comes in sooner than it would have, or edges that are moved to
// tomorrow on each day would refill each day: for a calendar see refill.
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

// change is slot by slot, up to the newest of all rows. If the slots are others, all is in the
// newest.
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

// moved returns a sliding window's row in the slots of d, with all that its own slots hold in the
// newest: that of now, or of the end of the slot that is reserved last, or of the tokens that are out.
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
