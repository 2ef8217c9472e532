package pgstore_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// What a limit holds, and owes, is the same with another number of shards.
func TestChangeOfShards(t *testing.T) {
	t.Parallel()
	ctx, now := t.Context(), time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	db := pgtest.New(t)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Clock: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	sharded := func(n int) ratelimit.TokenBucket {
		return ratelimit.TokenBucket{Name: "l", Rate: 60, Period: time.Minute, Capacity: 120, Shards: n}
	}
	for _, test := range []struct {
		name  string
		from  int
		to    int
		take  float64
		wait  time.Duration
		value float64
	}{
		{"more", 2, 8, 100, 0, 20},
		{"fewer", 8, 3, 100, 0, 20},
		{"one", 8, 1, 50, 0, 70},
		{"fewer, later", 8, 1, 120, 10 * time.Second, 10},
		{"from one, in debt", 1, 4, 150, 0, -30},
		{"fewer, in debt", 6, 2, 150, 0, -30},
		{"no row yet", 4, 2, 0, 0, 120},
	} {
		t.Run(test.name, func(t *testing.T) {
			from, to := sharded(test.from), sharded(test.to)
			if err := store.Reset(ctx, from, "k"); err != nil {
				t.Fatal(err)
			}
			if test.take > 0 {
				if result, err := store.Reserve(ctx, from.ForN("k", test.take)); err != nil || !result.OK {
					t.Fatalf("Reserve() = %v, %v", result.OK, err)
				}
			}
			now = now.Add(test.wait)
			if _, err := store.Change(ctx, from, to, "k"); err != nil {
				t.Fatal(err)
			}
			result, err := store.Check(ctx, to.For("k"))
			if err != nil || result.Value < test.value-1e-6 || result.Value > test.value+1e-6 {
				t.Errorf("value = %v, %v, want %v", result.Value, err, test.value)
			}
			var rows, highest int
			sql := `SELECT count(*), coalesce(max(shard), -1) FROM ` + db.Schema + `.rate_limits WHERE name = 'l' AND key = 'k'`
			if err := db.Pool.QueryRow(ctx, sql).Scan(&rows, &highest); err != nil {
				t.Fatal(err)
			}
			// Those that are not used any more are empty: full ones, or none, would be
			// granted by who has the old definition.
			want := max(test.from, test.to)
			if test.take == 0 { // full by either
				want = 0
			}
			if rows != want || highest != want-1 {
				t.Errorf("%d rows up to shard %d, want %d", rows, highest, want)
			}
		})
	}
}

func TestChangeOfShardsKeepsPause(t *testing.T) {
	t.Parallel()
	ctx, now := t.Context(), time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	db := pgtest.New(t)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Clock: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name     string
		from, to ratelimit.Limit
	}{
		{
			"token bucket",
			ratelimit.TokenBucket{Name: "b", Rate: 4, Period: time.Second, Shards: 2},
			ratelimit.TokenBucket{Name: "b", Rate: 4, Period: time.Second, Shards: 4},
		},
		{
			"fixed window",
			ratelimit.FixedWindow{Name: "w", Rate: 4, Period: time.Second, Shards: 2},
			ratelimit.FixedWindow{Name: "w", Rate: 4, Period: time.Second, Shards: 4},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			until := now.Add(time.Hour)
			wantPaused(t, store, test.from, "k", now, until)
			if _, err := store.Change(ctx, test.from, test.to, "k"); err != nil {
				t.Fatal(err)
			}
			now = until.Add(-time.Microsecond)
			if result, err := store.Allow(ctx, test.to.ForN("k", 0.1)); err != nil || result.OK {
				t.Errorf("before the pause is over: %v, %v, want a refusal", result.OK, err)
			}
			now = until.Add(time.Second)
			if result, err := store.Allow(ctx, test.to.ForN("k", 4)); err != nil || !result.OK {
				t.Errorf("a period after the pause: %v, %v, want all of it", result.OK, err)
			}
		})
	}
}

// A definition of another name or kind, or a malformed one, is an error that names both, and
// changes nothing.
func TestChangeInvalid(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store := newStore(t, db)
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Hour}
	mustAllow(t, store, limit.ForN("k", 4))
	before, other, many := tableOf(t, db), limit, limit
	other.Name = "m"
	many.Shards = 11 // more than there are tokens
	for name, test := range map[string]struct {
		from, to ratelimit.Limit
		want     string
	}{
		"another name": {limit, other, `limit "l": Name "m": must be the name`},
		"another kind": {limit, ratelimit.FixedWindow{Name: "l", Rate: 10, Period: time.Hour}, `limit "l": Kind fixed window: must be that of the definition that is replaced, token bucket`},
		"too many":     {limit, many, "Shards"},
		"no from":      {nil, limit, "Limit"},
		"no to":        {limit, (*ratelimit.TokenBucket)(nil), "Limit"},
	} {
		_, err := store.Change(t.Context(), test.from, test.to, "k")
		_, inMemory := memstore.New(nil).Change(t.Context(), test.from, test.to, "k")
		if !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), test.want) || err.Error() != inMemory.Error() {
			t.Errorf("%s: got %v and in memory %v, want %q", name, err, inMemory, test.want)
		}
	}
	if after := tableOf(t, db); !slices.Equal(after, before) {
		t.Errorf("the table is %v, want %v", after, before)
	}
}

// What support does with quotas, by the month and by the hour, in memory and in every form of the
// database: docs/calendar.md has the table.
func TestChangeOfQuotas(t *testing.T) {
	t.Parallel()
	quota := func(rate float64) ratelimit.FixedWindow {
		return ratelimit.FixedWindow{Name: "quota", Rate: rate, Every: ratelimit.Month}
	}
	hourly := func(rate float64) ratelimit.FixedWindow {
		return ratelimit.FixedWindow{Name: "quota", Rate: rate, Period: time.Hour, Start: noon}
	}
	anchored := func(day int) ratelimit.FixedWindow {
		l := quota(100)
		l.Anchor = ratelimit.Date{Year: 2026, Month: time.June, Day: day}
		return l
	}
	at := func(day int) time.Time { return time.Date(2026, 6, day, 12, 30, 0, 0, time.UTC) }
	change := func(t *testing.T, v verbs, from, to ratelimit.Limit) {
		t.Helper()
		if _, err := v.Change(t.Context(), from, to, "acme"); err != nil {
			t.Fatal(err)
		}
	}
	wantLeft := func(t *testing.T, v verbs, l ratelimit.Limit, want float64) {
		t.Helper()
		if got, err := v.Check(t.Context(), l.ForN("acme", 0)); err != nil || got.Value != want {
			t.Errorf("%v left, %v, want %v", got.Value, err, want)
		}
	}
	type story struct {
		name string
		tell func(t *testing.T, c *clock, v verbs)
	}
	changed := func(name string, from, to ratelimit.Limit, used, want float64) story {
		return story{name, func(t *testing.T, c *clock, v verbs) {
			mustAllow(t, v, from.ForN("acme", used))
			c.add(time.Minute)
			change(t, v, from, to)
			wantLeft(t, v, to, want)
		}}
	}
	for _, s := range []story{
		changed("a month used up, raised", quota(100), quota(200), 100, 100),
		changed("a month cut", quota(200), quota(100), 50, 50),
		changed("a month cut below what was used", quota(200), quota(100), 150, 0),
		changed("an hour used up, raised", hourly(100), hourly(200), 100, 100),
		changed("an hour cut", hourly(200), hourly(100), 50, 50),
		changed("an hour cut below what was used", hourly(200), hourly(100), 150, 0),
		{"in debt", func(t *testing.T, _ *clock, v verbs) {
			if result, err := v.Reserve(t.Context(), quota(100).ForN("acme", 130)); err != nil || !result.OK {
				t.Fatal(result, err)
			}
			change(t, v, quota(100), quota(50))
			wantLeft(t, v, quota(50), -30)
			change(t, v, quota(50), quota(60))
			wantLeft(t, v, quota(60), -20)
		}},
		{"the anchor moves from the 1st to the 15th", func(t *testing.T, c *clock, v verbs) {
			mustAllow(t, v, anchored(1).ForN("acme", 60))
			c.set(at(20))
			change(t, v, anchored(1), anchored(15))
			wantLeft(t, v, anchored(15), 40)
		}},
		{"the anchor is set to tomorrow each day", func(t *testing.T, c *clock, v verbs) {
			now, granted := anchored(1), 0.0
			for day := 10; day < 17; day++ {
				c.set(at(day))
				for {
					if result, err := v.Allow(t.Context(), now.ForN("acme", 10)); err != nil {
						t.Fatal(err)
					} else if !result.OK {
						break
					}
					granted += 10
				}
				change(t, v, now, anchored(day+1))
				now = anchored(day + 1)
			}
			if granted != 100 {
				t.Errorf("%v were granted in a week, want 100", granted)
			}
		}},
		{"a key that has used nothing", func(t *testing.T, _ *clock, v verbs) {
			change(t, v, quota(100), quota(200))
			wantLeft(t, v, quota(200), 200)
		}},
	} {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			c := newClock()
			c.set(at(10))
			s.tell(t, c, memstore.New(c.now))
			for _, form := range forms {
				if form.remember > 0 || form.sql {
					continue
				}
				t.Run(form.name, func(t *testing.T) {
					db, c := pgtest.New(t), newClock()
					c.set(at(10))
					store := newStore(t, db, onClock(c), form.configure)
					if !form.inTx {
						s.tell(t, c, store)
						return
					}
					s.tell(t, c, txVerbs{store, begin(t, db, form.level)})
				})
			}
		})
	}
}

// A change that is rolled back did not happen.
func TestChangeRolledBack(t *testing.T) {
	t.Parallel()
	db, c := pgtest.New(t), newClock()
	memory := memstore.New(c.now)
	store := newStore(t, db, onClock(c))
	small, large := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Hour}, ratelimit.TokenBucket{Name: "l", Rate: 30, Period: time.Hour}
	for name, s := range map[string]struct {
		verbs
		change func(tx pgx.Tx) (ratelimit.Status, error)
		begin  func(ctx context.Context) (pgx.Tx, error)
	}{
		"memory":   {memory, func(tx pgx.Tx) (ratelimit.Status, error) { return memory.ChangeTx(t.Context(), tx, small, large, "k") }, memory.Begin},
		"postgres": {store, func(tx pgx.Tx) (ratelimit.Status, error) { return store.ChangeTx(t.Context(), tx, small, large, "k") }, db.Pool.Begin},
	} {
		mustAllow(t, s, small.ForN("k", 10))
		tx, err := s.begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if status, err := s.change(tx); err != nil || status.Value != 20 {
			t.Errorf("%s: %v left in the transaction, %v, want 20", name, status.Value, err)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if result, err := s.Check(t.Context(), large.For("k")); err != nil || result.OK {
			t.Errorf("%s: %v left, %v, want none", name, result.Value, err)
		}
	}
}

// A process that still has the old definition cuts what a raise has added to the old capacity.
func TestChangeIsCutByTheOldDefinition(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, late := newStore(t, db), newStore(t, db)
	small, large := slowWindow("l", 50), slowWindow("l", 1000)
	large.Start = small.Start
	mustAllow(t, store, small.ForN("acme", 50))
	if status, err := store.Change(t.Context(), small, large, "acme"); err != nil || status.Value != 950 {
		t.Fatalf("%v left, %v, want 950", status.Value, err)
	}
	mustAllow(t, late, small.For("acme"))
	if left := leftOf(t, store, large, "acme"); left != 49 {
		t.Errorf("%v left, want 49", left)
	}
}

// Takes beside changes, by whichever definition, get no more than the last capacity together.
func TestChangeBesideTakes(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 4} {
		db := pgtest.New(t)
		limits := make([]ratelimit.Limit, 5)
		for i := range limits {
			limits[i] = shardedSlow("l", float64(40*(i+1)), shards)
		}
		store, granted := newStore(t, db), atomic.Int64{}
		var group sync.WaitGroup
		for i := range 4 {
			group.Go(func() {
				for n := range 60 {
					result, err := store.Allow(t.Context(), limits[(n/12+i%2)%len(limits)].For("k"))
					if err != nil {
						t.Error(err)
					} else if result.OK {
						granted.Add(1)
					}
				}
			})
		}
		for i := range limits[1:] {
			if _, err := store.Change(t.Context(), limits[i], limits[i+1], "k"); err != nil {
				t.Error(err)
			}
		}
		group.Wait()
		if left := leftOf(t, store, limits[4], "k"); float64(granted.Load())+left > 200+1e-6 {
			t.Errorf("%d shards: %d were granted, and %v are left, of 200", shards, granted.Load(), left)
		}
	}
}
