package pgstore_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

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
