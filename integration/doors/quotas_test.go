package doors

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// quotas is a store whose quotas become others, by code or by a catalog.
type quotas struct {
	ratelimit.Store
	catalog *catalog.Catalog // nil by code
	now     time.Time
}

// become has a quota replaced by another one, with what was used kept.
func (q *quotas) become(ctx context.Context, from, to ratelimit.FixedWindow) error {
	if q.catalog == nil {
		_, err := q.Change(ctx, from, to, "acme")
		return err
	}
	if from.Rate == to.Rate { // its edges are the program's
		return q.catalog.Publish(ctx, to)
	}
	_, err := q.catalog.Set(ctx, to.Name, "acme", catalog.Override{Rate: to.Rate})
	if q.now = q.now.Add(time.Minute); err == nil {
		_, err = q.catalog.Complete(ctx)
	}
	return err
}

// take takes tokens of a quota in tens, as many as there are of n.
func (q *quotas) take(t *testing.T, quota ratelimit.FixedWindow, n float64) (taken float64) {
	t.Helper()
	for ; taken < n; taken += 10 {
		result, err := q.Allow(t.Context(), q.request(t, quota, 10))
		if err != nil {
			t.Fatal(err)
		}
		if !result.OK {
			break
		}
	}
	return taken
}

// request is one of the key, of a program that has the quota.
func (q *quotas) request(t *testing.T, quota ratelimit.FixedWindow, n float64) ratelimit.Request {
	t.Helper()
	if q.catalog == nil {
		return quota.ForN("acme", n)
	}
	if err := q.catalog.Publish(t.Context(), quota); err != nil {
		t.Fatal(err)
	}
	if err := q.catalog.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	return q.catalog.ForN(quota, "acme", n)
}

// quotaWays opens a store in every way to ask, with a clock.
var quotaWays = []struct {
	name     string
	calendar bool // that it knows quotas by the calendar
	open     func(t *testing.T, clock func() time.Time) (ratelimit.Store, *pgtest.DB)
}{
	{"memory", true, func(_ *testing.T, clock func() time.Time) (ratelimit.Store, *pgtest.DB) {
		return memstore.New(clock), nil
	}},
	{"SQL", true, func(t *testing.T, clock func() time.Time) (ratelimit.Store, *pgtest.DB) {
		db := pgtest.New(t)
		f := withFunctions(t, db, clock)
		return f.Store, db
	}},
	{"functions with arguments", false, func(t *testing.T, clock func() time.Time) (ratelimit.Store, *pgtest.DB) {
		db := pgtest.New(t)
		return withFunctions(t, db, clock), db
	}},
	{"functions by name", true, func(t *testing.T, clock func() time.Time) (ratelimit.Store, *pgtest.DB) {
		db := pgtest.New(t)
		f := withFunctions(t, db, clock)
		f.byName = true
		return f, db
	}},
}

// eachQuota runs a test of a quota in every way to ask for it, with definitions by code and by a catalog.
func eachQuota(t *testing.T, calendar bool, from time.Time, test func(t *testing.T, q *quotas)) {
	t.Helper()
	for _, way := range quotaWays {
		for _, by := range []string{"code", "catalog"} {
			if calendar && !way.calendar || by == "catalog" && way.name == "functions with arguments" {
				continue // there is none
			}
			t.Run(way.name+", by "+by, func(t *testing.T) {
				t.Parallel()
				q := &quotas{now: from}
				clock := func() time.Time { return q.now }
				var db *pgtest.DB
				if q.Store, db = way.open(t, clock); by == "code" {
					test(t, q)
					return
				}
				config := catalog.Config{Clock: clock, Logger: slog.New(slog.DiscardHandler)}
				var err error
				if db == nil {
					config.Store = q.Store.(*memstore.Store)
					q.catalog, err = catalog.NewInMemory(&config)
				} else {
					var store *pgstore.Store
					f, named := q.Store.(*functions)
					if store, _ = q.Store.(*pgstore.Store); named {
						store, _ = f.Store.(*pgstore.Store)
						f.published = nil // here it is
					}
					config.Schema, config.Store = db.Schema, store
					q.catalog, err = catalog.New(db.Pool, &config)
				}
				if err != nil {
					t.Fatal(err)
				}
				test(t, q)
			})
		}
	}
}

// month is a quota from a day of June on.
func month(rate float64, day int) ratelimit.FixedWindow {
	return ratelimit.FixedWindow{Name: "quota", Rate: rate, Every: ratelimit.Month, Anchor: ratelimit.Date{Year: 2026, Month: time.June, Day: day}}
}

func june(day, hour int) time.Time { return time.Date(2026, time.June, day, hour, 0, 0, 0, time.UTC) }

// Quotas are raised and cut while they run: nothing that was used is forgotten. docs/calendar.md has the table.
func TestQuotasThatChange(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	hour := func(rate float64) ratelimit.FixedWindow {
		return ratelimit.FixedWindow{Name: "quota", Rate: rate, Period: time.Hour, Start: usual}
	}
	for _, row := range []struct{ was, used, becomes, want float64 }{
		{100, 100, 200, 100},
		{200, 50, 100, 50},
		{200, 150, 100, 0},
	} {
		for _, quota := range []func(float64) ratelimit.FixedWindow{hour, func(rate float64) ratelimit.FixedWindow { return month(rate, 1) }} {
			from, to := quota(row.was), quota(row.becomes)
			t.Run(fmt.Sprintf("%v of %v used, becomes %v, %v", row.used, row.was, row.becomes, from.Period), func(t *testing.T) {
				eachQuota(t, from.Every != 0, june(10, 12), func(t *testing.T, q *quotas) {
					if got := q.take(t, from, row.used); got != row.used {
						t.Fatalf("%v were granted, want %v", got, row.used)
					}
					if err := q.become(t.Context(), from, to); err != nil {
						t.Fatal(err)
					}
					program := to
					if q.catalog != nil {
						program = from // which the override replaces
					}
					if left, err := q.Check(t.Context(), q.request(t, program, 0)); err != nil || left.Value != row.want || left.Capacity != row.becomes {
						t.Errorf("%v left of %v, %v, want %v of %v", left.Value, left.Capacity, err, row.want, row.becomes)
					}
				})
			})
		}
	}
}

// Quotas are moved while they run: no period has two of them.
func TestQuotasThatMove(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	t.Run("the anchor moves from the 1st to the 15th", func(t *testing.T) {
		eachQuota(t, true, june(10, 12), func(t *testing.T, q *quotas) {
			q.take(t, month(100, 1), 60)
			q.now = june(20, 12)
			if err := q.become(t.Context(), month(100, 1), month(100, 15)); err != nil {
				t.Fatal(err)
			}
			if got := q.take(t, month(100, 15), 1000); got != 40 {
				t.Errorf("%v were granted, want 40", got)
			}
		})
	})
	t.Run("the anchor is set to tomorrow seven times in a month", func(t *testing.T) {
		eachQuota(t, true, june(2, 12), func(t *testing.T, q *quotas) {
			now, granted := month(100, 1), 0.0
			for day := 3; day < 30; day += 4 {
				granted += q.take(t, now, 1000)
				q.now = june(day, 12)
				if err := q.become(t.Context(), now, month(100, day+1)); err != nil {
					t.Fatal(err)
				}
				now = month(100, day+1)
			}
			if granted += q.take(t, now, 1000); granted != 100 {
				t.Errorf("%v were granted in a month, want 100", granted)
			}
		})
	})
	t.Run("both anchors in turn over the 1st", func(t *testing.T) {
		eachQuota(t, true, june(10, 12), func(t *testing.T, q *quotas) {
			q.take(t, month(100, 1), 100)
			granted := 0.0
			for q.now = june(14, 12); q.now.Before(june(44, 12)); q.now = q.now.Add(12 * time.Hour) {
				granted += q.take(t, month(100, 1), 20) + q.take(t, month(100, 15), 20)
			}
			if granted != 100 {
				t.Errorf("%v were granted, want 100", granted)
			}
		})
	})
}

// 10,000 a day from 09:00 in New York, and a million a quarter from April.
func TestQuotasWithOtherEdges(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	eachQuota(t, true, time.Date(2026, 3, 7, 13, 59, 0, 0, time.UTC), func(t *testing.T, q *quotas) {
		day := ratelimit.FixedWindow{Name: "day", Rate: 10_000, Every: ratelimit.Day, Zone: "America/New_York", Time: 9 * time.Hour}
		quarter := ratelimit.FixedWindow{Name: "quarter", Rate: 1e6, Every: 3 * ratelimit.Month, Anchor: ratelimit.Date{Year: 2026, Month: time.April, Day: 1}}
		for _, step := range []struct {
			quota ratelimit.FixedWindow
			at    time.Time
			want  bool
		}{
			{day, q.now, true},
			{day, q.now.Add(59 * time.Second), false},
			{day, q.now.Add(time.Minute), true},
			{day, q.now.Add(23 * time.Hour), false}, // summer time has begun
			{day, q.now.Add(23*time.Hour + time.Minute), true},
			{quarter, time.Date(2026, 3, 31, 23, 0, 0, 0, time.UTC), true},
			{quarter, time.Date(2026, 3, 31, 23, 59, 0, 0, time.UTC), false},
			{quarter, time.Date(2026, 4, 1, 0, 0, 0, 0, time.UTC), true},
			{quarter, time.Date(2026, 6, 30, 23, 59, 0, 0, time.UTC), false},
			{quarter, time.Date(2026, 7, 1, 0, 0, 0, 0, time.UTC), true},
		} {
			q.now = step.at
			result, err := q.Allow(t.Context(), q.request(t, step.quota, step.quota.Rate))
			if err != nil || result.OK != step.want {
				t.Fatalf("%s at %v: %v, %v, want %v", step.quota.Name, step.at, result.OK, err, step.want)
			}
		}
	})
}

// A definition that replaces another one in SQL leaves the row that Go leaves, of whatever row there was: in
// debt, paused, with tokens that processes hold in memory, or none.
func TestFunctionChange(t *testing.T) {
	pgtest.Long(t)
	eachWay(t, func(t *testing.T, byName bool) {
		db := pgtest.New(t)
		now := usual
		f := withFunctions(t, db, func() time.Time { return now })
		f.byName = byName
		type row struct {
			Value  float64
			TS     time.Time
			Paused *time.Time
		}
		for seed := range uint64(300) {
			r := rand.New(rand.NewPCG(seed, 57))
			before, after := changed(r, byName)
			from, to := before.Limit(), after.Limit()
			now = usual.Add(time.Duration(r.Int64N(int64(100 * 24 * time.Hour)))).Truncate(time.Microsecond)
			around := func() time.Time {
				return now.Add(time.Duration((r.Float64()*2 - 1.5) * float64(before.Period))).Truncate(time.Microsecond)
			}
			was := []any{"k", before.Capacity * (r.Float64()*2 - 1), around(), nil, nil}
			if r.IntN(4) == 0 {
				was[3] = around()
			}
			if r.IntN(3) == 0 {
				was[4] = []float64{before.Capacity * r.Float64(), now.Add(time.Duration(r.IntN(4)-1) * time.Second).Sub(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)).Seconds()}
			}
			var got [2]row
			var answers [2]ratelimit.Status
			for i := range got {
				f.empty(t)
				store := []ratelimit.Store{f.Store, f}[i]
				if _, err := db.Pool.Exec(t.Context(), "INSERT INTO "+db.Schema+".rate_limits (name, key, shard, value, ts, paused, ahead) VALUES ('l', $1, 0, $2, $3, $4, $5)", was...); err != nil {
					t.Fatal(err)
				}
				var err error
				if answers[i], err = store.Change(t.Context(), from, to, "k"); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				if err := db.Pool.QueryRow(t.Context(), "SELECT value, ts, paused FROM "+db.Schema+".rate_limits").Scan(&got[i].Value, &got[i].TS, &got[i].Paused); err != nil {
					t.Fatal(err)
				}
			}
			if a, b := got[0], got[1]; math.Abs(a.Value-b.Value) > 1e-9*before.Capacity || !a.TS.Equal(b.TS) || (a.Paused == nil) != (b.Paused == nil) {
				t.Errorf("seed %d, at %v: %v of %v becomes %v\n%v in Go\n%v in SQL", seed, now, was, before, after, a, b)
			}
			if a, b := answers[0], answers[1]; a.OK != b.OK || math.Abs(a.Value-b.Value) > 1e-9*before.Capacity || a.RetryAfter != b.RetryAfter || !a.PausedUntil.Equal(b.PausedUntil) {
				t.Errorf("seed %d: %v in Go, %v in SQL", seed, a, b)
			}
		}
	})
}

// changed returns a random definition and what becomes of it.
func changed(r *rand.Rand, calendar bool) (before, after ratelimit.Definition) {
	kind := pick(r, "token bucket", "fixed window", "by the calendar")
	before = changeable(r, kind, calendar)
	after = before
	for range 1 + r.IntN(3) {
		other := changeable(r, kind, calendar)
		switch r.IntN(3) {
		case 0:
			after.Rate, after.Capacity = other.Rate, other.Capacity
		case 1:
			after.Period, after.Every = other.Period, other.Every
		default:
			after.Start, after.Anchor, after.Zone = other.Start, other.Anchor, other.Zone
		}
	}
	return before, after
}

// changeable is a random definition.
func changeable(r *rand.Rand, kind string, calendar bool) ratelimit.Definition {
	d := ratelimit.Definition{Name: "l", Kind: ratelimit.KindFixedWindow, Rate: float64(1 + r.IntN(100)), Shards: 1, MaxReserved: math.Inf(1)}
	d.Capacity = d.Rate
	switch d.Period = time.Duration(1+r.IntN(90)) * time.Minute; {
	case kind == "token bucket":
		d.Kind, d.Capacity = ratelimit.KindTokenBucket, float64(1+r.IntN(200))
	case kind == "by the calendar" && calendar:
		d.Period, d.Every = 0, pick(r, ratelimit.Day, ratelimit.Week, ratelimit.Month, 3*ratelimit.Month)
		d.Zone, d.Anchor = pick(r, "UTC", "Europe/Berlin", "America/New_York"), ratelimit.DateOf(usual.AddDate(0, 0, r.IntN(400)))
	case r.IntN(2) == 0:
		d.Start = usual.Add(time.Duration(r.Int64N(int64(time.Hour)))).Truncate(time.Microsecond)
	}
	return d.Limit().Definition()
}
