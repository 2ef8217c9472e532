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
// start, anchor, zone, time of day, slots and shards. Its bound is worked out without the library:
// in any stretch of time, the larger capacity and what comes in by the edges of the definitions
// that were in force.
type changing struct {
	rand   *rand.Rand
	now    time.Time
	raises bool // capacities only grow; otherwise they only shrink, which forgives what is above
	force  []inForce
	grants []granted
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

var changingKinds = []string{"bucket", "window", "calendar", "sliding"}

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

// edges counts the edges of a window after one instant, up to another.
func edges(d *ratelimit.Definition, after, to time.Time) (n float64) {
	if d.Every == 0 {
		first := d.Start.Add(-d.Period * 1_000_000)
		return float64(to.Sub(first)/d.Period - after.Sub(first)/d.Period)
	}
	zone, err := time.LoadLocation(d.Zone)
	if err != nil {
		panic(err)
	}
	months, days := 0, 0
	switch d.Every {
	case ratelimit.Month:
		months = 1
	case 3 * ratelimit.Month:
		months = 3
	case ratelimit.Day:
		days = 1
	default:
		days = 5
	}
	about, _ := unit(d)
	for k := int(after.Sub(time.Date(d.Anchor.Year, d.Anchor.Month, d.Anchor.Day, 0, 0, 0, 0, zone))/about) - 4; ; k++ {
		at := time.Date(d.Anchor.Year, d.Anchor.Month+time.Month(k*months), d.Anchor.Day+k*days, int(d.Time.Hours()), 0, 0, 0, zone)
		if at.After(to) {
			return n
		}
		if at.After(after) {
			n++
		}
	}
}

// most is the most that may be granted from one grant to a later one. Edges that are moved, and
// the units are not, refill no sooner than a unit after each other. In a stretch that is longer
// than the period of a sliding window it is unknown.
func (h *changing) most(from, to time.Time) float64 {
	capacity, in := 0.0, 0.0
	for i := 0; i < len(h.force); {
		first, begin, rate, alike := &h.force[i].Definition, h.force[i].from, 0.0, 0
		last := first
		about, shortest := unit(first)
		for ; i < len(h.force) && h.force[i].Every == first.Every && h.force[i].Period == first.Period && h.force[i].Slots == first.Slots; i++ {
			d, end := &h.force[i], to
			if i+1 < len(h.force) {
				end = earlier(to, h.force[i+1].from)
			}
			if start := later(from, d.from); !end.Before(start) {
				capacity, rate, alike = max(capacity, d.Capacity), max(rate, d.Rate), alike+1
				last = &d.Definition
				if d.Kind == ratelimit.KindTokenBucket {
					in += d.Rate * float64(end.Sub(start)) / float64(d.Period)
				}
			}
		}
		end := to
		if i < len(h.force) {
			end = earlier(to, h.force[i].from)
		}
		begin = later(from, begin)
		switch {
		case alike == 0 || first.Kind == ratelimit.KindTokenBucket:
		case first.Kind == ratelimit.KindFixedWindow && alike == 1:
			in += rate * edges(last, begin, end)
		case first.Kind == ratelimit.KindFixedWindow:
			in += rate * math.Floor(1+float64(end.Sub(begin))/float64(shortest))
		case to.Sub(from) > about:
			return math.Inf(1)
		}
	}
	return capacity + in
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// check returns an error if more was granted in a stretch that ends now than may be.
func (h *changing) check() error {
	sum := 0.0
	for i := len(h.grants) - 1; i >= 0; i-- {
		sum += h.grants[i].count
		if most := h.most(h.grants[i].at, h.now); sum > most+1e-6*max(1, most) {
			return fmt.Errorf("%v tokens from %v to %v, at most %v may be: %+v", sum, h.grants[i].at, h.now, most, h.force)
		}
	}
	return nil
}

// step is a call or a change.
func (h *changing) step(t *testing.T, store ratelimit.Store, kind string) error {
	d := h.force[len(h.force)-1].Definition
	about, _ := unit(&d)
	h.now = h.now.Add(time.Duration(h.rand.Float64() * float64(about) * pick(h.rand, 0, 0.1, 0.3, 1, 2))).Truncate(time.Microsecond)
	if h.rand.IntN(5) > 0 {
		count := pick(h.rand, 1, 1, math.Ceil(d.Capacity*h.rand.Float64()), d.Capacity)
		result, err := store.AllowAtMost(t.Context(), d.Limit().ForN("k", count))
		if err == nil && result.OK {
			h.grants = append(h.grants, granted{h.now, result.Taken})
			err = h.check()
		}
		return err
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

// run is a history on a store, which must be full again some time after it.
func (h *changing) run(t *testing.T, store ratelimit.Store, kind string) error {
	h.force = append(h.force, inForce{h.define(kind), h.now})
	for range 60 {
		if err := h.step(t, store, kind); err != nil {
			return err
		}
	}
	d := h.force[len(h.force)-1].Definition
	h.now = h.now.AddDate(1, 0, 0)
	if d.Kind == ratelimit.KindTokenBucket {
		h.now = h.now.AddDate(1, 0, 0)
	}
	if full, err := store.Check(t.Context(), d.Limit().ForN("k", d.Capacity)); err != nil || !full.OK {
		return fmt.Errorf("a year later %v of %v are left, %w", full.Value, d.Capacity, err)
	}
	return nil
}

// Never more than the larger of two grants in any stretch, and nothing used is forgotten, whatever
// changes of a definition.
func TestChangeNeverOver(t *testing.T) {
	t.Parallel()
	for _, kind := range changingKinds {
		for seed := range uint64(100) {
			h := &changing{rand: rand.New(rand.NewPCG(seed, 57)), now: noon, raises: seed%2 == 0}
			clock := func() time.Time { return h.now }
			if err := h.run(t, memstore.New(clock), kind); err != nil {
				t.Fatalf("memory, %s, seed %d: %v", kind, seed, err)
			}
		}
		for seed := range uint64(4) {
			h := &changing{rand: rand.New(rand.NewPCG(seed, 57)), now: noon, raises: seed%2 == 0}
			store := newStore(t, pgtest.New(t), func(c *pgstore.Config) { c.Clock = func() time.Time { return h.now } })
			if err := h.run(t, store, kind); err != nil {
				t.Fatalf("postgres, %s, seed %d: %v", kind, seed, err)
			}
		}
	}
}

// Two versions of a program take in turn, whose definitions differ in rate, capacity, start, anchor, zone or
// time of day: never more than the larger of the two grants in any stretch, and neither is starved.
func TestTwoVersionsSideBySide(t *testing.T) {
	t.Parallel()
	for _, kind := range changingKinds {
		for seed := range uint64(100) {
			h := newVersions(seed, kind)
			if err := h.sideBySide(t, memstore.New(func() time.Time { return h.now })); err != nil {
				t.Fatalf("memory, %s, seed %d: %v", kind, seed, err)
			}
		}
		for seed := range uint64(4) {
			h := newVersions(seed, kind)
			store := newStore(t, pgtest.New(t), func(c *pgstore.Config) { c.Clock = func() time.Time { return h.now } })
			if err := h.sideBySide(t, store); err != nil {
				t.Fatalf("postgres, %s, seed %d: %v", kind, seed, err)
			}
		}
	}
}

// newVersions returns a history with two definitions.
func newVersions(seed uint64, kind string) *changing {
	h := &changing{rand: rand.New(rand.NewPCG(seed, 58)), now: noon, raises: seed%2 == 0}
	for i := range 2 {
		d := h.define(kind)
		if d.Shards = 1; i > 0 {
			was := &h.force[0]
			d.Every, d.Period, d.Slots = was.Every, was.Period, was.Slots
		}
		h.force = append(h.force, inForce{d.Limit().Definition(), noon})
	}
	return h
}

func (h *changing) sideBySide(t *testing.T, store ratelimit.Store) error {
	a, b := &h.force[0].Definition, &h.force[1].Definition
	about, shortest := unit(a)
	for range 80 {
		d := pick(h.rand, a, b)
		h.now = h.now.Add(time.Duration(h.rand.Float64() * float64(about) * pick(h.rand, 0, 0.1, 0.3, 1))).Truncate(time.Microsecond)
		result, err := store.AllowAtMost(t.Context(), d.Limit().ForN("k", pick(h.rand, 1, math.Ceil(d.Capacity*h.rand.Float64()), d.Capacity)))
		if err != nil {
			return err
		}
		h.grants = append(h.grants, granted{h.now, result.Taken})
		sum := 0.0
		for i := len(h.grants) - 1; i >= 0; i-- {
			sum += h.grants[i].count
			stretch := h.now.Sub(h.grants[i].at)
			in := max(a.Rate, b.Rate) * float64(stretch) / float64(shortest)
			switch {
			case d.Every != 0: // an edge of one version is seen later by the other, which spends what was left before it
				in = max(a.Rate, b.Rate) * math.Floor(2+float64(stretch)/float64(shortest))
			case d.Kind == ratelimit.KindFixedWindow:
				in = max(a.Rate, b.Rate) * math.Floor(1+float64(stretch)/float64(shortest))
			case d.Kind == ratelimit.KindSlidingWindow && stretch <= shortest:
				in = 0
			case d.Kind == ratelimit.KindSlidingWindow:
				in = math.Inf(1)
			}
			if most := max(a.Capacity, b.Capacity) + in; sum > most+1e-6*most {
				return fmt.Errorf("%v tokens in %v, at most %v may be: %v and %v", sum, stretch, most, a, b)
			}
		}
	}
	for _, d := range []*ratelimit.Definition{a, b} {
		h.now = h.now.AddDate(2, 0, 0)
		if full, err := store.Check(t.Context(), d.Limit().ForN("k", d.Capacity)); err != nil || !full.OK {
			return fmt.Errorf("two years later %v of %v are left, %w", full.Value, d.Capacity, err)
		}
	}
	return nil
}
