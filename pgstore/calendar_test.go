package pgstore_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// calendars are quotas whose next edges are 23 hours away, 28 days, 7 days, and a year.
var calendars = []ratelimit.FixedWindow{
	{Name: "day", Rate: 20, Every: ratelimit.Day, Zone: "America/New_York"},
	{Name: "month", Rate: 20, Every: ratelimit.Month, Zone: "Europe/Berlin", Anchor: ratelimit.Date{Year: 2026, Month: 1, Day: 31}},
	{Name: "week, 2 shards", Rate: 20, Every: ratelimit.Week, Zone: "Asia/Beirut", Shards: 2},
	{Name: "year", Rate: 20, Every: ratelimit.Year, Anchor: ratelimit.Date{Year: 2024, Month: 2, Day: 29}},
	{Name: "month, rolling over", Rate: 20, Capacity: 50, Every: ratelimit.Month, Zone: "Europe/Berlin", Anchor: ratelimit.Date{Year: 2026, Month: 1, Day: 31}},
}

// Of each window as much is granted as was sold, no more and no less, to callers of two stores
// in any form, while the clock is set from just before an edge to that edge, within windows,
// back, and over several of them.
func TestCalendarGrantsWhatWasSold(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const callers = 4
	pools := newTwoPools(t, callers)
	for _, limit := range calendars {
		for _, form := range withMemory() {
			t.Run(limit.Name+"/"+form.name, func(t *testing.T) {
				t.Parallel()
				c, ctx := newClock(), within(t, time.Minute)
				take := pools.taking(t, form, onClock(c))
				d := bucket.Definition(limit.Definition())
				held := strings.HasPrefix(form.name, "from memory")
				sold, granted := d.Capacity, 0.0
				flood := func() {
					t.Helper()
					var got atomic.Int64
					together(callers, func(i int) {
						got.Add(untilRefused(t, func() (ratelimit.Result, error) { return take(ctx, i, limit.For(form.name)) }))
					})
					granted += float64(got.Load())
					if granted > sold || granted < sold && !held {
						t.Errorf("at %v granted %v, sold %v", c.now(), granted, sold)
					}
				}
				flood()
				_, edge := (*ratelimit.Definition)(&d).Window("", c.now())
				for _, windows := range []int{1, 3} {
					c.set(edge.Add(-time.Microsecond))
					flood()
					for n := range windows {
						if n > 0 {
							edge = d.Next(edge)
						}
						if sold-granted < d.Capacity {
							sold = min(sold+d.Rate, granted+d.Capacity)
						}
					}
					c.set(edge)
					flood()
					c.set(edge.Add(-time.Hour)) // the clock is set back
					flood()
					c.set(edge.Add(12 * time.Hour))
					flood()
					edge = d.Next(edge)
				}
			})
		}
	}
}

// A row that has been idle, or in debt, for years has had all the edges since, by the database's
// clock. One that has -15 is full by all of them, and not yet by those that a statement is sent.
func TestCalendarAfterYears(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	ctx := t.Context()
	for _, port := range []bool{false, true} {
		store := newStore(t, db, isPortable(port))
		for i, ago := range []time.Duration{0, 30 * 24 * time.Hour, 3 * 365 * 24 * time.Hour, 90 * 365 * 24 * time.Hour} {
			for _, value := range []float64{0, -500, -15, 7} {
				limit := ratelimit.FixedWindow{Name: fmt.Sprint("quota", port, i, value), Rate: 3, Capacity: 10, Every: ratelimit.Week, Zone: "Europe/Berlin"}
				d := bucket.Definition(limit.Definition())
				now := time.Now()
				state := bucket.State{Value: value, TS: d.Fresh("", now.Add(-ago)).TS}
				for key := range 4 {
					must(t, errOf(db.Pool.Exec(ctx, "INSERT INTO "+db.Schema+".rate_limits (name, key, shard, value, ts) VALUES ($1, $2, 0, $3, $4)",
						limit.Name, fmt.Sprint(key), state.Value, state.TS)))
				}
				want := d.Refill(state, now).Value
				for key, take := range []takes{allowOwn, allowFunc, allowAt(pgx.ReadCommitted), allowOwn} {
					result, err := take(ctx, db.Pool, store, limit.For(fmt.Sprint(key)))
					if err != nil || result.OK != (want >= 1) || result.OK && result.Value != want-1 || !result.OK && result.Value != want {
						t.Errorf("%v ago, %v: got %v of %v, %v, want %v before", ago, value, result, result.Value, err, want)
					}
				}
			}
		}
	}
}

// A customer who moves is not refilled again by the edge that his quota has just had elsewhere.
func TestCalendarOfAnotherZone(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	c := newClock()
	store := newStore(t, db, onClock(c))
	quota := ratelimit.FixedWindow{Name: "quota", Rate: 10, Every: ratelimit.Month, Zone: "Europe/Berlin"}
	result, err := store.Allow(t.Context(), quota.ForN("k", 10))
	mustTake(t, result, err)
	for _, zone := range []string{"America/Los_Angeles", "Pacific/Kiritimati", "Etc/GMT+12", "Europe/Berlin"} {
		quota.Zone = zone
		result, err := store.Allow(t.Context(), quota.For("k"))
		if err != nil || result.OK {
			t.Errorf("in %s: got %v, %v, want a refusal", zone, result, err)
		}
		d := quota.Definition()
		if _, want := d.Window("k", c.now()); !result.RetryAt.Equal(want) {
			t.Errorf("in %s: retry at %v, want %v", zone, result.RetryAt, want)
		}
	}
}
