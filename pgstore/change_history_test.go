package pgstore_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// changing is a random history of a limit whose definition changes: rate, capacity, period, unit,
// start, anchor, zone, time of day, slots and shards. Or two versions of a program take in turn, whose
// definitions have one unit. Its bound is worked out without the library: in any stretch of time, the
// largest capacity of the definitions that were in force, and what comes in at the largest rate.
type changing struct {
	rand     *rand.Rand
	now      time.Time
	raises   bool // capacities only grow; otherwise they only shrink, which forgives what is above
	versions bool
	force    []inForce
	grants   []granted
}

// inForce is a definition, and from when on.
type inForce struct {
	ratelimit.Definition
	from time.Time
}

type granted struct {
	at    time.Time
	count float64
}

// define makes up a definition, at first or in place of the last one.
func (h *changing) define(kind string) ratelimit.Definition {
	r, capacity := h.rand, float64(8+h.rand.IntN(100))
	d := ratelimit.Definition{Name: "l", Kind: ratelimit.KindFixedWindow, Shards: 1, MaxReserved: math.Inf(1)}
	if len(h.force) > 0 {
		d = h.force[len(h.force)-1].Definition
		capacity = d.Capacity
	}
	first := len(h.force) == 0
	part := r.IntN(4)
	if first || part == 0 {
		if !first && h.raises {
			capacity += float64(r.IntN(60))
		} else if !first {
			capacity = max(8, math.Floor(capacity*r.Float64()))
		}
		d.Rate = capacity
		if kind == "bucket" {
			d.Rate = float64(1 + r.IntN(60))
		}
		d.Capacity = capacity
	}
	if first || part == 1 {
		d.Shards = pick(r, 1, 2, 4)
	}
	long := first || part == 2 && r.IntN(2) == 0
	start := noon.Add(time.Duration(r.Int64N(int64(time.Hour)))).Truncate(time.Microsecond)
	switch {
	case kind == "bucket":
		d.Kind = ratelimit.KindTokenBucket
		if long {
			d.Period = time.Duration(1+r.IntN(60)) * time.Minute
		}
	case kind == "sliding":
		d.Kind = ratelimit.KindSlidingWindow
		if long {
			d.Period, d.Slots = time.Duration(1+r.IntN(60))*time.Minute, 1+r.IntN(20)
		}
	case kind == "window":
		if long {
			d.Period = time.Duration(1+r.IntN(60)) * time.Minute
		}
		if first || part == 3 {
			d.Start = start
		}
	default:
		if long {
			d.Every, d.Period = pick(r, ratelimit.Day, ratelimit.Month, 3*ratelimit.Month, 5*ratelimit.Day), 0
		}
		if first || part == 3 {
			d.Zone = pick(r, "UTC", "Europe/Berlin", "America/New_York", "Asia/Tokyo")
			d.Anchor = ratelimit.Date{Year: 2025, Month: time.Month(1 + r.IntN(12)), Day: 1 + r.IntN(28)}
			d.Time = pick(r, 0, 9*time.Hour)
		}
	}
	return d.Limit().Definition()
}

// unit is about the length of a definition's period, and the shortest that it has.
func unit(d *ratelimit.Definition) (about, shortest time.Duration) {
	const day = 24 * time.Hour
	switch d.Every {
	case 0:
		return d.Period, d.Period
	case ratelimit.Month:
		return 30 * day, 28*day - 27*time.Hour // the slack of zones
	case 3 * ratelimit.Month:
		return 91 * day, 89*day - 27*time.Hour
	case ratelimit.Day:
		return day, day - 4*time.Hour
	}
	return 5 * day, 5*day - 27*time.Hour
}

// most is the most that may be granted from one grant to now. Edges that are moved refill no sooner than
// a unit after each other, and each change of the unit may bring one more. An edge of one version is
// seen later by the other, which spends what was left before it. In a stretch that is longer than the
// period of a sliding window it is unknown.
func (h *changing) most(from time.Time) float64 {
	capacity, rate, edges, shortest := 0.0, 0.0, 0.0, time.Duration(math.MaxInt64)
	stretch, last := h.now.Sub(from), ratelimit.Definition{}
	for i := range h.force {
		d := &h.force[i].Definition
		if i+1 < len(h.force) && !h.versions && h.force[i+1].from.Before(from) {
			continue // it was replaced before
		}
		_, short := unit(d)
		capacity, shortest = max(capacity, d.Capacity), min(shortest, short)
		rate = max(rate, d.Rate)
		if d.Kind == ratelimit.KindTokenBucket {
			edges = max(edges, d.Rate*float64(stretch)/float64(d.Period))
		} else if d.Every != last.Every || d.Period != last.Period || h.versions && d.Every != 0 {
			edges++
		}
		last = *d
	}
	switch {
	case last.Kind == ratelimit.KindTokenBucket:
		return capacity + edges
	case last.Kind == ratelimit.KindFixedWindow:
		return capacity + rate*math.Floor(edges+float64(stretch)/float64(shortest))
	case stretch <= shortest:
		return capacity
	}
	return math.Inf(1)
}

// take asks for as much as there is of a count, and returns an error if more was granted in a stretch
// that ends now than may be.
func (h *changing) take(t *testing.T, store ratelimit.Store, d ratelimit.Definition) error {
	count := pick(h.rand, 1, 1, math.Ceil(d.Capacity*h.rand.Float64()), d.Capacity)
	result, err := store.AllowAtMost(t.Context(), d.Limit().ForN("k", count))
	if err != nil || !result.OK {
		return err
	}
	h.grants = append(h.grants, granted{h.now, result.Taken})
	sum := 0.0
	for i := len(h.grants) - 1; i >= 0; i-- {
		sum += h.grants[i].count
		if most := h.most(h.grants[i].at); sum > most+1e-6*max(1, most) {
			return fmt.Errorf("%v tokens from %v to %v, at most %v may be: %+v", sum, h.grants[i].at, h.now, most, h.force)
		}
	}
	return nil
}

// step is a call or a change.
func (h *changing) step(t *testing.T, store ratelimit.Store, kind string) error {
	d := h.force[len(h.force)-1].Definition
	if h.versions {
		d = pick(h.rand, h.force...).Definition
	}
	about, _ := unit(&d)
	h.now = h.now.Add(time.Duration(h.rand.Float64() * float64(about) * pick(h.rand, 0, 0.1, 0.3, 1, 2))).Truncate(time.Microsecond)
	if h.versions || h.rand.IntN(5) > 0 {
		return h.take(t, store, d)
	}
	next := h.define(kind)
	before, err := store.Check(t.Context(), d.Limit().ForN("k", 0))
	if err != nil {
		return err
	}
	after, err := store.Change(t.Context(), d.Limit(), next.Limit(), "k")
	if err != nil {
		return err
	}
	h.force = append(h.force, inForce{next, h.now})
	want := min(next.Capacity, max(before.Value+next.Capacity-d.Capacity, min(before.Value, 0)))
	if kind == "sliding" {
		want = before.Value + next.Rate - d.Rate
	}
	if math.Abs(after.Value-want) > 1e-6*d.Capacity && (kind != "sliding" || after.OK) { // a head that is ahead is no count
		return fmt.Errorf("%v left of %v, and %v of %v after the change, want %v", before.Value, d, after.Value, next, want)
	}
	return nil
}

// run is a history on a store, which must be full again some time after it by whichever definition is in force.
func (h *changing) run(t *testing.T, store ratelimit.Store, kind string) error {
	h.force = append(h.force, inForce{h.define(kind), h.now})
	if h.versions {
		was, d := &h.force[0].Definition, h.define(kind)
		d.Every, d.Period, d.Slots, d.Shards = was.Every, was.Period, was.Slots, was.Shards
		h.force = append(h.force, inForce{d.Limit().Definition(), h.now})
	}
	for range 70 {
		if err := h.step(t, store, kind); err != nil {
			return err
		}
	}
	full := h.force
	if !h.versions {
		full = full[len(full)-1:]
	}
	for _, d := range full {
		h.now = h.now.AddDate(2, 0, 0)
		if now, err := store.Check(t.Context(), d.Limit().ForN("k", d.Capacity)); err != nil || !now.OK {
			return fmt.Errorf("two years later %v of %v are left, %w", now.Value, d.Capacity, err)
		}
	}
	return nil
}

// Never more than the larger of two grants in any stretch, and nothing used is forgotten, whatever
// changes of a definition; and neither of two versions is starved.
func TestChangeNeverOver(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"bucket", "window", "calendar", "sliding"} {
		for seed := range uint64(200) {
			for _, inMemory := range []bool{true, false} {
				if !inMemory && seed >= 8 {
					continue
				}
				h := &changing{rand: rand.New(rand.NewPCG(seed, 57)), now: noon, raises: seed%2 == 0, versions: seed/2%2 == 0}
				clock := func() time.Time { return h.now }
				var store ratelimit.Store = memstore.New(clock)
				if !inMemory {
					store = newStore(t, pgtest.New(t), func(c *pgstore.Config) { c.Clock = clock })
				}
				if err := h.run(t, store, kind); err != nil {
					t.Fatalf("%T, %s, seed %d: %v", store, kind, seed, err)
				}
			}
		}
	}
}
