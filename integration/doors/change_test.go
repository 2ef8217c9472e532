package doors

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

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
				must(t, errOf(db.Pool.Exec(t.Context(), "INSERT INTO "+db.Schema+".rate_limits (name, key, shard, value, ts, paused, ahead) VALUES ('l', $1, 0, $2, $3, $4, $5)", was...)))
				var err error
				if answers[i], err = store.Change(t.Context(), from, to, "k"); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				must(t, db.Pool.QueryRow(t.Context(), "SELECT value, ts, paused FROM "+db.Schema+".rate_limits").Scan(&got[i].Value, &got[i].TS, &got[i].Paused))
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
