package bucket_test

import (
	"math"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// A change keeps what was used. Values are those of a row that was written at t0, by the old
// definition, and is changed at t3; wants are of the rows then.
func TestChange(t *testing.T) {
	tokens := func(rate, capacity float64) TokenBucket {
		return TokenBucket{Name: "a", Rate: rate, Period: 10 * d, Capacity: capacity}
	}
	window := func(rate float64, period time.Duration, start time.Time) FixedWindow {
		return FixedWindow{Name: "a", Rate: rate, Period: period, Start: start}
	}
	paused := func(s bucket.State, until time.Time) bucket.State { s.Paused = until; return s }
	ten := window(10, 10*d, t0)
	for _, tt := range []struct {
		name     string
		from, to Limit
		state    bucket.State
		out      bucket.Out
		want     bucket.State
	}{
		{"a bucket is settled and raised", tokens(10, 20), tokens(10, 50), row(0, t0), bucket.Out{}, row(33, t3)},
		{"one that is full stays so", tokens(10, 20), tokens(10, 50), row(20, t0), bucket.Out{}, row(50, t3)},
		{"a cut takes what was left", tokens(10, 20), tokens(10, 12), row(15, t0), bucket.Out{}, row(10, t3)},
		{"and leaves no debt", tokens(10, 20), tokens(10, 4), row(5, t0), bucket.Out{}, row(0, t3)},
		{"debt stays", tokens(10, 20), tokens(10, 4), row(-9, t0), bucket.Out{}, row(-6, t3)},
		{"and is less by a raise", tokens(10, 20), tokens(10, 24), row(-9, t0), bucket.Out{}, row(-2, t3)},
		{"the old rate counts up to now", tokens(10, 20), tokens(90, 20), row(0, t0), bucket.Out{}, row(3, t3)},
		{"a pause stays", tokens(10, 20), tokens(10, 50), paused(row(0, t9), t9), bucket.Out{}, paused(row(30, t9), t9)},
		{"a mark goes", tokens(10, 20), tokens(10, 50), paused(row(0, t0), bucket.Mark(t0)), bucket.Out{}, row(33, t3)},
		{"unless the capacity stays", tokens(10, 20), tokens(90, 20), paused(row(0, t0), bucket.Mark(t0)), bucket.Out{}, paused(row(3, t3), bucket.Mark(t0))},
		{"a clock that went back", tokens(10, 20), tokens(10, 50), row(4, t5), bucket.Out{}, row(34, t5)},
		{"beside tokens that are out", tokens(10, 20), tokens(10, 50), row(0, t0), bucket.Out{Tokens: 18, Until: t4}, row(31, t3)},
		{"more are out than the cut leaves", tokens(10, 20), tokens(10, 10), row(0, t0), bucket.Out{Tokens: 18, Until: t4}, row(-8, t3)},

		{"a window is raised", ten, window(30, 10*d, t0), row(2, t0), bucket.Out{}, row(22, t0)},
		{"its next edge is past", window(10, 2*d, t0), window(30, 2*d, t0), row(2, t0), bucket.Out{}, row(30, t2)},
		{"a shorter one begins at its newest edge", ten, window(10, 2*d, t0), row(2, t0), bucket.Out{}, row(2, t2)},
		{"a longer one as well", window(10, 2*d, t0), window(10, 4*d, t1), row(2, t2), bucket.Out{}, row(2, t1)},
		{"edges that are moved refill no sooner", ten, window(10, 10*d, t4), row(2, t0), bucket.Out{}, row(2, t4)},
		{"edges at the same instants", ten, window(10, 10*d, t0.Add(-20*d)), row(2, t0), bucket.Out{}, row(2, t0)},
		{"a paused window has its edge at the end of the pause", ten, window(10, 2*d, t0), paused(row(0, t9.Add(-10*d)), t9), bucket.Out{}, paused(row(0, t7), t9)},
		{"a shorter one begins when what is out ends", ten, window(10, 2*d, t0), row(2, t0), bucket.Out{Tokens: 3, Until: t0.Add(10 * d)}, row(2, t8)},
		{"a window that was ahead of the clock", ten, window(10, 2*d, t0), row(2, t5), bucket.Out{}, row(2, t4)},
		{
			"a window becomes a quota by the calendar", window(10, 10*d, t0),
			FixedWindow{Name: "a", Rate: 10, Every: Day},
			row(2, t0),
			bucket.Out{},
			row(2, time.Date(t3.Year(), t3.Month(), t3.Day(), 0, 0, 0, 0, time.UTC)),
		},
		{
			"a quota whose anchor moves",
			FixedWindow{Name: "a", Rate: 10, Every: Month},
			FixedWindow{Name: "a", Rate: 30, Every: Month, Anchor: Date{Year: 2026, Month: time.March, Day: 9}},
			row(2, monthOf(t3)),
			bucket.Out{},
			row(22, monthOf(t3)),
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			from, to := definition(tt.from), definition(tt.to)
			got := from.Change(to, "k", []bucket.State{tt.state}, []bucket.Out{tt.out}, t3)
			if len(got) != 1 || math.Abs(got[0].Value-tt.want.Value) > 1e-9 || !got[0].TS.Equal(tt.want.TS) || !got[0].Paused.Equal(tt.want.Paused) {
				t.Errorf("Change() = %v, want %v", got, tt.want)
			}
		})
	}
}

func monthOf(at time.Time) time.Time {
	return time.Date(at.Year(), at.Month(), 1, 0, 0, 0, 0, time.UTC)
}

// Shards share what all had, and a cut is of all together: rows that are fuller than others make
// up for these. Rows that only the old definition has are empty.
// A row that is marked uncut may hold more than the capacity it is cut to.
func TestRaiseOfAnUncutRow(t *testing.T) {
	window := func(capacity float64) *bucket.Definition {
		d := bucket.Definition(FixedWindow{Name: "a", Rate: capacity, Period: 100 * d, Start: t0}.Definition())
		return &d
	}
	uncut := bucket.State{Value: 149, TS: t0, Paused: bucket.MarkUncut(t0)}
	got := window(67).Raise([]*bucket.Definition{window(27), window(198), window(67)}, true, uncut, bucket.Out{}, t0, t3)
	if got.Value != 18 {
		t.Errorf("149 of 198, cut to 67, are %v, want 18", got.Value)
	}
}

func TestChangeOfShards(t *testing.T) {
	sharded := func(rate float64, shards int) *bucket.Definition {
		return definition(FixedWindow{Name: "a", Rate: rate, Period: 10 * d, Start: t0, Shards: shards})
	}
	for _, tt := range []struct {
		name   string
		from   *bucket.Definition
		to     *bucket.Definition
		values []float64
		want   []float64
	}{
		{"more", sharded(20, 2), sharded(20, 4), []float64{10, 2}, []float64{3, 3, 3, 3}},
		{"fewer", sharded(20, 4), sharded(20, 2), []float64{5, 1, 0, 0}, []float64{3, 3, 0, 0}},
		{"as many", sharded(20, 2), sharded(10, 2), []float64{10, 0}, []float64{0, 0}},
		{"in debt", sharded(20, 2), sharded(30, 3), []float64{-10, -6}, []float64{-2, -2, -2}},
	} {
		var states []bucket.State
		for _, v := range tt.values {
			states = append(states, row(v, t0))
		}
		for shard, got := range tt.from.Change(tt.to, "k", states, nil, t3) {
			if math.Abs(got.Value-tt.want[shard]) > 1e-9 || !got.TS.Equal(t0) {
				t.Errorf("%s: shard %d has %v, want %v", tt.name, shard, got, tt.want[shard])
			}
		}
	}
}

// A sliding window keeps its counts: in their slots, or in the newest if the slots are others.
func TestChangeOfSlots(t *testing.T) {
	of := func(rate float64, period time.Duration, slots int) *bucket.Definition {
		return definition(SlidingWindow{Name: "a", Rate: rate, Period: period, Slots: slots, Start: t0})
	}
	from := of(10, 4*d, 4)
	taken, _ := from.Take(from.Fresh("k", t0), t0, 4, 0)
	taken, _ = from.Take(taken, t2, 3, 0)
	ahead, _ := from.Take(taken, t2, 6, math.Inf(-1)) // from t5 on, when the 4 are gone
	change := func(to *bucket.Definition, s bucket.State, out bucket.Out) bucket.State {
		return from.Change(to, "k", []bucket.State{s}, []bucket.Out{out}, t3)[0]
	}
	for _, tt := range []struct {
		name   string
		to     *bucket.Definition
		state  bucket.State
		out    bucket.Out
		value  float64   // at t3
		comes  time.Time // when all that is counted has left the window
		before float64   // just before that
	}{
		{"raised", of(30, 4*d, 4), taken, bucket.Out{}, 23, t7, 27},
		{"cut below the counts", of(5, 4*d, 4), taken, bucket.Out{}, -2, t7, 2},
		{"a longer period", of(10, 8*d, 4), taken, bucket.Out{}, 3, t2.Add(10 * d), 3},
		{"other slots", of(10, 4*d, 8), taken, bucket.Out{}, 3, t3.Add(4*d + d/2), 3},
		{"more slots of the same length", of(10, 8*d, 8), taken, bucket.Out{}, 3, t3.Add(9 * d), 3},
		{"other slots, and one is reserved", of(10, 4*d, 8), ahead, bucket.Out{}, -6.25, t0.Add(10 * d), 1},
		{"other slots beside tokens that are out", of(10, 4*d, 8), taken, bucket.Out{Tokens: 1, Until: t4}, -1.25, t4.Add(4 * d), 3},
	} {
		got := change(tt.to, tt.state, tt.out)
		if value := tt.to.Refill(got, t3).Value; math.Abs(value-tt.value) > 1e-9 {
			t.Errorf("%s: %v left, want %v", tt.name, value, tt.value)
		}
		if before, after := tt.to.Refill(got, tt.comes.Add(-time.Microsecond)).Value, tt.to.Refill(got, tt.comes).Value; math.Abs(before-tt.before) > 1e-9 || after != tt.to.Rate {
			t.Errorf("%s: %v left before %v, and %v then, want %v and %v", tt.name, before, tt.comes, after, tt.before, tt.to.Rate)
		}
	}
}
